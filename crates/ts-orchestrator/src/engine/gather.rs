// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gathers rows of tables: reads them into memory that the caller gets.

use std::ops::Range;
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
use crate::state::{EngineState, Shortage};
use crate::table::{Table, TableId};
use crate::trace::{TraceEvent, TraceKind};

use super::acquire::SHORTAGE_TRIES;
use super::{Engine, InterruptTimer, Shared, StateGuard};

impl<D: Device> Engine<D> {
    /// Reads rows of a [table](crate::EngineConfig::tables), in this order, and blocks until they
    /// are in memory.
    ///
    /// The reads go out together, and rows with consecutive numbers are read in one piece. The rows
    /// lie one after the other in host memory, at an address that is a multiple of
    /// [`PHASE_ALIGN`](crate::PHASE_ALIGN). They take memory of the budget until the result is
    /// dropped, and units are evicted to free it. On a device with its own memory, they take
    /// staging memory. Copies of the last rows stay in host memory, a 256th of the budget and at
    /// most 1 MiB, and are not read again. Only compressed rows are compared with their checksums.
    ///
    /// # Errors
    /// - [`Error::NoSuchTable`] and [`Error::NoSuchRow`] if they do not exist.
    /// - [`Error::NeverFits`] if the rows are larger than the engine's memory for units, or
    ///   [`Error::StagingFull`] if they are larger than the staging memory.
    /// - The errors of [`acquire`](Self::acquire) for reads and for lack of memory.
    ///
    /// # Examples
    /// ```
    /// # use ts_orchestrator::ts_format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};
    /// # use ts_orchestrator::ts_io::Source;
    /// # use ts_orchestrator::{Engine, EngineConfig, Phase, UnitTensor};
    /// use ts_orchestrator::{Table, TableId, never_interrupt};
    ///
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("embedding");
    /// # std::fs::write(&path, (0..4000).map(|i| (i / 4) as u8).collect::<Vec<u8>>())?;
    /// # let parts = vec![ByteRange { file: FileId(0), offset: 0, len: 4000 }];
    /// # let meta = TensorMeta { dtype: Dtype::U8, shape: vec![1000, 4] };
    /// # let entry = TensorEntry { meta, parts };
    /// # let (digest, chunks) = (None, Vec::new());
    /// # let (name, phase) = ("embedding".into(), Phase::Mapped);
    /// # let tensor = UnitTensor { name, entry, phase, digest, chunks };
    /// // `tensor` has 1000 rows of 4 bytes.
    /// let table = Table::new(tensor).ok_or("not a table")?;
    /// let config = EngineConfig::with_budget(1 << 20).with_tables(vec![table]);
    /// # let unit = ts_orchestrator::Unit::new("none", Vec::new());
    /// # let units = vec![unit];
    /// let engine = Engine::new(units, vec![Source::open(&path)?], config)?;
    /// let rows = engine.gather(TableId(0), &[7, 200], never_interrupt())?;
    /// assert_eq!(rows[..], [7, 7, 7, 7, 200, 200, 200, 200]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn gather(
        &self,
        table: TableId,
        rows: &[u64],
        interrupt: Interrupt<'_>,
    ) -> Result<TensorBytes<D>, Error> {
        let shared = &*self.shared;
        shared.check_rows(table, rows)?;
        let asked_ns = (shared.clock)();
        let mut timer = InterruptTimer::new();
        let mut cached = shared.row_cache.contains(table, rows);
        let row_bytes = shared.tables[table.index()].row_bytes() as usize;
        fill_gaps(rows, &mut cached, shared.context.sizes.alignment / row_bytes);
        let (mut state, prepared, buffer) = loop {
            let prepared = Arc::new(shared.prepare_rows(table, rows, &cached));
            let (state, mut buffer) =
                shared.allocate_for_gather(&prepared, &mut timer, interrupt)?;
            let Placement { offset, len } = prepared.layout.tensors[0];
            if shared.row_cache.copy(table, rows, &cached, &mut buffer[offset..offset + len]) {
                break (state, prepared, buffer);
            }
            // Other rows took the place of some before there was memory.
            cached.fill(false);
        };
        state.counters.gathered_rows += rows.len() as u64;
        state.counters.cached_rows += cached.iter().filter(|&&cached| cached).count() as u64;
        let gathered = (state, prepared, buffer);
        let bytes = shared.finish_gather(gathered, asked_ns, &mut timer, interrupt)?;
        if let Some(bytes) = bytes.on_host() {
            shared.row_cache.add(table, rows, &cached, bytes);
        }
        Ok(bytes)
    }
}

impl<D: Device> Shared<D> {
    /// Checks that a table and its rows exist.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchTable`] or [`Error::NoSuchRow`] if they do not.
    pub(crate) fn check_rows(&self, table: TableId, rows: &[u64]) -> Result<(), Error> {
        let count = self.tables.len();
        let found = self.tables.get(table.index());
        let found = found.ok_or(Error::NoSuchTable { table: table.0, count })?;
        match rows.iter().find(|&&row| row >= found.rows()) {
            Some(&row) => {
                let (table, count) = (found.name().into(), found.rows());
                Err(Error::NoSuchRow { table, row, count })
            }
            None => Ok(()),
        }
    }

    /// Returns ranges of rows of any table, which exist. Blocks until they are read.
    pub(crate) fn read_rows(
        &self,
        table: &Table,
        ranges: &[Range<u64>],
        interrupt: Interrupt<'_>,
    ) -> Result<TensorBytes<D>, Error> {
        let asked_ns = (self.clock)();
        let mut timer = InterruptTimer::new();
        let prepared = Arc::new(self.prepare_ranges(table, ranges));
        let (mut state, buffer) = self.allocate_for_gather(&prepared, &mut timer, interrupt)?;
        state.counters.gathered_rows += prepared.row_count();
        self.finish_gather((state, prepared, buffer), asked_ns, &mut timer, interrupt)
    }

