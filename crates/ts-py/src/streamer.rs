// SPDX-License-Identifier: MIT OR Apache-2.0
//! A model's streamed weights as PyTorch sees them: tensors over units that are leased, for as long as something uses
//! them.
//!
//! All state changes happen in native calls that run no bytecode, so that a signal's exception arrives before or after
//! them and never in between. Whoever loses a [`Use`] ends it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::ThreadId;

use pyo3::exceptions::PyIndexError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tensorstream::format::TensorMeta;
use tensorstream::orchestrator::{self as orchestrator, PassId, TensorBytes, UnitId};

use crate::checkpoint::Checkpoint;
use crate::dlpack;
use crate::engine::{Settings, TensorSpec, build, interruptible, stats_dict};

/// A parameter of the model: its unit and its place there, shape and strides where those of its bytes are others,
/// whether it requires gradients, and its name and torch dtype.
type WeightSpec = (u32, usize, Option<(Vec<i64>, Vec<i64>)>, bool, String, Py<PyAny>);

struct Weight {
    unit: usize,
    index: usize,
    /// Shape and strides, where they are not those of its bytes.
    strided: Option<(Vec<i64>, Vec<i64>)>,
    requires_grad: AtomicBool,
    name: String,
    dtype: Py<PyAny>,
}

/// Streams the weights of a model.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Streamer {
    inner: Arc<Inner>,
}

struct Inner {
    /// Replaced in a child process, where the parent's is of no use. Locked only with the interpreter held, as it is during
    /// a fork, so that no child finds it locked.
    engine: Mutex<Arc<orchestrator::Engine>>,
    recipe: Box<dyn Fn(Python<'_>) -> PyResult<orchestrator::Engine> + Send + Sync>,
    metas: Vec<Vec<TensorMeta>>,
    weights: Vec<Weight>,
    /// By unit.
    places: Vec<Mutex<Place>>,
    torch: Torch,
}

/// What is asked of PyTorch.
struct Torch {
    from_dlpack: Py<PyAny>,
    as_subclass: Py<PyAny>,
    inference_guard: Py<PyAny>,
    is_inference: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
    is_any_autocast: Py<PyAny>,
    clear_autocast: Py<PyAny>,
    storage_use_count: Py<PyAny>,
    /// The class of weights that are handed out.
    weight_class: Py<PyAny>,
}

impl Torch {
    fn new(py: Python<'_>, weight_class: Py<PyAny>) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let native = torch.getattr("_C")?;
        Ok(Self {
            from_dlpack: native.getattr("_from_dlpack")?.unbind(),
            as_subclass: torch.getattr("Tensor")?.getattr("_make_subclass")?.unbind(),
            inference_guard: native.getattr("_InferenceMode")?.unbind(),
            is_inference: torch.getattr("is_inference_mode_enabled")?.unbind(),
            is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            is_any_autocast: native.getattr("_is_any_autocast_enabled")?.unbind(),
            clear_autocast: torch.getattr("clear_autocast_cache")?.unbind(),
            storage_use_count: native.getattr("_storage_Use_Count")?.unbind(),
            weight_class,
        })
    }

    /// How many tensors and other objects own some memory of PyTorch's.
    fn owners(&self, py: Python<'_>, storage: usize) -> PyResult<usize> {
        self.storage_use_count.bind(py).call1((storage,))?.extract()
    }

    fn asks(py: Python<'_>, question: &Py<PyAny>) -> PyResult<bool> {
        question.bind(py).call0()?.is_truthy()
    }

