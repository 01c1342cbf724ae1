//! What a person sees: every peer with its share and its state.

use crate::clock;
use crate::error::Result;
use crate::json;
use crate::key::GpuKey;
use crate::layout::{SLOT_COUNT, flag};
use crate::lease::LeaseMode;
use crate::place::Place;
use crate::registry::{DEAD_AFTER_US, MappedSegment, SegmentPath, SlotView, Sweep, Verdict, read_slot};
use crate::schedule::{Grid, Roster, weight_milli};
use crate::sync::Ordering;

use super::company::Schedule;
use super::member::Member;

/// What a peer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerState {
    /// Alive, without work in the activity window.
    Idle,
    /// At work, and it is its turn.
    Running,
    /// At work, waiting for its turn.
    Waiting,
    /// Holds its slot but does not move.
    Stopped,
    /// At work, and cannot be paused.
    Ungated,
    /// Gone; its slot is not yet free.
    Dead,
}

impl PeerState {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Stopped => "stopped",
            Self::Ungated => "ungated",
            Self::Dead => "dead",
        }
    }
}

/// One peer at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Peer {
    /// Process id, in its own pid namespace.
    pub pid: u32,
    /// What it calls itself.
    pub name: String,
    /// Its weight, in thousandths.
    pub weight_milli: u32,
    /// Its share of the compute, parts per million; 0 while idle.
    pub share_ppm: u32,
    /// Measured fraction of time at work, parts per million.
    pub busy_ppm: u32,
    /// Whether it worked within the activity window.
    pub active: bool,
    /// Whether it is in the schedule.
    pub alive: bool,
    /// What it does.
    pub state: PeerState,
    /// Age of its heartbeat by the wall clock, in milliseconds; never negative.
    pub heartbeat_age_ms: u64,
    /// Its slot.
    pub slot: usize,
    /// Units of work since it joined; 0 for a peer that does not count them.
    pub steps: u64,
    /// Milliseconds slept at the gate since it joined.
    pub slept_ms: u64,
    /// How it holds the GPU's lease; `None` when it does not.
    pub lease: Option<LeaseMode>,
}

/// Everybody of one GPU at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Which GPU; empty when there is none.
    pub gpu_key: String,
    /// Which schedule is in force.
    pub schedule: Schedule,
    /// Whoever looks, if it has a slot.
    pub own: Option<Peer>,
    /// The others, in slot order.
    pub peers: Vec<Peer>,
}

impl Default for Snapshot {
    /// Nobody of no GPU.
    fn default() -> Self {
        Self { gpu_key: String::new(), schedule: Schedule::Turn, own: None, peers: Vec::new() }
    }
}

impl Snapshot {
    /// The seed's `/gpu/peers` document, with our keys behind the seed's.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut out = json::Object::new();
        match self.gpu_key.as_str() {
            "" => out.raw("gpu_key", "null"),
            key => out.text("gpu_key", key),
        }
        match &self.own {
            Some(own) => out.object("self", |out| describe_into(out, own)),
            None => out.raw("self", "null"),
        }
        out.array("peers", self.peers.iter().map(|peer| |out: &mut json::Object| describe_into(out, peer)));
        out.text("schedule", self.schedule.as_str());
        out.end()
    }
}

fn describe_into(out: &mut json::Object, peer: &Peer) {
    out.integer("pid", u64::from(peer.pid));
    out.text("name", &peer.name);
    out.decimal("weight", u64::from(peer.weight_milli), 3);
    out.decimal("share_pct", u64::from(peer.share_ppm), 4);
    out.decimal("busy_pct", u64::from(peer.busy_ppm), 4);
    out.boolean("active", peer.active);
    out.integer("heartbeat_age_ms", peer.heartbeat_age_ms);
    out.boolean("alive", peer.alive);
    out.text("state", peer.state.as_str());
    out.integer("slot", peer.slot as u64);
    out.integer("steps", peer.steps);
    out.integer("slept_ms", peer.slept_ms);
    match peer.lease {
        Some(mode) => out.text("lease", mode.as_str()),
        None => out.raw("lease", "null"),
    }
}

/// Look at the peers of a GPU without joining them. Nobody there is an empty snapshot.
///
/// # Errors
/// `RegistryUnavailable` when there is a segment and it cannot be read.
pub fn peers(place: &Place, key: &GpuKey) -> Result<Snapshot> {
    let path = SegmentPath::new(place, key);
    let Some(segment) = MappedSegment::open_existing(place, &path)? else {
        return Ok(Snapshot { gpu_key: key.to_string(), ..Snapshot::default() });
    };
    let now = (clock::monotonic_us(), clock::wall_us());
    let verdicts = Sweep::default().look(&segment, None, now, false);
    Ok(describe(&segment, key, None, Schedule::Turn, |view| verdicts[view.slot].unwrap_or(Verdict::Dead)))
}

