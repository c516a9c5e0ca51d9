// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that is allocated and freed in the order of streams.

mod snapshot;
mod state;

use std::alloc::Layout;
use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ts_streams::{Device, MemoryKind, MemoryRange, RawMemory, Status, Stream};

pub use self::snapshot::{BlockSnapshot, OrderedStats, PoolSnapshot, SegmentSnapshot};
use self::state::{Counts, SEGMENT_ALIGN, State};
use crate::Error;
use crate::offset::{BlockId, Owner, Place};

/// Allocates memory of a device in the order of its streams.
pub trait StreamOrderedAllocator<D: Device>: Send + Sync {
    /// Memory that may be used by work that is submitted to `stream` from now on. Does not wait for
    /// streams.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::BadAlignment`], [`Error::Device`].
    fn allocate(&self, layout: Layout, stream: &D::Stream) -> Result<DeviceBuffer<D>, Error>;

    /// Says that work on `stream`, submitted by now, uses the buffer too: its memory is free when
    /// that is done as well. Not needed for the stream that it was allocated for.
    ///
    /// # Errors
    /// [`Error::Stale`].
    fn record_use(&self, buffer: &DeviceBuffer<D>, stream: &D::Stream) -> Result<(), Error>;

    /// Gives memory back to the device that nothing uses, until the pool holds at most
    /// `keep_bytes`, as far as whole segments are free; how much that was. Does not wait for
    /// streams.
    fn trim(&self, keep_bytes: usize) -> usize;

    /// Statistics of this moment.
    fn stats(&self) -> OrderedStats;

    /// Where everything lies at this moment.
    fn snapshot(&self) -> PoolSnapshot;
}

/// Where a [`StreamOrderedPool`] has its memory from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backing {
    /// From segments of its own, which it takes from the device and divides.
    #[default]
    Segments,
    /// From the device's own allocator, block by block: CUDA's `cuMemAllocAsync`. The pool counts,
    /// limits, and sees to streams that use what is not theirs; 65,536 blocks at most. Its limit is
    /// one on what is not freed: the device has a block until the stream has come to where it was.
    Device,
}

/// How a [`StreamOrderedPool`] is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrderedOptions {
    /// Where the memory is from.
    pub backing: Backing,
    /// What memory it is; of [`Backing::Device`] always the device's.
    pub kind: MemoryKind,
    /// What the pool takes from the device at a time, in bytes, if no more is wanted at once.
    pub segment_bytes: usize,
    /// The most that it ever takes, in bytes.
    pub limit_bytes: usize,
    /// What sizes are rounded up to, and every block is aligned to: a power of two, in bytes.
    pub granule_bytes: usize,
}

impl Default for OrderedOptions {
    /// Device memory without a limit but the device's, 64 MiB at a time, on 512 bytes as CUDA gives
    /// it.
    fn default() -> Self {
        Self {
            backing: Backing::Segments,
            kind: MemoryKind::Device,
            segment_bytes: 64 << 20,
            limit_bytes: usize::MAX,
            granule_bytes: 512,
        }
    }
}

/// A pool of a device's memory, in segments. What is freed for a stream is there for the same
/// stream at once; for another once it has waited, on the device, for what the first was given by
/// then. Cloning gives another handle.
///
/// When the last handle and the last buffer are dropped, all streams that it has served are waited
/// for; where work of a stream drops them, which cannot wait, the memory is never given back.
///
/// A block that other streams have used ([`record_use`](StreamOrderedAllocator::record_use)) is
/// free when they are done with it, which is looked at when memory is short.
#[derive(Debug)]
pub struct StreamOrderedPool<D: Device> {
    shared: Arc<Shared<D>>,
}

impl<D: Device> Clone for StreamOrderedPool<D> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

#[derive(Debug)]
struct Shared<D: Device> {
    device: D,
    options: OrderedOptions,
    /// A granule's bytes are two to the power of it.
    granule_shift: u32,
    state: Mutex<State<D>>,
    /// Blocks that this very thread let go of while it had the state: work of streams may own some,
    /// and ends wherever streams are asked for something.
    returned: Mutex<Vec<Held>>,
}

