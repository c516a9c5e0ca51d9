// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts Python values to the units and settings of an engine.

use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorstream::Speeds;
use tensorstream::io::{BackendOptions, Tuner};
use tensorstream::orchestrator::{
    Access, Decoding, EngineConfig, Phase, Prefetch, Routing, Table, Unit, UnitId, UnitTensor,
    Verify,
};

use super::Engine;
use super::sharing::page_store;
use crate::accelerator::Accelerator;
use crate::errors::to_python;
use crate::files::checkpoint::{Checkpoint, Part};
use crate::signals::interruptible;

/// A tensor of a unit: name, safetensors dtype name, shape, parts, and address modulo 64. None
/// stands for the address that a mapping of the file would have.
pub(super) type TensorSpec = (String, String, Vec<u64>, Vec<Part>, Option<u8>);

/// A table: its tensor, and its `torch.dtype`.
pub(super) type TableSpec = (TensorSpec, Py<PyAny>);

/// A unit: its name, its tensors, and whether the data of a pass select it ([`Access::Routed`]).
pub(super) type UnitSpec = (String, Vec<TensorSpec>, bool);

/// What an engine streams.
pub(super) struct EngineContent {
    pub(super) checkpoint: tensorstream::Checkpoint,
    pub(super) units: Vec<Unit>,
    pub(super) tables: Vec<Table>,
}

impl EngineContent {
    /// Returns the same units and tables with the bytes of `newer`, a later state of the
    /// checkpoint.
    ///
    /// # Errors
    /// CheckpointError or MissingTensorError if `newer` has other tensors.
    pub(super) fn in_newer(
        &self,
        py: Python<'_>,
        newer: &tensorstream::Checkpoint,
    ) -> PyResult<Self> {
        let tensor = |tensor: &UnitTensor| {
            self.checkpoint.translate(tensor, newer).map_err(|e| to_python(py, &e))
        };
        let unit = |unit: &Unit| {
            let tensors = unit.tensors.iter().map(tensor).collect::<PyResult<_>>()?;
            Ok(Unit::new(unit.name.as_str(), tensors).with_access(unit.access))
        };
        let table = |table: &Table| {
            Ok(Table::new(tensor(table.tensor())?).expect("a table of this shape has rows"))
        };
        Ok(Self {
            checkpoint: newer.clone(),
            units: self.units.iter().map(unit).collect::<PyResult<_>>()?,
            tables: self.tables.iter().map(table).collect::<PyResult<_>>()?,
        })
    }
}

/// A function that creates an engine. A forked child process calls it again, and so does a reload.
pub(super) type EngineFactory =
    Box<dyn Fn(Python<'_>, &EngineContent) -> PyResult<Engine> + Send + Sync>;

/// Returns the units and tables of a model, and a function that creates an engine for them.
///
/// If there are `settings` without a number of reads in flight, first determines which number and
/// size of reads suit the storage. A measurement may block for up to two seconds. Without
/// `settings`, the defaults apply.
#[allow(clippy::too_many_arguments)] // the arguments of `Streamer`
pub(super) fn engine_factory(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    units: Vec<UnitSpec>,
    tables: Vec<TensorSpec>,
    budget: usize,
    together: Vec<Vec<u32>>,
    settings: Option<Settings>,
    scores: Vec<(u32, f64)>,
) -> PyResult<(EngineContent, EngineFactory)> {
    let units = model_units(py, checkpoint, units)?;
    let tables = model_tables(py, checkpoint, tables)?;
    let untuned = config(budget, settings.as_ref())?;
    let tuned = match &settings {
        Some(Settings { in_flight: None, .. }) => {
            let tuner = Tuner::default();
            interruptible(py, |interrupt| checkpoint.inner.tuned(untuned, &tuner, interrupt))?
        }
        _ => untuned,
    };
    let (request_bytes, io) = (tuned.request_bytes, tuned.io);
    let together = unit_sets(together);
    let content = EngineContent { checkpoint: checkpoint.inner.clone(), units, tables };
    let scores = scores.into_iter().map(|(unit, score)| (UnitId(unit), score)).collect();
    let routing = Routing::default().with_scores(scores);
    let accelerator = settings.as_ref().and_then(|settings| settings.device.as_ref());
    let device = accelerator.map(|accelerator| accelerator.get().device().clone());
    let factory = move |py: Python<'_>, content: &EngineContent| {
        let config = config(budget, settings.as_ref())?
            .with_request_bytes(request_bytes)
            .with_io(io.clone())
            .with_together(together.clone())
            .with_tables(content.tables.clone())
            .with_routing(routing.clone());
        let EngineContent { checkpoint, units, .. } = content;
        let config = Speeds::default().recall(checkpoint, units, config);
        let new = || checkpoint.engine_on(device.as_ref(), units.clone(), config);
        py.detach(new).map_err(|e| to_python(py, &e))
    };
    Ok((content, Box::new(factory)))
}

