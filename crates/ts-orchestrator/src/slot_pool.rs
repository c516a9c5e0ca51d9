// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocates slots for units, and staging memory for units on a device with its own memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

use parking_lot::Mutex;
use ts_pool::{
    BLOCK_ALIGN, Backing, Budget, Buffer, DeviceBuffer, HostPool, OrderedOptions, Reservation,
    SetAside, SharedBuffer, StreamOrderedAllocator, StreamOrderedPool, WriteWatch,
};
use ts_streams::{Device, MemoryKind, PooledStreamStats};

use crate::device_streams::DeviceStreams;
use crate::event::Event;
use crate::freed_memory::FreedMemory;
use crate::host_bytes::HostBytes;
use crate::sharing::Pages;
use crate::split_decoder::{PIECES, SplitDecoder};
use crate::unit_memory::UnitMemory;
use crate::upload::{Upload, Uploader};

/// The memory that an engine uses for units.
#[derive(Debug)]
pub(crate) struct SlotPool<D: Device> {
    /// The slots if units live in host memory, else the staging memory.
    pub(crate) host: HostPool,
    device: Option<DeviceSlots<D>>,
    /// The host memory that was returned to the system.
    aside: Mutex<Vec<SetAside>>,
    /// Detects writes to resident units.
    watch: Option<Arc<WriteWatch>>,
    /// The memory of units that was freed.
    freed: Arc<FreedMemory>,
    /// The number of references that streams have to host slots. A stream drops its references
    /// when it has finished its work.
    stream_references: Arc<AtomicUsize>,
}

/// The slots on a device with its own memory.
#[derive(Debug)]
struct DeviceSlots<D: Device> {
    pool: StreamOrderedPool<D>,
    /// The memory on the host for units that are kept there.
    tier: HostPool,
    uploader: Uploader<D>,
    streams: Arc<DeviceStreams<D>>,
    /// Whether the device decodes units.
    decodes: bool,
    _reservation: Reservation,
}

/// The memory that an engine on a device with its own memory reserves, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceSizes {
    /// For slots.
    pub(crate) bytes: usize,
    /// On the device, for decoding units there; 0 if the host decodes.
    pub(crate) decoder_bytes: usize,
    /// On the host, for what the device needs to decode units.
    pub(crate) steps_bytes: usize,
    /// On the host, for units that are read.
    pub(crate) staging_bytes: usize,
    /// On the host, for units that are kept there.
    pub(crate) tier_bytes: usize,
}

/// Returns the staging memory for a device. It is pinned when it is first used, if the device can
/// pin memory that exists, and else now.
fn staging<D: Device>(device: &D, bytes: usize) -> Result<HostPool, ts_pool::Error> {
    let budget = Budget::new(bytes);
    let later = HostPool::new(&budget, bytes)?;
    // One page, for a moment.
    let can_register = later.allocate(1.min(bytes)).and_then(|mut page| page.register(device));
    if can_register.is_ok() {
        return Ok(later);
    }
    drop(later);
    HostPool::for_device(device, &budget, bytes)
}

/// Returns the size of all these blocks together, in bytes.
fn total(aside: &[SetAside]) -> usize {
    aside.iter().map(SetAside::bytes).sum()
}

/// The slot of a unit, in host memory or on a device.
#[derive(Debug)]
pub(crate) enum Slot<D: Device> {
    Host(Buffer),
    /// A slot on a device, and the event that is reached when its contents are complete.
    Device(DeviceBuffer<D>, Option<D::Event>),
}

impl<D: Device> Slot<D> {
    /// Returns the memory if it is on the host.
    pub(crate) fn into_host(self) -> Option<SharedBuffer> {
        match self {
            Slot::Host(buffer) => Some(buffer.freeze()),
            Slot::Device(..) => None,
        }
    }
}

/// The memory for loading one unit.
#[derive(Debug)]
pub(crate) struct LoadBuffers<D: Device> {
    /// The bytes on the host.
    pub(crate) host: HostBytes,
    /// The slot on the device, if units live there.
    pub(crate) device: Option<DeviceBuffer<D>>,
    /// Where the pages of the slot on the host come from.
    pub(crate) pages: Pages,
}

