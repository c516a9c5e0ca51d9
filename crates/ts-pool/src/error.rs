// SPDX-License-Identifier: MIT OR Apache-2.0

use std::ops::Range;

use ts_streams::StreamId;

/// The category of an [`Error`], which a caller can match on to choose a reaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Too little memory is free now. The request may succeed after other memory is freed.
    Full,
    /// The request exceeds the size of the pool, or the unreserved bytes of the budget.
    NeverFits,
    /// A device does not exist on this computer, or cannot be used. Other memory that is freed
    /// does not change that.
    Unsupported,
    /// The operating system or a device reported an error.
    System,
    /// The request was invalid.
    Misuse,
}

/// An error of a pool, a buffer or an allocation log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The host pool has no free block that is large enough now.
    #[error(
        "cannot allocate {requested_bytes} bytes from the host pool: the largest free block has \
         {largest_free_bytes} bytes, and {free_bytes} of the pool's {capacity_bytes} bytes are \
         free; drop other buffers or create a larger pool"
    )]
    Full {
        /// Requested size in bytes.
        requested_bytes: usize,
        /// Size of the largest contiguous free block in bytes.
        largest_free_bytes: usize,
        /// Number of free bytes in the pool.
        free_bytes: usize,
        /// Size of the pool in bytes.
        capacity_bytes: usize,
    },
    /// The request exceeds the size of the pool, or the limit for one allocation.
    #[error(
        "cannot allocate {requested_bytes} bytes: the limit for one allocation is \
         {capacity_bytes} bytes"
    )]
    NeverFits {
        /// Requested size in bytes.
        requested_bytes: usize,
        /// Size of the largest allocation that can succeed, in bytes.
        capacity_bytes: usize,
    },
    /// A directory cannot be used to share pages between processes.
    #[error("cannot share memory in {}: {source}", path.display())]
    Store {
        /// The directory.
        path: std::path::PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The reservation would exceed the budget.
    #[error(
        "cannot reserve {requested_bytes} bytes: {used_bytes} bytes are already reserved{}",
        of_budget(*limit_bytes)
    )]
    OverBudget {
        /// Requested size in bytes.
        requested_bytes: usize,
        /// Bytes that are already reserved.
        used_bytes: usize,
        /// Limit of the budget in bytes.
        limit_bytes: usize,
    },
    /// The device has no more memory, or the pool has reached its limit of bytes or of 65,536
    /// segments.
    #[error(
        "out of memory on device {device:?}: cannot allocate {requested_bytes} bytes; the largest \
         free block has {largest_free_bytes} bytes; of the pool's {capacity_bytes} bytes{}, \
         {in_use_bytes} are in use, {pending_bytes} are freed but may still be used by other \
         streams{}",
        limit(*limit_bytes), by_stream(free_bytes)
    )]
    OutOfMemory {
        /// Name of the device.
        device: String,
        /// Requested size in bytes.
        requested_bytes: usize,
        /// Bytes that the pool has allocated from the device.
        capacity_bytes: usize,
        /// Maximum number of bytes that the pool may allocate from the device; [`usize::MAX`] if
        /// unlimited.
        limit_bytes: usize,
        /// Bytes in live blocks.
        in_use_bytes: usize,
        /// Size of the largest contiguous free block in bytes.
        largest_free_bytes: usize,
        /// Bytes in freed blocks that other streams may still use.
        pending_bytes: usize,
        /// Free bytes of each stream that owns any.
        free_bytes: Vec<(StreamId, usize)>,
    },
    /// The source of a copy and the buffer differ in length.
    #[error(
        "cannot copy {given_bytes} bytes into a buffer of {buffer_bytes} bytes: the lengths must \
         be equal"
    )]
    WrongLength {
        /// Length of the source in bytes.
        given_bytes: usize,
        /// Length of the buffer in bytes.
        buffer_bytes: usize,
    },
    /// A byte range is not completely inside the buffer.
    #[error(
        "range out of bounds: {len} bytes at offset {offset} extend past the end of the buffer of \
         {size_bytes} bytes"
    )]
    OutOfRange {
        /// Offset of the range in the buffer, in bytes.
        offset: usize,
        /// Length of the range in bytes.
        len: usize,
        /// Size of the buffer in bytes.
        size_bytes: usize,
    },
    /// The buffer's memory was freed by
    /// [`free_for_stream`](crate::StreamOrderedPool::free_for_stream), and may now belong to
    /// another buffer.
    #[error("stale buffer: `free_for_stream` has freed its memory; allocate a new buffer")]
    Stale,
    /// The requested alignment exceeds the alignment of the pool's blocks.
    #[error(
        "cannot align memory to {align} bytes: the pool aligns blocks to {granule_bytes} bytes; \
         create the pool with `granule_bytes` of at least {align}"
    )]
    BadAlignment {
        /// Requested alignment in bytes.
        align: usize,
        /// Alignment of the pool's blocks in bytes.
        granule_bytes: usize,
    },
    /// The pool has served 65,536 streams, which is the maximum.
    #[error(
        "cannot serve another stream: the pool has reached its limit of 65,536 streams; reuse \
         streams or create another pool"
    )]
    TooManyStreams,
    /// A line of an allocation log cannot be parsed.
    #[error("invalid allocation log: line {line}: {reason}")]
    BadLog {
        /// Line number, counted from 1.
        line: usize,
        /// Description of the problem.
        reason: String,
    },
    /// A tensor cannot be imported from, or exported to, a structure of DLPack.
    #[cfg(feature = "dlpack")]
    #[error("invalid DLPack tensor: {what}")]
    DlPack {
        /// The reason.
        what: String,
    },
    /// The device reported an error.
    #[error(transparent)]
    Device(#[from] ts_streams::Error),
    /// Host memory could not be allocated or mapped, or a descriptor does not refer to shared
    /// memory of the expected kind and length.
    #[error("cannot allocate or map {bytes} bytes of memory: {source}")]
    Map {
        /// Requested size in bytes.
        bytes: usize,
        /// The cause.
        source: std::io::Error,
    },
}

