// SPDX-License-Identifier: MIT OR Apache-2.0
//! Maps error kinds to the exception classes of `tensorstream.errors`.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyType;
use tensorstream::exec::OpFailureKind;
use tensorstream::io::hide_passwords;
use tensorstream::{Error, NotACheckpoint, format, io, orchestrator, pool, remote, streams};

use crate::made::remove_if_made;

/// Converts an error of the crate `tensorstream` to a Python exception.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let (name, mut message) = (class_name(error), error.to_string());
    if name == "CheckpointChangedError" {
        message = format!("{message}; {AFTER_A_CHANGE}");
    }
    if let Error::Engine(orchestrator::Error::Corrupt { path, .. }) = error
        && remove_if_made(path)
    {
        message += MADE_AGAIN;
    }
    let exception = exception(py, name, &message);
    if let Error::Engine(orchestrator::Error::NeverFits(refusal)) = error {
        let smallest = refusal.smallest_budget_bytes;
        if let Err(error) = exception.value(py).setattr("smallest", smallest) {
            return error;
        }
    }
    exception
}

/// What to do about a CheckpointChangedError.
const AFTER_A_CHANGE: &str =
    "open it again, or call tensorstream.reload(model) for a model that streams it";

/// What to do about a damaged file that was removed.
const MADE_AGAIN: &str = " (it was converted from the checkpoint and has been removed: loading the \
                          model again converts it again)";

/// Creates the exception for an operator that failed on a remote machine.
pub(crate) fn operator_error(py: Python<'_>, kind: OpFailureKind, message: &str) -> PyErr {
    let name = match kind {
        OpFailureKind::OutOfMemory => "RemoteOutOfMemoryError",
        OpFailureKind::Stale => "StaleReferenceError",
        _ => "RemoteTensorError",
    };
    exception(py, name, message)
}

/// Creates a CrossMachineError: an operator got tensors of two machines.
pub(crate) fn cross_machine_error(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "CrossMachineError", message)
}

/// Converts an error of a connection to a Python exception.
pub(crate) fn wire_error(py: Python<'_>, error: &remote::Error) -> PyErr {
    wire_error_at(py, error, "")
}

/// Converts an error of a connection to a Python exception, whose message begins with `place`.
pub(crate) fn wire_error_at(py: Python<'_>, error: &remote::Error, place: &str) -> PyErr {
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

/// Converts an error of [`remote::TensorInfo`] to a Python exception. The message does not mention
/// sending, because the tensor may never be sent.
pub(crate) fn tensor_error(py: Python<'_>, error: &remote::Error) -> PyErr {
    match error {
        remote::Error::Unsendable { tensor, reason } if tensor.is_empty() => {
            configuration_error(py, &format!("invalid tensor: {reason}"))
        }
        remote::Error::Unsendable { tensor, reason } => {
            configuration_error(py, &format!("invalid tensor {tensor:?}: {reason}"))
        }
        error => wire_error(py, error),
    }
}

/// Converts an error of a device or of its streams to a Python exception.
pub(crate) fn device_error(py: Python<'_>, error: &streams::Error) -> PyErr {
    let name = match (error, error.kind()) {
        (streams::Error::UnknownDevice { .. }, _) => "ConfigurationError",
        (_, streams::ErrorKind::Unsupported) => "DeviceUnavailableError",
        (_, streams::ErrorKind::Full) => "OutOfMemoryError",
        (_, streams::ErrorKind::Misuse) => "ConfigurationError",
        _ => "DeviceError",
    };
    exception(py, name, &error.to_string())
}

/// Converts an error of a memory pool to a Python exception.
pub(crate) fn pool_error(py: Python<'_>, error: &pool::Error) -> PyErr {
    let name = match (error, error.kind()) {
        (_, pool::ErrorKind::Misuse) => "ConfigurationError",
        (_, pool::ErrorKind::Unsupported) => "DeviceUnavailableError",
        (pool::Error::Device(_), pool::ErrorKind::System) => "DeviceError",
        _ => "OutOfMemoryError",
    };
    exception(py, name, &error.to_string())
}

/// Reports that `what` is used instead of what was asked for: a NotBuiltWarning, and a record of
/// the logger `tensorstream` for the first one of the process.
///
/// # Errors
/// Returns the warning if the program turned it into an exception.
pub(crate) fn warn_fallback(py: Python<'_>, what: &str) -> PyResult<()> {
    static LOGGED: AtomicBool = AtomicBool::new(false);
    if !LOGGED.swap(true, Ordering::Relaxed) {
        let logger = py.import("logging")?.call_method1("getLogger", ("tensorstream",))?;
        logger.call_method1("warning", ("%s", what))?;
    }
    let category = py.import("tensorstream.errors")?.getattr("NotBuiltWarning")?;
    py.import("warnings")?.call_method1("warn", (what, category))?;
    Ok(())
}

/// Creates a ConnectionTimeout: a timeout passed before the event that the caller waits for.
pub(crate) fn timeout_error(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "ConnectionTimeout", message)
}

/// Creates a ConfigurationError: an argument or a call is invalid.
pub(crate) fn configuration_error(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "ConfigurationError", message)
}

/// Creates an ArgumentTypeError: an argument has the wrong type.
pub(crate) fn argument_type_error(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "ArgumentTypeError", message)
}

/// Creates a ModelError: PyTorch or the model does not support something.
pub(crate) fn model_error(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "ModelError", message)
}

/// Creates a ModelError: the program wrote to the streamed weights `names`.
pub(crate) fn written_error(py: Python<'_>, names: &str) -> PyErr {
    let message = format!(
        "{names} was written to in place: a streamed weight cannot be changed; call restore(model) \
         first"
    );
    exception(py, "ModelError", &message)
}

/// Creates an exception whose class is `name` in `tensorstream.errors`.
fn exception(py: Python<'_>, name: &str, message: &str) -> PyErr {
    let class = py
        .import("tensorstream.errors")
        .and_then(|errors| errors.getattr(name))
        .and_then(|class| Ok(class.cast_into::<PyType>()?));
    match class {
        Ok(class) => PyErr::from_type(class, (hide_passwords(message).into_owned(),)),
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
        Error::NotACheckpoint(NotACheckpoint::Missing { .. }) => "CheckpointNotFoundError",
        Error::NotACheckpoint(_) => "CheckpointError",
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
