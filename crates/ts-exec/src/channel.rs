// SPDX-License-Identifier: MIT OR Apache-2.0
//! A reliable channel of messages and tensors over links that may be lost.
//!
//! Each end numbers the items that it sends and keeps them until the peer has acknowledged them. On
//! a new link, each end first says how many items it has received, and then sends again what the
//! peer does not have. A tensor that was interrupted is sent again from its beginning. So every
//! item arrives once and in order.

mod hello;

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::codec::{Decoder, put_number};
use ts_remote::{Error, Event, Link, SendOptions, Sink, TensorInfo};

pub(crate) use hello::Hello;
use hello::closed_by_peer;

/// The type of a message, its first byte. [`hello::HELLO`] is another one.
const CONTENT: u8 = 0;
const ACK: u8 = 1;
const PART: u8 = 3;

/// The longest message, in bytes. Longer ones are sent in parts.
const MAX_PART: usize = 60 << 10;
/// The longest message that may be assembled from parts, in bytes.
const MAX_MESSAGE: usize = 64 << 20;

/// How long a wait polls the socket before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// An acknowledgement is sent after this many items,
const ACK_ITEMS: u64 = 16;
/// or after this many bytes.
const ACK_BYTES: u64 = 256 << 10;

/// An item that this end has sent: a message, a part of one, or a tensor.
#[derive(Debug, Clone)]
enum Outgoing {
    Message(Bytes),
    Tensor(TensorInfo, Bytes),
}

impl Outgoing {
    fn byte_len(&self) -> usize {
        match self {
            Self::Message(bytes) | Self::Tensor(_, bytes) => bytes.len(),
        }
    }
}

/// What a channel receives.
#[derive(Debug)]
pub(crate) enum Incoming<S> {
    /// A message, without its type byte.
    Message(Bytes),
    /// A tensor follows. The caller provides memory with [`accept`](Channel::accept).
    Announced(TensorInfo),
    /// A complete tensor.
    Tensor(TensorInfo, Option<S>),
    /// The peer has ended its stream.
    Finished,
}

impl<S> Incoming<S> {
    /// Returns the bytes of memory that this uses while it is queued.
    pub(crate) fn byte_len(&self) -> usize {
        match self {
            Self::Message(bytes) => bytes.len(),
            Self::Tensor(info, _) => info.storage_len as usize,
            Self::Announced(_) | Self::Finished => 0,
        }
    }
}

/// A number of items, and their bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backlog {
    pub(crate) bytes: usize,
    pub(crate) items: usize,
}

/// One end of a reliable channel.
///
/// Without a link, it keeps what is sent, for the next link.
#[derive(Debug)]
pub(crate) struct Channel<S> {
    link: Option<Link<S>>,
    /// The stream that this end sends on.
    stream: u32,
    /// Items that were sent and not acknowledged.
    unacked: VecDeque<Outgoing>,
    /// How many items the peer has acknowledged: the number of the first one in `unacked`.
    acked: u64,
    unacked_bytes: usize,
    /// How many items were received.
    received: u64,
    /// How many of these items, and how many bytes, were not acknowledged.
    pending_ack: (u64, u64),
    /// The peer's stream that the last announced tensor comes on.
    tensor_stream: u32,
    /// The parts of an incomplete message.
    parts: Vec<u8>,
}

impl<S: Sink> Channel<S> {
    /// Creates a channel without a link.
    pub(crate) fn new() -> Self {
        Self {
            link: None,
            stream: 0,
            unacked: VecDeque::new(),
            acked: 0,
            unacked_bytes: 0,
            received: 0,
            pending_ack: (0, 0),
            tensor_stream: 0,
            parts: Vec::new(),
        }
    }

    /// Returns how many items were received.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Returns how many bytes were sent and not acknowledged.
    pub(crate) fn unacked_bytes(&self) -> usize {
        self.unacked_bytes
    }

