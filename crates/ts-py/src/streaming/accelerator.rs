// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Accelerator`: a device with its own memory, and PyTorch's streams on it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;

use parking_lot::Mutex;
use pyo3::prelude::*;
use tensorstream::streams::{
    AnyDevice, AnyStream, CudaDevice, Device, RuntimeDevice, RuntimeLibrary,
};

use crate::errors::configuration_error;

/// A device with its own memory, on which models run.
///
/// Args:
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
    /// The streams that were PyTorch's current one, by native handle. They must not be destroyed.
    streams: Mutex<HashMap<usize, AnyStream>>,
}

#[pymethods]
impl Accelerator {
    #[new]
    #[pyo3(signature = (ordinal, dlpack_type, current_stream, library=None))]
    fn new(
        py: Python<'_>,
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
        let (dlpack, streams) = ((dlpack_type, ordinal as i32), Mutex::default());
        Ok(Self { device, dlpack, current_stream, streams })
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

    /// The memory of the device in bytes, or None if it is not known.
    #[getter]
    fn total_bytes(&self) -> Option<u64> {
        self.device.info().total_bytes
    }
}

impl Accelerator {
    pub(super) fn device(&self) -> &AnyDevice {
        &self.device
    }

    /// Returns DLPack's device type and device number.
    pub(super) fn dlpack(&self) -> (i32, i32) {
        self.dlpack
    }

    /// Returns PyTorch's current stream on the device.
    pub(super) fn current_stream(&self, py: Python<'_>) -> PyResult<AnyStream> {
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
