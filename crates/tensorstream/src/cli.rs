// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line:
//! `tensorstream info|verify|diff|convert|compact|plan|serve-weights|fetch|bench|demo|completion`.
//!
//! Exit status: 0 when all is well, 1 when a file is damaged, two differ or something failed, 2 for
//! wrong arguments, 130 when interrupted (the program gives 143 after SIGTERM). With `--json` an
//! error is `{"error": {"kind": ..., "message": ...}}` on standard output.

mod bench_codec;
mod bench_io;
mod console;
#[cfg(feature = "remote")]
mod serve;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{CommandFactory, Parser, Subcommand};
use serde_json::{Value, json};
use ts_format::{Codec, Compression, Tensor};
use ts_orchestrator::{EngineConfig, UnitId};

use self::console::{Console, described, say};
use crate::write::unfinished;
use crate::{
    Checkpoint, Compacted, Converted, Error, FileWriter, NewTensor, Progress, WriteOptions,
    available_bytes, compact, convert, diff, parse_bytes, verify,
};

const MIB: f64 = 1048576.0;

/// Inspects, converts, streams and serves checkpoints.
#[derive(Debug, Parser)]
#[command(name = "tensorstream", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    console: Console,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lists files, metadata and tensors of a checkpoint. Reads headers only.
    Info {
        /// A .safetensors or .ts file, a shard index, or a directory with one of them.
        path: PathBuf,
    },
    /// Reads a whole checkpoint and verifies its checksums.
    Verify {
        /// A .safetensors or .ts file, a shard index, or a directory with one of them.
        path: PathBuf,
        /// Threads. The number of cores by default.
        #[arg(long, default_value_t = 0, hide_default_value = true)]
        jobs: usize,
    },
    /// Compares two checkpoints: metadata, names, dtypes, shapes and values.
    Diff {
        /// A .safetensors or .ts file, a shard index, or a directory with one of them.
        first: PathBuf,
        /// The other checkpoint.
        second: PathBuf,
        /// Threads. The number of cores by default.
        #[arg(long, default_value_t = 0, hide_default_value = true)]
        jobs: usize,
    },
    /// Converts a checkpoint to another format, bit for bit and with its metadata. The same command
    /// resumes an interrupted conversion to a .ts file, in steps of 1 GiB.
    Convert {
        /// A .safetensors or .ts file, a shard index, or a directory with one of them.
        from: PathBuf,
        /// A .ts or .safetensors file, which is replaced atomically. A name that ends in
        /// .safetensors.index.json gives shards.
        to: PathBuf,
        /// Lossless compression of a .ts file: raw (none), auto (the best for each tensor), split
        /// (for floats), zstd, lz4 or zlib.
        #[arg(long, default_value = "raw")]
        codec: String,
        /// The level of the codec: -7 to 22 for zstd, 0 to 9 for zlib.
        #[arg(long, allow_negative_numbers = true)]
        level: Option<i32>,
        /// Threads that compress. The number of cores by default.
        #[arg(long, default_value_t = 0, hide_default_value = true)]
        jobs: usize,
    },
    /// Reclaims the space that appends have left unused in a .ts file.
    Compact {
        /// The file, which is replaced atomically.
        path: PathBuf,
    },
    /// Shows what would stay in memory and what would be streamed. Reads headers only.
    Plan {
        /// A .safetensors or .ts file, a shard index, or a directory with one of them.
        path: PathBuf,
        /// The memory for weights, such as 600MiB. Half of the available memory by default.
        #[arg(long, value_parser = budget)]
        budget: Option<usize>,
        /// Forward passes that can run at once.
        #[arg(long, default_value_t = 1, value_parser = at_least_one)]
        max_passes: usize,
    },
    /// Serves a directory of checkpoints, as `ts://HOST:PORT/NAME`.
    #[cfg(feature = "remote")]
    ServeWeights(serve::Arguments),
    /// Copies files from such a server, and serves them to other machines while they arrive.
    #[cfg(feature = "remote")]
    Fetch(serve::FetchArguments),
    /// Runs PyTorch operators for remote clients. Part of the Python package only.
    #[command(disable_help_flag = true)]
    Serve {
        /// See `tensorstream serve --help` of the Python package.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
        arguments: Vec<OsString>,
    },
    /// Measures this machine.
    #[command(subcommand)]
    Bench(Bench),
    /// Streams a checkpoint without a model, and reports the speed.
    Demo {
        /// A checkpoint. By default 256 MiB of random weights in the temporary directory.
        path: Option<PathBuf>,
        /// The memory for weights, such as 600MiB. By default a third of the weights, or the
        /// smallest budget that works.
        #[arg(long, value_parser = budget)]
        budget: Option<usize>,
        /// Passes over all units.
        #[arg(long, default_value_t = 5, value_parser = at_least_one)]
        passes: usize,
    },
    /// Prints a completion script: `source <(tensorstream completion bash)`.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Measures how fast each I/O backend reads a file, cold and warm. Evicts the file from the
    /// page cache. The file must not be truncated meanwhile.
    Io(bench_io::Arguments),
    /// Measures compression of a checkpoint: ratio and speed, in memory.
    Codec(bench_codec::Arguments),
}

