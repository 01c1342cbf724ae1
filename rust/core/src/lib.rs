//! The core of ocgpu: the registry, the schedule and the lease, without Python.
//!
//! Decisions (shares, windows, who may take a slot) are pure functions; thin shells feed them with clocks, shared
//! memory and locks. Everything that differs between operating systems stands in `sys`.

mod clock;
mod error;
mod key;
mod lease;
mod place;
mod sync;
mod sys;

pub use clock::{monotonic_us, wall_us};
pub use error::{Error, Result};
pub use key::GpuKey;
pub use lease::{
    Lease, LeaseMode, LeaseOptions, LeaseParty, LeaseStatus, LeaseWait, lease_status, lease_status_at,
};
pub use place::{Place, Share};
