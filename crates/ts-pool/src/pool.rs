// SPDX-License-Identifier: MIT OR Apache-2.0
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ts_streams::Device;

use crate::arena::Arena;
use crate::buffer::Buffer;
use crate::offset::{BlockId, OffsetAllocator, Owner};
use crate::{Budget, Error, Reservation};

/// Every block begins at a multiple of this many bytes and is a multiple of it long: a page, which
/// satisfies the memory alignment that any file system asks of direct I/O.
pub const BLOCK_ALIGN: usize = 4096;

/// A pool of host memory. Cloning gives another handle to the same pool; the memory goes back to
/// the system when the last handle and the last buffer are gone.
#[derive(Debug, Clone)]
pub struct HostPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    arena: Arena,
    state: Mutex<State>,
    /// Whether buffers that come back leave for the system.
    retired: AtomicBool,
    _reservation: Reservation,
}

#[derive(Debug)]
struct State {
    offsets: OffsetAllocator,
    in_use: usize,
    high_water: usize,
    allocations: u64,
    failures: u64,
}

/// What a pool holds and has done. Bytes are those of whole blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolStats {
    /// Size of the arena.
    pub capacity_bytes: usize,
    /// Bytes in live blocks.
    pub in_use_bytes: usize,
    /// The most that was in use at any time.
    pub high_water_bytes: usize,
    /// The largest block that could be had now.
    pub largest_free_bytes: usize,
    /// Blocks handed out since the beginning.
    pub allocations: u64,
    /// Requests that found no block.
    pub failures: u64,
}

impl HostPool {
    /// A pool of `capacity_bytes`, rounded down to whole blocks and reserved from `budget` at once.
    ///
    /// # Errors
    /// [`Error::OverBudget`], or [`Error::Map`] when the system refuses the address space.
    pub fn new(budget: &Budget, capacity_bytes: usize) -> Result<Self, Error> {
        Self::of(Arena::new, budget, capacity_bytes)
    }

    /// As [`new`](Self::new), of the memory that a device reaches directly, if it has such a thing:
    /// copies from there need no other.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::Device`].
    pub fn for_device<D: Device>(
        device: &D,
        budget: &Budget,
        capacity_bytes: usize,
    ) -> Result<Self, Error> {
        Self::of(|len| Arena::of_device(device, len), budget, capacity_bytes)
    }

