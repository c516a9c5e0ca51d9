// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `TensorCreditTracker`.

use pyo3::prelude::*;
use tensorstream::remote::TensorCreditTracker;

/// A counter of byte credits, for programs with a protocol of their own. Any thread can use it. A
/// ``Connection`` limits what is in flight by itself.
///
/// Args:
///     initial: The most bytes in flight. By default 256 KiB.
///     high_water: ``should_pause`` becomes true at this many bytes in flight. By default three
///         quarters of ``initial``.
///     low_water: ``should_pause`` becomes false again at this many. By default the half of
///         ``initial``.
///
/// Examples:
///     >>> from tensorstream.streams import TensorCreditTracker
///     >>> credit = TensorCreditTracker()
///     >>> credit.try_consume(200 << 10), credit.try_consume(100 << 10)
///     (True, False)
///     >>> credit.grant(100 << 10)
///     >>> credit.in_flight
///     102400
#[pyclass(frozen, module = "tensorstream.streams", name = "TensorCreditTracker")]
pub(crate) struct PyCreditTracker(TensorCreditTracker);

#[pymethods]
impl PyCreditTracker {
    #[new]
    #[pyo3(signature = (initial=262_144, high_water=None, low_water=None))]
    fn new(initial: u64, high_water: Option<u64>, low_water: Option<u64>) -> Self {
        let high_water = high_water.unwrap_or(initial / 4 * 3);
        Self(TensorCreditTracker::new(initial, high_water, low_water.unwrap_or(initial / 2)))
    }

    /// Takes credit for some bytes, or returns False if less is available.
    fn try_consume(&self, nbytes: u64) -> bool {
        self.0.try_consume(nbytes)
    }

    /// Takes as much of some bytes as is available, and returns how much that is.
    fn consume_up_to(&self, nbytes: u64) -> u64 {
        self.0.consume_up_to(nbytes)
    }

    /// Gives credit back for bytes that the receiver has processed.
    fn grant(&self, nbytes: u64) {
        self.0.grant(nbytes);
    }

    /// Returns whether a sender should wait, to go on only when enough credit was given back.
    fn should_pause(&self) -> bool {
        self.0.should_pause()
    }

    /// The available credit in bytes.
    #[getter]
    fn available(&self) -> u64 {
        self.0.available()
    }

    /// The bytes in flight.
    #[getter]
    fn in_flight(&self) -> u64 {
        self.0.in_flight()
    }
}
