// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pools that recycle memory blocks of a few fixed sizes.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};
use ts_streams::{
    Device, ErrorKind as DeviceErrorKind, HostFn, MemoryKind, MemoryRange, OpenDevice, RawMemory,
    Stream,
};

use crate::Error;
use crate::stack::{Links, Stack};

/// The maximum number of shards of a pool.
const MAX_SHARDS: usize = 64;

/// Configuration of a [`BlockPool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolConfig {
    /// Maximum size of the pool in bytes. Free blocks and blocks in use both count.
    pub pool_bytes: usize,
    /// Size of the smallest block in bytes.
    pub min_block_bytes: usize,
    /// Size of the largest block that the pool recycles, in bytes. Blocks for larger requests are
    /// allocated from the device, and freed when they are dropped.
    pub max_block_bytes: usize,
    /// Number of block sizes; a value below 2 counts as 2. The sizes form a geometric progression
    /// from `min_block_bytes` to `max_block_bytes`, rounded up to multiples of 4096 bytes. Sizes
    /// that are equal after rounding count once.
    pub classes: usize,
    /// Whether to allocate blocks when the pool is created. Half of `pool_bytes` is divided equally
    /// among the block sizes. A block size that exceeds its share gets no block.
    pub preallocate: bool,
}

impl Default for PoolConfig {
    /// Returns a configuration of 256 MiB, with 16 block sizes from 64 KiB to 64 MiB, not
    /// preallocated.
    fn default() -> Self {
        Self {
            pool_bytes: 256 << 20,
            min_block_bytes: 64 << 10,
            max_block_bytes: 64 << 20,
            classes: 16,
            preallocate: false,
        }
    }
}

impl PoolConfig {
    /// Sets the maximum size of the pool in bytes: see [`pool_bytes`](Self::pool_bytes).
    #[must_use]
    pub fn with_pool_bytes(mut self, pool_bytes: usize) -> Self {
        self.pool_bytes = pool_bytes;
        self
    }

    /// Sets the size of the smallest block in bytes: see
    /// [`min_block_bytes`](Self::min_block_bytes).
    #[must_use]
    pub fn with_min_block_bytes(mut self, min_block_bytes: usize) -> Self {
        self.min_block_bytes = min_block_bytes;
        self
    }

    /// Sets the size of the largest recycled block in bytes: see
    /// [`max_block_bytes`](Self::max_block_bytes).
    #[must_use]
    pub fn with_max_block_bytes(mut self, max_block_bytes: usize) -> Self {
        self.max_block_bytes = max_block_bytes;
        self
    }

    /// Sets the number of block sizes: see [`classes`](Self::classes).
    #[must_use]
    pub fn with_classes(mut self, classes: usize) -> Self {
        self.classes = classes;
        self
    }

    /// Sets whether to allocate blocks when the pool is created: see
    /// [`preallocate`](Self::preallocate).
    #[must_use]
    pub fn with_preallocate(mut self, preallocate: bool) -> Self {
        self.preallocate = preallocate;
        self
    }
}

impl PoolConfig {
    /// Returns a configuration for large transfers: 512 MiB, with blocks from 1 MiB to 64 MiB.
    /// Blocks of up to 16 MiB are [preallocated](Self::preallocate).
    pub fn high_throughput() -> Self {
        Self {
            pool_bytes: 512 << 20,
            min_block_bytes: 1 << 20,
            preallocate: true,
            ..Self::default()
        }
    }

    /// Returns a configuration for machines with little memory: 64 MiB, with blocks from 16 KiB to
    /// 16 MiB.
    pub fn low_memory() -> Self {
        Self {
            pool_bytes: 64 << 20,
            min_block_bytes: 16 << 10,
            max_block_bytes: 16 << 20,
            ..Self::default()
        }
    }

    /// Returns the distinct block sizes in bytes, in ascending order. All are multiples of 4096.
    fn block_sizes(&self) -> Vec<usize> {
        let (least, most) =
            (self.min_block_bytes.max(1) as f64, self.max_block_bytes.max(1) as f64);
        let steps = self.classes.max(2) - 1;
        let size = |i: usize| least * (most / least).powf(i as f64 / steps as f64);
        let mut sizes: Vec<usize> =
            (0..=steps).map(|i| (size(i) as usize).next_multiple_of(4096)).collect();
        sizes.dedup();
        sizes
    }
}

