//! Atomics and locks: the one place they are taken from, so that loom can stand in for them.
#![expect(clippy::disallowed_types, reason = "this is the place that the lint points everybody to")]

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
