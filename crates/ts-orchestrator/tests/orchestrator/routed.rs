// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of routed units: which of them stay in memory, and what is read.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::testing::{KIB, Model, buffered, config, patience, with_backend};
use ts_format::Digest;
use ts_io::fault::{Fault, Faults, FaultyProvider};
use ts_orchestrator::{Access, Engine, Error, ErrorKind, RangeDigest, Routing, UnitId};

const SLICE: usize = 32 * KIB;

/// A small linear congruential generator, so that runs are reproducible.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % end
    }
}

/// Returns a model whose first `ordered` units are used in order, and whose other units are routed.
fn model(ordered: usize, routed: usize) -> Model {
    let mut model = Model::new(&vec![SLICE; ordered + routed]);
    for unit in &mut model.units[ordered..] {
        unit.access = Access::Routed;
    }
    model
}

/// Runs a pass that uses these routed units, and checks their bytes.
fn pass(engine: &Engine, model: &Model, routed: &[u32]) {
    let pass = engine.begin_pass();
    let ids: Vec<UnitId> = routed.iter().copied().map(UnitId).collect();
    let expectation = engine.expect(&once(&ids)).unwrap();
    for &id in &ids {
        model.check(id.0 as usize, &engine.acquire(Some(pass), id).unwrap().tensor(0));
    }
    drop(expectation);
    engine.end_pass(pass);
}

/// Returns the units, each used by one token.
fn once(ids: &[UnitId]) -> Vec<(UnitId, u32)> {
    ids.iter().map(|&id| (id, 1)).collect()
}

fn routed_loads(engine: &Engine) -> u64 {
    engine.stats().units.iter().map(|unit| unit.loads).sum()
}

#[test]
fn only_expected_units_are_read() {
    let model = model(0, 64);
    let engine = model.engine(config(16 * SLICE)).unwrap();
    pass(&engine, &model, &[3, 40, 41]);
    pass(&engine, &model, &[3, 40, 41]);
    let stats = engine.stats();
    assert_eq!(routed_loads(&engine), 3);
    assert_eq!((stats.routed.touched, stats.routed.hits, stats.routed.evictions), (6, 3, 0));
    // Direct reads are aligned, so each read can be up to two alignments longer than its unit.
    assert!(stats.total_read_bytes() <= 3 * (SLICE as u64 + 2 * 4096));
}

#[test]
fn frequent_units_stay_in_memory() {
    let model = model(0, 64);
    let engine = model.engine(config(12 * SLICE)).unwrap();
    let mut random = Random(1);
    let frequent = [5, 9, 17, 33];
    for _ in 0..100 {
        let mut routed = frequent.to_vec();
        routed.extend([34 + random.below(15) as u32, 49 + random.below(15) as u32]);
        pass(&engine, &model, &routed);
    }
    for unit in frequent {
        assert_eq!(engine.stats().units[unit as usize].loads, 1, "unit {unit}");
    }
}

#[test]
fn units_of_many_tokens_stay_in_memory() {
    let model = model(0, 32);
    let engine = model.engine(config(9 * SLICE)).unwrap();
    let first = engine.begin_pass();
    let all: Vec<_> = (0..32).map(|id| (UnitId(id), if id % 8 == 3 { 20 } else { 1 })).collect();
    let expectation = engine.expect(&all).unwrap();
    for &(id, _) in &all {
        model.check(id.0 as usize, &engine.acquire(Some(first), id).unwrap().tensor(0));
    }
    drop(expectation);
    engine.end_pass(first);
    pass(&engine, &model, &[3, 11, 19, 27]);
    for round in 0..8 {
        pass(&engine, &model, &[4 + round % 4, 12 + round % 4]);
    }
    let before = routed_loads(&engine);
    pass(&engine, &model, &[3, 11, 19, 27]);
    assert_eq!(routed_loads(&engine), before);
}

#[test]
fn recent_passes_count_more() {
    let model = model(0, 32);
    let engine = model.engine(config(12 * SLICE)).unwrap();
    let first: Vec<u32> = (0..10).collect();
    let second: Vec<u32> = (20..30).collect();
    for _ in 0..400 {
        pass(&engine, &model, &first);
    }
    // Without ageing, the units of the first period would stay for 400 passes.
    for _ in 0..150 {
        pass(&engine, &model, &second);
    }
    let before = routed_loads(&engine);
    pass(&engine, &model, &second);
    assert_eq!(routed_loads(&engine), before, "all units of the second period are in memory");
}

