//! A deterministic source of numbers: `SplitMix64`, enough for jitter.

use std::time::Duration;

#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// From `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// `mean`, give or take so many percent.
    pub(crate) fn around(&mut self, mean: u64, percent: u64) -> u64 {
        let reach = mean * percent / 100;
        self.between(mean - reach, mean + reach)
    }

    pub(crate) fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        let last = u64::try_from(from.len() - 1).expect("a short list");
        from[usize::try_from(self.between(0, last)).expect("an index")]
    }

    /// Exponentially distributed.
    pub(crate) fn exponential(&mut self, mean: Duration) -> u64 {
        let bits = u32::try_from(self.next() >> 32).expect("32 bits");
        let unit = (f64::from(bits) + 1.0) / f64::from(u32::MAX);
        let micros = mean.mul_f64((-unit.min(1.0).ln()).max(0.0)).as_micros();
        u64::try_from(micros).expect("minutes at most")
    }
}
