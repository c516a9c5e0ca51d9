// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is asked of Linux beyond the standard library.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

/// What direct I/O is aligned to when the kernel (before 6.1) does not say: a page satisfies all
/// block devices.
const FALLBACK_ALIGNMENT: usize = 4096;

/// How many slices one call takes.
pub(super) const IOV_MAX: usize = 1024;

pub(crate) fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

pub(crate) fn changed(metadata: &Metadata) -> Option<(i128, [u64; 4])> {
    let at = i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec());
    Some((
        at,
        [metadata.nlink(), metadata.mode().into(), metadata.uid().into(), metadata.gid().into()],
    ))
}

/// Reads into the slices, one after the other, at least a byte unless the file ends at `offset`.
pub(crate) fn read_vectored_at(
    file: &File,
    slices: &mut [IoSliceMut<'_>],
    offset: u64,
) -> io::Result<usize> {
    if let [slice] = slices {
        return file.read_at(slice, offset);
    }
    let count = slices.len().min(IOV_MAX) as libc::c_int;
    let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `IoSliceMut` is laid out as `iovec`, the slices are exclusively borrowed, and the
    // descriptor is open while `file` lives.
    let read = unsafe { libc::preadv(file.as_raw_fd(), slices.as_ptr().cast(), count, offset) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// A door that is shut until it is opened. Threads and rings can wait at it.
#[derive(Debug)]
pub(crate) struct Gate(OwnedFd);

impl Gate {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the system has just made this descriptor, and nobody else has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn open(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: `one` is readable, and the descriptor is open. A counter that is full is open
        // already.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    pub(crate) fn shut(&self) {
        let mut count = [0u8; 8];
        // SAFETY: `count` is writable, and the descriptor is open. There is nothing to read from
        // one shut already.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    pub(crate) fn wait(&self) {
        // Interrupted waits are begun again.
        while !self.poll(-1) {}
    }

    #[cfg(feature = "object")]
    pub(crate) fn is_open(&self) -> bool {
        self.poll(0)
    }

    fn poll(&self, timeout_ms: libc::c_int) -> bool {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one `pollfd`, and the descriptor is open.
        unsafe { libc::poll(&raw mut poll, 1, timeout_ms) > 0 }
    }
}

impl AsRawFd for Gate {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Opens `path` with O_DIRECT; also returns the alignment its reads need, in bytes.
pub(crate) fn open_direct(path: &Path) -> io::Result<(File, usize)> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let alignment = direct_alignment(&file)?;
    Ok((file, alignment))
}

/// The same file once more, to write to it past the page cache; also returns the alignment that
/// needs, in bytes.
pub(crate) fn reopen_direct(file: &File) -> io::Result<(File, usize)> {
    // By its descriptor and not its name, which may be another file's by now.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path)?;
    let alignment = direct_alignment(&file)?;
    Ok((file, alignment))
}

/// The same file once more, for reads that nothing is read ahead for.
pub(crate) fn reopen_quiet(file: &File) -> io::Result<File> {
    let file = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    // SAFETY: the descriptor is open; the call only advises.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) } {
        0 => Ok(file),
        number => Err(io::Error::from_raw_os_error(number)),
    }
}

/// Sets room aside on the disk, without making the file longer.
pub(crate) fn reserve(file: &File, begin: u64, len: u64) -> io::Result<()> {
    let size =
        |bytes| libc::off_t::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG));
    let (begin, len) = (size(begin)?, size(len)?);
    if len == 0 {
        return Ok(());
    }
    loop {
        // SAFETY: the descriptor is open while `file` lives; no pointers are passed.
        match unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, begin, len) } {
            0 => return Ok(()),
            _ => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
}

pub(crate) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)
}

fn direct_alignment(file: &File) -> io::Result<usize> {
    // SAFETY: all-zero bytes are a valid `statx`, which is plain integers.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open while `file` lives, the path is an empty C string, as
    // AT_EMPTY_PATH wants it, and `stat` is writable and of the size the kernel fills.
    let rc = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut stat,
        )
    };
    if rc != 0 || stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        return Ok(FALLBACK_ALIGNMENT);
    }
    match stat.stx_dio_mem_align.max(stat.stx_dio_offset_align) as usize {
        0 => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "the file system has no direct I/O for this file",
        )),
        n if n.is_power_of_two() && n <= ts_pool::BLOCK_ALIGN => Ok(n),
        n => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("direct I/O needs an alignment of {n} bytes"),
        )),
    }
}

/// CPU time that this process has used so far, its own and the system's for it.
pub(crate) fn cpu_time() -> Option<Duration> {
    // SAFETY: all-zero bytes are a valid `rusage`, which is plain integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is writable and of the size that the call fills.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) } != 0 {
        return None;
    }
    let of = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    Some(of(usage.ru_utime) + of(usage.ru_stime))
}

