//! A process's place among its peers: joins, beats, gates its steps, leaves.
//!
//! The gate decides from the registry and the clock alone; the heartbeat thread never takes a lock that a step
//! could wait for longer than a copy of a few words.

mod company;
mod desk;
mod gate;
mod heartbeat;
mod member;
mod meter;
mod ready;
mod snapshot;
mod turn;
mod watch;

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::key::GpuKey;
use crate::layout::flag;
use crate::place::Place;
use crate::registry::{Owner, SegmentPath};
use crate::sync::{AtomicU32, Ordering};
use crate::sys::{PerProcess, process_identity};

use heartbeat::Beat;
use member::Member;

pub use company::{SCHEDULE_FORM, Schedule};
pub use ready::TurnWait;
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
    /// What it wants: turns, unless a peer that knows only the grid is at work.
    pub schedule: Schedule,
}

/// A joined peer. Dropping it leaves.
///
/// A forked child joins with a slot of its own when it first uses its copy.
#[derive(Debug)]
pub struct Pacer {
    settings: Settings,
    /// Bits of the weight in force, an `f32`.
    weight: AtomicU32,
    joined: PerProcess<Result<Joined>>,
    left: AtomicU32,
}

/// What a process has by joining.
#[derive(Debug)]
struct Joined {
    member: Arc<Member>,
    beat: Arc<Beat>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Joined {
    fn new(settings: &Settings, weight: f32) -> Result<Self> {
        let path = SegmentPath::new(&settings.place, &settings.key);
        let mut flags = if settings.gated { 0 } else { flag::UNGATED };
        if settings.schedule == Schedule::Grid {
            flags |= flag::GRID;
        }
        let owner = Owner { identity: process_identity(), name: settings.name.clone(), weight, flags };
        let member = Arc::new(Member::join(settings.key.clone(), settings.place.clone(), path, owner)?);
        let beat = Arc::new(Beat::default());
        let thread = heartbeat::start(Arc::clone(&member), Arc::clone(&beat))?;
        Ok(Self { member, beat, thread: Mutex::new(Some(thread)) })
    }

    fn leave(&self) {
        self.beat.stop();
        let thread = self.thread.lock().map_or(None, |mut thread| thread.take());
        if let Some(thread) = thread {
            // A heartbeat that panicked has nothing left to wait for.
            let _ = thread.join();
        }
        self.member.leave();
    }
}

impl Pacer {
    /// Join the peers of a GPU and start the heartbeat.
    ///
    /// With all 16 slots taken this succeeds too: the process holds back by itself and tries again at each beat.
    ///
    /// # Errors
    /// `InvalidArgument` for a weight out of range, `RegistryUnavailable` when the segment cannot be used.
    pub fn join(settings: Settings) -> Result<Self> {
        check_weight(settings.weight)?;
        let weight = narrow(settings.weight);
        let joined = PerProcess::new(Ok(Joined::new(&settings, weight)?));
        Ok(Self { settings, weight: AtomicU32::new(weight.to_bits()), joined, left: AtomicU32::new(0) })
    }

    /// This process's membership; a forked child joins here. `Err` when it has none, with the reason.
    fn member(&self) -> std::result::Result<&Member, String> {
        self.joined().map(|joined| &*joined.member)
    }

    fn joined(&self) -> std::result::Result<&Joined, String> {
        if self.left.load(Ordering::Relaxed) != 0 {
            return Err("left".into());
        }
        match self.joined.get_or_make(|| Joined::new(&self.settings, self.narrow_weight())) {
            Ok(joined) => Ok(joined),
            Err(error) => Err(error.to_string()),
        }
    }

    fn narrow_weight(&self) -> f32 {
        f32::from_bits(self.weight.load(Ordering::Relaxed))
    }

    /// The gate before a unit of work: ends the unit before it, and begins the next one, if it need not wait.
    ///
    /// False: it must wait, with `wait` in a loop, or `start_wait` and `look`; then the unit has begun when one of `wait`
    /// and `look` says true. `abandon` ends the wait without a unit.
    #[must_use]
    pub fn arrive(&self) -> bool {
        self.member().map_or(true, Member::arrive)
    }

