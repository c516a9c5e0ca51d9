// SPDX-License-Identifier: MIT OR Apache-2.0
//! Injects faults, to test how code handles them. [`FaultyProvider`] wraps a built-in provider. In
//! the backends that it creates, reads fail, return fewer bytes, take longer, or hang.
//! [`WriteFaults`] makes operations fail in code that writes files.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use ts_io::fault::{Fault, Faults, FaultyProvider};
//! use ts_io::{BackendOptions, BackendProvider, ReadRequest, Registry, Source, completion_queue};
//! use ts_io::ts_pool::{Budget, HostPool};
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

/// A system call or network request with which a backend is about to read bytes.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Attempt<'a> {
    /// The file or URL to read.
    pub path: &'a Path,
    /// The offset of the first byte.
    pub offset: u64,
    /// The maximum number of bytes to read.
    pub len: usize,
    /// The number of earlier attempts with the same [`Faults`].
    pub number: u64,
}

/// A fault to inject into an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The attempt returns at most this many bytes. 0 counts as 1.
    Short(usize),
    /// The attempt fails with this error number, such as 4 for EINTR or 5 for EIO.
    Errno(i32),
    /// The attempt takes this much longer.
    Delay(Duration),
    /// The attempt does not return before [`Faults::release`] is called.
    Stuck,
}

impl Fault {
    /// Returns a fault for a `share` of all attempts, between 0 and 1: an error, a short read or a
    /// delay of a millisecond. The same seed gives the same faults.
    pub fn random(attempt: &Attempt<'_>, seed: u64, share: f64) -> Option<Self> {
        let chance = (seed ^ attempt.number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let happens = ((chance >> 11) as f64) < share * (1u64 << 53) as f64;
        let fault = match chance % 3 {
            0 => Self::Errno(5),
            1 => Self::Short(1 + attempt.len / 2),
            _ => Self::Delay(Duration::from_millis(1)),
        };
        happens.then_some(fault)
    }
}

/// Decides whether and how each attempt fails. Clones share one decision function and one count of
/// attempts. The default injects no faults.
#[derive(Clone, Default)]
pub struct Faults(Option<Arc<FaultsInner>>);

type Decide = dyn Fn(&Attempt<'_>) -> Option<Fault> + Send + Sync;

struct FaultsInner {
    decide: Box<Decide>,
    attempts: AtomicU64,
    /// The gate that attempts with [`Fault::Stuck`] wait for.
    gate: Arc<sys::Gate>,
}

impl Faults {
    /// Creates faults that `decide` chooses.
    ///
    /// `decide` is called before each attempt, on the thread that makes the attempt. It may have
    /// side effects, such as truncating the file.
    ///
    /// # Panics
    /// Panics if the system refuses a file descriptor.
    pub fn new(decide: impl Fn(&Attempt<'_>) -> Option<Fault> + Send + Sync + 'static) -> Self {
        let gate = sys::Gate::new().expect("the system must provide an eventfd");
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

/// Wraps a provider and injects [`Faults`] into the backends that it creates. All built-in
/// backends except `remote` support this. Other backends do not.
pub struct FaultyProvider {
    inner: Arc<dyn BackendProvider>,
    faults: Faults,
}

impl FaultyProvider {
    /// Wraps `inner`, so that its backends inject `faults`.
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
        /// The offset in the file, in bytes.
        offset: u64,
        /// The bytes to write.
        bytes: &'a [u8],
    },
    /// This many bytes of disk space are reserved.
    Reserve(u64),
    /// The length of the file is set to this many bytes.
    SetLen(u64),
    /// All written bytes are flushed to disk.
    Sync,
    /// The file is renamed to this path.
    Rename(&'a Path),
    /// The directory of the file is flushed to disk.
    SyncDirectory,
}

type DecideWrite = dyn Fn(&Path, &WriteCall<'_>) -> Option<i32> + Send + Sync;

/// Decides whether each operation on a file that is being written fails. Clones share one decision
/// function. The default injects no faults.
#[derive(Clone, Default)]
pub struct WriteFaults(Option<Arc<DecideWrite>>);

impl WriteFaults {
    /// Creates faults that `decide` chooses.
    ///
    /// `decide` is called before each operation, on the thread that performs the operation. It
    /// receives the path of the file. If it returns an error number, such as 5 for EIO or 28 for
    /// ENOSPC, the operation fails with that error and is not performed.
    pub fn new(
        decide: impl Fn(&Path, &WriteCall<'_>) -> Option<i32> + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(decide)))
    }

    /// Decides whether an operation fails. Code that writes files calls this before each operation.
    ///
    /// # Errors
    /// Returns the error with which the operation must fail.
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
