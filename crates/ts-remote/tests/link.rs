// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of links over sockets.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use ts_format::Dtype;
use ts_remote::{
    Acceptor, Address, ConnectionOptions, Error, ErrorKind, Event, Link, Listener, Role,
    SendOptions, TensorInfo,
};

#[cfg(unix)]
use common::payload;
use common::{both_ways, options, port};

fn any_port() -> Address {
    "127.0.0.1:0".parse().unwrap()
}

#[test]
fn both_ends_send_at_once_over_tcp() {
    both_ways(Listener::bind(&any_port(), options().idle_timeout).unwrap(), Ok, Listener::accept);
}

#[cfg(unix)]
#[test]
fn both_ends_send_at_once_over_a_unix_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let address: Address = format!("unix:{}", path.display()).parse().unwrap();
    both_ways(Listener::bind(&address, options().idle_timeout).unwrap(), Ok, Listener::accept);
    assert!(!path.exists(), "dropping the listener removes the file");
}

#[test]
fn incomplete_handshakes_do_not_delay_others() {
    let with_token = options().with_token("sesame".to_string());
    let listener = Listener::bind(&any_port(), with_token.idle_timeout).unwrap();
    let address = ("127.0.0.1", port(listener.address()));
    let mut acceptor = Acceptor::<Vec<u8>>::new(with_token.clone());
    let (mut silent, mut errors) = (Vec::new(), Vec::new());
    let mut log = |_: &str, error: &Error| errors.push(error.to_string());
    // Connects in two steps, because the system limits how many connections wait to be accepted.
    for _ in 0..2 {
        silent.extend((0..100).map(|_| TcpStream::connect(address).unwrap()));
        let none = acceptor.accept_within(&listener, Duration::from_millis(100), &mut log).unwrap();
        assert!(none.is_none());
    }
    let mut other_protocol = TcpStream::connect(address).unwrap();
    other_protocol.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let to = listener.address().clone();
    let client = thread::spawn(move || Link::<Vec<u8>>::connect(&to, with_token).unwrap());
    let link = acceptor.accept_within(&listener, Duration::from_secs(20), &mut log).unwrap();
    assert_eq!(link.unwrap().peer().split(':').next(), Some("127.0.0.1"));
    client.join().unwrap();
    let count = |what: &str| errors.iter().filter(|error| error.contains(what)).count();
    assert_eq!(count("invalid preface"), 1, "{errors:?}");
    // 200 connections are silent, and 128 may be pending. The other two connections displace one or
    // two more.
    assert!((72..=74).contains(&count("handshake dropped")), "{errors:?}");
    drop((silent, other_protocol));
}

