// SPDX-License-Identifier: MIT OR Apache-2.0
//! Open checkpoints.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ts_format::{Catalog, Tensor};
use ts_io::{Source, Tuner};
use ts_orchestrator::files::{CheckpointFiles, checkpoint_at_url, is_checkpoint_name};
use ts_orchestrator::{Engine, EngineConfig, Model, ModelBuilder, Phase, Unit, UnitTensor};
use ts_pool::Budget;
use ts_streams::Device;

use crate::Error;

/// An open checkpoint: the catalog of its tensors, and the files that contain them.
///
/// Opening a checkpoint reads only headers. Use [`load`](Self::load) to read all tensors,
/// [`read_block`](Self::read_block) to read a part of a tensor, or [`engine`](Self::engine) to
/// stream the tensors.
///
/// ```
/// use tensorstream::Checkpoint;
///
/// // A safetensors file in memory; `open` takes a path or URL.
/// let header = br#"{"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
/// let mut file = (header.len() as u64).to_le_bytes().to_vec();
/// file.extend_from_slice(header);
/// file.extend_from_slice(b"abc");
///
/// let checkpoint = Checkpoint::from_bytes("model.safetensors", file)?;
/// assert_eq!(checkpoint.catalog().require("w")?.shape(), [3]);
/// let mut bytes = [0; 2];
/// checkpoint.read_block("w", &[1..3], &mut bytes)?;
/// assert_eq!(&bytes, b"bc");
/// # Ok::<(), tensorstream::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Checkpoint {
    catalog: Catalog,
    sources: Vec<Arc<Source>>,
    /// How the checkpoint was opened, and those that were merged into it.
    origins: Vec<Origin>,
}

/// How a checkpoint was opened.
#[derive(Debug, Clone)]
enum Origin {
    /// At an absolute path or a URL.
    Path { path: PathBuf, lenient: bool },
    /// From memory or by a function, with this name.
    Other(String),
}

