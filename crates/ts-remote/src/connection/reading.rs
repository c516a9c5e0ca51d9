// SPDX-License-Identifier: MIT OR Apache-2.0
//! The reading half of a connection: where the next bytes go, and what they mean.

use std::fmt;
use std::hash::Hasher;

use ts_format::Scratch;
use twox_hash::XxHash3_64;

use super::{Connection, Role};
use crate::frame::{CHECKED, ENCODED, HEADER_LEN, Header, Kind, MAX_PIECE_LEN, PREFACE, SHARED};
use crate::hello::Hello;
use crate::incoming::Incoming;
use crate::ring::RingReader;
use crate::{Error, Sink};

/// The most control frames that may wait for the peer to read: more than its open streams need.
const MAX_CONTROL_FRAMES: usize = 4096;
/// How many bytes are read at a time while frames are small.
const SCRATCH_LEN: usize = 4 << 10;
/// The shortest payload that is never read into `scratch`, in bytes.
const BULK_LEN: u64 = SCRATCH_LEN as u64;

pub(super) struct Reader {
    state: ReadState,
    /// Bytes that have been read and not processed: `scratch[..have]`.
    scratch: Box<[u8; SCRATCH_LEN]>,
    have: usize,
    /// The next bytes wait until the `Metadata` event of their tensor is delivered, so that the
    /// user can provide memory for them first.
    held: bool,
    /// The body of the current frame, unless it is a plain payload, and how much of it has arrived.
    body: Vec<u8>,
    body_have: usize,
    decoder: Scratch,
    /// Payloads are large: `scratch` gets at most `ahead` bytes, so that it gets none of the next
    /// payload.
    bulk: bool,
    /// The expected number of bytes before the next payload.
    ahead: usize,
    /// The length of the last META's body.
    meta_len: usize,
    /// The length of the last first read target.
    planned: usize,
    discarded: Vec<u8>,
}

impl Default for Reader {
    fn default() -> Self {
        Self {
            state: ReadState::Preface,
            scratch: Box::new([0; SCRATCH_LEN]),
            have: 0,
            held: false,
            body: Vec::new(),
            body_have: 0,
            decoder: Scratch::default(),
            bulk: true,
            ahead: HEADER_LEN,
            meta_len: 0,
            planned: 0,
            discarded: Vec::new(),
        }
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("have", &self.have)
            .field("bulk", &self.bulk)
            .finish_non_exhaustive()
    }
}

/// What is read next.
enum ReadState {
    Preface,
    Header,
    /// A body that is collected in `body`.
    Body(Header),
    /// A payload, of which `left` bytes are still to come.
    Payload {
        header: Header,
        left: usize,
        hasher: Option<Box<XxHash3_64>>,
    },
    /// A checksum, to be compared with `sum`.
    Sum {
        header: Header,
        sum: u64,
    },
}

impl Reader {
    pub(super) fn skip_preface(&mut self) {
        self.state = ReadState::Header;
    }

    pub(super) fn is_between_frames(&self) -> bool {
        matches!(self.state, ReadState::Header) && self.have == 0
    }

    pub(super) fn is_within_body(&self) -> bool {
        matches!(self.state, ReadState::Body(_)) && !self.held
    }

    pub(super) fn is_held(&self) -> bool {
        self.held
    }

    /// Guesses how many bytes come before the next payload: the header of its DATA, and if this
    /// frame has the `last` bytes of a tensor, also END and the META of the next tensor.
    ///
    /// This saves a system call per header. If the guess is too high, a few bytes of a payload are
    /// copied.
    fn look_ahead(&mut self, header: Header, last: bool) {
        let next = HEADER_LEN + self.meta_len + HEADER_LEN;
        self.ahead = match header.kind {
            Kind::Data if last => HEADER_LEN + next,
            Kind::End => next,
            _ => HEADER_LEN,
        };
    }
}

