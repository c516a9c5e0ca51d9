// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use ts_io::{BackendOptions, Choice, ReadPath, Registry, Source};
use ts_pool::{Budget, HostPool, Reservation, WriteWatch};
use ts_streams::{CpuDevice, Device};

use crate::Error;
use crate::design::Design;
use crate::lease::Lease;
use crate::load::Event;
use crate::pass::PassId;
use crate::plan::{NeverFits, Plan, PlanRequest, Rates, Residency, plan, predict};
use crate::populate::Populating;
use crate::prefetch::Prefetch;
use crate::slot::{Slot, Slots, device_error};
use crate::state::{Fixed, Prepared, Residence, Shortage, State};
use crate::stats::{EngineStats, UnitStats};
use crate::unit::{Unit, UnitId};
use crate::worker::Workers;

/// How often a waiting call asks its [`Interrupt`].
const INTERRUPT_PERIOD: Duration = Duration::from_millis(20);

/// The share of a pass that a new plan must promise to save, and the passes within which it must
/// pay.
const REPLAN_GAIN: f64 = 0.05;
const REPLAN_PASSES: f64 = 8.0;

/// Times to look again, a period of [`INTERRUPT_PERIOD`] or a change apart, before held memory is
/// an error.
const SHORTAGE_TRIES: u32 = 3;

/// Asked from time to time while a call waits, on the calling thread and with no lock held; `true`
/// ends the wait with [`Error::Interrupted`].
pub type Interrupt<'a> = &'a mut dyn FnMut() -> bool;

/// An [`Interrupt`] for callers that wait as long as it takes.
pub fn never_interrupt() -> Interrupt<'static> {
    // A closure without captures has no size, so this allocates nothing.
    Box::leak(Box::new(|| false))
}

/// Where an engine reads the time for its measurements, in nanoseconds that never go back.
pub type Clock = Box<dyn Fn() -> u64 + Send + Sync>;

/// How an engine is set up. Make one with [`EngineConfig::with_budget`] and change what should
/// differ.
pub struct EngineConfig {
    /// All memory for weights, in bytes: slots, reads in flight, bounce buffers. For a device whose
    /// memory is not the host's it is the device's that counts, which has the slots alone.
    pub budget_bytes: usize,
    /// For how many units memory of the host is taken, by way of which they go to such a device:
    /// what the largest need, at least for one.
    pub staging_units: usize,
    /// Passes that may run at once; more wait for their turn. At least 1.
    pub max_passes: usize,
    /// The visits that a pass is expected to make; `None` for all units in their order. Learned as
    /// passes run.
    pub order: Option<Vec<UnitId>>,
    /// Sets of units that one operation needs at the same time, as far as they are known; others
    /// are learned.
    pub together: Vec<Vec<UnitId>>,
    /// Name of the I/O backend; `None` for the best that is available.
    pub backend: Option<String>,
    /// The backends to choose from.
    pub registry: Registry,
    /// How the backend is set up.
    pub io: BackendOptions,
    /// Largest single read, in bytes.
    pub request_bytes: usize,
    /// How far units are read ahead.
    pub prefetch: Prefetch,
    /// When units are compared with their checksums, where they have some.
    pub verify: Verify,
    /// Threads that compare checksums, and bring bytes to their place which could not be read
    /// there.
    pub workers: usize,
    /// Threads that take the memory of units from the system before the first reads get there; 0
    /// for none. What is taken so is taken for good, also if it is never used.
    pub populate: usize,
    /// Has [`Engine::written`] find what foreign code writes to units that the plan keeps: where
    /// the system can, on the host, and without `populate`, whose work cannot be told from writes.
    pub watch_writes: bool,
    /// What the first plan assumes; measured later.
    pub rates: Rates,
    /// The time.
    pub clock: Clock,
}

/// When bytes are compared with their checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verify {
    /// Whenever they are read.
    #[default]
    EveryRead,
    /// When they are read for the first time; what is read again, from a file that has not changed,
    /// is trusted.
    Once,
    /// Not at all. What is compressed must still be what its codec can make.
    Never,
}

