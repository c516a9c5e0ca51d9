// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writing, converting, verifying, comparing and loading files.

use std::path::Path;

use crate::common::{content, files, metadata, never, plain, quiet, u8s, with_compression, write};
use tensorstream::format::{ByteRange, Codec, Compression, Dtype, Metadata, TensorMeta};
use tensorstream::orchestrator::{
    self as ts_orchestrator, EngineConfig, Phase, Unit, UnitId, UnitTensor,
};
use tensorstream::{
    Checkpoint, Error, FileWriter, LoadOptions, NewTensor, Progress, convert, diff, verify,
};

fn assert_content(path: &Path, count: usize) {
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!(checkpoint.catalog().files()[0].metadata, metadata());
    assert_eq!(checkpoint.catalog().tensors().len(), count);
    for i in 0..count {
        let entry = checkpoint.catalog().require(&format!("t{i}")).unwrap();
        let mut bytes = vec![0; content(i).len()];
        checkpoint.read(&[entry.range()], &mut bytes).unwrap();
        assert_eq!(bytes, content(i));
    }
}

#[test]
fn both_formats_round_trip_and_convert_into_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    write(&at("a.safetensors"), 7);
    let mut last = None;
    let done = convert(&at("a.safetensors"), &at("b.ts"), plain(), &mut |p| {
        last = Some(p);
        false
    });
    assert_eq!(done.unwrap().tensors, 7);
    assert_eq!(last.map(|p| p.done), last.map(|p| p.total), "progress ends at the total");
    convert(&at("b.ts"), &at("c.safetensors"), plain(), &mut quiet).unwrap();
    for name in ["a.safetensors", "b.ts", "c.safetensors"] {
        assert_content(&at(name), 7);
    }
    assert_eq!(
        std::fs::read(at("a.safetensors")).unwrap(),
        std::fs::read(at("c.safetensors")).unwrap()
    );
    assert_eq!(files(directory.path()).len(), 3, "no other file is left");
}

#[test]
fn a_file_can_have_no_tensors() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["a.ts", "a.safetensors"] {
        write(&directory.path().join(name), 0);
        assert_content(&directory.path().join(name), 0);
    }
}

#[test]
fn damage_is_located_and_never_converted() {
    let directory = tempfile::tempdir().unwrap();
    let (file, out) = (directory.path().join("a.ts"), directory.path().join("b.safetensors"));
    write(&file, 5);
    let clean = verify(&file, 0, &mut quiet).unwrap();
    assert_eq!((clean.damaged.len(), clean.checked_bytes), (0, clean.bytes));
    let mut bytes = std::fs::read(&file).unwrap();
    let part = Checkpoint::open(&file).unwrap().catalog().require("t0").unwrap().range();
    bytes[part.offset as usize + 2_500_000] ^= 4;
    std::fs::write(&file, bytes).unwrap();
    let found = verify(&file, 0, &mut quiet).unwrap().damaged;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].tensor.as_str(), found[0].offset), ("t0", part.offset + (2 << 20)));
    std::fs::write(&out, "before").unwrap();
    let converted = convert(&file, &out, plain(), &mut quiet);
    assert!(matches!(converted, Err(Error::Corrupt(damage)) if damage == found[0]));
    assert_eq!(std::fs::read(&out).unwrap(), b"before", "the old file is unchanged");
}

#[test]
fn an_unfinished_file_never_has_its_final_name() {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("a.safetensors"), directory.path().join("b.ts"));
    write(&from, 6);
    let mut calls = 0;
    while let Err(error) = convert(&from, &to, plain(), &mut |_| {
        calls += 1;
        calls % 5 == 0 && calls < 60
    }) {
        assert!(matches!(error, Error::Interrupted), "{error}");
        assert_eq!(files(directory.path()), std::slice::from_ref(&from), "no partial file is left");
    }
    assert_content(&to, 6);
    let writer =
        FileWriter::create(&directory.path().join("c.ts"), vec![], metadata(), plain(), &mut never)
            .unwrap();
    drop(writer);
    assert_eq!(files(directory.path()), [from, to]);
}

