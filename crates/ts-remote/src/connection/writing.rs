// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a connection writes: which frame is next, and where its bytes are.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Bound;

use super::Connection;
use crate::Sink;
use crate::frame::{Kind, MAX_PIECE_LEN, PREFACE};
use crate::outgoing::{OutFrame, Outgoing};

/// How much is put together for the socket at a time, in bytes: what else is to be sent comes
/// behind it.
const LOOKAHEAD: usize = 2 << 20;
/// The longest piece while several streams have something to send.
const SHARED_PIECE: usize = 256 << 10;
/// So many messages go before a payload that waits.
const MAX_URGENT: u32 = 16;

/// What is to be written.
#[derive(Debug, Default)]
pub(super) struct Writer {
    /// Frames of the connection and of streams that go before payloads.
    control: VecDeque<OutFrame>,
    /// The ping that is to be answered.
    pong: Option<u64>,
    /// Frames in the order of the wire.
    queue: VecDeque<OutFrame>,
    /// Bytes of the first of these that are written.
    queue_offset: usize,
    queued_bytes: usize,
    /// The stream that was last served, and how many messages went before payloads since.
    last_served: u32,
    urgent_in_row: u32,
}

impl Writer {
    pub(super) fn say(&mut self, kind: Kind, stream: u32, seq: u64, body: &[u8]) {
        self.push(OutFrame::control(kind, stream, seq, body));
    }

    pub(super) fn push(&mut self, frame: OutFrame) {
        self.control.push_back(frame);
    }

    pub(super) fn push_first(&mut self, frame: OutFrame) {
        self.control.push_front(frame);
    }

    /// One answer is enough for all pings that wait for one, however many they are.
    pub(super) fn answer(&mut self, ping: u64) {
        self.pong = Some(ping);
    }

    /// How many frames wait that are made as an answer to the other end's.
    pub(super) fn answers(&self) -> usize {
        self.control.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.control.is_empty() && self.pong.is_none()
    }

    pub(super) fn is_queue_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Whether something of the user's waits here.
    pub(super) fn owes(&self) -> bool {
        self.queue.iter().any(OutFrame::is_of_user)
    }

    /// Whether a descriptor must go with the next byte.
    pub(super) fn has_descriptor_first(&self) -> bool {
        self.queue_offset == 0 && self.queue.front().is_some_and(|frame| frame.has_descriptor)
    }

    /// Keeps only what the other end could not read on without: a frame that was begun, and who
    /// this is.
    pub(super) fn drop_unwritten(&mut self) {
        self.queue.truncate(usize::from(self.queue_offset > 0));
        self.queued_bytes = self.queue.iter().map(OutFrame::len).sum();
        self.control.retain(|frame| frame.head.starts_with(&PREFACE));
        self.pong = None;
    }

    fn slices(&self, most: usize) -> Vec<IoSlice<'_>> {
        let mut skip = self.queue_offset;
        // A descriptor goes with the first byte of a call.
        let together = self
            .queue
            .iter()
            .enumerate()
            .take_while(|(at, frame)| *at == 0 || !frame.has_descriptor);
        let parts =
            together.flat_map(|(_, frame)| [&frame.head[..], &frame.payload[..], &frame.tail[..]]);
        let rest = parts.filter_map(|part| {
            let skipped = skip.min(part.len());
            skip -= skipped;
            (skipped < part.len()).then(|| IoSlice::new(&part[skipped..]))
        });
        rest.take(most).collect()
    }

    fn written(&mut self, len: usize) {
        self.queue_offset += len;
        while let Some(first) = self.queue.front()
            && first.len() <= self.queue_offset
        {
            self.queue_offset -= first.len();
            self.queued_bytes -= first.len();
            self.queue.pop_front();
        }
    }
}

impl<S: Sink> Connection<S> {
    /// Puts together what is to be written next. Whether there is something.
    pub fn plan_writes(&mut self) -> bool {
        while self.writer.queued_bytes < LOOKAHEAD {
            let Some(frame) = self.next_frame() else {
                self.outgoing.values_mut().for_each(Outgoing::note_pause);
                break;
            };
            self.stats.sent_frames += 1;
            self.writer.queued_bytes += frame.len();
            let shared = frame.shared > 0;
            self.writer.queue.push_back(frame);
            // The other end reads it while the next is written.
            if shared {
                break;
            }
        }
        !self.writer.queue.is_empty()
    }

    fn next_frame(&mut self) -> Option<OutFrame> {
        if let Some(frame) = self.writer.control.pop_front() {
            return Some(frame);
        }
        if let Some(seq) = self.writer.pong.take() {
            return Some(OutFrame::control(Kind::Pong, 0, seq, &[]));
        }
        let last = self.writer.last_served;
        let after = (Bound::Excluded(last), Bound::Unbounded);
        let in_turn = || self.outgoing.range(after).chain(self.outgoing.range(..=last));
        let ring = self.ring_out.as_ref().filter(|ring| ring.is_taken());
        let mut ready = in_turn().filter(|(_, stream)| stream.is_ready(ring)).map(|(&id, _)| id);
        let first = ready.next()?;
        let most = if ready.next().is_some() {
            self.options.frame_bytes.min(SHARED_PIECE)
        } else {
            self.options.frame_bytes.min(MAX_PIECE_LEN)
        };
        let urgent = in_turn().find(|(_, stream)| stream.is_urgent() && stream.is_ready(ring));
        let id = match urgent {
            Some((&id, _)) if self.writer.urgent_in_row < MAX_URGENT => {
                self.writer.urgent_in_row += 1;
                id
            }
            _ => {
                self.writer.urgent_in_row = 0;
                first
            }
        };
        self.writer.last_served = id;
        let ring = self.ring_out.as_mut().filter(|ring| ring.is_taken());
        let (frame, over) = self.outgoing.get_mut(&id)?.next_frame(most.max(1), ring)?;
        if over {
            self.outgoing.remove(&id);
            self.ending.insert(id);
        }
        Some(frame)
    }

    /// What is to be written, in this order; at most so many slices.
    pub fn write_slices(&self, most: usize) -> Vec<IoSlice<'_>> {
        self.writer.slices(most)
    }

    /// So many bytes of that were written.
    pub fn written(&mut self, len: usize) {
        self.moves +=
            u64::from(len > 0 && !self.writer.queue.front().is_some_and(OutFrame::is_sign_of_life));
        self.stats.sent_bytes += len as u64;
        self.writer.written(len);
    }
}
