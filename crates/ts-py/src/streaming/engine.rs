// SPDX-License-Identifier: MIT OR Apache-2.0
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tensorstream::Error;
use tensorstream::io::{BackendOptions, Tuner};
use tensorstream::orchestrator::{
    self as orchestrator, EngineConfig, EngineStats, Phase, Plan, Prefetch, Unit, UnitId,
    UnitStats, UnitTensor, Verify,
};

use crate::errors::to_python;
use crate::files::checkpoint::{Checkpoint, Part};

/// A tensor of a unit: name, dtype, shape, parts, and its address modulo 64 or None for that of a
/// mapping.
pub(crate) type TensorSpec = (String, String, Vec<u64>, Vec<Part>, Option<u8>);

/// Makes an engine, and again in a child process.
pub(crate) type Recipe = Box<dyn Fn(Python<'_>) -> PyResult<orchestrator::Engine> + Send + Sync>;

/// The units of a model, and how an engine over them is made.
pub(crate) fn build(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    units: Vec<(String, Vec<TensorSpec>)>,
    budget: usize,
    together: Vec<Vec<u32>>,
    settings: Option<Settings>,
) -> PyResult<(Vec<Unit>, Recipe)> {
    let units = units.into_iter().map(|(name, specs)| unit(py, checkpoint, name, specs));
    let units = units.collect::<PyResult<Vec<_>>>()?;
    let tuner = match &settings {
        Some(Settings { in_flight: None, .. }) => Tuner::default(),
        _ => Tuner::off(),
    };
    let first = config(budget, settings.as_ref())?;
    let tuned = interruptible(py, |interrupt| checkpoint.inner.tuned(first, &tuner, interrupt))?;
    let (request_bytes, io) = (tuned.request_bytes, tuned.io);
    let ids = |set: &Vec<u32>| set.iter().copied().map(UnitId).collect();
    let together: Vec<Vec<UnitId>> = together.iter().map(ids).collect();
    let (checkpoint, again) = (checkpoint.inner.clone(), units.clone());
    let recipe = move |py: Python<'_>| {
        let config = config(budget, settings.as_ref())?;
        let together = together.clone();
        let config = EngineConfig { request_bytes, io: io.clone(), together, ..config };
        py.detach(|| checkpoint.engine(again.clone(), config)).map_err(|e| to_python(py, &e))
    };
    Ok((units, Box::new(recipe)))
}

/// The smallest budget under which units can run, and the one under which nothing is streamed, in
/// bytes.
#[pyfunction]
#[pyo3(signature = (checkpoint, units, *, together, settings))]
pub(crate) fn requirement(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    units: Vec<(String, Vec<TensorSpec>)>,
    together: Vec<Vec<u32>>,
    settings: Settings,
) -> PyResult<(usize, usize)> {
    let units = units.into_iter().map(|(name, specs)| unit(py, checkpoint, name, specs));
    let units = units.collect::<PyResult<Vec<_>>>()?;
    let ids = |set: Vec<u32>| set.into_iter().map(UnitId).collect();
    let together: Vec<Vec<UnitId>> = together.into_iter().map(ids).collect();
    let config = EngineConfig { together, ..config(0, Some(&settings))? };
    let engine = checkpoint.inner.requirement(units, config);
    engine.map_err(|e| to_python(py, &e))
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
    let config = config(budget, settings.as_ref())?;
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

fn config(budget: usize, settings: Option<&Settings>) -> PyResult<EngineConfig> {
    let config = EngineConfig::with_budget(budget);
    let Some(Settings { max_passes, backend, in_flight, prefetch, verify }) = settings else {
        return Ok(config);
    };
    let (max_passes, backend) = (*max_passes, backend.clone());
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
    Ok(EngineConfig { max_passes, backend, io, prefetch, verify, watch_writes: true, ..config })
}

fn unit(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    name: String,
    specs: Vec<TensorSpec>,
) -> PyResult<Unit> {
    let tensor = |(name, dtype, shape, parts, phase): TensorSpec| -> PyResult<UnitTensor> {
        let entry = checkpoint.assemble(py, &name, &dtype, shape, &parts)?;
        let phase = phase.map_or(Phase::Mapped, Phase::At);
        Ok(UnitTensor::new(checkpoint.inner.catalog(), name, entry, phase))
    };
    Ok(Unit { name, tensors: specs.into_iter().map(tensor).collect::<PyResult<_>>()? })
}

/// Runs a waiting call with the interpreter let go; a signal's exception ends the wait and is
/// raised.
pub(crate) fn interruptible<T: Send, E: Into<Error> + Send>(
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
        // A signal is reported once: one that was seen must not be lost.
        (_, Some(signal)) => Err(signal),
        (Ok(value), None) => Ok(value),
        (Err(error), None) => Err(to_python(py, &error.into())),
    }
}

pub(crate) fn stats_dict<'py>(
    py: Python<'py>,
    stats: &EngineStats,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("budget_bytes", stats.budget_bytes)?;
    dict.set_item("reserved_high_water_bytes", stats.reserved_high_water_bytes)?;
    dict.set_item("in_use_high_water_bytes", stats.in_use_high_water_bytes)?;
    dict.set_item("in_use_bytes", stats.in_use_bytes)?;
    dict.set_item("backend", stats.backend)?;
    dict.set_item("passed_over", stats.passed_over.clone())?;
    dict.set_item("watches_writes", stats.watches_writes)?;
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

/// The smallest budget under which units of these sizes can run, in bytes, where sets of them are
/// needed together.
#[pyfunction]
pub(crate) fn smallest_budget(
    sizes: Vec<usize>,
    together: Vec<Vec<u32>>,
    max_passes: usize,
) -> usize {
    let demand = |&slot_bytes: &usize| orchestrator::UnitDemand {
        name: String::new(),
        slot_bytes,
        read_bytes: slot_bytes as u64,
        compute_s: 0.0,
    };
    let units: Vec<_> = sizes.iter().map(demand).collect();
    let ids = |set: Vec<u32>| set.into_iter().map(UnitId).collect();
    let together: Vec<_> = together.into_iter().map(ids).collect();
    orchestrator::smallest_budget(&units, &together, max_passes)
}
