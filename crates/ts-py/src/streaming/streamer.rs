// SPDX-License-Identifier: MIT OR Apache-2.0
//! A model's streamed weights as PyTorch sees them: tensors over units that are leased, for as long
//! as something uses them.
//!
//! All state changes happen in native calls that run no bytecode, so that a signal's exception
//! arrives before or after them and never in between. Whoever loses a [`Use`] ends it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use parking_lot::{Mutex, MutexGuard};
use pyo3::exceptions::PyIndexError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tensorstream::orchestrator::{self as orchestrator, PassId, UnitId};

use super::engine::{Settings, TensorSpec, build, interruptible, stats_dict};
use super::weights::{Live, Place, Torch, Weight, WeightSpec};
use crate::files::checkpoint::Checkpoint;

/// Streams the weights of a model.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Streamer {
    inner: Arc<Inner>,
}

struct Inner {
    /// Replaced in a child process, where the parent's is of no use. Locked only with the
    /// interpreter held, as it is during a fork, so that no child finds it locked.
    engine: Mutex<Arc<orchestrator::Engine>>,
    recipe: Box<dyn Fn(Python<'_>) -> PyResult<orchestrator::Engine> + Send + Sync>,
    weights: Vec<Weight>,
    /// By unit.
    places: Vec<Mutex<Place>>,
    torch: Torch,
}

/// The right to use units until it is closed or lost.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Use {
    state: Mutex<UseState>,
}

#[derive(Default)]
struct UseState {
    inner: Option<Arc<Inner>>,
    live: Vec<Arc<Live>>,
    /// Leases of units whose `Live` was there already.
    more: Vec<orchestrator::Lease>,
    lent: bool,
    thread: Option<ThreadId>,
    flat: Option<FlatWeights>,
    /// Leases of units whose tensors outlived their use.
    leaked: Vec<(usize, orchestrator::Lease)>,
}

/// The list of its parameters that a recurrent module keeps beside the dictionary.
#[derive(Clone)]
struct FlatWeights {
    module: Arc<Py<PyAny>>,
    stand_ins: Arc<Py<PyAny>>,
}

/// What a recurrent module passes on besides itself: for each place of its list the parameter, and
/// the weight if it is streamed.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Recurrent {
    flat: FlatWeights,
    keys: Vec<Option<usize>>,
}

#[pymethods]
impl Recurrent {
    /// A weak reference to the module, its list with stand-ins, and the weights at the list's
    /// places.
    #[new]
    fn new(module: Py<PyAny>, stand_ins: Py<PyAny>, keys: Vec<Option<usize>>) -> Self {
        Self {
            flat: FlatWeights { module: Arc::new(module), stand_ins: Arc::new(stand_ins) },
            keys,
        }
    }
}

thread_local! {
    /// The pass that runs on this thread, by streamer.
    static PASSES: RefCell<HashMap<usize, (PassId, Arc<AtomicBool>)>> = RefCell::default();
}

/// A pass that has begun on this thread; it does nothing where one ran already. It ends at the
/// latest when it is lost.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Pass {
    begun: Option<Begun>,
}

struct Begun {
    inner: Arc<Inner>,
    engine: Arc<orchestrator::Engine>,
    id: PassId,
    ended: Arc<AtomicBool>,
}

#[pymethods]
impl Pass {
    /// Ends it. True when `replan` should be called. Does nothing the second time.
    ///
    /// Raises ModelError when a weight was written to past PyTorch; its unit is read again for the
    /// next use.
    fn end(&self, py: Python<'_>) -> PyResult<bool> {
        let (proposed, written) = self.finish(py);
        match written {
            Some(names) => Err(written_to(py, &names)?),
            None => Ok(proposed),
        }
    }

    /// Ends it after an exception.
    fn close(&self, py: Python<'_>) {
        self.finish(py);
    }
}

impl Pass {
    /// Whether to plan anew, and which weights were written to.
    fn finish(&self, py: Python<'_>) -> (bool, Option<String>) {
        let Some(Begun { inner, engine, id, ended }) = &self.begun else { return (false, None) };
        if ended.swap(true, Ordering::AcqRel) || engine.is_foreign() {
            return (false, None);
        }
        (engine.end_pass(*id), inner.written_past_pytorch(py, engine))
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        Python::attach(|py| self.close(py));
    }
}

