// SPDX-License-Identifier: MIT OR Apache-2.0
//! Links under TLS: what is sent arrives, and only those are let in who may be.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

mod dispatched;
mod together;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use ts_remote::{
    Bytes, ConnectionOptions, Dispatcher, Error, ErrorKind, Files, Identity, Link, Listener,
    RangeClient, RangeHandler, Refusal, RefusalKind, RemoteFile, Role, ServerOptions, Socket,
    TlsClient, TlsServer, serve,
};

use dispatched::dispatch;
use together::{both_ways, options, payload};

/// An authority, and a certificate of its for a name.
struct Pem {
    directory: tempfile::TempDir,
}

impl Pem {
    fn new(name: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority_key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = params.self_signed(&authority_key).unwrap();
        let key = KeyPair::generate().unwrap();
        let issuer = Issuer::from_params(&params, &authority_key);
        let leaf = CertificateParams::new(vec![name.to_string()])
            .unwrap()
            .signed_by(&key, &issuer)
            .unwrap();
        let write =
            |file: &str, text: String| std::fs::write(directory.path().join(file), text).unwrap();
        write("ca.pem", authority.pem());
        write("cert.pem", leaf.pem());
        write("key.pem", key.serialize_pem());
        Self { directory }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn server(&self, clients: Option<&Pem>) -> TlsServer {
        let (certificates, key) = (self.file("cert.pem"), self.file("key.pem"));
        let clients = clients.map(|files| files.file("ca.pem"));
        TlsServer::new(Identity { certificates: &certificates, key: &key }, clients.as_deref())
            .unwrap()
    }

    fn client(&self, own: Option<&Pem>) -> TlsClient {
        let (certificates, key) =
            own.map(|own| (own.file("cert.pem"), own.file("key.pem"))).unzip();
        let identity = certificates.as_deref().zip(key.as_deref());
        let identity = identity.map(|(certificates, key)| Identity { certificates, key });
        TlsClient::new(&self.file("ca.pem"), identity).unwrap()
    }
}

fn listener() -> Listener {
    Listener::bind(&"127.0.0.1:0".parse().unwrap(), options().idle_timeout).unwrap()
}

#[test]
fn both_ends_send_at_once_and_know_each_other() {
    let (servers, clients) = (Pem::new("127.0.0.1"), Pem::new("me"));
    let client = servers.client(Some(&clients));
    let server = servers.server(Some(&clients));
    both_ways(
        listener(),
        |socket| socket.into_tls_client(&client),
        move |listener| listener.accept()?.into_tls_server(&server),
    );
}

#[test]
fn a_dispatcher_relays_decrypted_connections() {
    let files = Pem::new("127.0.0.1");
    let (client, server) = (files.client(None), files.server(None));
    let dispatcher = Dispatcher::new(options()).with_tls(server);
    let accept = move |listener: &Listener| dispatch(dispatcher, listener);
    both_ways(listener(), |socket| socket.into_tls_client(&client), accept);
}

/// The threads of this process that relay.
fn relays() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("tensorstream-re")).count()
}

