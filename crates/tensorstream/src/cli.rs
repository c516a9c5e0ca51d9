// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line of `tensorstream`.
//!
//! | exit status | meaning |
//! |---|---|
//! | 0 | success |
//! | 1 | an error, damage in a file, or a difference between two checkpoints |
//! | 2 | invalid arguments |
//! | 130 | interrupted (the program returns 143 after SIGTERM) |
//!
//! With `--json`, errors are printed to standard output as
//! `{"error": {"kind": ..., "message": ...}}`.

mod arguments;
mod bench_codec;
mod bench_io;
mod compact;
mod console;
mod convert;
mod demo;
mod diff;
mod info;
mod plan;
#[cfg(feature = "remote")]
mod serve;
#[cfg(feature = "remote")]
mod serve_device;
#[cfg(feature = "remote")]
mod status;
mod verify;

use std::ffi::OsString;
use std::time::Instant;

use clap::{CommandFactory, Parser, Subcommand};

use self::arguments::CheckpointPath;
use self::console::{Console, error_json, note_output, output_error, say, warn};
use crate::Error;

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
    Info(CheckpointPath),
    /// Reads a whole checkpoint and verifies its checksums.
    Verify(verify::Arguments),
    /// Compares two checkpoints: metadata, names, dtypes, shapes and values.
    Diff(diff::Arguments),
    /// Converts a checkpoint to another format, bit for bit and with its metadata. To resume an
    /// interrupted conversion to one file, run the same command again.
    Convert(convert::Arguments),
    /// Reclaims the space that appends have left unused in a .ts file.
    Compact(compact::Arguments),
    /// Shows which tensors would stay in memory, and which would be streamed. Reads headers only.
    Plan(plan::Arguments),
    /// Serves devices to remote clients, which run PyTorch operators on them. Only the Python
    /// package contains the server. With `files`, serves checkpoints instead.
    #[cfg(feature = "remote")]
    Serve(Box<ServeArguments>),
    /// Another name for `serve files`.
    #[cfg(feature = "remote")]
    ServeWeights(serve::Arguments),
    /// Copies files from a `serve-weights` server. With --listen, also serves them to other
    /// machines while they arrive.
    #[cfg(feature = "remote")]
    Fetch(serve::FetchArguments),
    /// Generates text with a language model. Only the Python package contains this command.
    #[command(disable_help_flag = true)]
    Generate {
        /// See `tensorstream generate --help` of the Python package.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
        arguments: Vec<OsString>,
    },
    /// Measures the speed of I/O and compression on this machine.
    #[command(subcommand)]
    Bench(Bench),
    /// Streams a checkpoint without a model, and reports the speed.
    Demo(demo::Arguments),
    /// Prints a shell completion script. In bash, run `source <(tensorstream completion bash)`.
    Completion {
        /// The shell that will run the script.
        shell: clap_complete::Shell,
    },
}

#[cfg(feature = "remote")]
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
struct ServeArguments {
    #[command(subcommand)]
    what: Option<Serve>,
    #[command(flatten)]
    device: serve_device::Arguments,
}

#[cfg(feature = "remote")]
#[derive(Debug, Subcommand)]
enum Serve {
    /// Serves devices to remote clients. The same as `serve` without a subcommand.
    Device(Box<serve_device::Arguments>),
    /// Serves a directory of checkpoints, as `ts://HOST:PORT/NAME`.
    Files(serve::Arguments),
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Measures how fast each I/O backend reads a file, cold and warm. Evicts the file from the
    /// page cache. The file must not be truncated during the measurement.
    Io(bench_io::Arguments),
    /// Measures compression of a checkpoint: ratio and speed, in memory.
    Codec(bench_codec::Arguments),
}

/// Runs a command line, whose first argument is the name of the program, and returns the exit
/// status. Blocks.
///
/// Most commands call `interrupt` at least every 16 MiB of work and every 20 ms of waiting.
/// `serve-weights` calls it at least every 50 ms, and `bench codec` once a round. `info`, `plan`
/// and `completion` never call it. If `interrupt` returns true, the command ends.
///
/// # Examples
/// ```
/// // Prints the version.
/// assert_eq!(tensorstream::cli::run(["tensorstream", "--version"], &mut || false), 0);
/// ```
pub fn run(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    interrupt: &mut dyn FnMut() -> bool,
) -> u8 {
    run_with(arguments, interrupt, None)
}

