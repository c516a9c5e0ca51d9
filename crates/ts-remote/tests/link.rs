// SPDX-License-Identifier: MIT OR Apache-2.0
//! Links over sockets of the system's.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

mod together;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use ts_format::Dtype;
use ts_remote::{
    Acceptor, Address, ConnectionOptions, Error, ErrorKind, Event, Link, Listener, Role,
    SendOptions, TensorInfo,
};

use together::{both_ways, options, payload};

fn any_port() -> Address {
    "127.0.0.1:0".parse().unwrap()
}

#[test]
fn both_ends_send_at_once_over_tcp() {
    both_ways(Listener::bind(&any_port(), options().idle_timeout).unwrap(), Ok, Listener::accept);
}

#[test]
fn both_ends_send_at_once_over_a_unix_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let address: Address = format!("unix:{}", path.display()).parse().unwrap();
    both_ways(Listener::bind(&address, options().idle_timeout).unwrap(), Ok, Listener::accept);
    assert!(!path.exists(), "who listens no more leaves nothing behind");
}

/// Of those who connect some say nothing, some something else, and one who it is: that one is let
/// in, and the others wait or are sent away.
#[test]
fn strangers_keep_nobody_waiting() {
    let with = ConnectionOptions { token: Some("sesame".into()), ..options() };
    let listener = Listener::bind(&any_port(), with.timeout).unwrap();
    let Address::Tcp(address) = listener.address().clone() else {
        unreachable!("it was asked for TCP")
    };
    let mut lobby = Acceptor::<Vec<u8>>::new(with.clone());
    let (mut silent, mut sent_away) = (Vec::new(), Vec::new());
    let mut log = |_: &str, error: &Error| sent_away.push(error.to_string());
    // No more at a time than the system lets wait.
    for _ in 0..2 {
        silent.extend((0..100).map(|_| TcpStream::connect(&address).unwrap()));
        assert!(
            lobby.accept_within(&listener, Duration::from_millis(100), &mut log).unwrap().is_none()
        );
    }
    let mut other = TcpStream::connect(&address).unwrap();
    other.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let to = listener.address().clone();
    let known = thread::spawn(move || Link::<Vec<u8>>::connect(&to, with).unwrap());
    let link = lobby.accept_within(&listener, Duration::from_secs(20), &mut log).unwrap();
    assert_eq!(link.unwrap().peer().split(':').next(), Some("127.0.0.1"));
    known.join().unwrap();
    let of = |what: &str| sent_away.iter().filter(|reason| reason.contains(what)).count();
    assert_eq!(of("does not speak this protocol"), 1, "{sent_away:?}");
    // As many as there is room for are still there, one of them perhaps gone for the one that said
    // something or was let in.
    assert!((72..=74).contains(&of("it had said nothing")), "{sent_away:?}");
    drop((silent, other));
}

/// Tensors that each fit what is put together for the socket at a time go by shared memory too,
/// once the other end has taken it.
#[test]
fn tensors_of_a_mebibyte_go_by_shared_memory() {
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
        link.close("that was all").unwrap();
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
    assert!(matches!(&ended, Error::Closed { reason } if reason == "that was all"), "{ended}");
    assert_eq!(seed, 32);
    let sent = sender.join().unwrap();
    assert!(sent < 8 * LEN as u64, "{sent} bytes went by the socket");
}

#[test]
fn a_silent_end_is_given_up_in_time_and_a_slow_one_is_not() {
    let short = ConnectionOptions {
        idle_timeout: Duration::from_millis(400),
        ..ConnectionOptions::default()
    };
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(silent.local_addr().unwrap().to_string());
    let begin = Instant::now();
    let given_up = Link::<Vec<u8>>::connect(&address, short.clone()).unwrap_err();
    assert_eq!(given_up.kind(), ErrorKind::TimedOut, "{given_up}");
    assert!(begin.elapsed() < Duration::from_secs(5));

    let listener = Listener::bind(&any_port(), short.timeout).unwrap();
    let address = listener.address().clone();
    let with = short.clone();
    let other = thread::spawn(move || {
        let mut link =
            Link::<Vec<u8>>::new(listener.accept().unwrap(), Role::Acceptor, with).unwrap();
        // It answers pings and says nothing for longer than the other's timeout.
        let end = Instant::now() + Duration::from_millis(1200);
        while Instant::now() < end {
            let _ = link.poll_event().unwrap();
            thread::sleep(Duration::from_millis(10));
        }
        let stream = link.connection().open_stream().unwrap();
        link.send_message(stream, b"at last"[..].into()).unwrap();
        link
    });
    let mut link = Link::<Vec<u8>>::connect(&address, short).unwrap();
    assert!(matches!(link.next_event().unwrap(), Event::Connected { .. }));
    // Nobody was waited for meanwhile.
    thread::sleep(Duration::from_millis(600));
    let event = link.next_event().unwrap();
    assert!(matches!(event, Event::Message { bytes, .. } if bytes == b"at last"[..]));
    other.join().unwrap();
}

