// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fs::{File, Metadata};
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use ts_pool::{BLOCK_ALIGN, Buffer};

use crate::backend::ReadPath;
use crate::fault::Faults;
use crate::progress::{Progress, Step};
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

    /// Has the page cache let this file go, as far as nobody else holds it there. For measurements of a cold file;
    /// waits until what was written to it is on the disk.
    ///
    /// # Errors
    /// [`Error::Read`] when the system cannot. Blocks.
    pub fn evict(&self) -> Result<(), Error> {
        sys::evict(&self.file).map_err(|e| self.failed(0, 0, e))
    }

    /// Reads `buffer.len()` bytes at `offset` through the page cache; fewer only at the end of the file.
    ///
    /// # Errors
    /// [`Error::Read`]. Blocks.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        self.read(ReadPath::Buffered, offset, &mut Memory::Slice(buffer), &Faults::default())
    }

    /// Fills `buffers` one after the other with what is at `offset` on, as far as the file goes. `path` is
    /// buffered or direct; for the latter the memory must be aligned as [`ReadRequest`](crate::ReadRequest) says.
    pub(crate) fn read_buffers(
        &self,
        path: ReadPath,
        offset: u64,
        buffers: &mut [Buffer],
        faults: &Faults,
    ) -> Result<usize, Error> {
        self.read(path, offset, &mut Memory::Buffers(buffers), faults)
    }

    fn read(
        &self,
        path: ReadPath,
        offset: u64,
        memory: &mut Memory<'_>,
        faults: &Faults,
    ) -> Result<usize, Error> {
        let (file, alignment) = match path {
            ReadPath::Direct => {
                let unavailable =
                    |reason: &str| Error::Unavailable { backend: "direct".into(), reason: reason.into() };
                let direct = self.direct().map_err(unavailable)?;
                (&direct.file, direct.alignment)
            }
            _ => (&self.file, 1),
        };
        let mut progress = Progress::new(offset, memory.len(), self.len(), alignment);
        while let Some(step) = progress.step() {
            let answer = match step {
                Step::Into { offset, at, len } => faults
                    .suffer(self, offset, len)
                    .and_then(|len| sys::read_vectored_at(file, &mut memory.slices(at, len), offset)),
                Step::Aside { offset, skip, at, .. } => {
                    let mut block = Block([0; BLOCK_ALIGN]);
                    let block = &mut block.0[..alignment];
                    let answer = faults
                        .suffer(self, offset, alignment)
                        .and_then(|_| sys::read_vectored_at(file, &mut [IoSliceMut::new(block)], offset));
                    let counts = progress.answer(answer).map_err(|e| self.failed(offset, alignment, e))?;
                    memory.copy(at, &block[skip..skip + counts]);
                    continue;
                }
            };
            let at = offset + progress.done() as u64;
            progress.answer(answer).map_err(|e| self.failed(at, memory.len(), e))?;
        }
        Ok(progress.done())
    }

    /// The error of a read that the system refused.
    pub(crate) fn failed(&self, offset: u64, len: usize, error: std::io::Error) -> Error {
        Error::Read { path: self.path.clone(), offset, len, source: error.into() }
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

    /// The file opened past the page cache, where it can be.
    #[cfg(target_os = "linux")]
    pub(crate) fn direct_file(&self) -> Option<&File> {
        self.direct().ok().map(|direct| &direct.file)
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
}

/// A block that direct I/O can read to.
#[repr(C, align(4096))]
pub(crate) struct Block(pub(crate) [u8; BLOCK_ALIGN]);

/// Where a read's bytes go.
enum Memory<'a> {
    Slice(&'a mut [u8]),
    Buffers(&'a mut [Buffer]),
}

impl Memory<'_> {
    fn len(&self) -> usize {
        match self {
            Memory::Slice(slice) => slice.len(),
            Memory::Buffers(buffers) => buffers.iter().map(|buffer| buffer.len()).sum(),
        }
    }

    /// `at..at + len` of it, in pieces.
    fn slices(&mut self, at: usize, len: usize) -> Vec<IoSliceMut<'_>> {
        match self {
            Memory::Slice(slice) => vec![IoSliceMut::new(&mut slice[at..at + len])],
            Memory::Buffers(buffers) => pieces(buffers, at, len).map(IoSliceMut::new).collect(),
        }
    }

    fn copy(&mut self, at: usize, bytes: &[u8]) {
        let mut rest = bytes;
        for mut piece in self.slices(at, bytes.len()) {
            let (now, later) = rest.split_at(piece.len());
            piece.copy_from_slice(now);
            rest = later;
        }
    }
}

/// The bytes `at..at + len` of buffers that stand one behind the other, without empty pieces.
pub(crate) fn pieces(buffers: &mut [Buffer], at: usize, len: usize) -> impl Iterator<Item = &mut [u8]> {
    let (mut skip, mut left) = (at, len);
    buffers.iter_mut().filter_map(move |buffer| {
        let begin = skip.min(buffer.len());
        let end = buffer.len().min(begin + left);
        skip -= begin;
        left -= end - begin;
        (begin < end).then(|| &mut buffer[begin..end])
    })
}
