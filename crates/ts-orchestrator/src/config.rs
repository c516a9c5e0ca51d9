// SPDX-License-Identifier: MIT OR Apache-2.0
//! The configuration of an engine.

use ts_io::{BackendOptions, Registry};
use ts_pool::PageStore;
use ts_streams::Device;

use crate::plan::{PlanRequest, Rates, UnitDemand};
use crate::split_decoder::can_decode;
use crate::table::Table;
use crate::unit::UnitId;

/// A callback that can interrupt a blocking call.
///
/// It is called about every 20 ms on the blocked thread, while the engine holds no lock. If it
/// returns `true`, the call returns [`Error::Interrupted`](crate::Error::Interrupted).
pub type Interrupt<'a> = &'a mut dyn FnMut() -> bool;

/// Returns an [`Interrupt`] that never interrupts.
pub fn never_interrupt() -> Interrupt<'static> {
    // A closure without captures has no size, so this allocates nothing.
    Box::leak(Box::new(|| false))
}

/// A function that returns the current time in nanoseconds. The time must never go backwards.
pub type Clock = Box<dyn Fn() -> u64 + Send + Sync>;

/// The configuration of an [`Engine`](crate::Engine).
///
/// # Examples
/// ```
/// use ts_orchestrator::{EngineConfig, Prefetch};
///
/// let config = EngineConfig::with_budget(600 << 20)
///     .with_max_passes(2)
///     .with_prefetch(Prefetch::Aggressive);
/// assert_eq!(config.max_passes, 2);
/// ```
#[non_exhaustive]
pub struct EngineConfig {
    /// The most memory that the engine may use for weights, in bytes. On the host, the limit covers
    /// the memory of units (their slots), the bounce buffers, the memory of decoders, and cached
    /// rows of tables. For a device with its own memory, it covers only memory on the device.
    pub budget_bytes: usize,
    /// The number of units that fit into the staging memory on the host at the same time. The
    /// memory is sized for the largest units, and pinned when it is first used. Used only for
    /// devices with their own memory; 0 counts as 1.
    pub staging_units: usize,
    /// The memory on the host in which units are kept, in bytes. They are copied to the device from
    /// there instead of being read again. Units that are compressed on storage stay compressed, and
    /// are decoded into the staging memory or on the device. The memory of others, and of those
    /// that the device can decode, is pinned after the first read. Used only for devices with their
    /// own memory; 0, the default, keeps none.
    pub host_bytes: usize,
    /// Whether to use the backend `gds` if it reads straight to the device, without copies on the
    /// host. Otherwise the default backend is used, and
    /// [`passed_over`](crate::EngineStats::passed_over) has the reason. Only for a device with its
    /// own memory, and if no `backend` is named.
    pub read_to_device: bool,
    /// Where units are decoded that are kept compressed on the host.
    pub decoding: Decoding,
    /// Whether plans without an engine are for a device with its own memory. They are for one that
    /// runs kernels, unless [`decoding`](Self::decoding) is [`Decoding::OnHost`].
    pub device_memory: bool,
    /// The number of passes that may run at the same time; 0 counts as 1.
    pub max_passes: usize,
    /// The units that a pass is expected to use, in order. `None` means each unit once, by
    /// ascending id. The engine replaces this order with the order that it observes.
    pub order: Option<Vec<UnitId>>,
    /// Known sets of units that one operation needs at the same time. The engine adds the sets that
    /// are passed to [`Engine::acquire_all`](crate::Engine::acquire_all).
    pub together: Vec<Vec<UnitId>>,
    /// The tables for [`Engine::gather`](crate::Engine::gather), indexed by
    /// [`TableId`](crate::TableId).
    pub tables: Vec<Table>,
    /// Whether `Shared::read_rows` reads rows of other tables too, so that there must be a
    /// bounce buffer even if all units are read in place.
    pub(crate) row_reads: bool,
    /// The name of the I/O backend; `None` for the available backend with the highest priority.
    pub backend: Option<String>,
    /// The available I/O backends.
    pub registry: Registry,
    /// The options of the I/O backend.
    pub io: BackendOptions,
    /// The maximum length of one read directly into a slot, in bytes. It is rounded up to the
    /// alignment of direct reads.
    pub request_bytes: usize,
    /// How far to read ahead.
    pub prefetch: Prefetch,
    /// When to compare units with their checksums, if they have any.
    pub verify: Verify,
    /// The number of threads that compare checksums, decode chunks, and copy bytes that cannot be
    /// read directly into a slot; 0 counts as 1. If chunks are decoded, a small budget has fewer
    /// threads, because each needs about 2 MiB. The default is the number of processors, at most 4:
    /// four threads decode more than 10 GB/s, which few devices deliver.
    pub workers: usize,
    /// Whether units may be kept in memory compressed, without loss. Those that are take less of
    /// the budget, and are decoded for each use. The plan keeps units compressed where this is
    /// predicted to pay: where storage is slow or many processors are idle. Not used for devices
    /// with their own memory.
    ///
    /// Units that are not compressed on storage are encoded after the first pass if the gain is
    /// large, else after the third one, when the speeds are known. This needs a sixteenth of the
    /// budget, at most about 6 MiB for each worker, and saves memory for units with floats of at
    /// least 1 MiB. Off by default.
    pub keep_compressed: bool,
    /// The number of threads that pre-fault the host memory for units when the engine is created; 0
    /// for none. Pre-faulted pages stay allocated even if no unit ever uses them.
    pub populate: usize,
    /// The number of threads that pre-fault the host memory for units from the first pass on, while
    /// storage is read; 0 for none. A unit that is to stay in memory whose pages are not there yet
    /// when it is read is streamed in that pass. So the first pass does not wait for the system,
    /// which can take longer than the storage, and later ones take up the rest. The threads end
    /// when all memory has pages, or when the limit falls. The default is 2. Memory of less than
    /// 8 MiB for each thread is not pre-faulted.
    pub populate_in_passes: usize,
    /// Whether [`Engine::modified_units`](crate::Engine::modified_units) reports writes to resident
    /// units. This works only if the system supports it and units live in host memory.
    pub watch_writes: bool,
    /// Where to share the memory of kept units with other processes: of resident units, and of
    /// those that are kept as they are compressed on storage. No unit is encoded. Works only for
    /// units in host memory that are read from local files.
    pub shared_pages: Option<PageStore>,
    /// Which routed units stay in memory.
    pub routing: Routing,
    /// The speed of storage and of the processors that the first plan assumes. Later plans use
    /// measured rates.
    pub rates: Rates,
    /// The duration of computations in an earlier run, which the first plan assumes.
    pub compute: ComputeTimes,
    /// The clock for all measurements.
    pub clock: Clock,
}

