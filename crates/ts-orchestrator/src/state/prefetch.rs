// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prefetches the units that are expected next.

use ts_streams::Device;

use crate::config::Prefetch;
use crate::context::EngineContext;
use crate::host_bytes::HostBytes;
use crate::slot_pool::{AllocationError, LoadBuffers};
use crate::unit::UnitId;

use super::{EngineState, Presence};

/// An ordered unit that is expected within this number of visits may evict a routed unit. Earlier
/// prefetching would save nothing, and the next pass could need the routed unit again.
const ROUTED_DISTANCE: usize = 2;

impl<D: Device> EngineState<D> {
    /// Starts to load the units that are expected next, as far as memory allows.
    pub(crate) fn advance(&mut self, context: &EngineContext<D>, now_ns: u64) {
        if self.backend.is_some() && !self.paused && self.waiting_for_memory.is_empty() {
            self.load_expected(context, now_ns);
            let ahead: Vec<UnitId> = self.passes.ahead().take(context.prefetch.reach()).collect();
            self.horizon = ahead.len();
            for (distance, &id) in ahead.iter().enumerate() {
                self.restore_evicted(id);
                let unit = &self.units[id.index()];
                if !matches!(unit.presence, Presence::Absent) || unit.failure.is_some() {
                    continue;
                }
                let buffers = match self.allocate_ahead(context, id, distance) {
                    Ok(buffers) => buffers,
                    Err(AllocationError::SlotsFull) => {
                        self.horizon = distance;
                        break;
                    }
                    // Loads in flight may free memory when they end.
                    Err(AllocationError::StagingFull | AllocationError::Device(_)) => break,
                };
                let work = self.start_load(context, id, buffers, now_ns, false);
                self.queue.extend(work.reads);
                self.decodes.extend(work.decodes);
            }
            self.load_guessed(context, now_ns);
        }
        self.submit_reads(context, now_ns);
    }

    /// Starts to load the routed units that are expected. Evicts only routed units that are not.
    fn load_expected(&mut self, context: &EngineContext<D>, now_ns: u64) {
        if context.prefetch == Prefetch::None {
            return;
        }
        let absent = |id: &UnitId| self.is_absent(*id) && self.units[id.index()].failure.is_none();
        let absent: Vec<UnitId> = self.routed.expected().filter(absent).collect();
        for id in absent {
            // An expectation may name a unit twice.
            if !self.is_absent(id) {
                continue;
            }
            let Some(buffers) = self.allocate_over_idle(context, id) else { return };
            // Routed units are never kept compressed, so there is nothing to decode in memory.
            let work = self.start_load(context, id, buffers, now_ns, false);
            self.urgent.extend(work.reads);
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
            match self.allocate(context, id) {
                Err(AllocationError::SlotsFull) => {}
                result => return result,
            }
            let slot_bytes = context.units[id.index()].slot_bytes;
            let routed = || self.routed.victim(slot_bytes).filter(|_| distance < ROUTED_DISTANCE);
            match self.idle.iter().map(|&unit| (self.passes.next_use(unit), unit)).max() {
                Some((next_use, unit)) if next_use > distance => self.evict(unit),
                _ => match routed() {
                    Some(unit) => self.evict(unit),
                    None => return Err(AllocationError::SlotsFull),
                },
            }
        }
    }

    /// Allocates memory to load a unit, without evicting another unit.
    pub(super) fn allocate(
        &mut self,
        context: &EngineContext<D>,
        id: UnitId,
    ) -> Result<LoadBuffers<D>, AllocationError> {
        let prepared = &context.units[id.index()];
        let on_device = self.decodes_on_device(context);
        let unit = &mut self.units[id.index()];
        let mut host = unit.take_host_bytes(context, prepared, on_device);
        let buffers =
            context.slots.allocate_for_load(prepared.layout.len, &mut unit.reserved, &mut host);
        if let Some(HostBytes::EmptyToKeep(memory)) = host {
            unit.reserved_image = Some(memory);
        }
        buffers
    }
}
