// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads and writes at offsets of a file, on every system.

use std::fs::File;
use std::io::{self, IoSliceMut};

use crate::sys;

/// Fills `bytes` from an offset of a file. Threads may read the same file at the same time. On
/// Windows, this moves the position of the file. Blocks.
///
/// # Errors
/// Returns the error of the system. Its kind is [`io::ErrorKind::UnexpectedEof`] if the file ends
/// before `bytes` is full.
///
/// # Examples
/// ```
/// # let directory = tempfile::tempdir()?;
/// let path = directory.path().join("file");
/// let mut options = std::fs::File::options();
/// let file = options.create(true).read(true).write(true).open(path)?;
/// ts_io::write_all_at(&file, b"weights", 3)?;
/// let mut bytes = [0; 4];
/// ts_io::read_exact_at(&file, &mut bytes, 6)?;
/// assert_eq!(&bytes, b"ghts");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn read_exact_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match sys::read_vectored_at(file, &mut [IoSliceMut::new(bytes)], offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => (bytes, offset) = (&mut bytes[len..], offset + len as u64),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all bytes at an offset of a file. Threads may write to different ranges of a file at the
/// same time. On Windows, this moves the position of the file. Blocks.
///
/// # Errors
/// Returns the error of the system. Part of the bytes may be written then.
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    sys::write_all_at(file, bytes, offset)
}
