// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoints on a weight server, which runs in a thread of the test.

#![allow(clippy::unwrap_used)] // in a test a panic is the report

#[allow(dead_code)] // other tests use all of it
mod common;

use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{content, plain, quiet, write};
use tensorstream::io::ErrorKind;
use tensorstream::orchestrator::{EngineConfig, UnitId};
use tensorstream::remote::{
    Address, ConnectionOptions, RangeClient, RemoteFile, ServerOptions, ServerStats, Socket,
};
use tensorstream::{
    Checkpoint, Error, FetchOptions, LoadOptions, ServeOptions, convert, fetch, serve_weights,
};

/// A weight server in a thread. Dropping it stops the server.
struct Server {
    address: Address,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<ServerStats>>,
}

impl Server {
    fn start(directory: &Path, address: &str, options: ServeOptions) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (directory, address, stopped) =
            (directory.to_path_buf(), address.parse().unwrap(), Arc::clone(&stop));
        let (sender, receiver) = channel();
        let thread = std::thread::spawn(move || {
            let mut stop = |_: &_| stopped.load(Ordering::Relaxed);
            let on_listening = |address: &Address| sender.send(address.clone()).unwrap();
            serve_weights(&directory, &address, &options, &mut stop, on_listening, |_, _| {})
                .unwrap()
        });
        Self { address: receiver.recv().unwrap(), stop, thread: Some(thread) }
    }

    fn url(&self, name: &str) -> String {
        format!("ts://{}/{name}", self.address)
    }

    fn end(mut self) -> ServerStats {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A client that reads ranges of one file.
struct Reader {
    client: RangeClient<Vec<u8>>,
    file: RemoteFile,
}

impl Reader {
    fn of(server: &Server, name: &str) -> Self {
        let socket = Socket::connect(&server.address, Duration::from_secs(10)).unwrap();
        let mut client = RangeClient::new(socket, ConnectionOptions::default()).unwrap();
        let file = client.open(name).unwrap().unwrap();
        Self { client, file }
    }

    fn read(&mut self) -> Result<(), tensorstream::remote::Error> {
        let mut memory = Some(vec![0; self.file.len.min(1 << 20) as usize]);
        self.client.read(self.file.id, 0, &mut memory).map(|read| read.unwrap())
    }
}

const ANY: &str = "127.0.0.1:0";
const COUNT: usize = 9;

fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    write(&directory.path().join("model.safetensors"), COUNT);
    directory
}

fn assert_same(checkpoint: &Checkpoint) {
    assert_eq!(checkpoint.catalog().tensors().len(), COUNT);
    for i in 0..COUNT {
        let entry = checkpoint.catalog().require(&format!("t{i}")).unwrap();
        let mut bytes = vec![0; content(i).len()];
        checkpoint.read(&[entry.range()], &mut bytes).unwrap();
        assert_eq!(bytes, content(i));
    }
}

#[test]
fn a_remote_checkpoint_reads_loads_and_streams() {
    let directory = directory();
    let server = Server::start(directory.path(), ANY, ServeOptions::default());
    // Opens the checkpoint as a directory, and as a file of each format.
    assert_same(&Checkpoint::open(server.url("")).unwrap());
    convert(
        server.url("model.safetensors").as_ref(),
        &directory.path().join("copy.ts"),
        plain(),
        &mut quiet,
    )
    .unwrap();
    for name in ["model.safetensors", "copy.ts"] {
        let checkpoint = Checkpoint::open(server.url(name)).unwrap();
        assert_same(&checkpoint);
        let loaded = checkpoint.load(LoadOptions::default(), &mut quiet).unwrap();
        assert_eq!(loaded.len(), COUNT);
        let units = checkpoint.units_by_module();
        let engine = checkpoint.engine(units, EngineConfig::with_budget(16 << 20)).unwrap();
        for unit in 0..engine.unit_count() as u32 {
            engine.acquire(None, UnitId(unit)).unwrap();
        }
    }
    let stats = server.end();
    assert!(stats.accepted > 0 && stats.failed_handshakes == 0, "{stats:?}");
}

