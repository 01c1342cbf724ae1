//! How turns go round.

use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use ocgpu_core::{Pacer, PeerState, Schedule, Settings};

use crate::puppet::{
    BOOST, INREQ, Puppet, QUEUED, TURN_FLAGS, UNGATED, V, WAKE, begin, compute, ext, holder,
};
use crate::scratch::{Scratch, now, wait_until};

#[test]
fn no_two_compute_at_once_and_all_get_turns() {
    let scratch = Scratch::new("exclusion");
    let card = Mutex::new(());
    let units = Mutex::new([0_u32; 3]);

    thread::scope(|scope| {
        for index in 0..3 {
            let (pacer, card, units) = (scratch.join("peer"), &card, &units);
            scope.spawn(move || {
                let started = now();
                while started.elapsed() < Duration::from_secs(2) {
                    begin(&pacer);
                    let alone = card.try_lock();
                    compute(Duration::from_millis(2 + 4 * index));
                    drop(alone.expect("nobody else on the card"));
                    pacer.done();
                    units.lock().expect("no panic")[usize::try_from(index).expect("small")] += 1;
                }
                pacer.idle();
            });
        }
    });

    let units = units.into_inner().expect("no panic");
    assert!(units.iter().all(|count| *count > 10), "{units:?}");
}

#[test]
fn the_turn_of_a_peer_that_cannot_wait_is_waited_out_and_charged() {
    let scratch = Scratch::new("ungated");
    let pacer = scratch.join("gated");
    let puppet = Puppet::with_weight(&scratch, UNGATED, INREQ, 3.0);
    let started = now();
    let (mut rests, mut slept) = (0, Duration::ZERO);

    while started.elapsed() < Duration::from_secs(1) {
        puppet.beat();
        let before = puppet.0.u64(ext(Puppet::SLOT) + V);
        let waited = begin(&pacer);
        if waited > Duration::from_millis(10) {
            rests += 1;
            slept += waited;
            assert!(puppet.0.u64(ext(Puppet::SLOT) + V) > before, "a turn that cost it nothing");
        }
        compute(Duration::from_millis(4));
        pacer.done();
    }

    // Weight 3 beside 1: of a round it has half of our turn, 40 ms, and the rest, 40 ms.
    assert!(rests >= 3, "{rests}");
    assert!(slept.as_secs_f64() / started.elapsed().as_secs_f64() > 0.3, "{slept:?}");
}

#[test]
fn a_peer_that_cannot_wait_and_has_its_share_anyway_is_not_waited_for() {
    let scratch = Scratch::new("driver");
    let pacer = scratch.join("gated");
    let puppet = Puppet::new(&scratch, UNGATED, INREQ);

    for _ in 0..100 {
        puppet.beat();
        assert!(pacer.arrive());
        compute(Duration::from_millis(3));
        pacer.done();
    }
}

#[test]
fn a_peer_of_the_seed_at_work_puts_all_on_the_grid_and_the_token_is_free() {
    let scratch = Scratch::new("mixed");
    let pacer = scratch.join("ours");
    assert!(pacer.arrive());
    let puppet = Puppet::new(&scratch, 0, 0);
    puppet.write(0, &0_u64.to_le_bytes());

    wait_until("a gate of the grid", || {
        let _ = pacer.arrive();
        holder(&puppet.0).is_none()
    });

    assert_eq!(pacer.snapshot().schedule, Schedule::Grid);
    wait_until("the windows of the other", || !pacer.arrive());
    wait_until("our own again", || pacer.wait(Duration::from_millis(50)));
}

#[test]
fn who_comes_to_work_with_no_debt_asks_to_go_first() {
    let scratch = Scratch::new("boost");
    let pacer = scratch.join("ours");
    assert!(pacer.arrive());
    pacer.idle();
    let puppet = Puppet::new(&scratch, 0, INREQ);
    puppet.write(V, &1_000_000_u64.to_le_bytes());
    puppet.take_token();

    assert!(!pacer.arrive());

    let flags = puppet.0.u64(ext(0) + TURN_FLAGS) & 15;
    assert_eq!(flags, u64::from(INREQ | QUEUED) | BOOST);
}