    /// Autocast keeps what it casts of weights that require gradients, with a graph that holds the weights; its cache is
    /// made for weights that stay.
    fn forget_casts(&self, py: Python<'_>) -> PyResult<()> {
        if Self::asks(py, &self.is_any_autocast)? && !Self::asks(py, &self.is_grad_enabled)? {
            self.clear_autocast.bind(py).call0()?;
        }
        Ok(())
    }
}

/// A unit that is in memory because something uses it, and the tensors made of it so far.
struct Live {
    unit: usize,
    state: Mutex<LiveState>,
}

/// Where a unit's users find what they share.
#[derive(Default)]
struct Place {
    live: Weak<Live>,
    /// Of a unit that the plan keeps: its tensors, which are used again. Given up when memory is short.
    kept: Option<Arc<Live>>,
}

#[derive(Default)]
struct LiveState {
    /// While something uses it.
    lease: Option<orchestrator::Lease>,
    /// Where its first tensor lies.
    address: usize,
    tensors: Vec<Views>,
    /// Threads that run the forward of the module that owns it, once for each such call.
    lent_to: Vec<ThreadId>,
    /// The weight that was written to.
    written: Option<String>,
}

/// A tensor of a unit, and the parameters over the same bytes and with the same version counter.
#[derive(Default)]
struct Views {
    base: Option<Py<PyAny>>,
    /// PyTorch's address of what owns the base's memory, by which its owners are counted; and how many there were at first.
    storage: usize,
    owners: usize,
    /// While gradients are recorded: it requires none, for nothing could keep what it learns.
    frozen: Option<Py<PyAny>>,
    /// While none are: it says what the model's own did. matmul folds a batch, and so rounds otherwise, for an operand
    /// that requires a gradient.
    free: Option<Py<PyAny>>,
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

/// What a recurrent module passes on besides itself: for each place of its list the parameter, and the weight if it is
/// streamed.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Recurrent {
    flat: FlatWeights,
    keys: Vec<Option<usize>>,
}

#[pymethods]
impl Recurrent {
    /// A weak reference to the module, its list with stand-ins, and the weights at the list's places.
    #[new]
    fn new(module: Py<PyAny>, stand_ins: Py<PyAny>, keys: Vec<Option<usize>>) -> Self {
        Self { flat: FlatWeights { module: Arc::new(module), stand_ins: Arc::new(stand_ins) }, keys }
    }
}

thread_local! {
    /// The pass that runs on this thread, by streamer.
    static PASSES: RefCell<HashMap<usize, (PassId, Arc<AtomicBool>)>> = RefCell::default();
}

/// A pass that has begun on this thread; it does nothing where one ran already. It ends at the latest when it is lost.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Pass {
    begun: Option<(Arc<orchestrator::Engine>, PassId, Arc<AtomicBool>)>,
}

#[pymethods]
impl Pass {
    /// Ends it. True when `replan` should be called. Does nothing the second time.
    fn end(&self) -> bool {
        let Some((engine, id, ended)) = &self.begun else { return false };
        !ended.swap(true, Ordering::AcqRel) && !engine.is_foreign() && engine.end_pass(*id)
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.end();
    }
}

