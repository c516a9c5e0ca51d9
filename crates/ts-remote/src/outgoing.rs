// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sending end of a stream.

use std::collections::VecDeque;

use bytes::Bytes;
use ts_format::{Codec, Dtype, Encoder};
use twox_hash::XxHash3_64;

use crate::frame::{
    CHECKED, ENCODED, ENCODED_PREFIX_LEN, HEADER_LEN, Header, Kind, MAX_PIECE_LEN, SHARED,
};
use crate::info::{Meta, TensorInfo};
use crate::ring::{MIN_PAYLOAD, RingWriter};
use crate::{Error, SendOptions, StreamStats};

/// Something that is queued on a stream.
#[derive(Debug)]
enum Item {
    Meta {
        body: Vec<u8>,
    },
    Payload {
        payload: Bytes,
        at: usize,
        dtype: Dtype,
        encoder: Option<Box<Encoder>>,
        checksums: bool,
    },
    End,
    Message(Bytes),
    Finish,
}

impl Item {
    /// Returns how many bytes of the payload are left to send, or `None` if this is not a payload
    /// that may go through shared memory.
    fn shareable_len(&self) -> Option<usize> {
        match self {
            Self::Payload { payload, at, encoder: None, .. } if payload.len() >= MIN_PAYLOAD => {
                Some(payload.len() - at)
            }
            _ => None,
        }
    }
}

/// The sending end of a stream.
#[derive(Debug)]
pub(crate) struct Outgoing {
    id: u32,
    items: VecDeque<Item>,
    /// The credit limit: how many bytes may have been sent since the stream began.
    limit: u64,
    sent: u64,
    stats: StreamStats,
    paused: bool,
}

/// A frame to be written: `head`, then `payload`, which is not copied, then `tail`.
pub(crate) struct OutFrame {
    pub(crate) head: Vec<u8>,
    pub(crate) payload: Bytes,
    pub(crate) tail: Vec<u8>,
    /// Whether a descriptor must be attached to the first byte of the frame.
    pub(crate) has_descriptor: bool,
    /// The length of the frame's piece in shared memory, in bytes. 0 if the frame has none.
    pub(crate) shared: usize,
}

impl std::fmt::Debug for OutFrame {
    /// Omits the bytes, which may contain the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OutFrame({} bytes)", self.len())
    }
}

impl OutFrame {
    pub(crate) fn control(kind: Kind, stream: u32, seq: u64, body: &[u8]) -> Self {
        let header = Header { kind, flags: 0, stream, seq, len: body.len() as u64 };
        Self::new([&header.encode()[..], body].concat(), Bytes::new(), Vec::new())
    }

    fn new(head: Vec<u8>, payload: Bytes, tail: Vec<u8>) -> Self {
        Self { head, payload, tail, has_descriptor: false, shared: 0 }
    }

    /// Returns whether the frame carries data of the user.
    pub(crate) fn is_user_data(&self) -> bool {
        [Kind::Meta, Kind::Data, Kind::End, Kind::Message]
            .iter()
            .any(|&kind| kind as u8 == self.head[0])
    }

    /// Returns whether the frame is PING or PONG.
    pub(crate) fn is_ping_or_pong(&self) -> bool {
        [Kind::Ping as u8, Kind::Pong as u8].contains(&self.head[0])
    }

    pub(crate) fn len(&self) -> usize {
        self.head.len() + self.payload.len() + self.tail.len()
    }
}

/// The longest message that is copied into one buffer with its header, in bytes. Longer messages
/// are not copied.
const SHORT_MESSAGE: usize = 4 << 10;

impl Outgoing {
    pub(crate) fn new(id: u32, window: u64) -> Self {
        Self {
            id,
            items: VecDeque::new(),
            limit: window,
            sent: 0,
            stats: StreamStats::default(),
            paused: false,
        }
    }

    /// Queues a tensor. If `payload` is `None`, the peer already has the tensor's storage.
    pub(crate) fn push_tensor(
        &mut self,
        info: TensorInfo,
        payload: Option<Bytes>,
        options: SendOptions,
    ) -> Result<(), Error> {
        let unsendable = |reason: String| Error::Unsendable { tensor: info.name.clone(), reason };
        if payload.as_ref().is_some_and(|payload| payload.len() as u64 != info.storage_len) {
            let len = payload.map_or(0, |payload| payload.len());
            return Err(unsendable(format!(
                "its storage has {} bytes, but the payload has {len} bytes",
                info.storage_len
            )));
        }
        let dtype = info.meta.dtype;
        let codec = options.compression.codec(dtype);
        let encoder = match codec {
            None => None,
            Some(codec) => {
                let encoder =
                    Encoder::new(codec, options.compression.level(codec)).map_err(unsendable)?;
                Some(Box::new(encoder))
            }
        };
        let codec = codec.unwrap_or(Codec::Raw);
        let meta = Meta { info, codec, kept: options.keep, known: payload.is_none() };
        let body = meta.encode()?;
        self.items.push_back(Item::Meta { body });
        self.stats.tensors += 1;
        self.stats.expected_bytes += payload.as_ref().map_or(0, |payload| payload.len() as u64);
        if let Some(payload) = payload.filter(|payload| !payload.is_empty()) {
            let checksums = options.checksums;
            self.items.push_back(Item::Payload { payload, at: 0, dtype, encoder, checksums });
        }
        self.items.push_back(Item::End);
        Ok(())
    }

