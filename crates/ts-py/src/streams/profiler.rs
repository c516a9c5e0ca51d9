// SPDX-License-Identifier: MIT OR Apache-2.0
//! The classes `StreamProfiler` and `Scope`.

use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorstream::streams::{
    Activity, ActivityStats, AnyDevice, Profile, ScopeGuard, StreamId, StreamProfiler,
};

use super::device::PyDevice;
use super::stream::{PyStream, id_of};
use crate::errors::device_error;

/// Measures the time of work on streams of a device, with events of the device.
///
/// Args:
///     device: As for ``CudaStream``.
///
/// Examples:
///     >>> from tensorstream.streams import CudaStream, StreamProfiler
///     >>> stream = CudaStream(device="cpu")
///     >>> profiler = StreamProfiler(device="cpu")
///     >>> with profiler.scope(stream, "layer 0"):
///     ...     stream.launch_host_fn(lambda: None)
///     >>> report = profiler.report()
///     >>> [(each["name"], each["count"]) for each in report["all"]]
///     [('layer 0', 1)]
#[pyclass(frozen, module = "tensorstream.streams", name = "StreamProfiler")]
pub(crate) struct PyProfiler(StreamProfiler<AnyDevice>);

/// A part of the work of a stream that a profiler measures, from the start to the end of a ``with``
/// block.
#[pyclass(frozen, module = "tensorstream.streams", name = "Scope")]
pub(crate) struct PyScope {
    profiler: Py<PyProfiler>,
    stream: Py<PyStream>,
    activity: Activity,
    bytes: u64,
    open: Mutex<Option<ScopeGuard<AnyDevice>>>,
}

#[pymethods]
impl PyScope {
    fn __enter__(this: Py<Self>, py: Python<'_>) -> PyResult<Py<Self>> {
        let own = this.get();
        let (profiler, stream) = (&own.profiler.get().0, &own.stream.get().stream);
        let open = match &own.activity {
            Activity::Scope(name) => profiler.scope(stream, name.clone()),
            Activity::Transfer => profiler.transfer(stream, own.bytes),
            Activity::Launch(name) => profiler.launch(stream, name.clone()),
        };
        *own.open.lock() = Some(open.map_err(|error| device_error(py, &error))?);
        Ok(this)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyAny>) {
        drop(self.open.lock().take());
    }
}

#[pymethods]
impl PyProfiler {
    #[new]
    #[pyo3(signature = (*, device=None))]
    fn new(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let device = PyDevice::of(py, device)?;
        let made = py.detach(|| StreamProfiler::new(device.device().clone()));
        made.map(Self).map_err(|error| device_error(py, &error))
    }

    /// Whether scopes are measured. It can be set.
    #[getter]
    fn enabled(&self) -> bool {
        self.0.is_enabled()
    }

    #[setter]
    fn set_enabled(&self, enabled: bool) {
        self.0.set_enabled(enabled);
    }

    /// Measures the work that is submitted to a stream in a ``with`` block.
    fn scope(this: Py<Self>, stream: Py<PyStream>, name: String) -> PyScope {
        Self::open(this, stream, Activity::Scope(name), 0)
    }

    /// Like ``scope``, for copies of ``nbytes`` bytes in total.
    fn transfer(this: Py<Self>, stream: Py<PyStream>, nbytes: u64) -> PyScope {
        Self::open(this, stream, Activity::Transfer, nbytes)
    }

    /// Like ``scope``, for a kernel or function.
    fn launch(this: Py<Self>, stream: Py<PyStream>, name: String) -> PyScope {
        Self::open(this, stream, Activity::Launch(name), 0)
    }

    /// Adds a time that the program has measured. Reports list it separately,
    /// under ``reported``.
    fn record_operation(&self, stream: &PyStream, name: String, seconds: f64) {
        let time = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
        self.0.record_operation(id_of(stream), Activity::Scope(name), time, 0);
    }

    /// Blocks until all scopes that were closed have ended, and returns the times.
    ///
    /// Returns:
    ///     A ``ProfileReport``.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let profile = self.finish(py)?;
        let report = PyDict::new(py);
        let streams = PyDict::new(py);
        for stream in profile.streams() {
            streams.set_item(stream.0, rows(py, &profile, Some(stream))?)?;
        }
        let reported = profile.reported_times(None);
        report.set_item("total_streams", profile.streams().len())?;
        report.set_item("streams", streams)?;
        report.set_item("all", rows(py, &profile, None)?)?;
        let reported: PyResult<Vec<_>> =
            reported.iter().map(|(activity, stats)| row(py, activity, stats)).collect();
        report.set_item("reported", reported?)?;
        report.set_item("busy_seconds", profile.busy().0.as_secs_f64())?;
        report.set_item("overlap_percent", profile.overlap_percent())?;
        report.set_item("lost", profile.lost)?;
        Ok(report)
    }

    /// Blocks as ``report`` does, and returns a JSON trace for Perfetto and Chrome.
    fn chrome_trace(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.finish(py)?.chrome_trace())
    }

    /// Blocks as ``report`` does, and returns the times as a table.
    fn table(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.finish(py)?.to_string())
    }
}

impl PyProfiler {
    fn open(this: Py<Self>, stream: Py<PyStream>, activity: Activity, bytes: u64) -> PyScope {
        PyScope { profiler: this, stream, activity, bytes, open: Mutex::default() }
    }

    fn finish(&self, py: Python<'_>) -> PyResult<Profile> {
        py.detach(|| self.0.finish()).map_err(|error| device_error(py, &error))
    }
}

/// The times of each activity on a stream, or on all streams.
fn rows<'py>(
    py: Python<'py>,
    profile: &Profile,
    stream: Option<StreamId>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let times = profile.times(stream);
    times.iter().map(|(activity, stats)| row(py, activity, stats)).collect()
}

fn row<'py>(
    py: Python<'py>,
    activity: &Activity,
    stats: &ActivityStats,
) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("name", activity.to_string())?;
    row.set_item("count", stats.count)?;
    let times = [
        ("total", stats.total),
        ("min", stats.min),
        ("p50", stats.p50),
        ("p90", stats.p90),
        ("p99", stats.p99),
        ("max", stats.max),
    ];
    for (name, time) in times {
        row.set_item(name, time.as_secs_f64())?;
    }
    row.set_item("bytes", stats.bytes)?;
    Ok(row)
}