impl<D: Device> LoadBuffers<D> {
    pub(crate) fn on_host(host: Buffer) -> Self {
        Self { host: HostBytes::Empty(host), device: None, pages: Pages::Own }
    }

    /// Returns the slot, and memory on the host that is to be kept. Frees staging memory.
    pub(crate) fn into_slot(self) -> (Slot<D>, Option<Buffer>) {
        match (self.device, self.host) {
            (Some(slot), HostBytes::EmptyToKeep(host)) => (Slot::Device(slot, None), Some(host)),
            (Some(slot), _) => (Slot::Device(slot, None), None),
            (None, HostBytes::Empty(host) | HostBytes::EmptyToKeep(host)) => {
                (Slot::Host(host), None)
            }
            (None, _) => unreachable!("only units on a device are kept so"),
        }
    }
}

/// The reason why memory for a unit cannot be allocated now.
#[derive(Debug)]
pub(crate) enum AllocationError {
    /// There is no free memory for the slot.
    SlotsFull,
    /// There is no free staging memory.
    StagingFull,
    /// The device failed.
    Device(ts_pool::Error),
}

impl<D: Device> SlotPool<D> {
    /// Reserves `bytes` bytes for slots in host memory. If `watch` is set and the system supports
    /// it, the pool detects writes to resident units.
    pub(crate) fn on_host(
        budget: &Budget,
        bytes: usize,
        watch: bool,
    ) -> Result<Self, ts_pool::Error> {
        let host = HostPool::new(budget, bytes)?;
        let watch = watch.then(|| WriteWatch::try_new(&host)).flatten().map(Arc::new);
        Ok(Self {
            host,
            device: None,
            aside: Mutex::default(),
            watch,
            freed: Arc::default(),
            stream_references: Arc::default(),
        })
    }

    /// Reserves memory for slots and for decoding on a device, and on the host for staging and for
    /// units that are kept there.
    pub(crate) fn on_device(
        device: &D,
        budget: &Budget,
        sizes: DeviceSizes,
        events: &Sender<Event<D>>,
    ) -> Result<Self, ts_pool::Error> {
        let DeviceSizes { bytes, decoder_bytes, staging_bytes, tier_bytes, .. } = sizes;
        let tier = HostPool::new(&Budget::new(tier_bytes), tier_bytes)?;
        let reservation = budget.reserve(bytes + decoder_bytes)?;
        let host = staging(device, staging_bytes)?;
        let options = OrderedOptions::default()
            .with_backing(Backing::Segments)
            .with_kind(MemoryKind::Device)
            .with_segment_bytes(bytes)
            .with_limit_bytes(bytes)
            .with_granule_bytes(BLOCK_ALIGN);
        let pool = StreamOrderedPool::new(device.clone(), options);
        let decodes = decoder_bytes > 0;
        let streams = Arc::new(DeviceStreams::new(device, if decodes { PIECES } else { 0 })?);
        if bytes > 0 {
            pool.reserve_segment(bytes, streams.copies())?;
        }
        let decoder = decodes.then(|| {
            let host = Budget::new(sizes.steps_bytes);
            SplitDecoder::new(device, decoder_bytes, host, Arc::clone(&streams))
        });
        let decoder = decoder.transpose()?;
        let uploader = Uploader::new(device, &host, streams.copies().clone(), decoder, events)?;
        let slots =
            DeviceSlots { pool, tier, uploader, streams, decodes, _reservation: reservation };
        let device = Some(slots);
        Ok(Self {
            host,
            device,
            aside: Mutex::default(),
            watch: None,
            freed: Arc::default(),
            stream_references: Arc::default(),
        })
    }

    /// Joins free memory of a device into as few pieces as possible.
    pub(crate) fn coalesce(&self) {
        if let Some(slots) = &self.device {
            slots.pool.coalesce();
        }
    }

    /// Leaves this many bytes of host memory for slots, and returns the rest to the system. Call
    /// this while no slot is in use. Returns whether the rest was free.
    pub(crate) fn limit(&self, bytes: usize) -> bool {
        let mut aside = self.aside.lock();
        aside.clear();
        self.set_aside_beyond(bytes, &mut aside)
    }

