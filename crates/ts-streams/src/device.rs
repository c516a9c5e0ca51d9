// SPDX-License-Identifier: MIT OR Apache-2.0
//! The traits of devices, streams, events and memory.

use std::alloc::Layout;
use std::ffi::c_void;
use std::fmt;
use std::time::Duration;

use crate::id::{DeviceKind, StreamId};
use crate::kernel::Kernel;
use crate::priority::{PriorityRange, StreamPriority};
use crate::range::{MemoryKind, MemoryRange};
use crate::{Error, StreamMetrics};

/// Properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The kind of the device: host, simulated GPU or NVIDIA GPU.
    pub kind: DeviceKind,
    /// Name of the device, for example the GPU model.
    pub name: String,
    /// Index among the devices of the same kind, from 0.
    pub ordinal: u32,
    /// Total memory in bytes, if known.
    pub total_bytes: Option<u64>,
    /// Range of stream priority levels.
    pub priorities: PriorityRange,
    /// Whether all device memory is ordinary host memory, so that no copy to the device is needed.
    /// A simulated GPU reports `false`, as a real GPU does.
    pub host_memory: bool,
    /// Whether submitted work runs in the background. If not, it runs only while the host waits or
    /// queries, as on [`SimDevice`](crate::SimDevice).
    pub runs_by_itself: bool,
    /// Whether [`Stream::prefetch`] is supported.
    pub can_prefetch: bool,
}

/// The status of submitted work, as returned by [`Stream::query`] and [`Event::query`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// All of the work is done.
    Ready,
    /// Some of the work is not done yet.
    Pending,
}

/// The destination of a prefetch of managed memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLocation {
    /// The device of the stream.
    Device,
    /// The host.
    Host,
}

/// Host memory that a device copies without staging, from [`Device::register`], until this value is
/// dropped.
pub struct Registration(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Registration {
    /// Creates a registration that ends with a call of `end`.
    pub(crate) fn new(end: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(end)))
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Registration")
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(end) = self.0.take() {
            end();
        }
    }
}

