// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads of units, from the submission of reads to the finished unit.

use std::sync::Arc;

use ts_io::{Completion, ReadRequest, Source};
use ts_pool::Buffer;
use ts_streams::Device;

use crate::Error;
use crate::config::{Decoding, Verify};
use crate::context::EngineContext;
use crate::event::{
    ChecksumMismatch, CopyResult, DamagedChunk, Event, PanickedJob, UploadError, UploadResult, Work,
};
use crate::gpu_reads::{LONGEST_READ, StoredRead};
use crate::host_bytes::HostBytes;
use crate::image::ImageLayout;
use crate::joint::{JointRead, PartRead};
use crate::kept_image::KeptImage;
use crate::layout::{ReadKind, SlotRead};
use crate::prepared::PreparedUnit;
use crate::sharing::Pages;
use crate::slot_pool::{LoadBuffers, Slot};
use crate::stats::add_bytes;
use crate::trace::{TraceEvent, TraceKind};
use crate::unit::UnitId;
use crate::unit_load::{Image, LoadWork, QueuedDecode, QueuedRead, UnitLoad, split_token};
use crate::upload::Upload;
use crate::worker::{Job, Stored, UnitCheck};

use super::reads::{NextRead, Target};
use super::unit_state::Estimate;
use super::{EngineState, UnitState};

/// The least copy to a device whose rate says something, in bytes.
const MEASURED_COPY_BYTES: u64 = 1 << 20;
/// Reads of neighbours are joined at least up to this length, in bytes.
const LEAST_JOINT_BYTES: usize = 256 << 10;

impl<D: Device> EngineState<D> {
    /// Starts to load a unit. Returns the work to queue. `guessed` says whether the unit is only
    /// likely to be used.
    pub(super) fn start_load(
        &mut self,
        context: &EngineContext<D>,
        id: UnitId,
        buffers: LoadBuffers<D>,
        now_ns: u64,
        guessed: bool,
    ) -> LoadWork {
        let load_id = self.transfers.loads.next_id();
        let prepared = &context.units[id.index()];
        let unit = &mut self.units[id];
        let image = match (unit.image(), &prepared.image) {
            (_, Some(layout)) if layout.is_slot => Image::None,
            (Some(image), _) => Image::Filled(image.clone()),
            (None, Some(layout)) if unit.is_on_host() => {
                let memory = unit.take_image_memory();
                let memory = memory.or_else(|| context.allocate_image(Some(layout.len)));
                memory.map_or(Image::None, |memory| unit.empty_image(context, id, memory, layout))
            }
            _ => Image::None,
        };
        unit.begin_load();
        let mut buffers = buffers;
        if let (Some(sharing), HostBytes::Empty(host)) =
            (context.sharing.as_ref().filter(|_| unit.is_resident()), &mut buffers.host)
        {
            buffers.pages = sharing.begin(sharing.unit(id), host);
        }
        let (mut load, mut work) =
            UnitLoad::new(load_id, Some(id), prepared, buffers, image, context.sizes, now_ns);
        load.guessed = guessed;
        match work.ready.take() {
            // Nothing is read. The bytes were verified when they were.
            Some(ready) => {
                self.transfers.loads.insert(load_id, load);
                self.upload(context, load_id, ready);
            }
            None => self.begin_load(context, load_id, load, now_ns),
        }
        work
    }

    /// Starts to read a unit that exists only for this load. The reads come before all others.
    /// Returns the number of the load, for [`Gathers::take`](super::gathers::Gathers::take).
    pub(crate) fn start_gather(
        &mut self,
        context: &EngineContext<D>,
        prepared: &Arc<PreparedUnit>,
        host: Buffer,
        now_ns: u64,
    ) -> u32 {
        let load_id = self.transfers.loads.next_id();
        let buffers = LoadBuffers::on_host(host);
        let (load, work) =
            UnitLoad::new(load_id, None, prepared, buffers, Image::None, context.sizes, now_ns);
        self.transfers.gathers.begin(load_id);
        self.begin_load(context, load_id, load, now_ns);
        self.transfers.reads.push_first(work.reads);
        self.submit_reads(context, now_ns);
        load_id
    }

