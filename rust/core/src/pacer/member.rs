//! The state that a pacer's steps and its heartbeat share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::clock;
use crate::error::Result;
use crate::key::GpuKey;
use crate::layout::{ExtSlot, SLOT_COUNT, Slot, flag};
use crate::place::Place;
use crate::registry::{Claim, MappedSegment, Owner, SegmentPath, Sweep, Verdict};
use crate::sync::{AtomicU32, Ordering};

use super::company::Schedule;
use super::desk::Desk;
use super::turn::wake;

/// Beats of half a second that the published busy fraction covers.
const BUSY_BEATS: usize = 4;

/// Where this process stands in the registry now.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    /// `None` after leaving, and when the segment became unusable.
    pub(crate) segment: Option<Arc<MappedSegment>>,
    /// `None` while all slots are taken.
    pub(crate) claim: Option<Claim>,
    /// Why the process is not paced.
    reason: Option<String>,
    /// Stands for our half of the extension where the segment has none that we know.
    pub(crate) spare: Arc<ExtSlot>,
}

impl Seat {
    fn new(segment: Option<Arc<MappedSegment>>, claim: Option<Claim>, reason: Option<String>) -> Self {
        Self { segment, claim, reason, spare: Arc::default() }
    }

    /// Free the slot, if there is one. Where the file was cut, the claim goes with the handle: the kernel drops the
    /// lock byte at its close.
    fn give_back(&self) {
        if let (Some(segment), Some(claim)) = (self.segment.as_deref().filter(|old| old.whole()), self.claim)
        {
            claim.release(segment);
        }
    }
}

/// All that the threads of this process share; locked for the time of a few loads and stores.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) seat: Seat,
    pub(crate) desk: Desk,
}

/// One process's membership.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) key: GpuKey,
    place: Place,
    path: SegmentPath,
    owner: Owner,
    /// What this process wants; what is in force depends on the others.
    pub(crate) schedule: Schedule,
    state: Mutex<State>,
    /// Bits of the weight, an `f32`.
    weight: AtomicU32,
    /// `flag::LEASE_EX` and `flag::LEASE_SH`, as this process holds the GPU's lease.
    lease: AtomicU32,
    /// Bit per slot: alive at the last sweep.
    pub(crate) known: AtomicU32,
    /// Bit per slot: out of the schedule at the last sweep (stalled, silent or dead).
    pub(crate) barred: AtomicU32,
    /// Bit per slot: stalled at the last sweep.
    pub(crate) stalled: AtomicU32,
}