    fn of(
        arena: impl FnOnce(usize) -> Result<Arena, Error>,
        budget: &Budget,
        capacity_bytes: usize,
    ) -> Result<Self, Error> {
        let blocks =
            u32::try_from(capacity_bytes / BLOCK_ALIGN).unwrap_or(u32::MAX - 1).min(u32::MAX - 1);
        let capacity = blocks as usize * BLOCK_ALIGN;
        let reservation = budget.reserve(capacity)?;
        let state = State {
            offsets: OffsetAllocator::new(blocks),
            in_use: 0,
            high_water: 0,
            allocations: 0,
            failures: 0,
        };
        let shared = Shared {
            arena: arena(capacity)?,
            state: Mutex::new(state),
            retired: AtomicBool::new(false),
            _reservation: reservation,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Takes a buffer of `len` bytes that begins at a multiple of [`BLOCK_ALIGN`]. Never blocks.
    ///
    /// What it holds is what its last owner left there, zeros at first.
    ///
    /// # Errors
    /// [`Error::Full`] when no free block is large enough now, [`Error::NeverFits`] when none can
    /// ever be.
    pub fn allocate(&self, len: usize) -> Result<Buffer, Error> {
        let capacity_bytes = self.shared.arena.len();
        if len > capacity_bytes {
            return Err(Error::NeverFits { requested_bytes: len, capacity_bytes });
        }
        let granules = len.div_ceil(BLOCK_ALIGN).max(1);
        let mut state = self.shared.lock();
        let taken = u32::try_from(granules).ok().and_then(|n| state.offsets.allocate(n, Owner(0)));
        let Some(id) = taken else {
            state.failures += 1;
            return Err(Error::Full {
                requested_bytes: len,
                largest_free_bytes: state.offsets.largest_free() as usize * BLOCK_ALIGN,
                free_bytes: state.offsets.free() as usize * BLOCK_ALIGN,
                capacity_bytes,
            });
        };
        let place = state.offsets.place(id).expect("just taken");
        state.allocations += 1;
        state.in_use += granules * BLOCK_ALIGN;
        state.high_water = state.high_water.max(state.in_use);
        drop(state);
        let ptr = self.shared.arena.at(place.offset as usize * BLOCK_ALIGN);
        let block = Block { pool: self.clone(), id, ptr, size: granules * BLOCK_ALIGN };
        Ok(Buffer::of_block(block, len))
    }

    /// Where its memory lies, for those who tell the system or a device of it. It stays there while
    /// the pool lives.
    pub fn as_ptr_range(&self) -> std::ops::Range<*const u8> {
        let arena = &self.shared.arena;
        arena.at(0).as_ptr().cast_const()..arena.at(arena.len()).as_ptr().cast_const()
    }

    /// Says that no more will be allocated: from now on the memory of buffers that are dropped goes
    /// back to the system at once, and not with the last of them. What is free already goes now.
    pub fn retire(&self) {
        self.shared.retired.store(true, Ordering::SeqCst);
        let mut free = Vec::new();
        // All that is free is taken, let go of, and kept from others meanwhile.
        loop {
            let largest = self.shared.lock().offsets.largest_free() as usize * BLOCK_ALIGN;
            match self.allocate(largest) {
                Ok(buffer) if largest > 0 => free.push(buffer),
                _ => break,
            }
        }
    }

    /// Takes the memory of a range of the pool from the system now, whether anybody uses it or not,
    /// so that nobody waits for it later: fresh pages are slower than many a disk. What it holds
    /// stays as it is. Blocks.
    ///
    /// # Panics
    /// When the range leaves the pool.
    pub fn populate(&self, range: std::ops::Range<usize>) {
        self.shared.arena.populate(range.start, range.len());
    }

    /// Statistics of this moment.
    pub fn stats(&self) -> PoolStats {
        let mut state = self.shared.lock();
        PoolStats {
            capacity_bytes: self.shared.arena.len(),
            in_use_bytes: state.in_use,
            high_water_bytes: state.high_water,
            largest_free_bytes: state.offsets.largest_free() as usize * BLOCK_ALIGN,
            allocations: state.allocations,
            failures: state.failures,
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // No code that can panic runs between two states that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A run of the arena that nobody else has; dropping it gives the run back.
#[derive(Debug)]
pub(crate) struct Block {
    pool: HostPool,
    id: BlockId,
    ptr: NonNull<u8>,
    size: usize,
}

// SAFETY: `ptr` points into the arena that `pool` keeps alive, and `OffsetAllocator` gives a run to
// one block at a time, so the block may go to any thread.
unsafe impl Send for Block {}
// SAFETY: a shared `Block` gives out its address alone; access is `Buffer`'s and `SharedBuffer`'s
// affair.
unsafe impl Sync for Block {}

impl Block {
    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.pool.shared.retired.load(Ordering::SeqCst) {
            let offset = self.ptr.as_ptr().addr() - self.pool.shared.arena.at(0).as_ptr().addr();
            // SAFETY: the run is this block's alone until it is released below, and nobody uses it
            // any more; whoever gets it next is told nothing of what it holds but that it is
            // initialised, as zeros are.
            unsafe { self.pool.shared.arena.discard(offset, self.size) };
        }
        let mut state = self.pool.shared.lock();
        // Joined at once: of a budget that is just enough the free memory must be in one piece.
        state.offsets.release(self.id);
        state.in_use -= self.size;
    }
}
