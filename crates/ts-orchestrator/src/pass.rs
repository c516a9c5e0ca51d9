// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is expected next: the order of visits, learned while passes run.

use std::collections::BTreeMap;

use crate::unit::UnitId;

/// Names a pass that has begun, until [`Engine::end_pass`](crate::Engine::end_pass).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PassId(pub u64);

/// Passes that run, and the cyclic order of visits that is believed in.
#[derive(Debug)]
pub(crate) struct Passes {
    order: Vec<UnitId>,
    running: BTreeMap<PassId, Progress>,
    /// The pass whose visit came last; prefetching runs ahead of it.
    lead: Option<PassId>,
    /// Where visits outside any pass, and the next pass, are expected.
    idle_position: usize,
    last_id: PassId,
}

#[derive(Debug)]
struct Progress {
    position: usize,
    visits: Vec<UnitId>,
    /// No other pass ran beside it, so that its visits tell the order.
    alone: bool,
}

impl Passes {
    pub(crate) fn new(order: Vec<UnitId>) -> Self {
        Self { order, running: BTreeMap::new(), lead: None, idle_position: 0, last_id: PassId(0) }
    }

    pub(crate) fn order(&self) -> &[UnitId] {
        &self.order
    }

    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn begin(&mut self) -> PassId {
        self.last_id.0 += 1;
        let alone = self.running.is_empty();
        self.running.values_mut().for_each(|other| other.alone = false);
        self.running.insert(self.last_id, Progress { position: 0, visits: Vec::new(), alone });
        if alone {
            self.lead = Some(self.last_id);
        }
        self.last_id
    }

    /// Ends a pass. Returns whether its order of visits is another than `believed`; `None` when it
    /// tells nothing, because other passes ran beside it or it visited nothing.
    pub(crate) fn end(&mut self, id: PassId, believed: &[UnitId]) -> Option<bool> {
        let progress = self.running.remove(&id)?;
        self.lead = self.running.keys().next_back().copied();
        self.idle_position = 0;
        if !progress.alone || progress.visits.is_empty() {
            return None;
        }
        self.order = progress.visits;
        Some(self.order != believed)
    }

    /// Notes that `unit` is wanted now.
    pub(crate) fn visit(&mut self, pass: Option<PassId>, unit: UnitId) {
        let progress = pass.and_then(|id| self.running.get_mut(&id));
        let Some(progress) = progress else {
            if let Some(distance) = distance(&self.order, self.idle_position, unit) {
                self.idle_position = (self.idle_position + distance + 1) % self.order.len().max(1);
            }
            return;
        };
        self.lead = pass;
        // One operation after the other on the same unit is one visit.
        if progress.visits.last() == Some(&unit) {
            return;
        }
        progress.visits.push(unit);
        let found = distance(&self.order, progress.position, unit);
        if progress.alone {
            // A belief that is wrong at this place is put right at once: what came instead is moved
            // here.
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

    /// The units expected from here on, nearest first, one cycle of them.
    pub(crate) fn ahead(&self) -> impl Iterator<Item = UnitId> + '_ {
        let from = self.lead_position();
        (0..self.order.len()).map(move |d| self.order[(from + d) % self.order.len()])
    }

    /// Visits until `unit` is next expected by any pass; `usize::MAX` when none expects it.
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

/// Steps from `position` to the next visit of `unit` in the cyclic `order`.
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
        let believed = passes.order().to_vec();
        let id = passes.begin();
        for unit in ids(visits) {
            passes.visit(Some(id), unit);
        }
        passes.end(id, &believed)
    }

    #[test]
    fn the_order_of_a_pass_is_learned_and_then_known() {
        let mut passes = Passes::new(ids(&[0, 1, 2, 3]));
        assert_eq!(run(&mut passes, &[2, 0, 1, 2]), Some(true));
        assert_eq!(passes.order(), ids(&[2, 0, 1, 2]));
        assert_eq!(run(&mut passes, &[2, 0, 1, 2]), Some(false));
    }

    #[test]
    fn a_visit_out_of_order_corrects_what_is_expected_next() {
        let mut passes = Passes::new(ids(&[0, 1, 2, 3]));
        let id = passes.begin();
        passes.visit(Some(id), UnitId(2));
        assert_eq!(passes.ahead().collect::<Vec<_>>(), ids(&[0, 1, 3, 2]));
        assert_eq!(passes.next_use(UnitId(2)), 3);
    }

    #[test]
    fn at_the_end_of_a_pass_the_next_one_is_expected() {
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
    fn a_pass_longer_than_believed_extends_the_order() {
        let mut passes = Passes::new(ids(&[0, 1]));
        assert_eq!(run(&mut passes, &[0, 1, 0, 1, 0]), Some(true));
        assert_eq!(passes.order(), ids(&[0, 1, 0, 1, 0]));
    }

    #[test]
    fn passes_side_by_side_do_not_rewrite_the_order() {
        let mut passes = Passes::new(ids(&[0, 1, 2]));
        let (a, b) = (passes.begin(), passes.begin());
        for unit in ids(&[0, 1]) {
            passes.visit(Some(a), unit);
            passes.visit(Some(b), unit);
        }
        assert_eq!(passes.next_use(UnitId(0)), 1);
        let believed = ids(&[0, 1, 2]);
        assert_eq!((passes.end(a, &believed), passes.end(b, &believed)), (None, None));
        assert_eq!(passes.order(), believed);
    }

    #[test]
    fn uses_of_a_unit_in_a_row_are_one_visit() {
        let mut passes = Passes::new(ids(&[0, 1]));
        assert_eq!(run(&mut passes, &[0, 0, 0, 1, 1, 0]), Some(true));
        assert_eq!(passes.order(), ids(&[0, 1, 0]));
    }

    #[test]
    fn a_visit_outside_any_pass_only_moves_on() {
        let mut passes = Passes::new(ids(&[0, 1, 2]));
        passes.visit(None, UnitId(1));
        assert_eq!(passes.ahead().next(), Some(UnitId(2)));
        passes.visit(None, UnitId(7));
        assert_eq!(passes.ahead().next(), Some(UnitId(2)));
    }
}
