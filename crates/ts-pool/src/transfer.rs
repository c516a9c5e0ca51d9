// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies between host memory and device buffers.

use std::ops::Range;
use std::time::Duration;

use ts_streams::{Device, Event, MemoryKind, MemoryRange, Stream, check_may_block};

use crate::error::range_in;
use crate::ordered::CopyGuard;
use crate::{DeviceBuffer, Error, PinnedMemoryPool, PooledBuffer, SharedBuffer};

impl<D: Device> DeviceBuffer<D> {
    /// Copies host bytes into the buffer, starting at byte `offset`.
    ///
    /// The copy runs on the stream that the buffer was allocated for, after all work submitted to
    /// it. Blocks until the copy is done.
    ///
    /// # Errors
    /// - [`Error::OutOfRange`]: the bytes are not completely inside the buffer.
    /// - [`Error::Stale`]: [`free_for_stream`](crate::StreamOrderedPool::free_for_stream) has freed
    ///   the memory.
    /// - [`Error::Device`]: the stream has failed, or a host function on a stream made the call.
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

    /// Copies host bytes into the buffer, starting at byte `offset`. Does not block, unless the
    /// driver waits for the copy because `from` is not pinned.
    ///
    /// The copy runs on the stream that the buffer was allocated for, after all work submitted to
    /// it. Other streams must wait for [`PendingWrite::done`] before they use the bytes.
    ///
    /// # Errors
    /// The same as [`write`](Self::write). Then the caller gets `from` back.
    pub fn begin_write(
        &mut self,
        offset: usize,
        from: SharedBuffer,
    ) -> Result<PendingWrite<D>, (Error, SharedBuffer)> {
        let part = match range_in(self.len(), offset, from.len()) {
            Ok(part) => part,
            Err(error) => return Err((error, from)),
        };
        let source = MemoryRange::new(from.as_ptr().cast_mut(), from.len());
        // SAFETY: the copy reads the source, which the result owns until then, and writes to this
        // buffer only.
        unsafe {
            self.begin_write_with(vec![from], |stream, range| {
                stream.copy(range.slice(part), source).map_err(Error::from)
            })
        }
        .map_err(|(error, mut sources)| (error, sources.swap_remove(0)))
    }

    /// Starts work that writes to this buffer: `submit` gets the stream that the buffer was
    /// allocated for, and the address range of the buffer. Does not wait for the work. Other
    /// streams must wait for [`PendingWrite::done`] before they use the bytes.
    ///
    /// The result keeps `sources` until the work is done.
    ///
    /// # Errors
    /// [`Error::Stale`] as for [`write`](Self::write), and the errors of `submit`. Then the caller
    /// gets `sources` back.
    ///
    /// # Safety
    /// The work must run on the stream, or before the end of work that `submit` submits to the
    /// stream. It must meet the requirements of [`Stream::copy`]: it may read what the result
    /// keeps, and write to this buffer. If `submit` fails, the work that it has submitted to other
    /// streams must have ended.
    pub unsafe fn begin_write_with<E: From<Error>>(
        &mut self,
        sources: Vec<SharedBuffer>,
        submit: impl FnOnce(&D::Stream, MemoryRange) -> Result<(), E>,
    ) -> Result<PendingWrite<D>, (E, Vec<SharedBuffer>)> {
        let begun = || {
            let event = || self.device().create_event().map_err(Error::from);
            let (started, done) = (event()?, event()?);
            let record = |stream: &D::Stream, event| stream.record(event).map_err(Error::from);
            let guard = self.begin_transfer(|stream, range| {
                record(stream, &started)?;
                let submitted = submit(stream, range).and_then(|()| Ok(record(stream, &done)?));
                // If this fails, work may still run, so the sources must not be freed.
                if let Err(error) = submitted {
                    let _ = stream.synchronize();
                    return Err(error);
                }
                Ok(())
            })?;
            Ok((started, done, guard))
        };
        match begun() {
            Ok((started, done, guard)) => {
                Ok(PendingWrite { started, done, sources: Some(sources), _guard: guard })
            }
            Err(error) => Err((error, sources)),
        }
    }

