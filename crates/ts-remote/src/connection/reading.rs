// SPDX-License-Identifier: MIT OR Apache-2.0
//! The reading half of a connection: it selects the memory for the next bytes, and processes them.

use std::fmt;
use std::hash::Hasher;

use ts_format::Scratch;
use twox_hash::XxHash3_64;

use super::{Connection, Role};
use crate::frame::{
    CHECKED, ENCODED, HEADER_LEN, Header, Kind, MAX_ENCODED_LEN, MAX_LONG_PIECE_LEN, PREFACE,
    SHARED,
};
use crate::hello::Hello;
use crate::incoming::Incoming;
use crate::ring::RingReader;
use crate::{Error, Sink};

/// The maximum number of control frames that may be queued for a peer that does not read.
const MAX_CONTROL_FRAMES: usize = 4096;
/// The length of the buffer into which small frames are read, in bytes.
const SCRATCH_LEN: usize = 4 << 10;
/// Pieces of payloads that have at least this many bytes are read into the memory of their tensor
/// instead of `scratch`.
const BULK_LEN: u64 = SCRATCH_LEN as u64;

pub(super) struct Reader {
    state: ReadState,
    /// Bytes that have been read and not processed: `scratch[..have]`.
    scratch: Box<[u8; SCRATCH_LEN]>,
    have: usize,
    /// Whether the next bytes are postponed, so that the user can first take the `Metadata` event
    /// of their tensor and provide memory for them.
    held: bool,
    /// The body of the current frame, unless the frame is a plain payload.
    body: Vec<u8>,
    /// The number of bytes of `body` that have arrived.
    body_have: usize,
    decoder: Scratch,
    /// Whether the next payload is probably large. If so, `scratch` gets only the `ahead` bytes
    /// that are expected before the payload, which is then read into its own memory.
    bulk: bool,
    /// The estimated number of bytes before the next payload.
    ahead: usize,
    /// The length of the most recent META's body.
    meta_len: usize,
    /// The length of the first buffer that [`Connection::read_targets`] last returned.
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

/// The part of a frame that is read next.
enum ReadState {
    Preface,
    Header,
    /// A body that is collected in `body`.
    Body(Header),
    /// A payload, of which `left` bytes have not arrived.
    Payload {
        header: Header,
        left: usize,
        hasher: Option<Box<XxHash3_64>>,
    },
    /// A checksum. It must be equal to `sum`, unless this end has cancelled the stream.
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

    /// Estimates how many bytes precede the next payload: the header of its DATA frame, and
    /// possibly more. If this frame has the `last` bytes of a tensor, END and the META of the next
    /// tensor come first.
    ///
    /// The estimate saves a system call per header. If it is too high, a few bytes of a payload are
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
    /// Returns two buffers for the next bytes. Fill the first one, then the second. At most one of
    /// them is empty. The first one may be the memory of a tensor.
    ///
    /// # Errors
    /// Some received bytes are processed only by [`poll`](Self::poll) or by this call. Returns
    /// the error in these bytes, if there is one, or an error of a [`Sink`]. After an error in
    /// received bytes, later calls return [`Error::Closed`] if the peer has sent CLOSE, and
    /// [`Error::Misuse`] otherwise.
    pub fn read_targets(&mut self) -> Result<[&mut [u8]; 2], Error> {
        self.settle()?;
        if let Some(reason) = &self.closed {
            return Err(Error::Closed { reason: reason.clone() });
        }
        if self.failed {
            return Err(Error::Misuse("cannot read: the connection failed earlier".into()));
        }
        let Reader {
            state, scratch, have, body, body_have, bulk, ahead, planned, discarded, ..
        } = &mut self.reader;
        let rest = &mut scratch[*have..];
        // If payloads are large, the second buffer gets no more bytes than are expected before the
        // next payload.
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

    /// Reports that `len` bytes were read into the buffers that
    /// [`read_targets`](Self::read_targets) last returned.
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] or [`Error::Damaged`] if the peer sent invalid bytes,
    /// [`Error::Closed`] if the peer closed the connection, or an error of a [`Sink`]. Earlier
    /// events can still be [polled](Self::poll).
    pub fn filled(&mut self, len: usize) -> Result<(), Error> {
        self.stats.received_bytes += len as u64;
        let first = len.min(self.reader.planned);
        self.reader.have += len - first;
        let done = self.fill_first(first).and_then(|()| self.process());
        self.check(done)
    }

    /// Processes postponed bytes, even if the user has not provided memory for them.
    ///
    /// # Errors
    /// Returns the same errors as [`filled`](Self::filled).
    pub(super) fn release_held(&mut self) -> Result<(), Error> {
        let done = self.process();
        self.check(done)
    }

