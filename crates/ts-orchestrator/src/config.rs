// SPDX-License-Identifier: MIT OR Apache-2.0
//! The configuration of an engine.

use ts_io::{BackendOptions, Registry};

use crate::plan::Rates;
use crate::unit::UnitId;

/// A callback that can interrupt a blocking call.
///
/// It is called about every 20 ms on the blocked thread, without any lock held. If it returns
/// `true`, the call returns [`Error::Interrupted`](crate::Error::Interrupted).
pub type Interrupt<'a> = &'a mut dyn FnMut() -> bool;

/// Returns an [`Interrupt`] that never interrupts.
pub fn never_interrupt() -> Interrupt<'static> {
    // A closure without captures has no size, so this allocates nothing.
    Box::leak(Box::new(|| false))
}

/// Returns the time in nanoseconds. It must never go backwards.
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
    /// The memory for weights, in bytes. On the host it covers slots, bounce buffers and the
    /// decoders' memory. For a device with its own memory it covers the slots on the device.
    pub budget_bytes: usize,
    /// The number of units that the staging memory on the host can hold, for devices with their own
    /// memory. It is sized for the largest units. At least 1.
    pub staging_units: usize,
    /// The number of passes that may run at the same time. At least 1.
    pub max_passes: usize,
    /// The expected visits of a pass, in order; `None` for each unit once, in the order of their
    /// ids. The engine replaces it with what it observes.
    pub order: Option<Vec<UnitId>>,
    /// Known sets of units that one operation needs at the same time. The engine learns others.
    pub together: Vec<Vec<UnitId>>,
    /// The name of the I/O backend; `None` for the best one that is available.
    pub backend: Option<String>,
    /// The available I/O backends.
    pub registry: Registry,
    /// The options of the I/O backend.
    pub io: BackendOptions,
    /// The size of the largest single read, in bytes.
    pub request_bytes: usize,
    /// How far to read ahead.
    pub prefetch: Prefetch,
    /// When to compare units with their checksums, if they have any.
    pub verify: Verify,
    /// The number of threads that compare checksums, decode chunks, and copy bytes that cannot be
    /// read in place. At least 1.
    pub workers: usize,
    /// The number of threads that populate the memory for units before the first reads arrive; 0
    /// for none. Populated memory stays allocated even if it is never used.
    pub populate: usize,
    /// Whether [`Engine::modified_units`](crate::Engine::modified_units) reports writes to resident
    /// units. It needs support of the system, units in host memory, and `populate` 0, because
    /// populating a page looks like a write.
    pub watch_writes: bool,
    /// The rates that the first plan assumes. Later plans use measured bandwidth.
    pub rates: Rates,
    /// The clock for all measurements.
    pub clock: Clock,
}

impl EngineConfig {
    /// Returns the default configuration for a budget in bytes.
    pub fn with_budget(budget_bytes: usize) -> Self {
        Self {
            budget_bytes,
            staging_units: 2,
            max_passes: 1,
            order: None,
            together: Vec::new(),
            backend: None,
            registry: Registry::builtin(),
            io: BackendOptions::default(),
            request_bytes: 4 << 20,
            prefetch: Prefetch::default(),
            verify: Verify::EveryRead,
            workers: 1,
            populate: 0,
            watch_writes: false,
            rates: Rates::default(),
            clock: Box::new(ts_io::monotonic_ns),
        }
    }

    /// Sets [`staging_units`](Self::staging_units).
    #[must_use]
    pub fn with_staging_units(self, staging_units: usize) -> Self {
        Self { staging_units, ..self }
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

    /// Sets [`backend`](Self::backend); accepts a name or an `Option` of one.
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

    /// Sets [`populate`](Self::populate).
    #[must_use]
    pub fn with_populate(self, populate: usize) -> Self {
        Self { populate, ..self }
    }

    /// Sets [`watch_writes`](Self::watch_writes).
    #[must_use]
    pub fn with_watch_writes(self, watch_writes: bool) -> Self {
        Self { watch_writes, ..self }
    }

    /// Sets [`rates`](Self::rates).
    #[must_use]
    pub fn with_rates(self, rates: Rates) -> Self {
        Self { rates, ..self }
    }

    /// Sets [`clock`](Self::clock).
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }
}

/// When bytes are compared with their checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Verify {
    /// After every read.
    #[default]
    EveryRead,
    /// After the first read of each unit. Later reads of an unchanged file are trusted.
    Once,
    /// Never. Compressed chunks must still decode.
    Never,
}

/// How far units are read ahead of their use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Prefetch {
    /// Not at all: a streamed unit is read when it is acquired.
    None,
    /// One unit ahead.
    NextLayer,
    /// As far as the memory for streamed units allows. The plan decides how much memory that is.
    #[default]
    Adaptive,
    /// Like `Adaptive`, but with at least half of the budget for streamed units if possible. Passes
    /// are then steadier on storage whose speed varies.
    Aggressive,
}

impl Prefetch {
    /// Returns how many of the next visits may be read ahead.
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
