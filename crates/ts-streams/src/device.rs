// SPDX-License-Identifier: MIT OR Apache-2.0
//! The traits of devices, streams, events and memory.

use std::alloc::Layout;
use std::fmt;
use std::time::Duration;

use crate::id::{DeviceKind, StreamId};
use crate::priority::{PriorityRange, StreamPriority};
use crate::range::{MemoryKind, MemoryRange};
use crate::{Error, StreamMetrics};

/// Properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The implementation.
    pub kind: DeviceKind,
    /// Name of the device, for example the GPU model.
    pub name: String,
    /// Index among the devices of the same kind.
    pub ordinal: u32,
    /// Total memory in bytes, if known.
    pub total_bytes: Option<u64>,
    /// Range of stream priority levels.
    pub priorities: PriorityRange,
    /// Whether all device memory is ordinary host memory, so that no copy to the device is needed.
    pub host_memory: bool,
    /// Whether submitted work runs in the background. If not, it runs only while the host waits or
    /// queries, as on [`SimDevice`](crate::SimDevice).
    pub runs_by_itself: bool,
    /// Whether [`Stream::prefetch`] is supported.
    pub can_prefetch: bool,
}

/// The result of a query that does not block.
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
pub trait Device: Clone + fmt::Debug + Send + Sync + 'static {
    /// The streams of this device.
    type Stream: Stream<Event = Self::Event>;
    /// The events of this device.
    type Event: Event;
    /// The memory of this device.
    type Memory: RawMemory;

    /// Returns the properties of the device.
    fn info(&self) -> &DeviceInfo;

    /// Creates a stream.
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
    /// Dropping the returned value frees the memory at once. The owner must first make sure that no
    /// stream still uses it.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`] if there is not enough memory, or [`Error::Driver`] if a
    /// CUDA driver call fails.
    fn allocate(&self, layout: Layout, kind: MemoryKind) -> Result<Self::Memory, Error>;

    /// Allocates device memory, with undefined contents, for work submitted to `stream` from now
    /// on.
    ///
    /// On CUDA this is `cuMemAllocAsync` on a pool that keeps freed memory.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the device has no stream-ordered allocator, as by default,
    /// and [`Error::OutOfMemory`] if there is not enough memory.
    fn allocate_async(&self, layout: Layout, stream: &Self::Stream) -> Result<Self::Memory, Error> {
        let _ = (layout, stream);
        let device = self.info().name.clone();
        Err(Error::Unsupported { device, what: "stream-ordered allocation" })
    }

    /// Frees memory from [`allocate_async`](Self::allocate_async) once all work submitted to
    /// `stream` so far is done. A stream that has failed frees it too, in the same order.
    ///
    /// # Errors
    /// Returns [`Error::Race`] if a simulated device finds that another stream may still use the
    /// memory, [`Error::Driver`] if a CUDA driver call fails, and [`Error::Unsupported`] if the
    /// device has no stream-ordered allocator. The memory is dropped in each case.
    fn free_async(&self, memory: Self::Memory, stream: &Self::Stream) -> Result<(), Error> {
        let _ = (memory, stream);
        let device = self.info().name.clone();
        Err(Error::Unsupported { device, what: "stream-ordered allocation" })
    }

    /// Blocks until all work submitted to all streams is done.
    ///
    /// # Errors
    /// Returns the first error of a stream, or [`Error::WaitInHostFn`] if called from a host
    /// function.
    fn synchronize(&self) -> Result<(), Error>;
}

/// A marker for a point on a stream. Clones are handles to the same event.
///
/// An event marks the point where it was last recorded. A wait is for the point that the event
/// marks when the wait is submitted; recording the event again does not change earlier waits.
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
    /// Returns whether the recorded point was reached. Does not block.
    ///
    /// # Errors
    /// Returns the error of the work before that point, if it failed.
    fn query(&self) -> Result<Status, Error>;

    /// Blocks until the recorded point is reached.
    ///
    /// # Errors
    /// Returns the same errors as [`query`](Self::query), and [`Error::WaitInHostFn`] if called
    /// from a host function.
    fn synchronize(&self) -> Result<(), Error>;

    /// Returns the device time from `start` to this event, or zero if this event was reached first.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] with a timeout of zero if one of the events was not recorded or
    /// not reached yet, and the same errors as [`query`](Self::query).
    fn elapsed_since(&self, start: &Self) -> Result<Duration, Error>;
}

