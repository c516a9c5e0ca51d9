// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is asked of Linux beyond the standard library. This crate's one unsafe module.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// What direct I/O is aligned to when the kernel (before 6.1) does not say: a page satisfies all block devices.
const FALLBACK_ALIGNMENT: usize = 4096;

pub(crate) fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

pub(crate) fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    file.read_at(buffer, offset)
}

/// Opens `path` with O_DIRECT; also returns the alignment its reads need, in bytes.
pub(crate) fn open_direct(path: &Path) -> io::Result<(File, usize)> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let alignment = direct_alignment(&file)?;
    Ok((file, alignment))
}

fn direct_alignment(file: &File) -> io::Result<usize> {
    // SAFETY: all-zero bytes are a valid `statx`, which is plain integers.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open while `file` lives, the path is an empty C string, as AT_EMPTY_PATH
    // wants it, and `stat` is writable and of the size the kernel fills.
    let rc = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut stat)
    };
    if rc != 0 || stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        return Ok(FALLBACK_ALIGNMENT);
    }
    match stat.stx_dio_mem_align.max(stat.stx_dio_offset_align) as usize {
        0 => {
            Err(io::Error::new(io::ErrorKind::Unsupported, "the file system has no direct I/O for this file"))
        }
        n if n.is_power_of_two() && n <= ts_pool::BLOCK_ALIGN => Ok(n),
        n => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("direct I/O needs an alignment of {n} bytes"),
        )),
    }
}

/// The share of the range that is in the page cache: `cachestat` (Linux 6.5), else `mincore`.
pub(crate) fn residency(file: &File, offset: u64, len: usize) -> Option<f64> {
    if len == 0 {
        return Some(1.0);
    }
    cachestat(file, offset, len).or_else(|| mincore(file, offset, len))
}

fn cachestat(file: &File, offset: u64, len: usize) -> Option<f64> {
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
    // SAFETY: the descriptor is open while `file` lives; both structures are laid out as the kernel's and
    // outlive the call, which writes `stat` alone.
    let rc = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0 as libc::c_uint)
    };
    (rc == 0).then(|| stat.cached as f64 / page_count(offset, len) as f64)
}

fn mincore(file: &File, offset: u64, len: usize) -> Option<f64> {
    let begin = offset - offset % page_size();
    let size = len + (offset - begin) as usize;
    let mut resident = vec![0u8; page_count(offset, len) as usize];
    // SAFETY: a fresh mapping of the file that is never accessed, only asked about, and unmapped below;
    // `resident` has one byte for each of its pages.
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
            assert!(cachestat(&dir, offset, len).is_none_or(|share| share == 1.0));
        }
    }
}
