// SPDX-License-Identifier: MIT OR Apache-2.0
//! Appending to files, compacting them, and declaring tensors late.

use std::path::Path;

use crate::common::{content, files, metadata, never, plain, quiet, u8s, with_compression, write};
use tensorstream::format::{Codec, Compression, Dtype, Metadata, TensorMeta};
use tensorstream::{Checkpoint, Error, FileWriter, NewTensor, WriteOptions, compact, diff, verify};

fn bytes_of(path: &Path, name: &str) -> (Vec<u64>, Vec<u8>) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let tensor = checkpoint.catalog().require(name).unwrap();
    let mut bytes = vec![0; tensor.range().len as usize];
    checkpoint.read(&[tensor.range()], &mut bytes).unwrap();
    (tensor.shape().to_vec(), bytes)
}

#[test]
fn appended_files_are_readable_and_compact_reclaims_space() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.ts");
    write(&path, 6);
    let before = std::fs::metadata(&path).unwrap().len();
    let append = |tensors: Vec<NewTensor>, bytes: &[u8], remove: &[&str], options: WriteOptions| {
        let remove: Vec<String> = remove.iter().map(|name| (*name).to_string()).collect();
        let note = Metadata::from([("note".to_string(), "later".to_string())]);
        let mut writer = FileWriter::append(&path, tensors, &remove, note, options, &mut never)?;
        writer.write(bytes)?;
        writer.commit()
    };
    // Replaces a tensor with a large compressed one, and adds an empty one.
    let zeros = vec![7; 3_000_000];
    append(
        vec![u8s("t0", &[3_000_000]), u8s("new", &[0, 4])],
        &zeros,
        &[],
        with_compression(Compression::Codec(Codec::Zstd, None), 2),
    )
    .unwrap();
    append(vec![], &[], &["t4", "t1"], plain()).unwrap();
    append(vec![u8s("t2", &[2, 2])], b"abcd", &[], plain()).unwrap();
    let check = || {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let names: Vec<_> = checkpoint.catalog().tensors().map(|t| t.name().to_string()).collect();
        assert_eq!(names, ["new", "t0", "t2", "t3", "t5"]);
        let metadata = &checkpoint.catalog().files()[0].metadata;
        assert_eq!((metadata["note"].as_str(), metadata["format"].as_str()), ("later", "pt"));
        assert!(bytes_of(&path, "t0") == (vec![3_000_000], zeros.clone()));
        assert_eq!(bytes_of(&path, "t2"), (vec![2, 2], b"abcd".to_vec()));
        assert_eq!(bytes_of(&path, "t3").1, content(3));
        assert_eq!(verify(&path, 0, &mut quiet).unwrap().damaged, []);
        (checkpoint.catalog().files()[0].generation().unwrap(), checkpoint.fingerprint())
    };
    let (generation, fingerprint) = check();
    assert_eq!(generation, 4);
    let copy = directory.path().join("copy.ts");
    std::fs::copy(&path, &copy).unwrap();
    let done = compact(&path, &Default::default(), &mut quiet).unwrap();
    assert_eq!(check(), (1, fingerprint));
    assert_eq!(done.bytes, std::fs::metadata(&path).unwrap().len());
    assert!(done.bytes < before / 100 && done.bytes_before > before, "{done:?}, at first {before}");
    assert!(diff(&copy, &path, 0, &mut quiet).unwrap().is_empty());
    // Compacting again does not change the file.
    let bytes = std::fs::read(&path).unwrap();
    compact(&path, &Default::default(), &mut quiet).unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes);
    // A damaged file is not compacted.
    let mut damaged = bytes.clone();
    let offset = Checkpoint::open(&path).unwrap().catalog().require("t3").unwrap().stored_offset();
    damaged[offset as usize] ^= 1;
    std::fs::write(&path, &damaged).unwrap();
    let compacted = compact(&path, &Default::default(), &mut quiet);
    assert!(matches!(compacted, Err(Error::Corrupt(d)) if d.tensor == "t3"));
    assert!(std::fs::read(&path).unwrap() == damaged);
    assert_eq!(files(directory.path()), [path.clone(), copy]);
}

