//! Taking a slot, beating in it, leaving it.

use crate::error::Result;
use crate::layout::{SLOT_COUNT, SLOT_LOCK, Segment, flag};
use crate::registry::{MappedSegment, name};
use crate::sync::Ordering;
use crate::sys::{LockMode, ProcessIdentity, lock_byte, random_u64, unlock_byte};

/// Stored in `ExtSlot::impl_version`: major << 16 | minor << 8 | patch of this release.
const IMPL_VERSION: u32 = 0x00_01_00;

/// Who wants a slot.
#[derive(Debug, Clone)]
pub(crate) struct Owner {
    pub(crate) identity: ProcessIdentity,
    pub(crate) name: String,
    pub(crate) weight: f32,
    /// Bits of `layout::flag`, besides `HAS_LOCK`.
    pub(crate) flags: u32,
}

/// A slot of ours: held by the kernel's lock on its byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) slot: usize,
    pid: u32,
    boot_us: i64,
    token: u64,
}

/// Where the lock byte of `slot` lies.
pub(crate) fn lock_offset(slot: usize) -> i64 {
    SLOT_LOCK + i64::try_from(slot).unwrap_or(0)
}

impl Claim {
    /// Take the first slot that nobody holds; `None` when all are taken.
    ///
    /// # Errors
    /// When the kernel refuses a byte lock for another reason than that it is taken.
    pub(crate) fn take(segment: &MappedSegment, owner: &Owner, wall_us: i64) -> Result<Option<Self>> {
        for slot in 0..SLOT_COUNT {
            let locked = lock_byte(segment.file(), lock_offset(slot), LockMode::Exclusive, false);
            if !locked.map_err(|source| crate::Error::Io {
                doing: "lock a slot of",
                path: "the segment".into(),
                source,
            })? {
                continue;
            }
            if let Some(claim) = occupy(segment.bytes(), slot, owner, wall_us) {
                return Ok(Some(claim));
            }
            // An error leaves the byte to the kernel, which drops it with this handle.
            let _ = unlock_byte(segment.file(), lock_offset(slot));
        }
        segment.bytes().ext.overflow_us.store(wall_us, Ordering::Relaxed);
        Ok(None)
    }

    /// Whether the slot still names us: a peer of the seed may have taken it after a long stop.
    pub(crate) fn intact(&self, segment: &Segment) -> bool {
        let (base, ext) = (&segment.slots[self.slot], &segment.ext_slots[self.slot]);
        base.pid.load(Ordering::Acquire) == self.pid // Acquire: pairs with whoever swapped it.
            && base.boot_us.load(Ordering::Relaxed) == self.boot_us
            && ext.owner_token.load(Ordering::Relaxed) == self.token
    }

    /// Give the slot back; harmless when it is no longer ours.
    pub(crate) fn release(self, segment: &MappedSegment) {
        let bytes = segment.bytes();
        if self.intact(bytes) {
            bytes.ext_slots[self.slot].flags.fetch_or(flag::STOPPING, Ordering::Relaxed);
            vacate(bytes, self.slot, self.pid);
        }
        // An error leaves the byte to the kernel, which drops it with this handle.
        let _ = unlock_byte(segment.file(), lock_offset(self.slot));
    }
}

/// Mark `slot` free if `pid` still has it. The caller holds its lock byte.
pub(crate) fn vacate(segment: &Segment, slot: usize, pid: u32) -> bool {
    let (base, ext) = (&segment.slots[slot], &segment.ext_slots[slot]);
    base.active.store(0, Ordering::Relaxed);
    ext.owner_token.store(0, Ordering::Release); // Release: pairs with the Acquire in `read_slot`.
    let freed = base.pid.compare_exchange(pid, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    segment.ext.change_seq.fetch_add(1, Ordering::Relaxed);
    freed
}

/// Write ourselves into a slot whose lock byte we hold; `None` when a peer of the seed has it or was faster.
fn occupy(segment: &Segment, slot: usize, owner: &Owner, wall_us: i64) -> Option<Claim> {
    let (base, ext) = (&segment.slots[slot], &segment.ext_slots[slot]);
    let pid = base.pid.load(Ordering::Acquire); // Acquire: pairs with the last owner's compare-and-swap.
    let died = ext.owner_token.load(Ordering::Acquire) != 0 // Acquire: pairs with the Release at its claim.
        && ext.flags.load(Ordering::Relaxed) & flag::HAS_LOCK != 0
        && ext.owner_pid.load(Ordering::Relaxed) == pid
        && ext.owner_boot_us.load(Ordering::Relaxed) == base.boot_us.load(Ordering::Relaxed);
    if pid != 0 && !died {
        return None;
    }
    base.active.store(0, Ordering::Relaxed);
    base.busy_ppm.store(0, Ordering::Relaxed);
    base.weight.store(owner.weight.to_bits(), Ordering::Relaxed);
    // Before the swap: a reader that sees the new pid must not see the old heartbeat, or it takes us for dead.
    base.heartbeat_us.store(wall_us, Ordering::Release);
    base.pid.compare_exchange(pid, owner.identity.pid, Ordering::AcqRel, Ordering::Relaxed).ok()?;
    base.boot_us.store(wall_us, Ordering::Relaxed);
    name::store(&base.name, &owner.name);
    let token = random_u64();
    ext.owner_token.store(0, Ordering::Release); // Release: readers drop the old half before it changes.
    ext.owner_pid.store(owner.identity.pid, Ordering::Relaxed);
    ext.owner_boot_us.store(wall_us, Ordering::Relaxed);
    ext.flags.store(owner.flags | flag::HAS_LOCK, Ordering::Relaxed);
    ext.hb_seq.store(0, Ordering::Relaxed);
    ext.pidns_ino.store(owner.identity.pid_namespace, Ordering::Relaxed);
    ext.start_ticks.store(owner.identity.start_ticks, Ordering::Relaxed);
    ext.uid.store(owner.identity.uid, Ordering::Relaxed);
    ext.impl_version.store(IMPL_VERSION, Ordering::Relaxed);
    ext.vram_bytes.store(0, Ordering::Relaxed);
    ext.steps.store(0, Ordering::Relaxed);
    ext.slept_us.store(0, Ordering::Relaxed);
    ext.owner_token.store(token, Ordering::Release); // Release: pairs with the Acquire in `read_slot`.
    segment.ext.change_seq.fetch_add(1, Ordering::Relaxed);
    Some(Claim { slot, pid: owner.identity.pid, boot_us: wall_us, token })
}
