// SPDX-License-Identifier: MIT OR Apache-2.0
//! The classes of memory pools, and of their memory.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict};
use tensorstream::pool::{
    self, BlockPool, BlockStats, OrderedOptions, PinnedMemoryPool, PooledBuffer,
    StreamOrderedAllocator, StreamOrderedPool,
};
use tensorstream::streams::{AnyDevice, Stream, check_may_block};

use super::device::PyDevice;
use super::operand::{Allocation, Memory, Operand, PyDeviceBuffer, SUBMITTING, copy};
use super::stream::PyStream;
use crate::errors::{configuration_error, device_error, pool_error};
use crate::tensors::PyPoolConfig;

impl PyDeviceBuffer {
    /// Returns the bytes from `offset` on as memory for work.
    fn part(&self, offset: usize, len: usize) -> PyResult<Operand> {
        match offset.checked_add(len).filter(|end| *end <= self.memory.len()) {
            Some(end) => Ok(Operand::part(&self.memory, offset..end)),
            None => Err(PyValueError::new_err(format!(
                "invalid part of {len} bytes at offset {offset} of a buffer of {} bytes",
                self.memory.len()
            ))),
        }
    }
}

#[pymethods]
impl PyDeviceBuffer {
    /// The size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.memory.len()
    }

    /// Copies data to the buffer after the earlier work of a stream. Blocks until this is done.
    ///
    /// Args:
    ///     stream: A stream of the device of the buffer.
    ///     data: A contiguous object with the buffer protocol, or a PyTorch tensor on the host.
    ///     offset: The first byte of the buffer that is written.
    ///
    /// Raises:
    ///     ValueError: The data exceeds the buffer.
    ///     DeviceError: The stream has failed.
    #[pyo3(signature = (stream, data, offset=0))]
    fn write(
        &self,
        py: Python<'_>,
        stream: &PyStream,
        data: &Bound<'_, PyAny>,
        offset: usize,
    ) -> PyResult<()> {
        let from = Operand::of(data, false)?;
        copy(py, &stream.stream, self.part(offset, from.len())?, from)?;
        py.detach(|| stream.stream.synchronize()).map_err(|error| device_error(py, &error))
    }

    /// Returns a copy of bytes, after the earlier work of a stream. Blocks until this is done.
    ///
    /// Args:
    ///     stream: A stream of the device of the buffer.
    ///     offset: The first byte.
    ///     nbytes: The number of bytes. By default all from ``offset`` on.
    ///
    /// Raises:
    ///     ValueError: The bytes exceed the buffer.
    ///     DeviceError: The stream has failed.
    #[pyo3(signature = (stream, offset=0, nbytes=None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        stream: &PyStream,
        offset: usize,
        nbytes: Option<usize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let nbytes = nbytes.unwrap_or_else(|| self.memory.len().saturating_sub(offset));
        let from = self.part(offset, nbytes)?;
        // The copy keeps the object, also if it cannot wait here.
        let bytes = PyByteArray::new_with(py, nbytes, |_| Ok(()))?;
        copy(py, &stream.stream, Operand::of(&bytes, true)?, from)?;
        let done = py.detach(|| stream.stream.synchronize());
        done.map_err(|error| device_error(py, &error))?;
        Ok(PyBytes::new(py, &bytes.to_vec()))
    }

    fn __len__(&self) -> usize {
        self.memory.len()
    }

    fn __repr__(&self) -> String {
        format!("DeviceBuffer({} bytes)", self.memory.len())
    }
}

fn buffer(
    py: Python<'_>,
    device: &AnyDevice,
    acquired: Result<PooledBuffer<AnyDevice>, pool::Error>,
) -> PyResult<PyDeviceBuffer> {
    let buffer = acquired.map_err(|error| pool_error(py, &error))?;
    let memory = Memory { device: device.clone(), allocation: Allocation::Pooled(buffer) };
    Ok(PyDeviceBuffer { memory: Arc::new(memory) })
}

/// The statistics of a pool of blocks.
fn block_stats<'py>(py: Python<'py>, stats: &BlockStats) -> PyResult<Bound<'py, PyDict>> {
    let values = PyDict::new(py);
    values.set_item("available_buffers", stats.available_buffers)?;
    values.set_item("in_use_buffers", stats.in_use_buffers)?;
    values.set_item("available_bytes", stats.available_bytes)?;
    values.set_item("in_use_bytes", stats.in_use_bytes)?;
    values.set_item("pool_bytes", stats.pool_bytes)?;
    values.set_item("high_water_bytes", stats.high_water_bytes)?;
    values.set_item("hits", stats.hits)?;
    values.set_item("misses", stats.misses)?;
    values.set_item("returns", stats.returns)?;
    values.set_item("drops", stats.drops)?;
    values.set_item("hit_rate", stats.hit_rate())?;
    Ok(values)
}

