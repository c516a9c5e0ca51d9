// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checksums of a tensor's bytes, chunk by chunk: XXH3 with 64 bits, <https://xxhash.com>.

use std::hash::Hasher;
use std::ops::Range;

use twox_hash::XxHash3_64;

/// Length of the chunks that are hashed each on its own, in bytes. The last one of a tensor may be
/// shorter.
pub const CHUNK_LEN: u64 = 1 << 20;

/// The checksums of one tensor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Digest {
    chunks: Vec<u64>,
}

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self { chunks: bytes.chunks(CHUNK_LEN as usize).map(XxHash3_64::oneshot).collect() }
    }

    pub(crate) fn from_chunks(chunks: Vec<u64>) -> Self {
        Self { chunks }
    }

    /// One checksum for each chunk.
    pub fn chunks(&self) -> &[u64] {
        &self.chunks
    }

    /// Compares bytes that begin with chunk `first`: the first run of them, at most a chunk, that
    /// is not what the digest was made of.
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

/// Digests bytes that come in pieces.
#[derive(Default)]
pub(crate) struct Digester {
    chunks: Vec<u64>,
    partial: XxHash3_64,
    /// Bytes in `partial`.
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
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            if now.len() as u64 == CHUNK_LEN {
                self.chunks.push(XxHash3_64::oneshot(now)); // whole chunks need no state
            } else {
                self.partial.write(now);
                self.filled += now.len() as u64;
                if self.filled == CHUNK_LEN {
                    self.end_chunk();
                }
            }
            bytes = later;
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
        fn pieces_give_the_digest_of_the_whole(
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
    fn a_changed_bit_is_found_in_its_chunk() {
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
