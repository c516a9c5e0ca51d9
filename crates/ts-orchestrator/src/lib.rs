// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a model that does not fit: plans which units of weights stay in memory and which are
//! streamed, reads ahead of the computation, and never exceeds its budget.
//!
//! A [`Unit`] is a set of tensors that are used together. [`plan()`] decides, as a pure function,
//! how each is held; an [`Engine`] executes that: [`Engine::begin_pass`], then [`Engine::acquire`]
//! for each unit in turn gives a [`Lease`] whose tensors stay valid for as long as anyone holds
//! them. This crate refuses to know PyTorch: it maps no modules and runs no arithmetic.
//!
//! ```
//! use ts_format::{CatalogReader, FileId};
//! use ts_io::Source;
//! use ts_orchestrator::{Engine, EngineConfig, Phase, Unit, UnitId, UnitTensor, never_interrupt};
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
//! let units = vec![Unit { name: "layer".into(), tensors: vec![tensor] }];
//! let config = EngineConfig::with_budget(1 << 20);
//! let engine = Engine::new(units, vec![Source::open(&path)?], config)?;
//!
//! let pass = engine.begin_pass(never_interrupt())?;
//! let lease = engine.acquire(Some(pass), UnitId(0), never_interrupt())?;
//! let tensor = lease.tensor(0);
//! drop(lease);                        // the unit may go; the bytes may not, while `tensor` lives
//! assert_eq!(&tensor[..], [1, 2, 3, 4]);
//! engine.end_pass(pass);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Invariants
//! - A slot is reused only after the last tensor made from it is gone: memory goes back by
//!   ownership, wherever the last owner is dropped, also after the engine.
//! - Slots, bounce buffers and everything in flight are reserved from one [`ts_pool::Budget`] when
//!   the engine is made; nothing is taken later.
//! - A budget that can never work is refused before the first byte is read.
//! - Every wait ends: in a lease, a typed error, or the caller's interruption.
//!
//! # Features
//! `cuda` (off by default), as that of `ts_streams`: engines on GPUs.
#![forbid(unsafe_code)]

mod design;
mod engine;
mod error;
mod layout;
mod lease;
mod load;
mod pass;
mod plan;
mod populate;
mod prefetch;
mod slot;
mod state;
mod stats;
mod unit;
mod worker;

pub use engine::{Clock, Engine, EngineConfig, Interrupt, Verify, never_interrupt};
pub use error::{Error, ErrorKind};
pub use lease::{Lease, TensorBytes};
pub use pass::PassId;
pub use plan::{
    Bottleneck, NeverFits, Plan, PlanRequest, Rates, Residency, UnitDemand, plan, predict,
    smallest_budget,
};
pub use prefetch::Prefetch;
pub use stats::{EngineStats, UnitStats};
pub use unit::{PHASE_ALIGN, Phase, Unit, UnitId, UnitTensor};
