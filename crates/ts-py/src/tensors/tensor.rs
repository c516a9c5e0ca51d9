// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Tensor`.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use tensorstream::exec::contiguous_strides;
use tensorstream::format::Dtype;
use tensorstream::pool::{self, TensorBuffer};
use tensorstream::remote::TensorInfo;

use super::import::import;
use crate::dlpack::{CPU, CUDA, Exported, VERSION, unversioned_capsule, versioned_capsule};
use crate::dtype::{PyDtype, row_of, torch_shape};
use crate::errors::{configuration_error, pool_error, tensor_error};
use crate::memory::{Memory, fill_buffer, format_of, release_buffer};

/// A tensor that other libraries use without a copy, through DLPack, the buffer protocol, or
/// ``__cuda_array_interface__``.
///
/// Examples:
///     >>> import numpy as np, tensorstream as ts
///     >>> array = np.zeros([2, 3], dtype=np.float32)
///     >>> tensor = ts.Tensor.from_dlpack(array, name="weight")
///     >>> tensor
///     Tensor("weight", [2, 3], float32, cpu)
///     >>> array[1, 2] = 7  # the tensor shares the memory
///     >>> tensor.to_torch()
///     tensor([[0., 0., 0.],
///             [0., 0., 7.]])
#[pyclass(frozen, weakref, module = "tensorstream", name = "Tensor")]
#[derive(Clone)]
pub(crate) struct PyTensor {
    pub(crate) info: TensorInfo,
    pub(crate) memory: Arc<Memory>,
}

impl PyTensor {
    /// Returns a tensor that shares the memory of a `Tensor`, of an object that supports DLPack, or
    /// of a DLPack capsule.
    ///
    /// # Errors
    /// The same as [`import`].
    fn extract(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(tensor) = value.cast::<Self>() {
            return Ok(tensor.get().clone());
        }
        let (info, memory) = import(value)?;
        Ok(Self { info, memory: Arc::new(memory) })
    }

    /// Returns the step along each dimension, in elements.
    fn element_strides(&self) -> Vec<i64> {
        self.info.strides.clone().unwrap_or_else(|| contiguous_strides(&self.info.meta.shape))
    }

    /// Returns the offset of the first element in the memory, in bytes.
    fn offset(&self) -> usize {
        self.info.storage_offset as usize
    }

    /// Returns the method that error messages suggest if an interface does not support the dtype.
    fn alternative(&self) -> &'static str {
        // `to_torch` uses DLPack.
        if row_of(self.info.meta.dtype).is_some() { "to_torch()" } else { "tobytes()" }
    }

    /// # Errors
    /// BufferError if the values are smaller than a byte, and do not fill elements of PyTorch.
    fn exported(&self) -> PyResult<Exported> {
        let dtype = self.info.meta.dtype;
        let (mut shape, mut strides) = (self.info.meta.shape.clone(), self.element_strides());
        if dtype.bits() < 8 {
            let packed = torch_shape(dtype, &shape).filter(|_| self.info.is_contiguous());
            shape = packed.ok_or_else(|| {
                PyBufferError::new_err(format!(
                    "cannot export a tensor of dtype {dtype} and shape {shape:?}: the values of \
                     a row must fill bytes, without gaps"
                ))
            })?;
            strides = contiguous_strides(&shape);
        }
        Ok(Exported {
            data: self.memory.address(self.offset()).cast(),
            device: self.memory.device(),
            dtype,
            shape: shape.iter().map(|&n| n as i64).collect(),
            strides,
            read_only: self.memory.is_read_only(),
            copied: false,
            owner: Box::new(Arc::clone(&self.memory)),
        })
    }

    /// Copies the tensor to new memory on the host, with the same strides.
    fn copied(&self, py: Python<'_>) -> PyResult<Self> {
        let to_python = |error| pool_error(py, &error);
        let bytes = py.detach(|| self.memory.to_host()).map_err(to_python)?;
        let memory = Memory::from_buffer(TensorBuffer::cpu(bytes), 0).map_err(to_python)?;
        Ok(Self { info: self.info.clone(), memory: Arc::new(memory) })
    }
}

