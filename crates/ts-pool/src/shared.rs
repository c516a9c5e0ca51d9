// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory shared between two processes.
//!
//! This module never returns references to the shared bytes, because the other process may write to
//! them at any time. Bytes are copied in and out, as with a socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use memmap2::{MmapOptions, MmapRaw};

use crate::Error;

/// Anonymous shared memory of a fixed length that another process can read.
///
/// The system frees the memory when no process has a descriptor or a mapping of it any more.
///
/// # Examples
/// ```
/// use ts_pool::{SharedMemory, SharedMemoryView};
///
/// # if cfg!(target_os = "linux") {
/// let mut memory = SharedMemory::create(4096)?;
/// memory.write(100, b"tensor");
/// // The other process receives the descriptor over a Unix socket.
/// let view = SharedMemoryView::open(memory.descriptor(), 4096)?;
/// let mut bytes = [0; 6];
/// view.read(100, &mut bytes);
/// assert_eq!(&bytes, b"tensor");
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SharedMemory {
    mapping: MmapRaw,
    descriptor: OwnedFd,
}

impl SharedMemory {
    /// Creates `len` bytes of zeroed memory. The system allocates its pages on first touch.
    ///
    /// # Errors
    /// Returns [`Error::Map`] if the system cannot create the memory. On systems other than Linux,
    /// `create` always fails.
    pub fn create(len: usize) -> Result<Self, Error> {
        let failed = |source| Error::Map { bytes: len, source };
        let descriptor = sealed_descriptor(len).map_err(failed)?;
        let mapping = MmapOptions::new().len(len).map_raw(&descriptor).map_err(failed)?;
        Ok(Self { mapping, descriptor })
    }

    /// Returns the file descriptor. Another process passes it to [`SharedMemoryView::open`].
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty)] // not useful for a fixed length
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Copies bytes into the memory, starting at byte `offset`.
    ///
    /// A process that reads the same bytes at the same time can see a mix of old and new bytes.
    ///
    /// # Panics
    /// Panics if `offset..offset + bytes.len()` is not inside the memory.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        let to = ptr_at(&self.mapping, offset, bytes.len());
        // SAFETY: `ptr_at` has checked the range. The mapping is writable and as long as its file,
        // which is sealed against shrinking. No reference to these bytes exists in this process.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

/// A read-only mapping of the [`SharedMemory`] of another process.
#[derive(Debug)]
pub struct SharedMemoryView {
    mapping: MmapRaw,
}

impl SharedMemoryView {
    /// Maps the shared memory that `descriptor` refers to, which must have exactly `len` bytes.
    ///
    /// # Errors
    /// Returns [`Error::Map`] if the length differs, or if the file is not a memfd on tmpfs that is
    /// sealed against shrinking. Reading a file that shrinks would crash this process. On systems
    /// other than Linux, `open` always fails.
    pub fn open(descriptor: BorrowedFd<'_>, len: usize) -> Result<Self, Error> {
        let failed = |source| Error::Map { bytes: len, source };
        check(descriptor, len).map_err(failed)?;
        let mapping = MmapOptions::new().len(len).map_raw_read_only(&descriptor).map_err(failed)?;
        Ok(Self { mapping })
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty)] // not useful for a fixed length
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Fills `into` with bytes of the memory, starting at byte `offset`.
    ///
    /// If the other process writes to these bytes at the same time, the copy can be a mix of old
    /// and new bytes.
    ///
    /// # Panics
    /// Panics if `offset..offset + into.len()` is not inside the memory.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = ptr_at(&self.mapping, offset, into.len());
        // SAFETY: `ptr_at` has checked the range, and the file is sealed against shrinking, so the
        // mapping stays readable. `into` is borrowed exclusively. If the other process writes at
        // the same time, only the values of the copied bytes are undetermined.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
    }

    /// Copies bytes like [`read`](Self::read), but with non-temporal stores on x86-64.
    ///
    /// These stores bypass the cache. Use them when the whole payload is larger than the cache:
    /// ordinary stores would first read each cache line of the destination.
    ///
    /// # Panics
    /// Panics if `offset..offset + into.len()` is not inside the memory.
    pub fn read_non_temporal(&self, offset: usize, into: &mut [u8]) {
        let from = ptr_at(&self.mapping, offset, into.len());
        // SAFETY: `ptr_at` has checked the range, and the file is sealed against shrinking. `into`
        // is memory of this process that is borrowed exclusively, so it does not overlap the
        // mapping.
        unsafe { copy_non_temporal(from, into) };
    }
}

