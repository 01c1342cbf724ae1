//! A peer that exists in the segment's bytes only, and so can do what no honest one does.

use std::time::Duration;

use ocgpu_core::{Pacer, wall_us};

use crate::scratch::{Bytes, Scratch, now, pause};

pub(crate) const TOKEN: usize = 3648;
pub(crate) const HEARTBEAT: usize = 24;
pub(crate) const FLAGS: usize = 12;
pub(crate) const V: usize = 64;
pub(crate) const TURN_FLAGS: usize = 72;
pub(crate) const PROGRESS: usize = 76;
pub(crate) const WAKE: usize = 80;
pub(crate) const TURN_LIMIT: usize = 88;
pub(crate) const HAS_LOCK: u32 = 1;
pub(crate) const UNGATED: u32 = 64;
pub(crate) const INREQ: u32 = 1;
pub(crate) const QUEUED: u32 = 2;
pub(crate) const BOOST: u64 = 4;
pub(crate) const OVERDUE: u64 = 8;
pub(crate) const WATCHDOG: Duration = Duration::from_secs(10);

pub(crate) fn base(slot: usize) -> usize {
    16 + 88 * slot
}

pub(crate) fn ext(slot: usize) -> usize {
    1600 + 128 * slot
}

/// A peer of turn mode that consists of bytes: at work in slot 9, without a lock, its heart beaten by `beat`.
pub(crate) struct Puppet(pub(crate) Bytes);

impl Puppet {
    pub(crate) const SLOT: usize = 9;
    pub(crate) const PID: u32 = 4242;

    pub(crate) fn new(scratch: &Scratch, flags: u32, turn_flags: u32) -> Self {
        Self::with_weight(scratch, flags, turn_flags, 1.0)
    }

    pub(crate) fn with_weight(scratch: &Scratch, flags: u32, turn_flags: u32, weight: f32) -> Self {
        let bytes = scratch.bytes();
        let (base, ext, now) = (base(Self::SLOT), ext(Self::SLOT), wall_us());
        bytes.write(base + 8, &now.to_le_bytes());
        bytes.write(base + 16, &weight.to_le_bytes());
        bytes.write(base + HEARTBEAT, &now.to_le_bytes());
        bytes.write(ext + 8, &Self::PID.to_le_bytes());
        bytes.write(ext + FLAGS, &flags.to_le_bytes());
        bytes.write(ext + 16, &now.to_le_bytes());
        bytes.write(ext + TURN_FLAGS, &turn_flags.to_le_bytes());
        bytes.write(ext + TURN_LIMIT, &100_000_u32.to_le_bytes());
        bytes.write(ext, &77_u64.to_le_bytes());
        bytes.write(base, &Self::PID.to_le_bytes());
        bytes.write(base + 20, &1_u32.to_le_bytes());
        Self(bytes)
    }

    pub(crate) fn write(&self, field: usize, value: &[u8]) {
        self.0.write(ext(Self::SLOT) + field, value);
    }

    pub(crate) fn beat(&self) {
        self.0.write(base(Self::SLOT) + HEARTBEAT, &wall_us().to_le_bytes());
    }

    pub(crate) fn take_token(&self) {
        let generation = (self.0.u64(TOKEN) >> 16) + 1;
        self.0.write(TOKEN, &(generation << 16 | (Self::SLOT as u64 + 1)).to_le_bytes());
    }

    pub(crate) fn has_token(&self) -> bool {
        holder(&self.0) == Some(Self::SLOT)
    }
}

pub(crate) fn holder(bytes: &Bytes) -> Option<usize> {
    usize::try_from(bytes.u64(TOKEN) & 0xffff).expect("16 bits").checked_sub(1)
}

/// Begin a unit, waiting for as long as it takes.
pub(crate) fn begin(pacer: &Pacer) -> Duration {
    let started = now();
    let mut begun = pacer.arrive();
    while !begun {
        assert!(started.elapsed() < WATCHDOG, "no turn within {WATCHDOG:?}");
        begun = pacer.wait(Duration::from_millis(50));
    }
    started.elapsed()
}

pub(crate) fn compute(span: Duration) {
    let started = now();
    while started.elapsed() < span {
        pause();
    }
}
