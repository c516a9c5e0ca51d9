// SPDX-License-Identifier: MIT OR Apache-2.0
//! One anonymous mapping, on huge pages where the system gives them. This crate's first unsafe module.

use std::ptr::NonNull;

use memmap2::{MmapMut, MmapOptions};

use crate::Error;

/// Alignment of the arena's first byte: a huge page on x86-64 and arm64, so that slots can lie on whole ones.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed memory at a fixed address until dropped; pages are taken from the system when first touched.
#[derive(Debug)]
pub(crate) struct Arena {
    /// Owns the memory that `base` points into; never dereferenced while blocks are out.
    _mapping: MmapMut,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory at a fixed address. `Arena` itself never reads or writes it; who may do
// so is settled by the blocks that `pool` hands out, which are disjoint.
unsafe impl Send for Arena {}
// SAFETY: as above; a shared reference gives out addresses alone.
unsafe impl Sync for Arena {}

impl Arena {
    pub(crate) fn new(len: usize) -> Result<Self, Error> {
        let failed = |source| Error::Map { bytes: len, source };
        // Room to move the base up to a huge-page boundary: address space, not memory.
        let align = if len >= HUGE_PAGE { HUGE_PAGE } else { 4096 };
        let size = len.checked_add(align).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let mut mapping = MmapOptions::new().len(size).map_anon().map_err(failed)?;
        #[cfg(target_os = "linux")]
        {
            // A child would share every page copy-on-write, and writing here would double the memory.
            let _ = mapping.advise(memmap2::Advice::DontFork);
        }
        let start = mapping.as_mut_ptr();
        let skip = start.align_offset(align);
        // Only advice: without huge pages the arena works, slower to touch for the first time. Whole pages of
        // the arena alone, lest touching its end take memory beyond it.
        #[cfg(target_os = "linux")]
        let _ = mapping.advise_range(memmap2::Advice::HugePage, skip, len - len % HUGE_PAGE);
        // SAFETY: `skip < align` and the mapping is `len + align` long, so the result is inside it.
        let base = unsafe { NonNull::new_unchecked(start.add(skip)) };
        Ok(Self { _mapping: mapping, base, len })
    }

    /// Lets the system have the pages of a range back; what is read there afterwards is zeros. Where the system has no way
    /// they stay.
    ///
    /// # Safety
    /// Nobody uses the range, and nobody will who has not been told that it is zeros.
    pub(crate) unsafe fn discard(&self, offset: usize, len: usize) {
        assert!(offset + len <= self.len, "{len} bytes at {offset} of an arena of {}", self.len);
        #[cfg(target_os = "linux")]
        {
            use memmap2::UncheckedAdvice::DontNeed;
            let skip = self.base.as_ptr().addr() - self._mapping.as_ptr().addr();
            // SAFETY: the caller's promise; the range is inside the arena, which begins `skip` bytes behind the mapping.
            let _ = unsafe { self._mapping.unchecked_advise_range(DontNeed, skip + offset, len) };
        }
    }

    /// Takes the pages of a range from the system now; what they hold stays as it is. Where the system has no way (Linux
    /// before 5.14, others) they come when they are touched.
    pub(crate) fn populate(&self, offset: usize, len: usize) {
        assert!(offset + len <= self.len, "{len} bytes at {offset} of an arena of {}", self.len);
        #[cfg(target_os = "linux")]
        {
            let skip = self.base.as_ptr().addr() - self._mapping.as_ptr().addr();
            let _ = self._mapping.advise_range(memmap2::Advice::PopulateWrite, skip + offset, len);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Address of the byte at `offset`.
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.len, "offset {offset} of an arena of {}", self.len);
        // SAFETY: just checked that it stays inside the mapping.
        unsafe { self.base.add(offset) }
    }
}
