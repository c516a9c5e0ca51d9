// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operators that run where their tensors are, which is elsewhere: what a client asks, and how that travels.
//!
//! Nothing here knows what an operator does: it has a name, [arguments](Value) and [outputs](Output). A client numbers its storages itself, so
//! that it need not wait to know what a [`Call`] will give. [`Request`]s go in batches, each the body of a message of one stream.

mod request;
mod value;

pub use request::{Call, Output, Request, Requests};
pub use value::{MAX_DEPTH, MAX_DIMS, ScalarType, TensorRef, Value, View};
