// SPDX-License-Identifier: MIT OR Apache-2.0
use std::time::Duration;

use crate::{DeviceKind, GpuStatus, Race, StreamId};

/// Who is to blame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// This device cannot do it.
    Unsupported,
    /// No memory now; there may be after something else is freed.
    Full,
    /// The caller asked for what makes no sense.
    Misuse,
    /// Work on a stream failed; what depends on it has not run.
    Failed,
    /// It is not ready yet.
    TimedOut,
    /// The operating system or the driver refused.
    System,
}

/// Why a device did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device has no such thing.
    #[error("{device} has no {what}")]
    Unsupported {
        /** The device. */
        device: String,
        /** What it lacks. */
        what: &'static str,
    },
    /// There is no such GPU.
    #[error("no GPU {ordinal}: {status}")]
    NoGpu {
        /** Its number. */
        ordinal: usize,
        /** What there is. */
        status: GpuStatus,
    },
    /// There is no kind of device of this name.
    #[error("no device `{name}`; there are {known}, with a number as in `cuda:0`")]
    UnknownDevice {
        /** What was asked for. */
        name: String,
        /** The kinds there are. */
        known: String,
    },
    /// There is no device of this kind and number here.
    #[error("no device `{device}` here: {reason}")]
    DeviceUnavailable {
        /** What was asked for. */
        device: String,
        /** Why. */
        reason: String,
    },
    /// Something of one kind of device was given to another kind.
    #[error("something of a device of kind {with:?} where it must be of one of kind {of:?}")]
    MixedDevices {
        /** The kind that takes what is its own. */
        of: DeviceKind,
        /** The kind of what was given. */
        with: DeviceKind,
    },
    /// A stream of another device, or of the same one opened separately.
    #[error(
        "stream {stream} belongs to another device: expected a stream of {device}, created from \
         the same handle or a clone of it"
    )]
    ForeignStream {
        /** The stream. */
        stream: StreamId,
        /** The device that it must be of. */
        device: String,
    },
    /// The device has not so much memory left.
    #[error("out of memory: {requested_bytes} bytes wanted of {device}")]
    OutOfMemory {
        /** The device. */
        device: String,
        /** Bytes asked for. */
        requested_bytes: usize,
    },
    /// Two ranges of a copy are of different lengths, or overlap.
    #[error(
        "a copy of {from_bytes} bytes to {to_bytes}{}",
        if *overlap { ", which overlap" } else { "" }
    )]
    BadCopy {
        /** Length of what is copied. */
        from_bytes: usize,
        /** Length of where it goes. */
        to_bytes: usize,
        /** Whether they overlap. */
        overlap: bool,
    },
    /// A function that runs on a stream waited for a stream.
    #[error("a function that runs on a stream must not wait for one: it may be waiting for itself")]
    WaitInHostFn,
    /// Work on a stream failed. What was behind it on the stream, or waited for it on others, has
    /// not run.
    #[error("stream {stream} failed: {what}")]
    Failed {
        /** The stream on which it began. */
        stream: StreamId,
        /** What a panic said, or what went wrong on the device. */
        what: String,
    },
    /// Two accesses to the same memory, at least one of which writes, with nothing that orders
    /// them.
    #[error(transparent)]
    Race(#[from] Race),
    /// A dependency would close a circle.
    #[error("a dependency that closes a circle: {}", path.join(" -> "))]
    Cycle {
        /** The points around it; the last is the first. */
        path: Vec<String>,
    },
    /// A point that is not one of this coordinator's, or no longer.
    #[error("{point} is not a point of this coordinator, or is complete and forgotten")]
    NoSuchPoint {
        /** The point. */
        point: String,
    },
    /// Nothing was ready in time.
    #[error("nothing was ready within {timeout:?}")]
    TimedOut {
        /** How long was waited. */
        timeout: Duration,
    },
    /// It was called off before it began.
    #[error("`{task}` was cancelled")]
    Cancelled {
        /** What was. */
        task: String,
    },
    /// The system gives no thread.
    #[error("cannot start a thread: {reason}")]
    Thread {
        /** The system's reason. */
        reason: String,
    },
    /// The driver answered with an error.
    #[error("{call}: {name} ({code})")]
    Driver {
        /** The call. */
        call: &'static str,
        /** Its answer. */
        code: i32,
        /** What the driver calls that. */
        name: String,
    },
}

impl Error {
    /// The class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Unsupported { .. } | Error::NoGpu { .. } | Error::DeviceUnavailable { .. } => {
                ErrorKind::Unsupported
            }
            Error::OutOfMemory { .. } => ErrorKind::Full,
            Error::UnknownDevice { .. }
            | Error::MixedDevices { .. }
            | Error::ForeignStream { .. }
            | Error::BadCopy { .. }
            | Error::WaitInHostFn
            | Error::Race(_)
            | Error::Cycle { .. }
            | Error::NoSuchPoint { .. } => ErrorKind::Misuse,
            Error::Failed { .. } | Error::Cancelled { .. } => ErrorKind::Failed,
            Error::TimedOut { .. } => ErrorKind::TimedOut,
            Error::Thread { .. } | Error::Driver { .. } => ErrorKind::System,
        }
    }
}
