// SPDX-License-Identifier: MIT OR Apache-2.0
//! Encodes units that are not compressed on storage, to keep them in memory compressed.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use ts_format::{CHUNK_LEN, Chunk, Codec, Compression, Dtype, Encoder, FileId};
use ts_pool::{BLOCK_ALIGN, Buffer};

use crate::image::{ImageLayout, ImagePart};
use crate::kept_image::KeptImage;
use crate::layout::{ReadKind, SlotLayout, SlotRead};
use crate::unit::UnitTensor;

/// The most bytes of a piece that are encoded to estimate the length of the unit.
const SAMPLE_BYTES: usize = 64 << 10;
/// The most pieces that are encoded to estimate the length of a unit.
const MOST_SAMPLES: usize = 8;
/// Units that are smaller than this are not worth the effort, in bytes.
const LEAST_UNIT_BYTES: usize = 1 << 20;
/// A unit is kept compressed only if this saves at least this part of its memory.
const LEAST_SAVING: usize = 32;
/// The length of a unit may exceed its estimate by this part.
const MARGIN: usize = 64;

/// The maximum memory use of a [`Coder`], in bytes.
pub(crate) const CODER_BYTES: usize = Encoder::QUICK_BYTES + OUT_BYTES;

/// The most bytes that a piece is encoded to.
const OUT_BYTES: usize = CHUNK_LEN as usize + (64 << 10);

/// Encodes pieces. Each thread needs its own coder.
#[derive(Debug)]
pub(crate) struct Coder {
    encoder: Encoder,
    out: Vec<u8>,
}

impl Default for Coder {
    fn default() -> Self {
        Self { encoder: Encoder::quick(Codec::Split), out: Vec::with_capacity(OUT_BYTES) }
    }
}

/// A range of a tensor, at most [`CHUNK_LEN`] bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    /// The range in the slot, in bytes.
    range: Range<usize>,
    /// The dtype if the piece can be encoded.
    dtype: Option<Dtype>,
    /// Where the tensor is stored, for messages.
    file: FileId,
    file_offset: u64,
}

/// The pieces of a unit that may be kept compressed.
#[derive(Debug)]
pub(crate) struct Pieces {
    pieces: Vec<Piece>,
}

impl Pieces {
    /// Divides a unit into pieces. Returns `None` if it cannot be encoded: it is small, has no
    /// floats, or is compressed on storage already.
    pub(crate) fn new(tensors: &[UnitTensor], layout: &SlotLayout) -> Option<Arc<Self>> {
        let is_decoded = |read: &SlotRead| matches!(read.kind, ReadKind::Decoded { .. });
        if layout.len < LEAST_UNIT_BYTES || layout.reads.iter().any(is_decoded) {
            return None;
        }
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order
            .sort_by_key(|&i| (layout.tensors[i].offset, std::cmp::Reverse(layout.tensors[i].len)));
        let (mut pieces, mut end) = (Vec::new(), 0);
        for i in order {
            let (place, tensor) = (layout.tensors[i], &tensors[i]);
            // Tensors may share bytes of the file, and so of the slot.
            let begin = place.offset.max(end);
            end = end.max(place.offset + place.len);
            let dtype = tensor.entry.meta.dtype;
            // A coder has too little memory for the planes of wider floats.
            let encodes = Compression::Auto.codec(dtype) == Some(Codec::Split)
                && !matches!(dtype, Dtype::F64 | Dtype::C128);
            let dtype = (encodes && begin == place.offset).then_some(dtype);
            let (file, file_offset) =
                tensor.entry.parts.first().map_or((FileId(0), 0), |part| (part.file, part.offset));
            let step = CHUNK_LEN as usize;
            let ranges = (begin..end).step_by(step).map(|at| at..(at + step).min(end));
            pieces.extend(ranges.map(|range| Piece { range, dtype, file, file_offset }));
        }
        let encoded = pieces.iter().filter(|piece| piece.dtype.is_some());
        let bytes: usize = encoded.map(|piece| piece.range.len()).sum();
        (2 * bytes >= layout.len).then(|| Arc::new(Self { pieces }))
    }

    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Estimates the memory for the unit when it is encoded, in bytes, by encoding samples of it.
    /// Also returns how many bytes it encoded.
    pub(crate) fn estimate(&self, slot: &[u8], coder: &mut Coder) -> (usize, u64) {
        let encodable: Vec<&Piece> =
            self.pieces.iter().filter(|piece| piece.dtype.is_some()).collect();
        let step = encodable.len().div_ceil(MOST_SAMPLES).max(1);
        let (mut raw, mut stored) = (0, 0);
        // Begins in the middle, because the first pieces of tensors are less typical.
        for piece in encodable.iter().skip(step / 2).step_by(step) {
            let begin = piece.range.start;
            let bytes = &slot[begin..piece.range.end.min(begin + SAMPLE_BYTES)];
            raw += bytes.len();
            stored += coder.encode(piece, bytes).0;
        }
        let all: usize = encodable.iter().map(|piece| piece.range.len()).sum();
        let rest: usize = self.pieces.iter().map(|piece| piece.range.len()).sum::<usize>() - all;
        let len = rest + (all as f64 * stored as f64 / raw.max(1) as f64) as usize;
        ((len + len / MARGIN).next_multiple_of(BLOCK_ALIGN), raw as u64)
    }
}