#[test]
#[cfg(target_os = "linux")]
fn a_client_that_stays_connected_keeps_no_relay_after_it_was_dropped() {
    let files = Pem::new("127.0.0.1");
    let listener = listener();
    let ts_remote::Address::Tcp(address) = listener.address().clone() else { unreachable!() };
    let short = ConnectionOptions { idle_timeout: Duration::from_millis(300), ..options() };
    let mut dispatcher = Dispatcher::new(short).with_tls(files.server(None));
    let connect = move || {
        (0..300).map(|_| std::net::TcpStream::connect(&address).unwrap()).collect::<Vec<_>>()
    };
    let silent = thread::spawn(connect);
    let since = Instant::now();
    let mut failed = 0;
    while failed < 300 && since.elapsed() < Duration::from_secs(20) {
        let none = dispatcher
            .accept_within(&listener, Duration::from_millis(50), |_, _| failed += 1)
            .unwrap();
        assert!(none.is_none());
    }
    let silent = silent.join().unwrap();
    while relays() > 0 && since.elapsed() < Duration::from_secs(20) {
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!((failed, relays()), (silent.len(), 0));
}

/// What either end says of the other.
fn meet(server: TlsServer, client: &TlsClient) -> [Result<(), Error>; 2] {
    let listener = listener();
    let address = listener.address().clone();
    let other = thread::spawn(move || {
        let socket = listener.accept()?.into_tls_server(&server)?;
        Link::<Vec<u8>>::new(socket, Role::Acceptor, options()).map(drop)
    });
    let socket = Socket::connect(&address, options().idle_timeout)
        .and_then(|socket| socket.into_tls_client(client));
    let met = socket
        .and_then(|socket| Link::<Vec<u8>>::new(socket, Role::Connector, options()))
        .map(drop);
    [met, other.join().unwrap()]
}

#[test]
fn who_cannot_be_trusted_is_turned_away() {
    let (servers, clients, others) = (Pem::new("127.0.0.1"), Pem::new("me"), Pem::new("127.0.0.1"));
    let [ours, theirs] = meet(others.server(None), &servers.client(None));
    let ours = ours.unwrap_err();
    assert!(ours.kind() == ErrorKind::Peer && ours.to_string().contains("certificate"), "{ours}");
    assert!(theirs.is_err());
    let [ours, _] = meet(Pem::new("elsewhere").server(None), &servers.client(None));
    assert!(ours.is_err());
    for own in [None, Some(&others)] {
        let [ours, theirs] = meet(servers.server(Some(&clients)), &servers.client(own));
        assert!(ours.is_err() && theirs.is_err(), "{ours:?}, {theirs:?}");
    }
    let [ours, theirs] = meet(servers.server(Some(&clients)), &servers.client(Some(&clients)));
    assert!(ours.is_ok() && theirs.is_ok(), "{ours:?}, {theirs:?}");
}

/// One file in memory.
struct Held(Bytes);

impl Files for Held {
    fn open(&mut self, name: &str) -> Result<RemoteFile, Refusal> {
        let absent = || Refusal { kind: RefusalKind::NotFound, reason: format!("no {name}") };
        (name == "w")
            .then(|| RemoteFile { id: 0, len: self.0.len() as u64, version: vec![1] })
            .ok_or_else(absent)
    }

    fn read(&mut self, _: u64, offset: u64, len: usize) -> Result<Option<Bytes>, Refusal> {
        Ok(Some(self.0.slice(offset as usize..offset as usize + len)))
    }
}

#[test]
fn a_server_of_ranges_reads_all_that_tls_has_taken_off_the_socket() {
    let files = Pem::new("127.0.0.1");
    let (client, server) = (files.client(None), files.server(None));
    let listener = listener();
    let address = listener.address().clone();
    let held = Bytes::from(payload(20 << 20, 3));
    let (content, stop) = (held.clone(), Arc::new(AtomicBool::new(false)));
    let asked = Arc::clone(&stop);
    let other = thread::spawn(move || {
        let options = ServerOptions { tls: Some(server), ..ServerOptions::default() };
        let session = |_: &str| RangeHandler::new(Held(content.clone()));
        serve(&listener, &options, &mut || asked.load(Ordering::Relaxed), session, |_, _| {})
            .unwrap()
    });
    let readers = (0..3u64).map(|reader| {
        let (address, client, held) = (address.clone(), client.clone(), held.clone());
        thread::spawn(move || {
            let socket = Socket::connect(&address, options().idle_timeout)
                .unwrap()
                .into_tls_client(&client)
                .unwrap();
            let mut ranges = RangeClient::<Vec<u8>>::new(socket, options()).unwrap();
            let file = ranges.open("w").unwrap().unwrap();
            assert_eq!(ranges.open("v").unwrap().unwrap_err().kind, RefusalKind::NotFound);
            for number in 0..40 {
                let (offset, len) =
                    (reader * 777 + number * 99_991, [1, 5000, 3 << 20][number as usize % 3]);
                let mut memory = Some(vec![0; len]);
                ranges.read(file.id, offset, &mut memory).unwrap().unwrap();
                assert!(memory.unwrap() == held[offset as usize..offset as usize + len]);
            }
        })
    });
    readers.collect::<Vec<_>>().into_iter().for_each(|reader| reader.join().unwrap());
    stop.store(true, Ordering::Relaxed);
    let stats = other.join().unwrap();
    assert!(stats.accepted == 3 && stats.strangers == 0, "{stats:?}");
}

#[test]
fn files_that_are_wrong_are_named() {
    let files = Pem::new("127.0.0.1");
    let (key, absent) = (files.file("key.pem"), files.file("absent.pem"));
    for wrong in [&key, &absent] {
        let error = TlsClient::new(wrong, None).unwrap_err();
        assert!(error.to_string().contains(wrong.to_str().unwrap()), "{error}");
    }
    let error =
        TlsServer::new(Identity { certificates: &files.file("cert.pem"), key: &absent }, None)
            .unwrap_err();
    assert!(error.to_string().contains("absent.pem"), "{error}");
}
