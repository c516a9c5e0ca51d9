// SPDX-License-Identifier: MIT OR Apache-2.0
//! Predicts how long passes take with a plan, by simulating reads and visits.

use crate::joint::batch_bytes;
use crate::plan::{Bottleneck, OtherPass, Plan, PlanRequest, Residency, UnitDemand};
use crate::unit::UnitId;
use std::collections::VecDeque;

use super::Planner;

impl Planner<'_> {
    /// Returns the processor time to decode a unit for a visit, in seconds.
    pub(super) fn decode_s(&self, i: usize, residency: Residency) -> f64 {
        let unit = &self.request.units[i];
        match residency {
            Residency::Compressed => unit.decode_s,
            Residency::Streamed | Residency::Host if unit.stored_compressed => unit.decode_s,
            _ => 0.0,
        }
    }

    /// Returns the duration of copying a unit to a device with its own memory, in seconds.
    pub(super) fn copy_s(&self, i: usize) -> f64 {
        let on_device = self.request.host_bytes.is_some();
        if on_device { self.size(i) as f64 / self.request.rates.copy_bytes_per_s } else { 0.0 }
    }

    pub(super) fn read_s(&self, i: usize) -> f64 {
        let rates = self.request.rates;
        let bytes = self.request.units[i].read_bytes as f64;
        rates.read_latency_s * self.requests[i] + bytes / rates.read_bytes_per_s
    }

    /// Returns the duration of reading a unit into a ring, in seconds. A small ring has room for
    /// few neighbours at a time.
    fn read_into_s(&self, i: usize, ring: usize) -> f64 {
        let rates = self.request.rates;
        let bytes = self.request.units[i].read_bytes as f64;
        let share = (bytes / batch_bytes(ring).max(1) as f64).clamp(self.requests[i], 1.0);
        rates.read_latency_s * share + bytes / rates.read_bytes_per_s
    }

    /// Returns the plan for a residency, or `None` if the ring cannot hold the other units.
    pub(super) fn evaluate(&self, residency: Vec<Residency>, ring: usize) -> Option<Plan> {
        let in_ring = |i: &usize| residency[*i] != Residency::Resident;
        let all = 0..residency.len();
        let host_bytes = self.kept_bytes(&residency, Residency::Host);
        if self.sets.ring_bytes(|i| in_ring(&i)) > ring
            || host_bytes > self.request.host_bytes.unwrap_or(0)
        {
            return None;
        }
        let largest = all.clone().filter(in_ring).map(|i| self.size(i)).max().unwrap_or(0);
        let [resident_bytes, compressed_bytes] = [Residency::Resident, Residency::Compressed]
            .map(|kind| self.kept_bytes(&residency, kind));
        let in_ring_bytes = all.clone().filter(in_ring).map(|i| self.size(i)).sum::<usize>();
        // The ring also gets the memory that no kept unit uses.
        let ring_bytes =
            (self.request.budget_bytes - resident_bytes - compressed_bytes).min(in_ring_bytes);
        let predicted = self.passes.iter().map(|pass| self.predict(pass, &residency, ring_bytes));
        let predicted: Vec<PassPrediction> = predicted.collect();
        let own = &predicted[0];
        let (mut mean_pass_s, mut passes) = (0.0, 0.0);
        for (pass, predicted) in self.passes.iter().zip(&predicted) {
            mean_pass_s += pass.passes * predicted.pass_s;
            passes += pass.passes;
        }
        mean_pass_s /= passes;
        let bottleneck = if own.pass_s <= 1.05 * own.compute_s {
            Bottleneck::Compute
        } else if own.pass_s <= 1.05 * own.processors_s {
            Bottleneck::Decoding
        } else if own.pass_s <= 1.05 * own.copy_s {
            Bottleneck::Copying
        } else {
            Bottleneck::Storage
        };
        Some(Plan {
            residency,
            resident_bytes,
            compressed_bytes,
            host_bytes,
            ring_bytes,
            largest_streamed_bytes: largest,
            streamed_bytes_per_pass: own.read_bytes,
            predicted_pass_s: own.pass_s,
            other_passes_s: predicted[1..].iter().map(|other| other.pass_s).collect(),
            mean_pass_s,
            bottleneck,
            smallest_budget_bytes: self.smallest_budget_bytes,
        })
    }

    /// Predicts a pass with this residency and ring.
    fn predict(
        &self,
        pass: &PassDemand<'_>,
        residency: &[Residency],
        ring: usize,
    ) -> PassPrediction {
        let (mut compute_s, mut decode_s, mut copy_s, mut read_bytes) = (0.0, 0.0, 0.0, 0);
        for unit in pass.order {
            let i = unit.index();
            compute_s += pass.compute_s(&self.request.units[i]);
            decode_s += self.decode_s(i, residency[i]);
            if residency[i] == Residency::Streamed {
                read_bytes += self.request.units[i].read_bytes;
            }
            if residency[i] != Residency::Resident {
                copy_s += self.copy_s(i);
            }
        }
        // The computation uses all processors, so decoding and reading take time from it.
        let rates = self.request.rates;
        let other_s = decode_s + read_bytes as f64 / rates.read_bytes_per_processor_s;
        let processors_s = compute_s + other_s / rates.processors.max(1) as f64;
        let pass_s = self.simulate(pass, residency, ring).max(processors_s);
        PassPrediction { pass_s, compute_s, processors_s, copy_s, read_bytes }
    }

    /// Simulates passes, and returns the duration of a pass in the steady state, in seconds.
    ///
    /// Storage reads streamed units in order, as soon as the ring has room and the computation is
    /// near enough. The processors decode units in order. They are then copied in order if slots
    /// are on a device with its own memory. Visits are computed in order, as soon as their unit is
    /// there. Decoding and computing do not slow each other down here, and neither does copying on
    /// the host.
    fn simulate(&self, pass: &PassDemand<'_>, residency: &[Residency], ring: usize) -> f64 {
        const PASSES: usize = 3;
        let processors = self.request.rates.processors.max(1) as f64;
        // The size of each unit in the ring, and the time at which it is released.
        let mut held: VecDeque<(usize, f64)> = VecDeque::new();
        let (mut held_bytes, mut room_at) = (0, 0.0f64);
        let (mut storage, mut decoder, mut copier) = (0.0f64, 0.0f64, 0.0f64);
        let (mut compute, mut begun) = (0.0f64, 0.0f64);
        // The times at which the last visits asked for their unit, at most `reach` of them.
        let mut recent: VecDeque<f64> = VecDeque::new();
        let reach = self.request.reach.min(PASSES * pass.order.len());
        for round in 0..PASSES {
            if round == PASSES - 1 {
                begun = compute;
            }
            for unit in pass.order {
                let i = unit.index();
                let compute_s = pass.compute_s(&self.request.units[i]);
                let near = match reach {
                    0 => compute,
                    _ if recent.len() < reach => 0.0,
                    _ => recent.pop_front().expect("the reach is not 0"),
                };
                recent.push_back(compute);
                if residency[i] != Residency::Resident {
                    // Units leave the ring in the order in which they came.
                    while held_bytes + self.size(i) > ring {
                        let (bytes, released) =
                            held.pop_front().expect("each unit fits into the ring");
                        held_bytes -= bytes;
                        room_at = released;
                    }
                    let mut ready = room_at.max(near);
                    if residency[i] == Residency::Streamed {
                        storage = storage.max(ready) + self.read_into_s(i, ring);
                        ready = storage;
                    }
                    let decode_s = self.decode_s(i, residency[i]);
                    if decode_s > 0.0 {
                        decoder = decoder.max(ready) + decode_s / processors;
                        ready = decoder;
                    }
                    let copy_s = self.copy_s(i);
                    if copy_s > 0.0 {
                        copier = copier.max(ready) + copy_s;
                        ready = copier;
                    }
                    compute = compute.max(ready);
                    held.push_back((self.size(i), compute + compute_s));
                    held_bytes += self.size(i);
                }
                compute += compute_s;
            }
        }
        compute - begun
    }
}

