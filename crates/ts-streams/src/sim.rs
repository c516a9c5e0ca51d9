// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device that is simulated: what code for GPUs gets wrong shows here, on any machine, and again
//! with the same seed.

use std::alloc::Layout;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::Error;
use crate::cpu::elapsed;
use crate::device::{
    Device, DeviceInfo, DeviceKind, Event, HostFn, MemoryLocation, RawMemory, Status, Stream,
    StreamId,
};
use crate::memory::{HostBlock, MemoryKind, MemoryRange, Transfer};
use crate::metrics::{Counters, MemoryCounters, MemoryMetrics, StreamMetrics};
use crate::priority::{PriorityRange, StreamPriority};
use crate::queue::{
    Effects, Fails, Op, Owner, Point, Queues, Released, Work, may_wait, next_stream_id,
};
use crate::race::{Clock, Detector, Race};

/// What is written to memory that is new, and to memory that is gone.
const POISON: u8 = 0xA5;

/// How a device is simulated.
#[derive(Debug, Clone, PartialEq)]
pub struct SimOptions {
    /// Decides all that is left to chance.
    pub seed: u64,
    /// Bytes that a copy or fill moves in a microsecond of the device's time.
    pub bytes_per_us: u64,
    /// What every operation takes at least, in nanoseconds of the device's time.
    pub overhead_ns: u64,
    /// The share of operations that take up to a hundred times as long.
    pub stalls: f64,
    /// The share of operations that fail.
    pub faults: f64,
    /// Its memory in bytes; more is refused.
    pub total_bytes: usize,
}

impl Default for SimOptions {
    /// About as a GPU on PCIe 3: 12 GB/s, 5 us an operation, a tenth of which stall; 1 GiB of
    /// memory; nothing fails.
    fn default() -> Self {
        Self {
            seed: 0,
            bytes_per_us: 12_000,
            overhead_ns: 5_000,
            stalls: 0.1,
            faults: 0.0,
            total_bytes: 1 << 30,
        }
    }
}

/// A device without threads. Work runs while the host waits or asks, in an order that is possible
/// on a real device and that the seed decides; every question lets the device's own time pass a
/// little. What nobody waits for may never run. Memory is poisoned when it is new and when it is
/// gone.
///
/// Every access to its memory, by streams or, through [`RawMemory`], by the host, is compared with
/// those before it: two that overlap, one of which writes, must be ordered by streams, events and
/// waits. What is not is refused with a [`Race`] where it is submitted, whether or not it would go
/// well this time, and [`races`](Self::races) tells them all. The host counts as one thread.
#[derive(Debug, Clone)]
pub struct SimDevice {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    info: DeviceInfo,
    options: SimOptions,
    state: Mutex<Sim>,
    memory: MemoryCounters,
}

#[derive(Debug)]
struct Sim {
    queues: Queues,
    detector: Detector,
    /// The device's time.
    now_ns: u64,
    chance: Chance,
    /// Memory that is gone but for work that may still reach it.
    buried: Vec<HostBlock>,
    /// Devices whose work this one's waits for, which must be there to do it.
    others: Vec<Arc<dyn Owner>>,
}

impl SimDevice {
    /// Simulates one so.
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
        let shared = Arc::new_cyclic(|this: &Weak<Shared>| Shared {
            info,
            state: Mutex::new(Sim {
                queues: Queues::new(Weak::clone(this) as Weak<dyn Owner>),
                detector: Detector::new(next_stream_id()),
                now_ns: 0,
                chance: Chance(options.seed),
                buried: Vec::new(),
                others: Vec::new(),
            }),
            options,
            memory: MemoryCounters::default(),
        });
        Self { shared }
    }

    /// All races so far.
    pub fn races(&self) -> Vec<Race> {
        self.shared.lock().detector.races().to_vec()
    }

    /// The device's time.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.shared.lock().now_ns)
    }

    /// How much of its memory is allocated.
    pub fn memory(&self) -> MemoryMetrics {
        self.shared.memory.read()
    }
}

impl Owner for Shared {
    fn wake(&self, stream: StreamId) -> Effects {
        self.lock().queues.proceed(stream)
    }

    fn dropped(&self, stream: StreamId, outcome: Result<(), String>) -> Effects {
        self.lock().queues.dropped(stream, outcome)
    }

