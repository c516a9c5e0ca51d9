// SPDX-License-Identifier: MIT OR Apache-2.0
//! One end of a connection, without I/O.

mod reading;
mod writing;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
#[cfg(unix)]
use rustix::fd::BorrowedFd;
use rustix::fd::OwnedFd;
#[cfg(unix)]
use ts_pool::SharedMemory;

use self::reading::Reader;
use self::writing::Writer;
use crate::frame::{Kind, MAX_CONTROL_LEN, PREFACE};
use crate::hello::Hello;
use crate::incoming::{Incoming, no_tensor};
use crate::outgoing::{OutFrame, Outgoing};
use crate::ring::{RingReader, RingWriter};
use crate::{
    ConnectionOptions, ConnectionStats, Error, Event, Role, SendOptions, Sink, StreamStats,
    TensorInfo,
};

/// One end of a connection, without I/O: no method blocks or uses a socket.
///
/// To read, put the bytes that arrive into the buffers of [`read_targets`](Self::read_targets),
/// which may be the memory of a tensor. Report their number with [`filled`](Self::filled), and take
/// the events from [`poll`](Self::poll).
///
/// To write, call [`plan_writes`](Self::plan_writes), then write the slices that
/// [`write_slices`](Self::write_slices) returns. Report the number of written bytes with
/// [`written`](Self::written).
///
/// After [`filled`](Self::filled) has returned an error, nothing more can be read. Write the
/// remaining frames, because they may tell the peer the reason.
///
/// ```
/// use ts_remote::{Connection, ConnectionOptions, Event, Role};
///
/// let mut connector =
///     Connection::<Vec<u8>>::new(Role::Connector, ConnectionOptions::default());
/// let mut acceptor = Connection::<Vec<u8>>::new(Role::Acceptor, ConnectionOptions::default());
/// // Carries bytes from one end to the other.
/// let transfer = |from: &mut Connection<Vec<u8>>, to: &mut Connection<Vec<u8>>| {
///     while from.plan_writes() {
///         let bytes: Vec<u8> = from.write_slices(16).iter().flat_map(|s| s.to_vec()).collect();
///         from.written(bytes.len());
///         let mut rest = &bytes[..];
///         while !rest.is_empty() {
///             let mut len = 0;
///             for target in to.read_targets()? {
///                 let part = target.len().min(rest.len());
///                 target[..part].copy_from_slice(&rest[..part]);
///                 rest = &rest[part..];
///                 len += part;
///             }
///             to.filled(len)?;
///         }
///     }
///     Ok::<(), ts_remote::Error>(())
/// };
///
/// transfer(&mut connector, &mut acceptor)?;
/// transfer(&mut acceptor, &mut connector)?;
/// assert!(matches!(acceptor.poll(), Some(Event::Connected { .. })));
/// let stream = connector.open_stream()?;
/// connector.send_message(stream, "hello".into())?;
/// transfer(&mut connector, &mut acceptor)?;
/// assert_eq!(acceptor.poll(), Some(Event::Message { stream, bytes: "hello".into() }));
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[derive(Debug)]
pub struct Connection<S> {
    role: Role,
    options: ConnectionOptions,
    /// The peer's HELLO. `None` until the handshake is complete.
    peer: Option<Hello>,
    reader: Reader,
    incoming: BTreeMap<u32, Incoming<S>>,
    /// The numbers of incoming streams that may have an event.
    event_streams: VecDeque<u32>,
    connected_delivered: bool,
    hello_sent: bool,
    /// Outgoing streams that the peer cancelled, with its reasons, until their events are
    /// delivered.
    cancelled: VecDeque<(u32, String)>,
    outgoing: BTreeMap<u32, Outgoing>,
    /// Outgoing streams that have ended, until the peer releases them.
    ending: BTreeSet<u32>,
    next_stream: u32,
    writer: Writer,
    /// A counter that increases when HELLO, META, DATA, END, MESSAGE, another frame with a body or
    /// a part of a payload arrives. It also increases when bytes are written, unless the first of
    /// them belongs to a PING or PONG.
    progress: u64,
    /// The number of PINGs that were sent, which is also the number of the last one.
    pings: u64,
    /// The shared memory for outgoing payloads.
    ring_writer: Option<RingWriter>,
    /// The shared memory for incoming payloads.
    ring_reader: Option<RingReader>,
    /// A received descriptor, until the SHARE that it belongs to is processed.
    descriptor: Option<OwnedFd>,
    /// The reason in the peer's CLOSE. `None` until CLOSE arrives.
    closed: Option<String>,
    failed: bool,
    /// An error in postponed bytes that [`poll`](Self::poll) processed. [`settle`](Self::settle)
    /// returns it.
    deferred_error: Option<Error>,
    stats: ConnectionStats,
}

