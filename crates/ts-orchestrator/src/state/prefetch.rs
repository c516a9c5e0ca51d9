// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prefetches the units that are expected next.

use ts_streams::Device;

use crate::config::Prefetch;
use crate::context::EngineContext;
use crate::event::Event;
use crate::host_bytes::HostBytes;
use crate::joint;
use crate::slot_pool::{AllocationError, LoadBuffers, Slot};
use crate::unit::UnitId;

use super::EngineState;

/// An ordered unit that is expected within this number of visits may evict a routed unit. Earlier
/// prefetching would save nothing, and the next pass could need the routed unit again.
const ROUTED_DISTANCE: usize = 2;

/// Whether and how far units are read ahead.
#[derive(Debug, Default)]
pub(crate) struct Prefetching {
    /// Whether it is paused until loads in flight have ended.
    pub(crate) paused: bool,
    /// Whether resident units are streamed until their slots have pages.
    pub(crate) postpones: bool,
    frontier: Frontier,
}

/// How far ahead the expected units are in memory or being loaded.
#[derive(Debug, Default)]
struct Frontier {
    /// [`Passes::place`](crate::pass::Passes::place) when the rest was set.
    place: (u64, usize),
    /// The number of expected visits whose units are in memory, are being loaded or have failed.
    distance: usize,
    /// The number of visits that prefetching considered.
    considered: usize,
    /// Whether prefetching ended because memory was short.
    is_full: bool,
    /// Whether to try again although little memory was freed.
    retry: bool,
}

impl<D: Device> EngineState<D> {
    /// Starts to load the units that are expected next, as far as memory allows.
    pub(crate) fn advance(&mut self, context: &EngineContext<D>, now_ns: u64) {
        if self.transfers.backend.is_some()
            && !self.prefetching.paused
            && self.waiters.for_memory.is_empty()
        {
            self.load_expected(context, now_ns);
            if self.is_advance_due(context) {
                self.load_ahead(context, now_ns);
            }
            self.load_guessed(context, now_ns);
        }
        self.submit_reads(context, now_ns);
    }

    /// Returns how much memory has to be freed before it is worth to read more units into it, in
    /// bytes. Units that are read together need fewer requests, and the engine's lock less often.
    pub(super) fn batch_bytes(&self) -> usize {
        joint::batch_bytes(self.planning.plan.ring_bytes)
    }

    fn is_advance_due(&self, context: &EngineContext<D>) -> bool {
        let Frontier { place, is_full, retry, .. } = self.prefetching.frontier;
        let now = self.passes.place();
        retry
            || self.routed.has_units()
            || now.0 != place.0
            || if is_full {
                context.slots.freed().bytes() >= self.batch_bytes()
            } else {
                now != place
            }
    }

    /// Returns how many expected visits ahead all units are in memory, being loaded or failed.
    fn frontier(&self) -> usize {
        let Frontier { place: (known, from), distance, .. } = self.prefetching.frontier;
        let (generation, position) = self.passes.place();
        match position.checked_sub(from) {
            Some(moved) if generation == known => distance.saturating_sub(moved),
            _ => 0,
        }
    }

    /// Returns how many expected visits ahead prefetching reaches. A released unit that is not
    /// needed within these visits is evicted.
    pub(super) fn horizon(&self) -> usize {
        if self.prefetching.frontier.is_full {
            self.frontier()
        } else {
            self.prefetching.frontier.considered
        }
    }

    /// Moves the frontier back to the next visit to a unit that is evicted.
    pub(super) fn retreat_to(&mut self, id: UnitId) {
        let (frontier, next_use) = (self.frontier(), self.passes.next_use(id));
        if next_use < frontier {
            self.prefetching.frontier.place = self.passes.place();
            self.prefetching.frontier.distance = next_use;
        }
    }

    /// Makes prefetching begin again, with another plan.
    pub(super) fn reset_prefetching(&mut self) {
        self.prefetching.frontier = Frontier::default();
    }

    /// Makes prefetching go on, although little memory was freed.
    pub(crate) fn retry_prefetch(&mut self) {
        self.prefetching.frontier.retry = true;
    }

    /// Makes prefetching consider all expected units again, because one of them is absent.
    pub(super) fn reset_frontier(&mut self) {
        (self.prefetching.frontier.distance, self.prefetching.frontier.retry) = (0, true);
    }

    /// Starts to load the units that are expected next, from the frontier on.
    fn load_ahead(&mut self, context: &EngineContext<D>, now_ns: u64) {
        context.slots.freed().reset();
        let (place, reach) = (self.passes.place(), context.prefetch.reach());
        let (mut distance, mut reads) = (self.frontier(), Vec::new());
        let (mut is_full, mut retry) = (false, false);
        while distance < reach
            && let Some(id) = self.passes.ahead_at(distance)
        {
            self.restore_evicted(id);
            let unit = &self.units[id];
            if unit.is_absent() && unit.failure.is_none() {
                let buffers = match self.allocate_ahead(context, id, distance) {
                    Ok(buffers) => buffers,
                    Err(AllocationError::SlotsFull) => {
                        is_full = true;
                        break;
                    }
                    // Loads in flight may free memory when they end.
                    Err(AllocationError::StagingFull | AllocationError::Device(_)) => {
                        retry = true;
                        break;
                    }
                };
                let work = self.start_load(context, id, buffers, now_ns, false);
                reads.extend(work.reads);
                self.transfers.fills.push(work.decodes);
            }
            distance += 1;
        }
        let considered = if is_full { distance } else { self.passes.ahead_len().min(reach) };
        self.prefetching.frontier = Frontier { place, distance, considered, is_full, retry };
        joint::sort(&mut reads, self.joint_bytes());
        self.transfers.reads.push(reads);
        let report_at = if is_full { self.batch_bytes() } else { usize::MAX };
        if context.slots.freed().report_at(report_at) {
            let _ = context.events.send(Event::Freed);
        }
    }

