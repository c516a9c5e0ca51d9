// SPDX-License-Identifier: MIT OR Apache-2.0
//! The codec `split`, which compresses floats without loss. In trained weights, signs and mantissas
//! are close to random, but exponents are not. Elements of two bytes or more are rotated left by
//! one bit, which moves the exponent to the last bytes. Then the elements are separated into
//! planes: plane `i` is byte `i` of all elements. Each plane is cut into blocks. A block that
//! compresses well is stored as a standard zstd frame without matches, which is Huffman-coded.
//! Other blocks are stored unchanged. FORMAT.md is normative.

use std::ops::Range;

use zstd::zstd_safe::{self, CCtx, CParameter, DCtx, ParamSwitch};

use crate::frame::{HuffmanCode, Run, runs};
use crate::simd;

/// Number of elements in a block, which is also the length of each plane in bytes. A block is small
/// enough to stay in the cache of a core, and large enough that frame headers do not matter.
pub(crate) const BLOCK: usize = 256 << 10;
/// Maximum zstd block sizes in bytes. The encoder tries all of them for each plane, but skips
/// planes whose entropy is too high.
const HUFFMAN_BLOCKS: [u32; 3] = [32 << 10, 64 << 10, 128 << 10];
/// A plane is encoded only if this saves at least 1/32 of its length.
const MIN_SAVING: usize = 32;
/// Length in bytes of an entry of the table at the start of a chunk.
const ENTRY_LEN: usize = 4;

/// Widths of elements that can be split, in bytes.
pub(crate) const WIDTHS: [usize; 4] = [1, 2, 4, 8];

/// An encoder for the codec `split`.
pub(crate) struct Coder {
    /// One encoder for each block size to try. The best block size depends on how fast the
    /// distribution of bytes changes.
    zstd: Vec<CCtx<'static>>,
    /// Scratch memory: the planes of a block.
    planes: Vec<u8>,
    /// Scratch memory: the shortest frame so far, and the latest frame.
    frames: [Vec<u8>; 2],
}

impl Coder {
    /// Creates an encoder that tries all of [`HUFFMAN_BLOCKS`].
    pub(crate) fn new() -> Self {
        Self::with_blocks(&HUFFMAN_BLOCKS)
    }

    /// Creates an encoder that tries one block size only.
    pub(crate) fn quick() -> Self {
        Self::with_blocks(&HUFFMAN_BLOCKS[1..2])
    }

    fn with_blocks(blocks: &[u32]) -> Self {
        let zstd = |&len: &u32| {
            let mut context = CCtx::create();
            for parameter in [
                // At the lowest level, zstd skips so many bytes that it finds no matches.
                // Accidental matches would make frames longer and slower to decode.
                CParameter::CompressionLevel(zstd_safe::min_c_level()),
                CParameter::LiteralCompressionMode(ParamSwitch::Enable),
                CParameter::MaxBlockSize(len),
            ] {
                context
                    .set_parameter(parameter)
                    .expect("the bundled zstd supports these parameters");
            }
            context
        };
        let zstd = blocks.iter().map(zstd).collect();
        Self { zstd, planes: Vec::new(), frames: Default::default() }
    }

    /// Returns the current memory use in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let frames: usize = self.frames.iter().map(Vec::capacity).sum();
        self.planes.capacity() + frames + self.zstd.iter().map(CCtx::sizeof).sum::<usize>()
    }

    /// Appends an encoded chunk to `out`: a table of lengths, then the planes of each block. `raw`
    /// consists of whole elements of `width` bytes.
    pub(crate) fn encode(&mut self, raw: &[u8], width: usize, out: &mut Vec<u8>) {
        let table = out.len();
        let blocks = raw.len().div_ceil(BLOCK * width);
        out.resize(table + blocks * width * ENTRY_LEN, 0);
        let mut planes = std::mem::take(&mut self.planes);
        planes.resize(BLOCK * width, 0);
        for (block, elements) in raw.chunks(BLOCK * width).enumerate() {
            let count = elements.len() / width;
            split(elements, width, &mut planes);
            for (plane, bytes) in planes.chunks_exact(BLOCK).enumerate() {
                let begin = out.len();
                out.extend_from_slice(self.encode_plane(&bytes[..count]));
                let len = (out.len() - begin) as u32;
                let at = table + (block * width + plane) * ENTRY_LEN;
                out[at..at + ENTRY_LEN].copy_from_slice(&len.to_le_bytes());
            }
        }
        self.planes = planes;
    }

    /// Returns the shortest frame of a plane, or the plane itself if no frame saves enough.
    fn encode_plane<'a>(&'a mut self, bytes: &'a [u8]) -> &'a [u8] {
        let max_len = bytes.len() - bytes.len().div_ceil(MIN_SAVING);
        if min_len(bytes) > max_len {
            return bytes;
        }
        let [best, other] = &mut self.frames;
        let mut shortest = usize::MAX;
        for context in &mut self.zstd {
            other.resize(zstd_safe::compress_bound(bytes.len()), 0);
            if let Ok(len) = context.compress2(&mut other[..], bytes)
                && len < shortest
            {
                shortest = len;
                std::mem::swap(best, other);
            }
        }
        if shortest <= max_len { &best[..shortest] } else { bytes }
    }
}