#[test]
fn clients_reconnect_and_detect_changed_files() {
    let directory = directory();
    let server = Server::start(directory.path(), ANY, ServeOptions::default());
    let checkpoint = Checkpoint::open(server.url("model.safetensors")).unwrap();
    let address = server.address.to_string();
    server.end();
    let server = Server::start(directory.path(), &address, ServeOptions::default());
    assert_same(&checkpoint);
    write(&directory.path().join("new.safetensors"), COUNT + 1);
    std::fs::rename(
        directory.path().join("new.safetensors"),
        directory.path().join("model.safetensors"),
    )
    .unwrap();
    // The server has the other file open.
    assert_same(&checkpoint);
    server.end();
    let server = Server::start(directory.path(), &address, ServeOptions::default());
    let entry = checkpoint.catalog().require("t3").unwrap().range();
    let changed = checkpoint.read(&[entry], &mut vec![0; entry.len as usize]).unwrap_err();
    assert!(
        matches!(&changed, Error::Io(error) if error.kind() == ErrorKind::Changed),
        "{changed}"
    );
    server.end();
    let begin = Instant::now();
    let gone = checkpoint.read(&[entry], &mut vec![0; entry.len as usize]).unwrap_err();
    assert!(gone.to_string().contains("ts://"), "{gone}");
    assert!(begin.elapsed() < Duration::from_secs(30));
}

#[test]
fn names_outside_the_directory_and_missing_tokens_are_refused() {
    let directory = directory();
    std::fs::create_dir(directory.path().join("inside")).unwrap();
    let server = Server::start(&directory.path().join("inside"), ANY, ServeOptions::default());
    for name in ["../model.safetensors", "/etc/passwd", "a/../../model.safetensors", "none.ts"] {
        let absent = Checkpoint::open(server.url(name)).unwrap_err();
        assert!(
            matches!(&absent, Error::Io(error) if error.kind() == ErrorKind::NotFound)
                || name == "/etc/passwd",
            "{name}: {absent}"
        );
        assert!(!absent.to_string().contains(directory.path().to_str().unwrap()), "{absent}");
    }
    for wrong in ["ts://host/x.ts", "ts://:1/x.ts", "ts://127.0.0.1:1"] {
        assert!(Checkpoint::open(wrong).is_err(), "{wrong}");
    }
    let connection = ServerOptions::default().connection.with_token("sesame".to_string());
    let server = ServerOptions::default().with_connection(connection);
    let options = ServeOptions::default().with_server(server);
    let guarded = Server::start(directory.path(), ANY, options.clone());
    let refused = Checkpoint::open(guarded.url("model.safetensors")).unwrap_err();
    assert!(refused.to_string().contains("token"), "{refused}");

    let everywhere = "0.0.0.0:0".parse().unwrap();
    let open = serve_weights(
        directory.path(),
        &everywhere,
        &ServeOptions::default(),
        &mut |_| true,
        |_| {},
        |_, _| {},
    );
    assert!(open.unwrap_err().to_string().contains("token"));
    serve_weights(directory.path(), &everywhere, &options, &mut |_| true, |_| {}, |_, _| {})
        .unwrap();
}

#[test]
fn a_server_with_little_memory_serves_several_clients() {
    let directory = directory();
    let server =
        Server::start(directory.path(), ANY, ServeOptions::default().with_memory_bytes(4 << 20));
    let checkpoint = Checkpoint::open(server.url("model.safetensors")).unwrap();
    std::thread::scope(|scope| {
        (0..4).for_each(|_| drop(scope.spawn(|| assert_same(&checkpoint))));
    });
}

