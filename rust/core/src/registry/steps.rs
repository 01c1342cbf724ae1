//! Noticing that the wall clock was set.

/// How far wall time and monotonic time may drift apart between two readings before that counts as a step.
const STEP_US: u64 = 50_000;

/// Compares the two clocks from one reading to the next.
///
/// A peer that beats at once after a step is out of everybody's sight for no longer than a moment: its last heartbeat,
/// by the new time, may lie hours away.
#[derive(Debug, Default)]
pub(crate) struct ClockWatch {
    last: Option<(u64, i64)>,
}

impl ClockWatch {
    /// Whether the wall clock was set since the last reading; `now_us` is monotonic. The first reading is no step.
    pub(crate) fn stepped(&mut self, now_us: u64, wall_us: i64) -> bool {
        let Some((last_now_us, last_wall_us)) = self.last.replace((now_us, wall_us)) else { return false };
        let passed_us = i64::try_from(now_us.saturating_sub(last_now_us)).unwrap_or(i64::MAX);
        let told_us = wall_us.saturating_sub(last_wall_us);
        told_us.saturating_sub(passed_us).unsigned_abs() > STEP_US
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_US: i64 = 1_700_000_000_000_000;

    #[test]
    fn a_clock_that_is_set_either_way_is_noticed_once() {
        for step_us in [50_001, -50_001, 1_000_000, -1_000_000, 3_600_000_000, -3_600_000_000] {
            let mut watch = ClockWatch::default();
            assert!(!watch.stepped(1_000, NOW_US));

            assert!(watch.stepped(501_000, NOW_US + 500_000 + step_us), "{step_us}");
            assert!(!watch.stepped(1_001_000, NOW_US + 1_000_000 + step_us), "{step_us}");
        }
    }

    #[test]
    fn a_late_reading_and_a_clock_that_is_slewed_are_no_steps() {
        let mut watch = ClockWatch::default();
        assert!(!watch.stepped(0, NOW_US));

        assert!(!watch.stepped(90_000_000, NOW_US + 90_000_000));
        assert!(!watch.stepped(90_500_000, NOW_US + 90_500_000 - 50_000));
    }

    #[test]
    fn no_reading_overflows() {
        let mut watch = ClockWatch::default();

        for (now_us, wall_us) in [(u64::MAX, i64::MIN), (0, i64::MAX), (u64::MAX, i64::MIN), (0, 0)] {
            watch.stepped(now_us, wall_us);
        }
    }
}
