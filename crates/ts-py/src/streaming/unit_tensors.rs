// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tensors and parameters over the memory of a unit, which all uses of the unit share.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use parking_lot::{Mutex, MutexGuard};
use pyo3::intern;
use pyo3::prelude::*;
use tensorstream::orchestrator;
use tensorstream::streams::{AnyStream, Stream, StreamId};

use super::Lease;
use super::torch::Torch;
use super::weight::Weight;

/// The current tensors of a unit, if any.
#[derive(Default)]
pub(super) struct UnitEntry {
    /// The tensors, as long as a use or `cached` references them.
    pub(super) tensors: Weak<UnitTensors>,
    /// The tensors of a resident unit, for its next use. Dropped when memory is short, and before
    /// the plan changes.
    pub(super) cached: Option<Arc<UnitTensors>>,
    /// A lease for the next use. See `StreamerInner::keeps_leases`.
    pub(super) kept: Option<Lease>,
}

/// The tensors over the memory of a unit. They are created when they are first needed.
pub(super) struct UnitTensors {
    pub(super) unit: usize,
    state: Mutex<UnitTensorsState>,
}

#[derive(Default)]
pub(super) struct UnitTensorsState {
    /// The lease of the unit, while the unit is in use.
    pub(super) lease: Option<Lease>,
    /// The streams that may use the unit with this lease.
    streams: Vec<StreamId>,
    /// The address of the first tensor, by which later leases of the same memory are recognized.
    pub(super) address: usize,
    /// The tensor and the parameters of each weight, by index in the unit.
    views: Vec<WeightViews>,
    /// The threads that run the forward of the unit's module, with one entry for each running call.
    forward_threads: Vec<ThreadId>,
    /// The name of a weight that was written to.
    written: Option<String>,
}

/// A tensor of a unit, and the parameters over the same memory. They share a version counter.
#[derive(Default)]
struct WeightViews {
    tensor: Option<Py<PyAny>>,
    /// The address of the tensor's storage, for counting its owners.
    storage: usize,
    /// The number of owners of the storage when the tensor was created.
    first_owners: usize,
    /// The parameter that requires no gradient. Callers that record gradients get it, because a
    /// streamed weight could not keep its gradient. If the model's own parameter requires no
    /// gradient, all callers get it.
    while_recording: Option<Py<PyAny>>,
    /// The parameter that requires a gradient, if the model's own parameter does. Callers that
    /// record no gradients get it, so that results do not differ from those of the model's own
    /// parameter: if an operand requires a gradient, `matmul` folds a batch, which changes the
    /// rounding.
    while_not_recording: Option<Py<PyAny>>,
}

impl WeightViews {
    /// Returns whether PyTorch has counted a write to the tensor.
    fn is_written(&self, py: Python<'_>) -> bool {
        let version = |tensor: &Py<PyAny>| -> PyResult<u64> {
            tensor.bind(py).getattr(intern!(py, "_version"))?.extract()
        };
        self.tensor.as_ref().is_some_and(|tensor| version(tensor).is_ok_and(|v| v != 0))
    }
}

impl UnitTensorsState {
    /// Stores the lease of a new use.
    pub(super) fn set_lease(&mut self, lease: Lease) {
        self.lease = Some(lease);
        self.streams.clear();
    }
}

