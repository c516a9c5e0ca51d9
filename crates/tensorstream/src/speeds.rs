// SPDX-License-Identifier: MIT OR Apache-2.0
//! Remembers the speeds that an engine measured, so that later plans predict from them.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use ts_io::ReadPath;
use ts_orchestrator::{ComputeTimes, EngineConfig, EngineStats, Unit, UnitId};

use crate::Checkpoint;

/// Less reading or decoding is too short to measure a speed, in bytes.
const LEAST_BYTES: u64 = 64 << 20;
/// The same, in nanoseconds.
const LEAST_NS: u64 = 20_000_000;
/// So many passes show how long computations take.
const LEAST_PASSES: usize = 4;

/// The speeds that engines measured on this machine.
///
/// There is one small file for each model, file system and number of processors, with the speeds of
/// reading and decoding and the durations of computations, and one for each file system, with the
/// speeds that other models start with. Files that
/// cannot be read or written are ignored, because they only affect predictions.
///
/// # Examples
/// ```no_run
/// use tensorstream::orchestrator::EngineConfig;
/// use tensorstream::{Checkpoint, Speeds};
///
/// let (checkpoint, speeds) = (Checkpoint::open("model.safetensors")?, Speeds::default());
/// let units = checkpoint.units_by_module();
/// let config = speeds.recall(&checkpoint, &units, EngineConfig::with_budget(1 << 30));
/// let engine = checkpoint.engine(units, config)?;
/// // After some passes:
/// speeds.remember(&checkpoint, &engine.stats());
/// # Ok::<(), tensorstream::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Speeds {
    directory: Option<PathBuf>,
}

impl Default for Speeds {
    /// Returns the speeds in `tensorstream/speeds` under `$XDG_CACHE_HOME` or `~/.cache`.
    fn default() -> Self {
        let directory = ts_io::cache_directory().map(|caches| caches.join("speeds"));
        Self { directory }
    }
}

impl Speeds {
    /// Returns the speeds in `directory`, which is created if necessary. With `None`, nothing is
    /// remembered.
    pub fn in_directory(directory: Option<PathBuf>) -> Self {
        Self { directory }
    }

    /// Returns the configuration with the speeds that engines measured for the file system of
    /// `checkpoint`, and for these units. What was not measured stays as it is.
    pub fn recall(
        &self,
        checkpoint: &Checkpoint,
        units: &[Unit],
        config: EngineConfig,
    ) -> EngineConfig {
        let Some(files) = self.files(checkpoint) else { return config };
        let known = Rates::of(&files.model).or(Rates::of(&files.storage));
        let mut rates = config.rates;
        if let Some(rate) = known.read(cached_share(checkpoint)) {
            rates.read_bytes_per_s = rate;
        }
        if let Some(rate) = known.decoding {
            rates.decode_bytes_per_s = rate;
        }
        let ids = (0u32..).zip(units).map(|(id, unit)| (unit.name.as_str(), UnitId(id)));
        let ids: HashMap<&str, UnitId> = ids.collect();
        let mut compute = config.compute.clone();
        for (key, value, name) in lines(&files.model) {
            match (key.as_str(), ids.get(name.as_str())) {
                ("other_s", _) => compute.other_s = value,
                ("unit_s", Some(&id)) => compute.units.push((id, value)),
                _ => {}
            }
        }
        config.with_rates(rates).with_compute(compute)
    }

