// SPDX-License-Identifier: MIT OR Apache-2.0
//! One end of a connection, without I/O.

mod reading;
mod writing;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{BorrowedFd, OwnedFd};

use bytes::Bytes;
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

/// One end of a connection, without I/O: it neither blocks nor knows a socket.
///
/// To read, pass the bytes that arrive to the buffers of [`read_targets`](Self::read_targets),
/// which may be the memory of a tensor. Report them with [`filled`](Self::filled), and get the
/// events with [`poll`](Self::poll). To write, call [`plan_writes`](Self::plan_writes), write the
/// slices of [`write_slices`](Self::write_slices), and report them with [`written`](Self::written).
///
/// After an error of [`filled`](Self::filled) nothing more can be read. The frames that are left to
/// write tell the peer why.
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
    /// The peer's HELLO.
    peer: Option<Hello>,
    reader: Reader,
    incoming: BTreeMap<u32, Incoming<S>>,
    /// Incoming streams that may have an event.
    event_streams: VecDeque<u32>,
    connected_delivered: bool,
    hello_sent: bool,
    /// The peer's cancellations of outgoing streams, and their reasons.
    cancelled: VecDeque<(u32, String)>,
    outgoing: BTreeMap<u32, Outgoing>,
    /// Outgoing streams that have ended, and that the peer has not taken completely.
    ending: BTreeSet<u32>,
    next_stream: u32,
    writer: Writer,
    /// A counter of progress: frames that carry something, and writes of anything but PING and
    /// PONG.
    progress: u64,
    /// PINGs sent.
    pings: u64,
    /// The shared memory of each direction.
    ring_writer: Option<RingWriter>,
    ring_reader: Option<RingReader>,
    /// A descriptor whose SHARE has not arrived yet.
    descriptor: Option<OwnedFd>,
    /// The peer's reason in CLOSE.
    closed: Option<String>,
    failed: bool,
    /// An error in bytes that were held back, until a method can return it.
    deferred_error: Option<Error>,
    stats: ConnectionStats,
}

/// Truncates a reason to the length of a frame.
fn truncated(reason: &str) -> &[u8] {
    &reason.as_bytes()[..reason.len().min(MAX_CONTROL_LEN)]
}

