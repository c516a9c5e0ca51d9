// SPDX-License-Identifier: MIT OR Apache-2.0
//! The units of an engine, by id.

use std::collections::BTreeSet;
use std::ops::{Index, IndexMut};
use std::slice;

use ts_streams::Device;

use crate::stats::UnitStats;
use crate::unit::UnitId;
use crate::unit_set::UnitSet;

use super::unit_state::UnitState;

/// The units of an engine.
#[derive(Debug)]
pub(crate) struct UnitTable<D: Device> {
    units: Vec<UnitState<D>>,
    /// The streamed units, except routed ones, that are present and that no thread uses or waits
    /// for.
    pub(super) idle: UnitSet,
}

impl<D: Device> UnitTable<D> {
    /// Creates a table of units that are in storage, with these statistics.
    pub(super) fn new(stats: impl Iterator<Item = UnitStats>) -> Self {
        let units: Vec<_> = stats.map(UnitState::new).collect();
        Self { idle: UnitSet::new(units.len()), units }
    }

    pub(super) fn len(&self) -> usize {
        self.units.len()
    }

    /// Returns the ids, in ascending order.
    pub(super) fn ids(&self) -> impl Iterator<Item = UnitId> + use<D> {
        (0..self.units.len() as u32).map(UnitId)
    }

    /// Returns the units, in the order of their ids.
    pub(crate) fn iter(&self) -> slice::Iter<'_, UnitState<D>> {
        self.units.iter()
    }

    /// Like [`iter`](Self::iter).
    pub(super) fn iter_mut(&mut self) -> slice::IterMut<'_, UnitState<D>> {
        self.units.iter_mut()
    }

    /// Returns the last unit of which this is true.
    pub(super) fn last(&self, is_it: impl FnMut(&UnitState<D>) -> bool) -> Option<UnitId> {
        self.units.iter().rposition(is_it).map(|last| UnitId(last as u32))
    }

    pub(crate) fn are_all_present(&self, ids: &[UnitId]) -> bool {
        ids.iter().all(|&id| self[id].is_present())
    }

    pub(crate) fn is_any_absent(&self, ids: &[UnitId]) -> bool {
        ids.iter().any(|&id| self[id].is_absent())
    }

    /// Returns those units that are neither present nor being loaded, without duplicates.
    pub(crate) fn absent(&self, ids: &[UnitId]) -> Vec<UnitId> {
        BTreeSet::from_iter(ids.iter().copied().filter(|&id| self[id].is_absent()))
            .into_iter()
            .collect()
    }
}

impl<D: Device> Index<UnitId> for UnitTable<D> {
    type Output = UnitState<D>;

    fn index(&self, id: UnitId) -> &UnitState<D> {
        &self.units[id.index()]
    }
}

impl<D: Device> IndexMut<UnitId> for UnitTable<D> {
    fn index_mut(&mut self, id: UnitId) -> &mut UnitState<D> {
        &mut self.units[id.index()]
    }
}