/// The exception for weights that were written to.
fn written_to(py: Python<'_>, names: &str) -> PyResult<PyErr> {
    let error = py.import("tensorstream.errors")?.getattr("ModelError")?;
    let text = format!(
        "{names} was written to in place: a streamed weight cannot be changed; restore(model) first"
    );
    Ok(PyErr::from_value(error.call1((text,))?))
}

#[pymethods]
impl Streamer {
    #[new]
    #[pyo3(signature = (checkpoint, units, weights, *, budget, together, weight_class,
        settings=None))]
    #[allow(clippy::too_many_arguments)] // by name, all of them
    fn new(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        units: Vec<(String, Vec<TensorSpec>)>,
        weights: Vec<WeightSpec>,
        budget: usize,
        together: Vec<Vec<u32>>,
        weight_class: Py<PyAny>,
        settings: Option<Settings>,
    ) -> PyResult<Self> {
        let (units, recipe) = build(py, checkpoint, units, budget, together, settings)?;
        let weight = |spec| {
            Weight::new(spec, &units).ok_or_else(|| PyIndexError::new_err("a weight is in no unit"))
        };
        let weights = weights.into_iter().map(weight).collect::<PyResult<_>>()?;
        let engine = Mutex::new(Arc::new(recipe(py)?));
        let places = units.iter().map(|_| Mutex::default()).collect();
        let torch = Torch::new(py, weight_class)?;
        Ok(Self { inner: Arc::new(Inner { engine, recipe, weights, places, torch }) })
    }

    /// Begins a pass, waiting while max_passes others run.
    fn begin_pass(&self, py: Python<'_>) -> PyResult<Pass> {
        let engine = self.inner.engine(py)?;
        if self.inner.pass().is_some() {
            return Ok(Pass { begun: None });
        }
        let id = interruptible(py, |interrupt| engine.begin_pass(interrupt))?;
        let ended = Arc::new(AtomicBool::new(false));
        let inner = Arc::clone(&self.inner);
        let pass = Pass { begun: Some(Begun { inner, engine, id, ended: Arc::clone(&ended) }) };
        PASSES.with_borrow_mut(|passes| {
            passes.retain(|_, (_, ended)| !ended.load(Ordering::Acquire));
            passes.insert(self.inner.id(), (id, ended));
        });
        Ok(pass)
    }

    /// Has autocast forget what it cast of weights: to be called when no operation runs.
    fn forget_casts(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.torch.forget_casts(py)
    }

    /// Puts a better plan in force if nothing is in use; True when it is.
    fn replan(&self, py: Python<'_>) -> PyResult<bool> {
        let engine = self.inner.engine(py)?;
        self.inner.let_go();
        interruptible(py, |interrupt| engine.replan(interrupt))
    }

    /// Waits until a unit is in memory, for the forward of the module that owns it. `lend`:
    /// `current` gives its weights on this thread until the use is closed.
    #[pyo3(signature = (unit, lend, recurrent=None))]
    fn enter(
        &self,
        py: Python<'_>,
        unit: u32,
        lend: bool,
        recurrent: Option<&Recurrent>,
    ) -> PyResult<Use> {
        let unit = unit as usize;
        let mut leases = self.inner.acquire(py, &[unit])?;
        let lease = leases.pop().expect("a lease for each unit");
        let thread = Some(std::thread::current().id());
        let (live, lease) = self.inner.live(unit, lease);
        if lend {
            live.lock().lent_to.extend(thread);
        }
        let more = lease.into_iter().collect();
        let inner = Some(Arc::clone(&self.inner));
        let state =
            UseState { inner, live: vec![live], more, lent: lend, thread, ..UseState::default() };
        let entered = Use { state: Mutex::new(state) };
        if let Some(recurrent) = recurrent.filter(|_| lend) {
            self.flatten(py, recurrent, &entered)?;
        }
        Ok(entered)
    }

    /// Waits until units are in memory, for one operation on their weights.
    fn hold(&self, py: Python<'_>, units: Vec<u32>) -> PyResult<Use> {
        let mut state = UseState { inner: Some(Arc::clone(&self.inner)), ..UseState::default() };
        // What a forward on this thread has already is not asked for again.
        let mut wanted = Vec::new();
        for unit in units {
            match self.inner.in_use(unit as usize) {
                Some(live) => state.live.push(live),
                None => wanted.push(unit as usize),
            }
        }
        if !wanted.is_empty() {
            let leases = self.inner.acquire(py, &wanted)?;
            for (unit, lease) in wanted.into_iter().zip(leases) {
                let (live, lease) = self.inner.live(unit, lease);
                state.more.extend(lease);
                state.live.push(live);
            }
        }
        Ok(Use { state: Mutex::new(state) })
    }

    /// A weight's parameter while the forward of its module runs on this thread, else None.
    fn current(&self, py: Python<'_>, key: usize, grad: bool) -> PyResult<Option<Py<PyAny>>> {
        let weight = &self.inner.weights[key];
        let this_thread = std::thread::current().id();
        match self.inner.in_use(weight.unit) {
            Some(live) if live.lock().lent_to.contains(&this_thread) => {
                Ok(Some(live.view(py, &self.inner.torch, weight, grad)?))
            }
            _ => Ok(None),
        }
    }

    /// Whether a pass runs on this thread.
    fn in_pass(&self) -> bool {
        self.inner.pass().is_some()
    }

    /// Has a weight require no gradient from now on.
    fn freeze(&self, key: usize) {
        self.inner.weights[key].requires_grad.store(false, Ordering::Relaxed);
    }

    /// The tensors of a unit, which keep its memory for as long as they live: for who takes the
    /// weights over.
    fn take(&self, py: Python<'_>, unit: u32) -> PyResult<Vec<Py<PyAny>>> {
        let unit = unit as usize;
        let leases = self.inner.acquire(py, &[unit])?;
        let mut weights: Vec<&Weight> =
            self.inner.weights.iter().filter(|weight| weight.unit == unit).collect();
        weights.sort_by_key(|weight| weight.index);
        let tensor =
            |weight: &Weight| self.inner.torch.base(py, leases[0].tensor(weight.index), weight);
        weights.into_iter().map(tensor).collect()
    }

    /// Everything measured so far.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_dict(py, &self.inner.engine(py)?.stats())
    }

    /// Whether a forward runs, or an operation on a weight.
    fn in_use(&self) -> bool {
        (0..self.inner.places.len()).any(|unit| self.inner.in_use(unit).is_some())
    }
}

