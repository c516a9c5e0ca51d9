// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random programs: threads that visit units in any order, while reads fail, the limit changes, and
//! units are kept whole, kept compressed, encoded in memory, or streamed.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{quiet, with_compression};
use crate::weights::{weights_of, write_units};
use proptest::prelude::*;
use proptest::sample::Index;
use tensorstream::format::Compression;
use tensorstream::io::Registry;
use tensorstream::io::fault::{Attempt, Fault, Faults, FaultyProvider};
use tensorstream::orchestrator::{
    Engine, EngineConfig, Error, ErrorKind, PassId, Prefetch, TensorBytes, UnitId, Verify,
};
use tensorstream::{Checkpoint, convert};

const PREFETCH: &[Prefetch] =
    &[Prefetch::None, Prefetch::NextLayer, Prefetch::Adaptive, Prefetch::Aggressive];

/// A step of a pass.
#[derive(Debug, Clone)]
enum Step {
    Visit(Index),
    /// Keeps the tensor until the end of the pass.
    Keep(Index),
    Pair(Index, Index),
    Discard(Index),
    /// Sets the limit to a share of what exceeds the smallest one, in percent.
    Limit(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => any::<Index>().prop_map(Step::Visit),
        2 => any::<Index>().prop_map(Step::Keep),
        2 => any::<(Index, Index)>().prop_map(|(a, b)| Step::Pair(a, b)),
        1 => any::<Index>().prop_map(Step::Discard),
        2 => (0usize..150).prop_map(Step::Limit),
    ]
}

/// Returns an interrupt that ends a wait after about five seconds.
fn patience() -> impl FnMut() -> bool {
    let mut ticks = 0;
    move || {
        ticks += 1;
        ticks > 250
    }
}

/// A model on storage, and the engine that streams it.
struct Program {
    engine: Engine,
    expected: Vec<Vec<u8>>,
    budget_bytes: usize,
    threads: usize,
}

