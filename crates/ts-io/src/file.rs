// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files of this machine: opening them, checking that they did not change, and blocking reads.

use std::fs::{File, Metadata};
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::hook::ReadHook;
use crate::progress::{Progress, Step};
use crate::scatter::{Block, Target};
use crate::source::{Fingerprint, Origin, Source};
use crate::{Error, sys};

/// How a blocking read accesses a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Through the page cache, with any alignment.
    Buffered,
    /// Like `Buffered`, through a handle without readahead: for ranges that the page cache is known
    /// to hold.
    Cached,
    /// With O_DIRECT; everything is aligned.
    Direct,
    /// Copied from a mapping of the file.
    #[cfg(target_os = "linux")]
    Mapped,
}

/// A regular file, opened for reading.
#[derive(Debug)]
pub(crate) struct FileOrigin {
    path: PathBuf,
    fingerprint: Fingerprint,
    file: File,
    /// Opened on first use; if that fails, the reason.
    direct: OnceLock<Result<DirectFile, String>>,
    /// A handle without readahead, opened on first use; `None` where the system has none.
    no_readahead: OnceLock<Option<File>>,
}

/// The same file, opened with O_DIRECT.
#[derive(Debug)]
pub(crate) struct DirectFile {
    pub(crate) file: Arc<File>,
    pub(crate) alignment: usize,
    /// Whether submitting a read to io_uring never waits for the device.
    #[cfg(target_os = "linux")]
    pub(crate) suits_rings: bool,
    /// The file's handle in cuFile, registered on first use.
    #[cfg(target_os = "linux")]
    cufile: OnceLock<Result<sys::CuFileHandle, String>>,
}

impl FileOrigin {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        // Absolute, so that it names the same file after the working directory changes.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let failed =
            |source: std::io::Error| Error::Open { path: path.clone(), source: source.into() };
        // Checked before opening, because opening a named pipe waits for a writer.
        let kind = std::fs::metadata(&path).map_err(failed)?;
        if kind.is_dir() {
            return Err(failed(std::io::ErrorKind::IsADirectory.into()));
        }
        if !kind.is_file() {
            return Err(failed(std::io::Error::other("not a regular file")));
        }
        let file = File::open(&path).map_err(failed)?;
        let fingerprint = Fingerprint::of(&file.metadata().map_err(failed)?);
        let (direct, no_readahead) = (OnceLock::new(), OnceLock::new());
        Ok(Self { path, fingerprint, file, direct, no_readahead })
    }

    /// The file behind `source`, if it is one.
    pub(crate) fn of(source: &Source) -> Option<&Self> {
        source.origin()
    }

    /// The ordinary handle.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The handle for direct I/O, or why there is none.
    pub(crate) fn direct(&self) -> Result<&DirectFile, &str> {
        let opened = self.direct.get_or_init(|| {
            let (file, alignment) = sys::open_direct(&self.path).map_err(|e| e.to_string())?;
            let now = file.metadata().map_err(|e| e.to_string())?;
            match self.fingerprint.difference(&Fingerprint::of(&now)) {
                Some(what) => Err(what),
                None => Ok(DirectFile {
                    #[cfg(target_os = "linux")]
                    suits_rings: sys::suits_rings(&file),
                    #[cfg(target_os = "linux")]
                    cufile: OnceLock::new(),
                    file: Arc::new(file),
                    alignment,
                }),
            }
        });
        opened.as_ref().map_err(String::as_str)
    }

    /// The file's handle in cuFile, or why there is none.
    #[cfg(target_os = "linux")]
    pub(crate) fn cufile(&self) -> Result<&sys::CuFileHandle, &str> {
        let direct = self.direct()?;
        let handle = direct.cufile.get_or_init(|| sys::CuFileHandle::new(&direct.file));
        handle.as_ref().map_err(String::as_str)
    }

    fn no_readahead(&self) -> &File {
        let file = self.no_readahead.get_or_init(|| sys::reopen_without_readahead(&self.file).ok());
        file.as_ref().unwrap_or(&self.file)
    }

    /// Fills `target` with the bytes from `offset` on, up to the end of the file; returns how many.
    /// For direct reads the memory must be aligned as [`ReadRequest`](crate::ReadRequest) says.
    /// Blocks.
    pub(crate) fn read(
        &self,
        access: Access,
        offset: u64,
        target: &mut Target<'_>,
        hook: &ReadHook,
    ) -> Result<usize, Error> {
        let mut alignment = 1;
        let file = match access {
            Access::Direct => {
                let unavailable = |reason: &str| Error::Unavailable {
                    backend: "direct".into(),
                    reason: reason.into(),
                };
                let direct = self.direct().map_err(unavailable)?;
                alignment = direct.alignment;
                &direct.file
            }
            Access::Cached => self.no_readahead(),
            _ => &self.file,
        };
        let read_into = match access {
            #[cfg(target_os = "linux")]
            Access::Mapped => sys::read_mapped_at,
            _ => sys::read_vectored_at,
        };
        let mut progress = Progress::new(offset, target.len(), self.fingerprint.len, alignment);
        while let Some(step) = progress.step() {
            let answer = match step {
                Step::InPlace { offset, at, len } => {
                    let read = || read_into(file, &mut target.slices(at, len), offset);
                    hook.run(&self.path, offset, len, read)
                }
                Step::Bounce { offset, skip, at, .. } => {
                    let mut block = Block::zeroed();
                    let block = &mut block.0[..alignment];
                    let read =
                        || sys::read_vectored_at(file, &mut [IoSliceMut::new(block)], offset);
                    let answer = hook.run(&self.path, offset, alignment, read);
                    let wanted = progress
                        .advance(answer)
                        .map_err(|e| self.read_error(offset, alignment, e))?;
                    target.copy(at, &block[skip..skip + wanted]);
                    continue;
                }
            };
            let at = offset + progress.done() as u64;
            progress.advance(answer).map_err(|e| self.read_error(at, target.len(), e))?;
        }
        Ok(progress.done())
    }

    fn read_error(&self, offset: u64, len: usize, error: std::io::Error) -> Error {
        Error::read(&self.path, offset, len, error)
    }
}

