// SPDX-License-Identifier: MIT OR Apache-2.0
//! Links under TLS: what is sent arrives, and only those are let in who may be.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

mod together;

use std::path::PathBuf;
use std::thread;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use ts_remote::{Error, ErrorKind, Identity, Link, Listener, Role, Socket, TlsClient, TlsServer};

use together::{both_ways, options};

/// An authority, and a certificate of its for a name.
struct Files {
    directory: tempfile::TempDir,
}

impl Files {
    fn new(name: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority_key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = params.self_signed(&authority_key).unwrap();
        let key = KeyPair::generate().unwrap();
        let issuer = Issuer::from_params(&params, &authority_key);
        let leaf = CertificateParams::new(vec![name.to_string()]).unwrap().signed_by(&key, &issuer).unwrap();
        let write = |file: &str, text: String| std::fs::write(directory.path().join(file), text).unwrap();
        write("ca.pem", authority.pem());
        write("cert.pem", leaf.pem());
        write("key.pem", key.serialize_pem());
        Self { directory }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn server(&self, clients: Option<&Files>) -> TlsServer {
        let (certificates, key) = (self.file("cert.pem"), self.file("key.pem"));
        let clients = clients.map(|files| files.file("ca.pem"));
        TlsServer::new(Identity { certificates: &certificates, key: &key }, clients.as_deref()).unwrap()
    }

    fn client(&self, own: Option<&Files>) -> TlsClient {
        let (certificates, key) = own.map(|own| (own.file("cert.pem"), own.file("key.pem"))).unzip();
        let identity = certificates.as_deref().zip(key.as_deref());
        let identity = identity.map(|(certificates, key)| Identity { certificates, key });
        TlsClient::new(&self.file("ca.pem"), identity).unwrap()
    }
}

fn listener() -> Listener {
    Listener::bind(&"127.0.0.1:0".parse().unwrap(), options().timeout).unwrap()
}

#[test]
fn both_ends_send_at_once_and_know_each_other() {
    let (servers, clients) = (Files::new("127.0.0.1"), Files::new("me"));
    let client = servers.client(Some(&clients));
    let server = servers.server(Some(&clients));
    both_ways(
        listener(),
        |socket| socket.into_tls_client(&client),
        move |socket| socket.into_tls_server(&server),
    );
}

/// What either end says of the other.
fn meet(server: TlsServer, client: &TlsClient) -> [Result<(), Error>; 2] {
    let listener = listener();
    let address = listener.address().clone();
    let other = thread::spawn(move || {
        let socket = listener.accept()?.into_tls_server(&server)?;
        Link::<Vec<u8>>::new(socket, Role::Acceptor, options()).map(drop)
    });
    let socket =
        Socket::connect(&address, options().timeout).and_then(|socket| socket.into_tls_client(client));
    let met = socket.and_then(|socket| Link::<Vec<u8>>::new(socket, Role::Connector, options())).map(drop);
    [met, other.join().unwrap()]
}

#[test]
fn who_cannot_be_trusted_is_turned_away() {
    let (servers, clients, others) = (Files::new("127.0.0.1"), Files::new("me"), Files::new("127.0.0.1"));
    let [ours, theirs] = meet(others.server(None), &servers.client(None));
    let ours = ours.unwrap_err();
    assert!(ours.kind() == ErrorKind::Peer && ours.to_string().contains("certificate"), "{ours}");
    assert!(theirs.is_err());
    let [ours, _] = meet(Files::new("elsewhere").server(None), &servers.client(None));
    assert!(ours.is_err());
    for own in [None, Some(&others)] {
        let [ours, theirs] = meet(servers.server(Some(&clients)), &servers.client(own));
        assert!(ours.is_err() && theirs.is_err(), "{ours:?}, {theirs:?}");
    }
    let [ours, theirs] = meet(servers.server(Some(&clients)), &servers.client(Some(&clients)));
    assert!(ours.is_ok() && theirs.is_ok(), "{ours:?}, {theirs:?}");
}

#[test]
fn files_that_are_wrong_are_named() {
    let files = Files::new("127.0.0.1");
    let (key, absent) = (files.file("key.pem"), files.file("absent.pem"));
    for wrong in [&key, &absent] {
        let error = TlsClient::new(wrong, None).unwrap_err();
        assert!(error.to_string().contains(wrong.to_str().unwrap()), "{error}");
    }
    let error =
        TlsServer::new(Identity { certificates: &files.file("cert.pem"), key: &absent }, None).unwrap_err();
    assert!(error.to_string().contains("absent.pem"), "{error}");
}
