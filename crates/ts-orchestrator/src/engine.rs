// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine, and what its parts share.

mod acquire;
mod build;
mod events;
mod gather;
mod observe;
mod passes;
pub(crate) mod poll;
mod preview;
mod routing;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use ts_io::{Choice, Source};
use ts_pool::{Budget, Reservation};
use ts_streams::{CpuDevice, Device};

use crate::Error;
use crate::config::{Clock, ComputeTimes, EngineConfig, Interrupt};
use crate::context::EngineContext;
use crate::event::Event;
use crate::plan::Rates;
use crate::populate::Populator;
use crate::prepared::PreparedUnit;
use crate::row_cache::RowCache;
use crate::sizing::Overhead;
use crate::state::EngineState;
use crate::table::Table;
use crate::unit::{Unit, UnitId};

/// How often a blocked call calls its [`Interrupt`].
const INTERRUPT_PERIOD: Duration = Duration::from_millis(20);

/// Streams units of weights under a memory budget.
///
/// The engine keeps the units that its [plan](Self::plan) makes resident, and reads the others
/// ahead of their use. [`begin_pass`](Self::begin_pass) announces a pass over the units,
/// [`acquire`](Self::acquire) returns a [`Lease`](crate::Lease) of one unit, and
/// [`end_pass`](Self::end_pass) ends the pass.
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
    pub(crate) shared: Arc<Shared<D>>,
    loader: Option<JoinHandle<()>>,
}

/// What an engine shares with its leases, its futures and its loader thread.
pub(crate) struct Shared<D: Device> {
    context: EngineContext<D>,
    state: Mutex<EngineState<D>>,
    /// Notified after every change that a blocked call may be waiting for.
    changed: Condvar,
    tables: Vec<Table>,
    budget: Budget,
    row_cache: RowCache,
    /// The reservation for the memory of the workers' decoders and of cached rows.
    _reserved: Reservation,
    choice: Choice,
    max_passes: usize,
    slot_budget: usize,
    /// The size of the decoders and of the minimum number of bounce buffers, in bytes. The smallest
    /// budget includes this size. 0 if units live on a device with its own memory.
    least_buffer_bytes: usize,
    overhead: Overhead,
    /// The configured rates and durations of computations.
    rates: Rates,
    compute: ComputeTimes,
    worker_count: usize,
    /// The threads that pre-fault memory, once there are any.
    populator: Mutex<Option<Populator>>,
    /// How many threads pre-fault memory from the first pass on.
    populate_in_passes: usize,
    clock: Clock,
    /// The id of the process that created the engine.
    process: u32,
}

type StateGuard<'a, D> = MutexGuard<'a, EngineState<D>>;

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
        let (shared, inbox) = Shared::new(device, units, sources, config)?;
        let shared = Arc::new(shared);
        let loader = spawn_loader(Arc::clone(&shared), inbox)?;
        Ok(Self { shared, loader: Some(loader) })
    }

    /// Lets processes that are forked from now on inherit the tensors in host memory,
    /// copy-on-write. Call this when nothing is read any more, for example before the engine is
    /// dropped and its tensors are kept.
    ///
    /// By default, a fork does not inherit them, because each page that the engine writes to after
    /// a fork would be copied.
    pub fn keep_in_forks(&self) {
        self.shared.context.slots.host.keep_in_forks();
    }

    /// Returns whether this process is a fork of the process that created the engine.
    ///
    /// A fork has neither the engine's threads nor, by default, its memory, so no other method may
    /// be called in it. Dropping the engine there does nothing.
    pub fn is_forked(&self) -> bool {
        self.shared.is_forked()
    }
}

impl<D: Device> Drop for Engine<D> {
    fn drop(&mut self) {
        if self.shared.is_forked() {
            // The threads exist only in the parent process. One of them may have held a lock during
            // the fork.
            std::mem::forget(self.loader.take());
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let populator = self.shared.populator.lock().take();
        drop(populator); // waits for its threads
        self.shared.stop_reading();
        // A waker that the loader calls can drop the last handle. Then the loader ends by itself.
        let is_loader =
            |thread: &JoinHandle<()>| thread.thread().id() == std::thread::current().id();
        if let Some(loader) = self.loader.take().filter(|thread| !is_loader(thread)) {
            let _ = loader.join();
        }
        self.shared.stop_working();
    }
}

impl<D: Device> Shared<D> {
    pub(crate) fn unit(&self, unit: UnitId) -> &PreparedUnit {
        &self.context.units[unit.index()]
    }

    /// Checks that a unit exists.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchUnit`] if the id is out of range.
    pub(crate) fn check_unit(&self, unit: UnitId) -> Result<(), Error> {
        let count = self.context.units.len();
        if unit.index() >= count {
            return Err(Error::NoSuchUnit { unit: unit.0, count });
        }
        Ok(())
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    fn lock(&self) -> StateGuard<'_, D> {
        // parking_lot does not poison: after a panic under this lock, other threads go on.
        self.state.lock()
    }

    /// Waits for a change of the state, but at most [`INTERRUPT_PERIOD`]. Then calls `interrupt` if
    /// the last call was at least that long ago. If `interrupt` returns `true`, returns
    /// [`Error::Interrupted`], in which `what` names the awaited event.
    fn wait<'a>(
        &'a self,
        mut state: StateGuard<'a, D>,
        timer: &mut InterruptTimer,
        interrupt: Interrupt<'_>,
        what: impl Fn() -> String,
    ) -> Result<StateGuard<'a, D>, Error> {
        self.changed.wait_for(&mut state, INTERRUPT_PERIOD);
        // Measures the elapsed time, because changes may come more often than the period.
        if timer.last_asked.elapsed() < INTERRUPT_PERIOD {
            return Ok(state);
        }
        drop(state);
        timer.last_asked = Instant::now();
        if interrupt() {
            self.lock().waiters.for_pass.remove(&std::thread::current().id());
            return Err(Error::Interrupted { what: what() });
        }
        Ok(self.lock())
    }
}

/// The time at which a blocked call last called its [`Interrupt`].
struct InterruptTimer {
    last_asked: Instant,
}

impl InterruptTimer {
    fn new() -> Self {
        Self { last_asked: Instant::now() }
    }
}

fn spawn_loader<D: Device>(
    shared: Arc<Shared<D>>,
    inbox: Receiver<Event<D>>,
) -> Result<JoinHandle<()>, Error> {
    std::thread::Builder::new()
        .name("ts-loader".into())
        .stack_size(512 << 10)
        .spawn(move || shared.run(&inbox))
        .map_err(|e| Error::System(format!("cannot start the loader thread: {e}")))
}

// Any thread may report completions and freed slots, so the sender must be `Sync`.
const _: fn() = || {
    fn sync<T: Sync>() {}
    sync::<Sender<Event<CpuDevice>>>();
};
