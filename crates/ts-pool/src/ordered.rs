// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that is allocated and freed in the order of streams.

use std::alloc::Layout;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ts_streams::{Device, Event, MemoryKind, MemoryRange, RawMemory, Status, Stream, StreamId};

use crate::Error;
use crate::offset::{BlockId, OffsetAllocator, Owner, Place};

/// Allocates memory of a device in the order of its streams.
pub trait StreamOrderedAllocator<D: Device>: Send + Sync {
    /// Memory that may be used by work that is submitted to `stream` from now on. Does not wait for streams.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::BadAlignment`], [`Error::Device`].
    fn allocate(&self, layout: Layout, stream: &D::Stream) -> Result<DeviceBuffer<D>, Error>;

    /// Says that work on `stream`, submitted by now, uses the buffer too: its memory is free when that is done as well. Not needed for
    /// the stream that it was allocated for.
    ///
    /// # Errors
    /// [`Error::Stale`].
    fn record_use(&self, buffer: &DeviceBuffer<D>, stream: &D::Stream) -> Result<(), Error>;

    /// Gives memory back to the device that nothing uses, until the pool holds at most `keep_bytes`, as far as whole segments are
    /// free; how much that was. Does not wait for streams.
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
    /// From the device's own allocator, block by block: CUDA's `cuMemAllocAsync`. The pool counts, limits, and sees to streams that use
    /// what is not theirs; 65,536 blocks at most.
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
    /// Device memory without a limit but the device's, 64 MiB at a time, on 512 bytes as CUDA gives it.
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

/// A pool of a device's memory, in segments. What is freed for a stream is there for the same stream at once; for another once
/// it has waited, on the device, for what the first was given by then. Cloning gives another handle.
///
/// When the last handle and the last buffer are dropped, all streams that it has served are waited for; where work of a stream drops
/// them, which cannot wait, the memory is never given back.
///
/// A block that other streams have used ([`record_use`](StreamOrderedAllocator::record_use)) is free when they are done with it, which
/// is looked at when memory is short.
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
    state: Mutex<State<D>>,
    /// Blocks that this very thread let go of while it had the state: work of streams may own some, and ends wherever streams
    /// are asked for something.
    returned: Mutex<Vec<BlockId>>,
}

#[derive(Debug)]
struct State<D: Device> {
    offsets: OffsetAllocator,
    /// By their number; `None` for those that were given back.
    segments: Vec<Option<D::Memory>>,
    /// The numbers of those that were.
    vacant: Vec<u16>,
    capacity: usize,
    /// What the device is about to give beside that.
    promised: usize,
    streams: Vec<D::Stream>,
    owners: HashMap<StreamId, Owner>,
    /// Who asked last, with the same hash: to find an owner is a good part of the work.
    recent: [(StreamId, Owner); RECENT],
    /// Freed, and used by other streams that may not be done.
    pending: VecDeque<Pending<D>>,
    pending_bytes: usize,
    events: Vec<D::Event>,
    /// Streams other than its own that use a block.
    uses: HashMap<u32, Vec<Owner>>,
    counts: Counts,
}

const RECENT: usize = 64;

#[derive(Debug)]
struct Pending<D: Device> {
    block: BlockId,
    bytes: usize,
    owner: Owner,
    events: Vec<D::Event>,
    /// Streams that no event stands for yet.
    unmarked: Vec<Owner>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    in_use: usize,
    high_water: usize,
    allocations: u64,
    frees: u64,
    stolen: u64,
    failures: u64,
}

/// What a [`StreamOrderedPool`] holds and has done. Bytes are those of whole blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderedStats {
    /// Taken from the device.
    pub capacity_bytes: usize,
    /// In blocks that somebody has.
    pub in_use_bytes: usize,
    /// The most that was in use at any time.
    pub high_water_bytes: usize,
    /// In blocks that are freed, and that streams may still use which do not own them.
    pub pending_bytes: usize,
    /// The longest free block.
    pub largest_free_bytes: usize,
    /// What is free, by the stream whose it is.
    pub free_bytes: Vec<(StreamId, usize)>,
    /// Segments.
    pub segments: usize,
    /// Blocks handed out since the beginning.
    pub allocations: u64,
    /// Blocks freed since the beginning.
    pub frees: u64,
    /// Blocks handed out that another stream had freed.
    pub stolen: u64,
    /// Requests that found no memory.
    pub failures: u64,
}

