// SPDX-License-Identifier: MIT OR Apache-2.0
//! The output of commands.

use std::cell::Cell;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::time::Instant;

use serde_json::json;
use ts_io::hide_passwords;

use crate::{Bar, Error, NotACheckpoint, Progress, Watch};

/// Number of bytes in a MiB, for printing sizes.
pub(super) const MIB: f64 = 1048576.0;

/// Output options. Commands print results, and errors in JSON, to standard output. They print
/// everything else to standard error.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct Console {
    /// Print JSON instead of text. Errors have the form
    /// {"error": {"kind": ..., "message": ...}}.
    #[arg(long, global = true)]
    pub(super) json: bool,
    /// Print no progress bars and no notes to standard error.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(super) quiet: bool,
    /// Also print causes of errors, closed connections and the elapsed time to standard error.
    #[arg(short, long, global = true)]
    pub(super) verbose: bool,
}

impl Console {
    /// Returns a progress bar, which is hidden if the command is quiet.
    pub(super) fn bar(self, label: &str) -> Bar {
        if self.quiet { Bar::hidden() } else { Bar::new(label) }
    }

    /// Runs a job with a progress bar. Returns its result, and the elapsed time in seconds.
    pub(super) fn run_with_bar<T>(
        self,
        label: &str,
        interrupt: &mut dyn FnMut() -> bool,
        job: impl FnOnce(&mut Watch<'_>) -> Result<T, Error>,
    ) -> Result<(T, f64), Error> {
        let bar = self.bar(label);
        let began = Instant::now();
        let done = job(&mut |progress: Progress| {
            bar.show(progress);
            interrupt()
        })?;
        Ok((done, began.elapsed().as_secs_f64()))
    }

    /// Prints to standard error, unless the command is quiet.
    pub(super) fn note(self, text: impl Display) {
        if !self.quiet {
            warn(text);
        }
    }

    /// Prints to standard error if the command is verbose.
    pub(super) fn detail(self, text: impl Display) {
        if self.verbose {
            warn(text);
        }
    }

    /// Prints an error about invalid arguments.
    pub(super) fn misuse(self, message: &str) {
        if self.json {
            say(error_json("usage", message));
        } else {
            warn(message);
        }
    }

    /// Prints the error that ended the command and, if the command is verbose, its causes.
    pub(super) fn error(self, error: &Error) {
        if self.json {
            say(error_json(kind(error), &hide_passwords(&error.to_string())));
        } else {
            warn(hide_passwords(&error.to_string()));
        }
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            self.detail(format_args!("caused by: {error}"));
            cause = error.source();
        }
    }
}

thread_local! {
    /// The first error of standard output, except that its reader has closed it.
    static OUTPUT_ERROR: Cell<Option<io::Error>> = const { Cell::new(None) };
}

/// Prints to standard output. See [`output_error`] for errors.
pub(super) fn say(text: impl Display) {
    note_output(writeln!(io::stdout(), "{text}"));
}

/// Keeps the error of a write to standard output, if it is the first one.
pub(super) fn note_output(written: io::Result<()>) {
    if let Err(error) = written
        && error.kind() != ErrorKind::BrokenPipe
    {
        let first = OUTPUT_ERROR.take().unwrap_or(error);
        OUTPUT_ERROR.set(Some(first));
    }
}

/// Returns the first error of standard output since the last call on this thread. It is no error
/// that the reader of a pipe has closed it, as `head` does.
pub(super) fn output_error() -> Option<io::Error> {
    OUTPUT_ERROR.take()
}

/// Prints to standard error. Ignores errors: what is reported must not fail because of them.
pub(super) fn warn(text: impl Display) {
    let _ = writeln!(io::stderr(), "tensorstream: {text}");
}

/// Formats an error as JSON.
pub(super) fn error_json(kind: &str, message: &str) -> serde_json::Value {
    json!({ "error": { "kind": kind, "message": message } })
}

/// Returns the kind of an error, as it is printed in JSON. The JSON kind for invalid arguments is
/// `usage`, which this function never returns.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::Format(error) => match error.kind() {
            ts_format::ErrorKind::NotFound => "not_found",
            ts_format::ErrorKind::Misuse => "misuse",
            _ => "bad_file",
        },
        Error::Io(error) => io_kind(error),
        Error::Engine(error) => match (error.storage(), error.kind()) {
            (Some(source), _) => io_kind(source),
            (None, ts_orchestrator::ErrorKind::NeverFits) => "budget_too_small",
            (None, ts_orchestrator::ErrorKind::Full) => "memory_full",
            (None, ts_orchestrator::ErrorKind::Corrupt) => "corrupt",
            (None, ts_orchestrator::ErrorKind::Misuse) => "misuse",
            (None, ts_orchestrator::ErrorKind::Interrupted) => "interrupted",
            (None, _) => "failed",
        },
        #[cfg(feature = "remote")]
        Error::Remote(error) => match error.kind() {
            ts_remote::ErrorKind::Peer => "protocol",
            ts_remote::ErrorKind::Refused => "refused",
            ts_remote::ErrorKind::Network => "network",
            ts_remote::ErrorKind::TimedOut => "timed_out",
            ts_remote::ErrorKind::Memory => "memory_full",
            ts_remote::ErrorKind::Misuse => "misuse",
            _ => "failed",
        },
        Error::Write { source, .. } => match source.kind() {
            ErrorKind::NotFound => "not_found",
            ErrorKind::PermissionDenied => "permission_denied",
            _ => "io",
        },
        Error::UnknownSuffix { .. } | Error::Compression { .. } | Error::NoBudget => "misuse",
        Error::Corrupt(_) => "corrupt",
        Error::Interrupted => "interrupted",
        Error::NotACheckpoint(NotACheckpoint::Missing { .. }) => "not_found",
        Error::NotACheckpoint(_) => "bad_file",
    }
}

fn io_kind(error: &ts_io::Error) -> &'static str {
    match error.kind() {
        ts_io::ErrorKind::NotFound => "not_found",
        ts_io::ErrorKind::PermissionDenied => "permission_denied",
        ts_io::ErrorKind::Changed => "changed",
        ts_io::ErrorKind::Misuse => "misuse",
        ts_io::ErrorKind::Cancelled => "interrupted",
        ts_io::ErrorKind::TimedOut => "timed_out",
        _ => "io",
    }
}