impl Member {
    pub(crate) fn snapshot(&self) -> Snapshot {
        let empty = || Snapshot { gpu_key: self.key.to_string(), ..Snapshot::default() };
        let seat = self.seat();
        let Some(segment) = &seat.segment else { return empty() };
        let own = seat.claim.map(|claim| claim.slot);
        describe(segment, &self.key, own, self.schedule, |view| self.verdict(view, own))
    }

    /// What the last sweep said of a peer; one that joined since is judged by its heartbeat.
    fn verdict(&self, view: &SlotView, own: Option<usize>) -> Verdict {
        let bit = 1 << view.slot;
        if own == Some(view.slot) {
            return Verdict::Alive;
        }
        if self.stalled.load(Ordering::Relaxed) & bit != 0 {
            return Verdict::Stalled;
        }
        let known = self.known.load(Ordering::Relaxed) & bit != 0;
        let barred = self.barred.load(Ordering::Relaxed) & bit != 0;
        let age_us = clock::wall_us().saturating_sub(view.heartbeat_us).unsigned_abs();
        if known || (!barred && age_us <= DEAD_AFTER_US) { Verdict::Alive } else { Verdict::Silent }
    }
}

fn describe(
    segment: &MappedSegment,
    key: &GpuKey,
    own: Option<usize>,
    wanted: Schedule,
    verdict: impl Fn(&SlotView) -> Verdict,
) -> Snapshot {
    let wall_us = clock::wall_us();
    let judged: Vec<(SlotView, Verdict)> = (0..SLOT_COUNT)
        .filter_map(|slot| read_slot(segment.bytes(), slot))
        .map(|view| {
            let verdict = verdict(&view);
            (view, verdict)
        })
        .collect();
    let mut roster = Roster::default();
    let mut schedule = wanted;
    for (view, _) in judged.iter().filter(|(view, verdict)| view.active && *verdict == Verdict::Alive) {
        roster.insert(view.slot, weight_milli(view.weight));
        if own != Some(view.slot) && !view.takes_turns() {
            schedule = Schedule::Grid;
        }
    }
    let (grid, shares) = (Grid::new(&roster), roster.shares_ppm());
    let mut snapshot = Snapshot { gpu_key: key.to_string(), schedule, ..Snapshot::default() };
    for (view, verdict) in judged {
        let turn = match schedule {
            Schedule::Grid => roster.len() < 2 || grid.open(view.slot, wall_us),
            Schedule::Turn => !view.queued,
        };
        let share_ppm = shares[view.slot];
        let peer =
            Peer { share_ppm, state: state(&view, verdict, turn), ..Peer::from_view(view, verdict, wall_us) };
        if Some(peer.slot) == own {
            snapshot.own = Some(peer);
        } else {
            snapshot.peers.push(peer);
        }
    }
    snapshot
}

impl Peer {
    /// All that a slot says by itself; share and state depend on the others.
    fn from_view(view: SlotView, verdict: Verdict, wall_us: i64) -> Self {
        Self {
            pid: view.pid,
            weight_milli: weight_milli(view.weight),
            share_ppm: 0,
            busy_ppm: view.busy_ppm,
            active: view.active,
            alive: verdict == Verdict::Alive,
            state: PeerState::Idle,
            heartbeat_age_ms: u64::try_from(wall_us.saturating_sub(view.heartbeat_us) / 1000).unwrap_or(0),
            slot: view.slot,
            steps: view.steps,
            slept_ms: view.slept_us / 1000,
            lease: lease_mode(view.flags),
            name: view.name,
        }
    }
}

fn lease_mode(flags: u32) -> Option<LeaseMode> {
    match flags {
        _ if flags & flag::LEASE_EX != 0 => Some(LeaseMode::Exclusive),
        _ if flags & flag::LEASE_SH != 0 => Some(LeaseMode::Shared),
        _ => None,
    }
}

fn state(view: &SlotView, verdict: Verdict, turn: bool) -> PeerState {
    match verdict {
        Verdict::Stalled => PeerState::Stopped,
        Verdict::Dead | Verdict::Silent => PeerState::Dead,
        Verdict::Alive if !view.active => PeerState::Idle,
        Verdict::Alive if view.flags & flag::UNGATED != 0 => PeerState::Ungated,
        Verdict::Alive if turn => PeerState::Running,
        Verdict::Alive => PeerState::Waiting,
    }
}
