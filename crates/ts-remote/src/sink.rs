// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where payloads go.

use crate::Error;

/// Memory for the payload of a tensor. What arrives is written to where it says, by the socket
/// itself where that can be.
pub trait Sink {
    /// What it is when it is full.
    type Full;

    /// Length in bytes.
    fn byte_len(&self) -> u64;

    /// Memory for the bytes from `offset` on, which [`filled`](Self::filled) is told of: at least
    /// one byte, at most `len`. Bytes come in their order.
    ///
    /// # Errors
    /// What is wrong with the memory; the connection ends with that.
    fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], Error>;

    /// So many bytes from `offset` on are in what [`space`](Self::space) gave last.
    ///
    /// # Errors
    /// As [`space`](Self::space).
    fn filled(&mut self, offset: u64, len: usize) -> Result<(), Error> {
        let _ = (offset, len);
        Ok(())
    }

    /// All bytes have come. May block until they are where they are to stay.
    ///
    /// # Errors
    /// As [`space`](Self::space).
    fn finish(self) -> Result<Self::Full, Error>;
}

macro_rules! plain_memory {
    ($($memory:ty),*) => {$(
        impl Sink for $memory {
            type Full = Self;

            fn byte_len(&self) -> u64 {
                self[..].len() as u64
            }

            fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], Error> {
                Ok(&mut self[offset as usize..][..len])
            }

            fn finish(self) -> Result<Self, Error> {
                Ok(self)
            }
        }
    )*};
}

plain_memory!(Vec<u8>, Box<[u8]>, ts_pool::Buffer);
