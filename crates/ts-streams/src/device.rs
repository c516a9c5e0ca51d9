// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a device is: streams, events and memory.

use std::alloc::Layout;
use std::fmt;
use std::time::Duration;

use crate::memory::{MemoryKind, MemoryRange};
use crate::priority::{PriorityRange, StreamPriority};
use crate::{Error, StreamMetrics};

/// Which implementation a device is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// [`CpuDevice`](crate::CpuDevice).
    Cpu,
    /// [`SimDevice`](crate::SimDevice).
    Sim,
    /// `CudaDevice`, with the feature `cuda`.
    Cuda,
}

/// What is known of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its implementation.
    pub kind: DeviceKind,
    /// What it is called.
    pub name: String,
    /// Its number among those of its kind.
    pub ordinal: u32,
    /// Its memory in bytes, if that is known.
    pub total_bytes: Option<u64>,
    /// The urgencies it tells apart.
    pub priorities: PriorityRange,
    /// Whether all its memory is the host's own, so that nothing has to be copied to it.
    pub host_memory: bool,
    /// Whether submitted work goes on by itself, and not only while the host waits or asks.
    pub runs_by_itself: bool,
    /// Whether [`Stream::prefetch`] does something.
    pub can_prefetch: bool,
}

/// Names a stream for as long as the process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Whether what was asked about has been reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// All of it is done.
    Ready,
    /// Some of it is not.
    Pending,
}

/// Where managed memory is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLocation {
    /// On the stream's device.
    Device,
    /// On the host.
    Host,
}

/// A device: a place that runs what is submitted to its streams, each in its order. Cloning gives
/// another handle.
pub trait Device: Clone + fmt::Debug + Send + Sync + 'static {
    /// Its streams.
    type Stream: Stream<Event = Self::Event>;
    /// Its events.
    type Event: Event;
    /// Its memory.
    type Memory: RawMemory;

    /// What is known of it.
    fn info(&self) -> &DeviceInfo;

    /// A new stream.
    ///
    /// # Errors
    /// [`Error::Thread`], [`Error::Driver`].
    fn create_stream(&self, priority: StreamPriority) -> Result<Self::Stream, Error>;

    /// Whether a stream was created from this handle or a clone of it.
    fn owns(&self, stream: &Self::Stream) -> bool;

    /// A new event, which nothing has been recorded in: to wait for it is to wait for nothing.
    ///
    /// # Errors
    /// [`Error::Driver`].
    fn create_event(&self) -> Result<Self::Event, Error>;

    /// Memory, which is free when the value is dropped: not before streams are done with it, which
    /// is the owner's to see to. What it holds is undefined. May block.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Unsupported`].
    fn allocate(&self, layout: Layout, kind: MemoryKind) -> Result<Self::Memory, Error>;

    /// Memory of the device from an allocator of its own that goes by the order of streams, for
    /// work that is submitted to `stream` from now on: CUDA's is `cuMemAllocAsync`, with a pool
    /// that keeps what is freed. What it holds is undefined.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Unsupported`] where there is none, as by default.
    fn allocate_in_order(
        &self,
        layout: Layout,
        stream: &Self::Stream,
    ) -> Result<Self::Memory, Error> {
        let _ = (layout, stream);
        let device = self.info().name.clone();
        Err(Error::Unsupported { device, what: "allocator in the order of streams" })
    }

    /// Gives such memory back when all that was submitted to `stream` by now is done.
    ///
    /// Also a stream that failed does so, in its turn.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Race`] when a simulation finds that others may use it;
    /// [`Error::Unsupported`] where there is no such memory. It is dropped then.
    fn free_in_order(&self, memory: Self::Memory, stream: &Self::Stream) -> Result<(), Error> {
        let _ = (memory, stream);
        let device = self.info().name.clone();
        Err(Error::Unsupported { device, what: "allocator in the order of streams" })
    }

    /// Blocks until all that was submitted to all streams is done.
    ///
    /// # Errors
    /// The first that a stream reports; [`Error::WaitInHostFn`].
    fn synchronize(&self) -> Result<(), Error>;
}

/// A point on a stream. Cloning gives another handle.
///
/// It stands for where it was last recorded; who waits for it waits for where it was recorded then,
/// whatever happens to it later.
pub trait Event: Clone + fmt::Debug + Send + Sync + 'static {
    /// Whether its point has been reached. Does not block.
    ///
    /// # Errors
    /// Why the work before it failed.
    fn query(&self) -> Result<Status, Error>;

    /// Blocks until its point has been reached.
    ///
    /// # Errors
    /// As [`query`](Self::query); [`Error::WaitInHostFn`].
    fn synchronize(&self) -> Result<(), Error>;

    /// The time on the device from `start` to this, both reached; zero when this was reached first.
    ///
    /// # Errors
    /// [`Error::TimedOut`] with no timeout when one of them was not recorded, or is not reached; as
    /// [`query`](Self::query).
    fn elapsed_since(&self, start: &Self) -> Result<Duration, Error>;
}

