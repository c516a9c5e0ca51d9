// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors where the memory is not: the whole workspace under one name.
//!
//! [`Checkpoint`] joins what the parts keep apart: it opens a directory or file of safetensors, and
//! makes units and an engine of it.
//!
//! ```no_run
//! use tensorstream::Checkpoint;
//! use tensorstream::orchestrator::{EngineConfig, UnitId, never_interrupt};
//!
//! let checkpoint = Checkpoint::open("path/to/checkpoint")?;
//! let units = checkpoint.units_by_module();
//! let engine = checkpoint.engine(units, EngineConfig::with_budget(600 << 20))?;
//! let pass = engine.begin_pass(never_interrupt())?;
//! for unit in 0..engine.unit_count() as u32 {
//!     let lease = engine.acquire(Some(pass), UnitId(unit), never_interrupt())?;
//!     let _bytes = lease.tensor(0); // compute with it
//! }
//! engine.end_pass(pass);
//! # Ok::<(), tensorstream::Error>(())
//! ```
//!
//! # Features
//! `cli`, on by default: the program `tensorstream` and [`Bar`]. `object`: checkpoints on object
//! storage and web servers. `remote`: tensors over a network, checkpoints on other machines, and
//! their server; `tokio`: the same where it is awaited. `cuda`: GPUs of NVIDIA, by a driver that is
//! loaded when there is one.
#![forbid(unsafe_code)]

mod atomic;
#[cfg(feature = "cli")]
mod bar;
mod checkpoint;
#[cfg(feature = "cli")]
pub mod cli;
mod compact;
mod convert;
mod diff;
mod encode;
mod error;
mod explain;
mod foreign;
mod load;
mod memory;
#[cfg(feature = "remote")]
mod net;
mod pieces;
mod read;
mod size;
mod verify;
mod write;

#[cfg(feature = "cli")]
pub use bar::Bar;
pub use checkpoint::Checkpoint;
pub use compact::{Compacted, compact};
pub use convert::{Converted, Progress, Watch, convert};
pub use diff::{Difference, TensorDifference, diff};
pub use error::Error;
pub use explain::Explanation;
pub use load::{LoadOptions, Loaded};
pub use memory::available_bytes;
pub use read::Damage;
pub use size::{BadSize, parse_bytes};
pub use verify::{Verified, verify};
pub use write::{FileWriter, Format, NewTensor, WriteOptions};
pub use {
    ts_format as format, ts_io as io, ts_orchestrator as orchestrator, ts_pool as pool,
    ts_streams as streams,
};

#[cfg(feature = "remote")]
pub use net::{FetchOptions, Fetched, ServeOptions, fetch, serve_weights};
#[cfg(feature = "remote")]
pub use {ts_exec as exec, ts_remote as remote};

/// The examples of pages of the documentation, compiled and run.
#[cfg(all(doctest, feature = "remote"))]
mod migrating {
    #[doc = include_str!("../../../docs/migrating/torsh.md")]
    mod torsh {}
    #[doc = include_str!("../../../docs/migrating/quill.md")]
    mod quill {}
}
