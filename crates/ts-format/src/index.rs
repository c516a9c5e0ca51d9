// SPDX-License-Identifier: MIT OR Apache-2.0
//! The index of a `.ts` file. It lists the tensors and their locations. FORMAT.md is normative.

use indexmap::IndexMap;
use twox_hash::XxHash3_64;

use crate::digest::CHUNK_LEN;
use crate::error::{check_name, describe};
use crate::range::ByteRange;
use crate::split::WIDTHS;
use crate::superblock::{DATA_START, Superblock};
use crate::table::{Chunk, Layout, NewRow, Table, next_virtual_offset};
use crate::{Codec, Dtype, Error, Metadata, TensorMeta};

/// Maximum rank of a tensor, as in PyTorch.
pub const MAX_RANK: usize = 64;

/// Layout code of a tensor that is stored contiguously and uncompressed.
const CONTIGUOUS: u8 = 0;
/// Layout code of a tensor that is stored in encoded chunks.
const CHUNKED: u8 = 1;
/// Length of a chunk entry in bytes.
const CHUNK_ENTRY: usize = 24;

/// Returns an upper bound on the length of a tensor's record in bytes, for any layout.
pub(crate) fn max_record_len(name: &str, rank: usize, len: u64) -> u64 {
    (64 + name.len() + 8 * rank) as u64 + len.div_ceil(CHUNK_LEN) * CHUNK_ENTRY as u64
}

/// A builder of an index, to which tensors are added one by one.
#[derive(Debug, Default)]
pub(crate) struct IndexWriter {
    records: Vec<u8>,
    count: u32,
}

/// The location and encoding of a tensor's bytes.
#[derive(Debug)]
pub(crate) enum Placement<'a> {
    Contiguous { offset: u64, checksums: &'a [u64] },
    Chunked { phase: u8, chunks: &'a [Chunk] },
}

impl IndexWriter {
    pub(crate) fn push(
        &mut self,
        name: &str,
        meta: &TensorMeta,
        fingerprint: u128,
        placement: &Placement<'_>,
    ) {
        let out = &mut self.records;
        let begin = out.len();
        out.extend([0; 4]);
        put_str(out, name);
        let (layout, phase) = match placement {
            Placement::Contiguous { .. } => (CONTIGUOUS, 0),
            Placement::Chunked { phase, .. } => (CHUNKED, *phase),
        };
        out.extend([meta.dtype.code(), meta.shape.len() as u8, layout, phase]);
        meta.shape.iter().for_each(|n| out.extend(n.to_le_bytes()));
        out.extend(fingerprint.to_le_bytes());
        match placement {
            Placement::Contiguous { offset, checksums } => {
                out.extend(offset.to_le_bytes());
                checksums.iter().for_each(|checksum| out.extend(checksum.to_le_bytes()));
            }
            Placement::Chunked { chunks, .. } => {
                for chunk in *chunks {
                    out.extend(chunk.offset.to_le_bytes());
                    out.extend(chunk.len.to_le_bytes());
                    out.extend([chunk.codec.code(), chunk.width, 0, 0]);
                    out.extend(chunk.checksum.to_le_bytes());
                }
            }
        }
        let len = (out.len() - begin - 4) as u32;
        out[begin..begin + 4].copy_from_slice(&len.to_le_bytes());
        self.count += 1;
    }

    pub(crate) fn finish(&self, metadata: &Metadata) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.records.len() + 1024);
        out.extend(self.count.to_le_bytes());
        let entries = metadata.stored();
        out.extend((entries.len() as u32).to_le_bytes());
        out.extend(CHUNK_LEN.to_le_bytes());
        for (key, value) in entries {
            put_str(&mut out, key);
            put_str(&mut out, value);
        }
        out.extend(&self.records);
        out
    }
}

