// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ts_pool::{Budget, HostPool};

use crate::backend::BackendOptions;
use crate::measure::{Workload, measure};
use crate::provider::{Availability, BackendProvider};
use crate::{Error, Registry, Source, sys};

/// How a storage device is kept busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Largest single read, in bytes.
    pub request_bytes: usize,
    /// Reads in flight at once.
    pub in_flight: usize,
}

impl Default for Tuning {
    /// 4 MiB, eight of them: what no device we know is slow with.
    fn default() -> Self {
        Self { request_bytes: 4 << 20, in_flight: BackendOptions::default().in_flight }
    }
}

/// The speed of one way to keep a device busy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trial {
    /// The way.
    pub tuning: Tuning,
    /// The best that was measured: what disturbs a measurement only makes it slower.
    pub gib_per_s: f64,
}

/// Finds out how to keep the devices of file systems busy, and remembers it.
///
/// Request sizes of 1 to 8 MiB and 2 to 16 requests in flight are tried by direct reads of the very
/// file that is to be read, which leave the page cache alone. The default stays unless another way
/// is more than 5% faster; then, of all that come within 5% of the best, the one with the fewest
/// bytes in flight is taken. That takes less than two seconds, once for each file system. A device
/// too slow for all of them in that time has the default.
#[derive(Debug, Clone)]
pub struct Tuner {
    directory: Option<PathBuf>,
    measures: bool,
}

const SIZES: [usize; 4] = [1 << 20, 2 << 20, 4 << 20, 8 << 20];
const DEPTHS: [usize; 4] = [2, 4, 8, 16];
/// Largest memory used to measure.
const MEMORY: usize = 128 << 20;
/// Files smaller than this say little about their device, and are read sooner than that were known.
const SMALLEST_FILE: u64 = 256 << 20;
const TRIAL: Duration = Duration::from_millis(40);
const LIMIT: Duration = Duration::from_millis(1700);
const WITHIN: f64 = 0.95;
/// How long one read may take before the device is one that tells nothing in time.
const PATIENCE: Duration = Duration::from_millis(500);

impl Default for Tuner {
    /// Measures, and remembers in the user's cache directory: `tensorstream/io` in
    /// `$XDG_CACHE_HOME` or `~/.cache`.
    fn default() -> Self {
        let variable =
            |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let caches = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
        Self {
            directory: caches.map(|caches| caches.join("tensorstream").join("io")),
            measures: true,
        }
    }
}

impl Tuner {
    /// Measures nothing and looks nowhere: [`tuning`](Self::tuning) is always the default.
    pub fn off() -> Self {
        Self { directory: None, measures: false }
    }

    /// Measures, and remembers in this directory, which need not be there yet; `None` to forget.
    pub fn remembering_in(directory: Option<PathBuf>) -> Self {
        Self { directory, measures: true }
    }

