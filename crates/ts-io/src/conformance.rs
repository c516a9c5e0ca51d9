// SPDX-License-Identifier: MIT OR Apache-2.0
//! What every backend must do, as suites that a backend's author runs: [`check`], and
//! [`check_with_faults`] for those whose system calls [`Faults`] can bend.

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

/// Where the suite keeps what it reads. Methods panic when they cannot do what they shall.
pub trait Place {
    /// Makes something with this content; returns where [`Source::open`] finds it.
    fn write(&self, name: &str, content: &[u8]) -> String;

    /// Changes the content of what is called `name`, in place if that can be.
    fn overwrite(&self, name: &str, content: &[u8]);

    /// Puts something else in the place of what is called `name`.
    fn replace(&self, name: &str, content: &[u8]);

    /// Removes what is called `name`.
    fn remove(&self, name: &str);
}

/// A directory, on a file system that the backend can read.
#[derive(Debug, Clone)]
pub struct Directory(pub PathBuf);

impl Place for Directory {
    fn write(&self, name: &str, content: &[u8]) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).expect("the directory is writable");
        path.to_str().expect("the directory's name is UTF-8").into()
    }

    fn overwrite(&self, name: &str, content: &[u8]) {
        let mut file = OpenOptions::new().write(true).open(self.0.join(name)).expect("it is there");
        file.set_len(content.len() as u64)
            .and_then(|()| file.write_all(content))
            .expect("writable");
    }

    fn replace(&self, name: &str, content: &[u8]) {
        let new = self.0.join(format!("{name}.new"));
        fs::write(&new, content)
            .and_then(|()| fs::rename(new, self.0.join(name)))
            .expect("writable");
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.0.join(name)).expect("removable");
    }
}

/// Runs the suite.
///
/// # Panics
/// With the broken rule, when the backend breaks one. Blocks for as long as the reads take.
pub fn check(provider: &dyn BackendProvider, place: &dyn Place) {
    delivers_the_bytes_of_every_range(provider, place);
    delivers_ends_that_are_not_aligned(provider, place);
    fills_buffers_one_after_the_other(provider, place);
    refuses_memory_that_it_cannot_fill(provider, place);
    fills_up_to_the_end_of_the_file_and_no_further(provider, place);
    reports_a_file_that_ends_early(provider, place);
    reports_a_file_that_changed(provider, place);
    gives_every_buffer_back(provider, place);
}

/// Runs [`check`] on a backend that suffers what systems do now and then, and more that only
/// [`Faults`] can bring about: errors, and reads that never end.
///
/// # Panics
/// As [`check`].
pub fn check_with_faults(provider: &Arc<dyn BackendProvider>, place: &dyn Place) {
    let passing = Faults::new(|attempt| match attempt.number % 3 {
        0 => Some(Fault::Short(1 + attempt.len / 3)),
        1 => Some(Fault::Errno(EINTR)),
        _ => None,
    });
    check(&FaultyProvider::new(Arc::clone(provider), passing), place);
    reports_what_the_system_refuses(provider, place);
    ends_reads_that_are_stuck(provider, place);
}

const EINTR: i32 = 4;
const EIO: i32 = 5;

struct Bench {
    pool: HostPool,
    backend: Box<dyn Backend>,
    done: Receiver<Completion>,
}

impl Bench {
    fn new(provider: &dyn BackendProvider) -> Self {
        Self::with(provider, BackendOptions::default().timeout)
    }

