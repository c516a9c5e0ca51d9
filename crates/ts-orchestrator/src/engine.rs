// SPDX-License-Identifier: MIT OR Apache-2.0
//! The public interface of the engine.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread::JoinHandle;

use ts_io::Source;
use ts_streams::{CpuDevice, Device};

use crate::Error;
use crate::config::{EngineConfig, Interrupt, never_interrupt};
use crate::event::Event;
use crate::expectation::Expectation;
use crate::inner::EngineInner;
use crate::lease::{Lease, TensorBytes};
use crate::pass::PassId;
use crate::plan::{CurvePoint, Plan, Residency};
use crate::prepared::PreparedUnit;
use crate::sizing::{Place, Preparation, Requirement, Sizing};
use crate::stats::{EngineStats, UnitStats};
use crate::table::TableId;
use crate::trace::Trace;
use crate::unit::{Unit, UnitId};

/// Streams units of weights under a memory budget.
///
/// The engine keeps the units that its [plan](Self::plan) makes resident, and reads the others
/// ahead of their use. [`begin_pass`](Self::begin_pass) announces a pass over the units,
/// [`acquire`](Self::acquire) returns a [`Lease`] of one unit, and [`end_pass`](Self::end_pass)
/// ends the pass.
///
/// Units live in the memory of the engine's device. With a [`CpuDevice`] they are read directly
/// into their final memory. For a device with its own memory ([`with_device`](Self::with_device))
/// they are read into staging memory on the host and then copied.
///
/// All methods may be called from any thread. Dropping the engine waits for reads in flight and
/// stops its threads. Tensors taken from leases stay valid.
///
/// # Examples
/// ```
/// use ts_orchestrator::ts_io::Source;
/// use ts_orchestrator::{Engine, EngineConfig, UnitId};
/// # use ts_orchestrator::{Phase, Unit, UnitTensor};
/// # use ts_orchestrator::ts_format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("weights");
/// # std::fs::write(&path, (0..2000).map(|i| i as u8).collect::<Vec<u8>>())?;
/// # let unit = |name: &str, offset, len| {
/// #     let parts = vec![ByteRange { file: FileId(0), offset, len }];
/// #     let meta = TensorMeta { dtype: Dtype::U8, shape: vec![len] };
/// #     let entry = TensorEntry { meta, parts };
/// #     let (name, phase) = (name.to_string(), Phase::Mapped);
/// #     let (digest, chunks) = (None, Vec::new());
/// #     let tensor = UnitTensor { name: name.clone(), entry, phase, digest, chunks };
/// #     Unit::new(name, vec![tensor])
/// # };
/// # let units = vec![unit("first", 0, 1000), unit("second", 1000, 1000)];
/// // `units` has two units, which are in the file at `path`.
/// let config = EngineConfig::with_budget(1 << 20);
/// let engine = Engine::new(units, vec![Source::open(&path)?], config)?;
/// for _ in 0..3 {
///     let pass = engine.begin_pass();
///     for unit in 0..engine.unit_count() as u32 {
///         let lease = engine.acquire(Some(pass), UnitId(unit))?;
///         let _weights = lease.tensor(0); // compute with it
///     }
///     if engine.end_pass(pass) {
///         engine.replan();
///     }
/// }
/// assert_eq!(engine.stats().passes, 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Engine<D: Device = CpuDevice> {
    pub(crate) inner: Arc<EngineInner<D>>,
    loader: Option<JoinHandle<()>>,
}

impl Engine {
    /// Creates an engine whose units live in host memory.
    ///
    /// Plans, reserves memory and starts the I/O backend, but reads no tensor yet. `sources` are
    /// the files that the tensors' byte ranges refer to, indexed by
    /// [`FileId`](ts_format::FileId).
    ///
    /// # Errors
    /// - [`Error::NeverFits`] if the budget is too small for any plan.
    /// - [`Error::NoSuchFile`] if a tensor refers to a file that is not in `sources`.
    /// - [`Error::NoSuchUnit`] if the configuration contains the id of a unit that does not exist.
    /// - [`Error::WrongChunks`] if the chunks of a compressed tensor are inconsistent.
    /// - [`Error::Storage`] if the I/O backend is not available or cannot be started.
    /// - [`Error::System`] if the system refuses memory or a thread.
    pub fn new(
        units: Vec<Unit>,
        sources: Vec<Arc<Source>>,
        config: EngineConfig,
    ) -> Result<Self, Error> {
        Self::build(None, units, sources, config)
    }

