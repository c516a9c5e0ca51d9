// SPDX-License-Identifier: MIT OR Apache-2.0
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ts_pool::{Budget, HostPool};

use crate::backend::BackendOptions;
use crate::cached::{cache_directory, read_cached, write_cached};
use crate::file::FileOrigin;
use crate::measure::{DEFAULT_REQUEST_BYTES, Workload, measure};
use crate::provider::{Availability, BackendProvider};
use crate::{Error, Registry, Source, sys};

/// The request size and the number of reads in flight for a storage device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tuning {
    /// The size of the largest read, in bytes.
    pub request_bytes: usize,
    /// The number of reads in flight at once.
    pub in_flight: usize,
}

impl Default for Tuning {
    /// Returns eight reads of 4 MiB in flight, which was fast on every device measured so far.
    fn default() -> Self {
        let in_flight = BackendOptions::default().in_flight;
        Self { request_bytes: DEFAULT_REQUEST_BYTES, in_flight }
    }
}

impl Tuning {
    /// Sets the size of the largest read, in bytes.
    #[must_use]
    pub fn with_request_bytes(mut self, request_bytes: usize) -> Self {
        self.request_bytes = request_bytes;
        self
    }

    /// Sets the number of reads in flight at once.
    #[must_use]
    pub fn with_in_flight(mut self, in_flight: usize) -> Self {
        self.in_flight = in_flight;
        self
    }
}

/// The bandwidth that one [`Tuning`] reached.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Trial {
    /// The tuning that was measured.
    pub tuning: Tuning,
    /// The highest bandwidth measured, in GiB/s. Disturbances can only make a measurement slower.
    pub gib_per_s: f64,
}

/// Measures which [`Tuning`] suits the device of a file system, and caches the result on disk.
///
/// Tries request sizes of 1 to 8 MiB and 2 to 16 reads in flight, with direct reads of the given
/// file. Direct reads do not change the page cache.
///
/// Chooses the default if it reaches at least 95% of the best bandwidth. Otherwise chooses, among
/// the tunings that reach 95%, the one with the fewest bytes in flight. Prefers those with at least
/// eight reads: while a model computes, threads wait for a processor, and a short queue runs dry.
///
/// This takes about two seconds at most, once for each file system. If the device is too slow to
/// try all tunings in that time, the default is used.
///
/// ```
/// use ts_io::{Source, Tuner, Tuning};
/// use ts_io::ts_pool::Budget;
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("data");
/// std::fs::write(&path, [0; 1000])?;
/// let source = Source::open(&path)?;
/// let tuning = Tuner::default().tuning(&source, &Budget::new(128 << 20), &mut || false)?;
/// // Small files are not measured.
/// assert_eq!(tuning, Tuning::default());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tuner {
    cache_dir: Option<PathBuf>,
    measures: bool,
}

const REQUEST_SIZES: [usize; 4] = [1 << 20, 2 << 20, 4 << 20, 8 << 20];
const DEPTHS: [usize; 4] = [2, 4, 8, 16];
/// The maximum memory that a measurement uses, in bytes.
const MAX_MEMORY: usize = 128 << 20;
/// Files with fewer bytes are not measured, because reading them usually takes less time than
/// measuring.
const MIN_FILE_BYTES: u64 = 256 << 20;
const TRIAL_TIME: Duration = Duration::from_millis(40);
/// The maximum time for all trials together.
const TOTAL_TIME: Duration = Duration::from_millis(1700);
/// Tunings with at least this share of the best bandwidth count as equally good.
const TOLERANCE: f64 = 0.95;
/// Fewer reads in flight are idle too often while the processors are busy with a model. A trial has
/// them for itself, so it does not show this.
const LEAST_DEPTH: usize = 8;
/// The version of [`choose`]. Files of other versions are not used.
const CHOICE: usize = 2;
/// If one read takes longer than this, the device is too slow to measure.
const READ_TIMEOUT: Duration = Duration::from_millis(500);

impl Default for Tuner {
    /// Returns a tuner that caches results in `tensorstream/io` under `$XDG_CACHE_HOME` or
    /// `~/.cache`.
    fn default() -> Self {
        Self { cache_dir: cache_directory().map(|caches| caches.join("io")), measures: true }
    }
}

/// Returns a name for the file system of a local file, made of its type and its id. Returns `None`
/// for other sources, and where the system has no such id.
pub fn file_system(source: &Source) -> Option<String> {
    FileOrigin::of(source).and_then(|file| sys::file_system(file.file()))
}

impl Tuner {
    /// Creates a tuner whose [`tuning`](Self::tuning) always returns the default, without measuring
    /// or reading the cache.
    pub fn disabled() -> Self {
        Self { cache_dir: None, measures: false }
    }

