// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests that wait to be sent, and their batches.

use std::collections::{HashMap, VecDeque};
use std::thread::Thread;

use bytes::Bytes;
use ts_remote::Error;

/// The number of requests at which a batch is full.
const MAX_BATCH_REQUESTS: usize = 64;
/// The length in bytes at which a batch is full.
const MAX_BATCH_BYTES: usize = 56 << 10;

/// The queue of a client. No thread keeps it locked during I/O.
#[derive(Default)]
pub(super) struct RequestQueue {
    /// The encoded requests of the current batch.
    batch: Vec<u8>,
    /// How many requests the current batch has.
    batch_len: usize,
    /// Batches and payloads that are ready to be sent.
    sealed: VecDeque<QueueItem>,
    pub(super) sealed_bytes: usize,
    /// How many requests were submitted.
    pub(super) requests: u64,
    /// How many batches were sealed.
    pub(super) batches: u64,
    pub(super) uploaded_bytes: u64,
    /// The numbers of the defined operators, by name.
    pub(super) ops: HashMap<String, u32>,
    /// The flusher thread, which sends incomplete batches after a short time.
    pub(super) flusher: Option<Thread>,
    /// The error that ended the session, if it has ended.
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

    /// Takes all batches and payloads that are ready to be sent. With `seal`, completes the current
    /// batch first.
    pub(super) fn take_sealed(&mut self, seal: bool) -> VecDeque<QueueItem> {
        if seal {
            self.seal();
        }
        self.sealed_bytes = 0;
        std::mem::take(&mut self.sealed)
    }

    /// Ends the queue, so that later requests fail. Returns the unsent batches and payloads. The
    /// caller must drop them after it unlocks the queue.
    pub(super) fn end(&mut self, error: &Error) -> (Vec<u8>, VecDeque<QueueItem>) {
        self.ended.get_or_insert_with(|| error.clone());
        (std::mem::take(&mut self.batch), std::mem::take(&mut self.sealed))
    }
}
