// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Expected`: an announcement of routed units.

use parking_lot::Mutex;
use pyo3::prelude::*;
use tensorstream::orchestrator::Expectation;
use tensorstream::streams::AnyDevice;

/// An announcement of routed units. Ends when it is closed or dropped.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Expected {
    expectation: Mutex<Option<Expectation<AnyDevice>>>,
}

impl Expected {
    pub(super) fn new(expectation: Expectation<AnyDevice>) -> Self {
        Self { expectation: Mutex::new(Some(expectation)) }
    }
}

#[pymethods]
impl Expected {
    /// Ends the announcement.
    fn close(&self, py: Python<'_>) {
        let expectation = self.expectation.lock().take();
        py.detach(|| drop(expectation));
    }
}
