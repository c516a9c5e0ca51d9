// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors, and what they are made of, for Python.

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::exceptions::{PyAttributeError, PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use tensorstream::format::{Dtype, TensorMeta};
use tensorstream::pool::{self, TensorBuffer};
use tensorstream::remote::TensorInfo;
use tensorstream::streams;

use crate::dlpack::{CPU, CUDA, Exported, Imported, VERSION, contiguous, unversioned, versioned};
use crate::dtype::PyDtype;
use crate::errors::{misuse, of_pool, of_wire};
use crate::memory::{Memory, fill_view, release_view};

/// Whether there are GPUs to be used.
#[pyclass(frozen, module = "tensorstream", name = "GpuStatus")]
pub(crate) struct PyGpuStatus(streams::GpuStatus);

#[pymethods]
impl PyGpuStatus {
    /// Looks, the first time; what it finds stays.
    #[staticmethod]
    fn detect() -> Self {
        Self(streams::GpuStatus::detect())
    }

    /// "NotCompiled", "NoCuda", "NoDevices" or "Available".
    #[getter]
    fn kind(&self) -> &'static str {
        match self.0 {
            streams::GpuStatus::NotCompiled => "NotCompiled",
            streams::GpuStatus::NoCuda(_) => "NoCuda",
            streams::GpuStatus::NoDevices => "NoDevices",
            streams::GpuStatus::Available { .. } => "Available",
        }
    }

    /// Whether there is at least one.
    #[getter]
    fn is_available(&self) -> bool {
        self.0.is_available()
    }

    /// How many there are.
    #[getter]
    fn device_count(&self) -> usize {
        self.0.device_count()
    }

    /// Whether this build has support for GPUs.
    #[getter]
    fn cuda_compiled(&self) -> bool {
        self.0 != streams::GpuStatus::NotCompiled
    }

    /// What there is, or why there is nothing: the same as `str(status)`.
    fn message(&self) -> String {
        self.0.to_string()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("GpuStatus.{}({})", self.kind(), self.0)
    }
}

/// How much memory a pool holds, and in which blocks: sizes in bytes.
#[pyclass(frozen, eq, module = "tensorstream", name = "PoolConfig")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PyPoolConfig(pub(crate) pool::PoolConfig);

#[pymethods]
impl PyPoolConfig {
    #[new]
    #[pyo3(signature = (*, pool_bytes=None, min_block_bytes=None, max_block_bytes=None,
        classes=None, preallocate=None))]
    fn new(
        pool_bytes: Option<usize>,
        min_block_bytes: Option<usize>,
        max_block_bytes: Option<usize>,
        classes: Option<usize>,
        preallocate: Option<bool>,
    ) -> PyResult<Self> {
        let usual = pool::PoolConfig::default();
        let config = pool::PoolConfig {
            pool_bytes: pool_bytes.unwrap_or(usual.pool_bytes),
            min_block_bytes: min_block_bytes.unwrap_or(usual.min_block_bytes),
            max_block_bytes: max_block_bytes.unwrap_or(usual.max_block_bytes),
            classes: classes.unwrap_or(usual.classes),
            preallocate: preallocate.unwrap_or(usual.preallocate),
        };
        if config.min_block_bytes == 0
            || config.min_block_bytes > config.max_block_bytes
            || config.classes == 0
        {
            return Err(PyValueError::new_err(format!("no blocks are of such sizes: {config:?}")));
        }
        Ok(Self(config))
    }

    /// 256 MB in blocks of 64 KB to 64 MB.
    #[staticmethod]
    fn default() -> Self {
        Self(pool::PoolConfig::default())
    }

    /// For large transfers: 512 MB, from 1 MB on, taken at once.
    #[staticmethod]
    fn high_throughput() -> Self {
        Self(pool::PoolConfig::high_throughput())
    }

    /// For small machines: 64 MB, from 16 KB on.
    #[staticmethod]
    fn low_memory() -> Self {
        Self(pool::PoolConfig::low_memory())
    }

    #[getter]
    fn pool_bytes(&self) -> usize {
        self.0.pool_bytes
    }

    #[getter]
    fn min_block_bytes(&self) -> usize {
        self.0.min_block_bytes
    }

    #[getter]
    fn max_block_bytes(&self) -> usize {
        self.0.max_block_bytes
    }

    #[getter]
    fn classes(&self) -> usize {
        self.0.classes
    }

    #[getter]
    fn preallocate(&self) -> bool {
        self.0.preallocate
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// What a tensor is, without its bytes.
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
                "{:?} of {} is no whole number of bytes",
                meta.shape, meta.dtype
            ))),
        }
    }

    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.0.shape.clone()
    }

    #[getter]
    fn dtype(&self) -> PyDtype {
        PyDtype(self.0.dtype)
    }

    /// Bytes of its elements.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.byte_len().unwrap_or(0)
    }

    /// Memory for them, on the GPU of this number, or on the host where there is none.
    #[pyo3(signature = (device=0))]
    fn allocate_buffer(&self, device: usize) -> PyTensorBuffer {
        PyTensorBuffer(TensorBuffer::try_allocate_gpu(self.nbytes() as usize, device))
    }

    fn __repr__(&self) -> String {
        format!("TensorMeta({:?}, {})", self.0.shape, PyDtype(self.0.dtype).name())
    }
}

