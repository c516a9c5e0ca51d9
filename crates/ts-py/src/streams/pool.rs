// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `StreamPool`.

use std::time::Duration;

use pyo3::prelude::*;
use tensorstream::streams::{AllocationStrategy, AnyDevice, AnyStream, StreamPool, WorkloadType};

use super::device::PyDevice;
use super::stream::{PyStream, priority};
use super::{named, wait};
use crate::errors::device_error;

const STRATEGIES: [(&str, AllocationStrategy); 5] = [
    ("round_robin", AllocationStrategy::RoundRobin),
    ("load_balanced", AllocationStrategy::LoadBalanced),
    ("priority", AllocationStrategy::Priority),
    ("workload", AllocationStrategy::Workload),
    ("learned", AllocationStrategy::Learned),
];

const WORKLOADS: [(&str, WorkloadType); 4] = [
    ("compute", WorkloadType::Compute),
    ("memory", WorkloadType::Memory),
    ("mixed", WorkloadType::Mixed),
    ("coordination", WorkloadType::Coordination),
];

fn name_of(strategy: AllocationStrategy) -> &'static str {
    let found = STRATEGIES.iter().find(|(_, known)| *known == strategy);
    found.map_or("unknown", |(name, _)| name)
}

/// A pool of streams of one device.
///
/// Args:
///     count: The number of streams, clamped to 1 to 256. Of each four, one has a high and one a
///         low priority.
///     strategy: An ``AllocationStrategy``, or its value.
///     max_count: With this, the pool begins with ``count`` streams, and adds and removes streams
///         as work waits, up to this number.
///     device: As for ``CudaStream``.
///
/// Raises:
///     ValueError: ``strategy`` is unknown.
///     DeviceUnavailableError: The device does not exist, or cannot be used.
///
/// Examples:
///     >>> from tensorstream.streams import AllocationStrategy, StreamPool, WorkloadType
///     >>> pool = StreamPool(4, AllocationStrategy.WORKLOAD, device="cpu")
///     >>> kinds = (WorkloadType.COMPUTE, WorkloadType.MEMORY, WorkloadType.COORDINATION)
///     >>> len({pool.get_stream_for_workload(kind).id for kind in kinds})
///     3
#[pyclass(frozen, module = "tensorstream.streams", name = "StreamPool")]
pub(crate) struct PyStreamPool {
    pool: StreamPool<AnyDevice>,
    device: PyDevice,
}

impl PyStreamPool {
    fn made(&self, stream: &AnyStream) -> PyStream {
        PyStream::new(stream.clone(), &self.device)
    }
}

#[pymethods]
impl PyStreamPool {
    #[new]
    #[pyo3(signature = (count=8, strategy="load_balanced", *, max_count=None, device=None))]
    fn new(
        py: Python<'_>,
        count: usize,
        strategy: &str,
        max_count: Option<usize>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let strategy = named("strategy", strategy, &STRATEGIES)?;
        let device = PyDevice::of(py, device)?;
        let pool = py.detach(|| {
            let device = device.device().clone();
            match max_count {
                None => StreamPool::new(device, count, strategy),
                Some(most) => StreamPool::with_bounds(device, count..=most, strategy),
            }
        });
        Ok(Self { pool: pool.map_err(|error| device_error(py, &error))?, device })
    }

    /// The device.
    #[getter]
    fn device(&self) -> PyDevice {
        self.device.clone()
    }

