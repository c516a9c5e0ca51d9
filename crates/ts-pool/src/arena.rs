// SPDX-License-Identifier: MIT OR Apache-2.0
//! A contiguous range of host memory: an anonymous mapping, on huge pages if the system provides
//! them, or pinned memory of a device.

use std::ptr::NonNull;

use std::alloc::Layout;

use memmap2::{MmapMut, MmapOptions};
use ts_streams::{Device, MemoryKind, RawMemory};

use crate::Error;

/// Alignment of blocks in bytes; their sizes are multiples of it. One page, which satisfies the
/// memory alignment that any file system requires for direct I/O.
pub const BLOCK_ALIGN: usize = 4096;

/// Alignment of the arena's first byte: the size of a huge page on x86-64 and arm64.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed memory at a fixed address. The system allocates the pages of a mapping on first touch.
#[derive(Debug)]
pub(crate) struct Arena {
    memory: Memory,
    base: NonNull<u8>,
    len: usize,
}

/// Owns the memory that the base of an arena points into. It is never dereferenced, because blocks
/// alias it.
#[derive(Debug)]
enum Memory {
    Mapping(MmapMut),
    Device { _memory: Box<dyn RawMemory> },
}

// SAFETY: the mapping is plain memory at a fixed address. `Arena` does not access it after
// construction; all access goes through the disjoint blocks that `pool` hands out.
unsafe impl Send for Arena {}
// SAFETY: as above; a shared reference only returns addresses.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `len` bytes of anonymous memory.
    pub(crate) fn new(len: usize) -> Result<Self, Error> {
        let failed = |source| Error::Map { bytes: len, source };
        // Spare room to align the base. It costs address space, not memory.
        let align = if len >= HUGE_PAGE { HUGE_PAGE } else { 4096 };
        let size =
            len.checked_add(align).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let mut mapping = MmapOptions::new().len(size).map_anon().map_err(failed)?;
        #[cfg(target_os = "linux")]
        {
            // A forked child would share every page copy-on-write, and each write in the parent
            // would then copy a page.
            let _ = mapping.advise(memmap2::Advice::DontFork);
        }
        let start = mapping.as_mut_ptr();
        let skip = start.align_offset(align);
        // Without huge pages the arena works too; only the first touch is slower. The advice covers
        // whole huge pages only, because touching a partial one would allocate memory past the end.
        #[cfg(target_os = "linux")]
        let _ = mapping.advise_range(memmap2::Advice::HugePage, skip, len - len % HUGE_PAGE);
        // SAFETY: `skip < align` and the mapping has `len + align` bytes, so the result is inside.
        let base = unsafe { NonNull::new_unchecked(start.add(skip)) };
        Ok(Self { memory: Memory::Mapping(mapping), base, len })
    }

    /// Allocates host memory that the device can access directly (pinned memory), and zeroes it.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the device has no such memory.
    pub(crate) fn of_device<D: Device>(device: &D, len: usize) -> Result<Self, Error> {
        let failed = || Error::Map { bytes: len, source: std::io::ErrorKind::OutOfMemory.into() };
        let layout = Layout::from_size_align(len, BLOCK_ALIGN).map_err(|_| failed())?;
        let memory = device.allocate(layout, MemoryKind::PinnedHost)?;
        if memory.kind() == MemoryKind::Device {
            let device = device.info().name.clone();
            return Err(
                ts_streams::Error::Unsupported { device, what: "pinned host memory" }.into()
            );
        }
        let range = memory.range();
        if range.len() < len || !range.address().is_multiple_of(BLOCK_ALIGN) {
            return Err(failed());
        }
        let base = NonNull::new(range.as_ptr()).ok_or_else(failed)?;
        // SAFETY: `RawMemory` guarantees that nobody else uses the memory and that the host can
        // access every kind but `Device`. Kind and length were checked above.
        unsafe { base.write_bytes(0, len) };
        Ok(Self { memory: Memory::Device { _memory: Box::new(memory) }, base, len })
    }

    /// Returns the pages of a range to the system; they read as zeros afterwards. Does nothing for
    /// device memory and on systems other than Linux.
    ///
    /// # Safety
    /// Nobody accesses the range during the call, and nobody relies on its old contents afterwards.
    pub(crate) unsafe fn discard(&self, offset: usize, len: usize) {
        self.check_range(offset, len);
        #[cfg(target_os = "linux")]
        {
            use memmap2::UncheckedAdvice::DontNeed;
            let Memory::Mapping(mapping) = &self.memory else { return };
            let skip = self.base.as_ptr().addr() - mapping.as_ptr().addr();
            // SAFETY: the caller guarantees that nobody uses the range. It is inside the arena,
            // which starts `skip` bytes after the start of the mapping.
            let _ = unsafe { mapping.unchecked_advise_range(DontNeed, skip + offset, len) };
        }
    }

    /// Allocates the pages of a range now and keeps their contents. Does nothing for device memory,
    /// on Linux before 5.14 and on other systems: pages are then allocated on first touch.
    pub(crate) fn populate(&self, offset: usize, len: usize) {
        self.check_range(offset, len);
        #[cfg(target_os = "linux")]
        {
            let Memory::Mapping(mapping) = &self.memory else { return };
            let skip = self.base.as_ptr().addr() - mapping.as_ptr().addr();
            let _ = mapping.advise_range(memmap2::Advice::PopulateWrite, skip + offset, len);
        }
    }

    fn check_range(&self, offset: usize, len: usize) {
        assert!(
            offset + len <= self.len,
            "range out of bounds: {len} bytes at offset {offset} of an arena of {} bytes",
            self.len
        );
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the byte at `offset`, which may be the end of the arena.
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        self.check_range(offset, 0);
        // SAFETY: the check above keeps the result inside the mapping or at its end.
        unsafe { self.base.add(offset) }
    }
}
