// SPDX-License-Identifier: MIT OR Apache-2.0

use std::ops::Range;

use ts_streams::StreamId;

/// The class of an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No memory is free now. The request may succeed after other memory is freed.
    Full,
    /// The request exceeds the size of the pool, or what is left of the budget.
    NeverFits,
    /// The operating system or a device reported an error.
    System,
    /// The request was invalid.
    Misuse,
}

/// An error of a pool, a buffer or an allocation log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The pool has no free block of this size now.
    #[error(
        "out of memory: cannot allocate {requested_bytes} bytes: the largest free block has \
         {largest_free_bytes} bytes ({free_bytes} of the pool's {capacity_bytes} bytes are free)"
    )]
    Full {
        /// Requested size.
        requested_bytes: usize,
        /// Largest contiguous free block.
        largest_free_bytes: usize,
        /// All free bytes.
        free_bytes: usize,
        /// The pool's size.
        capacity_bytes: usize,
    },
    /// The request exceeds the size of the pool, or the limit for one allocation.
    #[error(
        "cannot allocate {requested_bytes} bytes: the limit for one allocation is \
         {capacity_bytes} bytes"
    )]
    NeverFits {
        /// Requested size.
        requested_bytes: usize,
        /// The largest allocation that can succeed.
        capacity_bytes: usize,
    },
    /// The reservation would exceed the budget.
    #[error(
        "cannot reserve {requested_bytes} bytes: {used_bytes} bytes are already reserved{}",
        of_budget(*limit_bytes)
    )]
    OverBudget {
        /// Requested size.
        requested_bytes: usize,
        /// Bytes that are already reserved.
        used_bytes: usize,
        /// The budget.
        limit_bytes: usize,
    },
    /// The device has no more memory, or the pool has reached its limit.
    #[error(
        "out of memory on {device}: cannot allocate {requested_bytes} bytes: the pool holds \
         {capacity_bytes} bytes{}, {in_use_bytes} in use, {pending_bytes} freed but still used by \
         other streams; largest free block {largest_free_bytes}{}",
        at_most(*limit_bytes), by_stream(free_bytes)
    )]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// Requested size.
        requested_bytes: usize,
        /// Bytes that the pool has allocated from the device.
        capacity_bytes: usize,
        /// The most that the pool may allocate from the device; [`usize::MAX`] if unlimited.
        limit_bytes: usize,
        /// Bytes in live blocks.
        in_use_bytes: usize,
        /// Largest contiguous free block.
        largest_free_bytes: usize,
        /// Bytes that are freed but may still be used by other streams.
        pending_bytes: usize,
        /// Free bytes per stream.
        free_bytes: Vec<(StreamId, usize)>,
    },
    /// The source of a copy does not have the length of the buffer.
    #[error(
        "cannot copy {given_bytes} bytes into a buffer of {buffer_bytes} bytes: the lengths must \
         be equal"
    )]
    WrongLength {
        /// Length of the source.
        given_bytes: usize,
        /// Length of the buffer.
        buffer_bytes: usize,
    },
    /// A byte range is not completely inside the buffer.
    #[error(
        "range out of bounds: {len} bytes at offset {offset} are not inside the buffer of \
         {size_bytes} bytes"
    )]
    OutOfRange {
        /// First byte of the range.
        offset: usize,
        /// Length of the range in bytes.
        len: usize,
        /// The buffer's size.
        size_bytes: usize,
    },
    /// The buffer's memory was freed by
    /// [`free_for_stream`](crate::StreamOrderedPool::free_for_stream) and may belong to another
    /// buffer.
    #[error("stale buffer: its memory was freed together with all memory of its stream")]
    Stale,
    /// The requested alignment exceeds the alignment of the pool's blocks.
    #[error(
        "cannot align memory to {align} bytes: the pool aligns blocks to {granule_bytes} bytes; \
         create it with `granule_bytes: {align}` or more"
    )]
    BadAlignment {
        /// Requested alignment.
        align: usize,
        /// Alignment of the pool's blocks.
        granule_bytes: usize,
    },
    /// The pool has served 65,536 streams, which is the maximum.
    #[error("cannot serve another stream: the pool has reached its limit of 65,536 streams")]
    TooManyStreams,
    /// A line of an allocation log cannot be parsed.
    #[error("invalid allocation log: line {line}: {reason}")]
    BadLog {
        /// Line number, counted from 1.
        line: usize,
        /// What is wrong with the line.
        reason: String,
    },
    /// The device reported an error.
    #[error(transparent)]
    Device(#[from] ts_streams::Error),
    /// The operating system could not map the memory.
    #[error("cannot map {bytes} bytes of memory: {source}")]
    Map {
        /// Requested size.
        bytes: usize,
        /// The system's error.
        source: std::io::Error,
    },
}

/// The limit of a pool for an error message; empty if it is unlimited.
fn at_most(limit_bytes: usize) -> String {
    if limit_bytes == usize::MAX { String::new() } else { format!(" of at most {limit_bytes}") }
}

/// The limit of a budget for an error message. An unlimited budget refuses only what overflows.
fn of_budget(limit_bytes: usize) -> String {
    match limit_bytes {
        usize::MAX => " and the total overflows".into(),
        limit_bytes => format!(", and the budget is {limit_bytes} bytes"),
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
    free_bytes.iter().map(|(stream, bytes)| format!(", {bytes} free on stream {stream}")).collect()
}

impl Error {
    /// Returns the class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Full { .. } | Error::OutOfMemory { .. } => ErrorKind::Full,
            Error::WrongLength { .. }
            | Error::OutOfRange { .. }
            | Error::Stale
            | Error::BadAlignment { .. }
            | Error::TooManyStreams
            | Error::BadLog { .. } => ErrorKind::Misuse,
            Error::Device(error) if error.kind() == ts_streams::ErrorKind::Full => ErrorKind::Full,
            Error::Device(_) => ErrorKind::System,
            Error::NeverFits { .. } | Error::OverBudget { .. } => ErrorKind::NeverFits,
            Error::Map { .. } => ErrorKind::System,
        }
    }
}
