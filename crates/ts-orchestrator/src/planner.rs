// SPDX-License-Identifier: MIT OR Apache-2.0
//! The planner: decides which units are resident and which are streamed.
//!
//! The planner is a pure function of sizes, order, budget and rates. Passes scan all units in a
//! cycle, which is the worst case for least-recently-used (LRU) eviction: LRU evicts each unit just
//! before it is needed again. So a plan keeps some units in memory and streams the others through a
//! ring buffer, which is filled ahead of the computation. The planner simulates a pass for each
//! candidate ring size, and chooses the size with the fastest pass.

use std::collections::VecDeque;

use crate::plan::{Bottleneck, NeverFits, Plan, PlanRequest, Residency, UnitDemand};
use crate::unit::UnitId;

/// Returns the smallest budget, in bytes, under which `max_passes` passes can run at the same time.
///
/// Each pass needs memory for the units of its current operation: one unit, or a set of `together`.
/// With several passes it can be cheaper to make the largest units resident, so that all passes
/// share them.
///
/// # Panics
/// Panics if `together` contains the id of a unit that does not exist.
///
/// # Examples
/// ```
/// use ts_orchestrator::{UnitDemand, smallest_budget};
///
/// let units = [("embedding", 100), ("layer.0", 10), ("layer.1", 10)];
/// let units = units.map(|(name, bytes)| UnitDemand::new(name, bytes));
/// assert_eq!(smallest_budget(&units, &[], 1), 100);
/// // The embedding is resident, and each pass has memory for a layer.
/// assert_eq!(smallest_budget(&units, &[], 2), 100 + 2 * 10);
/// ```
pub fn smallest_budget(units: &[UnitDemand], together: &[Vec<UnitId>], max_passes: usize) -> usize {
    smallest(&WorkingSets::new(units, together, max_passes)).budget_bytes
}

/// The sets of units that must be in memory at the same time: each set of `together`, and each unit
/// alone.
struct WorkingSets<'a> {
    units: &'a [UnitDemand],
    all: Vec<Vec<usize>>,
    max_passes: usize,
}

impl<'a> WorkingSets<'a> {
    fn new(units: &'a [UnitDemand], together: &[Vec<UnitId>], max_passes: usize) -> Self {
        let distinct = |set: &Vec<UnitId>| {
            let mut set: Vec<usize> = set.iter().map(|id| id.index()).collect();
            set.sort_unstable();
            set.dedup();
            set
        };
        let all = together.iter().map(distinct).chain((0..units.len()).map(|i| vec![i])).collect();
        Self { units, all, max_passes: max_passes.max(1) }
    }

    /// Returns the memory that all passes need for the `streamed` members of a set, in bytes.
    fn set_bytes(&self, set: &[usize], streamed: impl Fn(usize) -> bool) -> usize {
        let sizes = set.iter().filter(|&&i| streamed(i)).map(|&i| self.units[i].slot_bytes);
        sizes.fold(0, usize::saturating_add).saturating_mul(self.max_passes)
    }

    /// Returns the smallest ring that holds the `streamed` members of every set, in bytes.
    fn ring_bytes(&self, streamed: impl Fn(usize) -> bool + Copy) -> usize {
        self.all.iter().map(|set| self.set_bytes(set, streamed)).max().unwrap_or(0)
    }

    /// Returns the names and the total size of the units in the largest set.
    fn largest(&self) -> (String, usize) {
        let bytes = |set: &[usize]| set.iter().map(|&i| self.units[i].slot_bytes).sum::<usize>();
        let Some(largest) = self.all.iter().max_by_key(|set| bytes(set)) else {
            return Default::default();
        };
        let names: Vec<&str> = largest.iter().map(|&i| self.units[i].name.as_str()).collect();
        (names.join("` + `"), bytes(largest))
    }
}

/// The smallest budget, and a plan for it.
struct SmallestPlan {
    budget_bytes: usize,
    ring_bytes: usize,
    residency: Vec<Residency>,
}

