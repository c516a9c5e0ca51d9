// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream._native`: what the Python package is made of. Thin: arguments in, calls to the facade with the
//! interpreter let go, results and errors out.

mod checkpoint;
mod dlpack;
mod engine;
mod errors;

use pyo3::prelude::*;
use tensorstream::{available_bytes, parse_bytes as parse};

/// Reads a size such as "600MiB". ValueError when it is none.
#[pyfunction]
fn parse_bytes(text: &str) -> PyResult<u64> {
    parse(text).map_err(|e| pyo3::exceptions::PyValueError::new_err(e.to_string()))
}

/// Memory that could still be taken, in bytes, within the system and the memory cgroup; None if unknown.
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
    m.add_class::<checkpoint::Checkpoint>()?;
    m.add_class::<engine::Engine>()?;
    m.add_class::<engine::Pass>()?;
    m.add_class::<engine::Lease>()?;
    m.add_function(wrap_pyfunction!(parse_bytes, m)?)?;
    m.add_function(wrap_pyfunction!(available_memory, m)?)?;
    m.add_function(wrap_pyfunction!(backends, m)?)?;
    m.add_function(wrap_pyfunction!(engine::plan, m)?)?;
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
