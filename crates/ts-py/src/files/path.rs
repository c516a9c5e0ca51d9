// SPDX-License-Identifier: MIT OR Apache-2.0
//! The argument of functions that take a path.

use std::path::PathBuf;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::errors::argument_type_error;

/// A path or a URL, from a `str`, `bytes` or `os.PathLike`. It need not be UTF-8.
pub(super) struct PathArgument(pub(super) PathBuf);

impl<'py> FromPyObject<'_, 'py> for PathArgument {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match value.extract::<PathBuf>() {
            Ok(path) => Ok(Self(path)),
            // While `__fspath__` runs, a signal handler can raise another exception.
            Err(error) if !error.is_instance_of::<PyTypeError>(value.py()) => Err(error),
            Err(_) => {
                let found = value.get_type().name()?;
                let message = format!("invalid path: expected a str or os.PathLike, got {found}");
                Err(argument_type_error(value.py(), &message))
            }
        }
    }
}