#[test]
fn a_pass_over_all_units_hits_what_fits() {
    let model = model(0, 32);
    let engine = model.engine(config(17 * SLICE)).unwrap();
    let all: Vec<u32> = (0..32).collect();
    for _ in 0..3 {
        pass(&engine, &model, &all);
    }
    // The least recently used unit would always be the one that is needed next, so nothing would
    // be hit. At least 12 units are hit in each pass after the first.
    let hits = engine.stats().routed.hits;
    assert!(hits >= 24, "{hits} hits");
}

#[test]
fn routed_units_do_not_displace_ordered_ones() {
    let model = model(8, 32);
    let engine = model.engine(config(16 * SLICE)).unwrap();
    let mut random = Random(7);
    for round in 0..20 {
        let pass = engine.begin_pass();
        for layer in 0..8u32 {
            model.check(
                layer as usize,
                &engine.acquire(Some(pass), UnitId(layer)).unwrap().tensor(0),
            );
            let routed = [8 + random.below(16) as u32, 24 + random.below(16) as u32].map(UnitId);
            let _expected = engine.expect(&once(&routed)).unwrap();
            for id in routed {
                model.check(id.0 as usize, &engine.acquire(Some(pass), id).unwrap().tensor(0));
            }
        }
        engine.end_pass(pass);
        if round > 0 {
            let loads = engine.stats().units[..8].iter().map(|unit| unit.loads).sum::<u64>();
            assert_eq!(loads, 8, "the ordered units are resident");
        }
    }
    let stats = engine.stats();
    assert!(stats.in_use_high_water_bytes <= stats.budget_bytes);
}

#[test]
fn an_expectation_that_is_dropped_frees_its_units() {
    let model = model(0, 16);
    let engine = model.engine(config(6 * SLICE)).unwrap();
    for round in 0..50u32 {
        let ids = [round % 16, (round + 5) % 16].map(UnitId);
        drop(engine.expect(&once(&ids)).unwrap());
        let other = UnitId((round + 9) % 16);
        model.check(other.0 as usize, &engine.acquire(None, other).unwrap().tensor(0));
    }
    assert!(matches!(engine.expect(&[(UnitId(16), 1)]), Err(Error::NoSuchUnit { unit: 16, .. })));
}

#[test]
fn more_units_than_fit_can_be_expected() {
    let model = model(0, 64);
    // The smallest budget.
    let error = model.engine(config(1)).err().unwrap();
    let Error::NeverFits(error) = error else { panic!("{error}") };
    for budget in [error.smallest_budget_bytes, error.smallest_budget_bytes + 3 * SLICE] {
        let engine = model.engine(config(budget)).unwrap();
        for _ in 0..3 {
            pass(&engine, &model, &(0..64).collect::<Vec<u32>>());
        }
        assert!(engine.stats().in_use_high_water_bytes <= budget);
    }
}

#[test]
fn ten_thousand_faults_cause_errors_or_the_right_bytes() {
    let model = model(0, 40);
    let attempts = AtomicU64::new(0);
    let faults = Faults::new(move |_| match attempts.fetch_add(1, Ordering::Relaxed) % 5 {
        0 => Some(Fault::Errno(5)),
        1 | 2 => Some(Fault::Short(20_000)),
        _ => None,
    });
    let provider = FaultyProvider::new(buffered(), faults);
    let engine = model.engine(with_backend(config(8 * SLICE), provider)).unwrap();
    let (mut random, mut failed, mut right) = (Random(5), 0, 0);
    while engine.stats().units.iter().map(|unit| unit.loads).sum::<u64>() < 10_000 {
        let pass = engine.begin_pass();
        let ids: Vec<UnitId> = (0..3).map(|_| UnitId(random.below(40) as u32)).collect();
        engine.guess(&ids[..random.below(4) as usize]).unwrap();
        let expectation = engine.expect(&once(&ids)).unwrap();
        for &id in &ids {
            match engine.acquire_interruptible(Some(pass), id, &mut patience()) {
                Ok(lease) => {
                    right += 1;
                    model.check(id.0 as usize, &lease.tensor(0));
                }
                Err(error) => {
                    failed += 1;
                    assert_eq!(error.kind(), ErrorKind::Storage, "{error}");
                    assert!(error.to_string().contains(&format!("tensor `t{}`", id.0)), "{error}");
                }
            }
        }
        drop(expectation);
        engine.end_pass(pass);
    }
    assert!(failed > 1000 && right > 1000, "{failed} errors, {right} results");
}

