// SPDX-License-Identifier: MIT OR Apache-2.0
//! The one bounded pool of threads for work on bytes that have arrived.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use ts_format::{CHUNK_LEN, Chunk, DecodeError, Digest, Scratch, decode_chunk};
use ts_pool::Buffer;

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

/// Threads that do [`Job`]s. Dropping it finishes what was given to it.
#[derive(Debug)]
pub(crate) struct WorkerPool {
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
}

impl WorkerPool {
    pub(crate) fn new(threads: usize, events: &Sender<Event>) -> Result<Self, Error> {
        let (jobs, queue) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let mut this = Self { jobs: Some(jobs), threads: Vec::new() };
        for i in 0..threads {
            let (queue, events) = (Arc::clone(&queue), events.clone());
            let thread = std::thread::Builder::new()
                .name(format!("ts-worker-{i}"))
                .stack_size(256 << 10)
                .spawn(move || run(&queue, &events))
                .map_err(|e| Error::System(format!("cannot start a worker thread: {e}")))?;
            this.threads.push(thread);
        }
        Ok(this)
    }

    pub(crate) fn submit(&self, job: Job) {
        let jobs = self.jobs.as_ref().expect("present until drop");
        jobs.send(job).expect("workers run until the pool is dropped");
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
#[derive(Default)]
struct Decoder {
    scratch: Scratch,
    /// A chunk of which not all is wanted.
    whole: Vec<u8>,
}

impl Decoder {
    fn bring(&mut self, stored: &[u8], fill: Fill, verify: bool, target: &mut [u8]) -> Result<(), Damage> {
        let Fill::Decoded { chunk, raw_len, skip } = fill else {
            target.copy_from_slice(stored);
            return Ok(());
        };
        if verify && !chunk.matches(stored) {
            return Err(Damage { chunk, what: "do not have their checksum".into() });
        }
        let wrong = |error: DecodeError| Damage { chunk, what: format!("are {error}") };
        if target.len() == raw_len {
            return decode_chunk(chunk.codec, chunk.width, stored, target, &mut self.scratch).map_err(wrong);
        }
        self.whole.resize(raw_len, 0);
        decode_chunk(chunk.codec, chunk.width, stored, &mut self.whole, &mut self.scratch).map_err(wrong)?;
        target.copy_from_slice(&self.whole[skip..skip + target.len()]);
        Ok(())
    }
}

fn run(queue: &Mutex<Receiver<Job>>, events: &Sender<Event>) {
    let mut scratch = Decoder::default();
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let event = match job {
            Ok(Job::Bring { token, bounce, stored, fill, verify, mut target }) => {
                let damage = scratch.bring(&bounce[stored], fill, verify, &mut target).err();
                Event::Brought { token, bounce, target, damage }
            }
            Ok(Job::Check { load, slot, checks }) => {
                let mismatch = checks.iter().find_map(|check| check.mismatch(&slot));
                Event::Checked { load, slot, mismatch }
            }
            Err(_) => return,
        };
        // Without a listener the engine is gone, and the buffers go home by being dropped.
        let _ = events.send(event);
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