impl Origin for FileOrigin {
    fn path(&self) -> &Path {
        &self.path
    }

    fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8], _: Duration) -> Result<usize, Error> {
        self.read(Access::Buffered, offset, &mut Target::Slice(buffer), &ReadHook::default())
    }

    fn verify(&self, offset: u64) -> Result<(), Error> {
        let changed = |what| Error::Changed { path: self.path.clone(), offset, what };
        let by_handle = self
            .file
            .metadata()
            .map_err(|e| changed(format!("its metadata cannot be read: {e}")))?;
        let by_path =
            std::fs::metadata(&self.path).map_err(|e| changed(format!("it is gone: {e}")))?;
        for now in [by_path, by_handle] {
            if let Some(what) = self.fingerprint.difference(&Fingerprint::of(&now)) {
                return Err(changed(what));
            }
        }
        Ok(())
    }

    fn direct_alignment(&self) -> Result<usize, &str> {
        self.direct().map(|direct| direct.alignment)
    }

    fn residency(&self, offset: u64, len: usize) -> Option<f64> {
        let rest = self.fingerprint.len.saturating_sub(offset);
        sys::residency(&self.file, offset, usize::try_from(rest).unwrap_or(usize::MAX).min(len))
    }

    fn evict(&self) -> Result<(), Error> {
        sys::evict(&self.file).map_err(|e| self.read_error(0, 0, e))
    }
}

impl Fingerprint {
    fn of(metadata: &Metadata) -> Self {
        Self {
            identity: sys::identity(metadata),
            len: metadata.len(),
            modified: metadata.modified().ok(),
            changed: sys::changed(metadata),
            etag: None,
        }
    }

    /// Describes how `now` differs from `self`, an earlier state.
    fn difference(&self, now: &Self) -> Option<String> {
        if self.identity != now.identity {
            Some("another file has taken its place".into())
        } else if self.len != now.len {
            Some(format!("it had {} bytes and now has {}", self.len, now.len))
        } else if self.modified != now.modified {
            Some("it was written to".into())
        } else if self.is_changed(now) {
            Some("it was written to or renamed, and its modification time was set back".into())
        } else {
            None
        }
    }

    /// Whether the change time differs although the attributes are the same. Removing the file or
    /// replacing its name only lowers the link count and leaves the content as it was.
    fn is_changed(&self, now: &Self) -> bool {
        match (self.changed, now.changed) {
            (Some((then, old)), Some((now, new))) => then != now && old == new,
            _ => false,
        }
    }
}
