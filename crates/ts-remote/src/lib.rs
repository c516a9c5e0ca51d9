// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors over a network: the crate that will own the wire.
//!
//! Its turn has not come; nothing in the workspace depends on it yet.
#![forbid(unsafe_code)]
