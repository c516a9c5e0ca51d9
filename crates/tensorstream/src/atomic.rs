// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files that are created or appended to atomically.

mod attributes;

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ts_format::ContainerTail;
use ts_io::Writer;
use ts_io::fault::{WriteCall, WriteFaults};

use crate::Error;

/// Delay between attempts to lock a file.
const POLL: Duration = Duration::from_millis(20);

/// The length of what identifies a checkpoint, at the start of the file: the length of a
/// safetensors header, or the magic of a `.ts` file.
const START: usize = 8;

/// The exclusive right to write the file at a path. Other processes wait until the claim is
/// dropped.
///
/// The claim is a lock on `NAME.partial` in the same directory. A process that is killed leaves
/// that file, and the next process reuses it. On a file system without locks, only one process may
/// write a file at a time.
///
/// A file that is replaced keeps its owner, permissions and access control list, as far as the
/// system allows. If the path is a symbolic link, its target is replaced.
#[derive(Debug)]
pub(crate) struct Claim {
    file: File,
    partial: PathBuf,
    target: PathBuf,
    /// Whether dropping the claim leaves the partial file in place. True if the file has been
    /// renamed or can be resumed.
    keep: bool,
    /// Whether links at the target are replaced, instead of what they refer to.
    replaces_links: bool,
    faults: WriteFaults,
    /// The process that owns the claim. A copy of the claim in a forked child must not remove the
    /// file.
    process: u32,
}

