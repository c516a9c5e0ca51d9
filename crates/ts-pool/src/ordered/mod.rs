// SPDX-License-Identifier: MIT OR Apache-2.0
//! Device memory that is allocated and freed in stream order.

mod snapshot;
mod state;

use std::alloc::Layout;
use std::cell::RefCell;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use ts_streams::{Device, MemoryKind, MemoryRange, RawMemory, Status, Stream};

pub use self::snapshot::{BlockSnapshot, OrderedStats, PoolSnapshot, SegmentSnapshot};
use self::state::{Counts, PoolState, SEGMENT_ALIGN};
use crate::Error;
use crate::offset::{BlockId, BlockInfo, Owner};

/// An allocator of device memory whose allocations and frees take effect in stream order.
pub trait StreamOrderedAllocator<D: Device>: Send + Sync {
    /// Allocates memory for work that is submitted to `stream` from now on. Does not wait for
    /// streams, but may block while the device allocates memory.
    ///
    /// # Errors
    /// - [`Error::OutOfMemory`]: the device is full, or the pool's limit is reached.
    /// - [`Error::NeverFits`]: the size exceeds `u32::MAX` granules
    ///   ([`OrderedOptions::granule_bytes`]).
    /// - [`Error::BadAlignment`]: the alignment exceeds the granule size.
    /// - [`Error::TooManyStreams`]: the pool has already served 65,536 other streams.
    /// - [`Error::Device`]: the device or the stream fails.
    fn allocate(&self, layout: Layout, stream: &D::Stream) -> Result<DeviceBuffer<D>, Error>;

    /// Records that work on `stream` uses the buffer. After the buffer is dropped, its memory
    /// becomes free only when `stream` has completed all work submitted to it before the drop.
    ///
    /// This call is not necessary for the stream that the buffer was allocated for.
    ///
    /// # Errors
    /// Returns [`Error::Stale`] if [`free_for_stream`](StreamOrderedPool::free_for_stream) has
    /// freed the memory, and [`Error::TooManyStreams`] if the pool has already served 65,536 other
    /// streams.
    fn record_use(&self, buffer: &DeviceBuffer<D>, stream: &D::Stream) -> Result<(), Error>;

    /// Returns unused segments to the device until the pool owns at most `keep_bytes` bytes.
    /// Returns the number of bytes freed.
    ///
    /// Frees only segments that are completely free and whose streams are idle. Does not wait for
    /// streams, but the device may block while it frees memory.
    fn trim(&self, keep_bytes: usize) -> usize;

    /// Returns the current statistics. Coalesces free blocks, to determine the largest one.
    fn stats(&self) -> OrderedStats;

    /// Returns the current layout of all segments and blocks. Coalesces free blocks first.
    fn snapshot(&self) -> PoolSnapshot;
}

/// The source of the memory of a [`StreamOrderedPool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backing {
    /// The pool allocates segments from the device, and sub-allocates blocks from the segments.
    #[default]
    Segments,
    /// The pool allocates each block from the stream-ordered allocator of the device, such as
    /// CUDA's `cuMemAllocAsync`.
    ///
    /// The pool adds statistics, a limit, and support for uses by other streams. It can own at most
    /// 65,536 blocks at a time. The limit applies to live blocks, and to freed blocks that other
    /// streams may still use. The device can use more memory than the limit, because any other
    /// freed block stays allocated until its stream reaches the free.
    Device,
}

/// Options of a [`StreamOrderedPool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct OrderedOptions {
    /// Source of the pool's memory.
    pub backing: Backing,
    /// Kind of memory to allocate. [`Backing::Device`] ignores this option and always uses device
    /// memory.
    pub kind: MemoryKind,
    /// Usual size of a segment in bytes. A larger allocation gets a larger segment. If memory is
    /// short, a segment can be smaller.
    pub segment_bytes: usize,
    /// Maximum size of the pool in bytes; [`usize::MAX`] for no limit.
    pub limit_bytes: usize,
    /// Allocation granularity in bytes, which must be a power of two. Sizes are rounded up to a
    /// multiple of it, and blocks are aligned to it.
    pub granule_bytes: usize,
}

impl Default for OrderedOptions {
    /// Returns options for device memory in segments of 64 MiB, without a limit. The granularity is
    /// 512 bytes, as in CUDA.
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

impl OrderedOptions {
    /// Sets the source of the pool's memory: see [`backing`](Self::backing).
    #[must_use]
    pub fn with_backing(mut self, backing: Backing) -> Self {
        self.backing = backing;
        self
    }

