// SPDX-License-Identifier: MIT OR Apache-2.0

use std::ops::Range;

use ts_streams::StreamId;

/// Who is to blame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Nothing free now; it may be after something else is freed.
    Full,
    /// Larger than the pool or the budget will ever hold.
    NeverFits,
    /// The operating system or a device refused.
    System,
    /// The caller asked for what makes no sense.
    Misuse,
}

/// Why memory could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The pool has no free block of this size now.
    #[error(
        "out of memory: {requested_bytes} bytes wanted, largest free block {largest_free_bytes}, \
         {free_bytes} free of {capacity_bytes} in the pool"
    )]
    Full {
        /** Bytes asked for. */
        requested_bytes: usize,
        /** Largest contiguous free block. */
        largest_free_bytes: usize,
        /** All free bytes. */
        free_bytes: usize,
        /** The pool's size. */
        capacity_bytes: usize,
    },
    /// The request exceeds the whole pool, or what one allocation may have.
    #[error("{requested_bytes} bytes wanted, the pool can never give more than {capacity_bytes}")]
    NeverFits {
        /** Bytes asked for. */
        requested_bytes: usize,
        /** The most that the pool gives to one allocation when it is empty. */
        capacity_bytes: usize,
    },
    /// A reservation would exceed the budget.
    #[error("{requested_bytes} bytes wanted, {used_bytes} are reserved{}", of_budget(*limit_bytes))]
    OverBudget {
        /** Bytes asked for. */
        requested_bytes: usize,
        /** Bytes reserved. */
        used_bytes: usize,
        /** The budget. */
        limit_bytes: usize,
    },
    /// A device has no more memory for this pool, or the pool's limit is reached.
    #[error(
        "out of memory on {device}: {requested_bytes} bytes wanted; the pool has \
         {capacity_bytes}{}, {in_use_bytes} in use, {pending_bytes} freed but used by other \
         streams; largest free block {largest_free_bytes}{}",
        at_most(*limit_bytes), by_stream(free_bytes)
    )]
    OutOfMemory {
        /** The device. */
        device: String,
        /** Bytes asked for. */
        requested_bytes: usize,
        /** What the pool has taken from the device. */
        capacity_bytes: usize,
        /** What it may take; [`usize::MAX`] for any amount. */
        limit_bytes: usize,
        /** What is in use of it. */
        in_use_bytes: usize,
        /** Largest contiguous free block. */
        largest_free_bytes: usize,
        /** What is freed and waits for other streams. */
        pending_bytes: usize,
        /** What is free, by stream. */
        free_bytes: Vec<(StreamId, usize)>,
    },
    /// What is to be copied is not as long as where it goes.
    #[error("{given_bytes} bytes for a buffer of {buffer_bytes}")]
    WrongLength {
        /** Length of what was given. */
        given_bytes: usize,
        /** Length of the buffer. */
        buffer_bytes: usize,
    },
    /// Bytes that are not all inside a buffer.
    #[error("{len} bytes at offset {offset} are not inside the buffer of {size_bytes} bytes")]
    OutOfRange {
        /** Where they begin in the buffer. */
        offset: usize,
        /** How many they are. */
        len: usize,
        /** The buffer's size. */
        size_bytes: usize,
    },
    /// The memory was freed for its stream, and may be another's.
    #[error("this memory was freed with all of its stream's")]
    Stale,
    /// Blocks are not aligned so much.
    #[error(
        "memory aligned to {align} bytes from a pool with granules of {granule_bytes}: give it \
         larger ones"
    )]
    BadAlignment {
        /** What was asked for. */
        align: usize,
        /** What blocks are aligned to. */
        granule_bytes: usize,
    },
    /// A pool serves 65,536 streams.
    #[error("this pool has served 65,536 streams and takes no more")]
    TooManyStreams,
    /// A line that no allocation log has.
    #[error("line {line} of the log: {reason}")]
    BadLog {
        /** From 1 on. */
        line: usize,
        /** What is wrong with it. */
        reason: String,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] ts_streams::Error),
    /// The system did not map the memory.
    #[error("cannot map an arena of {bytes} bytes: {source}")]
    Map {
        /** Bytes asked for. */
        bytes: usize,
        /** The system's error. */
        source: std::io::Error,
    },
}

/// The limit of a pool, if it has one.
fn at_most(limit_bytes: usize) -> String {
    if limit_bytes == usize::MAX { String::new() } else { format!(" of at most {limit_bytes}") }
}

/// The same of a budget.
fn of_budget(limit_bytes: usize) -> String {
    match limit_bytes {
        usize::MAX => " and both together are more than can be counted".into(),
        limit_bytes => format!(" of the budget's {limit_bytes}"),
    }
}

/// Where bytes lie in a buffer of this size.
pub(crate) fn range_in(
    size_bytes: usize,
    offset: usize,
    len: usize,
) -> Result<Range<usize>, Error> {
    let end = offset.checked_add(len).filter(|&end| end <= size_bytes);
    end.map(|end| offset..end).ok_or(Error::OutOfRange { offset, len, size_bytes })
}

fn by_stream(free_bytes: &[(StreamId, usize)]) -> String {
    free_bytes.iter().map(|(stream, bytes)| format!(", {bytes} free of stream {stream}")).collect()
}

impl Error {
    /// The class of this error.
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
