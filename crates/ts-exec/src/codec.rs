// SPDX-License-Identifier: MIT OR Apache-2.0
//! The primitives of the wire encoding: varints, texts, and a reader that checks lengths.

use ts_remote::Error;

/// Maps a signed number to an unsigned one, so that numbers near zero stay short as varints.
pub(crate) fn zigzag(value: i64) -> u64 {
    (value << 1 ^ value >> 63) as u64
}

/// Reverses [`zigzag`].
pub(crate) fn unzigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

/// Appends a number as a varint (LEB128).
pub(crate) fn put_number(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

/// Appends a text, preceded by its length in bytes.
pub(crate) fn put_text(into: &mut Vec<u8>, text: &str) {
    put_number(into, text.len() as u64);
    into.extend_from_slice(text.as_bytes());
}

/// Reads encoded values from a byte slice.
///
/// Before memory is allocated for a list or a byte string, its length is compared with the number
/// of bytes that are left.
#[derive(Debug, Clone)]
pub(crate) struct Decoder<'a> {
    remaining: &'a [u8],
    stream: u32,
    /// How many bytes of memory decoded values may still use. A decoded value can be larger than
    /// its encoding: each [`Value`](crate::Value) takes the size of the enum, even if its encoding
    /// is one byte.
    memory_left: usize,
}

impl<'a> Decoder<'a> {
    /// Creates a decoder without a memory limit. Errors name `stream`.
    pub(crate) fn new(bytes: &'a [u8], stream: u32) -> Self {
        Self { remaining: bytes, stream, memory_left: usize::MAX }
    }

    /// Limits the memory of all values that are decoded from now on to `bytes` bytes.
    pub(crate) fn limit_memory(&mut self, bytes: usize) {
        self.memory_left = bytes;
    }

    /// Counts `bytes` bytes of memory towards the limit.
    ///
    /// # Errors
    /// Returns a protocol error if the limit is exceeded.
    pub(crate) fn charge(&mut self, bytes: usize) -> Result<(), Error> {
        let left = self.memory_left.checked_sub(bytes);
        self.memory_left = left.ok_or_else(|| {
            self.error(format!(
                "the request is too large: decoding its next value takes {bytes} bytes of memory, \
                 but only {} bytes of the limit are left",
                self.memory_left
            ))
        })?;
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.remaining.is_empty()
    }

    /// Returns how many bytes have not been read.
    pub(crate) fn remaining_bytes(&self) -> usize {
        self.remaining.len()
    }

    pub(crate) fn byte(&mut self) -> Result<u8, Error> {
        let (&byte, rest) = self.remaining.split_first().ok_or_else(|| self.truncated())?;
        self.remaining = rest;
        Ok(byte)
    }

    /// Reads a varint.
    pub(crate) fn number(&mut self) -> Result<u64, Error> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        let what = "invalid varint: expected at most 10 bytes, and a value of at most 64 bits";
        Err(self.error(what.into()))
    }

    /// Reads the length of a list or a byte string. Each element takes at least one byte, so a
    /// length beyond the remaining bytes is an error.
    pub(crate) fn len(&mut self) -> Result<usize, Error> {
        let len = self.number()?;
        let fits = usize::try_from(len).ok().filter(|&len| len <= self.remaining.len());
        fits.ok_or_else(|| {
            self.error(format!(
                "the message is truncated, or a length in it is wrong: got length {len} (expected \
                 at most {}, the number of bytes that are left)",
                self.remaining.len()
            ))
        })
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, Error> {
        std::str::from_utf8(self.bytes()?).map_err(|_| self.error("invalid text: not UTF-8".into()))
    }

    pub(crate) fn float(&mut self) -> Result<f64, Error> {
        Ok(f64::from_le_bytes(self.array()?))
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (bytes, rest) = self.remaining.split_first_chunk().ok_or_else(|| self.truncated())?;
        self.remaining = rest;
        Ok(*bytes)
    }

    /// Reads a byte string, which is preceded by its length.
    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], Error> {
        let len = self.len()?;
        self.charge(len)?;
        let (bytes, rest) = self.remaining.split_at(len);
        self.remaining = rest;
        Ok(bytes)
    }

    /// Skips everything that has not been read.
    pub(crate) fn skip_remaining(&mut self) {
        self.remaining = &[];
    }

    fn truncated(&self) -> Error {
        self.error("the message is truncated".into())
    }

    /// Creates a protocol error for the stream of this decoder.
    pub(crate) fn error(&self, what: String) -> Error {
        Error::Protocol { stream: self.stream, what }
    }
}