/// Returns the entropy of `bytes`, in bytes. This is a lower bound on the length of any code that
/// encodes each byte separately.
fn min_len(bytes: &[u8]) -> usize {
    // Four tables are faster than one: in a run of equal bytes, each increment of a single counter
    // would wait for the previous increment.
    let mut counts = [[0u32; 256]; 4];
    let (quads, rest) = bytes.as_chunks::<4>();
    for quad in quads {
        for (table, &byte) in counts.iter_mut().zip(quad) {
            table[usize::from(byte)] += 1;
        }
    }
    rest.iter().for_each(|&byte| counts[0][usize::from(byte)] += 1);
    let total = bytes.len() as f64;
    let bits: f64 = (0..256)
        .map(|byte| counts.iter().map(|table| f64::from(table[byte])).sum::<f64>())
        .filter(|&count| count > 0.0)
        .map(|count| count * (total / count).log2())
        .sum();
    (bits / 8.0) as usize
}

/// Decodes a chunk into `out`, which consists of whole elements of `width` bytes. `planes` is
/// scratch memory.
///
/// # Errors
/// Returns the reason if `coded` is invalid. The content of `out` is then unspecified.
pub(crate) fn decode(
    coded: &[u8],
    width: usize,
    zstd: &mut DCtx<'_>,
    planes: &mut Vec<u8>,
    out: &mut [u8],
) -> Result<(), String> {
    let blocks = out.len().div_ceil(BLOCK * width);
    let Some((table, mut data)) = coded.split_at_checked(blocks * width * ENTRY_LEN) else {
        return Err(format!(
            "truncated table of plane lengths (expected {} bytes, got {})",
            blocks * width * ENTRY_LEN,
            coded.len()
        ));
    };
    let stride = BLOCK.min(out.len() / width).max(1);
    planes.resize(stride * width, 0);
    let mut lens =
        table.as_chunks::<ENTRY_LEN>().0.iter().map(|len| u32::from_le_bytes(*len) as usize);
    for elements in out.chunks_mut(BLOCK * width) {
        let count = elements.len() / width;
        let mut decoded: [&[u8]; 8] = [&[]; 8];
        for (plane, scratch) in decoded.iter_mut().zip(planes.chunks_exact_mut(stride)) {
            let len = lens.next().expect("the table has an entry for each plane");
            let (bytes, rest) = data.split_at_checked(len).ok_or_else(|| {
                format!("truncated plane (expected {len} bytes, got {})", data.len())
            })?;
            data = rest;
            *plane = if len == count {
                bytes
            } else {
                let scratch = &mut scratch[..count];
                let decoded_len = zstd.decompress(scratch, bytes).map_err(|code| {
                    format!("cannot decode a plane: {}", zstd_safe::get_error_name(code))
                })?;
                if decoded_len != count {
                    return Err(format!(
                        "a plane decodes to {decoded_len} bytes (expected {count})"
                    ));
                }
                scratch
            };
        }
        merge(&decoded, width, elements);
    }
    match data.len() {
        0 => Ok(()),
        more => Err(format!("{more} trailing bytes after the last plane")),
    }
}

/// A chunk of the codec `split`, taken apart, so that its parts can be decoded independently of
/// each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SplitLayout {
    /// The blocks, in order.
    pub blocks: Vec<SplitBlock>,
    /// The codes that the runs refer to.
    pub codes: Vec<HuffmanCode>,
}

