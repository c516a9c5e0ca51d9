// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream._native`, the extension module of the Python package.
//!
//! It converts arguments, calls the crate `tensorstream`, and converts results and errors. Most
//! blocking calls release the GIL.

// PyO3 extracts arguments as owned values.
#![allow(clippy::needless_pass_by_value)]

mod accelerator;
mod cli;
mod dlpack;
mod dtype;
mod errors;
mod files;
mod heap;
mod made;
mod memory;
#[cfg(target_os = "linux")]
mod openmp;
mod remote;
mod signals;
mod streaming;
mod streams;
mod tensors;
mod wire;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorstream::{available_bytes, parse_bytes as parse};

/// Returns the number of bytes that a size such as "600MiB" stands for.
///
/// Raises:
///     ValueError: The text is not a size.
#[pyfunction]
fn parse_bytes(text: &str) -> PyResult<u64> {
    parse(text).map_err(|e| PyValueError::new_err(e.to_string()))
}

/// Returns the memory that this process can still allocate without swapping, in bytes.
///
/// That is the available memory of the system, or less if a memory cgroup limits the process.
/// Returns None if the available memory cannot be detected. Returns memory of deleted tensors to
/// the system first.
#[pyfunction]
fn available_memory() -> Option<u64> {
    tensorstream::trim();
    available_bytes()
}

/// Returns the names of the I/O backends in this build. The preferred one is first.
///
/// Examples:
///     >>> import tensorstream as ts
///     >>> next(iter(ts.backends()))
///     'adaptive'
#[pyfunction]
fn backends() -> Vec<&'static str> {
    tensorstream::io::Registry::builtin().names()
}

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<accelerator::Accelerator>()?;
    m.add_class::<dtype::PyDtype>()?;
    m.add_function(wrap_pyfunction!(parse_bytes, m)?)?;
    m.add_function(wrap_pyfunction!(available_memory, m)?)?;
    m.add_function(wrap_pyfunction!(backends, m)?)?;
    m.add_function(wrap_pyfunction!(cli::main, m)?)?;
    m.add_function(wrap_pyfunction!(made::note_made, m)?)?;
    tensors::register(m)?;
    streaming::register(m)?;
    streams::register(m)?;
    files::register(m)?;
    wire::register(m)?;
    remote::register(m)?;
    m.add("DTYPES", dtype::rows())?;
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
