// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Streamer` without its methods, and the state that its uses and passes share.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tensorstream::PressureMonitor;
use tensorstream::format::TensorMeta;
use tensorstream::orchestrator::{PassId, Table, TableId, UnitId};
use tensorstream::streams::AnyStream;

use super::engine::{EngineContent, EngineFactory};
use super::torch::Torch;
use super::unit_tensors::{UnitEntry, UnitTensors};
use super::weight::Weight;
use super::{Engine, Lease};
use crate::accelerator::Accelerator;
use crate::dlpack::CPU;
use crate::errors::{configuration_error, to_python};
use crate::heap;
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
    pub(super) inner: Arc<StreamerInner>,
    pub(super) monitor: Mutex<Option<PressureMonitor>>,
}

pub(super) struct StreamerInner {
    /// Whether leases of all units are kept in `entries` from use to use: the generation of the
    /// process that keeps them, or 0. Changed only while the GIL is held.
    keeps_leases_in: AtomicUsize,
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
    passes: PyOnceLock<Py<PyAny>>,
    pub(super) weights: Vec<Weight>,
    /// The tables, each with its `torch.dtype`.
    tables: Vec<(Table, Py<PyAny>)>,
    entries: Vec<Mutex<UnitEntry>>,
    pub(super) torch: Torch,
    /// The device with the memory of units. None if they are in host memory.
    accelerator: Option<Py<Accelerator>>,
    /// Present if some weights do not fit into the budget.
    #[cfg(target_os = "linux")]
    _idle_team: Option<Arc<IdleTeam>>,
}

/// A pass that was begun on a thread.
pub(super) struct RunningPass {
    engine: Arc<Engine>,
    id: PassId,
    ended: Arc<AtomicBool>,
}

/// What is left when a use of a unit has ended.
pub(super) struct EndedUse {
    /// The name of a weight that was written to.
    pub(super) written: Option<String>,
    /// The unit, if other objects still reference its memory.
    pub(super) leaked: Option<Leaked>,
}

/// A unit whose use has ended, but whose memory other objects still reference.
pub(super) struct Leaked {
    pub(super) unit: usize,
    pub(super) lease: Lease,
    /// The tensors on a device with its own memory. The other objects share their version counters.
    pub(super) tensors: Option<Arc<UnitTensors>>,
}

thread_local! {
    /// The most recent pass of this thread in each [`StreamerInner`]. The key is the address of the
    /// [`StreamerInner`].
    static PASSES: RefCell<HashMap<usize, ThreadPass>> = RefCell::default();
}

/// A pass of a thread.
struct ThreadPass {
    /// The pass, for leases. `None` if leases were kept when it began: then the engine would see
    /// only some of the units that the pass visits, and learn a wrong order.
    visits: Option<PassId>,
    ended: Arc<AtomicBool>,
}

impl StreamerInner {
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
        let engine = self.engine.lock().clone();
        let is_forked = match engine {
            Some(engine) if !engine.is_forked() => return Ok(engine),
            Some(_) => true,
            None => false,
        };
        let own = Arc::new((self.new_engine)(py, &self.content())?);
        // The passes and tensors of the other engine do not exist in this one.
        if is_forked {
            PASSES.with_borrow_mut(HashMap::clear);
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

    /// Sets the object that says which calls of modules are passes.
    pub(super) fn set_passes(&self, py: Python<'_>, passes: Py<PyAny>) {
        let _ = self.passes.set(py, passes);
    }

    /// Returns the object that says which calls of modules are passes.
    pub(super) fn passes<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.passes.get(py).map(|passes| passes.bind(py).clone())
    }

    /// Returns what the engine streams.
    pub(super) fn content(&self) -> Arc<EngineContent> {
        Arc::clone(&self.content.lock())
    }

