// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `EnergyMeter`.

use std::path::PathBuf;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorstream::streams::EnergyMeter;

use crate::errors::device_error;

/// The energy counters of this computer's processors (RAPL), as Linux shows them.
///
/// They count what the whole computer does. GPUs are not part of them. Most virtual machines have
/// no such counters, and only root can read them by default.
///
/// Args:
///     folder: A folder with the layout of ``/sys/class/powercap``, which is the default.
///
/// Raises:
///     DeviceUnavailableError: There are no counters, or this user cannot read them.
#[pyclass(frozen, module = "tensorstream.streams", name = "EnergyMeter")]
pub(crate) struct PyEnergyMeter(Mutex<EnergyMeter>);

#[pymethods]
impl PyEnergyMeter {
    #[new]
    #[pyo3(signature = (folder=None))]
    fn new(py: Python<'_>, folder: Option<PathBuf>) -> PyResult<Self> {
        let opened = folder.map_or_else(EnergyMeter::open, |folder| EnergyMeter::open_at(&folder));
        opened.map(|meter| Self(Mutex::new(meter))).map_err(|error| device_error(py, &error))
    }

    /// Returns the energy in joules since this object was made, by counter: "package-0" for a
    /// processor, "package-0/dram" for its memory, other parts of it, and "total". Read at least
    /// once in five minutes, because counters begin again at 0.
    ///
    /// Raises:
    ///     DeviceUnavailableError: A counter cannot be read any more.
    fn read<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let energy = self.0.lock().read().map_err(|error| device_error(py, &error))?;
        let result = PyDict::new(py);
        for domain in &energy.domains {
            result.set_item(&domain.name, domain.joules)?;
        }
        result.set_item("total", energy.joules())?;
        Ok(result)
    }
}