impl Member {
    pub(crate) fn join(key: GpuKey, place: Place, path: SegmentPath, owner: Owner) -> Result<Self> {
        let weight = AtomicU32::new(owner.weight.to_bits());
        let schedule = if owner.flags & flag::GRID == 0 { Schedule::Turn } else { Schedule::Grid };
        let segment = Arc::new(MappedSegment::open(&place, &path)?);
        let claim = Claim::take(&segment, &owner, clock::wall_us())?;
        let reason = claim.is_none().then(full);
        let member = Self {
            key,
            place,
            path,
            owner,
            schedule,
            state: Mutex::new(State { seat: Seat::new(Some(segment), claim, reason), desk: Desk::default() }),
            weight,
            lease: AtomicU32::new(0),
            known: AtomicU32::new(0),
            barred: AtomicU32::new(0),
            stalled: AtomicU32::new(0),
        };
        member.sweep(&mut Sweep::default());
        Ok(member)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The seat as it is now, for work that takes longer than the lock may be held.
    pub(crate) fn seat(&self) -> Seat {
        self.state().seat.clone()
    }

    pub(crate) fn slot(&self) -> Option<usize> {
        self.state().seat.claim.map(|claim| claim.slot)
    }

    pub(crate) fn reason(&self) -> Option<String> {
        self.state().seat.reason.clone()
    }

    pub(crate) fn weight(&self) -> f32 {
        f32::from_bits(self.weight.load(Ordering::Relaxed))
    }

    pub(crate) fn set_weight(&self, weight: f32) {
        self.weight.store(weight.to_bits(), Ordering::Relaxed);
        self.publish(|base, _| base.weight.store(weight.to_bits(), Ordering::Relaxed));
        if let Some(segment) = self.seat().segment.filter(|segment| segment.extended()) {
            segment.bytes().ext.change_seq.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Show that this process holds the GPU's lease, in these ways.
    pub(crate) fn note_lease(&self, flags: u32) {
        self.lease.store(flags, Ordering::Relaxed);
        self.publish(|_, ext| {
            ext.flags.fetch_and(!(flag::LEASE_EX | flag::LEASE_SH), Ordering::Relaxed);
            ext.flags.fetch_or(flags, Ordering::Relaxed);
        });
    }

    /// Run `write` on the two halves of our slot, if we have one.
    pub(crate) fn publish(&self, write: impl FnOnce(&Slot, &ExtSlot)) {
        let state = self.state();
        if let (Some(segment), Some(claim)) = (&state.seat.segment, state.seat.claim) {
            let bytes = segment.bytes();
            let ext = if claim.extended() { &bytes.ext_slots[claim.slot] } else { &*state.seat.spare };
            write(&bytes.slots[claim.slot], ext);
        }
    }

    /// One heartbeat: mend what broke, publish.
    pub(crate) fn beat(&self, busy: &mut BusyWindow) {
        // First: what follows touches the mapping, which must be whole.
        self.mend();
        self.keep_request();
        let (wall_us, now_us) = (clock::wall_us(), clock::monotonic_us());
        let busy_ppm = busy.add(now_us, self.state().desk.meter.busy_us(now_us));
        self.publish(|base, ext| {
            base.busy_ppm.store(busy_ppm, Ordering::Relaxed);
            ext.hb_seq.fetch_add(1, Ordering::Relaxed);
            base.heartbeat_us.store(wall_us, Ordering::Release); // Release: pairs with the Acquire in `read_slot`.
        });
    }

    /// Whether there is work, ours or anybody's that we would have to wait for.
    pub(crate) fn at_work_itself(&self) -> bool {
        self.state().desk.meter.active(clock::monotonic_us())
    }

    /// Judge every other slot, and free those of the dead. Our own waiters look again when that changes anything.
    pub(crate) fn sweep(&self, sweep: &mut Sweep) {
        let wall_us = clock::wall_us();
        let seat = self.seat();
        let Some(segment) = &seat.segment else { return };
        let own = seat.claim.map(|claim| claim.slot);
        let verdicts = sweep.look(segment, own, (clock::monotonic_us(), wall_us), true);
        let bits = |wanted: fn(Verdict) -> bool| {
            (0..SLOT_COUNT)
                .filter(|slot| verdicts[*slot].is_some_and(wanted))
                .fold(0, |bits, slot| bits | 1 << slot)
        };
        let known = self.known.swap(bits(|verdict| verdict == Verdict::Alive), Ordering::Relaxed);
        self.barred.store(bits(|verdict| verdict != Verdict::Alive), Ordering::Relaxed);
        self.stalled.store(bits(|verdict| verdict == Verdict::Stalled), Ordering::Relaxed);
        let extended = seat.claim.is_some_and(|claim| claim.extended());
        if let Some(own) = own.filter(|_| extended && known != self.known.load(Ordering::Relaxed)) {
            wake(segment.bytes(), own);
        }
    }

    /// Take a slot when we have none, and move house when the segment behind the name is another one.
    fn mend(&self) {
        let before = {
            let seat = self.seat();
            match (&seat.segment, &seat.claim) {
                (Some(segment), Some(claim))
                    if segment.still_named(&self.path) && claim.intact(segment.bytes()) =>
                {
                    segment.restore_header();
                    return;
                }
                _ => seat.claim,
            }
        };
        let flags = self.owner.flags | self.lease.load(Ordering::Relaxed);
        let owner = Owner { weight: self.weight(), flags, ..self.owner.clone() };
        let fresh = MappedSegment::open(&self.place, &self.path).and_then(|segment| {
            if let Some(before) = before {
                before.disown(segment.bytes());
            }
            Claim::take(&segment, &owner, clock::wall_us()).map(|claim| (Arc::new(segment), claim))
        });
        let next = match fresh {
            Ok((segment, Some(claim))) => Seat::new(Some(segment), Some(claim), None),
            Ok((segment, None)) => Seat::new(Some(segment), None, Some(full())),
            Err(error) => Seat::new(None, None, Some(error.to_string())),
        };
        self.sit(next);
    }

    pub(crate) fn leave(&self) {
        self.idle();
        self.sit(Seat::new(None, None, Some("left".into())));
    }

    /// Change seats, and give the old one back.
    fn sit(&self, next: Seat) {
        let before = std::mem::replace(&mut self.state().seat, next);
        before.give_back();
    }
}

fn full() -> String {
    format!("all {SLOT_COUNT} slots are taken: holding back without one until one is free")
}

/// The busy fraction over the last beats.
#[derive(Debug, Default)]
pub(crate) struct BusyWindow {
    samples: [(u64, u64); BUSY_BEATS],
    beats: usize,
}

impl BusyWindow {
    /// Add a reading of the meter; the busy fraction since the oldest one kept, in parts per million.
    pub(crate) fn add(&mut self, now_us: u64, busy_us: u64) -> u32 {
        let (since_us, since_busy) = self.samples[self.beats % BUSY_BEATS];
        let first = self.beats < BUSY_BEATS;
        self.samples[self.beats % BUSY_BEATS] = (now_us, busy_us);
        self.beats += 1;
        let (since_us, since_busy) = if first { self.samples[0] } else { (since_us, since_busy) };
        let worked_us = busy_us.saturating_sub(since_busy).saturating_mul(1_000_000);
        let ppm = worked_us.checked_div(now_us.saturating_sub(since_us)).unwrap_or(0);
        u32::try_from(ppm.min(1_000_000)).unwrap_or(1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_the_fraction_of_the_last_two_seconds() {
        let mut window = BusyWindow::default();
        for beat in 0..10 {
            window.add(beat * 500_000, 0);
        }

        let mut last = 0;
        for beat in 10..16 {
            last = window.add(beat * 500_000, (beat - 9) * 250_000);
        }

        assert_eq!(last, 500_000);
    }
}
