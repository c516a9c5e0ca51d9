// SPDX-License-Identifier: MIT OR Apache-2.0
//! Benchmarks of single parts: `cargo xtask bench parts`.
// `criterion_group!` generates undocumented items. A benchmark that cannot run may panic.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tensorstream::format::{
    ByteRange, CHUNK_LEN, Catalog, Codec, Dtype, Encoder, FileId, Scratch, SplitLayout,
    TensorEntry, TensorMeta, decode_chunk,
};
use tensorstream::io::Source;
use tensorstream::orchestrator::{
    Engine, EngineConfig, Phase, PlanRequest, Unit, UnitDemand, UnitId, UnitTensor, plan,
};
use tensorstream::pool::{Budget, HostPool};
use tensorstream::{FileWriter, NewTensor};

/// Measures allocating and freeing a block of a fragmented pool.
fn pool(c: &mut Criterion) {
    let mut group = c.benchmark_group("pool/allocate+free");
    for live in [100usize, 10_000] {
        let pool = HostPool::new(&Budget::new(1 << 30), 1 << 30).unwrap();
        // Freeing every other block fragments the free space.
        let blocks: Vec<_> =
            (0..2 * live).map(|i| pool.allocate(4096 * (1 + i % 7)).unwrap()).collect();
        let _kept: Vec<_> = blocks.into_iter().step_by(2).collect();
        group.bench_function(BenchmarkId::from_parameter(live), |b| {
            b.iter(|| black_box(pool.allocate(black_box(20_000)).unwrap()));
        });
    }
    group.finish();
}

/// Measures planning a model of 22 layers with 9 units each, and a model of 10,000 units that can
/// be kept compressed. The budget is about half of the model's size.
fn planner(c: &mut Criterion) {
    let sizes = [
        8_392_704, 1_052_672, 1_052_672, 8_392_704, 23_072_768, 23_072_768, 23_072_768, 8192, 8192,
    ];
    let units: Vec<_> = (0..22 * sizes.len())
        .map(|i| {
            let bytes = sizes[i % sizes.len()];
            UnitDemand::new(format!("u{i}"), bytes).with_compute_s(bytes as f64 / 1e10)
        })
        .collect();
    let order: Vec<_> = (0..units.len() as u32).map(UnitId).collect();
    c.bench_function("plan/198 units", |b| {
        let request = PlanRequest::new(&units, &order, 1 << 30);
        b.iter(|| plan(black_box(&request)).unwrap());
    });
    let units: Vec<_> = (0..10_000)
        .map(|i| {
            let bytes = sizes[i % sizes.len()] / 8;
            UnitDemand::new(format!("u{i}"), bytes)
                .with_compute_s(bytes as f64 / 1e10)
                .with_compressed(bytes * 2 / 3, bytes as f64 / 3e9)
        })
        .collect();
    let order: Vec<_> = (0..units.len() as u32).map(UnitId).collect();
    c.bench_function("plan/10000 units, compressed or not", |b| {
        let request = PlanRequest::new(&units, &order, 4 << 30);
        b.iter(|| plan(black_box(&request)).unwrap());
    });
}

/// Measures parsing the catalogs of a `.ts` file and a safetensors file with 100,000 tensors each.
/// The safetensors crate also parses the safetensors file.
fn catalog(c: &mut Criterion) {
    let tensors = 100_000u64;
    let meta = TensorMeta { dtype: Dtype::BF16, shape: vec![4, 4] };
    let names: Vec<_> =
        (0..tensors).map(|i| format!("model.layers.{i}.self_attn.q_proj.weight")).collect();
    let declared =
        |name: &String| NewTensor { name: name.clone(), meta: meta.clone(), phase: None };
    let file = |name: &str| {
        let all = names.iter().map(declared).collect();
        let mut writer =
            FileWriter::in_memory(name, all, Default::default(), Default::default()).unwrap();
        writer.write(&vec![1; tensors as usize * 32]).unwrap();
        writer.into_bytes().unwrap()
    };
    let mut group = c.benchmark_group("catalog of 100k tensors");
    group.throughput(Throughput::Elements(tensors)).sample_size(20);
    let (container, safetensors) = (file("a.ts"), file("a.safetensors"));
    for (name, bytes) in [(".ts", &container), ("safetensors", &safetensors)] {
        group.bench_function(name, |b| {
            b.iter(|| Catalog::from_bytes("m", black_box(bytes)).unwrap());
        });
    }
    group.bench_function("the safetensors crate", |b| {
        b.iter(|| safetensors::SafeTensors::deserialize(black_box(&safetensors)).unwrap());
    });
    let catalog = Catalog::from_bytes("m", &container).unwrap();
    println!("a tensor takes {} bytes, without its name", catalog.heap_bytes() / tensors as usize);
    group.finish();
}

/// Returns a chunk of floats as F32, and one as BF16. Their exponents are distributed like those of
/// weights.
fn chunks_of_floats() -> (Vec<u8>, Vec<u8>) {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    // The sum of four uniformly distributed numbers is nearly normally distributed.
    let floats: Vec<f32> = (0..CHUNK_LEN / 4)
        .map(|_| (0..4).map(|_| next() as f32 / (1 << 24) as f32 - 0.5).sum::<f32>() * 0.02)
        .collect();
    let singles: Vec<u8> = floats.iter().flat_map(|float| float.to_le_bytes()).collect();
    let halves: Vec<u8> =
        floats.iter().chain(&floats).flat_map(|f| f.to_le_bytes().into_iter().skip(2)).collect();
    (singles, halves)
}