#[pymethods]
impl Streamer {
    #[new]
    #[pyo3(signature = (checkpoint, units, weights, *, budget, together, weight_class, settings=None))]
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
        let metas: Vec<Vec<_>> =
            units.iter().map(|u| u.tensors.iter().map(|t| t.entry.meta.clone()).collect()).collect();
        let weight = |(unit, index, strided, requires_grad, name, dtype): WeightSpec| {
            let unit = unit as usize;
            let known = metas.get(unit).is_some_and(|unit| index < unit.len());
            known
                .then(|| Weight { unit, index, strided, requires_grad: requires_grad.into(), name, dtype })
                .ok_or_else(|| PyIndexError::new_err("a weight is in no unit"))
        };
        let weights = weights.into_iter().map(weight).collect::<PyResult<_>>()?;
        let engine = Mutex::new(Arc::new(recipe(py)?));
        let places = metas.iter().map(|_| Mutex::default()).collect();
        let torch = Torch::new(py, weight_class)?;
        Ok(Self { inner: Arc::new(Inner { engine, recipe, metas, weights, places, torch }) })
    }

    /// Begins a pass, waiting while max_passes others run.
    fn begin_pass(&self, py: Python<'_>) -> PyResult<Pass> {
        let engine = self.inner.engine(py)?;
        if self.inner.pass().is_some() {
            return Ok(Pass { begun: None });
        }
        let id = interruptible(py, |interrupt| engine.begin_pass(interrupt))?;
        let ended = Arc::new(AtomicBool::new(false));
        let pass = Pass { begun: Some((engine, id, Arc::clone(&ended))) };
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

    /// Waits until a unit is in memory, for the forward of the module that owns it. `lend`: `current` gives its weights on
    /// this thread until the use is closed.
    #[pyo3(signature = (unit, lend, recurrent=None))]
    fn enter(&self, py: Python<'_>, unit: u32, lend: bool, recurrent: Option<&Recurrent>) -> PyResult<Use> {
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
        let state = UseState { inner, live: vec![live], more, lent: lend, thread, ..UseState::default() };
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
                Ok(Some(live.view(py, &self.inner, weight, grad)?))
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

    /// The tensors of a unit, which keep its memory for as long as they live: for who takes the weights over.
    fn take(&self, py: Python<'_>, unit: u32) -> PyResult<Vec<Py<PyAny>>> {
        let unit = unit as usize;
        let leases = self.inner.acquire(py, &[unit])?;
        let mut weights: Vec<&Weight> =
            self.inner.weights.iter().filter(|weight| weight.unit == unit).collect();
        weights.sort_by_key(|weight| weight.index);
        let tensor = |weight: &Weight| self.inner.base(py, leases[0].tensor(weight.index), weight);
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
    module.getattr(intern!(py, "__dict__"))?.cast::<PyDict>()?.set_item(intern!(py, "_flat_weights"), list)
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
        let engine = Arc::clone(&self.engine.lock().unwrap_or_else(PoisonError::into_inner));
        if !engine.is_foreign() {
            return Ok(engine);
        }
        // What the parent's threads had, and what this thread had before the fork, is lost here.
        let own = Arc::new((self.recipe)(py)?);
        PASSES.with_borrow_mut(HashMap::clear);
        for unit in 0..self.places.len() {
            *self.place(unit) = Place::default();
        }
        *self.engine.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&own);
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
        self.places[unit].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a unit's users share, if it has any.
    fn in_use(&self, unit: usize) -> Option<Arc<Live>> {
        let live = self.place(unit).live.upgrade()?;
        let used = live.lock().lease.is_some();
        used.then_some(live)
    }

    /// Lets go of the tensors that were kept. Returns whether there were any.
    fn let_go(&self) -> bool {
        let kept: Vec<_> = (0..self.places.len()).filter_map(|unit| self.place(unit).kept.take()).collect();
        !kept.is_empty()
    }

    /// What a unit's users share; gives the lease back where they have one already.
    fn live(&self, unit: usize, lease: orchestrator::Lease) -> (Arc<Live>, Option<orchestrator::Lease>) {
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
        let tensors = self.metas[unit].iter().map(|_| Views::default()).collect();
        let state = Mutex::new(LiveState { lease: Some(lease), address, tensors, ..LiveState::default() });
        let live = Arc::new(Live { unit, state });
        let before = std::mem::replace(&mut *place, Place { live: Arc::downgrade(&live), kept: None });
        drop(place);
        drop(before);
        (live, None)
    }

    /// A weight's tensor over its bytes.
    fn base(&self, py: Python<'_>, bytes: TensorBytes, weight: &Weight) -> PyResult<Py<PyAny>> {
        // An inference tensor could not be saved for backward; these can, whatever mode the caller is in.
        let guard = match Torch::asks(py, &self.torch.is_inference)? {
            true => Some(self.torch.inference_guard.bind(py).call1((false,))?),
            false => None,
        };
        if let Some(guard) = &guard {
            guard.call_method0(intern!(py, "__enter__"))?;
        }
        let made = self.make_base(py, bytes, weight);
        if let Some(guard) = &guard {
            guard.call_method1(intern!(py, "__exit__"), (py.None(), py.None(), py.None()))?;
        }
        made
    }

    fn make_base(&self, py: Python<'_>, bytes: TensorBytes, weight: &Weight) -> PyResult<Py<PyAny>> {
        let meta = &self.metas[weight.unit][weight.index];
        let capsule = dlpack::capsule(py, bytes, meta)?;
        let mut tensor = self.torch.from_dlpack.bind(py).call1((capsule,))?;
        if !dlpack::has_code(meta.dtype) {
            let shape: Vec<i64> = meta.shape.iter().map(|&n| n as i64).collect();
            tensor = tensor.call_method1(intern!(py, "view"), (weight.dtype.bind(py),))?;
            tensor = tensor.call_method1(intern!(py, "view"), (shape,))?;
        }
        if let Some((shape, strides)) = &weight.strided {
            tensor = tensor.call_method1(intern!(py, "as_strided"), (shape.clone(), strides.clone()))?;
        }
        Ok(tensor.unbind())
    }
}

fn is_referenced(py: Python<'_>, error: &PyErr) -> PyResult<bool> {
    Ok(error.matches(py, py.import("tensorstream.errors")?.getattr("UnitReferencedError")?)?)
}

impl Live {
    fn lock(&self) -> MutexGuard<'_, LiveState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The parameter over a weight's bytes, for a caller that records gradients or not.
    fn view(&self, py: Python<'_>, inner: &Inner, weight: &Weight, grad: bool) -> PyResult<Py<PyAny>> {
        let free = weight.requires_grad.load(Ordering::Relaxed) && !grad;
        // No lock is held while tensors are made: the cycle collector may run then, and end other uses.
        let (base, bytes) = {
            let state = self.lock();
            let views = &state.tensors[weight.index];
            if let Some(known) = if free { &views.free } else { &views.frozen } {
                return Ok(known.clone_ref(py));
            }
            let lease = state.lease.as_ref().expect("it is in use");
            (views.base.as_ref().map(|base| base.clone_ref(py)), lease.tensor(weight.index))
        };
        let base = match base {
            Some(base) => base,
            None => {
                let made = inner.base(py, bytes, weight)?;
                let storage = made.bind(py).call_method0(intern!(py, "untyped_storage"))?;
                let storage: usize = storage.getattr(intern!(py, "_cdata"))?.extract()?;
                let owners = inner.torch.owners(py, storage)?;
                let mut state = self.lock();
                let views = &mut state.tensors[weight.index];
                (views.storage, views.owners) = (storage, owners);
                views.base.get_or_insert(made).clone_ref(py)
            }
        };
        let torch = &inner.torch;
        let made = torch.as_subclass.bind(py).call1((&torch.weight_class, &base, free))?.unbind();
        let mut state = self.lock();
        let views = &mut state.tensors[weight.index];
        let place = if free { &mut views.free } else { &mut views.frozen };
        Ok(place.get_or_insert(made).clone_ref(py))
    }

    /// Whether something else than the tensors that are kept here refers to their memory.
    fn is_shared(&self, py: Python<'_>, inner: &Inner) -> bool {
        let state = self.lock();
        state.tensors.iter().filter(|views| views.base.is_some()).any(|views| {
            let made = usize::from(views.frozen.is_some()) + usize::from(views.free.is_some());
            inner.torch.owners(py, views.storage).is_ok_and(|owners| owners > views.owners + made)
        })
    }

    /// The weight that was written to, if one was. The engine gives its unit up then.
    fn written(&self, py: Python<'_>, inner: &Inner) -> Option<String> {
        let mut state = self.lock();
        if state.written.is_none() {
            let changed = |views: &Views| {
                let base = views.base.as_ref()?.bind(py);
                let version: u64 = base.getattr(intern!(py, "_version")).ok()?.extract().ok()?;
                (version != 0).then_some(())
            };
            let index = state.tensors.iter().position(|views| changed(views).is_some());
            if let Some(index) = index {
                let mut weights = inner.weights.iter();
                let weight = weights.find(|weight| weight.unit == self.unit && weight.index == index);
                state.written = Some(weight.map_or_else(String::new, |weight| weight.name.clone()));
                // Who enters next begins with other bytes.
                *inner.place(self.unit) = Place::default();
                if let Some(lease) = &state.lease {
                    lease.spoil();
                }
            }
        }
        state.written.clone()
    }
}

#[pymethods]
impl Use {
    /// The parameter over a weight's bytes, of a unit that this is the use of.
    fn weight(&self, py: Python<'_>, streamer: &Streamer, key: usize, grad: bool) -> PyResult<Py<PyAny>> {
        let weight =
            streamer.inner.weights.get(key).ok_or_else(|| PyIndexError::new_err("no such weight"))?;
        let live = self.lock().live.iter().find(|live| live.unit == weight.unit).map(Arc::clone);
        let live = live.ok_or_else(|| PyIndexError::new_err("the use is not of this weight's unit"))?;
        live.view(py, &streamer.inner, weight, grad)
    }

    /// Ends the use. True when something else still refers to the units' memory: see `addresses`, and `close`.
    ///
    /// Raises ModelError when a weight was written to; its unit is read again for the next use.
    fn exit(&self, py: Python<'_>) -> PyResult<bool> {
        let written = self.end(py);
        if let Some(name) = written {
            let error = py.import("tensorstream.errors")?.getattr("ModelError")?;
            let text = format!(
                "`{name}` was written to in place: a streamed weight cannot be changed; restore(model) first"
            );
            return Err(PyErr::from_value(error.call1((text,))?));
        }
        Ok(!self.lock().leaked.is_empty())
    }

    /// For each weight of the units whose memory something still refers to: its key, address and length in bytes.
    fn addresses(&self, streamer: &Streamer) -> Vec<(usize, usize, usize)> {
        let state = self.lock();
        let mut found = Vec::new();
        for (unit, lease) in &state.leaked {
            for (key, weight) in streamer.inner.weights.iter().enumerate().filter(|(_, w)| w.unit == *unit) {
                let bytes = lease.tensor(weight.index);
                found.push((key, bytes.as_ptr().addr(), bytes.len()));
            }
        }
        found
    }

    /// Gives the units back. Of those whose tensors live on, the bytes are compared before their next use.
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets tensors and leases go, but for those of units that something else refers to; the weight that was written to, if
    /// one was.
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
            let changed = live.written(py, &inner);
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
    /// Ends one use of a unit. The last keeps the tensors of a unit that the plan keeps, and lets go of others; what is left
    /// is a lease of a unit whose memory something else refers to.
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
        if !written && lease.is_resident() && !live.is_shared(py, self) {
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
    /// A use that was lost, by an exception at any moment: what was written to is read again, as at an orderly end.
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
