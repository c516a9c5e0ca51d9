// SPDX-License-Identifier: MIT OR Apache-2.0
//! Begins and ends uses of units that are in memory.

use std::sync::Arc;
use std::thread::ThreadId;

use ts_streams::Device;

use crate::trace::{TraceEvent, TraceKind};
use crate::unit::UnitId;
use crate::unit_memory::UnitMemory;

use super::EngineState;

/// So many passes with the current plan are measured use by use, before all units are leased at
/// once.
const MEASURED_PASSES: usize = 4;
/// So often each unit was used before.
const MEASURED_USES: u64 = 2;

impl<D: Device> EngineState<D> {
    /// Returns the memory of units if all of them are present, and marks them as used by this
    /// thread.
    pub(crate) fn take(&mut self, ids: &[UnitId]) -> Option<Vec<Arc<UnitMemory<D>>>> {
        ids.iter().for_each(|&id| self.restore_evicted(id));
        if !self.units.are_all_present(ids) {
            return None;
        }
        ids.iter().map(|&id| self.take_one(id)).collect()
    }

    /// Returns the memory of a unit if it is present, and marks it as used by this thread.
    pub(crate) fn take_one(&mut self, id: UnitId) -> Option<Arc<UnitMemory<D>>> {
        self.restore_evicted(id);
        let unit = &mut self.units[id];
        let memory = Arc::clone(unit.memory()?);
        unit.users.push(std::thread::current().id());
        unit.used_since_load = true;
        Some(memory)
    }

    /// Marks all units as used by this thread, if all are to stay in memory and are there. Returns
    /// their memory.
    ///
    /// Returns `None` while passes are measured or traced, while the plan is about to change, and
    /// if a unit has to be compared with checksums.
    pub(crate) fn take_all(&mut self) -> Option<Vec<Arc<UnitMemory<D>>>> {
        let measured = self.pass_log.passes_since(self.counters.replans);
        let measures = measured < MEASURED_PASSES || self.trace.is_some();
        let changes = self.planning.is_changing();
        if measures || changes || self.passes.running() > 1 {
            return None;
        }
        let ids = || self.units.ids();
        let stays = |id: UnitId| {
            let unit = &self.units[id];
            unit.is_kept()
                && unit.stats.uses >= MEASURED_USES
                && unit.memory().is_some_and(|memory| !memory.is_sealed())
        };
        if !ids().all(stays) {
            return None;
        }
        let all: Vec<_> = ids().collect();
        all.iter().for_each(|&id| self.no_longer_idle(id));
        self.take(&all)
    }

    /// Ends one use of a unit by `user`. Evicts the unit if it is idle now, unless its next visit
    /// is within the horizon.
    ///
    /// `used_ns` is the duration of the use, if the lease was one.
    pub(crate) fn release(
        &mut self,
        id: UnitId,
        user: ThreadId,
        used_ns: Option<u64>,
        now_ns: u64,
    ) {
        if let Some(used_ns) = used_ns {
            if let Some(trace) = &mut self.trace {
                let begin_ns = now_ns.saturating_sub(used_ns);
                trace.add_on(user, TraceEvent::new(TraceKind::Use, begin_ns, now_ns).of(Some(id)));
            }
            self.units[id].count_use(used_ns);
        }
        let users = &mut self.units[id].users;
        let at = users
            .iter()
            .position(|&u| u == user)
            .expect("a lease is released for the thread that acquired it");
        users.swap_remove(at);
        self.update_idle(id);
        if self.units.idle.contains(id) && self.passes.next_use(id) >= self.horizon() {
            self.evict(id);
        }
    }
}
