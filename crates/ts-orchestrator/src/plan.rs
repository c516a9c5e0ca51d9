// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which units stay and which are streamed: a pure function of sizes, order, budget and rates.
//!
//! A cyclic scan that does not fit is the worst case of every recency policy: LRU evicts each unit
//! just before it is used again. The right plan keeps some units for good and streams the others
//! through a ring that runs ahead of the computation. How large the ring should be is settled by
//! simulating a pass for each candidate.

use std::fmt;

use crate::unit::UnitId;

/// What the planner knows of a unit.
#[derive(Debug, Clone, PartialEq)]
pub struct UnitDemand {
    /// Its name, for messages.
    pub name: String,
    /// Memory it takes while it is held, in bytes.
    pub slot_bytes: usize,
    /// Bytes that are read to bring it in.
    pub read_bytes: u64,
    /// Seconds that one visit computes with it.
    pub compute_s: f64,
}

/// How fast things go, measured or assumed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Storage bandwidth, in bytes per second.
    pub read_bytes_per_s: f64,
    /// Time that a read takes beside its bytes, in seconds.
    pub read_latency_s: f64,
}

impl Default for Rates {
    /// A modest NVMe device; the engine measures and replaces this.
    fn default() -> Self {
        Self { read_bytes_per_s: 1e9, read_latency_s: 1e-4 }
    }
}

/// The question a plan answers.
#[derive(Debug, Clone, Copy)]
pub struct PlanRequest<'a> {
    /// All units.
    pub units: &'a [UnitDemand],
    /// The visits of one pass, in order; a unit may come more than once or not at all.
    pub order: &'a [UnitId],
    /// Sets of units that are in memory at the same time, because one operation needs them all. A
    /// unit in no set is needed alone.
    pub together: &'a [Vec<UnitId>],
    /// Memory for slots, in bytes.
    pub budget_bytes: usize,
    /// Passes that may run at once, at least 1.
    pub max_passes: usize,
    /// How fast storage is.
    pub rates: Rates,
    /// Memory that is left for streamed units where it can, in bytes; 0 to let the prediction
    /// decide.
    pub least_ring_bytes: usize,
}

/// How a unit is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Residency {
    /// Read once, kept.
    Resident,
    /// Read for each visit, let go after it.
    Streamed,
}

/// What limits a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bottleneck {
    /// The bytes that must be read.
    Storage,
    /// The arithmetic.
    Compute,
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bottleneck::Storage => "storage",
            Bottleneck::Compute => "compute",
        })
    }
}

/// An answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// How each unit is held.
    pub residency: Vec<Residency>,
    /// Memory of the resident units, in bytes.
    pub resident_bytes: usize,
    /// Memory for streamed units, in bytes; 0 when nothing is streamed.
    pub ring_bytes: usize,
    /// The largest streamed unit's slot, in bytes.
    pub largest_streamed_bytes: usize,
    /// Bytes read in each pass after the first.
    pub streamed_bytes_per_pass: u64,
    /// Predicted seconds of such a pass.
    pub predicted_pass_s: f64,
    /// What limits it.
    pub bottleneck: Bottleneck,
    /// The smallest budget under which a plan exists, in bytes.
    pub smallest_budget_bytes: usize,
}

impl Plan {
    /// The most memory the plan ever uses, in bytes.
    pub fn peak_bytes(&self) -> usize {
        self.resident_bytes + self.ring_bytes
    }
}

/// No plan exists: the units can never run under this budget.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a budget of {budget_bytes} bytes is too small: `{largest_unit}` needs {largest_bytes} bytes \
     at once; the smallest budget that works is {smallest_budget_bytes} bytes"
)]
pub struct NeverFits {
    /// The budget that was asked for.
    pub budget_bytes: usize,
    /// The unit, or the units of one operation, that need the most memory.
    pub largest_unit: String,
    /// Their slots, in bytes.
    pub largest_bytes: usize,
    /// The smallest budget that works.
    pub smallest_budget_bytes: usize,
}

