// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gathers rows of tables: reads them into memory that the caller gets.

use std::sync::Arc;

use ts_pool::Buffer;
use ts_streams::Device;

use crate::Error;
use crate::config::Interrupt;
use crate::lease::TensorBytes;
use crate::plan::NeverFits;
use crate::prepared::PreparedUnit;
use crate::sizing::prepare;
use crate::slot_pool::Slot;
use crate::state::Shortage;
use crate::table::TableId;

use super::acquire::SHORTAGE_TRIES;
use super::{EngineInner, InterruptTimer, StateGuard};

impl<D: Device> EngineInner<D> {
    /// Reads rows of a table. Blocks. The rows exist.
    pub(crate) fn gather(
        &self,
        table: TableId,
        rows: &[u64],
        interrupt: Interrupt<'_>,
    ) -> Result<TensorBytes<D>, Error> {
        let unit = self.tables[table.index()].select(rows);
        let prepared = Arc::new(prepare(unit, &self.context.sources, self.context.sizes.alignment));
        let mut timer = InterruptTimer::new();
        let (mut state, buffer) = self.allocate_for_gather(&prepared, &mut timer, interrupt)?;
        let load = state.start_gather(&self.context, &prepared, buffer, (self.clock)());
        state.counters.gathered_rows += rows.len() as u64;
        state.counters.gathered_bytes += prepared.read_bytes;
        loop {
            if let Some(result) = state.take_gathered(load) {
                let Slot::Host(buffer) = result? else {
                    unreachable!("rows are gathered into host memory")
                };
                let memory = self.context.slots.gathered(buffer, self.context.events.clone());
                let memory = Arc::new(memory);
                state.add_gathered(&prepared, &memory);
                return Ok(TensorBytes::new(memory, prepared.layout.tensors[0]));
            }
            let what = || format!("rows `{}`", prepared.unit.name);
            state = match self.wait(state, &mut timer, interrupt, what) {
                Ok(state) => state,
                Err(error) => {
                    self.lock().gathers.remove(&load);
                    return Err(error);
                }
            };
        }
    }

    /// Blocks until there is memory for the rows. Evicts units if necessary.
    fn allocate_for_gather(
        &self,
        prepared: &PreparedUnit,
        timer: &mut InterruptTimer,
        interrupt: Interrupt<'_>,
    ) -> Result<(StateGuard<'_, D>, Buffer), Error> {
        let (capacity_bytes, needed_bytes) =
            (self.context.slots.host.stats().capacity_bytes, prepared.slot_bytes);
        if needed_bytes > capacity_bytes {
            if self.context.slots.is_staged() {
                return Err(Error::StagingFull { unit: prepared.unit.name.clone() });
            }
            let budget_bytes = self.budget.limit_bytes();
            return Err(Error::NeverFits(NeverFits {
                budget_bytes,
                largest_unit: prepared.unit.name.clone(),
                largest_bytes: needed_bytes,
                smallest_budget_bytes: needed_bytes + (budget_bytes - self.slot_budget),
            }));
        }
        let (mut state, mut tries) = (self.lock(), 0);
        let this_thread = std::thread::current().id();
        loop {
            let now_ns = (self.clock)();
            let shortage = match state.allocate_on_host(&self.context, prepared, now_ns) {
                Ok(buffer) => {
                    state.waiting_for_memory.remove(&this_thread);
                    return Ok((state, buffer));
                }
                Err(shortage) => shortage,
            };
            let unit = prepared.unit.name.clone();
            let error = match shortage {
                Shortage::Temporary => None,
                Shortage::StagingFull => Some(Error::StagingFull { unit }),
                Shortage::Device(error) => Some(Error::device(&unit, error)),
                Shortage::Deadlock { holders } => {
                    Some(Error::Deadlock { unit, needed_bytes, holders: holders.join(", ") })
                }
                Shortage::StillReferenced { bytes, holders } => {
                    let (held_bytes, holders) = (bytes, holders.join(", "));
                    Some(Error::StillReferenced { unit, needed_bytes, held_bytes, holders })
                }
            };
            if let Some(error) = error {
                // Another thread may be about to drop the last reference, so the call tries again
                // before this is an error.
                if tries >= SHORTAGE_TRIES {
                    state.waiting_for_memory.remove(&this_thread);
                    return Err(error);
                }
                tries += 1;
            }
            state.waiting_for_memory.insert(this_thread);
            let what = || format!("rows `{}`", prepared.unit.name);
            state = match self.wait(state, timer, interrupt, what) {
                Ok(state) => state,
                Err(error) => {
                    self.lock().waiting_for_memory.remove(&this_thread);
                    return Err(error);
                }
            };
        }
    }
}
