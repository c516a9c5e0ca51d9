// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is settled before an engine takes its first byte of memory: layouts, bounce buffers, the
//! first plan.

use std::sync::Arc;

use ts_format::ChunkPart;
use ts_io::Source;
use ts_pool::BLOCK_ALIGN;

use crate::Error;
use crate::engine::EngineConfig;
use crate::layout::{Fill, SlotLayout};
use crate::load::{Cut, bounce_bytes};
use crate::plan::{NeverFits, Plan, PlanRequest, plan};
use crate::state::{Prepared, demand_of};
use crate::unit::{PHASE_ALIGN, Unit, UnitId};
use crate::worker::{Check, DECODER_BYTES};

/// Buffers for reads that are only copied to their place.
const BOUNCE_COUNT: usize = 2;
/// The share of the budget, one part in so many, that buffers for compressed chunks may take beyond
/// that.
const BOUNCE_SHARE: usize = 16;

#[derive(Debug)]
pub(crate) struct Design {
    pub(crate) units: Vec<Prepared>,
    pub(crate) order: Vec<UnitId>,
    pub(crate) cut: Cut,
    /// Memory for all bounce buffers,
    pub(crate) bounce_total: usize,
    /// and for what workers decode with.
    pub(crate) scratch_total: usize,
    /// Memory of the host by way of which units go to their device.
    pub(crate) staging_total: usize,
    /// What the budget leaves for slots, in whole blocks.
    pub(crate) slot_budget: usize,
    pub(crate) plan: Plan,
}

impl Design {
    pub(crate) fn new(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
        staged: bool,
    ) -> Result<Self, Error> {
        let order = config.order.clone();
        let order = order.unwrap_or_else(|| (0..units.len() as u32).map(UnitId).collect());
        check(&units, order.iter().chain(config.together.iter().flatten()), sources.len())?;
        let alignment =
            sources.iter().filter_map(|s| s.direct_alignment().ok()).max().unwrap_or(PHASE_ALIGN);
        let alignment = alignment.max(PHASE_ALIGN);
        let units: Vec<Prepared> = units.into_iter().map(|unit| prepare(unit, alignment)).collect();
        let cut = Cut {
            request_bytes: config.request_bytes.next_multiple_of(alignment).max(alignment),
            bounce_bytes: bounce_bytes(units.iter().map(|unit| &unit.layout), alignment),
            alignment,
        };
        let bounce_bytes = cut.bounce_bytes.next_multiple_of(BLOCK_ALIGN);
        let reads = || units.iter().flat_map(|unit| &unit.layout.reads);
        let decodes = reads().any(|read| matches!(read.fill, Fill::Decoded { .. }));
        let scratch_total = if decodes { config.workers.max(1) * DECODER_BYTES } else { 0 };
        let demands: Vec<_> = units.iter().map(demand_of).collect();
        let attempt = |bounce_count: usize| {
            let bounce_total = bounce_count * bounce_bytes;
            // Of a budget for a device all is for slots.
            let aside = if staged { 0 } else { bounce_total + scratch_total };
            let left = config.budget_bytes.saturating_sub(aside);
            let slot_budget = left - left % BLOCK_ALIGN;
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
                smallest_budget_bytes: e.smallest_budget_bytes.saturating_add(aside),
                ..e
            })?;
            Ok::<_, NeverFits>((plan, bounce_total, slot_budget))
        };
        // Chunks are small: as many as are read at once, and one for each worker, if they leave
        // room for the rest.
        let many = if decodes {
            let share = config.budget_bytes / BOUNCE_SHARE / bounce_bytes;
            share.min(config.io.in_flight + config.workers.max(1)).max(BOUNCE_COUNT)
        } else {
            BOUNCE_COUNT
        };
        let (plan, bounce_total, slot_budget) = attempt(many).or_else(|_| attempt(BOUNCE_COUNT))?;
        let mut sizes: Vec<usize> = units.iter().map(|unit| unit.slot_bytes).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let staging_total =
            if staged { sizes.iter().take(config.staging_units.max(1)).sum() } else { 0 };
        Ok(Self {
            units,
            order,
            cut,
            bounce_total,
            scratch_total,
            staging_total,
            slot_budget,
            plan,
        })
    }
}

fn check<'a>(
    units: &[Unit],
    mut ids: impl Iterator<Item = &'a UnitId>,
    sources: usize,
) -> Result<(), Error> {
    if let Some(&UnitId(unit)) = ids.find(|id| id.index() >= units.len()) {
        return Err(Error::NoSuchUnit { unit, count: units.len() });
    }
    for tensor in units.iter().flat_map(|unit| &unit.tensors) {
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
    for tensor in units.iter().flat_map(|unit| &unit.tensors) {
        let encoded = tensor.entry.parts.iter().filter(|part| part.is_encoded());
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

fn prepare(unit: Unit, alignment: usize) -> Prepared {
    let layout = SlotLayout::new(&unit.tensors, alignment);
    let slot_bytes = layout.len.next_multiple_of(BLOCK_ALIGN).max(BLOCK_ALIGN);
    let digests = unit.tensors.iter().zip(&layout.tensors).enumerate();
    let digests = digests.filter_map(|(index, (tensor, place))| {
        let digest = Arc::clone(tensor.digest.as_ref()?);
        Some(Check { tensor: index, range: place.offset..place.offset + place.len, digest })
    });
    let checks = digests.collect();
    Prepared { unit, layout, slot_bytes, checks }
}
