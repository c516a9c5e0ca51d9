// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams eight layers of 1 MiB under a budget of 4 MiB.
//!
//! ```sh
//! cargo run -p tensorstream-orchestrator --example stream_layers
//! ```

use std::error::Error;
use std::io::Write;

use ts_orchestrator::ts_format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};
use ts_orchestrator::ts_io::Source;
use ts_orchestrator::{Engine, EngineConfig, Phase, Unit, UnitId, UnitTensor};

const LAYERS: u32 = 8;
const LAYER_BYTES: u64 = 1 << 20;
const BUDGET_BYTES: usize = 4 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut file = tempfile::NamedTempFile::new()?;
    for layer in 0..LAYERS {
        file.write_all(&vec![layer as u8; LAYER_BYTES as usize])?;
    }
    file.flush()?;

    let units = (0..LAYERS).map(layer).collect();
    let sources = vec![Source::open(file.path())?];
    let engine = Engine::new(units, sources, EngineConfig::with_budget(BUDGET_BYTES))?;
    let mut out = std::io::stdout();
    for number in 1..=2 {
        let before = engine.stats().total_read_bytes();
        let pass = engine.begin_pass();
        for unit in 0..LAYERS {
            let lease = engine.acquire(Some(pass), UnitId(unit))?;
            let weights = lease.tensor(0);
            assert!(weights.iter().all(|&byte| byte == unit as u8));
        }
        engine.end_pass(pass);
        let read = engine.stats().total_read_bytes() - before;
        writeln!(out, "pass {number} read {:.1} MiB", mib(read))?;
    }
    let stats = engine.stats();
    let resident = stats.units.iter().filter(|unit| unit.resident).count();
    let (used, budget) = (stats.in_use_high_water_bytes as u64, stats.budget_bytes as u64);
    writeln!(out, "{resident} of {LAYERS} layers are resident")?;
    writeln!(out, "at most {:.1} of {:.1} MiB were used", mib(used), mib(budget))?;
    Ok(())
}

/// Returns a unit with one tensor, which is `layer` MiB from the beginning of the file.
fn layer(layer: u32) -> Unit {
    let offset = u64::from(layer) * LAYER_BYTES;
    let parts = vec![ByteRange { file: FileId(0), offset, len: LAYER_BYTES }];
    let meta = TensorMeta { dtype: Dtype::U8, shape: vec![LAYER_BYTES] };
    let tensor = UnitTensor {
        name: format!("layer.{layer}.weight"),
        entry: TensorEntry { meta, parts },
        phase: Phase::Mapped,
        digest: None,
        chunks: Vec::new(),
    };
    Unit::new(format!("layer.{layer}"), vec![tensor])
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
