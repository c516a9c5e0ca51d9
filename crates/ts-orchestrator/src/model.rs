// SPDX-License-Identifier: MIT OR Apache-2.0
//! A model on disk, whose layers are streamed by name.

mod builder;
mod names;
mod tensors;

use std::collections::HashMap;
use std::future::poll_fn;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ts_format::Catalog;

use crate::config::never_interrupt;
use crate::engine::poll::{RowsWait, UnitWait};
use crate::lease::Lease;
use crate::pass::PassId;
use crate::table::{Table, TableId};
use crate::unit::{Phase, UnitId, UnitTensor};
use crate::{Engine, Error};

pub use builder::{Bytes, ModelBuilder};
pub use tensors::{ModelTensor, ModelUnit};

/// A checkpoint whose layers are streamed by name, under a memory budget.
///
/// [`open`](Self::open) reads the headers of a checkpoint, and groups its tensors into units by
/// their names ([`ModelBuilder::group_by`] has the rule). [`pass`](Self::pass) begins a pass, and
/// [`Pass::unit`] returns the tensors of a unit. The units that follow in the order of passes are
/// read ahead. The first pass is expected to use the units in the order of [`units`](Self::units),
/// and later ones in the order of those before.
///
/// A `Model` is a handle: clones share one [`Engine`], which is dropped with the last clone, pass
/// and unit. All methods may be called from any thread.
///
/// # Examples
/// ```
/// use ts_orchestrator::{Bytes, Model};
///
/// # let dir = tempfile::tempdir()?;
/// # let dir = dir.path();
/// # let header = br#"{"layers.0.w":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]}}"#;
/// # let mut file = (header.len() as u64).to_le_bytes().to_vec();
/// # file.extend_from_slice(header);
/// # file.extend_from_slice(&[1, 2, 3, 4]);
/// # std::fs::write(dir.join("model.safetensors"), file)?;
/// let model = Model::open(dir)?.budget(Bytes::mib(600)).build()?;
/// let pass = model.pass()?;
/// for name in model.units() {
///     let unit = pass.unit(name)?; // read ahead while the unit before was used
///     for (name, tensor) in unit.tensors() {
///         println!("{name}: {} {:?}, {} bytes", tensor.dtype(), tensor.shape(), tensor.len());
///     }
/// }
/// # assert_eq!(pass.unit("layers.0")?.tensor("w")?[..], [1, 2, 3, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Model {
    inner: Arc<ModelInner>,
}

struct ModelInner {
    engine: Engine,
    /// For error messages.
    path: PathBuf,
    catalog: Catalog,
    /// The names of the units, indexed by id.
    units: Vec<String>,
    unit_ids: HashMap<String, UnitId>,
    /// The names of the tensors of each unit, indexed by the ids of units.
    tensors: Vec<Vec<String>>,
    /// The unit of each tensor that belongs to one.
    unit_of: HashMap<String, UnitId>,
    /// The tables of the engine, by the name of the tensor.
    tables: HashMap<String, TableId>,
    /// Whether the end of a pass announced a better plan.
    replan: AtomicBool,
    budget_bytes: u64,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Model({}, {} units)", self.inner.path.display(), self.inner.units.len())
    }
}

impl Model {
    /// Begins a pass over the model, which ends when the result is dropped. Starts to read ahead.
    ///
    /// Blocks while [`max_passes`](crate::EngineConfig::max_passes) other passes are running (1 by
    /// default), and between passes until reads have ended, if measurements led to a better plan.
    ///
    /// # Errors
    /// Currently none. The `Result` is reserved for future errors.
    pub fn pass(&self) -> Result<Pass, Error> {
        self.apply_better_plan();
        Ok(Pass { id: self.inner.engine.begin_pass(), model: self.clone() })
    }

    /// Reads rows of a tensor, without its unit, and blocks until they are in memory. `ranges` are
    /// ranges of indices of the first dimension. The result has the rows of all ranges, one after
    /// the other.
    ///
    /// The rows take memory of the budget until the result is dropped. Those of a tensor that
    /// [`ModelBuilder::rows_of`] names are cached. Only compressed rows are compared with their
    /// checksums.
    ///
    /// # Errors
    /// - [`Error::NoSuchName`] if the model has no such tensor.
    /// - [`Error::NoSuchRow`] if a range is not within the tensor.
    /// - [`Error::NoRows`] if the tensor has no dimension or no bytes, or if its rows are not whole
    ///   bytes.
    /// - [`Error::NeverFits`] if the rows are larger than the engine's memory for units.
    /// - The errors of [`Engine::acquire`] for reads and for lack of memory.
    ///
    /// # Examples
    /// ```no_run
    /// # let model = ts_orchestrator::Model::open("model")?.build()?;
    /// let rows = model.read_ranges("model.embed_tokens.weight", &[7..8, 100..104])?;
    /// assert_eq!(rows.shape()[0], 5);
    /// # Ok::<(), ts_orchestrator::Error>(())
    /// ```
    pub fn read_ranges(&self, tensor: &str, ranges: &[Range<u64>]) -> Result<ModelTensor, Error> {
        let rows = self.rows(tensor, ranges)?;
        let bytes = match rows.cached {
            Some((table, ref numbers)) => {
                self.inner.engine.gather(table, numbers, never_interrupt())?
            }
            None => self.inner.engine.shared.read_rows(&rows.table, ranges, never_interrupt())?,
        };
        Ok(rows.tensor(bytes))
    }