/// The smallest budget, in bytes, under which `max_passes` passes can run at once. Each pass needs
/// slots for what it visits: one unit, or a set of `together`. Keeping the largest units can be
/// cheaper than their slots for each pass.
pub fn smallest_budget(units: &[UnitDemand], together: &[Vec<UnitId>], max_passes: usize) -> usize {
    smallest(&Visits::new(units, together, max_passes)).budget_bytes
}

/// What is needed at once: each set of `together`, and each unit alone.
struct Visits<'a> {
    units: &'a [UnitDemand],
    sets: Vec<Vec<usize>>,
    max_passes: usize,
}

impl<'a> Visits<'a> {
    fn new(units: &'a [UnitDemand], together: &[Vec<UnitId>], max_passes: usize) -> Self {
        let distinct = |set: &Vec<UnitId>| {
            let mut set: Vec<usize> = set.iter().map(|id| id.index()).collect();
            set.sort_unstable();
            set.dedup();
            set
        };
        let sets = together.iter().map(distinct).chain((0..units.len()).map(|i| vec![i])).collect();
        Self { units, sets, max_passes: max_passes.max(1) }
    }

    /// Memory for the members of a set that are `streamed`, in each pass.
    fn slots(&self, set: &[usize], streamed: impl Fn(usize) -> bool) -> usize {
        let sizes = set.iter().filter(|&&i| streamed(i)).map(|&i| self.units[i].slot_bytes);
        sizes.fold(0, usize::saturating_add).saturating_mul(self.max_passes)
    }

    /// The smallest ring that holds every visit to units that are `streamed`.
    fn ring(&self, streamed: impl Fn(usize) -> bool + Copy) -> usize {
        self.sets.iter().map(|set| self.slots(set, streamed)).max().unwrap_or(0)
    }

    /// The largest set: the names of its units, and their bytes.
    fn largest(&self) -> (String, usize) {
        let bytes = |set: &[usize]| set.iter().map(|&i| self.units[i].slot_bytes).sum::<usize>();
        let Some(largest) = self.sets.iter().max_by_key(|set| bytes(set)) else {
            return Default::default();
        };
        let names: Vec<&str> = largest.iter().map(|&i| self.units[i].name.as_str()).collect();
        (names.join("` + `"), bytes(largest))
    }
}

/// The smallest budget, and how units are held under it.
struct Smallest {
    budget_bytes: usize,
    ring_bytes: usize,
    residency: Vec<Residency>,
}

fn smallest(visits: &Visits<'_>) -> Smallest {
    let size = |i: usize| visits.units[i].slot_bytes;
    let count = visits.units.len();
    // The sets that need the most are worth keeping first.
    let mut order: Vec<&Vec<usize>> = visits.sets.iter().collect();
    order.sort_by_key(|set| std::cmp::Reverse(visits.slots(set, |_| true)));
    // How many of them are kept: keeping a unit costs its size and saves at most that in each pass,
    // so that one pass keeps none.
    let sets_to_try = if visits.max_passes == 1 { 0 } else { order.len() };
    let ring = visits.ring(|_| true);
    let mut best = (ring, ring, 0);
    let mut kept = vec![false; count];
    let mut kept_bytes = 0usize;
    for (place, set) in order[..sets_to_try].iter().enumerate() {
        for &i in set.iter().filter(|&&i| !std::mem::replace(&mut kept[i], true)) {
            kept_bytes = kept_bytes.saturating_add(size(i));
        }
        let mut ring = 0;
        for set in &order[place + 1..] {
            if visits.slots(set, |_| true) <= ring {
                break;
            }
            // A set that overlaps what is kept needs less than its whole size.
            ring = ring.max(visits.slots(set, |i| !kept[i]));
        }
        best = best.min((kept_bytes.saturating_add(ring), ring, place + 1));
    }
    let (budget_bytes, ring_bytes, sets_kept) = best;
    let mut residency = vec![Residency::Streamed; count];
    for &i in order[..sets_kept].iter().copied().flatten() {
        residency[i] = Residency::Resident;
    }
    Smallest { budget_bytes, ring_bytes, residency }
}

