// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes between the host and buffers of a device.

use ts_streams::{Device, MemoryRange, Stream, may_wait};

use crate::{DeviceBuffer, Error};

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
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        self.transfer(offset..offset + bytes.len(), |stream, to| {
            // SAFETY: both are there until `transfer` returns, which waits; `bytes` are borrowed, and only read. The buffer is
            // this one's alone, and its stream's order is that of its uses.
            unsafe { stream.copy(to, from) }
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
        let to = MemoryRange::of(bytes);
        self.transfer(offset..offset + bytes.len(), |stream, from| {
            // SAFETY: as in `write`, with `bytes` borrowed for as long to be written.
            unsafe { stream.copy(to, from) }
        })
    }

    fn transfer(
        &self,
        part: std::ops::Range<usize>,
        submit: impl FnOnce(&D::Stream, MemoryRange) -> Result<(), ts_streams::Error>,
    ) -> Result<(), Error> {
        assert!(part.start <= part.end && part.end <= self.len(), "{part:?} of {} bytes", self.len());
        // Asked first: once it is submitted, nothing may keep this from waiting for it.
        may_wait()?;
        let (stream, ()) = self.submit(|stream, range| submit(stream, range.slice(part)))?;
        // An error is one of work that is over, the copy with it.
        Ok(stream.synchronize()?)
    }
}
