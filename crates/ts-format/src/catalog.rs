// SPDX-License-Identifier: MIT OR Apache-2.0
use std::sync::OnceLock;

use crate::digest::CHUNK_LEN;
use crate::error::describe;
use crate::range::{ByteRange, FileId};
use crate::superblock::Superblock;
use crate::table::{Layout, Row, Table};
use crate::{Chunk, Digest, Dtype, Error, Metadata, TensorMeta};

/// A file of a [`Catalog`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileEntry {
    /// Name of the file, as in [`ReadRequest::file`](crate::ReadRequest::file).
    pub name: String,
    /// Length in bytes at the time when its header was read.
    pub len: u64,
    /// Metadata of the file as a whole (`__metadata__` in safetensors).
    pub metadata: Metadata,
    /// The active superblock, for `.ts` files.
    pub(crate) superblock: Option<Superblock>,
}

impl FileEntry {
    /// Returns the generation of a `.ts` file, or `None` for other files. The generation of a new
    /// file is 1, and each append adds 1. In an unfinished file, each checkpoint adds 1.
    pub fn generation(&self) -> Option<u64> {
        self.superblock.map(|block| block.generation)
    }

    /// Returns the offset of the active superblock of a `.ts` file, or `None` for other files. A
    /// superblock has 4096 bytes.
    pub fn superblock_offset(&self) -> Option<u64> {
        self.superblock.map(|block| block.offset())
    }

    /// Returns the length of the used part of the file in bytes. In a `.ts` file, this part ends
    /// with the active index, and later bytes are ignored.
    pub fn used_len(&self) -> u64 {
        self.superblock.map_or(self.len, |block| block.index_offset + block.index_len)
    }
}

/// The type of a tensor and the ranges of its bytes, in order.
///
/// A tensor of a file has one part. An *assembled* tensor, which [`Catalog::assemble`] returns, may
/// have several. Loaders use assembled tensors to stack or concatenate the tensors of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Element type and shape.
    pub meta: TensorMeta,
    /// Ranges of the bytes. Their lengths add up to [`TensorMeta::byte_len`].
    pub parts: Vec<ByteRange>,
}

/// The files and tensors of a checkpoint, without data. Each tensor takes about 100 bytes of
/// memory, plus its name. In a `.ts` file, each chunk of [`CHUNK_LEN`] bytes takes 8 more bytes of
/// memory, or 24 if the tensor is compressed.
///
/// ```
/// use ts_format::{Catalog, ContainerWriter, Dtype, TensorMeta};
///
/// let mut writer = ContainerWriter::new(Default::default());
/// writer.begin("empty", TensorMeta { dtype: Dtype::F32, shape: vec![0, 4] }, None)?;
/// let tail = writer.finish()?;
/// let file = [tail.superblocks, tail.index].concat();
///
/// let catalog = Catalog::from_bytes("model.ts", &file)?;
/// assert_eq!(catalog.require("empty")?.shape(), [0, 4]);
/// assert!(catalog.tensor("other").is_none());
/// # Ok::<(), ts_format::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Catalog {
    files: Vec<FileEntry>,
    /// Sorted by name.
    table: Table,
    /// Rows that have data, sorted by file and offset. Computed on first use.
    by_offset: OnceLock<Vec<u32>>,
}

