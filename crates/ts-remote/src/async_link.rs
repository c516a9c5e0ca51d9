// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection over whatever tokio reads and writes.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::watch::Watch;
use crate::{
    Connection, ConnectionOptions, ConnectionStats, Error, Event, Role, SendOptions, Sink,
    TensorInfo,
};

/// The most pieces that one call to the system gets.
const MAX_SLICES: usize = 16;

/// One end of a connection, and what carries its bytes: a `TcpStream` or `UnixStream` of tokio, a
/// stream of tokio-rustls, or anything else. What [`Link`](crate::Link) is to callers that may
/// block.
///
/// Nothing happens on it but while one of its methods is awaited; any of these may be given up and
/// begun again. Payloads are read to tensors' memory and written from it; shared memory is for
/// [`Link`](crate::Link).
#[derive(Debug)]
pub struct AsyncLink<S, T> {
    connection: Connection<S>,
    io: T,
    peer: String,
    watch: Watch,
    /// Why nothing more can be written, while what the other end said before is read.
    mute: Option<Error>,
    /// What ended the connection, while events that came before wait.
    ended: Option<Error>,
}

impl<S: Sink, T: AsyncRead + AsyncWrite + Unpin> AsyncLink<S, T> {
    /// Goes on with a stream that is connected, whose other end is called `peer` in errors, when
    /// both ends know each other.
    ///
    /// # Errors
    /// As [`Link::new`](crate::Link::new).
    pub async fn new(
        io: T,
        role: Role,
        options: ConnectionOptions,
        peer: impl Into<String>,
    ) -> Result<Self, Error> {
        let watch = Watch::new(&options);
        let connection = Connection::new(role, ConnectionOptions { shared_bytes: 0, ..options });
        let mut this = Self { connection, io, peer: peer.into(), watch, mute: None, ended: None };
        while !this.connection.is_connected() || this.connection.has_unsent() {
            this.step().await?;
            this.watch.check_introduction(&this.connection, &this.peer)?;
        }
        // Who was told who this is may want no more of it.
        this.ended.clone().map_or(Ok(this), Err)
    }

    /// The connection.
    pub fn connection(&mut self) -> &mut Connection<S> {
        &mut self.connection
    }

    /// Who is at the other end.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// What it has done.
    pub fn stats(&self) -> ConnectionStats {
        self.connection.stats()
    }

    /// What happens next.
    ///
    /// # Errors
    /// As [`Link::next_event`](crate::Link::next_event).
    pub async fn next_event(&mut self) -> Result<Event<S>, Error> {
        self.watch.begin(&self.connection);
        loop {
            if let Some(event) = self.connection.poll() {
                return Ok(event);
            }
            self.step().await?;
        }
    }

    /// Sends a tensor on a stream, and waits until it is on its way. Events that come meanwhile
    /// wait.
    ///
    /// # Errors
    /// As [`Link::send`](crate::Link::send).
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

    /// Sends a message, and waits until it is on its way.
    ///
    /// # Errors
    /// As [`Link::send_message`](crate::Link::send_message).
    pub async fn send_message(&mut self, stream: u32, message: Bytes) -> Result<(), Error> {
        self.connection.send_message(stream, message)?;
        self.flush(stream).await
    }

    /// Waits until all that was sent on a stream is on its way.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event).
    pub async fn flush(&mut self, stream: u32) -> Result<(), Error> {
        self.watch.begin(&self.connection);
        while !self.connection.is_sent(stream) {
            self.step().await?;
        }
        // What TLS holds back.
        std::future::poll_fn(|cx| Pin::new(&mut self.io).poll_flush(cx))
            .await
            .map_err(|error| self.failed("writing", error))
    }

