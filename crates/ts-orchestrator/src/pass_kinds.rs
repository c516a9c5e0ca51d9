// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kinds of passes that a model makes, how often, and which follows which.
//!
//! Two passes are of the same kind if they visit the same units in the same order, and compute for
//! about as long. An encoder and its decoder are two kinds, and so are prefill and decode. A plan
//! counts each kind as often as it runs.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::plan::OtherPass;
use crate::unit::UnitId;

/// The most kinds that are remembered.
const KEPT: usize = 8;
/// Passes with the same order are of one kind if none computes more than this many times as long
/// as the shortest.
const LIKE: f64 = 3.0;
/// Durations of computations that differ by less are the same, in seconds.
const SAME_S: f64 = 1e-3;
/// What is left of the weight of a kind after a pass of another kind.
const DECAY: f64 = 1.0 - 1.0 / 64.0;
/// The most kinds, besides the most frequent one, that count in plans.
const PLANNED: usize = 3;
/// A kind counts in plans if at least this share of the passes is of it.
const COUNTS: f64 = 0.01;
/// A kind is clearly more frequent than another one if its weight is this many times as large.
const CLEARLY: f64 = 1.5;
/// After this many passes, units that none has visited do not count any more.
const SHOWS: u64 = 2;

/// The kinds of passes that were seen. Before the first pass, one is expected.
#[derive(Debug)]
pub(crate) struct PassKinds {
    /// Never empty. The first one has the number 0, and is the expected pass.
    kinds: Vec<PassKind>,
    /// The number of the kind of the latest pass.
    latest: u64,
    /// The number of the most frequent kind.
    main: u64,
    last_number: u64,
    passes: u64,
    /// How many passes there were when the plan was last considered.
    considered: u64,
}

#[derive(Debug)]
struct PassKind {
    number: u64,
    order: Arc<[UnitId]>,
    /// The duration of the shortest computation, in seconds.
    compute_s: f64,
    /// The number of passes. Those that ran longer ago count less.
    weight: f64,
    /// The kinds of the passes that came next, by number, and their weights.
    followers: Vec<(u64, f64)>,
    /// Whether there was more than one pass.
    repeated: bool,
    /// Whether the plan was made for this kind too.
    planned: bool,
}

impl PassKinds {
    /// Returns a single kind, of a pass that is expected to have this order.
    pub(crate) fn expecting(order: Vec<UnitId>) -> Self {
        let expected = PassKind {
            number: 0,
            order: order.into(),
            compute_s: 0.0,
            weight: 1.0,
            followers: Vec::new(),
            repeated: false,
            planned: true,
        };
        let kinds = vec![expected];
        Self { kinds, latest: 0, main: 0, last_number: 0, passes: 0, considered: 0 }
    }

    /// Records a pass that ran alone. Returns the number of its kind.
    pub(crate) fn record(&mut self, order: &[UnitId], compute_s: f64) -> u64 {
        self.passes += 1;
        self.kinds.iter_mut().for_each(|kind| kind.weight *= DECAY);
        let number = self.number_of(order, compute_s);
        let kind = self.kind_mut(number).expect("it is one of the kinds");
        kind.compute_s = kind.compute_s.min(compute_s);
        kind.repeated = kind.weight > 0.0;
        kind.weight += 1.0;
        self.expect_only_unvisited();
        self.update_main();
        let before = std::mem::replace(&mut self.latest, number);
        if let Some(before) = self.kind_mut(before) {
            before.followers.iter_mut().for_each(|(_, weight)| *weight *= DECAY);
            match before.followers.iter_mut().find(|(follower, _)| *follower == number) {
                Some((_, weight)) => *weight += 1.0,
                None => before.followers.push((number, 1.0)),
            }
        }
        number
    }

    /// Returns the number of the kind of such a pass, which can be a new one.
    fn number_of(&mut self, order: &[UnitId], compute_s: f64) -> u64 {
        let is_like = |kind: &&PassKind| {
            let (less, more) = (kind.compute_s.min(compute_s), kind.compute_s.max(compute_s));
            kind.number > 0 && *kind.order == *order && more <= LIKE * less + SAME_S
        };
        if let Some(kind) = self.kinds.iter().find(is_like) {
            return kind.number;
        }
        self.last_number += 1;
        if self.kinds.len() > KEPT {
            let rarest = (1..self.kinds.len())
                .min_by(|&a, &b| self.kinds[a].weight.total_cmp(&self.kinds[b].weight));
            self.kinds.remove(rarest.expect("there are several"));
        }
        let known = self.kinds.iter().find(|kind| *kind.order == *order);
        let order = known.map_or_else(|| order.into(), |kind| Arc::clone(&kind.order));
        let (number, followers) = (self.last_number, Vec::new());
        let (weight, repeated, planned) = (0.0, false, false);
        self.kinds.push(PassKind {
            number,
            order,
            compute_s,
            weight,
            followers,
            repeated,
            planned,
        });
        number
    }

