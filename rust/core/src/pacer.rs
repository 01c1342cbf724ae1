//! A process's place among its peers: joins, beats, gates its steps, leaves.
//!
//! The gate decides from the registry and the clock alone; the heartbeat thread never takes a lock that a step
//! could wait for longer than a copy of a few words.

mod gate;
mod heartbeat;
mod member;
mod meter;
mod snapshot;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::key::GpuKey;
use crate::layout::flag;
use crate::place::Place;
use crate::registry::{Owner, SegmentPath};
use crate::sys::process_identity;

use heartbeat::Beat;
use member::Member;

pub use snapshot::{Peer, PeerState, Snapshot, peers};

/// What a weight must be, for messages.
pub const WEIGHT_FORM: &str = "a number from 0.001 to 1000";

/// How to join.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Which GPU.
    pub key: GpuKey,
    /// Where the segment lies.
    pub place: Place,
    /// Relative claim on the compute, 0.001 to 1000.
    pub weight: f64,
    /// Shown to the other peers; cut to 47 bytes.
    pub name: String,
    /// `false` for a process that computes but cannot be paused: it takes part without a gate.
    pub gated: bool,
}

/// A joined peer. Dropping it leaves.
#[derive(Debug)]
pub struct Pacer {
    member: Arc<Member>,
    beat: Arc<Beat>,
    thread: std::sync::Mutex<Option<JoinHandle<()>>>,
}

impl Pacer {
    /// Join the peers of a GPU and start the heartbeat.
    ///
    /// With all 16 slots taken this succeeds too: the process runs unpaced and tries again at each beat.
    ///
    /// # Errors
    /// `InvalidArgument` for a weight out of range, `RegistryUnavailable` when the segment cannot be used.
    pub fn join(settings: Settings) -> Result<Self> {
        check_weight(settings.weight)?;
        let path = SegmentPath::new(&settings.place, &settings.key);
        let flags = flag::GRID | if settings.gated { 0 } else { flag::UNGATED };
        let owner = Owner {
            identity: process_identity(),
            name: settings.name,
            weight: narrow(settings.weight),
            flags,
        };
        let member = Arc::new(Member::join(settings.key, settings.place, path, owner)?);
        let beat = Arc::new(Beat::default());
        let thread = heartbeat::start(Arc::clone(&member), Arc::clone(&beat))?;
        Ok(Self { member, beat, thread: std::sync::Mutex::new(Some(thread)) })
    }

    /// The gate before a unit of work: ends the unit before it, and says how many microseconds to wait.
    ///
    /// 0: the unit has begun. Else wait with `wait` (or `look` and other means), then call `begin`.
    #[must_use]
    pub fn arrive(&self) -> u64 {
        self.member.arrive()
    }

    /// Sleep at most `slice` towards this peer's window; microseconds left to wait, 0 = the unit may begin.
    #[must_use]
    pub fn wait(&self, slice: Duration) -> u64 {
        self.member.wait(slice)
    }

    /// As `wait`, without sleeping: for callers that sleep by other means.
    #[must_use]
    pub fn look(&self) -> u64 {
        self.member.look()
    }

    /// A unit of work that had to wait begins, after `slept_us` at the gate.
    pub fn begin(&self, slept_us: u64) {
        self.member.begin(slept_us);
    }

    /// The unit ended: the device is synchronised, what follows is not GPU work.
    pub fn done(&self) {
        self.member.done();
    }

    /// A request begins: active until the matching `close_request`, however long the work takes.
    pub fn open_request(&self) {
        self.member.open_request();
    }

    /// A request ended; when it was the last one, idle at once.
    pub fn close_request(&self) {
        self.member.close_request();
    }

    /// For an ungated process: it works from `true` to `false`. Repeating a value changes nothing.
    pub fn mark(&self, active: bool) {
        self.member.mark(active);
    }

    /// Idle at once: the others' windows grow now, not after the activity window.
    pub fn idle(&self) {
        self.member.idle();
    }

    /// Microseconds until this peer's window closes; `None` while it need not share.
    #[must_use]
    pub fn remaining_us(&self) -> Option<u64> {
        self.member.remaining_us()
    }

    /// Change the weight while running.
    ///
    /// # Errors
    /// `InvalidArgument` for a weight out of range.
    pub fn set_weight(&self, weight: f64) -> Result<()> {
        check_weight(weight)?;
        self.member.set_weight(narrow(weight));
        Ok(())
    }

    /// The weight in force.
    #[must_use]
    pub fn weight(&self) -> f64 {
        f64::from(self.member.weight())
    }

    /// Everybody of this GPU, as this peer sees them now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.member.snapshot()
    }

    /// Why this peer is not paced at present; `None` when it is.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        self.member.reason()
    }

    /// The slot it has, if any.
    #[must_use]
    pub fn slot(&self) -> Option<usize> {
        self.member.slot()
    }

    /// Leave: frees the slot and ends the heartbeat. Harmless when repeated, and in a forked child, which has left
    /// already.
    pub fn leave(&self) {
        if self.member.forked() {
            return;
        }
        self.beat.stop();
        let thread = self.thread.lock().map_or(None, |mut thread| thread.take());
        if let Some(thread) = thread {
            // A heartbeat that panicked has nothing left to wait for.
            let _ = thread.join();
        }
        self.member.leave();
    }
}

impl Drop for Pacer {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Whether a weight is legal.
///
/// # Errors
/// `InvalidArgument` when it is not a number from 0.001 to 1000.
pub fn check_weight(weight: f64) -> Result<()> {
    if (0.001..=1000.0).contains(&weight) {
        return Ok(());
    }
    Err(Error::InvalidArgument { name: "weight", value: weight.to_string(), legal: WEIGHT_FORM })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the segment stores weights as f32; the range was checked"
)]
fn narrow(weight: f64) -> f32 {
    weight as f32
}