/// Each of these tensors is shorter than the limit of bytes that are queued for the socket. So all
/// of them could be queued before the peer has mapped the shared memory.
#[cfg(unix)]
#[test]
fn tensors_of_one_mebibyte_go_through_shared_memory() {
    const LEN: usize = 1 << 20;
    let directory = tempfile::tempdir().unwrap();
    let address: Address =
        format!("unix:{}", directory.path().join("socket").display()).parse().unwrap();
    let listener = Listener::bind(&address, options().idle_timeout).unwrap();
    let sender = thread::spawn(move || {
        let mut link = Link::<Vec<u8>>::connect(&address, options()).unwrap();
        let stream = link.connection().open_stream().unwrap();
        for seed in 0..32 {
            let info = TensorInfo::new("w", Dtype::U8, [LEN as u64]).unwrap();
            link.send(stream, info, payload(LEN, seed).into(), SendOptions::default()).unwrap();
        }
        let sent = link.stats().sent_bytes;
        link.close("done").unwrap();
        sent
    });
    let mut link =
        Link::<Vec<u8>>::new(listener.accept().unwrap(), Role::Acceptor, options()).unwrap();
    let mut seed = 0;
    let ended = loop {
        match link.next_event() {
            Ok(Event::Metadata { stream, .. }) => {
                link.connection().accept(stream, vec![0; LEN]).unwrap();
            }
            Ok(Event::End { sink, .. }) => {
                assert!(sink.unwrap() == payload(LEN, seed), "tensor {seed}");
                seed += 1;
            }
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(&ended, Error::Closed { reason } if reason == "done"), "{ended}");
    assert_eq!(seed, 32);
    let sent = sender.join().unwrap();
    assert!(sent < 8 * LEN as u64, "{sent} bytes went through the socket");
}

#[test]
fn a_silent_peer_times_out_and_a_slow_one_does_not() {
    let short = ConnectionOptions::default().with_idle_timeout(Duration::from_millis(400));
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(silent.local_addr().unwrap().to_string());
    let begin = Instant::now();
    let timed_out = Link::<Vec<u8>>::connect(&address, short.clone()).unwrap_err();
    assert_eq!(timed_out.kind(), ErrorKind::TimedOut, "{timed_out}");
    assert!(begin.elapsed() < Duration::from_secs(5));

    let listener = Listener::bind(&any_port(), short.idle_timeout).unwrap();
    let address = listener.address().clone();
    let peer_options = short.clone();
    let peer = thread::spawn(move || {
        let socket = listener.accept().unwrap();
        let mut link = Link::<Vec<u8>>::new(socket, Role::Acceptor, peer_options).unwrap();
        // This peer only answers PINGs, for longer than the timeout.
        let end = Instant::now() + Duration::from_millis(1200);
        while Instant::now() < end {
            let _ = link.poll_event().unwrap();
            thread::sleep(Duration::from_millis(10));
        }
        let stream = link.connection().open_stream().unwrap();
        link.send_message(stream, b"late"[..].into()).unwrap();
        link
    });
    let mut link = Link::<Vec<u8>>::connect(&address, short).unwrap();
    assert!(matches!(link.next_event().unwrap(), Event::Connected { .. }));
    // A long pause between waits of this end does not count as silence of the peer.
    thread::sleep(Duration::from_millis(600));
    let event = link.next_event().unwrap();
    assert!(matches!(event, Event::Message { bytes, .. } if bytes == b"late"[..]));
    peer.join().unwrap();
}

#[test]
fn errors_explain_a_wrong_address() {
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let refused = Link::<Vec<u8>>::connect(&Address::Tcp(unused.clone()), options()).unwrap_err();
    assert!(
        matches!(&refused, Error::Io { peer, what: "connecting", .. } if *peer == unused),
        "{refused}"
    );

    let other_protocol = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(other_protocol.local_addr().unwrap().to_string());
    let server = thread::spawn(move || {
        let (mut socket, _) = other_protocol.accept().unwrap();
        socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        let mut rest = Vec::new();
        socket.read_to_end(&mut rest).unwrap();
    });
    let error = Link::<Vec<u8>>::connect(&address, options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Peer, "{error}");
    server.join().unwrap();

    for bad in ["", "host", "host:port", ":80", "unix:", "1:2:99999"] {
        let error = bad.parse::<Address>().unwrap_err();
        assert!(error.to_string().contains("HOST:PORT or unix:PATH"), "{error}");
    }
    for good in ["host:80", "[::1]:80", "unix:/tmp/s"] {
        assert_eq!(good.parse::<Address>().unwrap().to_string(), good);
    }
}

#[cfg(windows)]
#[test]
fn a_unix_socket_is_unsupported_on_windows() {
    let address: Address = "unix:C:/socket".parse().unwrap();
    let listening = Listener::bind(&address, options().idle_timeout).map(drop).unwrap_err();
    let connecting = Link::<Vec<u8>>::connect(&address, options()).map(drop).unwrap_err();
    for error in [listening, connecting] {
        let Error::Io { source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.kind(), std::io::ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("use HOST:PORT"), "{error}");
    }
}

#[test]
fn a_peer_that_dies_is_an_error() {
    let listener = Listener::bind(&any_port(), options().idle_timeout).unwrap();
    let address = listener.address().clone();
    let other = thread::spawn(move || {
        let link =
            Link::<Vec<u8>>::new(listener.accept().unwrap(), Role::Acceptor, options()).unwrap();
        drop(link);
    });
    let mut link = Link::<Vec<u8>>::connect(&address, options()).unwrap();
    other.join().unwrap();
    let lost = loop {
        match link.next_event() {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(lost.kind(), ErrorKind::Network | ErrorKind::Refused), "{lost}");

    // This peer ends inside a frame.
    let listener = Listener::bind(&any_port(), options().idle_timeout).unwrap();
    let address = listener.address().to_string();
    let other = thread::spawn(move || {
        Link::<Vec<u8>>::new(listener.accept().unwrap(), Role::Acceptor, options())
    });
    TcpStream::connect(address).unwrap().write_all(b"TSWIRE1\n\x01\x00").unwrap();
    let lost = other.join().unwrap().unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Network, "{lost}");
}

#[test]
fn two_ends_that_wait_for_each_other_stall() {
    let options = options().with_stall_timeout(Duration::from_millis(300));
    let listener = Listener::bind(&any_port(), options.idle_timeout).unwrap();
    let address = listener.address().clone();
    let send = |mut link: Link<Vec<u8>>| {
        let stream = link.connection().open_stream().unwrap();
        let info = TensorInfo::new("w", Dtype::U8, [32u64 << 20]).unwrap();
        link.send(stream, info, vec![1; 32 << 20].into(), SendOptions::default())
    };
    let acceptor_options = options.clone();
    let other = thread::spawn(move || {
        let socket = listener.accept().unwrap();
        send(Link::<Vec<u8>>::new(socket, Role::Acceptor, acceptor_options).unwrap())
    });
    let ends = [send(Link::connect(&address, options).unwrap()), other.join().unwrap()];
    assert!(ends.iter().any(|end| matches!(end, Err(Error::Stalled { .. }))), "{ends:?}");
    assert!(ends.iter().all(Result::is_err), "{ends:?}");
}

/// Sends a tensor from one end to the other. Returns how many bytes the sender wrote to the socket.
#[cfg(unix)]
fn socket_bytes(listener: &Listener, address: &Address) -> u64 {
    let bytes = payload(8 << 20, 3);
    thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let mut link =
                Link::<Vec<u8>>::new(listener.accept().unwrap(), Role::Acceptor, options())
                    .unwrap();
            loop {
                match link.next_event().unwrap() {
                    Event::Metadata { stream, info, .. } => {
                        link.connection()
                            .accept(stream, vec![0; info.storage_len as usize])
                            .unwrap();
                    }
                    Event::End { sink, .. } => {
                        assert!(sink.unwrap() == payload(8 << 20, 3));
                        // Tells the sender that it may disconnect.
                        let stream = link.connection().open_stream().unwrap();
                        return link.send_message(stream, b"received"[..].into()).unwrap();
                    }
                    _ => {}
                }
            }
        });
        let mut link = Link::<Vec<u8>>::connect(address, options()).unwrap();
        let stream = link.connection().open_stream().unwrap();
        let info = TensorInfo::new("w", Dtype::U8, [8u64 << 20]).unwrap();
        link.send(stream, info, bytes.clone().into(), SendOptions::default()).unwrap();
        while !matches!(link.next_event().unwrap(), Event::Message { .. }) {}
        receiver.join().unwrap();
        link.stats().sent_bytes
    })
}

