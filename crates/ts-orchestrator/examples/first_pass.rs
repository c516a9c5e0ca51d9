// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures the first passes over a file beside later ones, with and without threads that pre-fault
//! memory, in turn.
//!
//! ```sh
//! cargo run --release -p tensorstream-orchestrator --example first_pass -- \
//!     FILE_MIB UNIT_MIB BUDGET_MIB
//! ```

use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use ts_orchestrator::ts_format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};
use ts_orchestrator::ts_io::Source;
use ts_orchestrator::{Engine, EngineConfig, Phase, Unit, UnitId, UnitTensor};

const PASSES: usize = 6;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<u64> =
        std::env::args().skip(1).map(|argument| argument.parse()).collect::<Result<_, _>>()?;
    let [file_mib, unit_mib, budget_mib] = arguments[..] else {
        return Err("usage: first_pass FILE_MIB UNIT_MIB BUDGET_MIB".into());
    };
    // Not in a directory for temporary files, which may be in memory.
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target");
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    let block: Vec<u8> = (0..1u32 << 20).map(|i| (i * 31) as u8).collect();
    for _ in 0..file_mib {
        file.write_all(&block)?;
    }
    file.as_file().sync_all()?;
    let source = Source::open(file.path())?;
    source.evict()?;
    let count = (file_mib / unit_mib) as u32;
    let mut out = std::io::stdout();
    for threads in [0, 2, 0, 2] {
        let units = (0..count).map(|i| unit(i, unit_mib << 20)).collect();
        let config = EngineConfig::with_budget((budget_mib << 20) as usize)
            .with_watch_writes(true)
            .with_populate_in_passes(threads);
        let engine = Engine::new(units, vec![Arc::clone(&source)], config)?;
        write!(out, "{threads} threads:")?;
        let mut first_s = 0.0;
        for number in 0..PASSES {
            let (seconds, read) = pass(&engine, count)?;
            if number == 0 {
                first_s = seconds;
            }
            write!(out, " {seconds:.2} s ({} MiB)", read >> 20)?;
            if number + 1 == PASSES {
                write!(out, ", ratio {:.2}", first_s / seconds)?;
            }
        }
        let watched = if engine.stats().watches_writes { "watched" } else { "not watched" };
        writeln!(out, ", {watched}, {} written", engine.modified_units().len())?;
    }
    Ok(())
}

/// Runs a pass that reads every byte. Returns its duration in seconds, and the bytes that it read.
fn pass(engine: &Engine, count: u32) -> Result<(f64, u64), Box<dyn Error>> {
    let before = engine.stats().total_read_bytes();
    let began = Instant::now();
    let id = engine.begin_pass();
    let mut sum = 0u64;
    for unit in 0..count {
        let lease = engine.acquire(Some(id), UnitId(unit))?;
        sum += lease.tensor(0).iter().step_by(64).map(|&byte| u64::from(byte)).sum::<u64>();
    }
    let better = engine.end_pass(id);
    let seconds = began.elapsed().as_secs_f64();
    assert!(sum > 0);
    if better {
        engine.replan();
    }
    Ok((seconds, engine.stats().total_read_bytes() - before))
}

fn unit(number: u32, len: u64) -> Unit {
    let parts = vec![ByteRange { file: FileId(0), offset: u64::from(number) * len, len }];
    let tensor = UnitTensor {
        name: format!("layer.{number}.weight"),
        entry: TensorEntry { meta: TensorMeta { dtype: Dtype::U8, shape: vec![len] }, parts },
        phase: Phase::Mapped,
        digest: None,
        chunks: Vec::new(),
    };
    Unit::new(format!("layer.{number}"), vec![tensor])
}
