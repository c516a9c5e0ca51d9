// SPDX-License-Identifier: MIT OR Apache-2.0
//! Units that are kept in memory compressed.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{quiet, with_compression};
use crate::weights::{weights_of, write_units};
use tensorstream::format::{ByteRange, Compression, Dtype, TensorEntry, TensorMeta};
use tensorstream::io::Registry;
use tensorstream::io::fault::{Faults, FaultyProvider};
use tensorstream::orchestrator::{
    Engine, EngineConfig, Phase, Rates, Residency, Unit, UnitId, UnitTensor, Verify,
};
use tensorstream::{Checkpoint, convert};

const UNITS: usize = 8;
const UNIT_BYTES: usize = 3 << 20;

/// Returns the bytes of a unit.
fn weights(unit: usize) -> Vec<u8> {
    weights_of(unit, UNIT_BYTES)
}

/// Writes a safetensors file with one tensor for each unit.
fn write_checkpoint(path: &Path) {
    write_units(path, &(0..UNITS).map(weights).collect::<Vec<_>>());
}

/// Runs a pass, compares all bytes, and returns how many were read.
fn pass(engine: &Engine, expected: &[Vec<u8>]) -> u64 {
    let before = engine.stats().total_read_bytes();
    let pass = engine.begin_pass();
    for (i, expected) in expected.iter().enumerate() {
        let lease = engine.acquire(Some(pass), UnitId(i as u32)).unwrap();
        assert!(lease.tensor(0)[..] == expected[..], "unit {i} has the right bytes");
    }
    engine.end_pass(pass);
    engine.stats().total_read_bytes() - before
}

/// Returns a configuration whose reads take a second each by the clock of the engine.
fn slow_reads(budget_bytes: usize) -> EngineConfig {
    let reads = Arc::new(AtomicU64::new(0));
    let clock = Arc::clone(&reads);
    let faults = Faults::new(move |_| {
        reads.fetch_add(1, Ordering::SeqCst);
        None
    });
    let buffered = Registry::builtin().choose(Some("buffered"), &[]).unwrap().provider;
    let mut registry = Registry::builtin();
    registry.register(Arc::new(FaultyProvider::new(buffered, faults)));
    EngineConfig::with_budget(budget_bytes)
        .with_clock(Box::new(move || clock.load(Ordering::SeqCst) * 1_000_000_000))
        .with_registry(registry)
        .with_backend("buffered".to_owned())
}

#[test]
fn compressed_units_are_decoded_from_memory_and_read_once() {
    let directory = tempfile::tempdir().unwrap();
    let (raw, file) = (directory.path().join("raw.safetensors"), directory.path().join("a.ts"));
    write_checkpoint(&raw);
    convert(&raw, &file, with_compression(Compression::Auto, 0), &mut quiet).unwrap();
    let expected: Vec<_> = (0..UNITS).map(weights).collect();
    let checkpoint = Checkpoint::open(&file).unwrap();
    let stored_bytes = std::fs::metadata(&file).unwrap().len();
    let engine = |budget_bytes, keep_compressed| {
        let slow_storage = Rates::new(1e8, 1e-4).with_processors(4);
        let config = EngineConfig::with_budget(budget_bytes)
            .with_keep_compressed(keep_compressed)
            .with_rates(slow_storage);
        checkpoint.engine(checkpoint.units_by_module(), config).unwrap()
    };

    // With this budget, the decoded units do not fit, but the compressed ones do.
    let all = engine(26 << 20, true);
    let count = |engine: &Engine, kind| {
        engine.plan().residency.iter().filter(|&&residency| residency == kind).count()
    };
    assert_eq!(count(&all, Residency::Streamed), 0, "{:?}", all.plan());
    assert!(count(&all, Residency::Compressed) >= 2, "{:?}", all.plan());
    assert!(pass(&all, &expected) > 0);
    for _ in 0..3 {
        assert_eq!(pass(&all, &expected), 0, "nothing is read again");
    }
    let stats = all.stats();
    assert!(stats.total_read_bytes() < stored_bytes + (1 << 20));
    assert!(stats.reserved_high_water_bytes <= stats.budget_bytes);
    let decoded = stats.units.iter().filter(|unit| unit.compressed);
    assert!(decoded.clone().count() >= 2 && decoded.clone().all(|unit| unit.loads >= 4));

    // With this one, some units are kept and the others are streamed.
    let some = engine(20 << 20, true);
    let none = engine(20 << 20, false);
    assert!(count(&some, Residency::Compressed) > 0, "{:?}", some.plan());
    assert_eq!(count(&none, Residency::Compressed), 0);
    pass(&some, &expected);
    pass(&none, &expected);
    for _ in 0..2 {
        let (with, without) = (pass(&some, &expected), pass(&none, &expected));
        assert!(with < without, "{with} of {without} bytes are read");
    }
}

