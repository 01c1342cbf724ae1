//! The gate: what a step costs and decides.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use crate::clock;
use crate::layout::{ExtSlot, flag, turn_flag};
use crate::registry::MappedSegment;
use crate::schedule::Grid;
use crate::sync::Ordering;
use crate::sys::sleep_on;

use super::company::Schedule;
use super::desk::{Desk, move_on};
use super::member::{Member, Seat, State};
use super::turn::{Ended, Place};

/// Longest sleep towards a window without another look: one period at most, so that a clock step oversleeps nobody.
const WINDOW_LOOK_AGAIN_US: u64 = 400_000;
/// Shortest sleep between two looks at a turn.
const LOOK_AGAIN_LEAST_US: u64 = 500;
/// A peer without a slot sleeps this many times the length of its step: as if it had the smallest share, 10 %.
const OBSERVER_FACTOR: u64 = 9;
/// But no longer than this.
const OBSERVER_SLEEP_MAX_US: u64 = 400_000;
/// Stands for the thread of a process that marks its work by hand.
const NO_THREAD: usize = 0;

impl Member {
    /// End the unit before, and begin the next one, if it need not wait.
    pub(crate) fn arrive(&self) -> bool {
        let now_us = clock::monotonic_us();
        let mut state = self.state();
        let State { seat, desk } = &mut *state;
        let Some(place) = self.place(seat, desk) else {
            return self.arrive_without_slot(seat, desk, now_us);
        };
        mark_paced(place.ext);
        // The seed's grid gates after each step, so that the first one of a request returns at once.
        let first = !desk.meter.recent(now_us);
        self.finish(&place, desk, Ended::ByNext, now_us);
        self.open(&place, desk, now_us);
        self.try_begin(&place, desk, now_us, first)
    }

    /// Begin the unit that had to wait, if it need not wait any longer.
    pub(crate) fn look(&self) -> bool {
        let now_us = clock::monotonic_us();
        let mut state = self.state();
        let State { seat, desk } = &mut *state;
        let Some(place) = self.place(seat, desk) else {
            return desk.begin_without_slot(thread_key(), now_us);
        };
        self.open(&place, desk, now_us);
        self.try_begin(&place, desk, now_us, false)
    }

    /// Sleep at most `slice`, then `look`.
    pub(crate) fn wait(&self, slice: Duration) -> bool {
        self.pause(slice);
        self.look()
    }

    /// Sleep at most `slice`; whether it is worth to `look` now. For a thread that waits on behalf of another one.
    pub(crate) fn wait_ready(&self, slice: Duration) -> bool {
        self.pause(slice);
        let now_us = clock::monotonic_us();
        let mut state = self.state();
        let State { seat, desk } = &mut *state;
        let Some(place) = self.place(seat, desk) else { return now_us >= desk.observer_until_us };
        self.may_begin(&place, desk, now_us)
    }

    /// Do not wait any longer; a turn that came meanwhile goes to the next one.
    pub(crate) fn abandon(&self) {
        let now_us = clock::monotonic_us();
        let mut state = self.state();
        let State { seat, desk } = &mut *state;
        let Some(place) = self.place(seat, desk) else { return };
        desk.turn.stop_waiting(place.ext);
        desk.turn.ending = !place.company.is_empty();
        self.end_turn_if_due(&place, desk, now_us);
    }

    /// Note what a wait took.
    pub(crate) fn add_slept(&self, slept_us: u64) {
        self.publish(|_, ext| {
            ext.slept_us.fetch_add(slept_us, Ordering::Relaxed);
        });
    }

    pub(crate) fn done(&self) {
        let now_us = clock::monotonic_us();
        let mut state = self.state();
        let State { seat, desk } = &mut *state;
        match self.place(seat, desk) {
            Some(place) => self.finish(&place, desk, Ended::Told, now_us),
            None => self.finish_without_slot(seat, desk, now_us),
        }
    }

    pub(crate) fn open_request(&self) {
        let now_us = clock::monotonic_us();
        let mut state = self.state();
        let State { seat, desk } = &mut *state;
        desk.meter.open_request();
        if let Some(place) = self.place(seat, desk) {
            self.open(&place, desk, now_us);
        }
    }

    pub(crate) fn close_request(&self) {
        if self.state().desk.meter.close_request() {
            self.idle();
        }
    }

    /// For work that is not stepped: busy and active from `true` to `false`, whatever it does between them.
    pub(crate) fn mark(&self, active: bool) {
        if active == self.state().desk.meter.in_request() {
            return;
        }
        if active {
            self.state().desk.meter.begin_unit(NO_THREAD, clock::monotonic_us());
            self.open_request();
        } else {
            self.state().desk.meter.end_unit(NO_THREAD, clock::monotonic_us());
            self.close_request();
        }
    }

