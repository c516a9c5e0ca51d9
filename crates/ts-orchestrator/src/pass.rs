// SPDX-License-Identifier: MIT OR Apache-2.0
//! Learns the order in which passes visit units, and predicts the next visits.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::pass_kinds::PassKinds;
use crate::unit::UnitId;
use crate::visit_index::VisitIndex;

/// The id of a pass. [`Engine::begin_pass`](crate::Engine::begin_pass) returns it, and
/// [`Engine::end_pass`](crate::Engine::end_pass) accepts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PassId(pub u64);

/// The running passes, and the expected order of visits.
#[derive(Debug)]
pub(crate) struct Passes {
    /// The expected order of the pass that runs or, if none does, of the next one.
    order: Vec<UnitId>,
    /// The index of `order`, created when it is first needed after a change.
    index: OnceCell<VisitIndex>,
    /// The order of the pass that is expected next, unless it is of the same kind as this one.
    next_order: Option<Arc<[UnitId]>>,
    /// The index of `next_order`, created when it is first needed after a change.
    next_index: OnceCell<VisitIndex>,
    /// Changes when the expected visits change in another way than that the next one is made.
    generation: u64,
    /// The number of the kind of pass that has this order.
    expected: u64,
    kinds: PassKinds,
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
        let kinds = PassKinds::expecting(order.clone());
        Self {
            order,
            index: OnceCell::new(),
            next_order: None,
            next_index: OnceCell::new(),
            generation: 0,
            expected: 0,
            kinds,
            running: BTreeMap::new(),
            lead: None,
            idle_position: 0,
            last_id: PassId(0),
        }
    }

    /// Returns the kinds of passes that were seen.
    pub(crate) fn kinds(&self) -> &PassKinds {
        &self.kinds
    }

    /// Records that the plan was considered for all passes so far.
    pub(crate) fn set_planned(&mut self) {
        self.kinds.set_planned();
    }

    /// Returns the number of running passes.
    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn begin(&mut self) -> PassId {
        self.last_id.0 += 1;
        let alone = self.running.is_empty();
        self.running.values_mut().for_each(|other| other.alone = false);
        let visits = Vec::with_capacity(self.order.len());
        self.running.insert(self.last_id, PassProgress { position: 0, visits, alone });
        if alone {
            self.lead = Some(self.last_id);
        }
        self.generation += 1;
        self.last_id
    }

    /// Ends a pass, which computed for `compute_s` seconds. Returns the number of its kind, or
    /// `None` if other passes ran at the same time, if there were no visits, or if the pass is not
    /// running.
    pub(crate) fn end(&mut self, id: PassId, compute_s: f64) -> Option<u64> {
        let progress = self.running.remove(&id)?;
        self.lead = self.running.keys().next_back().copied();
        self.idle_position = 0;
        self.generation += 1;
        if !progress.alone || progress.visits.is_empty() {
            return None;
        }
        let kind = self.kinds.record(&progress.visits, compute_s);
        if let Some((next, order)) = self.kinds.after(kind) {
            (self.expected, self.order) = (next, order.to_vec());
        }
        self.on_order_changed();
        Some(kind)
    }

    /// Records a visit to `unit`.
    pub(crate) fn visit(&mut self, pass: Option<PassId>, unit: UnitId) {
        let Some((pass, progress)) = pass.and_then(|id| Some((id, self.running.get_mut(&id)?)))
        else {
            if let Some(found) = self.find(self.idle_position, unit) {
                let position = (found + 1) % self.order.len().max(1);
                self.generation += u64::from(position != self.idle_position + 1);
                self.idle_position = position;
            }
            return;
        };
        if self.lead != Some(pass) {
            self.lead = Some(pass);
            self.generation += 1;
        }
        // Consecutive operations on the same unit are one visit.
        if progress.visits.last() == Some(&unit) {
            return;
        }
        progress.visits.push(unit);
        let (position, alone) = (progress.position, progress.alone);
        if self.order.get(position) == Some(&unit) {
            // The order does not change. A pass that ran alone may visit its first units again.
            progress.position =
                if alone { position + 1 } else { (position + 1) % self.order.len() };
            self.generation += u64::from(progress.position == 0);
            return;
        }
        self.generation += 1;
        if !alone {
            if let Some(found) = self.find(position, unit) {
                self.progress(pass).position = (found + 1) % self.order.len();
            }
            return;
        }
        if let Some((kind, order)) = self.kinds.beginning_with(&progress.visits) {
            (self.expected, self.order) = (kind, order.to_vec());
            progress.position = progress.visits.len();
        } else {
            // The order is wrong at this position. Moves the visited unit here or inserts it.
            match self.index().next(unit, position) {
                Some(found) => self.order[position..=found].rotate_right(1),
                None => self.order.insert(position, unit),
            }
            self.progress(pass).position += 1;
        }
        self.on_order_changed();
    }

    /// Adapts what depends on the order and on the expected kind of pass.
    fn on_order_changed(&mut self) {
        self.generation += 1;
        self.index.take();
        let next = self.kinds.after(self.expected).filter(|(next, _)| *next != self.expected);
        let next = next.map(|(_, order)| order);
        let is_known = match (&self.next_order, next) {
            (Some(known), Some(next)) => Arc::ptr_eq(known, next),
            (known, next) => known.is_none() && next.is_none(),
        };
        if !is_known {
            self.next_order = next.cloned();
            self.next_index.take();
        }
    }

    fn progress(&mut self, pass: PassId) -> &mut PassProgress {
        self.running.get_mut(&pass).expect("the caller found the pass")
    }

    fn index(&self) -> &VisitIndex {
        self.index.get_or_init(|| VisitIndex::new(&self.order))
    }

    /// Returns the position of the next visit to `unit` in the cyclic order, or `None` if the order
    /// does not contain the unit.
    fn find(&self, from: usize, unit: UnitId) -> Option<usize> {
        if self.order.get(from) == Some(&unit) {
            return Some(from);
        }
        self.index().next(unit, from).or_else(|| self.index().next(unit, 0))
    }

    /// Returns the next expected visits, in order: those of the rest of the pass, and of the next
    /// one.
    pub(crate) fn ahead(&self) -> impl Iterator<Item = UnitId> + '_ {
        let (rest, next) = self.ahead_of(self.lead_position());
        rest.iter().chain(next).copied()
    }

    /// Returns the unit of the expected visit before which there are `distance` others.
    pub(crate) fn ahead_at(&self, distance: usize) -> Option<UnitId> {
        let (rest, next) = self.ahead_of(self.lead_position());
        rest.get(distance).or_else(|| next.get(distance - rest.len())).copied()
    }

    /// Returns the number of visits that [`ahead`](Self::ahead) returns.
    pub(crate) fn ahead_len(&self) -> usize {
        let (rest, next) = self.ahead_of(self.lead_position());
        rest.len() + next.len()
    }

    /// Returns where [`ahead`](Self::ahead) begins. As long as the first number does not change,
    /// the expected visits after those between two positions are the same ones.
    pub(crate) fn place(&self) -> (u64, usize) {
        (self.generation, self.lead_position())
    }

    /// Returns the expected visits from a position in the order: of the rest of the pass, and of
    /// the next one.
    fn ahead_of(&self, position: usize) -> (&[UnitId], &[UnitId]) {
        let rest = &self.order[position.min(self.order.len())..];
        match &self.next_order {
            Some(order) => (rest, order),
            // The rest of the next pass is the same as that of this one.
            None => (rest, &self.order[..self.order.len() - rest.len()]),
        }
    }

    /// Returns the number of visits before the next expected visit to `unit` in any pass, or
    /// `usize::MAX` if no visit is expected.
    pub(crate) fn next_use(&self, unit: UnitId) -> usize {
        let idle = self.running.is_empty().then_some(self.idle_position);
        let positions = self.running.values().map(|p| p.position).chain(idle);
        let in_next = self
            .next_order
            .as_ref()
            .map(|order| self.next_index.get_or_init(|| VisitIndex::new(order)).next(unit, 0));
        let distance = |position: usize| {
            let position = position.min(self.order.len());
            let rest = self.order.len() - position;
            match (self.index().next(unit, position), in_next) {
                (Some(found), _) => Some(found - position),
                (None, Some(in_next)) => Some(rest + in_next?),
                (None, None) => Some(rest + self.index().next(unit, 0)?),
            }
        };
        positions.filter_map(distance).min().unwrap_or(usize::MAX)
    }

    fn lead_position(&self) -> usize {
        let lead = self.lead.and_then(|id| self.running.get(&id));
        lead.map_or(self.idle_position, |progress| progress.position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[u32]) -> Vec<UnitId> {
        ids.iter().copied().map(UnitId).collect()
    }

    /// Runs a pass. Returns the number of its kind.
    fn run(passes: &mut Passes, visits: &[u32]) -> Option<u64> {
        let id = passes.begin();
        for unit in ids(visits) {
            passes.visit(Some(id), unit);
        }
        passes.end(id, 1.0)
    }

    fn ahead(passes: &Passes) -> Vec<UnitId> {
        passes.ahead().collect()
    }

    #[test]
    fn the_order_of_a_pass_is_learned() {
        let mut passes = Passes::new(ids(&[0, 1, 2, 3]));
        assert_eq!(run(&mut passes, &[2, 0, 1, 2]), Some(1));
        assert_eq!(ahead(&passes), ids(&[2, 0, 1, 2]));
        assert!(passes.kinds().is_unplanned());
        passes.set_planned();
        assert_eq!(run(&mut passes, &[2, 0, 1, 2]), Some(1));
        assert!(!passes.kinds().is_unplanned());
    }

    #[test]
    fn a_visit_out_of_order_corrects_the_expected_order() {
        let mut passes = Passes::new(ids(&[0, 1, 2, 3]));
        let id = passes.begin();
        passes.visit(Some(id), UnitId(2));
        assert_eq!(ahead(&passes), ids(&[0, 1, 3, 2]));
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
        passes.end(id, 1.0);
        assert_eq!(passes.ahead().next(), Some(UnitId(0)));
    }

    #[test]
    fn a_longer_pass_extends_the_order() {
        let mut passes = Passes::new(ids(&[0, 1]));
        assert_eq!(run(&mut passes, &[0, 1, 0, 1, 0]), Some(1));
        assert_eq!(ahead(&passes), ids(&[0, 1, 0, 1, 0]));
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
        assert_eq!((passes.end(a, 1.0), passes.end(b, 1.0)), (None, None));
        assert_eq!(ahead(&passes), ids(&[0, 1, 2]));
    }

    #[test]
    fn consecutive_uses_of_a_unit_are_one_visit() {
        let mut passes = Passes::new(ids(&[0, 1]));
        assert_eq!(run(&mut passes, &[0, 0, 0, 1, 1, 0]), Some(1));
        assert_eq!(ahead(&passes), ids(&[0, 1, 0]));
    }

    #[test]
    fn an_encoder_and_its_decoder_are_both_expected() {
        let mut passes = Passes::new(ids(&[0, 1, 2, 3, 4]));
        for _ in 0..2 {
            assert_eq!(run(&mut passes, &[0, 1]), Some(1));
            for _ in 0..4 {
                assert_eq!(run(&mut passes, &[2, 3, 4]), Some(2));
            }
        }
        assert_eq!(ahead(&passes), ids(&[2, 3, 4]), "a decoder follows a decoder most often");
        let encoder = passes.begin();
        passes.visit(Some(encoder), UnitId(0));
        assert_eq!(ahead(&passes), ids(&[1, 2, 3, 4]), "the first unit shows what runs");
        assert_eq!(passes.next_use(UnitId(0)), usize::MAX);
        passes.visit(Some(encoder), UnitId(1));
        assert_eq!(ahead(&passes), ids(&[2, 3, 4]));
    }

    #[test]
    fn many_kinds_in_turn_are_not_planned_for_each() {
        let mut passes = Passes::new(ids(&[0, 1]));
        run(&mut passes, &[0]);
        assert!(passes.kinds().is_unplanned(), "the first pass shows the order");
        let mut plans = 0;
        for round in 0..100 {
            if passes.kinds().is_unplanned() {
                plans += 1;
                passes.set_planned();
            }
            run(&mut passes, &[round % 20, round % 20 + 1]);
        }
        assert!(plans < 10, "{plans} plans for 100 passes");
    }

    #[test]
    fn of_two_kinds_in_turn_one_stays_the_main_one() {
        let mut passes = Passes::new(ids(&[0, 1]));
        (0..2).for_each(|unit| _ = run(&mut passes, &[unit]));
        let (main, _) = passes.kinds().main();
        for round in 0..20 {
            run(&mut passes, &[round % 2]);
            assert_eq!(passes.kinds().main().0, main, "round {round}");
        }
    }

    #[test]
    fn prefill_and_decode_are_two_kinds_with_one_order() {
        let mut passes = Passes::new(ids(&[0, 1]));
        for compute_s in [9.0, 1.0, 1.2, 0.9] {
            let id = passes.begin();
            ids(&[0, 1]).into_iter().for_each(|unit| passes.visit(Some(id), unit));
            assert_eq!(passes.end(id, compute_s), Some(if compute_s > 2.0 { 1 } else { 2 }));
        }
        assert_eq!(passes.kinds().main(), (2, &ids(&[0, 1])[..]));
        let others = passes.kinds().others();
        assert_eq!((others.len(), others[0].compute_s), (1, Some(9.0)));
        assert!((0.3..0.34).contains(&others[0].passes), "{others:?}");
    }

    #[test]
    fn units_that_two_passes_leave_out_are_not_expected() {
        let mut passes = Passes::new(ids(&[0, 1, 2]));
        run(&mut passes, &[0]);
        let unvisited: Vec<_> = passes.kinds().others().iter().map(|p| p.order.to_vec()).collect();
        assert_eq!(unvisited, [ids(&[1, 2])], "a decoder may follow");
        run(&mut passes, &[0]);
        assert!(passes.kinds().others().is_empty());
    }

    #[test]
    fn the_rarest_of_many_kinds_is_forgotten() {
        let mut passes = Passes::new(ids(&[0]));
        for round in 0..3 {
            for unit in 0..20 {
                run(&mut passes, &[0, unit]);
                run(&mut passes, &[0]);
            }
            let (_, order) = passes.kinds().main();
            assert_eq!(order, ids(&[0]), "round {round}");
        }
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