    /// Sets the kind of memory to allocate: see [`kind`](Self::kind).
    #[must_use]
    pub fn with_kind(mut self, kind: MemoryKind) -> Self {
        self.kind = kind;
        self
    }

    /// Sets the size of a segment in bytes: see [`segment_bytes`](Self::segment_bytes).
    #[must_use]
    pub fn with_segment_bytes(mut self, segment_bytes: usize) -> Self {
        self.segment_bytes = segment_bytes;
        self
    }

    /// Sets the maximum size of the pool in bytes: see [`limit_bytes`](Self::limit_bytes).
    #[must_use]
    pub fn with_limit_bytes(mut self, limit_bytes: usize) -> Self {
        self.limit_bytes = limit_bytes;
        self
    }

    /// Sets the allocation granularity in bytes: see [`granule_bytes`](Self::granule_bytes).
    #[must_use]
    pub fn with_granule_bytes(mut self, granule_bytes: usize) -> Self {
        self.granule_bytes = granule_bytes;
        self
    }
}

/// A pool of device memory in which allocations and frees take effect in stream order.
///
/// - Dropping a [`DeviceBuffer`] frees its memory without waiting for the device. The same stream
///   can reuse the memory at once, because its work runs in order.
/// - Another stream can take the memory too. Unless the first stream is idle, the pool makes the
///   other stream wait, on the device, for the work submitted to the first.
/// - A block that other streams have used ([`record_use`](StreamOrderedAllocator::record_use))
///   becomes free when those uses are done. The pool checks for this when memory is short.
///
/// Clones are handles to the same pool. Dropping the last handle or buffer blocks until all streams
/// that the pool has served are idle. If a host function on a stream drops the last handle or
/// buffer, the memory is leaked, because such a function must not block.
///
/// # Examples
/// ```
/// use ts_pool::ts_streams::{CpuDevice, Device, StreamPriority};
/// use ts_pool::{OrderedOptions, StreamOrderedAllocator, StreamOrderedPool};
///
/// let device = CpuDevice::new()?;
/// let stream = device.create_stream(StreamPriority::Normal)?;
/// let pool = StreamOrderedPool::new(device, OrderedOptions::default());
///
/// let mut buffer = pool.allocate_for_stream(4096, &stream)?;
/// buffer.write(0, &[7; 4096])?;
/// let range = buffer.range()?;
/// drop(buffer);
///
/// let reused = pool.allocate_for_stream(4096, &stream)?;
/// assert_eq!(reused.range()?, range);
/// assert_eq!((pool.stats().allocations, pool.stats().segments), (2, 1));
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug)]
pub struct StreamOrderedPool<D: Device> {
    inner: Arc<PoolInner<D>>,
}

impl<D: Device> Clone for StreamOrderedPool<D> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

#[derive(Debug)]
struct PoolInner<D: Device> {
    device: D,
    options: OrderedOptions,
    /// Binary logarithm of the granule size.
    granule_shift: u32,
    state: Mutex<PoolState<D>>,
    /// Blocks freed by a thread that already holds the lock on `state`. This happens when the
    /// thread calls a stream, and the call runs or drops work that owns buffers of this pool.
    deferred_frees: Mutex<Vec<AllocatedBlock>>,
}

/// An allocated block, with everything that is needed to free it.
#[derive(Debug, Clone, Copy)]
struct AllocatedBlock {
    block: BlockId,
    granules: u32,
    owner: Owner,
}

/// A buffer of a [`StreamOrderedPool`], for work on the stream that it was allocated for.
///
/// Dropping the buffer frees its memory in the order of that stream. Work that is submitted to the
/// stream later may use the same memory.
#[derive(Debug)]
pub struct DeviceBuffer<D: Device> {
    inner: Arc<PoolInner<D>>,
    block: BlockId,
    owner: Owner,
    /// The requested size in bytes. The address is not stored here, to keep buffers small. The pool
    /// computes it from `block`.
    len: usize,
}

impl<D: Device> StreamOrderedPool<D> {
    /// Creates an empty pool. The pool allocates memory from the device on demand.
    ///
    /// # Panics
    /// Panics if `granule_bytes` is not a power of two.
    pub fn new(device: D, options: OrderedOptions) -> Self {
        assert!(
            options.granule_bytes.is_power_of_two(),
            "granule_bytes must be a power of two, got {}",
            options.granule_bytes
        );
        let granule_shift = options.granule_bytes.trailing_zeros();
        let (state, deferred_frees) = (Mutex::new(PoolState::new()), Mutex::default());
        let inner = PoolInner { device, options, granule_shift, state, deferred_frees };
        Self { inner: Arc::new(inner) }
    }

