// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ts_format::{ByteRange, Catalog, CatalogReader, Need, Tensor};
use ts_io::{Source, Tuner};
use ts_orchestrator::{Engine, EngineConfig, Phase, Unit, UnitTensor};
use ts_pool::Budget;
use ts_streams::Device;

use crate::read::Reader;
use crate::{Error, foreign};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONTAINER: &str = "model.ts";

/// A checkpoint whose headers have been read: what is in it, and the open files it is in.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    catalog: Catalog,
    sources: Vec<Arc<Source>>,
}

impl Checkpoint {
    /// Opens a `.safetensors` or `.ts` file, a shard index (`.json`), or a directory with one of
    /// them. Reads headers only.
    ///
    /// A directory's `model.safetensors` is taken before its `model.safetensors.index.json`, as
    /// transformers does, then its `model.ts`, then a single `.safetensors` or `.ts` file of
    /// another name.
    ///
    /// With the feature `object`, a URL as [`Source::open`] takes it names a file or, without such
    /// a suffix, what stands for a directory: then the first three are looked for. With the feature
    /// `remote` so does `ts://HOST:PORT/NAME`, of a server of weights; `tss://` is the same under
    /// TLS. Such a server is told the token in the environment's `TENSORSTREAM_TOKEN`, and trusted
    /// if its certificate comes from one in the file `TENSORSTREAM_CA`; `TENSORSTREAM_CERT` and
    /// `TENSORSTREAM_KEY` are the client's own.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`], [`Error::Io`] when a file cannot be opened or read,
    /// [`Error::ForeignFormat`] for GGUF files and pickles, [`Error::Format`] when a file is not
    /// what it should be.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_as(path.as_ref(), |reader| reader)
    }

    /// As [`open`](Self::open), but takes safetensors files that only their library would: see
    /// [`CatalogReader::lenient`].
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_lenient(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_as(path.as_ref(), CatalogReader::lenient)
    }

    /// Reads a file that is in memory, safetensors or `.ts`, whichever its first bytes say; errors
    /// call it `name`. An engine over it is refused: there is nothing to stream.
    ///
    /// # Errors
    /// [`Error::Format`].
    pub fn from_bytes(
        name: &str,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let opened = BTreeMap::from([(name.to_string(), Source::in_memory(name, bytes))]);
        read_catalog(CatalogReader::single(name), opened)
    }

    fn open_as(path: &Path, how: impl Fn(CatalogReader) -> CatalogReader) -> Result<Self, Error> {
        let mut opened = BTreeMap::new();
        let file = match path.to_str().filter(|text| Source::is_url(text)) {
            Some(url) => find_at(url, &mut opened)?,
            None if path.is_dir() => find_in(path)?,
            None => path.to_path_buf(),
        };
        let name = file.to_string_lossy().into_owned();
        let sharded = file.extension().is_some_and(|e| e == "json");
        let reader =
            if sharded { CatalogReader::sharded(name) } else { CatalogReader::single(name) };
        read_catalog(how(reader), opened)
    }

    /// What is in it.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Its files, by the ids that the catalog uses.
    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }

    /// This checkpoint and another as one: the other's tensors take the place of those of the same
    /// name, and its files come behind its own.
    ///
    /// # Errors
    /// [`Error::Format`] when they are more than one catalog holds.
    pub fn overlaid(mut self, other: Checkpoint) -> Result<Checkpoint, Error> {
        self.sources.extend(other.sources);
        Ok(Self { catalog: self.catalog.overlaid(other.catalog)?, sources: self.sources })
    }

    /// Reads ranges of its tensors, one behind the other, into `buffer`, and decodes those that are
    /// compressed. Blocks; through the page cache.
    ///
    /// # Errors
    /// [`Error::Io`] when a read fails, or the file is not the one that was opened any more;
    /// [`Error::Corrupt`]; [`Error::Format`] when a range of compressed bytes is not within one
    /// tensor.
    ///
    /// # Panics
    /// If `buffer` is not as long as the ranges, or a range names a file that is not in the
    /// catalog.
    pub fn read(&self, ranges: &[ByteRange], buffer: &mut [u8]) -> Result<(), Error> {
        let (mut rest, mut reader) = (buffer, Reader::default());
        for range in ranges {
            let (part, after) = rest.split_at_mut(range.len as usize);
            reader.read(self, *range, part)?;
            rest = after;
        }
        assert!(rest.is_empty(), "the buffer is longer than the ranges");
        Ok(())
    }

    /// Units as the tensors' names suggest them: all tensors whose names differ in their last
    /// component make one, as the parameters of a module do. In the order in which they lie in the
    /// files.
    pub fn units_by_module(&self) -> Vec<Unit> {
        let mut units: BTreeMap<&str, Vec<Tensor<'_>>> = BTreeMap::new();
        for tensor in self.catalog.tensors() {
            let module = tensor.name().rsplit_once('.').map_or("", |(module, _)| module);
            units.entry(module).or_default().push(tensor);
        }
        let place = |tensors: &[Tensor<'_>]| {
            tensors.iter().map(|t| (t.range().file, t.range().offset)).min()
        };
        let mut units: Vec<_> = units.into_iter().collect();
        units.sort_by_key(|(_, tensors)| place(tensors));
        let tensor = |tensor: Tensor<'_>| {
            UnitTensor::new(&self.catalog, tensor.name(), tensor.entry(), Phase::Mapped)
        };
        let unit = |(name, tensors): (&str, Vec<_>)| Unit {
            name: name.into(),
            tensors: tensors.into_iter().map(tensor).collect(),
        };
        units.into_iter().map(unit).collect()
    }

    /// Names the content, wherever it lies and however it is kept: see [`ts_format::fingerprint`].
    /// `None` where a tensor has no fingerprint.
    pub fn fingerprint(&self) -> Option<u128> {
        let all = self.catalog.tensors().map(|tensor| Some((tensor.name(), tensor.fingerprint()?)));
        Some(ts_format::fingerprint(all.collect::<Option<Vec<_>>>()?))
    }

    /// A configuration with the request size and the depth that suit the storage of the largest
    /// file, as `tuner` knows or measures them. `interrupt` is asked at least every 20 ms.
    ///
    /// # Errors
    /// [`Error::Interrupted`]. Blocks for up to two seconds.
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

    /// An engine over these units, whose tensors lie in this checkpoint's files.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn engine(&self, units: Vec<Unit>, config: EngineConfig) -> Result<Engine, Error> {
        Ok(Engine::new(units, self.sources.clone(), config)?)
    }

    /// As [`engine`](Self::engine), for a device.
    ///
    /// # Errors
    /// As [`Engine::on`].
    pub fn engine_on<D: Device>(
        &self,
        device: &D,
        units: Vec<Unit>,
        config: EngineConfig,
    ) -> Result<Engine<D>, Error> {
        Ok(Engine::on(device, units, self.sources.clone(), config)?)
    }
}

