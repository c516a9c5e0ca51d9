// SPDX-License-Identifier: MIT OR Apache-2.0
//! A model of how long work takes, trained by work that has run.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// How much an observation counts after each further one: half after 14.
const DECAY: f64 = 0.95;
/// Below this share of their product, the sums of squares do not tell pieces and bytes apart.
const DEGENERATE: f64 = 1e-9;

/// A linear model: a piece of work of `n` bytes takes `each + n * per_byte` nanoseconds.
///
/// The two coefficients are those that are not negative and make the sum of the squared relative
/// errors least (weighted least squares, by the normal equations). Each observation counts
/// [`DECAY`] times as much as the next one.
#[derive(Debug, Default)]
pub(crate) struct TimeModel {
    sums: Mutex<Sums>,
    /// The coefficients, as the bits of `f64`s, for readers that take no lock.
    each_ns: AtomicU64,
    per_byte_ns: AtomicU64,
    is_trained: AtomicBool,
}

/// The sums of the normal equations. With `x` the pieces and `y` the bytes of an observation, both
/// divided by its time.
#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
    yy: f64,
}

impl Sums {
    /// Returns the coefficients for pieces and bytes.
    fn solve(self) -> (f64, f64) {
        let Self { x, y, xx, xy, yy } = self;
        let by_pieces = || (if xx > 0.0 { x / xx } else { 0.0 }, 0.0);
        let by_bytes = || (0.0, if yy > 0.0 { y / yy } else { 0.0 });
        let determinant = xx * yy - xy * xy;
        if determinant <= DEGENERATE * xx * yy {
            return if yy > 0.0 { by_bytes() } else { by_pieces() };
        }
        match ((x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant) {
            (each, _) if each < 0.0 => by_bytes(),
            (_, per_byte) if per_byte < 0.0 => by_pieces(),
            both => both,
        }
    }
}

impl TimeModel {
    /// Trains the model with pieces of work that took this long together.
    pub(crate) fn train(&self, pieces: u64, bytes: u64, took_ns: u64) {
        if pieces == 0 {
            return;
        }
        let took = took_ns.max(1) as f64;
        let (x, y) = (pieces as f64 / took, bytes as f64 / took);
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        *sums = Sums {
            x: sums.x * DECAY + x,
            y: sums.y * DECAY + y,
            xx: sums.xx * DECAY + x * x,
            xy: sums.xy * DECAY + x * y,
            yy: sums.yy * DECAY + y * y,
        };
        let (each, per_byte) = sums.solve();
        self.each_ns.store(each.to_bits(), Ordering::Relaxed);
        self.per_byte_ns.store(per_byte.to_bits(), Ordering::Relaxed);
        self.is_trained.store(true, Ordering::Relaxed);
    }

    /// Returns how long a piece of work of this length takes, in nanoseconds. Returns `None` before
    /// the first training.
    pub(crate) fn predict_ns(&self, bytes: u64) -> Option<u64> {
        let coefficient = |bits: &AtomicU64| f64::from_bits(bits.load(Ordering::Relaxed));
        self.is_trained.load(Ordering::Relaxed).then(|| {
            let ns = coefficient(&self.each_ns) + bytes as f64 * coefficient(&self.per_byte_ns);
            ns as u64 // saturates
        })
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
