// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a device has to do to decode a unit: its chunks, taken apart into the structures that
//! `kernels.cu` declares.

use std::ops::Range;

use bytemuck::{NoUninit, cast_slice};
use ts_format::{Codec, HuffmanCode, Run, RunContent, SplitBlock, SplitLayout, SplitPlane};

use crate::image::{ImageLayout, ImagePart};
use crate::layout::{ReadKind, SlotRead};

/// `struct Code` of `kernels.cu`, like the next structures. Devices that run it are little-endian,
/// as are their hosts.
#[derive(Debug, Clone, Copy, NoUninit)]
#[repr(C)]
struct CodeStep {
    /// The weights, two in a byte.
    weights: [u8; 128],
    max_bits: u32,
    unused: [u32; 3],
}

/// `struct Run`.
#[derive(Debug, Clone, Copy, NoUninit)]
#[repr(C)]
struct RunStep {
    target: u64,
    source: u32,
    len: u32,
    count: u32,
    stride: u32,
    code: u32,
    unused: u32,
}

/// `struct Block`.
#[derive(Debug, Clone, Copy, NoUninit)]
#[repr(C)]
struct BlockStep {
    target: u64,
    count: u32,
    width: u32,
    planes: [u32; 8],
}

/// The length of the table of a code, in bytes.
const TABLE_BYTES: usize = 2 * 2048;
/// What a piece begins with is aligned to this many bytes.
const ALIGN: usize = 16;
/// The values of `code` of runs without one.
const STORED: u32 = u32::MAX;
const REPEATED: u32 = u32::MAX - 1;
/// The value of `planes` for a plane that is decoded to the slot.
const CODED: u32 = u32::MAX;
/// The longest run without codewords, in bytes, because one thread handles a run.
const LONGEST_COPIED_RUN: usize = 16 << 10;
/// The longest block of bytes that are only copied.
const LONGEST_COPIED_BLOCK: usize = 256 << 10;

/// A part of a unit that is decoded at once, in this memory of the device: the stored bytes, codes,
/// runs, blocks, and tables.
#[derive(Debug, Clone, Default)]
pub(super) struct Piece {
    /// The range of the image with the stored bytes.
    pub(super) stored: Range<usize>,
    /// The range of the codes, runs and blocks in [`Steps::bytes`].
    pub(super) steps: Range<usize>,
    pub(super) codes: usize,
    pub(super) runs: usize,
    pub(super) blocks: usize,
}

impl Piece {
    /// Returns where the codes begin in the memory of the piece.
    pub(super) fn codes_at(&self) -> usize {
        self.stored.len().next_multiple_of(ALIGN)
    }

    pub(super) fn runs_at(&self) -> usize {
        self.codes_at() + self.codes * size_of::<CodeStep>()
    }

    pub(super) fn blocks_at(&self) -> usize {
        self.runs_at() + self.runs * size_of::<RunStep>()
    }

    pub(super) fn tables_at(&self) -> usize {
        self.blocks_at() + self.blocks * size_of::<BlockStep>()
    }

    /// Returns how much memory the piece needs, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.tables_at() + self.codes * TABLE_BYTES
    }
}

/// What a device has to do to decode a unit.
#[derive(Debug, Default)]
pub(super) struct Steps {
    pub(super) pieces: Vec<Piece>,
    /// The codes, runs and blocks of all pieces.
    pub(super) bytes: Vec<u8>,
}

/// The codes, runs and blocks of a piece, or of a part of it.
#[derive(Debug, Default)]
struct Work {
    codes: Vec<CodeStep>,
    runs: Vec<RunStep>,
    blocks: Vec<BlockStep>,
}

