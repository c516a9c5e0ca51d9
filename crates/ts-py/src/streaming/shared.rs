// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Streamer` without its methods, and what it shares with its passes, uses and
//! parameters.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tensorstream::PressureMonitor;
use tensorstream::orchestrator::{Table, UnitId};
use tensorstream::streams::AnyStream;

use super::Engine;
use super::engine::{EngineContent, EngineFactory};
use super::thread_passes::forget_passes;
use super::torch::Torch;
use super::unit_tensors::UnitEntry;
use super::weight::Weight;
use crate::accelerator::Accelerator;
use crate::errors::{configuration_error, to_python};
#[cfg(target_os = "linux")]
use crate::openmp::IdleTeam;
use crate::signals::interruptible;

/// Streams the weights of a model.
///
/// Args:
///     checkpoint: The checkpoint that contains the weights.
///     units: The name and the tensors of each unit, and whether the data of a pass select the
///         unit. A tensor has a name, a safetensors dtype name, a shape, parts, and an address
///         modulo 64. None stands for the address that a mapping of the file would have.
///     weights: The parameters. Each has the number of its unit, its index in the unit, its shape
///         and strides (None for those of the bytes), its name and its dtype. The index of a
///         parameter in this list is its key.
///     budget: The memory for weights, in bytes.
///     together: Sets of units that one operation needs at the same time.
///     classes: The class of parameters with the memory of their unit, and that of stand-ins.
///     settings: The settings of the engine; None for the defaults.
///     tables: The tensors whose rows ``gather`` reads, each with its dtype.
///     scores: The scores of routed units in an earlier run, from ``routing_scores``.
///     limits: The least part of the budget to use, and the part to use at first, in bytes. With
///         limits, the used part follows the memory that other programs leave.
#[pyclass(frozen, weakref, module = "tensorstream._native")]
pub(crate) struct Streamer {
    pub(super) shared: Arc<Shared>,
    pub(super) monitor: Mutex<Option<PressureMonitor>>,
}

/// What a streamer shares.
pub(super) struct Shared {
    /// Whether leases of all units are kept in `entries` from use to use: the generation of the
    /// process that keeps them, or 0. Changed only while the GIL is held.
    pub(super) keeps_leases_in: AtomicUsize,
    /// Replaced in a forked child process, which cannot use the engine of its parent, and by a
    /// reload. `None` if the new engine could not be created yet.
    ///
    /// This mutex and `content` are locked only while the GIL is held. Python holds the GIL when it
    /// forks too, so no child starts with a mutex locked.
    engine: Mutex<Option<Arc<Engine>>>,
    content: Mutex<Arc<EngineContent>>,
    new_engine: EngineFactory,
    /// The limit of the memory, in bytes.
    limit: AtomicUsize,
    /// Which calls of modules are passes. Set once.
    pub(super) passes: PyOnceLock<Py<PyAny>>,
    pub(super) weights: Vec<Weight>,
    /// The tables, each with its `torch.dtype`.
    pub(super) tables: Vec<(Table, Py<PyAny>)>,
    pub(super) entries: Vec<Mutex<UnitEntry>>,
    pub(super) torch: Torch,
    /// The device with the memory of units. None if they are in host memory.
    accelerator: Option<Py<Accelerator>>,
    /// Present if some weights do not fit into the budget.
    #[cfg(target_os = "linux")]
    _idle_team: Option<Arc<IdleTeam>>,
}

impl Shared {
    pub(super) fn new(
        py: Python<'_>,
        content: EngineContent,
        new_engine: EngineFactory,
        weights: Vec<Weight>,
        tables: Vec<(Table, Py<PyAny>)>,
        torch: Torch,
        accelerator: Option<Py<Accelerator>>,
    ) -> PyResult<Self> {
        let engine = new_engine(py, &content)?;
        #[cfg(target_os = "linux")]
        let _idle_team = {
            let stats = engine.stats();
            let streams = stats.units.iter().map(|unit| unit.slot_bytes).sum::<usize>()
                > stats.plan.peak_bytes();
            if streams && accelerator.is_none() { IdleTeam::shared() } else { None }
        };
        Ok(Self {
            keeps_leases_in: AtomicUsize::new(0),
            engine: Mutex::new(Some(Arc::new(engine))),
            limit: AtomicUsize::new(usize::MAX),
            passes: PyOnceLock::new(),
            new_engine,
            weights,
            tables,
            entries: content.units.iter().map(|_| Mutex::default()).collect(),
            content: Mutex::new(Arc::new(content)),
            torch,
            accelerator,
            #[cfg(target_os = "linux")]
            _idle_team,
        })
    }

    /// Returns the engine. A forked child process creates its own.
    pub(super) fn engine(&self, py: Python<'_>) -> PyResult<Arc<Engine>> {
        let is_forked = match self.current_engine() {
            Some(engine) if !engine.is_forked() => return Ok(engine),
            Some(_) => true,
            None => false,
        };
        let own = Arc::new((self.new_engine)(py, &self.content())?);
        // The passes and tensors of the other engine do not exist in this one.
        if is_forked {
            forget_passes();
        }
        self.forget_tensors();
        let before = self.engine.lock().replace(Arc::clone(&own));
        drop(before);
        // A limit that the other engine accepted may be too small for this one, which has not
        // learned which units are used together. Then the budget is the limit.
        if own.set_limit(self.limit.load(Ordering::Relaxed)).is_ok() {
            own.replan();
        }
        Ok(own)
    }

