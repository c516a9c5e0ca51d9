// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors' bytes on their way into a file, compressed on as many threads as there may be.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
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

    /// Encodes up to [`BATCH`] chunks, in order. `interrupt` is asked before each chunk that this
    /// thread encodes; when it returns true, no other chunk is begun and the answer is `None`.
    pub(crate) fn encode(
        &mut self,
        dtype: Dtype,
        raw: &[u8],
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Option<Vec<Ready>> {
        let chunks: Vec<&[u8]> = raw.chunks(CHUNK_LEN as usize).collect();
        let ready: Vec<Mutex<Option<Ready>>> = chunks.iter().map(|_| Mutex::default()).collect();
        let next = AtomicUsize::new(0);
        let work = |encoder: &mut Encoder, interrupted: &mut dyn FnMut() -> bool| {
            loop {
                if interrupted() {
                    // Nothing is left to take, for any thread.
                    next.store(chunks.len(), Ordering::Relaxed);
                }
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(chunk) = chunks.get(index) else { return };
                let mut out = Vec::new();
                let encoded = encoder.encode(dtype, chunk, &mut out);
                *ready[index].lock() = Some((encoded, out));
            }
        };
        let (first, others) = self.encoders.split_first_mut().expect("there is at least one");
        std::thread::scope(|scope| {
            for encoder in others.iter_mut().take(chunks.len().saturating_sub(1)) {
                scope.spawn(|| work(encoder, &mut || false));
            }
            work(first, interrupt);
        });
        // A chunk that nobody has encoded is one that an interrupt left.
        ready.into_iter().map(Mutex::into_inner).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_ends_compression_before_the_next_chunk() {
        let raw = vec![7; 5 * CHUNK_LEN as usize];
        for jobs in [1, 3] {
            let mut encoders = Encoders::new(Codec::Zstd, Some(1), jobs).expect("a level of zstd");
            let mut asked = 0;
            let done = encoders.encode(Dtype::U8, &raw, &mut || {
                asked += 1;
                true
            });
            assert!(done.is_none() && asked == 1, "{jobs} jobs: asked {asked} times");
            let done = encoders.encode(Dtype::U8, &raw, &mut || false);
            assert_eq!(done.map(|ready| ready.len()), Some(5), "{jobs} jobs");
        }
    }
}
