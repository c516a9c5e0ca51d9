// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mappings of files.

use std::fs::File;
use std::io;

use memmap2::{Advice, Mmap, MmapOptions};

/// A range of a file as memory.
#[derive(Debug)]
pub(crate) struct Mapping(Option<Mmap>);

impl Mapping {
    /// Maps a range that the file has, and brings its pages in.
    ///
    /// # Safety
    /// While the mapping lives nobody writes to the range of the file. If somebody truncates it,
    /// reading the mapping ends the process with SIGBUS.
    ///
    /// # Errors
    /// The system's; also when the file ends before the range does, or its device cannot be read.
    pub(crate) unsafe fn new(file: &File, offset: u64, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self(None));
        }
        // SAFETY: nobody writes there, by the caller's promise.
        let map = unsafe { MmapOptions::new().offset(offset).len(len).map(file)? };
        match map.advise(Advice::PopulateRead) {
            // Linux before 5.14 does not know it; pages then come when they are touched.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => drop(map.advise(Advice::WillNeed)),
            populated => populated?,
        }
        Ok(Self(Some(map)))
    }
}

impl std::ops::Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or(&[])
    }
}

/// Copies from a file to the slices by way of a mapping, as far as the file goes.
///
/// Another process that truncates the file meanwhile ends this one with SIGBUS; one that writes to
/// it makes the bytes unspecified, as it does to any read.
pub(crate) fn read_mapped_at(
    file: &File,
    slices: &mut [io::IoSliceMut<'_>],
    offset: u64,
) -> io::Result<usize> {
    let room: usize = slices.iter().map(|slice| slice.len()).sum();
    let there =
        usize::try_from(file.metadata()?.len().saturating_sub(offset)).unwrap_or(usize::MAX);
    let len = room.min(there);
    // SAFETY: the mapping is copied from once and gone; what is promised above is all that callers
    // rely on.
    let mapping = unsafe { Mapping::new(file, offset, len)? };
    let mut rest = &mapping[..];
    for slice in slices {
        let (now, later) = rest.split_at(slice.len().min(rest.len()));
        slice[..now.len()].copy_from_slice(now);
        rest = later;
    }
    Ok(len)
}

/// Maps a range, reads a byte of each of its pages, and returns their sum. As dangerous as
/// [`read_mapped_at`].
pub(crate) fn touch_mapped(file: &File, offset: u64, len: usize) -> io::Result<u64> {
    // SAFETY: as in `read_mapped_at`.
    let mapping = unsafe { Mapping::new(file, offset, len)? };
    Ok(mapping.iter().step_by(4096).map(|&byte| u64::from(byte)).sum())
}
