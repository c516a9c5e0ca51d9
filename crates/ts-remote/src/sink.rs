// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory for payloads.

use crate::Error;

/// Memory that the payload of a tensor is received into.
///
/// The connection calls [`space`](Self::space) for a buffer, reads from the socket into it, and
/// reports the bytes with [`filled`](Self::filled). `Vec<u8>`, `Box<[u8]>` and [`ts_pool::Buffer`]
/// are sinks for exactly as many bytes as they contain.
pub trait Sink {
    /// The type that [`finish`](Self::finish) returns for the filled memory.
    type Full;

    /// Returns the length of the memory, in bytes.
    fn byte_len(&self) -> u64;

    /// Returns a buffer for the bytes of the payload from `offset`: at least 1 byte, and at most
    /// `len`. Bytes arrive in order.
    ///
    /// The connection may call this again before [`filled`](Self::filled), to compute a checksum.
    /// The buffer must then still contain the bytes that were written to it.
    ///
    /// # Errors
    /// Returns an error if the memory cannot be used. The error ends the connection.
    fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], Error>;

    /// Reports that `len` bytes were written to the buffer that [`space`](Self::space) last
    /// returned. `offset` is the position of the first of them in the payload.
    ///
    /// # Errors
    /// Returns the same errors as [`space`](Self::space).
    fn filled(&mut self, offset: u64, len: usize) -> Result<(), Error> {
        let _ = (offset, len);
        Ok(())
    }

    /// Returns the filled memory. May block, for example until a copy to a device is complete.
    ///
    /// # Errors
    /// Returns an error if the memory could not be filled, for example because a copy failed.
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
