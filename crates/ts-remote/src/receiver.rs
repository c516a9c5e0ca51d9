// SPDX-License-Identifier: MIT OR Apache-2.0
//! Senders and receivers of one stream of tensors over any transport, for embedders.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::Bytes;
use ts_pool::ts_streams::Device;
use ts_pool::{BlockStats, TensorBuffer};

use crate::memory::{GpuMemory, Memory, PooledMemory};
use crate::{
    Connection, ConnectionOptions, Error, Event, Role, SendOptions, Sink, Tensor, TensorInfo,
};

/// An event of a [`TensorReceiver`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReceiverEvent {
    /// A tensor begins. Its memory is allocated, unless its storage is empty or known.
    Metadata(Box<TensorInfo>),
    /// Bytes of the payload have been written to its memory.
    Data {
        /// The offset of these bytes in the payload.
        offset: u64,
        /// The number of bytes.
        size: u64,
    },
    /// The tensor is complete and can be [taken](TensorReceiver::take).
    End,
    /// No event is available until more bytes are fed.
    NeedMoreData,
    /// The sender cancelled the stream, for this reason.
    Cancelled(String),
}

/// An event of a [`GpuTensorReceiver`].
pub type GpuReceiverEvent = ReceiverEvent;

/// Receives tensors into the memory of a GPU, or into host memory if the allocation on the GPU
/// fails.
pub type GpuTensorReceiver = TensorReceiver<GpuMemory>;

/// Receives tensors into blocks of memory pools.
pub type PooledGpuReceiver<D> = TensorReceiver<PooledMemory<D>>;

/// Receives the tensors of a [`TensorSender`] in order, over any transport. Its methods do no I/O.
///
/// Pass the bytes that arrive to [`feed`](Self::feed), or read them straight into
/// [`next_read_target`](Self::next_read_target). Send [`replies`](Self::replies), which grant
/// credit, back to the sender.
///
/// ```
/// use ts_remote::ts_format::Dtype;
/// use ts_remote::{
///     HostMemory, ReceiverEvent, SendOptions, TensorInfo, TensorReceiver, TensorSender,
/// };
///
/// let mut sender = TensorSender::new();
/// let info = TensorInfo::new("embedding", Dtype::F32, [2, 2])?;
/// sender.send(info, vec![7; 16].into(), SendOptions::default())?;
///
/// let mut receiver = TensorReceiver::new(HostMemory::new(1 << 30));
/// receiver.feed(&sender.encode())?;
/// while receiver.poll()? != ReceiverEvent::End {}
/// let tensor = receiver.take()?;
/// assert_eq!((tensor.info.meta.shape, tensor.buffer), (vec![2, 2], vec![7; 16]));
/// # Ok::<(), ts_remote::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorReceiver<M: Memory> {
    memory: M,
    connection: Connection<M::Sink>,
    events: VecDeque<ReceiverEvent>,
    /// The length of the current payload, in bytes.
    expected: u64,
    /// The number of bytes of the current payload that have arrived.
    received: u64,
    complete: VecDeque<(TensorInfo, Option<M::Sink>)>,
    /// The error after which nothing more can be received.
    failure: Option<Error>,
}

/// The number of bytes that a sender may send before the first reply.
const WINDOW: u64 = 4 << 20;

fn options() -> ConnectionOptions {
    ConnectionOptions::default().with_window_bytes(WINDOW)
}

/// Copies received bytes into the read targets of a connection. Returns how many bytes were copied.
fn copy_to_targets<S: Sink>(connection: &mut Connection<S>, bytes: &[u8]) -> Result<usize, Error> {
    let mut len = 0;
    for target in connection.read_targets()? {
        let part = target.len().min(bytes.len() - len);
        target[..part].copy_from_slice(&bytes[len..len + part]);
        len += part;
    }
    Ok(len)
}

impl<M: Memory> TensorReceiver<M> {
    /// Creates a receiver that allocates from `memory` when a tensor begins.
    pub fn new(memory: M) -> Self {
        let connection = Connection::without_handshake(Role::Acceptor, options());
        Self {
            memory,
            connection,
            events: VecDeque::new(),
            expected: 0,
            received: 0,
            complete: VecDeque::new(),
            failure: None,
        }
    }

