// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the bytes of tensors across files, compares checksums and decodes chunks.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use ts_format::{ByteRange, CHUNK_LEN, ChunkPart, Digest, FileId, Scratch, Tensor, decode_chunk};
use ts_io::DirectReader;
use ts_pool::{Budget, HostPool};

use crate::damage::{CHECKSUM_MISMATCH, Damage};
use crate::{Checkpoint, Error};

impl Checkpoint {
    /// Reads ranges of tensors into `buffer`, one after the other, and decodes compressed ranges.
    /// Blocks, and reads through the page cache.
    ///
    /// Only compressed bytes are compared with their checksums.
    ///
    /// # Errors
    /// - [`Error::Io`] if a read fails, or the file has changed since it was opened.
    /// - [`Error::Corrupt`] if compressed bytes are damaged.
    /// - [`Error::Format`] if a range of compressed bytes is not within one tensor.
    ///
    /// # Panics
    /// Panics if `buffer` does not have the total length of the ranges, or the catalog does not
    /// contain the file of a range.
    pub fn read(&self, ranges: &[ByteRange], buffer: &mut [u8]) -> Result<(), Error> {
        let (mut rest, mut reader) = (buffer, Reader::default());
        for range in ranges {
            let (part, after) = rest.split_at_mut(range.len as usize);
            reader.read(self, *range, part)?;
            rest = after;
        }
        assert!(rest.is_empty(), "the buffer is {} bytes longer than the ranges", rest.len());
        Ok(())
    }

    /// Reads a block of a tensor into `buffer`, in row-major order. `block` has a range of indices
    /// for each dimension. This function blocks.
    ///
    /// Reads only the bytes of the block, and decodes only the chunks that contain them. If the
    /// block is the whole tensor, its bytes are compared with their checksums. Otherwise, only
    /// compressed bytes are compared.
    ///
    /// # Errors
    /// - [`Error::Format`] if the tensor does not exist or the block is not within its shape.
    /// - [`Error::Format`] if elements are smaller than a byte, and the block does not consist of
    ///   whole bytes.
    /// - [`Error::Io`] if a read fails, or the file has changed since it was opened.
    /// - [`Error::Corrupt`] if bytes are damaged.
    ///
    /// # Panics
    /// Panics if `buffer` does not have the length of the block.
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
        let in_bytes = if whole { None } else { whole_bytes(shape, block, bits) };
        if block.len() != shape.len()
            || !block.iter().zip(shape).all(within)
            || (!whole && in_bytes.is_none())
        {
            let expected = match bits {
                0..8 => "whole bytes, because its elements are smaller than a byte",
                _ => "a range within each dimension",
            };
            let dtype = tensor.dtype();
            let reason =
                format!("cannot read block {block:?} of {dtype} {shape:?}: expected {expected}");
            return Err(ts_format::Error::BadAssembly { tensor: name.into(), reason }.into());
        }
        let count: u64 = block.iter().map(|dimension| dimension.end - dimension.start).product();
        assert_eq!(buffer.len() as u64, count * bits / 8, "the buffer has the length of the block");
        let mut reader = Reader::default();
        if whole {
            return reader.read_checked(self, tensor, 0, buffer);
        }
        let range = tensor.range();
        let mut rest = buffer;
        let (shape, block, element) = in_bytes.expect("a block that is not whole has whole bytes");
        for (begin, len) in block_runs(&shape, &block, element) {
            let (now, later) = rest.split_at_mut(len as usize);
            reader.read(self, ByteRange { offset: range.offset + begin, len, ..range }, now)?;
            rest = later;
        }
        Ok(())
    }
}

/// Returns a shape, a block of it and the size of its elements in bytes, for a block of elements of
/// `bits` bits. Several elements that share a byte become one. Returns `None` if the block has a
/// part of a byte.
fn whole_bytes(
    shape: &[u64],
    block: &[Range<u64>],
    bits: u64,
) -> Option<(Vec<u64>, Vec<Range<u64>>, u64)> {
    let (mut shape, mut block) = (shape.to_vec(), block.to_vec());
    if bits >= 8 {
        return Some((shape, block, bits / 8));
    }
    let (size, last) = (shape.last_mut()?, block.last_mut()?);
    let count = 8 / bits;
    let fits = |n: u64| n.is_multiple_of(count);
    if !8u64.is_multiple_of(bits) || !fits(*size) || !fits(last.start) || !fits(last.end) {
        return None;
    }
    (*size, *last) = (*size / count, last.start / count..last.end / count);
    Some((shape, block, 1))
}

