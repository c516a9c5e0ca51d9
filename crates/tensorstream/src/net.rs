// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoints over a network: `ts://` sources, a server of files, and a client that fetches them.

mod fetch;
mod serve_weights;
pub(crate) mod source;

pub use fetch::{FetchOptions, Fetched, fetch};
pub use serve_weights::{ServeOptions, serve_weights};
