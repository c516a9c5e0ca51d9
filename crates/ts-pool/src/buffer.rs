// SPDX-License-Identifier: MIT OR Apache-2.0
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use ts_streams::Device;

use crate::Error;
use crate::pool::{Block, HostPool, SetAside};

/// A mutable byte buffer from a [`HostPool`]: a whole block, or a part that was
/// [split off](Buffer::split_off) a block.
///
/// Different threads can fill the parts of one block at the same time. Join the parts again with
/// [`unsplit`](Buffer::unsplit), or drop them. The block is freed when its last part is dropped.
///
/// # Examples
/// ```
/// use ts_pool::{Budget, HostPool};
///
/// let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20)?;
/// let mut head = pool.allocate(10)?;
/// let mut tail = head.split_off(4);
/// std::thread::scope(|scope| {
///     scope.spawn(|| head.fill(1));
///     scope.spawn(|| tail.fill(2));
/// });
/// head.unsplit(tail).expect("the parts are adjacent");
/// assert_eq!(head[..], [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug)]
pub struct Buffer {
    block: Arc<Block>,
    /// Offset of this part in the block, in bytes. No other `Buffer` overlaps `offset..offset +
    /// len`.
    offset: usize,
    len: usize,
}

impl HostPool {
    /// Allocates a buffer of `len` bytes, aligned to [`BLOCK_ALIGN`](crate::BLOCK_ALIGN). Never
    /// waits for memory.
    ///
    /// The buffer contains the bytes that previous owners of the memory wrote. Memory that was
    /// never used, or that [`retire`](Self::retire) returned to the system, is zeroed.
    ///
    /// # Errors
    /// Returns [`Error::Full`] if no free block is large enough now, and [`Error::NeverFits`] if
    /// `len` exceeds the size of the pool.
    pub fn allocate(&self, len: usize) -> Result<Buffer, Error> {
        Ok(Buffer::from_block(self.allocate_block(len)?, len))
    }
}

impl Buffer {
    fn from_block(block: Block, len: usize) -> Self {
        assert!(len <= block.size());
        Self { block: Arc::new(block), offset: 0, len }
    }

    /// Splits off and returns the bytes from `at` on. This buffer keeps the first `at` bytes.
    /// Copies nothing.
    ///
    /// # Panics
    /// Panics if `at` is greater than the length.
    #[must_use = "the bytes from `at` on are accessible only through the returned buffer"]
    pub fn split_off(&mut self, at: usize) -> Buffer {
        assert!(at <= self.len, "cannot split at {at}: the buffer has {} bytes", self.len);
        let tail =
            Buffer { block: Arc::clone(&self.block), offset: self.offset + at, len: self.len - at };
        self.len = at;
        tail
    }

    /// Appends `tail`, which must start in the same block where this buffer ends. Copies nothing.
    ///
    /// # Errors
    /// Returns `tail` unchanged if it is in another block or does not start where this buffer ends.
    pub fn unsplit(&mut self, tail: Buffer) -> Result<(), Buffer> {
        if !Arc::ptr_eq(&self.block, &tail.block) || tail.offset != self.offset + self.len {
            return Err(tail);
        }
        self.len += tail.len;
        Ok(())
    }

    /// Returns whether [`HostPool::populate`] has populated the block of this buffer, or leaves it
    /// out.
    pub fn is_populated(&self) -> bool {
        self.block.is_populated()
    }

    /// Returns the offset of this part in its block, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Locks the pages of this buffer, so that a device copies them without staging, until the
    /// buffer and all that shares its memory are dropped. May block for as long as writing the
    /// memory takes. Has no effect on memory of [`HostPool::for_device`], which is pinned already.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the device cannot lock memory, or not so much of it.
    ///
    /// # Panics
    /// Panics if the buffer is a part of a block.
    pub fn register<D: Device>(&mut self, device: &D) -> Result<(), Error> {
        let is_whole = self.offset == 0;
        let block = Arc::get_mut(&mut self.block).filter(|_| is_whole);
        let block = block.expect("only whole blocks are registered");
        Ok(block.register(device)?)
    }

    /// Converts the buffer to a read-only buffer that can be cloned. Copies nothing.
    pub fn freeze(self) -> SharedBuffer {
        SharedBuffer { block: self.block, offset: self.offset, len: self.len }
    }

    /// Returns the block, if this buffer is the whole block.
    #[cfg(target_os = "linux")]
    pub(crate) fn whole_block(&mut self) -> Option<&mut Block> {
        let whole = self.offset == 0;
        Arc::get_mut(&mut self.block).filter(|_| whole)
    }

    fn ptr(&self) -> NonNull<u8> {
        part_ptr(&self.block, self.offset)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the arena is mapped and initialised while the block lives. The part is inside the
        // block (`from_block`, `split_off`). No other `Buffer` overlaps it, so nobody writes to it.
        unsafe { std::slice::from_raw_parts(self.ptr().as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory is valid as in `deref`. The access is exclusive, because parts do not
        // overlap and this part is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr().as_ptr(), self.len) }
    }
}

/// Read-only bytes of a [`Buffer`] that was [frozen](Buffer::freeze). Clones share the bytes. The
/// block is freed when all clones and all other parts of the block are dropped.
#[derive(Debug, Clone)]
pub struct SharedBuffer {
    block: Arc<Block>,
    offset: usize,
    len: usize,
}

impl SharedBuffer {
    /// Takes the memory out of the pool, and returns its pages to the system, as
    /// [`HostPool::set_aside`] does. Unlike there, the memory is that of this buffer.
    ///
    /// # Errors
    /// Returns the buffer if there are clones or other parts of its block.
    pub fn set_aside(self) -> Result<SetAside, Self> {
        let Self { block, offset, len } = self;
        match Arc::try_unwrap(block) {
            Ok(block) => Ok(SetAside::new(block)),
            Err(block) => Err(Self { block, offset, len }),
        }
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `freeze` consumed the only `Buffer` over these bytes, so nobody writes to them.
        // The arena is mapped while the block lives.
        unsafe { std::slice::from_raw_parts(part_ptr(&self.block, self.offset).as_ptr(), self.len) }
    }
}

fn part_ptr(block: &Block, offset: usize) -> NonNull<u8> {
    debug_assert!(offset <= block.size());
    // SAFETY: `from_block` and `split_off` create all parts, and keep `offset` inside the block or
    // at its end.
    unsafe { block.ptr().add(offset) }
}
