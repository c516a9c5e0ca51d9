// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work on bytes that have arrived, for the one bounded set of threads.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use parking_lot::Mutex;
use ts_format::{CHUNK_LEN, Chunk, DecodeError, Digest, Scratch, decode_chunk};
use ts_pool::Buffer;
use ts_streams::{
    AllocationStrategy, CpuDevice, Device, HostFn, Stream, StreamPool, StreamPriority,
};

use crate::Error;
use crate::layout::Fill;
use crate::load::Event;

/// What is to be done with bytes.
#[derive(Debug)]
pub(crate) enum Job {
    /// A part of a unit that was read aside is brought to its place: [`Event::Brought`].
    Bring {
        token: u64,
        bounce: Buffer,
        /// What is wanted of it.
        stored: Range<usize>,
        fill: Fill,
        /// Whether a chunk is compared with its checksum.
        verify: bool,
        target: Buffer,
    },
    /// A unit that is complete is compared with its checksums: [`Event::Checked`].
    Check { load: u32, slot: Buffer, checks: Arc<[Check]> },
}

/// Where in a unit's slot a tensor stands, and its checksums.
#[derive(Debug)]
pub(crate) struct Check {
    /// Index among the unit's tensors.
    pub(crate) tensor: usize,
    pub(crate) range: Range<usize>,
    pub(crate) digest: Arc<Digest>,
}

/// Bytes of a unit's tensor that do not have their checksum.
#[derive(Debug)]
pub(crate) struct Mismatch {
    /// Index among the unit's tensors.
    pub(crate) tensor: usize,
    /// From the tensor's first byte.
    pub(crate) range: Range<usize>,
}

/// A chunk that is not what was written.
#[derive(Debug)]
pub(crate) struct Damage {
    pub(crate) chunk: Chunk,
    /// What is wrong with it.
    pub(crate) what: String,
}

/// Does [`Job`]s on streams of the host. Dropping it finishes what was given to it.
#[derive(Debug)]
pub(crate) struct Workers<D: Device> {
    streams: StreamPool<CpuDevice>,
    /// What nobody decodes with now: with those in use, at most as many as there are threads.
    decoders: Arc<Mutex<Vec<Decoder>>>,
    events: Sender<Event<D>>,
}

impl<D: Device> Workers<D> {
    pub(crate) fn new(threads: usize, events: &Sender<Event<D>>) -> Result<Self, Error> {
        let new = || {
            // A stream is work in order, and jobs have none: as many for each urgency as could run
            // at once.
            let priorities =
                [vec![StreamPriority::High; threads], vec![StreamPriority::Normal; threads]];
            let device = CpuDevice::with_threads(threads)?;
            StreamPool::with_priorities(
                device,
                &priorities.concat(),
                AllocationStrategy::LoadBalanced,
            )
        };
        let streams = new().map_err(|e| Error::System(format!("cannot start workers: {e}")))?;
        Ok(Self { streams, decoders: Arc::default(), events: events.clone() })
    }

    /// What is urgent is done before all else that has not begun.
    pub(crate) fn submit(&self, job: Job, urgent: bool) {
        let priority = if urgent { StreamPriority::High } else { StreamPriority::Normal };
        let stream =
            self.streams.priority_stream(priority).expect("there are streams of each urgency");
        let (decoders, events, lost) =
            (Arc::clone(&self.decoders), self.events.clone(), job.lost());
        let work = HostFn::new(move || {
            let event = catch_unwind(AssertUnwindSafe(|| job.run(&decoders)));
            // Without a listener the engine is gone, and the buffers go home by being dropped.
            let _ = events.send(event.unwrap_or(Event::Lost(lost)));
        });
        stream.launch_host_fn(work).expect("no job makes its stream fail");
    }
}

/// A job that ended without a result: it panicked.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lost {
    /// [`Job::Bring`] of this token.
    Part(u64),
    /// [`Job::Check`] of this load.
    Check(u32),
}

impl Job {
    fn lost(&self) -> Lost {
        match self {
            Job::Bring { token, .. } => Lost::Part(*token),
            Job::Check { load, .. } => Lost::Check(*load),
        }
    }

    fn run<D: Device>(self, decoders: &Mutex<Vec<Decoder>>) -> Event<D> {
        match self {
            Job::Bring { token, bounce, stored, fill, verify, mut target } => {
                let free = || decoders.lock();
                let mut decoder = free().pop().unwrap_or_default();
                let damage = decoder.bring(&bounce[stored], fill, verify, &mut target).err();
                free().push(decoder);
                Event::Brought { token, bounce, target, damage }
            }
            Job::Check { load, slot, checks } => {
                let mismatch = checks.iter().find_map(|check| check.mismatch(&slot));
                Event::Checked { load, slot, mismatch }
            }
        }
    }
}

impl Check {
    fn mismatch(&self, slot: &[u8]) -> Option<Mismatch> {
        let range = self.digest.mismatch(0, &slot[self.range.clone()])?;
        Some(Mismatch { tensor: self.tensor, range })
    }
}

/// The most memory that a worker decodes with, in bytes.
pub(crate) const DECODER_BYTES: usize = Scratch::BYTES + CHUNK_LEN as usize;

/// What a worker decodes with.
#[derive(Debug, Default)]
struct Decoder {
    scratch: Scratch,
    /// A chunk of which not all is wanted.
    whole: Vec<u8>,
}

impl Decoder {
    fn bring(
        &mut self,
        stored: &[u8],
        fill: Fill,
        verify: bool,
        target: &mut [u8],
    ) -> Result<(), Damage> {
        let Fill::Decoded { chunk, raw_len, skip } = fill else {
            target.copy_from_slice(stored);
            return Ok(());
        };
        if verify && !chunk.matches(stored) {
            return Err(Damage { chunk, what: "do not have their checksum".into() });
        }
        let wrong = |error: DecodeError| Damage { chunk, what: format!("are {error}") };
        if target.len() == raw_len {
            return decode_chunk(chunk.codec, chunk.width, stored, target, &mut self.scratch)
                .map_err(wrong);
        }
        self.whole.resize(raw_len, 0);
        decode_chunk(chunk.codec, chunk.width, stored, &mut self.whole, &mut self.scratch)
            .map_err(wrong)?;
        target.copy_from_slice(&self.whole[skip..skip + target.len()]);
        Ok(())
    }
}
