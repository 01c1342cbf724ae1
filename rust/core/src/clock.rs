//! Clocks and sleeps: their only reader. Monotonic values never leave the process.
//!
//! What peers publish to each other is wall time, because every process of a host shares that epoch and a monotonic
//! clock starts anew per process on some platforms (seed bug-2245). What is judged inside a process is monotonic.
#![expect(clippy::disallowed_methods, reason = "this is the place that the lint points everybody to")]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::sys;

/// Microseconds since the Unix epoch: the clock that all peers share. Negative before 1970.
#[must_use]
pub fn wall_us() -> i64 {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |us| -us),
    }
}

/// Microseconds of a clock that never runs backwards and stands still while the machine is suspended; means nothing to a
/// process of another machine or time namespace.
#[must_use]
pub fn monotonic_us() -> u64 {
    sys::monotonic_us()
}

/// Sleep for a relative span. Callers cap it and look again afterwards, so that a clock step cannot oversleep them.
pub(crate) fn sleep(span: Duration) {
    std::thread::sleep(span);
}