    /// Returns the plan that an engine would start with, and the initial statistics of each unit.
    /// The engine is one in host memory, unless the configuration has
    /// [`device_memory`](EngineConfig::device_memory).
    ///
    /// Reserves no memory for weights, starts no threads and reads nothing.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new), except those of the backend and the system.
    pub fn preview(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
    ) -> Result<(Plan, Vec<UnitStats>), Error> {
        let Sizing { units, plan, least_buffer_bytes, .. } =
            Sizing::new(units, sources, config, Place::of_preview(config))?;
        let stats = units.iter().zip(&plan.residency).map(|(unit, &residency)| UnitStats {
            resident: residency == Residency::Resident,
            ..unit.initial_stats()
        });
        let stats = stats.collect();
        Ok((plan.with_buffers(least_buffer_bytes), stats))
    }

    /// Returns the smallest budget that works for units, and the smallest one with which no unit is
    /// streamed. Ignores the budget in `config`. Empty units need no memory.
    ///
    /// With `any_phase`, the smallest budget also works for [phases](crate::Phase) with which all
    /// tensors of a unit can be read in place, or none.
    ///
    /// Reserves no memory for weights, starts no threads and reads nothing.
    ///
    /// # Errors
    /// Returns the errors of [`preview`](Self::preview), except those of a budget.
    pub fn requirement(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
        any_phase: bool,
    ) -> Result<Requirement, Error> {
        Requirement::new(units, sources, config, any_phase)
    }

    /// Returns what passes of an engine like that of [`preview`](Self::preview) would be like with
    /// each of these budgets, in bytes. Leaves out budgets that are too small. Ignores the budget
    /// in `config`.
    ///
    /// Reserves no memory for weights, starts no threads and reads nothing.
    ///
    /// # Errors
    /// Returns the errors of [`preview`](Self::preview), except those of a budget.
    pub fn preview_curve(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
        budgets: &[usize],
    ) -> Result<Vec<CurvePoint>, Error> {
        let Preparation { units, order, overhead, .. } =
            Preparation::new(units, sources, config, Place::of_preview(config))?;
        let demands = PreparedUnit::demands(&units, &config.compute, config.rates);
        let request = config.plan_request(&demands, &order);
        Ok(overhead.curve(request, &config.tables, config.prefetch, budgets))
    }
}

