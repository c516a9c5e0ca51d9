// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a server over HTTP, for monitors: the pages /metrics and /healthz.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Error;

/// The most connections at a time. More are closed at once.
const MAX_CONNECTIONS: usize = 64;
/// How long a connection may take to send its request, and to take the answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The longest request, in bytes.
const MAX_REQUEST: usize = 8 << 10;

/// The state of a server.
pub(super) struct Status {
    /// Counters and gauges in the text format of Prometheus.
    pub(super) metrics: String,
    /// Why the server accepts no clients, if it does not.
    pub(super) refuses: Option<&'static str>,
}

/// Answers monitors on threads, until it is dropped.
pub(super) struct StatusServer {
    address: SocketAddr,
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl StatusServer {
    /// Begins to answer at HOST:PORT. Calls `status` for each request, on other threads.
    ///
    /// # Errors
    /// Returns an error if the address is invalid or cannot be used.
    pub(super) fn start(
        at: &str,
        status: impl Fn() -> Status + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let failed = |error: io::Error| {
            let reason = format!("cannot serve metrics at {at}: {error}; expected HOST:PORT");
            Error::from(ts_remote::Error::Misuse(reason))
        };
        let listener = TcpListener::bind(at).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let stops = Arc::new(AtomicBool::new(false));
        let (stopped, status) = (Arc::clone(&stops), Arc::new(status));
        let thread = std::thread::Builder::new().name("tensorstream-status".into());
        let thread = thread.spawn(move || accept(&listener, &stopped, &status)).map_err(failed)?;
        Ok(Self { address, stops, thread: Some(thread) })
    }
}

impl Drop for StatusServer {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Release);
        // The thread waits for a connection. If this one fails, it ends with the process.
        let woken = TcpStream::connect_timeout(&self.address, TIMEOUT).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
    }
}

fn accept<S: Fn() -> Status + Send + Sync + 'static>(
    listener: &TcpListener,
    stops: &AtomicBool,
    status: &Arc<S>,
) {
    let open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        if stops.load(Ordering::Acquire) {
            return;
        }
        let Ok(stream) = stream else {
            // The process may have too many open files.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        if open.fetch_add(1, Ordering::Relaxed) < MAX_CONNECTIONS {
            let (status, open) = (Arc::clone(status), Open(Arc::clone(&open)));
            let thread = std::thread::Builder::new().name("tensorstream-status".into());
            // If no thread can be started, the connection is closed.
            let _ = thread.spawn(move || {
                let _open = open;
                // An error means that the client has closed the connection, or is too slow.
                let _ = answer(stream, &*status);
            });
        } else {
            drop(Open(Arc::clone(&open)));
        }
    }
}

/// Counts an open connection until it is dropped.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Answers one request, and closes the connection.
fn answer(mut stream: TcpStream, status: &dyn Fn() -> Status) -> io::Result<()> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    let request = request(&mut stream)?;
    let mut words = request.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split('?').next().unwrap_or_default();
    let (code, kind, text) = match (method, path) {
        ("GET" | "HEAD", "/metrics") => ("200 OK", "text/plain; version=0.0.4", status().metrics),
        ("GET" | "HEAD", "/healthz") => match status().refuses {
            None => ("200 OK", "text/plain", "ok\n".into()),
            Some(reason) => ("503 Service Unavailable", "text/plain", format!("{reason}\n")),
        },
        ("GET" | "HEAD", _) => {
            ("404 Not Found", "text/plain", "expected /metrics or /healthz\n".into())
        }
        _ => ("405 Method Not Allowed", "text/plain", "expected GET or HEAD\n".into()),
    };
    let allow = if code.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {code}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {}\r\n{allow}\
         Connection: close\r\n\r\n",
        text.len()
    );
    stream.write_all(head.as_bytes())?;
    if method == "HEAD" { Ok(()) } else { stream.write_all(text.as_bytes()) }
}

/// Reads a request to the end of its head, and returns its first line.
fn request(stream: &mut TcpStream) -> io::Result<String> {
    let (end, mut head) = (Instant::now() + TIMEOUT, Vec::new());
    while !head.windows(4).any(|four| four == b"\r\n\r\n") {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || head.len() >= MAX_REQUEST {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut piece = [0; 1024];
        let read = stream.read(&mut piece)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        head.extend_from_slice(&piece[..read]);
    }
    let line = head.split(|&byte| byte == b'\r').next().unwrap_or_default();
    Ok(String::from_utf8_lossy(line).into_owned())
}
