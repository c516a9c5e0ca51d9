// SPDX-License-Identifier: MIT OR Apache-2.0
//! The input and the output of the planner.

use std::fmt;
use std::sync::Arc;

use crate::unit::UnitId;

/// The sizes and the computation time of a unit, for the planner.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct UnitDemand {
    /// The name, for error messages.
    pub name: String,
    /// The memory that the unit occupies, in bytes.
    pub slot_bytes: usize,
    /// The number of bytes that are read from storage to load the unit.
    pub read_bytes: u64,
    /// The duration of the computation in one visit to the unit, in seconds.
    pub compute_s: f64,
    /// The memory that the unit occupies while it is kept compressed, in bytes. `None` if it cannot
    /// be kept compressed. For a device with its own memory, the memory on the host that the unit
    /// occupies as it is on storage, compressed or not.
    pub compressed_bytes: Option<usize>,
    /// The processor time to decode the compressed unit, in seconds.
    pub decode_s: f64,
    /// Whether the unit is compressed on storage, so that it is decoded whenever it is read.
    pub stored_compressed: bool,
    /// Whether other processes keep the unit in memory that this one can share. Of units that save
    /// about the same, a plan keeps these first.
    pub shared: bool,
}

impl UnitDemand {
    /// Returns the demand of a unit of `slot_bytes` bytes. All of them are read, and the
    /// computation takes no time.
    pub fn new(name: impl Into<String>, slot_bytes: usize) -> Self {
        Self {
            name: name.into(),
            slot_bytes,
            read_bytes: slot_bytes as u64,
            compute_s: 0.0,
            compressed_bytes: None,
            decode_s: 0.0,
            stored_compressed: false,
            shared: false,
        }
    }

    /// Sets [`read_bytes`](Self::read_bytes).
    #[must_use]
    pub fn with_read_bytes(self, read_bytes: u64) -> Self {
        Self { read_bytes, ..self }
    }

    /// Sets [`compute_s`](Self::compute_s).
    #[must_use]
    pub fn with_compute_s(self, compute_s: f64) -> Self {
        Self { compute_s, ..self }
    }

    /// Sets [`compressed_bytes`](Self::compressed_bytes) and [`decode_s`](Self::decode_s).
    #[must_use]
    pub fn with_compressed(self, compressed_bytes: usize, decode_s: f64) -> Self {
        Self { compressed_bytes: Some(compressed_bytes), decode_s, ..self }
    }

    /// Sets [`stored_compressed`](Self::stored_compressed).
    #[must_use]
    pub fn with_stored_compressed(self, stored_compressed: bool) -> Self {
        Self { stored_compressed, ..self }
    }
}

/// The speed of storage and of the processors.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Rates {
    /// The read bandwidth, in bytes per second.
    pub read_bytes_per_s: f64,
    /// The latency of loading a unit, in seconds, in addition to the time for its bytes.
    pub read_latency_s: f64,
    /// The rate at which one processor decodes, in decoded bytes per second.
    pub decode_bytes_per_s: f64,
    /// The number of processors that decode at the same time; 0 counts as 1. The computation uses
    /// the same ones.
    pub processors: usize,
    /// How many bytes are read in one second of processor time.
    pub read_bytes_per_processor_s: f64,
    /// The rate at which units are copied to a device with its own memory, in bytes per second.
    pub copy_bytes_per_s: f64,
}

impl Rates {
    /// Returns rates with this bandwidth, in bytes per second, and this latency, in seconds.
    /// Otherwise like the default.
    pub fn new(read_bytes_per_s: f64, read_latency_s: f64) -> Self {
        Self { read_bytes_per_s, read_latency_s, ..Self::default() }
    }

    /// Sets [`decode_bytes_per_s`](Self::decode_bytes_per_s).
    #[must_use]
    pub fn with_decode_bytes_per_s(self, decode_bytes_per_s: f64) -> Self {
        Self { decode_bytes_per_s, ..self }
    }

    /// Sets [`processors`](Self::processors).
    #[must_use]
    pub fn with_processors(self, processors: usize) -> Self {
        Self { processors, ..self }
    }

    /// Sets [`read_bytes_per_processor_s`](Self::read_bytes_per_processor_s).
    #[must_use]
    pub fn with_read_bytes_per_processor_s(self, read_bytes_per_processor_s: f64) -> Self {
        Self { read_bytes_per_processor_s, ..self }
    }

    /// Sets [`copy_bytes_per_s`](Self::copy_bytes_per_s).
    #[must_use]
    pub fn with_copy_bytes_per_s(self, copy_bytes_per_s: f64) -> Self {
        Self { copy_bytes_per_s, ..self }
    }
}