/// Bytes that are on the host or on a GPU.
#[pyclass(module = "tensorstream", name = "TensorBuffer")]
pub(crate) struct PyTensorBuffer(TensorBuffer);

#[pymethods]
impl PyTensorBuffer {
    /// A copy of these bytes, on the host.
    #[staticmethod]
    fn cpu(data: Vec<u8>) -> Self {
        Self(TensorBuffer::cpu(data))
    }

    /// The same as `cpu`.
    #[staticmethod]
    fn from_bytes(data: Vec<u8>) -> Self {
        Self::cpu(data)
    }

    /// So many zeros, on the host.
    #[staticmethod]
    fn cpu_zeros(size: usize) -> Self {
        Self(TensorBuffer::cpu_zeros(size))
    }

    /// So many bytes on the GPU of this number, or zeros on the host where there is none.
    #[staticmethod]
    #[pyo3(signature = (size, device_id=0))]
    fn try_allocate_gpu(size: usize, device_id: usize) -> Self {
        Self(TensorBuffer::try_allocate_gpu(size, device_id))
    }

    /// Its size in bytes.
    #[getter]
    fn size(&self) -> usize {
        self.0.len()
    }

    /// Whether it is on the host.
    #[getter]
    fn is_cpu(&self) -> bool {
        self.0.is_cpu()
    }

    /// Whether it is on a GPU.
    #[getter]
    fn is_gpu(&self) -> bool {
        self.0.is_gpu()
    }

    /// A copy of it on the host.
    fn to_cpu(&self, py: Python<'_>) -> PyResult<Self> {
        py.detach(|| self.0.to_cpu()).map(Self).map_err(|error| of_pool(py, &error))
    }

    /// A copy of it on the GPU of this number.
    #[pyo3(signature = (device_id=0))]
    fn to_gpu(&self, py: Python<'_>, device_id: usize) -> PyResult<Self> {
        py.detach(|| self.0.to_gpu(device_id)).map(Self).map_err(|error| of_pool(py, &error))
    }

