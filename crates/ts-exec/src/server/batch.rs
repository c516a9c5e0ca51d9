// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the requests of a batch.

use std::collections::HashMap;

use bytes::Bytes;
use parking_lot::Mutex;
use ts_format::Dtype;

use super::executor::Executor;
use super::upload::{PendingUpload, UploadSink};
use crate::channel::Channel;
use crate::reply::{OpFailure, Reply};
use crate::request::{Call, Output, Request};
use crate::value::Value;
use ts_remote::{Error, TensorInfo};

/// The maximum number of bytes of replies that may wait for the socket. Beyond that, no further
/// requests run.
pub(super) const MAX_UNSENT: usize = 32 << 20;
/// A client may define at most this many operators, and have at most this many poisoned storages.
const MAX_DEFINED: usize = 1 << 16;
/// The elements of a tensor are sent in a message if they have up to this many bytes, else as a
/// tensor.
const MAX_INLINE: usize = 32 << 10;

/// The channel of a session, shared with the thread that keeps the connection alive.
pub(super) type SharedChannel<E> = Mutex<Channel<UploadSink<<E as Executor>::Sink>>>;

/// The poisoned storages, whose elements are missing because a request failed. The values are the
/// number of that request and its failure.
pub(super) type Poisoned = HashMap<u64, (u64, OpFailure)>;

/// Runs requests, one after the other.
pub(super) struct BatchRunner<'a, E: Executor> {
    pub(super) executor: &'a mut E,
    pub(super) channel: &'a SharedChannel<E>,
    /// For each defined operator, the failure of its calls; `None` if it can be called.
    pub(super) op_failures: &'a mut Vec<Option<OpFailure>>,
    pub(super) poisoned: &'a mut Poisoned,
    pub(super) upload: &'a mut Option<PendingUpload>,
    /// Whether an unacknowledged reply may share the memory of a storage.
    pub(super) awaits_ack: &'a mut bool,
    /// Whether a reply was sent.
    pub(super) replied: bool,
    /// The number of the current request.
    pub(super) number: u64,
}