/// Parses and validates an index. Returns the metadata, and the tensors in the order of the index.
pub(crate) fn parse(
    file: &str,
    bytes: &[u8],
    block: &Superblock,
) -> Result<(Metadata, Table), Error> {
    if XxHash3_64::oneshot(bytes) != block.index_hash {
        return Err(Error::header(file, block.index_offset, "index checksum mismatch"));
    }
    let mut cursor = Cursor { file, bytes, base: block.index_offset };
    let (tensor_count, metadata_count) = (cursor.u32()?, cursor.u32()?);
    let chunk_len = cursor.u64()?;
    if chunk_len != CHUNK_LEN {
        return Err(
            cursor.error(format!("unsupported chunk length {chunk_len} (expected {CHUNK_LEN})"))
        );
    }
    let mut metadata = IndexMap::new();
    for _ in 0..metadata_count {
        let (key, value) = (cursor.text()?, cursor.text()?);
        if metadata.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(cursor.error(format!("duplicate metadata key {key:?}")));
        }
    }
    // `tensor_count` is untrusted, so no memory is reserved for that many tensors.
    let mut records = Records {
        table: Table::default(),
        data_end: block.index_offset,
        decoded_end: ByteRange::VIRTUAL_START,
    };
    for _ in 0..tensor_count {
        let len = cursor.u32()? as usize;
        let base = cursor.base;
        let mut record = Cursor { file, bytes: cursor.take(len)?, base };
        records.read(&mut record)?;
        // Later minor versions may append fields to a record.
        if block.minor == 0 && !record.bytes.is_empty() {
            let count = record.bytes.len();
            return Err(record.error(format!("{count} trailing bytes in the record of a tensor")));
        }
    }
    if !cursor.bytes.is_empty() {
        let count = cursor.bytes.len();
        return Err(cursor.error(format!("{count} trailing bytes after the last record")));
    }
    check_no_overlap(file, &records.table)?;
    Ok((Metadata::from_stored(metadata), records.table))
}

fn check_no_overlap(file: &str, table: &Table) -> Result<(), Error> {
    for pair in table.extents().windows(2) {
        let ((begin, len, first), (offset, _, second)) = (pair[0], pair[1]);
        if offset < begin + len {
            let reason = format!("its data overlaps the data of tensor `{}`", table.name(first));
            return Err(Error::BadTensor {
                file: file.into(),
                tensor: table.name(second).into(),
                offset,
                reason,
            });
        }
    }
    Ok(())
}

/// A parser that adds the records of tensors to a table.
struct Records {
    table: Table,
    /// Upper bound on the offsets of data in the file.
    data_end: u64,
    /// End of the virtual ranges so far; see [`ByteRange::VIRTUAL_START`].
    decoded_end: u64,
}

impl Records {
    fn read(&mut self, cursor: &mut Cursor<'_>) -> Result<(), Error> {
        let name = cursor.text()?;
        check_name(name).map_err(|reason| cursor.error(reason))?;
        let error = |cursor: &Cursor<'_>, reason: String| {
            cursor.error(format!("tensor `{name}`: {reason}"))
        };
        let [dtype, rank, layout, phase] = *cursor.array::<4>()?;
        let Some(dtype) = Dtype::from_code(dtype) else {
            let last = Dtype::ALL.len() - 1;
            return Err(error(
                cursor,
                format!("unknown dtype code {dtype} (expected 0 to {last})"),
            ));
        };
        if usize::from(rank) > MAX_RANK {
            return Err(error(cursor, format!("rank {rank} exceeds the maximum of {MAX_RANK}")));
        }
        let shape = cursor.take(usize::from(rank) * 8)?.as_chunks::<8>().0;
        let shape = self.table.push_shape(shape.iter().map(|n| u64::from_le_bytes(*n)));
        let Some(len) = dtype.byte_len(shape) else {
            let what = describe(dtype, shape);
            return Err(error(
                cursor,
                format!("the size of {what} is not a whole number of bytes below 2^61"),
            ));
        };
        let fingerprint = *cursor.array::<16>()?;
        let (offset, layout) = match (layout, phase) {
            (CONTIGUOUS, 0) => {
                let offset = cursor.u64()?;
                self.check_bounds(cursor, name, offset, len)?;
                let checksums = cursor.entries::<8>(len)?;
                self.table
                    .push_checksums(checksums.iter().map(|checksum| u64::from_le_bytes(*checksum)));
                (offset, Layout::Checksummed)
            }
            (CHUNKED, 0..64) => {
                let mut left = len;
                for entry in cursor.entries::<CHUNK_ENTRY>(len)? {
                    let chunk = parse_chunk(entry, left.min(CHUNK_LEN))
                        .map_err(|reason| error(cursor, reason))?;
                    self.check_bounds(cursor, name, chunk.offset, u64::from(chunk.len))?;
                    self.table.push_chunk(chunk);
                    left -= left.min(CHUNK_LEN);
                }
                let offset = next_virtual_offset(self.decoded_end, phase);
                self.decoded_end = offset + len;
                (offset, Layout::Chunked)
            }
            _ => {
                return Err(error(
                    cursor,
                    format!(
                        "invalid layout {layout} with phase {phase} (expected layout 0 with phase \
                         0, or layout 1 with phase 0 to 63)"
                    ),
                ));
            }
        };
        self.table.push(
            cursor.file,
            &NewRow { name, dtype, offset, len },
            layout,
            rank,
            fingerprint,
        )
    }

    fn check_bounds(
        &self,
        cursor: &Cursor<'_>,
        name: &str,
        offset: u64,
        len: u64,
    ) -> Result<(), Error> {
        if offset >= DATA_START && offset.checked_add(len).is_some_and(|end| end <= self.data_end) {
            return Ok(());
        }
        let reason = format!(
            "its range of {len} bytes at byte {offset} is not within the data of the file (bytes \
             {DATA_START}..{})",
            self.data_end
        );
        Err(cursor.error(format!("tensor `{name}`: {reason}")))
    }
}