#[cfg(unix)]
#[test]
fn payloads_go_through_shared_memory_if_descriptors_are_passed() {
    let directory = tempfile::tempdir().unwrap();
    let address = |name: &str| -> Address {
        format!("unix:{}", directory.path().join(name).display()).parse().unwrap()
    };
    let listener = Listener::bind(&address("direct"), options().idle_timeout).unwrap();
    let direct = socket_bytes(&listener, listener.address());
    // Some of the payload is sent before the peer has mapped the shared memory.
    #[cfg(target_os = "linux")]
    assert!(direct < 6 << 20, "{direct} bytes went through the socket");

    // Like ssh, this proxy forwards bytes but no descriptors.
    let proxy = std::os::unix::net::UnixListener::bind(directory.path().join("proxy")).unwrap();
    let target = directory.path().join("direct");
    let passing = thread::spawn(move || {
        let (near, _) = proxy.accept().unwrap();
        let far = std::os::unix::net::UnixStream::connect(target).unwrap();
        let (mut a, mut b) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let back = thread::spawn(move || std::io::copy(&mut b, &mut a));
        let (mut near, mut far) = (near, far);
        let _ = std::io::copy(&mut near, &mut far);
        let _ = far.shutdown(std::net::Shutdown::Both);
        let _ = back.join().unwrap();
    });
    let indirect = socket_bytes(&listener, &address("proxy"));
    assert!(
        indirect > 8 << 20,
        "{indirect} bytes went through the socket, {direct} without a proxy"
    );
    passing.join().unwrap();
}

