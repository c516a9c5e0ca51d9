// SPDX-License-Identifier: MIT OR Apache-2.0
//! Computes layouts, buffer sizes and the first plan, before any memory is reserved.

use std::sync::Arc;

use ts_format::ChunkPart;
use ts_io::Source;
use ts_pool::BLOCK_ALIGN;

use crate::Error;
use crate::config::EngineConfig;
use crate::layout::{ReadKind, SlotLayout};
use crate::plan::{NeverFits, Plan, PlanRequest};
use crate::planner::plan;
use crate::prepared::PreparedUnit;
use crate::row_cache::RowCache;
use crate::table::Table;
use crate::unit::{Access, PHASE_ALIGN, RangeDigest, Unit, UnitId};
use crate::unit_load::{RequestSizes, bounce_bytes, gather_bounce_bytes};
use crate::worker::{DECODER_BYTES, TensorCheck};

/// The minimum number of bounce buffers.
const LEAST_BOUNCE_COUNT: usize = 2;
/// The share of the budget for bounce buffers is the budget divided by this number. The minimum
/// number of buffers can exceed this share.
const BOUNCE_SHARE: usize = 16;

/// The sizes of everything that an engine reserves, and its first plan.
#[derive(Debug)]
pub(crate) struct Sizing {
    pub(crate) units: Vec<PreparedUnit>,
    pub(crate) order: Vec<UnitId>,
    pub(crate) requests: RequestSizes,
    /// The size of all bounce buffers together, in bytes.
    pub(crate) bounce_total: usize,
    /// The size of all decoders together, in bytes.
    pub(crate) decoder_total: usize,
    /// The size of the cached rows of tables, in bytes.
    pub(crate) row_cache_bytes: usize,
    /// The size of the staging memory, in bytes.
    pub(crate) staging_total: usize,
    /// The part of the budget that is left for slots, in bytes. A multiple of the block size.
    pub(crate) slot_budget: usize,
    /// The size of the decoders and of the minimum number of bounce buffers, in bytes. The smallest
    /// budget includes this size. 0 if units live on a device with its own memory.
    pub(crate) least_buffer_bytes: usize,
    pub(crate) overhead: Overhead,
    pub(crate) plan: Plan,
}

/// The memory that an engine reserves besides its slots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Overhead {
    /// The size of one bounce buffer, in bytes.
    bounce_bytes: usize,
    /// A bounce buffer for each read in flight and each worker.
    wanted_bounces: usize,
    decoder_total: usize,
    /// Whether units live on a device with its own memory. Its budget is for slots only.
    staged: bool,
}

impl Overhead {
    /// Returns the number of bounce buffers with this budget: all that are wanted, or as many as
    /// fit their share of the budget.
    fn bounce_count(&self, budget_bytes: usize) -> usize {
        let share = budget_bytes / BOUNCE_SHARE / self.bounce_bytes.max(1);
        share.min(self.wanted_bounces).max(LEAST_BOUNCE_COUNT)
    }

    /// Returns the part of the budget that is left for slots, in bytes. A multiple of the block
    /// size.
    fn slot_budget(
        &self,
        budget_bytes: usize,
        bounce_count: usize,
        row_cache_bytes: usize,
    ) -> usize {
        let reserved = if self.staged {
            0
        } else {
            bounce_count * self.bounce_bytes + self.decoder_total + row_cache_bytes
        };
        let left = budget_bytes.saturating_sub(reserved);
        left - left % BLOCK_ALIGN
    }

    /// Returns a budget that leaves `slot_bytes` for slots, in bytes. Less than one block below it
    /// can be enough too. A larger budget also has more bounce buffers and more cached rows.
    pub(crate) fn budget_for(&self, slot_bytes: usize, tables: &[Table]) -> usize {
        let slot_bytes = slot_bytes.next_multiple_of(BLOCK_ALIGN);
        let mut budget = slot_bytes;
        loop {
            let rows = RowCache::bytes(tables, budget);
            let left = self.slot_budget(budget, self.bounce_count(budget), rows);
            match slot_bytes.saturating_sub(left) {
                0 => return budget,
                missing => budget += missing,
            }
        }
    }
}

