// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices with their own memory, streams and events behind an [`Api`]: NVIDIA GPUs through the
//! CUDA driver, and other accelerators through a library like CUDA's runtime.

mod api;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "runtime")]
mod runtime;

use std::alloc::Layout;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use self::api::Api;
use self::api::{RawEvent, RawStream};
#[cfg(feature = "cuda")]
pub(crate) use self::cuda::status;
#[cfg(feature = "cuda")]
pub use self::cuda::{CudaDevice, CudaEvent, CudaMemory, CudaStream};
#[cfg(feature = "runtime")]
pub use self::runtime::{
    RuntimeDevice, RuntimeEvent, RuntimeLibrary, RuntimeMemory, RuntimeStream,
};
use crate::Error;
use crate::cpu::monotonic_ns;
use crate::device::{Device, DeviceInfo, Event, HostFn, MemoryLocation, RawMemory, Status, Stream};
use crate::id::StreamId;
use crate::memory::{HostBlock, check_copy};
use crate::metrics::{MemoryCounters, MemoryMetrics, StreamMetrics};
use crate::priority::StreamPriority;
use crate::queue::{Work, check_may_block, next_stream_id};
use crate::range::{MemoryKind, MemoryRange};

/// A device with its own memory behind an [`Api`]: a `CudaDevice` or a `RuntimeDevice`.
///
/// Host functions run on a thread of the driver. If work on the device fails, for example because
/// of an invalid address, the error is permanent: this process can no longer use the device.
///
/// When a host function panics, later host functions on its stream, and on streams that wait for
/// the function, are skipped. Copies and fills that were submitted before the failure is known
/// still run, because they are already queued on the device.
#[derive(Debug)]
pub struct AcceleratorDevice<A: Api> {
    shared: Arc<Shared<A>>,
}

impl<A: Api> Clone for AcceleratorDevice<A> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

#[derive(Debug)]
struct Shared<A: Api> {
    info: DeviceInfo,
    api: A,
    streams: Mutex<Vec<Weak<StreamHandle<A>>>>,
    memory: MemoryCounters,
    /// What was dropped or freed in host functions, where calls to the driver are forbidden.
    deferred: Mutex<Vec<Deferred<A>>>,
    /// Whether the default memory pool keeps freed memory. Set by the first stream-ordered
    /// allocation. If `false`, stream-ordered allocation is not supported.
    pool_keeps_memory: OnceLock<bool>,
}

/// What to free or destroy when calls to the driver are allowed again.
#[derive(Debug)]
enum Deferred<A: Api> {
    /// Memory to free. If there is a stream, after the earlier work of the stream.
    Memory(Allocation, Option<Arc<StreamHandle<A>>>),
    Stream(RawStream),
    Event(RawEvent),
}

impl<A: Api> Shared<A> {
    /// Frees what was dropped or freed in host functions. Has no effect if called from a host
    /// function.
    fn run_deferred(&self) {
        if check_may_block().is_err() {
            return;
        }
        let deferred = std::mem::take(&mut *lock(&self.deferred));
        for each in deferred {
            // SAFETY: its owner has dropped or freed it, and `take` removed it from the list, so
            // it is freed or destroyed once.
            unsafe {
                match each {
                    Deferred::Memory(allocation, stream) => {
                        self.free(&allocation, stream.as_deref());
                    }
                    Deferred::Stream(raw) => self.api.destroy_stream(&raw),
                    Deferred::Event(raw) => self.api.destroy_event(&raw),
                }
            }
        }
    }

    /// Returns whether stream-ordered allocation is supported. Then freed memory is kept.
    fn pool_keeps_memory(&self) -> Result<bool, Error> {
        if let Some(keeps) = self.pool_keeps_memory.get() {
            return Ok(*keeps);
        }
        let keeps = match self.api.keep_freed_memory() {
            Ok(()) => true,
            Err(Error::Unsupported { .. }) => false,
            Err(error) => return Err(error),
        };
        Ok(*self.pool_keeps_memory.get_or_init(|| keeps))
    }

