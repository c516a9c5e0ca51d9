// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory for tensors: on the host under an exact budget, and of devices in the order of their
//! streams.
//!
//! | | |
//! |---|---|
//! | [`HostPool`] | one mapping of the host, sub-allocated: [`Buffer`]s that can be split and filled by several at once |
//! | [`StreamOrderedPool`] | segments of a device's memory; what a stream frees it may have again at once, others when they have waited for it |
//! | [`BlockPool`], [`PinnedMemoryPool`] | blocks of a few sizes, had and given back without a lock |
//! | [`TensorBuffer`] | bytes on the host or on a GPU, whichever there is |
//! | [`Budget`] | an account of bytes that several of them share |
//! | [`AllocationLog`] | what RMM has logged, done again |
//!
//! Metadata lives outside the memory, so the same allocator serves memory the CPU cannot touch.
//! This crate refuses to know files, tensors or models.
//!
//! ```
//! use ts_pool::{Budget, HostPool};
//!
//! let budget = Budget::new(1 << 20);
//! let pool = HostPool::new(&budget, 1 << 20)?;
//! let mut whole = pool.allocate(8192)?;
//! let mut tail = whole.split_off(4096);        // two owners, one block: read into both at once
//! whole.fill(1);
//! tail.fill(2);
//! whole.unsplit(tail).expect("they were neighbours");
//! // read-only, cloneable; the last clone frees the block
//! let shared = whole.freeze();
//! assert_eq!((shared[0], shared[4096]), (1, 2));
//! drop(shared);
//! assert_eq!(pool.stats().in_use_bytes, 0);
//! # Ok::<(), ts_pool::Error>(())
//! ```
//!
//! # Invariants
//! - A byte of the arena belongs to at most one live block, and inside a block to at most one
//!   [`Buffer`].
//! - A block returns to the pool when its last owner is dropped, on whatever thread, and never
//!   before.
//! - No work of a stream uses memory that a [`StreamOrderedPool`] has given to another, as far as
//!   every use by other streams than its own was [recorded](StreamOrderedAllocator::record_use).
//! - [`Budget::used_bytes`] never exceeds [`Budget::limit_bytes`].
//!
//! # Features
//! `cuda` (off by default), as that of `ts_streams`: [`TensorBuffer`]s go to GPUs where there are
//! some.

mod arena;
mod budget;
mod buffer;
mod classes;
mod error;
mod offset;
mod ordered;
mod pool;
mod replay;
#[cfg(unix)]
mod shared;
mod stack;
mod tensor_buffer;
mod transfer;
#[cfg_attr(not(target_os = "linux"), path = "watch_portable.rs")]
mod watch;

pub use budget::{Budget, Reservation};
pub use buffer::{Buffer, SharedBuffer};
pub use classes::{
    BlockPool, BlockStats, GpuMemoryPool, PinnedMemoryPool, PoolConfig, PooledBuffer,
};
pub use error::{Error, ErrorKind};
pub use ordered::{
    Backing, BlockSnapshot, DeviceBuffer, OrderedOptions, OrderedStats, PoolSnapshot, Priming,
    SegmentSnapshot, StreamOrderedAllocator, StreamOrderedPool,
};
pub use pool::{BLOCK_ALIGN, HostPool, PoolStats};
pub use replay::{AllocationLog, LogEvent, Replay};
#[cfg(unix)]
pub use shared::{SharedMemory, SharedView};
pub use tensor_buffer::TensorBuffer;
pub use transfer::Upload;
/// The devices whose memory this is.
pub use ts_streams;
pub use watch::{Watched, WriteWatch};