    /// How to read `source`: as remembered, or measured now within memory reserved from `budget`,
    /// or the default where there is nothing to measure (objects, small files, file systems without
    /// direct I/O), or it cannot be.
    ///
    /// What is remembered is one small file for each file system, by the number that it gives
    /// itself (which may be that of its device); that it cannot be written is no error. `interrupt`
    /// is asked at least every 20 ms.
    ///
    /// # Errors
    /// [`Error::Interrupted`]. Blocks for up to two seconds.
    pub fn tuning(
        &self,
        source: &Arc<Source>,
        budget: &Budget,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Tuning, Error> {
        if !self.measures || source.len() < SMALLEST_FILE || source.direct_alignment().is_err() {
            return Ok(Tuning::default());
        }
        let note =
            self.directory.as_ref().zip(source.file_system()).map(|(dir, name)| dir.join(name));
        if let Some(known) = note.as_deref().and_then(recall) {
            return Ok(known);
        }
        let tuning = match self.trials(source, budget, interrupt) {
            Ok(trials) => choose(&trials),
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            // Whatever it is, it is told when what is wanted is read.
            Err(_) => return Ok(Tuning::default()),
        };
        if let Some(note) = note {
            // The next process measures again if this fails.
            let _ = remember(&note, tuning);
        }
        Ok(tuning)
    }

    /// Tries every way that there is memory for, in less than two seconds. Empty when there is
    /// none, or the device is too slow for that: below some 300 MB/s.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; what reading the file brings, [`Error::TimedOut`] after half a
    /// second for one read.
    pub fn trials(
        &self,
        source: &Arc<Source>,
        budget: &Budget,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Trial>, Error> {
        let began = Instant::now();
        let memory = MEMORY.min(budget.limit_bytes().saturating_sub(budget.used_bytes()));
        if memory < SIZES[0] * DEPTHS[0] {
            return Ok(Vec::new());
        }
        let pool = HostPool::new(budget, memory)?;
        let capacity = pool.stats().capacity_bytes;
        // Pages are taken from the system before any of the trials.
        pool.allocate(capacity)?.fill(0);
        let provider = direct_provider(source)?;
        let cells = SIZES.into_iter().flat_map(|size| DEPTHS.map(|depth| (size, depth)));
        let cells = cells.filter(|(size, depth)| size * depth <= capacity);
        let mut trials: Vec<Trial> = cells
            .map(|(request_bytes, in_flight)| Trial {
                tuning: Tuning { request_bytes, in_flight },
                gib_per_s: 0.0,
            })
            .collect();
        let (mut at, mut bytes_per_s) = (0, f64::INFINITY);
        for round in 0.. {
            // All of them once, and then again and again those that may be the best.
            let best = trials.iter().map(|trial| trial.gib_per_s).fold(0.0, f64::max);
            let promising = |trial: &&mut Trial| round == 0 || trial.gib_per_s >= 0.85 * best;
            for trial in trials.iter_mut().filter(promising) {
                let Tuning { request_bytes, in_flight } = trial.tuning;
                // What has begun when the time of a trial is over is waited for.
                let drain = (request_bytes * in_flight) as f64 / bytes_per_s;
                let drain = Duration::try_from_secs_f64(drain).unwrap_or(LIMIT);
                if began.elapsed() + TRIAL + drain > LIMIT {
                    return Ok(if round == 0 { Vec::new() } else { trials });
                }
                let workload = Workload {
                    ranges: vec![(at, source.len() - at), (0, at)],
                    request_bytes,
                    options: BackendOptions {
                        in_flight,
                        timeout: PATIENCE,
                        ..BackendOptions::default()
                    },
                    limit: Some(TRIAL),
                };
                let measured = measure(provider.as_ref(), source, &workload, &pool, interrupt)?;
                trial.gib_per_s = trial.gib_per_s.max(measured.gib_per_s());
                bytes_per_s = measured.bytes as f64 / measured.wall.as_secs_f64();
                // Elsewhere in the file each time: the device has a memory of its own.
                at = (at + measured.bytes.next_multiple_of(1 << 20) + (64 << 20)) % source.len();
                at -= at % (1 << 20);
            }
        }
        unreachable!("rounds end with the time")
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

/// Of the ways that are as good as the best the default, or else the one with the fewest bytes in
/// flight.
fn choose(trials: &[Trial]) -> Tuning {
    let best = trials.iter().map(|trial| trial.gib_per_s).fold(0.0, f64::max);
    let good =
        trials.iter().filter(|trial| trial.gib_per_s >= WITHIN * best).map(|trial| trial.tuning);
    good.min_by_key(|t| (*t != Tuning::default(), t.request_bytes * t.in_flight, t.in_flight))
        .unwrap_or_default()
}

fn recall(note: &Path) -> Option<Tuning> {
    let text = fs::read_to_string(note).ok()?;
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))?;
        line.parse::<usize>().ok()
    };
    let tuning = Tuning { request_bytes: value("request_bytes")?, in_flight: value("in_flight")? };
    // Anybody may have written there.
    let sane = SIZES.contains(&tuning.request_bytes) && DEPTHS.contains(&tuning.in_flight);
    sane.then_some(tuning)
}

fn remember(note: &Path, tuning: Tuning) -> std::io::Result<()> {
    let Some(directory) = note.parent() else { return Ok(()) };
    fs::create_dir_all(directory)?;
    let unfinished = note.with_extension(format!("{}.partial", std::process::id()));
    let mut file = fs::File::create(&unfinished)?;
    writeln!(
        file,
        "# Measured by tensorstream, for one file system; remove it to have it measured again."
    )?;
    writeln!(file, "request_bytes = {}\nin_flight = {}", tuning.request_bytes, tuning.in_flight)?;
    fs::rename(unfinished, note)
}

impl Source {
    /// A name for the file system that it lies on; `None` where there is none.
    fn file_system(&self) -> Option<String> {
        sys::file_system(self.file()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(mib: usize, in_flight: usize, gib_per_s: f64) -> Trial {
        Trial { tuning: Tuning { request_bytes: mib << 20, in_flight }, gib_per_s }
    }

    #[test]
    fn the_default_stays_unless_it_is_slow_and_then_the_fewest_bytes_in_flight_win() {
        let trials = [trial(1, 2, 0.9), trial(2, 8, 1.93), trial(4, 4, 1.95), trial(8, 16, 2.0)];
        assert_eq!(choose(&trials), trials[2].tuning);
        assert_eq!(
            choose(&[trial(1, 2, 2.0), trial(4, 8, 1.91), trial(8, 16, 2.0)]),
            Tuning::default()
        );
        assert_eq!(
            choose(&[trial(1, 2, 2.0), trial(4, 8, 1.89), trial(8, 16, 2.0)]),
            trial(1, 2, 2.0).tuning
        );
        assert_eq!(choose(&[]), Tuning::default());
    }

    #[test]
    fn a_budget_that_is_too_small_to_measure_in_is_no_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let source = Source::open(file.path()).unwrap();
        let trials = Tuner::remembering_in(None).trials(&source, &Budget::new(1000), &mut || false);
        assert!(trials.unwrap().is_empty());
    }

    #[test]
    fn what_is_remembered_is_recalled_and_nonsense_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let note = dir.path().join("deep/down/ext4-1234");
        let tuning = Tuning { request_bytes: 2 << 20, in_flight: 16 };
        remember(&note, tuning).unwrap();
        assert_eq!(recall(&note), Some(tuning));
        for text in
            ["", "request_bytes = 5\nin_flight = 8", "request_bytes = 4194304", "in_flight = -1"]
        {
            fs::write(&note, text).unwrap();
            assert_eq!(recall(&note), None, "{text:?}");
        }
    }
}
