// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use crate::container::{self, DATA_START, Index, MAGIC, Superblock};
use crate::digest::Digest;
use crate::error::describe;
use crate::safetensors::{self, PREFIX_LEN};
use crate::sharded::{self, MAX_INDEX_LEN};
use crate::{Error, TensorMeta};

/// Which file of a [`Catalog`], as an index into [`Catalog::files`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// A run of bytes in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// The file.
    pub file: FileId,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
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
}

/// A tensor and where its bytes are, in order.
///
/// One part is a tensor that lies in a file as it is used; several parts are an *assembled* tensor, as a
/// loader makes it that stacks or concatenates what the file keeps apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Element type and shape.
    pub meta: TensorMeta,
    /// Source ranges; their lengths add up to [`TensorMeta::byte_len`].
    pub parts: Vec<ByteRange>,
}

/// Everything a checkpoint holds, without its bytes.
#[derive(Debug, Clone, Default)]
pub struct Catalog {
    files: Vec<FileEntry>,
    tensors: BTreeMap<String, TensorEntry>,
    /// By the ranges that have one.
    digests: HashMap<ByteRange, Arc<Digest>>,
}

impl Catalog {
    /// Reads a file that is in memory: safetensors or `.ts`, whichever its first bytes say. `name` is what errors
    /// call it.
    ///
    /// # Errors
    /// As [`CatalogReader::feed`].
    pub fn from_bytes(name: &str, file: &[u8]) -> Result<Self, Error> {
        let mut reader = CatalogReader::single(name);
        while let Some(need) = reader.need() {
            let end = need.offset.saturating_add(need.len).min(file.len() as u64) as usize;
            reader.feed(&file[(need.offset as usize).min(end)..end], file.len() as u64)?;
        }
        reader.finish()
    }

    /// The files, in the order of their [`FileId`]s.
    pub fn files(&self) -> &[FileEntry] {
        &self.files
    }

    /// All tensors by name, in the order of the names.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorEntry)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// The tensor with this name.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`], naming the files that were looked at.
    pub fn require(&self, name: &str) -> Result<&TensorEntry, Error> {
        self.tensor(name).ok_or_else(|| {
            let names: Vec<&str> = self.files.iter().map(|f| f.name.as_str()).collect();
            Error::NoSuchTensor { tensor: name.into(), files: names.join(", ") }
        })
    }

    /// The checksums of exactly this range, where the file has them (`.ts` does, safetensors does not).
    pub fn digest(&self, range: ByteRange) -> Option<&Arc<Digest>> {
        self.digests.get(&range)
    }

    /// This catalog and another as one. The other's files come behind its own, and its tensors take the place of
    /// those of the same name.
    #[must_use]
    pub fn overlaid(mut self, other: Catalog) -> Catalog {
        let shift = self.files.len() as u32;
        let moved = |file: FileId| FileId(file.0 + shift);
        self.files.extend(other.files);
        for (name, mut entry) in other.tensors {
            for part in &mut entry.parts {
                part.file = moved(part.file);
            }
            self.tensors.insert(name, entry);
        }
        let digests = other.digests.into_iter();
        self.digests.extend(digests.map(|(at, digest)| (ByteRange { file: moved(at.file), ..at }, digest)));
        self
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
            let file = file.ok_or_else(|| bad(format!("file {} is not in the catalog", part.file.0)))?;
            let end = part.offset.checked_add(part.len);
            if end.is_none_or(|end| end > file.len) {
                return Err(bad(format!(
                    "{} bytes at {} leave {} of {} bytes",
                    part.len, part.offset, file.name, file.len
                )));
            }
            total = total.checked_add(part.len).ok_or_else(|| bad("more than 2^64 bytes".into()))?;
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

/// Bytes that a [`CatalogReader`] wants next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// The file, by the name it was introduced with.
    pub file: String,
    /// First byte.
    pub offset: u64,
    /// Length in bytes; a file that ends earlier is fed as far as it goes.
    pub len: u64,
}

/// Builds a [`Catalog`] from bytes it asks for: `while let Some(need) = need() { feed(..) }`, then `finish`.
#[derive(Debug)]
pub struct CatalogReader {
    root: String,
    state: State,
    /// Tensor -> shard, when an index was read.
    weight_map: Option<BTreeMap<String, String>>,
    waiting: VecDeque<String>,
    catalog: Catalog,
}

#[derive(Debug)]
enum State {
    Index,
    Prefix(String),
    Header(String, u64),
    Superblocks(String),
    Container(String, Superblock),
    Done,
}

impl CatalogReader {
    /// Reads one file, safetensors or `.ts`, whichever its first bytes say.
    pub fn single(file: impl Into<String>) -> Self {
        let root = file.into();
        let state = State::Prefix(root.clone());
        Self { root, state, weight_map: None, waiting: VecDeque::new(), catalog: Catalog::default() }
    }

    /// Reads a shard index (`model.safetensors.index.json`), then the header of every shard it names. Shards are
    /// asked for by the index's own directory and their name.
    pub fn sharded(index: impl Into<String>) -> Self {
        let state = State::Index;
        Self {
            root: index.into(),
            state,
            weight_map: None,
            waiting: VecDeque::new(),
            catalog: Catalog::default(),
        }
    }

