// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::{BTreeMap, HashSet, VecDeque};

use crate::catalog::{Catalog, FileEntry};
use crate::safetensors::{self, PREFIX_LEN};
use crate::sharded::{self, MAX_INDEX_LEN};
use crate::superblock::{self, DATA_START, MAGIC, Superblock};
use crate::table::Table;
use crate::{Error, Metadata, index};

/// The byte range that a [`CatalogReader`] needs next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadRequest {
    /// Name of the file, as passed to the reader or derived from the shard index.
    pub file: String,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes. If the file ends earlier, feed the bytes up to its end.
    pub len: u64,
}

/// A parser that builds a [`Catalog`] without doing I/O. The reader requests byte ranges, and the
/// caller feeds it the bytes.
///
/// ```
/// use ts_format::CatalogReader;
///
/// let file = b"\x02\0\0\0\0\0\0\0{}"; // a safetensors file without tensors
/// let mut reader = CatalogReader::single("empty.safetensors");
/// while let Some(need) = reader.need() {
///     let bytes = &file[need.offset as usize..][..need.len as usize];
///     reader.feed(bytes, file.len() as u64)?;
/// }
/// assert_eq!(reader.finish()?.tensors().len(), 0);
/// # Ok::<(), ts_format::Error>(())
/// ```
#[derive(Debug)]
pub struct CatalogReader {
    root: String,
    state: ReaderState,
    lenient: bool,
    /// The shard of each tensor, or `None` if no shard index was read.
    weight_map: Option<BTreeMap<String, String>>,
    pending_shards: VecDeque<String>,
    /// The names of tensors that are in a shard, but not in the shard index.
    unlisted: HashSet<String>,
    files: Vec<FileEntry>,
    table: Table,
}

#[derive(Debug)]
enum ReaderState {
    ShardIndex,
    /// Needs the first 8 bytes of a file, which identify its format.
    Prefix(String),
    /// Needs the JSON header of a safetensors file. Contains the length of the header in bytes.
    Header(String, u64),
    Superblocks(String),
    /// Needs the index of a `.ts` file.
    ContainerIndex(String, Superblock),
    Done,
    /// An earlier call found an invalid file.
    Failed,
}

impl CatalogReader {
    /// Creates a reader for one file. The first 8 bytes of the file decide whether it is parsed as
    /// safetensors or as `.ts`.
    pub fn single(file: impl Into<String>) -> Self {
        let root = file.into();
        Self::new(root.clone(), ReaderState::Prefix(root))
    }

    /// Creates a reader for a shard index (`model.safetensors.index.json`) and the headers of all
    /// shards that the index names. In a [`ReadRequest`], the directory of the index precedes the
    /// name of each shard.
    pub fn sharded(index: impl Into<String>) -> Self {
        Self::new(index.into(), ReaderState::ShardIndex)
    }

    fn new(root: String, state: ReaderState) -> Self {
        let (lenient, weight_map, pending_shards) = (false, None, VecDeque::new());
        let (files, table) = (Vec::new(), Table::default());
        let unlisted = HashSet::new();
        Self { root, state, lenient, weight_map, pending_shards, unlisted, files, table }
    }

    /// Accepts the safetensors files that the safetensors library accepts, up to rank 255.
    ///
    /// A reader that is not lenient returns errors for:
    /// - duplicate tensor names and metadata keys (a lenient reader uses the last one);
    /// - tensor names that are empty or contain NUL;
    /// - unknown fields;
    /// - whitespace before the header;
    /// - metadata that is `null`;
    /// - ranks over 64.
    #[must_use]
    pub fn lenient(self) -> Self {
        Self { lenient: true, ..self }
    }

    /// Returns the byte range to feed next, or `None` if the catalog is complete or
    /// [`feed`](Self::feed) failed.
    pub fn need(&self) -> Option<ReadRequest> {
        let (file, offset, len) = match &self.state {
            ReaderState::ShardIndex => (&self.root, 0, MAX_INDEX_LEN + 1),
            ReaderState::Prefix(file) => (file, 0, PREFIX_LEN),
            ReaderState::Header(file, len) => (file, PREFIX_LEN, *len),
            ReaderState::Superblocks(file) => (file, 0, DATA_START),
            ReaderState::ContainerIndex(file, block) => (file, block.index_offset, block.index_len),
            ReaderState::Done | ReaderState::Failed => return None,
        };
        Some(ReadRequest { file: file.clone(), offset, len })
    }

