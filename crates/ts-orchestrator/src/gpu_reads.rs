// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads units from files straight into their slots on a GPU.

use std::sync::Arc;
use std::time::Duration;

use ts_io::{GpuRead, Source};
use ts_pool::{DeviceBuffer, PendingWrite};
use ts_streams::{Device, MemoryRange, Stream};

use crate::event::UploadError;

/// The longest read, in bytes. Linux reads no more than 2 GiB at once.
pub(crate) const LONGEST_READ: usize = 1 << 30;

/// A read of a range of a file into a range of a slot.
#[derive(Debug)]
pub(crate) struct StoredRead {
    pub(crate) source: Arc<Source>,
    pub(crate) offset: u64,
    pub(crate) len: usize,
    pub(crate) slot_offset: usize,
}

/// Reads that may still be running, and where in the slot each begins. The fields are dropped in
/// this order: dropping the write waits for the reads.
#[derive(Debug)]
pub(crate) struct RunningReads<D: Device> {
    write: PendingWrite<D>,
    reads: Vec<(usize, GpuRead)>,
    bytes: u64,
}

impl<D: Device> RunningReads<D> {
    /// Starts to read, after the earlier work on the stream that the slot is allocated for.
    pub(crate) fn begin(
        stored: &[StoredRead],
        slot: &mut DeviceBuffer<D>,
    ) -> Result<Self, UploadError> {
        let mut reads = Vec::with_capacity(stored.len());
        let submit = |stream: &D::Stream, slot: MemoryRange| {
            let mut submitted: Result<(), UploadError> = Ok(());
            let mut submit_all = |stream| {
                submitted = stored.iter().try_for_each(|read| {
                    let StoredRead { source, offset, len, slot_offset } = read;
                    let target = slot.slice(*slot_offset..slot_offset + len).as_ptr();
                    // SAFETY: `submit_foreign` makes the context of the stream current. The target
                    // is a part of the slot. `reads` exists until the stream has done its work,
                    // also after an error, because `begin_write_with` waits for it then.
                    let begun = unsafe { GpuRead::begin(source, *offset, *len, target, stream) };
                    let begun = begun.map_err(|error| UploadError::Read(*slot_offset, error))?;
                    reads.push((*slot_offset, begun));
                    Ok(())
                });
            };
            // SAFETY: the reads write to the slot only, which is valid and used by this stream
            // only.
            let called = unsafe { stream.submit_foreign(&mut submit_all) };
            called.map_err(ts_pool::Error::from)?;
            submitted
        };
        // SAFETY: the work runs on the stream. It reads no memory of the host.
        let begun = unsafe { slot.begin_write_with(Vec::new(), submit) };
        let write = begun.map_err(|(error, _)| error)?;
        let bytes = stored.iter().map(|read| read.len as u64).sum();
        Ok(Self { write, reads, bytes })
    }

    /// Returns the event that is reached when the reads have ended, successfully or not.
    pub(crate) fn done(&self) -> &D::Event {
        self.write.done()
    }

    /// Waits for the reads. Returns how many bytes were read, and how long this took.
    pub(crate) fn wait(self) -> Result<(u64, Duration), UploadError> {
        let Self { write, reads, bytes } = self;
        let took = write.wait().0.map_err(UploadError::Device)?;
        for (slot_offset, read) in reads {
            read.end().map_err(|error| UploadError::Read(slot_offset, error))?;
        }
        Ok((bytes, took))
    }
}