/// Where everything lies in a pool. Its text is JSON: `{"segments":[{"address":0,"len":0,"blocks":[{"offset":0,"len":0,"free":true,
/// "stream":0}]}]}`, all numbers in bytes but the stream's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSnapshot {
    /// The segments.
    pub segments: Vec<SegmentSnapshot>,
}

impl fmt::Display for PoolSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let block = |BlockSnapshot { offset, len, free, stream }: &BlockSnapshot| {
            format!(r#"{{"offset":{offset},"len":{len},"free":{free},"stream":{stream}}}"#)
        };
        let segment = |SegmentSnapshot { address, len, blocks }: &SegmentSnapshot| {
            let blocks: Vec<_> = blocks.iter().map(block).collect();
            format!(r#"{{"address":{address},"len":{len},"blocks":[{}]}}"#, blocks.join(","))
        };
        let segments: Vec<_> = self.segments.iter().map(segment).collect();
        write!(f, r#"{{"segments":[{}]}}"#, segments.join(","))
    }
}

/// A segment, and what lies in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentSnapshot {
    /// Where it begins.
    pub address: usize,
    /// Its length in bytes.
    pub len: usize,
    /// Its blocks, one behind the other.
    pub blocks: Vec<BlockSnapshot>,
}

/// A block of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSnapshot {
    /// From the segment's beginning, in bytes.
    pub offset: usize,
    /// In bytes.
    pub len: usize,
    /// Whether it is free.
    pub free: bool,
    /// The stream whose it is.
    pub stream: StreamId,
}

/// Memory of a [`StreamOrderedPool`], for work on the stream that it was allocated for. Not `Clone`; dropping it frees it in that
/// stream's order: what is submitted there later may get the same memory.
#[derive(Debug)]
pub struct DeviceBuffer<D: Device> {
    shared: Arc<Shared<D>>,
    block: BlockId,
    /// The bytes that were asked for. Where they are its block knows: programs have many of these.
    len: usize,
}

impl<D: Device> StreamOrderedPool<D> {
    /// A pool that takes nothing from the device yet.
    ///
    /// # Panics
    /// If `granule_bytes` is no power of two.
    pub fn new(device: D, options: OrderedOptions) -> Self {
        assert!(options.granule_bytes.is_power_of_two(), "granules of {} bytes", options.granule_bytes);
        let nobody = (StreamId(0), Owner(0));
        let state = State {
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
            counts: Counts::default(),
        };
        let returned = Mutex::default();
        Self { shared: Arc::new(Shared { device, options, state: Mutex::new(state), returned }) }
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.shared.device
    }

    /// Takes memory from the device for `stream` now, so that nobody waits for it later: at least so many bytes in one piece. Blocks.
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

    /// As [`prime`](Self::prime), on a thread of its own: the pool serves others meanwhile. What is on its way counts towards the
    /// limit.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the pool may not take so much more; [`Error::Device`] when there is no thread.
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
                Some(Err(error)) if error.kind() != ts_streams::ErrorKind::Full => return Err(error.into()),
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
    pub fn allocate_for_stream(&self, bytes: usize, stream: &D::Stream) -> Result<DeviceBuffer<D>, Error> {
        self.shared.allocate(bytes, stream)
    }

