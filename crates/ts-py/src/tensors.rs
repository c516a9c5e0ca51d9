// SPDX-License-Identifier: MIT OR Apache-2.0
//! The Python classes of tensors, their buffers and metadata, pools and GPUs.

mod buffer;
mod gpu_status;
mod import;
mod meta;
mod pool_config;
mod tensor;

use pyo3::prelude::*;

pub(crate) use pool_config::PyPoolConfig;
pub(crate) use tensor::PyTensor;

pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<gpu_status::PyGpuStatus>()?;
    m.add_class::<PyPoolConfig>()?;
    m.add_class::<PyTensor>()?;
    m.add_class::<buffer::PyTensorBuffer>()?;
    m.add_class::<meta::PyTensorMeta>()?;
    Ok(())
}
