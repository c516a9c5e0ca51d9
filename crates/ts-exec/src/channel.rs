// SPDX-License-Identifier: MIT OR Apache-2.0
//! A reliable channel of messages and tensors over links that may be lost.
//!
//! Each end numbers the items that it sends and keeps them until the peer has acknowledged them. On
//! a new link, each end first reports how many items it has received. It then resends the items
//! that the peer does not have. A tensor that was interrupted is sent again from its beginning. So
//! every item arrives once and in order.

mod hello;

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::codec::{Decoder, put_number};
use ts_remote::{Error, Event, Link, SendOptions, Sink, TensorInfo};

pub(crate) use hello::Hello;
use hello::closed_by_peer;

/// The types of messages. The first byte of a message is its type. [`hello::HELLO`] is another
/// type.
const CONTENT: u8 = 0;
const ACK: u8 = 1;
const PART: u8 = 3;

/// The maximum length of a message that is sent in one piece, in bytes, without its type byte.
/// Longer messages are split into parts of at most this length.
const MAX_PART: usize = 60 << 10;
/// The PARTs of a message must have fewer bytes than this in total. The CONTENT that ends the
/// message is not counted.
const MAX_MESSAGE: usize = 64 << 20;

/// How long a wait polls the socket before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// The number of received items after which an acknowledgement is sent.
const ACK_ITEMS: u64 = 16;
/// The number of received bytes after which an acknowledgement is sent.
const ACK_BYTES: u64 = 256 << 10;

/// An item that this end has sent: a message, a part of a message, or a tensor.
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

/// An item or event that a channel receives.
#[derive(Debug)]
pub(crate) enum Incoming<S> {
    /// A message, without its type byte.
    Message(Bytes),
    /// A tensor follows. The caller provides memory with [`accept`](Channel::accept).
    Announced(TensorInfo),
    /// A complete tensor, with its memory. The memory is `None` if the tensor is empty.
    Tensor(TensorInfo, Option<S>),
    /// The peer has ended its stream.
    Finished,
}

impl<S> Incoming<S> {
    /// Returns how many bytes of memory this item uses while it is queued.
    pub(crate) fn byte_len(&self) -> usize {
        match self {
            Self::Message(bytes) => bytes.len(),
            Self::Tensor(info, _) => info.storage_len as usize,
            Self::Announced(_) | Self::Finished => 0,
        }
    }
}

/// A number of items, and their total size in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backlog {
    pub(crate) bytes: usize,
    pub(crate) items: usize,
}

/// One end of a reliable channel.
///
/// Without a link, the channel keeps the items that are sent, for the next link.
#[derive(Debug)]
pub(crate) struct Channel<S> {
    link: Option<Link<S>>,
    /// The stream that this end sends on.
    stream: u32,
    /// The items that this end has sent and the peer has not acknowledged.
    unacked: VecDeque<Outgoing>,
    /// How many items the peer has acknowledged. This is also the number of the first item in
    /// `unacked`.
    acked: u64,
    unacked_bytes: usize,
    /// How many items this end has received.
    received: u64,
    /// The received items that this end has not acknowledged: their number, and their total size
    /// in bytes.
    pending_ack: (u64, u64),
    /// The peer's stream that carries the tensor of the most recent [`Incoming::Announced`].
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

    /// Returns how many items this end has received.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Returns how many sent bytes the peer has not acknowledged.
    pub(crate) fn unacked_bytes(&self) -> usize {
        self.unacked_bytes
    }

