// SPDX-License-Identifier: MIT OR Apache-2.0
//! Local files: this module opens them, detects changes, and performs blocking reads.
//!
//! The open file is the source, and its path is only a name: what happens to the path after opening
//! changes nothing. So all handles are opened through the first one.

use std::fs::File;
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::descriptors::Descriptor;
use crate::hook::ReadHook;
use crate::progress::{Progress, Step};
use crate::scatter::{Block, Target};
use crate::source::{Fingerprint, Origin, Source};
use crate::{Error, sys};

/// The way in which a blocking read accesses a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Through the page cache, with any alignment.
    Buffered,
    /// Like `Buffered`, but through a handle without readahead if the system supports that. Used
    /// by `adaptive`, mostly for ranges that are in the page cache.
    Cached,
    /// With O_DIRECT, into memory that is aligned as [`ReadRequest`](crate::ReadRequest) describes.
    Direct,
    /// By copying from a mapping of the file.
    #[cfg(target_os = "linux")]
    Mapped,
}

/// A regular file, opened for reading.
#[derive(Debug)]
pub(crate) struct FileOrigin {
    path: PathBuf,
    /// Whether the file was opened at `path`, rather than by another process.
    has_path: bool,
    fingerprint: Fingerprint,
    file: File,
    _descriptor: Descriptor,
    /// The handle for direct I/O, opened on first use, or the reason why it cannot be opened.
    direct: OnceLock<Result<DirectFile, String>>,
    /// A handle without readahead, opened on first use. `None` if the system does not support it,
    /// or the process has too many open files.
    no_readahead: OnceLock<Option<(File, Descriptor)>>,
}

/// The open handles of a regular file, which can be passed to another process.
#[derive(Debug)]
pub struct FileHandles {
    /// The handle for reads through the page cache.
    pub file: File,
    /// The handle for direct reads, and the alignment in bytes that they require. `None` if the
    /// file does not support them.
    pub direct: Option<(File, usize)>,
}

/// A file opened with O_DIRECT, and its alignment in bytes.
#[derive(Debug)]
pub(crate) struct DirectFile {
    pub(crate) file: Arc<File>,
    pub(crate) alignment: usize,
    /// Whether a read can be submitted to io_uring without waiting for the device.
    #[cfg(target_os = "linux")]
    pub(crate) suits_rings: bool,
    _descriptor: Descriptor,
    /// The file's handle in cuFile, registered on first use, or the reason why that failed.
    #[cfg(target_os = "linux")]
    cufile: OnceLock<Result<sys::CuFileHandle, String>>,
}

impl DirectFile {
    /// Returns the handle, or a reason if it is not one of the file with this fingerprint.
    fn new(
        file: File,
        alignment: usize,
        opened: &Fingerprint,
        descriptor: Descriptor,
    ) -> Result<Self, String> {
        let (_, now) =
            sys::state_of(&file).map_err(|e| format!("cannot read its metadata: {e}"))?;
        match opened.difference(&now) {
            Some(Difference::Content(what)) => Err(format!("changed since it was opened: {what}")),
            // Reads check the ctime.
            _ => Ok(Self {
                #[cfg(target_os = "linux")]
                suits_rings: sys::suits_rings(&file),
                #[cfg(target_os = "linux")]
                cufile: OnceLock::new(),
                file: Arc::new(file),
                _descriptor: descriptor,
                alignment,
            }),
        }
    }
}

