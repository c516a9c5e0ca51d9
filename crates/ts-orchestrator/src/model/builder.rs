// SPDX-License-Identifier: MIT OR Apache-2.0
//! The options of a model.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ts_format::{Catalog, Tensor};
use ts_io::Source;

use crate::config::EngineConfig;
use crate::files::CheckpointFiles;
use crate::table::TableId;
use crate::unit::{Phase, Unit, UnitId, UnitTensor};
use crate::{Engine, Error};

use super::{Model, ModelInner, names};

/// A number of bytes.
///
/// ```
/// use ts_orchestrator::Bytes;
///
/// assert_eq!(Bytes::mib(600), Bytes(600 << 20));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub usize);

impl Bytes {
    /// Returns `n` kibibytes, 2^10 bytes each.
    pub const fn kib(n: usize) -> Self {
        Self(n.saturating_mul(1 << 10))
    }

    /// Returns `n` mebibytes, 2^20 bytes each.
    pub const fn mib(n: usize) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// Returns `n` gibibytes, 2^30 bytes each.
    pub const fn gib(n: usize) -> Self {
        Self(n.saturating_mul(1 << 30))
    }
}

impl From<usize> for Bytes {
    fn from(bytes: usize) -> Self {
        Self(bytes)
    }
}

/// The options of a [`Model`], from [`Model::open`].
///
/// [`engine_config`](Self::engine_config) sets what has no method here.
pub struct ModelBuilder {
    path: PathBuf,
    files: CheckpointFiles,
    config: EngineConfig,
    has_budget: bool,
    group_by: Box<dyn Fn(&str) -> String>,
    rows_of: Vec<String>,
}

impl std::fmt::Debug for ModelBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ModelBuilder({})", self.path.display())
    }
}

impl Model {
    /// Opens a `.safetensors` or `.ts` file, a shard index (`.json`), or a directory that contains
    /// one of them ([`checkpoint_file`](crate::files::checkpoint_file) has the order). Reads only
    /// headers. Blocks.
    ///
    /// `path` can be a URL that [`Source::open`] supports.
    ///
    /// # Errors
    /// - [`Error::NotACheckpoint`] if a directory contains no checkpoint, or a file is a GGUF file
    ///   or a pickle.
    /// - [`Error::Storage`] if a file cannot be opened or read.
    /// - [`Error::Format`] if a file is malformed or truncated.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelBuilder, Error> {
        let path = path.as_ref();
        let files = CheckpointFiles::open::<Error>(path, false, &mut |name| Source::open(name))?;
        Ok(Self::from_files(path, files))
    }

    /// Returns the options of a model whose files are already open. `path` is for error messages.
    pub fn from_files(path: impl Into<PathBuf>, files: CheckpointFiles) -> ModelBuilder {
        ModelBuilder {
            path: path.into(),
            files,
            config: EngineConfig::with_budget(0),
            has_budget: false,
            group_by: Box::new(|tensor| names::unit_of(tensor).to_string()),
            rows_of: Vec::new(),
        }
    }
}

impl ModelBuilder {
    /// Sets the most memory that weights and their buffers may use
    /// ([`EngineConfig::budget_bytes`]). Without a budget, all units stay in memory.
    #[must_use]
    pub fn budget(mut self, budget: impl Into<Bytes>) -> Self {
        (self.config.budget_bytes, self.has_budget) = (budget.into().0, true);
        self
    }

    /// Groups tensors into units by a function, which gets the name of a tensor and returns the
    /// name of its unit.
    ///
    /// By default, the unit of a tensor is the innermost module with a number, and else the module
    /// of the tensor:
    ///
    /// | tensor | unit |
    /// |---|---|
    /// | `model.layers.3.mlp.up_proj.weight` | `model.layers.3` |
    /// | `model.layers.3.mlp.experts.7.w1.weight` | `model.layers.3.mlp.experts.7` |
    /// | `model.embed_tokens.weight` | `model.embed_tokens` |
    #[must_use]
    pub fn group_by(mut self, unit_of: impl Fn(&str) -> String + 'static) -> Self {
        self.group_by = Box::new(unit_of);
        self
    }

