// SPDX-License-Identifier: MIT OR Apache-2.0
//! Conformance tests for backends. Run [`check`] on every backend, and also [`check_with_faults`]
//! on the backends that support fault injection: the built-in ones except `remote`.

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use ts_pool::{Budget, Buffer, HostPool};

use crate::fault::{Fault, Faults, FaultyProvider};
use crate::{
    Backend, BackendOptions, BackendProvider, Completion, Error, ErrorKind, ReadPath, ReadRequest,
    Source, completion_queue,
};

const PATIENCE: Duration = Duration::from_secs(30);
const POOL_BYTES: usize = 8 << 20;

/// Storage for the files or objects that the tests read. Methods panic if they fail.
pub trait Fixture {
    /// Creates a file with this content, and returns its path or URL for [`Source::open`].
    fn write(&self, name: &str, content: &[u8]) -> String;

    /// Overwrites the content of a file, in place if the storage supports that.
    fn overwrite(&self, name: &str, content: &[u8]);

    /// Replaces a file with a new file of the same name.
    fn replace(&self, name: &str, content: &[u8]);

    /// Removes a file.
    fn remove(&self, name: &str);
}

/// A directory on a file system that the backend can read.
#[derive(Debug, Clone)]
pub struct Directory(pub PathBuf);

impl Fixture for Directory {
    fn write(&self, name: &str, content: &[u8]) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).expect("the directory must be writable");
        path.to_str().expect("the path of the directory must be UTF-8").into()
    }

    fn overwrite(&self, name: &str, content: &[u8]) {
        let mut file = OpenOptions::new()
            .write(true)
            .open(self.0.join(name))
            .expect("the test file must be writable");
        file.set_len(content.len() as u64)
            .and_then(|()| file.write_all(content))
            .expect("writing to the test file must succeed");
    }

    fn replace(&self, name: &str, content: &[u8]) {
        let new = self.0.join(format!("{name}.new"));
        fs::write(&new, content)
            .and_then(|()| fs::rename(new, self.0.join(name)))
            .expect("replacing the test file must succeed");
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.0.join(name)).expect("removing the test file must succeed");
    }
}

/// Checks that a backend follows the rules of [`Backend`]. Blocks while it reads.
///
/// # Panics
/// Panics if the backend violates a rule. Most messages name the rule.
pub fn check(provider: &dyn BackendProvider, fixture: &dyn Fixture) {
    delivers_the_bytes_of_every_range(provider, fixture);
    delivers_unaligned_ends(provider, fixture);
    fills_buffers_one_after_the_other(provider, fixture);
    rejects_unaligned_memory_if_it_needs_alignment(provider, fixture);
    fills_up_to_the_end_of_the_file(provider, fixture);
    reports_a_file_that_ends_early(provider, fixture);
    reports_a_file_that_changed(provider, fixture);
    reads_a_file_without_a_name(provider, fixture);
    returns_every_buffer(provider, fixture);
}

/// Checks a backend with injected faults. Runs [`check`] with short and interrupted reads, and then
/// checks reads that fail and reads that hang. Blocks while it reads.
///
/// # Panics
/// Panics if the backend violates a rule. Most messages name the rule.
pub fn check_with_faults(provider: &Arc<dyn BackendProvider>, fixture: &dyn Fixture) {
    let transient = Faults::new(|attempt| match attempt.number % 3 {
        0 => Some(Fault::Short(1 + attempt.len / 3)),
        1 => Some(Fault::Errno(EINTR)),
        _ => None,
    });
    check(&FaultyProvider::new(Arc::clone(provider), transient), fixture);
    reports_errors_of_the_system(provider, fixture);
    times_out_reads_that_hang(provider, fixture);
}

const EINTR: i32 = 4;
const EIO: i32 = 5;

struct Harness {
    pool: HostPool,
    backend: Box<dyn Backend>,
    done: Receiver<Completion>,
}

impl Harness {
    fn new(provider: &dyn BackendProvider) -> Self {
        Self::with_timeout(provider, BackendOptions::default().timeout)
    }

    fn with_timeout(provider: &dyn BackendProvider, timeout: Duration) -> Self {
        let (sink, done) = completion_queue();
        let options = BackendOptions::default().with_in_flight(3).with_timeout(timeout);
        let backend = provider.create(&options, sink).expect("creating the backend must succeed");
        let pool =
            HostPool::new(&Budget::new(POOL_BYTES), POOL_BYTES).expect("8 MiB must be available");
        Self { pool, backend, done }
    }

