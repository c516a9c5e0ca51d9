// SPDX-License-Identifier: MIT OR Apache-2.0
//! The host as a device: threads that run the work of streams, most urgent first.

use std::alloc::Layout;
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use crate::Error;
use crate::device::{Device, DeviceInfo, Event, HostFn, MemoryLocation, RawMemory, Status, Stream};
use crate::id::{DeviceKind, StreamId};
use crate::memory::{HostBlock, Transfer};
use crate::metrics::{Counters, MemoryCounters, MemoryMetrics, StreamMetrics};
use crate::priority::{PriorityRange, StreamPriority};
use crate::queue::{Effects, OnFailure, Op, Owner, Point, Queues, Released, Work, check_may_block};
use crate::race::Clock;
use crate::range::{MemoryKind, MemoryRange};
use crate::sync::{Condvar, Mutex, MutexGuard, thread};

/// The host as a device.
///
/// Its streams share a set of threads, which always take the most urgent work that can run. Work
/// that has begun is not interrupted. All memory is ordinary host memory.
///
/// The device exists until the last handle to the device, its streams and its memory is dropped.
/// That drop blocks until all work is done, except inside a host function or a destructor that a
/// stream runs.
///
/// # Examples
/// ```
/// use ts_streams::{CpuDevice, Device, HostFn, Stream, StreamPriority};
///
/// let device = CpuDevice::with_threads(2)?;
/// let loader = device.create_stream(StreamPriority::Normal)?;
/// let worker = device.create_stream(StreamPriority::High)?;
/// let loaded = device.create_event()?;
///
/// loader.launch_host_fn(HostFn::new(|| println!("load")))?;
/// loader.record(&loaded)?;
/// worker.wait(&loaded)?; // does not block this thread
/// worker.launch_host_fn(HostFn::new(|| println!("compute")))?;
/// worker.synchronize()?;
/// # Ok::<(), ts_streams::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct CpuDevice {
    workers: Arc<Workers>,
}

/// The worker threads. They end when all handles to the device, its streams and its memory are
/// dropped and all work is done.
#[derive(Debug)]
struct Workers {
    shared: Arc<CpuShared>,
    threads: Vec<thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct CpuShared {
    info: DeviceInfo,
    state: Mutex<CpuState>,
    work: Condvar,
    memory: MemoryCounters,
}

#[derive(Debug)]
struct CpuState {
    queues: Queues,
    closed: bool,
}

impl CpuDevice {
    /// Creates a device with one thread per available core.
    ///
    /// # Errors
    /// Returns [`Error::Thread`] if the system cannot start a thread.
    pub fn new() -> Result<Self, Error> {
        Self::with_threads(available_parallelism().map_or(1, usize::from))
    }

    /// Creates a device with `count` threads, or with one thread if `count` is 0.
    ///
    /// # Errors
    /// Returns [`Error::Thread`] if the system cannot start a thread.
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
        let shared = Arc::new_cyclic(|this: &Weak<CpuShared>| CpuShared {
            info,
            state: Mutex::new(CpuState {
                queues: Queues::new(Weak::clone(this) as Weak<dyn Owner>),
                closed: false,
            }),
            work: Condvar::new(),
            memory: MemoryCounters::default(),
        });
        // `workers` exists before its threads start. If a thread cannot start, dropping `workers`
        // ends the other threads.
        let mut workers = Workers { shared, threads: Vec::new() };
        for number in 0..count.max(1) {
            let shared = Arc::clone(&workers.shared);
            let thread = thread::Builder::new().name(format!("ts-cpu-{number}"));
            let thread = thread
                .spawn(move || shared.run())
                .map_err(|e| Error::Thread { reason: e.to_string() })?;
            workers.threads.push(thread);
        }
        Ok(Self { workers: Arc::new(workers) })
    }

