// SPDX-License-Identifier: MIT OR Apache-2.0
//! The host as a device: threads that do the work of streams, the most urgent first.

use std::alloc::Layout;
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use crate::Error;
use crate::device::{
    Device, DeviceInfo, DeviceKind, Event, HostFn, MemoryLocation, RawMemory, Status, Stream,
    StreamId,
};
use crate::memory::{HostBlock, MemoryKind, MemoryRange, Transfer};
use crate::metrics::{Counters, MemoryCounters, MemoryMetrics, StreamMetrics};
use crate::priority::{PriorityRange, StreamPriority};
use crate::queue::{Effects, Fails, Op, Owner, Point, Queues, Released, Work, may_wait};
use crate::race::Clock;
use crate::sync::{Condvar, Mutex, MutexGuard, thread};

/// The host as a device. Its streams share some threads, which always take the most urgent work
/// that could run; work that has begun is not interrupted. All memory is the host's. Dropping the
/// last handle to it, its streams and its memory waits until all work is done, unless work does
/// that.
#[derive(Debug, Clone)]
pub struct CpuDevice {
    crew: Arc<Crew>,
}

/// The threads, which end with the last handle to the device, its streams and its memory, when all
/// work is done.
#[derive(Debug)]
struct Crew {
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    info: DeviceInfo,
    state: Mutex<State>,
    work: Condvar,
    memory: MemoryCounters,
}

#[derive(Debug)]
struct State {
    queues: Queues,
    closed: bool,
}

impl CpuDevice {
    /// With as many threads as there are cores.
    ///
    /// # Errors
    /// [`Error::Thread`].
    pub fn new() -> Result<Self, Error> {
        Self::with_threads(available_parallelism().map_or(1, usize::from))
    }

    /// With so many threads, at least one.
    ///
    /// # Errors
    /// [`Error::Thread`].
    pub fn with_threads(count: usize) -> Result<Self, Error> {
        let info = DeviceInfo {
            kind: DeviceKind::Cpu,
            name: "cpu".into(),
            ordinal: 0,
            total_bytes: None,
            priorities: PriorityRange { least: 0, greatest: -5 },
            host_memory: true,
            runs_by_itself: true,
            can_prefetch: false,
        };
        let shared = Arc::new_cyclic(|this: &Weak<Shared>| Shared {
            info,
            state: Mutex::new(State {
                queues: Queues::new(Weak::clone(this) as Weak<dyn Owner>),
                closed: false,
            }),
            work: Condvar::new(),
            memory: MemoryCounters::default(),
        });
        // Built first and filled after, so that a thread that cannot start still ends the others.
        let mut crew = Crew { shared, threads: Vec::new() };
        for number in 0..count.max(1) {
            let shared = Arc::clone(&crew.shared);
            let thread = thread::Builder::new().name(format!("ts-cpu-{number}"));
            let thread = thread
                .spawn(move || shared.run())
                .map_err(|e| Error::Thread { reason: e.to_string() })?;
            crew.threads.push(thread);
        }
        Ok(Self { crew: Arc::new(crew) })
    }