/// Returns the contiguous runs of bytes in a block of a tensor, in order. A run is an offset in the
/// tensor and a length, in bytes. `element` is the size of an element in bytes.
fn block_runs(shape: &[u64], block: &[Range<u64>], element: u64) -> Vec<(u64, u64)> {
    if block.iter().any(Range::is_empty) {
        return Vec::new();
    }
    // `cut` is the last dimension that the block contains only in part. For fixed indices before
    // `cut`, the bytes of the block are contiguous.
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

/// A reader of byte ranges, which reuses its buffers. Each thread needs its own reader.
///
/// A default reader reads through the page cache. The readers of a [`ReaderPool`] use direct I/O
/// where possible.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    direct: Option<DirectReader>,
    permits: Option<Arc<Semaphore>>,
    /// The encoded bytes of a chunk.
    stored: Vec<u8>,
    /// The decoded bytes of the last chunk of which only a part was read. The next range may need
    /// another part of this chunk.
    decoded: Vec<u8>,
    /// File and offset of the chunk in `decoded`.
    decoded_chunk: Option<(FileId, u64)>,
    scratch: Scratch,
}

impl Reader {
    /// Fills `out` with the bytes of a range. Only compressed bytes are compared with their
    /// checksums.
    pub(crate) fn read(
        &mut self,
        checkpoint: &Checkpoint,
        range: ByteRange,
        out: &mut [u8],
    ) -> Result<(), Error> {
        if out.is_empty() {
            return Ok(());
        }
        match range.is_virtual() {
            true => self.decode(checkpoint, range, out),
            false => self.read_stored(checkpoint, range, out),
        }
    }

    /// Fills `out` with bytes of a file, without decoding them.
    pub(crate) fn read_stored(
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

    /// Fills `out` with a part of a tensor, and compares it with the tensor's checksums, if any.
    /// The part begins at byte `begin` of the tensor. It must begin at the start of a chunk and end
    /// at the end of a chunk or of the tensor.
    pub(crate) fn read_checked(
        &mut self,
        checkpoint: &Checkpoint,
        tensor: Tensor<'_>,
        begin: u64,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let whole = tensor.range();
        let range = ByteRange { offset: whole.offset + begin, len: out.len() as u64, ..whole };
        if whole.is_virtual() {
            return self.decode(checkpoint, range, out);
        }
        self.read_stored(checkpoint, range, out)?;
        self.check(checkpoint, tensor, begin, out)
    }

    /// Compares a part of a tensor that is not compressed with the tensor's checksums, if any. The
    /// part begins as for [`read_checked`](Self::read_checked).
    pub(crate) fn check(
        &mut self,
        checkpoint: &Checkpoint,
        tensor: Tensor<'_>,
        begin: u64,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let Some(checksums) = tensor.checksums() else { return Ok(()) };
        let (whole, len) = (tensor.range(), bytes.len() as u64);
        let range = ByteRange { offset: whole.offset + begin, len, ..whole };
        let digest = self.with_permit(|_| Digest::of(bytes));
        let pairs = checksums[(begin / CHUNK_LEN) as usize..].iter().zip(digest.chunks());
        match pairs.enumerate().find(|(_, (expected, actual))| expected != actual) {
            None => Ok(()),
            Some((i, _)) => {
                let at = i as u64 * CHUNK_LEN;
                let len = CHUNK_LEN.min(range.len - at);
                let chunk = ByteRange { offset: range.offset + at, len, ..range };
                Err(damage(checkpoint, tensor.name(), chunk, CHECKSUM_MISMATCH.into()).into())
            }
        }
    }

    /// Fills `out` with the decoded bytes of a virtual range.
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
                self.decode_chunk(checkpoint, range, &part, now)?;
            } else {
                let chunk = (part.file, part.chunk.offset);
                if self.decoded_chunk != Some(chunk) {
                    self.decoded_chunk = None;
                    let mut decoded = std::mem::take(&mut self.decoded);
                    decoded.resize(part.raw_len as usize, 0);
                    let done = self.decode_chunk(checkpoint, range, &part, &mut decoded);
                    self.decoded = decoded;
                    done?;
                    self.decoded_chunk = Some(chunk);
                }
                now.copy_from_slice(&self.decoded[part.skip as usize..][..part.len as usize]);
            }
            rest = later;
        }
        if rest.is_empty() {
            return Ok(());
        }
        let reason = format!(
            "cannot read {} bytes at virtual offset {}: not within one compressed tensor",
            range.len, range.offset
        );
        Err(ts_format::Error::BadAssembly { tensor: String::new(), reason }.into())
    }

    /// Reads and decodes the whole chunk of `part`, which is a part of `range`.
    fn decode_chunk(
        &mut self,
        checkpoint: &Checkpoint,
        range: ByteRange,
        part: &ChunkPart,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let chunk = part.chunk;
        let stored_range =
            ByteRange { file: part.file, offset: chunk.offset, len: u64::from(chunk.len) };
        let mut stored = std::mem::take(&mut self.stored);
        stored.resize(chunk.len as usize, 0);
        let done = self.read_stored(checkpoint, stored_range, &mut stored);
        self.stored = stored;
        done?;
        let damaged = |what: String| {
            let tensor = checkpoint.catalog().tensor_containing(range);
            let name = tensor.map_or("", |tensor| tensor.name());
            Error::from(damage(checkpoint, name, stored_range, what))
        };
        self.with_permit(|this| {
            if !chunk.matches(&this.stored) {
                return Err(damaged(CHECKSUM_MISMATCH.into()));
            }
            decode_chunk(chunk.codec, chunk.width, &this.stored, out, &mut this.scratch)
                .map_err(|error| damaged(format!("are {error}")))
        })
    }

    /// Runs CPU-bound work. A reader of a [`ReaderPool`] first waits for a permit.
    fn with_permit<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let permits = self.permits.clone();
        let _permit = permits.as_ref().map(|permits| permits.acquire());
        work(self)
    }
}

