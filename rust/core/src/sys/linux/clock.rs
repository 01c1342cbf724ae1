//! The monotonic clock, without the arithmetic of `std::time::Instant`: a step reads it each time.

use std::mem::MaybeUninit;

/// `CLOCK_MONOTONIC` in microseconds (`clock_gettime(2)`): it stands still while the machine is suspended.
pub(crate) fn monotonic_us() -> u64 {
    let mut now = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: the kernel fills `now`; the call cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, now.as_mut_ptr()) };
    // SAFETY: filled by the call above.
    let now = unsafe { now.assume_init() };
    now.tv_sec.cast_unsigned() * 1_000_000 + now.tv_nsec.cast_unsigned() / 1000
}
