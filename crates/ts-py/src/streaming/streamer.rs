// SPDX-License-Identifier: MIT OR Apache-2.0
//! The methods of the class `Streamer`.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tensorstream::format::TensorMeta;
use tensorstream::orchestrator::{TableId, UnitId};
use tensorstream::{Governor, PressureMonitor, Resized, Speeds, trace_html, trace_json};

use super::engine::{Settings, TableSpec, UnitSpec, engine_factory};
use super::expected::Expected;
use super::lease::Use;
use super::pass::Pass;
use super::shared::{Shared, Streamer, is_referenced};
use super::stats::{curve_list, stats_dict};
use super::torch::Torch;
use super::weight::{Weight, WeightSpec};
use crate::dlpack::CPU;
use crate::errors::to_python;
use crate::files::checkpoint::Checkpoint;
use crate::signals::interruptible;

#[pymethods]
impl Streamer {
    #[new]
    #[pyo3(signature = (checkpoint, units, weights, *, budget, together, classes,
        settings=None, tables=Vec::new(), scores=Vec::new(), limits=None))]
    #[allow(clippy::too_many_arguments)] // keyword arguments
    fn new(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        units: Vec<UnitSpec>,
        weights: Vec<WeightSpec>,
        budget: usize,
        together: Vec<Vec<u32>>,
        classes: (Py<PyAny>, Py<PyAny>),
        settings: Option<Settings>,
        tables: Vec<TableSpec>,
        scores: Vec<(u32, f64)>,
        limits: Option<(usize, usize)>,
    ) -> PyResult<Self> {
        let (specs, dtypes): (Vec<_>, Vec<_>) = tables.into_iter().unzip();
        let accelerator = settings.as_ref().and_then(|settings| settings.device.as_ref());
        let accelerator = accelerator.map(|device| device.clone_ref(py));
        let (content, new_engine) =
            engine_factory(py, checkpoint, units, specs, budget, together, settings, scores)?;
        let tables = content.tables.iter().cloned().zip(dtypes).collect();
        let weight = |spec: WeightSpec| {
            let (unit, index, name) = (spec.0, spec.1, spec.3.clone());
            Weight::new(spec, &content.units).ok_or_else(|| {
                PyIndexError::new_err(format!(
                    "cannot stream weight `{name}`: unit {unit} does not exist, or has no tensor \
                     {index}"
                ))
            })
        };
        let weights = weights.into_iter().map(weight).collect::<PyResult<_>>()?;
        let device = accelerator.as_ref().map_or((CPU, 0), |device| device.get().dlpack());
        let torch = Torch::new(py, classes, device)?;
        let shared = Shared::new(py, content, new_engine, weights, tables, torch, accelerator)?;
        let shared = Arc::new(shared);
        let monitor = limits.map(|(least, limit)| {
            let engine = shared.engine(py)?;
            let least = least.max(engine.smallest_limit()).min(budget);
            let limit = limit.max(least);
            shared.set_limit(py, limit, true)?;
            Ok::<_, PyErr>(monitor(&shared, Governor::new(least, limit, budget))?)
        });
        let monitor = Mutex::new(monitor.transpose()?);
        Ok(Self { shared, monitor })
    }

    /// Begins a pass on this thread, unless the thread is already in a pass. Blocks while
    /// ``max_passes`` other passes are running.
    fn begin_pass(&self, py: Python<'_>) -> PyResult<Pass> {
        Pass::begin(py, &self.shared)
    }

    /// Sets the object that says which calls of modules are passes. It must not refer to the
    /// streamer.
    ///
    /// Args:
    ///     passes: Its method ``kind`` returns 2 for a module that is or contains the model, 1 for
    ///     a
    ///         part that is called by itself, and 0 for others. Its method ``progress`` returns
    ///         ``None``, or an object that is closed at the end of the pass.
    fn set_passes(&self, py: Python<'_>, passes: Py<PyAny>) {
        let _ = self.shared.passes.set(py, passes);
    }

    /// Switches to a better plan, if there is one. Keeps the plan if a pass is running or the
    /// memory of a unit is referenced. Unless a pass is running, blocks until reads have ended.
    ///
    /// Returns:
    ///     Whether the plan has changed.
    fn replan(&self, py: Python<'_>) -> PyResult<bool> {
        let engine = self.shared.engine(py)?;
        self.shared.drop_cached(py);
        interruptible(py, |interrupt| engine.replan_interruptible(interrupt))
    }

    /// Announces that routed units are about to be leased, in this order. Starts to read those that
    /// are not in memory. Does not block.
    ///
    /// Args:
    ///     units: The numbers of the units, each with the number of its uses.
    ///
    /// Returns:
    ///     An object that ends the announcement when it is closed or dropped.
    fn expect(&self, py: Python<'_>, units: Vec<(u32, u32)>) -> PyResult<Expected> {
        let ids: Vec<_> = units.into_iter().map(|(unit, uses)| (UnitId(unit), uses)).collect();
        let engine = self.shared.engine(py)?;
        let expectation =
            py.detach(|| engine.expect(&ids)).map_err(|e| to_python(py, &e.into()))?;
        Ok(Expected::new(expectation))
    }

    /// Guesses that the next ``expect`` will name these routed units, the most likely one first.
    /// Reads those that are absent while the storage is idle, unless most recent guesses were
    /// wrong. Does not block.
    fn guess(&self, py: Python<'_>, units: Vec<u32>) -> PyResult<()> {
        let ids: Vec<_> = units.into_iter().map(UnitId).collect();
        let engine = self.shared.engine(py)?;
        py.detach(|| engine.guess(&ids)).map_err(|e| to_python(py, &e.into()))
    }

    /// Returns whether guesses save time at present.
    fn guesses_pay(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.shared.engine(py)?.guesses_pay())
    }

    /// Returns the score of each routed unit, for the engine of a later run.
    fn routing_scores(&self, py: Python<'_>) -> PyResult<Vec<(u32, f64)>> {
        let scores = self.shared.engine(py)?.routing_scores();
        Ok(scores.into_iter().map(|(unit, score)| (unit.0, score)).collect())
    }

    /// Leases units for one operation on their weights. Blocks until they are in memory.
    fn hold(&self, py: Python<'_>, units: Vec<u32>) -> PyResult<Use> {
        Use::for_operation(py, &self.shared, &units)
    }

    /// Reads rows of a table. Blocks.
    ///
    /// Args:
    ///     table: The number of the table.
    ///     rows: The numbers of the rows.
    ///
    /// Returns:
    ///     A tensor with these rows, in this order. It occupies memory of the budget.
    fn gather(&self, py: Python<'_>, table: u32, rows: Vec<u64>) -> PyResult<Py<PyAny>> {
        let shared = &*self.shared;
        let engine = shared.engine(py)?;
        shared.drop_kept_leases();
        let gather =
            || interruptible(py, |interrupt| engine.gather(TableId(table), &rows, interrupt));
        let bytes = match gather() {
            // Cached tensors and garbage occupy memory, but can be freed.
            Err(error) if is_referenced(py, &error)? => {
                shared.drop_cached(py);
                py.import("gc")?.call_method0("collect")?;
                gather()
            }
            other => other,
        }?;
        let (table, dtype) = &shared.tables[table as usize];
        let mut shape = table.meta().shape.clone();
        shape[0] = rows.len() as u64;
        let meta = TensorMeta { dtype: table.meta().dtype, shape };
        shared.torch.row_major(py, bytes, (CPU, 0), &meta, dtype)
    }

    /// Returns whether a pass runs on this thread.
    fn in_pass(&self) -> bool {
        self.shared.in_pass()
    }

    /// Returns the tensors of a unit, by index. They keep the memory of the unit allocated, even
    /// after the streamer is deleted. Blocks until the unit is in memory.
    fn take(&self, py: Python<'_>, unit: u32) -> PyResult<Vec<Py<PyAny>>> {
        let shared = &*self.shared;
        let leases = shared.acquire(py, &[unit as usize])?;
        let mut weights: Vec<&Weight> =
            shared.weights.iter().filter(|weight| weight.unit == unit as usize).collect();
        weights.sort_by_key(|weight| weight.index);
        let tensor =
            |weight: &Weight| shared.torch.tensor(py, leases[0].tensor(weight.index), weight);
        weights.into_iter().map(tensor).collect()
    }

    /// Returns the plan and all measurements so far.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_dict(py, &self.shared.engine(py)?.stats())
    }

    /// Limits the memory to a part of the budget, in bytes.
    ///
    /// Args:
    ///     limit: The part of the budget.
    ///     now: Whether the limit takes effect now if no pass is running. Else it takes effect at
    ///         the end of the next pass.
    ///
    /// Raises:
    ///     BudgetError: The limit is too small. Then it stays as it was.
    fn set_limit(&self, py: Python<'_>, limit: usize, now: bool) -> PyResult<()> {
        self.shared.set_limit(py, limit, now)
    }

    /// Makes the limit that was set take effect if nothing is in use.
    fn apply_limit(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.apply_limit(py)
    }

    /// Ends the thread that limits the memory, and waits for it.
    fn stop_monitor(&self, py: Python<'_>) {
        let monitor = self.monitor.lock().take();
        py.detach(|| drop(monitor));
    }

    /// Returns whether the memory is within the limit that was set last.
    fn limit_in_force(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.shared.engine(py)?.limit_in_force())
    }

    /// Returns the smallest limit that works, in bytes.
    fn smallest_limit(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.shared.engine(py)?.smallest_limit())
    }

    /// Predicts passes with other budgets, from all measurements so far.
    ///
    /// Args:
    ///     budgets: Budgets in bytes.
    ///
    /// Returns:
    ///     A dictionary for each budget that works.
    fn curve<'py>(&self, py: Python<'py>, budgets: Vec<usize>) -> PyResult<Bound<'py, PyList>> {
        let engine = self.shared.engine(py)?;
        curve_list(py, &py.detach(|| engine.curve(&budgets)))
    }

    /// Begins to record a trace. A trace that is running is dropped.
    fn begin_trace(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.drop_kept_leases();
        self.shared.engine(py)?.begin_trace();
        Ok(())
    }

    /// Ends the running trace.
    ///
    /// Args:
    ///     page: Whether to return an HTML page instead of JSON.
    ///     budgets: The budgets for which the page has predictions, in bytes.
    ///
    /// Returns:
    ///     The trace, or None if none is running.
    fn end_trace(
        &self,
        py: Python<'_>,
        page: bool,
        budgets: Vec<usize>,
    ) -> PyResult<Option<String>> {
        let engine = self.shared.engine(py)?;
        let Some(trace) = engine.end_trace() else { return Ok(None) };
        Ok(Some(py.detach(|| match page {
            true => trace_html(&trace, &engine.curve(&budgets)),
            false => trace_json(&trace),
        })))
    }

    /// Remembers the measured speeds, so that later plans predict from them.
    fn remember_speeds(&self, py: Python<'_>) -> PyResult<()> {
        let stats = self.shared.engine(py)?.stats();
        let content = self.shared.content();
        py.detach(|| Speeds::default().remember(&content.checkpoint, &stats));
        Ok(())
    }

    /// Streams a later state of the checkpoint from now on, and drops what is in memory.
    ///
    /// Args:
    ///     newer: The later state. It has the tensors of the units, perhaps in other places.
    ///
    /// Raises:
    ///     CheckpointError: A tensor has another dtype or shape. Nothing changes.
    ///     MissingTensorError: A tensor is missing. Nothing changes.
    ///     ConfigurationError: A pass is running, or weights are in use. Nothing changes.
    ///     BudgetError: The later state is compressed and needs more memory. Nothing changes.
    ///     StorageError: The system refuses memory or threads. Nothing changes.
    fn reload(&self, py: Python<'_>, newer: &Checkpoint) -> PyResult<()> {
        self.shared.reload(py, &newer.inner)
    }

    /// Returns whether a forward or an operation on a weight is running.
    fn in_use(&self) -> bool {
        self.shared.is_in_use()
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        if let Some(monitor) = self.monitor.get_mut().take() {
            // The thread may wait for the interpreter, which this thread holds.
            Python::attach(|py| py.detach(|| drop(monitor)));
        }
    }
}

/// Starts a thread that limits the memory of a streamer. It ends when the streamer is dropped.
fn monitor(shared: &Arc<Shared>, governor: Governor) -> std::io::Result<PressureMonitor> {
    let shared = Arc::downgrade(shared);
    PressureMonitor::new(governor, move |limit| {
        let resize = |py: Python<'_>| {
            let shared = shared.upgrade()?;
            let engine = shared.engine(py).ok()?;
            // A pass may have used units together, and so need more than before.
            let _ = shared.set_limit(py, limit.max(engine.smallest_limit()), true);
            let stats = engine.stats();
            Some(Resized {
                limit_bytes: stats.limit_bytes,
                is_within: engine.is_within_limit(),
                in_force: engine.limit_in_force(),
            })
        };
        Python::try_attach(resize).flatten()
    })
}
