// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of tensors that Rust and Python share.
//!
//! Python code can write to a tensor at any time, as with NumPy and PyTorch. If it writes while
//! Rust sends the tensor or receives into it, the result is a mixture of old and new bytes.

use std::alloc::Layout;
use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use tensorstream::exec::contiguous_strides;
use tensorstream::format::Dtype;
use tensorstream::pool::{self, DeviceBuffer, PooledBuffer, TensorBuffer};
use tensorstream::remote;
use tensorstream::streams::{AnyDevice, Device};

use crate::accelerator::Accelerator;
use crate::dlpack::{CPU, CUDA, CapsuleBytes, Imported};

/// Bytes at a fixed address, on the host or a GPU, with their owner.
pub(crate) struct Memory {
    data: *mut u8,
    len: usize,
    /// DLPack's device type and device number.
    device: (i32, i32),
    read_only: bool,
    owner: Owner,
}

/// The owner of the bytes, which keeps them at their address.
enum Owner {
    Buffer(TensorBuffer),
    Pooled { _block: PooledBuffer<AnyDevice> },
    Device(DeviceOwner),
    Imported { _tensor: Imported },
    Python { _bytes: PyBuffer<u8> },
    Zeroed { _allocation: ZeroedAllocation },
}

/// Memory of a device, which work on PyTorch's streams may use.
struct DeviceOwner {
    /// None only while this value is dropped.
    buffer: Option<DeviceBuffer<AnyDevice>>,
    accelerator: Py<Accelerator>,
}

impl DeviceOwner {
    /// Copies the bytes to the host, after all work on the device.
    fn to_host(&self) -> Result<Vec<u8>, pool::Error> {
        let buffer = self.buffer.as_ref().expect("only `drop` takes the buffer");
        self.accelerator.get().device().synchronize()?;
        let mut bytes = vec![0; buffer.len()];
        buffer.read(0, &mut bytes)?;
        Ok(bytes)
    }
}

impl Drop for DeviceOwner {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.accelerator.get().release(buffer);
        }
    }
}

/// Zeroed memory from the allocator. The pages of large allocations are mapped when they are first
/// touched.
struct ZeroedAllocation {
    bytes: *mut u8,
    layout: Layout,
}

/// The alignment of allocated memory in bytes, as DLPack requires. JAX copies tensors whose
/// alignment is less than 64 bytes.
const ALIGN: usize = 256;

impl ZeroedAllocation {
    /// Allocates `len` bytes and space to align them. Returns None if there is too little memory.
    fn new(len: usize) -> Option<Self> {
        // With the alignment `ALIGN`, the allocator would write zeros, not map zero pages.
        let layout = Layout::from_size_align(len.checked_add(ALIGN)?, 1).ok()?;
        // SAFETY: the size is at least `ALIGN`, so it is not zero.
        let bytes = unsafe { std::alloc::alloc_zeroed(layout) };
        (!bytes.is_null()).then_some(Self { bytes, layout })
    }
}

impl Drop for ZeroedAllocation {
    fn drop(&mut self) {
        // SAFETY: `new` allocated `bytes` with this layout. The `Memory` that points into them is
        // being dropped too.
        unsafe { std::alloc::dealloc(self.bytes, self.layout) };
    }
}