    /// The bytes to feed next; `None` when the catalog is complete.
    pub fn need(&self) -> Option<Need> {
        let (file, offset, len) = match &self.state {
            State::Index => (&self.root, 0, MAX_INDEX_LEN + 1),
            State::Prefix(file) => (file, 0, PREFIX_LEN),
            State::Header(file, len) => (file, PREFIX_LEN, *len),
            State::Superblocks(file) => (file, 0, DATA_START),
            State::Container(file, block) => (file, block.index_offset, block.index_len),
            State::Done => return None,
        };
        Some(Need { file: file.clone(), offset, len })
    }

    /// Takes the bytes that [`need`](Self::need) asked for, of a file that is `file_len` bytes long.
    ///
    /// # Errors
    /// The file is wrong: the error names it, the place and the reason. The reader is then of no further use.
    pub fn feed(&mut self, bytes: &[u8], file_len: u64) -> Result<(), Error> {
        match std::mem::replace(&mut self.state, State::Done) {
            State::Index => self.feed_index(bytes)?,
            State::Prefix(file) if bytes == MAGIC => self.state = State::Superblocks(file),
            State::Superblocks(file) => {
                let block = container::superblock(&file, bytes, file_len)?;
                self.state = State::Container(file, block);
            }
            State::Container(file, block) => {
                if bytes.len() as u64 != block.index_len {
                    let (what, offset) = ("the index".into(), block.index_offset);
                    let end = offset + block.index_len;
                    return Err(Error::Truncated { file, what, offset, end, file_len });
                }
                let index = Index::decode(&file, bytes, &block)?;
                let ranges =
                    index.tensors.into_iter().map(|t| (t.name, t.meta, t.offset, t.len, Some(t.digest)));
                self.take_file(file, ranges, index.metadata, file_len)?;
                self.next_shard();
            }
            State::Prefix(file) => {
                let len = safetensors::header_len(&file, bytes, file_len)?;
                self.state = State::Header(file, len);
            }
            State::Header(file, len) => {
                if bytes.len() as u64 != len {
                    let (what, end) = ("the safetensors header".into(), PREFIX_LEN + len);
                    return Err(Error::Truncated { file, what, offset: PREFIX_LEN, end, file_len });
                }
                let header = safetensors::parse_header(&file, bytes, file_len)?;
                let ranges = header.tensors.into_iter().map(|t| (t.name, t.meta, t.offset, t.len, None));
                self.take_file(file, ranges, header.metadata, file_len)?;
                self.next_shard();
            }
            State::Done => {}
        }
        Ok(())
    }

    /// The finished catalog.
    ///
    /// # Errors
    /// [`Error::Incomplete`] when bytes are still wanted.
    pub fn finish(self) -> Result<Catalog, Error> {
        match self.state {
            State::Done if !self.catalog.files.is_empty() => Ok(self.catalog),
            _ => Err(Error::Incomplete { file: self.root }),
        }
    }

    fn feed_index(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if bytes.len() as u64 > MAX_INDEX_LEN {
            return Err(Error::header(&self.root, MAX_INDEX_LEN, "the index is larger than 256 MiB"));
        }
        let mut map = sharded::parse_index(&self.root, bytes)?;
        // Shards lie beside their index.
        let directory = self.root.rfind(['/', '\\']).map_or("", |at| &self.root[..=at]);
        map.values_mut().for_each(|shard| shard.insert_str(0, directory));
        let mut shards: Vec<&String> = map.values().collect();
        shards.sort_unstable();
        shards.dedup();
        self.waiting = shards.into_iter().cloned().collect();
        self.weight_map = Some(map);
        self.next_shard();
        Ok(())
    }

    fn next_shard(&mut self) {
        self.state = self.waiting.pop_front().map_or(State::Done, State::Prefix);
    }

    /// Adds a file's tensors. With an index, just those it assigns to this shard, and all of those.
    fn take_file(
        &mut self,
        file: String,
        tensors: impl Iterator<Item = (String, TensorMeta, u64, u64, Option<Digest>)>,
        metadata: BTreeMap<String, String>,
        file_len: u64,
    ) -> Result<(), Error> {
        let id =
            FileId(u32::try_from(self.catalog.files.len()).expect("an index of 256 MiB names fewer files"));
        let mut found = HashMap::new();
        for (name, meta, offset, len, digest) in tensors {
            if let Some(digest) = digest.filter(|_| len > 0) {
                self.catalog.digests.insert(ByteRange { file: id, offset, len }, Arc::new(digest));
            }
            found.insert(name, TensorEntry { meta, parts: vec![ByteRange { file: id, offset, len }] });
        }
        match &self.weight_map {
            None => self.catalog.tensors.extend(found),
            Some(map) => {
                for tensor in map.iter().filter(|(_, shard)| **shard == file).map(|(tensor, _)| tensor) {
                    let entry = found.remove(tensor).ok_or_else(|| Error::MissingFromShard {
                        file: file.clone(),
                        tensor: tensor.clone(),
                        index: self.root.clone(),
                    })?;
                    self.catalog.tensors.insert(tensor.clone(), entry);
                }
            }
        }
        self.catalog.files.push(FileEntry { name: file, len: file_len, metadata });
        Ok(())
    }
}
