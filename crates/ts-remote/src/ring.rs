// SPDX-License-Identifier: MIT OR Apache-2.0
//! Payloads through shared memory: a ring that one end writes and the other reads.

use std::os::fd::{AsFd, OwnedFd};

use ts_pool::{SharedMemory, SharedMemoryView};

use crate::Error;
use crate::frame::MAX_PIECE_LEN;

/// The shortest payload that goes through the ring, in bytes. Shorter ones go through the socket.
pub(crate) const MIN_PAYLOAD: usize = 64 << 10;
/// The longest ring of a peer that is mapped, in bytes, because its pages take memory of this host.
const MAX_RING: u64 = 64 << 20;
/// The most bytes per piece, so that one piece is read while the next is written.
const PIECE_LEN: usize = 256 << 10;

/// The end of a ring that writes.
#[derive(Debug)]
pub(crate) struct RingWriter {
    memory: SharedMemory,
    sent: u64,
    /// How many bytes may have been written since the beginning. 0 until the peer has mapped the
    /// ring.
    limit: u64,
}

impl RingWriter {
    pub(crate) fn new(memory: SharedMemory) -> Self {
        Self { memory, sent: 0, limit: 0 }
    }

    pub(crate) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Sets how many bytes may have been written since the beginning.
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] if the limit would overwrite bytes that were not read.
    pub(crate) fn set_limit(&mut self, limit: u64) -> Result<(), Error> {
        if limit > self.sent + self.memory.len() as u64 {
            return Err(Error::Protocol {
                stream: 0,
                what: "CREDIT for more shared memory than was offered".into(),
            });
        }
        self.limit = self.limit.max(limit);
        Ok(())
    }

    /// Returns whether the peer has mapped the ring.
    pub(crate) fn is_mapped(&self) -> bool {
        self.limit > 0
    }

    /// Returns the length of the next piece of a payload with `left` bytes left, or 0 if it must
    /// wait for space.
    pub(crate) fn next_len(&self, left: usize) -> usize {
        let len = self.memory.len();
        let free = (self.limit - self.sent) as usize;
        // The peer grants space again in steps of a quarter of the ring.
        if free < left.min(len / 4) {
            return 0;
        }
        let until_end = len - (self.sent % len as u64) as usize;
        left.min(free).min(until_end).min(PIECE_LEN)
    }

    /// Writes the next piece.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let at = (self.sent % self.memory.len() as u64) as usize;
        self.memory.write(at, bytes);
        self.sent += bytes.len() as u64;
    }
}

/// The end of a ring that reads.
#[derive(Debug)]
pub(crate) struct RingReader {
    view: SharedMemoryView,
    read: u64,
    limit: u64,
}

impl RingReader {
    /// Maps the ring that the peer offers. Returns `None` if it is too long or cannot be mapped.
    pub(crate) fn open(descriptor: &OwnedFd, len: u64) -> Option<Self> {
        let len = usize::try_from(len).ok().filter(|&len| len > 0 && len as u64 <= MAX_RING)?;
        let view = SharedMemoryView::open(descriptor.as_fd(), len).ok()?;
        Some(Self { view, read: 0, limit: len as u64 })
    }

    /// Returns how many bytes the peer may have written since the beginning.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns whether the next piece may have this length.
    pub(crate) fn allows(&self, len: u64) -> bool {
        let ring_len = self.view.len() as u64;
        len > 0
            && len <= MAX_PIECE_LEN as u64
            && self.read + len <= self.limit
            && self.read % ring_len + len <= ring_len
    }

    /// Copies the next bytes, with stores that bypass the caches if `non_temporal`.
    pub(crate) fn read(&mut self, into: &mut [u8], non_temporal: bool) {
        let at = (self.read % self.view.len() as u64) as usize;
        if non_temporal {
            self.view.read_non_temporal(at, into);
        } else {
            self.view.read(at, into);
        }
        self.skip(into.len());
    }

    /// Skips the next bytes.
    pub(crate) fn skip(&mut self, len: usize) {
        self.read += len as u64;
    }

    /// Returns a new limit for the peer, if it is worth a frame.
    pub(crate) fn renew_limit(&mut self) -> Option<u64> {
        let (len, free) = (self.view.len() as u64, self.read + self.view.len() as u64 - self.limit);
        (free >= (len / 4).max(1)).then(|| {
            self.limit += free;
            self.limit
        })
    }
}
