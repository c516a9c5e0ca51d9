// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files that appear whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ts_io::Writer;

use crate::Error;

/// How often a waiting process looks again.
const POLL: Duration = Duration::from_millis(20);

/// A file that is being written beside the place it is for.
///
/// The data go to `NAME.partial`, which is locked while somebody writes it: a second writer waits, and one that was
/// killed leaves a file that the next one takes over. [`commit`](Self::commit) makes it durable and gives it its
/// name; dropping it instead removes it.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    /// `None` only while it is being dropped.
    writer: Option<Writer>,
    partial: PathBuf,
    target: PathBuf,
    committed: bool,
    /// A forked child has a copy of this and not the file.
    process: u32,
}

impl AtomicFile {
    /// Begins a file that will be called `target`, once no other process writes it, and sets `expected` bytes aside
    /// for it. Blocks until then; `interrupt` is asked every 20 ms and ends the wait by returning true.
    pub(crate) fn create(
        target: &Path,
        expected: u64,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Error> {
        let partial = partial_of(target).ok_or_else(|| {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it has no file name");
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
                    let target = target.to_path_buf();
                    let process = std::process::id();
                    let writer = Writer::new(file, &target, expected).inspect_err(|_| {
                        // Nothing is lost if this fails: the next writer takes the file over.
                        let _ = fs::remove_file(&partial);
                    })?;
                    return Ok(Self { writer: Some(writer), partial, target, committed: false, process });
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

    fn is_at_its_place(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| is_at(writer.file(), &self.partial))
    }

    /// Gives the file its name, replacing what had it. Durable when it returns.
    pub(crate) fn commit(mut self) -> Result<(), Error> {
        self.flush()?;
        let parent = match self.target.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let name = || {
            if !self.is_at_its_place() {
                return Err(std::io::Error::other(
                    "another process has put a file in place of the unfinished one",
                ));
            }
            fs::rename(&self.partial, &self.target)?;
            sync_directory(parent)
        };
        name().map_err(|source| Error::Write { path: self.target.clone(), source })?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Its thread is the parent's, and cannot be waited for here.
            std::mem::forget(self.writer.take());
        } else if !self.committed && self.is_at_its_place() {
            // Nothing is lost if this fails: the next writer takes the file over.
            let _ = fs::remove_file(&self.partial);
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

#[cfg(unix)]
fn sync_directory(path: &Path) -> std::io::Result<()> {
    File::open(path)?.sync_all()
}

/// Elsewhere directories cannot be opened.
#[cfg(not(unix))]
fn sync_directory(_: &Path) -> std::io::Result<()> {
    Ok(())
}
