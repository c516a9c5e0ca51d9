// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices of NVIDIA, by a driver that is loaded when there is one. Raw calls are cudarc's, checked
//! ones `driver`'s.

mod driver;

use std::alloc::Layout;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use self::driver::{Absent, Context, RawEvent, RawStream};
use crate::cpu::monotonic_ns;
use crate::device::{
    Device, DeviceInfo, DeviceKind, Event, HostFn, MemoryLocation, RawMemory, Status, Stream,
    StreamId,
};
use crate::memory::{HostBlock, MemoryKind, MemoryRange, check_copy};
use crate::metrics::{MemoryCounters, MemoryMetrics, StreamMetrics};
use crate::priority::{PriorityRange, StreamPriority};
use crate::queue::{Work, may_wait, next_stream_id};
use crate::{Error, GpuStatus};

/// What there is; see [`GpuStatus::detect`].
pub(crate) fn status() -> GpuStatus {
    match driver::load() {
        Ok(device_count) => GpuStatus::Available { device_count: *device_count },
        Err(Absent::NoDevices) => GpuStatus::NoDevices,
        Err(Absent::NoDriver(reason)) => GpuStatus::NoCuda(reason.clone()),
    }
}

/// A device of NVIDIA, by its primary context. It has not been tried on one yet. Functions of
/// streams run on a thread of the driver's. Such a failure that the driver itself reports is for
/// good, and for all that the process does with the device.
///
/// When a function panics, functions behind it are not run, and neither are those of streams that
/// wait for it; copies and fills are that were submitted before it was known, for the device has
/// them already.
#[derive(Debug, Clone)]
pub struct CudaDevice {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    info: DeviceInfo,
    context: Context,
    streams: Mutex<Vec<Weak<StreamHandle>>>,
    memory: MemoryCounters,
    /// What was let go of where the driver takes no calls: in functions of streams.
    late: Mutex<Vec<Late>>,
    /// Whether the driver's own pool was told to keep what is freed, once it is used.
    keeps_freed: OnceLock<bool>,
}

/// Memory that is to be given back when the driver takes calls again.
#[derive(Debug)]
struct Late {
    owned: Owned,
    /// The stream in whose order.
    stream: Option<Arc<StreamHandle>>,
}

impl Shared {
    /// Gives back what could not be before.
    fn free_late(&self) {
        if may_wait().is_err() {
            return;
        }
        let late = std::mem::take(&mut *lock(&self.late));
        for Late { owned, stream } in late {
            // SAFETY: it was let go of, and is taken from the list once.
            unsafe { self.free(&owned, stream.as_deref()) };
        }
    }

    /// # Safety
    /// It came from this context, and nobody will use it but what is before this on the stream.
    unsafe fn free(&self, owned: &Owned, stream: Option<&StreamHandle>) {
        match (owned, stream) {
            // What the driver refuses stays taken.
            (Owned::Driver { start, .. }, Some(stream)) => {
                // SAFETY: the caller's promise.
                let _ = unsafe { self.context.free_in_order(*start, &stream.raw) };
            }
            // SAFETY: as above.
            (Owned::Driver { start, pinned: true }, None) => unsafe {
                self.context.free_pinned(*start);
            },
            // SAFETY: as above.
            (Owned::Driver { start, pinned: false }, None) => unsafe { self.context.free(*start) },
            (Owned::Block(_) | Owned::Gone, _) => {}
        }
    }
}

impl CudaDevice {
    /// The device of this number, among those that the environment shows (`CUDA_VISIBLE_DEVICES`).
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the reason when there is no driver, or no such device;
    /// [`Error::Driver`].
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        status().require(ordinal)?;
        let context = Context::new(ordinal)?;
        let (least, greatest) = context.priorities()?;
        let info = DeviceInfo {
            kind: DeviceKind::Cuda,
            name: context.name()?,
            ordinal: ordinal as u32,
            total_bytes: Some(context.total_bytes()?),
            priorities: PriorityRange { least, greatest },
            host_memory: false,
            runs_by_itself: true,
            can_prefetch: context.moves_memory()?,
        };
        let shared = Shared {
            info,
            context,
            streams: Mutex::default(),
            memory: MemoryCounters::default(),
            keeps_freed: OnceLock::new(),
            late: Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// How much of its memory is allocated by way of this handle and its clones.
    pub fn memory(&self) -> MemoryMetrics {
        self.shared.memory.read()
    }
}

impl Device for CudaDevice {
    type Stream = CudaStream;
    type Event = CudaEvent;
    type Memory = CudaMemory;

