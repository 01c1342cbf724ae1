//! Ending a blocking system call of one thread, and telling an event loop that something happened.
//!
//! A thread that sleeps in flock(2) wakes only when the lock comes or a signal handler runs. So one real-time signal is
//! reserved for this, its handler does nothing, and it is installed without `SA_RESTART`: the call then returns
//! `EINTR`. The signal is the highest real-time one that has no handler at the time of a wait. A handler that the host
//! program installed is never replaced; where it replaces ours, the threads that wait then are not signalled any more,
//! and the next wait reserves another.

use std::fs::File;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

use super::fork::ProcessFile;

/// The reserved signal.
#[derive(Debug, Clone, Copy)]
struct WakeSignal(libc::c_int);

impl WakeSignal {
    /// The one that is installed, or else the highest that nobody has a handler for; `None` when all are taken.
    fn reserve() -> Option<Self> {
        let range = libc::SIGRTMIN()..libc::SIGRTMAX();
        let installed = range.clone().rev().map(Self).find(|signal| signal.is_ours());
        installed.or_else(|| {
            range.rev().find(|&free| handler_of(free) == Some(libc::SIG_DFL) && install(free)).map(Self)
        })
    }

    fn is_ours(self) -> bool {
        handler_of(self.0) == Some(our_handler())
    }
}

/// A thread of this process that can be woken. Valid until the thread ends: whoever keeps one knows when that is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThreadHandle {
    id: libc::pid_t,
    signal: Option<WakeSignal>,
}

impl ThreadHandle {
    /// The calling thread, which from now on takes no signal but the reserved one, and none at all when `wakeable` is
    /// false: signals of the host program belong to its own threads, and the mask that this thread inherited may
    /// block ours.
    pub(crate) fn of_waiter(wakeable: bool) -> Self {
        let signal = wakeable.then(WakeSignal::reserve).flatten();
        let mut blocked = MaybeUninit::uninit();
        // SAFETY: sigfillset initialises the set that it is given and cannot fail on a valid pointer.
        unsafe { libc::sigfillset(blocked.as_mut_ptr()) };
        if let Some(WakeSignal(number)) = signal {
            // SAFETY: the set was initialised above, and `number` is a valid signal.
            unsafe { libc::sigdelset(blocked.as_mut_ptr(), number) };
        }
        // SAFETY: the set was initialised above; only the mask of the calling thread changes.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), std::ptr::null_mut()) };
        // SAFETY: gettid has no arguments and cannot fail.
        Self { id: unsafe { libc::gettid() }, signal }
    }

    /// End the system call that the thread is in, if it is in one: a signal that comes just before the call is lost,
    /// so callers repeat it until the thread answers. False: it cannot be woken.
    pub(crate) fn wake(self) -> bool {
        let Some(signal) = self.signal.filter(|signal| signal.is_ours()) else { return false };
        // SAFETY: a plain system call; the handler of the signal does nothing.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.id, signal.0) == 0 }
    }
}

/// A file that becomes readable once, for event loops (eventfd(2)).
#[derive(Debug)]
pub(crate) struct Event(ProcessFile);

impl Event {
    pub(crate) fn new() -> io::Result<Self> {
        let open = || {
            // SAFETY: a plain system call without pointers.
            let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
            if fd == -1 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: the descriptor was made by the call above and has no other owner.
            Ok(unsafe { File::from_raw_fd(fd) })
        };
        ProcessFile::open(open).map(Self)
    }

    /// Make it readable. Cannot block, and there is nobody to tell of a failure.
    pub(crate) fn set(&self) {
        let _ = (&*self.0).write(&1_u64.to_ne_bytes());
    }

    /// The number to poll; open as long as `self` lives.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

extern "C" fn ignore(_signal: libc::c_int) {}

fn our_handler() -> libc::sighandler_t {
    ignore as extern "C" fn(libc::c_int) as libc::sighandler_t
}

fn handler_of(signal: libc::c_int) -> Option<libc::sighandler_t> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the kernel fills `action` when it returns 0; no handler is changed.
    if unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: filled by the call above.
    Some(unsafe { action.assume_init() }.sa_sigaction)
}

fn install(signal: libc::c_int) -> bool {
    // SAFETY: all-zero bytes are a valid `sigaction`: no flags (hence no SA_RESTART), an empty mask, no restorer.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = our_handler();
    // SAFETY: `action` is complete, and its handler lives as long as this library is loaded.
    unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) == 0 }
}
