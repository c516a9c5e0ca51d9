// SPDX-License-Identifier: MIT OR Apache-2.0
//! One end of a connection, without its socket.

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
use crate::incoming::Incoming;
use crate::info::TensorInfo;
use crate::outgoing::{OutFrame, Outgoing};
use crate::ring::{RingIn, RingOut};
use crate::{ConnectionOptions, Error, SendOptions, Sink};

/// Which end this is. What one sends has odd numbers of streams, the other's even ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It asked for the connection.
    Connector,
    /// It accepted the connection, and asks for a token if it has one.
    Acceptor,
}

/// What happens on a connection.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<S> {
    /// Both ends know each other, and streams may be opened.
    Connected {
        /** What the other end runs, in its words. */
        software: String,
        /** Which service it wants. */
        service: String,
    },
    /// A tensor begins. It needs [memory](Connection::accept), unless it is empty or its storage is
    /// known.
    Metadata {
        /** On which stream. */
        stream: u32,
        /** What it is. */
        info: TensorInfo,
        /** Its storage came with a tensor before, and does not come again. */
        known: bool,
        /** Tensors that come later on this stream may have the same storage. */
        kept: bool,
    },
    /// Bytes of a tensor are where they belong.
    Data {
        /** On which stream. */
        stream: u32,
        /** First byte, in the payload. */
        offset: u64,
        /** How many. */
        bytes: u64,
    },
    /// A tensor is complete.
    End {
        /** On which stream. */
        stream: u32,
        /** What it is. */
        info: Box<TensorInfo>,
        /** Its memory; `None` if none was needed and none was given. */
        sink: Option<S>,
    },
    /// A message, whole.
    Message {
        /** On which stream. */
        stream: u32,
        /** What it says. */
        bytes: Bytes,
    },
    /// The other end gave a stream up: one of its own, or one that this end sends.
    Cancelled {
        /** Which. */
        stream: u32,
        /** Why, in its words. */
        reason: String,
        /** The memory of the tensor that was not complete, if it had some. */
        sink: Option<S>,
    },
    /// Nothing more comes on a stream.
    Finished {
        /** Which. */
        stream: u32,
    },
}

/// What a connection has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConnectionStats {
    /// Bytes written, all told.
    pub sent_bytes: u64,
    /// Bytes read, all told.
    pub received_bytes: u64,
    /// Frames written.
    pub sent_frames: u64,
    /// Frames read.
    pub received_frames: u64,
    /// Bytes of payloads that were not read straight to where they belong.
    pub copied_bytes: u64,
}

/// What a stream has carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StreamStats {
    /// Tensors that were begun.
    pub tensors: u64,
    /// Messages.
    pub messages: u64,
    /// Bytes of payloads, as they are when decoded.
    pub payload_bytes: u64,
    /// Of payloads that were begun, or wait to be: all their bytes.
    pub expected_bytes: u64,
    /// How often it had something to send and no credit.
    pub pauses: u64,
}

/// One end of a connection, which is told what came and asked what is to go; it never waits and
/// knows no socket.
///
/// Reading: [`read_targets`](Self::read_targets) says where bytes are to be read to, which may be
/// the memory of a tensor, [`filled`](Self::filled) how many came, and [`poll`](Self::poll) what
/// that means. Writing: [`plan_writes`](Self::plan_writes), [`write_slices`](Self::write_slices),
/// [`written`](Self::written).
///
/// After an error of [`filled`](Self::filled) it is of no more use, but for the writes that are
/// left: they tell the other end why.
#[derive(Debug)]
pub struct Connection<S> {
    role: Role,
    options: ConnectionOptions,
    /// What the other end has said.
    peer: Option<Hello>,
    reader: Reader,
    incoming: BTreeMap<u32, Incoming<S>>,
    /// Streams on which there may be something to tell.
    news: VecDeque<u32>,
    connected_told: bool,
    greeted: bool,
    /// Cancellations of streams that this end sends.
    cancelled: VecDeque<(u32, String)>,
    outgoing: BTreeMap<u32, Outgoing>,
    /// Streams that this end has ended, and whose end the other has not taken.
    ending: BTreeSet<u32>,
    next_stream: u32,
    writer: Writer,
    /// How often something has gone on: frames that bring something have come, or bytes been
    /// written that are no signs of life.
    moves: u64,
    /// Pings sent and not answered.
    pings: u64,
    /// Memory by which this end's payloads go, and the other's come, and a descriptor that came and
    /// belongs to a SHARE that did not yet.
    ring_out: Option<RingOut>,
    ring_in: Option<RingIn>,
    descriptor: Option<OwnedFd>,
    closed: Option<String>,
    failed: bool,
    /// What was wrong with bytes that were held back, until it is told where errors are.
    late: Option<Error>,
    stats: ConnectionStats,
}