impl Streamer {
    /// Points a recurrent module's own list at the parameters that are lent, until the use ends.
    fn flatten(&self, py: Python<'_>, recurrent: &Recurrent, entered: &Use) -> PyResult<()> {
        let module = recurrent.flat.module.bind(py).call0()?;
        if module.is_none() {
            return Ok(());
        }
        let grad = Torch::asks(py, &self.inner.torch.is_grad_enabled)?;
        let stand_ins = recurrent.flat.stand_ins.bind(py);
        let list = PyList::empty(py);
        for (place, key) in recurrent.keys.iter().enumerate() {
            match key {
                Some(key) => list.append(self.current(py, *key, grad)?)?,
                None => list.append(stand_ins.get_item(place)?)?,
            }
        }
        entered.lock().flat = Some(recurrent.flat.clone());
        set_flat(&module, list.as_any())
    }
}

fn set_flat(module: &Bound<'_, PyAny>, list: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = module.py();
    module
        .getattr(intern!(py, "__dict__"))?
        .cast::<PyDict>()?
        .set_item(intern!(py, "_flat_weights"), list)
}

impl Inner {
    fn id(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// The pass that runs on this thread.
    fn pass(&self) -> Option<PassId> {
        PASSES.with_borrow(|passes| {
            let (id, ended) = passes.get(&self.id())?;
            (!ended.load(Ordering::Acquire)).then_some(*id)
        })
    }

    /// The engine; in a child process one of its own.
    fn engine(&self, py: Python<'_>) -> PyResult<Arc<orchestrator::Engine>> {
        let engine = Arc::clone(&self.engine.lock());
        if !engine.is_foreign() {
            return Ok(engine);
        }
        // What the parent's threads had, and what this thread had before the fork, is lost here.
        let own = Arc::new((self.recipe)(py)?);
        PASSES.with_borrow_mut(HashMap::clear);
        for unit in 0..self.places.len() {
            *self.place(unit) = Place::default();
        }
        *self.engine.lock() = Arc::clone(&own);
        Ok(own)
    }

    fn acquire(&self, py: Python<'_>, units: &[usize]) -> PyResult<Vec<orchestrator::Lease>> {
        let engine = self.engine(py)?;
        let pass = self.pass();
        let ids: Vec<UnitId> = units.iter().map(|&unit| UnitId(unit as u32)).collect();
        let acquire = || interruptible(py, |interrupt| engine.acquire_all(pass, &ids, interrupt));
        let leases = match acquire() {
            // Tensors of units that the plan keeps can be made again.
            Err(error) if is_referenced(py, &error)? && self.let_go() => acquire(),
            other => other,
        };
        match leases {
            // Memory may be held by garbage that only the cycle collector finds.
            Err(error) if is_referenced(py, &error)? => {
                py.import("gc")?.call_method0("collect")?;
                acquire()
            }
            other => other,
        }
    }

    fn place(&self, unit: usize) -> MutexGuard<'_, Place> {
        self.places[unit].lock()
    }

