// SPDX-License-Identifier: MIT OR Apache-2.0
//! An empty library, which holds the benchmarks: criterion benchmarks of single parts next to this
//! file, benchmarks of whole programs in `python/`. RESULTS.md lists the measured figures.
