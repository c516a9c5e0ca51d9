// SPDX-License-Identifier: MIT OR Apache-2.0
//! Computes layouts, buffer sizes and the first plan, before any memory is reserved.

use std::sync::Arc;

use ts_format::ChunkPart;
use ts_io::Source;
use ts_pool::BLOCK_ALIGN;

use crate::Error;
use crate::config::{Decoding, EngineConfig, Prefetch};
use crate::encoding::{CODER_BYTES, Pieces};
use crate::image::ImageLayout;
use crate::layout::{ReadKind, SlotLayout};
use crate::plan::{CurvePoint, NeverFits, Plan, PlanRequest, UnitDemand};
use crate::planner::plan;
use crate::prepared::PreparedUnit;
use crate::requests::RequestSizes;
use crate::row_cache::RowCache;
use crate::sharing::{Sharing, page_group};
use crate::split_decoder;
use crate::table::Table;
use crate::unit::{Access, PHASE_ALIGN, RangeDigest, Unit, UnitId};
use crate::unit_load::BounceSizes;
use crate::worker::{DECODER_BYTES, TensorCheck};

/// The number of bounce buffers that an engine has, unless the budget is too small for them.
const USUAL_BOUNCE_COUNT: usize = 2;
/// The share of the budget for bounce buffers is the budget divided by this number. The usual
/// number of buffers can exceed this share.
const BOUNCE_SHARE: usize = 16;
/// The share of the budget for decoders is the budget divided by this number. One decoder can
/// exceed this share.
const DECODER_SHARE: usize = 32;
/// The share of the budget for decoders and coders, if units are encoded, is the budget divided by
/// this number. If this is too little for one of each, units are not encoded.
const CODER_SHARE: usize = 16;

/// Where units live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    /// On a device with its own memory, and whether it decodes units.
    Device {
        decodes: bool,
    },
}

impl Place {
    /// Returns the place in previews.
    pub(crate) fn of_preview(config: &EngineConfig) -> Self {
        match config.device_memory {
            true => Self::Device { decodes: config.decoding != Decoding::OnHost },
            false => Self::Host,
        }
    }

    fn is_staged(self) -> bool {
        self != Self::Host
    }
}

/// The sizes of everything that an engine reserves, and its first plan.
#[derive(Debug)]
pub(crate) struct Sizing {
    pub(crate) units: Vec<PreparedUnit>,
    pub(crate) order: Vec<UnitId>,
    pub(crate) requests: RequestSizes,
    /// Where resident units are shared with other processes.
    pub(crate) sharing: Option<Sharing>,
    /// The size of all bounce buffers together, in bytes.
    pub(crate) bounce_total: usize,
    /// The number of threads that copy, decode and verify.
    pub(crate) workers: usize,
    /// The size of all decoders and coders together, in bytes.
    pub(crate) decoder_total: usize,
    /// The size of the cached rows of tables, in bytes.
    pub(crate) row_cache_bytes: usize,
    /// The size of the staging memory, in bytes.
    pub(crate) staging_total: usize,
    /// The memory on the host for units that are kept there, in bytes.
    pub(crate) tier_total: usize,
    /// The memory on the device for decoding units there, in bytes; 0 if the host decodes.
    pub(crate) device_decoder_total: usize,
    /// The memory on the host for what the device needs to decode units, in bytes.
    pub(crate) steps_total: usize,
    /// The part of the budget that is left for slots, in bytes. A multiple of the block size.
    pub(crate) slot_budget: usize,
    /// The size of one decoder and of the smallest bounce buffer, in bytes. The smallest budget
    /// includes this size. 0 if units live on a device with its own memory.
    pub(crate) least_buffer_bytes: usize,
    pub(crate) overhead: Overhead,
    pub(crate) plan: Plan,
}