    /// What a unit's users share, if it has any.
    fn in_use(&self, unit: usize) -> Option<Arc<Live>> {
        let live = self.place(unit).live.upgrade()?;
        let used = live.lock().lease.is_some();
        used.then_some(live)
    }

    /// Lets go of the tensors that were kept. Returns whether there were any.
    fn let_go(&self) -> bool {
        let kept: Vec<_> =
            (0..self.places.len()).filter_map(|unit| self.place(unit).kept.take()).collect();
        !kept.is_empty()
    }

    /// What a unit's users share; gives the lease back where they have one already.
    fn live(
        &self,
        unit: usize,
        lease: orchestrator::Lease,
    ) -> (Arc<Live>, Option<orchestrator::Lease>) {
        let address = if lease.tensor_count() == 0 { 0 } else { lease.tensor(0).as_ptr().addr() };
        let mut place = self.place(unit);
        if let Some(live) = place.live.upgrade() {
            let mut state = live.lock();
            if state.lease.is_some() {
                drop(state);
                return (live, Some(lease));
            }
            if state.address == address {
                state.lease = Some(lease);
                drop(state);
                return (live, None);
            }
        }
        let live = Arc::new(Live::new(unit, lease, address));
        let before =
            std::mem::replace(&mut *place, Place { live: Arc::downgrade(&live), kept: None });
        drop(place);
        drop(before);
        (live, None)
    }

    /// The weights whose bytes were written to by other means than PyTorch's, as far as the engine
    /// finds it out.
    fn written_past_pytorch(
        &self,
        py: Python<'_>,
        engine: &orchestrator::Engine,
    ) -> Option<String> {
        let found = py.detach(|| engine.written());
        let mut names = Vec::new();
        for (id, tensors) in found {
            let unit = id.0 as usize;
            // Who enters next begins with other bytes.
            let before = std::mem::take(&mut *self.place(unit));
            drop(before);
            engine.discard(id).expect("it is of this engine");
            let written = |weight: &&Weight| weight.unit == unit && tensors.contains(&weight.index);
            names.extend(
                self.weights.iter().filter(written).map(|weight| format!("`{}`", weight.name)),
            );
        }
        // Small ones share a page, and it is not known which of them it was.
        (!names.is_empty()).then(|| names.join(" or "))
    }
}

fn is_referenced(py: Python<'_>, error: &PyErr) -> PyResult<bool> {
    Ok(error.matches(py, py.import("tensorstream.errors")?.getattr("UnitReferencedError")?)?)
}

#[pymethods]
impl Use {
    /// The parameter over a weight's bytes, of a unit that this is the use of.
    fn weight(
        &self,
        py: Python<'_>,
        streamer: &Streamer,
        key: usize,
        grad: bool,
    ) -> PyResult<Py<PyAny>> {
        let weight = streamer
            .inner
            .weights
            .get(key)
            .ok_or_else(|| PyIndexError::new_err("no such weight"))?;
        let live = self.lock().live.iter().find(|live| live.unit == weight.unit).map(Arc::clone);
        let live =
            live.ok_or_else(|| PyIndexError::new_err("the use is not of this weight's unit"))?;
        live.view(py, &streamer.inner.torch, weight, grad)
    }

