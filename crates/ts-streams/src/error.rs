// SPDX-License-Identifier: MIT OR Apache-2.0
use std::time::Duration;

use crate::{DeviceKind, GpuStatus, Race, StreamId};

/// The category of an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The device, or this machine, does not support the operation.
    Unsupported,
    /// Not enough memory now. There may be enough after something is freed.
    Full,
    /// The caller made a mistake.
    Misuse,
    /// Work failed, or was not run because work that it depends on failed.
    Failed,
    /// Not ready within the timeout.
    TimedOut,
    /// A call of the operating system or the driver failed.
    System,
}

/// An error of a device or of its streams, events and memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device does not support an operation.
    #[error("{device} does not support {what}")]
    Unsupported {
        /// The device.
        device: String,
        /// The operation or property.
        what: &'static str,
    },
    /// The GPU does not exist or cannot be used.
    #[error("no GPU {ordinal}: {status}")]
    NoGpu {
        /// Index of the GPU, from 0.
        ordinal: usize,
        /// Whether GPUs can be used at all, and how many there are.
        status: GpuStatus,
    },
    /// The device name is not known.
    #[error(
        "unknown device {name:?}: expected one of {known}, with an optional number as in cuda:0"
    )]
    UnknownDevice {
        /// The name.
        name: String,
        /// The known names, separated by commas.
        known: String,
    },
    /// The device does not exist on this machine.
    #[error("device {device:?} is not available: {reason}")]
    DeviceUnavailable {
        /// Name of the device.
        device: String,
        /// Why it is not available.
        reason: String,
    },
    /// Streams, events or memory of different kinds of devices were combined.
    #[error("cannot combine devices of different kinds: expected {expected:?}, got {actual:?}")]
    MixedDevices {
        /// The expected kind.
        expected: DeviceKind,
        /// The kind that was passed.
        actual: DeviceKind,
    },
    /// The stream belongs to another device, or to the same one opened separately.
    #[error(
        "stream {stream} belongs to another device: expected a stream of {device}, created from \
         the same handle or a clone of it"
    )]
    ForeignStream {
        /// The stream.
        stream: StreamId,
        /// The expected device.
        device: String,
    },
    /// The device does not have enough free memory.
    #[error("out of memory: cannot allocate {requested_bytes} bytes on {device}")]
    OutOfMemory {
        /// The device.
        device: String,
        /// Bytes requested.
        requested_bytes: usize,
    },
    /// The two ranges of a copy differ in length or overlap.
    #[error(
        "cannot copy {from_bytes} bytes to {to_bytes} bytes: the ranges {}",
        if *overlap { "overlap" } else { "differ in length" }
    )]
    BadCopy {
        /// Length of the source in bytes.
        from_bytes: usize,
        /// Length of the destination in bytes.
        to_bytes: usize,
        /// Whether the ranges overlap.
        overlap: bool,
    },
    /// A host function tried to block on a stream.
    #[error("a host function must not wait for a stream: it may be waiting for itself")]
    WaitInHostFn,
    /// Work on a stream failed. Later work on the stream, and work on other streams that waits for
    /// it, was not run.
    #[error("stream {stream} failed: {what}")]
    Failed {
        /// The stream on which the failure began.
        stream: StreamId,
        /// The message of a panic, or the fault of the device.
        what: String,
    },
    /// Two conflicting accesses to the same memory are not ordered.
    #[error(transparent)]
    Race(#[from] Race),
    /// The dependency would close a cycle.
    #[error("dependency cycle: {}", path.join(" -> "))]
    Cycle {
        /// The tasks on the cycle. The last is the first again.
        path: Vec<String>,
    },
    /// Submitted work was not complete in time.
    #[error("submitted work is not complete after {timeout:?}")]
    TimedOut {
        /// The timeout. Zero for calls that do not wait.
        timeout: Duration,
    },
    /// The task was not submitted: it was cancelled, or a task that it depends on was not
    /// submitted.
    #[error("task {task:?} was not submitted: it was cancelled, or a dependency was not submitted")]
    Cancelled {
        /// Name of the task.
        task: String,
    },
    /// The system cannot start a thread.
    #[error("cannot start a thread: {reason}")]
    Thread {
        /// The message of the system.
        reason: String,
    },
    /// A call of the CUDA driver failed.
    #[error("{call} failed: {name} ({code})")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// The result code.
        code: i32,
        /// The driver's name of that code.
        name: String,
    },
}

impl Error {
    /// Returns the category of this error.
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
            | Error::Cycle { .. } => ErrorKind::Misuse,
            Error::Failed { .. } | Error::Cancelled { .. } => ErrorKind::Failed,
            Error::TimedOut { .. } => ErrorKind::TimedOut,
            Error::Thread { .. } | Error::Driver { .. } => ErrorKind::System,
        }
    }
}
