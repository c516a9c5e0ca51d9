// SPDX-License-Identifier: MIT OR Apache-2.0
//! The mutable state of an engine, and its transitions. All methods run under the lock of the
//! engine and never block.

mod compress;
mod copying;
mod counters;
mod demand;
mod fills;
mod gathers;
mod give_back;
mod guesses;
mod host_bytes;
mod leases;
mod loading;
mod loads;
mod pass_times;
mod planning;
mod prefetch;
mod reading;
mod reads;
mod routed;
mod transfers;
mod unit_state;
mod unit_table;
mod waiters;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Instant;

use ts_io::Backend;
use ts_pool::WatchedBuffer;
use ts_streams::Device;

use crate::config::{ComputeTimes, Routing};
use crate::context::EngineContext;
use crate::pass::{PassId, Passes};
use crate::plan::{Plan, Rates, Residency};
use crate::prepared::PreparedUnit;
use crate::stats::PassTimes;
use crate::trace::{TraceEvent, TraceKind, TraceLog};
use crate::unit::UnitId;
use crate::unit_memory::UnitMemory;
use crate::worker::Workers;

pub(crate) use counters::EngineCounters;
pub(crate) use demand::Shortage;
pub(crate) use pass_times::PassLog;
pub(crate) use planning::{LimitWait, Planning};
use prefetch::Prefetching;
use routed::Routed;
use transfers::Transfers;
pub(crate) use unit_state::UnitState;
use unit_table::UnitTable;
use waiters::Waiters;

/// The mutable state of an engine.
pub(crate) struct EngineState<D: Device> {
    pub(crate) units: UnitTable<D>,
    pub(crate) passes: Passes,
    pub(crate) planning: Planning,
    pub(crate) prefetching: Prefetching,
    pub(crate) transfers: Transfers<D>,
    pub(crate) routed: Routed,
    pub(crate) waiters: Waiters,
    pub(crate) counters: EngineCounters,
    pub(crate) pass_log: PassLog,
    /// The trace that is being recorded.
    pub(crate) trace: Option<TraceLog>,
}

impl<D: Device> EngineState<D> {
    pub(crate) fn new(
        context: &EngineContext<D>,
        order: Vec<UnitId>,
        together: &[Vec<UnitId>],
        planning: Planning,
        routing: &Routing,
        backend: Box<dyn Backend>,
        workers: Option<Workers<D>>,
    ) -> Self {
        let stats = context.units.iter().map(|prepared| prepared.initial_stats());
        let mut state = Self {
            units: UnitTable::new(stats),
            passes: Passes::new(order),
            planning,
            prefetching: Prefetching::default(),
            transfers: Transfers::new(backend, workers),
            routed: Routed::new(&context.units, routing),
            waiters: Waiters::default(),
            counters: EngineCounters::default(),
            pass_log: PassLog::default(),
            trace: None,
        };
        together.iter().for_each(|set| state.add_together(set));
        state.planning.is_outdated = false;
        state.reserve_residents(context);
        state
    }

    /// Remembers that an operation needs these units at the same time.
    pub(crate) fn add_together(&mut self, units: &[UnitId]) {
        if let Some(set) = self.unknown_set(units) {
            self.planning.add_together(set);
        }
    }

    /// Returns these units as a set, unless it is known that they are used together.
    pub(crate) fn unknown_set(&self, units: &[UnitId]) -> Option<Vec<UnitId>> {
        let [_, _, ..] = units else { return None };
        // Routed units would give a set for each combination of them.
        let ordered = units.iter().copied().filter(|&id| !self.routed.contains(id));
        let set: Vec<UnitId> = BTreeSet::from_iter(ordered).into_iter().collect();
        (!self.planning.knows(&set)).then_some(set)
    }

    /// Returns the current residency of each unit. Fewer units may be resident than in the plan.
    pub(crate) fn residency(&self) -> Vec<Residency> {
        self.units.iter().map(UnitState::residency).collect()
    }

    /// Returns how much a plan reads to keep units on the host that are not there yet, in bytes.
    pub(crate) fn new_host_bytes(&self, context: &EngineContext<D>, plan: &Plan) -> usize {
        let is_new = |(unit, residency): (&UnitState<D>, &Residency)| {
            *residency == Residency::Host && unit.image().is_none()
        };
        let units = self.units.iter().zip(&plan.residency).zip(&context.units);
        let new = units.filter(|(own, _)| is_new(*own));
        new.filter_map(|((unit, _), prepared)| unit.image_bytes(prepared)).sum()
    }

