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
        let (mut reads, mut failed) = (Vec::with_capacity(stored.len()), None);
        let submit = |stream: &D::Stream, slot: MemoryRange| {
            let mut submit_all = |stream| {
                for StoredRead { source, offset, len, slot_offset } in stored {
                    let target = slot.slice(*slot_offset..slot_offset + len).as_ptr();
                    // SAFETY: `submit_foreign` makes the context of the stream current. The target
                    // is a part of the slot. `reads` exists until the stream has done its work,
                    // also after an error, because `begin_write_with` waits for it then.
                    match unsafe { GpuRead::begin(source, *offset, *len, target, stream) } {
                        Ok(read) => reads.push((*slot_offset, read)),
                        Err(error) => return failed = Some((*slot_offset, error)),
                    }
                }
            };
            // SAFETY: the reads write to the slot only, which is valid and used by this stream
            // only.
            unsafe { stream.submit_foreign(&mut submit_all) }?;
            match failed {
                // Only ends the write: the caller gets the error of the read.
                Some(_) => {
                    Err(ts_streams::Error::Unsupported { device: String::new(), what: "the read" })
                }
                None => Ok(()),
            }
        };
        // SAFETY: the work runs on the stream. It reads no memory of the host.
        let begun = unsafe { slot.begin_write_with(Vec::new(), submit) };
        match (begun, failed) {
            (Ok(write), _) => {
                let bytes = stored.iter().map(|read| read.len as u64).sum();
                Ok(Self { write, reads, bytes })
            }
            (Err(_), Some((slot_offset, error))) => Err(UploadError::Read(slot_offset, error)),
            (Err((error, _)), None) => Err(UploadError::Device(error)),
        }
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