fn find_in(dir: &Path) -> Result<PathBuf, Error> {
    if let Some(file) = [SINGLE, INDEX, CONTAINER]
        .map(|name| dir.join(name))
        .into_iter()
        .find(|file| file.symlink_metadata().is_ok())
    {
        return Ok(file);
    }
    let entries = std::fs::read_dir(dir).map_err(|e| open_error(dir, e))?;
    let files = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<_> =
        files.filter(|p| p.extension().is_some_and(|e| e == "safetensors" || e == "ts")).collect();
    match files.len() {
        1 => Ok(files.remove(0)),
        0 => Err(foreign::recognised_in(dir)
            .unwrap_or_else(|| Error::NoCheckpoint { path: dir.into(), found: 0 })),
        found => Err(Error::NoCheckpoint { path: dir.into(), found }),
    }
}

/// A file, an object, or with the feature `remote` a file of a server of weights.
fn open_source(name: &str) -> Result<Arc<Source>, ts_io::Error> {
    #[cfg(feature = "remote")]
    if crate::net::source::is_remote(name) {
        return crate::net::source::open(name);
    }
    Source::open(name)
}

/// Files that are open already, by their names.
type Opened = BTreeMap<String, Arc<Source>>;

/// What a URL names, or what lies below it: which is then open.
fn find_at(url: &str, opened: &mut Opened) -> Result<PathBuf, Error> {
    if Path::new(url).extension().is_some_and(|e| e == "safetensors" || e == "ts" || e == "json") {
        return Ok(url.into());
    }
    for name in [SINGLE, INDEX, CONTAINER] {
        let file = format!("{}/{name}", url.trim_end_matches('/'));
        match open_source(&file) {
            Ok(source) => {
                opened.insert(file.clone(), source);
                return Ok(file.into());
            }
            Err(error) if error.kind() == ts_io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::NoCheckpoint { path: url.into(), found: 0 })
}

pub(crate) fn open_error(path: &Path, error: std::io::Error) -> Error {
    Error::Io(ts_io::Error::Open { path: path.into(), source: error.into() })
}

/// Feeds the reader from files.
fn read_catalog(mut reader: CatalogReader, mut opened: Opened) -> Result<Checkpoint, Error> {
    while let Some(Need { file, offset, len }) = reader.need() {
        let source = match opened.get(&file) {
            Some(source) => Arc::clone(source),
            None => {
                let source = open_source(&file)?;
                opened.insert(file, Arc::clone(&source));
                source
            }
        };
        let end = offset.saturating_add(len).min(source.len());
        let mut bytes = vec![0; end.saturating_sub(offset) as usize];
        let got = source.read_at(offset, &mut bytes)?;
        bytes.truncate(got);
        let fed = reader.feed(&bytes, source.len());
        fed.map_err(|error| foreign::recognised(&source).unwrap_or_else(|| error.into()))?;
    }
    let catalog = reader.finish()?;
    let sources = catalog.files().iter().map(|file| Arc::clone(&opened[&file.name])).collect();
    Ok(Checkpoint { catalog, sources })
}