impl Sizing {
    /// Computes all sizes and the first plan. `staged` means that units live on a device with its
    /// own memory.
    pub(crate) fn new(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
        staged: bool,
    ) -> Result<Self, Error> {
        let order = config.order.clone();
        let order = order.unwrap_or_else(|| {
            let ordered = |id: &UnitId| units[id.index()].access == Access::Ordered;
            (0..units.len() as u32).map(UnitId).filter(ordered).collect()
        });
        let ids = order.iter().chain(config.together.iter().flatten());
        check(&units, &config.tables, ids, sources.len())?;
        let alignment =
            sources.iter().filter_map(|s| s.direct_alignment().ok()).max().unwrap_or(PHASE_ALIGN);
        let alignment = alignment.max(PHASE_ALIGN);
        let units: Vec<PreparedUnit> =
            units.into_iter().map(|unit| prepare(unit, sources, alignment)).collect();
        let requests = RequestSizes {
            request_bytes: config.request_bytes.next_multiple_of(alignment).max(alignment),
            bounce_bytes: bounce_bytes(units.iter().map(|unit| &unit.layout), alignment)
                .max(gather_bounce_bytes(&config.tables, alignment)),
            alignment,
        };
        let reads = || units.iter().flat_map(|unit| &unit.layout.reads);
        let decodes = reads().any(|read| matches!(read.kind, ReadKind::Decoded { .. }))
            || config.tables.iter().any(|table| !table.tensor().chunks.is_empty());
        let decoder_total = if decodes { config.workers.max(1) * DECODER_BYTES } else { 0 };
        let overhead = Overhead {
            bounce_bytes: requests.bounce_bytes.next_multiple_of(BLOCK_ALIGN),
            wanted_bounces: config.io.in_flight + config.workers.max(1),
            decoder_total,
            staged,
        };
        let least_buffer_bytes =
            if staged { 0 } else { LEAST_BOUNCE_COUNT * overhead.bounce_bytes + decoder_total };
        let demands: Vec<_> = units.iter().map(|unit| unit.demand(None)).collect();
        let attempt = |bounce_count: usize, row_cache_bytes: usize| {
            let slot_budget =
                overhead.slot_budget(config.budget_bytes, bounce_count, row_cache_bytes);
            let request = PlanRequest {
                units: &demands,
                order: &order,
                together: &config.together,
                budget_bytes: slot_budget,
                max_passes: config.max_passes,
                rates: config.rates,
                least_ring_bytes: config.prefetch.least_ring_bytes(slot_budget),
            };
            let plan = plan(&request).map_err(|e| NeverFits {
                budget_bytes: config.budget_bytes,
                smallest_budget_bytes: e.smallest_budget_bytes.saturating_add(least_buffer_bytes),
                ..e
            })?;
            let bounce_total = bounce_count * overhead.bounce_bytes;
            Ok::<_, NeverFits>((plan, bounce_total, row_cache_bytes, slot_budget))
        };
        // Provides only the minimum of bounce buffers, and then no memory for rows, if more would
        // leave too little memory for a plan.
        let many = overhead.bounce_count(config.budget_bytes);
        let rows = RowCache::bytes(&config.tables, config.budget_bytes);
        let (plan, bounce_total, row_cache_bytes, slot_budget) = attempt(many, rows)
            .or_else(|_| attempt(LEAST_BOUNCE_COUNT, rows))
            .or_else(|_| attempt(LEAST_BOUNCE_COUNT, 0))?;
        let mut sizes: Vec<usize> = units.iter().map(|unit| unit.slot_bytes).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let staging_total =
            if staged { sizes.iter().take(config.staging_units.max(1)).sum() } else { 0 };
        Ok(Self {
            units,
            order,
            requests,
            bounce_total,
            decoder_total,
            row_cache_bytes,
            staging_total,
            slot_budget,
            least_buffer_bytes,
            overhead,
            plan,
        })
    }
}

/// Checks that all unit ids and file indices exist, and that the chunks of each tensor match its
/// compressed parts.
fn check<'a>(
    units: &[Unit],
    tables: &[Table],
    mut ids: impl Iterator<Item = &'a UnitId>,
    sources: usize,
) -> Result<(), Error> {
    if let Some(&UnitId(unit)) = ids.find(|id| id.index() >= units.len()) {
        return Err(Error::NoSuchUnit { unit, count: units.len() });
    }
    let tensors =
        || units.iter().flat_map(|unit| &unit.tensors).chain(tables.iter().map(Table::tensor));
    for tensor in tensors() {
        for part in &tensor.entry.parts {
            if part.file.0 as usize >= sources {
                return Err(Error::NoSuchFile {
                    tensor: tensor.name.clone(),
                    file: part.file.0,
                    count: sources,
                });
            }
        }
    }
    for tensor in tensors() {
        let encoded = tensor.entry.parts.iter().filter(|part| part.is_virtual());
        let decoded = tensor.chunks.iter().map(|part| u64::from(part.len));
        let within = |part: &ChunkPart| {
            part.skip.checked_add(part.len).is_some_and(|end| end <= part.raw_len)
        };
        let sum = encoded.fold(0, |sum: u64, part| sum.saturating_add(part.len));
        if decoded.sum::<u64>() != sum || !tensor.chunks.iter().all(within) {
            return Err(Error::WrongChunks { tensor: tensor.name.clone() });
        }
    }
    Ok(())
}

pub(crate) fn prepare(unit: Unit, sources: &[Arc<Source>], alignment: usize) -> PreparedUnit {
    let layout = SlotLayout::new(&unit.tensors, alignment);
    let read_bytes = layout.read_bytes(alignment, |file| sources[file.0 as usize].len());
    let slot_bytes = layout.len.next_multiple_of(BLOCK_ALIGN).max(BLOCK_ALIGN);
    let digests = unit.tensors.iter().zip(&layout.tensors).enumerate();
    let digests = digests.filter_map(|(index, (tensor, placement))| {
        let RangeDigest { range, digest } = tensor.digest.as_ref()?;
        let lead = tensor.entry.parts.first()?.offset.checked_sub(range.offset)?;
        let begin = placement.offset.checked_sub(lead as usize)?;
        let range = begin..begin + range.len as usize;
        Some(TensorCheck { tensor: index, range, digest: Arc::clone(digest) })
    });
    let checks = digests.collect();
    PreparedUnit { unit, layout, slot_bytes, read_bytes, checks }
}
