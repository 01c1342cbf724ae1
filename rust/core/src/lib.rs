//! The core of ocgpu: the registry, the schedule and the lease, without Python.
//!
//! Decisions (shares, windows, who may take a slot) are pure functions; thin shells feed them with clocks, shared
//! memory and locks. Everything that differs between operating systems stands in `sys`.

mod clock;
mod error;
mod json;
mod key;
mod layout;
mod lease;
mod pacer;
mod place;
mod registry;
pub mod schedule;
mod sync;
mod sys;

pub use clock::{monotonic_us, wall_us};
pub use error::{Error, Result};
pub use key::{GPU_KEY_FORM, GpuKey};
pub use layout::SLOT_COUNT;
pub use lease::{
    Lease, LeaseMode, LeaseOptions, LeaseParty, LeaseStatus, LeaseWait, adopt_orphans, lease_status,
    lease_status_at,
};
pub use pacer::{
    Pacer, Peer, PeerState, SCHEDULE_FORM, Schedule, Settings, Snapshot, TurnWait, WEIGHT_FORM, check_weight,
    peers,
};
pub use place::{Place, Share};
pub use registry::{LockKind, lock_kind};
