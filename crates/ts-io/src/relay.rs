// SPDX-License-Identifier: MIT OR Apache-2.0
//! Passes sources to a process that can neither open files nor connect sockets.

// parking_lot keeps one list of waiting threads for all locks of a process, and the process that
// reads through a relay may be forked (see threads.rs), so this file uses the locks of std.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ts_pool::Buffer;

use crate::remote::RemoteSource;
use crate::source::Fingerprint;
use crate::{Error, ErrorKind, Source};

/// The most bytes of one request. Longer reads use several.
const MAX_REQUEST: usize = 4 << 20;
/// The longest message of an error, in bytes.
const MAX_MESSAGE: usize = 4096;
/// The longest timeout that a client can request.
const MAX_TIMEOUT: Duration = Duration::from_secs(600);
/// The longest time that a client may take to receive an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How much later than the read the wait for its answer times out.
const MARGIN: Duration = Duration::from_secs(5);

/// A request: the number of a source, a length, an offset, and a timeout in milliseconds. A length
/// of 0 means that the source is no longer needed.
const REQUEST_LEN: usize = 24;
/// The header of an answer: a code, and the length of the bytes or of the message that follow.
const ANSWER_LEN: usize = 8;

/// The codes of answers. All others than `READ` are errors.
mod code {
    pub(super) const READ: u32 = 0;
    pub(super) const CHANGED: u32 = 1;
    pub(super) const TIMED_OUT: u32 = 2;
    pub(super) const NOT_FOUND: u32 = 3;
    pub(super) const PERMISSION_DENIED: u32 = 4;
    pub(super) const FAILED: u32 = 5;
}

/// Reads sources, such as objects on a network, for one other process.
///
/// The other process needs a few connected Unix sockets, and reads through them with
/// [`RelayClient`]. Each socket serves one read at a time. A read needs memory of at most 8 MiB
/// here, so the number of sockets also limits the memory.
///
/// ```
/// use std::os::unix::net::UnixStream;
/// use std::sync::Arc;
/// use std::thread;
/// use ts_io::{Relay, RelayClient, Source};
///
/// let relay = Arc::new(Relay::new(16));
/// let source = Source::in_memory("bytes", *b"0123456789");
/// let number = relay.add(Arc::clone(&source))?;
/// let (here, there) = UnixStream::pair()?;
/// let serving = thread::spawn(move || relay.serve(here));
///
/// // In the other process:
/// let client = Arc::new(RelayClient::new(vec![there]));
/// let relayed = client.source(number, "bytes", 10);
/// let mut bytes = [0; 3];
/// relayed.read_at(4, &mut bytes)?;
/// assert_eq!(&bytes, b"456");
/// drop((client, relayed));
/// serving.join().expect("the thread does not panic")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Relay {
    max_sources: usize,
    sources: Mutex<Sources>,
}

/// Sources by their numbers, and the number of the last one.
#[derive(Debug, Default)]
struct Sources(HashMap<u32, Arc<Source>>, u32);

impl Relay {
    /// Creates a relay of at most `max_sources` sources at a time.
    pub fn new(max_sources: usize) -> Self {
        Self { max_sources, sources: Mutex::default() }
    }

    /// Adds a source, which the other process can read until it drops its own. Returns the number
    /// for [`RelayClient::source`].
    ///
    /// # Errors
    /// Returns [`Error::Open`] if there are too many sources.
    pub fn add(&self, source: Arc<Source>) -> Result<u32, Error> {
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        let Sources(open, last) = &mut *sources;
        if open.len() >= self.max_sources {
            let path = source.path().to_path_buf();
            let what = format!("{} other sources are open; close some of them", open.len());
            return Err(Error::Open { path, source: io::Error::other(what).into() });
        }
        *last = last.wrapping_add(1);
        while open.contains_key(last) {
            *last = last.wrapping_add(1);
        }
        open.insert(*last, source);
        Ok(*last)
    }

