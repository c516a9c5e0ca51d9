// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where units are in memory, and how they get there.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use ts_format::Digest;
use ts_pool::{
    BLOCK_ALIGN, Backing, Budget, Buffer, DeviceBuffer, HostPool, OrderedOptions, Reservation,
    SharedBuffer, StreamOrderedAllocator, StreamOrderedPool, Watched, WriteWatch,
};
use ts_streams::{
    Device, HostFn, MemoryKind, MemoryRange, Stream, StreamId, StreamPriority, may_wait,
};

use crate::Error;
use crate::load::Event;

/// The memory for all units.
#[derive(Debug)]
pub(crate) struct Slots<D: Device> {
    /// What units are read to: where they stay, or by way of which they go to the device.
    pub(crate) host: HostPool,
    device: Option<OnDevice<D>>,
    /// Finds writes to units that stay.
    watch: Option<Arc<WriteWatch>>,
    /// Slots of the host's that the engine has let go of and streams have not.
    held_by_streams: Arc<AtomicUsize>,
}

/// Memory of a device that reads do not reach.
#[derive(Debug)]
struct OnDevice<D: Device> {
    pool: StreamOrderedPool<D>,
    uploads: Uploads<D>,
    _reservation: Reservation,
}

/// Memory for a unit that is to be read.
#[derive(Debug)]
pub(crate) struct Room<D: Device> {
    pub(crate) slot: Buffer,
    /// Where the unit is to stay, if that is not where it is read to.
    pub(crate) stays: Option<DeviceBuffer<D>>,
}

/// Memory in which a unit stays.
#[derive(Debug)]
pub(crate) enum Home<D: Device> {
    Host(Buffer),
    Device(DeviceBuffer<D>),
}

/// Why there is no room for a unit.
#[derive(Debug)]
pub(crate) enum NoRoom {
    /// Others are in its place.
    Slots,
    /// Others are on their way by what it must go by as well.
    Staging,
    /// The device does not say whether there is.
    Device(ts_pool::Error),
}

impl<D: Device> Slots<D> {
    /// Memory of the host, which may be watched for writes.
    pub(crate) fn on_host(
        budget: &Budget,
        bytes: usize,
        watch: bool,
    ) -> Result<Self, ts_pool::Error> {
        let host = HostPool::new(budget, bytes)?;
        let watch = watch.then(|| WriteWatch::new(&host)).flatten().map(Arc::new);
        Ok(Self { host, device: None, watch, held_by_streams: Arc::default() })
    }

    /// Memory of a device, all of it taken at once, and `staging_bytes` of the host's to get there.
    pub(crate) fn on_device(
        device: &D,
        budget: &Budget,
        bytes: usize,
        staging_bytes: usize,
        events: &Sender<Event<D>>,
    ) -> Result<Self, ts_pool::Error> {
        let reservation = budget.reserve(bytes)?;
        let host = HostPool::for_device(device, &Budget::new(staging_bytes), staging_bytes)?;
        let options = OrderedOptions {
            backing: Backing::Segments,
            kind: MemoryKind::Device,
            segment_bytes: bytes,
            limit_bytes: bytes,
            granule_bytes: BLOCK_ALIGN,
        };
        let (pool, stream) = (
            StreamOrderedPool::new(device.clone(), options),
            device.create_stream(StreamPriority::Normal)?,
        );
        pool.prime(bytes, &stream)?;
        let uploads = Uploads::new(stream, events)?;
        let device = Some(OnDevice { pool, uploads, _reservation: reservation });
        Ok(Self { host, device, watch: None, held_by_streams: Arc::default() })
    }

    /// Has what is free be in as few pieces as it can.
    pub(crate) fn coalesce(&self) {
        if let Some(on) = &self.device {
            on.pool.coalesce();
        }
    }

    /// Memory for a unit to stay in, to be kept for it.
    pub(crate) fn home(&self, len: usize) -> Result<Home<D>, NoRoom> {
        let Some(OnDevice { pool, uploads, .. }) = &self.device else {
            return self.host.allocate(len).map(Home::Host).map_err(|_| NoRoom::Slots);
        };
        match pool.allocate_for_stream(len, &uploads.stream) {
            Ok(buffer) => Ok(Home::Device(buffer)),
            Err(error) if error.kind() == ts_pool::ErrorKind::Full => Err(NoRoom::Slots),
            Err(error) => Err(NoRoom::Device(error)),
        }
    }

    /// Memory to read a unit to, and what it needs beside that to stay; `kept` is what was set
    /// aside for it, and is still there when there is no room.
    pub(crate) fn room(&self, len: usize, kept: &mut Option<Home<D>>) -> Result<Room<D>, NoRoom> {
        // What is scarcer comes last.
        let staging = match self.device {
            Some(_) => Some(self.host.allocate(len).map_err(|_| NoRoom::Staging)?),
            None => None,
        };
        let home = kept.take().map_or_else(|| self.home(len), Ok)?;
        Ok(match (home, staging) {
            (Home::Host(slot), _) => Room { slot, stays: None },
            (Home::Device(stays), Some(slot)) => Room { slot, stays: Some(stays) },
            (Home::Device(_), None) => unreachable!("what is set aside is of these slots"),
        })
    }

