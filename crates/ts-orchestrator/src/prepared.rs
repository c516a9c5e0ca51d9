// SPDX-License-Identifier: MIT OR Apache-2.0
//! Units with their layout in memory.

use std::collections::HashMap;
use std::sync::Arc;

use crate::config::ComputeTimes;
use crate::encoding::Pieces;
use crate::image::ImageLayout;
use crate::layout::{ReadKind, SlotLayout, SlotRead};
use crate::plan::{Rates, UnitDemand};
use crate::stats::UnitStats;
use crate::unit::{Access, Unit, UnitId, UnitTensor};
use crate::worker::TensorCheck;

/// A unit with its layout.
#[derive(Debug)]
pub(crate) struct PreparedUnit {
    pub(crate) unit: Unit,
    pub(crate) layout: SlotLayout,
    /// The length of the layout, rounded up to whole blocks of the pool: at least one block.
    pub(crate) slot_bytes: usize,
    /// The number of bytes that a load reads.
    pub(crate) read_bytes: u64,
    /// The layout of the unit as it is on storage. `None` if it is not kept so.
    pub(crate) image: Option<Arc<ImageLayout>>,
    /// How the unit is encoded. `None` if it is never encoded.
    pub(crate) pieces: Option<Arc<Pieces>>,
    /// The checksums of the tensors that have checksums.
    pub(crate) checks: Arc<[TensorCheck]>,
}

impl PreparedUnit {
    /// Returns the number of rows of a unit of rows.
    pub(crate) fn row_count(&self) -> u64 {
        let rows = |tensor: &UnitTensor| tensor.entry.meta.shape.first().copied();
        self.unit.tensors.first().and_then(rows).unwrap_or(0)
    }

    /// Returns the unit's statistics before its first use.
    pub(crate) fn initial_stats(&self) -> UnitStats {
        UnitStats {
            name: self.unit.name.clone(),
            slot_bytes: self.slot_bytes,
            routed: self.unit.access == Access::Routed,
            ..UnitStats::default()
        }
    }

    /// Returns the input of the planner for these units.
    pub(crate) fn demands<'a>(
        units: impl IntoIterator<Item = &'a Self>,
        compute: &ComputeTimes,
        rates: Rates,
    ) -> Vec<UnitDemand> {
        let known: HashMap<UnitId, f64> = compute.units.iter().copied().collect();
        let demand = |(i, unit): (u32, &Self)| {
            unit.demand(known.get(&UnitId(i)).copied(), rates.decode_bytes_per_s)
        };
        (0u32..).zip(units).map(demand).collect()
    }

    /// Returns the input of the planner for this unit. `compute_s` is the measured duration of a
    /// visit, in seconds. If it is `None`, the duration is estimated. `decode_bytes_per_s` is the
    /// rate at which one processor decodes.
    fn demand(&self, compute_s: Option<f64>, decode_bytes_per_s: f64) -> UnitDemand {
        let decoded = |read: &SlotRead| match read.kind {
            ReadKind::Decoded { raw_len, .. } => raw_len,
            _ => 0,
        };
        let decoded_bytes: usize = self.layout.reads.iter().map(decoded).sum();
        UnitDemand {
            name: self.unit.name.clone(),
            slot_bytes: self.slot_bytes,
            read_bytes: self.read_bytes,
            compute_s: compute_s.unwrap_or_else(|| estimate_compute_s(self.slot_bytes)),
            compressed_bytes: self.image.as_ref().map(|image| image.bytes()),
            decode_s: decoded_bytes as f64 / decode_bytes_per_s,
            stored_compressed: decoded_bytes > 0,
            shared: false,
        }
    }
}

/// Estimates the duration of a visit, in seconds. Assumes a matrix-vector product, which reads each
/// weight once at the speed of memory.
fn estimate_compute_s(bytes: usize) -> f64 {
    const MEMORY_BYTES_PER_S: f64 = 10e9;
    bytes as f64 / MEMORY_BYTES_PER_S
}
