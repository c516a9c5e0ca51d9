// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory by its address, and blocks of the host's. The only unsafe module of the devices without a
//! driver.

use std::alloc::Layout;
use std::ops::Range;
use std::ptr::NonNull;

use crate::Error;

/// What kind of memory a device is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// The device's own.
    Device,
    /// The host's, where the device reaches it directly.
    PinnedHost,
    /// The host's ordinary memory: what a [`CpuDevice`](crate::CpuDevice) gives whatever it is
    /// asked for.
    Host,
    /// One that moves to where it is used.
    Managed,
}

/// A run of bytes at an address, which is valid for host and devices alike. Having one says nothing
/// of who may use the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemoryRange {
    start: *mut u8,
    len: usize,
}

// SAFETY: it is an address; whoever reads or writes there has promised to be allowed to.
unsafe impl Send for MemoryRange {}
// SAFETY: as above.
unsafe impl Sync for MemoryRange {}

impl MemoryRange {
    /// `len` bytes from `start` on.
    pub fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len }
    }

    /// Bytes of the host, which nobody else uses while this is used.
    pub fn of(bytes: &mut [u8]) -> Self {
        Self::new(bytes.as_mut_ptr(), bytes.len())
    }

    /// Where it begins.
    pub fn as_ptr(self) -> *mut u8 {
        self.start
    }

    /// Where it begins, as a number.
    pub fn address(self) -> usize {
        self.start.addr()
    }

    /// Its length in bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Some of its bytes.
    ///
    /// # Panics
    /// If they are not all inside.
    #[must_use]
    pub fn slice(self, bytes: Range<usize>) -> Self {
        assert!(
            bytes.start <= bytes.end && bytes.end <= self.len,
            "{bytes:?} of {} bytes",
            self.len
        );
        Self { start: self.start.wrapping_add(bytes.start), len: bytes.len() }
    }

    /// Whether a byte is in both.
    pub fn overlaps(self, other: Self) -> bool {
        !self.is_empty()
            && !other.is_empty()
            && self.address() < other.address() + other.len
            && other.address() < self.address() + self.len
    }
}

/// Zeroed memory of the host, of which the system gives each page when it is first touched.
#[derive(Debug)]
pub(crate) struct HostBlock {
    /// What was allocated, with room to begin at a multiple of the alignment.
    allocated: NonNull<u8>,
    layout: Layout,
    range: MemoryRange,
}

// SAFETY: it owns plain memory, which it itself does not touch until it frees it.
unsafe impl Send for HostBlock {}
// SAFETY: as above.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// `None` when the system has none.
    pub(crate) fn new(layout: Layout) -> Option<Self> {
        // What every allocator aligns to. Of more, zeroed memory is written to at once, all of it.
        const USUAL_ALIGN: usize = 16;
        let (len, align) = (layout.size(), layout.align());
        let room = if align > USUAL_ALIGN { align } else { 0 };
        // An allocation of no bytes is not allowed.
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

    /// Overwrites it. Only its owner may still use it.
    pub(crate) fn poison(&self, byte: u8) {
        // SAFETY: the block is this value's, and no work on it is left: `SimDevice` calls this for
        // memory that is new, and for memory that it knows nobody uses.
        unsafe { std::ptr::write_bytes(self.range.as_ptr(), byte, self.range.len()) };
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this very layout, and is freed once.
        unsafe { std::alloc::dealloc(self.allocated.as_ptr(), self.layout) };
    }
}

/// What any copy must satisfy.
pub(crate) fn check_copy(to: MemoryRange, from: MemoryRange) -> Result<(), Error> {
    let overlap = to.overlaps(from);
    if to.len != from.len || overlap {
        return Err(Error::BadCopy { from_bytes: from.len, to_bytes: to.len, overlap });
    }
    Ok(())
}

/// A copy or a fill that somebody has promised to be allowed.
#[derive(Debug)]
pub(crate) struct Transfer {
    to: MemoryRange,
    from: From,
}

#[derive(Debug)]
enum From {
    Memory(MemoryRange),
    Byte(u8),
}

impl Transfer {
    /// # Errors
    /// [`Error::BadCopy`].
    ///
    /// # Safety
    /// As [`Stream::copy`](crate::Stream::copy), whenever it runs; both ranges are the host's to
    /// reach.
    pub(crate) unsafe fn copy(to: MemoryRange, from: MemoryRange) -> Result<Self, Error> {
        check_copy(to, from)?;
        Ok(Self { to, from: From::Memory(from) })
    }

    /// # Safety
    /// As [`copy`](Self::copy).
    pub(crate) unsafe fn fill(to: MemoryRange, byte: u8) -> Self {
        Self { to, from: From::Byte(byte) }
    }

    pub(crate) fn to(&self) -> MemoryRange {
        self.to
    }

    pub(crate) fn from(&self) -> Option<MemoryRange> {
        match self.from {
            From::Memory(from) => Some(from),
            From::Byte(_) => None,
        }
    }

    pub(crate) fn run(self) {
        match self.from {
            // SAFETY: promised when it was made, as were equal lengths and disjointness checked.
            From::Memory(from) => unsafe {
                std::ptr::copy_nonoverlapping(from.start, self.to.start, self.to.len);
            },
            // SAFETY: promised when it was made.
            From::Byte(byte) => unsafe { std::ptr::write_bytes(self.to.start, byte, self.to.len) },
        }
    }
}
