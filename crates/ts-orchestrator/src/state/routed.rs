// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decides which routed units stay in memory: those that recent passes expected most often.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::config::Routing;
use crate::prepared::PreparedUnit;
use crate::stats::RoutedStats;
use crate::unit::{Access, UnitId};

use super::guesses::Guesses;

/// If the weight of a visit exceeds this number, all weights are scaled down.
const LARGEST_WEIGHT: f64 = 1e100;

/// If the share of hits falls by this number, other units are frequent than before.
const NEW_TOPIC: f64 = 0.1;
/// The factor by which later visits then count more than earlier ones.
const FORGETTING: f64 = 16.0;
/// The share of hits now is that of about this many visits, and the usual share that of the other
/// number.
const RECENT_VISITS: f64 = 512.0;
const USUAL_VISITS: f64 = 4096.0;
/// The least number of visits before a comparison of these shares.
const LEAST_VISITS: u64 = 2048;
/// Expectations of more uses are not compared: passes of many tokens need units that are seldom
/// needed otherwise.
const MOST_USES: u32 = 64;

/// How often routed units were expected, and which of them are idle.
///
/// If a unit is expected several times in one pass, the largest number of uses counts. The visits
/// of the current pass count only when the next pass begins. Therefore a pass that needs all units
/// does not evict the units that it needs next in favor of those that it has already used.
#[derive(Debug)]
pub(crate) struct Routed {
    /// `None` for units that are not routed.
    units: Vec<Option<RoutedUnit>>,
    has_units: bool,
    /// The idle units, by slot size: they are present, not expected, and no thread uses them or
    /// waits for them. The first one of a size is the first to evict.
    idle: BTreeMap<usize, BTreeSet<(Rank, UnitId)>>,
    /// The units that are expected, in order, each with the number of its expectation.
    expected: Vec<(u64, UnitId)>,
    last_expectation: u64,
    /// The units that were expected in the current pass.
    counted: Vec<UnitId>,
    /// The weight of a visit in the current pass. Weights grow, so that earlier ones count less.
    weight: f64,
    /// The factor by which the weight grows with each pass.
    growth: f64,
    hits: HitRates,
    /// The number of visits so far.
    visits: u64,
    /// The units that are likely to be used soon.
    pub(crate) guesses: Guesses,
    pub(crate) stats: RoutedStats,
}

#[derive(Debug)]
struct RoutedUnit {
    slot_bytes: usize,
    read_bytes: u64,
    /// The sum of the weights of all visits in earlier passes.
    score: f64,
    /// The number of the last visit.
    last_visit: u64,
    /// How many tokens of the current pass use the unit.
    uses: u32,
    idle: bool,
}

/// The share of visits that find their unit in memory, now and usually.
#[derive(Debug, Default)]
struct HitRates {
    visits: u64,
    recent: f64,
    usual: f64,
}

impl HitRates {
    fn count(&mut self, is_hit: bool) {
        self.visits += 1;
        let (hit, visits) = (f64::from(u8::from(is_hit)), self.visits as f64);
        self.recent += (hit - self.recent) / visits.min(RECENT_VISITS);
        self.usual += (hit - self.usual) / visits.min(USUAL_VISITS);
    }

    /// Returns whether hits have become rarer. If so, the usual share is that of now from here on.
    fn has_dropped(&mut self) -> bool {
        let dropped = self.visits >= LEAST_VISITS && self.recent < self.usual - NEW_TOPIC;
        if dropped {
            *self = Self { visits: RECENT_VISITS as u64, recent: self.recent, usual: self.recent };
        }
        dropped
    }
}

/// The order in which units are evicted: the lowest score first, then the most recent visit.
type Rank = (u64, Reverse<u64>);

impl RoutedUnit {
    fn rank(&self) -> Rank {
        // The bits of floats that are not negative have the order of the floats.
        (self.score.to_bits(), Reverse(self.last_visit))
    }
}