fn smallest(sets: &WorkingSets<'_>) -> SmallestPlan {
    let size = |i: usize| sets.units[i].slot_bytes;
    let count = sets.units.len();
    // Tries to make the sets that need the most memory resident, one more set at a time.
    let mut order: Vec<&Vec<usize>> = sets.all.iter().collect();
    order.sort_by_key(|set| std::cmp::Reverse(sets.set_bytes(set, |_| true)));
    // A resident unit costs its size, and saves at most its size in each pass. So with one pass at
    // a time, a resident unit never reduces the smallest budget.
    let sets_to_try = if sets.max_passes == 1 { 0 } else { order.len() };
    let ring = sets.ring_bytes(|_| true);
    let mut best = (ring, ring, 0);
    let mut kept = vec![false; count];
    let mut kept_bytes = 0usize;
    for (index, set) in order[..sets_to_try].iter().enumerate() {
        for &i in set.iter().filter(|&&i| !std::mem::replace(&mut kept[i], true)) {
            kept_bytes = kept_bytes.saturating_add(size(i));
        }
        let mut ring = 0;
        for set in &order[index + 1..] {
            if sets.set_bytes(set, |_| true) <= ring {
                break;
            }
            // The members that are already resident need no memory in the ring.
            ring = ring.max(sets.set_bytes(set, |i| !kept[i]));
        }
        best = best.min((kept_bytes.saturating_add(ring), ring, index + 1));
    }
    let (budget_bytes, ring_bytes, sets_kept) = best;
    let mut residency = vec![Residency::Streamed; count];
    for &i in order[..sets_kept].iter().copied().flatten() {
        residency[i] = Residency::Resident;
    }
    SmallestPlan { budget_bytes, ring_bytes, residency }
}

/// Returns the plan with the shortest predicted pass. Prefers plans that stream nothing or leave
/// [`least_ring_bytes`](PlanRequest::least_ring_bytes) for streamed units.
///
/// # Errors
/// Returns [`NeverFits`] if the budget is too small for any plan.
///
/// # Panics
/// Panics if the request contains the id of a unit that does not exist.
///
/// # Examples
/// ```
/// use ts_orchestrator::{PlanRequest, Residency, UnitDemand, UnitId, plan};
///
/// let units = ["a", "b", "c"].map(|name| UnitDemand::new(name, 10 << 20));
/// let order = [UnitId(0), UnitId(1), UnitId(2)];
/// let all = plan(&PlanRequest::new(&units, &order, 30 << 20))?;
/// assert!(all.residency.iter().all(|&held| held == Residency::Resident));
/// let some = plan(&PlanRequest::new(&units, &order, 20 << 20))?;
/// assert_eq!((some.resident_bytes, some.ring_bytes), (10 << 20, 10 << 20));
/// # Ok::<(), ts_orchestrator::NeverFits>(())
/// ```
pub fn plan(request: &PlanRequest<'_>) -> Result<Plan, NeverFits> {
    let sets = WorkingSets::new(request.units, request.together, request.max_passes);
    let smallest = smallest(&sets);
    if smallest.budget_bytes > request.budget_bytes {
        let (largest_unit, largest_bytes) = sets.largest();
        let budget_bytes = request.budget_bytes;
        let smallest_budget_bytes = smallest.budget_bytes;
        return Err(NeverFits { budget_bytes, largest_unit, largest_bytes, smallest_budget_bytes });
    }
    let planner = Planner::new(request, sets, smallest.budget_bytes);
    let rings = planner.ring_candidates();
    let mut candidates: Vec<Plan> =
        rings.into_iter().filter_map(|ring| planner.try_ring(ring)).collect();
    // The plan for the smallest budget also works under every larger budget, but the greedy choice
    // of `try_ring` may miss it.
    candidates.extend(planner.fill(smallest.residency, smallest.ring_bytes));
    let cheaper = |a: &&Plan, b: &&Plan| a.cost().total_cmp(&b.cost());
    let wide =
        |p: &&Plan| p.streamed_bytes_per_pass == 0 || p.ring_bytes >= request.least_ring_bytes;
    let best = candidates.iter().filter(wide).min_by(cheaper);
    let best = best.or_else(|| candidates.iter().min_by(cheaper));
    Ok(best.expect("the plan for the smallest budget is a candidate").clone())
}