#[test]
fn a_peer_that_is_silent_or_too_slow_times_out() {
    let short = ConnectionOptions::default().with_idle_timeout(Duration::from_secs(1));
    let listener = Listener::bind(&any_port(), short.idle_timeout).unwrap();
    let address = listener.address().clone();
    let peer_options = short.clone();
    // The system of this peer receives bytes, but the peer never reads them.
    let peer = thread::spawn(move || {
        Link::<Vec<u8>>::new(listener.accept().unwrap(), Role::Acceptor, peer_options).unwrap()
    });
    let mut link = Link::<Vec<u8>>::connect(&address, short.clone()).unwrap();
    let silent = peer.join().unwrap();
    let begin = Instant::now();
    let timed_out = loop {
        match link.next_event() {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(timed_out.kind(), ErrorKind::TimedOut, "{timed_out}");
    assert!(begin.elapsed() < Duration::from_secs(10));
    drop(silent);

    // This peer sends its HELLO too slowly.
    let listener = Listener::bind(&any_port(), short.idle_timeout).unwrap();
    let address = listener.address().to_string();
    let slow = thread::spawn(move || {
        let mut socket = TcpStream::connect(address).unwrap();
        for byte in *b"TSWIRE1\n\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
            if socket.write_all(&[byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(100));
        }
    });
    let timed_out =
        Link::<Vec<u8>>::new(listener.accept().unwrap(), Role::Acceptor, short).unwrap_err();
    assert_eq!(timed_out.kind(), ErrorKind::TimedOut, "{timed_out}");
    slow.join().unwrap();
}

/// Returns two links that are connected over a socket at this address.
#[cfg(target_os = "linux")]
fn pair(at: &Address) -> [Link<Vec<u8>>; 2] {
    let listener = Listener::bind(at, options().idle_timeout).unwrap();
    let address = listener.address().clone();
    let near = thread::spawn(move || Link::<Vec<u8>>::connect(&address, options()).unwrap());
    let far = Link::new(listener.accept().unwrap(), Role::Acceptor, options()).unwrap();
    [near.join().unwrap(), far]
}

/// Receives one tensor of `len` bytes.
#[cfg(target_os = "linux")]
fn receive(link: &mut Link<Vec<u8>>, len: usize) {
    loop {
        match link.next_event().unwrap() {
            Event::Metadata { stream, .. } => {
                link.connection().accept(stream, vec![0; len]).unwrap();
            }
            Event::End { .. } => return,
            _ => {}
        }
    }
}

#[cfg(target_os = "linux")] // elsewhere, `close` waits until the peer closes its end
#[test]
fn closing_after_the_peer_is_no_error_if_everything_has_arrived() {
    const LEN: usize = 100_000;
    let directory = tempfile::tempdir().unwrap();
    let unix: Address =
        format!("unix:{}", directory.path().join("socket").display()).parse().unwrap();
    for at in [&any_port(), &unix] {
        for round in 0..20 {
            let [mut near, mut far] = pair(at);
            let stream = near.connection().open_stream().unwrap();
            let far = thread::spawn(move || {
                receive(&mut far, LEN);
                match round % 3 {
                    0 | 1 => far.close("done").unwrap(),
                    // The peer ends without CLOSE.
                    _ => drop(far),
                }
            });
            let info = TensorInfo::new("w", Dtype::U8, [LEN as u64]).unwrap();
            near.send(stream, info, payload(LEN, 1).into(), SendOptions::default()).unwrap();
            if round % 2 == 0 {
                far.join().unwrap();
                thread::sleep(Duration::from_millis(5));
            }
            if round % 3 == 1 {
                // In even rounds, the peer has already closed, so this control frame cannot arrive.
                near.connection().ping();
                let _ = near.drive();
                thread::sleep(Duration::from_millis(5));
            }
            near.close("done too").unwrap_or_else(|error| panic!("{at}, round {round}: {error}"));
        }
    }
}

#[cfg(target_os = "linux")] // elsewhere, `close` waits until the peer closes its end
#[test]
fn closing_is_an_error_if_the_peer_closed_too_early() {
    const LEN: usize = 64 << 20;
    let [mut near, far] = pair(&any_port());
    let stream = near.connection().open_stream().unwrap();
    let info = TensorInfo::new("w", Dtype::U8, [LEN as u64]).unwrap();
    near.connection().send(stream, info, payload(LEN, 1).into(), SendOptions::default()).unwrap();
    far.close("too much").unwrap();
    let error = near.close("done").unwrap_err();
    assert!(matches!(&error, Error::Closed { reason } if reason == "too much"), "{error}");
}

#[test]
fn an_endless_frame_is_a_stall_although_bytes_arrive() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap().to_string());
    let server = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut hello = vec![0; 4096];
        let len = socket.read(&mut hello).unwrap();
        // The HELLO of a connector is also valid for an acceptor.
        socket.write_all(&hello[..len]).unwrap();
        let frame = |kind: u8, stream: u8, len: u64| {
            let mut header = [0; 24];
            (header[0], header[4]) = (kind, stream);
            header[16..].copy_from_slice(&len.to_le_bytes());
            header
        };
        // The length of this message is wrong, so the PONGs become part of the message.
        socket.write_all(&frame(7, 2, 60_000)).unwrap();
        while socket.write_all(&frame(9, 0, 0)).is_ok() {
            thread::sleep(Duration::from_millis(100));
        }
    });
    let short = options()
        .with_idle_timeout(Duration::from_millis(500))
        .with_stall_timeout(Duration::from_secs(1));
    let since = Instant::now();
    let mut link = Link::<Vec<u8>>::connect(&address, short).unwrap();
    let error = loop {
        if let Err(error) = link.next_event() {
            break error;
        }
    };
    assert!(matches!(error, Error::Stalled { .. }), "{error}");
    assert!(since.elapsed() < Duration::from_secs(10));
    drop(link);
    server.join().unwrap();
}

