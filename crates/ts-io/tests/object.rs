// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests the backend `object` with an S3 server (moto, which also serves plain HTTP), with a proxy
//! that breaks connections, and with scripted web servers.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ts_io::conformance::{self, Fixture};
use ts_io::{
    Backend, BackendOptions, Completion, ErrorKind, ReadPath, ReadRequest, Registry, Source,
    completion_queue,
};
use ts_pool::{Budget, HostPool};

const BUCKET: &str = "weights";

/// A moto server, which is killed on drop.
struct Server {
    process: Child,
    address: SocketAddr,
}

impl Server {
    fn start() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let program = root.join(".venv/bin/moto_server");
        assert!(
            program.exists(),
            "moto_server is missing in .venv; run `cargo xtask ci`, or install moto[s3,server]"
        );
        // Nothing else is likely to take this port before moto_server does.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", &address.port().to_string()]);
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let this = Self { process, address };
        let began = Instant::now();
        while TcpStream::connect(address).is_err() {
            assert!(began.elapsed() < Duration::from_secs(60), "moto_server must start");
            std::thread::sleep(Duration::from_millis(50));
        }
        send(address, "PUT", &format!("/{BUCKET}"), b"");
        this
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sets the environment variables that configure S3 clients.
fn environment(address: SocketAddr) {
    // SAFETY: the only test of this file calls this function before it starts threads.
    unsafe {
        std::env::set_var("AWS_ENDPOINT_URL", format!("http://{address}"));
        std::env::set_var("AWS_ACCESS_KEY_ID", "test");
        std::env::set_var("AWS_SECRET_ACCESS_KEY", "test");
        std::env::set_var("AWS_REGION", "us-east-1");
    }
}

/// A bucket as a fixture of the conformance tests. `prefix` selects whether its objects are read
/// through S3 or plain HTTP.
struct Bucket {
    address: SocketAddr,
    prefix: String,
}

impl Fixture for Bucket {
    fn write(&self, name: &str, content: &[u8]) -> String {
        send(self.address, "PUT", &format!("/{BUCKET}/{name}"), content);
        format!("{}/{name}", self.prefix)
    }

    fn overwrite(&self, name: &str, content: &[u8]) {
        self.write(name, content);
    }

    fn replace(&self, name: &str, content: &[u8]) {
        self.write(name, content);
    }

    fn remove(&self, name: &str) {
        send(self.address, "DELETE", &format!("/{BUCKET}/{name}"), b"");
    }
}

/// Sends a request to moto, which needs no credentials. Objects become readable by everyone.
fn send(address: SocketAddr, method: &str, path: &str, body: &[u8]) {
    let mut stream = TcpStream::connect(address).unwrap();
    let len = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nx-amz-acl: public-read\r\nContent-Length: \
         {len}\r\n\
         Connection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 2"), "{method} {path}: {answer}");
}

/// A proxy that closes each connection after `limit` bytes of the response. Counts the bytes of
/// responses and the connections.
struct Breaker {
    address: SocketAddr,
    passed: Arc<AtomicU64>,
    connections: Arc<AtomicUsize>,
}

impl Breaker {
    fn start(server: SocketAddr, limit: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (passed, connections) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicUsize::new(0)));
        let (count, number) = (Arc::clone(&passed), Arc::clone(&connections));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, count) = (client.unwrap(), Arc::clone(&count));
                number.fetch_add(1, Ordering::SeqCst);
                let upstream = TcpStream::connect(server).unwrap();
                let (mut from, mut to) =
                    (client.try_clone().unwrap(), upstream.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
                std::thread::spawn(move || {
                    let copied = std::io::copy(&mut (&upstream).take(limit), &mut &client);
                    count.fetch_add(copied.unwrap_or(0), Ordering::SeqCst);
                    let _ = client.shutdown(std::net::Shutdown::Both);
                    let _ = upstream.shutdown(std::net::Shutdown::Both);
                });
            }
        });
        Self { address, passed, connections }
    }
}

struct Reader {
    backend: Box<dyn Backend>,
    done: std::sync::mpsc::Receiver<Completion>,
    pool: HostPool,
}

impl Reader {
    fn new(source: &Arc<Source>, timeout: Duration) -> Self {
        let (sink, done) = completion_queue();
        let options = BackendOptions::default().with_timeout(timeout);
        let choice =
            Registry::builtin().choose(Some("object"), std::slice::from_ref(source)).unwrap();
        let backend = choice.provider.create(&options, sink).unwrap();
        Self { backend, done, pool: HostPool::new(&Budget::new(16 << 20), 16 << 20).unwrap() }
    }

