// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors of the device `ts`, and the handles that keep their remote storages allocated.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use tensorstream::exec::{Request, StorageView, TensorRef};

use super::addresses::{Addresses, storage_at};
use super::devices::{DeviceEntry, device};
use super::forks::is_forked;
use super::session::Session;
use super::torch::{Torch, torch};
use crate::dlpack;

static NEXT_STORAGE: AtomicU64 = AtomicU64::new(1);
/// Storages of the client itself are numbered apart, so that the user's first one has the number 1.
static NEXT_OWN_STORAGE: AtomicU64 = AtomicU64::new(1 << 40);
/// The number of handles beyond the first one, for each storage that has several.
static EXTRA_HANDLES: Mutex<Option<HashMap<u64, usize>>> = Mutex::new(None);
/// Whether a storage has ever had several handles.
static ANY_EXTRA_HANDLES: AtomicBool = AtomicBool::new(false);

/// Reserves `count` consecutive numbers for storages, and returns the first.
pub(super) fn reserve_storages(count: u64) -> u64 {
    NEXT_STORAGE.fetch_add(count, Ordering::Relaxed)
}

/// Keeps a remote storage allocated. A PyTorch storage owns the handle. Dropping the last handle
/// frees the remote storage.
struct StorageHandle {
    session: Arc<Session>,
    storage: u64,
    /// Is only dropped.
    _addresses: Addresses,
}

impl Drop for StorageHandle {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        if ANY_EXTRA_HANDLES.load(Ordering::Relaxed) {
            let mut extra = EXTRA_HANDLES.lock();
            if let Some(count) = extra.as_mut().and_then(|extra| extra.get_mut(&self.storage)) {
                *count -= 1;
                if *count == 0 {
                    extra.as_mut().map(|extra| extra.remove(&self.storage));
                }
                return;
            }
        }
        self.session.free(self.storage);
    }
}

/// Creates a PyTorch tensor for a view of a remote storage, and a handle of the storage. `bytes` is
/// the size of the storage.
pub(super) fn new_tensor<'py>(
    py: Python<'py>,
    torch: &Torch,
    device: &DeviceEntry,
    tensor: &TensorRef,
    bytes: u64,
) -> PyResult<Bound<'py, PyAny>> {
    let addresses = Addresses::reserve(tensor.storage, bytes);
    tensor_at(py, torch, device, tensor, addresses, bytes)
}

/// Like [`new_tensor`], for the `bytes` bytes of a storage that have these addresses.
fn tensor_at<'py>(
    py: Python<'py>,
    torch: &Torch,
    device: &DeviceEntry,
    tensor: &TensorRef,
    addresses: Addresses,
    bytes: u64,
) -> PyResult<Bound<'py, PyAny>> {
    let address = (addresses.begin(), device.index);
    let handle = Box::new(StorageHandle {
        session: device.session.clone(),
        storage: tensor.storage,
        _addresses: addresses,
    });
    let view = &tensor.view;
    let row = torch.row(view.dtype)?;
    let is_whole = view.offset == 0 && extent(view) * row.bytes == bytes;
    // PyTorch gives the storage the size of the tensor in the capsule. If the view is smaller, the
    // capsule has a tensor of the whole storage.
    let (shape, strides) = if is_whole {
        (view.sizes.iter().map(|&size| size as i64).collect(), view.strides.clone())
    } else {
        (vec![(bytes / row.bytes) as i64], vec![1])
    };
    let capsule = dlpack::extension(py, address, row.dlpack, shape, strides, handle)?;
    let base = torch.from_dlpack.bind(py).call1((capsule,))?;
    if is_whole {
        return Ok(base);
    }
    torch.hooks.as_strided.bind(py).call1((base, &view.sizes, &view.strides, view.offset))
}

/// Returns the number of elements from the start of the storage to the end of a view.
fn extent(view: &StorageView) -> u64 {
    if view.sizes.contains(&0) {
        return 0;
    }
    let reach = |(&size, &stride): (&u64, &i64)| (size - 1).saturating_mul(stride.max(0) as u64);
    let last =
        view.sizes.iter().zip(&view.strides).map(reach).fold(view.offset, u64::saturating_add);
    last.saturating_add(1)
}

/// Creates a tensor of zeros on `ts:index`. The machine allocates its memory on the first use.
///
/// With `own`, it is not a tensor of the user.
#[pyfunction]
#[pyo3(signature = (index, sizes, strides, dtype, own=false))]
pub(crate) fn remote_empty<'py>(
    py: Python<'py>,
    index: u32,
    sizes: Vec<u64>,
    strides: Vec<i64>,
    dtype: &Bound<'py, PyAny>,
    own: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let (torch, device) = (torch(py)?, device(py, index)?);
    let dtype = torch.scalar_type(dtype)?;
    let view = StorageView { dtype, sizes, strides, offset: 0 };
    let bytes = extent(&view).saturating_mul(torch.row(dtype)?.bytes);
    let storage = match own {
        true => NEXT_OWN_STORAGE.fetch_add(1, Ordering::Relaxed),
        false => reserve_storages(1),
    };
    device.session.submit(py, &Request::Create { storage, bytes, device: device.ordinal })?;
    new_tensor(py, torch, &device, &TensorRef { storage, view }, bytes)
}

/// Creates a one-dimensional tensor of a whole existing storage, or of a part of one, which PyTorch
/// has as a storage too.
///
/// `address` is the data pointer of the storage or part, and `bytes` its size in bytes. With
/// `resized`, first resizes the remote storage to `bytes`.
#[pyfunction]
#[pyo3(signature = (index, address, bytes, dtype, resized=false))]
pub(crate) fn remote_whole<'py>(
    py: Python<'py>,
    index: u32,
    address: u64,
    bytes: u64,
    dtype: &Bound<'py, PyAny>,
    resized: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let (torch, device) = (torch(py)?, device(py, index)?);
    let unknown = || {
        PyTypeError::new_err(format!(
            "invalid address {address:#x}: expected the storage of a tensor on a ts device"
        ))
    };
    let (storage, begin) = storage_at(address).ok_or_else(unknown)?;
    let dtype = torch.scalar_type(dtype)?;
    let element = torch.row(dtype)?.bytes;
    let count = bytes / element;
    let addresses = if resized {
        if begin != 0 {
            let words = "Trying to resize storage that is not resizable"; // PyTorch's
            return Err(PyRuntimeError::new_err(words));
        }
        device.session.submit(py, &Request::Resize { storage, bytes })?;
        device.session.invalidate_scalars([storage].into_iter());
        Addresses::reserve(storage, count * element)
    } else {
        Addresses::from(address).ok_or_else(unknown)?
    };
    {
        let mut extra = EXTRA_HANDLES.lock();
        *extra.get_or_insert_default().entry(storage).or_default() += 1;
        ANY_EXTRA_HANDLES.store(true, Ordering::Relaxed);
    }
    let tensor = TensorRef { storage, view: StorageView::contiguous(dtype, vec![count]) };
    tensor_at(py, torch, &device, &tensor, addresses, count * element)
}

/// Returns the number of a tensor's storage and the hash that identifies the tensor in logs, or
/// None if the tensor is not on a ts device.
#[pyfunction]
pub(crate) fn remote_names(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
) -> PyResult<Option<(u64, u64)>> {
    Ok(torch(py)?.describe(tensor)?.map(|(_, tensor)| (tensor.storage, tensor.metadata_hash())))
}
