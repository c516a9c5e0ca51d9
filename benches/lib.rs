// SPDX-License-Identifier: MIT OR Apache-2.0
//! An empty library that cargo requires for the benchmarks. The Rust benchmarks are next to this
//! file. Benchmarks of whole programs are in `python/`. RESULTS.md links to the figures.
