// SPDX-License-Identifier: MIT OR Apache-2.0
//! The one table from error kinds to exception classes of `tensorstream.errors`.

use pyo3::prelude::*;
use pyo3::types::PyType;
use tensorstream::exec::OpFailureKind;
use tensorstream::{Error, format, io, orchestrator, pool, remote};

/// The Python exception that says the same.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, class_name(error), &error.to_string())
}

/// What a machine did not do, of which `text` says what it was.
pub(crate) fn of_failure(py: Python<'_>, kind: OpFailureKind, text: &str) -> PyErr {
    let name = match kind {
        OpFailureKind::OutOfMemory => "RemoteOutOfMemoryError",
        OpFailureKind::Stale => "StaleReferenceError",
        _ => "RemoteTensorError",
    };
    exception(py, name, text)
}

/// Tensors of two machines where they must be of one.
pub(crate) fn of_machines(py: Python<'_>, text: &str) -> PyErr {
    exception(py, "CrossMachineError", text)
}

/// What is wrong between two processes.
pub(crate) fn of_wire(py: Python<'_>, error: &remote::Error) -> PyErr {
    of_wire_at(py, error, "")
}

/// As [`of_wire`]; `place` goes before it.
pub(crate) fn of_wire_at(py: Python<'_>, error: &remote::Error, place: &str) -> PyErr {
    let name = match (error, error.kind()) {
        (remote::Error::Damaged { .. }, _) => "ChecksumError",
        (_, remote::ErrorKind::Network | remote::ErrorKind::Refused) => "ConnectionLost",
        (_, remote::ErrorKind::TimedOut) => "ConnectionTimeout",
        (_, remote::ErrorKind::Memory) => "OutOfMemoryError",
        (_, remote::ErrorKind::Misuse) => "ConfigurationError",
        _ => "ProtocolError",
    };
    exception(py, name, &format!("{place}{error}"))
}

/// What is wrong with memory.
pub(crate) fn of_pool(py: Python<'_>, error: &pool::Error) -> PyErr {
    let name = match error.kind() {
        pool::ErrorKind::Misuse => "ConfigurationError",
        _ => "OutOfMemoryError",
    };
    exception(py, name, &error.to_string())
}

/// What was waited for did not happen within the caller's timeout.
pub(crate) fn timed_out(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "ConnectionTimeout", message)
}

/// What a caller has asked for makes no sense.
pub(crate) fn misuse(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "ConfigurationError", message)
}

fn exception(py: Python<'_>, name: &str, message: &str) -> PyErr {
    let class = py
        .import("tensorstream.errors")
        .and_then(|errors| errors.getattr(name))
        .and_then(|class| Ok(class.cast_into::<PyType>()?));
    match class {
        Ok(class) => PyErr::from_type(class, (message.to_string(),)),
        Err(missing) => missing,
    }
}

fn class_name(error: &Error) -> &'static str {
    match error {
        Error::Format(e) => match e.kind() {
            format::ErrorKind::NotFound => "MissingTensorError",
            format::ErrorKind::Misuse => "ConfigurationError",
            _ => "CheckpointError",
        },
        Error::Io(e) => of_io(e),
        Error::Engine(e) => match (e.storage(), e.kind()) {
            (Some(source), _) => of_io(source),
            (None, orchestrator::ErrorKind::NeverFits) => "BudgetError",
            (None, orchestrator::ErrorKind::Full) => "UnitReferencedError",
            (None, orchestrator::ErrorKind::Corrupt) => "ChecksumError",
            (None, orchestrator::ErrorKind::Written) => "ModelError",
            (None, orchestrator::ErrorKind::Misuse) => "ConfigurationError",
            (None, _) => "StorageError",
        },
        Error::Corrupt(_) => "ChecksumError",
        Error::Remote(e) if e.kind() == remote::ErrorKind::Misuse => "ConfigurationError",
        Error::Remote(_) => "StorageError",
        Error::Write { source, .. } => match source.kind() {
            std::io::ErrorKind::PermissionDenied => "CheckpointPermissionError",
            _ => "StorageError",
        },
        Error::UnknownSuffix { .. } | Error::Compression { .. } => "ConfigurationError",
        Error::ForeignFormat { .. } => "CheckpointError",
        Error::NoCheckpoint { .. } => "CheckpointNotFoundError",
        _ => "TensorStreamError",
    }
}

fn of_io(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "CheckpointNotFoundError",
        io::ErrorKind::PermissionDenied => "CheckpointPermissionError",
        io::ErrorKind::Changed => "CheckpointChangedError",
        io::ErrorKind::Misuse => "ConfigurationError",
        _ => "StorageError",
    }
}
