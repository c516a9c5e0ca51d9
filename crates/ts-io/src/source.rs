// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fs::{File, Metadata};
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use crate::backend::BackendOptions;
use crate::fault::Faults;
use crate::file::Access;
use crate::memory::{Block, Memory};
#[cfg(feature = "object")]
use crate::object::Remote;
use crate::progress::{Progress, Step};
use crate::remote::RemoteSource;
use crate::{Error, sys};

/// What tells one state of a source from another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint {
    /// Device and inode, where the system has them; zeros for an object.
    pub identity: (u64, u64),
    /// Length in bytes.
    pub len: u64,
    /// When the content was last written.
    pub modified: Option<SystemTime>,
    /// When content or attributes last changed, in nanoseconds since 1970, and the attributes:
    /// links, mode, owner, group. Unlike the time of the last write no program can put this one
    /// back. `None` where the system has no such time.
    pub changed: Option<(i128, [u64; 4])>,
    /// What the server of an object calls this version of it.
    pub etag: Option<String>,
}

impl Fingerprint {
    fn of(metadata: &Metadata) -> Self {
        let (identity, modified) = (sys::identity(metadata), metadata.modified().ok());
        Self {
            identity,
            len: metadata.len(),
            modified,
            changed: sys::changed(metadata),
            etag: None,
        }
    }

    /// What differs between `self`, the state then, and `now`.
    fn difference(&self, now: &Self) -> Option<String> {
        if self.identity != now.identity {
            Some("another file has taken its place".into())
        } else if self.len != now.len {
            Some(format!("it had {} bytes and has {}", self.len, now.len))
        } else if self.modified != now.modified {
            Some("it was written to".into())
        } else if self.is_changed(now) {
            Some("it was written to or renamed, and its modification time is the old one".into())
        } else {
            None
        }
    }

    /// Whether the time of the last change is another, and no attribute explains that: a file that
    /// is removed, or another takes its name, has a link less and keeps its content.
    fn is_changed(&self, now: &Self) -> bool {
        match (self.changed, now.changed) {
            (Some((then, had)), Some((now, has))) => then != now && had == has,
            _ => false,
        }
    }
}

/// A file, an object or bytes in memory to read from, as it was when it was opened.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    fingerprint: Fingerprint,
    origin: Origin,
}

#[derive(Debug)]
enum Origin {
    File {
        file: File,
        direct: OnceLock<Result<Direct, String>>,
        /// For copies from the page cache; `None` where the system has no such handle.
        quiet: OnceLock<Option<File>>,
    },
    Memory(Held),
    RemoteSource(Arc<dyn RemoteSource>),
    #[cfg(feature = "object")]
    Object(Remote),
}

/// Bytes that somebody holds.
struct Held(Box<dyn AsRef<[u8]> + Send + Sync>);

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", (*self.0).as_ref().len())
    }
}

/// The same file, opened past the page cache.
#[derive(Debug)]
struct Direct {
    file: File,
    alignment: usize,
    /// Whether handing a read over to the system never waits for the device.
    #[cfg(target_os = "linux")]
    suits_rings: bool,
    /// As cuFile knows it.
    #[cfg(target_os = "linux")]
    gds: OnceLock<Result<sys::CuFileHandle, String>>,
}