    /// Ends the use. True when something else still refers to the units' memory: see `addresses`,
    /// and `close`.
    ///
    /// Raises ModelError when a weight was written to; its unit is read again for the next use.
    fn exit(&self, py: Python<'_>) -> PyResult<bool> {
        let written = self.end(py);
        match written {
            Some(name) => Err(written_to(py, &format!("`{name}`"))?),
            None => Ok(!self.lock().leaked.is_empty()),
        }
    }

    /// For each weight of the units whose memory something still refers to: its key, address and
    /// length in bytes.
    fn addresses(&self, streamer: &Streamer) -> Vec<(usize, usize, usize)> {
        let state = self.lock();
        let mut found = Vec::new();
        for (unit, lease) in &state.leaked {
            for (key, weight) in
                streamer.inner.weights.iter().enumerate().filter(|(_, w)| w.unit == *unit)
            {
                let bytes = lease.tensor(weight.index);
                found.push((key, bytes.as_ptr().addr(), bytes.len()));
            }
        }
        found
    }

    /// Gives the units back. Of those whose tensors live on, the bytes are compared before their
    /// next use.
    fn close(&self, py: Python<'_>) {
        self.end(py);
        let leaked = std::mem::take(&mut self.lock().leaked);
        py.detach(|| {
            for (_, lease) in leaked {
                if lease.is_shared() {
                    lease.seal();
                }
            }
        });
    }
}

impl Use {
    fn lock(&self) -> MutexGuard<'_, UseState> {
        self.state.lock()
    }

    /// Lets tensors and leases go, but for those of units that something else refers to; the weight
    /// that was written to, if one was.
    fn end(&self, py: Python<'_>) -> Option<String> {
        let state = std::mem::take(&mut *self.lock());
        let UseState { inner, live, more, lent, thread, flat, mut leaked } = state;
        let inner = inner?;
        if let Some(FlatWeights { module, stand_ins }) = flat {
            // A module that is gone has no list.
            let module = module.bind(py).call0().ok().filter(|module| !module.is_none());
            let _ = module.map(|module| set_flat(&module, stand_ins.bind(py)));
        }
        let mut written = None;
        for live in live {
            if lent {
                let _ = inner.torch.forget_casts(py);
                let mut state = live.lock();
                let own = state.lent_to.iter().position(|&other| Some(other) == thread);
                own.map(|own| state.lent_to.swap_remove(own));
            }
            let changed = live.written(py, &inner.weights, &inner.places[live.unit]);
            leaked.extend(inner.end_live(py, live, changed.is_some()));
            written = changed.or(written);
        }
        drop(more);
        let mut state = self.lock();
        (state.inner, state.leaked) = (Some(inner), leaked);
        written
    }
}

impl Inner {
    /// Ends one use of a unit. The last keeps the tensors of a unit that the plan keeps, and lets
    /// go of others; what is left is a lease of a unit whose memory something else refers to.
    fn end_live(
        &self,
        py: Python<'_>,
        live: Arc<Live>,
        written: bool,
    ) -> Option<(usize, orchestrator::Lease)> {
        let unit = live.unit;
        let mut place = self.place(unit);
        let is_kept = place.kept.as_ref().is_some_and(|kept| Arc::ptr_eq(kept, &live));
        if Arc::strong_count(&live) > 1 + usize::from(is_kept) {
            return None;
        }
        let lease = live.lock().lease.take()?;
        if !written && lease.is_resident() && !live.is_shared(py, &self.torch) {
            let before = place.kept.replace(live);
            drop(place);
            drop(before);
            return None;
        }
        let kept = is_kept.then(|| place.kept.take());
        drop(place);
        drop((kept, live));
        if written {
            lease.discard();
            return None;
        }
        lease.is_shared().then_some((unit, lease))
    }
}

impl Drop for Use {
    /// A use that was lost, by an exception at any moment: what was written to is read again, as at
    /// an orderly end.
    fn drop(&mut self) {
        Python::attach(|py| {
            // Whoever is lost in the middle of an exception must not end that.
            let pending = PyErr::take(py);
            self.close(py);
            if let Some(pending) = pending {
                pending.restore(py);
            }
        });
    }
}
