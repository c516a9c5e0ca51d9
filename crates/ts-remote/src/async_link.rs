// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection over a byte stream of tokio.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::liveness::Liveness;
use crate::{
    Connection, ConnectionOptions, ConnectionStats, Error, Event, Role, SendOptions, Sink,
    TensorInfo,
};

/// The maximum number of slices per write.
const MAX_SLICES: usize = 16;

/// One end of a connection over a byte stream of tokio: a `TcpStream`, a `UnixStream`, a stream of
/// tokio-rustls, or anything that implements [`AsyncRead`] and [`AsyncWrite`].
///
/// This is the async counterpart of [`Link`](crate::Link). It needs a tokio runtime with time
/// enabled, and does I/O only while one of its methods is awaited. Payloads are read directly into
/// memory and written directly from it, but never go through shared memory.
///
/// Futures can be dropped at any time: [`next_event`](Self::next_event) loses no event, and later
/// calls write the data that [`send`](Self::send) has queued.
///
/// ```
/// use ts_remote::{AsyncLink, ConnectionOptions, Event, Role};
///
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let (near, far) = tokio::io::duplex(1 << 16);
/// let options = ConnectionOptions::default();
/// let (near, far) = tokio::join!(
///     AsyncLink::<Vec<u8>, _>::new(near, Role::Connector, options.clone(), "acceptor"),
///     AsyncLink::<Vec<u8>, _>::new(far, Role::Acceptor, options, "connector"),
/// );
/// let (mut near, mut far) = (near?, far?);
/// let stream = near.connection().open_stream()?;
/// near.send_message(stream, "hello".into()).await?;
/// assert!(matches!(far.next_event().await?, Event::Connected { .. }));
/// assert_eq!(far.next_event().await?, Event::Message { stream, bytes: "hello".into() });
/// # Ok::<(), ts_remote::Error>(())
/// # }).unwrap();
/// ```
#[derive(Debug)]
pub struct AsyncLink<S, T> {
    connection: Connection<S>,
    io: T,
    peer: String,
    liveness: Liveness,
    /// The error that ended writing. The peer's last frames are still read.
    write_error: Option<Error>,
    /// The error that ended the connection. Methods return it after all earlier events.
    end_error: Option<Error>,
}

impl<S: Sink, T: AsyncRead + AsyncWrite + Unpin> AsyncLink<S, T> {
    /// Completes the handshake on a connected byte stream. Errors contain `peer` as the name of the
    /// peer.
    ///
    /// # Errors
    /// Returns the same errors as [`Link::new`](crate::Link::new).
    pub async fn new(
        io: T,
        role: Role,
        options: ConnectionOptions,
        peer: impl Into<String>,
    ) -> Result<Self, Error> {
        let liveness = Liveness::new(&options);
        let connection = Connection::new(role, options.with_shared_bytes(0));
        let mut this = Self {
            connection,
            io,
            peer: peer.into(),
            liveness,
            write_error: None,
            end_error: None,
        };
        while !this.connection.is_connected() || this.connection.has_unsent() {
            this.step().await?;
            this.liveness.check_handshake(&this.connection, &this.peer)?;
        }
        // The peer may have closed the connection after it read this end's HELLO.
        this.end_error.clone().map_or(Ok(this), Err)
    }

    /// Returns the connection, to open streams, queue tensors and provide memory.
    pub fn connection(&mut self) -> &mut Connection<S> {
        &mut self.connection
    }

    /// Returns the peer's name, as it was passed to [`new`](Self::new).
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Returns counters of the bytes and frames since the connection began.
    pub fn stats(&self) -> ConnectionStats {
        self.connection.stats()
    }

    /// Waits for the next event, and returns it.
    ///
    /// # Errors
    /// Returns the same errors as [`Link::next_event`](crate::Link::next_event).
    pub async fn next_event(&mut self) -> Result<Event<S>, Error> {
        self.liveness.begin_wait(&self.connection);
        loop {
            if let Some(event) = self.connection.poll() {
                return Ok(event);
            }
            self.step().await?;
        }
    }

    /// Sends a tensor on a stream, and waits until all of it is written. Events that arrive
    /// meanwhile are queued.
    ///
    /// # Errors
    /// Returns the same errors as [`Link::send`](crate::Link::send).
    pub async fn send(
        &mut self,
        stream: u32,
        info: TensorInfo,
        payload: Bytes,
        options: SendOptions,
    ) -> Result<(), Error> {
        self.connection.send(stream, info, payload, options)?;
        self.flush(stream).await
    }

    /// Sends a message on a stream, and waits until it is written.
    ///
    /// # Errors
    /// Returns the same errors as [`Link::send_message`](crate::Link::send_message).
    pub async fn send_message(&mut self, stream: u32, message: Bytes) -> Result<(), Error> {
        self.connection.send_message(stream, message)?;
        self.flush(stream).await
    }

    /// Waits until everything that is queued on a stream is written.
    ///
    /// # Errors
    /// Returns the same errors as [`next_event`](Self::next_event).
    pub async fn flush(&mut self, stream: u32) -> Result<(), Error> {
        self.liveness.begin_wait(&self.connection);
        while !self.connection.is_sent(stream) {
            self.step().await?;
        }
        // The stream may buffer written bytes, as TLS does.
        std::future::poll_fn(|cx| Pin::new(&mut self.io).poll_flush(cx))
            .await
            .map_err(|error| self.failed("writing", error))
    }

