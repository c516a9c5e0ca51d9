// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream._native`, the extension module of the Python package.
//!
//! It is thin: it converts arguments, calls the facade with the GIL released, and converts results
//! and errors.

// PyO3 extracts arguments as owned values.
#![allow(clippy::needless_pass_by_value)]

mod cli;
mod dlpack;
mod dtype;
mod errors;
mod files;
mod memory;
mod remote;
mod signals;
mod streaming;
mod tensors;
mod wire;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorstream::{available_bytes, parse_bytes as parse};

/// Parses a size such as "600MiB". Returns bytes.
///
/// Raises:
///     ValueError: The text is not a size.
#[pyfunction]
fn parse_bytes(text: &str) -> PyResult<u64> {
    parse(text).map_err(|e| PyValueError::new_err(e.to_string()))
}

/// Returns the memory that is still available within the limits of the system and of the memory
/// cgroup, in bytes; None if unknown.
#[pyfunction]
fn available_memory() -> Option<u64> {
    available_bytes()
}

/// Returns the names of the I/O backends. The preferred one is first.
#[pyfunction]
fn backends() -> Vec<&'static str> {
    tensorstream::io::Registry::builtin().names()
}

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<dtype::PyDtype>()?;
    m.add_function(wrap_pyfunction!(parse_bytes, m)?)?;
    m.add_function(wrap_pyfunction!(available_memory, m)?)?;
    m.add_function(wrap_pyfunction!(backends, m)?)?;
    m.add_function(wrap_pyfunction!(cli::main, m)?)?;
    tensors::register(m)?;
    streaming::register(m)?;
    files::register(m)?;
    wire::register(m)?;
    remote::register(m)?;
    m.add("DTYPES", dtype::rows())?;
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
