// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writing `.ts` files, but for the writing itself.

use std::collections::{BTreeMap, HashSet};

use twox_hash::{XxHash3_64, XxHash3_128};

use crate::codec::Encoded;
use crate::digest::{CHUNK_LEN, Digest, Digester};
use crate::error::{check_name, describe};
use crate::index::{IndexWriter, MAX_RANK, Written, put_text};
use crate::sharded::MAX_INDEX_LEN;
use crate::superblock::{DATA_START, MINOR, Superblock};
use crate::table::Chunk;
use crate::{Error, TensorMeta};

/// Tensors begin at multiples of this unless they have a phase.
const ALIGNMENT: u64 = 64;

/// Names the content of a tensor: 128 bits of XXH3 over its dtype, shape and the checksums of its bytes, each a mebibyte.
pub fn tensor_fingerprint(meta: &TensorMeta, digest: &Digest) -> u128 {
    let mut described = vec![meta.dtype.code(), meta.shape.len() as u8];
    described.extend(meta.shape.iter().flat_map(|n| n.to_le_bytes()));
    described.extend(digest.chunks().iter().flat_map(|sum| sum.to_le_bytes()));
    XxHash3_128::oneshot(&described)
}

/// Names the content of a set of tensors, wherever they lie and however they are kept: 128 bits of XXH3 over names and
/// [`tensor_fingerprint`]s, in the order of the names.
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
/// Of a tensor that is kept as it is, [`begin`](Self::begin) says where, and [`feed`](Self::feed) takes its bytes while
/// they are written there. One that is compressed is begun with [`begin_chunked`](Self::begin_chunked), and
/// [`push_chunk`](Self::push_chunk) says where each of its chunks goes, which an [`Encoder`](crate::Encoder) made.
/// [`finish`](Self::finish) gives index and superblocks.
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
}

/// A tensor whose bytes are coming.
#[derive(Debug)]
struct Open {
    name: String,
    meta: TensorMeta,
    len: u64,
    /// How many have come.
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
    /// The first bytes of the file; to be written when everything else is on the disk.
    pub superblocks: Vec<u8>,
}

impl ContainerWriter {
    /// A file with this metadata and no tensors yet.
    pub fn new(metadata: BTreeMap<String, String>) -> Self {
        Self { metadata, index: IndexWriter::default(), names: HashSet::new(), open: None, end: DATA_START }
    }

    /// Adds a tensor that is kept as it is, and returns where its bytes go: at a multiple of 64, or at `phase` modulo 64.
    ///
    /// # Errors
    /// [`Error::Unwritable`] for a name that is empty, has a NUL or was given before, a rank over 64, a size
    /// that is no whole number of bytes below 2^62, or when the tensor before is not complete.
    pub fn begin(&mut self, name: &str, meta: TensorMeta, phase: Option<u8>) -> Result<u64, Error> {
        let (len, phase) = self.check(name, &meta, phase)?;
        let offset = (self.end + ALIGNMENT - 1 - phase) / ALIGNMENT * ALIGNMENT + phase;
        let end = offset.checked_add(len).filter(|&end| end < 1 << 63);
        self.end = end.ok_or_else(|| unwritable(name, "the file would be too large".into()))?;
        let kept = Keeping::AsItIs { offset, digester: Box::default() };
        self.open = Some(Open { name: name.into(), meta, len, fed: 0, kept });
        Ok(offset)
    }