/// A block that somebody has, and all that must be known to free it.
#[derive(Debug, Clone, Copy)]
struct Held {
    block: BlockId,
    granules: u32,
    owner: Owner,
}

/// Memory of a [`StreamOrderedPool`], for work on the stream that it was allocated for. Not
/// `Clone`; dropping it frees it in that stream's order: what is submitted there later may get the
/// same memory.
#[derive(Debug)]
pub struct DeviceBuffer<D: Device> {
    shared: Arc<Shared<D>>,
    block: BlockId,
    owner: Owner,
    /// The bytes that were asked for. Where they are its block knows: programs have many of these.
    len: usize,
}

impl<D: Device> StreamOrderedPool<D> {
    /// A pool that takes nothing from the device yet.
    ///
    /// # Panics
    /// If `granule_bytes` is no power of two.
    pub fn new(device: D, options: OrderedOptions) -> Self {
        assert!(
            options.granule_bytes.is_power_of_two(),
            "granules of {} bytes",
            options.granule_bytes
        );
        let granule_shift = options.granule_bytes.trailing_zeros();
        let (state, returned) = (Mutex::new(State::new()), Mutex::default());
        Self { shared: Arc::new(Shared { device, options, granule_shift, state, returned }) }
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.shared.device
    }

    /// Takes memory from the device for `stream` now, so that nobody waits for it later: at least
    /// so many bytes in one piece. Blocks.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub fn prime(&self, bytes: usize, stream: &D::Stream) -> Result<(), Error> {
        if self.shared.options.backing == Backing::Device {
            // The device's allocator keeps what it has given once.
            return self.shared.allocate(bytes, stream).map(drop);
        }
        let mut state = self.shared.lock();
        let owner = state.owner(stream)?;
        let granules = self.shared.granules(bytes)?;
        match state.grow(&self.shared, granules, owner)? {
            true => Ok(()),
            false => Err(state.out_of_memory(&self.shared, bytes)),
        }
    }

    /// As [`prime`](Self::prime), on a thread of its own: the pool serves others meanwhile. What is
    /// on its way counts towards the limit.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the pool may not take so much more; [`Error::Device`] when there
    /// is no thread.
    pub fn prime_in_background(&self, bytes: usize, stream: &D::Stream) -> Result<Priming, Error> {
        let OrderedOptions { backing, kind, limit_bytes, granule_bytes, .. } = self.shared.options;
        let granules = self.shared.granules(bytes)?;
        let whole = granules as usize * granule_bytes;
        let promised = if backing == Backing::Segments { whole } else { 0 };
        let mut state = self.shared.lock();
        let owner = state.owner(stream)?;
        if whole > limit_bytes.saturating_sub(state.capacity + state.promised) {
            return Err(state.out_of_memory(&self.shared, bytes));
        }
        state.promised += promised;
        drop(state);
        let (pool, stream) = (self.clone(), stream.clone());
        let work = move || {
            if backing == Backing::Device {
                return pool.prime(bytes, &stream);
            }
            let layout = Layout::from_size_align(whole, granule_bytes.max(SEGMENT_ALIGN)).ok();
            let taken = layout.map(|layout| pool.shared.device.allocate(layout, kind));
            let mut state = pool.shared.lock();
            state.promised -= promised;
            let added = match taken {
                Some(Ok(memory)) => state.add_segment(memory, granules, owner),
                Some(Err(error)) if error.kind() != ts_streams::ErrorKind::Full => {
                    return Err(error.into());
                }
                _ => None,
            };
            added.ok_or_else(|| state.out_of_memory(&pool.shared, bytes))
        };
        let thread = std::thread::Builder::new().name("ts-prime".into()).spawn(work);
        match thread {
            Ok(thread) => Ok(Priming { thread }),
            Err(error) => {
                self.shared.lock().promised -= promised;
                Err(ts_streams::Error::Thread { reason: error.to_string() }.into())
            }
        }
    }

    /// As [`allocate`](StreamOrderedAllocator::allocate), of so many bytes.
    ///
    /// # Errors
    /// As [`allocate`](StreamOrderedAllocator::allocate).
    pub fn allocate_for_stream(
        &self,
        bytes: usize,
        stream: &D::Stream,
    ) -> Result<DeviceBuffer<D>, Error> {
        self.shared.allocate(bytes, stream)
    }

    /// Has blocks that are kept as they are, for who asks for their size again, join what is free
    /// beside them: so that what is allocated next lies together. Memory that is short has them
    /// join by itself. Does not block.
    pub fn coalesce(&self) {
        self.shared.lock().offsets.wake_all();
    }

    /// Frees all that was allocated for a stream, in its order, but what is copied at this moment
    /// by the buffers' own methods. Who still has a buffer of it finds it [stale](Error::Stale).
    /// How many bytes that were.
    pub fn free_for_stream(&self, stream: &D::Stream) -> usize {
        let mut state = self.shared.lock();
        let Some(&owner) = state.owners.get(&stream.id()) else { return 0 };
        let before = state.counts.in_use;
        state.free_all(&self.shared, owner);
        before - state.counts.in_use
    }
}