/// A device that runs the work submitted to its streams. Clones are handles to the same device.
///
/// Code that is generic over `Device` runs on the host, on the simulated GPU and on CUDA GPUs.
///
/// # Examples
/// ```
/// use ts_streams::{
///     CpuDevice, Device, Error, HostFn, SimDevice, SimOptions, Stream, StreamPriority,
/// };
///
/// fn run<D: Device>(device: &D) -> Result<(), Error> {
///     let stream = device.create_stream(StreamPriority::Normal)?;
///     stream.launch_host_fn(HostFn::new(|| println!("on a stream")))?;
///     stream.synchronize()
/// }
///
/// run(&CpuDevice::new()?)?;
/// run(&SimDevice::new(SimOptions::default()))?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Safety
/// Pools and engines give out memory of a device as slices, and reuse it by the order of its
/// streams. So an implementer promises, for the device, its streams, events and memory:
///
/// - **Memory.** [`allocate`](Self::allocate) and [`allocate_async`](Self::allocate_async) return
///   at least `layout.size()` bytes, aligned to `layout.align()`, or an error. Only a request for
///   [`MemoryKind::Device`] may return memory that the host cannot access. With
///   [`DeviceInfo::host_memory`], the host can access all memory.
/// - **Order.** A stream runs each operation at most once, after the operations submitted to it
///   before and after the events that it waits for, whether or not these failed. A copy or a fill
///   accesses the ranges that it was submitted with, and no others.
/// - **Ends.** An event is reached, `query` returns [`Status::Ready`], and `synchronize` returns
///   something else than [`Error::WaitInHostFn`] only when all work before that point has ended and
///   accesses no memory any more.
/// - **Frees.** Memory passed to [`free_async`](Self::free_async) stays valid until the work
///   submitted to the stream before has ended. Memory, streams and events stay valid as long as a
///   handle to them or submitted work that uses them.
/// - **Identity.** Clones are the same device, stream or event. [`StreamId`]s are those of
///   [`StreamId::unique`], one for each stream, and [`owns`](Self::owns) returns `true` only for
///   streams of this device.
///
/// [`conformance::check`](crate::conformance::check) tests these promises; it cannot prove them. A
/// safe implementation does not compile:
///
/// ```compile_fail,E0200
/// # use ts_streams::*;
/// # use std::alloc::Layout;
/// # #[derive(Debug, Clone)]
/// # struct Short(CpuDevice);
/// impl Device for Short {
/// #   type Stream = CpuStream;
/// #   type Event = CpuEvent;
/// #   type Memory = CpuMemory;
/// #   fn info(&self) -> &DeviceInfo { self.0.info() }
/// #   fn create_stream(&self, p: StreamPriority) -> Result<CpuStream, Error> {
/// #       self.0.create_stream(p)
/// #   }
/// #   fn owns(&self, stream: &CpuStream) -> bool { self.0.owns(stream) }
/// #   fn create_event(&self) -> Result<CpuEvent, Error> { self.0.create_event() }
///     fn allocate(&self, layout: Layout, kind: MemoryKind) -> Result<CpuMemory, Error> {
///         self.0.allocate(Layout::new::<u8>(), kind) // too short
///     }
/// #   fn synchronize(&self) -> Result<(), Error> { self.0.synchronize() }
///     // ...
/// }
/// ```
pub unsafe trait Device: Clone + fmt::Debug + Send + Sync + 'static {
    /// The streams of this device.
    type Stream: Stream<Event = Self::Event>;
    /// The events of this device.
    type Event: Event;
    /// The memory of this device.
    type Memory: RawMemory;

    /// Returns the properties of the device.
    fn info(&self) -> &DeviceInfo;

    /// Returns how many bytes of the device's memory no program uses now, if this is known.
    ///
    /// # Errors
    /// Returns [`Error::Driver`] if a driver call fails.
    fn available_bytes(&self) -> Result<Option<u64>, Error> {
        Ok(None)
    }

    /// Creates a stream. Its priority is clamped to the range of the device.
    ///
    /// # Errors
    /// Returns [`Error::Driver`] if a CUDA driver call fails.
    fn create_stream(&self, priority: StreamPriority) -> Result<Self::Stream, Error>;

    /// Returns whether `stream` was created from this handle or a clone of it.
    fn owns(&self, stream: &Self::Stream) -> bool;

    /// Creates an event. Waiting for an event that was never recorded returns at once.
    ///
    /// # Errors
    /// Returns [`Error::Driver`] if a CUDA driver call fails.
    fn create_event(&self) -> Result<Self::Event, Error>;

    /// Allocates memory with undefined contents. May block.
    ///
    /// `layout` gives the size in bytes and the alignment. The returned value owns the memory.
    /// Before the value is dropped, its owner must make sure that no stream still uses the memory:
    /// the drop may free the memory at once.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`] if there is not enough memory, or [`Error::Driver`] if a
    /// CUDA driver call fails.
    fn allocate(&self, layout: Layout, kind: MemoryKind) -> Result<Self::Memory, Error>;

    /// Locks the pages of host memory, so that streams copy it without staging, as if it was
    /// [`MemoryKind::PinnedHost`]. May block: locking takes about as long as writing the memory.
    ///
    /// # Errors
    /// - [`Error::Unsupported`]: the device cannot register memory. The default implementation
    ///   always returns this error.
    /// - [`Error::Driver`]: a call failed, for example because too much memory is locked.
    ///
    /// # Safety
    /// The range must stay valid until the result is dropped and all copies of it have ended. If a
    /// host function of a stream drops the result, the registration ends at a later call to the
    /// device, and the range must stay valid until then. No page of it may be pinned or registered
    /// already.
    unsafe fn register(&self, range: MemoryRange) -> Result<Registration, Error> {
        let _ = range;
        let device = self.info().name.clone();
        Err(Error::Unsupported { device, what: "registering host memory" })
    }

    /// Allocates device memory, with undefined contents, for work submitted to `stream` from now
    /// on.
    ///
    /// Free the memory with [`free_async`](Self::free_async). On CUDA the memory comes from
    /// `cuMemAllocAsync` and a pool that keeps freed memory.
    ///
    /// # Errors
    /// - [`Error::Unsupported`]: the device has no stream-ordered allocator, or the alignment is
    ///   larger than the allocator supports. The default implementation always returns this error.
    /// - [`Error::OutOfMemory`]: there is not enough memory.
    /// - [`Error::Driver`]: a CUDA driver call failed.
    fn allocate_async(&self, layout: Layout, stream: &Self::Stream) -> Result<Self::Memory, Error> {
        let _ = (layout, stream);
        let device = self.info().name.clone();
        Err(Error::Unsupported { device, what: "stream-ordered allocation" })
    }

    /// Frees memory from [`allocate_async`](Self::allocate_async) once all work submitted to
    /// `stream` so far is done. Does not block. A stream that has failed still frees the memory, in
    /// the same order.
    ///
    /// # Errors
    /// - [`Error::Race`]: a simulated device found that another stream may still use the memory.
    /// - [`Error::Driver`]: a CUDA driver call failed.
    /// - [`Error::Unsupported`]: the device has no stream-ordered allocator.
    ///
    /// The call takes ownership of `memory` even if it returns an error.
    fn free_async(&self, memory: Self::Memory, stream: &Self::Stream) -> Result<(), Error> {
        let _ = (memory, stream);
        let device = self.info().name.clone();
        Err(Error::Unsupported { device, what: "stream-ordered allocation" })
    }

    /// Loads the module of a kernel, so that [`Stream::launch`] does not have to. May block while
    /// the driver compiles it.
    ///
    /// # Errors
    /// - [`Error::Unsupported`]: the device runs no kernels. The default implementation always
    ///   returns this error.
    /// - [`Error::Driver`]: the driver refuses the module, or it has no such function.
    fn load(&self, kernel: &Kernel) -> Result<(), Error> {
        let _ = kernel;
        let device = self.info().name.clone();
        Err(Error::Unsupported { device, what: "kernels" })
    }

    /// Blocks until all work submitted to all streams is done, even if a stream has failed.
    ///
    /// # Errors
    /// - The error of a stream that has failed.
    /// - [`Error::WaitInHostFn`]: the call was made in a host function.
    /// - [`Error::Driver`]: a CUDA driver call failed.
    fn synchronize(&self) -> Result<(), Error>;
}

