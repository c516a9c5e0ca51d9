// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoints: reading, writing and converting their files.

mod cached;
pub(crate) mod checkpoint;
mod conversion;
mod convert;
mod fingerprint;
mod metadata;
mod passing;
mod path;
mod progress;
mod writer;

use pyo3::prelude::*;

pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<checkpoint::Checkpoint>()?;
    m.add_class::<fingerprint::Fingerprint>()?;
    m.add_class::<progress::Progress>()?;
    m.add_class::<writer::FileWriter>()?;
    m.add_class::<conversion::Conversion>()?;
    m.add_class::<passing::PassedSource>()?;
    #[cfg(unix)]
    {
        m.add_class::<passing::unix::Relay>()?;
        m.add_class::<passing::unix::RelayClient>()?;
        m.add_function(wrap_pyfunction!(passing::unix::open_file, m)?)?;
    }
    m.add_function(wrap_pyfunction!(cached::cache_directory, m)?)?;
    m.add_function(wrap_pyfunction!(cached::read_cached, m)?)?;
    m.add_function(wrap_pyfunction!(cached::write_cached, m)?)?;
    m.add_function(wrap_pyfunction!(cached::remove_unfinished, m)?)?;
    m.add_function(wrap_pyfunction!(passing::checkpoint_file, m)?)?;
    m.add_function(wrap_pyfunction!(checkpoint::trim, m)?)?;
    m.add_function(wrap_pyfunction!(checkpoint::kept_bytes, m)?)?;
    m.add_function(wrap_pyfunction!(convert::compact, m)?)?;
    m.add_function(wrap_pyfunction!(convert::convert, m)?)?;
    Ok(())
}
