// SPDX-License-Identifier: MIT OR Apache-2.0
//! What every backend must do, as a suite that a backend's author runs: [`check`].

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use ts_pool::{Budget, Buffer, HostPool};

use crate::{
    Backend, BackendOptions, BackendProvider, Completion, Error, ErrorKind, ReadPath, ReadRequest, Source,
    completion_queue,
};

const PATIENCE: Duration = Duration::from_secs(30);
const POOL_BYTES: usize = 8 << 20;

/// Runs the suite on real files in `dir`, which must be on a file system that the provider can read.
///
/// # Panics
/// With the broken rule, when the backend breaks one. Blocks for as long as the reads take.
pub fn check(provider: &dyn BackendProvider, dir: &Path) {
    delivers_the_bytes_of_every_range(provider, dir);
    fills_up_to_the_end_of_the_file_and_no_further(provider, dir);
    reports_a_file_that_ends_early(provider, dir);
    reports_a_file_that_changed(provider, dir);
    gives_every_buffer_back(provider, dir);
}

struct Bench {
    pool: HostPool,
    backend: Box<dyn Backend>,
    done: Receiver<Completion>,
}

impl Bench {
    fn new(provider: &dyn BackendProvider) -> Self {
        let (sink, done) = completion_queue();
        let backend = provider
            .create(&BackendOptions { in_flight: 3, ..BackendOptions::default() }, sink)
            .expect("it was available");
        let pool = HostPool::new(&Budget::new(POOL_BYTES), POOL_BYTES).expect("8 MiB");
        Self { pool, backend, done }
    }

    fn submit(&self, token: u64, source: &Arc<Source>, offset: u64, len: usize, required: usize) {
        let buffer = self.buffer(len);
        let request = ReadRequest::new(token, Arc::clone(source), offset, required, buffer);
        self.backend.submit(request).map_err(|r| r.error).expect("an aligned request is taken");
    }

    fn buffer(&self, len: usize) -> Buffer {
        let mut buffer = self.pool.allocate(len).expect("the pool is large enough");
        buffer.fill(0xEE);
        buffer
    }

    fn wait(&self) -> Completion {
        self.done.recv_timeout(PATIENCE).expect("every request completes")
    }

    fn read(&self, source: &Arc<Source>, offset: u64, len: usize, required: usize) -> Completion {
        self.submit(0, source, offset, len, required);
        self.wait()
    }
}

/// Content in which every place differs from its neighbours and from the same place on another page.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8).wrapping_mul(31) ^ (i >> 16)) as u8).collect()
}

fn file(dir: &Path, name: &str, len: usize) -> (Vec<u8>, Arc<Source>) {
    let content = pattern(len);
    fs::write(dir.join(name), &content).expect("the directory is writable");
    (content, Source::open(dir.join(name)).expect("just written"))
}

fn delivers_the_bytes_of_every_range(provider: &dyn BackendProvider, dir: &Path) {
    let bench = Bench::new(provider);
    let (content, source) = file(dir, "ranges", 1 << 20);
    let ranges = [(0, 4096), (4096, 65536), (1 << 19, 1 << 19), (8192, 4096), (0, 1 << 20)];
    for (token, &(offset, len)) in ranges.iter().enumerate() {
        bench.submit(token as u64, &source, offset, len, len);
    }
    let mut seen = HashMap::new();
    for _ in ranges {
        let done = bench.wait();
        let (offset, len) = ranges[done.token as usize];
        let transfer = done.result.expect("the file is readable");
        assert_eq!(transfer.bytes, len, "the whole range was delivered");
        assert!(transfer.started_ns <= transfer.finished_ns);
        assert!(ReadPath::ALL.contains(&transfer.path));
        assert!(
            done.buffers[0][..] == content[offset as usize..][..len],
            "the bytes of {offset}+{len} are right"
        );
        assert!(seen.insert(done.token, ()).is_none(), "a request completes once");
    }
}

fn fills_up_to_the_end_of_the_file_and_no_further(provider: &dyn BackendProvider, dir: &Path) {
    let bench = Bench::new(provider);
    let (content, source) = file(dir, "tail", 10_001);
    let done = bench.read(&source, 8192, 4096, 10_001 - 8192);
    assert_eq!(done.result.expect("all required bytes are there").bytes, 10_001 - 8192);
    assert!(done.buffers[0][..10_001 - 8192] == content[8192..]);
}

fn reports_a_file_that_ends_early(provider: &dyn BackendProvider, dir: &Path) {
    let bench = Bench::new(provider);
    let (_, source) = file(dir, "short", 10_000);
    let error = bench.read(&source, 8192, 4096, 4096).result.expect_err("bytes are missing");
    assert!(matches!(error, Error::ShortRead { offset: 8192, expected: 4096, actual: 1808, .. }), "{error}");
}

fn reports_a_file_that_changed(provider: &dyn BackendProvider, dir: &Path) {
    type Change = (&'static str, fn(&Path));
    let bench = Bench::new(provider);
    let changes: [Change; 4] = [
        ("truncated", |path| {
            OpenOptions::new().write(true).open(path).and_then(|f| f.set_len(5000)).expect("writable");
        }),
        ("grown", |path| fs::write(path, pattern(20_000)).expect("writable")),
        ("replaced", |path| {
            fs::write(path.with_extension("new"), pattern(16_384)).expect("writable");
            fs::rename(path.with_extension("new"), path).expect("renamed");
        }),
        ("removed", |path| fs::remove_file(path).expect("removable")),
    ];
    for (name, change) in changes {
        let (_, source) = file(dir, name, 16_384);
        assert!(bench.read(&source, 0, 8192, 8192).result.is_ok(), "{name}: fine before the change");
        change(source.path());
        let error = bench.read(&source, 0, 8192, 8192).result.expect_err(name);
        assert_eq!(error.kind(), ErrorKind::Changed, "{name}: {error}");
        assert!(error.to_string().contains(name), "the error names the file: {error}");
    }
}

fn gives_every_buffer_back(provider: &dyn BackendProvider, dir: &Path) {
    let bench = Bench::new(provider);
    let (_, source) = file(dir, "cancelled", 1 << 20);
    for round in 0..20 {
        for token in 0..32 {
            bench.submit(token, &source, 4096 * token, 65536, 65536);
        }
        let cancelled = bench.backend.cancel(&|token| token % 2 == round % 2);
        let mut refused = 0;
        for _ in 0..32 {
            match bench.wait().result {
                Ok(transfer) => assert_eq!(transfer.bytes, 65536),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
                    refused += 1;
                }
            }
        }
        assert!(refused >= cancelled, "cancel says how many it took back; some that had begun may join them");
        assert_eq!(bench.pool.stats().in_use_bytes, 0, "every buffer came back");
    }
    for token in 0..32 {
        bench.submit(token, &source, 0, 65536, 65536);
    }
    let Bench { pool, backend, done } = bench;
    drop(backend);
    assert_eq!(done.try_iter().count(), 32, "dropping a backend completes what it had");
    assert_eq!(pool.stats().in_use_bytes, 0, "and gives the buffers back");
}