impl EngineConfig {
    /// The defaults, with this budget.
    pub fn with_budget(budget_bytes: usize) -> Self {
        Self {
            budget_bytes,
            staging_units: 2,
            max_passes: 1,
            order: None,
            together: Vec::new(),
            backend: None,
            registry: Registry::builtin(),
            io: BackendOptions::default(),
            request_bytes: 4 << 20,
            prefetch: Prefetch::default(),
            verify: Verify::EveryRead,
            workers: 1,
            populate: 0,
            watch_writes: false,
            rates: Rates::default(),
            clock: Box::new(ts_io::monotonic_ns),
        }
    }
}

/// Holds units of weights in memory as its plan says and reads the others ahead of their use.
///
/// Units are where the work of streams of its device reaches them. Memory of a [`CpuDevice`] is the
/// host's, and they are read to where they stay; to other devices they are [copied](Self::on) when
/// they are read.
///
/// Dropping it stops its threads once reads under way have ended. Tensors stay valid.
pub struct Engine<D: Device = CpuDevice> {
    shared: Arc<Shared<D>>,
    loader: Option<JoinHandle<()>>,
    populating: Option<Populating>,
}

pub(crate) struct Shared<D: Device> {
    fixed: Fixed<D>,
    state: Mutex<State<D>>,
    /// Something changed that a waiting call may have waited for.
    changed: Condvar,
    budget: Budget,
    /// For what workers decode with.
    _scratch: Reservation,
    choice: Choice,
    max_passes: usize,
    slot_budget: usize,
    rates: Rates,
    clock: Clock,
    process: u32,
}

impl Engine {
    /// Plans and prepares, for the host; reads nothing yet. `sources` are the files that the
    /// tensors' ranges name, by id.
    ///
    /// # Errors
    /// [`Error::NeverFits`] when no plan works under the budget; [`Error::NoSuchFile`] and
    /// [`Error::NoSuchUnit`] when units or order name what there is not; [`Error::Storage`] when
    /// the backend is not available; [`Error::System`] when memory or a thread is refused.
    pub fn new(
        units: Vec<Unit>,
        sources: Vec<Arc<Source>>,
        config: EngineConfig,
    ) -> Result<Self, Error> {
        Self::build(None, units, sources, config)
    }

    /// The plan that an engine would begin with, and what it says of each unit. Takes no memory for
    /// weights, starts nothing, reads nothing.
    ///
    /// # Errors
    /// As [`new`](Self::new), but for what the system refuses.
    pub fn preview(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
    ) -> Result<(Plan, Vec<UnitStats>), Error> {
        let Design { units, plan, .. } = Design::new(units, sources, config, false)?;
        let stats = units.iter().zip(&plan.residency).map(|(unit, &residency)| UnitStats {
            resident: residency == Residency::Resident,
            ..unit.no_stats()
        });
        let stats = stats.collect();
        Ok((plan, stats))
    }
}

impl<D: Device> Engine<D> {
    /// As [`new`](Engine::new), for a device.
    ///
    /// # Errors
    /// As [`new`](Engine::new).
    pub fn on(
        device: &D,
        units: Vec<Unit>,
        sources: Vec<Arc<Source>>,
        config: EngineConfig,
    ) -> Result<Self, Error> {
        let apart = (!device.info().host_memory).then_some(device);
        Self::build(apart, units, sources, config)
    }

