// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ts_pool::{BLOCK_ALIGN, Budget, Buffer, HostPool};

use crate::fault::{WriteCall, WriteFaults};
use crate::{Error, sys};

/// What is written at once, and what a writer holds twice.
const CHUNK: usize = 4 << 20;
/// Without direct I/O dirty data is flushed whenever this many bytes have gathered, so that the
/// last flush is short.
const FLUSH_BYTES: u64 = 256 << 20;

/// Writes a large file from its beginning to its end, or goes on with one, past the page cache:
/// while one chunk is on its way to the device, the next one gathers. What is not whole blocks, and
/// small files, go the ordinary way, as everything does on file systems without direct I/O.
///
/// Holds 8 MiB of memory, and a thread once 4 MiB have been written. Dropping it waits for the
/// chunk under way; call [`sync`](Self::sync) to have the bytes on the disk. After an error it
/// takes nothing more: everything answers with that error again.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: File,
    direct: Option<Direct>,
    /// Bytes that wait for their chunk to be full, and how many.
    staging: Buffer,
    filled: usize,
    /// Nothing of them that the file does not have.
    clean: bool,
    /// Where in the file the staging begins: at a whole block.
    begin: u64,
    /// Where the file ends.
    end: u64,
    unflushed: u64,
    reserved: bool,
    faults: WriteFaults,
    /// What went wrong: nobody knows what the file has after that.
    failed: Option<Error>,
}

/// The thread that writes chunks.
#[derive(Debug)]
struct Direct {
    jobs: Option<Sender<Job>>,
    done: Receiver<(Buffer, u64, io::Result<()>)>,
    thread: Option<JoinHandle<()>>,
    /// The other chunk, when it is not under way.
    spare: Option<Buffer>,
}

#[derive(Debug)]
struct Job {
    chunk: Buffer,
    offset: u64,
    len: usize,
}