    /// The strategy: an ``AllocationStrategy`` has the same value. It can be set.
    #[getter]
    fn strategy(&self) -> &'static str {
        name_of(self.pool.strategy())
    }

    #[setter]
    fn set_strategy(&self, strategy: &str) -> PyResult<()> {
        self.pool.set_strategy(named("strategy", strategy, &STRATEGIES)?);
        Ok(())
    }

    /// The streams.
    #[getter]
    fn streams(&self) -> Vec<PyStream> {
        self.pool.streams().map(|stream| self.made(stream)).collect()
    }

    /// Returns a stream.
    fn get_stream(&self) -> PyStream {
        self.made(self.pool.stream())
    }

    /// Returns a stream for a kind of work.
    ///
    /// Args:
    ///     workload: A ``WorkloadType``, or its value.
    ///     nbytes: How much data the work handles, which ``AllocationStrategy.LEARNED`` uses.
    #[pyo3(signature = (workload, nbytes=0))]
    fn get_stream_for_workload(&self, workload: &str, nbytes: u64) -> PyResult<PyStream> {
        let workload = named("workload", workload, &WORKLOADS)?;
        Ok(self.made(self.pool.stream_for_work(workload, nbytes)))
    }

    /// Returns the least busy stream of a priority. Creates one if there is none. If the pool is
    /// full, returns a stream of the nearest priority.
    ///
    /// Args:
    ///     level: "high", "normal", "low", or a level as in CUDA.
    fn get_priority_stream(&self, py: Python<'_>, level: &Bound<'_, PyAny>) -> PyResult<PyStream> {
        let stream = self.pool.priority_stream(priority(level)?);
        stream.map(|stream| self.made(stream)).map_err(|error| device_error(py, &error))
    }

    /// Returns whether a stream has no pending work.
    fn has_ready_streams(&self) -> bool {
        self.pool.has_ready()
    }

    /// Blocks until a stream has no pending work.
    ///
    /// Args:
    ///     timeout: The longest time in seconds. None waits as long as it takes.
    ///
    /// Returns:
    ///     The stream.
    ///
    /// Raises:
    ///     DeviceError: All streams of the pool have failed.
    ///         TimeoutError: No stream is ready after ``timeout``.
    #[pyo3(signature = (timeout=None))]
    fn wait_for_any_ready(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<PyStream> {
        let mut found = None;
        wait(py, timeout, || {
            found = self.pool.wait_any_ready(Duration::ZERO)?.cloned();
            Ok(found.is_some())
        })?;
        found.map(|stream| self.made(&stream)).ok_or_else(|| unreachable!("the wait has ended"))
    }

    /// Sets the number of streams, clamped to 1 to 256. Work on streams that the pool no longer
    /// returns goes on.
    ///
    /// Raises:
    ///     DeviceError: The device cannot create a stream.
    fn resize(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        py.detach(|| self.pool.resize(count)).map_err(|error| device_error(py, &error))
    }

    /// Adds the time of a piece of work that the program has measured.
    ///
    /// Args:
    ///     stream: A stream of the pool.
    ///     workload: A ``WorkloadType``, or its value.
    ///     seconds: The time.
    ///     nbytes: How much data the work handled, which trains ``AllocationStrategy.LEARNED``.
    #[pyo3(signature = (stream, workload, seconds, nbytes=0))]
    fn record_workload_completion(
        &self,
        stream: &PyStream,
        workload: &str,
        seconds: f64,
        nbytes: u64,
    ) -> PyResult<()> {
        let workload = named("workload", workload, &WORKLOADS)?;
        let time = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
        self.pool.record_work(super::stream::id_of(stream), workload, nbytes, time);
        Ok(())
    }

    /// Returns how long ``AllocationStrategy.LEARNED`` expects a piece of work to take.
    ///
    /// Args:
    ///     workload: A ``WorkloadType``, or its value.
    ///     nbytes: How much data the work handles.
    ///
    /// Returns:
    ///     The time in seconds, or None before the first training.
    #[pyo3(signature = (workload, nbytes=0))]
    fn expected_time(&self, workload: &str, nbytes: u64) -> PyResult<Option<f64>> {
        let workload = named("workload", workload, &WORKLOADS)?;
        Ok(self.pool.expected_time(workload, nbytes).as_ref().map(Duration::as_secs_f64))
    }

    /// Returns the average time of a kind of work in seconds, or None if none is known.
    fn average_workload_time(&self, workload: &str) -> PyResult<Option<f64>> {
        let workload = named("workload", workload, &WORKLOADS)?;
        Ok(self.pool.average_time(workload).as_ref().map(Duration::as_secs_f64))
    }

    /// Changes the strategy if measurements say that another one is better.
    ///
    /// Returns:
    ///     The strategy before, the new one, and the measurement, or None if nothing changed.
    fn optimize(&self) -> Option<(&'static str, &'static str, String)> {
        let change = self.pool.optimize()?;
        Some((name_of(change.from), name_of(change.to), change.evidence))
    }

    fn __len__(&self) -> usize {
        self.pool.len()
    }

    fn __repr__(&self) -> String {
        format!("StreamPool({} streams on {})", self.pool.len(), self.device.name())
    }
}
