// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::digest::CHUNK_LEN;
use crate::error::describe;
use crate::superblock::Superblock;
use crate::table::{Kept, Row, Table};
use crate::{CatalogReader, Chunk, Digest, Dtype, Error, TensorMeta};

/// Which file of a [`Catalog`], as an index into [`Catalog::files`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// A run of a tensor's bytes in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// The file.
    pub file: FileId,
    /// First byte, from the start of the file; or, from [`DECODED`](Self::DECODED) on, a place that
    /// bytes have that the file keeps compressed. See [`Tensor::chunks`].
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl ByteRange {
    /// Where the places begin of bytes that are not in the file as they are. They lie there one
    /// behind the other, each tensor at its own phase, so that a part of them is named as a part of
    /// any bytes is.
    pub const DECODED: u64 = 1 << 63;

    /// Whether these bytes must be decoded.
    pub fn is_encoded(&self) -> bool {
        self.offset >= Self::DECODED
    }
}

/// A file that a catalog refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileEntry {
    /// Name as the reader asked for it.
    pub name: String,
    /// Length in bytes when its header was read.
    pub len: u64,
    /// What the header says of the file as a whole (`__metadata__`).
    pub metadata: BTreeMap<String, String>,
    /// Of a `.ts` file.
    pub(crate) superblock: Option<Superblock>,
}

impl FileEntry {
    /// How often a `.ts` file was written to: 1 when it is new, one more for each append. `None`
    /// for other files.
    pub fn generation(&self) -> Option<u64> {
        self.superblock.map(|block| block.generation)
    }

    /// Where the superblock is that counts, of a `.ts` file: 4096 bytes.
    pub fn superblock_offset(&self) -> Option<u64> {
        self.superblock.map(|block| block.offset())
    }

    /// Bytes of the file that may count: those of a `.ts` file end with its index.
    pub fn used_len(&self) -> u64 {
        self.superblock.map_or(self.len, |block| block.index_offset + block.index_len)
    }
}

/// A tensor and where its bytes are, in order.
///
/// One part is a tensor that lies in a file as it is used; several parts are an *assembled* tensor,
/// as a loader makes it that stacks or concatenates what the file keeps apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Element type and shape.
    pub meta: TensorMeta,
    /// Source ranges; their lengths add up to [`TensorMeta::byte_len`].
    pub parts: Vec<ByteRange>,
}

/// Everything a checkpoint holds, without its bytes. A tensor takes some 100 bytes of memory and
/// its name.
#[derive(Debug, Clone, Default)]
pub struct Catalog {
    files: Vec<FileEntry>,
    /// Its rows are sorted by name.
    table: Table,
    /// The rows by file and offset, once somebody asks.
    by_place: OnceLock<Vec<u32>>,
}

/// Bytes that one chunk has, or some of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkPart {
    /// Where the chunk lies.
    pub file: FileId,
    /// The chunk.
    pub chunk: Chunk,
    /// How many bytes it decodes to,
    pub raw_len: u32,
    /// of which these come before those that are wanted,
    pub skip: u32,
    /// and so many are.
    pub len: u32,
}

/// A tensor of a [`Catalog`].
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    table: &'a Table,
    row: &'a Row,
}

