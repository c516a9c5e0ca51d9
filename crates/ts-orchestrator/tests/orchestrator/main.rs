// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of engines on the host. They are one program, so that the engine is compiled once.
#![allow(clippy::unwrap_used)] // a failing test panics

#[path = "../testing/mod.rs"]
mod testing;

mod engine;
mod faults;
mod model;
mod read_bytes;
mod routed;
mod sharing;
mod small_units;
mod tables;
mod times;
mod waiting;
