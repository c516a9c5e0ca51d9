// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parts: `cargo xtask bench parts`.
#![allow(missing_docs, clippy::unwrap_used)] // criterion's macros; a benchmark that cannot run may panic

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tensorstream::format::{ByteRange, CatalogReader, Dtype, FileId, TensorEntry, TensorMeta};
use tensorstream::io::Source;
use tensorstream::orchestrator::{
    Engine, EngineConfig, Phase, PlanRequest, Rates, Unit, UnitDemand, UnitId, UnitTensor, never_interrupt,
    plan,
};
use tensorstream::pool::{Budget, HostPool};

/// Allocate and free one block while others live.
fn pool(c: &mut Criterion) {
    let mut group = c.benchmark_group("pool/allocate+free");
    for live in [100usize, 10_000] {
        let pool = HostPool::new(&Budget::new(1 << 30), 1 << 30).unwrap();
        // Every other block is freed, so that the free space is in pieces.
        let blocks: Vec<_> = (0..2 * live).map(|i| pool.allocate(4096 * (1 + i % 7)).unwrap()).collect();
        let _kept: Vec<_> = blocks.into_iter().step_by(2).collect();
        group.bench_function(BenchmarkId::from_parameter(live), |b| {
            b.iter(|| black_box(pool.allocate(black_box(20_000)).unwrap()));
        });
    }
    group.finish();
}

/// Plans a model of 22 layers with 9 units each under half its size.
fn planner(c: &mut Criterion) {
    let sizes = [8_392_704, 1_052_672, 1_052_672, 8_392_704, 23_072_768, 23_072_768, 23_072_768, 8192, 8192];
    let units: Vec<_> = (0..22 * sizes.len())
        .map(|i| {
            let bytes = sizes[i % sizes.len()];
            UnitDemand {
                name: format!("u{i}"),
                slot_bytes: bytes,
                read_bytes: bytes as u64,
                compute_s: bytes as f64 / 1e10,
            }
        })
        .collect();
    let order: Vec<_> = (0..units.len() as u32).map(UnitId).collect();
    c.bench_function("plan/198 units", |b| {
        let request = PlanRequest {
            units: &units,
            order: &order,
            budget_bytes: 1 << 30,
            max_passes: 1,
            rates: Rates::default(),
            least_ring_bytes: 0,
        };
        b.iter(|| plan(black_box(&request)).unwrap());
    });
}

fn catalog(c: &mut Criterion) {
    let tensors = 10_000;
    let fields: Vec<_> = (0..tensors)
        .map(|i| {
            format!(
                r#""model.layers.{i}.w":{{"dtype":"BF16","shape":[4,4],"data_offsets":[{},{}]}}"#,
                i * 32,
                i * 32 + 32
            )
        })
        .collect();
    let header = format!("{{{}}}", fields.join(","));
    let file_len = 8 + header.len() as u64 + tensors * 32;
    let mut group = c.benchmark_group("catalog");
    group.throughput(Throughput::Elements(tensors)).sample_size(20);
    group.bench_function("10k tensors", |b| {
        b.iter(|| {
            let mut reader = CatalogReader::single("m");
            reader.feed(&(header.len() as u64).to_le_bytes(), file_len).unwrap();
            reader.feed(header.as_bytes(), file_len).unwrap();
            reader.finish().unwrap()
        });
    });
    group.finish();
}

/// What the engine adds to a pass over units that are in memory, and streaming from the page cache.
fn engine(c: &mut Criterion) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("weights");
    let (count, len) = (64u64, 1u64 << 20);
    std::fs::write(&path, vec![7u8; (count * len) as usize]).unwrap();
    let units: Vec<_> = (0..count)
        .map(|i| {
            let parts = vec![ByteRange { file: FileId(0), offset: i * len, len }];
            let entry = TensorEntry { meta: TensorMeta { dtype: Dtype::U8, shape: vec![len] }, parts };
            let tensor = UnitTensor {
                name: format!("t{i}"),
                entry,
                phase: Phase::Mapped,
                digest: None,
                chunks: vec![],
            };
            Unit { name: format!("u{i}"), tensors: vec![tensor] }
        })
        .collect();
    let mut group = c.benchmark_group("engine/pass of 64 x 1 MiB");
    group.sample_size(20);
    for (name, budget) in [("resident", 96 << 20), ("streamed", 8 << 20)] {
        let sources = vec![Source::open(&path).unwrap()];
        let engine = Engine::new(units.clone(), sources, EngineConfig::with_budget(budget)).unwrap();
        group.bench_function(name, |b| {
            b.iter(|| {
                let pass = engine.begin_pass(never_interrupt()).unwrap();
                for i in 0..count as u32 {
                    black_box(engine.acquire(Some(pass), UnitId(i), never_interrupt()).unwrap().tensor(0));
                }
                engine.end_pass(pass)
            });
        });
    }
    group.finish();
}

criterion_group!(parts, pool, planner, catalog, engine);
criterion_main!(parts);