impl Program {
    /// Leases units at the same time, and compares their bytes. Repeats this while reads fail, and
    /// while other code keeps the memory. Drops `kept` if its memory is needed.
    fn visit(&self, pass: PassId, units: &[usize], kept: &mut Vec<(usize, TensorBytes)>) {
        let ids: Vec<UnitId> = units.iter().map(|&unit| UnitId(unit as u32)).collect();
        for _ in 0..1000 {
            match self.engine.acquire_all_interruptible(Some(pass), &ids, &mut patience()) {
                Ok(leases) => {
                    let tensors = leases.iter().map(|lease| lease.tensor(0));
                    tensors.zip(units).for_each(|(bytes, &unit)| self.check(unit, &bytes));
                    return;
                }
                Err(error) if error.kind() == ErrorKind::Storage => {}
                // A thread keeps tensors, or has replaced a unit that another one uses. Or threads
                // that keep tensors wait for each other, and each must drop its own.
                Err(Error::StillReferenced { .. } | Error::Deadlock { .. }) => {
                    kept.clear();
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(Error::NeverFits(_)) if units.len() > 1 => return,
                Err(error) => panic!("only injected faults cause errors: {error}"),
            }
        }
        panic!("nothing prevents a visit for ever");
    }

    fn check(&self, unit: usize, bytes: &TensorBytes) {
        assert!(bytes[..] == self.expected[unit][..], "unit {unit} has the right bytes");
    }

    fn run(&self, steps: &[Step]) {
        let count = self.expected.len();
        let pass = self.engine.begin_pass();
        let mut kept = Vec::new();
        for step in steps {
            match step {
                Step::Visit(at) => self.visit(pass, &[at.index(count)], &mut kept),
                Step::Pair(a, b) => self.visit(pass, &[a.index(count), b.index(count)], &mut kept),
                Step::Keep(at) => {
                    let unit = at.index(count);
                    let lease = self.engine.acquire_interruptible(
                        Some(pass),
                        UnitId(unit as u32),
                        &mut patience(),
                    );
                    kept.extend(lease.map(|lease| (unit, lease.tensor(0))));
                }
                Step::Discard(at) => self.engine.discard(UnitId(at.index(count) as u32)).unwrap(),
                Step::Limit(percent) => {
                    let smallest = self.engine.smallest_limit();
                    let spare = self.budget_bytes.saturating_sub(smallest) / 100 * percent;
                    // Another thread may have used a larger pair since.
                    match self.engine.set_limit(smallest + spare) {
                        Ok(()) | Err(Error::NeverFits(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        }
        kept.iter().for_each(|(unit, bytes)| self.check(*unit, bytes));
        drop(kept);
        if self.engine.end_pass(pass) {
            self.engine.replan();
        }
        if self.threads == 1 && self.engine.limit_in_force() {
            let stats = self.engine.stats();
            assert!(stats.in_use_bytes <= stats.limit_bytes, "{stats:?}");
        }
    }
}

/// Writes units to a file: as safetensors, or as a `.ts` file with or without compression.
fn stored(directory: &Path, units: &[Vec<u8>], form: usize) -> Checkpoint {
    let (plain, file) = (directory.join("plain.safetensors"), directory.join("a.ts"));
    write_units(&plain, units);
    let Some(compression) = [None, Some(Compression::None), Some(Compression::Auto)][form] else {
        return Checkpoint::open(&plain).unwrap();
    };
    convert(&plain, &file, with_compression(compression, 1), &mut quiet).unwrap();
    Checkpoint::open(&file).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// All bytes are right, also those that are kept until the end of a pass. Nothing hangs, and
    /// the budget is kept. At the end, each unit can be loaded.
    #[test]
    fn random_programs_read_the_right_bytes(
        sizes in prop::collection::vec(prop_oneof![1usize..150_000, 500_000usize..1_200_000], 2..9),
        random in any::<u16>(),
        form in 0usize..3,
        keep_compressed: bool,
        // Units are encoded in memory only with a large budget.
        spare in prop_oneof![0usize..(4 << 20), Just(100 << 20)],
        passes in prop::collection::vec(prop::collection::vec(step(), 1..14), 2..6),
        threads in 1usize..3,
        seed: u64,
        faults in 0.0..0.1f64,
        prefetch in prop::sample::select(PREFETCH),
        verify in prop::sample::select(vec![Verify::EveryRead, Verify::Once, Verify::Never]),
    ) {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut expected: Vec<Vec<u8>> =
            sizes.iter().enumerate().map(|(i, &len)| weights_of(i, 2 * len)).collect();
        for (i, unit) in expected.iter_mut().enumerate().filter(|(i, _)| random >> i & 1 == 1) {
            // Bytes that do not shrink.
            let mix = |at: usize| (at as u64 ^ seed ^ i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            unit.iter_mut().enumerate().for_each(|(at, byte)| *byte = (mix(at) >> 40) as u8);
        }
        let checkpoint = stored(directory.path(), &expected, form);
        // A read takes a second by the clock of the engine, so that everything that saves reads
        // pays.
        let (reads, failing) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(true)));
        let (clock, fails) = (Arc::clone(&reads), Arc::clone(&failing));
        let decide = move |attempt: &Attempt<'_>| {
            reads.fetch_add(1, Ordering::Relaxed);
            fails.load(Ordering::Relaxed).then(|| Fault::random(attempt, seed, faults)).flatten()
        };
        let config = |budget_bytes| {
            let buffered = Registry::builtin().choose(Some("buffered"), &[]).unwrap().provider;
            let mut registry = Registry::builtin();
            let (decide, clock) = (decide.clone(), Arc::clone(&clock));
            registry.register(Arc::new(FaultyProvider::new(buffered, Faults::new(decide))));
            EngineConfig::with_budget(budget_bytes)
                .with_request_bytes(256 << 10)
                .with_max_passes(threads)
                .with_prefetch(prefetch)
                .with_verify(verify)
                .with_keep_compressed(keep_compressed)
                .with_clock(Box::new(move || clock.load(Ordering::Relaxed) * 1_000_000_000))
                .with_registry(registry)
                .with_backend("buffered".to_owned())
        };
        let mut units = checkpoint.units_by_module();
        units.sort_by(|a, b| a.name.cmp(&b.name));
        let Err(tensorstream::Error::Engine(Error::NeverFits(refused))) =
            checkpoint.engine(units.clone(), config(0))
        else {
            panic!("a budget of 0 is refused")
        };
        let budget_bytes = refused.smallest_budget_bytes + spare;
        let engine = checkpoint.engine(units, config(budget_bytes)).unwrap();
        if spare == 100 << 20 {
            // The engine encodes units once the limit is below the size of the model.
            engine.set_limit(engine.smallest_limit() + (1 << 20)).unwrap();
        }
        let program = Program { engine, expected, budget_bytes, threads };
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| passes.iter().chain(&passes).for_each(|steps| program.run(steps)));
            }
        });
        failing.store(false, Ordering::Relaxed);
        let engine = &program.engine;
        engine.set_limit(usize::MAX).unwrap();
        engine.replan();
        let pass = engine.begin_pass();
        for unit in 0..program.expected.len() {
            program.visit(pass, &[unit], &mut Vec::new());
        }
        engine.end_pass(pass);
        let stats = engine.stats();
        prop_assert!(stats.reserved_high_water_bytes <= budget_bytes);
        prop_assert!(stats.in_use_high_water_bytes <= stats.reserved_high_water_bytes);
    }
}