/// What an engine reserves besides its slots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Overhead {
    /// The possible sizes of one bounce buffer.
    bounce: BounceSizes,
    /// Four bounce buffers for each read in flight and each worker: one that is in use, and others
    /// for what is read while computations occupy the processors. With two, a Llama of 1.1B from a
    /// compressed file takes 1% to 9% longer for a token.
    wanted_bounces: usize,
    wanted_workers: usize,
    /// Whether each worker needs a decoder.
    decodes: bool,
    /// Whether units may be encoded, so that each worker needs a decoder and a coder.
    encodes: bool,
    /// Whether units live on a device with its own memory. Its budget is for slots, and for
    /// decoding on the device.
    staged: bool,
    /// The length of the longest stored chunk, in bytes, if the device decodes units.
    device_chunk_bytes: Option<usize>,
}

/// How much of its overhead an engine reserves.
#[derive(Debug, Clone, Copy)]
struct Buffers {
    bounces: usize,
    /// The size of one bounce buffer, in bytes.
    bounce_bytes: usize,
    workers: usize,
    /// Whether workers also encode.
    encodes: bool,
    row_cache_bytes: usize,
    device_decoder_bytes: usize,
}

impl Overhead {
    /// Returns what an engine with this budget reserves if no units are encoded: all that is
    /// wanted, or as much as fits the shares of the budget.
    fn buffers(&self, budget_bytes: usize, row_cache_bytes: usize) -> Buffers {
        let bounce_bytes = match self.staged {
            true => self.bounce.most,
            // Smaller ones make reads smaller, so that the buffers may exceed their share here.
            false => (budget_bytes / BOUNCE_SHARE / BLOCK_ALIGN * BLOCK_ALIGN)
                .clamp(self.bounce.least, self.bounce.most),
        };
        let bounces = budget_bytes / BOUNCE_SHARE / bounce_bytes.max(1);
        let decoders =
            if self.decodes { budget_bytes / DECODER_SHARE / DECODER_BYTES } else { usize::MAX };
        Buffers {
            bounces: bounces.min(self.wanted_bounces).max(USUAL_BOUNCE_COUNT),
            bounce_bytes,
            workers: decoders.min(self.wanted_workers).max(1),
            encodes: false,
            row_cache_bytes,
            device_decoder_bytes: self
                .device_chunk_bytes
                .map_or(0, |chunk| split_decoder::memory_bytes(budget_bytes, chunk)),
        }
    }

    /// Returns what an engine reserves if units are encoded. Returns `None` if none can be encoded,
    /// or if the budget is too small for it.
    fn encoding_buffers(&self, budget_bytes: usize, row_cache_bytes: usize) -> Option<Buffers> {
        let workers = budget_bytes / CODER_SHARE / (DECODER_BYTES + CODER_BYTES);
        let buffers = self.buffers(budget_bytes, row_cache_bytes);
        let workers = workers.min(buffers.workers);
        (self.encodes && workers > 0).then_some(Buffers { workers, encodes: true, ..buffers })
    }

    /// Returns the least that an engine can reserve.
    fn least_buffers(&self) -> Buffers {
        let workers = if self.decodes { 1 } else { self.wanted_workers };
        Buffers {
            bounces: 1,
            bounce_bytes: if self.staged { self.bounce.most } else { self.bounce.least },
            workers,
            encodes: false,
            row_cache_bytes: 0,
            device_decoder_bytes: 0,
        }
    }

    fn decoder_total(&self, buffers: Buffers) -> usize {
        let decoder = if self.decodes || buffers.encodes { DECODER_BYTES } else { 0 };
        let coder = if buffers.encodes { CODER_BYTES } else { 0 };
        buffers.workers * (decoder + coder)
    }

    /// Returns how much of the budget the buffers take, in bytes.
    fn bytes(&self, buffers: Buffers) -> usize {
        if self.staged {
            return buffers.device_decoder_bytes;
        }
        buffers.bounces * buffers.bounce_bytes
            + self.decoder_total(buffers)
            + buffers.row_cache_bytes
    }