    /// Reserves the memory of units that are kept and are not in memory. Call this before other
    /// allocations, so that this memory is adjacent and the ring is one piece of memory. Returns
    /// whether the ring is one piece, and there was memory for all of these units.
    fn reserve_residents(&mut self, context: &EngineContext<D>) -> bool {
        for (i, unit) in self.units.iter_mut().enumerate() {
            unit.settle(self.planning.plan.residency[i]);
        }
        let mut complete = true;
        let is_absent = |unit: &UnitState<D>| unit.is_resident() && !unit.is_present();
        for (i, unit) in self.units.iter_mut().enumerate().filter(|(_, unit)| is_absent(unit)) {
            // An empty pool has room for all slots. If some memory is not free yet, the slot is
            // allocated when the unit is loaded.
            let slot = context.slots.allocate(context.units[i].layout.len).ok();
            complete &= slot.is_some();
            slot.into_iter().for_each(|slot| unit.reserve_slot(slot));
        }
        let absent = |unit: &UnitState<D>| unit.is_on_host() && unit.image().is_none();
        for (i, unit) in self.units.iter_mut().enumerate().filter(|(_, unit)| absent(unit)) {
            let bytes = unit.image_bytes(&context.units[i]);
            let memory = context.allocate_image(bytes);
            complete &= memory.is_some() || bytes.is_none();
            memory.into_iter().for_each(|memory| unit.reserve_image(memory));
        }
        complete && context.slots.largest_free_bytes() >= self.planning.plan.ring_bytes
    }

    /// Switches to the pending plan, unless a unit is in use, referenced or being loaded. Returns
    /// whether it switched.
    ///
    /// What both plans keep stays in memory, if the rest fits beside it.
    pub(crate) fn apply_pending_plan(&mut self, context: &EngineContext<D>) -> bool {
        self.transfers.gathers.forget_dropped();
        let referenced = self.units.iter_mut().any(|unit| unit.referenced_evictions() > 0)
            || !self.transfers.gathers.rows().is_empty();
        let busy = self.units.iter().any(UnitState::is_busy);
        if referenced || busy || !self.planning.switch() {
            return false;
        }
        self.passes.set_planned();
        self.counters.replans += 1;
        self.units.idle.clear();
        self.reset_prefetching();
        let stay = if self.planning.has_new_limit() {
            vec![false; self.units.len()]
        } else {
            self.staying(context, &self.planning.plan)
        };
        self.empty(context, &stay);
        // If a part of the memory is not free yet, the end of the next pass tries again.
        if self.planning.has_new_limit() && context.slots.limit(self.planning.slot_limit) {
            self.planning.set_in_force();
        }
        if !self.reserve_residents(context) && stay.contains(&true) {
            self.empty(context, &vec![false; self.units.len()]);
            self.reserve_residents(context);
        }
        true
    }

    /// Returns for each unit whether a plan keeps it in the form in which it is in memory for good,
    /// and where it is: the ring begins after the units that are kept.
    fn staying(&self, context: &EngineContext<D>, plan: &Plan) -> Vec<bool> {
        if context.slots.is_staged() {
            return vec![false; self.units.len()];
        }
        let begin = context.slots.host.as_ptr_range().start.addr();
        let ring = begin + plan.resident_bytes + plan.compressed_bytes;
        let stays = |(unit, residency): (&UnitState<D>, &Residency)| {
            let (address, len) = match (residency, unit.memory(), unit.image()) {
                (Residency::Resident, Some(memory), _) if unit.is_kept() => {
                    (memory.range().address(), memory.range().len())
                }
                (Residency::Compressed, _, Some(image)) => {
                    (image.bytes.as_ptr().addr(), image.bytes.len())
                }
                _ => return false,
            };
            address + len <= ring
        };
        self.units.iter().zip(&plan.residency).map(stays).collect()
    }

    /// Returns how many bytes of the units that a plan keeps are in memory already, for good.
    pub(crate) fn staying_bytes(&self, context: &EngineContext<D>, plan: &Plan) -> usize {
        let stays = self.staying(context, plan);
        let bytes = |((unit, prepared), residency): ((&UnitState<D>, &Arc<PreparedUnit>), _)| {
            match residency {
                &Residency::Resident => prepared.slot_bytes,
                _ => unit.image_bytes(prepared).unwrap_or(0),
            }
        };
        let units = self.units.iter().zip(&context.units).zip(&plan.residency).zip(stays);
        units.filter(|(_, stays)| *stays).map(|(unit, _)| bytes(unit)).sum()
    }