    /// Sends everything that is queued on all streams, then closes the connection with a reason.
    /// Waits until the peer has closed its end. Drops everything that arrives meanwhile.
    ///
    /// # Errors
    /// Returns the same errors as [`next_event`](Self::next_event). Sent data may then be lost.
    /// Succeeds if the peer closes the connection after all data of the user was written.
    pub async fn close(mut self, reason: &str) -> Result<(), Error> {
        self.liveness.begin_wait(&self.connection);
        while self.connection.has_unsent() {
            match self.step().await {
                Err(end) if end.is_end() && !self.connection.has_unsent_user_data() => {
                    return Ok(());
                }
                done => done?,
            }
        }
        self.connection.close(reason);
        while self.connection.plan_writes() {
            match self.step().await {
                // The peer ended it first, so only this end's CLOSE is missing.
                Err(end) if end.is_end() => return Ok(()),
                done => done?,
            }
        }
        let failed = |peer: &str, error| Error::io(peer, "closing", error);
        std::future::poll_fn(|cx| Pin::new(&mut self.io).poll_shutdown(cx))
            .await
            .map_err(|error| failed(&self.peer, error))?;
        let mut discarded = vec![0; 64 << 10];
        let drain = async {
            loop {
                let mut into = ReadBuf::new(&mut discarded);
                let read =
                    std::future::poll_fn(|cx| Pin::new(&mut self.io).poll_read(cx, &mut into))
                        .await;
                // The peer has closed the connection, usually because of this end's CLOSE.
                if read.is_err() || into.filled().is_empty() {
                    return;
                }
            }
        };
        let timeout = self.liveness.idle_timeout();
        let stalled = |_| Error::Stalled { peer: self.peer.clone(), after: timeout };
        tokio::time::timeout(timeout, drain).await.map_err(stalled)
    }

    /// Writes or reads something. If neither is possible, waits for at most half of the idle
    /// timeout.
    async fn step(&mut self) -> Result<(), Error> {
        if let Some(error) = &self.end_error {
            return Err(error.clone());
        }
        self.liveness.begin_step();
        self.liveness.check_progress(&self.connection, &self.peer)?;
        let left = self.liveness.check_peer(&mut self.connection, &self.peer)?;
        // The peer is pinged after half of the idle timeout.
        let wait = left.min(self.liveness.idle_timeout() / 2);
        let done = tokio::time::timeout(wait, std::future::poll_fn(|cx| self.poll_io(cx))).await;
        self.liveness.update();
        done.unwrap_or(Ok(()))
    }

    /// Writes and reads without waiting. Returns `Ready` if anything was written or read, or if the
    /// connection has failed.
    fn poll_io(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let wrote = self.poll_write(cx);
        let read = self.poll_read(cx)?;
        if wrote || read {
            return Poll::Ready(Ok(()));
        }
        match &self.write_error {
            Some(error) => Poll::Ready(Err(error.clone())),
            None => Poll::Pending,
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> bool {
        let mut wrote = false;
        while self.write_error.is_none() && self.connection.plan_writes() {
            let slices = self.connection.write_slices(MAX_SLICES);
            match Pin::new(&mut self.io).poll_write_vectored(cx, &slices) {
                Poll::Ready(Ok(len)) => {
                    let before = self.connection.progress();
                    self.connection.written(len);
                    // Pings make no progress, and do not show that the peer is active.
                    if self.connection.progress() != before {
                        self.liveness.note_activity();
                    }
                    wrote = true;
                }
                Poll::Ready(Err(error)) => self.write_error = Some(self.failed("writing", error)),
                Poll::Pending => break,
            }
        }
        // The stream may buffer written bytes, as TLS does.
        if let Poll::Ready(Err(error)) = Pin::new(&mut self.io).poll_flush(cx) {
            self.write_error.get_or_insert(Error::io(&self.peer, "writing", error));
        }
        wrote
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Result<bool, Error> {
        if let Err(error) = self.connection.settle() {
            return self.end(cx, error).map(|()| true);
        }
        let [first, second] = self.connection.read_targets()?;
        let mut into = ReadBuf::new(if first.is_empty() { second } else { first });
        match Pin::new(&mut self.io).poll_read(cx, &mut into) {
            Poll::Pending => Ok(false),
            Poll::Ready(Err(error)) => Err(self.failed("reading", error)),
            Poll::Ready(Ok(())) => {
                let len = into.filled().len();
                if len == 0 {
                    let end = self.connection.end_of_input().err();
                    return Err(end.unwrap_or(Error::Abandoned));
                }
                self.liveness.update();
                self.liveness.note_activity();
                self.connection.filled(len).or_else(|error| self.end(cx, error))?;
                Ok(true)
            }
        }
    }

    /// Ends the connection after an error in received bytes. Returns the error, unless earlier
    /// events can still be polled.
    fn end(&mut self, cx: &mut Context<'_>, error: Error) -> Result<(), Error> {
        // Sends the peer the reason, as far as it can be written now. A peer that has sent CLOSE
        // waits for the end of the byte stream.
        self.poll_write(cx);
        if matches!(error, Error::Closed { .. }) {
            let _ = Pin::new(&mut self.io).poll_shutdown(cx);
        }
        self.end_error = Some(error.clone());
        if self.connection.may_have_events() { Ok(()) } else { Err(error) }
    }

    fn failed(&self, what: &'static str, error: std::io::Error) -> Error {
        Error::transport(&self.peer, what, error)
    }
}