/// Decides how each unit is held.
///
/// # Errors
/// [`NeverFits`] when no assignment works under the budget.
pub fn plan(request: &PlanRequest<'_>) -> Result<Plan, NeverFits> {
    let visits = Visits::new(request.units, request.together, request.max_passes);
    let smallest = smallest(&visits);
    if smallest.budget_bytes > request.budget_bytes {
        let (largest_unit, largest_bytes) = visits.largest();
        let budget_bytes = request.budget_bytes;
        let smallest_budget_bytes = smallest.budget_bytes;
        return Err(NeverFits { budget_bytes, largest_unit, largest_bytes, smallest_budget_bytes });
    }
    let planner = Planner::new(request, visits, smallest.budget_bytes);
    let rings = planner.ring_candidates();
    let mut candidates: Vec<Plan> =
        rings.into_iter().filter_map(|ring| planner.try_ring(ring)).collect();
    // What the smallest budget keeps works under every budget; the greedy choice of `try_ring` may
    // miss it.
    candidates.extend(planner.fill(smallest.residency, smallest.ring_bytes));
    let cheaper = |a: &&Plan, b: &&Plan| a.cost().total_cmp(&b.cost());
    let wide =
        |p: &&Plan| p.streamed_bytes_per_pass == 0 || p.ring_bytes >= request.least_ring_bytes;
    let best = candidates.iter().filter(wide).min_by(cheaper);
    let best = best.or_else(|| candidates.iter().min_by(cheaper));
    Ok(best.expect("the plan of the smallest budget is a candidate").clone())
}

/// What a pass would cost if `residency` were kept, in seconds; `None` when it breaks the budget.
pub fn predict(request: &PlanRequest<'_>, residency: &[Residency]) -> Option<Plan> {
    let visits = Visits::new(request.units, request.together, request.max_passes);
    let smallest = smallest(&visits).budget_bytes;
    let planner = Planner::new(request, visits, smallest);
    let ring = request.budget_bytes.checked_sub(planner.resident_bytes(residency))?;
    planner.evaluate(residency.to_vec(), ring)
}

struct Planner<'a> {
    request: &'a PlanRequest<'a>,
    needed: Visits<'a>,
    /// How often a pass visits each unit.
    visits: Vec<u32>,
    smallest: usize,
}

impl Plan {
    /// Seconds of a pass, a little more for a larger ring, so that of equals the smallest wins.
    fn cost(&self) -> f64 {
        self.predicted_pass_s * (1.0 + 1e-12 * self.ring_bytes as f64)
    }
}

impl<'a> Planner<'a> {
    fn new(request: &'a PlanRequest<'a>, needed: Visits<'a>, smallest: usize) -> Self {
        let mut visits = vec![0; request.units.len()];
        for unit in request.order {
            visits[unit.index()] += 1;
        }
        Self { request, needed, visits, smallest }
    }

    fn size(&self, i: usize) -> usize {
        self.request.units[i].slot_bytes
    }