    /// Remembers what an engine has measured, if it has read and computed enough to measure it.
    pub fn remember(&self, checkpoint: &Checkpoint, stats: &EngineStats) {
        let Some(files) = self.files(checkpoint) else { return };
        if stats.total_read_bytes() < LEAST_BYTES {
            return;
        }
        // The rates in the statistics are those of the configuration where nothing was measured.
        let passes = stats.recent_passes.iter().skip(1);
        let (mut read, mut reading_ns, mut decoded, mut decoding_ns) = (0, 0, 0, 0);
        for pass in passes {
            read += pass.read_bytes;
            reading_ns += pass.reading_ns;
            decoded += pass.decoded_bytes;
            decoding_ns += pass.decoding_ns;
        }
        let rate = |bytes: u64, ns: u64| {
            (bytes >= LEAST_BYTES && ns >= LEAST_NS).then(|| bytes as f64 / (ns as f64 / 1e9))
        };
        let read_rate = rate(read, reading_ns);
        let mut known = Rates::default();
        let is_cached = |path| matches!(path, ReadPath::Buffered | ReadPath::Mapped);
        let cached = stats.read_bytes.iter().filter(|(path, _)| is_cached(*path));
        let cached: u64 = cached.map(|(_, bytes)| bytes).sum();
        match cached as f64 / stats.total_read_bytes() as f64 {
            0.9.. => known.cached = read_rate,
            0.0..0.1 => known.direct = read_rate,
            _ => {}
        }
        known.decoding = rate(decoded, decoding_ns);
        // If this fails, the next engine measures again.
        let _ = write(&files.storage, &known.faster(Rates::of(&files.storage)).text());
        if stats.recent_passes.len() < LEAST_PASSES {
            return;
        }
        let ComputeTimes { units, other_s, .. } = &stats.compute;
        let mut text = known.or(Rates::of(&files.model)).text();
        let _ = writeln!(text, "other_s = {other_s:e}");
        for (id, seconds) in units {
            let _ = writeln!(text, "unit_s = {seconds:e} {}", stats.units[id.0 as usize].name);
        }
        let _ = write(&files.model, &text);
    }

    /// Returns the files for a checkpoint, or `None` if it is not on a local file system.
    fn files(&self, checkpoint: &Checkpoint) -> Option<Files> {
        let directory = self.directory.as_ref()?;
        let largest = checkpoint.sources().iter().max_by_key(|source| source.len())?;
        let file_system = ts_io::file_system(largest)?;
        let sizes = checkpoint.sources().iter().map(|source| {
            let name = source.path().file_name().unwrap_or_default();
            (name.to_string_lossy().into_owned(), u128::from(source.len()))
        });
        let sizes: Vec<(String, u128)> = sizes.collect();
        let model = ts_format::fingerprint(sizes.iter().map(|(name, len)| (name.as_str(), *len)));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Some(Files {
            storage: directory.join(&file_system),
            model: directory.join(format!("{file_system}-{model:032x}-{processors}")),
        })
    }
}

/// The files with the speeds for a checkpoint.
struct Files {
    storage: PathBuf,
    model: PathBuf,
}

/// The rates of a file system, in bytes per second, as far as they are known.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Rates {
    /// Of reading from the device.
    direct: Option<f64>,
    /// Of reading from the page cache.
    cached: Option<f64>,
    /// Of decoding with one processor.
    decoding: Option<f64>,
}

impl Rates {
    fn of(path: &Path) -> Self {
        let mut rates = Self::default();
        for (key, value, _) in lines(path) {
            match key.as_str() {
                "direct_bytes_per_s" => rates.direct = Some(value),
                "cached_bytes_per_s" => rates.cached = Some(value),
                "decode_bytes_per_s" => rates.decoding = Some(value),
                _ => {}
            }
        }
        rates
    }

    /// Returns these rates, and those of `other` where they are not known.
    fn or(self, other: Self) -> Self {
        Self {
            direct: self.direct.or(other.direct),
            cached: self.cached.or(other.cached),
            decoding: self.decoding.or(other.decoding),
        }
    }

    /// Returns the faster ones of both rates. `before` counts nine tenths, because a device can
    /// become slower.
    ///
    /// A run that waits for other things than the device measures less than the device can do.
    fn faster(self, before: Self) -> Self {
        let faster = |now: Option<f64>, before: Option<f64>| {
            now.map_or(before, |now| Some(now.max(before.map_or(now, |rate| 0.9 * rate))))
        };
        Self {
            direct: faster(self.direct, before.direct),
            cached: faster(self.cached, before.cached),
            decoding: faster(self.decoding, before.decoding),
        }
    }

