// SPDX-License-Identifier: MIT OR Apache-2.0
//! NVIDIA GPUs. The driver is loaded at run time. The raw calls are those of cudarc; `driver`
//! checks their results.

mod driver;

use std::alloc::Layout;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use self::driver::{Context, RawEvent, RawStream, Unavailable};
use crate::cpu::monotonic_ns;
use crate::device::{Device, DeviceInfo, Event, HostFn, MemoryLocation, RawMemory, Status, Stream};
use crate::id::{DeviceKind, StreamId};
use crate::memory::{HostBlock, check_copy};
use crate::metrics::{MemoryCounters, MemoryMetrics, StreamMetrics};
use crate::priority::{PriorityRange, StreamPriority};
use crate::queue::{Work, check_may_block, next_stream_id};
use crate::range::{MemoryKind, MemoryRange};
use crate::{Error, GpuStatus};

/// Implements [`GpuStatus::detect`].
pub(crate) fn status() -> GpuStatus {
    match driver::load() {
        Ok(device_count) => GpuStatus::Available { device_count: *device_count },
        Err(Unavailable::NoDevices) => GpuStatus::NoDevices,
        Err(Unavailable::NoDriver(reason)) => GpuStatus::NoCuda(reason.clone()),
    }
}

/// An NVIDIA GPU, used through its primary context. This code has not yet run on a GPU.
///
/// Host functions run on a thread of the driver. An error that the driver reports is permanent: it
/// affects all use of the GPU by this process.
///
/// When a host function panics, later host functions on its stream, and on streams that wait for
/// it, are skipped. Copies and fills that were submitted before the failure is known still run,
/// because the GPU has them already.
#[derive(Debug, Clone)]
pub struct CudaDevice {
    shared: Arc<CudaShared>,
}

#[derive(Debug)]
struct CudaShared {
    info: DeviceInfo,
    context: Context,
    streams: Mutex<Vec<Weak<StreamHandle>>>,
    memory: MemoryCounters,
    /// Memory dropped in host functions, where calls of the driver are forbidden.
    deferred_frees: Mutex<Vec<DeferredFree>>,
    /// Whether the default memory pool was set to keep freed memory. Set on first use.
    pool_keeps_memory: OnceLock<bool>,
}

/// Memory to free when calls of the driver are allowed again.
#[derive(Debug)]
struct DeferredFree {
    allocation: Allocation,
    /// The stream in whose order to free it.
    stream: Option<Arc<StreamHandle>>,
}

impl CudaShared {
    /// Frees the memory that was dropped in host functions.
    fn run_deferred_frees(&self) {
        if check_may_block().is_err() {
            return;
        }
        let deferred_frees = std::mem::take(&mut *lock(&self.deferred_frees));
        for DeferredFree { allocation, stream } in deferred_frees {
            // SAFETY: the owner has dropped the memory, and it is taken from the list once.
            unsafe { self.free(&allocation, stream.as_deref()) };
        }
    }

    /// Frees an allocation, in the order of `stream` if there is one.
    ///
    /// # Safety
    /// The allocation must belong to this context, and only work submitted to `stream` before may
    /// use it.
    unsafe fn free(&self, allocation: &Allocation, stream: Option<&StreamHandle>) {
        match (allocation, stream) {
            // Memory that the driver refuses to free is leaked.
            (Allocation::Driver { start, .. }, Some(stream)) => {
                // SAFETY: the caller's promise.
                let _ = unsafe { self.context.free_async(*start, &stream.raw) };
            }
            // SAFETY: the caller's promise.
            (Allocation::Driver { start, pinned: true }, None) => unsafe {
                self.context.free_pinned(*start);
            },
            // SAFETY: the caller's promise.
            (Allocation::Driver { start, pinned: false }, None) => unsafe {
                self.context.free(*start);
            },
            (Allocation::Host(_) | Allocation::Released, _) => {}
        }
    }
}