    pub(crate) fn idle(&self) {
        let now_us = clock::monotonic_us();
        let mut state = self.state();
        let State { seat, desk } = &mut *state;
        let place = self.place(seat, desk);
        match &place {
            Some(place) => self.finish(place, desk, Ended::Told, now_us),
            None => self.finish_without_slot(seat, desk, now_us),
        }
        if let Some(place) = &place {
            self.rest(place, desk, now_us);
        }
        desk.meter.idle();
        desk.observer_until_us = 0;
    }

    /// Time left of the turn or of the window; `None` while there is nobody to share with.
    pub(crate) fn remaining_us(&self) -> Option<u64> {
        let now_us = clock::monotonic_us();
        let mut state = self.state();
        let State { seat, desk } = &mut *state;
        let place = self.place(seat, desk)?;
        if place.company.is_empty() {
            return None;
        }
        if place.company.schedule == Schedule::Grid {
            let grid = Grid::new(&self.roster(place.bytes(), place.slot, place.company));
            return Some(grid.remaining_us(place.slot, clock::wall_us()));
        }
        if !Self::has_turn(&place, desk) {
            return Some(0);
        }
        let open_us = now_us.saturating_sub(desk.turn.charged_until_us);
        let round = self.round(&place, desk, now_us);
        Some(round.remaining_us(place.slot, desk.turn.used_us).saturating_sub(open_us))
    }

    /// What the heartbeat does for the gate: close a request after the activity window, and open one anew in a new slot.
    pub(crate) fn keep_request(&self) {
        let now_us = clock::monotonic_us();
        let mut state = self.state();
        let State { seat, desk } = &mut *state;
        let Some(place) = self.place(seat, desk) else { return };
        if !desk.meter.active(now_us) {
            self.rest(&place, desk, now_us);
            return;
        }
        self.open(&place, desk, now_us);
        self.end_turn_if_due(&place, desk, now_us);
    }

