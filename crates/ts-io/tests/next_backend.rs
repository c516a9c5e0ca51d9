// SPDX-License-Identifier: MIT OR Apache-2.0
//! What one backend of `adaptive` cannot read, the next one does, also when the kernel rejects all
//! calls of io_uring.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use tempfile::NamedTempFile;
use ts_io::fault::{Fault, Faults, FaultyProvider};
use ts_io::{
    Backend, BackendOptions, BackendProvider, Completion, Error, ReadPath, ReadRequest, Registry,
    Source, completion_queue,
};
use ts_pool::{Budget, HostPool};

const FILE_BYTES: usize = 1 << 20;
const PART_BYTES: usize = 64 << 10;
const EIO: i32 = 5;
const EINVAL: i32 = 22;

/// A file of which no byte is in the page cache, and its source. None if the directory for
/// temporary files does not support direct I/O through io_uring.
fn cold_file() -> Option<(NamedTempFile, Arc<Source>)> {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), content(0, FILE_BYTES)).unwrap();
    file.as_file().sync_all().unwrap();
    let source = Source::open(file.path()).unwrap();
    source.evict().unwrap();
    if Registry::builtin().choose(Some("uring"), std::slice::from_ref(&source)).is_err() {
        println!("skipped: no direct I/O through io_uring in {}", std::env::temp_dir().display());
        return None;
    }
    Some((file, source))
}

fn content(offset: usize, len: usize) -> Vec<u8> {
    (offset..offset + len).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 7) as u8).collect()
}

fn provider(name: &str, source: &Arc<Source>, faults: Faults) -> FaultyProvider {
    let choice = Registry::builtin().choose(Some(name), std::slice::from_ref(source)).unwrap();
    FaultyProvider::new(choice.provider, faults)
}

/// Reads the whole file in parts, and returns the completions by offset.
fn read_parts(provider: &FaultyProvider, source: &Arc<Source>) -> Vec<Completion> {
    let (sink, queue) = completion_queue();
    let backend: Box<dyn Backend> = provider.create(&BackendOptions::default(), sink).unwrap();
    let pool = HostPool::new(&Budget::new(2 * FILE_BYTES), 2 * FILE_BYTES).unwrap();
    for offset in (0..FILE_BYTES).step_by(PART_BYTES) {
        let buffer = pool.allocate(PART_BYTES).unwrap();
        let at = offset as u64;
        let request = ReadRequest::new(at, Arc::clone(source), at, PART_BYTES, buffer);
        backend.submit(request).map_err(|rejected| rejected.error).unwrap();
    }
    let complete = |_| queue.recv_timeout(Duration::from_secs(20)).expect("each read completes");
    let mut completions: Vec<_> = (0..FILE_BYTES / PART_BYTES).map(complete).collect();
    completions.sort_by_key(|completion| completion.token);
    completions
}

fn assert_read(completions: &[Completion]) {
    for completion in completions {
        let bytes = completion.result.as_ref().unwrap().bytes();
        assert_eq!(bytes, PART_BYTES);
        assert!(completion.buffers[0][..] == content(completion.token as usize, PART_BYTES));
    }
}

/// From now on, the kernel rejects the calls of this thread that use an io_uring.
fn reject_io_uring(errno: i32) {
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let calls = BTreeMap::from([(libc::SYS_io_uring_enter, vec![])]);
    let (rejected, others) = (SeccompAction::Errno(errno as u32), SeccompAction::Allow);
    let filter = SeccompFilter::new(calls, others, rejected, arch).unwrap();
    seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
}

#[test]
fn an_error_of_one_backend_is_tried_once_with_the_next() {
    let Some((_file, source)) = cold_file() else { return };
    let attempts = Arc::new(AtomicU64::new(0));
    let fail = |errno: i32, times: u64| {
        let attempts = Arc::clone(&attempts);
        attempts.store(0, Ordering::Relaxed);
        let faults = Faults::new(move |_| {
            let number = attempts.fetch_add(1, Ordering::Relaxed);
            (number < times).then_some(Fault::Errno(errno))
        });
        let provider = provider("adaptive", &source, faults);
        let (sink, queue) = completion_queue();
        let backend = provider.create(&BackendOptions::default(), sink).unwrap();
        let pool = HostPool::new(&Budget::new(FILE_BYTES), FILE_BYTES).unwrap();
        let buffer = pool.allocate(PART_BYTES).unwrap();
        let request = ReadRequest::new(0, Arc::clone(&source), 0, PART_BYTES, buffer);
        backend.submit(request).map_err(|rejected| rejected.error).unwrap();
        queue.recv_timeout(Duration::from_secs(20)).expect("the read completes")
    };

    let second = fail(EINVAL, 1);
    assert_read(std::slice::from_ref(&second));
    assert_eq!(second.result.unwrap().paths, [(ReadPath::Direct, PART_BYTES)]);

    let both = fail(EINVAL, u64::MAX);
    assert_eq!(attempts.load(Ordering::Relaxed), 2);
    assert_eq!(both.buffers[0].len(), PART_BYTES);
    let message = both.result.unwrap_err().to_string();
    assert!(message.contains("Invalid argument (os error 22) (backend \"direct\"; before that"));
    assert!(message.contains("the backend \"uring\" failed: Invalid argument (os error 22))"));

    let of_the_device = fail(EIO, u64::MAX).result.unwrap_err();
    assert_eq!(attempts.load(Ordering::Relaxed), 1);
    assert!(!of_the_device.to_string().contains("before that"), "{of_the_device}");
}

#[test]
fn calls_that_keep_failing_end_in_the_next_backend() {
    let Some((_file, source)) = cold_file() else { return };
    for errno in [libc::EPERM, libc::EAGAIN, libc::EINTR, libc::ENOSYS] {
        for first_rejected in [0, 5] {
            source.evict().unwrap();
            // The thread that makes the attempts in a ring is the one that calls the kernel.
            let (number, done) = (AtomicU64::new(0), AtomicBool::new(false));
            let faults = Faults::new(move |_| {
                if number.fetch_add(1, Ordering::Relaxed) >= first_rejected
                    && std::thread::current().name() == Some("ts-io-ring")
                    && !done.swap(true, Ordering::Relaxed)
                {
                    reject_io_uring(errno);
                }
                None
            });
            assert_read(&read_parts(&provider("adaptive", &source, faults), &source));
        }
    }
}

#[test]
fn a_ring_that_is_named_reports_that_its_calls_keep_failing() {
    let Some((_file, source)) = cold_file() else { return };
    let done = AtomicBool::new(false);
    let faults = Faults::new(move |_| {
        if !done.swap(true, Ordering::Relaxed) {
            reject_io_uring(libc::EPERM);
        }
        None
    });
    for completion in read_parts(&provider("uring", &source, faults), &source) {
        let error = completion.result.unwrap_err();
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        assert!(error.to_string().contains("calls of io_uring keep failing"), "{error}");
        assert_eq!(completion.buffers.len(), 1);
    }
}

#[test]
fn a_sandbox_that_rejects_calls_from_the_start_makes_rings_unavailable() {
    let Some((_file, source)) = cold_file() else { return };
    let sources = std::slice::from_ref(&source);
    std::thread::scope(|scope| {
        let sandboxed = scope.spawn(|| {
            reject_io_uring(libc::EPERM);
            let uring = Registry::builtin().choose(Some("uring"), sources);
            assert!(matches!(uring.err(), Some(Error::Unavailable { .. })));
            assert_read(&read_parts(&provider("adaptive", &source, Faults::default()), &source));
        });
        sandboxed.join().unwrap();
    });
}
