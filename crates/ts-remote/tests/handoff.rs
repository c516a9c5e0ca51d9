// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of passing connections from the process that accepts them to the process that serves them.
//! Here, this process is both of them.
#![cfg(target_os = "linux")] // Unix sockets of type SOCK_SEQPACKET
#![allow(clippy::unwrap_used)] // in a test a panic is the report

mod common;
mod dispatch;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use ts_remote::{Address, ConnectionOptions, Dispatcher, Error, Link, Listener};

use common::{both_ways, options, port};
use dispatch::{channel, dispatch};

fn service(service: &str) -> ConnectionOptions {
    options().with_service(service).with_token("sesame".to_string())
}

#[test]
fn a_passed_connection_works_like_an_accepted_one() {
    let directory = tempfile::tempdir().unwrap();
    for at in ["127.0.0.1:0".parse().unwrap(), Address::Unix(directory.path().join("socket"))] {
        let listener = Listener::bind(&at, options().idle_timeout).unwrap();
        both_ways(listener, Ok, |listener| dispatch(Dispatcher::new(options()), listener));
    }
}

/// A dispatcher that refuses every client. It records its log and the requested services.
struct Full {
    address: Address,
    stop: Arc<AtomicBool>,
    failed: Arc<Mutex<Vec<String>>>,
    services: Arc<Mutex<Vec<String>>>,
    running: Option<thread::JoinHandle<()>>,
}

impl Full {
    fn start(options: ConnectionOptions) -> Self {
        let listener =
            Listener::bind(&"127.0.0.1:0".parse().unwrap(), options.idle_timeout).unwrap();
        let (stop, failed, services) =
            (Arc::<AtomicBool>::default(), Arc::default(), Arc::default());
        let mut this = Self {
            address: listener.address().clone(),
            stop: Arc::clone(&stop),
            failed: Arc::clone(&failed),
            services: Arc::clone(&services),
            running: None,
        };
        let run = move || {
            let mut dispatcher = Dispatcher::new(options);
            while !stop.load(Ordering::Relaxed) {
                let log = |_: &str, error: &Error| failed.lock().unwrap().push(error.to_string());
                let handoff =
                    dispatcher.accept_within(&listener, Duration::from_millis(20), log).unwrap();
                if let Some(handoff) = handoff {
                    services.lock().unwrap().push(handoff.service().to_string());
                    handoff.refuse("no capacity");
                }
            }
        };
        this.running = Some(thread::spawn(run));
        this
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        TcpStream::connect(("127.0.0.1", port(&self.address)))
    }

    /// Sends bytes on a new connection. Returns the answer.
    fn send(&self, bytes: &[u8]) -> Vec<u8> {
        let mut socket = self.connect().unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        socket.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        answer
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(running) = self.running.take() {
            running.join().unwrap();
        }
    }
}

/// Returns the error of a client that is refused.
fn refusal(address: &Address, options: ConnectionOptions) -> String {
    let link = Link::<Vec<u8>>::connect(address, options);
    let mut link = match link {
        Ok(link) => link,
        Err(error) => return error.to_string(),
    };
    loop {
        if let Err(error) = link.next_event() {
            return error.to_string();
        }
    }
}

#[test]
fn refused_clients_get_the_reason() {
    let full = Full::start(service("exec"));
    let connect = |options| refusal(&full.address, options);
    let error = connect(service("exec/x").with_token("guess".to_string()));
    assert!(error.contains("wrong token"), "{error}");
    for name in ["", "execute", "ranges"] {
        let error = connect(service(name));
        assert!(error.contains("this server offers \"exec\""), "{error}");
    }
    for name in ["exec", "exec/x"] {
        assert!(connect(service(name)).contains("no capacity"));
    }
    assert_eq!(*full.services.lock().unwrap(), ["exec", "exec/x"]);
}

#[test]
fn clients_without_a_complete_hello_do_not_delay_others() {
    let full = Full::start(service("exec").with_idle_timeout(Duration::from_secs(1)));
    let mut silent: Vec<_> = (0..300).filter_map(|_| full.connect().ok()).collect();
    for (number, socket) in silent.iter_mut().enumerate() {
        let _ = socket.write_all(&b"TSWIRE1\n"[..number % 9]);
    }
    let since = Instant::now();
    let error = refusal(&full.address, service("exec/x"));
    assert!(error.contains("no capacity"), "{error}");
    assert!(since.elapsed() < Duration::from_secs(10));
    // All silent clients are disconnected after the timeout, or earlier.
    while full.failed.lock().unwrap().len() < silent.len()
        && since.elapsed() < Duration::from_secs(30)
    {
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(full.failed.lock().unwrap().len(), silent.len());
}

#[test]
fn a_hello_may_arrive_byte_by_byte() {
    let full = Full::start(service("exec"));
    let bytes = hello("exec/slow", Some("sesame"));
    let mut socket = full.connect().unwrap();
    for byte in bytes {
        socket.write_all(&[byte]).unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    assert_eq!(*full.services.lock().unwrap(), ["exec/slow"]);
}

/// Encodes the preface and HELLO as PROTOCOL.md specifies.
fn hello(service: &str, token: Option<&str>) -> Vec<u8> {
    let field =
        |tag: u8, bytes: &[u8]| [&[tag][..], &(bytes.len() as u32).to_le_bytes(), bytes].concat();
    let mut body = Vec::new();
    for (tag, value) in [(0x81, 1u64), (0x82, 1 << 20), (0x83, 4)] {
        body.extend(field(tag, &value.to_le_bytes()));
    }
    token.into_iter().for_each(|token| body.extend(field(4, token.as_bytes())));
    body.extend(field(6, service.as_bytes()));
    let mut head = [0; 24];
    head[0] = 1;
    head[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
    [b"TSWIRE1\n", &head[..], &body].concat()
}

#[test]
fn invalid_first_bytes_do_not_stop_a_dispatcher() {
    let full = Full::start(service("exec").with_idle_timeout(Duration::from_millis(50)));
    let good = hello("exec/x", Some("sesame"));
    let config = ProptestConfig { cases: 60, ..ProptestConfig::default() };
    proptest!(config, |(at in 0..good.len(), byte: u8, cut in 0..good.len())| {
        let mut bad = good.clone();
        bad[at] = byte;
        full.send(&bad);
        full.send(&good[..cut]);
    });
    let error = refusal(&full.address, service("exec/x"));
    assert!(error.contains("no capacity"), "{error}");
}

#[test]
fn the_end_of_the_accepting_process_is_reported() {
    let (channel, receiver) = channel();
    drop(channel);
    assert!(matches!(receiver.accept(), Err(Error::Closed { .. })));
}
