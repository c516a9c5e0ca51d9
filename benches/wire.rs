// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares TensorStream's connections between two processes with raw sockets: `cargo xtask bench
//! wire`.
//!
//! A child process sends tensors, which are parts of one array. This process measures the time from
//! its request until the last tensor has arrived in reused memory.
#![allow(missing_docs, clippy::unwrap_used)] // a benchmark that cannot run may panic

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tensorstream::format::Dtype;
use tensorstream::remote::{
    Address, Bytes, ConnectionOptions, Event, Identity, Link, Listener, Role, SendOptions, Socket,
    TensorInfo, TlsClient, TlsServer,
};

const MIB: usize = 1 << 20;
/// The sizes of tensors in bytes, each with the number of tensors in a round.
const SIZES: [(usize, usize); 3] = [(MIB, 256), (16 * MIB, 16), (256 * MIB, 4)];
/// The number of round trips of a message in a round, for each placement of the two ends.
const PINGS: usize = 2000;
/// The length of a message, in bytes.
const MESSAGE: usize = 64;

/// The contenders. A link is a connection of TensorStream. Raw sockets write
/// 1 MiB at a time, or whole tensors. With "64 KiB reads", each read takes at most 64 KiB.
const KINDS: [&str; 11] = [
    "raw tcp, 64 KiB reads",
    "raw tcp, 1 MiB",
    "raw tcp, whole",
    "raw unix, 1 MiB",
    "raw unix, whole",
    "raw tls",
    "link tcp",
    "link unix",
    "link shared memory",
    "link tls",
    "link tcp, checked",
];

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().position(|a| a == "serve") {
        Some(at) => {
            pin(1);
            serve(&arguments[at + 1], &arguments[at + 2]);
        }
        None => {
            // `cargo bench -- --test` only checks that benchmarks run, so one short round suffices.
            let brief = arguments.iter().any(|a| a == "--test");
            let only: Vec<_> =
                arguments.iter().filter(|a| KINDS.contains(&a.as_str())).cloned().collect();
            pin(0);
            measure(if brief { 1 } else { 15 }, brief, &only);
        }
    }
}

/// The end of a connection that requests tensors.
trait Transport {
    /// Requests `count` tensors of `bytes` bytes and waits until the last one has arrived.
    fn receive(&mut self, bytes: usize, count: usize);
    /// Sends a message and waits for its echo.
    fn ping(&mut self);
}

