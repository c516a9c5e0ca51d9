// SPDX-License-Identifier: MIT OR Apache-2.0
//! The client: sessions, devices and their tensors, and the kernels of the device `ts`.

mod addresses;
mod arguments;
mod call_site;
mod connector;
mod creation;
mod devices;
mod forks;
mod kernel;
mod machine;
mod peer;
mod plan;
mod replies;
mod scalar_prefetch;
mod session;
mod storage;
mod torch;
mod transfer;

use pyo3::prelude::*;

pub(super) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<kernel::Kernel>()?;
    m.add_class::<machine::PySession>()?;
    m.add_class::<peer::PeerSession>()?;
    m.add_function(wrap_pyfunction!(torch::remote_setup, m)?)?;
    m.add_function(wrap_pyfunction!(forks::remote_forked, m)?)?;
    m.add_function(wrap_pyfunction!(creation::remote_create_with, m)?)?;
    m.add_function(wrap_pyfunction!(plan::remote_cache_stats, m)?)?;
    m.add_function(wrap_pyfunction!(storage::remote_empty, m)?)?;
    m.add_function(wrap_pyfunction!(storage::remote_whole, m)?)?;
    m.add_function(wrap_pyfunction!(storage::remote_names, m)?)?;
    m.add_function(wrap_pyfunction!(call_site::remote_trace, m)?)?;
    m.add_function(wrap_pyfunction!(transfer::remote_scalar, m)?)?;
    m.add_function(wrap_pyfunction!(transfer::remote_upload, m)?)?;
    m.add_function(wrap_pyfunction!(transfer::remote_download, m)?)?;
    Ok(())
}
