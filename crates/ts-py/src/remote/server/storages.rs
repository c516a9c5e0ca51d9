// SPDX-License-Identifier: MIT OR Apache-2.0
//! The storages of a session.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PySlice;
use tensorstream::exec::{OpFailure, OpFailureKind, StorageView, TensorRef};

use super::failures::{raised, refused};
use super::hooks::{Backend, Hooks};
use super::streamed::StreamedTensor;

/// The maximum number of views that are cached for a storage.
const MAX_VIEWS: usize = 8;
/// The maximum number of storages of a session.
const MAX_STORAGES: usize = 1 << 20;

/// The storages of a session, by the numbers that the client has given them.
pub(super) struct Storages {
    pub(super) backend: Arc<Backend>,
    entries: HashMap<u64, StorageEntry>,
    /// The identities of all allocated storages. No two of these storages have the same identity.
    pub(super) identities: HashSet<usize>,
    /// The number of entries that stream.
    pub(super) streamed: usize,
    /// The storages that stream and are in memory for the request that is running.
    pub(super) leased: HashMap<u64, Leased>,
    /// The host memory for the upload in progress, if its storage is not on the host.
    pub(super) staged: Option<Py<PyAny>>,
}

/// A streamed storage in memory, while an operator uses it.
pub(super) struct Leased {
    pub(super) storage: Py<PyAny>,
    /// The [`identity`] of `storage`.
    pub(super) identity: usize,
}

/// A storage of a session.
pub(super) struct StorageEntry {
    pub(super) bytes: u64,
    /// The position of its device among those of the machine.
    pub(super) device: u32,
    /// The [`identity`] of `storage`, or 0 before it is allocated.
    pub(super) identity: usize,
    /// PyTorch's storage. `None` until the first use.
    pub(super) storage: Option<Py<PyAny>>,
    /// The tensor that streams to this storage, whose `storage` is then always `None`.
    pub(super) streamed: Option<Py<StreamedTensor>>,
    /// The latest tensors of this storage, by their layouts.
    pub(super) views: Vec<(StorageView, Py<PyAny>)>,
}

impl Storages {
    pub(super) fn new(backend: Arc<Backend>) -> Self {
        let (entries, identities) = (HashMap::new(), HashSet::new());
        Self { backend, entries, identities, streamed: 0, leased: HashMap::new(), staged: None }
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        self.entries.contains_key(&number)
    }

    /// Returns whether an entry has the storage with this identity.
    pub(super) fn contains_identity(&self, identity: usize) -> bool {
        self.identities.contains(&identity)
    }

    /// Returns an entry.
    ///
    /// # Errors
    /// Returns a failure of kind `Stale` if no entry has this number.
    pub(super) fn entry(&mut self, number: u64) -> Result<&mut StorageEntry, OpFailure> {
        self.entries.get_mut(&number).ok_or_else(|| {
            let what = format!(
                "storage {number} does not exist: it was freed, or the call that should have \
                 created it failed"
            );
            OpFailure::new(OpFailureKind::Stale, what)
        })
    }

    /// Returns PyTorch's storage. Allocates it on the first use.
    pub(super) fn storage(&mut self, py: Python<'_>, number: u64) -> Result<Py<PyAny>, OpFailure> {
        let entry = self.entry(number)?;
        if let Some(storage) = &entry.storage {
            return Ok(storage.clone_ref(py));
        }
        if entry.streamed.is_some() {
            self.lease(py, [number])?;
            return Ok(self.leased[&number].storage.clone_ref(py));
        }
        let (bytes, device) = (entry.bytes, entry.device as usize);
        let failed = |error: PyErr| raised(py, &format!("cannot allocate {bytes} bytes"), &error);
        let Hooks { allocate, devices, .. } = &self.backend.hooks;
        let storage = allocate.call1(py, (bytes, &devices[device])).map_err(failed)?;
        let identity = identity(storage.bind(py)).map_err(failed)?;
        let entry = self.entry(number)?;
        (entry.storage, entry.identity) = (Some(storage.clone_ref(py)), identity);
        self.identities.insert(identity);
        Ok(storage)
    }

    /// Returns the PyTorch tensor for a view of a storage.
    pub(super) fn tensor(
        &mut self,
        py: Python<'_>,
        tensor: &TensorRef,
    ) -> Result<Py<PyAny>, OpFailure> {
        let entry = self.entry(tensor.storage)?;
        if let Some((_, cached)) = entry.views.iter().find(|(view, _)| *view == tensor.view) {
            return Ok(cached.clone_ref(py));
        }
        let storage = self.storage(py, tensor.storage)?;
        let dtype = &self.backend.dtype(tensor.view.dtype)?.object;
        let StorageView { sizes, strides, offset, .. } = &tensor.view;
        let created = self
            .backend
            .hooks
            .view
            .call1(py, (storage, dtype, sizes, strides, offset))
            .map_err(|error| {
            raised(py, &format!("cannot create a view of storage {}", tensor.storage), &error)
        })?;
        let entry = self.entry(tensor.storage)?;
        if entry.streamed.is_some() {
            return Ok(created);
        }
        let views = &mut entry.views;
        if views.len() >= MAX_VIEWS {
            views.remove(0);
        }
        views.push((tensor.view.clone(), created.clone_ref(py)));
        Ok(created)
    }