    /// Returns the current and peak number of bytes allocated on the device.
    pub fn memory(&self) -> MemoryMetrics {
        self.workers.shared.memory.read()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        // If work on one of these threads drops the last handle, the thread cannot join itself. It
        // cannot join the other threads either, because they may wait for its work. If work of
        // another device drops the last handle, that work must not block, because these threads may
        // wait for the other device.
        if check_may_block().is_ok() {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

impl Owner for CpuShared {
    fn wake(&self, stream: StreamId) -> Effects {
        self.advance(|queues| queues.proceed(stream))
    }

    fn dropped(&self, stream: StreamId, outcome: Result<(), String>) -> Effects {
        self.advance(|queues| queues.dropped(stream, outcome))
    }

    fn drive(&self, _: &mut Vec<*const ()>) -> bool {
        false
    }
}

impl CpuShared {
    fn lock(&self) -> MutexGuard<'_, CpuState> {
        // No code of callers runs under this lock, so a panic in such code cannot leave the state
        // inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Advances a stream with `step`. Wakes threads if there is work or the device has finished.
    fn advance(&self, step: impl FnOnce(&mut Queues) -> Effects) -> Effects {
        let mut state = self.lock();
        let effects = step(&mut state.queues);
        let finished = state.closed && state.queues.streams().is_empty();
        drop(state);
        self.notify(effects.ready, finished);
        effects
    }

    /// Wakes one thread for each ready stream, and all threads if the device has finished.
    fn notify(&self, ready: usize, finished: bool) {
        for _ in 0..ready {
            self.work.notify_one();
        }
        if finished {
            self.work.notify_all();
        }
    }

    /// Runs work on this thread until the device is closed and no work is left.
    fn run(&self) {
        let mut state = self.lock();
        loop {
            let next = state.queues.ready().next();
            let Some((ready, _)) = next else {
                // A closed device has finished when it has no streams, because a stream without
                // handles is removed once its work is done.
                if state.closed && state.queues.streams().is_empty() {
                    self.work.notify_all();
                    return;
                }
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let work = state.queues.take(ready);
            drop(state);
            let began_ns = monotonic_ns();
            let outcome = work.run();
            let times_ns = (began_ns, monotonic_ns());
            state = self.lock();
            let effects = state.queues.complete(ready.stream, outcome, times_ns);
            drop(state);
            // This thread takes one ready stream itself.
            self.notify(effects.ready.saturating_sub(1), false);
            effects.apply();
            state = self.lock();
        }
    }

    fn submit(&self, stream: StreamId, op: Op) -> Result<(), Error> {
        let now_ns = monotonic_ns();
        let submitted = self.lock().queues.submit(stream, op, now_ns);
        // A refused operation is dropped here, after the lock is released: its destructor may take
        // the lock.
        let effects = submitted.map_err(|refused| refused.0)?;
        self.notify(effects.ready, false);
        effects.apply();
        Ok(())
    }

    /// Records a point after all work submitted to a stream.
    fn record(self: &Arc<Self>, stream: StreamId) -> Result<Arc<Point>, Error> {
        let point = self.point();
        self.submit(stream, Op::Record(Arc::clone(&point)))?;
        Ok(point)
    }

    /// Records a point on every stream that exists now.
    fn record_all(self: &Arc<Self>) -> Vec<Arc<Point>> {
        let (now_ns, mut points, mut all) = (monotonic_ns(), Vec::new(), Vec::new());
        let mut state = self.lock();
        for stream in state.queues.streams() {
            let point = self.point();
            // `submit` always succeeds here, because a stream that has failed still accepts
            // records.
            all.extend(state.queues.submit(stream, Op::Record(Arc::clone(&point)), now_ns));
            points.push(point);
        }
        drop(state);
        all.into_iter().for_each(Effects::apply);
        points
    }

    fn point(self: &Arc<Self>) -> Arc<Point> {
        Arc::new(Point::new(Arc::downgrade(self) as Weak<dyn Owner>, Clock::new()))
    }
}

/// Returns the nanoseconds since the first call in this process, by a monotonic clock.
pub(crate) fn monotonic_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

// SAFETY: `HostBlock` allocates by the layout, and `Queues` keeps the order: it starts an operation
// when the one before it has ended and its points are reached. After that it reaches a point,
// becomes idle and drops released memory. Memory and streams keep the threads alive. Streams are
// compared by their threads, which clones share.
unsafe impl Device for CpuDevice {
    type Stream = CpuStream;
    type Event = CpuEvent;
    type Memory = CpuMemory;

    fn owns(&self, stream: &CpuStream) -> bool {
        Arc::ptr_eq(&self.workers, &stream.handle.workers)
    }

    fn info(&self) -> &DeviceInfo {
        &self.workers.shared.info
    }

    fn create_stream(&self, priority: StreamPriority) -> Result<CpuStream, Error> {
        let level = self.info().priorities.level(priority);
        let (id, counters) = self.workers.shared.lock().queues.open(level);
        let handle = StreamHandle { id, level, counters, workers: Arc::clone(&self.workers) };
        Ok(CpuStream { handle: Arc::new(handle) })
    }

    fn create_event(&self) -> Result<CpuEvent, Error> {
        Ok(CpuEvent { point: Arc::default() })
    }

    fn allocate(&self, layout: Layout, _: MemoryKind) -> Result<CpuMemory, Error> {
        let workers = Arc::clone(&self.workers);
        let out_of_memory = || Error::OutOfMemory {
            device: self.info().name.clone(),
            requested_bytes: layout.size(),
        };
        let block = HostBlock::new(layout).ok_or_else(out_of_memory)?;
        workers.shared.memory.allocated(layout.size());
        Ok(CpuMemory { block, workers })
    }

    fn allocate_async(&self, layout: Layout, _: &CpuStream) -> Result<CpuMemory, Error> {
        self.allocate(layout, MemoryKind::Device)
    }

    fn free_async(&self, memory: CpuMemory, stream: &CpuStream) -> Result<(), Error> {
        stream.submit(Op::Release(Released::new(memory)))
    }

    fn synchronize(&self) -> Result<(), Error> {
        check_may_block()?;
        // Collect the outcomes first, so that a failed stream does not end the wait for the others.
        let points = self.workers.shared.record_all();
        let outcomes: Vec<_> = points.into_iter().map(|point| point.block().map(drop)).collect();
        outcomes.into_iter().collect()
    }
}

/// A [`Stream`] of a [`CpuDevice`]. The threads of the device run its work.
#[derive(Debug, Clone)]
pub struct CpuStream {
    handle: Arc<StreamHandle>,
}

#[derive(Debug)]
struct StreamHandle {
    id: StreamId,
    level: i32,
    counters: Arc<Counters>,
    workers: Arc<Workers>,
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        self.workers.shared.lock().queues.close(self.id);
    }
}

impl CpuStream {
    fn wait_for(&self, event: &CpuEvent, on_failure: OnFailure) -> Result<(), Error> {
        match event.point() {
            Some(point) => self.submit(Op::Wait(point, on_failure)),
            None => self.handle.workers.shared.lock().queues.failure(self.handle.id),
        }
    }

    fn submit(&self, op: Op) -> Result<(), Error> {
        self.handle.workers.shared.submit(self.handle.id, op)
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
        let point = self.handle.workers.shared.record(self.handle.id)?;
        *event.point.lock().unwrap_or_else(PoisonError::into_inner) = Some(point);
        Ok(())
    }

    fn wait(&self, event: &CpuEvent) -> Result<(), Error> {
        self.wait_for(event, OnFailure::Propagate)
    }

    fn wait_ignoring_failure(&self, event: &CpuEvent) -> Result<(), Error> {
        self.wait_for(event, OnFailure::Ignore)
    }

    unsafe fn copy(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
        // SAFETY: the caller meets the requirements of `Stream::copy`. They include that the device
        // can access both ranges, and this device is the host.
        self.transfer(unsafe { Transfer::copy(to, from) }?)
    }

    unsafe fn fill(&self, to: MemoryRange, byte: u8) -> Result<(), Error> {
        // SAFETY: the caller meets the requirements of `Stream::fill`. They include that the device
        // can access `to`, and this device is the host.
        self.transfer(unsafe { Transfer::fill(to, byte) })
    }

    fn launch_host_fn(&self, work: HostFn) -> Result<(), Error> {
        self.submit(Op::Work(Work::HostFn(work)))?;
        self.handle.counters.launch();
        Ok(())
    }

    fn prefetch(&self, _: MemoryRange, _: MemoryLocation) -> Result<(), Error> {
        let device = self.handle.workers.shared.info.name.clone();
        Err(Error::Unsupported { device, what: "prefetching managed memory" })
    }

    fn query(&self) -> Result<Status, Error> {
        self.handle.workers.shared.lock().queues.status(self.handle.id)
    }

    fn synchronize(&self) -> Result<(), Error> {
        check_may_block()?;
        self.handle.workers.shared.record(self.handle.id)?.block().map(drop)
    }

    fn take_error(&self) -> Option<Error> {
        self.handle.workers.shared.lock().queues.take_error(self.handle.id)
    }

    fn metrics(&self) -> StreamMetrics {
        self.handle.counters.read()
    }

    fn outstanding(&self) -> u64 {
        self.handle.counters.outstanding()
    }
}

/// An [`Event`] of a [`CpuDevice`]. Its times come from the monotonic clock of the host.
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
        check_may_block()?;
        self.point().map_or(Ok(()), |point| point.block().map(drop))
    }

    fn elapsed_since(&self, start: &Self) -> Result<Duration, Error> {
        elapsed(start.point().as_deref(), self.point().as_deref())
    }
}

/// Returns the time from `start` to `end`, or zero if `end` was reached first.
///
/// # Errors
/// Returns [`Error::TimedOut`] if a point is missing or not reached yet. Returns the error of the
/// work before a point if that work failed.
pub(crate) fn elapsed(start: Option<&Point>, end: Option<&Point>) -> Result<Duration, Error> {
    let at = |point: Option<&Point>| match point.and_then(Point::outcome) {
        Some(outcome) => outcome.clone(),
        None => Err(Error::TimedOut { timeout: Duration::ZERO }),
    };
    Ok(Duration::from_nanos(at(end)?.saturating_sub(at(start)?)))
}

/// Host memory of a [`CpuDevice`].
#[derive(Debug)]
pub struct CpuMemory {
    block: HostBlock,
    workers: Arc<Workers>,
}

impl Drop for CpuMemory {
    fn drop(&mut self) {
        self.workers.shared.memory.freed(self.block.range().len());
    }
}

// SAFETY: this value alone owns its block of host memory, which neither moves nor is freed before
// the value is dropped.
unsafe impl RawMemory for CpuMemory {
    fn range(&self) -> MemoryRange {
        self.block.range()
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let from = self.range().slice(offset..offset + bytes.len());
        // SAFETY: `slice` checked that `from` lies in the block. The caller guarantees that no
        // stream writes to it during the call. `bytes` is exclusively borrowed.
        unsafe { Transfer::copy(MemoryRange::of(bytes), from) }?.run();
        Ok(())
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.range().slice(offset..offset + bytes.len());
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: `slice` checked that `to` lies in the block. The caller guarantees that no stream
        // accesses it during the call. The copy only reads `bytes`, which is borrowed.
        unsafe { Transfer::copy(to, from) }?.run();
        Ok(())
    }
}
