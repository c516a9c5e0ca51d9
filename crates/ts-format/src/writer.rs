// SPDX-License-Identifier: MIT OR Apache-2.0
//! Layout of new and appended `.ts` files. The caller does the I/O.

use std::collections::HashSet;

use twox_hash::{XxHash3_64, XxHash3_128};

use crate::codec::Encoded;
use crate::digest::{CHUNK_LEN, Digest, Digester};
use crate::error::{check_name, describe};
use crate::index::{IndexWriter, MAX_RANK, Placement, max_record_len, put_str};
use crate::sharded::MAX_INDEX_LEN;
use crate::superblock::{DATA_START, MINOR, Superblock};
use crate::table::Chunk;
use crate::{Catalog, Error, FileEntry, Metadata, Tensor, TensorMeta};

/// A tensor begins at a multiple of this many bytes, plus its phase.
const ALIGNMENT: u64 = 64;
/// Appended data begins at a multiple of this many bytes, so that a write changes no disk block
/// with active data.
const BLOCK: u64 = 4096;

/// Computes the fingerprint of a tensor, which identifies its content.
///
/// It is the 128-bit XXH3 of the dtype, the shape, and the checksums of the decoded data, one for
/// each [`CHUNK_LEN`] bytes. It does not depend on how the tensor is stored.
pub fn tensor_fingerprint(meta: &TensorMeta, digest: &Digest) -> u128 {
    let mut described = vec![meta.dtype.code(), meta.shape.len() as u8];
    described.extend(meta.shape.iter().flat_map(|n| n.to_le_bytes()));
    described.extend(digest.chunks().iter().flat_map(|checksum| checksum.to_le_bytes()));
    XxHash3_128::oneshot(&described)
}

/// Computes the fingerprint of a set of named tensors. It is the 128-bit XXH3 of their names and
/// [`tensor_fingerprint`]s, sorted by name.
pub fn fingerprint<'a>(tensors: impl IntoIterator<Item = (&'a str, u128)>) -> u128 {
    let mut tensors: Vec<_> = tensors.into_iter().collect();
    tensors.sort_by_key(|(name, _)| *name);
    let mut described = Vec::new();
    for (name, fingerprint) in tensors {
        put_str(&mut described, name);
        described.extend(fingerprint.to_le_bytes());
    }
    XxHash3_128::oneshot(&described)
}

/// A builder of the layout, index and superblocks of a `.ts` file. It does no I/O and stores no
/// tensor data: the caller writes each byte range to the offset that the writer returns.
///
/// A tensor is *pending* from the call that begins it until the next tensor begins, or until
/// [`checkpoint`](Self::checkpoint) or [`finish`](Self::finish) is called.
///
/// - For an uncompressed tensor, [`begin`](Self::begin) returns its offset, and the caller passes
///   its bytes to [`feed`](Self::feed), which computes their checksums.
/// - For a compressed tensor, call [`begin_chunked`](Self::begin_chunked). Then
///   [`push_chunk`](Self::push_chunk) returns the offset of each chunk from an
///   [`Encoder`](crate::Encoder).
/// - [`copy`](Self::copy) adds a tensor of another `.ts` file in its stored form.
/// - [`finish`](Self::finish) returns the index and the superblocks. Write the superblocks only
///   after everything else is on disk.
///
/// [`append`](Self::append) continues an existing file. It overwrites no active data; the inactive
/// superblock, written last, makes the change visible.
///
/// ```
/// use ts_format::{ContainerWriter, Dtype, TensorMeta};
///
/// let mut file = vec![0; 8192]; // the superblocks are written last
/// let mut writer = ContainerWriter::new(Default::default());
/// let offset = writer.begin("w", TensorMeta { dtype: Dtype::U8, shape: vec![3] }, None)?;
/// file.resize(offset as usize, 0);
/// file.extend(b"abc");
/// writer.feed(b"abc")?;
/// let tail = writer.finish()?;
/// file.extend(&tail.index);
/// file[..8192].copy_from_slice(&tail.superblocks);
/// # Ok::<(), ts_format::Error>(())
/// ```
#[derive(Debug)]
pub struct ContainerWriter {
    metadata: Metadata,
    index: IndexWriter,
    names: HashSet<String>,
    pending: Option<PendingTensor>,
    /// Offset of the end of the space that is assigned to data.
    end: u64,
    /// The active superblock of the existing file, if the writer appends to one.
    active: Option<Superblock>,
    /// Number of checkpoints of the file so far.
    checkpoints: u64,
}

