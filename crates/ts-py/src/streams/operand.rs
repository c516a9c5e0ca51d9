// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that work on a stream uses: of a pool, or of an object of Python.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::RwLock;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use tensorstream::pool::{
    self, DeviceBuffer, PooledBuffer, StreamOrderedAllocator, StreamOrderedPool,
};
use tensorstream::streams::{
    AnyDevice, AnyStream, Device, Error, HostFn, MemoryRange, Stream, check_may_block,
};

use crate::errors::{configuration_error, device_error, pool_error};

/// Read while work is submitted, and written while memory of a stream-ordered allocator is freed or
/// given back to the device: both depend on which work is submitted.
pub(super) static SUBMITTING: RwLock<()> = RwLock::new(());

/// Memory of a pool.
pub(super) struct Memory {
    pub(super) device: AnyDevice,
    pub(super) allocation: Allocation,
}

pub(super) enum Allocation {
    Pooled(PooledBuffer<AnyDevice>),
    Ordered(DeviceBuffer<AnyDevice>, Arc<StreamOrderedPool<AnyDevice>>),
}

impl Memory {
    pub(super) fn len(&self) -> usize {
        match &self.allocation {
            Allocation::Pooled(buffer) => buffer.len(),
            Allocation::Ordered(buffer, _) => buffer.len(),
        }
    }

    /// Returns the address range for work that is submitted to a stream next, and keeps the memory
    /// from being freed before this work.
    fn use_on(&self, stream: &AnyStream) -> Result<MemoryRange, pool::Error> {
        if !self.device.owns(stream) {
            let device = self.device.info().name.clone();
            return Err(Error::ForeignStream { stream: stream.id(), device }.into());
        }
        match &self.allocation {
            Allocation::Pooled(buffer) => Ok(buffer.range()),
            Allocation::Ordered(buffer, pool) => {
                pool.record_use(buffer, stream)?;
                buffer.range()
            }
        }
    }
}

/// The memory of a Python object. It is given back under the GIL, which is not possible any more
/// while the interpreter shuts down.
struct Exported(Option<PyBuffer<u8>>);

impl Exported {
    fn range(&self) -> MemoryRange {
        let Some(buffer) = &self.0 else { unreachable!("only `drop` takes the buffer") };
        MemoryRange::new(buffer.buf_ptr().cast(), buffer.len_bytes())
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        let mut buffer = self.0.take();
        if Python::try_attach(|_| drop(buffer.take())).is_none() {
            std::mem::forget(buffer);
        }
    }
}

enum Owner {
    /// A part of the memory of a pool.
    Pool(Arc<Memory>, Range<usize>),
    Python(Exported),
}

/// Memory that work on a stream uses.
pub(super) struct Operand(Owner);

impl Operand {
    /// Returns the memory of a `DeviceBuffer`, of an object with the buffer protocol, or of a
    /// PyTorch tensor on the host.
    ///
    /// # Errors
    /// BufferError, TypeError or RuntimeError if the object has no such memory.
    /// ConfigurationError if it is read-only, and `writes` is true.
    pub(super) fn of(object: &Bound<'_, PyAny>, writes: bool) -> PyResult<Self> {
        let py = object.py();
        if let Ok(buffer) = object.cast::<PyDeviceBuffer>() {
            let memory = &buffer.get().memory;
            return Ok(Self::part(memory, 0..memory.len()));
        }
        let array = match object.hasattr("detach")? {
            true => &object.call_method0("detach")?.call_method0("numpy")?,
            false => object,
        };
        let view = py.import("builtins")?.getattr("memoryview")?.call1((array,))?;
        let buffer = PyBuffer::<u8>::get(&view.call_method1("cast", ("B",))?)?;
        if writes && buffer.readonly() {
            return Err(configuration_error(py, "cannot write to read-only memory"));
        }
        Ok(Self(Owner::Python(Exported(Some(buffer)))))
    }

    /// Returns a part of the memory of a pool. It must be inside of the memory.
    pub(super) fn part(memory: &Arc<Memory>, part: Range<usize>) -> Self {
        Self(Owner::Pool(Arc::clone(memory), part))
    }

    pub(super) fn len(&self) -> usize {
        match &self.0 {
            Owner::Pool(_, part) => part.len(),
            Owner::Python(exported) => exported.range().len(),
        }
    }

    fn use_on(&self, stream: &AnyStream) -> Result<MemoryRange, pool::Error> {
        match &self.0 {
            Owner::Pool(memory, part) => Ok(memory.use_on(stream)?.slice(part.clone())),
            Owner::Python(exported) => Ok(exported.range()),
        }
    }
}

/// Calls `work` with the ranges of the operands, which it submits work on. Keeps the operands until
/// this work is done.
///
/// # Errors
/// ConfigurationError if the memory was freed or is that of another device, and DeviceError if the
/// stream has failed.
pub(super) fn submit<const N: usize>(
    py: Python<'_>,
    stream: &AnyStream,
    operands: [Operand; N],
    work: impl FnOnce([MemoryRange; N]) -> Result<(), Error> + Send,
) -> PyResult<()> {
    let submitted = py.detach(|| {
        // A blocking copy waits for functions that submit work, even if another thread wants to
        // write.
        let _submitting = SUBMITTING.read_recursive();
        let mut ranges = Vec::with_capacity(N);
        for operand in &operands {
            ranges.push(operand.use_on(stream)?);
        }
        let ranges = ranges.try_into().unwrap_or_else(|_| unreachable!("one for each operand"));
        work(ranges)?;
        let operands = Arc::new(operands);
        let kept = Arc::clone(&operands);
        let keeping = stream.launch_host_fn(HostFn::new(move || drop(kept)));
        if keeping.is_err() {
            // The work may be pending, and nothing else waits for it.
            match check_may_block() {
                Ok(()) => drop(stream.synchronize()),
                Err(_) => std::mem::forget(operands),
            }
        }
        Ok(keeping?)
    });
    submitted.map_err(|error| match &error {
        pool::Error::Device(error) => device_error(py, error),
        error => pool_error(py, error),
    })
}

/// Submits a copy of all bytes.
///
/// # Errors
/// ConfigurationError if the sizes differ, and those of [`submit`].
pub(super) fn copy(py: Python<'_>, stream: &AnyStream, to: Operand, from: Operand) -> PyResult<()> {
    if to.len() != from.len() {
        let what = format!("cannot copy {} bytes to {} bytes", from.len(), to.len());
        return Err(configuration_error(py, &what));
    }
    // SAFETY: `submit` keeps both memories until the work is done, and Python objects share their
    // memory with whoever has the object.
    submit(py, stream, [to, from], |[to, from]| unsafe { stream.copy(to, from) })
}

/// Memory of a pool. It returns to the pool when the object is deleted and all work on it is
/// done. ``CudaStream.copy`` and ``CudaStream.fill`` use it.
///
/// Examples:
///     >>> from tensorstream.streams import CudaStream, GpuMemoryPool
///     >>> stream = CudaStream(device="cpu")
///     >>> buffer = GpuMemoryPool(device="cpu").acquire(4)
///     >>> buffer.write(stream, b"data")
///     >>> buffer.read(stream)
///     b'data'
#[pyclass(frozen, module = "tensorstream.streams", name = "DeviceBuffer")]
pub(crate) struct PyDeviceBuffer {
    pub(super) memory: Arc<Memory>,
}