/// Returns whether it is worth keeping a unit of `slot_bytes` bytes compressed to `bytes` bytes.
pub(crate) fn is_worthwhile(bytes: usize, slot_bytes: usize) -> bool {
    bytes <= slot_bytes - slot_bytes / LEAST_SAVING
}

impl Coder {
    /// Encodes the bytes of a piece to `self.out`. Returns their length then, and how they are
    /// decoded.
    fn encode(&mut self, piece: &Piece, raw: &[u8]) -> (usize, ReadKind) {
        self.out.clear();
        let Some(dtype) = piece.dtype else {
            return (raw.len(), ReadKind::Copied);
        };
        let encoded = self.encoder.encode(dtype, raw, &mut self.out);
        if encoded.codec == Codec::Raw {
            return (raw.len(), ReadKind::Copied);
        }
        let chunk = Chunk {
            offset: piece.file_offset,
            len: encoded.len as u32,
            codec: encoded.codec,
            width: encoded.width,
            checksum: encoded.checksum,
        };
        (encoded.len, ReadKind::Decoded { chunk, raw_len: raw.len(), skip: 0 })
    }
}

/// A unit that is being encoded, piece by piece, on several threads.
#[derive(Debug)]
pub(crate) struct Encoding {
    slot: Buffer,
    pieces: Arc<Pieces>,
    image: Mutex<Filled>,
}

/// The pieces that were encoded so far.
#[derive(Debug)]
struct Filled {
    bytes: Buffer,
    /// The length of all pieces, in bytes. If it exceeds that of `bytes`, pieces are missing.
    len: usize,
    parts: Vec<ImagePart>,
}

/// The result of encoding a unit.
#[derive(Debug)]
pub(crate) enum Encoded {
    /// The unit in its encoded form.
    Kept(KeptImage),
    /// The unit needs more memory than was estimated: this much, in bytes.
    TooLong(usize),
}

impl Encoding {
    /// Begins to encode the unit in `slot`. `image` is the memory for the encoded form.
    pub(crate) fn new(slot: Buffer, pieces: Arc<Pieces>, image: Buffer) -> Self {
        let image = Mutex::new(Filled { bytes: image, len: 0, parts: Vec::new() });
        Self { slot, pieces, image }
    }

    /// Encodes a piece. Returns how many bytes it has.
    pub(crate) fn encode(&self, index: usize, coder: &mut Coder) -> u64 {
        let piece = &self.pieces.pieces[index];
        let raw = &self.slot[piece.range.clone()];
        let (required, kind) = coder.encode(piece, raw);
        let stored = if kind == ReadKind::Copied { raw } else { &coder.out[..] };
        let mut image = self.image.lock();
        let at = image.len;
        image.len += required;
        if let Some(target) = image.bytes.get_mut(at..at + required) {
            target.copy_from_slice(stored);
            let Piece { file, file_offset, .. } = *piece;
            let (slot_offset, len) = (piece.range.start, raw.len());
            let read = SlotRead { file, file_offset, slot_offset, len, required, kind };
            image.parts.push(ImagePart { read, at });
        }
        raw.len() as u64
    }

    /// Returns the slot, and the unit in its encoded form. Call this after all pieces were encoded.
    pub(crate) fn end(self) -> (Buffer, Encoded) {
        let Filled { bytes, len, mut parts } = self.image.into_inner();
        if parts.len() < self.pieces.len() {
            let bytes = len.next_multiple_of(BLOCK_ALIGN);
            return (self.slot, Encoded::TooLong(bytes));
        }
        parts.sort_unstable_by_key(|part| part.read.slot_offset);
        let layout = Arc::new(ImageLayout { parts, len, is_slot: false });
        (self.slot, Encoded::Kept(KeptImage::new(bytes.freeze(), layout)))
    }
}

