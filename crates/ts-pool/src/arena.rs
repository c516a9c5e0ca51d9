// SPDX-License-Identifier: MIT OR Apache-2.0
//! One run of the host's memory: an anonymous mapping, on huge pages where the system gives them,
//! or what a device gives. This crate's first unsafe module.

use std::ptr::NonNull;

use std::alloc::Layout;

use memmap2::{MmapMut, MmapOptions};
use ts_streams::{Device, MemoryKind, RawMemory};

use crate::Error;

/// Alignment of the arena's first byte: a huge page on x86-64 and arm64, so that slots can lie on
/// whole ones.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed memory at a fixed address until dropped; pages of a mapping are taken from the system
/// when first touched.
#[derive(Debug)]
pub(crate) struct Arena {
    owned: Owned,
    base: NonNull<u8>,
    len: usize,
}

/// Owns the memory that an arena's base points into; never dereferenced while blocks are out.
#[derive(Debug)]
enum Owned {
    Mapping(MmapMut),
    Device { _memory: Box<dyn RawMemory> },
}

// SAFETY: the mapping is plain memory at a fixed address. `Arena` itself never reads or writes it;
// who may do so is settled by the blocks that `pool` hands out, which are disjoint.
unsafe impl Send for Arena {}
// SAFETY: as above; a shared reference gives out addresses alone.
unsafe impl Sync for Arena {}

impl Arena {
    pub(crate) fn new(len: usize) -> Result<Self, Error> {
        let failed = |source| Error::Map { bytes: len, source };
        // Room to move the base up to a huge-page boundary: address space, not memory.
        let align = if len >= HUGE_PAGE { HUGE_PAGE } else { 4096 };
        let size =
            len.checked_add(align).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let mut mapping = MmapOptions::new().len(size).map_anon().map_err(failed)?;
        #[cfg(target_os = "linux")]
        {
            // A child would share every page copy-on-write, and writing here would double the
            // memory.
            let _ = mapping.advise(memmap2::Advice::DontFork);
        }
        let start = mapping.as_mut_ptr();
        let skip = start.align_offset(align);
        // Only advice: without huge pages the arena works, slower to touch for the first time.
        // Whole pages of the arena alone, lest touching its end take memory beyond it.
        #[cfg(target_os = "linux")]
        let _ = mapping.advise_range(memmap2::Advice::HugePage, skip, len - len % HUGE_PAGE);
        // SAFETY: `skip < align` and the mapping is `len + align` long, so the result is inside it.
        let base = unsafe { NonNull::new_unchecked(start.add(skip)) };
        Ok(Self { owned: Owned::Mapping(mapping), base, len })
    }

    /// Memory of the host that the device reaches directly, if it has such a thing.
    pub(crate) fn of_device<D: Device>(device: &D, len: usize) -> Result<Self, Error> {
        let failed = || Error::Map { bytes: len, source: std::io::ErrorKind::OutOfMemory.into() };
        let layout = Layout::from_size_align(len, crate::BLOCK_ALIGN).map_err(|_| failed())?;
        let memory = device.allocate(layout, MemoryKind::PinnedHost)?;
        if memory.kind() == MemoryKind::Device {
            let device = device.info().name.clone();
            return Err(ts_streams::Error::Unsupported {
                device,
                what: "memory that the host reaches",
            }
            .into());
        }
        let range = memory.range();
        if range.len() < len || !range.address().is_multiple_of(crate::BLOCK_ALIGN) {
            return Err(failed());
        }
        let base = NonNull::new(range.as_ptr()).ok_or_else(failed)?;
        // SAFETY: `RawMemory` says that it is this memory's alone, and the host's to reach if it is
        // of such a kind; the length was compared.
        unsafe { base.write_bytes(0, len) };
        Ok(Self { owned: Owned::Device { _memory: Box::new(memory) }, base, len })
    }

    /// Lets the system have the pages of a range back; what is read there afterwards is zeros.
    /// Where the system has no way they stay.
    ///
    /// # Safety
    /// Nobody uses the range, and nobody will who has not been told that it is zeros.
    pub(crate) unsafe fn discard(&self, offset: usize, len: usize) {
        assert!(offset + len <= self.len, "{len} bytes at {offset} of an arena of {}", self.len);
        #[cfg(target_os = "linux")]
        {
            use memmap2::UncheckedAdvice::DontNeed;
            let Owned::Mapping(mapping) = &self.owned else { return };
            let skip = self.base.as_ptr().addr() - mapping.as_ptr().addr();
            // SAFETY: the caller's promise; the range is inside the arena, which begins `skip`
            // bytes behind the mapping.
            let _ = unsafe { mapping.unchecked_advise_range(DontNeed, skip + offset, len) };
        }
    }

    /// Takes the pages of a range from the system now; what they hold stays as it is. Where the
    /// system has no way (Linux before 5.14, others) they come when they are touched.
    pub(crate) fn populate(&self, offset: usize, len: usize) {
        assert!(offset + len <= self.len, "{len} bytes at {offset} of an arena of {}", self.len);
        #[cfg(target_os = "linux")]
        {
            let Owned::Mapping(mapping) = &self.owned else { return };
            let skip = self.base.as_ptr().addr() - mapping.as_ptr().addr();
            let _ = mapping.advise_range(memmap2::Advice::PopulateWrite, skip + offset, len);
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
