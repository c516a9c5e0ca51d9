// SPDX-License-Identifier: MIT OR Apache-2.0
//! The classes `MultiStreamCoordinator` and `Execution`.

use std::collections::HashMap;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorstream::streams::{
    AnyDevice, AnyStream, CancelToken, Error, Execution, MultiStreamCoordinator, Status, Stream,
    TaskGraph,
};

use super::device::PyDevice;
use super::stream::{PyStream, host_fn, streams_of, work};
use super::wait;
use crate::errors::device_error;

/// Orders work on several streams of one device, without waiting for it.
///
/// Args:
///     streams: The streams, at least one.
///
/// Raises:
///     ValueError: ``streams`` is empty.
///     ConfigurationError: The streams are of several devices.
///
/// Examples:
///     >>> from tensorstream.streams import CudaStream, MultiStreamCoordinator
///     >>> coordinator = MultiStreamCoordinator([CudaStream(device="cpu") for _ in range(2)])
///     >>> done = []
///     >>> tasks = {name: lambda name=name: done.append(name) for name in ("load", "compute")}
///     >>> coordinator.execute(tasks, {"compute": ["load"]}).wait()
///     >>> done
///     ['load', 'compute']
#[pyclass(frozen, module = "tensorstream.streams", name = "MultiStreamCoordinator")]
pub(crate) struct PyCoordinator {
    coordinator: MultiStreamCoordinator<AnyDevice>,
    device: PyDevice,
}

#[pymethods]
impl PyCoordinator {
    #[new]
    fn new(py: Python<'_>, streams: Vec<Py<PyStream>>) -> PyResult<Self> {
        let (device, streams) = streams_of(py, &streams)?;
        let coordinator = MultiStreamCoordinator::new(device.device().clone(), streams);
        Ok(Self { coordinator, device })
    }

    /// The streams.
    #[getter]
    fn streams(&self) -> Vec<PyStream> {
        let made = |stream: &_| PyStream::new(Clone::clone(stream), &self.device);
        self.coordinator.streams().iter().map(made).collect()
    }

    /// Makes the later work of one stream wait for the work submitted to another one so far.
    fn order(&self, py: Python<'_>, later: &PyStream, earlier: &PyStream) -> PyResult<()> {
        let ordered = self.coordinator.order(&later.stream, &earlier.stream);
        ordered.map_err(|error| device_error(py, &error))
    }

    /// Makes the later work of each stream wait for the work submitted to all streams so far. The
    /// program does not wait.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.coordinator.barrier().map_err(|error| device_error(py, &error))
    }

    /// Runs functions, on the streams in turn.
    ///
    /// Args:
    ///     functions: Each is called once, in another thread.
    fn execute_parallel(&self, py: Python<'_>, functions: Vec<Py<PyAny>>) -> PyResult<PyExecution> {
        let tasks = functions
            .into_iter()
            .map(|function| move |stream: &AnyStream| stream.launch_host_fn(host_fn(function)));
        let execution = py.detach(|| self.coordinator.execute_parallel(tasks.collect::<Vec<_>>()));
        let execution = execution.map_err(|error| device_error(py, &error))?;
        Ok(PyExecution { execution })
    }

    /// Runs functions in an order.
    ///
    /// Args:
    ///     tasks: The functions by name. Each is called once, in another thread.
    ///     after: For a name, the names of the tasks that run before it.
    ///
    /// Raises:
    ///     ValueError: A name in ``after`` is not a task.
    ///     ConfigurationError: Tasks wait for each other.
    #[pyo3(signature = (tasks, after=None))]
    fn execute(
        &self,
        py: Python<'_>,
        tasks: &Bound<'_, PyDict>,
        after: Option<HashMap<String, Vec<String>>>,
    ) -> PyResult<PyExecution> {
        let mut graph = TaskGraph::new();
        let mut known = HashMap::new();
        for (name, function) in tasks {
            let (name, function) = (name.extract::<String>()?, function.unbind());
            let submit = move |stream: &AnyStream| stream.launch_host_fn(host_fn(function));
            let task = graph.add(name.clone(), submit);
            known.insert(name, task);
        }
        let task = |name: &String| {
            known.get(name).copied().ok_or_else(|| {
                let names = known.keys().collect::<std::collections::BTreeSet<_>>();
                PyValueError::new_err(format!("no task has the name {name:?}: there are {names:?}"))
            })
        };
        for (later, earlier) in after.into_iter().flatten() {
            for earlier in &earlier {
                let added = graph.add_dependency(task(&later)?, task(earlier)?);
                added.map_err(|error| device_error(py, &error))?;
            }
        }
        let execution = py.detach(|| self.coordinator.execute(graph, &CancelToken::default()));
        Ok(PyExecution { execution })
    }
}

/// Tasks that a coordinator has submitted.
#[pyclass(frozen, module = "tensorstream.streams", name = "Execution")]
pub(crate) struct PyExecution {
    execution: Execution<AnyDevice>,
}

#[pymethods]
impl PyExecution {
    /// The names and errors of tasks that were not submitted.
    #[getter]
    fn failures(&self) -> Vec<(String, String)> {
        let failures = self.execution.failures().iter();
        failures.map(|(name, error)| (name.clone(), error.to_string())).collect()
    }

    /// The number of events that order the tasks on different streams.
    #[getter]
    fn event_count(&self) -> usize {
        self.execution.event_count()
    }

    /// Returns whether all tasks are done.
    ///
    /// Raises:
    ///     DeviceError: A task has failed.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        let status = self.execution.query().map_err(|error| device_error(py, &error))?;
        Ok(status == Status::Ready)
    }

    /// Blocks until all tasks are done.
    ///
    /// Args:
    ///     timeout: The longest time in seconds. None waits as long as it takes.
    ///
    /// Raises:
    ///     DeviceError: A task has failed.
    ///     TimeoutError: A task is pending after ``timeout``.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        // A zero wait lets a simulated device run its work.
        wait(py, timeout, || match self.execution.wait_timeout(Duration::ZERO) {
            Err(Error::TimedOut { .. }) => Ok(false),
            done => done.map(|()| true),
        })
    }

    /// Calls a function in another thread, as work of a stream, when all tasks are done. It is not
    /// called if a task fails.
    fn on_complete(&self, py: Python<'_>, stream: &PyStream, function: Py<PyAny>) -> PyResult<()> {
        let submitted = py.detach(|| self.execution.on_complete(&stream.stream, work(function)));
        submitted.map_err(|error| device_error(py, &error))
    }
}
