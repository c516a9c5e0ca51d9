// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes of a checkpoint, wherever its files keep them and however: read, compared with their
//! checksums, decoded.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use ts_format::{ByteRange, CHUNK_LEN, ChunkPart, Digest, FileId, Scratch, Tensor, decode_chunk};
use ts_io::DirectReader;
use ts_pool::{Budget, HostPool};

use crate::{Checkpoint, Error};

/// Bytes that are not what was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}: tensor `{tensor}`: {len} bytes at byte {offset} {what}: the file is damaged",
    path.display()
)]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// The tensor.
    pub tensor: String,
    /// First byte of the chunk, from the start of the file.
    pub offset: u64,
    /// Bytes that the chunk takes there.
    pub len: u64,
    /// What is wrong with them.
    pub what: String,
}

pub(crate) const WRONG_SUM: &str = "do not have their checksum";

impl Checkpoint {
    /// Reads a block of a tensor into `buffer`: of each dimension the elements `begin..end`,
    /// row-major. Only the chunks and bytes that it needs; a whole tensor is compared with its
    /// checksums, parts of one only where they are compressed. Blocks.
    ///
    /// # Errors
    /// [`Error::Format`] when there is no such tensor, or not such a block of it; [`Error::Io`],
    /// [`Error::Corrupt`].
    ///
    /// # Panics
    /// If `buffer` is not as long as the block.
    pub fn read_block(
        &self,
        name: &str,
        block: &[Range<u64>],
        buffer: &mut [u8],
    ) -> Result<(), Error> {
        let tensor = self.catalog().require(name)?;
        let (shape, bits) = (tensor.shape(), u64::from(tensor.dtype().bits()));
        let within = |(dimension, &n): (&Range<u64>, &u64)| {
            dimension.start <= dimension.end && dimension.end <= n
        };
        let whole = block.iter().zip(shape).all(|(dimension, &n)| *dimension == (0..n));
        if block.len() != shape.len()
            || !block.iter().zip(shape).all(within)
            || (bits < 8 && !whole)
        {
            let reason = format!("{block:?} is no block of {:?} that can be read", tensor);
            return Err(ts_format::Error::BadAssembly { tensor: name.into(), reason }.into());
        }
        let count: u64 = block.iter().map(|dimension| dimension.end - dimension.start).product();
        assert_eq!(buffer.len() as u64, count * bits / 8, "the buffer is as long as the block");
        let mut reader = Reader::default();
        if whole {
            return reader.read_checked(self, tensor, 0, buffer);
        }
        let range = tensor.range();
        let mut rest = buffer;
        for (begin, len) in runs(shape, block, bits / 8) {
            let (now, later) = rest.split_at_mut(len as usize);
            reader.read(self, ByteRange { offset: range.offset + begin, len, ..range }, now)?;
            rest = later;
        }
        Ok(())
    }
}

/// The runs of bytes that a block of a tensor is made of, in their order: where each begins, and
/// its length.
fn runs(shape: &[u64], block: &[Range<u64>], element: u64) -> Vec<(u64, u64)> {
    if block.iter().any(Range::is_empty) {
        return Vec::new();
    }
    // Dimensions behind the last one that is cut are in one piece.
    let cut =
        block.iter().zip(shape).rposition(|(dimension, &n)| *dimension != (0..n)).unwrap_or(0);
    let stride = |dimension: usize| shape[dimension + 1..].iter().product::<u64>() * element;
    let len = (block[cut].end - block[cut].start) * stride(cut);
    let mut begins = vec![block[cut].start * stride(cut)];
    for outer in (0..cut).rev() {
        let inner = std::mem::take(&mut begins);
        let steps = block[outer].clone();
        begins = steps
            .flat_map(|i| inner.iter().map(move |begin| (i, *begin)))
            .map(|(i, b)| i * stride(outer) + b)
            .collect();
    }
    begins.into_iter().map(|begin| (begin, len)).collect()
}

