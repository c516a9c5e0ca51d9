// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory pools for tensors: host memory under an exact budget, and device memory that is allocated
//! and freed in stream order.
//!
//! - [`HostPool`] sub-allocates one range of host memory. Its [`Buffer`]s can be split, so that
//!   several threads fill one block at once.
//! - [`StreamOrderedPool`] sub-allocates segments of device memory. The stream that freed a block
//!   can reuse it at once. If another stream reuses the block before the first stream is idle, the
//!   pool makes the other stream wait on the device. The calling thread does not wait for streams.
//! - [`BlockPool`] and [`PinnedMemoryPool`] recycle blocks of a few fixed sizes without locks.
//! - [`TensorBuffer`] stores bytes in host memory or on a GPU.
//! - [`Budget`] is a byte limit that several pools share.
//! - `SharedMemory` and `SharedMemoryView` share memory of a fixed size between two processes
//!   (Linux).
//! - [`PageStore`] gives buffers of several processes the same pages (Linux).
//! - [`WriteWatch`] detects writes to buffers that should not change (Linux).
//! - [`AllocationLog`] replays an allocation log of RMM (the RAPIDS Memory Manager) against a pool.
//!
//! The allocators keep their metadata outside the memory that they manage, so they also work for
//! memory that the CPU cannot access. This crate does not depend on files, tensor layouts or
//! models.
//!
//! ```
//! use ts_pool::{Budget, HostPool};
//!
//! let budget = Budget::new(1 << 20);
//! let pool = HostPool::new(&budget, 1 << 20)?;
//! let mut head = pool.allocate(8192)?;
//! let mut tail = head.split_off(4096); // two threads can now fill the two buffers
//! head.fill(1);
//! tail.fill(2);
//! head.unsplit(tail).expect("the parts are adjacent");
//! // The frozen buffer can be cloned. Dropping the last clone frees the block.
//! let shared = head.freeze();
//! assert_eq!((shared[0], shared[4096]), (1, 2));
//! drop(shared);
//! assert_eq!(pool.stats().in_use_bytes, 0);
//! # Ok::<(), ts_pool::Error>(())
//! ```
//!
//! `examples/stream_ordered.rs` shows a [`StreamOrderedPool`] on the CPU device.
//!
//! # For embedders
//! The streaming engine does not use these parts. They are public, tested and documented for
//! programs that embed this crate. Python has some of them in `tensorstream.streams`:
//! [`BlockPool`], [`free_for_stream`](StreamOrderedPool::free_for_stream) and
//! [`trim`](StreamOrderedAllocator::trim).
//!
//! - [`BlockPool`] and [`GpuMemoryPool`] as pools of device memory, with [`Upload`] and
//!   [`PooledBuffer::release_after`]. The type `PooledMemory` of ts-remote can receive tensors into
//!   such a pool. The Python package uses [`PinnedMemoryPool`] without `PooledMemory`.
//! - [`AllocationLog`], [`LogEvent`] and [`Replay`].
//! - Of [`StreamOrderedPool`]: [`Backing::Device`],
//!   [`reserve_segment_in_background`](StreamOrderedPool::reserve_segment_in_background) and
//!   [`PendingSegment`],
//!   [`free_for_stream`](StreamOrderedPool::free_for_stream),
//!   [`trim`](StreamOrderedAllocator::trim), and [`snapshot`](StreamOrderedAllocator::snapshot)
//!   with [`PoolSnapshot`].
//!
//! # Invariants
//! - Each byte of an arena belongs to at most one live block, and each byte of a block to at most
//!   one [`Buffer`].
//! - A block of a [`HostPool`] becomes free exactly when its last owner is dropped, on any thread.
//! - When a [`StreamOrderedPool`] reuses memory, earlier work on the memory runs before later work.
//!   The caller must [record](StreamOrderedAllocator::record_use) each use by a stream other than
//!   the one that the memory was allocated for.
//! - [`Budget::used_bytes`] never exceeds [`Budget::limit_bytes`].
//!
//! # Features
//! `cuda` (off by default): enables CUDA devices in `ts_streams`, so [`TensorBuffer`]s can live on
//! a GPU if the machine has one.
//!
//! `dlpack` (off by default): the module `dlpack`, which exchanges tensors with other libraries
//! without a copy.

mod arena;
mod budget;
mod buffer;
mod classes;
#[cfg(feature = "dlpack")]
pub mod dlpack;
mod error;
mod offset;
mod ordered;
#[cfg_attr(not(target_os = "linux"), path = "page_store_portable.rs")]
mod page_store;
mod pool;
mod population;
mod replay;
#[cfg(target_os = "linux")]
mod send_queue;
#[cfg(unix)]
mod shared;
mod stack;
mod tensor_buffer;
mod transfer;
#[cfg_attr(not(target_os = "linux"), path = "watch_portable.rs")]
mod watch;

pub use arena::BLOCK_ALIGN;
pub use budget::{Budget, Reservation};
pub use buffer::{Buffer, SharedBuffer};
/// The bytes that [`TensorBuffer::cpu`] takes without a copy.
pub use bytes::Bytes;
pub use classes::{
    BlockPool, BlockStats, GpuMemoryPool, PinnedMemoryPool, PoolConfig, PooledBuffer,
};
pub use error::{Error, ErrorKind};
pub use ordered::{
    Backing, BlockSnapshot, DeviceBuffer, OrderedOptions, OrderedStats, PendingSegment,
    PoolSnapshot, SegmentSnapshot, StreamOrderedAllocator, StreamOrderedPool,
};
pub use page_store::{NewPages, PageKey, PageStore};
pub use pool::{HostPool, PoolStats, SetAside};
pub use replay::{AllocationLog, LogEvent, Replay};
#[cfg(target_os = "linux")]
pub use send_queue::send_queue_bytes;
#[cfg(unix)]
pub use shared::{SharedMemory, SharedMemoryView};
pub use tensor_buffer::TensorBuffer;
pub use transfer::{PendingWrite, Upload, UploadTarget};
/// The `ts-streams` crate, which defines the devices and streams that the pools use.
pub use ts_streams;
pub use watch::{WatchedBuffer, WriteWatch};
