//! Who is alive: the kernel's word where there is one, the heartbeat where not.

use crate::layout::SLOT_COUNT;
use crate::registry::{Liveness, MappedSegment, SlotView, read_slot};
use crate::sync::Ordering;

use super::claim;

/// A heartbeat that did not move for this long is a death or a stop (the seed's constant).
pub(crate) const DEAD_AFTER_US: u64 = 3_000_000;
/// A slot without a lock to ask is freed only after it was watched, unchanged, for longer than two of the seed's beats.
const SETTLE_US: u64 = 1_200_000;
/// After this long without a sign of life nobody comes back to a slot.
const ABANDONED_US: u64 = 60_000_000;
/// A peer without a slot tries again at each beat; this is some of them.
const WANTED_US: u64 = 2_000_000;
/// How far a heartbeat may lie in the future and still be believed: clock adjustments between two readings.
const FUTURE_US: i64 = 500_000;

/// What is known of one slot's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// In the schedule.
    Alive,
    /// Holds its slot but does not move (stopped, suspended): out of the schedule, never reclaimed.
    Stalled,
    /// Gone: the kernel says so, or a peer without a lock was silent for long enough. Its slot can be freed.
    Dead,
    /// No heartbeat and no lock to ask: out of the schedule, not yet reclaimed.
    Silent,
}

/// What one look at a slot shows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    /// What the lock says that the owner named as its own.
    pub(crate) lock: Liveness,
    /// The owner is named as one that was taking the slot.
    pub(crate) claiming: bool,
    /// Age of the heartbeat by the wall clock.
    pub(crate) wall_age_us: i64,
    /// How long ago we saw the heartbeat move, by our own clock; `None` when this is the first look.
    pub(crate) moved_ago_us: Option<u64>,
    /// How long we have watched this owner without seeing its heartbeat change.
    pub(crate) unchanged_us: u64,
}

/// Who is alive: the lock first, then movement, then age.
///
/// Movement is judged by the reader's monotonic clock, so that a step of the wall clock kills nobody that was seen
/// before; only the first look has nothing but the age.
pub(crate) fn judge(look: Look) -> Verdict {
    let died_claiming = look.claiming && look.lock == Liveness::Free;
    if look.lock == Liveness::Free && (!died_claiming || settled(look)) {
        return Verdict::Dead;
    }
    let fresh = (-FUTURE_US..=i64::try_from(DEAD_AFTER_US).unwrap_or(i64::MAX)).contains(&look.wall_age_us);
    let moving = look.moved_ago_us.map_or(fresh, |ago| ago <= DEAD_AFTER_US);
    match (moving, look.lock) {
        (true, _) => Verdict::Alive,
        (false, Liveness::Held) => Verdict::Stalled,
        (false, _) if !fresh && settled(look) => Verdict::Dead,
        (false, _) => Verdict::Silent,
    }
}

/// Whether the slot of a dead owner is to be freed. One without a lock may have been stopped, and a peer of the seed that
/// goes on does not look whether its slot is its own still: it keeps it while nobody needs one, or for a minute.
fn is_due(look: Look, wanted: bool) -> bool {
    look.lock == Liveness::Free || wanted || look.unchanged_us >= ABANDONED_US
}

/// Whether somebody found no slot lately.
fn slots_are_wanted(segment: &MappedSegment, wall_us: i64) -> bool {
    let overflow_us = segment.bytes().ext.overflow_us.load(Ordering::Relaxed);
    segment.extended() && wall_us.saturating_sub(overflow_us).unsigned_abs() < WANTED_US
}

/// Nobody who runs would have left the slot unchanged for so long.
fn settled(look: Look) -> bool {
    look.unchanged_us >= SETTLE_US
}

/// What was last seen of a slot's owner; times by the reader's monotonic clock.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    owner: (u32, i64, u64),
    heartbeat_us: i64,
    first_us: u64,
    moved_us: Option<u64>,
}

impl Seen {
    /// Note what `view` shows at `now_us`.
    fn see(&mut self, view: &SlotView, now_us: u64) {
        if self.owner != view.owner() {
            let (owner, heartbeat_us) = (view.owner(), view.heartbeat_us);
            *self = Self { owner, heartbeat_us, first_us: now_us, moved_us: None };
        } else if self.heartbeat_us != view.heartbeat_us {
            self.heartbeat_us = view.heartbeat_us;
            self.moved_us = Some(now_us);
        }
    }

    /// What that means, given what the lock says.
    fn look(&self, view: &SlotView, lock: Liveness, now_us: u64, wall_us: i64) -> Look {
        // Before the first witnessed movement only a long watch counts against the owner.
        let watched_us = now_us.saturating_sub(self.first_us);
        let unmoved = (watched_us > DEAD_AFTER_US).then_some(watched_us);
        Look {
            lock,
            claiming: view.claiming(),
            wall_age_us: wall_us.saturating_sub(view.heartbeat_us),
            moved_ago_us: self.moved_us.map(|moved| now_us.saturating_sub(moved)).or(unmoved),
            unchanged_us: now_us.saturating_sub(self.moved_us.unwrap_or(self.first_us)),
        }
    }
}

/// One reader's memory of all slots.
#[derive(Debug, Default)]
pub(crate) struct Sweep {
    seen: [Seen; SLOT_COUNT],
}

impl Sweep {
    /// Look at every slot but `own`; `now_us` is monotonic, `wall_us` is not. Frees the slots of the dead when `reap`.
    pub(crate) fn look(
        &mut self,
        segment: &MappedSegment,
        own: Option<usize>,
        (now_us, wall_us): (u64, i64),
        reap: bool,
    ) -> [Option<Verdict>; SLOT_COUNT] {
        let mut verdicts = [None; SLOT_COUNT];
        let wanted = slots_are_wanted(segment, wall_us);
        for (slot, verdict) in verdicts.iter_mut().enumerate() {
            if own == Some(slot) {
                *verdict = Some(Verdict::Alive);
                continue;
            }
            let Some(view) = read_slot(segment.bytes(), slot) else {
                self.seen[slot] = Seen::default();
                continue;
            };
            let lock = segment.locks().liveness(segment.file(), slot, view.flags);
            self.seen[slot].see(&view, now_us);
            let shown = self.seen[slot].look(&view, lock, now_us, wall_us);
            let judged = judge(shown);
            *verdict = Some(judged);
            let due = reap && judged == Verdict::Dead && is_due(shown, wanted);
            if due && free_dead(segment, &view) {
                *verdict = None;
            }
        }
        verdicts
    }
}

/// Whether the owner of `slot` is dead for certain: it is one that holds a lock while it lives, and nobody does.
pub(crate) fn owner_is_gone(segment: &MappedSegment, slot: usize) -> bool {
    read_slot(segment.bytes(), slot)
        .is_none_or(|view| segment.locks().liveness(segment.file(), slot, view.flags) == Liveness::Free)
}

/// Free the slot of a dead owner, whose lock nobody holds; `true` when it is free now.
fn free_dead(segment: &MappedSegment, view: &SlotView) -> bool {
    if !matches!(segment.locks().lock_slot(segment.file(), view.slot), Ok(true)) {
        return false;
    }
    let same = read_slot(segment.bytes(), view.slot).is_some_and(|now| now.is_same_beat(view));
    let freed = same && claim::vacate(segment.bytes(), view.slot, view.pid);
    segment.locks().unlock_slot(segment.file(), view.slot);
    freed
}

#[cfg(test)]
mod tests;
