// SPDX-License-Identifier: MIT OR Apache-2.0
use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tensorstream::Error;
use tensorstream::format::TensorMeta;
use tensorstream::io::{BackendOptions, Tuner};
use tensorstream::orchestrator::{
    self as orchestrator, EngineConfig, EngineStats, PassId, Phase, Plan, Prefetch, Unit, UnitId, UnitStats,
    UnitTensor, Verify,
};

use crate::checkpoint::{Checkpoint, Part};
use crate::dlpack;
use crate::errors::to_python;

/// A tensor of a unit: name, dtype, shape, parts, and its address modulo 64 or None for that of a mapping.
type TensorSpec = (String, String, Vec<u64>, Vec<Part>, Option<u8>);

/// Streams units of a checkpoint's tensors.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Engine {
    inner: Arc<orchestrator::Engine>,
    /// What each unit's tensors are, for the capsules.
    metas: Vec<Vec<TensorMeta>>,
}

/// A pass that has begun. It ends at the latest when it is collected, so that an exception at any moment, a
/// KeyboardInterrupt too, cannot leave it behind.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Pass {
    engine: Arc<orchestrator::Engine>,
    id: PassId,
}

#[pymethods]
impl Pass {
    /// Ends it. True when `replan` should be called. Does nothing the second time.
    fn end(&self) -> bool {
        self.engine.end_pass(self.id)
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.engine.end_pass(self.id);
    }
}

/// The right to use a unit.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Lease {
    /// Taken when it is released.
    inner: Mutex<Option<orchestrator::Lease>>,
    metas: Vec<TensorMeta>,
    #[pyo3(get)]
    resident: bool,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (checkpoint, units, *, budget, settings=None))]
    fn new(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        units: Vec<(String, Vec<TensorSpec>)>,
        budget: usize,
        settings: Option<Settings>,
    ) -> PyResult<Self> {
        let units = units.into_iter().map(|(name, specs)| unit(py, checkpoint, name, specs));
        let units = units.collect::<PyResult<Vec<_>>>()?;
        let metas = units.iter().map(|u| u.tensors.iter().map(|t| t.entry.meta.clone()).collect()).collect();
        let tuner = match &settings {
            Some(Settings { in_flight: None, .. }) => Tuner::default(),
            _ => Tuner::off(),
        };
        let config = config(budget, settings)?;
        let config = interruptible(py, |interrupt| checkpoint.inner.tuned(config, &tuner, interrupt))?;
        let inner = py.detach(|| checkpoint.inner.engine(units, config)).map_err(|e| to_python(py, &e))?;
        Ok(Self { inner: Arc::new(inner), metas })
    }

    /// Begins a pass, waiting while max_passes others run.
    fn begin_pass(&self, py: Python<'_>) -> PyResult<Pass> {
        let id = interruptible(py, |interrupt| self.inner.begin_pass(interrupt))?;
        Ok(Pass { engine: Arc::clone(&self.inner), id })
    }

    /// Puts a better plan in force; True when it is. Drop resident tensors first.
    fn replan(&self, py: Python<'_>) -> PyResult<bool> {
        interruptible(py, |interrupt| self.inner.replan(interrupt))
    }

    /// Waits until a unit is in memory.
    #[pyo3(signature = (unit, in_pass=None))]
    fn acquire(&self, py: Python<'_>, unit: u32, in_pass: Option<&Pass>) -> PyResult<Lease> {
        let acquire = || {
            interruptible(py, |interrupt| {
                self.inner.acquire(in_pass.map(|pass| pass.id), UnitId(unit), interrupt)
            })
        };
        // Memory may be held by garbage that only the cycle collector finds.
        let referenced = |error: &PyErr| -> PyResult<bool> {
            Ok(error.matches(py, py.import("tensorstream.errors")?.getattr("UnitReferencedError")?)?)
        };
        let lease = match acquire() {
            Err(e) if referenced(&e)? => {
                py.import("gc")?.call_method0("collect")?;
                acquire()?
            }
            other => other?,
        };
        let resident = lease.is_resident();
        let metas = self.metas[unit as usize].clone();
        Ok(Lease { inner: Mutex::new(Some(lease)), metas, resident })
    }

    /// Gives a unit up whose bytes were written to; the next use reads it anew.
    fn discard(&self, py: Python<'_>, unit: u32) -> PyResult<()> {
        self.inner.discard(UnitId(unit)).map_err(|e| to_python(py, &e.into()))
    }

    /// Everything measured so far.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_dict(py, &self.inner.stats())
    }
}

#[pymethods]
impl Lease {
    /// A DLPack capsule for each tensor. Each keeps its bytes alive on its own.
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let lease = self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let lease = lease.as_ref().ok_or_else(|| PyRuntimeError::new_err("the lease was released"))?;
        let capsules = self.metas.iter().enumerate();
        let capsules = capsules.map(|(i, meta)| dlpack::capsule(py, lease.tensor(i), meta));
        PyList::new(py, capsules.collect::<PyResult<Vec<_>>>()?)
    }

    /// Ends the use; the unit's bytes were written to and are read anew next time.
    fn discard(&self) {
        let lease = self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(lease) = lease {
            lease.discard();
        }
    }

    /// Ends the use. Tensors stay valid. Does nothing the second time.
    fn release(&self) {
        let lease = self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        drop(lease);
    }
}

