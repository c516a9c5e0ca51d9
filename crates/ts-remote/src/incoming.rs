// SPDX-License-Identifier: MIT OR Apache-2.0
//! The receiving end of a stream.

use std::collections::{HashMap, VecDeque};
use std::hash::Hasher;

use bytes::Bytes;
use ts_format::{Scratch, decode_chunk};
use twox_hash::XxHash3_64;

use crate::credit::GrantedCredit;
use crate::frame::{ENCODED_PREFIX_LEN, HEADER_LEN, MAX_PIECE_LEN};
use crate::info::{Meta, TensorInfo};
use crate::ring::RingReader;
use crate::{Error, Event, Sink, StreamStats};

/// The maximum number of kept storages per stream.
const MAX_KEPT: usize = 1 << 16;
/// A tensor of at least this many bytes probably does not fit into the cache of a core.
const UNCACHED_LEN: u64 = 4 << 20;

/// The receiving end of a stream.
#[derive(Debug)]
pub(crate) struct Incoming<S> {
    id: u32,
    credit: GrantedCredit,
    /// The items whose last event has not been delivered, in order. Earlier events of the first
    /// item may have been delivered.
    items: VecDeque<Item<S>>,
    /// The numbers of the storages that later tensors may use, with their lengths in bytes.
    kept: HashMap<u64, u64>,
    /// Whether this end cancelled the stream. If so, it drops everything that still arrives.
    refused: bool,
    /// Whether the peer finished or cancelled the stream.
    ended: bool,
    /// The memory of a tensor that the peer cancelled.
    cancelled_sink: Option<S>,
    stats: StreamStats,
}

#[derive(Debug)]
enum Item<S> {
    Tensor(Box<IncomingTensor<S>>),
    Message(Bytes),
    Cancelled(String),
    Finished,
}

#[derive(Debug)]
struct IncomingTensor<S> {
    meta: Meta,
    /// The credit that META used, in bytes.
    meta_cost: u64,
    sink: Option<S>,
    /// The bytes that arrived before the user provided a sink.
    staged: Vec<u8>,
    received: u64,
    /// The number of bytes that `Data` events have reported. `None` until the `Metadata` event is
    /// delivered.
    delivered: Option<u64>,
    complete: bool,
}

impl<S: Sink> Incoming<S> {
    pub(crate) fn new(id: u32, window: u64) -> Self {
        Self {
            id,
            credit: GrantedCredit::new(window),
            items: VecDeque::new(),
            kept: HashMap::new(),
            refused: false,
            ended: false,
            cancelled_sink: None,
            stats: StreamStats::default(),
        }
    }

    /// Begins a tensor with the body of META.
    pub(crate) fn begin(&mut self, body: &[u8]) -> Result<(), Error> {
        let meta_cost = self.receive_whole(body.len() as u64)?;
        if self.refused {
            return Ok(());
        }
        if let Some(Item::Tensor(last)) = self.items.back()
            && !last.complete
        {
            return Err(self.bad(format!("received META inside tensor {:?}", last.meta.info.name)));
        }
        let meta = Meta::decode(body, self.id)?;
        let Meta { info, kept, known, .. } = &meta;
        let (id, len) = (info.storage_id, info.storage_len);
        if *known && self.kept.get(&id) != Some(&len) {
            let name = &info.name;
            let what = match self.kept.get(&id) {
                None => format!(
                    "received tensor {name:?} with storage {id}, which was not sent or not kept"
                ),
                Some(sent) => format!(
                    "received tensor {name:?} with storage {id} of {len} bytes, but the storage \
                     was sent with {sent} bytes"
                ),
            };
            return Err(self.bad(what));
        }
        if *kept {
            self.kept.insert(id, len);
            if self.kept.len() > MAX_KEPT {
                return Err(self.bad(format!("received more than {MAX_KEPT} kept storages")));
            }
        } else {
            self.kept.remove(&id);
        }
        self.stats.tensors += 1;
        self.stats.expected_bytes += if *known { 0 } else { len };
        let tensor = IncomingTensor {
            meta,
            meta_cost,
            sink: None,
            staged: Vec::new(),
            received: 0,
            delivered: None,
            complete: false,
        };
        self.items.push_back(Item::Tensor(Box::new(tensor)));
        Ok(())
    }

