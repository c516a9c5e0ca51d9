// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps copies of the rows of tables that were gathered last.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::table::{Table, TableId};

/// The share of the budget for cached rows is the budget divided by this number, up to
/// [`MOST_BYTES`]. A cached row saves a read but few bytes, so this memory must be small: the same
/// memory saves about as much time if units of the same size stay in it.
const SHARE: usize = 256;
const MOST_BYTES: usize = 1 << 20;
/// The most memory of a cached row besides its bytes: its entries in the list and in the map, which
/// has twice the room so that it never grows.
const ENTRY_BYTES: usize = 96;

/// The cached rows of all tables.
///
/// The rows of a table take turns (the CLOCK algorithm): a new row takes the place of one that was
/// not used since the search last passed it.
#[derive(Debug)]
pub(crate) struct RowCache {
    tables: Vec<Mutex<CachedTable>>,
}

#[derive(Debug)]
struct CachedTable {
    row_bytes: usize,
    /// The most rows that are cached.
    capacity: usize,
    bytes: Vec<u8>,
    rows: Vec<CachedRow>,
    by_row: HashMap<u64, usize>,
    /// The row that the next search for a place looks at first.
    hand: usize,
}

#[derive(Debug, Clone, Copy)]
struct CachedRow {
    row: u64,
    used: bool,
}

impl RowCache {
    /// Returns the memory for cached rows with this budget, in bytes.
    pub(crate) fn bytes(tables: &[Table], budget_bytes: usize) -> usize {
        let rows = capacities(tables, budget_bytes);
        rows.zip(tables).map(|(rows, table)| rows * cost(table)).sum()
    }

    /// Creates an empty cache that takes at most `bytes` bytes, the result of
    /// [`bytes`](Self::bytes) for this budget or 0.
    pub(crate) fn new(tables: &[Table], budget_bytes: usize, bytes: usize) -> Self {
        let budget_bytes = if bytes > 0 { budget_bytes } else { 0 };
        let tables = capacities(tables, budget_bytes).zip(tables).map(|(capacity, table)| {
            Mutex::new(CachedTable {
                row_bytes: table.row_bytes() as usize,
                capacity,
                bytes: Vec::with_capacity(capacity * table.row_bytes() as usize),
                rows: Vec::with_capacity(capacity),
                by_row: HashMap::with_capacity(2 * capacity),
                hand: 0,
            })
        });
        Self { tables: tables.collect() }
    }

    /// Returns for each of these rows whether it is cached.
    pub(crate) fn contains(&self, table: TableId, rows: &[u64]) -> Vec<bool> {
        let table = self.tables[table.index()].lock();
        rows.iter().map(|row| table.by_row.contains_key(row)).collect()
    }

    /// Copies the rows that are flagged in `cached` to their places in `into`, which has room for
    /// all `rows`. Returns `false` if a flagged row has left the cache.
    pub(crate) fn copy(
        &self,
        table: TableId,
        rows: &[u64],
        cached: &[bool],
        into: &mut [u8],
    ) -> bool {
        let mut table = self.tables[table.index()].lock();
        let row_bytes = table.row_bytes;
        let places = rows.iter().zip(cached).zip(into.chunks_exact_mut(row_bytes));
        for ((row, _), place) in places.filter(|((_, cached), _)| **cached) {
            let Some(&index) = table.by_row.get(row) else { return false };
            place.copy_from_slice(&table.bytes[index * row_bytes..][..row_bytes]);
            table.rows[index].used = true;
        }
        true
    }

    /// Adds the rows that are not flagged in `cached`. `bytes` contains all rows, in order.
    pub(crate) fn add(&self, table: TableId, rows: &[u64], cached: &[bool], bytes: &[u8]) {
        let mut table = self.tables[table.index()].lock();
        let row_bytes = table.row_bytes;
        let new = rows.iter().zip(cached).zip(bytes.chunks_exact(row_bytes));
        for ((row, _), bytes) in new.filter(|((_, cached), _)| !**cached) {
            table.add(*row, bytes);
        }
    }
}

