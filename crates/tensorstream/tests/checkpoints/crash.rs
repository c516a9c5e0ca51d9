// SPDX-License-Identifier: MIT OR Apache-2.0
//! Crash safety: a writer that is interrupted at any point leaves the old content or the new.
//!
//! The tests record every call that writes a file. Then they create the states that a power failure
//! after each call could leave on disk. Each state contains everything that was flushed. Of the
//! later writes, it contains none, all, any one of them, all but one, or a torn one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use tensorstream::format::{Codec, Compression, Dtype, Metadata, TensorMeta};
use tensorstream::io::fault::{WriteCall, WriteFaults};
use tensorstream::{
    Checkpoint, Error, FileWriter, NewTensor, WriteOptions, compact, convert, verify,
};

/// The smallest unit of a torn write: a sector.
const SECTOR: usize = 512;

#[derive(Debug, Clone, PartialEq)]
enum Call {
    Write(u64, Vec<u8>),
    SetLen(u64),
    Sync,
    Rename,
    SyncDirectory,
}

type Record = Arc<Mutex<Vec<Call>>>;

/// Returns an empty record, and faults that add each call except preallocations to the record.
/// `fails` is the position in the record, and the error number, of a call that fails. The position
/// `usize::MAX` stands for the preallocation.
fn recorder(fails: Option<(usize, i32)>) -> (Record, WriteFaults) {
    let record = Record::default();
    let calls = Arc::clone(&record);
    let faults = WriteFaults::new(move |_, call| {
        let mut calls = calls.lock().unwrap();
        calls.push(match *call {
            WriteCall::Write { offset, bytes } => Call::Write(offset, bytes.to_vec()),
            WriteCall::SetLen(len) => Call::SetLen(len),
            WriteCall::Sync => Call::Sync,
            WriteCall::Rename(_) => Call::Rename,
            WriteCall::SyncDirectory => Call::SyncDirectory,
            // Preallocation changes no content.
            _ => return fails.filter(|f| f.0 == usize::MAX).map(|f| f.1),
        });
        fails
            .filter(|&(number, _)| calls.len().checked_sub(1) == Some(number))
            .map(|(_, errno)| errno)
    });
    (record, faults)
}

fn options(faults: &WriteFaults) -> WriteOptions {
    let compression = Compression::Codec(Codec::Split, None);
    WriteOptions::default()
        .with_compression(compression)
        .with_jobs(1)
        .with_checkpoint_bytes(1)
        .with_faults(faults.clone())
}

fn never() -> bool {
    false
}

/// Returns an uncompressed tensor that takes several writes, and a compressed one.
fn tensors(names: [&str; 2]) -> Vec<NewTensor> {
    let new = |name: &str, dtype, len| NewTensor {
        name: name.into(),
        meta: TensorMeta { dtype, shape: vec![len] },
        phase: None,
    };
    vec![new(names[0], Dtype::U8, 4_500_000), new(names[1], Dtype::BF16, 40_000)]
}

fn content(seed: u8) -> Vec<u8> {
    let noise = |i: u32| (i.wrapping_mul(2_654_435_761) >> 23) as u8 ^ seed;
    let halves = (0..40_000u32).flat_map(|i| [noise(i), 0x3f]);
    (0..4_500_000u32).map(noise).chain(halves).collect()
}

fn create(path: &Path, seed: u8, faults: &WriteFaults) -> Result<(), Error> {
    let metadata = Metadata::from([("seed".into(), seed.to_string())]);
    let mut writer =
        FileWriter::create(path, tensors(["a", "b"]), metadata, options(faults), &mut never)?;
    writer.write(&content(seed))?;
    writer.commit()
}

/// Replaces a tensor, adds one and removes one.
fn append(path: &Path, faults: &WriteFaults) -> Result<(), Error> {
    let (metadata, gone) = (Metadata::from([("seed".into(), "2".into())]), ["b".to_string()]);
    let mut writer = FileWriter::append(
        path,
        tensors(["a", "c"]),
        &gone,
        metadata,
        options(faults),
        &mut never,
    )?;
    writer.write(&content(2))?;
    writer.commit()
}

/// Appends to a file that was appended to before, so that the other superblock is written.
fn append_over(path: &Path, name: &str, faults: &WriteFaults) -> Result<(), Error> {
    let tensors = tensors([name, "d"])[1..].to_vec();
    let mut writer =
        FileWriter::append(path, tensors, &[], Metadata::default(), options(faults), &mut never)?;
    writer.write(&content(3)[4_500_000..])?;
    writer.commit()
}

