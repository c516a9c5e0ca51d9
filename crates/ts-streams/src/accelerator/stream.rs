// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams of accelerators.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::api::{Api, RawStream};
use super::dependencies::Dependencies;
use super::event::AcceleratorEvent;
use super::{Deferred, Shared, lock};
use crate::Error;
use crate::cpu::monotonic_ns;
use crate::device::{HostFn, MemoryLocation, Status, Stream};
use crate::id::StreamId;
use crate::kernel::Kernel;
use crate::memory::check_copy;
use crate::metrics::StreamMetrics;
use crate::queue::{Work, check_may_block};
use crate::range::MemoryRange;

/// Counters of a stream. Only queries and synchronization update the completions.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) operations: AtomicU64,
    pub(super) completions: Mutex<Completions>,
    pub(super) transfers: AtomicU64,
    pub(super) transferred_bytes: AtomicU64,
    pub(super) launches: AtomicU64,
    pub(super) submitted_ns: AtomicU64,
    /// When work was submitted to the idle stream last.
    pub(super) began_ns: AtomicU64,
    /// Whether work was submitted since all of it was last seen to be done.
    pub(super) busy: AtomicBool,
}

/// The operations that have completed.
#[derive(Debug, Default)]
pub(super) struct Completions {
    pub(super) operations: u64,
    /// The sum of the times at which they were submitted.
    pub(super) submitted_ns: u64,
    /// The sum of the times from submission until the completion was noticed.
    pub(super) latency_ns: u64,
    /// The number of transfers and launches among them, and how long these took at most.
    pub(super) work: u64,
    pub(super) busy_ns: u64,
    /// When completions were noticed last.
    pub(super) noticed_ns: u64,
}

/// What was submitted at a moment.
#[derive(Debug, Clone, Copy)]
struct Submitted {
    operations: u64,
    /// The sum of the times of submission.
    ns: u64,
    /// The number of transfers and launches.
    work: u64,
}

/// A [`Stream`] of an [`AcceleratorDevice`](crate::AcceleratorDevice).
///
/// Its metrics count completions only when the stream is queried or synchronized, or the metrics
/// are read. Latencies are therefore upper bounds.
#[derive(Debug)]
pub struct AcceleratorStream<A: Api> {
    pub(super) handle: Arc<StreamHandle<A>>,
}

impl<A: Api> Clone for AcceleratorStream<A> {
    fn clone(&self) -> Self {
        Self { handle: Arc::clone(&self.handle) }
    }
}

#[derive(Debug)]
pub(super) struct StreamHandle<A: Api> {
    pub(super) id: StreamId,
    pub(super) level: i32,
    pub(super) raw: RawStream,
    pub(super) ownership: Ownership,
    pub(super) dependencies: Mutex<Dependencies>,
    pub(super) counts: Counts,
    pub(super) shared: Arc<Shared<A>>,
}

/// Whether the drop of the last handle destroys a stream.
#[derive(Debug)]
pub(super) enum Ownership {
    Own,
    External,
    /// A stream of cudarc, which destroys it.
    #[cfg(feature = "cuda")]
    Shared(super::shared_stream::SharedStream),
}

impl<A: Api> Drop for StreamHandle<A> {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.ownership, Ownership::External) {
            Ownership::Own => {}
            Ownership::External => return,
            #[cfg(feature = "cuda")]
            Ownership::Shared(stream) => {
                if check_may_block().is_err() {
                    lock(&self.shared.deferred).push(Deferred::Shared(stream));
                }
                return;
            }
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
    pub(super) fn new(
        raw: RawStream,
        level: i32,
        ownership: Ownership,
        shared: Arc<Shared<A>>,
    ) -> Self {
        Self {
            id: StreamId::unique(),
            level,
            raw,
            ownership,
            dependencies: Mutex::default(),
            counts: Counts::default(),
            shared,
        }
    }

    /// Submits work, or returns the error of the stream if it has failed.
    fn submit(
        &self,
        submit: impl FnOnce(&mut Dependencies) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.error()?;
        self.submit_even_if_failed(submit)
    }

