// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of many small units, whose reads are joined.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use ts_format::Digest;
use ts_io::Registry;
use ts_io::fault::{Attempt, Fault, Faults, FaultyProvider};
use ts_orchestrator::{EngineConfig, Error, RangeDigest, UnitId, Verify};

use crate::testing::{KIB, Model, acquire_tensor, buffered, config, patience, with_backend};

/// Counts the allocations of each thread, in all tests of this program.
struct CountingAllocator;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all calls go to the allocator of the system, unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends may allocate when its variables are gone.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `alloc` got the memory from the same allocator.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_visit_to_a_resident_unit_allocates_nothing() {
    let model = Model::new(&[16 * KIB; 50]);
    let engine = model.engine(config(4 << 20)).unwrap();
    let order: Vec<usize> = (0..50).collect();
    for _ in 0..3 {
        model.pass(&engine, &order);
    }
    let pass = engine.begin_pass();
    let before = ALLOCATIONS.get();
    for unit in 0..50 {
        let lease = engine.acquire(Some(pass), UnitId(unit)).unwrap();
        assert_eq!(lease.tensor(0)[0], model.content[8 + unit as usize * 16 * KIB]);
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    engine.end_pass(pass);
    assert!(engine.stats().units.iter().all(|unit| unit.resident && unit.loads == 1));
}

/// Returns a configuration whose reads are counted, and may fail.
fn faulty(
    config: EngineConfig,
    decide: impl Fn(&Attempt<'_>) -> Option<Fault> + Send + Sync + 'static,
) -> EngineConfig {
    with_backend(config, FaultyProvider::new(buffered(), Faults::new(decide)))
}

#[test]
fn neighbours_are_read_by_one_request() {
    for (kib, joined) in [(16, 4), (64, 2)] {
        let count = 16 * 1024 / kib;
        let model = Model::new(&vec![kib * KIB; count]);
        let attempts = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&attempts);
        let config = faulty(EngineConfig::with_budget(8 << 20), move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
            None
        });
        let engine = model.engine(config).unwrap();
        let order: Vec<usize> = (0..count).collect();
        for _ in 0..3 {
            model.pass(&engine, &order);
        }
        let loads = || engine.stats().units.iter().map(|unit| unit.loads).sum::<u64>() as usize;
        let (before, loads_before) = (attempts.load(Ordering::SeqCst), loads());
        for _ in 0..4 {
            model.pass(&engine, &order);
        }
        let (requests, loads) = (attempts.load(Ordering::SeqCst) - before, loads() - loads_before);
        assert!(loads > 4 * count / 3, "most units are streamed: {loads} loads");
        // How many units one request reads depends on time.
        assert!(requests * joined <= loads, "{requests} requests for {loads} loads of {kib} KiB");
    }
}

#[test]
fn an_error_in_a_joint_read_is_that_of_its_unit() {
    let model = Model::new(&[20 * KIB; 100]);
    // In the middle of unit 37.
    let bad = (8 + 37 * 20 * KIB + 9000) as u64;
    let broken = Arc::new(AtomicBool::new(true));
    let is_broken = Arc::clone(&broken);
    let config = faulty(EngineConfig::with_budget(1 << 20), move |attempt| {
        let hits = (attempt.offset..attempt.offset + attempt.len as u64).contains(&bad);
        (hits && is_broken.load(Ordering::SeqCst)).then_some(Fault::Errno(5))
    });
    let engine = model.engine(config).unwrap();
    for _ in 0..3 {
        let pass = engine.begin_pass();
        for unit in 0..100 {
            let lease = engine.acquire_interruptible(Some(pass), UnitId(unit), &mut patience());
            match (unit, lease) {
                (37, Err(Error::Load { unit, tensor, source })) => {
                    assert_eq!((unit.as_str(), tensor.as_str()), ("u37", "t37"));
                    assert!(matches!(source, ts_io::Error::Read { .. }), "{source}");
                }
                (unit, Ok(lease)) if unit != 37 => model.check(unit as usize, &lease.tensor(0)),
                (unit, other) => panic!("unit {unit}: {other:?}"),
            }
        }
        engine.end_pass(pass);
    }
    broken.store(false, Ordering::SeqCst);
    model.check(37, &acquire_tensor(&engine, 37).unwrap());
}

#[test]
fn a_truncated_file_is_an_error_of_the_units_beyond_its_end() {
    let model = Model::new(&[20 * KIB; 60]);
    let engine = model.engine(EngineConfig::with_budget(600 * KIB)).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&model.path).unwrap();
    file.set_len((8 + 40 * 20 * KIB + 100) as u64).unwrap();
    let pass = engine.begin_pass();
    for unit in 0..60 {
        let error = engine.acquire(Some(pass), UnitId(unit)).unwrap_err().to_string();
        assert!(error.contains(&format!("`t{unit}`")), "{error}");
    }
    engine.end_pass(pass);
}