    /// Like [`pass`](Self::pass), but waits without blocking the thread. Needs no runtime.
    ///
    /// A better plan is applied by the next [`pass`](Self::pass) or `pass_async` that begins while
    /// no read is in flight.
    ///
    /// # Errors
    /// Returns the errors of [`pass`](Self::pass).
    pub async fn pass_async(&self) -> Result<Pass, Error> {
        let engine = &self.inner.engine;
        if self.inner.replan.swap(false, Ordering::Relaxed) && !engine.shared.try_replan() {
            self.inner.replan.store(true, Ordering::Relaxed);
        }
        let mut wait = None;
        let id = poll_fn(|context| engine.shared.poll_begin_pass(context.waker(), &mut wait)).await;
        Ok(Pass { id, model: self.clone() })
    }

    /// Like [`read_ranges`](Self::read_ranges), but waits without blocking the thread, and reads
    /// rows also if they are cached. Needs no runtime.
    ///
    /// # Errors
    /// Returns the errors of [`read_ranges`](Self::read_ranges).
    pub async fn read_ranges_async(
        &self,
        tensor: &str,
        ranges: &[Range<u64>],
    ) -> Result<ModelTensor, Error> {
        let rows = self.rows(tensor, ranges)?;
        let inner = &self.inner.engine.shared;
        let prepared = inner.prepare_ranges(&rows.table, ranges);
        let mut wait = RowsWait::new(Arc::clone(inner), prepared);
        let bytes = poll_fn(|context| wait.poll(context.waker())).await?;
        Ok(rows.tensor(bytes))
    }

    /// Returns the names of the units, in the order in which the first pass is expected to use
    /// them: sorted by name, with numbers by value.
    pub fn units(&self) -> impl ExactSizeIterator<Item = &str> {
        self.inner.units.iter().map(String::as_str)
    }

    /// Returns the name of the unit that contains a tensor, or `None` if there is none.
    pub fn unit_of(&self, tensor: &str) -> Option<&str> {
        let unit = self.inner.unit_of.get(tensor)?;
        Some(&self.inner.units[unit.index()])
    }

    /// Returns the catalog of the checkpoint, which lists all tensors.
    pub fn catalog(&self) -> &Catalog {
        &self.inner.catalog
    }

    /// Returns the engine, for its plan, its statistics and limits. The ids of units are their
    /// positions in [`units`](Self::units).
    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// Switches to the plan that the end of a pass announced, if it did.
    fn apply_better_plan(&self) {
        if self.inner.replan.swap(false, Ordering::Relaxed) {
            self.inner.engine.replan();
        }
    }

    fn unit_id(&self, name: &str) -> Result<UnitId, Error> {
        self.inner.unit_ids.get(name).copied().ok_or_else(|| {
            let known = self.inner.units.iter().map(String::as_str);
            let near = self.unit_of(name).or_else(|| names::nearest(name, known.clone()));
            names::no_such("unit", name, &self.inner.path, near, known)
        })
    }

    /// Checks that the rows of a tensor exist, and returns where to read them.
    fn rows(&self, tensor: &str, ranges: &[Range<u64>]) -> Result<Rows, Error> {
        let table = table(&self.inner.catalog, &self.inner.path, tensor)?;
        let mut count: u64 = 0;
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let row = range.end - 1;
            if row >= table.rows() {
                let (table, count) = (tensor.into(), table.rows());
                return Err(Error::NoSuchRow { table, row, count });
            }
            count = count.saturating_add(range.end - range.start);
        }
        // Rows that do not fit are not numbered: the read of their ranges fails.
        let fits = count.saturating_mul(table.row_bytes()) <= self.inner.budget_bytes;
        let id = self.inner.tables.get(tensor).filter(|_| fits);
        let cached = id.map(|&id| (id, ranges.iter().cloned().flatten().collect()));
        Ok(Rows { table, count, cached })
    }
}