impl std::fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}`: {}", self.name(), describe(self.dtype(), self.shape()))
    }
}

impl<'a> Tensor<'a> {
    /// Its name.
    pub fn name(&self) -> &'a str {
        self.table.name(self.row)
    }

    /// Its element type.
    pub fn dtype(&self) -> Dtype {
        self.row.dtype
    }

    /// Its elements along each dimension, outermost first; empty for a scalar.
    pub fn shape(&self) -> &'a [u64] {
        self.table.shape(self.row)
    }

    /// Its element type and shape.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta { dtype: self.dtype(), shape: self.shape().to_vec() }
    }

    /// Its bytes, where they lie or, if they must be decoded, where they are thought to lie.
    pub fn range(&self) -> ByteRange {
        ByteRange { file: FileId(self.row.file), offset: self.row.offset, len: self.row.len }
    }

    /// The chunks that its bytes are kept in, if they are not kept as they are.
    pub fn chunks(&self) -> Option<&'a [Chunk]> {
        self.table.chunks(self.row)
    }

    /// The checksums of its bytes, for each chunk of them, where it is kept as it is and the file
    /// has them: `.ts` does, safetensors does not.
    pub fn sums(&self) -> Option<&'a [u64]> {
        self.table.sums(self.row)
    }

    /// Names its content, wherever it lies and however it is kept, if the file has that: see
    /// [`tensor_fingerprint`](crate::tensor_fingerprint).
    pub fn fingerprint(&self) -> Option<u128> {
        match self.row.kept {
            Kept::Plain => None,
            Kept::Summed | Kept::Chunked => Some(u128::from_le_bytes(self.row.fingerprint)),
        }
    }

    /// Bytes that it takes in the file.
    pub fn stored_bytes(&self) -> u64 {
        match self.chunks() {
            None => self.row.len,
            Some(chunks) => chunks.iter().map(|chunk| u64::from(chunk.len)).sum(),
        }
    }

    /// Where its first byte lies in the file, however it is kept.
    pub fn stored_at(&self) -> u64 {
        self.chunks()
            .and_then(|chunks| chunks.first())
            .map_or(self.row.offset, |chunk| chunk.offset)
    }

    /// The same on its own.
    pub fn entry(&self) -> TensorEntry {
        TensorEntry { meta: self.meta(), parts: vec![self.range()] }
    }
}

impl Catalog {
    pub(crate) fn new(files: Vec<FileEntry>, table: Table) -> Self {
        Self { files, table, by_place: OnceLock::new() }
    }

    /// Reads a file that is in memory: safetensors or `.ts`, whichever its first bytes say. `name`
    /// is what errors call it.
    ///
    /// # Errors
    /// As [`CatalogReader::feed`].
    pub fn from_bytes(name: &str, file: &[u8]) -> Result<Self, Error> {
        Self::read(CatalogReader::single(name), file)
    }

    /// As [`from_bytes`](Self::from_bytes), by a [lenient](CatalogReader::lenient) reader.
    ///
    /// # Errors
    /// As [`CatalogReader::feed`].
    pub fn from_bytes_lenient(name: &str, file: &[u8]) -> Result<Self, Error> {
        Self::read(CatalogReader::single(name).lenient(), file)
    }

    fn read(mut reader: CatalogReader, file: &[u8]) -> Result<Self, Error> {
        while let Some(need) = reader.need() {
            let end = need.offset.saturating_add(need.len).min(file.len() as u64) as usize;
            reader.feed(&file[(need.offset as usize).min(end)..end], file.len() as u64)?;
        }
        reader.finish()
    }

    /// Bytes of memory that it takes beside the names and the files' metadata.
    pub fn heap_bytes(&self) -> usize {
        self.table.heap_bytes()
            + self.by_place.get().map_or(0, |order| order.capacity() * size_of::<u32>())
    }

    /// The files, in the order of their [`FileId`]s.
    pub fn files(&self) -> &[FileEntry] {
        &self.files
    }

    /// All tensors, in the order of their names.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.table.rows.iter().map(|row| Tensor { table: &self.table, row })
    }

    /// All tensors, in the order in which they lie in the files, however they are kept.
    pub fn tensors_by_place(&self) -> Vec<Tensor<'_>> {
        let mut tensors: Vec<_> = self.tensors().collect();
        tensors.sort_by_key(|tensor| (tensor.row.file, tensor.stored_at(), tensor.row.len));
        tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let found = self.table.rows.binary_search_by(|row| self.table.name(row).cmp(name)).ok()?;
        Some(Tensor { table: &self.table, row: &self.table.rows[found] })
    }

    /// The tensor with this name.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`], naming the files that were looked at.
    pub fn require(&self, name: &str) -> Result<Tensor<'_>, Error> {
        self.tensor(name).ok_or_else(|| {
            let names: Vec<&str> = self.files.iter().map(|f| f.name.as_str()).collect();
            Error::NoSuchTensor { tensor: name.into(), files: names.join(", ") }
        })
    }

    /// The tensor whose bytes have this range among them.
    pub fn tensor_at(&self, range: ByteRange) -> Option<Tensor<'_>> {
        let rows = &self.table.rows;
        let by_place = self.by_place.get_or_init(|| {
            let mut order: Vec<u32> =
                (0..rows.len() as u32).filter(|&i| rows[i as usize].len > 0).collect();
            order.sort_unstable_by_key(|&i| (rows[i as usize].file, rows[i as usize].offset));
            order
        });
        let place = (range.file.0, range.offset);
        let behind = by_place
            .partition_point(|&i| (rows[i as usize].file, rows[i as usize].offset) <= place);
        let row = &rows[*by_place.get(behind.checked_sub(1)?)? as usize];
        let end = range.offset.checked_add(range.len)?;
        let within = row.file == range.file.0 && end <= row.offset + row.len;
        within.then_some(Tensor { table: &self.table, row })
    }

    /// What bytes that are kept compressed are decoded from, in their order; nothing if they are
    /// not kept so.
    pub fn chunk_parts(&self, range: ByteRange) -> impl Iterator<Item = ChunkPart> + '_ {
        let tensor = self.tensor_at(range).filter(|_| range.is_encoded() && range.len > 0);
        tensor.into_iter().flat_map(move |tensor| {
            let (whole, chunks) = (tensor.range(), tensor.chunks().unwrap_or_default());
            let (first, last) =
                (range.offset - whole.offset, range.offset - whole.offset + range.len - 1);
            let wanted = first / CHUNK_LEN..=last / CHUNK_LEN;
            wanted.map(move |index| {
                let begin = index * CHUNK_LEN;
                let raw_len = CHUNK_LEN.min(whole.len - begin);
                let skip = first.saturating_sub(begin);
                let len = (last + 1 - begin).min(raw_len) - skip;
                let (file, chunk) = (range.file, chunks[index as usize]);
                ChunkPart {
                    file,
                    chunk,
                    raw_len: raw_len as u32,
                    skip: skip as u32,
                    len: len as u32,
                }
            })
        })
    }

    /// The checksums of exactly this range, where it is of a tensor that the file keeps as it is,
    /// and has them of: it begins where a chunk does, and ends with one or with the tensor.
    pub fn digest(&self, range: ByteRange) -> Option<Digest> {
        let tensor = self.tensor_at(range)?;
        let begin = range.offset - tensor.range().offset;
        let at_end = begin + range.len == tensor.range().len;
        if !begin.is_multiple_of(CHUNK_LEN) || !(at_end || range.len.is_multiple_of(CHUNK_LEN)) {
            return None;
        }
        let first = (begin / CHUNK_LEN) as usize;
        let count = range.len.div_ceil(CHUNK_LEN) as usize;
        Some(Digest::from_chunks(tensor.sums()?[first..first + count].to_vec()))
    }

    /// This catalog and another as one. The other's files come behind its own, and its tensors take
    /// the place of those of the same name.
    ///
    /// # Errors
    /// [`Error::TooLarge`] when they are more than one catalog holds.
    pub fn overlaid(self, other: Catalog) -> Result<Catalog, Error> {
        let (mut files, mut table) = (self.files, self.table);
        let kept = table.rows.len();
        table.append(&other.table, files.len() as u32)?;
        files.extend(other.files);
        let added = table.rows.split_off(kept);
        let mine = std::mem::take(&mut table.rows);
        let (mut mine, mut added) = (mine.into_iter().peekable(), added.into_iter().peekable());
        // Both are sorted.
        loop {
            let order = match (mine.peek(), added.peek()) {
                (None, None) => break,
                (Some(_), None) => std::cmp::Ordering::Less,
                (None, Some(_)) => std::cmp::Ordering::Greater,
                (Some(a), Some(b)) => table.name(a).cmp(table.name(b)),
            };
            if order.is_eq() {
                mine.next();
            }
            table.rows.extend(if order.is_lt() { mine.next() } else { added.next() });
        }
        Ok(Self::new(files, table))
    }

    /// Describes a tensor made of ranges of this catalog's files, laid one behind the other.
    ///
    /// # Errors
    /// [`Error::BadAssembly`] when a range leaves its file or the ranges do not add up to `meta`.
    pub fn assemble(
        &self,
        name: &str,
        meta: TensorMeta,
        parts: Vec<ByteRange>,
    ) -> Result<TensorEntry, Error> {
        let bad = |reason: String| Error::BadAssembly { tensor: name.into(), reason };
        let mut total = 0u64;
        for part in &parts {
            let file = self.files.get(part.file.0 as usize);
            let file =
                file.ok_or_else(|| bad(format!("file {} is not in the catalog", part.file.0)))?;
            let end = part.offset.checked_add(part.len);
            let within = match part.is_encoded() {
                false => end.is_some_and(|end| end <= file.len),
                true => part.len == 0 || self.tensor_at(*part).is_some(),
            };
            if !within {
                return Err(bad(format!(
                    "{} bytes at {} leave {} of {} bytes",
                    part.len, part.offset, file.name, file.len
                )));
            }
            total =
                total.checked_add(part.len).ok_or_else(|| bad("more than 2^64 bytes".into()))?;
        }
        if meta.byte_len() != Some(total) {
            return Err(bad(format!(
                "its {} parts hold {total} bytes, {} needs {:?}",
                parts.len(),
                describe(meta.dtype, &meta.shape),
                meta.byte_len()
            )));
        }
        Ok(TensorEntry { meta, parts })
    }
}