    /// Frees all that was allocated for a stream, in its order. Who still has a buffer of it finds it [stale](Error::Stale). How many
    /// bytes that were.
    pub fn free_for_stream(&self, stream: &D::Stream) -> usize {
        let mut state = self.shared.lock();
        let Some(&owner) = state.owners.get(&stream.id()) else { return 0 };
        let before = state.counts.in_use;
        for block in state.offsets.live_of(owner) {
            if !state.pending.iter().any(|pending| pending.block == block) {
                state.free(&self.shared, block);
            }
        }
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
            let bytes = segments[usize::from(place.range)].as_ref().map_or(0, |memory| memory.range().len());
            let goes = capacity > keep_bytes && is_idle(place.owner);
            capacity -= if goes { bytes } else { 0 };
            goes
        });
        let gone: Vec<_> = removed.iter().map(|&segment| segments[usize::from(segment)].take()).collect();
        state.vacant.extend(removed);
        state.capacity = capacity;
        drop(state);
        // The device may block.
        drop(gone);
        before - capacity
    }

    fn stats(&self) -> OrderedStats {
        let state = self.shared.lock();
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
        let state = self.shared.lock();
        let granule = self.shared.options.granule_bytes;
        let mut segments: Vec<Option<SegmentSnapshot>> = state
            .segments
            .iter()
            .map(|memory| {
                let range = memory.as_ref()?.range();
                Some(SegmentSnapshot { address: range.address(), len: range.len(), blocks: Vec::new() })
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
            // Work of a stream had the last handle, and cannot wait. Rather than that, the memory stays taken.
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
                Some(block) => state.free(self, block),
                None => return result,
            }
        }
    }

    /// Tells this pool from others.
    fn number(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn granules(&self, bytes: usize) -> Result<u32, Error> {
        let granules = bytes.div_ceil(self.options.granule_bytes).max(1);
        let capacity_bytes = self.options.limit_bytes;
        u32::try_from(granules).map_err(|_| Error::NeverFits { requested_bytes: bytes, capacity_bytes })
    }

    fn allocate(self: &Arc<Self>, bytes: usize, stream: &D::Stream) -> Result<DeviceBuffer<D>, Error> {
        let granules = self.granules(bytes)?;
        let mut state = self.lock();
        let owner = state.owner(stream)?;
        let found = match self.options.backing {
            Backing::Segments => state.offsets.allocate(granules, owner),
            Backing::Device => None,
        };
        let (block, place) = match found {
            Some(found) => found,
            None => self.asking(&mut state, |state| state.search(self, bytes, granules, owner))?,
        };
        let granule = self.options.granule_bytes;
        state.counts.allocations += 1;
        state.counts.in_use += place.len as usize * granule;
        state.counts.high_water = state.counts.high_water.max(state.counts.in_use);
        drop(state);
        Ok(DeviceBuffer { shared: Arc::clone(self), block, len: bytes })
    }
}

