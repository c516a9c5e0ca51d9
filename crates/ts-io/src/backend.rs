// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ts_pool::{Buffer, HostPool};

use crate::hook::ReadHook;
use crate::source::DEFAULT_TIMEOUT;
use crate::{Error, Source};

/// Reads byte ranges of sources, several at a time. All methods may be called from any thread.
pub trait Backend: Send + Sync {
    /// Returns the name that selects this backend in a [`Registry`](crate::Registry).
    fn name(&self) -> &'static str;

    /// Returns the alignment that this backend needs and the number of reads it performs at once.
    fn capabilities(&self) -> Capabilities;

    /// Queues a read and returns without waiting for it. The backend passes the [`Completion`] to
    /// the sink that it was created with. Completions arrive in any order.
    ///
    /// The first request for a file can block briefly, while the file is opened for direct I/O.
    ///
    /// # Errors
    /// Returns [`Rejected`] with the request, including its buffers, if the backend cannot start
    /// it. No completion follows in that case.
    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>>;

    /// Cancels the requests whose tokens satisfy `wanted`. Returns the number of these requests
    /// that had not started. When this method returns, the requests that had not started have
    /// completed with [`Error::Cancelled`].
    ///
    /// Reads that have started are aborted if the system supports that, and then complete with the
    /// same error. Otherwise they complete as usual. This method does not wait for them.
    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize;

    /// Announces a pool into which later requests will read. This can make these reads cheaper:
    /// `uring` registers the memory with the kernel, if the kernel permits that.
    ///
    /// Registration allocates and pins the memory, and the backend then keeps the pool alive.
    fn register(&self, pool: &HostPool) {
        let _ = pool;
    }
}

/// The alignment that a backend needs and the number of reads that it performs at once. The default
/// needs no alignment and performs one read at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Whether memory must be aligned as [`ReadRequest`] describes.
    pub needs_alignment: bool,
    /// The maximum number of reads in flight. Further requests wait in the backend's queue.
    pub max_in_flight: usize,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self { needs_alignment: false, max_in_flight: 1 }
    }
}

impl Capabilities {
    /// Sets whether memory must be aligned.
    #[must_use]
    pub fn with_needs_alignment(mut self, needs_alignment: bool) -> Self {
        self.needs_alignment = needs_alignment;
        self
    }

    /// Sets the maximum number of reads in flight.
    #[must_use]
    pub fn with_max_in_flight(mut self, max_in_flight: usize) -> Self {
        self.max_in_flight = max_in_flight;
        self
    }
}

/// A range to read and the memory to read it into.
///
/// Backends that need alignment ([`Capabilities::needs_alignment`]) require the following, where
/// the alignment is the number of bytes that [`Source::direct_alignment`] returns:
/// - The memory address and the file offset of each byte are equal modulo the alignment.
/// - Each buffer after the first begins at a file offset that is a multiple of the alignment.
///
/// An unaligned first or last block is read into a bounce buffer and copied.
#[derive(Debug)]
pub struct ReadRequest {
    /// Identifies the request in its completion. Chosen by the caller.
    pub token: u64,
    /// The source to read.
    pub source: Arc<Source>,
    /// The offset of the first byte in the source.
    pub offset: u64,
    /// The number of bytes that must be read. If the buffers are larger, the rest is filled up to
    /// the end of the source.
    pub required: usize,
    /// The memory to fill, one buffer after the other. The backend owns it until the completion.
    pub buffers: Vec<Buffer>,
}

impl ReadRequest {
    /// Creates a request to read into one buffer.
    pub fn new(
        token: u64,
        source: Arc<Source>,
        offset: u64,
        required: usize,
        buffer: Buffer,
    ) -> Self {
        Self { token, source, offset, required, buffers: vec![buffer] }
    }

