// SPDX-License-Identifier: MIT OR Apache-2.0
//! Submits reads, and handles their ends.

use std::sync::Arc;

use ts_io::{Completion, ReadRequest, Source};
use ts_pool::Buffer;
use ts_streams::Device;

use crate::config::Verify;
use crate::context::EngineContext;
use crate::event::Event;
use crate::joint::{JointRead, PartRead};
use crate::layout::ReadKind;
use crate::unit_load::{QueuedDecode, QueuedRead, split_token};
use crate::worker::{Job, Stored};

use super::EngineState;
use super::reads::{NextRead, Target};

/// Reads of neighbours are joined at least up to this length, in bytes.
const LEAST_JOINT_BYTES: usize = 256 << 10;

impl<D: Device> EngineState<D> {
    /// Submits queued decodes to the workers, as many as keep them busy. `verifies` says whether
    /// units are verified at all.
    fn submit_decodes(&mut self, verifies: bool) {
        let Some(workers) = &self.transfers.workers else { return };
        while let Some((decode, is_urgent)) = self.transfers.fills.pop(2 * workers.threads) {
            let QueuedDecode { token, image, stored, kind, target } = decode;
            // Whoever read the image has verified it, except if that was another process.
            let verify = verifies && self.transfers.loads.get(split_token(token).0).unchecked;
            let (from, verify, kept) = (Stored::Image(image), verify, None);
            let job = Job::FillPart { token, from, stored, kind, verify, target, kept };
            self.transfers.fills.begin();
            workers.submit(job, is_urgent);
        }
    }

    /// Submits the checks of units to the workers, those of small units together.
    fn submit_checks(&mut self) {
        if let Some(workers) = &self.transfers.workers {
            self.transfers
                .fills
                .take_checks()
                .into_iter()
                .for_each(|job| workers.submit_checks(job));
        }
    }

    /// Submits queued reads to the backend, and queued decodes to the workers, as many as keep them
    /// busy.
    pub(super) fn submit_reads(&mut self, context: &EngineContext<D>, now_ns: u64) {
        self.submit_decodes(context.verify != Verify::Never);
        self.submit_checks();
        let nothing = self.transfers.reads.is_empty() && self.routed.guesses.reads.is_empty();
        let Some(backend) = self.transfers.backend.as_ref().filter(|_| !nothing) else { return };
        // Twice the maximum number of reads in flight, so that the backend has work until this
        // thread is scheduled again.
        let limit = 2 * backend.capabilities().max_in_flight;
        let mut rejected = Vec::new();
        while self.transfers.reads.in_flight() < limit {
            let needed = self.transfers.reads.pop();
            let guessed = needed.is_none();
            let next = needed.or_else(|| {
                let read = self.routed.guesses.next_read(self.transfers.reads.in_flight())?;
                Some(NextRead { read, is_urgent: false })
            });
            let Some(next) = next else { break };
            let source = Arc::clone(&context.sources[next.read.file.0 as usize]);
            let request = if next.read.kind != ReadKind::InPlace {
                let bounces = context.bounces.as_ref();
                match bounces.map(|pool| pool.allocate(context.sizes.bounce_bytes)) {
                    Some(Ok(bounce)) => self.bounced_request(context, source, next.read, bounce),
                    _ if self.transfers.reads.in_flight() > 0
                        || self.transfers.fills.is_running() =>
                    {
                        match guessed {
                            true => self.routed.guesses.reads.push_front(next.read),
                            false => self.transfers.reads.push_first(vec![next.read]),
                        }
                        break;
                    }
                    // No bounce buffer is free, because the system may still write to all of them
                    // after reads that timed out.
                    _ => {
                        let (path, offset) = (source.path().into(), next.read.offset);
                        let (len, timeout) = (next.read.required, context.timeout);
                        let result = Err(ts_io::Error::TimedOut { path, offset, len, timeout });
                        let QueuedRead { token, target: buffer, kept, kind, .. } = next.read;
                        self.transfers
                            .reads
                            .bounces_to(token, Target { buffer, kept, stored: 0..0, kind });
                        self.transfers.reads.begin(now_ns);
                        rejected.push(Completion { token, buffers: Vec::new(), result });
                        continue;
                    }
                }
            } else if guessed {
                let QueuedRead { token, offset, required, target, .. } = next.read;
                ReadRequest::new(token, source, offset, required, target)
            } else {
                self.transfers.reads.join(source, next, self.joint_bytes(), context.sizes.alignment)
            };
            self.transfers.reads.begin(now_ns);
            if let Some(trace) = &mut self.trace {
                match self.transfers.reads.joint(request.token) {
                    Some(joint) => {
                        joint.parts().1.for_each(|(part, ..)| trace.submitted(part, now_ns));
                    }
                    None => trace.submitted(request.token, now_ns),
                }
            }
            let Some(backend) = &self.transfers.backend else { return };
            if let Err(r) = backend.submit(request) {
                let ReadRequest { token, buffers, .. } = r.request;
                rejected.push(Completion { token, buffers, result: Err(r.error) });
            }
        }
        for completion in rejected {
            // The loader thread handles the rejected reads later, because the state must not change
            // in the middle of a transition.
            let _ = context.events.send(Event::Read(completion));
        }
    }