fn budget(text: &str) -> Result<usize, String> {
    let bytes = parse_bytes(text).map_err(|e| e.to_string())?;
    usize::try_from(bytes)
        .ok()
        .filter(|&bytes| bytes > 0)
        .ok_or_else(|| format!("invalid budget {text:?}: expected at least 1 byte"))
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|&count| count > 0)
        .ok_or_else(|| "expected a whole number, at least 1".into())
}

/// Runs a command line, the program's name first, and returns the exit status.
///
/// `interrupt` is asked at least every 16 MiB of work and every 20 ms of a wait; true ends the
/// work.
pub fn run(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    interrupt: &mut dyn FnMut() -> bool,
) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let parsed = match Arguments::try_parse_from(&arguments) {
        Ok(parsed) => parsed,
        Err(refusal) => {
            // Help and version come this way too, with status 0.
            if refusal.exit_code() != 0 && arguments.iter().any(|argument| argument == "--json") {
                say(described("usage", &refusal.to_string()));
            } else {
                let _ = refusal.print();
            }
            return refusal.exit_code() as u8;
        }
    };
    let (console, began) = (parsed.console, Instant::now());
    let status = match parsed.command.run(console, interrupt) {
        Ok(status) => status,
        Err(error) => {
            console.failed(&error);
            let interrupted = match &error {
                Error::Interrupted => true,
                Error::Engine(e) => e.kind() == ts_orchestrator::ErrorKind::Interrupted,
                _ => false,
            };
            if interrupted { 130 } else { 1 }
        }
    };
    console.detail(format_args!("status {status} after {:.3} s", began.elapsed().as_secs_f64()));
    status
}

impl Command {
    fn run(self, console: Console, interrupt: &mut dyn FnMut() -> bool) -> Result<u8, Error> {
        match self {
            Command::Info { path } => info(&path, console),
            Command::Verify { path, jobs } => verified(&path, jobs, console, interrupt),
            Command::Diff { first, second, jobs } => {
                differing(&first, &second, jobs, console, interrupt)
            }
            Command::Compact { path } => compacted(&path, console, interrupt),
            Command::Convert { from, to, codec, level, jobs } => {
                let compression = Compression::named(&codec, level)
                    .map_err(|reason| Error::Compression { path: to.clone(), reason })?;
                let options = WriteOptions { compression, jobs, ..WriteOptions::default() };
                converted(&from, &to, options, console, interrupt)
            }
            Command::Plan { path, budget, max_passes } => {
                let budget = budget.or_else(half_of_available).ok_or(Error::NoBudget)?;
                planned(&path, budget, max_passes, console)
            }
            Command::Serve { .. } => {
                console.misused("serve is part of the Python package: pip install ./crates/ts-py");
                Ok(2)
            }
            #[cfg(feature = "remote")]
            Command::ServeWeights(arguments) => serve::run(&arguments, console, interrupt),
            #[cfg(feature = "remote")]
            Command::Fetch(arguments) => serve::fetched(&arguments, console, interrupt),
            Command::Bench(Bench::Io(arguments)) => bench_io::run(&arguments, console, interrupt),
            Command::Bench(Bench::Codec(arguments)) => {
                bench_codec::run(&arguments, console, interrupt)
            }
            Command::Demo { path, budget, passes } => {
                demo(path.as_deref(), budget, passes, console, interrupt)
            }
            Command::Completion { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(
                    shell,
                    &mut Arguments::command(),
                    "tensorstream",
                    &mut script,
                );
                say(String::from_utf8_lossy(&script).trim_end());
                Ok(0)
            }
        }
    }
}