#[test]
fn memory_of_compressed_units_is_given_up_before_a_call_fails() {
    let directory = tempfile::tempdir().unwrap();
    let (raw, file) = (directory.path().join("raw.safetensors"), directory.path().join("a.ts"));
    write_checkpoint(&raw);
    convert(&raw, &file, with_compression(Compression::Auto, 0), &mut quiet).unwrap();
    let checkpoint = Checkpoint::open(&file).unwrap();
    let rates = Rates::new(1e8, 1e-4).with_processors(4);
    let config = EngineConfig::with_budget(26 << 20).with_keep_compressed(true).with_rates(rates);
    let engine = checkpoint.engine(checkpoint.units_by_module(), config).unwrap();
    let expected: Vec<_> = (0..UNITS).map(weights).collect();
    pass(&engine, &expected);
    // Six decoded units fit only without the compressed ones.
    let ids: Vec<_> = (0..6).map(UnitId).collect();
    let leases = engine.acquire_all(None, &ids).unwrap();
    for (i, lease) in leases.iter().enumerate() {
        assert!(lease.tensor(0)[..] == expected[i][..]);
    }
    drop(leases);
    pass(&engine, &expected);
    pass(&engine, &expected);
}

/// Units of a plain checkpoint are encoded after the first pass, if this pays.
#[test]
fn plain_units_are_encoded_and_then_decoded_from_memory() {
    const PLAIN_BYTES: usize = 12 << 20;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("plain.safetensors");
    let mut expected: Vec<_> = (0..UNITS).map(|i| weights_of(i, PLAIN_BYTES)).collect();
    // A unit that does not shrink.
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as u8
    };
    expected[3].iter_mut().for_each(|byte| *byte = random());
    write_units(&path, &expected);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let engine = |keep_compressed| {
        let config = slow_reads(90 << 20).with_keep_compressed(keep_compressed);
        checkpoint.engine(checkpoint.units_by_module(), config).unwrap()
    };
    let (plain, encoding) = (engine(false), engine(true));
    for _ in 0..4 {
        pass(&plain, &expected);
        pass(&encoding, &expected);
        plain.replan();
        encoding.replan();
    }
    assert_eq!(plain.stats().encoded_bytes, 0);
    let stats = encoding.stats();
    assert!(stats.encoded_bytes > PLAIN_BYTES as u64, "{:?}", stats.plan);
    assert!(stats.reserved_high_water_bytes <= stats.budget_bytes);
    let kept: Vec<_> = (0..UNITS).filter(|&i| stats.units[i].compressed).collect();
    assert!(!kept.is_empty() && !kept.contains(&3), "{kept:?}");
    for _ in 0..2 {
        let (with, without) = (pass(&encoding, &expected), pass(&plain, &expected));
        assert!(with < without, "{with} of {without} bytes are read");
    }
    // Nothing is encoded again.
    assert_eq!(encoding.stats().encoded_bytes, stats.encoded_bytes);
}

