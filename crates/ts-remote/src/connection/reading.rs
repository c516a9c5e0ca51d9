// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a connection reads: where the next bytes go, and what they say.

use std::fmt;
use std::hash::Hasher;

use ts_format::Scratch;
use twox_hash::XxHash3_64;

use super::{Connection, Role};
use crate::frame::{CHECKED, ENCODED, HEADER_LEN, Header, Kind, MAX_PIECE_LEN, PREFACE, SHARED};
use crate::hello::Hello;
use crate::incoming::Incoming;
use crate::ring::RingIn;
use crate::{Error, Sink};

/// The most answers that wait for the other end to read: more than streams that are open can need.
const MAX_ANSWERS: usize = 4096;
/// What is read at a time while small things come.
const SCRATCH: usize = 4 << 10;
/// Payloads from here on are never read by way of `scratch`.
const BULK: u64 = SCRATCH as u64;

pub(super) struct Reader {
    state: Reading,
    /// What has been read and not looked at: `scratch[..have]`.
    scratch: Box<[u8; SCRATCH]>,
    have: usize,
    /// What is next in `scratch` belongs to a tensor of which the user has not been told: it may
    /// have its memory when it has.
    held: bool,
    /// The body of a frame that is no payload, or of an encoded one, and how much of it has come.
    body: Vec<u8>,
    body_have: usize,
    decoder: Scratch,
    /// Large things come: no more is read ahead than `ahead`, for it may belong elsewhere.
    bulk: bool,
    /// So many bytes come before the next payload's, if all goes on as it did.
    ahead: usize,
    /// Length of the last META's body.
    meta_len: usize,
    /// How long the first target is that was given last.
    planned: usize,
    discarded: Vec<u8>,
}