/// A range of the decoded bytes of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkPart {
    /// The file that contains the chunk.
    pub file: FileId,
    /// The chunk that contains the range.
    pub chunk: Chunk,
    /// Decoded length of the whole chunk in bytes.
    pub raw_len: u32,
    /// Offset of the range in the decoded chunk.
    pub skip: u32,
    /// Length of the range in bytes.
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
    /// Returns the name, which is unique in the catalog.
    pub fn name(&self) -> &'a str {
        self.table.name(self.row)
    }

    /// Returns the element type.
    pub fn dtype(&self) -> Dtype {
        self.row.dtype
    }

    /// Returns the length of each dimension in elements, outermost first; empty for a scalar.
    pub fn shape(&self) -> &'a [u64] {
        self.table.shape(self.row)
    }

    /// Returns the element type and shape.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta { dtype: self.dtype(), shape: self.shape().to_vec() }
    }

    /// Returns the range of the tensor's bytes in its file. For a compressed tensor, returns its
    /// virtual range (see [`ByteRange::VIRTUAL_START`]).
    pub fn range(&self) -> ByteRange {
        ByteRange { file: FileId(self.row.file), offset: self.row.offset, len: self.row.len }
    }

    /// Returns the chunks if the tensor is compressed, else `None`.
    pub fn chunks(&self) -> Option<&'a [Chunk]> {
        self.table.chunks(self.row)
    }

    /// Returns the checksums of an uncompressed tensor, one for each [`CHUNK_LEN`] bytes.
    ///
    /// Returns `None` for compressed tensors, because their [chunks](Self::chunks) contain the
    /// checksums. Also returns `None` for tensors of safetensors files, which have no checksums.
    pub fn checksums(&self) -> Option<&'a [u64]> {
        self.table.checksums(self.row)
    }

    /// Returns the [fingerprint](crate::tensor_fingerprint), which identifies the tensor's content.
    /// Returns `None` for tensors of safetensors files.
    pub fn fingerprint(&self) -> Option<u128> {
        match self.row.layout {
            Layout::Plain => None,
            Layout::Checksummed | Layout::Chunked => {
                Some(u128::from_le_bytes(self.row.fingerprint))
            }
        }
    }

    /// Returns the number of bytes that the tensor's data takes in the file, after compression.
    pub fn stored_len(&self) -> u64 {
        match self.chunks() {
            None => self.row.len,
            Some(chunks) => chunks.iter().map(|chunk| u64::from(chunk.len)).sum(),
        }
    }

    /// Returns the offset of the tensor's first stored byte in the file. For an empty compressed
    /// tensor, returns its virtual offset.
    pub fn stored_offset(&self) -> u64 {
        self.chunks()
            .and_then(|chunks| chunks.first())
            .map_or(self.row.offset, |chunk| chunk.offset)
    }

    /// Returns the type and range of this tensor as an owned value.
    pub fn entry(&self) -> TensorEntry {
        TensorEntry { meta: self.meta(), parts: vec![self.range()] }
    }
}

impl Catalog {
    pub(crate) fn new(files: Vec<FileEntry>, table: Table) -> Self {
        Self { files, table, by_offset: OnceLock::new() }
    }

    /// Returns the heap memory of the tensors in bytes, without their names.
    pub fn heap_bytes(&self) -> usize {
        self.table.heap_bytes()
            + self.by_offset.get().map_or(0, |order| order.capacity() * size_of::<u32>())
    }

    /// Returns the files, in the order of their [`FileId`]s.
    pub fn files(&self) -> &[FileEntry] {
        &self.files
    }