#[test]
fn ten_thousand_silent_clients_do_not_block_others() {
    let directory = directory();
    let server = Server::start(directory.path(), ANY, ServeOptions::default());
    let address = server.address.to_string();
    let checkpoint = Checkpoint::open(server.url("model.safetensors")).unwrap();
    let mut clients = Vec::new();
    for number in 0..10_000 {
        let mut client = TcpStream::connect(&address).unwrap();
        if number % 2 == 0 {
            // Sends one byte, and then nothing.
            let _ = std::io::Write::write_all(&mut client, b"T");
        }
        clients.push(client);
        // Stays below the limit of open files of this process.
        if clients.len() > 300 {
            clients.remove(0);
        }
        if number % 1000 == 999 {
            assert_same(&checkpoint);
        }
    }
    assert_same(&Checkpoint::open(server.url("model.safetensors")).unwrap());
    let stats = server.end();
    assert!(stats.accepted >= 10_000, "{stats:?}");
}

/// Returns options to serve the fetched files.
fn serve_at(address: &str) -> FetchOptions {
    FetchOptions::default().with_serve(address.parse().unwrap(), ServeOptions::default())
}

/// Returns the reason why a name is not served, or `None` if it is served.
#[cfg(unix)]
fn refusal(server: &Server, name: &str) -> Option<String> {
    Checkpoint::open(server.url(name)).err().map(|error| error.to_string())
}

#[cfg(unix)]
#[test]
fn hidden_files_and_links_to_outside_are_not_served() {
    let outside = tempfile::tempdir().unwrap();
    write(&outside.path().join("secret.safetensors"), 3);
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    write(&at("model.safetensors"), 3);
    for name in [
        ".hidden.safetensors",
        ".git/x.safetensors",
        "sub/.x.safetensors",
        "b.partial/x.safetensors",
    ] {
        std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        std::fs::copy(at("model.safetensors"), at(name)).unwrap();
    }
    for (target, name) in [
        (outside.path().join("secret.safetensors"), "link.safetensors"),
        (outside.path().to_path_buf(), "dir"),
        ("model.safetensors".into(), "own.safetensors"),
    ] {
        std::os::unix::fs::symlink(target, at(name)).unwrap();
    }
    let server = Server::start(directory.path(), ANY, ServeOptions::default());
    for name in ["model.safetensors", "own.safetensors"] {
        assert_eq!(refusal(&server, name), None);
    }
    for name in [
        ".hidden.safetensors",
        ".git/x.safetensors",
        "sub/.x.safetensors",
        "b.partial/x.safetensors",
    ] {
        let why = refusal(&server, name).unwrap_or_else(|| panic!("{name} is served"));
        assert!(why.contains("is not a file of this server"), "{why}");
    }
    for name in ["link.safetensors", "dir/secret.safetensors"] {
        let why = refusal(&server, name).unwrap_or_else(|| panic!("{name} is served"));
        assert!(
            why.contains("link to a target outside of the served directory; to allow this,"),
            "{why}"
        );
        assert!(!why.contains(&*outside.path().to_string_lossy()), "{why}");
    }
    let fetched = tempfile::tempdir().unwrap();
    let done =
        fetch(&server.url(""), fetched.path(), &FetchOptions::default(), &mut quiet).unwrap();
    assert_eq!(done.files, 2);
    drop(done);
    server.end();

    let follows = ServeOptions::default().with_follow_symlinks(true);
    let server = Server::start(directory.path(), ANY, follows);
    for name in ["link.safetensors", "dir/secret.safetensors"] {
        assert_eq!(refusal(&server, name), None);
    }
    assert!(refusal(&server, ".hidden.safetensors").is_some());
    server.end();
}