/// A tensor that was begun and is not in the index yet.
#[derive(Debug)]
struct PendingTensor {
    name: String,
    meta: TensorMeta,
    /// Length in bytes, or `None` for a [growing](ContainerWriter::grow) tensor.
    len: Option<u64>,
    /// Number of bytes received.
    fed: u64,
    layout: PendingLayout,
}

/// How the bytes of the pending tensor are stored in the file.
#[derive(Debug)]
enum PendingLayout {
    Contiguous { offset: u64, digester: Box<Digester> },
    Chunked { phase: u8, chunks: Vec<Chunk>, raw_checksums: Vec<u64> },
}

/// The index and superblocks to write to a `.ts` file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerTail {
    /// Offset of the index in the file. The index follows the data. In a checkpoint, it follows the
    /// space that is reserved for the finished file.
    pub index_offset: u64,
    /// The encoded index.
    pub index: Vec<u8>,
    /// Offset of `superblocks` in the file: 0 for both superblocks, else the offset of the inactive
    /// superblock.
    pub superblocks_offset: u64,
    /// Both superblocks for the first write of a file, else only the inactive one. Write them only
    /// after everything else is on disk.
    pub superblocks: Vec<u8>,
}

/// The space in a file for the indexes of [checkpoints](ContainerWriter::checkpoint).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointSpace {
    /// Upper bound on the end of the data and the final index.
    data_end: u64,
    /// Upper bound on the length of the index of a checkpoint.
    index_len: u64,
}

/// A byte range to copy from one file to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRange {
    /// Offset in the source file.
    pub from: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset in the new file.
    pub to: u64,
    /// 64-bit XXH3 of the bytes.
    pub checksum: u64,
}

impl ContainerWriter {
    /// Starts a new file with this metadata.
    pub fn new(metadata: Metadata) -> Self {
        let (index, names) = (IndexWriter::default(), HashSet::new());
        Self {
            metadata,
            index,
            names,
            pending: None,
            end: DATA_START,
            active: None,
            checkpoints: 0,
        }
    }

    /// Continues an existing `.ts` file. The writer keeps the metadata of the file. It keeps a
    /// tensor if `keep` returns true for its name. The space of removed tensors is not reused.
    ///
    /// # Errors
    /// Returns [`Error::NotAppendable`] if:
    /// - the catalog does not consist of a single `.ts` file;
    /// - the file has a later minor version, whose records may have fields that this writer cannot
    ///   copy;
    /// - the generation of the file has the maximum value.
    pub fn append(catalog: &Catalog, keep: impl Fn(&str) -> bool) -> Result<Self, Error> {
        let tensors = catalog.tensors_by_offset().into_iter();
        let kept = tensors.filter(|tensor| keep(tensor.name())).collect();
        let (mut this, block) = Self::with_records(catalog, kept)?;
        if block.generation == u64::MAX {
            return Err(not_appendable(
                catalog,
                "its generation counter has the maximum value; convert the file to a new one"
                    .into(),
            ));
        }
        this.end = (block.index_offset + block.index_len).next_multiple_of(BLOCK);
        this.active = Some(block);
        Ok(this)
    }