fn config_of(config: Option<&PyPoolConfig>) -> pool::PoolConfig {
    config.map_or_else(pool::PoolConfig::default, |config| config.0)
}

/// A pool of memory on the host for copies to and from a GPU. The driver copies to and from it
/// directly, without a staging buffer.
///
/// Args:
///     config: The sizes. By default ``PoolConfig.default()``.
///     device: As for ``CudaStream``. On the CPU, the memory is ordinary memory.
///
/// Raises:
///     DeviceUnavailableError: The device does not exist, or cannot be used.
///     OutOfMemoryError: There is too little memory to preallocate.
///
/// Examples:
///     >>> from tensorstream.streams import PinnedMemoryPool
///     >>> pool = PinnedMemoryPool(device="cpu")
///     >>> pool.acquire(1 << 20).nbytes
///     1048576
#[pyclass(frozen, module = "tensorstream.streams", name = "PinnedMemoryPool")]
pub(crate) struct PyPinnedMemoryPool(PinnedMemoryPool<AnyDevice>);

#[pymethods]
impl PyPinnedMemoryPool {
    #[new]
    #[pyo3(signature = (config=None, *, device=None))]
    fn new(
        py: Python<'_>,
        config: Option<&PyPoolConfig>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (device, config) = (PyDevice::of(py, device)?, config_of(config));
        let pool = py.detach(|| PinnedMemoryPool::new(device.device().clone(), config));
        pool.map(Self).map_err(|error| pool_error(py, &error))
    }

    /// Whether the memory is pinned.
    #[getter]
    fn is_pinned(&self) -> bool {
        self.0.is_pinned()
    }

    /// Takes memory of the pool. Its bytes are undefined.
    ///
    /// Raises:
    ///     OutOfMemoryError: The pool is full.
    fn acquire(&self, py: Python<'_>, nbytes: usize) -> PyResult<PyDeviceBuffer> {
        buffer(py, self.0.blocks().device(), py.detach(|| self.0.acquire(nbytes)))
    }

    /// Returns statistics: bytes, counts of buffers, and the ``hit_rate`` in per cent.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        block_stats(py, &self.0.stats())
    }
}

/// A pool of blocks of a device's memory.
///
/// Args:
///     device: The number of a GPU, a ``Device`` or its name. By default the first GPU, or the CPU
///         if there is none.
///     config: The sizes. By default ``PoolConfig.default()``.
///
/// Raises:
///     DeviceUnavailableError: The device does not exist, or cannot be used.
///     OutOfMemoryError: There is too little memory to preallocate.
///
/// Examples:
///     >>> from tensorstream.streams import GpuMemoryPool
///     >>> pool = GpuMemoryPool("cpu")
///     >>> buffer = pool.acquire(100_000)
///     >>> del buffer
///     >>> buffer = pool.acquire(100_000)
///     >>> print(f"Hit rate: {pool.stats()['hit_rate']:.1f}%")
///     Hit rate: 50.0%
#[pyclass(frozen, module = "tensorstream.streams", name = "GpuMemoryPool")]
pub(crate) struct PyGpuMemoryPool(BlockPool<AnyDevice>);

#[pymethods]
impl PyGpuMemoryPool {
    #[new]
    #[pyo3(signature = (device=None, config=None))]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        config: Option<&PyPoolConfig>,
    ) -> PyResult<Self> {
        let (device, config) = (PyDevice::of(py, device)?, config_of(config));
        let pool = py.detach(|| BlockPool::new(device.device().clone(), config));
        pool.map(Self).map_err(|error| pool_error(py, &error))
    }

    /// Takes memory of the pool. Its bytes are undefined.
    ///
    /// Raises:
    ///     OutOfMemoryError: The pool is full.
    fn acquire(&self, py: Python<'_>, nbytes: usize) -> PyResult<PyDeviceBuffer> {
        buffer(py, self.0.device(), py.detach(|| self.0.acquire(nbytes)))
    }

    /// Gives the memory of all free blocks back to the device.
    fn clear(&self, py: Python<'_>) {
        py.detach(|| self.0.clear());
    }

    /// Returns statistics: bytes, counts of buffers, and the ``hit_rate`` in per cent.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        block_stats(py, &self.0.stats())
    }
}

