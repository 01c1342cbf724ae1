//! Every interleaving of the peers around one slot: claims, releases, looks, beats, deaths and stops at any step.
//!
//! The steps are those of `registry/claim.rs` and `registry/liveness.rs`, each atomic access one of them. The seed's rule
//! is searched too, and must be found to break: a search that finds nothing there would find nothing anywhere.

mod lock_peer;
mod slot;
mod world;

use std::collections::HashSet;

use world::{LOCK, SEED, Setup, World};

/// What a search found.
enum Found {
    /// So many worlds, all right.
    Nothing(usize),
    /// The steps to the first world that is wrong, the shortest way.
    Wrong(Vec<String>),
}

/// A world, and how it was reached first: from which, by whose step, with a word about it.
type Reached = (World, usize, usize, &'static str);

fn search(setup: &Setup) -> Found {
    let mut worlds: Vec<Reached> = vec![(World::new(setup), 0, 0, "")];
    let mut known = HashSet::from([worlds[0].0]);
    let mut at = 0;
    while at < worlds.len() {
        for (mut next, who, what) in worlds[at].0.next(setup) {
            if next.wrong.is_none() && owners(setup, &next) > 1 {
                next.wrong = Some("two of ours have the slot");
            }
            if let Some(wrong) = next.wrong {
                return Found::Wrong(trace(&worlds, (next, at, who, what), wrong));
            }
            if known.insert(next) {
                worlds.push((next, at, who, what));
            }
        }
        at += 1;
    }
    Found::Nothing(worlds.len())
}

fn trace(worlds: &[Reached], last: Reached, wrong: &str) -> Vec<String> {
    let mut steps = vec![wrong.to_owned()];
    let mut reached = last;
    while reached.3 != worlds[0].3 || reached.0 != worlds[0].0 {
        let (_, from, who, what) = reached;
        steps.push(format!("peer {who} {:?} {what}", worlds[from].0.peers[who].step));
        reached = worlds[from];
    }
    steps.reverse();
    steps
}

fn owners(setup: &Setup, world: &World) -> usize {
    let ours = |who: usize| setup.rules[who] == LOCK && world.peers[who].step.has_slot();
    (0..3).filter(|who| ours(*who)).count()
}

const OURS: Setup = Setup {
    rules: [LOCK, LOCK, LOCK],
    pids: [1, 2, 3],
    pids_return: [true; 3],
    settle: true,
    theft_is_wrong: true,
    crashes: 1,
    stops: 1,
    claims: 2,
};

const MIXED: Setup = Setup { rules: [LOCK, LOCK, SEED], pids_return: [false; 3], ..OURS };

#[track_caller]
#[expect(clippy::print_stderr, reason = "how much was searched")]
fn assert_right(setup: &Setup) {
    match search(setup) {
        Found::Nothing(worlds) => {
            eprintln!("{worlds} worlds");
            assert!(worlds > 10_000, "too few: {worlds}");
        }
        Found::Wrong(steps) => panic!("{}", steps.join("\n")),
    }
}

#[track_caller]
#[expect(clippy::print_stderr, reason = "how it breaks")]
fn assert_wrong(setup: &Setup, what: &str) {
    let Found::Wrong(steps) = search(setup) else { panic!("nothing found") };
    eprintln!("{}", steps.join("\n"));
    assert!(steps.last().is_some_and(|last| last.starts_with(what)), "{steps:?}");
}

#[test]
fn the_seeds_rule_gives_one_slot_to_two() {
    let setup = Setup { rules: [SEED, SEED, None], pids: [1, 2, 0], crashes: 0, stops: 0, ..OURS };

    assert_wrong(&setup, "a peer of the seed took the slot of one that runs");
}

#[test]
fn three_of_ours_never_share_a_slot_or_lose_one() {
    assert_right(&Setup { pids_return: [false; 3], stops: 0, ..OURS });
}

#[test]
fn three_of_ours_with_one_pid_never_share_a_slot_or_lose_one() {
    assert_right(&Setup { pids: [1, 1, 1], ..OURS });
}

#[test]
fn two_of_ours_and_one_of_the_seeds_never_share_a_slot_or_lose_one() {
    assert_right(&MIXED);
    assert_right(&Setup { stops: 0, claims: 3, ..MIXED });
}

#[test]
fn without_a_settled_look_a_peer_of_the_seed_would_lose_its_slot() {
    assert_wrong(&Setup { settle: false, ..MIXED }, "a living peer's slot was freed");
}

/// What cannot be prevented: the seed's swap takes our slot for that of a dead one with our pid. Nothing else happens.
#[test]
fn where_our_pids_are_equal_only_the_seeds_own_swap_takes_a_slot() {
    let setup = Setup { pids: [1, 1, 3], pids_return: [true, true, false], stops: 0, claims: 3, ..MIXED };

    assert_wrong(&setup, "a peer of the seed took the slot of one that runs");
    assert_right(&Setup { theft_is_wrong: false, ..setup });
}

/// What cannot be prevented either: our swap takes the slot of a peer of the seed for that of a dead one with its pid.
#[test]
fn where_all_pids_are_equal_a_peer_of_the_seed_can_lose_its_slot() {
    let setup = Setup { pids: [1, 1, 1], pids_return: [true; 3], theft_is_wrong: false, ..MIXED };

    assert_wrong(&setup, "a living peer's slot was freed");
}
