// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tensors and parameters over the bytes of a unit that is in memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use parking_lot::{Mutex, MutexGuard};
use pyo3::intern;
use pyo3::prelude::*;
use tensorstream::format::TensorMeta;
use tensorstream::orchestrator::{self as orchestrator, TensorBytes, Unit};

use crate::dlpack;

/// A parameter of the model: its unit and its place there, shape and strides where those of its
/// bytes are others, whether it requires gradients, and its name and torch dtype.
pub(super) type WeightSpec = (u32, usize, Option<(Vec<i64>, Vec<i64>)>, bool, String, Py<PyAny>);

pub(super) struct Weight {
    pub(super) unit: usize,
    pub(super) index: usize,
    meta: TensorMeta,
    /// Shape and strides, where they are not those of its bytes.
    strided: Option<(Vec<i64>, Vec<i64>)>,
    pub(super) requires_grad: AtomicBool,
    pub(super) name: String,
    dtype: Py<PyAny>,
}

impl Weight {
    /// `None` when no unit has such a tensor.
    pub(super) fn new(spec: WeightSpec, units: &[Unit]) -> Option<Self> {
        let (unit, index, strided, requires_grad, name, dtype) = spec;
        let unit = unit as usize;
        let meta = units.get(unit)?.tensors.get(index)?.entry.meta.clone();
        Some(Self { unit, index, meta, strided, requires_grad: requires_grad.into(), name, dtype })
    }
}

/// What is asked of PyTorch.
pub(super) struct Torch {
    from_dlpack: Py<PyAny>,
    as_subclass: Py<PyAny>,
    inference_guard: Py<PyAny>,
    is_inference: Py<PyAny>,
    pub(super) is_grad_enabled: Py<PyAny>,
    is_any_autocast: Py<PyAny>,
    clear_autocast: Py<PyAny>,
    storage_use_count: Py<PyAny>,
    /// The class of weights that are handed out.
    weight_class: Py<PyAny>,
}