    /// Frees an allocation. If there is a `stream`, frees it after the work submitted to the stream
    /// so far.
    ///
    /// # Safety
    /// The allocation must belong to this device and must not be freed twice. Only work that was
    /// submitted to `stream` before this call may use it.
    unsafe fn free(&self, allocation: &Allocation, stream: Option<&StreamHandle<A>>) {
        match (allocation, stream) {
            // Memory that the driver refuses to free is leaked.
            (Allocation::Driver { start, .. }, Some(stream)) => {
                // SAFETY: the caller guarantees that the allocation belongs to this device, and that
                // only earlier work on `stream` uses it.
                let _ = unsafe { self.api.free_async(*start, &stream.raw) };
            }
            // SAFETY: the caller guarantees that nothing uses the allocation, since there is no
            // stream. `allocate` sets `pinned` for memory from `allocate_pinned`.
            (Allocation::Driver { start, pinned: true }, None) => unsafe {
                self.api.free_pinned(*start);
            },
            // SAFETY: the caller guarantees that nothing uses the allocation, since there is no
            // stream. `pinned` is false for device and managed memory.
            (Allocation::Driver { start, pinned: false }, None) => unsafe {
                self.api.free(*start);
            },
            (Allocation::Host(_) | Allocation::Released, _) => {}
        }
    }
}

impl<A: Api> AcceleratorDevice<A> {
    fn open(api: A) -> Result<Self, Error> {
        let info = api.info()?;
        let shared = Shared {
            info,
            api,
            streams: Mutex::default(),
            memory: MemoryCounters::default(),
            pool_keeps_memory: OnceLock::new(),
            deferred: Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns a stream that other code created, by the driver's handle of it. Work can be
    /// submitted to it, and it can wait for events. Dropping the result does not destroy it.
    ///
    /// # Safety
    /// The handle must be that of a stream of this device, and the stream must exist as long as
    /// the result or a clone of it.
    pub unsafe fn external_stream(&self, handle: *mut c_void) -> AcceleratorStream<A> {
        self.stream(RawStream(handle), 0, Ownership::External)
    }

    fn stream(&self, raw: RawStream, level: i32, ownership: Ownership) -> AcceleratorStream<A> {
        let handle = Arc::new(StreamHandle {
            id: next_stream_id(),
            level,
            raw,
            ownership,
            dependencies: Mutex::new(Dependencies::default()),
            counts: Counts::default(),
            shared: Arc::clone(&self.shared),
        });
        let mut streams = lock(&self.shared.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&handle));
        AcceleratorStream { handle }
    }

    /// Returns the current and peak number of bytes allocated through this handle and its clones.
    pub fn memory(&self) -> MemoryMetrics {
        self.shared.memory.read()
    }
}

impl<A: Api> Device for AcceleratorDevice<A> {
    type Stream = AcceleratorStream<A>;
    type Event = AcceleratorEvent<A>;
    type Memory = AcceleratorMemory<A>;

    fn owns(&self, stream: &AcceleratorStream<A>) -> bool {
        Arc::ptr_eq(&self.shared, &stream.handle.shared)
    }

    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn available_bytes(&self) -> Result<Option<u64>, Error> {
        self.shared.api.available_bytes()
    }

    fn create_stream(&self, priority: StreamPriority) -> Result<AcceleratorStream<A>, Error> {
        let level = self.info().priorities.level(priority);
        let raw = self.shared.api.create_stream(level)?;
        Ok(self.stream(raw, level, Ownership::Own))
    }

    fn create_event(&self) -> Result<AcceleratorEvent<A>, Error> {
        let raw = self.shared.api.create_event()?;
        let handle =
            EventHandle { raw, recorded: Mutex::new(None), shared: Arc::clone(&self.shared) };
        Ok(AcceleratorEvent { handle: Arc::new(handle) })
    }

