// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files written, converted and verified.

#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tensorstream::format::{Dtype, TensorMeta};
use tensorstream::{Checkpoint, Error, FileWriter, NewTensor, Progress, convert, verify};

fn never() -> bool {
    false
}

fn quiet(_: Progress) -> bool {
    false
}

fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".into(), "pt".into()), ("note".into(), "a\"b\nc".into())])
}

/// Bytes of tensor `i`, of a length that is no multiple of anything.
fn content(i: usize) -> Vec<u8> {
    (0..[3_000_001, 0, 17, 1][i % 4]).map(|at: usize| (at * 7 + i) as u8).collect()
}

fn write(path: &Path, count: usize) {
    let tensors = (0..count).map(|i| {
        let meta = TensorMeta { dtype: Dtype::U8, shape: vec![content(i).len() as u64] };
        NewTensor { name: format!("t{i}"), meta, phase: None }
    });
    let mut writer = FileWriter::create(path, tensors.collect(), metadata(), &mut never).unwrap();
    for i in writer.order().to_vec() {
        for piece in content(i).chunks(1_000_003) {
            writer.write(piece).unwrap();
        }
    }
    writer.commit().unwrap();
}

fn assert_holds(path: &Path, count: usize) {
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!(checkpoint.catalog().files()[0].metadata, metadata());
    assert_eq!(checkpoint.catalog().tensors().len(), count);
    for i in 0..count {
        let entry = checkpoint.catalog().require(&format!("t{i}")).unwrap();
        let mut bytes = vec![0; content(i).len()];
        checkpoint.read(&entry.parts, &mut bytes).unwrap();
        assert_eq!(bytes, content(i));
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> = std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().path()).collect();
    all.sort();
    all
}

#[test]
fn both_formats_hold_what_was_written_and_convert_into_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    write(&at("a.safetensors"), 7);
    let mut last = None;
    let done = convert(&at("a.safetensors"), &at("b.ts"), &mut |p| {
        last = Some(p);
        false
    });
    assert_eq!(done.unwrap().tensors, 7);
    assert_eq!(last.map(|p| p.done), last.map(|p| p.total), "progress ends at the total");
    convert(&at("b.ts"), &at("c.safetensors"), &mut quiet).unwrap();
    for name in ["a.safetensors", "b.ts", "c.safetensors"] {
        assert_holds(&at(name), 7);
    }
    assert_eq!(std::fs::read(at("a.safetensors")).unwrap(), std::fs::read(at("c.safetensors")).unwrap());
    assert_eq!(files(directory.path()).len(), 3, "nothing else is left");
}

#[test]
fn a_file_without_tensors_is_a_file() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["a.ts", "a.safetensors"] {
        write(&directory.path().join(name), 0);
        assert_holds(&directory.path().join(name), 0);
    }
}

#[test]
fn damage_is_found_with_its_place_and_never_converted() {
    let directory = tempfile::tempdir().unwrap();
    let (file, out) = (directory.path().join("a.ts"), directory.path().join("b.safetensors"));
    write(&file, 5);
    let clean = verify(&file, &mut quiet).unwrap();
    assert_eq!((clean.damaged.len(), clean.checked_bytes), (0, clean.bytes));
    let mut bytes = std::fs::read(&file).unwrap();
    let part = Checkpoint::open(&file).unwrap().catalog().require("t0").unwrap().parts[0];
    bytes[part.offset as usize + 2_500_000] ^= 4;
    std::fs::write(&file, bytes).unwrap();
    let found = verify(&file, &mut quiet).unwrap().damaged;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].tensor.as_str(), found[0].offset), ("t0", part.offset + (2 << 20)));
    std::fs::write(&out, "before").unwrap();
    assert!(matches!(convert(&file, &out, &mut quiet), Err(Error::Corrupt(damage)) if damage == found[0]));
    assert_eq!(std::fs::read(&out).unwrap(), b"before", "what was there still is");
}

#[test]
fn an_interrupted_or_abandoned_file_never_has_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("a.safetensors"), directory.path().join("b.ts"));
    write(&from, 6);
    let mut calls = 0;
    while let Err(error) = convert(&from, &to, &mut |_| {
        calls += 1;
        calls % 5 == 0 && calls < 60
    }) {
        assert!(matches!(error, Error::Interrupted), "{error}");
        assert_eq!(files(directory.path()), std::slice::from_ref(&from), "nothing is left of it");
    }
    assert_holds(&to, 6);
    let writer = FileWriter::create(&directory.path().join("c.ts"), vec![], metadata(), &mut never).unwrap();
    drop(writer);
    assert_eq!(files(directory.path()), [from, to]);
}

#[test]
fn writers_of_one_file_take_turns_and_a_dead_one_is_taken_over() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.ts");
    std::fs::write(directory.path().join("a.ts.partial"), "left by a process that was killed").unwrap();
    let first = FileWriter::create(&path, vec![], metadata(), &mut never).unwrap();
    let mut asked = 0;
    let second = FileWriter::create(&path, vec![], metadata(), &mut || {
        asked += 1;
        asked > 2
    });
    assert!(matches!(second, Err(Error::Interrupted)));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| write(&path, 3));
        std::thread::sleep(std::time::Duration::from_millis(60));
        first.commit().unwrap();
        waits.join().unwrap();
    });
    assert_holds(&path, 3);
    assert_eq!(files(directory.path()).len(), 1);
}

