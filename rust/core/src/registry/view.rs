//! Reading a slot that its owner writes at the same time.

use crate::layout::{SLOT_COUNT, Segment, flag, turn_flag};
use crate::registry::name;
use crate::schedule::weight_milli;
use crate::sync::Ordering;

/// How often a slot that changes its owner under our eyes is read again before it is skipped.
const READS_MAX: u32 = 3;

/// One slot as it was read: every value sanitised.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SlotView {
    pub(crate) slot: usize,
    pub(crate) pid: u32,
    pub(crate) boot_us: i64,
    pub(crate) weight: f32,
    pub(crate) active: bool,
    pub(crate) heartbeat_us: i64,
    pub(crate) busy_ppm: u32,
    pub(crate) name: String,
    /// Bits of `layout::flag`; 0 when the owner knows only the seed's fields.
    pub(crate) flags: u32,
    pub(crate) uid: u32,
    /// It waits for a turn, or for its window.
    pub(crate) queued: bool,
    pub(crate) steps: u64,
    pub(crate) slept_us: u64,
}

impl SlotView {
    /// Whether owner and heartbeat are what they were in `earlier`.
    pub(crate) fn is_same_beat(&self, earlier: &Self) -> bool {
        (self.pid, self.boot_us, self.heartbeat_us, self.flags)
            == (earlier.pid, earlier.boot_us, earlier.heartbeat_us, earlier.flags)
    }

    /// Whether the owner holds the slot's lock byte for as long as it lives.
    pub(crate) fn has_lock(&self) -> bool {
        self.flags & flag::HAS_LOCK != 0
    }
}

/// The owner and state of `slot`; `None` when it is free, or changes hands faster than it can be read.
pub(crate) fn read_slot(segment: &Segment, slot: usize) -> Option<SlotView> {
    debug_assert!(slot < SLOT_COUNT);
    for _ in 0..READS_MAX {
        match read_once(segment, slot) {
            Read::Owned(view) => return Some(view),
            Read::Free => return None,
            Read::ChangedHands => {}
        }
    }
    None
}

/// What one reading shows.
enum Read {
    Owned(SlotView),
    Free,
    ChangedHands,
}

fn read_once(segment: &Segment, slot: usize) -> Read {
    let (base, ext) = (&segment.slots[slot], &segment.ext_slots[slot]);
    // Acquire: pairs with the compare-and-swap of the claim.
    let pid = base.pid.load(Ordering::Acquire);
    if pid == 0 {
        return Read::Free;
    }
    let boot_us = base.boot_us.load(Ordering::Relaxed);
    // Acquire: pairs with the Release of the token, which is stored after the rest of this half.
    let token = ext.owner_token.load(Ordering::Acquire);
    let named = token != 0
        && ext.owner_pid.load(Ordering::Relaxed) == pid
        && ext.owner_boot_us.load(Ordering::Relaxed) == boot_us;
    let view = SlotView {
        slot,
        pid,
        boot_us,
        weight: sane_weight(f32::from_bits(base.weight.load(Ordering::Relaxed))),
        active: base.active.load(Ordering::Relaxed) != 0,
        heartbeat_us: base.heartbeat_us.load(Ordering::Acquire), // Acquire: pairs with the Release of the beat.
        busy_ppm: base.busy_ppm.load(Ordering::Relaxed).min(1_000_000),
        name: name::load(&base.name),
        flags: if named { ext.flags.load(Ordering::Relaxed) } else { 0 },
        uid: if named { ext.uid.load(Ordering::Relaxed) } else { 0 },
        queued: named && ext.turn_flags.load(Ordering::Relaxed) & turn_flag::QUEUED != 0,
        steps: if named { ext.steps.load(Ordering::Relaxed) } else { 0 },
        slept_us: if named { ext.slept_us.load(Ordering::Relaxed) } else { 0 },
    };
    let same = base.pid.load(Ordering::Acquire) == pid && base.boot_us.load(Ordering::Relaxed) == boot_us;
    if same { Read::Owned(view) } else { Read::ChangedHands }
}

/// The weight that the schedule uses, for display: a value from 0.001 to 1000.
fn sane_weight(weight: f32) -> f32 {
    if weight.is_finite() && weight > 0.0 {
        return weight.clamp(0.001, 1000.0);
    }
    // What `weight_milli` makes of it.
    debug_assert_eq!(weight_milli(weight), 1000);
    1.0
}
