// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a pool knows at a moment, and the steps between such moments. All of it runs under the
//! pool's one lock; none of it waits for streams.

use std::alloc::Layout;
use std::collections::{HashMap, VecDeque};

use ts_streams::{Device, Event, MemoryRange, RawMemory, Status, Stream, StreamId};

use super::{Backing, DeviceBuffer, Held, OrderedOptions, Shared};
use crate::Error;
use crate::offset::{BlockId, OffsetAllocator, Owner};

#[derive(Debug)]
pub(super) struct State<D: Device> {
    pub(super) offsets: OffsetAllocator,
    /// By their number; `None` for those that were given back.
    pub(super) segments: Vec<Option<D::Memory>>,
    /// The numbers of those that were.
    pub(super) vacant: Vec<u16>,
    pub(super) capacity: usize,
    /// What the device is about to give beside that.
    pub(super) promised: usize,
    pub(super) streams: Vec<D::Stream>,
    pub(super) owners: HashMap<StreamId, Owner>,
    /// Who asked last, with the same hash: to find an owner is a good part of the work.
    pub(super) recent: [(StreamId, Owner); RECENT],
    /// Freed, and used by other streams that may not be done.
    pub(super) pending: VecDeque<Pending<D>>,
    pub(super) pending_bytes: usize,
    pub(super) events: Vec<D::Event>,
    /// Streams other than its own that use a block.
    pub(super) uses: HashMap<u32, Vec<Owner>>,
    /// Blocks that are copied to or from, each as often as it is.
    pub(super) moving: Vec<BlockId>,
    /// Whether blocks were freed that somebody still has a name of.
    pub(super) has_stale: bool,
    pub(super) counts: Counts,
}

pub(super) const RECENT: usize = 64;

#[derive(Debug)]
pub(super) struct Pending<D: Device> {
    pub(super) block: BlockId,
    pub(super) bytes: usize,
    pub(super) owner: Owner,
    pub(super) events: Vec<D::Event>,
    /// Streams that no event stands for yet.
    pub(super) unmarked: Vec<Owner>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) in_use: usize,
    pub(super) high_water: usize,
    pub(super) allocations: u64,
    pub(super) frees: u64,
    pub(super) stolen: u64,
    pub(super) failures: u64,
}

impl<D: Device> State<D> {
    pub(super) fn new() -> Self {
        let nobody = (StreamId(0), Owner(0));
        Self {
            offsets: OffsetAllocator::default(),
            segments: Vec::new(),
            vacant: Vec::new(),
            capacity: 0,
            promised: 0,
            streams: Vec::new(),
            owners: HashMap::new(),
            recent: [nobody; RECENT],
            pending: VecDeque::new(),
            pending_bytes: 0,
            events: Vec::new(),
            uses: HashMap::new(),
            moving: Vec::new(),
            has_stale: false,
            counts: Counts::default(),
        }
    }