    fn owns(&self, stream: &CudaStream) -> bool {
        Arc::ptr_eq(&self.shared, &stream.handle.shared)
    }

    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn create_stream(&self, priority: StreamPriority) -> Result<CudaStream, Error> {
        let level = self.info().priorities.level(priority);
        let raw = self.shared.context.create_stream(level)?;
        let handle = Arc::new(StreamHandle {
            id: next_stream_id(),
            level,
            raw,
            lineage: Mutex::new(Lineage::default()),
            counts: Counts::default(),
            shared: Arc::clone(&self.shared),
        });
        let mut streams = lock(&self.shared.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&handle));
        Ok(CudaStream { handle })
    }

    fn create_event(&self) -> Result<CudaEvent, Error> {
        let raw = self.shared.context.create_event()?;
        let handle =
            EventHandle { raw, recorded: Mutex::new(None), shared: Arc::clone(&self.shared) };
        Ok(CudaEvent { handle: Arc::new(handle) })
    }

    fn allocate(&self, layout: Layout, kind: MemoryKind) -> Result<CudaMemory, Error> {
        let (shared, bytes) = (&self.shared, layout.size());
        shared.free_late();
        let full =
            || Error::OutOfMemory { device: self.info().name.clone(), requested_bytes: bytes };
        // The driver aligns to 256 bytes at least, and what is large to more; for the rest there is
        // room around it.
        let take = |bytes: usize| match kind {
            MemoryKind::Device => shared.context.allocate_device(bytes),
            MemoryKind::Managed => shared.context.allocate_managed(bytes),
            MemoryKind::PinnedHost => shared.context.allocate_pinned(bytes),
            MemoryKind::Host => unreachable!("that is no memory of the driver's"),
        };
        if kind == MemoryKind::Host {
            let block = HostBlock::new(layout).ok_or_else(full)?;
            let range = block.range();
            shared.memory.taken(bytes);
            return Ok(CudaMemory {
                owned: Owned::Block(block),
                range,
                kind,
                shared: Arc::clone(shared),
            });
        }
        let owned = |start| Owned::Driver { start, pinned: kind == MemoryKind::PinnedHost };
        let start = take(bytes.max(1))?.ok_or_else(full)?;
        let mut memory = CudaMemory {
            owned: owned(start),
            range: MemoryRange::new(start, bytes),
            kind,
            shared: Arc::clone(shared),
        };
        shared.memory.taken(bytes);
        if !start.addr().is_multiple_of(layout.align()) {
            drop(memory);
            let start = take(bytes + layout.align())?.ok_or_else(full)?;
            let range =
                MemoryRange::new(start.wrapping_add(start.align_offset(layout.align())), bytes);
            memory = CudaMemory { owned: owned(start), range, kind, shared: Arc::clone(shared) };
            shared.memory.taken(bytes);
        }
        Ok(memory)
    }

    fn allocate_in_order(&self, layout: Layout, stream: &CudaStream) -> Result<CudaMemory, Error> {
        let (shared, bytes) = (&self.shared, layout.size());
        shared.free_late();
        if !shared.keeps_freed.get_or_init(|| shared.context.keep_freed_memory().is_ok()) {
            let device = self.info().name.clone();
            return Err(Error::Unsupported { device, what: "allocator in the order of streams" });
        }
        let full =
            || Error::OutOfMemory { device: self.info().name.clone(), requested_bytes: bytes };
        let start =
            shared.context.allocate_in_order(bytes.max(1), &stream.handle.raw)?.ok_or_else(full)?;
        shared.memory.taken(bytes);
        let (owned, range) =
            (Owned::Driver { start, pinned: false }, MemoryRange::new(start, bytes));
        let memory =
            CudaMemory { owned, range, kind: MemoryKind::Device, shared: Arc::clone(shared) };
        if !start.addr().is_multiple_of(layout.align()) {
            // The driver aligns to 512 bytes.
            let device = self.info().name.clone();
            self.free_in_order(memory, stream)?;
            return Err(Error::Unsupported {
                device,
                what: "such alignment in the order of streams",
            });
        }
        Ok(memory)
    }

    fn free_in_order(&self, mut memory: CudaMemory, stream: &CudaStream) -> Result<(), Error> {
        let Owned::Driver { start, pinned: false } = memory.owned else { return Ok(()) };
        let StreamHandle { raw, shared, .. } = &*stream.handle;
        if may_wait().is_err() {
            let owned = std::mem::replace(&mut memory.owned, Owned::Gone);
            lock(&shared.late).push(Late { owned, stream: Some(Arc::clone(&stream.handle)) });
            return Ok(());
        }
        stream.handle.submit_whatever(|_| {
            // SAFETY: its owner gives it up, and says by which stream others are done with it; it
            // is taken from `memory`.
            unsafe { shared.context.free_in_order(start, raw) }
        })?;
        memory.owned = Owned::Gone;
        Ok(())
    }