impl CudaDevice {
    /// Opens the GPU `ordinal`, counted among those that `CUDA_VISIBLE_DEVICES` shows.
    ///
    /// # Errors
    /// Returns [`Error::NoGpu`] with the reason if there is no such GPU or no driver, and
    /// [`Error::Driver`] if a call fails.
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        status().require(ordinal)?;
        let context = Context::new(ordinal)?;
        let (least, greatest) = context.priority_range()?;
        let info = DeviceInfo {
            kind: DeviceKind::Cuda,
            name: context.name()?,
            ordinal: ordinal as u32,
            total_bytes: Some(context.total_bytes()?),
            priorities: PriorityRange { least, greatest },
            host_memory: false,
            runs_by_itself: true,
            can_prefetch: context.supports_concurrent_managed_access()?,
        };
        let shared = CudaShared {
            info,
            context,
            streams: Mutex::default(),
            memory: MemoryCounters::default(),
            pool_keeps_memory: OnceLock::new(),
            deferred_frees: Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns how much memory is allocated through this handle and its clones.
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
            dependencies: Mutex::new(Dependencies::default()),
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
        shared.run_deferred_frees();
        let out_of_memory =
            || Error::OutOfMemory { device: self.info().name.clone(), requested_bytes: bytes };
        // The driver aligns to at least 256 bytes. For larger alignments, room is added.
        let take = |bytes: usize| match kind {
            MemoryKind::Device => shared.context.allocate_device(bytes),
            MemoryKind::Managed => shared.context.allocate_managed(bytes),
            MemoryKind::PinnedHost => shared.context.allocate_pinned(bytes),
            MemoryKind::Host => unreachable!("host memory is not allocated by the driver"),
        };
        if kind == MemoryKind::Host {
            let block = HostBlock::new(layout).ok_or_else(out_of_memory)?;
            let range = block.range();
            shared.memory.allocated(bytes);
            return Ok(CudaMemory {
                allocation: Allocation::Host(block),
                range,
                kind,
                shared: Arc::clone(shared),
            });
        }
        let allocation =
            |start| Allocation::Driver { start, pinned: kind == MemoryKind::PinnedHost };
        let start = take(bytes.max(1))?.ok_or_else(out_of_memory)?;
        let mut memory = CudaMemory {
            allocation: allocation(start),
            range: MemoryRange::new(start, bytes),
            kind,
            shared: Arc::clone(shared),
        };
        shared.memory.allocated(bytes);
        if !start.addr().is_multiple_of(layout.align()) {
            drop(memory);
            let start = take(bytes + layout.align())?.ok_or_else(out_of_memory)?;
            let range =
                MemoryRange::new(start.wrapping_add(start.align_offset(layout.align())), bytes);
            memory = CudaMemory {
                allocation: allocation(start),
                range,
                kind,
                shared: Arc::clone(shared),
            };
            shared.memory.allocated(bytes);
        }
        Ok(memory)
    }

    fn allocate_async(&self, layout: Layout, stream: &CudaStream) -> Result<CudaMemory, Error> {
        let (shared, bytes) = (&self.shared, layout.size());
        shared.run_deferred_frees();
        if !shared.pool_keeps_memory.get_or_init(|| shared.context.keep_freed_memory().is_ok()) {
            let device = self.info().name.clone();
            return Err(Error::Unsupported { device, what: "stream-ordered allocation" });
        }
        let out_of_memory =
            || Error::OutOfMemory { device: self.info().name.clone(), requested_bytes: bytes };
        let start = shared
            .context
            .allocate_async(bytes.max(1), &stream.handle.raw)?
            .ok_or_else(out_of_memory)?;
        shared.memory.allocated(bytes);
        let (allocation, range) =
            (Allocation::Driver { start, pinned: false }, MemoryRange::new(start, bytes));
        let memory =
            CudaMemory { allocation, range, kind: MemoryKind::Device, shared: Arc::clone(shared) };
        if !start.addr().is_multiple_of(layout.align()) {
            // The driver aligns to 512 bytes.
            let device = self.info().name.clone();
            self.free_async(memory, stream)?;
            return Err(Error::Unsupported {
                device,
                what: "alignments above 512 bytes in stream-ordered allocation",
            });
        }
        Ok(memory)
    }

    fn free_async(&self, mut memory: CudaMemory, stream: &CudaStream) -> Result<(), Error> {
        let Allocation::Driver { start, pinned: false } = memory.allocation else { return Ok(()) };
        let StreamHandle { raw, shared, .. } = &*stream.handle;
        if check_may_block().is_err() {
            let allocation = std::mem::replace(&mut memory.allocation, Allocation::Released);
            lock(&shared.deferred_frees)
                .push(DeferredFree { allocation, stream: Some(Arc::clone(&stream.handle)) });
            return Ok(());
        }
        stream.handle.submit_even_if_failed(|_| {
            // SAFETY: the owner passed the memory to this call, so only earlier work on the stream
            // uses it. Its allocation is cleared below, so it is freed once.
            unsafe { shared.context.free_async(start, raw) }
        })?;
        memory.allocation = Allocation::Released;
        Ok(())
    }