    /// Parses the bytes that [`need`](Self::need) requested. `file_len` is the length of the whole
    /// file.
    ///
    /// # Errors
    /// Returns an error of kind [`ErrorKind::BadFile`](crate::ErrorKind::BadFile) if the file is
    /// malformed or truncated. After an error, all further calls return [`Error::Incomplete`].
    pub fn feed(&mut self, bytes: &[u8], file_len: u64) -> Result<(), Error> {
        match std::mem::replace(&mut self.state, ReaderState::Failed) {
            ReaderState::ShardIndex => self.feed_index(bytes)?,
            ReaderState::Prefix(file) if bytes == MAGIC => {
                self.state = ReaderState::Superblocks(file);
            }
            ReaderState::Superblocks(file) => {
                let block = superblock::active(&file, bytes, file_len)?;
                self.state = ReaderState::ContainerIndex(file, block);
            }
            ReaderState::ContainerIndex(file, block) => {
                if bytes.len() as u64 != block.index_len {
                    let (what, offset) = ("the index".into(), block.index_offset);
                    let end = offset + block.index_len;
                    return Err(Error::Truncated { file, what, offset, end, file_len });
                }
                let (metadata, table) = index::parse(&file, bytes, &block)?;
                self.add_file(file, table, metadata, file_len, Some(block))?;
                self.next_shard();
            }
            ReaderState::Prefix(file) => {
                let len = safetensors::header_len(&file, bytes, file_len)?;
                self.state = ReaderState::Header(file, len);
            }
            ReaderState::Header(file, len) => {
                if bytes.len() as u64 != len {
                    let (what, end) = ("the safetensors header".into(), PREFIX_LEN + len);
                    return Err(Error::Truncated { file, what, offset: PREFIX_LEN, end, file_len });
                }
                let header = safetensors::parse_header(&file, bytes, file_len, self.lenient)?;
                self.add_file(file, header.table, header.metadata, file_len, None)?;
                self.next_shard();
            }
            ReaderState::Done => self.state = ReaderState::Done,
            ReaderState::Failed => return Err(Error::Incomplete { file: self.root.clone() }),
        }
        Ok(())
    }

    /// Returns the catalog of all files that were read.
    ///
    /// # Errors
    /// Returns [`Error::Incomplete`] if [`need`](Self::need) still requests bytes, or
    /// [`feed`](Self::feed) failed.
    pub fn finish(self) -> Result<Catalog, Error> {
        match self.state {
            ReaderState::Done if !self.files.is_empty() => {
                let mut table = self.table;
                table.sort();
                table.shrink();
                Ok(Catalog::new(self.files, table))
            }
            _ => Err(Error::Incomplete { file: self.root }),
        }
    }

    fn feed_index(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if bytes.len() as u64 > MAX_INDEX_LEN {
            return Err(Error::header(
                &self.root,
                MAX_INDEX_LEN,
                "the shard index exceeds 256 MiB",
            ));
        }
        let mut map = sharded::parse_index(&self.root, bytes)?;
        let directory = self.root.rfind(['/', '\\']).map_or("", |at| &self.root[..=at]);
        map.values_mut().for_each(|shard| shard.insert_str(0, directory));
        let mut shards: Vec<&String> = map.values().collect();
        shards.sort_unstable();
        shards.dedup();
        self.pending_shards = shards.into_iter().cloned().collect();
        self.weight_map = Some(map);
        self.next_shard();
        Ok(())
    }

    fn next_shard(&mut self) {
        self.state = self.pending_shards.pop_front().map_or(ReaderState::Done, ReaderState::Prefix);
    }

    /// Adds the tensors of a file. With a shard index, leaves out the tensors that the index
    /// assigns to another shard. Those that it does not mention are added.
    fn add_file(
        &mut self,
        file: String,
        mut table: Table,
        metadata: Metadata,
        file_len: u64,
        superblock: Option<Superblock>,
    ) -> Result<(), Error> {
        if let Some(name) = table.sort() {
            return Err(Error::header(&file, 0, format!("duplicate tensor name `{name}`")));
        }
        if let Some(map) = &self.weight_map {
            let mut rows = std::mem::take(&mut table.rows);
            rows.retain(|row| map.get(table.name(row)).is_none_or(|shard| *shard == file));
            for row in rows.iter().filter(|row| !map.contains_key(table.name(row))) {
                let name = table.name(row);
                if !self.unlisted.insert(name.to_string()) {
                    let reason = format!(
                        "tensor `{name}` is also in another shard, and the index {} does not \
                         say which one to use",
                        self.root
                    );
                    return Err(Error::header(&file, 0, reason));
                }
            }
            // Both are sorted by name.
            let listed = rows.iter().map(|row| table.name(row));
            let mut listed = listed.filter(|name| map.contains_key(*name));
            let mut wanted = map.iter().filter(|(_, shard)| **shard == file);
            let missing = wanted.find(|(tensor, _)| listed.next() != Some(tensor));
            if let Some((tensor, _)) = missing {
                let (tensor, index) = (tensor.clone(), self.root.clone());
                return Err(Error::MissingFromShard { file, tensor, index });
            }
            table.rows = rows;
        }
        let id = u32::try_from(self.files.len())
            .expect("a shard index of at most 256 MiB names fewer than 2^32 files");
        self.table.append(&table, id, &file)?;
        self.files.push(FileEntry { name: file, len: file_len, metadata, superblock });
        Ok(())
    }
}

impl Catalog {
    /// Reads a safetensors or `.ts` file from memory. `name` identifies it in errors.
    ///
    /// # Errors
    /// Returns the errors of [`CatalogReader::feed`].
    pub fn from_bytes(name: &str, file: &[u8]) -> Result<Self, Error> {
        Self::read(CatalogReader::single(name), file)
    }

    /// Reads a file like [`from_bytes`](Self::from_bytes), but with a
    /// [lenient](CatalogReader::lenient) reader.
    ///
    /// # Errors
    /// Returns the errors of [`CatalogReader::feed`].
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
}
