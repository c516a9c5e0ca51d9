// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a pool and the operations on it. All operations run under the lock of the pool, and
//! none of them waits for streams.

use std::alloc::Layout;
use std::collections::{HashMap, VecDeque};

use ts_streams::{Device, Event, MemoryRange, RawMemory, Status, Stream, StreamId};

use super::{AllocatedBlock, Backing, DeviceBuffer, OrderedOptions, PoolInner};
use crate::Error;
use crate::offset::{BlockId, OffsetAllocator, Owner};

#[derive(Debug)]
pub(super) struct PoolState<D: Device> {
    pub(super) offsets: OffsetAllocator,
    /// The segments by number. The entry is `None` if `vacant_segments` contains the number.
    pub(super) segments: Vec<Option<D::Memory>>,
    /// Numbers of segments that were freed.
    pub(super) vacant_segments: Vec<u16>,
    /// Bytes in all segments.
    pub(super) capacity: usize,
    /// Bytes that `reserve_segment_in_background` is allocating with `Backing::Segments`. They
    /// count towards the limit, but not towards `capacity`.
    pub(super) priming_bytes: usize,
    /// The streams that the pool has served, by owner number.
    pub(super) streams: Vec<D::Stream>,
    pub(super) owners: HashMap<StreamId, Owner>,
    /// A direct-mapped cache of `owners`, because the lookup takes a considerable part of the time
    /// of an allocation.
    pub(super) owner_cache: [(StreamId, Owner); OWNER_CACHE_LEN],
    /// Freed blocks that other streams may still use.
    pub(super) pending: VecDeque<PendingBlock<D>>,
    pub(super) pending_bytes: usize,
    /// Events that no block needs any more, for reuse.
    pub(super) events: Vec<D::Event>,
    /// For each block, by index, the streams other than its owner that use it.
    pub(super) uses: HashMap<u32, Vec<Owner>>,
    /// Blocks that are being copied. A block occurs once for each copy in progress.
    pub(super) copying: Vec<BlockId>,
    /// Whether `free_all_of` was ever called. If not, no buffer is stale.
    pub(super) has_stale: bool,
    pub(super) counts: Counts,
}

pub(super) const OWNER_CACHE_LEN: usize = 64;

/// A freed block that other streams may still use.
#[derive(Debug)]
pub(super) struct PendingBlock<D: Device> {
    pub(super) block: BlockId,
    pub(super) bytes: usize,
    pub(super) owner: Owner,
    /// Events that mark the end of the uses by other streams.
    pub(super) events: Vec<D::Event>,
    /// Streams that use the block and have no event in `events` yet.
    pub(super) unrecorded: Vec<Owner>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) in_use: usize,
    pub(super) high_water: usize,
    pub(super) allocations: u64,
    pub(super) frees: u64,
    pub(super) reused_across_streams: u64,
    pub(super) failures: u64,
}

impl<D: Device> PoolState<D> {
    pub(super) fn new() -> Self {
        // Stream ids start at 1, so id 0 marks an unused entry of the cache.
        let empty = (StreamId(0), Owner(0));
        Self {
            offsets: OffsetAllocator::default(),
            segments: Vec::new(),
            vacant_segments: Vec::new(),
            capacity: 0,
            priming_bytes: 0,
            streams: Vec::new(),
            owners: HashMap::new(),
            owner_cache: [empty; OWNER_CACHE_LEN],
            pending: VecDeque::new(),
            pending_bytes: 0,
            events: Vec::new(),
            uses: HashMap::new(),
            copying: Vec::new(),
            has_stale: false,
            counts: Counts::default(),
        }
    }

    /// Returns the owner number of a stream. Assigns the next number if the pool has not served the
    /// stream before.
    pub(super) fn owner(&mut self, stream: &D::Stream) -> Result<Owner, Error> {
        let id = stream.id();
        let slot = id.0 as usize % OWNER_CACHE_LEN;
        if self.owner_cache[slot].0 == id {
            return Ok(self.owner_cache[slot].1);
        }
        let owner = match self.owners.get(&id) {
            Some(&owner) => owner,
            None => {
                let number =
                    u16::try_from(self.streams.len()).map_err(|_| Error::TooManyStreams)?;
                self.streams.push(stream.clone());
                self.offsets.add_owner(Owner(number));
                self.owners.insert(id, Owner(number));
                Owner(number)
            }
        };
        self.owner_cache[slot] = (id, owner);
        Ok(owner)
    }

    /// Returns the address range and the owner of a buffer.
    pub(super) fn locate(
        &self,
        pool: &PoolInner<D>,
        buffer: &DeviceBuffer<D>,
    ) -> Result<(MemoryRange, Owner), Error> {
        let info = self.offsets.block_info(buffer.block).ok_or(Error::Stale)?;
        let segment = self.segments[usize::from(info.range)]
            .as_ref()
            .expect("the segment of a live block exists");
        let begin = info.offset as usize * pool.options.granule_bytes;
        Ok((segment.range().slice(begin..begin + buffer.len), info.owner))
    }

