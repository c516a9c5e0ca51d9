// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tensorstream bench io`: measures the speed of I/O backends.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use serde_json::json;
#[cfg(target_os = "linux")]
use ts_io::measure_mapped_views;
use ts_io::{
    Availability, BackendOptions, Measurement, Registry, Source, Tuner, Tuning, Workload, measure,
    measure_memcpy,
};
use ts_pool::{BLOCK_ALIGN, Budget, HostPool};

use super::arguments::{at_least_one, budget};
use super::console::{Console, MIB, say};
use crate::Error;

/// Names of measurements that do not use a backend.
const MEMCPY: &str = "memcpy";
const VIEWS: &str = "views";
/// Memory in bytes for measuring the request size and queue depth.
const TUNING_BYTES: usize = 128 << 20;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The file to read, such as the weights of a model.
    path: PathBuf,
    /// Number of measurements of each backend and state. The median is reported.
    #[arg(long, default_value_t = 3, value_parser = at_least_one)]
    rounds: usize,
    /// Number of times to read the file in each measurement.
    #[arg(long, default_value_t = 1, value_parser = at_least_one)]
    passes: usize,
    /// Backends to measure, separated by commas. All by default. `memcpy` measures copies in
    /// memory, for comparison with a warm file. `views` measures the cost of mapping the file.
    #[arg(long, value_delimiter = ',')]
    backends: Vec<String>,
    /// The state of the page cache before each measurement.
    #[arg(long, value_delimiter = ',', default_values_t = [State::Cold, State::Warm])]
    states: Vec<State>,
    /// The length of the cached parts of a file in the state `half`.
    #[arg(long, value_parser = budget, default_value = "32MiB")]
    stretch: usize,
    /// The number of bytes to read, from the beginning of the file.
    #[arg(long, value_parser = budget, default_value = "2GiB")]
    bytes: usize,
    /// Maximum size of a read. By default, the best value is measured first.
    #[arg(long, value_parser = budget)]
    request_bytes: Option<usize>,
    /// Number of concurrent reads. By default, the best value is measured first.
    #[arg(long)]
    in_flight: Option<usize>,
    /// Read the file in units of this size, in a random order that is the same in each measurement.
    /// By default, the file is read sequentially.
    #[arg(long, value_parser = budget)]
    random_units: Option<usize>,
}

/// The state of the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum State {
    /// The page cache contains nothing of the file.
    Cold,
    /// The page cache contains every second part of the file. A part has --stretch bytes.
    Half,
    /// The page cache contains the whole file.
    Warm,
    /// The source is remote, so the page cache does not matter.
    #[value(skip)]
    Remote,
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            State::Cold => "cold",
            State::Half => "half",
            State::Warm => "warm",
            State::Remote => "remote",
        })
    }
}

