// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a connection: its link, and received items that no call has returned yet.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use pyo3::prelude::*;
use tensorstream::pool::{self, PinnedMemoryPool};
use tensorstream::remote::{Bytes, Error, Event, Link, Sink, TensorInfo};
use tensorstream::streams::AnyDevice;

use super::place::{Place, no_memory};
use super::settings::Settings;
use crate::accelerator::Accelerator;
use crate::errors::{configuration_error, wire_error};
use crate::memory::{Memory, Target};
use crate::tensors::PyTensor;

/// An item that a stream has delivered.
pub(super) enum Incoming {
    Tensor(PyTensor),
    Message(Bytes),
    Finished,
    Cancelled(String),
}

/// The number of a stream, and the sender's number of a storage.
type StorageKey = (u32, u64);

pub(super) struct ConnectionState {
    pub(super) link: Link<Place>,
    /// The stream for messages, and for tensors that are not sent on a separate stream.
    default_stream: Option<u32>,
    /// Storages that later tensors may share. None while the storage is in transfer.
    shared_storages: HashMap<StorageKey, Option<Arc<Memory>>>,
    /// The shared storage whose final tensor is in transfer. The storage is forgotten when this
    /// tensor is complete.
    expiring_storage: Option<StorageKey>,
    /// An announced tensor that has no memory yet: its stream, its description, and whether later
    /// tensors may share its storage.
    announced: Option<(u32, TensorInfo, bool)>,
    /// Received items that no call has returned yet, oldest first, and their streams.
    pub(super) ready: VecDeque<(u32, Incoming)>,
    /// The pool of blocks to receive into, if there is one.
    pub(super) pool: Option<PinnedMemoryPool<AnyDevice>>,
    /// The maximum size of a storage that memory is allocated for, in bytes.
    limit_bytes: u64,
    /// The time at which this state was created.
    pub(super) since: Instant,
}

impl ConnectionState {
    pub(super) fn new(py: Python<'_>, link: Link<Place>, settings: &Settings) -> PyResult<Self> {
        Ok(Self {
            link,
            default_stream: None,
            shared_storages: HashMap::new(),
            expiring_storage: None,
            announced: None,
            ready: VecDeque::new(),
            pool: settings.pool(py)?,
            limit_bytes: settings.limit_bytes,
            since: Instant::now(),
        })
    }

    /// Updates the state for an event of the link. May block until a copy to a device is done.
    ///
    /// # Errors
    /// Returns an error if a copy to a device failed. Then the stream is cancelled.
    pub(super) fn handle(
        &mut self,
        event: Event<Place>,
        device: Option<&Py<Accelerator>>,
    ) -> Result<(), Error> {
        let stream = match &event {
            Event::End { stream, .. } => Some(*stream),
            _ => None,
        };
        self.apply(event, device).map_err(|error| match stream {
            Some(stream) => self.give_up(stream, error),
            None => error,
        })
    }

    /// Cancels a stream whose tensor could not be stored. Returns the error.
    fn give_up(&mut self, stream: u32, error: Error) -> Error {
        // The text of `error` begins with "cannot", so the reason is a sentence.
        self.link.connection().cancel(stream, &format!("the receiver {error}"));
        self.forget_stream(stream);
        error
    }

    fn apply(
        &mut self,
        event: Event<Place>,
        device: Option<&Py<Accelerator>>,
    ) -> Result<(), Error> {
        match event {
            Event::Metadata { stream, info, known, kept } => {
                let key = (stream, info.storage_id);
                match (kept, known) {
                    (false, false) => drop(self.shared_storages.remove(&key)),
                    (false, true) => self.expiring_storage = Some(key),
                    _ => {}
                }
                if !known && info.storage_len > 0 {
                    self.announced = Some((stream, info, kept));
                }
            }
            Event::End { stream, info, sink } => {
                let key = (stream, info.storage_id);
                let memory = match (sink, device) {
                    (Some(place), _) => Some(place.finish()?),
                    (None, Some(device)) if info.storage_len == 0 => {
                        Some(Place::on_device(device, &info)?.finish()?)
                    }
                    (None, None) if info.storage_len == 0 => Memory::zeros(0).map(Arc::new),
                    (None, _) => self.shared_storages.get(&key).cloned().flatten(),
                };
                if let (Some(shared), Some(memory)) = (self.shared_storages.get_mut(&key), &memory)
                {
                    *shared = Some(Arc::clone(memory));
                }
                if self.expiring_storage.take_if(|expiring| *expiring == key).is_some() {
                    self.shared_storages.remove(&key);
                }
                if let Some(memory) = memory {
                    let tensor = PyTensor { info: *info, memory };
                    self.ready.push_back((stream, Incoming::Tensor(tensor)));
                }
            }
            Event::Message { stream, bytes } => {
                self.ready.push_back((stream, Incoming::Message(bytes)));
            }
            Event::Finished { stream } => {
                self.forget_stream(stream);
                self.ready.push_back((stream, Incoming::Finished));
            }
            Event::Cancelled { stream, reason, .. } => {
                self.forget_stream(stream);
                self.ready.push_back((stream, Incoming::Cancelled(reason)));
            }
            _ => {}
        }
        Ok(())
    }