/// The settings of an engine except for its budget: a dictionary that has all of these keys.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    max_passes: usize,
    /// The name of a backend; "gpudirect" for one that reads straight to the device, if possible.
    backend: Option<String>,
    /// The number of reads in flight. None for the number that suits the storage.
    in_flight: Option<usize>,
    /// The number of threads that read, compare and decode. None for the defaults.
    threads: Option<usize>,
    prefetch: String,
    verify: String,
    keep_compressed: bool,
    /// The directory in which to share memory with other processes; None to share nothing.
    shared_cache: Option<PathBuf>,
    /// The device on which the model runs. None for the CPU.
    pub(super) device: Option<Py<Accelerator>>,
    /// The memory on the host in which units are kept for a device with its own memory, in bytes.
    host_bytes: usize,
}

/// Returns the configuration of an engine, with defaults if there are no settings.
///
/// # Errors
/// ValueError if the name of a prefetch strategy or of a verify mode is unknown.
/// ConfigurationError if the directory for shared memory cannot be used.
pub(super) fn config(budget: usize, settings: Option<&Settings>) -> PyResult<EngineConfig> {
    let config = EngineConfig::with_budget(budget);
    let Some(settings) = settings else { return Ok(config) };
    let Settings { max_passes, backend, in_flight, prefetch, verify, .. } = settings;
    let prefetch = match prefetch.as_str() {
        "none" => Prefetch::None,
        "next_layer" => Prefetch::NextLayer,
        "adaptive" => Prefetch::Adaptive,
        "aggressive" => Prefetch::Aggressive,
        other => {
            return Err(PyValueError::new_err(format!(
                "invalid prefetch strategy {other:?}: expected \"none\", \"next_layer\", \
                 \"adaptive\" or \"aggressive\""
            )));
        }
    };
    let verify = match verify.as_str() {
        "every_read" => Verify::EveryRead,
        "once" => Verify::Once,
        "never" => Verify::Never,
        other => {
            return Err(PyValueError::new_err(format!(
                "invalid verify mode {other:?}: expected \"every_read\", \"once\" or \"never\""
            )));
        }
    };
    let mut io = BackendOptions::default();
    io.in_flight = in_flight.unwrap_or(io.in_flight);
    io.threads = settings.threads;
    let to_device = backend.as_deref() == Some("gpudirect");
    let backend = backend.clone().filter(|_| !to_device);
    let config = config.with_max_passes(*max_passes).with_backend(backend).with_io(io);
    let config = config.with_read_to_device(to_device);
    let workers = settings.threads.unwrap_or(config.workers);
    let config = config.with_workers(workers);
    let config = config.with_prefetch(prefetch).with_verify(verify).with_watch_writes(true);
    let device = settings.device.as_ref().map(|device| device.get().device());
    let keeps = device.filter(|_| settings.host_bytes > 0);
    let decoding = match keeps.is_some_and(Decoding::is_possible_on) {
        true => Decoding::WhereFaster,
        false => Decoding::OnHost,
    };
    let config = config.with_device_memory(device.is_some()).with_decoding(decoding);
    let config = config.with_host_bytes(settings.host_bytes);
    let store = settings.shared_cache.as_deref().map(page_store).transpose()?;
    Ok(config.with_keep_compressed(settings.keep_compressed).with_shared_pages(store))
}

/// Returns the units with these names and tensors.
///
/// # Errors
/// The same as [`Checkpoint::assemble`].
pub(super) fn model_units(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    units: Vec<UnitSpec>,
) -> PyResult<Vec<Unit>> {
    let unit = |(name, specs, routed): UnitSpec| {
        let tensors = specs.into_iter().map(|spec| unit_tensor(py, checkpoint, spec));
        let tensors = tensors.collect::<PyResult<_>>()?;
        let access = if routed { Access::Routed } else { Access::Ordered };
        Ok(Unit::new(name, tensors).with_access(access))
    };
    units.into_iter().map(unit).collect()
}

/// Returns tables of these tensors.
///
/// # Errors
/// The same as [`Checkpoint::assemble`], and ValueError if a tensor has no rows.
pub(super) fn model_tables(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    tables: Vec<TensorSpec>,
) -> PyResult<Vec<Table>> {
    let table = |spec: TensorSpec| {
        let name = spec.0.clone();
        Table::new(unit_tensor(py, checkpoint, spec)?)
            .ok_or_else(|| PyValueError::new_err(format!("tensor `{name}` has no rows to gather")))
    };
    tables.into_iter().map(table).collect()
}

fn unit_tensor(
    py: Python<'_>,
    checkpoint: &Checkpoint,
    (name, dtype, shape, parts, phase): TensorSpec,
) -> PyResult<UnitTensor> {
    let entry = checkpoint.assemble(py, &name, &dtype, shape, &parts)?;
    let phase = phase.map_or(Phase::Mapped, Phase::At);
    Ok(UnitTensor::new(checkpoint.inner.catalog(), name, entry, phase))
}

/// Converts sets of unit numbers to sets of unit ids.
pub(super) fn unit_sets(sets: Vec<Vec<u32>>) -> Vec<Vec<UnitId>> {
    let ids = |set: Vec<u32>| set.into_iter().map(UnitId).collect();
    sets.into_iter().map(ids).collect()
}