    /// Sleep at most `slice` towards this peer's turn; whether the unit has begun.
    #[must_use]
    pub fn wait(&self, slice: Duration) -> bool {
        self.member().map_or(true, |member| member.wait(slice))
    }

    /// Send a thread to wait on behalf of an event loop, which then calls `look`; `None` where there is nothing to wait for.
    ///
    /// # Errors
    /// `Io` when the system gives no thread or no descriptor.
    pub fn start_wait(&self) -> Result<Option<TurnWait>> {
        self.joined().ok().map(|joined| TurnWait::start(Arc::clone(&joined.member))).transpose()
    }

    /// Whether the unit that had to wait has begun now.
    #[must_use]
    pub fn look(&self) -> bool {
        self.member().map_or(true, Member::look)
    }

    /// Do not wait any longer.
    pub fn abandon(&self) {
        let _ = self.member().map(Member::abandon);
    }

    /// Note how long a wait took, for the others to see.
    pub fn add_slept(&self, slept: Duration) {
        let slept_us = u64::try_from(slept.as_micros()).unwrap_or(u64::MAX);
        let _ = self.member().map(|member| member.add_slept(slept_us));
    }

    /// The unit ended: the device is synchronised, what follows is not GPU work.
    pub fn done(&self) {
        let _ = self.member().map(Member::done);
    }

    /// A request begins: active until the matching `close_request`, however long the work takes.
    pub fn open_request(&self) {
        let _ = self.member().map(Member::open_request);
    }

    /// A request ended; when it was the last one, idle at once.
    pub fn close_request(&self) {
        let _ = self.member().map(Member::close_request);
    }

    /// For an ungated process: it works from `true` to `false`. Repeating a value changes nothing.
    pub fn mark(&self, active: bool) {
        let _ = self.member().map(|member| member.mark(active));
    }

    /// Idle at once: the others get this peer's part now, not after the activity window.
    pub fn idle(&self) {
        let _ = self.member().map(Member::idle);
    }

    /// Microseconds left of this peer's turn, or of its window; 0 when it is not its turn, `None` while it need not share.
    #[must_use]
    pub fn remaining_us(&self) -> Option<u64> {
        self.member().ok().and_then(Member::remaining_us)
    }

    /// Show the other peers that this process holds the lease of their GPU. A forked child starts without.
    pub fn note_lease(&self, exclusive: bool, shared: bool) {
        let flags = if exclusive { flag::LEASE_EX } else { 0 } | if shared { flag::LEASE_SH } else { 0 };
        if let Some(Ok(joined)) = self.joined.get() {
            joined.member.note_lease(flags);
        }
    }

    /// Change the weight while running.
    ///
    /// # Errors
    /// `InvalidArgument` for a weight out of range.
    pub fn set_weight(&self, weight: f64) -> Result<()> {
        check_weight(weight)?;
        self.weight.store(narrow(weight).to_bits(), Ordering::Relaxed);
        let _ = self.member().map(|member| member.set_weight(narrow(weight)));
        Ok(())
    }

    /// The weight in force.
    #[must_use]
    pub fn weight(&self) -> f64 {
        f64::from(self.narrow_weight())
    }

    /// Everybody of this GPU, as this peer sees them now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.member().map_or_else(
            |_| Snapshot { gpu_key: self.settings.key.to_string(), ..Snapshot::default() },
            Member::snapshot,
        )
    }

    /// Why this peer is not paced at present; `None` when it is.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        self.member().map_or_else(Some, Member::reason)
    }

    /// The slot it has, if any.
    #[must_use]
    pub fn slot(&self) -> Option<usize> {
        self.member().ok().and_then(Member::slot)
    }

    /// Leave: frees the slot and ends the heartbeat. Harmless when repeated, and in a forked child, where it means that
    /// the child does not join.
    pub fn leave(&self) {
        self.left.store(1, Ordering::Relaxed);
        if let Some(Ok(joined)) = self.joined.get() {
            joined.leave();
        }
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
    Err(Error::InvalidArgument { name: "weight", value: format!("{weight:?}"), legal: WEIGHT_FORM })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the segment stores weights as f32; the range was checked"
)]
fn narrow(weight: f64) -> f32 {
    weight as f32
}
