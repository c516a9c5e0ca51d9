// SPDX-License-Identifier: MIT OR Apache-2.0
//! One end of a connection, without its socket.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::hash::Hasher;
use std::io::IoSlice;
use std::os::fd::{BorrowedFd, OwnedFd};

use bytes::Bytes;
use ts_format::Scratch;
use ts_pool::SharedMemory;
use twox_hash::XxHash3_64;

use crate::frame::{
    CHECKED, ENCODED, HEADER_LEN, Header, Kind, MAX_CONTROL_LEN, MAX_PIECE_LEN, PREFACE, SHARED,
};
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
    /// A tensor begins. It needs [memory](Connection::accept), unless it is empty or its storage is known.
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

/// One end of a connection, which is told what came and asked what is to go; it never waits and knows no socket.
///
/// Reading: [`read_targets`](Self::read_targets) says where bytes are to be read to, which may be the memory of a tensor,
/// [`filled`](Self::filled) how many came, and [`poll`](Self::poll) what that means. Writing: [`plan_writes`](Self::plan_writes),
/// [`write_slices`](Self::write_slices), [`written`](Self::written).
///
/// After an error of [`filled`](Self::filled) it is of no more use, but for the writes that are left: they tell the other end why.
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
    /// The stream that was last served, and how many messages went before payloads since.
    last_served: u32,
    urgent_in_row: u32,
    next_stream: u32,
    control: VecDeque<OutFrame>,
    queue: VecDeque<OutFrame>,
    /// Bytes of the first that are written.
    queue_offset: usize,
    queued_bytes: usize,
    /// How often something has gone on: frames that bring something have come, or bytes been written that are no signs of life.
    moves: u64,
    /// Pings sent and not answered.
    pings: u64,
    /// The ping that is to be answered.
    pong: Option<u64>,
    /// Memory by which this end's payloads go, and the other's come, and a descriptor that came and belongs to a SHARE that did not yet.
    ring_out: Option<RingOut>,
    ring_in: Option<RingIn>,
    descriptor: Option<OwnedFd>,
    closed: Option<String>,
    failed: bool,
    stats: ConnectionStats,
}

/// As much of a reason as goes into a frame.
fn short(reason: &str) -> &[u8] {
    &reason.as_bytes()[..reason.len().min(MAX_CONTROL_LEN)]
}

/// How much is put together for the socket at a time, in bytes: what else is to be sent comes behind it.
const LOOKAHEAD: usize = 2 << 20;
/// The most answers that wait for the other end to read: more than streams that are open can need.
const MAX_ANSWERS: usize = 4096;
/// The longest piece while several streams have something to send.
const SHARED_PIECE: usize = 256 << 10;
/// So many messages go before a payload that waits.
const MAX_URGENT: u32 = 16;
/// What is read at a time while small things come.
const SCRATCH: usize = 4 << 10;
/// Payloads from here on are never read by way of `scratch`.
const BULK: u64 = SCRATCH as u64;

struct Reader {
    state: Reading,
    /// What has been read and not looked at: `scratch[..have]`.
    scratch: Box<[u8; SCRATCH]>,
    have: usize,
    /// The body of a frame that is no payload, or of an encoded one, and how much of it has come.
    body: Vec<u8>,
    body_have: usize,
    decoder: Scratch,
    /// Large things come: no byte is read ahead of a header, for it may belong elsewhere.
    bulk: bool,
    /// How long the first target is that was given last.
    planned: usize,
    discarded: Vec<u8>,
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").field("have", &self.have).field("bulk", &self.bulk).finish_non_exhaustive()
    }
}

enum Reading {
    Preface,
    Header,
    /// A body that is put together in `body`, until it is so long as the header says.
    Body(Header),
    /// A payload: so many bytes are still to come.
    Payload {
        header: Header,
        left: usize,
        hasher: Option<Box<XxHash3_64>>,
    },
    /// A checksum.
    Sum {
        header: Header,
        sum: u64,
    },
}

