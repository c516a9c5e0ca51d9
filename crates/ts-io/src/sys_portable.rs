// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is asked of the operating system, where it is not Linux: reads through the page cache.

use std::fs::{File, Metadata};
use std::io;
use std::path::Path;

#[cfg(unix)]
pub(crate) fn identity(metadata: &Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

#[cfg(not(unix))]
pub(crate) fn identity(_: &Metadata) -> (u64, u64) {
    (0, 0)
}

#[cfg(unix)]
pub(crate) fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buffer, offset)
}

#[cfg(windows)]
pub(crate) fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buffer, offset)
}

pub(crate) fn open_direct(_: &Path) -> io::Result<(File, usize)> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "direct I/O is only implemented for Linux"))
}

pub(crate) fn residency(_: &File, _: u64, _: usize) -> Option<f64> {
    None
}
