// SPDX-License-Identifier: MIT OR Apache-2.0
//! A simulated GPU that finds synchronization bugs on any machine. A seed makes runs reproducible.

use std::alloc::Layout;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::Error;
use crate::cpu::elapsed;
use crate::device::{
    Device, DeviceInfo, Event, HostFn, MemoryLocation, RawMemory, Registration, Status, Stream,
};
use crate::id::{DeviceKind, StreamId};
use crate::memory::{HostBlock, Transfer};
use crate::metrics::{Counters, MemoryCounters, MemoryMetrics, StreamMetrics};
use crate::priority::{PriorityRange, StreamPriority};
use crate::queue::{Effects, OnFailure, Op, Owner, Point, Queues, Released, Work, check_may_block};
use crate::race::{Clock, Detector, Race};
use crate::range::{MemoryKind, MemoryRange};

/// The byte that fills new and freed memory.
const POISON: u8 = 0xA5;

/// Parameters of a simulation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct SimOptions {
    /// Seed of all random choices.
    pub seed: u64,
    /// Copy and fill throughput, in bytes per microsecond of simulated time.
    pub bytes_per_us: u64,
    /// Minimum duration of a copy, fill or host function, in nanoseconds of simulated time.
    pub overhead_ns: u64,
    /// Fraction, from 0 to 1, of copies, fills and host functions that take up to 100 times as
    /// long.
    pub stall_rate: f64,
    /// Fraction, from 0 to 1, of copies, fills and host functions that fail.
    pub fault_rate: f64,
    /// Capacity for allocations of all kinds, in bytes. An allocation that is larger than the
    /// unused capacity returns [`Error::OutOfMemory`].
    pub total_bytes: usize,
}

impl Default for SimOptions {
    /// Returns options that resemble a GPU on PCIe 3: 12 GB/s and 5 us per operation. A tenth of
    /// the operations stall, none fail, and the device has 1 GiB of memory.
    fn default() -> Self {
        Self {
            seed: 0,
            bytes_per_us: 12_000,
            overhead_ns: 5_000,
            stall_rate: 0.1,
            fault_rate: 0.0,
            total_bytes: 1 << 30,
        }
    }
}

impl SimOptions {
    /// Sets [`seed`](Self::seed): for the same calls, equal seeds give equal schedules.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets [`bytes_per_us`](Self::bytes_per_us), the throughput of copies and fills.
    #[must_use]
    pub fn with_bytes_per_us(mut self, bytes_per_us: u64) -> Self {
        self.bytes_per_us = bytes_per_us;
        self
    }

    /// Sets [`overhead_ns`](Self::overhead_ns), the minimum duration of an operation.
    #[must_use]
    pub fn with_overhead_ns(mut self, overhead_ns: u64) -> Self {
        self.overhead_ns = overhead_ns;
        self
    }

    /// Sets [`stall_rate`](Self::stall_rate), the fraction, from 0 to 1, of slow operations.
    #[must_use]
    pub fn with_stall_rate(mut self, stall_rate: f64) -> Self {
        self.stall_rate = stall_rate;
        self
    }

    /// Sets [`fault_rate`](Self::fault_rate), the fraction, from 0 to 1, of operations that fail.
    #[must_use]
    pub fn with_fault_rate(mut self, fault_rate: f64) -> Self {
        self.fault_rate = fault_rate;
        self
    }

    /// Sets [`total_bytes`](Self::total_bytes), the capacity for allocations in bytes.
    #[must_use]
    pub fn with_total_bytes(mut self, total_bytes: usize) -> Self {
        self.total_bytes = total_bytes;
        self
    }
}