    fn try_begin(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64, first: bool) -> bool {
        let free = first && place.company.schedule == Schedule::Grid;
        if !self.may_begin(place, desk, now_us) && !free {
            return false;
        }
        desk.turn.stop_waiting(place.ext);
        desk.meter.begin_unit(thread_key(), now_us);
        move_on(place.ext);
        let steps = &place.ext.steps;
        // Only this process writes it, under the desk's mutex.
        steps.store(steps.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        true
    }

    /// Whether a unit may begin now; else this process is queued.
    fn may_begin(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) -> bool {
        desk.meter.touch(now_us);
        if place.company.schedule == Schedule::Grid {
            self.leave_round(place, desk, now_us);
            let may = place.company.is_empty() || self.window_wait_us(place) == 0;
            if !may {
                // The end of a request wakes who is queued, in the grid too.
                desk.turn.raise(place.ext, turn_flag::QUEUED);
            }
            return may;
        }
        if desk.turn.in_grid {
            desk.turn.in_grid = false;
            self.enter_round(place, desk, now_us);
        }
        self.take_turn(place, desk, now_us) || self.queue(place, desk, now_us)
    }

    /// The grid is in force: nobody has the turn.
    fn leave_round(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) {
        desk.turn.in_grid = true;
        if desk.turn.word != 0 {
            self.end_turn(place, desk, now_us);
        }
    }

    /// The unit of a thread ended: show it, and charge it.
    fn finish(&self, place: &Place<'_>, desk: &mut Desk, ended: Ended, now_us: u64) {
        let Some(unit_us) = desk.meter.end_unit(thread_key(), now_us) else { return };
        move_on(place.ext);
        if place.company.schedule == Schedule::Turn {
            self.charge(place, desk, (unit_us, ended), now_us);
        } else if unit_us > 0 {
            desk.turn.publish_step(place.ext, unit_us, ended);
        }
    }

    /// A request begins, unless one is open.
    fn open(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) {
        if desk.turn.in_request() {
            return;
        }
        place.bytes().slots[place.slot].active.store(1, Ordering::Relaxed);
        desk.turn.in_grid = place.company.schedule == Schedule::Grid;
        self.enter_round(place, desk, now_us);
    }

    /// No request is open: the others get this peer's part now.
    fn rest(&self, place: &Place<'_>, desk: &mut Desk, now_us: u64) {
        if !desk.turn.in_request() {
            return;
        }
        desk.turn.stop_waiting(place.ext);
        desk.turn.lower(place.ext, turn_flag::INREQ);
        place.bytes().slots[place.slot].active.store(0, Ordering::Relaxed);
        self.end_turn(place, desk, now_us);
        if place.company.schedule == Schedule::Grid && place.segment.extended() {
            place.wake_waiters();
        }
    }

    fn arrive_without_slot(&self, seat: &Seat, desk: &mut Desk, now_us: u64) -> bool {
        self.finish_without_slot(seat, desk, now_us);
        desk.begin_without_slot(thread_key(), now_us)
    }

    /// A peer without a slot is seen by nobody; it holds back by itself while anybody is at work.
    fn finish_without_slot(&self, seat: &Seat, desk: &mut Desk, now_us: u64) {
        let Some(unit_us) = desk.meter.end_unit(thread_key(), now_us) else { return };
        let Some(segment) = &seat.segment else { return };
        if !self.company(segment.bytes(), None).is_empty() {
            let sleep_us = unit_us.saturating_mul(OBSERVER_FACTOR).min(OBSERVER_SLEEP_MAX_US);
            desk.observer_until_us = now_us + sleep_us;
        }
    }

    /// Sleep until something may have changed, at most `slice`.
    fn pause(&self, slice: Duration) {
        let Some((segment, slot, seen, span)) = self.pause_plan() else { return };
        match segment {
            Some(segment) => sleep_on(&segment.bytes().ext_slots[slot].wake, seen, span.min(slice)),
            None => clock::sleep(span.min(slice)),
        }
    }

    /// On which word to sleep, from which value, and for how long; `None`: not at all.
    fn pause_plan(&self) -> Option<(Option<Arc<MappedSegment>>, usize, u32, Duration)> {
        let mut state = self.state();
        let State { seat, desk } = &mut *state;
        let Some(place) = self.place(seat, desk) else {
            let left_us = desk.observer_until_us.saturating_sub(clock::monotonic_us());
            return (left_us > 0).then(|| (None, 0, 0, Duration::from_micros(left_us)));
        };
        // Acquire: pairs with the Release in `wake`. Read before the look: whatever happens after it wakes us.
        let seen = place.ext.wake.load(Ordering::Acquire);
        let span = if place.company.schedule == Schedule::Grid {
            Duration::from_micros(self.window_wait_us(&place).min(WINDOW_LOOK_AGAIN_US))
        } else if self.take_turn(&place, desk, clock::monotonic_us()) {
            Duration::ZERO
        } else {
            Duration::from_micros(desk.turn.look_again_us.max(LOOK_AGAIN_LEAST_US))
        };
        let word = seat.segment.clone().filter(|_| seat.claim.is_some_and(|claim| claim.extended()));
        (!span.is_zero()).then_some((word, place.slot, seen, span))
    }

    fn window_wait_us(&self, place: &Place<'_>) -> u64 {
        if place.company.is_empty() {
            return 0;
        }
        let roster = self.roster(place.bytes(), place.slot, place.company);
        Grid::new(&roster).wait_us(place.slot, clock::wall_us())
    }

    /// Where we stand in the registry, and who is at work; `None` without a slot.
    fn place<'seat>(&self, seat: &'seat Seat, desk: &mut Desk) -> Option<Place<'seat>> {
        let (segment, claim) = (seat.segment.as_deref()?, seat.claim?);
        desk.sit(claim);
        let slot = claim.slot;
        let mut company = self.company(segment.bytes(), Some(slot));
        if claim.extended() {
            return Some(Place { segment, slot, ext: &segment.bytes().ext_slots[slot], company });
        }
        company.schedule = Schedule::Grid;
        Some(Place { segment, slot, ext: &seat.spare, company })
    }
}

impl Desk {
    fn begin_without_slot(&mut self, thread: usize, now_us: u64) -> bool {
        let may = now_us >= self.observer_until_us;
        if may {
            self.meter.begin_unit(thread, now_us);
        }
        may
    }
}

/// Tells the threads of this process apart: the address of a variable that each of them has. Never `NO_THREAD`.
fn thread_key() -> usize {
    thread_local! {
        static KEY: Cell<u8> = const { Cell::new(0) };
    }
    KEY.with(|key| std::ptr::from_ref(key).addr())
}

/// Note once that this process calls the gate.
fn mark_paced(ext: &ExtSlot) {
    if ext.flags.load(Ordering::Relaxed) & flag::PACED == 0 {
        ext.flags.fetch_or(flag::PACED, Ordering::Relaxed);
    }
}