/// Memory on its way from the device to a pool. Dropping this does not stop it.
#[derive(Debug)]
#[must_use = "whether there was so much memory is known at the end"]
pub struct Priming {
    thread: std::thread::JoinHandle<Result<(), Error>>,
}

impl Priming {
    /// Whether it has ended, well or not. Does not block.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until it has ended. Blocks.
    ///
    /// # Errors
    /// As [`StreamOrderedPool::prime`].
    pub fn wait(self) -> Result<(), Error> {
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl<D: Device> StreamOrderedAllocator<D> for StreamOrderedPool<D> {
    fn allocate(&self, layout: Layout, stream: &D::Stream) -> Result<DeviceBuffer<D>, Error> {
        let granule_bytes = self.shared.options.granule_bytes;
        if layout.align() > granule_bytes {
            return Err(Error::BadAlignment { align: layout.align(), granule_bytes });
        }
        self.shared.allocate(layout.size(), stream)
    }

    fn record_use(&self, buffer: &DeviceBuffer<D>, stream: &D::Stream) -> Result<(), Error> {
        let mut state = self.shared.lock();
        let owner = state.owner(stream)?;
        let place = state.offsets.place(buffer.block).ok_or(Error::Stale)?;
        if owner != place.owner {
            state.note_use(buffer.block, owner);
        }
        Ok(())
    }

    fn trim(&self, keep_bytes: usize) -> usize {
        let mut state = self.shared.lock();
        let idle = self.shared.asking(&mut state, |state| {
            state.settle_pending(&self.shared);
            let is_idle = |stream: &D::Stream| !matches!(stream.query(), Ok(Status::Pending));
            state.streams.iter().map(is_idle).collect::<Vec<_>>()
        });
        let (before, mut capacity) = (state.capacity, state.capacity);
        let State { offsets, segments, .. } = &mut *state;
        // What is free of those that have nothing to do is free for all.
        let is_idle = |owner: Owner| idle[usize::from(owner.0)];
        if let Some(anyone) = idle.iter().position(|idle| *idle) {
            offsets.give(Owner(anyone as u16), is_idle);
        }
        let removed = offsets.remove_ranges(|place| {
            let bytes = segments[usize::from(place.range)]
                .as_ref()
                .map_or(0, |memory| memory.range().len());
            let goes = capacity > keep_bytes && is_idle(place.owner);
            capacity -= if goes { bytes } else { 0 };
            goes
        });
        let gone: Vec<_> =
            removed.iter().map(|&segment| segments[usize::from(segment)].take()).collect();
        state.vacant.extend(removed);
        state.capacity = capacity;
        drop(state);
        // The device may block.
        drop(gone);
        before - capacity
    }

    fn stats(&self) -> OrderedStats {
        let mut state = self.shared.lock();
        let granule = self.shared.options.granule_bytes;
        let Counts { in_use, high_water, allocations, frees, stolen, failures } = state.counts;
        OrderedStats {
            capacity_bytes: state.capacity,
            in_use_bytes: in_use,
            high_water_bytes: high_water,
            pending_bytes: state.pending_bytes,
            largest_free_bytes: state.offsets.largest_free() as usize * granule,
            free_bytes: state.free_bytes(granule),
            segments: state.segments.iter().flatten().count(),
            allocations,
            frees,
            stolen,
            failures,
        }
    }

    fn snapshot(&self) -> PoolSnapshot {
        let mut state = self.shared.lock();
        let granule = self.shared.options.granule_bytes;
        let mut segments: Vec<Option<SegmentSnapshot>> = state
            .segments
            .iter()
            .map(|memory| {
                let range = memory.as_ref()?.range();
                Some(SegmentSnapshot {
                    address: range.address(),
                    len: range.len(),
                    blocks: Vec::new(),
                })
            })
            .collect();
        for Place { range, offset, len, owner, free } in state.offsets.places() {
            let block = BlockSnapshot {
                offset: offset as usize * granule,
                len: len as usize * granule,
                free,
                stream: state.streams[usize::from(owner.0)].id(),
            };
            if let Some(segment) = &mut segments[usize::from(range)] {
                segment.blocks.push(block);
            }
        }
        PoolSnapshot { segments: segments.into_iter().flatten().collect() }
    }
}

impl<D: Device> Drop for Shared<D> {
    /// Streams may still use what was freed in their order: they are waited for.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // All of them, also when one failed: that is over then too.
        let ended: Vec<_> = state.streams.iter().map(Stream::synchronize).collect();
        if ended.contains(&Err(ts_streams::Error::WaitInHostFn)) {
            // Work of a stream had the last handle, and cannot wait. Rather than that, the memory
            // stays taken.
            std::mem::forget(std::mem::take(&mut state.segments));
        }
    }
}

impl<D: Device> Shared<D> {
    fn lock(&self) -> MutexGuard<'_, State<D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something that asks streams while this thread has the state.
    fn asking<T>(&self, state: &mut State<D>, work: impl FnOnce(&mut State<D>) -> T) -> T {
        let result = {
            let _inside = Inside::enter(self.number());
            work(state)
        };
        loop {
            let returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match returned {
                Some(held) => state.free(self, held),
                None => return result,
            }
        }
    }

