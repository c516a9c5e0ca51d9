// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests that plans predict from the speeds that earlier engines measured.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use tensorstream::orchestrator::{EngineConfig, UnitId};
use tensorstream::{Checkpoint, Speeds};

const UNITS: usize = 6;
const UNIT_BYTES: usize = 4 << 20;
const BUDGET: usize = 12 << 20;

fn write_checkpoint(path: &Path) {
    let tensor = |i: usize| {
        let (begin, end) = (i * UNIT_BYTES, (i + 1) * UNIT_BYTES);
        let tail = format!(r#""shape":[{UNIT_BYTES}],"data_offsets":[{begin},{end}]"#);
        format!(r#""u{i}.weight":{{"dtype":"U8",{tail}}}"#)
    };
    let header = format!("{{{}}}", (0..UNITS).map(tensor).collect::<Vec<_>>().join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + UNITS * UNIT_BYTES, 1);
    fs::write(path, file).unwrap();
}

/// Streams the checkpoint this many times, and remembers the speeds.
fn run(speeds: &Speeds, checkpoint: &Checkpoint, passes: usize) {
    let units = checkpoint.units_by_module();
    let config = speeds.recall(checkpoint, &units, EngineConfig::with_budget(BUDGET));
    // The file was just written, so it is in the page cache. Other backends may read a part of it
    // from the device, and then neither speed is known.
    let config = config.with_backend("buffered".to_owned());
    // Each look at the clock takes 200 µs, so that one pass is too short to measure.
    let now_ns = AtomicU64::new(0);
    let config = config.with_clock(Box::new(move || now_ns.fetch_add(200_000, Ordering::SeqCst)));
    let engine = checkpoint.engine(units, config).unwrap();
    for _ in 0..passes {
        let pass = engine.begin_pass();
        for unit in 0..UNITS as u32 {
            drop(engine.acquire(Some(pass), UnitId(unit)).unwrap());
        }
        engine.end_pass(pass);
    }
    speeds.remember(checkpoint, &engine.stats());
}

#[test]
fn later_plans_predict_from_measured_speeds() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("model.safetensors");
    write_checkpoint(&path);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let units = checkpoint.units_by_module();
    let speeds = Speeds::in_directory(Some(directory.path().join("speeds")));
    let recall = |speeds: &Speeds| {
        let config = EngineConfig::with_budget(BUDGET);
        speeds.recall(&checkpoint, &units, config)
    };
    let text = |config: &EngineConfig| checkpoint.explain(config).unwrap().to_string();
    let assumed = recall(&speeds);
    assert!(text(&assumed).contains("1.000 GB/s (assumed)"));

    run(&speeds, &checkpoint, 1);
    assert_eq!(recall(&speeds).rates, assumed.rates, "too little was read");

    run(&speeds, &checkpoint, 60);
    let measured = recall(&speeds);
    assert_ne!(measured.rates.read_bytes_per_s, assumed.rates.read_bytes_per_s);
    assert!(text(&measured).contains("(as measured)"), "{}", text(&measured));
    assert_eq!(measured.compute.units.len(), UNITS);

    let renamed = directory.path().join("other.safetensors");
    write_checkpoint(&renamed);
    let other = Checkpoint::open(&renamed).unwrap();
    let config = speeds.recall(&other, &units, EngineConfig::with_budget(BUDGET));
    assert_ne!(config.rates.read_bytes_per_s, assumed.rates.read_bytes_per_s);
    assert!(config.compute.units.is_empty(), "the computation belongs to a model");

    let nowhere = Speeds::in_directory(None);
    run(&nowhere, &checkpoint, 60);
    assert_eq!(recall(&nowhere).rates, assumed.rates);
}