/// A marker for a point on a stream. Clones are handles to the same event.
///
/// An event marks the point where it was last recorded. A wait refers to the point that the event
/// marks when the wait is submitted. Recording the event again does not change earlier waits.
///
/// On CUDA, every method can also return [`Error::Driver`].
///
/// # Examples
/// ```
/// use ts_streams::{CpuDevice, Device, Event, HostFn, Stream, StreamPriority};
///
/// let device = CpuDevice::new()?;
/// let stream = device.create_stream(StreamPriority::Normal)?;
/// let (start, end) = (device.create_event()?, device.create_event()?);
/// stream.record(&start)?;
/// stream.launch_host_fn(HostFn::new(|| println!("work")))?;
/// stream.record(&end)?;
/// end.synchronize()?;
/// println!("the work took {:?}", end.elapsed_since(&start)?);
/// # Ok::<(), ts_streams::Error>(())
/// ```
pub trait Event: Clone + fmt::Debug + Send + Sync + 'static {
    /// Returns whether the recorded point was reached. An event that was never recorded is ready.
    /// Does not block.
    ///
    /// # Errors
    /// Returns the error of the work before that point, if that work failed.
    fn query(&self) -> Result<Status, Error>;

    /// Blocks until the recorded point is reached.
    ///
    /// # Errors
    /// Returns the same errors as [`query`](Self::query), and [`Error::WaitInHostFn`] if called
    /// from a host function.
    fn synchronize(&self) -> Result<(), Error>;

    /// Returns the time on the device from `start` to this event, or zero if this event was reached
    /// first. Does not block.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] with a timeout of zero if one of the events is not recorded or
    /// not reached yet. Also returns the same errors as [`query`](Self::query).
    fn elapsed_since(&self, start: &Self) -> Result<Duration, Error>;
}

