// SPDX-License-Identifier: MIT OR Apache-2.0
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use ts_streams::{Device, MemoryRange, Registration};

use crate::arena::{Arena, BLOCK_ALIGN};
use crate::offset::{BlockId, OffsetAllocator, Owner};
use crate::population::Population;
use crate::{Budget, Error, Reservation};

/// A pool that sub-allocates [`Buffer`](crate::Buffer)s from one range of host memory.
///
/// Clones are handles to the same pool. The memory returns to the system when the last handle and
/// the last buffer are dropped.
///
/// # Examples
/// ```
/// use ts_pool::{BLOCK_ALIGN, Budget, HostPool};
///
/// let budget = Budget::new(1 << 20);
/// let pool = HostPool::new(&budget, 2 * BLOCK_ALIGN)?;
/// let buffer = pool.allocate(100)?; // zeroed, because the memory was never used
/// assert_eq!(buffer[..], [0; 100]);
/// assert_eq!(pool.stats().in_use_bytes, BLOCK_ALIGN);
/// assert!(pool.allocate(2 * BLOCK_ALIGN).is_err(), "full until the buffer is dropped");
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct HostPool {
    inner: Arc<PoolInner>,
}

#[derive(Debug)]
struct PoolInner {
    /// Keeps all pages locked for a device. Dropped before the memory.
    registration: Mutex<Option<Registration>>,
    arena: Arena,
    population: Population,
    state: Mutex<PoolState>,
    /// Whether freed blocks return their pages to the system.
    retired: AtomicBool,
    _reservation: Reservation,
}

#[derive(Debug)]
struct PoolState {
    offsets: OffsetAllocator,
    in_use: usize,
    high_water: usize,
    allocations: u64,
    failures: u64,
}

/// Statistics of a [`HostPool`]. Byte counts include the rounding of each request to a whole block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Size of the pool in bytes.
    pub capacity_bytes: usize,
    /// Bytes in live blocks.
    pub in_use_bytes: usize,
    /// The most bytes that were ever in live blocks at the same time.
    pub high_water_bytes: usize,
    /// Size of the largest free block in bytes.
    pub largest_free_bytes: usize,
    /// Number of successful allocations since the pool was created.
    pub allocations: u64,
    /// Number of allocations that failed with [`Error::Full`].
    pub failures: u64,
}

impl HostPool {
    /// Creates a pool of `capacity_bytes`, rounded down to a multiple of [`BLOCK_ALIGN`].
    ///
    /// The pool reserves its whole size from `budget` now. The system allocates pages on first
    /// touch.
    ///
    /// # Errors
    /// Returns [`Error::OverBudget`] if the budget has fewer unreserved bytes, and [`Error::Map`]
    /// if the system cannot map the memory.
    pub fn new(budget: &Budget, capacity_bytes: usize) -> Result<Self, Error> {
        Self::with_arena(Arena::new, budget, capacity_bytes)
    }

    /// Creates a pool of pinned host memory, which `device` can access directly. Copies between the
    /// pool and the device need no staging buffer.
    ///
    /// A device without pinned memory, such as the CPU device, returns ordinary host memory. All
    /// pages are allocated now, because the pool zeroes the memory.
    ///
    /// # Errors
    /// The same as [`new`](Self::new), and [`Error::Device`] if the device cannot allocate host
    /// memory.
    pub fn for_device<D: Device>(
        device: &D,
        budget: &Budget,
        capacity_bytes: usize,
    ) -> Result<Self, Error> {
        Self::with_arena(|len| Arena::of_device(device, len), budget, capacity_bytes)
    }

    /// Locks all pages of the pool, so that a device copies them without staging, until the pool
    /// and its buffers are dropped. The first call may block for as long as writing the memory
    /// takes. Has no effect on memory of [`for_device`](Self::for_device), which is pinned already.
    ///
    /// From now on, [`retire`](Self::retire) and [`set_aside`](Self::set_aside) return no memory to
    /// the system.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the device cannot lock memory, or not so much of it, or if a
    /// buffer is [registered](crate::Buffer::register).
    pub fn register<D: Device>(&self, device: &D) -> Result<(), Error> {
        let mut registration = self.inner.registration.lock();
        if registration.is_none() && !self.inner.arena.is_of_device() && self.inner.arena.len() > 0
        {
            let arena = &self.inner.arena;
            let range = MemoryRange::new(arena.at(0).as_ptr(), arena.len());
            // SAFETY: the arena is dropped after the registration, and stays mapped until then:
            // `discard` leaves registered pages alone.
            *registration = Some(unsafe { device.register(range) }?);
        }
        Ok(())
    }

