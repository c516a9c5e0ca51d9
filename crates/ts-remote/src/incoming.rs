// SPDX-License-Identifier: MIT OR Apache-2.0
//! A stream, as the end that receives it knows it.

use std::collections::{HashMap, VecDeque};
use std::hash::Hasher;

use bytes::Bytes;
use ts_format::{Scratch, decode_chunk};
use twox_hash::XxHash3_64;

use crate::credit::Granted;
use crate::frame::{HEADER_LEN, MAX_PIECE_LEN};
use crate::info::{Announcement, TensorInfo};
use crate::outgoing::ENCODED_HEAD;
use crate::ring::RingIn;
use crate::{Error, Event, Sink, StreamStats};

/// The most storages of a stream that later tensors may name.
const MAX_KEPT: usize = 1 << 16;
/// From here on a tensor is longer than a core's own cache, in bytes.
const UNCACHED: u64 = 4 << 20;

#[derive(Debug)]
pub(crate) struct Incoming<S> {
    id: u32,
    granted: Granted,
    /// In their order; of what is behind the first the user has not heard.
    items: VecDeque<Item<S>>,
    /// Storages that later tensors may name, and their lengths.
    kept: HashMap<u64, u64>,
    /// This end wants no more of it: what still comes is dropped.
    unwanted: bool,
    /// The other end has said that it is over.
    over: bool,
    /// Memory of a tensor that the other end gave up.
    spared: Option<S>,
    stats: StreamStats,
}

#[derive(Debug)]
enum Item<S> {
    Tensor(Box<Arriving<S>>),
    Message(Bytes),
    Cancelled(String),
    Finished,
}

#[derive(Debug)]
struct Arriving<S> {
    said: Announcement,
    /// Length of its META.
    cost: u64,
    sink: Option<S>,
    /// What came before there was a sink.
    staged: Vec<u8>,
    received: u64,
    /// What the user was told of.
    told: Option<u64>,
    ended: bool,
}

impl<S: Sink> Incoming<S> {
    pub(crate) fn new(id: u32, window: u64) -> Self {
        Self {
            id,
            granted: Granted::new(window),
            items: VecDeque::new(),
            kept: HashMap::new(),
            unwanted: false,
            over: false,
            spared: None,
            stats: StreamStats::default(),
        }
    }

    pub(crate) fn begin(&mut self, body: &[u8]) -> Result<(), Error> {
        let cost = self.receive_whole(body.len() as u64)?;
        if self.unwanted {
            return Ok(());
        }
        if let Some(Item::Tensor(last)) = self.items.back()
            && !last.ended
        {
            return Err(self.bad(format!("a tensor within tensor `{}`", last.said.info.name)));
        }
        let said = Announcement::decode(body, self.id)?;
        let Announcement { info, kept, known, .. } = &said;
        let (id, len) = (info.storage_id, info.storage_len);
        if *known && self.kept.get(&id) != Some(&len) {
            return Err(
                self.bad(format!("tensor `{}` of storage {id}, which it has not sent", info.name))
            );
        }
        if *kept {
            self.kept.insert(id, len);
            if self.kept.len() > MAX_KEPT {
                return Err(self.bad(format!("more than {MAX_KEPT} storages to be kept")));
            }
        } else {
            self.kept.remove(&id);
        }
        self.stats.tensors += 1;
        self.stats.expected_bytes += if *known { 0 } else { len };
        let arriving = Arriving {
            said,
            cost,
            sink: None,
            staged: Vec::new(),
            received: 0,
            told: None,
            ended: false,
        };
        self.items.push_back(Item::Tensor(Box::new(arriving)));
        Ok(())
    }

    /// A DATA frame begins, of `len` bytes of payload at `at` if they are not encoded.
    pub(crate) fn begin_data(&mut self, at: u64, len: Option<u64>) -> Result<(), Error> {
        if self.unwanted {
            return len.map_or(Ok(()), |len| self.receive(len, false));
        }
        let known = |tensor: &Arriving<S>| tensor.said.known;
        match self.items.back() {
            Some(Item::Tensor(tensor)) if !tensor.ended && !known(tensor) => {
                let (received, whole) = (tensor.received, tensor.said.info.storage_len);
                if at != received || len.is_some_and(|len| len == 0 || len > whole - received) {
                    let name = &tensor.said.info.name;
                    let what = format!(
                        "bytes {at}.. ({len:?}) of tensor `{name}`, of which {received} of {whole} \
                         have come"
                    );
                    return Err(self.bad(what));
                }
            }
            _ => return Err(self.bad("a payload of no tensor".into())),
        }
        len.map_or(Ok(()), |len| self.receive(len, false))
    }

