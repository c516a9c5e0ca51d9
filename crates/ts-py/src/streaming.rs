// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams the weights of a model: plans, the engine, and weights as PyTorch tensors.
//!
//! The state of uses and passes changes only in native code, in steps that run no Python bytecode.
//! So an exception of a signal handler arrives before or after a step, never during one. Dropping a
//! [`Use`](lease::Use) or a [`Pass`](pass::Pass) ends it.

mod calls;
mod engine;
mod expected;
mod lease;
mod outermost_call;
mod pass;
mod passes;
mod planning;
mod shared;
mod sharing;
mod stats;
mod streamer;
mod thread_passes;
mod torch;
mod tree;
mod unit_tensors;
mod uses;
mod weight;
mod weight_ref;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorstream::orchestrator;
use tensorstream::streams::AnyDevice;

type Engine = orchestrator::Engine<AnyDevice>;
type Lease = orchestrator::Lease<AnyDevice>;
type TensorBytes = orchestrator::TensorBytes<AnyDevice>;

pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<shared::Streamer>()?;
    m.add_class::<lease::Use>()?;
    m.add_class::<calls::ModuleCalls>()?;
    m.add_class::<weight_ref::WeightRef>()?;
    m.add_class::<pass::Pass>()?;
    m.add_class::<expected::Expected>()?;
    m.add_class::<planning::Preview>()?;
    m.add_function(wrap_pyfunction!(planning::plan, m)?)?;
    m.add_function(wrap_pyfunction!(planning::requirement, m)?)?;
    m.add_function(wrap_pyfunction!(planning::smallest_budget, m)?)?;
    m.add_function(wrap_pyfunction!(sharing::leave_shared, m)?)?;
    m.add_function(wrap_pyfunction!(tree::modules, m)?)?;
    m.add_function(wrap_pyfunction!(tree::named_modules, m)?)?;
    m.add_function(wrap_pyfunction!(tree::named_tensors, m)?)?;
    m.add_function(wrap_pyfunction!(sharing::shared_directory, m)?)?;
    m.add_function(wrap_pyfunction!(sharing::shared_bytes, m)?)?;
    // There are no forks on Windows.
    if let Ok(register) = m.py().import("os")?.getattr("register_at_fork") {
        let arguments = PyDict::new(m.py());
        arguments
            .set_item("after_in_child", wrap_pyfunction!(shared::streaming_forked, m.py())?)?;
        register.call((), Some(&arguments))?;
    }
    Ok(())
}