    fn is_registered(&self) -> bool {
        self.inner.registration.lock().is_some()
    }

    /// Lets processes that are forked from now on inherit the memory of this pool, copy-on-write.
    ///
    /// By default, the memory is not mapped in forked processes, because the first write to each
    /// page after a fork would copy the page. A process that is forked during a read to the memory
    /// can see a part of the new bytes. Does nothing for pinned memory.
    pub fn keep_in_forks(&self) {
        self.inner.arena.keep_in_forks();
    }

    fn with_arena(
        allocate: impl FnOnce(usize) -> Result<Arena, Error>,
        budget: &Budget,
        capacity_bytes: usize,
    ) -> Result<Self, Error> {
        let blocks =
            u32::try_from(capacity_bytes / BLOCK_ALIGN).unwrap_or(u32::MAX - 1).min(u32::MAX - 1);
        let capacity = blocks as usize * BLOCK_ALIGN;
        let reservation = budget.reserve(capacity)?;
        let state = PoolState {
            offsets: OffsetAllocator::new(blocks),
            in_use: 0,
            high_water: 0,
            allocations: 0,
            failures: 0,
        };
        let inner = PoolInner {
            registration: Mutex::default(),
            arena: allocate(capacity)?,
            population: Population::new(capacity),
            state: Mutex::new(state),
            retired: AtomicBool::new(false),
            _reservation: reservation,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Allocates a block of at least `len` bytes. Returns the same errors as
    /// [`allocate`](Self::allocate).
    pub(crate) fn allocate_block(&self, len: usize) -> Result<Block, Error> {
        let capacity_bytes = self.inner.arena.len();
        if len > capacity_bytes {
            return Err(Error::NeverFits { requested_bytes: len, capacity_bytes });
        }
        let granules = len.div_ceil(BLOCK_ALIGN).max(1);
        let mut state = self.inner.lock();
        let found = u32::try_from(granules).ok().and_then(|n| state.offsets.allocate(n, Owner(0)));
        let Some(id) = found else {
            state.failures += 1;
            return Err(Error::Full {
                requested_bytes: len,
                largest_free_bytes: state.offsets.largest_free() as usize * BLOCK_ALIGN,
                free_bytes: state.offsets.free() as usize * BLOCK_ALIGN,
                capacity_bytes,
            });
        };
        let info = state.offsets.block_info(id).expect("the block was just allocated");
        state.allocations += 1;
        state.in_use += granules * BLOCK_ALIGN;
        state.high_water = state.high_water.max(state.in_use);
        drop(state);
        let ptr = self.inner.arena.at(info.offset as usize * BLOCK_ALIGN);
        Ok(Block {
            pool: self.clone(),
            id,
            ptr,
            size: granules * BLOCK_ALIGN,
            registration: None,
            mapped: None,
            lost: false,
        })
    }

    /// Returns the address range of the pool, for example to register the memory with the kernel or
    /// a device. The range does not change during the lifetime of the pool.
    pub fn as_ptr_range(&self) -> std::ops::Range<*const u8> {
        let arena = &self.inner.arena;
        arena.at(0).as_ptr().cast_const()..arena.at(arena.len()).as_ptr().cast_const()
    }

    /// Returns all free memory to the system now, and the memory of each block when it is freed
    /// later.
    ///
    /// Call this when the program needs few or no further buffers. Without this call, the memory
    /// stays allocated until the last handle and the last buffer are dropped. Has no effect on the
    /// memory of [`for_device`](Self::for_device) pools and on systems other than Linux.
    pub fn retire(&self) {
        self.inner.retired.store(true, Ordering::SeqCst);
        let mut free = Vec::new();
        // Allocates all free memory. Dropping it at the end returns its pages to the system. Other
        // threads cannot allocate the same memory meanwhile.
        loop {
            let largest = self.inner.lock().offsets.largest_free() as usize * BLOCK_ALIGN;
            match self.allocate(largest) {
                Ok(buffer) if largest > 0 => free.push(buffer),
                _ => break,
            }
        }
    }

    /// Takes free memory out of the pool, and returns its pages to the system. The pool gets the
    /// memory back when the result is dropped.
    ///
    /// The pages of [`for_device`](Self::for_device) pools, and on systems other than Linux, stay
    /// allocated.
    ///
    /// # Errors
    /// Returns the same errors as [`allocate`](Self::allocate).
    pub fn set_aside(&self, len: usize) -> Result<SetAside, Error> {
        Ok(SetAside::new(self.allocate_block(len)?))
    }

    /// Allocates the pages of a byte range of the pool from the system now, and keeps their
    /// contents.
    ///
    /// Allocating a page on first touch can take longer than reading it from a disk. Populating the
    /// pages before a read therefore makes the read faster. Blocks until the pages are allocated.
    /// Buffers in the range may be in use. Leaves out memory near buffers that are or were
    /// [watched](crate::WriteWatch) or returned to the system, and what was populated already. Has
    /// no effect on the memory of [`for_device`](Self::for_device) pools, on Linux before 5.14, and
    /// on other systems.
    ///
    /// # Panics
    /// Panics if the range is not inside the pool.
    pub fn populate(&self, range: std::ops::Range<usize>) {
        let arena = &self.inner.arena;
        self.inner.population.populate(range, |part| arena.populate(part.start, part.len()));
    }

    /// Excludes the memory at these addresses from [`populate`](Self::populate). Waits a few
    /// milliseconds if it is being populated.
    #[cfg(target_os = "linux")]
    pub(crate) fn settle(&self, addresses: std::ops::Range<usize>) {
        let (base, len) = (self.inner.arena.at(0).as_ptr().addr(), self.inner.arena.len());
        let at = |address: usize| address.saturating_sub(base).min(len);
        self.inner.population.settle(at(addresses.start)..at(addresses.end));
    }

    /// Returns the current statistics. Coalesces free blocks, to determine the largest one.
    pub fn stats(&self) -> PoolStats {
        let mut state = self.inner.lock();
        PoolStats {
            capacity_bytes: self.inner.arena.len(),
            in_use_bytes: state.in_use,
            high_water_bytes: state.high_water,
            largest_free_bytes: state.offsets.largest_free() as usize * BLOCK_ALIGN,
            allocations: state.allocations,
            failures: state.failures,
        }
    }
}

impl PoolInner {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        // A panic does not poison this lock. That is sound, because no code that can panic runs
        // while the state is inconsistent.
        self.state.lock()
    }
}

/// Exclusive ownership of a range of the arena. Dropping it frees the range.
#[derive(Debug)]
pub(crate) struct Block {
    pool: HostPool,
    id: BlockId,
    ptr: NonNull<u8>,
    size: usize,
    /// Keeps the pages locked for a device.
    registration: Option<Registration>,
    /// The pages of a file that are mapped over the block.
    mapped: Option<MappedPages>,
    /// Whether there may be no memory at the addresses of the block. Such a block is never freed.
    lost: bool,
}

/// Pages of a file that are mapped over a block. Exist only on Linux.
#[derive(Debug)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
struct MappedPages {
    /// The process that mapped them.
    process: u32,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: `ptr` points into the arena, which `pool` keeps alive. `OffsetAllocator` assigns each
// range to one block at a time, so moving the block to another thread moves the only owner of the
// range.
unsafe impl Send for Block {}
// SAFETY: a shared `Block` only returns its address and size. `Buffer` and `SharedBuffer` control
// access to the memory.
unsafe impl Sync for Block {}

impl Block {
    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Returns the offset of the block in the arena, in bytes.
    fn offset(&self) -> usize {
        self.ptr.as_ptr().addr() - self.pool.inner.arena.at(0).as_ptr().addr()
    }

