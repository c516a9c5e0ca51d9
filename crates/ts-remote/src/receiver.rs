// SPDX-License-Identifier: MIT OR Apache-2.0
//! One stream of tensors, for callers with a transport of their own.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::Bytes;
use ts_pool::ts_streams::Device;
use ts_pool::{BlockStats, TensorBuffer};

use crate::memory::{GpuMemory, Memory, PooledMemory};
use crate::{
    Connection, ConnectionOptions, Error, Event, Role, SendOptions, Sink, Tensor, TensorInfo,
};

/// What a receiver of tensors says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReceiverEvent {
    /// A tensor begins, and has its memory.
    Metadata(Box<TensorInfo>),
    /// Bytes of it are where they belong.
    Data {
        /** First byte, in the payload. */
        offset: u64,
        /** How many. */
        bytes: u64,
    },
    /// It is complete, and to be [taken](TensorReceiver::take).
    End,
    /// More must be fed.
    NeedMoreData,
    /// The sender gave it up, and says why.
    Cancelled(String),
}

/// What a [`GpuTensorReceiver`] says.
pub type GpuReceiverEvent = ReceiverEvent;

/// Receives tensors to the memory of a GPU, or to the host's where there is none.
pub type GpuTensorReceiver = TensorReceiver<GpuMemory>;

/// Receives tensors to blocks of pools.
pub type PooledGpuReceiver<D> = TensorReceiver<PooledMemory<D>>;

/// Receives what a [`TensorSender`] sends, one tensor after the other, whatever carries the bytes.
///
/// Bytes are [fed](Self::feed), or read straight to [where they belong](Self::next_read_target).
/// What is to go back to the sender, credit, is in [`replies`](Self::replies).
///
/// ```
/// use ts_format::Dtype;
/// use ts_remote::{
///     HostMemory, ReceiverEvent, SendOptions, TensorInfo, TensorReceiver, TensorSender,
/// };
///
/// let mut sender = TensorSender::new();
/// let info = TensorInfo::new("embedding", Dtype::F32, [2, 2])?;
/// sender.send(info, vec![7; 16].into(), SendOptions::default())?;
///
/// let mut receiver = TensorReceiver::new(HostMemory { limit_bytes: 1 << 30 });
/// receiver.feed(&sender.encode())?;
/// while receiver.poll() != ReceiverEvent::End {}
/// let tensor = receiver.take()?;
/// assert_eq!((tensor.info.meta.shape, tensor.buffer), (vec![2, 2], vec![7; 16]));
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorReceiver<M: Memory> {
    memory: M,
    connection: Connection<M::Sink>,
    events: VecDeque<ReceiverEvent>,
    /// Of the tensor that arrives, or was taken last.
    expected: u64,
    received: u64,
    complete: VecDeque<(TensorInfo, Option<M::Sink>)>,
}

/// How much a sender sends before it hears from the receiver, in bytes.
const WINDOW: u64 = 4 << 20;

fn options() -> ConnectionOptions {
    ConnectionOptions { window_bytes: WINDOW, ..ConnectionOptions::default() }
}

impl<M: Memory> TensorReceiver<M> {
    /// One that takes memory as tensors are announced.
    pub fn new(memory: M) -> Self {
        let connection = Connection::introduced(Role::Acceptor, options());
        Self {
            memory,
            connection,
            events: VecDeque::new(),
            expected: 0,
            received: 0,
            complete: VecDeque::new(),
        }
    }

    /// Takes bytes of the sender's, copying payloads to where they belong.
    ///
    /// # Errors
    /// [`Error::Protocol`], [`Error::Damaged`], [`Error::Memory`]. Nothing more can be received
    /// then.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let mut len = 0;
            for target in self.connection.read_targets()? {
                let part = target.len().min(bytes.len());
                target[..part].copy_from_slice(&bytes[..part]);
                bytes = &bytes[part..];
                len += part;
            }
            self.filled(len)?;
        }
        Ok(())
    }

    /// Where the sender's next bytes are to be read to: first the one, which may be the memory of a
    /// tensor, then the other.
    ///
    /// # Errors
    /// What the memory says.
    pub fn next_read_target(&mut self) -> Result<[&mut [u8]; 2], Error> {
        self.connection.read_targets()
    }

    /// So many bytes were read to what [`next_read_target`](Self::next_read_target) gave last.
    ///
    /// # Errors
    /// As [`feed`](Self::feed).
    pub fn filled(&mut self, len: usize) -> Result<(), Error> {
        let filled = self.connection.filled(len);
        while let Some(event) = self.connection.poll() {
            self.hear(event)?;
        }
        filled
    }

    fn hear(&mut self, event: Event<M::Sink>) -> Result<(), Error> {
        match event {
            Event::Metadata { stream, info, known, .. } => {
                (self.expected, self.received) = (if known { 0 } else { info.storage_len }, 0);
                if self.expected > 0 {
                    let sink = self.memory.allocate(&info)?;
                    self.connection.accept(stream, sink)?;
                }
                self.events.push_back(ReceiverEvent::Metadata(Box::new(info)));
            }
            Event::Data { offset, bytes, .. } => {
                self.received += bytes;
                self.events.push_back(ReceiverEvent::Data { offset, bytes });
            }
            Event::End { info, sink, .. } => {
                self.complete.push_back((*info, sink));
                self.events.push_back(ReceiverEvent::End);
            }
            Event::Cancelled { reason, .. } => {
                self.events.push_back(ReceiverEvent::Cancelled(reason));
            }
            Event::Message { .. } | Event::Finished { .. } | Event::Connected { .. } => {}
        }
        Ok(())
    }

    /// What happened. Does not block.
    pub fn poll(&mut self) -> ReceiverEvent {
        self.events.pop_front().unwrap_or(ReceiverEvent::NeedMoreData)
    }

    /// Bytes of the payload that arrives, or arrived last; 0 before it is announced.
    pub fn expected_bytes(&self) -> u64 {
        self.expected
    }

    /// Of these, those that have come.
    pub fn received_bytes(&self) -> u64 {
        self.received
    }

    /// Whether there is a tensor to be taken.
    pub fn is_complete(&self) -> bool {
        !self.complete.is_empty()
    }

    /// The next tensor that is complete, and its storage. May block until that is on its device.
    ///
    /// # Errors
    /// [`Error::Misuse`] when none is complete, or it is a view of one that was taken before; what
    /// the memory says.
    pub fn take(&mut self) -> Result<Tensor<<M::Sink as Sink>::Full>, Error> {
        let none = || Error::Misuse("no tensor is complete".into());
        let (info, sink) = self.complete.pop_front().ok_or_else(none)?;
        let sink = match sink {
            Some(sink) => sink,
            None if info.storage_len == 0 => self.memory.allocate(&info)?,
            None => {
                let what =
                    format!("tensor `{}` is a view of storage {}", info.name, info.storage_id);
                return Err(Error::Misuse(what));
            }
        };
        Ok(Tensor { info, buffer: sink.finish()? })
    }

    /// Gives the source of its memory back. What was not taken is dropped.
    pub fn into_memory(self) -> M {
        self.memory
    }

    /// What is to be sent to the sender: credit. Call it after each [`feed`](Self::feed), or it
    /// will stop.
    pub fn replies(&mut self) -> Vec<u8> {
        encoded(&mut self.connection)
    }
}