// SAFETY: the owner keeps the bytes at their address and can be dropped on any thread. The module
// documentation describes concurrent use.
unsafe impl Send for Memory {}
// SAFETY: shared references only read the fields. For the bytes, the reasons for `Send` apply.
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocates zeroed memory on the host, aligned to 256 bytes. Returns None if there is too
    /// little memory.
    pub(crate) fn zeros(len: usize) -> Option<Self> {
        let allocation = ZeroedAllocation::new(len)?;
        let data = allocation.bytes.wrapping_add(allocation.bytes.align_offset(ALIGN));
        Some(Self {
            data,
            len,
            device: (CPU, 0),
            read_only: false,
            owner: Owner::Zeroed { _allocation: allocation },
        })
    }

    /// Takes ownership of a buffer. `ordinal` is the number of its GPU, and is ignored for a
    /// buffer on the host.
    ///
    /// # Errors
    /// Returns [`pool::Error::Stale`] if the memory on the GPU was freed with its stream.
    pub(crate) fn from_buffer(mut buffer: TensorBuffer, ordinal: i32) -> Result<Self, pool::Error> {
        let len = buffer.len();
        let (data, device) = match buffer.as_mut_slice() {
            Some(bytes) => (bytes.as_mut_ptr(), (CPU, 0)),
            None => {
                let device =
                    buffer.as_device().expect("a buffer that is not on the host is on a device");
                (device.range()?.as_ptr(), (CUDA, ordinal))
            }
        };
        Ok(Self { data, len, device, read_only: false, owner: Owner::Buffer(buffer) })
    }

    /// Takes ownership of a block of a pool. Returns None if the block is not on the host.
    pub(crate) fn from_pool(mut block: PooledBuffer<AnyDevice>) -> Option<Self> {
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

    /// Takes ownership of memory of a device, from its [`receiving`](Accelerator::receiving) pool.
    ///
    /// # Errors
    /// Returns [`pool::Error::Stale`] if the memory was freed.
    pub(crate) fn on_device(
        buffer: DeviceBuffer<AnyDevice>,
        accelerator: Py<Accelerator>,
    ) -> Result<Self, pool::Error> {
        let (data, len) = (buffer.range()?.as_ptr(), buffer.len());
        let device = accelerator.get().dlpack();
        let owner = Owner::Device(DeviceOwner { buffer: Some(buffer), accelerator });
        Ok(Self { data, len, device, read_only: false, owner })
    }

    /// Takes ownership of an imported tensor, whose elements are in the `len` bytes at `data`.
    /// `device` is DLPack's device type and device number.
    ///
    /// # Safety
    /// The bytes must be valid until `tensor` is dropped, and writable unless `read_only`.
    pub(crate) unsafe fn from_import(
        tensor: Imported,
        data: *mut u8,
        len: usize,
        device: (i32, i32),
        read_only: bool,
    ) -> Self {
        Self { data, len, device, read_only, owner: Owner::Imported { _tensor: tensor } }
    }

    /// Takes ownership of the tensor in a DLPack capsule.
    ///
    /// # Errors
    /// The same as [`CapsuleBytes::from_capsule`].
    pub(crate) fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Arc<Self>> {
        let bytes = CapsuleBytes::from_capsule(capsule)?;
        let read_only = bytes.is_read_only();
        let (tensor, data, len) = bytes.into_parts();
        // SAFETY: `into_parts` returns the bytes of the tensor. They are valid until the tensor is
        // dropped, and writable unless DLPack marks them as read-only.
        Ok(Arc::new(unsafe { Self::from_import(tensor, data, len, (CPU, 0), read_only) }))
    }

    /// Shares the bytes of a Python object.
    ///
    /// # Errors
    /// BufferError if they are not contiguous.
    pub(crate) fn from_python(bytes: PyBuffer<u8>) -> PyResult<Self> {
        if !bytes.is_c_contiguous() {
            return Err(PyBufferError::new_err("cannot share memory that is not contiguous"));
        }
        let (data, len, read_only) = (bytes.buf_ptr().cast(), bytes.len_bytes(), bytes.readonly());
        Ok(Self { data, len, device: (CPU, 0), read_only, owner: Owner::Python { _bytes: bytes } })
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns DLPack's device type and device number.
    pub(crate) fn device(&self) -> (i32, i32) {
        self.device
    }

    /// Returns PyTorch's name of the device.
    pub(crate) fn device_name(&self) -> String {
        match (&self.owner, self.device) {
            (Owner::Device(own), _) => own.accelerator.get().torch_name().to_owned(),
            (_, (CUDA, ordinal)) => format!("cuda:{ordinal}"),
            _ => "cpu".into(),
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the address of the byte at `offset`, or of the end of the memory.
    ///
    /// # Panics
    /// Panics if `offset` is greater than the length.
    pub(crate) fn address(&self, offset: usize) -> *mut u8 {
        assert!(
            offset <= self.len,
            "offset {offset} is beyond the end of a memory of {} bytes",
            self.len
        );
        self.data.wrapping_add(offset)
    }

    /// Returns the bytes, or None if they are not on the host.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        match (self.device.0, self.len) {
            (CPU, 0) => Some(&[]),
            // SAFETY: the owner keeps `len` bytes at this address. The module documentation
            // describes what happens if Python code writes to them.
            (CPU, _) => Some(unsafe { std::slice::from_raw_parts(self.data, self.len) }),
            _ => None,
        }
    }

    /// Copies the bytes to the host. Blocks if they are on a GPU.
    ///
    /// # Errors
    /// Returns an error if the copy from the GPU fails.
    pub(crate) fn to_host(&self) -> Result<Vec<u8>, pool::Error> {
        match (&self.owner, self.bytes()) {
            (_, Some(bytes)) => Ok(bytes.to_vec()),
            (Owner::Buffer(buffer), None) => buffer.to_host(),
            (Owner::Device(own), None) => own.to_host(),
            (_, None) => unreachable!("only these owners can be on a device"),
        }
    }
}

/// Returns a copy of the `len` bytes of host memory at `address`.
///
/// # Safety
/// The bytes must be readable, and nothing may write to them during the call.
pub(crate) unsafe fn copy_address(address: usize, len: usize) -> Vec<u8> {
    if len == 0 {
        return Vec::new();
    }
    // SAFETY: the caller guarantees that the bytes are readable and that nothing writes to them.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(address), len) }
        .to_vec()
}

/// Host memory that is sent as a payload, without a copy.
pub(crate) struct Payload(pub(crate) Arc<Memory>);

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes().expect("a `Payload` is created only for memory on the host")
    }
}