impl Steps {
    /// Returns the steps to decode an image in pieces that need at most `piece_bytes` bytes of
    /// memory on the device. Returns `None` if the kernels cannot decode it.
    pub(super) fn new(image: &[u8], layout: &ImageLayout, piece_bytes: usize) -> Option<Self> {
        let (mut steps, mut work) = (Self::default(), Work::default());
        let mut piece = Piece::default();
        for ImagePart { read, at } in &layout.parts {
            let stored = *at..*at + read.required;
            let coded = Coded::new(image.get(stored.clone())?, read)?;
            let longer = piece.with(&coded, stored.end);
            if longer.bytes() > piece_bytes {
                steps.push(piece, &std::mem::take(&mut work));
                piece = Piece { stored: stored.start..stored.start, ..Piece::default() };
            }
            let source = (stored.start - piece.stored.start) as u32;
            coded.add(&mut work, source, piece.codes as u32, read);
            piece = piece.with(&coded, stored.end);
            if piece.bytes() > piece_bytes {
                return None;
            }
        }
        steps.push(piece, &work);
        Some(steps)
    }

    fn push(&mut self, mut piece: Piece, work: &Work) {
        if piece.blocks > 0 {
            let begin = self.bytes.len();
            self.bytes.extend_from_slice(cast_slice(&work.codes));
            self.bytes.extend_from_slice(cast_slice(&work.runs));
            self.bytes.extend_from_slice(cast_slice(&work.blocks));
            piece.steps = begin..self.bytes.len();
            self.pieces.push(piece);
        }
    }
}

impl Piece {
    /// Returns the piece with one more part, whose stored bytes end at `end`.
    fn with(&self, part: &Coded, end: usize) -> Self {
        let (codes, runs, blocks) = part.counts();
        Self {
            stored: self.stored.start..end,
            codes: self.codes + codes,
            runs: self.runs + runs,
            blocks: self.blocks + blocks,
            ..self.clone()
        }
    }
}

/// Returns whether the kernels may be able to decode the bytes of a read: whole chunks of the codec
/// `split`, or raw ones, at addresses where their elements are aligned.
pub(super) fn may_decode(read: &SlotRead) -> bool {
    let ReadKind::Decoded { chunk, raw_len, skip } = read.kind else { return true };
    let is_aligned = || read.slot_offset.is_multiple_of(usize::from(chunk.width));
    let is_known = chunk.codec == Codec::Raw || chunk.codec == Codec::Split && is_aligned();
    is_known && skip == 0 && raw_len == read.len
}

/// A part of an image.
enum Coded {
    /// Bytes to copy.
    Copied(usize),
    /// A chunk of the codec `split`, and the width of its elements.
    Split(SplitLayout, usize),
}

impl Coded {
    fn new(stored: &[u8], read: &SlotRead) -> Option<Self> {
        let ReadKind::Decoded { chunk, raw_len, .. } = read.kind else {
            return Some(Self::Copied(read.required));
        };
        match chunk.codec {
            _ if !may_decode(read) => None,
            Codec::Raw => Some(Self::Copied(raw_len)),
            _ => {
                let width = usize::from(chunk.width);
                Some(Self::Split(SplitLayout::new(stored, width, raw_len)?, width))
            }
        }
    }

    /// Returns the numbers of codes, runs and blocks.
    fn counts(&self) -> (usize, usize, usize) {
        match self {
            Self::Copied(len) => (0, 0, len.div_ceil(LONGEST_COPIED_BLOCK)),
            Self::Split(layout, _) => {
                let runs = layout.blocks.iter().flat_map(|block| &block.planes).flat_map(|plane| {
                    let SplitPlane::Coded(runs) = plane else { return Default::default() };
                    runs.iter()
                });
                (layout.codes.len(), runs.map(lines).sum(), layout.blocks.len())
            }
        }
    }

    /// Adds the part to a piece. Its stored bytes are at `source` in the piece, and its codes come
    /// after `codes` others.
    fn add(&self, work: &mut Work, source: u32, codes: u32, read: &SlotRead) {
        let mut target = read.slot_offset;
        match self {
            Self::Copied(len) => {
                for begin in (0..*len).step_by(LONGEST_COPIED_BLOCK) {
                    let count = LONGEST_COPIED_BLOCK.min(len - begin);
                    let mut planes = [CODED; 8];
                    planes[0] = source + begin as u32;
                    work.add_block(target + begin, count, 1, planes);
                }
            }
            Self::Split(layout, width) => {
                layout.codes.iter().for_each(|code| work.add_code(code));
                for block in &layout.blocks {
                    work.add_split(block, *width, (source, codes), target);
                    target += block.count * width;
                }
            }
        }
    }
}

