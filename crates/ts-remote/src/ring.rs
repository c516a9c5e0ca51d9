// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring in shared memory that carries payloads. One end writes to it, and the other reads from
//! it.

#[cfg_attr(unix, path = "ring/shared.rs")]
#[cfg_attr(windows, path = "ring/absent.rs")]
mod ends;

pub(crate) use ends::{RingReader, RingWriter};

/// The shortest payload that goes through the ring, in bytes. Shorter payloads go through the
/// socket.
pub(crate) const MIN_PAYLOAD: usize = 64 << 10;