impl Routed {
    pub(crate) fn new(units: &[Arc<PreparedUnit>], routing: &Routing) -> Self {
        let scores: HashMap<UnitId, f64> = routing.scores.iter().copied().collect();
        let routed = |(i, prepared): (usize, &Arc<PreparedUnit>)| {
            (prepared.unit.access == Access::Routed).then_some(RoutedUnit {
                slot_bytes: prepared.slot_bytes,
                read_bytes: prepared.read_bytes,
                score: scores.get(&UnitId(i as u32)).map_or(0.0, |score| score.max(0.0)),
                last_visit: 0,
                uses: 0,
                idle: false,
            })
        };
        let units: Vec<_> = units.iter().enumerate().map(routed).collect();
        Self {
            has_units: units.iter().any(Option::is_some),
            units,
            idle: BTreeMap::new(),
            expected: Vec::new(),
            last_expectation: 0,
            counted: Vec::new(),
            weight: 1.0,
            growth: (1.0 / routing.half_life).exp2(),
            hits: HitRates::default(),
            visits: 0,
            guesses: Guesses::new(),
            stats: RoutedStats::default(),
        }
    }

    /// Returns whether any unit is routed.
    pub(crate) fn has_units(&self) -> bool {
        self.has_units
    }

    pub(crate) fn contains(&self, id: UnitId) -> bool {
        self.units[id.index()].is_some()
    }

    /// Counts the visits of the pass that has ended.
    pub(crate) fn begin_pass(&mut self) {
        for id in std::mem::take(&mut self.counted) {
            let was_idle = self.remove_idle(id);
            let unit = self.unit(id);
            let uses = std::mem::take(&mut unit.uses);
            let weight = self.weight * f64::from(uses);
            self.unit(id).score += weight;
            if was_idle {
                self.insert_idle(id);
            }
        }
        self.weight *= self.growth;
        let ages = self.growth > 1.0;
        if self.hits.has_dropped() && ages {
            self.weight *= FORGETTING;
        }
        if self.weight > LARGEST_WEIGHT {
            self.scale_down();
        }
    }

    /// Returns the score of each routed unit: the number of its uses, where the uses of earlier
    /// passes count less.
    pub(crate) fn scores(&self) -> Vec<(UnitId, f64)> {
        let units = self.units.iter().enumerate();
        let score = |(i, unit): (usize, &Option<RoutedUnit>)| {
            Some((UnitId(i as u32), unit.as_ref()?.score / self.weight))
        };
        units.filter_map(score).collect()
    }

    fn scale_down(&mut self) {
        let idle: Vec<UnitId> = self.idle.values().flatten().map(|&(_, id)| id).collect();
        for &id in &idle {
            self.remove_idle(id);
        }
        self.units.iter_mut().flatten().for_each(|unit| unit.score /= self.weight);
        self.weight = 1.0;
        idle.iter().for_each(|&id| self.insert_idle(id));
    }

    /// Expects visits to routed units, in this order, each for a number of uses. Returns the number
    /// of the expectation.
    /// `is_present` returns whether a unit is in memory or being loaded.
    pub(crate) fn expect(
        &mut self,
        uses: &[(UnitId, u32)],
        is_present: impl Fn(UnitId) -> bool,
    ) -> u64 {
        if uses.first().is_some_and(|&(id, _)| self.unit(id).uses > 0) {
            // Without passes, a second visit to a unit begins a new period.
            self.begin_pass();
        }
        self.last_expectation += 1;
        let compares =
            uses.iter().map(|&(_, count)| count).fold(0, u32::saturating_add) <= MOST_USES;
        for &(id, count) in uses {
            self.remove_idle(id);
            self.visits += 1;
            let visits = self.visits;
            let unit = self.unit(id);
            unit.last_visit = visits;
            let (is_new, read_bytes) = (unit.uses == 0, unit.read_bytes);
            unit.uses = unit.uses.max(count.max(1));
            if is_new {
                self.counted.push(id);
            }
            self.expected.push((self.last_expectation, id));
            self.stats.touched += 1;
            self.stats.touched_bytes += read_bytes;
            let is_hit = is_present(id);
            self.stats.hits += u64::from(is_hit);
            if compares {
                self.hits.count(is_hit);
            }
        }
        self.last_expectation
    }

