// SPDX-License-Identifier: MIT OR Apache-2.0
//! The index of a `.ts` file: what it holds, and where. FORMAT.md is the normative page.

use std::collections::BTreeMap;

use twox_hash::XxHash3_64;

use crate::catalog::ByteRange;
use crate::digest::CHUNK_LEN;
use crate::error::{check_name, describe};
use crate::split::WIDTHS;
use crate::superblock::{DATA_START, Superblock};
use crate::table::{Chunk, Kept, NewRow, Table, decoded_place};
use crate::{Codec, Dtype, Error, TensorMeta};

/// Highest rank that torch has, and so the highest there is.
pub const MAX_RANK: usize = 64;

/// A tensor's bytes lie as they are, one behind the other.
const CONTIGUOUS: u8 = 0;
/// They lie in chunks, each by a codec.
const CHUNKED: u8 = 1;
/// Bytes of a chunk's entry.
const CHUNK_ENTRY: usize = 24;

/// The most bytes that a tensor takes in an index, whichever way it is kept.
pub(crate) fn most_record_bytes(name: &str, rank: usize, len: u64) -> u64 {
    (64 + name.len() + 8 * rank) as u64 + len.div_ceil(CHUNK_LEN) * CHUNK_ENTRY as u64
}

/// Writes an index, tensor by tensor.
#[derive(Debug, Default)]
pub(crate) struct IndexWriter {
    records: Vec<u8>,
    count: u32,
}

/// How a tensor's bytes were written.
#[derive(Debug)]
pub(crate) enum Written<'a> {
    Contiguous { offset: u64, sums: &'a [u64] },
    Chunked { phase: u8, chunks: &'a [Chunk] },
}

impl IndexWriter {
    pub(crate) fn push(
        &mut self,
        name: &str,
        meta: &TensorMeta,
        fingerprint: u128,
        written: &Written<'_>,
    ) {
        let out = &mut self.records;
        let begin = out.len();
        out.extend([0; 4]);
        put_text(out, name);
        let (layout, phase) = match written {
            Written::Contiguous { .. } => (CONTIGUOUS, 0),
            Written::Chunked { phase, .. } => (CHUNKED, *phase),
        };
        out.extend([meta.dtype.code(), meta.shape.len() as u8, layout, phase]);
        meta.shape.iter().for_each(|n| out.extend(n.to_le_bytes()));
        out.extend(fingerprint.to_le_bytes());
        match written {
            Written::Contiguous { offset, sums } => {
                out.extend(offset.to_le_bytes());
                sums.iter().for_each(|sum| out.extend(sum.to_le_bytes()));
            }
            Written::Chunked { chunks, .. } => {
                for chunk in *chunks {
                    out.extend(chunk.offset.to_le_bytes());
                    out.extend(chunk.len.to_le_bytes());
                    out.extend([chunk.codec.code(), chunk.width, 0, 0]);
                    out.extend(chunk.sum.to_le_bytes());
                }
            }
        }
        let len = (out.len() - begin - 4) as u32;
        out[begin..begin + 4].copy_from_slice(&len.to_le_bytes());
        self.count += 1;
    }

    pub(crate) fn finish(&self, metadata: &BTreeMap<String, String>) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.records.len() + 1024);
        out.extend(self.count.to_le_bytes());
        out.extend((metadata.len() as u32).to_le_bytes());
        out.extend(CHUNK_LEN.to_le_bytes());
        for (key, value) in metadata {
            put_text(&mut out, key);
            put_text(&mut out, value);
        }
        out.extend(&self.records);
        out
    }
}

/// Parses an index and checks every claim it makes. The rows are as the file lists them.
pub(crate) fn parse(
    file: &str,
    bytes: &[u8],
    block: &Superblock,
) -> Result<(BTreeMap<String, String>, Table), Error> {
    if XxHash3_64::oneshot(bytes) != block.index_hash {
        return Err(Error::header(file, block.index_offset, "the checksum of the index is wrong"));
    }
    let mut cursor = Cursor { file, bytes, base: block.index_offset };
    let (tensor_count, metadata_count) = (cursor.u32()?, cursor.u32()?);
    let chunk_len = cursor.u64()?;
    if chunk_len != CHUNK_LEN {
        return Err(
            cursor.wrong(format!("chunks of {chunk_len} bytes; this reader knows {CHUNK_LEN}"))
        );
    }
    let mut metadata = BTreeMap::new();
    for _ in 0..metadata_count {
        let (key, value) = (cursor.text()?, cursor.text()?);
        if metadata.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(cursor.wrong(format!("the metadata key {key:?} stands twice")));
        }
    }
    // Counts are claims: room is made as records come.
    let mut records = Records {
        table: Table::default(),
        data_end: block.index_offset,
        decoded_end: ByteRange::DECODED,
    };
    for _ in 0..tensor_count {
        let len = cursor.u32()? as usize;
        let base = cursor.base;
        let mut record = Cursor { file, bytes: cursor.take(len)?, base };
        records.read(&mut record)?;
        // A later minor version may say more than this reader knows.
        if block.minor == 0 && !record.bytes.is_empty() {
            return Err(record.wrong("bytes behind a tensor's entry"));
        }
    }
    if !cursor.bytes.is_empty() {
        return Err(cursor.wrong("bytes after the last tensor"));
    }
    check_apart(file, &records.table)?;
    Ok((metadata, records.table))
}

