// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of a loaded unit, shared by the engine, leases and tensors.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

use parking_lot::Mutex;
use ts_format::Digest;
use ts_pool::{
    DeviceBuffer, SharedBuffer, StreamOrderedAllocator, StreamOrderedPool, WatchedBuffer,
};
use ts_streams::{Device, HostFn, MemoryRange, Stream, StreamId};

use crate::event::Event;
use crate::freed_memory::FreedMemory;

/// The memory of a loaded unit. Dropping the last reference frees its slot.
#[derive(Debug)]
pub(crate) struct UnitMemory<D: Device> {
    watched: Option<Arc<WatchedBuffer>>,
    /// `None` only while this value is dropped.
    bytes: Option<Bytes<D>>,
    /// Receives [`Event::Freed`], when the counter says so.
    freed: Freed<D>,
    /// The checksums of the bytes at the time of [`seal`](Self::seal).
    seal: Mutex<Option<Digest>>,
    /// The id of the process that loaded the unit.
    process: u32,
}

/// Where freed memory is reported, and its counter.
type Freed<D> = (Sender<Event<D>>, Arc<FreedMemory>);

#[derive(Debug)]
enum Bytes<D: Device> {
    Host {
        buffer: SharedBuffer,
        /// The streams whose work may use the buffer.
        streams: Mutex<Vec<(StreamId, D::Stream)>>,
        stream_references: Arc<AtomicUsize>,
    },
    Device {
        buffer: DeviceBuffer<D>,
        /// The event that is reached when the unit was copied to the device.
        copied: Option<D::Event>,
        pool: StreamOrderedPool<D>,
    },
}

impl<D: Device> UnitMemory<D> {
    /// `stream_references` counts the references that streams still have after the memory is
    /// dropped.
    pub(crate) fn host(
        buffer: SharedBuffer,
        watched: Option<Arc<WatchedBuffer>>,
        stream_references: Arc<AtomicUsize>,
        freed: Freed<D>,
    ) -> Self {
        let bytes = Bytes::Host { buffer, streams: Mutex::default(), stream_references };
        Self::new(bytes, watched, freed)
    }

    pub(crate) fn device(
        buffer: DeviceBuffer<D>,
        copied: Option<D::Event>,
        pool: StreamOrderedPool<D>,
        freed: Freed<D>,
    ) -> Self {
        Self::new(Bytes::Device { buffer, copied, pool }, None, freed)
    }

    fn new(bytes: Bytes<D>, watched: Option<Arc<WatchedBuffer>>, freed: Freed<D>) -> Self {
        let (bytes, process) = (Some(bytes), std::process::id());
        Self { watched, bytes, freed, seal: Mutex::new(None), process }
    }

    fn bytes(&self) -> &Bytes<D> {
        self.bytes.as_ref().expect("the bytes exist until this value is dropped")
    }

    /// Returns the bytes if they are in host memory.
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
                buffer.range().expect("`free_for_stream` is never called for the upload stream")
            }
        }
    }

    /// Returns the watch that detects writes to the bytes, if they are watched.
    pub(crate) fn watched(&self) -> Option<&Arc<WatchedBuffer>> {
        self.watched.as_ref()
    }

    /// Records the checksums of the bytes, for [`is_intact`](Self::is_intact).
    pub(crate) fn seal(&self) {
        *self.seal.lock() = self.on_host().map(Digest::of);
    }

    /// Forgets the checksums.
    pub(crate) fn unseal(&self) {
        *self.seal.lock() = None;
    }

    pub(crate) fn is_sealed(&self) -> bool {
        self.seal.lock().is_some()
    }

    /// Returns whether the bytes are unchanged since they were sealed. Returns `true` for bytes
    /// that were not sealed.
    pub(crate) fn is_intact(&self) -> bool {
        let seal = self.seal.lock();
        match (&*seal, self.on_host()) {
            (Some(digest), Some(bytes)) => digest.mismatch(0, bytes).is_none(),
            _ => true,
        }
    }

    /// Returns the bytes if they are in host memory that no stream may use. Otherwise, frees them
    /// as a drop does.
    pub(crate) fn into_host(mut self) -> Option<SharedBuffer> {
        drop(self.watched.take());
        match self.bytes.take()? {
            Bytes::Host { buffer, streams, .. } if streams.lock().is_empty() => Some(buffer),
            other => {
                self.bytes = Some(other);
                None
            }
        }
    }

    /// Makes the stream wait for the copy of the unit to the device, and delays the reuse of the
    /// memory. After this value is dropped, the memory is not reused until the stream has finished
    /// all work that was submitted to it before the drop.
    pub(crate) fn use_on(&self, stream: &D::Stream) -> Result<(), ts_pool::Error> {
        match self.bytes() {
            Bytes::Device { buffer, copied, pool } => {
                pool.record_use(buffer, stream)?;
                copied.as_ref().map_or(Ok(()), |copied| Ok(stream.wait(copied)?))
            }
            Bytes::Host { streams, .. } => {
                let mut streams = streams.lock();
                if streams.iter().all(|(id, _)| *id != stream.id()) {
                    streams.push((stream.id(), stream.clone()));
                }
                Ok(())
            }
        }
    }
}

impl<D: Device> Drop for UnitMemory<D> {
    /// Runs on any thread, including in the deleters of foreign tensors. So it takes no lock of the
    /// engine.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // In a forked child, the memory is not mapped, unless it is kept in forks. Threads that
            // exist only in the parent process may have locked the pool during the fork.
            std::mem::forget((self.bytes.take(), self.watched.take()));
            return;
        }
        drop(self.watched.take());
        let (events, freed) = &self.freed;
        let mut freed_bytes = 0;
        match self.bytes.take() {
            Some(Bytes::Host { buffer, streams, stream_references }) => {
                freed_bytes = buffer.len();
                for (_, stream) in streams.into_inner() {
                    let reference =
                        StreamReference::new(buffer.clone(), events.clone(), &stream_references);
                    // A stream that accepts no work has no work left to wait for.
                    let _ = stream.launch_host_fn(HostFn::new(move || drop(reference)));
                }
            }
            Some(Bytes::Device { buffer, .. }) => freed_bytes = buffer.len(),
            None => {}
        }
        if freed.add(freed_bytes) {
            // Fails only if the engine is gone. Then no unit waits for the memory.
            let _ = events.send(Event::Freed);
        }
    }
}

/// A reference to host memory. A host function on a stream drops it after the stream's earlier
/// work.
struct StreamReference<D: Device> {
    buffer: Option<SharedBuffer>,
    events: Sender<Event<D>>,
    count: Arc<AtomicUsize>,
}

impl<D: Device> StreamReference<D> {
    fn new(buffer: SharedBuffer, events: Sender<Event<D>>, count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self { buffer: Some(buffer), events, count: Arc::clone(count) }
    }
}

impl<D: Device> Drop for StreamReference<D> {
    fn drop(&mut self) {
        drop(self.buffer.take());
        self.count.fetch_sub(1, Ordering::AcqRel);
        let _ = self.events.send(Event::Freed);
    }
}
