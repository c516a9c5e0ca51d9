// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ts_format::{Catalog, CatalogReader, Need, TensorEntry};
use ts_io::Source;
use ts_orchestrator::{Engine, EngineConfig, Phase, Unit, UnitTensor};

use crate::Error;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A checkpoint whose headers have been read: what is in it, and the open files it is in.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    catalog: Catalog,
    sources: Vec<Arc<Source>>,
}

impl Checkpoint {
    /// Opens a `.safetensors` file, a shard index (`.json`), or a directory with either. Reads headers only.
    ///
    /// A directory's `model.safetensors` is taken before its `model.safetensors.index.json`, as transformers
    /// does, and a single `.safetensors` file of another name if there is neither.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`], [`Error::Io`] when a file cannot be opened or read, [`Error::Format`] when
    /// one is not what it should be.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let file = if path.is_dir() { find_in(path)? } else { path.to_path_buf() };
        let name = file.to_string_lossy().into_owned();
        let sharded = file.extension().is_some_and(|e| e == "json");
        let reader = if sharded { CatalogReader::sharded(name) } else { CatalogReader::single(name) };
        read_catalog(reader, file.parent().unwrap_or(Path::new("")))
    }

    /// What is in it.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Its files, by the ids that the catalog uses.
    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }

    /// Units as the tensors' names suggest them: all tensors whose names differ in their last component make
    /// one, as the parameters of a module do. In the order in which they lie in the files.
    pub fn units_by_module(&self) -> Vec<Unit> {
        let mut units: BTreeMap<&str, Vec<(&str, &TensorEntry)>> = BTreeMap::new();
        for (name, entry) in self.catalog.tensors() {
            let module = name.rsplit_once('.').map_or("", |(module, _)| module);
            units.entry(module).or_default().push((name, entry));
        }
        let place = |tensors: &[(&str, &TensorEntry)]| {
            tensors.iter().flat_map(|(_, e)| e.parts.first()).map(|p| (p.file, p.offset)).min()
        };
        let mut units: Vec<_> = units.into_iter().collect();
        units.sort_by_key(|(_, tensors)| place(tensors));
        let tensor = |(name, entry): (&str, &TensorEntry)| UnitTensor {
            name: name.into(),
            entry: entry.clone(),
            phase: Phase::Mapped,
        };
        let unit = |(name, tensors): (&str, Vec<_>)| Unit {
            name: name.into(),
            tensors: tensors.into_iter().map(tensor).collect(),
        };
        units.into_iter().map(unit).collect()
    }

    /// An engine over these units, whose tensors lie in this checkpoint's files.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn engine(&self, units: Vec<Unit>, config: EngineConfig) -> Result<Engine, Error> {
        Ok(Engine::new(units, self.sources.clone(), config)?)
    }
}

fn find_in(dir: &Path) -> Result<PathBuf, Error> {
    if let Some(file) = [SINGLE, INDEX].map(|name| dir.join(name)).into_iter().find(|file| file.exists()) {
        return Ok(file);
    }
    let entries = std::fs::read_dir(dir).map_err(|e| open_error(dir, e))?;
    let files = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<_> = files.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
    match files.len() {
        1 => Ok(files.remove(0)),
        found => Err(Error::NoCheckpoint { path: dir.into(), found }),
    }
}

fn open_error(path: &Path, error: std::io::Error) -> Error {
    Error::Io(ts_io::Error::Open { path: path.into(), source: error.into() })
}

/// Feeds the reader from files: names in an index are beside it, so they are joined to its directory.
fn read_catalog(mut reader: CatalogReader, dir: &Path) -> Result<Checkpoint, Error> {
    let mut opened: BTreeMap<String, Arc<Source>> = BTreeMap::new();
    while let Some(Need { file, offset, len }) = reader.need() {
        let source = match opened.get(&file) {
            Some(source) => Arc::clone(source),
            None => {
                let path =
                    if Path::new(&file).parent() == Some(dir) { (&file).into() } else { dir.join(&file) };
                let source = Source::open(path)?;
                opened.insert(file.clone(), Arc::clone(&source));
                source
            }
        };
        let end = offset.saturating_add(len).min(source.len());
        let mut bytes = vec![0; end.saturating_sub(offset) as usize];
        let got = source.read_at(offset, &mut bytes)?;
        bytes.truncate(got);
        reader.feed(&bytes, source.len())?;
    }
    let catalog = reader.finish()?;
    let sources = catalog.files().iter().map(|file| Arc::clone(&opened[&file.name])).collect();
    Ok(Checkpoint { catalog, sources })
}
