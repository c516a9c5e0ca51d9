// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors that are elsewhere, for PyTorch: machines, the kernels of their device, and the server
//! that runs them.

mod dispatcher;
mod executor;
mod kernel;
mod machine;
mod sandbox;
mod scalars;
mod server;
mod torch;
mod way;

use pyo3::prelude::*;

pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<kernel::Kernel>()?;
    m.add_class::<machine::Machine>()?;
    m.add_class::<server::RemoteServer>()?;
    m.add_class::<dispatcher::Dispatcher>()?;
    m.add_class::<dispatcher::Handoff>()?;
    m.add_function(wrap_pyfunction!(sandbox::sandbox, m)?)?;
    m.add_function(wrap_pyfunction!(torch::remote_setup, m)?)?;
    m.add_function(wrap_pyfunction!(torch::remote_forked, m)?)?;
    m.add_function(wrap_pyfunction!(kernel::remote_cache_stats, m)?)?;
    m.add_function(wrap_pyfunction!(machine::remote_empty, m)?)?;
    m.add_function(wrap_pyfunction!(machine::remote_whole, m)?)?;
    m.add_function(wrap_pyfunction!(machine::remote_names, m)?)?;
    m.add_function(wrap_pyfunction!(machine::remote_trace, m)?)?;
    m.add_function(wrap_pyfunction!(machine::remote_scalar, m)?)?;
    m.add_function(wrap_pyfunction!(machine::remote_upload, m)?)?;
    m.add_function(wrap_pyfunction!(machine::remote_download, m)?)?;
    Ok(())
}
