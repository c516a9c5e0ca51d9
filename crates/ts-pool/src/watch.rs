// SPDX-License-Identifier: MIT OR Apache-2.0
//! Detects writes to memory that should not change.
//!
//! The kernel write-protects pages with userfaultfd. In mode `WP_ASYNC`, the first write to a page
//! removes the protection and continues without a notification. The ioctl `PAGEMAP_SCAN` then lists
//! the pages that lost their protection. Linux has supported both since version 6.7.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use crate::arena::BLOCK_ALIGN;
use crate::buffer::SharedBuffer;
use crate::pool::HostPool;

/// Detects writes to buffers of a [`HostPool`] that should not change.
///
/// It detects writes by any code in this process, and writes by the kernel in system calls. It does
/// not detect writes by devices (DMA).
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use ts_pool::{Budget, HostPool, WriteWatch};
///
/// let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20)?;
/// let buffer = pool.allocate(8192)?.freeze();
/// // `try_new` returns `None` if the system does not support watching.
/// if let Some(watch) = WriteWatch::try_new(&pool).map(Arc::new) {
///     let watched = watch.watch(buffer).expect("the buffer is from this pool");
///     assert!(watched.written().is_empty());
/// }
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug)]
pub struct WriteWatch {
    userfaultfd: OwnedFd,
    pagemap: File,
    pool: HostPool,
}

/// A buffer that is watched for writes until this value is dropped.
#[derive(Debug)]
pub struct WatchedBuffer {
    watch: Arc<WriteWatch>,
    buffer: SharedBuffer,
}

impl WriteWatch {
    /// Creates a watch for the buffers of `pool`.
    ///
    /// Returns `None` if watching is not possible:
    ///
    /// - on systems other than Linux, on Linux before 6.7, and if pages are larger than
    ///   [`BLOCK_ALIGN`];
    /// - in a sandbox that forbids the system calls;
    /// - if the size of the pool is 0 bytes, or its memory is pinned memory of a device.
    pub fn try_new(pool: &HostPool) -> Option<Self> {
        if rustix::param::page_size() > BLOCK_ALIGN || pool.stats().capacity_bytes == 0 {
            return None;
        }
        // SAFETY: the descriptor is used only for asynchronous write protection. The kernel itself
        // resolves such faults, so no thread ever blocks on a fault.
        let created = unsafe {
            userfaultfd(
                UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY),
            )
        };
        let (userfaultfd, pagemap) = (created.ok()?, File::open("/proc/self/pagemap").ok()?);
        let features = FEATURE_WP | FEATURE_WP_UNPOPULATED | FEATURE_WP_ASYNC;
        run(&userfaultfd, API, &mut UffdioApi { api: 0xaa, features, ioctls: 0 }).ok()?;
        let range = pool.as_ptr_range();
        let span = UffdioRange {
            start: range.start.addr() as u64,
            len: (range.end.addr() - range.start.addr()) as u64,
        };
        let mut register = UffdioRegister { range: span, mode: REGISTER_WP, ioctls: 0 };
        run(&userfaultfd, REGISTER, &mut register).ok()?;
        let watch = Self { userfaultfd, pagemap, pool: pool.clone() };
        // Scans once to check that the kernel also supports `PAGEMAP_SCAN`.
        watch.scan(range.start.addr()..range.start.addr() + BLOCK_ALIGN).ok()?;
        Some(watch)
    }

    /// Starts to watch a buffer of the pool that this watch was created for.
    ///
    /// # Errors
    /// Returns the buffer if it is from another pool, or if the kernel cannot write-protect it.
    pub fn watch(self: &Arc<Self>, buffer: SharedBuffer) -> Result<WatchedBuffer, SharedBuffer> {
        let (pool, bytes) = (self.pool.as_ptr_range(), buffer.as_ptr_range());
        if bytes.start < pool.start || bytes.end > pool.end || self.protect(&buffer, true).is_err()
        {
            return Err(buffer);
        }
        Ok(WatchedBuffer { watch: Arc::clone(self), buffer })
    }

    /// Returns whether any of the buffers may have been written to since its watch began.
    ///
    /// Adjacent buffers are scanned together. Each run of adjacent buffers takes about half a
    /// microsecond, plus the time that [`WatchedBuffer::written`] takes for its pages. If the scan
    /// of a run fails, its buffers count as not written.
    pub fn any_written<'a>(watched: impl IntoIterator<Item = &'a WatchedBuffer>) -> bool {
        let mut pages: Vec<_> = watched
            .into_iter()
            .map(|watched| (pages_of(&watched.buffer), &watched.watch))
            .collect();
        pages.sort_unstable_by_key(|(pages, _)| pages.start);
        let runs =
            pages.chunk_by(|(a, of_a), (b, of_b)| a.end == b.start && Arc::ptr_eq(of_a, of_b));
        runs.filter_map(|run| run.first().zip(run.last())).any(|((first, watch), (last, _))| {
            watch.scan(first.start..last.end).is_ok_and(|found| !found.is_empty())
        })
    }

    /// Adds or removes the write protection of the pages of a buffer.
    fn protect(&self, buffer: &SharedBuffer, protect: bool) -> Result<(), Errno> {
        let pages = pages_of(buffer);
        if protect {
            // Populating a page would look like a write.
            self.pool.settle(pages.clone());
        }
        let range = UffdioRange { start: pages.start as u64, len: pages.len() as u64 };
        let mut argument = UffdioWriteProtect { range, mode: u64::from(protect) };
        match run(&self.userfaultfd, WRITE_PROTECT, &mut argument) {
            Err(Errno::NOENT) if protect => {
                // Other pages were mapped over the buffer, and these are not registered yet.
                let range = UffdioRange { ..argument.range };
                let mut register = UffdioRegister { range, mode: REGISTER_WP, ioctls: 0 };
                run(&self.userfaultfd, REGISTER, &mut register)?;
                run(&self.userfaultfd, WRITE_PROTECT, &mut argument).map(drop)
            }
            result => result.map(drop),
        }
    }

    /// Returns the address ranges inside `pages` that have lost their write protection.
    fn scan(&self, pages: Range<usize>) -> Result<Vec<Range<usize>>, Errno> {
        let mut found: Vec<Range<usize>> = Vec::new();
        let (mut start, end) = (pages.start as u64, pages.end as u64);
        while start < end {
            let mut regions = [PageRegion::default(); 32];
            let mut scan = PmScanArg {
                size: size_of::<PmScanArg>() as u64,
                flags: SCAN_CHECK_WPASYNC,
                start,
                end,
                walk_end: 0,
                regions: regions.as_mut_ptr().expose_provenance() as u64,
                region_count: regions.len() as u64,
                max_pages: 0,
                category_inverted: 0,
                category_mask: IS_WRITTEN,
                category_any_of: 0,
                return_mask: IS_WRITTEN,
            };
            let count = run(&self.pagemap, PAGEMAP_SCAN, &mut scan)?;
            found.extend(
                regions[..count].iter().map(|region| region.start as usize..region.end as usize),
            );
            start = scan.walk_end;
        }
        Ok(found)
    }
}