impl FileOrigin {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        // An absolute path names the same file even after the working directory changes.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let failed = |source: std::io::Error| Error::Open {
            path: path.clone(),
            source: explained(source).into(),
        };
        // The type is checked before the file is opened, because opening a named pipe waits for a
        // writer.
        let kind = std::fs::metadata(&path).map_err(failed)?;
        if kind.is_dir() {
            return Err(failed(std::io::ErrorKind::IsADirectory.into()));
        }
        if !kind.is_file() {
            return Err(failed(std::io::Error::other("not a regular file")));
        }
        let _descriptor = Descriptor::required();
        let file = File::open(&path).map_err(failed)?;
        let (_, fingerprint) = sys::state_of(&file).map_err(failed)?;
        let (direct, no_readahead) = (OnceLock::new(), OnceLock::new());
        Ok(Self { path, has_path: true, fingerprint, file, _descriptor, direct, no_readahead })
    }

    pub(crate) fn from_handles(name: PathBuf, handles: FileHandles) -> Result<Self, Error> {
        let failed =
            |source: std::io::Error| Error::Open { path: name.clone(), source: source.into() };
        let FileHandles { file, direct } = handles;
        let (is_regular, fingerprint) = sys::state_of(&file).map_err(failed)?;
        if !is_regular {
            return Err(failed(std::io::Error::other("not a regular file")));
        }
        let direct = match direct {
            Some((direct, alignment)) => {
                DirectFile::new(direct, alignment, &fingerprint, Descriptor::required())
            }
            None => Err("another process has opened it without O_DIRECT".into()),
        };
        let (direct, no_readahead) = (OnceLock::from(direct), OnceLock::new());
        let _descriptor = Descriptor::required();
        let (path, has_path) = (name, false);
        Ok(Self { path, has_path, fingerprint, file, _descriptor, direct, no_readahead })
    }

    pub(crate) fn handles(&self) -> std::io::Result<FileHandles> {
        let direct = match self.direct() {
            Ok(direct) => Some((direct.file.try_clone()?, direct.alignment)),
            Err(_) => None,
        };
        Ok(FileHandles { file: self.file.try_clone()?, direct })
    }

    /// Returns the file that `source` reads, if it reads a local file.
    pub(crate) fn of(source: &Source) -> Option<&Self> {
        source.origin()
    }

    /// Returns the handle for reads through the page cache.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the handle for direct I/O, or the reason why it cannot be opened.
    pub(crate) fn direct(&self) -> Result<&DirectFile, &str> {
        let opened = self.direct.get_or_init(|| {
            let descriptor = Descriptor::optional().ok_or("the process has too many open files")?;
            let opened = sys::open_direct(&self.file, &self.path).map_err(|e| e.to_string())?;
            DirectFile::new(opened.0, opened.1, &self.fingerprint, descriptor)
        });
        opened.as_ref().map_err(String::as_str)
    }

    /// Returns the file's handle in cuFile, or the reason why the file cannot be registered.
    #[cfg(target_os = "linux")]
    pub(crate) fn cufile(&self) -> Result<&sys::CuFileHandle, &str> {
        let direct = self.direct()?;
        let handle = direct.cufile.get_or_init(|| sys::CuFileHandle::new(&direct.file));
        handle.as_ref().map_err(String::as_str)
    }

    fn no_readahead(&self) -> &File {
        let opened = self.no_readahead.get_or_init(|| {
            let descriptor = Descriptor::optional()?;
            Some((sys::reopen_without_readahead(&self.file).ok()?, descriptor))
        });
        opened.as_ref().map_or(&self.file, |(file, _)| file)
    }

    /// Fills `target` with the bytes from `offset` on, up to the end of the file. Returns the
    /// number of bytes read. Blocks.
    ///
    /// For direct reads, memory must be aligned as [`ReadRequest`](crate::ReadRequest) describes.
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
                    reason: format!("{}: {reason}", self.path.display()),
                };
                let direct = match self.direct() {
                    Ok(direct) => direct,
                    Err(reason) => {
                        self.verify(offset)?;
                        return Err(unavailable(reason));
                    }
                };
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

    fn is_file(&self) -> bool {
        true
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8], _: Duration) -> Result<usize, Error> {
        self.read(Access::Buffered, offset, &mut Target::Slice(buffer), &ReadHook::default())
    }

    fn verify(&self, offset: u64) -> Result<(), Error> {
        let changed = |what| Error::Changed { path: self.path.clone(), offset, what };
        let (_, now) = sys::state_of(&self.file)
            .map_err(|e| changed(format!("its metadata can no longer be read: {e}")))?;
        match self.fingerprint.difference(&now) {
            Some(Difference::Content(what)) => Err(changed(what)),
            // Renaming a file changes its ctime, too.
            Some(Difference::Ctime) if self.is_at_path() => Err(changed(
                "its ctime changed although its modification time did not, so it may have been \
                 written to"
                    .into(),
            )),
            _ => Ok(()),
        }
    }

    fn is_at_path(&self) -> bool {
        !self.has_path
            || std::fs::metadata(&self.path)
                .is_ok_and(|metadata| sys::identity(&metadata) == self.fingerprint.identity)
    }

    fn direct_alignment(&self) -> Result<usize, &str> {
        self.direct().map(|direct| direct.alignment)
    }

    fn residency(&self, offset: u64, len: usize) -> Option<f64> {
        let rest = self.fingerprint.len.saturating_sub(offset);
        sys::residency(&self.file, offset, usize::try_from(rest).unwrap_or(usize::MAX).min(len))
    }

    fn evict(&self) -> Result<(), Error> {
        sys::evict(&self.file).map_err(|e| {
            let what = format!("cannot drop the file from the page cache: {e}");
            self.read_error(0, 0, std::io::Error::new(e.kind(), what))
        })
    }
}

impl Fingerprint {
    /// Returns the state of a file where `sys::state_of` does not ask the kernel itself.
    #[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
    pub(crate) fn of(metadata: &std::fs::Metadata) -> Self {
        Self {
            identity: sys::identity(metadata),
            len: metadata.len(),
            modified: metadata.modified().ok(),
            changed: sys::changed(metadata),
            etag: None,
        }
    }

    /// Returns how the state `now` of the same file differs from the earlier state `self`, or
    /// `None` if nothing in them shows a change of the content.
    fn difference(&self, now: &Self) -> Option<Difference> {
        let content = |what: String| Some(Difference::Content(what));
        if self.identity != now.identity {
            content("another file has taken its place".into())
        } else if self.len != now.len {
            content(format!("it had {} bytes and now has {}", self.len, now.len))
        } else if self.modified != now.modified {
            content("it was written to".into())
        } else {
            self.is_changed(now).then_some(Difference::Ctime)
        }
    }

    /// Returns whether the ctime differs although link count, mode, owner and group are the same.
    ///
    /// Removing or replacing a name of the file also changes the ctime, but lowers the link count.
    /// The content stays the same, so this does not count as a change.
    fn is_changed(&self, now: &Self) -> bool {
        match (self.changed, now.changed) {
            (Some((then, old)), Some((now, new))) => then != now && old == new,
            _ => false,
        }
    }
}

/// Adds to an error what to do if the process has too many open files.
fn explained(error: std::io::Error) -> std::io::Error {
    match sys::too_many_files(&error) {
        true => std::io::Error::other(format!(
            "{error}: each file of a checkpoint needs a descriptor while it is used; raise the \
             limit, for example with `ulimit -n`"
        )),
        false => error,
    }
}

/// A difference between two states of a file.
#[derive(Debug)]
enum Difference {
    /// The content changed, or it is another file. With a description.
    Content(String),
    /// Only the ctime changed.
    Ctime,
}
