// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a command writes, and where.

use std::fmt::Display;
use std::io::Write;

use serde_json::json;

use crate::{Bar, Error};

/// How a command reports: results on standard output, everything else on standard error.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct Console {
    /// Print one JSON value instead of text. Errors are {"error": {"kind": ..., "message": ...}}.
    #[arg(long, global = true)]
    pub(super) json: bool,
    /// Print no progress bars and no notes to standard error.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(super) quiet: bool,
    /// Print causes of errors, connections and elapsed time to standard error.
    #[arg(short, long, global = true)]
    pub(super) verbose: bool,
}

impl Console {
    /// A progress bar, unless the command is quiet.
    pub(super) fn bar(self, label: &str) -> Bar {
        if self.quiet { Bar::hidden() } else { Bar::new(label) }
    }

    /// Writes to standard error, unless the command is quiet.
    pub(super) fn note(self, text: impl Display) {
        if !self.quiet {
            eprintln!("tensorstream: {text}");
        }
    }

    /// Writes to standard error, if the command is verbose.
    pub(super) fn detail(self, text: impl Display) {
        if self.verbose {
            eprintln!("tensorstream: {text}");
        }
    }

    /// Reports that a command cannot be used.
    pub(super) fn misused(self, message: &str) {
        if self.json {
            say(described("usage", message));
        } else {
            eprintln!("tensorstream: {message}");
        }
    }

    /// Reports the error that ended the command.
    pub(super) fn failed(self, error: &Error) {
        if self.json {
            say(described(kind(error), &error.to_string()));
        } else {
            eprintln!("tensorstream: {error}");
        }
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            self.detail(format_args!("caused by: {error}"));
            cause = error.source();
        }
    }
}

/// Writes to standard output. A reader that has gone away is not an error.
pub(super) fn say(text: impl Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// An error as JSON.
pub(super) fn described(kind: &str, message: &str) -> serde_json::Value {
    json!({ "error": { "kind": kind, "message": message } })
}

/// A word for programs. `usage`, for wrong arguments, is the one that is not here.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::Format(error) => match error.kind() {
            ts_format::ErrorKind::NotFound => "not_found",
            ts_format::ErrorKind::Misuse => "misuse",
            _ => "bad_file",
        },
        Error::Io(error) => of_io(error),
        Error::Engine(error) => match (error.storage(), error.kind()) {
            (Some(source), _) => of_io(source),
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
            std::io::ErrorKind::NotFound => "not_found",
            std::io::ErrorKind::PermissionDenied => "permission_denied",
            _ => "io",
        },
        Error::UnknownSuffix { .. } | Error::Compression { .. } | Error::NoBudget => "misuse",
        Error::Corrupt(_) => "corrupt",
        Error::Interrupted => "interrupted",
        Error::NoCheckpoint { .. } => "not_found",
        Error::ForeignFormat { .. } => "bad_file",
    }
}

fn of_io(error: &ts_io::Error) -> &'static str {
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
