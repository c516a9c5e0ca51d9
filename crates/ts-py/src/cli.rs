// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line, for the script `tensorstream` of the Python package.

use pyo3::prelude::*;

/// Runs the command line. Returns the exit status.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, arguments: Vec<String>) -> PyResult<u8> {
    let mut signal = None;
    let status = py.detach(|| {
        tensorstream::cli::run(arguments, &mut || {
            // Python reports a signal only once, but the command may ask again, so the answer is
            // kept. Signals are checked again nevertheless, so that their handlers run.
            let new = Python::attach(|py| py.check_signals().err());
            signal = signal.take().or(new);
            signal.is_some()
        })
    });
    Ok(status)
}
