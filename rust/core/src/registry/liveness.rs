//! Who is alive: the kernel's word where there is one, the heartbeat where not.

use crate::layout::SLOT_COUNT;
use crate::registry::{MappedSegment, SlotView, read_slot};
use crate::sys::{LockMode, byte_lock_held, lock_byte, unlock_byte};

use super::claim;

/// A heartbeat that did not move for this long is a death or a stop (the seed's constant).
pub(crate) const DEAD_AFTER_US: u64 = 3_000_000;
/// A slot without a lock to ask is freed only after it was watched, unchanged, for longer than two of the seed's beats.
const SETTLE_US: u64 = 1_200_000;
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
    /// The owner says that it holds the slot's lock byte, and is the one that the seed's half names.
    pub(crate) has_lock: bool,
    /// Somebody holds that byte.
    pub(crate) byte_held: bool,
    /// Age of the heartbeat by the wall clock.
    pub(crate) wall_age_us: i64,
    /// How long ago we saw the heartbeat move, by our own clock; `None` when this is the first look.
    pub(crate) moved_ago_us: Option<u64>,
    /// How long we have watched this owner without seeing its heartbeat change.
    pub(crate) unchanged_us: u64,
}

/// The table of `facts` on liveness: lock byte first, then movement, then age.
///
/// Movement is judged by the reader's monotonic clock, so that a step of the wall clock kills nobody that was seen
/// before; only the first look has nothing but the age.
pub(crate) fn judge(look: Look) -> Verdict {
    if look.has_lock && !look.byte_held {
        return Verdict::Dead;
    }
    let fresh = (-FUTURE_US..=i64::try_from(DEAD_AFTER_US).unwrap_or(i64::MAX)).contains(&look.wall_age_us);
    let moving = look.moved_ago_us.map_or(fresh, |ago| ago <= DEAD_AFTER_US);
    match (moving, look.has_lock) {
        (true, _) => Verdict::Alive,
        (false, true) => Verdict::Stalled,
        (false, false) if !fresh && look.unchanged_us >= SETTLE_US => Verdict::Dead,
        (false, false) => Verdict::Silent,
    }
}

/// What was last seen of a slot's owner; times by the reader's monotonic clock.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    pid: u32,
    boot_us: i64,
    heartbeat_us: i64,
    first_us: u64,
    moved_us: Option<u64>,
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
        for (slot, verdict) in verdicts.iter_mut().enumerate() {
            if own == Some(slot) {
                *verdict = Some(Verdict::Alive);
                continue;
            }
            let Some(view) = read_slot(segment.bytes(), slot) else {
                self.seen[slot] = Seen::default();
                continue;
            };
            let judged = judge(self.see(segment, &view, now_us, wall_us));
            *verdict = Some(judged);
            if reap && judged == Verdict::Dead && free_dead(segment, &view) {
                *verdict = None;
            }
        }
        verdicts
    }

    fn see(&mut self, segment: &MappedSegment, view: &SlotView, now_us: u64, wall_us: i64) -> Look {
        let seen = &mut self.seen[view.slot];
        if (seen.pid, seen.boot_us) != (view.pid, view.boot_us) {
            let (pid, boot_us, heartbeat_us) = (view.pid, view.boot_us, view.heartbeat_us);
            *seen = Seen { pid, boot_us, heartbeat_us, first_us: now_us, moved_us: None };
        } else if seen.heartbeat_us != view.heartbeat_us {
            seen.heartbeat_us = view.heartbeat_us;
            seen.moved_us = Some(now_us);
        }
        // Before the first witnessed movement only a long watch counts against the owner.
        let watched_us = now_us.saturating_sub(seen.first_us);
        let unmoved = (watched_us > DEAD_AFTER_US).then_some(watched_us);
        Look {
            has_lock: view.has_lock(),
            byte_held: view.has_lock() && byte_held(segment, view.slot),
            wall_age_us: wall_us.saturating_sub(view.heartbeat_us),
            moved_ago_us: seen.moved_us.map(|moved| now_us.saturating_sub(moved)).or(unmoved),
            unchanged_us: now_us.saturating_sub(seen.moved_us.unwrap_or(seen.first_us)),
        }
    }
}

/// Whether the owner of `slot` is dead for certain: it is one that holds a lock byte while it lives, and nobody does.
pub(crate) fn owner_is_gone(segment: &MappedSegment, slot: usize) -> bool {
    read_slot(segment.bytes(), slot).is_none_or(|view| view.has_lock() && !byte_held(segment, slot))
}

/// Whether another handle holds the slot's lock byte; an error counts as held, because death needs proof.
fn byte_held(segment: &MappedSegment, slot: usize) -> bool {
    !matches!(byte_lock_held(segment.file(), claim::lock_offset(slot)), Ok(None))
}

/// Free the slot of a dead owner, whose lock byte nobody holds; `true` when it is free now.
fn free_dead(segment: &MappedSegment, view: &SlotView) -> bool {
    let offset = claim::lock_offset(view.slot);
    if !matches!(lock_byte(segment.file(), offset, LockMode::Exclusive, false), Ok(true)) {
        return false;
    }
    let same = read_slot(segment.bytes(), view.slot).is_some_and(|now| now.is_same_beat(view));
    let freed = same && claim::vacate(segment.bytes(), view.slot, view.pid);
    // An error leaves the byte to the kernel, which drops it with this handle.
    let _ = unlock_byte(segment.file(), offset);
    freed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(has_lock: bool, byte_held: bool, wall_age_us: i64, moved_ago_us: Option<u64>) -> Verdict {
        judge(Look { has_lock, byte_held, wall_age_us, moved_ago_us, unchanged_us: 0 })
    }

    #[test]
    fn a_free_lock_byte_is_death_whatever_the_heartbeat_says() {
        assert_eq!(look(true, false, 0, Some(0)), Verdict::Dead);
    }

    #[test]
    fn a_held_lock_byte_without_movement_is_a_stall() {
        assert_eq!(look(true, true, 0, Some(3_000_001)), Verdict::Stalled);
        assert_eq!(look(true, true, 9_000_000, None), Verdict::Stalled);
    }

    #[test]
    fn a_clock_step_of_an_hour_kills_nobody_that_was_seen_before() {
        for age in [3_600_000_000, -3_600_000_000] {
            assert_eq!(look(true, true, age, Some(400_000)), Verdict::Alive);
            assert_eq!(look(false, false, age, Some(400_000)), Verdict::Alive);
        }
    }

    #[test]
    fn a_seed_peers_slot_is_freed_only_after_a_long_unchanged_look() {
        let silent = |wall_age_us, unchanged_us| {
            judge(Look { has_lock: false, byte_held: false, wall_age_us, moved_ago_us: None, unchanged_us })
        };

        assert_eq!(silent(9_000_000, SETTLE_US - 1), Verdict::Silent);
        assert_eq!(silent(9_000_000, SETTLE_US), Verdict::Dead);
        assert_eq!(silent(-9_000_000, SETTLE_US), Verdict::Dead);
        assert_eq!(silent(0, SETTLE_US), Verdict::Alive);
    }

    #[test]
    fn a_seed_peer_is_judged_by_its_heartbeat_alone() {
        assert_eq!(look(false, false, 2_900_000, None), Verdict::Alive);
        assert_eq!(look(false, false, 3_100_000, None), Verdict::Silent);
        assert_eq!(look(false, false, -600_000, None), Verdict::Silent);
    }
}
