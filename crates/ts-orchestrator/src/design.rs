// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is settled before an engine takes its first byte of memory: layouts, bounce buffers, the first plan.

use std::sync::Arc;

use ts_io::Source;
use ts_pool::BLOCK_ALIGN;

use crate::Error;
use crate::engine::EngineConfig;
use crate::layout::SlotLayout;
use crate::load::{Cut, bounce_bytes};
use crate::plan::{NeverFits, Plan, PlanRequest, plan};
use crate::state::{Prepared, demand_of};
use crate::unit::{PHASE_ALIGN, Unit, UnitId};
use crate::worker::Check;

/// Buffers for reads that cannot go straight to their place.
const BOUNCE_COUNT: usize = 2;

#[derive(Debug)]
pub(crate) struct Design {
    pub(crate) units: Vec<Prepared>,
    pub(crate) order: Vec<UnitId>,
    pub(crate) cut: Cut,
    /// Memory for all bounce buffers.
    pub(crate) bounce_total: usize,
    /// What the budget leaves for slots, in whole blocks.
    pub(crate) slot_budget: usize,
    pub(crate) plan: Plan,
}

impl Design {
    pub(crate) fn new(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
    ) -> Result<Self, Error> {
        let order = config.order.clone();
        let order = order.unwrap_or_else(|| (0..units.len() as u32).map(UnitId).collect());
        check(&units, &order, sources.len())?;
        let alignment = sources.iter().filter_map(|s| s.direct_alignment().ok()).max().unwrap_or(PHASE_ALIGN);
        let alignment = alignment.max(PHASE_ALIGN);
        let units: Vec<Prepared> = units.into_iter().map(|unit| prepare(unit, alignment)).collect();
        let cut = Cut {
            request_bytes: config.request_bytes.next_multiple_of(alignment).max(alignment),
            bounce_bytes: bounce_bytes(units.iter().map(|unit| &unit.layout), alignment),
            alignment,
        };
        let bounce_total = BOUNCE_COUNT * cut.bounce_bytes.next_multiple_of(BLOCK_ALIGN);
        let left = config.budget_bytes.saturating_sub(bounce_total);
        let slot_budget = left - left % BLOCK_ALIGN;
        let demands: Vec<_> = units.iter().map(demand_of).collect();
        let request = PlanRequest {
            units: &demands,
            order: &order,
            budget_bytes: slot_budget,
            max_passes: config.max_passes,
            rates: config.rates,
            least_ring_bytes: config.prefetch.least_ring_bytes(slot_budget),
        };
        let plan = plan(&request).map_err(|e| NeverFits {
            budget_bytes: config.budget_bytes,
            smallest_budget_bytes: e.smallest_budget_bytes.saturating_add(bounce_total),
            ..e
        })?;
        Ok(Self { units, order, cut, bounce_total, slot_budget, plan })
    }
}

fn check(units: &[Unit], order: &[UnitId], sources: usize) -> Result<(), Error> {
    if let Some(&UnitId(unit)) = order.iter().find(|id| id.index() >= units.len()) {
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