    /// Ring sizes worth trying: none, and from the size of each visit upwards in steps of a
    /// quarter.
    fn ring_candidates(&self) -> Vec<usize> {
        let budget = self.request.budget_bytes;
        let slots = self.needed.sets.iter().map(|set| self.needed.slots(set, |_| true));
        let mut sizes: Vec<usize> = slots.filter(|&s| s <= budget).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut rings = vec![0];
        // Many units share a few sizes; where they do not, a spread of 64 is enough.
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

    /// The best plan with about this ring: keeps what the ring cannot hold, then what the rest of
    /// the budget holds.
    fn try_ring(&self, ring: usize) -> Option<Plan> {
        let mut residency = vec![Residency::Streamed; self.request.units.len()];
        let mut room = self.request.budget_bytes - ring;
        // Of a set the largest units stay, until the others fit.
        for set in &self.needed.sets {
            let mut largest_first = set.clone();
            largest_first.sort_by_key(|&i| std::cmp::Reverse(self.size(i)));
            let mut members = largest_first.into_iter();
            while self.needed.slots(set, |i| residency[i] == Residency::Streamed) > ring {
                let next = members.find(|&i| residency[i] == Residency::Streamed)?;
                room = room.checked_sub(self.size(next))?;
                residency[next] = Residency::Resident;
            }
        }
        self.fill(residency, ring)
    }

    /// Keeps more units, where the budget has room beside the ring and what `residency` keeps.
    fn fill(&self, mut residency: Vec<Residency>, ring: usize) -> Option<Plan> {
        let mut room =
            (self.request.budget_bytes - ring).checked_sub(self.resident_bytes(&residency))?;
        // What saves most time for its memory comes first. Units that save about the same, as the
        // layers of a model do, are taken evenly over the pass: reading ahead works best when kept
        // and streamed ones alternate.
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

    /// Time saved per byte by keeping a unit, as a logarithmic class: differences under a fifth are
    /// none.
    fn worth(&self, i: usize) -> i32 {
        let per_byte = f64::from(self.visits[i]) * self.read_s(i) / self.size(i).max(1) as f64;
        (per_byte.max(1e-30).ln() * 5.0).round() as i32
    }

    /// A rank for each unit such that the units of the lowest ranks, however many, lie evenly over
    /// the pass: the bit-reversal (van der Corput) sequence of their places.
    fn spread(&self) -> Vec<u32> {
        let mut rank = vec![u32::MAX; self.request.units.len()];
        for (place, unit) in (0u32..).zip(self.request.order) {
            rank[unit.index()] = rank[unit.index()].min(place.reverse_bits());
        }
        rank
    }

    fn read_s(&self, i: usize) -> f64 {
        let rates = self.request.rates;
        rates.read_latency_s + self.request.units[i].read_bytes as f64 / rates.read_bytes_per_s
    }

    /// Fills in what follows from a residency; `None` when the ring cannot hold what is streamed.
    fn evaluate(&self, residency: Vec<Residency>, ring: usize) -> Option<Plan> {
        let streamed = |i: &usize| residency[*i] == Residency::Streamed;
        let all = 0..residency.len();
        if self.needed.ring(|i| streamed(&i)) > ring {
            return None;
        }
        let largest = all.clone().filter(streamed).map(|i| self.size(i)).max().unwrap_or(0);
        let resident_bytes = self.resident_bytes(&residency);
        let streamed_bytes = all.clone().filter(streamed).map(|i| self.size(i)).sum::<usize>();
        // Memory that no kept unit took is the ring's too.
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
            smallest_budget_bytes: self.smallest,
        })
    }