    fn synchronize(&self) -> Result<(), Error> {
        may_wait()?;
        self.shared.free_late();
        let streams: Vec<_> = lock(&self.shared.streams).iter().filter_map(Weak::upgrade).collect();
        let ended: Vec<_> =
            streams.into_iter().map(|handle| CudaStream { handle }.synchronize()).collect();
        ended.into_iter().collect()
    }
}

/// Where a failure of a function can come from: the streams that this one has waited for, and up to
/// which of their operations.
#[derive(Debug, Clone, Default)]
struct Lineage {
    own: Arc<Failure>,
    operations: u64,
    others: Vec<(Arc<Failure>, u64)>,
}

/// The first failure of a stream, and the number of the operation.
type Failure = OnceLock<(u64, Error)>;

impl Lineage {
    /// What failed that all from here on depends on.
    fn failure(&self) -> Option<&Error> {
        let others = self
            .others
            .iter()
            .filter_map(|(failure, until)| failure.get().filter(|(at, _)| at <= until));
        self.own.get().into_iter().chain(others).map(|(_, error)| error).next()
    }

    /// Depends on all that `other` does.
    fn join(&mut self, other: &Lineage) {
        let all = other.others.iter().cloned().chain([(Arc::clone(&other.own), other.operations)]);
        for (failure, until) in all.filter(|(failure, _)| !Arc::ptr_eq(failure, &self.own)) {
            match self.others.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &failure)) {
                Some((_, known)) => *known = (*known).max(until),
                None => self.others.push((failure, until)),
            }
        }
        // A stream that is gone and has not failed never will.
        self.others
            .retain(|(failure, _)| Arc::strong_count(failure) > 1 || failure.get().is_some());
    }
}

/// What is counted. Completions are seen when somebody asks.
#[derive(Debug, Default)]
struct Counts {
    operations: AtomicU64,
    completed: AtomicU64,
    transfers: AtomicU64,
    transferred_bytes: AtomicU64,
    launches: AtomicU64,
    submitted_ns: AtomicU64,
    latency_ns: AtomicU64,
}

/// A stream of a [`CudaDevice`]. What it submits to the driver it submits in one go: threads that
/// share it take turns.
///
/// Its metrics see completions when it is asked for anything: latencies are at most so long.
#[derive(Debug, Clone)]
pub struct CudaStream {
    handle: Arc<StreamHandle>,
}

#[derive(Debug)]
struct StreamHandle {
    id: StreamId,
    level: i32,
    raw: RawStream,
    lineage: Mutex<Lineage>,
    counts: Counts,
    shared: Arc<Shared>,
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        // SAFETY: the last handle is gone.
        unsafe { self.shared.context.destroy_stream(&self.raw) };
    }
}

impl StreamHandle {
    /// Submits something, unless what it depends on has failed.
    fn submit(&self, submit: impl FnOnce(&mut Lineage) -> Result<(), Error>) -> Result<(), Error> {
        self.error()?;
        self.submit_whatever(submit)
    }

    fn submit_whatever(
        &self,
        submit: impl FnOnce(&mut Lineage) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut lineage = lock(&self.lineage);
        lineage.operations += 1;
        submit(&mut lineage)?;
        self.counts.operations.fetch_add(1, Ordering::Relaxed);
        self.counts.submitted_ns.fetch_add(monotonic_ns(), Ordering::Relaxed);
        Ok(())
    }

    /// All that was submitted so far is done.
    fn completed(&self, operations: u64, submitted_ns: u64) {
        let before = self.counts.completed.fetch_max(operations, Ordering::Relaxed);
        let now = monotonic_ns().saturating_mul(operations);
        if before < operations {
            self.counts.latency_ns.store(now.saturating_sub(submitted_ns), Ordering::Relaxed);
        }
    }

    fn counted(&self) -> (u64, u64) {
        (
            self.counts.operations.load(Ordering::Relaxed),
            self.counts.submitted_ns.load(Ordering::Relaxed),
        )
    }

