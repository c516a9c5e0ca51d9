// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line interface, which the script `tensorstream` of the Python package calls.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs a command, and returns its exit status. Blocks.
///
/// The first of `arguments` is the name of the program. `serve_device` is called with the options
/// of `serve device`, as the text of a JSON object, and returns the exit status.
#[pyfunction]
pub(crate) fn main(
    py: Python<'_>,
    arguments: Vec<OsString>,
    serve_device: Py<PyAny>,
) -> PyResult<u8> {
    let (mut signal, mut failure) = (None, None);
    let status = py.detach(|| {
        let mut interrupt = || {
            // Python raises the exception of a signal only once, but the command may call this
            // function again, so the exception is kept. Later calls still check for signals, so
            // that their handlers run.
            let new = Python::attach(|py| py.check_signals().err());
            signal = signal.take().or(new);
            signal.is_some()
        };
        let mut serve = |options: &str| {
            let served = Python::attach(|py| serve_device.call1(py, (options,))?.extract(py));
            served.unwrap_or_else(|error| {
                failure = Some(error);
                1
            })
        };
        tensorstream::cli::run_with(arguments, &mut interrupt, Some(&mut serve))
    });
    failure.map_or(Ok(status), Err)
}