impl Checkpoint {
    /// Opens a `.safetensors` or `.ts` file, a shard index (`.json`), or a directory that contains
    /// one of them. Reads only headers.
    ///
    /// In a directory, the first of these files that exists is opened:
    /// 1. `model.safetensors`
    /// 2. `model.safetensors.index.json`
    /// 3. `model.ts`
    /// 4. the only file with the suffix `.safetensors` or `.ts`
    ///
    /// With the feature `object`, `path` can be a URL that [`Source::open`] supports. With the
    /// feature `remote`, it can be the URL of a file that `tensorstream serve-weights` serves:
    /// `ts://HOST:PORT/NAME`, or `tss://HOST:PORT/NAME` over TLS. A URL without one of the suffixes
    /// above is a directory, in which only the first three names are tried.
    ///
    /// These environment variables configure connections to `tensorstream serve-weights`:
    ///
    /// | variable | meaning |
    /// |---|---|
    /// | `TENSORSTREAM_TOKEN` | the token of the server |
    /// | `TENSORSTREAM_CA` | a PEM file of trusted certificates, required for `tss://` |
    /// | `TENSORSTREAM_CERT`, `TENSORSTREAM_KEY` | PEM files of the client's certificate and key |
    ///
    /// # Errors
    /// - [`Error::NotACheckpoint`] if a directory contains no checkpoint, or a file is a GGUF file
    ///   or a pickle.
    /// - [`Error::Io`] if a file cannot be opened or read.
    /// - [`Error::Format`] if a file is malformed or truncated.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_with(path.as_ref(), false)
    }

    /// Opens a checkpoint like [`open`](Self::open), but accepts every safetensors file that the
    /// safetensors library accepts (see [`lenient`](ts_format::CatalogReader::lenient)).
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open).
    pub fn open_lenient(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_with(path.as_ref(), true)
    }

    /// Opens the checkpoint in the file `name`, which is a `.safetensors` or `.ts` file, or a shard
    /// index (`.json`). Gets every file from `open`, for example because another process has to
    /// open it. `open` gets `name`, or the name of a shard: the directory of `name`, with the name
    /// in the index.
    ///
    /// # Errors
    /// Returns the errors of `open`, and those of [`open`](Self::open).
    pub fn open_through(
        name: &str,
        open: &mut dyn FnMut(&str) -> Result<Arc<Source>, Error>,
    ) -> Result<Self, Error> {
        let files = CheckpointFiles::read(name, false, BTreeMap::new(), open)?;
        Ok(Self::new(files, Origin::Other(name.to_string())))
    }

    /// Opens a checkpoint like [`open_through`](Self::open_through), but accepts every safetensors
    /// file that the safetensors library accepts (see
    /// [`lenient`](ts_format::CatalogReader::lenient)).
    ///
    /// # Errors
    /// Returns the errors of [`open_through`](Self::open_through).
    pub fn open_through_lenient(
        name: &str,
        open: &mut dyn FnMut(&str) -> Result<Arc<Source>, Error>,
    ) -> Result<Self, Error> {
        let files = CheckpointFiles::read(name, true, BTreeMap::new(), open)?;
        Ok(Self::new(files, Origin::Other(name.to_string())))
    }

    /// Reads a safetensors or `.ts` file from memory. `name` identifies it in errors. An
    /// [`engine`](Self::engine) cannot stream such a checkpoint, so [`load_each`](Self::load_each)
    /// returns an error too.
    ///
    /// # Errors
    /// Returns [`Error::Format`] if the file is malformed or truncated.
    pub fn from_bytes(
        name: &str,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::from_bytes_with(name, bytes, false)
    }

    /// Like [`from_bytes`](Self::from_bytes), but accepts every file that the safetensors library
    /// accepts (see [`lenient`](ts_format::CatalogReader::lenient)).
    ///
    /// # Errors
    /// Returns the errors of [`from_bytes`](Self::from_bytes).
    pub fn from_bytes_lenient(
        name: &str,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::from_bytes_with(name, bytes, true)
    }

    fn from_bytes_with(
        name: &str,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
        lenient: bool,
    ) -> Result<Self, Error> {
        let opened = BTreeMap::from([(name.to_string(), Source::in_memory(name, bytes))]);
        let mut open = |name: &str| Ok(open_source(name)?);
        let files = CheckpointFiles::read::<Error>(name, lenient, opened, &mut open)?;
        Ok(Self::new(files, Origin::Other(name.to_string())))
    }

    fn open_with(path: &Path, lenient: bool) -> Result<Self, Error> {
        let files = CheckpointFiles::open::<Error>(path, lenient, &mut open_source)?;
        let path = match path.to_str().is_some_and(Source::is_url) {
            true => path.to_path_buf(),
            false => std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()),
        };
        Ok(Self::new(files, Origin::Path { path, lenient }))
    }

    fn new(files: CheckpointFiles, origin: Origin) -> Self {
        let CheckpointFiles { catalog, sources, .. } = files;
        Self { catalog, sources, origins: vec![origin] }
    }

    /// Opens the checkpoint again, as [`open`](Self::open) did: finds what is at its path now.
    /// Reads only headers.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open), and [`Error::Io`] if the checkpoint was not
    /// opened at a path.
    pub fn reopen(&self) -> Result<Self, Error> {
        let reopen = |origin: &Origin| match origin {
            Origin::Path { path, lenient } => Self::open_with(path, *lenient),
            Origin::Other(name) => {
                let reason = "it was not opened at a path, so it cannot be opened again";
                Err(Error::open(Path::new(name), std::io::Error::other(reason)))
            }
        };
        let mut opened = self.origins.iter().map(reopen);
        let first = opened.next().expect("a checkpoint has an origin")?;
        opened.try_fold(first, |merged, other| merged.merge(other?))
    }

    /// Returns whether another checkpoint was [merged](Self::merge) into this one.
    pub fn is_merged(&self) -> bool {
        self.origins.len() > 1
    }

    /// Returns a tensor of a unit with the bytes of `newer`, a later state of this checkpoint: see
    /// [`Catalog::translate`].
    ///
    /// # Errors
    /// Returns [`Error::Format`] if `newer` has other tensors.
    pub fn translate(&self, tensor: &UnitTensor, newer: &Self) -> Result<UnitTensor, Error> {
        let parts = self.catalog.translate(&tensor.entry.parts, &newer.catalog)?;
        let entry = newer.catalog.assemble(&tensor.name, tensor.entry.meta.clone(), parts)?;
        Ok(UnitTensor::new(&newer.catalog, tensor.name.as_str(), entry, tensor.phase))
    }

    /// Returns the catalog, which lists the tensors and their locations.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Returns the open files, indexed by [`FileId`](ts_format::FileId).
    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }

    /// Returns the source of a checkpoint that consists of the single `.ts` or `.safetensors` file
    /// at `path`. A shard index or a directory at `path` is an error.
    pub(crate) fn single_source(&self, path: &Path) -> Result<&Source, Error> {
        match self.sources() {
            [source] if source.path() == path => Ok(source),
            _ => {
                let (file, reason) =
                    (path.display().to_string(), "it is not a single .ts file".into());
                Err(ts_format::Error::NotAppendable { file, reason }.into())
            }
        }
    }

    /// Merges `other` into this checkpoint. The files of `other` are appended, and its tensors
    /// replace those of the same name.
    ///
    /// # Errors
    /// Returns [`Error::Format`] if the result would exceed the limits of a catalog.
    pub fn merge(mut self, other: Checkpoint) -> Result<Checkpoint, Error> {
        self.sources.extend(other.sources);
        self.origins.extend(other.origins);
        let Self { catalog, sources, origins } = self;
        Ok(Self { catalog: catalog.merge(other.catalog)?, sources, origins })
    }

    /// Groups the tensors into units by their names: tensors whose names differ only in the last
    /// component, such as the parameters of one module, form a unit. The units are sorted by their
    /// offsets in the files.
    pub fn units_by_module(&self) -> Vec<Unit> {
        let mut units: BTreeMap<&str, Vec<Tensor<'_>>> = BTreeMap::new();
        for tensor in self.catalog.tensors() {
            let module = tensor.name().rsplit_once('.').map_or("", |(module, _)| module);
            units.entry(module).or_default().push(tensor);
        }
        let offset = |tensors: &[Tensor<'_>]| {
            tensors.iter().map(|t| (t.range().file, t.range().offset)).min()
        };
        let mut units: Vec<_> = units.into_iter().collect();
        units.sort_by_key(|(_, tensors)| offset(tensors));
        let tensor = |tensor: Tensor<'_>| {
            UnitTensor::new(&self.catalog, tensor.name(), tensor.entry(), Phase::Mapped)
        };
        let unit = |(name, tensors): (&str, Vec<_>)| {
            Unit::new(name, tensors.into_iter().map(tensor).collect())
        };
        units.into_iter().map(unit).collect()
    }

    /// Returns the [fingerprint](ts_format::fingerprint) of the content. It does not depend on the
    /// names of files, the compression, or the order of tensors. Returns `None` if a tensor has no
    /// fingerprint, as in safetensors files.
    pub fn fingerprint(&self) -> Option<u128> {
        let all = self.catalog.tensors().map(|tensor| Some((tensor.name(), tensor.fingerprint()?)));
        Some(ts_format::fingerprint(all.collect::<Option<Vec<_>>>()?))
    }

    /// Sets the request size and queue depth of `config` to values that suit the storage of the
    /// largest file. `tuner` returns cached values or measures them. Blocks for up to two seconds,
    /// and calls `interrupt` at least every 20 ms.
    ///
    /// # Errors
    /// Returns [`Error::Interrupted`] if `interrupt` returns true.
    pub fn tuned(
        &self,
        mut config: EngineConfig,
        tuner: &Tuner,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<EngineConfig, Error> {
        if let Some(source) = self.sources.iter().max_by_key(|source| source.len()) {
            let tuning = match tuner.tuning(source, &Budget::new(config.budget_bytes), interrupt) {
                Err(ts_io::Error::Interrupted) => return Err(Error::Interrupted),
                tuning => tuning?,
            };
            (config.request_bytes, config.io.in_flight) = (tuning.request_bytes, tuning.in_flight);
        }
        Ok(config)
    }

    /// Returns the options of a model that streams this checkpoint by the names of its layers, as
    /// [`Model::open`] does, but from every place that [`open`](Self::open) supports.
    pub fn model(&self) -> ModelBuilder {
        let path = self.sources.first().map_or(Path::new(""), |source| source.path());
        let files = CheckpointFiles::new(self.catalog.clone(), self.sources.clone());
        Model::from_files(path, files)
    }

    /// Creates an engine that streams these units, whose tensors are ranges of this checkpoint's
    /// files.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::new`].
    pub fn engine(&self, units: Vec<Unit>, config: EngineConfig) -> Result<Engine, Error> {
        Ok(Engine::new(units, self.sources.clone(), config)?)
    }

    /// Creates an engine like [`engine`](Self::engine), but with units in the memory of `device`,
    /// if there is one.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::with_device`].
    pub fn engine_on<'a, D: Device>(
        &self,
        device: impl Into<Option<&'a D>>,
        units: Vec<Unit>,
        config: EngineConfig,
    ) -> Result<Engine<D>, Error> {
        Ok(Engine::with_device(device, units, self.sources.clone(), config)?)
    }
}