    fn submit(&self, token: u64, source: &Arc<Source>, offset: u64, len: usize, required: usize) {
        let buffer = self.buffer(len);
        let request = ReadRequest::new(token, Arc::clone(source), offset, required, buffer);
        self.backend
            .submit(request)
            .map_err(|r| r.error)
            .expect("an aligned request must be accepted");
    }

    fn buffer(&self, len: usize) -> Buffer {
        let mut buffer =
            self.pool.allocate(len).expect("buffers of completed reads must return to the pool");
        buffer.fill(0xEE);
        buffer
    }

    fn wait(&self) -> Completion {
        self.done.recv_timeout(PATIENCE).expect("every request must complete")
    }

    fn read(&self, source: &Arc<Source>, offset: u64, len: usize, required: usize) -> Completion {
        self.submit(0, source, offset, len, required);
        self.wait()
    }
}

/// Returns content in which nearly all bytes differ from their neighbors. Content of up to 1 MiB
/// has no two equal pages.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8).wrapping_mul(31) ^ (i >> 16)) as u8).collect()
}

fn source(fixture: &dyn Fixture, name: &str, len: usize) -> (Vec<u8>, Arc<Source>) {
    let content = pattern(len);
    let source =
        Source::open(fixture.write(name, &content)).expect("the new file must be readable");
    (content, source)
}

fn delivers_the_bytes_of_every_range(provider: &dyn BackendProvider, fixture: &dyn Fixture) {
    let harness = Harness::new(provider);
    harness.backend.register(&harness.pool);
    let (content, source) = source(fixture, "ranges", 1 << 20);
    let ranges = [(0, 4096), (4096, 65536), (1 << 19, 1 << 19), (8192, 4096), (0, 1 << 20)];
    for (token, &(offset, len)) in ranges.iter().enumerate() {
        harness.submit(token as u64, &source, offset, len, len);
    }
    let mut seen = HashSet::new();
    for _ in ranges {
        let done = harness.wait();
        let (offset, len) = ranges[done.token as usize];
        let transfer = done.result.expect("the file is readable");
        assert_eq!(transfer.bytes(), len, "a read must deliver the whole range");
        assert!(transfer.started_ns <= transfer.finished_ns);
        assert!(transfer.paths.iter().all(|(path, _)| ReadPath::ALL.contains(path)));
        assert_eq!(
            transfer.paths.iter().map(|path| path.1).sum::<usize>(),
            len,
            "the paths must account for every byte"
        );
        assert!(
            done.buffers[0][..] == content[offset as usize..][..len],
            "wrong bytes in the read of {len} bytes at byte {offset}"
        );
        assert!(seen.insert(done.token), "a request must complete once");
    }
}

fn delivers_unaligned_ends(provider: &dyn BackendProvider, fixture: &dyn Fixture) {
    let harness = Harness::new(provider);
    let (content, source) = source(fixture, "ends", 40_000);
    for (offset, len) in
        [(1001, 9000), (4095, 2), (512, 100), (8191, 12_290), (39_000, 1000), (0, 1)]
    {
        // The address of `buffer` and the file offset are equal modulo the page size.
        let mut before = harness.buffer(65_536);
        let mut buffer = before.split_off(offset % 4096);
        let after = buffer.split_off(len);
        let request = ReadRequest::new(0, Arc::clone(&source), offset as u64, len, buffer);
        harness
            .backend
            .submit(request)
            .map_err(|r| r.error)
            .expect("a request with unaligned ends must be accepted");
        let done = harness.wait();
        assert_eq!(done.result.expect("the file is readable").bytes(), len);
        assert!(
            done.buffers[0][..] == content[offset..][..len],
            "wrong bytes in the read of {len} bytes at byte {offset}"
        );
        let around = before.iter().chain(after.iter());
        assert!(
            around.copied().all(|byte| byte == 0xEE),
            "the read of {len} bytes at byte {offset} overwrote memory next to its buffer"
        );
    }
}