    /// Returns a unit of ranges of rows of any table, which exist.
    pub(crate) fn prepare_ranges(&self, table: &Table, ranges: &[Range<u64>]) -> PreparedUnit {
        let (sources, alignment) = (&self.context.sources, self.context.sizes.alignment);
        prepare(table.select_ranges(ranges), sources, alignment)
    }

    /// Reads the rows of a unit for which there is memory. Blocks until they are read.
    fn finish_gather(
        &self,
        (mut state, prepared, buffer): (StateGuard<'_, D>, Arc<PreparedUnit>, Buffer),
        asked_ns: u64,
        timer: &mut InterruptTimer,
        interrupt: Interrupt<'_>,
    ) -> Result<TensorBytes<D>, Error> {
        let load = self.start_rows(&mut state, &prepared, buffer);
        loop {
            if let Some(rows) = state.transfers.gathers.take(load) {
                return Ok(self.take_rows(&mut state, &prepared, rows?, asked_ns));
            }
            let what = || format!("rows `{}`", prepared.unit.name);
            state = match self.wait(state, timer, interrupt, what) {
                Ok(state) => state,
                Err(error) => {
                    self.lock().transfers.gathers.give_up(load);
                    return Err(error);
                }
            };
        }
    }

    /// Starts to read the rows of a unit. Returns the number of the load.
    pub(super) fn start_rows(
        &self,
        state: &mut EngineState<D>,
        prepared: &Arc<PreparedUnit>,
        buffer: Buffer,
    ) -> u32 {
        state.counters.gathered_bytes += prepared.read_bytes;
        state.start_gather(&self.context, prepared, buffer, (self.clock)())
    }

    /// Returns rows that were read into a slot.
    pub(super) fn take_rows(
        &self,
        state: &mut EngineState<D>,
        prepared: &PreparedUnit,
        slot: Slot<D>,
        asked_ns: u64,
    ) -> TensorBytes<D> {
        let Slot::Host(buffer) = slot else { unreachable!("rows are gathered into host memory") };
        let call_ns = (self.clock)().saturating_sub(asked_ns);
        state.pass_log.count_call(call_ns, call_ns);
        if let Some(trace) = &mut state.trace {
            let event = TraceEvent::new(TraceKind::Wait, asked_ns, asked_ns + call_ns);
            trace.add_on(std::thread::current().id(), event);
        }
        let memory = Arc::new(self.context.slots.gathered(buffer, self.context.events.clone()));
        state.transfers.gathers.add(prepared, &memory);
        TensorBytes::new(memory, prepared.layout.tensors[0])
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
        let (mut state, mut tries) = (self.lock(), 0);
        let this_thread = std::thread::current().id();
        loop {
            match self.try_allocate_for_gather(&mut state, prepared, &mut tries) {
                Ok(None) => {}
                allocated => {
                    state.waiters.for_memory.remove(&this_thread);
                    return Ok((state, allocated?.expect("`None` is handled above")));
                }
            }
            state.waiters.for_memory.insert(this_thread);
            let what = || format!("rows `{}`", prepared.unit.name);
            state = match self.wait(state, timer, interrupt, what) {
                Ok(state) => state,
                Err(error) => {
                    self.lock().waiters.for_memory.remove(&this_thread);
                    return Err(error);
                }
            };
        }
    }

    /// Allocates memory for rows if there is any. Evicts units if necessary. If only the caller can
    /// free memory, that is an error after some tries.
    pub(super) fn try_allocate_for_gather(
        &self,
        state: &mut EngineState<D>,
        prepared: &PreparedUnit,
        tries: &mut u32,
    ) -> Result<Option<Buffer>, Error> {
        let slot_limit = state.planning.slot_limit;
        let mut capacity_bytes = self.context.slots.host.stats().capacity_bytes;
        if !self.context.slots.is_staged() {
            capacity_bytes = capacity_bytes.min(slot_limit);
        }
        let (unit, needed_bytes) = (prepared.unit.name.clone(), prepared.slot_bytes);
        if needed_bytes > capacity_bytes {
            if self.context.slots.is_staged() {
                return Err(Error::StagingFull { unit });
            }
            let budget_bytes = self.budget.limit_bytes() - self.slot_budget + slot_limit;
            return Err(Error::NeverFits(NeverFits {
                budget_bytes,
                largest_unit: unit,
                largest_bytes: needed_bytes,
                smallest_budget_bytes: self.overhead.budget_for(needed_bytes, &self.tables),
            }));
        }
        let error = match state.allocate_on_host(&self.context, prepared, (self.clock)()) {
            Ok(buffer) => return Ok(Some(buffer)),
            Err(Shortage::Temporary) => return Ok(None),
            Err(Shortage::StagingFull) => Error::StagingFull { unit },
            Err(Shortage::Device(error)) => Error::device(&unit, error),
            Err(Shortage::Deadlock { holders }) => {
                Error::Deadlock { unit, needed_bytes, holders: holders.join(", ") }
            }
            Err(Shortage::StillReferenced { bytes, holders }) => {
                let (held_bytes, holders) = (bytes, holders.join(", "));
                Error::StillReferenced { unit, needed_bytes, held_bytes, holders }
            }
        };
        // Another thread may be about to drop the last reference, so the call tries again before
        // this is an error.
        if *tries >= SHORTAGE_TRIES {
            return Err(error);
        }
        *tries += 1;
        Ok(None)
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
