// SPDX-License-Identifier: MIT OR Apache-2.0
//! Acquires units: starts to load them, and waits until they are in memory.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::ThreadId;

use ts_streams::Device;

use crate::Error;
use crate::config::{Interrupt, never_interrupt};
use crate::event::Event;
use crate::lease::Lease;
use crate::pass::PassId;
use crate::plan::NeverFits;
use crate::state::{EngineState, Shortage};
use crate::trace::{TraceEvent, TraceKind};
use crate::unit::UnitId;
use crate::unit_memory::UnitMemory;

use super::{Engine, InterruptTimer, Shared, StateGuard};

/// How many times a call tries again before it reports a lack of memory as an error.
pub(super) const SHORTAGE_TRIES: u32 = 3;

/// The memory of each acquired unit.
type Memory<D> = Vec<Arc<UnitMemory<D>>>;
/// The memory of each unit, and whether the caller had to wait for it.
type Acquired<D> = (Memory<D>, bool);

impl<D: Device> Engine<D> {
    /// Leases a unit, and blocks until it is in memory.
    ///
    /// Pass `None` for `pass` if the use belongs to no pass. The engine does not learn the order of
    /// such uses.
    ///
    /// # Errors
    /// - [`Error::Load`] if reading failed; the next call reads again.
    /// - [`Error::Corrupt`] if the bytes do not match their checksum or cannot be decoded.
    /// - [`Error::Device`] if the copy to the device or the allocation on it failed.
    /// - [`Error::StillReferenced`] if tensors that outlived their lease occupy the memory.
    /// - [`Error::Deadlock`] if all threads that could free memory are themselves waiting for
    ///   memory or for a pass.
    /// - [`Error::StagingFull`] if the staging memory cannot become free.
    /// - [`Error::Written`] if the unit's bytes changed after [`Lease::seal`].
    /// - [`Error::System`] if a worker thread panicked while it loaded the unit.
    /// - [`Error::NoSuchUnit`] if the engine has no such unit.
    pub fn acquire(&self, pass: Option<PassId>, unit: UnitId) -> Result<Lease<D>, Error> {
        self.acquire_interruptible(pass, unit, never_interrupt())
    }

    /// Like [`acquire`](Self::acquire), but calls `interrupt` regularly while it blocks.
    ///
    /// # Errors
    /// Returns the errors of [`acquire`](Self::acquire), and [`Error::Interrupted`] if `interrupt`
    /// returned `true`.
    pub fn acquire_interruptible(
        &self,
        pass: Option<PassId>,
        unit: UnitId,
        interrupt: Interrupt<'_>,
    ) -> Result<Lease<D>, Error> {
        let shared = &*self.shared;
        shared.check_unit(unit)?;
        let asked_ns = (shared.clock)();
        let mut state = shared.lock();
        state.visit(pass, unit);
        // Allocates nothing if the unit is in memory.
        let Some(memory) = state.take_one(unit) else {
            let (mut memory, now_ns) = shared.wait_to_use(state, &[unit], asked_ns, interrupt)?;
            return self.lease(memory.pop().expect("the unit was acquired"), unit, now_ns);
        };
        state.promote_guess(unit);
        state.no_longer_idle(unit);
        state.advance(&shared.context, asked_ns);
        let now_ns = (shared.clock)();
        state.pass_log.count_call(0, now_ns.saturating_sub(asked_ns));
        drop(state);
        self.lease(memory, unit, now_ns)
    }

    /// Leases the units that one operation needs at the same time, and blocks until all of them are
    /// in memory.
    ///
    /// The leases are in the order of `units`. The engine remembers the set and plans for it.
    ///
    /// # Errors
    /// Returns the errors of [`acquire`](Self::acquire), and [`Error::NeverFits`] if the units
    /// together are larger than the engine's memory for units. Nothing is read in that case.
    pub fn acquire_all(
        &self,
        pass: Option<PassId>,
        units: &[UnitId],
    ) -> Result<Vec<Lease<D>>, Error> {
        self.acquire_all_interruptible(pass, units, never_interrupt())
    }

    /// Like [`acquire_all`](Self::acquire_all), but calls `interrupt` regularly while it blocks.
    ///
    /// # Errors
    /// Returns the errors of [`acquire_all`](Self::acquire_all), and [`Error::Interrupted`] if
    /// `interrupt` returned `true`.
    pub fn acquire_all_interruptible(
        &self,
        pass: Option<PassId>,
        units: &[UnitId],
        interrupt: Interrupt<'_>,
    ) -> Result<Vec<Lease<D>>, Error> {
        let shared = &*self.shared;
        units.iter().try_for_each(|&unit| shared.check_unit(unit))?;
        shared.check_size(units)?;
        let asked_ns = (shared.clock)();
        let mut state = shared.lock();
        state.add_together(units);
        for &unit in units {
            state.visit(pass, unit);
        }
        let (memory, now_ns) = shared.wait_to_use(state, units, asked_ns, interrupt)?;
        let lease =
            |(memory, &unit)| Lease::new(memory, Arc::clone(&self.shared), unit, Some(now_ns));
        let leases: Vec<_> = memory.into_iter().zip(units).map(lease).collect();
        leases.iter().try_for_each(Lease::check_seal)?;
        Ok(leases)
    }

