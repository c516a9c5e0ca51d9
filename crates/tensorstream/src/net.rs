// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoints over a network: the `ts://` source, the server of weights and the fetcher.

mod fetch;
mod serve_weights;
pub(crate) mod source;

pub use fetch::{FetchOptions, Fetched, fetch};
pub use serve_weights::{ServeOptions, serve_weights};