    fn drive(&self, asked: &mut Vec<*const ()>) -> bool {
        let this = std::ptr::from_ref(self).cast();
        if asked.contains(&this) {
            return false;
        }
        asked.push(this);
        self.step() || {
            let awaited = self.lock().queues.awaited();
            awaited
                .iter()
                .any(|point| point.owner.upgrade().is_some_and(|owner| owner.drive(asked)))
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Sim> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the work whose turn it is in the device's time; whether there was some.
    fn step(&self) -> bool {
        let mut sim = self.lock();
        // Of those that could begin at the same time the most urgent.
        let Some((ready, began_ns)) = sim.queues.ready().min_by_key(|&(_, at_ns)| at_ns) else {
            return false;
        };
        let work = sim.queues.take(ready);
        let cost_ns = self.cost_ns(&work, &mut sim.chance);
        let fails = sim.chance.happens(self.options.faults);
        drop(sim);
        let outcome = if fails { Err("a fault that was asked for".into()) } else { work.run() };
        let mut sim = self.lock();
        let end_ns = began_ns.saturating_add(cost_ns);
        sim.now_ns = sim.now_ns.max(end_ns);
        let effects = sim.queues.complete(ready.stream, outcome, end_ns);
        drop(sim);
        effects.settle();
        true
    }

    fn cost_ns(&self, work: &Work, chance: &mut Chance) -> u64 {
        let bytes = match work {
            Work::Transfer(transfer) => transfer.to().len() as u64,
            Work::HostFn(_) => 0,
        };
        let options = &self.options;
        let moving_ns = bytes.saturating_mul(1000) / options.bytes_per_us.max(1);
        let usual_ns = options.overhead_ns + moving_ns;
        if chance.happens(options.stalls) {
            usual_ns.saturating_mul(1 + chance.below(100))
        } else {
            usual_ns
        }
    }

    /// Works on, here and where it depends on others, until a point is reached.
    fn drive_to(&self, point: &Point) -> Result<u64, Error> {
        loop {
            if let Some(outcome) = point.outcome() {
                return outcome.clone();
            }
            if !self.drive_towards(Some(point)) {
                // Others than this thread are at it.
                std::thread::yield_now();
            }
        }
    }

    /// Works on a little, on this device or on one that a point or work of this is for.
    fn drive_towards(&self, point: Option<&Point>) -> bool {
        let mut asked = Vec::new();
        let owner = point.and_then(|point| point.owner.upgrade());
        self.drive(&mut asked) || owner.is_some_and(|owner| owner.drive(&mut asked))
    }

    fn record(self: &Arc<Self>, stream: StreamId) -> Result<Arc<Point>, Error> {
        let (point, effects) = self.record_in(&mut self.lock(), stream);
        effects.settle();
        Ok(point)
    }

    fn record_in(self: &Arc<Self>, sim: &mut Sim, stream: StreamId) -> (Arc<Point>, Effects) {
        let owner = Arc::downgrade(self) as Weak<dyn Owner>;
        let point = Arc::new(Point::new(owner, sim.detector.submit(stream)));
        let submitted = sim.queues.submit(stream, Op::Record(Arc::clone(&point)), sim.now_ns);
        // A stream that failed takes points too.
        (point, submitted.unwrap_or_default())
    }

    /// # Errors
    /// [`Error::Race`], and it is not submitted.
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
        submitted.map_err(|refused| refused.0)?.settle();
        Ok(())
    }

    /// The host has seen that a point was reached.
    fn seen(&self, history: &Clock) {
        self.lock().detector.host_joins(history);
    }
}

/// Numbers that look random (Vigna's SplitMix64).
#[derive(Debug)]
struct Chance(u64);

impl Chance {
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

    fn happens(&mut self, share: f64) -> bool {
        ((self.next() >> 11) as f64 / (1u64 << 53) as f64) < share
    }
}

impl Device for SimDevice {
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
        let full = || Error::OutOfMemory { device: self.info().name.clone(), requested_bytes };
        if shared.memory.read().in_use_bytes.saturating_add(requested_bytes)
            > shared.options.total_bytes
        {
            return Err(full());
        }
        let block = HostBlock::new(layout).ok_or_else(full)?;
        shared.memory.taken(requested_bytes);
        block.poison(POISON);
        shared.lock().detector.forget(block.range());
        Ok(SimMemory { block: Some(block), kind, in_order: false, shared: Arc::clone(shared) })
    }

    fn allocate_in_order(&self, layout: Layout, _: &SimStream) -> Result<SimMemory, Error> {
        self.allocate(layout, MemoryKind::Device)
    }

    fn free_in_order(&self, mut memory: SimMemory, stream: &SimStream) -> Result<(), Error> {
        let StreamHandle { id, shared, .. } = &*stream.handle;
        let mut sim = shared.lock();
        let history = sim.detector.submit(*id);
        // To the detector the stream writes to it.
        let ordered = sim.detector.check(Some(*id), &history, &[], &[memory.range()]);
        memory.in_order = ordered.is_ok();
        let now_ns = sim.now_ns;
        let submitted = sim.queues.submit(*id, Op::Release(Released::new(memory)), now_ns);
        drop(sim);
        submitted.map_err(|refused| refused.0)?.settle();
        Ok(ordered?)
    }

    fn synchronize(&self) -> Result<(), Error> {
        may_wait()?;
        let mut sim = self.shared.lock();
        let streams = sim.queues.streams();
        let recorded: Vec<_> =
            streams.into_iter().map(|stream| self.shared.record_in(&mut sim, stream)).collect();
        drop(sim);
        let (points, effects): (Vec<_>, Vec<_>) = recorded.into_iter().unzip();
        effects.into_iter().for_each(Effects::settle);
        let reached: Vec<_> = points.iter().map(|point| self.shared.wait_for(point)).collect();
        reached.into_iter().collect()
    }
}

