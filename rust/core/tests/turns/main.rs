//! Promises of turn mode.

mod faults;
mod puppet;
mod round;
#[path = "../scratch/mod.rs"]
mod scratch;