    /// Returns the device that the pool allocates from.
    pub fn device(&self) -> &D {
        &self.inner.device
    }

    /// Allocates a segment of at least `bytes` bytes from the device now, so that later allocations
    /// for `stream` do not wait for the device. Blocks while the device allocates the segment.
    ///
    /// With [`Backing::Device`], allocates a block and frees it at once, because the allocator of
    /// the device keeps freed memory.
    ///
    /// # Errors
    /// - [`Error::OutOfMemory`]: the device is full, or the pool's limit is reached.
    /// - [`Error::NeverFits`]: the size exceeds `u32::MAX` granules.
    /// - [`Error::TooManyStreams`]: the pool has already served 65,536 other streams.
    /// - [`Error::Device`]: the device fails for another reason.
    pub fn reserve_segment(&self, bytes: usize, stream: &D::Stream) -> Result<(), Error> {
        if self.inner.options.backing == Backing::Device {
            // Frees the block at once, because the allocator of the device keeps freed memory.
            return self.inner.allocate(bytes, stream).map(drop);
        }
        let mut state = self.inner.lock();
        let owner = state.owner(stream)?;
        let granules = self.inner.granules(bytes)?;
        match state.grow(&self.inner, granules, owner)? {
            true => Ok(()),
            false => Err(state.out_of_memory(&self.inner, bytes)),
        }
    }

    /// Does the same as [`reserve_segment`](Self::reserve_segment) on a new thread, and returns at
    /// once. The pool stays usable meanwhile. With [`Backing::Segments`], the bytes count towards
    /// the limit from the start.
    ///
    /// # Errors
    /// - [`Error::OutOfMemory`]: the bytes would exceed the limit.
    /// - [`Error::NeverFits`]: the size exceeds `u32::MAX` granules.
    /// - [`Error::TooManyStreams`]: the pool has already served 65,536 other streams.
    /// - [`Error::Device`]: the thread cannot be created.
    ///
    /// [`PendingSegment::wait`] returns the errors of the allocation itself.
    pub fn reserve_segment_in_background(
        &self,
        bytes: usize,
        stream: &D::Stream,
    ) -> Result<PendingSegment, Error> {
        let OrderedOptions { backing, kind, limit_bytes, granule_bytes, .. } = self.inner.options;
        let granules = self.inner.granules(bytes)?;
        let rounded = granules as usize * granule_bytes;
        let priming_bytes = if backing == Backing::Segments { rounded } else { 0 };
        let mut state = self.inner.lock();
        let owner = state.owner(stream)?;
        if rounded > limit_bytes.saturating_sub(state.capacity + state.priming_bytes) {
            return Err(state.out_of_memory(&self.inner, bytes));
        }
        state.priming_bytes += priming_bytes;
        drop(state);
        let (pool, stream) = (self.clone(), stream.clone());
        let work = move || {
            if backing == Backing::Device {
                return pool.reserve_segment(bytes, &stream);
            }
            let layout = Layout::from_size_align(rounded, pool.inner.segment_align()).ok();
            let allocated = layout.map(|layout| pool.inner.device.allocate(layout, kind));
            let mut state = pool.inner.lock();
            state.priming_bytes -= priming_bytes;
            let added = match allocated {
                Some(Ok(memory)) => state.add_segment(memory, granules, owner),
                Some(Err(error)) if error.kind() != ts_streams::ErrorKind::Full => {
                    return Err(error.into());
                }
                _ => None,
            };
            added.ok_or_else(|| state.out_of_memory(&pool.inner, bytes))
        };
        let thread = std::thread::Builder::new().name("ts-prime".into()).spawn(work);
        match thread {
            Ok(thread) => Ok(PendingSegment { thread }),
            Err(error) => {
                self.inner.lock().priming_bytes -= priming_bytes;
                Err(ts_streams::Error::Thread { reason: error.to_string() }.into())
            }
        }
    }

    /// Allocates `bytes` bytes for work that is submitted to `stream` from now on. Does not wait
    /// for streams, but may block while the device allocates memory.
    ///
    /// # Errors
    /// The same as [`allocate`](StreamOrderedAllocator::allocate), without the check of the
    /// alignment.
    pub fn allocate_for_stream(
        &self,
        bytes: usize,
        stream: &D::Stream,
    ) -> Result<DeviceBuffer<D>, Error> {
        self.inner.allocate(bytes, stream)
    }