fn fills_buffers_one_after_the_other(provider: &dyn BackendProvider, fixture: &dyn Fixture) {
    let harness = Harness::new(provider);
    let (content, source) = source(fixture, "scattered", 1 << 20);
    let buffers: Vec<Buffer> = [4096, 65_536, 0, 8192, 100].map(|len| harness.buffer(len)).into();
    let required: usize = buffers.iter().map(|buffer| buffer.len()).sum();
    let request = ReadRequest { token: 7, source, offset: 12_288, required, buffers };
    harness
        .backend
        .submit(request)
        .map_err(|r| r.error)
        .expect("buffers that meet at block boundaries must be accepted");
    let done = harness.wait();
    assert_eq!(done.result.expect("the file is readable").bytes(), required);
    let bytes: Vec<u8> = done.buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect();
    assert!(bytes == content[12_288..][..required], "wrong bytes, or a wrong order of buffers");
}

fn rejects_unaligned_memory_if_it_needs_alignment(
    provider: &dyn BackendProvider,
    fixture: &dyn Fixture,
) {
    let harness = Harness::new(provider);
    let (content, source) = source(fixture, "unaligned", 40_000);
    let request = ReadRequest::new(0, source, 1000, 8192, harness.buffer(8192));
    match harness.backend.submit(request) {
        Ok(()) => {
            assert!(
                !harness.backend.capabilities().needs_alignment,
                "the backend accepts unaligned memory, but its capabilities require alignment"
            );
            let done = harness.wait();
            assert_eq!(done.result.expect("the file is readable").bytes(), 8192);
            assert!(done.buffers[0][..] == content[1000..][..8192]);
        }
        Err(rejected) => {
            assert!(
                harness.backend.capabilities().needs_alignment,
                "the backend rejects unaligned memory, but its capabilities require no alignment"
            );
            assert!(
                matches!(rejected.error, Error::Misaligned { offset: 1000, .. }),
                "{}",
                rejected.error
            );
            assert_eq!(rejected.request.buffers.len(), 1, "a rejection must return the buffer");
        }
    }
    assert_eq!(harness.pool.stats().in_use_bytes, 0);
}

fn fills_up_to_the_end_of_the_file(provider: &dyn BackendProvider, fixture: &dyn Fixture) {
    let harness = Harness::new(provider);
    let (content, source) = source(fixture, "tail", 10_001);
    let done = harness.read(&source, 8192, 4096, 10_001 - 8192);
    assert_eq!(done.result.expect("the required bytes are in the file").bytes(), 10_001 - 8192);
    assert!(done.buffers[0][..10_001 - 8192] == content[8192..]);
}

fn reports_a_file_that_ends_early(provider: &dyn BackendProvider, fixture: &dyn Fixture) {
    let harness = Harness::new(provider);
    let (_, source) = source(fixture, "short", 10_000);
    let error = harness.read(&source, 8192, 4096, 4096).result.expect_err("the file is too short");
    assert!(
        matches!(error, Error::ShortRead { offset: 8192, expected: 4096, actual: 1808, .. }),
        "{error}"
    );
    let error = harness
        .read(&source, 1 << 40, 4096, 1)
        .result
        .expect_err("the range is past the end of the file");
    assert!(matches!(error, Error::ShortRead { actual: 0, .. }), "{error}");
}

