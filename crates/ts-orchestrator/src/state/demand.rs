// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads the units that a call waits for, and evicts other units if memory is short.

use std::thread::ThreadId;

use ts_pool::Buffer;
use ts_streams::Device;

use crate::context::EngineContext;
use crate::event::Event;
use crate::prepared::PreparedUnit;
use crate::slot_pool::{AllocationError, LoadBuffers};
use crate::unit::UnitId;
use crate::unit_load::LoadWork;

use super::gathers::GatheredRows;
use super::{EngineState, UnitState};

/// The reason why there is no memory for units that a call waits for.
#[derive(Debug)]
pub(crate) enum Shortage {
    /// Loads in flight, streams or other threads will free memory.
    Temporary,
    /// Tensors that outlived their lease occupy memory.
    StillReferenced { bytes: usize, holders: Vec<String> },
    /// All threads that use units wait for memory or for a pass. `holders` names the streamed units
    /// in use.
    Deadlock { holders: Vec<String> },
    /// The staging memory cannot become free.
    StagingFull,
    /// The device failed.
    Device(ts_pool::Error),
}

impl<D: Device> EngineState<D> {
    /// Starts to load the absent units of a set that a call waits for: all of them or none. Their
    /// reads come before all others.
    pub(crate) fn demand(
        &mut self,
        context: &EngineContext<D>,
        set: &[UnitId],
        now_ns: u64,
    ) -> Result<(), Shortage> {
        let freed = context.slots.freed().bytes();
        let result = self.try_demand(context, set, now_ns);
        if result.is_err() {
            self.report_all_freed(context, freed);
        }
        result
    }

    /// Makes the loader thread wake threads that wait for memory whenever some is freed. `before`
    /// is how much was freed before the caller looked for memory.
    fn report_all_freed(&self, context: &EngineContext<D>, before: usize) {
        let freed = context.slots.freed();
        freed.report_at(0);
        if freed.bytes() != before {
            let _ = context.events.send(Event::Freed);
        }
    }

    fn try_demand(
        &mut self,
        context: &EngineContext<D>,
        set: &[UnitId],
        now_ns: u64,
    ) -> Result<(), Shortage> {
        let mut compacted = false;
        loop {
            match self.allocate_all(context, &self.units.absent(set)) {
                Ok(buffers) => {
                    for (id, buffers) in buffers.into_iter().rev() {
                        let LoadWork { reads, decodes, .. } =
                            self.start_load(context, id, buffers, now_ns, false);
                        self.transfers.reads.push_first(reads);
                        self.transfers.fills.push_first(decodes);
                    }
                    self.submit_reads(context, now_ns);
                    return Ok(());
                }
                Err(_) if self.drop_guesses(context, now_ns) => continue,
                Err(AllocationError::SlotsFull) => {}
                // Loads in flight will end, and may then free the memory.
                Err(AllocationError::StagingFull | AllocationError::Device(_))
                    if self.is_loading() =>
                {
                    return Err(Shortage::Temporary);
                }
                Err(AllocationError::StagingFull) => {
                    return Err(Shortage::StagingFull);
                }
                Err(AllocationError::Device(error)) => return Err(Shortage::Device(error)),
            }
            let needed =
                self.units.absent(set).first().map_or(0, |id| context.units[id.index()].slot_bytes);
            if let Some(victim) = self.victim(needed) {
                self.evict(victim);
                continue;
            }
            match self.shortage(context) {
                Shortage::Temporary => return Err(Shortage::Temporary),
                // Nothing else will free memory. So evicts a resident unit, or if there is none,
                // the present units of sets that wait for memory, also of this one.
                _ if self.evict_resident(context, set) => {}
                _ if !compacted && self.evict_awaited(context, set) => compacted = true,
                _ if self.take_back(context) => {}
                shortage => return Err(shortage),
            }
        }
    }

    /// Returns the unit to evict for a set: an idle routed unit, then the idle ordered unit that is
    /// needed last, then the expected unit that is needed last.
    fn victim(&self, needed: usize) -> Option<UnitId> {
        let ordered = || self.units.idle.iter().max_by_key(|&unit| self.passes.next_use(unit));
        let is_unused = |id: &UnitId| {
            let unit = &self.units[*id];
            unit.is_unused() && !unit.is_kept()
        };
        let expected = || self.routed.expected().rev().find(is_unused);
        self.routed.victim(needed).or_else(ordered).or_else(expected)
    }

    /// Allocates host memory for a unit that exists only for one load. Evicts other units if
    /// necessary.
    pub(crate) fn allocate_on_host(
        &mut self,
        context: &EngineContext<D>,
        prepared: &PreparedUnit,
        now_ns: u64,
    ) -> Result<Buffer, Shortage> {
        let freed = context.slots.freed().bytes();
        let result = self.try_allocate_on_host(context, prepared, now_ns);
        if result.is_err() {
            self.report_all_freed(context, freed);
        }
        result
    }

    fn try_allocate_on_host(
        &mut self,
        context: &EngineContext<D>,
        prepared: &PreparedUnit,
        now_ns: u64,
    ) -> Result<Buffer, Shortage> {
        loop {
            if let Ok(buffer) = context.slots.host.allocate(prepared.layout.len) {
                return Ok(buffer);
            }
            if self.drop_guesses(context, now_ns) {
                continue;
            }
            if context.slots.is_staged() {
                return Err(match self.is_loading() {
                    true => Shortage::Temporary,
                    false => Shortage::StagingFull,
                });
            }
            if let Some(victim) = self.victim(prepared.slot_bytes) {
                self.evict(victim);
                continue;
            }
            match self.shortage(context) {
                Shortage::Temporary => return Err(Shortage::Temporary),
                _ if self.evict_resident(context, &[]) || self.take_back(context) => {}
                shortage => return Err(shortage),
            }
        }
    }