/// As much of a reason as goes into a frame.
fn short(reason: &str) -> &[u8] {
    &reason.as_bytes()[..reason.len().min(MAX_CONTROL_LEN)]
}

impl<S: Sink> Connection<S> {
    /// An end that has said nothing yet.
    pub fn new(role: Role, options: ConnectionOptions) -> Self {
        let mut this = Self {
            role,
            peer: None,
            reader: Reader::default(),
            incoming: BTreeMap::new(),
            news: VecDeque::new(),
            connected_told: false,
            greeted: false,
            cancelled: VecDeque::new(),
            outgoing: BTreeMap::new(),
            ending: BTreeSet::new(),
            next_stream: if role == Role::Connector { 1 } else { 2 },
            writer: Writer::default(),
            moves: 0,
            pings: 0,
            ring_out: None,
            ring_in: None,
            descriptor: None,
            closed: None,
            failed: false,
            late: None,
            stats: ConnectionStats::default(),
            options,
        };
        // Who accepts says nothing before it knows that it talks to its like.
        if role == Role::Connector {
            this.greet();
        }
        this
    }

    /// An end that knows the other, and is known: neither says who it is.
    pub(crate) fn introduced(role: Role, options: ConnectionOptions) -> Self {
        let mut this = Self::new(role, options);
        this.peer = Some(Hello::of(&this.options, role));
        (this.connected_told, this.greeted) = (true, true);
        this.writer = Writer::default();
        this.reader.skip_preface();
        this
    }

    /// Says who this is, once and first.
    fn greet(&mut self) {
        if !std::mem::replace(&mut self.greeted, true) {
            let body = Hello::of(&self.options, self.role).encode();
            let mut hello = OutFrame::control(Kind::Hello, 0, 0, &body);
            hello.head.splice(0..0, PREFACE);
            self.writer.push_first(hello);
        }
    }

    /// Whether both ends know each other.
    pub fn is_connected(&self) -> bool {
        self.peer.is_some()
    }

    /// What it has done.
    pub fn stats(&self) -> ConnectionStats {
        self.stats
    }

    /// What a stream of either end has carried; `None` of one that is not open, or of which all is
    /// said.
    pub fn stream_stats(&self, stream: u32) -> Option<StreamStats> {
        let outgoing = self.outgoing.get(&stream).map(Outgoing::stats);
        outgoing.or_else(|| self.incoming.get(&stream).map(Incoming::stats))
    }

    /// Memory of its own that waits for the user, in bytes: never more than the streams' windows,
    /// and one message of each.
    pub fn staged_bytes(&self) -> usize {
        self.incoming.values().map(Incoming::staged_bytes).sum()
    }

    /// A new stream to send on.
    ///
    /// # Errors
    /// [`Error::Misuse`] before both ends know each other, or when the other takes no more at a
    /// time: those count that have not been [taken](Self::is_taken).
    pub fn open_stream(&mut self) -> Result<u32, Error> {
        let misuse = |what: &str| Error::Misuse(what.into());
        let peer =
            self.peer.as_ref().ok_or_else(|| misuse("the other end has not said who it is"))?;
        if self.outgoing.len() + self.ending.len() >= peer.max_streams as usize {
            return Err(Error::Misuse(format!(
                "{} streams are open, and the other end takes no more",
                peer.max_streams
            )));
        }
        let stream = self.next_stream;
        self.next_stream = stream
            .checked_add(2)
            .ok_or_else(|| misuse("this connection has had all its streams"))?;
        self.outgoing.insert(stream, Outgoing::new(stream, peer.window));
        Ok(stream)
    }

    /// Sends a tensor: its storage's bytes, which stay where they are until they have been written.
    ///
    /// # Errors
    /// [`Error::Unsendable`]; [`Error::Misuse`] of a stream that is not open.
    pub fn send(
        &mut self,
        stream: u32,
        info: TensorInfo,
        payload: Bytes,
        options: SendOptions,
    ) -> Result<(), Error> {
        self.sending(stream)?.push_tensor(info, Some(payload), options)
    }

    /// Sends a tensor whose storage was sent on this stream, with [`keep`](SendOptions::keep), and
    /// is kept on if `keep` says so.
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

    /// Sends a message: at most 64 KiB, which go before the payloads of other streams.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it is longer, or the stream is not open.
    pub fn send_message(&mut self, stream: u32, message: Bytes) -> Result<(), Error> {
        if message.len() > MAX_CONTROL_LEN {
            let what =
                format!("a message of {} bytes, of at most {MAX_CONTROL_LEN}", message.len());
            return Err(Error::Misuse(what));
        }
        self.sending(stream)?.push_message(message);
        Ok(())
    }

