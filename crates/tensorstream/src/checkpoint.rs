// SPDX-License-Identifier: MIT OR Apache-2.0
//! Open checkpoints.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ts_format::{Catalog, CatalogReader, ReadRequest, Tensor};
use ts_io::{Source, Tuner};
use ts_orchestrator::{Engine, EngineConfig, Phase, Unit, UnitTensor};
use ts_pool::Budget;
use ts_streams::Device;

use crate::{Error, foreign};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONTAINER: &str = "model.ts";

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
    /// - [`Error::NoCheckpoint`] if a directory contains no checkpoint.
    /// - [`Error::Io`] if a file cannot be opened or read.
    /// - [`Error::ForeignFormat`] if a file is a GGUF file or a pickle.
    /// - [`Error::Format`] if a file is malformed or truncated.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_with(path.as_ref(), false)
    }

    /// Opens a checkpoint like [`open`](Self::open), but accepts every safetensors file that the
    /// safetensors library accepts (see [`CatalogReader::lenient`]).
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
        let origin = Origin::Other(name.to_string());
        read_catalog(reader_of(name.to_string()), OpenSources::new(), open, origin)
    }

    /// Opens a checkpoint like [`open_through`](Self::open_through), but accepts every safetensors
    /// file that the safetensors library accepts (see [`CatalogReader::lenient`]).
    ///
    /// # Errors
    /// Returns the errors of [`open_through`](Self::open_through).
    pub fn open_through_lenient(
        name: &str,
        open: &mut dyn FnMut(&str) -> Result<Arc<Source>, Error>,
    ) -> Result<Self, Error> {
        let origin = Origin::Other(name.to_string());
        read_catalog(reader_of(name.to_string()).lenient(), OpenSources::new(), open, origin)
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
        Self::from_bytes_with(name, bytes, std::convert::identity)
    }

    /// Like [`from_bytes`](Self::from_bytes), but accepts every file that the safetensors library
    /// accepts (see [`CatalogReader::lenient`]).
    ///
    /// # Errors
    /// Returns the errors of [`from_bytes`](Self::from_bytes).
    pub fn from_bytes_lenient(
        name: &str,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::from_bytes_with(name, bytes, CatalogReader::lenient)
    }

    fn from_bytes_with(
        name: &str,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
        configure: impl Fn(CatalogReader) -> CatalogReader,
    ) -> Result<Self, Error> {
        let opened = BTreeMap::from([(name.to_string(), Source::in_memory(name, bytes))]);
        let origin = Origin::Other(name.to_string());
        read_catalog(configure(CatalogReader::single(name)), opened, &mut open_source, origin)
    }

    fn open_with(path: &Path, lenient: bool) -> Result<Self, Error> {
        let mut opened = BTreeMap::new();
        let url = path.to_str().filter(|text| Source::is_url(text));
        let file = match url {
            Some(url) => find_at_url(url, &mut opened)?,
            None if path.is_dir() => checkpoint_file(path)?,
            None => path.to_path_buf(),
        };
        let path = match url {
            Some(_) => path.to_path_buf(),
            None => std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()),
        };
        let origin = Origin::Path { path, lenient };
        let name = file.to_string_lossy().into_owned();
        let reader = reader_of(name.clone());
        let reader = if lenient { reader.lenient() } else { reader };
        let mut beside = |wanted: &str| open_beside(&file, &name, wanted);
        match file.to_str() {
            Some(_) => read_catalog(reader, opened, &mut open_source, origin),
            None => read_catalog(reader, opened, &mut beside, origin),
        }
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
/// - [`Error::NoCheckpoint`] if the directory contains no checkpoint.
/// - [`Error::ForeignFormat`] if it contains a GGUF file or a pickle instead.
/// - [`Error::Io`] if the directory cannot be read.
pub fn checkpoint_file(dir: &Path) -> Result<PathBuf, Error> {
    if let Some(file) = [SINGLE, INDEX, CONTAINER]
        .map(|name| dir.join(name))
        .into_iter()
        .find(|file| file.symlink_metadata().is_ok())
    {
        return Ok(file);
    }
    let entries = std::fs::read_dir(dir).map_err(|e| Error::open(dir, e))?;
    let files = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<_> =
        files.filter(|p| p.extension().is_some_and(|e| e == "safetensors" || e == "ts")).collect();
    match files.len() {
        1 => Ok(files.remove(0)),
        0 => Err(foreign::detect_in(dir)
            .unwrap_or_else(|| Error::NoCheckpoint { path: dir.into(), found: 0 })),
        found => Err(Error::NoCheckpoint { path: dir.into(), found }),
    }
}

