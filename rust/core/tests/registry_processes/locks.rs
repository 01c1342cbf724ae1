//! Peers whose kernel refuses OFD locks, as some sandboxes do: a seccomp filter stands in for one.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use ocgpu_core::{Lease, LeaseMode, LeaseOptions, lock_kind};

use crate::children::{Played, Scratch, join, key, listen, place, say, wait_until};

/// Joins and leaves of one process under load.
const ROUNDS: usize = 300;

/// Role: a peer that has OFD locks.
pub(crate) fn join_unfiltered(directory: &Path) {
    stay(directory);
}

/// Role: a peer that has none.
pub(crate) fn join_filtered(directory: &Path) {
    refuse_byte_locks();
    stay(directory);
}

fn stay(directory: &Path) {
    let pacer = join(directory, "stays");
    let kind = lock_kind(&place(directory), &key()).expect("a usable segment").expect("a segment");
    say(&format!("joined {} {}", pacer.slot().expect("a slot"), kind.as_str()));
    listen();
}

/// Role: without OFD locks, hold the lease for a moment.
pub(crate) fn lease_filtered(directory: &Path) {
    refuse_byte_locks();
    let options = LeaseOptions { mode: LeaseMode::Exclusive, reason: None, signals: true };
    let lease = Lease::at_path(&directory.join("gpu.lease"), 0o600, options).expect("a legal lease");
    say(&format!("acquired {}", lease.try_acquire().expect("a usable lease")));
}

/// Role: join and leave, and count the slots that somebody else had at the same time.
pub(crate) fn claim_unfiltered(directory: &Path) {
    claim(directory);
}

/// Role: the same without OFD locks.
pub(crate) fn claim_filtered(directory: &Path) {
    refuse_byte_locks();
    claim(directory);
}

fn claim(directory: &Path) {
    let mut double = 0;
    for _ in 0..ROUNDS {
        let pacer = join(directory, "comes and goes");
        let Some(slot) = pacer.slot() else { continue };
        let mark = directory.join(format!("owner-of-{slot}"));
        match File::create_new(&mark) {
            Ok(_) => fs::remove_file(&mark).expect("our own mark"),
            Err(_) => double += 1,
        }
    }
    say(&format!("double {double}"));
}

/// Answer `EINVAL` to the three OFD commands of fcntl(2) from here on, in this thread and those it starts.
fn refuse_byte_locks() {
    // Of `seccomp_data`: the number of the call, and the lower half of its second argument.
    const CALL_AT: u32 = 0;
    const COMMAND_AT: u32 = 24;
    let code = |code: u32| u16::try_from(code).expect("a code of 16 bits");
    let load =
        |k| libc::sock_filter { code: code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS), jt: 0, jf: 0, k };
    let equal =
        |k, jt, jf| libc::sock_filter { code: code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K), jt, jf, k };
    let answer = |k| libc::sock_filter { code: code(libc::BPF_RET | libc::BPF_K), jt: 0, jf: 0, k };
    let word = |value: i32| u32::try_from(value).expect("a positive number");
    let mut program = [
        load(CALL_AT),
        equal(u32::try_from(libc::SYS_fcntl).expect("a small number"), 0, 4),
        load(COMMAND_AT),
        equal(word(libc::F_OFD_GETLK), 3, 0),
        equal(word(libc::F_OFD_SETLK), 2, 0),
        equal(word(libc::F_OFD_SETLKW), 1, 0),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_ERRNO | word(libc::EINVAL)),
    ];
    let program = libc::sock_fprog { len: 8, filter: program.as_mut_ptr() };
    // SAFETY: a plain system call without pointers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program outlives the call, which copies it.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

fn peers(directory: &Path) -> Vec<u32> {
    let seen = ocgpu_core::peers(&place(directory), &key()).expect("a usable segment");
    let mut pids: Vec<u32> = seen.peers.iter().filter(|peer| peer.alive).map(|peer| peer.pid).collect();
    pids.sort_unstable();
    pids
}

#[expect(clippy::disallowed_methods, reason = "a test's watchdog is not the core's clock")]
fn a_killed_peer_is_seen(scratch: &Scratch, killed: &mut Played, other: &Played) {
    killed.kill();
    let since = Instant::now();

    wait_until("the survivor to stand alone", || bytes_of_slots(scratch) == [other.pid()]);

    assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
}

/// The pids that the segment names, whoever looks.
fn bytes_of_slots(scratch: &Scratch) -> Vec<u32> {
    let bytes = fs::read(scratch.segment()).expect("a readable segment");
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    (0..16).map(|slot| word(16 + 88 * slot)).filter(|pid| *pid != 0).collect()
}

#[test]
fn two_peers_without_ofd_locks_have_two_slots_and_see_a_kill() {
    let scratch = Scratch::new("flock");
    let mut first = Played::start("join filtered", &scratch.0);
    assert_eq!(first.hear("joined"), "0 flock");
    let second = Played::start("join filtered", &scratch.0);
    assert_eq!(second.hear("joined"), "1 flock");
    let mut both = vec![first.pid(), second.pid()];
    both.sort_unstable();
    assert_eq!(peers(&scratch.0), both);

    a_killed_peer_is_seen(&scratch, &mut first, &second);
}

#[test]
fn a_peer_with_and_one_without_ofd_locks_see_each_other_and_each_others_death() {
    for killed in [0, 1] {
        let scratch = Scratch::new(&format!("mixed-{killed}"));
        let first = Played::start("join filtered", &scratch.0);
        assert_eq!(first.hear("joined"), "0 flock");
        let second = Played::start("join unfiltered", &scratch.0);
        assert_eq!(second.hear("joined"), "1 ofd");
        let mut both = vec![first.pid(), second.pid()];
        both.sort_unstable();
        assert_eq!(peers(&scratch.0), both);

        let mut pair = [first, second];
        let (dead, survivor) = pair.split_at_mut(1);
        match killed {
            0 => a_killed_peer_is_seen(&scratch, &mut dead[0], &survivor[0]),
            _ => a_killed_peer_is_seen(&scratch, &mut survivor[0], &dead[0]),
        }
    }
}

#[test]
fn a_peer_without_ofd_locks_leaves_those_alone_whose_lock_it_cannot_see() {
    let scratch = Scratch::new("unseen");
    let first = Played::start("join unfiltered", &scratch.0);
    assert_eq!(first.hear("joined"), "0 ofd");

    let second = Played::start("join filtered", &scratch.0);

    assert_eq!(second.hear("joined"), "1 flock");
    assert_eq!(bytes_of_slots(&scratch), [first.pid(), second.pid()]);
}

#[test]
fn peers_with_and_without_ofd_locks_never_have_one_slot_at_the_same_time() {
    let scratch = Scratch::new("crowd");
    let roles = ["claim filtered", "claim unfiltered"];

    let crowd: Vec<Played> = (0..6).map(|index| Played::start(roles[index % 2], &scratch.0)).collect();

    for child in &crowd {
        assert_eq!(child.hear("double"), "0");
    }
    assert!(bytes_of_slots(&scratch).is_empty());
}

#[test]
fn a_lease_works_without_ofd_locks() {
    let scratch = Scratch::new("lease");

    assert_eq!(Played::start("lease filtered", &scratch.0).hear("acquired"), "true");
}