    /// Leases a unit if it is in memory, and otherwise returns `None`. Does not block.
    ///
    /// Such a use belongs to no pass, and does not change the order that the engine plans for.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchUnit`] if the engine has no such unit, and [`Error::Written`] if the
    /// unit's bytes changed after [`Lease::seal`].
    pub fn try_acquire(&self, unit: UnitId) -> Result<Option<Lease<D>>, Error> {
        let shared = &*self.shared;
        shared.check_unit(unit)?;
        let mut state = shared.lock();
        let Some(memory) = state.take_one(unit) else { return Ok(None) };
        state.no_longer_idle(unit);
        let now_ns = (shared.clock)();
        drop(state);
        self.lease(memory, unit, now_ns).map(Some)
    }

    /// Leases all units, if all of them are resident and in memory, and otherwise returns `None`.
    /// Does not block.
    ///
    /// Passes need no other leases then, and the leases may be kept from pass to pass. They are no
    /// uses in the statistics, and passes without other leases are not measured. Drop them before
    /// other leases, [`replan`](Self::replan) and [`set_limit`](Self::set_limit), which cannot take
    /// memory from units in use, and before [`begin_trace`](Self::begin_trace).
    ///
    /// Returns `None` until every unit was used, and several passes were measured use by use with
    /// the current plan. Also returns `None` while a trace is being recorded, while a better plan
    /// or a new limit waits, while several passes are running, if a unit is [sealed](Lease::seal),
    /// and if units are [routed](crate::Access::Routed).
    pub fn acquire_all_resident(&self) -> Option<Vec<Lease<D>>> {
        let memory = self.shared.lock().take_all()?;
        let lease = |(index, memory)| {
            Lease::new(memory, Arc::clone(&self.shared), UnitId(index as u32), None)
        };
        Some(memory.into_iter().enumerate().map(lease).collect())
    }

    /// Returns whether these units were [acquired together](Self::acquire_all) before, so that
    /// plans have memory for all of them at once. Routed units do not count, and one unit is
    /// always known.
    pub fn knows_together(&self, units: &[UnitId]) -> bool {
        self.shared.lock().unknown_set(units).is_none()
    }

    /// Evicts a unit whose bytes were modified, so that the next use reads it again.
    ///
    /// Tensors that are still referenced keep the modified bytes. Does nothing if no copy of the
    /// unit is in memory.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchUnit`] if the engine has no such unit.
    pub fn discard(&self, unit: UnitId) -> Result<(), Error> {
        self.shared.check_unit(unit)?;
        self.shared.discard(unit);
        Ok(())
    }

    /// Returns the lease of a unit that this thread uses since `acquired_ns`.
    fn lease(
        &self,
        memory: Arc<UnitMemory<D>>,
        unit: UnitId,
        acquired_ns: u64,
    ) -> Result<Lease<D>, Error> {
        let lease = Lease::new(memory, Arc::clone(&self.shared), unit, Some(acquired_ns));
        lease.check_seal()?;
        Ok(lease)
    }
}

impl<D: Device> Shared<D> {
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

    /// Ends the use of a unit by a lease.
    pub(crate) fn release(&self, unit: UnitId, user: ThreadId, acquired_ns: Option<u64>) {
        if self.is_forked() {
            return;
        }
        let now_ns = (self.clock)();
        let used_ns = acquired_ns.map(|acquired_ns| now_ns.saturating_sub(acquired_ns));
        let event = Event::Released { unit, user, used_ns };
        // A stream can run its work on a thread that holds the lock and allocates memory for the
        // stream. If that work drops a lease, taking the lock here would deadlock. So the loader
        // thread releases the unit.
        if ts_streams::check_may_block().is_err() && self.context.events.send(event).is_ok() {
            return;
        }
        let mut state = self.lock();
        state.release(unit, user, used_ns, now_ns);
        state.advance(&self.context, (self.clock)());
        self.notify(state);
    }

    pub(crate) fn discard(&self, unit: UnitId) {
        self.lock().discard(&self.context, unit);
    }

    pub(crate) fn is_resident(&self, unit: UnitId) -> bool {
        self.lock().units[unit].is_kept()
    }

    /// Returns how many references to a unit's memory the engine and its leases have together.
    pub(crate) fn owner_count(&self, unit: UnitId) -> usize {
        let state = self.lock();
        let unit = &state.units[unit];
        unit.users.len() + usize::from(unit.is_present())
    }
}
