// SPDX-License-Identifier: MIT OR Apache-2.0
//! Linux system calls that the standard library does not wrap.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::Fingerprint;

/// The alignment of direct I/O in bytes if the kernel (before 6.1) does not report it. An alignment
/// of one page is sufficient for all block devices.
const FALLBACK_ALIGNMENT: usize = 4096;

/// The maximum number of slices in one system call.
pub(super) const IOV_MAX: usize = 1024;

pub(crate) fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) fn changed(metadata: &Metadata) -> Option<(i128, [u64; 4])> {
    let at = i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec());
    Some((
        at,
        [metadata.nlink(), metadata.mode().into(), metadata.uid().into(), metadata.gid().into()],
    ))
}

/// Returns whether an open file is a regular file, and its state.
///
/// The standard library calls `statx`, which a sandbox has to refuse, because it can also take a
/// path. This function calls `fstat`, where the type of the C library is the kernel's.
pub(crate) fn state_of(file: &File) -> io::Result<(bool, Fingerprint)> {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        let stat = fstat(file)?;
        let since = |seconds: i64, nanos: i64| {
            let time = SystemTime::UNIX_EPOCH;
            let time = match u64::try_from(seconds) {
                Ok(seconds) => time.checked_add(Duration::from_secs(seconds))?,
                Err(_) => time.checked_sub(Duration::from_secs(seconds.unsigned_abs()))?,
            };
            time.checked_add(Duration::from_nanos(u64::try_from(nanos).ok()?))
        };
        let at = i128::from(stat.st_ctime) * 1_000_000_000 + i128::from(stat.st_ctime_nsec);
        let (links, mode) = (stat.st_nlink as u64, stat.st_mode.into());
        let state = Fingerprint {
            identity: (stat.st_dev, stat.st_ino),
            len: stat.st_size as u64,
            modified: since(stat.st_mtime, stat.st_mtime_nsec),
            changed: Some((at, [links, mode, stat.st_uid.into(), stat.st_gid.into()])),
            etag: None,
        };
        Ok((stat.st_mode & libc::S_IFMT == libc::S_IFREG, state))
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let metadata = file.metadata()?;
        Ok((metadata.is_file(), Fingerprint::of(&metadata)))
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn fstat(file: &File) -> io::Result<libc::stat> {
    // SAFETY: `stat` consists of integers, so all zeros are a valid value.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open while `file` exists, and `stat` is writable and has the layout
    // of the kernel's structure on these architectures.
    let rc = unsafe { libc::syscall(libc::SYS_fstat, file.as_raw_fd(), &raw mut stat) };
    if rc == 0 { Ok(stat) } else { Err(io::Error::last_os_error()) }
}

/// Reads into the slices, one after the other. Returns the number of bytes: at least one, unless
/// the file ends at or before `offset`.
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
    // SAFETY: `IoSliceMut` has the layout of `iovec`, the slices are exclusively borrowed, and the
    // descriptor is open while `file` exists.
    let read = unsafe { libc::preadv(file.as_raw_fd(), slices.as_ptr().cast(), count, offset) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// An event that threads and rings can wait for: an eventfd that is readable while the gate is
/// open. A new gate is closed.
#[derive(Debug)]
pub(crate) struct Gate(OwnedFd);

impl Gate {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just created this descriptor, so nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn open(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: `one` is readable for the given length, and the descriptor is open. The write
        // fails only if the counter is at its maximum, in which case the gate is already open.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    pub(crate) fn close(&self) {
        let mut count = [0u8; 8];
        // SAFETY: `count` is writable for the given length, and the descriptor is open. The read
        // fails if the gate is already closed.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    /// Waits until the gate opens, `limit` has passed, or a signal arrives.
    pub(crate) fn wait_for(&self, limit: Duration) {
        self.poll(limit.as_millis().try_into().unwrap_or(libc::c_int::MAX));
    }

    pub(crate) fn wait(&self) {
        // A signal can end the poll before the gate opens.
        while !self.poll(-1) {}
    }

    #[cfg(feature = "object")]
    pub(crate) fn is_open(&self) -> bool {
        self.poll(0)
    }

    fn poll(&self, timeout_ms: libc::c_int) -> bool {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is a single valid `pollfd`, and the descriptor is open.
        unsafe { libc::poll(&raw mut poll, 1, timeout_ms) > 0 }
    }
}

impl AsRawFd for Gate {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Opens the same file again for reading with O_DIRECT. Returns the new handle and the required
/// alignment in bytes.
///
/// Without /proc, opens `path`, which may lead to another file by now.
pub(crate) fn open_direct(file: &File, path: &Path) -> io::Result<(File, usize)> {
    let open = |path: &Path| OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
    let opened = match open(&by_descriptor(file)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => open(path),
        opened => opened,
    };
    let file = opened
        .map_err(|e| io::Error::new(e.kind(), format!("cannot open it with O_DIRECT: {e}")))?;
    let alignment = direct_alignment(&file)?;
    Ok((file, alignment))
}

/// Returns a path that leads to an open file, even if no directory contains it any more.
fn by_descriptor(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Returns whether an error says that the process has no free descriptor.
pub(crate) fn too_many_files(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EMFILE)
}

/// Makes the limit of open files at least `wanted`, if the process may, and returns the limit.
pub(crate) fn raise_descriptor_limit(wanted: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is writable and has the type that the call fills.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return 0;
    }
    let before = limit.rlim_cur;
    if before >= wanted || before >= limit.rlim_max {
        return before;
    }
    limit.rlim_cur = wanted.min(limit.rlim_max);
    // SAFETY: `limit` is readable and has the type that the call expects.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } {
        0 => limit.rlim_cur,
        _ => before,
    }
}

/// Opens the same file again for writing with O_DIRECT. Returns the new handle and the required
/// alignment in bytes.
pub(crate) fn reopen_direct(file: &File) -> io::Result<(File, usize)> {
    let open = |path| OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path);
    let file = open(by_descriptor(file))?;
    let alignment = direct_alignment(&file)?;
    Ok((file, alignment))
}

/// Opens the same file again for reading, without readahead.
pub(crate) fn reopen_without_readahead(file: &File) -> io::Result<File> {
    let file = File::open(by_descriptor(file))?;
    // SAFETY: the descriptor is open while `file` exists, and the call takes no pointers.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) } {
        0 => Ok(file),
        number => Err(io::Error::from_raw_os_error(number)),
    }
}