/// Allocates memory of a device in the order of its streams: memory that a stream has freed can be
/// used again by later work of the stream, while its earlier work is pending.
///
/// Args:
///     device: As for ``GpuMemoryPool``.
///     limit_bytes: The most memory to allocate. Unlimited by default.
///
/// Raises:
///     DeviceUnavailableError: The device does not exist, or cannot be used.
///
/// Examples:
///     >>> from tensorstream.streams import CudaStream, StreamOrderedAllocator
///     >>> stream = CudaStream(device="cpu")
///     >>> allocator = StreamOrderedAllocator("cpu")
///     >>> buffer = allocator.allocate(1 << 20, stream)
///     >>> stream.fill(buffer, 7)
///     >>> allocator.free_for_stream(stream)
///     1048576
#[pyclass(frozen, module = "tensorstream.streams", name = "StreamOrderedAllocator")]
pub(crate) struct PyStreamOrderedAllocator(Arc<StreamOrderedPool<AnyDevice>>);

#[pymethods]
impl PyStreamOrderedAllocator {
    #[new]
    #[pyo3(signature = (device=None, *, limit_bytes=None))]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        limit_bytes: Option<usize>,
    ) -> PyResult<Self> {
        let device = PyDevice::of(py, device)?;
        let mut options = OrderedOptions::default();
        if let Some(limit_bytes) = limit_bytes {
            options = options.with_limit_bytes(limit_bytes);
        }
        Ok(Self(Arc::new(StreamOrderedPool::new(device.device().clone(), options))))
    }

    /// Allocates memory for work that is submitted to ``stream`` from now on. Its bytes are
    /// undefined.
    ///
    /// Raises:
    ///     ConfigurationError: The stream is of another device.
    ///     OutOfMemoryError: There is too little memory.
    fn allocate(
        &self,
        py: Python<'_>,
        nbytes: usize,
        stream: &PyStream,
    ) -> PyResult<PyDeviceBuffer> {
        let allocated = py.detach(|| self.0.allocate_for_stream(nbytes, &stream.stream));
        let buffer = allocated.map_err(|error| pool_error(py, &error))?;
        let allocation = Allocation::Ordered(buffer, Arc::clone(&self.0));
        let memory = Memory { device: self.0.device().clone(), allocation };
        Ok(PyDeviceBuffer { memory: Arc::new(memory) })
    }

    /// Keeps the memory of a buffer, when it is freed, until the work that was submitted to
    /// ``stream`` before is done. Needed for work of other libraries only: ``copy`` and ``fill`` do
    /// this themselves.
    ///
    /// Raises:
    ///     ConfigurationError: The buffer is not of this allocator, or was freed.
    fn record_use(
        &self,
        py: Python<'_>,
        buffer: &PyDeviceBuffer,
        stream: &PyStream,
    ) -> PyResult<()> {
        match &buffer.memory.allocation {
            Allocation::Ordered(buffer, pool) if Arc::ptr_eq(pool, &self.0) => {
                self.0.record_use(buffer, &stream.stream).map_err(|error| pool_error(py, &error))
            }
            _ => Err(configuration_error(py, "the buffer belongs to another pool")),
        }
    }

    /// Frees all memory that was allocated for ``stream``. Buffers that still exist cannot be used
    /// any more.
    ///
    /// Returns:
    ///     The number of bytes freed.
    ///
    /// Raises:
    ///     ConfigurationError: A function of a stream has called this.
    fn free_for_stream(&self, py: Python<'_>, stream: &PyStream) -> PyResult<usize> {
        exclusively(py, || self.0.free_for_stream(&stream.stream))
    }

    /// Gives free memory back to the device, except ``keep_bytes`` bytes.
    ///
    /// Returns:
    ///     The number of bytes given back.
    ///
    /// Raises:
    ///     ConfigurationError: A function of a stream has called this.
    #[pyo3(signature = (keep_bytes=0))]
    fn trim(&self, py: Python<'_>, keep_bytes: usize) -> PyResult<usize> {
        exclusively(py, || self.0.trim(keep_bytes))
    }

    /// Returns statistics: bytes and counts.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.0.stats();
        let values = PyDict::new(py);
        values.set_item("capacity_bytes", stats.capacity_bytes)?;
        values.set_item("in_use_bytes", stats.in_use_bytes)?;
        values.set_item("high_water_bytes", stats.high_water_bytes)?;
        values.set_item("pending_bytes", stats.pending_bytes)?;
        values.set_item("largest_free_bytes", stats.largest_free_bytes)?;
        values.set_item("segments", stats.segments)?;
        values.set_item("allocations", stats.allocations)?;
        values.set_item("frees", stats.frees)?;
        values.set_item("failures", stats.failures)?;
        Ok(values)
    }
}

/// Frees memory while no thread submits work.
///
/// # Errors
/// ConfigurationError in a function of a stream, for which a thread that submits work may wait.
fn exclusively(py: Python<'_>, free: impl FnOnce() -> usize + Send) -> PyResult<usize> {
    check_may_block().map_err(|error| device_error(py, &error))?;
    Ok(py.detach(|| {
        let _submitting = SUBMITTING.write();
        free()
    }))
}
