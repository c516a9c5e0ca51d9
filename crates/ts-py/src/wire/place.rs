// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that a tensor is received into, on the host or on a device.

use std::sync::Arc;

use pyo3::prelude::*;
use tensorstream::pool::{self, TensorBuffer};
use tensorstream::remote::{Error, Memory as _, OrderedSink, Sink, TensorInfo};
use tensorstream::streams::AnyDevice;

use crate::accelerator::Accelerator;
use crate::dlpack::CPU;
use crate::memory::{Memory, Target};

/// Memory for a tensor that is being received.
pub(crate) enum Place {
    Host(Target),
    Device { sink: Box<OrderedSink<AnyDevice>>, accelerator: Py<Accelerator> },
}

impl Place {
    /// Allocates memory on a device for a tensor.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] if there is too little memory.
    pub(super) fn on_device(device: &Py<Accelerator>, info: &TensorInfo) -> Result<Self, Error> {
        let mut memory = device.get().receiving().map_err(no_memory(info))?;
        let sink = Box::new(memory.allocate(info)?);
        let accelerator = Python::attach(|py| device.clone_ref(py));
        Ok(Self::Device { sink, accelerator })
    }
}

/// Returns a function that converts an error of a pool to one about this tensor.
pub(super) fn no_memory(info: &TensorInfo) -> impl Fn(pool::Error) -> Error {
    |source| Error::Memory {
        tensor: info.name.clone(),
        bytes: info.storage_len,
        source: Arc::new(source),
    }
}

/// Returns the memory of a tensor on a device, or on the host for None: the same memory if it is
/// there, else a copy. Blocks.
///
/// A tensor can arrive during a call that asked for another device.
///
/// # Errors
/// Returns [`Error::Memory`] if a copy failed, or there is too little memory.
pub(super) fn moved(
    memory: &Arc<Memory>,
    info: &TensorInfo,
    device: Option<&Py<Accelerator>>,
) -> Result<Arc<Memory>, Error> {
    if memory.device() == device.map_or((CPU, 0), |device| device.get().dlpack()) {
        return Ok(Arc::clone(memory));
    }
    let bytes = memory.to_host().map_err(no_memory(info))?;
    let Some(device) = device else {
        let buffer = TensorBuffer::cpu(bytes);
        return Memory::from_buffer(buffer, 0).map(Arc::new).map_err(no_memory(info));
    };
    let (mut place, mut offset) = (Place::on_device(device, info)?, 0);
    while offset < bytes.len() {
        let space = place.space(offset as u64, bytes.len() - offset)?;
        let len = space.len();
        space.copy_from_slice(&bytes[offset..][..len]);
        place.filled(offset as u64, len)?;
        offset += len;
    }
    place.finish()
}

impl Sink for Place {
    type Full = Arc<Memory>;

    fn byte_len(&self) -> u64 {
        match self {
            Self::Host(target) => target.byte_len(),
            Self::Device { sink, .. } => sink.byte_len(),
        }
    }

    fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], Error> {
        match self {
            Self::Host(target) => target.space(offset, len),
            Self::Device { sink, .. } => sink.space(offset, len),
        }
    }

    fn filled(&mut self, offset: u64, len: usize) -> Result<(), Error> {
        match self {
            Self::Host(target) => target.filled(offset, len),
            Self::Device { sink, .. } => sink.filled(offset, len),
        }
    }

    fn finish(self) -> Result<Arc<Memory>, Error> {
        match self {
            Self::Host(target) => Ok(target.into_memory()),
            Self::Device { sink, accelerator } => {
                let tensor = sink.tensor().to_owned();
                let buffer = sink.finish()?;
                let bytes = buffer.len() as u64;
                let memory = Memory::on_device(buffer, accelerator);
                let failed = |source| Error::Memory { tensor, bytes, source: Arc::new(source) };
                memory.map(Arc::new).map_err(failed)
            }
        }
    }
}
