// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which experts stay in memory, and what that saves: `cargo xtask bench routing`.
//!
//! A seed chooses the experts of each token with Zipf's law, separately in each layer. In the
//! second half, the text changes its topic: other experts are frequent. Reports the share of
//! experts that were in memory, compared with the best fixed choice, and the bytes read with and
//! without ageing. The sizes are small, because only counts matter.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::HashMap;
use std::path::Path;

use tensorstream::format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};
use tensorstream::io::Source;
use tensorstream::orchestrator::{
    Access, Engine, EngineConfig, Error, Phase, Routing, Unit, UnitId, UnitTensor,
};

const LAYERS: u64 = 16;
const EXPERTS: u64 = 64;
const CHOSEN: usize = 4;
/// The size of an expert in bytes.
const EXPERT: u64 = 4096;

/// A small linear congruential generator, so that runs are reproducible.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns distinct experts, where the expert at position `i` of `order` has weight
    /// `1 / (i + 1)`.
    fn zipf(&mut self, order: &[u64]) -> Vec<u64> {
        let mut rest: Vec<(u64, f64)> =
            order.iter().enumerate().map(|(i, &id)| (id, 1.0 / (i + 1) as f64)).collect();
        let draw = |_| {
            let mut at = self.unit() * rest.iter().map(|(_, weight)| weight).sum::<f64>();
            let found = rest.iter().position(|(_, weight)| {
                at -= weight;
                at < 0.0
            });
            rest.swap_remove(found.unwrap_or(0)).0
        };
        (0..CHOSEN).map(draw).collect()
    }

    fn order(&mut self) -> Vec<u64> {
        let mut order: Vec<u64> = (0..EXPERTS).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, (self.unit() * (i + 1) as f64) as usize);
        }
        order
    }
}

type Token = Vec<Vec<UnitId>>;

/// Returns the experts of each layer for each token of a text about one topic.
fn text(tokens: usize, seed: u64) -> Vec<Token> {
    let mut random = Random(seed);
    let orders: Vec<Vec<u64>> = (0..LAYERS).map(|_| random.order()).collect();
    let layer = |random: &mut Random, layer: usize| {
        let ids = random.zipf(&orders[layer]).into_iter();
        ids.map(|id| UnitId((layer as u64 * EXPERTS + id) as u32)).collect()
    };
    (0..tokens).map(|_| (0..LAYERS as usize).map(|at| layer(&mut random, at)).collect()).collect()
}

fn engine(path: &Path, kept: usize, half_life: f64) -> Engine {
    let units = || -> Vec<Unit> {
        let unit = |i: u64| {
            let parts = vec![ByteRange { file: FileId(0), offset: i * EXPERT, len: EXPERT }];
            let meta = TensorMeta { dtype: Dtype::U8, shape: vec![EXPERT] };
            let name = format!("expert {i}");
            let (digest, chunks) = (None, Vec::new());
            let entry = TensorEntry { meta, parts };
            let tensor =
                UnitTensor { name: name.clone(), entry, phase: Phase::Mapped, digest, chunks };
            Unit::new(name, vec![tensor]).with_access(Access::Routed)
        };
        (0..LAYERS * EXPERTS).map(unit).collect()
    };
    let new = |budget: usize| {
        let routing = Routing::default().with_half_life(half_life);
        let config = EngineConfig::with_budget(budget).with_routing(routing);
        Engine::new(units(), vec![Source::open(path).unwrap()], config)
    };
    let Err(Error::NeverFits(least)) = new(1) else { panic!("a budget of 1 byte is too small") };
    new(least.smallest_budget_bytes + (kept - 1) * EXPERT as usize).unwrap()
}

/// The experts that a text chose, and how many of them were in memory and were read.
struct Counts {
    chosen: u64,
    hits: u64,
    loads: u64,
}

fn generate(engine: &Engine, text: &[Token]) -> Counts {
    let before = engine.stats();
    for token in text {
        let pass = engine.begin_pass();
        for layer in token {
            let expected = engine.expect(&layer.iter().map(|&id| (id, 1)).collect::<Vec<_>>());
            for &id in layer {
                drop(engine.acquire(Some(pass), id).unwrap());
            }
            drop(expected);
        }
        engine.end_pass(pass);
    }
    let after = engine.stats();
    let loads = |stats: &tensorstream::orchestrator::EngineStats| {
        stats.units.iter().map(|unit| unit.loads).sum::<u64>()
    };
    Counts {
        chosen: after.routed.touched - before.routed.touched,
        hits: after.routed.hits - before.routed.hits,
        loads: loads(&after) - loads(&before),
    }
}

/// Returns how many of the chosen experts the best fixed choice of `kept` experts contains.
fn best_fixed(text: &[Token], kept: usize) -> u64 {
    let mut counts: HashMap<UnitId, u64> = HashMap::new();
    for &id in text.iter().flatten().flatten() {
        *counts.entry(id).or_default() += 1;
    }
    let mut counts: Vec<u64> = counts.into_values().collect();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    counts.into_iter().take(kept).sum()
}

fn main() {
    // `cargo xtask ci` runs each benchmark once, without measuring.
    let quick = std::env::args().any(|argument| argument == "--test");
    let tokens = if quick { 8 } else { 1000 };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("experts");
    std::fs::write(&path, vec![1u8; (LAYERS * EXPERTS * EXPERT) as usize]).unwrap();
    let (first, second) = (text(tokens, 1), text(tokens, 2));
    println!(
        "{LAYERS} layers of {EXPERTS} experts, {CHOSEN} for each token, {tokens} tokens of each \
         topic\n"
    );
    println!(
        "| experts in memory | hits | of the best fixed choice | reads after a new topic, \
              without / with ageing |\n|---|---|---|---|"
    );
    for kept in [80, 160, 320, 512] {
        let [aged, ageless] = [Routing::default().half_life, f64::INFINITY].map(|half_life| {
            let engine = engine(&path, kept, half_life);
            let stationary = generate(&engine, &first);
            (stationary, generate(&engine, &second).loads)
        });
        let hits = aged.0.hits as f64 / aged.0.chosen as f64;
        let share = aged.0.hits as f64 / best_fixed(&first, kept) as f64;
        let (without, with) = (ageless.1, aged.1);
        println!(
            "| {kept} | {hits:.3} | {share:.3} | {without} / {with} = {:.2} |",
            without as f64 / with as f64
        );
    }
}