#[test]
fn a_newcomer_asks_for_nothing_before_its_time() {
    let scratch = Scratch::new("newcomer");
    let pacer = scratch.join("ours");
    let puppet = Puppet::new(&scratch, 0, INREQ);
    puppet.write(V, &1_000_000_u64.to_le_bytes());
    puppet.take_token();

    assert!(!pacer.arrive());

    assert_eq!(puppet.0.u64(ext(0) + TURN_FLAGS) & 15, u64::from(INREQ | QUEUED));
    assert_eq!(puppet.0.u64(ext(0) + V), 1_000_000);
}

#[test]
fn a_free_turn_goes_to_who_waits_and_not_to_who_comes() {
    let scratch = Scratch::new("free");
    let pacer = scratch.join("comes");
    let puppet = Puppet::new(&scratch, 0, INREQ | QUEUED);

    assert!(!pacer.arrive());

    assert!(puppet.has_token());
}

#[test]
fn a_peer_of_ours_that_wants_the_grid_puts_all_on_it() {
    let scratch = Scratch::new("wanted");
    let a = scratch.join("a");
    let b = Pacer::join(Settings { schedule: Schedule::Grid, ..scratch.settings("b") }).expect("a place");
    assert!(a.arrive());
    assert_eq!(holder(&scratch.bytes()), Some(0));

    b.open_request();
    let _ = a.arrive();

    assert_eq!(holder(&scratch.bytes()), None);
    assert_eq!(a.snapshot().schedule, Schedule::Grid);
}

#[test]
fn on_the_grid_too_the_end_of_a_request_wakes_who_waits() {
    let scratch = Scratch::new("reflow");
    let a = scratch.join("a");
    let b = Pacer::join(Settings { schedule: Schedule::Grid, ..scratch.settings("b") }).expect("a place");
    a.open_request();
    wait_until("a window of the other", || !b.arrive());
    let bytes = scratch.bytes();
    let before = bytes.u64(ext(1) + WAKE) & 0xffff_ffff;

    a.close_request();

    assert!(bytes.u64(ext(1) + WAKE) & 0xffff_ffff > before);
    assert!(b.look());
}

#[test]
fn a_waiter_is_seen_to_wait_and_the_end_of_a_request_lets_it_go_on() {
    let scratch = Scratch::new("waiter");
    let (a, b) = (scratch.join("a"), scratch.join("b"));
    a.open_request();
    assert!(a.arrive());
    assert!(!b.arrive());

    let states = |pacer: &Pacer| pacer.snapshot().own.map(|own| own.state);
    assert_eq!((states(&a), states(&b)), (Some(PeerState::Running), Some(PeerState::Waiting)));
    a.close_request();

    assert_eq!(holder(&scratch.bytes()), Some(1));
    assert!(b.look());
    assert_eq!((states(&a), states(&b)), (Some(PeerState::Idle), Some(PeerState::Running)));
}

#[test]
fn the_end_of_a_request_passes_on_a_turn_that_was_not_over() {
    let scratch = Scratch::new("rest");
    let pacer = scratch.join("ours");
    pacer.open_request();
    assert!(pacer.arrive());
    let puppet = Puppet::new(&scratch, 0, INREQ | QUEUED);
    compute(Duration::from_millis(1));
    pacer.done();
    assert_eq!(holder(&puppet.0), Some(0));

    pacer.close_request();

    assert!(puppet.has_token());
}

#[test]
fn a_wait_that_is_given_up_leaves_no_trace() {
    let scratch = Scratch::new("abandon");
    let (a, b) = (scratch.join("a"), scratch.join("b"));
    assert!(a.arrive());
    assert!(!b.arrive());

    b.abandon();

    for _ in 0..100 {
        assert!(a.arrive());
    }
}

#[test]
fn a_turn_that_comes_to_one_that_gave_up_goes_to_the_next_one() {
    let scratch = Scratch::new("pass");
    let (a, b, c) = (scratch.join("a"), scratch.join("b"), scratch.join("c"));
    assert!(a.arrive());
    assert!(!b.arrive());
    assert!(!c.arrive());
    a.idle();
    assert_eq!(holder(&scratch.bytes()), Some(1));

    b.abandon();

    assert_eq!(holder(&scratch.bytes()), Some(2));
    assert!(c.look());
}