    /// Begins a DATA frame at offset `at` of the payload. `len` is the length of its piece in
    /// bytes, or `None` if the piece is encoded.
    pub(crate) fn begin_data(&mut self, at: u64, len: Option<u64>) -> Result<(), Error> {
        if self.refused {
            return len.map_or(Ok(()), |len| self.receive(len, false));
        }
        match self.items.back() {
            Some(Item::Tensor(tensor)) if !tensor.complete && !tensor.meta.known => {
                let (received, total) = (tensor.received, tensor.meta.info.storage_len);
                if at != received || len.is_some_and(|len| len == 0 || len > total - received) {
                    let name = &tensor.meta.info.name;
                    let len = len.map_or_else(String::new, |len| format!(" of {len} bytes"));
                    let left = total - received;
                    let what = format!(
                        "received DATA{len} at offset {at} of tensor {name:?} (expected at most \
                         {left} bytes at offset {received})"
                    );
                    return Err(self.bad(what));
                }
            }
            _ => return Err(self.bad("received DATA, but no tensor expects a payload".into())),
        }
        len.map_or(Ok(()), |len| self.receive(len, false))
    }

    /// Returns whether the `Metadata` event of the current tensor has not been delivered, so that
    /// the user could not provide memory yet.
    pub(crate) fn is_metadata_pending(&self) -> bool {
        matches!(self.items.back(), Some(Item::Tensor(last)) if last.delivered.is_none())
    }

    /// Returns whether the next `len` bytes are the last of the payload.
    pub(crate) fn is_last(&self, len: u64) -> bool {
        let ends =
            |tensor: &IncomingTensor<S>| tensor.received + len == tensor.meta.info.storage_len;
        matches!(self.items.back(), Some(Item::Tensor(last)) if ends(last))
    }

    /// Returns memory for at most the next `len` bytes of the payload, or `None` if the bytes must
    /// be dropped.
    pub(crate) fn space(&mut self, len: usize) -> Result<Option<&mut [u8]>, Error> {
        if self.refused {
            return Ok(None);
        }
        let Some(Item::Tensor(tensor)) = self.items.back_mut() else {
            unreachable!("`begin_data` has checked that a tensor has begun")
        };
        let IncomingTensor { sink, staged, received, .. } = &mut **tensor;
        match sink {
            Some(sink) => sink.space(*received, len).map(Some),
            None => {
                let at = *received as usize;
                // The credit limits this length to the window, however long the tensor is.
                staged.reserve_exact((at + len).saturating_sub(staged.len()));
                staged.resize(at + len, 0);
                Ok(Some(&mut staged[at..]))
            }
        }
    }

    /// Records that `len` bytes were written to the memory that [`space`](Self::space) last
    /// returned, or were dropped.
    pub(crate) fn filled(&mut self, len: usize) -> Result<(), Error> {
        if self.refused {
            self.credit.consume(len as u64);
            return Ok(());
        }
        let Some(Item::Tensor(tensor)) = self.items.back_mut() else {
            unreachable!("`begin_data` has checked that a tensor has begun")
        };
        self.stats.payload_bytes += len as u64;
        let at = tensor.received;
        tensor.received += len as u64;
        if let Some(sink) = &mut tensor.sink {
            sink.filled(at, len)?;
            self.credit.consume(len as u64);
        }
        Ok(())
    }

