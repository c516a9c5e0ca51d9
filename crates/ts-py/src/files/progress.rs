// SPDX-License-Identifier: MIT OR Apache-2.0
//! Progress bars and interruption of long jobs.

use parking_lot::Mutex;
use pyo3::prelude::*;
use tensorstream::{Bar, Error, Progress as Done, Watch};

use crate::errors::to_python;

/// A progress bar on standard error; nothing where that is no terminal.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Progress {
    bar: Mutex<(Option<Bar>, Done)>,
}

#[pymethods]
impl Progress {
    #[new]
    fn new(label: String, total_bytes: u64) -> Self {
        Self { bar: Mutex::new((Some(Bar::new(label)), Done { done: 0, total: total_bytes })) }
    }

    /// Adds to what is done.
    pub(crate) fn advance(&self, bytes: u64) {
        let (bar, done) = &mut *self.bar.lock();
        done.done += bytes;
        if let Some(bar) = bar {
            bar.show(*done);
        }
    }

    /// Takes the bar away. Does nothing the second time.
    fn close(&self) {
        self.bar.lock().0 = None;
    }
}

pub(super) const NOTHING: Done = Done { done: 0, total: 0 };

/// Runs a long job with the interpreter let go, under a bar if it has a label; a signal's exception
/// ends it and is raised.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    label: Option<&str>,
    job: impl FnOnce(&mut Watch<'_>) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let mut signal = None;
    let result = py.detach(|| {
        let bar = label.map(Bar::new);
        job(&mut |progress| {
            if let Some(bar) = &bar {
                bar.show(progress);
            }
            signal = signal.take().or_else(|| Python::attach(|py| py.check_signals().err()));
            signal.is_some()
        })
    });
    match (result, signal) {
        // A signal is reported once: one that was seen must not be lost, also where the job was
        // done by then.
        (_, Some(signal)) => Err(signal),
        (result, None) => result.map_err(|error| to_python(py, &error)),
    }
}