/// Runs the server of devices with these options, a JSON object, and returns its exit status.
pub type ServeDevice<'a> = &'a mut dyn FnMut(&str) -> u8;

/// Runs a command line like [`run`]. `serve_device` is the server of the command `serve device`, if
/// the program contains one.
pub fn run_with(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    interrupt: &mut dyn FnMut() -> bool,
    serve_device: Option<ServeDevice<'_>>,
) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let status = run_command(&arguments, interrupt, serve_device);
    match output_error() {
        Some(error) => {
            warn(format_args!("cannot write to standard output: {error}"));
            if status == 0 { 1 } else { status }
        }
        None => status,
    }
}

/// Runs a command line. Returns the exit status if the output could be written.
fn run_command(
    arguments: &[OsString],
    interrupt: &mut dyn FnMut() -> bool,
    serve_device: Option<ServeDevice<'_>>,
) -> u8 {
    let parsed = match Arguments::try_parse_from(arguments) {
        Ok(parsed) => parsed,
        Err(error) => {
            // This includes --help and --version, whose exit code is 0.
            if error.exit_code() != 0 && arguments.iter().any(|argument| argument == "--json") {
                say(error_json("usage", &error.to_string()));
            } else {
                // A usage error goes to standard error, whose errors are ignored.
                let printed = error.print();
                note_output(if error.use_stderr() { Ok(()) } else { printed });
            }
            return error.exit_code() as u8;
        }
    };
    let (console, began) = (parsed.console, Instant::now());
    let status = match parsed.command.run(console, interrupt, serve_device) {
        Ok(status) => status,
        Err(error) => {
            console.error(&error);
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
    // Only `serve device` uses `serve_device`.
    #[cfg_attr(not(feature = "remote"), allow(unused_variables, clippy::needless_pass_by_value))]
    fn run(
        self,
        console: Console,
        interrupt: &mut dyn FnMut() -> bool,
        serve_device: Option<ServeDevice<'_>>,
    ) -> Result<u8, Error> {
        match self {
            Self::Info(arguments) => info::run(&arguments, console),
            Self::Verify(arguments) => verify::run(&arguments, console, interrupt),
            Self::Diff(arguments) => diff::run(&arguments, console, interrupt),
            Self::Convert(arguments) => convert::run(&arguments, console, interrupt),
            Self::Compact(arguments) => compact::run(&arguments, console, interrupt),
            Self::Plan(arguments) => plan::run(&arguments, console),
            #[cfg(feature = "remote")]
            Self::ServeWeights(arguments) => serve::serve(&arguments, console, interrupt),
            #[cfg(feature = "remote")]
            Self::Serve(arguments) => {
                let options = match &arguments.what {
                    Some(Serve::Files(files)) => return serve::serve(files, console, interrupt),
                    Some(Serve::Device(device)) => device.options()?,
                    None => arguments.device.options()?,
                };
                match serve_device {
                    Some(serve) => Ok(serve(&options.to_string())),
                    None => Ok(only_in_python("serve device", console)),
                }
            }
            #[cfg(feature = "remote")]
            Self::Fetch(arguments) => serve::fetch(&arguments, console, interrupt),
            Self::Generate { .. } => Ok(only_in_python("generate", console)),
            Self::Bench(Bench::Io(arguments)) => bench_io::run(&arguments, console, interrupt),
            Self::Bench(Bench::Codec(arguments)) => {
                bench_codec::run(&arguments, console, interrupt)
            }
            Self::Demo(arguments) => demo::run(&arguments, console, interrupt),
            Self::Completion { shell } => {
                let mut script = Vec::new();
                let mut command = Arguments::command();
                clap_complete::generate(shell, &mut command, "tensorstream", &mut script);
                say(String::from_utf8_lossy(&script).trim_end());
                Ok(0)
            }
        }
    }
}

/// Reports that only the Python package contains a command. Returns the exit status.
fn only_in_python(command: &str, console: Console) -> u8 {
    console.misuse(&format!(
        "only the Python package contains `{command}`; to install it, run pip install \
         ./crates/ts-py in the source directory"
    ));
    2
}
