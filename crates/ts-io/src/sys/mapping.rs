// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory mappings of files.

use std::fs::File;
use std::io;

use memmap2::{Advice, Mmap, MmapOptions};

/// A range of a file, mapped into memory.
#[derive(Debug)]
pub(crate) struct Mapping(Option<Mmap>);

impl Mapping {
    /// Maps a range of the file and reads its pages into memory. Blocks.
    ///
    /// # Safety
    /// While the mapping exists, nothing may write to this range of the file. If the file is
    /// truncated, reading the mapping kills the process with SIGBUS.
    ///
    /// # Errors
    /// Returns the system's error if the range cannot be mapped or read, for example because the
    /// file ends before the range.
    pub(crate) unsafe fn new(file: &File, offset: u64, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self(None));
        }
        // SAFETY: the caller guarantees that nothing writes to the range while the mapping exists.
        let map = unsafe { MmapOptions::new().offset(offset).len(len).map(file)? };
        match map.advise(Advice::PopulateRead) {
            // Before Linux 5.14, pages are read when they are accessed.
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

/// Copies from a file into the slices through a mapping, up to the end of the file. Returns the
/// number of bytes.
///
/// If another process truncates the file meanwhile, this process can be killed with SIGBUS. If
/// another process writes to the range, the bytes are unspecified, as with any read.
pub(crate) fn read_mapped_at(
    file: &File,
    slices: &mut [io::IoSliceMut<'_>],
    offset: u64,
) -> io::Result<usize> {
    let capacity: usize = slices.iter().map(|slice| slice.len()).sum();
    let available =
        usize::try_from(super::state_of(file)?.1.len.saturating_sub(offset)).unwrap_or(usize::MAX);
    let len = capacity.min(available);
    // SAFETY: another process may write to the range. The code therefore reads the mapping only
    // once and then drops it, and the documentation leaves the bytes unspecified in this case.
    let mapping = unsafe { Mapping::new(file, offset, len)? };
    let mut rest = &mapping[..];
    for slice in slices {
        let (head, tail) = rest.split_at(slice.len().min(rest.len()));
        slice[..head.len()].copy_from_slice(head);
        rest = tail;
    }
    Ok(len)
}

/// Maps a range, reads one byte of each page, and returns the sum of these bytes. Truncation and
/// writes by another process have the same effect as for [`read_mapped_at`].
pub(crate) fn touch_mapped(file: &File, offset: u64, len: usize) -> io::Result<u64> {
    // SAFETY: another process may write to the range. The mapping is therefore read only once and
    // then dropped, and the documentation leaves the sum unspecified in this case.
    let mapping = unsafe { Mapping::new(file, offset, len)? };
    Ok(mapping.iter().step_by(4096).map(|&byte| u64::from(byte)).sum())
}
