// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies units from staging memory on the host to their device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use ts_pool::{Buffer, DeviceBuffer};
use ts_streams::{Device, Stream, check_may_block};

use crate::event::{Event, UploadResult};

/// A unit to copy to its device.
#[derive(Debug)]
pub(crate) struct Upload<D: Device> {
    pub(crate) load: u32,
    pub(crate) staging: Buffer,
    pub(crate) slot: DeviceBuffer<D>,
}

/// A thread that copies units to a device, one at a time. Dropping the uploader finishes submitted
/// copies.
#[derive(Debug)]
pub(crate) struct Uploader<D: Device> {
    stream: D::Stream,
    queue: Option<Sender<Upload<D>>>,
    thread: Option<JoinHandle<()>>,
}

impl<D: Device> Uploader<D> {
    pub(crate) fn new(
        stream: D::Stream,
        events: &Sender<Event<D>>,
    ) -> Result<Self, ts_streams::Error> {
        let (queue, inbox) = channel::<Upload<D>>();
        let (copies, events) = (stream.clone(), events.clone());
        let run = move || {
            for Upload { load, staging, mut slot } in inbox {
                let began = Instant::now();
                let copy = catch_unwind(AssertUnwindSafe(|| slot.write(0, &staging)));
                let result = copy.unwrap_or_else(|_| {
                    let (stream, what) =
                        (copies.id(), "copying the unit panicked (a bug in TensorStream)".into());
                    Err(ts_streams::Error::Failed { stream, what }.into())
                });
                if result.is_err() {
                    // Clears the error of the stream, so that later uploads can run. The error is
                    // reported for this unit.
                    drop(copies.take_error());
                }
                let copied_bytes = if result.is_ok() { staging.len() as u64 } else { 0 };
                let copy_ns = began.elapsed().as_nanos() as u64;
                let copy_ns = if result.is_ok() { copy_ns } else { 0 };
                drop(staging);
                let upload = UploadResult { load, slot, copied_bytes, copy_ns, result };
                let _ = events.send(Event::Uploaded(upload));
            }
        };
        let thread =
            std::thread::Builder::new().name("ts-uploads".into()).stack_size(512 << 10).spawn(run);
        let thread = thread.map_err(|e| ts_streams::Error::Thread { reason: e.to_string() })?;
        Ok(Self { stream, queue: Some(queue), thread: Some(thread) })
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

impl<D: Device> Drop for Uploader<D> {
    fn drop(&mut self) {
        self.queue = None;
        // In a host function of a stream, waiting for the thread could deadlock, because the copy
        // of the thread may be queued after that function. The thread then ends on its own.
        if let Some(thread) = self.thread.take().filter(|_| check_may_block().is_ok()) {
            let _ = thread.join();
        }
    }
}
