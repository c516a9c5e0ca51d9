// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loading of whole checkpoints, as copies and as views.
#![allow(unsafe_code)] // mappings of files that only these tests write to

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;

use crate::weights::{weights_of, write_units};
use tensorstream::format::Compression;
use tensorstream::io::FileMapping;
#[cfg(target_os = "linux")]
use tensorstream::io::Source;
use tensorstream::{Checkpoint, Error, LoadOptions, Loaded, Progress, WriteOptions, convert};

fn quiet(_: Progress) -> bool {
    false
}

fn units() -> Vec<Vec<u8>> {
    (0..5).map(|unit| weights_of(unit, 700_002 * unit)).collect()
}

fn written(path: &Path) -> Checkpoint {
    write_units(path, &units());
    Checkpoint::open(path).unwrap()
}

fn mapping(checkpoint: &Checkpoint) -> Arc<FileMapping> {
    // SAFETY: no test accesses bytes of a mapping after it has written to the file.
    Arc::new(unsafe { FileMapping::new(&checkpoint.sources()[0]) }.unwrap())
}

fn views(checkpoint: &Checkpoint, files: &[Arc<FileMapping>]) -> Result<Vec<Loaded>, Error> {
    checkpoint.load_mapped(files, LoadOptions::default(), &mut quiet)
}

fn addresses(tensor: &Loaded) -> std::ops::Range<usize> {
    let begin = tensor.bytes.as_ptr().addr();
    begin..begin + tensor.bytes.len()
}

/// A small checkpoint is loaded without an engine, and `load_each` always uses one.
#[test]
fn an_engine_loads_the_bytes_that_are_read_without_one() {
    let directory = tempfile::tempdir().unwrap();
    written(&directory.path().join("a.safetensors"));
    for (form, compression) in [Compression::None, Compression::Auto].into_iter().enumerate() {
        let path = directory.path().join(format!("{form}.ts"));
        let options = WriteOptions::default().with_compression(compression);
        convert(&directory.path().join("a.safetensors"), &path, options, &mut quiet).unwrap();
    }
    for name in ["a.safetensors", "0.ts", "1.ts"] {
        let stored = Checkpoint::open(directory.path().join(name)).unwrap();
        let mut count = 0;
        let check = |tensor: &Loaded| {
            let unit: usize = tensor.name[1..2].parse().unwrap();
            assert!(tensor.bytes[..] == units()[unit][..], "{name}: {}", tensor.name);
        };
        let mut compare = |tensor: Loaded| {
            check(&tensor);
            count += 1;
            Ok(())
        };
        stored.load_each(LoadOptions::default(), &mut compare, &mut quiet).unwrap();
        assert_eq!(count, units().len());
        stored.load(LoadOptions::default(), &mut quiet).unwrap().iter().for_each(check);
    }
}

#[test]
fn views_have_the_bytes_of_copies_in_the_memory_of_the_mapping() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = written(&directory.path().join("a.safetensors"));
    let file = mapping(&checkpoint);
    let loaded = views(&checkpoint, &[Arc::clone(&file)]).unwrap();
    let copies = checkpoint.load(LoadOptions::default(), &mut quiet).unwrap();
    assert_eq!(loaded.len(), units().len());
    let mapped = file.as_ptr().addr()..file.as_ptr().addr() + file.len();
    for (view, copy) in loaded.iter().zip(&copies) {
        assert_eq!((&view.name, &view.meta), (&copy.name, &copy.meta));
        assert!(view.bytes[..] == copy.bytes[..], "{}", view.name);
        let is_view = mapped.contains(&addresses(view).start);
        assert!(is_view || view.bytes.is_empty(), "{} is in the mapping", view.name);
        assert!(!mapped.contains(&addresses(copy).start));
    }
}

#[test]
fn tensors_of_files_without_a_mapping_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let first = written(&directory.path().join("a.safetensors"));
    let second = written(&directory.path().join("b.safetensors"));
    for files in [vec![], vec![mapping(&second)]] {
        let loaded = views(&first, &files).unwrap();
        for (tensor, bytes) in loaded.iter().zip(units()) {
            assert!(tensor.bytes[..] == bytes[..], "{}", tensor.name);
        }
    }
    let bytes = std::fs::read(directory.path().join("a.safetensors")).unwrap();
    let in_memory = Checkpoint::from_bytes("a", bytes).unwrap();
    // SAFETY: the call fails, because the source is not a file.
    let refused = unsafe { FileMapping::new(&in_memory.sources()[0]) };
    assert!(refused.unwrap_err().to_string().contains("not a file"));
    assert_eq!(views(&in_memory, &[]).unwrap().len(), units().len());
}