/// Reserves disk space for `begin..begin + len` without changing the length of the file.
pub(crate) fn reserve(file: &File, begin: u64, len: u64) -> io::Result<()> {
    let size =
        |bytes| libc::off_t::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG));
    let (begin, len) = (size(begin)?, size(len)?);
    if len == 0 {
        return Ok(());
    }
    loop {
        // SAFETY: the descriptor is open while `file` exists, and the call takes no pointers.
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
    // SAFETY: `statx` consists of integers, so all zeros are a valid value.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open while `file` exists, the path is an empty C string, as
    // AT_EMPTY_PATH requires, and `stat` is writable and has the type that the call fills.
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
            "its file system does not support direct I/O for this file",
        )),
        n if n.is_power_of_two() && n <= ts_pool::BLOCK_ALIGN => Ok(n),
        n => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!(
                "unsupported alignment of direct I/O: {n} bytes (expected a power of two, at most \
                 {})",
                ts_pool::BLOCK_ALIGN
            ),
        )),
    }
}

/// Returns the CPU time that this process has used, in user and kernel mode.
pub(crate) fn cpu_time() -> Option<Duration> {
    // SAFETY: `rusage` consists of integers, so all zeros are a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is writable and has the type that the call fills.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) } != 0 {
        return None;
    }
    let of = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    Some(of(usage.ru_utime) + of(usage.ru_stime))
}