    /// Returns the rate of reading if this share of the bytes is in the page cache.
    fn read(&self, cached_share: f64) -> Option<f64> {
        match (self.direct, self.cached) {
            (Some(direct), Some(cached)) => {
                Some(1.0 / (cached_share / cached + (1.0 - cached_share) / direct))
            }
            // A device that was measured is a better guess than one that was not.
            (Some(direct), None) => Some(direct),
            (None, Some(cached)) if cached_share > 0.5 => Some(cached),
            _ => None,
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (key, rate) in [
            ("direct_bytes_per_s", self.direct),
            ("cached_bytes_per_s", self.cached),
            ("decode_bytes_per_s", self.decoding),
        ] {
            if let Some(rate) = rate {
                let _ = writeln!(text, "{key} = {rate:e}");
            }
        }
        text
    }
}

/// Returns the share of a checkpoint that is in the page cache, from 0 to 1.
fn cached_share(checkpoint: &Checkpoint) -> f64 {
    let (mut cached, mut all) = (0.0, 0.0);
    for source in checkpoint.sources() {
        let share = source.residency(0, usize::try_from(source.len()).unwrap_or(usize::MAX));
        cached += share.unwrap_or(0.0) * source.len() as f64;
        all += source.len() as f64;
    }
    if all > 0.0 { cached / all } else { 0.0 }
}

/// Returns the lines `key = value name` of a file. Leaves out those that are damaged.
fn lines(path: &Path) -> Vec<(String, f64, String)> {
    let text = ts_io::read_cached(path).unwrap_or_default();
    let line = |line: &str| {
        let (key, rest) = line.split_once(" = ")?;
        let (value, name) = rest.split_once(' ').unwrap_or((rest, ""));
        let value = value.parse::<f64>().ok()?;
        let usable = value.is_finite() && (value > 0.0 || key == "other_s" && value == 0.0);
        usable.then(|| (key.to_owned(), value, name.to_owned()))
    };
    text.lines().filter_map(line).collect()
}

fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let text = format!("# Measured by tensorstream. Remove this file to forget it.\n{text}");
    ts_io::write_cached(path, &text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_usable_lines_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/speeds");
        let text = "direct_bytes_per_s = 2e9\ncached_bytes_per_s = nan\ndecode_bytes_per_s = -1\n\
                    unit_s = 1e-3 a unit with spaces\nunit_s = 0 b\nother_s = 0\nunit_s =\n= 3";
        write(&path, text).unwrap();
        let found: Vec<_> = lines(&path).into_iter().map(|(key, _, name)| (key, name)).collect();
        let expected =
            [("direct_bytes_per_s", ""), ("unit_s", "a unit with spaces"), ("other_s", "")];
        assert_eq!(found, expected.map(|(key, name)| (key.to_owned(), name.to_owned())));
        let rates = Rates { direct: Some(2e9), ..Rates::default() };
        assert_eq!(Rates::of(&path), rates);
        write(&path, &rates.text()).unwrap();
        assert_eq!(Rates::of(&path), rates);
        assert!(lines(&directory.path().join("absent")).is_empty());
    }

    #[test]
    fn the_rate_depends_on_the_page_cache() {
        let rates = Rates { direct: Some(2e9), cached: Some(8e9), decoding: None };
        for (share, expected) in [(0.0, 2e9), (0.5, 3.2e9), (1.0, 8e9)] {
            assert!((rates.read(share).unwrap() - expected).abs() < 1.0);
        }
        assert_eq!(Rates::default().or(rates), rates);
        let faster = Rates { direct: Some(1e9), ..Rates::default() }.faster(rates);
        assert_eq!((faster.direct, faster.cached), (Some(0.9 * 2e9), Some(8e9)));
        let direct = Rates { direct: Some(2e9), ..Rates::default() };
        assert_eq!((direct.read(0.1), direct.read(0.9)), (Some(2e9), Some(2e9)));
        let cached = Rates { cached: Some(8e9), ..Rates::default() };
        assert_eq!((cached.read(0.1), cached.read(0.9)), (None, Some(8e9)));
    }
}