/// Another name for [`BlockPool`], for pools of device memory.
pub type GpuMemoryPool<D> = BlockPool<D>;

/// A pool of memory blocks of a few fixed sizes. Acquiring a free block takes no lock. Clones are
/// handles to the same pool.
///
/// The pool is sharded by thread. A thread takes free blocks from its own shard first, and from the
/// other shards if its own has none. A block returns to the shard of the thread that acquired it,
/// whichever thread drops it.
///
/// The pool does not track streams: dropping a [`PooledBuffer`] recycles its block at once. If work
/// on a stream may still use the block, call [`PooledBuffer::release_after`] instead.
///
/// # Examples
/// ```
/// use ts_pool::ts_streams::CpuDevice;
/// use ts_pool::{BlockPool, PoolConfig};
///
/// let pool = BlockPool::new(CpuDevice::new()?, PoolConfig::low_memory())?;
/// let first = pool.acquire(10_000)?;
/// assert_eq!((first.len(), first.block_bytes()), (10_000, 16 << 10));
/// let address = first.range().address();
/// drop(first);
/// // The same block serves the next request of its size class.
/// assert_eq!(pool.acquire(16_000)?.range().address(), address);
/// assert_eq!((pool.stats().hits, pool.stats().misses), (1, 1));
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug)]
pub struct BlockPool<D: Device> {
    shards: Arc<[Arc<Shard<D>>]>,
}

impl<D: Device> Clone for BlockPool<D> {
    fn clone(&self) -> Self {
        Self { shards: Arc::clone(&self.shards) }
    }
}

/// The state that all shards share.
#[derive(Debug)]
struct BlockPoolInner<D: Device> {
    device: D,
    kind: MemoryKind,
    limit_bytes: usize,
    /// The block sizes in ascending order. The index of a size is its class.
    sizes: Vec<usize>,
    /// Indices of slots without a block.
    empty_slots: Stack,
    links: Links,
    slots: Box<[BlockSlot<D::Memory>]>,
    /// Bytes of all blocks, free or in use.
    total: AtomicUsize,
    total_high_water: AtomicUsize,
    /// Blocks that were allocated from the device.
    created: AtomicU64,
    drops: AtomicU64,
    /// Requests that failed.
    failed: AtomicU64,
    /// Blocks larger than all classes that were dropped, and so freed.
    oversized_drops: AtomicU64,
}

/// The free blocks and counters of the threads that map to this shard. The alignment keeps two
/// shards from sharing a cache line.
#[derive(Debug)]
#[repr(align(128))]
struct Shard<D: Device> {
    shared: Arc<BlockPoolInner<D>>,
    /// One stack of free blocks per class.
    free: Box<[StackGroup]>,
    /// Bytes in blocks that threads of this shard acquired and that are not dropped yet.
    in_use: AtomicUsize,
    high_water: AtomicUsize,
    hits: AtomicU64,
    misses: AtomicU64,
    returns: AtomicU64,
}

/// Sixteen stacks, which fill 128 bytes: two cache lines, which many processors fetch together.
#[derive(Debug)]
#[repr(align(128))]
struct StackGroup([Stack; GROUP_LEN]);

const GROUP_LEN: usize = 16;

/// Storage for one block. The owner of the slot's index also owns the block.
#[derive(Debug)]
struct BlockSlot<M> {
    memory: Mutex<Option<M>>,
    /// Address of the memory. The owner of the slot can read it without the lock.
    address: AtomicPtr<u8>,
}

/// Statistics of a [`BlockPool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockStats {
    /// Number of free blocks.
    pub available_buffers: usize,
    /// Number of acquired blocks.
    pub in_use_buffers: usize,
    /// Bytes in free blocks.
    pub available_bytes: usize,
    /// Bytes in acquired blocks.
    pub in_use_bytes: usize,
    /// Bytes in all blocks, free or in use.
    pub pool_bytes: usize,
    /// An upper bound of the most bytes that were ever in use at the same time.
    ///
    /// The value is exact if one thread acquires all blocks. With several threads it can be too
    /// high, because it adds maxima that the threads may have reached at different times.
    pub high_water_bytes: usize,
    /// Number of requests that were served with a free block.
    pub hits: u64,
    /// Number of requests that found no free block, whether or not the device then had memory.
    pub misses: u64,
    /// Number of dropped blocks that were kept for reuse.
    pub returns: u64,
    /// Number of blocks whose memory was returned to the device.
    pub drops: u64,
}