impl Source {
    /// Opens a file, or what a URL names, and notes its fingerprint.
    ///
    /// With the feature `object`, `s3://bucket/key`, `gs://`, `az://`, `http://` and `https://` are
    /// read over the network, with the credentials that the environment gives: the variables
    /// `AWS_*` (also of containers and instances), `GOOGLE_*` and `AZURE_*`. `file://` is a path.
    ///
    /// # Errors
    /// [`Error::Open`] when it cannot be opened or is no regular file. Blocks; for an object at
    /// most 60 s.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<Self>, Error> {
        let path = path.as_ref();
        match path.to_str() {
            Some(url) if Self::is_url(url) => Self::open_url(url),
            Some(text) => Self::open_file(Path::new(text.strip_prefix("file://").unwrap_or(text))),
            None => Self::open_file(path),
        }
    }

    /// A file that is in memory, which errors call `name`. It is read by
    /// [`read_at`](Self::read_at); backends, which fill memory, refuse it.
    pub fn in_memory(
        name: impl Into<PathBuf>,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let len = bytes.as_ref().len() as u64;
        let fingerprint =
            Fingerprint { identity: (0, 0), len, modified: None, changed: None, etag: None };
        Arc::new(Self {
            path: name.into(),
            fingerprint,
            origin: Origin::Memory(Held(Box::new(bytes))),
        })
    }

    /// A file that somebody else reads, wherever that is; errors call it `name`.
    pub fn remote(
        name: impl Into<PathBuf>,
        fingerprint: Fingerprint,
        file: Arc<dyn RemoteSource>,
    ) -> Arc<Self> {
        Arc::new(Self { path: name.into(), fingerprint, origin: Origin::RemoteSource(file) })
    }

    /// Who reads it, if that is somebody else.
    pub(crate) fn reader(&self) -> Option<&Arc<dyn RemoteSource>> {
        match &self.origin {
            Origin::RemoteSource(file) => Some(file),
            _ => None,
        }
    }

    /// Whether this text is a URL, and not a path.
    pub fn is_url(text: &str) -> bool {
        text.split_once("://")
            .is_some_and(|(scheme, _)| scheme != "file" && !scheme.contains(['/', '\\']))
    }

    #[cfg(feature = "object")]
    fn open_url(url: &str) -> Result<Arc<Self>, Error> {
        let remote = Remote::open(url, BackendOptions::default().timeout)?;
        let fingerprint = remote.fingerprint().clone();
        Ok(Arc::new(Self { path: url.into(), fingerprint, origin: Origin::Object(remote) }))
    }

    #[cfg(not(feature = "object"))]
    fn open_url(url: &str) -> Result<Arc<Self>, Error> {
        let absent = std::io::Error::new(
            std::io::ErrorKind::Unsupported,
            "this build reads no URLs: it lacks the feature `object`",
        );
        Err(Error::Open { path: url.into(), source: absent.into() })
    }

    fn open_file(path: &Path) -> Result<Arc<Self>, Error> {
        // Absolute, so that it means the same file when the working directory has changed.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let failed =
            |source: std::io::Error| Error::Open { path: path.clone(), source: source.into() };
        // Before it is opened: a named pipe would wait for somebody to write to it.
        let kind = std::fs::metadata(&path).map_err(failed)?;
        if kind.is_dir() {
            return Err(failed(std::io::ErrorKind::IsADirectory.into()));
        }
        if !kind.is_file() {
            return Err(failed(std::io::Error::other("it is no regular file")));
        }
        let file = File::open(&path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        let fingerprint = Fingerprint::of(&metadata);
        Ok(Arc::new(Self {
            path,
            fingerprint,
            origin: Origin::File { file, direct: OnceLock::new(), quiet: OnceLock::new() },
        }))
    }

    /// The object, if it is one.
    #[cfg(feature = "object")]
    pub(crate) fn object(&self) -> Option<&Remote> {
        match &self.origin {
            Origin::File { .. } | Origin::Memory(_) | Origin::RemoteSource(_) => None,
            Origin::Object(remote) => Some(remote),
        }
    }

    /// Whether it is read over the network.
    pub fn is_remote(&self) -> bool {
        !matches!(self.origin, Origin::File { .. } | Origin::Memory(_))
    }

    /// Where it was opened: an absolute path, or the URL of an object.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length in bytes, when it was opened.
    pub fn len(&self) -> u64 {
        self.fingerprint.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its state when it was opened; of bytes in memory their length alone.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// What a direct read's offset, length and memory must be multiples of, in bytes.
    ///
    /// # Errors
    /// The reason why this file cannot be read directly.
    pub fn direct_alignment(&self) -> Result<usize, &str> {
        self.direct().map(|direct| direct.alignment)
    }

    /// The share of `offset..offset + len`, as far as the file goes, that is in the page cache, 0
    /// to 1; `None` where that cannot be asked, as of files that this process may neither write nor
    /// owns.
    pub fn residency(&self, offset: u64, len: usize) -> Option<f64> {
        match &self.origin {
            Origin::File { file, .. } => {
                let there = self.len().saturating_sub(offset);
                sys::residency(file, offset, usize::try_from(there).unwrap_or(usize::MAX).min(len))
            }
            Origin::Memory(_) | Origin::RemoteSource(_) => None,
            #[cfg(feature = "object")]
            Origin::Object(_) => None,
        }
    }

    /// How many of [`SAMPLES`] pages, evenly spread over `offset..offset + len`, the page cache
    /// holds. Asking about all of them would take a twentieth of the time that copying them does.
    pub(crate) fn warm_samples(&self, offset: u64, len: usize) -> usize {
        let last = len.saturating_sub(1) as u64;
        let places =
            (0..SAMPLES as u64).map(|i| offset.saturating_add(last / (SAMPLES as u64 - 1) * i));
        places.filter(|&place| self.residency(place, 1) == Some(1.0)).count()
    }

    /// `offset..offset + len` cut where the page cache begins and ceases to hold it: whether it
    /// does, and how many bytes. In stretches large enough to be worth a request of their own, but
    /// for the ends.
    pub(crate) fn resident_runs(&self, offset: u64, len: usize) -> Vec<(bool, usize)> {
        /// Of the file; a multiple of what direct I/O and the page cache work in.
        const STRETCH: u64 = 128 << 10;
        let mut runs: Vec<(bool, usize)> = Vec::new();
        let end = offset.saturating_add(len as u64);
        let mut at = offset;
        while at < end {
            let next = (at - at % STRETCH + STRETCH).min(end);
            let warm = self.residency(at, (next - at) as usize) == Some(1.0);
            match runs.last_mut() {
                Some(last) if last.0 == warm => last.1 += (next - at) as usize,
                _ => runs.push((warm, (next - at) as usize)),
            }
            at = next;
        }
        runs
    }

    /// Has the page cache let this file go, as far as nobody else holds it there. For measurements
    /// of a cold file; waits until what was written to it is on the disk.
    ///
    /// # Errors
    /// [`Error::Read`] when the system cannot. An object is never in the page cache. Blocks.
    pub fn evict(&self) -> Result<(), Error> {
        match &self.origin {
            Origin::File { file, .. } => sys::evict(file).map_err(|e| self.failed(0, 0, e)),
            Origin::Memory(_) | Origin::RemoteSource(_) => Ok(()),
            #[cfg(feature = "object")]
            Origin::Object(_) => Ok(()),
        }
    }

    /// Reads `buffer.len()` bytes at `offset`, of a file through the page cache; fewer only at its
    /// end.
    ///
    /// # Errors
    /// [`Error::Read`]; of an object also [`Error::Changed`] and, after 60 s, [`Error::TimedOut`].
    /// Blocks.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        if let Origin::RemoteSource(file) = &self.origin {
            return file.read_at(offset, buffer, BackendOptions::default().deadline());
        }
        #[cfg(feature = "object")]
        if let Origin::Object(remote) = &self.origin {
            return remote.read_at(offset, buffer, BackendOptions::default().timeout);
        }
        if let Origin::Memory(held) = &self.origin {
            let bytes = (*held.0).as_ref();
            let there =
                &bytes[usize::try_from(offset).map_or(bytes.len(), |at| at.min(bytes.len()))..];
            let len = there.len().min(buffer.len());
            buffer[..len].copy_from_slice(&there[..len]);
            return Ok(len);
        }
        self.read(Access::Buffered, offset, &mut Memory::Slice(buffer), &Faults::default())
    }

    /// Fills `memory` with what is at `offset` on, as far as the file goes; for direct reads it
    /// must be aligned as [`ReadRequest`](crate::ReadRequest) says.
    pub(crate) fn read(
        &self,
        access: Access,
        offset: u64,
        memory: &mut Memory<'_>,
        faults: &Faults,
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
            Access::Cached => self.quiet_file().ok_or_else(|| self.no_file())?,
            _ => self.file().ok_or_else(|| self.no_file())?,
        };
        let call = match access {
            #[cfg(target_os = "linux")]
            Access::Mapped => sys::read_mapped_at,
            _ => sys::read_vectored_at,
        };
        let mut progress = Progress::new(offset, memory.len(), self.len(), alignment);
        while let Some(step) = progress.step() {
            let answer = match step {
                Step::Into { offset, at, len } => {
                    let read = || call(file, &mut memory.slices(at, len), offset);
                    faults.suffer(&self.path, offset, len, read)
                }
                Step::Aside { offset, skip, at, .. } => {
                    let mut block = Block::zeroed();
                    let block = &mut block.0[..alignment];
                    let read =
                        || sys::read_vectored_at(file, &mut [IoSliceMut::new(block)], offset);
                    let answer = faults.suffer(&self.path, offset, alignment, read);
                    let counts =
                        progress.answer(answer).map_err(|e| self.failed(offset, alignment, e))?;
                    memory.copy(at, &block[skip..skip + counts]);
                    continue;
                }
            };
            let at = offset + progress.done() as u64;
            progress.answer(answer).map_err(|e| self.failed(at, memory.len(), e))?;
        }
        Ok(progress.done())
    }

    pub(crate) fn file(&self) -> Option<&File> {
        match &self.origin {
            Origin::File { file, .. } => Some(file),
            Origin::Memory(_) | Origin::RemoteSource(_) => None,
            #[cfg(feature = "object")]
            Origin::Object(_) => None,
        }
    }

    /// The file by a handle for which the system reads nothing ahead, if it has such; else by the
    /// ordinary one.
    fn quiet_file(&self) -> Option<&File> {
        let Origin::File { file, quiet, .. } = &self.origin else { return None };
        Some(quiet.get_or_init(|| sys::reopen_quiet(file).ok()).as_ref().unwrap_or(file))
    }

    /// The error of a backend for files that was asked to read an object.
    pub(crate) fn no_file(&self) -> Error {
        self.failed(0, 0, std::io::Error::new(std::io::ErrorKind::Unsupported, NO_FILE))
    }

    /// The error of a read that the system refused.
    pub(crate) fn failed(&self, offset: u64, len: usize, error: std::io::Error) -> Error {
        Error::Read { path: self.path.clone(), offset, len, source: error.into() }
    }

    /// Checks that the file is still the one that was opened: by its handle, and by its path. Of an
    /// object each read checks that itself, and this does nothing.
    ///
    /// # Errors
    /// [`Error::Changed`], saying what differs; `offset` is what the caller was reading.
    pub fn verify(&self, offset: u64) -> Result<(), Error> {
        let Some(file) = self.file() else { return Ok(()) };
        let changed = |what| Error::Changed { path: self.path.clone(), offset, what };
        let by_handle =
            file.metadata().map_err(|e| changed(format!("its state is unknown: {e}")))?;
        let by_path =
            std::fs::metadata(&self.path).map_err(|e| changed(format!("it is gone: {e}")))?;
        for now in [by_path, by_handle] {
            if let Some(what) = self.fingerprint.difference(&Fingerprint::of(&now)) {
                return Err(changed(what));
            }
        }
        Ok(())
    }

    /// Whether it is on a file system whose reads never block the thread that only hands them over.
    #[cfg(target_os = "linux")]
    pub(crate) fn suits_rings(&self) -> bool {
        self.direct().is_ok_and(|direct| direct.suits_rings)
    }

    /// The file as cuFile knows it.
    #[cfg(target_os = "linux")]
    pub(crate) fn gds(&self) -> Result<&sys::CuFileHandle, &str> {
        let direct = self.direct()?;
        let handle = direct.gds.get_or_init(|| sys::CuFileHandle::new(&direct.file));
        handle.as_ref().map_err(String::as_str)
    }

    /// The file opened past the page cache, where it can be.
    #[cfg(target_os = "linux")]
    pub(crate) fn direct_file(&self) -> Option<&File> {
        self.direct().ok().map(|direct| &direct.file)
    }

    fn direct(&self) -> Result<&Direct, &str> {
        let Origin::File { direct, .. } = &self.origin else { return Err(NO_FILE) };
        let opened = direct.get_or_init(|| {
            let (file, alignment) = sys::open_direct(&self.path).map_err(|e| e.to_string())?;
            let now = file.metadata().map_err(|e| e.to_string())?;
            match self.fingerprint.difference(&Fingerprint::of(&now)) {
                Some(what) => Err(what),
                None => Ok(Direct {
                    #[cfg(target_os = "linux")]
                    suits_rings: sys::suits_rings(&file),
                    #[cfg(target_os = "linux")]
                    gds: OnceLock::new(),
                    file,
                    alignment,
                }),
            }
        });
        opened.as_ref().map_err(String::as_str)
    }
}

/// How many pages of a request are looked for in the page cache before it is looked at as a whole.
pub(crate) const SAMPLES: usize = 9;

/// Why an object cannot be read as a file.
pub(crate) const NO_FILE: &str = "it is not a file";
