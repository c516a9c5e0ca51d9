// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ends of a ring, on systems that can pass memory to another process.

use rustix::fd::{AsFd, OwnedFd};
use ts_pool::{SharedMemory, SharedMemoryView};

use crate::Error;
use crate::frame::MAX_PIECE_LEN;

/// The longest ring that is mapped, in bytes. A limit is needed because its pages take memory of
/// this host.
const MAX_RING: u64 = 64 << 20;
/// The maximum length of a piece, in bytes. The peer can read one piece while the next one is
/// written.
const PIECE_LEN: usize = 256 << 10;

/// The writing end of a ring.
#[derive(Debug)]
pub(crate) struct RingWriter {
    memory: SharedMemory,
    sent: u64,
    /// The credit limit: how many bytes may have been written since the beginning. 0 until the peer
    /// has mapped the ring.
    limit: u64,
}

impl RingWriter {
    pub(crate) fn new(memory: SharedMemory) -> Self {
        Self { memory, sent: 0, limit: 0 }
    }

    pub(crate) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Raises the credit limit to `limit`. Ignores a lower limit.
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] if bytes that the peer has not read could be overwritten.
    pub(crate) fn set_limit(&mut self, limit: u64) -> Result<(), Error> {
        if limit > self.sent + self.memory.len() as u64 {
            return Err(Error::Protocol {
                stream: 0,
                what: format!(
                    "received CREDIT of {limit} bytes for shared memory (expected at most {})",
                    self.sent + self.memory.len() as u64
                ),
            });
        }
        self.limit = self.limit.max(limit);
        Ok(())
    }

    /// Returns whether the peer has mapped the ring.
    pub(crate) fn is_mapped(&self) -> bool {
        self.limit > 0
    }

    /// Returns the length of the next piece of a payload. `left` is the number of bytes of the
    /// payload that are not written yet. Returns 0 if the piece must wait for space.
    pub(crate) fn next_len(&self, left: usize) -> usize {
        let len = self.memory.len();
        let free = (self.limit - self.sent) as usize;
        // The peer grants space in steps of a quarter of the ring, so waiting for that much yields
        // long pieces.
        if free < left.min(len / 4) {
            return 0;
        }
        let until_end = len - (self.sent % len as u64) as usize;
        left.min(free).min(until_end).min(PIECE_LEN)
    }

    /// Copies the next piece of a payload into the ring.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let at = (self.sent % self.memory.len() as u64) as usize;
        self.memory.write(at, bytes);
        self.sent += bytes.len() as u64;
    }
}

/// The reading end of a ring.
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

    /// Returns the credit limit: how many bytes the peer may have written since the beginning.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns whether the next piece may have this length, in bytes.
    pub(crate) fn allows(&self, len: u64) -> bool {
        let ring_len = self.view.len() as u64;
        len > 0
            && len <= MAX_PIECE_LEN as u64
            && self.read + len <= self.limit
            && self.read % ring_len + len <= ring_len
    }

    /// Copies the next bytes of the ring. If `non_temporal` is set, the stores bypass the caches.
    pub(crate) fn read(&mut self, into: &mut [u8], non_temporal: bool) {
        let at = (self.read % self.view.len() as u64) as usize;
        if non_temporal {
            self.view.read_non_temporal(at, into);
        } else {
            self.view.read(at, into);
        }
        self.skip(into.len());
    }

    /// Skips the next bytes of the ring.
    pub(crate) fn skip(&mut self, len: usize) {
        self.read += len as u64;
    }

    /// Returns a new credit limit for the peer, if the increase is worth a frame.
    pub(crate) fn renew_limit(&mut self) -> Option<u64> {
        let (len, free) = (self.view.len() as u64, self.read + self.view.len() as u64 - self.limit);
        (free >= (len / 4).max(1)).then(|| {
            self.limit += free;
            self.limit
        })
    }
}