#[test]
fn writers_of_one_file_take_turns() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.ts");
    std::fs::write(directory.path().join("a.ts.partial"), "left by a process that was killed")
        .unwrap();
    let first = FileWriter::create(&path, vec![], metadata(), plain(), &mut never).unwrap();
    let mut calls = 0;
    let second = FileWriter::create(&path, vec![], metadata(), plain(), &mut || {
        calls += 1;
        calls > 2
    });
    assert!(matches!(second, Err(Error::Interrupted)));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| write(&path, 3));
        std::thread::sleep(std::time::Duration::from_millis(60));
        first.commit().unwrap();
        waiting.join().unwrap();
    });
    assert_content(&path, 3);
    assert_eq!(files(directory.path()).len(), 1);
}

#[test]
fn invalid_writes_are_typed_errors() {
    let directory = tempfile::tempdir().unwrap();
    let create =
        |path: &Path, tensors| FileWriter::create(path, tensors, metadata(), plain(), &mut never);
    assert!(matches!(
        create(&directory.path().join("a.bin"), vec![]),
        Err(Error::UnknownSuffix { .. })
    ));
    assert!(matches!(create(&directory.path().join("no/a.ts"), vec![]), Err(Error::Write { .. })));
    let meta = || TensorMeta { dtype: Dtype::F32, shape: vec![2] };
    let tensor = |name: &str| NewTensor { name: name.into(), meta: meta(), phase: Some(8) };
    for name in ["a.ts", "a.safetensors"] {
        let path = directory.path().join(name);
        let twice =
            create(&path, vec![tensor("x"), tensor("x")]).and_then(|mut w| w.write(&[0; 16]));
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
fn conflicting_metadata_of_shards_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    for (shard, who) in [("s1.safetensors", "one"), ("s2.safetensors", "two")] {
        let meta = TensorMeta { dtype: Dtype::U8, shape: vec![1] };
        let tensors = vec![NewTensor { name: shard.into(), meta, phase: None }];
        let metadata = Metadata::from([("by".into(), who.into()), ("format".into(), "pt".into())]);
        let mut writer = FileWriter::create(
            &directory.path().join(shard),
            tensors,
            metadata,
            plain(),
            &mut never,
        )
        .unwrap();
        writer.write(&[1]).unwrap();
        writer.commit().unwrap();
    }
    let index =
        r#"{"weight_map":{"s1.safetensors":"s1.safetensors","s2.safetensors":"s2.safetensors"}}"#;
    std::fs::write(directory.path().join("model.safetensors.index.json"), index).unwrap();
    let out = directory.path().join("out.ts");
    convert(directory.path(), &out, plain(), &mut quiet).unwrap();
    let merged = Checkpoint::open(&out).unwrap().catalog().files()[0].metadata.clone();
    let expected = [("by@s1.safetensors", "one"), ("by@s2.safetensors", "two"), ("format", "pt")];
    assert_eq!(merged, expected.map(|(k, v)| (k.to_string(), v.to_string())).into());
}

#[test]
fn a_writer_publishes_only_its_own_file() {
    let directory = tempfile::tempdir().unwrap();
    let (path, partial) = (directory.path().join("a.ts"), directory.path().join("a.ts.partial"));
    write(&path, 2);
    let first = FileWriter::create(&path, vec![], metadata(), plain(), &mut never).unwrap();
    std::fs::remove_file(&partial).unwrap();
    let second = FileWriter::create(&path, vec![], metadata(), plain(), &mut never).unwrap();
    let error = first.commit().unwrap_err().to_string();
    assert!(error.contains("the partial file was replaced or removed"), "{error}");
    assert_content(&path, 2);
    assert!(partial.exists(), "the file of the second writer stays");
    second.commit().unwrap();
    assert_content(&path, 0);
}

#[cfg(unix)]
#[test]
fn a_link_in_place_of_the_partial_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (path, precious) = (directory.path().join("a.ts"), directory.path().join("precious"));
    std::fs::write(&precious, "precious").unwrap();
    std::os::unix::fs::symlink(&precious, directory.path().join("a.ts.partial")).unwrap();
    let refused =
        FileWriter::create(&path, vec![], metadata(), plain(), &mut never).unwrap_err().to_string();
    assert!(
        refused.contains("a.ts.partial") && refused.contains("not a regular file"),
        "{refused}"
    );
    assert_eq!(std::fs::read(&precious).unwrap(), b"precious");
}