    /// For a device whose memory is not the host's, or for the host.
    fn build(
        device: Option<&D>,
        units: Vec<Unit>,
        sources: Vec<Arc<Source>>,
        config: EngineConfig,
    ) -> Result<Self, Error> {
        let choice = config.registry.choose(config.backend.as_deref(), &sources)?;
        let design = Design::new(units, &sources, &config, device.is_some())?;
        let Design {
            units,
            order,
            cut,
            bounce_total,
            scratch_total,
            staging_total,
            slot_budget,
            plan,
        } = design;
        let system = |e: ts_pool::Error| Error::System(e.to_string());
        let budget = Budget::new(config.budget_bytes);
        let aside = if device.is_some() {
            Budget::new(bounce_total + scratch_total)
        } else {
            budget.clone()
        };
        let bounces = (bounce_total > 0)
            .then(|| HostPool::new(&aside, bounce_total))
            .transpose()
            .map_err(system)?;
        let scratch = aside.reserve(scratch_total).map_err(system)?;
        let (events, inbox) = channel();
        let slots = match device {
            Some(device) => {
                Slots::on_device(device, &budget, plan.peak_bytes(), staging_total, &events)
            }
            None => {
                let watch = config.watch_writes && config.populate == 0;
                Slots::on_host(&budget, plan.peak_bytes(), watch)
            }
        };
        let slots = slots.map_err(system)?;
        let populating = Populating::new(&slots.host, config.populate);
        let sink = events.clone();
        let backend = choice.provider.create(
            &config.io,
            Box::new(move |completion| drop(sink.send(Event::Read(completion)))),
        )?;
        let (prefetch, verify) = (config.prefetch, config.verify);
        let checks = verify != Verify::Never && units.iter().any(|unit| !unit.checks.is_empty());
        let workers =
            (checks || bounces.is_some()).then(|| Workers::new(config.workers.max(1), &events));
        let workers = workers.transpose()?;
        let timeout = config.io.timeout;
        let fixed =
            Fixed { units, sources, slots, bounces, cut, prefetch, verify, timeout, events };
        let state = State::new(&fixed, order, &config.together, plan, backend, workers);
        let shared = Arc::new(Shared {
            fixed,
            state: Mutex::new(state),
            changed: Condvar::new(),
            budget,
            _scratch: scratch,
            choice,
            max_passes: config.max_passes.max(1),
            slot_budget,
            rates: config.rates,
            clock: config.clock,
            process: std::process::id(),
        });
        let loader = spawn_loader(Arc::clone(&shared), inbox)?;
        Ok(Self { shared, loader: Some(loader), populating: Some(populating) })
    }