    /// Whether the user has not been told of the tensor that arrives, and could not give it memory
    /// yet.
    pub(crate) fn is_untold(&self) -> bool {
        matches!(self.items.back(), Some(Item::Tensor(last)) if last.told.is_none())
    }

    /// Whether nothing of the tensor is left behind so many bytes more.
    pub(crate) fn is_last(&self, len: u64) -> bool {
        let ends = |tensor: &Arriving<S>| tensor.received + len == tensor.said.info.storage_len;
        matches!(self.items.back(), Some(Item::Tensor(last)) if ends(last))
    }

    /// Memory for the next bytes of a payload that is not encoded; at most `len`, and fewer
    /// perhaps. `None` where they are unwanted.
    pub(crate) fn space(&mut self, len: usize) -> Result<Option<&mut [u8]>, Error> {
        if self.unwanted {
            return Ok(None);
        }
        let Some(Item::Tensor(tensor)) = self.items.back_mut() else {
            unreachable!("its DATA was begun")
        };
        let Arriving { sink, staged, received, .. } = &mut **tensor;
        match sink {
            Some(sink) => sink.space(*received, len).map(Some),
            None => {
                let at = *received as usize;
                // No more than the window, whatever the tensor's length.
                staged.reserve_exact((at + len).saturating_sub(staged.len()));
                staged.resize(at + len, 0);
                Ok(Some(&mut staged[at..]))
            }
        }
    }

    /// So many bytes are in what [`space`](Self::space) gave last.
    pub(crate) fn filled(&mut self, len: usize) -> Result<(), Error> {
        if self.unwanted {
            self.granted.consume(len as u64);
            return Ok(());
        }
        let Some(Item::Tensor(tensor)) = self.items.back_mut() else {
            unreachable!("its DATA was begun")
        };
        self.stats.payload_bytes += len as u64;
        let at = tensor.received;
        tensor.received += len as u64;
        if let Some(sink) = &mut tensor.sink {
            sink.filled(at, len)?;
            self.granted.consume(len as u64);
        }
        Ok(())
    }