/// A simulated GPU that reports missing synchronization.
///
/// The device has no threads: work runs only while the host waits or queries. Each query runs at
/// most one copy, fill or host function. The order of work is one that a real device could choose,
/// and depends on the seed. New and freed memory is filled with a poison byte.
///
/// # Races
/// The device checks every access to its memory against earlier accesses: by streams, by the host
/// through [`RawMemory`], and by host functions that declare their ranges. Two overlapping accesses
/// race if at least one of them writes and no stream, event or wait orders them. All host threads
/// count as one.
///
/// The call that makes or submits the second access returns [`Error::Race`], and the access does
/// not happen. This is so even if the simulated schedule happens to run the accesses in the right
/// order. [`races`](Self::races) returns all races so far.
///
/// Dropping memory that a stream may still use is also a race. Only [`races`](Self::races) reports
/// this race, because a drop cannot return an error.
///
/// # Examples
/// ```
/// use std::alloc::Layout;
/// use ts_streams::{
///     Device, Error, MemoryKind, RawMemory, SimDevice, SimOptions, Stream, StreamPriority,
/// };
///
/// let device = SimDevice::new(SimOptions::default());
/// let writer = device.create_stream(StreamPriority::Normal)?;
/// let other = device.create_stream(StreamPriority::Normal)?;
/// let layout = Layout::from_size_align(64, 64).expect("64 is a power of two");
/// let memory = device.allocate(layout, MemoryKind::Device)?;
///
/// // SAFETY: the simulation runs work only on this thread, and the memory outlives the work.
/// unsafe {
///     writer.fill(memory.range(), 1)?;
///     // Nothing orders the second fill after the first.
///     assert!(matches!(other.fill(memory.range(), 2), Err(Error::Race(_))));
/// }
/// writer.synchronize()?;
/// assert_eq!(device.races().len(), 1);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SimDevice {
    shared: Arc<SimShared>,
}

#[derive(Debug)]
struct SimShared {
    info: DeviceInfo,
    options: SimOptions,
    state: Mutex<SimState>,
    memory: MemoryCounters,
}

#[derive(Debug)]
struct SimState {
    queues: Queues,
    detector: Detector,
    /// Simulated time since the device was created, in nanoseconds.
    now_ns: u64,
    rng: Rng,
    /// Freed memory that work may still access.
    leaked: Vec<HostBlock>,
    /// Other devices that streams of this device wait for. They are kept alive so that their work
    /// can run.
    awaited_devices: Vec<Arc<dyn Owner>>,
}

impl SimDevice {
    /// Creates a simulated device, whose simulated time starts at zero.
    pub fn new(options: SimOptions) -> Self {
        let info = DeviceInfo {
            kind: DeviceKind::Sim,
            name: format!("sim, seed {}", options.seed),
            ordinal: 0,
            total_bytes: Some(options.total_bytes as u64),
            priorities: PriorityRange { least: 0, greatest: -5 },
            host_memory: false,
            runs_by_itself: false,
            can_prefetch: false,
        };
        let shared = Arc::new_cyclic(|this: &Weak<SimShared>| SimShared {
            info,
            state: Mutex::new(SimState {
                queues: Queues::new(Weak::clone(this) as Weak<dyn Owner>),
                detector: Detector::new(StreamId::unique()),
                now_ns: 0,
                rng: Rng(options.seed),
                leaked: Vec::new(),
                awaited_devices: Vec::new(),
            }),
            options,
            memory: MemoryCounters::default(),
        });
        Self { shared }
    }

    /// Returns all races found so far.
    pub fn races(&self) -> Vec<Race> {
        self.shared.lock().detector.races().to_vec()
    }

    /// Returns the simulated time since the device was created.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.shared.lock().now_ns)
    }

    /// Returns the current and peak number of bytes allocated on the device.
    pub fn memory(&self) -> MemoryMetrics {
        self.shared.memory.read()
    }
}

impl Owner for SimShared {
    fn wake(&self, stream: StreamId) -> Effects {
        self.lock().queues.proceed(stream)
    }

    fn dropped(&self, stream: StreamId, outcome: Result<(), String>) -> Effects {
        self.lock().queues.dropped(stream, outcome)
    }

    fn drive(&self, visited: &mut Vec<*const ()>) -> bool {
        let this = std::ptr::from_ref(self).cast();
        if visited.contains(&this) {
            return false;
        }
        visited.push(this);
        self.step() || {
            let awaited = self.lock().queues.awaited();
            awaited
                .iter()
                .any(|point| point.owner.upgrade().is_some_and(|owner| owner.drive(visited)))
        }
    }
}