/// Direct reads of 1 GB with io_uring take 0.1 s of processor time on a virtual disk.
const READ_BYTES_PER_PROCESSOR_S: f64 = 10e9;

fn default_workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(4)
}

impl EngineConfig {
    /// Returns the default configuration with a budget of `budget_bytes`.
    pub fn with_budget(budget_bytes: usize) -> Self {
        Self {
            budget_bytes,
            staging_units: 2,
            host_bytes: 0,
            read_to_device: false,
            decoding: Decoding::default(),
            device_memory: false,
            max_passes: 1,
            order: None,
            together: Vec::new(),
            tables: Vec::new(),
            row_reads: false,
            backend: None,
            registry: Registry::builtin(),
            io: BackendOptions::default(),
            request_bytes: 4 << 20,
            prefetch: Prefetch::default(),
            verify: Verify::EveryRead,
            workers: default_workers(),
            keep_compressed: false,
            populate: 0,
            populate_in_passes: 2,
            watch_writes: false,
            shared_pages: None,
            routing: Routing::default(),
            rates: Rates::default()
                .with_processors(default_workers())
                .with_read_bytes_per_processor_s(READ_BYTES_PER_PROCESSOR_S),
            compute: ComputeTimes::default(),
            clock: Box::new(ts_io::monotonic_ns),
        }
    }

