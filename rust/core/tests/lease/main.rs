//! What a lease promises, seen from outside of the crate.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod folder;
mod queue;

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ocgpu_core::{Error, Lease, LeaseMode, LeaseOptions, lease_status_at, monotonic_us};

use folder::{
    Folder, WATCHDOG, acquire, exclusive, foreign_holder, lease, options, until_asleep, until_waiters,
};

#[test]
fn exclusive_excludes_all_and_shared_excludes_exclusive_only() {
    use LeaseMode::{Exclusive, Shared};
    let cases = [
        (Exclusive, Exclusive, false),
        (Exclusive, Shared, false),
        (Shared, Exclusive, false),
        (Shared, Shared, true),
    ];
    for (first, second, both) in cases {
        let folder = Folder::new("modes");
        let (one, two) = (lease(&folder.file(), first), lease(&folder.file(), second));

        assert!(one.try_acquire().unwrap());

        assert_eq!(two.try_acquire().unwrap(), both, "{first:?} then {second:?}");
        assert_eq!(lease_status_at(&folder.file()).unwrap().mode, Some(first));
        one.release();
        assert!(both || two.try_acquire().unwrap());
    }
}

#[test]
fn a_waiter_gets_the_lease_when_it_is_released() {
    let folder = Folder::new("wait");
    let holder = exclusive(&folder.file());
    holder.try_acquire().unwrap();
    let (sender, receiver) = mpsc::channel();
    let path = folder.file();
    let waiter = thread::spawn(move || {
        let lease = exclusive(&path);
        acquire(&lease, None).unwrap();
        sender.send(lease.held()).unwrap();
    });
    until_waiters(&folder.file(), 1);
    assert_eq!(holder.wanted(), 1);
    assert!(receiver.try_recv().is_err());

    holder.release();

    assert!(receiver.recv_timeout(WATCHDOG).unwrap());
    waiter.join().unwrap();
    assert!(!lease_status_at(&folder.file()).unwrap().held);
}

#[test]
fn a_timeout_is_never_early_and_leaves_nothing_behind() {
    let folder = Folder::new("timeout");
    let (holder, waiter) = (exclusive(&folder.file()), exclusive(&folder.file()));
    holder.try_acquire().unwrap();
    for span_ms in [1, 10, 60] {
        let start = monotonic_us();

        let error = acquire(&waiter, Some(Duration::from_millis(span_ms))).unwrap_err();

        assert!(monotonic_us() - start >= span_ms * 1000);
        let Error::LeaseTimeout { holder: Some(holder), .. } = error else { panic!("{error}") };
        assert_eq!(holder.pid, Some(std::process::id()));
    }
    assert!(lease_status_at(&folder.file()).unwrap().waiters.is_empty());
    holder.release();
    assert!(waiter.try_acquire().unwrap());
}

