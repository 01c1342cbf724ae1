//! The seed's schedule: windows of one period, in slot order, over the wall clock that all peers share.
//!
//! There is no control loop: three of them failed before this (seed section 4, "Why not feedback?").

use std::ops::Range;

use crate::layout::SLOT_COUNT;
use crate::schedule::{PPM, Roster};

/// The smallest window that is worth having (seed bug-2243).
const WINDOW_MIN_US: u32 = 40_000;
/// Below this, switching costs more than the shorter stall gains.
const PERIOD_MIN_US: u64 = 80_000;
/// Beyond this, the longest stall matters more than the smallest window.
const PERIOD_MAX_US: u64 = 400_000;

/// Length of one period in microseconds: the smallest that gives the smallest share a window of 40 ms, kept between
/// 80 ms and 400 ms. A `min_share_ppm` of 0 counts as 1.
///
/// ```
/// # use ocgpu_core::schedule::period_us;
/// assert_eq!(period_us(333_333), 120_000); // weights 2:1
/// assert_eq!(period_us(500_000), 80_000); // weights 1:1
/// ```
#[must_use]
pub fn period_us(min_share_ppm: u32) -> u64 {
    period_of_window_us(WINDOW_MIN_US, min_share_ppm)
}

/// `period_us` for peers whose smallest window is another one.
#[must_use]
pub(crate) fn period_of_window_us(window_us: u32, min_share_ppm: u32) -> u64 {
    (u64::from(window_us) * PPM / u64::from(min_share_ppm.max(1))).clamp(PERIOD_MIN_US, PERIOD_MAX_US)
}

/// The windows of all active peers within one period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    period_us: u64,
    /// End of each slot's window, from the period's start; an idle slot's window is empty.
    ends_us: [u64; SLOT_COUNT],
}

impl Grid {
    /// The schedule of these peers. The last window runs to the period's end, so that no microsecond is nobody's.
    #[must_use]
    pub fn new(roster: &Roster) -> Self {
        let parts = roster.parts().map(u128::from);
        let total: u128 = parts.iter().sum();
        let smallest = parts.into_iter().filter(|part| *part > 0).min().unwrap_or(1);
        let wanted_us = u64::try_from(u128::from(WINDOW_MIN_US) * total / smallest).unwrap_or(u64::MAX);
        let period_us = wanted_us.clamp(PERIOD_MIN_US, PERIOD_MAX_US);
        let mut ends_us = [0; SLOT_COUNT];
        let mut before = 0;
        for (end, part) in ends_us.iter_mut().zip(parts) {
            before += part;
            let edge = (u128::from(period_us) * before).checked_div(total).unwrap_or(0);
            *end = u64::try_from(edge).unwrap_or(u64::MAX);
        }
        Self { period_us, ends_us }
    }

    /// Length of the period in microseconds.
    #[must_use]
    pub fn period_us(&self) -> u64 {
        self.period_us
    }

    /// The window of `slot`, in microseconds from the period's start; empty for an idle one.
    #[must_use]
    pub fn window(&self, slot: usize) -> Range<u64> {
        let start = if slot == 0 { 0 } else { self.ends_us[slot - 1] };
        start..self.ends_us[slot]
    }

    /// Whether the window of `slot` is open at this wall time.
    #[must_use]
    pub fn open(&self, slot: usize, wall_us: i64) -> bool {
        self.window(slot).contains(&self.position(wall_us))
    }

    /// Microseconds until the window of `slot` opens; 0 while it is open. At most one period.
    #[must_use]
    pub fn wait_us(&self, slot: usize, wall_us: i64) -> u64 {
        let position = self.position(wall_us);
        let window = self.window(slot);
        if window.contains(&position) {
            return 0;
        }
        (window.start + self.period_us - position) % self.period_us
    }

    /// Microseconds until the window of `slot` closes; 0 while it is closed.
    #[must_use]
    pub fn remaining_us(&self, slot: usize, wall_us: i64) -> u64 {
        let position = self.position(wall_us);
        let window = self.window(slot);
        if window.contains(&position) { window.end - position } else { 0 }
    }

    fn position(&self, wall_us: i64) -> u64 {
        let period = i64::try_from(self.period_us).unwrap_or(i64::MAX);
        u64::try_from(wall_us.rem_euclid(period)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn grid(weights: &[u32]) -> Grid {
        let mut roster = Roster::default();
        for (slot, weight) in weights.iter().enumerate() {
            roster.insert(slot, *weight);
        }
        Grid::new(&roster)
    }

    #[test]
    fn two_to_one_is_a_period_of_120_ms_with_windows_of_80_and_40() {
        let grid = grid(&[2000, 1000]);

        assert_eq!(grid.period_us(), 120_000);
        assert_eq!((grid.window(0), grid.window(1)), (0..80_000, 80_000..120_000));
    }

    #[test]
    fn one_to_one_is_a_period_of_80_ms() {
        assert_eq!(grid(&[1000, 1000]).period_us(), 80_000);
    }

    #[test]
    fn a_period_is_exact_to_the_microsecond() {
        // Shares 10 % floored beside 0.3 and 2: 40 ms by (0.3 / 2.3) is 306,666.67 us.
        assert_eq!(grid(&[300, 2000]).period_us(), 306_666);
        assert_eq!(grid(&[300, 2500]).period_us(), 373_333);
    }

    #[test]
    fn sixteen_equal_peers_are_clamped_to_400_ms() {
        assert_eq!(grid(&[1000; 16]).period_us(), 400_000);
    }

    #[test]
    fn outside_its_window_a_peer_sleeps_exactly_until_the_next_one() {
        let grid = grid(&[2000, 1000]);

        assert_eq!(grid.wait_us(1, 10_000), 70_000);
        assert_eq!(grid.wait_us(0, 80_000), 40_000);
        assert_eq!(grid.wait_us(0, 79_999), 0);
        assert_eq!(grid.remaining_us(0, 79_999), 1);
    }

    #[test]
    fn before_1970_the_schedule_goes_on() {
        assert_eq!(grid(&[1000, 1000]).wait_us(0, -1), 1);
    }

    proptest! {
        #[test]
        fn at_every_instant_exactly_one_active_peer_may_run(
            weights in prop::collection::vec(0_u32..=1_000_000, 16), wall in any::<i64>()
        ) {
            let mut roster = Roster::default();
            for (slot, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0) {
                roster.insert(slot, *weight);
            }
            prop_assume!(!roster.is_empty());
            let grid = Grid::new(&roster);

            let open: Vec<usize> = (0..SLOT_COUNT).filter(|slot| grid.open(*slot, wall)).collect();

            prop_assert_eq!(open.len(), 1);
            prop_assert!(roster.contains(open[0]));
        }

        #[test]
        fn nobody_sleeps_longer_than_a_period(
            weights in prop::collection::vec(1_u32..=1_000_000, 1..=16), wall in any::<i64>(), slot in 0_usize..16
        ) {
            let grid = grid(&weights);

            prop_assert!(grid.wait_us(slot % weights.len(), wall) < grid.period_us());
        }
    }
}
