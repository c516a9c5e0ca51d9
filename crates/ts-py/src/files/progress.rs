// SPDX-License-Identifier: MIT OR Apache-2.0
//! Progress bars for long operations.

use parking_lot::Mutex;
use pyo3::prelude::*;
use tensorstream::{Bar, Error, Progress as Amount, Watch};

use crate::signals::interruptible;

/// A progress bar on standard error. Shows nothing if standard error is not a terminal.
///
/// Args:
///     label: The text before the bar.
///     total_bytes: The number of bytes at which the bar is full.
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

    /// Adds to the number of bytes that are done, and updates the bar.
    fn advance(&self, bytes: u64) {
        let (bar, amount) = &mut *self.bar.lock();
        amount.done += bytes;
        if let Some(bar) = bar {
            bar.show(*amount);
        }
    }

    /// Removes the bar from the terminal. Does nothing if it is already removed.
    fn close(&self) {
        self.bar.lock().0 = None;
    }
}

/// The value that an operation passes to [`Watch`] to check for interruption without reporting
/// progress.
pub(super) const NO_PROGRESS: Amount = Amount { done: 0, total: 0 };

/// Runs a long operation with the GIL released. Shows a progress bar if there is a label.
///
/// # Errors
/// Returns the error of the operation. If a signal handler raises an exception, the operation ends
/// early, and the exception is returned instead.
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
