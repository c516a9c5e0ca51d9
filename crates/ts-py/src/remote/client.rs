// SPDX-License-Identifier: MIT OR Apache-2.0
//! The client: machines, storages on them, and the kernels of the device `ts`.

mod kernel;
mod machine;
mod scalars;
pub(crate) mod torch;
mod way;

use pyo3::prelude::*;

pub(super) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<kernel::Kernel>()?;
    m.add_class::<machine::Machine>()?;
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