#[test]
fn a_conversion_never_overwrites_its_source() {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("a.ts"), directory.path().join("q.safetensors"));
    write(&from, 3);
    let partial = directory.path().join("q.safetensors.partial");
    std::fs::rename(&from, &partial).unwrap();
    assert!(matches!(convert(&partial, &to, plain(), &mut quiet), Err(Error::Write { .. })));
    assert_content(&partial, 3);
    std::fs::rename(&partial, &from).unwrap();
    convert(&from, &from, plain(), &mut quiet).unwrap();
    assert_content(&from, 3);
}

/// Writes tensors with the distribution of trained weights (similar exponents, random mantissas),
/// and a tensor of random bytes.
fn weights(path: &Path) {
    const COUNT: usize = 1_300_000;
    let tensors = [
        ("weight", Dtype::BF16, 2),
        ("mask", Dtype::Bool, 1),
        ("noise", Dtype::F32, 4),
        ("ids", Dtype::I64, 8),
    ];
    let new = tensors.map(|(name, dtype, _)| NewTensor {
        name: name.into(),
        meta: TensorMeta { dtype, shape: vec![COUNT as u64] },
        phase: Some(8),
    });
    let mut writer = FileWriter::create(path, new.into(), metadata(), plain(), &mut never).unwrap();
    for index in writer.order().to_vec() {
        let (mut state, mut bytes) = (index as u64 + 1, Vec::new());
        for i in 0..COUNT {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            match tensors[index].0 {
                "weight" => bytes.extend([(state >> 40) as u8, 0x3C | (state >> 63) as u8]),
                "mask" => bytes.push(u8::from(i % 1000 < 3)),
                "noise" => bytes.extend_from_slice(&(state >> 8).to_le_bytes()[..4]),
                _ => bytes.extend((i as u64 % 5000).to_le_bytes()),
            }
        }
        writer.write(&bytes).unwrap();
    }
    writer.commit().unwrap();
}

#[test]
fn every_codec_is_lossless_and_deterministic() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    weights(&at("raw.safetensors"));
    convert(&at("raw.safetensors"), &at("raw.ts"), plain(), &mut quiet).unwrap();
    let fingerprint = Checkpoint::open(at("raw.ts")).unwrap().fingerprint();
    assert!(fingerprint.is_some());
    for name in ["auto", "lz4", "zstd", "split", "zlib"] {
        let compression = Compression::parse(name, None).unwrap();
        let (one, two, back) = (at("one.ts"), at("two.ts"), at("back.safetensors"));
        convert(&at("raw.safetensors"), &one, with_compression(compression, 1), &mut quiet)
            .unwrap();
        convert(&at("raw.ts"), &two, with_compression(compression, 3), &mut quiet).unwrap();
        assert!(
            std::fs::read(&one).unwrap() == std::fs::read(&two).unwrap(),
            "{name}: the number of threads does not matter"
        );
        let there = Checkpoint::open(&one).unwrap();
        assert_eq!(there.fingerprint(), fingerprint, "{name}: the content is the same");
        assert_eq!(
            there.catalog().tensor("noise").unwrap().chunks().is_none(),
            name == "auto",
            "{name}"
        );
        let stored: u64 = there.catalog().tensors().map(|t| t.stored_len()).sum();
        let raw: u64 = there.catalog().tensors().map(|t| t.range().len).sum();
        assert!(stored < raw && (name != "auto" || stored < raw / 2), "{name}: {stored} of {raw}");
        let found = verify(&one, 0, &mut quiet).unwrap();
        assert_eq!((found.damaged.len(), found.checked_bytes), (0, raw));
        convert(&two, &back, plain(), &mut quiet).unwrap();
        assert!(
            std::fs::read(&back).unwrap() == std::fs::read(at("raw.safetensors")).unwrap(),
            "{name}"
        );
    }
}