type Job = (&'static str, fn(&Path), fn(&Path, &WriteFaults) -> Result<(), Error>);

fn jobs() -> [Job; 5] {
    let before = |path: &Path| create(path, 1, &WriteFaults::default()).unwrap();
    let with_unused_space = |path: &Path| {
        create(path, 1, &WriteFaults::default()).unwrap();
        append(path, &WriteFaults::default()).unwrap();
    };
    [
        ("create", |_| {}, |path, faults| create(path, 2, faults)),
        ("replace", before, |path, faults| create(path, 2, faults)),
        ("append", before, append),
        ("append again", with_unused_space, |path, faults| append_over(path, "a", faults)),
        ("compact", with_unused_space, |path, faults| {
            compact(path, faults, &mut |_| false).map(|_| ())
        }),
    ]
}

/// Verifies a file, and returns its fingerprint and metadata, or `None` if it does not exist.
fn read(path: &Path) -> Option<(u128, Metadata)> {
    if !path.exists() {
        return None;
    }
    let found = verify(path, 0, &mut |_| false)
        .unwrap_or_else(|error| panic!("cannot read the file: {error}"));
    assert_eq!(found.damaged, []);
    let checkpoint = Checkpoint::open(path).unwrap();
    Some((checkpoint.fingerprint().unwrap(), checkpoint.catalog().files()[0].metadata.clone()))
}

fn apply(file: &mut Vec<u8>, call: &Call) {
    match call {
        Call::Write(offset, bytes) => {
            let begin = *offset as usize;
            file.resize(file.len().max(begin + bytes.len()), 0);
            file[begin..begin + bytes.len()].copy_from_slice(bytes);
        }
        Call::SetLen(len) => file.resize(*len as usize, 0),
        Call::Sync | Call::Rename | Call::SyncDirectory => {}
    }
}

/// Returns the states of a file that a power failure after the first `count` calls can leave.
fn states(before: &[u8], calls: &[Call], count: usize) -> Vec<Vec<u8>> {
    let done = &calls[..count];
    let flushed = done.iter().rposition(|call| *call == Call::Sync).map_or(0, |at| at + 1);
    let mut base = before.to_vec();
    done[..flushed].iter().for_each(|call| apply(&mut base, call));
    let unflushed: Vec<&Call> = done[flushed..].iter().collect();
    let with = |chosen: &dyn Fn(usize) -> bool| {
        let mut file = base.clone();
        unflushed
            .iter()
            .enumerate()
            .filter(|(i, _)| chosen(*i))
            .for_each(|(_, call)| apply(&mut file, call));
        file
    };
    let mut all = vec![with(&|_| false), with(&|_| true)];
    for (one, call) in unflushed.iter().enumerate() {
        all.push(with(&|i| i == one));
        all.push(with(&|i| i != one));
        if let Call::Write(offset, bytes) = call {
            for cut in [SECTOR, bytes.len() / 2 / SECTOR * SECTOR, bytes.len() - 1] {
                let mut file = with(&|i| i < one);
                apply(&mut file, &Call::Write(*offset, bytes[..cut.min(bytes.len())].to_vec()));
                all.push(file);
            }
        }
    }
    all.sort();
    all.dedup();
    all
}

#[test]
fn a_power_failure_leaves_the_old_content_or_the_new() {
    for (name, prepare, run) in jobs() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.ts");
        prepare(&path);
        let (old, old_bytes) = (read(&path), std::fs::read(&path).unwrap_or_default());
        let (record, faults) = recorder(None);
        run(&path, &faults).unwrap();
        let new = read(&path);
        assert!(old != new || name == "compact");
        let calls = record.lock().unwrap().clone();
        let mut seen = [0, 0];
        for count in 0..=calls.len() {
            let renamed = calls[..count].iter().position(|call| *call == Call::Rename);
            let durable = calls[..count].contains(&Call::SyncDirectory);
            // For a file that is renamed, these are the states of the partial file. They matter
            // after the rename.
            let candidates = match (name, renamed) {
                ("append" | "append again", _) => states(&old_bytes, &calls, count),
                (_, None) => vec![],
                (_, Some(at)) => states(&[], &calls, at),
            };
            for state in &candidates {
                std::fs::write(&path, state).unwrap();
                let found = read(&path);
                assert!(
                    found == old || found == new,
                    "{name}: after call {count} of {}",
                    calls.len()
                );
                seen[usize::from(found == new)] += 1;
                assert!(found == new || !durable, "{name}: the new content was durable");
            }
        }
        assert!(seen[1] > 0, "{name}: {seen:?}");
        assert!(seen[0] > 10 || !name.starts_with("append"), "{seen:?}");
        // After the last call, the new content is durable.
        assert_eq!(read(&path), new);
    }
}

