// SPDX-License-Identifier: MIT OR Apache-2.0
//! The steps of loads, from their beginning to the finished unit.

use std::sync::Arc;

use ts_pool::Buffer;
use ts_streams::Device;

use crate::Error;
use crate::config::{Decoding, Verify};
use crate::context::EngineContext;
use crate::event::{ChecksumMismatch, DamagedChunk, PanickedJob, Work};
use crate::host_bytes::HostBytes;
use crate::kept_image::KeptImage;
use crate::prepared::PreparedUnit;
use crate::sharing::Pages;
use crate::slot_pool::{LoadBuffers, Slot};
use crate::stats::add_bytes;
use crate::trace::{TraceEvent, TraceKind};
use crate::unit::UnitId;
use crate::unit_load::{Image, LoadWork, UnitLoad, split_token};
use crate::worker::UnitCheck;

use super::EngineState;
use super::unit_state::Estimate;

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
        (load.guessed, load.unchecked) = (guessed, unit.has_unchecked_image());
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
    pub(super) fn urgency(&self, context: &EngineContext<D>, id: Option<UnitId>) -> (bool, bool) {
        match id {
            Some(id) => {
                let unit = &self.units[id];
                (!unit.waiters.is_empty(), unit.needs_verification(context.verify))
            }
            None => (true, context.verify != Verify::Never),
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

    /// Ends a load. `slot` is `None` if the load has lost its memory. Such a load always has an
    /// error.
    pub(super) fn finish(
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
            if let (true, Some(sharing)) = (load.unchecked, &context.sharing) {
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