impl CachedTable {
    fn add(&mut self, row: u64, bytes: &[u8]) {
        if self.capacity == 0 || self.by_row.contains_key(&row) {
            return;
        }
        let new = CachedRow { row, used: false };
        if self.rows.len() < self.capacity {
            self.by_row.insert(row, self.rows.len());
            self.rows.push(new);
            self.bytes.extend_from_slice(bytes);
            return;
        }
        while std::mem::take(&mut self.rows[self.hand].used) {
            self.hand = (self.hand + 1) % self.capacity;
        }
        let index = self.hand;
        self.by_row.remove(&self.rows[index].row);
        self.by_row.insert(row, index);
        self.rows[index] = new;
        self.bytes[index * self.row_bytes..][..self.row_bytes].copy_from_slice(bytes);
        self.hand = (index + 1) % self.capacity;
    }
}

/// Returns the number of cached rows of each table.
fn capacities(tables: &[Table], budget_bytes: usize) -> impl Iterator<Item = usize> {
    let share = (budget_bytes / SHARE).min(MOST_BYTES) / tables.len().max(1);
    tables.iter().map(move |table| (share / cost(table)).min(table.rows() as usize))
}

fn cost(table: &Table) -> usize {
    table.row_bytes() as usize + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;
    use ts_format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};

    use super::*;
    use crate::unit::{Phase, UnitTensor};

    const ROW: usize = 16;
    const FIRST: TableId = TableId(0);

    fn table(rows: u64) -> Table {
        let len = rows * ROW as u64;
        let meta = TensorMeta { dtype: Dtype::U8, shape: vec![rows, ROW as u64] };
        let entry =
            TensorEntry { meta, parts: vec![ByteRange { file: FileId(0), offset: 0, len }] };
        let (name, phase, digest, chunks) = ("w".into(), Phase::Mapped, None, Vec::new());
        Table::new(UnitTensor { name, entry, phase, digest, chunks }).unwrap()
    }

    /// A cache of the given number of rows, of a table with 1000 rows.
    fn cache(capacity: usize) -> RowCache {
        let (tables, budget) = ([table(1000)], capacity * (ROW + ENTRY_BYTES) * SHARE);
        let bytes = RowCache::bytes(&tables, budget);
        assert_eq!(bytes, capacity * (ROW + ENTRY_BYTES));
        RowCache::new(&tables, budget, bytes)
    }

    /// Gathers a row, of which each byte is the number of the row. Returns whether it was cached.
    fn gather(cache: &RowCache, row: u64) -> bool {
        let cached = cache.contains(FIRST, &[row]);
        let mut bytes = [row as u8; ROW];
        if cached[0] {
            bytes.fill(0);
            assert!(cache.copy(FIRST, &[row], &cached, &mut bytes));
            assert_eq!(bytes, [row as u8; ROW]);
        }
        cache.add(FIRST, &[row], &cached, &bytes);
        cached[0]
    }

    #[test]
    fn rows_that_are_used_again_survive_a_scan() {
        let cache = cache(8);
        for row in [1, 2, 3, 1, 2, 3] {
            gather(&cache, row);
        }
        for row in 100..110 {
            gather(&cache, row);
        }
        assert_eq!([1, 2, 3].map(|row| gather(&cache, row)), [true; 3]);
    }

    #[test]
    fn a_row_that_left_is_reported() {
        let cache = cache(1);
        gather(&cache, 1);
        let cached = cache.contains(FIRST, &[1]);
        gather(&cache, 2);
        assert!(!cache.copy(FIRST, &[1], &cached, &mut [0; ROW]));
    }

    #[test]
    fn a_small_budget_has_no_memory_for_rows() {
        let tables = [table(1000)];
        let bytes = RowCache::bytes(&tables, SHARE * ROW);
        assert_eq!(bytes, 0);
        let cache = RowCache::new(&tables, SHARE * ROW, bytes);
        assert_eq!([5, 5].map(|row| gather(&cache, row)), [false; 2]);
        assert!(RowCache::bytes(&tables, usize::MAX) <= MOST_BYTES);
    }

    proptest! {
        /// Whatever is gathered, the bytes are right and no more rows are cached than fit.
        #[test]
        fn cached_rows_are_the_right_bytes(
            capacity in 1..12usize,
            rows in prop::collection::vec(0..30u64, 1..200),
        ) {
            let cache = cache(capacity);
            let mut seen = HashSet::new();
            for row in rows {
                prop_assert!(!gather(&cache, row) || seen.contains(&row));
                seen.insert(row);
                let table = cache.tables[0].lock();
                prop_assert!(table.rows.len() <= capacity);
                prop_assert_eq!(table.by_row.len(), table.rows.len());
                prop_assert_eq!(table.bytes.len(), table.rows.len() * ROW);
            }
        }
    }
}
