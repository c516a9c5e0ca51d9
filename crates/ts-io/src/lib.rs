// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes from a source into memory of `ts-pool`, as fast as the source gives them.
//!
//! A [`Backend`] takes a [`ReadRequest`] that owns its [`Buffer`](ts_pool::Buffer) and gives it
//! back in a [`Completion`] that says how many bytes came, by which [`ReadPath`], and when. This
//! crate refuses to know what the bytes mean: no tensor is named here.
//!
//! ```
//! use std::time::Duration;
//! use ts_io::{BackendOptions, ReadRequest, Registry, Source, completion_queue};
//! use ts_pool::{Budget, HostPool};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("data");
//! std::fs::write(&path, vec![7u8; 10_000])?;
//! let source = Source::open(&path)?;
//! let (sink, queue) = completion_queue();
//! let choice = Registry::builtin().choose(None, std::slice::from_ref(&source))?;
//! let backend = choice.provider.create(&BackendOptions::default(), sink)?;
//!
//! let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20)?;
//! let request = ReadRequest::new(1, source, 0, 10_000, pool.allocate(12_288)?);
//! backend.submit(request).map_err(|rejected| rejected.error)?;
//! let done = queue.recv_timeout(Duration::from_secs(10)).expect("a read of 10 kB ends");
//! assert_eq!(done.result?.bytes(), 10_000);
//! assert!(done.buffers[0][..10_000].iter().all(|&b| b == 7));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | backend | how | chosen |
//! |---|---|---|
//! | `adaptive` | what the page cache holds is copied, the rest comes from `uring` or `direct`; objects from `object` | first |
//! | `uring` | O_DIRECT by io_uring, one thread | |
//! | `direct` | O_DIRECT, a thread for each read in flight | |
//! | `object` | ranged GETs over the network | for objects |
//! | `buffered` | through the page cache | last |
//! | `mmap` | copies from mappings; see also [`View`] | by name |
//! | `gds` | NVIDIA's cuFile; see [`gds_mode`] | by name |
//!
//! [`Registry`] probes and chooses, or takes more; [`Tuner`] finds out request size and depth;
//! [`measure()`] measures; [`DirectReader`] reads for threads that may block, to any memory;
//! [`Writer`] is the way back to the disk; [`conformance`] and [`fault`] are for those who write
//! backends.
//!
//! # Invariants
//! - Every buffer that was submitted comes back, exactly once: in a completion, or with the
//!   rejection. Also when the read fails, is cancelled, or the backend is dropped. After a timeout
//!   it goes back to its pool as soon as the system can no longer write to it.
//! - A completion without an error delivered every required byte, from a file that was before and
//!   after the read the one that was opened (device, inode, length, modification time), or from the
//!   version of an object that was opened (ETag, or else Last-Modified, which is good to a second).
//! - Every read ends: at its timeout at the latest.
//!
//! # Features
//! `object` (off by default): object storage and web servers as sources. O_DIRECT, io_uring and
//! page-cache residency need Linux; elsewhere `buffered` is what there is for files.

mod adaptive;
mod backend;
pub mod conformance;
mod direct;
mod error;
pub mod fault;
mod file;
#[cfg(target_os = "linux")]
mod gds;
mod join;
mod measure;
mod memory;
#[cfg(feature = "object")]
mod object;
mod progress;
mod provider;
mod remote;
mod source;
mod sys;
mod threads;
mod tune;
#[cfg(target_os = "linux")]
mod uring;
#[cfg(target_os = "linux")]
mod view;
mod write;

pub use backend::{
    Backend, BackendOptions, Capabilities, Completion, CompletionSink, ReadPath, ReadRequest,
    Rejected, Transfer, completion_queue, monotonic_ns,
};
pub use direct::DirectReader;
pub use error::{Error, ErrorKind, SharedIoError};
#[cfg(target_os = "linux")]
pub use gds::{GdsMode, gds_mode};
#[cfg(target_os = "linux")]
pub use measure::measure_views;
pub use measure::{Measured, Workload, measure, measure_memcpy};
pub use provider::{Availability, BackendProvider, Choice, Registry};
pub use remote::RemoteSource;
pub use source::{Fingerprint, Source};
pub use tune::{Trial, Tuner, Tuning};
#[cfg(target_os = "linux")]
pub use view::View;
pub use write::Writer;
