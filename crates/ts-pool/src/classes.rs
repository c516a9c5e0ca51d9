// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocks of a few sizes, kept to be used again.

use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ts_streams::{
    Device, ErrorKind as DeviceErrorKind, HostFn, MemoryKind, MemoryRange, RawMemory, Stream,
};

use crate::Error;
use crate::stack::{Links, Stack};

/// The most shelves that a pool has.
const MAX_SHELVES: usize = 64;

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
    /// Whether blocks are taken from the device when the pool is made, some of each size: half of
    /// the pool.
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
        Self {
            pool_bytes: 512 << 20,
            min_block_bytes: 1 << 20,
            preallocate: true,
            ..Self::default()
        }
    }

    /// For small machines: 64 MB, from 16 KB on.
    pub fn low_memory() -> Self {
        Self {
            pool_bytes: 64 << 20,
            min_block_bytes: 16 << 10,
            max_block_bytes: 16 << 20,
            ..Self::default()
        }
    }

    /// The sizes, the smallest first: multiples of 4096 bytes.
    fn sizes(&self) -> Vec<usize> {
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

/// A pool of a device's memory in blocks: see [`BlockPool`].
pub type GpuMemoryPool<D> = BlockPool<D>;

/// Blocks of memory of some sizes, kept to be used again. A block that is there is had without a
/// lock. Cloning gives another handle.
///
/// Threads have shelves of their own, as far as there are shelves, and take from those of others
/// when theirs is empty; a block goes back to where it was taken from, whoever drops it.
///
/// Work of streams is the owner's to wait for: see [`PooledBuffer::release_after`].
#[derive(Debug)]
pub struct BlockPool<D: Device> {
    shelves: Arc<[Arc<Shelf<D>>]>,
}

impl<D: Device> Clone for BlockPool<D> {
    fn clone(&self) -> Self {
        Self { shelves: Arc::clone(&self.shelves) }
    }
}

/// What threads have in common.
#[derive(Debug)]
struct Shared<D: Device> {
    device: D,
    kind: MemoryKind,
    limit: usize,
    sizes: Vec<usize>,
    /// Places for blocks that there are not.
    empty: Stack,
    links: Links,
    places: Box<[BlockPlace<D::Memory>]>,
    /// Bytes of all blocks.
    held: AtomicUsize,
    held_high_water: AtomicUsize,
    drops: AtomicU64,
}

/// The free blocks of some threads. On cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Shelf<D: Device> {
    shared: Arc<Shared<D>>,
    /// Free blocks of each size.
    free: Box<[Row]>,
    /// Bytes of blocks that were taken from here.
    in_use: AtomicUsize,
    high_water: AtomicUsize,
    hits: AtomicU64,
    misses: AtomicU64,
    returns: AtomicU64,
}

/// As many stacks as cache lines that are fetched together hold.
#[derive(Debug)]
#[repr(align(128))]
struct Row([Stack; ROW]);

