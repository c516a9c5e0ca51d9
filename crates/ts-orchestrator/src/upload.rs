// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies units from memory on the host to their device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ts_pool::{Buffer, DeviceBuffer, HostPool, PendingWrite, SharedBuffer};
use ts_streams::{Device, Stream, check_may_block};

use crate::event::{CopyResult, Event, UploadError, UploadResult};
use crate::gpu_reads::RunningReads;
use crate::host_bytes::HostBytes;
use crate::image::ImageLayout;
use crate::kept_image::KeptImage;
use crate::split_decoder::SplitDecoder;
use crate::unit::UnitId;

/// A unit to copy to its device.
#[derive(Debug)]
pub(crate) struct Upload<D: Device> {
    pub(crate) load: u32,
    pub(crate) unit: UnitId,
    pub(crate) host: HostBytes,
    /// The unit as it is on storage, if it is to be kept so.
    pub(crate) image: Option<(Buffer, Arc<ImageLayout>)>,
    pub(crate) slot: DeviceBuffer<D>,
}

/// Two threads that copy units to a device: one submits the copies, and the other waits for them
/// and frees the staging memory. Dropping the uploader finishes submitted copies.
#[derive(Debug)]
pub(crate) struct Uploader<D: Device> {
    stream: D::Stream,
    queue: Option<Sender<Upload<D>>>,
    threads: Vec<JoinHandle<()>>,
}

/// Work that may still be running.
enum Running<D: Device> {
    Copy {
        unit: UnitId,
        copy: PendingWrite<D>,
        /// Whether the device also decodes the unit.
        decodes: bool,
    },
    /// Reads straight to the device. They may fail, so the unit is announced when they have ended.
    Reads { load: u32, slot: DeviceBuffer<D>, reads: RunningReads<D> },
}

impl<D: Device> Uploader<D> {
    /// `decoder` decodes units on the device, if that is possible.
    pub(crate) fn new(
        device: &D,
        staging: &HostPool,
        stream: D::Stream,
        decoder: Option<SplitDecoder<D>>,
        events: &Sender<Event<D>>,
    ) -> Result<Self, ts_streams::Error> {
        let (queue, inbox) = channel::<Upload<D>>();
        let (running, copies) = channel::<Running<D>>();
        let mut this = Self { stream, queue: Some(queue), threads: Vec::new() };
        let submitter = Submitter {
            device: device.clone(),
            staging: staging.clone(),
            stream: this.stream.clone(),
            decoder,
            events: events.clone(),
            is_first: true,
        };
        this.spawn("ts-uploads", move || submitter.run(&inbox, &running))?;
        let (stream, sink) = (this.stream.clone(), events.clone());
        this.spawn("ts-copied", move || finish_all(&stream, &copies, &sink))?;
        Ok(this)
    }

    fn spawn(
        &mut self,
        name: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), ts_streams::Error> {
        let thread = std::thread::Builder::new().name(name.into()).stack_size(512 << 10).spawn(run);
        let thread = thread.map_err(|e| ts_streams::Error::Thread { reason: e.to_string() })?;
        self.threads.push(thread);
        Ok(())
    }

    /// Returns the stream that copies. Slots must be allocated for this stream, so that a copy into
    /// a slot runs after all work that used the slot before.
    pub(crate) fn stream(&self) -> &D::Stream {
        &self.stream
    }

    pub(crate) fn submit(&self, upload: Upload<D>) {
        let queue = self.queue.as_ref().expect("the queue exists until the uploader is dropped");
        queue.send(upload).expect("the thread receives until the queue is dropped");
    }
}

/// Submitted work.
enum Begun<D: Device> {
    Copy(PendingWrite<D>),
    Reads(RunningReads<D>),
}

/// Submits the copies.
struct Submitter<D: Device> {
    device: D,
    staging: HostPool,
    stream: D::Stream,
    decoder: Option<SplitDecoder<D>>,
    events: Sender<Event<D>>,
    /// Whether nothing was copied from the staging memory yet.
    is_first: bool,
}