#[test]
fn a_file_that_changes_while_it_is_mapped_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.safetensors");
    let checkpoint = written(&path);
    let file = mapping(&checkpoint);
    OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    let error = views(&checkpoint, &[file]).unwrap_err();
    assert!(matches!(&error, Error::Io(tensorstream::io::Error::Changed { .. })), "{error}");
    // SAFETY: the call fails, because the file has changed.
    let refused = unsafe { FileMapping::new(&checkpoint.sources()[0]) };
    assert!(refused.is_err());
}

#[test]
fn loads_of_views_can_be_interrupted() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = written(&directory.path().join("a.safetensors"));
    let files = [mapping(&checkpoint)];
    let result = checkpoint.load_mapped(&files, LoadOptions::default(), &mut |_| true);
    assert!(matches!(result, Err(Error::Interrupted)));
}

#[test]
fn memory_that_is_still_used_is_never_given_out_again() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = written(&directory.path().join("a.safetensors"));
    let load = || checkpoint.load(LoadOptions::default(), &mut quiet).unwrap();
    let (expected, mut kept) = (units(), Vec::new());
    for round in 0..30 {
        let mut loaded = load();
        kept.push(loaded.swap_remove(round % loaded.len()));
        if round % 7 == 6 {
            kept.drain(..3);
        }
        let mut ranges: Vec<_> = loaded.iter().chain(&kept).map(addresses).collect();
        ranges.retain(|range| !range.is_empty());
        ranges.sort_by_key(|range| range.start);
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "round {round}");
        for tensor in loaded.iter().chain(&kept) {
            let unit: usize = tensor.name[1..2].parse().unwrap();
            assert!(tensor.bytes[..] == expected[unit][..], "{}", tensor.name);
        }
        assert!(tensorstream::kept_bytes() <= 64 << 20);
    }
}

#[test]
fn named_tensors_are_loaded_in_the_order_of_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = written(&directory.path().join("a.safetensors"));
    let by_offset: Vec<_> =
        checkpoint.catalog().tensors_by_offset().iter().map(|t| t.name().to_string()).collect();
    let wanted = [&by_offset[3], &by_offset[1], &by_offset[3]];
    let loaded = checkpoint.load_named(&wanted, LoadOptions::default(), &mut quiet).unwrap();
    let names: Vec<_> = loaded.iter().map(|tensor| &tensor.name).collect();
    assert_eq!(names, [&by_offset[1], &by_offset[3]]);
    let all = checkpoint.load(LoadOptions::default(), &mut quiet).unwrap();
    for tensor in loaded {
        let same = all.iter().find(|other| other.name == tensor.name).unwrap();
        assert!(tensor.bytes[..] == same.bytes[..], "{}", tensor.name);
    }
    let none = checkpoint.load_named(&["none"], LoadOptions::default(), &mut quiet).unwrap_err();
    assert!(matches!(none, Error::Format(_)), "{none}");
}

/// The handles are those of a path that this process cannot open any more.
#[cfg(target_os = "linux")]
#[test]
fn files_that_another_process_has_opened_are_loaded() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("a.safetensors");
    let direct = written(&path).load(LoadOptions::default(), &mut quiet).unwrap();
    let hidden = directory.path().join("hidden.safetensors");
    let mut names = Vec::new();
    let mut opened = None;
    let mut open = |name: &str| {
        names.push(name.to_string());
        let handles = Source::open(&path)?.handles()?.unwrap();
        assert!(handles.direct.is_some(), "the file system supports direct I/O");
        std::fs::rename(&path, &hidden).unwrap();
        let source = Source::from_handles(name, handles)?;
        opened = Some(Arc::clone(&source));
        Ok(source)
    };
    let checkpoint = Checkpoint::open_through("name.safetensors", &mut open).unwrap();
    assert_eq!(names, ["name.safetensors"]);
    let source = opened.unwrap();
    assert_eq!((source.path(), source.is_file()), (Path::new("name.safetensors"), true));
    assert!(source.direct_alignment().is_ok());
    source.evict().unwrap();
    let passed = checkpoint.load(LoadOptions::default(), &mut quiet).unwrap();
    assert_eq!(passed.len(), direct.len());
    for (one, other) in passed.iter().zip(&direct) {
        assert!(one.name == other.name && one.bytes[..] == other.bytes[..], "{}", one.name);
    }
    // A change of the content is noticed through the handle.
    let mut file = OpenOptions::new().append(true).open(&hidden).unwrap();
    std::io::Write::write_all(&mut file, b"more").unwrap();
    let changed = checkpoint.load(LoadOptions::default(), &mut quiet).unwrap_err();
    assert!(changed.to_string().contains("name.safetensors"), "{changed}");
    assert!(Source::from_handles("pipe", handles_of("/dev/null")).is_err());
}

#[cfg(target_os = "linux")]
fn handles_of(path: &str) -> tensorstream::io::FileHandles {
    let file = std::fs::File::open(path).unwrap();
    tensorstream::io::FileHandles { file, direct: None }
}