    /// Returns the part of the budget that is left for slots, in bytes. A multiple of the block
    /// size.
    fn slot_budget(&self, budget_bytes: usize, buffers: Buffers) -> usize {
        let left = budget_bytes.saturating_sub(self.bytes(buffers));
        left - left % BLOCK_ALIGN
    }

    /// Returns the size of one decoder and of the smallest bounce buffer, in bytes.
    fn least_bytes(&self) -> usize {
        self.bytes(self.least_buffers())
    }

    /// Returns the plan for a budget, and what to reserve besides its slots. Reserves only the
    /// minimum, and then no memory for rows, if more would leave too little memory for a plan.
    ///
    /// The memory for slots in `request` does not matter.
    fn plan(
        &self,
        request: PlanRequest<'_>,
        tables: &[Table],
        prefetch: Prefetch,
        budget_bytes: usize,
    ) -> Result<(Plan, Buffers), NeverFits> {
        // Without coders, only units that are compressed on storage can be kept compressed.
        let unencoded = request.unencoded_units();
        let attempt = |buffers: Buffers| {
            let slot_budget = self.slot_budget(budget_bytes, buffers);
            let least_ring_bytes = prefetch.least_ring_bytes(slot_budget);
            let units = if buffers.encodes { request.units } else { &unencoded[..] };
            let request =
                PlanRequest { units, budget_bytes: slot_budget, least_ring_bytes, ..request };
            let plan = plan(&request);
            let smallest =
                |e: &NeverFits| e.smallest_budget_bytes.saturating_add(self.least_bytes());
            plan.map(|plan| (plan, buffers)).map_err(|e| NeverFits {
                budget_bytes,
                smallest_budget_bytes: smallest(&e),
                ..e
            })
        };
        let rows = RowCache::bytes(tables, budget_bytes);
        let usual = attempt(self.buffers(budget_bytes, rows));
        let streams = |(plan, _): &(Plan, Buffers)| plan.ring_bytes > 0;
        // A model that fits now may have to stream once the limit falls.
        if let Ok(usual) = &usual
            && let Some(buffers) = self.encoding_buffers(budget_bytes, rows)
            && let Ok(encoding) = attempt(buffers)
            && (streams(usual) || !streams(&encoding))
        {
            return Ok(encoding);
        }
        // Nothing has to be decoded on a device on which everything stays.
        if let Ok(usual) = &usual
            && usual.1.device_decoder_bytes > 0
            && streams(usual)
            && let Ok(without) = attempt(Buffers { device_decoder_bytes: 0, ..usual.1 })
            && !streams(&without)
        {
            return Ok(without);
        }
        usual
            .or_else(|_| attempt(Buffers { row_cache_bytes: rows, ..self.least_buffers() }))
            .or_else(|_| attempt(self.least_buffers()))
    }

    /// Returns what passes would be like with each of these budgets, in bytes, except those that
    /// are too small.
    pub(crate) fn curve(
        &self,
        request: PlanRequest<'_>,
        tables: &[Table],
        prefetch: Prefetch,
        budgets: &[usize],
    ) -> Vec<CurvePoint> {
        let point = |&budget_bytes: &usize| {
            let (plan, _) = self.plan(request, tables, prefetch, budget_bytes).ok()?;
            Some(CurvePoint {
                budget_bytes,
                predicted_pass_s: plan.predicted_pass_s,
                streamed_bytes_per_pass: plan.streamed_bytes_per_pass,
                bottleneck: plan.bottleneck,
            })
        };
        budgets.iter().filter_map(point).collect()
    }

    /// Returns a budget that leaves `slot_bytes` for slots, in bytes. Less than one block below it
    /// can be enough too. A larger budget also has more buffers and more cached rows.
    pub(crate) fn budget_for(&self, slot_bytes: usize, tables: &[Table]) -> usize {
        let slot_bytes = slot_bytes.next_multiple_of(BLOCK_ALIGN);
        let mut budget = slot_bytes;
        loop {
            let buffers = self.buffers(budget, RowCache::bytes(tables, budget));
            match slot_bytes.saturating_sub(self.slot_budget(budget, buffers)) {
                0 => return budget,
                missing => budget += missing,
            }
        }
    }
}

