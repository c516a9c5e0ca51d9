// SPDX-License-Identifier: MIT OR Apache-2.0
//! Encodes units after they were read, to keep them in memory compressed.

use std::sync::Arc;

use ts_pool::Buffer;
use ts_streams::Device;

use crate::context::EngineContext;
use crate::encoding::{Encoded, Encoding};
use crate::plan::{Plan, Rates, Residency, UnitDemand};
use crate::prepared::PreparedUnit;
use crate::worker::Job;

use super::unit_state::Estimate;
use super::{EngineCounters, EngineState};

impl<D: Device> EngineState<D> {
    /// Encodes a unit if the plan keeps it compressed, or else estimates how much memory it would
    /// take, if the plan may need to know. Otherwise finishes its load. `host` is `None` if the
    /// load has lost its memory.
    pub(super) fn compress_or_finish(
        &mut self,
        context: &EngineContext<D>,
        load_id: u32,
        host: Option<Buffer>,
        now_ns: u64,
    ) {
        let load = self.transfers.loads.get_mut(load_id);
        let pieces = load.prepared.pieces.as_ref().filter(|_| load.error.is_none());
        let (Some(id), Some(pieces), Some(workers), false) =
            (load.id, pieces, &self.transfers.workers, load.cancelled)
        else {
            return self.upload_or_finish(context, load_id, host, now_ns);
        };
        let slot = host.expect("a load without an error still has its memory");
        let unit = &mut self.units[id];
        if unit.estimate == Estimate::Unknown && self.planning.plan.ring_bytes > 0 {
            let pieces = Arc::clone(pieces);
            return workers
                .submit(Job::Estimate { load: load_id, slot, pieces }, !unit.waiters.is_empty());
        }
        if !unit.is_on_host() || unit.image().is_some() {
            return self.upload_or_finish(context, load_id, Some(slot), now_ns);
        }
        let reserved = unit.take_image_memory();
        let image = reserved
            .or_else(|| context.allocate_image(unit.image_bytes(&context.units[id.index()])));
        let Some(image) = image else {
            return self.upload_or_finish(context, load_id, Some(slot), now_ns);
        };
        let encoding = Arc::new(Encoding::new(slot, Arc::clone(pieces), image));
        for piece in 0..pieces.len() {
            let encoding = Arc::clone(&encoding);
            workers.submit(Job::Encode { load: load_id, encoding, piece }, false);
        }
        let count = pieces.len();
        load.begin_encoding(encoding, count);
    }

    /// Adds to the input of the planner what is known about encoding units.
    pub(crate) fn add_encoded(
        &self,
        context: &EngineContext<D>,
        demands: &mut [UnitDemand],
        rates: Rates,
    ) {
        for ((unit, prepared), demand) in self.units.iter().zip(&context.units).zip(demands) {
            if prepared.pieces.is_some()
                && let Estimate::Bytes(bytes) = unit.estimate
            {
                demand.compressed_bytes = Some(bytes);
                demand.decode_s = prepared.layout.len as f64 / rates.decode_bytes_per_s;
            }
        }
    }

    /// Returns how long it takes to encode the units that a plan keeps compressed, in seconds, if
    /// the processors do nothing else. Returns `None` if there are none to encode.
    pub(crate) fn encode_s(
        &self,
        context: &EngineContext<D>,
        plan: &Plan,
        rates: Rates,
    ) -> Option<f64> {
        let encoded = |(prepared, residency): &(&Arc<PreparedUnit>, &Residency)| {
            prepared.pieces.is_some() && **residency == Residency::Compressed
        };
        let units = context.units.iter().zip(&plan.residency).filter(encoded);
        let bytes: usize = units.map(|(prepared, _)| prepared.layout.len).sum();
        let EngineCounters { encoded_bytes, encode_ns, .. } = self.counters;
        let per_byte_s = encode_ns as f64 / 1e9 / encoded_bytes.max(1) as f64;
        (bytes > 0).then(|| bytes as f64 * per_byte_s / rates.processors.max(1) as f64)
    }

    /// Handles the estimate of how much memory a unit takes when it is encoded.
    pub(crate) fn on_estimated(
        &mut self,
        context: &EngineContext<D>,
        load_id: u32,
        slot: Buffer,
        needed: usize,
        now_ns: u64,
    ) {
        let load = self.transfers.loads.get(load_id);
        let id = load.id.expect("only units are estimated");
        let estimate = Estimate::new(needed, slot.len());
        self.units[id].estimate = estimate;
        self.planning.is_outdated |= estimate != Estimate::TooMuch;
        self.upload_or_finish(context, load_id, Some(slot), now_ns);
    }

    /// Handles a piece of a unit that was encoded. After the last one, keeps the encoded unit.
    pub(crate) fn on_encoded(&mut self, context: &EngineContext<D>, load_id: u32, now_ns: u64) {
        let load = self.transfers.loads.get_mut(load_id);
        let Some(encoding) = load.end_piece() else { return };
        let encoding = Arc::into_inner(encoding).expect("all jobs have dropped it");
        let (slot, encoded) = encoding.end();
        let unit = &mut self.units[load.id.expect("only units are encoded")];
        match encoded {
            // The image may have been given up meanwhile.
            Encoded::Kept(image) if load.error.is_none() => unit.keep_image(image),
            Encoded::TooLong(needed) if load.error.is_none() => {
                unit.estimate = Estimate::new(needed, slot.len());
                unit.give_up_image();
                self.planning.is_outdated = true;
            }
            Encoded::Kept(_) | Encoded::TooLong(_) => {}
        }
        self.upload_or_finish(context, load_id, Some(slot), now_ns);
    }
}