fn reports_a_file_that_changed(provider: &dyn BackendProvider, fixture: &dyn Fixture) {
    type Change = (&'static str, fn(&dyn Fixture));
    let harness = Harness::new(provider);
    let changes: [Change; 4] = [
        ("truncated", |fixture| fixture.overwrite("truncated", &pattern(5000))),
        ("grown", |fixture| fixture.overwrite("grown", &pattern(20_000))),
        ("replaced", |fixture| fixture.replace("replaced", &[1; 16_384])),
        ("removed", |fixture| fixture.remove("removed")),
    ];
    for (name, change) in changes {
        let (content, source) = source(fixture, name, 16_384);
        assert!(
            harness.read(&source, 0, 8192, 8192).result.is_ok(),
            "{name}: the read before the change must succeed"
        );
        change(fixture);
        let done = harness.read(&source, 0, 8192, 8192);
        if source.is_file() && matches!(name, "replaced" | "removed") {
            done.result.unwrap_or_else(|error| panic!("an open file can be {name}: {error}"));
            assert!(done.buffers[0][..8192] == content[..8192], "{name}: the file that is open");
            continue;
        }
        let error = done.result.expect_err(name);
        assert_eq!(error.kind(), ErrorKind::Changed, "{name}: {error}");
        assert!(error.to_string().contains(name), "the error must name the file: {error}");
    }
}

/// A file that loses its name before the first read is opened with all its handles.
fn reads_a_file_without_a_name(provider: &dyn BackendProvider, fixture: &dyn Fixture) {
    let harness = Harness::new(provider);
    let (content, source) = source(fixture, "nameless", 2 << 20);
    if !source.is_file() {
        return;
    }
    fixture.replace("nameless", &vec![1; 2 << 20]);
    fixture.remove("nameless");
    for (offset, len) in [(0, 1 << 20), (1 << 20, 4096), (8192, 65_536)] {
        let done = harness.read(&source, offset, len, len);
        done.result.unwrap_or_else(|error| panic!("the file is open: {error}"));
        assert!(done.buffers[0][..len] == content[offset as usize..][..len]);
    }
    fixture.write("nameless", &[2; 4096]);
    assert!(harness.read(&source, 0, 4096, 4096).result.is_ok(), "another file has its name");
}

fn returns_every_buffer(provider: &dyn BackendProvider, fixture: &dyn Fixture) {
    let harness = Harness::new(provider);
    let (_, source) = source(fixture, "cancelled", 1 << 20);
    for round in 0..20 {
        for token in 0..32 {
            harness.submit(token, &source, 4096 * token, 65536, 65536);
        }
        let cancelled = harness.backend.cancel(&|token| token % 2 == round % 2);
        let mut refused = 0;
        for _ in 0..32 {
            match harness.wait().result {
                Ok(transfer) => assert_eq!(transfer.bytes(), 65536),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
                    refused += 1;
                }
            }
        }
        assert!(
            refused >= cancelled,
            "`cancel` must not return more than the number of cancelled requests"
        );
        assert_eq!(harness.pool.stats().in_use_bytes, 0, "every buffer must return to the pool");
    }
    for token in 0..32 {
        harness.submit(token, &source, 0, 65536, 65536);
    }
    let Harness { pool, backend, done } = harness;
    drop(backend);
    assert_eq!(done.try_iter().count(), 32, "dropping a backend must complete all requests");
    assert_eq!(pool.stats().in_use_bytes, 0, "dropping a backend must return all buffers");
}

fn reports_errors_of_the_system(provider: &Arc<dyn BackendProvider>, fixture: &dyn Fixture) {
    let faults = Faults::new(|_| Some(Fault::Errno(EIO)));
    let harness = Harness::new(&FaultyProvider::new(Arc::clone(provider), faults));
    let (_, source) = source(fixture, "unreadable", 65_536);
    let done = harness.read(&source, 8192, 4096, 4096);
    let error = done.result.expect_err("the device returns EIO");
    assert!(matches!(error, Error::Read { offset: 8192, .. }), "{error}");
    assert!(error.to_string().contains("unreadable"), "the error must name the file: {error}");
    assert_eq!(done.buffers.len(), 1, "a failed read must return the buffer");
}

fn times_out_reads_that_hang(provider: &Arc<dyn BackendProvider>, fixture: &dyn Fixture) {
    let (_, source) = source(fixture, "stuck", 65_536);
    // The first four attempts hang.
    let faults = Faults::new(|attempt| (attempt.number < 4).then_some(Fault::Stuck));
    let faulty = FaultyProvider::new(Arc::clone(provider), faults.clone());
    // The timeout is long enough for the last read even if other tests keep the device busy.
    let harness = Harness::with_timeout(&faulty, Duration::from_millis(500));
    (0..4).for_each(|token| harness.submit(token, &source, 0, 4096, 4096));
    for _ in 0..4 {
        let error = harness.wait().result.expect_err("the read hangs");
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert!(error.to_string().contains("stuck"), "the error must name the file: {error}");
    }
    let done = harness.read(&source, 4096, 4096, 4096);
    done.result.expect("other reads must not wait for those that hang");
    drop(done.buffers);
    let Harness { pool, backend, done } = harness;
    let began = Instant::now();
    drop(backend);
    assert!(began.elapsed() < PATIENCE, "dropping the backend must not wait for reads that hang");
    faults.release();
    while pool.stats().in_use_bytes > 0 {
        assert!(
            began.elapsed() < PATIENCE,
            "buffers must return to the pool when the system no longer uses them"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(done.try_iter().count(), 0, "a read that timed out must not complete again");
}