    fn forget_stream(&mut self, stream: u32) {
        self.shared_storages.retain(|(of, _), _| *of != stream);
        self.announced.take_if(|(of, ..)| *of == stream);
        self.expiring_storage.take_if(|(of, _)| *of == stream);
    }

    /// Provides memory for the announced tensor, if there is one. Uses the memory of `into`, else
    /// of `device`, else a block of the pool, else new memory.
    ///
    /// # Errors
    /// ConfigurationError if `into` cannot receive the tensor, OutOfMemoryError if there is too
    /// little memory, or the storage exceeds `limit_bytes`. The connection stays usable in these
    /// cases.
    pub(super) fn provide_memory(
        &mut self,
        py: Python<'_>,
        into: Option<&PyTensor>,
        device: Option<&Py<Accelerator>>,
    ) -> PyResult<()> {
        let Some((stream, info, shared)) = self.announced.take() else { return Ok(()) };
        let len = info.storage_len as usize;
        let place = match (into, device) {
            (Some(into), _) => match fitting(into, len) {
                Ok(memory) => Ok(on_host(memory, len)),
                Err(found) => {
                    let message = format!(
                        "cannot receive tensor `{}` with a storage of {len} bytes into {found}: \
                         expected a contiguous, writable tensor of {len} bytes on the host",
                        info.name
                    );
                    self.announced = Some((stream, info, shared));
                    return Err(configuration_error(py, &message));
                }
            },
            (None, Some(device)) => {
                self.check_limit(&info).and_then(|()| Place::on_device(device, &info))
            }
            (None, None) => self.allocate(&info).map(|memory| on_host(Arc::new(memory), len)),
        };
        let place = match place {
            Ok(place) => place,
            Err(error) => {
                let error = self.give_up(stream, error);
                return Err(wire_error(py, &error));
            }
        };
        if shared {
            self.shared_storages.insert((stream, info.storage_id), None);
        }
        let accepted = self.link.connection().accept(stream, place);
        accepted.map_err(|error| wire_error(py, &self.give_up(stream, error)))
    }

    /// Checks that memory may be allocated for a tensor.
    fn check_limit(&self, info: &TensorInfo) -> Result<(), Error> {
        if info.storage_len <= self.limit_bytes {
            return Ok(());
        }
        Err(no_memory(info)(pool::Error::NeverFits {
            requested_bytes: info.storage_len as usize,
            capacity_bytes: self.limit_bytes as usize,
        }))
    }

    /// Allocates memory for a tensor, from the pool if there is one and it has space.
    fn allocate(&self, info: &TensorInfo) -> Result<Memory, Error> {
        self.check_limit(info)?;
        let requested_bytes = info.storage_len as usize;
        let block = self.pool.as_ref().and_then(|pool| pool.acquire(requested_bytes).ok());
        if let Some(memory) = block.and_then(Memory::from_pool) {
            return Ok(memory);
        }
        Memory::zeros(requested_bytes).ok_or_else(|| {
            let source = std::io::ErrorKind::OutOfMemory.into();
            no_memory(info)(pool::Error::Map { bytes: requested_bytes, source })
        })
    }

    /// Returns the default stream, and opens it if necessary.
    pub(super) fn default_stream(&mut self) -> Result<u32, Error> {
        // The peer may have cancelled the stream.
        let open = self
            .default_stream
            .filter(|&stream| self.link.connection().stream_stats(stream).is_some());
        match open {
            Some(stream) => Ok(stream),
            None => Ok(*self.default_stream.insert(self.link.connection().open_stream()?)),
        }
    }
}

fn on_host(memory: Arc<Memory>, len: usize) -> Place {
    let target = Target::new(memory, 0, len);
    Place::Host(target.expect("`fitting` and `allocate` return `len` writable bytes on the host"))
}

/// Returns the memory of a tensor if the tensor can receive a payload of `len` bytes. Otherwise,
/// returns a description of the tensor for the error.
fn fitting(tensor: &PyTensor, len: usize) -> Result<Arc<Memory>, String> {
    let memory = &tensor.memory;
    let kind = if memory.is_read_only() {
        "read-only "
    } else if memory.bytes().is_none() {
        "GPU "
    } else if !tensor.info.is_contiguous() {
        "non-contiguous "
    } else if memory.len() != len {
        ""
    } else {
        return Ok(Arc::clone(memory));
    };
    Err(format!("a {kind}tensor of {} bytes", memory.len()))
}