impl<E: Executor> BatchRunner<'_, E> {
    /// Runs a request. Returns whether replies must be sent before the next request.
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] if the client breaks the protocol, or the error of the link.
    /// Failures of requests are replies, not errors.
    pub(super) fn run(&mut self, request: Request) -> Result<bool, Error> {
        self.execute(request)?;
        Ok(*self.awaits_ack || self.replied && self.channel.lock().unsent_bytes() > MAX_UNSENT)
    }

    fn execute(&mut self, request: Request) -> Result<(), Error> {
        if self.upload.is_some() {
            let what = "the tensor of a RECEIVE request must follow it, got another request";
            return Err(protocol_error(what.into()));
        }
        if self.poisoned.len() > MAX_DEFINED {
            return Err(protocol_error(format!(
                "too many poisoned storages: got {} (expected at most {MAX_DEFINED}); free the \
                 results of failed requests",
                self.poisoned.len()
            )));
        }
        let (done, storage) = match request {
            Request::Call(call) => return self.call(&call),
            Request::Define { op, name } => {
                let next = self.op_failures.len();
                if op as usize != next {
                    let what = format!(
                        "operator {name:?} is defined with number {op} (expected {next}, the next \
                         number)"
                    );
                    return Err(protocol_error(what));
                }
                if next >= MAX_DEFINED {
                    return Err(protocol_error(format!(
                        "cannot define operator {name:?}: the session already has {MAX_DEFINED} \
                         operators, which is the maximum"
                    )));
                }
                // A failure is reported when the operator is called.
                self.op_failures.push(self.executor.define(op, &name).err());
                return Ok(());
            }
            Request::Free { storage } => {
                self.poisoned.remove(&storage);
                self.executor.free(storage);
                return Ok(());
            }
            Request::Sync { reply } => {
                return self.reply(&Reply::Answer { reply, values: Vec::new() });
            }
            Request::List { reply } => {
                let describe = |(storage, bytes, device, written): (u64, u64, u32, bool)| {
                    let state =
                        if self.poisoned.contains_key(&storage) { 2 } else { i64::from(written) };
                    [storage as i64, bytes as i64, i64::from(device), state].map(Value::Int)
                };
                let values = self.executor.storages().into_iter().flat_map(describe).collect();
                return self.reply(&Reply::Answer { reply, values });
            }
            Request::Read { reply, tensor } => {
                if let Some((request, failure)) = self.poisoned.get(&tensor.storage).cloned() {
                    return self.reply(&Reply::Refused { reply, request, failure });
                }
                return match self.executor.read(&tensor) {
                    Ok(bytes) => self.reply_bytes(reply, bytes),
                    Err(failure) => {
                        self.reply(&Reply::Refused { reply, request: self.number, failure })
                    }
                };
            }
            Request::Receive { storage, offset, bytes } => {
                *self.upload = Some(PendingUpload { request: self.number, storage, offset, bytes });
                return Ok(());
            }
            Request::Create { storage, bytes, device } => {
                (self.executor.create(storage, bytes, device), storage)
            }
            Request::Resize { storage, bytes } => (self.executor.resize(storage, bytes), storage),
            Request::Write { storage, offset, bytes } => {
                (self.executor.write(storage, offset, &bytes), storage)
            }
        };
        done.or_else(|failure| self.fail(failure, storage))
    }

    fn call(&mut self, call: &Call) -> Result<(), Error> {
        let cause = if self.poisoned.is_empty() {
            None
        } else {
            call.tensors().find_map(|tensor| self.poisoned.get(&tensor.storage)).cloned()
        };
        let (request, failure) = match (cause, self.op_failures.get(call.op as usize)) {
            // An argument is poisoned. The request that poisoned it has already reported the
            // failure.
            (Some(cause), _) => {
                self.executor.skip(call, &cause.1);
                cause
            }
            (None, Some(None)) => match self.executor.call(call) {
                Ok(values) => match call.reply {
                    Some(reply) => return self.reply(&Reply::Answer { reply, values }),
                    None => return Ok(()),
                },
                Err(failure) => (self.number, failure),
            },
            (None, Some(Some(failure))) => (self.number, failure.clone()),
            (None, None) => {
                return Err(protocol_error(format!(
                    "cannot call operator {}: the session has defined only {} operators, numbered \
                     from 0",
                    call.op,
                    self.op_failures.len()
                )));
            }
        };
        let outputs = call.outputs.iter().filter_map(|output| match output {
            Output::Known => None,
            Output::New { tensor, .. } => Some(tensor.storage),
            Output::Described { storage } => Some(*storage),
        });
        let writes = self.executor.writes(call);
        let writes = writes.into_iter().filter(|storage| !self.executor.is_constant(*storage));
        for storage in outputs.chain(writes) {
            self.poisoned.entry(storage).or_insert_with(|| (request, failure.clone()));
        }
        match call.reply {
            Some(reply) => self.reply(&Reply::Refused { reply, request, failure }),
            None if request == self.number => self.reply(&Reply::Failed { request, failure }),
            None => Ok(()),
        }
    }

    /// Poisons the storage that the current request should have changed, and reports the failure.
    fn fail(&mut self, failure: OpFailure, storage: u64) -> Result<(), Error> {
        if !self.executor.is_constant(storage) {
            self.poisoned.insert(storage, (self.number, failure.clone()));
        }
        self.reply(&Reply::Failed { request: self.number, failure })
    }

    fn reply(&mut self, reply: &Reply) -> Result<(), Error> {
        self.replied = true;
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        self.channel.lock().send_message(&bytes)
    }

    fn reply_bytes(&mut self, reply: u64, bytes: Bytes) -> Result<(), Error> {
        if bytes.len() <= MAX_INLINE {
            return self.reply(&Reply::Bytes { reply, bytes: bytes.into() });
        }
        self.reply(&Reply::Tensor { reply })?;
        let info = TensorInfo::new("", Dtype::U8, [bytes.len() as u64])?;
        *self.awaits_ack = true;
        self.channel.lock().send_tensor(info, bytes)
    }
}

/// Creates a protocol error of the whole connection.
pub(super) fn protocol_error(what: String) -> Error {
    Error::Protocol { stream: 0, what }
}
