//! How much of its time a process is at work, and whether it is at work at all.
//!
//! Times are wall microseconds. A gap longer than the activity window counts as idle and is charged to nobody.

use crate::sync::{AtomicI64, AtomicU32, AtomicU64, Ordering};

/// A process that did nothing for this long is idle (the seed's constant).
pub(crate) const ACTIVITY_WINDOW_US: i64 = 2_000_000;
/// No unit is open.
const NONE: i64 = i64::MIN;

/// Work of one process; its threads share it.
#[derive(Debug)]
pub(crate) struct Meter {
    /// When the open unit began.
    unit_us: AtomicI64,
    /// When the process last began or ended a unit.
    worked_us: AtomicI64,
    /// Time at work since the join.
    busy_us: AtomicU64,
    /// Explicit requests that are open.
    requests: AtomicU32,
}

impl Meter {
    pub(crate) fn new() -> Self {
        Self {
            unit_us: AtomicI64::new(NONE),
            worked_us: AtomicI64::new(NONE),
            busy_us: AtomicU64::new(0),
            requests: AtomicU32::new(0),
        }
    }

    /// The open unit ends. Returns whether the process was active before, that is: this is not the first step of a
    /// request.
    pub(crate) fn end_unit(&self, wall_us: i64) -> bool {
        let began = self.unit_us.swap(NONE, Ordering::Relaxed);
        if began != NONE {
            let span = wall_us.saturating_sub(began);
            self.busy_us.fetch_add(self.counted(span), Ordering::Relaxed);
        }
        let worked = self.worked_us.swap(wall_us, Ordering::Relaxed);
        worked != NONE && (0..=ACTIVITY_WINDOW_US).contains(&wall_us.saturating_sub(worked))
    }

    /// A unit begins.
    pub(crate) fn begin_unit(&self, wall_us: i64) {
        self.unit_us.store(wall_us, Ordering::Relaxed);
        self.worked_us.store(wall_us, Ordering::Relaxed);
    }

    pub(crate) fn open_request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether no request is open any more.
    pub(crate) fn close_request(&self) -> bool {
        let before =
            self.requests.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |open| open.checked_sub(1));
        before.map_or(true, |open| open == 1)
    }

    /// Whether a request is open.
    pub(crate) fn in_request(&self) -> bool {
        self.requests.load(Ordering::Relaxed) > 0
    }

    /// Forget the work done: the next step is the first of a request.
    pub(crate) fn idle(&self) {
        self.unit_us.store(NONE, Ordering::Relaxed);
        self.worked_us.store(NONE, Ordering::Relaxed);
    }

    /// Whether the process worked within the activity window, or has a request open.
    pub(crate) fn active(&self, wall_us: i64) -> bool {
        let worked = self.worked_us.load(Ordering::Relaxed);
        let recent = worked != NONE && (0..=ACTIVITY_WINDOW_US).contains(&wall_us.saturating_sub(worked));
        recent || self.in_request()
    }

    /// Time at work since the join, the open unit's part included.
    pub(crate) fn busy_us(&self, wall_us: i64) -> u64 {
        let began = self.unit_us.load(Ordering::Relaxed);
        let open = if began == NONE { 0 } else { wall_us.saturating_sub(began) };
        self.busy_us.load(Ordering::Relaxed).saturating_add(self.counted(open))
    }

    /// How much of a unit's span is work: all of it, unless it is a gap in a bare loop or a clock step.
    fn counted(&self, span_us: i64) -> u64 {
        let plausible = (0..=ACTIVITY_WINDOW_US).contains(&span_us) || (span_us > 0 && self.in_request());
        if plausible { span_us.unsigned_abs() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_of_a_request_is_known() {
        let meter = Meter::new();

        assert!(!meter.end_unit(1_000));
        meter.begin_unit(1_000);
        assert!(meter.end_unit(9_000));
        meter.begin_unit(9_000);
        assert!(!meter.end_unit(9_000 + ACTIVITY_WINDOW_US + 1));
    }

    #[test]
    fn a_gap_longer_than_the_activity_window_is_charged_to_nobody() {
        let meter = Meter::new();
        meter.begin_unit(0);
        meter.end_unit(8_000);
        meter.begin_unit(8_000);

        meter.end_unit(8_000 + ACTIVITY_WINDOW_US + 1);

        assert_eq!(meter.busy_us(10_000_000), 8_000);
    }

    #[test]
    fn an_open_request_keeps_a_long_unit_active() {
        let meter = Meter::new();
        meter.open_request();
        meter.begin_unit(0);

        assert!(meter.active(60_000_000));
        assert!(meter.close_request());
        assert!(!meter.active(60_000_000));
    }

    #[test]
    fn closing_more_requests_than_were_opened_is_harmless() {
        let meter = Meter::new();

        assert!(meter.close_request());
        meter.open_request();
        assert!(meter.active(0));
    }
}