impl UnitTensors {
    /// Creates the tensors of a unit that has a new lease. `address` is the address of its first
    /// tensor.
    pub(super) fn new(unit: usize, address: usize, lease: Lease) -> Self {
        let views = (0..lease.tensor_count()).map(|_| WeightViews::default()).collect();
        let state =
            UnitTensorsState { lease: Some(lease), address, views, ..UnitTensorsState::default() };
        Self { unit, state: Mutex::new(state) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, UnitTensorsState> {
        self.state.lock()
    }

    /// Lets a stream use the unit, which must be in use.
    pub(super) fn use_on(&self, stream: &AnyStream) -> Result<(), orchestrator::Error> {
        let mut state = self.lock();
        let UnitTensorsState { lease, streams, .. } = &mut *state;
        let lease = lease.as_ref().expect("a unit in use has a lease");
        if !streams.contains(&stream.id()) {
            lease.record_stream(stream)?;
            streams.push(stream.id());
        }
        Ok(())
    }

    /// Begins to lend the parameters to a forward on this thread.
    pub(super) fn begin_forward(&self) {
        self.lock().forward_threads.push(std::thread::current().id());
    }

    /// Ends to lend the parameters to a forward on this thread.
    pub(super) fn end_forward(&self, thread: ThreadId) {
        let mut state = self.lock();
        if let Some(call) = state.forward_threads.iter().position(|&call| call == thread) {
            state.forward_threads.swap_remove(call);
        }
    }

    /// Returns whether the parameters are lent to a forward on this thread.
    pub(super) fn is_lent(&self) -> bool {
        self.lock().forward_threads.contains(&std::thread::current().id())
    }

    /// Returns a weight as a tensor of the streamer's weight class, and creates it if necessary.
    ///
    /// `grad` is whether the caller records gradients. If so, the tensor itself requires no
    /// gradient. Otherwise, it requires one if the model's own parameter does.
    pub(super) fn parameter(
        &self,
        py: Python<'_>,
        torch: &Torch,
        weight: &Weight,
        grad: bool,
    ) -> PyResult<Py<PyAny>> {
        let requires_grad = weight.requires_grad.load(Ordering::Relaxed) && !grad;
        // Creating a tensor can run the garbage collector, which can end other uses. Ending a use
        // takes the lock, so the lock is released first.
        let (tensor, bytes) = {
            let state = self.lock();
            let views = &state.views[weight.index];
            if let Some(known) =
                if requires_grad { &views.while_not_recording } else { &views.while_recording }
            {
                return Ok(known.clone_ref(py));
            }
            let lease =
                state.lease.as_ref().expect("`end_use` takes the lease only after the last use");
            (views.tensor.as_ref().map(|tensor| tensor.clone_ref(py)), lease.tensor(weight.index))
        };
        let tensor = match tensor {
            Some(tensor) => tensor,
            None => {
                let new = torch.tensor(py, bytes, weight)?;
                let storage = new.bind(py).call_method0(intern!(py, "untyped_storage"))?;
                let storage: usize = storage.getattr(intern!(py, "_cdata"))?.extract()?;
                let first_owners = torch.storage_owners(py, storage)?;
                let mut state = self.lock();
                let views = &mut state.views[weight.index];
                // Another thread may have created the tensor in the meantime.
                if views.tensor.is_none() {
                    (views.storage, views.first_owners) = (storage, first_owners);
                }
                views.tensor.get_or_insert(new).clone_ref(py)
            }
        };
        let new = torch.parameter(py, &tensor, requires_grad)?;
        let mut state = self.lock();
        let views = &mut state.views[weight.index];
        let parameter =
            if requires_grad { &mut views.while_not_recording } else { &mut views.while_recording };
        Ok(parameter.get_or_insert(new).clone_ref(py))
    }

    /// Returns whether anything except these tensors references the memory of the unit.
    pub(super) fn is_shared(&self, py: Python<'_>, torch: &Torch) -> bool {
        let state = self.lock();
        state.views.iter().filter(|views| views.tensor.is_some()).any(|views| {
            let parameters = usize::from(views.while_recording.is_some())
                + usize::from(views.while_not_recording.is_some());
            torch
                .storage_owners(py, views.storage)
                .is_ok_and(|owners| owners > views.first_owners + parameters)
        })
    }

    /// Returns whether PyTorch has counted a write to any of the tensors.
    pub(super) fn is_written(&self, py: Python<'_>) -> bool {
        self.lock().views.iter().any(|views| views.is_written(py))
    }

    /// Returns the name of a weight that was written to, or None. If there is one, the unit is read
    /// again for its next use.
    pub(super) fn written_weight(
        &self,
        py: Python<'_>,
        weights: &[Weight],
        entry: &Mutex<UnitEntry>,
    ) -> Option<String> {
        let mut state = self.lock();
        if state.written.is_none() {
            let index = state.views.iter().position(|views| views.is_written(py));
            if let Some(index) = index {
                let weight =
                    weights.iter().find(|weight| weight.unit == self.unit && weight.index == index);
                state.written = Some(weight.map_or_else(String::new, |weight| weight.name.clone()));
                // The next use gets other memory, so it must not reuse these tensors.
                *entry.lock() = UnitEntry::default();
                if let Some(lease) = &state.lease {
                    lease.evict_modified();
                }
            }
        }
        state.written.clone()
    }
}