    /// Says that this is the end and why, behind what was sent on all streams, and waits until the
    /// other end has read that. What comes meanwhile is dropped.
    ///
    /// # Errors
    /// As [`next_event`](Self::next_event): what was sent may not have come then.
    pub async fn close(mut self, reason: &str) -> Result<(), Error> {
        self.watch.begin(&self.connection);
        while self.connection.has_unsent() {
            match self.step().await {
                Err(Error::Closed { .. }) if !self.connection.owes() => return Ok(()),
                done => done?,
            }
        }
        self.connection.close(reason);
        while self.connection.plan_writes() {
            match self.step().await {
                // Only this end's own farewell has not arrived.
                Err(Error::Closed { .. }) => return Ok(()),
                done => done?,
            }
        }
        let failed = |peer: &str, error| Error::io(peer, "closing", error);
        std::future::poll_fn(|cx| Pin::new(&mut self.io).poll_shutdown(cx))
            .await
            .map_err(|error| failed(&self.peer, error))?;
        let mut dropped = vec![0; 64 << 10];
        let drain = async {
            loop {
                let mut into = ReadBuf::new(&mut dropped);
                let read =
                    std::future::poll_fn(|cx| Pin::new(&mut self.io).poll_read(cx, &mut into))
                        .await;
                // It has no more to say, or is gone, and was the last to speak.
                if read.is_err() || into.filled().is_empty() {
                    return;
                }
            }
        };
        let timeout = self.watch.timeout();
        let stalled = |_| Error::Stalled { peer: self.peer.clone(), after: timeout };
        tokio::time::timeout(timeout, drain).await.map_err(stalled)
    }

    /// Writes or reads something, or waits for a while.
    async fn step(&mut self) -> Result<(), Error> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        self.watch.step();
        self.watch.check_progress(&self.connection, &self.peer)?;
        let left = self.watch.check_life(&mut self.connection, &self.peer)?;
        // Halfway through the other end's time it is asked for a sign of life.
        let most = left.min(self.watch.timeout() / 2);
        let went = tokio::time::timeout(most, std::future::poll_fn(|cx| self.poll_io(cx))).await;
        self.watch.look();
        went.unwrap_or(Ok(()))
    }

    /// Writes and reads what goes at once: ready when something did.
    fn poll_io(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let wrote = self.poll_write(cx);
        let read = self.poll_read(cx)?;
        if wrote || read {
            return Poll::Ready(Ok(()));
        }
        match &self.mute {
            Some(error) => Poll::Ready(Err(error.clone())),
            None => Poll::Pending,
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> bool {
        let mut wrote = false;
        while self.mute.is_none() && self.connection.plan_writes() {
            let slices = self.connection.write_slices(MAX_SLICES);
            match Pin::new(&mut self.io).poll_write_vectored(cx, &slices) {
                Poll::Ready(Ok(len)) => {
                    let before = self.connection.moves();
                    self.connection.written(len);
                    // A ping is no sign of the other's life.
                    if self.connection.moves() != before {
                        self.watch.hear();
                    }
                    wrote = true;
                }
                Poll::Ready(Err(error)) => self.mute = Some(self.failed("writing", error)),
                Poll::Pending => break,
            }
        }
        // What TLS holds back goes with it.
        if let Poll::Ready(Err(error)) = Pin::new(&mut self.io).poll_flush(cx) {
            self.mute.get_or_insert(Error::io(&self.peer, "writing", error));
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
                    let done = Error::Closed { reason: "it has no more to say".into() };
                    return Err(self.connection.end_of_input().err().unwrap_or(done));
                }
                self.watch.look();
                self.watch.hear();
                self.connection.filled(len).or_else(|error| self.end(cx, error))?;
                Ok(true)
            }
        }
    }

    /// What came has ended the connection. An error, unless there are events that came before.
    fn end(&mut self, cx: &mut Context<'_>, error: Error) -> Result<(), Error> {
        // The other end is told why, if it takes that at once, or waits for the end of what this
        // one says.
        self.poll_write(cx);
        if matches!(error, Error::Closed { .. }) {
            let _ = Pin::new(&mut self.io).poll_shutdown(cx);
        }
        self.ended = Some(error.clone());
        if self.connection.may_have_events() { Ok(()) } else { Err(error) }
    }

    fn failed(&self, what: &'static str, error: std::io::Error) -> Error {
        use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match error.kind() {
            ConnectionReset | BrokenPipe | UnexpectedEof => {
                Error::Lost { what: format!("to {}, {what}", self.peer) }
            }
            _ => Error::io(&self.peer, what, error),
        }
    }
}