    pub(crate) fn push_message(&mut self, message: Bytes) {
        self.stats.messages += 1;
        self.items.push_back(Item::Message(message));
    }

    pub(crate) fn finish(&mut self) {
        self.items.push_back(Item::Finish);
    }

    /// Returns whether the stream ends after the items that are queued.
    pub(crate) fn is_finishing(&self) -> bool {
        matches!(self.items.back(), Some(Item::Finish))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(crate) fn unsent_bytes(&self) -> usize {
        let of = |item: &Item| match item {
            Item::Payload { payload, at, .. } => payload.len() - at,
            Item::Message(message) => message.len(),
            Item::Meta { body } => body.len(),
            Item::End | Item::Finish => 0,
        };
        self.items.iter().map(of).sum()
    }

    /// Returns whether the next item is a message, which may overtake payloads.
    pub(crate) fn is_urgent(&self) -> bool {
        matches!(self.items.front(), Some(Item::Message(_)))
    }

    pub(crate) fn stats(&self) -> StreamStats {
        self.stats
    }

    /// Counts a pause if the stream has something to send but no credit. The connection calls this
    /// when no frame is ready to be queued.
    pub(crate) fn note_pause(&mut self) {
        let paused = self.sent >= self.limit
            && !matches!(self.items.front(), None | Some(Item::End | Item::Finish));
        self.stats.pauses += u64::from(paused && !self.paused);
        self.paused = paused;
    }

    /// Raises the credit limit to `limit`. Ignores a lower limit.
    pub(crate) fn set_limit(&mut self, limit: u64) {
        self.limit = self.limit.max(limit);
    }

    /// Returns whether a queued payload may go through shared memory.
    #[cfg(unix)]
    pub(crate) fn has_shareable(&self) -> bool {
        self.items.iter().any(|item| item.shareable_len().is_some())
    }

    /// Returns how many bytes of the next item are left to send, if the item may go through shared
    /// memory. Otherwise, returns `None`.
    fn shareable_len(&self) -> Option<usize> {
        self.items.front().and_then(Item::shareable_len)
    }

    /// Returns whether the available credit would split the next piece of a payload, which has at
    /// most `max_piece` bytes.
    pub(crate) fn is_split_by_credit(&self, max_piece: usize) -> bool {
        let credit = self.limit.saturating_sub(self.sent);
        let mut needed = 0;
        for item in &self.items {
            match item {
                Item::Meta { body } => needed += (body.len() + HEADER_LEN) as u64,
                Item::Payload { payload, at, .. } => {
                    needed += (payload.len() - at).min(max_piece) as u64;
                    return 0 < credit && credit < needed;
                }
                Item::End => {}
                Item::Message(_) | Item::Finish => return false,
            }
        }
        false
    }

    /// Returns whether the next item has the credit, and the space in `ring`, that it needs.
    pub(crate) fn is_ready(&self, ring: Option<&RingWriter>) -> bool {
        match self.items.front() {
            None => false,
            Some(Item::End | Item::Finish) => true,
            Some(Item::Meta { .. } | Item::Message(_)) => self.sent < self.limit,
            Some(Item::Payload { .. }) => {
                let fits = ring
                    .zip(self.shareable_len())
                    .is_none_or(|(ring, left)| ring.next_len(left) > 0);
                self.sent < self.limit && fits
            }
        }
    }

    /// Returns the next frame, with a piece of at most `max_piece` bytes, and whether the frame is
    /// the last of the stream. Writes pieces of large payloads to `ring`, if there is one.
    pub(crate) fn next_frame(
        &mut self,
        max_piece: usize,
        ring: Option<&mut RingWriter>,
    ) -> Option<(OutFrame, bool)> {
        if !self.is_ready(ring.as_deref()) {
            return None;
        }
        let (id, position) = (self.id, self.sent);
        let ring = ring.filter(|_| self.shareable_len().is_some());
        let credit = usize::try_from(self.limit - position.min(self.limit)).unwrap_or(usize::MAX);
        let frame = match self.items.front_mut()? {
            Item::Meta { body } => {
                self.sent += (body.len() + HEADER_LEN) as u64;
                OutFrame::control(Kind::Meta, id, 0, body)
            }
            Item::End => OutFrame::control(Kind::End, id, 0, &[]),
            Item::Finish => OutFrame::control(Kind::Finish, id, 0, &[]),
            Item::Message(message) => {
                self.sent += (message.len() + HEADER_LEN) as u64;
                message_frame(id, message)
            }
            Item::Payload { payload, at, dtype, encoder, checksums } => {
                let left = payload.len() - *at;
                let is_long = ring.is_none() && encoder.is_none();
                let max_piece = if is_long { max_piece } else { max_piece.min(MAX_PIECE_LEN) };
                let space = ring.as_ref().map_or(usize::MAX, |ring| ring.next_len(left));
                let len = left.min(max_piece).min(credit).min(space);
                let piece = payload.slice(*at..*at + len);
                let frame = match ring {
                    Some(ring) => shared_frame(id, *at, &piece, ring, *checksums),
                    None => data_frame(
                        id,
                        *at,
                        piece.clone(),
                        *dtype,
                        encoder.as_deref_mut(),
                        *checksums,
                    ),
                };
                *at += piece.len();
                self.sent += piece.len() as u64;
                self.stats.payload_bytes += piece.len() as u64;
                if *at < payload.len() {
                    return Some((frame, false));
                }
                frame
            }
        };
        let done = self.items.pop_front();
        Some((frame, matches!(done, Some(Item::Finish))))
    }
}

fn message_frame(id: u32, message: &Bytes) -> OutFrame {
    if message.len() <= SHORT_MESSAGE {
        return OutFrame::control(Kind::Message, id, 0, message);
    }
    let header =
        Header { kind: Kind::Message, flags: 0, stream: id, seq: 0, len: message.len() as u64 };
    OutFrame::new(header.encode().to_vec(), message.clone(), Vec::new())
}

/// Writes a piece of a payload to shared memory. Returns the frame that announces the piece.
fn shared_frame(
    id: u32,
    at: usize,
    piece: &[u8],
    ring: &mut RingWriter,
    checksums: bool,
) -> OutFrame {
    ring.write(piece);
    let flags = if checksums { SHARED | CHECKED } else { SHARED };
    let mut body = (piece.len() as u64).to_le_bytes().to_vec();
    if checksums {
        body.extend_from_slice(&XxHash3_64::oneshot(piece).to_le_bytes());
    }
    let header =
        Header { kind: Kind::Data, flags, stream: id, seq: at as u64, len: body.len() as u64 };
    let frame = OutFrame::new([&header.encode()[..], &body].concat(), Bytes::new(), Vec::new());
    OutFrame { shared: piece.len(), ..frame }
}

/// Returns the frame for a piece of a payload, encoded if that makes it smaller.
fn data_frame(
    id: u32,
    at: usize,
    piece: Bytes,
    dtype: Dtype,
    encoder: Option<&mut Encoder>,
    checksums: bool,
) -> OutFrame {
    let encoded = encoder.and_then(|encoder| encode(encoder, dtype, &piece));
    let (payload, flags, prefix) = match encoded {
        Some((bytes, prefix)) => (Bytes::from(bytes), ENCODED, prefix.to_vec()),
        None => (piece, 0, Vec::new()),
    };
    let tail = if checksums { sum(&prefix, &payload).to_le_bytes().to_vec() } else { Vec::new() };
    let flags = if checksums { flags | CHECKED } else { flags };
    let len = (prefix.len() + payload.len() + tail.len()) as u64;
    let header = Header { kind: Kind::Data, flags, stream: id, seq: at as u64, len };
    let mut head = Vec::with_capacity(HEADER_LEN + prefix.len());
    head.extend_from_slice(&header.encode());
    head.extend_from_slice(&prefix);
    OutFrame::new(head, payload, tail)
}

/// Encodes a piece. Returns the encoded bytes and their prefix. Returns `None` if these would not
/// be shorter than the piece, or if the piece does not consist of whole elements.
fn encode(
    encoder: &mut Encoder,
    dtype: Dtype,
    piece: &[u8],
) -> Option<(Vec<u8>, [u8; ENCODED_PREFIX_LEN])> {
    let width = dtype.bits() as usize / 8;
    if width == 0 || !piece.len().is_multiple_of(width) {
        return None;
    }
    let mut bytes = Vec::new();
    let encoded = encoder.encode(dtype, piece, &mut bytes);
    if encoded.codec == Codec::Raw || encoded.len + ENCODED_PREFIX_LEN >= piece.len() {
        return None;
    }
    let mut prefix = [0; ENCODED_PREFIX_LEN];
    prefix[..4].copy_from_slice(&(piece.len() as u32).to_le_bytes());
    prefix[4] = encoded.width;
    Some((bytes, prefix))
}

/// Returns the XXH3 hash of the prefix followed by the payload.
fn sum(prefix: &[u8], payload: &[u8]) -> u64 {
    if prefix.is_empty() {
        return XxHash3_64::oneshot(payload);
    }
    let mut hasher = XxHash3_64::with_seed(0);
    std::hash::Hasher::write(&mut hasher, prefix);
    std::hash::Hasher::write(&mut hasher, payload);
    std::hash::Hasher::finish(&hasher)
}