impl<S: Sink> Connection<S> {
    /// Returns where to read the next bytes: first into one buffer, then into the other. At most
    /// one of them is empty. A buffer may be the memory of a tensor.
    ///
    /// # Errors
    /// Returns the error that ended the connection, or an error of a [`Sink`].
    pub fn read_targets(&mut self) -> Result<[&mut [u8]; 2], Error> {
        self.settle()?;
        if let Some(reason) = &self.closed {
            return Err(Error::Closed { reason: reason.clone() });
        }
        if self.failed {
            return Err(Error::Misuse("the connection has failed".into()));
        }
        let Reader {
            state, scratch, have, body, body_have, bulk, ahead, planned, discarded, ..
        } = &mut self.reader;
        let rest = &mut scratch[*have..];
        // The second target gets no more bytes than are expected before the next payload.
        let (first, next): (&mut [u8], usize) = match state {
            ReadState::Preface => (&mut [], PREFACE.len() + HEADER_LEN - *have),
            ReadState::Header if *bulk => (&mut [], (*ahead).max(HEADER_LEN) - *have),
            ReadState::Header => (&mut [], rest.len()),
            ReadState::Sum { .. } => (&mut [], 8 + *ahead - *have),
            ReadState::Body(_) => (&mut body[*body_have..], *ahead),
            ReadState::Payload { header, left, hasher } => {
                let incoming = self.incoming.get_mut(&header.stream);
                let space = incoming.map_or(Ok(None), |incoming| incoming.space(*left))?;
                let sum = if hasher.is_some() { 8 } else { 0 };
                match space {
                    Some(space) => {
                        let next = if space.len() == *left { sum + *ahead } else { 0 };
                        (space, next)
                    }
                    None => {
                        if discarded.is_empty() {
                            *discarded = vec![0; 64 << 10];
                        }
                        let len = discarded.len().min(*left);
                        (&mut discarded[..len], if len == *left { sum + *ahead } else { 0 })
                    }
                }
            }
        };
        *planned = first.len();
        let next = next.min(rest.len());
        Ok([first, &mut rest[..next]])
    }