    /// Returns all tensors, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.table.rows.iter().map(|row| Tensor { table: &self.table, row })
    }

    /// Returns all tensors, sorted by file and [`Tensor::stored_offset`].
    pub fn tensors_by_offset(&self) -> Vec<Tensor<'_>> {
        let mut tensors: Vec<_> = self.tensors().collect();
        tensors.sort_by_key(|tensor| (tensor.row.file, tensor.stored_offset(), tensor.row.len));
        tensors
    }

    /// Returns the tensor with this name, if it exists.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let found = self.table.rows.binary_search_by(|row| self.table.name(row).cmp(name)).ok()?;
        Some(Tensor { table: &self.table, row: &self.table.rows[found] })
    }

    /// Returns the tensor with this name.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchTensor`] if it does not exist.
    pub fn require(&self, name: &str) -> Result<Tensor<'_>, Error> {
        self.tensor(name).ok_or_else(|| {
            let names: Vec<&str> = self.files.iter().map(|f| f.name.as_str()).collect();
            Error::NoSuchTensor { tensor: name.into(), files: names.join(", ") }
        })
    }

    /// Returns the tensor that contains the whole range, if there is one.
    pub fn tensor_containing(&self, range: ByteRange) -> Option<Tensor<'_>> {
        let rows = &self.table.rows;
        let by_offset = self.by_offset.get_or_init(|| {
            let mut order: Vec<u32> =
                (0..rows.len() as u32).filter(|&i| rows[i as usize].len > 0).collect();
            order.sort_unstable_by_key(|&i| (rows[i as usize].file, rows[i as usize].offset));
            order
        });
        let start = (range.file.0, range.offset);
        let next = by_offset
            .partition_point(|&i| (rows[i as usize].file, rows[i as usize].offset) <= start);
        let row = &rows[*by_offset.get(next.checked_sub(1)?)? as usize];
        let end = range.offset.checked_add(range.len)?;
        let within = row.file == range.file.0 && end <= row.offset + row.len;
        within.then_some(Tensor { table: &self.table, row })
    }

    /// Resolves a virtual range to parts of chunks, in order. The iterator is empty if the range is
    /// empty, not virtual, or not within one tensor.
    pub fn chunk_parts(&self, range: ByteRange) -> impl Iterator<Item = ChunkPart> + '_ {
        let tensor = self.tensor_containing(range).filter(|_| range.is_virtual() && range.len > 0);
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

    /// Returns the checksums of the chunks in a range.
    ///
    /// Returns `None` unless the range consists of whole chunks of an uncompressed tensor of a
    /// `.ts` file. Only the last chunk of the tensor may be shorter than [`CHUNK_LEN`].
    pub fn digest(&self, range: ByteRange) -> Option<Digest> {
        let tensor = self.tensor_containing(range)?;
        let begin = range.offset - tensor.range().offset;
        let at_end = begin + range.len == tensor.range().len;
        if !begin.is_multiple_of(CHUNK_LEN) || !(at_end || range.len.is_multiple_of(CHUNK_LEN)) {
            return None;
        }
        let first = (begin / CHUNK_LEN) as usize;
        let count = range.len.div_ceil(CHUNK_LEN) as usize;
        Some(Digest::from_chunks(tensor.checksums()?[first..first + count].to_vec()))
    }

    /// Returns the smallest range of whole chunks that contains `range`, and the checksums of these
    /// chunks. A chunk can be verified only as a whole.
    ///
    /// Returns `None` unless the range is within one uncompressed tensor of a `.ts` file.
    pub fn digest_around(&self, range: ByteRange) -> Option<(ByteRange, Digest)> {
        let whole = self.tensor_containing(range)?.range();
        let begin = (range.offset - whole.offset) / CHUNK_LEN * CHUNK_LEN;
        let end = (range.offset - whole.offset + range.len).next_multiple_of(CHUNK_LEN);
        let len = end.min(whole.len) - begin;
        let around = ByteRange { file: range.file, offset: whole.offset + begin, len };
        Some((around, self.digest(around)?))
    }

    /// Merges `other` into this catalog. The files of `other` are appended, and its tensors replace
    /// those of the same name.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if the result would exceed the limits of a catalog.
    pub fn merge(self, other: Catalog) -> Result<Catalog, Error> {
        let (mut files, mut table) = (self.files, self.table);
        let own_len = table.rows.len();
        let added_names: Vec<&str> = other.files.iter().map(|file| file.name.as_str()).collect();
        table.append(&other.table, files.len() as u32, &added_names.join(", "))?;
        files.extend(other.files);
        let added = table.rows.split_off(own_len);
        let own = std::mem::take(&mut table.rows);
        let (mut own, mut added) = (own.into_iter().peekable(), added.into_iter().peekable());
        // Both lists are sorted by name, and so must be the result.
        loop {
            let order = match (own.peek(), added.peek()) {
                (None, None) => break,
                (Some(_), None) => std::cmp::Ordering::Less,
                (None, Some(_)) => std::cmp::Ordering::Greater,
                (Some(a), Some(b)) => table.name(a).cmp(table.name(b)),
            };
            if order.is_eq() {
                own.next();
            }
            table.rows.extend(if order.is_lt() { own.next() } else { added.next() });
        }
        Ok(Self::new(files, table))
    }

    /// Returns the ranges of `newer` with the bytes that `parts` have in this catalog: the same
    /// parts of the tensors with the same names.
    ///
    /// # Errors
    /// - [`Error::NoSuchTensor`] if `newer` lacks a tensor.
    /// - [`Error::BadTensor`] if a tensor has another dtype or shape there.
    /// - [`Error::BadAssembly`] if a part has bytes that belong to no tensor.
    pub fn translate(&self, parts: &[ByteRange], newer: &Catalog) -> Result<Vec<ByteRange>, Error> {
        let mut translated = Vec::with_capacity(parts.len());
        for part in parts {
            let (mut at, end) = (part.offset, part.offset.saturating_add(part.len));
            if part.len == 0 {
                translated.push(ByteRange { file: FileId(0), offset: 0, len: 0 });
            }
            while at < end {
                let first = ByteRange { file: part.file, offset: at, len: 1 };
                let tensor = self.tensor_containing(first).ok_or_else(|| Error::BadAssembly {
                    tensor: String::new(),
                    reason: format!("byte {at} of file {} belongs to no tensor", part.file.0),
                })?;
                let (old, new) = (tensor.range(), newer.require(tensor.name())?);
                let (found, wanted) = (new.meta(), tensor.meta());
                if found != wanted {
                    return Err(Error::BadTensor {
                        file: newer.files[new.range().file.0 as usize].name.clone(),
                        tensor: tensor.name().into(),
                        offset: new.stored_offset(),
                        reason: format!(
                            "it has another type than before (expected {}, got {})",
                            describe(wanted.dtype, &wanted.shape),
                            describe(found.dtype, &found.shape)
                        ),
                    });
                }
                let len = end.min(old.offset + old.len) - at;
                let offset = new.range().offset + (at - old.offset);
                translated.push(ByteRange { file: new.range().file, offset, len });
                at += len;
            }
        }
        Ok(translated)
    }

    /// Describes a tensor that is the concatenation of ranges of this catalog's files. `name` is
    /// used only in error messages.
    ///
    /// # Errors
    /// Returns [`Error::BadAssembly`] if a range is not within its file, a virtual range is not
    /// within one compressed tensor, or the ranges do not add up to the size of `meta`.
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
            let file = file.ok_or_else(|| {
                let (index, count) = (part.file.0, self.files.len());
                bad(format!("the catalog has no file with index {index} (it has {count} files)"))
            })?;
            let end = part.offset.checked_add(part.len);
            let within = match part.is_virtual() {
                false => end.is_some_and(|end| end <= file.len),
                true => part.len == 0 || self.tensor_containing(*part).is_some(),
            };
            if !within {
                let range = format!("the range of {} bytes at byte {}", part.len, part.offset);
                return Err(bad(match part.is_virtual() {
                    false => format!("{range} is not within {} ({} bytes)", file.name, file.len),
                    true => format!("{range} is not within one compressed tensor of {}", file.name),
                }));
            }
            total = total
                .checked_add(part.len)
                .ok_or_else(|| bad("its parts add up to 2^64 bytes or more".into()))?;
        }
        if meta.byte_len() != Some(total) {
            let what = describe(meta.dtype, &meta.shape);
            return Err(bad(match meta.byte_len() {
                Some(len) => format!("{what} has {len} bytes, but its parts add up to {total}"),
                None => format!("the size of {what} is not a whole number of bytes below 2^61"),
            }));
        }
        Ok(TensorEntry { meta, parts })
    }
}