    /// Checks that the peer acknowledges what it receives.
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] if more than `limit` is unacknowledged. Does not count the bytes
    /// of the largest item, because a client cannot acknowledge a tensor before it has arrived.
    pub(crate) fn check_unacked(&self, limit: Backlog) -> Result<(), Error> {
        let (mut bytes, items) = (self.unacked_bytes, self.unacked.len());
        if bytes > limit.bytes {
            bytes -= self.unacked.iter().map(Outgoing::byte_len).max().unwrap_or(0);
        }
        if bytes <= limit.bytes && items <= limit.items {
            return Ok(());
        }
        let what = format!(
            "{bytes} bytes in {items} items are not acknowledged (expected at most {} bytes in {} \
             items)",
            limit.bytes, limit.items
        );
        Err(Error::Protocol { stream: self.stream, what })
    }

    /// Returns whether the peer has acknowledged everything.
    pub(crate) fn is_acked(&self) -> bool {
        self.unacked.is_empty()
    }

    /// Returns how many items were sent: the number of the next one.
    fn sent(&self) -> u64 {
        self.acked + self.unacked.len() as u64
    }

    /// Returns how many bytes wait for the socket.
    pub(crate) fn unsent_bytes(&mut self) -> usize {
        self.link.as_mut().map_or(0, |link| link.connection().unsent_bytes())
    }

    pub(crate) fn link(&mut self) -> Option<&mut Link<S>> {
        self.link.as_mut()
    }

    /// Returns whether the peer has closed the connection with a reason.
    pub(crate) fn closed_by_peer(&mut self) -> bool {
        self.link.as_mut().is_some_and(closed_by_peer)
    }

    /// Removes the link, if there is one. Unacknowledged items are kept.
    pub(crate) fn detach(&mut self) -> Option<Link<S>> {
        self.link.take()
    }

    /// Continues on a new link, after the handshake: sends again what the peer has not received.
    pub(crate) fn attach(&mut self, link: Link<S>, stream: u32, acked: u64) -> Result<(), Error> {
        self.acknowledged(stream, acked)?;
        (self.link, self.stream, self.pending_ack) = (Some(link), stream, (0, 0));
        for at in 0..self.unacked.len() {
            let item = self.unacked[at].clone();
            self.transmit(item)?;
        }
        Ok(())
    }

    /// Sends a message. Does not block: the socket may take it later, or the next link.
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
        self.transmit(item)
    }

    /// Passes an item to the link, if there is one.
    fn transmit(&mut self, item: Outgoing) -> Result<(), Error> {
        let Some(link) = &mut self.link else { return Ok(()) };
        match item {
            Outgoing::Message(bytes) => link.connection().send_message(self.stream, bytes),
            Outgoing::Tensor(info, bytes) => {
                link.connection().send(self.stream, info, bytes, SendOptions::default())
            }
        }
    }

    /// Provides memory for the tensor that was announced last.
    pub(crate) fn accept(&mut self, sink: S) -> Result<(), Error> {
        let link = self.link.as_mut().ok_or_else(link_lost)?;
        link.connection().accept(self.tensor_stream, sink)
    }

    /// Waits up to `time` until the socket has taken everything. Returns whether it has.
    pub(crate) fn flush_within(&mut self, time: Duration) -> Result<bool, Error> {
        let stream = self.stream;
        self.link.as_mut().ok_or_else(link_lost)?.flush_within(stream, time)
    }

    /// Reads and writes as much as is possible without blocking.
    pub(crate) fn drive(&mut self) -> Result<(), Error> {
        match &mut self.link {
            Some(link) => link.drive().map(drop),
            None => Ok(()),
        }
    }

    /// Waits up to `time` for the next incoming item. An acknowledgement also ends the wait, with
    /// `None`.
    pub(crate) fn next_within(&mut self, time: Duration) -> Result<Option<Incoming<S>>, Error> {
        // Acknowledgements that were read together with the last item must not end this wait.
        if let Some(item) = self.next_buffered()? {
            return Ok(Some(item));
        }
        let link = self.link.as_mut().ok_or_else(link_lost)?;
        // Poll first, because sleeping and being woken takes longer than most operators.
        let (since, spin) = (Instant::now(), SPIN.min(time));
        let mut event = None;
        while event.is_none() && since.elapsed() < spin {
            thread::yield_now();
            link.drive()?;
            event = link.connection().poll();
        }
        let event = match event {
            None => link.next_event_within(time.saturating_sub(spin))?,
            some => some,
        };
        event.map_or(Ok(None), |event| self.handle(event))
    }

    /// Returns the next item among those that were already read from the socket.
    pub(crate) fn next_buffered(&mut self) -> Result<Option<Incoming<S>>, Error> {
        while let Some(event) = self.link.as_mut().ok_or_else(link_lost)?.connection().poll() {
            if let Some(item) = self.handle(event)? {
                return Ok(Some(item));
            }
        }
        Ok(None)
    }

    /// Returns the next item, if one has arrived. Does not block.
    pub(crate) fn poll(&mut self) -> Result<Option<Incoming<S>>, Error> {
        while let Some(link) = &mut self.link {
            let Some(event) = link.poll_event()? else { break };
            if let Some(item) = self.handle(event)? {
                return Ok(Some(item));
            }
        }
        Ok(None)
    }

    fn handle(&mut self, event: Event<S>) -> Result<Option<Incoming<S>>, Error> {
        match event {
            Event::Message { stream, bytes } => {
                let mut fields = Decoder::new(&bytes, stream);
                match fields.byte()? {
                    PART => {
                        if self.parts.len() + bytes.len() > MAX_MESSAGE {
                            let what = format!("message of more than {MAX_MESSAGE} bytes");
                            return Err(fields.error(what));
                        }
                        self.parts.extend_from_slice(&bytes[1..]);
                        self.count_received(bytes.len() as u64)?;
                    }
                    CONTENT => {
                        self.count_received(bytes.len() as u64)?;
                        let last = bytes.slice(1..);
                        if self.parts.is_empty() {
                            return Ok(Some(Incoming::Message(last)));
                        }
                        let mut message = std::mem::take(&mut self.parts);
                        message.extend_from_slice(&last);
                        return Ok(Some(Incoming::Message(message.into())));
                    }
                    ACK => self.acknowledged(stream, fields.number()?)?,
                    kind => return Err(fields.error(format!("unknown message type {kind}"))),
                }
            }
            Event::Metadata { stream, info, .. } if info.storage_len > 0 => {
                self.tensor_stream = stream;
                return Ok(Some(Incoming::Announced(info)));
            }
            Event::End { info, sink, .. } => {
                self.count_received(info.storage_len)?;
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

    /// Drops the items that the peer has: the first `acked` of the session.
    fn acknowledged(&mut self, stream: u32, acked: u64) -> Result<(), Error> {
        let (least, most) = (self.acked, self.sent());
        if !(least..=most).contains(&acked) {
            let what = format!("acknowledged {acked} items (expected {least} to {most})");
            return Err(Error::Protocol { stream, what });
        }
        for item in self.unacked.drain(..(acked - least) as usize) {
            self.unacked_bytes -= item.byte_len();
        }
        self.acked = acked;
        Ok(())
    }

    fn count_received(&mut self, bytes: u64) -> Result<(), Error> {
        self.received += 1;
        self.pending_ack = (self.pending_ack.0 + 1, self.pending_ack.1 + bytes);
        if self.pending_ack.0 >= ACK_ITEMS || self.pending_ack.1 >= ACK_BYTES {
            self.send_ack()
        } else {
            Ok(())
        }
    }

    /// Copies the payload of each unacknowledged tensor, so that the memory that it came from may
    /// change.
    pub(crate) fn copy_unacked(&mut self) {
        for item in &mut self.unacked {
            if let Outgoing::Tensor(_, bytes) = item {
                *bytes = Bytes::copy_from_slice(bytes);
            }
        }
    }

    /// Returns whether anything waits for the socket.
    pub(crate) fn wants_write(&mut self) -> bool {
        self.link.as_mut().is_some_and(Link::wants_write)
    }

    /// Acknowledges what was received since the last acknowledgement, if anything.
    pub(crate) fn send_ack(&mut self) -> Result<(), Error> {
        if self.pending_ack.0 > 0
            && let Some(link) = &mut self.link
        {
            let mut ack = vec![ACK];
            put_number(&mut ack, self.received);
            self.pending_ack = (0, 0);
            link.connection().send_message(self.stream, ack.into())?;
        }
        Ok(())
    }

    /// Ends this end's stream, and waits until the socket has everything. Blocks.
    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        let Some(link) = &mut self.link else { return Ok(()) };
        link.connection().finish(self.stream)?;
        link.flush_all()
    }
}

/// The error of an operation that needs a link when there is none.
pub(crate) fn link_lost() -> Error {
    Error::Lost { what: String::new() }
}
