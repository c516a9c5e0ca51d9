// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tensors and parameters over the memory of a unit, which all uses of the unit share.

use std::sync::{Arc, Weak};

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
    /// A lease for the next use. See `Shared::keeps_leases`.
    pub(super) kept: Option<Lease>,
    /// Whether the unit had tensors before.
    pub(super) was_used: bool,
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
    /// The tensors for operations: one that requires no gradients, and one that does. PyTorch
    /// chooses kernels by it: if an operand requires gradients, `matmul` folds a batch, which
    /// changes the rounding.
    for_operations: [Option<Py<PyAny>>; 2],
    /// The tensors whose implementations parameters have while forwards run, each with the identity
    /// of the `WeightRef` of the parameter, and whether it requires gradients.
    for_parameters: Vec<(usize, bool, Py<PyAny>)>,
}

impl WeightViews {
    /// Returns the tensor for a parameter, by the identity of its `WeightRef` and whether it
    /// requires gradients.
    fn parameter(&self, py: Python<'_>, wanted: (usize, bool)) -> Option<Py<PyAny>> {
        let mut known = self.for_parameters.iter();
        let found = known.find(|(identity, grad, _)| (*identity, *grad) == wanted);
        found.map(|(_, _, tensor)| tensor.clone_ref(py))
    }

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

    /// Returns a weight as a tensor of the streamer's weight class, and creates it if necessary.
    pub(super) fn parameter(
        &self,
        py: Python<'_>,
        torch: &Torch,
        weight: &Weight,
        requires_grad: bool,
    ) -> PyResult<Py<PyAny>> {
        let slot = usize::from(requires_grad);
        if let Some(known) = &self.lock().views[weight.index].for_operations[slot] {
            return Ok(known.clone_ref(py));
        }
        let tensor = self.tensor(py, torch, weight)?;
        let new = torch.parameter(py, &tensor, requires_grad)?;
        let known = &mut self.lock().views[weight.index].for_operations[slot];
        Ok(known.get_or_insert(new).clone_ref(py))
    }

    /// Returns a tensor whose implementation a parameter can have, and creates it if necessary.
    ///
    /// # Arguments
    /// * `identity` - the identity of the `WeightRef` of the parameter.
    /// * `mark` - gives a new tensor its `WeightRef`.
    pub(super) fn for_parameter(
        &self,
        py: Python<'_>,
        torch: &Torch,
        weight: &Weight,
        identity: usize,
        requires_grad: bool,
        mark: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<()>,
    ) -> PyResult<Py<PyAny>> {
        let wanted = (identity, requires_grad);
        let known = self.lock().views[weight.index].parameter(py, wanted);
        if let Some(known) = known {
            return Ok(known);
        }
        let tensor = self.tensor(py, torch, weight)?;
        let new = torch.parameter(py, &tensor, requires_grad)?;
        // While a parameter has its implementation, this object has the stand-in.
        torch.set_class(new.bind(py), torch.stand_in_class(py))?;
        mark(new.bind(py))?;
        let mut state = self.lock();
        let views = &mut state.views[weight.index];
        if let Some(known) = views.parameter(py, wanted) {
            return Ok(known);
        }
        views.for_parameters.push((identity, requires_grad, new.clone_ref(py)));
        Ok(new)
    }

    /// Returns the tensor over the memory of a weight, and creates it if necessary.
    fn tensor(&self, py: Python<'_>, torch: &Torch, weight: &Weight) -> PyResult<Py<PyAny>> {
        // Creating a tensor can run the garbage collector, which can end other uses. Ending a use
        // takes the lock, so the lock is released first.
        let bytes = {
            let state = self.lock();
            if let Some(known) = &state.views[weight.index].tensor {
                return Ok(known.clone_ref(py));
            }
            let lease =
                state.lease.as_ref().expect("`end_use` takes the lease only after the last use");
            lease.tensor(weight.index)
        };
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
        Ok(views.tensor.get_or_insert(new).clone_ref(py))
    }

    /// Returns whether anything except these tensors references the memory of the unit.
    pub(super) fn is_shared(&self, py: Python<'_>, torch: &Torch) -> bool {
        let state = self.lock();
        state.views.iter().filter(|views| views.tensor.is_some()).any(|views| {
            let parameters =
                views.for_operations.iter().flatten().count() + views.for_parameters.len();
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