    /// Returns whether the pages of the block were populated, or are not to be.
    pub(crate) fn is_populated(&self) -> bool {
        let offset = self.offset();
        self.pool.inner.population.is_done(offset..offset + self.size)
    }

    /// Excludes the block from [`HostPool::populate`].
    fn settle(&self) {
        let offset = self.offset();
        self.pool.inner.population.settle(offset..offset + self.size);
    }

    /// Maps the pages of a file over the block, until it is freed, and drops `owner` then. `shared`
    /// says whether writes go to the file. Returns whether it did.
    ///
    /// # Safety
    /// No thread may access the block during the call. Nobody may write to the file or truncate it,
    /// except through the block if it is `shared`.
    #[cfg(target_os = "linux")]
    pub(crate) unsafe fn map_pages(
        &mut self,
        file: &std::fs::File,
        shared: bool,
        owner: Box<dyn Any + Send + Sync>,
    ) -> bool {
        if self.registration.is_some() || self.pool.is_registered() {
            return false;
        }
        self.settle();
        let (offset, arena) = (self.offset(), &self.pool.inner.arena);
        // SAFETY: this block owns the range until it is dropped. The rest is the caller's
        // obligation.
        let mapped = unsafe { arena.map_file(offset, self.size, file, shared) };
        if mapped {
            self.mapped = Some(MappedPages { process: std::process::id(), _owner: owner });
        }
        mapped
    }