/// Returns a tensor of a catalog as a table.
fn table(catalog: &Catalog, path: &Path, name: &str) -> Result<Table, Error> {
    let found = catalog.tensor(name).ok_or_else(|| {
        let known: Vec<_> = catalog.tensors().map(|tensor| tensor.name()).collect();
        let near = names::nearest(name, known.iter().copied());
        names::no_such("tensor", name, path, near, known.into_iter())
    })?;
    let no_rows = || {
        let (tensor, dtype) = (name.into(), found.dtype());
        Error::NoRows { tensor, dtype, shape: found.shape().to_vec() }
    };
    let tensor = UnitTensor::new(catalog, name, found.entry(), Phase::At(0));
    Table::new(tensor).ok_or_else(no_rows)
}

/// Rows of a tensor that are to be read.
struct Rows {
    table: Table,
    count: u64,
    /// The rows as numbers, if the engine has a cache for them.
    cached: Option<(TableId, Vec<u64>)>,
}

impl Rows {
    fn tensor(&self, bytes: crate::TensorBytes) -> ModelTensor {
        let mut meta = self.table.meta().clone();
        meta.shape[0] = self.count;
        ModelTensor::new(meta, bytes)
    }
}

/// A running pass over a [`Model`], which ends when this is dropped.
///
/// Units may be used in any order, also several times. The engine learns the order.
#[derive(Debug)]
pub struct Pass {
    model: Model,
    id: PassId,
}

impl Pass {
    /// Returns a unit, and blocks until it is in memory.
    ///
    /// The unit stays in memory until the result and its tensors are dropped. Drop them before the
    /// next unit, so that there is memory to read ahead.
    ///
    /// # Errors
    /// - [`Error::NoSuchName`] if the model has no such unit, with the most similar name.
    /// - The errors of [`Engine::acquire`], which name the unit and the tensor.
    pub fn unit(&self, name: &str) -> Result<ModelUnit, Error> {
        let id = self.model.unit_id(name)?;
        let lease = self.model.inner.engine.acquire(Some(self.id), id)?;
        Ok(ModelUnit::new(lease, self.model.clone()))
    }

    /// Like [`unit`](Self::unit), but waits without blocking the thread. Needs no runtime: the
    /// engine calls the waker of the future when the unit is there. Dropping the future ends the
    /// wait.
    ///
    /// Units that other futures use on the same thread count as used by this one. If only they
    /// could free memory, that is an error rather than a wait, as for [`unit`](Self::unit). Raise
    /// [`max_passes`](crate::EngineConfig::max_passes) to the number of passes at the same time.
    ///
    /// # Errors
    /// Returns the errors of [`unit`](Self::unit).
    ///
    /// # Examples
    /// ```
    /// # fn block_on<T>(_: impl Future<Output = T>) {}
    /// # let _ = || -> Result<(), ts_orchestrator::Error> {
    /// # let model = ts_orchestrator::Model::open("model")?.build()?;
    /// block_on(async {
    ///     let pass = model.pass_async().await?;
    ///     for name in model.units() {
    ///         let unit = pass.unit_async(name).await?;
    ///         println!("{} has {} tensors", unit.name(), unit.tensors().len());
    ///     }
    ///     Ok::<(), ts_orchestrator::Error>(())
    /// });
    /// # Ok(()) };
    /// ```
    pub async fn unit_async(&self, name: &str) -> Result<ModelUnit, Error> {
        let id = self.model.unit_id(name)?;
        let inner = &self.model.inner.engine.shared;
        let mut wait = UnitWait::new(Arc::clone(inner), self.id, id);
        let (memory, acquired_ns) = poll_fn(|context| wait.poll(context.waker())).await?;
        let lease = Lease::new(memory, Arc::clone(inner), id, Some(acquired_ns));
        lease.check_seal()?;
        Ok(ModelUnit::new(lease, self.model.clone()))
    }

    /// Returns units that one operation needs at the same time, and blocks until all are in memory.
    /// The model remembers the set, and plans for it.
    ///
    /// # Errors
    /// Returns the errors of [`unit`](Self::unit), and [`Error::NeverFits`] if the units together
    /// are larger than the memory for units.
    pub fn units<const N: usize>(&self, names: [&str; N]) -> Result<[ModelUnit; N], Error> {
        let ids =
            names.iter().map(|name| self.model.unit_id(name)).collect::<Result<Vec<_>, _>>()?;
        let leases = self.model.inner.engine.acquire_all(Some(self.id), &ids)?;
        let units = leases.into_iter().map(|lease| ModelUnit::new(lease, self.model.clone()));
        let units: Vec<_> = units.collect();
        Ok(units.try_into().expect("there is one lease for each name"))
    }

    /// Returns the model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the id of the pass, for calls of the [engine](Model::engine).
    pub fn id(&self) -> PassId {
        self.id
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let inner = &self.model.inner;
        if !inner.engine.is_forked() && inner.engine.end_pass(self.id) {
            inner.replan.store(true, Ordering::Relaxed);
        }
    }
}
