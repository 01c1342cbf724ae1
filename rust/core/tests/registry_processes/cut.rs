//! A segment that somebody cuts to length 0 under processes that compute.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::ptr;
use std::time::Duration;

use crate::children::{Played, Scratch, join, listen, say, wait_until};

/// Role: step without a pause.
pub(crate) fn compute(directory: &Path) {
    let pacer = join(directory, "computes");
    say("joined");
    loop {
        let mut begun = pacer.arrive();
        while !begun {
            begun = pacer.wait(Duration::from_millis(1));
        }
        pacer.done();
    }
}

/// Role: join, then fault in a mapping that is nobody's but this test's.
pub(crate) fn fault_elsewhere(directory: &Path) {
    let _pacer = join(directory, "faults");
    fault(directory);
}

/// Role: the same, in a program that has a handler of its own, which ends it with status 42.
pub(crate) fn fault_with_an_earlier_handler(directory: &Path) {
    extern "C" fn end(_signal: libc::c_int) {
        // SAFETY: _exit is safe in a signal handler.
        unsafe { libc::_exit(42) };
    }
    install(end as extern "C" fn(libc::c_int) as libc::sighandler_t);
    let _pacer = join(directory, "faults");
    fault(directory);
}

static LATER: std::sync::OnceLock<libc::sigaction> = std::sync::OnceLock::new();

/// Role: the program installs its handler after we did, and it calls the one before it, which is ours.
pub(crate) fn fault_with_a_later_handler(directory: &Path) {
    type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
    extern "C" fn chain(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        let text = b"say theirs\n";
        // SAFETY: write is safe in a signal handler, and the bytes outlive the call.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        let before = LATER.get().expect("told by sigaction").sa_sigaction;
        // SAFETY: ours takes three arguments.
        let before = unsafe { std::mem::transmute::<usize, Handler>(before) };
        before(signal, info, context);
    }
    let pacer = join(directory, "first");
    let before = install(chain as Handler as libc::sighandler_t);
    LATER.set(before).expect("set once");
    let _second = join(directory, "second");
    let file = File::options().write(true).open(directory.join("opencoti-gpu-test")).expect("a segment");
    file.set_len(0).expect("a segment that can be cut");
    pacer.idle();
    let _ = pacer.arrive();
    say("survived");
    fault(directory);
}

/// Role: a program without a handler of its own.
pub(crate) fn await_a_signal(directory: &Path) {
    // Rust's own handler lets the first one pass.
    install(libc::SIG_DFL);
    let _pacer = join(directory, "is signalled");
    say("joined");
    listen();
}

fn install(handler: libc::sighandler_t) -> libc::sigaction {
    // SAFETY: all-zero bytes are a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: both outlive the call.
    assert_eq!(unsafe { libc::sigaction(libc::SIGBUS, &raw const action, &raw mut before) }, 0);
    before
}

fn fault(directory: &Path) {
    let path = directory.join("other");
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path).expect("a file");
    file.set_len(4096).expect("a length");
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let page =
        unsafe { libc::mmap(ptr::null_mut(), 4096, libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    assert_ne!(page, libc::MAP_FAILED);
    file.set_len(0).expect("a cut");
    // SAFETY: mapped above; the fault is what is asked for.
    unsafe { page.cast::<u8>().write_volatile(1) };
    say("no fault");
}

#[test]
fn peers_that_compute_survive_that_their_segment_is_cut_and_meet_again() {
    let scratch = Scratch::new("cut");
    let watcher = join(&scratch.0, "watches");
    let mut workers = [Played::start("compute", &scratch.0), Played::start("compute", &scratch.0)];
    for worker in &workers {
        worker.hear("joined");
    }

    for _ in 0..5 {
        let file = File::options().write(true).open(scratch.segment()).expect("a segment");
        file.set_len(0).expect("a segment that can be cut");

        let mut wanted: Vec<u32> = workers.iter().map(Played::pid).collect();
        wanted.sort_unstable();
        wait_until("all to meet again", || {
            assert!(workers.iter_mut().all(Played::lives), "a worker died of the cut");
            let view = watcher.snapshot();
            let mut pids: Vec<u32> = view.peers.iter().map(|peer| peer.pid).collect();
            pids.sort_unstable();
            view.own.is_some() && pids == wanted && view.peers.iter().all(|peer| peer.active)
        });
    }
}

#[test]
fn a_fault_elsewhere_still_ends_the_process() {
    let scratch = Scratch::new("fault");

    let status = Played::start("fault elsewhere", &scratch.0).end();

    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
fn a_fault_elsewhere_reaches_the_handler_that_was_there_before_us() {
    let scratch = Scratch::new("earlier");

    let status = Played::start("fault with an earlier handler", &scratch.0).end();

    assert_eq!(status.code(), Some(42), "{status}");
}

#[test]
fn a_handler_that_was_installed_over_ours_is_put_behind_it_and_calls_nobody_in_a_circle() {
    let scratch = Scratch::new("later");
    let mut child = Played::start("fault with a later handler", &scratch.0);

    child.hear("survived");
    child.hear("theirs");
    let status = child.end();

    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
fn a_sigbus_that_somebody_sends_does_what_it_always_did() {
    let scratch = Scratch::new("sent");
    let mut child = Played::start("await a signal", &scratch.0);
    child.hear("joined");

    let pid = libc::pid_t::try_from(child.pid()).expect("a pid");
    // SAFETY: a plain system call; the process is our child.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGBUS) }, 0);

    assert_eq!(child.end().signal(), Some(libc::SIGBUS));
}