/// Plans a checkpoint by its tensors' names, reading headers alone.
#[pyfunction]
#[pyo3(signature = (checkpoint, *, budget, settings=None))]
pub(crate) fn plan<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    budget: usize,
    settings: Option<Settings>,
) -> PyResult<Bound<'py, PyDict>> {
    let config = config(budget, settings)?;
    let explanation = checkpoint.inner.explain(&config).map_err(|e| to_python(py, &e))?;
    let dict = PyDict::new(py);
    dict.set_item("plan", plan_dict(py, &explanation.plan)?)?;
    dict.set_item("units", units_list(py, &explanation.units)?)?;
    dict.set_item("text", explanation.to_string())?;
    Ok(dict)
}

/// How an engine is set up, beside its budget: a dictionary with all of these.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    max_passes: usize,
    backend: Option<String>,
    /// `None` for what suits the storage.
    in_flight: Option<usize>,
    prefetch: String,
    verify: String,
}

fn config(budget: usize, settings: Option<Settings>) -> PyResult<EngineConfig> {
    let config = EngineConfig::with_budget(budget);
    let Some(Settings { max_passes, backend, in_flight, prefetch, verify }) = settings else {
        return Ok(config);
    };
    let prefetch = match prefetch.as_str() {
        "none" => Prefetch::None,
        "next_layer" => Prefetch::NextLayer,
        "adaptive" => Prefetch::Adaptive,
        "aggressive" => Prefetch::Aggressive,
        other => return Err(PyValueError::new_err(format!("unknown prefetch strategy {other}"))),
    };
    let verify = match verify.as_str() {
        "every_read" => Verify::EveryRead,
        "once" => Verify::Once,
        "never" => Verify::Never,
        other => return Err(PyValueError::new_err(format!("bytes are not verified {other}"))),
    };
    let mut io = BackendOptions::default();
    io.in_flight = in_flight.unwrap_or(io.in_flight);
    Ok(EngineConfig { max_passes, backend, io, prefetch, verify, ..config })
}

fn unit(py: Python<'_>, checkpoint: &Checkpoint, name: String, specs: Vec<TensorSpec>) -> PyResult<Unit> {
    let tensor = |(name, dtype, shape, parts, phase): TensorSpec| -> PyResult<UnitTensor> {
        let entry = checkpoint.assemble(py, &name, &dtype, shape, &parts)?;
        let phase = phase.map_or(Phase::Mapped, Phase::At);
        Ok(UnitTensor::new(checkpoint.inner.catalog(), name, entry, phase))
    };
    Ok(Unit { name, tensors: specs.into_iter().map(tensor).collect::<PyResult<_>>()? })
}

/// Runs a waiting call with the interpreter let go; a signal's exception ends the wait and is raised.
fn interruptible<T: Send, E: Into<Error> + Send>(
    py: Python<'_>,
    call: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, E> + Send,
) -> PyResult<T> {
    let mut signal = None;
    let result = py.detach(|| {
        call(&mut || {
            signal = Python::attach(|py| py.check_signals().err());
            signal.is_some()
        })
    });
    match (result, signal) {
        (Ok(value), _) => Ok(value),
        (Err(_), Some(signal)) => Err(signal),
        (Err(error), None) => Err(to_python(py, &error.into())),
    }
}

fn stats_dict<'py>(py: Python<'py>, stats: &EngineStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("budget_bytes", stats.budget_bytes)?;
    dict.set_item("reserved_high_water_bytes", stats.reserved_high_water_bytes)?;
    dict.set_item("in_use_high_water_bytes", stats.in_use_high_water_bytes)?;
    dict.set_item("in_use_bytes", stats.in_use_bytes)?;
    dict.set_item("backend", stats.backend)?;
    dict.set_item("passed_over", stats.passed_over.clone())?;
    dict.set_item("passes", stats.passes)?;
    let paths = PyDict::new(py);
    for (path, bytes) in &stats.read_bytes {
        paths.set_item(path.name(), bytes)?;
    }
    dict.set_item("read_bytes", stats.total_read_bytes())?;
    dict.set_item("read_bytes_by_path", paths)?;
    dict.set_item("stalls", stats.stalls())?;
    dict.set_item("stall_s", stats.stall_ns() as f64 / 1e9)?;
    dict.set_item("wasted_loads", stats.wasted_loads)?;
    dict.set_item("replans", stats.replans)?;
    dict.set_item("plan", plan_dict(py, &stats.plan)?)?;
    dict.set_item("units", units_list(py, &stats.units)?)?;
    Ok(dict)
}

fn units_list<'py>(py: Python<'py>, units: &[UnitStats]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for unit in units {
        let item = PyDict::new(py);
        item.set_item("name", &unit.name)?;
        item.set_item("resident", unit.resident)?;
        item.set_item("slot_bytes", unit.slot_bytes)?;
        item.set_item("loads", unit.loads)?;
        item.set_item("read_bytes", unit.read_bytes)?;
        item.set_item("load_s", unit.load_ns as f64 / 1e9)?;
        item.set_item("uses", unit.uses)?;
        item.set_item("use_s", unit.use_ns as f64 / 1e9)?;
        item.set_item("stalls", unit.stalls)?;
        item.set_item("stall_s", unit.stall_ns as f64 / 1e9)?;
        list.append(item)?;
    }
    Ok(list)
}

fn plan_dict<'py>(py: Python<'py>, plan: &Plan) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("resident_bytes", plan.resident_bytes)?;
    dict.set_item("ring_bytes", plan.ring_bytes)?;
    dict.set_item("peak_bytes", plan.peak_bytes())?;
    dict.set_item("streamed_bytes_per_pass", plan.streamed_bytes_per_pass)?;
    dict.set_item("predicted_pass_s", plan.predicted_pass_s)?;
    dict.set_item("bottleneck", plan.bottleneck.to_string())?;
    dict.set_item("smallest_budget_bytes", plan.smallest_budget_bytes)?;
    Ok(dict)
}
