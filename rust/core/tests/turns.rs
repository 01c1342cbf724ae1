//! Promises of turn mode, with live pacers, and with peers that exist in the segment's bytes only and so can do what no
//! honest one does.

mod scratch;

use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use ocgpu_core::{Pacer, PeerState, SLOT_COUNT, Schedule, wall_us};

use scratch::{Bytes, Scratch, now, pause, wait_until};

const TOKEN: usize = 3648;
const HEARTBEAT: usize = 24;
const FLAGS: usize = 12;
const V: usize = 64;
const TURN_FLAGS: usize = 72;
const PROGRESS: usize = 76;
const TURN_LIMIT: usize = 88;
const HAS_LOCK: u32 = 1;
const UNGATED: u32 = 64;
const INREQ: u32 = 1;
const QUEUED: u32 = 2;
const BOOST: u64 = 4;
const OVERDUE: u64 = 8;
const WATCHDOG: Duration = Duration::from_secs(10);

fn base(slot: usize) -> usize {
    16 + 88 * slot
}

fn ext(slot: usize) -> usize {
    1600 + 128 * slot
}

/// A peer of turn mode that consists of bytes: at work in slot 9, without a lock, its heart beaten by `beat`.
struct Puppet(Bytes);

impl Puppet {
    const SLOT: usize = 9;
    const PID: u32 = 4242;

    fn new(scratch: &Scratch, flags: u32, turn_flags: u32) -> Self {
        Self::with_weight(scratch, flags, turn_flags, 1.0)
    }

    fn with_weight(scratch: &Scratch, flags: u32, turn_flags: u32, weight: f32) -> Self {
        let bytes = scratch.bytes();
        let (base, ext, now) = (base(Self::SLOT), ext(Self::SLOT), wall_us());
        bytes.write(base + 8, &now.to_le_bytes());
        bytes.write(base + 16, &weight.to_le_bytes());
        bytes.write(base + HEARTBEAT, &now.to_le_bytes());
        bytes.write(ext + 8, &Self::PID.to_le_bytes());
        bytes.write(ext + FLAGS, &flags.to_le_bytes());
        bytes.write(ext + 16, &now.to_le_bytes());
        bytes.write(ext + TURN_FLAGS, &turn_flags.to_le_bytes());
        bytes.write(ext + TURN_LIMIT, &100_000_u32.to_le_bytes());
        bytes.write(ext, &77_u64.to_le_bytes());
        bytes.write(base, &Self::PID.to_le_bytes());
        bytes.write(base + 20, &1_u32.to_le_bytes());
        Self(bytes)
    }

    fn write(&self, field: usize, value: &[u8]) {
        self.0.write(ext(Self::SLOT) + field, value);
    }

    fn beat(&self) {
        self.0.write(base(Self::SLOT) + HEARTBEAT, &wall_us().to_le_bytes());
    }

    fn take_token(&self) {
        let generation = (self.0.u64(TOKEN) >> 16) + 1;
        self.0.write(TOKEN, &(generation << 16 | (Self::SLOT as u64 + 1)).to_le_bytes());
    }

    fn has_token(&self) -> bool {
        holder(&self.0) == Some(Self::SLOT)
    }
}

fn holder(bytes: &Bytes) -> Option<usize> {
    usize::try_from(bytes.u64(TOKEN) & 0xffff).expect("16 bits").checked_sub(1)
}

/// Begin a unit, waiting for as long as it takes.
fn begin(pacer: &Pacer) -> Duration {
    let started = now();
    let mut begun = pacer.arrive();
    while !begun {
        assert!(started.elapsed() < WATCHDOG, "no turn within {WATCHDOG:?}");
        begun = pacer.wait(Duration::from_millis(50));
    }
    started.elapsed()
}

fn compute(span: Duration) {
    let started = now();
    while started.elapsed() < span {
        pause();
    }
}

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
fn whatever_the_token_holds_a_step_that_is_alone_begins_at_once() {
    let scratch = Scratch::new("garbage");
    let pacer = scratch.join("only");
    let bytes = scratch.bytes();

    for token in [0, 5, 10, 0xffff, u64::MAX, u64::MAX - 0xffff, 1 << 16 | 9] {
        bytes.write(TOKEN, &token.to_le_bytes());

        assert!(pacer.arrive(), "{token:#x}");
        assert_eq!(holder(&bytes), Some(0), "{token:#x}");
    }
}

#[test]
fn a_holder_that_does_not_move_loses_its_turn_after_its_limit_and_is_passed_over_until_it_moves() {
    let scratch = Scratch::new("still");
    let pacer = scratch.join("survivor");
    let puppet = Puppet::new(&scratch, 0, INREQ);
    puppet.take_token();

    let waited = begin(&pacer);
    puppet.write(TURN_FLAGS, &(INREQ | QUEUED).to_le_bytes());
    for _ in 0..40 {
        compute(Duration::from_millis(5));
        assert!(pacer.arrive(), "a suspect was given a turn");
    }

    assert!(waited >= Duration::from_millis(100), "{waited:?}");
    puppet.write(PROGRESS, &5_u32.to_le_bytes());
    wait_until("the peer that moved to get a turn", || {
        puppet.beat();
        pacer.done();
        let _ = pacer.arrive();
        puppet.has_token()
    });
}

#[test]
fn a_peer_that_does_not_take_its_turn_is_passed_over() {
    let scratch = Scratch::new("untaken");
    let pacer = scratch.join("survivor");
    let puppet = Puppet::new(&scratch, 0, INREQ | QUEUED);
    puppet.write(TURN_LIMIT, &2_000_000_u32.to_le_bytes());
    puppet.take_token();

    let waited = begin(&pacer);

    assert!((Duration::from_millis(20)..Duration::from_millis(1500)).contains(&waited), "{waited:?}");
}