/// Several threads run passes of random units under random budgets.
#[test]
fn random_programs_get_correct_bytes_within_budget() {
    let model = Arc::new(model(4, 40));
    for seed in 0..20u64 {
        let mut random = Random(seed);
        let budget = (6 + random.below(30) as usize) * SLICE;
        let engine = Arc::new(model.engine(config(budget).with_max_passes(2)).unwrap());
        std::thread::scope(|scope| {
            for thread in 0..2u64 {
                let (engine, model) = (Arc::clone(&engine), Arc::clone(&model));
                let mut random = Random(seed * 31 + thread);
                scope.spawn(move || {
                    for _ in 0..20 {
                        let pass = engine.begin_pass();
                        for layer in 0..4u32 {
                            drop(engine.acquire(Some(pass), UnitId(layer)).unwrap());
                            let count = random.below(6);
                            let ids: Vec<UnitId> =
                                (0..count).map(|_| UnitId(4 + random.below(40) as u32)).collect();
                            engine.guess(&ids[..random.below(count + 1) as usize]).unwrap();
                            let _expected = engine.expect(&once(&ids)).unwrap();
                            // Some expected units are not used, and some units are used although
                            // they are not expected.
                            for &id in ids.iter().skip(usize::from(random.below(3) == 0)) {
                                let lease = engine.acquire(Some(pass), id).unwrap();
                                model.check(id.0 as usize, &lease.tensor(0));
                            }
                            let id = UnitId(4 + random.below(40) as u32);
                            let lease = engine.acquire(Some(pass), id).unwrap();
                            model.check(id.0 as usize, &lease.tensor(0));
                        }
                        engine.end_pass(pass);
                    }
                });
            }
        });
        let stats = engine.stats();
        assert!(stats.in_use_high_water_bytes <= budget, "seed {seed}");
    }
}

