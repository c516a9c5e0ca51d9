// SPDX-License-Identifier: MIT OR Apache-2.0
//! The uses of units: which tensors a unit has, and what is kept of them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pyo3::prelude::*;
use tensorstream::orchestrator::UnitId;
use tensorstream::streams::AnyStream;

use super::shared::{Shared, is_referenced, process_generation};
use super::unit_tensors::UnitTensors;
use super::{Engine, Lease};
use crate::errors::to_python;
use crate::heap;
use crate::signals::interruptible;

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

impl Shared {
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

    /// Keeps a lease of every unit for later uses, if all units are resident. Returns whether
    /// leases are kept.
    pub(super) fn keep_leases(&self, engine: &Engine) -> bool {
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
                if let Some(engine) = self.current_engine() {
                    let _ = engine.discard(UnitId(tensors.unit as u32));
                }
            }
        }
        !cached.is_empty()
    }

    /// Makes the next uses of all units create new tensors.
    pub(super) fn forget_tensors(&self) {
        self.keeps_leases_in.store(0, Ordering::Relaxed);
        for unit in 0..self.entries.len() {
            let before = std::mem::take(&mut *self.entry(unit).lock());
            drop(before);
        }
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
}

/// Returns the address of the first tensor of a leased unit.
fn address(lease: &Lease) -> usize {
    if lease.tensor_count() == 0 { 0 } else { lease.tensor(0).range().address() }
}
