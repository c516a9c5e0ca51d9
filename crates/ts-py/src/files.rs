// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reading, writing and converting checkpoints.

pub(crate) mod checkpoint;
mod convert;
mod progress;
mod writer;

use pyo3::prelude::*;

pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<checkpoint::Checkpoint>()?;
    m.add_class::<writer::FileWriter>()?;
    m.add_class::<writer::Fingerprint>()?;
    m.add_class::<progress::Progress>()?;
    m.add_function(wrap_pyfunction!(convert::compact, m)?)?;
    m.add_function(wrap_pyfunction!(convert::convert, m)?)?;
    m.add_function(wrap_pyfunction!(convert::main, m)?)?;
    Ok(())
}
