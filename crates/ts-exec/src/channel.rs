// SPDX-License-Identifier: MIT OR Apache-2.0
//! Messages and tensors both ways, each once and in their order, also over links that are lost and
//! made again.
//!
//! An end numbers what it sends, and keeps it until the other has said that it has it. On a new
//! link each end says first how much it has, and what it has not is sent again. A tensor that was
//! cut off is sent again from its beginning.

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::value::{Decoder, put_number};
use ts_remote::{Error, Event, Link, SendOptions, Sink, TensorInfo};

/// The first byte of each message: what it is.
const CONTENT: u8 = 0;
const ACK: u8 = 1;
const HELLO: u8 = 2;
const PART: u8 = 3;

/// The longest message; what is longer goes in parts.
const MAX_PART: usize = 60 << 10;
/// The longest that parts may make.
const MAX_MESSAGE: usize = 64 << 20;

/// How long whoever waits looks again and again before it sleeps.
const AWAKE: Duration = Duration::from_micros(50);

/// What is received until that is said, in things and in bytes.
const ACK_EVERY: u64 = 16;
const ACK_BYTES: u64 = 256 << 10;

/// Who asks for a session and how much of it has come to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Greeting {
    /// Drawn by the client.
    pub(crate) session: [u8; 16],
    /// How many things it has received.
    pub(crate) received: u64,
}

/// Something that is sent: a message or a part of one, or a tensor's bytes.
#[derive(Debug, Clone)]
enum Outgoing {
    Message(Bytes),
    Tensor(TensorInfo, Bytes),
}

/// What has come.
#[derive(Debug)]
pub(crate) enum Incoming<S> {
    /// A message, without its first byte.
    Message(Bytes),
    /// A tensor comes: [`accept`](Channel::accept) is to be called.
    Announced(TensorInfo),
    /// It is there.
    Tensor(TensorInfo, Option<S>),
    /// Nothing more comes.
    Finished,
}

impl<S> Incoming<S> {
    /// Bytes that it takes while it waits.
    pub(crate) fn byte_len(&self) -> usize {
        match self {
            Self::Message(bytes) => bytes.len(),
            Self::Tensor(info, _) => info.storage_len as usize,
            Self::Announced(_) | Self::Finished => 0,
        }
    }
}

/// One end of it.
#[derive(Debug)]
pub(crate) struct Channel<S> {
    link: Option<Link<S>>,
    stream: u32,
    /// What was sent and has not been acknowledged, the first of which has the number `acked`.
    unacked: VecDeque<Outgoing>,
    acked: u64,
    unacked_bytes: usize,
    received: u64,
    /// Received and not said so.
    owed: (u64, u64),
    /// On which the tensor comes that was announced last.
    theirs: u32,
    /// The first parts of a message.
    parts: Vec<u8>,
}

impl Outgoing {
    fn byte_len(&self) -> usize {
        match self {
            Self::Message(bytes) | Self::Tensor(_, bytes) => bytes.len(),
        }
    }
}

impl<S: Sink> Channel<S> {
    /// One without a link.
    pub(crate) fn new() -> Self {
        Self {
            link: None,
            stream: 0,
            unacked: VecDeque::new(),
            acked: 0,
            unacked_bytes: 0,
            received: 0,
            owed: (0, 0),
            theirs: 0,
            parts: Vec::new(),
        }
    }

    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Bytes that were sent, and may have to be sent again.
    pub(crate) fn unacked_bytes(&self) -> usize {
        self.unacked_bytes
    }

    /// # Errors
    /// [`Error::Protocol`] when the other end owes acknowledgements of more bytes, or of more
    /// things, than these.
    pub(crate) fn refuse_debts(&self, (bytes, things): (usize, usize)) -> Result<(), Error> {
        if self.unacked_bytes <= bytes && self.unacked.len() <= things {
            return Ok(());
        }
        Err(Error::Protocol {
            stream: self.stream,
            what: "nothing that was sent is acknowledged".into(),
        })
    }

    /// Whether the other end has all.
    pub(crate) fn is_acked(&self) -> bool {
        self.unacked.is_empty()
    }

    /// The number that what is sent next has.
    pub(crate) fn next_number(&self) -> u64 {
        self.acked + self.unacked.len() as u64
    }

    /// Bytes that the socket has not taken.
    pub(crate) fn unsent_bytes(&mut self) -> usize {
        self.link.as_mut().map_or(0, |link| link.connection().unsent_bytes())
    }

    pub(crate) fn link(&mut self) -> Option<&mut Link<S>> {
        self.link.as_mut()
    }

    /// Whether the other end has said why it ended the connection.
    pub(crate) fn was_closed(&mut self) -> bool {
        self.link.as_mut().is_some_and(was_told_why)
    }

    /// Gives the link up; what was sent is kept.
    pub(crate) fn detach(&mut self) -> Option<Link<S>> {
        self.link.take()
    }

