// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared memory by which payloads travel on one host: a ring that one end writes and the other
//! reads.

use std::os::fd::{AsFd, OwnedFd};

use ts_pool::{SharedMemory, SharedView};

use crate::Error;
use crate::frame::MAX_PIECE_LEN;

/// Shorter payloads go by the socket.
pub(crate) const MIN_PAYLOAD: usize = 64 << 10;
/// The longest ring that is mapped for another end: what is read of it takes this host's memory.
const MAX_RING: u64 = 64 << 20;
/// The most bytes of one piece: while one is read the next is written.
const PIECE: usize = 256 << 10;

/// The end that writes.
#[derive(Debug)]
pub(crate) struct RingOut {
    memory: SharedMemory,
    sent: u64,
    /// What may have been written, since it began; 0 until the other end has said that it reads.
    limit: u64,
}

impl RingOut {
    pub(crate) fn new(memory: SharedMemory) -> Self {
        Self { memory, sent: 0, limit: 0 }
    }

    pub(crate) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// The other end has read up to here, and its memory may be written again.
    pub(crate) fn allow(&mut self, limit: u64) -> Result<(), Error> {
        if limit > self.sent + self.memory.len() as u64 {
            return Err(Error::Protocol {
                stream: 0,
                what: "more shared memory than there is".into(),
            });
        }
        self.limit = self.limit.max(limit);
        Ok(())
    }

    /// Whether the other end reads.
    pub(crate) fn is_taken(&self) -> bool {
        self.limit > 0
    }

    /// How long the next piece is, of a payload of which so much is left; 0 when it must wait.
    pub(crate) fn room(&self, left: usize) -> usize {
        let len = self.memory.len();
        let free = (self.limit - self.sent) as usize;
        // The other end need not say so before a quarter of it is free.
        if free < left.min(len / 4) {
            return 0;
        }
        let unbroken = len - (self.sent % len as u64) as usize;
        left.min(free).min(unbroken).min(PIECE)
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) {
        let at = (self.sent % self.memory.len() as u64) as usize;
        self.memory.write(at, bytes);
        self.sent += bytes.len() as u64;
    }
}

/// The end that reads.
#[derive(Debug)]
pub(crate) struct RingIn {
    view: SharedView,
    read: u64,
    limit: u64,
}

impl RingIn {
    /// What the other end offers, unless that is too much to map.
    pub(crate) fn open(descriptor: &OwnedFd, len: u64) -> Option<Self> {
        let len = usize::try_from(len).ok().filter(|&len| len > 0 && len as u64 <= MAX_RING)?;
        let view = SharedView::open(descriptor.as_fd(), len).ok()?;
        Some(Self { view, read: 0, limit: len as u64 })
    }

    /// What the other end may have written.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether the next piece may be so long.
    pub(crate) fn holds(&self, len: u64) -> bool {
        let len_of = self.view.len() as u64;
        len > 0
            && len <= MAX_PIECE_LEN as u64
            && self.read + len <= self.limit
            && self.read % len_of + len <= len_of
    }

    /// Copies what comes next; past the caches, if that is said.
    pub(crate) fn take(&mut self, into: &mut [u8], non_temporal: bool) {
        let at = (self.read % self.view.len() as u64) as usize;
        if non_temporal {
            self.view.read_non_temporal(at, into);
        } else {
            self.view.read(at, into);
        }
        self.skip(into.len());
    }

    /// What comes next is of no use.
    pub(crate) fn skip(&mut self, len: usize) {
        self.read += len as u64;
    }

    /// A new limit for the other end, if that is worth a frame.
    pub(crate) fn renew(&mut self) -> Option<u64> {
        let (len, free) = (self.view.len() as u64, self.read + self.view.len() as u64 - self.limit);
        (free >= (len / 4).max(1)).then(|| {
            self.limit += free;
            self.limit
        })
    }
}