    /// Streams a later state of the checkpoint from now on. See `Streamer::reload`.
    pub(super) fn reload(&self, py: Python<'_>, newer: &tensorstream::Checkpoint) -> PyResult<()> {
        let content = self.content().in_newer(py, newer)?;
        let engine = self.engine(py)?;
        self.drop_cached(py);
        // While this pass runs, no other one begins.
        let pass = if self.in_pass() { None } else { py.detach(|| engine.try_begin_pass()) };
        let Some(pass) = pass.filter(|_| !self.is_in_use()) else {
            if let Some(pass) = pass {
                engine.end_pass(pass);
            }
            return Err(configuration_error(
                py,
                "cannot reload the model while it runs, or while its weights are referenced: wait \
                 for the end of its forwards, and delete references to weights",
            ));
        };
        // The GIL is held from here on, so that no other thread sees only a part of the change.
        self.forget_tensors();
        let before = std::mem::replace(&mut *self.content.lock(), Arc::new(content));
        *self.engine.lock() = None;
        // Gives the memory back before the new engine takes its own.
        py.detach(|| {
            engine.end_pass(pass);
            drop(engine);
        });
        self.engine(py).map(drop).inspect_err(|_| {
            // For example, what is compressed now needs more memory than the budget.
            *self.content.lock() = before;
        })
    }

    /// Returns whether no reload has replaced an engine.
    pub(super) fn is_current(&self, engine: &Arc<Engine>) -> bool {
        self.current_engine().is_some_and(|current| Arc::ptr_eq(&current, engine))
    }

    /// Returns the engine, which may be that of a parent process. None if it could not be created.
    pub(super) fn current_engine(&self) -> Option<Arc<Engine>> {
        self.engine.lock().clone()
    }

    /// Returns the object that says which calls of modules are passes.
    pub(super) fn passes<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.passes.get(py).map(|passes| passes.bind(py).clone())
    }

    /// Returns what the engine streams.
    pub(super) fn content(&self) -> Arc<EngineContent> {
        Arc::clone(&self.content.lock())
    }

    /// Returns whether the engine plans for one operation that uses all of these units. It learns
    /// of such an operation when the units are acquired together.
    pub(super) fn knows_together(&self, py: Python<'_>, units: &[usize]) -> PyResult<bool> {
        if units.len() < 2 {
            return Ok(true);
        }
        let ids: Vec<_> = units.iter().map(|&unit| UnitId(unit as u32)).collect();
        Ok(self.engine(py)?.knows_together(&ids))
    }

    /// Limits the memory to a part of the budget, in bytes: `now` if nothing is in use, and else at
    /// the end of a pass.
    pub(super) fn set_limit(&self, py: Python<'_>, limit: usize, now: bool) -> PyResult<()> {
        let engine = self.engine(py)?;
        if limit < self.limit.load(Ordering::Relaxed) {
            // They would keep the memory of resident units.
            self.drop_cached(py);
        }
        py.detach(|| engine.set_limit(limit)).map_err(|e| to_python(py, &e.into()))?;
        // Another thread may have kept leases in the meantime.
        self.drop_kept_leases();
        self.limit.store(limit, Ordering::Relaxed);
        if now { self.apply_limit(py) } else { Ok(()) }
    }

    /// Makes the limit take effect if nothing is in use.
    pub(super) fn apply_limit(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.engine(py)?;
        if !self.is_in_use() && !engine.limit_in_force() {
            self.drop_cached(py);
            interruptible(py, |interrupt| engine.replan_interruptible(interrupt))?;
        }
        Ok(())
    }

    pub(super) fn entry(&self, unit: usize) -> &Mutex<UnitEntry> {
        &self.entries[unit]
    }

    /// Returns PyTorch's current stream if units are on a device with its own memory. This calls
    /// Python functions, so an exception of a signal handler may arrive. Call it before a use
    /// begins, and while no lock is held.
    pub(super) fn current_stream(&self, py: Python<'_>) -> PyResult<Option<AnyStream>> {
        let accelerator = self.accelerator.as_ref();
        accelerator.map(|accelerator| accelerator.get().current_stream(py)).transpose()
    }

    /// Returns whether units are on a device with its own memory.
    pub(super) fn is_on_device(&self) -> bool {
        self.accelerator.is_some()
    }
}

/// One more than the number of forks between the first process and this one.
static GENERATION: AtomicUsize = AtomicUsize::new(1);

/// Notes that this process is a forked child.
#[pyfunction]
pub(super) fn streaming_forked() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Returns a number that a forked child and its parent do not share. Asking the system for the
/// number of the process would take a tenth of a use of a resident unit.
pub(super) fn process_generation() -> usize {
    GENERATION.load(Ordering::Relaxed)
}

/// Returns whether an exception is a `UnitReferencedError`.
pub(super) fn is_referenced(py: Python<'_>, error: &PyErr) -> PyResult<bool> {
    Ok(error.matches(py, py.import("tensorstream.errors")?.getattr("UnitReferencedError")?)?)
}
