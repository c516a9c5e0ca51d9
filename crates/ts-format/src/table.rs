// SPDX-License-Identifier: MIT OR Apache-2.0
//! What files say of their tensors, in as little memory as will do: rows of one size, which point
//! into lists that all of them share.

use twox_hash::XxHash3_64;

use crate::catalog::ByteRange;
use crate::digest::CHUNK_LEN;
use crate::{Codec, Dtype, Error};

/// A piece of a tensor's bytes that the file keeps by a codec: 2^20 of them, but for the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Where it lies in the file.
    pub offset: u64,
    /// Bytes it takes there.
    pub len: u32,
    /// How it is kept.
    pub codec: Codec,
    /// For [`decode_chunk`](crate::decode_chunk).
    pub width: u8,
    /// XXH3 with 64 bits of the bytes that lie there.
    pub sum: u64,
}

impl Chunk {
    /// Whether these are the bytes that were written there.
    pub fn matches(&self, stored: &[u8]) -> bool {
        stored.len() == self.len as usize && XxHash3_64::oneshot(stored) == self.sum
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    pub(crate) rows: Vec<Row>,
    names: String,
    shapes: Vec<u64>,
    sums: Vec<u64>,
    chunks: Vec<Chunk>,
}

/// How a tensor's bytes are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    /// As they are.
    Plain,
    /// As they are, with checksums.
    Summed,
    /// In chunks.
    Chunked,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    name_at: u32,
    name_len: u32,
    shape_at: u32,
    /// Into sums or chunks.
    pieces_at: u32,
    pub(crate) file: u32,
    pub(crate) dtype: Dtype,
    rank: u8,
    pub(crate) kept: Kept,
    pub(crate) offset: u64,
    /// Of the bytes as they are used.
    pub(crate) len: u64,
    /// An u128, which would be aligned as one.
    pub(crate) fingerprint: [u8; 16],
}

impl Row {
    fn piece_count(&self) -> usize {
        self.len.div_ceil(CHUNK_LEN) as usize
    }
}

/// What is known of a tensor when it is added.
pub(crate) struct NewRow<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Table {
    pub(crate) fn name(&self, row: &Row) -> &str {
        &self.names[row.name_at as usize..][..row.name_len as usize]
    }

    pub(crate) fn shape(&self, row: &Row) -> &[u64] {
        &self.shapes[row.shape_at as usize..][..usize::from(row.rank)]
    }

    pub(crate) fn sums(&self, row: &Row) -> Option<&[u64]> {
        let sums = || &self.sums[row.pieces_at as usize..][..row.piece_count()];
        (row.kept == Kept::Summed).then(sums)
    }

    pub(crate) fn chunks(&self, row: &Row) -> Option<&[Chunk]> {
        let chunks = || &self.chunks[row.pieces_at as usize..][..row.piece_count()];
        (row.kept == Kept::Chunked).then(chunks)
    }

    /// Adds a tensor; its shape and pieces were pushed just before.
    pub(crate) fn push(
        &mut self,
        file: &str,
        new: &NewRow<'_>,
        kept: Kept,
        rank: u8,
        fingerprint: [u8; 16],
    ) -> Result<(), Error> {
        let place =
            |len: usize| u32::try_from(len).map_err(|_| Error::TooLarge { file: file.into() });
        let count = new.len.div_ceil(CHUNK_LEN) as usize;
        let pieces_at = match kept {
            Kept::Plain => 0,
            Kept::Summed => place(self.sums.len() - count)?,
            Kept::Chunked => place(self.chunks.len() - count)?,
        };
        let row = Row {
            name_at: place(self.names.len())?,
            name_len: place(new.name.len())?,
            shape_at: place(self.shapes.len() - usize::from(rank))?,
            pieces_at,
            file: 0,
            dtype: new.dtype,
            rank,
            kept,
            offset: new.offset,
            len: new.len,
            fingerprint,
        };
        place(self.rows.len())?;
        self.names.push_str(new.name);
        self.rows.push(row);
        Ok(())
    }