    /// Returns whether the device decodes units that both it and the host can decode. If it is to
    /// do so where it is faster, it does until its rate is known, and then if that is at least the
    /// rate of the slower step on the host, which decodes and copies at the same time; but not
    /// after it has failed.
    pub(super) fn decodes_on_device(&self, context: &EngineContext<D>) -> bool {
        let counters = &self.counters;
        if context.decoding != Decoding::WhereFaster || counters.device_decoded.has_failed {
            return context.decoding == Decoding::OnDevice;
        }
        let threads = self.transfers.workers.as_ref().map_or(1, |workers| workers.threads);
        let decoding_s = counters.decode_ns as f64 / 1e9 / threads as f64;
        counters.device_decoded.is_faster_than([
            (counters.decode_ns > 0).then(|| counters.decoded_bytes as f64 / decoding_s),
            (counters.copy_bytes_per_s > 0.0).then_some(counters.copy_bytes_per_s),
        ])
    }

    fn begin_load(
        &mut self,
        context: &EngineContext<D>,
        load_id: u32,
        load: UnitLoad<D>,
        now_ns: u64,
    ) {
        let complete = load.is_complete();
        self.transfers.loads.insert(load_id, load);
        if complete {
            self.on_all_read(context, load_id, now_ns);
        }
    }

    /// Returns whether a call waits for a load, and whether its bytes must be verified.
    fn urgency(&self, context: &EngineContext<D>, id: Option<UnitId>) -> (bool, bool) {
        match id {
            Some(id) => {
                let unit = &self.units[id];
                (!unit.waiters.is_empty(), unit.needs_verification(context.verify))
            }
            None => (true, context.verify != Verify::Never),
        }
    }

