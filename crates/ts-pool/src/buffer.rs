// SPDX-License-Identifier: MIT OR Apache-2.0
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::pool::Block;

/// Memory that one owner may read and write: a whole block of a pool, or a part split off it.
///
/// Not `Clone`. Parts of one block can be filled at the same time by different threads, then joined
/// again with [`unsplit`](Buffer::unsplit) or simply dropped; the block is freed with its last
/// part.
#[derive(Debug)]
pub struct Buffer {
    block: Arc<Block>,
    /// This part: `offset..offset + len` of the block, no byte of which another `Buffer` covers.
    offset: usize,
    len: usize,
}

impl Buffer {
    pub(crate) fn of_block(block: Block, len: usize) -> Self {
        assert!(len <= block.size());
        Self { block: Arc::new(block), offset: 0, len }
    }

    /// Keeps the first `at` bytes and returns the others.
    ///
    /// # Panics
    /// If `at` is greater than the length.
    #[must_use = "the bytes split off are freed with what this returns"]
    pub fn split_off(&mut self, at: usize) -> Buffer {
        assert!(at <= self.len, "split at {at} of {}", self.len);
        let tail =
            Buffer { block: Arc::clone(&self.block), offset: self.offset + at, len: self.len - at };
        self.len = at;
        tail
    }

    /// Joins `tail`, which must begin in the same block where this buffer ends.
    ///
    /// # Errors
    /// Gives `tail` back when it is not that neighbour.
    pub fn unsplit(&mut self, tail: Buffer) -> Result<(), Buffer> {
        if !Arc::ptr_eq(&self.block, &tail.block) || tail.offset != self.offset + self.len {
            return Err(tail);
        }
        self.len += tail.len;
        Ok(())
    }

    /// Where this part begins in its block, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Ends writing: the same bytes, read-only and shareable.
    pub fn freeze(self) -> SharedBuffer {
        SharedBuffer { block: self.block, offset: self.offset, len: self.len }
    }

    fn ptr(&self) -> NonNull<u8> {
        part_ptr(&self.block, self.offset)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the arena is mapped and zeroed while the block lives, the part is inside the
        // block (`of_block`, `split_off`), and no other `Buffer` covers these bytes, so none is
        // being written.
        unsafe { std::slice::from_raw_parts(self.ptr().as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` and the disjointness of parts make the access
        // exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr().as_ptr(), self.len) }
    }
}

/// Bytes that are no longer written. Clones share them; the block is freed with the last one.
#[derive(Debug, Clone)]
pub struct SharedBuffer {
    block: Arc<Block>,
    offset: usize,
    len: usize,
}

impl Deref for SharedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `freeze` consumed the only `Buffer` over these bytes, so nobody writes them, and
        // the arena is mapped while the block lives.
        unsafe { std::slice::from_raw_parts(part_ptr(&self.block, self.offset).as_ptr(), self.len) }
    }
}

fn part_ptr(block: &Block, offset: usize) -> NonNull<u8> {
    debug_assert!(offset <= block.size());
    // SAFETY: parts are made by `of_block` and `split_off`, which keep `offset` within the block.
    unsafe { block.ptr().add(offset) }
}
