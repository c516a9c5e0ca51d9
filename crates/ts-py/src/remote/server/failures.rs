// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts exceptions and invalid requests to failures.

use pyo3::prelude::*;
use tensorstream::exec::{OpFailure, OpFailureKind};

/// Creates a failure for a request that is invalid or not allowed.
pub(super) fn refused(what: impl Into<String>) -> OpFailure {
    OpFailure::new(OpFailureKind::Refused, what)
}

/// Converts an exception that an operator has raised. The failure has the message of the exception.
pub(super) fn raised_by_operator(py: Python<'_>, error: &PyErr) -> OpFailure {
    let text = text_of(py, error);
    OpFailure::new(kind_of(&class_of(py, error), &text), text)
}

/// Converts an exception of other code. The message begins with `what`, which states what failed.
pub(super) fn raised(py: Python<'_>, what: &str, error: &PyErr) -> OpFailure {
    OpFailure::new(kind_of(&class_of(py, error), &text_of(py, error)), message(py, what, error))
}

/// Returns a message that begins with `what` and ends with the message of the exception. The class
/// of the exception is in between, unless it is RuntimeError.
pub(super) fn message(py: Python<'_>, what: &str, error: &PyErr) -> String {
    let (class, text) = (class_of(py, error), text_of(py, error));
    // PyTorch raises RuntimeError for almost every error, so this class adds no information.
    if class == "RuntimeError" {
        return format!("{what}: {text}");
    }
    format!("{what}: {class}: {text}")
}

fn kind_of(class: &str, text: &str) -> OpFailureKind {
    let out_of_memory = class == "OutOfMemoryError"
        || class == "MemoryError"
        || text.contains("can't allocate memory");
    if out_of_memory { OpFailureKind::OutOfMemory } else { OpFailureKind::Operator }
}

fn class_of(py: Python<'_>, error: &PyErr) -> String {
    error.get_type(py).name().map_or_else(|_| "?".into(), |name| name.to_string())
}

fn text_of(py: Python<'_>, error: &PyErr) -> String {
    error.value(py).str().map_or_else(|_| "?".into(), |text| text.to_string())
}