    /// Locks the pages of the block for a device, until the block is freed.
    pub(crate) fn register<D: Device>(&mut self, device: &D) -> Result<(), ts_streams::Error> {
        let is_pinned = self.pool.inner.arena.is_of_device() || self.pool.is_registered();
        if self.registration.is_none() && !is_pinned {
            let range = MemoryRange::new(self.ptr.as_ptr(), self.size);
            // SAFETY: the arena stays mapped while the block exists, which owns the registration.
            // Blocks are whole pages, and those of this one are neither registered nor pinned.
            self.registration = Some(unsafe { device.register(range) }?);
        }
        Ok(())
    }

    /// Ends what was done with the pages of the block. Gives it anonymous pages again, if a file is
    /// mapped over it. Call this only while the block has no buffer.
    fn unmap_pages(&mut self) {
        self.registration = None;
        // In a forked process, other memory may be at this address.
        if let Some(pages) = self.mapped.take()
            && pages.process == std::process::id()
        {
            // SAFETY: this block owns the range until it is dropped, and has no buffer.
            #[cfg(target_os = "linux")]
            unsafe {
                self.lost = !self.pool.inner.arena.map_own(self.offset(), self.size);
            }
        }
    }

    /// Returns the pages of the block to the system. Call this only while the block has no buffer:
    /// before there is one, or when it is dropped.
    fn discard(&mut self) {
        self.unmap_pages();
        // Else the device would copy other pages than those at the address.
        let registration = self.pool.inner.registration.lock();
        if registration.is_some() {
            return;
        }
        self.settle();
        let offset = self.offset();
        // SAFETY: this block owns the range until it is dropped, and has no buffer, so no thread
        // accesses the range. The next owner relies only on initialised bytes, and zeros are
        // initialised.
        unsafe { self.pool.inner.arena.discard(offset, self.size) };
    }
}

/// Memory of a [`HostPool`] that is not in use, and takes no memory of the system.
#[derive(Debug)]
pub struct SetAside {
    block: Block,
}

impl SetAside {
    /// `block` must have no buffer.
    pub(crate) fn new(mut block: Block) -> Self {
        block.discard();
        Self { block }
    }

    /// Returns the size of the memory in bytes, a multiple of [`BLOCK_ALIGN`].
    pub fn bytes(&self) -> usize {
        self.block.size()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.unmap_pages();
        if self.pool.inner.retired.load(Ordering::SeqCst) {
            self.discard();
        }
        if self.lost {
            return;
        }
        let mut state = self.pool.inner.lock();
        // Coalesces at once: in a pool that is just large enough, a request succeeds only if the
        // free memory is contiguous.
        state.offsets.release(self.id);
        state.in_use -= self.size;
    }
}