impl<S: Sink> Connection<S> {
    /// An end that has said nothing yet.
    pub fn new(role: Role, options: ConnectionOptions) -> Self {
        let mut this = Self {
            role,
            peer: None,
            reader: Reader {
                state: Reading::Preface,
                scratch: Box::new([0; SCRATCH]),
                have: 0,
                body: Vec::new(),
                body_have: 0,
                decoder: Scratch::default(),
                bulk: true,
                planned: 0,
                discarded: Vec::new(),
            },
            incoming: BTreeMap::new(),
            news: VecDeque::new(),
            connected_told: false,
            greeted: false,
            cancelled: VecDeque::new(),
            outgoing: BTreeMap::new(),
            ending: BTreeSet::new(),
            last_served: 0,
            urgent_in_row: 0,
            next_stream: if role == Role::Connector { 1 } else { 2 },
            control: VecDeque::new(),
            queue: VecDeque::new(),
            queue_offset: 0,
            queued_bytes: 0,
            moves: 0,
            pings: 0,
            pong: None,
            ring_out: None,
            ring_in: None,
            descriptor: None,
            closed: None,
            failed: false,
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
        this.control.clear();
        this.reader.state = Reading::Header;
        this
    }

    /// Says who this is, once and first.
    fn greet(&mut self) {
        if !std::mem::replace(&mut self.greeted, true) {
            let body = Hello::of(&self.options, self.role).encode();
            let mut hello = OutFrame::control(Kind::Hello, 0, 0, &body);
            hello.head.splice(0..0, PREFACE);
            self.control.push_front(hello);
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

    /// What a stream of either end has carried; `None` of one that is not open, or of which all is said.
    pub fn stream_stats(&self, stream: u32) -> Option<StreamStats> {
        let outgoing = self.outgoing.get(&stream).map(Outgoing::stats);
        outgoing.or_else(|| self.incoming.get(&stream).map(Incoming::stats))
    }

    /// Memory of its own that waits for the user, in bytes: never more than the streams' windows, and one message of each.
    pub fn staged_bytes(&self) -> usize {
        self.incoming.values().map(Incoming::staged_bytes).sum()
    }

    /// A new stream to send on.
    ///
    /// # Errors
    /// [`Error::Misuse`] before both ends know each other, or when the other takes no more at a time: those count that have not been
    /// [taken](Self::is_taken).
    pub fn open_stream(&mut self) -> Result<u32, Error> {
        let misuse = |what: &str| Error::Misuse(what.into());
        let peer = self.peer.as_ref().ok_or_else(|| misuse("the other end has not said who it is"))?;
        if self.outgoing.len() + self.ending.len() >= peer.max_streams as usize {
            return Err(Error::Misuse(format!(
                "{} streams are open, and the other end takes no more",
                peer.max_streams
            )));
        }
        let stream = self.next_stream;
        self.next_stream =
            stream.checked_add(2).ok_or_else(|| misuse("this connection has had all its streams"))?;
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

    /// Sends a tensor whose storage was sent on this stream, with [`keep`](SendOptions::keep), and is kept on if `keep` says so.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_view(&mut self, stream: u32, info: TensorInfo, keep: bool) -> Result<(), Error> {
        self.sending(stream)?.push_tensor(info, None, SendOptions { keep, ..SendOptions::default() })
    }

    /// Sends a message: at most 64 KiB, which go before the payloads of other streams.
    ///
    /// # Errors
    /// [`Error::Misuse`] when it is longer, or the stream is not open.
    pub fn send_message(&mut self, stream: u32, message: Bytes) -> Result<(), Error> {
        if message.len() > MAX_CONTROL_LEN {
            let what = format!("a message of {} bytes, of at most {MAX_CONTROL_LEN}", message.len());
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
        self.outgoing.get(&stream).is_none_or(Outgoing::is_empty) && self.queue.is_empty()
    }

    /// Whether the other end's user has taken all that was sent on a stream that this end has ended; or one end gave it up.
    pub fn is_taken(&self, stream: u32) -> bool {
        stream < self.next_stream && !self.outgoing.contains_key(&stream) && !self.ending.contains(&stream)
    }

    /// Bytes of payloads that were sent and have not been handed to the socket.
    pub fn unsent_bytes(&self) -> usize {
        self.queued_bytes + self.outgoing.values().map(Outgoing::unsent_bytes).sum::<usize>()
    }

    /// The memory of tensors that are not complete, when the connection has ended: nothing more can be received.
    pub fn take_sinks(&mut self) -> Vec<S> {
        std::mem::take(&mut self.incoming).into_values().flat_map(Incoming::into_sinks).collect()
    }

    /// Whether something that was sent on any stream has not been handed to the socket.
    pub fn has_unsent(&self) -> bool {
        let control = !self.control.is_empty() || self.pong.is_some();
        !self.queue.is_empty() || control || self.outgoing.values().any(|o| !o.is_empty())
    }

    /// Whether something that the user sent has not been handed to the socket.
    pub(crate) fn owes(&self) -> bool {
        self.outgoing.values().any(|outgoing| !outgoing.is_empty())
            || self.queue.iter().any(OutFrame::is_of_user)
    }

    /// Gives a stream up, this end's or the other's. What is under way is dropped. Nothing happens if it is over.
    pub fn cancel(&mut self, stream: u32, reason: &str) {
        let frame = OutFrame::control(Kind::Cancel, stream, 0, short(reason));
        if self.outgoing.remove(&stream).is_some() {
            self.ending.insert(stream);
            self.control.push_back(frame);
        } else if let Some(incoming) = self.incoming.get_mut(&stream) {
            if incoming.refuse() {
                self.forget(stream);
            } else {
                self.control.push_back(frame);
            }
        }
    }

    /// A stream is over, and its user has all of it, or wants none: the other end may open another.
    fn forget(&mut self, stream: u32) {
        self.incoming.remove(&stream);
        self.control.push_back(OutFrame::control(Kind::Finish, stream, 0, &[]));
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

    /// Offers the other end, which is on the same host, memory by which large payloads then go if it takes it. [`Link`](crate::Link) does so
    /// by itself over Unix sockets.
    ///
    /// # Errors
    /// [`Error::Misuse`] before both ends know each other, or when some was offered before.
    pub fn share(&mut self, memory: SharedMemory) -> Result<(), Error> {
        if !self.is_connected() || self.ring_out.is_some() {
            return Err(Error::Misuse("memory is shared once, between ends that know each other".into()));
        }
        let frame = OutFrame::control(Kind::Share, 0, memory.len() as u64, &[]);
        self.control.push_back(OutFrame { has_descriptor: true, ..frame });
        self.ring_out = Some(RingOut::new(memory));
        Ok(())
    }

    /// Whether there is a payload that shared memory would speed up, and none was offered.
    pub(crate) fn could_share(&self) -> bool {
        let shareable = || self.outgoing.values().any(|outgoing| outgoing.left_to_share().is_some());
        self.options.shared_bytes > 0 && self.ring_out.is_none() && self.is_connected() && shareable()
    }

    /// The descriptor that must go with the first of the bytes that [`write_slices`](Self::write_slices) gives.
    pub fn descriptor_to_send(&self) -> Option<BorrowedFd<'_>> {
        let first = self.queue.front().filter(|frame| frame.has_descriptor && self.queue_offset == 0);
        first.and(self.ring_out.as_ref()).map(|ring| ring.memory().descriptor())
    }

    /// A descriptor came with the bytes that [`filled`](Self::filled) is told of next.
    pub fn descriptor_received(&mut self, descriptor: OwnedFd) {
        self.descriptor = Some(descriptor);
    }

    /// Asks the other end for a sign of life.
    pub fn ping(&mut self) {
        self.pings += 1;
        self.control.push_back(OutFrame::control(Kind::Ping, 0, self.pings, &[]));
    }

    /// Says that this is the end, and why. What was not written before is dropped.
    pub fn close(&mut self, reason: &str) {
        // A frame that was begun is completed: the other end could not read on otherwise.
        self.queue.truncate(usize::from(self.queue_offset > 0));
        self.queued_bytes = self.queue.iter().map(OutFrame::len).sum();
        self.outgoing.clear();
        self.control.retain(|frame| frame.head.starts_with(&PREFACE));
        self.pong = None;
        let mut close = OutFrame::control(Kind::Close, 0, 0, short(reason));
        if !std::mem::replace(&mut self.greeted, true) {
            close.head.splice(0..0, PREFACE);
        }
        self.control.push_back(close);
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
        let what = match (arriving.map(Incoming::arriving), &self.reader.state) {
            _ if self.peer.is_none() => "before the other end said who it is".into(),
            (Some((name, received)), _) => format!("after {received} bytes of tensor `{name}`"),
            (None, Reading::Header)
                if self.reader.have == 0 && self.outgoing.values().all(Outgoing::is_empty) =>
            {
                return Ok(());
            }
            _ => "in the middle of a frame, or with something to send".into(),
        };
        Err(Error::Lost { what })
    }

    /// A number that grows whenever something goes on.
    pub(crate) fn moves(&self) -> u64 {
        self.moves
    }

    /// Whether something is under way that the other end must do its part for.
    pub(crate) fn is_under_way(&self) -> bool {
        self.has_unsent() || self.incoming.values().any(Incoming::is_awaited)
    }

    /// Whether [`poll`](Self::poll) may have something to tell.
    pub(crate) fn may_have_events(&self) -> bool {
        !self.news.is_empty() || !self.cancelled.is_empty() || (!self.connected_told && self.is_connected())
    }

    /// What happened, in the order of each stream. `None` when more must be read.
    pub fn poll(&mut self) -> Option<Event<S>> {
        if let (false, Some(peer)) = (self.connected_told, &self.peer) {
            self.connected_told = true;
            return Some(Event::Connected { software: peer.software.clone(), service: peer.service.clone() });
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

    /// Where the next bytes are to be read to: first the one, then the other. They are not both empty.
    ///
    /// # Errors
    /// What the memory of a tensor says.
    pub fn read_targets(&mut self) -> Result<[&mut [u8]; 2], Error> {
        if let Some(reason) = &self.closed {
            return Err(Error::Closed { reason: reason.clone() });
        }
        if self.failed {
            return Err(Error::Misuse("the connection has ended with an error".into()));
        }
        let Reader { state, scratch, have, body, body_have, bulk, planned, discarded, .. } = &mut self.reader;
        let rest = &mut scratch[*have..];
        // As much as is looked at next, and no more where that may belong elsewhere.
        let (first, next): (&mut [u8], usize) = match state {
            Reading::Preface => (&mut [], PREFACE.len() + HEADER_LEN - *have),
            Reading::Header if *bulk => (&mut [], HEADER_LEN - *have),
            Reading::Header => (&mut [], rest.len()),
            Reading::Sum { .. } => (&mut [], 8 + HEADER_LEN - *have),
            Reading::Body(_) => (&mut body[*body_have..], HEADER_LEN),
            Reading::Payload { header, left, hasher } => {
                let incoming = self.incoming.get_mut(&header.stream);
                let space = incoming.map_or(Ok(None), |incoming| incoming.space(*left))?;
                let sum = if hasher.is_some() { 8 } else { 0 };
                match space {
                    Some(space) => {
                        let next = if space.len() == *left { sum + HEADER_LEN } else { 0 };
                        (space, next)
                    }
                    None => {
                        if discarded.is_empty() {
                            *discarded = vec![0; 64 << 10];
                        }
                        let len = discarded.len().min(*left);
                        (&mut discarded[..len], if len == *left { sum + HEADER_LEN } else { 0 })
                    }
                }
            }
        };
        *planned = first.len();
        Ok([first, &mut rest[..next]])
    }

    /// So many bytes were read to what [`read_targets`](Self::read_targets) gave last.
    ///
    /// # Errors
    /// What the other end did that the protocol forbids, or why it ends the connection; what the memory of a tensor says. What came before
    /// can still be [polled](Self::poll).
    pub fn filled(&mut self, len: usize) -> Result<(), Error> {
        self.stats.received_bytes += len as u64;
        let first = len.min(self.reader.planned);
        self.reader.have += len - first;
        let done = self.fill_first(first).and_then(|()| self.look()).and_then(|()| self.check_answers());
        if let Err(error) = &done
            && !self.failed
        {
            self.failed = true;
            if !matches!(error, Error::Closed { .. }) {
                self.close(&error.to_string());
            }
        }
        done
    }

    /// An end that does not read what it makes this one say is not served on: its answers take memory.
    fn check_answers(&self) -> Result<(), Error> {
        if self.control.len() <= MAX_ANSWERS {
            return Ok(());
        }
        let what = format!("it has not read {} answers", self.control.len());
        Err(Error::Protocol { stream: 0, what })
    }

    fn fill_first(&mut self, len: usize) -> Result<(), Error> {
        match &mut self.reader.state {
            Reading::Body(_) => {
                self.reader.body_have += len;
                if self.reader.body_have == self.reader.body.len() { self.end_body() } else { Ok(()) }
            }
            Reading::Payload { .. } if len > 0 => self.payload_filled(len),
            _ => Ok(()),
        }
    }

    /// So many bytes of a payload are where [`Incoming::space`] said.
    fn payload_filled(&mut self, len: usize) -> Result<(), Error> {
        let Reading::Payload { header, left, hasher } = &mut self.reader.state else { return Ok(()) };
        let stream = header.stream;
        self.moves += 1;
        *left -= len;
        if let Some(incoming) = self.incoming.get_mut(&stream) {
            if let Some(hasher) = hasher
                && let Some(bytes) = incoming.space(len)?
            {
                hasher.write(&bytes[..len]);
            }
            incoming.filled(len)?;
        }
        if *left == 0 {
            self.reader.state = match hasher {
                Some(hasher) => Reading::Sum { header: *header, sum: hasher.finish() },
                None => Reading::Header,
            };
        }
        self.note(stream);
        self.renew(stream);
        Ok(())
    }

    /// Looks at what is in `scratch`, as far as that goes.
    fn look(&mut self) -> Result<(), Error> {
        let mut at = 0;
        loop {
            let there = &self.reader.scratch[at..self.reader.have];
            match &mut self.reader.state {
                Reading::Preface => {
                    let known = there.len().min(PREFACE.len());
                    if there[..known] != PREFACE[..known] {
                        let what = "it does not speak this protocol, or not this version of it".into();
                        return Err(Error::Protocol { stream: 0, what });
                    }
                    if known < PREFACE.len() {
                        break;
                    }
                    at += known;
                    self.reader.state = Reading::Header;
                }
                Reading::Header => {
                    let Some((bytes, _)) = there.split_first_chunk::<HEADER_LEN>() else { break };
                    let header = Header::decode(bytes)?;
                    at += HEADER_LEN;
                    self.begin(header)?;
                }
                Reading::Body(_) => {
                    let rest = &mut self.reader.body[self.reader.body_have..];
                    let len = rest.len().min(there.len());
                    rest[..len].copy_from_slice(&there[..len]);
                    at += len;
                    self.reader.body_have += len;
                    if self.reader.body_have < self.reader.body.len() {
                        break;
                    }
                    self.end_body()?;
                }
                Reading::Payload { header, left, .. } => {
                    let len = there.len().min(*left);
                    if len == 0 {
                        break;
                    }
                    let incoming = self.incoming.get_mut(&header.stream);
                    let space = incoming.map_or(Ok(None), |incoming| incoming.space(len))?;
                    let len = space.as_ref().map_or(len, |space| space.len());
                    if let Some(space) = space {
                        space.copy_from_slice(&there[..len]);
                        self.stats.copied_bytes += len as u64;
                    }
                    at += len;
                    self.payload_filled(len)?;
                }
                Reading::Sum { header, sum } => {
                    let Some((bytes, _)) = there.split_first_chunk::<8>() else { break };
                    at += 8;
                    let (stream, expected, sum) = (header.stream, u64::from_le_bytes(*bytes), *sum);
                    let (offset, end) = (header.seq, header.seq.saturating_add(header.len - 8));
                    self.reader.state = Reading::Header;
                    if let Some(incoming) = self.incoming.get(&stream)
                        && !incoming.is_unwanted()
                        && expected != sum
                    {
                        let what = format!("their XXH3 is {sum:016x}, and {expected:016x} was sent");
                        return Err(Error::Damaged { tensor: incoming.arriving().0, offset, end, what });
                    }
                }
            }
        }
        self.reader.scratch.copy_within(at..self.reader.have, 0);
        self.reader.have -= at;
        Ok(())
    }

    /// A frame begins.
    fn begin(&mut self, header: Header) -> Result<(), Error> {
        self.stats.received_frames += 1;
        let brings = matches!(header.kind, Kind::Hello | Kind::Meta | Kind::Data | Kind::End | Kind::Message);
        self.moves += u64::from(brings);
        let bad = |what: &str| Err(Error::Protocol { stream: header.stream, what: what.into() });
        if self.peer.is_none() && header.kind != Kind::Hello && header.kind != Kind::Close {
            return bad("it did not say who it is first");
        }
        if header.kind != Kind::Data {
            if header.flags != 0 {
                return bad("flags of DATA on another frame");
            }
            self.begin_body(header);
            return if header.len == 0 { self.end_body() } else { Ok(()) };
        }
        let Some(incoming) = self.incoming.get_mut(&header.stream) else {
            return bad("a payload on no open stream");
        };
        let sum = if header.flags & CHECKED == 0 { 0 } else { 8 };
        if header.flags & SHARED != 0 {
            if header.flags & ENCODED != 0 || header.body_len() != 8 + sum {
                return bad("a payload in shared memory that is not as it must be");
            }
            self.reader.bulk = false;
            self.begin_body(header);
            return Ok(());
        }
        let Some(left) = header.body_len().checked_sub(sum).filter(|&left| left > 0) else {
            return bad("a payload of no bytes");
        };
        if header.flags & ENCODED != 0 {
            incoming.begin_data(header.seq, None)?;
            self.begin_body(header);
            return Ok(());
        }
        if left > MAX_PIECE_LEN {
            return bad("a piece of a payload that is too long");
        }
        incoming.begin_data(header.seq, Some(left as u64))?;
        self.reader.bulk = left as u64 >= BULK;
        let hasher = (sum > 0).then(|| Box::new(XxHash3_64::with_seed(0)));
        self.reader.state = Reading::Payload { header, left, hasher };
        Ok(())
    }

    fn begin_body(&mut self, header: Header) {
        self.reader.body.resize(header.body_len(), 0);
        self.reader.body_have = 0;
        self.reader.state = Reading::Body(header);
    }

    /// A frame that is in `body` is complete.
    fn end_body(&mut self) -> Result<(), Error> {
        let Reading::Body(header) = std::mem::replace(&mut self.reader.state, Reading::Header) else {
            unreachable!("a body was being read")
        };
        let Header { kind, stream, seq, .. } = header;
        let body = std::mem::take(&mut self.reader.body);
        let bad = |what: &str| Err(Error::Protocol { stream, what: what.into() });
        let own = stream % 2 == self.next_stream % 2;
        match kind {
            Kind::Hello => self.meet(&body)?,
            Kind::Close => {
                let reason = String::from_utf8_lossy(&body).into_owned();
                self.closed = Some(reason.clone());
                return Err(Error::Closed { reason });
            }
            Kind::Ping => {
                // One answer is enough for all that wait for one, however many they are.
                self.pong = Some(seq);
            }
            Kind::Pong if seq > self.pings => return bad("an answer to no ping"),
            Kind::Pong => {}
            Kind::Credit if stream == 0 => match &mut self.ring_out {
                Some(ring) => ring.allow(seq)?,
                None => return bad("credit for shared memory that was not offered"),
            },
            Kind::Share => self.take_shared_memory(stream, seq)?,
            Kind::Credit if !own => return bad("credit for a stream that it sends itself"),
            Kind::Credit => {
                // Credit may cross with the end of the stream.
                if let Some(outgoing) = self.outgoing.get_mut(&stream) {
                    outgoing.allow(seq);
                }
            }
            Kind::Finish if own && stream < self.next_stream => {
                if !self.ending.remove(&stream) {
                    return bad("the end of a stream that has not ended");
                }
            }
            Kind::Cancel if own && stream < self.next_stream => {
                self.ending.remove(&stream);
                // Its answer says that nothing more comes.
                if self.outgoing.remove(&stream).is_some() {
                    self.control.push_back(OutFrame::control(Kind::Cancel, stream, 0, &[]));
                    self.cancelled.push_back((stream, String::from_utf8_lossy(&body).into_owned()));
                }
            }
            Kind::Cancel | Kind::Finish | Kind::End | Kind::Message | Kind::Meta | Kind::Data => {
                self.incoming_frame(header, &body)?;
            }
        }
        // The memory is used again.
        self.reader.body = body;
        Ok(())
    }

    /// The other end offers memory by which payloads are to come. Who cannot have it says nothing, and they come as they did.
    fn take_shared_memory(&mut self, stream: u32, len: u64) -> Result<(), Error> {
        if stream != 0 || self.ring_in.is_some() {
            return Err(Error::Protocol { stream, what: "it shares memory again, or on a stream".into() });
        }
        let descriptor = self.descriptor.take().filter(|_| self.options.shared_bytes > 0);
        if let Some(ring) = descriptor.and_then(|descriptor| RingIn::open(&descriptor, len)) {
            self.control.push_back(OutFrame::control(Kind::Credit, 0, ring.limit(), &[]));
            self.ring_in = Some(ring);
        }
        Ok(())
    }

    /// A piece of a payload is in shared memory.
    fn take_shared(&mut self, header: Header, body: &[u8]) -> Result<(), Error> {
        let stream = header.stream;
        let incoming = self.incoming.get_mut(&stream).expect("it is there");
        let bad = |what: &str| Error::Protocol { stream, what: what.into() };
        let (len, sum) = body.split_first_chunk::<8>().ok_or_else(|| bad("a length that is cut off"))?;
        let len = u64::from_le_bytes(*len);
        let ring = self.ring_in.as_mut().filter(|ring| ring.holds(len));
        let ring = ring.ok_or_else(|| bad("a payload in shared memory where there is none"))?;
        incoming.begin_data(header.seq, Some(len))?;
        let found = incoming.take_shared(len as usize, ring, !sum.is_empty())?;
        if let (Some(found), Ok(said)) = (found, sum.try_into().map(u64::from_le_bytes))
            && found != said
        {
            let what = format!("their XXH3 is {found:016x}, and {said:016x} was sent");
            let (tensor, offset) = (incoming.arriving().0, header.seq);
            return Err(Error::Damaged { tensor, offset, end: offset + len, what });
        }
        if let Some(limit) = ring.renew() {
            self.control.push_back(OutFrame::control(Kind::Credit, 0, limit, &[]));
        }
        Ok(())
    }

    fn incoming_frame(&mut self, header: Header, body: &[u8]) -> Result<(), Error> {
        let Header { kind, stream, .. } = header;
        let bad = |what: &str| Err(Error::Protocol { stream, what: what.into() });
        let opens = matches!(kind, Kind::Meta | Kind::Message);
        if self.incoming.get(&stream).is_some_and(Incoming::is_over) {
            // Two ends may give a stream up at once.
            return if kind == Kind::Cancel { Ok(()) } else { bad("more of a stream that is over") };
        }
        if !self.incoming.contains_key(&stream) {
            if stream == 0 || stream % 2 == self.next_stream % 2 {
                return bad("a stream with a number that is not its to give");
            }
            // It may end before anything was sent on it.
            if !opens {
                if !matches!(kind, Kind::Cancel | Kind::Finish) {
                    return bad("it is not open");
                }
                self.forget(stream);
                return Ok(());
            }
            if self.incoming.len() >= self.options.max_streams as usize {
                return bad("more streams than it may have open");
            }
            self.incoming.insert(stream, Incoming::new(stream, self.options.window_bytes));
        }
        let incoming = self.incoming.get_mut(&stream).expect("it is there");
        match kind {
            Kind::Meta => incoming.begin(body)?,
            Kind::End => incoming.end()?,
            Kind::Message => {
                self.reader.bulk = false;
                incoming.message(body.to_vec())?;
            }
            Kind::Finish => incoming.finish()?,
            Kind::Cancel => incoming.cancelled(String::from_utf8_lossy(body).into_owned()),
            Kind::Data if header.flags & SHARED != 0 => self.take_shared(header, body)?,
            Kind::Data => {
                let (body, sum) = match header.flags & CHECKED {
                    0 => (body, None),
                    _ => body.split_last_chunk::<8>().map_or((body, None), |(body, sum)| (body, Some(*sum))),
                };
                if let Some(sum) = sum
                    && XxHash3_64::oneshot(body) != u64::from_le_bytes(sum)
                {
                    let (tensor, offset) = incoming.arriving();
                    let what = "the XXH3 of an encoded piece is another".into();
                    return Err(Error::Damaged { tensor, offset, end: offset + body.len() as u64, what });
                }
                incoming.decode(body, &mut self.reader.decoder)?;
            }
            _ => unreachable!("frames of the connection come elsewhere"),
        }
        let incoming = self.incoming.get(&stream).expect("it is there");
        if incoming.is_over() && incoming.is_unwanted() {
            self.incoming.remove(&stream);
            return Ok(());
        }
        self.note(stream);
        self.renew(stream);
        Ok(())
    }

    /// The other end has said who it is.
    fn meet(&mut self, body: &[u8]) -> Result<(), Error> {
        let bad = |what: &str| Err(Error::Protocol { stream: 0, what: what.into() });
        if self.peer.is_some() {
            return bad("it says again who it is");
        }
        let mut peer = Hello::decode(body)?;
        if self.role == Role::Acceptor {
            if !peer.knows(self.options.token.as_deref()) {
                return bad("it does not know the token");
            }
            self.greet();
        }
        peer.forget_token();
        self.peer = Some(peer);
        Ok(())
    }

    fn note(&mut self, stream: u32) {
        if !self.news.contains(&stream) {
            self.news.push_back(stream);
        }
    }

    fn renew(&mut self, stream: u32) {
        if let Some(limit) = self.incoming.get_mut(&stream).and_then(Incoming::renew) {
            self.control.push_back(OutFrame::control(Kind::Credit, stream, limit, &[]));
        }
    }

    fn sending(&mut self, stream: u32) -> Result<&mut Outgoing, Error> {
        let unknown = || Error::Misuse(format!("stream {stream} is not open"));
        self.outgoing.get_mut(&stream).ok_or_else(unknown)
    }

    /// Puts together what is to be written next. Whether there is something.
    pub fn plan_writes(&mut self) -> bool {
        while self.queued_bytes < LOOKAHEAD {
            let Some(frame) = self.next_frame() else {
                self.outgoing.values_mut().for_each(Outgoing::note_pause);
                break;
            };
            self.stats.sent_frames += 1;
            self.queued_bytes += frame.len();
            let shared = frame.shared > 0;
            self.queue.push_back(frame);
            // The other end reads it while the next is written.
            if shared {
                break;
            }
        }
        !self.queue.is_empty()
    }

    fn next_frame(&mut self) -> Option<OutFrame> {
        if let Some(frame) = self.control.pop_front() {
            return Some(frame);
        }
        if let Some(seq) = self.pong.take() {
            return Some(OutFrame::control(Kind::Pong, 0, seq, &[]));
        }
        let after = (std::ops::Bound::Excluded(self.last_served), std::ops::Bound::Unbounded);
        let in_turn = || self.outgoing.range(after).chain(self.outgoing.range(..=self.last_served));
        let ring = self.ring_out.as_ref().filter(|ring| ring.is_taken());
        let mut ready = in_turn().filter(|(_, stream)| stream.is_ready(ring)).map(|(&id, _)| id);
        let first = ready.next()?;
        let most = if ready.next().is_some() {
            self.options.frame_bytes.min(SHARED_PIECE)
        } else {
            self.options.frame_bytes.min(MAX_PIECE_LEN)
        };
        let urgent = in_turn().find(|(_, stream)| stream.is_urgent() && stream.is_ready(ring));
        let id = match urgent {
            Some((&id, _)) if self.urgent_in_row < MAX_URGENT => {
                self.urgent_in_row += 1;
                id
            }
            _ => {
                self.urgent_in_row = 0;
                first
            }
        };
        self.last_served = id;
        let ring = self.ring_out.as_mut().filter(|ring| ring.is_taken());
        let (frame, over) = self.outgoing.get_mut(&id)?.next_frame(most.max(1), ring)?;
        if over {
            self.outgoing.remove(&id);
            self.ending.insert(id);
        }
        Some(frame)
    }

    /// What is to be written, in this order; at most so many slices.
    pub fn write_slices(&self, most: usize) -> Vec<IoSlice<'_>> {
        let mut skip = self.queue_offset;
        // A descriptor goes with the first byte of a call.
        let together =
            self.queue.iter().enumerate().take_while(|(at, frame)| *at == 0 || !frame.has_descriptor);
        let parts = together.flat_map(|(_, frame)| [&frame.head[..], &frame.payload[..], &frame.tail[..]]);
        let rest = parts.filter_map(|part| {
            let skipped = skip.min(part.len());
            skip -= skipped;
            (skipped < part.len()).then(|| IoSlice::new(&part[skipped..]))
        });
        rest.take(most).collect()
    }

    /// So many bytes of that were written.
    pub fn written(&mut self, len: usize) {
        self.moves += u64::from(len > 0 && self.queue.front().is_some_and(|frame| !frame.is_sign_of_life()));
        self.stats.sent_bytes += len as u64;
        self.queue_offset += len;
        while let Some(first) = self.queue.front()
            && first.len() <= self.queue_offset
        {
            self.queue_offset -= first.len();
            self.queued_bytes -= first.len();
            self.queue.pop_front();
        }
    }
}
