// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `TensorMeta`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorstream::format::TensorMeta;

use super::buffer::PyTensorBuffer;
use crate::dtype::PyDtype;

/// The shape and dtype of a tensor.
///
/// Args:
///     shape: The size of each dimension.
///     dtype: A ``DType``, a ``torch.dtype``, a NumPy dtype, or the name of one.
///
/// Raises:
///     TypeError: The dtype is unknown.
///     ValueError: The elements do not fill a whole number of bytes, or fill 2**61 bytes or more.
///
/// Examples:
///     >>> import tensorstream as ts
///     >>> meta = ts.TensorMeta([2, 3], "float32")
///     >>> meta
///     TensorMeta([2, 3], float32)
///     >>> meta.nbytes
///     24
#[pyclass(frozen, eq, module = "tensorstream", name = "TensorMeta")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyTensorMeta(TensorMeta);

#[pymethods]
impl PyTensorMeta {
    #[new]
    fn new(shape: Vec<u64>, dtype: &Bound<'_, PyAny>) -> PyResult<Self> {
        let meta = TensorMeta { dtype: PyDtype::extract(dtype)?, shape };
        match meta.byte_len() {
            Some(_) => Ok(Self(meta)),
            None => Err(PyValueError::new_err(format!(
                "invalid shape {:?} for {}: expected a whole number of bytes below 2**61",
                meta.shape, meta.dtype
            ))),
        }
    }

    /// The size of each dimension.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.0.shape.clone()
    }

    /// The element type.
    #[getter]
    fn dtype(&self) -> PyDtype {
        PyDtype(self.0.dtype)
    }

    /// The size of all elements, in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.byte_len().unwrap_or(0)
    }

    /// Allocates a buffer of ``nbytes`` bytes on a GPU, or on the host if that fails.
    ///
    /// Args:
    ///     device: The number of the GPU.
    ///
    /// Warns:
    ///     NotBuiltWarning: The buffer is on the host.
    ///
    /// Raises:
    ///     OutOfMemoryError: The host has too little memory, too.
    #[pyo3(signature = (device=0))]
    fn allocate_buffer(&self, py: Python<'_>, device: usize) -> PyResult<PyTensorBuffer> {
        PyTensorBuffer::try_allocate_gpu(py, self.nbytes() as usize, device)
    }

    fn __repr__(&self) -> String {
        format!("TensorMeta({:?}, {})", self.0.shape, PyDtype(self.0.dtype).name())
    }
}
