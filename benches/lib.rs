// SPDX-License-Identifier: MIT OR Apache-2.0
//! Nothing but a home for the benchmarks: `parts.rs` for criterion, `python/` for wholes,
//! RESULTS.md for tables.