    pub(super) fn submit_even_if_failed(
        &self,
        submit: impl FnOnce(&mut Dependencies) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut dependencies = lock(&self.dependencies);
        dependencies.operations += 1;
        submit(&mut dependencies)?;
        self.counts.operations.fetch_add(1, Ordering::Relaxed);
        let now_ns = monotonic_ns();
        self.counts.submitted_ns.fetch_add(now_ns, Ordering::Relaxed);
        if !self.counts.busy.swap(true, Ordering::Relaxed) {
            self.counts.began_ns.store(now_ns, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Counts everything that was submitted then as completed.
    fn completed(&self, then: Submitted) {
        let counts = &self.counts;
        let mut last = lock(&counts.completions);
        let new = then.operations.saturating_sub(last.operations);
        if new == 0 {
            return;
        }
        let now_ns = monotonic_ns();
        let submitted_ns = then.ns.saturating_sub(last.submitted_ns);
        let work = then.work.saturating_sub(last.work);
        // The stream was idle until the first of these was submitted, or busy with earlier ones.
        let began_ns = counts.began_ns.load(Ordering::Relaxed).max(last.noticed_ns);
        let busy_ns = if work > 0 { now_ns.saturating_sub(began_ns) } else { 0 };
        *last = Completions {
            operations: then.operations,
            submitted_ns: then.ns,
            latency_ns: (last.latency_ns)
                .saturating_add(now_ns.saturating_mul(new).saturating_sub(submitted_ns)),
            work: then.work.max(last.work),
            busy_ns: last.busy_ns.saturating_add(busy_ns),
            noticed_ns: now_ns,
        };
        if counts.operations.load(Ordering::Relaxed) == then.operations {
            counts.busy.store(false, Ordering::Relaxed);
        }
    }

    fn submitted(&self) -> Submitted {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = &self.counts;
        Submitted {
            operations: read(&counts.operations),
            ns: read(&counts.submitted_ns),
            work: read(&counts.transfers) + read(&counts.launches),
        }
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

    unsafe fn launch(&self, kernel: &Kernel, blocks: u32, arguments: &[u64]) -> Result<(), Error> {
        assert_eq!(arguments.len(), kernel.parameters, "each parameter has an argument");
        let StreamHandle { raw, shared, .. } = &*self.handle;
        // SAFETY: the caller meets the requirements of `Stream::launch`.
        self.handle.submit(|_| unsafe { shared.api.launch(raw, kernel, blocks, arguments) })?;
        self.handle.counts.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn submit_foreign(&self, submit: &mut dyn FnMut(*mut c_void)) -> Result<(), Error> {
        let StreamHandle { raw, shared, .. } = &*self.handle;
        self.handle.submit(|_| Ok(()))?;
        // Without the lock, because the call may block.
        shared.api.with_current(&mut || submit(raw.0))
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
        let submitted = self.handle.submitted();
        // Work that was submitted before the failure was known may still be running.
        if !self.handle.shared.api.is_done(&self.handle.raw)? {
            return Ok(Status::Pending);
        }
        self.handle.completed(submitted);
        self.handle.error().map(|()| Status::Ready)
    }

    fn synchronize(&self) -> Result<(), Error> {
        check_may_block()?;
        let submitted = self.handle.submitted();
        self.handle.shared.api.synchronize(&self.handle.raw)?;
        self.handle.completed(submitted);
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
        let _ = self.outstanding(); // asks the driver if there is work
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
            completed_work: completions.work,
            busy: Duration::from_nanos(completions.busy_ns),
        }
    }

    fn outstanding(&self) -> u64 {
        // An idle stream needs no call to the driver.
        let left = || {
            let submitted = self.handle.counts.operations.load(Ordering::Relaxed);
            submitted.saturating_sub(lock(&self.handle.counts.completions).operations)
        };
        if left() > 0 {
            let _ = self.query();
        }
        left()
    }
}