#[test]
fn refused_appends_give_a_reason_and_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    write(&at("a.ts"), 3);
    write(&at("a.safetensors"), 3);
    let mut later = std::fs::read(at("a.ts")).unwrap();
    later[10] = 1;
    let sum = tensorstream::format::Digest::of(&later[..56]).chunks()[0];
    later[56..64].copy_from_slice(&sum.to_le_bytes());
    std::fs::write(at("later.ts"), &later).unwrap();
    let before: Vec<_> =
        files(directory.path()).iter().map(|file| std::fs::read(file).unwrap()).collect();
    let append = |name: &str, tensors: Vec<NewTensor>, remove: &[String], options: WriteOptions| {
        let writer =
            FileWriter::append(&at(name), tensors, remove, metadata(), options, &mut never);
        writer.and_then(FileWriter::commit).unwrap_err().to_string()
    };
    assert!(append("no.ts", vec![], &[], plain()).contains("no.ts"));
    assert!(append("a.safetensors", vec![], &[], plain()).contains("not a single .ts file"));
    assert!(append("later.ts", vec![], &[], plain()).contains("version 1.1"));
    assert!(append("a.ts", vec![], &["t9".into()], plain()).contains("no tensor `t9`"));
    assert!(
        append("a.ts", vec![u8s("x", &[4])], &[], plain()).contains("4 of its bytes are missing")
    );
    assert!(
        append("a.ts", vec![u8s("x", &[0]), u8s("x", &[0])], &[], plain())
            .contains("duplicate tensor name")
    );
    assert!(
        append("a.ts", vec![], &[], with_compression(Compression::Codec(Codec::Zstd, Some(99)), 1))
            .contains("-7 to 22")
    );
    assert!(compact(&at("later.ts"), &Default::default(), &mut quiet).is_err());
    let after: Vec<_> =
        files(directory.path()).iter().map(|file| std::fs::read(file).unwrap()).collect();
    assert!(after == before, "no file has changed");
}

#[test]
fn tensors_can_be_declared_late_and_grow() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.ts");
    for compression in [Compression::None, Compression::Codec(Codec::Zstd, None), Compression::Auto]
    {
        let halves = |name: &str, shape: &[u64]| {
            let meta = TensorMeta { dtype: Dtype::BF16, shape: shape.to_vec() };
            NewTensor { name: name.into(), meta, phase: Some(16) }
        };
        let mut writer = FileWriter::create(
            &path,
            vec![u8s("first", &[3])],
            metadata(),
            with_compression(compression, 2),
            &mut never,
        )
        .unwrap();
        writer.write(b"abc").unwrap();
        writer.push(u8s("second", &[2])).unwrap();
        writer.write(b"de").unwrap();
        let grown: Vec<u8> = (0..20_000_000u32).map(|i| (i / 3000) as u8).collect();
        writer.push_growing(halves("grown", &[0, 1000])).unwrap();
        grown.chunks(1_234_567).for_each(|piece| writer.write(piece).unwrap());
        writer.push_growing(u8s("nothing", &[9])).unwrap();
        writer.push(u8s("empty", &[0, 3])).unwrap();
        writer.push_growing(halves("last", &[7, 3])).unwrap();
        writer.write(b"123456").unwrap();
        writer.commit().unwrap();
        assert_eq!(bytes_of(&path, "second").1, b"de");
        assert!(bytes_of(&path, "grown") == (vec![10_000, 1000], grown), "{compression:?}");
        assert_eq!(bytes_of(&path, "nothing"), (vec![0], vec![]));
        assert_eq!(bytes_of(&path, "last"), (vec![1, 3], b"123456".to_vec()));
        assert_eq!(verify(&path, 1, &mut quiet).unwrap().damaged, []);
    }
    let create = |name: &str| {
        FileWriter::create(&directory.path().join(name), vec![], metadata(), plain(), &mut never)
            .unwrap()
    };
    let mut writer = create("b.ts");
    writer.push_growing(u8s("rows", &[0, 4])).unwrap();
    writer.write(b"12345").unwrap();
    assert!(writer.commit().unwrap_err().to_string().contains("not a whole number of rows"));
    assert!(
        create("b.ts")
            .push_growing(u8s("scalar", &[]))
            .unwrap_err()
            .to_string()
            .contains("cannot grow")
    );
    assert!(
        create("b.safetensors")
            .push(u8s("a", &[1]))
            .unwrap_err()
            .to_string()
            .contains("use a .ts file")
    );
    let mut writer = create("b.ts");
    writer.push(u8s("a", &[1])).unwrap();
    assert!(writer.push_growing(u8s("b", &[1])).unwrap_err().to_string().contains("missing"));
}