#[test]
fn zero_timeout_says_busy_and_who_with_foreign_text_escaped() {
    let folder = Folder::new("busy");
    let reason = Some("fine\u{1b}[31m".to_owned());
    let loud = LeaseOptions { reason, ..options(LeaseMode::Exclusive) };
    let holder = Lease::at_path(&folder.file(), 0o600, loud).unwrap();
    holder.try_acquire().unwrap();

    let error = acquire(&exclusive(&folder.file()), Some(Duration::ZERO)).unwrap_err();

    let message = error.to_string();
    assert!(matches!(error, Error::LeaseBusy { .. }));
    assert!(message.contains(r#"reason "fine\u{1b}[31m""#), "{message}");
}

#[test]
fn one_object_holds_once_and_says_so() {
    let folder = Folder::new("once");
    let lease = exclusive(&folder.file());
    lease.try_acquire().unwrap();

    assert!(matches!(lease.try_acquire(), Err(Error::LeaseMisuse { .. })));
    assert!(matches!(acquire(&lease, None), Err(Error::LeaseMisuse { .. })));
    assert!(lease.held());
}

/// `waiter` waits behind a holder until it is released itself.
fn assert_release_ends_the_wait_of(waiter: &Lease) {
    thread::scope(|scope| {
        let waiting = scope.spawn(|| acquire(waiter, None));
        until_waiters(waiter.path(), 1);

        waiter.release();

        assert!(matches!(waiting.join().unwrap(), Err(Error::LeaseInterrupted { .. })));
    });
}

#[test]
fn release_is_harmless_in_every_state_and_ends_a_wait() {
    let folder = Folder::new("release");
    let (holder, waiter) = (exclusive(&folder.file()), exclusive(&folder.file()));
    waiter.release();
    holder.try_acquire().unwrap();

    assert_release_ends_the_wait_of(&waiter);

    assert!(!waiter.held());
    for _ in 0..2 {
        holder.release();
    }
    assert!(waiter.try_acquire().unwrap());
}

#[test]
fn a_caller_that_breaks_off_does_not_hold() {
    let folder = Folder::new("break");
    let (holder, waiter) = (exclusive(&folder.file()), exclusive(&folder.file()));
    holder.try_acquire().unwrap();

    let result = waiter.acquire(None, || {
        // The lease has come when the caller breaks off.
        holder.release();
        while !lease_status_at(&folder.file()).unwrap().held {
            thread::yield_now();
        }
        ControlFlow::Break(())
    });

    assert!(matches!(result, Err(Error::LeaseInterrupted { .. })));
    assert!(!waiter.held());
    assert!(holder.try_acquire().unwrap());
}

#[test]
fn threads_exclude_each_other() {
    let folder = Folder::new("threads");
    let counter = folder.0.join("counter");
    fs::write(&counter, "0").unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let lease = exclusive(&folder.file());
                for _ in 0..50 {
                    acquire(&lease, None).unwrap();
                    // Read, then write: two at once would lose a count.
                    let count: u32 = fs::read_to_string(&counter).unwrap().parse().unwrap();
                    fs::write(&counter, (count + 1).to_string()).unwrap();
                    lease.release();
                }
            });
        }
    });
    assert_eq!(fs::read_to_string(&counter).unwrap(), "200");
}

#[test]
fn a_removed_lease_file_heals_at_the_next_acquisition() {
    let folder = Folder::new("unlink");
    let (one, two) = (exclusive(&folder.file()), exclusive(&folder.file()));
    one.try_acquire().unwrap();
    one.release();
    fs::remove_file(folder.file()).unwrap();

    assert!(two.try_acquire().unwrap());

    assert!(!one.try_acquire().unwrap(), "the file kept open from before is not the lease");
}

#[test]
fn a_waiter_on_a_removed_file_ends_on_the_new_one() {
    let folder = Folder::new("unlink-wait");
    let (holder, waiter, next) =
        (exclusive(&folder.file()), exclusive(&folder.file()), exclusive(&folder.file()));
    holder.try_acquire().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| acquire(&waiter, Some(WATCHDOG)));
        until_waiters(&folder.file(), 1);
        fs::remove_file(folder.file()).unwrap();

        holder.release();

        waiting.join().unwrap().unwrap();
    });
    assert!(!next.try_acquire().unwrap());
}

#[test]
fn what_is_not_a_plain_file_is_refused_at_once() {
    let folder = Folder::new("planted");
    let planted = [folder.0.join("link"), folder.0.join("pipe"), folder.0.join("folder")];
    symlink(folder.0.join("target"), &planted[0]).unwrap();
    assert!(Command::new("mkfifo").arg(&planted[1]).status().unwrap().success());
    fs::create_dir(&planted[2]).unwrap();
    for path in planted {
        let refused = exclusive(&path).try_acquire();
        assert!(matches!(refused, Err(Error::LeaseUnavailable { .. })), "{path:?}");
        let refused = lease_status_at(&path);
        assert!(matches!(refused, Err(Error::LeaseUnavailable { .. })), "{path:?}");
    }
    assert!(!folder.0.join("target").exists());
}

