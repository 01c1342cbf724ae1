//! The registry: who shares a GPU, in a segment that nobody owns and no death can wedge.
//!
//! A slot belongs to whoever holds its lock byte. The seed's rule, compare-and-swap on `pid` after 3 s without a
//! heartbeat, gives one slot to two processes under load (and most of all in containers, where pids are equal); the
//! kernel's byte lock does not, and shows a death at once. The seed's fields are still written, so that peers which
//! know only them see us.

mod claim;
#[cfg(test)]
mod fixture;
mod liveness;
mod locks;
mod name;
mod path;
mod segment;
mod steps;
mod view;

pub(crate) use claim::{Claim, Owner};
pub(crate) use liveness::{DEAD_AFTER_US, Sweep, Verdict, owner_is_gone};
pub use locks::LockKind;
pub(crate) use locks::{Liveness, Locks};
pub(crate) use path::SegmentPath;
pub(crate) use segment::MappedSegment;
pub use segment::lock_kind;
pub(crate) use steps::ClockWatch;
pub(crate) use view::{SlotView, extended, read_slot};
