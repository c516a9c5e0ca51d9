// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ts_pool::{BLOCK_ALIGN, Budget, Buffer, HostPool};

use crate::fault::{WriteCall, WriteFaults};
use crate::{Error, sys};

/// The length of a direct write, in bytes. A writer has two buffers of this length.
const CHUNK: usize = 4 << 20;
/// The number of bytes in full chunks after which a writer without direct I/O flushes the file to
/// disk. This keeps the flush in [`Writer::sync`] short.
const FLUSH_BYTES: u64 = 256 << 20;
const FLUSH_FAILED: &str = "cannot flush the file to disk";

/// Writes a large file sequentially, bypassing the page cache where possible.
///
/// With direct I/O, one chunk of 4 MiB is written to the device while the next one is filled.
/// Incomplete chunks are written through the page cache, as are all chunks if the system or the
/// file system does not support direct I/O.
///
/// Uses 8 MiB of memory and, with direct I/O, one thread. Dropping a writer waits for the chunk in
/// progress, but does not write an incomplete chunk. Call [`sync`](Self::sync) first to flush all
/// bytes to disk. After an error, every call returns the same error.
///
/// ```
/// use std::fs::File;
/// use ts_io::{Writer, fault::WriteFaults};
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("data");
/// let file = File::options().create_new(true).read(true).write(true).open(&path)?;
/// let mut writer = Writer::new(file, &path, 0, 6 << 20, WriteFaults::default())?;
/// for number in 0..6u8 {
///     writer.write(&vec![number; 1 << 20])?;
/// }
/// writer.sync()?;
/// assert_eq!(std::fs::metadata(&path)?.len(), 6 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: File,
    direct: Option<DirectWriter>,
    /// The chunk that is being filled.
    staging: Buffer,
    /// The number of bytes in `staging`.
    filled: usize,
    /// Whether the file contains all bytes that were written to `staging`.
    clean: bool,
    /// The file offset of `staging`, a multiple of the block size.
    begin: u64,
    /// The length of the file, including written bytes that are still in the buffers.
    end: u64,
    /// The number of bytes written in full chunks since the most recent flush to disk. Stays 0 with
    /// direct I/O.
    unflushed: u64,
    /// Whether the file can have reserved disk space beyond `end`.
    reserved: bool,
    faults: WriteFaults,
    /// The first error. After it, the content of the file is unknown.
    failed: Option<Error>,
}

/// A thread that writes chunks with direct I/O, one at a time.
#[derive(Debug)]
struct DirectWriter {
    jobs: Option<Sender<Job>>,
    done: Receiver<(Buffer, u64, io::Result<()>)>,
    thread: Option<JoinHandle<()>>,
    /// The second buffer. `None` while the thread has it.
    spare: Option<Buffer>,
}

#[derive(Debug)]
struct Job {
    chunk: Buffer,
    offset: u64,
    len: usize,
}

impl Writer {
    /// Creates a writer that starts at byte `begin` of `file`, which must be open for reading and
    /// writing.
    ///
    /// Reserves disk space for `expected` bytes from `begin` on, if the file system supports that.
    /// A full disk is then reported before any write. `path` appears in error messages. `faults`
    /// injects errors; the default injects none.
    ///
    /// # Errors
    /// - [`Error::Write`] if the file system supports reservations but this one fails, or if the
    ///   metadata of the file cannot be read.
    /// - [`Error::Read`] if the start of the block that contains `begin` cannot be read.
    /// - [`Error::Memory`] if the buffers cannot be allocated.
    /// - [`Error::Thread`] if the thread for direct writes cannot be started.
    pub fn new(
        file: File,
        path: &Path,
        begin: u64,
        expected: u64,
        faults: WriteFaults,
    ) -> Result<Self, Error> {
        let failed = |offset, source: io::Error| Error::Write {
            path: path.into(),
            offset,
            source: source.into(),
        };
        let reserve = || {
            faults.check(path, WriteCall::Reserve(expected))?;
            sys::reserve(&file, begin, expected)
        };
        let reserved = match reserve() {
            Ok(()) => true,
            // The file system does not support reservations. If the disk is too small, a later
            // write fails.
            Err(e) if e.kind() == io::ErrorKind::Unsupported => false,
            Err(e) => {
                let what = format!("cannot reserve {expected} bytes of disk space");
                return Err(failed(begin, with_context(&what, &e)));
            }
        };
        let end = file.metadata().map_err(|e| failed(begin, e))?.len();
        let pool = HostPool::new(&Budget::new(2 * CHUNK), 2 * CHUNK)?;
        let (staging, spare) = (pool.allocate(CHUNK)?, pool.allocate(CHUNK)?);
        let direct = match sys::reopen_direct(&file) {
            Ok((direct, alignment)) if CHUNK.is_multiple_of(alignment) => {
                Some(DirectWriter::new(direct, spare, path, &faults)?)
            }
            _ => None,
        };
        let mut this = Self {
            path: path.to_path_buf(),
            file,
            direct,
            staging,
            filled: 0,
            clean: true,
            begin: 0,
            end: begin.max(end),
            unflushed: 0,
            reserved,
            faults,
            failed: None,
        };
        this.set_position(begin)?;
        Ok(this)
    }