    fn with(provider: &dyn BackendProvider, timeout: Duration) -> Self {
        let (sink, done) = completion_queue();
        let options = BackendOptions { in_flight: 3, timeout, ..BackendOptions::default() };
        let backend = provider.create(&options, sink).expect("it was available");
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

/// Content in which every place differs from its neighbours and from the same place on another
/// page.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 8).wrapping_mul(31) ^ (i >> 16)) as u8).collect()
}

fn source(place: &dyn Place, name: &str, len: usize) -> (Vec<u8>, Arc<Source>) {
    let content = pattern(len);
    let source = Source::open(place.write(name, &content)).expect("just written");
    (content, source)
}

fn delivers_the_bytes_of_every_range(provider: &dyn BackendProvider, place: &dyn Place) {
    let bench = Bench::new(provider);
    bench.backend.register(&bench.pool);
    let (content, source) = source(place, "ranges", 1 << 20);
    let ranges = [(0, 4096), (4096, 65536), (1 << 19, 1 << 19), (8192, 4096), (0, 1 << 20)];
    for (token, &(offset, len)) in ranges.iter().enumerate() {
        bench.submit(token as u64, &source, offset, len, len);
    }
    let mut seen = HashSet::new();
    for _ in ranges {
        let done = bench.wait();
        let (offset, len) = ranges[done.token as usize];
        let transfer = done.result.expect("the file is readable");
        assert_eq!(transfer.bytes(), len, "the whole range was delivered");
        assert!(transfer.started_ns <= transfer.finished_ns);
        assert!(transfer.paths.iter().all(|(path, _)| ReadPath::ALL.contains(path)));
        assert_eq!(
            transfer.paths.iter().map(|path| path.1).sum::<usize>(),
            len,
            "every byte took a path"
        );
        assert!(
            done.buffers[0][..] == content[offset as usize..][..len],
            "the bytes of {offset}+{len} are right"
        );
        assert!(seen.insert(done.token), "a request completes once");
    }
}

fn delivers_ends_that_are_not_aligned(provider: &dyn BackendProvider, place: &dyn Place) {
    let bench = Bench::new(provider);
    let (content, source) = source(place, "ends", 40_000);
    for (offset, len) in
        [(1001, 9000), (4095, 2), (512, 100), (8191, 12_290), (39_000, 1000), (0, 1)]
    {
        // Memory that lies as the file does.
        let mut before = bench.buffer(65_536);
        let mut buffer = before.split_off(offset % 4096);
        let behind = buffer.split_off(len);
        let request = ReadRequest::new(0, Arc::clone(&source), offset as u64, len, buffer);
        bench
            .backend
            .submit(request)
            .map_err(|r| r.error)
            .expect("what lies as the file does is taken");
        let done = bench.wait();
        assert_eq!(done.result.expect("readable").bytes(), len);
        assert!(
            done.buffers[0][..] == content[offset..][..len],
            "the bytes of {offset}+{len} are right"
        );
        let around = before.iter().chain(behind.iter());
        assert!(
            around.copied().all(|byte| byte == 0xEE),
            "nothing is written around {offset}+{len}"
        );
    }
}

fn fills_buffers_one_after_the_other(provider: &dyn BackendProvider, place: &dyn Place) {
    let bench = Bench::new(provider);
    let (content, source) = source(place, "scattered", 1 << 20);
    let buffers: Vec<Buffer> = [4096, 65_536, 0, 8192, 100].map(|len| bench.buffer(len)).into();
    let room: usize = buffers.iter().map(|buffer| buffer.len()).sum();
    let request = ReadRequest { token: 7, source, offset: 12_288, required: room, buffers };
    bench.backend.submit(request).map_err(|r| r.error).expect("whole blocks are taken");
    let done = bench.wait();
    assert_eq!(done.result.expect("readable").bytes(), room);
    let bytes: Vec<u8> = done.buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect();
    assert!(bytes == content[12_288..][..room], "the bytes are right, in the order of the buffers");
}

fn refuses_memory_that_it_cannot_fill(provider: &dyn BackendProvider, place: &dyn Place) {
    let bench = Bench::new(provider);
    let (content, source) = source(place, "misplaced", 40_000);
    let request = ReadRequest::new(0, source, 1000, 8192, bench.buffer(8192));
    match bench.backend.submit(request) {
        Ok(()) => {
            assert!(
                !bench.backend.capabilities().needs_alignment,
                "it says that it needs alignment"
            );
            let done = bench.wait();
            assert_eq!(done.result.expect("readable").bytes(), 8192);
            assert!(done.buffers[0][..] == content[1000..][..8192]);
        }
        Err(rejected) => {
            assert!(bench.backend.capabilities().needs_alignment, "it says that it needs none");
            assert!(
                matches!(rejected.error, Error::Misaligned { offset: 1000, .. }),
                "{}",
                rejected.error
            );
            assert_eq!(rejected.request.buffers.len(), 1, "the buffer comes back");
        }
    }
    assert_eq!(bench.pool.stats().in_use_bytes, 0);
}

fn fills_up_to_the_end_of_the_file_and_no_further(
    provider: &dyn BackendProvider,
    place: &dyn Place,
) {
    let bench = Bench::new(provider);
    let (content, source) = source(place, "tail", 10_001);
    let done = bench.read(&source, 8192, 4096, 10_001 - 8192);
    assert_eq!(done.result.expect("all required bytes are there").bytes(), 10_001 - 8192);
    assert!(done.buffers[0][..10_001 - 8192] == content[8192..]);
}

fn reports_a_file_that_ends_early(provider: &dyn BackendProvider, place: &dyn Place) {
    let bench = Bench::new(provider);
    let (_, source) = source(place, "short", 10_000);
    let error = bench.read(&source, 8192, 4096, 4096).result.expect_err("bytes are missing");
    assert!(
        matches!(error, Error::ShortRead { offset: 8192, expected: 4096, actual: 1808, .. }),
        "{error}"
    );
    let error =
        bench.read(&source, 1 << 40, 4096, 1).result.expect_err("there is nothing so far behind");
    assert!(matches!(error, Error::ShortRead { actual: 0, .. }), "{error}");
}

fn reports_a_file_that_changed(provider: &dyn BackendProvider, place: &dyn Place) {
    type Change = (&'static str, fn(&dyn Place));
    let bench = Bench::new(provider);
    let changes: [Change; 4] = [
        ("truncated", |place| place.overwrite("truncated", &pattern(5000))),
        ("grown", |place| place.overwrite("grown", &pattern(20_000))),
        ("replaced", |place| place.replace("replaced", &[1; 16_384])),
        ("removed", |place| place.remove("removed")),
    ];
    for (name, change) in changes {
        let (_, source) = source(place, name, 16_384);
        assert!(
            bench.read(&source, 0, 8192, 8192).result.is_ok(),
            "{name}: fine before the change"
        );
        change(place);
        let error = bench.read(&source, 0, 8192, 8192).result.expect_err(name);
        assert_eq!(error.kind(), ErrorKind::Changed, "{name}: {error}");
        assert!(error.to_string().contains(name), "the error names the file: {error}");
    }
}

fn gives_every_buffer_back(provider: &dyn BackendProvider, place: &dyn Place) {
    let bench = Bench::new(provider);
    let (_, source) = source(place, "cancelled", 1 << 20);
    for round in 0..20 {
        for token in 0..32 {
            bench.submit(token, &source, 4096 * token, 65536, 65536);
        }
        let cancelled = bench.backend.cancel(&|token| token % 2 == round % 2);
        let mut refused = 0;
        for _ in 0..32 {
            match bench.wait().result {
                Ok(transfer) => assert_eq!(transfer.bytes(), 65536),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
                    refused += 1;
                }
            }
        }
        assert!(
            refused >= cancelled,
            "cancel says how many it took back; some that had begun may join them"
        );
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

fn reports_what_the_system_refuses(provider: &Arc<dyn BackendProvider>, place: &dyn Place) {
    let broken = Faults::new(|_| Some(Fault::Errno(EIO)));
    let bench = Bench::new(&FaultyProvider::new(Arc::clone(provider), broken));
    let (_, source) = source(place, "unreadable", 65_536);
    let done = bench.read(&source, 8192, 4096, 4096);
    let error = done.result.expect_err("the device is broken");
    assert!(matches!(error, Error::Read { offset: 8192, .. }), "{error}");
    assert!(error.to_string().contains("unreadable"), "the error names the file: {error}");
    assert_eq!(done.buffers.len(), 1, "the buffer comes back");
}

fn ends_reads_that_are_stuck(provider: &Arc<dyn BackendProvider>, place: &dyn Place) {
    let (_, source) = source(place, "stuck", 65_536);
    // The first four attempts never end; what comes after them goes well.
    let faults = Faults::new(|attempt| (attempt.number < 4).then_some(Fault::Stuck));
    let faulty = FaultyProvider::new(Arc::clone(provider), faults.clone());
    let bench = Bench::with(&faulty, Duration::from_millis(100));
    (0..4).for_each(|token| bench.submit(token, &source, 0, 4096, 4096));
    for _ in 0..4 {
        let error = bench.wait().result.expect_err("it is stuck");
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert!(error.to_string().contains("stuck"), "the error names the file: {error}");
    }
    let done = bench.read(&source, 4096, 4096, 4096);
    assert!(done.result.is_ok(), "reads that are stuck do not stop the others");
    drop(done.buffers);
    let Bench { pool, backend, done } = bench;
    let began = Instant::now();
    drop(backend);
    assert!(began.elapsed() < PATIENCE, "nor does dropping the backend wait for them");
    faults.release();
    while pool.stats().in_use_bytes > 0 {
        assert!(
            began.elapsed() < PATIENCE,
            "their memory comes home when the system lets go of it"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(done.try_iter().count(), 0, "a read that was reported is not reported again");
}
