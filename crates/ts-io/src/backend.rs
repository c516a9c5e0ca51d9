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

/// Reads byte ranges, several at a time. All methods may be called from any thread.
pub trait Backend: Send + Sync {
    /// The name that selects this backend.
    fn name(&self) -> &'static str;

    /// What this backend needs and offers.
    fn capabilities(&self) -> Capabilities;

    /// Starts a read and returns without waiting for it. Its [`Completion`] goes to the sink that
    /// the backend was created with, from a thread of the backend, in any order.
    ///
    /// Opens the file for direct I/O if no provider has probed the source before, which may block
    /// briefly.
    ///
    /// # Errors
    /// Returns [`Rejected`] with the request, including its buffers, if the backend cannot start
    /// it. No completion follows in that case.
    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>>;

    /// Cancels the requests whose token `wanted` accepts and returns how many had not started. Each
    /// of those has completed with [`Error::Cancelled`] when this returns.
    ///
    /// Reads that have started are aborted if the system supports that, and then complete with the
    /// same error. Otherwise they complete as usual. This method does not wait for them.
    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize;

    /// Announces memory that requests will use, which may make reads into it cheaper: `uring`
    /// registers it with the kernel if the kernel permits. Registered memory is allocated and
    /// pinned, and the pool lives at least as long as the backend.
    fn register(&self, pool: &HostPool) {
        let _ = pool;
    }
}

/// What a backend needs and offers. The default needs no alignment and reads one request at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Whether memory must be aligned as [`ReadRequest`] says.
    pub needs_alignment: bool,
    /// The number of reads in flight at once. Further requests wait in the backend's queue.
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

    /// Sets the number of reads in flight at once.
    #[must_use]
    pub fn with_max_in_flight(mut self, max_in_flight: usize) -> Self {
        self.max_in_flight = max_in_flight;
        self
    }
}

/// A range to read and the memory to read it into.
///
/// Backends that need alignment ([`Capabilities::needs_alignment`]) require, with the alignment
/// that [`Source::direct_alignment`] returns:
/// - The memory address and the file offset of each byte are equal modulo the alignment.
/// - The length of each buffer is a multiple of the alignment. Only the first may begin, and only
///   the last may end, at any byte.
///
/// An unaligned first or last block is read into a bounce buffer and copied.
#[derive(Debug)]
pub struct ReadRequest {
    /// Identifies the request in its completion. Chosen by the caller.
    pub token: u64,
    /// What to read.
    pub source: Arc<Source>,
    /// The offset of the first byte.
    pub offset: u64,
    /// The number of bytes that must arrive. The rest of the memory is filled as far as the source
    /// reaches.
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

    /// The completion of a read that failed.
    pub(crate) fn failed(self, error: Error) -> Completion {
        Completion { token: self.token, buffers: self.buffers, result: Err(error) }
    }

    /// The completion of a read that was cancelled.
    pub(crate) fn cancelled(self) -> Completion {
        let error = Error::Cancelled { path: self.source.path().into(), offset: self.offset };
        self.failed(error)
    }

    /// The error of a read that exceeded its timeout.
    pub(crate) fn timed_out(&self, timeout: Duration) -> Error {
        let (path, len) = (self.source.path().into(), self.required);
        Error::TimedOut { path, offset: self.offset, len, timeout }
    }

