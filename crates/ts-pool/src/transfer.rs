// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes between the host and buffers of a device.

use std::ops::Range;

use ts_streams::{Device, MemoryRange, Stream, may_wait};

use crate::{DeviceBuffer, Error, PooledBuffer};

impl<D: Device> DeviceBuffer<D> {
    /// Copies bytes of the host to `offset`, on the stream that the buffer was allocated for and behind what was submitted there.
    /// Blocks until that is done.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::Device`] with what failed on the stream, or when work of a stream calls this.
    ///
    /// # Panics
    /// If they are not all inside.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let (part, from) =
            (self.part(offset, bytes.len())?, MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len()));
        self.transfer(|stream, range| {
            // SAFETY: both are there until `transfer` returns, which waits; `bytes` are borrowed, and only read. The buffer is
            // this one's alone, and its stream's order is that of its uses.
            unsafe { stream.copy(range.slice(part), from) }
        })
    }

    /// Copies bytes at `offset` to the host, as [`write`](Self::write) does the other way. Work of other streams that writes here is
    /// the caller's to wait for.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    ///
    /// # Panics
    /// If they are not all inside.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let (part, to) = (self.part(offset, bytes.len())?, MemoryRange::of(bytes));
        self.transfer(|stream, range| {
            // SAFETY: as in `write`, with `bytes` borrowed for as long to be written.
            unsafe { stream.copy(to, range.slice(part)) }
        })
    }

    /// Copies all of another buffer here, on this buffer's stream and behind what was submitted for either. Blocks until that is
    /// done. Between two pools it goes by way of the host.
    ///
    /// # Errors
    /// As [`write`](Self::write); [`Error::Device`] when they are not equally long.
    pub fn copy_from(&mut self, from: &Self) -> Result<(), Error> {
        may_wait()?;
        let copied = self.transfer_with(from, |stream, to, from| {
            // SAFETY: `write`'s reasons, for both buffers; other work on `from` is before this, or ordered by its owner.
            unsafe { stream.copy(to, from) }
        });
        if let Some(copied) = copied {
            return copied;
        }
        let (from_bytes, to_bytes) = (from.len(), self.len());
        if from_bytes != to_bytes {
            return Err(ts_streams::Error::BadCopy { from_bytes, to_bytes, overlap: false }.into());
        }
        let mut bytes = vec![0; from_bytes];
        from.read(0, &mut bytes)?;
        self.write(0, &bytes)
    }

    /// Some of its bytes, for who may wait: asked first, for once a copy is submitted nothing may keep this from waiting for it.
    fn part(&self, offset: usize, len: usize) -> Result<Range<usize>, Error> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len());
        assert!(inside, "{len} bytes at {offset} of {}", self.len());
        may_wait()?;
        Ok(offset..offset + len)
    }
}

impl<D: Device> PooledBuffer<D> {
    /// Copies bytes of the host to `offset`, on a stream and behind what was submitted there. Blocks until that is done. Work of other
    /// streams that uses the buffer is the caller's to wait for.
    ///
    /// # Errors
    /// [`Error::Device`] with what failed on the stream, or when work of a stream calls this.
    ///
    /// # Panics
    /// If they are not all inside.
    pub fn write(&mut self, offset: usize, bytes: &[u8], stream: &D::Stream) -> Result<(), Error> {
        may_wait()?;
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: `bytes` are borrowed, and only read, and the buffer is this one's, until this has waited.
        unsafe { stream.copy(self.range().slice(offset..offset + bytes.len()), from) }?;
        Ok(stream.synchronize()?)
    }

    /// Copies bytes at `offset` to the host, as [`write`](Self::write) does the other way.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    ///
    /// # Panics
    /// If they are not all inside.
    pub fn read(&self, offset: usize, bytes: &mut [u8], stream: &D::Stream) -> Result<(), Error> {
        may_wait()?;
        let from = self.range().slice(offset..offset + bytes.len());
        // SAFETY: as in `write`, with `bytes` borrowed for as long to be written.
        unsafe { stream.copy(MemoryRange::of(bytes), from) }?;
        Ok(stream.synchronize()?)
    }
}
