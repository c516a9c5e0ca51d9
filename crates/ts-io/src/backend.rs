// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fmt;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ts_pool::{Buffer, HostPool};

use crate::fault::Faults;
use crate::{Error, Source};

/// Reads byte ranges, several at a time. Object-safe; all methods may be called from any thread.
pub trait Backend: Send + Sync {
    /// The name it is chosen by.
    fn name(&self) -> &'static str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Starts a read and returns at once; its [`Completion`] goes to the sink that the backend was
    /// made with, from a thread of the backend's own. Order of completion is not order of
    /// submission. The first request of a source that no provider was asked about may wait for the
    /// file to be opened once more.
    ///
    /// # Errors
    /// [`Rejected`] gives the request back, buffers and all; no completion follows.
    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>>;

    /// Takes back every request that has not begun and whose token `wanted` accepts; each completes
    /// with [`Error::Cancelled`] before this returns. Returns how many.
    ///
    /// Reads that have begun are given up where the system can do that, and then complete with the
    /// same error, else as usual; this does not wait for them.
    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize;

    /// Tells of memory that requests will use, which may make reads into it cheaper: `uring`
    /// registers it, if the system lets it. Its pages are then taken from the system and pinned,
    /// and the pool lives at least as long as the backend.
    fn register(&self, pool: &HostPool) {
        let _ = pool;
    }
}

/// What a backend can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether memory must be aligned as [`ReadRequest`] says.
    pub needs_alignment: bool,
    /// Reads it works on at once; more wait in its queue.
    pub max_in_flight: usize,
}

/// One range to read.
///
/// A backend that needs alignment wants, with the multiples that [`Source::direct_alignment`]
/// gives, memory that lies as the file does: the address of each byte's place and the byte's offset
/// in the file differ by a multiple, and so does the length of every buffer but the first, which
/// may begin anywhere, and the last, which may end anywhere. Ends that are not aligned are then
/// read aside, in blocks of that size, and copied.
#[derive(Debug)]
pub struct ReadRequest {
    /// The caller's name for this request, returned in its completion.
    pub token: u64,
    /// Where from.
    pub source: Arc<Source>,
    /// First byte.
    pub offset: u64,
    /// How many bytes must arrive. The rest of the memory is filled as far as the file goes.
    pub required: usize,
    /// Where to, one filled after the other; owned by the backend until the completion.
    pub buffers: Vec<Buffer>,
}

impl ReadRequest {
    /// A read into one buffer.
    pub fn new(
        token: u64,
        source: Arc<Source>,
        offset: u64,
        required: usize,
        buffer: Buffer,
    ) -> Self {
        Self { token, source, offset, required, buffers: vec![buffer] }
    }

    /// Bytes there is room for.
    pub fn room(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.len()).sum()
    }

    /// What this read comes to when it delivered nothing.
    pub(crate) fn failed(self, error: Error) -> Completion {
        Completion { token: self.token, buffers: self.buffers, result: Err(error) }
    }

    pub(crate) fn cancelled(self) -> Completion {
        let error = Error::Cancelled { path: self.source.path().into(), offset: self.offset };
        self.failed(error)
    }

    /// The error of a read that has taken longer than it may.
    pub(crate) fn timed_out(&self, timeout: Duration) -> Error {
        let (path, len) = (self.source.path().into(), self.required);
        Error::TimedOut { path, offset: self.offset, len, timeout }
    }

    /// What `bytes` delivered by `path` come to: enough of them, of the file that was opened, or an
    /// error.
    ///
    /// After the read, so that a change at any moment before its last byte is seen. A file that was
    /// cut is reported as such, with the byte where it now ends.
    pub(crate) fn judged(&self, bytes: usize) -> Result<(), Error> {
        let (source, offset) = (&self.source, self.offset);
        if bytes < self.required {
            let (path, expected) = (source.path().into(), self.required);
            return Err(Error::ShortRead { path, offset, expected, actual: bytes });
        }
        source.verify(offset)
    }

    /// Whether there is room for what is required.
    ///
    /// # Errors
    /// [`Error::NoRoom`].
    pub(crate) fn check_room(&self) -> Result<(), Error> {
        let room = self.room();
        if self.required <= room {
            return Ok(());
        }
        Err(Error::NoRoom { path: self.source.path().into(), required: self.required, room })
    }

    /// Whether the memory is aligned as direct I/O needs it.
    ///
    /// # Errors
    /// [`Error::Misaligned`], [`Error::Unavailable`] when there is no direct I/O for the source.
    pub(crate) fn check_alignment(&self, backend: &str) -> Result<(), Error> {
        let alignment = self.source.direct_alignment().map_err(|reason| Error::Unavailable {
            backend: backend.into(),
            reason: reason.into(),
        })?;
        let (mut place, mut aligned) = (self.offset as usize, true);
        for (index, buffer) in self.buffers.iter().enumerate() {
            aligned &= (place ^ buffer.as_ptr().addr()).is_multiple_of(alignment);
            aligned &= index == 0 || place.is_multiple_of(alignment);
            place = place.wrapping_add(buffer.len());
        }
        if aligned {
            return Ok(());
        }
        let (path, len) = (self.source.path().into(), self.room());
        Err(Error::Misaligned { path, offset: self.offset, len, alignment })
    }
}

