// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `.ts` container, version 1; FORMAT.md is the normative page.
//!
//! Two superblocks, of which the newer valid one counts; the tensors' bytes; an index at the end.

use std::collections::{BTreeMap, HashSet};

use twox_hash::{XxHash3_64, XxHash3_128};

use crate::digest::{CHUNK_LEN, Digest, Digester};
use crate::error::{check_name, describe};
use crate::sharded::MAX_INDEX_LEN;
use crate::{Dtype, Error, TensorMeta};

/// The first bytes of a `.ts` file: no text, and broken by whatever converts line ends.
pub const MAGIC: [u8; 8] = *b"\x89TSF\r\n\x1a\n";

/// Room of one superblock, in bytes: a sector of the devices that have the largest.
pub(crate) const SUPERBLOCK_LEN: u64 = 4096;
/// Where data may begin.
pub(crate) const DATA_START: u64 = 2 * SUPERBLOCK_LEN;
const SUPERBLOCK_USED: usize = 64;
const MAJOR: u16 = 1;
const MINOR: u16 = 0;
const CODEC_RAW: u8 = 0;
/// Highest rank that torch has, and so the highest there is.
pub const MAX_RANK: usize = 64;
/// Tensors begin at multiples of this unless they have a phase.
const ALIGNMENT: u64 = 64;

/// Where the index is, as the active superblock says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Superblock {
    generation: u64,
    pub(crate) index_offset: u64,
    pub(crate) index_len: u64,
    index_hash: u64,
}

impl Superblock {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(SUPERBLOCK_LEN as usize);
        out.extend(MAGIC);
        out.extend(MAJOR.to_le_bytes());
        out.extend(MINOR.to_le_bytes());
        out.extend(0u32.to_le_bytes());
        for field in [self.generation, self.index_offset, self.index_len, self.index_hash, 0] {
            out.extend(field.to_le_bytes());
        }
        out.extend(XxHash3_64::oneshot(&out).to_le_bytes());
        out.resize(SUPERBLOCK_LEN as usize, 0);
        out
    }

    /// Reads one of the two; the reason when it is not valid.
    fn decode(block: &[u8]) -> Result<Self, String> {
        let Some((used, padding)) = block.split_at_checked(SUPERBLOCK_USED) else {
            return Err("it is cut off".into());
        };
        let word = |i: usize| u64::from_le_bytes(used[i..i + 8].try_into().expect("8 bytes"));
        if used[..8] != MAGIC {
            return Err("it does not begin as a superblock".into());
        }
        if word(56) != XxHash3_64::oneshot(&used[..56]) {
            return Err("its checksum is wrong".into());
        }
        let major = u16::from_le_bytes([used[8], used[9]]);
        if major != MAJOR {
            return Err(format!("it is of version {major}, this reader knows version {MAJOR}"));
        }
        if word(48) != 0 || used[12..16] != [0; 4] {
            return Err("it has flags that this reader does not know".into());
        }
        if padding.iter().any(|&b| b != 0) {
            return Err("its padding is not zero".into());
        }
        Ok(Self { generation: word(16), index_offset: word(24), index_len: word(32), index_hash: word(40) })
    }
}

/// The active superblock of a file's first 8192 bytes.
pub(crate) fn superblock(file: &str, bytes: &[u8], file_len: u64) -> Result<Superblock, Error> {
    let (first, second) = bytes.split_at((SUPERBLOCK_LEN as usize).min(bytes.len()));
    let block = match (Superblock::decode(first), Superblock::decode(second)) {
        (Ok(a), Ok(b)) => std::cmp::max_by_key(a, b, |s| s.generation),
        (Ok(one), Err(_)) | (Err(_), Ok(one)) => one,
        (Err(first), Err(second)) => {
            let reason = format!("no valid superblock: of the first, {first}; of the second, {second}");
            return Err(Error::header(file, 0, reason));
        }
    };
    let end = block.index_offset.saturating_add(block.index_len);
    if block.index_len > MAX_INDEX_LEN {
        return Err(Error::header(file, 0, format!("an index of {} bytes is too large", block.index_len)));
    }
    if block.index_offset < DATA_START {
        return Err(Error::header(file, 0, format!("an index at byte {} is too early", block.index_offset)));
    }
    if end > file_len {
        let (what, offset) = ("the index".into(), block.index_offset);
        return Err(Error::Truncated { file: file.into(), what, offset, end, file_len });
    }
    Ok(block)
}

/// A tensor as the index lists it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) name: String,
    pub(crate) meta: TensorMeta,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) digest: Digest,
}

#[derive(Debug)]
pub(crate) struct Index {
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) tensors: Vec<Record>,
}