/// Returns the plan with this `residency`, or `None` if the plan exceeds the budget.
///
/// # Panics
/// Panics if `residency` does not have one entry for each unit, or if the request contains the id
/// of a unit that does not exist.
pub fn predict(request: &PlanRequest<'_>, residency: &[Residency]) -> Option<Plan> {
    let sets = WorkingSets::new(request.units, request.together, request.max_passes);
    let smallest = smallest(&sets).budget_bytes;
    let planner = Planner::new(request, sets, smallest);
    let ring = request.budget_bytes.checked_sub(planner.resident_bytes(residency))?;
    planner.evaluate(residency.to_vec(), ring)
}

struct Planner<'a> {
    request: &'a PlanRequest<'a>,
    sets: WorkingSets<'a>,
    /// How many times a pass visits each unit.
    visits: Vec<u32>,
    smallest_budget_bytes: usize,
}

impl<'a> Planner<'a> {
    fn new(
        request: &'a PlanRequest<'a>,
        sets: WorkingSets<'a>,
        smallest_budget_bytes: usize,
    ) -> Self {
        let mut visits = vec![0; request.units.len()];
        for unit in request.order {
            visits[unit.index()] += 1;
        }
        Self { request, sets, visits, smallest_budget_bytes }
    }

    fn size(&self, i: usize) -> usize {
        self.request.units[i].slot_bytes
    }

    /// Returns the ring sizes to try, in bytes: 0, the whole budget, the sizes of the working sets,
    /// and larger sizes in steps of a quarter.
    fn ring_candidates(&self) -> Vec<usize> {
        let budget = self.request.budget_bytes;
        let slots = self.sets.all.iter().map(|set| self.sets.set_bytes(set, |_| true));
        let mut sizes: Vec<usize> = slots.filter(|&s| s <= budget).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut rings = vec![0];
        // Most models have few distinct sizes. If a model has many, at most 64 of them are tried.
        let step = sizes.len().div_ceil(64).max(1);
        for &size in sizes.iter().rev().step_by(step) {
            let growth = std::iter::successors(Some(size), |&s| Some(s + s.div_ceil(4)));
            rings.extend(growth.take_while(|&s| s <= budget).take(16));
        }
        rings.push(budget);
        rings.sort_unstable();
        rings.dedup();
        rings
    }

    /// Returns a plan with a ring of about `ring` bytes, or `None` if there is none. First makes
    /// units resident until the others fit into the ring. Then makes more units resident in the
    /// rest of the budget.
    fn try_ring(&self, ring: usize) -> Option<Plan> {
        let mut residency = vec![Residency::Streamed; self.request.units.len()];
        let mut room = self.request.budget_bytes - ring;
        // Makes the largest members of a set resident until the others fit.
        for set in &self.sets.all {
            let mut largest_first = set.clone();
            largest_first.sort_by_key(|&i| std::cmp::Reverse(self.size(i)));
            let mut members = largest_first.into_iter();
            while self.sets.set_bytes(set, |i| residency[i] == Residency::Streamed) > ring {
                let next = members.find(|&i| residency[i] == Residency::Streamed)?;
                room = room.checked_sub(self.size(next))?;
                residency[next] = Residency::Resident;
            }
        }
        self.fill(residency, ring)
    }

    /// Makes more units resident, in the memory that the resident units and the ring do not use.
    fn fill(&self, mut residency: Vec<Residency>, ring: usize) -> Option<Plan> {
        let mut room =
            (self.request.budget_bytes - ring).checked_sub(self.resident_bytes(&residency))?;
        // Units that save the most time per byte come first. Units that save about the same, such
        // as the layers of a model, are chosen evenly over the pass. Reading ahead works best if
        // resident and streamed units alternate.
        let streamed = |i: &usize| residency[*i] == Residency::Streamed && self.visits[*i] > 0;
        let mut order: Vec<usize> = (0..residency.len()).filter(streamed).collect();
        let spread = self.spread();
        order.sort_by_key(|&i| (std::cmp::Reverse(self.worth(i)), spread[i]));
        for i in order {
            if let Some(left) = room.checked_sub(self.size(i)) {
                residency[i] = Residency::Resident;
                room = left;
            }
        }
        self.evaluate(residency, ring)
    }

    fn resident_bytes(&self, residency: &[Residency]) -> usize {
        let kept = |i: &usize| residency[*i] == Residency::Resident;
        (0..residency.len()).filter(kept).map(|i| self.size(i)).sum()
    }

