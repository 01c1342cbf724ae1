//! First come, first served, whatever stands in the gate file.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::thread;

use ocgpu_core::{LeaseMode, lease_status_at};

use crate::folder::{Folder, WATCHDOG, acquire, exclusive, lease, until, until_asleep, until_waiters};

const GATE_BYTES: u64 = 4096;

fn gate(folder: &Folder) -> File {
    OpenOptions::new().read(true).write(true).open(folder.0.join("gpu.lease.q")).unwrap()
}

/// Start `count` waiters one after the other behind a holder, let `meanwhile` happen, release, and see who came when.
fn served_in_order(folder: &Folder, count: usize, meanwhile: impl FnOnce()) -> Vec<usize> {
    let holder = exclusive(&folder.file());
    assert!(holder.try_acquire().unwrap());
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for number in 0..count {
            let order = &order;
            scope.spawn(move || {
                let lease = exclusive(&folder.file());
                acquire(&lease, Some(WATCHDOG)).unwrap();
                order.lock().unwrap().push(number);
                lease.release();
            });
            until_waiters(&folder.file(), number + 1);
        }
        meanwhile();
        holder.release();
    });
    order.into_inner().unwrap()
}

#[test]
fn waiters_are_served_in_the_order_of_their_arrival() {
    let folder = Folder::new("order");

    for _ in 0..10 {
        assert_eq!(served_in_order(&folder, 8, || {}), [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}

#[test]
fn a_releaser_does_not_come_again_before_those_who_wait() {
    let folder = Folder::new("barging");
    let (grants, ended) = (Mutex::new(Vec::new()), Mutex::new(false));
    thread::scope(|scope| {
        for number in 0..2 {
            let (folder, grants, ended) = (&folder, &grants, &ended);
            scope.spawn(move || {
                let lease = exclusive(&folder.file());
                for _ in 0..300 {
                    acquire(&lease, Some(WATCHDOG)).unwrap();
                    until("the other one waits", || lease.wanted() > 0 || *ended.lock().unwrap());
                    grants.lock().unwrap().push((number, lease.wanted() > 0));
                    lease.release();
                }
                *ended.lock().unwrap() = true;
            });
        }
    });

    let grants = grants.into_inner().unwrap();
    let again = grants.windows(2).filter(|pair| pair[0].1 && pair[0].0 == pair[1].0).count();
    assert!(grants.iter().filter(|(_, wanted)| *wanted).count() >= 300);
    assert_eq!(again, 0);
}

#[test]
fn a_try_does_not_pass_those_who_wait() {
    let folder = Folder::new("pass");
    let (readers, late) =
        (lease(&folder.file(), LeaseMode::Shared), lease(&folder.file(), LeaseMode::Shared));
    let writer = exclusive(&folder.file());
    assert!(readers.try_acquire().unwrap());
    let wait = writer.start(false).unwrap().expect("a reader has it");

    assert!(!late.try_acquire().unwrap(), "a reader passed a writer");

    wait.cancel();
    assert!(late.try_acquire().unwrap());
}

#[test]
fn a_writer_waits_no_longer_than_the_readers_of_its_arrival() {
    let folder = Folder::new("writer");
    let first = lease(&folder.file(), LeaseMode::Shared);
    assert!(first.try_acquire().unwrap());
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let run = |name: &'static str, mode| {
            let (folder, order) = (&folder, &order);
            scope.spawn(move || {
                let lease = lease(&folder.file(), mode);
                acquire(&lease, Some(WATCHDOG)).unwrap();
                order.lock().unwrap().push(name);
                lease.release();
            });
        };
        run("writer", LeaseMode::Exclusive);
        until_waiters(&folder.file(), 1);
        run("late reader", LeaseMode::Shared);
        until_waiters(&folder.file(), 2);
        first.release();
    });

    assert_eq!(order.into_inner().unwrap(), ["writer", "late reader"]);
}

#[test]
fn readers_that_queue_behind_a_writer_come_together() {
    let folder = Folder::new("readers");
    let writer = exclusive(&folder.file());
    assert!(writer.try_acquire().unwrap());
    let inside = std::sync::Barrier::new(3);
    thread::scope(|scope| {
        for number in 0..3 {
            let (folder, inside) = (&folder, &inside);
            scope.spawn(move || {
                let lease = lease(&folder.file(), LeaseMode::Shared);
                acquire(&lease, Some(WATCHDOG)).unwrap();
                inside.wait();
            });
            until_waiters(&folder.file(), number + 1);
        }
        writer.release();
    });
}

#[test]
fn a_waiter_that_gives_up_in_the_middle_of_the_queue_holds_nobody_up() {
    let folder = Folder::new("middle");
    let quitter = exclusive(&folder.file());
    let holder = exclusive(&folder.file());
    assert!(holder.try_acquire().unwrap());
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let waiter = |number| {
            let (folder, order) = (&folder, &order);
            scope.spawn(move || {
                let lease = exclusive(&folder.file());
                acquire(&lease, Some(WATCHDOG)).unwrap();
                order.lock().unwrap().push(number);
            });
        };
        waiter(0);
        until_waiters(&folder.file(), 1);
        let wait = quitter.start(false).unwrap().expect("somebody has it");
        waiter(2);
        until_waiters(&folder.file(), 3);
        wait.cancel();
        until_waiters(&folder.file(), 2);
        holder.release();
    });

    assert_eq!(order.into_inner().unwrap(), [0, 2]);
}