    /// Submits queued decodes to the workers, as many as keep them busy. `verifies` says whether
    /// units are verified at all.
    fn submit_decodes(&mut self, verifies: bool) {
        let Some(workers) = &self.transfers.workers else { return };
        while let Some((decode, is_urgent)) = self.transfers.fills.pop(2 * workers.threads) {
            let QueuedDecode { token, image, stored, kind, target } = decode;
            // Whoever read the image has verified it, except if that was another process.
            let unit = self.transfers.loads.unit(split_token(token).0);
            let verify = verifies && unit.is_some_and(|id| self.units[id].has_unchecked_image());
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

    /// Counts and traces what a worker did with `bytes` bytes of a load.
    pub(crate) fn on_worked(
        &mut self,
        kind: TraceKind,
        load: u32,
        bytes: u64,
        work: Work,
        now_ns: u64,
    ) {
        let counters = &mut self.counters;
        match kind {
            TraceKind::Decode => {
                counters.decoded_bytes += bytes;
                counters.decode_ns += work.took_ns();
            }
            TraceKind::Encode => {
                counters.encoded_bytes += bytes;
                counters.encode_ns += work.took_ns();
            }
            _ => {}
        }
        if let Some(trace) = &mut self.trace {
            let unit = self.transfers.loads.unit(load);
            let (begin_ns, end_ns) = work.span_ns(now_ns);
            trace.add(TraceEvent::new(kind, begin_ns, end_ns).of(unit).bytes(bytes));
        }
    }

    /// Handles a part that a worker copied or decoded, with the part of the compressed unit that it
    /// filled too.
    pub(crate) fn on_part_filled(
        &mut self,
        context: &EngineContext<D>,
        token: u64,
        (target, kept): (Buffer, Option<Buffer>),
        damage: Option<DamagedChunk>,
        now_ns: u64,
    ) {
        self.transfers.fills.end();
        let (load_id, part) = split_token(token);
        let load = self.transfers.loads.get_mut(load_id);
        load.return_kept(part, kept);
        if let Some(damage) = damage {
            let file = load.file(part);
            let path = context.sources[file.0 as usize].path().to_path_buf();
            load.fail_damaged(part, path, damage);
        }
        self.return_part(context, load_id, part, Some(target), now_ns);
    }

    /// Handles a job that panicked, by failing its load.
    pub(crate) fn on_job_panicked(
        &mut self,
        context: &EngineContext<D>,
        job: PanickedJob,
        now_ns: u64,
    ) {
        let load_id = match job {
            PanickedJob::FillPart(token) => split_token(token).0,
            PanickedJob::Slot(load) | PanickedJob::Encode(load) => load,
        };
        let load = self.transfers.loads.get_mut(load_id);
        // A unit whose encoding fails is streamed from now on.
        if let (PanickedJob::Slot(_) | PanickedJob::Encode(_), Some(id)) = (job, load.id) {
            let unit = &mut self.units[id];
            unit.estimate = Estimate::TooMuch;
            unit.give_up_image();
        }
        let unit = load.name();
        load.error.get_or_insert(Error::System(format!(
            "cannot load unit `{unit}`: a worker thread panicked (a bug in TensorStream)"
        )));
        match job {
            PanickedJob::FillPart(token) => {
                self.transfers.fills.end();
                self.return_part(context, load_id, split_token(token).1, None, now_ns);
            }
            PanickedJob::Slot(_) => self.upload_or_finish(context, load_id, None, now_ns),
            PanickedJob::Encode(_) => self.on_encoded(context, load_id, now_ns),
        }
    }

    pub(super) fn return_part(
        &mut self,
        context: &EngineContext<D>,
        load_id: u32,
        part: usize,
        buffer: Option<Buffer>,
        now_ns: u64,
    ) {
        let load = self.transfers.loads.get_mut(load_id);
        if load.return_part(part, buffer) {
            self.on_all_read(context, load_id, now_ns);
        }
    }

    /// Continues a load when all its reads have ended. Verifies the unit first if necessary.
    fn on_all_read(&mut self, context: &EngineContext<D>, load_id: u32, now_ns: u64) {
        let load = self.transfers.loads.get_mut(load_id);
        let slot = load.end_filling();
        let from_image = load.from_image;
        let (checks, failed, id) =
            (Arc::clone(&load.prepared.checks), load.error.is_some() || load.cancelled, load.id);
        let (urgent, verify) = self.urgency(context, id);
        let verify = verify && !checks.is_empty() && !failed && !from_image;
        match (&self.transfers.workers, slot) {
            (Some(_), Some(slot)) if verify => {
                self.transfers.fills.push_check(UnitCheck { load: load_id, slot, checks, urgent });
            }
            (_, slot) => self.compress_or_finish(context, load_id, slot, now_ns),
        }
    }

    /// Handles a unit that a worker compared with its checksums.
    pub(crate) fn on_checked(
        &mut self,
        context: &EngineContext<D>,
        load_id: u32,
        slot: Buffer,
        mismatch: Option<ChecksumMismatch>,
        now_ns: u64,
    ) {
        let load = self.transfers.loads.get_mut(load_id);
        if let Some(ChecksumMismatch { tensor, range }) = mismatch {
            let unit = &load.prepared.unit;
            let part = unit.tensors[tensor].range_to_read(unit.tensors[tensor].entry.parts[0]);
            load.error = Some(Error::Corrupt {
                unit: unit.name.clone(),
                tensor: unit.tensors[tensor].name.clone(),
                path: context.sources[part.file.0 as usize].path().to_path_buf(),
                offset: part.offset + range.start as u64,
                len: range.len() as u64,
                what: "do not match their checksum".into(),
            });
        }
        self.compress_or_finish(context, load_id, Some(slot), now_ns);
    }

    /// Copies a unit to its device if it lives there, else finishes its load. `host` is `None` if
    /// the load has lost the memory that it read to, after a timeout or a panic.
    pub(super) fn upload_or_finish(
        &mut self,
        context: &EngineContext<D>,
        load_id: u32,
        host: Option<Buffer>,
        now_ns: u64,
    ) {
        let load = self.transfers.loads.get_mut(load_id);
        match host {
            Some(host) if load.device.is_some() && load.error.is_none() && !load.cancelled => {
                let keeps = load.keeps_host;
                let host =
                    if keeps { HostBytes::EmptyToKeep(host) } else { HostBytes::Empty(host) };
                self.upload(context, load_id, host);
            }
            host => {
                let slot = match load.device.take() {
                    Some(slot) => Some(Slot::Device(slot, None)),
                    None => host.map(Slot::Host),
                };
                self.finish(context, load_id, slot, now_ns);
            }
        }
    }

    /// Starts to copy a unit to its device.
    fn upload(&mut self, context: &EngineContext<D>, load_id: u32, host: HostBytes) {
        let load = self.transfers.loads.get_mut(load_id);
        let unit = load.id.expect("gathered rows are in host memory");
        let slot = load.device.take().expect("a unit on a device has a slot there");
        let layout = load.prepared.image.as_ref().filter(|_| context.slots.decodes_on_device());
        let image = layout.and_then(|layout| Some((load.image.take()?, Arc::clone(layout))));
        self.transfers.loads.begin_copy();
        context.slots.upload(Upload { load: load_id, unit, host, image, slot });
    }

    /// Handles the submission of a copy to the device. The unit can be used from now on, by streams
    /// that wait for the copy.
    pub(crate) fn on_uploaded(
        &mut self,
        context: &EngineContext<D>,
        upload: UploadResult<D>,
        now_ns: u64,
    ) {
        let UploadResult { load: load_id, slot, kept, image, decodes, read, result } = upload;
        if read.is_some() || result.is_err() {
            self.transfers.loads.end_copy();
        }
        self.counters.busy_ns += read.map_or(0, |(_, took)| took.as_nanos() as u64);
        let load = self.transfers.loads.get_mut(load_id);
        let kept = kept.zip(load.prepared.image.clone());
        load.kept = image.or_else(|| kept.map(|(bytes, layout)| KeptImage::new(bytes, layout)));
        let copied = match result {
            Ok(copied) => Some(copied),
            Err(UploadError::Device(error)) => {
                self.counters.device_decoded.has_failed |= decodes;
                load.error = Some(Error::device(&load.name(), error));
                None
            }
            Err(UploadError::Read(at, error)) => {
                load.fail_at(at, error);
                None
            }
        };
        if let (Some((bytes, _)), Some(path)) = (read, context.gpu_reads) {
            load.count(path, bytes as usize);
        }
        self.finish(context, load_id, Some(Slot::Device(slot, copied)), now_ns);
    }

    /// Handles the end of a copy to the device. If it failed, the unit is loaded again for its next
    /// use. Streams that have waited for the copy have failed.
    pub(crate) fn on_copied(&mut self, context: &EngineContext<D>, copy: CopyResult) {
        let CopyResult { unit, decoded, result } = copy;
        self.transfers.loads.end_copy();
        match result {
            Ok((_, took)) if decoded => {
                let bytes = context.units[unit.index()].layout.len as u64;
                self.counters.copy_ns += took.as_nanos() as u64;
                self.counters.device_decoded.add(bytes, took);
            }
            Ok((bytes, took)) => {
                self.counters.copy_ns += took.as_nanos() as u64;
                if bytes >= MEASURED_COPY_BYTES && !took.is_zero() {
                    let rate = bytes as f64 / took.as_secs_f64();
                    self.counters.copy_bytes_per_s = self.counters.copy_bytes_per_s.max(rate);
                }
            }
            Err(_) => {
                self.counters.device_decoded.has_failed |= decoded;
                self.discard(context, unit);
            }
        }
    }

    /// Ends a load. `slot` is `None` if the load has lost its memory. Such a load always has an
    /// error.
    fn finish(
        &mut self,
        context: &EngineContext<D>,
        load_id: u32,
        slot: Option<Slot<D>>,
        now_ns: u64,
    ) {
        let mut load = self.transfers.loads.remove(load_id);
        for &(path, bytes) in &load.read_bytes {
            add_bytes(&mut self.counters.read_bytes, path, bytes);
        }
        let Some(id) = load.id else {
            let gathered = || slot.expect("a load without an error still has its slot");
            let result = load.error.take().map_or_else(|| Ok(gathered()), Err);
            self.transfers.gathers.end(load_id, result);
            return;
        };
        let unit = &mut self.units[id];
        let (image, kept) = (load.image.take(), load.kept.take());
        match (kept, image, &load.prepared.image) {
            // It was decoded and verified, even if the upload failed.
            (Some(kept), ..) => unit.keep_image(kept),
            (None, Some(memory), _) if load.error.is_some() || load.cancelled => {
                unit.reserve_image(memory);
            }
            // The home of the unit may have changed meanwhile.
            (None, Some(mut image), Some(layout)) if unit.is_on_host() => {
                let pages = load.image_pages.take().zip(context.sharing.as_ref());
                let shared = pages.is_some_and(|(pages, sharing)| {
                    sharing.end(sharing.image(id), pages, &mut image)
                });
                unit.keep_image(KeptImage::new(image.freeze(), Arc::clone(layout)));
                if shared {
                    unit.set_shared_image(false);
                }
            }
            _ => {}
        }
        let read_bytes: u64 = load.read_bytes.iter().map(|&(_, bytes)| bytes).sum();
        unit.stats.read_bytes += read_bytes;
        if load.guessed {
            self.routed.stats.guessed_bytes += read_bytes;
        }
        if load.cancelled {
            unit.abandon_load(slot);
            self.reset_frontier();
            return;
        }
        unit.stats.load_ns += now_ns.saturating_sub(load.started_ns);
        unit.stats.loads += 1;
        if let Some(error) = load.error.take() {
            if let (Pages::Taken, Some(sharing)) = (&load.pages, &context.sharing) {
                sharing.remove(sharing.unit(id));
            }
            if let (true, Some(sharing)) = (unit.has_unchecked_image(), &context.sharing) {
                sharing.remove(sharing.image(id));
                unit.drop_image();
            }
            // If only a guess failed, the unit is read again when it is needed.
            unit.failure = Some(error).filter(|_| !load.guessed || !unit.waiters.is_empty());
            unit.abandon_load(slot);
            self.reset_frontier();
            return;
        }
        unit.set_image_checked();
        let mut slot = slot.expect("a load without an error still has its slot");
        if let (Slot::Host(buffer), Some(sharing)) = (&mut slot, &context.sharing) {
            unit.stats.shared = sharing.end(sharing.unit(id), load.pages, buffer);
        }
        let memory = context.slots.loaded(slot, unit.is_kept(), context.events.clone());
        unit.end_load(Arc::new(memory), context.verify != Verify::Never);
        // Their units may be complete now. If not, they find out again that memory is short.
        for waiter in &unit.waiters {
            self.waiters.for_memory.remove(waiter);
        }
        self.update_idle(id);
    }
}

impl<D: Device> UnitState<D> {
    /// Returns the bytes of a unit that is kept on the host as it is in its slot, or memory for
    /// them. If `on_device`, also returns those of an encoded unit that the device can decode.
    /// Returns `None` if the unit is not kept, or not so.
    pub(super) fn take_host_bytes(
        &mut self,
        context: &EngineContext<D>,
        prepared: &PreparedUnit,
        on_device: bool,
    ) -> Option<HostBytes> {
        if let Some(KeptImage { bytes, decodable: Some(decodable), .. }) = self.image()
            && on_device
        {
            return Some(HostBytes::Encoded(bytes.clone(), decodable.clone()));
        }
        if let Some(reads) = self.gpu_reads(context, prepared) {
            return Some(HostBytes::Stored(reads));
        }
        let layout = prepared.image.as_ref().filter(|image| image.is_slot)?;
        if let Some(image) = self.image() {
            return Some(HostBytes::Kept(image.bytes.clone()));
        }
        let reserved = self.take_image_memory();
        let mut memory = reserved
            .or_else(|| context.allocate_image(Some(layout.len).filter(|_| self.is_on_host())))?;
        drop(memory.split_off(layout.len)); // what rounding has added
        Some(HostBytes::EmptyToKeep(memory))
    }

    /// Returns the reads of the unit straight to its device. Returns `None` if the host needs its
    /// bytes: to decode, verify or keep them.
    fn gpu_reads(
        &self,
        context: &EngineContext<D>,
        prepared: &PreparedUnit,
    ) -> Option<Vec<StoredRead>> {
        context.gpu_reads?;
        let verifies = !prepared.checks.is_empty() && self.needs_verification(context.verify);
        if self.is_on_host() || verifies {
            return None;
        }
        let is_direct = |read: &SlotRead| {
            read.kind == ReadKind::InPlace && context.sources[read.file.0 as usize].is_file()
        };
        let reads = &prepared.layout.reads;
        if !reads.iter().all(is_direct) {
            return None;
        }
        let stored = reads.iter().flat_map(|read| {
            let source = &context.sources[read.file.0 as usize];
            (0..read.required).step_by(LONGEST_READ).map(|at| StoredRead {
                source: Arc::clone(source),
                offset: read.file_offset + at as u64,
                len: LONGEST_READ.min(read.required - at),
                slot_offset: read.slot_offset + at,
            })
        });
        Some(stored.collect())
    }

    /// Gives the memory for the compressed unit the bytes that another process has read, or
    /// prepares it for the load to fill.
    fn empty_image(
        &mut self,
        context: &EngineContext<D>,
        id: UnitId,
        mut memory: Buffer,
        layout: &Arc<ImageLayout>,
    ) -> Image {
        let layout = Arc::clone(layout);
        let pages = match &context.sharing {
            Some(sharing) => sharing.begin(sharing.image(id), &mut memory),
            None => Pages::Own,
        };
        if matches!(pages, Pages::Taken) {
            let image = KeptImage::new(memory.freeze(), layout);
            self.keep_image(image.clone());
            self.set_shared_image(true);
            return Image::Filled(image);
        }
        Image::Empty(memory, layout, pages)
    }
}