    /// Tells this pool from others.
    fn number(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn granules(&self, bytes: usize) -> Result<u32, Error> {
        // A division would be a good part of all the work.
        let begun = usize::from(bytes & (self.options.granule_bytes - 1) != 0);
        let granules = ((bytes >> self.granule_shift) + begun).max(1);
        // Granules are counted in 32 bits.
        let countable_bytes = self.options.granule_bytes.saturating_mul(u32::MAX as usize);
        let capacity_bytes = self.options.limit_bytes.min(countable_bytes);
        u32::try_from(granules)
            .map_err(|_| Error::NeverFits { requested_bytes: bytes, capacity_bytes })
    }

    fn allocate(
        self: &Arc<Self>,
        bytes: usize,
        stream: &D::Stream,
    ) -> Result<DeviceBuffer<D>, Error> {
        let granules = self.granules(bytes)?;
        let mut state = self.lock();
        let owner = state.owner(stream)?;
        let found = match self.options.backing {
            Backing::Segments => state.offsets.allocate(granules, owner),
            Backing::Device => None,
        };
        let block = match found {
            Some(block) => block,
            None => self.asking(&mut state, |state| state.search(self, bytes, granules, owner))?,
        };
        state.counts.allocations += 1;
        state.counts.in_use += granules as usize * self.options.granule_bytes;
        state.counts.high_water = state.counts.high_water.max(state.counts.in_use);
        drop(state);
        Ok(DeviceBuffer { shared: Arc::clone(self), block, owner, len: bytes })
    }
}

impl<D: Device> DeviceBuffer<D> {
    /// Where it is.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn range(&self) -> Result<MemoryRange, Error> {
        Ok(self.shared.lock().find(&self.shared, self)?.0)
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<D: Device> DeviceBuffer<D> {
    /// Submits something to its own stream for its memory, and waits for that. Meanwhile nobody
    /// frees it, and nobody waits for this: a driver may take as long as the copy itself takes.
    pub(crate) fn transfer(
        &self,
        submit: impl FnOnce(&D::Stream, MemoryRange) -> Result<(), ts_streams::Error>,
    ) -> Result<(), Error> {
        let mut state = self.shared.lock();
        let (range, owner) = state.find(&self.shared, self)?;
        let stream = state.streams[usize::from(owner.0)].clone();
        let _moving = Moving::begin(&self.shared, &mut state, &[self.block]);
        drop(state);
        submit(&stream, range)?;
        // An error is one of work that is over, and this with it.
        Ok(stream.synchronize()?)
    }

    /// As [`transfer`](Self::transfer), for work that uses another buffer of the same pool too,
    /// behind what was submitted for that; `None` when it is of another pool.
    pub(crate) fn transfer_with(
        &self,
        other: &Self,
        submit: impl FnOnce(&D::Stream, MemoryRange, MemoryRange) -> Result<(), ts_streams::Error>,
    ) -> Option<Result<(), Error>> {
        Arc::ptr_eq(&self.shared, &other.shared).then(|| {
            let mut state = self.shared.lock();
            let (range, owner) = state.find(&self.shared, self)?;
            let (range_other, owner_other) = state.find(&self.shared, other)?;
            let stream = state.streams[usize::from(owner.0)].clone();
            if owner != owner_other {
                self.shared
                    .asking(&mut state, |state| state.wait_for(&self.shared, owner, owner_other))?;
                state.note_use(other.block, owner);
            }
            let _moving = Moving::begin(&self.shared, &mut state, &[self.block, other.block]);
            drop(state);
            submit(&stream, range, range_other)?;
            Ok(stream.synchronize()?)
        })
    }
}

/// Blocks that are copied to or from: as long as this lives, they are not freed with all of their
/// stream's.
struct Moving<'a, D: Device> {
    shared: &'a Shared<D>,
    blocks: Vec<BlockId>,
}

impl<'a, D: Device> Moving<'a, D> {
    fn begin(shared: &'a Shared<D>, state: &mut State<D>, blocks: &[BlockId]) -> Self {
        state.moving.extend(blocks);
        Self { shared, blocks: blocks.to_vec() }
    }
}

impl<D: Device> Drop for Moving<'_, D> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        for block in &self.blocks {
            let at = state
                .moving
                .iter()
                .position(|moving| moving == block)
                .expect("noted when it began");
            state.moving.swap_remove(at);
        }
    }
}

impl<D: Device> Drop for DeviceBuffer<D> {
    fn drop(&mut self) {
        let granules = self.shared.granules(self.len).expect("so many were had");
        let held = Held { block: self.block, granules, owner: self.owner };
        if Inside::has(self.shared.number()) {
            self.shared.returned.lock().unwrap_or_else(PoisonError::into_inner).push(held);
        } else {
            self.shared.lock().free(&self.shared, held);
        }
    }
}

thread_local! {
    /// The pools whose state this thread has while it asks streams for something.
    static INSIDE: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// As long as this lives, the thread has a pool's state.
struct Inside;

impl Inside {
    fn enter(pool: usize) -> Self {
        INSIDE.with_borrow_mut(|inside| inside.push(pool));
        Self
    }

    fn has(pool: usize) -> bool {
        // When the thread ends nothing is asked any more.
        INSIDE.try_with(|inside| inside.borrow().contains(&pool)).unwrap_or(false)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.with_borrow_mut(Vec::pop);
    }
}