impl BlockStats {
    /// Returns the share of requests that were served with a free block, in per cent, from 0 to
    /// 100. Returns 0 if there were no requests.
    pub fn hit_rate(&self) -> f64 {
        let all = self.hits + self.misses;
        if all > 0 { 100.0 * self.hits as f64 / all as f64 } else { 0.0 }
    }
}

/// A block of a [`BlockPool`].
///
/// Dropping it returns the block to the pool at once. A block larger than
/// [`PoolConfig::max_block_bytes`] is freed instead.
#[derive(Debug)]
pub struct PooledBuffer<D: Device> {
    shard: Arc<Shard<D>>,
    slot: u32,
    /// The size class. `None` for a block larger than all classes, which is not recycled.
    class: Option<u16>,
    range: MemoryRange,
    block_bytes: usize,
}

impl<D: Device> BlockPool<D> {
    /// Creates a pool of device memory, on a device or on the GPU of a number, from 0.
    ///
    /// # Errors
    /// Given a number, returns [`Error::Device`] if no GPU has it. Given a device, fails only if
    /// [`PoolConfig::preallocate`] is set. Returns [`Error::OutOfMemory`] if the device has too
    /// little memory for a block even after the pool frees its other blocks. Returns
    /// [`Error::Device`] if the device fails for another reason.
    pub fn new(device: impl OpenDevice<Device = D>, config: PoolConfig) -> Result<Self, Error> {
        Self::with_kind(device, MemoryKind::Device, config)
    }

    /// Creates a pool of memory of the given kind.
    ///
    /// # Errors
    /// The same as [`new`](Self::new).
    pub fn with_kind(
        device: impl OpenDevice<Device = D>,
        kind: MemoryKind,
        config: PoolConfig,
    ) -> Result<Self, Error> {
        let device = device.open()?;
        let sizes = config.block_sizes();
        // No block is smaller than `sizes[0]`, so the pool never needs more slots than this.
        let count = u32::try_from(config.pool_bytes / sizes[0] + 1).unwrap_or(u32::MAX - 1);
        let (links, empty_slots) = (Links::new(count), Stack::new());
        (0..count).rev().for_each(|slot| empty_slots.push(&links, slot));
        let slot = |_| BlockSlot { memory: Mutex::new(None), address: AtomicPtr::default() };
        let groups = sizes.len().div_ceil(GROUP_LEN);
        let shared = Arc::new(BlockPoolInner {
            device,
            kind,
            limit_bytes: config.pool_bytes,
            sizes,
            empty_slots,
            links,
            slots: (0..count).map(slot).collect(),
            total: AtomicUsize::new(0),
            total_high_water: AtomicUsize::new(0),
            created: AtomicU64::new(0),
            drops: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            oversized_drops: AtomicU64::new(0),
        });
        let shard = |_| {
            Arc::new(Shard {
                shared: Arc::clone(&shared),
                free: (0..groups)
                    .map(|_| StackGroup(std::array::from_fn(|_| Stack::new())))
                    .collect(),
                in_use: AtomicUsize::new(0),
                high_water: AtomicUsize::new(0),
                hits: AtomicU64::new(0),
                misses: AtomicU64::new(0),
                returns: AtomicU64::new(0),
            })
        };
        // Uses four shards per core, up to the maximum, so that threads rarely share a shard.
        let shards = 4 * std::thread::available_parallelism().map_or(1, usize::from);
        let this = Self { shards: (0..shards.min(MAX_SHARDS)).map(shard).collect() };
        if config.preallocate {
            let share = config.pool_bytes / 2 / shared.sizes.len();
            for (class, &size) in shared.sizes.iter().enumerate() {
                for number in 0..share / size {
                    let slot = this.new_block(size)?;
                    this.shards[number % this.shards.len()].push_free(class, slot);
                }
            }
        }
        Ok(this)
    }

