// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rows of tables: they are the right bytes, and only they are read.

use std::fs;
use std::sync::Arc;

use crate::testing::{KIB, Model, buffered, config, patience, tensor, with_backend};
use ts_io::Registry;
use ts_io::fault::{Fault, Faults, FaultyProvider};
use ts_orchestrator::{Engine, EngineConfig, ErrorKind, Phase, Prefetch, Table, TableId, UnitId};

const ROW: usize = 1536;
const ROWS: usize = 500;
const UNIT: usize = 64 * KIB;

/// A small linear congruential generator, so that runs are reproducible.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % end
    }
}

/// Four units, and a table in two parts of the file, of which one lies before the other.
fn model() -> (Model, Table) {
    let mut model = Model::new(&[UNIT, UNIT, UNIT, UNIT, ROWS * ROW]);
    let begin = model.units.pop().unwrap().tensors[0].entry.parts[0].offset;
    let (first, second) = (200 * ROW + 100, ROWS * ROW - 200 * ROW - 100);
    let parts = [(begin + second as u64, first), (begin, second)];
    let mut tensor = tensor("table", &parts, Phase::Mapped);
    tensor.entry.meta.shape = vec![ROWS as u64, ROW as u64];
    (model, Table::new(tensor).unwrap())
}

fn content(model: &Model) -> Vec<u8> {
    let begin = 8 + 4 * UNIT;
    let second = ROWS * ROW - 200 * ROW - 100;
    [&model.content[begin + second..], &model.content[begin..begin + second]].concat()
}

fn engine(model: &Model, table: Table, config: EngineConfig) -> Engine {
    model.engine(config.with_tables(vec![table])).unwrap()
}

#[test]
fn rows_are_the_right_bytes_on_every_backend() {
    let (model, table) = model();
    let expected = content(&model);
    let mut random = Random(3);
    for backend in ["adaptive", "buffered", "mmap", "direct", "uring"] {
        let available = Registry::builtin().choose(Some(backend), &model.sources());
        if let Err(error) = available {
            println!("not tested: {error}");
            continue;
        }
        let config = config(512 * KIB).with_backend(backend.to_string());
        let engine = engine(&model, table.clone(), config);
        for count in [0, 1, 2, 7, 60] {
            let rows: Vec<u64> = (0..count).map(|_| random.below(ROWS as u64)).collect();
            let bytes = engine.gather(TableId(0), &rows, &mut patience()).unwrap();
            let wanted: Vec<u8> = rows
                .iter()
                .flat_map(|&row| expected[row as usize * ROW..][..ROW].to_vec())
                .collect();
            assert!(bytes[..] == wanted, "{backend}: rows {rows:?}");
            assert!(bytes.is_empty() || bytes.as_ptr().addr().is_multiple_of(64));
        }
        let pass = engine.begin_pass();
        for unit in 0..4 {
            model.check(unit, &engine.acquire(Some(pass), UnitId(unit as u32)).unwrap().tensor(0));
        }
        engine.end_pass(pass);
    }
}

#[test]
fn only_the_rows_are_read() {
    let (model, table) = model();
    let config = config(512 * KIB).with_prefetch(Prefetch::None);
    let engine = engine(&model, table, config.with_backend("direct".to_string()));
    engine.gather(TableId(0), &[3, 250, 251, 252, 499], &mut patience()).unwrap();
    let stats = engine.stats();
    assert_eq!(stats.tables.rows, 5);
    assert_eq!(stats.tables.read_bytes, stats.total_read_bytes());
    // Each of the three runs is read with at most two alignments more.
    assert!(stats.total_read_bytes() <= (5 * ROW + 3 * 2 * 4096) as u64);
}

#[test]
fn rows_that_were_gathered_are_not_read_again() {
    let (model, table) = model();
    let expected = content(&model);
    // A 256th is for rows: 20 of them.
    let config = config(8 << 20).with_prefetch(Prefetch::None);
    let engine = engine(&model, table, config.with_backend("direct".to_string()));
    let check = |rows: &[u64]| {
        let bytes = engine.gather(TableId(0), rows, &mut patience()).unwrap();
        for (i, &row) in rows.iter().enumerate() {
            assert!(bytes[i * ROW..][..ROW] == expected[row as usize * ROW..][..ROW], "row {row}");
        }
    };
    check(&[7, 8, 9, 300]);
    let before = engine.stats();
    // In another order, twice, and on both sides of the boundary between the table's two parts.
    check(&[300, 9, 9, 7]);
    let after = engine.stats();
    assert_eq!((after.tables.rows, after.tables.cached_rows), (8, 4));
    assert_eq!(after.tables.read_bytes, before.tables.read_bytes);
    assert_eq!(after.total_read_bytes(), before.total_read_bytes());
    // Rows that are cached lie between rows that are not.
    check(&[6, 7, 8, 199, 200, 300, 301]);
    let mixed = engine.stats();
    assert_eq!(mixed.tables.cached_rows, 4 + 3);
    let read = mixed.total_read_bytes() - after.total_read_bytes();
    assert_eq!(read, mixed.tables.read_bytes - after.tables.read_bytes);
    assert!(read <= (4 * ROW + 4 * 2 * 4096) as u64, "{read} bytes were read");
    // A scan of all rows, larger than the cache.
    for first in (0..ROWS as u64).step_by(100) {
        check(&(first..first + 100).collect::<Vec<_>>());
    }
    check(&[7, 8, 9, 300]);
    assert!(mixed.reserved_high_water_bytes <= mixed.budget_bytes);
}

