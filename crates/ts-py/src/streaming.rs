// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streaming of a model's weights: plans, the engine, and weights as PyTorch sees them.

mod engine;
mod streamer;
mod weights;

use pyo3::prelude::*;

pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<streamer::Streamer>()?;
    m.add_class::<streamer::Pass>()?;
    m.add_class::<streamer::Recurrent>()?;
    m.add_class::<streamer::Use>()?;
    m.add_function(wrap_pyfunction!(engine::plan, m)?)?;
    m.add_function(wrap_pyfunction!(engine::requirement, m)?)?;
    m.add_function(wrap_pyfunction!(engine::smallest_budget, m)?)?;
    Ok(())
}
