// SPDX-License-Identifier: MIT OR Apache-2.0
//! The client of a session.

mod connection;
mod inner;
mod options;
mod queue;

use std::fmt;
use std::ops::Add;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::channel::Incoming;
use crate::request::Request;
use crate::view::TensorRef;
use ts_remote::{Error, Sink};

pub use connection::{Answer, WaitError};
use connection::{ConnectionState, Probe};
use inner::{CONTENDED_SLICE, ClientInner, UPLOAD_PIECE};
pub use options::{ClientOptions, Dial};

/// How long a waiting thread keeps the connection locked at a time.
const SLICE: Duration = Duration::from_millis(100);
/// How long `close` waits for the server to end the session.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Uploads of up to this many bytes are sent as part of a batch.
const MAX_INLINE: usize = 16 << 10;

/// A session with a server, which keeps tensors and runs operators on them.
///
/// Requests are queued and run on the server in order, while the program continues. A batch is sent
/// when it has 64 requests or 56 KiB, after 1 ms, or when a thread waits for a reply. If a request
/// fails, a later [`wait`](Self::wait) returns the failure instead of an answer.
///
/// If the link is lost, the client reconnects, and the session continues. Until then, calls that
/// use the network block, even beyond their own time limits. A background thread sends incomplete
/// batches and answers the server's pings.
///
/// [`close`](Self::close) ends the session. If a client is dropped without it, requests that are
/// still queued are lost, and the server keeps the session until the server's reconnect timeout.
///
/// `S` is the memory that downloaded elements are written to, such as `Vec<u8>`.
///
/// # Examples
///
/// The [crate documentation](crate#examples) has a complete example.
///
/// ```no_run
/// # use ts_exec::{Client, Request};
/// # fn example(client: &Client<Vec<u8>>) -> Result<(), ts_exec::ts_remote::Error> {
/// client.send(&Request::Create { storage: 1, bytes: 4096, device: 0 })?;
/// # Ok(())
/// # }
/// ```
pub struct Client<S: Sink + Send + 'static> {
    inner: Arc<ClientInner<S>>,
}

/// A request that was queued by [`Client::submit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "call `send_batches` if the batch is full"]
#[non_exhaustive]
pub struct Submitted {
    /// The number of the request. The first request of a session has the number 1.
    pub request: u64,
    /// Whether the request completed a batch. If so, call [`Client::send_batches`] next. Otherwise,
    /// the batch is sent when other requests fill it, after 1 ms, or with the next wait.
    pub batch_full: bool,
}

/// Counters of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ClientStats {
    /// The number of requests that were submitted.
    pub requests: u64,
    /// The number of batches that were completed.
    pub batches: u64,
    /// The number of waits that ended with an answer, or with the failure of a request.
    pub waits: u64,
    /// The number of times that the client has reconnected.
    pub reconnects: u64,
    /// The number of bytes that [`Client::write`] has submitted.
    pub uploaded_bytes: u64,
    /// The number of bytes of tensors that were received from the server.
    pub downloaded_bytes: u64,
}

impl Add for ClientStats {
    type Output = Self;

    /// Returns the sums of the counters of two sessions.
    fn add(self, other: Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            batches: self.batches + other.batches,
            waits: self.waits + other.waits,
            reconnects: self.reconnects + other.reconnects,
            uploaded_bytes: self.uploaded_bytes + other.uploaded_bytes,
            downloaded_bytes: self.downloaded_bytes + other.downloaded_bytes,
        }
    }
}