    /// Frees the memory of all units that do not `stay`, and all memory that is reserved for units.
    fn empty(&mut self, context: &EngineContext<D>, stay: &[bool]) {
        for (id, (&stays, residency)) in
            self.units.ids().zip(stay.iter().zip(&self.planning.plan.residency))
        {
            self.routed.remove_idle(id);
            self.units[id].empty(stays, stays || *residency == Residency::Host);
        }
        context.slots.coalesce();
    }

    /// Returns whether a pass must wait to begin, because the plan for a new limit can be applied
    /// only while no pass runs. Otherwise, threads that always run passes would prevent this.
    ///
    /// The wait ends after 30 seconds in which no pass acquired units, and one second after the
    /// last pass has ended, because memory may be in use for other reasons. Then passes do not wait
    /// for this limit for a minute. `wait` is `None` until the pass waits.
    pub(crate) fn awaits_limit(&mut self, wait: &mut Option<LimitWait>) -> bool {
        let (now, runs) = (Instant::now(), self.passes.running() > 0);
        if !self.planning.may_await_limit(now) || (wait.is_none() && !runs) {
            return false;
        }
        // The plan cannot be applied while a thread that waits here uses units.
        let this_thread = std::thread::current().id();
        if self.units.iter().any(|unit| unit.users.contains(&this_thread)) {
            return false;
        }
        let calls = self.pass_log.calls();
        let waits =
            wait.get_or_insert_with(|| LimitWait::new(calls, now)).goes_on(runs, calls, now);
        if !waits {
            self.planning.give_up_waiting(now);
        }
        waits
    }

    /// Returns the number of bytes that the engine has read from storage.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.counters.read_bytes.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the counters that [`PassTimes`] contains.
    pub(crate) fn pass_totals(&self, now_ns: u64) -> PassTimes {
        PassTimes {
            reading_ns: self.counters.busy_ns + self.transfers.reads.busy_ns(now_ns),
            decoding_ns: self.counters.decode_ns,
            copying_ns: self.counters.copy_ns,
            read_bytes: self.read_bytes(),
            decoded_bytes: self.counters.decoded_bytes,
            replans: self.counters.replans,
            ..self.pass_log.calls()
        }
    }

    /// Returns the measured durations of computations, or those of an earlier run. `rates` are the
    /// measured ones.
    pub(crate) fn compute_times(&self, earlier: &ComputeTimes, rates: Rates) -> ComputeTimes {
        let mut times = earlier.clone();
        times.units.retain(|(id, _)| self.units[*id].fastest_use_ns.is_none());
        let measured = self
            .units
            .ids()
            .filter_map(|id| Some((id, self.units[id].fastest_use_ns? as f64 / 1e9)));
        times.units.extend(measured);
        times.units.sort_unstable_by_key(|(id, _)| *id);
        let (main, order) = self.passes.kinds().main();
        if let Some(compute_s) = self.pass_log.compute_s(main, rates) {
            let visited: f64 = order
                .iter()
                .filter_map(|&id| self.units[id].fastest_use_ns)
                .map(|ns| ns as f64 / 1e9)
                .sum();
            times.other_s = (compute_s - visited).max(0.0);
        }
        times
    }

    /// Returns whether any unit is being loaded.
    pub(crate) fn is_loading(&self) -> bool {
        !self.transfers.loads.is_empty()
    }

    /// Returns the units in memory that are watched for writes, with their memory.
    pub(crate) fn watched(&self) -> Vec<(UnitId, Arc<WatchedBuffer>)> {
        let watched = |(i, unit): (usize, &UnitState<D>)| {
            Some((UnitId(i as u32), Arc::clone(unit.memory()?.watched()?)))
        };
        self.units.iter().enumerate().filter_map(watched).collect()
    }

    /// Makes an evicted unit present again if tensors still reference its unmodified memory.
    fn restore_evicted(&mut self, id: UnitId) {
        if self.units[id].restore_evicted() {
            self.update_idle(id);
        }
    }

