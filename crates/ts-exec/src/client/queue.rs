// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests that wait to be sent, and their batches.

use std::collections::{HashMap, VecDeque};
use std::thread::Thread;

use bytes::Bytes;
use ts_remote::Error;

/// A batch is full with this many requests,
const MAX_BATCH_REQUESTS: usize = 64;
/// or with this many bytes.
const MAX_BATCH_BYTES: usize = 56 << 10;

/// The queue of a client. Its lock is held for an append, never during I/O.
#[derive(Default)]
pub(super) struct RequestQueue {
    /// The batch that requests are added to, encoded.
    batch: Vec<u8>,
    /// How many requests it has.
    batch_len: usize,
    /// Batches and payloads that are ready to be sent.
    sealed: VecDeque<QueueItem>,
    pub(super) sealed_bytes: usize,
    /// How many requests were submitted.
    pub(super) requests: u64,
    /// How many batches were sealed.
    pub(super) batches: u64,
    pub(super) uploaded_bytes: u64,
    /// The numbers of the operators that the server knows.
    pub(super) ops: HashMap<String, u32>,
    /// The thread that sends what has waited too long.
    pub(super) flusher: Option<Thread>,
    /// Why the session ended, if it has.
    pub(super) ended: Option<Error>,
}

pub(super) enum QueueItem {
    Batch(Vec<u8>),
    Payload(Bytes),
}

impl RequestQueue {
    /// Appends a request, which `encode` writes to the batch. Returns its number.
    pub(super) fn push(&mut self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<u64, Error> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        encode(&mut self.batch);
        self.batch_len += 1;
        self.requests += 1;
        Ok(self.requests)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batch.is_empty() && self.sealed.is_empty()
    }

    pub(super) fn is_batch_full(&self) -> bool {
        self.batch_len >= MAX_BATCH_REQUESTS || self.batch.len() >= MAX_BATCH_BYTES
    }

    /// Completes the current batch, if it has requests.
    pub(super) fn seal(&mut self) {
        if !self.batch.is_empty() {
            self.batch_len = 0;
            self.batches += 1;
            self.sealed_bytes += self.batch.len();
            let capacity = self.batch.capacity().min(MAX_BATCH_BYTES);
            let batch = std::mem::replace(&mut self.batch, Vec::with_capacity(capacity));
            self.sealed.push_back(QueueItem::Batch(batch));
        }
    }

    /// Appends a payload after the sealed batch that announces it.
    pub(super) fn push_payload(&mut self, payload: Bytes) {
        self.uploaded_bytes += payload.len() as u64;
        self.sealed_bytes += payload.len();
        self.sealed.push_back(QueueItem::Payload(payload));
    }

    /// Takes everything that is ready to be sent; with `seal`, including the current batch.
    pub(super) fn take_sealed(&mut self, seal: bool) -> VecDeque<QueueItem> {
        if seal {
            self.seal();
        }
        self.sealed_bytes = 0;
        std::mem::take(&mut self.sealed)
    }

    /// Ends the queue: later requests are errors. Returns what was not sent, for the caller to drop
    /// without the lock.
    pub(super) fn end(&mut self, error: &Error) -> (Vec<u8>, VecDeque<QueueItem>) {
        self.ended.get_or_insert_with(|| error.clone());
        (std::mem::take(&mut self.batch), std::mem::take(&mut self.sealed))
    }
}