    /// Begins a pass over the units and starts to read ahead. Waits while `max_passes` others run.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn begin_pass(&self, interrupt: Interrupt<'_>) -> Result<PassId, Error> {
        let mut state = self.shared.lock();
        let this_thread = std::thread::current().id();
        let mut waiting = Waiting::new();
        while state.passes.running() >= self.shared.max_passes {
            // Who waits here frees nothing meanwhile; others must know.
            state.queued.insert(this_thread);
            state = self
                .shared
                .wait(state, &mut waiting, interrupt, || "another pass to end".into())?;
        }
        state.queued.remove(&this_thread);
        state.counts.passes += 1;
        let id = state.passes.begin();
        state.advance(&self.shared.fixed, (self.shared.clock)());
        Ok(id)
    }

    /// Ends a pass. Returns whether its order of visits calls for another plan: call
    /// [`replan`](Self::replan) when no lease is held. Does nothing for a pass that has ended
    /// already.
    pub fn end_pass(&self, pass: PassId) -> bool {
        let mut state = self.shared.lock();
        let believed = state.believed.clone();
        match state.passes.end(pass, &believed) {
            Some(true) => self.shared.propose_plan(&mut state),
            Some(false) if state.outgrown => self.shared.propose_plan(&mut state),
            // The order that the plan in force was made for is back.
            Some(false) => state.pending_plan = None,
            None => {}
        }
        state.advance(&self.shared.fixed, (self.shared.clock)());
        let proposed = state.pending_plan.is_some();
        drop(state);
        self.shared.changed.notify_all();
        proposed
    }

    /// Waits until nothing is on its way, then puts the plan in force that
    /// [`end_pass`](Self::end_pass) spoke of. Returns whether it did: not while a pass runs, units
    /// are in use, or tensors of units are still held.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn replan(&self, interrupt: Interrupt<'_>) -> Result<bool, Error> {
        let mut state = self.shared.lock();
        let mut waiting = Waiting::new();
        while state.passes.running() == 0 && state.is_loading() {
            state.paused = true;
            state = match self.shared.wait(state, &mut waiting, interrupt, || "reads to end".into())
            {
                Ok(state) => state,
                Err(error) => {
                    self.shared.lock().paused = false;
                    return Err(error);
                }
            };
        }
        let applied = state.passes.running() == 0 && state.apply_pending_plan(&self.shared.fixed);
        state.paused = false;
        state.advance(&self.shared.fixed, (self.shared.clock)());
        Ok(applied)
    }

    /// Gives the right to use a unit, waiting until it is in memory. `pass` is `None` for a use
    /// that belongs to no pass and tells nothing of the order.
    ///
    /// # Errors
    /// [`Error::Load`] when reading failed (the next call tries again); [`Error::StillReferenced`]
    /// when tensors that outlived their lease hold the memory; [`Error::Stuck`] when all who hold
    /// it wait for more; [`Error::NoSuchUnit`]; [`Error::Interrupted`].
    pub fn acquire(
        &self,
        pass: Option<PassId>,
        unit: UnitId,
        interrupt: Interrupt<'_>,
    ) -> Result<Lease<D>, Error> {
        let mut leases = self.acquire_all(pass, &[unit], interrupt)?;
        Ok(leases.pop().expect("a lease for each unit"))
    }

    /// Gives the right to use several units at the same time, in their order: what one operation
    /// needs. Waits until all are in memory. The engine learns the set, and plans for it.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire); [`Error::NeverFits`] when the units are larger than the
    /// budget together: nothing is read then.
    pub fn acquire_all(
        &self,
        pass: Option<PassId>,
        units: &[UnitId],
        interrupt: Interrupt<'_>,
    ) -> Result<Vec<Lease<D>>, Error> {
        let count = self.shared.fixed.units.len();
        if let Some(unit) = units.iter().find(|unit| unit.index() >= count) {
            return Err(Error::NoSuchUnit { unit: unit.0, count });
        }
        self.shared.acquire(pass, units, interrupt)
    }

    /// Gives a unit up because foreign code has written to its bytes: the next use reads it anew.
    /// Tensors that others hold keep the bytes as they are. Does nothing for a unit that is not in
    /// memory.
    ///
    /// # Errors
    /// [`Error::NoSuchUnit`].
    pub fn discard(&self, unit: UnitId) -> Result<(), Error> {
        let count = self.shared.fixed.units.len();
        if unit.index() >= count {
            return Err(Error::NoSuchUnit { unit: unit.0, count });
        }
        self.shared.discard(unit);
        Ok(())
    }

    /// Units that the plan keeps whose bytes were written to since they were read, where [they are
    /// watched](EngineConfig::watch_writes); each with its tensors that lie on a page that was
    /// written to. Whoever finds one drops its tensors and [gives it up](Self::discard). Takes some
    /// microseconds, and less than a thousandth of the time to read the units' bytes.
    pub fn written(&self) -> Vec<(UnitId, Vec<usize>)> {
        // No lock is held while the system looks.
        let watched = self.shared.lock().watched();
        if !WriteWatch::any_written(watched.iter().map(|(_, bytes)| &**bytes)) {
            return Vec::new();
        }
        let tensors = |id: UnitId, written: &[Range<usize>]| {
            let touched = |at: &usize| {
                let place = self.shared.unit(id).layout.tensors[*at];
                written
                    .iter()
                    .any(|bytes| bytes.start < place.offset + place.len && place.offset < bytes.end)
            };
            (0..self.shared.unit(id).layout.tensors.len()).filter(touched).collect()
        };
        let written = watched.into_iter().map(|(id, bytes)| (id, bytes.written()));
        let written = written.filter(|(_, bytes)| !bytes.is_empty());
        written.map(|(id, bytes)| (id, tensors(id, &bytes))).collect()
    }

    /// Number of units.
    pub fn unit_count(&self) -> usize {
        self.shared.fixed.units.len()
    }

    /// The plan in force.
    pub fn plan(&self) -> Plan {
        self.shared.lock().plan.clone()
    }

    /// Everything measured so far. Does not block on I/O.
    pub fn stats(&self) -> EngineStats {
        self.shared.stats()
    }

    /// Whether this process was forked from the one that made the engine: its threads and its
    /// memory are not here, and nothing may be asked of it. Dropping it does nothing.
    pub fn is_foreign(&self) -> bool {
        self.shared.is_foreign()
    }
}