    /// Says who this is on a new link, and hears who that is. Blocks.
    pub(crate) fn greet(link: &mut Link<S>, own: Greeting) -> Result<(u32, Greeting), Error> {
        let stream = link.connection().open_stream()?;
        let said = Self::say_hello(link, stream, own);
        let heard = said.and_then(|()| Self::hear_hello(link)).map_err(|error| match error {
            // Who refuses says so; an end without a word is that of the link alone.
            Error::Closed { reason } if !was_told_why(link) => {
                Error::Lost { what: format!("before it greeted: {reason}") }
            }
            other => other,
        })?;
        Ok((stream, heard))
    }

    /// Says who this is.
    pub(crate) fn say_hello(link: &mut Link<S>, stream: u32, own: Greeting) -> Result<(), Error> {
        let mut hello = vec![HELLO];
        hello.extend_from_slice(&own.session);
        put_number(&mut hello, own.received);
        link.send_message(stream, hello.into())
    }

    /// Hears who is there, which is what each end says first. Blocks.
    pub(crate) fn hear_hello(link: &mut Link<S>) -> Result<Greeting, Error> {
        loop {
            match link.next_event()? {
                Event::Message { stream, bytes } => {
                    let mut fields = Decoder::new(&bytes, stream);
                    if fields.byte()? != HELLO {
                        return Err(fields.bad("something before a greeting".into()));
                    }
                    let session = fields.array()?;
                    return Ok(Greeting { session, received: fields.number()? });
                }
                Event::Connected { .. } => {}
                _ => {
                    let what = "something before a greeting".into();
                    return Err(Error::Protocol { stream: 0, what });
                }
            }
        }
    }

    /// Goes on with a link on which both have greeted: what the other end has not received is sent
    /// again.
    pub(crate) fn attach(&mut self, link: Link<S>, stream: u32, theirs: u64) -> Result<(), Error> {
        if theirs > self.next_number() || theirs < self.acked {
            let what =
                format!("has received {theirs} things, of which {} were sent", self.next_number());
            return Err(Error::Protocol { stream, what });
        }
        self.heard(theirs);
        (self.link, self.stream, self.owed) = (Some(link), stream, (0, 0));
        for at in 0..self.unacked.len() {
            let item = self.unacked[at].clone();
            self.put(item)?;
        }
        Ok(())
    }

    /// Sends a message, when the socket takes it. Without a link it is sent with the next.
    pub(crate) fn send_message(&mut self, message: &[u8]) -> Result<(), Error> {
        let mut parts = message.chunks(MAX_PART).peekable();
        while let Some(part) = parts.next() {
            let mut bytes = Vec::with_capacity(part.len() + 1);
            bytes.push(if parts.peek().is_some() { PART } else { CONTENT });
            bytes.extend_from_slice(part);
            self.send(Outgoing::Message(bytes.into()))?;
        }
        Ok(())
    }

    /// Sends a tensor, as [`send_message`](Self::send_message).
    pub(crate) fn send_tensor(&mut self, info: TensorInfo, bytes: Bytes) -> Result<(), Error> {
        self.send(Outgoing::Tensor(info, bytes))
    }

    fn send(&mut self, item: Outgoing) -> Result<(), Error> {
        self.unacked_bytes += item.byte_len();
        self.unacked.push_back(item.clone());
        self.put(item)
    }

    fn put(&mut self, item: Outgoing) -> Result<(), Error> {
        let Some(link) = &mut self.link else { return Ok(()) };
        match item {
            Outgoing::Message(bytes) => link.connection().send_message(self.stream, bytes),
            Outgoing::Tensor(info, bytes) => {
                link.connection().send(self.stream, info, bytes, SendOptions::default())
            }
        }
    }

    /// Memory for the tensor that was announced.
    pub(crate) fn accept(&mut self, sink: S) -> Result<(), Error> {
        let link = self.link.as_mut().ok_or_else(lost)?;
        link.connection().accept(self.theirs, sink)
    }

    /// Waits until the socket has all that was sent, at most so long.
    pub(crate) fn flush_within(&mut self, time: Duration) -> Result<bool, Error> {
        let stream = self.stream;
        self.link.as_mut().ok_or_else(lost)?.flush_within(stream, time)
    }

    /// Reads and writes what goes without waiting.
    pub(crate) fn drive(&mut self) -> Result<(), Error> {
        match &mut self.link {
            Some(link) => link.drive().map(drop),
            None => Ok(()),
        }
    }

    /// What comes next, at most so long; or `None`, and that too when there were acknowledgements
    /// alone, which end the wait.
    pub(crate) fn next_within(&mut self, time: Duration) -> Result<Option<Incoming<S>>, Error> {
        // Those that came with what was heard last end nothing.
        if let Some(item) = self.next_heard()? {
            return Ok(Some(item));
        }
        let link = self.link.as_mut().ok_or_else(lost)?;
        // Falling asleep and being woken takes longer than most operators.
        let (since, awake) = (Instant::now(), AWAKE.min(time));
        let mut event = None;
        while event.is_none() && since.elapsed() < awake {
            thread::yield_now();
            link.drive()?;
            event = link.connection().poll();
        }
        let event = match event {
            None => link.next_event_within(time.saturating_sub(awake))?,
            some => some,
        };
        event.map_or(Ok(None), |event| self.hear(event))
    }