    /// Allocates memory to load all of these absent units. If this fails for one unit, allocates
    /// nothing.
    fn allocate_all(
        &mut self,
        context: &EngineContext<D>,
        ids: &[UnitId],
    ) -> Result<Vec<(UnitId, LoadBuffers<D>)>, AllocationError> {
        let mut allocated: Vec<(UnitId, LoadBuffers<D>, bool)> = Vec::with_capacity(ids.len());
        for &id in ids {
            let reserved = self.units[id].reserved_slot().is_some();
            let in_ring = self.allocate_postponed(context, id).ok().flatten();
            match in_ring.map_or_else(|| self.allocate(context, id), Ok) {
                Ok(buffers) => allocated.push((id, buffers, reserved)),
                Err(error) => {
                    for (id, buffers, reserved) in allocated {
                        let unit = &mut self.units[id];
                        let (slot, kept) = buffers.into_slot();
                        unit.abandon_load(Some(slot).filter(|_| reserved));
                        kept.into_iter().for_each(|memory| unit.reserve_image(memory));
                    }
                    return Err(error);
                }
            }
        }
        Ok(allocated.into_iter().map(|(id, buffers, _)| (id, buffers)).collect())
    }

    /// Evicts a resident unit that no thread uses, or frees its reserved slot. If there is none,
    /// frees a compressed unit. Returns whether there was such a unit. Takes the last such unit, so
    /// that free memory stays in one piece.
    fn evict_resident(&mut self, context: &EngineContext<D>, set: &[UnitId]) -> bool {
        if let Some(last) = self.units.last(UnitState::is_evictable) {
            if self.units[last].is_kept() {
                self.evict(last);
            }
            drop(self.units[last].demote());
        } else if let Some(last) =
            self.units.last(UnitState::occupies_host).filter(|_| !context.slots.is_staged())
        {
            drop(self.units[last].take_from_host());
        } else {
            return false;
        }
        self.note_streamed(context, set);
        true
    }

    /// Notes that a unit is streamed although the plan keeps it, because this set needs the memory.
    fn note_streamed(&mut self, context: &EngineContext<D>, set: &[UnitId]) {
        self.planning.is_outdated = true;
        let occupies_ring = |unit: &mut UnitState<D>| match unit.is_absent() {
            true => unit.referenced_evictions() > 0,
            false => !unit.is_kept(),
        };
        let absent = self.units.absent(set);
        let sizes = self.units.iter_mut().zip(&context.units).enumerate();
        let needed = sizes.filter_map(|(i, (unit, prepared))| {
            (occupies_ring(unit) || absent.contains(&UnitId(i as u32)))
                .then_some(prepared.slot_bytes)
        });
        self.planning.streamed_high_water = self.planning.streamed_high_water.max(needed.sum());
    }

    /// Evicts the present units that no thread uses, and that threads wait for: they wait for more
    /// memory, and load these units again. So a whole set can be loaded into one piece of memory.
    /// Returns whether it evicted any unit. Called when nothing else will free memory.
    fn evict_awaited(&mut self, context: &EngineContext<D>, set: &[UnitId]) -> bool {
        let mut any = false;
        for id in self.units.ids() {
            let unit = &self.units[id];
            if unit.users.is_empty() && !unit.waiters.is_empty() && unit.is_unreferenced() {
                let was_kept = unit.is_kept();
                self.evict(id);
                if was_kept {
                    drop(self.units[id].demote());
                    self.note_streamed(context, set);
                }
                any = true;
            }
        }
        any
    }

    /// Returns the reason why there is no memory, given that no unit is idle.
    fn shortage(&mut self, context: &EngineContext<D>) -> Shortage {
        self.transfers.gathers.forget_dropped();
        let this_thread = std::thread::current().id();
        let is_waiting = |user: &ThreadId| *user == this_thread || self.waiters.contains(user);
        // Another thread waits for these units, but not for memory. It will take them soon, and
        // release them later.
        let is_awaited = |unit: &UnitState<D>| {
            unit.waiters.iter().any(|waiter| !is_waiting(waiter))
                && unit.users.is_empty()
                && unit.is_present()
        };
        let in_use = |unit: &&UnitState<D>| !unit.is_kept() && !unit.users.is_empty();
        let can_end = |unit: &UnitState<D>| unit.users.iter().any(|user| !is_waiting(user));
        let can_drop = |rows: &GatheredRows<D>| !is_waiting(&rows.user);
        if self.is_loading()
            // The callers of these gathers are about to take their rows.
            || self.transfers.gathers.is_awaited()
            || self.transfers.gathers.rows().iter().any(can_drop)
            || context.slots.waits_for_streams()
            || self.units.iter().any(is_awaited)
            || self.units.iter().filter(in_use).any(can_end)
        {
            return Shortage::Temporary;
        }
        let used = self.units.iter().filter(in_use);
        let used: Vec<String> = used.map(|unit| format!("`{}`", unit.stats.name)).collect();
        let (mut bytes, mut holders) = (0, Vec::new());
        for (unit, prepared) in self.units.iter_mut().zip(&context.units) {
            let count = unit.copies_in_tensors();
            if count > 0 {
                bytes += count * prepared.slot_bytes;
                holders.push(format!("`{}` x{count}", unit.stats.name));
            }
        }
        for rows in self.transfers.gathers.rows() {
            bytes += rows.slot_bytes;
            holders.push(format!("`{}`", rows.name));
        }
        if holders.is_empty() {
            Shortage::Deadlock { holders: used }
        } else {
            Shortage::StillReferenced { bytes, holders }
        }
    }
}
