// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gathers rows of tables: reads them into memory that the caller gets.

use std::sync::Arc;

use ts_format::FileId;
use ts_pool::Buffer;
use ts_streams::Device;

use crate::Error;
use crate::config::Interrupt;
use crate::layout::Placement;
use crate::lease::TensorBytes;
use crate::plan::NeverFits;
use crate::prepared::PreparedUnit;
use crate::sizing::prepare;
use crate::slot_pool::Slot;
use crate::state::Shortage;
use crate::table::TableId;
use crate::trace::{TraceEvent, TraceKind};

use super::acquire::SHORTAGE_TRIES;
use super::{EngineInner, InterruptTimer, StateGuard};

impl<D: Device> EngineInner<D> {
    /// Returns rows of a table, which exist. Blocks until those that are not cached are read.
    pub(crate) fn gather(
        &self,
        table: TableId,
        rows: &[u64],
        interrupt: Interrupt<'_>,
    ) -> Result<TensorBytes<D>, Error> {
        let asked_ns = (self.clock)();
        let mut timer = InterruptTimer::new();
        let mut cached = self.row_cache.contains(table, rows);
        let row_bytes = self.tables[table.index()].row_bytes() as usize;
        fill_gaps(rows, &mut cached, self.context.sizes.alignment / row_bytes);
        let (mut state, prepared, buffer) = loop {
            let prepared = Arc::new(self.prepare_rows(table, rows, &cached));
            let (state, mut buffer) = self.allocate_for_gather(&prepared, &mut timer, interrupt)?;
            let Placement { offset, len } = prepared.layout.tensors[0];
            if self.row_cache.copy(table, rows, &cached, &mut buffer[offset..offset + len]) {
                break (state, prepared, buffer);
            }
            // Other rows took the place of some before there was memory.
            cached.fill(false);
        };
        let load = state.start_gather(&self.context, &prepared, buffer, (self.clock)());
        state.counters.gathered_rows += rows.len() as u64;
        state.counters.cached_rows += cached.iter().filter(|&&cached| cached).count() as u64;
        state.counters.gathered_bytes += prepared.read_bytes;
        loop {
            if let Some(result) = state.take_gathered(load) {
                let Slot::Host(buffer) = result? else {
                    unreachable!("rows are gathered into host memory")
                };
                let place = prepared.layout.tensors[0];
                let bytes = &buffer[place.offset..place.offset + place.len];
                self.row_cache.add(table, rows, &cached, bytes);
                let call_ns = (self.clock)().saturating_sub(asked_ns);
                state.pass_log.count_call(call_ns, call_ns);
                if let Some(trace) = &mut state.trace {
                    let event = TraceEvent::new(TraceKind::Wait, asked_ns, asked_ns + call_ns);
                    trace.add_on(std::thread::current().id(), event);
                }
                let memory = self.context.slots.gathered(buffer, self.context.events.clone());
                let memory = Arc::new(memory);
                state.add_gathered(&prepared, &memory);
                return Ok(TensorBytes::new(memory, place));
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

    /// Returns a unit of these rows, which reads only those that are not cached.
    fn prepare_rows(&self, table: TableId, rows: &[u64], cached: &[bool]) -> PreparedUnit {
        let (sources, alignment) = (&self.context.sources, self.context.sizes.alignment);
        let table = &self.tables[table.index()];
        let mut prepared = prepare(table.select(rows, cached), sources, alignment);
        if cached.contains(&true) {
            let begin = prepared.layout.tensors[0].offset;
            // A read in place begins before its first row.
            let row =
                |slot_offset: usize| slot_offset.saturating_sub(begin) / table.row_bytes() as usize;
            prepared.layout.reads.retain(|read| !cached[row(read.slot_offset)]);
            let file_len = |file: FileId| sources[file.0 as usize].len();
            prepared.read_bytes = prepared.layout.read_bytes(alignment, file_len);
            // One range can be read in place, with bytes before it, if none of it is cached. A
            // refusal must not depend on the cache.
            if rows.windows(2).all(|pair| pair[0] + 1 == pair[1]) {
                let whole = table.select(rows, &vec![false; rows.len()]);
                let whole_bytes = prepare(whole, sources, alignment).slot_bytes;
                prepared.slot_bytes = prepared.slot_bytes.max(whole_bytes);
            }
        }
        prepared
    }

    /// Blocks until there is memory for the rows. Evicts units if necessary.
    fn allocate_for_gather(
        &self,
        prepared: &PreparedUnit,
        timer: &mut InterruptTimer,
        interrupt: Interrupt<'_>,
    ) -> Result<(StateGuard<'_, D>, Buffer), Error> {
        let slot_limit = self.lock().slot_limit;
        let mut capacity_bytes = self.context.slots.host.stats().capacity_bytes;
        if !self.context.slots.is_staged() {
            capacity_bytes = capacity_bytes.min(slot_limit);
        }
        let needed_bytes = prepared.slot_bytes;
        if needed_bytes > capacity_bytes {
            if self.context.slots.is_staged() {
                return Err(Error::StagingFull { unit: prepared.unit.name.clone() });
            }
            let budget_bytes = self.budget.limit_bytes() - self.slot_budget + slot_limit;
            return Err(Error::NeverFits(NeverFits {
                budget_bytes,
                largest_unit: prepared.unit.name.clone(),
                largest_bytes: needed_bytes,
                smallest_budget_bytes: self.overhead.budget_for(needed_bytes, &self.tables),
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

/// Clears the flags of up to `most` rows between other rows of the same range, because one read of
/// them all is faster than two.
fn fill_gaps(rows: &[u64], cached: &mut [bool], most: usize) {
    let mut begin = 0;
    while begin < cached.len() {
        let same = |&at: &usize| {
            at < rows.len() && cached[at] == cached[begin] && rows[at] == rows[at - 1] + 1
        };
        let end = (begin + 1..).take_while(same).last().unwrap_or(begin) + 1;
        let between = begin > 0
            && end < rows.len()
            && rows[begin] == rows[begin - 1] + 1
            && rows[end] == rows[end - 1] + 1;
        if cached[begin] && between && end - begin <= most {
            cached[begin..end].fill(false);
        }
        begin = end;
    }
}

#[cfg(test)]
mod tests {
    use super::fill_gaps;

    #[test]
    fn short_gaps_are_read() {
        let gaps = |rows: &[u64], flags: &str, most| {
            let mut cached: Vec<bool> = flags.chars().map(|flag| flag == 'c').collect();
            fill_gaps(rows, &mut cached, most);
            cached.iter().map(|cached| if *cached { 'c' } else { '-' }).collect::<String>()
        };
        assert_eq!(gaps(&[1, 2, 3, 4, 5], "-c-c-", 1), "-----");
        assert_eq!(gaps(&[1, 2, 3, 4, 5], "-cc--", 1), "-cc--");
        assert_eq!(gaps(&[1, 2, 3, 4, 5], "-cc--", 2), "-----");
        // At the ends, and between rows that are not neighbors.
        assert_eq!(gaps(&[1, 2, 3], "c-c", 4), "c-c");
        assert_eq!(gaps(&[1, 3, 4], "-c-", 4), "-c-");
        assert_eq!(gaps(&[1, 2, 4], "-c-", 4), "-c-");
        assert_eq!(gaps(&[3, 3, 3], "-c-", 4), "-c-");
        assert_eq!(gaps(&[], "", 4), "");
    }
}