/// Reads ranges of a checkpoint, each piece into memory that is used again: through the page cache,
/// or, if [`Readers`] made it, past it. One for each thread.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    direct: Option<DirectReader>,
    turns: Option<Arc<Turns>>,
    /// A chunk as it lies in the file,
    stored: Vec<u8>,
    /// and one of which not all is wanted, decoded, with its place: the next run may want more of
    /// it.
    decoded: Vec<u8>,
    decoded_of: Option<(FileId, u64)>,
    scratch: Scratch,
}

impl Reader {
    /// Fills `out` with the bytes of a range. What is compressed is compared with its checksums.
    pub(crate) fn read(
        &mut self,
        checkpoint: &Checkpoint,
        range: ByteRange,
        out: &mut [u8],
    ) -> Result<(), Error> {
        if out.is_empty() {
            return Ok(());
        }
        match range.is_encoded() {
            true => self.decode(checkpoint, range, out),
            false => self.read_exactly(checkpoint, range, out),
        }
    }

    /// Reads bytes that lie in a file as they are.
    pub(crate) fn read_exactly(
        &mut self,
        checkpoint: &Checkpoint,
        range: ByteRange,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let source = &checkpoint.sources()[range.file.0 as usize];
        let actual = match &mut self.direct {
            Some(direct) => direct.read_at(source, range.offset, out),
            None => source.read_at(range.offset, out),
        }?;
        if actual < out.len() {
            let (path, offset, expected) = (source.path().to_path_buf(), range.offset, out.len());
            return Err(ts_io::Error::ShortRead { path, offset, expected, actual }.into());
        }
        Ok(source.verify(range.offset)?)
    }

    /// Fills `out` with a part of a tensor, from its byte `begin` on, which chunks begin at.
    /// Whatever has checksums is compared with them.
    pub(crate) fn read_checked(
        &mut self,
        checkpoint: &Checkpoint,
        tensor: Tensor<'_>,
        begin: u64,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let whole = tensor.range();
        let range = ByteRange { offset: whole.offset + begin, len: out.len() as u64, ..whole };
        if whole.is_encoded() {
            return self.decode(checkpoint, range, out);
        }
        self.read_exactly(checkpoint, range, out)?;
        let Some(sums) = tensor.sums() else { return Ok(()) };
        let digest = self.in_turn(|_| Digest::of(out));
        let sums = sums[(begin / CHUNK_LEN) as usize..].iter().zip(digest.chunks());
        match sums.enumerate().find(|(_, (expected, actual))| expected != actual) {
            None => Ok(()),
            Some((i, _)) => {
                let at = i as u64 * CHUNK_LEN;
                let len = CHUNK_LEN.min(range.len - at);
                let place = ByteRange { offset: range.offset + at, len, ..range };
                Err(damage(checkpoint, tensor.name(), place, WRONG_SUM.into()).into())
            }
        }
    }

    /// Fills `out` with bytes that are kept compressed.
    fn decode(
        &mut self,
        checkpoint: &Checkpoint,
        range: ByteRange,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let mut rest = out;
        for part in checkpoint.catalog().chunk_parts(range) {
            let (now, later) = rest.split_at_mut(part.len as usize);
            if part.len == part.raw_len {
                self.chunk(checkpoint, range, &part, now)?;
            } else {
                let place = (part.file, part.chunk.offset);
                if self.decoded_of != Some(place) {
                    self.decoded_of = None;
                    let mut decoded = std::mem::take(&mut self.decoded);
                    decoded.resize(part.raw_len as usize, 0);
                    let done = self.chunk(checkpoint, range, &part, &mut decoded);
                    self.decoded = decoded;
                    done?;
                    self.decoded_of = Some(place);
                }
                now.copy_from_slice(&self.decoded[part.skip as usize..][..part.len as usize]);
            }
            rest = later;
        }
        if rest.is_empty() {
            return Ok(());
        }
        let reason =
            format!("{} bytes at {} are in no tensor that is compressed", range.len, range.offset);
        Err(ts_format::Error::BadAssembly { tensor: String::new(), reason }.into())
    }