impl Default for Rates {
    /// Returns the rates of a slow NVMe device, 1 GB/s and 100 µs, of one processor, which decodes
    /// 3 GB/s, and of a PCIe 3.0 x16 bus, 12 GB/s. Reading takes no processor time.
    fn default() -> Self {
        Self {
            read_bytes_per_s: 1e9,
            read_latency_s: 1e-4,
            decode_bytes_per_s: 3e9,
            processors: 1,
            read_bytes_per_processor_s: f64::INFINITY,
            copy_bytes_per_s: 12e9,
        }
    }
}

/// The input of [`plan()`](crate::plan()).
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct PlanRequest<'a> {
    /// All units, indexed by [`UnitId`].
    pub units: &'a [UnitDemand],
    /// The units that one pass visits, in order. A unit may occur several times or not at all.
    pub order: &'a [UnitId],
    /// Sets of units that one operation needs at the same time. A unit that is in no set is needed
    /// alone.
    pub together: &'a [Vec<UnitId>],
    /// The memory for slots, in bytes.
    pub budget_bytes: usize,
    /// The memory on the host for units that are kept there, in bytes, if slots are on a device
    /// with its own memory. Units are then copied to their slots. `None` if slots are on the host.
    pub host_bytes: Option<usize>,
    /// The number of passes that may run at the same time; 0 counts as 1.
    pub max_passes: usize,
    /// The speed of storage and of the processors.
    pub rates: Rates,
    /// The minimum memory to leave for streamed units, if possible, in bytes. With 0, only the
    /// predicted speed decides.
    pub least_ring_bytes: usize,
    /// How many visits ahead of its use a unit may be read; 0 means that it is read when the
    /// computation needs it.
    pub reach: usize,
    /// The duration of the computation of a pass outside of its visits, in seconds.
    pub other_compute_s: f64,
    /// The passes that the model makes besides this one, such as those of the encoder if `order` is
    /// that of the decoder.
    pub others: &'a [OtherPass],
}

/// Passes with another order or another duration than that of the request.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct OtherPass {
    /// The units that the pass visits, in order.
    pub order: Arc<[UnitId]>,
    /// The duration of the computation of the pass, in seconds. With `None`, each visit takes as
    /// long as one of the same unit in the pass of the request.
    pub compute_s: Option<f64>,
    /// How many of these passes there are for each pass of the request.
    pub passes: f64,
}

impl OtherPass {
    /// Returns passes with this order. There are `passes` of them for each pass of the request.
    pub fn new(order: &[UnitId], passes: f64) -> Self {
        Self { order: order.into(), compute_s: None, passes }
    }

    /// Sets [`compute_s`](Self::compute_s).
    #[must_use]
    pub fn with_compute_s(self, compute_s: f64) -> Self {
        Self { compute_s: Some(compute_s), ..self }
    }
}

impl<'a> PlanRequest<'a> {
    /// Returns a request for one pass at a time, with default rates, no limit of reading
    /// ahead, and no sets of units that are needed together.
    pub fn new(units: &'a [UnitDemand], order: &'a [UnitId], budget_bytes: usize) -> Self {
        Self {
            units,
            order,
            together: &[],
            budget_bytes,
            host_bytes: None,
            max_passes: 1,
            rates: Rates::default(),
            least_ring_bytes: 0,
            reach: usize::MAX,
            other_compute_s: 0.0,
            others: &[],
        }
    }

    /// Returns the units without those forms that an engine would have to encode: in the memory of
    /// slots, only units that are compressed on storage can be kept compressed.
    pub(crate) fn unencoded_units(&self) -> Vec<UnitDemand> {
        let on_host = self.host_bytes.is_some();
        let unencoded = |unit: &UnitDemand| {
            let compressed_bytes =
                unit.compressed_bytes.filter(|_| on_host || unit.stored_compressed);
            UnitDemand { compressed_bytes, ..unit.clone() }
        };
        self.units.iter().map(unencoded).collect()
    }

    /// Sets [`together`](Self::together).
    #[must_use]
    pub fn with_together(self, together: &'a [Vec<UnitId>]) -> Self {
        Self { together, ..self }
    }

    /// Sets [`host_bytes`](Self::host_bytes).
    #[must_use]
    pub fn with_host_bytes(self, host_bytes: Option<usize>) -> Self {
        Self { host_bytes, ..self }
    }

    /// Sets [`max_passes`](Self::max_passes).
    #[must_use]
    pub fn with_max_passes(self, max_passes: usize) -> Self {
        Self { max_passes, ..self }
    }

    /// Sets [`rates`](Self::rates).
    #[must_use]
    pub fn with_rates(self, rates: Rates) -> Self {
        Self { rates, ..self }
    }

    /// Sets [`least_ring_bytes`](Self::least_ring_bytes).
    #[must_use]
    pub fn with_least_ring_bytes(self, least_ring_bytes: usize) -> Self {
        Self { least_ring_bytes, ..self }
    }

