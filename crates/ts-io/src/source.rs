// SPDX-License-Identifier: MIT OR Apache-2.0
//! A [`Source`]: something to read, with its state at the time it was opened. This file knows no
//! kind of source; each kind implements [`Origin`] in its own file, and open.rs creates them.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::Error;

/// How long a read over the network may take if nothing else is configured.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a source that is not a file cannot be read by a backend for files.
pub(crate) const NOT_A_FILE: &str = "not a file";

/// Identifies one state of a source, to detect that it changed.
///
/// A remote source that only knows its length is `Fingerprint::default().with_len(len)`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fingerprint {
    /// Device and inode number, where the system has them. Zeros for an object.
    pub identity: (u64, u64),
    /// Length in bytes.
    pub len: u64,
    /// Time of the last write to the content.
    pub modified: Option<SystemTime>,
    /// The ctime in nanoseconds since 1970, and the link count, mode, owner and group. Unlike
    /// `modified`, programs cannot set the ctime back. `None` where the system has no ctime.
    pub changed: Option<(i128, [u64; 4])>,
    /// The ETag of this version of an object.
    pub etag: Option<String>,
}

impl Fingerprint {
    /// Sets the length, in bytes.
    #[must_use]
    pub fn with_len(mut self, len: u64) -> Self {
        self.len = len;
        self
    }

    /// Sets the time of the last write.
    #[must_use]
    pub fn with_modified(mut self, modified: Option<SystemTime>) -> Self {
        self.modified = modified;
        self
    }

    /// Sets the ETag.
    #[must_use]
    pub fn with_etag(mut self, etag: Option<String>) -> Self {
        self.etag = etag;
        self
    }
}

/// A kind of source: what [`Source`] delegates to.
///
/// The defaults are those of a source that is not a file of this machine.
pub(crate) trait Origin: Any + fmt::Debug + Send + Sync {
    /// The absolute path or URL, which error messages name.
    fn path(&self) -> &Path;

    /// The state when the source was opened.
    fn fingerprint(&self) -> &Fingerprint;

    /// Fills `buffer` with the bytes from `offset` on; returns fewer only at the end. Blocks, over
    /// the network for at most `timeout`.
    fn read_at(&self, offset: u64, buffer: &mut [u8], timeout: Duration) -> Result<usize, Error>;

    /// Whether reads go over the network.
    fn is_remote(&self) -> bool {
        false
    }

    /// Compares the current state with the fingerprint, if reads do not do so themselves. `offset`
    /// is for the error.
    fn verify(&self, offset: u64) -> Result<(), Error> {
        let _ = offset;
        Ok(())
    }

    /// The alignment of direct I/O in bytes, or why there is no direct I/O.
    fn direct_alignment(&self) -> Result<usize, &str> {
        Err(NOT_A_FILE)
    }

    /// The share of the range that is in the page cache, or `None` if unknown.
    fn residency(&self, offset: u64, len: usize) -> Option<f64> {
        let _ = (offset, len);
        None
    }

    /// Drops the source from the page cache.
    fn evict(&self) -> Result<(), Error> {
        Ok(())
    }
}

/// A file, an object or bytes in memory to read from, with its state when it was opened.
#[derive(Debug)]
pub struct Source {
    origin: Box<dyn Origin>,
}

impl Source {
    pub(crate) fn new(origin: impl Origin) -> Arc<Self> {
        Arc::new(Self { origin: Box::new(origin) })
    }

    /// The origin, if it is a `T`.
    pub(crate) fn origin<T: Origin>(&self) -> Option<&T> {
        let origin: &dyn Any = &*self.origin;
        origin.downcast_ref()
    }

    /// Whether reads go over the network.
    pub fn is_remote(&self) -> bool {
        self.origin.is_remote()
    }

    /// The absolute path, or the URL of an object.
    pub fn path(&self) -> &Path {
        self.origin.path()
    }

    /// The length in bytes when the source was opened.
    pub fn len(&self) -> u64 {
        self.fingerprint().len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the state of the file or object when it was opened. For bytes in memory, this is
    /// only their length.
    pub fn fingerprint(&self) -> &Fingerprint {
        self.origin.fingerprint()
    }

    /// The number of bytes that offset, length and memory of a direct read must be multiples of.
    ///
    /// # Errors
    /// Returns the reason if this source cannot be read with direct I/O.
    pub fn direct_alignment(&self) -> Result<usize, &str> {
        self.origin.direct_alignment()
    }

    /// The share of `offset..offset + len` that is in the page cache, from 0 to 1. A range that
    /// extends past the end is cut off there.
    ///
    /// Returns `None` where the system does not tell: for sources that are not files, and for files
    /// that this process neither owns nor may write to.
    pub fn residency(&self, offset: u64, len: usize) -> Option<f64> {
        self.origin.residency(offset, len)
    }

    /// Drops the file from the page cache, except for pages that other processes use. For
    /// measurements of a cold file. Blocks until unwritten data is on disk. Does nothing for
    /// sources that are not files.
    ///
    /// # Errors
    /// Returns [`Error::Read`] if the system cannot do so.
    pub fn evict(&self) -> Result<(), Error> {
        self.origin.evict()
    }

    /// Reads `buffer.len()` bytes at `offset`, or fewer at the end of the source. Files are read
    /// through the page cache. Blocks, over the network for at most 60 s.
    ///
    /// # Errors
    /// Returns [`Error::Read`] if the read fails; for sources over the network also
    /// [`Error::Changed`] and [`Error::TimedOut`].
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        self.origin.read_at(offset, buffer, DEFAULT_TIMEOUT)
    }

    /// Checks that a file is still the one that was opened, through its handle and through its
    /// path. Does nothing for objects, whose reads check this themselves. `offset` appears in the
    /// error.
    ///
    /// # Errors
    /// Returns [`Error::Changed`], which says what differs.
    pub fn verify(&self, offset: u64) -> Result<(), Error> {
        self.origin.verify(offset)
    }

    /// The error of a read that the system refused.
    pub(crate) fn read_error(&self, offset: u64, len: usize, error: std::io::Error) -> Error {
        Error::read(self.path(), offset, len, error)
    }

    /// The error of a backend for files that was asked to read something else.
    pub(crate) fn not_a_file(&self) -> Error {
        let error = std::io::Error::new(std::io::ErrorKind::Unsupported, NOT_A_FILE);
        self.read_error(0, 0, error)
    }
}
