// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of tensors that Rust and Python share. Of this crate's two unsafe modules the second.
//!
//! Whoever has a tensor in Python may write to it at any time, as with every library of arrays
//! there; what Rust does with it meanwhile - sends it, or receives to it - then has some of what
//! was and some of what is there.

use std::alloc::Layout;
use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use tensorstream::format::Dtype;
use tensorstream::pool::{PooledBuffer, TensorBuffer};
use tensorstream::remote;
use tensorstream::streams::AnyDevice;

use crate::dlpack::{CPU, CUDA, Imported};

/// Bytes at a fixed address, on the host or a GPU, and what they belong to.
pub(crate) struct Memory {
    data: *mut u8,
    len: usize,
    device: (i32, i32),
    read_only: bool,
    owner: Owner,
}

/// Never looked into, but for copies from a device: it is what keeps the bytes where they are.
enum Owner {
    Buffer(TensorBuffer),
    Pooled { _block: PooledBuffer<AnyDevice> },
    Imported { _tensor: Imported },
    Zeroed { _bytes: Zeroed },
}

/// Zeros of the system's, of which pages are taken when they are first touched.
struct Zeroed {
    bytes: *mut u8,
    layout: Layout,
}

/// As DLPack wants it; jax copies what is aligned to less than 64 bytes.
const ALIGN: usize = 256;

impl Zeroed {
    fn new(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len.checked_add(ALIGN)?, 1).ok()?;
        // SAFETY: the layout is of at least `ALIGN` bytes. It asks for no alignment, lest zeros be
        // written rather than mapped.
        let bytes = unsafe { std::alloc::alloc_zeroed(layout) };
        (!bytes.is_null()).then_some(Self { bytes, layout })
    }
}

impl Drop for Zeroed {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nobody has the memory any more who has its owner.
        unsafe { std::alloc::dealloc(self.bytes, self.layout) };
    }
}

// SAFETY: the address is fixed as long as the owner lives, which is plain memory that any thread
// may use; who may read and write is said above.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// So many zeros on the host, aligned to 256 bytes; None when the system has not so many.
    pub(crate) fn zeros(len: usize) -> Option<Self> {
        let bytes = Zeroed::new(len)?;
        let data = bytes.bytes.wrapping_add(bytes.bytes.align_offset(ALIGN));
        Some(Self {
            data,
            len,
            device: (CPU, 0),
            read_only: false,
            owner: Owner::Zeroed { _bytes: bytes },
        })
    }

    /// That of a buffer, on whichever device it is.
    pub(crate) fn of_buffer(
        mut buffer: TensorBuffer,
        ordinal: i32,
    ) -> Result<Self, tensorstream::pool::Error> {
        let len = buffer.len();
        let (data, device) = match buffer.as_mut_slice() {
            Some(bytes) => (bytes.as_mut_ptr(), (CPU, 0)),
            None => {
                let device = buffer.as_device().expect("it is on the host or on a device");
                (device.range()?.as_ptr(), (CUDA, ordinal))
            }
        };
        Ok(Self { data, len, device, read_only: false, owner: Owner::Buffer(buffer) })
    }

    /// A block of a pool of the host's memory; None of another.
    pub(crate) fn of_pool(mut block: PooledBuffer<AnyDevice>) -> Option<Self> {
        let bytes = block.host_bytes_mut()?;
        let (data, len) = (bytes.as_mut_ptr(), bytes.len());
        Some(Self {
            data,
            len,
            device: (CPU, 0),
            read_only: false,
            owner: Owner::Pooled { _block: block },
        })
    }

    /// That of somebody else's tensor, of which all elements are in these bytes.
    ///
    /// # Safety
    /// They belong to `tensor`.
    pub(crate) unsafe fn of_import(
        tensor: Imported,
        data: *mut u8,
        len: usize,
        device: (i32, i32),
        read_only: bool,
    ) -> Self {
        Self { data, len, device, read_only, owner: Owner::Imported { _tensor: tensor } }
    }

    /// That of a DLPack capsule's tensor, whose elements are contiguous and on the host.
    ///
    /// # Errors
    /// TypeError of another.
    pub(crate) fn of_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Arc<Self>> {
        let imported = Imported::from_capsule(capsule)?;
        let layout = imported.layout()?;
        if layout.strides.is_some() || layout.device.0 != CPU {
            return Err(PyTypeError::new_err(
                "needs a DLPack capsule of contiguous elements on the host",
            ));
        }
        let len = layout.shape.iter().product::<u64>() as usize * layout.dtype.bits() as usize / 8;
        // SAFETY: the elements are contiguous, and belong to what was imported.
        Ok(Arc::new(unsafe {
            Self::of_import(imported, layout.data, len, layout.device, layout.read_only)
        }))
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn device(&self) -> (i32, i32) {
        self.device
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The byte at `offset`, which may be that behind the last.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "offset {offset} of {} bytes", self.len);
        self.data.wrapping_add(offset)
    }

    /// Its bytes, if they are on the host.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        match (self.device.0, self.len) {
            (CPU, 0) => Some(&[]),
            // SAFETY: the owner keeps so many bytes there; who may write to them is said above.
            (CPU, _) => Some(unsafe { std::slice::from_raw_parts(self.data, self.len) }),
            _ => None,
        }
    }

    /// A copy of its bytes on the host.
    pub(crate) fn to_host(&self) -> Result<Vec<u8>, tensorstream::pool::Error> {
        match (&self.owner, self.bytes()) {
            (_, Some(bytes)) => Ok(bytes.to_vec()),
            (Owner::Buffer(buffer), None) => buffer.to_host(),
            (_, None) => unreachable!("these are on the host"),
        }
    }
}