    /// Sets [`reach`](Self::reach).
    #[must_use]
    pub fn with_reach(self, reach: usize) -> Self {
        Self { reach, ..self }
    }

    /// Sets [`other_compute_s`](Self::other_compute_s).
    #[must_use]
    pub fn with_other_compute_s(self, other_compute_s: f64) -> Self {
        Self { other_compute_s, ..self }
    }

    /// Sets [`others`](Self::others).
    #[must_use]
    pub fn with_others(self, others: &'a [OtherPass]) -> Self {
        Self { others, ..self }
    }
}

/// Whether a plan keeps a unit in memory, and how, or reads it for each visit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Residency {
    /// The unit is read once and kept in memory.
    Resident,
    /// The unit is read once, kept in memory compressed, and decoded for each visit.
    Compressed,
    /// The unit is read once, kept on the host as it is on storage, and copied to a device with its
    /// own memory for each visit.
    Host,
    /// The unit is read for each visit and evicted afterwards.
    Streamed,
}

/// The part of a pass that limits its speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bottleneck {
    /// Reading from storage.
    Storage,
    /// Decoding compressed units.
    Decoding,
    /// Copying units to a device with its own memory.
    Copying,
    /// Computation.
    Compute,
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bottleneck::Storage => "storage",
            Bottleneck::Decoding => "decoding",
            Bottleneck::Copying => "copying",
            Bottleneck::Compute => "compute",
        })
    }
}

/// The residency of each unit, and the resulting memory use and speed.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// The residency of each unit, indexed by [`UnitId`].
    pub residency: Vec<Residency>,
    /// The memory for resident units, in bytes.
    pub resident_bytes: usize,
    /// The memory for units that are kept compressed, in bytes.
    pub compressed_bytes: usize,
    /// The memory on the host for units that are kept there, in bytes. It is not part of the memory
    /// for slots.
    pub host_bytes: usize,
    /// The memory for units while they are used, in bytes, except resident ones; 0 if all units are
    /// resident.
    pub ring_bytes: usize,
    /// The size of the largest unit that is not resident, in bytes.
    pub largest_streamed_bytes: usize,
    /// The number of bytes read by each pass after the first.
    pub streamed_bytes_per_pass: u64,
    /// The predicted duration of each pass after the first, in seconds.
    pub predicted_pass_s: f64,
    /// The predicted duration of each of the [`others`](PlanRequest::others), in seconds.
    pub other_passes_s: Vec<f64>,
    /// The predicted duration of the average pass, in seconds.
    pub mean_pass_s: f64,
    /// The predicted bottleneck of each pass after the first.
    pub bottleneck: Bottleneck,
    /// The smallest budget for which a plan exists, in bytes.
    pub smallest_budget_bytes: usize,
}

impl Plan {
    /// Adds the size of buffers, in bytes, to the smallest budget of the plan.
    pub(crate) fn with_buffers(mut self, bytes: usize) -> Self {
        self.smallest_budget_bytes = self.smallest_budget_bytes.saturating_add(bytes);
        self
    }

    /// Returns the most memory for slots that the plan uses, in bytes.
    pub fn peak_bytes(&self) -> usize {
        self.resident_bytes + self.compressed_bytes + self.ring_bytes
    }

    /// Returns the duration of the average pass, plus a tiny share of it for each byte of the ring.
    /// Among equally fast plans, the plan with the smallest ring has the least cost.
    pub(crate) fn cost(&self) -> f64 {
        self.mean_pass_s * (1.0 + 1e-12 * self.ring_bytes as f64)
    }
}

/// What passes would be like with another budget.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct CurvePoint {
    /// The budget, in bytes.
    pub budget_bytes: usize,
    /// The predicted duration of each pass after the first, in seconds.
    pub predicted_pass_s: f64,
    /// The number of bytes that each pass after the first reads.
    pub streamed_bytes_per_pass: u64,
    /// The predicted bottleneck of each pass after the first.
    pub bottleneck: Bottleneck,
}

/// The budget is too small for any plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a budget of {budget_bytes} bytes is too small: the smallest budget that works is \
     {smallest_budget_bytes} bytes, of which `{largest_unit}` needs {largest_bytes} bytes at once"
)]
#[non_exhaustive]
pub struct NeverFits {
    /// The budget, in bytes.
    pub budget_bytes: usize,
    /// The name of the unit that needs the most memory. If one operation needs several units at
    /// once, their names are joined by `` ` + ` ``.
    pub largest_unit: String,
    /// The memory that `largest_unit` needs, in bytes.
    pub largest_bytes: usize,
    /// The smallest budget that works, in bytes.
    pub smallest_budget_bytes: usize,
}
