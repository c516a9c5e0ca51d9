// SPDX-License-Identifier: MIT OR Apache-2.0
use std::ops::Deref;
use std::sync::Arc;

use crate::file::FileOrigin;
use crate::sys::Mapping;
use crate::{Error, Source};

/// A range of a file, mapped into memory. It provides the bytes in the page cache without a copy or
/// an allocation.
///
/// Changes to the file affect the view: see [`MappedView::new`].
///
/// ```
/// use ts_io::{MappedView, Source};
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("data");
/// std::fs::write(&path, b"header and data")?;
/// let source = Source::open(&path)?;
/// // SAFETY: nothing writes to the file while the view exists.
/// let view = unsafe { MappedView::new(&source, 11, 4) }?;
/// assert_eq!(&view[..], b"data");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MappedView {
    source: Arc<Source>,
    offset: u64,
    mapping: Mapping,
}

impl MappedView {
    /// Maps `offset..offset + len`. On Linux 5.14 and later, blocks until the range is in memory.
    /// Later accesses read from disk only if the kernel has evicted pages because memory was short.
    ///
    /// Before Linux 5.14, each page is read when it is first accessed. If the device fails during
    /// an access that reads from disk, the process is killed with SIGBUS.
    ///
    /// # Safety
    /// While the view exists, neither this process nor another may write to this range of the file,
    /// because the view provides shared references to its bytes. If the file is truncated,
    /// accessing the missing bytes kills the process with SIGBUS.
    ///
    /// # Errors
    /// Returns [`Error::ShortRead`] if the file does not contain the range, and [`Error::Changed`]
    /// if the file is no longer the one that was opened. Returns [`Error::Read`] if the device
    /// fails or the source is not a file.
    pub unsafe fn new(source: &Arc<Source>, offset: u64, len: usize) -> Result<Self, Error> {
        source.verify(offset)?;
        let rest = usize::try_from(source.len().saturating_sub(offset)).unwrap_or(usize::MAX);
        if rest < len {
            let (path, expected) = (source.path().into(), len);
            return Err(Error::ShortRead { path, offset, expected, actual: rest });
        }
        let file = FileOrigin::of(source).ok_or_else(|| source.not_a_file(offset, len))?.file();
        // SAFETY: the caller guarantees that nothing writes to this range of the file while the
        // view exists, and the view owns the mapping.
        let mapping = unsafe { Mapping::new(file, offset, len) };
        let mapping = mapping.map_err(|e| source.read_error(offset, len, e))?;
        let this = Self { source: Arc::clone(source), offset, mapping };
        this.verify()?;
        Ok(this)
    }

    /// Checks that the file has not changed since it was opened. Useful after a view has been used
    /// for a long time.
    ///
    /// # Errors
    /// Returns [`Error::Changed`] if the file has changed.
    pub fn verify(&self) -> Result<(), Error> {
        self.source.verify(self.offset)
    }
}

impl Deref for MappedView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.mapping
    }
}
