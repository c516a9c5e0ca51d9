// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream._native`: what the Python package is made of. Thin: arguments in, calls to the
//! facade with the interpreter let go, results and errors out.

// Arguments are extracted from Python objects, and so owned.
#![allow(clippy::needless_pass_by_value)]

mod dlpack;
mod dtype;
mod errors;
mod files;
mod memory;
mod remote;
mod streaming;
mod tensor;
mod wire;

use pyo3::prelude::*;
use tensorstream::{available_bytes, parse_bytes as parse};

/// Reads a size such as "600MiB". ValueError when it is none.
#[pyfunction]
fn parse_bytes(text: &str) -> PyResult<u64> {
    parse(text).map_err(|e| pyo3::exceptions::PyValueError::new_err(e.to_string()))
}

/// Memory that could still be taken, in bytes, within the system and the memory cgroup; None if
/// unknown.
#[pyfunction]
fn available_memory() -> Option<u64> {
    available_bytes()
}

/// Names of the I/O backends, the one preferred first.
#[pyfunction]
fn backends() -> Vec<&'static str> {
    tensorstream::io::Registry::builtin().names()
}

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<dtype::PyDtype>()?;
    m.add_class::<tensor::PyGpuStatus>()?;
    m.add_class::<tensor::PyPoolConfig>()?;
    m.add_class::<tensor::PyTensor>()?;
    m.add_class::<tensor::PyTensorBuffer>()?;
    m.add_class::<tensor::PyTensorMeta>()?;
    m.add_function(wrap_pyfunction!(parse_bytes, m)?)?;
    m.add_function(wrap_pyfunction!(available_memory, m)?)?;
    m.add_function(wrap_pyfunction!(backends, m)?)?;
    streaming::register(m)?;
    files::register(m)?;
    wire::register(m)?;
    remote::register(m)?;
    m.add("DTYPES", dtype::rows())?;
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
