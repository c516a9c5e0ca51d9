// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opening checkpoints on disk.

use std::fs;
use std::path::Path;

use tensorstream::orchestrator::{EngineConfig, UnitId};
use tensorstream::{Checkpoint, Error, NotACheckpoint, format, io};

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
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, Error::NotACheckpoint(NotACheckpoint::Missing { found: 0, .. })));
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

/// The tensors of a unit that spans neighbouring tensors, in a later file with another order.
#[test]
fn a_reopened_checkpoint_has_the_same_tensors_in_other_places() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    write(&path, &[("a", 1, 100), ("b", 2, 50), ("c", 3, 10)]);
    let old = Checkpoint::open(&path).unwrap();
    let range =
        |checkpoint: &Checkpoint, name: &str| checkpoint.catalog().require(name).unwrap().range();
    let begin = range(&old, "a").offset;
    let parts = [
        format::ByteRange { offset: begin + 90, len: 30, ..range(&old, "a") },
        format::ByteRange { offset: begin, len: 0, ..range(&old, "a") },
    ];
    fs::remove_file(&path).unwrap();
    assert!(matches!(old.reopen(), Err(Error::Io(io::Error::Open { .. }))));
    write(&path, &[("new", 9, 7), ("b", 4, 50), ("a", 5, 100), ("c", 6, 10)]);
    let newer = old.reopen().unwrap();
    let found = old.catalog().translate(&parts, newer.catalog()).unwrap();
    let expected = [
        format::ByteRange { offset: range(&newer, "a").offset + 90, len: 10, ..found[0] },
        format::ByteRange { len: 20, ..range(&newer, "b") },
        format::ByteRange { len: 0, ..found[2] },
    ];
    assert_eq!(found, expected);
    // Tensors that are missing, or have another type, are errors that name them.
    for (other, what) in [(&[("a", 1, 100)][..], "`b`"), (&[("a", 1, 99)], "[99]")] {
        write(&path, other);
        let newer = old.reopen().unwrap();
        let error = old.catalog().translate(&parts, newer.catalog()).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
    // The old file is still the file.
    let mut bytes = [0; 50];
    old.read_block("b", std::slice::from_ref(&(0..50)), &mut bytes).unwrap();
    assert_eq!(bytes, [2; 50]);
    let in_memory = Checkpoint::from_bytes("m", fs::read(&path).unwrap()).unwrap();
    assert!(in_memory.reopen().unwrap_err().to_string().contains("cannot be opened again"));
}

#[test]
#[cfg(target_os = "linux")] // other systems refuse such names
fn paths_that_are_not_utf8_are_opened() {
    use std::os::unix::ffi::OsStrExt;

    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
    fs::create_dir(&own).unwrap();
    write(&own.join("one"), &[("a.weight", 1, 9000), ("a.bias", 2, 10)]);
    let index = r#"{"weight_map":{"a.weight":"one"}}"#;
    fs::write(own.join("model.safetensors.index.json"), index).unwrap();
    for path in [own.clone(), own.join("one"), own.join("model.safetensors.index.json")] {
        let checkpoint = Checkpoint::open(path).unwrap().reopen().unwrap();
        let mut bytes = [0; 10];
        checkpoint.read_block("a.bias", std::slice::from_ref(&(0..10)), &mut bytes).unwrap();
        assert_eq!(bytes, [2; 10]);
        assert_eq!(checkpoint.sources()[0].path(), own.join("one"));
    }
}