    /// Ends an expectation. Returns its units that were not visited.
    pub(crate) fn end_expectation(&mut self, number: u64) -> Vec<UnitId> {
        let rest = self.expected.extract_if(.., |(of, _)| *of == number);
        rest.map(|(_, id)| id).collect()
    }

    /// Records that an expected unit is visited.
    pub(crate) fn visit(&mut self, id: UnitId) {
        if let Some(at) = self.expected.iter().position(|&(_, expected)| expected == id) {
            self.expected.remove(at);
        }
    }

    /// Returns the units that are expected and not visited yet, in order.
    pub(crate) fn expected(&self) -> impl DoubleEndedIterator<Item = UnitId> + '_ {
        self.expected.iter().map(|&(_, id)| id)
    }

    /// Adds a unit to the idle units, unless it is expected. The unit must be in memory, and no
    /// thread may use it or wait for it.
    pub(crate) fn insert_idle(&mut self, id: UnitId) {
        if self.expected().any(|expected| expected == id) {
            return;
        }
        let unit = self.unit(id);
        unit.idle = true;
        let (size, rank) = (unit.slot_bytes, unit.rank());
        self.idle.entry(size).or_default().insert((rank, id));
    }

    /// Removes a unit from the idle units. Returns whether it was one.
    pub(crate) fn remove_idle(&mut self, id: UnitId) -> bool {
        let Some(unit) = &mut self.units[id.index()] else { return false };
        let (size, rank) = (unit.slot_bytes, unit.rank());
        let was_idle = std::mem::replace(&mut unit.idle, false);
        if was_idle && let Some(idle) = self.idle.get_mut(&size) {
            idle.remove(&(rank, id));
        }
        was_idle
    }

    /// Returns the idle unit to evict first to free `slot_bytes` bytes. Prefers units of this size,
    /// because the freed memory then fits exactly.
    pub(crate) fn victim(&self, slot_bytes: usize) -> Option<UnitId> {
        let first = |idle: &BTreeSet<(Rank, UnitId)>| idle.first().copied();
        let of_size = self.idle.get(&slot_bytes).and_then(first);
        of_size.or_else(|| self.idle.values().filter_map(first).min()).map(|(_, id)| id)
    }

    fn unit(&mut self, id: UnitId) -> &mut RoutedUnit {
        self.units[id.index()].as_mut().expect("the callers checked that the unit is routed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(rates: &mut HitRates, visits: u64, hits_of_ten: u64) -> u64 {
        let mut drops = 0;
        for visit in 0..visits {
            rates.count(visit * 7 % 10 < hits_of_ten);
            drops += u64::from(rates.has_dropped());
        }
        drops
    }

    #[test]
    fn a_sudden_loss_of_hits_is_noticed_once() {
        let mut rates = HitRates::default();
        assert_eq!(count(&mut rates, 10_000, 6), 0);
        assert_eq!(count(&mut rates, 10_000, 2), 1);
        // More hits are no loss.
        assert_eq!(count(&mut rates, 20_000, 8), 0);
        assert_eq!(count(&mut rates, 10_000, 5), 1);
    }

    #[test]
    fn few_visits_are_not_compared() {
        let mut rates = HitRates::default();
        assert_eq!(count(&mut rates, LEAST_VISITS / 2, 10), 0);
        assert_eq!(count(&mut rates, LEAST_VISITS / 2 - 1, 0), 0);
        assert_eq!(count(&mut rates, 1, 0), 1);
    }

    #[test]
    fn a_small_loss_is_no_new_topic() {
        let mut rates = HitRates::default();
        count(&mut rates, 10_000, 6);
        assert_eq!(count(&mut rates, 10_000, 5), 0);
    }
}
