// SPDX-License-Identifier: MIT OR Apache-2.0
//! Destinations for the bytes of a new file.

use ts_format::ContainerTail;

use crate::Error;
use crate::atomic::AtomicFile;

/// A file on disk or in memory.
#[derive(Debug)]
pub(super) enum Sink {
    File(Box<AtomicFile>),
    Memory(Vec<u8>),
}

impl Sink {
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match self {
            Self::File(file) => file.write(bytes),
            Self::Memory(buffer) => {
                buffer.extend_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Moves forward to `offset`. Skipped bytes are 0.
    pub(super) fn seek(&mut self, offset: u64) -> Result<(), Error> {
        match self {
            Self::File(file) => file.seek(offset),
            Self::Memory(buffer) => {
                buffer.resize(offset as usize, 0);
                Ok(())
            }
        }
    }

    /// Writes the index and superblocks that complete a `.ts` file.
    pub(super) fn write_tail(&mut self, tail: &ContainerTail) -> Result<(), Error> {
        match self {
            // The indexes of checkpoints follow the final index. They must stay until the final
            // index is durable.
            Self::File(file) if file.is_kept() => {
                file.write_tail(tail)?;
                file.flush()?;
                file.truncate(tail.index_offset + tail.index.len() as u64)
            }
            Self::File(file) => {
                file.truncate(tail.index_offset)?;
                file.write_tail(tail)
            }
            Self::Memory(buffer) => {
                buffer.resize(tail.index_offset as usize, 0);
                buffer.extend(&tail.index);
                buffer[..tail.superblocks.len()].copy_from_slice(&tail.superblocks);
                Ok(())
            }
        }
    }
}
