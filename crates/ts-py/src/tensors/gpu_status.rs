// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `GpuStatus`.

use pyo3::prelude::*;
use tensorstream::streams::GpuStatus;

/// Reports whether CUDA GPUs can be used, and the reason if they cannot.
///
/// Examples:
///     >>> import tensorstream as ts
///     >>> device = "cuda:0" if ts.GpuStatus.detect().is_available else "cpu"
///     >>> ts.Tensor.zeros([2, 3], "float32", device=device).nbytes
///     24
#[pyclass(frozen, module = "tensorstream", name = "GpuStatus")]
pub(crate) struct PyGpuStatus(GpuStatus);

#[pymethods]
impl PyGpuStatus {
    /// Detects the GPUs. Later calls return the result of the first call.
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

    /// Returns the number of GPUs, or the reason why there are none, as a text. The same as
    /// ``str(status)``.
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
