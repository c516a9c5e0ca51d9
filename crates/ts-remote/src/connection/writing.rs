// SPDX-License-Identifier: MIT OR Apache-2.0
//! The writing half of a connection: it selects the next frame, and returns its bytes as slices.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Bound;

use super::Connection;
use crate::Sink;
use crate::frame::{Kind, MAX_PIECE_LEN, PREFACE};
use crate::outgoing::{OutFrame, Outgoing};

/// Once this many bytes are queued for the socket, no more frames are queued. A larger value would
/// delay urgent frames.
const MAX_QUEUED: usize = 2 << 20;
/// The longest piece of a payload while several streams have something to send, in bytes.
const MAX_PIECE_OF_SEVERAL: usize = 256 << 10;
/// The maximum number of messages in a row that may overtake a waiting payload.
const MAX_URGENT: u32 = 16;

/// The frames to be written.
#[derive(Debug, Default)]
pub(super) struct Writer {
    /// Control frames, which overtake payloads.
    control: VecDeque<OutFrame>,
    /// The number of the most recent PING that has not been answered.
    pong: Option<u64>,
    /// Frames in the order in which they are written.
    queue: VecDeque<OutFrame>,
    /// The number of bytes of the first frame in `queue` that have been written.
    queue_offset: usize,
    queued_bytes: usize,
    /// The stream whose frame was queued most recently.
    last_served: u32,
    /// The number of messages in a row that have overtaken payloads.
    urgent_in_row: u32,
}

impl Writer {
    /// Queues a control frame.
    pub(super) fn push_control(&mut self, kind: Kind, stream: u32, seq: u64, body: &[u8]) {
        self.push(OutFrame::control(kind, stream, seq, body));
    }

    pub(super) fn push(&mut self, frame: OutFrame) {
        self.control.push_back(frame);
    }

    pub(super) fn push_first(&mut self, frame: OutFrame) {
        self.control.push_front(frame);
    }

    /// Queues the answer to a PING. One PONG answers all PINGs before it.
    pub(super) fn push_pong(&mut self, ping: u64) {
        self.pong = Some(ping);
    }

    /// Returns how many control frames are queued.
    pub(super) fn control_len(&self) -> usize {
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

    /// Returns whether data of the user is queued.
    pub(super) fn has_user_data(&self) -> bool {
        self.queue.iter().any(OutFrame::is_user_data)
    }

    /// Returns whether a descriptor must be attached to the next byte.
    #[cfg(unix)]
    pub(super) fn has_descriptor_first(&self) -> bool {
        self.queue_offset == 0 && self.queue.front().is_some_and(|frame| frame.has_descriptor)
    }

    /// Drops all queued frames except a partly written frame and HELLO. Without these two, the peer
    /// could not read the next frame.
    pub(super) fn drop_unwritten(&mut self) {
        self.queue.truncate(usize::from(self.queue_offset > 0));
        self.queued_bytes = self.queue.iter().map(OutFrame::len).sum();
        self.control.retain(|frame| frame.head.starts_with(&PREFACE));
        self.pong = None;
    }

    fn slices(&self, max_slices: usize) -> Vec<IoSlice<'_>> {
        let mut skip = self.queue_offset;
        // A descriptor is attached to the first byte of a system call, so its frame must come
        // first.
        let frames = self
            .queue
            .iter()
            .enumerate()
            .take_while(|(at, frame)| *at == 0 || !frame.has_descriptor);
        let parts =
            frames.flat_map(|(_, frame)| [&frame.head[..], &frame.payload[..], &frame.tail[..]]);
        let rest = parts.filter_map(|part| {
            let skipped = skip.min(part.len());
            skip -= skipped;
            (skipped < part.len()).then(|| IoSlice::new(&part[skipped..]))
        });
        rest.take(max_slices).collect()
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
    /// Queues the frames to be written next. Returns whether there is anything to write.
    pub fn plan_writes(&mut self) -> bool {
        while self.writer.queued_bytes < MAX_QUEUED {
            let Some(frame) = self.next_frame() else {
                self.outgoing.values_mut().for_each(Outgoing::note_pause);
                break;
            };
            self.stats.sent_frames += 1;
            self.writer.queued_bytes += frame.len();
            let shared = frame.shared > 0;
            self.writer.queue.push_back(frame);
            // Stops here, so that the peer can read this piece while the next one is written.
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
        let ring = self.ring_writer.as_ref().filter(|ring| ring.is_mapped());
        let mut ready = in_turn().filter(|(_, stream)| stream.is_ready(ring)).map(|(&id, _)| id);
        let first = ready.next()?;
        let max_piece = if ready.next().is_some() {
            self.options.frame_bytes.min(MAX_PIECE_OF_SEVERAL)
        } else {
            self.longest_piece()
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
        let ring = self.ring_writer.as_mut().filter(|ring| ring.is_mapped());
        let (frame, last) = self.outgoing.get_mut(&id)?.next_frame(max_piece.max(1), ring)?;
        if last {
            self.outgoing.remove(&id);
            self.ending.insert(id);
        }
        Some(frame)
    }

    /// Returns the longest piece that this end writes and the peer reads, in bytes.
    pub(super) fn longest_piece(&self) -> usize {
        let theirs = self.peer.as_ref().map_or(MAX_PIECE_LEN, |peer| peer.longest_piece);
        self.options.frame_bytes.min(theirs)
    }

    /// Returns the bytes to be written next, in order, as at most `max_slices` slices. Call
    /// [`plan_writes`](Self::plan_writes) first.
    pub fn write_slices(&self, max_slices: usize) -> Vec<IoSlice<'_>> {
        self.writer.slices(max_slices)
    }

    /// Reports that the first `len` bytes of [`write_slices`](Self::write_slices) were written.
    pub fn written(&mut self, len: usize) {
        let is_ping = self.writer.queue.front().is_some_and(OutFrame::is_ping_or_pong);
        self.progress += u64::from(len > 0 && !is_ping);
        self.stats.sent_bytes += len as u64;
        self.writer.written(len);
    }
}
