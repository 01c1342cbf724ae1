//! Sleeping on a word of shared memory until another process changes it (futex(2)).
//!
//! Never with the PRIVATE flag: it finds only the waiters of one process, and would lose every hand-over.

use std::time::Duration;

use crate::sync::AtomicU32;

/// Sleep until somebody calls `wake_sleepers` on this word, at most `timeout`; returns at once when the word is not
/// `expected`. May also return for no reason: look at what you wait for, and come again.
pub(crate) fn sleep_on(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(timeout.subsec_nanos().cast_signed()),
    };
    // SAFETY: `word` and `timeout` outlive the call; the kernel only reads them.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &raw const timeout) };
}

/// Wake all threads of all processes that sleep on this word.
pub(crate) fn wake_sleepers(word: &AtomicU32) {
    // SAFETY: `word` outlives the call; the kernel uses its address alone.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX) };
}
