// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files that appear whole or not at all, or are appended to.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ts_format::ContainerEnds;
use ts_io::Writer;
use ts_io::fault::{WriteCall, WriteFaults};

use crate::Error;
use crate::checkpoint::open_error;

/// How often a waiting process looks again.
const POLL: Duration = Duration::from_millis(20);

/// The right to write the file that will be called `target`: until it is dropped, every other
/// process waits for it.
///
/// It is a lock on `NAME.partial`, beside that place. One that was killed leaves a file that the
/// next one takes over.
#[derive(Debug)]
pub(crate) struct Claim {
    file: File,
    partial: PathBuf,
    target: PathBuf,
    /// What is at `partial` shall stay: the file is committed, or another process may go on with
    /// it.
    keep: bool,
    faults: WriteFaults,
    /// A forked child has a copy of this and not the file.
    process: u32,
}

impl Claim {
    /// Blocks until no other process writes the file; `interrupt` is asked every 20 ms and ends the
    /// wait by returning true.
    pub(crate) fn new(
        target: &Path,
        faults: &WriteFaults,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Error> {
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
                // The writer before may have renamed or removed what was opened: then it is not
                // ours to write.
                Ok(()) if is_at(&file, &partial) => {
                    let (target, process) = (target.to_path_buf(), std::process::id());
                    let faults = faults.clone();
                    return Ok(Self { file, partial, target, keep: false, faults, process });
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

    /// The unfinished file.
    pub(crate) fn partial(&self) -> &Path {
        &self.partial
    }

    /// Begins the file, empty, and sets `expected` bytes aside for it.
    pub(crate) fn begin(mut self, expected: u64) -> Result<AtomicFile, Error> {
        self.keep = false;
        let emptied = self
            .faults
            .check(&self.target, WriteCall::SetLen(0))
            .and_then(|()| self.file.set_len(0));
        emptied.map_err(|e| self.failed(e))?;
        self.resume(0, expected)
    }

    /// Goes on with the unfinished file at byte `at`.
    pub(crate) fn resume(self, at: u64, expected: u64) -> Result<AtomicFile, Error> {
        let file = self.file.try_clone().map_err(|e| self.failed(e))?;
        let writer = Writer::new(file, &self.target, at, expected, self.faults.clone())?;
        Ok(AtomicFile { writer: Some(writer), in_place: None, claim: self })
    }

    /// Lets the unfinished file stay, whatever happens, for another process to go on with.
    pub(crate) fn keep(&mut self) {
        self.keep = true;
    }

    /// The finished file, which nobody else appends to, by whatever name, while it is open.
    pub(crate) fn open_target(&self, interrupt: &mut dyn FnMut() -> bool) -> Result<File, Error> {
        let opened = OpenOptions::new().read(true).write(true).open(&self.target);
        let file = opened.map_err(|e| open_error(&self.target, e))?;
        // Elsewhere a lock would keep readers out.
        #[cfg(unix)]
        while let Err(error) = file.try_lock() {
            if let TryLockError::Error(source) = error {
                return Err(self.failed(source));
            }
            std::thread::sleep(POLL);
            if interrupt() {
                return Err(Error::Interrupted);
            }
        }
        Ok(file)
    }

    /// Goes on with the finished file, of which the first `used` bytes count, at byte `at`.
    /// `active` is the superblock that says so, and where it is.
    pub(crate) fn append(
        self,
        file: File,
        used: u64,
        active: (u64, &[u8]),
        at: u64,
        expected: u64,
    ) -> Result<AtomicFile, Error> {
        if !is_at(&file, &self.target) {
            return Err(self.failed(replaced()));
        }
        // An append before this one may have been cut short.
        let cut = || {
            if file.metadata()?.len() > used {
                self.faults.check(&self.target, WriteCall::SetLen(used))?;
                file.set_len(used)?;
            }
            file.try_clone()
        };
        let cloned = cut().map_err(|e| self.failed(e))?;
        let in_place = InPlace { file, used, switching: false };
        match Writer::new(cloned, &self.target, at, expected, self.faults.clone()) {
            Ok(writer) => {
                let mut this =
                    AtomicFile { writer: Some(writer), in_place: Some(in_place), claim: self };
                // An append whose last flush failed may have left it in the page cache alone; the
                // other superblock, which is about to be written over, would then be the only one
                // on the disk.
                this.seek(active.0)?;
                this.write(active.1)?;
                this.flush()?;
                this.seek(at)?;
                Ok(this)
            }
            Err(error) => {
                // What was set aside behind its end.
                let _ = in_place.file.set_len(used);
                Err(error.into())
            }
        }
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
        self.faults.check(&self.target, WriteCall::Rename(&self.target))?;
        fs::rename(&self.partial, &self.target)?;
        self.keep = true;
        self.faults.check(&self.target, WriteCall::SyncDirectory)?;
        directory.sync()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.process == std::process::id() && !self.keep && is_at(&self.file, &self.partial) {
            // Nothing is lost if this fails: the next writer takes the file over.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// A file that is being written beside the place it is for. [`commit`](Self::commit) makes it
/// durable and gives it its name; dropping it instead removes it. Or one that is appended to, which
/// is cut off again instead.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    /// `None` only while it is being dropped. Before the claim, which is held until nothing is
    /// being written any more.
    writer: Option<Writer>,
    in_place: Option<InPlace>,
    claim: Claim,
}

/// A file that has its name already.
#[derive(Debug)]
struct InPlace {
    file: File,
    /// Bytes of it that count until it is committed.
    used: u64,
    /// From here on what was appended may count.
    switching: bool,
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

    /// Ends the file at `len`.
    pub(crate) fn truncate(&mut self, len: u64) -> Result<(), Error> {
        Ok(self.writer().truncate(len)?)
    }

    /// Writes the ends of a container, and waits in between.
    pub(crate) fn write_ends(&mut self, ends: &ContainerEnds) -> Result<(), Error> {
        self.seek(ends.index_offset)?;
        self.write(&ends.index)?;
        self.flush()?;
        if let Some(in_place) = &mut self.in_place {
            if !is_at(&in_place.file, &self.claim.target) {
                return Err(self.claim.failed(replaced()));
            }
            in_place.switching = true;
        }
        self.seek(ends.superblocks_offset)?;
        self.write(&ends.superblocks)
    }

    /// Lets the unfinished file stay, whatever happens, for another process to go on with.
    pub(crate) fn keep(&mut self) {
        self.claim.keep();
    }

    /// Whether another process could go on with it.
    pub(crate) fn is_kept(&self) -> bool {
        self.claim.keep
    }

    /// Waits until everything written is on the disk.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        Ok(self.writer().sync()?)
    }

    fn writer(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("present until drop")
    }

    /// Gives the file its name, replacing what had it. Durable when it returns. After an error what
    /// had the name before still has it, but for one: when the directory cannot be brought to the
    /// disk, the file is there and may be gone after a loss of power.
    pub(crate) fn commit(mut self) -> Result<(), Error> {
        self.flush()?;
        if self.in_place.is_some() {
            return Ok(());
        }
        self.claim.rename().map_err(|e| self.claim.failed(e))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if self.claim.process != std::process::id() {
            // Its thread is the parent's, and cannot be waited for here.
            std::mem::forget(self.writer.take());
            return;
        }
        drop(self.writer.take());
        if let Some(InPlace { file, used, switching: false }) = &self.in_place {
            // What is behind counts for nothing, and is gone with the next append if it is not now.
            let _ = file.set_len(*used);
        }
    }
}

fn replaced() -> std::io::Error {
    std::io::Error::other("another file has taken its place")
}

/// Where a file is while it is not finished.
pub(crate) fn partial_of(target: &Path) -> Option<PathBuf> {
    let mut name = target.file_name().map(OsString::from)?;
    name.push(".partial");
    Some(target.with_file_name(name))
}

/// Whether `path` still names the file that was opened.
#[cfg(unix)]
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |a: &fs::Metadata, b: &fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    matches!((file.metadata(), fs::metadata(path)), (Ok(a), Ok(b)) if same(&a, &b))
}

/// Elsewhere a file that is open cannot be renamed or removed.
#[cfg(not(unix))]
pub(crate) fn is_at(_: &File, path: &Path) -> bool {
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
            Err(e) if matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
                Ok(())
            }
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