    /// The number of a stream.
    pub(super) fn owner(&mut self, stream: &D::Stream) -> Result<Owner, Error> {
        let id = stream.id();
        let slot = id.0 as usize % RECENT;
        if self.recent[slot].0 == id {
            return Ok(self.recent[slot].1);
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
        self.recent[slot] = (id, owner);
        Ok(owner)
    }

    /// Where a buffer is, and whose.
    pub(super) fn find(
        &self,
        shared: &Shared<D>,
        buffer: &DeviceBuffer<D>,
    ) -> Result<(MemoryRange, Owner), Error> {
        let place = self.offsets.place(buffer.block).ok_or(Error::Stale)?;
        let segment =
            self.segments[usize::from(place.range)].as_ref().expect("a block is in a segment");
        let begin = place.offset as usize * shared.options.granule_bytes;
        Ok((segment.range().slice(begin..begin + buffer.len), place.owner))
    }

    /// Another stream than its own uses a block.
    pub(super) fn note_use(&mut self, block: BlockId, by: Owner) {
        let uses = self.uses.entry(block.number()).or_default();
        if !uses.contains(&by) {
            uses.push(by);
        }
    }

    /// Memory that is not free for this stream as it is: the longer it takes, the later it is
    /// tried.
    #[cold]
    pub(super) fn search(
        &mut self,
        shared: &Shared<D>,
        bytes: usize,
        granules: u32,
        owner: Owner,
    ) -> Result<BlockId, Error> {
        self.settle_pending(shared);
        if shared.options.backing == Backing::Device {
            let mut found = self.whole_segment(shared, granules, owner)?;
            if found.is_none() && self.settle_on_device(shared) {
                found = self.whole_segment(shared, granules, owner)?;
            }
            self.counts.failures += u64::from(found.is_none());
            return found.ok_or_else(|| self.out_of_memory(shared, bytes));
        }
        if let Some(found) = self.offsets.allocate(granules, owner) {
            return Ok(found);
        }
        if let Some(found) = self.steal(shared, granules, owner)? {
            return Ok(found);
        }
        if self.grow(shared, granules, owner)?
            && let Some(found) = self.offsets.allocate(granules, owner)
        {
            return Ok(found);
        }
        // Not for what would be too little even so: a stream that waits for others for nothing is
        // late for nothing.
        let wanted = granules as usize * shared.options.granule_bytes;
        if self.offsets.free() as usize * shared.options.granule_bytes + self.pending_bytes
            >= wanted
        {
            self.wait_for_all(shared, owner)?;
            self.offsets.give(owner, |_| true);
            if let Some(found) = self.offsets.allocate(granules, owner) {
                return Ok(found);
            }
        }
        self.counts.failures += 1;
        Err(self.out_of_memory(shared, bytes))
    }

    /// Blocks whose other users are done are free.
    pub(super) fn settle_pending(&mut self, shared: &Shared<D>) {
        let is_done = |event: &D::Event| !matches!(event.query(), Ok(Status::Pending));
        let all = std::mem::take(&mut self.pending);
        for mut pending in all {
            let unmarked = std::mem::take(&mut pending.unmarked);
            self.mark_uses(shared, unmarked, &mut pending);
            if pending.unmarked.is_empty() && pending.events.iter().all(is_done) {
                self.release(shared, pending);
            } else {
                self.pending.push_back(pending);
            }
        }
    }

    /// Has the streams that own blocks follow those that use them, so that they are free in their
    /// order; whether there were some.
    fn settle_on_device(&mut self, shared: &Shared<D>) -> bool {
        let (known, others): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|pending| pending.unmarked.is_empty());
        self.pending = others.into();
        let some = !known.is_empty();
        for pending in known {
            let stream = &self.streams[usize::from(pending.owner.0)];
            match pending.events.iter().try_for_each(|event| stream.follow(event)) {
                Ok(()) => self.release(shared, pending),
                Err(_) => self.pending.push_back(pending),
            }
        }
        some
    }

    pub(super) fn release(&mut self, shared: &Shared<D>, pending: Pending<D>) {
        self.give_back(shared, pending.block, pending.owner);
        self.pending_bytes -= pending.bytes;
        self.events.extend(pending.events);
    }

    /// A block is free for its stream, to the pool or to the device.
    pub(super) fn give_back(&mut self, shared: &Shared<D>, block: BlockId, owner: Owner) {
        if shared.options.backing == Backing::Segments {
            self.offsets.release(block);
            return;
        }
        let Some(segment) = self.offsets.release_with_range(block) else { return };
        let memory = self.segments[usize::from(segment)].take().expect("a block is in a segment");
        self.capacity -= memory.range().len();
        self.vacant.push(segment);
        // What the device says of that is for whoever has made the mistake, or nobody: the memory
        // is dropped.
        let _ = shared.device.free_in_order(memory, &self.streams[usize::from(owner.0)]);
    }

    /// A block that another stream has freed: of one that has nothing to do, else of one that this
    /// waits for.
    pub(super) fn steal(
        &mut self,
        shared: &Shared<D>,
        granules: u32,
        owner: Owner,
    ) -> Result<Option<BlockId>, Error> {
        let State { offsets, streams, .. } = self;
        let is_idle =
            |other: Owner| !matches!(streams[usize::from(other.0)].query(), Ok(Status::Pending));
        let idle = offsets.steal(granules, owner, is_idle);
        let found = match idle {
            Some((block, _)) => Some(block),
            None => match self.offsets.steal(granules, owner, |_| true) {
                Some((block, from)) => {
                    if let Err(error) = self.wait_for(shared, owner, from) {
                        self.offsets.unsteal(block, from);
                        return Err(error);
                    }
                    Some(block)
                }
                None => None,
            },
        };
        self.counts.stolen += u64::from(found.is_some());
        Ok(found)
    }

