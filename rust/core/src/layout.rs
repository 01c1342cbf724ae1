//! The segment's bytes: the seed's 1,424, natural C alignment, and our extension behind them.
//!
//! Little-endian, 4,096 bytes. Readers that know only the seed's part lose nothing; bytes not named are zero and
//! reserved. Every field that another process may write is an atomic. The offsets are a contract between releases.

use crate::sync::{AtomicI64, AtomicU32, AtomicU64};

/// Bytes of the whole segment.
pub(crate) const SEGMENT_SIZE: usize = 4096;
/// Bytes that the seed's own peers use.
pub(crate) const SEED_SIZE: usize = 1424;
/// Slots, in the seed's part and in the extension.
pub const SLOT_COUNT: usize = 16;
/// The first five bytes; three of padding follow, which a C compiler may leave as it likes.
pub(crate) const MAGIC: [u8; 5] = *b"OCGPU";
/// Version of the seed's part; another one is not touched.
pub(crate) const VERSION: u32 = 1;
/// The extension's first eight bytes, written last.
pub(crate) const EXT_MAGIC: u64 = u64::from_le_bytes(*b"OCGPUEX1");
/// Version of the extension; additions raise it.
pub(crate) const EXT_VERSION: u32 = 1;
/// Bytes of `ExtHeader`, as the segment itself says.
pub(crate) const EXT_HEADER_SIZE: u32 = 64;
/// Bytes of `ExtSlot`, as the segment itself says.
pub(crate) const EXT_SLOT_STRIDE: u32 = 128;
/// Bits of `ExtHeader::feature_incompat` that this release knows: none yet. With any other the extension means something
/// else, and the seed's part alone is used.
pub(crate) const FEATURES_KNOWN: u32 = 0;
/// Characters of a slot's name, with the NUL that ends it.
pub(crate) const NAME_SIZE: usize = 48;
/// Offset of the extension's header, for `pread` and `pwrite`.
pub(crate) const EXT_OFFSET: u64 = 1536;
/// `SLOT_COUNT`, as the headers store it.
pub(crate) const SLOT_COUNT_STORED: u32 = 16;

/// Lock byte of slot `i`: held for as long as its owner lives (beyond the file's end, which is legal).
pub(crate) const SLOT_LOCK: i64 = 1 << 30;
/// Lock byte of the one who creates or validates the segment.
pub(crate) const INIT_LOCK: i64 = SLOT_LOCK + 64;

/// Bits of `ExtSlot::flags`.
pub(crate) mod flag {
    /// The owner holds the slot's lock byte: its death shows there.
    pub(crate) const HAS_LOCK: u32 = 1;
    /// The owner calls the gate.
    pub(crate) const PACED: u32 = 2;
    /// The owner holds the GPU's lease, exclusively.
    pub(crate) const LEASE_EX: u32 = 4;
    /// The owner holds the GPU's lease, shared.
    pub(crate) const LEASE_SH: u32 = 8;
    /// The owner is leaving.
    pub(crate) const STOPPING: u32 = 16;
    /// The owner holds the slot's lock file, beside or instead of the byte.
    pub(crate) const SLOT_FILE: u32 = 32;
    /// The owner computes but cannot be paused.
    pub(crate) const UNGATED: u32 = 64;
    /// The owner wants the grid, or knows nothing else.
    pub(crate) const GRID: u32 = 128;
    /// The owner is taking the slot: `ExtSlot::owner_boot_us` may be ahead of `Slot::boot_us`.
    pub(crate) const CLAIMING: u32 = 256;
}

/// Bits of `ExtSlot::turn_flags`.
pub(crate) mod turn_flag {
    /// The owner is in a request.
    pub(crate) const INREQ: u32 = 1;
    /// The owner waits for a turn.
    pub(crate) const QUEUED: u32 = 2;
    /// The owner woke up with no debt: it goes first.
    pub(crate) const BOOST: u32 = 4;
    /// The owner has waited for more than a round: it goes next.
    pub(crate) const OVERDUE: u32 = 8;
}

/// Bytes 0..16.
#[repr(C)]
pub(crate) struct Header {
    pub(crate) magic: [AtomicU32; 2],
    pub(crate) version: AtomicU32,
    pub(crate) slot_count: AtomicU32,
}

/// 88 bytes: what the seed's peers publish.
#[repr(C)]
pub(crate) struct Slot {
    /// 0 = free; taken and freed by compare-and-swap only.
    pub(crate) pid: AtomicU32,
    /// Wall time of the join; with `pid` it names the owner.
    pub(crate) boot_us: AtomicI64,
    /// Bits of an `f32`, which any process may have written: sanitise before use.
    pub(crate) weight: AtomicU32,
    /// Not 0 while the owner worked within the activity window.
    pub(crate) active: AtomicU32,
    /// Wall time of the last beat.
    pub(crate) heartbeat_us: AtomicI64,
    /// Measured fraction of time at work, parts per million.
    pub(crate) busy_ppm: AtomicU32,
    /// NUL-terminated UTF-8, for display only.
    pub(crate) name: [AtomicU32; NAME_SIZE / 4],
}

