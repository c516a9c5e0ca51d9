// SPDX-License-Identifier: MIT OR Apache-2.0
//! A stream, as the end that sends it knows it.

use std::collections::VecDeque;

use bytes::Bytes;
use ts_format::{Codec, Compression, Dtype, Encoder};
use twox_hash::XxHash3_64;

use crate::frame::{CHECKED, ENCODED, HEADER_LEN, Header, Kind, SHARED};
use crate::info::{Announcement, TensorInfo};
use crate::ring::{MIN_PAYLOAD, RingOut};
use crate::{Error, StreamStats};

/// How a payload travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SendOptions {
    /// Whether its bytes are compressed, piece by piece.
    pub compression: Compression,
    /// Whether each frame of it has a checksum (XXH3, 64 bits), which the receiver compares. TCP's
    /// own are of 16 bits.
    pub checksums: bool,
    /// Tensors sent later on the same stream share this one's storage: see
    /// [`Connection::send_view`](crate::Connection::send_view).
    pub keep: bool,
}

/// What was given to a stream to send, and has not all gone.
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
    fn left_to_share(&self) -> Option<usize> {
        match self {
            Self::Payload { payload, at, encoder: None, .. } if payload.len() >= MIN_PAYLOAD => {
                Some(payload.len() - at)
            }
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Outgoing {
    id: u32,
    items: VecDeque<Item>,
    /// What the other end allows, in bytes since the stream began.
    limit: u64,
    sent: u64,
    stats: StreamStats,
    paused: bool,
}

/// A frame to be written: what it begins with, then bytes that lie elsewhere, then what it ends
/// with.
pub(crate) struct OutFrame {
    pub(crate) head: Vec<u8>,
    pub(crate) payload: Bytes,
    pub(crate) tail: Vec<u8>,
    /// A descriptor goes with its first byte.
    pub(crate) has_descriptor: bool,
    /// Bytes that went to shared memory.
    pub(crate) shared: usize,
}

impl std::fmt::Debug for OutFrame {
    /// Not what is in it: that may be a secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OutFrame({} bytes)", self.len())
    }
}

impl OutFrame {
    pub(crate) fn control(kind: Kind, stream: u32, seq: u64, body: &[u8]) -> Self {
        let header = Header { kind, flags: 0, stream, seq, len: body.len() as u64 };
        Self::of([&header.encode()[..], body].concat(), Bytes::new(), Vec::new())
    }

    fn of(head: Vec<u8>, payload: Bytes, tail: Vec<u8>) -> Self {
        Self { head, payload, tail, has_descriptor: false, shared: 0 }
    }

    /// Whether it has something that the user sent.
    pub(crate) fn is_of_user(&self) -> bool {
        [Kind::Meta, Kind::Data, Kind::End, Kind::Message]
            .iter()
            .any(|&kind| kind as u8 == self.head[0])
    }

    /// Whether it only says that this end is there.
    pub(crate) fn is_sign_of_life(&self) -> bool {
        [Kind::Ping as u8, Kind::Pong as u8].contains(&self.head[0])
    }

    pub(crate) fn len(&self) -> usize {
        self.head.len() + self.payload.len() + self.tail.len()
    }
}

/// A message so short is copied behind its header.
const SHORT: usize = 4 << 10;

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
                "its storage has {} bytes, and {len} are given",
                info.storage_len
            )));
        }
        let dtype = info.meta.dtype;
        let codec = options.compression.codec(dtype);
        let encoder = match codec {
            None => None,
            Some(codec) => {
                let encoder =
                    Encoder::new(codec, options.compression.level()).map_err(unsendable)?;
                Some(Box::new(encoder))
            }
        };
        let codec = codec.unwrap_or(Codec::Raw);
        let body =
            Announcement { info, codec, kept: options.keep, known: payload.is_none() }.encode()?;
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

    /// Whether what comes next is a message, which somebody waits for.
    pub(crate) fn is_urgent(&self) -> bool {
        matches!(self.items.front(), Some(Item::Message(_)))
    }

    pub(crate) fn stats(&self) -> StreamStats {
        self.stats
    }

    /// It is looked at while there is room on the wire: whether it has something to send and no
    /// credit is counted.
    pub(crate) fn note_pause(&mut self) {
        let paused = self.sent >= self.limit
            && !matches!(self.items.front(), None | Some(Item::End | Item::Finish));
        self.stats.pauses += u64::from(paused && !self.paused);
        self.paused = paused;
    }

    pub(crate) fn allow(&mut self, limit: u64) {
        self.limit = self.limit.max(limit);
    }

    /// Whether there is a payload that may go by shared memory.
    pub(crate) fn has_to_share(&self) -> bool {
        self.items.iter().any(|item| item.left_to_share().is_some())
    }

    /// What is left of a payload that is next, if that may go by shared memory.
    fn left_to_share(&self) -> Option<usize> {
        self.items.front().and_then(Item::left_to_share)
    }

    /// Whether there is credit for a part of the next payload's first frame, which has at most so
    /// many bytes.
    pub(crate) fn is_cut_short(&self, most: usize) -> bool {
        let credit = self.limit.saturating_sub(self.sent);
        let mut needed = 0;
        for item in &self.items {
            match item {
                Item::Meta { body } => needed += (body.len() + HEADER_LEN) as u64,
                Item::Payload { payload, at, .. } => {
                    needed += (payload.len() - at).min(most) as u64;
                    return 0 < credit && credit < needed;
                }
                Item::End => {}
                Item::Message(_) | Item::Finish => return false,
            }
        }
        false
    }

    /// Whether there is something that may go out.
    pub(crate) fn is_ready(&self, ring: Option<&RingOut>) -> bool {
        match self.items.front() {
            None => false,
            Some(Item::End | Item::Finish) => true,
            Some(Item::Meta { .. } | Item::Message(_)) => self.sent < self.limit,
            Some(Item::Payload { .. }) => {
                let fits =
                    ring.zip(self.left_to_share()).is_none_or(|(ring, left)| ring.room(left) > 0);
                self.sent < self.limit && fits
            }
        }
    }

    /// The next frame, with at most so many bytes of payload; those of large ones go to `ring`, if
    /// there is one. Whether the stream is over with it.
    pub(crate) fn next_frame(
        &mut self,
        most: usize,
        ring: Option<&mut RingOut>,
    ) -> Option<(OutFrame, bool)> {
        if !self.is_ready(ring.as_deref()) {
            return None;
        }
        let (id, position) = (self.id, self.sent);
        let ring = ring.filter(|_| self.left_to_share().is_some());
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
                let room = ring.as_ref().map_or(usize::MAX, |ring| ring.room(payload.len() - *at));
                let most = most.min(credit).min(room);
                let piece = payload.slice(*at..payload.len().min(at.saturating_add(most)));
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
    if message.len() <= SHORT {
        return OutFrame::control(Kind::Message, id, 0, message);
    }
    let header =
        Header { kind: Kind::Message, flags: 0, stream: id, seq: 0, len: message.len() as u64 };
    OutFrame::of(header.encode().to_vec(), message.clone(), Vec::new())
}

