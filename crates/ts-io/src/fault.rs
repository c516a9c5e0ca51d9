// SPDX-License-Identifier: MIT OR Apache-2.0
//! Storage that fails on purpose: any backend, with what the system answers bent before the backend
//! sees it; and, by [`WriteFaults`], whatever writes files.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use ts_io::fault::{Fault, Faults, FaultyProvider};
//! use ts_io::{BackendOptions, BackendProvider, ReadRequest, Registry, Source, completion_queue};
//! use ts_pool::{Budget, HostPool};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("data");
//! std::fs::write(&path, vec![7u8; 10_000])?;
//! let source = Source::open(&path)?;
//! // The first answer is short, the second is "interrupted", the third EIO (5).
//! let faults = Faults::new(|attempt| match attempt.number {
//!     0 => Some(Fault::Short(1000)),
//!     1 => Some(Fault::Errno(4)),
//!     _ => Some(Fault::Errno(5)),
//! });
//! let sources = std::slice::from_ref(&source);
//! let real = Registry::builtin().choose(Some("buffered"), sources)?.provider;
//! let (sink, queue) = completion_queue();
//! let backend = FaultyProvider::new(real, faults).create(&BackendOptions::default(), sink)?;
//! let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20)?;
//! let request = ReadRequest::new(1, source, 0, 10_000, pool.allocate(12_288)?);
//! backend.submit(request).map_err(|rejected| rejected.error)?;
//! let done = queue.recv_timeout(Duration::from_secs(10)).expect("a read of 10 kB ends");
//! assert!(done.result.unwrap_err().to_string().contains("at byte 1000"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::backend::{Backend, BackendOptions, CompletionSink};
use crate::provider::{Availability, BackendProvider};
use crate::{Error, Source, sys};

/// A backend is about to ask the system for bytes.
#[derive(Debug, Clone, Copy)]
pub struct Attempt<'a> {
    /// Of this file or URL,
    pub path: &'a Path,
    /// from this byte on,
    pub offset: u64,
    /// at most so many.
    pub len: usize,
    /// How often these [`Faults`] were asked before.
    pub number: u64,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// No more than so many bytes come, at least one.
    Short(usize),
    /// The system answers with this error number: EINTR is 4, EIO is 5.
    Errno(i32),
    /// The answer takes so much longer.
    Delay(Duration),
    /// There is no answer before [`Faults::release`].
    Stuck,
}

/// Decides for each attempt what goes wrong. Cloning gives another handle to the same one; the
/// default lets everything go right.
#[derive(Clone, Default)]
pub struct Faults(Option<Arc<Inner>>);

type Decide = dyn Fn(&Attempt<'_>) -> Option<Fault> + Send + Sync;

struct Inner {
    decide: Box<Decide>,
    attempts: AtomicU64,
    gate: sys::Gate,
}

impl Faults {
    /// `decide` is called before each attempt, on the thread that makes it; it may do things of its
    /// own, such as truncate the file.
    ///
    /// # Panics
    /// When the system refuses a file descriptor.
    pub fn new(decide: impl Fn(&Attempt<'_>) -> Option<Fault> + Send + Sync + 'static) -> Self {
        let gate = sys::Gate::new().expect("the system has a file descriptor left");
        Self(Some(Arc::new(Inner { decide: Box::new(decide), attempts: AtomicU64::new(0), gate })))
    }

    /// Lets go of all that is stuck, now and from now on.
    pub fn release(&self) {
        if let Some(inner) = &self.0 {
            inner.gate.open();
        }
    }

    /// What goes wrong with the attempt to read `len` bytes at `offset`.
    pub(crate) fn decide(&self, path: &Path, offset: u64, len: usize) -> Option<Fault> {
        let inner = self.0.as_ref()?;
        let number = inner.attempts.fetch_add(1, Ordering::Relaxed);
        (inner.decide)(&Attempt { path, offset, len, number })
    }

    /// What [`Fault::Stuck`] waits for.
    pub(crate) fn gate(&self) -> Option<&sys::Gate> {
        self.0.as_ref().map(|inner| &inner.gate)
    }

    /// For a thread that does nothing else: has what goes wrong happen around an attempt.
    pub(crate) fn suffer(
        &self,
        path: &Path,
        offset: u64,
        len: usize,
        attempt: impl FnOnce() -> io::Result<usize>,
    ) -> io::Result<usize> {
        match self.decide(path, offset, len) {
            None => {}
            Some(Fault::Short(limit)) => return attempt().map(|came| came.min(limit.max(1))),
            Some(Fault::Errno(number)) => return Err(io::Error::from_raw_os_error(number)),
            Some(Fault::Delay(time)) => std::thread::sleep(time),
            Some(Fault::Stuck) => self.gate().expect("there are faults").wait(),
        }
        attempt()
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "faults" } else { "no faults" })
    }
}

/// A provider whose backends suffer [`Faults`].
pub struct FaultyProvider {
    inner: Arc<dyn BackendProvider>,
    faults: Faults,
}

impl FaultyProvider {
    /// The backends of `inner`, with these faults.
    pub fn new(inner: Arc<dyn BackendProvider>, faults: Faults) -> Self {
        Self { inner, faults }
    }
}

impl BackendProvider for FaultyProvider {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn priority(&self) -> u8 {
        self.inner.priority()
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        self.inner.probe(sources)
    }

    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, Error> {
        self.inner.create(&BackendOptions { faults: self.faults.clone(), ..options.clone() }, sink)
    }
}

/// What is about to be done to a file that is being written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriteCall<'a> {
    /// Bytes go to this place.
    Write {
        /// In bytes from the file's beginning.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// Room for so many bytes is set aside.
    Reserve(u64),
    /// The file becomes so long.
    SetLen(u64),
    /// All written bytes are brought to the disk.
    Sync,
    /// The file gets this name.
    Rename(&'a Path),
    /// The names in the file's directory are brought to the disk.
    SyncDirectory,
}

type DecideWrite = dyn Fn(&Path, &WriteCall<'_>) -> Option<i32> + Send + Sync;

/// Decides for each thing that is done to a file that is being written whether it fails. Cloning
/// gives another handle to the same one; the default lets everything succeed.
#[derive(Clone, Default)]
pub struct WriteFaults(Option<Arc<DecideWrite>>);

impl WriteFaults {
    /// `decide` is called before each call, on the thread that makes it, with the path that errors
    /// name. The call is not made when it gives an error number: EIO is 5, ENOSPC 28.
    pub fn new(
        decide: impl Fn(&Path, &WriteCall<'_>) -> Option<i32> + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(decide)))
    }

    /// To be asked before each call.
    ///
    /// # Errors
    /// What the call is to fail with.
    pub fn check(&self, path: &Path, call: WriteCall<'_>) -> io::Result<()> {
        let decided = self.0.as_ref().and_then(|decide| decide(path, &call));
        decided.map_or(Ok(()), |number| Err(io::Error::from_raw_os_error(number)))
    }
}

impl fmt::Debug for WriteFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "faults" } else { "no faults" })
    }
}
