// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files that appear whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ts_io::Writer;

use crate::Error;

/// How often a waiting process looks again.
const POLL: Duration = Duration::from_millis(20);

/// The right to write the file that will be called `target`: until it is dropped, every other process waits for it.
///
/// It is a lock on `NAME.partial`, beside that place. One that was killed leaves a file that the next one takes over.
#[derive(Debug)]
pub(crate) struct Claim {
    file: File,
    partial: PathBuf,
    target: PathBuf,
    committed: bool,
    /// A forked child has a copy of this and not the file.
    process: u32,
}

impl Claim {
    /// Blocks until no other process writes the file; `interrupt` is asked every 20 ms and ends the wait by returning
    /// true.
    pub(crate) fn new(target: &Path, interrupt: &mut dyn FnMut() -> bool) -> Result<Self, Error> {
        let partial = partial_of(target).ok_or_else(|| {
            let source = std::io::Error::new(ErrorKind::InvalidInput, "it has no file name");
            Error::Write { path: target.into(), source }
        })?;
        let failed = |source| Error::Write { path: partial.clone(), source };
        loop {
            // A link would have its target written over, and a pipe would wait for a reader.
            if fs::symlink_metadata(&partial).is_ok_and(|there| !there.is_file()) {
                return Err(failed(std::io::Error::other(
                    "in its place is something that is no regular file",
                )));
            }
            let mut options = OpenOptions::new();
            let file = options.create(true).truncate(false).read(true).write(true).open(&partial);
            let file = file.map_err(failed)?;
            match file.try_lock() {
                // The writer before may have renamed or removed what was opened: then it is not ours to write.
                Ok(()) if is_at(&file, &partial) => {
                    let (target, process) = (target.to_path_buf(), std::process::id());
                    return Ok(Self { file, partial, target, committed: false, process });
                }
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(source)) => return Err(failed(source)),
            }
            std::thread::sleep(POLL);
            if interrupt() {
                return Err(Error::Interrupted);
            }
        }
    }

    /// Begins the file, empty, and sets `expected` bytes aside for it.
    pub(crate) fn begin(self, expected: u64) -> Result<AtomicFile, Error> {
        let file = self.file.try_clone().map_err(|e| self.failed(e))?;
        let writer = Writer::new(file, &self.target, expected)?;
        Ok(AtomicFile { writer: Some(writer), claim: self })
    }

    fn failed(&self, source: std::io::Error) -> Error {
        Error::Write { path: self.target.clone(), source }
    }

    /// Gives the file its name.
    fn rename(&mut self) -> std::io::Result<()> {
        // First, so that nothing has happened if it cannot be opened.
        let directory = Directory::of(&self.target)?;
        if !is_at(&self.file, &self.partial) {
            return Err(std::io::Error::other(
                "another process has put a file in place of the unfinished one",
            ));
        }
        fs::rename(&self.partial, &self.target)?;
        self.committed = true;
        directory.sync()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.process == std::process::id() && !self.committed && is_at(&self.file, &self.partial) {
            // Nothing is lost if this fails: the next writer takes the file over.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// A file that is being written beside the place it is for. [`commit`](Self::commit) makes it durable and gives it its
/// name; dropping it instead removes it.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    /// `None` only while it is being dropped. Before the claim, which is held until nothing is being written any more.
    writer: Option<Writer>,
    claim: Claim,
}

impl AtomicFile {
    /// Writes behind what was written last.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.writer().write(bytes)?)
    }

    /// Goes to `offset`; what is skipped reads as zeros.
    pub(crate) fn seek(&mut self, offset: u64) -> Result<(), Error> {
        Ok(self.writer().seek(offset)?)
    }

    /// Waits until everything written is on the disk.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        Ok(self.writer().sync()?)
    }

    fn writer(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("present until drop")
    }

    /// Gives the file its name, replacing what had it. Durable when it returns. After an error what had the name before
    /// still has it, but for one: when the directory cannot be brought to the disk, the file is there and may be gone
    /// after a loss of power.
    pub(crate) fn commit(mut self) -> Result<(), Error> {
        self.flush()?;
        self.claim.rename().map_err(|e| self.claim.failed(e))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if self.claim.process != std::process::id() {
            // Its thread is the parent's, and cannot be waited for here.
            std::mem::forget(self.writer.take());
        }
    }
}

/// Where a file is while it is not finished.
pub(crate) fn partial_of(target: &Path) -> Option<PathBuf> {
    let mut name = target.file_name().map(OsString::from)?;
    name.push(".partial");
    Some(target.with_file_name(name))
}

/// Whether `path` still names the file that was opened.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |a: &fs::Metadata, b: &fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    matches!((file.metadata(), fs::metadata(path)), (Ok(a), Ok(b)) if same(&a, &b))
}

/// Elsewhere a file that is open cannot be renamed or removed.
#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}

/// Where a file's name is.
struct Directory(#[cfg(unix)] File);

impl Directory {
    #[cfg(unix)]
    fn of(file: &Path) -> std::io::Result<Self> {
        let parent = file.parent().filter(|parent| *parent != Path::new(""));
        Ok(Self(File::open(parent.unwrap_or(Path::new(".")))?))
    }

    /// Brings names to the disk, where the file system has a way.
    #[cfg(unix)]
    fn sync(&self) -> std::io::Result<()> {
        match self.0.sync_all() {
            Err(e) if matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
            synced => synced,
        }
    }

    /// Elsewhere directories cannot be opened.
    #[cfg(not(unix))]
    fn of(_: &Path) -> std::io::Result<Self> {
        Ok(Self())
    }

    #[cfg(not(unix))]
    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }
}