#[test]
fn the_turn_of_a_dead_holder_is_taken_without_waiting_for_its_limit() {
    let scratch = Scratch::new("dead");
    let pacer = scratch.join("survivor");
    let puppet = Puppet::new(&scratch, HAS_LOCK, INREQ);
    puppet.write(TURN_LIMIT, &2_000_000_u32.to_le_bytes());
    puppet.take_token();

    let waited = begin(&pacer);

    assert!(waited < Duration::from_millis(1500), "{waited:?}");
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
    let puppet = Puppet::new(&scratch, 0, INREQ);
    puppet.write(V, &1_000_000_u64.to_le_bytes());
    puppet.take_token();

    assert!(!pacer.arrive());

    let flags = puppet.0.u64(ext(0) + TURN_FLAGS) & 15;
    assert_eq!(flags, u64::from(INREQ | QUEUED) | BOOST);
}

#[test]
fn the_step_after_a_turn_was_taken_is_not_charged_for_the_step_that_was_under_way() {
    let scratch = Scratch::new("stolen");
    let pacer = scratch.join("ours");
    for _ in 0..10 {
        assert!(pacer.arrive());
        compute(Duration::from_millis(2));
        pacer.done();
    }
    let puppet = Puppet::new(&scratch, 0, INREQ);
    let v_us = puppet.0.u64(ext(0) + V);
    puppet.write(V, &v_us.to_le_bytes());
    puppet.take_token();

    begin(&pacer);
    compute(Duration::from_millis(200));
    pacer.done();

    // Two peers of weight 1: a step of 2 ms is 4 ms of virtual time, and one of 200 ms is 400.
    let charged_us = puppet.0.u64(ext(0) + V) - v_us;
    assert!((1..100_000).contains(&charged_us), "{charged_us}");
}

#[test]
fn turns_go_to_a_peer_whose_clock_is_an_hour_off() {
    for hour_us in [3_600_000_000, -3_600_000_000] {
        let scratch = Scratch::new("hour");
        let pacer = scratch.join("ours");
        let puppet = Puppet::new(&scratch, 0, INREQ | QUEUED);
        let mut beat_us = wall_us() + hour_us;
        let mut progress = 0_u32;

        wait_until("the turn to be given to it", || {
            beat_us += 1;
            puppet.0.write(base(Puppet::SLOT) + HEARTBEAT, &beat_us.to_le_bytes());
            progress += 1;
            puppet.write(PROGRESS, &progress.to_le_bytes());
            let _ = pacer.arrive();
            pacer.done();
            puppet.has_token()
        });
    }
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

#[test]
fn steps_write_nothing_into_the_half_of_the_slot_that_a_living_peer_owns() {
    let scratch = Scratch::new("foreign");
    let pacer = scratch.join("ours");
    let puppet = Puppet::new(&scratch, 0, INREQ | QUEUED);
    let before = puppet.0.read(base(Puppet::SLOT), 88);

    for _ in 0..50 {
        begin(&pacer);
        compute(Duration::from_millis(5));
        pacer.done();
    }

    assert_eq!(puppet.0.read(base(Puppet::SLOT), 88), before);
}

#[test]
fn a_token_that_a_hostile_process_keeps_changing_delays_and_hangs_nobody() {
    let scratch = Scratch::new("hostile");
    let pacer = scratch.join("ours");
    let puppet = Puppet::new(&scratch, 0, INREQ | QUEUED);
    let ended = Mutex::new(false);

    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut word, started) = (1_u64, now());
            while !*ended.lock().expect("no panic") && started.elapsed() < WATCHDOG {
                word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                puppet.0.write(TOKEN, &word.to_le_bytes());
                puppet.write(V, &word.to_le_bytes());
                puppet.write(TURN_FLAGS, &(word >> 32 & 15).to_le_bytes()[..4]);
                puppet.beat();
            }
        });
        for _ in 0..50 {
            assert!(begin(&pacer) < Duration::from_secs(5));
            pacer.done();
        }
        *ended.lock().expect("no panic") = true;
    });
}

#[test]
fn a_holder_that_moves_but_never_ends_its_turn_does_not_keep_it_for_ever() {
    let scratch = Scratch::new("hoarder");
    let pacer = scratch.join("ours");
    let puppet = Puppet::new(&scratch, 0, INREQ);
    puppet.take_token();
    let ended = Mutex::new(false);

    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut progress, started) = (0_u32, now());
            while !*ended.lock().expect("no panic") && started.elapsed() < WATCHDOG {
                progress += 1;
                puppet.write(PROGRESS, &progress.to_le_bytes());
                puppet.beat();
                pause();
            }
        });

        assert!(!pacer.arrive());
        wait_until("being overdue", || {
            assert!(!pacer.wait(Duration::from_millis(5)));
            puppet.0.u64(ext(0) + TURN_FLAGS) & OVERDUE != 0
        });
        let waited = begin(&pacer);

        assert!(waited >= Duration::from_secs(1), "{waited:?}");
        *ended.lock().expect("no panic") = true;
    });
}

#[test]
fn a_slot_beyond_the_last_is_nobodys() {
    let scratch = Scratch::new("beyond");
    let pacer = scratch.join("ours");
    Puppet::new(&scratch, 0, INREQ);
    let bytes = scratch.bytes();

    bytes.write(TOKEN, &(7 << 16 | (SLOT_COUNT as u64 + 1)).to_le_bytes());

    assert!(pacer.arrive());
}