impl SimShared {
    fn lock(&self) -> MutexGuard<'_, SimState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the ready operation that starts first in simulated time. Returns whether there was one.
    fn step(&self) -> bool {
        let mut sim = self.lock();
        // `ready` yields the most urgent stream first, so this stream wins ties.
        let Some((ready, began_ns)) = sim.queues.ready().min_by_key(|&(_, at_ns)| at_ns) else {
            return false;
        };
        let work = sim.queues.take(ready);
        let cost_ns = self.cost_ns(&work, &mut sim.rng);
        let fails = sim.rng.happens(self.options.fault_rate);
        drop(sim);
        let outcome = if fails { Err("injected fault".into()) } else { work.run() };
        let mut sim = self.lock();
        let end_ns = began_ns.saturating_add(cost_ns);
        sim.now_ns = sim.now_ns.max(end_ns);
        let effects = sim.queues.complete(ready.stream, outcome, (began_ns, end_ns));
        drop(sim);
        effects.apply();
        true
    }

    fn cost_ns(&self, work: &Work, rng: &mut Rng) -> u64 {
        let bytes = match work {
            Work::Transfer(transfer) => transfer.to().len() as u64,
            Work::HostFn(_) => 0,
        };
        let options = &self.options;
        let moving_ns = bytes.saturating_mul(1000) / options.bytes_per_us.max(1);
        let usual_ns = options.overhead_ns + moving_ns;
        if rng.happens(options.stall_rate) {
            usual_ns.saturating_mul(1 + rng.below(100))
        } else {
            usual_ns
        }
    }

    /// Runs work of this device, and of devices that it waits for, until `point` is reached.
    /// Returns the outcome of the point.
    fn drive_to(&self, point: &Point) -> Result<u64, Error> {
        loop {
            if let Some(outcome) = point.outcome() {
                return outcome.clone();
            }
            if !self.drive_towards(Some(point)) {
                // Another thread is running the work.
                std::thread::yield_now();
            }
        }
    }

    /// Runs one operation of this device or of a device that it waits for. If there is none, tries
    /// the owner of `point`. Returns whether an operation ran.
    fn drive_towards(&self, point: Option<&Point>) -> bool {
        let mut visited = Vec::new();
        let owner = point.and_then(|point| point.owner.upgrade());
        self.drive(&mut visited) || owner.is_some_and(|owner| owner.drive(&mut visited))
    }

    fn record(self: &Arc<Self>, stream: StreamId) -> Result<Arc<Point>, Error> {
        let (point, effects) = self.record_in(&mut self.lock(), stream);
        effects.apply();
        Ok(point)
    }

    fn record_in(self: &Arc<Self>, sim: &mut SimState, stream: StreamId) -> (Arc<Point>, Effects) {
        let owner = Arc::downgrade(self) as Weak<dyn Owner>;
        let point = Arc::new(Point::new(owner, sim.detector.submit(stream)));
        let submitted = sim.queues.submit(stream, Op::Record(Arc::clone(&point)), sim.now_ns);
        // `submit` always succeeds here, because a stream that has failed still accepts records.
        (point, submitted.unwrap_or_default())
    }

    /// Submits work that accesses the given memory.
    ///
    /// # Errors
    /// Returns the error of the stream if it has failed, or [`Error::Race`] if an access is not
    /// ordered. In both cases nothing is submitted.
    fn submit_work(
        &self,
        stream: StreamId,
        work: Work,
        reads: &[MemoryRange],
        writes: &[MemoryRange],
    ) -> Result<(), Error> {
        let mut sim = self.lock();
        sim.queues.failure(stream)?;
        let history = sim.detector.submit(stream);
        sim.detector.check(Some(stream), &history, reads, writes)?;
        let now_ns = sim.now_ns;
        let submitted = sim.queues.submit(stream, Op::Work(work), now_ns);
        drop(sim);
        submitted.map_err(|refused| refused.0)?.apply();
        Ok(())
    }

    /// Orders later accesses by the host after a reached point with the clock `history`.
    fn host_saw(&self, history: &Clock) {
        self.lock().detector.host_joins(history);
    }
}