    /// Returns the device that the pool allocates blocks from.
    pub fn device(&self) -> &D {
        &self.shared().device
    }

    /// Acquires a block of at least `bytes` bytes. Its contents are undefined.
    ///
    /// If no block of the size class is free, the pool allocates one from the device, which may
    /// block. If the pool is at its limit or the device is full, the pool first frees other free
    /// blocks.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`] if the pool's limit or the device's memory is too small even
    /// after all free blocks are freed. Returns [`Error::Device`] if the device fails for another
    /// reason.
    pub fn acquire(&self, bytes: usize) -> Result<PooledBuffer<D>, Error> {
        let shared = self.shared();
        let class = shared.sizes.partition_point(|&size| size < bytes);
        let class_bytes = shared.sizes.get(class).copied();
        let Some(block_bytes) = class_bytes.or_else(|| bytes.checked_next_multiple_of(4096)) else {
            return Err(self.out_of_memory(bytes));
        };
        let index = shard_index() % self.shards.len();
        let shard = &self.shards[index];
        let free = class_bytes.and_then(|_| self.pop_free(class, index));
        let count = if free.is_some() { &shard.hits } else { &shard.misses };
        count.fetch_add(1, Ordering::Relaxed);
        let slot = match free {
            Some(slot) => slot,
            None => self.new_block(block_bytes).inspect_err(|_| {
                shared.failed.fetch_add(1, Ordering::Relaxed);
            })?,
        };
        shard.count_acquired(block_bytes);
        let range =
            MemoryRange::new(shared.slots[slot as usize].address.load(Ordering::Relaxed), bytes);
        let class = class_bytes.map(|_| class as u16);
        Ok(PooledBuffer { shard: Arc::clone(shard), slot, class, range, block_bytes })
    }

    /// Returns the memory of all free blocks to the device. Blocks while the device frees it.
    pub fn clear(&self) {
        for class in 0..self.shared().sizes.len() {
            while self.evict(class) {}
        }
    }

    /// Returns the current statistics. Reads one counter after the other, so the result may be
    /// slightly inconsistent while other threads use the pool.
    pub fn stats(&self) -> BlockStats {
        let shared = self.shared();
        let total = shared.total.load(Ordering::Relaxed);
        let (in_use, peaks) = self.in_use();
        let sum = |count: fn(&Shard<D>) -> &AtomicU64| -> u64 {
            self.shards.iter().map(|shard| count(shard).load(Ordering::Relaxed)).sum()
        };
        let shared_count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        // Counts that only rare events change are kept, so that acquiring a free block need not
        // change one more.
        let (failed, oversized) =
            (shared_count(&shared.failed), shared_count(&shared.oversized_drops));
        let (hits, misses) = (sum(|shard| &shard.hits), sum(|shard| &shard.misses));
        let (returns, drops) = (sum(|shard| &shard.returns), shared_count(&shared.drops));
        let in_use_buffers = (hits + misses).saturating_sub(failed + returns + oversized);
        let available_buffers =
            shared_count(&shared.created).saturating_sub(drops + in_use_buffers);
        BlockStats {
            available_buffers: available_buffers as usize,
            in_use_buffers: in_use_buffers as usize,
            available_bytes: total.saturating_sub(in_use),
            in_use_bytes: in_use,
            pool_bytes: total,
            high_water_bytes: peaks.min(shared.total_high_water.load(Ordering::Relaxed)),
            hits,
            misses,
            returns,
            drops,
        }
    }

    /// Returns the bytes in acquired blocks, and the sum of the high-water marks of all shards.
    fn in_use(&self) -> (usize, usize) {
        self.shards.iter().fold((0, 0), |(now, peaks), shard| {
            (
                now + shard.in_use.load(Ordering::Relaxed),
                peaks + shard.high_water.load(Ordering::Relaxed),
            )
        })
    }

