// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writing `.ts` files, but for the writing itself.

use std::collections::{BTreeMap, HashSet};

use twox_hash::{XxHash3_64, XxHash3_128};

use crate::codec::Encoded;
use crate::digest::{CHUNK_LEN, Digest, Digester};
use crate::error::{check_name, describe};
use crate::index::{IndexWriter, MAX_RANK, Written, most_record_bytes, put_text};
use crate::sharded::MAX_INDEX_LEN;
use crate::superblock::{DATA_START, MINOR, Superblock};
use crate::table::Chunk;
use crate::{Catalog, Error, FileEntry, Tensor, TensorMeta};

/// Tensors begin at multiples of this unless they have a phase.
const ALIGNMENT: u64 = 64;
/// What is appended begins at a multiple of this: no block of a disk that has bytes in use is
/// written again.
const BLOCK: u64 = 4096;

/// Names the content of a tensor: 128 bits of XXH3 over its dtype, shape and the checksums of its
/// bytes, each a mebibyte.
pub fn tensor_fingerprint(meta: &TensorMeta, digest: &Digest) -> u128 {
    let mut described = vec![meta.dtype.code(), meta.shape.len() as u8];
    described.extend(meta.shape.iter().flat_map(|n| n.to_le_bytes()));
    described.extend(digest.chunks().iter().flat_map(|sum| sum.to_le_bytes()));
    XxHash3_128::oneshot(&described)
}

/// Names the content of a set of tensors, wherever they lie and however they are kept: 128 bits of
/// XXH3 over names and [`tensor_fingerprint`]s, in the order of the names.
pub fn fingerprint<'a>(tensors: impl IntoIterator<Item = (&'a str, u128)>) -> u128 {
    let mut tensors: Vec<_> = tensors.into_iter().collect();
    tensors.sort_by_key(|(name, _)| *name);
    let mut described = Vec::new();
    for (name, fingerprint) in tensors {
        put_text(&mut described, name);
        described.extend(fingerprint.to_le_bytes());
    }
    XxHash3_128::oneshot(&described)
}

/// Says where in a `.ts` file which bytes go, and what its ends are. Holds no tensor data.
///
/// Of a tensor that is kept as it is, [`begin`](Self::begin) says where, and [`feed`](Self::feed)
/// takes its bytes while they are written there. One that is compressed is begun with
/// [`begin_chunked`](Self::begin_chunked), and [`push_chunk`](Self::push_chunk) says where each of
/// its chunks goes, which an [`Encoder`](crate::Encoder) made. [`finish`](Self::finish) gives index
/// and superblocks.
///
/// [`append`](Self::append) goes on with a file that is there, in which nothing in use is written
/// over but, as the very last, the superblock that is not; [`copy`](Self::copy) takes a tensor from
/// another file as it is kept there.
///
/// ```
/// use ts_format::{ContainerWriter, Dtype, TensorMeta};
///
/// let mut file = vec![0; 8192]; // the superblocks come last
/// let mut writer = ContainerWriter::new(Default::default());
/// let offset = writer.begin("w", TensorMeta { dtype: Dtype::U8, shape: vec![3] }, None)?;
/// file.resize(offset as usize, 0);
/// file.extend(b"abc");
/// writer.feed(b"abc")?;
/// let ends = writer.finish()?;
/// file.extend(&ends.index);
/// file[..8192].copy_from_slice(&ends.superblocks);
/// # Ok::<(), ts_format::Error>(())
/// ```
#[derive(Debug)]
pub struct ContainerWriter {
    metadata: BTreeMap<String, String>,
    index: IndexWriter,
    names: HashSet<String>,
    open: Option<Open>,
    /// One past the last byte that is taken.
    end: u64,
    /// Of the file that is appended to.
    active: Option<Superblock>,
    checkpoints: u64,
}

/// A tensor whose bytes are coming.
#[derive(Debug)]
struct Open {
    name: String,
    meta: TensorMeta,
    /// How many bytes it has, if that is known,
    len: Option<u64>,
    /// and how many have come.
    fed: u64,
    kept: Keeping,
}

#[derive(Debug)]
enum Keeping {
    AsItIs { offset: u64, digester: Box<Digester> },
    Chunked { phase: u8, chunks: Vec<Chunk>, raw_sums: Vec<u64> },
}

