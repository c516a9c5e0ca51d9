// SPDX-License-Identifier: MIT OR Apache-2.0
//! The layout of a unit in its slot, and the reads that fill it.

use ts_format::{Chunk, FileId};

use crate::unit::{PHASE_ALIGN, Phase, UnitTensor};

/// If tensors that are read in place are at most this many bytes apart in a file, they are read
/// together, with the bytes between them.
const MERGE_GAP: u64 = 4096;

/// The positions of a unit's tensors in its slot, and the reads that fill the slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SlotLayout {
    /// The size of the slot, in bytes.
    pub(crate) len: usize,
    /// The position of each tensor, indexed as in the unit.
    pub(crate) tensors: Vec<Placement>,
    /// The reads, disjoint in the slot and sorted by slot offset.
    pub(crate) reads: Vec<SlotRead>,
}

/// The position of a tensor in the slot, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// A read of a range of a file into a range of the slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotRead {
    pub(crate) file: FileId,
    pub(crate) file_offset: u64,
    pub(crate) slot_offset: usize,
    /// The length of the range in the slot, in bytes. A read in place may extend beyond the end of
    /// the file.
    pub(crate) len: usize,
    /// The number of bytes of the file that must be read.
    pub(crate) required: usize,
    pub(crate) kind: ReadKind,
}

/// How the bytes of a read reach the slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadKind {
    /// The bytes are read directly into the slot.
    InPlace,
    /// The bytes are read into a bounce buffer and copied, because their file offset does not give
    /// the tensor its phase, or because the tensor has several parts.
    Copied,
    /// A chunk is read into a bounce buffer and decoded.
    Decoded {
        chunk: Chunk,
        /// The length of the decoded chunk, in bytes.
        raw_len: usize,
        /// The number of decoded bytes before the bytes that are needed.
        skip: usize,
    },
}

/// A range of a file. If it is read in one piece, its tensors have the right phase.
struct Extent {
    file: FileId,
    begin: u64,
    end: u64,
    /// The indices of the tensors in the unit.
    tensors: Vec<usize>,
}

impl SlotLayout {
    /// Computes a layout that gives every tensor its phase and reads as much as possible in place.
    ///
    /// `alignment` is the alignment of direct reads: a power of two, at least [`PHASE_ALIGN`] and
    /// at most a page. A slot begins at a page boundary, so a range whose slot offset equals its
    /// file offset modulo `alignment` can be read in place.
    pub(crate) fn new(tensors: &[UnitTensor], alignment: usize) -> Self {
        assert!(
            alignment.is_power_of_two() && alignment >= PHASE_ALIGN,
            "the alignment {alignment} must be a power of two and at least {PHASE_ALIGN}"
        );
        let mut layout = Self {
            len: 0,
            tensors: vec![Placement { offset: 0, len: 0 }; tensors.len()],
            reads: Vec::new(),
        };
        for extent in extents(tensors) {
            layout.place_extent(tensors, &extent, alignment);
        }
        for (index, tensor) in tensors.iter().enumerate().filter(|(_, t)| !is_in_place(t)) {
            layout.place_assembled(index, tensor);
        }
        layout.len = layout.len.next_multiple_of(alignment);
        layout
    }

    /// Returns a length that is enough for a layout of these tensors with any phases, if none of
    /// the tensors can be read in place or all can, in bytes. One more block can be necessary for
    /// each tensor of a unit in which only some can.
    pub(crate) fn largest(tensors: &[UnitTensor], alignment: usize) -> usize {
        let mapped: Vec<_> =
            tensors.iter().map(|t| UnitTensor { phase: Phase::Mapped, ..t.clone() }).collect();
        // A tensor begins less than `PHASE_ALIGN` after a multiple of it.
        let padding = 2 * (PHASE_ALIGN as u64 - 1);
        let assembled = |tensor: &UnitTensor| -> u64 {
            let read = tensor.entry.parts.iter().map(|part| tensor.range_to_read(*part).len);
            read.sum::<u64>() + padding
        };
        let assembled = tensors.iter().map(assembled).sum::<u64>() as usize;
        Self::new(&mapped, alignment).len.max(assembled.next_multiple_of(alignment))
    }