/// A queue of operations that run in order. Clones are handles to the same stream. Submitted work
/// still runs after the last handle is dropped.
///
/// Only [`synchronize`](Stream::synchronize) blocks the host, with one exception: on CUDA, copies
/// from or to host memory that is not pinned may block in the driver. On CUDA, every method that
/// returns a `Result` can also return [`Error::Driver`].
///
/// # Failures
/// When an operation fails, later copies, fills and host functions on the stream are skipped. Work
/// on other streams that [waits](Stream::wait) for the operation is skipped too. On CUDA, copies
/// and fills that were submitted before the failure is known still run.
///
/// On all of these streams, methods that submit work, query or block return the error, except
/// [`record`](Stream::record). [`take_error`](Stream::take_error) clears the error.
pub trait Stream: Clone + fmt::Debug + Send + Sync + 'static {
    /// The events that this stream can record and wait for.
    type Event: Event;

    /// Returns the identifier of the stream.
    fn id(&self) -> StreamId;

    /// Returns the priority level of the stream on its device; smaller is more urgent.
    fn level(&self) -> i32;

    /// Records `event` after all work submitted so far. On a stream that has failed, the event
    /// fails with the same error.
    ///
    /// # Errors
    /// Returns [`Error::Driver`] if a CUDA driver call fails.
    fn record(&self, event: &Self::Event) -> Result<(), Error>;

    /// Makes this stream wait for the point that `event` marks now. All work submitted to the
    /// stream after this call runs after that point. The wait happens on the device and does not
    /// block the host. The event may be one of another device of the same kind.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed, and [`Error::MixedDevices`] if it cannot
    /// wait for events of this device. For an order that works between all devices, use
    /// [`MultiStreamCoordinator::order`](crate::MultiStreamCoordinator::order).
    fn wait(&self, event: &Self::Event) -> Result<(), Error>;

    /// Makes all later work on this stream wait for `event`, as [`wait`](Self::wait) does. The
    /// later work still runs if the work before the event failed.
    ///
    /// Use this method where only the order matters, for example to reuse memory that another
    /// stream has finished with.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed.
    fn wait_ignoring_failure(&self, event: &Self::Event) -> Result<(), Error>;

    /// Submits a copy of the bytes in `from` to `to`. Each range is in host or device memory.
    ///
    /// # Errors
    /// Returns [`Error::BadCopy`] if the lengths differ or the ranges overlap, and the error of
    /// this stream if it has failed. A simulated device returns [`Error::Race`] if the copy is not
    /// ordered after a conflicting access.
    ///
    /// # Safety
    /// Until the copy is done, both ranges must be valid memory that the device can access. While
    /// it runs, nothing may write to `from` or access `to`. The copy may run at any time that the
    /// ordering of the stream and its waits allows.
    unsafe fn copy(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error>;

    /// Submits a fill, which sets every byte of `to` to `byte`.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed. A simulated device returns
    /// [`Error::Race`] if the fill is not ordered after a conflicting access.
    ///
    /// # Safety
    /// `to` must meet the requirements of [`copy`](Self::copy).
    unsafe fn fill(&self, to: MemoryRange, byte: u8) -> Result<(), Error>;

    /// Submits a function that runs on the host after all earlier work on this stream. Later work
    /// waits for the function.
    ///
    /// The function must not wait for streams. On CUDA it must not submit work either. If it
    /// panics, the stream fails.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed. A simulated device returns
    /// [`Error::Race`] if the function is not ordered after an access that conflicts with the
    /// ranges it declares.
    fn launch_host_fn(&self, work: HostFn) -> Result<(), Error>;

    /// Submits a kernel, which runs in this many blocks of threads. Loads its module if no call did
    /// before.
    ///
    /// # Errors
    /// Returns the errors of [`Device::load`], and the error of this stream if it has failed. The
    /// default implementation always returns [`Error::Unsupported`].
    ///
    /// # Panics
    /// May panic if the number of arguments is not that of [`Kernel::parameters`].
    ///
    /// # Safety
    /// With these arguments, the kernel must access only memory that is valid until it is done, and
    /// that other code does not access meanwhile in conflict with it.
    unsafe fn launch(&self, kernel: &Kernel, blocks: u32, arguments: &[u64]) -> Result<(), Error> {
        let _ = (kernel, blocks, arguments);
        Err(Error::Unsupported { device: "the device of the stream".into(), what: "kernels" })
    }

    /// Calls `submit`, which submits work of another library, with the driver's handle of this
    /// stream, such as a `CUstream`. The device is the current one of the thread meanwhile.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if streams of the device have no such handles, and the error of this
    /// stream if it has failed. Then `submit` was not called. The default implementation always
    /// returns an error.
    ///
    /// # Safety
    /// The work must meet the requirements of [`copy`](Self::copy).
    unsafe fn submit_foreign(&self, submit: &mut dyn FnMut(*mut c_void)) -> Result<(), Error> {
        let _ = submit;
        let (device, what) = ("the device of the stream".into(), "work of other libraries");
        Err(Error::Unsupported { device, what })
    }

    /// Submits a migration of managed memory to `to`, where it will be used next.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the device cannot prefetch, and the error of this stream
    /// if it has failed.
    fn prefetch(&self, range: MemoryRange, to: MemoryLocation) -> Result<(), Error>;

    /// Returns whether all submitted work is done. Does not block.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed. Until the remaining work has ended,
    /// returns [`Status::Pending`] instead.
    fn query(&self) -> Result<Status, Error>;

    /// Blocks until all submitted work is done.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed, or [`Error::WaitInHostFn`] if called from
    /// a host function.
    fn synchronize(&self) -> Result<(), Error>;

    /// Returns and clears the error of this stream, so that the stream accepts work again. Work
    /// that was submitted before is skipped, and events that were recorded before fail. Does not
    /// block.
    ///
    /// Returns `None` if the stream has not failed, or if it cannot recover, for example after an
    /// error of the CUDA driver.
    fn take_error(&self) -> Option<Error>;

    /// Returns counters of the work submitted and done so far. Does not block.
    fn metrics(&self) -> StreamMetrics;

    /// Returns the number of operations submitted but not completed. Does not block. Cheaper than
    /// [`metrics`](Self::metrics) on most devices.
    fn outstanding(&self) -> u64 {
        self.metrics().outstanding()
    }
}