impl Sizing {
    /// Computes all sizes and the first plan.
    pub(crate) fn new(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
        place: Place,
    ) -> Result<Self, Error> {
        let staged = place.is_staged();
        let Preparation { units, order, requests, overhead } =
            Preparation::new(units, sources, config, place)?;
        let mut units = units;
        let mut demands = PreparedUnit::demands(&units, &config.compute, config.rates);
        let store = config.shared_pages.clone().filter(|_| !staged);
        let sharing = store.and_then(|store| Sharing::new(store, &units, sources));
        if let Some(sharing) = &sharing {
            sharing.mark(&mut demands);
        }
        let images = units.iter().filter_map(|unit| unit.image.as_ref());
        let images: usize = images.map(|image| image.bytes()).sum();
        let steps_total = match overhead.buffers(config.budget_bytes, 0).device_decoder_bytes {
            0 => 0,
            _ => split_decoder::steps_bytes(config.host_bytes),
        };
        let tier_total = if staged { (config.host_bytes - steps_total).min(images) } else { 0 };
        let tier_total = tier_total - tier_total % BLOCK_ALIGN;
        let request =
            config.plan_request(&demands, &order).with_host_bytes(staged.then_some(tier_total));
        let (plan, buffers) =
            overhead.plan(request, &config.tables, config.prefetch, config.budget_bytes)?;
        let slot_budget = overhead.slot_budget(config.budget_bytes, buffers);
        if !buffers.encodes {
            units.iter_mut().for_each(|unit| unit.pieces = None);
        }
        let requests = RequestSizes { bounce_bytes: buffers.bounce_bytes, ..requests };
        if buffers.bounce_bytes != overhead.bounce.most {
            // The reads that fill images go through bounce buffers.
            for unit in units.iter_mut().filter(|unit| unit.image.is_some()) {
                unit.image = ImageLayout::new(&unit.layout, requests).map(Arc::new);
            }
        }
        let mut sizes: Vec<usize> = units.iter().map(|unit| unit.slot_bytes).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let staging_total =
            if staged { sizes.iter().take(config.staging_units.max(1)).sum() } else { 0 };
        Ok(Self {
            units,
            order,
            requests,
            sharing,
            bounce_total: buffers.bounces * buffers.bounce_bytes,
            workers: buffers.workers,
            decoder_total: overhead.decoder_total(buffers),
            row_cache_bytes: buffers.row_cache_bytes,
            staging_total,
            tier_total,
            device_decoder_total: buffers.device_decoder_bytes,
            steps_total,
            slot_budget,
            least_buffer_bytes: overhead.least_bytes(),
            overhead,
            plan,
        })
    }
}

/// Units with their layouts, and the sizes that do not depend on the budget.
#[derive(Debug)]
pub(crate) struct Preparation {
    pub(crate) units: Vec<PreparedUnit>,
    pub(crate) order: Vec<UnitId>,
    pub(crate) requests: RequestSizes,
    pub(crate) overhead: Overhead,
}