    /// Continues an unfinished file from its last [`checkpoint`](Self::checkpoint). `catalog` is
    /// read from that file, and `order` lists its tensors in the order in which they were begun.
    /// The finished file is identical to a file that was written without interruption.
    ///
    /// # Errors
    /// Returns [`Error::NotAppendable`] if `catalog` does not consist of a single `.ts` file, or
    /// the file has a later minor version. Returns [`Error::NoSuchTensor`] if `order` has a name
    /// that `catalog` does not contain.
    pub fn resume(catalog: &Catalog, order: &[&str], metadata: Metadata) -> Result<Self, Error> {
        let kept: Result<Vec<_>, _> = order.iter().map(|name| catalog.require(name)).collect();
        let (mut this, block) = Self::with_records(catalog, kept?)?;
        let end = |tensor: Tensor<'_>| match tensor.chunks() {
            None => tensor.range().offset + tensor.range().len,
            Some(chunks) => {
                chunks.last().map_or(DATA_START, |chunk| chunk.offset + u64::from(chunk.len))
            }
        };
        this.end = catalog.tensors().map(end).max().unwrap_or(DATA_START);
        (this.metadata, this.checkpoints) = (metadata, block.generation);
        Ok(this)
    }

    /// Starts a new file with the metadata of an existing `.ts` file. To compact the existing file,
    /// add its tensors to the new one with [`copy`](Self::copy).
    ///
    /// # Errors
    /// Returns [`Error::NotAppendable`] if `catalog` does not consist of a single `.ts` file, or
    /// the file has a later minor version.
    pub fn compact(catalog: &Catalog) -> Result<Self, Error> {
        single_container(catalog).map(|(_, metadata)| Self::new(metadata.clone()))
    }

    /// Creates a writer whose index contains the tensors in `kept`, at their current locations.
    fn with_records(catalog: &Catalog, kept: Vec<Tensor<'_>>) -> Result<(Self, Superblock), Error> {
        let (block, metadata) = single_container(catalog)?;
        let mut this = Self::new(metadata.clone());
        for tensor in kept {
            let (range, phase) = (tensor.range(), (tensor.range().offset % ALIGNMENT) as u8);
            let placement = match tensor.chunks() {
                None => Placement::Contiguous {
                    offset: range.offset,
                    checksums: tensor.checksums().unwrap_or_default(),
                },
                Some(chunks) => Placement::Chunked { phase, chunks },
            };
            let fingerprint = tensor.fingerprint().unwrap_or_default();
            this.index.push(tensor.name(), &tensor.meta(), fingerprint, &placement);
            this.names.insert(tensor.name().into());
        }
        Ok((this, block))
    }

    /// Computes the space for [`checkpoint`](Self::checkpoint)s of a file that will have exactly
    /// these tensors.
    pub fn checkpoint_space<'a>(
        &self,
        tensors: impl IntoIterator<Item = (&'a str, &'a TensorMeta)>,
    ) -> CheckpointSpace {
        let metadata =
            self.metadata.iter().map(|(key, value)| (8 + key.len() + value.len()) as u64);
        let mut space =
            CheckpointSpace { data_end: DATA_START, index_len: BLOCK + metadata.sum::<u64>() };
        for (name, meta) in tensors {
            let len = meta.byte_len().unwrap_or(0);
            space.data_end = space.data_end.saturating_add(len).saturating_add(2 * ALIGNMENT);
            space.index_len += max_record_len(name, meta.shape.len(), len);
        }
        // The final index precedes the indexes of checkpoints.
        space.data_end = space.data_end.saturating_add(space.index_len).next_multiple_of(BLOCK);
        space.index_len = space.index_len.next_multiple_of(BLOCK);
        space
    }

    /// Returns the offset of the end of the space that is assigned so far. The next tensor or index
    /// begins at this offset or later.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Returns the metadata of the file. Callers may change it until [`finish`](Self::finish).
    pub fn metadata_mut(&mut self) -> &mut Metadata {
        &mut self.metadata
    }

    /// Adds an uncompressed tensor and returns the offset of its data. The offset modulo 64 is
    /// `phase`, or 0 if `None`. Pass the data to [`feed`](Self::feed).
    ///
    /// # Errors
    /// Returns [`Error::Unwritable`] if:
    /// - the name is empty, contains NUL, or is in use;
    /// - the rank exceeds 64;
    /// - the size is not a whole number of bytes below 2^61;
    /// - the file would have 2^63 bytes or more;
    /// - the previous tensor is incomplete.
    pub fn begin(&mut self, name: &str, meta: TensorMeta, phase: Option<u8>) -> Result<u64, Error> {
        let (len, phase) = self.start_tensor(name, &meta, phase)?;
        let offset = (self.end + ALIGNMENT - 1 - phase) / ALIGNMENT * ALIGNMENT + phase;
        let end = offset.checked_add(len).filter(|&end| end < 1 << 63);
        self.end =
            end.ok_or_else(|| unwritable(name, "the file would have 2^63 bytes or more".into()))?;
        let layout = PendingLayout::Contiguous { offset, digester: Box::default() };
        self.pending =
            Some(PendingTensor { name: name.into(), meta, len: Some(len), fed: 0, layout });
        Ok(offset)
    }

    /// Adds a compressed tensor. Pass its chunks to [`push_chunk`](Self::push_chunk). `phase` is
    /// the address, modulo 64, of the memory that readers decode the tensor to. `None` means 0.
    ///
    /// # Errors
    /// Returns the errors of [`begin`](Self::begin).
    pub fn begin_chunked(
        &mut self,
        name: &str,
        meta: TensorMeta,
        phase: Option<u8>,
    ) -> Result<(), Error> {
        let (len, phase) = self.start_tensor(name, &meta, phase)?;
        self.end = self.end.next_multiple_of(ALIGNMENT);
        let layout = PendingLayout::Chunked {
            phase: phase as u8,
            chunks: Vec::new(),
            raw_checksums: Vec::new(),
        };
        self.pending =
            Some(PendingTensor { name: name.into(), meta, len: Some(len), fed: 0, layout });
        Ok(())
    }

    /// Makes the length of the pending tensor depend on the bytes that it receives. Its first
    /// dimension is set when it stops being pending. If it is compressed, only its last chunk may
    /// be shorter than [`CHUNK_LEN`].
    ///
    /// # Errors
    /// Returns [`Error::Unwritable`] if:
    /// - no tensor is pending, or the pending tensor has received bytes;
    /// - the tensor is a scalar;
    /// - a row (one index of the first dimension) is empty or not a whole number of bytes.
    pub fn grow(&mut self) -> Result<(), Error> {
        let pending = self
            .pending
            .as_mut()
            .ok_or_else(|| unwritable("", "no tensor is pending; begin a tensor first".into()))?;
        if row_len(&pending.meta).is_none() || pending.fed > 0 {
            let what = describe(pending.meta.dtype, &pending.meta.shape);
            let reason = match pending.fed {
                0 => format!("{what} cannot grow: it needs rows of one or more whole bytes"),
                fed => format!("it cannot grow, because it has already received {fed} bytes"),
            };
            return Err(unwritable(&pending.name, reason));
        }
        if let PendingLayout::Contiguous { offset, .. } = pending.layout {
            self.end = offset;
        }
        pending.len = None;
        Ok(())
    }

    /// Removes the pending tensor if it is incomplete or [growing](Self::grow). A
    /// [`checkpoint`](Self::checkpoint) can then save the earlier tensors.
    pub fn discard_incomplete(&mut self) {
        let incomplete = |pending: &mut PendingTensor| pending.len != Some(pending.fed);
        if let Some(pending) = self.pending.take_if(incomplete) {
            self.names.remove(&pending.name);
        }
    }

    /// Adds a tensor of another `.ts` file in its stored form, and returns the byte ranges to copy.
    ///
    /// # Errors
    /// Returns the errors of [`begin`](Self::begin), and [`Error::Unwritable`] if the source file
    /// has no checksums.
    pub fn copy(&mut self, tensor: Tensor<'_>) -> Result<Vec<CopyRange>, Error> {
        let (name, meta, range) = (tensor.name(), tensor.meta(), tensor.range());
        let Some(fingerprint) = tensor.fingerprint() else {
            return Err(unwritable(name, "the source file has no checksums".into()));
        };
        let phase = (range.offset % ALIGNMENT) as u8;
        let ranges: Vec<CopyRange> = match tensor.chunks() {
            None => {
                let (to, checksums) = (
                    self.begin(name, meta.clone(), Some(phase))?,
                    tensor.checksums().unwrap_or_default(),
                );
                let begins = (0..range.len).step_by(CHUNK_LEN as usize);
                let ranges = begins.zip(checksums).map(|(at, &checksum)| CopyRange {
                    from: range.offset + at,
                    len: CHUNK_LEN.min(range.len - at),
                    to: to + at,
                    checksum,
                });
                self.index.push(
                    name,
                    &meta,
                    fingerprint,
                    &Placement::Contiguous { offset: to, checksums },
                );
                ranges.collect()
            }
            Some(chunks) => {
                self.begin_chunked(name, meta.clone(), Some(phase))?;
                let mut moved = chunks.to_vec();
                for chunk in &mut moved {
                    chunk.offset = self.end;
                    self.end += u64::from(chunk.len);
                }
                self.index.push(
                    name,
                    &meta,
                    fingerprint,
                    &Placement::Chunked { phase, chunks: &moved },
                );
                let pairs = chunks.iter().zip(&moved);
                let to_range = |(old, new): (&Chunk, &Chunk)| CopyRange {
                    from: old.offset,
                    len: u64::from(old.len),
                    to: new.offset,
                    checksum: old.checksum,
                };
                pairs.map(to_range).collect()
            }
        };
        self.pending = None;
        Ok(ranges)
    }

    /// Computes the checksums of the next bytes of the pending uncompressed tensor. Does not keep
    /// the bytes.
    ///
    /// # Errors
    /// Returns [`Error::Unwritable`] if the tensor would exceed its length, or no uncompressed
    /// tensor is pending.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match &mut self.pending {
            Some(PendingTensor {
                layout: PendingLayout::Contiguous { digester, .. },
                name,
                len,
                fed,
                ..
            }) => {
                if let Some(len) = len.filter(|len| bytes.len() as u64 > len - *fed) {
                    let total = *fed + bytes.len() as u64;
                    let reason = format!("received {total} bytes, more than its {len} bytes");
                    return Err(unwritable(name, reason));
                }
                digester.feed(bytes);
                *fed += bytes.len() as u64;
                Ok(())
            }
            Some(pending) => Err(unwritable(
                &pending.name,
                "it is compressed; use `push_chunk` instead of `feed`".into(),
            )),
            None => Err(unwritable("", "no tensor is pending; begin a tensor first".into())),
        }
    }

    /// Adds the next chunk of the pending compressed tensor and returns its offset, directly after
    /// the previous chunk.
    ///
    /// Before encoding, each chunk has [`CHUNK_LEN`] bytes, except that the last chunk of a tensor
    /// may be shorter. A shorter chunk therefore ends a [growing](Self::grow) tensor.
    ///
    /// # Errors
    /// Returns [`Error::Unwritable`] if the decoded length of the chunk is wrong, the tensor has
    /// all of its chunks, or no compressed tensor is pending.
    pub fn push_chunk(&mut self, encoded: &Encoded) -> Result<u64, Error> {
        match &mut self.pending {
            Some(PendingTensor {
                layout: PendingLayout::Chunked { chunks, raw_checksums, .. },
                name,
                len,
                fed,
                ..
            }) => {
                // A growing tensor may have a short chunk, which must be its last.
                let (next_len, raw_len) = (
                    len.map_or(CHUNK_LEN, |len| (len - *fed).min(CHUNK_LEN)),
                    encoded.raw_len as u64,
                );
                let fits = raw_len == next_len || (len.is_none() && raw_len < next_len);
                if raw_len == 0 || !fits || !fed.is_multiple_of(CHUNK_LEN) {
                    let least = if len.is_none() { "1 to " } else { "" };
                    let reason = if next_len == 0 {
                        format!("it already has all of its {fed} bytes; begin the next tensor")
                    } else if !fed.is_multiple_of(CHUNK_LEN) {
                        format!(
                            "a chunk shorter than {CHUNK_LEN} bytes ended it at byte {fed}; only \
                             the last chunk may be shorter"
                        )
                    } else {
                        format!(
                            "wrong chunk length (expected {least}{next_len} bytes, got {raw_len})"
                        )
                    };
                    return Err(unwritable(name, reason));
                }
                let Encoded { len, codec, width, checksum, raw_checksum, .. } = *encoded;
                let offset = self.end;
                chunks.push(Chunk { offset, len: len as u32, codec, width, checksum });
                raw_checksums.push(raw_checksum);
                *fed += raw_len;
                self.end += len as u64;
                Ok(offset)
            }
            Some(pending) => {
                let reason = "it is uncompressed; use `feed` instead of `push_chunk`".into();
                Err(unwritable(&pending.name, reason))
            }
            None => Err(unwritable("", "no tensor is pending; begin a tensor first".into())),
        }
    }

    /// Returns the index and superblocks that complete the file.
    ///
    /// # Errors
    /// Returns [`Error::Unwritable`] if the pending tensor is incomplete, if the index would exceed
    /// 256 MiB, or if the file would have 2^63 bytes or more because of a [growing](Self::grow)
    /// tensor.
    pub fn finish(mut self) -> Result<ContainerTail, Error> {
        self.end_tensor()?;
        self.tail(
            self.end,
            &self.metadata,
            self.active.map(|block| (block.generation, block.second)),
        )
    }

    /// Returns an index and superblocks that make the unfinished file readable, with the tensors so
    /// far. [`resume`](Self::resume) continues such a file.
    ///
    /// The indexes of successive checkpoints alternate between two ranges after the end of the
    /// finished file. These indexes contain `metadata` instead of the metadata of the file.
    /// `metadata` must have at most 2 KiB.
    ///
    /// # Errors
    /// Returns the errors of [`finish`](Self::finish).
    pub fn checkpoint(
        &mut self,
        space: CheckpointSpace,
        metadata: &Metadata,
    ) -> Result<ContainerTail, Error> {
        self.end_tensor()?;
        // The superblocks alternate, beginning with superblock A.
        let active = (self.checkpoints > 0)
            .then_some((self.checkpoints, self.checkpoints.is_multiple_of(2)));
        let index_offset = space.data_end.saturating_add(self.checkpoints % 2 * space.index_len);
        let tail = self.tail(index_offset, metadata, active)?;
        self.checkpoints += 1;
        Ok(tail)
    }

    /// Encodes the index and the next superblock. `active` is the generation of the active
    /// superblock, and whether it is superblock B. For `None`, encodes both superblocks.
    fn tail(
        &self,
        index_offset: u64,
        metadata: &Metadata,
        active: Option<(u64, bool)>,
    ) -> Result<ContainerTail, Error> {
        let index = self.index.finish(metadata);
        if index.len() as u64 > MAX_INDEX_LEN {
            let len = index.len();
            let reason = format!("the index would have {len} bytes (at most {MAX_INDEX_LEN})");
            return Err(unwritable("", reason));
        }
        let (index_len, index_hash) = (index.len() as u64, XxHash3_64::oneshot(&index));
        let (generation, second) =
            active.map_or((1, false), |(generation, second)| (generation + 1, !second));
        let block =
            Superblock { second, generation, minor: MINOR, index_offset, index_len, index_hash };
        let mut superblocks = block.encode();
        if active.is_none() {
            superblocks.resize(DATA_START as usize, 0);
        }
        Ok(ContainerTail { index_offset, index, superblocks_offset: block.offset(), superblocks })
    }

    /// Completes the pending tensor, validates a new one, and returns its length in bytes and its
    /// phase.
    fn start_tensor(
        &mut self,
        name: &str,
        meta: &TensorMeta,
        phase: Option<u8>,
    ) -> Result<(u64, u64), Error> {
        self.end_tensor()?;
        let bad = |reason: String| unwritable(name, reason);
        check_name(name).map_err(bad)?;
        if meta.shape.len() > MAX_RANK {
            return Err(bad(format!(
                "rank {} exceeds the maximum of {MAX_RANK}",
                meta.shape.len()
            )));
        }
        // `byte_len` already returns `None` from 2^61 bytes on.
        let len = meta.byte_len().filter(|&len| len < 1 << 62);
        let len = len.ok_or_else(|| {
            let what = describe(meta.dtype, &meta.shape);
            bad(format!("the size of {what} is not a whole number of bytes below 2^61"))
        })?;
        if !self.names.insert(name.into()) {
            return Err(bad("duplicate tensor name".into()));
        }
        Ok((len, u64::from(phase.unwrap_or(0)) % ALIGNMENT))
    }

    /// Adds the pending tensor to the index.
    fn end_tensor(&mut self) -> Result<(), Error> {
        let Some(PendingTensor { name, mut meta, len, fed, layout }) = self.pending.take() else {
            return Ok(());
        };
        match (len, row_len(&meta)) {
            (Some(len), _) if fed == len => {}
            (None, Some(row)) if fed.is_multiple_of(row) => meta.shape[0] = fed / row,
            (None, row) => {
                let row = row.unwrap_or_default();
                return Err(unwritable(
                    &name,
                    format!(
                        "received {fed} bytes, which is not a whole number of rows of {row} bytes"
                    ),
                ));
            }
            (Some(len), _) => {
                let reason = format!("incomplete data (expected {len} bytes, got {fed})");
                return Err(unwritable(&name, reason));
            }
        }
        if let (None, PendingLayout::Contiguous { offset, .. }) = (len, &layout) {
            let end = offset.checked_add(fed).filter(|&end| end < 1 << 63);
            self.end = end.ok_or_else(|| {
                unwritable(&name, "the file would have 2^63 bytes or more".into())
            })?;
        }
        match layout {
            PendingLayout::Contiguous { offset, digester } => {
                let digest = digester.finish();
                let placement = Placement::Contiguous { offset, checksums: digest.chunks() };
                self.index.push(&name, &meta, tensor_fingerprint(&meta, &digest), &placement);
            }
            PendingLayout::Chunked { phase, chunks, raw_checksums } => {
                let fingerprint = tensor_fingerprint(&meta, &Digest::from_chunks(raw_checksums));
                self.index.push(
                    &name,
                    &meta,
                    fingerprint,
                    &Placement::Chunked { phase, chunks: &chunks },
                );
            }
        }
        Ok(())
    }
}