impl Claim {
    /// Claims a path. While another process has claimed it, waits and calls `interrupt` every 20
    /// ms. Returns [`Error::Interrupted`] if `interrupt` returns true.
    pub(crate) fn new(
        target: &Path,
        faults: &WriteFaults,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Error> {
        let target = resolved(target).map_err(|source| Error::write(target, source))?;
        let partial = next_to(&target).ok_or_else(|| {
            let reason = "the path has no file name";
            Error::write(&target, std::io::Error::new(ErrorKind::InvalidInput, reason))
        })?;
        if fs::metadata(&target).is_ok_and(|found| !found.is_file()) {
            let reason = "the path exists and is not a regular file";
            return Err(Error::write(&target, std::io::Error::other(reason)));
        }
        loop {
            if let Some(file) = try_claim(&partial).map_err(|e| Error::write(&partial, e))? {
                // Nobody may read the new bytes who may not read the old ones.
                attributes::take_permissions(&file, &target)
                    .map_err(|e| Error::write(&target, e))?;
                return Ok(Self {
                    file,
                    partial,
                    target,
                    keep: false,
                    replaces_links: false,
                    faults: faults.clone(),
                    process: std::process::id(),
                });
            }
            std::thread::sleep(POLL);
            if interrupt() {
                return Err(Error::Interrupted);
            }
        }
    }

    /// Claims the entry of a directory. A symbolic link or another name of a file that is there
    /// will be replaced, so that nothing outside of the directory changes. `target` must have a
    /// file name.
    ///
    /// Returns `None` if another process has claimed it.
    #[cfg(feature = "remote")]
    pub(crate) fn of_entry(target: &Path) -> Result<Option<Self>, Error> {
        let partial = next_to(target).unwrap_or_default();
        let claimed = try_claim(&partial).map_err(|e| Error::write(&partial, e))?;
        Ok(claimed.map(|file| Self {
            file,
            partial,
            target: target.to_path_buf(),
            keep: false,
            replaces_links: true,
            faults: WriteFaults::default(),
            process: std::process::id(),
        }))
    }

    /// Returns the partial file.
    #[cfg(feature = "remote")]
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the path of the partial file.
    pub(crate) fn partial(&self) -> &Path {
        &self.partial
    }

    /// Empties the partial file, and preallocates `expected` bytes.
    pub(crate) fn create(mut self, expected: u64) -> Result<AtomicFile, Error> {
        self.keep = false;
        let emptied = self
            .faults
            .check(&self.target, WriteCall::SetLen(0))
            .and_then(|()| self.file.set_len(0));
        emptied.map_err(|e| self.failed(e))?;
        self.resume(0, expected)
    }

    /// Continues the partial file at `offset`, and preallocates `expected` bytes from there.
    pub(crate) fn resume(self, offset: u64, expected: u64) -> Result<AtomicFile, Error> {
        let file = self.file.try_clone().map_err(|e| self.failed(e))?;
        let writer = Writer::new(file, &self.target, offset, expected, self.faults.clone())?;
        Ok(AtomicFile { writer: Some(writer), in_place: None, claim: self })
    }

    /// Keeps the partial file when the claim is dropped, so that it can be resumed.
    pub(crate) fn keep(&mut self) {
        self.keep = true;
    }

    /// Opens the finished file. On Unix, also locks it, so that no other process appends to it
    /// under another name. Waits for the lock like [`new`](Self::new).
    pub(crate) fn open_target(
        &self,
        #[cfg_attr(not(unix), expect(unused_variables, reason = "nothing is waited for"))]
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<File, Error> {
        let opened = OpenOptions::new().read(true).write(true).open(&self.target);
        let file = opened.map_err(|e| Error::open(&self.target, e))?;
        // On systems other than Unix, the lock would exclude readers.
        #[cfg(unix)]
        while !try_lock(&file).map_err(|source| self.failed(source))? {
            std::thread::sleep(POLL);
            if interrupt() {
                return Err(Error::Interrupted);
            }
        }
        Ok(file)
    }

    /// Starts an append to the finished file `file` at `offset`, and preallocates `expected` bytes.
    /// The first `used` bytes of the file are in use. `superblock` is the offset and content of its
    /// active superblock.
    pub(crate) fn append(
        self,
        file: File,
        used: u64,
        superblock: (u64, &[u8]),
        offset: u64,
        expected: u64,
    ) -> Result<AtomicFile, Error> {
        if !is_file_at(&file, &self.target) {
            return Err(self.failed(replaced()));
        }
        // Removes the bytes that an interrupted append has left.
        let cut = || {
            if file.metadata()?.len() > used {
                self.faults.check(&self.target, WriteCall::SetLen(used))?;
                file.set_len(used)?;
            }
            file.try_clone()
        };
        let cloned = cut().map_err(|e| self.failed(e))?;
        let in_place = InPlace { file, used, published: false };
        match Writer::new(cloned, &self.target, offset, expected, self.faults.clone()) {
            Ok(writer) => {
                let mut this =
                    AtomicFile { writer: Some(writer), in_place: Some(in_place), claim: self };
                // If the last flush of the previous append failed, the active superblock may be
                // only in the page cache. It must be on disk before the other one is overwritten.
                this.seek(superblock.0)?;
                this.write(superblock.1)?;
                this.flush()?;
                this.seek(offset)?;
                Ok(this)
            }
            Err(error) => {
                // Releases the preallocated space.
                let _ = in_place.file.set_len(used);
                Err(error.into())
            }
        }
    }

    pub(crate) fn failed(&self, source: std::io::Error) -> Error {
        Error::write(&self.target, source)
    }

    /// Makes the partial file durable, and renames it to the target.
    #[cfg(feature = "remote")]
    pub(crate) fn commit(&mut self) -> Result<(), Error> {
        self.file.sync_all().and_then(|()| self.publish()).map_err(|e| self.failed(e))
    }

    /// Renames the partial file to the target, durably. If the target has several names, copies the
    /// bytes to it instead, so that all of its names keep meaning the same file.
    fn publish(&mut self) -> std::io::Result<()> {
        // The directory is opened before the rename, so that a failure to open it changes nothing.
        let directory = Directory::open_parent(&self.target)?;
        if !is_file_at(&self.file, &self.partial) {
            return Err(std::io::Error::other(
                "the partial file was replaced or removed after it was opened",
            ));
        }
        self.faults.check(&self.target, WriteCall::Rename(&self.target))?;
        if !self.replaces_links {
            if attributes::names(&self.target) > 1 {
                return self.copy_to_target();
            }
            attributes::take_over(&self.file, &self.target)?;
        }
        fs::rename(&self.partial, &self.target)?;
        self.keep = true;
        self.faults.check(&self.target, WriteCall::SyncDirectory)?;
        directory.sync()
    }

    /// Copies the partial file to the target. Until the last bytes are written, the target is no
    /// valid file. A process that is killed in between leaves the complete partial file.
    fn copy_to_target(&mut self) -> std::io::Result<()> {
        let mut target = OpenOptions::new().write(true).open(&self.target)?;
        let mut start = [0; START];
        self.file.seek(SeekFrom::Start(0))?;
        self.file.read_exact(&mut start)?;
        self.keep = true;
        target.write_all(&[0; START])?;
        target.sync_data()?;
        let copied = std::io::copy(&mut self.file, &mut target)?;
        target.set_len(START as u64 + copied)?;
        target.sync_data()?;
        target.seek(SeekFrom::Start(0))?;
        target.write_all(&start)?;
        target.sync_all()?;
        self.keep = false;
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let is_owner = self.process == std::process::id();
        if is_owner && !self.keep && is_file_at(&self.file, &self.partial) {
            // If this fails, the next writer reuses the file.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// A file that is being created or appended to. [`commit`](Self::commit) makes it durable, and
/// gives a new file its name.
///
/// Without a successful `commit`, drop removes a new file unless it [is kept](Self::is_kept). Drop
/// truncates an existing file to its previous length, unless [`write_tail`](Self::write_tail) has
/// begun to write the superblocks.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    /// `None` only during drop. The writer is dropped before `claim`, so that the lock is released
    /// only after all writes have ended.
    writer: Option<Writer>,
    in_place: Option<InPlace>,
    claim: Claim,
}

/// An existing file that is appended to.
#[derive(Debug)]
struct InPlace {
    file: File,
    /// Number of bytes in use before the append.
    used: u64,
    /// Whether the new superblock may have been written, so that the append may be visible.
    published: bool,
}

impl AtomicFile {
    /// Writes bytes at the current position.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.writer().write(bytes)?)
    }

    /// Moves to `offset`. Skipped bytes read as zeros.
    pub(crate) fn seek(&mut self, offset: u64) -> Result<(), Error> {
        Ok(self.writer().seek(offset)?)
    }

    /// Sets the length of the file to `len` bytes, and moves to its end.
    pub(crate) fn truncate(&mut self, len: u64) -> Result<(), Error> {
        Ok(self.writer().truncate(len)?)
    }

    /// Writes the index, waits until everything is on disk, and then writes the superblocks.
    pub(crate) fn write_tail(&mut self, tail: &ContainerTail) -> Result<(), Error> {
        self.seek(tail.index_offset)?;
        self.write(&tail.index)?;
        self.flush()?;
        if let Some(in_place) = &mut self.in_place {
            if !is_file_at(&in_place.file, &self.claim.target) {
                return Err(self.claim.failed(replaced()));
            }
            in_place.published = true;
        }
        self.seek(tail.superblocks_offset)?;
        self.write(&tail.superblocks)
    }

    /// Keeps the partial file when the `AtomicFile` is dropped, so that it can be resumed.
    pub(crate) fn keep(&mut self) {
        self.claim.keep();
    }

    /// Returns whether the partial file can be resumed.
    pub(crate) fn is_kept(&self) -> bool {
        self.claim.keep
    }

    /// Waits until all written bytes are on disk.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        Ok(self.writer().sync()?)
    }

    fn writer(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("the writer is present until drop")
    }

    /// Makes the file durable. Unless it was appended to in place, renames it to its target.
    ///
    /// After an error, the previous content is unchanged, with two exceptions. If only the last
    /// flush fails, the new content is in place, but may be lost in a power failure. If a file with
    /// several names cannot be copied to, it is no checkpoint, and the partial file has the new
    /// content.
    pub(crate) fn commit(mut self) -> Result<(), Error> {
        self.flush()?;
        if self.in_place.is_some() {
            return Ok(());
        }
        self.claim.publish().map_err(|e| self.claim.failed(e))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if self.claim.process != std::process::id() {
            // The writer's thread exists only in the parent process, so it cannot be joined here.
            std::mem::forget(self.writer.take());
            return;
        }
        drop(self.writer.take());
        if let Some(InPlace { file, used, published: false }) = &self.in_place {
            // If this fails, the next append truncates the file.
            let _ = file.set_len(*used);
        }
    }
}

pub(crate) fn replaced() -> std::io::Error {
    std::io::Error::other("the file was replaced or removed after it was opened")
}

/// Returns the path of the partial file of `target`, next to the file that `target` refers to.
pub(crate) fn partial_path(target: &Path) -> Option<PathBuf> {
    next_to(&resolved(target).ok()?)
}

fn next_to(target: &Path) -> Option<PathBuf> {
    let mut name = target.file_name().map(OsString::from)?;
    name.push(".partial");
    Some(target.with_file_name(name))
}

/// Removes the partial files in a directory that no process is writing, such as those of processes
/// that were killed. `is_own` decides by the name of the finished file.
///
/// Files that cannot be removed are left. On a file system without locks, so are all.
#[cfg(feature = "cli")]
pub fn remove_unfinished(directory: &Path, is_own: &dyn Fn(&str) -> bool) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let finished = name.to_str().and_then(|name| name.strip_suffix(".partial"));
        if !finished.is_some_and(is_own) {
            continue;
        }
        let path = entry.path();
        let opened = attributes::open_without_following(OpenOptions::new().write(true), &path);
        if opened.is_ok_and(|file| file.try_lock().is_ok() && is_file_at(&file, &path)) {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Opens the file at `path` to write it, and creates it if it does not exist. Locks it.
///
/// Returns `None` if another process has locked it, or has just renamed or removed it.
///
/// # Errors
/// Returns an error if the path is a link, a pipe or another thing that is not a regular file. Also
/// if the file has other names, or another user has put it there, who could change what is written.
fn try_claim(path: &Path) -> std::io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).read(true).write(true);
    let file = attributes::open_without_following(&mut options, path)?;
    // If the previous writer renamed or removed the file after this call opened it, the lock is on
    // the wrong file.
    Ok((try_lock(&file)? && is_file_at(&file, path)).then_some(file))
}

/// Locks a file. Returns whether no other process has locked it. A file system without locks does
/// not say, and is taken for one that nobody else writes to.
fn try_lock(file: &File) -> std::io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) if attributes::has_no_locks(&error) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Returns the path to which a path leads if it is a symbolic link, also if nothing is there yet.
fn resolved(path: &Path) -> std::io::Result<PathBuf> {
    const MAX_LINKS: usize = 40;
    let mut path = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        if !fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink()) {
            return Ok(path);
        }
        // A relative target is relative to the directory of the link.
        path = path.parent().unwrap_or(Path::new("")).join(fs::read_link(&path)?);
    }
    Err(std::io::Error::other("too many levels of symbolic links"))
}