impl Preparation {
    pub(crate) fn new(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
        place: Place,
    ) -> Result<Self, Error> {
        let staged = place.is_staged();
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
        let on_host = staged && config.host_bytes > 0;
        let gather = BounceSizes::of_rows(&config.tables, config.row_reads, alignment);
        let layouts = units.iter().map(|unit| &unit.layout);
        let bounce = BounceSizes::new(layouts, alignment, on_host).with(gather);
        let requests = RequestSizes {
            request_bytes: config.request_bytes.next_multiple_of(alignment).max(alignment),
            bounce_bytes: bounce.most,
            alignment,
        };
        let reads = || units.iter().flat_map(|unit| &unit.layout.reads);
        let decodes = reads().any(|read| matches!(read.kind, ReadKind::Decoded { .. }))
            || config.tables.iter().any(|table| !table.tensor().chunks.is_empty());
        let mut units = units;
        for unit in units.iter_mut().filter(|own| on_host && own.unit.access == Access::Ordered) {
            unit.image = Some(Arc::new(ImageLayout::on_host(&unit.layout, requests)));
        }
        if config.keep_compressed && !staged {
            for unit in units.iter_mut().filter(|unit| unit.unit.access == Access::Ordered) {
                unit.image = ImageLayout::new(&unit.layout, requests).map(Arc::new);
                // What this process encodes could not be shared.
                if config.shared_pages.is_none() || page_group(sources).is_none() {
                    unit.pieces = Pieces::new(&unit.unit.tensors, &unit.layout);
                }
            }
        }
        let overhead = Overhead {
            bounce,
            wanted_bounces: 4 * (config.io.in_flight + config.workers.max(1)),
            wanted_workers: config.workers.max(1),
            decodes,
            encodes: units.iter().any(|unit| unit.pieces.is_some()),
            staged,
            device_chunk_bytes: match place {
                Place::Device { decodes: true } => longest_chunk(&units),
                _ => None,
            },
        };
        Ok(Self { units, order, requests, overhead })
    }
}

/// Budgets for units, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Requirement {
    /// The smallest budget that works.
    pub smallest: usize,
    /// The smallest budget with which no unit is streamed.
    pub whole: usize,
}

impl Requirement {
    /// Computes the budgets for units. See [`Engine::requirement`](crate::Engine::requirement).
    pub(crate) fn new(
        units: Vec<Unit>,
        sources: &[Arc<Source>],
        config: &EngineConfig,
        any_phase: bool,
    ) -> Result<Self, Error> {
        let place = Place::of_preview(config);
        let Preparation { units, order, overhead, requests, .. } =
            Preparation::new(units, sources, config, place)?;
        let mut demands = PreparedUnit::demands(&units, &config.compute, config.rates);
        let host = place.is_staged().then_some(0);
        let budget = |overhead: Overhead, demands: &[UnitDemand], budget_bytes| {
            let request = config.plan_request(demands, &order).with_host_bytes(host);
            let plan = overhead.plan(request, &config.tables, config.prefetch, budget_bytes);
            plan.map(|(plan, _)| plan.peak_bytes()).unwrap_or_else(|e| e.smallest_budget_bytes)
        };
        let whole = budget(overhead, &demands, usize::MAX >> 1);
        let mut overhead = overhead;
        if any_phase {
            for (demand, unit) in demands.iter_mut().zip(&units) {
                let len = SlotLayout::largest(&unit.unit.tensors, requests.alignment);
                demand.slot_bytes = len.next_multiple_of(BLOCK_ALIGN).max(demand.slot_bytes);
            }
            let copied = BounceSizes { least: requests.alignment, most: requests.alignment };
            overhead.bounce = overhead.bounce.with(copied);
        }
        let smallest = budget(overhead, &demands, 0);
        Ok(Self { smallest, whole: whole.max(smallest) })
    }
}

/// Returns the length of the longest stored chunk of units that a device may decode, in bytes.
fn longest_chunk(units: &[PreparedUnit]) -> Option<usize> {
    let images = units.iter().filter_map(|unit| unit.image.as_ref());
    let images = images.filter(|image| !image.is_slot && split_decoder::may_decode(image));
    let parts = images.flat_map(|image| &image.parts).map(|part| part.read);
    let chunks = parts.filter(|read| matches!(read.kind, ReadKind::Decoded { .. }));
    chunks.map(|read| read.required).max()
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
    PreparedUnit { unit, layout, slot_bytes, read_bytes, image: None, pieces: None, checks }
}
