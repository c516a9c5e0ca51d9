// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fs::{File, Metadata};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use crate::{Error, sys};

/// What tells one state of a file from another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint {
    /// Device and inode, where the system has them.
    pub identity: (u64, u64),
    /// Length in bytes.
    pub len: u64,
    /// When the content was last written.
    pub modified: Option<SystemTime>,
}

impl Fingerprint {
    fn of(metadata: &Metadata) -> Self {
        Self { identity: sys::identity(metadata), len: metadata.len(), modified: metadata.modified().ok() }
    }

    /// What differs between `self`, the state then, and `now`.
    fn difference(&self, now: &Self) -> Option<String> {
        if self.identity != now.identity {
            Some("another file has taken its place".into())
        } else if self.len != now.len {
            Some(format!("it had {} bytes and has {}", self.len, now.len))
        } else if self.modified != now.modified {
            Some("it was written to".into())
        } else {
            None
        }
    }
}

/// A file to read from, as it was when it was opened.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    fingerprint: Fingerprint,
    file: File,
    direct: OnceLock<Result<Direct, String>>,
}

/// The same file, opened past the page cache.
#[derive(Debug)]
struct Direct {
    file: File,
    alignment: usize,
}

impl Source {
    /// Opens `path` and notes its fingerprint.
    ///
    /// # Errors
    /// [`Error::Open`] when it cannot be opened or is no regular file.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<Self>, Error> {
        // Absolute, so that it means the same file when the working directory has changed.
        let path = std::path::absolute(&path).unwrap_or_else(|_| path.as_ref().to_path_buf());
        let failed = |source: std::io::Error| Error::Open { path: path.clone(), source: source.into() };
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
        Ok(Arc::new(Self { path, fingerprint, file, direct: OnceLock::new() }))
    }

    /// Where it was opened.
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

    /// Its state when it was opened.
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

    /// The share of `offset..offset + len` that is in the page cache, 0 to 1; `None` where that cannot be asked.
    pub fn residency(&self, offset: u64, len: usize) -> Option<f64> {
        sys::residency(&self.file, offset, len)
    }

    /// Reads `buffer.len()` bytes at `offset` through the page cache; fewer only at the end of the file.
    ///
    /// # Errors
    /// [`Error::Read`]. Blocks.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        self.read_file(&self.file, offset, buffer)
    }

    /// As [`read_at`](Self::read_at), past the page cache.
    pub(crate) fn read_direct_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        match self.direct() {
            Ok(direct) => self.read_file(&direct.file, offset, buffer),
            Err(reason) => Err(Error::Unavailable { backend: "direct".into(), reason: reason.into() }),
        }
    }

    /// Checks that the file is still the one that was opened: by its handle, and by its path.
    ///
    /// # Errors
    /// [`Error::Changed`], saying what differs; `offset` is what the caller was reading.
    pub fn verify(&self, offset: u64) -> Result<(), Error> {
        let changed = |what| Error::Changed { path: self.path.clone(), offset, what };
        let by_handle = self.file.metadata().map_err(|e| changed(format!("its state is unknown: {e}")))?;
        let by_path = std::fs::metadata(&self.path).map_err(|e| changed(format!("it is gone: {e}")))?;
        for now in [by_path, by_handle] {
            if let Some(what) = self.fingerprint.difference(&Fingerprint::of(&now)) {
                return Err(changed(what));
            }
        }
        Ok(())
    }

    fn direct(&self) -> Result<&Direct, &str> {
        let opened = self.direct.get_or_init(|| {
            let (file, alignment) = sys::open_direct(&self.path).map_err(|e| e.to_string())?;
            let now = file.metadata().map_err(|e| e.to_string())?;
            match self.fingerprint.difference(&Fingerprint::of(&now)) {
                Some(what) => Err(what),
                None => Ok(Direct { file, alignment }),
            }
        });
        opened.as_ref().map_err(String::as_str)
    }

    fn read_file(&self, file: &File, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        let mut done = 0;
        while done < buffer.len() {
            match sys::read_at(file, &mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                // A direct read that ended at the end of the file leaves an offset that is not aligned.
                Err(_) if offset + done as u64 >= self.len() => break,
                Err(e) => {
                    let (path, len) = (self.path.clone(), buffer.len());
                    return Err(Error::Read { path, offset: offset + done as u64, len, source: e.into() });
                }
            }
        }
        Ok(done)
    }
}