impl<D: Device> Drop for Engine<D> {
    fn drop(&mut self) {
        if self.shared.is_foreign() {
            // The threads are the parent's, and whoever holds a lock now is not in this process.
            std::mem::forget((self.populating.take(), self.loader.take()));
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        drop(self.populating.take());
        // The backend first: what it still holds comes back to the loader, whose inbox ends with
        // Stop.
        let backend = self.shared.lock().backend.take();
        drop(backend);
        let _ = self.shared.fixed.events.send(Event::Stop);
        if let Some(loader) = self.loader.take() {
            let _ = loader.join();
        }
        // What workers were still given they finish, into buffers that then go home by being
        // dropped.
        let workers = self.shared.lock().workers.take();
        drop(workers);
        // What remains are tensors, each of which lets go of its memory by itself; of a device's
        // the last of them lets go of all.
        self.shared.fixed.slots.host.retire();
    }
}

impl<D: Device> Shared<D> {
    pub(crate) fn unit(&self, unit: UnitId) -> &Prepared {
        &self.fixed.units[unit.index()]
    }

    pub(crate) fn is_resident(&self, unit: UnitId) -> bool {
        self.lock().units[unit.index()].resident
    }

    pub(crate) fn discard(&self, unit: UnitId) {
        self.lock().discard(&self.fixed, unit);
    }

    /// How many references to a unit's slot are the engine's own and those of leases.
    pub(crate) fn owner_count(&self, unit: UnitId) -> usize {
        let state = self.lock();
        let unit = &state.units[unit.index()];
        unit.users.len() + usize::from(matches!(unit.residence, Residence::Present(_)))
    }

    pub(crate) fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    pub(crate) fn release(&self, unit: UnitId, user: ThreadId, acquired_ns: u64) {
        if self.is_foreign() {
            return;
        }
        let used_ns = (self.clock)().saturating_sub(acquired_ns);
        let event = Event::Released { unit, user, used_ns };
        // Work of a stream may run under this very lock, wherever streams are asked for memory.
        if ts_streams::may_wait().is_err() && self.fixed.events.send(event).is_ok() {
            return;
        }
        let mut state = self.lock();
        state.release(unit, user, used_ns);
        state.advance(&self.fixed, (self.clock)());
        drop(state);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State<D>> {
        // A panic under this lock is a bug that the panicking thread reports; the others go on as
        // they can.
        self.state.lock()
    }

    fn acquire(
        self: &Arc<Self>,
        pass: Option<PassId>,
        units: &[UnitId],
        interrupt: Interrupt<'_>,
    ) -> Result<Vec<Lease<D>>, Error> {
        self.refuse_what_never_fits(units)?;
        let asked_ns = (self.clock)();
        let mut state = self.lock();
        state.note_together(units);
        for &unit in units {
            state.passes.visit(pass, unit);
            state.want(unit);
        }
        let (mut state, result) = self.wait_for_units(state, units, interrupt);
        for &unit in units {
            state.unwant(unit);
        }
        let now_ns = (self.clock)();
        state.advance(&self.fixed, now_ns);
        let (slots, waited) = result?;
        if waited {
            for &unit in units {
                let stats = &mut state.units[unit.index()].stats;
                stats.stalls += 1;
                stats.stall_ns += now_ns - asked_ns;
            }
        }
        drop(state);
        let lease = |(slot, &unit)| Lease::new(slot, Arc::clone(self), unit, now_ns);
        let leases: Vec<_> = slots.into_iter().zip(units).map(lease).collect();
        for lease in &leases {
            lease.check_seal()?;
        }
        Ok(leases)
    }

    /// Several units at a time may be more than there can ever be room for.
    fn refuse_what_never_fits(&self, units: &[UnitId]) -> Result<(), Error> {
        let [_, _, ..] = units else { return Ok(()) };
        let distinct: BTreeSet<UnitId> = units.iter().copied().collect();
        let needed: usize = distinct.iter().map(|&unit| self.unit(unit).slot_bytes).sum();
        if needed <= self.fixed.slots.capacity_bytes() {
            return Ok(());
        }
        let budget_bytes = self.budget.limit_bytes();
        Err(Error::NeverFits(NeverFits {
            budget_bytes,
            largest_unit: self.names(units),
            largest_bytes: needed,
            smallest_budget_bytes: needed + (budget_bytes - self.slot_budget),
        }))
    }

    /// The slots of units once all are present, and whether that took a wait.
    fn wait_for_units<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<D>>,
        units: &[UnitId],
        interrupt: Interrupt<'_>,
    ) -> (MutexGuard<'a, State<D>>, Result<Found<D>, Error>) {
        let (mut waited, mut tries, mut waiting) = (false, 0, Waiting::new());
        loop {
            if let Some(slots) = state.take_slots(units) {
                return (state, Ok((slots, waited)));
            }
            let failures = units.iter().filter_map(|unit| state.units[unit.index()].failure.take());
            if let Some(failure) = failures.last() {
                return (state, Err(failure));
            }
            if state.is_any_absent(units) {
                if let Err(error) = self.start(&mut state, units, &mut tries) {
                    return (state, Err(error));
                }
                // A unit without bytes is there as soon as it has a slot.
                if state.are_all_present(units) {
                    continue;
                }
            }
            waited = true;
            let what = || format!("unit `{}`", self.names(units));
            state = match self.wait(state, &mut waiting, interrupt, what) {
                Ok(state) => state,
                Err(error) => return (self.lock(), Err(error)),
            };
        }
    }