    /// Returns the file that the writer writes to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Writes `bytes` at the current position. Blocks while both buffers are full, or, without
    /// direct I/O, while a full chunk is written or flushed to disk.
    ///
    /// # Errors
    /// Returns [`Error::Write`] if a write or a flush fails. The bytes that could not be written
    /// may be from an earlier call.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.unless_failed(|this| this.append(bytes))
    }

    fn append(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let len = bytes.len().min(CHUNK - self.filled);
            let (head, tail) = bytes.split_at(len);
            self.staging[self.filled..self.filled + len].copy_from_slice(head);
            self.filled += len;
            self.clean = false;
            self.end = self.end.max(self.position());
            bytes = tail;
            if self.filled == CHUNK {
                self.write_chunk()?;
            }
        }
        Ok(())
    }

    /// Sets the position to `offset`. Bytes that are skipped past the end of the file are zeros.
    /// Blocks while buffered bytes are written.
    ///
    /// # Errors
    /// Returns the errors of [`write`](Self::write), and [`Error::Read`] if the start of
    /// the block that contains `offset` cannot be read.
    pub fn seek(&mut self, offset: u64) -> Result<(), Error> {
        self.unless_failed(|this| this.seek_to(offset))
    }

    fn seek_to(&mut self, offset: u64) -> Result<(), Error> {
        if offset == self.position() {
            return Ok(());
        }
        let ahead = usize::try_from(offset.saturating_sub(self.begin)).unwrap_or(usize::MAX);
        if offset >= self.position() && self.position() >= self.end && ahead < CHUNK {
            self.staging[self.filled..ahead].fill(0);
            self.filled = ahead;
            return Ok(());
        }
        self.flush()?;
        self.set_position(offset)
    }

    /// Makes `staging` begin at the block that contains `offset`. Reads the file from the start of
    /// this block up to `offset` into `staging`.
    fn set_position(&mut self, offset: u64) -> Result<(), Error> {
        self.begin = offset - offset % BLOCK_ALIGN as u64;
        self.filled = (offset - self.begin) as usize;
        self.clean = true;
        self.load_block()
    }

    /// Sets the length of the file to `len`, and the position to its end. Blocks.
    ///
    /// # Errors
    /// Returns the errors of [`seek`](Self::seek).
    pub fn truncate(&mut self, len: u64) -> Result<(), Error> {
        self.unless_failed(|this| {
            this.flush()?;
            this.set_len(len)?;
            this.set_position(len)
        })
    }

    /// Flushes all written bytes to disk. Blocks.
    ///
    /// # Errors
    /// Returns the errors of [`write`](Self::write).
    pub fn sync(&mut self) -> Result<(), Error> {
        self.unless_failed(Self::sync_all)
    }

    /// Runs `act`, and records the error if it fails. If an earlier call failed, returns the
    /// recorded error without running `act`.
    fn unless_failed(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        act(self).inspect_err(|error| self.failed = Some(error.clone()))
    }

    fn sync_all(&mut self) -> Result<(), Error> {
        self.flush()?;
        if self.reserved {
            // Releases the disk space that was reserved and is not needed.
            self.set_len(self.end)?;
        }
        self.unflushed = 0;
        let synced =
            self.faults.check(&self.path, WriteCall::Sync).and_then(|()| self.file.sync_all());
        synced.map_err(|e| self.failed(self.end, with_context(FLUSH_FAILED, &e)))
    }

    fn set_len(&mut self, len: u64) -> Result<(), Error> {
        let set = self
            .faults
            .check(&self.path, WriteCall::SetLen(len))
            .and_then(|()| self.file.set_len(len));
        let what = "cannot set the length of the file";
        set.map_err(|e| self.failed(len, with_context(what, &e)))?;
        (self.end, self.reserved) = (len, false);
        Ok(())
    }

    /// Returns the file offset of the next byte to write.
    fn position(&self) -> u64 {
        self.begin + self.filled as u64
    }

    /// Writes the full chunk in `staging`, and makes `staging` empty. With direct I/O, starts the
    /// write and exchanges the buffers.
    fn write_chunk(&mut self) -> Result<(), Error> {
        if self.direct.is_none() {
            self.write_staging()?;
            self.unflushed += CHUNK as u64;
            if self.unflushed >= FLUSH_BYTES {
                self.unflushed = 0;
                let synced = self
                    .faults
                    .check(&self.path, WriteCall::Sync)
                    .and_then(|()| self.file.sync_data());
                synced.map_err(|e| self.failed(self.begin, with_context(FLUSH_FAILED, &e)))?;
            }
        } else {
            self.wait_for_chunk()?;
            let direct = self.direct.as_mut().expect("`direct` is not `None` in this branch");
            let other = direct.spare.take().expect("`wait_for_chunk` returned the spare buffer");
            let chunk = std::mem::replace(&mut self.staging, other);
            direct.submit(Job { chunk, offset: self.begin, len: CHUNK });
        }
        self.begin += CHUNK as u64;
        (self.filled, self.clean) = (0, true);
        Ok(())
    }

    /// Writes all bytes to the file, those in `staging` through the page cache. `staging` keeps its
    /// bytes.
    fn flush(&mut self) -> Result<(), Error> {
        self.wait_for_chunk()?;
        self.write_staging()
    }

    fn write_staging(&mut self) -> Result<(), Error> {
        if self.clean {
            return Ok(());
        }
        let bytes = &self.staging[..self.filled];
        let written = write_all_at(&self.file, bytes, self.begin, &self.path, &self.faults);
        written.map_err(|e| self.failed(self.begin, e))?;
        self.clean = true;
        Ok(())
    }

    /// Waits for the direct write in progress, if there is one.
    fn wait_for_chunk(&mut self) -> Result<(), Error> {
        let Some(direct) = self.direct.as_mut().filter(|direct| direct.spare.is_none()) else {
            return Ok(());
        };
        let gone = || io::Error::other("the writer thread ended unexpectedly");
        let (chunk, offset, result) = match direct.done.recv() {
            Ok(done) => done,
            Err(_) => return Err(self.failed(self.begin, gone())),
        };
        direct.spare = Some(chunk);
        result.map_err(|e| self.failed(offset, e))
    }

    /// Reads bytes `begin..position()` of the file into `staging`. Bytes past the end of the file
    /// become zeros.
    fn load_block(&mut self) -> Result<(), Error> {
        self.staging[..self.filled].fill(0);
        let mut done = 0;
        while done < self.filled {
            let mut slice = [io::IoSliceMut::new(&mut self.staging[done..self.filled])];
            match sys::read_vectored_at(&self.file, &mut slice, self.begin + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    let (path, offset, len) = (self.path.clone(), self.begin, self.filled);
                    return Err(Error::Read { path, offset, len, source: e.into() });
                }
            }
        }
        Ok(())
    }

    fn failed(&self, offset: u64, error: io::Error) -> Error {
        Error::Write { path: self.path.clone(), offset, source: error.into() }
    }
}