/// Truncates a reason to the maximum length of a control frame's body.
fn truncated(reason: &str) -> &[u8] {
    &reason.as_bytes()[..reason.len().min(MAX_CONTROL_LEN)]
}

impl<S: Sink> Connection<S> {
    /// Creates one end of a connection. A connector can write its HELLO at once. An acceptor can
    /// write its HELLO after it has read the connector's HELLO.
    pub fn new(role: Role, options: ConnectionOptions) -> Self {
        let mut this = Self {
            role,
            peer: None,
            reader: Reader::default(),
            incoming: BTreeMap::new(),
            event_streams: VecDeque::new(),
            connected_delivered: false,
            hello_sent: false,
            cancelled: VecDeque::new(),
            outgoing: BTreeMap::new(),
            ending: BTreeSet::new(),
            next_stream: if role == Role::Connector { 1 } else { 2 },
            writer: Writer::default(),
            progress: 0,
            pings: 0,
            ring_writer: None,
            ring_reader: None,
            descriptor: None,
            closed: None,
            failed: false,
            deferred_error: None,
            stats: ConnectionStats::default(),
            options,
        };
        // An acceptor sends HELLO only after it has read the connector's preface and HELLO.
        if role == Role::Connector {
            this.send_hello();
        }
        this
    }

    /// Creates one end of a connection that exchanges no preface and no HELLO. Both ends must have
    /// the same options.
    pub(crate) fn without_handshake(role: Role, options: ConnectionOptions) -> Self {
        let mut this = Self::new(role, options);
        this.peer = Some(Hello::new(&this.options, role));
        (this.connected_delivered, this.hello_sent) = (true, true);
        this.writer = Writer::default();
        this.reader.skip_preface();
        this
    }

    /// Queues the preface and HELLO before all other frames. Later calls do nothing.
    fn send_hello(&mut self) {
        if !std::mem::replace(&mut self.hello_sent, true) {
            let body = Hello::new(&self.options, self.role).encode();
            let mut hello = OutFrame::control(Kind::Hello, 0, 0, &body);
            hello.head.splice(0..0, PREFACE);
            self.writer.push_first(hello);
        }
    }

    /// Returns whether the handshake is complete: the peer's HELLO has arrived, and streams can be
    /// opened.
    pub fn is_connected(&self) -> bool {
        self.peer.is_some()
    }

    /// Returns counters of the bytes and frames since the connection began.
    pub fn stats(&self) -> ConnectionStats {
        self.stats
    }

    /// Returns the statistics of a stream of either direction. Returns `None` if the stream is not
    /// open, or after [`plan_writes`](Self::plan_writes) has queued its last frame.
    pub fn stream_stats(&self, stream: u32) -> Option<StreamStats> {
        let outgoing = self.outgoing.get(&stream).map(Outgoing::stats);
        outgoing.or_else(|| self.incoming.get(&stream).map(Incoming::stats))
    }

    /// Returns how many bytes of memory this end uses for received data that the user has not
    /// taken. Each stream uses at most a window and a few frames of 64 KiB.
    pub fn staged_bytes(&self) -> usize {
        self.incoming.values().map(Incoming::staged_bytes).sum()
    }

    /// Opens a stream to send on, and returns its number. The stream counts as open until the peer
    /// has [taken](Self::is_taken) everything.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] before the handshake is complete, if as many streams are open as
    /// the peer allows, or if all stream numbers are used.
    pub fn open_stream(&mut self) -> Result<u32, Error> {
        let misuse = |what: &str| Error::Misuse(what.into());
        let early = || {
            misuse(
                "cannot open a stream: the handshake is not complete; wait for `Event::Connected`",
            )
        };
        let peer = self.peer.as_ref().ok_or_else(early)?;
        if self.outgoing.len() + self.ending.len() >= peer.max_streams as usize {
            return Err(Error::Misuse(format!(
                "cannot open a stream: the peer allows at most {} open streams; finish one, and \
                 wait until the peer has taken its data",
                peer.max_streams
            )));
        }
        let stream = self.next_stream;
        self.next_stream = stream.checked_add(2).ok_or_else(|| {
            misuse("cannot open a stream: all stream numbers are used; open a new connection")
        })?;
        self.outgoing.insert(stream, Outgoing::new(stream, peer.window));
        Ok(stream)
    }

