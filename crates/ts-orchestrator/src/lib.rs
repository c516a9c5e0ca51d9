// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams the weights of a model that does not fit in memory, under a hard memory budget.
//!
//! A [`Unit`] is a set of tensors that are used together, usually one layer. The planner
//! ([`plan()`]) decides which units stay in memory and which are streamed. An [`Engine`] carries
//! the plan out: it reads units ahead of the computation and returns a [`Lease`] for each use.
//! Tensors of a lease stay valid as long as they are referenced.
//!
//! [`Model`] does all this for the layers of a checkpoint, by name, in ten lines.
//!
//! This crate does not depend on PyTorch. It runs no computation and does not map tensors to
//! modules.
//!
//! ```
//! use ts_orchestrator::ts_format::{CatalogReader, FileId};
//! use ts_orchestrator::ts_io::Source;
//! use ts_orchestrator::{Engine, EngineConfig, Phase, Unit, UnitId, UnitTensor};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("model.safetensors");
//! # let header = br#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
//! # let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
//! # bytes.extend_from_slice(header);
//! # bytes.extend_from_slice(&[1, 2, 3, 4]);
//! # std::fs::write(&path, bytes)?;
//! # let mut reader = CatalogReader::single("model.safetensors");
//! # let file = std::fs::read(&path)?;
//! # while let Some(n) = reader.need() {
//! #     reader.feed(&file[n.offset as usize..(n.offset + n.len) as usize], file.len() as u64)?;
//! # }
//! # let catalog = reader.finish()?;
//! let entry = catalog.require("w")?.entry();
//! let tensor = UnitTensor::new(&catalog, "w", entry, Phase::Mapped);
//! let units = vec![Unit::new("layer", vec![tensor])];
//! let config = EngineConfig::with_budget(1 << 20);
//! let engine = Engine::new(units, vec![Source::open(&path)?], config)?;
//!
//! let pass = engine.begin_pass();
//! let lease = engine.acquire(Some(pass), UnitId(0))?;
//! let tensor = lease.tensor(0);
//! drop(lease); // the unit may be evicted now, but `tensor` keeps its bytes
//! assert_eq!(&tensor[..], [1, 2, 3, 4]);
//! engine.end_pass(pass);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Invariants
//! - The memory of a unit (its slot) is reused only after the last tensor in it is dropped. Tensors
//!   may be dropped on any thread, even after the engine.
//! - All memory for weights is reserved when the engine is created: slots, bounce buffers, decoders
//!   and staging memory. [`EngineConfig::budget_bytes`] lists the memory that the budget covers.
//! - If the budget is too small, creating the engine fails before the first read.
//! - A call that needs memory which no thread can free returns an error instead of blocking
//!   forever.
//!
//! # Features
//! `cuda` (off by default): enables engines on NVIDIA GPUs.
#![deny(unsafe_code)]

mod config;
mod context;
mod device_streams;
mod encoding;
mod engine;
mod error;
mod event;
mod expectation;
pub mod files;
mod foreign;
mod freed_memory;
#[allow(unsafe_code)]
mod gpu_reads;
mod host_bytes;
mod image;
mod joint;
mod kept_image;
mod layout;
mod lease;
mod model;
mod not_a_checkpoint;
mod pass;
mod pass_kinds;
mod plan;
mod planner;
mod populate;
mod prepared;
mod requests;
mod row_cache;
mod sharing;
mod sizing;
mod slot_pool;
#[allow(unsafe_code)]
mod split_decoder;
mod state;
mod stats;
mod table;
mod trace;
mod unit;
mod unit_load;
mod unit_memory;
mod unit_set;
mod upload;
mod visit_index;
mod worker;

pub use config::{
    Clock, ComputeTimes, Decoding, EngineConfig, Interrupt, Prefetch, Routing, Verify,
    never_interrupt,
};
pub use engine::Engine;
pub use error::{Error, ErrorKind};
pub use expectation::Expectation;
pub use lease::{Lease, TensorBytes};
pub use model::{Bytes, Model, ModelBuilder, ModelTensor, ModelUnit, Pass};
pub use pass::PassId;
pub use plan::{
    Bottleneck, CurvePoint, NeverFits, OtherPass, Plan, PlanRequest, Rates, Residency, UnitDemand,
};
pub use planner::{plan, predict, smallest_budget};
pub use sharing::page_group;
pub use sizing::Requirement;
pub use stats::{EngineStats, PassTimes, RoutedStats, TableStats, UnitStats};
pub use table::{Table, TableId};
pub use trace::{Trace, TraceEvent, TraceKind};
/// The `ts-format` crate, which defines codecs.
pub use ts_format;
/// The `ts-io` crate, which defines sources and backends. It exports `ts-pool`, and that crate
/// `ts-streams`.
pub use ts_io;
pub use unit::{Access, PHASE_ALIGN, Phase, RangeDigest, Unit, UnitId, UnitTensor};
