// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of pools. They are one program, so that generic code is compiled once.
#![allow(clippy::unwrap_used)] // a panic fails the test

mod blocks;
mod dlpack;
mod ordered;
mod pool;
mod replay;