/// Opens the file of the checkpoint at a URL, as [`Checkpoint::open`] does, or the file `beside` in
/// the same directory. Blocks.
///
/// # Errors
/// - [`Error::NoCheckpoint`] if the URL is a directory that contains no checkpoint.
/// - [`Error::Io`] if the file cannot be opened.
pub fn checkpoint_source(url: &str, beside: Option<&str>) -> Result<Arc<Source>, Error> {
    let Some(beside) = beside else {
        let mut opened = OpenSources::new();
        let file = find_at_url(url, &mut opened)?;
        return match opened.pop_first() {
            Some((_, source)) => Ok(source),
            None => open_source(&file.to_string_lossy()),
        };
    };
    let directory = match url.rsplit_once('/') {
        Some((directory, _)) if is_checkpoint_name(url) => directory,
        _ => url.trim_end_matches('/'),
    };
    open_source(&format!("{directory}/{beside}"))
}

/// Opens a file, an object or, with the feature `remote`, a file of a weight server.
fn open_source(name: &str) -> Result<Arc<Source>, Error> {
    #[cfg(feature = "remote")]
    if crate::net::source::is_remote(name) {
        return Ok(crate::net::source::open(name)?);
    }
    Ok(Source::open(name)?)
}

/// Opens a file of a checkpoint whose path is not UTF-8. `name` is what the catalog has instead of
/// the path of `file`. `wanted` is `name`, or the name of a shard in the same directory.
fn open_beside(file: &Path, name: &str, wanted: &str) -> Result<Arc<Source>, Error> {
    let path = match wanted.rsplit('/').next() {
        Some(shard) if wanted != name => file.with_file_name(shard),
        _ => file.to_path_buf(),
    };
    Ok(Source::open(path)?)
}

/// Sources that are already open, by name.
type OpenSources = BTreeMap<String, Arc<Source>>;

/// Finds the file of a checkpoint at a URL. If the URL is a directory, adds the open file to
/// `opened`.
fn find_at_url(url: &str, opened: &mut OpenSources) -> Result<PathBuf, Error> {
    if is_checkpoint_name(url) {
        return Ok(url.into());
    }
    for name in [SINGLE, INDEX, CONTAINER] {
        let file = format!("{}/{name}", url.trim_end_matches('/'));
        match open_source(&file) {
            Ok(source) => {
                opened.insert(file.clone(), source);
                return Ok(file.into());
            }
            Err(Error::Io(error)) if error.kind() == ts_io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Err(Error::NoCheckpoint { path: url.into(), found: 0 })
}

/// Returns whether a name ends like that of a file, and not like that of a directory.
fn is_checkpoint_name(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|e| e == "safetensors" || e == "ts" || e == "json")
}

/// Returns the reader of the catalog that is in a file.
fn reader_of(file: String) -> CatalogReader {
    let is_index = Path::new(&file).extension().is_some_and(|e| e == "json");
    if is_index { CatalogReader::sharded(file) } else { CatalogReader::single(file) }
}

/// Reads the headers that `reader` requests, and returns the open checkpoint. Gets files that are
/// not in `opened` from `open`.
fn read_catalog(
    mut reader: CatalogReader,
    mut opened: OpenSources,
    open: &mut dyn FnMut(&str) -> Result<Arc<Source>, Error>,
    origin: Origin,
) -> Result<Checkpoint, Error> {
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
        let fed = reader.feed(&bytes, source.len());
        fed.map_err(|error| foreign::detect(&source).unwrap_or_else(|| error.into()))?;
    }
    let catalog = reader.finish()?;
    let sources = catalog.files().iter().map(|file| Arc::clone(&opened[&file.name])).collect();
    Ok(Checkpoint { catalog, sources, origins: vec![origin] })
}