    fn allocate(&self, layout: Layout, kind: MemoryKind) -> Result<AcceleratorMemory<A>, Error> {
        let (shared, bytes) = (&self.shared, layout.size());
        shared.run_deferred();
        let out_of_memory =
            || Error::OutOfMemory { device: self.info().name.clone(), requested_bytes: bytes };
        // The driver aligns to at least 256 bytes. For a larger alignment, the code below allocates
        // extra bytes.
        let take = |bytes: usize| shared.api.allocate(bytes, kind);
        if kind == MemoryKind::Host {
            let block = HostBlock::new(layout).ok_or_else(out_of_memory)?;
            let range = block.range();
            shared.memory.allocated(bytes);
            return Ok(AcceleratorMemory {
                allocation: Allocation::Host(block),
                range,
                kind,
                shared: Arc::clone(shared),
            });
        }
        let allocation =
            |start| Allocation::Driver { start, pinned: kind == MemoryKind::PinnedHost };
        let start = take(bytes.max(1))?.ok_or_else(out_of_memory)?;
        let mut memory = AcceleratorMemory {
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
            memory = AcceleratorMemory {
                allocation: allocation(start),
                range,
                kind,
                shared: Arc::clone(shared),
            };
            shared.memory.allocated(bytes);
        }
        Ok(memory)
    }

    fn allocate_async(
        &self,
        layout: Layout,
        stream: &AcceleratorStream<A>,
    ) -> Result<AcceleratorMemory<A>, Error> {
        let (shared, bytes) = (&self.shared, layout.size());
        shared.run_deferred();
        if !shared.pool_keeps_memory()? {
            let device = self.info().name.clone();
            return Err(Error::Unsupported { device, what: "stream-ordered allocation" });
        }
        let out_of_memory =
            || Error::OutOfMemory { device: self.info().name.clone(), requested_bytes: bytes };
        let start = shared
            .api
            .allocate_async(bytes.max(1), &stream.handle.raw)?
            .ok_or_else(out_of_memory)?;
        shared.memory.allocated(bytes);
        let (allocation, range) =
            (Allocation::Driver { start, pinned: false }, MemoryRange::new(start, bytes));
        let memory = AcceleratorMemory {
            allocation,
            range,
            kind: MemoryKind::Device,
            shared: Arc::clone(shared),
        };
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

    fn free_async(
        &self,
        mut memory: AcceleratorMemory<A>,
        stream: &AcceleratorStream<A>,
    ) -> Result<(), Error> {
        let Allocation::Driver { start, pinned: false } = memory.allocation else { return Ok(()) };
        let StreamHandle { raw, shared, .. } = &*stream.handle;
        if check_may_block().is_err() {
            let allocation = std::mem::replace(&mut memory.allocation, Allocation::Released);
            let stream = Some(Arc::clone(&stream.handle));
            lock(&shared.deferred).push(Deferred::Memory(allocation, stream));
            return Ok(());
        }
        stream.handle.submit_even_if_failed(|_| {
            // SAFETY: the owner passed the memory to this call, so only earlier work on the stream
            // uses it. `memory.allocation` is replaced below, so the memory is freed once.
            unsafe { shared.api.free_async(start, raw) }
        })?;
        memory.allocation = Allocation::Released;
        Ok(())
    }

    fn synchronize(&self) -> Result<(), Error> {
        check_may_block()?;
        self.shared.run_deferred();
        let streams: Vec<_> = lock(&self.shared.streams).iter().filter_map(Weak::upgrade).collect();
        let results: Vec<_> =
            streams.into_iter().map(|handle| AcceleratorStream { handle }.synchronize()).collect();
        results.into_iter().collect()
    }
}

/// The streams that a point depends on, each with the number of its last operation before the
/// point. The failures of these streams show whether a host function failed before the point.
#[derive(Debug, Clone, Default)]
struct Dependencies {
    own: Arc<Failure>,
    operations: u64,
    others: Vec<(Arc<Failure>, u64)>,
}

/// The first failure of a stream: the number of the failed operation, and the error.
type Failure = OnceLock<(u64, Error)>;

impl Dependencies {
    /// Returns a known failure among the dependencies, if there is one.
    fn failure(&self) -> Option<&Error> {
        let others = self
            .others
            .iter()
            .filter_map(|(failure, until)| failure.get().filter(|(at, _)| at <= until));
        self.own.get().into_iter().chain(others).map(|(_, error)| error).next()
    }