    /// Processes postponed bytes until none are left.
    ///
    /// # Errors
    /// Returns the same errors as [`filled`](Self::filled), also for bytes that
    /// [`poll`](Self::poll) processed earlier.
    pub(crate) fn settle(&mut self) -> Result<(), Error> {
        if let Some(error) = self.deferred_error.take() {
            return Err(error);
        }
        while self.reader.held {
            self.release_held()?;
        }
        Ok(())
    }

    /// Queues CLOSE with the reason on the first error, unless the peer has closed the connection
    /// or has sent no valid preface. Too many queued control frames are an error too.
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

    /// Limits how many control frames are queued, because a peer can request answers without
    /// reading them.
    fn check_control_frames(&self) -> Result<(), Error> {
        let unread = self.writer.control_len();
        if unread <= MAX_CONTROL_FRAMES {
            return Ok(());
        }
        let what = format!(
            "the peer does not read: {unread} unread control frames are queued (expected at most \
             {MAX_CONTROL_FRAMES})"
        );
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

    /// Records that `len` bytes of a payload were written to the memory that [`Incoming::space`]
    /// returned, or were dropped.
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

    /// Processes the bytes in `scratch`, until an item is incomplete or must be postponed.
    fn process(&mut self) -> Result<(), Error> {
        let mut at = 0;
        let mut release = std::mem::take(&mut self.reader.held);
        loop {
            let unread = &self.reader.scratch[at..self.reader.have];
            match &mut self.reader.state {
                ReadState::Preface => {
                    let known = unread.len().min(PREFACE.len());
                    if unread[..known] != PREFACE[..known] {
                        let what = "invalid preface: the peer uses another protocol or version, \
                                    or only one end uses TLS"
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

    /// Processes the header of a frame.
    fn begin(&mut self, header: Header) -> Result<(), Error> {
        self.stats.received_frames += 1;
        let is_progress = matches!(
            header.kind,
            Kind::Hello | Kind::Meta | Kind::Data | Kind::End | Kind::Message
        );
        self.progress += u64::from(is_progress || header.len > 0);
        let bad = |what: &str| Err(Error::Protocol { stream: header.stream, what: what.into() });
        if self.peer.is_none() && header.kind != Kind::Hello && header.kind != Kind::Close {
            return bad(&format!("received a {:?} frame before HELLO", header.kind));
        }
        self.reader.look_ahead(header, false);
        if header.kind != Kind::Data {
            if header.flags != 0 {
                let Header { kind, flags, .. } = header;
                return bad(&format!(
                    "received flags {flags:#04x} on a {kind:?} frame (expected 0)"
                ));
            }
            self.begin_body(header);
            return if header.len == 0 { self.end_body() } else { Ok(()) };
        }
        let Some(incoming) = self.incoming.get_mut(&header.stream) else {
            return bad("received DATA on a stream that is not open");
        };
        let sum = if header.flags & CHECKED == 0 { 0 } else { 8 };
        if header.flags & SHARED != 0 {
            if header.flags & ENCODED != 0 {
                return bad("received a DATA frame that is both SHARED and ENCODED");
            }
            if header.body_len() != 8 + sum {
                let (len, expected) = (header.body_len(), 8 + sum);
                return bad(&format!("received SHARED DATA of {len} bytes (expected {expected})"));
            }
            self.reader.bulk = false;
            self.begin_body(header);
            return Ok(());
        }
        let Some(left) = header.body_len().checked_sub(sum).filter(|&left| left > 0) else {
            return bad("received DATA without a payload");
        };
        if header.flags & ENCODED != 0 {
            // The body is buffered.
            if header.body_len() > MAX_ENCODED_LEN {
                let (len, most) = (header.len, MAX_ENCODED_LEN);
                return bad(&format!(
                    "received encoded DATA of {len} bytes (expected at most {most})"
                ));
            }
            incoming.begin_data(header.seq, None)?;
            self.begin_body(header);
            return Ok(());
        }
        if left > MAX_LONG_PIECE_LEN {
            let most = MAX_LONG_PIECE_LEN;
            return bad(&format!("received DATA of {left} bytes (expected at most {most})"));
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
            unreachable!("`end_body` is called only in the state `Body`")
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
            Kind::Pong if seq > self.pings => {
                return bad(&format!("received PONG for PING {seq}, which was not sent"));
            }
            Kind::Pong => {}
            Kind::Credit if stream == 0 => match &mut self.ring_writer {
                Some(ring) => ring.set_limit(seq)?,
                None => return bad("received CREDIT for shared memory that was not offered"),
            },
            Kind::Share => self.map_shared_memory(stream, seq)?,
            Kind::Credit if !own => return bad("received CREDIT for the peer's own stream"),
            Kind::Credit => {
                // The stream may have ended while the frame was in transit.
                if let Some(outgoing) = self.outgoing.get_mut(&stream) {
                    outgoing.set_limit(seq);
                }
            }
            Kind::Finish if own && stream < self.next_stream => {
                if !self.ending.remove(&stream) {
                    return bad(if self.outgoing.contains_key(&stream) {
                        "received FINISH for a stream that this end has not finished"
                    } else {
                        "received FINISH for a stream that the peer has already released"
                    });
                }
            }
            Kind::Cancel if own && stream < self.next_stream => {
                self.ending.remove(&stream);
                // Answering with CANCEL tells the peer that nothing follows.
                if self.outgoing.remove(&stream).is_some() {
                    self.writer.push_control(Kind::Cancel, stream, 0, &[]);
                    self.cancelled.push_back((stream, String::from_utf8_lossy(&body).into_owned()));
                }
            }
            Kind::Cancel | Kind::Finish | Kind::End | Kind::Message | Kind::Meta | Kind::Data => {
                self.incoming_frame(header, &body)?;
            }
        }
        // The next body reuses the memory.
        self.reader.body = body;
        Ok(())
    }

    /// Maps the shared memory that the peer offers. If shared memory is disabled or cannot be
    /// mapped, does not answer, and payloads continue to come through the socket.
    fn map_shared_memory(&mut self, stream: u32, len: u64) -> Result<(), Error> {
        if stream != 0 {
            return Err(Error::Protocol {
                stream,
                what: "received SHARE on a stream (expected stream 0)".into(),
            });
        }
        if self.ring_reader.is_some() {
            return Err(Error::Protocol {
                stream,
                what: "received a second SHARE (expected at most one)".into(),
            });
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
        let incoming = self.incoming.get_mut(&stream).expect("the caller has found the stream");
        let bad = |what: &str| Error::Protocol { stream, what: what.into() };
        let (len, sum) =
            body.split_first_chunk::<8>().ok_or_else(|| bad("received truncated SHARED DATA"))?;
        let len = u64::from_le_bytes(*len);
        let ring = self.ring_reader.as_mut().filter(|ring| ring.allows(len));
        let ring = ring.ok_or_else(|| {
            let what = format!(
                "received SHARED DATA for a piece of {len} bytes (expected 1 byte to 1 MiB, inside \
                 the granted part of the shared memory and not across its end)"
            );
            bad(&what)
        })?;
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

    /// Processes a frame on a stream of the peer.
    fn incoming_frame(&mut self, header: Header, body: &[u8]) -> Result<(), Error> {
        let Header { kind, stream, .. } = header;
        let bad = |what: &str| Err(Error::Protocol { stream, what: what.into() });
        let opens = matches!(kind, Kind::Meta | Kind::Message);
        if self.incoming.get(&stream).is_some_and(Incoming::is_ended) {
            // Both ends may cancel a stream at the same time.
            return if kind == Kind::Cancel {
                Ok(())
            } else {
                bad(&format!("received a {kind:?} frame on a stream that has ended"))
            };
        }
        if !self.incoming.contains_key(&stream) {
            if stream == 0 || stream % 2 == self.next_stream % 2 {
                return bad(&format!(
                    "received a {kind:?} frame with stream number {stream} (expected an odd number \
                     from a connector, or an even number above 0 from an acceptor)"
                ));
            }
            // A stream may end before anything was sent on it.
            if !opens {
                if !matches!(kind, Kind::Cancel | Kind::Finish) {
                    return bad(&format!("received a {kind:?} frame on a stream that is not open"));
                }
                self.release_stream(stream);
                return Ok(());
            }
            if self.incoming.len() >= self.options.max_streams as usize {
                let most = self.options.max_streams;
                return bad(&format!(
                    "the peer has too many open streams (expected at most {most})"
                ));
            }
            self.incoming.insert(stream, Incoming::new(stream, self.options.window_bytes));
        }
        let incoming =
            self.incoming.get_mut(&stream).expect("the stream was found or inserted above");
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
                    let (tensor, offset, _) = incoming.current();
                    let what = wrong_checksum(u64::from_le_bytes(sum), XxHash3_64::oneshot(body));
                    let end = offset + body.len() as u64;
                    return Err(Error::Damaged { tensor, offset, end, what });
                }
                incoming.decode(body, &mut self.reader.decoder)?;
            }
            _ => unreachable!("`end_body` passes only frames that belong to a stream"),
        }
        let incoming = self.incoming.get(&stream).expect("`incoming` still has the stream");
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
            return bad("received a second HELLO (expected one)");
        }
        let mut peer = Hello::decode(body)?;
        if self.role == Role::Acceptor {
            if !peer.has_token(self.options.token.as_deref()) {
                return bad("missing or wrong token");
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
