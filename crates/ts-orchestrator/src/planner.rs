// SPDX-License-Identifier: MIT OR Apache-2.0
//! The planner: decides which units are resident and which are streamed.
//!
//! The planner is a pure function of sizes, order, budget and rates. Passes scan all units in a
//! cycle, which is the worst case for least-recently-used (LRU) eviction: LRU evicts each unit just
//! before it is needed again. So a plan keeps some units in memory and streams the others through a
//! ring buffer, which is filled ahead of the computation.
//!
//! A unit that is kept compressed takes less memory, but time of the processors for each visit. So
//! the best use of memory depends on what is short, storage or processors: for each of several
//! weights of the two, the planner gives memory to the units that save the most per byte. It
//! simulates a pass for each choice and each candidate ring size, and takes the fastest.
//!
//! For a device with its own memory, units are kept on the device, or on the host, which has a
//! budget of its own. For each visit, a unit that is not on the device is copied to it.

mod prediction;

use crate::joint::JOINT_BYTES;
use crate::plan::{NeverFits, Plan, PlanRequest, Residency, UnitDemand};
use crate::unit::UnitId;

use prediction::{PassDemand, groups};

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

/// Returns the plan with the shortest predicted pass. Prefers plans that stream nothing, or leave
/// [`least_ring_bytes`](PlanRequest::least_ring_bytes) for streamed units, and with a
/// [`reach`](PlanRequest::reach) of 1 memory for the next unit at each visit.
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
    let storage_is_short = Preference::STORAGE_IS_SHORT;
    // The plan for the smallest budget also works under every larger budget, but the greedy choice
    // of `try_ring` may miss it.
    let steps = planner.steps(storage_is_short);
    let works = planner.fill(smallest.residency, smallest.ring_bytes, &steps);
    let mut best = works.expect("the smallest plan keeps the budget");
    if request.units.len() <= EXHAUSTIVE_UNITS {
        planner.all_plans().into_iter().for_each(|plan| planner.improve(&mut best, plan));
    }
    planner.best_ring(&steps, &mut best);
    if request.units.iter().all(|unit| unit.compressed_bytes.is_none()) {
        return Ok(best);
    }
    // Where units are read, decoded or neither in turn, a larger ring evens this out.
    let none = Preference { compressible: 0.0, ..storage_is_short };
    let ring = planner.best_ring(&planner.steps(none), &mut best);
    let rings = [1, 2, 8].map(|times| ring.saturating_mul(times).min(request.budget_bytes));
    let mut attempt = |preference: Preference| {
        let steps = planner.steps(preference);
        let plans = rings.iter().filter_map(|&ring| planner.try_ring(ring, &steps));
        let cost = |plan: Plan| {
            let cost = plan.cost();
            planner.improve(&mut best, plan);
            cost
        };
        plans.map(cost).fold(f64::INFINITY, f64::min)
    };
    if request.host_bytes.is_some() {
        attempt(Preference { host_first: true, ..storage_is_short });
    }
    for tenths in [0, 3, 6] {
        attempt(Preference { storage_share: f64::from(tenths) / 10.0, ..storage_is_short });
    }
    // If units are alike, all or none of them would be compressed. A mix can be better.
    let mut mix = |compressible| attempt(Preference { compressible, ..storage_is_short });
    let costs = (0..=4).map(|quarters| f64::from(quarters) / 4.0).map(|share| (mix(share), share));
    let cheaper = |a: &(f64, f64), b: &(f64, f64)| a.0.total_cmp(&b.0);
    let mut found = costs.min_by(cheaper).expect("there are five");
    for width in (3..8).map(|power| 0.5f64.powi(power)) {
        let beside = [found.1 - width, found.1 + width].map(|share| share.clamp(0.0, 1.0));
        let beside = beside.map(|share| (mix(share), share));
        found = beside.into_iter().chain([found]).min_by(cheaper).expect("there are three");
    }
    let found = Preference { compressible: found.1, ..storage_is_short };
    planner.best_ring(&planner.steps(found), &mut best);
    Ok(best)
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
    let ring = request.budget_bytes.checked_sub(planner.slot_bytes(residency))?;
    planner.evaluate(residency.to_vec(), ring)
}