impl WatchedBuffer {
    /// Returns the byte ranges of the buffer that may have been written to since the watch began,
    /// in ascending order.
    ///
    /// The ranges are whole pages, clipped to the buffer. If the scan fails, the result is empty. A
    /// scan of 64 MiB takes about ten microseconds with small pages, and less with huge pages.
    pub fn written(&self) -> Vec<Range<usize>> {
        let (base, len) = (self.buffer.as_ptr().addr(), self.buffer.len());
        let found = self.watch.scan(pages_of(&self.buffer)).unwrap_or_default();
        found
            .into_iter()
            .map(|pages| pages.start.saturating_sub(base)..(pages.end - base).min(len))
            .collect()
    }

    /// Returns the watched buffer.
    pub fn buffer(&self) -> &SharedBuffer {
        &self.buffer
    }
}

impl Drop for WatchedBuffer {
    /// Removes the write protection, so that writes by the next owner of the memory cause no
    /// faults.
    fn drop(&mut self) {
        let _ = self.watch.protect(&self.buffer, false);
    }
}

/// Returns the addresses of the pages that contain a buffer.
fn pages_of(buffer: &SharedBuffer) -> Range<usize> {
    let page = rustix::param::page_size();
    let bytes = buffer.as_ptr_range();
    let start = bytes.start.addr();
    start - start % page..bytes.end.addr().next_multiple_of(page)
}

// The constants and structures below are from linux/userfaultfd.h and linux/fs.h.

const USER_MODE_ONLY: u32 = 1;
const FEATURE_WP: u64 = 1;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const REGISTER_WP: u64 = 1 << 1;
const IS_WRITTEN: u64 = 1 << 1;
/// Makes the scan fail for memory that is not registered in mode `WP_ASYNC`.
const SCAN_CHECK_WPASYNC: u64 = 1 << 1;

const API: Opcode = opcode::read_write::<UffdioApi>(0xaa, 0x3f);
const REGISTER: Opcode = opcode::read_write::<UffdioRegister>(0xaa, 0x00);
const WRITE_PROTECT: Opcode = opcode::read_write::<UffdioWriteProtect>(0xaa, 0x06);
const PAGEMAP_SCAN: Opcode = opcode::read_write::<PmScanArg>(b'f', 16);

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioWriteProtect {
    range: UffdioRange,
    mode: u64,
}

#[repr(C)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    /// Address where the scan stopped. It is below `end` if `regions` is full.
    walk_end: u64,
    regions: u64,
    region_count: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_of: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// An ioctl that returns a count, with an argument that the kernel reads and writes.
struct Request<'a, T> {
    opcode: Opcode,
    argument: &'a mut T,
}

// SAFETY: the pointer refers to a structure of the size that the opcode encodes. The structure is
// borrowed during the call, and every bit pattern is a valid value for it.
unsafe impl<T> Ioctl for Request<'_, T> {
    type Output = usize;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::from_mut(self.argument).cast()
    }

    unsafe fn output_from_ptr(
        output: IoctlOutput,
        _: *mut std::ffi::c_void,
    ) -> Result<usize, Errno> {
        Ok(output as usize)
    }
}

