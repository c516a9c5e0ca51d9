// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Device`.

use std::collections::BTreeMap;
use std::process;

use parking_lot::Mutex;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use tensorstream::streams::{AnyDevice, Device, DeviceRegistry, Error};

use crate::errors::device_error;

/// A device on which streams run: the CPU, an NVIDIA GPU, or a simulated GPU.
///
/// Args:
///     name: "cpu", "cuda", "cuda:1" and so on, or "sim". By default the first GPU, or the CPU if
///         there is none. Each name stands for the same device whenever it is opened, except that
///         each "sim" is another device. A simulated device runs its work when the program waits,
///         and raises an error if two accesses to the same memory are not ordered.
///
/// Raises:
///     ConfigurationError: No kind of device has the name.
///     DeviceUnavailableError: The device does not exist, or cannot be used.
///
/// Examples:
///     >>> from tensorstream.streams import Device
///     >>> Device("cpu").kind
///     'cpu'
#[pyclass(frozen, eq, module = "tensorstream.streams", name = "Device")]
#[derive(Clone)]
pub(crate) struct PyDevice {
    /// The name by which the device was opened.
    name: String,
    device: AnyDevice,
}

/// The devices that are open in a process, by name. Streams of one handle of a device cannot be
/// combined with those of another.
struct Open {
    process: u32,
    devices: BTreeMap<String, AnyDevice>,
}

static OPEN: Mutex<Open> = Mutex::new(Open { process: 0, devices: BTreeMap::new() });

impl PyDevice {
    pub(super) fn device(&self) -> &AnyDevice {
        &self.device
    }

    /// Opens a device. Blocks while a driver is loaded.
    pub(super) fn open(py: Python<'_>, name: Option<&str>) -> PyResult<Self> {
        let opened = py.detach(|| {
            let registry = DeviceRegistry::builtin();
            let kind = registry.choose(name.map(|name| name.split(':').next().unwrap_or(name)))?;
            let name = match name {
                None => format!("{}:0", kind.provider.name()),
                Some(name) if name.contains(':') => name.into(),
                Some(name) => format!("{name}:0"),
            };
            if name.starts_with("sim") {
                return registry.open(Some(&name)).map(|device| (name, device));
            }
            let mut open = OPEN.lock();
            if open.process != process::id() {
                // The threads of a device do not exist in a forked child.
                std::mem::forget(std::mem::take(&mut open.devices));
                open.process = process::id();
            }
            if let Some(known) = open.devices.get(&name) {
                return Ok((name, known.clone()));
            }
            let device = registry.open(Some(&name))?;
            open.devices.insert(name.clone(), device.clone());
            Ok::<_, Error>((name, device))
        });
        let (name, device) = opened.map_err(|error| device_error(py, &error))?;
        Ok(Self { name: name.strip_suffix(":0").map_or(name.clone(), Into::into), device })
    }

    /// Returns the device that an argument names: a `Device`, a name, a number of a GPU, or None
    /// for the default device.
    pub(super) fn of(py: Python<'_>, argument: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some(argument) = argument else { return Self::open(py, None) };
        if let Ok(device) = argument.cast::<Self>() {
            return Ok(device.get().clone());
        }
        if let Ok(ordinal) = argument.extract::<u32>() {
            return Self::open(py, Some(&format!("cuda:{ordinal}")));
        }
        let Ok(name) = argument.extract::<String>() else {
            return Err(PyTypeError::new_err(format!(
                "invalid device: expected a Device, a name, a number of a GPU or None, got {}",
                argument.get_type().name()?
            )));
        };
        Self::open(py, Some(&name))
    }
}

impl PartialEq for PyDevice {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && !self.name.starts_with("sim")
    }
}

#[pymethods]
impl PyDevice {
    #[new]
    #[pyo3(signature = (name=None))]
    fn new(py: Python<'_>, name: Option<&str>) -> PyResult<Self> {
        Self::open(py, name)
    }

    /// The name, such as "cpu" or "cuda:1".
    #[getter]
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// "cpu", "cuda" or "sim".
    #[getter]
    fn kind(&self) -> &str {
        self.name.split(':').next().unwrap_or(&self.name)
    }

    /// The memory of the device in bytes, or None if it is not known.
    #[getter]
    fn total_bytes(&self) -> Option<u64> {
        self.device.info().total_bytes
    }

    /// The least and the most urgent level of streams. Smaller levels are more urgent.
    #[getter]
    fn priorities(&self) -> (i32, i32) {
        let range = self.device.info().priorities;
        (range.least, range.greatest)
    }

    /// Returns how many bytes of the device's memory no program uses now, or None if this is not
    /// known.
    ///
    /// Raises:
    ///     DeviceError: The driver failed.
    fn available_bytes(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        py.detach(|| self.device.available_bytes()).map_err(|error| device_error(py, &error))
    }

    /// Blocks until all work on the device is done.
    ///
    /// Raises:
    ///     DeviceError: The device failed. Failures of work are errors of its stream only.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.device.synchronize()).map_err(|error| device_error(py, &error))
    }

    fn __repr__(&self) -> String {
        format!("Device({:?})", self.name())
    }
}
