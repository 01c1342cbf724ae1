//! Taking a slot, keeping it, leaving it.
//!
//! Whoever touches a slot that is not its own holds the slot's lock first, so among our own peers there is never more
//! than one. Peers of the seed know no lock: they swap a `pid` of 0, or one whose heartbeat is older than 3 s, for
//! their own at any moment. Towards them every change of hands is one compare-and-swap of `pid`, always from or to 0,
//! with nothing before it that could harm them, and nothing behind it that a death could leave undone for long:
//!
//! | a death | leaves | which is free |
//! |---|---|---|
//! | before the swap of a claim | `pid` 0 | at once |
//! | between the swap and the end of a claim | `flag::CLAIMING` and no lock | after a settled look (see `liveness`) |
//! | after a claim, before the swap of a release | a named owner and no lock | at once |
//! | after that | `pid` 0 | at once |
//!
//! The second line cannot be "at once": a peer of the seed with the same pid, as containers have them, that swaps a
//! `pid` of 0 behind a claim which died before its own swap leaves the same bytes, until it writes on.

use crate::error::{Error, Result};
use crate::layout::{ExtSlot, SLOT_COUNT, Segment, flag};
use crate::registry::{MappedSegment, extended, name, read_slot};
use crate::sync::Ordering;
use crate::sys::{ProcessIdentity, random_u64};

/// Stored in `ExtSlot::impl_version`: major << 16 | minor << 8 | patch of this release.
const IMPL_VERSION: u32 = 0x00_01_00;
/// The bits of `Segment::token` that say whose turn it is: slot + 1.
const TURN_HOLDER: u64 = 0xffff;
const TURN_GENERATION_SHIFT: u32 = 16;

/// Who wants a slot.
#[derive(Debug, Clone)]
pub(crate) struct Owner {
    pub(crate) identity: ProcessIdentity,
    pub(crate) name: String,
    pub(crate) weight: f32,
    /// Bits of `layout::flag`, besides those that say which lock is held.
    pub(crate) flags: u32,
}

/// A slot of ours: we hold its lock for as long as we have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) slot: usize,
    pid: u32,
    boot_us: i64,
    /// 0 where the extension is not used.
    token: u64,
}

impl Claim {
    /// Take the first slot that nobody holds; `None` when all are taken. Never waits: slots that only a settled look can
    /// free are left to the sweeps.
    ///
    /// # Errors
    /// When the kernel refuses a lock for another reason than that it is taken.
    pub(crate) fn take(segment: &MappedSegment, owner: &Owner, wall_us: i64) -> Result<Option<Self>> {
        for slot in 0..SLOT_COUNT {
            let locked = segment.locks().lock_slot(segment.file(), slot);
            let path = || segment.path().to_owned();
            if !locked.map_err(|source| Error::Io { doing: "lock a slot of", path: path(), source })? {
                continue;
            }
            if let Some(claim) = occupy(segment, slot, owner, wall_us) {
                return Ok(Some(claim));
            }
            segment.locks().unlock_slot(segment.file(), slot);
        }
        if segment.extended() {
            segment.bytes().ext.overflow_us.store(wall_us, Ordering::Relaxed);
        }
        Ok(None)
    }

    /// Whether the slot's half of the extension is ours too: where another release laid it out, nothing there is touched.
    pub(crate) fn extended(&self) -> bool {
        self.token != 0
    }

    /// Whether the slot still names us: a peer of the seed may have taken it after a long stop.
    pub(crate) fn intact(&self, segment: &Segment) -> bool {
        let base = &segment.slots[self.slot];
        base.pid.load(Ordering::Acquire) == self.pid // Acquire: pairs with whoever swapped it.
            && base.boot_us.load(Ordering::Relaxed) == self.boot_us
            && (self.token == 0 || self.named_in(&segment.ext_slots[self.slot]))
    }

    /// Give the slot back. Where it is no longer ours only our half of the extension is cleared.
    pub(crate) fn release(self, segment: &MappedSegment) {
        let (bytes, slot) = (segment.bytes(), self.slot);
        if self.intact(bytes) {
            if self.token != 0 {
                bytes.ext_slots[slot].flags.fetch_or(flag::STOPPING, Ordering::Relaxed);
            }
            bytes.slots[slot].active.store(0, Ordering::Relaxed);
            vacate(bytes, slot, self.pid);
        } else if self.token != 0 && self.named_in(&bytes.ext_slots[slot]) {
            clear_extension(bytes, slot);
        }
        segment.locks().unlock_slot(segment.file(), slot);
    }