#[test]
fn an_append_overwrites_only_one_superblock() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.ts");
    create(&path, 1, &WriteFaults::default()).unwrap();
    let (used, before) = (
        Checkpoint::open(&path).unwrap().catalog().files()[0].used_len(),
        std::fs::read(&path).unwrap(),
    );
    let (record, faults) = recorder(None);
    append(&path, &faults).unwrap();
    let calls = record.lock().unwrap().clone();
    let writes = calls.iter().filter_map(|call| match call {
        Call::Write(offset, bytes) => Some((*offset, bytes)),
        _ => None,
    });
    // The active superblock is written again unchanged, to make sure that it is on disk.
    let over: Vec<_> = writes.filter(|(offset, _)| *offset < used).collect();
    assert_eq!(
        over.iter().map(|(offset, bytes)| (*offset, bytes.len())).collect::<Vec<_>>(),
        [(0, 4096), (4096, 4096)]
    );
    assert!(*over[0].1 == before[..4096]);
}

#[test]
fn a_failed_call_is_a_typed_error_and_changes_nothing() {
    for (name, prepare, run) in jobs() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.ts");
        prepare(&path);
        let (old, old_bytes) = (read(&path), std::fs::read(&path).ok());
        let (record, faults) = recorder(None);
        run(&path, &faults).unwrap();
        let (new, calls) = (read(&path), record.lock().unwrap().clone());
        // From this call on, the new content may be visible.
        let published = match name {
            "append" | "append again" => {
                calls.iter().rposition(|call| matches!(call, Call::Write(..))).unwrap()
            }
            _ => calls.iter().position(|call| *call == Call::SyncDirectory).unwrap(),
        };
        for (number, errno) in
            (0..calls.len()).flat_map(|n| [(n, 5), (n, 28)]).chain([(usize::MAX, 28)])
        {
            let reset = |bytes: &[u8]| std::fs::write(&path, bytes).unwrap();
            old_bytes.as_deref().map_or_else(|| std::fs::remove_file(&path).unwrap(), reset);
            let error = run(&path, &recorder(Some((number, errno))).1).unwrap_err();
            let typed = matches!(
                error,
                Error::Write { .. } | Error::Io(tensorstream::io::Error::Write { .. })
            );
            assert!(typed && error.to_string().contains("a.ts"), "{name}, call {number}: {error}");
            let found = read(&path);
            if number < published || number == usize::MAX {
                assert!(std::fs::read(&path).ok() == old_bytes, "{name}, call {number}");
            }
            assert!(found == old || found == new, "{name}, call {number}");
            let files: Vec<PathBuf> =
                std::fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().path()).collect();
            assert!(files.iter().all(|file| *file == path), "{files:?}");
            if found == old {
                run(&path, &WriteFaults::default())
                    .unwrap_or_else(|e| panic!("{name}, second attempt: {e}"));
                assert_eq!(read(&path), new);
            }
        }
    }
}

/// A conversion of [`source`] that starts from the beginning reports at most this number of bytes
/// as its first progress.
const FIRST: u64 = 200_000;

fn source(directory: &Path) -> PathBuf {
    let path = directory.join("a.safetensors");
    let new = |i: u64| NewTensor {
        name: format!("t{i}"),
        meta: TensorMeta { dtype: Dtype::BF16, shape: vec![i % 3 * 100_000] },
        phase: None,
    };
    let tensors: Vec<_> = (0..9).map(new).collect();
    let total: u64 = tensors.iter().map(|t| t.meta.byte_len().unwrap()).sum();
    let plain = WriteOptions::default();
    let mut writer =
        FileWriter::create(&path, tensors, Metadata::default(), plain, &mut never).unwrap();
    writer.write(&content(3)[..total as usize]).unwrap();
    writer.commit().unwrap();
    path
}

/// Returns the options for a file with this suffix. Only `.ts` files are compressed.
fn options_for(suffix: &str, faults: &WriteFaults) -> WriteOptions {
    let options = options(faults);
    if suffix == "ts" { options } else { options.with_compression(Compression::None) }
}

#[test]
fn a_resumed_conversion_results_in_the_same_bytes() {
    ["ts", "safetensors"].into_iter().for_each(resumes_with_the_same_bytes);
}