#[cfg(test)]
mod tests {
    use ts_format::{ByteRange, TensorEntry, TensorMeta};
    use ts_pool::{Budget, HostPool};

    use super::*;
    use crate::unit::Phase;

    fn tensor(dtype: Dtype, offset: u64, len: u64) -> UnitTensor {
        let shape = vec![len / (u64::from(dtype.bits()) / 8)];
        UnitTensor {
            name: "t".into(),
            entry: TensorEntry {
                meta: TensorMeta { dtype, shape },
                parts: vec![ByteRange { file: FileId(0), offset, len }],
            },
            phase: Phase::Mapped,
            digest: None,
            chunks: Vec::new(),
        }
    }

    /// Returns values with few exponents, like weights, or random bytes.
    fn bytes(len: usize, random: bool) -> Vec<u8> {
        let mut state = 7u32;
        let mut value = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let exponent = 118 + (state >> 9 & 3);
            let weight = ((state >> 16) & 0x807f) as u16 | (exponent << 7) as u16;
            (if random { (state >> 13) as u16 } else { weight }).to_le_bytes()
        };
        (0..len / 2).flat_map(&mut value).collect()
    }

    #[test]
    fn only_units_with_floats_that_shrink_are_encoded() {
        let pieces = |tensors: &[UnitTensor]| Pieces::new(tensors, &SlotLayout::new(tensors, 512));
        assert!(pieces(&[tensor(Dtype::BF16, 0, 4096)]).is_none(), "small");
        assert!(pieces(&[tensor(Dtype::U8, 0, 2 << 20)]).is_none(), "quantised");
        let mixed = [tensor(Dtype::BF16, 0, 3 << 20), tensor(Dtype::I8, 3 << 20, 1 << 20)];
        let pieces = pieces(&mixed).unwrap();
        assert_eq!(pieces.len(), 4);
        let mut coder = Coder::default();
        let random = pieces.estimate(&bytes(4 << 20, true), &mut coder).0;
        assert!(!is_worthwhile(random, 4 << 20), "{random}");
        let estimate = pieces.estimate(&bytes(4 << 20, false), &mut coder).0;
        assert!(
            is_worthwhile(estimate, 4 << 20) && (2 << 20..7 << 19).contains(&estimate),
            "{estimate}"
        );
    }

    #[test]
    fn tensors_that_share_bytes_are_encoded_once() {
        let mut half = tensor(Dtype::F32, 1 << 20, 1 << 20);
        half.entry.parts[0].offset = 1 << 20;
        let tensors = [half, tensor(Dtype::BF16, 0, 3 << 20), tensor(Dtype::BF16, 0, 3 << 20)];
        let layout = SlotLayout::new(&tensors, 512);
        let pieces = Pieces::new(&tensors, &layout).unwrap();
        let total: usize = pieces.pieces.iter().map(|piece| piece.range.len()).sum();
        assert_eq!(total, 3 << 20);
    }

    #[test]
    fn an_image_that_does_not_fit_is_measured() {
        let tensors = [tensor(Dtype::BF16, 0, 3 << 20)];
        let pieces = Pieces::new(&tensors, &SlotLayout::new(&tensors, 512)).unwrap();
        let pool = HostPool::new(&Budget::new(16 << 20), 16 << 20).unwrap();
        let encode = |image_bytes: usize| {
            let mut slot = pool.allocate(3 << 20).unwrap();
            slot.copy_from_slice(&bytes(3 << 20, false));
            let image = pool.allocate(image_bytes).unwrap();
            let encoding = Encoding::new(slot, Arc::clone(&pieces), image);
            let mut coder = Coder::default();
            let raw: u64 = (0..pieces.len()).map(|i| encoding.encode(i, &mut coder)).sum();
            assert_eq!(raw, 3 << 20);
            encoding.end().1
        };
        let Encoded::TooLong(needed) = encode(1 << 20) else { panic!("it does not fit") };
        let Encoded::Kept(kept) = encode(needed) else { panic!("it fits") };
        assert!(kept.layout.bytes() <= needed);
        assert!(matches!(encode(needed - BLOCK_ALIGN), Encoded::TooLong(_)));
    }
}