#[test]
fn damaged_units_are_found_among_their_neighbours() {
    let mut model = Model::new(&[20 * KIB; 80]);
    for i in 0..80 {
        let range = model.units[i].tensors[0].entry.parts[0];
        let digest = Arc::new(Digest::of(&model.expected(i, 0)));
        model.units[i].tensors[0].digest = Some(RangeDigest { range, digest });
    }
    let mut damaged = model.content.clone();
    for unit in [11, 12, 50] {
        damaged[8 + unit * 20 * KIB + 777] ^= 1;
    }
    fs::write(&model.path, damaged).unwrap();
    let config = EngineConfig::with_budget(1 << 20).with_verify(Verify::EveryRead);
    let engine = model.engine(config).unwrap();
    for _ in 0..2 {
        let pass = engine.begin_pass();
        for unit in 0..80usize {
            match engine.acquire(Some(pass), UnitId(unit as u32)) {
                Err(Error::Corrupt { unit: name, .. }) => {
                    assert!([11, 12, 50].contains(&unit) && name == format!("u{unit}"));
                }
                lease => model.check(unit, &lease.unwrap().tensor(0)),
            }
        }
        engine.end_pass(pass);
    }
}

#[test]
fn an_engine_that_is_dropped_cancels_joint_reads() {
    let model = Model::new(&[20 * KIB; 100]);
    let config = faulty(EngineConfig::with_budget(1 << 20), |_| {
        Some(Fault::Delay(Duration::from_millis(30)))
    });
    let engine = model.engine(config).unwrap();
    let pass = engine.begin_pass();
    let lease = engine.acquire(Some(pass), UnitId(0)).unwrap();
    let bytes = lease.tensor(0);
    drop((lease, engine));
    model.check(0, &bytes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the sizes and the order of visits are, and although reads fail now and then, units
    /// have the right bytes within the budget, with each backend.
    #[test]
    fn any_order_of_small_units_gives_the_right_bytes(
        sizes in prop::collection::vec(1usize..40_000, 20..120),
        shuffled in prop::collection::vec(0usize..1000, 0..40),
        share in 8usize..60,
        seed: u64,
        direct: bool,
    ) {
        let model = Model::new(&sizes);
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        for pair in shuffled.chunks_exact(2) {
            order.swap(pair[0] % sizes.len(), pair[1] % sizes.len());
        }
        let total: usize = sizes.iter().map(|size| size + 4096).sum();
        let budget = (total * share / 64).max(128 * KIB);
        let name = if direct { "adaptive" } else { "buffered" };
        let real = Registry::builtin().choose(Some(name), &model.sources()).unwrap().provider;
        let faults = Faults::new(move |attempt| Fault::random(attempt, seed, 0.05));
        let config = with_backend(
            EngineConfig::with_budget(budget),
            FaultyProvider::new(real, faults),
        );
        let engine = model.engine(config).unwrap();
        for _ in 0..3 {
            let pass = engine.begin_pass();
            for &unit in &order {
                match engine.acquire_interruptible(
                    Some(pass),
                    UnitId(unit as u32),
                    &mut patience(),
                ) {
                    Ok(lease) => model.check(unit, &lease.tensor(0)),
                    Err(Error::Load { unit: name, .. }) => {
                        prop_assert_eq!(name, format!("u{unit}"));
                    }
                    Err(error) => return Err(TestCaseError::fail(error.to_string())),
                }
            }
            if engine.end_pass(pass) {
                engine.replan();
            }
            let stats = engine.stats();
            prop_assert!(stats.in_use_high_water_bytes <= stats.budget_bytes);
        }
    }
}

#[test]
fn memory_is_populated_while_passes_run() {
    const MIB: usize = 1 << 20;
    let model = Model::new(&[MIB; 48]);
    let config = EngineConfig::with_budget(32 * MIB).with_watch_writes(true);
    let engine = model.engine(config).unwrap();
    let order: Vec<usize> = (0..48).collect();
    let pass = || {
        let before = engine.stats();
        let better = model.pass(&engine, &order);
        assert!(engine.modified_units().is_empty(), "populating is not a write");
        let after = engine.stats();
        assert!(after.in_use_high_water_bytes <= after.budget_bytes);
        let kept = before.units.iter().zip(&after.units).filter(|(unit, _)| unit.resident);
        assert!(kept.clone().count() > 20);
        better && engine.replan() || kept.clone().any(|(before, after)| before.loads < after.loads)
    };
    // Whatever the first passes streamed, later ones keep what the plan keeps.
    let passes = (0..200).take_while(|_| pass()).count();
    assert!(passes < 200, "units are still not kept");
    assert!(!pass());
}

#[test]
fn a_lower_limit_ends_the_population() {
    const MIB: usize = 1 << 20;
    let model = Model::new(&[MIB; 48]);
    let engine = model.engine(EngineConfig::with_budget(40 * MIB)).unwrap();
    let order: Vec<usize> = (0..48).collect();
    let pass = engine.begin_pass();
    model.check(0, &engine.acquire(Some(pass), UnitId(0)).unwrap().tensor(0));
    engine.set_limit(8 * MIB).unwrap();
    for unit in 1..48u32 {
        let lease = engine.acquire(Some(pass), UnitId(unit)).unwrap();
        model.check(unit as usize, &lease.tensor(0));
    }
    engine.end_pass(pass);
    engine.replan();
    for _ in 0..3 {
        model.pass(&engine, &order);
        let stats = engine.stats();
        assert!(stats.in_use_bytes <= 8 * MIB && engine.is_within_limit());
    }
}
