// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies units from memory on the host to their device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ts_pool::{DeviceBuffer, HostPool, PendingWrite};
use ts_streams::{Device, Stream, check_may_block};

use crate::event::{CopyResult, Event, UploadResult};
use crate::host_bytes::HostBytes;
use crate::unit::UnitId;

/// A unit to copy to its device.
#[derive(Debug)]
pub(crate) struct Upload<D: Device> {
    pub(crate) load: u32,
    pub(crate) unit: UnitId,
    pub(crate) host: HostBytes,
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

impl<D: Device> Uploader<D> {
    pub(crate) fn new(
        device: &D,
        staging: &HostPool,
        stream: D::Stream,
        events: &Sender<Event<D>>,
    ) -> Result<Self, ts_streams::Error> {
        let (queue, inbox) = channel::<Upload<D>>();
        let (running, copies) = channel::<(UnitId, PendingWrite<D>)>();
        let mut this = Self { stream, queue: Some(queue), threads: Vec::new() };
        let (stream, sink) = (this.stream.clone(), events.clone());
        let from = (device.clone(), staging.clone());
        this.spawn("ts-uploads", move || submit_all(&from, &stream, &inbox, &running, &sink))?;
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

/// Submits the copy of each upload, and announces the unit.
fn submit_all<D: Device>(
    (device, staging): &(D, HostPool),
    stream: &D::Stream,
    inbox: &Receiver<Upload<D>>,
    running: &Sender<(UnitId, PendingWrite<D>)>,
    events: &Sender<Event<D>>,
) {
    let mut is_first = true;
    for Upload { load, unit, host, mut slot } in inbox {
        let (bytes, kept) = match host {
            // If memory cannot be locked, the driver copies through its own, which is slower.
            HostBytes::Empty(memory) => {
                if std::mem::take(&mut is_first) {
                    let _ = staging.register(device);
                }
                (memory.freeze(), None)
            }
            HostBytes::EmptyToKeep(mut memory) => {
                let _ = memory.register(device);
                let bytes = memory.freeze();
                (bytes.clone(), Some(bytes))
            }
            HostBytes::Kept(bytes) => (bytes, None),
        };
        let begun = catch_unwind(AssertUnwindSafe(|| slot.begin_write(0, bytes)));
        let begun = match begun {
            Ok(begun) => begun.map_err(|(error, _)| error),
            Err(_) => Err(panicked(stream)),
        };
        if begun.is_err() {
            // Clears the error of the stream, so that later uploads can run. The error is reported
            // for this unit.
            drop(stream.take_error());
        }
        let (copy, result) = match begun {
            Ok(copy) => {
                let done = copy.done().clone();
                (Some(copy), Ok(done))
            }
            Err(error) => (None, Err(error)),
        };
        // The unit is announced before the end of its copy is.
        let _ = events.send(Event::Uploaded(UploadResult { load, slot, kept, result }));
        if let Some(copy) = copy {
            running.send((unit, copy)).expect("the thread receives until the sender is dropped");
        }
    }
}

/// Waits for each copy, frees its staging memory, and reports how long it took.
fn finish_all<D: Device>(
    stream: &D::Stream,
    copies: &Receiver<(UnitId, PendingWrite<D>)>,
    events: &Sender<Event<D>>,
) {
    for (unit, copy) in copies {
        let ended = catch_unwind(AssertUnwindSafe(|| copy.wait()));
        let (took, staging) = ended.unwrap_or_else(|_| (Err(panicked(stream)), None));
        if took.is_err() {
            drop(stream.take_error());
        }
        let bytes = staging.as_ref().map_or(0, |staging| staging.len() as u64);
        drop(staging);
        let result = took.map(|took| (bytes, took));
        let _ = events.send(Event::Copied(CopyResult { unit, result }));
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