    /// Removes the units from the expected pass that a pass has visited, and after a few passes all
    /// units.
    fn expect_only_unvisited(&mut self) {
        let visited: BTreeSet<UnitId> =
            self.kinds[1..].iter().flat_map(|kind| kind.order.iter().copied()).collect();
        let still_expected = self.passes < SHOWS;
        let expected = &mut self.kinds[0];
        let left = expected.order.iter().copied();
        let left = left.filter(|unit| still_expected && !visited.contains(unit));
        expected.order = left.collect();
        expected.weight = if expected.order.is_empty() { 0.0 } else { 1.0 };
    }

    fn kind_mut(&mut self, number: u64) -> Option<&mut PassKind> {
        self.kinds.iter_mut().find(|kind| kind.number == number)
    }

    fn kind(&self, number: u64) -> Option<&PassKind> {
        self.kinds.iter().find(|kind| kind.number == number)
    }

    /// Returns the order of the pass that is expected next, after a pass of this kind.
    pub(crate) fn after(&self, number: u64) -> Option<(u64, &Arc<[UnitId]>)> {
        let kind = self.kind(number)?;
        let known = kind.followers.iter().filter(|(follower, _)| self.kind(*follower).is_some());
        let next = known.max_by(|a, b| a.1.total_cmp(&b.1)).map_or(number, |(next, _)| *next);
        self.kind(next).map(|next| (next.number, &next.order))
    }

    /// Returns the most frequent kind of pass that begins with these visits.
    pub(crate) fn beginning_with(&self, visits: &[UnitId]) -> Option<(u64, &Arc<[UnitId]>)> {
        let kinds = self.kinds.iter().filter(|kind| kind.order.starts_with(visits));
        let likely = kinds.max_by(|a, b| a.weight.total_cmp(&b.weight))?;
        Some((likely.number, &likely.order))
    }

    /// Returns the number and the order of the most frequent kind.
    pub(crate) fn main(&self) -> (u64, &[UnitId]) {
        let main = self.main_kind();
        (main.number, &main.order)
    }

    fn main_kind(&self) -> &PassKind {
        self.kind(self.main).unwrap_or(&self.kinds[0])
    }

    /// Makes another kind the most frequent one, if it clearly is. Two that alternate would
    /// otherwise take turns.
    fn update_main(&mut self) {
        let seen = self.kinds[1..].iter().max_by(|a, b| a.weight.total_cmp(&b.weight));
        let Some(most) = seen else { return };
        let before = self.kind(self.main).filter(|kind| kind.number > 0);
        if before.is_none_or(|before| most.weight > CLEARLY * before.weight) {
            self.main = most.number;
        }
    }

    /// Returns the other kinds that count in plans, the most frequent first.
    pub(crate) fn others(&self) -> Vec<OtherPass> {
        let main = self.main_kind();
        let total: f64 = self.kinds.iter().map(|kind| kind.weight).sum();
        let counts = |kind: &&PassKind| {
            kind.number != main.number && kind.weight > 0.0 && kind.weight >= COUNTS * total
        };
        let other = |kind: &PassKind| OtherPass {
            order: Arc::clone(&kind.order),
            compute_s: (kind.number > 0).then_some(kind.compute_s),
            passes: kind.weight / main.weight,
        };
        let mut others: Vec<&PassKind> = self.kinds.iter().filter(counts).collect();
        others.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        others.into_iter().take(PLANNED).map(other).collect()
    }

    /// Returns whether a plan for all passes so far may be another one than for those that there
    /// were when the plan was considered.
    pub(crate) fn is_unplanned(&self) -> bool {
        let several = self.kinds.iter().filter(|kind| kind.weight > 0.0).count() > 1;
        // A model whose parts are called one by one has too many kinds to plan for each.
        let unplanned = |kind: &PassKind| !kind.planned && (kind.repeated || self.passes == 1);
        self.kinds.iter().any(unplanned) || several && self.passes >= 2 * self.considered.max(1)
    }

    /// Records that the plan was considered for all passes so far.
    pub(crate) fn set_planned(&mut self) {
        self.kinds.iter_mut().for_each(|kind| kind.planned = true);
        self.considered = self.passes;
    }
}
