// SPDX-License-Identifier: MIT OR Apache-2.0
//! A compact table of tensors. Rows have a fixed size and point into shared lists of names, shapes,
//! checksums and chunks.

use twox_hash::XxHash3_64;

use crate::digest::CHUNK_LEN;
use crate::range::ByteRange;
use crate::{Codec, Dtype, Error};

/// A chunk of a compressed tensor: [`CHUNK_LEN`] bytes before encoding, or fewer for the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Offset in the file.
    pub offset: u64,
    /// Encoded length in bytes.
    pub len: u32,
    /// The codec that decodes the chunk.
    pub codec: Codec,
    /// Element width in bytes for [`Codec::Split`], else 0.
    pub width: u8,
    /// 64-bit XXH3 of the encoded bytes.
    pub checksum: u64,
}

impl Chunk {
    /// Returns whether the encoded bytes `stored` have the length and the checksum of this chunk.
    pub fn matches(&self, stored: &[u8]) -> bool {
        stored.len() == self.len as usize && XxHash3_64::oneshot(stored) == self.checksum
    }
}

/// The tensors of one or more files.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    pub(crate) rows: Vec<Row>,
    names: String,
    shapes: Vec<u64>,
    checksums: Vec<u64>,
    chunks: Vec<Chunk>,
}

/// How the bytes of a tensor are stored in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Contiguous, without checksums.
    Plain,
    /// Contiguous, with a checksum for each chunk.
    Checksummed,
    /// In encoded chunks.
    Chunked,
}

/// A tensor. Its `*_start` fields are positions in the lists of its [`Table`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    name_start: u32,
    name_len: u32,
    shape_start: u32,
    /// Position in `checksums` or `chunks`, depending on the layout.
    chunks_start: u32,
    pub(crate) file: u32,
    pub(crate) dtype: Dtype,
    rank: u8,
    pub(crate) layout: Layout,
    pub(crate) offset: u64,
    /// Decoded length in bytes.
    pub(crate) len: u64,
    /// A little-endian u128. It is stored as bytes so that a row needs no alignment of 16 bytes.
    pub(crate) fingerprint: [u8; 16],
}

impl Row {
    fn chunk_count(&self) -> usize {
        self.len.div_ceil(CHUNK_LEN) as usize
    }
}

/// The name, dtype and range of a tensor to add.
pub(crate) struct NewRow<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Table {
    pub(crate) fn name(&self, row: &Row) -> &str {
        &self.names[row.name_start as usize..][..row.name_len as usize]
    }

    pub(crate) fn shape(&self, row: &Row) -> &[u64] {
        &self.shapes[row.shape_start as usize..][..usize::from(row.rank)]
    }

    pub(crate) fn checksums(&self, row: &Row) -> Option<&[u64]> {
        let checksums = || &self.checksums[row.chunks_start as usize..][..row.chunk_count()];
        (row.layout == Layout::Checksummed).then(checksums)
    }

    pub(crate) fn chunks(&self, row: &Row) -> Option<&[Chunk]> {
        let chunks = || &self.chunks[row.chunks_start as usize..][..row.chunk_count()];
        (row.layout == Layout::Chunked).then(chunks)
    }

    /// Adds a tensor. The caller must already have pushed the tensor's shape, and its checksums or
    /// chunks.
    pub(crate) fn push(
        &mut self,
        file: &str,
        new: &NewRow<'_>,
        layout: Layout,
        rank: u8,
        fingerprint: [u8; 16],
    ) -> Result<(), Error> {
        let to_u32 = |len: usize| u32::try_from(len).map_err(|_| too_large(file));
        let count = new.len.div_ceil(CHUNK_LEN) as usize;
        let chunks_start = match layout {
            Layout::Plain => 0,
            Layout::Checksummed => to_u32(self.checksums.len() - count)?,
            Layout::Chunked => to_u32(self.chunks.len() - count)?,
        };
        let row = Row {
            name_start: to_u32(self.names.len())?,
            name_len: to_u32(new.name.len())?,
            shape_start: to_u32(self.shapes.len() - usize::from(rank))?,
            chunks_start,
            file: 0,
            dtype: new.dtype,
            rank,
            layout,
            offset: new.offset,
            len: new.len,
            fingerprint,
        };
        to_u32(self.rows.len())?;
        self.names.push_str(new.name);
        self.rows.push(row);
        Ok(())
    }

