// SPDX-License-Identifier: MIT OR Apache-2.0
//! Injects thousands of random faults into each backend for files, except `gds`.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ts_io::fault::{Attempt, Fault, Faults, FaultyProvider};
use ts_io::{
    BackendOptions, BackendProvider, ErrorKind, ReadRequest, Registry, Source, completion_queue,
};
use ts_pool::{Budget, HostPool};

const FILE_BYTES: usize = 1 << 20;
const READS_AT_ONCE: u64 = 64;
const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;

/// Marsaglia's xorshift, so that each run uses the same random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A change to the file itself while it is read.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Damage {
    None,
    Truncated,
    Replaced,
}

fn content(round: u64) -> Vec<u8> {
    (0..FILE_BYTES as u64).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 7) as u8 ^ round as u8).collect()
}

fn apply(damage: Damage, path: &PathBuf) {
    match damage {
        Damage::None => {}
        Damage::Truncated => {
            OpenOptions::new().write(true).open(path).unwrap().set_len(5000).unwrap();
        }
        Damage::Replaced => {
            let other = path.with_extension("other");
            std::fs::write(&other, vec![0xAA; FILE_BYTES]).unwrap();
            std::fs::rename(other, path).unwrap();
        }
    }
}

/// Reads with random faults until `wanted` faults have happened, and checks every completion.
fn read_with_faults(name: &str, wanted: u64) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let happened = Arc::new(AtomicU64::new(0));
    let mut random = Random(0x1234_5678_9ABC_DEF1);
    let mut round = 0;
    while happened.load(Ordering::Relaxed) < wanted {
        round += 1;
        let path = dir.path().join(format!("round-{round}"));
        let content = content(round);
        std::fs::write(&path, &content).unwrap();
        let source = Source::open(&path).unwrap();
        if round % 2 == 0 {
            source.evict().unwrap();
        }
        let damage = [Damage::None, Damage::Truncated, Damage::Replaced][round as usize % 3];
        let moment = random.below(40);
        let (dice, count) = (Mutex::new(Random(random.below(u64::MAX) | 1)), Arc::clone(&happened));
        let decide = move |attempt: &Attempt<'_>| {
            if attempt.number == moment {
                apply(damage, &path);
            }
            let mut dice = dice.lock().unwrap();
            let fault = match dice.below(100) {
                0..30 => Fault::Short(dice.below(attempt.len as u64) as usize),
                30..50 => Fault::Errno(EINTR),
                50..60 => Fault::Errno(EAGAIN),
                60..68 => Fault::Errno(EIO),
                68..72 => Fault::Delay(Duration::from_micros(dice.below(2000))),
                72 => Fault::Stuck,
                _ => return None,
            };
            count.fetch_add(1, Ordering::Relaxed);
            Some(fault)
        };
        let faults = Faults::new(decide);
        run_round(name, &source, &content, damage, &faults, &mut random);
    }
    println!("{name}: {} faults in {round} rounds", happened.load(Ordering::Relaxed));
}

fn run_round(
    name: &str,
    source: &Arc<Source>,
    content: &[u8],
    damage: Damage,
    faults: &Faults,
    random: &mut Random,
) {
    let real =
        Registry::builtin().choose(Some(name), std::slice::from_ref(source)).unwrap().provider;
    let (sink, done) = completion_queue();
    let timeout = Duration::from_millis(30);
    let options = BackendOptions::default().with_in_flight(4).with_timeout(timeout);
    let backend = FaultyProvider::new(real, faults.clone()).create(&options, sink).unwrap();
    let pool = HostPool::new(&Budget::new(16 << 20), 16 << 20).unwrap();
    let mut ranges = Vec::new();
    for token in 0..READS_AT_ONCE {
        let offset =
            random.below(FILE_BYTES as u64 / 4096) * 4096 + random.below(2) * random.below(4096);
        let len = 1 + random.below(100_000).min(FILE_BYTES as u64 - offset - 1) as usize;
        let mut buffer = pool.allocate(len + 4096).unwrap();
        let mut buffer = buffer.split_off(offset as usize % 4096);
        drop(buffer.split_off(len));
        ranges.push((offset as usize, len));
        backend.submit(ReadRequest::new(token, Arc::clone(source), offset, len, buffer)).unwrap();
    }
    let cancelled = if random.below(4) == 0 { backend.cancel(&|token| token > 50) } else { 0 };
    let (mut succeeded, mut refused) = (0, 0);
    for _ in 0..READS_AT_ONCE {
        let completion =
            done.recv_timeout(Duration::from_secs(30)).expect("every read must complete");
        let (offset, len) = ranges[completion.token as usize];
        match completion.result {
            Ok(transfer) => {
                assert_eq!(transfer.bytes(), len);
                assert!(
                    completion.buffers[0][..] == content[offset..][..len],
                    "a successful read must deliver the right bytes"
                );
                succeeded += 1;
            }
            Err(error) => {
                assert!(
                    error.to_string().contains("round-"),
                    "the error must name the file: {error}"
                );
                match error.kind() {
                    ErrorKind::Io => assert!(error.to_string().contains("os error 5"), "{error}"),
                    ErrorKind::Changed => assert_ne!(damage, Damage::None, "{error}"),
                    ErrorKind::Cancelled => refused += 1,
                    ErrorKind::TimedOut => {}
                    other => panic!("{other:?}: {error}"),
                }
            }
        }
    }
    assert!(refused >= cancelled);
    assert!(succeeded > 0 || damage != Damage::None, "at least one read must succeed");
    faults.release();
    drop(backend);
    let began = Instant::now();
    while pool.stats().in_use_bytes > 0 {
        assert!(began.elapsed() < Duration::from_secs(30), "every buffer must return to the pool");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn count(dir: &str) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// A file that was truncated before it is read is `Changed`, whatever the backend checks first.
fn shrunk_files_are_changed() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("data");
    let registry = Registry::builtin();
    let names = ["buffered", "direct", "uring", "adaptive", "mmap"];
    for name in names.into_iter().filter(|name| registry.names().contains(name)) {
        std::fs::write(&path, [7; 100_000]).unwrap();
        let source = Source::open(&path).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(5000).unwrap();
        let (sink, done) = completion_queue();
        let read = || {
            let choice = registry.choose(Some(name), std::slice::from_ref(&source))?;
            let backend = choice.provider.create(&BackendOptions::default(), sink)?;
            let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20).unwrap();
            let buffer = pool.allocate(100_000).unwrap();
            let request = ReadRequest::new(0, Arc::clone(&source), 0, 100_000, buffer);
            backend.submit(request).map_err(|rejected| rejected.error)?;
            done.recv().unwrap().result
        };
        assert_eq!(read().unwrap_err().kind(), ErrorKind::Changed, "{name}");
    }
}

/// All backends are in one test, so that no other test opens files or starts threads meanwhile.
#[test]
fn faults_end_in_right_bytes_or_errors_without_leaks() {
    shrunk_files_are_changed();
    let names = ["buffered", "direct", "uring", "adaptive", "mmap"];
    let names = names.into_iter().filter(|name| Registry::builtin().names().contains(name));
    let all = || names.clone().for_each(|name| read_with_faults(name, 2500));
    names.clone().for_each(|name| read_with_faults(name, 50));
    let before = (count("/proc/self/fd"), count("/proc/self/task"));
    all();
    let began = Instant::now();
    // After a read hangs, its thread ends only when the read returns.
    while (count("/proc/self/fd"), count("/proc/self/task")) != before {
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "leaked descriptors or threads: {before:?} before, {:?} after",
            (count("/proc/self/fd"), count("/proc/self/task"))
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}
