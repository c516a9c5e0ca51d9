// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens, converts, verifies, loads, streams and serves checkpoints of models whose weights do not
//! fit in memory.
//!
//! This crate is the facade of the workspace. [`Model`] streams the layers of a checkpoint by name.
//! [`Checkpoint`] opens safetensors and `.ts` files, groups their tensors into units, and creates
//! the engine that streams the units. The other crates
//! are re-exported as [`format`](mod@format), [`io`], [`pool`], [`streams`] and [`orchestrator`].
//! With the feature `remote`, `remote` and `exec` are re-exported too.
//!
//! This crate does not run models. It never unpickles data and never changes the values of tensors.
//!
//! # Example
//! ```
//! use tensorstream::format::{Compression, Dtype, TensorMeta};
//! use tensorstream::{
//!     Bytes, Checkpoint, FileWriter, LoadOptions, Model, NewTensor, WriteOptions, convert,
//! };
//!
//! # let directory = tempfile::tempdir()?;
//! # let (source, target) =
//! #     (directory.path().join("model.safetensors"), directory.path().join("model.ts"));
//! // Writes a safetensors file with one tensor.
//! let meta = TensorMeta { dtype: Dtype::F32, shape: vec![2, 3] };
//! let tensors = vec![NewTensor { name: "layer.weight".into(), meta, phase: None }];
//! let metadata = Default::default();
//! let options = WriteOptions::default();
//! let mut writer = FileWriter::create(&source, tensors, metadata, options, &mut || false)?;
//! writer.write(&[0; 24])?;
//! writer.commit()?;
//!
//! // Converts it to a compressed `.ts` file, which has checksums.
//! let options = WriteOptions::default().with_compression(Compression::Auto);
//! convert(&source, &target, options, &mut |_| false)?;
//!
//! // Loads all tensors.
//! let checkpoint = Checkpoint::open(&target)?;
//! let tensors = checkpoint.load(LoadOptions::default(), &mut |_| false)?;
//! assert_eq!((tensors[0].name.as_str(), &tensors[0].bytes[..]), ("layer.weight", &[0; 24][..]));
//!
//! // Streams them instead, within a budget of 1 MiB.
//! let model = Model::open(&target)?.budget(Bytes::mib(1)).build()?;
//! let pass = model.pass()?;
//! for name in model.units() {
//!     let unit = pass.unit(name)?;
//!     assert_eq!(unit.tensor("weight")?.shape(), [2, 3]); // compute with it here
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Invariants
//! - Files appear complete or not at all. Data is written to `NAME.partial`, which is renamed when
//!   everything is on disk.
//! - An append is visible only after [`FileWriter::commit`]. After a power failure, a file has
//!   either its old or its new content.
//! - The result of a conversion does not depend on where it was interrupted and resumed.
//! - Compressed bytes are compared with their checksums before they are decoded, unless
//!   verification is turned off ([`LoadOptions::verify`], `EngineConfig::verify`).
//! - An operation with a `watch` or `interrupt` callback calls it at least every 16 MiB of work and
//!   every 20 ms of waiting. If the callback returns true, the operation returns
//!   [`Error::Interrupted`].
//!
//! # Features
//! | feature | adds |
//! |---|---|
//! | `cli` (default) | the program `tensorstream`, [`cli`] and [`Bar`] |
//! | `object` | checkpoints on object storage and web servers |
//! | `remote` | tensors over a network; checkpoints on other machines, and a server for them |
//! | `tokio` | `remote` with asynchronous connections |
//! | `dlpack` | `remote` with tensors exchanged with other libraries without a copy |
//! | `cuda` | NVIDIA GPUs, through a driver that is loaded if it is installed |
//! | `runtime` | other accelerators, through a library with the functions of CUDA's runtime |
#![forbid(unsafe_code)]

mod atomic;
#[cfg(feature = "cli")]
mod bar;
mod checkpoint;
#[cfg(feature = "cli")]
pub mod cli;
mod compact;
mod convert;
mod damage;
mod diff;
mod encode;
mod error;
mod explain;
mod load;
mod memory;
mod metadata;
#[cfg(feature = "remote")]
mod net;
mod pieces;
mod pressure;
mod progress;
mod read;
mod size;
mod speeds;
mod trace;
mod verify;
mod write;

#[cfg(feature = "cli")]
pub use atomic::remove_unfinished;
#[cfg(feature = "cli")]
pub use bar::Bar;
pub use checkpoint::{Checkpoint, checkpoint_file, checkpoint_source};
pub use compact::{Compacted, compact};
pub use convert::{Converted, convert};
pub use damage::Damage;
pub use diff::{Difference, TensorDifference, diff};
pub use error::Error;
pub use explain::{Explanation, curve_table};
pub use load::{LoadOptions, Loaded, LoadedBytes, kept_bytes, trim};
pub use memory::available_bytes;
pub use pressure::{Governor, PressureMonitor, Resized};
pub use progress::{Progress, Watch};
pub use size::{ParseSizeError, parse_bytes};
pub use speeds::Speeds;
pub use trace::{trace_html, trace_json};
pub use ts_orchestrator::files::NotACheckpoint;
pub use ts_orchestrator::{Bytes, Model, ModelBuilder, ModelTensor, ModelUnit, Pass};
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

/// Compiles and runs the examples in the documentation.
#[cfg(all(doctest, feature = "remote"))]
mod pages {
    #[doc = include_str!("../../../docs/migrating/torsh.md")]
    mod torsh {}
    #[doc = include_str!("../../../docs/migrating/quill.md")]
    mod quill {}
    #[doc = include_str!("../../../docs/wire/rust.md")]
    mod wire {}
    #[doc = include_str!("../../../docs/wire/serve-weights.md")]
    mod serve_weights {}
    #[doc = include_str!("../../../docs/wire/tls.md")]
    mod tls {}
}