#[pymethods]
impl PyTensor {
    /// Allocates a tensor of zeros.
    ///
    /// Args:
    ///     shape: The size of each dimension.
    ///     dtype: A ``DType``, a ``torch.dtype``, a NumPy dtype, or the name of one.
    ///     device: "cpu", or a GPU such as "cuda:0".
    ///     name: The name of the tensor. Receivers get it too.
    ///
    /// Raises:
    ///     TypeError: The dtype is unknown.
    ///     ConfigurationError: The device or the shape is invalid.
    ///     DeviceUnavailableError: The GPU does not exist or cannot be used.
    ///     OutOfMemoryError: There is too little memory.
    #[staticmethod]
    #[pyo3(signature = (shape, dtype, *, device="cpu", name=""))]
    fn zeros(
        py: Python<'_>,
        shape: Vec<u64>,
        dtype: &Bound<'_, PyAny>,
        device: &str,
        name: &str,
    ) -> PyResult<Self> {
        let mut info = TensorInfo::new(name, PyDtype::extract(dtype)?, shape)
            .map_err(|error| tensor_error(py, &error))?;
        let len = info.storage_len as usize;
        let memory = match device.strip_prefix("cuda:").map(str::parse::<u16>) {
            Some(Ok(ordinal)) => {
                TensorBuffer::allocate_gpu(len, ordinal.into()).and_then(|mut buffer| {
                    buffer.copy_from_slice(&vec![0; len])?;
                    Memory::from_buffer(buffer, ordinal.into())
                })
            }
            None if device == "cpu" => Memory::zeros(len).ok_or_else(|| {
                let source = std::io::ErrorKind::OutOfMemory.into();
                pool::Error::Map { bytes: len, source }
            }),
            _ => {
                return Err(configuration_error(
                    py,
                    &format!("invalid device {device:?}: expected \"cpu\" or \"cuda:N\""),
                ));
            }
        };
        let memory = memory.map_err(|error| pool_error(py, &error))?;
        info.device = device.into();
        Ok(Self { info, memory: Arc::new(memory) })
    }

    /// Wraps a tensor of another library. Shares its memory, which must be on the host.
    ///
    /// Args:
    ///     tensor: An object that supports DLPack, a DLPack capsule, or a ``Tensor``.
    ///     name: The name of the tensor. Receivers get it too. None keeps the name of a
    ///         ``Tensor``.
    ///     metadata: Text by key. Receivers get it too. None keeps the metadata of a ``Tensor``.
    ///
    /// Raises:
    ///     TypeError: The object does not support DLPack.
    ///     BufferError: The tensor is not on the host, or its dtype is not supported.
    ///     ConfigurationError: The tensor has more than 64 dimensions.
    #[staticmethod]
    #[pyo3(signature = (tensor, *, name=None, metadata=None))]
    fn from_dlpack(
        tensor: &Bound<'_, PyAny>,
        name: Option<String>,
        metadata: Option<BTreeMap<String, String>>,
    ) -> PyResult<Self> {
        let mut this = Self::extract(tensor)?;
        this.info.name = name.unwrap_or(this.info.name);
        this.info.metadata = metadata.unwrap_or(this.info.metadata);
        Ok(this)
    }

    /// The name of the tensor. Empty if it has none.
    #[getter]
    fn name(&self) -> &str {
        &self.info.name
    }

    /// Text by key, from the sender or from ``from_dlpack``.
    #[getter]
    fn metadata(&self) -> BTreeMap<String, String> {
        self.info.metadata.clone()
    }