fn half_of_available() -> Option<usize> {
    Some((available_bytes()? / 2) as usize)
}

fn info(path: &Path, console: Console) -> Result<u8, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let catalog = checkpoint.catalog();
    let total: u64 = catalog.tensors().map(|tensor| tensor.range().len).sum();
    let stored: u64 = catalog.tensors().map(|tensor| tensor.stored_bytes()).sum();
    let files = catalog.files().iter().zip(checkpoint.sources());
    if console.json {
        let files = files.map(|(file, source)| {
            let (path, bytes) = (source.path(), file.len);
            json!({ "path": path, "bytes": bytes, "metadata": file.metadata })
        });
        let tensors = catalog.tensors().map(|tensor| {
            let (range, first) =
                (tensor.range(), tensor.chunks().and_then(|chunks| chunks.first()));
            json!({
                "name": tensor.name(),
                "dtype": tensor.dtype().name(),
                "shape": tensor.shape(),
                "bytes": range.len,
                "file": range.file.0,
                "offset": first.map_or(range.offset, |chunk| chunk.offset),
                "checksums": tensor.sums().is_some() || tensor.chunks().is_some(),
                "codec": codec(tensor).name(),
                "stored_bytes": tensor.stored_bytes(),
            })
        });
        let (files, tensors): (Vec<Value>, Vec<Value>) = (files.collect(), tensors.collect());
        say(json!({ "files": files, "tensors": tensors, "bytes": total, "stored_bytes": stored }));
        return Ok(0);
    }
    for (file, source) in files {
        say(format_args!("{}   {:.1} MiB", source.path().display(), file.len as f64 / MIB));
        for (key, value) in &file.metadata {
            say(format_args!("    {key} = {value}"));
        }
    }
    let width = catalog.tensors().map(|tensor| tensor.name().len()).max().unwrap_or(0);
    for tensor in catalog.tensors() {
        let (name, dtype, shape) =
            (tensor.name(), tensor.dtype().name(), format!("{:?}", tensor.shape()));
        let kept = match codec(tensor) {
            Codec::Raw => String::new(),
            codec => format!(
                "  {codec} {:.2}x",
                tensor.range().len as f64 / tensor.stored_bytes() as f64
            ),
        };
        say(format_args!(
            "{name:width$}  {dtype:5} {shape:20} {:12} bytes{kept}",
            tensor.range().len
        ));
    }
    let ratio =
        if stored < total { format!(" in {:.1} MiB", stored as f64 / MIB) } else { String::new() };
    say(format_args!("{} tensors, {:.1} MiB{ratio}", catalog.tensors().len(), total as f64 / MIB));
    Ok(0)
}

/// What a tensor is kept by: the codec of most of its chunks.
fn codec(tensor: Tensor<'_>) -> Codec {
    let chunks = tensor.chunks().unwrap_or_default();
    let most =
        Codec::ALL.iter().max_by_key(|codec| chunks.iter().filter(|c| c.codec == **codec).count());
    most.filter(|_| !chunks.is_empty()).copied().unwrap_or(Codec::Raw)
}

