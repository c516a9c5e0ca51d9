// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state that an engine shares with its leases and its loader thread.

mod acquire;
mod build;
mod gather;
mod passes;
pub(crate) mod poll;

use std::ops::{ControlFlow, Range};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use ts_io::{Choice, ReadPath};
use ts_pool::{Budget, HostPool, Reservation, WriteWatch};
use ts_streams::Device;

use crate::Error;
use crate::config::{Clock, ComputeTimes, Interrupt};
use crate::context::EngineContext;
use crate::event::Event;
use crate::layout::Placement;
use crate::plan::{Plan, Rates};
use crate::populate::Populator;
use crate::prepared::PreparedUnit;
use crate::row_cache::RowCache;
use crate::sizing::Overhead;
use crate::state::{EngineState, UnitState};
use crate::stats::{EngineStats, TableStats, add_bytes};
use crate::table::{Table, TableId};
use crate::trace::{Trace, TraceKind, TraceLog};
use crate::unit::{Access, UnitId};
use crate::unit_load::split_token;

/// How often a blocked call calls its [`Interrupt`].
const INTERRUPT_PERIOD: Duration = Duration::from_millis(20);
/// The most events that the loader thread handles before it lets other threads take the lock.
const EVENTS_AT_ONCE: usize = 64;

/// The shared part of an [`Engine`](crate::Engine).
pub(crate) struct EngineInner<D: Device> {
    context: EngineContext<D>,
    state: Mutex<EngineState<D>>,
    /// Notified after every change that a blocked call may be waiting for.
    changed: Condvar,
    tables: Vec<Table>,
    budget: Budget,
    row_cache: RowCache,
    /// The reservation for the memory of the workers' decoders and of cached rows.
    _reserved: Reservation,
    choice: Choice,
    max_passes: usize,
    slot_budget: usize,
    /// The size of the decoders and of the minimum number of bounce buffers, in bytes. The smallest
    /// budget includes this size. 0 if units live on a device with its own memory.
    least_buffer_bytes: usize,
    overhead: Overhead,
    /// The configured rates and durations of computations.
    rates: Rates,
    compute: ComputeTimes,
    worker_count: usize,
    /// The threads that pre-fault memory, once there are any.
    populator: Mutex<Option<Populator>>,
    /// How many threads pre-fault memory from the first pass on.
    populate_in_passes: usize,
    clock: Clock,
    /// The id of the process that created the engine.
    process: u32,
}

type StateGuard<'a, D> = MutexGuard<'a, EngineState<D>>;

impl<D: Device> EngineInner<D> {
    pub(crate) fn unit_count(&self) -> usize {
        self.context.units.len()
    }

    pub(crate) fn unit(&self, unit: UnitId) -> &PreparedUnit {
        &self.context.units[unit.index()]
    }

    /// Checks that a unit exists.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchUnit`] if the id is out of range.
    pub(crate) fn check_unit(&self, unit: UnitId) -> Result<(), Error> {
        let count = self.unit_count();
        if unit.index() >= count {
            return Err(Error::NoSuchUnit { unit: unit.0, count });
        }
        Ok(())
    }

    /// Checks that a table and its rows exist.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchTable`] or [`Error::NoSuchRow`] if they do not.
    pub(crate) fn check_rows(&self, table: TableId, rows: &[u64]) -> Result<(), Error> {
        let count = self.tables.len();
        let found = self.tables.get(table.index());
        let found = found.ok_or(Error::NoSuchTable { table: table.0, count })?;
        match rows.iter().find(|&&row| row >= found.rows()) {
            Some(&row) => {
                let (table, count) = (found.name().into(), found.rows());
                Err(Error::NoSuchRow { table, row, count })
            }
            None => Ok(()),
        }
    }

    pub(crate) fn host_pool(&self) -> &HostPool {
        &self.context.slots.host
    }