    /// Returns the time per byte that a resident unit saves, on a logarithmic scale that is rounded
    /// to steps of about a fifth.
    fn worth(&self, i: usize) -> i32 {
        let per_byte = f64::from(self.visits[i]) * self.read_s(i) / self.size(i).max(1) as f64;
        (per_byte.max(1e-30).ln() * 5.0).round() as i32
    }

    /// Returns a rank for each unit, such that for any n, the n units with the lowest ranks are
    /// spread evenly over the pass. The rank is the bit-reversed position of the unit in the order
    /// (a van der Corput sequence), or the lowest one if the unit is visited several times.
    fn spread(&self) -> Vec<u32> {
        let mut rank = vec![u32::MAX; self.request.units.len()];
        for (position, unit) in (0u32..).zip(self.request.order) {
            rank[unit.index()] = rank[unit.index()].min(position.reverse_bits());
        }
        rank
    }

    fn read_s(&self, i: usize) -> f64 {
        let rates = self.request.rates;
        rates.read_latency_s + self.request.units[i].read_bytes as f64 / rates.read_bytes_per_s
    }

    /// Returns the plan for a residency, or `None` if the ring cannot hold its streamed units.
    fn evaluate(&self, residency: Vec<Residency>, ring: usize) -> Option<Plan> {
        let streamed = |i: &usize| residency[*i] == Residency::Streamed;
        let all = 0..residency.len();
        if self.sets.ring_bytes(|i| streamed(&i)) > ring {
            return None;
        }
        let largest = all.clone().filter(streamed).map(|i| self.size(i)).max().unwrap_or(0);
        let resident_bytes = self.resident_bytes(&residency);
        let streamed_bytes = all.clone().filter(streamed).map(|i| self.size(i)).sum::<usize>();
        // The ring also gets the memory that no resident unit uses.
        let ring_bytes = (self.request.budget_bytes - resident_bytes).min(streamed_bytes);
        let read: u64 = all
            .filter(streamed)
            .map(|i| self.request.units[i].read_bytes * u64::from(self.visits[i]))
            .sum();
        let compute_s: f64 =
            self.request.order.iter().map(|u| self.request.units[u.index()].compute_s).sum();
        let predicted_pass_s = self.simulate(&residency, ring_bytes);
        let bottleneck = if predicted_pass_s > 1.05 * compute_s {
            Bottleneck::Storage
        } else {
            Bottleneck::Compute
        };
        Some(Plan {
            residency,
            resident_bytes,
            ring_bytes,
            largest_streamed_bytes: largest,
            streamed_bytes_per_pass: read,
            predicted_pass_s,
            bottleneck,
            smallest_budget_bytes: self.smallest_budget_bytes,
        })
    }

    /// Simulates passes, and returns the duration of a pass in the steady state, in seconds.
    ///
    /// One device reads streamed units in order, as soon as the ring has room. One processor
    /// computes visits in order, as soon as their unit is in memory.
    fn simulate(&self, residency: &[Residency], ring: usize) -> f64 {
        const PASSES: usize = 3;
        // The size of each unit in the ring, and the time at which it is released.
        let mut held: VecDeque<(usize, f64)> = VecDeque::new();
        let (mut held_bytes, mut room_at) = (0, 0.0f64);
        let (mut device, mut processor, mut begun) = (0.0f64, 0.0f64, 0.0f64);
        for pass in 0..PASSES {
            if pass == PASSES - 1 {
                begun = processor;
            }
            for unit in self.request.order {
                let i = unit.index();
                if residency[i] == Residency::Streamed {
                    // Units leave the ring in the order in which they came.
                    while held_bytes + self.size(i) > ring {
                        let (bytes, released) =
                            held.pop_front().expect("each streamed unit fits into the ring");
                        held_bytes -= bytes;
                        room_at = released;
                    }
                    device = device.max(room_at) + self.read_s(i);
                    processor = processor.max(device);
                    held.push_back((self.size(i), processor + self.request.units[i].compute_s));
                    held_bytes += self.size(i);
                }
                processor += self.request.units[i].compute_s;
            }
        }
        processor - begun
    }
}

#[cfg(test)]
mod tests;