/// A pseudo-random number generator (Vigna's SplitMix64).
#[derive(Debug)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    fn happens(&mut self, probability: f64) -> bool {
        ((self.next() >> 11) as f64 / (1u64 << 53) as f64) < probability
    }
}

// SAFETY: as for `CpuDevice`: `HostBlock` allocates by the layout, and `Queues` keeps the order.
// Memory that is dropped while work may still use it is leaked. Streams are compared by their
// simulation, which clones share.
unsafe impl Device for SimDevice {
    type Stream = SimStream;
    type Event = SimEvent;
    type Memory = SimMemory;

    fn owns(&self, stream: &SimStream) -> bool {
        Arc::ptr_eq(&self.shared, &stream.handle.shared)
    }

    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn create_stream(&self, priority: StreamPriority) -> Result<SimStream, Error> {
        let level = self.info().priorities.level(priority);
        let (id, counters) = self.shared.lock().queues.open(level);
        let handle = StreamHandle { id, level, counters, shared: Arc::clone(&self.shared) };
        Ok(SimStream { handle: Arc::new(handle) })
    }

    fn create_event(&self) -> Result<SimEvent, Error> {
        Ok(SimEvent { shared: Arc::clone(&self.shared), point: Arc::default() })
    }

    fn allocate(&self, layout: Layout, kind: MemoryKind) -> Result<SimMemory, Error> {
        let (shared, requested_bytes) = (&self.shared, layout.size());
        let out_of_memory =
            || Error::OutOfMemory { device: self.info().name.clone(), requested_bytes };
        if shared.memory.read().in_use_bytes.saturating_add(requested_bytes)
            > shared.options.total_bytes
        {
            return Err(out_of_memory());
        }
        let block = HostBlock::new(layout).ok_or_else(out_of_memory)?;
        shared.memory.allocated(requested_bytes);
        block.poison(POISON);
        shared.lock().detector.forget(block.range());
        Ok(SimMemory {
            block: Some(block),
            kind,
            freed_in_order: false,
            shared: Arc::clone(shared),
        })
    }

    unsafe fn register(&self, _: MemoryRange) -> Result<Registration, Error> {
        Ok(Registration::new(|| ()))
    }

    fn allocate_async(&self, layout: Layout, _: &SimStream) -> Result<SimMemory, Error> {
        self.allocate(layout, MemoryKind::Device)
    }

    fn free_async(&self, mut memory: SimMemory, stream: &SimStream) -> Result<(), Error> {
        let StreamHandle { id, shared, .. } = &*stream.handle;
        let mut sim = shared.lock();
        let history = sim.detector.submit(*id);
        // A free is checked like a write by the stream.
        let ordered = sim.detector.check(Some(*id), &history, &[], &[memory.range()]);
        memory.freed_in_order = ordered.is_ok();
        let now_ns = sim.now_ns;
        let submitted = sim.queues.submit(*id, Op::Release(Released::new(memory)), now_ns);
        drop(sim);
        submitted.map_err(|refused| refused.0)?.apply();
        Ok(ordered?)
    }

    fn synchronize(&self) -> Result<(), Error> {
        check_may_block()?;
        let mut sim = self.shared.lock();
        let streams = sim.queues.streams();
        let recorded: Vec<_> =
            streams.into_iter().map(|stream| self.shared.record_in(&mut sim, stream)).collect();
        drop(sim);
        let (points, effects): (Vec<_>, Vec<_>) = recorded.into_iter().unzip();
        effects.into_iter().for_each(Effects::apply);
        let reached: Vec<_> = points.iter().map(|point| self.shared.wait_for(point)).collect();
        reached.into_iter().collect()
    }
}

impl SimShared {
    /// Runs work until `point` is reached, and orders later accesses by the host after the point.
    fn wait_for(&self, point: &Point) -> Result<(), Error> {
        check_may_block()?;
        let outcome = self.drive_to(point);
        // The point is reached even if the work before it failed.
        self.host_saw(&point.history);
        outcome.map(drop)
    }
}