impl Shared {
    /// Works on until a point is reached, and has the host know it.
    fn wait_for(&self, point: &Point) -> Result<(), Error> {
        may_wait()?;
        let outcome = self.drive_to(point);
        // It is reached, however that ended.
        self.seen(&point.history);
        outcome.map(drop)
    }
}

/// A stream of a [`SimDevice`].
#[derive(Debug, Clone)]
pub struct SimStream {
    handle: Arc<StreamHandle>,
}

#[derive(Debug)]
struct StreamHandle {
    id: StreamId,
    level: i32,
    counters: Arc<Counters>,
    shared: Arc<Shared>,
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        self.shared.lock().queues.close(self.id);
    }
}

impl SimStream {
    fn wait_for(&self, event: &SimEvent, fails: Fails) -> Result<(), Error> {
        let StreamHandle { id, shared, .. } = &*self.handle;
        let Some(point) = event.point() else { return shared.lock().queues.failure(*id) };
        let mut sim = shared.lock();
        sim.queues.failure(*id)?;
        sim.detector.stream_joins(*id, &point.history);
        let this: *const Shared = Arc::as_ptr(shared);
        if let Some(owner) = point.owner.upgrade() {
            let known =
                |other: &Arc<dyn Owner>| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(&owner));
            if !std::ptr::addr_eq(Arc::as_ptr(&owner), this) && !sim.others.iter().any(known) {
                sim.others.push(owner);
            }
        }
        let now_ns = sim.now_ns;
        let submitted = sim.queues.submit(*id, Op::Wait(point, fails), now_ns);
        drop(sim);
        submitted.map_err(|refused| refused.0)?.settle();
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
        self.wait_for(event, Fails::Along)
    }

    fn follow(&self, event: &SimEvent) -> Result<(), Error> {
        self.wait_for(event, Fails::ByItself)
    }

    unsafe fn copy(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
        // SAFETY: the caller's promise is the same.
        self.transfer(unsafe { Transfer::copy(to, from) }?)
    }

    unsafe fn fill(&self, to: MemoryRange, byte: u8) -> Result<(), Error> {
        // SAFETY: the caller's promise is the same.
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
        Err(Error::Unsupported { device, what: "memory that moves" })
    }

    fn query(&self) -> Result<Status, Error> {
        let StreamHandle { id, shared, .. } = &*self.handle;
        shared.drive_towards(None);
        let mut sim = shared.lock();
        let status = sim.queues.status(*id);
        if status != Ok(Status::Pending) {
            // What it was given last, the host knows now to be over.
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
}

/// An event of a [`SimDevice`].
#[derive(Debug, Clone)]
pub struct SimEvent {
    shared: Arc<Shared>,
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
            self.shared.seen(&point.history);
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

/// Memory of a [`SimDevice`].
#[derive(Debug)]
pub struct SimMemory {
    /// Until it is dropped.
    block: Option<HostBlock>,
    kind: MemoryKind,
    /// A stream gives it back, in its order.
    in_order: bool,
    shared: Arc<Shared>,
}

impl SimMemory {
    fn block(&self) -> &HostBlock {
        self.block.as_ref().expect("it is there until it is dropped")
    }

    /// # Errors
    /// [`Error::Race`] with what streams do to the same bytes.
    fn used_by_host(&self, range: MemoryRange, writes: bool) -> Result<(), Error> {
        let mut sim = self.shared.lock();
        let history = sim.detector.host_acts();
        let (read, written) =
            if writes { (&[][..], &[range][..]) } else { (&[range][..], &[][..]) };
        Ok(sim.detector.check(None, &history, read, written)?)
    }
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        let block = self.block.take().expect("dropped once");
        let range = block.range();
        let mut sim = self.shared.lock();
        // Whoever still uses it races with this. There is nobody to tell but those who ask for
        // races.
        let in_use = !self.in_order && {
            let history = sim.detector.host_acts();
            sim.detector.check(None, &history, &[], &[range]).is_err()
        };
        sim.detector.forget(range);
        self.shared.memory.given_back(range.len());
        if in_use {
            // It is kept, so that the mistake stays one of the simulated device.
            sim.buried.push(block);
        } else {
            block.poison(POISON);
        }
    }
}

// SAFETY: as `CpuMemory`; that the simulation would rather not have the host touch it is another
// matter.
unsafe impl RawMemory for SimMemory {
    fn range(&self) -> MemoryRange {
        self.block().range()
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let from = self.range().slice(offset..offset + bytes.len());
        self.used_by_host(from, false)?;
        // SAFETY: the caller's promise; `bytes` is borrowed for as long as it takes.
        unsafe { Transfer::copy(MemoryRange::of(bytes), from) }?.run();
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.range().slice(offset..offset + bytes.len());
        self.used_by_host(to, true)?;
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: the caller's promise; `bytes` is borrowed for as long as it takes, and is only
        // read.
        unsafe { Transfer::copy(to, from) }?.run();
        Ok(())
    }
}