#[test]
fn another_thread_ends_a_link_that_waits() {
    let listener = Listener::bind(&any_port(), options().idle_timeout).unwrap();
    let to = listener.address().clone();
    let client = thread::spawn(move || Link::<Vec<u8>>::connect(&to, options()).unwrap());
    let silent = listener.accept().unwrap();
    let silent = Link::<Vec<u8>>::start(silent, Role::Acceptor, options());
    let accepting = thread::spawn(move || {
        let mut silent = silent;
        while !silent.handshake_within(Duration::from_millis(50)).unwrap() {}
        silent
    });
    let (mut link, _silent) = (client.join().unwrap(), accepting.join().unwrap());
    let handle = link.abort_handle().unwrap();
    let began = Instant::now();
    let sending = thread::spawn(move || {
        let stream = link.connection().open_stream().unwrap();
        let info = TensorInfo::new("large", Dtype::U8, vec![64 << 20]).unwrap();
        let payload = vec![0_u8; 64 << 20].into();
        link.connection().send(stream, info, payload, SendOptions::default()).unwrap();
        link.flush(stream).and_then(|()| link.close("done"))
    });
    thread::sleep(Duration::from_millis(100));
    assert!(!sending.is_finished(), "the peer does not read");
    handle.abort();
    assert!(sending.join().unwrap().is_err());
    assert!(began.elapsed() < options().idle_timeout);
    handle.abort();
}