/// A range of writable host memory that a tensor is received into.
pub(crate) struct Target {
    memory: Arc<Memory>,
    offset: usize,
    len: usize,
}

impl Target {
    /// Returns the range of `len` bytes at `offset`. None if the range is not inside the memory, or
    /// the memory is read-only or not on the host.
    pub(crate) fn new(memory: Arc<Memory>, offset: usize, len: usize) -> Option<Self> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= memory.len);
        (fits && !memory.read_only && memory.device.0 == CPU).then_some(Self {
            memory,
            offset,
            len,
        })
    }

    /// Copies `bytes` to the beginning of the range.
    ///
    /// # Panics
    /// Panics if `bytes` is longer than the range.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        assert!(
            bytes.len() <= self.len,
            "{} bytes do not fit into a range of {} bytes",
            bytes.len(),
            self.len
        );
        // SAFETY: `new` checked that the range is inside writable host memory. The assertion checks
        // that the bytes are inside the range. The Python caller does not use them meanwhile.
        let target = unsafe {
            std::slice::from_raw_parts_mut(self.memory.data.add(self.offset), bytes.len())
        };
        target.copy_from_slice(bytes);
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
        assert!(
            offset + len <= self.len,
            "{len} bytes at offset {offset} exceed a range of {} bytes",
            self.len
        );
        // SAFETY: `new` checked that the range is inside writable host memory. The assertion checks
        // that the bytes are inside the range. The Python caller does not use them meanwhile.
        Ok(unsafe {
            std::slice::from_raw_parts_mut(self.memory.data.add(self.offset + offset), len)
        })
    }

    fn finish(self) -> Result<Self, remote::Error> {
        Ok(self)
    }
}

/// The data that a `Py_buffer` points to until it is released.
struct BufferExport {
    format: &'static CStr,
    /// The shape, followed by the strides in bytes.
    extents: Vec<isize>,
    _memory: Arc<Memory>,
}