    /// Returns the memory of a buffer to the system, until the next call of [`limit`](Self::limit).
    /// Returns its size in bytes, or the buffer if something else references it.
    pub(crate) fn give_back(&self, buffer: SharedBuffer) -> Result<usize, SharedBuffer> {
        let aside = buffer.set_aside()?;
        let bytes = aside.bytes();
        self.aside.lock().push(aside);
        Ok(bytes)
    }

    /// Takes memory again that was returned to the system, so that slots can take this many bytes.
    /// Returns whether there was any.
    pub(crate) fn take_back(&self, bytes: usize) -> bool {
        let mut aside = self.aside.lock();
        let before = total(&aside);
        aside.clear();
        self.set_aside_beyond(bytes, &mut aside);
        total(&aside) < before
    }

    /// Returns host memory beyond this many bytes to the system. Returns whether it was free.
    fn set_aside_beyond(&self, bytes: usize, aside: &mut Vec<SetAside>) -> bool {
        let rest = self.host.stats().capacity_bytes.saturating_sub(bytes);
        if self.device.is_some() || rest == 0 {
            return true;
        }
        aside.extend(self.host.set_aside(rest).ok());
        !aside.is_empty()
    }

    /// Returns how much host memory slots can take, in bytes. Less than the capacity if some was
    /// returned to the system.
    pub(crate) fn left_bytes(&self) -> usize {
        self.host.stats().capacity_bytes - total(&self.aside.lock())
    }

    /// Allocates a slot of `len` bytes.
    pub(crate) fn allocate(&self, len: usize) -> Result<Slot<D>, AllocationError> {
        let Some(DeviceSlots { pool, uploader, .. }) = &self.device else {
            return self.host.allocate(len).map(Slot::Host).map_err(|_| AllocationError::SlotsFull);
        };
        match pool.allocate_for_stream(len, uploader.stream()) {
            Ok(buffer) => Ok(Slot::Device(buffer, None)),
            Err(error) if error.kind() == ts_pool::ErrorKind::Full => {
                Err(AllocationError::SlotsFull)
            }
            Err(error) => Err(AllocationError::Device(error)),
        }
    }

    /// Allocates the memory to load a unit of `len` bytes, using the slot in `reserved` if there is
    /// one, and the memory in `host` if the unit is kept on the host. If the allocation fails, both
    /// are unchanged.
    pub(crate) fn allocate_for_load(
        &self,
        len: usize,
        reserved: &mut Option<Slot<D>>,
        host: &mut Option<HostBytes>,
    ) -> Result<LoadBuffers<D>, AllocationError> {
        // Allocates staging memory first, because the reserved slot must not be lost if this fails.
        let staging = match self.device {
            Some(_) if host.is_none() => {
                let staging = self.host.allocate(len).map_err(|_| AllocationError::StagingFull)?;
                Some(HostBytes::Empty(staging))
            }
            _ => None,
        };
        let slot = reserved.take().map_or_else(|| self.allocate(len), Ok)?;
        Ok(match (slot, staging.or_else(|| host.take())) {
            (Slot::Host(host), _) => LoadBuffers::on_host(host),
            (Slot::Device(device, _), Some(host)) => {
                LoadBuffers { host, device: Some(device), pages: Pages::Own }
            }
            (Slot::Device(..), None) => unreachable!("a pool in host memory has no device slots"),
        })
    }

    /// Starts to copy a unit to its slot on the device. Causes an [`Event::Uploaded`], and an
    /// [`Event::Copied`] if the copy was submitted.
    pub(crate) fn upload(&self, upload: Upload<D>) {
        let slots = self.device.as_ref().expect("only units on a device are uploaded");
        slots.uploader.submit(upload);
    }

    /// Returns whether the device decodes units that are kept on the host.
    pub(crate) fn decodes_on_device(&self) -> bool {
        self.device.as_ref().is_some_and(|on| on.decodes)
    }