    fn out_of_memory(&self, requested_bytes: usize) -> Error {
        let shared = self.shared();
        Error::OutOfMemory {
            device: shared.device.info().name.clone(),
            requested_bytes,
            capacity_bytes: shared.total.load(Ordering::Relaxed),
            limit_bytes: shared.limit_bytes,
            in_use_bytes: self.in_use().0,
            largest_free_bytes: 0,
            pending_bytes: 0,
            free_bytes: Vec::new(),
        }
    }

    fn shared(&self) -> &BlockPoolInner<D> {
        &self.shards[0].shared
    }

    /// Pops a free block of a class from the shard with this number, or else from the next shard
    /// that has one. Returns the slot of the block.
    fn pop_free(&self, class: usize, shard: usize) -> Option<u32> {
        let (before, from) = self.shards.split_at(shard);
        from.iter().chain(before).find_map(|shard| shard.pop_free(class))
    }

    /// Allocates a block from the device and returns its slot. Frees other free blocks until there
    /// is room for the new one.
    #[cold]
    fn new_block(&self, bytes: usize) -> Result<u32, Error> {
        let shared = self.shared();
        loop {
            let reserved =
                shared.total.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |total| {
                    total.checked_add(bytes).filter(|&sum| sum <= shared.limit_bytes)
                });
            if let Ok(total) = reserved {
                shared.total_high_water.fetch_max(total + bytes, Ordering::Relaxed);
                match shared.fill_slot(bytes) {
                    Ok(Some(slot)) => return Ok(slot),
                    failed => {
                        shared.total.fetch_sub(bytes, Ordering::Relaxed);
                        failed?;
                    }
                }
            }
            if !self.evict_any() {
                return Err(self.out_of_memory(bytes));
            }
        }
    }

    /// Takes a free block of the largest class that has one, and returns its memory to the device.
    /// Returns `false` if no block is free.
    fn evict_any(&self) -> bool {
        (0..self.shared().sizes.len()).rev().any(|class| self.evict(class))
    }

    /// Takes a free block of a class, and returns its memory to the device. Returns `false` if no
    /// block of the class is free.
    fn evict(&self, class: usize) -> bool {
        let Some(slot) = self.pop_free(class, 0) else { return false };
        self.shared().free_block(slot, self.shared().sizes[class]);
        true
    }
}

/// Returns a number that identifies this thread. The thread's shard is this number modulo the
/// number of shards.
fn shard_index() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static INDEX: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // Fails while the thread exits, when its thread-locals are already destroyed.
    INDEX.try_with(|index| *index).unwrap_or(0)
}

impl<D: Device> Shard<D> {
    /// Counts a block that was just acquired as in use, and updates the high-water mark.
    fn count_acquired(&self, bytes: usize) {
        let used = self.in_use.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if used > self.high_water.load(Ordering::Relaxed) {
            self.high_water.fetch_max(used, Ordering::Relaxed);
        }
    }

    fn pop_free(&self, class: usize) -> Option<u32> {
        self.stack(class).pop(&self.shared.links)
    }

    fn push_free(&self, class: usize, slot: u32) {
        self.stack(class).push(&self.shared.links, slot);
    }

    fn stack(&self, class: usize) -> &Stack {
        &self.free[class / GROUP_LEN].0[class % GROUP_LEN]
    }
}

impl<D: Device> BlockPoolInner<D> {
    /// Allocates a block from the device into an empty slot. Returns `None` if the device is full
    /// or no slot is empty.
    fn fill_slot(&self, bytes: usize) -> Result<Option<u32>, Error> {
        let layout = std::alloc::Layout::from_size_align(bytes, 4096).ok();
        let memory = match layout.map(|layout| self.device.allocate(layout, self.kind)) {
            Some(Ok(memory)) => memory,
            Some(Err(error)) if error.kind() != DeviceErrorKind::Full => return Err(error.into()),
            _ => return Ok(None),
        };
        let Some(slot) = self.empty_slots.pop(&self.links) else { return Ok(None) };
        self.slots[slot as usize].address.store(memory.range().as_ptr(), Ordering::Relaxed);
        *self.memory(slot) = Some(memory);
        self.created.fetch_add(1, Ordering::Relaxed);
        Ok(Some(slot))
    }