#[test]
fn what_cannot_be_written_is_a_typed_error() {
    let directory = tempfile::tempdir().unwrap();
    let create = |path: &Path, tensors| FileWriter::create(path, tensors, metadata(), &mut never);
    assert!(matches!(create(&directory.path().join("a.bin"), vec![]), Err(Error::UnknownSuffix { .. })));
    assert!(matches!(create(&directory.path().join("no/a.ts"), vec![]), Err(Error::Write { .. })));
    let meta = || TensorMeta { dtype: Dtype::F32, shape: vec![2] };
    let tensor = |name: &str| NewTensor { name: name.into(), meta: meta(), phase: Some(8) };
    for name in ["a.ts", "a.safetensors"] {
        let path = directory.path().join(name);
        let twice = create(&path, vec![tensor("x"), tensor("x")]).and_then(|mut w| w.write(&[0; 16]));
        assert!(matches!(twice, Err(Error::Format(_))));
        let mut short = create(&path, vec![tensor("x")]).unwrap();
        short.write(&[0; 7]).unwrap();
        assert!(short.commit().unwrap_err().to_string().contains("1 of its bytes are missing"));
        let mut long = create(&path, vec![tensor("x")]).unwrap();
        assert!(matches!(long.write(&[0; 9]), Err(Error::Format(_))));
    }
    assert_eq!(files(directory.path()).len(), 0);
}

#[test]
fn shards_that_disagree_on_metadata_keep_all_of_it() {
    let directory = tempfile::tempdir().unwrap();
    for (shard, who) in [("s1.safetensors", "one"), ("s2.safetensors", "two")] {
        let meta = TensorMeta { dtype: Dtype::U8, shape: vec![1] };
        let tensors = vec![NewTensor { name: shard.into(), meta, phase: None }];
        let metadata = BTreeMap::from([("by".into(), who.into()), ("format".into(), "pt".into())]);
        let mut writer =
            FileWriter::create(&directory.path().join(shard), tensors, metadata, &mut never).unwrap();
        writer.write(&[1]).unwrap();
        writer.commit().unwrap();
    }
    let index = r#"{"weight_map":{"s1.safetensors":"s1.safetensors","s2.safetensors":"s2.safetensors"}}"#;
    std::fs::write(directory.path().join("model.safetensors.index.json"), index).unwrap();
    let out = directory.path().join("out.ts");
    convert(directory.path(), &out, &mut quiet).unwrap();
    let merged = Checkpoint::open(&out).unwrap().catalog().files()[0].metadata.clone();
    let expected = [("by@s1.safetensors", "one"), ("by@s2.safetensors", "two"), ("format", "pt")];
    assert_eq!(merged, expected.map(|(k, v)| (k.to_string(), v.to_string())).into());
}

#[test]
fn an_unfinished_file_that_is_not_its_writer_s_own_is_never_given_the_name() {
    let directory = tempfile::tempdir().unwrap();
    let (path, partial) = (directory.path().join("a.ts"), directory.path().join("a.ts.partial"));
    write(&path, 2);
    let first = FileWriter::create(&path, vec![], metadata(), &mut never).unwrap();
    std::fs::remove_file(&partial).unwrap();
    let second = FileWriter::create(&path, vec![], metadata(), &mut never).unwrap();
    assert!(first.commit().unwrap_err().to_string().contains("another process"));
    assert_holds(&path, 2);
    assert!(partial.exists(), "the second writer's file is left alone");
    second.commit().unwrap();
    assert_holds(&path, 0);
}

#[cfg(unix)]
#[test]
fn a_link_in_place_of_the_unfinished_file_is_refused_and_not_followed() {
    let directory = tempfile::tempdir().unwrap();
    let (path, precious) = (directory.path().join("a.ts"), directory.path().join("precious"));
    std::fs::write(&precious, "precious").unwrap();
    std::os::unix::fs::symlink(&precious, directory.path().join("a.ts.partial")).unwrap();
    let refused = FileWriter::create(&path, vec![], metadata(), &mut never).unwrap_err().to_string();
    assert!(refused.contains("a.ts.partial") && refused.contains("no regular file"), "{refused}");
    assert_eq!(std::fs::read(&precious).unwrap(), b"precious");
}

#[test]
fn what_is_read_is_never_written_over_by_its_own_conversion() {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("a.ts"), directory.path().join("q.safetensors"));
    write(&from, 3);
    let partial = directory.path().join("q.safetensors.partial");
    std::fs::rename(&from, &partial).unwrap();
    assert!(matches!(convert(&partial, &to, &mut quiet), Err(Error::Write { .. })));
    assert_holds(&partial, 3);
    std::fs::rename(&partial, &from).unwrap();
    convert(&from, &from, &mut quiet).unwrap();
    assert_holds(&from, 3);
}