/// Work in order. Cloning gives another handle; when the last one is dropped, what was submitted is
/// still done.
///
/// No call blocks the host but [`synchronize`](Stream::synchronize), and on a device of CUDA copies
/// from and to memory of the host that is not pinned, for which the driver may wait. When work
/// fails, what is behind it on the stream and what waits for it elsewhere is not run; every such
/// stream reports the error from then on, whatever is asked of it, until the error is
/// [taken](Stream::take_error).
pub trait Stream: Clone + fmt::Debug + Send + Sync + 'static {
    /// Its device's events.
    type Event: Event;

    /// Its name.
    fn id(&self) -> StreamId;

    /// The level of urgency that it has on its device.
    fn level(&self) -> i32;

    /// Makes `event` stand for this point: all that was submitted so far. Also of a stream that
    /// failed: the event fails with it.
    ///
    /// # Errors
    /// [`Error::Driver`].
    fn record(&self, event: &Self::Event) -> Result<(), Error>;

    /// Has all that is submitted from now on wait for what `event` stands for now, on the device.
    ///
    /// # Errors
    /// That of work on this stream.
    fn wait(&self, event: &Self::Event) -> Result<(), Error>;

    /// As [`wait`](Self::wait), but in time only: what failed before the event fails nothing here.
    /// For who is to have what others are done with, however that went.
    ///
    /// # Errors
    /// That of work on this stream.
    fn follow(&self, event: &Self::Event) -> Result<(), Error>;

    /// Copies, from or to the host or a device.
    ///
    /// # Errors
    /// [`Error::BadCopy`]; that of work on this stream.
    ///
    /// # Safety
    /// Both ranges are memory that the device reaches, until the stream has passed this point;
    /// nobody writes `from` and nobody else uses `to` while it is done, which is whenever other
    /// work orders it: on this stream, or through events and waits.
    unsafe fn copy(&self, to: MemoryRange, from: MemoryRange) -> Result<(), Error>;

    /// Sets every byte to `byte`.
    ///
    /// # Errors
    /// That of work on this stream.
    ///
    /// # Safety
    /// As [`copy`](Self::copy) for `to`.
    unsafe fn fill(&self, to: MemoryRange, byte: u8) -> Result<(), Error>;

    /// Runs a function of the host when all before it is done; what is behind it waits for it. It
    /// must not wait for streams, nor submit to them on a device of CUDA. When it panics, the
    /// stream fails.
    ///
    /// # Errors
    /// That of work on this stream.
    fn launch_host_fn(&self, work: HostFn) -> Result<(), Error>;

    /// Moves managed memory to where it will be used.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where memory does not move; that of work on this stream.
    fn prefetch(&self, range: MemoryRange, to: MemoryLocation) -> Result<(), Error>;

    /// Whether all that was submitted is over. Does not block.
    ///
    /// # Errors
    /// That of work on this stream, once the rest is over too.
    fn query(&self) -> Result<Status, Error>;

    /// Blocks until all that was submitted is done.
    ///
    /// # Errors
    /// That of work on this stream; [`Error::WaitInHostFn`].
    fn synchronize(&self) -> Result<(), Error>;

    /// Takes the failure of this stream, if it has one: it takes work again. `None` also for a
    /// failure that nothing but the end of the process mends, as those of CUDA are. Does not block.
    fn take_error(&self) -> Option<Error>;

    /// What was submitted and done so far. Does not block.
    fn metrics(&self) -> StreamMetrics;
}

/// Memory of a device, or of the host for a device.
///
/// # Safety
/// [`range`](Self::range) is always the same, and is memory that is there, and nobody else's, for
/// as long as this value; the host may read and write it as its own if [`kind`](Self::kind) is not
/// [`MemoryKind::Device`].
pub unsafe trait RawMemory: fmt::Debug + Send + Sync + 'static {
    /// Where it is.
    fn range(&self) -> MemoryRange;

    /// Of what kind it is, which may not be what was asked for: see [`MemoryKind`].
    fn kind(&self) -> MemoryKind;

    /// Copies bytes at `offset` to the host. Blocks.
    ///
    /// # Errors
    /// [`Error::Driver`]; on [`SimDevice`](crate::SimDevice) also [`Error::Race`].
    ///
    /// # Panics
    /// If they are not all inside.
    ///
    /// # Safety
    /// No stream writes to these bytes now.
    unsafe fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error>;

    /// Copies bytes of the host to `offset`. Blocks.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Panics
    /// If they are not all inside.
    ///
    /// # Safety
    /// No stream uses these bytes now.
    unsafe fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error>;
}

/// A function of the host that runs on a stream, and the memory that it uses.
pub struct HostFn {
    pub(crate) run: Box<dyn FnOnce() + Send>,
    pub(crate) reads: Vec<MemoryRange>,
    pub(crate) writes: Vec<MemoryRange>,
}

impl HostFn {
    /// One that uses no memory of streams, or none that is said.
    pub fn new(run: impl FnOnce() + Send + 'static) -> Self {
        Self { run: Box::new(run), reads: Vec::new(), writes: Vec::new() }
    }

    /// Says that it reads memory, which [`SimDevice`](crate::SimDevice) looks after.
    #[must_use]
    pub fn reading(mut self, range: MemoryRange) -> Self {
        self.reads.push(range);
        self
    }

    /// Says that it writes memory, which [`SimDevice`](crate::SimDevice) looks after.
    #[must_use]
    pub fn writing(mut self, range: MemoryRange) -> Self {
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
