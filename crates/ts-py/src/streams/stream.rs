// SPDX-License-Identifier: MIT OR Apache-2.0
//! The classes `CudaStream` and `Event`.

use std::ffi::c_void;
use std::panic::resume_unwind;
use std::time::Duration;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use tensorstream::streams::{
    AnyDevice, AnyEvent, AnyStream, Device, Error, Event, HostFn, Status, Stream, StreamId,
    StreamPriority,
};

use super::device::PyDevice;
use super::operand::{Operand, copy, submit};
use super::wait;
use crate::errors::{configuration_error, device_error};

/// Converts a priority: "high", "normal", "low", or a level as in CUDA.
pub(super) fn priority(argument: &Bound<'_, PyAny>) -> PyResult<StreamPriority> {
    if let Ok(level) = argument.extract::<i32>() {
        return Ok(StreamPriority::Level(level));
    }
    let Ok(name) = argument.cast::<PyString>() else {
        return Err(PyTypeError::new_err(format!(
            "invalid priority: expected \"high\", \"normal\", \"low\" or an int, got {}",
            argument.get_type().name()?
        )));
    };
    super::named(
        "priority",
        name.to_str()?,
        &[
            ("high", StreamPriority::High),
            ("normal", StreamPriority::Normal),
            ("low", StreamPriority::Low),
        ],
    )
}

/// Returns a function that calls a Python function. If that raises an exception, the stream on
/// which the function runs fails.
pub(super) fn work(function: Py<PyAny>) -> impl FnOnce() + Send + 'static {
    move || {
        // While the interpreter shuts down, the function is not called.
        let failed = Python::try_attach(|py| {
            let failed = function.call0(py).err();
            drop(function);
            failed.map(|error| error.to_string())
        });
        if let Some(failed) = failed.flatten() {
            resume_unwind(Box::new(failed)); // the stream fails with this message
        }
    }
}

/// Returns [`work`] for a stream.
pub(super) fn host_fn(function: Py<PyAny>) -> HostFn {
    HostFn::new(work(function))
}

/// A queue of work, which a device runs in the order of submission.
///
/// Methods that submit work do not wait for it. When work fails, the stream skips later work and
/// raises the error when the program waits.
///
/// It is a stream of any device. On a GPU, it is a CUDA stream.
///
/// Args:
///     priority: "high", "normal", "low" or a level as in CUDA. Smaller levels are more urgent.
///     device: A ``Device``, its name, or the number of a GPU. By default the first GPU, or the CPU
///         if there is none.
///
/// Raises:
///     ConfigurationError: No kind of device has the name.
///     DeviceUnavailableError: The device does not exist, or cannot be used.
///     TypeError: An argument has another type.
///     ValueError: No priority has the name.
///
/// Examples:
///     >>> from tensorstream.streams import CudaStream
///     >>> first, second = CudaStream(device="cpu"), CudaStream("high", device="cpu")
///     >>> order = []
///     >>> first.launch_host_fn(lambda: order.append("first"))
///     >>> second.wait_event(first.record_event())
///     >>> second.launch_host_fn(lambda: order.append("second"))
///     >>> second.synchronize()
///     >>> order
///     ['first', 'second']
#[pyclass(frozen, module = "tensorstream.streams", name = "CudaStream")]
pub(crate) struct PyStream {
    pub(super) stream: AnyStream,
    pub(super) device: PyDevice,
    /// The object of PyTorch that owns the stream, and the handle of the stream.
    foreign: Option<(Py<PyAny>, usize)>,
}

impl PyStream {
    pub(super) fn new(stream: AnyStream, device: &PyDevice) -> Self {
        Self { stream, device: device.clone(), foreign: None }
    }

    fn any_device(&self) -> &AnyDevice {
        self.device.device()
    }
}

#[pymethods]
impl PyStream {
    #[new]
    #[pyo3(signature = (priority=None, *, device=None))]
    fn create(
        py: Python<'_>,
        priority: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let device = PyDevice::of(py, device)?;
        let priority = priority.map(self::priority).transpose()?.unwrap_or_default();
        let created = py.detach(|| device.device().create_stream(priority));
        Ok(Self::new(created.map_err(|error| device_error(py, &error))?, &device))
    }

