// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sources that another process would read through a relay. Here it is another thread.

#![cfg(unix)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ts_io::{BackendOptions, ErrorKind, ReadRequest, Registry, Relay, RelayClient, Source};
use ts_io::{Error, completion_queue};
use ts_pool::{Budget, HostPool};

/// Starts threads that serve channels of a relay, and returns its client.
fn client_of(relay: &Arc<Relay>, channels: usize) -> Arc<RelayClient> {
    let channel = |_| {
        let (here, there) = UnixStream::pair().expect("a pair of sockets");
        let relay = Arc::clone(relay);
        thread::spawn(move || relay.serve(here));
        there
    };
    Arc::new(RelayClient::new((0..channels).map(channel).collect()))
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251) as u8).collect()
}

#[test]
fn a_backend_reads_through_a_relay() -> Result<(), Error> {
    let content = bytes((9 << 20) + 123);
    let relay = Arc::new(Relay::new(4));
    let number = relay.add(Source::in_memory("content", content.clone()))?;
    let client = client_of(&relay, 3);
    let source = client.source(number, "content", content.len() as u64);
    let (sink, queue) = completion_queue();
    let choice = Registry::builtin().choose(Some("remote"), std::slice::from_ref(&source))?;
    let backend = choice.provider.create(&BackendOptions::default(), sink)?;
    let pool = HostPool::new(&Budget::new(64 << 20), 64 << 20)?;
    let part = 1_000_003;
    for token in 0..9u64 {
        let offset = token * part as u64;
        let buffer = pool.allocate(part)?;
        let request = ReadRequest::new(token, Arc::clone(&source), offset, part, buffer);
        backend.submit(request).map_err(|rejected| rejected.error)?;
    }
    for _ in 0..9 {
        let done = queue.recv_timeout(Duration::from_secs(20)).expect("the read completes");
        assert_eq!(done.result?.bytes(), part);
        let at = done.token as usize * part;
        assert_eq!(done.buffers[0][..part], content[at..at + part]);
    }
    // A read that is longer than a request, and that ends behind the end of the source.
    let mut all = vec![0; content.len() + 10];
    assert_eq!(source.read_at(0, &mut all)?, content.len());
    assert_eq!(all[..content.len()], content);
    assert_eq!(source.read_at(content.len() as u64 + 5, &mut all)?, 0);
    assert_eq!(source.read_at(u64::MAX, &mut all)?, 0);
    Ok(())
}

#[test]
fn errors_of_the_source_are_those_of_the_relayed_one() -> Result<(), Box<dyn std::error::Error>> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("file");
    std::fs::write(&path, bytes(1000))?;
    let relay = Arc::new(Relay::new(4));
    let number = relay.add(Source::open(&path)?)?;
    let client = client_of(&relay, 1);
    let source = client.source(number, "somewhere", 1000);
    let mut buffer = [0; 10];
    source.read_at(990, &mut buffer)?;
    std::fs::write(&path, bytes(1001))?;
    let error = source.read_at(0, &mut buffer).expect_err("the file has changed");
    assert_eq!(error.kind(), ErrorKind::Changed);
    assert!(error.to_string().starts_with("somewhere: changed since it was opened"), "{error}");
    // The channel still works.
    let unknown = client.source(77, "unknown", 10);
    let error = unknown.read_at(0, &mut buffer).expect_err("there is no such source");
    assert!(error.to_string().contains("source 77 is not open"), "{error}");
    Ok(())
}

#[test]
fn a_source_that_is_dropped_makes_room() -> Result<(), Error> {
    let relay = Arc::new(Relay::new(1));
    let client = client_of(&relay, 1);
    for _ in 0..10 {
        let number = relay.add(Source::in_memory("a", bytes(10)))?;
        let error = relay.add(Source::in_memory("b", bytes(10))).expect_err("there is no room");
        assert_eq!(
            error.to_string(),
            "b: cannot open: 1 other sources are open; close some of them"
        );
        let source = client.source(number, "a", 10);
        drop(source);
        // The answer to another request shows that the relay has got the previous one.
        let mut byte = [0];
        client.source(0, "none", 1).read_at(0, &mut byte).expect_err("there is no source 0");
    }
    Ok(())
}

#[test]
fn a_relay_that_ends_is_an_error() {
    let (here, there) = UnixStream::pair().expect("a pair of sockets");
    let client = Arc::new(RelayClient::new(vec![there]));
    let source = client.source(1, "gone", 10);
    drop(here);
    for what in ["gone", "the process that reads for this one has ended"] {
        let began = Instant::now();
        let error = source.read_at(0, &mut [0; 10]).expect_err("nothing answers");
        assert!(error.to_string().contains(what), "{error}");
        assert!(began.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn invalid_answers_are_errors() {
    // A code, and a length: more than was requested, a long message, and an unknown code.
    for (code, len) in [(0u32, 11u32), (5, 1 << 30), (99, 3)] {
        let (mut here, there) = UnixStream::pair().expect("a pair of sockets");
        let client = Arc::new(RelayClient::new(vec![there]));
        let answering = thread::spawn(move || {
            let mut request = [0; 24];
            here.read_exact(&mut request).expect("a request");
            here.write_all(&code.to_le_bytes()).expect("the client receives");
            here.write_all(&len.to_le_bytes()).expect("the client receives");
            here.write_all(b"abcdefghijklmn").expect("the client receives");
            here
        });
        let source = client.source(1, "odd", 100);
        let error = source.read_at(0, &mut [0; 10]).expect_err("the answer is invalid");
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        drop(answering.join());
    }
}

#[test]
fn an_invalid_request_ends_only_its_channel() -> Result<(), Box<dyn std::error::Error>> {
    let relay = Arc::new(Relay::new(4));
    let number = relay.add(Source::in_memory("a", bytes(10)))?;
    let (here, mut there) = UnixStream::pair()?;
    let serving = thread::spawn({
        let relay = Arc::clone(&relay);
        move || relay.serve(here)
    });
    there.write_all(&[0xff; 24])?;
    let error = serving.join().expect("the thread does not panic").expect_err("too long");
    assert!(error.to_string().contains("invalid request"), "{error}");
    let mut buffer = [0; 10];
    client_of(&relay, 1).source(number, "a", 10).read_at(0, &mut buffer)?;
    assert_eq!(buffer.to_vec(), bytes(10));
    Ok(())
}

#[test]
fn a_read_that_finds_all_channels_busy_times_out() -> Result<(), Box<dyn std::error::Error>> {
    let (here, there) = UnixStream::pair()?;
    let client = Arc::new(RelayClient::new(vec![there]));
    let source = client.source(1, "slow", 10);
    let (sink, queue) = completion_queue();
    let choice = Registry::builtin().choose(Some("remote"), std::slice::from_ref(&source))?;
    let options = BackendOptions::default().with_timeout(Duration::from_millis(300));
    let backend = choice.provider.create(&options, sink)?;
    let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20)?;
    for token in 0..2 {
        let buffer = pool.allocate(10)?;
        let request = ReadRequest::new(token, Arc::clone(&source), 0, 10, buffer);
        backend.submit(request).map_err(|rejected| rejected.error)?;
    }
    for _ in 0..2 {
        let done = queue.recv_timeout(Duration::from_secs(20)).expect("the read ends");
        let error = done.result.expect_err("nothing answers");
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    }
    drop(here);
    Ok(())
}
