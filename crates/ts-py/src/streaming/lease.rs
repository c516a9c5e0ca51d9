// SPDX-License-Identifier: MIT OR Apache-2.0
//! The class `Use`: leases of units, for one forward or one operation.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use smallvec::{SmallVec, smallvec};
use tensorstream::orchestrator::UnitId;
use tensorstream::streams::AnyStream;

use super::Lease;
use super::outermost_call::ensure_pass;
use super::shared::{Shared, Streamer};
use super::unit_tensors::UnitTensors;
use super::uses::Leaked;
use super::weight_ref::{Own, WeightRef};
use crate::errors::{to_python, written_error};

/// Keeps units in memory until the use ends: by ``exit``, by ``close``, or because the object is
/// dropped.
#[pyclass(frozen, module = "tensorstream._native")]
pub(crate) struct Use {
    state: Mutex<UseState>,
}

#[derive(Default)]
struct UseState {
    shared: Option<Arc<Shared>>,
    tensors: SmallVec<[Arc<UnitTensors>; 1]>,
    /// Further leases of units whose tensors already have a lease.
    extra_leases: Vec<Lease>,
    /// The parameters that have the memory of the units.
    lent: SmallVec<[(Py<PyAny>, Py<WeightRef>); 2]>,
    /// After the end, the units whose memory other objects still reference.
    leaked: Vec<Leaked>,
}

#[pymethods]
impl Use {
    /// Returns a streamed weight as a tensor over the memory of its unit, without a copy.
    ///
    /// Args:
    ///     streamer: The streamer that created this use.
    ///     key: The key of the weight, which must be in one of the leased units.
    ///     requires_grad: Whether the tensor requires gradients.
    ///
    /// Returns:
    ///     A tensor of the streamer's ``weight_class``. A reference to it keeps the memory of the
    ///     unit allocated, even after this use has ended.
    ///
    /// Raises:
    ///     IndexError: The weight does not exist, its unit is not among the leased units, or this
    ///         use has ended.
    fn weight(
        &self,
        py: Python<'_>,
        streamer: &Streamer,
        key: usize,
        requires_grad: bool,
    ) -> PyResult<Py<PyAny>> {
        let shared = &streamer.shared;
        let weight = shared.weights.get(key).ok_or_else(|| {
            let count = shared.weights.len();
            PyIndexError::new_err(format!(
                "no weight has the key {key}: the streamer has {count} weights, with keys from 0"
            ))
        })?;
        let tensors = self.lock().tensors.iter().find(|of| of.unit == weight.unit).map(Arc::clone);
        let tensors = tensors.ok_or_else(|| {
            PyIndexError::new_err(format!(
                "cannot return weight `{}`: its unit is not leased, or the lease has ended",
                weight.name
            ))
        })?;
        tensors.parameter(py, &shared.torch, weight, requires_grad)
    }

    /// Ends the use.
    ///
    /// Returns:
    ///     Whether other objects still reference the memory of the units. If so, ``addresses``
    ///     returns the addresses of this memory, and ``close`` must be called.
    ///
    /// Raises:
    ///     ModelError: A weight was written to. Its unit is read again for the next use.
    fn exit(&self, py: Python<'_>) -> PyResult<bool> {
        match self.end(py) {
            Some(name) => Err(written_error(py, &format!("`{name}`"))),
            None => Ok(!self.lock().leaked.is_empty()),
        }
    }

    /// Returns the key, the address and the length in bytes of each weight, for units whose memory
    /// other objects still reference.
    fn addresses(&self, streamer: &Streamer) -> Vec<(usize, usize, usize)> {
        let state = self.lock();
        let mut found = Vec::new();
        for Leaked { unit, lease, .. } in &state.leaked {
            let weights = streamer.shared.weights.iter().enumerate();
            for (key, weight) in weights.filter(|(_, weight)| weight.unit == *unit) {
                let range = lease.tensor(weight.index).range();
                found.push((key, range.address(), range.len()));
            }
        }
        found
    }

    /// Ends the use and releases the units. If other objects still reference the memory of a unit,
    /// the next use of the unit checks that the bytes are unchanged. On a device with its own
    /// memory, it checks that PyTorch has not counted a write.
    pub(super) fn close(&self, py: Python<'_>) {
        self.end(py);
        let (leaked, shared) = {
            let mut state = self.lock();
            (std::mem::take(&mut state.leaked), state.shared.clone())
        };
        let Some(shared) = shared.filter(|_| !leaked.is_empty()) else { return };
        for Leaked { lease, tensors, .. } in leaked {
            match tensors {
                Some(tensors) if tensors.is_shared(py, &shared.torch) => shared.watch(tensors),
                Some(_) => {}
                None => py.detach(|| {
                    if lease.is_shared() && !lease.is_sealed() {
                        lease.seal();
                    }
                }),
            }
        }
        // Another thread may have kept leases in the meantime. New ones compare the checksums.
        shared.drop_kept_leases();
    }
}