/// A pool of readers for threads that read whole files once. The readers use direct I/O where
/// possible, and only a limited number of them decode or compute checksums at a time.
#[derive(Debug)]
pub(crate) struct ReaderPool {
    /// Memory for the windows of direct readers. If `None`, all reads go through the page cache.
    pool: Option<HostPool>,
    permits: Arc<Semaphore>,
}

impl ReaderPool {
    /// Length of a window in bytes, enough for two chunks at any offset.
    const WINDOW: usize = (2 << 20) + (64 << 10);

    /// Creates a pool for `count` readers, of which at most `jobs` decode or compare bytes at a
    /// time while the others wait for storage.
    pub(crate) fn new(count: usize, jobs: usize) -> Self {
        let bytes = count * Self::WINDOW;
        let permits = Semaphore { free: Mutex::new(jobs.max(1)), freed: Condvar::new() };
        Self { pool: HostPool::new(&Budget::new(bytes), bytes).ok(), permits: Arc::new(permits) }
    }

    pub(crate) fn reader(&self) -> Reader {
        let window = self.pool.as_ref().and_then(|pool| pool.allocate(Self::WINDOW).ok());
        let permits = Some(Arc::clone(&self.permits));
        Reader { direct: window.map(DirectReader::new), permits, ..Reader::default() }
    }
}

#[derive(Debug)]
struct Semaphore {
    free: Mutex<usize>,
    freed: Condvar,
}

impl Semaphore {
    /// Waits for a permit. Dropping the permit returns it.
    fn acquire(&self) -> Permit<'_> {
        let mut free = self.free.lock();
        self.freed.wait_while(&mut free, |free| *free == 0);
        *free -= 1;
        Permit(self)
    }
}

struct Permit<'a>(&'a Semaphore);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.free.lock() += 1;
        self.0.freed.notify_one();
    }
}

/// Returns a description of damage at `range` of a file.
pub(crate) fn damage(
    checkpoint: &Checkpoint,
    tensor: &str,
    range: ByteRange,
    what: String,
) -> Damage {
    let path = checkpoint.sources()[range.file.0 as usize].path().to_path_buf();
    Damage { path, tensor: tensor.into(), offset: range.offset, len: range.len, what }
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
            let runs = block_runs(&shape, &block, 2);
            let bytes = runs.into_iter().flat_map(|(begin, len)| begin..begin + len);
            assert!(bytes.eq(expected), "{block:?}");
        }
        let row = 2..5;
        assert_eq!(block_runs(&[7], std::slice::from_ref(&row), 4), [(8, 12)]);
    }
}