impl<D: Device> Submitter<D> {
    /// Submits the copy of each upload, and announces the unit.
    fn run(mut self, inbox: &Receiver<Upload<D>>, running: &Sender<Running<D>>) {
        for Upload { load, unit, host, image, mut slot } in inbox {
            let (decodes, mut kept) = (matches!(host, HostBytes::Encoded(..)), None);
            let begun = catch_unwind(AssertUnwindSafe(|| self.begin(host, &mut slot, &mut kept)));
            let begun = begun.unwrap_or_else(|_| Err(panicked(&self.stream).into()));
            if begun.is_err() {
                // Clears the error of the stream, so that later uploads can run. The error is
                // reported for this unit.
                drop(self.stream.take_error());
            }
            let image = image.map(|(bytes, layout)| self.prepare(bytes, layout));
            let (copy, result) = match begun {
                Ok(Begun::Copy(copy)) => {
                    let done = copy.done().clone();
                    (Some(Running::Copy { unit, copy, decodes }), Ok(done))
                }
                Ok(Begun::Reads(reads)) => {
                    let reads = Running::Reads { load, slot, reads };
                    running.send(reads).expect("the thread receives until the sender is dropped");
                    continue;
                }
                Err(error) => (None, Err(error)),
            };
            // The unit is announced before the end of its copy is.
            let uploaded = UploadResult { load, slot, kept, image, decodes, read: None, result };
            let _ = self.events.send(Event::Uploaded(uploaded));
            if let Some(copy) = copy {
                running.send(copy).expect("the thread receives until the sender is dropped");
            }
        }
    }

    /// Submits a copy. Puts the bytes into `kept` if they are to be kept.
    fn begin(
        &mut self,
        host: HostBytes,
        slot: &mut DeviceBuffer<D>,
        kept: &mut Option<SharedBuffer>,
    ) -> Result<Begun<D>, UploadError> {
        let bytes = match host {
            // If memory cannot be locked, the driver copies through its own, which is slower.
            HostBytes::Empty(memory) => {
                if std::mem::take(&mut self.is_first) {
                    let _ = self.staging.register(&self.device);
                }
                memory.freeze()
            }
            HostBytes::EmptyToKeep(mut memory) => {
                let _ = memory.register(&self.device);
                kept.insert(memory.freeze()).clone()
            }
            HostBytes::Kept(bytes) => bytes,
            HostBytes::Encoded(bytes, decodable) => {
                let decoder = self.decoder.as_mut().expect("it has prepared the unit");
                return Ok(Begun::Copy(decoder.begin(&bytes, &decodable, slot)?));
            }
            HostBytes::Stored(reads) => {
                return Ok(Begun::Reads(RunningReads::begin(&reads, slot)?));
            }
        };
        Ok(Begun::Copy(slot.begin_write(0, bytes).map_err(|(error, _)| error)?))
    }

    /// Prepares a unit as it is on storage for later loads.
    fn prepare(&self, mut bytes: Buffer, layout: Arc<ImageLayout>) -> KeptImage {
        let Some(decoder) = &self.decoder else { return KeptImage::new(bytes.freeze(), layout) };
        let prepared = catch_unwind(AssertUnwindSafe(|| decoder.prepare(&bytes, &layout)));
        let decodable = prepared.ok().flatten();
        if decodable.is_some() {
            let _ = bytes.register(&self.device);
        }
        KeptImage { bytes: bytes.freeze(), layout, decodable }
    }
}

/// Waits for each copy, frees its staging memory, and reports how long it took. Waits for reads,
/// and announces their unit.
fn finish_all<D: Device>(
    stream: &D::Stream,
    running: &Receiver<Running<D>>,
    events: &Sender<Event<D>>,
) {
    for running in running {
        let event = match running {
            Running::Copy { unit, copy, decodes } => {
                let ended = catch_unwind(AssertUnwindSafe(|| copy.wait()));
                let (took, staging) = ended.unwrap_or_else(|_| (Err(panicked(stream)), None));
                if took.is_err() {
                    drop(stream.take_error());
                }
                let bytes = staging.as_ref().map_or(0, |staging| staging.len() as u64);
                drop(staging);
                let result = took.map(|took| (bytes, took));
                Event::Copied(CopyResult { unit, decoded: decodes, result })
            }
            Running::Reads { load, slot, reads } => {
                let done = reads.done().clone();
                let ended = catch_unwind(AssertUnwindSafe(|| reads.wait()));
                let ended = ended.unwrap_or_else(|_| Err(panicked(stream).into()));
                if ended.is_err() {
                    drop(stream.take_error());
                }
                let (kept, image, decodes) = (None, None, false);
                let read = ended.as_ref().ok().copied();
                let result = ended.map(|_| done);
                Event::Uploaded(UploadResult { load, slot, kept, image, decodes, read, result })
            }
        };
        let _ = events.send(event);
    }
}

fn panicked(stream: &impl Stream) -> ts_pool::Error {
    let what = "copying the unit panicked (a bug in TensorStream)".into();
    ts_streams::Error::Failed { stream: stream.id(), what }.into()
}

impl<D: Device> Drop for Uploader<D> {
    fn drop(&mut self) {
        self.queue = None;
        // In a host function of a stream, waiting for the threads could deadlock, because a copy
        // may be queued after that function. The threads then end on their own.
        if check_may_block().is_ok() {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}