    /// Has a unit that was read brought to its device: [`Event::Uploaded`].
    pub(crate) fn upload(&self, load: u32, staging: Buffer, home: DeviceBuffer<D>) {
        let uploads = &self.device.as_ref().expect("what stays on a device is there").uploads;
        uploads.submit(Upload { load, staging, home });
    }

    /// A unit that is where it stays; `keep`: for longer than a visit.
    pub(crate) fn slot(&self, home: Home<D>, keep: bool, wake: Sender<Event<D>>) -> Slot<D> {
        let mut watched = None;
        let bytes = match (home, &self.device) {
            (Home::Host(buffer), _) => {
                let buffer = buffer.freeze();
                // What is read again soon is not worth the marks.
                if let Some(watch) = self.watch.as_ref().filter(|_| keep) {
                    watched = watch.watch(buffer.clone()).ok().map(Arc::new);
                }
                let held_by_streams = Arc::clone(&self.held_by_streams);
                Bytes::Host { buffer, users: Mutex::default(), held_by_streams }
            }
            (Home::Device(buffer), Some(on)) => Bytes::Device { buffer, pool: on.pool.clone() },
            (Home::Device(_), None) => unreachable!("it is of these slots"),
        };
        Slot {
            watched,
            bytes: Some(bytes),
            wake,
            seal: Mutex::new(None),
            process: std::process::id(),
        }
    }

    /// Whether writes to units that stay are found.
    pub(crate) fn are_watched(&self) -> bool {
        self.watch.is_some()
    }

    /// Whether memory comes back when streams are done.
    pub(crate) fn waits_for_streams(&self) -> bool {
        self.held_by_streams.load(Ordering::Acquire) > 0
    }

    /// Bytes that units can ever occupy.
    pub(crate) fn capacity_bytes(&self) -> usize {
        self.device
            .as_ref()
            .map_or_else(|| self.host.stats().capacity_bytes, |on| on.pool.stats().capacity_bytes)
    }

    /// Bytes that units occupy, and the most that they ever did.
    pub(crate) fn in_use_bytes(&self) -> (usize, usize) {
        match &self.device {
            Some(on) => {
                let stats = on.pool.stats();
                (stats.in_use_bytes, stats.high_water_bytes)
            }
            None => {
                let stats = self.host.stats();
                (stats.in_use_bytes, stats.high_water_bytes)
            }
        }
    }

    /// Bytes of the host by way of which units go to a device.
    pub(crate) fn staging_bytes(&self) -> usize {
        self.device.as_ref().map_or(0, |_| self.host.stats().capacity_bytes)
    }
}

/// A unit on its way from the host to its device.
#[derive(Debug)]
struct Upload<D: Device> {
    load: u32,
    staging: Buffer,
    home: DeviceBuffer<D>,
}

/// A unit that came to its device, or did not.
#[derive(Debug)]
pub(crate) struct Uploaded<D: Device> {
    pub(crate) load: u32,
    pub(crate) home: DeviceBuffer<D>,
    pub(crate) result: Result<(), ts_pool::Error>,
}

/// Brings units to a device, one after the other. Dropping it finishes what was given to it.
#[derive(Debug)]
struct Uploads<D: Device> {
    /// The stream that all slots are allocated for: what is copied to a slot comes after all that
    /// its last unit was used for.
    stream: D::Stream,
    queue: Option<Sender<Upload<D>>>,
    thread: Option<JoinHandle<()>>,
}

impl<D: Device> Uploads<D> {
    fn new(stream: D::Stream, events: &Sender<Event<D>>) -> Result<Self, ts_streams::Error> {
        let (queue, inbox) = channel::<Upload<D>>();
        let (transfers, events) = (stream.clone(), events.clone());
        let run = move || {
            for Upload { load, staging, mut home } in inbox {
                let copy = catch_unwind(AssertUnwindSafe(|| home.write(0, &staging)));
                let result = copy.unwrap_or_else(|_| {
                    let (stream, what) =
                        (transfers.id(), "its upload panicked: this is a bug".into());
                    Err(ts_streams::Error::Failed { stream, what }.into())
                });
                if result.is_err() {
                    // Told to who waits for this unit; the next one is another matter.
                    drop(transfers.take_error());
                }
                drop(staging);
                let _ = events.send(Event::Uploaded(Uploaded { load, home, result }));
            }
        };
        let thread =
            std::thread::Builder::new().name("ts-uploads".into()).stack_size(512 << 10).spawn(run);
        let thread = thread.map_err(|e| ts_streams::Error::Thread { reason: e.to_string() })?;
        Ok(Self { stream, queue: Some(queue), thread: Some(thread) })
    }

    fn submit(&self, upload: Upload<D>) {
        let queue = self.queue.as_ref().expect("present until drop");
        queue.send(upload).expect("it runs until this is dropped");
    }
}