    /// A piece of a payload that is in shared memory, whose DATA was begun. Its checksum, if that
    /// is wanted.
    pub(crate) fn take_shared(
        &mut self,
        len: usize,
        ring: &mut RingIn,
        sum: bool,
    ) -> Result<Option<u64>, Error> {
        let mut hasher = (sum && !self.unwanted).then(|| XxHash3_64::with_seed(0));
        // What is read again at once is not to be fetched from memory.
        let non_temporal = !sum
            && matches!(
                self.items.back(),
                Some(Item::Tensor(last)) if last.said.info.storage_len >= UNCACHED
            );
        let mut left = len;
        while left > 0 {
            let part = match self.space(left)? {
                Some(space) => {
                    ring.take(space, non_temporal);
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

    /// A piece that was encoded, whole.
    pub(crate) fn decode(&mut self, body: &[u8], scratch: &mut Scratch) -> Result<(), Error> {
        let cut = || self.bad("an encoded piece that is cut off".into());
        let (head, encoded) = body.split_first_chunk::<ENCODED_HEAD>().ok_or_else(cut)?;
        let [a, b, c, d, width, ..] = *head;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if len == 0 || len > MAX_PIECE_LEN {
            return Err(self.bad(format!("a piece of {len} bytes, of at most {MAX_PIECE_LEN}")));
        }
        self.receive(len as u64, false)?;
        if self.unwanted {
            self.granted.consume(len as u64);
            return Ok(());
        }
        let Some(Item::Tensor(tensor)) = self.items.back() else {
            unreachable!("its DATA was begun")
        };
        let (codec, info) = (tensor.said.codec, &tensor.said.info);
        let (at, whole) = (tensor.received, info.storage_len);
        if len as u64 > whole - at {
            return Err(self.bad(format!("{len} bytes at {at} of a payload of {whole}")));
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
            let space = self.space(rest.len())?.expect("it is wanted");
            let there = space.len();
            space.copy_from_slice(&rest[..there]);
            self.filled(there)?;
            rest = &rest[there..];
        }
        Ok(())
    }

    /// The name of the tensor that arrives, and how much of it has.
    pub(crate) fn arriving(&self) -> (String, u64) {
        match self.items.back() {
            Some(Item::Tensor(tensor)) => (tensor.said.info.name.clone(), tensor.received),
            _ => (String::new(), 0),
        }
    }

    pub(crate) fn end(&mut self) -> Result<(), Error> {
        if self.unwanted {
            return Ok(());
        }
        match self.items.back_mut() {
            Some(Item::Tensor(tensor)) if !tensor.ended => {
                let Arriving { said, received, ended, .. } = &mut **tensor;
                let whole = if said.known { 0 } else { said.info.storage_len };
                *ended = *received == whole;
                if *ended {
                    Ok(())
                } else {
                    let what = format!(
                        "tensor `{}` ends after {received} of {whole} bytes",
                        said.info.name
                    );
                    Err(self.bad(what))
                }
            }
            _ => Err(self.bad("the end of no tensor".into())),
        }
    }

    pub(crate) fn message(&mut self, body: Vec<u8>) -> Result<(), Error> {
        let cost = self.receive_whole(body.len() as u64)?;
        if self.unwanted {
            self.granted.consume(cost);
            return Ok(());
        }
        if self.is_within_tensor() {
            return Err(self.bad("a message within a tensor".into()));
        }
        self.stats.messages += 1;
        self.items.push_back(Item::Message(body.into()));
        Ok(())
    }

    /// Whether bytes of a tensor are still to come.
    pub(crate) fn is_within_tensor(&self) -> bool {
        matches!(self.items.back(), Some(Item::Tensor(last)) if !last.ended)
    }

    /// Whether bytes of a tensor are still to come that has its memory.
    pub(crate) fn is_awaited(&self) -> bool {
        let has_memory = |tensor: &Arriving<S>| !tensor.ended && tensor.sink.is_some();
        matches!(self.items.front(), Some(Item::Tensor(first)) if has_memory(first))
    }

    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        if self.is_within_tensor() {
            return Err(self.bad("its end within a tensor".into()));
        }
        self.over = true;
        self.items.push_back(Item::Finished);
        Ok(())
    }

    /// The other end gives up: what was not complete is gone.
    pub(crate) fn cancelled(&mut self, reason: String) {
        if self.is_within_tensor()
            && let Some(Item::Tensor(tensor)) = self.items.pop_back()
        {
            self.spared = tensor.sink;
        }
        self.over = true;
        self.items.push_back(Item::Cancelled(reason));
    }

    pub(crate) fn stats(&self) -> StreamStats {
        self.stats
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over
    }

    pub(crate) fn is_unwanted(&self) -> bool {
        self.unwanted
    }

    /// This end gives up. Whether nothing more is to come, and the stream can be forgotten.
    pub(crate) fn refuse(&mut self) -> bool {
        self.unwanted = true;
        self.items.clear();
        self.over
    }

    /// Gives the tensor that was announced its memory.
    pub(crate) fn accept(&mut self, mut sink: S) -> Result<u64, Error> {
        let Some(Item::Tensor(tensor)) = self.items.front_mut() else {
            return Err(Error::Misuse(format!("stream {} has announced no tensor", self.id)));
        };
        let (len, room) = (tensor.said.info.storage_len, sink.byte_len());
        if tensor.told.is_none() || tensor.sink.is_some() || room != len {
            let name = &tensor.said.info.name;
            return Err(Error::Misuse(match tensor.sink {
                Some(_) => format!("tensor `{name}` has its memory already"),
                None => format!("memory of {room} bytes for tensor `{name}`, which has {len}"),
            }));
        }
        let staged = &tensor.staged;
        let mut at = 0;
        let there = tensor.received as usize;
        while at < there {
            let space = sink.space(at as u64, there - at)?;
            let len = space.len();
            space.copy_from_slice(&staged[at..at + len]);
            sink.filled(at as u64, len)?;
            at += len;
        }
        (tensor.sink, tensor.staged) = (Some(sink), Vec::new());
        self.granted.consume(there as u64);
        Ok(there as u64)
    }

    /// What the user is to hear next. Whether the stream is over with it.
    pub(crate) fn next_event(&mut self) -> Option<(Event<S>, bool)> {
        let stream = self.id;
        match self.items.front_mut()? {
            Item::Tensor(tensor) => {
                let Arriving { said, cost, sink, received, told, ended, .. } = &mut **tensor;
                let Some(told) = told else {
                    *told = Some(0);
                    self.granted.consume(*cost);
                    let (info, known, kept) = (said.info.clone(), said.known, said.kept);
                    return Some((Event::Metadata { stream, info, known, kept }, false));
                };
                let bytes = *received - *told;
                if sink.is_some() && bytes > 0 {
                    let offset = std::mem::replace(told, *received);
                    return Some((Event::Data { stream, offset, bytes }, false));
                }
                let needs_none = said.known || said.info.storage_len == 0;
                if !*ended || (sink.is_none() && !needs_none) {
                    return None;
                }
            }
            Item::Message(_) | Item::Cancelled(_) | Item::Finished => {}
        }
        let event = match self.items.pop_front()? {
            Item::Tensor(tensor) => {
                let Arriving { said, sink, .. } = *tensor;
                Event::End { stream, info: Box::new(said.info), sink }
            }
            Item::Message(bytes) => {
                self.granted.consume((bytes.len() + HEADER_LEN) as u64);
                Event::Message { stream, bytes }
            }
            Item::Cancelled(reason) => {
                Event::Cancelled { stream, reason, sink: self.spared.take() }
            }
            Item::Finished => Event::Finished { stream },
        };
        let over = self.over && self.items.is_empty();
        Some((event, over))
    }

    /// A new limit for the other end, if that is worth a frame.
    pub(crate) fn renew(&mut self) -> Option<u64> {
        if self.over {
            return None;
        }
        // What has its place needs no window: it may all come.
        let ahead = match self.items.front() {
            Some(Item::Tensor(tensor)) if tensor.sink.is_some() && self.items.len() == 1 => {
                tensor.said.info.storage_len - tensor.received
            }
            _ => 0,
        };
        self.granted.renew(ahead)
    }

    /// Memory that waits for the user, in bytes.
    pub(crate) fn staged_bytes(&self) -> usize {
        let of = |item: &Item<S>| match item {
            Item::Tensor(tensor) => tensor.staged.capacity() + tensor.cost as usize,
            Item::Message(bytes) => bytes.len() + HEADER_LEN,
            Item::Cancelled(reason) => reason.len(),
            Item::Finished => 0,
        };
        self.items.iter().map(of).sum()
    }

    pub(crate) fn into_sinks(self) -> impl Iterator<Item = S> {
        let of = |item| match item {
            Item::Tensor(tensor) => tensor.sink,
            Item::Message(_) | Item::Cancelled(_) | Item::Finished => None,
        };
        self.items.into_iter().filter_map(of).chain(self.spared)
    }

    /// What the user knows of the tensor that it is to give memory to.
    pub(crate) fn announced(&self) -> Option<&TensorInfo> {
        match self.items.front() {
            Some(Item::Tensor(tensor)) if tensor.told.is_some() => Some(&tensor.said.info),
            _ => None,
        }
    }

    /// What is never cut takes memory beside its bytes: its header counts too.
    fn receive_whole(&mut self, bytes: u64) -> Result<u64, Error> {
        let cost = bytes + HEADER_LEN as u64;
        self.receive(cost, true).map(|()| cost)
    }

    fn receive(&mut self, bytes: u64, whole: bool) -> Result<(), Error> {
        if self.granted.receive(bytes, whole) {
            Ok(())
        } else {
            Err(self.bad(format!("{bytes} bytes more than it was granted")))
        }
    }

    fn bad(&self, what: String) -> Error {
        Error::Protocol { stream: self.id, what }
    }
}