    /// Returns the memory of a unit whose slot was filled. Watches it for writes only if the unit
    /// is `resident`.
    pub(crate) fn loaded(
        &self,
        slot: Slot<D>,
        resident: bool,
        events: Sender<Event<D>>,
    ) -> UnitMemory<D> {
        match (slot, &self.device) {
            (Slot::Host(buffer), _) => {
                let buffer = buffer.freeze();
                // Streamed units are read again soon, so watching them is not worth the cost.
                let watched = self
                    .watch
                    .as_ref()
                    .filter(|_| resident)
                    .and_then(|watch| watch.watch(buffer.clone()).ok().map(Arc::new));
                let references = Arc::clone(&self.stream_references);
                UnitMemory::host(buffer, watched, references, (events, Arc::clone(&self.freed)))
            }
            (Slot::Device(buffer, copied), Some(slots)) => {
                let freed = (events, Arc::clone(&self.freed));
                UnitMemory::device(buffer, copied, slots.pool.clone(), freed)
            }
            (Slot::Device(..), None) => unreachable!("a pool in host memory has no device slots"),
        }
    }

    /// Returns the counter of the memory of units that was freed.
    pub(crate) fn freed(&self) -> &FreedMemory {
        &self.freed
    }

    /// Returns memory on the host that was filled for one use.
    pub(crate) fn gathered(&self, buffer: Buffer, events: Sender<Event<D>>) -> UnitMemory<D> {
        let references = Arc::clone(&self.stream_references);
        UnitMemory::host(buffer.freeze(), None, references, (events, Arc::clone(&self.freed)))
    }

    /// Returns the memory for units that are kept compressed, or on the host.
    pub(crate) fn images(&self) -> &HostPool {
        self.device.as_ref().map_or(&self.host, |on| &on.tier)
    }

    /// Returns the size of the memory for units that are kept on the host, in bytes, if units are
    /// on a device with its own memory.
    pub(crate) fn host_tier_bytes(&self) -> Option<usize> {
        self.device.as_ref().map(|on| on.tier.stats().capacity_bytes)
    }

    /// Returns what runs on the engine's streams of a device with its own memory.
    pub(crate) fn stream_stats(&self) -> Vec<PooledStreamStats> {
        self.device.as_ref().map(|on| on.streams.stats()).unwrap_or_default()
    }

    /// Returns a stream of a device with its own memory for work of the caller.
    pub(crate) fn compute_stream(&self) -> Option<&D::Stream> {
        self.device.as_ref().map(|on| on.streams.compute())
    }

    /// Returns whether units are read into staging memory first.
    pub(crate) fn is_staged(&self) -> bool {
        self.device.is_some()
    }

    /// Returns whether writes to resident units are detected.
    pub(crate) fn watches_writes(&self) -> bool {
        self.watch.is_some()
    }

    /// Returns whether streams still reference host slots that the engine has freed.
    pub(crate) fn waits_for_streams(&self) -> bool {
        self.stream_references.load(Ordering::Acquire) > 0
    }

    /// Returns the size of all slots together, in bytes.
    pub(crate) fn capacity_bytes(&self) -> usize {
        self.device
            .as_ref()
            .map_or_else(|| self.host.stats().capacity_bytes, |on| on.pool.stats().capacity_bytes)
    }

    /// Returns how many bytes of slots are in use now, and the maximum so far.
    pub(crate) fn in_use_bytes(&self) -> (usize, usize) {
        match &self.device {
            Some(on) => {
                let stats = on.pool.stats();
                (stats.in_use_bytes, stats.high_water_bytes)
            }
            None => {
                // Locked first, so that no other thread changes it before the pool is looked at.
                let aside = self.aside.lock();
                let stats = self.host.stats();
                (stats.in_use_bytes - total(&aside), stats.high_water_bytes)
            }
        }
    }

    /// Returns the size of the largest piece of free memory for slots, in bytes.
    pub(crate) fn largest_free_bytes(&self) -> usize {
        self.device.as_ref().map_or_else(
            || self.host.stats().largest_free_bytes,
            |on| on.pool.stats().largest_free_bytes,
        )
    }

    /// Returns the size of the staging memory, in bytes.
    pub(crate) fn staging_bytes(&self) -> usize {
        self.device.as_ref().map_or(0, |_| self.host.stats().capacity_bytes)
    }
}