    /// Stops the threads that pre-fault memory, and waits until they have ended.
    pub(crate) fn stop_populating(&self) {
        let populator = self.populator.lock().take();
        drop(populator);
    }

    pub(crate) fn is_resident(&self, unit: UnitId) -> bool {
        self.lock().units[unit].is_kept()
    }

    pub(crate) fn discard(&self, unit: UnitId) {
        self.lock().discard(&self.context, unit);
    }

    /// Returns how many references to a unit's memory the engine and its leases have together.
    pub(crate) fn owner_count(&self, unit: UnitId) -> usize {
        let state = self.lock();
        let unit = &state.units[unit];
        unit.users.len() + usize::from(unit.is_present())
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.process != std::process::id()
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

    /// Expects visits to the routed units among `units`, in this order. Returns the number of the
    /// expectation.
    pub(crate) fn expect(&self, units: &[(UnitId, u32)]) -> u64 {
        let routed: Vec<_> = units.iter().copied().filter(|&(id, _)| self.is_routed(id)).collect();
        self.lock().expect(&self.context, &routed, (self.clock)())
    }

    /// Guesses that the next expectation names the routed units among `units`.
    pub(crate) fn guess(&self, units: &[UnitId]) {
        let routed: Vec<_> = units.iter().copied().filter(|&id| self.is_routed(id)).collect();
        self.lock().guess(&self.context, &routed, (self.clock)());
    }

    pub(crate) fn guesses_pay(&self) -> bool {
        self.lock().routed.guesses.pay()
    }

    fn is_routed(&self, unit: UnitId) -> bool {
        self.unit(unit).unit.access == Access::Routed
    }

    pub(crate) fn routing_scores(&self) -> Vec<(UnitId, f64)> {
        self.lock().routed.scores()
    }

    pub(crate) fn end_expectation(&self, number: u64) {
        if !self.is_forked() {
            self.lock().end_expectation(number);
        }
    }

    pub(crate) fn plan(&self) -> Plan {
        self.lock().planning.plan.clone().with_buffers(self.least_buffer_bytes)
    }

    pub(crate) fn written(&self) -> Vec<(UnitId, Vec<usize>)> {
        // Queries the kernel without the lock, so that other threads do not wait for the scan.
        let watched = self.lock().watched();
        if !WriteWatch::any_written(watched.iter().map(|(_, bytes)| &**bytes)) {
            return Vec::new();
        }
        let tensors = |id: UnitId, written: &[Range<usize>]| {
            let touched = |at: &usize| {
                let Placement { offset, len } = self.unit(id).layout.tensors[*at];
                written.iter().any(|bytes| bytes.start < offset + len && offset < bytes.end)
            };
            (0..self.unit(id).layout.tensors.len()).filter(touched).collect()
        };
        let written = watched.into_iter().map(|(id, bytes)| (id, bytes.written()));
        let written = written.filter(|(_, bytes)| !bytes.is_empty());
        written.map(|(id, bytes)| (id, tensors(id, &bytes))).collect()
    }

    pub(crate) fn compute_stream(&self) -> Option<&D::Stream> {
        self.context.slots.compute_stream()
    }

    pub(crate) fn stats(&self) -> EngineStats {
        let slots = &self.context.slots;
        let (in_use_bytes, in_use_high_water_bytes) = self.occupied_bytes();
        let state = self.lock();
        let mut read_bytes: Vec<_> = ReadPath::ALL.map(|path| (path, 0)).to_vec();
        for &(path, bytes) in &state.counters.read_bytes {
            add_bytes(&mut read_bytes, path, bytes);
        }
        EngineStats {
            budget_bytes: self.budget.limit_bytes(),
            limit_bytes: self.budget.limit_bytes() - self.slot_budget + state.planning.slot_limit,
            reserved_high_water_bytes: self.budget.high_water_bytes(),
            in_use_high_water_bytes,
            in_use_bytes,
            staging_bytes: slots.staging_bytes(),
            backend: self.choice.provider.name(),
            passed_over: self.choice.passed_over.clone(),
            watches_writes: slots.watches_writes(),
            passes: state.counters.passes,
            read_bytes,
            device_decoded_bytes: state.counters.device_decoded.bytes,
            device_decode_bytes_per_s: state.counters.device_decoded.bytes_per_s,
            wasted_loads: state.counters.wasted_loads,
            replans: state.counters.replans,
            plan: self.predicted_plan(&state),
            recent_passes: state.pass_log.passes(),
            recent_ns: state.pass_log.span_ns(),
            workers: self.worker_count,
            encoded_bytes: state.counters.encoded_bytes,
            encode_ns: state.counters.encode_ns,
            in_flight: state
                .transfers
                .backend
                .as_ref()
                .map_or(0, |b| b.capabilities().max_in_flight),
            rates: self.measured_rates(&state),
            compute: state.compute_times(&self.compute, self.measured_rates(&state)),
            streams: slots.stream_stats(),
            routed: state.routed.stats,
            tables: TableStats {
                rows: state.counters.gathered_rows,
                cached_rows: state.counters.cached_rows,
                read_bytes: state.counters.gathered_bytes,
            },
            units: state.units.iter().map(UnitState::snapshot).collect(),
        }
    }

    /// Handles events until [`Event::Stop`]. Runs on the loader thread.
    ///
    /// Not all changes are events. Blocking calls look at the state every [`INTERRUPT_PERIOD`], and
    /// so do futures.
    pub(crate) fn run(&self, inbox: &Receiver<Event<D>>) {
        let mut futures_wait = false;
        loop {
            let received = match futures_wait {
                true => inbox.recv_timeout(INTERRUPT_PERIOD),
                false => inbox.recv().map_err(RecvTimeoutError::from),
            };
            let event = match received {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => {
                    futures_wait = false;
                    self.notify(self.lock());
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let mut state = self.lock();
            let mut changed = false;
            // Handles what has arrived meanwhile too, so that few threads wait for the lock.
            let more = std::iter::from_fn(|| inbox.try_recv().ok()).take(EVENTS_AT_ONCE - 1);
            for event in std::iter::once(event).chain(more) {
                changed |= !matches!(event, Event::Polled);
                let now_ns = (self.clock)();
                if self.handle(&mut state, event, now_ns).is_break() {
                    return;
                }
            }
            futures_wait = !changed;
            if !changed {
                continue;
            }
            let now_ns = (self.clock)();
            state.advance(&self.context, now_ns);
            self.trace_memory(&mut state, now_ns);
            self.notify(state);
        }
    }

    /// Handles an event, unless it is [`Event::Stop`].
    fn handle(&self, state: &mut EngineState<D>, event: Event<D>, now_ns: u64) -> ControlFlow<()> {
        match event {
            Event::Read(completion) => state.on_read(&self.context, completion, now_ns),
            Event::PartFilled { token, target, kept, damage, decoded, work } => {
                let kind = decoded.map_or(TraceKind::Copy, |_| TraceKind::Decode);
                let bytes = decoded.unwrap_or(target.len()) as u64;
                state.on_worked(kind, split_token(token).0, bytes, work, now_ns);
                state.on_part_filled(&self.context, token, (target, kept), damage, now_ns);
            }
            Event::Checked { load, slot, mismatch, work } => {
                state.on_worked(TraceKind::Check, load, slot.len() as u64, work, now_ns);
                state.on_checked(&self.context, load, slot, mismatch, now_ns);
            }
            Event::Estimated { load, slot, needed, raw, work } => {
                state.on_worked(TraceKind::Encode, load, raw, work, now_ns);
                state.on_estimated(&self.context, load, slot, needed, now_ns);
            }
            Event::Encoded { load, raw, work } => {
                state.on_worked(TraceKind::Encode, load, raw, work, now_ns);
                state.on_encoded(&self.context, load, now_ns);
            }
            Event::JobPanicked(job) => state.on_job_panicked(&self.context, job, now_ns),
            Event::Uploaded(upload) => state.on_uploaded(&self.context, upload, now_ns),
            Event::Copied(copy) => state.on_copied(&self.context, copy),
            Event::Released { unit, user, used_ns } => {
                state.release(unit, user, used_ns, now_ns);
            }
            Event::Freed => {}
            Event::Polled => {}
            Event::Stop => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    /// Begins to record a trace, and drops a running one.
    pub(crate) fn begin_trace(&self) {
        let now_ns = (self.clock)();
        let mut state = self.lock();
        state.trace = Some(TraceLog::new(now_ns));
        self.trace_memory(&mut state, now_ns);
    }

    /// Ends the running trace, and returns it.
    pub(crate) fn end_trace(&self) -> Option<Trace> {
        let log = self.lock().trace.take()?;
        let names = self.context.units.iter().map(|unit| unit.unit.name.clone()).collect();
        Some(log.end((self.clock)(), self.budget.limit_bytes(), names))
    }

    fn trace_memory(&self, state: &mut EngineState<D>, now_ns: u64) {
        if let Some(trace) = &mut state.trace {
            trace.memory(self.occupied_bytes().0, now_ns);
        }
    }

    /// Returns the memory that units and buffers occupy, now and at most, in bytes.
    fn occupied_bytes(&self) -> (usize, usize) {
        let slots = &self.context.slots;
        let (in_use, high_water) = slots.in_use_bytes();
        let buffers = self.budget.high_water_bytes() - slots.capacity_bytes();
        (in_use + buffers, high_water + buffers)
    }

    /// Drops the backend, and then stops the loader thread.
    pub(crate) fn stop_reading(&self) {
        // The loader receives the buffers that the backend returns while it is dropped, because
        // [`Event::Stop`] is sent after these buffers.
        let backend = self.lock().transfers.backend.take();
        drop(backend);
        let _ = self.context.events.send(Event::Stop);
    }

    /// Waits for the jobs of the workers, and then makes the pool unmap its memory as soon as the
    /// memory is unused. Call this after the loader thread has ended.
    pub(crate) fn stop_working(&self) {
        // When the jobs are dropped, their buffers return to the pool.
        let workers = self.lock().transfers.workers.take();
        drop(workers);
        // Only leases and tensors still use memory now, and free it when they are dropped. The
        // memory of a device is freed with the last of them.
        self.context.slots.host.retire();
    }

    fn lock(&self) -> StateGuard<'_, D> {
        // parking_lot does not poison: after a panic under this lock, other threads go on.
        self.state.lock()
    }

    /// Waits for a change of the state, but at most [`INTERRUPT_PERIOD`]. Then calls `interrupt` if
    /// the last call was at least that long ago. If `interrupt` returns `true`, returns
    /// [`Error::Interrupted`], in which `what` names the awaited event.
    fn wait<'a>(
        &'a self,
        mut state: StateGuard<'a, D>,
        timer: &mut InterruptTimer,
        interrupt: Interrupt<'_>,
        what: impl Fn() -> String,
    ) -> Result<StateGuard<'a, D>, Error> {
        self.changed.wait_for(&mut state, INTERRUPT_PERIOD);
        // Measures the elapsed time, because changes may come more often than the period.
        if timer.last_asked.elapsed() < INTERRUPT_PERIOD {
            return Ok(state);
        }
        drop(state);
        timer.last_asked = Instant::now();
        if interrupt() {
            self.lock().waiters.for_pass.remove(&std::thread::current().id());
            return Err(Error::Interrupted { what: what() });
        }
        Ok(self.lock())
    }
}

/// The time at which a blocked call last called its [`Interrupt`].
struct InterruptTimer {
    last_asked: Instant,
}

impl InterruptTimer {
    fn new() -> Self {
        Self { last_asked: Instant::now() }
    }
}