    /// Adds the dependencies of `other`, including its own stream.
    fn join(&mut self, other: &Dependencies) {
        let all = other.others.iter().cloned().chain([(Arc::clone(&other.own), other.operations)]);
        for (failure, until) in all.filter(|(failure, _)| !Arc::ptr_eq(failure, &self.own)) {
            match self.others.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &failure)) {
                Some((_, known)) => *known = (*known).max(until),
                None => self.others.push((failure, until)),
            }
        }
        // If no other reference exists, the stream was dropped and has no pending host functions,
        // so it cannot fail any more.
        self.others
            .retain(|(failure, _)| Arc::strong_count(failure) > 1 || failure.get().is_some());
    }
}

/// Counters of a stream. Only queries and synchronization update the completions.
#[derive(Debug, Default)]
struct Counts {
    operations: AtomicU64,
    completions: Mutex<Completions>,
    transfers: AtomicU64,
    transferred_bytes: AtomicU64,
    launches: AtomicU64,
    submitted_ns: AtomicU64,
}

/// The operations that have completed.
#[derive(Debug, Default)]
struct Completions {
    operations: u64,
    /// The sum of the times at which they were submitted.
    submitted_ns: u64,
    /// The sum of the times from submission until the completion was noticed.
    latency_ns: u64,
}

/// A [`Stream`] of an [`AcceleratorDevice`].
///
/// Its metrics count completions only when the stream is queried or synchronized, or the metrics
/// are read. Latencies are therefore upper bounds.
#[derive(Debug)]
pub struct AcceleratorStream<A: Api> {
    handle: Arc<StreamHandle<A>>,
}

impl<A: Api> Clone for AcceleratorStream<A> {
    fn clone(&self) -> Self {
        Self { handle: Arc::clone(&self.handle) }
    }
}

#[derive(Debug)]
struct StreamHandle<A: Api> {
    id: StreamId,
    level: i32,
    raw: RawStream,
    ownership: Ownership,
    dependencies: Mutex<Dependencies>,
    counts: Counts,
    shared: Arc<Shared<A>>,
}

/// Whether the drop of the last handle destroys a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ownership {
    Own,
    External,
}

impl<A: Api> Drop for StreamHandle<A> {
    fn drop(&mut self) {
        if self.ownership == Ownership::External {
            return;
        }
        let raw = self.raw.take();
        if check_may_block().is_err() {
            lock(&self.shared.deferred).push(Deferred::Stream(raw));
            return;
        }
        // SAFETY: the API created the stream, and no other handle to it exists.
        unsafe { self.shared.api.destroy_stream(&raw) };
    }
}

impl<A: Api> StreamHandle<A> {
    /// Submits work, or returns the error of the stream if it has failed.
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

