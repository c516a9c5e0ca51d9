// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream._native`: what the Python package is made of. Thin: arguments in, calls to the
//! facade with the interpreter let go, results and errors out.

// Arguments are extracted from Python objects, and so owned.
#![allow(clippy::needless_pass_by_value)]

mod checkpoint;
mod dlpack;
mod engine;
mod errors;
mod files;
mod memory;
mod remote;
mod streamer;
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

/// The smallest budget under which units of these sizes can run, in bytes, where sets of them are
/// needed together.
#[pyfunction]
fn smallest_budget(sizes: Vec<usize>, together: Vec<Vec<u32>>, max_passes: usize) -> usize {
    let demand = |&slot_bytes: &usize| tensorstream::orchestrator::UnitDemand {
        name: String::new(),
        slot_bytes,
        read_bytes: slot_bytes as u64,
        compute_s: 0.0,
    };
    let units: Vec<_> = sizes.iter().map(demand).collect();
    let ids = |set: Vec<u32>| set.into_iter().map(tensorstream::orchestrator::UnitId).collect();
    let together: Vec<_> = together.into_iter().map(ids).collect();
    tensorstream::orchestrator::smallest_budget(&units, &together, max_passes)
}

/// Names of the I/O backends, the one preferred first.
#[pyfunction]
fn backends() -> Vec<&'static str> {
    tensorstream::io::Registry::builtin().names()
}

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<checkpoint::Checkpoint>()?;
    m.add_class::<streamer::Streamer>()?;
    m.add_class::<streamer::Pass>()?;
    m.add_class::<streamer::Recurrent>()?;
    m.add_class::<streamer::Use>()?;
    m.add_class::<files::FileWriter>()?;
    m.add_class::<files::Fingerprint>()?;
    m.add_class::<files::Progress>()?;
    m.add_class::<tensor::PyDtype>()?;
    m.add_class::<tensor::PyGpuStatus>()?;
    m.add_class::<tensor::PyPoolConfig>()?;
    m.add_class::<tensor::PyTensor>()?;
    m.add_class::<tensor::PyTensorBuffer>()?;
    m.add_class::<tensor::PyTensorMeta>()?;
    m.add_class::<wire::PyConnection>()?;
    m.add_class::<wire::PyListener>()?;
    m.add_function(wrap_pyfunction!(wire::connect, m)?)?;
    m.add_function(wrap_pyfunction!(wire::listen, m)?)?;
    m.add_function(wrap_pyfunction!(files::compact, m)?)?;
    m.add_function(wrap_pyfunction!(files::convert, m)?)?;
    m.add_function(wrap_pyfunction!(files::main, m)?)?;
    m.add_function(wrap_pyfunction!(parse_bytes, m)?)?;
    m.add_function(wrap_pyfunction!(available_memory, m)?)?;
    m.add_function(wrap_pyfunction!(backends, m)?)?;
    m.add_function(wrap_pyfunction!(smallest_budget, m)?)?;
    m.add_function(wrap_pyfunction!(engine::plan, m)?)?;
    m.add_function(wrap_pyfunction!(engine::requirement, m)?)?;
    remote::register(m)?;
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
