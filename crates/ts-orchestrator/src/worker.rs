// SPDX-License-Identifier: MIT OR Apache-2.0
//! Worker threads that copy, decode and verify bytes that were read.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use parking_lot::Mutex;
use ts_format::{CHUNK_LEN, DecodeError, Digest, Scratch, decode_chunk};
use ts_pool::{Buffer, SharedBuffer};
use ts_streams::{
    AllocationStrategy, CpuDevice, Device, HostFn, Stream, StreamPool, StreamPriority,
};

use crate::Error;
use crate::encoding::{Coder, Encoding, Pieces};
use crate::event::{ChecksumMismatch, DamagedChunk, Event, PanickedJob, Work};
use crate::layout::ReadKind;

/// A job for a worker.
#[derive(Debug)]
pub(crate) enum Job {
    /// Copies or decodes bytes into a part of a slot. The result is an [`Event::PartFilled`].
    FillPart {
        token: u64,
        from: Stored,
        /// The range of `from` to copy or decode.
        stored: Range<usize>,
        kind: ReadKind,
        /// Whether to compare a chunk with its checksum.
        verify: bool,
        target: Buffer,
        /// Memory for a copy of the stored bytes.
        kept: Option<Buffer>,
    },
    /// Estimates how long a unit is when it is encoded. The result is an [`Event::Estimated`].
    Estimate { load: u32, slot: Buffer, pieces: Arc<Pieces> },
    /// Encodes a piece of a unit. The result is an [`Event::Encoded`].
    Encode { load: u32, encoding: Arc<Encoding>, piece: usize },
}

/// A comparison of a unit with its checksums. The result is an [`Event::Checked`].
#[derive(Debug)]
pub(crate) struct UnitCheck {
    pub(crate) load: u32,
    pub(crate) slot: Buffer,
    pub(crate) checks: Arc<[TensorCheck]>,
    /// Whether a call waits for the unit.
    pub(crate) urgent: bool,
}

impl UnitCheck {
    fn run<D: Device>(self) -> Event<D> {
        let (Self { load, slot, checks, .. }, started) = (self, Instant::now());
        let mismatch = checks.iter().find_map(|check| check.mismatch(&slot));
        Event::Checked { load, slot, mismatch, work: Work::since(started) }
    }
}

/// Bytes to copy or decode.
#[derive(Debug)]
pub(crate) enum Stored {
    /// A buffer that was read. It is free after the job.
    Bounce(Buffer),
    /// A compressed unit that is kept in memory.
    Image(SharedBuffer),
}

impl Stored {
    fn bytes(&self) -> &[u8] {
        match self {
            Stored::Bounce(buffer) => buffer,
            Stored::Image(buffer) => buffer,
        }
    }
}

/// The checksums of a tensor.
#[derive(Debug)]
pub(crate) struct TensorCheck {
    /// The index of the tensor in its unit.
    pub(crate) tensor: usize,
    /// The byte range of the tensor in the slot.
    pub(crate) range: Range<usize>,
    pub(crate) digest: Arc<Digest>,
}

/// The idle decoders and coders. There are at most as many of each as threads.
#[derive(Debug, Default)]
struct Tools {
    decoders: Mutex<Vec<Decoder>>,
    coders: Mutex<Vec<Coder>>,
}

/// Runs [`Job`]s on streams of the host. Dropping the workers finishes submitted jobs.
#[derive(Debug)]
pub(crate) struct Workers<D: Device> {
    streams: StreamPool<CpuDevice>,
    pub(crate) threads: usize,
    tools: Arc<Tools>,
    events: Sender<Event<D>>,
}

impl<D: Device> Workers<D> {
    pub(crate) fn new(threads: usize, events: &Sender<Event<D>>) -> Result<Self, Error> {
        let new = || {
            // A stream runs its work in order, but jobs are independent. So each priority has one
            // stream per thread.
            let priorities = [StreamPriority::High, StreamPriority::Normal, StreamPriority::Low]
                .map(|priority| vec![priority; threads]);
            let device = CpuDevice::with_threads(threads)?;
            StreamPool::with_priorities(
                device,
                &priorities.concat(),
                AllocationStrategy::LoadBalanced,
            )
        };
        let streams =
            new().map_err(|e| Error::System(format!("cannot create the engine's workers: {e}")))?;
        Ok(Self { streams, threads, tools: Arc::default(), events: events.clone() })
    }

    /// Queues a job. Urgent jobs start before all queued jobs that are not urgent, and jobs that
    /// encode start after all others.
    pub(crate) fn submit(&self, job: Job, urgent: bool) {
        let priority = match (&job, urgent) {
            (Job::Encode { .. }, _) => StreamPriority::Low,
            (_, true) => StreamPriority::High,
            (_, false) => StreamPriority::Normal,
        };
        let (tools, events, panicked) =
            (Arc::clone(&self.tools), self.events.clone(), job.if_panicked());
        self.launch(priority, move || report(&events, panicked, || job.run(&tools)));
    }