const ROW: usize = 16;

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
    /// The most that was in use at any time. Never less; where several threads use the pool perhaps
    /// more, for each shelf's most counts, whenever it was.
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
    shelf: Arc<Shelf<D>>,
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
    /// [`Error::OutOfMemory`], [`Error::Device`] when blocks are to be taken at once and cannot be
    /// had.
    pub fn new(device: D, config: PoolConfig) -> Result<Self, Error> {
        Self::of(device, MemoryKind::Device, config)
    }

    /// A pool of memory of a kind.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of(device: D, kind: MemoryKind, config: PoolConfig) -> Result<Self, Error> {
        let sizes = config.sizes();
        // No block is smaller than the smallest.
        let count = u32::try_from(config.pool_bytes / sizes[0] + 1).unwrap_or(u32::MAX - 1);
        let (links, empty) = (Links::new(count), Stack::new());
        (0..count).rev().for_each(|place| empty.push(&links, place));
        let place = |_| BlockPlace { memory: Mutex::new(None), address: AtomicPtr::default() };
        let rows = sizes.len().div_ceil(ROW);
        let shared = Arc::new(Shared {
            device,
            kind,
            limit: config.pool_bytes,
            sizes,
            empty,
            links,
            places: (0..count).map(place).collect(),
            held: AtomicUsize::new(0),
            held_high_water: AtomicUsize::new(0),
            drops: AtomicU64::new(0),
        });
        let shelf = |_| {
            Arc::new(Shelf {
                shared: Arc::clone(&shared),
                free: (0..rows).map(|_| Row(std::array::from_fn(|_| Stack::new()))).collect(),
                in_use: AtomicUsize::new(0),
                high_water: AtomicUsize::new(0),
                hits: AtomicU64::new(0),
                misses: AtomicU64::new(0),
                returns: AtomicU64::new(0),
            })
        };
        // More than cores: threads that take turns on one need not meet.
        let shelves = 4 * std::thread::available_parallelism().map_or(1, usize::from);
        let this = Self { shelves: (0..shelves.min(MAX_SHELVES)).map(shelf).collect() };
        if config.preallocate {
            let share = config.pool_bytes / 2 / shared.sizes.len();
            for (class, &size) in shared.sizes.iter().enumerate() {
                for number in 0..share / size {
                    let place = this.new_block(size)?;
                    this.shelves[number % this.shelves.len()].put(class, place);
                }
            }
        }
        Ok(this)
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.shared().device
    }

    /// Memory of at least one block's size for `bytes` bytes. What it holds is undefined. Blocks
    /// only while the device gives new memory, if no block is free.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the pool holds as much as it may, all of it in use, or the
    /// device has no more; [`Error::Device`].
    pub fn acquire(&self, bytes: usize) -> Result<PooledBuffer<D>, Error> {
        let shared = self.shared();
        let class = shared.sizes.partition_point(|&size| size < bytes);
        let kept = shared.sizes.get(class).copied();
        let Some(block_bytes) = kept.or_else(|| bytes.checked_next_multiple_of(4096)) else {
            return Err(self.out_of_memory(bytes));
        };
        let number = shelf_number() % self.shelves.len();
        let shelf = &self.shelves[number];
        let free = kept.and_then(|_| self.take(class, number));
        let count = if free.is_some() { &shelf.hits } else { &shelf.misses };
        count.fetch_add(1, Ordering::Relaxed);
        let place = free.map_or_else(|| self.new_block(block_bytes), Ok)?;
        shelf.taken(block_bytes);
        let range =
            MemoryRange::new(shared.places[place as usize].address.load(Ordering::Relaxed), bytes);
        let class = kept.map(|_| class as u16);
        Ok(PooledBuffer { shelf: Arc::clone(shelf), place, class, range, block_bytes })
    }

    /// Gives all free blocks back to the device. Blocks while the device takes them.
    pub fn clear(&self) {
        for class in 0..self.shared().sizes.len() {
            while self.evict(class) {}
        }
    }

    /// Statistics of this moment; while others use the pool its numbers are of moments close to
    /// each other.
    pub fn stats(&self) -> BlockStats {
        let shared = self.shared();
        let held = shared.held.load(Ordering::Relaxed);
        let (in_use, peaks) = self.in_use();
        let sum = |count: fn(&Shelf<D>) -> &AtomicU64| {
            self.shelves.iter().map(|shelf| count(shelf).load(Ordering::Relaxed)).sum()
        };
        BlockStats {
            available_bytes: held.saturating_sub(in_use),
            in_use_bytes: in_use,
            pool_bytes: held,
            high_water_bytes: peaks.min(shared.held_high_water.load(Ordering::Relaxed)),
            hits: sum(|shelf| &shelf.hits),
            misses: sum(|shelf| &shelf.misses),
            returns: sum(|shelf| &shelf.returns),
            drops: shared.drops.load(Ordering::Relaxed),
        }
    }

    /// Bytes of blocks that somebody has, and the most that each shelf ever gave, summed.
    fn in_use(&self) -> (usize, usize) {
        self.shelves.iter().fold((0, 0), |(now, most), shelf| {
            (
                now + shelf.in_use.load(Ordering::Relaxed),
                most + shelf.high_water.load(Ordering::Relaxed),
            )
        })
    }

    fn out_of_memory(&self, requested_bytes: usize) -> Error {
        let shared = self.shared();
        Error::OutOfMemory {
            device: shared.device.info().name.clone(),
            requested_bytes,
            capacity_bytes: shared.held.load(Ordering::Relaxed),
            limit_bytes: shared.limit,
            in_use_bytes: self.in_use().0,
            largest_free_bytes: 0,
            pending_bytes: 0,
            free_bytes: Vec::new(),
        }
    }

    fn shared(&self) -> &Shared<D> {
        &self.shelves[0].shared
    }

    /// A free block, of this shelf or of the next that has one.
    fn take(&self, class: usize, number: usize) -> Option<u32> {
        let (before, from) = self.shelves.split_at(number);
        from.iter().chain(before).find_map(|shelf| shelf.take(class))
    }

    /// Takes memory from the device, at the cost of blocks of other sizes that are free.
    #[cold]
    fn new_block(&self, bytes: usize) -> Result<u32, Error> {
        let shared = self.shared();
        loop {
            let reserved = shared.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
                held.checked_add(bytes).filter(|&sum| sum <= shared.limit)
            });
            if let Ok(held) = reserved {
                shared.held_high_water.fetch_max(held + bytes, Ordering::Relaxed);
                match shared.fill_place(bytes) {
                    Ok(Some(place)) => return Ok(place),
                    failed => {
                        shared.held.fetch_sub(bytes, Ordering::Relaxed);
                        failed?;
                    }
                }
            }
            if !self.evict_any() {
                return Err(self.out_of_memory(bytes));
            }
        }
    }

    /// Gives a free block back to the device, of the largest there are; whether there was one.
    fn evict_any(&self) -> bool {
        (0..self.shared().sizes.len()).rev().any(|class| self.evict(class))
    }

    fn evict(&self, class: usize) -> bool {
        let Some(place) = self.take(class, 0) else { return false };
        self.shared().discard(place, self.shared().sizes[class]);
        true
    }
}