    fn synchronize(&self) -> Result<(), Error> {
        check_may_block()?;
        self.shared.run_deferred_frees();
        let streams: Vec<_> = lock(&self.shared.streams).iter().filter_map(Weak::upgrade).collect();
        let results: Vec<_> =
            streams.into_iter().map(|handle| CudaStream { handle }.synchronize()).collect();
        results.into_iter().collect()
    }
}

/// The streams that a point depends on, each up to the given operation. Shows whether a host
/// function failed before the point.
#[derive(Debug, Clone, Default)]
struct Dependencies {
    own: Arc<Failure>,
    operations: u64,
    others: Vec<(Arc<Failure>, u64)>,
}

/// The first failure of a stream: the number of the operation and its error.
type Failure = OnceLock<(u64, Error)>;

impl Dependencies {
    /// Returns the first known failure among the dependencies.
    fn failure(&self) -> Option<&Error> {
        let others = self
            .others
            .iter()
            .filter_map(|(failure, until)| failure.get().filter(|(at, _)| at <= until));
        self.own.get().into_iter().chain(others).map(|(_, error)| error).next()
    }

    /// Adds the dependencies of `other`.
    fn join(&mut self, other: &Dependencies) {
        let all = other.others.iter().cloned().chain([(Arc::clone(&other.own), other.operations)]);
        for (failure, until) in all.filter(|(failure, _)| !Arc::ptr_eq(failure, &self.own)) {
            match self.others.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &failure)) {
                Some((_, known)) => *known = (*known).max(until),
                None => self.others.push((failure, until)),
            }
        }
        // A stream that was dropped without a failure cannot fail any more.
        self.others
            .retain(|(failure, _)| Arc::strong_count(failure) > 1 || failure.get().is_some());
    }
}

/// Counters of a stream. Completions are noticed only by queries.
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

/// A stream of a [`CudaDevice`].
///
/// Its metrics notice completions only when the stream is queried or synchronized, so latencies are
/// upper bounds.
#[derive(Debug, Clone)]
pub struct CudaStream {
    handle: Arc<StreamHandle>,
}

#[derive(Debug)]
struct StreamHandle {
    id: StreamId,
    level: i32,
    raw: RawStream,
    dependencies: Mutex<Dependencies>,
    counts: Counts,
    shared: Arc<CudaShared>,
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        // SAFETY: this is the last handle.
        unsafe { self.shared.context.destroy_stream(&self.raw) };
    }
}

impl StreamHandle {
    /// Submits work, unless the stream has failed.
    fn submit(
        &self,
        submit: impl FnOnce(&mut Dependencies) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.error()?;
        self.submit_even_if_failed(submit)
    }

    fn submit_even_if_failed(
        &self,
        submit: impl FnOnce(&mut Dependencies) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut dependencies = lock(&self.dependencies);
        dependencies.operations += 1;
        submit(&mut dependencies)?;
        self.counts.operations.fetch_add(1, Ordering::Relaxed);
        self.counts.submitted_ns.fetch_add(monotonic_ns(), Ordering::Relaxed);
        Ok(())
    }