    /// Fills `bytes` with bytes of the buffer, starting at byte `offset`. Blocks like
    /// [`write`](Self::write).
    ///
    /// If another stream writes to the buffer, the caller must first wait for that work.
    ///
    /// # Errors
    /// The same as [`write`](Self::write).
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let (part, to) = (self.range_for_copy(offset, bytes.len())?, MemoryRange::of(bytes));
        self.transfer(|stream, range| {
            // SAFETY: as in `write`, except that the copy writes to `bytes`, which is borrowed
            // mutably.
            unsafe { stream.copy(to, range.slice(part)) }
        })
    }

    /// Overwrites this buffer with the contents of `from`. Blocks until the copy is done.
    ///
    /// The copy runs on this buffer's stream, after all work submitted to the streams of both
    /// buffers. If another stream writes to `from`, the caller must first wait for that work. A
    /// copy between buffers of different pools goes through host memory.
    ///
    /// # Errors
    /// The same as [`write`](Self::write), and [`Error::Device`] if the lengths differ.
    pub fn copy_from(&mut self, from: &Self) -> Result<(), Error> {
        check_may_block()?;
        let copied = self.transfer_with(from, |stream, to, from| {
            // SAFETY: both ranges are valid until `transfer_with` returns, which waits for the
            // copy. `transfer_with` orders the copy after the work on the streams of both buffers,
            // and the caller orders it after work on other streams.
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

    /// Checks that a byte range is inside the buffer, and that this thread may wait for streams.
    ///
    /// Both checks must come before the copy is submitted. Afterwards the caller must wait for the
    /// copy, so it cannot return early.
    fn range_for_copy(&self, offset: usize, len: usize) -> Result<Range<usize>, Error> {
        let range = range_in(self.len(), offset, len)?;
        check_may_block()?;
        Ok(range)
    }
}

/// A copy of host memory into a [`DeviceBuffer`] that may still be running, from
/// [`DeviceBuffer::begin_write`], or other work that writes to it. Dropping it waits for the work.
#[derive(Debug)]
pub struct PendingWrite<D: Device> {
    started: D::Event,
    done: D::Event,
    /// `None` after the wait.
    sources: Option<Vec<SharedBuffer>>,
    _guard: CopyGuard<D>,
}

impl<D: Device> PendingWrite<D> {
    /// Returns the event that is reached when the copy is done.
    pub fn done(&self) -> &D::Event {
        &self.done
    }

    /// Blocks until the copy is done. Returns how long it took on the device, and the host memory
    /// that was copied: the first of several.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the copy failed or the call was made in a host function. In a
    /// host function, the host memory is lost.
    pub fn wait(mut self) -> (Result<Duration, Error>, Option<SharedBuffer>) {
        if let Err(error) = check_may_block() {
            return (Err(error.into()), None);
        }
        let ended = self.done.synchronize();
        let took = ended.and_then(|()| self.done.elapsed_since(&self.started));
        let sources = self.sources.take();
        (took.map_err(Error::from), sources.and_then(|sources| sources.into_iter().next()))
    }
}

impl<D: Device> Drop for PendingWrite<D> {
    fn drop(&mut self) {
        let Some(sources) = self.sources.take() else { return };
        match check_may_block() {
            // Even if this fails, the copy has ended.
            Ok(()) => drop(self.done.synchronize()),
            // The copy may be queued after this host function, so nothing can wait for it here.
            Err(_) => std::mem::forget(sources),
        }
    }
}

impl<D: Device> PooledBuffer<D> {
    /// Returns the bytes if the buffer is from a pool of [`MemoryKind::PinnedHost`] or
    /// [`MemoryKind::Host`]. The caller must first wait for streams that write to them.
    pub fn host_bytes(&self) -> Option<&[u8]> {
        let range = self.is_host().then(|| self.range())?;
        // SAFETY: the range is host memory, which the system initialised when it allocated the
        // pages. This value owns the range, and the result borrows this value.
        Some(unsafe { std::slice::from_raw_parts(range.as_ptr(), range.len()) })
    }

    /// Returns the bytes for writing, in the same cases as [`host_bytes`](Self::host_bytes). The
    /// caller must first wait for streams that use them.
    pub fn host_bytes_mut(&mut self) -> Option<&mut [u8]> {
        let range = self.is_host().then(|| self.range())?;
        // SAFETY: the range is valid as in `host_bytes`, and the mutable borrow makes the access
        // exclusive.
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
    /// - [`Error::OutOfRange`]: the bytes are not completely inside the buffer.
    /// - [`Error::Device`]: the stream has failed, or a host function on a stream made the call.
    pub fn write(&mut self, offset: usize, bytes: &[u8], stream: &D::Stream) -> Result<(), Error> {
        let part = range_in(self.range().len(), offset, bytes.len())?;
        check_may_block()?;
        let from = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        // SAFETY: `bytes` is borrowed and only read, and this value owns the buffer. Both stay
        // valid until the `synchronize` below returns.
        unsafe { stream.copy(self.range().slice(part), from) }?;
        Ok(stream.synchronize()?)
    }

    /// Fills `bytes` with bytes of the buffer, starting at byte `offset`. Blocks like
    /// [`write`](Self::write).
    ///
    /// # Errors
    /// The same as [`write`](Self::write).
    pub fn read(&self, offset: usize, bytes: &mut [u8], stream: &D::Stream) -> Result<(), Error> {
        let part = range_in(self.range().len(), offset, bytes.len())?;
        check_may_block()?;
        let from = self.range().slice(part);
        // SAFETY: as in `write`, except that the copy writes to `bytes`, which is borrowed mutably.
        unsafe { stream.copy(MemoryRange::of(bytes), from) }?;
        Ok(stream.synchronize()?)
    }
}

/// Memory of a device that an [`Upload`] fills: a [`PooledBuffer`] or a [`DeviceBuffer`].
pub trait UploadTarget<D: Device>: sealed::Target<D> {}

impl<D: Device, T: sealed::Target<D>> UploadTarget<D> for T {}

mod sealed {
    use super::*;

    pub trait Target<D: Device>: Sized {
        fn byte_len(&self) -> usize;

        /// Releases the memory once the work that was submitted to the stream is done.
        fn release_after(self, stream: &D::Stream);
    }

    impl<D: Device> Target<D> for PooledBuffer<D> {
        fn byte_len(&self) -> usize {
            self.len()
        }

        fn release_after(self, stream: &D::Stream) {
            // The error can be ignored: a failed stream runs no more copies, so the buffer returns
            // to its pool at once.
            let _ = PooledBuffer::release_after(self, stream);
        }
    }

    impl<D: Device> Target<D> for DeviceBuffer<D> {
        fn byte_len(&self) -> usize {
            self.len()
        }

        fn release_after(self, _: &D::Stream) {
            // The copies ran on its own stream, in whose order it is freed.
        }
    }
}

/// Fills memory of a device from the host with double buffering: while one staging buffer is copied
/// to the device, the caller writes to the other.
///
/// If the upload is dropped before [`finish`](Self::finish), its memory and staging buffers return
/// to their pools when the copies in flight are done.
///
/// # Examples
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
pub struct Upload<D: Device, T: UploadTarget<D> = PooledBuffer<D>> {
    target: Option<T>,
    range: MemoryRange,
    /// Keeps the memory of a [`DeviceBuffer`] from being freed.
    guard: Option<CopyGuard<D>>,
    stream: D::Stream,
    staging: [StagingBuffer<D>; 2],
    /// Index of the staging buffer that is being written.
    current: usize,
    /// Bytes written to the current staging buffer.
    filled: usize,
    /// Bytes for which a copy to the block was submitted. The `filled` bytes follow them.
    submitted: usize,
}

#[derive(Debug)]
struct StagingBuffer<D: Device> {
    pinned: Option<PooledBuffer<D>>,
    /// An event that completes when the most recent copy from this buffer is done.
    copied: D::Event,
}

impl<D: Device> StagingBuffer<D> {
    fn range(&self) -> MemoryRange {
        self.pinned.as_ref().expect("only `finish` and `drop` take the staging buffer").range()
    }
}

impl<D: Device> Upload<D> {
    /// Starts an upload to the block `to`, with copies on `stream`.
    ///
    /// Acquires two staging buffers of `piece_bytes` bytes each from `pinned`. The caller must
    /// first wait for other streams that use the block.
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
        let range = to.range();
        Self::start(to, range, None, pinned, piece_bytes, stream.clone())
    }
}

impl<D: Device> Upload<D, DeviceBuffer<D>> {
    /// Starts an upload to a buffer, with copies on the stream that the buffer was allocated for.
    ///
    /// Acquires two staging buffers like [`new`](Self::new).
    /// [`free_for_stream`](crate::StreamOrderedPool::free_for_stream) does not free the buffer
    /// during the upload.
    ///
    /// # Errors
    /// The same as [`new`](Self::new), and [`Error::Stale`] if the memory was freed.
    pub fn to_buffer(
        to: DeviceBuffer<D>,
        pinned: &PinnedMemoryPool<D>,
        piece_bytes: usize,
    ) -> Result<Self, Error> {
        let mut place = None;
        let guard = to.begin_transfer(|stream, range| {
            place = Some((range, stream.clone()));
            Ok::<(), Error>(())
        })?;
        let (range, stream) = place.expect("`begin_transfer` calls the function");
        Self::start(to, range, Some(guard), pinned, piece_bytes, stream)
    }
}

impl<D: Device, T: UploadTarget<D>> Upload<D, T> {
    fn start(
        to: T,
        range: MemoryRange,
        guard: Option<CopyGuard<D>>,
        pinned: &PinnedMemoryPool<D>,
        piece_bytes: usize,
        stream: D::Stream,
    ) -> Result<Self, Error> {
        let device = pinned.blocks().device();
        let staging = || -> Result<_, Error> {
            let pinned = Some(pinned.acquire(piece_bytes)?);
            Ok(StagingBuffer { pinned, copied: device.create_event()? })
        };
        let staging = [staging()?, staging()?];
        let target = Some(to);
        Ok(Self { target, range, guard, stream, staging, current: 0, filled: 0, submitted: 0 })
    }

    /// Returns the number of bytes to upload: the requested size of the target.
    pub fn byte_len(&self) -> usize {
        self.target.as_ref().map_or(0, sealed::Target::byte_len)
    }

    /// Returns host memory for the next bytes, after those already [`written`](Self::written). The
    /// slice is empty only if `piece_bytes` is 0.
    ///
    /// Blocks while the staging buffer's previous contents are still being copied.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the stream has failed, or if a host function on a stream made
    /// the call.
    pub fn space(&mut self) -> Result<&mut [u8], Error> {
        check_may_block()?;
        let staging = &mut self.staging[self.current];
        if self.filled == 0 {
            staging.copied.synchronize()?;
        }
        let range = staging.range().slice(self.filled..staging.range().len());
        // SAFETY: the range is host memory (`PinnedMemoryPool`) that only this value uses, and that
        // the system initialised when it allocated the pages. The last copy from it is done,
        // because the code above waited for its event before the first byte was written. `written`
        // submits the next copy, and takes `&mut self`, so the returned slice no longer exists
        // then.
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
    /// Panics if `len` exceeds the length of the space, or the rest of the block.
    pub fn written(&mut self, len: usize) -> Result<(), Error> {
        let whole = self.byte_len();
        let (staging, filled) = (&self.staging[self.current], self.filled + len);
        let end = self.submitted + filled;
        assert!(
            filled <= staging.range().len() && end <= whole,
            "cannot report {len} written bytes: {} bytes of the staging buffer and {} bytes of the \
             block remain",
            staging.range().len() - self.filled,
            whole - self.submitted - self.filled
        );
        self.filled = filled;
        if filled < staging.range().len() && end < whole {
            return Ok(());
        }
        let target = self.range;
        // SAFETY: this value owns both buffers, and `finish` and `drop` keep them until the stream
        // has run the copy. `space` returns the staging buffer again only after its event.
        unsafe {
            self.stream.copy(target.slice(self.submitted..end), staging.range().slice(0..filled))
        }?;
        self.stream.record(&staging.copied)?;
        (self.submitted, self.filled, self.current) = (end, 0, 1 - self.current);
        Ok(())
    }

    /// Waits until all submitted copies are done, and returns the block. Blocks.
    ///
    /// If the caller has reported fewer than [`byte_len`](Self::byte_len) bytes, the rest of the
    /// block is undefined. Bytes in a staging buffer that is not full are then not copied.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the stream has failed, or if a host function on a stream made
    /// the call.
    pub fn finish(mut self) -> Result<T, Error> {
        check_may_block()?;
        self.stream.synchronize()?;
        drop(self.guard.take());
        self.staging.iter_mut().for_each(|staging| drop(staging.pinned.take()));
        Ok(self.target.take().expect("only `finish` and `drop` take the block"))
    }
}

impl<D: Device, T: UploadTarget<D>> Drop for Upload<D, T> {
    fn drop(&mut self) {
        let staging = self.staging.iter_mut().filter_map(|staging| staging.pinned.take());
        for buffer in staging {
            sealed::Target::release_after(buffer, &self.stream);
        }
        if let Some(target) = self.target.take() {
            target.release_after(&self.stream);
        }
    }
}