/// Divides an order into groups of units that have at most `group_bytes` bytes or are a single one.
pub(super) fn groups<'a>(
    order: &'a [UnitId],
    units: &'a [UnitDemand],
    group_bytes: u64,
) -> impl Iterator<Item = &'a [UnitId]> {
    let mut rest = order;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |id: &&UnitId| {
            bytes += units[id.index()].read_bytes;
            bytes <= group_bytes
        };
        let count = rest.iter().take_while(fits).count().max(1);
        let group;
        (group, rest) = rest.split_at_checked(count)?;
        Some(group)
    })
}

/// A pass to predict.
pub(super) struct PassDemand<'a> {
    pub(super) order: &'a [UnitId],
    /// The computation of a visit is this many times that of the unit.
    scale: f64,
    /// The duration of the computation that each visit has besides, in seconds.
    each_s: f64,
    /// How many of these passes there are for each pass of the request.
    pub(super) passes: f64,
}

impl<'a> PassDemand<'a> {
    pub(super) fn main(request: &'a PlanRequest<'a>) -> Self {
        let each_s = request.other_compute_s / request.order.len().max(1) as f64;
        Self { order: request.order, scale: 1.0, each_s, passes: 1.0 }
    }

    pub(super) fn other(other: &'a OtherPass, units: &[UnitDemand]) -> Self {
        let usual_s: f64 = other.order.iter().map(|id| units[id.index()].compute_s).sum();
        let (scale, each_s) = match other.compute_s {
            None => (1.0, 0.0),
            Some(compute_s) if usual_s > 0.0 => (compute_s / usual_s, 0.0),
            Some(compute_s) => (1.0, compute_s / other.order.len().max(1) as f64),
        };
        Self { order: &other.order, scale, each_s, passes: other.passes }
    }

    /// Returns the duration of the computation of a visit, in seconds.
    fn compute_s(&self, unit: &UnitDemand) -> f64 {
        self.scale * unit.compute_s + self.each_s
    }
}

/// What a pass is predicted to take.
struct PassPrediction {
    pass_s: f64,
    compute_s: f64,
    /// The time that all processors need together, in seconds.
    processors_s: f64,
    /// The time that copying to a device needs, in seconds.
    copy_s: f64,
    read_bytes: u64,
}