#[test]
fn rows_evict_units_and_stay_within_the_budget() {
    let (model, table) = model();
    let expected = content(&model);
    // Room for one unit.
    let engine = engine(&model, table, config(80 * KIB));
    for round in 0..20u64 {
        let unit = (round % 4) as u32;
        let lease = engine.acquire_interruptible(None, UnitId(unit), &mut patience()).unwrap();
        model.check(unit as usize, &lease.tensor(0));
        // The unit takes all memory, and only this thread can free it.
        let rows = engine.gather(TableId(0), &[1, 3, 5, 7], &mut patience());
        let Err(refused) = rows else { panic!("the memory is full") };
        assert_eq!(refused.kind(), ErrorKind::Full, "{refused}");
        assert!(refused.to_string().contains("`table[1, 3, 5, ...]`"), "{refused}");
        drop(lease);
        let rows = [round, round + 20, round + 40];
        let rows = engine.gather(TableId(0), &rows, &mut patience()).unwrap();
        assert!(rows[..ROW] == expected[round as usize * ROW..][..ROW]);
    }
    let stats = engine.stats();
    assert!(stats.reserved_high_water_bytes <= stats.budget_bytes);
}

#[test]
fn errors_name_tables_and_rows_that_do_not_exist() {
    let (model, table) = model();
    let engine = engine(&model, table, config(512 * KIB));
    let error = engine.gather(TableId(1), &[0], &mut patience()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "unknown table id 1: expected an id below 1, the number of tables"
    );
    let error = engine.gather(TableId(0), &[0, 500], &mut patience()).err().unwrap();
    let text = "no row 500 in table `table`: it has 500 rows, numbered from 0";
    assert_eq!(error.to_string(), text);
    let all: Vec<u64> = (0..ROWS as u64).collect();
    let error = engine.gather(TableId(0), &all, &mut patience()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NeverFits, "{error}");
}

#[test]
fn a_truncated_file_is_an_error_that_names_the_rows() {
    let (model, table) = model();
    let engine = engine(&model, table, config(512 * KIB));
    fs::OpenOptions::new().write(true).open(&model.path).unwrap().set_len(300_000).unwrap();
    let error = engine.gather(TableId(0), &[2, 9], &mut patience()).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Storage);
    let text = error.to_string();
    assert!(text.contains("`table[2, 9]`") && text.contains("byte"), "{text}");
}

#[test]
fn ten_thousand_faults_cause_errors_or_the_right_bytes() {
    let (model, table) = model();
    let expected = content(&model);
    let count = std::sync::atomic::AtomicU64::new(0);
    let faults = Faults::new(move |_| {
        let n = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        match n % 3 {
            0 => Some(Fault::Errno(5)),
            1 => Some(Fault::Short(700)),
            _ => None,
        }
    });
    let provider = FaultyProvider::new(buffered(), faults);
    let engine = engine(&model, table, with_backend(config(1 << 20), provider));
    let (mut random, mut failed, mut right) = (Random(11), 0, 0);
    for _ in 0..10_000 {
        // Sometimes a row that is cached: there is memory for two.
        let rows: Vec<u64> = (0..1 + random.below(2)).map(|_| random.below(50)).collect();
        match engine.gather(TableId(0), &rows, &mut patience()) {
            Ok(bytes) => {
                right += 1;
                for (i, &row) in rows.iter().enumerate() {
                    assert!(bytes[i * ROW..][..ROW] == expected[row as usize * ROW..][..ROW]);
                }
            }
            Err(error) => {
                failed += 1;
                assert_eq!(error.kind(), ErrorKind::Storage, "{error}");
                assert!(error.to_string().contains("`table"), "{error}");
            }
        }
    }
    assert!(failed > 3000 && right > 1000, "{failed} errors, {right} results");
}

#[test]
fn threads_gather_while_passes_run() {
    let (model, table) = model();
    let expected = Arc::new(content(&model));
    // With and without memory for rows.
    for budget in [200 * KIB, 4 << 20] {
        let engine = Arc::new(engine(&model, table.clone(), config(budget)));
        std::thread::scope(|scope| {
            for seed in 0..3 {
                let (engine, expected) = (Arc::clone(&engine), Arc::clone(&expected));
                scope.spawn(move || {
                    let mut random = Random(seed);
                    for _ in 0..300 {
                        let row = random.below(20) * random.below(20);
                        let bytes = engine.gather(TableId(0), &[row], &mut patience()).unwrap();
                        assert!(bytes[..] == expected[row as usize * ROW..][..ROW]);
                    }
                });
            }
            for _ in 0..100 {
                model.pass(&engine, &[0, 1, 2, 3]);
            }
        });
    }
}

#[test]
fn a_thread_waits_for_rows_that_another_thread_holds() {
    let (model, table) = model();
    // Room for one unit.
    let engine = Arc::new(engine(&model, table, config(80 * KIB)));
    for _ in 0..20 {
        let rows = engine.gather(TableId(0), &[1, 3, 5, 7, 9, 11], &mut patience()).unwrap();
        let other = Arc::clone(&engine);
        let thread = std::thread::spawn(move || {
            other.acquire_interruptible(None, UnitId(2), &mut patience()).map(drop)
        });
        std::thread::sleep(std::time::Duration::from_millis(120));
        drop(rows);
        let result = thread.join().unwrap();
        assert!(result.is_ok(), "{:?}", result.err().map(|error| error.to_string()));
    }
}

#[test]
fn rows_that_the_same_thread_holds_are_an_error() {
    let (model, table) = model();
    let engine = engine(&model, table, config(80 * KIB));
    let rows = engine.gather(TableId(0), &[1, 3, 5, 7], &mut patience()).unwrap();
    let result = engine.acquire_interruptible(None, UnitId(2), &mut patience()).map(drop);
    let error = result.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(error.to_string().contains("`table[1, 3, 5, ...]`"), "{error}");
    drop(rows);
    engine.acquire_interruptible(None, UnitId(2), &mut patience()).map(drop).unwrap();
}