#[test]
fn parts_of_compressed_tensors_are_read_and_checked() {
    let directory = tempfile::tempdir().unwrap();
    let (raw, file) = (directory.path().join("raw.safetensors"), directory.path().join("a.ts"));
    weights(&raw);
    let options = with_compression(Compression::Auto, 0);
    convert(&raw, &file, options, &mut quiet).unwrap();
    let (plain, packed) = (Checkpoint::open(&raw).unwrap(), Checkpoint::open(&file).unwrap());
    let range = |checkpoint: &Checkpoint| checkpoint.catalog().tensor("weight").unwrap().range();
    for (begin, len) in
        [(0, 5), (1 << 20, 1 << 20), (1_048_570, 20), (2_599_999, 1), (7, 2_599_000)]
    {
        let part = |whole: ByteRange| ByteRange { offset: whole.offset + begin, len, ..whole };
        let (mut expected, mut there) = (vec![0; len as usize], vec![1; len as usize]);
        plain.read(&[part(range(&plain))], &mut expected).unwrap();
        packed.read(&[part(range(&packed))], &mut there).unwrap();
        assert!(there == expected, "{len} bytes from {begin}");
    }
    let beyond = ByteRange { len: range(&packed).len + 1, ..range(&packed) };
    let error = packed.read(&[beyond], &mut vec![0; beyond.len as usize]).unwrap_err();
    assert!(error.to_string().contains("not within one compressed tensor"), "{error}");
    let chunk = packed.catalog().tensor("weight").unwrap().chunks().unwrap()[1];
    assert_eq!(chunk.codec, Codec::Split);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[chunk.offset as usize + 100] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let found = verify(&file, 0, &mut quiet).unwrap().damaged;
    assert_eq!(found.len(), 1);
    assert_eq!(
        (found[0].tensor.as_str(), found[0].offset, found[0].len),
        ("weight", chunk.offset, u64::from(chunk.len))
    );
    let damaged = Checkpoint::open(&file).unwrap();
    let (whole, mut two) = (range(&damaged), vec![0; 2]);
    assert!(
        damaged.read(&[ByteRange { len: 2, ..whole }], &mut two).is_ok(),
        "the first chunk is intact"
    );
    let second = ByteRange { offset: whole.offset + (1 << 20), len: 2, ..whole };
    assert!(matches!(damaged.read(&[second], &mut two), Err(Error::Corrupt(_))));
}

#[test]
fn invalid_compression_is_refused_without_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    write(&at("a.safetensors"), 2);
    let refused = |to: &str, compression: Compression| {
        let options = with_compression(compression, 1);
        convert(&at("a.safetensors"), &at(to), options, &mut quiet).unwrap_err().to_string()
    };
    assert!(refused("b.safetensors", Compression::Auto).contains("cannot be compressed"));
    assert!(refused("b.ts", Compression::Codec(Codec::Zstd, Some(99))).contains("-7 to 22"));
    assert!(refused("b.ts", Compression::Codec(Codec::Lz4, Some(1))).contains("no levels"));
    assert!(Compression::parse("brotli", None).unwrap_err().contains("split"));
    assert_eq!(files(directory.path()).len(), 1);
}