impl Index {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend((self.tensors.len() as u32).to_le_bytes());
        out.extend((self.metadata.len() as u32).to_le_bytes());
        out.extend(CHUNK_LEN.to_le_bytes());
        for (key, value) in &self.metadata {
            put_text(&mut out, key);
            put_text(&mut out, value);
        }
        for record in &self.tensors {
            put_text(&mut out, &record.name);
            out.extend([record.meta.dtype.code(), record.meta.shape.len() as u8, CODEC_RAW, 0]);
            for n in record.meta.shape.iter().chain([&record.offset, &record.len]) {
                out.extend(n.to_le_bytes());
            }
            for sum in record.digest.chunks() {
                out.extend(sum.to_le_bytes());
            }
        }
        out
    }

    /// Parses an index and checks every claim it makes.
    pub(crate) fn decode(file: &str, bytes: &[u8], block: &Superblock) -> Result<Self, Error> {
        if XxHash3_64::oneshot(bytes) != block.index_hash {
            return Err(Error::header(file, block.index_offset, "the checksum of the index is wrong"));
        }
        let mut cursor = Cursor { file, bytes, base: block.index_offset, at: 0 };
        let (tensor_count, metadata_count) = (cursor.u32()?, cursor.u32()?);
        let chunk_len = cursor.u64()?;
        if chunk_len != CHUNK_LEN {
            return Err(cursor.wrong(format!("chunks of {chunk_len} bytes; this reader knows {CHUNK_LEN}")));
        }
        let mut metadata = BTreeMap::new();
        for _ in 0..metadata_count {
            let (key, value) = (cursor.text()?, cursor.text()?);
            if metadata.contains_key(&key) {
                return Err(cursor.wrong(format!("the metadata key {key:?} stands twice")));
            }
            metadata.insert(key, value);
        }
        // Counts are claims: room is made as records come.
        let (mut tensors, mut names) = (Vec::new(), HashSet::new());
        for _ in 0..tensor_count {
            let record = cursor.record(block.index_offset)?;
            if !names.insert(record.name.clone()) {
                return Err(cursor.wrong(format!("the name `{}` stands twice", record.name)));
            }
            tensors.push(record);
        }
        if cursor.at != bytes.len() {
            return Err(cursor.wrong("bytes after the last tensor"));
        }
        check_apart(file, &tensors)?;
        Ok(Self { metadata, tensors })
    }
}

fn check_apart(file: &str, tensors: &[Record]) -> Result<(), Error> {
    let mut by_place: Vec<&Record> = tensors.iter().filter(|t| t.len > 0).collect();
    by_place.sort_by_key(|t| t.offset);
    for pair in by_place.windows(2) {
        if pair[1].offset < pair[0].offset + pair[0].len {
            let reason = format!("its data overlaps that of `{}`", pair[0].name);
            let (tensor, offset) = (pair[1].name.clone(), pair[1].offset);
            return Err(Error::BadTensor { file: file.into(), tensor, offset, reason });
        }
    }
    Ok(())
}

/// Reads an index from front to back; `base` is where it begins in the file.
struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    base: u64,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn wrong(&self, reason: impl Into<String>) -> Error {
        Error::header(self.file, self.base + self.at as u64, reason)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Error> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or_else(|| self.wrong("the index ends within an entry"))?;
        self.at += len;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("4 bytes")))
    }

    fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("8 bytes")))
    }

    fn text(&mut self) -> Result<String, Error> {
        let len = self.u32()? as usize;
        let bytes = self.take(len)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| self.wrong("text that is not UTF-8"))
    }

    fn record(&mut self, data_end: u64) -> Result<Record, Error> {
        let name = self.text()?;
        check_name(&name).map_err(|reason| self.wrong(reason))?;
        let wrong = |this: &Self, reason: String| this.wrong(format!("tensor `{name}`: {reason}"));
        let [dtype, rank, codec, filter] = *self.take(4)? else { unreachable!("4 bytes were taken") };
        let Some(dtype) = Dtype::from_code(dtype) else {
            return Err(wrong(self, format!("unknown dtype code {dtype}")));
        };
        if usize::from(rank) > MAX_RANK {
            return Err(wrong(self, format!("rank {rank}, more than {MAX_RANK}")));
        }
        if (codec, filter) != (CODEC_RAW, 0) {
            return Err(wrong(self, format!("codec {codec} with filter {filter} is not built yet")));
        }
        let shape = (0..rank).map(|_| self.u64()).collect::<Result<Vec<_>, _>>()?;
        let (offset, len) = (self.u64()?, self.u64()?);
        let meta = TensorMeta { dtype, shape };
        if meta.byte_len() != Some(len) {
            let what = describe(dtype, &meta.shape);
            return Err(wrong(self, format!("{what} is not {len} bytes")));
        }
        if offset < DATA_START || offset.checked_add(len).is_none_or(|end| end > data_end) {
            return Err(wrong(
                self,
                format!("{len} bytes at byte {offset} are not between superblocks and index"),
            ));
        }
        let sums = usize::try_from(len.div_ceil(CHUNK_LEN)).ok().and_then(|count| count.checked_mul(8));
        let sums = self.take(sums.ok_or_else(|| wrong(self, format!("{len} bytes")))?)?;
        let sums = sums.chunks_exact(8).map(|s| u64::from_le_bytes(s.try_into().expect("8 bytes")));
        Ok(Record { name, meta, offset, len, digest: Digest::from_chunks(sums.collect()) })
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Names the content of a set of tensors, wherever they lie: 128 bits of XXH3 over names, dtypes, shapes and
/// digests, in the order of the names.
pub fn fingerprint<'a>(tensors: impl IntoIterator<Item = (&'a str, &'a TensorMeta, &'a Digest)>) -> u128 {
    let mut tensors: Vec<_> = tensors.into_iter().collect();
    tensors.sort_by_key(|(name, ..)| *name);
    let mut described = Vec::new();
    for (name, meta, digest) in tensors {
        put_text(&mut described, name);
        described.extend([meta.dtype.code(), meta.shape.len() as u8]);
        described.extend(meta.shape.iter().flat_map(|n| n.to_le_bytes()));
        described.extend(digest.chunks().iter().flat_map(|sum| sum.to_le_bytes()));
    }
    XxHash3_128::oneshot(&described)
}