    /// Returns the number of bytes that the reads transfer, from files of these lengths.
    pub(crate) fn read_bytes(&self, alignment: usize, file_len: impl Fn(FileId) -> u64) -> u64 {
        let alignment = alignment as u64;
        let transferred = |read: &SlotRead| {
            let end = (read.file_offset + read.required as u64).next_multiple_of(alignment);
            end.min(file_len(read.file)) - (read.file_offset - read.file_offset % alignment)
        };
        self.reads.iter().map(transferred).sum()
    }

    /// Places the tensors of an extent, which is read in place.
    fn place_extent(&mut self, tensors: &[UnitTensor], extent: &Extent, alignment: usize) {
        let lead = (extent.begin % alignment as u64) as usize;
        let required = lead + (extent.end - extent.begin) as usize;
        let read = SlotRead {
            file: extent.file,
            file_offset: extent.begin - lead as u64,
            slot_offset: self.len.next_multiple_of(alignment),
            len: required.next_multiple_of(alignment),
            required,
            kind: ReadKind::InPlace,
        };
        for &index in &extent.tensors {
            let part = tensors[index].entry.parts[0];
            let offset = read.slot_offset + (part.offset - read.file_offset) as usize;
            self.tensors[index] = Placement { offset, len: part.len as usize };
        }
        self.len = read.slot_offset + read.len;
        self.reads.push(read);
    }

    /// Places a tensor whose parts are copied or decoded.
    fn place_assembled(&mut self, index: usize, tensor: &UnitTensor) {
        // The bytes to read before the first byte of the tensor.
        let lead = match tensor.entry.parts[..] {
            [part] => (part.offset - tensor.range_to_read(part).offset) as usize,
            _ => 0,
        };
        let aligned = (self.len + lead).next_multiple_of(PHASE_ALIGN);
        let offset = aligned + tensor.phase_bytes();
        self.len = offset - lead;
        let mut chunks = tensor.chunks.iter();
        for part in tensor.entry.parts.iter().filter(|part| part.len > 0) {
            let part = &tensor.range_to_read(*part);
            let len = part.len as usize;
            if part.is_virtual() {
                let end = self.len + len;
                while self.len < end {
                    let part = chunks.next().expect("`Sizing::new` checked the chunks");
                    let (raw_len, skip) = (part.raw_len as usize, part.skip as usize);
                    self.reads.push(SlotRead {
                        file: part.file,
                        file_offset: part.chunk.offset,
                        slot_offset: self.len,
                        len: part.len as usize,
                        required: part.chunk.len as usize,
                        kind: ReadKind::Decoded { chunk: part.chunk, raw_len, skip },
                    });
                    self.len += part.len as usize;
                }
                continue;
            }
            self.reads.push(SlotRead {
                file: part.file,
                file_offset: part.offset,
                slot_offset: self.len,
                len,
                required: len,
                kind: ReadKind::Copied,
            });
            self.len += len;
        }
        let len = tensor.entry.parts.iter().map(|part| part.len as usize).sum();
        self.tensors[index] = Placement { offset, len };
    }
}

/// Returns whether the tensor is one uncompressed range of its file, at the phase that it needs in
/// memory.
fn is_in_place(tensor: &UnitTensor) -> bool {
    match tensor.entry.parts[..] {
        [part] => {
            !part.is_virtual() && part.offset % PHASE_ALIGN as u64 == tensor.phase_bytes() as u64
        }
        _ => false,
    }
}

