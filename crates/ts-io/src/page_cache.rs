// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much of a range the page cache holds, to decide whether to read through it or past it.

use crate::Source;

/// Pages of a range to sample. Asking about all of them would take a twentieth of the time that
/// copying them takes.
const SAMPLES: u64 = 9;

/// What a sample of the pages of a range showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Residency {
    /// No sampled page is in the page cache.
    Cold,
    /// Some are.
    Mixed,
    /// All are.
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

/// Splits `offset..offset + len` into runs that the page cache holds and runs that it does not:
/// whether it does, and the length. Except at the ends, runs are long enough to be worth a separate
/// request.
pub(crate) fn resident_runs(source: &Source, offset: u64, len: usize) -> Vec<(bool, usize)> {
    /// Runs begin and end at multiples of this, which is a multiple of the units of direct I/O and
    /// of the page cache.
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
