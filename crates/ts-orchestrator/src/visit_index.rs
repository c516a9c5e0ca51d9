// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the positions of a unit in an order of visits.

use crate::unit::UnitId;

/// The positions of each unit in an order of visits.
#[derive(Debug)]
pub(crate) struct VisitIndex {
    /// Where the positions of each unit begin in `positions`. One more than there are units.
    begins: Vec<u32>,
    /// The positions of all units, by unit and then in ascending order.
    positions: Vec<u32>,
}

impl VisitIndex {
    /// Creates the index of an order. Takes time linear in the number of visits and units.
    pub(crate) fn new(order: &[UnitId]) -> Self {
        let units = order.iter().map(|id| id.index() + 1).max().unwrap_or(0);
        let mut begins = vec![0u32; units + 1];
        order.iter().for_each(|id| begins[id.index() + 1] += 1);
        for i in 0..units {
            begins[i + 1] += begins[i];
        }
        let (mut next, mut positions) = (begins.clone(), vec![0; order.len()]);
        for (position, id) in (0u32..).zip(order) {
            let at = &mut next[id.index()];
            positions[*at as usize] = position;
            *at += 1;
        }
        Self { begins, positions }
    }

    /// Returns the first position of a unit that is not before `from`.
    pub(crate) fn next(&self, unit: UnitId, from: usize) -> Option<usize> {
        let [begin, end] = [unit.index(), unit.index() + 1].map(|i| self.begins.get(i).copied());
        let positions = &self.positions[begin? as usize..end? as usize];
        let at = positions.partition_point(|&position| (position as usize) < from);
        positions.get(at).map(|&position| position as usize)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn next_is_the_first_position_from_there(
            order in prop::collection::vec(0u32..12, 0..40),
            unit in 0u32..14,
            from in 0usize..45,
        ) {
            let order: Vec<UnitId> = order.into_iter().map(UnitId).collect();
            let expected = (from..order.len()).find(|&position| order[position] == UnitId(unit));
            prop_assert_eq!(VisitIndex::new(&order).next(UnitId(unit), from), expected);
        }
    }
}