    pub(crate) fn push_shape(&mut self, shape: impl Iterator<Item = u64>) -> &[u64] {
        let begin = self.shapes.len();
        self.shapes.extend(shape);
        &self.shapes[begin..]
    }

    pub(crate) fn push_checksums(&mut self, checksums: impl Iterator<Item = u64>) {
        self.checksums.extend(checksums);
    }

    pub(crate) fn push_chunk(&mut self, chunk: Chunk) {
        self.chunks.push(chunk);
    }

    /// Appends the rows of `other`, and adds `first_file` to their file numbers. `file` names the
    /// origin of `other` in errors.
    pub(crate) fn append(
        &mut self,
        other: &Table,
        first_file: u32,
        file: &str,
    ) -> Result<(), Error> {
        self.check_append(other, file, u32::MAX as usize)?;
        let (names, shapes) = (self.names.len() as u32, self.shapes.len() as u32);
        let (checksums, chunks) = (self.checksums.len() as u32, self.chunks.len() as u32);
        self.rows.extend(other.rows.iter().map(|row| Row {
            name_start: row.name_start + names,
            shape_start: row.shape_start + shapes,
            chunks_start: match row.layout {
                Layout::Plain => 0,
                Layout::Checksummed => row.chunks_start + checksums,
                Layout::Chunked => row.chunks_start + chunks,
            },
            file: row.file + first_file,
            ..*row
        }));
        self.names.push_str(&other.names);
        self.shapes.extend(&other.shapes);
        self.checksums.extend(&other.checksums);
        self.chunks.extend(&other.chunks);
        Ok(())
    }

    /// Returns an error if a list would have more than `max` entries after appending `other`.
    fn check_append(&self, other: &Table, file: &str, max: usize) -> Result<(), Error> {
        let lens = [
            (self.rows.len(), other.rows.len()),
            (self.names.len(), other.names.len()),
            (self.shapes.len(), other.shapes.len()),
            (self.checksums.len(), other.checksums.len()),
            (self.chunks.len(), other.chunks.len()),
        ];
        let fits = |(own, added): (usize, usize)| own.saturating_add(added) <= max;
        if lens.into_iter().all(fits) { Ok(()) } else { Err(too_large(file)) }
    }

    /// Releases unused capacity.
    pub(crate) fn shrink(&mut self) {
        self.rows.shrink_to_fit();
        self.names.shrink_to_fit();
        self.shapes.shrink_to_fit();
        self.checksums.shrink_to_fit();
        self.chunks.shrink_to_fit();
    }

    /// Sorts the rows by name. Returns a duplicate name, if there is one.
    pub(crate) fn sort(&mut self) -> Option<&str> {
        let mut rows = std::mem::take(&mut self.rows);
        rows.sort_unstable_by(|a, b| self.name(a).cmp(self.name(b)));
        self.rows = rows;
        let duplicate =
            self.rows.windows(2).find(|pair| self.name(&pair[0]) == self.name(&pair[1]))?;
        Some(self.name(&duplicate[0]))
    }

    /// Returns the allocated memory in bytes, without names.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.rows.capacity() * size_of::<Row>()
            + self.shapes.capacity() * size_of::<u64>()
            + self.checksums.capacity() * size_of::<u64>()
            + self.chunks.capacity() * size_of::<Chunk>()
    }

    /// Returns the offset, length and tensor of all stored byte ranges, sorted by offset. All rows
    /// must belong to the same file.
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

fn too_large(file: &str) -> Error {
    Error::TooLarge { file: file.into() }
}

/// Returns the first virtual offset at or after `end` that has this phase (offset modulo 64).
pub(crate) fn next_virtual_offset(end: u64, phase: u8) -> u64 {
    debug_assert!(end >= ByteRange::VIRTUAL_START);
    let phase = u64::from(phase) % 64;
    (end + 63 - phase) / 64 * 64 + phase
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_append_beyond_the_limit_names_the_file() {
        let table = Table { names: "abc".into(), checksums: vec![1, 2], ..Table::default() };
        assert!(table.check_append(&table, "model.ts", 6).is_ok());
        let error = table.check_append(&table, "model.ts", 5).expect_err("the names take 6 bytes");
        assert!(error.to_string().starts_with("model.ts: the catalog would have 2^32"), "{error}");
    }
}
