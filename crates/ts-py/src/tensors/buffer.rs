// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `TensorBuffer`.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorstream::pool::TensorBuffer;

use crate::errors::{pool_error, warn_fallback};

/// Bytes on the host or on a GPU. All copies are explicit and block.
///
/// Examples:
///     >>> import tensorstream as ts
///     >>> buffer = ts.TensorBuffer.cpu_zeros(3)
///     >>> buffer.copy_from(b"abc")
///     >>> buffer.to_host()
///     b'abc'
#[pyclass(module = "tensorstream", name = "TensorBuffer")]
pub(crate) struct PyTensorBuffer(pub(super) TensorBuffer);

#[pymethods]
impl PyTensorBuffer {
    /// Copies bytes to a new buffer on the host.
    #[staticmethod]
    fn cpu(data: Vec<u8>) -> Self {
        Self(TensorBuffer::cpu(data))
    }

    /// Copies bytes to a new buffer on the host. The same as ``cpu``.
    #[staticmethod]
    fn from_bytes(data: Vec<u8>) -> Self {
        Self::cpu(data)
    }

    /// Allocates a buffer of ``size`` zero bytes on the host.
    ///
    /// Raises:
    ///     OutOfMemoryError: There is too little memory.
    #[staticmethod]
    fn cpu_zeros(py: Python<'_>, size: usize) -> PyResult<Self> {
        TensorBuffer::try_cpu_zeros(size).map(Self).map_err(|error| pool_error(py, &error))
    }

    /// Allocates a buffer on a GPU. Its bytes are undefined.
    ///
    /// Args:
    ///     size: The size in bytes.
    ///     device_id: The number of the GPU.
    ///
    /// Raises:
    ///     DeviceUnavailableError: The GPU does not exist or cannot be used.
    ///     OutOfMemoryError: The GPU has too little memory.
    #[staticmethod]
    #[pyo3(signature = (size, device_id=0))]
    fn allocate_gpu(py: Python<'_>, size: usize, device_id: usize) -> PyResult<Self> {
        let allocated = py.detach(|| TensorBuffer::allocate_gpu(size, device_id));
        allocated.map(Self).map_err(|error| pool_error(py, &error))
    }

    /// Allocates a buffer on a GPU, or on the host if that fails.
    ///
    /// Args:
    ///     size: The size in bytes. The bytes are undefined on a GPU, and 0 on the host.
    ///     device_id: The number of the GPU.
    ///
    /// Warns:
    ///     NotBuiltWarning: The buffer is on the host. The logger ``tensorstream`` gets the
    ///         first such warning of the process, too.
    ///
    /// Raises:
    ///     OutOfMemoryError: The host has too little memory, too.
    #[staticmethod]
    #[pyo3(signature = (size, device_id=0))]
    pub(super) fn try_allocate_gpu(
        py: Python<'_>,
        size: usize,
        device_id: usize,
    ) -> PyResult<Self> {
        let failed = match py.detach(|| TensorBuffer::allocate_gpu(size, device_id)) {
            Ok(buffer) => return Ok(Self(buffer)),
            Err(error) => error,
        };
        let buffer = Self::cpu_zeros(py, size)?;
        let what = format!("using host memory instead of GPU {device_id}: {failed}");
        warn_fallback(py, &what)?;
        Ok(buffer)
    }

    /// The size in bytes.
    #[getter]
    fn size(&self) -> usize {
        self.0.len()
    }

    /// Whether the bytes are on the host.
    #[getter]
    fn is_cpu(&self) -> bool {
        self.0.is_cpu()
    }

    /// Whether the bytes are on a GPU.
    #[getter]
    fn is_gpu(&self) -> bool {
        self.0.is_gpu()
    }

    /// Copies the bytes to a new buffer on the host.
    ///
    /// Raises:
    ///     DeviceError: The copy from the GPU failed.
    fn to_cpu(&self, py: Python<'_>) -> PyResult<Self> {
        py.detach(|| self.0.to_cpu()).map(Self).map_err(|error| pool_error(py, &error))
    }

    /// Copies the bytes to a new buffer on a GPU.
    ///
    /// Args:
    ///     device_id: The number of the GPU.
    ///
    /// Raises:
    ///     DeviceUnavailableError: The GPU does not exist or cannot be used.
    ///     DeviceError: The copy failed.
    ///     OutOfMemoryError: The GPU has too little memory.
    #[pyo3(signature = (device_id=0))]
    fn to_gpu(&self, py: Python<'_>, device_id: usize) -> PyResult<Self> {
        py.detach(|| self.0.to_gpu(device_id)).map(Self).map_err(|error| pool_error(py, &error))
    }

    /// Returns a copy of the bytes. The same as ``to_host``.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.to_host(py)
    }

    /// Returns a copy of the bytes.
    ///
    /// Raises:
    ///     DeviceError: The copy from the GPU failed.
    fn to_host<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.0.to_host()).map_err(|error| pool_error(py, &error))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Overwrites the whole buffer with ``data``.
    ///
    /// Raises:
    ///     ConfigurationError: ``data`` does not have the size of the buffer.
    ///     DeviceError: The copy to the GPU failed.
    fn copy_from(&mut self, py: Python<'_>, data: &[u8]) -> PyResult<()> {
        self.0.copy_from_slice(data).map_err(|error| pool_error(py, &error))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!(
            "TensorBuffer({} bytes on {})",
            self.0.len(),
            if self.0.is_cpu() { "the host" } else { "a GPU" }
        )
    }
}
