// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compression of chunks on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use ts_format::{CHUNK_LEN, Codec, Dtype, Encoded, Encoder};

/// Maximum number of chunks in a call of [`Encoders::encode`]. The first batch of a tensor decides
/// whether a writer compresses the tensor.
pub(crate) const BATCH: usize = 16;

/// Encoders of one codec, one for each thread.
#[derive(Debug)]
pub(crate) struct Encoders {
    codec: Codec,
    encoders: Vec<Encoder>,
}

/// An encoded chunk and its bytes.
pub(crate) type EncodedChunk = (Encoded, Vec<u8>);

impl Encoders {
    /// Creates up to `jobs` encoders.
    ///
    /// # Errors
    /// Returns an error message if the codec does not have this level.
    pub(crate) fn new(codec: Codec, level: Option<i32>, jobs: usize) -> Result<Self, String> {
        let encoders = (0..jobs.clamp(1, BATCH)).map(|_| Encoder::new(codec, level));
        Ok(Self { codec, encoders: encoders.collect::<Result<_, _>>()? })
    }

    pub(crate) fn codec(&self) -> Codec {
        self.codec
    }

    /// Encodes up to [`BATCH`] chunks, in order. Calls `interrupt` before each chunk that the
    /// calling thread encodes. If `interrupt` returns true, no further chunk is begun. Returns
    /// `None` if any chunk is then not encoded.
    pub(crate) fn encode(
        &mut self,
        dtype: Dtype,
        raw: &[u8],
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Option<Vec<EncodedChunk>> {
        let chunks: Vec<&[u8]> = raw.chunks(CHUNK_LEN as usize).collect();
        let results: Vec<Mutex<Option<EncodedChunk>>> =
            chunks.iter().map(|_| Mutex::default()).collect();
        let next = AtomicUsize::new(0);
        let work = |encoder: &mut Encoder, interrupted: &mut dyn FnMut() -> bool| {
            loop {
                if interrupted() {
                    // Stops all threads.
                    next.store(chunks.len(), Ordering::Relaxed);
                }
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(chunk) = chunks.get(index) else { return };
                let mut out = Vec::new();
                let encoded = encoder.encode(dtype, chunk, &mut out);
                *results[index].lock() = Some((encoded, out));
            }
        };
        let (first, others) =
            self.encoders.split_first_mut().expect("`new` creates at least one encoder");
        std::thread::scope(|scope| {
            for encoder in others.iter_mut().take(chunks.len().saturating_sub(1)) {
                scope.spawn(|| work(encoder, &mut || false));
            }
            work(first, interrupt);
        });
        // Only an interrupt leaves chunks without a result.
        results.into_iter().map(Mutex::into_inner).collect()
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
            let mut calls = 0;
            let done = encoders.encode(Dtype::U8, &raw, &mut || {
                calls += 1;
                true
            });
            // Other threads may have taken all chunks before.
            assert!(calls == 1 && (done.is_none() || jobs > 1), "{jobs} jobs: {calls} calls");
            let done = encoders.encode(Dtype::U8, &raw, &mut || false);
            assert_eq!(done.map(|chunks| chunks.len()), Some(5), "{jobs} jobs");
        }
    }
}