/// Fills a `Py_buffer` for the [buffer protocol](https://docs.python.org/3/c-api/buffer.html).
///
/// `offset` is the offset of the first element in `memory`, in bytes. `strides` are in elements.
///
/// # Errors
/// BufferError if the tensor does not satisfy `flags`.
///
/// # Safety
/// `view` must be the structure that the interpreter passed to `__getbuffer__` of `owner`.
pub(crate) unsafe fn fill_buffer(
    owner: Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    memory: &Arc<Memory>,
    (dtype, offset): (Dtype, usize),
    (shape, strides): (&[u64], &[i64]),
) -> PyResult<()> {
    let refused = |why: &str| PyBufferError::new_err(format!("cannot export a buffer: {why}"));
    let format = format_of(dtype).ok_or_else(|| {
        refused(&format!(
            "the buffer protocol has no format for dtype {dtype}; use DLPack or tobytes()"
        ))
    })?;
    let bytes = memory.bytes().ok_or_else(|| {
        refused("the tensor is on a GPU; use to_numpy() or tobytes(), which copy it to the host")
    })?;
    if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE && memory.read_only {
        return Err(refused("the tensor is read-only"));
    }
    let itemsize = dtype.bits() as isize / 8;
    let row_major = shape.contains(&0) || strides == contiguous_strides(shape);
    if !row_major && flags & ffi::PyBUF_STRIDES != ffi::PyBUF_STRIDES {
        return Err(refused(
            "the tensor is not contiguous, and the consumer does not support strides",
        ));
    }
    for order in [ffi::PyBUF_C_CONTIGUOUS, ffi::PyBUF_F_CONTIGUOUS, ffi::PyBUF_ANY_CONTIGUOUS] {
        if flags & order != order {
            continue;
        }
        if !row_major {
            return Err(refused(
                "the consumer requested a contiguous buffer, but the tensor has gaps or is not \
                 row-major",
            ));
        }
        // With fewer than two dimensions, row-major and column-major order are the same.
        if order == ffi::PyBUF_F_CONTIGUOUS && shape.len() >= 2 {
            return Err(refused(
                "the consumer requested column-major order, but the tensor is row-major",
            ));
        }
    }
    let mut extents: Vec<isize> = shape.iter().map(|&n| n as isize).collect();
    extents.extend(strides.iter().map(|&stride| stride as isize * itemsize));
    let len = shape.iter().product::<u64>() as isize * itemsize;
    let first = bytes.as_ptr().wrapping_add(offset).cast_mut();
    let mut export = Box::new(BufferExport { format, extents, _memory: Arc::clone(memory) });
    // SAFETY: `view` comes from the interpreter, so it may be written to. The pointers stored in it
    // point into `export` or into the memory that it owns, until `release_buffer` drops `export`.
    unsafe {
        (*view).obj = owner.into_ptr();
        (*view).buf = first.cast();
        (*view).len = len;
        (*view).readonly = c_int::from(memory.read_only);
        (*view).itemsize = itemsize;
        let wants = |flag| flags & flag == flag;
        (*view).format = if wants(ffi::PyBUF_FORMAT) {
            export.format.as_ptr().cast_mut()
        } else {
            std::ptr::null_mut()
        };
        (*view).ndim = shape.len() as c_int;
        let (shape_ptr, strides_ptr) = export.extents.split_at_mut(shape.len());
        (*view).shape =
            if wants(ffi::PyBUF_ND) { shape_ptr.as_mut_ptr() } else { std::ptr::null_mut() };
        (*view).strides =
            if wants(ffi::PyBUF_STRIDES) { strides_ptr.as_mut_ptr() } else { std::ptr::null_mut() };
        (*view).suboffsets = std::ptr::null_mut();
        (*view).internal = Box::into_raw(export).cast::<c_void>();
    }
    Ok(())
}

/// Frees the data that [`fill_buffer`] attached to a `Py_buffer`.
///
/// # Safety
/// `view` must have been filled by [`fill_buffer`], and must be released only once.
pub(crate) unsafe fn release_buffer(view: *mut ffi::Py_buffer) {
    // SAFETY: `fill_buffer` stored a leaked `BufferExport` in `internal`, which is freed only here.
    unsafe { drop(Box::from_raw((*view).internal.cast::<BufferExport>())) }
}

/// Returns the format of an element in the notation of the buffer protocol (PEP 3118), or None if
/// there is none.
pub(crate) fn format_of(dtype: Dtype) -> Option<&'static CStr> {
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
        Dtype::C128 => c"Zd",
        _ => return None,
    })
}
