// SPDX-License-Identifier: MIT OR Apache-2.0
//! Acquires units: starts to load them, and waits until they are in memory.

use std::collections::BTreeSet;
use std::sync::Arc;

use ts_streams::Device;

use crate::Error;
use crate::config::Interrupt;
use crate::pass::PassId;
use crate::plan::NeverFits;
use crate::state::{EngineState, Shortage};
use crate::trace::{TraceEvent, TraceKind};
use crate::unit::UnitId;
use crate::unit_memory::UnitMemory;

use super::{EngineInner, InterruptTimer, StateGuard};

/// How many times a call tries again before it reports a lack of memory as an error.
pub(super) const SHORTAGE_TRIES: u32 = 3;

/// The memory of each acquired unit.
type Memory<D> = Vec<Arc<UnitMemory<D>>>;
/// The memory of each unit, and whether the caller had to wait for it.
type Acquired<D> = (Memory<D>, bool);

impl<D: Device> EngineInner<D> {
    /// Acquires one unit like [`acquire`](Self::acquire). Allocates nothing if the unit is in
    /// memory.
    pub(crate) fn acquire_one(
        &self,
        pass: Option<PassId>,
        unit: UnitId,
        interrupt: Interrupt<'_>,
    ) -> Result<(Arc<UnitMemory<D>>, u64), Error> {
        let asked_ns = (self.clock)();
        let mut state = self.lock();
        state.visit(pass, unit);
        if let Some(memory) = state.take_one(unit) {
            state.promote_guess(unit);
            state.no_longer_idle(unit);
            state.advance(&self.context, asked_ns);
            let now_ns = (self.clock)();
            state.pass_log.count_call(0, now_ns.saturating_sub(asked_ns));
            return Ok((memory, now_ns));
        }
        let (mut memory, now_ns) = self.wait_to_use(state, &[unit], asked_ns, interrupt)?;
        Ok((memory.pop().expect("the unit was acquired"), now_ns))
    }

    /// Blocks until all units are in memory. Marks the units as used by this thread. Returns their
    /// memory, and the current time in nanoseconds.
    pub(crate) fn acquire(
        &self,
        pass: Option<PassId>,
        units: &[UnitId],
        interrupt: Interrupt<'_>,
    ) -> Result<(Memory<D>, u64), Error> {
        self.check_size(units)?;
        let asked_ns = (self.clock)();
        let mut state = self.lock();
        state.add_together(units);
        for &unit in units {
            state.visit(pass, unit);
        }
        self.wait_to_use(state, units, asked_ns, interrupt)
    }

    /// Blocks until all visited units are in memory. Marks them as used by this thread.
    fn wait_to_use(
        &self,
        mut state: StateGuard<'_, D>,
        units: &[UnitId],
        asked_ns: u64,
        interrupt: Interrupt<'_>,
    ) -> Result<(Memory<D>, u64), Error> {
        for &unit in units {
            state.add_waiter(unit);
        }
        let (mut state, result) = self.wait_for_units(state, units, interrupt);
        for &unit in units {
            state.remove_waiter(unit, std::thread::current().id());
        }
        let now_ns = (self.clock)();
        state.advance(&self.context, now_ns);
        let (memory, waited) = result?;
        let call_ns = now_ns.saturating_sub(asked_ns);
        state.pass_log.count_call(if waited { call_ns } else { 0 }, call_ns);
        if waited {
            if let Some(trace) = &mut state.trace {
                let event = TraceEvent::new(TraceKind::Wait, asked_ns, now_ns);
                trace.add_on(std::thread::current().id(), event.of(units.first().copied()));
            }
            for &unit in units {
                let stats = &mut state.units[unit].stats;
                stats.stalls += 1;
                stats.stall_ns += call_ns;
            }
        }
        Ok((memory, now_ns))
    }

    /// Marks a unit as used by this thread if it is in memory. Returns its memory, and the current
    /// time in nanoseconds.
    pub(crate) fn try_acquire(&self, unit: UnitId) -> Option<(Arc<UnitMemory<D>>, u64)> {
        let mut state = self.lock();
        let memory = state.take_one(unit)?;
        state.no_longer_idle(unit);
        Some((memory, (self.clock)()))
    }

    pub(crate) fn knows_together(&self, units: &[UnitId]) -> bool {
        self.lock().unknown_set(units).is_none()
    }

    pub(crate) fn acquire_all_resident(&self) -> Option<Memory<D>> {
        self.lock().take_all()
    }

