// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of checkpoints in local files. They are one program, so that generic code is compiled
//! once.
#![allow(clippy::unwrap_used)] // a failing test panics

#[path = "../common/mod.rs"]
mod common;
#[path = "../weights/mod.rs"]
mod weights;

mod append;
mod checkpoint;
mod crash;
mod files;
mod kept_compressed;
mod load;
mod programs;
mod speeds;
