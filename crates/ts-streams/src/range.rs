// SPDX-License-Identifier: MIT OR Apache-2.0
//! Address ranges and kinds of memory.

use std::ops::Range;

/// The kind of memory to allocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory of the device.
    Device,
    /// Page-locked host memory that the device can access directly.
    PinnedHost,
    /// Ordinary host memory. A [`CpuDevice`](crate::CpuDevice) returns it for every requested kind.
    Host,
    /// Managed memory, which migrates between the host and the device on access.
    Managed,
}

/// A range of addresses in host or device memory.
///
/// The range does not own the memory and gives no right to access it.
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
    /// Creates a range of `len` bytes that starts at `start`.
    pub fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len }
    }

    /// Creates the range of a host slice. The range does not borrow the slice: keep the slice alive
    /// and unused until all work on the range is done.
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

    /// Returns a part of the range. `bytes` contains byte offsets from the start.
    ///
    /// # Panics
    /// Panics if `bytes.start > bytes.end` or `bytes.end > self.len()`.
    #[must_use]
    pub fn slice(self, bytes: Range<usize>) -> Self {
        assert!(
            bytes.start <= bytes.end && bytes.end <= self.len,
            "invalid byte range {bytes:?}: expected start <= end <= {}",
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