    /// How much of its memory is allocated.
    pub fn memory(&self) -> MemoryMetrics {
        self.crew.shared.memory.read()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        // The last handle may be part of work: that thread cannot wait for itself, nor the others
        // before it is done. Nor can work of another device that these may wait for.
        if may_wait().is_ok() {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

impl Owner for Shared {
    fn wake(&self, stream: StreamId) -> Effects {
        self.go_on(|queues| queues.proceed(stream))
    }

    fn dropped(&self, stream: StreamId, outcome: Result<(), String>) -> Effects {
        self.go_on(|queues| queues.dropped(stream, outcome))
    }

    fn drive(&self, _: &mut Vec<*const ()>) -> bool {
        false
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A stream goes on, perhaps to its end.
    fn go_on(&self, step: impl FnOnce(&mut Queues) -> Effects) -> Effects {
        let mut state = self.lock();
        let effects = step(&mut state.queues);
        let ends = state.closed && state.queues.streams().is_empty();
        drop(state);
        self.notify(effects.ready, ends);
        effects
    }

    /// Tells threads of work, or that there is none any more.
    fn notify(&self, ready: usize, ends: bool) {
        for _ in 0..ready {
            self.work.notify_one();
        }
        if ends {
            self.work.notify_all();
        }
    }

    /// What each thread does, until there is nothing more to do and the device is gone.
    fn run(&self) {
        let mut state = self.lock();
        loop {
            let next = state.queues.ready().next();
            let Some((ready, _)) = next else {
                // Streams without handles go once their work is done.
                if state.closed && state.queues.streams().is_empty() {
                    self.work.notify_all();
                    return;
                }
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let work = state.queues.take(ready);
            drop(state);
            let outcome = work.run();
            let now_ns = monotonic_ns();
            state = self.lock();
            let effects = state.queues.complete(ready.stream, outcome, now_ns);
            drop(state);
            // This thread looks for itself.
            self.notify(effects.ready.saturating_sub(1), false);
            effects.settle();
            state = self.lock();
        }
    }

    fn submit(&self, stream: StreamId, op: Op) -> Result<(), Error> {
        let now_ns = monotonic_ns();
        let submitted = self.lock().queues.submit(stream, op, now_ns);
        // What is refused is dropped here, without the lock.
        let effects = submitted.map_err(|refused| refused.0)?;
        self.notify(effects.ready, false);
        effects.settle();
        Ok(())
    }

    /// The point behind all that a stream was given.
    fn record(self: &Arc<Self>, stream: StreamId) -> Result<Arc<Point>, Error> {
        let point = self.point();
        self.submit(stream, Op::Record(Arc::clone(&point)))?;
        Ok(point)
    }

    /// The points behind all that any stream was given: of those that are there at one moment.
    fn record_all(self: &Arc<Self>) -> Vec<Arc<Point>> {
        let (now_ns, mut points, mut all) = (monotonic_ns(), Vec::new(), Vec::new());
        let mut state = self.lock();
        for stream in state.queues.streams() {
            let point = self.point();
            // A stream that failed takes points too.
            all.extend(state.queues.submit(stream, Op::Record(Arc::clone(&point)), now_ns));
            points.push(point);
        }
        drop(state);
        all.into_iter().for_each(Effects::settle);
        points
    }

    fn point(self: &Arc<Self>) -> Arc<Point> {
        Arc::new(Point::new(Arc::downgrade(self) as Weak<dyn Owner>, Clock::new()))
    }
}

/// Nanoseconds since this process first asked; never goes back.
pub(crate) fn monotonic_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

impl Device for CpuDevice {
    type Stream = CpuStream;
    type Event = CpuEvent;
    type Memory = CpuMemory;

    fn owns(&self, stream: &CpuStream) -> bool {
        Arc::ptr_eq(&self.crew, &stream.handle.crew)
    }

    fn info(&self) -> &DeviceInfo {
        &self.crew.shared.info
    }

    fn create_stream(&self, priority: StreamPriority) -> Result<CpuStream, Error> {
        let level = self.info().priorities.level(priority);
        let (id, counters) = self.crew.shared.lock().queues.open(level);
        let handle = StreamHandle { id, level, counters, crew: Arc::clone(&self.crew) };
        Ok(CpuStream { handle: Arc::new(handle) })
    }

    fn create_event(&self) -> Result<CpuEvent, Error> {
        Ok(CpuEvent { point: Arc::default() })
    }

    fn allocate(&self, layout: Layout, _: MemoryKind) -> Result<CpuMemory, Error> {
        let crew = Arc::clone(&self.crew);
        let full = || Error::OutOfMemory {
            device: self.info().name.clone(),
            requested_bytes: layout.size(),
        };
        let block = HostBlock::new(layout).ok_or_else(full)?;
        crew.shared.memory.taken(layout.size());
        Ok(CpuMemory { block, crew })
    }

    fn allocate_in_order(&self, layout: Layout, _: &CpuStream) -> Result<CpuMemory, Error> {
        self.allocate(layout, MemoryKind::Device)
    }

    fn free_in_order(&self, memory: CpuMemory, stream: &CpuStream) -> Result<(), Error> {
        stream.submit(Op::Release(Released::new(memory)))
    }

    fn synchronize(&self) -> Result<(), Error> {
        may_wait()?;
        // All of them, also when one fails.
        let points = self.crew.shared.record_all();
        let outcomes: Vec<_> = points.into_iter().map(|point| point.block().map(drop)).collect();
        outcomes.into_iter().collect()
    }
}

/// A stream of a [`CpuDevice`].
#[derive(Debug, Clone)]
pub struct CpuStream {
    handle: Arc<StreamHandle>,
}

#[derive(Debug)]
struct StreamHandle {
    id: StreamId,
    level: i32,
    counters: Arc<Counters>,
    crew: Arc<Crew>,
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        self.crew.shared.lock().queues.close(self.id);
    }
}

impl CpuStream {
    fn wait_for(&self, event: &CpuEvent, fails: Fails) -> Result<(), Error> {
        match event.point() {
            Some(point) => self.submit(Op::Wait(point, fails)),
            None => self.handle.crew.shared.lock().queues.failure(self.handle.id),
        }
    }

    fn submit(&self, op: Op) -> Result<(), Error> {
        self.handle.crew.shared.submit(self.handle.id, op)
    }

    fn transfer(&self, transfer: Transfer) -> Result<(), Error> {
        let bytes = transfer.to().len();
        self.submit(Op::Work(Work::Transfer(transfer)))?;
        self.handle.counters.transfer(bytes);
        Ok(())
    }
}

impl Stream for CpuStream {
    type Event = CpuEvent;

    fn id(&self) -> StreamId {
        self.handle.id
    }

    fn level(&self) -> i32 {
        self.handle.level
    }

    fn record(&self, event: &CpuEvent) -> Result<(), Error> {
        let point = self.handle.crew.shared.record(self.handle.id)?;
        *event.point.lock().unwrap_or_else(PoisonError::into_inner) = Some(point);
        Ok(())
    }

    fn wait(&self, event: &CpuEvent) -> Result<(), Error> {
        self.wait_for(event, Fails::Along)
    }

    fn follow(&self, event: &CpuEvent) -> Result<(), Error> {
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
        self.submit(Op::Work(Work::HostFn(work)))?;
        self.handle.counters.launch();
        Ok(())
    }

    fn prefetch(&self, _: MemoryRange, _: MemoryLocation) -> Result<(), Error> {
        let device = self.handle.crew.shared.info.name.clone();
        Err(Error::Unsupported { device, what: "memory that moves" })
    }

    fn query(&self) -> Result<Status, Error> {
        self.handle.crew.shared.lock().queues.status(self.handle.id)
    }

    fn synchronize(&self) -> Result<(), Error> {
        may_wait()?;
        self.handle.crew.shared.record(self.handle.id)?.block().map(drop)
    }

    fn take_error(&self) -> Option<Error> {
        self.handle.crew.shared.lock().queues.take_error(self.handle.id)
    }

    fn metrics(&self) -> StreamMetrics {
        self.handle.counters.read()
    }
}

/// An event of a [`CpuDevice`].
#[derive(Debug, Clone)]
pub struct CpuEvent {
    point: Arc<Mutex<Option<Arc<Point>>>>,
}

impl CpuEvent {
    fn point(&self) -> Option<Arc<Point>> {
        self.point.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Event for CpuEvent {
    fn query(&self) -> Result<Status, Error> {
        self.point().map_or(Ok(Status::Ready), |point| point.status())
    }

    fn synchronize(&self) -> Result<(), Error> {
        may_wait()?;
        self.point().map_or(Ok(()), |point| point.block().map(drop))
    }

    fn elapsed_since(&self, start: &Self) -> Result<Duration, Error> {
        elapsed(start.point().as_deref(), self.point().as_deref())
    }
}

/// The time between two points.
pub(crate) fn elapsed(start: Option<&Point>, end: Option<&Point>) -> Result<Duration, Error> {
    let at = |point: Option<&Point>| match point.and_then(Point::outcome) {
        Some(outcome) => outcome.clone(),
        None => Err(Error::TimedOut { timeout: Duration::ZERO }),
    };
    Ok(Duration::from_nanos(at(end)?.saturating_sub(at(start)?)))
}

/// Memory of the host, for a [`CpuDevice`].
#[derive(Debug)]
pub struct CpuMemory {
    block: HostBlock,
    crew: Arc<Crew>,
}

impl Drop for CpuMemory {
    fn drop(&mut self) {
        self.crew.shared.memory.given_back(self.block.range().len());
    }
}

// SAFETY: its block is its own, and is freed with it.
unsafe impl RawMemory for CpuMemory {
    fn range(&self) -> MemoryRange {
        self.block.range()
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let from = self.range().slice(offset..offset + bytes.len());
        // SAFETY: the caller's promise; `bytes` is borrowed for as long as it takes.
        unsafe { Transfer::copy(MemoryRange::of(bytes), from) }?.run();
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.range().slice(offset..offset + bytes.len());
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: the caller's promise; `bytes` is borrowed for as long as it takes, and is only
        // read.
        unsafe { Transfer::copy(to, from) }?.run();
        Ok(())
    }
}
