use proptest::prelude::*;

use super::*;

const BEAT_US: u64 = 500_000;
const NOW_US: i64 = 1_700_000_000_000_000;

fn look(lock: Liveness, wall_age_us: i64, moved_ago_us: Option<u64>, unchanged_us: u64) -> Look {
    Look { lock, claiming: false, wall_age_us, moved_ago_us, unchanged_us }
}

#[test]
fn a_free_lock_is_death_whatever_the_heartbeat_says() {
    assert_eq!(judge(look(Liveness::Free, 0, Some(0), 0)), Verdict::Dead);
}

#[test]
fn a_held_lock_without_movement_is_a_stall() {
    assert_eq!(judge(look(Liveness::Held, 0, Some(3_000_001), 0)), Verdict::Stalled);
    assert_eq!(judge(look(Liveness::Held, 9_000_000, None, SETTLE_US)), Verdict::Stalled);
}

#[test]
fn a_clock_step_of_an_hour_kills_nobody_that_was_seen_before() {
    for age in [3_600_000_000, -3_600_000_000] {
        for lock in [Liveness::Held, Liveness::Unknown] {
            assert_eq!(judge(look(lock, age, Some(400_000), 400_000)), Verdict::Alive);
        }
    }
}

#[test]
fn a_seed_peers_slot_is_freed_only_after_a_long_unchanged_look() {
    let silent = |wall_age_us, unchanged_us| judge(look(Liveness::Unknown, wall_age_us, None, unchanged_us));

    assert_eq!(silent(9_000_000, SETTLE_US - 1), Verdict::Silent);
    assert_eq!(silent(9_000_000, SETTLE_US), Verdict::Dead);
    assert_eq!(silent(-9_000_000, SETTLE_US), Verdict::Dead);
    assert_eq!(silent(0, SETTLE_US), Verdict::Alive);
}

#[test]
fn a_seed_peer_is_judged_by_its_heartbeat_alone() {
    assert_eq!(judge(look(Liveness::Unknown, 2_900_000, None, 0)), Verdict::Alive);
    assert_eq!(judge(look(Liveness::Unknown, 3_100_000, None, 0)), Verdict::Silent);
    assert_eq!(judge(look(Liveness::Unknown, -600_000, None, 0)), Verdict::Silent);
}

#[test]
fn a_death_in_the_middle_of_a_claim_counts_after_a_settled_look() {
    let claiming =
        |unchanged_us| judge(Look { claiming: true, ..look(Liveness::Free, 0, None, unchanged_us) });

    assert_eq!(claiming(SETTLE_US - 1), Verdict::Alive);
    assert_eq!(claiming(SETTLE_US), Verdict::Dead);
}

/// One peer and one reader of it, on clocks of their own.
struct Pair {
    seen: Seen,
    now_us: u64,
    wall_us: i64,
    heartbeat_us: i64,
}

impl Pair {
    fn new(age_us: i64) -> Self {
        Self { seen: Seen::default(), now_us: 0, wall_us: NOW_US, heartbeat_us: NOW_US - age_us }
    }

    /// Half a second later, after the wall clock was set by `step_us`.
    fn pass(&mut self, step_us: i64, beats: bool) {
        self.now_us += BEAT_US;
        self.wall_us += i64::try_from(BEAT_US).expect("small") + step_us;
        if beats {
            self.heartbeat_us = self.wall_us - 1_000;
        }
    }

    fn look(&mut self, lock: Liveness) -> Look {
        let view = SlotView {
            slot: 0,
            pid: 7,
            boot_us: 1,
            owner_token: 0,
            weight: 1.0,
            active: true,
            heartbeat_us: self.heartbeat_us,
            busy_ppm: 0,
            name: String::new(),
            flags: 0,
            uid: 0,
            queued: false,
            steps: 0,
            slept_us: 0,
        };
        self.seen.see(&view, self.now_us);
        self.seen.look(&view, lock, self.now_us, self.wall_us)
    }
}

fn steps() -> impl Strategy<Value = Vec<i64>> {
    let step = prop_oneof![
        6 => Just(0),
        1 => Just(1_000_000),
        1 => Just(-1_000_000),
        1 => Just(3_600_000_000),
        1 => Just(-3_600_000_000),
    ];
    proptest::collection::vec(step, 60)
}

proptest! {
    #[test]
    fn nobody_that_beats_is_judged_dead_however_the_clock_is_set(steps in steps(), locked: bool) {
        let lock = if locked { Liveness::Held } else { Liveness::Unknown };
        let mut pair = Pair::new(0);
        let mut watched = vec![judge(pair.look(lock))];

        for step_us in steps {
            pair.pass(step_us, true);
            watched.push(judge(pair.look(lock)));
        }

        prop_assert!(watched.iter().all(|verdict| *verdict == Verdict::Alive), "{watched:?}");
    }

    #[test]
    fn nobody_that_beats_is_judged_dead_whatever_its_clock_said_before_the_first_look(
        steps in steps(),
        age_us in -4_000_000_000_i64..4_000_000_000,
    ) {
        let mut pair = Pair::new(age_us);
        let first = judge(pair.look(Liveness::Unknown));
        prop_assert_ne!(first, Verdict::Dead);

        for step_us in steps {
            pair.pass(step_us, true);
            prop_assert_eq!(judge(pair.look(Liveness::Unknown)), Verdict::Alive);
        }
    }

    #[test]
    fn a_dead_peer_without_a_lock_is_freed_however_the_clock_is_set(steps in steps()) {
        let mut pair = Pair::new(0);
        for step_us in steps {
            pair.pass(step_us, false);
            pair.look(Liveness::Unknown);
        }

        // A clock that was set back may make its last beat look young once more, for as long as that lasts.
        let freed = (0..8).any(|_| {
            pair.pass(0, false);
            judge(pair.look(Liveness::Unknown)) == Verdict::Dead
        });

        prop_assert!(freed);
    }
}