    /// Queues a tensor on a stream. `payload` contains the bytes of the tensor's storage, which are
    /// not copied.
    ///
    /// # Errors
    /// Returns [`Error::Unsendable`] if the tensor or the compression level is invalid, or if
    /// `payload` has another length than the storage. Returns [`Error::Misuse`] if the stream is
    /// not open.
    pub fn send(
        &mut self,
        stream: u32,
        info: TensorInfo,
        payload: Bytes,
        options: SendOptions,
    ) -> Result<(), Error> {
        self.sending(stream)?.push_tensor(info, Some(payload), options)
    }

    /// Queues a tensor whose storage was sent earlier on this stream with [`SendOptions::keep`].
    /// Only its description is sent. If `keep` is set, later tensors may use the storage too.
    ///
    /// The peer ends the connection if it does not have the storage.
    ///
    /// # Errors
    /// Returns the same errors as [`send`](Self::send).
    pub fn send_view(&mut self, stream: u32, info: TensorInfo, keep: bool) -> Result<(), Error> {
        self.sending(stream)?.push_tensor(
            info,
            None,
            SendOptions { keep, ..SendOptions::default() },
        )
    }

    /// Queues a message of at most 64 KiB on a stream. The message may overtake payloads of other
    /// streams.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] if the message is longer, or if the stream is not open.
    pub fn send_message(&mut self, stream: u32, message: Bytes) -> Result<(), Error> {
        if message.len() > MAX_CONTROL_LEN {
            let what = format!(
                "cannot send a message of {} bytes: expected at most {MAX_CONTROL_LEN} bytes",
                message.len()
            );
            return Err(Error::Misuse(what));
        }
        self.sending(stream)?.push_message(message);
        Ok(())
    }

    /// Ends a stream once everything that is queued on it has been written.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] if the stream is not open.
    pub fn finish(&mut self, stream: u32) -> Result<(), Error> {
        self.sending(stream)?.finish();
        Ok(())
    }

    /// Returns whether everything that was queued on a stream has been written to the transport, or
    /// dropped because the stream was cancelled or the connection was closed. May return false
    /// while frames of other streams wait to be written.
    pub fn is_sent(&self, stream: u32) -> bool {
        self.outgoing.get(&stream).is_none_or(Outgoing::is_empty) && self.writer.is_queue_empty()
    }

    /// Returns whether the peer has released an outgoing stream. It does so when its application
    /// has taken all data, or when the stream was cancelled. After [`close`](Self::close), returns
    /// true for streams that were not finished.
    pub fn is_taken(&self, stream: u32) -> bool {
        stream < self.next_stream
            && !self.outgoing.contains_key(&stream)
            && !self.ending.contains(&stream)
    }

    /// Returns how many bytes are queued on all streams. Partly written frames count in full.
    pub fn unsent_bytes(&self) -> usize {
        self.writer.queued_bytes()
            + self.outgoing.values().map(Outgoing::unsent_bytes).sum::<usize>()
    }

    /// Removes and returns the memory that no event has returned yet. Nothing can be received after
    /// this call, so use it only when the connection has ended.
    pub fn take_sinks(&mut self) -> Vec<S> {
        std::mem::take(&mut self.incoming).into_values().flat_map(Incoming::into_sinks).collect()
    }

    /// Returns whether any frame, including control frames, is queued and not yet written.
    pub fn has_unsent(&self) -> bool {
        !self.writer.is_empty() || self.outgoing.values().any(|o| !o.is_empty())
    }

    /// Returns whether data of the user is queued and not yet written.
    pub(crate) fn has_unsent_user_data(&self) -> bool {
        self.outgoing.values().any(|outgoing| !outgoing.is_empty()) || self.writer.has_user_data()
    }

    /// Cancels a stream of either direction, and sends the reason to the peer. Drops everything
    /// that is queued on the stream, and everything that still arrives on it. If the peer has
    /// already ended an incoming stream, only drops its remaining events. If an outgoing stream has
    /// ended, does nothing.
    pub fn cancel(&mut self, stream: u32, reason: &str) {
        if self.outgoing.remove(&stream).is_some() {
            self.ending.insert(stream);
            self.writer.push_control(Kind::Cancel, stream, 0, truncated(reason));
        } else if let Some(incoming) = self.incoming.get_mut(&stream) {
            if incoming.refuse() {
                self.release_stream(stream);
            } else {
                self.writer.push_control(Kind::Cancel, stream, 0, truncated(reason));
            }
        }
    }

