// SPDX-License-Identifier: MIT OR Apache-2.0
//! [`Source`], a file or other origin of bytes, with its state when it was opened. Each kind of
//! source implements [`Origin`] in its own file. The constructors are in open.rs.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::Error;

/// The timeout of a read if no other is configured.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// The reason why backends for files cannot read a source that is not a file.
pub(crate) const NOT_A_FILE: &str = "not a file";

/// Identifies one state of a source, to detect changes of the source.
///
/// For a remote source of which only the length is known, use
/// `Fingerprint::default().with_len(len)`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fingerprint {
    /// The device and inode number of a file. Zeros for other sources, and on systems without
    /// inodes.
    pub identity: (u64, u64),
    /// The length in bytes.
    pub len: u64,
    /// The time of the last write to the content, if known.
    pub modified: Option<SystemTime>,
    /// The ctime in nanoseconds since 1970, and the link count, mode, owner and group. Programs can
    /// set `modified` back, but not the ctime. `None` for sources that are not files, and on
    /// systems without a ctime.
    pub changed: Option<(i128, [u64; 4])>,
    /// The ETag of this version of an object, if the server sends one.
    pub etag: Option<String>,
}

impl Fingerprint {
    /// Sets the length, in bytes.
    #[must_use]
    pub fn with_len(mut self, len: u64) -> Self {
        self.len = len;
        self
    }

    /// Sets the time of the last write to the content.
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

/// The operations of one kind of source, to which [`Source`] delegates.
///
/// The default methods suit bytes in memory.
pub(crate) trait Origin: Any + fmt::Debug + Send + Sync {
    /// Returns the absolute path, the URL or the name, for error messages.
    fn path(&self) -> &Path;

    /// Returns the state when the source was opened.
    fn fingerprint(&self) -> &Fingerprint;

    /// Fills `buffer` with the bytes from `offset` on and returns their number. The number is less
    /// than `buffer.len()` only at the end of the source. Blocks; over the network, for at most
    /// `timeout`.
    fn read_at(&self, offset: u64, buffer: &mut [u8], timeout: Duration) -> Result<usize, Error>;

    /// Returns whether reads go over the network.
    fn is_remote(&self) -> bool {
        false
    }

    /// Returns whether the source is a local file.
    fn is_file(&self) -> bool {
        false
    }

    /// Checks that the source has not changed since it was opened. Does nothing if reads check this
    /// themselves, or if the source cannot change. `offset` appears only in the error.
    fn verify(&self, offset: u64) -> Result<(), Error> {
        let _ = offset;
        Ok(())
    }

    /// Returns whether a file is the one that its path leads to now.
    fn is_at_path(&self) -> bool {
        true
    }

    /// Returns the alignment of direct I/O in bytes, or the reason why it is not supported.
    fn direct_alignment(&self) -> Result<usize, &str> {
        Err(NOT_A_FILE)
    }

    /// Returns the share of the range that is in the page cache, from 0 to 1, or `None` if unknown.
    fn residency(&self, offset: u64, len: usize) -> Option<f64> {
        let _ = (offset, len);
        None
    }

    /// Drops the source from the page cache. Does nothing if the source is not a file.
    fn evict(&self) -> Result<(), Error> {
        Ok(())
    }
}

/// A local or remote file, an object, or bytes in memory, with its state when it was opened.
#[derive(Debug)]
pub struct Source {
    origin: Box<dyn Origin>,
}

impl Source {
    pub(crate) fn new(origin: impl Origin) -> Arc<Self> {
        Arc::new(Self { origin: Box::new(origin) })
    }

    /// Returns the origin, if it is a `T`.
    pub(crate) fn origin<T: Origin>(&self) -> Option<&T> {
        let origin: &dyn Any = &*self.origin;
        origin.downcast_ref()
    }

    /// Returns whether reads go over the network.
    pub fn is_remote(&self) -> bool {
        self.origin.is_remote()
    }

