// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of sessions over links that are lost, and of the ends of sessions.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Mutex;
use std::time::Instant;

use super::*;

/// A proxy that cuts connections between a client and a server.
pub(super) struct FaultyProxy {
    pub(super) address: Address,
    cuts: Arc<AtomicUsize>,
    /// The number of bytes that were received from clients.
    uploaded: Arc<AtomicUsize>,
}

impl FaultyProxy {
    /// Starts a proxy that cuts its first connections, each after the number of bytes in `limits`.
    /// It does not cut later connections.
    pub(super) fn start(server: &Address, limits: Vec<usize>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string().parse().unwrap();
        let (server, cuts) = (server.to_string(), Arc::new(AtomicUsize::new(0)));
        let (counter, uploaded) = (cuts.clone(), Arc::new(AtomicUsize::new(0)));
        let from_clients = uploaded.clone();
        thread::spawn(move || {
            let mut limits = limits.into_iter();
            while let Ok((client, _)) = listener.accept() {
                let Ok(server) = TcpStream::connect(&server) else { return };
                let left = Arc::new(Mutex::new(limits.next()));
                let (client_again, server_again) =
                    (client.try_clone().unwrap(), server.try_clone().unwrap());
                for (mut from, mut to, bytes_from) in [
                    (client_again, server_again, from_clients.clone()),
                    (server, client, Arc::default()),
                ] {
                    let (left, cuts) = (left.clone(), counter.clone());
                    thread::spawn(move || {
                        let mut bytes = vec![0; 4096];
                        while let Ok(len @ 1..) = from.read(&mut bytes) {
                            bytes_from.fetch_add(len, Ordering::Relaxed);
                            let mut left = left.lock().unwrap();
                            let len = len.min(left.unwrap_or(usize::MAX));
                            let sent = to.write_all(&bytes[..len]);
                            if let Some(left) = &mut *left {
                                *left -= len;
                                if *left == 0 {
                                    cuts.fetch_add(1, Ordering::Relaxed);
                                    break;
                                }
                            }
                            if sent.is_err() {
                                break;
                            }
                        }
                        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                    });
                }
            }
        });
        Self { address, cuts, uploaded }
    }
}

fn wait_for_the_end_of_sessions(server: &TestServer) {
    let ended = (0..500).any(|_| {
        thread::sleep(Duration::from_millis(10));
        server.sessions.count() == 0
    });
    assert!(ended, "{} sessions are left", server.sessions.count());
}

#[test]
fn requests_run_once_over_links_that_are_lost() {
    let server = TestServer::start();
    for seed in 1..12usize {
        let limits = (0..6).map(|at| 500 + (seed * 7919 + at * 104_729) % 40_000).collect();
        let proxy = FaultyProxy::start(&server.address, limits);
        let client = client_of(&proxy.address);
        let sum = tensor(1, &[2000]);
        let one = tensor(2, &[2000]);
        create(&client, &sum, 0.0);
        create(&client, &one, 1.0);
        for step in 1..=120u64 {
            // The sum counts how often these requests have run.
            let next = tensor(step + 2, &[2000]);
            call(&client, "aten::add.Tensor", &[&sum, &one], vec![], new(&next));
            call(&client, "aten::copy_", &[&sum, &next], vec![], Output::Known);
            client.free(next.storage);
            if step % 10 == 0 {
                assert_eq!(read(&client, &sum).unwrap(), [step as f32; 2000], "seed {seed}");
            }
            if step % 40 == 0 {
                client.write(2, 0, repeated(1.0, 2000).into()).unwrap();
                client.write(1, 0, repeated(step as f32, 2000).into()).unwrap();
            }
        }
        let cuts = proxy.cuts.load(Ordering::Relaxed);
        assert!(
            cuts > 2 && client.stats().reconnects >= 2,
            "seed {seed}: {cuts} cuts, {:?}",
            client.stats()
        );
        client.close().unwrap();
    }
    wait_for_the_end_of_sessions(&server);
}

#[test]
fn a_session_begins_once_over_links_that_are_lost_in_the_handshake() {
    let server = TestServer::start();
    for at in 1..400 {
        // The second link is cut at another byte.
        let proxy = FaultyProxy::start(&server.address, vec![at, 401 - at]);
        let client = client_of(&proxy.address);
        let one = tensor(1, &[3]);
        create(&client, &one, 1.0);
        assert_eq!(read(&client, &one).unwrap(), [1.0; 3], "cut after {at} bytes");
        client.close().unwrap();
    }
    wait_for_the_end_of_sessions(&server);
}