    /// Checks that the client acknowledges the items that it receives. Only a server calls this,
    /// and sends the error to the client.
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] if the unacknowledged items exceed `limit`. The bytes of the
    /// largest item do not count, because a client cannot acknowledge a tensor before it has
    /// arrived.
    pub(crate) fn check_unacked(&self, limit: Backlog) -> Result<(), Error> {
        let (mut bytes, items) = (self.unacked_bytes, self.unacked.len());
        if bytes > limit.bytes {
            bytes -= self.unacked.iter().map(Outgoing::byte_len).max().unwrap_or(0);
        }
        if bytes <= limit.bytes && items <= limit.items {
            return Ok(());
        }
        let what = format!(
            "the client left {bytes} bytes in {items} messages and tensors unacknowledged \
             (expected at most {} bytes and {} messages and tensors)",
            limit.bytes, limit.items
        );
        Err(Error::Protocol { stream: self.stream, what })
    }

    /// Returns whether the peer has acknowledged all items.
    pub(crate) fn is_acked(&self) -> bool {
        self.unacked.is_empty()
    }

    /// Returns how many items this end has sent, which is the number of the next item.
    fn sent(&self) -> u64 {
        self.acked + self.unacked.len() as u64
    }

    /// Returns how many queued bytes the socket has not taken yet.
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

    /// Continues on a new link, after the handshake. Resends the items that the peer has not
    /// received. `acked` is the number of items that the peer has received.
    pub(crate) fn attach(&mut self, link: Link<S>, stream: u32, acked: u64) -> Result<(), Error> {
        self.acknowledged(stream, acked)?;
        (self.link, self.stream, self.pending_ack) = (Some(link), stream, (0, 0));
        for at in 0..self.unacked.len() {
            let item = self.unacked[at].clone();
            self.transmit(item)?;
        }
        Ok(())
    }

    /// Sends a message. Does not block. If the socket cannot take the message now, or there is no
    /// link, the message is sent later.
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

    /// Sends a tensor. Does not block, like [`send_message`](Self::send_message).
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

    /// Waits up to `time` until the socket has taken all bytes. Returns whether it has.
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

    /// Waits up to `time` for the next incoming item. Returns `None` if no item has arrived. An
    /// acknowledgement or a part of a message also ends the wait, with `None`.
    pub(crate) fn next_within(&mut self, time: Duration) -> Result<Option<Incoming<S>>, Error> {
        // Acknowledgements that were read together with the previous item must not end this wait.
        if let Some(item) = self.next_buffered()? {
            return Ok(Some(item));
        }
        let link = self.link.as_mut().ok_or_else(link_lost)?;
        // Polls first, because it takes longer to sleep and wake up than to run most operators.
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

    /// Returns the next item that was already read from the socket, if there is one.
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
                            let len = self.parts.len() + bytes.len() - 1;
                            let what = format!(
                                "a message is too long: its PARTs have {len} bytes so far \
                                 (expected fewer than {MAX_MESSAGE})"
                            );
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
                    kind => {
                        return Err(fields.error(format!(
                            "unexpected message type {kind} (expected {CONTENT}, {ACK} or {PART})"
                        )));
                    }
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

    /// Drops the items that the peer has received: the first `acked` items of the session.
    fn acknowledged(&mut self, stream: u32, acked: u64) -> Result<(), Error> {
        let (least, most) = (self.acked, self.sent());
        if !(least..=most).contains(&acked) {
            let what = format!(
                "invalid acknowledgement of {acked} messages and tensors (expected {least} to \
                 {most})"
            );
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

    /// Copies the payload of each unacknowledged tensor. The caller can then change the original
    /// memory.
    pub(crate) fn copy_unacked(&mut self) {
        for item in &mut self.unacked {
            if let Outgoing::Tensor(_, bytes) = item {
                *bytes = Bytes::copy_from_slice(bytes);
            }
        }
    }

    /// Returns whether there are bytes that the socket has not taken yet.
    pub(crate) fn wants_write(&mut self) -> bool {
        self.link.as_mut().is_some_and(Link::wants_write)
    }

    /// Acknowledges the items that were received since the last acknowledgement, if there are any.
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

    /// Finishes the stream that this end sends on, and blocks until the socket has taken all bytes.
    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        let Some(link) = &mut self.link else { return Ok(()) };
        link.connection().finish(self.stream)?;
        link.flush_all()
    }
}

/// Creates an error that reports that the link was lost.
pub(crate) fn link_lost() -> Error {
    Error::Lost { what: String::new() }
}