fn resumes_with_the_same_bytes(suffix: &str) {
    let options = |faults: &WriteFaults| options_for(suffix, faults);
    let directory = tempfile::tempdir().unwrap();
    let from = source(directory.path());
    let at = |name: &str| directory.path().join(format!("{name}.{suffix}"));
    let (whole, to, partial) = (at("whole"), at("to"), format!("to.{suffix}.partial"));
    let partial = directory.path().join(partial);
    let none = WriteFaults::default();
    convert(&from, &whole, options(&none), &mut |_| false).unwrap();
    let expected = std::fs::read(&whole).unwrap();
    let (mut attempts, mut resumed_at) = (0, 0);
    loop {
        attempts += 1;
        let mut first = None;
        let done = convert(&from, &to, options(&none), &mut |progress| {
            // Interrupts after two more tensors that are not empty.
            let first = *first.get_or_insert(progress.done);
            resumed_at = resumed_at.max(first);
            attempts < 50 && progress.done > first + 300_000
        });
        match done {
            Ok(_) => break,
            Err(Error::Interrupted) => assert!(partial.exists()),
            Err(error) => panic!("{error}"),
        }
    }
    assert!(
        attempts > 2 && resumed_at > FIRST,
        "{attempts} attempts, resumed at byte {resumed_at}"
    );
    assert!(std::fs::read(&to).unwrap() == expected, "not the same bytes");
    assert!(!partial.exists());
}

#[test]
fn only_the_same_conversion_is_resumed() {
    ["ts", "safetensors"].into_iter().for_each(resumes_only_the_same);
}

fn resumes_only_the_same(suffix: &str) {
    let options = |faults: &WriteFaults| options_for(suffix, faults);
    let directory = tempfile::tempdir().unwrap();
    let from = source(directory.path());
    let at = |name: &str| directory.path().join(format!("{name}.{suffix}"));
    let (whole, to, partial) = (at("whole"), at("to"), format!("to.{suffix}.partial"));
    let partial = directory.path().join(partial);
    let (record, faults) = recorder(None);
    convert(&from, &whole, options(&faults), &mut |_| false).unwrap();
    let (expected, calls) = (std::fs::read(&whole).unwrap(), record.lock().unwrap().clone());
    let renamed = calls.iter().position(|call| *call == Call::Rename).unwrap();
    let none = WriteFaults::default();
    let first_progress = |options: WriteOptions| {
        let mut first = None;
        convert(&from, &to, options, &mut |progress| {
            *first.get_or_insert(progress.done) == u64::MAX
        })
        .unwrap();
        first.unwrap()
    };
    let mut resumed = 0;
    for count in 0..=renamed {
        for state in states(&[], &calls, count) {
            std::fs::write(&partial, state).unwrap();
            resumed += u64::from(first_progress(options(&none)) > FIRST);
            assert!(std::fs::read(&to).unwrap() == expected, "after call {count}");
        }
    }
    assert!(resumed > 3, "{resumed}");
    // With other compression or a changed source, the conversion starts from the beginning.
    let leave_unfinished = || {
        let state = states(&[], &calls, renamed / 2).pop().unwrap();
        std::fs::write(&partial, state).unwrap();
    };
    leave_unfinished();
    assert!(first_progress(options(&none)) > FIRST);
    if suffix == "ts" {
        leave_unfinished();
        assert_eq!(first_progress(options(&none).with_compression(Compression::None)), FIRST);
    }
    leave_unfinished();
    let later = std::fs::File::options().write(true).open(&from).unwrap();
    later.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(9)).unwrap();
    assert!(first_progress(options(&none)) <= FIRST);
}