    /// Processes bytes of the sender, and copies payloads to their memory.
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] or [`Error::Damaged`] if the bytes are invalid, and
    /// [`Error::Memory`] if there is no memory for a tensor. Then nothing more can be received.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let copied = copy_to_targets(&mut self.connection, bytes);
            let len = self.recorded(copied)?;
            bytes = &bytes[len..];
            self.filled(len)?;
        }
        Ok(())
    }

    /// Keeps an error for [`poll`](Self::poll).
    fn recorded<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &result {
            self.failure.get_or_insert_with(|| error.clone());
        }
        result
    }

    /// Returns two buffers for the sender's next bytes. Fill the first one, then the second. The
    /// first one may be the memory of a tensor.
    ///
    /// # Errors
    /// Returns the same errors as [`Connection::read_targets`].
    pub fn next_read_target(&mut self) -> Result<[&mut [u8]; 2], Error> {
        self.connection.read_targets()
    }

    /// Reports that `len` bytes were read into the buffers that
    /// [`next_read_target`](Self::next_read_target) last returned.
    ///
    /// # Errors
    /// Returns the same errors as [`feed`](Self::feed).
    pub fn filled(&mut self, len: usize) -> Result<(), Error> {
        let filled = self.connection.filled(len);
        while let Some(event) = self.connection.poll() {
            let handled = self.handle(event);
            self.recorded(handled)?;
        }
        self.recorded(filled)
    }

    fn handle(&mut self, event: Event<M::Sink>) -> Result<(), Error> {
        match event {
            Event::Metadata { stream, info, known, .. } => {
                (self.expected, self.received) = (if known { 0 } else { info.storage_len }, 0);
                if self.expected > 0 {
                    let sink = self.memory.allocate(&info)?;
                    self.connection.accept(stream, sink)?;
                }
                self.events.push_back(ReceiverEvent::Metadata(Box::new(info)));
            }
            Event::Data { offset, size, .. } => {
                self.received += size;
                self.events.push_back(ReceiverEvent::Data { offset, size });
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

    /// Returns the next event, or [`ReceiverEvent::NeedMoreData`] if there is none. Does not block.
    ///
    /// # Errors
    /// Returns the error of [`feed`](Self::feed) after the events before it, at each call.
    pub fn poll(&mut self) -> Result<ReceiverEvent, Error> {
        match (self.events.pop_front(), &self.failure) {
            (Some(event), _) => Ok(event),
            (None, Some(failure)) => Err(failure.clone()),
            (None, None) => Ok(ReceiverEvent::NeedMoreData),
        }
    }

    /// Returns the length of the most recent tensor's payload, in bytes. Returns 0 before the first
    /// tensor, and for a view of a known storage.
    pub fn expected_bytes(&self) -> u64 {
        self.expected
    }

    /// Returns how many bytes of the most recent tensor's payload have arrived.
    pub fn received_bytes(&self) -> u64 {
        self.received
    }

    /// Returns whether a tensor is complete and can be [taken](Self::take).
    pub fn is_complete(&self) -> bool {
        !self.complete.is_empty()
    }

    /// Takes the next complete tensor. May block until its elements are on the device.
    ///
    /// # Errors
    /// Returns [`Error::Misuse`] if no tensor is complete, or if the next one is a view of an
    /// earlier tensor's storage. Returns errors of the memory.
    pub fn take(&mut self) -> Result<Tensor<<M::Sink as Sink>::Full>, Error> {
        let none = || Error::Misuse("cannot take a tensor: no tensor is complete".into());
        let (info, sink) = self.complete.pop_front().ok_or_else(none)?;
        let sink = match sink {
            Some(sink) => sink,
            None if info.storage_len == 0 => self.memory.allocate(&info)?,
            None => {
                let (name, id) = (&info.name, info.storage_id);
                let what = format!(
                    "cannot take tensor {name:?}: it is a view of storage {id}; use the buffer of \
                     the earlier tensor with this storage"
                );
                return Err(Error::Misuse(what));
            }
        };
        Ok(Tensor { info, buffer: sink.finish()? })
    }

    /// Returns the source of memory. Drops tensors that were not taken.
    pub fn into_memory(self) -> M {
        self.memory
    }

    /// Returns the bytes to send back to the sender, which grant credit. Call this after each
    /// [`feed`](Self::feed), because the sender pauses without credit.
    pub fn replies(&mut self) -> Vec<u8> {
        encoded(&mut self.connection)
    }
}

impl GpuTensorReceiver {
    /// Takes the next complete tensor, and copies it to host memory.
    ///
    /// # Errors
    /// Returns the same errors as [`take`](Self::take), and [`Error::Memory`] if the copy fails.
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
    /// Returns the statistics of the pool of pinned memory.
    pub fn pinned_pool_stats(&self) -> BlockStats {
        self.memory.pinned_pool_stats()
    }

    /// Returns the statistics of the pool of device memory, or `None` if there is no such pool.
    pub fn gpu_pool_stats(&self) -> Option<BlockStats> {
        self.memory.gpu_pool_stats()
    }
}

/// Sends tensors to a [`TensorReceiver`], over any transport. Its methods do no I/O.
///
/// ```
/// use ts_remote::ts_format::Dtype;
/// use ts_remote::{HostMemory, SendOptions, TensorInfo, TensorReceiver, TensorSender};
///
/// let mut sender = TensorSender::new();
/// let mut receiver = TensorReceiver::new(HostMemory::new(1 << 30));
/// let info = TensorInfo::new("w", Dtype::U8, [8 << 20])?;
/// sender.send(info, vec![1; 8 << 20].into(), SendOptions::default())?;
/// // The tensor is longer than the window, so the sender needs credit from the receiver.
/// while !sender.is_sent() {
///     receiver.feed(&sender.encode())?;
///     sender.feed(&receiver.replies())?;
/// }
/// assert_eq!(receiver.take()?.buffer.len(), 8 << 20);
/// # Ok::<(), ts_remote::Error>(())
/// ```
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
    /// Creates a sender without queued tensors.
    pub fn new() -> Self {
        let mut connection = Connection::without_handshake(Role::Connector, options());
        let stream = connection.open_stream().expect("a new connection allows at least one stream");
        Self { connection, stream }
    }

    /// Queues a tensor. `payload` contains the bytes of the tensor's storage, which are not copied.
    ///
    /// # Errors
    /// Returns [`Error::Unsendable`] if the tensor or the compression level is invalid, or if
    /// `payload` has another length than the storage. Returns [`Error::Misuse`] after
    /// [`cancel`](Self::cancel).
    pub fn send(
        &mut self,
        info: TensorInfo,
        payload: Bytes,
        options: SendOptions,
    ) -> Result<(), Error> {
        self.connection.send(self.stream, info, payload, options)
    }

    /// Cancels the stream. The receiver gets the reason, and drops a tensor that is incomplete. No
    /// further tensor can be sent.
    pub fn cancel(&mut self, reason: &str) {
        self.connection.cancel(self.stream, reason);
    }

    /// Processes [replies](TensorReceiver::replies) of the receiver.
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] if the replies are invalid, and [`Error::Closed`] with the
    /// reason if the receiver has failed.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let len = copy_to_targets(&mut self.connection, bytes)?;
            bytes = &bytes[len..];
            self.connection.filled(len)?;
        }
        Ok(())
    }

    /// Returns the bytes that may be written next with the available credit, as at most
    /// `max_slices` slices. Payloads are not copied.
    pub fn next_slices(&mut self, max_slices: usize) -> Vec<IoSlice<'_>> {
        self.connection.plan_writes();
        self.connection.write_slices(max_slices)
    }

    /// Reports that the first `len` bytes of [`next_slices`](Self::next_slices) were written.
    pub fn written(&mut self, len: usize) {
        self.connection.written(len);
    }

    /// Returns a copy of all bytes that may be written with the available credit, and counts them
    /// as written.
    pub fn encode(&mut self) -> Vec<u8> {
        encoded(&mut self.connection)
    }

    /// Returns whether everything that was queued has been written or cancelled.
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