/// Returns whether submitting a read of this file to io_uring never blocks.
///
/// On the kernel's local file systems, a read that must wait continues in the background. A file
/// system in user space or on the network (FUSE, NFS) can block the submitting thread, which then
/// delays all other reads.
pub(crate) fn suits_rings(file: &File) -> bool {
    /// The numbers of ext4, XFS, Btrfs, F2FS, bcachefs and overlayfs, from the kernel's
    /// include/uapi/linux/magic.h.
    const LOCAL: [u32; 6] =
        [0xEF53, 0x5846_5342, 0x9123_683E, 0xF2F5_2010, 0xCA45_1A4E, 0x794C_7630];
    statfs(file).is_some_and(|stat| LOCAL.contains(&(stat.f_type as u32)))
}

fn statfs(file: &File) -> Option<libc::statfs> {
    // SAFETY: `statfs` consists of integers, so all zeros are a valid value.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open while `file` exists, and `stat` is writable and has the type
    // that the call fills.
    let rc = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut stat) };
    (rc == 0).then_some(stat)
}

/// Returns a name for the file system that contains `file`, made of the file system's type and id.
/// Returns `None` if the file system has no id.
pub(crate) fn file_system(file: &File) -> Option<String> {
    let stat = statfs(file)?;
    // SAFETY: `fsid_t` consists of two 32-bit integers, whose fields the binding does not expose.
    let number: [u32; 2] = unsafe { std::mem::transmute(stat.f_fsid) };
    (number != [0; 2]).then(|| format!("{:x}-{:08x}{:08x}", stat.f_type, number[0], number[1]))
}

/// Drops a file from the page cache, after flushing it to disk.
pub(crate) fn evict(file: &File) -> io::Result<()> {
    file.sync_data()?;
    // SAFETY: the descriptor is open while `file` exists, and the call takes no pointers.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        number => Err(io::Error::from_raw_os_error(number)),
    }
}

/// Returns the share of the range that is in the page cache, from 0 to 1. Uses `cachestat` (Linux
/// 6.5), or else `mincore`.
///
/// Returns `None` if the kernel does not report the share. Most kernels do not report it for files
/// that this process neither owns nor may write to.
pub(crate) fn residency(file: &File, offset: u64, len: usize) -> Option<f64> {
    if len == 0 {
        return Some(1.0);
    }
    match cachestat(file, offset, len) {
        Err(e) if e.raw_os_error() == Some(libc::ENOSYS) && is_owned_or_writable(file) => {
            mincore(file, offset, len)
        }
        share => share.ok(),
    }
}

/// Returns whether this process owns the file or may write to it. For other files, `mincore`
/// reports that all pages are resident.
fn is_owned_or_writable(file: &File) -> bool {
    // SAFETY: `geteuid` has no preconditions. The descriptor is open while `file` exists, and the
    // path is an empty C string, as AT_EMPTY_PATH requires.
    unsafe {
        let own = u64::from(libc::geteuid());
        let owner = state_of(file).ok().and_then(|(_, state)| Some(state.changed?.1[2]));
        owner == Some(own)
            || libc::faccessat(
                file.as_raw_fd(),
                c"".as_ptr(),
                libc::W_OK,
                libc::AT_EMPTY_PATH | libc::AT_EACCESS,
            ) == 0
    }
}

fn cachestat(file: &File, offset: u64, len: usize) -> io::Result<f64> {
    /// The kernel's `struct cachestat_range`.
    #[repr(C)]
    struct Range {
        offset: u64,
        len: u64,
    }
    /// The kernel's `struct cachestat`, in pages.
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
    // SAFETY: the descriptor is open while `file` exists. Both structures have the layout of the
    // kernel's and outlive the call, which writes only to `stat`.
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
    // SAFETY: this creates a new mapping, never accesses its memory, and unmaps it. `resident` has
    // one byte for each page of the mapping.
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
    // SAFETY: `sysconf` has no preconditions.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_just_written_is_resident() {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, &[1; 20_000]).unwrap();
        for (offset, len) in [(0, 20_000), (5000, 1), (4095, 2)] {
            assert_eq!(mincore(&file, offset, len), Some(1.0));
            assert!(cachestat(&file, offset, len).map_or(true, |share| share == 1.0));
        }
    }
}
