//! The gate: what a step costs and decides.

use std::time::Duration;

use crate::clock;
use crate::layout::{SLOT_COUNT, Segment, flag};
use crate::registry::DEAD_AFTER_US;
use crate::schedule::{Grid, Roster, weight_milli};
use crate::sync::Ordering;

use super::member::Member;

/// Longest sleep at the gate without another look: one period at most, so that a clock step oversleeps nobody.
const LOOK_AGAIN_US: u64 = 400_000;

impl Member {
    /// End the unit before, and say how long the next one must wait; with 0 the next one has begun.
    pub(crate) fn arrive(&self) -> u64 {
        if self.forked() {
            return 0;
        }
        let wall_us = clock::wall_us();
        let seat = self.seat();
        let (Some(segment), Some(claim)) = (&seat.segment, seat.claim) else { return 0 };
        let bytes = segment.bytes();
        mark_paced(bytes, claim.slot);
        // The first step of a request returns at once: the seed gates after each step, not before the first.
        let first = !self.meter.end_unit(wall_us);
        let wait_us = if first { 0 } else { self.window_wait_us(bytes, claim.slot, wall_us) };
        mark_active(bytes, claim.slot);
        if wait_us == 0 {
            self.begin_at(wall_us, bytes, claim.slot, 0);
        }
        wait_us
    }

    /// How long the next unit must wait, as things stand now.
    pub(crate) fn look(&self) -> u64 {
        if self.forked() {
            return 0;
        }
        let seat = self.seat();
        let (Some(segment), Some(claim)) = (&seat.segment, seat.claim) else { return 0 };
        self.window_wait_us(segment.bytes(), claim.slot, clock::wall_us())
    }

    pub(crate) fn wait(&self, slice: Duration) -> u64 {
        let wait_us = self.look();
        if wait_us == 0 {
            return 0;
        }
        clock::sleep(Duration::from_micros(wait_us.min(LOOK_AGAIN_US)).min(slice));
        self.look()
    }

    /// The unit that waited begins.
    pub(crate) fn begin(&self, slept_us: u64) {
        let wall_us = clock::wall_us();
        self.publish(|slot, segment| {
            self.begin_at(wall_us, segment, slot, slept_us);
            mark_active(segment, slot);
        });
    }

    fn begin_at(&self, wall_us: i64, segment: &Segment, slot: usize, slept_us: u64) {
        self.meter.begin_unit(wall_us);
        let ext = &segment.ext_slots[slot];
        ext.steps.fetch_add(1, Ordering::Relaxed);
        if slept_us > 0 {
            ext.slept_us.fetch_add(slept_us, Ordering::Relaxed);
        }
    }

    pub(crate) fn done(&self) {
        self.meter.end_unit(clock::wall_us());
    }

    pub(crate) fn open_request(&self) {
        self.meter.open_request();
        self.publish(|slot, segment| mark_active(segment, slot));
    }

    pub(crate) fn close_request(&self) {
        if self.meter.close_request() {
            self.idle();
        }
    }

    /// For work that is not stepped: busy and active from `true` to `false`, whatever it does between them.
    pub(crate) fn mark(&self, active: bool) {
        if active == self.meter.in_request() {
            return;
        }
        if active {
            self.open_request();
            self.meter.begin_unit(clock::wall_us());
        } else {
            self.meter.end_unit(clock::wall_us());
            self.close_request();
        }
    }

    pub(crate) fn idle(&self) {
        self.meter.end_unit(clock::wall_us());
        self.meter.idle();
        self.publish(|slot, segment| segment.slots[slot].active.store(0, Ordering::Relaxed));
    }

    pub(crate) fn remaining_us(&self) -> Option<u64> {
        if self.forked() {
            return None;
        }
        let seat = self.seat();
        let (Some(segment), Some(claim)) = (&seat.segment, seat.claim) else { return None };
        let wall_us = clock::wall_us();
        let roster = self.roster(segment.bytes(), claim.slot, wall_us);
        (roster.len() > 1).then(|| Grid::new(&roster).remaining_us(claim.slot, wall_us))
    }

    fn window_wait_us(&self, segment: &Segment, own: usize, wall_us: i64) -> u64 {
        let roster = self.roster(segment, own, wall_us);
        if roster.len() < 2 { 0 } else { Grid::new(&roster).wait_us(own, wall_us) }
    }

    /// The active peers as they stand now; ourselves always among them.
    pub(crate) fn roster(&self, segment: &Segment, own: usize, wall_us: i64) -> Roster {
        let mut roster = Roster::default();
        roster.insert(own, weight_milli(self.weight()));
        let (known, barred) = (self.known.load(Ordering::Relaxed), self.barred.load(Ordering::Relaxed));
        for slot in (0..SLOT_COUNT).filter(|slot| *slot != own && barred & 1 << slot == 0) {
            let base = &segment.slots[slot];
            let idle = base.pid.load(Ordering::Relaxed) == 0 || base.active.load(Ordering::Relaxed) == 0;
            if idle || (known & 1 << slot == 0 && !fresh(segment, slot, wall_us)) {
                continue;
            }
            roster.insert(slot, weight_milli(f32::from_bits(base.weight.load(Ordering::Relaxed))));
        }
        roster
    }
}

/// Whether a peer that no sweep has judged yet has a young heartbeat.
fn fresh(segment: &Segment, slot: usize, wall_us: i64) -> bool {
    // Acquire: pairs with the Release of the beat.
    let heartbeat_us = segment.slots[slot].heartbeat_us.load(Ordering::Acquire);
    wall_us.saturating_sub(heartbeat_us).unsigned_abs() <= DEAD_AFTER_US
}

/// Note once that this process calls the gate.
fn mark_paced(segment: &Segment, slot: usize) {
    let flags = &segment.ext_slots[slot].flags;
    if flags.load(Ordering::Relaxed) & flag::PACED == 0 {
        flags.fetch_or(flag::PACED, Ordering::Relaxed);
    }
}

/// Publish that we work; the store is left out when it would change nothing, to spare the others the cache line.
fn mark_active(segment: &Segment, slot: usize) {
    let active = &segment.slots[slot].active;
    if active.load(Ordering::Relaxed) == 0 {
        active.store(1, Ordering::Relaxed);
    }
}