impl Torch {
    pub(super) fn new(py: Python<'_>, weight_class: Py<PyAny>) -> PyResult<Self> {
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
    pub(super) fn owners(&self, py: Python<'_>, storage: usize) -> PyResult<usize> {
        self.storage_use_count.bind(py).call1((storage,))?.extract()
    }

    pub(super) fn asks(py: Python<'_>, question: &Py<PyAny>) -> PyResult<bool> {
        question.bind(py).call0()?.is_truthy()
    }

    /// Autocast keeps what it casts of weights that require gradients, with a graph that holds the
    /// weights; its cache is made for weights that stay.
    pub(super) fn forget_casts(&self, py: Python<'_>) -> PyResult<()> {
        if Self::asks(py, &self.is_any_autocast)? && !Self::asks(py, &self.is_grad_enabled)? {
            self.clear_autocast.bind(py).call0()?;
        }
        Ok(())
    }

    /// A weight's tensor over its bytes.
    pub(super) fn base(
        &self,
        py: Python<'_>,
        bytes: TensorBytes,
        weight: &Weight,
    ) -> PyResult<Py<PyAny>> {
        // An inference tensor could not be saved for backward; these can, whatever mode the caller
        // is in.
        let guard = match Torch::asks(py, &self.is_inference)? {
            true => Some(self.inference_guard.bind(py).call1((false,))?),
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

    fn make_base(
        &self,
        py: Python<'_>,
        bytes: TensorBytes,
        weight: &Weight,
    ) -> PyResult<Py<PyAny>> {
        let capsule = dlpack::capsule(py, bytes, &weight.meta)?;
        let mut tensor = self.from_dlpack.bind(py).call1((capsule,))?;
        if !dlpack::has_code(weight.meta.dtype) {
            let shape: Vec<i64> = weight.meta.shape.iter().map(|&n| n as i64).collect();
            tensor = tensor.call_method1(intern!(py, "view"), (weight.dtype.bind(py),))?;
            tensor = tensor.call_method1(intern!(py, "view"), (shape,))?;
        }
        if let Some((shape, strides)) = &weight.strided {
            tensor =
                tensor.call_method1(intern!(py, "as_strided"), (shape.clone(), strides.clone()))?;
        }
        Ok(tensor.unbind())
    }
}

/// A unit that is in memory because something uses it, and the tensors made of it so far.
pub(super) struct Live {
    pub(super) unit: usize,
    state: Mutex<LiveState>,
}

/// Where a unit's users find what they share.
#[derive(Default)]
pub(super) struct Place {
    pub(super) live: Weak<Live>,
    /// Of a unit that the plan keeps: its tensors, which are used again. Given up when memory is
    /// short.
    pub(super) kept: Option<Arc<Live>>,
}

#[derive(Default)]
pub(super) struct LiveState {
    /// While something uses it.
    pub(super) lease: Option<orchestrator::Lease>,
    /// Where its first tensor lies.
    pub(super) address: usize,
    tensors: Vec<Views>,
    /// Threads that run the forward of the module that owns it, once for each such call.
    pub(super) lent_to: Vec<ThreadId>,
    /// The weight that was written to.
    written: Option<String>,
}

/// A tensor of a unit, and the parameters over the same bytes and with the same version counter.
#[derive(Default)]
struct Views {
    base: Option<Py<PyAny>>,
    /// PyTorch's address of what owns the base's memory, by which its owners are counted; and how
    /// many there were at first.
    storage: usize,
    owners: usize,
    /// While gradients are recorded: it requires none, for nothing could keep what it learns.
    frozen: Option<Py<PyAny>>,
    /// While none are: it says what the model's own did. matmul folds a batch, and so rounds
    /// otherwise, for an operand that requires a gradient.
    free: Option<Py<PyAny>>,
}

impl Live {
    /// Of a unit that has no users yet.
    pub(super) fn new(unit: usize, lease: orchestrator::Lease, address: usize) -> Self {
        let tensors = (0..lease.tensor_count()).map(|_| Views::default()).collect();
        let state = LiveState { lease: Some(lease), address, tensors, ..LiveState::default() };
        Self { unit, state: Mutex::new(state) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, LiveState> {
        self.state.lock()
    }

    /// The parameter over a weight's bytes, for a caller that records gradients or not.
    pub(super) fn view(
        &self,
        py: Python<'_>,
        torch: &Torch,
        weight: &Weight,
        grad: bool,
    ) -> PyResult<Py<PyAny>> {
        let free = weight.requires_grad.load(Ordering::Relaxed) && !grad;
        // No lock is held while tensors are made: the cycle collector may run then, and end other
        // uses.
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
                let made = torch.base(py, bytes, weight)?;
                let storage = made.bind(py).call_method0(intern!(py, "untyped_storage"))?;
                let storage: usize = storage.getattr(intern!(py, "_cdata"))?.extract()?;
                let owners = torch.owners(py, storage)?;
                let mut state = self.lock();
                let views = &mut state.tensors[weight.index];
                (views.storage, views.owners) = (storage, owners);
                views.base.get_or_insert(made).clone_ref(py)
            }
        };
        let made = torch.as_subclass.bind(py).call1((&torch.weight_class, &base, free))?.unbind();
        let mut state = self.lock();
        let views = &mut state.tensors[weight.index];
        let place = if free { &mut views.free } else { &mut views.frozen };
        Ok(place.get_or_insert(made).clone_ref(py))
    }

    /// Whether something else than the tensors that are kept here refers to their memory.
    pub(super) fn is_shared(&self, py: Python<'_>, torch: &Torch) -> bool {
        let state = self.lock();
        state.tensors.iter().filter(|views| views.base.is_some()).any(|views| {
            let made = usize::from(views.frozen.is_some()) + usize::from(views.free.is_some());
            torch.owners(py, views.storage).is_ok_and(|owners| owners > views.owners + made)
        })
    }

    /// The weight that was written to, if one was. The engine gives its unit up then.
    pub(super) fn written(
        &self,
        py: Python<'_>,
        weights: &[Weight],
        place: &Mutex<Place>,
    ) -> Option<String> {
        let mut state = self.lock();
        if state.written.is_none() {
            let changed = |views: &Views| {
                let base = views.base.as_ref()?.bind(py);
                let version: u64 = base.getattr(intern!(py, "_version")).ok()?.extract().ok()?;
                (version != 0).then_some(())
            };
            let index = state.tensors.iter().position(|views| changed(views).is_some());
            if let Some(index) = index {
                let weight =
                    weights.iter().find(|weight| weight.unit == self.unit && weight.index == index);
                state.written = Some(weight.map_or_else(String::new, |weight| weight.name.clone()));
                // Who enters next begins with other bytes.
                *place.lock() = Place::default();
                if let Some(lease) = &state.lease {
                    lease.spoil();
                }
            }
        }
        state.written.clone()
    }
}
