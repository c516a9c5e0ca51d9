// SPDX-License-Identifier: MIT OR Apache-2.0
//! Host allocations and transfers. Without the feature `cuda`, no other module accesses raw memory.

use std::alloc::Layout;
use std::ptr::NonNull;

use crate::Error;
use crate::range::MemoryRange;

/// A zeroed host allocation. If it is large, the operating system maps each page on first access.
#[derive(Debug)]
pub(crate) struct HostBlock {
    /// Start of the allocation, which has extra bytes so that `range` can be aligned inside it.
    allocated: NonNull<u8>,
    layout: Layout,
    range: MemoryRange,
}

// SAFETY: the block owns its memory, and accesses it only in `poison` and `drop`. `poison` requires
// that no other code accesses the memory during the call.
unsafe impl Send for HostBlock {}
// SAFETY: as above.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// Allocates a block. Returns `None` if the system is out of memory or the size overflows.
    pub(crate) fn new(layout: Layout) -> Option<Self> {
        // Up to this alignment, `alloc_zeroed` obtains large blocks as zeroed pages from the
        // operating system. For a larger alignment it writes the zeros itself, which touches every
        // page. To avoid that, the code below allocates extra bytes and aligns the range inside the
        // allocation.
        const USUAL_ALIGN: usize = 16;
        let (len, align) = (layout.size(), layout.align());
        let room = if align > USUAL_ALIGN { align } else { 0 };
        // `alloc_zeroed` does not allow a size of zero.
        let layout =
            Layout::from_size_align(len.checked_add(room)?.max(1), align.min(USUAL_ALIGN)).ok()?;
        // SAFETY: the size is at least 1 because of `max(1)`.
        let allocated = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        let start = allocated.as_ptr();
        let range = MemoryRange::new(start.wrapping_add(start.align_offset(align)), len);
        Some(Self { allocated, layout, range })
    }

    pub(crate) fn range(&self) -> MemoryRange {
        self.range
    }

    /// Overwrites the block with `byte`. No other code may access the block during the call.
    pub(crate) fn poison(&self, byte: u8) {
        // SAFETY: `range` lies inside the allocation that this value owns. No work uses the block:
        // `SimDevice` calls this only for new memory and for memory that it found to be unused.
        unsafe { std::ptr::write_bytes(self.range.as_ptr(), byte, self.range.len()) };
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: `alloc_zeroed` returned the pointer for this layout, and only `drop` frees it.
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

/// A copy or fill. Its creator guarantees that the memory is valid when the transfer runs.
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
    /// `to` must meet the requirements of [`copy`](Self::copy).
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
            // SAFETY: the caller of `copy` guarantees that both ranges are valid host memory, that
            // nothing else accesses `to` and that nothing writes to `from`. `copy` checked that
            // the lengths are equal and that the ranges do not overlap.
            Source::Memory(from) => unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr(), self.to.as_ptr(), self.to.len());
            },
            // SAFETY: the caller of `fill` guarantees that `to` is valid host memory which nothing
            // else accesses.
            Source::Byte(byte) => unsafe {
                std::ptr::write_bytes(self.to.as_ptr(), byte, self.to.len());
            },
        }
    }
}
