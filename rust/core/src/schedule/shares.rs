//! Shares of the active peers.

use crate::layout::SLOT_COUNT;
use crate::schedule::PPM;

/// No active peer gets less than this before renormalising: no weight can starve anybody (seed section 4).
pub const SHARE_FLOOR_PPM: u64 = 100_000;
/// Weight 1.0, and what stands in for a weight that is not a positive number.
pub const WEIGHT_MILLI_DEFAULT: u32 = 1000;
const WEIGHT_MILLI_MAX: f32 = 1_000_000.0;

/// A weight in thousandths, rounded, 1 to 1,000,000. Any bit pattern is legal input: what is not a positive finite
/// number counts as 1.0.
///
/// ```
/// # use ocgpu_core::schedule::weight_milli;
/// assert_eq!((weight_milli(1.5), weight_milli(f32::NAN), weight_milli(1e9)), (1500, 1000, 1_000_000));
/// ```
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to 1..=1,000,000 in the line before"
)]
pub fn weight_milli(weight: f32) -> u32 {
    if !weight.is_finite() || weight <= 0.0 {
        return WEIGHT_MILLI_DEFAULT;
    }
    (weight * 1000.0).round().clamp(1.0, WEIGHT_MILLI_MAX) as u32
}

/// The active peers, in slot order, with their weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Roster {
    weights: [u32; SLOT_COUNT],
}

impl Roster {
    /// Put the peer of `slot` in, with a weight in thousandths (0 counts as 1). Slots beyond the last are ignored.
    pub fn insert(&mut self, slot: usize, weight_milli: u32) {
        if let Some(weight) = self.weights.get_mut(slot) {
            *weight = weight_milli.max(1);
        }
    }

    /// How many peers are active.
    #[must_use]
    pub fn len(&self) -> usize {
        self.weights.iter().filter(|weight| **weight > 0).count()
    }

    /// Whether nobody is active.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.weights.iter().all(|weight| *weight == 0)
    }

    /// Whether the peer of `slot` is active.
    #[must_use]
    pub fn contains(&self, slot: usize) -> bool {
        self.weights.get(slot).is_some_and(|weight| *weight > 0)
    }

    /// Each slot's part of the sum of all parts, at least the floor before renormalising; 0 for an idle one.
    ///
    /// Whole numbers, so that no rounding separates peers who compute the same schedule by other means.
    #[must_use]
    pub fn parts(&self) -> [u64; SLOT_COUNT] {
        let total: u64 = self.weights.iter().map(|weight| u64::from(*weight)).sum();
        self.weights.map(|weight| match weight {
            0 => 0,
            _ => (u64::from(weight) * PPM).max(total * SHARE_FLOOR_PPM),
        })
    }

    /// Each slot's share: floored and renormalised, in parts per million; 0 for an idle one.
    ///
    /// ```
    /// # use ocgpu_core::schedule::Roster;
    /// let mut roster = Roster::default();
    /// for (slot, weight) in [2000, 1000, 1000].into_iter().enumerate() {
    ///     roster.insert(slot, weight);
    /// }
    /// assert_eq!(roster.shares_ppm()[..3], [500_000, 250_000, 250_000]);
    /// ```
    #[must_use]
    pub fn shares_ppm(&self) -> [u32; SLOT_COUNT] {
        let parts = self.parts();
        let total: u128 = parts.iter().map(|part| u128::from(*part)).sum();
        let share = |part: u64| (u128::from(part) * u128::from(PPM)).checked_div(total).unwrap_or(0);
        parts.map(|part| u32::try_from(share(part)).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn roster(weights: &[u32]) -> Roster {
        let mut roster = Roster::default();
        for (slot, weight) in weights.iter().enumerate() {
            roster.insert(slot, *weight);
        }
        roster
    }

    #[test]
    fn weights_2_1_1_are_50_25_25_percent() {
        assert_eq!(roster(&[2000, 1000, 1000]).shares_ppm()[..4], [500_000, 250_000, 250_000, 0]);
    }

    #[test]
    fn a_small_weight_is_raised_to_the_floor_and_the_rest_gives_way() {
        // 99:1 would be 99 % and 1 %: floored 99 % and 10 %, renormalised by 109 %.
        assert_eq!(roster(&[99_000, 1000]).shares_ppm()[..2], [908_256, 91_743]);
    }

    #[test]
    fn idle_slots_do_not_enter_the_denominator() {
        let mut roster = Roster::default();
        roster.insert(3, 1000);
        roster.insert(9, 1000);

        assert_eq!(roster.shares_ppm()[3], 500_000);
        assert_eq!(roster.shares_ppm()[0], 0);
    }

    proptest! {
        #[test]
        fn shares_are_positive_and_never_more_than_the_whole(weights in prop::collection::vec(1_u32..=1_000_000, 1..=16)) {
            let shares = roster(&weights).shares_ppm();
            let sum: u64 = shares.iter().map(|share| u64::from(*share)).sum();

            // Rounding down loses less than one part a peer.
            prop_assert!(sum <= PPM && sum + 16 > PPM);
            prop_assert!(shares[..weights.len()].iter().all(|share| *share >= 38_000));
        }

        #[test]
        fn any_bits_make_a_legal_weight(bits in any::<u32>()) {
            let weight = weight_milli(f32::from_bits(bits));

            prop_assert!((1..=1_000_000).contains(&weight));
        }
    }
}
