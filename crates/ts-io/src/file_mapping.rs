// SPDX-License-Identifier: MIT OR Apache-2.0
use std::ops::{Deref, Range};
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

use crate::file::FileOrigin;
use crate::{Error, Source};

/// A whole file, mapped into memory. Unlike a [`MappedView`](crate::MappedView), it can be written
/// to: a write copies the page, and does not change the file.
///
/// ```
/// use ts_io::{FileMapping, Source};
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("data");
/// std::fs::write(&path, b"header and data")?;
/// let source = Source::open(&path)?;
/// // SAFETY: nothing writes to the file while the mapping exists.
/// let mapping = unsafe { FileMapping::new(&source) }?;
/// mapping.populate(11..15)?;
/// assert_eq!(&mapping[11..], b"data");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FileMapping {
    source: Arc<Source>,
    mapping: MmapRaw,
}

impl FileMapping {
    /// Maps the file. Reads nothing.
    ///
    /// # Safety
    /// While the mapping exists, neither this process nor another may write to the file, because
    /// the mapping provides shared references to its bytes. If the file is truncated, accessing the
    /// missing bytes kills the process with SIGBUS, and so does an access that reads from a device
    /// that fails.
    ///
    /// # Errors
    /// - [`Error::Changed`] if the file has changed since it was opened.
    /// - [`Error::Read`] if the source is not a file, or the system cannot map it.
    pub unsafe fn new(source: &Arc<Source>) -> Result<Self, Error> {
        let len = usize::try_from(source.len()).unwrap_or(usize::MAX);
        let file = FileOrigin::of(source).ok_or_else(|| source.not_a_file(0, len))?.file();
        // Pages that are never written to need no memory but the page cache, so none is reserved.
        // SAFETY: the caller guarantees that nothing writes to the file while the mapping exists.
        let mapping = unsafe { MmapOptions::new().len(len).no_reserve_swap().map_copy(file) };
        let mapping = mapping.map_err(|e| source.read_error(0, len, e))?.into();
        // The handle is the one of the file that was opened, but its length may have changed.
        source.verify(0)?;
        Ok(Self { source: Arc::clone(source), mapping })
    }

    /// Returns the source whose file is mapped.
    pub fn source(&self) -> &Arc<Source> {
        &self.source
    }

    /// Reads a range into the page cache and maps its pages. Blocks. Different threads can read
    /// different ranges at the same time.
    ///
    /// Does nothing where the system does not support this: on Linux before 5.14 and on other
    /// systems. The first access to a page then reads it.
    ///
    /// # Errors
    /// Returns [`Error::Read`] if the device fails, or the file was truncated.
    ///
    /// # Panics
    /// Panics if the range is not inside the file.
    pub fn populate(&self, range: Range<usize>) -> Result<(), Error> {
        assert!(range.end <= self.mapping.len(), "{range:?} is not inside the file");
        #[cfg(target_os = "linux")]
        {
            let (offset, len) = (range.start as u64, range.len());
            let populate = memmap2::Advice::PopulateRead;
            match self.mapping.advise_range(populate, range.start, range.len()) {
                Err(e) if is_failed_read(&e) => {
                    // A truncated file is the usual reason.
                    self.source.verify(offset)?;
                    return Err(self.source.read_error(offset, len, e));
                }
                // Older kernels and sandboxes answer with different errors.
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks that the file has not changed since it was opened.
    ///
    /// # Errors
    /// Returns [`Error::Changed`] if the file has changed.
    pub fn verify(&self) -> Result<(), Error> {
        self.source.verify(0)
    }
}

#[cfg(target_os = "linux")]
fn is_failed_read(error: &std::io::Error) -> bool {
    let codes = [libc::EFAULT, libc::EHWPOISON, libc::EIO, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

impl Deref for FileMapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is as long as the file. The caller of `new` guarantees that the file
        // keeps its length and its content.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr(), self.mapping.len()) }
    }
}