    /// Counts all operations up to `operations` as completed. `submitted_ns` is the sum of the
    /// times at which they were submitted.
    fn completed(&self, operations: u64, submitted_ns: u64) {
        let mut completions = lock(&self.counts.completions);
        let new = operations.saturating_sub(completions.operations);
        if new > 0 {
            let submitted = submitted_ns.saturating_sub(completions.submitted_ns);
            let latency = monotonic_ns().saturating_mul(new).saturating_sub(submitted);
            *completions = Completions {
                operations,
                submitted_ns,
                latency_ns: completions.latency_ns.saturating_add(latency),
            };
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

impl<A: Api> AcceleratorStream<A> {
    /// Returns the driver's handle of the stream, such as a `CUstream`, for kernels and libraries.
    /// It is valid as long as a handle to this stream exists.
    pub fn as_ptr(&self) -> *mut c_void {
        self.handle.raw.0
    }

    fn wait_for(
        &self,
        event: &AcceleratorEvent<A>,
        join: impl FnOnce(&mut Dependencies, &Dependencies),
    ) -> Result<(), Error> {
        let StreamHandle { raw, shared, .. } = &*self.handle;
        self.handle.submit(|dependencies| {
            let recorded = lock(&event.handle.recorded);
            let Some(history) = &*recorded else { return Ok(()) };
            if !shared.api.combines_with(&event.handle.shared.api) {
                return Err(Error::MixedDevices { expected: A::KIND, actual: A::KIND });
            }
            shared.api.wait(raw, &event.handle.raw)?;
            join(dependencies, history);
            Ok(())
        })
    }

    fn transferred(&self, bytes: usize) {
        self.handle.counts.transfers.fetch_add(1, Ordering::Relaxed);
        self.handle.counts.transferred_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl<A: Api> Stream for AcceleratorStream<A> {
    type Event = AcceleratorEvent<A>;

    fn id(&self) -> StreamId {
        self.handle.id
    }

    fn level(&self) -> i32 {
        self.handle.level
    }

    fn record(&self, event: &AcceleratorEvent<A>) -> Result<(), Error> {
        let StreamHandle { raw, shared, .. } = &*self.handle;
        self.handle.submit_even_if_failed(|dependencies| {
            // The event and its dependencies change under one lock, so that no other thread
            // combines the new point with the dependencies of the previous one, or the reverse.
            let mut recorded = lock(&event.handle.recorded);
            shared.api.record(raw, &event.handle.raw)?;
            *recorded = Some(dependencies.clone());
            Ok(())
        })
    }

    fn wait(&self, event: &AcceleratorEvent<A>) -> Result<(), Error> {
        self.wait_for(event, Dependencies::join)
    }

    fn wait_ignoring_failure(&self, event: &AcceleratorEvent<A>) -> Result<(), Error> {
        self.wait_for(event, |_, _| ())
    }

    unsafe fn copy(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
        check_copy(to, from)?;
        let StreamHandle { raw, shared, .. } = &*self.handle;
        self.handle.submit(|_| Ok(()))?;
        if !to.is_empty() {
            // This call is made without the lock, because for pageable memory the driver may wait
            // for all earlier work.
            // SAFETY: the caller meets the requirements of `Stream::copy`. `check_copy` found equal
            // lengths.
            unsafe { shared.api.copy(raw, to, from) }?;
        }
        self.transferred(to.len());
        Ok(())
    }

    unsafe fn fill(&self, to: MemoryRange, byte: u8) -> Result<(), Error> {
        let StreamHandle { raw, shared, .. } = &*self.handle;
        self.handle.submit(|_| match to.is_empty() {
            true => Ok(()),
            // SAFETY: the caller meets the requirements of `Stream::fill`.
            false => unsafe { shared.api.fill(raw, to, byte) },
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
            shared.api.launch_host_fn(raw, Box::new(run))
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
        self.handle.submit(|_| shared.api.prefetch(raw, range, to == MemoryLocation::Device))
    }

    fn query(&self) -> Result<Status, Error> {
        let (operations, submitted_ns) = self.handle.counted();
        // Work that was submitted before the failure was known may still be running.
        if !self.handle.shared.api.is_done(&self.handle.raw)? {
            return Ok(Status::Pending);
        }
        self.handle.completed(operations, submitted_ns);
        self.handle.error().map(|()| Status::Ready)
    }

    fn synchronize(&self) -> Result<(), Error> {
        check_may_block()?;
        let (operations, submitted_ns) = self.handle.counted();
        self.handle.shared.api.synchronize(&self.handle.raw)?;
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
        let Counts { operations, transfers, transferred_bytes, launches, completions, .. } =
            &self.handle.counts;
        let completions = lock(completions);
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StreamMetrics {
            operations: read(operations),
            completed: completions.operations,
            transfers: read(transfers),
            transferred_bytes: read(transferred_bytes),
            launches: read(launches),
            latency: Duration::from_nanos(completions.latency_ns),
        }
    }
}

/// An [`Event`] of an [`AcceleratorDevice`]. Its times come from the device.
#[derive(Debug)]
pub struct AcceleratorEvent<A: Api> {
    handle: Arc<EventHandle<A>>,
}

impl<A: Api> Clone for AcceleratorEvent<A> {
    fn clone(&self) -> Self {
        Self { handle: Arc::clone(&self.handle) }
    }
}

#[derive(Debug)]
struct EventHandle<A: Api> {
    raw: RawEvent,
    /// The dependencies of the point that was recorded last, or `None` before the first record.
    recorded: Mutex<Option<Dependencies>>,
    shared: Arc<Shared<A>>,
}

impl<A: Api> Drop for EventHandle<A> {
    fn drop(&mut self) {
        let raw = self.raw.take();
        if check_may_block().is_err() {
            lock(&self.shared.deferred).push(Deferred::Event(raw));
            return;
        }
        // SAFETY: the API created the event, and no other handle to it exists.
        unsafe { self.shared.api.destroy_event(&raw) };
    }
}

impl<A: Api> AcceleratorEvent<A> {
    /// Returns the error of the work before the recorded point, if that work failed.
    ///
    /// The driver's handle is not exposed, because this method would miss records made through
    /// it.
    fn error(&self) -> Result<(), Error> {
        let recorded = lock(&self.handle.recorded);
        let Some(dependencies) = &*recorded else { return Ok(()) };
        // A failure of the same stream after the point does not count.
        let own = dependencies
            .own
            .get()
            .filter(|(at, _)| *at <= dependencies.operations)
            .map(|(_, error)| error);
        let others = Dependencies { own: Arc::default(), ..dependencies.clone() };
        own.or_else(|| others.failure()).map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl<A: Api> Event for AcceleratorEvent<A> {
    fn query(&self) -> Result<Status, Error> {
        if lock(&self.handle.recorded).is_none() {
            return Ok(Status::Ready);
        }
        if !self.handle.shared.api.is_reached(&self.handle.raw)? {
            return Ok(Status::Pending);
        }
        self.error().map(|()| Status::Ready)
    }

    fn synchronize(&self) -> Result<(), Error> {
        check_may_block()?;
        if lock(&self.handle.recorded).is_some() {
            self.handle.shared.api.wait_for_event(&self.handle.raw)?;
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
            self.handle.shared.api.elapsed_ms(&start.handle.raw, &self.handle.raw)?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.ok_or(not_yet)?.max(0.0)) / 1e3))
    }
}

/// Memory that an [`AcceleratorDevice`] allocated, of any [`MemoryKind`].
#[derive(Debug)]
pub struct AcceleratorMemory<A: Api> {
    allocation: Allocation,
    range: MemoryRange,
    kind: MemoryKind,
    shared: Arc<Shared<A>>,
}

#[derive(Debug)]
enum Allocation {
    Driver {
        start: *mut u8,
        pinned: bool,
    },
    /// The allocation was freed, or moved to a [`DeferredFree`].
    Released,
    Host(#[expect(dead_code, reason = "stored because it owns the memory")] HostBlock),
}

// SAFETY: this value owns memory by its address, and never reads or writes the memory.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl<A: Api> Drop for AcceleratorMemory<A> {
    fn drop(&mut self) {
        self.shared.memory.freed(self.range.len());
        let allocation = std::mem::replace(&mut self.allocation, Allocation::Released);
        if check_may_block().is_err() && matches!(allocation, Allocation::Driver { .. }) {
            lock(&self.shared.deferred).push(Deferred::Memory(allocation, None));
            return;
        }
        // SAFETY: the allocation belongs to this device. `replace` took it from its owner, so it
        // is freed once. The owner guarantees that no stream uses the memory when it drops the
        // value.
        unsafe { self.shared.free(&allocation, None) };
    }
}

// SAFETY: this value alone owns the allocation, which stays valid until the value is dropped. The
// host can access pinned, managed and ordinary host memory.
unsafe impl<A: Api> RawMemory for AcceleratorMemory<A> {
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
        // SAFETY: `slice` checked that `from` lies in the allocation. The caller guarantees that no
        // stream writes to it during the call. `bytes` is exclusively borrowed.
        unsafe { self.shared.api.copy_now(MemoryRange::of(bytes), from) }
    }

    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.range().slice(offset..offset + bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: `slice` checked that `to` lies in the allocation. The caller guarantees that no
        // stream accesses it during the call. The copy only reads `bytes`, which is borrowed.
        unsafe { self.shared.api.copy_now(to, from) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock still protects a consistent value, because no panic can interrupt an update
    // of the value.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
