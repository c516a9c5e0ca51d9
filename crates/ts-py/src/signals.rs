// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocking calls that signals interrupt.

use pyo3::prelude::*;
use tensorstream::Error;

use crate::errors::to_python;

/// Runs a blocking call with the GIL released.
///
/// The call gets a function that checks for signals. It returns true once the handler of a signal
/// has raised an exception; the call should then return. The exception is raised, even if the call
/// succeeded.
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
        // Python reports a signal only once, so it must not be lost.
        (_, Some(signal)) => Err(signal),
        (result, None) => result.map_err(|error| to_python(py, &error.into())),
    }
}