#[test]
fn in_a_broadcast_the_server_sends_the_files_once() {
    let directory = tempfile::tempdir().unwrap();
    let large: Vec<u8> = (0..60_000_000u32).map(|i| (i / 1000) as u8).collect();
    std::fs::create_dir(directory.path().join("sub")).unwrap();
    std::fs::write(directory.path().join("sub/large"), &large).unwrap();
    std::fs::write(directory.path().join("empty"), b"").unwrap();
    std::fs::write(directory.path().join(".hidden"), b"secret").unwrap();
    // An unfinished file, and a link without a target.
    std::fs::write(directory.path().join("empty.partial"), b"not yet").unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink("nothing", directory.path().join("dangling")).unwrap();
    write(&directory.path().join("model.safetensors"), COUNT);
    let server = Server::start(directory.path(), ANY, ServeOptions::default());
    let url = server.url("");
    let fetching: Vec<_> = (0..4)
        .map(|_| {
            let url = url.clone();
            std::thread::spawn(move || {
                let to = tempfile::tempdir().unwrap();
                let options = serve_at(ANY);
                let fetched = fetch(&url, to.path(), &options, &mut quiet).unwrap();
                (to, fetched)
            })
        })
        .collect();
    let done: Vec<_> = fetching.into_iter().map(|thread| thread.join().unwrap()).collect();
    for (to, fetched) in &done {
        assert_eq!(fetched.files, 3);
        assert_eq!(std::fs::read(to.path().join("sub/large")).unwrap(), large);
        assert_eq!(std::fs::read(to.path().join("empty")).unwrap(), b"");
        assert!(!to.path().join(".hidden").exists());
        assert_same(&Checkpoint::open(to.path()).unwrap());
        let left = std::fs::read_dir(to.path()).unwrap().flatten();
        assert!(
            left.map(|entry| entry.file_name())
                .all(|name| !name.to_string_lossy().contains("partial"))
        );
    }
    assert_eq!(
        done.iter().filter(|(_, fetched)| fetched.from.is_none()).count(),
        1,
        "one peer reads from the server"
    );
    drop(done);
    let sent = server.end().sent_bytes;
    assert!(sent < 80_000_000, "{sent} bytes sent by the server, of 60 MB for each of four");
}

#[test]
fn a_fetch_survives_the_loss_of_its_peer() {
    let directory = tempfile::tempdir().unwrap();
    let large: Vec<u8> = (0..100_000_000u32).map(|i| (i / 777) as u8).collect();
    std::fs::write(directory.path().join("large"), &large).unwrap();
    let server = Server::start(directory.path(), ANY, ServeOptions::default());
    let url = server.url("large");
    let serve = || serve_at(ANY);
    let (begun, has_begun) = channel();
    let first = std::thread::spawn({
        let (url, options) = (url.clone(), serve());
        move || {
            let to = tempfile::tempdir().unwrap();
            // Lets the second fetch begin after the first bytes, and stops after a quarter of the
            // file.
            let mut has_sent = false;
            fetch(&url, to.path(), &options, &mut |progress| {
                if progress.done > 0 && !std::mem::replace(&mut has_sent, true) {
                    begun.send(()).unwrap();
                }
                std::thread::sleep(Duration::from_millis(5));
                progress.done > progress.total / 4
            })
        }
    });
    has_begun.recv().unwrap();
    let to = tempfile::tempdir().unwrap();
    let fetched = fetch(&url, to.path(), &serve(), &mut quiet).unwrap();
    assert_eq!(std::fs::read(to.path().join("large")).unwrap(), large);
    assert_eq!(fetched.from, None, "the rest was read from the server");
    // The first fetch may have been fast enough to finish.
    let _ = first.join().unwrap();

    let missing = fetch(&server.url("nothing"), to.path(), &serve(), &mut quiet).unwrap_err();
    assert!(
        matches!(&missing, Error::Io(error) if error.kind() == ErrorKind::NotFound),
        "{missing}"
    );
    let stopped = fetch(&url, to.path(), &FetchOptions::default(), &mut |_| true).unwrap_err();
    assert!(matches!(stopped, Error::Interrupted), "{stopped}");
    assert_eq!(std::fs::read_dir(to.path()).unwrap().count(), 1, "no partial file is left");
    let public = serve_at("0.0.0.0:0");
    assert!(
        fetch(&url, to.path(), &public, &mut quiet)
            .unwrap_err()
            .to_string()
            .contains("other machines can reach")
    );
}