    /// Returns whether the source is a local file.
    pub fn is_file(&self) -> bool {
        self.origin.is_file()
    }

    /// Returns the absolute path of a file, the URL of an object, or the name of another source.
    pub fn path(&self) -> &Path {
        self.origin.path()
    }

    /// Returns the length in bytes when the source was opened.
    pub fn len(&self) -> u64 {
        self.fingerprint().len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the state of the file or object when it was opened. For bytes in memory, this is
    /// only their length.
    pub fn fingerprint(&self) -> &Fingerprint {
        self.origin.fingerprint()
    }

    /// Returns the alignment of direct reads, in bytes. [`ReadRequest`](crate::ReadRequest)
    /// describes what must be aligned. The first call opens the file for direct I/O.
    ///
    /// # Errors
    /// Returns the reason if this source cannot be read with direct I/O.
    pub fn direct_alignment(&self) -> Result<usize, &str> {
        self.origin.direct_alignment()
    }

    /// Returns the share of `offset..offset + len` that is in the page cache, from 0 to 1. The part
    /// of the range past the end of the file is ignored.
    ///
    /// Returns `None` if the system does not report the share: for sources that are not files, on
    /// systems other than Linux, and on most kernels for files that this process neither owns nor
    /// may write to.
    pub fn residency(&self, offset: u64, len: usize) -> Option<f64> {
        self.origin.residency(offset, len)
    }

    /// Drops the file from the page cache, except for pages that a process has mapped. Useful
    /// before measuring reads from the device.
    ///
    /// Blocks until unwritten data is on disk. Does nothing for sources that are not files.
    ///
    /// # Errors
    /// Returns [`Error::Read`] if the system cannot drop the file from the page cache.
    pub fn evict(&self) -> Result<(), Error> {
        self.origin.evict()
    }

    /// Reads `buffer.len()` bytes at `offset`, or fewer at the end of the source, and returns the
    /// number of bytes. Files are read through the page cache. Blocks; over the network, for at
    /// most 60 s.
    ///
    /// # Errors
    /// Returns [`Error::Read`] if the read fails. A read over the network can also fail with
    /// [`Error::Changed`] or [`Error::TimedOut`].
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        self.origin.read_at(offset, buffer, DEFAULT_TIMEOUT)
    }

    /// Reads like [`read_at`](Self::read_at), over the network for at most `timeout`.
    #[cfg(unix)]
    pub(crate) fn read_at_within(
        &self,
        offset: u64,
        buffer: &mut [u8],
        timeout: Duration,
    ) -> Result<usize, Error> {
        self.origin.read_at(offset, buffer, timeout)
    }

    /// Checks that the content of a file has not changed since it was opened. Does nothing for
    /// other sources; reads over the network check this themselves. `offset` appears only in the
    /// error.
    ///
    /// A file that was renamed, replaced or removed has not changed: it exists while it is open.
    /// See [`is_at_path`](Self::is_at_path).
    ///
    /// # Errors
    /// Returns [`Error::Changed`], with a description of the difference, if the file has changed.
    pub fn verify(&self, offset: u64) -> Result<(), Error> {
        self.origin.verify(offset)
    }

    /// Returns whether a file is the one that its path leads to now. For sources that are not
    /// files, and for files that another process has opened, returns `true`.
    pub fn is_at_path(&self) -> bool {
        self.origin.is_at_path()
    }

    /// Returns the error of a read that failed with `error`.
    pub(crate) fn read_error(&self, offset: u64, len: usize, error: std::io::Error) -> Error {
        Error::read(self.path(), offset, len, error)
    }

    /// Returns the error of a read of `len` bytes at `offset` that failed because this source is
    /// not a file.
    pub(crate) fn not_a_file(&self, offset: u64, len: usize) -> Error {
        let error = std::io::Error::new(std::io::ErrorKind::Unsupported, NOT_A_FILE);
        self.read_error(offset, len, error)
    }
}