/// Says where in a `.ts` file which bytes go, and what its ends are. Holds no tensor data.
///
/// [`begin`](Self::begin) a tensor, [`feed`](Self::feed) its bytes while writing them from the offset that was
/// given, and so on; [`finish`](Self::finish) gives index and superblocks.
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
    index: Index,
    names: HashSet<String>,
    /// The tensor that is being fed, and how many of its bytes have come.
    open: Option<(Record, Digester, u64)>,
    /// One past the last byte that is taken.
    end: u64,
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
        let index = Index { metadata, tensors: Vec::new() };
        Self { index, names: HashSet::new(), open: None, end: DATA_START }
    }

    /// Adds a tensor and returns where its bytes go: at a multiple of 64, or at `phase` modulo 64.
    ///
    /// # Errors
    /// [`Error::Unwritable`] for a name that is empty, has a NUL or was given before, a rank over 64, a size
    /// that is no whole number of bytes below 2^63, or when the tensor before is not complete.
    pub fn begin(&mut self, name: &str, meta: TensorMeta, phase: Option<u8>) -> Result<u64, Error> {
        self.close()?;
        let bad = |reason: String| Error::Unwritable { tensor: name.into(), reason };
        check_name(name).map_err(bad)?;
        if meta.shape.len() > MAX_RANK {
            return Err(bad(format!("rank {}, more than {MAX_RANK}", meta.shape.len())));
        }
        if !self.names.insert(name.into()) {
            return Err(bad("the name was given before".into()));
        }
        let len = meta.byte_len().filter(|&len| len < 1 << 62);
        let len = len.ok_or_else(|| bad(format!("{} has no size", describe(meta.dtype, &meta.shape))))?;
        let phase = u64::from(phase.unwrap_or(0)) % ALIGNMENT;
        let offset = (self.end + ALIGNMENT - 1 - phase) / ALIGNMENT * ALIGNMENT + phase;
        let end = offset.checked_add(len).ok_or_else(|| bad("the file would be too large".into()))?;
        self.end = end;
        let record = Record { name: name.into(), meta, offset, len, digest: Digest::default() };
        self.open = Some((record, Digester::default(), 0));
        Ok(offset)
    }

    /// Takes the next bytes of the tensor that was begun last.
    ///
    /// # Errors
    /// [`Error::Unwritable`] when they are more than the tensor has.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let Some((record, digester, fed)) = &mut self.open else {
            return Err(Error::Unwritable { tensor: String::new(), reason: "no tensor was begun".into() });
        };
        if bytes.len() as u64 > record.len - *fed {
            let reason = format!("it has {} bytes and gets more", record.len);
            return Err(Error::Unwritable { tensor: record.name.clone(), reason });
        }
        digester.feed(bytes);
        *fed += bytes.len() as u64;
        Ok(())
    }

    /// Index and superblocks.
    ///
    /// # Errors
    /// [`Error::Unwritable`] when the last tensor is not complete or the index is over 256 MiB.
    pub fn finish(mut self) -> Result<ContainerEnds, Error> {
        self.close()?;
        let (index_offset, index) = (self.end, self.index.encode());
        if index.len() as u64 > MAX_INDEX_LEN {
            let reason = "the index would be over 256 MiB".into();
            return Err(Error::Unwritable { tensor: String::new(), reason });
        }
        let (index_len, index_hash) = (index.len() as u64, XxHash3_64::oneshot(&index));
        let block = Superblock { generation: 1, index_offset, index_len, index_hash };
        let mut superblocks = block.encode();
        superblocks.resize(DATA_START as usize, 0);
        Ok(ContainerEnds { index_offset, index, superblocks })
    }

    fn close(&mut self) -> Result<(), Error> {
        if let Some((mut record, digester, fed)) = self.open.take() {
            if fed != record.len {
                let reason = format!("it has {} bytes and got {fed}", record.len);
                return Err(Error::Unwritable { tensor: record.name, reason });
            }
            record.digest = digester.finish();
            self.index.tensors.push(record);
        }
        Ok(())
    }
}