    /// Has a stream follow, on the device, all that another was given, however that goes.
    pub(super) fn wait_for(
        &mut self,
        shared: &Shared<D>,
        owner: Owner,
        other: Owner,
    ) -> Result<(), Error> {
        let event = self.event(shared)?;
        self.streams[usize::from(other.0)].record(&event)?;
        self.streams[usize::from(owner.0)].follow(&event)?;
        self.events.push(event);
        Ok(())
    }

    /// Has a stream wait for all others, and for those that use what was freed, which is then free.
    /// Nothing is before all of that is done.
    pub(super) fn wait_for_all(&mut self, shared: &Shared<D>, owner: Owner) -> Result<(), Error> {
        for other in 0..self.streams.len() as u16 {
            let pending = self.pending.iter().any(|pending| {
                pending.owner == Owner(other) || pending.unmarked.contains(&Owner(other))
            });
            if Owner(other) != owner && (pending || self.offsets.free_of(Owner(other)) > 0) {
                self.wait_for(shared, owner, Owner(other))?;
            }
        }
        let stream = &self.streams[usize::from(owner.0)];
        self.pending
            .iter()
            .flat_map(|pending| &pending.events)
            .try_for_each(|event| stream.follow(event))?;
        std::mem::take(&mut self.pending)
            .into_iter()
            .for_each(|pending| self.release(shared, pending));
        Ok(())
    }

    /// Takes a segment from the device; `false` when there is no more to be had.
    pub(super) fn grow(
        &mut self,
        shared: &Shared<D>,
        granules: u32,
        owner: Owner,
    ) -> Result<bool, Error> {
        let OrderedOptions { kind, segment_bytes, limit_bytes, granule_bytes, .. } = shared.options;
        let needed = granules as usize * granule_bytes;
        let room = limit_bytes.saturating_sub(self.capacity + self.promised) / granule_bytes
            * granule_bytes;
        let usual = segment_bytes.checked_next_multiple_of(granule_bytes).unwrap_or(room).min(room);
        for bytes in [usual.max(needed), needed] {
            let Some(len) = u32::try_from(bytes / granule_bytes).ok().filter(|_| bytes <= room)
            else {
                continue;
            };
            let layout = Layout::from_size_align(bytes, granule_bytes.max(SEGMENT_ALIGN));
            match layout.ok().map(|layout| shared.device.allocate(layout, kind)) {
                Some(Ok(memory)) => return Ok(self.add_segment(memory, len, owner).is_some()),
                Some(Err(error)) if error.kind() != ts_streams::ErrorKind::Full => {
                    return Err(error.into());
                }
                // Less may be had.
                _ => {}
            }
        }
        Ok(false)
    }

    /// Memory of the device's own allocator, for one block; `None` when there is no more to be had.
    pub(super) fn whole_segment(
        &mut self,
        shared: &Shared<D>,
        granules: u32,
        owner: Owner,
    ) -> Result<Option<BlockId>, Error> {
        let OrderedOptions { limit_bytes, granule_bytes, .. } = shared.options;
        let bytes = granules as usize * granule_bytes;
        let Ok(layout) = Layout::from_size_align(bytes, granule_bytes) else { return Ok(None) };
        if bytes > limit_bytes.saturating_sub(self.capacity + self.promised) {
            return Ok(None);
        }
        let memory =
            match shared.device.allocate_in_order(layout, &self.streams[usize::from(owner.0)]) {
                Ok(memory) => memory,
                Err(error) if error.kind() == ts_streams::ErrorKind::Full => return Ok(None),
                Err(error) => return Err(error.into()),
            };
        let added = self.add_segment(memory, granules, owner);
        Ok(added.and_then(|()| self.offsets.allocate(granules, owner)))
    }

