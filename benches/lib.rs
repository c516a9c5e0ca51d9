//! Benchmarks of the parts; see RESULTS.md for the tables of the wholes.
