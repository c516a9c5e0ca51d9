// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds writes to memory that should not change. This crate's sixth unsafe module.
//!
//! The system marks pages as write-protected (userfaultfd). The first write to a page clears its
//! mark and goes on, without anybody being called (`WP_ASYNC`); reading the marks (`PAGEMAP_SCAN`)
//! tells which pages were written to. Linux has both since 6.7.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use crate::buffer::SharedBuffer;
use crate::pool::{BLOCK_ALIGN, HostPool};

/// Watches buffers of a pool for writes, by whatever means: foreign code that has their address, or
/// the kernel on somebody's behalf. Devices that reach memory by themselves are not seen.
///
/// ```
/// use std::sync::Arc;
/// use ts_pool::{Budget, HostPool, WriteWatch};
///
/// let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20)?;
/// let buffer = pool.allocate(8192)?.freeze();
/// // `None` where the system cannot.
/// if let Some(watch) = WriteWatch::new(&pool).map(Arc::new) {
///     let watched = watch.watch(buffer).expect("the watch is for this pool");
///     assert!(watched.written().is_empty());
/// }
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug)]
pub struct WriteWatch {
    marks: OwnedFd,
    pages: File,
    pool: HostPool,
}

/// A buffer that is watched until this is dropped.
#[derive(Debug)]
pub struct Watched {
    watch: Arc<WriteWatch>,
    buffer: SharedBuffer,
}

impl WriteWatch {
    /// `None` where the system cannot: another than Linux, Linux before 6.7, a sandbox that forbids
    /// it, memory that is a device's, pages larger than [`BLOCK_ALIGN`].
    pub fn new(pool: &HostPool) -> Option<Self> {
        if rustix::param::page_size() > BLOCK_ALIGN || pool.stats().capacity_bytes == 0 {
            return None;
        }
        // SAFETY: what is made is asked for nothing but marks that the system clears by itself; no
        // thread ever waits for an answer.
        let made = unsafe {
            userfaultfd(
                UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY),
            )
        };
        let (marks, pages) = (made.ok()?, File::open("/proc/self/pagemap").ok()?);
        let features = FEATURE_WP | FEATURE_WP_UNPOPULATED | FEATURE_WP_ASYNC;
        run(&marks, API, &mut Api { api: 0xaa, features, ioctls: 0 }).ok()?;
        let range = pool.as_ptr_range();
        let span = Span {
            start: range.start.addr() as u64,
            len: (range.end.addr() - range.start.addr()) as u64,
        };
        run(&marks, REGISTER, &mut Register { span, mode: REGISTER_WP, ioctls: 0 }).ok()?;
        let watch = Self { marks, pages, pool: pool.clone() };
        // Asked once, so that a system that only has half of it is found here.
        watch.scan(range.start.addr()..range.start.addr() + BLOCK_ALIGN).ok()?;
        Some(watch)
    }

    /// Watches a buffer of this pool, from now on.
    ///
    /// # Errors
    /// Gives the buffer back when it is not of this pool, or the system has no memory for its
    /// marks.
    pub fn watch(self: &Arc<Self>, buffer: SharedBuffer) -> Result<Watched, SharedBuffer> {
        let (pool, bytes) = (self.pool.as_ptr_range(), buffer.as_ptr_range());
        if bytes.start < pool.start || bytes.end > pool.end || self.mark(&buffer, true).is_err() {
            return Err(buffer);
        }
        Ok(Watched { watch: Arc::clone(self), buffer })
    }

    /// Whether any of some buffers may have been written to since they are watched. Those that lie
    /// side by side are looked at together: takes half a microsecond a run of them, and what
    /// [`Watched::written`] takes for its pages.
    pub fn any_written<'a>(watched: impl IntoIterator<Item = &'a Watched>) -> bool {
        let mut pages: Vec<_> =
            watched.into_iter().map(|one| (pages_of(&one.buffer), &one.watch)).collect();
        pages.sort_unstable_by_key(|(pages, _)| pages.start);
        let runs = pages
            .chunk_by(|(one, of), (next, other)| one.end == next.start && Arc::ptr_eq(of, other));
        runs.filter_map(|run| run.first().zip(run.last())).any(|((first, watch), (last, _))| {
            watch.scan(first.start..last.end).is_ok_and(|found| !found.is_empty())
        })
    }

    fn mark(&self, buffer: &SharedBuffer, protect: bool) -> Result<(), Errno> {
        let pages = pages_of(buffer);
        let span = Span { start: pages.start as u64, len: pages.len() as u64 };
        run(&self.marks, WRITE_PROTECT, &mut WriteProtect { span, mode: u64::from(protect) })
            .map(drop)
    }

    /// The addresses in a range of whole pages that have lost their mark.
    fn scan(&self, pages: Range<usize>) -> Result<Vec<Range<usize>>, Errno> {
        let mut found: Vec<Range<usize>> = Vec::new();
        let (mut start, end) = (pages.start as u64, pages.end as u64);
        while start < end {
            let mut regions = [Region::default(); 32];
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                flags: SCAN_ONLY_WATCHED,
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
            let count = run(&self.pages, PAGEMAP_SCAN, &mut scan)?;
            found.extend(
                regions[..count].iter().map(|region| region.start as usize..region.end as usize),
            );
            start = scan.walk_end;
        }
        Ok(found)
    }
}