impl<D: Device> State<D> {
    /// The number of a stream.
    fn owner(&mut self, stream: &D::Stream) -> Result<Owner, Error> {
        let id = stream.id();
        let slot = id.0 as usize % RECENT;
        if self.recent[slot].0 == id {
            return Ok(self.recent[slot].1);
        }
        let owner = match self.owners.get(&id) {
            Some(&owner) => owner,
            None => {
                let number = u16::try_from(self.streams.len()).map_err(|_| Error::TooManyStreams)?;
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
    fn find(&self, shared: &Shared<D>, buffer: &DeviceBuffer<D>) -> Result<(MemoryRange, Owner), Error> {
        let place = self.offsets.place(buffer.block).ok_or(Error::Stale)?;
        let segment = self.segments[usize::from(place.range)].as_ref().expect("a block is in a segment");
        let begin = place.offset as usize * shared.options.granule_bytes;
        Ok((segment.range().slice(begin..begin + buffer.len), place.owner))
    }

    /// Another stream than its own uses a block.
    fn note_use(&mut self, block: BlockId, by: Owner) {
        let uses = self.uses.entry(block.number()).or_default();
        if !uses.contains(&by) {
            uses.push(by);
        }
    }

    /// Memory that is not free for this stream as it is: the longer it takes, the later it is tried.
    #[cold]
    fn search(
        &mut self,
        shared: &Shared<D>,
        bytes: usize,
        granules: u32,
        owner: Owner,
    ) -> Result<(BlockId, Place), Error> {
        self.settle_pending(shared);
        if shared.options.backing == Backing::Device {
            return match self.whole_segment(shared, granules, owner)? {
                Some(found) => Ok(found),
                None => {
                    self.counts.failures += 1;
                    Err(self.out_of_memory(shared, bytes))
                }
            };
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
        // Not for what would be too little even so: a stream that waits for others for nothing is late for nothing.
        let wanted = granules as usize * shared.options.granule_bytes;
        if self.offsets.free() as usize * shared.options.granule_bytes + self.pending_bytes >= wanted {
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
    fn settle_pending(&mut self, shared: &Shared<D>) {
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

    fn release(&mut self, shared: &Shared<D>, pending: Pending<D>) {
        self.give_back(shared, pending.block, pending.owner);
        self.pending_bytes -= pending.bytes;
        self.events.extend(pending.events);
    }

    /// A block is free for its stream, to the pool or to the device.
    fn give_back(&mut self, shared: &Shared<D>, block: BlockId, owner: Owner) {
        if shared.options.backing == Backing::Segments {
            self.offsets.release(block);
            return;
        }
        let Some(segment) = self.offsets.release_with_range(block) else { return };
        let memory = self.segments[usize::from(segment)].take().expect("a block is in a segment");
        self.capacity -= memory.range().len();
        self.vacant.push(segment);
        // A stream that failed has nothing left to do with it, and the memory is dropped.
        let _ = shared.device.free_in_order(memory, &self.streams[usize::from(owner.0)]);
    }

    /// A block that another stream has freed: of one that has nothing to do, else of one that this waits for.
    fn steal(
        &mut self,
        shared: &Shared<D>,
        granules: u32,
        owner: Owner,
    ) -> Result<Option<(BlockId, Place)>, Error> {
        let State { offsets, streams, .. } = self;
        let is_idle = |other: Owner| !matches!(streams[usize::from(other.0)].query(), Ok(Status::Pending));
        let idle = offsets.steal(granules, owner, is_idle);
        let found = match idle {
            Some((block, place, _)) => Some((block, place)),
            None => match self.offsets.steal(granules, owner, |_| true) {
                Some((block, place, from)) => {
                    if let Err(error) = self.wait_for(shared, owner, from) {
                        self.offsets.unsteal(block, from);
                        return Err(error);
                    }
                    Some((block, place))
                }
                None => None,
            },
        };
        self.counts.stolen += u64::from(found.is_some());
        Ok(found)
    }

    /// Has a stream follow, on the device, all that another was given, however that goes.
    fn wait_for(&mut self, shared: &Shared<D>, owner: Owner, other: Owner) -> Result<(), Error> {
        let event = self.event(shared)?;
        self.streams[usize::from(other.0)].record(&event)?;
        self.streams[usize::from(owner.0)].follow(&event)?;
        self.events.push(event);
        Ok(())
    }

    /// Has a stream wait for all others, and for those that use what was freed, which is then free. Nothing is before all of that
    /// is done.
    fn wait_for_all(&mut self, shared: &Shared<D>, owner: Owner) -> Result<(), Error> {
        for other in 0..self.streams.len() as u16 {
            let pending = self
                .pending
                .iter()
                .any(|pending| pending.owner == Owner(other) || pending.unmarked.contains(&Owner(other)));
            if Owner(other) != owner && (pending || self.offsets.free_of(Owner(other)) > 0) {
                self.wait_for(shared, owner, Owner(other))?;
            }
        }
        let stream = &self.streams[usize::from(owner.0)];
        self.pending.iter().flat_map(|pending| &pending.events).try_for_each(|event| stream.follow(event))?;
        std::mem::take(&mut self.pending).into_iter().for_each(|pending| self.release(shared, pending));
        Ok(())
    }

    /// Takes a segment from the device; `false` when there is no more to be had.
    fn grow(&mut self, shared: &Shared<D>, granules: u32, owner: Owner) -> Result<bool, Error> {
        let OrderedOptions { kind, segment_bytes, limit_bytes, granule_bytes, .. } = shared.options;
        let needed = granules as usize * granule_bytes;
        let room = limit_bytes.saturating_sub(self.capacity + self.promised) / granule_bytes * granule_bytes;
        let usual = segment_bytes.checked_next_multiple_of(granule_bytes).unwrap_or(room).min(room);
        for bytes in [usual.max(needed), needed] {
            let Some(len) = u32::try_from(bytes / granule_bytes).ok().filter(|_| bytes <= room) else {
                continue;
            };
            let layout = Layout::from_size_align(bytes, granule_bytes.max(SEGMENT_ALIGN));
            match layout.ok().map(|layout| shared.device.allocate(layout, kind)) {
                Some(Ok(memory)) => return Ok(self.add_segment(memory, len, owner).is_some()),
                Some(Err(error)) if error.kind() != ts_streams::ErrorKind::Full => return Err(error.into()),
                // Less may be had.
                _ => {}
            }
        }
        Ok(false)
    }

    /// Memory of the device's own allocator, for one block; `None` when there is no more to be had.
    fn whole_segment(
        &mut self,
        shared: &Shared<D>,
        granules: u32,
        owner: Owner,
    ) -> Result<Option<(BlockId, Place)>, Error> {
        let OrderedOptions { limit_bytes, granule_bytes, .. } = shared.options;
        let bytes = granules as usize * granule_bytes;
        let Ok(layout) = Layout::from_size_align(bytes, granule_bytes) else { return Ok(None) };
        if bytes > limit_bytes.saturating_sub(self.capacity + self.promised) {
            return Ok(None);
        }
        let memory = match shared.device.allocate_in_order(layout, &self.streams[usize::from(owner.0)]) {
            Ok(memory) => memory,
            Err(error) if error.kind() == ts_streams::ErrorKind::Full => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let added = self.add_segment(memory, granules, owner);
        Ok(added.and_then(|()| self.offsets.allocate(granules, owner)))
    }

    /// More to divide, of `owner`'s; `None` when there is no number for it.
    fn add_segment(&mut self, memory: D::Memory, granules: u32, owner: Owner) -> Option<()> {
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
    fn free(&mut self, shared: &Shared<D>, block: BlockId) {
        let Some(place) = self.offsets.place(block) else { return };
        let bytes = place.len as usize * shared.options.granule_bytes;
        let uses = if self.uses.is_empty() { None } else { self.uses.remove(&block.number()) };
        self.counts.frees += 1;
        self.counts.in_use -= bytes;
        let Some(uses) = uses else {
            self.give_back(shared, block, place.owner);
            return;
        };
        self.pending_bytes += bytes;
        let block = self.offsets.renamed(block);
        let mut pending =
            Pending { block, bytes, owner: place.owner, events: Vec::new(), unmarked: Vec::new() };
        shared.asking(self, |state| state.mark_uses(shared, uses, &mut pending));
        self.pending.push_back(pending);
    }

    /// Has events stand for what streams were given; those that take none now, as none of CUDA does where work of a stream lets
    /// go of memory, are asked again later.
    fn mark_uses(&mut self, shared: &Shared<D>, uses: Vec<Owner>, pending: &mut Pending<D>) {
        for other in uses {
            let stream = self.streams[usize::from(other.0)].clone();
            match self.event(shared).and_then(|event| Ok(stream.record(&event).map(|()| event)?)) {
                Ok(event) => pending.events.push(event),
                Err(_) => pending.unmarked.push(other),
            }
        }
    }

    fn event(&mut self, shared: &Shared<D>) -> Result<D::Event, Error> {
        self.events.pop().map_or_else(|| Ok(shared.device.create_event()?), Ok)
    }

    fn free_bytes(&self, granule: usize) -> Vec<(StreamId, usize)> {
        let of = |(number, stream): (usize, &D::Stream)| {
            (stream.id(), self.offsets.free_of(Owner(number as u16)) as usize * granule)
        };
        self.streams.iter().enumerate().map(of).filter(|(_, bytes)| *bytes > 0).collect()
    }

    fn out_of_memory(&self, shared: &Shared<D>, requested_bytes: usize) -> Error {
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
const SEGMENT_ALIGN: usize = 2 << 20;

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
    /// Submits something to its own stream for its memory, which is there for as long as that takes: even who frees all of the
    /// stream's meanwhile does so behind it.
    pub(crate) fn submit<T>(
        &self,
        work: impl FnOnce(&D::Stream, MemoryRange) -> Result<T, ts_streams::Error>,
    ) -> Result<(D::Stream, T), Error> {
        let mut state = self.shared.lock();
        let (range, owner) = state.find(&self.shared, self)?;
        let stream = state.streams[usize::from(owner.0)].clone();
        let submitted = self.shared.asking(&mut state, |_| work(&stream, range));
        drop(state);
        Ok((stream, submitted?))
    }

    /// As [`submit`](Self::submit), for work that uses another buffer of the same pool too, behind what was submitted for that;
    /// `None` when it is of another pool.
    pub(crate) fn submit_with<T>(
        &self,
        other: &Self,
        work: impl FnOnce(&D::Stream, MemoryRange, MemoryRange) -> Result<T, ts_streams::Error>,
    ) -> Result<Option<(D::Stream, T)>, Error> {
        if !Arc::ptr_eq(&self.shared, &other.shared) {
            return Ok(None);
        }
        let mut state = self.shared.lock();
        let (range, owner) = state.find(&self.shared, self)?;
        let (range_other, owner_other) = state.find(&self.shared, other)?;
        let stream = state.streams[usize::from(owner.0)].clone();
        let submitted = self.shared.asking(&mut state, |state| {
            if owner != owner_other {
                state.wait_for(&self.shared, owner, owner_other)?;
                state.note_use(other.block, owner);
            }
            Ok::<_, Error>(work(&stream, range, range_other)?)
        });
        drop(state);
        Ok(Some((stream, submitted?)))
    }
}

impl<D: Device> Drop for DeviceBuffer<D> {
    fn drop(&mut self) {
        if Inside::has(self.shared.number()) {
            self.shared.returned.lock().unwrap_or_else(PoisonError::into_inner).push(self.block);
        } else {
            self.shared.lock().free(&self.shared, self.block);
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