/// What a plan gives memory to.
#[derive(Debug, Clone, Copy)]
struct Preference {
    /// The weight of the time of storage in the cost of a unit. The rest is the weight of the time
    /// of the processors.
    storage_share: f64,
    /// The share of the visits whose units may be kept compressed, from 0 to 1.
    compressible: f64,
    /// Whether the host is filled before the device, if slots are on a device with its own memory.
    host_first: bool,
}

impl Preference {
    /// The weight of the processors is so small that it only makes units that need no decoding
    /// better than compressed ones.
    const STORAGE_IS_SHORT: Self =
        Self { storage_share: 0.99, compressible: 1.0, host_first: false };
}

/// The budget has room for so many groups of small units, so that groups that are kept and groups
/// that are streamed alternate.
const GROUPS: usize = 16;
/// The most units for which all plans are tried.
const EXHAUSTIVE_UNITS: usize = 6;

struct Planner<'a> {
    request: &'a PlanRequest<'a>,
    sets: WorkingSets<'a>,
    /// The pass of the request, and the other passes.
    passes: Vec<PassDemand<'a>>,
    /// How many times all passes together visit each unit, for each pass of the request.
    visits: Vec<f64>,
    /// A rank for each unit, such that for any n, the n units with the lowest ranks are spread
    /// evenly over the pass. The rank is the bit-reversed position of the unit's group in the first
    /// order with the unit (a van der Corput sequence), or the lowest one if the unit is visited
    /// several times. Only small units are in a group with others: neighbours are read by one
    /// request if they are all streamed.
    spread: Vec<u32>,
    /// The part of a request that reads each unit, if its group is streamed.
    requests: Vec<f64>,
    smallest_budget_bytes: usize,
}

impl<'a> Planner<'a> {
    fn new(
        request: &'a PlanRequest<'a>,
        sets: WorkingSets<'a>,
        smallest_budget_bytes: usize,
    ) -> Self {
        let others = request.others.iter().map(|other| PassDemand::other(other, request.units));
        let passes: Vec<_> = std::iter::once(PassDemand::main(request)).chain(others).collect();
        let mut visits = vec![0.0; request.units.len()];
        let mut spread = vec![u32::MAX; request.units.len()];
        let mut requests = vec![1.0; request.units.len()];
        let group_bytes = (request.budget_bytes / GROUPS).min(JOINT_BYTES) as u64;
        for pass in &passes {
            let known = visits.clone();
            let groups = groups(pass.order, request.units, group_bytes);
            for (position, group) in (0u32..).zip(groups) {
                for unit in group {
                    let i = unit.index();
                    visits[i] += pass.passes;
                    if known[i] == 0.0 {
                        spread[i] = spread[i].min(position.reverse_bits());
                        requests[i] = 1.0 / group.len() as f64;
                    }
                }
            }
        }
        Self { request, sets, passes, visits, spread, requests, smallest_budget_bytes }
    }

    /// Replaces a plan by another one that is better: one that is faster, or that has the least
    /// ring where the other has not.
    fn improve(&self, best: &mut Plan, other: Plan) {
        let rank = |plan: &Plan| {
            let ring = plan.ring_bytes;
            (ring > 0 && ring < self.least_ring(&plan.residency), plan.cost())
        };
        if rank(&other) < rank(best) {
            *best = other;
        }
    }

    /// Returns the least ring that plans should have if possible, in bytes.
    fn least_ring(&self, residency: &[Residency]) -> usize {
        let least = self.request.least_ring_bytes;
        if self.request.reach != 1 {
            return least;
        }
        let visits = self.request.order.iter().map(|unit| unit.index());
        let streamed: Vec<usize> =
            visits.filter(|&i| residency[i] != Residency::Resident).collect();
        // The next pass follows.
        let next = streamed.iter().cycle().skip(1);
        let both = streamed.iter().zip(next).filter(|(now, next)| now != next);
        both.map(|(&now, &next)| self.size(now) + self.size(next)).fold(least, usize::max)
    }

