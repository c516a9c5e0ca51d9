// SPDX-License-Identifier: MIT OR Apache-2.0
//! The server: accepts clients and runs their operators with PyTorch.

mod arguments;
#[cfg(unix)]
mod dispatcher;
mod executor;
mod failures;
mod hooks;
mod leases;
mod listener;
mod outputs;
mod sandbox;
mod schedule;
mod settings;
mod storages;
mod streamed;
mod transfers;

use pyo3::prelude::*;

pub(super) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<listener::RemoteServer>()?;
    m.add_class::<streamed::StreamedTensor>()?;
    m.add_class::<streamed::StreamedTensors>()?;
    #[cfg(unix)]
    {
        m.add_class::<dispatcher::Dispatcher>()?;
        m.add_class::<dispatcher::Handoff>()?;
    }
    m.add_function(wrap_pyfunction!(sandbox::sandbox, m)?)?;
    m.add_function(wrap_pyfunction!(schedule::set_share, m)?)?;
    Ok(())
}