impl Writer {
    /// Writes to `file`, which is open for reading and writing, from byte `begin` on. `expected`
    /// bytes are set aside on the disk at once, so that a full one is told before the work. `path`
    /// is for errors.
    ///
    /// # Errors
    /// [`Error::Write`], above all when there is no room; [`Error::Memory`].
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
            // Where the system cannot set room aside, a full disk is told when it is full.
            Err(e) if e.kind() == io::ErrorKind::Unsupported => false,
            Err(e) => return Err(failed(begin.saturating_add(expected), e)),
        };
        let end = file.metadata().map_err(|e| failed(begin, e))?.len();
        let pool = HostPool::new(&Budget::new(2 * CHUNK), 2 * CHUNK)?;
        let (staging, spare) = (pool.allocate(CHUNK)?, pool.allocate(CHUNK)?);
        let direct = match sys::reopen_direct(&file) {
            Ok((direct, alignment)) if CHUNK.is_multiple_of(alignment) => {
                Some(Direct::new(direct, spare, path, &faults)?)
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
        this.stand_at(begin)?;
        Ok(this)
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Writes behind what was written last. Blocks while both chunks are full.
    ///
    /// # Errors
    /// [`Error::Write`], also of a chunk that was given earlier.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.unless_failed(|this| this.gather(bytes))
    }

    fn gather(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let now = bytes.len().min(CHUNK - self.filled);
            let (piece, later) = bytes.split_at(now);
            self.staging[self.filled..self.filled + now].copy_from_slice(piece);
            self.filled += now;
            self.clean = false;
            self.end = self.end.max(self.position());
            bytes = later;
            if self.filled == CHUNK {
                self.write_chunk()?;
            }
        }
        Ok(())
    }

    /// Goes to `offset`. What is skipped and was never written reads as zeros.
    ///
    /// # Errors
    /// As [`write`](Self::write); [`Error::Read`].
    pub fn seek(&mut self, offset: u64) -> Result<(), Error> {
        self.unless_failed(|this| this.go_to(offset))
    }

    fn go_to(&mut self, offset: u64) -> Result<(), Error> {
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
        self.stand_at(offset)
    }

    fn stand_at(&mut self, offset: u64) -> Result<(), Error> {
        self.begin = offset - offset % BLOCK_ALIGN as u64;
        self.filled = (offset - self.begin) as usize;
        self.clean = true;
        self.load()
    }

    /// Ends the file at `len`, which is where it goes on.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn truncate(&mut self, len: u64) -> Result<(), Error> {
        self.unless_failed(|this| {
            this.flush()?;
            this.set_len(len)?;
            this.stand_at(len)
        })
    }

    /// Waits until everything written is on the disk.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn sync(&mut self) -> Result<(), Error> {
        self.unless_failed(Self::settle_all)
    }

    fn unless_failed(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        act(self).inspect_err(|error| self.failed = Some(error.clone()))
    }

    fn settle_all(&mut self) -> Result<(), Error> {
        self.flush()?;
        if self.reserved {
            // What was set aside and not needed.
            self.set_len(self.end)?;
        }
        self.unflushed = 0;
        let synced =
            self.faults.check(&self.path, WriteCall::Sync).and_then(|()| self.file.sync_all());
        synced.map_err(|e| self.failed(self.end, e))
    }

    fn set_len(&mut self, len: u64) -> Result<(), Error> {
        let set = self
            .faults
            .check(&self.path, WriteCall::SetLen(len))
            .and_then(|()| self.file.set_len(len));
        set.map_err(|e| self.failed(len, e))?;
        (self.end, self.reserved) = (len, false);
        Ok(())
    }

    fn position(&self) -> u64 {
        self.begin + self.filled as u64
    }

    /// Gives the full staging away and goes on with the other chunk.
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
                synced.map_err(|e| self.failed(self.begin, e))?;
            }
        } else {
            self.settle()?;
            let direct = self.direct.as_mut().expect("just seen");
            let other = direct.spare.take().expect("it has been waited for");
            let chunk = std::mem::replace(&mut self.staging, other);
            direct.submit(Job { chunk, offset: self.begin, len: CHUNK });
        }
        self.begin += CHUNK as u64;
        (self.filled, self.clean) = (0, true);
        Ok(())
    }

    /// Has everything written, by way of the page cache if need be. The staging stays as it is.
    fn flush(&mut self) -> Result<(), Error> {
        self.settle()?;
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

    /// Waits for the chunk under way.
    fn settle(&mut self) -> Result<(), Error> {
        let Some(direct) = self.direct.as_mut().filter(|direct| direct.spare.is_none()) else {
            return Ok(());
        };
        let gone = || io::Error::other("the thread that writes has ended");
        let (chunk, offset, result) = match direct.done.recv() {
            Ok(done) => done,
            Err(_) => return Err(self.failed(self.begin, gone())),
        };
        direct.spare = Some(chunk);
        result.map_err(|e| self.failed(offset, e))
    }

    /// Brings what the file has before the position, in its block, into the staging.
    fn load(&mut self) -> Result<(), Error> {
        self.staging[..self.filled].fill(0);
        let mut done = 0;
        while done < self.filled {
            let mut slice = [io::IoSliceMut::new(&mut self.staging[done..self.filled])];
            match sys::read_vectored_at(&self.file, &mut slice, self.begin + done as u64) {
                Ok(0) => break,
                Ok(came) => done += came,
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

impl Direct {
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
        // Should the thread be gone, `settle` finds out.
        let _ = self.jobs.as_ref().expect("present until drop").send(job);
    }
}

impl Drop for Direct {
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
        /// Against a file in memory, on a file system with direct I/O.
        #[test]
        fn any_program_writes_what_it_says(
            had in 0usize..9000,
            acts in prop::collection::vec(act(), 1..12),
        ) {
            let dir =
                tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")).unwrap();
            let path = dir.path().join("written");
            let mut expected = vec![9; had];
            std::fs::write(&path, &expected).unwrap();
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let mut writer =
                Writer::new(file, &path, had as u64, 1 << 20, WriteFaults::default()).unwrap();
            let (mut at, mut number) = (had, 0u8);
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
                        let there = std::fs::read(&path).unwrap();
                        prop_assert!(
                            there
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
            let there = std::fs::read(&path).unwrap();
            prop_assert!(there.len() >= expected.len() && there[..expected.len()] == expected);
            prop_assert!(there[expected.len()..].iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn what_was_set_aside_and_not_needed_is_given_back() {
        use std::os::unix::fs::MetadataExt;
        let dir =
            tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")).unwrap();
        let path = dir.path().join("reserved");
        let mut writer =
            Writer::new(open(&path), &path, 0, 64 << 20, WriteFaults::default()).unwrap();
        assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= 64 << 20, "room is set aside");
        writer.write(&[1; 5000]).unwrap();
        writer.sync().unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.len(), 5000);
        assert!(metadata.blocks() * 512 < 1 << 20, "{} blocks", metadata.blocks());
    }

    #[test]
    fn after_an_error_nothing_is_taken_any_more() {
        let dir =
            tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")).unwrap();
        let path = dir.path().join("read-only");
        std::fs::write(&path, [7; 10]).unwrap();
        let mut writer = Writer::new(open(&path), &path, 0, 0, WriteFaults::default()).unwrap();
        // The same file, which takes no bytes from here on.
        (writer.file, writer.direct) = (File::open(&path).unwrap(), None);
        let first = (0..3).find_map(|_| writer.write(&vec![1; CHUNK]).err()).unwrap();
        for again in [writer.write(b"more"), writer.seek(0), writer.sync(), writer.write(b"")] {
            assert_eq!(again.unwrap_err().to_string(), first.to_string());
        }
    }

    #[test]
    fn a_disk_that_cannot_hold_it_says_so_at_once() {
        let dir =
            tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")).unwrap();
        let path = dir.path().join("too-large");
        let error =
            Writer::new(open(&path), &path, 0, 1 << 50, WriteFaults::default()).unwrap_err();
        assert!(matches!(error, Error::Write { .. }), "{error}");
        assert!(error.to_string().contains("too-large"), "{error}");
    }
}
