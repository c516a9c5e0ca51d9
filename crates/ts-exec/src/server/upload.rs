// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors that a client sends to storages.

use ts_remote::{Error, Sink};

/// A RECEIVE request whose tensor has not arrived.
#[derive(Debug)]
pub(super) struct PendingUpload {
    /// The number of the request.
    pub(super) request: u64,
    pub(super) storage: u64,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// The memory into which a server receives a tensor.
#[derive(Debug)]
pub enum UploadSink<S> {
    /// Memory that the executor provides.
    Memory(S),
    /// No memory: the upload was refused, but its bytes must still be read from the socket.
    Discard {
        /** The length of the tensor in bytes. */
        bytes: u64,
        /** A buffer that is overwritten until all bytes are read. */
        scratch: Vec<u8>,
    },
}

impl<S: Sink> Sink for UploadSink<S> {
    type Full = Option<S::Full>;

    fn byte_len(&self) -> u64 {
        match self {
            Self::Memory(sink) => sink.byte_len(),
            Self::Discard { bytes, .. } => *bytes,
        }
    }

    fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], Error> {
        match self {
            Self::Memory(sink) => sink.space(offset, len),
            Self::Discard { scratch, .. } => {
                let len = len.min(scratch.len());
                Ok(&mut scratch[..len])
            }
        }
    }

    fn filled(&mut self, offset: u64, len: usize) -> Result<(), Error> {
        match self {
            Self::Memory(sink) => sink.filled(offset, len),
            Self::Discard { .. } => Ok(()),
        }
    }

    fn finish(self) -> Result<Self::Full, Error> {
        match self {
            Self::Memory(sink) => sink.finish().map(Some),
            Self::Discard { .. } => Ok(None),
        }
    }
}