    /// Adds a tensor that is kept in chunks. Its phase is remembered for the memory that it is decoded to.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn begin_chunked(&mut self, name: &str, meta: TensorMeta, phase: Option<u8>) -> Result<(), Error> {
        let (len, phase) = self.check(name, &meta, phase)?;
        self.end = self.end.next_multiple_of(ALIGNMENT);
        let kept = Keeping::Chunked { phase: phase as u8, chunks: Vec::new(), raw_sums: Vec::new() };
        self.open = Some(Open { name: name.into(), meta, len, fed: 0, kept });
        Ok(())
    }

    /// Takes the next bytes of the tensor that was begun last, which is kept as it is.
    ///
    /// # Errors
    /// [`Error::Unwritable`] when they are more than the tensor has.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match &mut self.open {
            Some(Open { kept: Keeping::AsItIs { digester, .. }, name, len, fed, .. }) => {
                if bytes.len() as u64 > *len - *fed {
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

    /// Takes the next chunk of the tensor that was begun last, which is kept in chunks, and returns where it goes: directly
    /// behind the chunk before.
    ///
    /// # Errors
    /// [`Error::Unwritable`] when it is not of as many bytes as the tensor's next chunk has.
    pub fn push_chunk(&mut self, encoded: &Encoded) -> Result<u64, Error> {
        match &mut self.open {
            Some(Open { kept: Keeping::Chunked { chunks, raw_sums, .. }, name, len, fed, .. }) => {
                let next = (*len - *fed).min(CHUNK_LEN);
                if next == 0 || encoded.raw_len as u64 != next {
                    let reason = format!("its next chunk has {next} bytes and gets {}", encoded.raw_len);
                    return Err(unwritable(name, reason));
                }
                let Encoded { len, codec, width, sum, raw_sum, .. } = *encoded;
                let offset = self.end;
                chunks.push(Chunk { offset, len: len as u32, codec, width, sum });
                raw_sums.push(raw_sum);
                *fed += next;
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
        let (index_offset, index) = (self.end, self.index.finish(&self.metadata));
        if index.len() as u64 > MAX_INDEX_LEN {
            return Err(unwritable("", "the index would be over 256 MiB".into()));
        }
        let (index_len, index_hash) = (index.len() as u64, XxHash3_64::oneshot(&index));
        let block = Superblock { generation: 1, minor: MINOR, index_offset, index_len, index_hash };
        let mut superblocks = block.encode();
        superblocks.resize(DATA_START as usize, 0);
        Ok(ContainerEnds { index_offset, index, superblocks })
    }

    /// Length in bytes and phase of a tensor that may be written.
    fn check(&mut self, name: &str, meta: &TensorMeta, phase: Option<u8>) -> Result<(u64, u64), Error> {
        self.close()?;
        let bad = |reason: String| unwritable(name, reason);
        check_name(name).map_err(bad)?;
        if meta.shape.len() > MAX_RANK {
            return Err(bad(format!("rank {}, more than {MAX_RANK}", meta.shape.len())));
        }
        let len = meta.byte_len().filter(|&len| len < 1 << 62);
        let len = len.ok_or_else(|| bad(format!("{} has no size", describe(meta.dtype, &meta.shape))))?;
        if !self.names.insert(name.into()) {
            return Err(bad("the name was given before".into()));
        }
        Ok((len, u64::from(phase.unwrap_or(0)) % ALIGNMENT))
    }

    fn close(&mut self) -> Result<(), Error> {
        let Some(Open { name, meta, len, fed, kept }) = self.open.take() else { return Ok(()) };
        if fed != len {
            return Err(unwritable(&name, format!("it has {len} bytes and got {fed}")));
        }
        match kept {
            Keeping::AsItIs { offset, digester } => {
                let digest = digester.finish();
                let written = Written::Contiguous { offset, sums: digest.chunks() };
                self.index.push(&name, &meta, tensor_fingerprint(&meta, &digest), &written);
            }
            Keeping::Chunked { phase, chunks, raw_sums } => {
                let fingerprint = tensor_fingerprint(&meta, &Digest::from_chunks(raw_sums));
                self.index.push(&name, &meta, fingerprint, &Written::Chunked { phase, chunks: &chunks });
            }
        }
        Ok(())
    }
}

fn unwritable(tensor: &str, reason: String) -> Error {
    Error::Unwritable { tensor: tensor.into(), reason }
}