    /// Checks that units which are acquired together fit into memory.
    ///
    /// # Errors
    /// Returns [`Error::NeverFits`] if several units together are larger than all slots.
    fn check_size(&self, units: &[UnitId]) -> Result<(), Error> {
        let [_, _, ..] = units else { return Ok(()) };
        let distinct: BTreeSet<UnitId> = units.iter().copied().collect();
        let needed: usize = distinct.iter().map(|&unit| self.unit(unit).slot_bytes).sum();
        let limit = self.lock().planning.slot_limit;
        if needed <= self.context.slots.capacity_bytes().min(limit) {
            return Ok(());
        }
        let budget_bytes = self.budget.limit_bytes() - self.slot_budget + limit;
        Err(Error::NeverFits(NeverFits {
            budget_bytes,
            largest_unit: self.names(units),
            largest_bytes: needed,
            smallest_budget_bytes: self.overhead.budget_for(needed, &self.tables),
        }))
    }

    /// Blocks until all units are present. Returns their memory, and whether the call had to wait.
    fn wait_for_units<'a>(
        &'a self,
        mut state: StateGuard<'a, D>,
        units: &[UnitId],
        interrupt: Interrupt<'_>,
    ) -> (StateGuard<'a, D>, Result<Acquired<D>, Error>) {
        let (mut waited, mut tries, mut timer) = (false, 0, InterruptTimer::new());
        loop {
            if let Some(result) = self.try_units(&mut state, units, &mut tries) {
                return (state, result.map(|memory| (memory, waited)));
            }
            waited = true;
            let what = || format!("unit `{}`", self.names(units));
            state = match self.wait(state, &mut timer, interrupt, what) {
                Ok(state) => state,
                Err(error) => return (self.lock(), Err(error)),
            };
        }
    }

    /// Returns the memory of units if all are present. Otherwise returns the failure of a read, or
    /// starts to read the absent units.
    pub(super) fn try_units(
        &self,
        state: &mut EngineState<D>,
        units: &[UnitId],
        tries: &mut u32,
    ) -> Option<Result<Memory<D>, Error>> {
        loop {
            if let Some(memory) = state.take(units) {
                return Some(Ok(memory));
            }
            let failures = units.iter().filter_map(|unit| state.units[*unit].failure.take());
            if let Some(failure) = failures.last() {
                return Some(Err(failure));
            }
            if !state.units.is_any_absent(units) {
                return None;
            }
            if let Err(error) = self.start(state, units, tries) {
                return Some(Err(error));
            }
            // A unit without bytes is present as soon as it has a slot.
            if !state.units.are_all_present(units) {
                return None;
            }
        }
    }

    fn names(&self, units: &[UnitId]) -> String {
        let distinct: BTreeSet<UnitId> = units.iter().copied().collect();
        let names: Vec<&str> =
            distinct.iter().map(|&unit| self.unit(unit).unit.name.as_str()).collect();
        names.join("` + `")
    }

    /// Starts to read the absent units, or notes that this thread waits for memory.
    fn start(
        &self,
        state: &mut EngineState<D>,
        units: &[UnitId],
        tries: &mut u32,
    ) -> Result<(), Error> {
        let this_thread = std::thread::current().id();
        let absent = state.units.absent(units);
        let needed_bytes = absent.iter().map(|&unit| self.unit(unit).slot_bytes).sum();
        match state.demand(&self.context, units, (self.clock)()) {
            Ok(()) => {
                state.waiters.for_memory.remove(&this_thread);
                Ok(())
            }
            // Another thread may be about to drop the last reference, so the call tries again
            // before this is an error.
            Err(Shortage::Deadlock { holders }) if *tries >= SHORTAGE_TRIES => {
                Err(Error::Deadlock {
                    unit: self.names(&absent),
                    needed_bytes,
                    holders: holders.join(", "),
                })
            }
            Err(Shortage::StagingFull) if *tries >= SHORTAGE_TRIES => {
                Err(Error::StagingFull { unit: self.names(&absent) })
            }
            Err(Shortage::StillReferenced { bytes, holders }) if *tries >= SHORTAGE_TRIES => {
                let (held_bytes, holders) = (bytes, holders.join(", "));
                let unit = self.names(&absent);
                Err(Error::StillReferenced { unit, needed_bytes, held_bytes, holders })
            }
            Err(Shortage::Device(error)) => Err(Error::device(&self.names(&absent), error)),
            Err(shortage) => {
                if !matches!(shortage, Shortage::Temporary) {
                    *tries += 1;
                }
                state.waiters.for_memory.insert(this_thread);
                Ok(())
            }
        }
    }
}
