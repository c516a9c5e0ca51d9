// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies between host memory and device buffers.

use std::ops::Range;

use ts_streams::{Device, Event, MemoryKind, MemoryRange, Stream, check_may_block};

use crate::error::range_in;
use crate::{DeviceBuffer, Error, PinnedMemoryPool, PooledBuffer};

impl<D: Device> DeviceBuffer<D> {
    /// Copies host bytes into the buffer, starting at byte `offset`.
    ///
    /// The copy runs on the stream that the buffer was allocated for, after all work submitted to
    /// it. Blocks until the copy is done.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if the bytes do not fit, [`Error::Stale`] if the memory was
    /// freed with its stream, and [`Error::Device`] if the stream has failed or if called from a
    /// host function on a stream.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        let (part, from) = (
            self.range_for_copy(offset, bytes.len())?,
            MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len()),
        );
        self.transfer(|stream, range| {
            // SAFETY: both ranges are valid until `transfer` returns, which waits for the copy.
            // `bytes` is borrowed and only read. Only this value uses the buffer, and the copy runs
            // on the buffer's own stream, after its other uses.
            unsafe { stream.copy(range.slice(part), from) }
        })
    }

    /// Copies bytes from the buffer to the host, starting at byte `offset`. Blocks like
    /// [`write`](Self::write).
    ///
    /// If another stream writes to the buffer, the caller must first wait for that work.
    ///
    /// # Errors
    /// The same as [`write`](Self::write).
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let (part, to) = (self.range_for_copy(offset, bytes.len())?, MemoryRange::of(bytes));
        self.transfer(|stream, range| {
            // SAFETY: as in `write`, except that `bytes` is borrowed mutably and written to.
            unsafe { stream.copy(to, range.slice(part)) }
        })
    }

    /// Overwrites this buffer with the contents of `from`. Blocks until the copy is done.
    ///
    /// The copy runs on this buffer's stream, after all work submitted to the streams of both
    /// buffers. Between buffers of different pools it goes through host memory.
    ///
    /// # Errors
    /// The same as [`write`](Self::write), and [`Error::Device`] if the lengths differ.
    pub fn copy_from(&mut self, from: &Self) -> Result<(), Error> {
        check_may_block()?;
        let copied = self.transfer_with(from, |stream, to, from| {
            // SAFETY: as in `write`, for both buffers. Work on the stream of `from` is ordered
            // before the copy; its owner orders work on other streams.
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

    /// Checks a byte range, and that this thread may wait for streams. Both must be known before a
    /// copy is submitted, because the caller then has to wait for it.
    fn range_for_copy(&self, offset: usize, len: usize) -> Result<Range<usize>, Error> {
        let range = range_in(self.len(), offset, len)?;
        check_may_block()?;
        Ok(range)
    }
}

impl<D: Device> PooledBuffer<D> {
    /// Returns the bytes if they are host memory: from a [`PinnedMemoryPool`], or from a pool of
    /// [`MemoryKind::Host`]. The caller must first wait for streams that write to them.
    pub fn host_bytes(&self) -> Option<&[u8]> {
        let range = self.is_host().then(|| self.range())?;
        // SAFETY: it is host memory, which the system initialised when it allocated the pages. This
        // value owns it and is borrowed.
        Some(unsafe { std::slice::from_raw_parts(range.as_ptr(), range.len()) })
    }

    /// Returns the bytes for writing if they are host memory: see [`host_bytes`](Self::host_bytes).
    pub fn host_bytes_mut(&mut self) -> Option<&mut [u8]> {
        let range = self.is_host().then(|| self.range())?;
        // SAFETY: as in `host_bytes`; the mutable borrow makes the access exclusive.
        Some(unsafe { std::slice::from_raw_parts_mut(range.as_ptr(), range.len()) })
    }

    fn is_host(&self) -> bool {
        matches!(self.kind(), MemoryKind::PinnedHost | MemoryKind::Host)
    }

    /// Copies host bytes into the buffer, starting at byte `offset`.
    ///
    /// The copy runs on `stream`, after all work submitted to it. Blocks until the copy is done.
    /// The caller must first wait for other streams that use the buffer.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if the bytes do not fit, and [`Error::Device`] if the stream
    /// has failed or if called from a host function on a stream.
    pub fn write(&mut self, offset: usize, bytes: &[u8], stream: &D::Stream) -> Result<(), Error> {
        let part = range_in(self.range().len(), offset, bytes.len())?;
        check_may_block()?;
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: `bytes` is borrowed and only read, and this value owns the buffer. Both stay
        // valid until the `synchronize` below returns.
        unsafe { stream.copy(self.range().slice(part), from) }?;
        Ok(stream.synchronize()?)
    }

    /// Copies bytes from the buffer to the host, starting at byte `offset`. Blocks like
    /// [`write`](Self::write).
    ///
    /// # Errors
    /// The same as [`write`](Self::write).
    pub fn read(&self, offset: usize, bytes: &mut [u8], stream: &D::Stream) -> Result<(), Error> {
        let part = range_in(self.range().len(), offset, bytes.len())?;
        check_may_block()?;
        let from = self.range().slice(part);
        // SAFETY: as in `write`, except that `bytes` is borrowed mutably and written to.
        unsafe { stream.copy(MemoryRange::of(bytes), from) }?;
        Ok(stream.synchronize()?)
    }
}

/// Fills a device block from the host with double buffering: while one staging buffer is copied to
/// the device, the caller writes to the other.
///
/// If it is dropped before [`finish`](Self::finish), all its memory returns to the pools when the
/// copies in flight are done.
///
/// ```
/// use ts_pool::ts_streams::{CpuDevice, Device, StreamPriority};
/// use ts_pool::{BlockPool, PinnedMemoryPool, PoolConfig, Upload};
///
/// let device = CpuDevice::new()?;
/// let stream = device.create_stream(StreamPriority::Normal)?;
/// let blocks = BlockPool::new(device.clone(), PoolConfig::low_memory())?;
/// let pinned = PinnedMemoryPool::new(device, PoolConfig::low_memory())?;
///
/// let mut bytes: &[u8] = &[7; 10_000];
/// let mut upload = Upload::new(blocks.acquire(bytes.len())?, &pinned, 4096, &stream)?;
/// while !bytes.is_empty() {
///     let space = upload.space()?;
///     let len = space.len().min(bytes.len());
///     space[..len].copy_from_slice(&bytes[..len]);
///     upload.written(len)?;
///     bytes = &bytes[len..];
/// }
/// let block = upload.finish()?;
///
/// let mut end = [0; 2];
/// block.read(9998, &mut end, &stream)?;
/// assert_eq!(end, [7, 7]);
/// # Ok::<(), ts_pool::Error>(())
/// ```
#[derive(Debug)]
pub struct Upload<D: Device> {
    target: Option<PooledBuffer<D>>,
    stream: D::Stream,
    staging: [StagingBuffer<D>; 2],
    /// Index of the staging buffer that is being written.
    current: usize,
    /// Bytes written to the current staging buffer.
    filled: usize,
    /// Bytes before them, whose copies are submitted.
    submitted: usize,
}

#[derive(Debug)]
struct StagingBuffer<D: Device> {
    pinned: Option<PooledBuffer<D>>,
    /// Completes with the last copy from this buffer.
    copied: D::Event,
}

impl<D: Device> StagingBuffer<D> {
    fn range(&self) -> MemoryRange {
        self.pinned.as_ref().expect("only `finish` and `drop` take the buffer").range()
    }
}

impl<D: Device> Upload<D> {
    /// Starts an upload to the block `to` with copies on `stream`.
    ///
    /// Acquires two staging buffers of `piece_bytes` each from `pinned`. The caller must first wait
    /// for other streams that use the block.
    ///
    /// # Errors
    /// The same as [`PinnedMemoryPool::acquire`], and [`Error::Device`] if the device cannot create
    /// an event.
    pub fn new(
        to: PooledBuffer<D>,
        pinned: &PinnedMemoryPool<D>,
        piece_bytes: usize,
        stream: &D::Stream,
    ) -> Result<Self, Error> {
        let device = pinned.blocks().device();
        let staging = || -> Result<_, Error> {
            let pinned = Some(pinned.acquire(piece_bytes)?);
            Ok(StagingBuffer { pinned, copied: device.create_event()? })
        };
        let staging = [staging()?, staging()?];
        let (target, stream) = (Some(to), stream.clone());
        Ok(Self { target, stream, staging, current: 0, filled: 0, submitted: 0 })
    }

    /// Returns the length of the target block in bytes.
    pub fn byte_len(&self) -> usize {
        self.target.as_ref().map_or(0, PooledBuffer::len)
    }

    /// Returns host memory for the next bytes, those after all that were
    /// [`written`](Self::written). It is never empty unless `piece_bytes` is 0.
    ///
    /// Blocks while the staging buffer's previous contents are still being copied.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the stream has failed, or if called from a host function on a
    /// stream.
    pub fn space(&mut self) -> Result<&mut [u8], Error> {
        check_may_block()?;
        let staging = &mut self.staging[self.current];
        if self.filled == 0 {
            staging.copied.synchronize()?;
        }
        let range = staging.range().slice(self.filled..staging.range().len());
        // SAFETY: the range is host memory (`PinnedMemoryPool`) that only this value uses, and that
        // the system initialised when it allocated the pages. The last copy from it is done: its
        // event was waited for, and no new copy is submitted before the buffer is full.
        Ok(unsafe { std::slice::from_raw_parts_mut(range.as_ptr(), range.len()) })
    }

    /// Reports that the caller has written the first `len` bytes of [`space`](Self::space).
    ///
    /// Submits a copy to the block when the staging buffer is full or the last byte is written.
    /// Does not wait for the copy.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the stream has failed.
    ///
    /// # Panics
    /// Panics if `len` exceeds the length of that space or the rest of the block.
    pub fn written(&mut self, len: usize) -> Result<(), Error> {
        let whole = self.byte_len();
        let (staging, filled) = (&self.staging[self.current], self.filled + len);
        let end = self.submitted + filled;
        assert!(
            filled <= staging.range().len() && end <= whole,
            "{len} bytes written: the staging buffer or the block has less room"
        );
        self.filled = filled;
        if filled < staging.range().len() && end < whole {
            return Ok(());
        }
        let target = self.target.as_ref().expect("only `finish` and `drop` take the block").range();
        // SAFETY: this value owns both buffers, and `finish` and `drop` keep them until the stream
        // is done. `space` lends the staging buffer again only after the event.
        unsafe {
            self.stream.copy(target.slice(self.submitted..end), staging.range().slice(0..filled))
        }?;
        self.stream.record(&staging.copied)?;
        (self.submitted, self.filled, self.current) = (end, 0, 1 - self.current);
        Ok(())
    }

    /// Waits until all submitted copies are done, and returns the block. Blocks.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the stream has failed, or if called from a host function on a
    /// stream.
    pub fn finish(mut self) -> Result<PooledBuffer<D>, Error> {
        check_may_block()?;
        self.stream.synchronize()?;
        self.staging.iter_mut().for_each(|staging| drop(staging.pinned.take()));
        Ok(self.target.take().expect("only `finish` and `drop` take the block"))
    }
}

impl<D: Device> Drop for Upload<D> {
    fn drop(&mut self) {
        let staging = self.staging.iter_mut().filter_map(|staging| staging.pinned.take());
        for buffer in staging.chain(self.target.take()) {
            // A failed stream runs no more copies; the buffer is dropped together with the error.
            let _ = buffer.release_after(&self.stream);
        }
    }
}