    /// Returns PyTorch's stream on an NVIDIA GPU as a stream of this package. Both submit to the
    /// same queue. The result keeps ``stream`` alive.
    ///
    /// Args:
    ///     stream: A ``torch.cuda.Stream``.
    ///
    /// Raises:
    ///     TypeError: ``stream`` is not a stream of an NVIDIA GPU.
    #[staticmethod]
    fn from_torch(py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<Self> {
        let known = stream.getattr("cuda_stream").and_then(|handle| handle.extract::<usize>());
        let Ok(handle) = known else {
            return Err(PyTypeError::new_err(format!(
                "invalid stream: expected a torch.cuda.Stream, got {}",
                stream.get_type().name()?
            )));
        };
        let ordinal: u32 = stream.getattr("device_index")?.extract()?;
        let device = PyDevice::open(py, Some(&format!("cuda:{ordinal}")))?;
        let pointer = std::ptr::with_exposed_provenance_mut::<c_void>(handle);
        // SAFETY: the handle is that of PyTorch's stream on this device, which the result keeps.
        let made = unsafe { device.device().external_stream(pointer) };
        let made = made.map_err(|error| device_error(py, &error))?;
        Ok(Self { foreign: Some((stream.clone().unbind(), handle)), ..Self::new(made, &device) })
    }

    /// The number of the stream, which no other stream of the process has.
    #[getter]
    pub(super) fn id(&self) -> u64 {
        self.stream.id().0
    }

    /// The device.
    #[getter]
    fn device(&self) -> PyDevice {
        self.device.clone()
    }

    /// The level. Smaller levels are more urgent.
    #[getter]
    fn priority(&self) -> i32 {
        self.stream.level()
    }

    /// The handle of the stream of ``from_torch``, as PyTorch has it. None for other streams.
    #[getter]
    fn cuda_stream(&self) -> Option<usize> {
        self.foreign.as_ref().map(|(_, handle)| *handle)
    }

    /// Submits a function, which is called in another thread when all earlier work is done.
    ///
    /// It must not wait for streams. If it raises an exception, the stream fails.
    ///
    /// Raises:
    ///     DeviceError: The stream has failed.
    fn launch_host_fn(&self, py: Python<'_>, function: Py<PyAny>) -> PyResult<()> {
        let submitted = py.detach(|| self.stream.launch_host_fn(host_fn(function)));
        submitted.map_err(|error| device_error(py, &error))
    }

    /// Submits a copy of all bytes of one memory to another.
    ///
    /// Args:
    ///     to: A ``DeviceBuffer``, a writable object with the buffer protocol, or a PyTorch tensor
    ///         on the host. It is contiguous, and is kept until the copy is done.
    ///     from_: Memory of the same size in bytes.
    ///
    /// Raises:
    ///     ConfigurationError: The sizes differ, ``to`` is read-only, or memory was freed or is
    ///         that of another device.
    ///     DeviceError: The stream has failed.
    fn copy(
        &self,
        py: Python<'_>,
        to: &Bound<'_, PyAny>,
        from_: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        copy(py, &self.stream, Operand::of(to, true)?, Operand::of(from_, false)?)
    }

    /// Submits work that sets all bytes of a memory.
    ///
    /// Args:
    ///     to: As for ``copy``.
    ///     byte: From 0 to 255.
    ///
    /// Raises:
    ///     ConfigurationError: The memory is read-only, was freed, or is that of another device.
    ///     DeviceError: The stream has failed.
    fn fill(&self, py: Python<'_>, to: &Bound<'_, PyAny>, byte: u8) -> PyResult<()> {
        // SAFETY: `submit` keeps the memory until the work is done, and Python objects share their
        // memory with whoever has the object.
        let fill = |[to]: [_; 1]| unsafe { self.stream.fill(to, byte) };
        submit(py, &self.stream, [Operand::of(to, true)?], fill)
    }

    /// Records an event after all work submitted so far.
    ///
    /// Args:
    ///     event: An event of the same device. By default a new one.
    ///
    /// Returns:
    ///     The event.
    #[pyo3(signature = (event=None))]
    fn record_event(&self, py: Python<'_>, event: Option<Py<PyEvent>>) -> PyResult<Py<PyEvent>> {
        let event = match event {
            Some(event) => event,
            None => Py::new(py, PyEvent::new(py, &self.device)?)?,
        };
        let recorded = self.stream.record(&event.get().event);
        recorded.map_err(|error| device_error(py, &error))?;
        Ok(event)
    }

    /// Makes later work of this stream wait for an event. The program does not wait.
    fn wait_event(&self, py: Python<'_>, event: &PyEvent) -> PyResult<()> {
        self.stream.wait(&event.event).map_err(|error| device_error(py, &error))
    }

    /// Makes later work of this stream wait for all work that was submitted to another one.
    fn wait_stream(&self, py: Python<'_>, stream: &Self) -> PyResult<()> {
        let event = stream.record_event(py, None)?;
        self.wait_event(py, event.get())
    }

    /// Returns whether all submitted work is done.
    ///
    /// Raises:
    ///     DeviceError: Work has failed.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        let status = self.stream.query().map_err(|error| device_error(py, &error))?;
        Ok(status == Status::Ready)
    }

