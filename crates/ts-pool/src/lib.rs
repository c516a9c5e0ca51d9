// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory for tensors: one arena, sub-allocated, under an exact budget.
//!
//! A [`HostPool`] maps its whole capacity once (huge pages where the system gives them) and hands out
//! [`Buffer`]s. Metadata lives outside the memory, so the same allocator serves memory the CPU cannot touch.
//! It refuses to know files, tensors or models.
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
//! let shared = whole.freeze();                 // read-only, cloneable; the last clone frees the block
//! assert_eq!((shared[0], shared[4096]), (1, 2));
//! drop(shared);
//! assert_eq!(pool.stats().in_use_bytes, 0);
//! # Ok::<(), ts_pool::Error>(())
//! ```
//!
//! # Invariants
//! - A byte of the arena belongs to at most one live block, and inside a block to at most one [`Buffer`].
//! - A block returns to the pool when its last owner is dropped, on whatever thread, and never before.
//!   That one place ([`Buffer`]'s block) is where a stream's event will be recorded when streams arrive.
//! - [`Budget::used_bytes`] never exceeds [`Budget::limit_bytes`].
//!
//! # Features
//! None.

mod arena;
mod budget;
mod buffer;
mod error;
mod offset;
mod pool;

pub use budget::{Budget, Reservation};
pub use buffer::{Buffer, SharedBuffer};
pub use error::{Error, ErrorKind};
pub use pool::{BLOCK_ALIGN, HostPool, PoolStats};