#[cfg(unix)]
#[test]
fn only_one_writer_at_a_time_appends_to_a_file_with_several_names() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    write(&at("a.ts"), 3);
    std::fs::hard_link(at("a.ts"), at("b.ts")).unwrap();
    std::os::unix::fs::symlink(at("a.ts"), at("c.ts")).unwrap();
    let append = |name: &str, interrupt: &mut dyn FnMut() -> bool| {
        FileWriter::append(
            &at(name),
            vec![u8s("x", &[3])],
            &[],
            Metadata::default(),
            plain(),
            interrupt,
        )
    };
    let mut first = append("a.ts", &mut never).unwrap();
    for name in ["a.ts", "b.ts", "c.ts"] {
        let mut calls = 0;
        let second = append(name, &mut || {
            calls += 1;
            calls > 2
        });
        assert!(matches!(second, Err(Error::Interrupted)), "{name}");
    }
    first.write(b"abc").unwrap();
    first.commit().unwrap();
    assert_eq!(bytes_of(&at("b.ts"), "x").1, b"abc");
    // If another file replaces the file during an append, neither file changes.
    let mut late = append("a.ts", &mut never).unwrap();
    late.write(b"def").unwrap();
    write(&at("other.ts"), 5);
    let other = std::fs::read(at("other.ts")).unwrap();
    std::fs::rename(at("other.ts"), at("a.ts")).unwrap();
    let error = late.commit().unwrap_err().to_string();
    assert!(error.contains("the file was replaced or removed after it was opened"), "{error}");
    assert!(std::fs::read(at("a.ts")).unwrap() == other);
    assert_eq!(bytes_of(&at("b.ts"), "x").1, b"abc");
    // The path of an index or directory is refused, even if it leads to a single .ts file.
    std::fs::create_dir(at("model")).unwrap();
    std::fs::rename(at("b.ts"), at("model/model.ts")).unwrap();
    std::fs::write(at("i.json"), r#"{"weight_map":{"x":"s.ts"}}"#).unwrap();
    std::fs::copy(at("model/model.ts"), at("s.ts")).unwrap();
    for name in ["model", "i.json"] {
        let error = compact(&at(name), &Default::default(), &mut quiet).unwrap_err().to_string();
        assert!(
            error.contains("not a single .ts file") || error.contains("model"),
            "{name}: {error}"
        );
    }
    assert!(at("i.json").is_file() && !at("model.partial").exists());
}

#[test]
fn a_writer_refuses_all_calls_after_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.ts");
    for compression in [Compression::None, Compression::Codec(Codec::Zstd, None)] {
        let create = || {
            FileWriter::create(
                &path,
                vec![],
                metadata(),
                with_compression(compression, 1),
                &mut never,
            )
            .unwrap()
        };
        let mut twice = create();
        twice.push(u8s("a", &[2])).unwrap();
        twice.write(b"ab").unwrap();
        let second = twice.push(u8s("a", &[2])).and_then(|()| twice.write(b"cd"));
        assert!(second.unwrap_err().to_string().contains("duplicate tensor name"));
        assert!(twice.write(b"").unwrap_err().to_string().contains("earlier"));
        assert!(twice.commit().unwrap_err().to_string().contains("earlier"));
        let mut scalar = create();
        assert!(
            scalar.push_growing(u8s("s", &[])).and_then(|()| scalar.write(b"x")).is_err()
                || scalar.commit().is_err()
        );
        assert!(!path.exists());
    }
}