#[test]
fn flock_of_other_programs_excludes_and_is_excluded() {
    let folder = Folder::new("flock");
    let ours = exclusive(&folder.file());
    let mut foreign = foreign_holder(&folder.file(), "-x");

    assert!(!ours.try_acquire().unwrap());
    let status = lease_status_at(&folder.file()).unwrap();
    assert!(status.held && status.holders[0].name.is_some(), "{status:?}");

    drop(foreign.stdin.take());
    foreign.wait().unwrap();
    acquire(&ours, Some(WATCHDOG)).unwrap();
    let file = folder.file().display().to_string();
    assert!(!Command::new("flock").args(["-n", &file, "true"]).status().unwrap().success());
}

#[test]
fn a_lent_lease_outlives_its_release_until_the_borrower_ends() {
    let folder = Folder::new("lend");
    let (holder, next) = (exclusive(&folder.file()), exclusive(&folder.file()));
    holder.try_acquire().unwrap();
    let borrowed = holder.lend().unwrap().unwrap();
    holder.record_as(1, "borrower");

    holder.release();

    assert!(!holder.held());
    assert!(!next.try_acquire().unwrap());
    assert!(lease_status_at(&folder.file()).unwrap().held);
    drop(borrowed);
    assert!(next.try_acquire().unwrap());
}

#[test]
fn without_signals_an_ended_wait_hands_the_lease_straight_back() {
    let folder = Folder::new("drain");
    let quiet = LeaseOptions { signals: false, ..options(LeaseMode::Exclusive) };
    let waiter = Lease::at_path(&folder.file(), 0o600, quiet).unwrap();
    let (holder, next) = (exclusive(&folder.file()), exclusive(&folder.file()));
    holder.try_acquire().unwrap();

    let wait = waiter.start(false).unwrap().expect("the holder has it");
    // Only a thread that sleeps in the lock already is left to sleep on.
    until_asleep(&folder.file(), 1);

    assert!(!wait.stop().unwrap());
    until_waiters(&folder.file(), 1);
    holder.release();
    acquire(&next, Some(WATCHDOG)).unwrap();
    assert!(!waiter.held());
}

#[test]
fn without_signals_a_release_ends_a_wait_all_the_same() {
    let folder = Folder::new("drain-release");
    let quiet = LeaseOptions { signals: false, ..options(LeaseMode::Exclusive) };
    let waiter = Lease::at_path(&folder.file(), 0o600, quiet).unwrap();
    let holder = exclusive(&folder.file());
    holder.try_acquire().unwrap();

    assert_release_ends_the_wait_of(&waiter);
}

#[test]
fn a_look_takes_nothing_and_creates_nothing() {
    let folder = Folder::new("look");

    let status = lease_status_at(&folder.file()).unwrap();

    assert_eq!(status.to_json(), r#"{"held":false,"mode":null,"holders":[],"waiters":[]}"#);
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
}

#[test]
fn a_garbage_record_is_an_unknown_holder_and_nothing_else() {
    let folder = Folder::new("garbage");
    let ours = exclusive(&folder.file());
    ours.try_acquire().unwrap();
    fs::write(folder.file(), [0xff; 600]).unwrap();

    let status = lease_status_at(&folder.file()).unwrap();

    assert_eq!(status.mode, Some(LeaseMode::Exclusive));
    assert!(status.holders.iter().all(|holder| holder.since_us.is_none()));
    ours.release();
    assert!(ours.try_acquire().unwrap());
}

#[test]
fn a_reason_beyond_its_length_is_refused() {
    let long = LeaseOptions { reason: Some("é".repeat(101)), ..options(LeaseMode::Shared) };

    assert!(matches!(Lease::at_path(Path::new("/x"), 0o600, long), Err(Error::InvalidArgument { .. })));
}