    /// A copy of its bytes: the same as `to_host`.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.to_host(py)
    }

    /// A copy of its bytes.
    fn to_host<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.0.to_host()).map_err(|error| of_pool(py, &error))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Writes as many bytes as it has.
    fn copy_from(&mut self, py: Python<'_>, data: &[u8]) -> PyResult<()> {
        self.0.copy_from_slice(data).map_err(|error| of_pool(py, &error))
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

/// A tensor that other libraries use where it lies: by DLPack, the buffer protocol, or
/// `__cuda_array_interface__`.
#[pyclass(frozen, weakref, module = "tensorstream", name = "Tensor")]
#[derive(Clone)]
pub(crate) struct PyTensor {
    pub(crate) info: TensorInfo,
    pub(crate) memory: Arc<Memory>,
}

impl PyTensor {
    /// Takes anything that speaks DLPack and is on the host, or a tensor of this package's.
    pub(crate) fn extract(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(tensor) = value.cast::<Self>() {
            return Ok(tensor.get().clone());
        }
        let py = value.py();
        let capsule = if let Ok(export) = value.getattr("__dlpack__") {
            let newest = PyDict::new(py);
            newest.set_item("max_version", VERSION)?;
            match export.call((), Some(&newest)) {
                // It is of the time before versions.
                Err(error) if error.is_instance_of::<PyTypeError>(py) => export.call0()?,
                done => done?,
            }
        } else {
            value.clone()
        };
        Self::of_import(py, Imported::from_capsule(&capsule)?)
    }

    fn of_import(py: Python<'_>, tensor: Imported) -> PyResult<Self> {
        let layout = tensor.layout()?;
        if layout.device.0 != CPU {
            let what = format!(
                "a tensor of DLPack's device {:?}: copy it to the host first",
                layout.device
            );
            return Err(PyBufferError::new_err(what));
        }
        let wire = |error| of_wire(py, &error);
        let plain = TensorInfo::new("", layout.dtype, layout.shape).map_err(wire)?;
        let bytes = i64::from(layout.dtype.bits()) / 8;
        // All elements are within these bytes of the first.
        let reach =
            |(&n, &stride): (&u64, &i64)| (n as i64 - 1).checked_mul(stride)?.checked_mul(bytes);
        let empty = plain.meta.shape.contains(&0);
        let (mut begin, mut end) = (0i64, if empty { 0 } else { plain.storage_len as i64 });
        if let Some(strides) = layout.strides.as_ref().filter(|_| !empty) {
            end = bytes;
            for step in plain.meta.shape.iter().zip(strides).map(reach) {
                let side = if step.is_some_and(|step| step < 0) { &mut begin } else { &mut end };
                *side = step.and_then(|step| side.checked_add(step)).ok_or_else(|| {
                    PyBufferError::new_err("strides that reach further than memory does")
                })?;
            }
        }
        let len = (end - begin) as usize;
        let strides = layout.strides.filter(|_| !empty);
        let info = plain.in_storage(0, len as u64, (-begin) as u64, strides).map_err(wire)?;
        let first = layout.data.wrapping_offset(begin as isize);
        // SAFETY: the tensor's elements, by its own description, are in these bytes.
        let memory = unsafe { Memory::of_import(tensor, first, len, (CPU, 0), layout.read_only) };
        Ok(Self { info, memory: Arc::new(memory) })
    }

    fn extents(&self) -> (Vec<i64>, Vec<i64>) {
        let shape: Vec<i64> = self.info.meta.shape.iter().map(|&n| n as i64).collect();
        let strides = self.info.strides.clone().unwrap_or_else(|| contiguous(&shape));
        (shape, strides)
    }

    fn offset(&self) -> usize {
        self.info.storage_offset as usize
    }

    fn exported(&self) -> Exported {
        let (shape, strides) = self.extents();
        Exported {
            data: self.memory.at(self.offset()).cast(),
            device: self.memory.device(),
            dtype: self.info.meta.dtype,
            shape,
            strides,
            read_only: self.memory.is_read_only(),
            copied: false,
            keep: Box::new(Arc::clone(&self.memory)),
        }
    }

    /// A copy of it, in memory of its own on the host, with the strides that it has.
    fn copied(&self, py: Python<'_>) -> PyResult<Self> {
        let bytes = py.detach(|| self.memory.to_host()).map_err(|error| of_pool(py, &error))?;
        let memory =
            Memory::of_buffer(TensorBuffer::cpu(bytes), 0).map_err(|error| of_pool(py, &error))?;
        Ok(Self { info: self.info.clone(), memory: Arc::new(memory) })
    }
}

#[pymethods]
impl PyTensor {
    /// Zeros, on the host or a GPU: "cpu" or "cuda:0".
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
            .map_err(|error| of_wire(py, &error))?;
        let len = info.storage_len as usize;
        let memory = match device.strip_prefix("cuda:").map(str::parse::<u16>) {
            Some(Ok(ordinal)) => {
                TensorBuffer::allocate_gpu(len, ordinal.into()).and_then(|mut buffer| {
                    buffer.copy_from_slice(&vec![0; len])?;
                    Memory::of_buffer(buffer, ordinal.into())
                })
            }
            None if device == "cpu" => Memory::zeros(len).ok_or_else(|| {
                let source = std::io::ErrorKind::OutOfMemory.into();
                pool::Error::Map { bytes: len, source }
            }),
            _ => return Err(misuse(py, &format!("device {device:?}: \"cpu\" and \"cuda:N\" are"))),
        };
        let memory = memory.map_err(|error| of_pool(py, &error))?;
        info.device = device.into();
        Ok(Self { info, memory: Arc::new(memory) })
    }

    /// The tensor of another library, or a capsule of it, on the host: the same memory, under a
    /// name.
    #[staticmethod]
    #[pyo3(signature = (tensor, *, name=None, metadata=None))]
    fn from_dlpack(
        tensor: &Bound<'_, PyAny>,
        name: Option<String>,
        metadata: Option<std::collections::BTreeMap<String, String>>,
    ) -> PyResult<Self> {
        let mut this = Self::extract(tensor)?;
        this.info.name = name.unwrap_or(this.info.name);
        this.info.metadata = metadata.unwrap_or(this.info.metadata);
        Ok(this)
    }

    #[getter]
    fn name(&self) -> &str {
        &self.info.name
    }

    #[getter]
    fn metadata(&self) -> std::collections::BTreeMap<String, String> {
        self.info.metadata.clone()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        pyo3::types::PyTuple::new(py, &self.info.meta.shape)
    }

    #[getter]
    fn dtype(&self) -> PyDtype {
        PyDtype(self.info.meta.dtype)
    }

    /// Elements from one to the next along each dimension.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        pyo3::types::PyTuple::new(py, self.extents().1)
    }

    /// Bytes of its elements.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.info.meta.byte_len().unwrap_or(0)
    }

    /// Where its memory is: "cpu", or "cuda:0".
    #[getter]
    fn device(&self) -> String {
        match self.memory.device() {
            (CUDA, ordinal) => format!("cuda:{ordinal}"),
            _ => "cpu".into(),
        }
    }

    /// Whether nobody may write to it.
    #[getter]
    fn read_only(&self) -> bool {
        self.memory.is_read_only()
    }

    fn is_contiguous(&self) -> bool {
        self.info.is_contiguous()
    }

    /// Whether both have the same memory, as views of one storage have.
    fn shares_memory(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory)
    }

    /// Part of a tensor of bytes that is a whole storage, as a tensor of its own.
    fn _view(
        &self,
        py: Python<'_>,
        name: &str,
        dtype: &str,
        shape: Vec<u64>,
        strides: Vec<i64>,
        offset: u64,
    ) -> PyResult<Self> {
        let dtype = PyDtype::named(dtype)?;
        let plain = TensorInfo::new(name, dtype, shape).map_err(|error| of_wire(py, &error))?;
        let len = self.memory.len() as u64;
        let info =
            plain.in_storage(0, len, offset, Some(strides)).map_err(|error| of_wire(py, &error))?;
        Ok(Self { info, memory: Arc::clone(&self.memory) })
    }

    /// <https://data-apis.org/array-api/latest/API_specification/generated/array_api.array.__dlpack__.html>
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let own = self.memory.device();
        if own.0 == CPU && stream.is_some() {
            return Err(PyBufferError::new_err(
                "the host's memory is of no stream: it must be None",
            ));
        }
        // All work on a tensor of this package's is done when one has it, so every stream may use
        // it at once.
        let wanted = dl_device.unwrap_or(own);
        if wanted != own && wanted != (CPU, 0) {
            return Err(PyBufferError::new_err(format!(
                "the tensor is on {own:?}, and cannot be given on {wanted:?}"
            )));
        }
        let copies = copy == Some(true) || wanted != own;
        if copies && copy == Some(false) {
            return Err(PyBufferError::new_err(format!(
                "the tensor is on {own:?}: on {wanted:?} it is a copy"
            )));
        }
        let mut exported = if copies { self.copied(py)?.exported() } else { self.exported() };
        exported.copied = copies;
        if max_version.is_some_and(|(major, _)| major >= VERSION.0) {
            return versioned(py, exported);
        }
        if exported.read_only {
            let what = "the tensor is read-only, which only DLPack 1 can say: ask for \
                        max_version=(1, 0) or a copy";
            return Err(PyBufferError::new_err(what));
        }
        unversioned(py, exported)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        self.memory.device()
    }

    /// A DLPack capsule, to be consumed once.
    fn to_dlpack<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.__dlpack__(py, None, None, None, None)
    }

    /// The same memory as an array of numpy. A tensor on a GPU is copied.
    fn to_numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let here = if self.memory.bytes().is_some() { self.clone() } else { self.copied(py)? };
        if !matches!(self.info.meta.dtype, Dtype::BF16) && self.info.meta.dtype.bits() >= 8 {
            let numpy = py.import("numpy")?;
            let tensor = Bound::new(py, here)?;
            // Of dtypes that it knows; it says of others that it does not.
            return numpy.call_method1("asarray", (tensor,));
        }
        let name = PyDtype(self.info.meta.dtype).name();
        Err(PyTypeError::new_err(format!(
            "numpy has no {name}: to_torch() gives a tensor of PyTorch"
        )))
    }

    /// The same memory as a tensor of PyTorch.
    fn to_torch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("torch")?.call_method1("from_dlpack", (slf,))
    }

    /// A copy of its elements' bytes, if they lie without gaps.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        if !self.info.is_contiguous() {
            return Err(PyBufferError::new_err("the tensor is not contiguous"));
        }
        let bytes = py.detach(|| self.memory.to_host()).map_err(|error| of_pool(py, &error))?;
        Ok(PyBytes::new(py, &bytes[self.offset()..][..self.nbytes() as usize]))
    }

    /// `__cuda_array_interface__` of version 3; None on the host.
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
            _ => {
                return Err(PyTypeError::new_err(format!(
                    "the CUDA array interface has no {dtype}"
                )));
            }
        };
        let (_, strides) = self.extents();
        let bytes: Vec<i64> =
            strides.iter().map(|stride| stride * i64::from(dtype.bits() / 8)).collect();
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", self.shape(py)?)?;
        interface.set_item("typestr", kind)?;
        interface
            .set_item("data", (self.memory.at(self.offset()).addr(), self.memory.is_read_only()))?;
        let strides = (!self.info.is_contiguous())
            .then(|| pyo3::types::PyTuple::new(py, bytes))
            .transpose()?;
        interface.set_item("strides", strides)?;
        // All work on it is done.
        interface.set_item("stream", py.None())?;
        Ok(Some(interface))
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let absent = || PyAttributeError::new_err("the tensor is not on a GPU");
        self.cuda_array_interface(py)?.ok_or_else(absent)
    }

    /// # Safety
    /// Called by the interpreter.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get().clone();
        let (shape, strides) = this.extents();
        let place = (this.info.meta.dtype, this.offset());
        // SAFETY: what the interpreter gave.
        unsafe { fill_view(slf.into_any(), view, flags, &this.memory, place, (&shape, &strides)) }
    }

    /// # Safety
    /// Called by the interpreter.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: what `__getbuffer__` filled.
        unsafe { release_view(view) }
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