/// Returns the length in bytes of a row (one index of the first dimension). Returns `None` for
/// scalars, for empty rows, and for rows that are not a whole number of bytes.
fn row_len(meta: &TensorMeta) -> Option<u64> {
    meta.dtype.byte_len(meta.shape.get(1..)?).filter(|&len| len > 0)
}

/// Returns the superblock and metadata of the only file of `catalog`, which must be a `.ts` file of
/// a version that this writer supports.
fn single_container(catalog: &Catalog) -> Result<(Superblock, &Metadata), Error> {
    let [FileEntry { superblock: Some(block), metadata, .. }] = catalog.files() else {
        return Err(not_appendable(catalog, "it is not a single .ts file".into()));
    };
    if block.minor > MINOR {
        let reason = format!("unsupported version 1.{} (expected at most 1.{MINOR})", block.minor);
        return Err(not_appendable(catalog, reason));
    }
    Ok((*block, metadata))
}

fn not_appendable(catalog: &Catalog, reason: String) -> Error {
    let names: Vec<_> = catalog.files().iter().map(|file| file.name.as_str()).collect();
    Error::NotAppendable { file: names.join(", "), reason }
}

fn unwritable(tensor: &str, reason: String) -> Error {
    Error::Unwritable { tensor: tensor.into(), reason }
}