/// A [`Stream`] of a [`SimDevice`]. Its work runs on the thread that waits or queries.
#[derive(Debug, Clone)]
pub struct SimStream {
    handle: Arc<StreamHandle>,
}

#[derive(Debug)]
struct StreamHandle {
    id: StreamId,
    level: i32,
    counters: Arc<Counters>,
    shared: Arc<SimShared>,
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        self.shared.lock().queues.close(self.id);
    }
}

impl SimStream {
    fn wait_for(&self, event: &SimEvent, on_failure: OnFailure) -> Result<(), Error> {
        let StreamHandle { id, shared, .. } = &*self.handle;
        let Some(point) = event.point() else { return shared.lock().queues.failure(*id) };
        let mut sim = shared.lock();
        sim.queues.failure(*id)?;
        sim.detector.stream_joins(*id, &point.history);
        let this: *const SimShared = Arc::as_ptr(shared);
        if let Some(owner) = point.owner.upgrade() {
            let known =
                |other: &Arc<dyn Owner>| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(&owner));
            if !std::ptr::addr_eq(Arc::as_ptr(&owner), this)
                && !sim.awaited_devices.iter().any(known)
            {
                sim.awaited_devices.push(owner);
            }
        }
        let now_ns = sim.now_ns;
        let submitted = sim.queues.submit(*id, Op::Wait(point, on_failure), now_ns);
        drop(sim);
        submitted.map_err(|refused| refused.0)?.apply();
        Ok(())
    }

    fn transfer(&self, transfer: Transfer) -> Result<(), Error> {
        let StreamHandle { id, counters, shared, .. } = &*self.handle;
        let (to, from) = (transfer.to(), transfer.from());
        shared.submit_work(*id, Work::Transfer(transfer), from.as_slice(), &[to])?;
        counters.transfer(to.len());
        Ok(())
    }
}

impl Stream for SimStream {
    type Event = SimEvent;

    fn id(&self) -> StreamId {
        self.handle.id
    }

    fn level(&self) -> i32 {
        self.handle.level
    }

    fn record(&self, event: &SimEvent) -> Result<(), Error> {
        let point = self.handle.shared.record(self.handle.id)?;
        *event.point.lock().unwrap_or_else(PoisonError::into_inner) = Some(point);
        Ok(())
    }

    fn wait(&self, event: &SimEvent) -> Result<(), Error> {
        self.wait_for(event, OnFailure::Propagate)
    }

    fn wait_ignoring_failure(&self, event: &SimEvent) -> Result<(), Error> {
        self.wait_for(event, OnFailure::Ignore)
    }

    unsafe fn copy(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
        // SAFETY: the caller meets the requirements of `Stream::copy`. The memory of this device is
        // host memory, so the host can access both ranges.
        self.transfer(unsafe { Transfer::copy(to, from) }?)
    }

    unsafe fn fill(&self, to: MemoryRange, byte: u8) -> Result<(), Error> {
        // SAFETY: the caller meets the requirements of `Stream::fill`. The memory of this device is
        // host memory, so the host can access `to`.
        self.transfer(unsafe { Transfer::fill(to, byte) })
    }

    fn launch_host_fn(&self, work: HostFn) -> Result<(), Error> {
        let StreamHandle { id, counters, shared, .. } = &*self.handle;
        let (reads, writes) = (work.reads.clone(), work.writes.clone());
        shared.submit_work(*id, Work::HostFn(work), &reads, &writes)?;
        counters.launch();
        Ok(())
    }

    fn prefetch(&self, _: MemoryRange, _: MemoryLocation) -> Result<(), Error> {
        let device = self.handle.shared.info.name.clone();
        Err(Error::Unsupported { device, what: "prefetching managed memory" })
    }

    fn query(&self) -> Result<Status, Error> {
        let StreamHandle { id, shared, .. } = &*self.handle;
        shared.drive_towards(None);
        let mut sim = shared.lock();
        let status = sim.queues.status(*id);
        if status != Ok(Status::Pending) {
            // The host has seen that all work ended, so later accesses by the host are ordered
            // after that work.
            let history = sim.detector.submit(*id);
            sim.detector.host_joins(&history);
        }
        status
    }