    fn error(&self) -> Result<(), Error> {
        lock(&self.lineage).failure().map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl CudaStream {
    /// The driver's handle, `CUstream`, for kernels and libraries. Valid as long as this is.
    pub fn as_ptr(&self) -> *mut c_void {
        self.handle.raw.as_ptr()
    }

    fn wait_for(
        &self,
        event: &CudaEvent,
        join: impl FnOnce(&mut Lineage, &Lineage),
    ) -> Result<(), Error> {
        let StreamHandle { raw, shared, .. } = &*self.handle;
        self.handle.submit(|lineage| {
            let recorded = lock(&event.handle.recorded);
            let Some(history) = &*recorded else { return Ok(()) };
            shared.context.wait(raw, &event.handle.raw)?;
            join(lineage, history);
            Ok(())
        })
    }

    fn transferred(&self, bytes: usize) {
        self.handle.counts.transfers.fetch_add(1, Ordering::Relaxed);
        self.handle.counts.transferred_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Stream for CudaStream {
    type Event = CudaEvent;

    fn id(&self) -> StreamId {
        self.handle.id
    }

    fn level(&self) -> i32 {
        self.handle.level
    }

    fn record(&self, event: &CudaEvent) -> Result<(), Error> {
        let StreamHandle { raw, shared, .. } = &*self.handle;
        self.handle.submit_whatever(|lineage| {
            // Both at once, lest another thread waits for one of them with the other's history.
            let mut recorded = lock(&event.handle.recorded);
            shared.context.record(raw, &event.handle.raw)?;
            *recorded = Some(lineage.clone());
            Ok(())
        })
    }

    fn wait(&self, event: &CudaEvent) -> Result<(), Error> {
        self.wait_for(event, Lineage::join)
    }

    fn follow(&self, event: &CudaEvent) -> Result<(), Error> {
        self.wait_for(event, |_, _| ())
    }

    unsafe fn copy(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
        check_copy(to, from)?;
        let StreamHandle { raw, shared, .. } = &*self.handle;
        self.handle.submit(|_| Ok(()))?;
        if !to.is_empty() {
            // Without the lock: from or to memory that is not pinned the driver may wait for all
            // that is before it.
            // SAFETY: the caller's promise; the lengths were compared.
            unsafe { shared.context.copy(raw, to, from) }?;
        }
        self.transferred(to.len());
        Ok(())
    }

    unsafe fn fill(&self, to: MemoryRange, byte: u8) -> Result<(), Error> {
        let StreamHandle { raw, shared, .. } = &*self.handle;
        self.handle.submit(|_| match to.is_empty() {
            true => Ok(()),
            // SAFETY: the caller's promise.
            false => unsafe { shared.context.fill(raw, to, byte) },
        })?;
        self.transferred(to.len());
        Ok(())
    }

    fn launch_host_fn(&self, work: HostFn) -> Result<(), Error> {
        let StreamHandle { id, raw, shared, .. } = &*self.handle;
        let stream = *id;
        self.handle.submit(|lineage| {
            let lineage = lineage.clone();
            let run = move || {
                let failed = lineage.failure().cloned();
                let outcome = match failed {
                    Some(error) => Err(error),
                    None => Work::HostFn(work).run().map_err(|what| Error::Failed { stream, what }),
                };
                if let Err(error) = outcome {
                    let _ = lineage.own.set((lineage.operations, error));
                }
            };
            shared.context.launch_host_fn(raw, Box::new(run))
        })?;
        self.handle.counts.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn prefetch(&self, range: MemoryRange, to: MemoryLocation) -> Result<(), Error> {
        let StreamHandle { raw, shared, .. } = &*self.handle;
        if !shared.info.can_prefetch {
            return Err(Error::Unsupported {
                device: shared.info.name.clone(),
                what: "memory that moves",
            });
        }
        self.handle.submit(|_| shared.context.prefetch(raw, range, to == MemoryLocation::Device))
    }

    fn query(&self) -> Result<Status, Error> {
        let (operations, submitted_ns) = self.handle.counted();
        // The device may still do what was submitted before a failure was known.
        if !self.handle.shared.context.is_done(&self.handle.raw)? {
            return Ok(Status::Pending);
        }
        self.handle.completed(operations, submitted_ns);
        self.handle.error().map(|()| Status::Ready)
    }

    fn synchronize(&self) -> Result<(), Error> {
        may_wait()?;
        let (operations, submitted_ns) = self.handle.counted();
        self.handle.shared.context.synchronize(&self.handle.raw)?;
        self.handle.completed(operations, submitted_ns);
        self.handle.error()
    }

    fn take_error(&self) -> Option<Error> {
        let mut lineage = lock(&self.handle.lineage);
        let error = lineage.failure().cloned()?;
        // Only what a function did is over with it.
        if !matches!(error, Error::Failed { .. }) {
            return None;
        }
        *lineage = Lineage { operations: lineage.operations, ..Lineage::default() };
        Some(error)
    }

    fn metrics(&self) -> StreamMetrics {
        let _ = self.query();
        let Counts {
            operations,
            completed,
            transfers,
            transferred_bytes,
            launches,
            latency_ns,
            ..
        } = &self.handle.counts;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StreamMetrics {
            operations: read(operations),
            completed: read(completed),
            transfers: read(transfers),
            transferred_bytes: read(transferred_bytes),
            launches: read(launches),
            latency: Duration::from_nanos(read(latency_ns)),
        }
    }
}

/// An event of a [`CudaDevice`].
#[derive(Debug, Clone)]
pub struct CudaEvent {
    handle: Arc<EventHandle>,
}

#[derive(Debug)]
struct EventHandle {
    raw: RawEvent,
    /// What came before where it was recorded last.
    recorded: Mutex<Option<Lineage>>,
    shared: Arc<Shared>,
}

impl Drop for EventHandle {
    fn drop(&mut self) {
        // SAFETY: the last handle is gone.
        unsafe { self.shared.context.destroy_event(&self.raw) };
    }
}

impl CudaEvent {
    /// The driver's handle, `CUevent`, is not given out: what is recorded behind this crate's back
    /// it knows nothing of.
    fn error(&self) -> Result<(), Error> {
        let recorded = lock(&self.handle.recorded);
        let Some(lineage) = &*recorded else { return Ok(()) };
        // Of its own stream only what came before.
        let own =
            lineage.own.get().filter(|(at, _)| *at <= lineage.operations).map(|(_, error)| error);
        let others = Lineage { own: Arc::default(), ..lineage.clone() };
        own.or_else(|| others.failure()).map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl Event for CudaEvent {
    fn query(&self) -> Result<Status, Error> {
        if lock(&self.handle.recorded).is_none() {
            return Ok(Status::Ready);
        }
        if !self.handle.shared.context.is_reached(&self.handle.raw)? {
            return Ok(Status::Pending);
        }
        self.error().map(|()| Status::Ready)
    }

    fn synchronize(&self) -> Result<(), Error> {
        may_wait()?;
        if lock(&self.handle.recorded).is_some() {
            self.handle.shared.context.reach(&self.handle.raw)?;
        }
        self.error()
    }

    fn elapsed_since(&self, start: &Self) -> Result<Duration, Error> {
        let not_yet = Error::TimedOut { timeout: Duration::ZERO };
        if [self, start].iter().any(|event| lock(&event.handle.recorded).is_none()) {
            return Err(not_yet);
        }
        self.error()?;
        let milliseconds =
            self.handle.shared.context.elapsed_ms(&start.handle.raw, &self.handle.raw)?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.ok_or(not_yet)?.max(0.0)) / 1e3))
    }
}

/// Memory of a [`CudaDevice`], or of the host for one.
#[derive(Debug)]
pub struct CudaMemory {
    owned: Owned,
    range: MemoryRange,
    kind: MemoryKind,
    shared: Arc<Shared>,
}

#[derive(Debug)]
enum Owned {
    Driver {
        start: *mut u8,
        pinned: bool,
    },
    /// Given back already.
    Gone,
    Block(#[expect(dead_code, reason = "owns what `range` says")] HostBlock),
}

// SAFETY: it owns memory by its address, which it itself never reads or writes.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        self.shared.memory.given_back(self.range.len());
        let owned = std::mem::replace(&mut self.owned, Owned::Gone);
        if may_wait().is_err() && matches!(owned, Owned::Driver { .. }) {
            lock(&self.shared.late).push(Late { owned, stream: None });
            return;
        }
        // SAFETY: it came from there, and is freed once, when its owner says that nobody uses it.
        unsafe { self.shared.free(&owned, None) };
    }
}

// SAFETY: the driver gave it to this value alone, and pinned and managed memory is mapped for the
// host.
unsafe impl RawMemory for CudaMemory {
    fn range(&self) -> MemoryRange {
        self.range
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let from = self.range().slice(offset..offset + bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise; `bytes` is borrowed for as long as it takes.
        unsafe { self.shared.context.copy_now(MemoryRange::of(bytes), from) }
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.range().slice(offset..offset + bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: the caller's promise; `bytes` is borrowed for as long as it takes, and is only
        // read.
        unsafe { self.shared.context.copy_now(to, from) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic runs under these.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
