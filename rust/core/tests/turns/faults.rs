//! What the dead, the still, the hostile and the foreign do to the others' turns.

use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use ocgpu_core::{SLOT_COUNT, Schedule, wall_us};

use crate::puppet::{
    HAS_LOCK, HEARTBEAT, INREQ, OVERDUE, PROGRESS, Puppet, QUEUED, TOKEN, TURN_FLAGS, TURN_LIMIT, V,
    WATCHDOG, base, begin, compute, ext, holder,
};
use crate::scratch::{Scratch, now, pause, wait_until};

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
fn a_long_step_of_late_lengthens_the_silence_that_is_taken_for_hanging() {
    let scratch = Scratch::new("prefill");
    let pacer = scratch.join("chat");
    let bytes = scratch.bytes();
    let limit_ms = |span_ms| {
        assert!(pacer.arrive());
        compute(Duration::from_millis(span_ms));
        pacer.done();
        (bytes.u64(ext(0) + TURN_LIMIT) & 0xffff_ffff) / 1000
    };

    assert!(limit_ms(2) < 300);
    let after_prefill = limit_ms(200);
    assert!(after_prefill >= 300, "{after_prefill}");
    for _ in 0..20 {
        limit_ms(2);
    }

    assert!(limit_ms(2) > after_prefill * 4 / 5);
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
fn who_lost_its_turn_by_silence_pays_for_work_but_not_for_a_pause() {
    let charged_ms = |span: Duration, told: bool| {
        let scratch = Scratch::new("silence");
        let pacer = scratch.join("ours");
        assert!(pacer.arrive());
        compute(Duration::from_millis(2));
        pacer.done();
        let puppet = Puppet::new(&scratch, 0, INREQ);
        let v_us = puppet.0.u64(ext(0) + V);
        puppet.write(V, &v_us.to_le_bytes());
        assert!(pacer.arrive());
        puppet.take_token();
        let started = now();
        while started.elapsed() < span {
            puppet.beat();
            pause();
        }
        if told {
            pacer.done();
        } else {
            let _ = pacer.arrive();
        }
        (puppet.0.u64(ext(0) + V) - v_us) / 1000
    };

    // Two peers of weight 1: a millisecond is two of virtual time. The limit is 100 ms.
    let told_ms = charged_ms(Duration::from_millis(300), true);
    assert!((600..1000).contains(&told_ms), "{told_ms}");
    let pause_ms = charged_ms(Duration::from_millis(300), false);
    assert!((150..=200).contains(&pause_ms), "{pause_ms}");
    let idle_ms = charged_ms(Duration::from_millis(2100), false);
    assert!(idle_ms <= 10, "{idle_ms}");
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
fn what_another_release_laid_out_behind_the_seeds_part_is_left_alone() {
    let scratch = Scratch::new("foreign-extension");
    let mut bytes = vec![0_u8; 4096];
    bytes[..16].copy_from_slice(b"OCGPU\0\0\0\x01\0\0\0\x10\0\0\0");
    bytes[1536..1568].copy_from_slice(b"OCGPUEX1\x01\0\0\0\x40\0\0\0\x80\0\0\0\x10\0\0\0\0\0\0\0\0\0\0\x80");
    bytes[1600..].fill(0x5a);
    std::fs::write(scratch.segment(), &bytes).expect("writable");
    let (a, b) = (scratch.join("a"), scratch.join("b"));
    assert!(a.arrive());
    a.done();
    b.open_request();

    for _ in 0..20 {
        let _ = a.arrive() || a.wait(Duration::from_millis(5));
        a.done();
    }
    let schedule = a.snapshot().schedule;
    a.abandon();
    a.idle();
    b.close_request();
    drop((a, b));

    assert_eq!(schedule, Schedule::Grid);
    assert_eq!(scratch.bytes().read(1536, 4096 - 1536), bytes[1536..]);
}

#[test]
fn an_open_request_moves_with_its_process_to_a_new_segment() {
    let scratch = Scratch::new("moves");
    let pacer = scratch.join("ours");
    pacer.open_request();
    assert!(pacer.arrive());

    for file in std::fs::read_dir(&scratch.0).expect("readable") {
        std::fs::remove_file(file.expect("an entry").path()).expect("removable");
    }
    wait_until("the process to be at work in a new segment", || {
        let seen = ocgpu_core::peers(&scratch.place(), &crate::scratch::key()).expect("readable");
        seen.peers.iter().any(|peer| peer.active)
    });

    assert!(pacer.arrive());
    assert_eq!(holder(&scratch.bytes()), Some(0));
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