/// Waits until this many loads have ended.
fn wait_for_loads(engine: &Engine, count: u64) {
    let mut patience = patience();
    while routed_loads(engine) < count {
        assert!(!patience(), "{} of {count} loads have ended", routed_loads(engine));
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn guessed_units_are_read_before_they_are_expected() {
    let model = model(0, 32);
    let engine = model.engine(config(8 * SLICE)).unwrap();
    engine.guess(&[7, 9, 9].map(UnitId)).unwrap();
    wait_for_loads(&engine, 2);
    pass(&engine, &model, &[9, 7]);
    let stats = engine.stats();
    assert_eq!(
        (routed_loads(&engine), stats.routed.guesses, stats.routed.right_guesses),
        (2, 2, 2)
    );
    assert_eq!(stats.routed.hits, 2);
    assert!(stats.routed.guessed_bytes >= 2 * SLICE as u64);
    // Units in memory are not read again.
    engine.guess(&[7, 9].map(UnitId)).unwrap();
    assert_eq!(engine.stats().routed.guesses, 2);
    assert!(matches!(engine.guess(&[UnitId(32)]), Err(Error::NoSuchUnit { unit: 32, .. })));
}

#[test]
fn wrong_guesses_are_given_up() {
    let model = model(0, 64);
    let engine = model.engine(config(12 * SLICE)).unwrap();
    let mut random = Random(3);
    for _ in 0..200 {
        engine.guess(&[32 + random.below(32) as u32].map(UnitId)).unwrap();
        pass(&engine, &model, &[random.below(32) as u32]);
    }
    let wrong = engine.stats().routed.guesses;
    assert!((1..10).contains(&wrong), "{wrong} wrong guesses were read");
    // They are tried again when guesses that were not read turn out to be right.
    for _ in 0..200 {
        let next = random.below(64) as u32;
        engine.guess(&[UnitId(next)]).unwrap();
        pass(&engine, &model, &[next]);
    }
    let stats = engine.stats().routed;
    assert!(stats.right_guesses > 50, "{stats:?}");
}

#[test]
fn guesses_make_room_for_needed_units() {
    let model = model(1, 32);
    // Memory for the ordered unit and for three routed ones.
    let engine = model.engine(config(5 * SLICE)).unwrap();
    for round in 0..40u32 {
        engine.guess(&[1, 2, 3, 4, 5].map(UnitId)).unwrap();
        let pass = engine.begin_pass();
        model.check(0, &engine.acquire(Some(pass), UnitId(0)).unwrap().tensor(0));
        // Not announced, so the guesses still stand.
        let leases = [6, 7, 8].map(|id| {
            let lease = engine.acquire(Some(pass), UnitId(id + round % 24)).unwrap();
            model.check((id + round % 24) as usize, &lease.tensor(0));
            lease
        });
        drop(leases);
        engine.end_pass(pass);
    }
    assert!(engine.stats().in_use_high_water_bytes <= 5 * SLICE);
}

#[test]
fn reads_of_wrong_guesses_are_cancelled() {
    let model = model(0, 32);
    let faults = Faults::new(|_| Some(Fault::Delay(std::time::Duration::from_millis(10))));
    let provider = FaultyProvider::new(buffered(), faults);
    let engine = model.engine(with_backend(config(28 * SLICE), provider)).unwrap();
    engine.guess(&(0..24).map(UnitId).collect::<Vec<_>>()).unwrap();
    pass(&engine, &model, &[30, 31]);
    let stats = engine.stats();
    assert_eq!((stats.routed.guesses, stats.routed.right_guesses), (24, 0));
    assert!(stats.routed.cancelled_guesses >= 20, "{:?}", stats.routed);
    let read = stats.routed.guessed_bytes;
    assert!(read <= 4 * (SLICE as u64 + 8192), "{read} bytes were read");
    // A cancelled unit can be read later.
    pass(&engine, &model, &[5, 23]);
}

#[test]
fn scores_of_an_earlier_run_decide_what_stays() {
    let model = model(0, 32);
    let first = model.engine(config(9 * SLICE)).unwrap();
    for _ in 0..50 {
        pass(&first, &model, &[1, 2, 3, 4]);
    }
    let scores = first.routing_scores();
    assert_eq!(scores.len(), 32);
    let routing = Routing::default().with_scores(scores);
    let second = model.engine(config(9 * SLICE).with_routing(routing)).unwrap();
    pass(&second, &model, &[1, 2, 3, 4]);
    for id in 5..32 {
        pass(&second, &model, &[id]);
    }
    pass(&second, &model, &[1, 2, 3, 4]);
    assert_eq!(routed_loads(&second), 31);
}

#[test]
fn a_unit_can_be_leased_only_if_it_is_in_memory() {
    let model = model(0, 8);
    let engine = model.engine(config(4 * SLICE)).unwrap();
    assert!(engine.try_acquire(UnitId(3)).unwrap().is_none());
    pass(&engine, &model, &[3]);
    let lease = engine.try_acquire(UnitId(3)).unwrap().unwrap();
    pass(&engine, &model, &[4, 5, 6]);
    model.check(3, &lease.tensor(0));
    drop(lease);
    assert!(matches!(engine.try_acquire(UnitId(8)), Err(Error::NoSuchUnit { .. })));
    assert!(engine.stats().in_use_high_water_bytes <= 4 * SLICE);
}

#[test]
fn a_slice_is_compared_with_the_checksums_of_its_chunks() {
    let mut model = Model::new(&[3 << 20]);
    let [whole] = model.units[0].tensors[0].entry.parts[..] else { panic!("one part") };
    let digest = Arc::new(Digest::of(&model.expected(0, 0)));
    // A slice in the middle of the second chunk.
    let mut slice = model.units[0].clone();
    slice.tensors[0].entry.parts[0].offset += (1 << 20) + 4096;
    slice.tensors[0].entry.parts[0].len = 8192;
    slice.tensors[0].entry.meta.shape = vec![8192];
    slice.tensors[0].digest = Some(RangeDigest { range: whole, digest });
    model.units.push(slice);
    let expected = model.content[8 + (1 << 20) + 4096..][..8192].to_vec();
    let engine = model.engine(config(8 << 20)).unwrap();
    assert_eq!(engine.acquire(None, UnitId(1)).unwrap().tensor(0)[..], expected);
    let mut damaged: HashMap<usize, bool> = HashMap::new();
    for at in [8 + (1 << 20) + 5000, 8 + (1 << 20) + 100_000] {
        let mut content = model.content.clone();
        content[at] ^= 1;
        std::fs::write(&model.path, content).unwrap();
        let engine = model.engine(config(8 << 20)).unwrap();
        damaged.insert(at, engine.acquire(None, UnitId(1)).is_err());
    }
    assert!(damaged.values().all(|&refused| refused), "{damaged:?}");
}