/// Formats the limit of a pool for an error message. Returns an empty string for no limit.
fn limit(limit_bytes: usize) -> String {
    if limit_bytes == usize::MAX { String::new() } else { format!(" (limit {limit_bytes})") }
}

/// Formats the limit of a budget for an error message. A reservation from a budget without a limit
/// fails only if the total overflows.
fn of_budget(limit_bytes: usize) -> String {
    match limit_bytes {
        usize::MAX => " and the total overflows".into(),
        limit_bytes => format!(
            ", and the budget is {limit_bytes} bytes; drop other reservations or use a larger \
             budget"
        ),
    }
}

/// Returns the range of `len` bytes at `offset` if it lies inside a buffer of `size_bytes`.
pub(crate) fn range_in(
    size_bytes: usize,
    offset: usize,
    len: usize,
) -> Result<Range<usize>, Error> {
    let end = offset.checked_add(len).filter(|&end| end <= size_bytes);
    end.map(|end| offset..end).ok_or(Error::OutOfRange { offset, len, size_bytes })
}

fn by_stream(free_bytes: &[(StreamId, usize)]) -> String {
    let text = |(stream, bytes): &(_, _)| format!(", {bytes} are free on stream {stream}");
    free_bytes.iter().map(text).collect()
}

impl Error {
    /// Returns the category of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Full { .. } | Error::OutOfMemory { .. } => ErrorKind::Full,
            Error::WrongLength { .. }
            | Error::OutOfRange { .. }
            | Error::Stale
            | Error::BadAlignment { .. }
            | Error::TooManyStreams
            | Error::BadLog { .. } => ErrorKind::Misuse,
            #[cfg(feature = "dlpack")]
            Error::DlPack { .. } => ErrorKind::Misuse,
            Error::Device(error) => match error.kind() {
                ts_streams::ErrorKind::Full => ErrorKind::Full,
                ts_streams::ErrorKind::Unsupported => ErrorKind::Unsupported,
                ts_streams::ErrorKind::Misuse => ErrorKind::Misuse,
                _ => ErrorKind::System,
            },
            Error::NeverFits { .. } | Error::OverBudget { .. } => ErrorKind::NeverFits,
            Error::Map { .. } | Error::Store { .. } => ErrorKind::System,
        }
    }
}
