//! Ending a blocking system call of one thread, and telling an event loop that something happened.
//!
//! A thread that sleeps in flock(2) wakes only when the lock comes or a signal handler runs. So one real-time signal is
//! reserved for this, its handler does nothing, and it is installed without `SA_RESTART`: the call then returns
//! `EINTR`. The signal is the highest real-time one that has no handler at the time of the first wait; a handler that
//! the host program installed is never replaced, and where it replaces ours later, nobody is signalled any more.

use std::fs::File;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::OnceLock;

use super::fork::ProcessFile;

/// The reserved signal, installed and still ours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WakeSignal(libc::c_int);

impl WakeSignal {
    /// Install it at the first call of the process; `None` when no signal is free or the host program took it over.
    pub(crate) fn reserve() -> Option<Self> {
        static CHOSEN: OnceLock<Option<libc::c_int>> = OnceLock::new();
        let chosen = *CHOSEN.get_or_init(|| {
            (libc::SIGRTMIN()..libc::SIGRTMAX())
                .rev()
                .find(|&signal| handler_of(signal) == Some(libc::SIG_DFL))
                .filter(|&signal| install(signal))
        });
        chosen.filter(|&signal| handler_of(signal) == Some(our_handler())).map(Self)
    }
}

/// A thread of this process, by its kernel id. Valid until the thread ends: whoever keeps one knows when that is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThreadHandle(libc::pid_t);

impl ThreadHandle {
    /// The calling thread, which from now on takes no signal but `wake`: signals of the host program belong to its
    /// own threads, and the mask that this thread inherited may block ours.
    pub(crate) fn of_waiter(wake: Option<WakeSignal>) -> Self {
        let mut blocked = MaybeUninit::uninit();
        // SAFETY: sigfillset initialises the set that it is given and cannot fail on a valid pointer.
        unsafe { libc::sigfillset(blocked.as_mut_ptr()) };
        if let Some(WakeSignal(signal)) = wake {
            // SAFETY: the set was initialised above, and `signal` is a valid number.
            unsafe { libc::sigdelset(blocked.as_mut_ptr(), signal) };
        }
        // SAFETY: the set was initialised above; only the mask of the calling thread changes.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), std::ptr::null_mut()) };
        // SAFETY: gettid has no arguments and cannot fail.
        Self(unsafe { libc::gettid() })
    }

    /// End the system call that the thread is in, if it is in one: a signal that comes just before the call is lost,
    /// so callers repeat it until the thread answers.
    pub(crate) fn wake(self, signal: WakeSignal) {
        // SAFETY: a plain system call; the handler of `signal` does nothing.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.0, signal.0) };
    }
}

/// A file that becomes readable once, for event loops (eventfd(2)).
#[derive(Debug)]
pub(crate) struct Event(ProcessFile);

impl Event {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: a plain system call without pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd == -1 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was made by the call above and has no other owner.
        Ok(Self(ProcessFile::new(unsafe { File::from_raw_fd(fd) })))
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