    fn names(&self, units: &[UnitId]) -> String {
        let distinct: BTreeSet<UnitId> = units.iter().copied().collect();
        let names: Vec<&str> =
            distinct.iter().map(|&unit| self.unit(unit).unit.name.as_str()).collect();
        names.join("` + `")
    }

    /// Begins to read the absent ones of units that are wanted now, or notes that this thread waits
    /// for memory.
    fn start(&self, state: &mut State<D>, units: &[UnitId], tries: &mut u32) -> Result<(), Error> {
        let this_thread = std::thread::current().id();
        let absent = state.absent(units);
        let needed_bytes = absent.iter().map(|&unit| self.unit(unit).slot_bytes).sum();
        match state.demand(&self.fixed, units, (self.clock)()) {
            Ok(()) => {
                state.starving.remove(&this_thread);
                Ok(())
            }
            // The last owner may just be letting go on another thread: look again before it is an
            // error.
            Err(Shortage::Stuck { holders }) if *tries >= SHORTAGE_TRIES => Err(Error::Stuck {
                unit: self.names(&absent),
                needed_bytes,
                holders: holders.join(", "),
            }),
            Err(Shortage::Lingering { bytes, holders }) if *tries >= SHORTAGE_TRIES => {
                let (held_bytes, holders) = (bytes, holders.join(", "));
                let unit = self.names(&absent);
                Err(Error::StillReferenced { unit, needed_bytes, held_bytes, holders })
            }
            Err(Shortage::Device(error)) => Err(device_error(&self.names(&absent), error)),
            Err(shortage) => {
                if !matches!(shortage, Shortage::Passing) {
                    *tries += 1;
                }
                state.starving.insert(this_thread);
                Ok(())
            }
        }
    }

