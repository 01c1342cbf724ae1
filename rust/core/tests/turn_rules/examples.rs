//! The rules at one value each, and beside a hostile peer.

use ocgpu_core::SLOT_COUNT;
use ocgpu_core::schedule::{DEBT_MAX_US, Round, TurnPeer, Want};

use crate::members::{peer, two};

#[test]
fn a_turn_ends_half_a_turn_ahead_at_the_nearest_step() {
    // Period 80 ms, quantum 40 ms: half a turn is 20 ms ahead of the mean, 40 ms ahead of the other.
    let ahead = |by_us| two(peer(by_us, Want::Nothing), peer(0, Want::Turn)).must_yield(0, 10_000);

    assert!(!ahead(31_000));
    assert!(ahead(33_000));
}

#[test]
fn a_turn_is_stretched_to_five_quarters_of_its_quantum_while_somebody_used_less() {
    // Far behind the mean, ahead of the one who waits.
    let mut members = [None; SLOT_COUNT];
    members[0] = Some(peer(0, Want::Nothing));
    members[1] = Some(peer(-1, Want::Turn));
    members[2] = Some(peer(900_000, Want::Nothing));
    let round = Round::new(&members);

    // Period 120 ms, quantum 40 ms.
    assert_eq!(round.remaining_us(0, 0), round.quantum_us(0) * 5 / 4);
    assert!(!round.must_yield(0, 45_000));
    assert!(round.must_yield(0, 47_000));
}

#[test]
fn a_boosted_one_ends_the_turn_of_one_that_used_more() {
    let holder = peer(5000, Want::Nothing);

    assert!(two(holder, peer(4000, Want::Boost)).must_yield(0, 1000));
    assert!(!two(holder, peer(4000, Want::Turn)).must_yield(0, 1000));
    assert!(!two(holder, peer(5000, Want::Boost)).must_yield(0, 1000));
}

/// Peers 0 and 1, weights 2:1, take turns as a real shell would while peer 2 shows the same hostile virtual time for
/// ever and never takes part. Answers with how often the turn changed hands and the longest turn.
fn beside_a_hostile_time(v_us: i64, want: Want) -> (u32, u64) {
    let mut members = [None; SLOT_COUNT];
    members[0] = Some(TurnPeer { weight_milli: 2000, ..peer(0, Want::Nothing) });
    members[1] = Some(peer(0, Want::Turn));
    members[2] = Some(peer(v_us, want));
    let (mut holder, mut used_us, mut longest_us, mut changes) = (0, 0, 0, 0);
    for _ in 0..2000 {
        let charged_us = Round::new(&members).charge(holder, 8000);
        members[holder].as_mut().expect("a member").v_us = charged_us;
        used_us += 8000;
        longest_us = used_us.max(longest_us);
        if !Round::new(&members).must_yield(holder, used_us) {
            continue;
        }
        members[holder].as_mut().expect("a member").want = Want::Turn;
        // The hostile one does not begin: its turn is taken.
        holder = 1 - holder;
        members[holder].as_mut().expect("a member").want = Want::Nothing;
        (used_us, changes) = (0, changes + 1);
    }
    (changes, longest_us)
}

#[test]
fn a_hostile_virtual_time_costs_shares_but_hangs_nobody() {
    for v_us in [i64::MIN, i64::MAX, 0, -DEBT_MAX_US] {
        for want in [Want::Nothing, Want::Turn, Want::Ungated] {
            let (changes, longest_us) = beside_a_hostile_time(v_us, want);

            // A natural round is 163 ms; five quarters of it and a step.
            assert!(longest_us <= 212_000 && changes >= 50, "{v_us} {want:?}: {changes}, {longest_us} us");
        }
    }
}
