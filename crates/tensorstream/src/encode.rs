// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors' bytes on their way into a file, compressed on as many threads as there may be.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ts_format::{CHUNK_LEN, Codec, Dtype, Encoded, Encoder};

/// Chunks that are encoded at a time, and by which a writer decides whether a tensor is worth it.
pub(crate) const BATCH: usize = 16;

/// Encoders of one codec, one for each thread.
#[derive(Debug)]
pub(crate) struct Encoders {
    codec: Codec,
    encoders: Vec<Encoder>,
}

/// A chunk that was encoded, and its bytes.
pub(crate) type Ready = (Encoded, Vec<u8>);

impl Encoders {
    /// # Errors
    /// The levels that the codec has.
    pub(crate) fn new(codec: Codec, level: Option<i32>, jobs: usize) -> Result<Self, String> {
        let encoders = (0..jobs.clamp(1, BATCH)).map(|_| Encoder::new(codec, level));
        Ok(Self { codec, encoders: encoders.collect::<Result<_, _>>()? })
    }

    pub(crate) fn codec(&self) -> Codec {
        self.codec
    }

    /// Encodes up to [`BATCH`] chunks, in order.
    pub(crate) fn encode(&mut self, dtype: Dtype, raw: &[u8]) -> Vec<Ready> {
        let chunks: Vec<&[u8]> = raw.chunks(CHUNK_LEN as usize).collect();
        let ready: Vec<Mutex<Option<Ready>>> = chunks.iter().map(|_| Mutex::default()).collect();
        let next = AtomicUsize::new(0);
        let work = |encoder: &mut Encoder| {
            let take = || next.fetch_add(1, Ordering::Relaxed);
            let mut index = take();
            while let Some(chunk) = chunks.get(index) {
                let mut out = Vec::new();
                let encoded = encoder.encode(dtype, chunk, &mut out);
                *ready[index].lock().expect("nobody panics with it") = Some((encoded, out));
                index = take();
            }
        };
        let (first, others) = self.encoders.split_first_mut().expect("there is at least one");
        std::thread::scope(|scope| {
            for encoder in others.iter_mut().take(chunks.len().saturating_sub(1)) {
                scope.spawn(|| work(encoder));
            }
            work(first);
        });
        let done = ready.into_iter().map(|ready| ready.into_inner().expect("nobody panics with it"));
        done.map(|ready| ready.expect("every chunk was taken by somebody")).collect()
    }
}