/// A copy of bytes on the host.
///
/// # Safety
/// So many bytes are there, and nobody writes to them meanwhile.
pub(crate) unsafe fn copied(address: usize, len: usize) -> Vec<u8> {
    if len == 0 {
        return Vec::new();
    }
    // SAFETY: this function's contract.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(address), len) }
        .to_vec()
}

/// The bytes as what is sent: they stay where they are.
impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes().expect("what is sent is on the host")
    }
}

/// A handle of some memory on the host.
pub(crate) struct Shared(pub(crate) Arc<Memory>);

/// Memory on the host that a tensor is received to.
pub(crate) struct Target {
    memory: Arc<Memory>,
    offset: usize,
    len: usize,
}

impl Target {
    /// A part of some memory. None where it is read-only or not on the host.
    pub(crate) fn new(memory: Arc<Memory>, offset: usize, len: usize) -> Option<Self> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= memory.len);
        (fits && !memory.read_only && memory.device.0 == CPU).then_some(Self {
            memory,
            offset,
            len,
        })
    }

    /// Fills its first bytes, of which there are as many.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "{} bytes to {}", bytes.len(), self.len);
        // SAFETY: as in `space`, below.
        let own = unsafe {
            std::slice::from_raw_parts_mut(self.memory.data.add(self.offset), bytes.len())
        };
        own.copy_from_slice(bytes);
    }

    pub(crate) fn into_memory(self) -> Arc<Memory> {
        self.memory
    }
}

impl remote::Sink for Target {
    type Full = Self;

    fn byte_len(&self) -> u64 {
        self.len as u64
    }

    fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], remote::Error> {
        let offset = offset as usize;
        assert!(offset + len <= self.len, "{len} bytes at {offset} of {}", self.len);
        // SAFETY: `new` has checked that the part is inside the memory, the line before that this
        // is inside the part; the memory is on the host and not read-only. That nobody else writes
        // there is the caller's of Python.
        Ok(unsafe {
            std::slice::from_raw_parts_mut(self.memory.data.add(self.offset + offset), len)
        })
    }

    fn finish(self) -> Result<Self, remote::Error> {
        Ok(self)
    }
}

/// What a buffer of the buffer protocol borrows from, until it is released.
struct View {
    format: &'static CStr,
    /// Shape, then strides in bytes.
    extents: Vec<isize>,
    _memory: Arc<Memory>,
}

