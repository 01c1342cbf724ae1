//! How much of its time a process is at work, and whether it is at work at all.
//!
//! Times are monotonic microseconds. A gap longer than the activity window counts as idle and is charged to nobody.

/// A process that did nothing for this long is idle (the seed's constant).
pub(crate) const ACTIVITY_WINDOW_US: u64 = 2_000_000;

/// A unit of work that is open. Each thread has one at most.
#[derive(Debug, Clone, Copy)]
struct Unit {
    thread: usize,
    began_us: u64,
}

/// Work of one process; its threads share it.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    units: Vec<Unit>,
    /// When the process last began or ended a unit.
    worked_us: Option<u64>,
    /// Until when work is counted in `busy_us`: what overlaps is counted once.
    counted_until_us: u64,
    /// Time at work since the join.
    busy_us: u64,
    /// Explicit requests that are open.
    requests: u32,
}

impl Meter {
    /// The open unit of `thread` ends: its length, if there was one, and 0 where it was idleness.
    pub(crate) fn end_unit(&mut self, thread: usize, now_us: u64) -> Option<u64> {
        let index = self.units.iter().position(|unit| unit.thread == thread);
        let unit = index.map(|index| self.units.swap_remove(index));
        if let Some(unit) = unit {
            self.busy_us += self.uncounted_us(unit, now_us);
            self.counted_until_us = now_us;
            self.worked_us = Some(now_us);
        }
        unit.map(|unit| self.work_us(now_us.saturating_sub(unit.began_us)))
    }

    /// A unit of `thread` begins.
    pub(crate) fn begin_unit(&mut self, thread: usize, now_us: u64) {
        self.units.retain(|unit| unit.thread != thread);
        self.units.push(Unit { thread, began_us: now_us });
        self.worked_us = Some(now_us);
    }

    /// Whether units are open that began less than `limit_us` ago: an older one was left behind by its thread.
    pub(crate) fn in_unit(&self, now_us: u64, limit_us: u64) -> bool {
        self.units.iter().any(|unit| now_us.saturating_sub(unit.began_us) < limit_us)
    }

    pub(crate) fn open_request(&mut self) {
        self.requests = self.requests.saturating_add(1);
    }

    /// Whether no request is open any more.
    pub(crate) fn close_request(&mut self) -> bool {
        self.requests = self.requests.saturating_sub(1);
        self.requests == 0
    }

    /// Whether a request is open.
    pub(crate) fn in_request(&self) -> bool {
        self.requests > 0
    }

    /// Forget the work done: the next step is the first of a request.
    pub(crate) fn idle(&mut self) {
        self.units.clear();
        self.worked_us = None;
    }

    /// Something was done, such as to wait at the gate.
    pub(crate) fn touch(&mut self, now_us: u64) {
        self.worked_us = Some(now_us);
    }

    /// Whether the process worked within the activity window, or has a request open.
    pub(crate) fn active(&self, now_us: u64) -> bool {
        self.in_request() || self.recent(now_us)
    }

    /// Whether it worked within the activity window.
    pub(crate) fn recent(&self, now_us: u64) -> bool {
        self.worked_us.is_some_and(|worked_us| now_us.saturating_sub(worked_us) <= ACTIVITY_WINDOW_US)
    }

    /// Time at work since the join, the open units' part included.
    pub(crate) fn busy_us(&self, now_us: u64) -> u64 {
        let open = self.units.iter().map(|unit| self.uncounted_us(*unit, now_us)).max();
        self.busy_us.saturating_add(open.unwrap_or(0))
    }

    /// How much of a unit's span is work that is not counted yet.
    fn uncounted_us(&self, unit: Unit, now_us: u64) -> u64 {
        self.work_us(now_us.saturating_sub(unit.began_us.max(self.counted_until_us)))
    }

    /// How much of a span is work: all of it, unless it is a gap in a bare loop.
    fn work_us(&self, span_us: u64) -> u64 {
        if span_us <= ACTIVITY_WINDOW_US || self.in_request() { span_us } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: usize = 1;
    const B: usize = 2;

    #[test]
    fn silence_longer_than_the_activity_window_is_idleness() {
        let mut meter = Meter::default();
        assert!(!meter.active(0));

        meter.begin_unit(A, 1_000);

        assert!(meter.active(1_000 + ACTIVITY_WINDOW_US));
        assert!(!meter.active(1_001 + ACTIVITY_WINDOW_US));
    }

    #[test]
    fn a_gap_longer_than_the_activity_window_is_charged_to_nobody() {
        let mut meter = Meter::default();
        meter.begin_unit(A, 0);
        meter.end_unit(A, 8_000);
        meter.begin_unit(A, 8_000);

        assert_eq!(meter.end_unit(A, 8_001 + ACTIVITY_WINDOW_US), Some(0));

        assert_eq!(meter.busy_us(10_000_000), 8_000);
    }

    #[test]
    fn an_open_request_keeps_a_long_unit_active() {
        let mut meter = Meter::default();
        meter.open_request();
        meter.begin_unit(A, 0);

        assert!(meter.active(60_000_000));
        assert_eq!(meter.busy_us(60_000_000), 60_000_000);
        assert!(meter.close_request());
        assert!(!meter.active(60_000_000));
    }

    #[test]
    fn closing_more_requests_than_were_opened_is_harmless() {
        let mut meter = Meter::default();

        assert!(meter.close_request());
        meter.open_request();
        assert!(meter.active(0));
    }

    #[test]
    fn threads_that_overlap_are_busy_once() {
        let mut meter = Meter::default();
        meter.begin_unit(A, 0);
        meter.begin_unit(B, 4_000);

        assert_eq!(meter.end_unit(A, 8_000), Some(8_000));
        assert_eq!(meter.end_unit(B, 10_000), Some(6_000));

        assert_eq!(meter.busy_us(20_000), 10_000);
    }

    #[test]
    fn a_unit_that_its_thread_left_behind_does_not_count_for_ever() {
        let mut meter = Meter::default();
        meter.begin_unit(A, 0);

        assert!(meter.in_unit(99_999, 100_000));
        assert!(!meter.in_unit(100_000, 100_000));
    }
}