    /// Waits for a change, or for the time to ask the caller whether to go on.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<D>>,
        waiting: &mut Waiting,
        interrupt: Interrupt<'_>,
        what: impl Fn() -> String,
    ) -> Result<MutexGuard<'a, State<D>>, Error> {
        self.changed.wait_for(&mut state, INTERRUPT_PERIOD);
        // By the time that has passed: changes may come more often than the period.
        if waiting.asked.elapsed() < INTERRUPT_PERIOD {
            return Ok(state);
        }
        drop(state);
        waiting.asked = Instant::now();
        if interrupt() {
            self.lock().queued.remove(&std::thread::current().id());
            return Err(Error::Interrupted { what: what() });
        }
        Ok(self.lock())
    }

    fn propose_plan(&self, state: &mut State<D>) {
        let demands = state.demands(&self.fixed);
        let order = state.passes.order().to_vec();
        let least = self.fixed.prefetch.least_ring_bytes(self.slot_budget);
        let request = PlanRequest {
            units: &demands,
            order: &order,
            together: &state.together,
            budget_bytes: self.slot_budget,
            max_passes: self.max_passes,
            rates: self.measured_rates(state),
            // What was needed at once is needed again.
            least_ring_bytes: least.max(state.streamed_high_water),
        };
        let Ok(better) = plan(&request) else { return };
        let kept = predict(&request, &state.residency());
        // What is kept is read anew under a new plan; that must pay within a few passes. And the
        // arena has the size of the first plan's peak.
        let fresh_start_s = better.resident_bytes as f64 / request.rates.read_bytes_per_s;
        let pays = kept.as_ref().is_none_or(|kept| {
            let gain_s = kept.predicted_pass_s - better.predicted_pass_s;
            gain_s > REPLAN_GAIN * kept.predicted_pass_s && gain_s * REPLAN_PASSES > fresh_start_s
        });
        state.outgrown = false;
        if pays && better.peak_bytes() <= self.fixed.slots.capacity_bytes() {
            state.pending_plan = Some(better);
        } else if let Some(kept) = kept {
            state.plan = kept;
            state.believed = order;
            state.pending_plan = None;
        }
    }

    /// The bandwidth of storage while it was asked for anything; the assumed one before a useful
    /// sample.
    fn measured_rates(&self, state: &State<D>) -> Rates {
        const SAMPLE_NS: u64 = 20_000_000;
        let (bytes, busy_ns) = (state.read_bytes(), state.counts.busy_ns);
        if bytes == 0 || busy_ns < SAMPLE_NS {
            return self.rates;
        }
        Rates { read_bytes_per_s: bytes as f64 / (busy_ns as f64 / 1e9), ..self.rates }
    }

    fn stats(&self) -> EngineStats {
        let slots = &self.fixed.slots;
        let (in_use, high_water) = slots.in_use_bytes();
        let state = self.lock();
        let mut read_bytes: Vec<_> = ReadPath::ALL.map(|path| (path, 0)).to_vec();
        for &(path, bytes) in &state.counts.read_bytes {
            crate::load::add(&mut read_bytes, path, bytes);
        }
        let bounce_bytes = self.budget.high_water_bytes() - slots.capacity_bytes();
        EngineStats {
            budget_bytes: self.budget.limit_bytes(),
            reserved_high_water_bytes: self.budget.high_water_bytes(),
            in_use_high_water_bytes: high_water + bounce_bytes,
            in_use_bytes: in_use + bounce_bytes,
            staging_bytes: slots.staging_bytes(),
            backend: self.choice.provider.name(),
            passed_over: self.choice.passed_over.clone(),
            watches_writes: slots.are_watched(),
            passes: state.counts.passes,
            read_bytes,
            wasted_loads: state.counts.wasted_loads,
            replans: state.counts.replans,
            plan: state.plan.clone(),
            units: state.units.iter().map(|unit| unit.stats.clone()).collect(),
        }
    }

    fn run(&self, inbox: &Receiver<Event<D>>) {
        while let Ok(event) = inbox.recv() {
            let now_ns = (self.clock)();
            let mut state = self.lock();
            match event {
                Event::Read(completion) => state.on_read(&self.fixed, completion, now_ns),
                Event::Brought { token, bounce, target, damage } => {
                    state.on_brought(&self.fixed, token, bounce, target, damage, now_ns);
                }
                Event::Checked { load, slot, mismatch } => {
                    state.on_checked(&self.fixed, load, slot, mismatch, now_ns);
                }
                Event::Lost(lost) => state.on_lost(&self.fixed, lost, now_ns),
                Event::Uploaded(uploaded) => state.on_uploaded(&self.fixed, uploaded, now_ns),
                Event::Released { unit, user, used_ns } => state.release(unit, user, used_ns),
                Event::Freed => {}
                Event::Stop => return,
            }
            state.advance(&self.fixed, now_ns);
            drop(state);
            self.changed.notify_all();
        }
    }
}

/// When a waiting call last asked its [`Interrupt`].
struct Waiting {
    asked: Instant,
}

impl Waiting {
    fn new() -> Self {
        Self { asked: Instant::now() }
    }
}

/// Units' slots, and whether they had to be waited for.
type Found<D> = (Vec<Arc<Slot<D>>>, bool);

fn spawn_loader<D: Device>(
    shared: Arc<Shared<D>>,
    inbox: Receiver<Event<D>>,
) -> Result<JoinHandle<()>, Error> {
    std::thread::Builder::new()
        .name("ts-loader".into())
        .stack_size(512 << 10)
        .spawn(move || shared.run(&inbox))
        .map_err(|e| Error::System(format!("cannot start the loader thread: {e}")))
}

// Completions and frees are sent from any thread.
const _: fn() = || {
    fn sync<T: Sync>() {}
    sync::<Sender<Event<CpuDevice>>>();
};