    /// Removes an incoming stream that has ended and has no more events, so that the peer may open
    /// another.
    fn release_stream(&mut self, stream: u32) {
        self.incoming.remove(&stream);
        self.writer.push_control(Kind::Finish, stream, 0, &[]);
    }

    /// Provides the memory for the payload of a tensor, after its [`Event::Metadata`]. `sink` must
    /// have the length of the tensor's storage. The connection owns it until [`Event::End`] or
    /// [`Event::Cancelled`] returns it.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] if no tensor of the stream waits for memory, or if `sink` has the
    /// wrong length. Returns errors of `sink`.
    pub fn accept(&mut self, stream: u32, sink: S) -> Result<(), Error> {
        let Some(incoming) = self.incoming.get_mut(&stream) else {
            return Err(no_tensor(stream));
        };
        self.stats.copied_bytes += incoming.accept(sink)?;
        self.note_events(stream);
        self.renew_credit(stream);
        Ok(())
    }

    /// Returns the current tensor of a stream: the one between its [`Event::Metadata`] and its
    /// [`Event::End`]. Returns `None` between tensors.
    pub fn announced(&self, stream: u32) -> Option<&TensorInfo> {
        self.incoming.get(&stream)?.announced()
    }

    /// Offers shared memory to a peer on the same host. If the peer maps the memory, uncompressed
    /// payloads of at least 64 KiB go through it. [`Link`](crate::Link) calls this itself over Unix
    /// sockets.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] before the handshake is complete, or if this end has already
    /// offered memory.
    #[cfg(unix)]
    pub fn share(&mut self, memory: SharedMemory) -> Result<(), Error> {
        if !self.is_connected() || self.ring_writer.is_some() {
            let what = if self.is_connected() {
                "cannot offer shared memory: this end has already offered memory"
            } else {
                "cannot offer shared memory: the handshake is not complete; wait for \
                 `Event::Connected`"
            };
            return Err(Error::Misuse(what.into()));
        }
        let frame = OutFrame::control(Kind::Share, 0, memory.len() as u64, &[]);
        self.writer.push(OutFrame { has_descriptor: true, ..frame });
        self.ring_writer = Some(RingWriter::new(memory));
        Ok(())
    }

    /// Returns whether a queued payload could go through shared memory that has not been offered
    /// yet.
    #[cfg(unix)]
    pub(crate) fn could_share(&self) -> bool {
        let shareable = || self.outgoing.values().any(Outgoing::has_shareable);
        self.options.shared_bytes > 0
            && self.ring_writer.is_none()
            && self.is_connected()
            && shareable()
    }