    /// Tries rings of all sizes. Returns the size of the ring of the fastest plan, in bytes.
    fn best_ring(&self, steps: &[Step], best: &mut Plan) -> usize {
        let mut found = (f64::INFINITY, self.request.budget_bytes);
        let mut attempt = |ring: usize, found: &mut (f64, usize)| {
            if let Some(plan) = self.try_ring(ring, steps) {
                if plan.cost() < found.0 {
                    *found = (plan.cost(), ring);
                }
                self.improve(best, plan);
            }
        };
        for ring in self.ring_candidates() {
            attempt(ring, &mut found);
        }
        // The candidates grow in large steps.
        for eighths in [5, 6, 7, 9, 10, 12, 14] {
            let ring = (found.1 / 8).saturating_mul(eighths);
            attempt(ring.min(self.request.budget_bytes), &mut found);
        }
        found.1
    }

    fn size(&self, i: usize) -> usize {
        self.request.units[i].slot_bytes
    }

    /// Returns the ring sizes to try, in bytes: 0, the whole budget, the sizes of the working sets,
    /// and multiples of them by powers of two.
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
            let growth = std::iter::successors(Some(size), |&s| s.checked_mul(2));
            rings.extend(growth.take_while(|&s| s <= budget).take(7));
        }
        rings.push(budget);
        rings.sort_unstable();
        rings.dedup();
        rings
    }

    /// Returns a plan with a ring of about `ring` bytes, or `None` if there is none. First makes
    /// units resident until the others fit into the ring. Then keeps more units in the rest of the
    /// budget, as [`fill`](Self::fill) does.
    fn try_ring(&self, ring: usize, steps: &[Step]) -> Option<Plan> {
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
        self.fill(residency, ring, steps)
    }

    /// Keeps more units, in the memory that the kept units and the ring do not use, by taking all
    /// steps that fit.
    fn fill(&self, mut residency: Vec<Residency>, ring: usize, steps: &[Step]) -> Option<Plan> {
        let mut room =
            (self.request.budget_bytes - ring).checked_sub(self.slot_bytes(&residency))?;
        let mut host_room = self.request.host_bytes.unwrap_or(0);
        // Units that move from the host to the device leave room for others.
        let sweeps = if self.request.host_bytes.is_some() { 2 } else { 1 };
        for step in std::iter::repeat_n(steps, sweeps).flatten() {
            let room = if step.to == Residency::Host { &mut host_room } else { &mut room };
            if residency[step.unit] == step.from
                && let Some(left) = room.checked_sub(step.bytes)
            {
                *room = left;
                residency[step.unit] = step.to;
                if step.from == Residency::Host {
                    host_room += self.kept_form_bytes(step.unit);
                }
            }
        }
        self.evaluate(residency, ring)
    }

    /// Returns the ways to keep more of the units, the best first.
    fn steps(&self, preference: Preference) -> Vec<Step> {
        let visited = (0..self.visits.len()).filter(|&i| self.visits[i] > 0.0);
        let of_unit = |i: usize| {
            let last = preference.compressible * f64::from(u32::MAX);
            let may_compress = f64::from(self.spread[i]) <= last;
            self.steps_of(i, preference.storage_share, may_compress)
        };
        let mut steps: Vec<Step> = visited.flat_map(of_unit).flatten().collect();
        // Steps that save the most time per byte come first. Units that save about the same, such
        // as the layers of a model, are chosen evenly over the pass. Reading ahead works best if
        // kept and streamed units alternate.
        steps.sort_unstable_by_key(|step| {
            let (worth, unit) = (std::cmp::Reverse(step.worth), step.unit);
            let is_own = !self.request.units[unit].shared;
            let is_late = preference.host_first && step.to != Residency::Host;
            (is_late, worth, step.is_second(), is_own, self.spread[unit], unit)
        });
        steps
    }

    /// Returns the ways to keep more of a unit, each of which saves less per byte than the one
    /// before: to keep it compressed, and then to keep it decoded. If the first saves less than the
    /// second, or is not allowed, returns only the step to the decoded unit.
    ///
    /// Where units are copied to a device, returns all ways: to keep it on the host, to move it to
    /// the device from there, and to keep it on the device at once.
    fn steps_of(&self, i: usize, storage_share: f64, may_compress: bool) -> [Option<Step>; 3] {
        let unit = &self.request.units[i];
        let decode_s = unit.decode_s / self.request.rates.processors.max(1) as f64;
        let decoded = (1.0 - storage_share) * decode_s;
        let read = storage_share * self.read_s(i);
        let copied = (1.0 - storage_share) * self.copy_s(i);
        let streamed = copied + if unit.stored_compressed { read + decoded } else { read };
        let step = |from, to, bytes: usize, saved_s: f64| {
            let per_byte = self.visits[i] * saved_s / bytes.max(1) as f64;
            // On a logarithmic scale, in steps of about a fifth.
            let worth = (per_byte.max(1e-30).ln() * 5.0).round() as i32;
            (saved_s > 0.0).then_some(Step { unit: i, from, to, bytes, worth })
        };
        let whole = step(Residency::Streamed, Residency::Resident, unit.slot_bytes, streamed);
        if self.request.host_bytes.is_some() {
            let Some(bytes) = unit.compressed_bytes else { return [whole, None, None] };
            let on_host = step(Residency::Streamed, Residency::Host, bytes, read);
            let moved = streamed - read;
            return [
                whole,
                on_host,
                step(Residency::Host, Residency::Resident, unit.slot_bytes, moved),
            ];
        }
        let Some(bytes) =
            unit.compressed_bytes.filter(|&bytes| may_compress && bytes < unit.slot_bytes)
        else {
            return [whole, None, None];
        };
        let saved_s = streamed - decoded;
        if saved_s / bytes.max(1) as f64 <= streamed / unit.slot_bytes as f64 {
            return [whole, None, None];
        }
        [
            step(Residency::Streamed, Residency::Compressed, bytes, saved_s),
            step(Residency::Compressed, Residency::Resident, unit.slot_bytes - bytes, decoded),
            None,
        ]
    }

    /// Returns all plans that keep the budget.
    fn all_plans(&self) -> Vec<Plan> {
        let units = &self.request.units;
        let mut all = vec![Vec::new()];
        for unit in *units {
            let kept_form =
                self.request.host_bytes.map_or(Residency::Compressed, |_| Residency::Host);
            let compressed = unit.compressed_bytes.map(|_| kept_form);
            let choices = [Some(Residency::Streamed), compressed, Some(Residency::Resident)];
            let with = |before: Vec<Residency>| {
                choices.into_iter().flatten().map(move |own| [&before[..], &[own]].concat())
            };
            all = all.into_iter().flat_map(with).collect();
        }
        let ring = |residency: &[Residency]| {
            self.request.budget_bytes.checked_sub(self.slot_bytes(residency))
        };
        let plan = |residency: Vec<Residency>| {
            let ring = ring(&residency)?;
            self.evaluate(residency, ring)
        };
        all.into_iter().filter_map(plan).collect()
    }

    /// Returns the memory for slots that the kept units take, compressed or not, in bytes.
    fn slot_bytes(&self, residency: &[Residency]) -> usize {
        let compressed = self.kept_bytes(residency, Residency::Compressed);
        self.kept_bytes(residency, Residency::Resident).saturating_add(compressed)
    }

    /// Returns the memory of the units with this residency, in bytes.
    fn kept_bytes(&self, residency: &[Residency], kind: Residency) -> usize {
        let bytes = |i: usize| match kind {
            Residency::Resident => self.size(i),
            _ => self.kept_form_bytes(i),
        };
        let units = (0..residency.len()).filter(|&i| residency[i] == kind);
        units.map(bytes).fold(0, usize::saturating_add)
    }

    /// Returns the memory of a unit that is kept compressed, or on the host, in bytes.
    fn kept_form_bytes(&self, i: usize) -> usize {
        self.request.units[i].compressed_bytes.unwrap_or(usize::MAX)
    }
}

/// A way to keep more of a unit in memory.
struct Step {
    unit: usize,
    from: Residency,
    to: Residency,
    /// The additional memory, in bytes.
    bytes: usize,
    /// How much time each of these bytes saves. Only the order of the numbers has a meaning.
    worth: i32,
}

impl Step {
    fn is_second(&self) -> bool {
        self.from != Residency::Streamed
    }
}

#[cfg(test)]
mod tests;