    fn synchronize(&self) -> Result<(), Error> {
        let point = self.handle.shared.record(self.handle.id)?;
        self.handle.shared.wait_for(&point)
    }

    fn take_error(&self) -> Option<Error> {
        self.handle.shared.lock().queues.take_error(self.handle.id)
    }

    fn metrics(&self) -> StreamMetrics {
        self.handle.counters.read()
    }

    fn outstanding(&self) -> u64 {
        self.handle.counters.outstanding()
    }
}

/// An [`Event`] of a [`SimDevice`]. Its times are simulated.
#[derive(Debug, Clone)]
pub struct SimEvent {
    shared: Arc<SimShared>,
    point: Arc<Mutex<Option<Arc<Point>>>>,
}

impl SimEvent {
    fn point(&self) -> Option<Arc<Point>> {
        self.point.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Event for SimEvent {
    fn query(&self) -> Result<Status, Error> {
        let Some(point) = self.point() else { return Ok(Status::Ready) };
        if point.outcome().is_none() {
            self.shared.drive_towards(Some(&point));
        }
        if point.outcome().is_some() {
            self.shared.host_saw(&point.history);
        }
        point.status()
    }

    fn synchronize(&self) -> Result<(), Error> {
        self.point().map_or(Ok(()), |point| self.shared.wait_for(&point))
    }

    fn elapsed_since(&self, start: &Self) -> Result<Duration, Error> {
        elapsed(start.point().as_deref(), self.point().as_deref())
    }
}

/// Memory of a [`SimDevice`], which is host memory whose accesses are checked for races.
#[derive(Debug)]
pub struct SimMemory {
    /// The allocation. `None` only while this value is dropped.
    block: Option<HostBlock>,
    kind: MemoryKind,
    /// Whether `free_async` found that the free is ordered after all accesses.
    freed_in_order: bool,
    shared: Arc<SimShared>,
}

impl SimMemory {
    fn block(&self) -> &HostBlock {
        self.block.as_ref().expect("the block exists until the memory is dropped")
    }

    /// Checks an access by the host for races, and records it.
    ///
    /// # Errors
    /// Returns [`Error::Race`] if the access is not ordered after a conflicting access by a stream.
    fn check_host_access(&self, range: MemoryRange, writes: bool) -> Result<(), Error> {
        let mut sim = self.shared.lock();
        let history = sim.detector.host_acts();
        let (read, written) =
            if writes { (&[][..], &[range][..]) } else { (&[range][..], &[][..]) };
        Ok(sim.detector.check(None, &history, read, written)?)
    }
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        let block = self.block.take().expect("the block exists until the memory is dropped");
        let range = block.range();
        let mut sim = self.shared.lock();
        // Work that still uses the memory races with this drop. `drop` cannot return an error, so
        // only `races` reports the race.
        let in_use = !self.freed_in_order && {
            let history = sim.detector.host_acts();
            sim.detector.check(None, &history, &[], &[range]).is_err()
        };
        sim.detector.forget(range);
        self.shared.memory.freed(range.len());
        if in_use {
            // The memory is kept, so that the simulated bug is not a real use after free.
            sim.leaked.push(block);
        } else {
            block.poison(POISON);
        }
    }
}

// SAFETY: this value alone owns its block of host memory, which neither moves nor is freed before
// the value is dropped.
unsafe impl RawMemory for SimMemory {
    fn range(&self) -> MemoryRange {
        self.block().range()
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let from = self.range().slice(offset..offset + bytes.len());
        self.check_host_access(from, false)?;
        // SAFETY: `slice` checked that `from` lies in the block. The caller guarantees that no
        // stream writes to it during the call. `bytes` is exclusively borrowed.
        unsafe { Transfer::copy(MemoryRange::of(bytes), from) }?.run();
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.range().slice(offset..offset + bytes.len());
        self.check_host_access(to, true)?;
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: `slice` checked that `to` lies in the block. The caller guarantees that no stream
        // accesses it during the call. The copy only reads `bytes`, which is borrowed.
        unsafe { Transfer::copy(to, from) }?.run();
        Ok(())
    }
}