impl<D: Device> Engine<D> {
    /// Creates an engine whose units live in the memory of `device`. Without a device, they live in
    /// host memory.
    ///
    /// The other parameters are those of [`new`](Engine::new).
    ///
    /// # Errors
    /// Returns the errors of [`new`](Engine::new). [`Error::System`] also reports that the device
    /// refuses memory or a stream.
    pub fn with_device<'a>(
        device: impl Into<Option<&'a D>>,
        units: Vec<Unit>,
        sources: Vec<Arc<Source>>,
        config: EngineConfig,
    ) -> Result<Self, Error> {
        let separate = device.into().filter(|device| !device.info().host_memory);
        Self::build(separate, units, sources, config)
    }

    /// `device` is `None` if units live in host memory.
    fn build(
        device: Option<&D>,
        units: Vec<Unit>,
        sources: Vec<Arc<Source>>,
        config: EngineConfig,
    ) -> Result<Self, Error> {
        let (inner, inbox) = EngineInner::new(device, units, sources, config)?;
        let inner = Arc::new(inner);
        let loader = spawn_loader(Arc::clone(&inner), inbox)?;
        Ok(Self { inner, loader: Some(loader) })
    }

    /// Begins a pass over the units and starts to prefetch.
    ///
    /// Blocks while [`max_passes`](EngineConfig::max_passes) other passes are running.
    pub fn begin_pass(&self) -> PassId {
        self.begin_pass_interruptible(never_interrupt()).expect("the wait is never interrupted")
    }

    /// Like [`begin_pass`](Self::begin_pass), but calls `interrupt` regularly while it blocks.
    ///
    /// # Errors
    /// Returns [`Error::Interrupted`] if `interrupt` returned `true`.
    pub fn begin_pass_interruptible(&self, interrupt: Interrupt<'_>) -> Result<PassId, Error> {
        self.inner.begin_pass(interrupt)
    }

    /// Begins a pass like [`begin_pass`](Self::begin_pass), or returns `None` if another pass is
    /// running. Does not block.
    pub fn try_begin_pass(&self) -> Option<PassId> {
        self.inner.try_begin_pass()
    }

    /// Ends a pass and returns whether a better plan is available.
    ///
    /// If so, call [`replan`](Self::replan) once all leases are dropped. If the pass has already
    /// ended, only returns whether a better plan is available.
    pub fn end_pass(&self, pass: PassId) -> bool {
        self.inner.end_pass(pass)
    }

    /// Switches to the plan that [`end_pass`](Self::end_pass) announced. Returns whether it
    /// switched.
    ///
    /// Keeps the old plan if a pass is running, a unit is leased, or a tensor of a unit is still
    /// referenced. Unless a pass is running, blocks until reads in flight have ended.
    pub fn replan(&self) -> bool {
        self.replan_interruptible(never_interrupt()).expect("the wait is never interrupted")
    }

    /// Like [`replan`](Self::replan), but calls `interrupt` regularly while it blocks.
    ///
    /// # Errors
    /// Returns [`Error::Interrupted`] if `interrupt` returned `true`.
    pub fn replan_interruptible(&self, interrupt: Interrupt<'_>) -> Result<bool, Error> {
        self.inner.replan(interrupt)
    }

    /// Leases a unit, and blocks until it is in memory.
    ///
    /// Pass `None` for `pass` if the use belongs to no pass. The engine does not learn the order of
    /// such uses.
    ///
    /// # Errors
    /// - [`Error::Load`] if reading failed; the next call reads again.
    /// - [`Error::Corrupt`] if the bytes do not match their checksum or cannot be decoded.
    /// - [`Error::Device`] if the copy to the device or the allocation on it failed.
    /// - [`Error::StillReferenced`] if tensors that outlived their lease occupy the memory.
    /// - [`Error::Deadlock`] if all threads that could free memory are themselves waiting for
    ///   memory or for a pass.
    /// - [`Error::StagingFull`] if the staging memory cannot become free.
    /// - [`Error::Written`] if the unit's bytes changed after [`Lease::seal`].
    /// - [`Error::System`] if a worker thread panicked while it loaded the unit.
    /// - [`Error::NoSuchUnit`] if the engine has no such unit.
    pub fn acquire(&self, pass: Option<PassId>, unit: UnitId) -> Result<Lease<D>, Error> {
        self.acquire_interruptible(pass, unit, never_interrupt())
    }

    /// Like [`acquire`](Self::acquire), but calls `interrupt` regularly while it blocks.
    ///
    /// # Errors
    /// Returns the errors of [`acquire`](Self::acquire), and [`Error::Interrupted`] if `interrupt`
    /// returned `true`.
    pub fn acquire_interruptible(
        &self,
        pass: Option<PassId>,
        unit: UnitId,
        interrupt: Interrupt<'_>,
    ) -> Result<Lease<D>, Error> {
        self.inner.check_unit(unit)?;
        let (memory, acquired_ns) = self.inner.acquire_one(pass, unit, interrupt)?;
        let lease = Lease::new(memory, Arc::clone(&self.inner), unit, Some(acquired_ns));
        lease.check_seal()?;
        Ok(lease)
    }

    /// Leases the units that one operation needs at the same time, and blocks until all of them are
    /// in memory.
    ///
    /// The leases are in the order of `units`. The engine remembers the set and plans for it.
    ///
    /// # Errors
    /// Returns the errors of [`acquire`](Self::acquire), and [`Error::NeverFits`] if the units
    /// together are larger than the engine's memory for units. Nothing is read in that case.
    pub fn acquire_all(
        &self,
        pass: Option<PassId>,
        units: &[UnitId],
    ) -> Result<Vec<Lease<D>>, Error> {
        self.acquire_all_interruptible(pass, units, never_interrupt())
    }

    /// Like [`acquire_all`](Self::acquire_all), but calls `interrupt` regularly while it blocks.
    ///
    /// # Errors
    /// Returns the errors of [`acquire_all`](Self::acquire_all), and [`Error::Interrupted`] if
    /// `interrupt` returned `true`.
    pub fn acquire_all_interruptible(
        &self,
        pass: Option<PassId>,
        units: &[UnitId],
        interrupt: Interrupt<'_>,
    ) -> Result<Vec<Lease<D>>, Error> {
        units.iter().try_for_each(|&unit| self.inner.check_unit(unit))?;
        let (memory, acquired_ns) = self.inner.acquire(pass, units, interrupt)?;
        let lease =
            |(memory, &unit)| Lease::new(memory, Arc::clone(&self.inner), unit, Some(acquired_ns));
        let leases: Vec<_> = memory.into_iter().zip(units).map(lease).collect();
        leases.iter().try_for_each(Lease::check_seal)?;
        Ok(leases)
    }

    /// Leases a unit if it is in memory, and otherwise returns `None`. Does not block.
    ///
    /// Such a use belongs to no pass, and does not change the order that the engine plans for.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchUnit`] if the engine has no such unit, and [`Error::Written`] if the
    /// unit's bytes changed after [`Lease::seal`].
    pub fn try_acquire(&self, unit: UnitId) -> Result<Option<Lease<D>>, Error> {
        self.inner.check_unit(unit)?;
        let Some((memory, acquired_ns)) = self.inner.try_acquire(unit) else { return Ok(None) };
        let lease = Lease::new(memory, Arc::clone(&self.inner), unit, Some(acquired_ns));
        lease.check_seal()?;
        Ok(Some(lease))
    }

    /// Leases all units, if all of them are resident and in memory, and otherwise returns `None`.
    /// Does not block.
    ///
    /// Passes need no other leases then, and the leases may be kept from pass to pass. They are no
    /// uses in the statistics, and passes without other leases are not measured. Drop them before
    /// other leases, [`replan`](Self::replan) and [`set_limit`](Self::set_limit), which cannot take
    /// memory from units in use, and before [`begin_trace`](Self::begin_trace).
    ///
    /// Returns `None` until every unit was used, and several passes were measured use by use with
    /// the current plan. Also returns `None` while a trace is being recorded, while a better plan
    /// or a new limit waits, while several passes are running, if a unit is [sealed](Lease::seal),
    /// and if units are [routed](crate::Access::Routed).
    pub fn acquire_all_resident(&self) -> Option<Vec<Lease<D>>> {
        let memory = self.inner.acquire_all_resident()?;
        let lease = |(index, memory)| {
            Lease::new(memory, Arc::clone(&self.inner), UnitId(index as u32), None)
        };
        Some(memory.into_iter().enumerate().map(lease).collect())
    }

    /// Returns whether these units were [acquired together](Self::acquire_all) before, so that
    /// plans have memory for all of them at once. Routed units do not count, and one unit is
    /// always known.
    pub fn knows_together(&self, units: &[UnitId]) -> bool {
        self.inner.knows_together(units)
    }

    /// Announces that a pass is about to acquire these [routed](crate::Access::Routed) units, each
    /// once and in this order. Does not block.
    ///
    /// The number after a unit is how often the pass uses it, such as the number of tokens of a
    /// batch that need an expert. Starts to read the units that are not in memory, all at once as
    /// far as memory allows. The units with most uses stay in memory, and recent passes count more.
    /// Ordered units are ignored.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchUnit`] if the engine has no such unit.
    ///
    /// # Examples
    /// ```
    /// # use ts_orchestrator::ts_format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};
    /// # use ts_orchestrator::ts_io::Source;
    /// # use ts_orchestrator::{Phase, Unit, UnitTensor};
    /// use ts_orchestrator::{Access, Engine, EngineConfig, UnitId};
    ///
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("experts");
    /// # std::fs::write(&path, vec![7; 64 * 1024])?;
    /// # let tensor = |i: u64| {
    /// #     let parts = vec![ByteRange { file: FileId(0), offset: i * 4096, len: 4096 }];
    /// #     let meta = TensorMeta { dtype: Dtype::U8, shape: vec![4096] };
    /// #     let entry = TensorEntry { meta, parts };
    /// #     let (digest, chunks, phase) = (None, Vec::new(), Phase::Mapped);
    /// #     UnitTensor { name: format!("expert {i}"), entry, phase, digest, chunks }
    /// # };
    /// // One unit for each expert.
    /// let experts = (0..16).map(|i| {
    ///     Unit::new(format!("expert {i}"), vec![tensor(i)]).with_access(Access::Routed)
    /// });
    /// let (units, sources) = (experts.collect(), vec![Source::open(&path)?]);
    /// let engine = Engine::new(units, sources, EngineConfig::with_budget(32 << 10))?;
    ///
    /// let pass = engine.begin_pass();
    /// let routed = [UnitId(3), UnitId(11)]; // the router's choice
    /// let expectation = engine.expect(&routed.map(|unit| (unit, 1)))?;
    /// for unit in routed {
    ///     assert_eq!(engine.acquire(Some(pass), unit)?.tensor(0)[0], 7); // compute with it here
    /// }
    /// drop(expectation);
    /// engine.end_pass(pass);
    /// assert_eq!(engine.stats().routed.touched, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn expect(&self, units: &[(UnitId, u32)]) -> Result<Expectation<D>, Error> {
        units.iter().try_for_each(|&(unit, _)| self.inner.check_unit(unit))?;
        Ok(Expectation::new(Arc::clone(&self.inner), self.inner.expect(units)))
    }

    /// Guesses that the next call of [`expect`](Self::expect) will name these units, the most
    /// likely one first. Does not block.
    ///
    /// Reads those that are not in memory while no other reads are waiting, unless most recent
    /// guesses were wrong. The next call of `expect` or `guess` cancels the reads of units that it
    /// does not name. Ordered units are ignored.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchUnit`] if the engine has no such unit.
    pub fn guess(&self, units: &[UnitId]) -> Result<(), Error> {
        units.iter().try_for_each(|&unit| self.inner.check_unit(unit))?;
        self.inner.guess(units);
        Ok(())
    }

    /// Returns whether [`guess`](Self::guess) saves time at present: recently, expected units were
    /// not in memory, and most guesses were right. Even if it does not, a guess now and then shows
    /// when that has changed.
    pub fn guesses_pay(&self) -> bool {
        self.inner.guesses_pay()
    }

    /// Returns the score of each routed unit. An engine that is created with these scores
    /// ([`Routing::scores`](crate::Routing::scores)) keeps the same units in memory.
    pub fn routing_scores(&self) -> Vec<(UnitId, f64)> {
        self.inner.routing_scores()
    }

    /// Reads rows of a [table](EngineConfig::tables), in this order, and blocks until they are in
    /// memory.
    ///
    /// The reads go out together, and rows with consecutive numbers are read in one piece. The rows
    /// lie one after the other in host memory, at an address that is a multiple of
    /// [`PHASE_ALIGN`](crate::PHASE_ALIGN). They take memory of the budget until the result is
    /// dropped, and units are evicted to free it. On a device with its own memory, they take
    /// staging memory. Copies of the last rows stay in host memory, a 256th of the budget and at
    /// most 1 MiB, and are not read again. Only compressed rows are compared with their checksums.
    ///
    /// # Errors
    /// - [`Error::NoSuchTable`] and [`Error::NoSuchRow`] if they do not exist.
    /// - [`Error::NeverFits`] if the rows are larger than the engine's memory for units, or
    ///   [`Error::StagingFull`] if they are larger than the staging memory.
    /// - The errors of [`acquire`](Self::acquire) for reads and for lack of memory.
    ///
    /// # Examples
    /// ```
    /// # use ts_orchestrator::ts_format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};
    /// # use ts_orchestrator::ts_io::Source;
    /// # use ts_orchestrator::{Engine, EngineConfig, Phase, UnitTensor};
    /// use ts_orchestrator::{Table, TableId, never_interrupt};
    ///
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("embedding");
    /// # std::fs::write(&path, (0..4000).map(|i| (i / 4) as u8).collect::<Vec<u8>>())?;
    /// # let parts = vec![ByteRange { file: FileId(0), offset: 0, len: 4000 }];
    /// # let meta = TensorMeta { dtype: Dtype::U8, shape: vec![1000, 4] };
    /// # let entry = TensorEntry { meta, parts };
    /// # let (digest, chunks) = (None, Vec::new());
    /// # let (name, phase) = ("embedding".into(), Phase::Mapped);
    /// # let tensor = UnitTensor { name, entry, phase, digest, chunks };
    /// // `tensor` has 1000 rows of 4 bytes.
    /// let table = Table::new(tensor).ok_or("not a table")?;
    /// let config = EngineConfig::with_budget(1 << 20).with_tables(vec![table]);
    /// # let unit = ts_orchestrator::Unit::new("none", Vec::new());
    /// # let units = vec![unit];
    /// let engine = Engine::new(units, vec![Source::open(&path)?], config)?;
    /// let rows = engine.gather(TableId(0), &[7, 200], never_interrupt())?;
    /// assert_eq!(rows[..], [7, 7, 7, 7, 200, 200, 200, 200]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn gather(
        &self,
        table: TableId,
        rows: &[u64],
        interrupt: Interrupt<'_>,
    ) -> Result<TensorBytes<D>, Error> {
        self.inner.check_rows(table, rows)?;
        self.inner.gather(table, rows, interrupt)
    }

    /// Evicts a unit whose bytes were modified, so that the next use reads it again.
    ///
    /// Tensors that are still referenced keep the modified bytes. Does nothing if no copy of the
    /// unit is in memory.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchUnit`] if the engine has no such unit.
    pub fn discard(&self, unit: UnitId) -> Result<(), Error> {
        self.inner.check_unit(unit)?;
        self.inner.discard(unit);
        Ok(())
    }

    /// Returns the resident units whose memory was written to since they were read.
    ///
    /// Each entry contains the id of a unit, and the indices of its tensors that overlap a modified
    /// page. Drop the tensors of these units and call [`discard`](Self::discard). The result is
    /// always empty unless [`EngineConfig::watch_writes`] is set and supported
    /// ([`EngineStats::watches_writes`]).
    ///
    /// Queries the kernel for modified pages, and does not read the units' bytes.
    pub fn modified_units(&self) -> Vec<(UnitId, Vec<usize>)> {
        self.inner.written()
    }

    /// Limits the memory for weights and buffers to this many bytes, or to the budget if that is
    /// less.
    ///
    /// Returns the memory of units that are kept beyond the limit and not in use to the system, so
    /// that these units are streamed. The rest takes effect with the next
    /// [`replan`](Self::replan) that succeeds, and [`end_pass`] then returns `true`: it drops all
    /// units, and returns all memory beyond the limit. Buffers keep their size. A larger limit
    /// takes the memory again later.
    ///
    /// Has no effect on the memory of a device with its own memory.
    ///
    /// # Errors
    /// Returns [`Error::NeverFits`] if the limit is lower than before and too small for any plan.
    /// Then the limit stays as it was.
    ///
    /// [`end_pass`]: Self::end_pass
    pub fn set_limit(&self, budget_bytes: usize) -> Result<(), Error> {
        self.inner.set_limit(budget_bytes)
    }

    /// Returns the smallest limit that [`set_limit`](Self::set_limit) accepts, in bytes. It can be
    /// more than the smallest budget, because a larger budget has more buffers.
    pub fn smallest_limit(&self) -> usize {
        self.inner.smallest_limit()
    }

    /// Returns whether weights and buffers take no more than the limit, although the plan may still
    /// be the one for an earlier limit. Always `true` on a device with its own memory.
    pub fn is_within_limit(&self) -> bool {
        self.inner.is_within_limit()
    }

    /// Returns whether the limit that [`set_limit`](Self::set_limit) set is in force: the plan is
    /// made for it.
    pub fn limit_in_force(&self) -> bool {
        self.inner.limit_in_force()
    }

    /// Returns the number of units. Their ids are 0 to this number minus 1.
    pub fn unit_count(&self) -> usize {
        self.inner.unit_count()
    }

    /// Returns the current plan.
    pub fn plan(&self) -> Plan {
        self.inner.plan()
    }

    /// Returns what passes would be like with each of these budgets, in bytes, as far as the
    /// measurements so far can tell. Leaves out budgets that are too small.
    pub fn curve(&self, budgets: &[usize]) -> Vec<CurvePoint> {
        self.inner.curve(budgets)
    }

    /// Begins to record what the engine does. A trace that is running is dropped.
    ///
    /// A trace takes about 50 bytes of memory for each event, beside the budget, and at most 13 MB.
    pub fn begin_trace(&self) {
        self.inner.begin_trace();
    }

    /// Ends the running trace, and returns it. `None` if none is running.
    pub fn end_trace(&self) -> Option<Trace> {
        self.inner.end_trace()
    }

    /// Returns a stream for computations with units, or `None` if units live in host memory. It
    /// comes from the pool of the engine's streams. The engine itself submits no work to it.
    ///
    /// The stream waits for the copy of a unit after
    /// [`Lease::record_stream`](crate::Lease::record_stream). Computations may use other streams
    /// instead.
    pub fn compute_stream(&self) -> Option<&D::Stream> {
        self.inner.compute_stream()
    }

    /// Returns all measurements so far. Does not block on I/O.
    pub fn stats(&self) -> EngineStats {
        self.inner.stats()
    }

    /// Lets processes that are forked from now on inherit the tensors in host memory,
    /// copy-on-write. Call this when nothing is read any more, for example before the engine is
    /// dropped and its tensors are kept.
    ///
    /// By default, a fork does not inherit them, because each page that the engine writes to after
    /// a fork would be copied.
    pub fn keep_in_forks(&self) {
        self.inner.host_pool().keep_in_forks();
    }

    /// Returns whether this process is a fork of the process that created the engine.
    ///
    /// A fork has neither the engine's threads nor, by default, its memory, so no other method may
    /// be called in it. Dropping the engine there does nothing.
    pub fn is_forked(&self) -> bool {
        self.inner.is_forked()
    }
}