    /// Returns the total length of the buffers, in bytes.
    pub fn capacity(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.len()).sum()
    }

    /// Turns the request into the completion of a read that failed with `error`.
    pub(crate) fn failed(self, error: Error) -> Completion {
        Completion { token: self.token, buffers: self.buffers, result: Err(error) }
    }

    /// Turns the request into the completion of a cancelled read.
    pub(crate) fn cancelled(self) -> Completion {
        let error = Error::Cancelled { path: self.source.path().into(), offset: self.offset };
        self.failed(error)
    }

    /// Returns the error of a read that exceeded `timeout`.
    pub(crate) fn timed_out(&self, timeout: Duration) -> Error {
        let (path, len) = (self.source.path().into(), self.required);
        Error::TimedOut { path, offset: self.offset, len, timeout }
    }

    /// Checks that a read delivered enough bytes, and that the source has not changed.
    ///
    /// Backends call this after the read, so that a change during the read is detected.
    ///
    /// # Errors
    /// Returns [`Error::ShortRead`] if `bytes` is less than required, and [`Error::Changed`] if the
    /// source has changed since it was opened.
    pub(crate) fn check_delivered(&self, bytes: usize) -> Result<(), Error> {
        let (source, offset) = (&self.source, self.offset);
        if bytes < self.required {
            let (path, expected) = (source.path().into(), self.required);
            return Err(Error::ShortRead { path, offset, expected, actual: bytes });
        }
        source.verify(offset)
    }

    /// Checks that the required bytes fit into the buffers.
    ///
    /// # Errors
    /// Returns [`Error::BufferTooSmall`] if the buffers are too small.
    pub(crate) fn check_capacity(&self) -> Result<(), Error> {
        let capacity = self.capacity();
        if self.required <= capacity {
            return Ok(());
        }
        let path = self.source.path().into();
        Err(Error::BufferTooSmall { path, required: self.required, capacity })
    }

    /// Checks that the memory is aligned for direct I/O.
    ///
    /// # Errors
    /// Returns [`Error::Misaligned`] if the memory is not aligned, and [`Error::Unavailable`] if
    /// the source does not support direct I/O.
    pub(crate) fn check_alignment(&self, backend: &str) -> Result<(), Error> {
        let alignment = self.source.direct_alignment().map_err(|reason| Error::Unavailable {
            backend: backend.into(),
            reason: format!("{}: {reason}", self.source.path().display()),
        })?;
        let (mut position, mut aligned) = (self.offset as usize, true);
        for (index, buffer) in self.buffers.iter().enumerate() {
            aligned &= (position ^ buffer.as_ptr().addr()).is_multiple_of(alignment);
            aligned &= index == 0 || position.is_multiple_of(alignment);
            position = position.wrapping_add(buffer.len());
        }
        if aligned {
            return Ok(());
        }
        let (path, len) = (self.source.path().into(), self.capacity());
        Err(Error::Misaligned { path, offset: self.offset, len, alignment })
    }
}

/// The outcome of a read, with the buffers of the request.
#[derive(Debug)]
pub struct Completion {
    /// The request's token.
    pub token: u64,
    /// The request's buffers. After an error their content is unspecified.
    ///
    /// Empty after [`Error::TimedOut`] if the system can still write to the buffers. They return to
    /// their pool as soon as the system can no longer write to them. Also empty if a library
    /// panicked during the read.
    pub buffers: Vec<Buffer>,
    /// The bytes and times of a successful read, or the error of a failed one.
    pub result: Result<Transfer, Error>,
}

/// The number of bytes that a successful read delivered, and its start and end times.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Transfer {
    /// The number of bytes that each path delivered.
    pub paths: Vec<(ReadPath, usize)>,
    /// The time at which the read started, in nanoseconds, as returned by [`monotonic_ns`].
    pub started_ns: u64,
    /// The time at which the read finished, in nanoseconds, as returned by [`monotonic_ns`].
    pub finished_ns: u64,
}

impl Transfer {
    /// Creates the result of a read that finishes now and whose bytes all took the same path.
    pub fn new(path: ReadPath, bytes: usize, started_ns: u64) -> Self {
        Self { paths: vec![(path, bytes)], started_ns, finished_ns: monotonic_ns() }
    }

    /// Returns the number of bytes delivered, which is at least the number required.
    pub fn bytes(&self) -> usize {
        self.paths.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// The path that bytes took from storage to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ReadPath {
    /// Copied from the page cache, which the kernel filled if necessary.
    Buffered,
    /// Copied from a mapping of the file.
    Mapped,
    /// Read from the device into the buffer, bypassing the page cache.
    Direct,
    /// Read from the device into the buffer by GPUDirect Storage.
    GpuDirect,
    /// Read by the GPUDirect Storage library into host memory, for example in its compatibility
    /// mode.
    GpuCompat,
    /// Read over the network, from object storage, a web server or another machine.
    Network,
}

impl ReadPath {
    /// All paths, for example to print statistics for each.
    pub const ALL: [ReadPath; 6] = [
        ReadPath::Buffered,
        ReadPath::Mapped,
        ReadPath::Direct,
        ReadPath::GpuDirect,
        ReadPath::GpuCompat,
        ReadPath::Network,
    ];

