// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures units that are small: the rate at which they are streamed beside the sequential rate of
//! the disk in turn, what a visit costs, and how long an engine takes to create.
//!
//! ```sh
//! cargo run --release -p tensorstream-orchestrator --example small_units -- FILE_MIB KIB [ROUNDS]
//! ```

use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use ts_orchestrator::ts_format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};
use ts_orchestrator::ts_io::ts_pool::{Budget, HostPool};
use ts_orchestrator::ts_io::{Registry, Source, Workload, measure};
use ts_orchestrator::{Engine, EngineConfig, EngineStats, Phase, Unit, UnitId, UnitTensor};

/// Where the first unit begins, as after the header of a file. Units are not aligned to blocks.
const HEADER_BYTES: u64 = 1000 * 64 + 64;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<u64> =
        std::env::args().skip(1).map(|argument| argument.parse()).collect::<Result<_, _>>()?;
    let [file_mib, unit_kib, rest @ ..] = &arguments[..] else {
        return Err("usage: small_units FILE_MIB KIB [ROUNDS]".into());
    };
    let rounds = rest.first().copied().unwrap_or(5);
    let (file_bytes, unit_bytes) = (file_mib << 20, unit_kib << 10);
    let count = u32::try_from((file_bytes - HEADER_BYTES) / unit_bytes)?;
    // Not in a directory for temporary files, which may be in memory.
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target");
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    let mut block = vec![0u8; 1 << 20];
    for number in 0..*file_mib {
        block.iter_mut().zip(0u64..).for_each(|(byte, i)| *byte = (i * 31 + number) as u8);
        file.write_all(&block)?;
    }
    file.as_file().sync_all()?;
    let source = Source::open(file.path())?;
    source.evict()?;

    let mut out = std::io::stdout();
    let streamed_budget = (file_bytes / 4) as usize;
    let engine = |budget: usize| -> Result<Engine, Box<dyn Error>> {
        let units = (0..count).map(|i| unit(i, unit_bytes)).collect();
        let config = EngineConfig::with_budget(budget);
        Ok(Engine::new(units, vec![Arc::clone(&source)], config)?)
    };
    let began = Instant::now();
    let streaming = engine(streamed_budget)?;
    writeln!(
        out,
        "{count} units of {unit_kib} KiB: engine {:.3} s",
        began.elapsed().as_secs_f64()
    )?;
    for _ in 0..3 {
        pass(&streaming, count);
    }
    let pool = HostPool::new(&Budget::new(64 << 20), 64 << 20)?;
    let mut ratios = Vec::new();
    for round in 0..rounds {
        let provider = Registry::builtin().choose(Some("uring"), &[Arc::clone(&source)])?.provider;
        let workload = Workload::default().with_ranges(vec![(0, file_bytes)]);
        let disk = measure(&*provider, &source, &workload, &pool, &mut || false)?;
        let disk_rate = disk.bytes as f64 / disk.wall.as_secs_f64();
        let (seconds, read, loads) = pass(&streaming, count);
        let rate = read as f64 / seconds;
        ratios.push(rate / disk_rate);
        let beyond_us = (seconds - read as f64 / disk_rate) / loads.max(1) as f64 * 1e6;
        writeln!(
            out,
            "round {round}: disk {:7.1} MB/s, units {:7.1} MB/s, ratio {:.3}, {loads} loads of \
             {count} visits, {:.1} us a visit, {beyond_us:.1} us a load beyond the read",
            disk_rate / 1e6,
            rate / 1e6,
            rate / disk_rate,
            seconds / f64::from(count) * 1e6,
        )?;
    }
    ratios.sort_by(f64::total_cmp);
    writeln!(out, "median ratio {:.3}", ratios[ratios.len() / 2])?;
    drop(streaming);

    let resident = engine(2 * file_bytes as usize)?;
    for _ in 0..3 {
        pass(&resident, count);
    }
    let mut times: Vec<f64> = (0..rounds).map(|_| pass(&resident, count).0).collect();
    times.sort_by(f64::total_cmp);
    let each_us = times[times.len() / 2] / f64::from(count) * 1e6;
    writeln!(out, "resident visit {each_us:.2} us")?;
    Ok(())
}

/// Runs a pass. Returns its duration in seconds, the bytes that it read, and the number of loads.
fn pass(engine: &Engine, count: u32) -> (f64, u64, u64) {
    let loads = |stats: &EngineStats| stats.units.iter().map(|unit| unit.loads).sum::<u64>();
    let before = engine.stats();
    let began = Instant::now();
    let id = engine.begin_pass();
    for unit in 0..count {
        let lease = engine.acquire(Some(id), UnitId(unit)).expect("the file does not change");
        let first = HEADER_BYTES + u64::from(unit) * lease.tensor(0).len() as u64;
        let (number, at) = (first >> 20, first % (1 << 20));
        assert_eq!(lease.tensor(0)[0], (at * 31 + number) as u8, "unit {unit}");
    }
    let better = engine.end_pass(id);
    let seconds = began.elapsed().as_secs_f64();
    if better {
        engine.replan();
    }
    let after = engine.stats();
    let read = after.total_read_bytes() - before.total_read_bytes();
    (seconds, read, loads(&after) - loads(&before))
}

fn unit(number: u32, len: u64) -> Unit {
    let offset = HEADER_BYTES + u64::from(number) * len;
    let parts = vec![ByteRange { file: FileId(0), offset, len }];
    let tensor = UnitTensor {
        name: format!("layer.{number}.weight"),
        entry: TensorEntry { meta: TensorMeta { dtype: Dtype::U8, shape: vec![len] }, parts },
        phase: Phase::Mapped,
        digest: None,
        chunks: Vec::new(),
    };
    Unit::new(format!("layer.{number}"), vec![tensor])
}
