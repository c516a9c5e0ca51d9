// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests that the times of passes add up. The clock of the engine moves only when a test moves it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ts_io::fault::{Faults, FaultyProvider};
use ts_orchestrator::{Bottleneck, Engine, EngineConfig, Prefetch, UnitId};

use crate::testing::{KIB, Model, buffered, config, with_backend};

const MS: u64 = 1_000_000;
const UNITS: usize = 6;

/// A clock, and the time that each read takes by it.
#[derive(Default)]
struct Times {
    now_ns: AtomicU64,
    read_ns: AtomicU64,
}

impl Times {
    fn pass(&self, by: u64) {
        self.now_ns.fetch_add(by, Ordering::SeqCst);
    }
}

/// Returns a configuration with this clock, where units are read when they are acquired.
fn timed(times: &Arc<Times>, config: EngineConfig) -> EngineConfig {
    let reading = Arc::clone(times);
    let faults = Faults::new(move |_| {
        reading.pass(reading.read_ns.load(Ordering::SeqCst));
        None
    });
    let clock = Arc::clone(times);
    with_backend(config, FaultyProvider::new(buffered(), faults))
        .with_prefetch(Prefetch::None)
        .with_clock(Box::new(move || clock.now_ns.load(Ordering::SeqCst)))
}

/// Runs passes that compute for a while with each unit.
fn passes(count: usize, engine: &Engine, times: &Times, compute_ns: u64) {
    let order: Vec<u32> = (0..UNITS as u32).collect();
    (0..count).for_each(|_| _ = pass(engine, times, &order, compute_ns));
}

/// Runs a pass that visits units in this order, and computes for a while with each. Returns whether
/// a better plan is available.
fn pass(engine: &Engine, times: &Times, order: &[u32], compute_ns: u64) -> bool {
    let pass = engine.begin_pass();
    for &unit in order {
        let lease = engine.acquire(Some(pass), UnitId(unit)).unwrap();
        times.pass(compute_ns);
        drop(lease);
        times.pass(MS);
    }
    let proposed = engine.end_pass(pass);
    times.pass(7 * MS);
    proposed
}

#[test]
fn a_pass_is_computing_waiting_and_overhead() {
    let model = Model::new(&[60 * KIB; UNITS]);
    let times = Arc::new(Times::default());
    times.read_ns.store(5 * MS, Ordering::SeqCst);
    let engine = model.engine(timed(&times, config(310 * KIB))).unwrap();
    passes(4, &engine, &times, 20 * MS);
    let stats = engine.stats();
    let [.., before, last] = stats.recent_passes[..] else { panic!("four passes are logged") };
    assert_eq!(last.wall_ns, before.wall_ns);
    assert_eq!(last.wall_ns, last.compute_ns() + last.waited_ns + last.calls_ns);
    assert_eq!(last.compute_ns(), UNITS as u64 * 21 * MS);
    let streamed = stats.units.iter().filter(|unit| !unit.resident).count() as u64;
    assert!((1..UNITS as u64).contains(&streamed), "some units are kept, and some are read");
    assert_eq!((last.waited_ns, last.calls_ns), (streamed * 5 * MS, 0));
    let (read, units) = (last.read_bytes as usize, streamed as usize);
    // Reads are aligned.
    assert!((60 * KIB..62 * KIB).contains(&(read / units)), "{read} bytes of {units} units");
    let walls: u64 = stats.recent_passes.iter().map(|own| own.wall_ns).sum();
    assert_eq!(stats.recent_ns, walls + 3 * 7 * MS, "also contains the time between passes");
    assert!((stats.compute.other_s - 0.006).abs() < 1e-4, "{:?}", stats.compute);
    assert!(stats.compute.units.iter().all(|(_, seconds)| (seconds - 0.02).abs() < 1e-9));
}

#[test]
fn the_bottleneck_is_what_the_pass_spent_its_time_on() {
    let model = Model::new(&[60 * KIB; UNITS]);
    for (read_ms, compute_ms, expected) in
        [(0, 20, Bottleneck::Compute), (20, 1, Bottleneck::Storage)]
    {
        let times = Arc::new(Times::default());
        times.read_ns.store(read_ms * MS, Ordering::SeqCst);
        let engine = model.engine(timed(&times, config(310 * KIB))).unwrap();
        passes(4, &engine, &times, compute_ms * MS);
        let stats = engine.stats();
        let last = stats.recent_passes.last().unwrap();
        assert_eq!(last.bottleneck(stats.workers), expected);
        assert_eq!(stats.plan.bottleneck, expected);
        let measured_s = last.wall_ns as f64 / 1e9;
        let error = stats.plan.predicted_pass_s / measured_s - 1.0;
        assert!(error.abs() < 0.15, "{} s instead of {measured_s} s", stats.plan.predicted_pass_s);
    }
}

#[test]
fn the_plan_follows_the_learned_order() {
    let model = Model::new(&[200 * KIB; 8]);
    let times = Arc::new(Times::default());
    times.read_ns.store(5 * MS, Ordering::SeqCst);
    // Enough for the four units in use, and a slot for another unit.
    let engine = model.engine(timed(&times, config(1030 * KIB))).unwrap();
    let order = [7, 5, 3, 1];
    for _ in 0..4 {
        if pass(&engine, &times, &order, 2 * MS) {
            assert!(engine.replan());
        }
    }
    let before = engine.stats();
    pass(&engine, &times, &order, 2 * MS);
    let after = engine.stats();
    assert_eq!(
        after.total_read_bytes(),
        before.total_read_bytes(),
        "the four units in use fit and are resident"
    );
    assert!(order.iter().all(|&u| after.units[u as usize].resident));
}

#[test]
fn a_lasting_change_of_speed_is_planned_for() {
    let model = Model::new(&[60 * KIB; UNITS]);
    let times = Arc::new(Times::default());
    times.read_ns.store(MS, Ordering::SeqCst);
    let engine = model.engine(timed(&times, config(310 * KIB))).unwrap();
    passes(5, &engine, &times, 20 * MS);
    let fast = engine.plan().predicted_pass_s;
    times.read_ns.store(40 * MS, Ordering::SeqCst);
    passes(3, &engine, &times, 20 * MS);
    let slow = engine.plan().predicted_pass_s;
    assert!(slow > 1.2 * fast, "the plan predicts {slow} s, and before {fast} s");
}

#[test]
fn a_curve_falls_with_the_budget() {
    let model = Model::new(&[60 * KIB; UNITS]);
    let times = Arc::new(Times::default());
    times.read_ns.store(5 * MS, Ordering::SeqCst);
    let engine = model.engine(timed(&times, config(310 * KIB))).unwrap();
    passes(4, &engine, &times, 2 * MS);
    let budgets = [KIB, 200 * KIB, 310 * KIB, 1000 * KIB];
    let curve = engine.curve(&budgets);
    let found: Vec<usize> = curve.iter().map(|point| point.budget_bytes).collect();
    assert_eq!(found, budgets[1..], "the first one is too small");
    assert!(curve.is_sorted_by(|less, more| less.predicted_pass_s > more.predicted_pass_s));
    let whole = curve.last().unwrap();
    assert_eq!((whole.streamed_bytes_per_pass, whole.bottleneck), (0, Bottleneck::Compute));
    let own = engine.stats().plan.predicted_pass_s;
    assert!((curve[1].predicted_pass_s / own - 1.0).abs() < 0.05);
}
