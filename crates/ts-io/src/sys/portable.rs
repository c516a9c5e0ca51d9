// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions of linux.rs for other systems, where files are read only through the page cache.

use std::fs::{File, Metadata};
use std::io::{self, IoSliceMut};
use std::path::Path;

use parking_lot::{Condvar, Mutex};

use crate::Fingerprint;

#[cfg(unix)]
pub(crate) fn identity(metadata: &Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

#[cfg(unix)]
pub(crate) fn changed(metadata: &Metadata) -> Option<(i128, [u64; 4])> {
    use std::os::unix::fs::MetadataExt;
    let at = i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec());
    Some((
        at,
        [metadata.nlink(), metadata.mode().into(), metadata.uid().into(), metadata.gid().into()],
    ))
}

#[cfg(not(unix))]
pub(crate) fn changed(_: &Metadata) -> Option<(i128, [u64; 4])> {
    None
}

#[cfg(not(unix))]
pub(crate) fn identity(_: &Metadata) -> (u64, u64) {
    (0, 0)
}

pub(crate) fn state_of(file: &File) -> io::Result<(bool, Fingerprint)> {
    let metadata = file.metadata()?;
    Ok((metadata.is_file(), Fingerprint::of(&metadata)))
}

/// Reads into the first of the slices: at least one byte, unless the file ends at `offset`. Returns
/// the number of bytes.
pub(crate) fn read_vectored_at(
    file: &File,
    slices: &mut [IoSliceMut<'_>],
    offset: u64,
) -> io::Result<usize> {
    let Some(slice) = slices.first_mut() else { return Ok(0) };
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_at(file, slice, offset);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_read(file, slice, offset);
}

/// An event that threads can wait for. A new gate is closed. Once opened, it stays open.
#[derive(Debug, Default)]
pub(crate) struct Gate(Mutex<bool>, Condvar);

impl Gate {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self::default())
    }

    pub(crate) fn open(&self) {
        *self.0.lock() = true;
        self.1.notify_all();
    }

    pub(crate) fn wait(&self) {
        self.1.wait_while(&mut self.0.lock(), |open| !*open);
    }

    #[cfg(feature = "object")]
    pub(crate) fn is_open(&self) -> bool {
        *self.0.lock()
    }
}

pub(crate) fn open_direct(_: &File, _: &Path) -> io::Result<(File, usize)> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "direct I/O is supported only on Linux"))
}

pub(crate) fn too_many_files(_: &io::Error) -> bool {
    false
}

pub(crate) fn raise_descriptor_limit(_: u64) -> u64 {
    u64::MAX
}

pub(crate) fn residency(_: &File, _: u64, _: usize) -> Option<f64> {
    None
}

pub(crate) fn cpu_time() -> Option<std::time::Duration> {
    None
}

pub(crate) fn evict(_: &File) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "this operation is supported only on Linux"))
}

pub(crate) fn file_system(_: &File) -> Option<String> {
    None
}

pub(crate) fn reopen_direct(_: &File) -> io::Result<(File, usize)> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(crate) fn reserve(_: &File, _: u64, _: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(unix)]
pub(crate) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
pub(crate) fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        (bytes, offset) = (&bytes[written..], offset + written as u64);
    }
    Ok(())
}

pub(crate) fn reopen_without_readahead(_: &File) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}