/// Whether reads of a file can be handed to a ring: on file systems of the kernel's own, for which
/// a read that would have to wait goes to the background. A server in user space or on the network
/// (FUSE, NFS) can hold the thread that hands the read over, and with it all others.
pub(crate) fn suits_rings(file: &File) -> bool {
    /// ext4, XFS, Btrfs, F2FS, bcachefs, overlayfs: the kernel's include/uapi/linux/magic.h.
    const LOCAL: [u32; 6] =
        [0xEF53, 0x5846_5342, 0x9123_683E, 0xF2F5_2010, 0xCA45_1A4E, 0x794C_7630];
    statfs(file).is_some_and(|stat| LOCAL.contains(&(stat.f_type as u32)))
}

fn statfs(file: &File) -> Option<libc::statfs> {
    // SAFETY: all-zero bytes are a valid `statfs`, which is plain integers.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open while `file` lives, and `stat` is writable and of the size
    // that the call fills.
    let rc = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut stat) };
    (rc == 0).then_some(stat)
}

/// A name for the file system that a file lies on: its kind and the number that it gives itself.
pub(crate) fn file_system(file: &File) -> Option<String> {
    let stat = statfs(file)?;
    // SAFETY: `fsid_t` is two integers, whose fields the binding does not name.
    let number: [u32; 2] = unsafe { std::mem::transmute(stat.f_fsid) };
    (number != [0; 2]).then(|| format!("{:x}-{:08x}{:08x}", stat.f_type, number[0], number[1]))
}

/// Asks the page cache to let a file go. What is not on the disk yet is brought there first.
pub(crate) fn evict(file: &File) -> io::Result<()> {
    file.sync_data()?;
    // SAFETY: the descriptor is open; the call only advises.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        number => Err(io::Error::from_raw_os_error(number)),
    }
}

/// The share of the range that is in the page cache: `cachestat` (Linux 6.5), else `mincore`.
/// `None` also for files
/// that are neither ours nor ours to write: the system does not tell of those.
pub(crate) fn residency(file: &File, offset: u64, len: usize) -> Option<f64> {
    if len == 0 {
        return Some(1.0);
    }
    match cachestat(file, offset, len) {
        Err(e) if e.raw_os_error() == Some(libc::ENOSYS) && is_ours(file) => {
            mincore(file, offset, len)
        }
        share => share.ok(),
    }
}

/// Whether `mincore` tells the truth about a file: of others it says that all pages are there.
fn is_ours(file: &File) -> bool {
    // SAFETY: these have no preconditions but an open descriptor and, for AT_EMPTY_PATH, an empty C
    // string.
    unsafe {
        let ours = file.metadata().is_ok_and(|metadata| metadata.uid() == libc::geteuid());
        ours || libc::faccessat(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::W_OK,
            libc::AT_EMPTY_PATH | libc::AT_EACCESS,
        ) == 0
    }
}

fn cachestat(file: &File, offset: u64, len: usize) -> io::Result<f64> {
    /// `struct cachestat_range` of the kernel.
    #[repr(C)]
    struct Range {
        offset: u64,
        len: u64,
    }
    /// `struct cachestat` of the kernel, in pages.
    #[repr(C)]
    #[derive(Default)]
    struct Stat {
        cached: u64,
        dirty: u64,
        writeback: u64,
        evicted: u64,
        recently_evicted: u64,
    }
    const SYS_CACHESTAT: libc::c_long = 451;
    let (range, mut stat) = (Range { offset, len: len as u64 }, Stat::default());
    // SAFETY: the descriptor is open while `file` lives; both structures are laid out as the
    // kernel's and outlive the call, which writes `stat` alone.
    let rc = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_raw_fd(),
            &raw const range,
            &raw mut stat,
            0 as libc::c_uint,
        )
    };
    match rc {
        0 => Ok(stat.cached as f64 / page_count(offset, len) as f64),
        _ => Err(io::Error::last_os_error()),
    }
}

fn mincore(file: &File, offset: u64, len: usize) -> Option<f64> {
    let begin = offset - offset % page_size();
    let size = len + (offset - begin) as usize;
    let mut resident = vec![0u8; page_count(offset, len) as usize];
    // SAFETY: a fresh mapping of the file that is never accessed, only asked about, and unmapped
    // below; `resident` has one byte for each of its pages.
    unsafe {
        let begin = libc::off_t::try_from(begin).ok()?;
        let map = libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            begin,
        );
        if map == libc::MAP_FAILED {
            return None;
        }
        let rc = libc::mincore(map, size, resident.as_mut_ptr());
        libc::munmap(map, size);
        if rc != 0 {
            return None;
        }
    }
    let cached = resident.iter().filter(|&&page| page & 1 == 1).count();
    Some(cached as f64 / resident.len() as f64)
}

fn page_count(offset: u64, len: usize) -> u64 {
    (offset + len as u64).div_ceil(page_size()) - offset / page_size()
}

fn page_size() -> u64 {
    // SAFETY: sysconf has no preconditions.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_just_written_is_resident_by_both_ways_of_asking() {
        let mut dir = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut dir, &[1; 20_000]).unwrap();
        for (offset, len) in [(0, 20_000), (5000, 1), (4095, 2)] {
            assert_eq!(mincore(&dir, offset, len), Some(1.0));
            assert!(cachestat(&dir, offset, len).map_or(true, |share| share == 1.0));
        }
    }
}
