// SPDX-License-Identifier: MIT OR Apache-2.0

/// Who is to blame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Nothing free now; it may be after something else is freed.
    Full,
    /// Larger than the pool or the budget will ever hold.
    NeverFits,
    /// The operating system refused.
    System,
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
    /// The request exceeds the whole pool.
    #[error("{requested_bytes} bytes wanted, the pool holds {capacity_bytes} in all")]
    NeverFits {
        /** Bytes asked for. */
        requested_bytes: usize,
        /** The pool's size. */
        capacity_bytes: usize,
    },
    /// A reservation would exceed the budget.
    #[error("{requested_bytes} bytes wanted, {used_bytes} of the budget's {limit_bytes} are reserved")]
    OverBudget {
        /** Bytes asked for. */
        requested_bytes: usize,
        /** Bytes reserved. */
        used_bytes: usize,
        /** The budget. */
        limit_bytes: usize,
    },
    /// The system did not map the memory.
    #[error("cannot map an arena of {bytes} bytes: {source}")]
    Map {
        /** Bytes asked for. */
        bytes: usize,
        /** The system's error. */
        source: std::io::Error,
    },
}

impl Error {
    /// The class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Full { .. } => ErrorKind::Full,
            Error::NeverFits { .. } | Error::OverBudget { .. } => ErrorKind::NeverFits,
            Error::Map { .. } => ErrorKind::System,
        }
    }
}