/// Copies `into.len()` bytes with stores that bypass the cache.
///
/// # Safety
/// `from` is valid for reads of `into.len()` bytes, and does not overlap `into`.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_non_temporal(from: *const u8, into: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    #[repr(align(64))]
    struct CacheLine([__m128i; 4]);

    // SAFETY: every bit pattern is a valid `CacheLine`, and `into` is borrowed exclusively.
    let (head, lines, tail) = unsafe { into.align_to_mut::<CacheLine>() };
    // SAFETY: the three parts make up `into`, in order, so all reads are inside the range that the
    // caller guarantees to be valid. The lines are aligned, as non-temporal stores require. The
    // fence orders these stores before any later store that publishes the bytes.
    unsafe {
        from.copy_to_nonoverlapping(head.as_mut_ptr(), head.len());
        let mut from = from.add(head.len());
        for CacheLine(line) in lines {
            let parts = std::array::from_fn::<_, 4, _>(|part| {
                _mm_loadu_si128(from.cast::<__m128i>().add(part))
            });
            for (to, part) in line.iter_mut().zip(parts) {
                _mm_stream_si128(to, part);
            }
            from = from.add(size_of::<CacheLine>());
        }
        _mm_sfence();
        from.copy_to_nonoverlapping(tail.as_mut_ptr(), tail.len());
    }
}

/// Copies `into.len()` bytes with ordinary stores.
///
/// # Safety
/// `from` is valid for reads of `into.len()` bytes, and does not overlap `into`.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_non_temporal(from: *const u8, into: &mut [u8]) {
    // SAFETY: the caller guarantees that the ranges are valid and do not overlap.
    unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
}

/// Returns the address of byte `offset`. Panics if `offset..offset + len` is not inside the
/// mapping.
fn ptr_at(mapping: &MmapRaw, offset: usize, len: usize) -> *mut u8 {
    let fits = offset.checked_add(len).is_some_and(|end| end <= mapping.len());
    let total = mapping.len();
    assert!(fits, "range out of bounds: {len} bytes at offset {offset} of {total} shared bytes");
    // SAFETY: the assertion above keeps the result inside the mapping or at its end.
    unsafe { mapping.as_mut_ptr().add(offset) }
}

#[cfg(target_os = "linux")]
fn sealed_descriptor(len: usize) -> io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    let descriptor = memfd_create("tensorstream", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&descriptor, len as u64)?;
    fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(descriptor)
}

#[cfg(target_os = "linux")]
fn check(descriptor: BorrowedFd<'_>, len: usize) -> io::Result<()> {
    use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};

    /// The type of tmpfs, the file system of an ordinary memfd. Memory on hugetlbfs is rejected,
    /// because the other process could remove pages from it.
    const TMPFS: u64 = 0x0102_1994;

    let seals = fcntl_get_seals(descriptor)?;
    let ordinary = fstatfs(descriptor)?.f_type as u64 == TMPFS;
    let (sealed, size) = (seals.contains(SealFlags::SHRINK), fstat(descriptor)?.st_size);
    if !ordinary || !sealed || size != len as i64 {
        let reason = format!(
            "expected a memfd of {len} bytes on tmpfs, sealed against shrinking; got {size} bytes \
             (on tmpfs: {ordinary}, sealed: {sealed})"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn sealed_descriptor(_: usize) -> io::Result<OwnedFd> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn check(_: BorrowedFd<'_>, _: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_view_reads_the_written_bytes() {
        let mut memory = SharedMemory::create(10_000).unwrap();
        let view = SharedMemoryView::open(memory.descriptor(), 10_000).unwrap();
        let bytes: Vec<u8> = (0..5000).map(|i| i as u8).collect();
        memory.write(5000, &bytes);
        drop(memory);
        let mut read = vec![1; 5000];
        view.read(5000, &mut read);
        assert_eq!(read, bytes);
        view.read(0, &mut read);
        assert_eq!(read, [0; 5000]);
        for (from, to) in
            [(5000, 10_000), (5001, 9990), (5090, 5091), (5007, 5013), (10_000, 10_000)]
        {
            let mut read = vec![1; to - from + 2];
            view.read_non_temporal(from, &mut read[1..=to - from]);
            assert_eq!(read[1..=to - from], bytes[from - 5000..to - 5000]);
            assert_eq!((read[0], read[to - from + 1]), (1, 1), "all other bytes are unchanged");
        }
    }

    #[test]
    fn memory_that_could_shrink_is_rejected() {
        let memory = SharedMemory::create(4096).unwrap();
        assert!(SharedMemoryView::open(memory.descriptor(), 8192).is_err());
        assert!(
            rustix::fs::ftruncate(memory.descriptor(), 0).is_err(),
            "the seal prevents shrinking"
        );
        let file = rustix::fs::memfd_create("plain", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert!(SharedMemoryView::open(file.as_fd(), 4096).is_err());
    }

    #[test]
    #[should_panic(expected = "6 bytes at offset 4091 of 4096 shared bytes")]
    fn writing_out_of_bounds_panics() {
        SharedMemory::create(4096).unwrap().write(4091, &[0; 6]);
    }
}
