// SPDX-License-Identifier: MIT OR Apache-2.0
//! The events that the loader thread handles.

use std::ops::Range;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use ts_format::Chunk;
use ts_io::Completion;
use ts_pool::{Buffer, DeviceBuffer, SharedBuffer};
use ts_streams::Device;

use crate::kept_image::KeptImage;
use crate::unit::UnitId;

/// An event for the loader thread.
#[derive(Debug)]
pub(crate) enum Event<D: Device> {
    /// A read of the backend ended.
    Read(Completion),
    /// A worker copied or decoded bytes into a part of a slot.
    PartFilled {
        token: u64,
        target: Buffer,
        /// The part of the compressed unit in memory that was filled too.
        kept: Option<Buffer>,
        damage: Option<DamagedChunk>,
        /// The length of the decoded chunk in bytes; `None` for a copy.
        decoded: Option<usize>,
        work: Work,
    },
    /// A worker compared a unit with its checksums.
    Checked {
        load: u32,
        slot: Buffer,
        mismatch: Option<ChecksumMismatch>,
        work: Work,
    },
    /// A worker estimated how long a unit is when it is encoded.
    Estimated {
        load: u32,
        slot: Buffer,
        /// The memory it needs then, in bytes.
        needed: usize,
        /// The number of bytes that were encoded for this.
        raw: u64,
        work: Work,
    },
    /// A worker encoded a piece of a unit.
    Encoded {
        load: u32,
        /// The number of bytes before encoding.
        raw: u64,
        work: Work,
    },
    /// A future waits for a change.
    Polled,
    JobPanicked(PanickedJob),
    /// The copy of a unit to its device was submitted.
    Uploaded(UploadResult<D>),
    /// The copy of a unit to its device has ended.
    Copied(CopyResult),
    /// A lease was dropped on a thread that must not take the engine's lock.
    Released {
        unit: UnitId,
        user: ThreadId,
        used_ns: Option<u64>,
    },
    /// The memory of a slot may have returned to the pool.
    Freed,
    Stop,
}

/// When a worker worked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    began: Instant,
    ended: Instant,
}

impl Work {
    /// Returns the work that began then and ends now.
    pub(crate) fn since(began: Instant) -> Self {
        Self { began, ended: Instant::now() }
    }

    pub(crate) fn took_ns(self) -> u64 {
        (self.ended - self.began).as_nanos() as u64
    }

    /// Returns the beginning and the end by the engine's clock, which shows `now_ns` now.
    pub(crate) fn span_ns(self, now_ns: u64) -> (u64, u64) {
        let end_ns = now_ns.saturating_sub(self.ended.elapsed().as_nanos() as u64);
        (end_ns.saturating_sub(self.took_ns()), end_ns)
    }
}

/// A range of a tensor that does not match its checksum.
#[derive(Debug)]
pub(crate) struct ChecksumMismatch {
    /// The index of the tensor in its unit.
    pub(crate) tensor: usize,
    /// The range that does not match, in bytes from the beginning of the tensor.
    pub(crate) range: Range<usize>,
}

/// A compressed chunk that does not match its checksum or cannot be decoded.
#[derive(Debug)]
pub(crate) struct DamagedChunk {
    pub(crate) chunk: Chunk,
    /// The end of a sentence about the bytes, such as `do not match their checksum`.
    pub(crate) what: String,
}

/// A job that panicked. The panic dropped the buffers of the job.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PanickedJob {
    /// `Job::FillPart` with this token.
    FillPart(u64),
    /// A job with the slot of this load.
    Slot(u32),
    /// `Job::Encode` of this load.
    Encode(u32),
}

/// The copy of a unit to its device, which may still be running.
#[derive(Debug)]
pub(crate) struct UploadResult<D: Device> {
    pub(crate) load: u32,
    pub(crate) slot: DeviceBuffer<D>,
    /// The bytes on the host, if they are to be kept for later loads.
    pub(crate) kept: Option<SharedBuffer>,
    /// The unit as it is on storage, if it is to be kept so.
    pub(crate) image: Option<KeptImage>,
    /// Whether the device was to decode the unit.
    pub(crate) decodes: bool,
    /// How many bytes were read straight to the device, and how long this took, if the unit was.
    /// Then no [`CopyResult`] follows.
    pub(crate) read: Option<(u64, Duration)>,
    /// The event that is reached when the copy is done, or why it was not submitted.
    pub(crate) result: Result<D::Event, UploadError>,
}

/// Why a unit does not reach its device.
#[derive(Debug)]
pub(crate) enum UploadError {
    /// The device failed.
    Device(ts_pool::Error),
    /// The read failed that begins at this offset in the slot.
    Read(usize, ts_io::Error),
}

impl From<ts_pool::Error> for UploadError {
    fn from(error: ts_pool::Error) -> Self {
        Self::Device(error)
    }
}

/// The end of the copy of a unit to its device.
#[derive(Debug)]
pub(crate) struct CopyResult {
    pub(crate) unit: UnitId,
    /// Whether the device decoded the unit.
    pub(crate) decoded: bool,
    /// The number of copied bytes, and how long this took on the device.
    pub(crate) result: Result<(u64, Duration), ts_pool::Error>,
}
