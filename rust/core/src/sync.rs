//! Atomics: the one place they are taken from, so that loom can stand in for them.
//!
//! Aliases and not re-exports, because the lint that sends everybody here sees through a re-export.
#![expect(clippy::disallowed_types, reason = "this is the place that the lint points everybody to")]

pub(crate) use std::sync::atomic::Ordering;

pub(crate) type AtomicI64 = std::sync::atomic::AtomicI64;
pub(crate) type AtomicU32 = std::sync::atomic::AtomicU32;
pub(crate) type AtomicU64 = std::sync::atomic::AtomicU64;