    /// Records that a stream other than the owner uses a block.
    pub(super) fn add_use(&mut self, block: BlockId, by: Owner) {
        let uses = self.uses.entry(block.index()).or_default();
        if !uses.contains(&by) {
            uses.push(by);
        }
    }

    /// Allocates a block if the owner has no free block that fits. Tries the cheapest way first.
    #[cold]
    pub(super) fn allocate_slow(
        &mut self,
        pool: &PoolInner<D>,
        bytes: usize,
        granules: u32,
        owner: Owner,
    ) -> Result<BlockId, Error> {
        self.release_finished(pool);
        if pool.options.backing == Backing::Device {
            let mut found = self.allocate_from_device(pool, granules, owner)?;
            if found.is_none() && self.release_in_stream_order(pool) {
                found = self.allocate_from_device(pool, granules, owner)?;
            }
            self.counts.failures += u64::from(found.is_none());
            return found.ok_or_else(|| self.out_of_memory(pool, bytes));
        }
        if let Some(found) = self.offsets.allocate(granules, owner) {
            return Ok(found);
        }
        if let Some(found) = self.steal(pool, granules, owner)? {
            return Ok(found);
        }
        if self.grow(pool, granules, owner)?
            && let Some(found) = self.offsets.allocate(granules, owner)
        {
            return Ok(found);
        }
        // Makes the stream wait for all others if the free and the pending memory together may
        // suffice. Otherwise the wait would be useless.
        let requested = granules as usize * pool.options.granule_bytes;
        if self.offsets.free() as usize * pool.options.granule_bytes + self.pending_bytes
            >= requested
        {
            self.wait_for_all(pool, owner)?;
            self.offsets.give(owner, |_| true);
            if let Some(found) = self.offsets.allocate(granules, owner) {
                return Ok(found);
            }
        }
        self.counts.failures += 1;
        Err(self.out_of_memory(pool, bytes))
    }

    /// Frees the pending blocks that no other stream uses any more.
    pub(super) fn release_finished(&mut self, pool: &PoolInner<D>) {
        let is_done = |event: &D::Event| !matches!(event.query(), Ok(Status::Pending));
        let all = std::mem::take(&mut self.pending);
        for mut pending in all {
            let unrecorded = std::mem::take(&mut pending.unrecorded);
            self.record_uses(pool, unrecorded, &mut pending);
            if pending.unrecorded.is_empty() && pending.events.iter().all(is_done) {
                self.release_pending(pool, pending);
            } else {
                self.pending.push_back(pending);
            }
        }
    }

