// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts the metadata of files from and to dictionaries of Python, in their order.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorstream::format::Metadata;

/// The metadata of a new file: a dictionary of text, or None.
pub(super) struct FileMetadata(pub(super) Metadata);

impl<'py> FromPyObject<'_, 'py> for FileMetadata {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if value.is_none() {
            return Ok(Self(Metadata::default()));
        }
        let mut metadata = Metadata::stated();
        for (key, text) in value.cast::<PyDict>()?.iter() {
            metadata.insert(key.extract()?, text.extract()?);
        }
        Ok(Self(metadata))
    }
}

/// Returns a dictionary of the metadata of a file.
pub(super) fn metadata_dict<'py>(
    py: Python<'py>,
    metadata: &Metadata,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    metadata.iter().try_for_each(|(key, text)| dict.set_item(key, text))?;
    Ok(dict)
}