    /// Coalesces all free blocks with their free neighbours, so that the next allocations can be
    /// adjacent to each other. Does not wait for streams.
    ///
    /// The pool usually does not coalesce freed blocks of frequently requested sizes until memory
    /// is short. This method coalesces them now.
    pub fn coalesce(&self) {
        self.inner.lock().offsets.coalesce_all();
    }

    /// Frees all memory that was allocated for `stream`, in stream order. Returns the number of
    /// bytes freed. Does not wait for streams.
    ///
    /// Buffers of `stream` that still exist become [stale](Error::Stale), except buffers that
    /// another thread is copying at this moment, and buffers that were exported through DLPack.
    /// These are not freed.
    pub fn free_for_stream(&self, stream: &D::Stream) -> usize {
        let mut state = self.inner.lock();
        let Some(&owner) = state.owners.get(&stream.id()) else { return 0 };
        let before = state.counts.in_use;
        state.free_all_of(&self.inner, owner);
        before - state.counts.in_use
    }
}

/// A segment allocation that
/// [`reserve_segment_in_background`](StreamOrderedPool::reserve_segment_in_background) has started.
/// Dropping this value does not stop the allocation.
#[derive(Debug)]
#[must_use = "`wait` returns whether the allocation succeeded"]
pub struct PendingSegment {
    thread: std::thread::JoinHandle<Result<(), Error>>,
}

