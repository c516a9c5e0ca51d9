// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Accelerator`: a device with its own memory, and PyTorch's streams on it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;

use parking_lot::Mutex;
use pyo3::prelude::*;
use tensorstream::io::{GpuRead, ReadPath};
use tensorstream::pool::{
    self, DeviceBuffer, OrderedOptions, PinnedMemoryPool, PoolConfig, StreamOrderedAllocator,
    StreamOrderedPool,
};
use tensorstream::remote::OrderedMemory;
use tensorstream::streams::{
    AnyDevice, AnyStream, CudaDevice, Device, DeviceKind, RuntimeDevice, RuntimeLibrary,
    StreamPriority,
};

use crate::errors::configuration_error;

/// The size of a piece of pinned memory through which tensors are received, in bytes.
const PIECE_BYTES: usize = 4 << 20;
/// The memory for received tensors that stays allocated when they are gone, in bytes.
const KEPT_BYTES: usize = 64 << 20;

/// A device with its own memory, on which models run.
///
/// Args:
///     torch_name: PyTorch's name of the device, such as "cuda:0".
///     ordinal: The number of the device, from 0.
///     dlpack_type: The type of the device in DLPack.
///     current_stream: Returns the native handle of PyTorch's current stream on the device.
///     library: The path of a library with the functions of CUDA's runtime, and the prefix of
///         their names. None for an NVIDIA GPU.
///
/// Raises:
///     ConfigurationError: There is no such device, or the library cannot be used.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Accelerator {
    device: AnyDevice,
    /// DLPack's device type and device number.
    dlpack: (i32, i32),
    current_stream: Py<PyAny>,
    /// PyTorch's name of the device.
    torch_name: String,
    /// The memory for tensors from other computers, once there are any.
    receiving: Mutex<Option<OrderedMemory<AnyDevice>>>,
    /// The streams that were PyTorch's current one, by native handle. They must not be destroyed.
    streams: Mutex<HashMap<usize, AnyStream>>,
}

#[pymethods]
impl Accelerator {
    #[new]
    #[pyo3(signature = (torch_name, ordinal, dlpack_type, current_stream, library=None))]
    fn new(
        py: Python<'_>,
        torch_name: String,
        ordinal: u32,
        dlpack_type: i32,
        current_stream: Py<PyAny>,
        library: Option<(PathBuf, String)>,
    ) -> PyResult<Self> {
        let open = || match &library {
            Some((path, prefix)) => {
                // SAFETY: the caller of `register_accelerator` is responsible for the library.
                let library = unsafe { RuntimeLibrary::load(path, prefix) }?;
                Ok(AnyDevice::from(RuntimeDevice::new(&library, ordinal as usize)?))
            }
            None => CudaDevice::new(ordinal as usize).map(AnyDevice::from),
        };
        let device = py.detach(open).map_err(|e| configuration_error(py, &e.to_string()))?;
        let dlpack = (dlpack_type, ordinal as i32);
        let (receiving, streams) = (Mutex::default(), Mutex::default());
        Ok(Self { device, dlpack, current_stream, torch_name, receiving, streams })
    }

    /// The name of the device.
    #[getter]
    fn name(&self) -> &str {
        &self.device.info().name
    }

    /// Returns how many bytes of the device's memory no program uses now, or None if this is not
    /// known.
    fn available_bytes(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let available = py.detach(|| self.device.available_bytes());
        available.map_err(|e| configuration_error(py, &e.to_string()))
    }

    /// Returns why the device cannot read files straight into its memory, or None if it can. Loads
    /// GPUDirect Storage.
    fn why_no_direct_reads(&self, py: Python<'_>) -> Option<String> {
        if self.device.info().kind != DeviceKind::Cuda {
            return Some("only NVIDIA GPUs read files into their own memory".into());
        }
        match py.detach(GpuRead::path) {
            Ok(ReadPath::GpuDirect) => None,
            Ok(_) => Some("GPUDirect Storage is in compatibility mode here".into()),
            Err(why) => Some(why),
        }
    }

    /// The memory of the device in bytes, or None if it is not known.
    #[getter]
    fn total_bytes(&self) -> Option<u64> {
        self.device.info().total_bytes
    }
}

impl Accelerator {
    pub(crate) fn device(&self) -> &AnyDevice {
        &self.device
    }

    /// Returns DLPack's device type and device number.
    pub(crate) fn dlpack(&self) -> (i32, i32) {
        self.dlpack
    }

    pub(crate) fn torch_name(&self) -> &str {
        &self.torch_name
    }

    /// Returns memory on the device for tensors from other computers. It is filled through pinned
    /// memory.
    ///
    /// # Errors
    /// Returns an error if the device cannot create a stream.
    pub(crate) fn receiving(&self) -> Result<OrderedMemory<AnyDevice>, pool::Error> {
        let mut receiving = self.receiving.lock();
        if let Some(memory) = &*receiving {
            return Ok(memory.clone());
        }
        let pinned = PoolConfig::default().with_max_block_bytes(PIECE_BYTES);
        let pinned = PinnedMemoryPool::new(self.device.clone(), pinned)?;
        let pool = StreamOrderedPool::new(self.device.clone(), OrderedOptions::default());
        let stream = self.device.create_stream(StreamPriority::Normal)?;
        Ok(receiving.insert(OrderedMemory::new(pinned, pool, stream)).clone())
    }

    /// Frees memory of [`receiving`](Self::receiving) when the work that was submitted to
    /// PyTorch's current stream is done.
    pub(crate) fn release(&self, buffer: DeviceBuffer<AnyDevice>) {
        let Ok(memory) = self.receiving() else { return drop(buffer) };
        let stream = Python::try_attach(|py| self.current_stream(py).ok()).flatten();
        let recorded = stream.map(|stream| memory.pool().record_use(&buffer, &stream));
        if !matches!(recorded, Some(Ok(()))) {
            // Even if this fails, the work has ended.
            let _ = self.device.synchronize();
        }
        drop(buffer);
        memory.pool().trim(KEPT_BYTES);
    }

    /// Returns PyTorch's current stream on the device.
    pub(crate) fn current_stream(&self, py: Python<'_>) -> PyResult<AnyStream> {
        let handle: usize = self.current_stream.bind(py).call0()?.extract()?;
        let mut streams = self.streams.lock();
        if let Some(stream) = streams.get(&handle) {
            return Ok(stream.clone());
        }
        let pointer = std::ptr::with_exposed_provenance_mut::<c_void>(handle);
        // SAFETY: the handle is that of a stream on this device. PyTorch never destroys its own
        // streams, and the documentation requires this of others.
        let stream = unsafe { self.device.external_stream(pointer) };
        let stream = stream.map_err(|e| configuration_error(py, &e.to_string()))?;
        streams.insert(handle, stream.clone());
        Ok(stream)
    }
}
