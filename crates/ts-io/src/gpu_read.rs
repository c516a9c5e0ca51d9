// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads of files straight into memory of a GPU.

use std::ffi::c_void;
use std::sync::Arc;

use crate::backend::ReadPath;
#[cfg(target_os = "linux")]
use crate::file::FileOrigin;
#[cfg(target_os = "linux")]
use crate::source::NOT_A_FILE;
#[cfg(target_os = "linux")]
use crate::sys::{CuFile, CuFileRead, NO_ASYNC};
use crate::{Error, Source};

/// A read of a file straight into memory of an NVIDIA GPU, which may still be running.
///
/// It runs as work of a CUDA stream, with GPUDirect Storage. In the library's compatibility mode,
/// the library copies the bytes through its own memory. On systems other than Linux, there are no
/// such reads.
#[derive(Debug)]
pub struct GpuRead {
    #[cfg(target_os = "linux")]
    read: CuFileRead,
    source: Arc<Source>,
    offset: u64,
    len: usize,
}

impl GpuRead {
    /// Returns the path of such reads on this system: [`ReadPath::GpuDirect`], or
    /// [`ReadPath::GpuCompat`] in compatibility mode. The first call loads and initializes the
    /// library.
    ///
    /// # Errors
    /// Returns the reason if such reads are not possible.
    pub fn path() -> Result<ReadPath, String> {
        #[cfg(target_os = "linux")]
        {
            let library = CuFile::get()?;
            match library.is_direct() {
                _ if !library.reads_in_streams() => Err(NO_ASYNC.into()),
                true => Ok(ReadPath::GpuDirect),
                false => Ok(ReadPath::GpuCompat),
            }
        }
        #[cfg(not(target_os = "linux"))]
        Err("GPUDirect Storage needs Linux".into())
    }

    /// Submits a read of `len` bytes at `offset` of a file to `stream`, a `CUstream`. Does not
    /// block.
    ///
    /// # Errors
    /// - [`Error::Unavailable`]: the source is not a file that the library can read.
    /// - [`Error::Read`]: the library does not accept the read.
    ///
    /// # Safety
    /// The context of `stream` must be current, and `target` be memory of its GPU that is valid for
    /// writes of `len` bytes by work of the stream. The result must exist until the stream has done
    /// the read.
    pub unsafe fn begin(
        source: &Arc<Source>,
        offset: u64,
        len: usize,
        target: *mut u8,
        stream: *mut c_void,
    ) -> Result<Self, Error> {
        let unavailable = |reason: &str| Error::Unavailable {
            backend: "gds".into(),
            reason: format!("{}: {reason}", source.path().display()),
        };
        #[cfg(target_os = "linux")]
        {
            let file = FileOrigin::of(source).ok_or_else(|| unavailable(NOT_A_FILE))?;
            let handle = file.cufile().map_err(unavailable)?;
            let failed = |reason| source.read_error(offset, len, std::io::Error::other(reason));
            // SAFETY: the caller meets these requirements. The result keeps the source, which owns
            // the handle.
            let read = unsafe { handle.begin_read(target, len, offset, stream) }.map_err(failed)?;
            Ok(Self { read, source: Arc::clone(source), offset, len })
        }
        #[cfg(not(target_os = "linux"))]
        {
            let _ = (offset, len, target, stream);
            Err(unavailable("GPUDirect Storage needs Linux"))
        }
    }

    /// Returns whether all bytes were read. Call this when the stream has done the read.
    ///
    /// # Errors
    /// - [`Error::Read`]: the library or the file system failed.
    /// - [`Error::ShortRead`]: the file has ended before.
    /// - [`Error::Changed`]: the file was written to after it was opened.
    pub fn end(self) -> Result<(), Error> {
        #[cfg(target_os = "linux")]
        let actual = self.read.end();
        #[cfg(not(target_os = "linux"))]
        let actual = Ok(0);
        let Self { source, offset, len, .. } = self;
        let actual = actual.map_err(|error| source.read_error(offset, len, error))?;
        source.verify(offset)?;
        if actual < len {
            let path = source.path().into();
            return Err(Error::ShortRead { path, offset, expected: len, actual });
        }
        Ok(())
    }
}