    /// Creates a tuner that caches results in `directory`. The tuner creates the directory if
    /// necessary. With `None`, results are not cached.
    pub fn with_cache_dir(directory: Option<PathBuf>) -> Self {
        Self { cache_dir: directory, measures: true }
    }

    /// Returns the tuning for the file system of `source`, from the cache if possible. Otherwise
    /// measures it with memory from `budget`. Blocks for up to about two seconds.
    ///
    /// Returns the default if a measurement fails, and for sources that are not measured: sources
    /// other than local files, files of less than 256 MiB, and file systems without direct I/O.
    /// Also returns the default, and caches it, if `budget` has too little unused memory or the
    /// device is too slow for a measurement.
    ///
    /// The cache has one small file for each file system, named after the file system's type and
    /// id. Failures to write this file are ignored. During the reads of a measurement, `interrupt`
    /// is called at least every 20 ms. If it returns `true`, the measurement stops.
    ///
    /// # Errors
    /// Returns [`Error::Interrupted`] if `interrupt` returned `true`.
    pub fn tuning(
        &self,
        source: &Arc<Source>,
        budget: &Budget,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Tuning, Error> {
        if !self.measures || source.len() < MIN_FILE_BYTES || source.direct_alignment().is_err() {
            return Ok(Tuning::default());
        }
        let file_system = file_system(source);
        let cache_file = self.cache_dir.as_ref().zip(file_system).map(|(dir, name)| dir.join(name));
        if let Some(known) = cache_file.as_deref().and_then(load_cached) {
            return Ok(known);
        }
        let tuning = match self.trials(source, budget, interrupt) {
            Ok(trials) => choose(&trials),
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            // If the error persists, the caller's next reads report it.
            Err(_) => return Ok(Tuning::default()),
        };
        if let Some(cache_file) = cache_file {
            // If this fails, the next call measures again.
            let _ = store_cached(&cache_file, tuning);
        }
        Ok(tuning)
    }

    /// Measures every tuning that fits into the unused memory of `budget`. Blocks for up to about
    /// two seconds.
    ///
    /// Returns an empty vector if no tuning fits, or if the device is too slow to measure all of
    /// them in that time (below about 300 MB/s).
    ///
    /// # Errors
    /// - [`Error::Interrupted`] if `interrupt` returned `true`.
    /// - [`Error::TimedOut`] if one read takes more than 500 ms.
    /// - [`Error::Memory`] if the memory cannot be allocated.
    /// - The other errors of reading the file.
    pub fn trials(
        &self,
        source: &Arc<Source>,
        budget: &Budget,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Trial>, Error> {
        let began = Instant::now();
        let memory = MAX_MEMORY.min(budget.limit_bytes().saturating_sub(budget.used_bytes()));
        if memory < REQUEST_SIZES[0] * DEPTHS[0] {
            return Ok(Vec::new());
        }
        let pool = HostPool::new(budget, memory)?;
        let capacity = pool.stats().capacity_bytes;
        // Writing to the memory allocates its pages, so that no trial includes this cost.
        pool.allocate(capacity)?.fill(0);
        let provider = direct_provider(source)?;
        let cells = REQUEST_SIZES.into_iter().flat_map(|size| DEPTHS.map(|depth| (size, depth)));
        let cells = cells.filter(|(size, depth)| size * depth <= capacity);
        let mut trials: Vec<Trial> = cells
            .map(|(request_bytes, in_flight)| Trial {
                tuning: Tuning { request_bytes, in_flight },
                gib_per_s: 0.0,
            })
            .collect();
        let (mut at, mut bytes_per_s) = (0, f64::INFINITY);
        for round in 0.. {
            // The first round tries all tunings. Later rounds repeat those that may be the best.
            let best = trials.iter().map(|trial| trial.gib_per_s).fold(0.0, f64::max);
            let promising = |trial: &&mut Trial| round == 0 || trial.gib_per_s >= 0.85 * best;
            for trial in trials.iter_mut().filter(promising) {
                let Tuning { request_bytes, in_flight } = trial.tuning;
                // A trial also waits for the reads that are in flight at its end.
                let drain = (request_bytes * in_flight) as f64 / bytes_per_s;
                let drain = Duration::try_from_secs_f64(drain).unwrap_or(TOTAL_TIME);
                if began.elapsed() + TRIAL_TIME + drain > TOTAL_TIME {
                    return Ok(if round == 0 { Vec::new() } else { trials });
                }
                let workload = Workload {
                    ranges: vec![(at, source.len() - at), (0, at)],
                    request_bytes,
                    options: BackendOptions::default()
                        .with_in_flight(in_flight)
                        .with_timeout(READ_TIMEOUT),
                    limit: Some(TRIAL_TIME),
                };
                let measured = measure(provider.as_ref(), source, &workload, &pool, interrupt)?;
                trial.gib_per_s = trial.gib_per_s.max(measured.gib_per_s());
                bytes_per_s = measured.bytes as f64 / measured.wall.as_secs_f64();
                // Each trial reads another part of the file, because the device has a cache.
                at = (at + measured.bytes.next_multiple_of(1 << 20) + (64 << 20)) % source.len();
                at -= at % (1 << 20);
            }
        }
        unreachable!("the loop returns when the time is over")
    }
}

fn direct_provider(source: &Arc<Source>) -> Result<Arc<dyn BackendProvider>, Error> {
    let registry = Registry::builtin();
    let sources = std::slice::from_ref(source);
    let uring = registry.providers().iter().find(|p| p.name() == "uring");
    match uring.filter(|p| p.probe(sources) == Availability::Available) {
        Some(uring) => Ok(Arc::clone(uring)),
        None => Ok(registry.choose(Some("direct"), sources)?.provider),
    }
}

/// Returns the default if it reaches the share [`TOLERANCE`] of the best bandwidth. Otherwise
/// returns, among the tunings that reach this share, the one with the fewest bytes in flight,
/// preferably with at least [`LEAST_DEPTH`] reads.
fn choose(trials: &[Trial]) -> Tuning {
    let best = trials.iter().map(|trial| trial.gib_per_s).fold(0.0, f64::max);
    let good =
        trials.iter().filter(|trial| trial.gib_per_s >= TOLERANCE * best).map(|trial| trial.tuning);
    let rank = |t: &Tuning| {
        let is_short = t.in_flight < LEAST_DEPTH;
        (*t != Tuning::default(), is_short, t.request_bytes * t.in_flight, t.in_flight)
    };
    good.min_by_key(rank).unwrap_or_default()
}

fn load_cached(path: &Path) -> Option<Tuning> {
    let text = read_cached(path)?;
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))?;
        line.parse::<usize>().ok()
    };
    if value("choice")? != CHOICE {
        return None;
    }
    let tuning = Tuning { request_bytes: value("request_bytes")?, in_flight: value("in_flight")? };
    // The file may have been damaged or edited.
    let is_valid =
        REQUEST_SIZES.contains(&tuning.request_bytes) && DEPTHS.contains(&tuning.in_flight);
    is_valid.then_some(tuning)
}

