// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opening checkpoints on disk.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::fs;
use std::path::Path;

use tensorstream::orchestrator::{EngineConfig, UnitId};
use tensorstream::{Checkpoint, Error, format, io};

fn write(path: &Path, tensors: &[(&str, u8, usize)]) {
    let (mut fields, mut data) = (Vec::new(), Vec::new());
    for &(name, byte, len) in tensors {
        let begin = data.len();
        data.resize(begin + len, byte);
        fields.push(format!(
            r#""{name}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{begin},{}]}}"#,
            data.len()
        ));
    }
    let header = format!("{{{}}}", fields.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    fs::write(path, file).unwrap();
}

#[test]
fn a_sharded_directory_streams_as_units_by_module() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("one"), &[("a.weight", 1, 9000), ("a.bias", 2, 10)]);
    write(&dir.path().join("two"), &[("b.weight", 3, 5000)]);
    let index = r#"{"weight_map":{"a.weight":"one","a.bias":"one","b.weight":"two"}}"#;
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();

    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let units = checkpoint.units_by_module();
    assert_eq!(
        units.iter().map(|u| (u.name.as_str(), u.tensors.len())).collect::<Vec<_>>(),
        [("a", 2), ("b", 1)]
    );
    let engine = checkpoint.engine(units, EngineConfig::with_budget(16 << 10)).unwrap();
    for _ in 0..3 {
        let bias = engine.acquire(None, UnitId(0)).unwrap().tensor(0);
        assert_eq!(&bias[..], [2; 10]);
        drop(bias);
        let b = engine.acquire(None, UnitId(1)).unwrap().tensor(0);
        assert!(b.len() == 5000 && b.iter().all(|&x| x == 3));
    }
}

#[test]
fn missing_and_malformed_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(Checkpoint::open(dir.path()), Err(Error::NoCheckpoint { found: 0, .. })));
    let missing = dir.path().join("model.safetensors");
    assert!(matches!(Checkpoint::open(&missing), Err(Error::Io(io::Error::Open { .. }))));
    fs::write(dir.path().join("model.safetensors.index.json"), r#"{"weight_map":{"a":"gone"}}"#)
        .unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("gone"), "{error}");
    fs::write(&missing, "short").unwrap();
    assert!(matches!(
        Checkpoint::open(dir.path()),
        Err(Error::Format(format::Error::Truncated { .. }))
    ));
}
