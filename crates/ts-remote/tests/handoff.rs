// SPDX-License-Identifier: MIT OR Apache-2.0
//! Passing connections from the process that accepts them to the process that serves them. Here
//! both are threads that share only a socket.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

mod dispatched;
mod together;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use ts_remote::{Address, ConnectionOptions, Dispatcher, Error, Link, Listener};

use dispatched::{channel, dispatch};
use together::{both_ways, options};

fn wants(service: &str) -> ConnectionOptions {
    ConnectionOptions { service: service.into(), token: Some("sesame".into()), ..options() }
}

#[test]
fn a_passed_connection_works_like_an_accepted_one() {
    let directory = tempfile::tempdir().unwrap();
    for at in ["127.0.0.1:0".parse().unwrap(), Address::Unix(directory.path().join("socket"))] {
        let listener = Listener::bind(&at, options().idle_timeout).unwrap();
        both_ways(listener, Ok, |listener| dispatch(Dispatcher::new(options()), listener));
    }
}

/// A dispatcher that refuses every client, and what it has seen of them.
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

    fn send(&self, bytes: &[u8]) -> Vec<u8> {
        let Address::Tcp(address) = &self.address else { unreachable!() };
        let mut socket = TcpStream::connect(address).unwrap();
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

/// The reason that a client gets for not being served.
fn refusal(address: &Address, options: ConnectionOptions) -> String {
    let link = Link::<Vec<u8>>::connect(address, options);
    let ended = link.and_then(|mut link| {
        loop {
            link.next_event()?;
        }
    });
    let Err(error): Result<(), Error> = ended else { unreachable!("only an error ends that") };
    error.to_string()
}

#[test]
fn refused_clients_get_the_reason() {
    let full = Full::start(wants("exec"));
    let connect = |options| refusal(&full.address, options);
    let stranger = connect(ConnectionOptions { token: Some("guess".into()), ..wants("exec/x") });
    assert!(stranger.contains("does not know the token"), "{stranger}");
    for service in ["", "execute", "ranges"] {
        let error = connect(wants(service));
        assert!(error.contains("this server offers \"exec\""), "{error}");
    }
    for service in ["exec", "exec/x"] {
        assert!(connect(wants(service)).contains("no capacity"));
    }
    assert_eq!(*full.services.lock().unwrap(), ["exec", "exec/x"]);
}

#[test]
fn clients_without_a_complete_hello_do_not_delay_others() {
    let full =
        Full::start(ConnectionOptions { idle_timeout: Duration::from_secs(1), ..wants("exec") });
    let Address::Tcp(address) = &full.address else { unreachable!() };
    let mut silent: Vec<_> = (0..300).filter_map(|_| TcpStream::connect(address).ok()).collect();
    for (number, socket) in silent.iter_mut().enumerate() {
        let _ = socket.write_all(&b"TSWIRE1\n"[..number % 9]);
    }
    let since = Instant::now();
    let error = refusal(&full.address, wants("exec/x"));
    assert!(error.contains("no capacity"), "{error}");
    assert!(since.elapsed() < Duration::from_secs(10));
    // All of them are disconnected, at the latest by the timeout.
    while full.failed.lock().unwrap().len() < silent.len()
        && since.elapsed() < Duration::from_secs(30)
    {
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(full.failed.lock().unwrap().len(), silent.len());
}

#[test]
fn a_hello_may_arrive_byte_by_byte() {
    let full = Full::start(wants("exec"));
    let bytes = hello("exec/slow", Some("sesame"));
    let Address::Tcp(address) = &full.address else { unreachable!() };
    let mut socket = TcpStream::connect(address).unwrap();
    for byte in bytes {
        socket.write_all(&[byte]).unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    assert_eq!(*full.services.lock().unwrap(), ["exec/slow"]);
}

/// The preface and the HELLO of PROTOCOL.md.
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
fn no_first_bytes_stop_a_dispatcher() {
    let full =
        Full::start(ConnectionOptions { idle_timeout: Duration::from_millis(50), ..wants("exec") });
    let good = hello("exec/x", Some("sesame"));
    let config = ProptestConfig { cases: 60, ..ProptestConfig::default() };
    proptest!(config, |(at in 0..good.len(), byte: u8, cut in 0..good.len())| {
        let mut bad = good.clone();
        bad[at] = byte;
        full.send(&bad);
        full.send(&good[..cut]);
    });
    let error = refusal(&full.address, wants("exec/x"));
    assert!(error.contains("no capacity"), "{error}");
}

#[test]
fn the_end_of_the_accepting_process_is_reported() {
    let (channel, receiver) = channel();
    drop(channel);
    assert!(matches!(receiver.accept(), Err(Error::Closed { .. })));
}