/// Units are encoded for a small gain only once the speed of the steady state is known.
#[test]
fn a_small_gain_is_not_taken_from_the_first_pass() {
    const PLAIN_BYTES: usize = 12 << 20;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("plain.safetensors");
    // If units shrink to two thirds, a pass reads about a quarter less.
    let expected: Vec<_> = (0..24).map(|i| weights_of(i, PLAIN_BYTES)).collect();
    write_units(&path, &expected);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let config = slow_reads(96 << 20).with_keep_compressed(true);
    let engine = checkpoint.engine(checkpoint.units_by_module(), config).unwrap();
    let mut planned = Vec::new();
    for number in 0..4 {
        pass(&engine, &expected);
        // The plan of the third pass cannot be used, as if another pass were running.
        if number != 2 {
            engine.replan();
        }
        planned.push(engine.stats().plan.compressed_bytes > 0);
    }
    assert_eq!(planned, [false, false, false, true], "{:?}", engine.plan());
}

/// Units that fitted at first are encoded once the limit is lower.
#[test]
fn units_are_encoded_after_the_limit_fell() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("plain.safetensors");
    let expected: Vec<_> = (0..UNITS).map(weights).collect();
    write_units(&path, &expected);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let config = slow_reads(100 << 20).with_keep_compressed(true);
    let engine = checkpoint.engine(checkpoint.units_by_module(), config).unwrap();
    pass(&engine, &expected);
    assert_eq!(pass(&engine, &expected), 0, "all units fit");
    assert_eq!(engine.stats().encoded_bytes, 0);
    engine.set_limit(20 << 20).unwrap();
    for _ in 0..4 {
        engine.replan();
        pass(&engine, &expected);
    }
    assert!(engine.limit_in_force());
    let stats = engine.stats();
    assert!(stats.units.iter().any(|unit| unit.compressed), "{:?}", stats.plan);
}

/// Checksums can cover bytes of the file around a slice of a tensor. These bytes are not kept when
/// the slice is encoded, so they must not be compared again.
#[test]
fn encoded_slices_of_tensors_with_checksums_are_right() {
    let directory = tempfile::tempdir().unwrap();
    let (raw, file) = (directory.path().join("raw.safetensors"), directory.path().join("a.ts"));
    let whole = weights_of(0, UNITS * UNIT_BYTES);
    write_units(&raw, std::slice::from_ref(&whole));
    convert(&raw, &file, with_compression(Compression::None, 0), &mut quiet).unwrap();
    let checkpoint = Checkpoint::open(&file).unwrap();
    let catalog = checkpoint.catalog();
    let tensor = catalog.tensor("u0.weight").unwrap();
    let range = tensor.range();
    // No slice begins at the beginning of a chunk.
    let (lead, len) = (100_000, UNIT_BYTES - 40_000);
    let offset = |i: usize| lead + i * len;
    let unit = |i: usize| {
        let part = ByteRange { offset: range.offset + offset(i) as u64, len: len as u64, ..range };
        let meta = TensorMeta { dtype: Dtype::BF16, shape: vec![len as u64 / 2] };
        let entry = TensorEntry { meta, parts: vec![part] };
        let tensor = UnitTensor::new(catalog, "u0.weight", entry, Phase::Mapped);
        assert!(tensor.digest.as_ref().unwrap().range.offset < part.offset);
        Unit::new(format!("slice {i}"), vec![tensor])
    };
    let units: Vec<_> = (0..UNITS - 1).map(unit).collect();
    let expected: Vec<_> = (0..units.len()).map(|i| whole[offset(i)..][..len].to_vec()).collect();
    let config = slow_reads(100 << 20).with_keep_compressed(true).with_verify(Verify::EveryRead);
    let engine = checkpoint.engine(units, config).unwrap();
    engine.set_limit(30 << 20).unwrap();
    for _ in 0..5 {
        pass(&engine, &expected);
        engine.replan();
    }
    let stats = engine.stats();
    let decoded = stats.units.iter().filter(|unit| unit.compressed && unit.loads > 3);
    assert!(decoded.count() > 0, "{:?}", stats.plan);
}