/// Bytes 1536..1600.
#[repr(C)]
pub(crate) struct ExtHeader {
    pub(crate) magic: AtomicU64,
    pub(crate) version: AtomicU32,
    pub(crate) header_size: AtomicU32,
    pub(crate) slot_stride: AtomicU32,
    pub(crate) slot_count: AtomicU32,
    pub(crate) feature_compat: AtomicU32,
    pub(crate) feature_incompat: AtomicU32,
    /// Random, set once: tells two segments of one name apart.
    pub(crate) nonce: AtomicU64,
    /// Hash of the boot that made the segment.
    pub(crate) boot_hash: AtomicU64,
    /// Raised at every join, leave and change of weight.
    pub(crate) change_seq: AtomicU64,
    /// Wall time of the last join that found no slot.
    pub(crate) overflow_us: AtomicI64,
}

/// 128 bytes: who the owner is, and (second line) its part of turn mode.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct ExtSlot {
    /// Random, 0 = none, stored last.
    pub(crate) owner_token: AtomicU64,
    pub(crate) owner_pid: AtomicU32,
    /// Bits of `flag`.
    pub(crate) flags: AtomicU32,
    /// Equals `Slot::boot_us`, else this half is an earlier owner's (or one's that is `flag::CLAIMING`).
    pub(crate) owner_boot_us: AtomicI64,
    pub(crate) hb_seq: AtomicU64,
    pub(crate) pidns_ino: AtomicU64,
    pub(crate) start_ticks: AtomicU64,
    pub(crate) uid: AtomicU32,
    pub(crate) impl_version: AtomicU32,
    pub(crate) vram_bytes: AtomicU64,
    pub(crate) v_us: AtomicI64,
    pub(crate) turn_flags: AtomicU32,
    pub(crate) progress: AtomicU32,
    pub(crate) wake: AtomicU32,
    pub(crate) step_us: AtomicU32,
    pub(crate) turn_limit_us: AtomicU32,
    pub(crate) min_window_us: AtomicU32,
    reserved_96: AtomicU64,
    /// Units of work since the join.
    pub(crate) steps: AtomicU64,
    /// Time slept at the gate since the join.
    pub(crate) slept_us: AtomicU64,
    reserved_120: AtomicU64,
}

/// The whole segment.
#[repr(C)]
pub(crate) struct Segment {
    pub(crate) header: Header,
    pub(crate) slots: [Slot; SLOT_COUNT],
    reserved_1424: [AtomicU64; 14],
    pub(crate) ext: ExtHeader,
    pub(crate) ext_slots: [ExtSlot; SLOT_COUNT],
    /// Whose turn it is, in turn mode.
    pub(crate) token: AtomicU64,
    reserved_3656: [AtomicU64; 55],
}

#[cfg(not(loom))]
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<Segment>() == SEGMENT_SIZE && SLOT_COUNT as u64 == SLOT_COUNT_STORED as u64);
    assert!(size_of::<Slot>() == 88 && offset_of!(Segment, slots) == 16);
    assert!(offset_of!(Header, version) == 8 && offset_of!(Header, slot_count) == 12);
    assert!(
        offset_of!(Slot, boot_us) == 8 && offset_of!(Slot, weight) == 16 && offset_of!(Slot, active) == 20
    );
    assert!(offset_of!(Slot, heartbeat_us) == 24 && offset_of!(Slot, busy_ppm) == 32);
    assert!(offset_of!(Slot, name) == 36);
    assert!(offset_of!(Segment, reserved_1424) == SEED_SIZE);
    assert!(offset_of!(Segment, ext) as u64 == EXT_OFFSET);
    assert!(size_of::<ExtHeader>() == EXT_HEADER_SIZE as usize);
    assert!(offset_of!(ExtHeader, nonce) == 32 && offset_of!(ExtHeader, change_seq) == 48);
    assert!(offset_of!(ExtHeader, overflow_us) == 56);
    assert!(size_of::<ExtSlot>() == EXT_SLOT_STRIDE as usize && offset_of!(Segment, ext_slots) == 1600);
    assert!(offset_of!(ExtSlot, flags) == 12 && offset_of!(ExtSlot, owner_boot_us) == 16);
    assert!(offset_of!(ExtSlot, hb_seq) == 24 && offset_of!(ExtSlot, pidns_ino) == 32);
    assert!(offset_of!(ExtSlot, uid) == 48 && offset_of!(ExtSlot, vram_bytes) == 56);
    assert!(offset_of!(ExtSlot, v_us) == 64 && offset_of!(ExtSlot, wake) == 80);
    assert!(offset_of!(ExtSlot, min_window_us) == 92 && offset_of!(ExtSlot, steps) == 104);
    assert!(offset_of!(ExtSlot, slept_us) == 112 && offset_of!(Segment, token) == 3648);
};