    /// Seconds of a pass in the steady state. One device reads one unit after the other, as early
    /// as the ring has room; one processor computes one visit after the other, as early as its unit
    /// is there.
    fn simulate(&self, residency: &[Residency], ring: usize) -> f64 {
        const PASSES: usize = 3;
        let mut held: std::collections::VecDeque<(usize, f64)> = std::collections::VecDeque::new();
        let (mut held_bytes, mut room_at) = (0, 0.0f64);
        let (mut device, mut processor, mut begun) = (0.0f64, 0.0f64, 0.0f64);
        for pass in 0..PASSES {
            if pass == PASSES - 1 {
                begun = processor;
            }
            for unit in self.request.order {
                let i = unit.index();
                if residency[i] == Residency::Streamed {
                    // Units let go in the order they came; room for this one is there when enough
                    // have gone.
                    while held_bytes + self.size(i) > ring {
                        let (bytes, released) =
                            held.pop_front().expect("one streamed unit fits the ring");
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn units(sizes: &[usize]) -> Vec<UnitDemand> {
        sizes
            .iter()
            .enumerate()
            .map(|(i, &s)| UnitDemand {
                name: format!("u{i}"),
                slot_bytes: s,
                read_bytes: s as u64,
                compute_s: s as f64 / 10e9,
            })
            .collect()
    }

    fn order(n: usize) -> Vec<UnitId> {
        (0..n as u32).map(UnitId).collect()
    }

    fn request<'a>(units: &'a [UnitDemand], order: &'a [UnitId], budget: usize) -> PlanRequest<'a> {
        let rates = Rates::default();
        PlanRequest {
            units,
            order,
            together: &[],
            budget_bytes: budget,
            max_passes: 1,
            rates,
            least_ring_bytes: 0,
        }
    }

    #[test]
    fn what_fits_is_kept() {
        let (units, order) = (units(&[10, 20, 30]), order(3));
        let plan = plan(&request(&units, &order, 60)).unwrap();
        assert!(plan.residency.iter().all(|&r| r == Residency::Resident));
        assert_eq!((plan.ring_bytes, plan.streamed_bytes_per_pass), (0, 0));
        assert_eq!(plan.bottleneck, Bottleneck::Compute);
    }

    #[test]
    fn a_budget_below_the_largest_unit_is_refused_with_the_smallest_that_works() {
        let (units, order) = (units(&[10, 50, 30]), order(3));
        let error = plan(&request(&units, &order, 49)).unwrap_err();
        assert_eq!((error.largest_unit.as_str(), error.smallest_budget_bytes), ("u1", 50));
        let plan = plan(&request(&units, &order, 50)).unwrap();
        assert_eq!(plan.smallest_budget_bytes, 50);
    }

    #[test]
    fn several_passes_need_a_slot_each_or_their_largest_units_kept() {
        let units = units(&[100, 10, 10]);
        assert_eq!(smallest_budget(&units, &[], 1), 100);
        assert_eq!(smallest_budget(&units, &[], 2), 120);
        assert_eq!(smallest_budget(&[], &[], 2), 0);
    }

    #[test]
    fn what_one_operation_needs_is_in_the_smallest_budget() {
        let units = units(&[10, 50, 30, 20]);
        let together = [vec![UnitId(0), UnitId(2), UnitId(3)]];
        assert_eq!(smallest_budget(&units, &together, 1), 60);
        let order = order(4);
        let error =
            plan(&PlanRequest { together: &together, ..request(&units, &order, 59) }).unwrap_err();
        assert_eq!((error.largest_unit.as_str(), error.largest_bytes), ("u0` + `u2` + `u3", 60));
        let plan =
            plan(&PlanRequest { together: &together, ..request(&units, &order, 60) }).unwrap();
        assert!(plan.ring_bytes >= 50 && plan.peak_bytes() <= 60);
    }

    #[test]
    fn the_smallest_budget_works_where_keeping_the_largest_of_each_set_does_not() {
        // Two passes need 9 bytes: 4 + 1 kept, and a ring for 2 in each. With that ring, keeping
        // only the largest unit of each set keeps 4 + 2, which is 10 bytes.
        let units = units(&[2, 4, 2, 1, 1]);
        let together = [vec![UnitId(4), UnitId(1)], vec![UnitId(2), UnitId(4)]];
        let order = order(5);
        let least = smallest_budget(&units, &together, 2);
        let request =
            PlanRequest { max_passes: 2, together: &together, ..request(&units, &order, least) };
        assert_eq!(plan(&request).unwrap().peak_bytes(), least);
    }

    #[test]
    fn a_unit_visited_twice_is_kept_before_one_visited_once() {
        let units = units(&[40_000_000, 40_000_000, 40_000_000]);
        let order = [UnitId(0), UnitId(1), UnitId(2), UnitId(0)];
        let plan = plan(&request(&units, &order, 100_000_000)).unwrap();
        assert_eq!(plan.residency[0], Residency::Resident);
    }

    #[test]
    fn a_unit_that_is_never_visited_is_not_kept_but_has_room_should_it_be() {
        let units = units(&[40_000_000, 40_000_000, 40_000_000]);
        let plan = plan(&request(&units, &[UnitId(0), UnitId(2)], 80_000_000)).unwrap();
        assert_eq!(plan.residency[1], Residency::Streamed);
        assert_eq!(plan.ring_bytes, 40_000_000);
    }

    #[test]
    fn most_of_the_budget_is_kept_when_storage_is_the_limit() {
        // The shape of a 1.1B model: a large embedding and head, 22 layers of 7 matrices.
        let mut sizes = vec![131_000_000];
        for _ in 0..22 {
            sizes.extend([
                8_400_000, 1_000_000, 1_000_000, 8_400_000, 23_000_000, 23_000_000, 23_000_000,
            ]);
        }
        sizes.push(131_000_000);
        let (units, order) = (units(&sizes), order(sizes.len()));
        let plan = plan(&request(&units, &order, 1_000_000_000)).unwrap();
        assert_eq!(plan.bottleneck, Bottleneck::Storage);
        assert!(plan.ring_bytes < 150_000_000, "{}", plan.ring_bytes);
        let floor = plan.streamed_bytes_per_pass as f64 / 1e9;
        assert!(plan.predicted_pass_s < 1.1 * floor, "{} s for {floor} GB", plan.predicted_pass_s);
    }

    #[test]
    fn a_least_ring_is_kept_unless_nothing_is_streamed_or_it_cannot_be() {
        let (units, order) = (units(&[100_000_000; 20]), order(20));
        let ask = |budget, least_ring_bytes| {
            plan(&PlanRequest { least_ring_bytes, ..request(&units, &order, budget) }).unwrap()
        };
        assert!(ask(1_000_000_000, 0).ring_bytes < 500_000_000);
        assert!(ask(1_000_000_000, 500_000_000).ring_bytes >= 500_000_000);
        assert_eq!(ask(2_000_000_000, 1_000_000_000).streamed_bytes_per_pass, 0);
        assert!(ask(1_000_000_000, usize::MAX).peak_bytes() <= 1_000_000_000);
    }

    proptest! {
        #[test]
        fn every_plan_keeps_the_budget_and_no_refusal_is_wrong(
            sizes in prop::collection::vec(1usize..1000, 1..150),
            visits in prop::collection::vec(any::<prop::sample::Index>(), 0..60),
            spare in prop_oneof![Just(0), 0usize..20_000],
            max_passes in prop_oneof![1usize..4, Just(usize::MAX)],
            sets in prop::collection::vec(
                prop::collection::vec(any::<prop::sample::Index>(), 1..7),
                0..8,
            ),
        ) {
            let units = units(&sizes);
            let id = |v: &prop::sample::Index| UnitId(v.index(sizes.len()) as u32);
            let together: Vec<Vec<UnitId>> =
                sets.iter().map(|set| set.iter().map(id).collect()).collect();
            let together = &together[..];
            let least = smallest_budget(&units, together, max_passes);
            let less = PlanRequest { max_passes, together, ..request(&units, &[], least - 1) };
            prop_assert!(plan(&less).is_err());
            let budget = least + spare;
            let order: Vec<_> = visits.iter().map(id).collect();
            let request = PlanRequest { max_passes, together, ..request(&units, &order, budget) };
            let plan = plan(&request).unwrap();
            prop_assert!(plan.peak_bytes() <= budget);
            for set in together {
                let distinct: std::collections::BTreeSet<_> = set.iter().collect();
                let streamed =
                    distinct.iter().filter(|id| plan.residency[id.index()] == Residency::Streamed);
                let bytes: usize = streamed.map(|id| units[id.index()].slot_bytes).sum();
                prop_assert!(bytes.saturating_mul(max_passes) <= budget - plan.resident_bytes);
            }
            prop_assert!(
                plan.largest_streamed_bytes.saturating_mul(max_passes)
                    <= budget - plan.resident_bytes
            );
            prop_assert!(plan.predicted_pass_s.is_finite() && plan.predicted_pass_s >= 0.0);
            let again = predict(&request, &plan.residency).unwrap();
            prop_assert_eq!(again, plan);
        }
    }
}
