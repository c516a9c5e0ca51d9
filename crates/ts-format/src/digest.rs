// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checksums of tensors: one 64-bit XXH3 (<https://xxhash.com>) for each chunk.

use std::hash::Hasher;
use std::ops::Range;

use twox_hash::XxHash3_64;

/// Length of a chunk in bytes: 1 MiB. Each chunk has its own checksum. The last chunk of a tensor
/// may be shorter.
pub const CHUNK_LEN: u64 = 1 << 20;

/// The checksums of a tensor, one for each chunk of [`CHUNK_LEN`] bytes.
///
/// ```
/// use ts_format::Digest;
///
/// let mut bytes = vec![7; 3 << 20];
/// let digest = Digest::of(&bytes);
/// assert_eq!(digest.chunks().len(), 3);
/// bytes[(1 << 20) + 5] ^= 1;
/// assert_eq!(digest.mismatch(0, &bytes), Some(1 << 20..2 << 20));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Digest {
    chunks: Vec<u64>,
}

impl Digest {
    /// Computes the checksum of each chunk of `bytes`. The last chunk may be shorter.
    pub fn of(bytes: &[u8]) -> Self {
        Self { chunks: bytes.chunks(CHUNK_LEN as usize).map(XxHash3_64::oneshot).collect() }
    }

    pub(crate) fn from_chunks(chunks: Vec<u64>) -> Self {
        Self { chunks }
    }

    /// Returns the checksum of each chunk, in order.
    pub fn chunks(&self) -> &[u64] {
        &self.chunks
    }

    /// Compares `bytes`, which start at chunk `first`, with the digest. Returns the range in
    /// `bytes` of the first chunk that differs, or `None` if all chunks match.
    pub fn mismatch(&self, first: usize, bytes: &[u8]) -> Option<Range<usize>> {
        let len = CHUNK_LEN as usize;
        let differs =
            |i: usize, chunk| self.chunks.get(first + i) != Some(&XxHash3_64::oneshot(chunk));
        let mut chunks = bytes.chunks(len).enumerate();
        chunks
            .find(|&(i, chunk)| differs(i, chunk))
            .map(|(i, chunk)| i * len..i * len + chunk.len())
    }
}

/// An incremental computation of a [`Digest`].
#[derive(Default)]
pub(crate) struct Digester {
    chunks: Vec<u64>,
    partial: XxHash3_64,
    /// Number of bytes hashed into `partial`.
    filled: u64,
}

impl std::fmt::Debug for Digester {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Digester({} chunks, {} bytes)", self.chunks.len(), self.filled)
    }
}

impl Digester {
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = (CHUNK_LEN - self.filled) as usize;
            let (head, rest) = bytes.split_at(room.min(bytes.len()));
            if head.len() as u64 == CHUNK_LEN {
                self.chunks.push(XxHash3_64::oneshot(head)); // `filled` is 0
            } else {
                self.partial.write(head);
                self.filled += head.len() as u64;
                if self.filled == CHUNK_LEN {
                    self.end_chunk();
                }
            }
            bytes = rest;
        }
    }

    pub(crate) fn finish(mut self) -> Digest {
        if self.filled > 0 {
            self.end_chunk();
        }
        Digest { chunks: self.chunks }
    }

    fn end_chunk(&mut self) {
        self.chunks.push(std::mem::take(&mut self.partial).finish());
        self.filled = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn incremental_digest_equals_the_digest_of_all_bytes(
            cuts in prop::collection::vec(0usize..3_000_000, 0..6),
        ) {
            let bytes: Vec<u8> =
                (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let mut cuts = cuts;
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let mut digester = Digester::default();
            for pair in cuts.windows(2) {
                digester.feed(&bytes[pair[0]..pair[1]]);
            }
            prop_assert_eq!(digester.finish(), Digest::of(&bytes));
        }
    }

    #[test]
    fn mismatch_finds_the_damaged_chunk() {
        let mut bytes = vec![7u8; 2_500_000];
        let digest = Digest::of(&bytes);
        assert_eq!(digest.mismatch(0, &bytes), None);
        bytes[1_500_000] ^= 1;
        assert_eq!(digest.mismatch(0, &bytes), Some(1 << 20..2 << 20));
        assert_eq!(digest.mismatch(1, &bytes[1 << 20..]), Some(0..1 << 20));
        assert_eq!(digest.mismatch(2, &bytes[2 << 20..]), None);
        assert_eq!(digest.mismatch(0, &[7u8; 100][..]), Some(0..100));
        assert_eq!(Digest::of(&[]).mismatch(0, &[]), None);
    }
}
