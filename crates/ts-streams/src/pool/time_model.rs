// SPDX-License-Identifier: MIT OR Apache-2.0
//! A model of how long work takes, trained by work that has run.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// How much an observation counts after each further one: half after 14.
const DECAY: f64 = 0.95;
/// Below this share of their product, the sums of squares do not tell pieces and bytes apart.
const DEGENERATE: f64 = 1e-9;
/// Sums that have decayed below this are 0. Smaller ones would lose their digits.
const NOTHING: f64 = 1e-100;
/// An observation that took longer than expected by more than this factor counts less.
const SURPRISE: f64 = 16.0;

/// A linear model: a piece of work of `n` bytes takes `each + n * per_byte` nanoseconds.
///
/// The two coefficients are those that are not negative and make the weighted sum of the squared
/// errors least (by the normal equations). An error counts relative to the time that was expected
/// before (iteratively reweighted least squares), so that short work counts as much as long work,
/// and the expected time of equal work is its mean. Each observation counts [`DECAY`] times as much
/// as the next one.
#[derive(Debug, Default)]
pub(crate) struct TimeModel {
    sums: Mutex<Sums>,
    /// The coefficients, as the bits of `f64`s, for readers that take no lock.
    each_ns: AtomicU64,
    per_byte_ns: AtomicU64,
    is_trained: AtomicBool,
}

/// The sums of the normal equations: `x` is the pieces, `y` the bytes, and `t` the time of an
/// observation, all divided by its expected time.
#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    xx: f64,
    xy: f64,
    yy: f64,
    xt: f64,
    yt: f64,
}

impl Sums {
    fn add(&mut self, x: f64, y: f64, t: f64) {
        let decayed = |sum: f64| if sum < NOTHING { 0.0 } else { sum * DECAY };
        *self = Self {
            xx: decayed(self.xx) + x * x,
            xy: decayed(self.xy) + x * y,
            yy: decayed(self.yy) + y * y,
            xt: decayed(self.xt) + x * t,
            yt: decayed(self.yt) + y * t,
        };
    }

    /// Returns the coefficients for pieces and bytes.
    fn solve(self) -> (f64, f64) {
        let Self { xx, xy, yy, xt, yt } = self;
        let by_pieces = || (if xx > 0.0 { xt / xx } else { 0.0 }, 0.0);
        let by_bytes = || (0.0, if yy > 0.0 { yt / yy } else { 0.0 });
        let determinant = xx * yy - xy * xy;
        if determinant <= DEGENERATE * xx * yy {
            return if yy > 0.0 { by_bytes() } else { by_pieces() };
        }
        match ((xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant) {
            (each, _) if each < 0.0 => by_bytes(),
            (_, per_byte) if per_byte < 0.0 => by_pieces(),
            both => both,
        }
    }
}

impl TimeModel {
    /// Trains the model with pieces of work that took this long together. Work that took no time
    /// was not measured, and does not count.
    pub(crate) fn train(&self, pieces: u64, bytes: u64, took_ns: u64) {
        if pieces == 0 || took_ns == 0 {
            return;
        }
        let (pieces, bytes, took) = (pieces as f64, bytes as f64, took_ns as f64);
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let expected = match self.coefficients() {
            Some((each, per_byte)) => each * pieces + per_byte * bytes,
            None => took,
        };
        let scale = expected.max(took / SURPRISE);
        sums.add(pieces / scale, bytes / scale, took / scale);
        let (each, per_byte) = sums.solve();
        self.each_ns.store(each.to_bits(), Ordering::Relaxed);
        self.per_byte_ns.store(per_byte.to_bits(), Ordering::Relaxed);
        self.is_trained.store(true, Ordering::Relaxed);
    }

    /// Returns how long a piece of work of this length takes, in nanoseconds. Returns `None` before
    /// the first training. Takes no lock.
    pub(crate) fn predict_ns(&self, bytes: u64) -> Option<u64> {
        let (each, per_byte) = self.coefficients()?;
        Some((each + bytes as f64 * per_byte) as u64) // saturates
    }

    fn coefficients(&self) -> Option<(f64, f64)> {
        let number = |bits: &AtomicU64| f64::from_bits(bits.load(Ordering::Relaxed));
        self.is_trained
            .load(Ordering::Relaxed)
            .then(|| (number(&self.each_ns), number(&self.per_byte_ns)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::TimeModel;

    fn trained(observations: impl IntoIterator<Item = (u64, u64, u64)>) -> TimeModel {
        let model = TimeModel::default();
        observations.into_iter().for_each(|(n, bytes, ns)| model.train(n, bytes, ns));
        model
    }

    #[track_caller]
    fn assert_near(model: &TimeModel, bytes: u64, expected_ns: u64) {
        let ns = model.predict_ns(bytes).unwrap();
        assert!(ns.abs_diff(expected_ns) <= expected_ns / 100 + 1, "{bytes} bytes: {ns} ns");
    }

    #[test]
    fn both_coefficients_are_found() {
        // Batches of one to four pieces: 10 us each, and 1 ns for 4 bytes.
        let model = trained((1..40u64).map(|i| {
            let (pieces, bytes) = (1 + i % 4, i * i * 5000);
            (pieces, bytes, pieces * 10_000 + bytes / 4)
        }));
        assert_near(&model, 0, 10_000);
        assert_near(&model, 64 << 20, 10_000 + (16 << 20));
    }

    #[test]
    fn a_model_follows_a_change() {
        let work =
            |ns_per_byte: u64| (1..200u64).map(move |i| (1, i << 10, (i << 10) * ns_per_byte));
        let model = trained(work(1).chain(work(3)));
        assert_near(&model, 1 << 20, 3 << 20);
    }

    #[test]
    fn one_observation_is_scaled_by_its_bytes() {
        assert_near(&trained([(1, 1 << 20, 100_000)]), 64 << 20, 6_400_000);
        assert_near(&trained([(4, 0, 100_000)]), 1 << 20, 25_000);
        assert_eq!(trained([]).predict_ns(1), None);
        assert_eq!(trained([(0, 1, 1)]).predict_ns(1), None);
    }

    #[test]
    fn the_mean_of_equal_work_is_expected() {
        let model = trained([10_000, 1_000_000].into_iter().cycle().take(400).map(|ns| (1, 0, ns)));
        let ns = model.predict_ns(0).unwrap();
        assert!((400_000..600_000).contains(&ns), "{ns} ns");
    }

    #[test]
    fn bytes_are_forgotten() {
        let copies = std::iter::repeat_n((1, 1 << 20, 100_000), 50);
        let others = std::iter::repeat_n((1, 0, 20_000), 60_000);
        assert_near(&trained(copies.chain(others)), 0, 20_000);
    }

    proptest! {
        /// Longer work is never expected to end sooner, whatever was observed.
        #[test]
        fn predictions_never_fall(
            observations in prop::collection::vec(
                (0..5u64, prop_oneof![0..1000u64, any::<u64>()], any::<u64>()), 1..30),
            bytes in any::<[u64; 2]>(),
        ) {
            let model = trained(observations);
            let [less, more] = [bytes[0].min(bytes[1]), bytes[0].max(bytes[1])];
            prop_assert!(model.predict_ns(less) <= model.predict_ns(more));
        }
    }
}