#[test]
fn a_resumed_conversion_keeps_durable_tensors() {
    let directory = tempfile::tempdir().unwrap();
    let from = source(directory.path());
    let (to, partial) = (directory.path().join("to.ts"), directory.path().join("to.ts.partial"));
    let none = WriteFaults::default();
    let mut first = None;
    let reach = |until: u64| {
        convert(&from, &to, options(&none), &mut |progress| progress.done > until).unwrap_err()
    };
    for until in [300_000, 700_000, 900_000] {
        reach(until);
        let unfinished = std::fs::read(&partial).unwrap();
        let (record, faults) = recorder(None);
        convert(&from, &to, options(&faults), &mut |progress| {
            *first.get_or_insert(progress.done) == u64::MAX
        })
        .unwrap();
        let expected = std::fs::read(&to).unwrap();
        let calls = record.lock().unwrap().clone();
        let renamed = calls.iter().position(|call| *call == Call::Rename).unwrap();
        let durable = Checkpoint::open(&{
            std::fs::write(&partial, &unfinished).unwrap();
            partial.clone()
        });
        let durable = durable.unwrap().catalog().tensors().len();
        // Until the file is complete, every state has at least the durable tensors. The resumed
        // conversion finishes with the same bytes.
        for count in 0..=renamed {
            for state in states(&unfinished, &calls, count) {
                std::fs::write(&partial, &state).unwrap();
                let there = Checkpoint::open(&partial)
                    .unwrap_or_else(|e| panic!("after call {count}: {e}"));
                assert!(there.catalog().tensors().len() >= durable, "after call {count}");
            }
            convert(&from, &to, options(&none), &mut |_| false).unwrap();
            assert!(std::fs::read(&to).unwrap() == expected, "after call {count}");
        }
        // A call that fails leaves the durable tensors.
        for number in 0..renamed {
            std::fs::write(&partial, &unfinished).unwrap();
            convert(&from, &to, options(&recorder(Some((number, 28))).1), &mut |_| false)
                .unwrap_err();
            let there = Checkpoint::open(&partial).unwrap_or_else(|e| panic!("call {number}: {e}"));
            assert!(there.catalog().tensors().len() >= durable, "call {number}");
        }
        std::fs::remove_file(&partial).unwrap();
    }
}

#[test]
fn an_interrupted_conversion_keeps_every_complete_tensor() {
    let directory = tempfile::tempdir().unwrap();
    let from = source(directory.path());
    let (to, partial) = (directory.path().join("to.ts"), directory.path().join("to.ts.partial"));
    let usual = || options(&WriteFaults::default()).with_checkpoint_bytes(1 << 30);
    let interrupted =
        convert(&from, &to, usual(), &mut |progress| progress.done > 700_000).unwrap_err();
    assert!(matches!(interrupted, Error::Interrupted), "{interrupted}");
    // The first five tensors have 0, 200,000, 400,000, 0 and 200,000 bytes. The interrupt comes
    // after them.
    let kept = Checkpoint::open(&partial).unwrap();
    let bytes: u64 = kept.catalog().tensors().map(|tensor| tensor.range().len).sum();
    assert_eq!(bytes, 800_000);
    let mut first = None;
    convert(&from, &to, usual(), &mut |progress| *first.get_or_insert(progress.done) == u64::MAX)
        .unwrap();
    assert!(first >= Some(800_000), "resumed at {first:?}");
    assert!(!partial.exists());
    // Without complete tensors, no file is kept.
    let other = directory.path().join("other.ts");
    convert(&from, &other, usual(), &mut |_| true).unwrap_err();
    assert!(!directory.path().join("other.ts.partial").exists());
}

#[test]
fn an_interrupt_during_compression_keeps_earlier_tensors() {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("a.safetensors"), directory.path().join("to.ts"));
    let new = |name: &str, len| NewTensor {
        name: name.into(),
        meta: TensorMeta { dtype: Dtype::U8, shape: vec![len] },
        phase: None,
    };
    let tensors = vec![new("a", 3 << 20), new("b", 20 << 20)];
    let mut writer = FileWriter::create(
        &from,
        tensors,
        Metadata::default(),
        WriteOptions::default(),
        &mut never,
    )
    .unwrap();
    writer.write(&vec![1; 23 << 20]).unwrap();
    writer.commit().unwrap();
    let compression = Compression::Codec(Codec::Zstd, Some(1));
    let compressed = || WriteOptions::default().with_compression(compression).with_jobs(1);
    let mut calls = 0;
    let interrupted = convert(&from, &to, compressed(), &mut |progress| {
        // Interrupts in the second tensor, before its first piece is complete.
        calls += u32::from(progress.done == 3 << 20);
        calls == 5
    });
    assert!(matches!(interrupted, Err(Error::Interrupted)) && calls == 5);
    let kept = Checkpoint::open(directory.path().join("to.ts.partial")).unwrap();
    assert_eq!(
        kept.catalog().tensors().map(|tensor| tensor.name().to_string()).collect::<Vec<_>>(),
        ["a"]
    );
    convert(&from, &to, compressed(), &mut |_| false).unwrap();
    let (resumed, whole) = (std::fs::read(&to).unwrap(), directory.path().join("whole.ts"));
    convert(&from, &whole, compressed(), &mut |_| false).unwrap();
    assert!(resumed == std::fs::read(&whole).unwrap(), "not the same bytes");
}
