// SPDX-License-Identifier: MIT OR Apache-2.0
//! The Python classes of devices, streams and the memory pools that are ordered by them.

mod coordinator;
mod device;
mod energy;
mod memory;
mod operand;
mod pool;
mod profiler;
mod stream;

use std::thread;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use tensorstream::streams::Error;

use crate::errors::device_error;

pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<device::PyDevice>()?;
    m.add_class::<stream::PyStream>()?;
    m.add_class::<stream::PyEvent>()?;
    m.add_class::<pool::PyStreamPool>()?;
    m.add_class::<coordinator::PyCoordinator>()?;
    m.add_class::<coordinator::PyExecution>()?;
    m.add_class::<profiler::PyProfiler>()?;
    m.add_class::<profiler::PyScope>()?;
    m.add_class::<energy::PyEnergyMeter>()?;
    m.add_class::<operand::PyDeviceBuffer>()?;
    m.add_class::<memory::PyPinnedMemoryPool>()?;
    m.add_class::<memory::PyGpuMemoryPool>()?;
    m.add_class::<memory::PyStreamOrderedAllocator>()?;
    Ok(())
}

/// Returns the value with this name.
///
/// # Errors
/// ValueError, with all names, if there is none.
fn named<T: Copy>(what: &str, name: &str, values: &[(&str, T)]) -> PyResult<T> {
    let found = values.iter().find(|(known, _)| *known == name);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
        PyValueError::new_err(format!("invalid {what} {name:?}: expected one of {known:?}"))
    })
}

/// The longest time between two checks for signals and for the end of a wait.
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// Waits with the GIL released until `is_done` returns true, and handles signals meanwhile.
///
/// # Errors
/// TimeoutError after `timeout` seconds, the error of `is_done`, or the exception of a signal
/// handler.
fn wait(
    py: Python<'_>,
    timeout: Option<f64>,
    mut is_done: impl FnMut() -> Result<bool, Error> + Send,
) -> PyResult<()> {
    let began = Instant::now();
    let limit = timeout.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)));
    let limit = limit.and_then(Result::ok);
    let mut sleep = Duration::from_micros(10);
    loop {
        // Most waits are shorter than a change of threads.
        let done = py.detach(|| {
            let mut done = is_done()?;
            if !done && limit != Some(Duration::ZERO) {
                thread::sleep(sleep);
                done = is_done()?;
            }
            Ok(done)
        });
        if done.map_err(|error| device_error(py, &error))? {
            return Ok(());
        }
        if let Some(limit) = limit.filter(|limit| began.elapsed() >= *limit) {
            let what = format!("work is still pending after {} s", limit.as_secs_f64());
            return Err(PyTimeoutError::new_err(what));
        }
        py.check_signals()?;
        sleep = (sleep * 2).min(LONGEST_SLEEP);
    }
}