/// Returns whether `path` refers to the open file `file`.
#[cfg(unix)]
fn is_file_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |a: &fs::Metadata, b: &fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    matches!((file.metadata(), fs::metadata(path)), (Ok(a), Ok(b)) if same(&a, &b))
}

/// Returns whether `path` exists. On systems other than Unix, the standard library cannot tell
/// whether `path` refers to the open file.
#[cfg(not(unix))]
fn is_file_at(_: &File, path: &Path) -> bool {
    path.exists()
}

/// An open directory, whose entries can be flushed to disk.
struct Directory(#[cfg(unix)] File);

impl Directory {
    #[cfg(unix)]
    fn open_parent(file: &Path) -> std::io::Result<Self> {
        let parent = file.parent().filter(|parent| *parent != Path::new(""));
        Ok(Self(File::open(parent.unwrap_or(Path::new(".")))?))
    }

    /// Makes renames durable, if the file system supports that.
    #[cfg(unix)]
    fn sync(&self) -> std::io::Result<()> {
        match self.0.sync_all() {
            Err(e) if matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
                Ok(())
            }
            synced => synced,
        }
    }

    /// Does nothing: on systems other than Unix, directories cannot be opened.
    #[cfg(not(unix))]
    fn open_parent(_: &Path) -> std::io::Result<Self> {
        Ok(Self())
    }

    #[cfg(not(unix))]
    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }
}
