// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes between the host and buffers of a device.

use std::ops::Range;

use ts_streams::{Device, Event, MemoryKind, MemoryRange, Stream, may_wait};

use crate::error::range_in;
use crate::{DeviceBuffer, Error, PinnedMemoryPool, PooledBuffer};

impl<D: Device> DeviceBuffer<D> {
    /// Copies bytes of the host to `offset`, on the stream that the buffer was allocated for and
    /// behind what was submitted there. Blocks until that is done.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when they are not all inside; [`Error::Stale`]; [`Error::Device`] with
    /// what failed on the stream, or when work of a stream calls this.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let (part, from) = (
            self.part(offset, bytes.len())?,
            MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len()),
        );
        self.transfer(|stream, range| {
            // SAFETY: both are there until `transfer` returns, which waits; `bytes` are borrowed,
            // and only read. The buffer is this one's alone, and its stream's order is that of its
            // uses.
            unsafe { stream.copy(range.slice(part), from) }
        })
    }

    /// Copies bytes at `offset` to the host, as [`write`](Self::write) does the other way. Work of
    /// other streams that writes here is the caller's to wait for.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let (part, to) = (self.part(offset, bytes.len())?, MemoryRange::of(bytes));
        self.transfer(|stream, range| {
            // SAFETY: as in `write`, with `bytes` borrowed for as long to be written.
            unsafe { stream.copy(to, range.slice(part)) }
        })
    }

    /// Copies all of another buffer here, on this buffer's stream and behind what was submitted for
    /// either. Blocks until that is done. Between two pools it goes by way of the host.
    ///
    /// # Errors
    /// As [`write`](Self::write); [`Error::Device`] when they are not equally long.
    pub fn copy_from(&mut self, from: &Self) -> Result<(), Error> {
        may_wait()?;
        let copied = self.transfer_with(from, |stream, to, from| {
            // SAFETY: `write`'s reasons, for both buffers; other work on `from` is before this, or
            // ordered by its owner.
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

    /// Some of its bytes, for who may wait: asked first, for once a copy is submitted nothing may
    /// keep this from waiting for it.
    fn part(&self, offset: usize, len: usize) -> Result<Range<usize>, Error> {
        let part = range_in(self.len(), offset, len)?;
        may_wait()?;
        Ok(part)
    }
}

impl<D: Device> PooledBuffer<D> {
    /// Its bytes, if they are the host's: of a [`PinnedMemoryPool`], or a pool of
    /// [`MemoryKind::Host`]. Work of streams that uses them is the caller's to wait for.
    pub fn host_bytes(&self) -> Option<&[u8]> {
        let range = self.is_host().then(|| self.range())?;
        // SAFETY: it is memory of the host, which was written when it was taken from the system;
        // this value has it, and is borrowed.
        Some(unsafe { std::slice::from_raw_parts(range.as_ptr(), range.len()) })
    }

    /// As [`host_bytes`](Self::host_bytes), to write to.
    pub fn host_bytes_mut(&mut self) -> Option<&mut [u8]> {
        let range = self.is_host().then(|| self.range())?;
        // SAFETY: as in `host_bytes`, and borrowed by one alone.
        Some(unsafe { std::slice::from_raw_parts_mut(range.as_ptr(), range.len()) })
    }

    fn is_host(&self) -> bool {
        matches!(self.kind(), MemoryKind::PinnedHost | MemoryKind::Host)
    }

    /// Copies bytes of the host to `offset`, on a stream and behind what was submitted there.
    /// Blocks until that is done. Work of other streams that uses the buffer is the caller's to
    /// wait for.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when they are not all inside; [`Error::Device`] with what failed on
    /// the stream, or when work of a stream calls this.
    pub fn write(&mut self, offset: usize, bytes: &[u8], stream: &D::Stream) -> Result<(), Error> {
        let part = range_in(self.range().len(), offset, bytes.len())?;
        may_wait()?;
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: `bytes` are borrowed, and only read, and the buffer is this one's, until this has
        // waited.
        unsafe { stream.copy(self.range().slice(part), from) }?;
        Ok(stream.synchronize()?)
    }

    /// Copies bytes at `offset` to the host, as [`write`](Self::write) does the other way.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read(&self, offset: usize, bytes: &mut [u8], stream: &D::Stream) -> Result<(), Error> {
        let part = range_in(self.range().len(), offset, bytes.len())?;
        may_wait()?;
        let from = self.range().slice(part);
        // SAFETY: as in `write`, with `bytes` borrowed for as long to be written.
        unsafe { stream.copy(MemoryRange::of(bytes), from) }?;
        Ok(stream.synchronize()?)
    }
}

/// A block of memory that is filled from the host, piece by piece: while one piece is copied to the
/// device, the next is written.
///
/// Dropped before its [`finish`](Self::finish), it gives all its memory back when the copies that
/// were begun are done.
#[derive(Debug)]
pub struct Upload<D: Device> {
    to: Option<PooledBuffer<D>>,
    stream: D::Stream,
    pieces: [Piece<D>; 2],
    current: usize,
    /// Bytes of the current piece that are written.
    have: usize,
    /// Bytes before them, which are copied, or will be.
    sent: usize,
}

#[derive(Debug)]
struct Piece<D: Device> {
    pinned: Option<PooledBuffer<D>>,
    /// Reached when what was copied from it last has been.
    copied: D::Event,
}

impl<D: Device> Piece<D> {
    fn range(&self) -> MemoryRange {
        self.pinned.as_ref().expect("it is there until the upload is dropped").range()
    }
}

impl<D: Device> Upload<D> {
    /// Takes two pieces of a pool, from which bytes go to `to` on a stream. Work of other streams
    /// that uses it is the caller's to wait for.
    ///
    /// # Errors
    /// As [`PinnedMemoryPool::acquire`].
    pub fn new(
        to: PooledBuffer<D>,
        pinned: &PinnedMemoryPool<D>,
        piece_bytes: usize,
        stream: &D::Stream,
    ) -> Result<Self, Error> {
        let device = pinned.blocks().device();
        let piece = || -> Result<_, Error> {
            Ok(Piece { pinned: Some(pinned.acquire(piece_bytes)?), copied: device.create_event()? })
        };
        let pieces = [piece()?, piece()?];
        Ok(Self { to: Some(to), stream: stream.clone(), pieces, current: 0, have: 0, sent: 0 })
    }

    /// The length of the block in bytes.
    pub fn byte_len(&self) -> usize {
        self.to.as_ref().map_or(0, PooledBuffer::len)
    }

    /// Memory of the host to write the next bytes to, those behind all that was
    /// [`written`](Self::written): at least one. Blocks while what was in it before is still
    /// copied.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn space(&mut self) -> Result<&mut [u8], Error> {
        may_wait()?;
        let piece = &mut self.pieces[self.current];
        if self.have == 0 {
            piece.copied.synchronize()?;
        }
        let range = piece.range().slice(self.have..piece.range().len());
        // SAFETY: the range is the host's own memory (`PinnedMemoryPool`), this value's alone, and
        // has been written when it was taken from the system; what copied from it is done: its
        // event was waited for, and nothing is submitted before it is full.
        Ok(unsafe { std::slice::from_raw_parts_mut(range.as_ptr(), range.len()) })
    }

    /// So many bytes are in what [`space`](Self::space) gave last. A piece that is full, and the
    /// last, is copied to the block, which this does not wait for.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Panics
    /// If they are more than that was, or than the block has.
    pub fn written(&mut self, len: usize) -> Result<(), Error> {
        let whole = self.byte_len();
        let (piece, have) = (&self.pieces[self.current], self.have + len);
        assert!(
            have <= piece.range().len() && self.sent + have <= whole,
            "{len} bytes more than there is room"
        );
        self.have = have;
        if have < piece.range().len() && self.sent + have < whole {
            return Ok(());
        }
        let to = self.to.as_ref().expect("it is there until this is dropped").range();
        // SAFETY: both are this value's, which `finish` and `drop` keep until the stream is done;
        // `space` lends the piece again when the event is reached.
        unsafe {
            self.stream.copy(to.slice(self.sent..self.sent + have), piece.range().slice(0..have))
        }?;
        self.stream.record(&piece.copied)?;
        (self.sent, self.have, self.current) = (self.sent + have, 0, 1 - self.current);
        Ok(())
    }

    /// The block, when all that was written is in it. Blocks.
    ///
    /// # Errors
    /// [`Error::Device`] with what failed on the stream.
    pub fn finish(mut self) -> Result<PooledBuffer<D>, Error> {
        may_wait()?;
        self.stream.synchronize()?;
        self.pieces.iter_mut().for_each(|piece| drop(piece.pinned.take()));
        Ok(self.to.take().expect("it is there until this is dropped"))
    }
}

impl<D: Device> Drop for Upload<D> {
    fn drop(&mut self) {
        let pieces = self.pieces.iter_mut().filter_map(|piece| piece.pinned.take());
        for buffer in pieces.chain(self.to.take()) {
            // On a stream that has failed nothing is copied any more, and the buffer is dropped
            // with the error.
            let _ = buffer.release_after(&self.stream);
        }
    }
}