impl<S: Sink + Send + 'static> Client<S> {
    /// Connects to a server, begins a session, and starts the background thread. Blocks.
    ///
    /// If a link is lost during the handshake, connects again, for up to five seconds or the
    /// reconnect timeout.
    ///
    /// `session` names the session. It must be unique and hard to guess, because any client that
    /// presents it takes the session over. Use 16 random bytes.
    ///
    /// # Errors
    /// Returns the error of the dial function or of the handshake. Returns [`Error::Io`] if the
    /// thread cannot be started.
    pub fn connect(options: ClientOptions<S>, session: [u8; 16]) -> Result<Self, Error> {
        let inner = Arc::new(ClientInner::connect(options, session)?);
        inner.start_flusher()?;
        Ok(Self { inner })
    }

    /// Returns the number of the operator `name`, such as `aten::add.Tensor`. Never blocks on the
    /// network.
    ///
    /// The first call with a name submits a [`Request::Define`]. If the server does not have the
    /// operator, calls of it fail.
    ///
    /// # Errors
    /// Returns the error that ended the session, if a request must be submitted and the session has
    /// ended.
    pub fn operator_id(&self, name: &str) -> Result<u32, Error> {
        let mut queue = self.inner.queue();
        if let Some(&op) = queue.ops.get(name) {
            return Ok(op);
        }
        let op = queue.ops.len() as u32;
        queue.push(|batch| Request::Define { op, name: name.into() }.encode(batch))?;
        queue.ops.insert(name.into(), op);
        Ok(op)
    }

    /// Queues a request. Never blocks on the network.
    ///
    /// If the request completed a batch, call [`send_batches`](Self::send_batches) next. That call
    /// may block, so it is separate: a caller can release its locks first. [`send`](Self::send)
    /// does both.
    ///
    /// # Errors
    /// Returns the error that ended the session, if it has ended.
    pub fn submit(&self, request: &Request) -> Result<Submitted, Error> {
        let mut queue = self.inner.queue();
        let number = queue.push(|batch| request.encode(batch))?;
        let batch_full = queue.is_batch_full();
        if batch_full {
            queue.seal();
        }
        drop(queue);
        self.inner.wake_flusher();
        Ok(Submitted { request: number, batch_full })
    }

    /// Sends the batches that are complete.
    ///
    /// Blocks while the client reconnects. Also blocks if at least 64 MiB are queued or
    /// unacknowledged, until the server has acknowledged all but 64 MiB and the socket has taken
    /// all but 16 MiB.
    ///
    /// # Errors
    /// Returns the error that ended the session, if it has ended.
    pub fn send_batches(&self) -> Result<(), Error> {
        let queued_bytes = self.inner.queue().sealed_bytes;
        self.inner.send_sealed(self.inner.is_backlogged(queued_bytes))
    }

    /// Submits a request, sends complete batches, and returns the number of the request. May block,
    /// like [`send_batches`](Self::send_batches). Does not wait for the request to run.
    ///
    /// # Errors
    /// Returns the error that ended the session, if it has ended.
    pub fn send(&self, request: &Request) -> Result<u64, Error> {
        let submitted = self.submit(request)?;
        if submitted.batch_full {
            self.send_batches()?;
        }
        Ok(submitted.request)
    }

    /// Frees a storage. Never blocks on the network, so destructors may call it.
    ///
    /// Does nothing if the session has ended, because the server frees all storages of the session.
    pub fn free(&self, storage: u64) {
        let _ = self.inner.queue().push(|batch| Request::Free { storage }.encode(batch));
        self.inner.wake_flusher();
    }

    /// Discards the answer to `reply`, even if it has not arrived yet. Never blocks on the network.
    ///
    /// Call this for a reply that no caller will wait for. Otherwise, its answer stays in memory.
    pub fn discard_reply(&self, reply: u64) {
        self.inner.forgotten.lock().insert(reply);
    }

    /// Returns a reply number that this session has not used yet.
    pub fn new_reply(&self) -> u64 {
        self.inner.next_reply.fetch_add(1, Ordering::Relaxed)
    }

    /// Requests the elements of a tensor. Returns the number of the reply to
    /// [`wait`](Self::wait) for.
    ///
    /// The elements are written to `memory`, which must have exactly their length in bytes.
    /// Otherwise, the session ends with [`Error::Protocol`] when the elements arrive. May block,
    /// like [`send_batches`](Self::send_batches).
    ///
    /// # Errors
    /// Returns the error that ended the session, if it has ended.
    pub fn read(&self, tensor: TensorRef, memory: S) -> Result<u64, Error> {
        let reply = self.new_reply();
        let mut connection = self.inner.connection();
        if let Err(error) = connection.add_sink(reply, memory) {
            self.inner.end(&mut connection, &error);
            return Err(error);
        }
        drop(connection);
        self.send(&Request::Read { reply, tensor })?;
        Ok(reply)
    }

    /// Writes bytes to a storage, from `offset` on.
    ///
    /// If `bytes` has at most 16 KiB, the client copies it. Otherwise, the client keeps `bytes` and
    /// sends the data without a copy. The memory must then not change until the server has received
    /// the data. [`delivered_within`](Self::delivered_within) waits for that.
    ///
    /// May block, like [`send_batches`](Self::send_batches). If `bytes` has more than 16 KiB, also
    /// blocks while more than 16 MiB are queued.
    ///
    /// # Errors
    /// Returns the error that ended the session, if it has ended.
    pub fn write(&self, storage: u64, offset: u64, bytes: Bytes) -> Result<(), Error> {
        if bytes.len() <= MAX_INLINE {
            self.inner.queue().uploaded_bytes += bytes.len() as u64;
            self.send(&Request::Write { storage, offset, bytes: bytes.into() })?;
            return Ok(());
        }
        for at in (0..bytes.len()).step_by(UPLOAD_PIECE) {
            let piece = bytes.slice(at..bytes.len().min(at + UPLOAD_PIECE));
            let mut queue = self.inner.queue();
            let request =
                Request::Receive { storage, offset: offset + at as u64, bytes: piece.len() as u64 };
            queue.push(|batch| request.encode(batch))?;
            queue.seal();
            queue.push_payload(piece);
            let queued_bytes = queue.sealed_bytes;
            let backlogged =
                queued_bytes > 2 * UPLOAD_PIECE || self.inner.is_backlogged(queued_bytes);
            drop(queue);
            self.inner.send_sealed(backlogged)?;
        }
        Ok(())
    }

    /// Waits up to `time` until the server has received all submitted requests. Returns whether it
    /// has. The server may not have run them yet.
    ///
    /// # Errors
    /// Returns the error that ended the session, if it has ended.
    pub fn delivered_within(&self, time: Duration) -> Result<bool, Error> {
        let end = Instant::now() + time;
        loop {
            let mut connection = self.inner.connection();
            self.inner.send(&mut connection, true)?;
            if connection.channel.is_acked() {
                return Ok(true);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.inner.receive_within(&mut connection, left.min(SLICE))?;
        }
    }

    /// Sends queued requests, and waits up to `time` for the answer to `reply`. Returns `None` if
    /// the answer has not arrived.
    ///
    /// Takes the answer, so only one wait can return it. If no pending request has this reply
    /// number, the client assumes after about a second that the server lost the reply. It then ends
    /// the session with [`Error::Protocol`].
    ///
    /// # Errors
    /// Returns [`WaitError::Failed`] if the request failed, or if the failure of another request
    /// has not been reported yet. In both cases, the answer is discarded. Returns
    /// [`WaitError::Ended`] if the session has ended.
    pub fn wait(&self, reply: u64, time: Duration) -> Result<Option<Answer<S>>, WaitError> {
        let inner = &*self.inner;
        let end = Instant::now() + time;
        loop {
            let mut connection = inner.connection();
            inner.send(&mut connection, true)?;
            if let Some(answer) = connection.take_answer(reply) {
                inner.waits.fetch_add(1, Ordering::Relaxed);
                if let Some(probe) = connection.end_wait(reply) {
                    self.discard_reply(probe);
                }
                return answer.map(Some);
            }
            self.probe(&mut connection, reply)?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let contended = inner.contended.swap(false, Ordering::Relaxed);
            let slice = if contended { CONTENDED_SLICE } else { SLICE };
            inner.receive_within(&mut connection, left.min(slice))?;
        }
    }

    /// Detects a lost reply. If a reply takes long, submits a SYNC. If the reply to the SYNC
    /// arrives first, the awaited reply is lost.
    fn probe(&self, connection: &mut ConnectionState<S>, reply: u64) -> Result<(), Error> {
        match connection.probe(reply) {
            Probe::Wait => Ok(()),
            Probe::Send => {
                let probe = self.new_reply();
                connection.set_probe(reply, probe);
                // The next line sends the batch, whether it is full or not.
                let _ = self.submit(&Request::Sync { reply: probe })?;
                self.inner.send(connection, true)
            }
            Probe::Lost => {
                let what = format!(
                    "reply {reply} did not arrive, but a later reply did: the server lost reply \
                     {reply}, or no pending request has this reply number"
                );
                let error = Error::Protocol { stream: 0, what };
                self.inner.end(connection, &error);
                Err(error)
            }
        }
    }

    /// Sends queued requests, as far as the socket takes them now. Blocks only while the client
    /// reconnects.
    ///
    /// # Errors
    /// Returns the error that ended the session, if it has ended.
    pub fn flush(&self) -> Result<(), Error> {
        self.inner.queue().seal();
        self.inner.send_sealed(false)
    }

    /// Takes the failures that no wait has reported. Returns the first failure and the number of
    /// other failures, or `None` if there are no failures.
    ///
    /// Use this after [`close`](Self::close), which does not report them.
    pub fn take_failure(&self) -> Option<WaitError> {
        self.inner.connection().take_failure()
    }

    /// Returns whether the session has ended. If so, requests fail.
    pub fn has_ended(&self) -> bool {
        self.inner.queue().ended.is_some()
    }

    /// Returns whether the link was lost, and is being replaced. Does not block.
    pub fn is_reconnecting(&self) -> bool {
        self.inner.reconnecting.load(Ordering::Relaxed)
    }

    /// Ends the session without the server, for example because its process has ended.
    ///
    /// Calls that wait return [`Error::Closed`] with this reason within about 100 ms, or when an
    /// attempt to reconnect ends. Blocks until then. Does nothing if the session has ended.
    pub fn abandon(&self, reason: &str) {
        let error = Error::Closed { reason: reason.into() };
        // A thread that reconnects has locked the connection until it notices this.
        let error = self.inner.abandoned.get_or_init(|| error);
        self.inner.end(&mut self.inner.connection(), error);
    }

    /// Returns the counters of the session.
    pub fn stats(&self) -> ClientStats {
        let (requests, batches, uploaded_bytes) = {
            let queue = self.inner.queue();
            (queue.requests, queue.batches, queue.uploaded_bytes)
        };
        let connection = self.inner.connection();
        ClientStats {
            requests,
            batches,
            waits: self.inner.waits.load(Ordering::Relaxed),
            reconnects: connection.reconnects,
            uploaded_bytes,
            downloaded_bytes: connection.downloaded_bytes,
        }
    }

    /// Ends the session. The server runs all submitted requests, and then frees all storages.
    ///
    /// Blocks until all requests are sent, and then at most 5 seconds for the server's
    /// confirmation. Does nothing if the client was closed before.
    ///
    /// # Errors
    /// Returns the error that ended the session or broke the link before all requests were sent.
    /// The client does not reconnect during this call.
    pub fn close(&self) -> Result<(), Error> {
        if self.inner.closing.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        self.inner.wake_flusher();
        let mut connection = self.inner.connection();
        let sent =
            self.inner.send(&mut connection, true).and_then(|()| connection.channel.finish());
        let end = Instant::now() + CLOSE_TIMEOUT;
        while sent.is_ok() && Instant::now() < end {
            match connection.channel.next_within(SLICE) {
                Ok(Some(Incoming::Finished)) | Err(_) => break,
                // Keeps the failures of the last requests for `take_failure`.
                Ok(Some(item)) => {
                    if connection.handle(item).is_err() {
                        break;
                    }
                }
                Ok(None) => {}
            }
        }
        let error = Error::Closed { reason: "this client has closed the session".into() };
        self.inner.end(&mut connection, &error);
        sent
    }
}

impl<S: Sink + Send + 'static> Drop for Client<S> {
    fn drop(&mut self) {
        self.inner.closing.store(true, Ordering::SeqCst);
        self.inner.wake_flusher();
    }
}

impl<S: Sink + Send + 'static> fmt::Debug for Client<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