    /// Answers requests until the other end closes. Blocks.
    ///
    /// # Errors
    /// Returns an error if a request is invalid, or if the other process does not take an answer
    /// within 60 s.
    pub fn serve(&self, mut channel: UnixStream) -> io::Result<()> {
        channel.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        // It is used again, because the system zeroes new memory.
        let mut memory = Vec::new();
        loop {
            let mut request = [0; REQUEST_LEN];
            match channel.read_exact(&mut request) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                done => done?,
            }
            let request = Request::decode(&request);
            if request.len == 0 {
                self.sources
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
                    .remove(&request.source);
                continue;
            }
            if request.len > MAX_REQUEST {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!(
                        "invalid request: expected at most {MAX_REQUEST} bytes, got {}",
                        request.len
                    ),
                ));
            }
            if memory.len() < request.len {
                memory.resize(request.len, 0);
            }
            match self.read(&request, &mut memory[..request.len]) {
                Ok(len) => answer(&mut channel, code::READ, &memory[..len])?,
                Err((code, message)) => {
                    let message = message.as_bytes();
                    answer(&mut channel, code, &message[..message.len().min(MAX_MESSAGE)])?;
                }
            }
        }
    }

    fn read(&self, request: &Request, bytes: &mut [u8]) -> Result<usize, (u32, String)> {
        let sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        let source = sources.0.get(&request.source).map(Arc::clone);
        drop(sources);
        let Some(source) = source else {
            return Err((code::FAILED, format!("source {} is not open", request.source)));
        };
        let read = source
            .read_at_within(request.offset, bytes, request.timeout)
            .and_then(|read| source.verify(request.offset).map(|()| read));
        read.map_err(|error| code_of(&error))
    }
}

fn answer(channel: &mut UnixStream, code: u32, bytes: &[u8]) -> io::Result<()> {
    let len = u32::try_from(bytes.len()).expect("answers are shorter than 4 GiB");
    let mut header = [0; ANSWER_LEN];
    header[..4].copy_from_slice(&code.to_le_bytes());
    header[4..].copy_from_slice(&len.to_le_bytes());
    channel.write_all(&header)?;
    channel.write_all(bytes)
}

/// Returns the code and the message of a failure. The other process adds the path and the range.
fn code_of(error: &Error) -> (u32, String) {
    let code = match error.kind() {
        ErrorKind::NotFound => code::NOT_FOUND,
        ErrorKind::PermissionDenied => code::PERMISSION_DENIED,
        ErrorKind::Changed => code::CHANGED,
        ErrorKind::TimedOut => code::TIMED_OUT,
        _ => code::FAILED,
    };
    let message = match error {
        Error::Changed { what, .. } => what.clone(),
        Error::Open { source, .. } | Error::Read { source, .. } => source.to_string(),
        other => other.to_string(),
    };
    (code, message)
}

#[derive(Debug, PartialEq, Eq)]
struct Request {
    source: u32,
    len: usize,
    offset: u64,
    timeout: Duration,
}

impl Request {
    fn encode(&self) -> [u8; REQUEST_LEN] {
        let mut bytes = [0; REQUEST_LEN];
        bytes[..4].copy_from_slice(&self.source.to_le_bytes());
        bytes[4..8].copy_from_slice(&(self.len as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..].copy_from_slice(&(self.timeout.as_millis() as u64).to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; REQUEST_LEN]) -> Self {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        Self {
            source: word(0),
            len: word(4) as usize,
            offset: long(8),
            timeout: Duration::from_millis(long(16)).min(MAX_TIMEOUT),
        }
    }
}

/// Reads the sources of a [`Relay`] in another process. Threads can share it.
pub struct RelayClient {
    channels: Mutex<Channels>,
    freed: Condvar,
}

/// The channels that no read uses, and the number of all that work.
struct Channels(Vec<UnixStream>, usize);

impl fmt::Debug for RelayClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayClient").finish_non_exhaustive()
    }
}

impl RelayClient {
    /// Creates a client of the relay that serves the other ends of these sockets.
    pub fn new(channels: Vec<UnixStream>) -> Self {
        let count = channels.len();
        Self { channels: Mutex::new(Channels(channels, count)), freed: Condvar::new() }
    }

    /// Returns the source that the relay has [added](Relay::add) with this number. `name` and `len`
    /// are its path or URL, and its length in bytes.
    pub fn source(
        self: &Arc<Self>,
        number: u32,
        name: impl Into<PathBuf>,
        len: u64,
    ) -> Arc<Source> {
        let name = name.into();
        let reader = Relayed { client: Arc::clone(self), number, name: name.clone(), len };
        Source::remote(name, Fingerprint::default().with_len(len), Arc::new(reader))
    }