    fn read(&self, source: &Arc<Source>, offset: u64, len: usize) -> Completion {
        let buffer = self.pool.allocate(len).unwrap();
        self.backend.submit(ReadRequest::new(0, Arc::clone(source), offset, len, buffer)).unwrap();
        self.done.recv_timeout(Duration::from_secs(60)).expect("every read must complete")
    }
}

fn content(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8).collect()
}

/// All checks are in one test, because environment variables are global to the process.
#[test]
fn objects_conform_and_failures_are_reported() {
    let server = Server::start();
    environment(server.address);
    let s3 = Bucket { address: server.address, prefix: format!("s3://{BUCKET}") };
    let http =
        Bucket { address: server.address, prefix: format!("http://{}/{BUCKET}", server.address) };
    for bucket in [&s3, &http] {
        for name in ["object", "adaptive"] {
            let probe = Source::open(bucket.write("probe", b"there")).unwrap();
            let choice = Registry::builtin().choose(Some(name), &[probe]).unwrap();
            println!("{name} on {}", bucket.prefix);
            conformance::check(choice.provider.as_ref(), bucket);
            if name == "object" {
                conformance::check_with_faults(&choice.provider, bucket);
            }
        }
    }
    file_backends_refuse_objects(&s3);
    a_broken_transfer_resumes_where_it_broke(&server, &s3);
    errors_of_open_name_the_url(&s3);
    a_silent_server_causes_a_timeout();
    wrong_responses_are_errors();
    parts_are_joined_only_with_a_strong_etag();
}

fn file_backends_refuse_objects(bucket: &Bucket) {
    let source = Source::open(bucket.write("chosen", &content(10_000))).unwrap();
    assert!(source.is_remote());
    let choice = Registry::builtin().choose(None, std::slice::from_ref(&source)).unwrap();
    assert_eq!(choice.provider.name(), "adaptive");
    for name in ["uring", "direct", "buffered"]
        .into_iter()
        .filter(|n| Registry::builtin().names().contains(n))
    {
        let error =
            Registry::builtin().choose(Some(name), std::slice::from_ref(&source)).unwrap_err();
        assert!(error.to_string().contains("chosen"), "{error}");
    }
    let done = Reader::new(&source, Duration::from_secs(10)).read(&source, 17, 5000);
    assert_eq!(done.result.unwrap().paths, [(ReadPath::Network, 5000)]);
    assert!(done.buffers[0][..5000] == content(10_000)[17..][..5000]);
    let mut bytes = vec![0; 100];
    assert_eq!(source.read_at(9950, &mut bytes).unwrap(), 50);
    assert!(bytes[..50] == content(10_000)[9950..]);
}

fn a_broken_transfer_resumes_where_it_broke(server: &Server, bucket: &Bucket) {
    const LEN: usize = 4 << 20;
    bucket.write("broken", &content(LEN));
    let breaker = Breaker::start(server.address, 1_000_000);
    let source = Source::open(format!("http://{}/{BUCKET}/broken", breaker.address)).unwrap();
    let reader = Reader::new(&source, Duration::from_secs(60));
    let done = reader.read(&source, 0, LEN);
    assert_eq!(done.result.unwrap().bytes(), LEN);
    assert!(done.buffers[0][..LEN] == content(LEN));
    let connections = breaker.connections.load(Ordering::SeqCst);
    assert!(connections >= 5, "the transfer was not interrupted: {connections} connections");
    drop(reader);
    std::thread::sleep(Duration::from_millis(200));
    let passed = breaker.passed.load(Ordering::SeqCst) as usize;
    // A broken connection loses its headers and the bytes in socket buffers.
    println!("{passed} bytes sent for {LEN} bytes, over {connections} connections");
    assert!(passed < LEN + LEN / 4, "{passed} bytes sent for {LEN} bytes");
}