/// Which shelf this thread uses, of as many as there are.
fn shelf_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // A thread that ends has no number any more.
    NUMBER.try_with(|number| *number).unwrap_or(0)
}

impl<D: Device> Shelf<D> {
    /// Counts a block that somebody has now.
    fn taken(&self, bytes: usize) {
        let used = self.in_use.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if used > self.high_water.load(Ordering::Relaxed) {
            self.high_water.fetch_max(used, Ordering::Relaxed);
        }
    }

    fn take(&self, class: usize) -> Option<u32> {
        self.stack(class).pop(&self.shared.links)
    }

    fn put(&self, class: usize, place: u32) {
        self.stack(class).push(&self.shared.links, place);
    }

    fn stack(&self, class: usize) -> &Stack {
        &self.free[class / ROW].0[class % ROW]
    }
}

impl<D: Device> Shared<D> {
    /// `None` when the device has no more.
    fn fill_place(&self, bytes: usize) -> Result<Option<u32>, Error> {
        let layout = std::alloc::Layout::from_size_align(bytes, 4096).ok();
        let memory = match layout.map(|layout| self.device.allocate(layout, self.kind)) {
            Some(Ok(memory)) => memory,
            Some(Err(error)) if error.kind() != DeviceErrorKind::Full => return Err(error.into()),
            _ => return Ok(None),
        };
        let Some(place) = self.empty.pop(&self.links) else { return Ok(None) };
        self.places[place as usize].address.store(memory.range().as_ptr(), Ordering::Relaxed);
        *self.memory(place) = Some(memory);
        Ok(Some(place))
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

    /// What kind of memory its pool is of.
    pub fn kind(&self) -> MemoryKind {
        self.shelf.shared.kind
    }

    /// What it takes of the pool, in bytes.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Gives it back when all that was submitted to a stream is done. Does not block.
    ///
    /// # Errors
    /// [`Error::Device`] when the stream has failed; it is given back then, for nothing on it is
    /// done any more.
    pub fn release_after(self, stream: &D::Stream) -> Result<(), Error> {
        Ok(stream.launch_host_fn(HostFn::new(move || drop(self)))?)
    }
}

impl<D: Device> Drop for PooledBuffer<D> {
    fn drop(&mut self) {
        let Shelf { shared, returns, in_use, .. } = &*self.shelf;
        in_use.fetch_sub(self.block_bytes, Ordering::Relaxed);
        match self.class {
            Some(class) => {
                returns.fetch_add(1, Ordering::Relaxed);
                self.shelf.put(usize::from(class), self.place);
            }
            None => shared.discard(self.place, self.block_bytes),
        }
    }
}

/// A pool of the host's memory where a device reaches it directly. On a device without such a thing
/// it is the host's ordinary memory, and says so.
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
        let is_pinned = pool
            .shared()
            .memory(first.place)
            .as_ref()
            .is_some_and(|m| m.kind() == MemoryKind::PinnedHost);
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