    /// Ends a stream behind what was sent on it.
    ///
    /// # Errors
    /// [`Error::Misuse`] of a stream that is not open.
    pub fn finish(&mut self, stream: u32) -> Result<(), Error> {
        self.sending(stream)?.finish();
        Ok(())
    }

    /// Whether all that was sent on a stream has been handed to the socket, or will not be.
    pub fn is_sent(&self, stream: u32) -> bool {
        self.outgoing.get(&stream).is_none_or(Outgoing::is_empty) && self.writer.is_queue_empty()
    }

    /// Whether the other end's user has taken all that was sent on a stream that this end has
    /// ended; or one end gave it up.
    pub fn is_taken(&self, stream: u32) -> bool {
        stream < self.next_stream
            && !self.outgoing.contains_key(&stream)
            && !self.ending.contains(&stream)
    }

    /// Bytes of payloads that were sent and have not been handed to the socket.
    pub fn unsent_bytes(&self) -> usize {
        self.writer.queued_bytes()
            + self.outgoing.values().map(Outgoing::unsent_bytes).sum::<usize>()
    }

    /// The memory of tensors that are not complete, when the connection has ended: nothing more can
    /// be received.
    pub fn take_sinks(&mut self) -> Vec<S> {
        std::mem::take(&mut self.incoming).into_values().flat_map(Incoming::into_sinks).collect()
    }

    /// Whether something that was sent on any stream has not been handed to the socket.
    pub fn has_unsent(&self) -> bool {
        !self.writer.is_empty() || self.outgoing.values().any(|o| !o.is_empty())
    }

    /// Whether something that the user sent has not been handed to the socket.
    pub(crate) fn owes(&self) -> bool {
        self.outgoing.values().any(|outgoing| !outgoing.is_empty()) || self.writer.owes()
    }

    /// Gives a stream up, this end's or the other's. What is under way is dropped. Nothing happens
    /// if it is over.
    pub fn cancel(&mut self, stream: u32, reason: &str) {
        if self.outgoing.remove(&stream).is_some() {
            self.ending.insert(stream);
            self.writer.say(Kind::Cancel, stream, 0, short(reason));
        } else if let Some(incoming) = self.incoming.get_mut(&stream) {
            if incoming.refuse() {
                self.forget(stream);
            } else {
                self.writer.say(Kind::Cancel, stream, 0, short(reason));
            }
        }
    }

    /// A stream is over, and its user has all of it, or wants none: the other end may open another.
    fn forget(&mut self, stream: u32) {
        self.incoming.remove(&stream);
        self.writer.say(Kind::Finish, stream, 0, &[]);
    }

    /// Gives a tensor that was announced its memory, of exactly its storage's length.
    ///
    /// # Errors
    /// [`Error::Misuse`] of other memory, or when none was announced; what the memory says.
    pub fn accept(&mut self, stream: u32, sink: S) -> Result<(), Error> {
        let Some(incoming) = self.incoming.get_mut(&stream) else {
            return Err(Error::Misuse(format!("stream {stream} has announced no tensor")));
        };
        self.stats.copied_bytes += incoming.accept(sink)?;
        self.note(stream);
        self.renew(stream);
        Ok(())
    }

    /// What a tensor is that was announced and has no memory yet, or is on its way.
    pub fn announced(&self, stream: u32) -> Option<&TensorInfo> {
        self.incoming.get(&stream)?.announced()
    }

    /// Offers the other end, which is on the same host, memory by which large payloads then go if
    /// it takes it. [`Link`](crate::Link) does so by itself over Unix sockets.
    ///
    /// # Errors
    /// [`Error::Misuse`] before both ends know each other, or when some was offered before.
    pub fn share(&mut self, memory: SharedMemory) -> Result<(), Error> {
        if !self.is_connected() || self.ring_out.is_some() {
            return Err(Error::Misuse(
                "memory is shared once, between ends that know each other".into(),
            ));
        }
        let frame = OutFrame::control(Kind::Share, 0, memory.len() as u64, &[]);
        self.writer.push(OutFrame { has_descriptor: true, ..frame });
        self.ring_out = Some(RingOut::new(memory));
        Ok(())
    }

    /// Whether there is a payload that shared memory would speed up, and none was offered.
    pub(crate) fn could_share(&self) -> bool {
        let shareable = || self.outgoing.values().any(Outgoing::has_to_share);
        self.options.shared_bytes > 0
            && self.ring_out.is_none()
            && self.is_connected()
            && shareable()
    }

