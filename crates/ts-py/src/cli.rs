// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line interface, which the script `tensorstream` of the Python package calls.

use pyo3::prelude::*;

/// Runs a command, and returns its exit status. Blocks.
///
/// The first of `arguments` is the name of the program.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, arguments: Vec<String>) -> PyResult<u8> {
    let mut signal = None;
    let status = py.detach(|| {
        tensorstream::cli::run(arguments, &mut || {
            // Python raises the exception of a signal only once, but the command may call this
            // function again, so the exception is kept. Later calls still check for signals, so
            // that their handlers run.
            let new = Python::attach(|py| py.check_signals().err());
            signal = signal.take().or(new);
            signal.is_some()
        })
    });
    Ok(status)
}