/// Memory that a device allocated.
///
/// # Safety
/// - [`range`](Self::range) must always return the same range.
/// - The range must be valid memory that this value alone owns, for as long as the value lives.
/// - Unless [`kind`](Self::kind) returns [`MemoryKind::Device`], the host must be able to read and
///   write the memory directly.
pub unsafe trait RawMemory: fmt::Debug + Send + Sync + 'static {
    /// Returns the address range of the memory.
    fn range(&self) -> MemoryRange;

    /// Returns the kind of the memory. It can differ from the requested kind: see [`MemoryKind`].
    fn kind(&self) -> MemoryKind;

    /// Fills `bytes` with a copy of this memory from byte `offset` on. Blocks until the copy is
    /// done.
    ///
    /// # Errors
    /// Returns [`Error::Driver`] if a CUDA driver call fails. [`SimDevice`](crate::SimDevice)
    /// returns [`Error::Race`] if a stream may be writing to the copied part of the memory.
    ///
    /// # Panics
    /// Panics if `offset + bytes.len()` exceeds the length of the memory.
    ///
    /// # Safety
    /// No stream may write to the copied part of the memory during the call.
    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error>;

    /// Copies `bytes` into this memory from byte `offset` on. Blocks until the copy is done.
    ///
    /// # Errors
    /// Returns the same errors as [`read`](Self::read). [`SimDevice`](crate::SimDevice) also
    /// returns [`Error::Race`] if a stream may be reading the overwritten bytes.
    ///
    /// # Panics
    /// Panics if `offset + bytes.len()` exceeds the length of the memory.
    ///
    /// # Safety
    /// No stream may access the overwritten part of the memory during the call.
    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error>;
}

/// A function that runs on the host as work of a stream, and the memory ranges that it accesses.
///
/// # Examples
/// ```
/// use std::sync::mpsc;
/// use ts_streams::{CpuDevice, Device, HostFn, Stream, StreamPriority};
///
/// let device = CpuDevice::new()?;
/// let stream = device.create_stream(StreamPriority::Normal)?;
/// let (sender, receiver) = mpsc::channel();
/// stream.launch_host_fn(HostFn::new(move || {
///     let _ = sender.send("done");
/// }))?;
/// assert_eq!(receiver.recv(), Ok("done"));
/// # Ok::<(), ts_streams::Error>(())
/// ```
pub struct HostFn {
    pub(crate) run: Box<dyn FnOnce() + Send>,
    pub(crate) reads: Vec<MemoryRange>,
    pub(crate) writes: Vec<MemoryRange>,
}

impl HostFn {
    /// Creates work that calls `run` once. [`reads`](Self::reads) and [`writes`](Self::writes)
    /// declare its memory accesses.
    pub fn new(run: impl FnOnce() + Send + 'static) -> Self {
        Self { run: Box::new(run), reads: Vec::new(), writes: Vec::new() }
    }

    /// Declares that the function reads `range`. [`SimDevice`](crate::SimDevice) checks declared
    /// accesses for races.
    #[must_use]
    pub fn reads(mut self, range: MemoryRange) -> Self {
        self.reads.push(range);
        self
    }

    /// Declares that the function writes `range`. [`SimDevice`](crate::SimDevice) checks declared
    /// accesses for races.
    #[must_use]
    pub fn writes(mut self, range: MemoryRange) -> Self {
        self.writes.push(range);
        self
    }
}

impl fmt::Debug for HostFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostFn")
            .field("reads", &self.reads)
            .field("writes", &self.writes)
            .finish_non_exhaustive()
    }
}