    /// What has come and was not looked at yet, without a look at the socket.
    pub(crate) fn next_heard(&mut self) -> Result<Option<Incoming<S>>, Error> {
        while let Some(event) = self.link.as_mut().ok_or_else(lost)?.connection().poll() {
            if let Some(item) = self.hear(event)? {
                return Ok(Some(item));
            }
        }
        Ok(None)
    }

    /// What has come, if something has.
    pub(crate) fn poll(&mut self) -> Result<Option<Incoming<S>>, Error> {
        while let Some(link) = &mut self.link {
            let Some(event) = link.poll_event()? else { break };
            if let Some(item) = self.hear(event)? {
                return Ok(Some(item));
            }
        }
        Ok(None)
    }

    fn hear(&mut self, event: Event<S>) -> Result<Option<Incoming<S>>, Error> {
        match event {
            Event::Message { stream, bytes } => {
                let mut fields = Decoder::new(&bytes, stream);
                match fields.byte()? {
                    PART => {
                        if self.parts.len() + bytes.len() > MAX_MESSAGE {
                            return Err(
                                fields.bad(format!("a message of more than {MAX_MESSAGE} bytes"))
                            );
                        }
                        self.parts.extend_from_slice(&bytes[1..]);
                        self.took(bytes.len() as u64)?;
                    }
                    CONTENT => {
                        self.took(bytes.len() as u64)?;
                        let last = bytes.slice(1..);
                        if self.parts.is_empty() {
                            return Ok(Some(Incoming::Message(last)));
                        }
                        let mut message = std::mem::take(&mut self.parts);
                        message.extend_from_slice(&last);
                        return Ok(Some(Incoming::Message(message.into())));
                    }
                    ACK => {
                        let theirs = fields.number()?;
                        if theirs > self.next_number() || theirs < self.acked {
                            return Err(
                                fields.bad(format!("an acknowledgement of {theirs} things"))
                            );
                        }
                        self.heard(theirs);
                    }
                    kind => return Err(fields.bad(format!("a message of kind {kind}"))),
                }
            }
            Event::Metadata { stream, info, .. } if info.storage_len > 0 => {
                self.theirs = stream;
                return Ok(Some(Incoming::Announced(info)));
            }
            Event::End { info, sink, .. } => {
                self.took(info.storage_len)?;
                return Ok(Some(Incoming::Tensor(*info, sink)));
            }
            Event::Finished { .. } => return Ok(Some(Incoming::Finished)),
            Event::Cancelled { stream, reason, .. } => {
                return Err(Error::Cancelled { stream, reason });
            }
            _ => {}
        }
        Ok(None)
    }

    fn heard(&mut self, theirs: u64) {
        for item in self.unacked.drain(..(theirs - self.acked) as usize) {
            self.unacked_bytes -= item.byte_len();
        }
        self.acked = theirs;
    }

    fn took(&mut self, bytes: u64) -> Result<(), Error> {
        self.received += 1;
        self.owed = (self.owed.0 + 1, self.owed.1 + bytes);
        if self.owed.0 >= ACK_EVERY || self.owed.1 >= ACK_BYTES {
            self.acknowledge()
        } else {
            Ok(())
        }
    }

    /// What was sent and may have to be sent again is the channel's own from now on.
    pub(crate) fn copy_unacked(&mut self) {
        for item in &mut self.unacked {
            if let Outgoing::Tensor(_, bytes) = item {
                *bytes = Bytes::copy_from_slice(bytes);
            }
        }
    }

    /// Whether something waits for the socket.
    pub(crate) fn wants_write(&mut self) -> bool {
        self.link.as_mut().is_some_and(Link::wants_write)
    }

    /// Says how much has come, if that was not said.
    pub(crate) fn acknowledge(&mut self) -> Result<(), Error> {
        if self.owed.0 > 0
            && let Some(link) = &mut self.link
        {
            let mut ack = vec![ACK];
            put_number(&mut ack, self.received);
            self.owed = (0, 0);
            link.connection().send_message(self.stream, ack.into())?;
        }
        Ok(())
    }

    /// Says that nothing more comes from this end, and waits until the socket has that. Blocks.
    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        let Some(link) = &mut self.link else { return Ok(()) };
        link.connection().finish(self.stream)?;
        link.flush_all()
    }
}

/// Whether the other end has said why it ended the connection.
fn was_told_why<S: Sink>(link: &mut Link<S>) -> bool {
    matches!(link.connection().end_of_input(), Err(Error::Closed { .. }))
}

pub(crate) fn lost() -> Error {
    Error::Lost { what: String::new() }
}