/// What frames the data of a `.ts` file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerEnds {
    /// Where the index goes: directly behind the data.
    pub index_offset: u64,
    /// The index.
    pub index: Vec<u8>,
    /// Where the superblocks go: 0, or where the one is that is not in use.
    pub superblocks_offset: u64,
    /// Both, or that one; to be written when everything else is on the disk.
    pub superblocks: Vec<u8>,
}

/// Where checkpoints of a file go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointRoom {
    /// All data, and the index, lie before this.
    data_end: u64,
    /// No index is longer.
    index_len: u64,
}

/// Bytes that lie in one file and go to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// Where they begin there,
    pub from: u64,
    /// how many they are,
    pub len: u64,
    /// and where they go here.
    pub to: u64,
    /// XXH3 with 64 bits of them.
    pub sum: u64,
}

impl ContainerWriter {
    /// A file with this metadata and no tensors yet.
    pub fn new(metadata: BTreeMap<String, String>) -> Self {
        let (index, names) = (IndexWriter::default(), HashSet::new());
        Self { metadata, index, names, open: None, end: DATA_START, active: None, checkpoints: 0 }
    }

    /// Goes on with the one `.ts` file that `catalog` is of. Its metadata stay, and the tensors
    /// that `keep` says yes to; what the others take is not used again.
    ///
    /// # Errors
    /// [`Error::NotAppendable`] for anything else than one `.ts` file, and for one of a later minor
    /// version, whose records may say more than this writer knows.
    pub fn append(catalog: &Catalog, keep: impl Fn(&str) -> bool) -> Result<Self, Error> {
        let tensors = catalog.tensors_by_place().into_iter();
        let kept = tensors.filter(|tensor| keep(tensor.name())).collect();
        let (mut this, block) = Self::with_records_of(catalog, kept)?;
        if block.generation == u64::MAX {
            return Err(not_appendable(catalog, "it is of the last generation there is".into()));
        }
        this.end = (block.index_offset + block.index_len).next_multiple_of(BLOCK);
        this.active = Some(block);
        Ok(this)
    }

    /// Goes on with a new file that was left at a [`checkpoint`](Self::checkpoint), of which
    /// `catalog` is; its tensors were begun in this `order`. What is written in the end is what
    /// would have been written without a pause.
    ///
    /// # Errors
    /// As [`append`](Self::append); [`Error::NoSuchTensor`].
    pub fn resume(
        catalog: &Catalog,
        order: &[&str],
        metadata: BTreeMap<String, String>,
    ) -> Result<Self, Error> {
        let kept: Result<Vec<_>, _> = order.iter().map(|name| catalog.require(name)).collect();
        let (mut this, block) = Self::with_records_of(catalog, kept?)?;
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

    /// A new file with the metadata of the one `.ts` file that `catalog` is of, for its tensors to
    /// be [copied](Self::copy) to.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn compact(catalog: &Catalog) -> Result<Self, Error> {
        the_one_file(catalog).map(|(_, metadata)| Self::new(metadata.clone()))
    }

    fn with_records_of(
        catalog: &Catalog,
        kept: Vec<Tensor<'_>>,
    ) -> Result<(Self, Superblock), Error> {
        let (block, metadata) = the_one_file(catalog)?;
        let mut this = Self::new(metadata.clone());
        for tensor in kept {
            let (range, phase) = (tensor.range(), (tensor.range().offset % ALIGNMENT) as u8);
            let written = match tensor.chunks() {
                None => Written::Contiguous {
                    offset: range.offset,
                    sums: tensor.sums().unwrap_or_default(),
                },
                Some(chunks) => Written::Chunked { phase, chunks },
            };
            let fingerprint = tensor.fingerprint().unwrap_or_default();
            this.index.push(tensor.name(), &tensor.meta(), fingerprint, &written);
            this.names.insert(tensor.name().into());
        }
        Ok((this, block))
    }

