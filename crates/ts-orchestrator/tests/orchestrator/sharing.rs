// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests that engines share the memory of resident units, as processes of one user do.
#![cfg(target_os = "linux")]

use std::path::PathBuf;
use std::sync::Arc;

use ts_format::Digest;
use ts_orchestrator::{Engine, ErrorKind, RangeDigest, UnitId, page_group};
use ts_pool::PageStore;

use crate::testing::{KIB, Model, config};

/// A directory in memory that is removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let dir = format!("/dev/shm/ts-orchestrator-test-{name}-{}", std::process::id());
        let _ = std::fs::remove_dir_all(&dir);
        Self(dir.into())
    }

    /// Returns a store like the one of another process, because locks belong to the open file.
    fn store(&self) -> PageStore {
        PageStore::open(&self.0).unwrap()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const UNITS: usize = 8;

/// Returns an engine for about half of the units.
fn engine(model: &Model, dir: &Dir) -> Engine {
    model.engine(config(900 * KIB).with_shared_pages(Some(dir.store()))).unwrap()
}

fn read(engine: &Engine) -> u64 {
    engine.stats().total_read_bytes()
}

#[test]
fn a_second_engine_reads_only_what_it_streams() {
    let (model, dir) = (Model::new(&[200 * KIB; UNITS]), Dir::new("second"));
    let order: Vec<_> = (0..UNITS).collect();
    let first = engine(&model, &dir);
    model.pass(&first, &order);
    let stats = first.stats();
    let resident: Vec<_> = stats.units.iter().map(|unit| unit.resident).collect();
    assert!(resident.iter().any(|&is| is) && !resident.iter().all(|&is| is), "{resident:?}");
    let shared: Vec<_> = stats.units.iter().map(|unit| unit.shared).collect();
    assert_eq!(shared, resident, "resident units are shared, and others are not");
    let group = page_group(&model.sources()).unwrap();
    let bytes = dir.store().group_bytes(group);
    let expected: usize = stats.units.iter().filter(|u| u.shared).map(|u| u.slot_bytes).sum();
    assert_eq!(bytes, expected as u64);

    let second = engine(&model, &dir);
    for engine in [&second, &first, &second] {
        model.pass(engine, &order);
    }
    let stats = second.stats();
    assert_eq!(stats.units.iter().map(|unit| unit.resident).collect::<Vec<_>>(), resident);
    assert!(stats.units.iter().all(|unit| unit.shared == unit.resident));
    assert!(stats.units.iter().filter(|unit| unit.shared).all(|unit| unit.read_bytes == 0));
    assert_eq!(dir.store().group_bytes(group), bytes, "nothing is there twice");

    // What the second engine uses stays when the first one is gone, and goes with the second one.
    drop(first);
    assert_eq!(dir.store().group_bytes(group), bytes);
    model.pass(&second, &order);
    drop(second);
    assert_eq!(dir.store().group_bytes(group), 0);
}

#[test]
fn a_file_that_was_replaced_is_another_checkpoint() {
    let (model, dir) = (Model::new(&[200 * KIB; UNITS]), Dir::new("replaced"));
    let order: Vec<_> = (0..UNITS).collect();
    let first = engine(&model, &dir);
    model.pass(&first, &order);
    // The same names and sizes, but another file.
    let other = Model::new(&[200 * KIB; UNITS]);
    let second = engine(&other, &dir);
    other.pass(&second, &order);
    assert!(read(&second) >= (UNITS * 200 * KIB) as u64, "all of it was read");
    assert_ne!(page_group(&model.sources()), page_group(&other.sources()));
}

#[test]
fn a_limit_gives_shared_memory_back() {
    let (model, dir) = (Model::new(&[200 * KIB; UNITS]), Dir::new("limit"));
    let order: Vec<_> = (0..UNITS).collect();
    let (first, second) = (engine(&model, &dir), engine(&model, &dir));
    for engine in [&first, &second] {
        model.pass(engine, &order);
    }
    let group = page_group(&model.sources()).unwrap();
    let before = dir.store().group_bytes(group);
    let least = 450 * KIB;
    first.set_limit(least).unwrap();
    assert_eq!(dir.store().group_bytes(group), before, "the second one uses it");
    second.set_limit(least).unwrap();
    let after = dir.store().group_bytes(group);
    assert!(after + 400 * (KIB as u64) <= before, "{before} bytes, and then {after}");
    for engine in [&first, &second, &first] {
        model.pass(engine, &order);
    }
}

#[test]
fn the_resident_units_of_another_engine_are_preferred() {
    let (model, dir) = (Model::new(&[200 * KIB; UNITS]), Dir::new("preferred"));
    let engine = |order: Vec<UnitId>| {
        let config = config(900 * KIB).with_shared_pages(Some(dir.store()));
        model.engine(config.with_order(order)).unwrap()
    };
    let forward: Vec<_> = (0..UNITS as u32).map(UnitId).collect();
    let backward: Vec<_> = forward.iter().rev().copied().collect();
    let resident =
        |engine: &Engine| engine.stats().units.iter().map(|unit| unit.resident).collect::<Vec<_>>();
    let alone = resident(&engine(backward.clone()));
    let first = engine(forward);
    model.pass(&first, &(0..UNITS).collect::<Vec<_>>());
    assert_ne!(alone, resident(&first), "this order has another plan");
    assert_eq!(resident(&engine(backward)), resident(&first));
}

#[test]
fn damaged_shared_bytes_are_an_error_once() {
    let (mut model, dir) = (Model::new(&[200 * KIB; UNITS]), Dir::new("damaged"));
    for i in 0..UNITS {
        let digest = Arc::new(Digest::of(&model.expected(i, 0)));
        let range = model.units[i].tensors[0].entry.parts[0];
        model.units[i].tensors[0].digest = Some(RangeDigest { range, digest });
    }
    let order: Vec<_> = (0..UNITS).collect();
    let first = engine(&model, &dir);
    model.pass(&first, &order);
    for entry in std::fs::read_dir(&dir.0).unwrap().map(Result::unwrap) {
        if entry.file_name() != "locks" {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(entry.path(), PermissionsExt::from_mode(0o600)).unwrap();
            let len = entry.metadata().unwrap().len() as usize;
            let file = std::fs::OpenOptions::new().write(true).open(entry.path()).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &vec![9; len], 0).unwrap();
        }
    }
    let second = engine(&model, &dir);
    let pass = second.begin_pass();
    let damaged = first.stats().units.iter().position(|unit| unit.shared).unwrap();
    let error = second.acquire(Some(pass), UnitId(damaged as u32)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let lease = second.acquire(Some(pass), UnitId(damaged as u32)).unwrap();
    model.check(damaged, &lease.tensor(0));
    second.end_pass(pass);
}
