// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies elements between the host and tensors on the device `ts`.

use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyFloat};
use tensorstream::exec::{Answer, Request, TensorRef};
use tensorstream::remote::Bytes;

use super::devices::{DeviceEntry, device};
use super::scalar_prefetch::Lookup;
use super::session::{SIGNAL_INTERVAL, Session};
use super::torch::{Torch, torch};
use crate::memory::{Memory, Payload, Target};

/// Uploads of at most this size, in bytes, are copied, so that the caller need not wait for the
/// machine.
const MAX_COPIED_UPLOAD: usize = 4 << 20;

/// Writes host memory to a storage, from `offset` bytes on.
///
/// Blocks until the caller may reuse `memory`. If the bytes are copied, that is when the copy is
/// queued, otherwise when the machine has received the bytes.
pub(super) fn upload(
    py: Python<'_>,
    session: &Session,
    storage: u64,
    offset: u64,
    memory: Arc<Memory>,
) -> PyResult<()> {
    let _guard = session.begin_upload();
    let client = session.client(py)?;
    let borrows = memory.len() > MAX_COPIED_UPLOAD;
    let bytes = if borrows {
        Bytes::from_owner(Payload(memory))
    } else {
        Bytes::copy_from_slice(memory.bytes().unwrap_or_default())
    };
    let written = py.detach(|| client.write(storage, offset, bytes));
    session.invalidate_scalars([storage].into_iter());
    written.map_err(|error| session.connection_error(py, &error))?;
    while borrows
        && !py
            .detach(|| client.delivered_within(SIGNAL_INTERVAL))
            .map_err(|error| session.connection_error(py, &error))?
    {
        py.check_signals()?;
    }
    Ok(())
}

/// Reads the elements of a tensor into host memory of the same size. Blocks.
pub(super) fn download(
    py: Python<'_>,
    session: &Session,
    tensor: TensorRef,
    memory: Arc<Memory>,
) -> PyResult<()> {
    let len = memory.len();
    let target = Target::new(memory, 0, len).ok_or_else(|| {
        PyTypeError::new_err("cannot read a tensor: the target is not writable host memory")
    })?;
    let client = session.client(py)?;
    let reply = py
        .detach(|| client.read(tensor, target))
        .map_err(|error| session.connection_error(py, &error))?;
    session.wait(py, reply, "copy to the host").map(drop)
}

/// Returns the bytes of a tensor of one element. Blocks unless the element is cached.
fn read_scalar(py: Python<'_>, session: &Session, tensor: TensorRef) -> PyResult<Vec<u8>> {
    let mut reply = session.client(py)?.new_reply();
    let storage = tensor.storage;
    let found = session.scalars.lock().lookup(storage, &tensor.view, reply);
    match found {
        Lookup::Known(bytes) => return Ok(bytes),
        Lookup::Prefetched(prefetched) => reply = prefetched,
        Lookup::Unknown => {
            let request = session.submit(py, &Request::Read { reply, tensor })?;
            session.record_call_site(py, request, "item")?;
        }
    }
    let answer = session.wait(py, reply, "item");
    let bytes = match &answer {
        Ok(Answer::Bytes(bytes)) => Some(&bytes[..]),
        _ => None,
    };
    session.scalars.lock().complete(storage, reply, bytes);
    match answer? {
        Answer::Bytes(bytes) => Ok(bytes),
        other => Err(session.unexpected_reply("the elements of a tensor", &other)),
    }
}

/// Returns the only element of a tensor. Blocks unless the element is cached.
///
/// Returns:
///     A bool, int or float for the dtypes bool, uint8, int8 to int64, float32 and float64. The
///     bytes of the element for other dtypes.
#[pyfunction]
pub(crate) fn remote_scalar<'py>(
    py: Python<'py>,
    tensor: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let (device, tensor) = on_device(py, torch(py)?, tensor)?;
    let dtype = tensor.view.dtype;
    let bytes = read_scalar(py, &device.session, tensor)?;
    // The numbers are those of PyTorch's dtypes, as in the table of dtype.rs.
    Ok(match (dtype.0, &bytes[..]) {
        (0, &[a]) => a.into_pyobject(py)?.into_any(),
        (1, &[a]) => (a as i8).into_pyobject(py)?.into_any(),
        (2, &[a, b]) => i16::from_le_bytes([a, b]).into_pyobject(py)?.into_any(),
        (3, &[a, b, c, d]) => i32::from_le_bytes([a, b, c, d]).into_pyobject(py)?.into_any(),
        (4, &[a, b, c, d, e, f, g, h]) => {
            i64::from_le_bytes([a, b, c, d, e, f, g, h]).into_pyobject(py)?.into_any()
        }
        (6, &[a, b, c, d]) => {
            PyFloat::new(py, f64::from(f32::from_le_bytes([a, b, c, d]))).into_any()
        }
        (7, &[a, b, c, d, e, f, g, h]) => {
            PyFloat::new(py, f64::from_le_bytes([a, b, c, d, e, f, g, h])).into_any()
        }
        (11, &[a]) => PyBool::new(py, a != 0).to_owned().into_any(),
        (_, bytes) => PyBytes::new(py, bytes).into_any(),
    })
}

/// Copies a capsule of contiguous host memory to the elements of a tensor, which must be
/// contiguous. Blocks until the caller may reuse the memory of the capsule.
#[pyfunction]
pub(crate) fn remote_upload(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    capsule: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let torch = torch(py)?;
    let (device, tensor) = on_device(py, torch, tensor)?;
    let memory = Memory::from_capsule(capsule)?;
    let offset = tensor.view.offset * torch.row(tensor.view.dtype)?.bytes;
    upload(py, &device.session, tensor.storage, offset, memory)
}

/// Copies the elements of a tensor to a capsule of contiguous host memory. Blocks.
#[pyfunction]
pub(crate) fn remote_download(
    py: Python<'_>,
    tensor: &Bound<'_, PyAny>,
    capsule: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (device, tensor) = on_device(py, torch(py)?, tensor)?;
    download(py, &device.session, tensor, Memory::from_capsule(capsule)?)
}

/// Returns the device of a tensor, and its remote storage and view.
///
/// # Errors
/// TypeError if the tensor is not on a ts device.
fn on_device(
    py: Python<'_>,
    torch: &Torch,
    tensor: &Bound<'_, PyAny>,
) -> PyResult<(DeviceEntry, TensorRef)> {
    let Some((index, described)) = torch.describe(tensor)? else {
        let device =
            tensor.getattr("device").map_or_else(|_| "?".into(), |device| device.to_string());
        let what = format!("expected a tensor on a ts device, got one on {device}");
        return Err(PyTypeError::new_err(what));
    };
    Ok((device(py, index)?, described))
}
