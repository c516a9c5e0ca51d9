// SPDX-License-Identifier: MIT OR Apache-2.0
//! Host allocations and transfers. Without CUDA, the only module that accesses raw memory.

use std::alloc::Layout;
use std::ptr::NonNull;

use crate::Error;
use crate::range::MemoryRange;

/// A zeroed host allocation. The system provides each page on first access.
#[derive(Debug)]
pub(crate) struct HostBlock {
    /// The allocation, with room to align the range inside it.
    allocated: NonNull<u8>,
    layout: Layout,
    range: MemoryRange,
}

// SAFETY: the block owns plain memory, and accesses it only in `poison` and when it frees it.
unsafe impl Send for HostBlock {}
// SAFETY: as above.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// Allocates a block, or returns `None` if the system is out of memory.
    pub(crate) fn new(layout: Layout) -> Option<Self> {
        // Every allocator gives this alignment. For larger ones `alloc_zeroed` writes zeros to the
        // whole allocation at once, so the block is aligned by hand.
        const USUAL_ALIGN: usize = 16;
        let (len, align) = (layout.size(), layout.align());
        let room = if align > USUAL_ALIGN { align } else { 0 };
        // Allocations of zero bytes are not allowed.
        let layout =
            Layout::from_size_align(len.checked_add(room)?.max(1), align.min(USUAL_ALIGN)).ok()?;
        // SAFETY: the size is not zero.
        let allocated = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        let start = allocated.as_ptr();
        let range = MemoryRange::new(start.wrapping_add(start.align_offset(align)), len);
        Some(Self { allocated, layout, range })
    }

    pub(crate) fn range(&self) -> MemoryRange {
        self.range
    }

    /// Overwrites the block with `byte`. Only its owner may use it meanwhile.
    pub(crate) fn poison(&self, byte: u8) {
        // SAFETY: this value owns the block, and no work uses it: `SimDevice` calls this only for
        // new memory and for memory that it knows to be unused.
        unsafe { std::ptr::write_bytes(self.range.as_ptr(), byte, self.range.len()) };
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: the block was allocated with this layout, and is freed once.
        unsafe { std::alloc::dealloc(self.allocated.as_ptr(), self.layout) };
    }
}

/// Checks that two ranges have equal lengths and do not overlap.
pub(crate) fn check_copy(to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
    let overlap = to.overlaps(from);
    if to.len() != from.len() || overlap {
        return Err(Error::BadCopy { from_bytes: from.len(), to_bytes: to.len(), overlap });
    }
    Ok(())
}

/// A copy or fill whose memory accesses were promised to be valid.
#[derive(Debug)]
pub(crate) struct Transfer {
    to: MemoryRange,
    from: Source,
}

#[derive(Debug)]
enum Source {
    Memory(MemoryRange),
    Byte(u8),
}

impl Transfer {
    /// Creates a copy.
    ///
    /// # Errors
    /// Returns [`Error::BadCopy`] if the lengths differ or the ranges overlap.
    ///
    /// # Safety
    /// The requirements of [`Stream::copy`](crate::Stream::copy) must hold whenever the copy runs,
    /// and the host must be able to access both ranges.
    pub(crate) unsafe fn copy(to: MemoryRange, from: MemoryRange) -> Result<Self, Error> {
        check_copy(to, from)?;
        Ok(Self { to, from: Source::Memory(from) })
    }

    /// Creates a fill.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    pub(crate) unsafe fn fill(to: MemoryRange, byte: u8) -> Self {
        Self { to, from: Source::Byte(byte) }
    }

    pub(crate) fn to(&self) -> MemoryRange {
        self.to
    }

    pub(crate) fn from(&self) -> Option<MemoryRange> {
        match self.from {
            Source::Memory(from) => Some(from),
            Source::Byte(_) => None,
        }
    }

    pub(crate) fn run(self) {
        match self.from {
            // SAFETY: the creator promised valid accesses; lengths and overlap were checked.
            Source::Memory(from) => unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr(), self.to.as_ptr(), self.to.len());
            },
            // SAFETY: the creator promised valid accesses.
            Source::Byte(byte) => unsafe {
                std::ptr::write_bytes(self.to.as_ptr(), byte, self.to.len());
            },
        }
    }
}