fn store_cached(path: &Path, tuning: Tuning) -> std::io::Result<()> {
    let Tuning { request_bytes, in_flight } = tuning;
    let text = format!(
        "# Measurement by tensorstream for one file system. Remove this file to measure again.\n\
         choice = {CHOICE}\nrequest_bytes = {request_bytes}\nin_flight = {in_flight}\n"
    );
    write_cached(path, &text)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn trial(mib: usize, in_flight: usize, gib_per_s: f64) -> Trial {
        Trial { tuning: Tuning { request_bytes: mib << 20, in_flight }, gib_per_s }
    }

    #[test]
    fn a_slow_default_is_replaced_by_the_fewest_bytes_in_flight() {
        let trials = [trial(1, 2, 0.9), trial(2, 8, 1.93), trial(4, 4, 1.95), trial(8, 16, 2.0)];
        assert_eq!(choose(&trials), trials[1].tuning);
        assert_eq!(
            choose(&[trial(1, 2, 2.0), trial(4, 8, 1.91), trial(8, 16, 2.0)]),
            Tuning::default()
        );
        assert_eq!(
            choose(&[trial(1, 2, 2.0), trial(4, 8, 1.89), trial(8, 16, 2.0), trial(1, 16, 1.99)]),
            trial(1, 16, 1.99).tuning
        );
        // Short queues are chosen only if all others are slow.
        assert_eq!(
            choose(&[trial(2, 2, 2.0), trial(1, 2, 1.95), trial(4, 8, 1.5)]),
            trial(1, 2, 1.95).tuning
        );
        assert_eq!(choose(&[]), Tuning::default());
    }

    #[test]
    fn a_budget_too_small_to_measure_is_not_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let source = Source::open(file.path()).unwrap();
        let trials = Tuner::with_cache_dir(None).trials(&source, &Budget::new(1000), &mut || false);
        assert!(trials.unwrap().is_empty());
    }

    #[test]
    fn only_valid_cache_files_are_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/down/ext4-1234");
        let tuning = Tuning { request_bytes: 2 << 20, in_flight: 16 };
        store_cached(&path, tuning).unwrap();
        assert_eq!(load_cached(&path), Some(tuning));
        for text in
            ["", "request_bytes = 5\nin_flight = 8", "request_bytes = 4194304", "in_flight = -1"]
        {
            fs::write(&path, format!("choice = {CHOICE}\n{text}")).unwrap();
            assert_eq!(load_cached(&path), None, "{text:?}");
        }
        fs::write(&path, "request_bytes = 2097152\nin_flight = 16").unwrap();
        assert_eq!(load_cached(&path), None, "an older choice");
    }
}