/// A job that shows how far it is and can be interrupted.
fn watched<T>(
    console: Console,
    label: &str,
    interrupt: &mut dyn FnMut() -> bool,
    job: impl FnOnce(&mut crate::Watch<'_>) -> Result<T, Error>,
) -> Result<(T, f64), Error> {
    let bar = console.bar(label);
    let began = Instant::now();
    let done = job(&mut |progress: Progress| {
        bar.show(progress);
        interrupt()
    })?;
    Ok((done, began.elapsed().as_secs_f64()))
}

fn verified(
    path: &Path,
    jobs: usize,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let (found, seconds) =
        watched(console, "verifying", interrupt, |watch| verify(path, jobs, watch))?;
    if console.json {
        let damaged = found.damaged.iter().map(
            |d| json!({ "path": d.path, "tensor": d.tensor, "offset": d.offset, "bytes": d.len }),
        );
        let damaged: Vec<Value> = damaged.collect();
        say(json!({
            "tensors": found.tensors, "bytes": found.bytes, "checked_bytes": found.checked_bytes,
            "seconds": seconds, "damaged": damaged,
        }));
    } else {
        found.damaged.iter().for_each(say);
        let (tensors, mib) = (found.tensors, found.bytes as f64 / MIB);
        match found.checked_bytes {
            0 if found.bytes > 0 => {
                say(format_args!("{tensors} tensors, {mib:.1} MiB read; no checksums"));
            }
            checked => say(format_args!(
                "{tensors} tensors, {mib:.1} MiB read, {:.1} MiB with checksums, {} chunks damaged",
                checked as f64 / MIB,
                found.damaged.len()
            )),
        }
    }
    Ok(u8::from(!found.damaged.is_empty()))
}

fn differing(
    first: &Path,
    second: &Path,
    jobs: usize,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let (found, seconds) =
        watched(console, "comparing", interrupt, |watch| diff(first, second, jobs, watch))?;
    if console.json {
        let tensors = found
            .tensors
            .iter()
            .map(|(name, difference)| (name.clone(), difference.to_string().into()));
        let tensors: serde_json::Map<_, _> = tensors.collect();
        say(json!({
            "metadata": found.metadata, "tensors": tensors, "same": found.same, "seconds": seconds,
        }));
    } else {
        let value = |value: &Option<String>| {
            value.as_ref().map_or("nothing".into(), |text| format!("{text:?}"))
        };
        for (key, (first, second)) in &found.metadata {
            say(format_args!("metadata {key}: {} and {}", value(first), value(second)));
        }
        found
            .tensors
            .iter()
            .for_each(|(name, difference)| say(format_args!("{name}: {difference}")));
        say(format_args!("{} tensors differ, {} are the same", found.tensors.len(), found.same));
    }
    Ok(u8::from(!found.is_empty()))
}

fn compacted(
    path: &Path,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let none = ts_io::fault::WriteFaults::default();
    let (done, seconds) =
        watched(console, "compacting", interrupt, |watch| compact(path, &none, watch))?;
    let Compacted { bytes_before, bytes } = done;
    if console.json {
        say(json!({
            "path": path,
            "bytes_before": bytes_before,
            "bytes": bytes,
            "seconds": seconds,
        }));
    } else {
        let (before, after) = (bytes_before as f64 / MIB, bytes as f64 / MIB);
        say(format_args!(
            "{}: {before:.1} MiB, now {after:.1} MiB, in {seconds:.1} s",
            path.display()
        ));
    }
    Ok(0)
}

fn converted(
    from: &Path,
    to: &Path,
    options: WriteOptions,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let converted =
        watched(console, "converting", interrupt, |watch| convert(from, to, options, watch));
    if let (Err(_), Some(partial)) = (&converted, unfinished(to)) {
        console.note(format_args!(
            "{} keeps what is done; run the same command to resume",
            partial.display()
        ));
    }
    let (done, seconds) = converted?;
    let Converted { tensors, bytes, file_bytes } = done;
    if console.json {
        say(json!({
            "path": to,
            "tensors": tensors,
            "bytes": bytes,
            "file_bytes": file_bytes,
            "seconds": seconds,
        }));
    } else {
        let (mib, file_mib) = (bytes as f64 / MIB, file_bytes as f64 / MIB);
        say(format_args!(
            "{}: {tensors} tensors, {mib:.1} MiB in {file_mib:.1} MiB, in {seconds:.1} s",
            to.display()
        ));
    }
    Ok(0)
}

fn planned(path: &Path, budget: usize, max_passes: usize, console: Console) -> Result<u8, Error> {
    let config = EngineConfig { max_passes, ..EngineConfig::with_budget(budget) };
    let explanation = Checkpoint::open(path)?.explain(&config)?;
    if !console.json {
        say(explanation);
        return Ok(0);
    }
    let plan = &explanation.plan;
    let units = explanation.units.iter().map(
        |unit| json!({ "name": unit.name, "bytes": unit.slot_bytes, "resident": unit.resident }),
    );
    let units: Vec<Value> = units.collect();
    say(json!({
        "budget_bytes": explanation.budget_bytes,
        "smallest_budget_bytes": plan.smallest_budget_bytes,
        "resident_bytes": plan.resident_bytes,
        "ring_bytes": plan.ring_bytes,
        "peak_bytes": plan.peak_bytes(),
        "streamed_bytes_per_pass": plan.streamed_bytes_per_pass,
        "predicted_pass_s": plan.predicted_pass_s,
        "bottleneck": plan.bottleneck.to_string(),
        "units": units,
    }));
    Ok(0)
}

fn demo(
    path: Option<&Path>,
    budget: Option<usize>,
    passes: usize,
    console: Console,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<u8, Error> {
    let made = match path {
        Some(_) => None,
        None => Some(MadeUp::new(interrupt)?),
    };
    let path = path.or(made.as_ref().map(|made| made.path.as_path())).expect("given or made");
    let checkpoint = Checkpoint::open(path)?;
    let units = checkpoint.units_by_module();
    let weights: u64 = checkpoint.catalog().tensors().map(|tensor| tensor.range().len).sum();
    let third = (weights / 3) as usize;
    let budget = match (budget, checkpoint.explain(&EngineConfig::with_budget(third))) {
        (Some(budget), _) => budget,
        (None, Err(Error::Engine(ts_orchestrator::Error::NeverFits(refusal)))) => {
            refusal.smallest_budget_bytes
        }
        (None, _) => third,
    };
    let engine = checkpoint.engine(units, EngineConfig::with_budget(budget))?;
    let began = Instant::now();
    for _ in 0..passes {
        let pass = engine.begin_pass(interrupt)?;
        for unit in 0..engine.unit_count() as u32 {
            engine.acquire(Some(pass), UnitId(unit), interrupt)?;
            // A wait asks, but there may be none.
            if interrupt() {
                return Err(Error::Interrupted);
            }
        }
        if engine.end_pass(pass) {
            engine.replan(interrupt)?;
        }
    }
    let (stats, seconds) = (engine.stats(), began.elapsed().as_secs_f64());
    let read = stats.total_read_bytes();
    let paths: Vec<_> = stats.read_bytes.iter().filter(|(_, bytes)| *bytes > 0).collect();
    if console.json {
        let paths: serde_json::Map<_, _> =
            paths.iter().map(|(p, b)| (p.name().into(), json!(b))).collect();
        say(json!({
            "weight_bytes": weights, "budget_bytes": budget, "passes": passes, "seconds": seconds,
            "read_bytes": read, "read_bytes_by_path": paths, "backend": stats.backend,
            "reserved_high_water_bytes": stats.reserved_high_water_bytes,
        }));
        return Ok(0);
    }
    let paths: Vec<_> =
        paths.iter().map(|(p, b)| format!("{} {:.1} MiB", p.name(), *b as f64 / MIB)).collect();
    say(format_args!(
        "weights {:.1} MiB, budget {:.1} MiB",
        weights as f64 / MIB,
        budget as f64 / MIB
    ));
    say(format_args!("{passes} passes in {seconds:.2} s, every unit in memory once in each"));
    say(format_args!(
        "read {:.1} MiB ({}), {:.2} GB/s",
        read as f64 / MIB,
        paths.join(", "),
        read as f64 / seconds / 1e9
    ));
    say(format_args!("most memory taken {:.1} MiB", stats.reserved_high_water_bytes as f64 / MIB));
    Ok(0)
}

/// A checkpoint of made-up weights, gone when this is dropped.
struct MadeUp {
    path: PathBuf,
}

impl MadeUp {
    fn new(interrupt: &mut dyn FnMut() -> bool) -> Result<Self, Error> {
        const LAYERS: usize = 16;
        const SIDE: u64 = 2048;
        let path =
            std::env::temp_dir().join(format!("tensorstream-demo-{}.ts", std::process::id()));
        let meta = ts_format::TensorMeta { dtype: ts_format::Dtype::F32, shape: vec![SIDE, SIDE] };
        let tensors = (0..LAYERS).map(|i| NewTensor {
            name: format!("layers.{i}.weight"),
            meta: meta.clone(),
            phase: None,
        });
        let mut writer = FileWriter::create(
            &path,
            tensors.collect(),
            Default::default(),
            WriteOptions::default(),
            interrupt,
        )?;
        let mut state = 1u32;
        let mut row = vec![0u8; 1 << 20];
        for _ in 0..LAYERS * (SIDE * SIDE * 4) as usize / row.len() {
            for value in row.chunks_exact_mut(4) {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                value.copy_from_slice(&state.to_le_bytes());
            }
            writer.write(&row)?;
            if interrupt() {
                return Err(Error::Interrupted);
            }
        }
        writer.commit()?;
        Ok(Self { path })
    }
}

impl Drop for MadeUp {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