    /// More to divide, of `owner`'s; `None` when there is no number for it.
    pub(super) fn add_segment(
        &mut self,
        memory: D::Memory,
        granules: u32,
        owner: Owner,
    ) -> Option<()> {
        let next = || u16::try_from(self.segments.len()).ok();
        let number = self.vacant.pop().or_else(next)?;
        self.capacity += memory.range().len();
        match self.segments.get_mut(usize::from(number)) {
            Some(vacant) => *vacant = Some(memory),
            None => self.segments.push(Some(memory)),
        }
        self.offsets.add_range(number, granules, owner);
        Some(())
    }

    /// Frees a block in the order of its stream.
    pub(super) fn free(&mut self, shared: &Shared<D>, held: Held) {
        let Held { block, granules, owner } = held;
        // It looks at nothing that is known of the block, unless it must.
        if self.has_stale && !self.offsets.is_live(block) {
            return;
        }
        let bytes = granules as usize * shared.options.granule_bytes;
        let uses = if self.uses.is_empty() { None } else { self.uses.remove(&block.number()) };
        self.counts.frees += 1;
        self.counts.in_use -= bytes;
        let Some(uses) = uses else {
            match shared.options.backing {
                Backing::Segments => self.offsets.release_sized(block, granules, owner),
                Backing::Device => self.give_back(shared, block, owner),
            }
            return;
        };
        self.pending_bytes += bytes;
        let block = self.offsets.renamed(block);
        let mut pending = Pending { block, bytes, owner, events: Vec::new(), unmarked: Vec::new() };
        shared.asking(self, |state| state.mark_uses(shared, uses, &mut pending));
        self.pending.push_back(pending);
    }

    /// Frees all blocks of an owner that somebody has; those who have them do not know.
    pub(super) fn free_all(&mut self, shared: &Shared<D>, owner: Owner) {
        self.has_stale = true;
        for block in self.offsets.live_of(owner) {
            let pending = self.pending.iter().any(|pending| pending.block == block);
            if !pending && !self.moving.contains(&block) {
                let granules = self.offsets.place(block).map_or(0, |place| place.len);
                let number = block.number();
                let block = self.offsets.renamed(block);
                debug_assert_eq!(block.number(), number, "its uses are known by it");
                self.free(shared, Held { block, granules, owner });
            }
        }
    }

    /// Has events stand for what streams were given; those that take none now, as none of CUDA does
    /// where work of a stream lets go of memory, are asked again later.
    pub(super) fn mark_uses(
        &mut self,
        shared: &Shared<D>,
        uses: Vec<Owner>,
        pending: &mut Pending<D>,
    ) {
        for other in uses {
            let stream = self.streams[usize::from(other.0)].clone();
            match self.event(shared).and_then(|event| Ok(stream.record(&event).map(|()| event)?)) {
                Ok(event) => pending.events.push(event),
                Err(_) => pending.unmarked.push(other),
            }
        }
    }

    pub(super) fn event(&mut self, shared: &Shared<D>) -> Result<D::Event, Error> {
        self.events.pop().map_or_else(|| Ok(shared.device.create_event()?), Ok)
    }

    pub(super) fn free_bytes(&self, granule: usize) -> Vec<(StreamId, usize)> {
        let of = |(number, stream): (usize, &D::Stream)| {
            (stream.id(), self.offsets.free_of(Owner(number as u16)) as usize * granule)
        };
        self.streams.iter().enumerate().map(of).filter(|(_, bytes)| *bytes > 0).collect()
    }

    pub(super) fn out_of_memory(&mut self, shared: &Shared<D>, requested_bytes: usize) -> Error {
        let granule = shared.options.granule_bytes;
        Error::OutOfMemory {
            device: shared.device.info().name.clone(),
            requested_bytes,
            capacity_bytes: self.capacity,
            limit_bytes: shared.options.limit_bytes,
            in_use_bytes: self.counts.in_use,
            largest_free_bytes: self.offsets.largest_free() as usize * granule,
            pending_bytes: self.pending_bytes,
            free_bytes: self.free_bytes(granule),
        }
    }
}

/// What segments are aligned to, so that they lie on huge pages where there are some.
pub(super) const SEGMENT_ALIGN: usize = 2 << 20;