    /// Returns the name of the path in statistics, such as `gpu-direct`.
    pub const fn name(self) -> &'static str {
        match self {
            ReadPath::Buffered => "buffered",
            ReadPath::Mapped => "mapped",
            ReadPath::Direct => "direct",
            ReadPath::GpuDirect => "gpu-direct",
            ReadPath::GpuCompat => "gpu-compat",
            ReadPath::Network => "network",
        }
    }
}

impl fmt::Display for ReadPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A request that a backend did not accept.
#[derive(Debug)]
pub struct Rejected {
    /// The request, unchanged.
    pub request: ReadRequest,
    /// The reason why the backend did not accept the request.
    pub error: Error,
}

/// The configuration of a backend.
///
/// ```
/// use std::time::Duration;
/// use ts_io::BackendOptions;
///
/// let options = BackendOptions::default().with_in_flight(4).with_timeout(Duration::from_secs(5));
/// assert_eq!(options.in_flight, 4);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BackendOptions {
    /// The maximum number of reads in flight, clamped to the range 1 to 4096. `adaptive` passes the
    /// limit to each backend that it uses.
    pub in_flight: usize,
    /// The number of threads of backends that use blocking reads, each of which has one read in
    /// flight. `None`, the default, for `in_flight` threads.
    pub threads: Option<usize>,
    /// The time after which a read fails with [`Error::TimedOut`], counted from its start. Values
    /// below 1 ms count as 1 ms.
    pub timeout: Duration,
    /// The hook that intercepts attempts to read. Only fault injection sets it.
    pub(crate) hook: ReadHook,
}

impl Default for BackendOptions {
    /// Returns options with 8 reads in flight and a timeout of 60 s.
    ///
    /// With requests of a few MiB, 8 reads saturate an NVMe device without occupying all cores of a
    /// small machine. Disks that must spin up and busy network file systems respond within a
    /// minute.
    fn default() -> Self {
        Self { in_flight: 8, threads: None, timeout: DEFAULT_TIMEOUT, hook: ReadHook::default() }
    }
}

impl BackendOptions {
    /// Sets the maximum number of reads in flight.
    #[must_use]
    pub fn with_in_flight(mut self, in_flight: usize) -> Self {
        self.in_flight = in_flight;
        self
    }

    /// Sets the number of threads: see [`threads`](Self::threads).
    #[must_use]
    pub fn with_threads(mut self, threads: Option<usize>) -> Self {
        self.threads = threads;
        self
    }

    /// Sets the time after which a read fails with [`Error::TimedOut`].
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    pub(crate) fn with_hook(mut self, hook: ReadHook) -> Self {
        self.hook = hook;
        self
    }

    /// Returns `in_flight`, clamped to the range 1 to 4096.
    #[cfg(any(target_os = "linux", feature = "object"))]
    pub(crate) fn clamped_in_flight(&self) -> usize {
        self.in_flight.clamp(1, 4096)
    }

    /// Returns `threads`, or else `in_flight`, clamped to the range 1 to 4096.
    pub(crate) fn clamped_threads(&self) -> usize {
        self.threads.unwrap_or(self.in_flight).clamp(1, 4096)
    }

    /// Returns `timeout`, clamped to a range that can be added to an `Instant`.
    pub(crate) fn clamped_timeout(&self) -> Duration {
        self.timeout.clamp(Duration::from_millis(1), Duration::from_secs(1_000_000_000))
    }
}

/// The function that receives completions. Backends call it from their threads, and also in calls
/// such as [`Backend::cancel`]. It must not panic, drop the backend, or block for long.
pub type CompletionSink = Box<dyn Fn(Completion) + Send + Sync>;

/// Creates an unbounded queue of completions. Returns a sink that adds completions to the queue,
/// and the receiving end of the queue.
pub fn completion_queue() -> (CompletionSink, Receiver<Completion>) {
    let (sender, receiver) = channel();
    // If the receiver was dropped, dropping the completion returns its buffers to their pool.
    (Box::new(move |completion| drop(sender.send(completion))), receiver)
}

/// Returns the nanoseconds since the first call in this process. Never decreases.
pub fn monotonic_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Removes and returns the requests whose tokens satisfy `wanted`.
pub(crate) fn take_matching(
    requests: &mut VecDeque<ReadRequest>,
    wanted: &dyn Fn(u64) -> bool,
) -> VecDeque<ReadRequest> {
    let (taken, left) =
        std::mem::take(requests).into_iter().partition(|request| wanted(request.token));
    *requests = left;
    taken
}
