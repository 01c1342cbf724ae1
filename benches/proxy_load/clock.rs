//! The machine's monotonic clock, which all processes share, and the CPU time of another process.

use std::io;
use std::mem::zeroed;

/// Nanoseconds of `CLOCK_MONOTONIC`.
pub(crate) fn now_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC).unwrap_or_default()
}

/// Nanoseconds of CPU that a process has used, all its threads together.
///
/// # Errors
/// There is no such process.
pub(crate) fn cpu_ns(pid: i32) -> io::Result<u64> {
    let mut clock = 0;
    // SAFETY: `clock` is a live `clockid_t`; the call writes there only.
    let fault = unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) };
    if fault != 0 {
        return Err(io::Error::from_raw_os_error(fault));
    }
    read(clock)
}

fn read(clock: libc::clockid_t) -> io::Result<u64> {
    // SAFETY: all bits zero are a `timespec`.
    let mut time: libc::timespec = unsafe { zeroed() };
    // SAFETY: `time` is a live `timespec`; the call writes there only.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
}
