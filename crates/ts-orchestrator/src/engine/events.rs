// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loader thread: handles what reads, workers and devices report.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, RecvTimeoutError};

use ts_streams::Device;

use crate::event::Event;
use crate::state::EngineState;
use crate::trace::TraceKind;
use crate::unit_load::split_token;

use super::{INTERRUPT_PERIOD, Shared};

/// The most events that the loader thread handles before it lets other threads take the lock.
const EVENTS_AT_ONCE: usize = 64;

impl<D: Device> Shared<D> {
    /// Handles events until [`Event::Stop`]. Runs on the loader thread.
    ///
    /// Not all changes are events. Blocking calls look at the state every [`INTERRUPT_PERIOD`], and
    /// so do futures.
    pub(crate) fn run(&self, inbox: &Receiver<Event<D>>) {
        let mut futures_wait = false;
        loop {
            let received = match futures_wait {
                true => inbox.recv_timeout(INTERRUPT_PERIOD),
                false => inbox.recv().map_err(RecvTimeoutError::from),
            };
            let event = match received {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => {
                    futures_wait = false;
                    self.notify(self.lock());
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let mut state = self.lock();
            let mut changed = false;
            // Handles what has arrived meanwhile too, so that few threads wait for the lock.
            let more = std::iter::from_fn(|| inbox.try_recv().ok()).take(EVENTS_AT_ONCE - 1);
            for event in std::iter::once(event).chain(more) {
                changed |= !matches!(event, Event::Polled);
                let now_ns = (self.clock)();
                if self.handle(&mut state, event, now_ns).is_break() {
                    return;
                }
            }
            futures_wait = !changed;
            if !changed {
                continue;
            }
            let now_ns = (self.clock)();
            state.advance(&self.context, now_ns);
            self.trace_memory(&mut state, now_ns);
            self.notify(state);
        }
    }

    /// Handles an event, unless it is [`Event::Stop`].
    fn handle(&self, state: &mut EngineState<D>, event: Event<D>, now_ns: u64) -> ControlFlow<()> {
        match event {
            Event::Read(completion) => state.on_read(&self.context, completion, now_ns),
            Event::PartFilled { token, target, kept, damage, decoded, work } => {
                let kind = decoded.map_or(TraceKind::Copy, |_| TraceKind::Decode);
                let bytes = decoded.unwrap_or(target.len()) as u64;
                state.on_worked(kind, split_token(token).0, bytes, work, now_ns);
                state.on_part_filled(&self.context, token, (target, kept), damage, now_ns);
            }
            Event::Checked { load, slot, mismatch, work } => {
                state.on_worked(TraceKind::Check, load, slot.len() as u64, work, now_ns);
                state.on_checked(&self.context, load, slot, mismatch, now_ns);
            }
            Event::Estimated { load, slot, needed, raw, work } => {
                state.on_worked(TraceKind::Encode, load, raw, work, now_ns);
                state.on_estimated(&self.context, load, slot, needed, now_ns);
            }
            Event::Encoded { load, raw, work } => {
                state.on_worked(TraceKind::Encode, load, raw, work, now_ns);
                state.on_encoded(&self.context, load, now_ns);
            }
            Event::JobPanicked(job) => state.on_job_panicked(&self.context, job, now_ns),
            Event::Uploaded(upload) => state.on_uploaded(&self.context, upload, now_ns),
            Event::Copied(copy) => state.on_copied(&self.context, copy),
            Event::Released { unit, user, used_ns } => {
                state.release(unit, user, used_ns, now_ns);
            }
            Event::Freed => {}
            Event::Polled => {}
            Event::Stop => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    /// Drops the backend, and then stops the loader thread.
    pub(crate) fn stop_reading(&self) {
        // The loader receives the buffers that the backend returns while it is dropped, because
        // [`Event::Stop`] is sent after these buffers.
        let backend = self.lock().transfers.backend.take();
        drop(backend);
        let _ = self.context.events.send(Event::Stop);
    }

    /// Waits for the jobs of the workers, and then makes the pool unmap its memory as soon as the
    /// memory is unused. Call this after the loader thread has ended.
    pub(crate) fn stop_working(&self) {
        // When the jobs are dropped, their buffers return to the pool.
        let workers = self.lock().transfers.workers.take();
        drop(workers);
        // Only leases and tensors still use memory now, and free it when they are dropped. The
        // memory of a device is freed with the last of them.
        self.context.slots.host.retire();
    }
}