/// A block of elements of a [`SplitLayout`].
///
/// Each element, as a little-endian integer, was rotated left by one bit, except elements of one
/// byte. Plane `i` has byte `i` of all rotated elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplitBlock {
    /// The number of elements, which is also the length of each plane in bytes.
    pub count: usize,
    /// The planes, one for each byte of an element.
    pub planes: Vec<SplitPlane>,
}

/// A plane of a [`SplitBlock`]. Ranges are those of the encoded chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SplitPlane {
    /// The bytes in this range.
    Stored(Range<usize>),
    /// These runs, one after the other.
    Coded(Vec<Run>),
}

impl SplitLayout {
    /// Takes a chunk apart. `width` is the number of bytes in an element, and `raw_len` the length
    /// of the decoded chunk in bytes.
    ///
    /// Returns `None` if the chunk is invalid, or valid but not as this crate writes chunks: a
    /// plane has matches, several frames or a checksum. Then use
    /// [`decode_chunk`](crate::decode_chunk).
    pub fn new(coded: &[u8], width: usize, raw_len: usize) -> Option<Self> {
        if !WIDTHS.contains(&width) || !raw_len.is_multiple_of(width) {
            return None;
        }
        let elements = raw_len / width;
        let table_len = elements.div_ceil(BLOCK) * width * ENTRY_LEN;
        let lens = coded.get(..table_len)?.as_chunks::<ENTRY_LEN>().0;
        let mut lens = lens.iter().map(|len| u32::from_le_bytes(*len) as usize);
        let (mut at, mut layout) = (table_len, Self::default());
        for begin in (0..elements).step_by(BLOCK) {
            let count = BLOCK.min(elements - begin);
            let mut planes = Vec::with_capacity(width);
            for len in lens.by_ref().take(width) {
                let range = at..at.checked_add(len).filter(|&end| end <= coded.len())?;
                at = range.end;
                if len == count {
                    planes.push(SplitPlane::Stored(range));
                    continue;
                }
                let runs = runs(coded, range, &mut layout.codes)?;
                if runs.iter().map(|run| run.count).sum::<usize>() != count {
                    return None;
                }
                planes.push(SplitPlane::Coded(runs));
            }
            layout.blocks.push(SplitBlock { count, planes });
        }
        (at == coded.len()).then_some(layout)
    }
}

/// Separates elements into planes. Plane `i` starts at `i * BLOCK`.
fn split(elements: &[u8], width: usize, planes: &mut [u8]) {
    let planes = planes.chunks_exact_mut(BLOCK);
    match width {
        1 => planes.for_each(|plane| plane[..elements.len()].copy_from_slice(elements)),
        2 => split_wide::<2>(elements, planes, |e| {
            u16::from_le_bytes(e).rotate_left(1).to_le_bytes()
        }),
        4 => split_wide::<4>(elements, planes, |e| {
            u32::from_le_bytes(e).rotate_left(1).to_le_bytes()
        }),
        8 => split_wide::<8>(elements, planes, |e| {
            u64::from_le_bytes(e).rotate_left(1).to_le_bytes()
        }),
        _ => unreachable!("the callers allow only widths in WIDTHS (got {width})"),
    }
}

fn split_wide<'a, const W: usize>(
    elements: &[u8],
    planes: impl Iterator<Item = &'a mut [u8]>,
    rotate: impl Fn([u8; W]) -> [u8; W],
) {
    let elements = elements.as_chunks::<W>().0;
    for (i, plane) in planes.enumerate() {
        for (byte, &element) in plane.iter_mut().zip(elements) {
            *byte = rotate(element)[i];
        }
    }
}

