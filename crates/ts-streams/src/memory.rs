// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory ranges and host allocations. Without CUDA, the only module that accesses raw memory.

use std::alloc::Layout;
use std::ops::Range;
use std::ptr::NonNull;

use crate::Error;

/// The kind of memory to allocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory of the device.
    Device,
    /// Page-locked host memory that the device can access directly.
    PinnedHost,
    /// Ordinary host memory. A [`CpuDevice`](crate::CpuDevice) returns it for every requested kind.
    Host,
    /// Managed memory, which migrates to where it is used.
    Managed,
}

/// An address range, valid on the host and on devices. Holding one gives no right to access the
/// bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemoryRange {
    start: *mut u8,
    len: usize,
}

// SAFETY: this is a plain address; each access through it is unsafe and has its own requirements.
unsafe impl Send for MemoryRange {}
// SAFETY: as above.
unsafe impl Sync for MemoryRange {}

impl MemoryRange {
    /// Creates a range of `len` bytes from `start`.
    pub fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len }
    }

    /// Creates the range of a host slice. Nothing else may access the slice while work uses the
    /// range.
    pub fn of(bytes: &mut [u8]) -> Self {
        Self::new(bytes.as_mut_ptr(), bytes.len())
    }

    /// Returns the first address as a pointer.
    pub fn as_ptr(self) -> *mut u8 {
        self.start
    }

    /// Returns the first address as a number.
    pub fn address(self) -> usize {
        self.start.addr()
    }

    /// Returns the length in bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Returns whether the range is empty.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the sub-range `bytes`, relative to the start.
    ///
    /// # Panics
    /// Panics if `bytes` is not inside the range.
    #[must_use]
    pub fn slice(self, bytes: Range<usize>) -> Self {
        assert!(
            bytes.start <= bytes.end && bytes.end <= self.len,
            "range {bytes:?} is out of bounds: the memory has {} bytes",
            self.len
        );
        Self { start: self.start.wrapping_add(bytes.start), len: bytes.len() }
    }

    /// Returns whether the two ranges share at least one byte.
    pub fn overlaps(self, other: Self) -> bool {
        !self.is_empty()
            && !other.is_empty()
            && self.address() < other.address() + other.len
            && other.address() < self.address() + self.len
    }
}

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
    if to.len != from.len || overlap {
        return Err(Error::BadCopy { from_bytes: from.len, to_bytes: to.len, overlap });
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
                std::ptr::copy_nonoverlapping(from.start, self.to.start, self.to.len);
            },
            // SAFETY: the creator promised valid accesses.
            Source::Byte(byte) => unsafe {
                std::ptr::write_bytes(self.to.start, byte, self.to.len);
            },
        }
    }
}
