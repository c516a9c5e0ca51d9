// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::{BTreeMap, VecDeque};

use crate::catalog::{Catalog, FileEntry};
use crate::safetensors::{self, PREFIX_LEN};
use crate::sharded::{self, MAX_INDEX_LEN};
use crate::superblock::{self, DATA_START, MAGIC, Superblock};
use crate::table::Table;
use crate::{Error, index};

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

/// Builds a [`Catalog`] from bytes it asks for: `while let Some(need) = need() { feed(..) }`, then
/// `finish`.
#[derive(Debug)]
pub struct CatalogReader {
    root: String,
    state: State,
    lenient: bool,
    /// Tensor -> shard, when an index was read.
    weight_map: Option<BTreeMap<String, String>>,
    waiting: VecDeque<String>,
    files: Vec<FileEntry>,
    table: Table,
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
        Self::new(root.clone(), State::Prefix(root))
    }

    /// Reads a shard index (`model.safetensors.index.json`), then the header of every shard it
    /// names. Shards are asked for by the index's own directory and their name.
    pub fn sharded(index: impl Into<String>) -> Self {
        Self::new(index.into(), State::Index)
    }

    fn new(root: String, state: State) -> Self {
        let (lenient, weight_map, waiting) = (false, None, VecDeque::new());
        let (files, table) = (Vec::new(), Table::default());
        Self { root, state, lenient, weight_map, waiting, files, table }
    }

    /// Takes safetensors files as their library does, which are otherwise refused: names that are
    /// empty, have a NUL or stand twice (the last one counts), unknown fields, metadata keys that
    /// stand twice, space before the header, a rank over 64, up to 255.
    #[must_use]
    pub fn lenient(self) -> Self {
        Self { lenient: true, ..self }
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

    /// Takes the bytes that [`need`](Self::need) asked for, of a file that is `file_len` bytes
    /// long.
    ///
    /// # Errors
    /// The file is wrong: the error names it, the place and the reason. The reader is then of no
    /// further use.
    pub fn feed(&mut self, bytes: &[u8], file_len: u64) -> Result<(), Error> {
        match std::mem::replace(&mut self.state, State::Done) {
            State::Index => self.feed_index(bytes)?,
            State::Prefix(file) if bytes == MAGIC => self.state = State::Superblocks(file),
            State::Superblocks(file) => {
                let block = superblock::active(&file, bytes, file_len)?;
                self.state = State::Container(file, block);
            }
            State::Container(file, block) => {
                if bytes.len() as u64 != block.index_len {
                    let (what, offset) = ("the index".into(), block.index_offset);
                    let end = offset + block.index_len;
                    return Err(Error::Truncated { file, what, offset, end, file_len });
                }
                let (metadata, table) = index::parse(&file, bytes, &block)?;
                self.take_file(file, table, metadata, file_len, Some(block))?;
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
                let header = safetensors::parse_header(&file, bytes, file_len, self.lenient)?;
                self.take_file(file, header.table, header.metadata, file_len, None)?;
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
            State::Done if !self.files.is_empty() => {
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
                "the index is larger than 256 MiB",
            ));
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
        mut table: Table,
        metadata: BTreeMap<String, String>,
        file_len: u64,
        superblock: Option<Superblock>,
    ) -> Result<(), Error> {
        if let Some(name) = table.sort() {
            return Err(Error::header(&file, 0, format!("the name `{name}` stands twice")));
        }
        if let Some(map) = &self.weight_map {
            let mut rows = std::mem::take(&mut table.rows);
            rows.retain(|row| map.get(table.name(row)).is_some_and(|shard| *shard == file));
            // Both are sorted by name: the first that differs is missing.
            let mut wanted =
                map.iter().filter(|(_, shard)| **shard == file).map(|(tensor, _)| tensor);
            let missing =
                rows.iter().map(|row| table.name(row)).zip(&mut wanted).find(|(a, b)| a != b);
            if let Some(tensor) = missing.map(|(_, tensor)| tensor).or_else(|| wanted.next()) {
                let (tensor, index) = (tensor.clone(), self.root.clone());
                return Err(Error::MissingFromShard { file, tensor, index });
            }
            table.rows = rows;
        }
        let id = u32::try_from(self.files.len()).expect("an index of 256 MiB names fewer files");
        self.table.append(&table, id)?;
        self.files.push(FileEntry { name: file, len: file_len, metadata, superblock });
        Ok(())
    }
}
