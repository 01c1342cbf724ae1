//! Reading a slot that its owner writes at the same time.

use crate::layout::{
    EXT_HEADER_SIZE, EXT_MAGIC, EXT_SLOT_STRIDE, ExtSlot, FEATURES_KNOWN, SLOT_COUNT, SLOT_COUNT_STORED,
    Segment, flag,
};
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
    /// With `pid` and `boot_us` the owner's identity; 0 when it knows only the seed's fields.
    pub(crate) owner_token: u64,
    pub(crate) weight: f32,
    pub(crate) active: bool,
    pub(crate) heartbeat_us: i64,
    pub(crate) busy_ppm: u32,
    pub(crate) name: String,
    /// Bits of `layout::flag`; 0 when the owner knows only the seed's fields.
    pub(crate) flags: u32,
    pub(crate) uid: u32,
    pub(crate) steps: u64,
    pub(crate) slept_us: u64,
}

impl SlotView {
    /// Whether owner, heartbeat and lock are what they were in `earlier`.
    pub(crate) fn is_same_beat(&self, earlier: &Self) -> bool {
        let lock = |view: &Self| view.flags & (flag::HAS_LOCK | flag::SLOT_FILE | flag::CLAIMING);
        self.owner() == earlier.owner()
            && self.heartbeat_us == earlier.heartbeat_us
            && lock(self) == lock(earlier)
    }

    /// Who it is: pids are equal in containers and used again, the start tells them apart, and the token tells even a
    /// claim from the next one by the same process.
    pub(crate) fn owner(&self) -> (u32, i64, u64) {
        (self.pid, self.boot_us, self.owner_token)
    }

    /// Whether the owner is, or died, in the middle of taking the slot.
    pub(crate) fn claiming(&self) -> bool {
        self.flags & flag::CLAIMING != 0
    }
}

/// Whether the extension is there, has the form that we know and no feature that this release does not know.
///
/// Additions raise its version and change nothing here.
pub(crate) fn extended(segment: &Segment) -> bool {
    let ext = &segment.ext;
    ext.magic.load(Ordering::Relaxed) == EXT_MAGIC
        && ext.feature_incompat.load(Ordering::Relaxed) & !FEATURES_KNOWN == 0
        && ext.header_size.load(Ordering::Relaxed) == EXT_HEADER_SIZE
        && ext.slot_stride.load(Ordering::Relaxed) == EXT_SLOT_STRIDE
        && ext.slot_count.load(Ordering::Relaxed) == SLOT_COUNT_STORED
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
    let base = &segment.slots[slot];
    // Acquire: pairs with the compare-and-swap of the claim.
    let pid = base.pid.load(Ordering::Acquire);
    if pid == 0 {
        return Read::Free;
    }
    let boot_us = base.boot_us.load(Ordering::Relaxed);
    let ext = ext_of(segment, slot, pid, boot_us);
    let view = SlotView {
        slot,
        pid,
        boot_us,
        owner_token: ext.map_or(0, |(_, token)| token),
        weight: sane_weight(f32::from_bits(base.weight.load(Ordering::Relaxed))),
        active: base.active.load(Ordering::Relaxed) != 0,
        heartbeat_us: base.heartbeat_us.load(Ordering::Acquire), // Acquire: pairs with the Release of the beat.
        busy_ppm: base.busy_ppm.load(Ordering::Relaxed).min(1_000_000),
        name: name::load(&base.name),
        flags: ext.map_or(0, |(ext, _)| ext.flags.load(Ordering::Relaxed)),
        uid: ext.map_or(0, |(ext, _)| ext.uid.load(Ordering::Relaxed)),
        steps: ext.map_or(0, |(ext, _)| ext.steps.load(Ordering::Relaxed)),
        slept_us: ext.map_or(0, |(ext, _)| ext.slept_us.load(Ordering::Relaxed)),
    };
    let same = base.pid.load(Ordering::Acquire) == pid
        && base.boot_us.load(Ordering::Relaxed) == boot_us
        && ext.is_none_or(|(ext, token)| ext.owner_token.load(Ordering::Acquire) == token);
    if same { Read::Owned(view) } else { Read::ChangedHands }
}

/// The extension's half of a slot and its token, when it is this owner's.
fn ext_of(segment: &Segment, slot: usize, pid: u32, boot_us: i64) -> Option<(&ExtSlot, u64)> {
    let ext = &segment.ext_slots[slot];
    // Acquire: pairs with the Release of the token, which is stored after the rest of this half.
    let token = ext.owner_token.load(Ordering::Acquire);
    let claiming = ext.flags.load(Ordering::Relaxed) & flag::CLAIMING != 0;
    let named = token != 0
        && ext.owner_pid.load(Ordering::Relaxed) == pid
        && (claiming || ext.owner_boot_us.load(Ordering::Relaxed) == boot_us);
    (named && extended(segment)).then_some((ext, token))
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;

    use super::*;
    use crate::layout::SEGMENT_SIZE;
    use crate::registry::Sweep;
    use crate::registry::fixture::Fixture;

    proptest! {
        #[test]
        fn any_bytes_read_as_sane_values_at_any_time(
            bytes in proptest::collection::vec(any::<u8>(), SEGMENT_SIZE),
            times in proptest::collection::vec((any::<u64>(), any::<i64>()), 3),
        ) {
            let fixture = Fixture::new("bytes");
            let segment = fixture.open();
            segment.file().write_all_at(&bytes[1600..], 1600).expect("writable");
            segment.file().write_all_at(&bytes[16..1424], 16).expect("writable");
            prop_assert!(segment.extended());
            let mut sweep = Sweep::default();

            for view in (0..SLOT_COUNT).filter_map(|slot| read_slot(segment.bytes(), slot)) {
                prop_assert!((0.001..=1000.0).contains(&view.weight));
                prop_assert!(view.busy_ppm <= 1_000_000);
                prop_assert!(!view.name.contains(char::is_control));
                prop_assert!(view.owner_token != 0 || view.flags == 0);
            }
            for (now_us, wall_us) in times {
                let verdicts = sweep.look(&segment, Some(3), (now_us, wall_us), true);
                prop_assert!(verdicts[3].is_some());
            }
        }
    }
}