    /// Free the slot where only the seed's part of it still names us: the rest of the file was lost. Nobody takes it
    /// meanwhile, because we hold its lock.
    pub(crate) fn disown(&self, segment: &Segment) {
        let base = &segment.slots[self.slot];
        let ours = base.pid.load(Ordering::Acquire) == self.pid // Acquire: pairs with whoever swapped it.
            && base.boot_us.load(Ordering::Relaxed) == self.boot_us;
        if ours {
            base.active.store(0, Ordering::Relaxed);
            let _ = base.pid.compare_exchange(self.pid, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    fn named_in(&self, ext: &ExtSlot) -> bool {
        ext.owner_token.load(Ordering::Relaxed) == self.token
            && ext.owner_pid.load(Ordering::Relaxed) == self.pid
            && ext.owner_boot_us.load(Ordering::Relaxed) == self.boot_us
    }
}

/// Free `slot` if `pid` still has it. The caller holds its lock.
///
/// The `pid` goes first: a death behind that leaves a free slot, where one before it would leave an owner without a
/// name.
pub(crate) fn vacate(segment: &Segment, slot: usize, pid: u32) -> bool {
    let base = &segment.slots[slot];
    let freed = base.pid.compare_exchange(pid, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if extended(segment) {
        clear_extension(segment, slot);
        segment.ext.change_seq.fetch_add(1, Ordering::Relaxed);
    }
    freed
}

/// Write ourselves into a slot whose lock we hold; `None` when a peer of the seed has it or was faster.
fn occupy(segment: &MappedSegment, slot: usize, owner: &Owner, wall_us: i64) -> Option<Claim> {
    let (locks, segment) = (segment.locks(), segment.bytes());
    if let Some(view) = read_slot(segment, slot) {
        let died = locks.prove_death(slot, view.flags) && !view.claiming();
        if !died || !vacate(segment, slot, view.pid) {
            return None;
        }
    }
    let base = &segment.slots[slot];
    let pid = owner.identity.pid;
    let flags = owner.flags | locks.flags(slot);
    let token = if extended(segment) { prepare(segment, slot, owner, flags, wall_us) } else { 0 };
    // Before the swap: a reader that sees the new pid must not see the old heartbeat, or it takes us for dead. Where a
    // peer of the seed was faster, this is what it has just written itself.
    base.heartbeat_us.store(wall_us, Ordering::Release);
    if base.pid.compare_exchange(0, pid, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        if token != 0 {
            clear_extension(segment, slot);
        }
        return None;
    }
    base.boot_us.store(wall_us, Ordering::Relaxed);
    base.active.store(0, Ordering::Relaxed);
    base.busy_ppm.store(0, Ordering::Relaxed);
    base.weight.store(owner.weight.to_bits(), Ordering::Relaxed);
    name::store(&base.name, &owner.name);
    if token != 0 {
        // Release: pairs with the Acquire of the token in `read_slot`; from here on the start must agree too.
        segment.ext_slots[slot].flags.store(flags, Ordering::Release);
        segment.ext.change_seq.fetch_add(1, Ordering::Relaxed);
    }
    Some(Claim { slot, pid, boot_us: wall_us, token })
}

/// Say in the extension who is about to take `slot`; the token that names the claim.
fn prepare(segment: &Segment, slot: usize, owner: &Owner, flags: u32, wall_us: i64) -> u64 {
    let ext = &segment.ext_slots[slot];
    clear_extension(segment, slot);
    ext.owner_pid.store(owner.identity.pid, Ordering::Relaxed);
    ext.owner_boot_us.store(wall_us, Ordering::Relaxed);
    ext.flags.store(flags | flag::CLAIMING, Ordering::Relaxed);
    ext.hb_seq.store(0, Ordering::Relaxed);
    ext.pidns_ino.store(owner.identity.pid_namespace, Ordering::Relaxed);
    ext.start_ticks.store(owner.identity.start_ticks, Ordering::Relaxed);
    ext.uid.store(owner.identity.uid, Ordering::Relaxed);
    ext.impl_version.store(IMPL_VERSION, Ordering::Relaxed);
    ext.vram_bytes.store(0, Ordering::Relaxed);
    ext.v_us.store(0, Ordering::Relaxed);
    ext.progress.store(0, Ordering::Relaxed);
    ext.step_us.store(0, Ordering::Relaxed);
    ext.turn_limit_us.store(0, Ordering::Relaxed);
    ext.min_window_us.store(0, Ordering::Relaxed);
    ext.steps.store(0, Ordering::Relaxed);
    ext.slept_us.store(0, Ordering::Relaxed);
    let token = random_u64();
    ext.owner_token.store(token, Ordering::Release); // Release: pairs with the Acquire in `read_slot`.
    token
}

/// Take the owner's name and its part of the turns out of the extension. The caller holds the slot's lock.
fn clear_extension(segment: &Segment, slot: usize) {
    let ext = &segment.ext_slots[slot];
    ext.owner_token.store(0, Ordering::Release); // Release: readers drop this half before it changes.
    ext.turn_flags.store(0, Ordering::Relaxed);
    let turn = segment.token.load(Ordering::Relaxed);
    if turn & TURN_HOLDER == slot as u64 + 1 {
        let free = (turn >> TURN_GENERATION_SHIFT).wrapping_add(1) << TURN_GENERATION_SHIFT;
        // Whoever took the turn away meanwhile is right. Release: pairs with the Acquire of whoever takes it.
        let _ = segment.token.compare_exchange(turn, free, Ordering::Release, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::fixture::{Fixture, owner};
    use crate::registry::{Sweep, Verdict};

    const NOW_US: i64 = 1_700_000_000_000_000;

    type Undo = fn(&Segment);

    fn take(segment: &MappedSegment, pid: u32) -> Claim {
        Claim::take(segment, &owner(pid), NOW_US).expect("usable locks").expect("a slot")
    }

    /// A slot that its owner had, and that `undo` puts back to an earlier step; then the owner dies.
    fn die(fixture: &Fixture, undo: impl FnOnce(&Segment)) {
        let segment = fixture.open();
        assert_eq!(take(&segment, 7).slot, 0);
        undo(segment.bytes());
    }

    #[test]
    fn a_death_at_any_step_but_one_leaves_a_slot_that_is_taken_at_once() {
        let steps: [(&str, Undo); 5] = [
            ("before the swap of the claim", |bytes| {
                bytes.slots[0].pid.store(0, Ordering::Relaxed);
                bytes.ext_slots[0].flags.fetch_or(flag::CLAIMING, Ordering::Relaxed);
            }),
            ("after the claim", |_| {}),
            ("long ago", |bytes| bytes.slots[0].heartbeat_us.store(0, Ordering::Relaxed)),
            ("while stopping", |bytes| {
                bytes.ext_slots[0].flags.fetch_or(flag::STOPPING, Ordering::Relaxed);
            }),
            ("after the swap of the release", |bytes| bytes.slots[0].pid.store(0, Ordering::Relaxed)),
        ];
        for (step, undo) in steps {
            let fixture = Fixture::new("steps");
            die(&fixture, undo);

            for pid in [7, 8] {
                let segment = fixture.open();
                let claim = take(&segment, pid);

                assert_eq!(claim.slot, 0, "{step}");
                assert!(claim.intact(segment.bytes()), "{step}");
            }
        }
    }

    #[test]
    fn a_death_between_swap_and_end_of_a_claim_leaves_a_slot_that_is_freed_after_a_settled_look() {
        let fixture = Fixture::new("claiming");
        die(&fixture, |bytes| {
            bytes.slots[0].boot_us.store(0, Ordering::Relaxed);
            bytes.ext_slots[0].flags.fetch_or(flag::CLAIMING, Ordering::Relaxed);
        });
        let segment = fixture.open();
        let mut sweep = Sweep::default();
        assert_eq!(take(&segment, 8).slot, 1);

        let first = sweep.look(&segment, Some(1), (0, NOW_US), true);
        let second = sweep.look(&segment, Some(1), (1_300_000, NOW_US + 1_300_000), true);

        assert_eq!((first[0], second[0]), (Some(Verdict::Alive), None));
        assert_eq!(take(&fixture.open(), 9).slot, 0);
    }

    #[test]
    fn a_stopped_owner_keeps_its_slot() {
        let fixture = Fixture::new("stopped");
        let stopped = fixture.open();
        let claim = take(&stopped, 7);
        let segment = fixture.open();
        let mut sweep = Sweep::default();

        assert_eq!(take(&segment, 7).slot, 1);
        for second in 0..60 {
            sweep.look(&segment, Some(1), (second * 1_000_000, NOW_US + 60_000_000), true);
        }

        assert!(claim.intact(stopped.bytes()));
    }

    #[test]
    fn a_new_owner_inherits_neither_turn_nor_virtual_time() {
        let fixture = Fixture::new("turn");
        die(&fixture, |bytes| {
            let ext = &bytes.ext_slots[0];
            for word in [&ext.turn_flags, &ext.progress, &ext.step_us, &ext.turn_limit_us, &ext.min_window_us]
            {
                word.store(7, Ordering::Relaxed);
            }
            ext.v_us.store(7, Ordering::Relaxed);
            ext.wake.store(7, Ordering::Relaxed);
            bytes.token.store((41 << 16) | 1, Ordering::Relaxed);
        });

        let segment = fixture.open();
        take(&segment, 8);

        let (bytes, ext) = (segment.bytes(), &segment.bytes().ext_slots[0]);
        let words = [&ext.turn_flags, &ext.progress, &ext.step_us, &ext.turn_limit_us, &ext.min_window_us];
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
        assert_eq!((ext.v_us.load(Ordering::Relaxed), ext.wake.load(Ordering::Relaxed)), (0, 7));
        assert_eq!(bytes.token.load(Ordering::Relaxed), 42 << 16);
    }

    #[test]
    fn a_turn_of_somebody_else_is_left_alone_and_roster_changes_are_counted() {
        let fixture = Fixture::new("roster");
        let segment = fixture.open();
        segment.bytes().token.store((41 << 16) | 2, Ordering::Relaxed);
        let before = segment.bytes().ext.change_seq.load(Ordering::Relaxed);

        let claim = take(&segment, 7);
        let joined = segment.bytes().ext.change_seq.load(Ordering::Relaxed);
        claim.release(&segment);
        let left = segment.bytes().ext.change_seq.load(Ordering::Relaxed);

        assert!(before < joined && joined < left);
        assert_eq!(segment.bytes().token.load(Ordering::Relaxed), (41 << 16) | 2);
    }

    #[test]
    fn a_thief_is_noticed_even_with_our_pid_and_left_in_peace() {
        for (pid, boot_us) in [(99, NOW_US), (7, NOW_US + 1)] {
            let fixture = Fixture::new("thief");
            let segment = fixture.open();
            let claim = take(&segment, 7);
            assert!(claim.intact(segment.bytes()));
            let base = &segment.bytes().slots[0];
            base.pid.store(pid, Ordering::Relaxed);
            base.boot_us.store(boot_us, Ordering::Relaxed);
            base.active.store(1, Ordering::Relaxed);

            assert!(!claim.intact(segment.bytes()));
            claim.release(&segment);

            let thief = read_slot(segment.bytes(), 0).expect("the thief");
            assert_eq!((thief.pid, thief.boot_us, thief.owner_token, thief.active), (pid, boot_us, 0, true));
            assert_eq!(segment.bytes().ext_slots[0].owner_token.load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn with_an_unknown_feature_only_the_seeds_part_is_used() {
        let fixture = Fixture::new("feature");
        let segment = fixture.open();
        take(&fixture.open(), 6);
        segment.bytes().ext.feature_incompat.store(2, Ordering::Relaxed);
        let extension = || std::fs::read(fixture.path.main()).expect("readable")[1536..].to_vec();
        let before = extension();

        let claim = take(&segment, 7);
        let view = read_slot(segment.bytes(), claim.slot).expect("ours");
        claim.release(&segment);

        assert!(!segment.extended());
        assert_eq!((view.pid, view.owner_token, view.flags), (7, 0, 0));
        assert!(extension() == before, "written to");
    }
}