/// Fills what the buffer protocol asks for: <https://docs.python.org/3/c-api/buffer.html>.
///
/// # Errors
/// BufferError when the tensor is not what is asked for.
///
/// # Safety
/// `view` is what the interpreter gave, and `owner` the object it asked.
pub(crate) unsafe fn fill_view(
    owner: Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    memory: &Arc<Memory>,
    (dtype, offset): (Dtype, usize),
    (shape, strides): (&[i64], &[i64]),
) -> PyResult<()> {
    let refused = |what: &str| PyBufferError::new_err(what.to_string());
    let format = format_of(dtype)
        .ok_or_else(|| refused("the buffer protocol has no format for this dtype"))?;
    let bytes = memory.bytes().ok_or_else(|| refused("the tensor is on a GPU"))?;
    if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE && memory.read_only {
        return Err(refused("the tensor is read-only"));
    }
    let itemsize = dtype.bits() as isize / 8;
    let plain = shape.contains(&0) || strides == crate::dlpack::contiguous(shape);
    if !plain && flags & ffi::PyBUF_STRIDES != ffi::PyBUF_STRIDES {
        return Err(refused("the tensor is not contiguous"));
    }
    for asked in [ffi::PyBUF_C_CONTIGUOUS, ffi::PyBUF_F_CONTIGUOUS, ffi::PyBUF_ANY_CONTIGUOUS] {
        // One dimension is contiguous either way.
        if flags & asked == asked
            && !(plain && (asked != ffi::PyBUF_F_CONTIGUOUS || shape.len() < 2))
        {
            return Err(refused("the tensor is not contiguous in the order that is asked for"));
        }
    }
    let mut extents: Vec<isize> = shape.iter().map(|&n| n as isize).collect();
    extents.extend(strides.iter().map(|&stride| stride as isize * itemsize));
    let len = shape.iter().product::<i64>() as isize * itemsize;
    let first = bytes.as_ptr().wrapping_add(offset).cast_mut();
    let mut borrowed = Box::new(View { format, extents, _memory: Arc::clone(memory) });
    // SAFETY: this function's contract. What the pointers point to is in the box, or in the memory
    // that it keeps, until `release_view` drops it.
    unsafe {
        (*view).obj = owner.into_ptr();
        (*view).buf = first.cast();
        (*view).len = len;
        (*view).readonly = c_int::from(memory.read_only);
        (*view).itemsize = itemsize;
        let wants = |flag| flags & flag == flag;
        (*view).format = if wants(ffi::PyBUF_FORMAT) {
            borrowed.format.as_ptr().cast_mut()
        } else {
            std::ptr::null_mut()
        };
        (*view).ndim = shape.len() as c_int;
        let (shape_at, strides_at) = borrowed.extents.split_at_mut(shape.len());
        (*view).shape =
            if wants(ffi::PyBUF_ND) { shape_at.as_mut_ptr() } else { std::ptr::null_mut() };
        (*view).strides =
            if wants(ffi::PyBUF_STRIDES) { strides_at.as_mut_ptr() } else { std::ptr::null_mut() };
        (*view).suboffsets = std::ptr::null_mut();
        (*view).internal = Box::into_raw(borrowed).cast::<c_void>();
    }
    Ok(())
}

/// # Safety
/// `view` was filled by [`fill_view`], and is released once.
pub(crate) unsafe fn release_view(view: *mut ffi::Py_buffer) {
    // SAFETY: this function's contract.
    unsafe { drop(Box::from_raw((*view).internal.cast::<View>())) }
}

fn format_of(dtype: Dtype) -> Option<&'static CStr> {
    Some(match dtype {
        Dtype::Bool => c"?",
        Dtype::U8 => c"B",
        Dtype::I8 => c"b",
        Dtype::U16 => c"H",
        Dtype::I16 => c"h",
        Dtype::U32 => c"I",
        Dtype::I32 => c"i",
        Dtype::U64 => c"Q",
        Dtype::I64 => c"q",
        Dtype::F16 => c"e",
        Dtype::F32 => c"f",
        Dtype::F64 => c"d",
        Dtype::C64 => c"Zf",
        _ => return None,
    })
}