    /// Returns the planner's request for these units. The memory for slots and the least ring are
    /// not known yet.
    pub(crate) fn plan_request<'a>(
        &'a self,
        demands: &'a [UnitDemand],
        order: &'a [UnitId],
    ) -> PlanRequest<'a> {
        PlanRequest {
            max_passes: self.max_passes,
            rates: self.rates,
            reach: self.prefetch.reach(),
            other_compute_s: self.compute.other_s,
            ..PlanRequest::new(demands, order, 0).with_together(&self.together)
        }
    }

    /// Sets [`staging_units`](Self::staging_units).
    #[must_use]
    pub fn with_staging_units(self, staging_units: usize) -> Self {
        Self { staging_units, ..self }
    }

    /// Sets [`host_bytes`](Self::host_bytes).
    #[must_use]
    pub fn with_host_bytes(self, host_bytes: usize) -> Self {
        Self { host_bytes, ..self }
    }

    /// Sets [`read_to_device`](Self::read_to_device).
    #[must_use]
    pub fn with_read_to_device(self, read_to_device: bool) -> Self {
        Self { read_to_device, ..self }
    }

    /// Sets [`decoding`](Self::decoding).
    #[must_use]
    pub fn with_decoding(self, decoding: Decoding) -> Self {
        Self { decoding, ..self }
    }

    /// Sets [`device_memory`](Self::device_memory).
    #[must_use]
    pub fn with_device_memory(self, device_memory: bool) -> Self {
        Self { device_memory, ..self }
    }

    /// Sets [`max_passes`](Self::max_passes).
    #[must_use]
    pub fn with_max_passes(self, max_passes: usize) -> Self {
        Self { max_passes, ..self }
    }

    /// Sets [`order`](Self::order).
    #[must_use]
    pub fn with_order(self, order: Vec<UnitId>) -> Self {
        Self { order: Some(order), ..self }
    }

    /// Sets [`together`](Self::together).
    #[must_use]
    pub fn with_together(self, together: Vec<Vec<UnitId>>) -> Self {
        Self { together, ..self }
    }

    /// Sets [`tables`](Self::tables).
    #[must_use]
    pub fn with_tables(self, tables: Vec<Table>) -> Self {
        Self { tables, ..self }
    }

    /// Sets [`backend`](Self::backend). Accepts a `String` or an `Option<String>`.
    #[must_use]
    pub fn with_backend(self, backend: impl Into<Option<String>>) -> Self {
        Self { backend: backend.into(), ..self }
    }

    /// Sets [`registry`](Self::registry).
    #[must_use]
    pub fn with_registry(self, registry: Registry) -> Self {
        Self { registry, ..self }
    }

    /// Sets [`io`](Self::io).
    #[must_use]
    pub fn with_io(self, io: BackendOptions) -> Self {
        Self { io, ..self }
    }

    /// Sets [`request_bytes`](Self::request_bytes).
    #[must_use]
    pub fn with_request_bytes(self, request_bytes: usize) -> Self {
        Self { request_bytes, ..self }
    }

    /// Sets [`prefetch`](Self::prefetch).
    #[must_use]
    pub fn with_prefetch(self, prefetch: Prefetch) -> Self {
        Self { prefetch, ..self }
    }

    /// Sets [`verify`](Self::verify).
    #[must_use]
    pub fn with_verify(self, verify: Verify) -> Self {
        Self { verify, ..self }
    }

    /// Sets [`workers`](Self::workers).
    #[must_use]
    pub fn with_workers(self, workers: usize) -> Self {
        Self { workers, ..self }
    }

    /// Sets [`keep_compressed`](Self::keep_compressed).
    #[must_use]
    pub fn with_keep_compressed(self, keep_compressed: bool) -> Self {
        Self { keep_compressed, ..self }
    }

    /// Sets [`populate_in_passes`](Self::populate_in_passes).
    #[must_use]
    pub fn with_populate_in_passes(self, populate_in_passes: usize) -> Self {
        Self { populate_in_passes, ..self }
    }

    /// Sets [`populate`](Self::populate).
    #[must_use]
    pub fn with_populate(self, populate: usize) -> Self {
        Self { populate, ..self }
    }

    /// Sets [`shared_pages`](Self::shared_pages).
    #[must_use]
    pub fn with_shared_pages(self, shared_pages: Option<PageStore>) -> Self {
        Self { shared_pages, ..self }
    }

    /// Sets [`watch_writes`](Self::watch_writes).
    #[must_use]
    pub fn with_watch_writes(self, watch_writes: bool) -> Self {
        Self { watch_writes, ..self }
    }

    /// Sets [`routing`](Self::routing).
    #[must_use]
    pub fn with_routing(self, routing: Routing) -> Self {
        Self { routing, ..self }
    }

    /// Sets [`rates`](Self::rates).
    #[must_use]
    pub fn with_rates(self, rates: Rates) -> Self {
        Self { rates, ..self }
    }

    /// Sets [`compute`](Self::compute).
    #[must_use]
    pub fn with_compute(self, compute: ComputeTimes) -> Self {
        Self { compute, ..self }
    }

    /// Sets [`clock`](Self::clock).
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }
}