/// Parses a chunk entry. `len` is the decoded length of the chunk in bytes.
fn parse_chunk(entry: &[u8; CHUNK_ENTRY], len: u64) -> Result<Chunk, String> {
    let word = |at: usize| {
        u64::from_le_bytes(entry[at..at + 8].try_into().expect("the slice has 8 bytes"))
    };
    let stored = word(8) as u32;
    let (codec, width, zeros) = (entry[12], entry[13], &entry[14..16]);
    let Some(codec) = Codec::from_code(codec) else {
        return Err(format!("unknown codec code {codec} (expected 0 to {})", Codec::ALL.len() - 1));
    };
    let valid = match codec {
        Codec::Raw => u64::from(stored) == len && width == 0,
        Codec::Split => {
            let width = usize::from(width);
            u64::from(stored) < len && WIDTHS.contains(&width) && len.is_multiple_of(width as u64)
        }
        _ => u64::from(stored) < len && width == 0,
    };
    if !valid || zeros != [0; 2] {
        return Err(format!(
            "invalid chunk entry (see FORMAT.md): codec {codec}, element width {width}, padding \
             {zeros:?}, {stored} encoded bytes for {len} decoded bytes"
        ));
    }
    Ok(Chunk { offset: word(0), len: stored, codec, width, checksum: word(16) })
}

/// A cursor that reads an index from front to back.
struct Cursor<'a> {
    file: &'a str,
    /// The unread rest of the index.
    bytes: &'a [u8],
    /// Offset of `bytes` in the file.
    base: u64,
}

impl<'a> Cursor<'a> {
    fn error(&self, reason: impl Into<String>) -> Error {
        Error::header(self.file, self.base, reason)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Error> {
        let Some((taken, rest)) = self.bytes.split_at_checked(len) else {
            let left = self.bytes.len();
            return Err(
                self.error(format!("the index ends early (expected {len} more bytes, got {left})"))
            );
        };
        self.bytes = rest;
        self.base += len as u64;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], Error> {
        Ok(self.take(N)?.try_into().expect("`take` returns N bytes"))
    }

    fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(*self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(*self.array()?))
    }

    fn text(&mut self) -> Result<&'a str, Error> {
        let len = self.u32()? as usize;
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map_err(|_| self.error("a name or metadata entry is not UTF-8"))
    }

    /// Takes one entry of `N` bytes for each chunk of a tensor of `len` bytes.
    fn entries<const N: usize>(&mut self, len: u64) -> Result<&'a [[u8; N]], Error> {
        let size =
            usize::try_from(len.div_ceil(CHUNK_LEN)).ok().and_then(|count| count.checked_mul(N));
        let size = size.ok_or_else(|| {
            self.error(format!("a tensor of {len} bytes has too many chunks for this platform"))
        })?;
        Ok(self.take(size)?.as_chunks::<N>().0)
    }
}

pub(crate) fn put_str(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}
