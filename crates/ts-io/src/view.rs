// SPDX-License-Identifier: MIT OR Apache-2.0
use std::ops::Deref;
use std::sync::Arc;

use crate::sys::Mapping;
use crate::{Error, Source};

/// Bytes of a file where the page cache has them: nothing is copied, no memory is taken.
///
/// The price is that the file's owner can pull them away: see [`View::new`].
#[derive(Debug)]
pub struct View {
    source: Arc<Source>,
    offset: u64,
    mapping: Mapping,
}

impl View {
    /// Maps `offset..offset + len` and waits until it is in memory, so that touching it reads no
    /// disk (the page cache may let it go again when memory is short, and then does). Linux before
    /// 5.14 has no way to wait: there the bytes come when they are touched, and a device that fails
    /// then ends the process with SIGBUS.
    ///
    /// # Safety
    /// While the view lives, nobody writes to this range of the file, in this process or another:
    /// the bytes are a shared reference. If somebody truncates the file, touching what is cut off
    /// ends the process with SIGBUS.
    ///
    /// # Errors
    /// [`Error::ShortRead`] when the file does not have the range; [`Error::Changed`] when it is
    /// not the one that was opened; [`Error::Read`] when the device fails, or the source is no
    /// file. Blocks.
    pub unsafe fn new(source: &Arc<Source>, offset: u64, len: usize) -> Result<Self, Error> {
        source.verify(offset)?;
        let there = usize::try_from(source.len().saturating_sub(offset)).unwrap_or(usize::MAX);
        if there < len {
            let (path, expected) = (source.path().into(), len);
            return Err(Error::ShortRead { path, offset, expected, actual: there });
        }
        let file = source.file().ok_or_else(|| source.no_file())?;
        // SAFETY: the caller promises what the mapping asks for.
        let mapping = unsafe { Mapping::new(file, offset, len) };
        let mapping = mapping.map_err(|e| source.failed(offset, len, e))?;
        let this = Self { source: Arc::clone(source), offset, mapping };
        this.verify()?;
        Ok(this)
    }

    /// Checks that the file is still the one that was opened: its length and modification time
    /// among others. To be asked when a view has been used for long.
    ///
    /// # Errors
    /// [`Error::Changed`].
    pub fn verify(&self) -> Result<(), Error> {
        self.source.verify(self.offset)
    }
}

impl Deref for View {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.mapping
    }
}
