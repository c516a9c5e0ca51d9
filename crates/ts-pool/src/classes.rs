// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocks of a few sizes, kept to be used again.

use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ts_streams::{Device, ErrorKind as DeviceErrorKind, HostFn, MemoryKind, MemoryRange, RawMemory, Stream};

use crate::Error;
use crate::stack::{Links, Stack};

/// How many blocks a pool can have at once.
const MAX_BLOCKS: u32 = 1 << 14;

/// How a pool of blocks is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// The most memory that the pool holds, in bytes, in use or not.
    pub pool_bytes: usize,
    /// The smallest block, in bytes.
    pub min_block_bytes: usize,
    /// The largest block that is kept, in bytes.
    pub max_block_bytes: usize,
    /// How many sizes there are between these, each as many times the one before.
    pub classes: usize,
    /// Whether blocks are taken from the device when the pool is made, some of each size: half of the pool.
    pub preallocate: bool,
}

impl Default for PoolConfig {
    /// 256 MB in blocks of 64 KB to 64 MB, of 16 sizes.
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
    /// For large transfers: 512 MB, from 1 MB on, taken at once.
    pub fn high_throughput() -> Self {
        Self { pool_bytes: 512 << 20, min_block_bytes: 1 << 20, preallocate: true, ..Self::default() }
    }

    /// For small machines: 64 MB, from 16 KB on.
    pub fn low_memory() -> Self {
        Self { pool_bytes: 64 << 20, min_block_bytes: 16 << 10, max_block_bytes: 16 << 20, ..Self::default() }
    }

    /// The sizes, the smallest first: multiples of 4096 bytes.
    fn sizes(&self) -> Vec<usize> {
        let (least, most) = (self.min_block_bytes.max(1) as f64, self.max_block_bytes.max(1) as f64);
        let steps = self.classes.max(2) - 1;
        let size = |i: usize| least * (most / least).powf(i as f64 / steps as f64);
        let mut sizes: Vec<usize> = (0..=steps).map(|i| (size(i) as usize).next_multiple_of(4096)).collect();
        sizes.dedup();
        sizes
    }
}

/// A pool of a device's memory in blocks: see [`BlockPool`].
pub type GpuMemoryPool<D> = BlockPool<D>;

/// Blocks of memory of some sizes, kept to be used again. A block that is there is had without a lock. Cloning gives another
/// handle.
///
/// Work of streams is the owner's to wait for: see [`PooledBuffer::release_after`].
#[derive(Debug)]
pub struct BlockPool<D: Device> {
    shared: Arc<Shared<D>>,
}

impl<D: Device> Clone for BlockPool<D> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

#[derive(Debug)]
struct Shared<D: Device> {
    device: D,
    kind: MemoryKind,
    limit: usize,
    sizes: Vec<usize>,
    /// Free blocks of each size,
    free: Vec<Stack>,
    /// and places for blocks that are not.
    empty: Stack,
    links: Links,
    places: Box<[BlockPlace<D::Memory>]>,
    /// Bytes of all blocks.
    held: AtomicUsize,
    in_use: AtomicUsize,
    high_water: AtomicUsize,
    hits: AtomicU64,
    misses: AtomicU64,
    returns: AtomicU64,
    drops: AtomicU64,
}

#[derive(Debug)]
struct BlockPlace<M> {
    memory: Mutex<Option<M>>,
    /// Where the memory is, for those who have the place.
    address: AtomicPtr<u8>,
}

/// What a [`BlockPool`] holds and has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockStats {
    /// Bytes in blocks that are free.
    pub available_bytes: usize,
    /// Bytes in blocks that somebody has.
    pub in_use_bytes: usize,
    /// Bytes in all blocks.
    pub pool_bytes: usize,
    /// The most that was in use at any time.
    pub high_water_bytes: usize,
    /// Requests that a free block was there for.
    pub hits: u64,
    /// Requests for which memory came from the device.
    pub misses: u64,
    /// Blocks that came back and were kept.
    pub returns: u64,
    /// Blocks that went back to the device.
    pub drops: u64,
}

impl BlockStats {
    /// The share of requests that a free block was there for; 0 without requests.
    pub fn hit_rate(&self) -> f64 {
        let all = self.hits + self.misses;
        if all > 0 { self.hits as f64 / all as f64 } else { 0.0 }
    }
}

/// Memory of a [`BlockPool`]. Not `Clone`; dropping it gives it back.
#[derive(Debug)]
pub struct PooledBuffer<D: Device> {
    shared: Arc<Shared<D>>,
    place: u32,
    /// Its size; `None` for one that is larger than all and is not kept.
    class: Option<u16>,
    range: MemoryRange,
    block_bytes: usize,
}

