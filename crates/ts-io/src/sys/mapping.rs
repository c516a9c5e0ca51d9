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
/// number of bytes. If another process writes to the range, the bytes are unspecified, as with any
/// read.
///
/// The kernel copies, so a page that a truncated file no longer has, or that the device cannot
/// read, ends the copy. This code would get SIGBUS for it. Where the kernel does not copy, for
/// example in a sandbox, the file is read.
pub(crate) fn read_mapped_at(
    file: &File,
    slices: &mut [io::IoSliceMut<'_>],
    offset: u64,
) -> io::Result<usize> {
    let len = slices.iter().map(|slice| slice.len()).sum();
    let copied = if len == 0 { Ok(0) } else { copy_mapped(file, slices, offset, len) };
    match copied {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        // Tells the end of the file from an error.
        _ => super::read_vectored_at(file, slices, offset),
    }
}

fn copy_mapped(
    file: &File,
    slices: &mut [io::IoSliceMut<'_>],
    offset: u64,
    len: usize,
) -> io::Result<usize> {
    let map = MmapOptions::new().offset(offset).len(len).map_raw_read_only(file)?;
    // The copy reads pages that are not in memory, too, but with less in flight.
    drop(map.advise(Advice::PopulateRead).or_else(|_| map.advise(Advice::WillNeed)));
    let from = libc::iovec { iov_base: map.as_mut_ptr().cast(), iov_len: len };
    let count = slices.len().min(super::IOV_MAX) as libc::c_ulong;
    // SAFETY: `IoSliceMut` has the layout of `iovec`, and the slices are exclusively borrowed. The
    // kernel reads this process's memory at `from`, where only `map` is, and checks each page.
    let copied = unsafe {
        let to = slices.as_ptr().cast();
        libc::process_vm_readv(libc::getpid(), to, count, &raw const from, 1, 0)
    };
    let copied = usize::try_from(copied).map_err(|_| io::Error::last_os_error())?;
    // The last page goes on with zeros behind the end of the file, which may have moved meanwhile.
    let in_file = super::state_of(file)?.1.len.saturating_sub(offset);
    Ok(copied.min(usize::try_from(in_file).unwrap_or(usize::MAX)))
}

/// Maps a range and its pages, which it reads into memory. Blocks.
///
/// # Errors
/// Returns the system's error if the range cannot be mapped or read, for example because the file
/// was truncated. Before Linux 5.14, returns `InvalidInput`.
pub(crate) fn populate_mapped(file: &File, offset: u64, len: usize) -> io::Result<()> {
    MmapOptions::new().offset(offset).len(len).map_raw_read_only(file)?.advise(Advice::PopulateRead)
}