    /// Reads and decodes one whole chunk of the tensor that has `range`.
    fn chunk(
        &mut self,
        checkpoint: &Checkpoint,
        range: ByteRange,
        part: &ChunkPart,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let chunk = part.chunk;
        let place = ByteRange { file: part.file, offset: chunk.offset, len: u64::from(chunk.len) };
        let mut stored = std::mem::take(&mut self.stored);
        stored.resize(chunk.len as usize, 0);
        let done = self.read_exactly(checkpoint, place, &mut stored);
        self.stored = stored;
        done?;
        let wrong = |what: String| {
            let tensor = checkpoint.catalog().tensor_at(range).map_or("", |tensor| tensor.name());
            Error::from(damage(checkpoint, tensor, place, what))
        };
        self.in_turn(|this| {
            if !chunk.matches(&this.stored) {
                return Err(wrong(WRONG_SUM.into()));
            }
            decode_chunk(chunk.codec, chunk.width, &this.stored, out, &mut this.scratch)
                .map_err(|error| wrong(format!("are {error}")))
        })
    }

    /// Does what keeps a core busy, once one is free for it.
    fn in_turn<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let turns = self.turns.clone();
        let _turn = turns.as_ref().map(|turns| turns.take());
        work(self)
    }
}

/// Makes readers for threads that go through whole files once: these leave the page cache as it is.
#[derive(Debug)]
pub(crate) struct Readers {
    /// Memory for their windows; without it the page cache must do.
    pool: Option<HostPool>,
    turns: Arc<Turns>,
}

impl Readers {
    /// A window, in bytes: a chunk or two wherever they begin.
    const WINDOW: usize = (2 << 20) + (64 << 10);

    /// For `count` readers, `jobs` of which compare and decode at a time while the others wait for
    /// storage.
    pub(crate) fn new(count: usize, jobs: usize) -> Self {
        let bytes = count * Self::WINDOW;
        let turns = Turns { free: Mutex::new(jobs.max(1)), freed: Condvar::new() };
        Self { pool: HostPool::new(&Budget::new(bytes), bytes).ok(), turns: Arc::new(turns) }
    }

    pub(crate) fn reader(&self) -> Reader {
        let window = self.pool.as_ref().and_then(|pool| pool.allocate(Self::WINDOW).ok());
        let turns = Some(Arc::clone(&self.turns));
        Reader { direct: window.map(DirectReader::new), turns, ..Reader::default() }
    }
}

/// How many may do something at once.
#[derive(Debug)]
struct Turns {
    free: Mutex<usize>,
    freed: Condvar,
}

impl Turns {
    /// Waits for a turn, which ends when what it gives is dropped.
    fn take(&self) -> Turn<'_> {
        let mut free = self.free.lock();
        self.freed.wait_while(&mut free, |free| *free == 0);
        *free -= 1;
        Turn(self)
    }
}

struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.free.lock() += 1;
        self.0.freed.notify_one();
    }
}

pub(crate) fn damage(
    checkpoint: &Checkpoint,
    tensor: &str,
    place: ByteRange,
    what: String,
) -> Damage {
    let path = checkpoint.sources()[place.file.0 as usize].path().to_path_buf();
    Damage { path, tensor: tensor.into(), offset: place.offset, len: place.len, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runs_of_a_block_are_its_elements_in_order() {
        let shape = [3, 4, 5];
        for block in [
            [0..3, 0..4, 0..5],
            [1..2, 0..4, 0..5],
            [0..3, 1..3, 0..5],
            [0..3, 0..4, 2..3],
            [2..3, 3..4, 4..5],
            [0..2, 1..4, 1..4],
            [0..3, 2..2, 0..5],
        ] {
            let mut expected: Vec<u64> = Vec::new();
            for i in block[0].clone() {
                for j in block[1].clone() {
                    expected.extend(block[2].clone().flat_map(|k| {
                        let element = (i * 20 + j * 5 + k) * 2;
                        [element, element + 1]
                    }));
                }
            }
            let bytes =
                runs(&shape, &block, 2).into_iter().flat_map(|(begin, len)| begin..begin + len);
            assert!(bytes.eq(expected), "{block:?}");
        }
        let row = 2..5;
        assert_eq!(runs(&[7], std::slice::from_ref(&row), 4), [(8, 12)]);
    }
}