/// Measures decoding one chunk of floats into memory that is reused.
fn codecs(c: &mut Criterion) {
    let (singles, halves) = chunks_of_floats();
    let mut group = c.benchmark_group("decode a chunk");
    group.throughput(Throughput::Bytes(CHUNK_LEN)).sample_size(50);
    for (name, dtype, raw) in [("F32", Dtype::F32, &singles), ("BF16", Dtype::BF16, &halves)] {
        for codec in [Codec::Split, Codec::Zstd] {
            let (mut stored, mut out, mut scratch) =
                (Vec::new(), vec![0; raw.len()], Scratch::default());
            let encoded = Encoder::new(codec, None).unwrap().encode(dtype, raw, &mut stored);
            group.bench_function(format!("{codec} {name}"), |b| {
                b.iter(|| {
                    decode_chunk(encoded.codec, encoded.width, &stored, &mut out, &mut scratch)
                        .unwrap();
                });
            });
        }
    }
    group.finish();
}

/// Measures how much of decoding a device could save by merging planes: decodes 64 chunks to
/// elements; to planes, as they would be copied to the device; and only those planes that are
/// coded, as if the device read the others where they are stored. Also measures what the host does
/// once if the device decodes everything: it takes the chunks apart.
fn planes(c: &mut Criterion) {
    /// The elements in a block of a chunk (FORMAT.md).
    const BLOCK: usize = 256 << 10;
    const CHUNKS: usize = 64;
    let (singles, halves) = chunks_of_floats();
    let mut group = c.benchmark_group("decode 64 chunks");
    group.throughput(Throughput::Bytes(CHUNKS as u64 * CHUNK_LEN)).sample_size(20);
    for (name, dtype, raw) in [("F32", Dtype::F32, &singles), ("BF16", Dtype::BF16, &halves)] {
        let mut chunk = Vec::new();
        let encoded = Encoder::new(Codec::Split, None).unwrap().encode(dtype, raw, &mut chunk);
        let width = usize::from(encoded.width);
        let stored = chunk.repeat(CHUNKS);
        let mut out = vec![0; CHUNKS * raw.len()];
        let mut scratch = Scratch::default();
        group.bench_function(format!("to elements, {name}"), |b| {
            b.iter(|| {
                for (stored, out) in
                    stored.chunks(chunk.len()).zip(out.chunks_mut(CHUNK_LEN as usize))
                {
                    decode_chunk(encoded.codec, encoded.width, stored, out, &mut scratch).unwrap();
                }
            });
        });
        group.bench_function(format!("taken apart, {name}"), |b| {
            b.iter(|| {
                for stored in stored.chunks(chunk.len()) {
                    black_box(SplitLayout::new(stored, width, raw.len()).unwrap());
                }
            });
        });
        let mut zstd = zstd::zstd_safe::DCtx::create();
        for (what, copies) in [("to planes", true), ("coded planes", false)] {
            group.bench_function(format!("{what}, {name}"), |b| {
                b.iter(|| {
                    for (stored, out) in
                        stored.chunks(chunk.len()).zip(out.chunks_mut(CHUNK_LEN as usize))
                    {
                        let planes = out.len().div_ceil(BLOCK * width) * width;
                        let (lens, mut bytes) = stored.split_at(4 * planes);
                        let lens = lens.as_chunks().0.iter().map(|len| u32::from_le_bytes(*len));
                        let count = BLOCK.min(out.len() / width);
                        for (len, plane) in lens.zip(out.chunks_mut(count)) {
                            let (coded, rest) = bytes.split_at(len as usize);
                            bytes = rest;
                            if coded.len() < plane.len() {
                                zstd.decompress(plane, coded).unwrap();
                            } else if copies {
                                plane.copy_from_slice(coded);
                            }
                        }
                    }
                });
            });
        }
    }
    group.finish();
}

/// Measures a pass over resident units, which shows the overhead of the engine. Also measures a
/// pass that streams the units from the page cache.
fn engine(c: &mut Criterion) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("weights");
    let (count, len) = (64u64, 1u64 << 20);
    std::fs::write(&path, vec![7u8; (count * len) as usize]).unwrap();
    let units: Vec<_> = (0..count)
        .map(|i| {
            let parts = vec![ByteRange { file: FileId(0), offset: i * len, len }];
            let entry =
                TensorEntry { meta: TensorMeta { dtype: Dtype::U8, shape: vec![len] }, parts };
            let tensor = UnitTensor {
                name: format!("t{i}"),
                entry,
                phase: Phase::Mapped,
                digest: None,
                chunks: vec![],
            };
            Unit::new(format!("u{i}"), vec![tensor])
        })
        .collect();
    let mut group = c.benchmark_group("engine/pass of 64 x 1 MiB");
    group.sample_size(20);
    for (name, budget) in [("resident", 96 << 20), ("streamed", 8 << 20)] {
        let sources = vec![Source::open(&path).unwrap()];
        let engine =
            Engine::new(units.clone(), sources, EngineConfig::with_budget(budget)).unwrap();
        group.bench_function(name, |b| {
            b.iter(|| {
                let pass = engine.begin_pass();
                for i in 0..count as u32 {
                    black_box(engine.acquire(Some(pass), UnitId(i)).unwrap().tensor(0));
                }
                engine.end_pass(pass)
            });
        });
    }
    group.finish();
}

criterion_group!(parts, pool, planner, catalog, codecs, planes, engine);
criterion_main!(parts);