#[test]
fn a_server_that_closes_each_link_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string().parse().unwrap();
    thread::spawn(move || listener.incoming().for_each(drop));
    let options = options_for(&address).with_reconnect_timeout(Duration::from_millis(300));
    let since = Instant::now();
    let error = Client::connect(options, [5; 16]).map(drop).unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    assert!(since.elapsed() < Duration::from_secs(5));
}

#[test]
fn an_upload_goes_on_where_its_link_was_lost() {
    const PIECE: usize = 8 << 20;
    let server = TestServer::start();
    let size = 12 * PIECE;
    let proxy = FaultyProxy::start(&server.address, vec![5 * PIECE + 100, 5 * PIECE + 100]);
    let client = client_of(&proxy.address);
    let large = tensor(1, &[size as u64 / 4]);
    create(&client, &large, 0.0);
    client.write(1, 0, repeated(2.0, size / 4).into()).unwrap();
    assert_eq!(read(&client, &large).unwrap(), vec![2.0; size / 4]);
    assert_eq!(client.stats().reconnects, 2);
    // Each lost link repeats the piece that was on its way, and what the system had buffered.
    let uploaded = proxy.uploaded.load(Ordering::Relaxed);
    assert!(uploaded < size + 4 * PIECE, "{uploaded} bytes were sent for {size}");
    client.close().unwrap();
}

fn repeated(value: f32, count: usize) -> Vec<u8> {
    (0..count).flat_map(|_| value.to_le_bytes()).collect()
}

#[test]
fn an_interrupted_answer_is_sent_again() {
    const COUNT: u64 = 300_000;
    let server = TestServer::start();
    for seed in 0..8usize {
        let limits = vec![3_000 + seed * 150_000, 1_000_000 - seed * 90_000];
        let proxy = FaultyProxy::start(&server.address, limits);
        let client = client_of(&proxy.address);
        let large = tensor(1, &[COUNT]);
        create(&client, &large, 3.0);
        for _ in 0..3 {
            assert_eq!(read(&client, &large).unwrap(), vec![3.0; COUNT as usize], "seed {seed}");
        }
        assert_eq!(client.stats().reconnects, 2, "seed {seed}");
        client.close().unwrap();
    }
}

#[test]
fn waits_end_when_the_server_is_gone() {
    let server = TestServer::start();
    let options = options_for(&server.address).with_reconnect_timeout(Duration::from_millis(300));
    let client = Client::connect(options, [200; 16]).unwrap();
    create(&client, &tensor(1, &[2]), 1.0);
    sync(&client).unwrap();
    drop(server);
    assert!(matches!(sync(&client), Err(WaitError::Ended(_))));
    assert!(client.send(&Request::Free { storage: 1 }).is_err(), "the session has ended");
    client.free(1);
}

#[test]
fn a_server_without_the_session_ends_it() {
    let (first, second) = (TestServer::start(), TestServer::start());
    let proxy = FaultyProxy::start(&first.address, vec![3000]);
    let addresses = [proxy.address.clone(), second.address.clone()];
    let dials = AtomicUsize::new(0);
    let dial = move || {
        let address = &addresses[dials.fetch_add(1, Ordering::Relaxed).min(1)];
        Link::connect(address, connection_options())
    };
    let options = ClientOptions::new(dial).with_reconnect_timeout(TIMEOUT);
    let client = Client::<Vec<u8>>::connect(options, [94; 16]).unwrap();
    create(&client, &tensor(1, &[16]), 1.0);
    let ended = (0..100).try_for_each(|_| sync(&client)).unwrap_err();
    let WaitError::Ended(Error::Closed { reason }) = ended else { panic!("{ended:?}") };
    assert!(reason.contains("the session has ended"), "{reason}");
    assert!(client.has_ended());
}

#[test]
fn connect_returns_the_error_of_the_dial_function() {
    let options = ClientOptions::<Vec<u8>>::new(|| Err(Error::Misuse("no".into())));
    let error = Client::connect(options, [3; 16]).unwrap_err();
    assert!(matches!(error, Error::Misuse(_)), "{error}");
}

/// Accepts a connection. Does not complete the handshake of a session.
pub(super) fn accept(listener: &Listener) -> Result<Link<Vec<u8>>, Error> {
    let mut acceptor = Acceptor::<Vec<u8>>::new(connection_options());
    loop {
        if let Some(link) = acceptor.accept_within(listener, TIMEOUT, |_, _| {})? {
            return Ok(link);
        }
    }
}

