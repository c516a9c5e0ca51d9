// SPDX-License-Identifier: MIT OR Apache-2.0
//! A contiguous range of host memory. It is either an anonymous mapping, with huge pages if the
//! system provides them, or host memory that a device allocated, usually pinned.

use std::ptr::NonNull;

use std::alloc::Layout;
#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::{MmapMut, MmapOptions};
use ts_streams::{Device, MemoryKind, RawMemory};

use crate::Error;

/// Alignment of blocks in bytes. The size of a block is a multiple of it.
///
/// 4096 bytes is the usual page size, and enough for the alignment that file systems require for
/// direct I/O.
pub const BLOCK_ALIGN: usize = 4096;

/// Alignment in bytes of mapped arenas that are at least this long: the usual size of a huge page
/// on x86-64 and arm64.
const HUGE_PAGE: usize = 2 << 20;

/// Memory at a fixed address, initially zeroed. The system allocates the pages of a mapping on
/// first touch.
#[derive(Debug)]
pub(crate) struct Arena {
    memory: Memory,
    base: NonNull<u8>,
    len: usize,
    /// Whether forked processes inherit the memory.
    #[cfg(target_os = "linux")]
    in_forks: AtomicBool,
}

/// The owner of the memory that `Arena::base` points into. The bytes are never accessed through the
/// owner, because blocks alias them.
#[derive(Debug)]
enum Memory {
    #[cfg_attr(
        not(target_os = "linux"),
        expect(dead_code, reason = "only Linux takes advice about its pages")
    )]
    Mapping(MmapMut),
    Device {
        _memory: Box<dyn RawMemory>,
    },
}