    /// Frees pending blocks in stream order. The stream that owns a block waits, on the device, for
    /// the uses by other streams. Skips a block if one of its uses has no event yet. Returns
    /// `false` if no block is pending, or if all are skipped.
    fn release_in_stream_order(&mut self, pool: &PoolInner<D>) -> bool {
        let (recorded, others): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|pending| pending.unrecorded.is_empty());
        self.pending = others.into();
        let any = !recorded.is_empty();
        for pending in recorded {
            let stream = &self.streams[usize::from(pending.owner.0)];
            match pending.events.iter().try_for_each(|event| stream.wait_ignoring_failure(event)) {
                Ok(()) => self.release_pending(pool, pending),
                Err(_) => self.pending.push_back(pending),
            }
        }
        any
    }

    pub(super) fn release_pending(&mut self, pool: &PoolInner<D>, pending: PendingBlock<D>) {
        self.release_block(pool, pending.block, pending.owner);
        self.pending_bytes -= pending.bytes;
        self.events.extend(pending.events);
    }

    /// Returns a block to the bins of its stream, or to the allocator of the device.
    pub(super) fn release_block(&mut self, pool: &PoolInner<D>, block: BlockId, owner: Owner) {
        if pool.options.backing == Backing::Segments {
            self.offsets.release(block);
            return;
        }
        let Some(segment) = self.offsets.release_with_range(block) else { return };
        let memory = self.segments[usize::from(segment)]
            .take()
            .expect("the block was live, so its segment exists");
        self.capacity -= memory.range().len();
        self.vacant_segments.push(segment);
        // The error can be ignored, because `free_async` drops the memory in any case.
        let _ = pool.device.free_async(memory, &self.streams[usize::from(owner.0)]);
    }

    /// Takes a free block of another stream, preferably of an idle one. If the other stream is
    /// busy, the stream of `owner` waits for it on the device.
    pub(super) fn steal(
        &mut self,
        pool: &PoolInner<D>,
        granules: u32,
        owner: Owner,
    ) -> Result<Option<BlockId>, Error> {
        let PoolState { offsets, streams, .. } = self;
        let is_idle =
            |other: Owner| !matches!(streams[usize::from(other.0)].query(), Ok(Status::Pending));
        let idle = offsets.steal(granules, owner, is_idle);
        let found = match idle {
            Some((block, _)) => Some(block),
            None => match self.offsets.steal(granules, owner, |_| true) {
                Some((block, from)) => {
                    if let Err(error) = self.wait_for(pool, owner, from) {
                        self.offsets.unsteal(block, from);
                        return Err(error);
                    }
                    Some(block)
                }
                None => None,
            },
        };
        self.counts.reused_across_streams += u64::from(found.is_some());
        Ok(found)
    }

    /// Makes the stream of `owner` wait, on the device, for all work submitted to the stream of
    /// `other`. A failure of that work does not make the stream of `owner` fail.
    pub(super) fn wait_for(
        &mut self,
        pool: &PoolInner<D>,
        owner: Owner,
        other: Owner,
    ) -> Result<(), Error> {
        let event = self.event(pool)?;
        self.streams[usize::from(other.0)].record(&event)?;
        self.streams[usize::from(owner.0)].wait_ignoring_failure(&event)?;
        self.events.push(event);
        Ok(())
    }

    /// Makes the stream of `owner` wait, on the device, for all streams that own free memory or
    /// pending blocks, and for all uses of pending blocks. Then frees the pending blocks. Frees
    /// nothing if a wait cannot be submitted.
    pub(super) fn wait_for_all(&mut self, pool: &PoolInner<D>, owner: Owner) -> Result<(), Error> {
        for other in 0..self.streams.len() as u16 {
            let pending = self.pending.iter().any(|pending| {
                pending.owner == Owner(other) || pending.unrecorded.contains(&Owner(other))
            });
            if Owner(other) != owner && (pending || self.offsets.free_of(Owner(other)) > 0) {
                self.wait_for(pool, owner, Owner(other))?;
            }
        }
        let stream = &self.streams[usize::from(owner.0)];
        self.pending
            .iter()
            .flat_map(|pending| &pending.events)
            .try_for_each(|event| stream.wait_ignoring_failure(event))?;
        std::mem::take(&mut self.pending)
            .into_iter()
            .for_each(|pending| self.release_pending(pool, pending));
        Ok(())
    }

    /// Allocates a segment from the device. Returns `false` if the device is full or the limit is
    /// reached.
    pub(super) fn grow(
        &mut self,
        pool: &PoolInner<D>,
        granules: u32,
        owner: Owner,
    ) -> Result<bool, Error> {
        let OrderedOptions { kind, segment_bytes, limit_bytes, granule_bytes, .. } = pool.options;
        let needed = granules as usize * granule_bytes;
        let room = limit_bytes.saturating_sub(self.capacity + self.priming_bytes) / granule_bytes
            * granule_bytes;
        let usual = segment_bytes.checked_next_multiple_of(granule_bytes).unwrap_or(room).min(room);
        for bytes in [usual.max(needed), needed] {
            let Some(len) = u32::try_from(bytes / granule_bytes).ok().filter(|_| bytes <= room)
            else {
                continue;
            };
            let layout = Layout::from_size_align(bytes, pool.segment_align());
            match layout.ok().map(|layout| pool.device.allocate(layout, kind)) {
                Some(Ok(memory)) => return Ok(self.add_segment(memory, len, owner).is_some()),
                Some(Err(error)) if error.kind() != ts_streams::ErrorKind::Full => {
                    return Err(error.into());
                }
                // The device is full. A smaller segment may fit.
                _ => {}
            }
        }
        Ok(false)
    }

    /// Allocates a block from the stream-ordered allocator of the device. Returns `None` if the
    /// device is full or the limit is reached.
    pub(super) fn allocate_from_device(
        &mut self,
        pool: &PoolInner<D>,
        granules: u32,
        owner: Owner,
    ) -> Result<Option<BlockId>, Error> {
        let OrderedOptions { limit_bytes, granule_bytes, .. } = pool.options;
        let bytes = granules as usize * granule_bytes;
        let Ok(layout) = Layout::from_size_align(bytes, granule_bytes) else { return Ok(None) };
        if bytes > limit_bytes.saturating_sub(self.capacity + self.priming_bytes) {
            return Ok(None);
        }
        let memory = match pool.device.allocate_async(layout, &self.streams[usize::from(owner.0)]) {
            Ok(memory) => memory,
            Err(error) if error.kind() == ts_streams::ErrorKind::Full => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let added = self.add_segment(memory, granules, owner);
        Ok(added.and_then(|()| self.offsets.allocate(granules, owner)))
    }

    /// Adds a free segment that belongs to `owner`. Returns `None` if all 65,536 segment numbers
    /// are in use.
    pub(super) fn add_segment(
        &mut self,
        memory: D::Memory,
        granules: u32,
        owner: Owner,
    ) -> Option<()> {
        let next = || u16::try_from(self.segments.len()).ok();
        let number = self.vacant_segments.pop().or_else(next)?;
        self.capacity += memory.range().len();
        match self.segments.get_mut(usize::from(number)) {
            Some(segment) => *segment = Some(memory),
            None => self.segments.push(Some(memory)),
        }
        self.offsets.add_range(number, granules, owner);
        Some(())
    }

    /// Frees a block in stream order. If other streams use the block, it becomes pending.
    pub(super) fn free(&mut self, pool: &PoolInner<D>, block: AllocatedBlock) {
        let AllocatedBlock { block, granules, owner } = block;
        // Reads the node of the block only if necessary, because the node is rarely in the cache.
        if self.has_stale && !self.offsets.is_live(block) {
            return;
        }
        let bytes = granules as usize * pool.options.granule_bytes;
        let uses = if self.uses.is_empty() { None } else { self.uses.remove(&block.index()) };
        self.counts.frees += 1;
        self.counts.in_use -= bytes;
        let Some(uses) = uses else {
            match pool.options.backing {
                Backing::Segments => self.offsets.release_sized(block, granules, owner),
                Backing::Device => self.release_block(pool, block, owner),
            }
            return;
        };
        self.pending_bytes += bytes;
        let block = self.offsets.renew_id(block);
        let (events, unrecorded) = (Vec::new(), Vec::new());
        let mut pending = PendingBlock { block, bytes, owner, events, unrecorded };
        pool.with_deferred_frees(self, |state| state.record_uses(pool, uses, &mut pending));
        self.pending.push_back(pending);
    }

    /// Frees all allocated blocks of an owner, except those that are being copied. Their buffers
    /// become stale.
    pub(super) fn free_all_of(&mut self, pool: &PoolInner<D>, owner: Owner) {
        self.has_stale = true;
        for block in self.offsets.live_of(owner) {
            let pending = self.pending.iter().any(|pending| pending.block == block);
            if !pending && !self.copying.contains(&block) {
                let granules = self.offsets.block_info(block).map_or(0, |info| info.len);
                let index = block.index();
                let block = self.offsets.renew_id(block);
                debug_assert_eq!(block.index(), index, "the index is the key in `uses`");
                self.free(pool, AllocatedBlock { block, granules, owner });
            }
        }
    }

    /// Records an event on each stream that uses a pending block.
    ///
    /// Recording can fail: CUDA forbids it in a host function, where a buffer may be dropped. Such
    /// streams stay in `unrecorded`, and `release_finished` tries again.
    pub(super) fn record_uses(
        &mut self,
        pool: &PoolInner<D>,
        uses: Vec<Owner>,
        pending: &mut PendingBlock<D>,
    ) {
        for other in uses {
            let stream = self.streams[usize::from(other.0)].clone();
            match self.event(pool).and_then(|event| Ok(stream.record(&event).map(|()| event)?)) {
                Ok(event) => pending.events.push(event),
                Err(_) => pending.unrecorded.push(other),
            }
        }
    }

    /// Returns an event for reuse, or creates one.
    pub(super) fn event(&mut self, pool: &PoolInner<D>) -> Result<D::Event, Error> {
        self.events.pop().map_or_else(|| Ok(pool.device.create_event()?), Ok)
    }

    /// Returns the free bytes of each stream that has any.
    pub(super) fn free_bytes(&self, granule: usize) -> Vec<(StreamId, usize)> {
        let of = |(number, stream): (usize, &D::Stream)| {
            (stream.id(), self.offsets.free_of(Owner(number as u16)) as usize * granule)
        };
        self.streams.iter().enumerate().map(of).filter(|(_, bytes)| *bytes > 0).collect()
    }

    pub(super) fn out_of_memory(&mut self, pool: &PoolInner<D>, requested_bytes: usize) -> Error {
        let granule = pool.options.granule_bytes;
        Error::OutOfMemory {
            device: pool.device.info().name.clone(),
            requested_bytes,
            capacity_bytes: self.capacity,
            limit_bytes: pool.options.limit_bytes,
            in_use_bytes: self.counts.in_use,
            largest_free_bytes: self.offsets.largest_free() as usize * granule,
            pending_bytes: self.pending_bytes,
            free_bytes: self.free_bytes(granule),
        }
    }
}

/// Alignment of segments in bytes: the size of a huge page.
pub(super) const SEGMENT_ALIGN: usize = 2 << 20;
