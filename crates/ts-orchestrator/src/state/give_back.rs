// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gives memory back as soon as the limit falls, before there is a plan for the new limit.

use std::collections::HashSet;
use std::sync::Arc;

use ts_streams::Device;

use crate::context::EngineContext;
use crate::slot_pool::Slot;
use crate::unit::UnitId;
use crate::unit_memory::UnitMemory;

use super::EngineState;

impl<D: Device> EngineState<D> {
    /// Returns host memory of kept units to the system, until the limit is met. Takes units that no
    /// thread uses, and first those that passes need last. These units are streamed then. If too
    /// few are unused, the plan for the new limit returns the rest.
    pub(crate) fn give_back(&mut self, context: &EngineContext<D>) {
        if context.slots.is_staged() {
            return;
        }
        let mut excess = context.slots.left_bytes().saturating_sub(self.planning.slot_limit);
        let ahead: Vec<UnitId> = self.passes.ahead().collect();
        let expected: HashSet<UnitId> = ahead.iter().copied().collect();
        let all = self.units.ids();
        let others = all.filter(|id| !expected.contains(id));
        for id in others.chain(ahead.into_iter().rev()) {
            if excess == 0 {
                return;
            }
            excess = excess.saturating_sub(self.give_back_unit(context, id));
        }
    }

    /// Returns the memory of a kept unit to the system, unless it is in use. Returns its size in
    /// bytes.
    fn give_back_unit(&mut self, context: &EngineContext<D>, id: UnitId) -> usize {
        let unit = &mut self.units[id];
        let kept = if unit.is_evictable() {
            let in_slot = unit.is_kept();
            let reserved = unit.demote();
            let present = in_slot.then(|| self.take_present(id)).flatten();
            let present = present.and_then(Arc::into_inner).and_then(UnitMemory::into_host);
            present.or_else(|| reserved.and_then(Slot::into_host))
        } else if unit.is_on_host() {
            unit.take_from_host()
        } else {
            return 0;
        };
        let given_back = kept.and_then(|buffer| context.slots.give_back(buffer).ok());
        let Some(bytes) = given_back else { return 0 };
        self.planning.set_resized();
        bytes
    }

    /// Takes memory again that was returned to the system, up to the larger of the limit and the
    /// limit that the plan was made for. What is left may be too fragmented for the plan. Returns
    /// whether there was any. The next plan returns what exceeds the limit.
    pub(super) fn take_back(&mut self, context: &EngineContext<D>) -> bool {
        let took = context.slots.take_back(self.planning.larger_limit());
        if took {
            self.planning.set_resized();
            self.retry_prefetch();
        }
        took
    }
}
