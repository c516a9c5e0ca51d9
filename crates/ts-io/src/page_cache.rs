// SPDX-License-Identifier: MIT OR Apache-2.0
//! Determines how much of a range is in the page cache, to choose between buffered and direct
//! reads.

use crate::Source;

/// The number of pages of a range to sample. Querying all pages would take about 5% of the time
/// that copying the range takes.
const SAMPLES: u64 = 9;

/// The share of the sampled pages of a range that is in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Residency {
    /// No sampled page is known to be in the page cache.
    Cold,
    /// Some, but not all, sampled pages are in the page cache.
    Mixed,
    /// All sampled pages are in the page cache.
    Warm,
}

impl Residency {
    /// Samples pages that are evenly spread over `offset..offset + len`.
    pub(crate) fn sample(source: &Source, offset: u64, len: usize) -> Self {
        let last = len.saturating_sub(1) as u64;
        let places = (0..SAMPLES).map(|i| offset.saturating_add(last / (SAMPLES - 1) * i));
        let resident = places.filter(|&place| source.residency(place, 1) == Some(1.0)).count();
        match resident as u64 {
            0 => Residency::Cold,
            SAMPLES => Residency::Warm,
            _ => Residency::Mixed,
        }
    }
}

/// Splits `offset..offset + len` into runs that are in the page cache and runs that are not.
/// Returns for each run whether it is in the page cache, and its length in bytes. Except at the
/// ends, runs are long enough to be worth a separate request.
pub(crate) fn resident_runs(source: &Source, offset: u64, len: usize) -> Vec<(bool, usize)> {
    /// Except at the ends of the range, runs begin and end at multiples of this number of bytes,
    /// which is a multiple of the page size and of the alignment of direct I/O.
    const STRETCH: u64 = 128 << 10;
    let mut runs: Vec<(bool, usize)> = Vec::new();
    let end = offset.saturating_add(len as u64);
    let mut at = offset;
    while at < end {
        let next = (at - at % STRETCH + STRETCH).min(end);
        let warm = source.residency(at, (next - at) as usize) == Some(1.0);
        match runs.last_mut() {
            Some(last) if last.0 == warm => last.1 += (next - at) as usize,
            _ => runs.push((warm, (next - at) as usize)),
        }
        at = next;
    }
    runs
}