impl<D: Device> Drop for Uploads<D> {
    fn drop(&mut self) {
        self.queue = None;
        // Work of a stream, which an upload may come behind, lets it end by itself.
        if let Some(thread) = self.thread.take().filter(|_| may_wait().is_ok()) {
            let _ = thread.join();
        }
    }
}

/// A unit's bytes in memory. Whoever holds a clone of its `Arc` keeps them there.
#[derive(Debug)]
pub(crate) struct Slot<D: Device> {
    watched: Option<Arc<Watched>>,
    /// `None` only while dropping.
    bytes: Option<Bytes<D>>,
    /// Told when the memory is free again.
    wake: Sender<Event<D>>,
    /// The checksums of the bytes, of a slot whose tensors outlived their leases: whoever has them
    /// could write to them.
    seal: Mutex<Option<Digest>>,
    process: u32,
}

#[derive(Debug)]
enum Bytes<D: Device> {
    Host {
        buffer: SharedBuffer,
        /// Streams whose work uses it, until it is done.
        users: Mutex<Vec<(StreamId, D::Stream)>>,
        held_by_streams: Arc<AtomicUsize>,
    },
    Device {
        buffer: DeviceBuffer<D>,
        pool: StreamOrderedPool<D>,
    },
}

impl<D: Device> Slot<D> {
    fn bytes(&self) -> &Bytes<D> {
        self.bytes.as_ref().expect("present until drop")
    }

    /// What the host may read, if it may.
    pub(crate) fn on_host(&self) -> Option<&[u8]> {
        match self.bytes() {
            Bytes::Host { buffer, .. } => Some(buffer),
            Bytes::Device { .. } => None,
        }
    }

    pub(crate) fn range(&self) -> MemoryRange {
        match self.bytes() {
            Bytes::Host { buffer, .. } => {
                MemoryRange::new(buffer.as_ptr().cast_mut(), buffer.len())
            }
            Bytes::Device { buffer, .. } => {
                buffer.range().expect("nobody frees all that the stream of uploads has")
            }
        }
    }

    /// What finds writes to the bytes, where they are watched.
    pub(crate) fn watched(&self) -> Option<&Arc<Watched>> {
        self.watched.as_ref()
    }

    /// Notes what the bytes are now, to find out later whether somebody wrote to them.
    pub(crate) fn seal(&self) {
        *self.seal.lock() = self.on_host().map(Digest::of);
    }

    /// Whether the bytes are what they were when they were sealed, if they were.
    pub(crate) fn is_intact(&self) -> bool {
        let seal = self.seal.lock();
        match (&*seal, self.on_host()) {
            (Some(digest), Some(bytes)) => digest.mismatch(0, bytes).is_none(),
            _ => true,
        }
    }

    /// Has the memory, once this is dropped, not be another's before a stream is done with it.
    pub(crate) fn use_on(&self, stream: &D::Stream) -> Result<(), ts_pool::Error> {
        match self.bytes() {
            Bytes::Device { buffer, pool } => pool.record_use(buffer, stream),
            Bytes::Host { users, .. } => {
                let mut users = users.lock();
                if users.iter().all(|(id, _)| *id != stream.id()) {
                    users.push((stream.id(), stream.clone()));
                }
                Ok(())
            }
        }
    }
}

impl<D: Device> Drop for Slot<D> {
    /// Runs on any thread, the deleters of foreign tensors included: it takes no lock of the
    /// engine's.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // In a child: the memory is not there, and the pool's locks may be held by threads that
            // are not.
            std::mem::forget((self.bytes.take(), self.watched.take()));
            return;
        }
        drop(self.watched.take());
        if let Some(Bytes::Host { buffer, users, held_by_streams }) = self.bytes.take() {
            for (_, stream) in users.into_inner() {
                let held = HeldByStream::new(buffer.clone(), self.wake.clone(), &held_by_streams);
                // One that takes no work has none left.
                let _ = stream.launch_host_fn(HostFn::new(move || drop(held)));
            }
        }
        // An engine that is gone has no use for the memory, and nobody to tell.
        let _ = self.wake.send(Event::Freed);
    }
}

/// A share in a slot of the host's that a stream has until it is done.
struct HeldByStream<D: Device> {
    buffer: Option<SharedBuffer>,
    wake: Sender<Event<D>>,
    count: Arc<AtomicUsize>,
}

impl<D: Device> HeldByStream<D> {
    fn new(buffer: SharedBuffer, wake: Sender<Event<D>>, count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self { buffer: Some(buffer), wake, count: Arc::clone(count) }
    }
}

impl<D: Device> Drop for HeldByStream<D> {
    fn drop(&mut self) {
        drop(self.buffer.take());
        self.count.fetch_sub(1, Ordering::AcqRel);
        let _ = self.wake.send(Event::Freed);
    }
}

/// What a device says of a unit.
pub(crate) fn device_error(unit: &str, source: ts_pool::Error) -> Error {
    Error::Device { unit: unit.into(), source: Arc::new(source) }
}