impl Watched {
    /// The bytes of the buffer that may have been written to since it is watched, in order: whole
    /// pages of them, as far as they are the buffer's. What cannot be asked for is taken for not
    /// written.
    ///
    /// Takes some ten microseconds for 64 MiB in small pages, less in huge ones.
    pub fn written(&self) -> Vec<Range<usize>> {
        let (base, len) = (self.buffer.as_ptr().addr(), self.buffer.len());
        let found = self.watch.scan(pages_of(&self.buffer)).unwrap_or_default();
        found
            .into_iter()
            .map(|pages| pages.start.saturating_sub(base)..(pages.end - base).min(len))
            .collect()
    }

    /// The bytes.
    pub fn buffer(&self) -> &SharedBuffer {
        &self.buffer
    }
}

impl Drop for Watched {
    /// Lest the next owner of the memory pay for marks that nobody reads.
    fn drop(&mut self) {
        let _ = self.watch.mark(&self.buffer, false);
    }
}

/// The addresses of the pages in which a buffer lies.
fn pages_of(buffer: &SharedBuffer) -> Range<usize> {
    let page = rustix::param::page_size();
    let bytes = buffer.as_ptr_range();
    let start = bytes.start.addr();
    start - start % page..bytes.end.addr().next_multiple_of(page)
}

// linux/userfaultfd.h and linux/fs.h.

const USER_MODE_ONLY: u32 = 1;
const FEATURE_WP: u64 = 1;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const REGISTER_WP: u64 = 1 << 1;
const IS_WRITTEN: u64 = 1 << 1;
/// Fails for memory that is not registered.
const SCAN_ONLY_WATCHED: u64 = 1 << 1;

const API: Opcode = opcode::read_write::<Api>(0xaa, 0x3f);
const REGISTER: Opcode = opcode::read_write::<Register>(0xaa, 0x00);
const WRITE_PROTECT: Opcode = opcode::read_write::<WriteProtect>(0xaa, 0x06);
const PAGEMAP_SCAN: Opcode = opcode::read_write::<Scan>(b'f', 16);

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Span {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    span: Span,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct WriteProtect {
    span: Span,
    mode: u64,
}

#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    /// Where it stopped: at the end, or because there was no room for another region.
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
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// A request whose argument the system reads and writes. Its answer is a count.
struct Request<'a, T> {
    opcode: Opcode,
    argument: &'a mut T,
}

// SAFETY: the pointer is that of a structure of the length that the opcode says, which lives while
// the system uses it, and any bits are a value of it.
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
    // SAFETY: the opcode is that of the argument's type, which holds the address of memory only in
    // `Scan`, whose regions are as many as it says and live in the caller's frame.
    unsafe { ioctl(descriptor, Request { opcode, argument }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Budget;

    const MIB: usize = 1 << 20;

    fn pool_of(bytes: usize) -> (HostPool, Option<Arc<WriteWatch>>) {
        let pool = HostPool::new(&Budget::new(bytes), bytes).unwrap();
        let watch = WriteWatch::new(&pool).map(Arc::new);
        if watch.is_none() {
            eprintln!("nothing to test: this system cannot watch for writes");
        }
        (pool, watch)
    }

    /// As foreign code does it.
    fn write(buffer: &SharedBuffer, at: usize) {
        // SAFETY: inside the buffer, and no other thread is here; who looks at the byte does so
        // after this.
        unsafe { buffer.as_ptr().add(at).cast_mut().write_volatile(7) };
    }

    #[test]
    fn a_write_is_found_and_where_it_was() {
        let (pool, watch) = pool_of(16 * MIB);
        let Some(watch) = watch else { return };
        let mut buffer = pool.allocate(9 * MIB + 5).unwrap();
        buffer.fill(1);
        let watched = watch.watch(buffer.freeze()).unwrap();
        assert!(watched.buffer().iter().all(|&byte| byte == 1), "reading is no writing");
        assert!(watched.written().is_empty());
        for at in [0, 5 * MIB + 1, 9 * MIB + 4] {
            write(watched.buffer(), at);
        }
        let page = rustix::param::page_size();
        let pages = [0..page, 5 * MIB..5 * MIB + page, 9 * MIB..9 * MIB + 5];
        assert_eq!(watched.written(), pages);
        assert_eq!(watched.written(), pages, "asking changes nothing");
        assert_eq!(watched.buffer()[5 * MIB + 1], 7, "the write was done");
    }

    #[test]
    fn many_writes_are_found() {
        let (pool, watch) = pool_of(4 * MIB);
        let Some(watch) = watch else { return };
        let watched = watch.watch(pool.allocate(4 * MIB).unwrap().freeze()).unwrap();
        (0..4 * MIB).step_by(2 * BLOCK_ALIGN).for_each(|at| write(watched.buffer(), at));
        assert_eq!(watched.written().len(), 4 * MIB / (2 * BLOCK_ALIGN));
    }

    #[test]
    fn neighbours_and_later_owners_are_not_watched() {
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
    fn buffers_side_by_side_are_looked_at_together() {
        let (pool, watch) = pool_of(4 * MIB);
        let Some(watch) = watch else { return };
        let buffers = (0..8).map(|_| pool.allocate(5000).unwrap().freeze());
        let mut watched: Vec<_> = buffers.map(|buffer| watch.watch(buffer).unwrap()).collect();
        // A gap that anybody may write to.
        drop(watched.remove(3));
        pool.allocate(5000).unwrap().fill(9);
        assert!(!WriteWatch::any_written(&watched));
        write(watched[5].buffer(), 4999);
        assert!(WriteWatch::any_written(&watched));
        assert!(!WriteWatch::any_written(&watched[..5]));
    }

    #[test]
    fn a_buffer_of_another_pool_comes_back() {
        let (_pool, watch) = pool_of(MIB);
        let Some(watch) = watch else { return };
        let (other, _) = pool_of(MIB);
        assert!(watch.watch(other.allocate(100).unwrap().freeze()).is_err());
    }
}