#[test]
fn a_link_that_ends_before_the_handshake_does_not_end_the_session() {
    let server = TestServer::start();
    let proxy = FaultyProxy::start(&server.address, vec![2000]);
    // The second link leads to a listener that accepts the connection and ends it without CLOSE.
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap(), TIMEOUT).unwrap();
    let addresses = [&proxy.address, listener.address(), &server.address].map(Clone::clone);
    let accepted = thread::spawn(move || accept(&listener).map(drop));
    let dials = Arc::new(AtomicUsize::new(0));
    let count = dials.clone();
    let dial = move || {
        let address = &addresses[count.fetch_add(1, Ordering::Relaxed).min(2)];
        Link::connect(address, connection_options())
    };
    let options = ClientOptions::new(dial).with_reconnect_timeout(TIMEOUT);
    let client = Client::<Vec<u8>>::connect(options, [91; 16]).unwrap();
    let one = tensor(1, &[16]);
    create(&client, &one, 1.0);
    for _ in 0..100 {
        sync(&client).unwrap();
    }
    assert_eq!(read(&client, &one).unwrap(), [1.0; 16]);
    assert!(dials.load(Ordering::Relaxed) >= 3, "the second link has ended");
    accepted.join().unwrap().unwrap();
    client.close().unwrap();
}

#[test]
fn few_sessions_are_kept_without_a_link() {
    let server = TestServer::start();
    for number in 0..100u128 {
        let address = server.address.clone();
        let dialled = AtomicBool::new(false);
        let dial = move || {
            if dialled.swap(true, Ordering::Relaxed) {
                return Err(Error::Misuse("the client may connect once".into()));
            }
            // The connection is cut after the handshake.
            let proxy = FaultyProxy::start(&address, vec![1500]);
            Link::connect(&proxy.address, connection_options())
        };
        let options = ClientOptions::new(dial).with_reconnect_timeout(Duration::ZERO);
        let client = Client::<Vec<u8>>::connect(options, (number + 5000).to_le_bytes()).unwrap();
        while sync(&client).is_ok() {}
    }
    let end = Instant::now() + TIMEOUT;
    while server.sessions.count() > 64 && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    assert!((2..=64).contains(&server.sessions.count()), "{} sessions", server.sessions.count());
}

#[test]
fn refused_connections_are_not_retried_without_retry_refused() {
    let server = TestServer::start();
    let options = options_for(&server.address)
        .with_reconnect_timeout(Duration::from_secs(600))
        .with_retry_refused(false);
    let client = Client::connect(options, [93; 16]).unwrap();
    sync(&client).unwrap();
    drop(server);
    assert!(matches!(sync(&client), Err(WaitError::Ended(_))));
    assert!(client.has_ended());
}

#[test]
fn an_abandoned_session_ends_with_its_reason_while_it_reconnects() {
    let server = TestServer::start();
    let proxy = FaultyProxy::start(&server.address, vec![3000]);
    let (address, dials) = (proxy.address.clone(), AtomicUsize::new(0));
    let dial = move || match dials.fetch_add(1, Ordering::Relaxed) {
        0 => Link::connect(&address, connection_options()),
        _ => Err(Error::Io {
            peer: "nobody".into(),
            what: "connecting",
            source: std::io::Error::from(std::io::ErrorKind::ConnectionReset).into(),
        }),
    };
    let options = ClientOptions::new(dial).with_reconnect_timeout(Duration::from_secs(600));
    let client = Client::<Vec<u8>>::connect(options, [92; 16]).unwrap();
    sync(&client).unwrap();
    assert!(!client.is_reconnecting());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| (0..1000).try_for_each(|_| sync(&client)));
        let end = Instant::now() + TIMEOUT;
        while !client.is_reconnecting() && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
        client.abandon("its process was killed");
        let ended = waiting.join().unwrap().unwrap_err();
        let WaitError::Ended(Error::Closed { reason }) = ended else { panic!("{ended:?}") };
        assert_eq!(reason, "its process was killed");
    });
    assert!(client.has_ended() && !client.is_reconnecting());
    client.abandon("again");
    assert!(client.send(&Request::Free { storage: 1 }).is_err());
}

#[test]
fn a_session_that_sends_nothing_is_ended() {
    let idle = Duration::from_millis(1500);
    let sessions = SessionServer::new(Duration::from_secs(20)).with_idle_timeout(idle);
    let server = TestServer::with_sessions(sessions);
    let client = server.client();
    for _ in 0..4 {
        thread::sleep(idle / 3);
        sync(&client).unwrap();
    }
    let end = Instant::now() + TIMEOUT;
    while server.sessions.count() > 0 && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    let ended = (0..100).try_for_each(|_| sync(&client)).unwrap_err();
    let WaitError::Ended(Error::Closed { reason }) = ended else { panic!("{ended:?}") };
    assert!(reason.contains("sent nothing for 1.5 seconds"), "{reason}");
}