#[test]
fn what_is_no_peer_is_an_error_that_says_so() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refused =
        Link::<Vec<u8>>::connect(&Address::Tcp(nobody.to_string()), options()).unwrap_err();
    let nobody = nobody.to_string();
    assert!(
        matches!(&refused, Error::Io { peer, what: "connecting", .. } if *peer == nobody),
        "{refused}"
    );

    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(stranger.local_addr().unwrap().to_string());
    let other = thread::spawn(move || {
        let (mut socket, _) = stranger.accept().unwrap();
        socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        let mut rest = Vec::new();
        socket.read_to_end(&mut rest).unwrap();
    });
    let turned_away = Link::<Vec<u8>>::connect(&address, options()).unwrap_err();
    assert_eq!(turned_away.kind(), ErrorKind::Peer, "{turned_away}");
    other.join().unwrap();

    for bad in ["", "host", "host:port", ":80", "unix:", "1:2:99999"] {
        let error = bad.parse::<Address>().unwrap_err();
        assert!(error.to_string().contains("HOST:PORT or unix:PATH"), "{error}");
    }
    for good in ["host:80", "[::1]:80", "unix:/tmp/s"] {
        assert_eq!(good.parse::<Address>().unwrap().to_string(), good);
    }
}

#[test]
fn an_end_that_dies_is_missed() {
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

    // In the middle of a frame.
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
fn two_ends_that_wait_for_each_other_are_told() {
    let options = ConnectionOptions { stall_timeout: Duration::from_millis(300), ..options() };
    let listener = Listener::bind(&any_port(), options.idle_timeout).unwrap();
    let address = listener.address().clone();
    let send = |mut link: Link<Vec<u8>>| {
        let stream = link.connection().open_stream().unwrap();
        let info = TensorInfo::new("w", Dtype::U8, [32u64 << 20]).unwrap();
        link.send(stream, info, vec![1; 32 << 20].into(), SendOptions::default())
    };
    let with = options.clone();
    let other = thread::spawn(move || {
        send(Link::<Vec<u8>>::new(listener.accept().unwrap(), Role::Acceptor, with).unwrap())
    });
    let ends = [send(Link::connect(&address, options).unwrap()), other.join().unwrap()];
    assert!(ends.iter().any(|end| matches!(end, Err(Error::Stalled { .. }))), "{ends:?}");
    assert!(ends.iter().all(Result::is_err), "{ends:?}");
}

/// Sends a tensor from one end to the other, and says how many bytes its socket carried.
fn carried(listener: &Listener, address: &Address) -> u64 {
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
                        // Its thanks are the other end's sign to go.
                        let stream = link.connection().open_stream().unwrap();
                        return link.send_message(stream, b"thanks"[..].into()).unwrap();
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

#[test]
fn on_one_host_payloads_go_by_shared_memory_where_descriptors_get_through() {
    let directory = tempfile::tempdir().unwrap();
    let address = |name: &str| -> Address {
        format!("unix:{}", directory.path().join(name).display()).parse().unwrap()
    };
    let listener = Listener::bind(&address("direct"), options().idle_timeout).unwrap();
    let direct = carried(&listener, listener.address());
    // What went before the other end had said that it takes it went by the socket.
    #[cfg(target_os = "linux")]
    assert!(direct < 6 << 20, "{direct} bytes by the socket");

    // Somebody between them who passes bytes on, as ssh does, and nothing else.
    let between = std::os::unix::net::UnixListener::bind(directory.path().join("between")).unwrap();
    let target = directory.path().join("direct");
    let passing = thread::spawn(move || {
        let (near, _) = between.accept().unwrap();
        let far = std::os::unix::net::UnixStream::connect(target).unwrap();
        let (mut a, mut b) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let back = thread::spawn(move || std::io::copy(&mut b, &mut a));
        let (mut near, mut far) = (near, far);
        let _ = std::io::copy(&mut near, &mut far);
        let _ = far.shutdown(std::net::Shutdown::Both);
        let _ = back.join().unwrap();
    });
    let indirect = carried(&listener, &address("between"));
    assert!(
        indirect > 8 << 20,
        "{indirect} bytes by the socket, and {direct} without anybody between"
    );
    passing.join().unwrap();
}

#[test]
fn who_is_there_and_says_nothing_at_all_is_given_up() {
    let short =
        ConnectionOptions { idle_timeout: Duration::from_secs(1), ..ConnectionOptions::default() };
    let listener = Listener::bind(&any_port(), short.timeout).unwrap();
    let address = listener.address().clone();
    let with = short.clone();
    // It takes what it is sent, as the system does for a process that has stopped.
    let other = thread::spawn(move || {
        Link::<Vec<u8>>::new(listener.accept().unwrap(), Role::Acceptor, with).unwrap()
    });
    let mut link = Link::<Vec<u8>>::connect(&address, short.clone()).unwrap();
    let stopped = other.join().unwrap();
    let begin = Instant::now();
    let given_up = loop {
        match link.next_event() {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(given_up.kind(), ErrorKind::TimedOut, "{given_up}");
    assert!(begin.elapsed() < Duration::from_secs(10));
    drop(stopped);

    // And one that says who it is, a byte at a time.
    let listener = Listener::bind(&any_port(), short.timeout).unwrap();
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
    let given_up =
        Link::<Vec<u8>>::new(listener.accept().unwrap(), Role::Acceptor, short).unwrap_err();
    assert_eq!(given_up.kind(), ErrorKind::TimedOut, "{given_up}");
    slow.join().unwrap();
}

/// Two links that know each other, over a socket of this kind.
fn pair(at: &Address) -> [Link<Vec<u8>>; 2] {
    let listener = Listener::bind(at, options().idle_timeout).unwrap();
    let address = listener.address().clone();
    let near = thread::spawn(move || Link::<Vec<u8>>::connect(&address, options()).unwrap());
    let far = Link::new(listener.accept().unwrap(), Role::Acceptor, options()).unwrap();
    [near.join().unwrap(), far]
}

/// Receives one tensor.
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

#[test]
fn closing_after_the_other_end_has_closed_is_no_error_when_all_has_arrived() {
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
                    0 | 1 => far.close("that was all").unwrap(),
                    // It ends without a word.
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
                // What this end has to say otherwise reaches nobody any more.
                near.connection().ping();
                let _ = near.drive();
                thread::sleep(Duration::from_millis(5));
            }
            near.close("so it was").unwrap_or_else(|error| panic!("{at}, round {round}: {error}"));
        }
    }
}

#[test]
fn closing_is_an_error_when_the_other_end_has_closed_before_all_has_arrived() {
    const LEN: usize = 64 << 20;
    let [mut near, far] = pair(&any_port());
    let stream = near.connection().open_stream().unwrap();
    let info = TensorInfo::new("w", Dtype::U8, [LEN as u64]).unwrap();
    near.connection().send(stream, info, payload(LEN, 1).into(), SendOptions::default()).unwrap();
    far.close("no more of it").unwrap();
    let error = near.close("all of it").unwrap_err();
    assert!(matches!(&error, Error::Closed { reason } if reason == "no more of it"), "{error}");
}

#[test]
fn a_frame_that_never_ends_is_a_stall_though_bytes_arrive() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap().to_string());
    let server = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut hello = vec![0; 4096];
        let len = socket.read(&mut hello).unwrap();
        // A client's HELLO is also a valid one of a server.
        socket.write_all(&hello[..len]).unwrap();
        let frame = |kind: u8, stream: u8, len: u64| {
            let mut header = [0; 24];
            (header[0], header[4]) = (kind, stream);
            header[16..].copy_from_slice(&len.to_le_bytes());
            header
        };
        // The length of this message is wrong, so that PONGs become parts of it.
        socket.write_all(&frame(7, 2, 60_000)).unwrap();
        while socket.write_all(&frame(9, 0, 0)).is_ok() {
            thread::sleep(Duration::from_millis(100));
        }
    });
    let stall_timeout = Duration::from_secs(1);
    let with =
        ConnectionOptions { idle_timeout: Duration::from_millis(500), stall_timeout, ..options() };
    let since = Instant::now();
    let ended = Link::<Vec<u8>>::connect(&address, with).and_then(|mut link| {
        loop {
            link.next_event()?;
        }
    });
    let Err(error): Result<(), Error> = ended else { unreachable!("only an error ends that") };
    assert!(matches!(error, Error::Stalled { .. }), "{error}");
    assert!(since.elapsed() < Duration::from_secs(10));
    server.join().unwrap();
}