    /// Reports that `len` bytes were read into the last [`read_targets`](Self::read_targets).
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] or [`Error::Damaged`] if the peer sent invalid bytes,
    /// [`Error::Closed`] if it closed the connection, or an error of a [`Sink`]. Earlier events can
    /// still be [polled](Self::poll).
    pub fn filled(&mut self, len: usize) -> Result<(), Error> {
        self.stats.received_bytes += len as u64;
        let first = len.min(self.reader.planned);
        self.reader.have += len - first;
        let done = self.fill_first(first).and_then(|()| self.process());
        self.check(done)
    }

    /// Processes bytes that were held back, whether or not there is memory for them now.
    ///
    /// # Errors
    /// As [`filled`](Self::filled).
    pub(super) fn release_held(&mut self) -> Result<(), Error> {
        let done = self.process();
        self.check(done)
    }

    /// Processes bytes that were held back until none are.
    ///
    /// # Errors
    /// As [`filled`](Self::filled), for bytes that [`poll`](Self::poll) processed too.
    pub(crate) fn settle(&mut self) -> Result<(), Error> {
        if let Some(error) = self.deferred_error.take() {
            return Err(error);
        }
        while self.reader.held {
            self.release_held()?;
        }
        Ok(())
    }

    /// Closes the connection on the first error.
    fn check(&mut self, done: Result<(), Error>) -> Result<(), Error> {
        let done = done.and_then(|()| self.check_control_frames());
        if let Err(error) = &done
            && !self.failed
        {
            self.failed = true;
            // A peer of another protocol would misread a CLOSE frame.
            let spoke = !matches!(self.reader.state, ReadState::Preface);
            if spoke && !matches!(error, Error::Closed { .. }) {
                self.close(&format!("the peer reported: {error}"));
            }
        }
        done
    }

    /// Limits the memory of control frames that a peer provokes and does not read.
    fn check_control_frames(&self) -> Result<(), Error> {
        let unread = self.writer.control_len();
        if unread <= MAX_CONTROL_FRAMES {
            return Ok(());
        }
        let what = format!("{unread} unread control frames (at most {MAX_CONTROL_FRAMES})");
        Err(Error::Protocol { stream: 0, what })
    }

    fn fill_first(&mut self, len: usize) -> Result<(), Error> {
        match &mut self.reader.state {
            ReadState::Body(_) => {
                self.reader.body_have += len;
                Ok(())
            }
            ReadState::Payload { .. } if len > 0 => self.payload_filled(len),
            _ => Ok(()),
        }
    }

    /// Counts bytes that were written to the memory of the last [`Incoming::space`].
    fn payload_filled(&mut self, len: usize) -> Result<(), Error> {
        let ReadState::Payload { header, left, hasher } = &mut self.reader.state else {
            return Ok(());
        };
        let stream = header.stream;
        self.progress += 1;
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
                Some(hasher) => ReadState::Sum { header: *header, sum: hasher.finish() },
                None => ReadState::Header,
            };
        }
        self.note_events(stream);
        self.renew_credit(stream);
        Ok(())
    }

    /// Processes the bytes in `scratch`, up to an incomplete item.
    fn process(&mut self) -> Result<(), Error> {
        let mut at = 0;
        let mut release = std::mem::take(&mut self.reader.held);
        loop {
            let unread = &self.reader.scratch[at..self.reader.have];
            match &mut self.reader.state {
                ReadState::Preface => {
                    let known = unread.len().min(PREFACE.len());
                    if unread[..known] != PREFACE[..known] {
                        let what = "invalid preface: the peer speaks another protocol, or another \
                                    version of this one"
                            .into();
                        return Err(Error::Protocol { stream: 0, what });
                    }
                    if known < PREFACE.len() {
                        break;
                    }
                    at += known;
                    self.reader.state = ReadState::Header;
                }
                ReadState::Header => {
                    let Some((bytes, _)) = unread.split_first_chunk::<HEADER_LEN>() else { break };
                    let header = Header::decode(bytes)?;
                    at += HEADER_LEN;
                    self.begin(header)?;
                }
                ReadState::Body(header) => {
                    let header = *header;
                    let rest = &mut self.reader.body[self.reader.body_have..];
                    let len = rest.len().min(unread.len());
                    rest[..len].copy_from_slice(&unread[..len]);
                    at += len;
                    self.reader.body_have += len;
                    if self.reader.body_have < self.reader.body.len() {
                        break;
                    }
                    let shared = header.flags & SHARED != 0;
                    if shared
                        && !std::mem::take(&mut release)
                        && self.is_metadata_pending(header.stream)
                    {
                        self.reader.held = true;
                        break;
                    }
                    self.end_body()?;
                }
                ReadState::Payload { header, left, .. } => {
                    let len = unread.len().min(*left);
                    if len == 0 {
                        break;
                    }
                    let stream = header.stream;
                    if !std::mem::take(&mut release) && self.is_metadata_pending(stream) {
                        self.reader.held = true;
                        break;
                    }
                    let incoming = self.incoming.get_mut(&stream);
                    let space = incoming.map_or(Ok(None), |incoming| incoming.space(len))?;
                    let len = space.as_ref().map_or(len, |space| space.len());
                    if let Some(space) = space {
                        space.copy_from_slice(&unread[..len]);
                        self.stats.copied_bytes += len as u64;
                    }
                    at += len;
                    self.payload_filled(len)?;
                }
                ReadState::Sum { header, sum } => {
                    let Some((bytes, _)) = unread.split_first_chunk::<8>() else { break };
                    at += 8;
                    let (stream, expected, sum) = (header.stream, u64::from_le_bytes(*bytes), *sum);
                    let (offset, end) = (header.seq, header.seq.saturating_add(header.len - 8));
                    self.reader.state = ReadState::Header;
                    if let Some(incoming) = self.incoming.get(&stream)
                        && !incoming.is_refused()
                        && expected != sum
                    {
                        let tensor = incoming.current().0;
                        let what = wrong_checksum(expected, sum);
                        return Err(Error::Damaged { tensor, offset, end, what });
                    }
                }
            }
        }
        self.reader.scratch.copy_within(at..self.reader.have, 0);
        self.reader.have -= at;
        Ok(())
    }

    fn is_metadata_pending(&self, stream: u32) -> bool {
        self.incoming.get(&stream).is_some_and(Incoming::is_metadata_pending)
    }

    /// Begins a frame.
    fn begin(&mut self, header: Header) -> Result<(), Error> {
        self.stats.received_frames += 1;
        let is_progress = matches!(
            header.kind,
            Kind::Hello | Kind::Meta | Kind::Data | Kind::End | Kind::Message
        );
        self.progress += u64::from(is_progress || header.len > 0);
        let bad = |what: &str| Err(Error::Protocol { stream: header.stream, what: what.into() });
        if self.peer.is_none() && header.kind != Kind::Hello && header.kind != Kind::Close {
            return bad("frame before HELLO");
        }
        self.reader.look_ahead(header, false);
        if header.kind != Kind::Data {
            if header.flags != 0 {
                return bad("flags on a frame other than DATA");
            }
            self.begin_body(header);
            return if header.len == 0 { self.end_body() } else { Ok(()) };
        }
        let Some(incoming) = self.incoming.get_mut(&header.stream) else {
            return bad("DATA on a stream that is not open");
        };
        let sum = if header.flags & CHECKED == 0 { 0 } else { 8 };
        if header.flags & SHARED != 0 {
            if header.flags & ENCODED != 0 || header.body_len() != 8 + sum {
                return bad("invalid SHARED DATA frame");
            }
            self.reader.bulk = false;
            self.begin_body(header);
            return Ok(());
        }
        let Some(left) = header.body_len().checked_sub(sum).filter(|&left| left > 0) else {
            return bad("empty DATA");
        };
        if header.flags & ENCODED != 0 {
            incoming.begin_data(header.seq, None)?;
            self.begin_body(header);
            return Ok(());
        }
        if left > MAX_PIECE_LEN {
            return bad("DATA longer than 1 MiB");
        }
        incoming.begin_data(header.seq, Some(left as u64))?;
        let last = incoming.is_last(left as u64);
        self.reader.look_ahead(header, last);
        self.reader.bulk = left as u64 >= BULK_LEN;
        let hasher = (sum > 0).then(|| Box::new(XxHash3_64::with_seed(0)));
        self.reader.state = ReadState::Payload { header, left, hasher };
        Ok(())
    }

    fn begin_body(&mut self, header: Header) {
        self.reader.body.resize(header.body_len(), 0);
        self.reader.body_have = 0;
        self.reader.state = ReadState::Body(header);
    }

    /// Processes the complete frame in `body`.
    fn end_body(&mut self) -> Result<(), Error> {
        let ReadState::Body(header) = std::mem::replace(&mut self.reader.state, ReadState::Header)
        else {
            unreachable!("the state is `Body`")
        };
        let Header { kind, stream, seq, .. } = header;
        let body = std::mem::take(&mut self.reader.body);
        let bad = |what: &str| Err(Error::Protocol { stream, what: what.into() });
        let own = stream % 2 == self.next_stream % 2;
        match kind {
            Kind::Hello => self.receive_hello(&body)?,
            Kind::Close => {
                let reason = String::from_utf8_lossy(&body).into_owned();
                self.closed = Some(reason.clone());
                return Err(Error::Closed { reason });
            }
            Kind::Ping => {
                self.writer.push_pong(seq);
            }
            Kind::Pong if seq > self.pings => return bad("PONG without PING"),
            Kind::Pong => {}
            Kind::Credit if stream == 0 => match &mut self.ring_writer {
                Some(ring) => ring.set_limit(seq)?,
                None => return bad("CREDIT for shared memory that was not offered"),
            },
            Kind::Share => self.map_shared_memory(stream, seq)?,
            Kind::Credit if !own => return bad("CREDIT for the peer's own stream"),
            Kind::Credit => {
                // The stream may have ended while the frame was in transit.
                if let Some(outgoing) = self.outgoing.get_mut(&stream) {
                    outgoing.set_limit(seq);
                }
            }
            Kind::Finish if own && stream < self.next_stream => {
                if !self.ending.remove(&stream) {
                    return bad("FINISH for a stream that has not ended");
                }
            }
            Kind::Cancel if own && stream < self.next_stream => {
                self.ending.remove(&stream);
                // CANCEL as the answer tells the peer that nothing follows.
                if self.outgoing.remove(&stream).is_some() {
                    self.writer.push_control(Kind::Cancel, stream, 0, &[]);
                    self.cancelled.push_back((stream, String::from_utf8_lossy(&body).into_owned()));
                }
            }
            Kind::Cancel | Kind::Finish | Kind::End | Kind::Message | Kind::Meta | Kind::Data => {
                self.incoming_frame(header, &body)?;
            }
        }
        // Reuses the memory.
        self.reader.body = body;
        Ok(())
    }

    /// Maps the shared memory that the peer offers. If that fails, sends no answer, and payloads
    /// keep coming through the socket.
    fn map_shared_memory(&mut self, stream: u32, len: u64) -> Result<(), Error> {
        if stream != 0 {
            return Err(Error::Protocol { stream, what: "SHARE on a stream".into() });
        }
        if self.ring_reader.is_some() {
            return Err(Error::Protocol { stream, what: "second SHARE".into() });
        }
        let descriptor = self.descriptor.take().filter(|_| self.options.shared_bytes > 0);
        if let Some(ring) = descriptor.and_then(|descriptor| RingReader::open(&descriptor, len)) {
            self.writer.push_control(Kind::Credit, 0, ring.limit(), &[]);
            self.ring_reader = Some(ring);
        }
        Ok(())
    }

    /// Reads a piece of a payload from shared memory.
    fn read_shared(&mut self, header: Header, body: &[u8]) -> Result<(), Error> {
        let stream = header.stream;
        let incoming = self.incoming.get_mut(&stream).expect("the stream is open");
        let bad = |what: &str| Error::Protocol { stream, what: what.into() };
        let (len, sum) =
            body.split_first_chunk::<8>().ok_or_else(|| bad("truncated SHARED DATA frame"))?;
        let len = u64::from_le_bytes(*len);
        let ring = self.ring_reader.as_mut().filter(|ring| ring.allows(len));
        let ring = ring.ok_or_else(|| bad("SHARED DATA that is not in the ring"))?;
        incoming.begin_data(header.seq, Some(len))?;
        let found = incoming.read_shared(len as usize, ring, !sum.is_empty())?;
        if let (Some(found), Ok(expected)) = (found, sum.try_into().map(u64::from_le_bytes))
            && found != expected
        {
            let what = wrong_checksum(expected, found);
            let (tensor, offset) = (incoming.current().0, header.seq);
            return Err(Error::Damaged { tensor, offset, end: offset + len, what });
        }
        if let Some(limit) = ring.renew_limit() {
            self.writer.push_control(Kind::Credit, 0, limit, &[]);
        }
        Ok(())
    }

    /// Processes a frame of a stream that the peer sends.
    fn incoming_frame(&mut self, header: Header, body: &[u8]) -> Result<(), Error> {
        let Header { kind, stream, .. } = header;
        let bad = |what: &str| Err(Error::Protocol { stream, what: what.into() });
        let opens = matches!(kind, Kind::Meta | Kind::Message);
        if self.incoming.get(&stream).is_some_and(Incoming::is_ended) {
            // Both ends may cancel a stream at the same time.
            return if kind == Kind::Cancel {
                Ok(())
            } else {
                bad("frame on a stream that has ended")
            };
        }
        if !self.incoming.contains_key(&stream) {
            if stream == 0 || stream % 2 == self.next_stream % 2 {
                return bad("frame on a stream whose number the peer may not use");
            }
            // A stream may end before anything was sent on it.
            if !opens {
                if !matches!(kind, Kind::Cancel | Kind::Finish) {
                    return bad("frame on a stream that is not open");
                }
                self.release_stream(stream);
                return Ok(());
            }
            if self.incoming.len() >= self.options.max_streams as usize {
                return bad("too many open streams");
            }
            self.incoming.insert(stream, Incoming::new(stream, self.options.window_bytes));
        }
        let incoming = self.incoming.get_mut(&stream).expect("the stream is open");
        match kind {
            Kind::Meta => {
                self.reader.meta_len = body.len();
                incoming.begin(body)?;
            }
            Kind::End => incoming.end()?,
            Kind::Message => {
                self.reader.bulk = false;
                incoming.message(body.to_vec())?;
            }
            Kind::Finish => incoming.finish()?,
            Kind::Cancel => incoming.cancelled(String::from_utf8_lossy(body).into_owned()),
            Kind::Data if header.flags & SHARED != 0 => self.read_shared(header, body)?,
            Kind::Data => {
                let (body, sum) = match header.flags & CHECKED {
                    0 => (body, None),
                    _ => body
                        .split_last_chunk::<8>()
                        .map_or((body, None), |(body, sum)| (body, Some(*sum))),
                };
                if let Some(sum) = sum
                    && XxHash3_64::oneshot(body) != u64::from_le_bytes(sum)
                {
                    let (tensor, offset) = incoming.current();
                    let (end, what) =
                        (offset + body.len() as u64, "wrong checksum of an encoded piece".into());
                    return Err(Error::Damaged { tensor, offset, end, what });
                }
                incoming.decode(body, &mut self.reader.decoder)?;
            }
            _ => unreachable!("the caller passes frames of streams only"),
        }
        let incoming = self.incoming.get(&stream).expect("the stream is open");
        if incoming.is_ended() && incoming.is_refused() {
            self.incoming.remove(&stream);
            return Ok(());
        }
        self.note_events(stream);
        self.renew_credit(stream);
        Ok(())
    }

    /// Completes the handshake with the peer's HELLO.
    fn receive_hello(&mut self, body: &[u8]) -> Result<(), Error> {
        let bad = |what: &str| Err(Error::Protocol { stream: 0, what: what.into() });
        if self.peer.is_some() {
            return bad("second HELLO");
        }
        let mut peer = Hello::decode(body)?;
        if self.role == Role::Acceptor {
            if !peer.has_token(self.options.token.as_deref()) {
                return bad("wrong token");
            }
            self.send_hello();
        }
        peer.clear_token();
        self.peer = Some(peer);
        Ok(())
    }
}

fn wrong_checksum(expected: u64, found: u64) -> String {
    format!("wrong checksum (expected {expected:016x}, got {found:016x})")
}