    /// The size of each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.info.meta.shape)
    }

    /// The element type.
    #[getter]
    fn dtype(&self) -> PyDtype {
        PyDtype(self.info.meta.dtype)
    }

    /// The step along each dimension, in elements.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.element_strides())
    }

    /// The size of all elements, in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.info.meta.byte_len().unwrap_or(0)
    }

    /// The device of the memory: "cpu", or an accelerator such as "cuda:0".
    #[getter]
    fn device(&self) -> String {
        self.memory.device_name()
    }

    /// Whether the memory is read-only.
    #[getter]
    fn read_only(&self) -> bool {
        self.memory.is_read_only()
    }

    /// Returns whether the elements are row-major and without gaps.
    fn is_contiguous(&self) -> bool {
        self.info.is_contiguous()
    }

    /// Returns whether both tensors were created from the same ``Tensor``, or received in the same
    /// storage.
    ///
    /// Returns False if an array was imported twice, although the memory is the same.
    fn shares_memory(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory)
    }

    /// Returns a tensor that shares the bytes of an object, such as ``bytes`` or ``mmap``.
    ///
    /// Args:
    ///     memory: The elements, in row-major order.
    ///     dtype: The name of their dtype.
    ///     shape: The size of each dimension.
    ///
    /// Raises:
    ///     TypeError: The dtype is unknown.
    ///     ConfigurationError: The shape is invalid, or the memory has another size.
    #[staticmethod]
    fn _sharing(
        py: Python<'_>,
        memory: PyBuffer<u8>,
        dtype: &str,
        shape: Vec<u64>,
    ) -> PyResult<Self> {
        let info = TensorInfo::new("", PyDtype::from_name(dtype)?, shape)
            .map_err(|error| tensor_error(py, &error))?;
        let (expected, len) = (info.storage_len, memory.len_bytes());
        if expected != len as u64 {
            let what = format!("expected memory of {expected} bytes, got {len}");
            return Err(configuration_error(py, &what));
        }
        Ok(Self { info, memory: Arc::new(Memory::from_python(memory)?) })
    }

    /// Returns a view of the memory of this tensor, with another dtype and layout.
    ///
    /// Args:
    ///     name: The name of the view.
    ///     dtype: The name of its dtype.
    ///     shape: The size of each dimension.
    ///     strides: The step along each dimension, in elements.
    ///     offset: The offset of the first element in the memory, in bytes.
    ///
    /// Raises:
    ///     TypeError: The dtype is unknown.
    ///     ConfigurationError: The shape is invalid, or an element would be outside the memory.
    fn _view(
        &self,
        py: Python<'_>,
        name: &str,
        dtype: &str,
        shape: Vec<u64>,
        strides: Vec<i64>,
        offset: u64,
    ) -> PyResult<Self> {
        let to_python = |error| tensor_error(py, &error);
        let dtype = PyDtype::from_name(dtype)?;
        let row_major = TensorInfo::new(name, dtype, shape).map_err(to_python)?;
        let len = self.memory.len() as u64;
        let info = row_major.in_storage(0, len, offset, Some(strides)).map_err(to_python)?;
        Ok(Self { info, memory: Arc::clone(&self.memory) })
    }

    /// Exports the tensor as a DLPack capsule, with the arguments of the array API standard.
    ///
    /// Raises:
    ///     BufferError: The requested export is impossible, for example to another GPU.
    ///     DeviceError: The copy failed.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let device = self.memory.device();
        // On a GPU, `stream` is ignored: a tensor is created only after all work on its memory is
        // complete, so any stream can use the tensor at once.
        if device.0 == CPU && stream.is_some() {
            return Err(PyBufferError::new_err(
                "cannot export: stream must be None for a tensor on the host",
            ));
        }
        let target = dl_device.unwrap_or(device);
        if target != device && target != (CPU, 0) {
            let own = match device.0 {
                CPU => String::new(),
                _ => format!(" or {device:?} (the tensor's device)"),
            };
            return Err(PyBufferError::new_err(format!(
                "cannot export a tensor on DLPack device {device:?} to dl_device={target:?}: \
                 expected (1, 0) (the host){own}"
            )));
        }
        let copies = copy == Some(true) || target != device;
        if copies && copy == Some(false) {
            return Err(PyBufferError::new_err(format!(
                "cannot export a tensor on DLPack device {device:?} to dl_device={target:?} \
                 without a copy: remove copy=False"
            )));
        }
        let mut exported = if copies { self.copied(py)?.exported() } else { self.exported() }?;
        exported.copied = copies;
        if max_version.is_some_and(|(major, _)| major >= VERSION.0) {
            return versioned_capsule(py, exported);
        }
        if exported.read_only {
            return Err(PyBufferError::new_err(
                "cannot export a read-only tensor to a DLPack older than 1.0: request \
                 max_version=(1, 0) or copy=True",
            ));
        }
        unversioned_capsule(py, exported)
    }

    /// Returns DLPack's device type and device number.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.memory.device()
    }

    /// Returns a DLPack capsule, which can be consumed once.
    ///
    /// Raises:
    ///     BufferError: The tensor is read-only, or DLPack before 1.0 lacks its dtype.
    fn to_dlpack<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.__dlpack__(py, None, None, None, None)
    }

    /// Returns a NumPy array that shares the memory, or a copy if the tensor is on a GPU.
    ///
    /// Raises:
    ///     TypeError: NumPy has no such dtype: bfloat16, float8, or elements smaller than a byte.
    ///     DeviceError: The copy from the GPU failed.
    fn to_numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        // NumPy ignores the error of an export that fails, and makes an array of one object.
        if format_of(self.info.meta.dtype).is_none() {
            return Err(PyTypeError::new_err(format!(
                "NumPy has no dtype {}: use {}",
                self.dtype().name(),
                self.alternative()
            )));
        }
        let on_host = if self.memory.bytes().is_some() { self.clone() } else { self.copied(py)? };
        py.import("numpy")?.call_method1("asarray", (Bound::new(py, on_host)?,))
    }

    /// Returns a PyTorch tensor that shares the memory.
    fn to_torch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("torch")?.call_method1("from_dlpack", (slf,))
    }

    /// Returns a copy of the bytes of all elements, in row-major order.
    ///
    /// Raises:
    ///     BufferError: The tensor is not contiguous.
    ///     DeviceError: The copy from the GPU failed.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        if !self.info.is_contiguous() {
            return Err(PyBufferError::new_err(format!(
                "cannot copy the bytes: the tensor is not contiguous (shape {:?}, strides {:?}); \
                 use to_torch().contiguous()",
                self.info.meta.shape,
                self.element_strides()
            )));
        }
        let bytes = py.detach(|| self.memory.to_host()).map_err(|error| pool_error(py, &error))?;
        Ok(PyBytes::new(py, &bytes[self.offset()..][..self.nbytes() as usize]))
    }

    /// The dictionary of the CUDA array interface, or None if the tensor is on the host.
    ///
    /// Raises:
    ///     TypeError: The interface does not support the dtype.
    #[getter]
    fn cuda_array_interface<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        if self.memory.device().0 != CUDA {
            return Ok(None);
        }
        let dtype = self.info.meta.dtype;
        let kind = match dtype {
            Dtype::Bool => "|b1",
            Dtype::U8 => "|u1",
            Dtype::I8 => "|i1",
            Dtype::U16 => "<u2",
            Dtype::I16 => "<i2",
            Dtype::U32 => "<u4",
            Dtype::I32 => "<i4",
            Dtype::U64 => "<u8",
            Dtype::I64 => "<i8",
            Dtype::F16 => "<f2",
            Dtype::F32 => "<f4",
            Dtype::F64 => "<f8",
            Dtype::C64 => "<c8",
            Dtype::C128 => "<c16",
            _ => {
                return Err(PyTypeError::new_err(format!(
                    "the CUDA array interface does not support dtype {}: use {}",
                    self.dtype().name(),
                    self.alternative()
                )));
            }
        };
        let itemsize = i64::from(dtype.bits() / 8);
        let strides = self.element_strides().into_iter().map(|stride| stride * itemsize);
        let strides: Vec<i64> = strides.collect();
        let strides =
            (!self.info.is_contiguous()).then(|| PyTuple::new(py, strides)).transpose()?;
        let address = self.memory.address(self.offset()).addr();
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", self.shape(py)?)?;
        interface.set_item("typestr", kind)?;
        interface.set_item("data", (address, self.memory.is_read_only()))?;
        interface.set_item("strides", strides)?;
        // None: consumers need not synchronise, because all work on the tensor is done.
        interface.set_item("stream", py.None())?;
        Ok(Some(interface))
    }

    /// The dictionary of the CUDA array interface, version 3.
    ///
    /// Raises:
    ///     AttributeError: The tensor is on the host.
    ///     TypeError: The interface does not support the dtype.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let absent = || {
            PyAttributeError::new_err(
                "no `__cuda_array_interface__`: the tensor is on the host; use DLPack or NumPy",
            )
        };
        self.cuda_array_interface(py)?.ok_or_else(absent)
    }

    /// Exports the tensor through the buffer protocol.
    ///
    /// # Safety
    /// Only the interpreter may call this function, with a `view` that it can write to.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get().clone();
        let strides = this.element_strides();
        let extents = (&this.info.meta.shape[..], &strides[..]);
        let first = (this.info.meta.dtype, this.offset());
        // SAFETY: the interpreter passed `view` to this call, and `slf` is the exporting object.
        unsafe { fill_buffer(slf.into_any(), view, flags, &this.memory, first, extents) }
    }

    /// Releases a buffer that `__getbuffer__` exported.
    ///
    /// # Safety
    /// Only the interpreter may call this function, once for each buffer.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: `__getbuffer__` filled `view`, and the interpreter releases each buffer once.
        unsafe { release_buffer(view) }
    }

    fn __repr__(&self) -> String {
        let name = if self.info.name.is_empty() {
            String::new()
        } else {
            format!("{:?}, ", self.info.name)
        };
        let dtype = self.dtype().name();
        format!("Tensor({name}{:?}, {dtype}, {})", self.info.meta.shape, self.device())
    }
}
