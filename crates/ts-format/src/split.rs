// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lossless float split. A float's sign and mantissa are noise in trained weights and its
//! exponent is not: so elements are rotated left by a bit, which leaves the exponent's bits
//! together in the last byte, and taken apart into planes of their first, second, ... bytes. Each
//! plane is kept as it is or Huffman-coded, as a standard zstd frame without matches, where that
//! saves something. FORMAT.md is the normative page.

use zstd::zstd_safe::{self, CCtx, CParameter, DCtx, ParamSwitch};

use crate::simd;

/// Elements of a block, and so bytes of a plane in it: few enough for what is coded to stay in a
/// core's own cache, enough that what a frame begins with costs nothing.
pub(crate) const BLOCK: usize = 256 << 10;
/// Bytes that share a Huffman code: each of these is tried for each plane.
const HUFFMAN_BLOCKS: [u32; 3] = [32 << 10, 64 << 10, 128 << 10];
/// A plane is coded where that saves at least one part in so many.
const WORTH: usize = 32;
/// Bytes of a length in the table that a chunk begins with.
const LEN: usize = 4;

/// Widths of elements, in bytes, that can be split.
pub(crate) const WIDTHS: [usize; 4] = [1, 2, 4, 8];

/// Makes frames of Huffman-coded literals and nothing else.
pub(crate) struct Coder {
    /// What is best depends on how fast the bytes' distribution changes; so one for each of
    /// [`HUFFMAN_BLOCKS`].
    zstd: [CCtx<'static>; HUFFMAN_BLOCKS.len()],
    /// Planes of a block.
    planes: Vec<u8>,
    /// The shortest frame so far, and another.
    frames: [Vec<u8>; 2],
}

impl Coder {
    pub(crate) fn new() -> Self {
        let zstd = HUFFMAN_BLOCKS.map(|len| {
            let mut context = CCtx::create();
            for parameter in [
                // Steps over so many bytes that it never looks for a match: chance matches cost
                // ratio and speed.
                CParameter::CompressionLevel(zstd_safe::min_c_level()),
                CParameter::LiteralCompressionMode(ParamSwitch::Enable),
                CParameter::MaxBlockSize(len),
            ] {
                context
                    .set_parameter(parameter)
                    .expect("this version of zstd has these parameters");
            }
            context
        });
        Self { zstd, planes: Vec::new(), frames: Default::default() }
    }

    /// Appends a coded chunk to `out`: a table of lengths, then the planes' blocks. `raw` is whole
    /// elements of `width` bytes.
    pub(crate) fn encode(&mut self, raw: &[u8], width: usize, out: &mut Vec<u8>) {
        let table = out.len();
        let blocks = raw.len().div_ceil(BLOCK * width);
        out.resize(table + blocks * width * LEN, 0);
        let mut planes = std::mem::take(&mut self.planes);
        planes.resize(BLOCK * width, 0);
        for (block, elements) in raw.chunks(BLOCK * width).enumerate() {
            let count = elements.len() / width;
            split(elements, width, &mut planes);
            for (plane, bytes) in planes.chunks_exact(BLOCK).enumerate() {
                let begin = out.len();
                out.extend_from_slice(self.shortest(&bytes[..count]));
                let len = (out.len() - begin) as u32;
                let at = table + (block * width + plane) * LEN;
                out[at..at + LEN].copy_from_slice(&len.to_le_bytes());
            }
        }
        self.planes = planes;
    }

    /// A plane's bytes, or a frame of them if that is worth it.
    fn shortest<'a>(&'a mut self, bytes: &'a [u8]) -> &'a [u8] {
        let most = bytes.len() - bytes.len().div_ceil(WORTH);
        if bound(bytes) > most {
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
        if shortest <= most { &best[..shortest] } else { bytes }
    }
}

/// What a code for single bytes comes to at least: their entropy.
fn bound(bytes: &[u8]) -> usize {
    // Four tables, so that equal bytes in a row do not wait for each other.
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

/// Decodes a chunk into `out`, which is whole elements of `width` bytes. `planes` is scratch.
///
/// # Errors
/// What is wrong with `coded`; `out` then has any bytes.
pub(crate) fn decode(
    coded: &[u8],
    width: usize,
    zstd: &mut DCtx<'_>,
    planes: &mut Vec<u8>,
    out: &mut [u8],
) -> Result<(), String> {
    let blocks = out.len().div_ceil(BLOCK * width);
    let Some((table, mut data)) = coded.split_at_checked(blocks * width * LEN) else {
        return Err("it ends within its table".into());
    };
    let stride = BLOCK.min(out.len() / width).max(1);
    planes.resize(stride * width, 0);
    let mut lens = table.as_chunks::<LEN>().0.iter().map(|len| u32::from_le_bytes(*len) as usize);
    for elements in out.chunks_mut(BLOCK * width) {
        let count = elements.len() / width;
        let mut ready: [&[u8]; 8] = [&[]; 8];
        for (plane, scratch) in ready.iter_mut().zip(planes.chunks_exact_mut(stride)) {
            let len = lens.next().expect("the table has a length for each");
            let (bytes, later) = data.split_at_checked(len).ok_or("it ends within a plane")?;
            data = later;
            *plane = if len == count {
                bytes
            } else {
                let scratch = &mut scratch[..count];
                let came = zstd.decompress(scratch, bytes).map_err(zstd_safe::get_error_name)?;
                if came != count {
                    return Err(format!("a plane of {came} bytes, not {count}"));
                }
                scratch
            };
        }
        merge(&ready, width, elements);
    }
    match data.len() {
        0 => Ok(()),
        more => Err(format!("{more} bytes behind its last plane")),
    }
}

/// Takes elements apart: plane `i` is at `i * BLOCK`.
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
        _ => unreachable!("elements of {width} bytes are not split"),
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

/// Puts elements together from their planes.
fn merge(planes: &[&[u8]; 8], width: usize, elements: &mut [u8]) {
    let [a, b, c, d, ..] = *planes;
    match width {
        1 => elements.copy_from_slice(a),
        2 => simd::merge([a, b], elements.as_chunks_mut().0),
        4 => simd::merge([a, b, c, d], elements.as_chunks_mut().0),
        8 => simd::merge(*planes, elements.as_chunks_mut().0),
        _ => unreachable!("elements of {width} bytes are not split"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, a byte at a time.
    fn plane_byte(raw: &[u8], width: usize, plane: usize, element: usize) -> u8 {
        let bit = |i: usize| raw[element * width + i / 8] >> (i % 8) & 1;
        // Bit i of the rotated element is bit i - 1 of the element.
        (0..8).map(|i| bit((plane * 8 + i + width * 8 - 1) % (width * 8)) << i).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn what_is_split_is_merged(
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
        }
    }

    #[test]
    fn planes_are_what_the_definition_says() {
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