    /// Copies a piece of a payload from shared memory. If `sum` is set, returns the checksum of the
    /// piece, unless the stream is refused.
    pub(crate) fn read_shared(
        &mut self,
        len: usize,
        ring: &mut RingReader,
        sum: bool,
    ) -> Result<Option<u64>, Error> {
        let mut hasher = (sum && !self.refused).then(|| XxHash3_64::with_seed(0));
        // A checksum reads the piece again, so the piece should stay in the cache.
        let non_temporal = !sum
            && matches!(
                self.items.back(),
                Some(Item::Tensor(last)) if last.meta.info.storage_len >= UNCACHED_LEN
            );
        let mut left = len;
        while left > 0 {
            let part = match self.space(left)? {
                Some(space) => {
                    ring.read(space, non_temporal);
                    if let Some(hasher) = &mut hasher {
                        hasher.write(space);
                    }
                    space.len()
                }
                None => {
                    ring.skip(left);
                    left
                }
            };
            self.filled(part)?;
            left -= part;
        }
        Ok(hasher.map(|hasher| hasher.finish()))
    }

    /// Decodes the body of an ENCODED DATA frame into the memory of the tensor.
    pub(crate) fn decode(&mut self, body: &[u8], scratch: &mut Scratch) -> Result<(), Error> {
        let cut = || {
            let len = body.len();
            self.bad(format!(
                "received an encoded piece of {len} bytes (expected at least {ENCODED_PREFIX_LEN})"
            ))
        };
        let (prefix, encoded) = body.split_first_chunk::<ENCODED_PREFIX_LEN>().ok_or_else(cut)?;
        let [a, b, c, d, width, ..] = *prefix;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if len == 0 || len > MAX_PIECE_LEN {
            let what = format!(
                "received an encoded piece of {len} decoded bytes (expected 1 to {MAX_PIECE_LEN})"
            );
            return Err(self.bad(what));
        }
        self.receive(len as u64, false)?;
        if self.refused {
            self.credit.consume(len as u64);
            return Ok(());
        }
        let Some(Item::Tensor(tensor)) = self.items.back() else {
            unreachable!("`begin_data` has checked that a tensor has begun")
        };
        let (codec, info) = (tensor.meta.codec, &tensor.meta.info);
        let (at, total) = (tensor.received, info.storage_len);
        if len as u64 > total - at {
            let (name, left) = (&info.name, total - at);
            let what = format!(
                "received an encoded piece of {len} decoded bytes at offset {at} of tensor \
                 {name:?} (expected at most {left})"
            );
            return Err(self.bad(what));
        }
        let damaged = |what: String| Error::Damaged {
            tensor: info.name.clone(),
            offset: at,
            end: at + len as u64,
            what,
        };
        let mut decoded = vec![0; len];
        decode_chunk(codec, width, encoded, &mut decoded, scratch)
            .map_err(|error| damaged(error.to_string()))?;
        let mut rest = &decoded[..];
        while !rest.is_empty() {
            let space = self
                .space(rest.len())?
                .expect("`space` returns `None` only if the stream is refused");
            let part = space.len();
            space.copy_from_slice(&rest[..part]);
            self.filled(part)?;
            rest = &rest[part..];
        }
        Ok(())
    }

    /// Returns the name of the last tensor, how many bytes of its payload have arrived, and the
    /// length of that payload in bytes. Returns an empty name if the last item is not a tensor.
    pub(crate) fn current(&self) -> (String, u64, u64) {
        match self.items.back() {
            Some(Item::Tensor(tensor)) => {
                let Meta { info, known, .. } = &tensor.meta;
                let total = if *known { 0 } else { info.storage_len };
                (info.name.clone(), tensor.received, total)
            }
            _ => (String::new(), 0, 0),
        }
    }

    /// Completes the current tensor.
    pub(crate) fn end(&mut self) -> Result<(), Error> {
        if self.refused {
            return Ok(());
        }
        match self.items.back_mut() {
            Some(Item::Tensor(tensor)) if !tensor.complete => {
                let IncomingTensor { meta, received, complete, .. } = &mut **tensor;
                let total = if meta.known { 0 } else { meta.info.storage_len };
                *complete = *received == total;
                if *complete {
                    Ok(())
                } else {
                    let name = &meta.info.name;
                    let what = format!(
                        "received END of tensor {name:?} after {received} of {total} bytes"
                    );
                    Err(self.bad(what))
                }
            }
            _ => Err(self.bad("received END outside a tensor".into())),
        }
    }