/// A queue of operations that run in order. Clones are handles to the same stream. Work that was
/// submitted still runs after the last handle is dropped.
///
/// Only [`synchronize`](Stream::synchronize) blocks the host. The exception is CUDA: copies from or
/// to host memory that is not pinned may wait in the driver.
///
/// When an operation fails, later operations on the stream are skipped, and so is work on other
/// streams that [waits](Stream::wait) for it. From then on each such stream returns the error from
/// every call that submits work or waits, except [`record`](Stream::record), until
/// [`take_error`](Stream::take_error).
pub trait Stream: Clone + fmt::Debug + Send + Sync + 'static {
    /// The events of the same device.
    type Event: Event;

    /// Returns the identifier of the stream.
    fn id(&self) -> StreamId;

    /// Returns the priority level of the stream on its device; smaller is more urgent.
    fn level(&self) -> i32;

    /// Records `event` at this point, after all work submitted so far. On a stream that has failed,
    /// the event fails with the same error.
    ///
    /// # Errors
    /// Returns [`Error::Driver`] if a CUDA driver call fails.
    fn record(&self, event: &Self::Event) -> Result<(), Error>;

    /// Makes all work submitted from now on wait, on the device, for the point that `event` marks
    /// now.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed.
    fn wait(&self, event: &Self::Event) -> Result<(), Error>;

    /// Like [`wait`](Self::wait), but work on this stream still runs if the work before the event
    /// failed.
    ///
    /// Use it where only the order matters, for example to reuse memory that another stream has
    /// finished with.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed.
    fn wait_ignoring_failure(&self, event: &Self::Event) -> Result<(), Error>;

    /// Copies `from` to `to`, each in memory of the host or of a device.
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

    /// Sets every byte of `to` to `byte`.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed. A simulated device returns
    /// [`Error::Race`] if the fill is not ordered after a conflicting access.
    ///
    /// # Safety
    /// `to` must fulfill the requirements of [`copy`](Self::copy).
    unsafe fn fill(&self, to: MemoryRange, byte: u8) -> Result<(), Error>;

    /// Runs a function on the host after all earlier work; later work waits for it.
    ///
    /// The function must not wait for streams. On CUDA it must not submit work either. If it
    /// panics, the stream fails.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed. A simulated device returns
    /// [`Error::Race`] if the function is not ordered after an access that conflicts with the
    /// ranges it declares.
    fn launch_host_fn(&self, work: HostFn) -> Result<(), Error>;

    /// Migrates managed memory to where it will be used next.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the device cannot prefetch, and the error of this stream
    /// if it has failed.
    fn prefetch(&self, range: MemoryRange, to: MemoryLocation) -> Result<(), Error>;

    /// Returns whether all submitted work is done. Does not block.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed, once its remaining work has ended.
    fn query(&self) -> Result<Status, Error>;

    /// Blocks until all submitted work is done.
    ///
    /// # Errors
    /// Returns the error of this stream if it has failed, or [`Error::WaitInHostFn`] if called from
    /// a host function.
    fn synchronize(&self) -> Result<(), Error>;

    /// Takes the error of this stream, so that it accepts work again. Does not block.
    ///
    /// Returns `None` if the stream has not failed, or if it cannot recover, as after an error of
    /// the CUDA driver.
    fn take_error(&self) -> Option<Error>;

    /// Returns counters of the work submitted and done so far. Does not block.
    fn metrics(&self) -> StreamMetrics;
}

/// Memory that a device allocated.
///
/// # Safety
/// [`range`](Self::range) must always return the same range, which must be valid memory that
/// belongs to this value alone for as long as the value lives. Unless [`kind`](Self::kind) returns
/// [`MemoryKind::Device`], the host must be able to read and write it directly.
pub unsafe trait RawMemory: fmt::Debug + Send + Sync + 'static {
    /// Returns the address range.
    fn range(&self) -> MemoryRange;

    /// Returns the kind of the memory, which may differ from the kind requested: see
    /// [`MemoryKind`].
    fn kind(&self) -> MemoryKind;

    /// Copies bytes from `offset` into `bytes` on the host. Blocks.
    ///
    /// # Errors
    /// Returns [`Error::Driver`] if a CUDA driver call fails. [`SimDevice`](crate::SimDevice)
    /// returns [`Error::Race`] if a stream may be writing to the bytes.
    ///
    /// # Panics
    /// Panics if the bytes are not all inside the range.
    ///
    /// # Safety
    /// No stream may write to these bytes during the call.
    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error>;

    /// Copies `bytes` from the host to `offset`. Blocks.
    ///
    /// # Errors
    /// Returns the same errors as [`read`](Self::read).
    ///
    /// # Panics
    /// Panics if the bytes are not all inside the range.
    ///
    /// # Safety
    /// No stream may access these bytes during the call.
    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error>;
}

/// A function that runs on the host as work of a stream, with the memory it declares to use.
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
    /// Wraps `run`, with no declared memory accesses.
    pub fn new(run: impl FnOnce() + Send + 'static) -> Self {
        Self { run: Box::new(run), reads: Vec::new(), writes: Vec::new() }
    }

    /// Declares that the function reads `range`, so that [`SimDevice`](crate::SimDevice) checks it
    /// for races.
    #[must_use]
    pub fn reads(mut self, range: MemoryRange) -> Self {
        self.reads.push(range);
        self
    }

    /// Declares that the function writes `range`, so that [`SimDevice`](crate::SimDevice) checks it
    /// for races.
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
