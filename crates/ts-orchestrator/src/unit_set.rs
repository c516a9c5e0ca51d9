// SPDX-License-Identifier: MIT OR Apache-2.0
//! A set of units. Changes allocate nothing.

use crate::unit::UnitId;

/// A set of units, with a bit for each unit of the engine.
#[derive(Debug)]
pub(crate) struct UnitSet {
    words: Vec<u64>,
}

impl UnitSet {
    /// Creates an empty set for units with ids below `count`.
    pub(crate) fn new(count: usize) -> Self {
        Self { words: vec![0; count.div_ceil(64)] }
    }

    pub(crate) fn insert(&mut self, id: UnitId) {
        self.words[id.index() / 64] |= 1 << (id.index() % 64);
    }

    pub(crate) fn remove(&mut self, id: UnitId) {
        self.words[id.index() / 64] &= !(1 << (id.index() % 64));
    }

    pub(crate) fn contains(&self, id: UnitId) -> bool {
        self.words[id.index() / 64] & (1 << (id.index() % 64)) != 0
    }

    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Returns the units, in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = UnitId> + '_ {
        (0u32..).zip(&self.words).flat_map(|(at, &word)| {
            let bits = std::iter::successors(Some(word), |left| Some(left & left.wrapping_sub(1)));
            let bits = bits.take_while(|&left| left != 0);
            bits.map(move |left| UnitId(64 * at + left.trailing_zeros()))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_holds_the_units_that_a_tree_holds(
            changes in prop::collection::vec((0u32..200, any::<bool>()), 0..100),
        ) {
            let (mut set, mut expected) = (UnitSet::new(200), BTreeSet::new());
            for (unit, inserts) in changes {
                let id = UnitId(unit);
                if inserts {
                    set.insert(id);
                    expected.insert(id);
                } else {
                    set.remove(id);
                    expected.remove(&id);
                }
                prop_assert_eq!(set.contains(id), inserts);
                prop_assert!(set.iter().eq(expected.iter().copied()));
            }
            set.clear();
            prop_assert_eq!(set.iter().next(), None);
        }
    }
}