#[test]
fn a_stopped_server_finishes_transfers_and_accepts_no_more() {
    let directory = directory();
    let server = Server::start(directory.path(), ANY, ServeOptions::default());
    let (mut reader, mut idle) =
        (Reader::of(&server, "model.safetensors"), Reader::of(&server, "model.safetensors"));
    idle.read().unwrap();
    server.stop.store(true, Ordering::Relaxed);
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(1500) {
        reader.read().unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    let late = Socket::connect(&server.address, Duration::from_secs(1))
        .and_then(|socket| RangeClient::<Vec<u8>>::new(socket, quick()).map(drop));
    assert!(late.is_err(), "a connection was accepted after the stop");
    drop(reader);
    // Without transfers, the server ends long before the grace period.
    assert!(server.end().sent_bytes > 0);
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    let closed = idle.read().unwrap_err();
    assert!(closed.to_string().contains("the server was stopped"), "{closed}");
}

fn quick() -> ConnectionOptions {
    ConnectionOptions::default().with_idle_timeout(Duration::from_millis(300))
}

#[test]
fn transfers_are_cut_after_the_grace_period() {
    let directory = directory();
    let server = ServerOptions::default().with_grace_period(Duration::from_millis(700));
    let server = Server::start(directory.path(), ANY, ServeOptions::default().with_server(server));
    let mut reader = Reader::of(&server, "model.safetensors");
    server.stop.store(true, Ordering::Relaxed);
    let began = Instant::now();
    while reader.read().is_ok() {
        assert!(began.elapsed() < Duration::from_secs(10), "the transfer was not cut");
    }
    assert!(began.elapsed() > Duration::from_millis(600), "{:?}", began.elapsed());
    server.end();
}

/// Fetches everything to a new directory, and returns the error as text.
#[cfg(unix)]
fn fetch_error(url: &str, directory: &Path) -> String {
    fetch(url, directory, &FetchOptions::default(), &mut quiet).unwrap_err().to_string()
}

#[cfg(unix)]
#[test]
fn fetched_files_stay_in_their_directory() {
    let (served, outside) = (directory(), tempfile::tempdir().unwrap());
    let server = Server::start(served.path(), ANY, ServeOptions::default());
    let precious = outside.path().join("precious");
    std::fs::write(&precious, "mine").unwrap();
    let partial = "model.safetensors.partial";
    let link: fn(&Path, &Path) = |from, to| std::os::unix::fs::symlink(from, to).unwrap();
    let name: fn(&Path, &Path) = |from, to| std::fs::hard_link(from, to).unwrap();
    for make in [link, name] {
        let target = tempfile::tempdir().unwrap();
        make(&precious, &target.path().join(partial));
        let error = fetch_error(&server.url(""), target.path());
        assert!(error.contains(partial) && error.contains("remove"), "{error}");
        // A link at the name itself is replaced.
        std::fs::remove_file(target.path().join(partial)).unwrap();
        make(&precious, &target.path().join("model.safetensors"));
        fetch(&server.url(""), target.path(), &FetchOptions::default(), &mut quiet).unwrap();
        assert_same(&Checkpoint::open(target.path()).unwrap());
        assert_eq!(std::fs::read_dir(target.path()).unwrap().count(), 1);
    }
    assert_eq!(std::fs::read_to_string(precious).unwrap(), "mine");
}

#[cfg(unix)]
#[test]
fn what_a_server_does_not_offer_is_not_fetched() {
    let (served, target) = (directory(), tempfile::tempdir().unwrap());
    for name in ["empty", "hidden/.git", "target"] {
        std::fs::create_dir_all(served.path().join(name)).unwrap();
    }
    std::fs::write(served.path().join("hidden/.git/config"), "").unwrap();
    let made = std::process::Command::new("mkfifo").arg(served.path().join("pipe")).status();
    assert!(made.unwrap().success());
    let server = Server::start(served.path(), ANY, ServeOptions::default());
    for (name, reason) in [
        ("empty", "no files"),
        ("hidden", "no files"),
        ("hidden/.git/config", "not a file"),
        ("pipe", "not a regular file"),
        ("none", "does not exist"),
    ] {
        let error = fetch_error(&server.url(name), target.path());
        assert!(error.contains(reason), "{name}: {error}");
    }
    assert_eq!(std::fs::read_dir(target.path()).unwrap().count(), 0);
}
