// SPDX-License-Identifier: MIT OR Apache-2.0
//! Learns the order in which passes visit units, and predicts the next visits.

use std::collections::BTreeMap;

use crate::unit::UnitId;

/// The id of a pass. [`Engine::begin_pass`](crate::Engine::begin_pass) returns it, and
/// [`Engine::end_pass`](crate::Engine::end_pass) accepts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PassId(pub u64);

/// The running passes, and the expected cyclic order of visits.
#[derive(Debug)]
pub(crate) struct Passes {
    order: Vec<UnitId>,
    running: BTreeMap<PassId, PassProgress>,
    /// The pass that prefetching runs ahead of, usually the pass with the latest visit.
    lead: Option<PassId>,
    /// The position in the order at which the next visit is expected while no pass is running.
    idle_position: usize,
    last_id: PassId,
}

#[derive(Debug)]
struct PassProgress {
    /// The position in the order at which the next visit is expected.
    position: usize,
    visits: Vec<UnitId>,
    /// Whether this pass has always run alone. Only such a pass changes the order.
    alone: bool,
}

impl Passes {
    pub(crate) fn new(order: Vec<UnitId>) -> Self {
        Self { order, running: BTreeMap::new(), lead: None, idle_position: 0, last_id: PassId(0) }
    }

    pub(crate) fn order(&self) -> &[UnitId] {
        &self.order
    }

    /// Returns the number of running passes.
    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn begin(&mut self) -> PassId {
        self.last_id.0 += 1;
        let alone = self.running.is_empty();
        self.running.values_mut().for_each(|other| other.alone = false);
        self.running.insert(self.last_id, PassProgress { position: 0, visits: Vec::new(), alone });
        if alone {
            self.lead = Some(self.last_id);
        }
        self.last_id
    }

    /// Ends a pass. Returns whether its visits differ from the `expected` order. Returns `None` if
    /// other passes ran at the same time, if there were no visits, or if the pass is not running.
    pub(crate) fn end(&mut self, id: PassId, expected: &[UnitId]) -> Option<bool> {
        let progress = self.running.remove(&id)?;
        self.lead = self.running.keys().next_back().copied();
        self.idle_position = 0;
        if !progress.alone || progress.visits.is_empty() {
            return None;
        }
        self.order = progress.visits;
        Some(self.order != expected)
    }

    /// Records a visit to `unit`.
    pub(crate) fn visit(&mut self, pass: Option<PassId>, unit: UnitId) {
        let progress = pass.and_then(|id| self.running.get_mut(&id));
        let Some(progress) = progress else {
            if let Some(distance) = distance(&self.order, self.idle_position, unit) {
                self.idle_position = (self.idle_position + distance + 1) % self.order.len().max(1);
            }
            return;
        };
        self.lead = pass;
        // Consecutive operations on the same unit are one visit.
        if progress.visits.last() == Some(&unit) {
            return;
        }
        progress.visits.push(unit);
        let found = distance(&self.order, progress.position, unit);
        if progress.alone {
            // If the order is wrong at this position, moves the visited unit here or inserts it.
            match found {
                Some(d) if progress.position + d < self.order.len() => {
                    self.order[progress.position..=progress.position + d].rotate_right(1);
                }
                _ => self.order.insert(progress.position, unit),
            }
            progress.position += 1;
        } else if let Some(d) = found {
            progress.position = (progress.position + d + 1) % self.order.len();
        }
    }

    /// Returns the next expected visits, in order, for one cycle.
    pub(crate) fn ahead(&self) -> impl Iterator<Item = UnitId> + '_ {
        let from = self.lead_position();
        (0..self.order.len()).map(move |d| self.order[(from + d) % self.order.len()])
    }

    /// Returns the number of visits before the next expected visit to `unit` in any pass, or
    /// `usize::MAX` if no visit is expected.
    pub(crate) fn next_use(&self, unit: UnitId) -> usize {
        let idle = self.running.is_empty().then_some(self.idle_position);
        let positions = self.running.values().map(|p| p.position).chain(idle);
        positions.filter_map(|p| distance(&self.order, p, unit)).min().unwrap_or(usize::MAX)
    }

    fn lead_position(&self) -> usize {
        let lead = self.lead.and_then(|id| self.running.get(&id));
        lead.map_or(self.idle_position, |progress| progress.position)
    }
}