impl Use {
    /// Leases the unit of a module for its forward, and gives the parameters its memory. Blocks.
    ///
    /// Under the profiler, the parameters stay stand-ins: they could not give the memory back while
    /// something refers to their implementations.
    pub(super) fn for_forward(
        py: Python<'_>,
        shared: &Arc<Shared>,
        unit: usize,
        lent: &[Own<'_>],
    ) -> PyResult<Self> {
        let lent = if ensure_pass(py, shared)? { &[] } else { lent };
        let stream = shared.current_stream(py)?;
        if let Some(tensors) = shared.use_kept(unit) {
            return Self::of_forward(py, shared, stream, (tensors, None), lent);
        }
        let mut leases = shared.acquire(py, &[unit])?;
        let lease = leases.pop().expect("`acquire` returns a lease for each unit");
        Self::of_forward(py, shared, stream, shared.share(unit, lease), lent)
    }

    /// Like `for_forward`, but does not block, and belongs to no pass. Returns None if the unit is
    /// not in memory.
    pub(super) fn if_present(
        py: Python<'_>,
        shared: &Arc<Shared>,
        unit: usize,
        lent: &[Own<'_>],
    ) -> PyResult<Option<Self>> {
        // See `for_forward`.
        let lent = if shared.torch.is_profiler_enabled(py)? { &[] } else { lent };
        let stream = shared.current_stream(py)?;
        if let Some(tensors) = shared.use_kept(unit) {
            return Self::of_forward(py, shared, stream, (tensors, None), lent).map(Some);
        }
        let lease = shared.engine(py)?.try_acquire(UnitId(unit as u32));
        let Some(lease) = lease.map_err(|error| to_python(py, &error.into()))? else {
            return Ok(None);
        };
        Self::of_forward(py, shared, stream, shared.share(unit, lease), lent).map(Some)
    }

    fn of_forward(
        py: Python<'_>,
        shared: &Arc<Shared>,
        stream: Option<AnyStream>,
        (tensors, extra): (Arc<UnitTensors>, Option<Lease>),
        lent: &[Own<'_>],
    ) -> PyResult<Self> {
        let state = UseState {
            shared: Some(Arc::clone(shared)),
            tensors: smallvec![Arc::clone(&tensors)],
            extra_leases: extra.into_iter().collect(),
            ..UseState::default()
        };
        // If this fails, dropping the use ends it.
        let mut this = Self { state: Mutex::new(state) };
        shared.use_on(py, stream.as_ref(), &tensors)?;
        for Own { parameter, weight } in lent {
            if WeightRef::borrow_memory(weight, shared, parameter, &tensors)? {
                let both = (parameter.clone().unbind(), weight.clone().unbind());
                this.state.get_mut().lent.push(both);
            }
        }
        Ok(this)
    }

    /// Ends the use. Returns it if other objects still reference the memory of the unit; then
    /// `close` must be called.
    ///
    /// # Errors
    /// Returns a ModelError if a weight was written to.
    pub(super) fn finish(mut self, py: Python<'_>) -> PyResult<Option<Self>> {
        let state = self.state.get_mut();
        match std::mem::take(state).end(py, state) {
            Some(name) => Err(written_error(py, &format!("`{name}`"))),
            None => Ok((!state.leaked.is_empty()).then_some(self)),
        }
    }

    /// Leases units for one operation. Blocks.
    pub(super) fn for_operation(
        py: Python<'_>,
        shared: &Arc<Shared>,
        units: &[u32],
    ) -> PyResult<Self> {
        ensure_pass(py, shared)?;
        let stream = shared.current_stream(py)?;
        let state = UseState { shared: Some(Arc::clone(shared)), ..UseState::default() };
        // If this function fails, dropping the use ends what has begun.
        let this = Self { state: Mutex::new(state) };
        // A unit in use is not leased again. Its existing lease lasts until the last use of its
        // tensors ends.
        let mut missing = Vec::new();
        for &unit in units {
            match shared.tensors_in_use(unit as usize) {
                Some(tensors) => this.lock().tensors.push(tensors),
                None => missing.push(unit as usize),
            }
        }
        if shared.keeps_leases() && shared.knows_together(py, &missing)? {
            let is_missing = |&unit: &usize| match shared.use_kept(unit) {
                Some(tensors) => {
                    this.lock().tensors.push(tensors);
                    false
                }
                None => true,
            };
            missing.retain(is_missing);
        }
        if !missing.is_empty() {
            let leases = shared.acquire(py, &missing)?;
            for (unit, lease) in missing.into_iter().zip(leases) {
                let (tensors, extra) = shared.share(unit, lease);
                let mut state = this.lock();
                state.extra_leases.extend(extra);
                state.tensors.push(tensors);
            }
        }
        for tensors in &this.lock().tensors {
            shared.use_on(py, stream.as_ref(), tensors)?;
        }
        Ok(this)
    }

    fn lock(&self) -> MutexGuard<'_, UseState> {
        self.state.lock()
    }

    /// Ends the use. Returns the name of a weight that was written to, or None.
    fn end(&self, py: Python<'_>) -> Option<String> {
        let state = std::mem::take(&mut *self.lock());
        let mut ended = UseState::default();
        let written = state.end(py, &mut ended);
        *self.lock() = ended;
        written
    }
}

impl UseState {
    /// Releases tensors and leases, except the leases of units whose memory other objects
    /// reference: `ended` gets these. Returns the name of a weight that was written to, or None.
    fn end(self, py: Python<'_>, ended: &mut Self) -> Option<String> {
        let Self { shared, tensors, extra_leases, lent, mut leaked } = self;
        let shared = shared?;
        for (parameter, weight) in lent {
            weight.get().return_memory(&shared, parameter.bind(py));
        }
        let mut written = None;
        for tensors in tensors {
            let ended = shared.end(py, tensors);
            leaked.extend(ended.leaked);
            written = ended.written.or(written);
        }
        drop(extra_leases);
        if !leaked.is_empty() {
            (ended.shared, ended.leaked) = (Some(shared), leaked);
        }
        written
    }
}

impl Drop for Use {
    /// Ends a use that was not closed, for example because of an exception. A unit that was written
    /// to is read again for its next use, but no error is raised.
    fn drop(&mut self) {
        if self.state.get_mut().shared.is_none() {
            return; // it has ended
        }
        Python::attach(|py| {
            // The calls into Python must not see or replace the pending exception.
            let pending = PyErr::take(py);
            self.close(py);
            if let Some(pending) = pending {
                pending.restore(py);
            }
        });
    }
}
