// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads tensors, and writes uploads to storages.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use tensorstream::exec::{OpFailure, StorageView, TensorRef};
use tensorstream::remote::Bytes;

use super::failures::{raised, refused};
use super::storages::Storages;
use crate::memory::{Memory, Payload, Target, copy_address};

/// The maximum size of a contiguous host tensor that is copied without PyTorch, in bytes.
const MAX_COPIED_READ: u64 = 4096;

impl Storages {
    /// Returns the elements of a tensor, in row-major order.
    pub(super) fn read(&mut self, py: Python<'_>, tensor: &TensorRef) -> Result<Bytes, OpFailure> {
        if let Some(bytes) = self.read_small(py, tensor)? {
            return Ok(bytes.into());
        }
        let object = self.tensor(py, tensor)?;
        let hooks = &self.backend.hooks;
        let memory = hooks
            .host_bytes
            .bind(py)
            .call1((object,))
            .and_then(|capsule| Memory::from_capsule(&capsule))
            .map_err(|error| raised(py, "cannot read a tensor", &error))?;
        Ok(Bytes::from_owner(Payload(memory)))
    }

    /// Copies the elements of a small, contiguous tensor on the host, and returns `None` for other
    /// tensors. This is faster than a copy by PyTorch, and programs wait for scalars.
    fn read_small(
        &mut self,
        py: Python<'_>,
        tensor: &TensorRef,
    ) -> Result<Option<Vec<u8>>, OpFailure> {
        let view = &tensor.view;
        let element = self.backend.dtype(view.dtype)?.row.bytes;
        let Some(count) =
            view.elements().filter(|&count| count.saturating_mul(element) <= MAX_COPIED_READ)
        else {
            return Ok(None);
        };
        if !self.backend.hooks.on_host
            || view.strides != StorageView::contiguous(view.dtype, view.sizes.clone()).strides
        {
            return Ok(None);
        }
        let storage = self.storage(py, tensor.storage)?;
        let number = |name| {
            let number = storage.call_method0(py, name).and_then(|of| of.extract::<u64>(py));
            number.map_err(|error| raised(py, "cannot read a storage", &error))
        };
        let bytes = number(intern!(py, "nbytes"))?;
        let end = view.offset.checked_add(count).and_then(|end| end.checked_mul(element));
        if end.is_none_or(|end| end > bytes) {
            return Err(refused(format!(
                "cannot read a tensor: {count} elements of {element} bytes at element {} exceed \
                 storage {} of {bytes} bytes",
                view.offset, tensor.storage
            )));
        }
        let first = number(intern!(py, "data_ptr"))?;
        if first == 0 {
            return Err(refused(format!(
                "cannot read a tensor: storage {} has no memory",
                tensor.storage
            )));
        }
        let address = first + view.offset * element;
        // SAFETY: the bytes are inside the storage, which is on the host and which its entry keeps
        // allocated. Only requests of this session write to it, and they run on this thread.
        Ok(Some(unsafe {
            copy_address(address as usize, (count.saturating_mul(element)) as usize)
        }))
    }

    /// Writes bytes to a storage, from `offset` on.
    pub(super) fn write(
        &mut self,
        py: Python<'_>,
        number: u64,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), OpFailure> {
        let mut target = self.upload_target(py, number, offset, bytes.len() as u64)?;
        target.put(bytes);
        self.finish_upload(py, number, offset)
    }

    /// Returns host memory for an upload to a part of a storage. That is the part itself, or
    /// staging memory if the storage is not on the host. Call
    /// [`finish_upload`](Self::finish_upload) afterwards.
    pub(super) fn upload_target(
        &mut self,
        py: Python<'_>,
        number: u64,
        offset: u64,
        bytes: u64,
    ) -> Result<Target, OpFailure> {
        let backend = self.backend.clone();
        self.check_writable([number])?;
        let storage = self.storage(py, number)?;
        let len = self.entry(number)?.bytes;
        if offset.checked_add(bytes).is_none_or(|end| end > len) {
            return Err(refused(format!(
                "cannot write {bytes} bytes at offset {offset}: storage {number} has {len} bytes"
            )));
        }
        let failed = |error: PyErr| {
            raised(py, &format!("cannot receive {bytes} bytes for storage {number}"), &error)
        };
        let capsule = if backend.hooks.on_host {
            backend.hooks.storage_bytes.bind(py).call1((storage, offset, bytes)).map_err(failed)?
        } else {
            let staging = backend.hooks.staging.bind(py).call1((storage, bytes));
            let (tensor, capsule) = staging.and_then(|pair| pair.extract()).map_err(failed)?;
            self.staged = Some(tensor);
            capsule
        };
        let memory: Arc<Memory> = Memory::from_capsule(&capsule).map_err(failed)?;
        Target::new(memory, 0, bytes as usize).ok_or_else(|| {
            refused(format!("cannot write to storage {number}: it has no writable host memory"))
        })
    }

    /// Copies staging memory to the storage, if the upload used it.
    pub(super) fn finish_upload(
        &mut self,
        py: Python<'_>,
        number: u64,
        offset: u64,
    ) -> Result<(), OpFailure> {
        let Some(staged) = self.staged.take() else { return Ok(()) };
        let storage = self.storage(py, number)?;
        let hooks = &self.backend.hooks;
        hooks
            .copy_staged
            .call1(py, (storage, offset, staged))
            .map(drop)
            .map_err(|error| raised(py, &format!("cannot write to storage {number}"), &error))
    }
}