    /// Returns the descriptor to attach to the first byte of [`write_slices`](Self::write_slices),
    /// or `None` if that byte needs no descriptor.
    #[cfg(unix)]
    pub fn descriptor_to_send(&self) -> Option<BorrowedFd<'_>> {
        let ring = self.ring_writer.as_ref().filter(|_| self.writer.has_descriptor_first());
        ring.map(|ring| ring.memory().descriptor())
    }

    /// Stores a descriptor that arrived with the bytes of the next call of
    /// [`filled`](Self::filled).
    #[cfg(unix)]
    pub fn descriptor_received(&mut self, descriptor: OwnedFd) {
        self.descriptor = Some(descriptor);
    }

    /// Queues a PING, which the peer answers with PONG.
    pub fn ping(&mut self) {
        self.pings += 1;
        self.writer.push_control(Kind::Ping, 0, self.pings, &[]);
    }

    /// Queues CLOSE with a reason as the last frame. Drops all other queued frames, except HELLO
    /// and a partly written frame.
    pub fn close(&mut self, reason: &str) {
        self.writer.drop_unwritten();
        self.outgoing.clear();
        let mut close = OutFrame::control(Kind::Close, 0, 0, truncated(reason));
        if !std::mem::replace(&mut self.hello_sent, true) {
            close.head.splice(0..0, PREFACE);
        }
        self.writer.push(close);
    }

    /// Checks whether the peer's byte stream may end here. Call this when the transport reports the
    /// end of the byte stream.
    ///
    /// # Errors
    /// Returns [`Error::Closed`] if the peer sent CLOSE. Returns [`Error::Lost`] if the handshake,
    /// a frame or a tensor is incomplete, or if data is unsent.
    pub fn end_of_input(&self) -> Result<(), Error> {
        if let Some(reason) = &self.closed {
            return Err(Error::Closed { reason: reason.clone() });
        }
        let incomplete = self.incoming.values().find(|incoming| incoming.is_within_tensor());
        let what = match incomplete.map(Incoming::current) {
            _ if self.peer.is_none() => {
                "the byte stream ended before the handshake was complete".into()
            }
            Some((name, received, total)) => {
                format!(
                    "the byte stream ended after {received} of {total} bytes of tensor {name:?}"
                )
            }
            None if !self.reader.is_between_frames() => {
                "the byte stream ended inside a frame".into()
            }
            None if self.outgoing.values().all(Outgoing::is_empty) => return Ok(()),
            None => "the byte stream ended while this end still had data to send".into(),
        };
        Err(Error::Lost { what })
    }

    /// Returns whether a lack of credit would split the next piece of a payload.
    pub(crate) fn is_short_of_credit(&self) -> bool {
        let piece = self.longest_piece();
        self.outgoing.values().any(|outgoing| outgoing.is_split_by_credit(piece))
    }

    /// Returns a counter that grows whenever the connection makes progress.
    pub(crate) fn progress(&self) -> u64 {
        self.progress
    }

    /// Returns whether a transfer is in progress that cannot continue without the peer.
    pub(crate) fn awaits_peer(&self) -> bool {
        // If the length of a body is wrong, the peer's PONGs become part of the body, and the peer
        // never seems silent. The last condition lets the stall timeout end such a wait.
        self.has_unsent()
            || self.incoming.values().any(Incoming::awaits_data)
            || self.reader.is_within_body()
    }

    /// Returns whether [`poll`](Self::poll) may return an event.
    pub(crate) fn may_have_events(&self) -> bool {
        !self.event_streams.is_empty()
            || !self.cancelled.is_empty()
            || self.reader.is_held()
            || (!self.connected_delivered && self.is_connected())
    }

    /// Returns the next event, or `None` if more must be read. Events of one stream are in order.
    ///
    /// After [`Event::Metadata`], provide the memory before the next call. Payload bytes that
    /// arrived with META are then copied directly into it.
    pub fn poll(&mut self) -> Option<Event<S>> {
        loop {
            let event = self.next_event();
            if event.is_some() || !self.reader.is_held() {
                return event;
            }
            self.deferred_error = self.release_held().err();
        }
    }

    fn next_event(&mut self) -> Option<Event<S>> {
        if let (false, Some(peer)) = (self.connected_delivered, &self.peer) {
            self.connected_delivered = true;
            return Some(Event::Connected {
                software: peer.software.clone(),
                service: peer.service.clone(),
            });
        }
        if let Some((stream, reason)) = self.cancelled.pop_front() {
            return Some(Event::Cancelled { stream, reason, sink: None });
        }
        while let Some(stream) = self.event_streams.pop_front() {
            let next = self.incoming.get_mut(&stream).and_then(Incoming::next_event);
            if let Some((event, last)) = next {
                if last {
                    self.release_stream(stream);
                } else {
                    self.event_streams.push_back(stream);
                    self.renew_credit(stream);
                }
                return Some(event);
            }
        }
        None
    }

    /// Notes that a stream may have events.
    fn note_events(&mut self, stream: u32) {
        if !self.event_streams.contains(&stream) {
            self.event_streams.push_back(stream);
        }
    }

    /// Sends the peer a higher credit limit for a stream, if the increase is worth a frame.
    fn renew_credit(&mut self, stream: u32) {
        if let Some(limit) = self.incoming.get_mut(&stream).and_then(Incoming::renew_credit) {
            self.writer.push_control(Kind::Credit, stream, limit, &[]);
        }
    }

    /// Returns an outgoing stream, or [`Error::Misuse`] if it is not open.
    fn sending(&mut self, stream: u32) -> Result<&mut Outgoing, Error> {
        let is_opened = stream < self.next_stream && stream % 2 == self.next_stream % 2;
        let unknown = || {
            let cause =
                if is_opened { "it is no longer open" } else { "this end has not opened it" };
            Error::Misuse(format!("cannot send on stream {stream}: {cause}"))
        };
        let outgoing = self.outgoing.get_mut(&stream).filter(|outgoing| !outgoing.is_finishing());
        outgoing.ok_or_else(unknown)
    }
}