#[test]
fn a_compressed_checkpoint_streams_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let (raw, file) = (directory.path().join("raw.safetensors"), directory.path().join("a.ts"));
    weights(&raw);
    convert(&raw, &file, with_compression(Compression::Auto, 0), &mut quiet).unwrap();
    let stream = |path: &Path| {
        let checkpoint = Checkpoint::open(path).unwrap();
        // There is a unit for each tensor, and a unit with a tensor that is assembled from parts of
        // others.
        let mut units: Vec<Unit> = Vec::new();
        for tensor in checkpoint.catalog().tensors() {
            let whole =
                UnitTensor::new(checkpoint.catalog(), tensor.name(), tensor.entry(), Phase::At(0));
            units.push(Unit::new(tensor.name(), vec![whole]));
        }
        let part = |name: &str, begin: u64, len: u64| {
            let range = checkpoint.catalog().tensor(name).unwrap().range();
            ByteRange { offset: range.offset + begin, len, ..range }
        };
        let parts = vec![
            part("ids", 1_048_000, 2_000_000),
            part("noise", 5, 1000),
            part("weight", 1 << 20, 1 << 20),
        ];
        let len = parts.iter().map(|part| part.len).sum();
        let meta = TensorMeta { dtype: Dtype::U8, shape: vec![len] };
        let entry = checkpoint.catalog().assemble("made", meta, parts).unwrap();
        let made = UnitTensor::new(checkpoint.catalog(), "made", entry, Phase::At(24));
        units.push(Unit::new("made", vec![made]));
        let config = |budget_bytes| EngineConfig::with_budget(budget_bytes).with_workers(2);
        let Err(Error::Engine(ts_orchestrator::Error::NeverFits(refusal))) =
            checkpoint.engine(units.clone(), config(1))
        else {
            panic!("one byte is not enough")
        };
        let engine = checkpoint.engine(units, config(refusal.smallest_budget_bytes))?;
        let order = [4, 1, 0, 3, 2, 4, 0];
        let mut seen = Vec::new();
        for _ in 0..2 {
            for unit in order {
                let tensor = engine.acquire(None, UnitId(unit))?.tensor(0);
                assert_eq!(tensor.as_ptr().addr() % 64, if unit == 4 { 24 } else { 0 });
                seen.push(tensor.to_vec());
            }
        }
        let stats = engine.stats();
        assert!(stats.reserved_high_water_bytes <= stats.budget_bytes);
        Ok::<_, Error>(seen)
    };
    assert!(stream(&raw).unwrap() == stream(&file).unwrap());

    let chunk =
        Checkpoint::open(&file).unwrap().catalog().tensor("ids").unwrap().chunks().unwrap()[1];
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[chunk.offset as usize + 9] ^= 8;
    std::fs::write(&file, bytes).unwrap();
    let error = stream(&file).unwrap_err().to_string();
    assert!(
        error.contains("tensor `made`") && error.contains(&format!("at byte {}", chunk.offset)),
        "{error}"
    );
}

#[test]
fn loaded_tensors_have_the_written_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let (raw, packed) = (directory.path().join("raw.safetensors"), directory.path().join("a.ts"));
    weights(&raw);
    convert(&raw, &packed, with_compression(Compression::Auto, 0), &mut quiet).unwrap();
    let mut last = None;
    let load = |path: &Path, jobs: usize, watch: &mut dyn FnMut(Progress) -> bool| {
        Checkpoint::open(path)
            .unwrap()
            .load(LoadOptions::default().with_jobs(jobs), &mut |p| watch(p))
    };
    let plain = load(&raw, 1, &mut |p| {
        last = Some(p);
        false
    });
    let (plain, unpacked) = (plain.unwrap(), load(&packed, 2, &mut quiet).unwrap());
    assert_eq!(last.map(|p| p.done), last.map(|p| p.total), "progress ends at the total");
    let names: Vec<_> = plain.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["ids", "mask", "noise", "weight"]);
    let checkpoint = Checkpoint::open(&raw).unwrap();
    for (one, other) in plain.iter().zip(&unpacked) {
        let mut expected = vec![0; one.bytes.len()];
        checkpoint
            .read(&[checkpoint.catalog().require(&one.name).unwrap().range()], &mut expected)
            .unwrap();
        assert!((&one.name, &one.meta) == (&other.name, &other.meta));
        assert!(one.bytes[..] == expected && other.bytes[..] == expected);
        let element = one.meta.dtype.bits() as usize / 8;
        assert!(one.bytes.as_ptr().addr().is_multiple_of(element), "{} is aligned", one.name);
    }
    assert!(matches!(load(&raw, 1, &mut |_| true), Err(Error::Interrupted)));
}