/// Returns the number of threads that handle a run.
fn lines(run: &Run) -> usize {
    match run.content {
        RunContent::Huffman { .. } => usize::from(run.count > 0),
        _ => run.count.div_ceil(LONGEST_COPIED_RUN),
    }
}

impl Work {
    fn add_code(&mut self, code: &HuffmanCode) {
        let pairs = code.weights.as_chunks::<2>().0;
        let weights = std::array::from_fn(|i| pairs[i][0] | pairs[i][1] << 4);
        self.codes.push(CodeStep { weights, max_bits: code.max_bits, unused: [0; 3] });
    }

    fn add_block(&mut self, target: usize, count: usize, width: usize, planes: [u32; 8]) {
        let (target, count, width) = (target as u64, count as u32, width as u32);
        self.blocks.push(BlockStep { target, count, width, planes });
    }

    fn add_run(&mut self, target: usize, [source, len, count, stride, code]: [u32; 5]) {
        let target = target as u64;
        self.runs.push(RunStep { target, source, len, count, stride, code, unused: 0 });
    }

    /// Adds a block of a chunk. `source` and `codes` are those of [`Coded::add`], and `target` is
    /// where the elements go in the slot.
    fn add_split(
        &mut self,
        SplitBlock { count, planes }: &SplitBlock,
        width: usize,
        (source, codes): (u32, u32),
        target: usize,
    ) {
        let (mut places, mut coded) = ([CODED; 8], 0);
        let stride = planes.iter().filter(|plane| matches!(plane, SplitPlane::Coded(_))).count();
        for (place, plane) in places.iter_mut().zip(planes) {
            match plane {
                SplitPlane::Stored(range) => *place = source + range.start as u32,
                SplitPlane::Coded(runs) => {
                    let mut to = target + (width - stride) * count + coded;
                    for run in runs {
                        self.add_line(run, (source, codes), to, stride);
                        to += run.count * stride;
                    }
                    coded += 1;
                }
            }
        }
        self.add_block(target, *count, width, places);
    }

    fn add_line(&mut self, run: &Run, (source, codes): (u32, u32), to: usize, stride: usize) {
        if let RunContent::Huffman { stream, code } = &run.content {
            if run.count > 0 {
                let at = source + stream.start as u32;
                let code = codes + *code as u32;
                let (len, count) = (stream.len() as u32, run.count as u32);
                self.add_run(to, [at, len, count, stride as u32, code]);
            }
            return;
        }
        for begin in (0..run.count).step_by(LONGEST_COPIED_RUN) {
            let count = LONGEST_COPIED_RUN.min(run.count - begin) as u32;
            let (at, code) = match &run.content {
                RunContent::Repeated(byte) => (u32::from(*byte), REPEATED),
                RunContent::Stored(range) | RunContent::Huffman { stream: range, .. } => {
                    (source + (range.start + begin) as u32, STORED)
                }
            };
            self.add_run(to + begin * stride, [at, 0, count, stride as u32, code]);
        }
    }
}

#[cfg(test)]
mod tests {
    /// Returns the 64-bit FNV-1a hash.
    fn fnv(bytes: &[u8]) -> u64 {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        })
    }

    #[test]
    fn the_ptx_is_that_of_the_kernels() {
        let hash = format!("{:016x}", fnv(include_bytes!("kernels.cu")));
        let header = include_str!("kernels.ptx").lines().nth(2).unwrap();
        assert!(header.ends_with(&hash), "run `cargo xtask ptx`: {header}, but it is {hash}");
    }
}