impl GpuTensorReceiver {
    /// The next tensor that is complete, on the host.
    ///
    /// # Errors
    /// As [`take`](Self::take); [`Error::Memory`] when it cannot be copied.
    pub fn take_tensor(&mut self) -> Result<Tensor<Vec<u8>>, Error> {
        let Tensor { info, buffer } = self.take()?;
        let bytes = TensorBuffer::to_host(&buffer).map_err(|error| Error::Memory {
            tensor: info.name.clone(),
            bytes: info.storage_len,
            source: error.into(),
        })?;
        Ok(Tensor { info, buffer: bytes })
    }
}

impl<D: Device> PooledGpuReceiver<D> {
    /// Statistics of the pinned memory.
    pub fn pinned_pool_stats(&self) -> BlockStats {
        self.memory.pinned_pool_stats()
    }

    /// Statistics of the device's memory, if there is some.
    pub fn gpu_pool_stats(&self) -> Option<BlockStats> {
        self.memory.gpu_pool_stats()
    }
}

/// Sends tensors to a [`TensorReceiver`], whatever carries the bytes.
#[derive(Debug)]
pub struct TensorSender {
    connection: Connection<Vec<u8>>,
    stream: u32,
}

impl Default for TensorSender {
    fn default() -> Self {
        Self::new()
    }
}

impl TensorSender {
    /// One that has sent nothing.
    pub fn new() -> Self {
        let mut connection = Connection::introduced(Role::Connector, options());
        let stream = connection.open_stream().expect("it is the first");
        Self { connection, stream }
    }

    /// Sends a tensor. Its bytes stay where they are until they are written.
    ///
    /// # Errors
    /// [`Error::Unsendable`].
    pub fn send(
        &mut self,
        info: TensorInfo,
        payload: Bytes,
        options: SendOptions,
    ) -> Result<(), Error> {
        self.connection.send(self.stream, info, payload, options)
    }

    /// Gives up what was not written.
    pub fn cancel(&mut self, reason: &str) {
        self.connection.cancel(self.stream, reason);
    }

    /// Takes what the receiver [replies](TensorReceiver::replies).
    ///
    /// # Errors
    /// [`Error::Protocol`].
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let mut len = 0;
            for target in self.connection.read_targets()? {
                let part = target.len().min(bytes.len());
                target[..part].copy_from_slice(&bytes[..part]);
                bytes = &bytes[part..];
                len += part;
            }
            self.connection.filled(len)?;
        }
        Ok(())
    }

    /// What is to be written next, as far as there is credit: slices of the tensors themselves. At
    /// most so many.
    pub fn next_slices(&mut self, most: usize) -> Vec<IoSlice<'_>> {
        self.connection.plan_writes();
        self.connection.write_slices(most)
    }

    /// So many bytes of that were written.
    pub fn written(&mut self, len: usize) {
        self.connection.written(len);
    }

    /// All that may be written now, copied.
    pub fn encode(&mut self) -> Vec<u8> {
        encoded(&mut self.connection)
    }

    /// Whether nothing is left to be written.
    pub fn is_sent(&self) -> bool {
        self.connection.is_sent(self.stream)
    }
}

fn encoded<S: Sink>(connection: &mut Connection<S>) -> Vec<u8> {
    let mut bytes = Vec::new();
    while connection.plan_writes() {
        let before = bytes.len();
        connection.write_slices(usize::MAX).iter().for_each(|slice| bytes.extend_from_slice(slice));
        connection.written(bytes.len() - before);
    }
    bytes
}
