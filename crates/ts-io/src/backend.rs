// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fmt;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ts_pool::Buffer;

use crate::{Error, Source};

/// Reads byte ranges, several at a time. Object-safe; all methods may be called from any thread.
pub trait Backend: Send + Sync {
    /// The name it is chosen by.
    fn name(&self) -> &'static str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Starts a read and returns at once; its [`Completion`] goes to the sink that the backend was made with,
    /// from a thread of the backend's own. Order of completion is not order of submission.
    ///
    /// # Errors
    /// [`Rejected`] gives the request back, buffer and all; no completion follows.
    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>>;

    /// Takes back every request that has not begun and whose token `wanted` accepts; each completes with
    /// [`Error::Cancelled`] before this returns. Returns how many. Reads that have begun complete as usual.
    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize;
}

/// What a backend can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether offset, length and memory must be multiples of [`Source::direct_alignment`].
    pub needs_alignment: bool,
    /// Reads it works on at once; more wait in its queue.
    pub max_in_flight: usize,
}

/// One range to read.
#[derive(Debug)]
pub struct ReadRequest {
    /// The caller's name for this request, returned in its completion.
    pub token: u64,
    /// Where from.
    pub source: Arc<Source>,
    /// First byte.
    pub offset: u64,
    /// How many bytes must arrive. The rest of the buffer is filled as far as the file goes.
    pub required: usize,
    /// Where to; owned by the backend until the completion.
    pub buffer: Buffer,
}

/// A read that ended, well or not.
#[derive(Debug)]
pub struct Completion {
    /// The request's token.
    pub token: u64,
    /// The request's buffer. After an error its content is unspecified.
    pub buffer: Buffer,
    /// What came.
    pub result: Result<Transfer, Error>,
}

/// What a read that went well did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// Bytes delivered, at least the required ones.
    pub bytes: usize,
    /// The path they took.
    pub path: ReadPath,
    /// When the read began and ended, in nanoseconds of [`monotonic_ns`].
    pub started_ns: u64,
    /// See `started_ns`.
    pub finished_ns: u64,
}

/// How bytes came from a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReadPath {
    /// Copied from the page cache, which the kernel filled if it had to.
    Buffered,
    /// From the device into the buffer, past the page cache.
    Direct,
}

impl ReadPath {
    /// All paths.
    pub const ALL: [ReadPath; 2] = [ReadPath::Buffered, ReadPath::Direct];

    /// Its name, as statistics print it.
    pub const fn name(self) -> &'static str {
        match self {
            ReadPath::Buffered => "buffered",
            ReadPath::Direct => "direct",
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackendOptions {
    /// Reads in flight at once (for thread-based backends: threads), at least 1.
    pub in_flight: usize,
}

impl Default for BackendOptions {
    /// 8 in flight: with requests of some MiB enough to fill an NVMe device, and few enough to leave a small
    /// machine's cores alone (a thread that waits for the device costs no CPU time).
    fn default() -> Self {
        Self { in_flight: 8 }
    }
}

/// Takes completions. Called from the backend's threads; it must not block for long.
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
