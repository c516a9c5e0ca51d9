// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads byte ranges from files and object storage into memory of `ts-pool`, at the speed of the
//! device.
//!
//! A [`Backend`] takes a [`ReadRequest`], which owns the [`Buffer`](ts_pool::Buffer) to fill, and
//! returns the buffer in a [`Completion`], with the number of bytes, the [`ReadPath`] they took,
//! and the time. This crate does not interpret the bytes; it knows nothing about tensors.
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
//! let done = queue.recv_timeout(Duration::from_secs(10)).expect("the read completes");
//! assert_eq!(done.result?.bytes(), 10_000);
//! assert!(done.buffers[0][..10_000].iter().all(|&b| b == 7));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `examples/read_file.rs` reads a whole file, with several requests in flight.
//!
//! # Backends
//! | backend | how it reads |
//! |---|---|
//! | `adaptive` | picks `buffered`, `uring`, `direct`, `object` or `remote` per part of a read |
//! | `uring` | O_DIRECT through io_uring, on one thread |
//! | `direct` | O_DIRECT, one thread for each read in flight |
//! | `object` | ranged GETs over the network |
//! | `remote` | through a [`RemoteSource`] |
//! | `buffered` | through the page cache |
//! | `mmap` | copies from mappings; see also [`MappedView`] |
//! | `gds` | NVIDIA's cuFile; see [`gds_mode`] |
//!
//! [`Registry`] chooses `adaptive`, or `buffered` for files without direct I/O. The others are used
//! by name, and it accepts further ones.
//!
//! [`Tuner`] measures the best request size and number of reads in flight, and [`measure()`] any
//! other workload. [`DirectReader`] reads on the calling thread, into any memory. [`Writer`] writes
//! files. [`conformance`] and [`fault`] test backends.
//!
//! # Guarantees
//! - Every submitted buffer is returned exactly once, in a completion or with the rejection, even
//!   if the read fails, is cancelled, or the backend is dropped. After a timeout, it returns to its
//!   pool as soon as the system can no longer write to it.
//! - A successful completion delivered all required bytes, and at the end of the read the file was
//!   still the one that was opened (device, inode, length, modification and change time). Objects
//!   are compared by their ETag, or else by Last-Modified, which has a resolution of one second.
//! - Every read ends, at the latest at its timeout.
//!
//! # Features and platforms
//! The feature `object` (off by default) adds object storage and web servers. O_DIRECT, io_uring
//! and page cache residency need Linux. On other systems, files are read with `buffered`.

mod adaptive;
mod backend;
pub mod conformance;
mod direct;
mod error;
pub mod fault;
mod file;
mod file_backends;
#[cfg(target_os = "linux")]
mod gds;
mod hook;
mod in_memory;
mod join;
mod measure;
#[cfg(feature = "object")]
mod object;
mod open;
mod page_cache;
mod progress;
mod provider;
mod registry;
mod remote;
mod scatter;
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
pub use measure::measure_mapped_views;
pub use measure::{Measurement, Workload, measure, measure_memcpy};
pub use provider::{Availability, BackendProvider};
pub use registry::{Choice, Registry};
pub use remote::RemoteSource;
pub use source::{Fingerprint, Source};
pub use tune::{Trial, Tuner, Tuning};
#[cfg(target_os = "linux")]
pub use view::MappedView;
pub use write::Writer;