/// Finds the checkpoint in a directory, as [`Checkpoint::open`] does, and returns the path of its
/// file. Blocks.
///
/// # Errors
/// - [`Error::NotACheckpoint`] if the directory contains no checkpoint, or a GGUF file or a pickle
///   instead.
/// - [`Error::Io`] if the directory cannot be read.
pub fn checkpoint_file(dir: &Path) -> Result<PathBuf, Error> {
    ts_orchestrator::files::checkpoint_file(dir)
}

/// Opens the file of the checkpoint at a URL, as [`Checkpoint::open`] does, or the file `beside` in
/// the same directory. Blocks.
///
/// # Errors
/// - [`Error::NotACheckpoint`] if the URL is a directory that contains no checkpoint.
/// - [`Error::Io`] if the file cannot be opened.
pub fn checkpoint_source(url: &str, beside: Option<&str>) -> Result<Arc<Source>, Error> {
    let Some(beside) = beside else {
        let mut opened = BTreeMap::new();
        let file = checkpoint_at_url::<Error>(url, &mut opened, &mut open_source)?;
        return match opened.pop_first() {
            Some((_, source)) => Ok(source),
            None => Ok(open_source(&file.to_string_lossy())?),
        };
    };
    let directory = match url.rsplit_once('/') {
        Some((directory, _)) if is_checkpoint_name(url) => directory,
        _ => url.trim_end_matches('/'),
    };
    Ok(open_source(&format!("{directory}/{beside}"))?)
}

/// Opens a file, an object or, with the feature `remote`, a file of a weight server.
fn open_source(name: &str) -> Result<Arc<Source>, ts_io::Error> {
    #[cfg(feature = "remote")]
    if crate::net::source::is_remote(name) {
        return crate::net::source::open(name);
    }
    Source::open(name)
}