#[test]
fn shards_round_trip() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    write(&at("a.ts"), 12);
    let index = at("b.safetensors.index.json");
    let options = || plain().with_max_shard_bytes(3_500_000);
    let done = convert(&at("a.ts"), &index, options(), &mut quiet).unwrap();
    let shards: Vec<_> = (1..4).map(|n| at(&format!("b-{n:05}-of-00003.safetensors"))).collect();
    assert!(shards.iter().all(|shard| shard.exists()), "{:?}", files(directory.path()));
    let lens = files(directory.path()).into_iter().filter(|file| *file != at("a.ts"));
    assert_eq!(
        done.file_bytes,
        lens.map(|file| std::fs::metadata(file).unwrap().len()).sum::<u64>()
    );
    assert!(diff(&at("a.ts"), &index, 0, &mut quiet).unwrap().is_empty());
    convert(&index, &at("c.ts"), plain(), &mut quiet).unwrap();
    assert!(diff(&at("a.ts"), &at("c.ts"), 0, &mut quiet).unwrap().is_empty());
    let again = convert(&at("a.ts"), &index, options(), &mut quiet).unwrap_err().to_string();
    assert!(again.contains("remove it first"), "{again}");
    let auto = convert(
        &at("a.ts"),
        &at("d.safetensors.index.json"),
        with_compression(Compression::Auto, 1),
        &mut quiet,
    );
    assert!(matches!(auto, Err(Error::Compression { .. })));
}

#[test]
fn a_file_in_memory_equals_the_file_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    for (name, compression) in [
        ("a.ts", Compression::None),
        ("b.ts", Compression::Codec(Codec::Zstd, None)),
        ("c.safetensors", Compression::None),
    ] {
        let path = directory.path().join(name);
        let tensors =
            || (0..6).map(|i| u8s(&format!("t{i}"), &[content(i).len() as u64])).collect();
        let fill = |mut writer: FileWriter| {
            writer.order().to_vec().into_iter().for_each(|i| writer.write(&content(i)).unwrap());
            writer
        };
        fill(
            FileWriter::create(
                &path,
                tensors(),
                metadata(),
                with_compression(compression, 1),
                &mut never,
            )
            .unwrap(),
        )
        .commit()
        .unwrap();
        let held = fill(
            FileWriter::in_memory(name, tensors(), metadata(), with_compression(compression, 1))
                .unwrap(),
        );
        let held = held.into_bytes().unwrap();
        assert!(held == std::fs::read(&path).unwrap(), "{name}");
        let checkpoint = Checkpoint::from_bytes("held", held.clone()).unwrap();
        for i in 0..6 {
            let mut bytes = vec![0; content(i).len()];
            let whole = 0..bytes.len() as u64;
            checkpoint
                .read_block(&format!("t{i}"), std::slice::from_ref(&whole), &mut bytes)
                .unwrap();
            assert!(bytes == content(i));
        }
        let loaded = checkpoint.load(LoadOptions::default(), &mut quiet).unwrap();
        for (i, tensor) in loaded.iter().enumerate() {
            assert!(tensor.bytes[..] == content(i), "{}", tensor.name);
        }
        assert!(
            Checkpoint::from_bytes("cut", held[..held.len() / 2].to_vec())
                .unwrap_err()
                .to_string()
                .contains("cut")
        );
    }
}