impl PendingSegment {
    /// Returns whether the allocation has ended, with or without success. Does not block.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Blocks until the allocation has ended.
    ///
    /// # Errors
    /// The same as [`StreamOrderedPool::reserve_segment`].
    ///
    /// # Panics
    /// Panics if the thread of the allocation panicked.
    pub fn wait(self) -> Result<(), Error> {
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl<D: Device> StreamOrderedAllocator<D> for StreamOrderedPool<D> {
    fn allocate(&self, layout: Layout, stream: &D::Stream) -> Result<DeviceBuffer<D>, Error> {
        let granule_bytes = self.inner.options.granule_bytes;
        if layout.align() > granule_bytes {
            return Err(Error::BadAlignment { align: layout.align(), granule_bytes });
        }
        self.inner.allocate(layout.size(), stream)
    }

    fn record_use(&self, buffer: &DeviceBuffer<D>, stream: &D::Stream) -> Result<(), Error> {
        let mut state = self.inner.lock();
        let owner = state.owner(stream)?;
        let info = state.offsets.block_info(buffer.block).ok_or(Error::Stale)?;
        if owner != info.owner {
            state.add_use(buffer.block, owner);
        }
        Ok(())
    }

    fn trim(&self, keep_bytes: usize) -> usize {
        let mut state = self.inner.lock();
        let idle = self.inner.with_deferred_frees(&mut state, |state| {
            state.release_finished(&self.inner);
            let is_idle = |stream: &D::Stream| !matches!(stream.query(), Ok(Status::Pending));
            state.streams.iter().map(is_idle).collect::<Vec<_>>()
        });
        let (before, mut capacity) = (state.capacity, state.capacity);
        let PoolState { offsets, segments, .. } = &mut *state;
        // An idle stream no longer uses its free blocks. Giving the free blocks of all idle streams
        // to one owner lets these blocks coalesce into whole segments.
        let is_idle = |owner: Owner| idle[usize::from(owner.0)];
        if let Some(anyone) = idle.iter().position(|idle| *idle) {
            offsets.give(Owner(anyone as u16), is_idle);
        }
        let removed = offsets.remove_ranges(|info| {
            let bytes =
                segments[usize::from(info.range)].as_ref().map_or(0, |memory| memory.range().len());
            let remove = capacity > keep_bytes && is_idle(info.owner);
            capacity -= if remove { bytes } else { 0 };
            remove
        });
        let freed: Vec<_> =
            removed.iter().map(|&segment| segments[usize::from(segment)].take()).collect();
        state.vacant_segments.extend(removed);
        state.capacity = capacity;
        drop(state);
        // Frees the memory outside the lock, because the device may block.
        drop(freed);
        before - capacity
    }

    fn stats(&self) -> OrderedStats {
        let mut state = self.inner.lock();
        let granule = self.inner.options.granule_bytes;
        let Counts { in_use, high_water, allocations, frees, reused_across_streams, failures } =
            state.counts;
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
            reused_across_streams,
            failures,
        }
    }

    fn snapshot(&self) -> PoolSnapshot {
        let mut state = self.inner.lock();
        let granule = self.inner.options.granule_bytes;
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
        for BlockInfo { range, offset, len, owner, free } in state.offsets.blocks() {
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

impl<D: Device> Drop for PoolInner<D> {
    /// Waits for all streams, because they may still use memory that was freed in stream order.
    fn drop(&mut self) {
        let state = self.state.get_mut();
        // Waits for every stream, even if one has failed.
        let results: Vec<_> = state.streams.iter().map(Stream::synchronize).collect();
        if results.contains(&Err(ts_streams::Error::WaitInHostFn)) {
            // A host function on a stream dropped the last handle, and must not wait. Leaks the
            // memory, because streams may still use it.
            std::mem::forget(std::mem::take(&mut state.segments));
        }
    }
}

impl<D: Device> PoolInner<D> {
    fn lock(&self) -> MutexGuard<'_, PoolState<D>> {
        self.state.lock()
    }

    /// Runs `work`, which calls streams, while this thread holds the lock. Buffers that `work`
    /// drops on this thread are freed afterwards, because freeing requires the lock.
    fn with_deferred_frees<T>(
        &self,
        state: &mut PoolState<D>,
        work: impl FnOnce(&mut PoolState<D>) -> T,
    ) -> T {
        let result = {
            let _guard = LockedPool::enter(self.id());
            work(state)
        };
        loop {
            let deferred = self.deferred_frees.lock().pop();
            match deferred {
                Some(block) => state.free(self, block),
                None => return result,
            }
        }
    }

    /// Returns an id that is unique among the existing pools.
    fn id(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Returns the number of granules for `bytes` bytes, at least one.
    fn granules(&self, bytes: usize) -> Result<u32, Error> {
        // Avoids a division, which would take a considerable part of the time of an allocation.
        let partial = usize::from(bytes & (self.options.granule_bytes - 1) != 0);
        let granules = ((bytes >> self.granule_shift) + partial).max(1);
        // `OffsetAllocator` counts granules in 32 bits.
        let max_bytes = self.options.granule_bytes.saturating_mul(u32::MAX as usize);
        let capacity_bytes = self.options.limit_bytes.min(max_bytes);
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
            None => self.with_deferred_frees(&mut state, |state| {
                state.allocate_slow(self, bytes, granules, owner)
            })?,
        };
        state.counts.allocations += 1;
        state.counts.in_use += granules as usize * self.options.granule_bytes;
        state.counts.high_water = state.counts.high_water.max(state.counts.in_use);
        drop(state);
        Ok(DeviceBuffer { inner: Arc::clone(self), block, owner, len: bytes })
    }
}

impl<D: Device> PoolInner<D> {
    /// Returns the alignment of segments, in bytes. In the memory of a device, the driver aligns
    /// them, and a larger alignment would waste memory.
    fn segment_align(&self) -> usize {
        let OrderedOptions { kind, granule_bytes, .. } = self.options;
        let on_device = kind == MemoryKind::Device && !self.device.info().host_memory;
        if on_device { granule_bytes } else { granule_bytes.max(SEGMENT_ALIGN) }
    }
}

impl<D: Device> DeviceBuffer<D> {
    /// Returns the address range of the buffer.
    ///
    /// # Errors
    /// Returns [`Error::Stale`] if [`free_for_stream`](StreamOrderedPool::free_for_stream) has
    /// freed the memory.
    pub fn range(&self) -> Result<MemoryRange, Error> {
        Ok(self.inner.lock().locate(&self.inner, self)?.0)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn device(&self) -> &D {
        &self.inner.device
    }
}

impl<D: Device> DeviceBuffer<D> {
    /// Calls `submit` with the stream and the address range of the buffer, and waits until the
    /// submitted work is done.
    ///
    /// [`free_for_stream`](StreamOrderedPool::free_for_stream) does not free the buffer meanwhile.
    /// The pool is not locked meanwhile, because a driver may block in `submit` until the copy is
    /// done.
    pub(crate) fn transfer(
        &self,
        submit: impl FnOnce(&D::Stream, MemoryRange) -> Result<(), ts_streams::Error>,
    ) -> Result<(), Error> {
        let mut state = self.inner.lock();
        let (range, owner) = state.locate(&self.inner, self)?;
        let stream = state.streams[usize::from(owner.0)].clone();
        let _guard = CopyGuard::begin(&self.inner, &mut state, &[self.block]);
        drop(state);
        submit(&stream, range)?;
        // Even if this fails, the submitted work has ended.
        Ok(stream.synchronize()?)
    }

    /// Returns the address range of the buffer, which no call frees while the guard exists.
    #[cfg(feature = "dlpack")]
    pub(crate) fn pin(&self) -> Result<(MemoryRange, CopyGuard<D>), Error> {
        let mut state = self.inner.lock();
        let (range, _) = state.locate(&self.inner, self)?;
        let guard = CopyGuard::begin(&self.inner, &mut state, &[self.block]);
        Ok((range, guard))
    }

    /// Calls `submit` with the stream and the address range of the buffer, like
    /// [`transfer`](Self::transfer), but does not wait. The result must exist until the submitted
    /// work is done.
    pub(crate) fn begin_transfer<E: From<Error>>(
        &self,
        submit: impl FnOnce(&D::Stream, MemoryRange) -> Result<(), E>,
    ) -> Result<CopyGuard<D>, E> {
        let mut state = self.inner.lock();
        let (range, owner) = state.locate(&self.inner, self)?;
        let stream = state.streams[usize::from(owner.0)].clone();
        let guard = CopyGuard::begin(&self.inner, &mut state, &[self.block]);
        drop(state);
        submit(&stream, range)?;
        Ok(guard)
    }

    /// Does the same as [`transfer`](Self::transfer) for work that also uses the buffer `other`.
    /// The work runs after all work submitted to the stream of `other`. Returns `None` if `other`
    /// is from another pool.
    pub(crate) fn transfer_with(
        &self,
        other: &Self,
        submit: impl FnOnce(&D::Stream, MemoryRange, MemoryRange) -> Result<(), ts_streams::Error>,
    ) -> Option<Result<(), Error>> {
        Arc::ptr_eq(&self.inner, &other.inner).then(|| {
            let mut state = self.inner.lock();
            let (range, owner) = state.locate(&self.inner, self)?;
            let (range_other, owner_other) = state.locate(&self.inner, other)?;
            let stream = state.streams[usize::from(owner.0)].clone();
            if owner != owner_other {
                self.inner.with_deferred_frees(&mut state, |state| {
                    state.wait_for(&self.inner, owner, owner_other)
                })?;
                state.add_use(other.block, owner);
            }
            let _guard = CopyGuard::begin(&self.inner, &mut state, &[self.block, other.block]);
            drop(state);
            submit(&stream, range, range_other)?;
            Ok(stream.synchronize()?)
        })
    }
}

/// Keeps [`free_for_stream`](StreamOrderedPool::free_for_stream) from freeing blocks during a copy.
#[derive(Debug)]
pub(crate) struct CopyGuard<D: Device> {
    inner: Arc<PoolInner<D>>,
    blocks: Vec<BlockId>,
}

impl<D: Device> CopyGuard<D> {
    fn begin(inner: &Arc<PoolInner<D>>, state: &mut PoolState<D>, blocks: &[BlockId]) -> Self {
        state.copying.extend(blocks);
        Self { inner: Arc::clone(inner), blocks: blocks.to_vec() }
    }
}

impl<D: Device> Drop for CopyGuard<D> {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        for block in &self.blocks {
            let index = state
                .copying
                .iter()
                .position(|copying| copying == block)
                .expect("`begin` added the block");
            state.copying.swap_remove(index);
        }
    }
}

impl<D: Device> Drop for DeviceBuffer<D> {
    fn drop(&mut self) {
        let granules = self.inner.granules(self.len).expect("`allocate` accepted this size");
        let block = AllocatedBlock { block: self.block, granules, owner: self.owner };
        if LockedPool::contains(self.inner.id()) {
            self.inner.deferred_frees.lock().push(block);
        } else {
            self.inner.lock().free(&self.inner, block);
        }
    }
}

thread_local! {
    /// The pools whose lock this thread holds in `with_deferred_frees`.
    static LOCKED_POOLS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// A guard that marks a pool as locked by this thread until the guard is dropped.
struct LockedPool;

impl LockedPool {
    fn enter(pool: usize) -> Self {
        LOCKED_POOLS.with_borrow_mut(|pools| pools.push(pool));
        Self
    }

    fn contains(pool: usize) -> bool {
        // `try_with` fails in an exiting thread whose thread-locals are destroyed. Such a thread
        // holds no lock.
        LOCKED_POOLS.try_with(|pools| pools.borrow().contains(&pool)).unwrap_or(false)
    }
}

impl Drop for LockedPool {
    fn drop(&mut self) {
        LOCKED_POOLS.with_borrow_mut(Vec::pop);
    }
}