fn errors_of_open_name_the_url(bucket: &Bucket) {
    let error = Source::open(format!("{}/missing", bucket.prefix)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(error.to_string().contains("s3://weights/missing"), "{error}");
    for url in ["s3://", "gopher://host/file", "http://[", "s3://weights/key?versionId=1"] {
        let error = Source::open(url).unwrap_err();
        assert!(error.to_string().starts_with(url), "{error}");
    }
}

fn a_silent_server_causes_a_timeout() {
    let silent = Script::start(|request, mut client| {
        if request.starts_with("HEAD") {
            let head = "HTTP/1.1 200 OK\r\nContent-Length: 100000\r\nETag: \"one\"\r\n\r\n";
            client.write_all(head.as_bytes()).unwrap();
        } else {
            std::thread::sleep(Duration::from_secs(20));
        }
    });
    let source = Source::open(silent.url()).unwrap();
    let reader = Reader::new(&source, Duration::from_millis(300));
    let done = reader.read(&source, 0, 1000);
    assert_eq!(done.result.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(done.buffers.len(), 1, "the buffer must return, because nothing writes to it");
    let buffer = reader.pool.allocate(1000).unwrap();
    reader.backend.submit(ReadRequest::new(5, Arc::clone(&source), 0, 1000, buffer)).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    reader.backend.cancel(&|token| token == 5);
    let done = reader.done.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(done.result.unwrap_err().kind(), ErrorKind::Cancelled);
}

fn wrong_responses_are_errors() {
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 100000\r\nETag: \"one\"\r\n\r\n";
    let answers: [(&str, String, ErrorKind); 6] = [
        (
            "a range that overflows 64 bits",
            partial("bytes 0-18446744073709551615/100000", "one"),
            ErrorKind::Io,
        ),
        (
            "no version",
            partial("bytes 4096-5095/100000", "one").replace("ETag", "X-Tag"),
            ErrorKind::Changed,
        ),
        ("the whole object", format!("{head}{}", "x".repeat(100_000)), ErrorKind::Io),
        ("another range", partial("bytes 0-999/100000", "one"), ErrorKind::Io),
        ("another version", partial("bytes 4096-5095/100000", "two"), ErrorKind::Changed),
        ("another length", partial("bytes 4096-5095/90000", "one"), ErrorKind::Changed),
    ];
    for (what, answer, kind) in answers {
        let server = Script::start(move |request, mut client| {
            let text = if request.starts_with("HEAD") { head } else { &answer };
            let _ = client.write_all(text.as_bytes());
        });
        let source = Source::open(server.url()).unwrap();
        let done = Reader::new(&source, Duration::from_secs(20)).read(&source, 4096, 1000);
        let error = done.result.unwrap_err();
        assert_eq!(error.kind(), kind, "{what}: {error}");
        assert!(error.to_string().contains("/object"), "{what}: {error}");
    }
}

fn parts_are_joined_only_with_a_strong_etag() {
    // With `changes`, each response has another version. The first answers HEAD and has no body,
    // and the bodies of the next two are cut in half.
    let serve = |validator: &'static str, changes: bool| {
        let version = AtomicUsize::new(0);
        Script::start(move |request, mut client| {
            let request = request.to_lowercase();
            assert!(!request.contains("if-match"), "a weak ETag never matches: {request}");
            let range = request.lines().find_map(|line| line.strip_prefix("range: bytes="));
            let (begin, end) = range.map_or((0, 9999), |range| {
                let (begin, end) = range.split_once('-').unwrap();
                (begin.parse::<usize>().unwrap(), end.parse::<usize>().unwrap())
            });
            let len = end + 1 - begin;
            let number = if changes { version.fetch_add(1, Ordering::SeqCst) } else { 9 };
            let (body, shown) =
                (vec![b'0' + number as u8; len], if number < 3 { len / 2 } else { len });
            let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {len}\r\nContent-Range: bytes \
                 {begin}-{end}/10000\r\n\
                 {validator}\r\n\r\n"
            );
            let _ = client.write_all(head.as_bytes());
            if !request.starts_with("head") {
                let _ = client.write_all(&body[..shown]);
            }
        })
    };
    for (validator, changes) in
        [("ETag: W/\"same\"", false), ("Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT", true)]
    {
        let server = serve(validator, changes);
        let source = Source::open(server.url()).unwrap();
        let done = Reader::new(&source, Duration::from_secs(20)).read(&source, 0, 10_000);
        assert_eq!(done.result.unwrap().bytes(), 10_000, "{validator}");
        let bytes = &done.buffers[0][..10_000];
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{validator}: mixed versions");
    }
    let without_version = serve("X-Nothing: 1", false);
    let error = Source::open(without_version.url()).unwrap_err();
    assert!(error.to_string().contains("neither ETag nor Last-Modified"), "{error}");
}

fn partial(range: &str, etag: &str) -> String {
    format!(
        "HTTP/1.1 206 Partial Content\r\nContent-Length: 1000\r\nContent-Range: {range}\r\nETag: \
         \"{etag}\"\r\n\r\n{}",
        "y".repeat(1000)
    )
}

/// A server that passes each request to a closure. The closure sends the response, and the
/// connection is then closed.
struct Script {
    address: SocketAddr,
}

impl Script {
    fn start(answer: impl Fn(&str, TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answer = Arc::new(answer);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (mut client, answer) = (client.unwrap(), Arc::clone(&answer));
                std::thread::spawn(move || {
                    let mut request = Vec::new();
                    let mut byte = [0];
                    while !request.ends_with(b"\r\n\r\n") && matches!(client.read(&mut byte), Ok(1))
                    {
                        request.push(byte[0]);
                    }
                    answer(&String::from_utf8_lossy(&request), client);
                });
            }
        });
        Self { address }
    }

    fn url(&self) -> String {
        format!("http://{}/object", self.address)
    }
}