    /// Makes the next uses of all units create new tensors.
    fn forget_tensors(&self) {
        self.keeps_leases_in.store(0, Ordering::Relaxed);
        for unit in 0..self.entries.len() {
            let before = std::mem::take(&mut *self.entry(unit).lock());
            drop(before);
        }
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

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Returns whether a pass runs on this thread.
    pub(super) fn in_pass(&self) -> bool {
        self.thread_pass(|_| ()).is_some()
    }

    /// Returns something of the pass that runs on this thread, or None.
    fn thread_pass<T>(&self, get: impl FnOnce(&ThreadPass) -> T) -> Option<T> {
        PASSES.with_borrow(|passes| {
            let pass = passes.get(&self.address())?;
            (!pass.ended.load(Ordering::Acquire)).then(|| get(pass))
        })
    }

    /// Begins a pass on this thread, or returns None if the thread is already in a pass. Blocks
    /// while the maximum number of passes is running.
    pub(super) fn begin_pass(&self, py: Python<'_>) -> PyResult<Option<RunningPass>> {
        loop {
            let engine = self.engine(py)?;
            if self.in_pass() {
                return Ok(None);
            }
            let id = interruptible(py, |interrupt| engine.begin_pass_interruptible(interrupt))?;
            if self.is_current(&engine) {
                return Ok(Some(self.running(py, engine, id)));
            }
            engine.end_pass(id); // a reload has replaced the engine
        }
    }

    /// Begins a pass on this thread, or returns None if any thread is in a pass.
    pub(super) fn try_begin_pass(&self, py: Python<'_>) -> PyResult<Option<RunningPass>> {
        if self.in_pass() {
            return Ok(None);
        }
        let engine = self.engine(py)?;
        let id = py.detach(|| engine.try_begin_pass());
        if let Some(id) = id.filter(|_| !self.is_current(&engine)) {
            engine.end_pass(id);
            return Ok(None);
        }
        Ok(id.map(|id| self.running(py, engine, id)))
    }

    /// Returns whether no reload has replaced an engine.
    fn is_current(&self, engine: &Arc<Engine>) -> bool {
        self.engine.lock().as_ref().is_some_and(|current| Arc::ptr_eq(current, engine))
    }

    /// Returns a pass that runs on this thread.
    fn running(&self, py: Python<'_>, engine: Arc<Engine>, id: PassId) -> RunningPass {
        heap::trim_if_short(py);
        let visits = (!self.keep_leases(&engine)).then_some(id);
        let ended = Arc::new(AtomicBool::new(false));
        PASSES.with_borrow_mut(|passes| {
            passes.retain(|_, pass| !pass.ended.load(Ordering::Acquire));
            let own = ThreadPass { visits, ended: Arc::clone(&ended) };
            passes.insert(self.address(), own);
        });
        RunningPass { engine, id, ended }
    }

    /// Keeps a lease of every unit for later uses, if all units are resident. Returns whether
    /// leases are kept.
    fn keep_leases(&self, engine: &Engine) -> bool {
        if self.keeps_leases() {
            return true;
        }
        // Gathering rows needs memory.
        if !self.tables.is_empty() {
            return false;
        }
        let Some(leases) = engine.acquire_all_resident() else { return false };
        for (unit, lease) in leases.into_iter().enumerate() {
            self.entry(unit).lock().kept = Some(lease);
        }
        self.keeps_leases_in.store(process_generation(), Ordering::Relaxed);
        true
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

    /// Returns whether leases of all units are kept. A forked child has none of its parent.
    pub(super) fn keeps_leases(&self) -> bool {
        self.keeps_leases_in.load(Ordering::Relaxed) == process_generation()
    }

    /// Drops the leases that are kept. Those in use end with their use.
    pub(super) fn drop_kept_leases(&self) {
        if self.keeps_leases_in.swap(0, Ordering::Relaxed) != 0 {
            for entry in &self.entries {
                let kept = entry.lock().kept.take();
                drop(kept);
            }
        }
    }

    /// Begins a use of a unit with its kept lease, or returns None if it has none.
    pub(super) fn use_kept(&self, unit: usize) -> Option<Arc<UnitTensors>> {
        if !self.keeps_leases() {
            return None;
        }
        let mut entry = self.entry(unit).lock();
        if let Some(tensors) = entry.tensors.upgrade() {
            let mut state = tensors.lock();
            if state.lease.is_none() {
                let lease = entry.kept.take()?;
                if state.address != address(&lease) {
                    entry.kept = Some(lease);
                    return None;
                }
                state.set_lease(lease);
            }
            drop(state);
            return Some(tensors);
        }
        let lease = entry.kept.take()?;
        let tensors = Arc::new(UnitTensors::new(unit, address(&lease), lease));
        entry.tensors = Arc::downgrade(&tensors);
        Some(tensors)
    }

    /// Ends a pass. Returns whether to replan, and the names of weights that were written to
    /// without PyTorch noticing. Does nothing if the pass has already ended.
    pub(super) fn end_pass(&self, py: Python<'_>, pass: &RunningPass) -> (bool, Option<String>) {
        let RunningPass { engine, id, ended } = pass;
        if ended.swap(true, Ordering::AcqRel) || engine.is_forked() {
            return (false, None);
        }
        (engine.end_pass(*id), self.untracked_writes(py, engine))
    }

    /// Returns the names of weights that were written to without PyTorch noticing, if the engine
    /// detects such writes. The units of these weights are read again for their next use.
    fn untracked_writes(&self, py: Python<'_>, engine: &Engine) -> Option<String> {
        let written = py.detach(|| engine.modified_units());
        if !written.is_empty() {
            self.drop_kept_leases();
        }
        let mut names = Vec::new();
        for (id, tensors) in written {
            let unit = id.0 as usize;
            // The next use gets other memory, so it must not reuse these tensors.
            let before = std::mem::take(&mut *self.entry(unit).lock());
            drop(before);
            engine.discard(id).expect("the unit exists, because the engine reported it");
            let is_written =
                |weight: &&Weight| weight.unit == unit && tensors.contains(&weight.index);
            let found = self.weights.iter().filter(is_written);
            names.extend(found.map(|weight| format!("`{}`", weight.name)));
        }
        // Writes are detected by page. If weights share a page, any of them may have been written.
        (!names.is_empty()).then(|| names.join(" or "))
    }

    /// Leases units, and returns one lease for each. Blocks until they are in memory.
    pub(super) fn acquire(&self, py: Python<'_>, units: &[usize]) -> PyResult<Vec<Lease>> {
        let engine = self.engine(py)?;
        heap::trim_if_short(py);
        // No call may wait for leases that nobody uses.
        self.drop_kept_leases();
        let pass = self.thread_pass(|pass| pass.visits).flatten();
        let ids: Vec<UnitId> = units.iter().map(|&unit| UnitId(unit as u32)).collect();
        let acquire = || {
            interruptible(py, |interrupt| engine.acquire_all_interruptible(pass, &ids, interrupt))
        };
        let leases = match acquire() {
            // Cached tensors occupy memory, but can be created again.
            Err(error) if is_referenced(py, &error)? && self.drop_cached(py) => acquire(),
            other => other,
        };
        match leases {
            // Garbage may occupy memory that only the cycle collector frees.
            Err(error) if is_referenced(py, &error)? => {
                py.import("gc")?.call_method0("collect")?;
                acquire()
            }
            other => other,
        }
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

    /// Reads rows of a table. Blocks.
    pub(super) fn gather(&self, py: Python<'_>, id: u32, rows: &[u64]) -> PyResult<Py<PyAny>> {
        let engine = self.engine(py)?;
        self.drop_kept_leases();
        let gather = || interruptible(py, |interrupt| engine.gather(TableId(id), rows, interrupt));
        let bytes = match gather() {
            // Cached tensors and garbage occupy memory, but can be freed.
            Err(error) if is_referenced(py, &error)? => {
                self.drop_cached(py);
                py.import("gc")?.call_method0("collect")?;
                gather()
            }
            other => other,
        }?;
        let (table, dtype) = &self.tables[id as usize];
        let mut shape = table.meta().shape.clone();
        shape[0] = rows.len() as u64;
        let meta = TensorMeta { dtype: table.meta().dtype, shape };
        self.torch.row_major(py, bytes, (CPU, 0), &meta, dtype)
    }

    pub(super) fn entry(&self, unit: usize) -> &Mutex<UnitEntry> {
        &self.entries[unit]
    }

    /// Returns whether any unit is in use.
    pub(super) fn is_in_use(&self) -> bool {
        (0..self.entries.len()).any(|unit| self.tensors_in_use(unit).is_some())
    }

    /// Returns the tensors of a unit, or None if the unit is not in use.
    pub(super) fn tensors_in_use(&self, unit: usize) -> Option<Arc<UnitTensors>> {
        let tensors = self.entry(unit).lock().tensors.upgrade()?;
        let in_use = tensors.lock().lease.is_some();
        in_use.then_some(tensors)
    }

    /// Drops the kept leases and the cached tensors. Returns whether there were any tensors.
    pub(super) fn drop_cached(&self, py: Python<'_>) -> bool {
        self.drop_kept_leases();
        let cached: Vec<_> =
            self.entries.iter().filter_map(|entry| entry.lock().cached.take()).collect();
        if self.is_on_device() {
            // The units are loaded again: nothing would notice writes to these tensors any more.
            let watched = |tensors: &&Arc<UnitTensors>| {
                tensors.is_written(py) || tensors.is_shared(py, &self.torch)
            };
            for tensors in cached.iter().filter(watched) {
                if let Some(engine) = &*self.engine.lock() {
                    let _ = engine.discard(UnitId(tensors.unit as u32));
                }
            }
        }
        !cached.is_empty()
    }

    /// Keeps tensors that other objects share, so that the next use of the unit notices writes to
    /// them.
    pub(super) fn watch(&self, tensors: Arc<UnitTensors>) {
        let mut entry = self.entry(tensors.unit).lock();
        // If the unit has other tensors, it is in other memory, and writes do not matter.
        let is_own = std::ptr::eq(entry.tensors.as_ptr(), Arc::as_ptr(&tensors));
        let before = if is_own { entry.cached.replace(tensors) } else { Some(tensors) };
        drop(entry);
        drop(before);
    }

    /// Returns the tensors of a leased unit, which all uses of the unit share. Also returns `lease`
    /// if the tensors already have a lease. Otherwise, stores `lease` in the tensors.
    pub(super) fn share(&self, unit: usize, lease: Lease) -> (Arc<UnitTensors>, Option<Lease>) {
        let address = address(&lease);
        let mut entry = self.entry(unit).lock();
        if let Some(tensors) = entry.tensors.upgrade() {
            let mut state = tensors.lock();
            if state.lease.is_some() {
                drop(state);
                return (tensors, Some(lease));
            }
            if state.address == address {
                state.set_lease(lease);
                drop(state);
                return (tensors, None);
            }
        }
        let tensors = Arc::new(UnitTensors::new(unit, address, lease));
        entry.tensors = Arc::downgrade(&tensors);
        let before = entry.cached.take();
        let is_first = !std::mem::replace(&mut entry.was_used, true);
        drop(entry);
        drop(before);
        if is_first {
            heap::trim_fragments();
        }
        (tensors, None)
    }

    /// Ends one use of a unit. When the last use ends, caches the tensors if the unit is resident
    /// and nothing else references the memory of the unit. Otherwise, drops the tensors.
    ///
    /// Returns the unit if other objects still reference its memory. If a weight was `written` to,
    /// discards the unit and returns None.
    pub(super) fn end_use(
        &self,
        py: Python<'_>,
        tensors: Arc<UnitTensors>,
        written: bool,
    ) -> Option<Leaked> {
        let unit = tensors.unit;
        let mut entry = self.entry(unit).lock();
        let is_cached = entry.cached.as_ref().is_some_and(|cached| Arc::ptr_eq(cached, &tensors));
        if Arc::strong_count(&tensors) > 1 + usize::from(is_cached) {
            return None;
        }
        let lease = tensors.lock().lease.take()?;
        // Tensors that a forked child has from its parent are not those of its entry.
        let is_own = std::ptr::eq(entry.tensors.as_ptr(), Arc::as_ptr(&tensors));
        let keeps = is_own && self.keeps_leases();
        // Cached tensors of a sealed unit would hide that nothing else references it any more.
        let stays = keeps || (lease.is_resident() && !lease.is_sealed());
        if !written && stays && !tensors.is_shared(py, &self.torch) {
            let lease = match keeps && entry.kept.is_none() {
                true => entry.kept.replace(lease),
                false => Some(lease),
            };
            let before = entry.cached.replace(tensors);
            drop(entry);
            drop((lease, before));
            return None;
        }
        let cached = is_cached.then(|| entry.cached.take());
        let watched = self.is_on_device() && !written && tensors.is_shared(py, &self.torch);
        drop(entry);
        let tensors = watched.then_some(tensors);
        drop(cached);
        // The next use must acquire this unit, which compares its checksums.
        self.drop_kept_leases();
        if written {
            lease.discard();
            return None;
        }
        lease.is_shared().then_some(Leaked { unit, lease, tensors })
    }

    /// Ends one use of a unit, by a forward or by an operation.
    pub(super) fn end(&self, py: Python<'_>, tensors: Arc<UnitTensors>) -> EndedUse {
        let written = tensors.written_weight(py, &self.weights, self.entry(tensors.unit));
        let leaked = self.end_use(py, tensors, written.is_some());
        EndedUse { written, leaked }
    }

    /// Creates the tensors of a unit, by index. They keep the memory of the unit allocated, even
    /// after the streamer is dropped. Blocks until the unit is in memory.
    pub(super) fn detached_tensors(&self, py: Python<'_>, unit: usize) -> PyResult<Vec<Py<PyAny>>> {
        let leases = self.acquire(py, &[unit])?;
        let mut weights: Vec<&Weight> =
            self.weights.iter().filter(|weight| weight.unit == unit).collect();
        weights.sort_by_key(|weight| weight.index);
        let tensor =
            |weight: &Weight| self.torch.tensor(py, leases[0].tensor(weight.index), weight);
        weights.into_iter().map(tensor).collect()
    }

    /// Returns PyTorch's current stream if units are on a device with its own memory. This calls
    /// Python functions, so an exception of a signal handler may arrive. Call it before a use
    /// begins, and while no lock is held.
    pub(super) fn current_stream(&self, py: Python<'_>) -> PyResult<Option<AnyStream>> {
        let accelerator = self.accelerator.as_ref();
        accelerator.map(|accelerator| accelerator.get().current_stream(py)).transpose()
    }

    /// Lets a stream use a unit: makes it wait for the copy of the unit to the device, and keeps
    /// the memory until the work of the stream has ended. Does not block.
    pub(super) fn use_on(
        &self,
        py: Python<'_>,
        stream: Option<&AnyStream>,
        tensors: &UnitTensors,
    ) -> PyResult<()> {
        let Some(stream) = stream else { return Ok(()) };
        tensors.use_on(stream).map_err(|e| to_python(py, &e.into()))
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
fn process_generation() -> usize {
    GENERATION.load(Ordering::Relaxed)
}

/// Returns the address of the first tensor of a leased unit.
fn address(lease: &Lease) -> usize {
    if lease.tensor_count() == 0 { 0 } else { lease.tensor(0).range().address() }
}

/// Returns whether an exception is a `UnitReferencedError`.
fn is_referenced(py: Python<'_>, error: &PyErr) -> PyResult<bool> {
    Ok(error.matches(py, py.import("tensorstream.errors")?.getattr("UnitReferencedError")?)?)
}