fn check_apart(file: &str, table: &Table) -> Result<(), Error> {
    for pair in table.extents().windows(2) {
        let ((begin, len, first), (offset, _, second)) = (pair[0], pair[1]);
        if offset < begin + len {
            let reason = format!("its data overlaps that of `{}`", table.name(first));
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

struct Records {
    table: Table,
    data_end: u64,
    /// Behind the last tensor that must be decoded.
    decoded_end: u64,
}

impl Records {
    fn read(&mut self, cursor: &mut Cursor<'_>) -> Result<(), Error> {
        let name = cursor.text()?;
        check_name(name).map_err(|reason| cursor.wrong(reason))?;
        let wrong = |cursor: &Cursor<'_>, reason: String| {
            cursor.wrong(format!("tensor `{name}`: {reason}"))
        };
        let [dtype, rank, layout, phase] = *cursor.array::<4>()?;
        let Some(dtype) = Dtype::from_code(dtype) else {
            return Err(wrong(cursor, format!("unknown dtype code {dtype}")));
        };
        if usize::from(rank) > MAX_RANK {
            return Err(wrong(cursor, format!("rank {rank}, more than {MAX_RANK}")));
        }
        let shape = cursor.take(usize::from(rank) * 8)?.as_chunks::<8>().0;
        let shape = self.table.push_shape(shape.iter().map(|n| u64::from_le_bytes(*n)));
        let Some(len) = dtype.byte_len(shape) else {
            let what = describe(dtype, shape);
            return Err(wrong(cursor, format!("{what} is no whole number of bytes below 2^64")));
        };
        let fingerprint = *cursor.array::<16>()?;
        let (offset, kept) = match (layout, phase) {
            (CONTIGUOUS, 0) => {
                let offset = cursor.u64()?;
                self.check_place(cursor, name, offset, len)?;
                let sums = cursor.entries::<8>(len)?;
                self.table.push_sums(sums.iter().map(|sum| u64::from_le_bytes(*sum)));
                (offset, Kept::Summed)
            }
            (CHUNKED, 0..64) => {
                let mut left = len;
                for entry in cursor.entries::<CHUNK_ENTRY>(len)? {
                    let chunk = chunk(entry, left.min(CHUNK_LEN))
                        .map_err(|reason| wrong(cursor, reason))?;
                    self.check_place(cursor, name, chunk.offset, u64::from(chunk.len))?;
                    self.table.push_chunk(chunk);
                    left -= left.min(CHUNK_LEN);
                }
                let offset = decoded_place(self.decoded_end, phase);
                self.decoded_end = offset + len;
                (offset, Kept::Chunked)
            }
            _ => {
                return Err(wrong(
                    cursor,
                    format!("layout {layout} with phase {phase} is unknown"),
                ));
            }
        };
        self.table.push(cursor.file, &NewRow { name, dtype, offset, len }, kept, rank, fingerprint)
    }

    fn check_place(
        &self,
        cursor: &Cursor<'_>,
        name: &str,
        offset: u64,
        len: u64,
    ) -> Result<(), Error> {
        if offset >= DATA_START && offset.checked_add(len).is_some_and(|end| end <= self.data_end) {
            return Ok(());
        }
        let reason = format!("{len} bytes at byte {offset} are not between superblocks and index");
        Err(cursor.wrong(format!("tensor `{name}`: {reason}")))
    }
}

/// A chunk's entry; `len` is that of its bytes when they are decoded.
fn chunk(entry: &[u8; CHUNK_ENTRY], len: u64) -> Result<Chunk, String> {
    let word = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().expect("8 bytes"));
    let stored = word(8) as u32;
    let (codec, width, zeros) = (entry[12], entry[13], &entry[14..16]);
    let Some(codec) = Codec::from_code(codec) else {
        return Err(format!("codec {codec}, which this reader does not know"));
    };
    let right = match codec {
        Codec::Raw => u64::from(stored) == len && width == 0,
        Codec::Split => {
            let width = usize::from(width);
            u64::from(stored) < len && WIDTHS.contains(&width) && len.is_multiple_of(width as u64)
        }
        _ => u64::from(stored) < len && width == 0,
    };
    if !right || zeros != [0; 2] {
        return Err(format!(
            "a chunk of {len} bytes is not {stored} bytes of {codec} with width {width}"
        ));
    }
    Ok(Chunk { offset: word(0), len: stored, codec, width, sum: word(16) })
}

/// Reads an index from front to back; `base` is where the rest of it begins in the file.
struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    base: u64,
}

impl<'a> Cursor<'a> {
    fn wrong(&self, reason: impl Into<String>) -> Error {
        Error::header(self.file, self.base, reason)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Error> {
        let Some((taken, rest)) = self.bytes.split_at_checked(len) else {
            return Err(self.wrong("the index ends within an entry"));
        };
        self.bytes = rest;
        self.base += len as u64;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], Error> {
        Ok(self.take(N)?.try_into().expect("as many bytes as were taken"))
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
        std::str::from_utf8(bytes).map_err(|_| self.wrong("text that is not UTF-8"))
    }

    /// As many entries as `len` bytes have chunks.
    fn entries<const N: usize>(&mut self, len: u64) -> Result<&'a [[u8; N]], Error> {
        let size =
            usize::try_from(len.div_ceil(CHUNK_LEN)).ok().and_then(|count| count.checked_mul(N));
        let size = size
            .ok_or_else(|| self.wrong(format!("{len} bytes have more chunks than there can be")))?;
        Ok(self.take(size)?.as_chunks::<N>().0)
    }
}

pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}