// SAFETY: the memory has a fixed address and is not tied to a thread. `Arena` does not access it
// after construction; all access goes through the disjoint blocks that `HostPool` allocates.
unsafe impl Send for Arena {}
// SAFETY: the safe methods that take `&self` only return addresses, or advise the system about
// pages without changing their contents.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `len` bytes of anonymous memory.
    ///
    /// # Errors
    /// Returns [`Error::Map`] if the system cannot map the memory.
    pub(crate) fn new(len: usize) -> Result<Self, Error> {
        let failed = |source| Error::Map { bytes: len, source };
        // Aligning the base needs spare bytes, which take up address space but no memory.
        let align = if len >= HUGE_PAGE { HUGE_PAGE } else { 4096 };
        let size =
            len.checked_add(align).ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let mut mapping = MmapOptions::new().len(size).map_anon().map_err(failed)?;
        #[cfg(target_os = "linux")]
        {
            // Without this advice, a forked child would share every page copy-on-write, and the
            // first write to each page in the parent would copy the page.
            let _ = mapping.advise(memmap2::Advice::DontFork);
        }
        let start = mapping.as_mut_ptr();
        let skip = start.align_offset(align);
        // The result is ignored, because the arena also works without huge pages, only more slowly.
        // The advice covers whole huge pages only, because touching a partial one would allocate
        // memory past the end.
        #[cfg(target_os = "linux")]
        let _ = mapping.advise_range(memmap2::Advice::HugePage, skip, len - len % HUGE_PAGE);
        // SAFETY: `skip < align`, and the mapping has `len + align` bytes. So the result is inside
        // the mapping, and is not null.
        let base = unsafe { NonNull::new_unchecked(start.add(skip)) };
        Ok(Self::of(Memory::Mapping(mapping), base, len))
    }

    /// Allocates pinned host memory, which the device can access directly, and zeroes it. A device
    /// without pinned memory may return ordinary host memory.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the device cannot allocate host memory. Returns [`Error::Map`]
    /// if `len` exceeds the address space, or if the memory is too short or not aligned.
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
            let reason = format!(
                "the device returned {} bytes at {:#x}, expected at least {len} bytes aligned to \
                 {BLOCK_ALIGN}",
                range.len(),
                range.address()
            );
            return Err(Error::Map { bytes: len, source: std::io::Error::other(reason) });
        }
        let base = NonNull::new(range.as_ptr()).ok_or_else(failed)?;
        // SAFETY: `RawMemory` guarantees that nobody else uses the memory and that the host can
        // access every kind but `Device`. Kind and length were checked above.
        unsafe { base.write_bytes(0, len) };
        Ok(Self::of(Memory::Device { _memory: Box::new(memory) }, base, len))
    }

    fn of(memory: Memory, base: NonNull<u8>, len: usize) -> Self {
        Self {
            memory,
            base,
            len,
            #[cfg(target_os = "linux")]
            in_forks: AtomicBool::new(false),
        }
    }

    /// Returns whether a device allocated the memory.
    pub(crate) fn is_of_device(&self) -> bool {
        matches!(self.memory, Memory::Device { .. })
    }

    /// Returns the pages of a range to the system. The range then reads as zeros. Does nothing for
    /// memory that a device allocated, and on systems other than Linux.
    ///
    /// # Panics
    /// Panics if the range is not inside the arena.
    ///
    /// # Safety
    /// No thread may access the range during the call or rely on its old contents afterwards.
    pub(crate) unsafe fn discard(&self, offset: usize, len: usize) {
        self.check_range(offset, len);
        #[cfg(target_os = "linux")]
        {
            use memmap2::UncheckedAdvice::DontNeed;
            let Memory::Mapping(mapping) = &self.memory else { return };
            let skip = self.base.as_ptr().addr() - mapping.as_ptr().addr();
            // SAFETY: the caller guarantees that no thread accesses the range or relies on its
            // contents. The range is inside the arena (`check_range`), which starts `skip` bytes
            // after the start of the mapping.
            let _ = unsafe { mapping.unchecked_advise_range(DontNeed, skip + offset, len) };
        }
    }

    /// Allocates the pages of a range now instead of on first touch. Keeps their contents. Does
    /// nothing for memory that a device allocated, on Linux before 5.14, and on other systems.
    ///
    /// # Panics
    /// Panics if the range is not inside the arena.
    pub(crate) fn populate(&self, offset: usize, len: usize) {
        self.check_range(offset, len);
        #[cfg(target_os = "linux")]
        {
            let Memory::Mapping(mapping) = &self.memory else { return };
            let skip = self.base.as_ptr().addr() - mapping.as_ptr().addr();
            let _ = mapping.advise_range(memmap2::Advice::PopulateWrite, skip + offset, len);
        }
    }

    /// Maps the pages of a file over a range. `shared` says whether writes go to the file. Returns
    /// whether it did. Does nothing for memory that a device allocated.
    ///
    /// # Panics
    /// Panics if the range is not inside the arena.
    ///
    /// # Safety
    /// No thread may access the range during the call. As long as the file is mapped, nobody may
    /// write to it or truncate it, except through the range if it is `shared`.
    #[cfg(target_os = "linux")]
    pub(crate) unsafe fn map_file(
        &self,
        offset: usize,
        len: usize,
        file: &std::fs::File,
        shared: bool,
    ) -> bool {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
        self.check_range(offset, len);
        if matches!(self.memory, Memory::Device { .. }) {
            return false;
        }
        let kind = if shared { MapFlags::SHARED } else { MapFlags::PRIVATE | MapFlags::NORESERVE };
        let at = self.at(offset).as_ptr().cast();
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, kind | MapFlags::FIXED);
        // SAFETY: the range is inside the mapping of this arena (`check_range`). The rest is the
        // caller's obligation.
        let mapped = unsafe { mmap(at, len, access, flags, file, 0) }.is_ok();
        if mapped {
            self.advise_forks(offset, len);
            if !shared {
                // Maps pages that are in memory, which would fault one by one. The result does not
                // matter, as they still do if this fails.
                // SAFETY: this does not change the content of memory.
                let _ = unsafe { madvise(at, len, Advice::LinuxPopulateRead) };
            }
        }
        mapped
    }

    /// Gives a range new anonymous pages, after a file was mapped over it. Returns whether it did.
    ///
    /// # Panics
    /// Panics if the range is not inside the arena.
    ///
    /// # Safety
    /// No thread may access the range during the call or rely on its old contents afterwards.
    #[cfg(target_os = "linux")]
    pub(crate) unsafe fn map_own(&self, offset: usize, len: usize) -> bool {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        self.check_range(offset, len);
        let at = self.at(offset).as_ptr().cast();
        let (access, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: the range is inside the mapping of this arena (`check_range`). The rest is the
        // caller's obligation.
        let mapped = unsafe { mmap_anonymous(at, len, access, flags) }.is_ok();
        if mapped {
            // Like its neighbours, so that the system joins them.
            if self.len >= HUGE_PAGE {
                // SAFETY: this does not change the content of memory.
                let _ = unsafe { madvise(at, len, Advice::LinuxHugepage) };
            }
            self.advise_forks(offset, len);
        }
        mapped
    }

    /// Leaves a range out of forked processes, unless the arena is kept in them.
    #[cfg(target_os = "linux")]
    fn advise_forks(&self, offset: usize, len: usize) {
        use rustix::mm::{Advice, madvise};
        if !self.in_forks.load(Ordering::Relaxed) {
            let at = self.at(offset).as_ptr().cast();
            // SAFETY: this does not change the content of memory.
            let _ = unsafe { madvise(at, len, Advice::LinuxDontFork) };
        }
    }

    /// Lets processes that are forked from now on inherit the memory, copy-on-write. Does nothing
    /// for memory that a device allocated, and on systems other than Linux, where forked processes
    /// inherit the memory anyway.
    pub(crate) fn keep_in_forks(&self) {
        #[cfg(target_os = "linux")]
        if let Memory::Mapping(mapping) = &self.memory {
            self.in_forks.store(true, Ordering::Relaxed);
            let _ = mapping.advise(memmap2::Advice::DoFork);
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

    /// Returns the address `offset` bytes after the base. `offset` may equal the arena's length.
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        self.check_range(offset, 0);
        // SAFETY: `check_range` keeps the result inside the arena or at its end.
        unsafe { self.base.add(offset) }
    }
}