impl<D: Device> Drop for Engine<D> {
    fn drop(&mut self) {
        if self.inner.is_forked() {
            // The threads exist only in the parent process. One of them may have held a lock during
            // the fork.
            std::mem::forget(self.loader.take());
            std::mem::forget(Arc::clone(&self.inner));
            return;
        }
        self.inner.stop_populating();
        self.inner.stop_reading();
        // A waker that the loader calls can drop the last handle. Then the loader ends by itself.
        let is_loader =
            |thread: &JoinHandle<()>| thread.thread().id() == std::thread::current().id();
        if let Some(loader) = self.loader.take().filter(|thread| !is_loader(thread)) {
            let _ = loader.join();
        }
        self.inner.stop_working();
    }
}

fn spawn_loader<D: Device>(
    inner: Arc<EngineInner<D>>,
    inbox: Receiver<Event<D>>,
) -> Result<JoinHandle<()>, Error> {
    std::thread::Builder::new()
        .name("ts-loader".into())
        .stack_size(512 << 10)
        .spawn(move || inner.run(&inbox))
        .map_err(|e| Error::System(format!("cannot start the loader thread: {e}")))
}

// Any thread may report completions and freed slots, so the sender must be `Sync`.
const _: fn() = || {
    fn sync<T: Sync>() {}
    sync::<Sender<Event<CpuDevice>>>();
};
