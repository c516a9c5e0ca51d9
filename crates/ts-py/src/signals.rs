// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocking calls that signals can interrupt.

use pyo3::prelude::*;
use tensorstream::Error;

use crate::errors::to_python;

/// Runs a blocking call with the GIL released.
///
/// `call` receives a function that checks for signals. This function returns true once a signal
/// handler has raised an exception, and `call` should then return.
///
/// # Errors
/// Returns the exception of the signal handler, even if `call` succeeded. Without an exception,
/// returns the error of `call`.
pub(crate) fn interruptible<T: Send, E: Into<Error> + Send>(
    py: Python<'_>,
    call: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, E> + Send,
) -> PyResult<T> {
    let mut signal = None;
    let result = py.detach(|| {
        call(&mut || {
            signal = signal.take().or_else(|| Python::attach(|py| py.check_signals().err()));
            signal.is_some()
        })
    });
    match (result, signal) {
        // Python raises the exception of a signal only once, so it must not be lost.
        (_, Some(signal)) => Err(signal),
        (result, None) => result.map_err(|error| to_python(py, &error.into())),
    }
}