/// A child process that serves a contender, and the end in this process that requests tensors.
struct Peer {
    child: Child,
    transport: Box<dyn Transport>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(kind: &str) -> Peer {
    let path = std::env::temp_dir().join(format!(
        "ts-wire-{}-{}",
        std::process::id(),
        kind.replace([' ', ','], "-")
    ));
    if kind.ends_with("tls") {
        write_certificates(&path);
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["serve", kind, path.to_str().unwrap()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = Vec::new();
    let output = child.stdout.as_mut().unwrap();
    while !line.ends_with(b"\n") {
        let mut byte = [0];
        output.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    let address = String::from_utf8(line).unwrap().trim().to_string();
    let most = SIZES.iter().map(|(bytes, _)| *bytes).max().unwrap();
    // The maximum length of one read from a raw socket.
    let piece = match kind {
        _ if kind.ends_with("whole") => usize::MAX,
        _ if kind.ends_with("64 KiB reads") => 64 << 10,
        _ => 256 << 10,
    };
    let transport: Box<dyn Transport> = match kind {
        _ if kind.starts_with("raw tcp") => {
            let socket = TcpStream::connect(&address).unwrap();
            socket.set_nodelay(true).unwrap();
            Box::new(Raw { socket, piece, memory: vec![1; most] })
        }
        _ if kind.starts_with("raw unix") => Box::new(Raw {
            socket: UnixStream::connect(&address).unwrap(),
            piece,
            memory: vec![1; most],
        }),
        "raw tls" => {
            let socket = TcpStream::connect(&address).unwrap();
            socket.set_nodelay(true).unwrap();
            let mut roots = rustls::RootCertStore::empty();
            roots.add(CertificateDer::from_pem_file(path.join("ca.pem")).unwrap()).unwrap();
            let config = rustls::ClientConfig::builder_with_provider(provider())
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
            let tls = rustls::ClientConnection::new(config.into(), "127.0.0.1".try_into().unwrap())
                .unwrap();
            Box::new(Raw {
                socket: rustls::StreamOwned::new(tls, socket),
                piece,
                memory: vec![1; most],
            })
        }
        _ => {
            let address: Address = address.parse().unwrap();
            let mut socket = Socket::connect(&address, Duration::from_secs(30)).unwrap();
            if kind == "link tls" {
                let client = TlsClient::new(&path.join("ca.pem"), None).unwrap();
                socket = socket.into_tls_client(&client).unwrap();
            }
            let mut link = Link::new(socket, Role::Connector, options(kind)).unwrap();
            assert!(matches!(link.next_event(), Ok(Event::Connected { .. })));
            let stream = link.connection().open_stream().unwrap();
            let memory = SIZES.iter().map(|&(bytes, _)| (bytes, vec![1; bytes])).collect();
            Box::new(Linked { link, stream, memory })
        }
    };
    Peer { child, transport }
}

fn options(kind: &str) -> ConnectionOptions {
    let usual = ConnectionOptions::default();
    if kind.contains("shared") { usual } else { usual.with_shared_bytes(0) }
}

/// Pins this process to a core. Without pinning, both ends may happen to share a core, which halves
/// the rate.
fn pin(core: usize) {
    let mut cores = rustix::thread::CpuSet::new();
    cores.set(core);
    // Ignores an error: the core may not exist, or the call may not be permitted.
    let _ = rustix::thread::sched_setaffinity(None, &cores);
}

/// Writes the certificate of a new authority, a certificate for 127.0.0.1 that the authority
/// signed, and the key of that certificate.
fn write_certificates(directory: &Path) {
    std::fs::create_dir_all(directory).unwrap();
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let [authority_key, key] = [(); 2].map(|()| rcgen::KeyPair::generate().unwrap());
    let authority = params.self_signed(&authority_key).unwrap();
    let issuer = rcgen::Issuer::from_params(&params, &authority_key);
    let leaf = rcgen::CertificateParams::new(vec!["127.0.0.1".to_string()]).unwrap();
    let leaf = leaf.signed_by(&key, &issuer).unwrap();
    for (name, text) in
        [("ca.pem", authority.pem()), ("cert.pem", leaf.pem()), ("key.pem", key.serialize_pem())]
    {
        std::fs::write(directory.join(name), text).unwrap();
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

struct Raw<S> {
    socket: S,
    piece: usize,
    memory: Vec<u8>,
}

impl<S: Read + Write> Transport for Raw<S> {
    fn receive(&mut self, bytes: usize, count: usize) {
        self.socket
            .write_all(&[(bytes as u64).to_le_bytes(), (count as u64).to_le_bytes()].concat())
            .unwrap();
        for _ in 0..count {
            let mut rest = &mut self.memory[..bytes];
            while !rest.is_empty() {
                let most = rest.len().min(self.piece);
                let len = self.socket.read(&mut rest[..most]).unwrap();
                rest = &mut rest[len..];
            }
            assert_eq!(std::mem::take(&mut self.memory[bytes - 1]), 7);
        }
    }

    fn ping(&mut self) {
        let mut message = [1; MESSAGE];
        self.socket.write_all(&message).unwrap();
        self.socket.read_exact(&mut message).unwrap();
    }
}

struct Linked {
    link: Link<Vec<u8>>,
    stream: u32,
    memory: BTreeMap<usize, Vec<u8>>,
}

impl Transport for Linked {
    fn receive(&mut self, bytes: usize, count: usize) {
        let request = [(bytes as u64).to_le_bytes(), (count as u64).to_le_bytes()].concat();
        self.link.send_message(self.stream, request.into()).unwrap();
        let mut done = 0;
        while done < count {
            match self.link.next_event().unwrap() {
                Event::Metadata { stream, info, .. } => {
                    let memory = self.memory.remove(&(info.storage_len as usize)).unwrap();
                    self.link.connection().accept(stream, memory).unwrap();
                }
                Event::End { sink, .. } => {
                    let mut memory = sink.unwrap();
                    assert_eq!(std::mem::take(&mut memory[bytes - 1]), 7);
                    self.memory.insert(bytes, memory);
                    done += 1;
                }
                _ => {}
            }
        }
    }

    fn ping(&mut self) {
        self.link.send_message(self.stream, Bytes::from(vec![1; MESSAGE])).unwrap();
        assert!(matches!(self.link.next_event(), Ok(Event::Message { .. })));
    }
}

/// Runs the child process, which sends parts of its array on request.
fn serve(kind: &str, path: &str) {
    let most = SIZES.iter().map(|(bytes, _)| *bytes).max().unwrap();
    let array = vec![7; most];
    let announce = |address: &str| {
        println!("{address}");
        std::io::stdout().flush().unwrap();
    };
    if kind.starts_with("raw tcp") {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        announce(&listener.local_addr().unwrap().to_string());
        let (socket, _) = listener.accept().unwrap();
        socket.set_nodelay(true).unwrap();
        serve_raw(socket, &array, kind.ends_with("whole"));
    } else if kind.starts_with("raw unix") {
        let listener = UnixListener::bind(path).unwrap();
        announce(path);
        let (socket, _) = listener.accept().unwrap();
        std::fs::remove_file(path).unwrap();
        serve_raw(socket, &array, kind.ends_with("whole"));
    } else if kind == "raw tls" {
        let directory = Path::new(path);
        let certificate = CertificateDer::from_pem_file(directory.join("cert.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_file(directory.join("key.pem")).unwrap();
        let config = rustls::ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        announce(&listener.local_addr().unwrap().to_string());
        let (socket, _) = listener.accept().unwrap();
        socket.set_nodelay(true).unwrap();
        let tls = rustls::ServerConnection::new(config.into()).unwrap();
        serve_raw(rustls::StreamOwned::new(tls, socket), &array, false);
    } else {
        let address = if kind.contains("unix") || kind.contains("shared") {
            format!("unix:{path}")
        } else {
            "127.0.0.1:0".into()
        };
        let listener = Listener::bind(&address.parse().unwrap(), Duration::from_secs(30)).unwrap();
        announce(&listener.address().to_string());
        let mut socket = listener.accept().unwrap();
        drop(listener);
        if kind == "link tls" {
            let (certificates, key) =
                (Path::new(path).join("cert.pem"), Path::new(path).join("key.pem"));
            let server =
                TlsServer::new(Identity { certificates: &certificates, key: &key }, None).unwrap();
            socket = socket.into_tls_server(&server).unwrap();
        }
        serve_link(socket, &array.into(), kind);
    }
}

fn serve_raw(mut socket: impl Read + Write, array: &[u8], whole: bool) {
    let mut request = [0; MESSAGE];
    loop {
        let Ok(len) = socket.read(&mut request) else { return };
        match len {
            0 => return,
            16 => {
                let number = |at: usize| {
                    u64::from_le_bytes(request[at..at + 8].try_into().unwrap()) as usize
                };
                for _ in 0..number(8) {
                    let piece = if whole { number(0) } else { MIB };
                    // Every byte of the array is 7. The other end checks the last byte of a tensor.
                    for piece in array[..number(0)].chunks(piece) {
                        socket.write_all(piece).unwrap();
                    }
                }
            }
            _ => socket.write_all(&request[..len]).unwrap(),
        }
    }
}

fn serve_link(socket: Socket, array: &Bytes, kind: &str) {
    let mut link = Link::<Vec<u8>>::new(socket, Role::Acceptor, options(kind)).unwrap();
    let options = SendOptions::default().with_checksums(kind.ends_with("checked"));
    let stream = loop {
        match link.next_event() {
            Ok(Event::Connected { .. }) => break link.connection().open_stream().unwrap(),
            Ok(_) => {}
            Err(_) => return,
        }
    };
    while let Ok(event) = link.next_event() {
        let Event::Message { bytes, .. } = event else { continue };
        if bytes.len() == MESSAGE {
            link.send_message(stream, bytes).unwrap();
            continue;
        }
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        for _ in 0..number(8) {
            let info = TensorInfo::new("w", Dtype::U8, [number(0) as u64]).unwrap();
            link.send(stream, info, array.slice(..number(0)), options).unwrap();
        }
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn measure(rounds: usize, brief: bool, only: &[String]) {
    let kinds: Vec<_> = KINDS
        .into_iter()
        .filter(|kind| only.is_empty() || only.iter().any(|o| o == kind))
        .collect();
    let mut peers: Vec<Peer> = kinds.iter().map(|kind| start(kind)).collect();
    let sizes = if brief { &SIZES[..1] } else { &SIZES[..] };
    let mut rates: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
    let mut trips: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
    for round in 0..=rounds {
        for (size, &(bytes, count)) in sizes.iter().enumerate() {
            for (kind, peer) in peers.iter_mut().enumerate() {
                let begin = Instant::now();
                peer.transport.receive(bytes, count);
                let rate = (bytes * count) as f64 / 1e9 / begin.elapsed().as_secs_f64();
                // The first round is a warm-up and does not count.
                if round > 0 {
                    rates.entry((kind, size)).or_default().push(rate);
                }
            }
        }
        // The children are pinned to core 1, so the ends run on two cores, then on one.
        for core in [0, 1] {
            pin(core);
            for (kind, peer) in peers.iter_mut().enumerate() {
                let mut times: Vec<f64> = (0..PINGS)
                    .map(|_| {
                        let begin = Instant::now();
                        peer.transport.ping();
                        begin.elapsed().as_secs_f64() * 1e6
                    })
                    .collect();
                if round > 0 {
                    trips.entry((kind, core)).or_default().push(median(&mut times));
                }
            }
        }
        pin(0);
    }
    let names: Vec<String> =
        sizes.iter().map(|(bytes, _)| format!("{} MiB, GB/s", bytes / MIB)).collect();
    println!(
        "| {rounds} rounds, medians | {} | round trip of {MESSAGE} bytes, µs: two cores, one core \
         |",
        names.join(" | ")
    );
    println!("|---|{}---|", "---|".repeat(sizes.len()));
    for (kind, name) in kinds.iter().enumerate() {
        let cells: Vec<String> = (0..sizes.len())
            .map(|size| format!("{:.2}", median(&mut rates[&(kind, size)].clone())))
            .collect();
        let trip = |core| median(&mut trips[&(kind, core)].clone());
        println!("| {name} | {} | {:.1}, {:.1} |", cells.join(" | "), trip(0), trip(1));
    }
    for (link, raw) in [
        ("link tcp", "raw tcp"),
        ("link unix", "raw unix"),
        ("link shared memory", "raw tcp"),
        ("link tls", "raw tls"),
    ] {
        let Some(own) = kinds.iter().position(|kind| *kind == link) else { continue };
        let raws: Vec<_> = (0..kinds.len()).filter(|&kind| kinds[kind].starts_with(raw)).collect();
        if raws.is_empty() {
            continue;
        }
        let cells: Vec<String> = (0..sizes.len())
            .map(|size| {
                // Takes the best median of the raw sockets of this kind.
                let best = raws
                    .iter()
                    .map(|&raw| median(&mut rates[&(raw, size)].clone()))
                    .fold(0.0, f64::max);
                format!("{:.2}", median(&mut rates[&(own, size)].clone()) / best)
            })
            .collect();
        let ratio = |core| {
            let trip = |kind| median(&mut trips[&(kind, core)].clone());
            trip(own) / raws.iter().map(|&raw| trip(raw)).fold(f64::MAX, f64::min)
        };
        let (two_cores, one_core) = (ratio(0), ratio(1));
        println!(
            "| {link}, of the better {raw} | {} | {two_cores:.2}, {one_core:.2} |",
            cells.join(" | ")
        );
    }
}
