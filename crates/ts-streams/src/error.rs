// SPDX-License-Identifier: MIT OR Apache-2.0
use std::time::Duration;

use crate::{DeviceKind, GpuStatus, Race, StreamId};

/// The category of an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The device, or this machine, does not support the operation.
    Unsupported,
    /// There is not enough memory now. There may be enough after other memory is freed.
    Full,
    /// The caller passed an invalid argument or broke a rule of the API.
    Misuse,
    /// Work failed, was cancelled, or was skipped because work that it depends on failed.
    Failed,
    /// Work was not complete within the timeout.
    TimedOut,
    /// A call to the operating system or to the CUDA driver failed.
    System,
}

/// An error of a device or of its streams, events and memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device does not support an operation.
    #[error("device {device:?} does not support {what}")]
    Unsupported {
        /// Name of the device.
        device: String,
        /// The unsupported operation or property.
        what: &'static str,
    },
    /// The GPU does not exist or cannot be used.
    #[error("cannot open GPU {ordinal}: {status}")]
    NoGpu {
        /// Index of the GPU, from 0.
        ordinal: usize,
        /// The status of GPU support, which gives the reason.
        status: GpuStatus,
    },
    /// No provider has the name, or the number after the colon is not valid.
    #[error(
        "unknown device {name:?}: expected one of {known}, with an optional number as in cuda:0"
    )]
    UnknownDevice {
        /// The name that no provider has, or the device name whose number is not valid.
        name: String,
        /// Names of the registered providers, separated by commas.
        known: String,
    },
    /// The device does not exist on this machine or cannot be used.
    #[error("device {device:?} is not available: {reason}")]
    DeviceUnavailable {
        /// Name of the device.
        device: String,
        /// The reason why the device is not available.
        reason: String,
    },
    /// Streams, events or memory of different kinds of devices were combined.
    #[error("cannot combine devices of different kinds: expected {expected:?}, got {actual:?}")]
    MixedDevices {
        /// The kind of the device, stream or event on which the method was called.
        expected: DeviceKind,
        /// The kind of the argument.
        actual: DeviceKind,
    },
    /// The stream belongs to another device, or to a separately opened handle of the same device.
    #[error(
        "cannot use stream {stream}: expected a stream created from the coordinator's handle to \
         device {device:?}, or from a clone of that handle"
    )]
    ForeignStream {
        /// The stream that the caller passed.
        stream: StreamId,
        /// Name of the expected device.
        device: String,
    },
    /// The device does not have enough free memory.
    #[error("out of memory: cannot allocate {requested_bytes} bytes on device {device:?}")]
    OutOfMemory {
        /// Name of the device.
        device: String,
        /// Size of the requested allocation in bytes.
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
    /// A host function, or a destructor that a stream ran, tried to block until work is done.
    #[error(
        "cannot wait inside a host function, or inside a destructor that a stream runs: the \
         awaited work may be queued after it; wait on another thread"
    )]
    WaitInHostFn,
    /// Work on a stream failed. Later work on the stream is skipped, and so is work on other
    /// streams that waits for the failed work.
    #[error("stream {stream} failed: {what}")]
    Failed {
        /// The stream whose own work failed.
        stream: StreamId,
        /// The message of a panic, or a description of the fault.
        what: String,
    },
    /// Two conflicting accesses to the same memory are not ordered.
    #[error(transparent)]
    Race(#[from] Race),
    /// The dependency would close a cycle.
    #[error(
        "cannot add the dependency: each task of this cycle would wait for the previous one: {}",
        path.join(" -> ")
    )]
    Cycle {
        /// Names of the tasks on the cycle: each task waits for the previous one. The last name
        /// repeats the first.
        path: Vec<String>,
    },
    /// Submitted work was not complete within the timeout.
    #[error("{}", not_complete(*timeout))]
    TimedOut {
        /// The timeout. Zero for [`Event::elapsed_since`](crate::Event::elapsed_since), which does
        /// not wait.
        timeout: Duration,
    },
    /// The task was not submitted: its execution was cancelled, or one of its dependencies was not
    /// submitted or failed while it submitted work.
    #[error(
        "task {task:?} was not submitted: the execution was cancelled, or a dependency failed or \
         was not submitted"
    )]
    Cancelled {
        /// Name of the task.
        task: String,
    },
    /// The operating system could not start a thread.
    #[error("cannot start a thread: {reason}")]
    Thread {
        /// The error message of the operating system.
        reason: String,
    },
    /// A call to the driver of a device failed.
    #[error("driver call {call} failed: {name} (code {code})")]
    Driver {
        /// Name of the driver function, for example `cuMemcpyAsync`. For a `RuntimeDevice`, without
        /// the prefix.
        call: &'static str,
        /// The result code.
        code: i32,
        /// Name of the result code, for example `CUDA_ERROR_INVALID_VALUE`.
        name: String,
    },
}

fn not_complete(timeout: Duration) -> String {
    if timeout.is_zero() {
        "submitted work is not complete yet, or an event was never recorded".into()
    } else {
        format!("submitted work is not complete after {timeout:?}")
    }
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