/// Reassembles elements from their planes.
fn merge(planes: &[&[u8]; 8], width: usize, elements: &mut [u8]) {
    let [a, b, c, d, ..] = *planes;
    match width {
        1 => elements.copy_from_slice(a),
        2 => simd::merge([a, b], elements.as_chunks_mut().0),
        4 => simd::merge([a, b, c, d], elements.as_chunks_mut().0),
        8 => simd::merge(*planes, elements.as_chunks_mut().0),
        _ => unreachable!("the callers allow only widths in WIDTHS (got {width})"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::{self, RunContent};

    /// Computes a byte of a plane bit by bit, directly from the definition of the format.
    fn plane_byte(raw: &[u8], width: usize, plane: usize, element: usize) -> u8 {
        let bit = |i: usize| raw[element * width + i / 8] >> (i % 8) & 1;
        // Bit i of the rotated element is bit i - 1 of the element.
        (0..8).map(|i| bit((plane * 8 + i + width * 8 - 1) % (width * 8)) << i).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn encoded_chunks_round_trip(
            width in prop::sample::select(&WIDTHS[..]),
            count in prop_oneof![
                0usize..40,
                Just(BLOCK - 1),
                Just(BLOCK),
                Just(BLOCK + 1),
                0usize..150_000,
            ],
            noise in any::<u32>(),
            mask in prop_oneof![Just(u32::MAX), Just(0), any::<u32>()],
        ) {
            let mut state = noise;
            let mut raw = vec![0; count * width];
            for byte in &mut raw {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *byte = ((state & mask) >> 24) as u8;
            }
            let (mut coded, mut planes) = (vec![1, 2, 3], Vec::new());
            Coder::new().encode(&raw, width, &mut coded);
            let mut out = vec![0xAA; raw.len()];
            decode(&coded[3..], width, &mut DCtx::create(), &mut planes, &mut out).unwrap();
            prop_assert!(out == raw);
            let layout = SplitLayout::new(&coded[3..], width, raw.len()).unwrap();
            prop_assert!(decode_layout(&coded[3..], &layout) == raw);
        }

        /// Damaged chunks are refused, or taken apart into ranges that are inside of the chunk.
        #[test]
        fn damaged_chunks_are_taken_apart_safely(
            width in prop::sample::select(&WIDTHS[..]),
            seed in any::<u32>(),
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            cut in any::<prop::sample::Index>(),
        ) {
            let raw: Vec<u8> = (0..width as u32 * 40_000)
                .map(|i| (i.wrapping_mul(seed) >> 24) as u8 & (i as u8 | 3))
                .collect();
            let mut coded = Vec::new();
            Coder::new().encode(&raw, width, &mut coded);
            for (at, byte) in flips {
                // The first bytes are headers.
                let at = at.index(coded.len().min(600));
                coded[at] ^= byte;
            }
            let cut = coded.len() - cut.index(coded.len()) / 64;
            let layout = SplitLayout::new(&coded[..cut], width, raw.len());
            for block in layout.iter().flat_map(|layout| &layout.blocks) {
                for plane in &block.planes {
                    let SplitPlane::Coded(runs) = plane else { continue };
                    for run in runs {
                        if let RunContent::Huffman { stream: range, .. }
                        | RunContent::Stored(range) = &run.content
                        {
                            prop_assert!(range.end <= cut && range.start <= range.end);
                        }
                    }
                }
            }
        }
    }

    /// Decodes a chunk from its layout.
    fn decode_layout(coded: &[u8], layout: &SplitLayout) -> Vec<u8> {
        let mut raw = Vec::new();
        for SplitBlock { count, planes } in &layout.blocks {
            let planes: Vec<Vec<u8>> = planes
                .iter()
                .map(|plane| match plane {
                    SplitPlane::Stored(range) => coded[range.clone()].to_vec(),
                    SplitPlane::Coded(runs) => frame::tests::decode(coded, runs, &layout.codes),
                })
                .collect();
            let mut padded: [&[u8]; 8] = [&[]; 8];
            padded.iter_mut().zip(&planes).for_each(|(to, plane)| *to = plane);
            let begin = raw.len();
            raw.resize(begin + count * planes.len(), 0);
            merge(&padded, planes.len(), &mut raw[begin..]);
        }
        raw
    }

    #[test]
    fn planes_match_the_definition() {
        let raw: Vec<u8> = (0..=255).map(|i: u8| i.wrapping_mul(151) ^ 0x5A).collect();
        for width in [2, 4, 8] {
            let mut planes = vec![0; BLOCK * width];
            split(&raw, width, &mut planes);
            for plane in 0..width {
                for element in 0..raw.len() / width {
                    assert_eq!(
                        planes[plane * BLOCK + element],
                        plane_byte(&raw, width, plane, element)
                    );
                }
            }
        }
    }
}