fn run<T>(descriptor: impl AsFd, opcode: Opcode, argument: &mut T) -> Result<usize, Errno> {
    // SAFETY: the opcode matches the type of the argument. The only argument that contains a
    // pointer is `PmScanArg`. It points to `region_count` regions, which live in the caller's frame
    // during the call.
    unsafe { ioctl(descriptor, Request { opcode, argument }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Budget;

    const MIB: usize = 1 << 20;

    fn pool_of(bytes: usize) -> (HostPool, Option<Arc<WriteWatch>>) {
        let pool = HostPool::new(&Budget::new(bytes), bytes).unwrap();
        let watch = WriteWatch::try_new(&pool).map(Arc::new);
        if watch.is_none() {
            eprintln!("skipped: this system does not support watching for writes");
        }
        (pool, watch)
    }

    /// Writes through a raw pointer, like code outside this crate that has the address.
    fn write(buffer: &SharedBuffer, at: usize) {
        // SAFETY: `at` is inside the buffer, and no other thread uses it. The tests hold no slice
        // of the buffer during the write.
        unsafe { buffer.as_ptr().add(at).cast_mut().write_volatile(7) };
    }

    #[test]
    fn written_returns_the_pages_of_each_write() {
        let (pool, watch) = pool_of(16 * MIB);
        let Some(watch) = watch else { return };
        let mut buffer = pool.allocate(9 * MIB + 5).unwrap();
        buffer.fill(1);
        let watched = watch.watch(buffer.freeze()).unwrap();
        assert!(watched.buffer().iter().all(|&byte| byte == 1), "a read is not a write");
        assert!(watched.written().is_empty());
        for at in [0, 5 * MIB + 1, 9 * MIB + 4] {
            write(watched.buffer(), at);
        }
        let page = rustix::param::page_size();
        let pages = [0..page, 5 * MIB..5 * MIB + page, 9 * MIB..9 * MIB + 5];
        assert_eq!(watched.written(), pages);
        assert_eq!(watched.written(), pages, "`written` does not reset the protection");
        assert_eq!(watched.buffer()[5 * MIB + 1], 7, "the write takes effect");
    }

    #[test]
    fn populating_is_not_a_write() {
        let (pool, watch) = pool_of(16 * MIB);
        let Some(watch) = watch else { return };
        let mut buffers: Vec<_> = (0..4).map(|_| pool.allocate(4 * MIB).unwrap()).collect();
        pool.populate(3 * MIB..7 * MIB);
        let last = buffers.pop().unwrap();
        let watched: Vec<_> =
            buffers.into_iter().map(|buffer| watch.watch(buffer.freeze()).unwrap()).collect();
        pool.populate(0..16 * MIB);
        assert!(!WriteWatch::any_written(&watched));
        assert!(last.is_populated());
        write(watched[1].buffer(), 100);
        assert_eq!(watched[1].written().len(), 1);
    }

    #[test]
    fn many_separate_writes_are_found() {
        let (pool, watch) = pool_of(4 * MIB);
        let Some(watch) = watch else { return };
        let watched = watch.watch(pool.allocate(4 * MIB).unwrap().freeze()).unwrap();
        (0..4 * MIB).step_by(2 * BLOCK_ALIGN).for_each(|at| write(watched.buffer(), at));
        assert_eq!(watched.written().len(), 4 * MIB / (2 * BLOCK_ALIGN));
    }

    #[test]
    fn adjacent_buffers_and_later_owners_are_not_watched() {
        let (pool, watch) = pool_of(4 * MIB);
        let Some(watch) = watch else { return };
        let (first, mut second) = (pool.allocate(5000).unwrap(), pool.allocate(5000).unwrap());
        let watched = watch.watch(first.freeze()).unwrap();
        second.fill(3);
        assert!(watched.written().is_empty());
        assert!(!WriteWatch::any_written([&watched]));
        drop(watched);
        let mut again = pool.allocate(5000).unwrap();
        again.fill(4);
        let watched = watch.watch(again.freeze()).unwrap();
        assert!(watched.written().is_empty());
    }

    #[test]
    fn adjacent_buffers_are_scanned_together() {
        let (pool, watch) = pool_of(4 * MIB);
        let Some(watch) = watch else { return };
        let buffers = (0..8).map(|_| pool.allocate(5000).unwrap().freeze());
        let mut watched: Vec<_> = buffers.map(|buffer| watch.watch(buffer).unwrap()).collect();
        // Leaves a gap of unwatched memory, and writes to it.
        drop(watched.remove(3));
        pool.allocate(5000).unwrap().fill(9);
        assert!(!WriteWatch::any_written(&watched));
        write(watched[5].buffer(), 4999);
        assert!(WriteWatch::any_written(&watched));
        assert!(!WriteWatch::any_written(&watched[..5]));
    }

    #[test]
    fn watching_a_buffer_of_another_pool_returns_it() {
        let (_pool, watch) = pool_of(MIB);
        let Some(watch) = watch else { return };
        let (other, _) = pool_of(MIB);
        assert!(watch.watch(other.allocate(100).unwrap().freeze()).is_err());
    }
}