/// How long the computations of a pass take.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct ComputeTimes {
    /// The duration of a visit to a unit, in seconds. For other units, it is estimated.
    pub units: Vec<(UnitId, f64)>,
    /// The duration of the computation outside of visits, in seconds per pass.
    pub other_s: f64,
}

impl ComputeTimes {
    /// Sets [`units`](Self::units).
    #[must_use]
    pub fn with_units(self, units: Vec<(UnitId, f64)>) -> Self {
        Self { units, ..self }
    }

    /// Sets [`other_s`](Self::other_s).
    #[must_use]
    pub fn with_other_s(self, other_s: f64) -> Self {
        Self { other_s, ..self }
    }
}

/// How the engine decides which [routed](crate::Access::Routed) units stay in memory.
///
/// Those with the highest scores stay. The score of a unit is the number of its uses, where a use
/// counts half as much after `half_life` passes. If suddenly fewer of the needed units are in
/// memory, all uses so far count a sixteenth, because other units have become frequent.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Routing {
    /// The number of passes after which a use counts half as much. With `f64::INFINITY`, all uses
    /// always count the same.
    pub half_life: f64,
    /// The scores of units in an earlier run, from
    /// [`Engine::routing_scores`](crate::Engine::routing_scores). Other units start with 0.
    pub scores: Vec<(UnitId, f64)>,
}

impl Default for Routing {
    fn default() -> Self {
        Self { half_life: 128.0, scores: Vec::new() }
    }
}

impl Routing {
    /// Sets [`half_life`](Self::half_life).
    #[must_use]
    pub fn with_half_life(self, half_life: f64) -> Self {
        Self { half_life, ..self }
    }

    /// Sets [`scores`](Self::scores).
    #[must_use]
    pub fn with_scores(self, scores: Vec<(UnitId, f64)>) -> Self {
        Self { scores, ..self }
    }
}

/// Where units are decoded that a host keeps compressed for a device. The first time, they are
/// always decoded and verified on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Decoding {
    /// On the host.
    OnHost,
    /// On the device, if it [runs kernels](ts_streams::Device::load) and they can decode the unit.
    /// The engine reserves 1/32 of its budget for that, at most 128 MiB.
    OnDevice,
    /// Where it was measured to be faster. The engine reserves memory as for
    /// [`OnDevice`](Self::OnDevice).
    #[default]
    WhereFaster,
}

impl Decoding {
    /// Returns whether a device can decode units. May block while its driver compiles kernels.
    pub fn is_possible_on<D: Device>(device: &D) -> bool {
        can_decode(device)
    }
}

/// When bytes are compared with their checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Verify {
    /// After every read.
    #[default]
    EveryRead,
    /// After each read of a unit until one read matches. Later reads of the unit are not compared.
    Once,
    /// Never. A compressed chunk that cannot be decoded is still an error.
    Never,
}

/// How far units are read ahead of their use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Prefetch {
    /// Not at all: a unit is read when it is acquired.
    None,
    /// One unit ahead, with memory for it if the budget is at least that of two units.
    NextLayer,
    /// As far as the memory for streamed units allows. The plan decides how much memory that is.
    #[default]
    Adaptive,
    /// Like `Adaptive`, but with at least half of the budget for streamed units if possible. This
    /// evens out the duration of passes on storage whose speed varies.
    Aggressive,
}

impl Prefetch {
    /// Returns how many visits ahead of its use a unit may be read.
    pub(crate) fn reach(self) -> usize {
        match self {
            Prefetch::None => 0,
            Prefetch::NextLayer => 1,
            Prefetch::Adaptive | Prefetch::Aggressive => usize::MAX,
        }
    }

    /// Returns how much memory the plan should leave for streamed units if possible, in bytes.
    pub(crate) fn least_ring_bytes(self, budget_bytes: usize) -> usize {
        if self == Prefetch::Aggressive { budget_bytes / 2 } else { 0 }
    }
}
