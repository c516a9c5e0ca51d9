// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices with their own memory, streams and events behind an [`Api`]: NVIDIA GPUs through the
//! CUDA driver, and other accelerators through a library like CUDA's runtime.

mod api;
#[cfg(feature = "cuda")]
mod bridge;
#[cfg(feature = "cuda")]
mod cuda;
mod dependencies;
mod event;
mod memory;
#[cfg(feature = "runtime")]
mod runtime;
#[cfg(feature = "cuda")]
mod shared_stream;
mod stream;

use std::alloc::Layout;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use self::api::{Api, RawEvent, RawStream};
#[cfg(feature = "cuda")]
pub use self::bridge::CudarcSlice;
#[cfg(feature = "cuda")]
pub(crate) use self::cuda::status;
#[cfg(feature = "cuda")]
pub use self::cuda::{CudaDevice, CudaEvent, CudaMemory, CudaStream};
pub use self::event::AcceleratorEvent;
use self::event::EventHandle;
pub use self::memory::AcceleratorMemory;
use self::memory::Allocation;
#[cfg(feature = "runtime")]
pub use self::runtime::{
    RuntimeDevice, RuntimeEvent, RuntimeLibrary, RuntimeMemory, RuntimeStream,
};
pub use self::stream::AcceleratorStream;
use self::stream::{Ownership, StreamHandle};
use crate::Error;
use crate::device::{Device, DeviceInfo, Registration, Stream};
use crate::kernel::Kernel;
use crate::memory::HostBlock;
use crate::metrics::{MemoryCounters, MemoryMetrics};
use crate::priority::StreamPriority;
use crate::queue::check_may_block;
use crate::range::{MemoryKind, MemoryRange};

/// A device with its own memory: a `CudaDevice` or a `RuntimeDevice`.
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
    #[cfg(feature = "cuda")]
    Shared(shared_stream::SharedStream),
    Event(RawEvent),
    /// Registered host memory.
    Registration(HostAddress),
}

/// The address of registered host memory.
#[derive(Debug, Clone, Copy)]
struct HostAddress(*mut u8);

// SAFETY: this is only a number for the driver.
unsafe impl Send for HostAddress {}
// SAFETY: as above.
unsafe impl Sync for HostAddress {}

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
                    #[cfg(feature = "cuda")]
                    Deferred::Shared(stream) => drop(stream),
                    Deferred::Event(raw) => self.api.destroy_event(&raw),
                    Deferred::Registration(start) => self.api.unregister(start.0),
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
                // SAFETY: the caller guarantees that the allocation belongs to this device, and
                // that only earlier work on `stream` uses it.
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
        let handle = StreamHandle::new(raw, level, ownership, Arc::clone(&self.shared));
        let handle = Arc::new(handle);
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

// SAFETY: `allocate` asks the driver for the bytes of the layout, and for more if the address is
// not aligned; `allocate_async` refuses it then. Only device memory is not accessible to the host.
// The driver keeps the order of its streams and events, and frees in that order; each method makes
// the call of the driver with the same meaning. Handles keep `Shared`, and with it the library,
// alive. What is dropped in a host function is destroyed later. Streams are compared by `Shared`.
unsafe impl<A: Api> Device for AcceleratorDevice<A> {
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

    unsafe fn register(&self, range: MemoryRange) -> Result<Registration, Error> {
        let (shared, start) = (Arc::clone(&self.shared), HostAddress(range.as_ptr()));
        shared.run_deferred();
        // SAFETY: the caller guarantees that the range is valid until the result is dropped.
        unsafe { shared.api.register(range) }?;
        let process = std::process::id();
        Ok(Registration::new(move || {
            let start = start; // as a whole, so that the closure is `Send`
            if std::process::id() != process {
                return; // a forked process has no part in it
            }
            if check_may_block().is_err() {
                lock(&shared.deferred).push(Deferred::Registration(start));
                return;
            }
            // SAFETY: the memory is registered, and its owner no longer copies it.
            unsafe { shared.api.unregister(start.0) };
        }))
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

    fn load(&self, kernel: &Kernel) -> Result<(), Error> {
        self.shared.api.load(kernel)
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock still protects a consistent value, because no panic can interrupt an update
    // of the value.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