/// Groups the tensors that can be read in place into ranges that are read in one piece.
fn extents(tensors: &[UnitTensor]) -> Vec<Extent> {
    let mut in_place: Vec<usize> =
        (0..tensors.len()).filter(|&i| is_in_place(&tensors[i])).collect();
    in_place.sort_by_key(|&i| {
        let part = tensors[i].range_to_read(tensors[i].entry.parts[0]);
        (part.file, part.offset)
    });
    let mut extents: Vec<Extent> = Vec::new();
    for index in in_place {
        let part = tensors[index].range_to_read(tensors[index].entry.parts[0]);
        let end = part.offset + part.len;
        match extents.last_mut() {
            Some(last) if last.file == part.file && part.offset <= last.end + MERGE_GAP => {
                last.end = last.end.max(end);
                last.tensors.push(index);
            }
            _ => extents.push(Extent {
                file: part.file,
                begin: part.offset,
                end,
                tensors: vec![index],
            }),
        }
    }
    extents
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ts_format::{ByteRange, Dtype, TensorEntry, TensorMeta};

    use super::*;

    fn tensor(parts: &[(u32, u64, u64)], phase: Phase) -> UnitTensor {
        let parts: Vec<_> = parts
            .iter()
            .map(|&(file, offset, len)| ByteRange { file: FileId(file), offset, len })
            .collect();
        let len = parts.iter().map(|p| p.len).sum();
        let meta = TensorMeta { dtype: Dtype::U8, shape: vec![len] };
        UnitTensor {
            name: "t".into(),
            entry: TensorEntry { meta, parts },
            phase,
            digest: None,
            chunks: Vec::new(),
        }
    }

    #[test]
    fn neighbours_in_a_file_are_read_together_in_place() {
        let layout = SlotLayout::new(
            &[tensor(&[(0, 10_000, 5000)], Phase::Mapped), tensor(&[(0, 9992, 8)], Phase::Mapped)],
            512,
        );
        let read = SlotRead {
            file: FileId(0),
            file_offset: 9728,
            slot_offset: 0,
            len: 5632,
            required: 5272,
            kind: ReadKind::InPlace,
        };
        assert_eq!(layout.reads, [read]);
        assert_eq!(layout.tensors[1], Placement { offset: 264, len: 8 });
        assert_eq!(layout.len, 5632);
    }

    proptest! {
        /// In every layout, tensors have their phase, reads do not overlap, in-place reads are
        /// aligned, and every byte is read.
        #[test]
        fn every_tensor_has_its_phase(
            specs in prop::collection::vec(
                (
                    prop::collection::vec((0u32..3, 0u64..100_000, 0u64..9000), 1..4),
                    prop::option::of(0u8..64),
                ),
                1..12,
            ),
            shift in 6u32..=12,
        ) {
            let alignment = 1usize << shift;
            let tensors: Vec<_> = specs
                .iter()
                .map(|(parts, phase)| tensor(parts, phase.map_or(Phase::Mapped, Phase::At)))
                .collect();
            let layout = SlotLayout::new(&tensors, alignment);
            prop_assert!(layout.len.is_multiple_of(alignment));
            let in_place = tensors.iter().filter(|tensor| is_in_place(tensor)).count();
            if in_place == 0 || in_place == tensors.len() {
                prop_assert!(layout.len <= SlotLayout::largest(&tensors, alignment));
            }
            let mut end = 0;
            for read in &layout.reads {
                prop_assert!(read.slot_offset >= end && read.required <= read.len);
                end = read.slot_offset + read.len;
                if read.kind == ReadKind::InPlace {
                    prop_assert!(
                        (read.file_offset as usize | read.slot_offset | read.len)
                            .is_multiple_of(alignment)
                    );
                }
            }
            prop_assert!(end <= layout.len);
            for (tensor, place) in tensors.iter().zip(&layout.tensors) {
                prop_assert_eq!(place.len as u64, tensor.entry.meta.byte_len().unwrap());
                prop_assert_eq!(place.offset % PHASE_ALIGN, tensor.phase_bytes());
                let mut at = place.offset;
                for part in &tensor.entry.parts {
                    let covered = part.len == 0
                        || layout.reads.iter().any(|r| {
                            r.file == part.file
                                && r.slot_offset <= at
                                && at + part.len as usize <= r.slot_offset + r.required
                                && r.file_offset + (at - r.slot_offset) as u64 == part.offset
                        });
                    prop_assert!(covered, "a read puts each part into its tensor");
                    at += part.len as usize;
                }
            }
        }
    }
}
