// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fault injection: [`FaultyProvider`] wraps any provider, and the backends that it creates see
//! system calls that fail, return less, or hang. [`WriteFaults`] does the same for code that writes
//! files.
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
//! // The first read is short, the second is interrupted (EINTR), the third fails with EIO.
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
//! let done = queue.recv_timeout(Duration::from_secs(10)).expect("the read completes");
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
use crate::hook::{Intercept, Interception, ReadHook};
use crate::provider::{Availability, BackendProvider};
use crate::{Error, Source, sys};

/// A system call or network request that a backend is about to make to read bytes.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Attempt<'a> {
    /// The file or URL to read.
    pub path: &'a Path,
    /// The offset of the first byte.
    pub offset: u64,
    /// The maximum number of bytes.
    pub len: usize,
    /// The number of attempts before this one with the same [`Faults`].
    pub number: u64,
}

/// What happens to an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It returns at most this many bytes, at least 1.
    Short(usize),
    /// It fails with this error number: EINTR is 4, EIO is 5.
    Errno(i32),
    /// It takes this much longer.
    Delay(Duration),
    /// It does not return before [`Faults::release`].
    Stuck,
}

/// Decides for each attempt whether, and how, it fails. Clones share one decision function and
/// count. The default injects no faults.
#[derive(Clone, Default)]
pub struct Faults(Option<Arc<FaultsInner>>);

type Decide = dyn Fn(&Attempt<'_>) -> Option<Fault> + Send + Sync;

struct FaultsInner {
    decide: Box<Decide>,
    attempts: AtomicU64,
    /// What [`Fault::Stuck`] waits for.
    gate: Arc<sys::Gate>,
}

impl Faults {
    /// Creates faults that `decide` chooses. It is called before each attempt, on the thread that
    /// makes it, and may have side effects such as truncating the file.
    ///
    /// # Panics
    /// Panics if the system refuses a file descriptor.
    pub fn new(decide: impl Fn(&Attempt<'_>) -> Option<Fault> + Send + Sync + 'static) -> Self {
        let gate = sys::Gate::new().expect("creating an eventfd failed");
        Self(Some(Arc::new(FaultsInner {
            decide: Box::new(decide),
            attempts: AtomicU64::new(0),
            gate: Arc::new(gate),
        })))
    }

    /// Unblocks all attempts with [`Fault::Stuck`], including later ones.
    pub fn release(&self) {
        if let Some(inner) = &self.0 {
            inner.gate.open();
        }
    }
}

impl Intercept for FaultsInner {
    fn intercept(&self, path: &Path, offset: u64, len: usize) -> Option<Interception> {
        let number = self.attempts.fetch_add(1, Ordering::Relaxed);
        (self.decide)(&Attempt { path, offset, len, number }).map(|fault| match fault {
            Fault::Short(limit) => Interception::Truncate(limit.max(1)),
            Fault::Errno(number) => Interception::Fail(io::Error::from_raw_os_error(number)),
            Fault::Delay(time) => Interception::Delay(time),
            Fault::Stuck => Interception::Block(Arc::clone(&self.gate)),
        })
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "faults" } else { "no faults" })
    }
}

/// Wraps a provider and injects [`Faults`] into the backends that it creates.
pub struct FaultyProvider {
    inner: Arc<dyn BackendProvider>,
    faults: Faults,
}

impl FaultyProvider {
    /// Wraps `inner`.
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
        let hook = match &self.faults.0 {
            Some(faults) => ReadHook::new(faults.clone()),
            None => ReadHook::default(),
        };
        self.inner.create(&options.clone().with_hook(hook), sink)
    }
}

/// An operation on a file that is being written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriteCall<'a> {
    /// Bytes are written.
    Write {
        /// The offset in the file.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// This many bytes of disk space are reserved.
    Reserve(u64),
    /// The length of the file is set.
    SetLen(u64),
    /// All written bytes are flushed to disk.
    Sync,
    /// The file is renamed to this path.
    Rename(&'a Path),
    /// The directory of the file is flushed to disk.
    SyncDirectory,
}

type DecideWrite = dyn Fn(&Path, &WriteCall<'_>) -> Option<i32> + Send + Sync;

/// Decides for each operation on a file that is being written whether it fails. Clones share one
/// decision function. The default injects no faults.
#[derive(Clone, Default)]
pub struct WriteFaults(Option<Arc<DecideWrite>>);

impl WriteFaults {
    /// Creates faults that `decide` chooses. It is called before each operation, on the thread that
    /// performs it, with the path that error messages name. If it returns an error number, the
    /// operation is not performed: EIO is 5, ENOSPC is 28.
    pub fn new(
        decide: impl Fn(&Path, &WriteCall<'_>) -> Option<i32> + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(decide)))
    }

    /// Asks whether an operation fails. Code that writes files calls this before each operation.
    ///
    /// # Errors
    /// Returns the error that the operation must fail with.
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