    /// Creates a storage of zeros. Its memory is allocated on the first use.
    pub(super) fn create(&mut self, number: u64, bytes: u64, device: u32) -> Result<(), OpFailure> {
        self.backend.device(device)?;
        if self.contains(number) {
            return Err(exists(number));
        }
        self.check_count()?;
        let (storage, streamed, views) = (None, None, Vec::new());
        let entry = StorageEntry { bytes, device, identity: 0, storage, streamed, views };
        self.entries.insert(number, entry);
        Ok(())
    }

    /// Adds an entry for a tensor that streams.
    pub(super) fn insert_streamed(
        &mut self,
        number: u64,
        tensor: Py<StreamedTensor>,
    ) -> Result<(), OpFailure> {
        if self.contains(number) {
            return Err(exists(number));
        }
        self.create(number, tensor.get().bytes, 0)?;
        self.entry(number)?.streamed = Some(tensor);
        self.streamed += 1;
        Ok(())
    }

    pub(super) fn is_streamed(&self, number: u64) -> bool {
        self.streamed > 0 && self.entries.get(&number).is_some_and(|entry| entry.streamed.is_some())
    }

    /// Adds an entry for an allocated storage that no entry has yet.
    pub(super) fn insert(&mut self, number: u64, entry: StorageEntry) -> Result<(), OpFailure> {
        self.check_count()?;
        self.identities.insert(entry.identity);
        self.entries.insert(number, entry);
        Ok(())
    }

    fn check_count(&self) -> Result<(), OpFailure> {
        if self.entries.len() < MAX_STORAGES {
            return Ok(());
        }
        Err(OpFailure::new(
            OpFailureKind::OutOfMemory,
            format!(
                "too many storages: a session can have at most {MAX_STORAGES}; delete tensors that \
                 are not needed"
            ),
        ))
    }

    /// Changes the length of a storage, in bytes. Keeps the bytes up to the shorter of both
    /// lengths. New bytes are zero.
    pub(super) fn resize(
        &mut self,
        py: Python<'_>,
        number: u64,
        bytes: u64,
    ) -> Result<(), OpFailure> {
        self.check_writable([number])?;
        let storage = self.storage(py, number)?;
        let old = self.entry(number)?.bytes;
        resize(storage.bind(py), old, bytes).map_err(|error| {
            raised(py, &format!("cannot resize storage {number} to {bytes} bytes"), &error)
        })?;
        let entry = self.entry(number)?;
        entry.bytes = bytes;
        entry.views.clear();
        Ok(())
    }

    /// Frees a storage, if it exists. Call this with the interpreter attached, because Python
    /// objects are dropped.
    pub(super) fn free(&mut self, number: u64) {
        let Some(entry) = self.entries.remove(&number) else { return };
        if entry.storage.is_some() {
            self.identities.remove(&entry.identity);
        }
        self.streamed -= usize::from(entry.streamed.is_some());
    }

    /// Returns the number, bytes and device of each storage, and whether the storage is allocated.
    pub(super) fn list(&self) -> Vec<(u64, u64, u32, bool)> {
        let row = |(&number, entry): (&u64, &StorageEntry)| {
            (number, entry.bytes, entry.device, entry.storage.is_some())
        };
        self.entries.iter().map(row).collect()
    }
}

/// Resizes a PyTorch storage of `old` bytes to `new` bytes, and sets new bytes to zero. PyTorch
/// leaves them as the allocator returned them.
fn resize(storage: &Bound<'_, PyAny>, old: u64, new: u64) -> PyResult<()> {
    let py = storage.py();
    storage.call_method1(intern!(py, "resize_"), (new,))?;
    if new > old {
        let added = PySlice::new(py, old as isize, new as isize, 1);
        storage.get_item(added)?.call_method1(intern!(py, "fill_"), (0,))?;
    }
    Ok(())
}

/// Creates the failure for a storage number that is already in use.
pub(super) fn exists(number: u64) -> OpFailure {
    refused(format!("cannot create storage {number}: it already exists"))
}

/// Returns a number that distinguishes a PyTorch storage from all others that exist.
pub(super) fn identity(storage: &Bound<'_, PyAny>) -> PyResult<usize> {
    storage.getattr(intern!(storage.py(), "_cdata"))?.extract()
}