    /// Takes a channel that no read uses. Waits for one for at most `timeout`.
    fn take(&self, timeout: Duration) -> Result<UnixStream, io::Error> {
        let channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |channels: &mut Channels| channels.0.is_empty() && channels.1 > 0;
        let waited = self.freed.wait_timeout_while(channels, timeout, waits);
        let (mut channels, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match channels.0.pop() {
            Some(channel) => Ok(channel),
            None if channels.1 > 0 => Err(io::ErrorKind::TimedOut.into()),
            None => Err(io::Error::other("the process that reads for this one has ended")),
        }
    }

    /// Returns a channel, or forgets it if its last exchange has failed.
    fn give_back(&self, channel: Option<UnixStream>) {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        match channel {
            Some(channel) => channels.0.push(channel),
            None => channels.1 -= 1,
        }
        drop(channels);
        self.freed.notify_one();
    }

    /// Sends a request, and receives its answer into `into`. Returns the code, and the length of
    /// the bytes or the message.
    fn exchange(
        &self,
        request: &Request,
        into: &mut [u8],
    ) -> io::Result<Result<usize, (u32, String)>> {
        let mut channel = self.take(request.timeout)?;
        let done = (|| {
            channel.set_read_timeout(Some(request.timeout + MARGIN))?;
            channel.write_all(&request.encode())?;
            let mut header = [0; ANSWER_LEN];
            channel.read_exact(&mut header)?;
            let word =
                |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
            let (code, len) = (word(0), word(4) as usize);
            if code == code::READ && len <= into.len() {
                channel.read_exact(&mut into[..len])?;
                return Ok(Ok(len));
            }
            if code == code::READ || len > MAX_MESSAGE {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "invalid answer"));
            }
            let mut message = vec![0; len];
            channel.read_exact(&mut message)?;
            Ok(Err((code, String::from_utf8_lossy(&message).into_owned())))
        })();
        // After a failure, the rest of the answer would be taken for the next one.
        self.give_back(done.is_ok().then_some(channel));
        done
    }
}

/// A source of a relay.
#[derive(Debug)]
struct Relayed {
    client: Arc<RelayClient>,
    number: u32,
    name: PathBuf,
    len: u64,
}

impl Relayed {
    fn error(&self, offset: u64, len: usize, timeout: Duration, code: u32, what: String) -> Error {
        let path = self.name.clone();
        let kind = match code {
            code::CHANGED => return Error::Changed { path, offset, what },
            code::TIMED_OUT => return Error::TimedOut { path, offset, len, timeout },
            code::NOT_FOUND => io::ErrorKind::NotFound,
            code::PERMISSION_DENIED => io::ErrorKind::PermissionDenied,
            _ => io::ErrorKind::Other,
        };
        Error::read(&path, offset, len, io::Error::new(kind, what))
    }
}

impl RemoteSource for Relayed {
    fn read(
        &self,
        offset: u64,
        mut buffers: Vec<Buffer>,
        timeout: Duration,
    ) -> (Vec<Buffer>, Result<usize, Error>) {
        let (mut done, end) = (0, Instant::now() + timeout);
        for buffer in &mut buffers {
            let left = end.saturating_duration_since(Instant::now());
            match self.read_at(offset.saturating_add(done as u64), buffer, left) {
                Ok(read) => done += read,
                Err(error) => return (buffers, Err(error)),
            }
        }
        (buffers, Ok(done))
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8], timeout: Duration) -> Result<usize, Error> {
        let available = usize::try_from(self.len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let total = bytes.len().min(available);
        let (mut done, end) = (0, Instant::now() + timeout);
        while done < total {
            let len = (total - done).min(MAX_REQUEST);
            let (at, into) = (offset.saturating_add(done as u64), &mut bytes[done..done + len]);
            let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let request = Request { source: self.number, len, offset: at, timeout: left };
            match self.client.exchange(&request, into) {
                Ok(Ok(0)) => break,
                Ok(Ok(read)) => done += read,
                Ok(Err((code, what))) => return Err(self.error(at, len, timeout, code, what)),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) =>
                {
                    return Err(self.error(at, len, timeout, code::TIMED_OUT, String::new()));
                }
                Err(error) => return Err(Error::read(&self.name, at, len, error)),
            }
        }
        Ok(done)
    }
}

impl Drop for Relayed {
    fn drop(&mut self) {
        // If all channels are in use for so long, the relay keeps the source until its end.
        if let Ok(mut channel) = self.client.take(MARGIN) {
            let request =
                Request { source: self.number, len: 0, offset: 0, timeout: Duration::ZERO };
            let sent = channel.write_all(&request.encode());
            self.client.give_back(sent.is_ok().then_some(channel));
        }
    }
}