    /// Records a visit to a unit.
    pub(crate) fn visit(&mut self, pass: Option<PassId>, id: UnitId) {
        if self.routed.contains(id) {
            self.routed.visit(id);
        } else {
            self.passes.visit(pass, id);
        }
    }

    /// Records that a call waits for a unit. Meanwhile, other calls do not evict the unit to free
    /// memory.
    pub(crate) fn add_waiter(&mut self, id: UnitId) {
        self.units[id].waiters.push(std::thread::current().id());
        self.promote_guess(id);
        self.no_longer_idle(id);
    }

    /// Removes a unit that is used from the idle units.
    pub(crate) fn no_longer_idle(&mut self, id: UnitId) {
        self.units.idle.remove(id);
        self.routed.remove_idle(id);
    }

    /// Reverses [`add_waiter`](Self::add_waiter), which `thread` called.
    pub(crate) fn remove_waiter(&mut self, id: UnitId, thread: ThreadId) {
        let waiters = &mut self.units[id].waiters;
        let at = waiters.iter().position(|&waiter| waiter == thread);
        waiters.swap_remove(at.expect("`add_waiter` was called on this thread"));
        self.waiters.for_memory.remove(&thread);
        self.update_idle(id);
    }

    /// Adds a unit to the set of idle units if it is idle.
    fn update_idle(&mut self, id: UnitId) {
        let unit = &self.units[id];
        if unit.is_unused() && !unit.is_kept() {
            if self.routed.guesses.open.contains_key(&id) {
                // It is likely to be used soon.
            } else if self.routed.contains(id) {
                self.routed.insert_idle(id);
            } else {
                self.units.idle.insert(id);
            }
        }
    }

    /// Expects visits to routed units, in this order, and starts to load those that are absent.
    /// Returns the number of the expectation.
    pub(crate) fn expect(
        &mut self,
        context: &EngineContext<D>,
        uses: &[(UnitId, u32)],
        now_ns: u64,
    ) -> u64 {
        uses.iter().for_each(|&(id, _)| self.restore_evicted(id));
        self.judge_guesses(context, uses, now_ns);
        let units = &self.units;
        let is_present = |id: UnitId| !units[id].is_absent();
        let number = self.routed.expect(uses, is_present);
        for &(id, _) in uses {
            let unit = &mut self.units[id];
            unit.stats.touched += 1;
            unit.stats.hits += u64::from(!unit.is_absent());
        }
        self.advance(context, now_ns);
        number
    }

    /// Ends an expectation. Its units that were not visited become idle, if they are present and
    /// nothing else needs them.
    pub(crate) fn end_expectation(&mut self, number: u64) {
        for id in self.routed.end_expectation(number) {
            self.update_idle(id);
        }
    }

    /// Evicts a unit whose bytes were modified, even if it is in use or resident.
    pub(crate) fn discard(&mut self, context: &EngineContext<D>, id: UnitId) {
        if self.units[id].is_present() {
            self.evict(id);
            let unit = &mut self.units[id];
            // The unit stays resident only if there is a free slot for it.
            if unit.is_resident() && unit.reserved_slot().is_none() {
                let slot_len = context.units[id.index()].layout.len;
                let is_free = unit.referenced_evictions() == 0;
                match is_free.then(|| context.slots.allocate(slot_len).ok()).flatten() {
                    Some(slot) => unit.reserve_slot(slot),
                    None => drop(unit.demote()),
                }
            }
            self.retry_prefetch();
        }
        self.units[id].set_evicted_modified();
    }

    /// Evicts a unit. Its memory is freed when the last lease or tensor in it is dropped.
    fn evict(&mut self, id: UnitId) {
        drop(self.take_present(id));
    }

    /// Evicts a unit. Returns its memory if the unit was present.
    fn take_present(&mut self, id: UnitId) -> Option<Arc<UnitMemory<D>>> {
        self.units.idle.remove(id);
        self.routed.remove_idle(id);
        self.retreat_to(id);
        let unit = &mut self.units[id];
        let memory = unit.take_present()?;
        if let Some(trace) = &mut self.trace {
            let now_ns = trace.latest_ns();
            let bytes = unit.stats.slot_bytes as u64;
            trace.add(TraceEvent::new(TraceKind::Evict, now_ns, now_ns).of(Some(id)).bytes(bytes));
        }
        self.routed.stats.evictions += u64::from(self.routed.contains(id));
        if !unit.used_since_load {
            self.counters.wasted_loads += 1;
        }
        Some(memory)
    }
}