    /// Adds a received message.
    pub(crate) fn message(&mut self, body: Vec<u8>) -> Result<(), Error> {
        let cost = self.receive_whole(body.len() as u64)?;
        if self.refused {
            self.credit.consume(cost);
            return Ok(());
        }
        if self.is_within_tensor() {
            return Err(self.bad(format!("received MESSAGE inside tensor {:?}", self.current().0)));
        }
        self.stats.messages += 1;
        self.items.push_back(Item::Message(body.into()));
        Ok(())
    }

    /// Returns whether the last item is an incomplete tensor.
    pub(crate) fn is_within_tensor(&self) -> bool {
        matches!(self.items.back(), Some(Item::Tensor(last)) if !last.complete)
    }

    /// Returns whether the first item is an incomplete tensor with memory. Only the peer can then
    /// continue the transfer.
    pub(crate) fn awaits_data(&self) -> bool {
        let awaits = |tensor: &IncomingTensor<S>| !tensor.complete && tensor.sink.is_some();
        matches!(self.items.front(), Some(Item::Tensor(first)) if awaits(first))
    }

    /// Ends the stream after FINISH.
    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        if self.is_within_tensor() {
            return Err(self.bad(format!("received FINISH inside tensor {:?}", self.current().0)));
        }
        self.ended = true;
        self.items.push_back(Item::Finished);
        Ok(())
    }

    /// Ends the stream after the peer's CANCEL, and drops an incomplete tensor.
    pub(crate) fn cancelled(&mut self, reason: String) {
        if self.is_within_tensor()
            && let Some(Item::Tensor(tensor)) = self.items.pop_back()
        {
            self.cancelled_sink = tensor.sink;
        }
        self.ended = true;
        self.items.push_back(Item::Cancelled(reason));
    }

    pub(crate) fn stats(&self) -> StreamStats {
        self.stats
    }

    /// Returns whether the peer finished or cancelled the stream.
    pub(crate) fn is_ended(&self) -> bool {
        self.ended
    }

    /// Returns whether this end cancelled the stream.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused
    }

    /// Cancels the stream at this end. Returns whether the peer has already ended the stream, so
    /// that the stream can be removed.
    pub(crate) fn refuse(&mut self) -> bool {
        self.refused = true;
        self.items.clear();
        self.ended
    }

    /// Provides the memory of the tensor whose `Metadata` event was delivered. Returns how many
    /// bytes were copied to the memory.
    pub(crate) fn accept(&mut self, mut sink: S) -> Result<u64, Error> {
        let Some(Item::Tensor(tensor)) = self.items.front_mut() else {
            return Err(no_tensor(self.id));
        };
        let (expected, len) = (tensor.meta.info.storage_len, sink.byte_len());
        if tensor.delivered.is_none() || tensor.sink.is_some() || len != expected {
            let name = &tensor.meta.info.name;
            return Err(Error::Misuse(match (tensor.delivered, &tensor.sink) {
                (None, _) => format!(
                    "cannot accept tensor {name:?}: its `Metadata` event was not delivered yet"
                ),
                (_, Some(_)) => format!("cannot accept tensor {name:?}: it already has memory"),
                _ => format!(
                    "wrong length of the memory for tensor {name:?} (expected {expected} bytes, \
                     got {len})"
                ),
            }));
        }
        let staged = &tensor.staged;
        let mut at = 0;
        let received = tensor.received as usize;
        while at < received {
            let space = sink.space(at as u64, received - at)?;
            let len = space.len();
            space.copy_from_slice(&staged[at..at + len]);
            sink.filled(at as u64, len)?;
            at += len;
        }
        (tensor.sink, tensor.staged) = (Some(sink), Vec::new());
        self.credit.consume(received as u64);
        Ok(received as u64)
    }

    /// Returns the next event, and whether it is the last of the stream.
    pub(crate) fn next_event(&mut self) -> Option<(Event<S>, bool)> {
        let stream = self.id;
        match self.items.front_mut()? {
            Item::Tensor(tensor) => {
                let IncomingTensor { meta, meta_cost, sink, received, delivered, complete, .. } =
                    &mut **tensor;
                let Some(delivered) = delivered else {
                    *delivered = Some(0);
                    self.credit.consume(*meta_cost);
                    let (info, known, kept) = (meta.info.clone(), meta.known, meta.kept);
                    return Some((Event::Metadata { stream, info, known, kept }, false));
                };
                let size = *received - *delivered;
                if sink.is_some() && size > 0 {
                    let offset = std::mem::replace(delivered, *received);
                    return Some((Event::Data { stream, offset, size }, false));
                }
                let needs_none = meta.known || meta.info.storage_len == 0;
                if !*complete || (sink.is_none() && !needs_none) {
                    return None;
                }
            }
            Item::Message(_) | Item::Cancelled(_) | Item::Finished => {}
        }
        let event = match self.items.pop_front()? {
            Item::Tensor(tensor) => {
                let IncomingTensor { meta, sink, .. } = *tensor;
                Event::End { stream, info: Box::new(meta.info), sink }
            }
            Item::Message(bytes) => {
                self.credit.consume((bytes.len() + HEADER_LEN) as u64);
                Event::Message { stream, bytes }
            }
            Item::Cancelled(reason) => {
                Event::Cancelled { stream, reason, sink: self.cancelled_sink.take() }
            }
            Item::Finished => Event::Finished { stream },
        };
        let last = self.ended && self.items.is_empty();
        Some((event, last))
    }

    /// Returns a new credit limit for the peer, if the increase is worth a frame.
    pub(crate) fn renew_credit(&mut self) -> Option<u64> {
        if self.ended {
            return None;
        }
        // A payload that has memory does not use the window, so all of it may be sent.
        let ahead = match self.items.front() {
            Some(Item::Tensor(tensor)) if tensor.sink.is_some() && self.items.len() == 1 => {
                tensor.meta.info.storage_len - tensor.received
            }
            _ => 0,
        };
        self.credit.renew(ahead)
    }

    /// Returns how many bytes of memory are used for received data that the user has not taken.
    pub(crate) fn staged_bytes(&self) -> usize {
        let of = |item: &Item<S>| match item {
            Item::Tensor(tensor) => tensor.staged.capacity() + tensor.meta_cost as usize,
            Item::Message(bytes) => bytes.len() + HEADER_LEN,
            Item::Cancelled(reason) => reason.len(),
            Item::Finished => 0,
        };
        self.items.iter().map(of).sum()
    }

    /// Returns the memory that no event has returned yet.
    pub(crate) fn into_sinks(self) -> impl Iterator<Item = S> {
        let of = |item| match item {
            Item::Tensor(tensor) => tensor.sink,
            Item::Message(_) | Item::Cancelled(_) | Item::Finished => None,
        };
        self.items.into_iter().filter_map(of).chain(self.cancelled_sink)
    }

    /// Returns the current tensor: the one between its `Metadata` event and its `End` event.
    pub(crate) fn announced(&self) -> Option<&TensorInfo> {
        match self.items.front() {
            Some(Item::Tensor(tensor)) if tensor.delivered.is_some() => Some(&tensor.meta.info),
            _ => None,
        }
    }

    /// Subtracts the cost of a META or MESSAGE from the credit, and returns the cost in bytes. The
    /// header counts too, because even an empty message takes memory.
    fn receive_whole(&mut self, bytes: u64) -> Result<u64, Error> {
        let cost = bytes + HEADER_LEN as u64;
        self.receive(cost, true).map(|()| cost)
    }

    fn receive(&mut self, bytes: u64, whole: bool) -> Result<(), Error> {
        if self.credit.receive(bytes, whole) {
            Ok(())
        } else {
            Err(self.bad(format!("received {bytes} bytes, which exceed the granted credit")))
        }
    }

    fn bad(&self, what: String) -> Error {
        Error::Protocol { stream: self.id, what }
    }
}

/// Returns the error for memory that was provided although no tensor waits for it.
pub(crate) fn no_tensor(stream: u32) -> Error {
    Error::Misuse(format!(
        "cannot provide memory on stream {stream}: no tensor of the stream waits for memory"
    ))
}