impl<S: Sink> Connection<S> {
    /// Creates an end of a connection. A connector has its HELLO to write.
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
        // An acceptor sends nothing before it has read the connector's preface and HELLO.
        if role == Role::Connector {
            this.send_hello();
        }
        this
    }

    /// Creates an end of a connection without preface and HELLO. Both ends must have the same
    /// options.
    pub(crate) fn without_handshake(role: Role, options: ConnectionOptions) -> Self {
        let mut this = Self::new(role, options);
        this.peer = Some(Hello::new(&this.options, role));
        (this.connected_delivered, this.hello_sent) = (true, true);
        this.writer = Writer::default();
        this.reader.skip_preface();
        this
    }

    /// Queues the preface and HELLO before everything else, once.
    fn send_hello(&mut self) {
        if !std::mem::replace(&mut self.hello_sent, true) {
            let body = Hello::new(&self.options, self.role).encode();
            let mut hello = OutFrame::control(Kind::Hello, 0, 0, &body);
            hello.head.splice(0..0, PREFACE);
            self.writer.push_first(hello);
        }
    }

    /// Returns whether the handshake is complete.
    pub fn is_connected(&self) -> bool {
        self.peer.is_some()
    }

    /// Returns the statistics of the connection.
    pub fn stats(&self) -> ConnectionStats {
        self.stats
    }

    /// Returns the statistics of an open stream of either direction.
    pub fn stream_stats(&self, stream: u32) -> Option<StreamStats> {
        let outgoing = self.outgoing.get(&stream).map(Outgoing::stats);
        outgoing.or_else(|| self.incoming.get(&stream).map(Incoming::stats))
    }

    /// Returns how many bytes of this end's memory wait for the user: at most a window and a
    /// message per stream.
    pub fn staged_bytes(&self) -> usize {
        self.incoming.values().map(Incoming::staged_bytes).sum()
    }

    /// Opens a stream to send on, and returns its number.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] before the handshake is complete, or if the peer's limit of open
    /// streams is reached. A stream counts until it is [taken](Self::is_taken).
    pub fn open_stream(&mut self) -> Result<u32, Error> {
        let misuse = |what: &str| Error::Misuse(what.into());
        let early = || misuse("cannot open a stream: the handshake is not complete");
        let peer = self.peer.as_ref().ok_or_else(early)?;
        if self.outgoing.len() + self.ending.len() >= peer.max_streams as usize {
            return Err(Error::Misuse(format!(
                "cannot open a stream: the peer allows at most {}",
                peer.max_streams
            )));
        }
        let stream = self.next_stream;
        self.next_stream = stream
            .checked_add(2)
            .ok_or_else(|| misuse("all stream numbers of the connection are used"))?;
        self.outgoing.insert(stream, Outgoing::new(stream, peer.window));
        Ok(stream)
    }

    /// Queues a tensor on a stream. `payload` has the bytes of its storage, which are not copied.
    ///
    /// # Errors
    /// Returns [`Error::Unsendable`] if the tensor is invalid, and [`Error::Misuse`] if the stream
    /// is not open.
    pub fn send(
        &mut self,
        stream: u32,
        info: TensorInfo,
        payload: Bytes,
        options: SendOptions,
    ) -> Result<(), Error> {
        self.sending(stream)?.push_tensor(info, Some(payload), options)
    }

    /// Queues a tensor whose storage was sent on this stream with [`keep`](SendOptions::keep). With
    /// `keep`, later tensors can use the storage too.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_view(&mut self, stream: u32, info: TensorInfo, keep: bool) -> Result<(), Error> {
        self.sending(stream)?.push_tensor(
            info,
            None,
            SendOptions { keep, ..SendOptions::default() },
        )
    }

    /// Queues a message of at most 64 KiB on a stream. It overtakes payloads of other streams.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] if the message is longer, or the stream is not open.
    pub fn send_message(&mut self, stream: u32, message: Bytes) -> Result<(), Error> {
        if message.len() > MAX_CONTROL_LEN {
            let what = format!("message of {} bytes (at most {MAX_CONTROL_LEN})", message.len());
            return Err(Error::Misuse(what));
        }
        self.sending(stream)?.push_message(message);
        Ok(())
    }

    /// Ends a stream after everything that is queued on it.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] if the stream is not open.
    pub fn finish(&mut self, stream: u32) -> Result<(), Error> {
        self.sending(stream)?.finish();
        Ok(())
    }

    /// Returns whether everything that was queued on a stream has been written, or dropped.
    pub fn is_sent(&self, stream: u32) -> bool {
        self.outgoing.get(&stream).is_none_or(Outgoing::is_empty) && self.writer.is_queue_empty()
    }

    /// Returns whether the peer has released an outgoing stream: its application has taken all
    /// data, or the stream was cancelled.
    pub fn is_taken(&self, stream: u32) -> bool {
        stream < self.next_stream
            && !self.outgoing.contains_key(&stream)
            && !self.ending.contains(&stream)
    }

    /// Returns how many bytes are queued and not yet written.
    pub fn unsent_bytes(&self) -> usize {
        self.writer.queued_bytes()
            + self.outgoing.values().map(Outgoing::unsent_bytes).sum::<usize>()
    }

    /// Returns the memory of incomplete tensors once the connection has ended. Nothing more can be
    /// received.
    pub fn take_sinks(&mut self) -> Vec<S> {
        std::mem::take(&mut self.incoming).into_values().flat_map(Incoming::into_sinks).collect()
    }

    /// Returns whether anything is queued and not yet written, on any stream.
    pub fn has_unsent(&self) -> bool {
        !self.writer.is_empty() || self.outgoing.values().any(|o| !o.is_empty())
    }

    /// Returns whether data of the user is queued and not yet written.
    pub(crate) fn has_unsent_user_data(&self) -> bool {
        self.outgoing.values().any(|outgoing| !outgoing.is_empty()) || self.writer.has_user_data()
    }

    /// Cancels a stream of either direction with a reason. Drops what is queued on it or still
    /// arrives. Does nothing if the stream has ended.
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

    /// Removes an incoming stream whose last event was delivered, so that the peer may open
    /// another.
    fn release_stream(&mut self, stream: u32) {
        self.incoming.remove(&stream);
        self.writer.push_control(Kind::Finish, stream, 0, &[]);
    }

    /// Provides the memory for a tensor after its [`Event::Metadata`]. It must have the length of
    /// the storage.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] if no tensor of the stream waits for memory or the length is
    /// wrong, or an error of the sink.
    pub fn accept(&mut self, stream: u32, sink: S) -> Result<(), Error> {
        let Some(incoming) = self.incoming.get_mut(&stream) else {
            return Err(no_tensor(stream));
        };
        self.stats.copied_bytes += incoming.accept(sink)?;
        self.note_events(stream);
        self.renew_credit(stream);
        Ok(())
    }

    /// Returns the tensor of a stream whose [`Event::Metadata`] was delivered, and whose
    /// [`Event::End`] was not.
    pub fn announced(&self, stream: u32) -> Option<&TensorInfo> {
        self.incoming.get(&stream)?.announced()
    }

    /// Offers shared memory to a peer on the same host. If the peer maps it, large payloads go
    /// through it. [`Link`](crate::Link) does this by itself over Unix sockets.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] before the handshake is complete, or if memory was offered before.
    pub fn share(&mut self, memory: SharedMemory) -> Result<(), Error> {
        if !self.is_connected() || self.ring_writer.is_some() {
            let what = "shared memory can be offered once, after the handshake";
            return Err(Error::Misuse(what.into()));
        }
        let frame = OutFrame::control(Kind::Share, 0, memory.len() as u64, &[]);
        self.writer.push(OutFrame { has_descriptor: true, ..frame });
        self.ring_writer = Some(RingWriter::new(memory));
        Ok(())
    }

    /// Returns whether a payload could go through shared memory, and none was offered yet.
    pub(crate) fn could_share(&self) -> bool {
        let shareable = || self.outgoing.values().any(Outgoing::has_shareable);
        self.options.shared_bytes > 0
            && self.ring_writer.is_none()
            && self.is_connected()
            && shareable()
    }

    /// Returns the descriptor that must be attached to the first byte of
    /// [`write_slices`](Self::write_slices).
    pub fn descriptor_to_send(&self) -> Option<BorrowedFd<'_>> {
        let ring = self.ring_writer.as_ref().filter(|_| self.writer.has_descriptor_first());
        ring.map(|ring| ring.memory().descriptor())
    }

    /// Provides a descriptor that arrived with the bytes of the next [`filled`](Self::filled).
    pub fn descriptor_received(&mut self, descriptor: OwnedFd) {
        self.descriptor = Some(descriptor);
    }

    /// Queues a PING.
    pub fn ping(&mut self) {
        self.pings += 1;
        self.writer.push_control(Kind::Ping, 0, self.pings, &[]);
    }

    /// Ends the connection with a reason. Drops everything that is queued.
    pub fn close(&mut self, reason: &str) {
        self.writer.drop_unwritten();
        self.outgoing.clear();
        let mut close = OutFrame::control(Kind::Close, 0, 0, truncated(reason));
        if !std::mem::replace(&mut self.hello_sent, true) {
            close.head.splice(0..0, PREFACE);
        }
        self.writer.push(close);
    }

    /// Checks whether the peer's byte stream may end here.
    ///
    /// # Errors
    /// Returns [`Error::Closed`] if the peer sent CLOSE, and [`Error::Lost`] if something is
    /// incomplete.
    pub fn end_of_input(&self) -> Result<(), Error> {
        if let Some(reason) = &self.closed {
            return Err(Error::Closed { reason: reason.clone() });
        }
        let incomplete = self.incoming.values().find(|incoming| incoming.is_within_tensor());
        let what = match incomplete.map(Incoming::current) {
            _ if self.peer.is_none() => "before the handshake was complete".into(),
            Some((name, received)) => format!("after {received} bytes of tensor {name:?}"),
            None if self.reader.is_between_frames()
                && self.outgoing.values().all(Outgoing::is_empty) =>
            {
                return Ok(());
            }
            None => "inside a frame, or with unsent data".into(),
        };
        Err(Error::Lost { what })
    }

    /// Returns whether credit would split a piece of a payload.
    pub(crate) fn is_short_of_credit(&self) -> bool {
        let piece = self.options.frame_bytes;
        self.outgoing.values().any(|outgoing| outgoing.is_split_by_credit(piece))
    }

    /// Returns a counter that grows whenever the connection makes progress.
    pub(crate) fn progress(&self) -> u64 {
        self.progress
    }

    /// Returns whether a transfer is in progress in which the peer must do something.
    pub(crate) fn awaits_peer(&self) -> bool {
        // An incomplete body may have swallowed PONGs, so they do not count as progress.
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
    /// After [`Event::Metadata`], provide the memory before the next call: then payload bytes that
    /// arrived with META are copied straight into it.
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

    /// Grants credit again, if it is worth a frame.
    fn renew_credit(&mut self, stream: u32) {
        if let Some(limit) = self.incoming.get_mut(&stream).and_then(Incoming::renew_credit) {
            self.writer.push_control(Kind::Credit, stream, limit, &[]);
        }
    }

    /// Returns an open outgoing stream.
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