    /// Returns the request for a read into a bounce buffer.
    fn bounced_request(
        &mut self,
        context: &EngineContext<D>,
        source: Arc<Source>,
        read: QueuedRead,
        mut bounce: Buffer,
    ) -> ReadRequest {
        let alignment = context.sizes.alignment;
        let skip = (read.offset % alignment as u64) as usize;
        let (offset, required) = (read.offset - skip as u64, skip + read.required);
        // A backend fills the memory that it is given.
        drop(bounce.split_off(required.next_multiple_of(alignment)));
        let QueuedRead { token, target: buffer, kept, kind, .. } = read;
        self.transfers
            .reads
            .bounces_to(token, Target { buffer, kept, stored: skip..required, kind });
        ReadRequest::new(token, source, offset, required, bounce)
    }

    /// Handles the end of a read.
    pub(crate) fn on_read(
        &mut self,
        context: &EngineContext<D>,
        completion: Completion,
        now_ns: u64,
    ) {
        self.counters.busy_ns += self.transfers.reads.end(now_ns);
        match self.transfers.reads.take_joint(completion.token) {
            Some(joint) => self.on_joint_read(context, joint, completion, now_ns),
            None => self.on_read_ended(context, completion, now_ns),
        }
    }

    /// Handles the end of a read that was joined with others. If it failed, reads each part alone,
    /// so that an error is that of the unit that it concerns.
    fn on_joint_read(
        &mut self,
        context: &EngineContext<D>,
        joint: JointRead,
        completion: Completion,
        now_ns: u64,
    ) {
        let Completion { buffers, result, .. } = completion;
        let is_complete = joint.is_complete(&buffers);
        match result {
            Ok(transfer) if is_complete => {
                for PartRead { token, buffer, transfer } in joint.divide(buffers, &transfer) {
                    let (buffers, result) = (vec![buffer], Ok(transfer));
                    self.on_read_ended(context, Completion { token, buffers, result }, now_ns);
                }
            }
            Err(ts_io::Error::Cancelled { path, .. }) if is_complete => {
                for read in joint.rejoin(buffers) {
                    let error = ts_io::Error::Cancelled { path: path.clone(), offset: read.offset };
                    let (token, buffers, result) = (read.token, vec![read.target], Err(error));
                    self.on_read_ended(context, Completion { token, buffers, result }, now_ns);
                }
            }
            Ok(_) | Err(_) if is_complete => {
                self.transfers.reads.push_first(joint.rejoin(buffers));
            }
            result => {
                let error = result.err();
                let (file, parts) = joint.parts();
                let path = context.sources[file.0 as usize].path();
                for (token, offset, len) in parts.collect::<Vec<_>>() {
                    let (path, timeout) = (path.into(), context.timeout);
                    let late = ts_io::Error::TimedOut { path, offset, len, timeout };
                    let other =
                        error.clone().filter(|e| !matches!(e, ts_io::Error::TimedOut { .. }));
                    let (buffers, result) = (Vec::new(), Err(other.unwrap_or(late)));
                    self.on_read_ended(context, Completion { token, buffers, result }, now_ns);
                }
            }
        }
    }

    /// Returns the length of the longest joint read, in bytes. A small ring has several of them.
    pub(super) fn joint_bytes(&self) -> usize {
        self.batch_bytes().max(LEAST_JOINT_BYTES)
    }

    /// Handles the end of a read of one part of a load.
    fn on_read_ended(&mut self, context: &EngineContext<D>, completion: Completion, now_ns: u64) {
        let Completion { token, mut buffers, result } = completion;
        let buffer = buffers.pop();
        let (load_id, part) = split_token(token);
        let load = self.transfers.loads.get_mut(load_id);
        let delivered = match result {
            Ok(transfer) => {
                if let Some(trace) = &mut self.trace {
                    trace.read(token, load.id, &transfer.paths, now_ns);
                }
                transfer.paths.iter().for_each(|&(path, bytes)| load.count(path, bytes));
                true
            }
            Err(error) => {
                load.fail(part, error);
                false
            }
        };
        let id = load.id;
        match self.transfers.reads.take_target(token) {
            None => self.return_part(context, load_id, part, buffer, now_ns),
            Some(Target { buffer: target, kept, stored, kind }) if delivered => {
                let workers = self
                    .transfers
                    .workers
                    .as_ref()
                    .expect("an engine with bounce buffers has workers");
                let bounce = buffer.expect("a completed read returns its buffer");
                self.transfers.fills.begin();
                let (urgent, verify) = self.urgency(context, id);
                let from = Stored::Bounce(bounce);
                let job = Job::FillPart { token, from, stored, kind, verify, target, kept };
                workers.submit(job, urgent);
            }
            Some(Target { buffer: target, kept, .. }) => {
                load.return_kept(part, kept);
                // Frees the bounce buffer for the next read. If the system may still write to the
                // buffer after a timeout, the buffer returns to its pool later.
                drop(buffer);
                self.return_part(context, load_id, part, Some(target), now_ns);
            }
        }
    }
}