    /// The descriptor that must go with the first of the bytes that
    /// [`write_slices`](Self::write_slices) gives.
    pub fn descriptor_to_send(&self) -> Option<BorrowedFd<'_>> {
        let ring = self.ring_out.as_ref().filter(|_| self.writer.has_descriptor_first());
        ring.map(|ring| ring.memory().descriptor())
    }

    /// A descriptor came with the bytes that [`filled`](Self::filled) is told of next.
    pub fn descriptor_received(&mut self, descriptor: OwnedFd) {
        self.descriptor = Some(descriptor);
    }

    /// Asks the other end for a sign of life.
    pub fn ping(&mut self) {
        self.pings += 1;
        self.writer.say(Kind::Ping, 0, self.pings, &[]);
    }

    /// Says that this is the end, and why. What was not written before is dropped.
    pub fn close(&mut self, reason: &str) {
        self.writer.drop_unwritten();
        self.outgoing.clear();
        let mut close = OutFrame::control(Kind::Close, 0, 0, short(reason));
        if !std::mem::replace(&mut self.greeted, true) {
            close.head.splice(0..0, PREFACE);
        }
        self.writer.push(close);
    }

    /// The end of what the other end sends: whether it may end here.
    ///
    /// # Errors
    /// [`Error::Lost`] in the middle of something; [`Error::Closed`] when it said why.
    pub fn end_of_input(&self) -> Result<(), Error> {
        if let Some(reason) = &self.closed {
            return Err(Error::Closed { reason: reason.clone() });
        }
        let arriving = self.incoming.values().find(|incoming| incoming.is_within_tensor());
        let what = match arriving.map(Incoming::arriving) {
            _ if self.peer.is_none() => "before the other end said who it is".into(),
            Some((name, received)) => format!("after {received} bytes of tensor `{name}`"),
            None if self.reader.is_between_frames()
                && self.outgoing.values().all(Outgoing::is_empty) =>
            {
                return Ok(());
            }
            None => "in the middle of a frame, or with something to send".into(),
        };
        Err(Error::Lost { what })
    }

    /// Whether there is credit for a part of what a frame would have.
    pub(crate) fn is_short_of_credit(&self) -> bool {
        self.outgoing.values().any(|outgoing| outgoing.is_cut_short(self.options.frame_bytes))
    }

    /// A number that grows whenever something goes on.
    pub(crate) fn moves(&self) -> u64 {
        self.moves
    }

    /// Whether something is under way that the other end must do its part for.
    pub(crate) fn is_under_way(&self) -> bool {
        // Signs of life that arrive as bytes of an incomplete frame are none.
        self.has_unsent()
            || self.incoming.values().any(Incoming::is_awaited)
            || self.reader.is_within_body()
    }

    /// Whether [`poll`](Self::poll) may have something to tell.
    pub(crate) fn may_have_events(&self) -> bool {
        let told = self.news.is_empty() && self.cancelled.is_empty() && !self.reader.is_held();
        !told || (!self.connected_told && self.is_connected())
    }

    /// What happened, in the order of each stream. `None` when more must be read. Who gives an
    /// announced tensor its memory before the next call has what came with the announcement put
    /// there at once.
    pub fn poll(&mut self) -> Option<Event<S>> {
        loop {
            let event = self.next_event();
            if event.is_some() || !self.reader.is_held() {
                return event;
            }
            self.late = self.go_on().err();
        }
    }

    fn next_event(&mut self) -> Option<Event<S>> {
        if let (false, Some(peer)) = (self.connected_told, &self.peer) {
            self.connected_told = true;
            return Some(Event::Connected {
                software: peer.software.clone(),
                service: peer.service.clone(),
            });
        }
        if let Some((stream, reason)) = self.cancelled.pop_front() {
            return Some(Event::Cancelled { stream, reason, sink: None });
        }
        while let Some(stream) = self.news.pop_front() {
            let told = self.incoming.get_mut(&stream).and_then(Incoming::next_event);
            if let Some((event, over)) = told {
                if over {
                    self.forget(stream);
                } else {
                    self.news.push_back(stream);
                    self.renew(stream);
                }
                return Some(event);
            }
        }
        None
    }

    fn note(&mut self, stream: u32) {
        if !self.news.contains(&stream) {
            self.news.push_back(stream);
        }
    }

    fn renew(&mut self, stream: u32) {
        if let Some(limit) = self.incoming.get_mut(&stream).and_then(Incoming::renew) {
            self.writer.say(Kind::Credit, stream, limit, &[]);
        }
    }

    fn sending(&mut self, stream: u32) -> Result<&mut Outgoing, Error> {
        let unknown = || Error::Misuse(format!("stream {stream} is not open"));
        self.outgoing.get_mut(&stream).ok_or_else(unknown)
    }
}
