// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the files of a checkpoint, opens them, and reads their headers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ts_format::{Catalog, CatalogReader, ReadRequest};
use ts_io::Source;

use crate::foreign;
pub use crate::not_a_checkpoint::NotACheckpoint;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONTAINER: &str = "model.ts";

/// The catalog of a checkpoint, and its open files.
///
/// Most programs open checkpoints with [`Model::open`](crate::Model::open), or with `Checkpoint` of
/// the crate `tensorstream`. The functions here are for programs that open files in another way.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CheckpointFiles {
    /// The tensors and their locations.
    pub catalog: Catalog,
    /// The open files, indexed by [`FileId`](ts_format::FileId).
    pub sources: Vec<Arc<Source>>,
}

/// Opens the file or URL with a name.
pub type OpenSource<'a, E> = &'a mut dyn FnMut(&str) -> Result<Arc<Source>, E>;

/// Sources that are already open, by name.
pub type OpenSources = BTreeMap<String, Arc<Source>>;

impl CheckpointFiles {
    /// Returns a checkpoint that is already open. `sources` are the files of `catalog`, in order.
    pub fn new(catalog: Catalog, sources: Vec<Arc<Source>>) -> Self {
        Self { catalog, sources }
    }

    /// Finds the checkpoint at a path or URL, opens its files with `open`, and reads their headers.
    /// Blocks.
    ///
    /// `path` is a `.safetensors` or `.ts` file, a shard index (`.json`), or a directory in which
    /// [`checkpoint_file`] or [`checkpoint_at_url`] finds one of them. With `lenient`, every
    /// safetensors file is accepted that the safetensors library accepts
    /// ([`CatalogReader::lenient`]).
    ///
    /// # Errors
    /// Returns the errors of `open`, those of a read or of a malformed file, and
    /// [`NotACheckpoint`].
    pub fn open<E>(
        path: &Path,
        lenient: bool,
        open: OpenSource<'_, ts_io::Error>,
    ) -> Result<Self, E>
    where
        E: From<ts_io::Error> + From<ts_format::Error> + From<NotACheckpoint>,
    {
        let mut opened = OpenSources::new();
        let file = match path.to_str().filter(|text| Source::is_url(text)) {
            Some(url) => checkpoint_at_url::<E>(url, &mut opened, open)?,
            None if path.is_dir() => checkpoint_file::<E>(path)?,
            None => path.to_path_buf(),
        };
        let name = file.to_string_lossy().into_owned();
        let mut open_named = |wanted: &str| match file.to_str() {
            Some(_) => open(wanted).map_err(E::from),
            None => Ok(open_beside(&file, &name, wanted)?),
        };
        Self::read(&name, lenient, opened, &mut open_named)
    }

    /// Reads the headers of the checkpoint in the file `name`. Gets files that are not in `opened`
    /// from `open`: the file `name`, and shards in the same directory. Blocks.
    ///
    /// # Errors
    /// Returns the errors of `open`, those of a read or of a malformed file, and
    /// [`NotACheckpoint::ForeignFormat`].
    pub fn read<E>(
        name: &str,
        lenient: bool,
        mut opened: OpenSources,
        open: OpenSource<'_, E>,
    ) -> Result<Self, E>
    where
        E: From<ts_io::Error> + From<ts_format::Error> + From<NotACheckpoint>,
    {
        let is_index = Path::new(name).extension().is_some_and(|e| e == "json");
        let reader =
            if is_index { CatalogReader::sharded(name) } else { CatalogReader::single(name) };
        let mut reader = if lenient { reader.lenient() } else { reader };
        while let Some(ReadRequest { file, offset, len }) = reader.need() {
            let source = match opened.get(&file) {
                Some(source) => Arc::clone(source),
                None => {
                    let source = open(&file)?;
                    opened.insert(file, Arc::clone(&source));
                    source
                }
            };
            let end = offset.saturating_add(len).min(source.len());
            let mut bytes = vec![0; end.saturating_sub(offset) as usize];
            let got = source.read_at(offset, &mut bytes)?;
            bytes.truncate(got);
            if let Err(error) = reader.feed(&bytes, source.len()) {
                return Err(foreign::detect(&source).map_or_else(|| error.into(), E::from));
            }
        }
        let catalog = reader.finish()?;
        let sources = catalog.files().iter().map(|file| Arc::clone(&opened[&file.name])).collect();
        Ok(Self { catalog, sources })
    }
}

/// Finds the checkpoint in a directory, and returns the path of its file. Blocks.
///
/// This is the first of these files that exists:
/// 1. `model.safetensors`
/// 2. `model.safetensors.index.json`
/// 3. `model.ts`
/// 4. the only file with the suffix `.safetensors` or `.ts`
///
/// # Errors
/// Returns [`NotACheckpoint`], or an error of the system if the directory cannot be read.
pub fn checkpoint_file<E>(dir: &Path) -> Result<PathBuf, E>
where
    E: From<ts_io::Error> + From<NotACheckpoint>,
{
    if let Some(file) = [SINGLE, INDEX, CONTAINER]
        .map(|name| dir.join(name))
        .into_iter()
        .find(|file| file.symlink_metadata().is_ok())
    {
        return Ok(file);
    }
    let failed =
        |source: std::io::Error| ts_io::Error::Open { path: dir.into(), source: source.into() };
    let entries = std::fs::read_dir(dir).map_err(failed)?;
    let files = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<_> =
        files.filter(|p| p.extension().is_some_and(|e| e == "safetensors" || e == "ts")).collect();
    match files.len() {
        1 => Ok(files.remove(0)),
        0 => Err(foreign::detect_in(dir)
            .unwrap_or_else(|| NotACheckpoint::Missing { path: dir.into(), found: 0 })
            .into()),
        found => Err(NotACheckpoint::Missing { path: dir.into(), found }.into()),
    }
}

/// Finds the file of a checkpoint at a URL. If the URL is a directory, tries the first three names
/// of [`checkpoint_file`], and adds the open file to `opened`. Blocks.
///
/// # Errors
/// Returns [`NotACheckpoint::Missing`] if none exists, and the errors of `open`.
pub fn checkpoint_at_url<E>(
    url: &str,
    opened: &mut OpenSources,
    open: OpenSource<'_, ts_io::Error>,
) -> Result<PathBuf, E>
where
    E: From<ts_io::Error> + From<NotACheckpoint>,
{
    if is_checkpoint_name(url) {
        return Ok(url.into());
    }
    for name in [SINGLE, INDEX, CONTAINER] {
        let file = format!("{}/{name}", url.trim_end_matches('/'));
        match open(&file) {
            Ok(source) => {
                opened.insert(file.clone(), source);
                return Ok(file.into());
            }
            Err(error) if error.kind() == ts_io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(NotACheckpoint::Missing { path: url.into(), found: 0 }.into())
}

/// Returns whether a name ends like that of a file of a checkpoint, and not like that of a
/// directory.
pub fn is_checkpoint_name(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|e| e == "safetensors" || e == "ts" || e == "json")
}

/// Opens a file of a checkpoint whose path is not UTF-8. `name` is what the catalog has instead of
/// the path of `file`. `wanted` is `name`, or the name of a shard in the same directory.
fn open_beside(file: &Path, name: &str, wanted: &str) -> Result<Arc<Source>, ts_io::Error> {
    let path = match wanted.rsplit('/').next() {
        Some(shard) if wanted != name => file.with_file_name(shard),
        _ => file.to_path_buf(),
    };
    Source::open(path)
}