#[test]
fn load_into_fills_memory_from_cold_and_warm_files() {
    // The temporary directory may be in memory, where files cannot be evicted.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = |name: &str| directory.path().join(name);
    write(&at("a.safetensors"), 9);
    weights(&at("b.safetensors"));
    convert(&at("a.safetensors"), &at("a.ts"), plain(), &mut quiet).unwrap();
    convert(&at("b.safetensors"), &at("b.ts"), with_compression(Compression::Auto, 0), &mut quiet)
        .unwrap();
    for name in ["a.safetensors", "a.ts", "b.ts"] {
        let checkpoint = Checkpoint::open(at(name)).unwrap();
        let names: Vec<_> = checkpoint.catalog().tensors().map(|t| t.name().to_string()).collect();
        let mut memory: Vec<Vec<u8>> =
            checkpoint.catalog().tensors().map(|t| vec![9; t.range().len as usize]).collect();
        for (cold, verify) in [(true, true), (false, true), (false, false)] {
            memory.iter_mut().for_each(|bytes| bytes.fill(9));
            if cold {
                checkpoint.sources()[0].evict().unwrap();
            }
            let targets = names
                .iter()
                .map(String::as_str)
                .zip(memory.iter_mut().map(Vec::as_mut_slice))
                .collect();
            let options = LoadOptions::default().with_verify(verify);
            checkpoint.load_into(targets, options, &mut quiet).unwrap();
            for (name, bytes) in names.iter().zip(&memory) {
                let mut expected = vec![0; bytes.len()];
                checkpoint
                    .read(&[checkpoint.catalog().require(name).unwrap().range()], &mut expected)
                    .unwrap();
                assert!(*bytes == expected, "{name}");
            }
        }
        let into = |name: &str, len: usize| {
            let mut memory = vec![0; len];
            checkpoint
                .load_into(vec![(name, &mut memory)], LoadOptions::default(), &mut quiet)
                .unwrap_err()
                .to_string()
        };
        assert!(into("unknown", 1).contains("unknown"));
        assert!(into(&names[0], 1).contains("got 1"));
    }
    // Damage is found in cold and warm files.
    let (damaged, len) = (at("a.ts"), content(0).len());
    let place = Checkpoint::open(&damaged).unwrap().catalog().require("t0").unwrap().stored_offset()
        as usize;
    let mut bytes = std::fs::read(&damaged).unwrap();
    bytes[place + (2 << 20)] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    for cold in [false, true] {
        let checkpoint = Checkpoint::open(&damaged).unwrap();
        if cold {
            checkpoint.sources()[0].evict().unwrap();
        }
        let mut memory = vec![0; len];
        let found =
            checkpoint.load_into(vec![("t0", &mut memory)], LoadOptions::default(), &mut quiet);
        let Err(Error::Corrupt(found)) = found else { panic!("{found:?}") };
        assert_eq!((found.tensor.as_str(), found.offset), ("t0", (place + (2 << 20)) as u64));
    }
}

#[test]
fn diff_reports_names_and_counts() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    write(&at("a.safetensors"), 6);
    convert(
        &at("a.safetensors"),
        &at("a.ts"),
        with_compression(Compression::Codec(Codec::Lz4, None), 1),
        &mut quiet,
    )
    .unwrap();
    assert!(diff(&at("a.safetensors"), &at("a.ts"), 2, &mut quiet).unwrap().is_empty());
    std::fs::copy(at("a.ts"), at("b.ts")).unwrap();
    let halves = |name: &str| {
        let meta = TensorMeta { dtype: Dtype::F16, shape: vec![1_500_000] };
        NewTensor { name: name.into(), meta, phase: None }
    };
    let mut bytes = content(4);
    bytes.truncate(3_000_000);
    for (path, change) in [(at("a.ts"), 0), (at("b.ts"), 1)] {
        bytes[2_000_000..2_000_003].iter_mut().for_each(|byte| *byte ^= change);
        let tensors = vec![
            halves("h"),
            u8s(["x", "y"][usize::from(change)], &[0]),
            u8s("s", &[u64::from(change), 0]),
        ];
        let note = Metadata::from([("note".to_string(), change.to_string())]);
        let mut writer =
            FileWriter::append(&path, tensors, &[], note, plain(), &mut never).unwrap();
        writer.write(&bytes).unwrap();
        writer.commit().unwrap();
    }
    let found = diff(&at("a.ts"), &at("b.ts"), 2, &mut quiet).unwrap();
    let reported: Vec<_> =
        found.tensors.iter().map(|(name, difference)| format!("{name}: {difference}")).collect();
    assert_eq!(
        reported,
        [
            "h: 2 of 1500000 elements differ",
            "s: U8 [0, 0] and U8 [1, 0]",
            "x: only in the first",
            "y: only in the second"
        ]
    );
    assert_eq!((found.same, found.metadata.len()), (6, 1));
    assert_eq!(found.metadata["note"], (Some("0".into()), Some("1".into())));
    assert!(matches!(diff(&at("a.ts"), &at("b.ts"), 2, &mut |_| true), Err(Error::Interrupted)));
}
