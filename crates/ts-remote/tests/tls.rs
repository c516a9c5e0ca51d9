// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of links over TLS.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

mod common;
#[cfg(target_os = "linux")]
mod dispatch;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use ts_remote::{
    Bytes, Error, ErrorKind, Files, Identity, Link, Listener, RangeClient, RangeHandler, Refusal,
    RefusalKind, RemoteFile, Role, ServerOptions, Socket, TlsClient, TlsServer, serve,
};

use common::{both_ways, options, payload};

/// The PEM files of an authority and of a certificate that it signed.
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
fn both_ends_send_at_once_and_authenticate_each_other() {
    let (servers, clients) = (Pem::new("127.0.0.1"), Pem::new("me"));
    let client = servers.client(Some(&clients));
    let server = servers.server(Some(&clients));
    both_ways(
        listener(),
        |socket| socket.into_tls_client(&client),
        move |listener| listener.accept()?.into_tls_server(&server),
    );
}

/// Connects a client to a server. Returns the results of the client and of the server.
fn handshake(server: TlsServer, client: &TlsClient) -> [Result<(), Error>; 2] {
    let listener = listener();
    let address = listener.address().clone();
    let acceptor = thread::spawn(move || {
        let socket = listener.accept()?.into_tls_server(&server)?;
        Link::<Vec<u8>>::new(socket, Role::Acceptor, options()).map(drop)
    });
    let socket = Socket::connect(&address, options().idle_timeout)
        .and_then(|socket| socket.into_tls_client(client));
    let connected = socket
        .and_then(|socket| Link::<Vec<u8>>::new(socket, Role::Connector, options()))
        .map(drop);
    [connected, acceptor.join().unwrap()]
}

#[test]
fn untrusted_certificates_are_refused() {
    let (servers, clients, others) = (Pem::new("127.0.0.1"), Pem::new("me"), Pem::new("127.0.0.1"));
    let [client, server] = handshake(others.server(None), &servers.client(None));
    let error = client.unwrap_err();
    assert!(
        error.kind() == ErrorKind::Peer && error.to_string().contains("certificate"),
        "{error}"
    );
    assert!(server.is_err());
    let [client, _] = handshake(Pem::new("other.example").server(None), &servers.client(None));
    assert!(client.is_err());
    for own in [None, Some(&others)] {
        let [client, server] = handshake(servers.server(Some(&clients)), &servers.client(own));
        assert!(client.is_err() && server.is_err(), "{client:?}, {server:?}");
    }
    let [client, server] =
        handshake(servers.server(Some(&clients)), &servers.client(Some(&clients)));
    assert!(client.is_ok() && server.is_ok(), "{client:?}, {server:?}");
}

/// One file in memory.
struct OneFile(Bytes);

impl Files for OneFile {
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
fn a_range_server_reads_everything_that_tls_has_buffered() {
    let files = Pem::new("127.0.0.1");
    let (client, tls) = (files.client(None), files.server(None));
    let listener = listener();
    let address = listener.address().clone();
    let file_bytes = Bytes::from(payload(20 << 20, 3));
    let (content, stop) = (file_bytes.clone(), Arc::new(AtomicBool::new(false)));
    let stopped = Arc::clone(&stop);
    let server = thread::spawn(move || {
        let options = ServerOptions::default().with_tls(tls);
        let new_handler = |_: &str| RangeHandler::new(OneFile(content.clone()));
        serve(&listener, &options, &mut |_| stopped.load(Ordering::Relaxed), new_handler, |_, _| {})
            .unwrap()
    });
    let readers = (0..3u64).map(|reader| {
        let (address, client, file_bytes) = (address.clone(), client.clone(), file_bytes.clone());
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
                assert!(memory.unwrap() == file_bytes[offset as usize..offset as usize + len]);
            }
        })
    });
    readers.collect::<Vec<_>>().into_iter().for_each(|reader| reader.join().unwrap());
    stop.store(true, Ordering::Relaxed);
    let stats = server.join().unwrap();
    assert!(stats.accepted == 3 && stats.failed_handshakes == 0, "{stats:?}");
}

#[test]
fn errors_name_the_unusable_file() {
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

#[cfg(target_os = "linux")]
mod relays {
    use std::net::TcpStream;
    use std::thread;
    use std::time::{Duration, Instant};

    use ts_remote::{Dispatcher, Listener};

    use super::common::{both_ways, options, port};
    use super::dispatch::dispatch;
    use super::{Pem, listener};

    #[test]
    fn a_dispatcher_relays_decrypted_connections() {
        let files = Pem::new("127.0.0.1");
        let (client, server) = (files.client(None), files.server(None));
        let dispatcher = Dispatcher::new(options()).with_tls(server);
        let accept = move |listener: &Listener| dispatch(dispatcher, listener);
        both_ways(listener(), |socket| socket.into_tls_client(&client), accept);
    }

    /// Returns the number of relay threads of this process.
    fn relay_threads() -> usize {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let names = threads
            .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
        names.filter(|name| name.starts_with("tensorstream-re")).count()
    }

    #[test]
    fn dropping_a_pending_client_ends_its_relay() {
        let files = Pem::new("127.0.0.1");
        let listener = listener();
        let address = ("127.0.0.1", port(listener.address()));
        let short = options().with_idle_timeout(Duration::from_millis(300));
        let mut dispatcher = Dispatcher::new(short).with_tls(files.server(None));
        let connect =
            move || (0..300).map(|_| TcpStream::connect(address).unwrap()).collect::<Vec<_>>();
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
        while relay_threads() > 0 && since.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(20));
        }
        assert_eq!((failed, relay_threads()), (silent.len(), 0));
    }
}