    /// Queues comparisons that one thread makes, one after the other.
    pub(crate) fn submit_checks(&self, checks: Vec<UnitCheck>) {
        let urgent = checks.iter().any(|check| check.urgent);
        let priority = if urgent { StreamPriority::High } else { StreamPriority::Normal };
        let events = self.events.clone();
        self.launch(priority, move || {
            for check in checks {
                report(&events, PanickedJob::Slot(check.load), || check.run());
            }
        });
    }

    fn launch(&self, priority: StreamPriority, work: impl FnOnce() + Send + 'static) {
        let stream = self.streams.priority_stream(priority).expect("each priority has a stream");
        let work = HostFn::new(work);
        stream.launch_host_fn(work).expect("panics of jobs are caught, so no stream fails");
    }
}

/// Does work and reports its result, or that it panicked.
fn report<D: Device>(
    events: &Sender<Event<D>>,
    panicked: PanickedJob,
    work: impl FnOnce() -> Event<D>,
) {
    let event = catch_unwind(AssertUnwindSafe(work));
    // Fails only if the engine is gone. Then the buffers return to their pool here.
    let _ = events.send(event.unwrap_or(Event::JobPanicked(panicked)));
}

impl Job {
    /// Returns the value to report if the job panics.
    fn if_panicked(&self) -> PanickedJob {
        match self {
            Job::FillPart { token, .. } => PanickedJob::FillPart(*token),
            Job::Estimate { load, .. } => PanickedJob::Slot(*load),
            Job::Encode { load, .. } => PanickedJob::Encode(*load),
        }
    }

    fn run<D: Device>(self, tools: &Tools) -> Event<D> {
        match self {
            Job::FillPart { token, from, stored, kind, verify, mut target, mut kept } => {
                let idle = || tools.decoders.lock();
                let mut decoder = idle().pop().unwrap_or_default();
                let (stored, started) = (&from.bytes()[stored], Instant::now());
                let damage = decoder.fill(stored, kind, verify, &mut target).err();
                let work = Work::since(started);
                if let Some(kept) = &mut kept {
                    kept.copy_from_slice(stored);
                }
                idle().push(decoder);
                let decoded = match kind {
                    ReadKind::Decoded { raw_len, .. } => Some(raw_len),
                    _ => None,
                };
                drop(from);
                Event::PartFilled { token, target, kept, damage, decoded, work }
            }
            Job::Estimate { load, slot, pieces } => {
                let started = Instant::now();
                let (needed, raw) = tools.with_coder(|coder| pieces.estimate(&slot, coder));
                Event::Estimated { load, slot, needed, raw, work: Work::since(started) }
            }
            Job::Encode { load, encoding, piece } => {
                let started = Instant::now();
                let raw = tools.with_coder(|coder| encoding.encode(piece, coder));
                // The handler of the event takes the unit out of it.
                drop(encoding);
                Event::Encoded { load, raw, work: Work::since(started) }
            }
        }
    }
}

impl Tools {
    fn with_coder<T>(&self, encode: impl FnOnce(&mut Coder) -> T) -> T {
        let mut coder = self.coders.lock().pop().unwrap_or_default();
        let result = encode(&mut coder);
        self.coders.lock().push(coder);
        result
    }
}

impl TensorCheck {
    fn mismatch(&self, slot: &[u8]) -> Option<ChecksumMismatch> {
        let range = self.digest.mismatch(0, &slot[self.range.clone()])?;
        Some(ChecksumMismatch { tensor: self.tensor, range })
    }
}

/// The maximum memory use of a [`Decoder`], in bytes.
pub(crate) const DECODER_BYTES: usize = Scratch::BYTES + CHUNK_LEN as usize;

/// Copies or decodes bounce buffers.
#[derive(Debug, Default)]
struct Decoder {
    scratch: Scratch,
    /// A decoded chunk, if only a part of it is needed.
    decoded: Vec<u8>,
}

impl Decoder {
    fn fill(
        &mut self,
        stored: &[u8],
        kind: ReadKind,
        verify: bool,
        target: &mut [u8],
    ) -> Result<(), DamagedChunk> {
        let ReadKind::Decoded { chunk, raw_len, skip } = kind else {
            target.copy_from_slice(stored);
            return Ok(());
        };
        if verify && !chunk.matches(stored) {
            return Err(DamagedChunk { chunk, what: "do not match their checksum".into() });
        }
        let invalid = |error: DecodeError| DamagedChunk { chunk, what: format!("are {error}") };
        if target.len() == raw_len {
            return decode_chunk(chunk.codec, chunk.width, stored, target, &mut self.scratch)
                .map_err(invalid);
        }
        self.decoded.resize(raw_len, 0);
        decode_chunk(chunk.codec, chunk.width, stored, &mut self.decoded, &mut self.scratch)
            .map_err(invalid)?;
        target.copy_from_slice(&self.decoded[skip..skip + target.len()]);
        Ok(())
    }
}