pub(super) fn run(
    arguments: &Arguments,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    if arguments.path.is_dir() {
        let reason = "it is a directory; name one file in it, such as model.safetensors";
        let error = std::io::Error::new(std::io::ErrorKind::IsADirectory, reason);
        return Err(Error::open(&arguments.path, error));
    }
    let source = Source::open(&arguments.path)?;
    let registry = Registry::builtin();
    let chosen = registry.choose(None, std::slice::from_ref(&source))?.provider.name();
    let (mut providers, mut absent) = (Vec::new(), Vec::new());
    let asked =
        |name: &str| arguments.backends.is_empty() || arguments.backends.iter().any(|b| b == name);
    for provider in registry.providers().iter().filter(|provider| asked(provider.name())) {
        match provider.probe(std::slice::from_ref(&source)) {
            Availability::Available => providers.push(Arc::clone(provider)),
            Availability::Unavailable(reason) => absent.push((provider.name(), reason)),
        }
    }
    let known = |name: &str| [MEMCPY, VIEWS].contains(&name) || registry.names().contains(&name);
    if let Some(unknown) = arguments.backends.iter().find(|name| !known(name)) {
        registry.choose(Some(unknown), &[])?;
    }
    let tuning = match (arguments.request_bytes, arguments.in_flight) {
        (Some(request_bytes), Some(in_flight)) => {
            Tuning::default().with_request_bytes(request_bytes).with_in_flight(in_flight)
        }
        (request_bytes, in_flight) => {
            let tuner = Tuner::with_cache_dir(None);
            let tuned =
                interruptible(tuner.tuning(&source, &Budget::new(TUNING_BYTES), interrupt))?;
            tuned
                .with_request_bytes(request_bytes.unwrap_or(tuned.request_bytes))
                .with_in_flight(in_flight.unwrap_or(tuned.in_flight))
        }
    };
    let ranges = ranges(source.len().min(arguments.bytes as u64), arguments.random_units);
    let workload = Workload::default()
        .with_ranges(ranges.repeat(arguments.passes))
        .with_request_bytes(tuning.request_bytes)
        .with_options(BackendOptions::default().with_in_flight(tuning.in_flight));
    let memory = 2 * tuning.in_flight.max(1) * tuning.request_bytes.next_multiple_of(BLOCK_ALIGN);
    let pool = HostPool::new(&Budget::new(memory), memory).map_err(ts_io::Error::from)?;
    // The memory is touched before the measurement, so that page faults do not count.
    pool.allocate(memory).map_err(ts_io::Error::from)?.fill(0);
    let mut rows: BTreeMap<(State, usize, &'static str), Vec<Measurement>> = BTreeMap::new();
    let bytes: u64 = workload.ranges.iter().map(|range| range.1).sum();
    #[cfg(target_os = "linux")]
    let end = source.len().min(arguments.bytes as u64);
    let states = if source.is_remote() { &[State::Remote][..] } else { &arguments.states[..] };
    for _ in 0..arguments.rounds {
        for &state in states {
            for (index, provider) in providers.iter().enumerate() {
                prepare(&source, &workload, state, arguments.stretch, interrupt)?;
                let measured = interruptible(measure(
                    provider.as_ref(),
                    &source,
                    &workload,
                    &pool,
                    interrupt,
                ))?;
                rows.entry((state, index, provider.name())).or_default().push(measured);
            }
            if state != State::Warm {
                continue;
            }
            if asked(MEMCPY) {
                let copied =
                    interruptible(measure_memcpy(bytes, workload.request_bytes, &pool, interrupt))?;
                rows.entry((state, providers.len(), MEMCPY)).or_default().push(copied);
            }
            #[cfg(target_os = "linux")]
            if asked(VIEWS) {
                prepare(&source, &workload, state, arguments.stretch, interrupt)?;
                let viewed = interruptible(measure_mapped_views(&source, end, interrupt))?;
                rows.entry((state, providers.len() + 1, VIEWS)).or_default().push(viewed);
            }
        }
    }
    let rows: Vec<Row> =
        rows.into_iter().map(|((state, _, name), runs)| Row::new(name, state, &runs)).collect();
    if console.json {
        print_json(arguments, &workload, &rows, &absent, chosen);
    } else {
        print_text(arguments, &workload, &rows, &absent, chosen);
    }
    Ok(0)
}

/// Returns the ranges to read, in order, as pairs of offset and length.
fn ranges(bytes: u64, unit: Option<usize>) -> Vec<(u64, u64)> {
    let Some(unit) = unit else { return vec![(0, bytes)] };
    let mut ranges: Vec<_> =
        (0..bytes).step_by(unit).map(|begin| (begin, (unit as u64).min(bytes - begin))).collect();
    // Fisher-Yates shuffle with a fixed seed, so that the order is always the same.
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    for i in (1..ranges.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        ranges.swap(i, (random % (i as u64 + 1)) as usize);
    }
    ranges
}

/// Brings the page cache into `state`. Evicts the file, and then reads the wanted parts
/// sequentially, so that the cache contains large pages as usual.
fn prepare(
    source: &Arc<Source>,
    workload: &Workload,
    state: State,
    stretch: usize,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<(), Error> {
    match (source.evict(), state) {
        // If the eviction fails, the cache may keep parts of the file in smaller pages. The file
        // can still be made warm.
        (_, State::Warm | State::Remote) => {}
        (evicted, State::Cold | State::Half) => evicted?,
    }
    let bytes = workload.ranges.iter().map(|range| range.0 + range.1).max().unwrap_or(0);
    let stretches = (0..bytes).step_by(stretch).enumerate();
    let mut buffer = vec![0; 1 << 20];
    for (index, begin) in stretches {
        let wanted = state == State::Warm || (state == State::Half && index % 2 == 0);
        let len = (stretch as u64).min(bytes - begin);
        if wanted && source.residency(begin, len as usize) != Some(1.0) {
            for offset in (begin..begin + len).step_by(buffer.len()) {
                let part = buffer.len().min((begin + len - offset) as usize);
                source.read_at(offset, &mut buffer[..part])?;
                if interrupt() {
                    return Err(Error::Interrupted);
                }
            }
        }
    }
    Ok(())
}

fn interruptible<T>(done: Result<T, ts_io::Error>) -> Result<T, Error> {
    match done {
        Err(ts_io::Error::Interrupted) => Err(Error::Interrupted),
        done => Ok(done?),
    }
}

/// The results of one backend in one state.
struct Row {
    backend: &'static str,
    state: State,
    gib_per_s: f64,
    lowest: f64,
    highest: f64,
    cpu_s_per_gib: Option<f64>,
    mean_in_flight: f64,
    paths: Vec<(&'static str, u64)>,
}

impl Row {
    fn new(backend: &'static str, state: State, runs: &[Measurement]) -> Self {
        let speeds = sorted(runs.iter().map(Measurement::gib_per_s));
        let cpu: Option<Vec<f64>> = runs.iter().map(Measurement::cpu_s_per_gib).collect();
        let last = runs.last().expect("`--rounds` is at least 1");
        Self {
            backend,
            state,
            gib_per_s: speeds[speeds.len() / 2],
            lowest: speeds[0],
            highest: speeds[speeds.len() - 1],
            cpu_s_per_gib: cpu.map(|cpu| sorted(cpu.into_iter())).map(|cpu| cpu[cpu.len() / 2]),
            mean_in_flight: last.mean_in_flight,
            paths: last.paths.iter().map(|(path, &bytes)| (path.name(), bytes)).collect(),
        }
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn print_json(
    arguments: &Arguments,
    workload: &Workload,
    rows: &[Row],
    absent: &[(&str, String)],
    chosen: &str,
) {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            json!({
                "backend": row.backend,
                "state": row.state.to_string(),
                "gib_per_s": row.gib_per_s,
                "lowest_gib_per_s": row.lowest,
                "highest_gib_per_s": row.highest,
                "cpu_s_per_gib": row.cpu_s_per_gib,
                "mean_in_flight": row.mean_in_flight,
                "bytes": row.paths.iter().copied().collect::<BTreeMap<_, _>>(),
            })
        })
        .collect();
    let unavailable: BTreeMap<_, _> = absent.iter().map(|(name, why)| (*name, why)).collect();
    say(json!({
        "source": arguments.path,
        "bytes": workload.ranges.iter().map(|range| range.1).sum::<u64>(),
        "request_bytes": workload.request_bytes,
        "in_flight": workload.options.in_flight,
        "rounds": arguments.rounds,
        "chosen": chosen,
        "rows": rows,
        "unavailable": unavailable,
    }));
}

fn print_text(
    arguments: &Arguments,
    workload: &Workload,
    rows: &[Row],
    absent: &[(&str, String)],
    chosen: &str,
) {
    let bytes: u64 = workload.ranges.iter().map(|range| range.1).sum();
    say(format_args!(
        "{}: {:.0} MiB in requests of {:.1} MiB, {} in flight, median of {}\n",
        arguments.path.display(),
        bytes as f64 / MIB,
        workload.request_bytes as f64 / MIB,
        workload.options.in_flight,
        arguments.rounds,
    ));
    say("state  backend      GiB/s   lowest-highest  CPU s/GiB  in flight  by");
    for row in rows {
        let cpu = row.cpu_s_per_gib.map_or("-".into(), |cpu| format!("{cpu:.3}"));
        let paths: Vec<_> = row.paths.iter().map(|(path, _)| *path).collect();
        say(format_args!(
            "{:<6} {:<11} {:6.2}   {:6.2}-{:<6.2}  {:>9}  {:>9.1}  {}",
            row.state.to_string(),
            row.backend,
            row.gib_per_s,
            row.lowest,
            row.highest,
            cpu,
            row.mean_in_flight,
            paths.join(", "),
        ));
    }
    for (name, reason) in absent {
        say(format_args!("       {name:<11} not available: {reason}"));
    }
    say(format_args!("\ndefault backend: {chosen}"));
}