#[test]
fn holders_and_waiters_are_named_in_order_with_mode_and_time() {
    let folder = Folder::new("named");
    let (one, two) = (lease(&folder.file(), LeaseMode::Shared), lease(&folder.file(), LeaseMode::Shared));
    assert!(one.try_acquire().unwrap() && two.try_acquire().unwrap());
    let (writer, reader) = (exclusive(&folder.file()), lease(&folder.file(), LeaseMode::Shared));
    let waits = [writer.start(false).unwrap(), reader.start(false).unwrap()];

    let status = lease_status_at(&folder.file()).unwrap();

    let modes: Vec<_> = status.waiters.iter().map(|party| party.mode).collect();
    assert_eq!(modes, [Some(LeaseMode::Exclusive), Some(LeaseMode::Shared)]);
    assert_eq!(status.holders.len(), 2, "{status:?}");
    for party in status.holders.iter().chain(&status.waiters) {
        assert_eq!(party.pid, Some(std::process::id()));
        assert!(party.since_us.is_some() && party.name.is_some(), "{party:?}");
    }
    assert_eq!(one.wanted(), 2);
    for wait in waits.into_iter().flatten() {
        wait.cancel();
    }
    assert_eq!(one.wanted(), 0);
    two.release();
    assert_eq!(lease_status_at(&folder.file()).unwrap().holders.len(), 1);
}

#[test]
fn more_waiters_than_hints_are_counted_and_served_in_order_all_the_same() {
    const CROWD: usize = 70;
    let folder = Folder::new("crowd");
    let holder = exclusive(&folder.file());
    assert!(holder.try_acquire().unwrap());
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for number in 0..CROWD {
            let (folder, order) = (&folder, &order);
            scope.spawn(move || {
                let lease = exclusive(&folder.file());
                acquire(&lease, Some(WATCHDOG)).unwrap();
                order.lock().unwrap().push(number);
            });
            until("one more is counted", || holder.wanted() == number + 1);
        }
        assert!(lease_status_at(&folder.file()).unwrap().waiters.len() >= 60);
        holder.release();
    });

    assert_eq!(order.into_inner().unwrap(), (0..CROWD).collect::<Vec<_>>());
}

#[test]
fn no_bytes_in_the_gate_file_change_order_or_exclusion() {
    for fill in [0x00_u8, 0x5a, 0xff] {
        let folder = Folder::new("garbage-gate");
        // From the start: the file is no gate, and the order is flock's.
        fs::write(folder.0.join("gpu.lease.q"), vec![fill; 5000]).unwrap();
        let (one, two) = (exclusive(&folder.file()), exclusive(&folder.file()));
        assert!(one.try_acquire().unwrap() && !two.try_acquire().unwrap());
        one.release();
        if fill != 0 {
            assert_eq!(fs::read(folder.0.join("gpu.lease.q")).unwrap(), vec![fill; 5000]);
        }

        // Under those who use it.
        let folder = Folder::new("overwritten-gate");
        let order = served_in_order(&folder, 4, || {
            gate(&folder).write_all_at(&vec![fill; usize::try_from(GATE_BYTES).unwrap()], 0).unwrap();
        });
        assert_eq!(order, [0, 1, 2, 3]);
    }
}

#[test]
fn a_gate_that_is_cut_or_removed_costs_no_exclusion_and_holds_nobody_up() {
    let folder = Folder::new("cut-gate");
    assert_eq!(served_in_order(&folder, 4, || gate(&folder).set_len(0).unwrap()), [0, 1, 2, 3]);

    let removed = || fs::remove_file(folder.0.join("gpu.lease.q")).unwrap();
    let mut order = served_in_order(&folder, 4, removed);

    order.sort_unstable();
    assert_eq!(order, [0, 1, 2, 3]);
    assert_eq!(served_in_order(&folder, 4, || {}), [0, 1, 2, 3]);
}

#[test]
fn who_kept_a_gate_that_was_removed_queues_in_the_new_one() {
    let folder = Folder::new("new-gate");
    let (kept, holder) = (exclusive(&folder.file()), exclusive(&folder.file()));
    assert!(kept.try_acquire().unwrap());
    kept.release();
    fs::remove_file(folder.0.join("gpu.lease.q")).unwrap();
    assert!(holder.try_acquire().unwrap());

    let wait = kept.start(false).unwrap().expect("held");

    // Only a hint in the gate that the path names says since when.
    assert!(lease_status_at(&folder.file()).unwrap().waiters[0].since_us.is_some());
    assert_eq!(holder.wanted(), 1);
    wait.cancel();
}

#[test]
fn a_lease_file_that_is_replaced_keeps_the_order_of_those_who_wait() {
    let folder = Folder::new("replaced");

    for _ in 0..10 {
        let order = served_in_order(&folder, 4, || fs::remove_file(folder.file()).unwrap());
        assert_eq!(order, [0, 1, 2, 3]);
    }
}

#[test]
fn a_gate_of_another_release_is_left_alone() {
    let folder = Folder::new("other-gate");
    let mut bytes = vec![0_u8; 4096];
    bytes[..12].copy_from_slice(b"OCGPUQ1\0\x02\0\0\0");
    fs::write(folder.0.join("gpu.lease.q"), &bytes).unwrap();

    let mut order = served_in_order_without_gate(&folder);

    order.sort_unstable();
    assert_eq!(order, [0, 1, 2]);
    assert_eq!(fs::read(folder.0.join("gpu.lease.q")).unwrap(), bytes);
}

/// As `served_in_order`, of three that nobody can see wait in the gate.
fn served_in_order_without_gate(folder: &Folder) -> Vec<usize> {
    let holder = exclusive(&folder.file());
    assert!(holder.try_acquire().unwrap());
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for number in 0..3 {
            let order = &order;
            scope.spawn(move || {
                let lease = exclusive(&folder.file());
                acquire(&lease, Some(WATCHDOG)).unwrap();
                order.lock().unwrap().push(number);
            });
        }
        until_asleep(&folder.file(), 3);
        holder.release();
    });
    order.into_inner().unwrap()
}