    pub(crate) fn push_shape(&mut self, shape: impl Iterator<Item = u64>) -> &[u64] {
        let begin = self.shapes.len();
        self.shapes.extend(shape);
        &self.shapes[begin..]
    }

    pub(crate) fn push_sums(&mut self, sums: impl Iterator<Item = u64>) {
        self.sums.extend(sums);
    }

    pub(crate) fn push_chunk(&mut self, chunk: Chunk) {
        self.chunks.push(chunk);
    }

    /// Adds another's rows, whose file 0 is this one's `first_file`.
    pub(crate) fn append(&mut self, other: &Table, first_file: u32) -> Result<(), Error> {
        let place =
            |len: usize| u32::try_from(len).map_err(|_| Error::TooLarge { file: String::new() });
        // All that comes must be within reach, not only where it begins.
        for (mine, theirs) in [
            (self.rows.len(), other.rows.len()),
            (self.names.len(), other.names.len()),
            (self.shapes.len(), other.shapes.len()),
            (self.sums.len(), other.sums.len()),
            (self.chunks.len(), other.chunks.len()),
        ] {
            place(mine + theirs)?;
        }
        let (names, shapes) = (self.names.len() as u32, self.shapes.len() as u32);
        let (sums, chunks) = (self.sums.len() as u32, self.chunks.len() as u32);
        self.rows.extend(other.rows.iter().map(|row| Row {
            name_at: row.name_at + names,
            shape_at: row.shape_at + shapes,
            pieces_at: match row.kept {
                Kept::Plain => 0,
                Kept::Summed => row.pieces_at + sums,
                Kept::Chunked => row.pieces_at + chunks,
            },
            file: row.file + first_file,
            ..*row
        }));
        self.names.push_str(&other.names);
        self.shapes.extend(&other.shapes);
        self.sums.extend(&other.sums);
        self.chunks.extend(&other.chunks);
        Ok(())
    }

    /// Gives back the room that came of growing.
    pub(crate) fn shrink(&mut self) {
        self.rows.shrink_to_fit();
        self.names.shrink_to_fit();
        self.shapes.shrink_to_fit();
        self.sums.shrink_to_fit();
        self.chunks.shrink_to_fit();
    }

    /// Sorts by name; the name that stands twice, if one does.
    pub(crate) fn sort(&mut self) -> Option<&str> {
        let mut rows = std::mem::take(&mut self.rows);
        rows.sort_unstable_by(|a, b| self.name(a).cmp(self.name(b)));
        self.rows = rows;
        let twice = self.rows.windows(2).find(|pair| self.name(&pair[0]) == self.name(&pair[1]))?;
        Some(self.name(&twice[0]))
    }

    /// Bytes of memory that it takes, names aside.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.rows.capacity() * size_of::<Row>()
            + self.shapes.capacity() * size_of::<u64>()
            + self.sums.capacity() * size_of::<u64>()
            + self.chunks.capacity() * size_of::<Chunk>()
    }

    /// What takes room in the file, in order: offset, length and the tensor it is of.
    pub(crate) fn extents(&self) -> Vec<(u64, u64, &Row)> {
        let mut extents = Vec::with_capacity(self.rows.len());
        for row in self.rows.iter().filter(|row| row.len > 0) {
            match self.chunks(row) {
                None => extents.push((row.offset, row.len, row)),
                Some(chunks) => {
                    extents.extend(chunks.iter().map(|c| (c.offset, u64::from(c.len), row)));
                }
            }
        }
        extents.sort_by_key(|extent| extent.0);
        extents
    }
}

/// The next place for bytes that are kept compressed: behind `end`, at this phase.
pub(crate) fn decoded_place(end: u64, phase: u8) -> u64 {
    debug_assert!(end >= ByteRange::DECODED);
    let phase = u64::from(phase) % 64;
    (end + 63 - phase) / 64 * 64 + phase
}
