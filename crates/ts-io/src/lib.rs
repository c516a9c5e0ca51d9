// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads byte ranges from files and object storage into buffers of `ts-pool`, at the speed of the
//! device.
//!
//! A [`Backend`] takes a [`ReadRequest`], which owns each [`Buffer`](ts_pool::Buffer) to fill. Its
//! [`Completion`] returns the buffers, and reports the number of bytes, the [`ReadPath`] of the
//! bytes, and the start and end times. This crate does not interpret the bytes.
//!
//! ```
//! use std::time::Duration;
//! use ts_io::{BackendOptions, ReadRequest, Registry, Source, completion_queue};
//! use ts_io::ts_pool::{Budget, HostPool};
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
//! | `adaptive` | picks `buffered`, `uring`, `direct`, `object` or `remote` for parts of a read |
//! | `uring` | O_DIRECT through io_uring, on one thread |
//! | `direct` | O_DIRECT, one thread for each read in flight |
//! | `object` | ranged GETs over the network |
//! | `remote` | through a [`RemoteSource`] |
//! | `buffered` | through the page cache |
//! | `mmap` | copies from memory mappings; see also [`MappedView`] |
//! | `gds` | through NVIDIA's cuFile library; see [`gds_mode`] |
//!
//! By default, [`Registry`] chooses `adaptive`, or `buffered` if a file does not support direct
//! I/O. Other backends must be requested by name. [`Registry::register`] adds a backend.
//!
//! The other types and modules:
//! - [`Tuner`] finds the best request size and number of reads in flight for a device.
//! - [`measure()`] measures the bandwidth of any workload.
//! - [`DirectReader`] reads on the calling thread, into any memory.
//! - [`Relay`] and [`RelayClient`] pass sources to a process that can neither open files nor
//!   connect sockets.
//! - [`Writer`] writes files.
//! - [`conformance`] and [`fault`] test backends.
//!
//! # Guarantees
//! - Every submitted buffer is returned exactly once, in a completion or in a [`Rejected`]. This
//!   also holds if the read fails or is cancelled, or if the backend is dropped. There are two
//!   exceptions: if the read times out, or if a library panics during the read, the buffers may
//!   return directly to their pool, as soon as the system can no longer write to them.
//! - After a successful completion, all required bytes are in the buffers. At the end of the read,
//!   the file was still the one that was opened: same device, inode, length and modification time.
//!   The change time is also the same, unless the link count, mode, owner or group has changed.
//!   Objects are compared by length and ETag. Without an ETag, they are compared by length and
//!   Last-Modified, which has a resolution of one second.
//! - Every read of a backend completes, at the latest when its timeout expires. A part that
//!   `adaptive` reads with a second backend gets its timeout again.
//!
//! # Features and platforms
//! The feature `object` (off by default) adds object storage and web servers. O_DIRECT, io_uring
//! and [`Source::residency`] need Linux. On other systems, files are read with `buffered`.

mod adaptive;
mod backend;
mod cached;
pub mod conformance;
mod descriptors;
mod direct;
mod error;
pub mod fault;
mod file;
mod file_backends;
mod file_mapping;
#[cfg(target_os = "linux")]
mod gds;
mod gpu_read;
mod hook;
mod in_memory;
mod join;
mod measure;
#[cfg(feature = "object")]
mod object;
mod open;
mod page_cache;
mod passwords;
mod positional;
mod progress;
mod provider;
mod registry;
#[cfg(unix)]
mod relay;
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
pub use cached::{cache_directory, read_cached, write_cached};
pub use direct::DirectReader;
pub use error::{Error, ErrorKind, SharedIoError};
pub use file::FileHandles;
pub use file_mapping::FileMapping;
#[cfg(target_os = "linux")]
pub use gds::{GdsMode, gds_mode};
pub use gpu_read::GpuRead;
#[cfg(target_os = "linux")]
pub use measure::measure_mapped_views;
pub use measure::{Measurement, Workload, measure, measure_memcpy};
pub use passwords::hide_passwords;
pub use positional::{read_exact_at, write_all_at};
pub use provider::{Availability, BackendProvider};
pub use registry::{Choice, Registry};
#[cfg(unix)]
pub use relay::{Relay, RelayClient};
pub use remote::RemoteSource;
pub use source::{Fingerprint, Source};
/// The `ts-pool` crate, which defines the buffers of reads.
pub use ts_pool;
pub use tune::{Trial, Tuner, Tuning, file_system};
#[cfg(target_os = "linux")]
pub use view::MappedView;
pub use write::Writer;