    /// Declares that only rows of a tensor are used, by [`Model::read_ranges`], such as those of an
    /// embedding. The tensor belongs to no unit, and its last rows are cached.
    #[must_use]
    pub fn rows_of(mut self, tensor: impl Into<String>) -> Self {
        self.rows_of.push(tensor.into());
        self
    }

    /// Changes the configuration of the engine. [`tables`](EngineConfig::tables) and
    /// [`order`](EngineConfig::order) are set by the model.
    #[must_use]
    pub fn engine_config(self, change: impl FnOnce(EngineConfig) -> EngineConfig) -> Self {
        let budget = self.config.budget_bytes;
        let config = change(self.config);
        let has_budget = self.has_budget || config.budget_bytes != budget;
        Self { config, has_budget, ..self }
    }

    /// Returns the catalog of the checkpoint, which lists all tensors.
    pub fn catalog(&self) -> &Catalog {
        &self.files.catalog
    }

    /// Creates the model: plans, reserves the budget and starts the threads of its engine. Reads no
    /// tensor yet.
    ///
    /// # Errors
    /// - [`Error::NoSuchName`] and [`Error::NoRows`] if a tensor of [`rows_of`](Self::rows_of) does
    ///   not exist or has no rows.
    /// - The errors of [`Engine::new`]. If the budget is too small, [`Error::NeverFits`] has the
    ///   smallest one that works.
    pub fn build(self) -> Result<Model, Error> {
        let CheckpointFiles { catalog, sources, .. } = &self.files;
        let mut groups: BTreeMap<String, Vec<Tensor<'_>>> = BTreeMap::new();
        for tensor in catalog.tensors().filter(|tensor| !self.has_rows_of(tensor.name())) {
            groups.entry((self.group_by)(tensor.name())).or_default().push(tensor);
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by(|(a, _), (b, _)| names::compare(a, b));
        let unit_tensor = |tensor: &Tensor<'_>| {
            UnitTensor::new(catalog, tensor.name(), tensor.entry(), Phase::Mapped)
        };
        let unit = |(name, tensors): &(String, Vec<Tensor<'_>>)| {
            Unit::new(name, tensors.iter().map(unit_tensor).collect())
        };
        let units: Vec<Unit> = groups.iter().map(unit).collect();
        let tables = self.rows_of.iter().map(|name| super::table(catalog, &self.path, name));
        let tables = tables.collect::<Result<Vec<_>, _>>()?;
        let config = EngineConfig { order: None, row_reads: true, ..self.config };
        let mut config = config.with_tables(tables);
        if !self.has_budget {
            let needed = Engine::requirement(units.clone(), sources, &config, false)?;
            config.budget_bytes = needed.whole;
        }
        let budget_bytes = config.budget_bytes as u64;
        let engine = Engine::new(units, sources.clone(), config)?;
        let ids = groups.iter().zip(0..).map(|((name, _), id)| (name.clone(), UnitId(id)));
        let names = |tensors: &Vec<Tensor<'_>>| -> Vec<String> {
            tensors.iter().map(|tensor| tensor.name().to_string()).collect()
        };
        let tensors: Vec<_> = groups.iter().map(|(_, tensors)| names(tensors)).collect();
        let unit_of = tensors
            .iter()
            .zip(0..)
            .flat_map(|(names, id)| names.iter().map(move |name| (name.clone(), UnitId(id))));
        let tables = self.rows_of.iter().zip(0..).map(|(name, id)| (name.clone(), TableId(id)));
        let inner = ModelInner {
            engine,
            path: self.path,
            unit_ids: ids.collect(),
            unit_of: unit_of.collect(),
            tensors,
            tables: tables.collect::<HashMap<_, _>>(),
            units: groups.into_iter().map(|(name, _)| name).collect(),
            catalog: self.files.catalog,
            replan: AtomicBool::new(false),
            budget_bytes,
        };
        Ok(Model { inner: Arc::new(inner) })
    }

    fn has_rows_of(&self, tensor: &str) -> bool {
        self.rows_of.iter().any(|name| name == tensor)
    }
}