    /// Starts to load the routed units that are expected. Evicts only routed units that are not.
    fn load_expected(&mut self, context: &EngineContext<D>, now_ns: u64) {
        if context.prefetch == Prefetch::None {
            return;
        }
        let absent = |&id: &UnitId| self.units[id].is_absent() && self.units[id].failure.is_none();
        let absent: Vec<UnitId> = self.routed.expected().filter(absent).collect();
        for id in absent {
            // An expectation may name a unit twice.
            if !self.units[id].is_absent() {
                continue;
            }
            let Some(buffers) = self.allocate_over_idle(context, id) else { return };
            // Routed units are never kept compressed, so there is nothing to decode in memory.
            let work = self.start_load(context, id, buffers, now_ns, false);
            self.transfers.reads.push_urgent(work.reads);
        }
    }

    /// Allocates memory to load a unit. Evicts only idle routed units.
    pub(super) fn allocate_over_idle(
        &mut self,
        context: &EngineContext<D>,
        id: UnitId,
    ) -> Option<LoadBuffers<D>> {
        loop {
            match self.allocate(context, id) {
                Ok(buffers) => return Some(buffers),
                Err(AllocationError::SlotsFull) => {}
                Err(AllocationError::StagingFull | AllocationError::Device(_)) => return None,
            }
            let victim = self.routed.victim(context.units[id.index()].slot_bytes)?;
            self.evict(victim);
        }
    }

    /// Allocates memory for a unit that is expected in `distance` visits. Evicts only ordered units
    /// that are expected later and, if `distance` is below [`ROUTED_DISTANCE`], routed units.
    fn allocate_ahead(
        &mut self,
        context: &EngineContext<D>,
        id: UnitId,
        distance: usize,
    ) -> Result<LoadBuffers<D>, AllocationError> {
        loop {
            let allocated = match self.allocate_postponed(context, id) {
                Ok(None) => self.allocate(context, id),
                Ok(Some(buffers)) => Ok(buffers),
                Err(error) => Err(error),
            };
            match allocated {
                Err(AllocationError::SlotsFull) => {}
                result => return result,
            }
            let slot_bytes = context.units[id.index()].slot_bytes;
            let routed = || self.routed.victim(slot_bytes).filter(|_| distance < ROUTED_DISTANCE);
            match self.units.idle.iter().map(|unit| (self.passes.next_use(unit), unit)).max() {
                Some((next_use, unit)) if next_use > distance => self.evict(unit),
                _ => match routed() {
                    Some(unit) => self.evict(unit),
                    None => return Err(AllocationError::SlotsFull),
                },
            }
        }
    }

    /// Allocates memory among that of streamed units to load a resident unit whose slot has no
    /// pages yet. The unit is streamed this time, as the system can take longer to allocate pages
    /// than storage to read them. Returns `None` if the unit is to be loaded into its slot.
    pub(super) fn allocate_postponed(
        &mut self,
        context: &EngineContext<D>,
        id: UnitId,
    ) -> Result<Option<LoadBuffers<D>>, AllocationError> {
        let (unit, slot_bytes) = (&self.units[id], context.units[id.index()].slot_bytes);
        let has_no_pages = |slot: &Slot<D>| matches!(slot, Slot::Host(own) if !own.is_populated());
        // A unit that needs most of the ring would stop the prefetching of others.
        if !self.prefetching.postpones
            || 2 * slot_bytes > self.planning.plan.ring_bytes
            || !unit.reserved_slot().is_some_and(has_no_pages)
        {
            return Ok(None);
        }
        let len = context.units[id.index()].layout.len;
        let buffers = context.slots.allocate_for_load(len, &mut None, &mut None)?;
        self.units[id].postpone();
        Ok(Some(buffers))
    }

    /// Allocates memory to load a unit, without evicting another unit.
    pub(super) fn allocate(
        &mut self,
        context: &EngineContext<D>,
        id: UnitId,
    ) -> Result<LoadBuffers<D>, AllocationError> {
        let prepared = &context.units[id.index()];
        let on_device = self.decodes_on_device(context);
        let unit = &mut self.units[id];
        let mut host = unit.take_host_bytes(context, prepared, on_device);
        let mut slot = unit.take_slot();
        let buffers = context.slots.allocate_for_load(prepared.layout.len, &mut slot, &mut host);
        slot.into_iter().for_each(|slot| unit.reserve_slot(slot));
        if let Some(HostBytes::EmptyToKeep(memory)) = host {
            unit.reserve_image(memory);
        }
        buffers
    }
}