/// Returns `error` with the operation that failed in its message.
fn with_context(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

fn write_all_at(
    file: &File,
    bytes: &[u8],
    offset: u64,
    path: &Path,
    faults: &WriteFaults,
) -> io::Result<()> {
    faults.check(path, WriteCall::Write { offset, bytes })?;
    sys::write_all_at(file, bytes, offset)
}

impl DirectWriter {
    fn new(file: File, spare: Buffer, path: &Path, faults: &WriteFaults) -> Result<Self, Error> {
        let (jobs, inbox) = channel::<Job>();
        let (outbox, done) = channel();
        let (path, faults) = (path.to_path_buf(), faults.clone());
        let work = move || {
            for Job { chunk, offset, len } in inbox {
                let result = write_all_at(&file, &chunk[..len], offset, &path, &faults);
                if outbox.send((chunk, offset, result)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("ts-io-write".into()).stack_size(256 << 10);
        let thread = thread.spawn(work).map_err(|e| Error::Thread(e.into()))?;
        Ok(Self { jobs: Some(jobs), done, thread: Some(thread), spare: Some(spare) })
    }

    fn submit(&self, job: Job) {
        // If the thread has ended, `wait_for_chunk` reports it.
        let _ = self.jobs.as_ref().expect("only `drop` takes the sender").send(job);
    }
}

impl Drop for DirectWriter {
    fn drop(&mut self) {
        drop(self.jobs.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn open(path: &Path) -> File {
        File::options().create(true).truncate(true).read(true).write(true).open(path).unwrap()
    }

    #[derive(Debug, Clone)]
    enum Act {
        Write(usize),
        Seek(u64),
        Truncate(u64),
        Sync,
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            4 => (0usize..3 * CHUNK).prop_map(Act::Write),
            2 => (0usize..10_000).prop_map(Act::Write),
            2 => (0u64..4 * CHUNK as u64).prop_map(Act::Seek),
            1 => (0u64..2 * CHUNK as u64).prop_map(Act::Truncate),
            1 => Just(Act::Sync),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Compares the file with a model in memory, on a file system with direct I/O.
        #[test]
        fn any_sequence_of_calls_writes_the_right_bytes(
            old_len in 0usize..9000,
            acts in prop::collection::vec(act(), 1..12),
        ) {
            let dir =
                tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")).unwrap();
            let path = dir.path().join("written");
            let mut expected = vec![9; old_len];
            std::fs::write(&path, &expected).unwrap();
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let mut writer =
                Writer::new(file, &path, old_len as u64, 1 << 20, WriteFaults::default()).unwrap();
            let (mut at, mut number) = (old_len, 0u8);
            for act in acts {
                match act {
                    Act::Write(len) => {
                        number = number.wrapping_add(1);
                        let bytes: Vec<u8> =
                            (0..len).map(|i| (i as u8).wrapping_mul(31) ^ number).collect();
                        writer.write(&bytes).unwrap();
                        if len > 0 {
                            expected.resize(expected.len().max(at + len), 0);
                            expected[at..at + len].copy_from_slice(&bytes);
                        }
                        at += len;
                    }
                    Act::Seek(offset) => {
                        writer.seek(offset).unwrap();
                        at = offset as usize;
                    }
                    Act::Truncate(len) => {
                        writer.truncate(len).unwrap();
                        expected.resize(len as usize, 0);
                        at = len as usize;
                    }
                    Act::Sync => {
                        writer.sync().unwrap();
                        let written = std::fs::read(&path).unwrap();
                        prop_assert!(
                            written
                                .iter()
                                .chain(std::iter::repeat(&0))
                                .take(expected.len())
                                .eq(&expected)
                        );
                    }
                }
            }
            writer.sync().unwrap();
            drop(writer);
            let written = std::fs::read(&path).unwrap();
            prop_assert!(written.len() >= expected.len() && written[..expected.len()] == expected);
            prop_assert!(written[expected.len()..].iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn reserved_space_that_is_not_needed_is_released() {
        use std::os::unix::fs::MetadataExt;
        let dir =
            tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")).unwrap();
        let path = dir.path().join("reserved");
        let mut writer =
            Writer::new(open(&path), &path, 0, 64 << 20, WriteFaults::default()).unwrap();
        assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= 64 << 20, "space is reserved");
        writer.write(&[1; 5000]).unwrap();
        writer.sync().unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.len(), 5000);
        assert!(metadata.blocks() * 512 < 1 << 20, "{} blocks", metadata.blocks());
    }

    #[test]
    fn after_an_error_every_call_fails() {
        let dir =
            tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")).unwrap();
        let path = dir.path().join("read-only");
        std::fs::write(&path, [7; 10]).unwrap();
        let mut writer = Writer::new(open(&path), &path, 0, 0, WriteFaults::default()).unwrap();
        // The writer continues with the same file opened read-only, so that its writes fail.
        (writer.file, writer.direct) = (File::open(&path).unwrap(), None);
        let first = (0..3).find_map(|_| writer.write(&vec![1; CHUNK]).err()).unwrap();
        for again in [writer.write(b"more"), writer.seek(0), writer.sync(), writer.write(b"")] {
            assert_eq!(again.unwrap_err().to_string(), first.to_string());
        }
    }

    #[test]
    fn a_lack_of_disk_space_is_reported_at_once() {
        let dir =
            tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")).unwrap();
        let path = dir.path().join("too-large");
        let error =
            Writer::new(open(&path), &path, 0, 1 << 50, WriteFaults::default()).unwrap_err();
        assert!(matches!(error, Error::Write { .. }), "{error}");
        assert!(error.to_string().contains("too-large"), "{error}");
    }
}