impl<D: Device> BlockPool<D> {
    /// A pool of the device's own memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`] when blocks are to be taken at once and cannot be had.
    pub fn new(device: D, config: PoolConfig) -> Result<Self, Error> {
        Self::of(device, MemoryKind::Device, config)
    }

    /// A pool of memory of a kind.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of(device: D, kind: MemoryKind, config: PoolConfig) -> Result<Self, Error> {
        let sizes = config.sizes();
        let (links, empty) = (Links::new(MAX_BLOCKS), Stack::new());
        (0..MAX_BLOCKS).rev().for_each(|place| empty.push(&links, place));
        let place = |_| BlockPlace { memory: Mutex::new(None), address: AtomicPtr::default() };
        let shared = Shared {
            device,
            kind,
            limit: config.pool_bytes,
            free: sizes.iter().map(|_| Stack::new()).collect(),
            sizes,
            empty,
            links,
            places: (0..MAX_BLOCKS).map(place).collect(),
            held: AtomicUsize::new(0),
            in_use: AtomicUsize::new(0),
            high_water: AtomicUsize::new(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            returns: AtomicU64::new(0),
            drops: AtomicU64::new(0),
        };
        let this = Self { shared: Arc::new(shared) };
        if config.preallocate {
            let share = config.pool_bytes / 2 / this.shared.sizes.len();
            for (class, &size) in this.shared.sizes.iter().enumerate() {
                for _ in 0..share / size {
                    let place = this.shared.new_block(size)?;
                    this.shared.free[class].push(&this.shared.links, place);
                }
            }
        }
        Ok(this)
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.shared.device
    }

    /// Memory of at least one block's size for `bytes` bytes. What it holds is undefined. Blocks only while the device gives new
    /// memory, if no block is free.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the pool holds as much as it may, all of it in use, or the device has no more;
    /// [`Error::Device`].
    pub fn acquire(&self, bytes: usize) -> Result<PooledBuffer<D>, Error> {
        self.shared.acquire(bytes)
    }

    /// Gives all free blocks back to the device. Blocks while the device takes them.
    pub fn clear(&self) {
        for class in 0..self.shared.sizes.len() {
            while self.shared.evict(class) {}
        }
    }

    /// Statistics of this moment; while others use the pool its numbers are of moments close to each other.
    pub fn stats(&self) -> BlockStats {
        let shared = &self.shared;
        let (in_use, held) = (shared.in_use.load(Ordering::Relaxed), shared.held.load(Ordering::Relaxed));
        BlockStats {
            available_bytes: held.saturating_sub(in_use),
            in_use_bytes: in_use,
            pool_bytes: held,
            high_water_bytes: shared.high_water.load(Ordering::Relaxed),
            hits: shared.hits.load(Ordering::Relaxed),
            misses: shared.misses.load(Ordering::Relaxed),
            returns: shared.returns.load(Ordering::Relaxed),
            drops: shared.drops.load(Ordering::Relaxed),
        }
    }
}

impl<D: Device> Shared<D> {
    fn acquire(self: &Arc<Self>, bytes: usize) -> Result<PooledBuffer<D>, Error> {
        let class = self.sizes.partition_point(|&size| size < bytes);
        let kept = self.sizes.get(class).copied();
        let Some(block_bytes) = kept.or_else(|| bytes.checked_next_multiple_of(4096)) else {
            return Err(self.out_of_memory(bytes));
        };
        let free = kept.and_then(|_| self.free[class].pop(&self.links));
        let place = match free {
            Some(place) => {
                self.hits.fetch_add(1, Ordering::Relaxed);
                place
            }
            None => {
                self.misses.fetch_add(1, Ordering::Relaxed);
                self.new_block(block_bytes)?
            }
        };
        let used = self.in_use.fetch_add(block_bytes, Ordering::Relaxed) + block_bytes;
        if used > self.high_water.load(Ordering::Relaxed) {
            self.high_water.fetch_max(used, Ordering::Relaxed);
        }
        let range = MemoryRange::new(self.places[place as usize].address.load(Ordering::Relaxed), bytes);
        let class = kept.map(|_| class as u16);
        Ok(PooledBuffer { shared: Arc::clone(self), place, class, range, block_bytes })
    }

