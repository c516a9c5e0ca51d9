// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that two processes have at once. This crate's fourth unsafe module.
//!
//! No reference to it is given out, for who else has it may write at any time: bytes are copied in
//! and out, as the kernel would do it with a socket's.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use memmap2::{MmapOptions, MmapRaw};

use crate::Error;

/// Memory for another process to read: anonymous, of a fixed length, gone with the last that has
/// it.
///
/// ```
/// use ts_pool::{SharedMemory, SharedView};
///
/// # if cfg!(target_os = "linux") {
/// let mut memory = SharedMemory::create(4096)?;
/// memory.write(100, b"tensor");
/// // The other process has the descriptor by way of a Unix socket.
/// let view = SharedView::open(memory.descriptor(), 4096)?;
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
    /// Zeroed memory of so many bytes. Its pages are taken from the system when they are first
    /// touched.
    ///
    /// # Errors
    /// [`Error::Map`] when the system has no more, or no such thing (others than Linux).
    pub fn create(len: usize) -> Result<Self, Error> {
        let failed = |source| Error::Map { bytes: len, source };
        let descriptor = sealed_descriptor(len).map_err(failed)?;
        let mapping = MmapOptions::new().len(len).map_raw(&descriptor).map_err(failed)?;
        Ok(Self { mapping, descriptor })
    }

    /// What another process opens it by.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty)] // it is never empty: the system maps no such thing
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Copies bytes to it. Who reads at the same time gets some of what was and some of what is
    /// there then.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        let to = at(&self.mapping, offset, bytes.len());
        // SAFETY: `at` has checked that so many bytes of the mapping are there, which is writable
        // and as long as its descriptor: that cannot be shortened. Nobody in this process has a
        // reference to them.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

/// Another process's [`SharedMemory`], to be read.
#[derive(Debug)]
pub struct SharedView {
    mapping: MmapRaw,
}

impl SharedView {
    /// Maps it.
    ///
    /// # Errors
    /// [`Error::Map`] of what is no such memory, or has another length: what could be shortened
    /// while it is read is refused.
    pub fn open(descriptor: BorrowedFd<'_>, len: usize) -> Result<Self, Error> {
        let failed = |source| Error::Map { bytes: len, source };
        check(descriptor, len).map_err(failed)?;
        let mapping = MmapOptions::new().len(len).map_raw_read_only(&descriptor).map_err(failed)?;
        Ok(Self { mapping })
    }

    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty)] // as above
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Copies bytes from it.
    ///
    /// # Panics
    /// If it has not so many.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = at(&self.mapping, offset, into.len());
        // SAFETY: as in `write`; that the other process may write at the same time changes which
        // bytes these are, and nothing else.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
    }

    /// As [`read`](Self::read), by stores that go past the caches, where the processor has such
    /// (x86-64): for parts of what is longer than a cache, whose memory is otherwise read before it
    /// is written.
    ///
    /// # Panics
    /// If it has not so many.
    pub fn read_non_temporal(&self, offset: usize, into: &mut [u8]) {
        let from = at(&self.mapping, offset, into.len());
        // SAFETY: as in `read`.
        unsafe { copy_non_temporal(from, into) };
    }
}

/// # Safety
/// So many bytes can be read at `from` as `into` has, and are no part of it.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_non_temporal(from: *const u8, into: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    /// What goes to memory at a time.
    #[repr(align(64))]
    struct Line([__m128i; 4]);

    // SAFETY: any bytes are a valid line, and nobody else has these.
    let (head, lines, tail) = unsafe { into.align_to_mut::<Line>() };
    // SAFETY: the three parts are the whole of `into`, in order, and as long as `from` is promised
    // to be. Lines are aligned, as stores past the caches must be; the fence orders them before
    // whatever tells others that they are there.
    unsafe {
        from.copy_to_nonoverlapping(head.as_mut_ptr(), head.len());
        let mut from = from.add(head.len());
        for Line(line) in lines {
            let parts = std::array::from_fn::<_, 4, _>(|part| {
                _mm_loadu_si128(from.cast::<__m128i>().add(part))
            });
            for (to, part) in line.iter_mut().zip(parts) {
                _mm_stream_si128(to, part);
            }
            from = from.add(size_of::<Line>());
        }
        _mm_sfence();
        from.copy_to_nonoverlapping(tail.as_mut_ptr(), tail.len());
    }
}

/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_non_temporal(from: *const u8, into: &mut [u8]) {
    // SAFETY: that is what it promises.
    unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
}

fn at(mapping: &MmapRaw, offset: usize, len: usize) -> *mut u8 {
    let fits = offset.checked_add(len).is_some_and(|end| end <= mapping.len());
    assert!(fits, "{len} bytes at {offset} of shared memory of {}", mapping.len());
    // SAFETY: just checked that it stays inside the mapping.
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

    /// Ordinary memory: huge pages of the other's could be taken away again.
    const TMPFS: u64 = 0x0102_1994;

    let seals = fcntl_get_seals(descriptor)?;
    let ordinary = fstatfs(descriptor)?.f_type as u64 == TMPFS;
    if !ordinary || !seals.contains(SealFlags::SHRINK) || fstat(descriptor)?.st_size != len as i64 {
        let what = "shared memory of another length, or one that may change";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
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
    fn what_one_writes_the_other_reads() {
        let mut memory = SharedMemory::create(10_000).unwrap();
        let view = SharedView::open(memory.descriptor(), 10_000).unwrap();
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
            assert_eq!((read[0], read[to - from + 1]), (1, 1), "what is beside it stays");
        }
    }

    #[test]
    fn what_could_be_shortened_is_refused() {
        let memory = SharedMemory::create(4096).unwrap();
        assert!(SharedView::open(memory.descriptor(), 8192).is_err());
        assert!(
            rustix::fs::ftruncate(memory.descriptor(), 0).is_err(),
            "it stays as long as it is"
        );
        let file = rustix::fs::memfd_create("plain", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert!(SharedView::open(file.as_fd(), 4096).is_err());
    }

    #[test]
    #[should_panic(expected = "6 bytes at 4091 of shared memory of 4096")]
    fn nothing_is_written_outside() {
        SharedMemory::create(4096).unwrap().write(4091, &[0; 6]);
    }
}