    /// Checks that a read delivered enough bytes, and that the source is the one that was opened.
    ///
    /// Called after the read, so that a change before its last byte is noticed.
    ///
    /// # Errors
    /// Returns [`Error::ShortRead`], which says where the source now ends, or [`Error::Changed`].
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
    /// Returns [`Error::BufferTooSmall`] if they do not.
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
    /// Returns [`Error::Misaligned`] if it is not, and [`Error::Unavailable`] if the source has no
    /// direct I/O.
    pub(crate) fn check_alignment(&self, backend: &str) -> Result<(), Error> {
        let alignment = self.source.direct_alignment().map_err(|reason| Error::Unavailable {
            backend: backend.into(),
            reason: reason.into(),
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

/// The end of a read, successful or not.
#[derive(Debug)]
pub struct Completion {
    /// The request's token.
    pub token: u64,
    /// The request's buffers. After an error their content is unspecified.
    ///
    /// Empty after [`Error::TimedOut`] if the system can still write to them: they then return to
    /// their pool as soon as it no longer can.
    pub buffers: Vec<Buffer>,
    /// What was read, or why the read failed.
    pub result: Result<Transfer, Error>,
}

/// What a successful read did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Transfer {
    /// The number of bytes that each path delivered.
    pub paths: Vec<(ReadPath, usize)>,
    /// When the read started, in nanoseconds of [`monotonic_ns`].
    pub started_ns: u64,
    /// When the read finished, in nanoseconds of [`monotonic_ns`].
    pub finished_ns: u64,
}

impl Transfer {
    /// Creates the result of a read that finishes now and whose bytes all took the same path.
    pub fn new(path: ReadPath, bytes: usize, started_ns: u64) -> Self {
        Self { paths: vec![(path, bytes)], started_ns, finished_ns: monotonic_ns() }
    }

    /// Returns the number of bytes that were delivered: at least the required ones.
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
    /// From the device into the buffer, bypassing the page cache.
    Direct,
    /// From the device into the buffer by GPUDirect Storage.
    GpuDirect,
    /// By the GPUDirect Storage library in its compatibility mode, which reads through the host.
    GpuCompat,
    /// Over the network, from object storage, a web server or another machine.
    Network,
}

impl ReadPath {
    /// All paths.
    pub const ALL: [ReadPath; 6] = [
        ReadPath::Buffered,
        ReadPath::Mapped,
        ReadPath::Direct,
        ReadPath::GpuDirect,
        ReadPath::GpuCompat,
        ReadPath::Network,
    ];

    /// Returns the name that statistics print.
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
    /// Why it was not accepted.
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
    /// The number of reads in flight at once, at least 1. Backends that use blocking reads start
    /// this many threads.
    pub in_flight: usize,
    /// How long a read may take, from its start, before it fails with [`Error::TimedOut`]. At least
    /// 1 ms.
    pub timeout: Duration,
    /// Intercepts the attempts to read. Set by fault injection only.
    pub(crate) hook: ReadHook,
}

impl Default for BackendOptions {
    /// 8 reads in flight and a timeout of 60 s.
    ///
    /// With requests of some MiB, 8 reads saturate an NVMe device and leave the cores of a small
    /// machine alone. Disks that spin up and busy network file systems respond within a minute.
    fn default() -> Self {
        Self { in_flight: 8, timeout: DEFAULT_TIMEOUT, hook: ReadHook::default() }
    }
}

impl BackendOptions {
    /// Sets the number of reads in flight at once.
    #[must_use]
    pub fn with_in_flight(mut self, in_flight: usize) -> Self {
        self.in_flight = in_flight;
        self
    }

    /// Sets how long a read may take.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    pub(crate) fn with_hook(mut self, hook: ReadHook) -> Self {
        self.hook = hook;
        self
    }

    /// `in_flight`, limited to a reasonable range.
    pub(crate) fn clamped_in_flight(&self) -> usize {
        self.in_flight.clamp(1, 4096)
    }

    /// `timeout`, limited to what can be added to an `Instant`.
    pub(crate) fn clamped_timeout(&self) -> Duration {
        self.timeout.clamp(Duration::from_millis(1), Duration::from_secs(1_000_000_000))
    }
}

/// Receives completions. Backends call it from their threads, so it must not panic, drop the
/// backend, or block for long.
pub type CompletionSink = Box<dyn Fn(Completion) + Send + Sync>;

/// Creates a sink that puts completions into a queue, and the receiving end of the queue.
pub fn completion_queue() -> (CompletionSink, Receiver<Completion>) {
    let (sender, receiver) = channel();
    // If the receiver is gone, dropping the completion returns its buffers to their pool.
    (Box::new(move |completion| drop(sender.send(completion))), receiver)
}

/// Returns the nanoseconds since the first call in this process. Never decreases.
pub fn monotonic_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Removes the requests whose token `wanted` accepts from `requests` and returns them.
pub(crate) fn take_matching(
    requests: &mut VecDeque<ReadRequest>,
    wanted: &dyn Fn(u64) -> bool,
) -> VecDeque<ReadRequest> {
    let (taken, left) =
        std::mem::take(requests).into_iter().partition(|request| wanted(request.token));
    *requests = left;
    taken
}