/// A read that ended, well or not.
#[derive(Debug)]
pub struct Completion {
    /// The request's token.
    pub token: u64,
    /// The request's buffers; after an error their content is unspecified, and there may be none:
    /// after [`Error::TimedOut`] the system can still write to them, and they go back to their pool
    /// when it no longer can.
    pub buffers: Vec<Buffer>,
    /// What came.
    pub result: Result<Transfer, Error>,
}

/// What a read that went well did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// The paths that the bytes took, and how many took each.
    pub paths: Vec<(ReadPath, usize)>,
    /// When the read began and ended, in nanoseconds of [`monotonic_ns`].
    pub started_ns: u64,
    /// See `started_ns`.
    pub finished_ns: u64,
}

impl Transfer {
    /// A read that ends now, all of whose bytes came one way.
    pub fn by(path: ReadPath, bytes: usize, started_ns: u64) -> Self {
        Self { paths: vec![(path, bytes)], started_ns, finished_ns: monotonic_ns() }
    }

    /// Bytes delivered, at least the required ones.
    pub fn bytes(&self) -> usize {
        self.paths.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// How bytes came from a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ReadPath {
    /// Copied from the page cache, which the kernel filled if it had to.
    Buffered,
    /// Copied from a mapping of the file.
    Mapped,
    /// From the device into the buffer, past the page cache.
    Direct,
    /// From the device into the buffer by GPUDirect Storage.
    GpuDirect,
    /// By GPUDirect Storage's library in its compatibility mode: through the host, as any read.
    GpuCompat,
    /// Over the network, from object storage or a web server.
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

    /// Its name, as statistics print it.
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

/// A request that was not taken, and why.
#[derive(Debug)]
pub struct Rejected {
    /// The request as it was.
    pub request: ReadRequest,
    /// The reason.
    pub error: Error,
}

/// How a backend is set up.
#[derive(Debug, Clone)]
pub struct BackendOptions {
    /// Reads in flight at once (for thread-based backends: threads), at least 1.
    pub in_flight: usize,
    /// How long a read may take from its beginning on; then it ends with [`Error::TimedOut`]. At
    /// least 1 ms.
    pub timeout: Duration,
    /// What goes wrong on purpose: nothing, outside of tests.
    pub faults: Faults,
}

impl Default for BackendOptions {
    /// 8 in flight: with requests of some MiB enough to fill an NVMe device, and few enough to
    /// leave a small machine's cores alone (a thread that waits for the device costs no CPU time).
    /// A minute for each: disks that spin up and busy network disks answer within it.
    fn default() -> Self {
        Self { in_flight: 8, timeout: Duration::from_secs(60), faults: Faults::default() }
    }
}

impl BackendOptions {
    /// Reads in flight at once, as many as make sense.
    pub(crate) fn depth(&self) -> usize {
        self.in_flight.clamp(1, 4096)
    }

    /// The timeout, as clocks can count it.
    pub(crate) fn deadline(&self) -> Duration {
        self.timeout.clamp(Duration::from_millis(1), Duration::from_secs(1_000_000_000))
    }
}

/// Takes completions. Called from the backend's threads: it must not block for long, not panic, and
/// not drop the backend.
pub type CompletionSink = Box<dyn Fn(Completion) + Send + Sync>;

/// A sink that queues completions, for callers without a thread of their own to run.
pub fn completion_queue() -> (CompletionSink, Receiver<Completion>) {
    let (sender, receiver) = channel();
    // A receiver that is gone no longer wants its buffers: dropping the completion frees them.
    (Box::new(move |completion| drop(sender.send(completion))), receiver)
}

/// Nanoseconds since this process first asked; never goes back.
pub fn monotonic_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}