    fn free_block(&self, slot: u32, bytes: usize) {
        let memory = self.memory(slot).take();
        self.empty_slots.push(&self.links, slot);
        drop(memory);
        self.total.fetch_sub(bytes, Ordering::Relaxed);
        self.drops.fetch_add(1, Ordering::Relaxed);
    }

    fn memory(&self, slot: u32) -> MutexGuard<'_, Option<D::Memory>> {
        self.slots[slot as usize].memory.lock()
    }
}

impl<D: Device> PooledBuffer<D> {
    /// Returns the address range of the requested bytes.
    pub fn range(&self) -> MemoryRange {
        self.range
    }

    /// Returns the requested size in bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Returns whether the requested size is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the kind of memory that the pool requests from the device. The device may return
    /// another kind: see [`PinnedMemoryPool::is_pinned`].
    pub fn kind(&self) -> MemoryKind {
        self.shard.shared.kind
    }

    /// Returns the size of the whole block in bytes.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Returns the block to the pool when all work submitted to `stream` so far has completed. Does
    /// not block.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the stream has failed. In this case the block returns to the
    /// pool at once, because a failed stream runs no more work.
    pub fn release_after(self, stream: &D::Stream) -> Result<(), Error> {
        Ok(stream.launch_host_fn(HostFn::new(move || drop(self)))?)
    }
}

impl<D: Device> Drop for PooledBuffer<D> {
    fn drop(&mut self) {
        let Shard { shared, returns, in_use, .. } = &*self.shard;
        in_use.fetch_sub(self.block_bytes, Ordering::Relaxed);
        match self.class {
            Some(class) => {
                returns.fetch_add(1, Ordering::Relaxed);
                self.shard.push_free(usize::from(class), self.slot);
            }
            None => {
                shared.oversized_drops.fetch_add(1, Ordering::Relaxed);
                shared.free_block(self.slot, self.block_bytes);
            }
        }
    }
}

/// A [`BlockPool`] of pinned host memory, which the device can access directly. On a device without
/// pinned memory, the pool uses ordinary host memory: see [`is_pinned`](Self::is_pinned).
///
/// # Examples
/// ```
/// use ts_pool::ts_streams::CpuDevice;
/// use ts_pool::{PinnedMemoryPool, PoolConfig};
///
/// let pool = PinnedMemoryPool::new(CpuDevice::new()?, PoolConfig::low_memory())?;
/// assert!(!pool.is_pinned(), "the CPU device has only ordinary memory");
/// let mut buffer = pool.acquire(4)?;
/// let bytes = buffer.host_bytes_mut().expect("the pool allocates host memory");
/// bytes.copy_from_slice(&[1, 2, 3, 4]);
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PinnedMemoryPool<D: Device> {
    pool: BlockPool<D>,
    is_pinned: bool,
}

impl<D: Device> PinnedMemoryPool<D> {
    /// Creates a pool for a device or for the GPU of a number, from 0. Acquires one block, to
    /// determine whether the memory is pinned.
    ///
    /// # Errors
    /// The same as [`BlockPool::new`] and [`BlockPool::acquire`].
    pub fn new(device: impl OpenDevice<Device = D>, config: PoolConfig) -> Result<Self, Error> {
        let pool = BlockPool::with_kind(device, MemoryKind::PinnedHost, config)?;
        let first = pool.acquire(1)?;
        let is_pinned = pool
            .shared()
            .memory(first.slot)
            .as_ref()
            .is_some_and(|m| m.kind() == MemoryKind::PinnedHost);
        drop(first);
        Ok(Self { pool, is_pinned })
    }

    /// Returns whether the memory is pinned, so that the device can access it directly.
    pub fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    /// Returns the underlying pool.
    pub fn blocks(&self) -> &BlockPool<D> {
        &self.pool
    }

    /// Acquires a block of at least `bytes` bytes, like [`BlockPool::acquire`].
    ///
    /// # Errors
    /// The same as [`BlockPool::acquire`].
    pub fn acquire(&self, bytes: usize) -> Result<PooledBuffer<D>, Error> {
        self.pool.acquire(bytes)
    }

    /// Returns the current statistics, like [`BlockPool::stats`].
    pub fn stats(&self) -> BlockStats {
        self.pool.stats()
    }
}