    /// Room for [`checkpoint`](Self::checkpoint)s of this file, if it will have just these tensors.
    pub fn room<'a>(
        &self,
        tensors: impl IntoIterator<Item = (&'a str, &'a TensorMeta)>,
    ) -> CheckpointRoom {
        let metadata =
            self.metadata.iter().map(|(key, value)| (8 + key.len() + value.len()) as u64);
        let mut room =
            CheckpointRoom { data_end: DATA_START, index_len: BLOCK + metadata.sum::<u64>() };
        for (name, meta) in tensors {
            let len = meta.byte_len().unwrap_or(0);
            room.data_end = room.data_end.saturating_add(len).saturating_add(2 * ALIGNMENT);
            room.index_len += most_record_bytes(name, meta.shape.len(), len);
        }
        // The file's own index comes first.
        room.data_end = room.data_end.saturating_add(room.index_len).next_multiple_of(BLOCK);
        room.index_len = room.index_len.next_multiple_of(BLOCK);
        room
    }

    /// Where what is written next begins, at the earliest.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The metadata that will be written.
    pub fn metadata_mut(&mut self) -> &mut BTreeMap<String, String> {
        &mut self.metadata
    }

    /// Adds a tensor that is kept as it is, and returns where its bytes go: at a multiple of 64, or
    /// at `phase` modulo 64.
    ///
    /// # Errors
    /// [`Error::Unwritable`] for a name that is empty, has a NUL or was given before, a rank over
    /// 64, a size that is no whole number of bytes below 2^62, or when the tensor before is not
    /// complete.
    pub fn begin(&mut self, name: &str, meta: TensorMeta, phase: Option<u8>) -> Result<u64, Error> {
        let (len, phase) = self.check(name, &meta, phase)?;
        let offset = (self.end + ALIGNMENT - 1 - phase) / ALIGNMENT * ALIGNMENT + phase;
        let end = offset.checked_add(len).filter(|&end| end < 1 << 63);
        self.end = end.ok_or_else(|| unwritable(name, "the file would be too large".into()))?;
        let kept = Keeping::AsItIs { offset, digester: Box::default() };
        self.open = Some(Open { name: name.into(), meta, len: Some(len), fed: 0, kept });
        Ok(offset)
    }

    /// Adds a tensor that is kept in chunks. Its phase is remembered for the memory that it is
    /// decoded to.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn begin_chunked(
        &mut self,
        name: &str,
        meta: TensorMeta,
        phase: Option<u8>,
    ) -> Result<(), Error> {
        let (len, phase) = self.check(name, &meta, phase)?;
        self.end = self.end.next_multiple_of(ALIGNMENT);
        let kept =
            Keeping::Chunked { phase: phase as u8, chunks: Vec::new(), raw_sums: Vec::new() };
        self.open = Some(Open { name: name.into(), meta, len: Some(len), fed: 0, kept });
        Ok(())
    }

    /// Lets the tensor that was begun last, of which nothing has come yet, have as many bytes as
    /// will come: its first dimension is counted when the next one begins.
    ///
    /// # Errors
    /// [`Error::Unwritable`] when it has no dimension, or what one step along the first has is no
    /// whole number of bytes.
    pub fn grow(&mut self) -> Result<(), Error> {
        let open =
            self.open.as_mut().ok_or_else(|| unwritable("", "no tensor was begun".into()))?;
        if row_len(&open.meta).is_none() || open.fed > 0 {
            let reason = format!("{} cannot grow", describe(open.meta.dtype, &open.meta.shape));
            return Err(unwritable(&open.name, reason));
        }
        if let Keeping::AsItIs { offset, .. } = open.kept {
            self.end = offset;
        }
        open.len = None;
        Ok(())
    }

    /// Drops the tensor whose bytes are coming, if there is one, so that a
    /// [`checkpoint`](Self::checkpoint) can be made of those before it.
    pub fn drop_incomplete(&mut self) {
        let incomplete = |open: &mut Open| open.len != Some(open.fed);
        if let Some(open) = self.open.take_if(incomplete) {
            self.names.remove(&open.name);
        }
    }

    /// Takes a tensor of another file as it is kept there, and returns its bytes' way: where they
    /// are there, and go here.
    ///
    /// # Errors
    /// As [`begin`](Self::begin); also when the other file has no checksums.
    pub fn copy(&mut self, tensor: Tensor<'_>) -> Result<Vec<Move>, Error> {
        let (name, meta, range) = (tensor.name(), tensor.meta(), tensor.range());
        let Some(fingerprint) = tensor.fingerprint() else {
            return Err(unwritable(name, "it is of a file without checksums".into()));
        };
        let phase = (range.offset % ALIGNMENT) as u8;
        let moves: Vec<Move> = match tensor.chunks() {
            None => {
                let (to, sums) = (
                    self.begin(name, meta.clone(), Some(phase))?,
                    tensor.sums().unwrap_or_default(),
                );
                let begins = (0..range.len).step_by(CHUNK_LEN as usize);
                let moves = begins.zip(sums).map(|(at, &sum)| Move {
                    from: range.offset + at,
                    len: CHUNK_LEN.min(range.len - at),
                    to: to + at,
                    sum,
                });
                self.index.push(
                    name,
                    &meta,
                    fingerprint,
                    &Written::Contiguous { offset: to, sums },
                );
                moves.collect()
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
                    &Written::Chunked { phase, chunks: &moved },
                );
                let pairs = chunks.iter().zip(&moved);
                let way = |(old, new): (&Chunk, &Chunk)| Move {
                    from: old.offset,
                    len: u64::from(old.len),
                    to: new.offset,
                    sum: old.sum,
                };
                pairs.map(way).collect()
            }
        };
        self.open = None;
        Ok(moves)
    }

    /// Takes the next bytes of the tensor that was begun last, which is kept as it is.
    ///
    /// # Errors
    /// [`Error::Unwritable`] when they are more than the tensor has.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match &mut self.open {
            Some(Open { kept: Keeping::AsItIs { digester, .. }, name, len, fed, .. }) => {
                if let Some(len) = len.filter(|len| bytes.len() as u64 > len - *fed) {
                    return Err(unwritable(name, format!("it has {len} bytes and gets more")));
                }
                digester.feed(bytes);
                *fed += bytes.len() as u64;
                Ok(())
            }
            Some(open) => Err(unwritable(&open.name, "it was begun as one kept in chunks".into())),
            None => Err(unwritable("", "no tensor was begun".into())),
        }
    }

    /// Takes the next chunk of the tensor that was begun last, which is kept in chunks, and returns
    /// where it goes: directly behind the chunk before.
    ///
    /// # Errors
    /// [`Error::Unwritable`] when it is not of as many bytes as the tensor's next chunk has.
    pub fn push_chunk(&mut self, encoded: &Encoded) -> Result<u64, Error> {
        match &mut self.open {
            Some(Open {
                kept: Keeping::Chunked { chunks, raw_sums, .. }, name, len, fed, ..
            }) => {
                // One that grows has whole chunks, but for its last.
                let (next, given) = (
                    len.map_or(CHUNK_LEN, |len| (len - *fed).min(CHUNK_LEN)),
                    encoded.raw_len as u64,
                );
                let fits = given == next || (len.is_none() && given < next);
                if given == 0 || !fits || !fed.is_multiple_of(CHUNK_LEN) {
                    let reason =
                        format!("its next chunk has {next} bytes and gets {}", encoded.raw_len);
                    return Err(unwritable(name, reason));
                }
                let Encoded { len, codec, width, sum, raw_sum, .. } = *encoded;
                let offset = self.end;
                chunks.push(Chunk { offset, len: len as u32, codec, width, sum });
                raw_sums.push(raw_sum);
                *fed += given;
                self.end += len as u64;
                Ok(offset)
            }
            Some(open) => Err(unwritable(&open.name, "it was begun as one kept as it is".into())),
            None => Err(unwritable("", "no tensor was begun".into())),
        }
    }

    /// Index and superblocks.
    ///
    /// # Errors
    /// [`Error::Unwritable`] when the last tensor is not complete or the index is over 256 MiB.
    pub fn finish(mut self) -> Result<ContainerEnds, Error> {
        self.close()?;
        self.ends(
            self.end,
            &self.metadata,
            self.active.map(|block| (block.generation, block.second)),
        )
    }

    /// What makes a file of the tensors that are complete, which [`resume`](Self::resume) goes on
    /// with. The indices go, in turns, to two places behind all that will be written. They have
    /// these metadata instead of the file's own, 2 KiB at most.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn checkpoint(
        &mut self,
        room: CheckpointRoom,
        metadata: &BTreeMap<String, String>,
    ) -> Result<ContainerEnds, Error> {
        self.close()?;
        // The first one goes to the first superblock, and then in turns.
        let active = (self.checkpoints > 0)
            .then_some((self.checkpoints, self.checkpoints.is_multiple_of(2)));
        let index_offset = room.data_end.saturating_add(self.checkpoints % 2 * room.index_len);
        let ends = self.ends(index_offset, metadata, active)?;
        self.checkpoints += 1;
        Ok(ends)
    }

    /// `active` is the superblock that counts until these are written: its generation, and whether
    /// it is the second.
    fn ends(
        &self,
        index_offset: u64,
        metadata: &BTreeMap<String, String>,
        active: Option<(u64, bool)>,
    ) -> Result<ContainerEnds, Error> {
        let index = self.index.finish(metadata);
        if index.len() as u64 > MAX_INDEX_LEN {
            return Err(unwritable("", "the index would be over 256 MiB".into()));
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
        Ok(ContainerEnds { index_offset, index, superblocks_offset: block.offset(), superblocks })
    }

    /// Length in bytes and phase of a tensor that may be written.
    fn check(
        &mut self,
        name: &str,
        meta: &TensorMeta,
        phase: Option<u8>,
    ) -> Result<(u64, u64), Error> {
        self.close()?;
        let bad = |reason: String| unwritable(name, reason);
        check_name(name).map_err(bad)?;
        if meta.shape.len() > MAX_RANK {
            return Err(bad(format!("rank {}, more than {MAX_RANK}", meta.shape.len())));
        }
        let len = meta.byte_len().filter(|&len| len < 1 << 62);
        let len =
            len.ok_or_else(|| bad(format!("{} has no size", describe(meta.dtype, &meta.shape))))?;
        if !self.names.insert(name.into()) {
            return Err(bad("the name was given before".into()));
        }
        Ok((len, u64::from(phase.unwrap_or(0)) % ALIGNMENT))
    }

    fn close(&mut self) -> Result<(), Error> {
        let Some(Open { name, mut meta, len, fed, kept }) = self.open.take() else { return Ok(()) };
        match (len, row_len(&meta)) {
            (Some(len), _) if fed == len => {}
            (None, Some(row)) if fed.is_multiple_of(row) => meta.shape[0] = fed / row,
            (None, row) => {
                let row = row.unwrap_or_default();
                return Err(unwritable(
                    &name,
                    format!("{fed} bytes are no multiple of the {row} of a step"),
                ));
            }
            (Some(len), _) => {
                return Err(unwritable(&name, format!("it has {len} bytes and got {fed}")));
            }
        }
        if let (None, Keeping::AsItIs { offset, .. }) = (len, &kept) {
            let end = offset.checked_add(fed).filter(|&end| end < 1 << 63);
            self.end =
                end.ok_or_else(|| unwritable(&name, "the file would be too large".into()))?;
        }
        match kept {
            Keeping::AsItIs { offset, digester } => {
                let digest = digester.finish();
                let written = Written::Contiguous { offset, sums: digest.chunks() };
                self.index.push(&name, &meta, tensor_fingerprint(&meta, &digest), &written);
            }
            Keeping::Chunked { phase, chunks, raw_sums } => {
                let fingerprint = tensor_fingerprint(&meta, &Digest::from_chunks(raw_sums));
                self.index.push(
                    &name,
                    &meta,
                    fingerprint,
                    &Written::Chunked { phase, chunks: &chunks },
                );
            }
        }
        Ok(())
    }
}

/// Bytes of one step along the first dimension, if there are some.
fn row_len(meta: &TensorMeta) -> Option<u64> {
    meta.dtype.byte_len(meta.shape.get(1..)?).filter(|&len| len > 0)
}

/// The superblock and the metadata of the one file that there is, if this writer knows all that its
/// records say.
fn the_one_file(catalog: &Catalog) -> Result<(Superblock, &BTreeMap<String, String>), Error> {
    let [FileEntry { superblock: Some(block), metadata, .. }] = catalog.files() else {
        return Err(not_appendable(catalog, "it is not one .ts file".into()));
    };
    if block.minor > MINOR {
        let reason = format!("it is of version 1.{}, this writer knows 1.{MINOR}", block.minor);
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