/// Returns the number of steps from `position` to the next visit to `unit` in the cyclic `order`,
/// or `None` if the order does not contain the unit.
fn distance(order: &[UnitId], position: usize, unit: UnitId) -> Option<usize> {
    (0..order.len()).find(|d| order[(position + d) % order.len()] == unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[u32]) -> Vec<UnitId> {
        ids.iter().copied().map(UnitId).collect()
    }

    fn run(passes: &mut Passes, visits: &[u32]) -> Option<bool> {
        let expected = passes.order().to_vec();
        let id = passes.begin();
        for unit in ids(visits) {
            passes.visit(Some(id), unit);
        }
        passes.end(id, &expected)
    }

    #[test]
    fn the_order_of_a_pass_is_learned() {
        let mut passes = Passes::new(ids(&[0, 1, 2, 3]));
        assert_eq!(run(&mut passes, &[2, 0, 1, 2]), Some(true));
        assert_eq!(passes.order(), ids(&[2, 0, 1, 2]));
        assert_eq!(run(&mut passes, &[2, 0, 1, 2]), Some(false));
    }

    #[test]
    fn a_visit_out_of_order_corrects_the_expected_order() {
        let mut passes = Passes::new(ids(&[0, 1, 2, 3]));
        let id = passes.begin();
        passes.visit(Some(id), UnitId(2));
        assert_eq!(passes.ahead().collect::<Vec<_>>(), ids(&[0, 1, 3, 2]));
        assert_eq!(passes.next_use(UnitId(2)), 3);
    }

    #[test]
    fn after_a_pass_the_first_unit_is_expected() {
        let mut passes = Passes::new(ids(&[0, 1, 2]));
        let id = passes.begin();
        for unit in ids(&[0, 1, 2]) {
            passes.visit(Some(id), unit);
        }
        assert_eq!(passes.ahead().next(), Some(UnitId(0)));
        passes.end(id, &ids(&[0, 1, 2]));
        assert_eq!(passes.ahead().next(), Some(UnitId(0)));
    }

    #[test]
    fn a_longer_pass_extends_the_order() {
        let mut passes = Passes::new(ids(&[0, 1]));
        assert_eq!(run(&mut passes, &[0, 1, 0, 1, 0]), Some(true));
        assert_eq!(passes.order(), ids(&[0, 1, 0, 1, 0]));
    }

    #[test]
    fn concurrent_passes_do_not_change_the_order() {
        let mut passes = Passes::new(ids(&[0, 1, 2]));
        let (a, b) = (passes.begin(), passes.begin());
        for unit in ids(&[0, 1]) {
            passes.visit(Some(a), unit);
            passes.visit(Some(b), unit);
        }
        assert_eq!(passes.next_use(UnitId(0)), 1);
        let expected = ids(&[0, 1, 2]);
        assert_eq!((passes.end(a, &expected), passes.end(b, &expected)), (None, None));
        assert_eq!(passes.order(), expected);
    }

    #[test]
    fn consecutive_uses_of_a_unit_are_one_visit() {
        let mut passes = Passes::new(ids(&[0, 1]));
        assert_eq!(run(&mut passes, &[0, 0, 0, 1, 1, 0]), Some(true));
        assert_eq!(passes.order(), ids(&[0, 1, 0]));
    }

    #[test]
    fn a_visit_outside_a_pass_only_moves_the_position() {
        let mut passes = Passes::new(ids(&[0, 1, 2]));
        passes.visit(None, UnitId(1));
        assert_eq!(passes.ahead().next(), Some(UnitId(2)));
        passes.visit(None, UnitId(7));
        assert_eq!(passes.ahead().next(), Some(UnitId(2)));
    }
}