    /// Blocks until all submitted work is done.
    ///
    /// Args:
    ///     timeout: The longest time in seconds. None waits as long as it takes.
    ///
    /// Raises:
    ///     DeviceError: Work has failed.
    ///     TimeoutError: Work is pending after ``timeout``.
    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        if !self.any_device().info().runs_by_itself {
            return py.detach(|| self.stream.synchronize()).map_err(|e| device_error(py, &e));
        }
        wait(py, timeout, || Ok(self.stream.query()? == Status::Ready))
    }

    /// Returns the message of the error after which the stream skips work, and lets it run work
    /// again. Returns None if the stream has not failed, or cannot recover.
    fn take_error(&self) -> Option<String> {
        self.stream.take_error().map(|error| error.to_string())
    }

    /// Returns counts of the work so far: ``operations`` submitted, of which ``completed`` are
    /// done, ``transfers`` of ``transferred_bytes`` bytes, ``launches`` of functions, and the
    /// ``average_latency`` in seconds from submission to completion, None before the first.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let metrics = self.stream.metrics();
        let values = PyDict::new(py);
        values.set_item("operations", metrics.operations)?;
        values.set_item("completed", metrics.completed)?;
        values.set_item("transfers", metrics.transfers)?;
        values.set_item("transferred_bytes", metrics.transferred_bytes)?;
        values.set_item("launches", metrics.launches)?;
        let latency = metrics.average_latency().as_ref().map(Duration::as_secs_f64);
        values.set_item("average_latency", latency)?;
        Ok(values)
    }

    fn __repr__(&self) -> String {
        format!("CudaStream({} on {})", self.id(), self.device.name())
    }
}

/// A point in the work of a stream, for which other streams and the program can wait.
///
/// Args:
///     device: As for ``CudaStream``.
#[pyclass(frozen, module = "tensorstream.streams", name = "Event")]
pub(crate) struct PyEvent {
    event: AnyEvent,
    device: PyDevice,
}

impl PyEvent {
    fn new(py: Python<'_>, device: &PyDevice) -> PyResult<Self> {
        let event = device.device().create_event().map_err(|error| device_error(py, &error))?;
        Ok(Self { event, device: device.clone() })
    }
}

#[pymethods]
impl PyEvent {
    #[new]
    #[pyo3(signature = (*, device=None))]
    fn create(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        Self::new(py, &PyDevice::of(py, device)?)
    }

    /// Records the event on a stream, after all work submitted to it so far.
    fn record(this: Py<Self>, py: Python<'_>, stream: &PyStream) -> PyResult<()> {
        stream.record_event(py, Some(this)).map(drop)
    }

    /// Makes later work of a stream wait for the event.
    fn wait(&self, py: Python<'_>, stream: &PyStream) -> PyResult<()> {
        stream.wait_event(py, self)
    }

    /// Returns whether the event is reached. Also true if the event was never
    /// recorded.
    ///
    /// Raises:
    ///     DeviceError: Work before the event has failed.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        let status = self.event.query().map_err(|error| device_error(py, &error))?;
        Ok(status == Status::Ready)
    }

    /// Blocks until the event is reached.
    ///
    /// Args:
    ///     timeout: The longest time in seconds. None waits as long as it takes.
    ///
    /// Raises:
    ///     DeviceError: Work before the event has failed.
    ///     TimeoutError: The event is not reached after ``timeout``.
    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        if !self.device.device().info().runs_by_itself {
            return py.detach(|| self.event.synchronize()).map_err(|e| device_error(py, &e));
        }
        wait(py, timeout, || Ok(self.event.query()? == Status::Ready))
    }

    /// Returns the time from this event to a later one in milliseconds.
    ///
    /// Raises:
    ///     ConfigurationError: One of the events was not recorded, or not reached.
    fn elapsed_time(&self, py: Python<'_>, end: &Self) -> PyResult<f64> {
        let elapsed = end.event.elapsed_since(&self.event);
        Ok(elapsed.map_err(|error| device_error(py, &error))?.as_secs_f64() * 1e3)
    }
}

/// Returns the number of a stream.
pub(super) fn id_of(stream: &PyStream) -> StreamId {
    stream.stream.id()
}

/// Converts the streams of a list, which must be of one device.
pub(super) fn streams_of(
    py: Python<'_>,
    streams: &[Py<PyStream>],
) -> PyResult<(PyDevice, Vec<AnyStream>)> {
    let Some(first) = streams.first() else {
        return Err(PyValueError::new_err("expected at least one stream, got none"));
    };
    let device = first.get().device.clone();
    for stream in streams {
        if !device.device().owns(&stream.get().stream) {
            let error = Error::ForeignStream {
                stream: stream.get().stream.id(),
                device: device.name().into(),
            };
            return Err(configuration_error(py, &error.to_string()));
        }
    }
    Ok((device, streams.iter().map(|stream| stream.get().stream.clone()).collect()))
}