/// A piece of a payload that goes by shared memory.
fn shared_frame(id: u32, at: usize, piece: &[u8], ring: &mut RingOut, checksums: bool) -> OutFrame {
    ring.put(piece);
    let flags = if checksums { SHARED | CHECKED } else { SHARED };
    let mut body = (piece.len() as u64).to_le_bytes().to_vec();
    if checksums {
        body.extend_from_slice(&XxHash3_64::oneshot(piece).to_le_bytes());
    }
    let header =
        Header { kind: Kind::Data, flags, stream: id, seq: at as u64, len: body.len() as u64 };
    let frame = OutFrame::of([&header.encode()[..], &body].concat(), Bytes::new(), Vec::new());
    OutFrame { shared: piece.len(), ..frame }
}

/// A piece of a payload: as it is, or encoded where that makes it smaller.
fn data_frame(
    id: u32,
    at: usize,
    piece: Bytes,
    dtype: Dtype,
    encoder: Option<&mut Encoder>,
    checksums: bool,
) -> OutFrame {
    let encoded = encoder.and_then(|encoder| encode(encoder, dtype, &piece));
    let (payload, flags, before) = match encoded {
        Some((bytes, before)) => (Bytes::from(bytes), ENCODED, before.to_vec()),
        None => (piece, 0, Vec::new()),
    };
    let tail = if checksums { sum(&before, &payload).to_le_bytes().to_vec() } else { Vec::new() };
    let flags = if checksums { flags | CHECKED } else { flags };
    let len = (before.len() + payload.len() + tail.len()) as u64;
    let header = Header { kind: Kind::Data, flags, stream: id, seq: at as u64, len };
    let mut head = Vec::with_capacity(HEADER_LEN + before.len());
    head.extend_from_slice(&header.encode());
    head.extend_from_slice(&before);
    OutFrame::of(head, payload, tail)
}

/// What an encoded body begins with: the length of what it decodes to, and the codec's width.
pub(crate) const ENCODED_HEAD: usize = 8;

fn encode(
    encoder: &mut Encoder,
    dtype: Dtype,
    piece: &[u8],
) -> Option<(Vec<u8>, [u8; ENCODED_HEAD])> {
    let width = dtype.bits() as usize / 8;
    if width == 0 || !piece.len().is_multiple_of(width) {
        return None;
    }
    let mut bytes = Vec::new();
    let encoded = encoder.encode(dtype, piece, &mut bytes);
    if encoded.codec == Codec::Raw || encoded.len + ENCODED_HEAD >= piece.len() {
        return None;
    }
    let mut before = [0; ENCODED_HEAD];
    before[..4].copy_from_slice(&(piece.len() as u32).to_le_bytes());
    before[4] = encoded.width;
    Some((bytes, before))
}

fn sum(before: &[u8], payload: &[u8]) -> u64 {
    if before.is_empty() {
        return XxHash3_64::oneshot(payload);
    }
    let mut hasher = XxHash3_64::with_seed(0);
    std::hash::Hasher::write(&mut hasher, before);
    std::hash::Hasher::write(&mut hasher, payload);
    std::hash::Hasher::finish(&hasher)
}