impl Default for Reader {
    fn default() -> Self {
        Self {
            state: Reading::Preface,
            scratch: Box::new([0; SCRATCH]),
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

impl Reader {
    pub(super) fn skip_preface(&mut self) {
        self.state = Reading::Header;
    }

    pub(super) fn is_between_frames(&self) -> bool {
        matches!(self.state, Reading::Header) && self.have == 0
    }

    pub(super) fn is_within_body(&self) -> bool {
        matches!(self.state, Reading::Body(_)) && !self.held
    }

    pub(super) fn is_held(&self) -> bool {
        self.held
    }

    /// What comes between a frame of this kind and the next payload: nothing but that one's header,
    /// or, behind `last` bytes of a tensor, its END and the next one's META too. Where something
    /// else comes, or that is shorter, a few bytes of a payload are copied; a call to the system is
    /// saved for each header otherwise.
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
    /// Where the next bytes are to be read to: first the one, then the other. They are not both
    /// empty.
    ///
    /// # Errors
    /// What the memory of a tensor says.
    pub fn read_targets(&mut self) -> Result<[&mut [u8]; 2], Error> {
        self.settle()?;
        if let Some(reason) = &self.closed {
            return Err(Error::Closed { reason: reason.clone() });
        }
        if self.failed {
            return Err(Error::Misuse("the connection has ended with an error".into()));
        }
        let Reader {
            state, scratch, have, body, body_have, bulk, ahead, planned, discarded, ..
        } = &mut self.reader;
        let rest = &mut scratch[*have..];
        // As much as is looked at next, and no more where that may belong elsewhere.
        let (first, next): (&mut [u8], usize) = match state {
            Reading::Preface => (&mut [], PREFACE.len() + HEADER_LEN - *have),
            Reading::Header if *bulk => (&mut [], (*ahead).max(HEADER_LEN) - *have),
            Reading::Header => (&mut [], rest.len()),
            Reading::Sum { .. } => (&mut [], 8 + *ahead - *have),
            Reading::Body(_) => (&mut body[*body_have..], *ahead),
            Reading::Payload { header, left, hasher } => {
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

    /// So many bytes were read to what [`read_targets`](Self::read_targets) gave last.
    ///
    /// # Errors
    /// What the other end did that the protocol forbids, or why it ends the connection; what the
    /// memory of a tensor says. What came before can still be [polled](Self::poll).
    pub fn filled(&mut self, len: usize) -> Result<(), Error> {
        self.stats.received_bytes += len as u64;
        let first = len.min(self.reader.planned);
        self.reader.have += len - first;
        let done = self.fill_first(first).and_then(|()| self.look());
        self.checked(done)
    }

    /// Goes on with what was held back, whether or not there is memory for it now.
    ///
    /// # Errors
    /// As [`filled`](Self::filled).
    pub(super) fn go_on(&mut self) -> Result<(), Error> {
        let done = self.look();
        self.checked(done)
    }

    /// Goes on until nothing is held back.
    ///
    /// # Errors
    /// As [`filled`](Self::filled), also of what [`poll`](Self::poll) has gone on with.
    pub(crate) fn settle(&mut self) -> Result<(), Error> {
        if let Some(error) = self.late.take() {
            return Err(error);
        }
        while self.reader.held {
            self.go_on()?;
        }
        Ok(())
    }

    fn checked(&mut self, done: Result<(), Error>) -> Result<(), Error> {
        let done = done.and_then(|()| self.check_answers());
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

    /// An end that does not read what it makes this one say is not served on: its answers take
    /// memory.
    fn check_answers(&self) -> Result<(), Error> {
        let answers = self.writer.answers();
        if answers <= MAX_ANSWERS {
            return Ok(());
        }
        let what = format!("it has not read {answers} answers");
        Err(Error::Protocol { stream: 0, what })
    }

    fn fill_first(&mut self, len: usize) -> Result<(), Error> {
        match &mut self.reader.state {
            Reading::Body(_) => {
                self.reader.body_have += len;
                Ok(())
            }
            Reading::Payload { .. } if len > 0 => self.payload_filled(len),
            _ => Ok(()),
        }
    }

    /// So many bytes of a payload are where [`Incoming::space`] said.
    fn payload_filled(&mut self, len: usize) -> Result<(), Error> {
        let Reading::Payload { header, left, hasher } = &mut self.reader.state else {
            return Ok(());
        };
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
        let mut go_on = std::mem::take(&mut self.reader.held);
        loop {
            let there = &self.reader.scratch[at..self.reader.have];
            match &mut self.reader.state {
                Reading::Preface => {
                    let known = there.len().min(PREFACE.len());
                    if there[..known] != PREFACE[..known] {
                        let what =
                            "it does not speak this protocol, or not this version of it".into();
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
                Reading::Body(header) => {
                    let header = *header;
                    let rest = &mut self.reader.body[self.reader.body_have..];
                    let len = rest.len().min(there.len());
                    rest[..len].copy_from_slice(&there[..len]);
                    at += len;
                    self.reader.body_have += len;
                    if self.reader.body_have < self.reader.body.len() {
                        break;
                    }
                    let shared = header.flags & SHARED != 0;
                    if shared && !std::mem::take(&mut go_on) && self.is_untold(header.stream) {
                        self.reader.held = true;
                        break;
                    }
                    self.end_body()?;
                }
                Reading::Payload { header, left, .. } => {
                    let len = there.len().min(*left);
                    if len == 0 {
                        break;
                    }
                    let stream = header.stream;
                    if !std::mem::take(&mut go_on) && self.is_untold(stream) {
                        self.reader.held = true;
                        break;
                    }
                    let incoming = self.incoming.get_mut(&stream);
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
                        let what =
                            format!("their XXH3 is {sum:016x}, and {expected:016x} was sent");
                        return Err(Error::Damaged {
                            tensor: incoming.arriving().0,
                            offset,
                            end,
                            what,
                        });
                    }
                }
            }
        }
        self.reader.scratch.copy_within(at..self.reader.have, 0);
        self.reader.have -= at;
        Ok(())
    }

    fn is_untold(&self, stream: u32) -> bool {
        self.incoming.get(&stream).is_some_and(Incoming::is_untold)
    }

    /// A frame begins.
    fn begin(&mut self, header: Header) -> Result<(), Error> {
        self.stats.received_frames += 1;
        let brings = matches!(
            header.kind,
            Kind::Hello | Kind::Meta | Kind::Data | Kind::End | Kind::Message
        );
        self.moves += u64::from(brings || header.len > 0);
        let bad = |what: &str| Err(Error::Protocol { stream: header.stream, what: what.into() });
        if self.peer.is_none() && header.kind != Kind::Hello && header.kind != Kind::Close {
            return bad("it did not say who it is first");
        }
        self.reader.look_ahead(header, false);
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
        let last = incoming.is_last(left as u64);
        self.reader.look_ahead(header, last);
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
        let Reading::Body(header) = std::mem::replace(&mut self.reader.state, Reading::Header)
        else {
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
                self.writer.answer(seq);
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
                    self.writer.say(Kind::Cancel, stream, 0, &[]);
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

    /// The other end offers memory by which payloads are to come. Who cannot have it says nothing,
    /// and they come as they did.
    fn take_shared_memory(&mut self, stream: u32, len: u64) -> Result<(), Error> {
        if stream != 0 || self.ring_in.is_some() {
            return Err(Error::Protocol {
                stream,
                what: "it shares memory again, or on a stream".into(),
            });
        }
        let descriptor = self.descriptor.take().filter(|_| self.options.shared_bytes > 0);
        if let Some(ring) = descriptor.and_then(|descriptor| RingIn::open(&descriptor, len)) {
            self.writer.say(Kind::Credit, 0, ring.limit(), &[]);
            self.ring_in = Some(ring);
        }
        Ok(())
    }

    /// A piece of a payload is in shared memory.
    fn take_shared(&mut self, header: Header, body: &[u8]) -> Result<(), Error> {
        let stream = header.stream;
        let incoming = self.incoming.get_mut(&stream).expect("it is there");
        let bad = |what: &str| Error::Protocol { stream, what: what.into() };
        let (len, sum) =
            body.split_first_chunk::<8>().ok_or_else(|| bad("a length that is cut off"))?;
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
            self.writer.say(Kind::Credit, 0, limit, &[]);
        }
        Ok(())
    }

    fn incoming_frame(&mut self, header: Header, body: &[u8]) -> Result<(), Error> {
        let Header { kind, stream, .. } = header;
        let bad = |what: &str| Err(Error::Protocol { stream, what: what.into() });
        let opens = matches!(kind, Kind::Meta | Kind::Message);
        if self.incoming.get(&stream).is_some_and(Incoming::is_over) {
            // Two ends may give a stream up at once.
            return if kind == Kind::Cancel {
                Ok(())
            } else {
                bad("more of a stream that is over")
            };
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
            Kind::Data if header.flags & SHARED != 0 => self.take_shared(header, body)?,
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
                    let (tensor, offset) = incoming.arriving();
                    let what = "the XXH3 of an encoded piece is another".into();
                    return Err(Error::Damaged {
                        tensor,
                        offset,
                        end: offset + body.len() as u64,
                        what,
                    });
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
}
