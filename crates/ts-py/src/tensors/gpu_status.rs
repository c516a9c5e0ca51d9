// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `GpuStatus`.

use pyo3::prelude::*;
use tensorstream::streams::GpuStatus;

/// Whether CUDA GPUs can be used, and if not, why.
#[pyclass(frozen, module = "tensorstream", name = "GpuStatus")]
pub(crate) struct PyGpuStatus(GpuStatus);

#[pymethods]
impl PyGpuStatus {
    /// Detects the GPUs. Later calls return the result of the first one.
    #[staticmethod]
    fn detect() -> Self {
        Self(GpuStatus::detect())
    }

    /// One of "NotCompiled", "NoCuda", "NoDevices" and "Available".
    #[getter]
    fn kind(&self) -> &'static str {
        match self.0 {
            GpuStatus::NotCompiled => "NotCompiled",
            GpuStatus::NoCuda(_) => "NoCuda",
            GpuStatus::NoDevices => "NoDevices",
            GpuStatus::Available { .. } => "Available",
        }
    }

    /// Whether there is at least one GPU.
    #[getter]
    fn is_available(&self) -> bool {
        self.0.is_available()
    }

    /// The number of GPUs.
    #[getter]
    fn device_count(&self) -> usize {
        self.0.device_count()
    }

    /// Whether this build supports GPUs.
    #[getter]
    fn cuda_compiled(&self) -> bool {
        self.0 != GpuStatus::NotCompiled
    }

    /// Returns a description: the GPUs, or why there are none. The same as ``str(status)``.
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
