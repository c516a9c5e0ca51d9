// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes of a checkpoint, wherever its files keep them and however: read, compared with their checksums, decoded.

use std::path::PathBuf;

use ts_format::{ByteRange, CHUNK_LEN, ChunkPart, Digest, Scratch, Tensor, decode_chunk};

use crate::{Checkpoint, Error};

/// Bytes that are not what was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: tensor `{tensor}`: {len} bytes at byte {offset} {what}: the file is damaged", path.display())]
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

const WRONG_SUM: &str = "do not have their checksum";

/// Reads ranges of a checkpoint, each piece into memory that is used again. One for each thread.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    /// A chunk as it lies in the file,
    stored: Vec<u8>,
    /// and one of which not all is wanted.
    decoded: Vec<u8>,
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
            false => read_exactly(checkpoint, range, out),
        }
    }

    /// Fills `out` with a part of a tensor, from its byte `begin` on, which chunks begin at. Whatever has checksums is
    /// compared with them.
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
        read_exactly(checkpoint, range, out)?;
        let Some(sums) = tensor.sums() else { return Ok(()) };
        let digest = Digest::of(out);
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
    fn decode(&mut self, checkpoint: &Checkpoint, range: ByteRange, out: &mut [u8]) -> Result<(), Error> {
        let mut rest = out;
        for part in checkpoint.catalog().chunk_parts(range) {
            let (now, later) = rest.split_at_mut(part.len as usize);
            if part.len == part.raw_len {
                self.chunk(checkpoint, range, &part, now)?;
            } else {
                let mut decoded = std::mem::take(&mut self.decoded);
                decoded.resize(part.raw_len as usize, 0);
                self.chunk(checkpoint, range, &part, &mut decoded)?;
                now.copy_from_slice(&decoded[part.skip as usize..][..part.len as usize]);
                self.decoded = decoded;
            }
            rest = later;
        }
        Ok(())
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
        self.stored.resize(chunk.len as usize, 0);
        read_exactly(checkpoint, place, &mut self.stored)?;
        let wrong = |what: String| {
            let tensor = checkpoint.catalog().tensor_at(range).map_or("", |tensor| tensor.name());
            Error::from(damage(checkpoint, tensor, place, what))
        };
        if !chunk.matches(&self.stored) {
            return Err(wrong(WRONG_SUM.into()));
        }
        decode_chunk(chunk.codec, chunk.width, &self.stored, out, &mut self.scratch)
            .map_err(|error| wrong(format!("are {error}")))
    }
}

/// Reads bytes that lie in a file as they are.
fn read_exactly(checkpoint: &Checkpoint, range: ByteRange, out: &mut [u8]) -> Result<(), Error> {
    let source = &checkpoint.sources()[range.file.0 as usize];
    let actual = source.read_at(range.offset, out)?;
    if actual < out.len() {
        let (path, offset, expected) = (source.path().to_path_buf(), range.offset, out.len());
        return Err(ts_io::Error::ShortRead { path, offset, expected, actual }.into());
    }
    Ok(source.verify(range.offset)?)
}

fn damage(checkpoint: &Checkpoint, tensor: &str, place: ByteRange, what: String) -> Damage {
    let path = checkpoint.sources()[place.file.0 as usize].path().to_path_buf();
    Damage { path, tensor: tensor.into(), offset: place.offset, len: place.len, what }
}