    /// Takes memory from the device, at the cost of blocks of other sizes that are free.
    #[cold]
    fn new_block(&self, bytes: usize) -> Result<u32, Error> {
        loop {
            let reserved = self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
                held.checked_add(bytes).filter(|&sum| sum <= self.limit)
            });
            if reserved.is_ok() {
                match self.fill_place(bytes) {
                    Ok(place) => return Ok(place),
                    Err(error) => {
                        self.held.fetch_sub(bytes, Ordering::Relaxed);
                        if error.kind() != crate::ErrorKind::Full || !self.evict_any() {
                            return Err(error);
                        }
                        continue;
                    }
                }
            }
            if !self.evict_any() {
                return Err(self.out_of_memory(bytes));
            }
        }
    }

    fn fill_place(&self, bytes: usize) -> Result<u32, Error> {
        let layout =
            std::alloc::Layout::from_size_align(bytes, 4096).map_err(|_| self.out_of_memory(bytes))?;
        let memory = self.device.allocate(layout, self.kind).map_err(|error| match error.kind() {
            DeviceErrorKind::Full => self.out_of_memory(bytes),
            _ => error.into(),
        })?;
        let place = self.empty.pop(&self.links).ok_or_else(|| self.out_of_memory(bytes))?;
        self.places[place as usize].address.store(memory.range().as_ptr(), Ordering::Relaxed);
        *self.memory(place) = Some(memory);
        Ok(place)
    }

    /// Gives a free block back to the device, of the largest there are; whether there was one.
    fn evict_any(&self) -> bool {
        (0..self.sizes.len()).rev().any(|class| self.evict(class))
    }

    fn evict(&self, class: usize) -> bool {
        let Some(place) = self.free[class].pop(&self.links) else { return false };
        self.discard(place, self.sizes[class]);
        true
    }

    fn discard(&self, place: u32, bytes: usize) {
        let memory = self.memory(place).take();
        self.empty.push(&self.links, place);
        drop(memory);
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        self.drops.fetch_add(1, Ordering::Relaxed);
    }

    fn memory(&self, place: u32) -> MutexGuard<'_, Option<D::Memory>> {
        self.places[place as usize].memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn out_of_memory(&self, requested_bytes: usize) -> Error {
        let in_use_bytes = self.in_use.load(Ordering::Relaxed);
        Error::OutOfMemory {
            device: self.device.info().name.clone(),
            requested_bytes,
            capacity_bytes: self.held.load(Ordering::Relaxed),
            limit_bytes: self.limit,
            in_use_bytes,
            largest_free_bytes: 0,
            pending_bytes: 0,
            free_bytes: Vec::new(),
        }
    }
}

impl<D: Device> PooledBuffer<D> {
    /// Where it is: as many bytes as were asked for.
    pub fn range(&self) -> MemoryRange {
        self.range
    }

    /// The bytes that were asked for.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether none were.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What it takes of the pool, in bytes.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Gives it back when all that was submitted to a stream is done. Does not block.
    ///
    /// # Errors
    /// [`Error::Device`] when the stream has failed; it is given back then, for nothing on it is done any more.
    pub fn release_after(self, stream: &D::Stream) -> Result<(), Error> {
        Ok(stream.launch_host_fn(HostFn::new(move || drop(self)))?)
    }
}

impl<D: Device> Drop for PooledBuffer<D> {
    fn drop(&mut self) {
        let shared = &self.shared;
        shared.in_use.fetch_sub(self.block_bytes, Ordering::Relaxed);
        match self.class {
            Some(class) => {
                shared.returns.fetch_add(1, Ordering::Relaxed);
                shared.free[usize::from(class)].push(&shared.links, self.place);
            }
            None => shared.discard(self.place, self.block_bytes),
        }
    }
}

/// A pool of the host's memory where a device reaches it directly. On a device without such a thing it is the host's ordinary
/// memory, and says so.
#[derive(Debug, Clone)]
pub struct PinnedMemoryPool<D: Device> {
    pool: BlockPool<D>,
    is_pinned: bool,
}

impl<D: Device> PinnedMemoryPool<D> {
    /// Makes one, and asks the device for a first block to see what it gives.
    ///
    /// # Errors
    /// As [`BlockPool::new`].
    pub fn new(device: D, config: PoolConfig) -> Result<Self, Error> {
        let pool = BlockPool::of(device, MemoryKind::PinnedHost, config)?;
        let first = pool.acquire(1)?;
        let is_pinned =
            pool.shared.memory(first.place).as_ref().is_some_and(|m| m.kind() == MemoryKind::PinnedHost);
        drop(first);
        Ok(Self { pool, is_pinned })
    }

    /// Whether the device reaches this memory directly.
    pub fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    /// The pool.
    pub fn blocks(&self) -> &BlockPool<D> {
        &self.pool
    }

    /// As [`BlockPool::acquire`].
    ///
    /// # Errors
    /// As [`BlockPool::acquire`].
    pub fn acquire(&self, bytes: usize) -> Result<PooledBuffer<D>, Error> {
        self.pool.acquire(bytes)
    }

    /// As [`BlockPool::stats`].
    pub fn stats(&self) -> BlockStats {
        self.pool.stats()
    }
}
