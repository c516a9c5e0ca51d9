// SPDX-License-Identifier: MIT OR Apache-2.0
//! Progress bars for long operations.

use parking_lot::Mutex;
use pyo3::prelude::*;
use tensorstream::{Bar, Error, Progress as Amount, Watch};

use crate::signals::interruptible;

/// A progress bar on standard error. Shows nothing if standard error is not a terminal.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Progress {
    bar: Mutex<(Option<Bar>, Amount)>,
}

#[pymethods]
impl Progress {
    #[new]
    fn new(label: String, total_bytes: u64) -> Self {
        Self { bar: Mutex::new((Some(Bar::new(label)), Amount { done: 0, total: total_bytes })) }
    }

    /// Adds bytes to the bytes done so far.
    fn advance(&self, bytes: u64) {
        let (bar, amount) = &mut *self.bar.lock();
        amount.done += bytes;
        if let Some(bar) = bar {
            bar.show(*amount);
        }
    }

    /// Removes the bar. Does nothing if it is already removed.
    fn close(&self) {
        self.bar.lock().0 = None;
    }
}

/// The progress of operations that only check for interruption.
pub(super) const NO_PROGRESS: Amount = Amount { done: 0, total: 0 };

/// Runs a long operation with the GIL released, with a progress bar if it has a label.
///
/// A signal whose handler raises an exception ends the operation, and the exception is raised.
pub(super) fn watched<T: Send>(
    py: Python<'_>,
    label: Option<&str>,
    job: impl FnOnce(&mut Watch<'_>) -> Result<T, Error> + Send,
) -> PyResult<T> {
    interruptible(py, |interrupted| {
        let bar = label.map(Bar::new);
        job(&mut |progress| {
            if let Some(bar) = &bar {
                bar.show(progress);
            }
            interrupted()
        })
    })
}