    /// Counts all operations up to `operations` as completed.
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
        lock(&self.dependencies).failure().map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl CudaStream {
    /// Returns the driver's `CUstream`, for kernels and libraries. Valid as long as a handle to
    /// this stream exists.
    pub fn as_ptr(&self) -> *mut c_void {
        self.handle.raw.as_ptr()
    }

    fn wait_for(
        &self,
        event: &CudaEvent,
        join: impl FnOnce(&mut Dependencies, &Dependencies),
    ) -> Result<(), Error> {
        let StreamHandle { raw, shared, .. } = &*self.handle;
        self.handle.submit(|dependencies| {
            let recorded = lock(&event.handle.recorded);
            let Some(history) = &*recorded else { return Ok(()) };
            shared.context.wait(raw, &event.handle.raw)?;
            join(dependencies, history);
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
        self.handle.submit_even_if_failed(|dependencies| {
            // Both under the lock, so that no other thread combines one of them with an older
            // version of the other.
            let mut recorded = lock(&event.handle.recorded);
            shared.context.record(raw, &event.handle.raw)?;
            *recorded = Some(dependencies.clone());
            Ok(())
        })
    }

    fn wait(&self, event: &CudaEvent) -> Result<(), Error> {
        self.wait_for(event, Dependencies::join)
    }

    fn wait_ignoring_failure(&self, event: &CudaEvent) -> Result<(), Error> {
        self.wait_for(event, |_, _| ())
    }

    unsafe fn copy(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
        check_copy(to, from)?;
        let StreamHandle { raw, shared, .. } = &*self.handle;
        self.handle.submit(|_| Ok(()))?;
        if !to.is_empty() {
            // Not under the lock, because for pageable memory the driver may wait for all earlier
            // work.
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
        self.handle.submit(|dependencies| {
            let dependencies = dependencies.clone();
            let run = move || {
                let failed = dependencies.failure().cloned();
                let outcome = match failed {
                    Some(error) => Err(error),
                    None => Work::HostFn(work).run().map_err(|what| Error::Failed { stream, what }),
                };
                if let Err(error) = outcome {
                    let _ = dependencies.own.set((dependencies.operations, error));
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
                what: "prefetching managed memory",
            });
        }
        self.handle.submit(|_| shared.context.prefetch(raw, range, to == MemoryLocation::Device))
    }

    fn query(&self) -> Result<Status, Error> {
        let (operations, submitted_ns) = self.handle.counted();
        // Work that was submitted before the failure was known may still be running.
        if !self.handle.shared.context.is_done(&self.handle.raw)? {
            return Ok(Status::Pending);
        }
        self.handle.completed(operations, submitted_ns);
        self.handle.error().map(|()| Status::Ready)
    }

    fn synchronize(&self) -> Result<(), Error> {
        check_may_block()?;
        let (operations, submitted_ns) = self.handle.counted();
        self.handle.shared.context.synchronize(&self.handle.raw)?;
        self.handle.completed(operations, submitted_ns);
        self.handle.error()
    }

    fn take_error(&self) -> Option<Error> {
        let mut dependencies = lock(&self.handle.dependencies);
        let error = dependencies.failure().cloned()?;
        // Only failures of host functions can be cleared.
        if !matches!(error, Error::Failed { .. }) {
            return None;
        }
        *dependencies =
            Dependencies { operations: dependencies.operations, ..Dependencies::default() };
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
    /// The dependencies of the point that was recorded last.
    recorded: Mutex<Option<Dependencies>>,
    shared: Arc<CudaShared>,
}

impl Drop for EventHandle {
    fn drop(&mut self) {
        // SAFETY: this is the last handle.
        unsafe { self.shared.context.destroy_event(&self.raw) };
    }
}

impl CudaEvent {
    /// Returns the failure of the work before the recorded point.
    ///
    /// The driver's `CUevent` is not exposed, because this would miss records made through it.
    fn error(&self) -> Result<(), Error> {
        let recorded = lock(&self.handle.recorded);
        let Some(dependencies) = &*recorded else { return Ok(()) };
        // Later failures of the same stream do not count.
        let own = dependencies
            .own
            .get()
            .filter(|(at, _)| *at <= dependencies.operations)
            .map(|(_, error)| error);
        let others = Dependencies { own: Arc::default(), ..dependencies.clone() };
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
        check_may_block()?;
        if lock(&self.handle.recorded).is_some() {
            self.handle.shared.context.wait_for_event(&self.handle.raw)?;
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

/// Memory of a [`CudaDevice`], or host memory for it.
#[derive(Debug)]
pub struct CudaMemory {
    allocation: Allocation,
    range: MemoryRange,
    kind: MemoryKind,
    shared: Arc<CudaShared>,
}

#[derive(Debug)]
enum Allocation {
    Driver {
        start: *mut u8,
        pinned: bool,
    },
    /// Freed already, or passed on.
    Released,
    Host(#[expect(dead_code, reason = "owns the memory of `range`")] HostBlock),
}

// SAFETY: this owns memory by its address, and never reads or writes it.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        self.shared.memory.freed(self.range.len());
        let allocation = std::mem::replace(&mut self.allocation, Allocation::Released);
        if check_may_block().is_err() && matches!(allocation, Allocation::Driver { .. }) {
            lock(&self.shared.deferred_frees).push(DeferredFree { allocation, stream: None });
            return;
        }
        // SAFETY: the allocation belongs to this context and is freed once, when its owner drops
        // it.
        unsafe { self.shared.free(&allocation, None) };
    }
}

// SAFETY: the allocation belongs to this value alone, and the host can access pinned and managed
// memory.
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
        // SAFETY: the caller's promise; `bytes` is borrowed during the copy.
        unsafe { self.shared.context.copy_now(MemoryRange::of(bytes), from) }
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.range().slice(offset..offset + bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: the caller's promise; `bytes` is borrowed during the copy, which only reads it.
        unsafe { self.shared.context.copy_now(to, from) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs while these locks are held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
