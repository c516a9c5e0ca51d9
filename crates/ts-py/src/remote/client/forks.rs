// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tells whether this process is a forked child, which cannot use the sessions of its parent.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

static FORKED: AtomicBool = AtomicBool::new(false);

/// Marks this process as a forked child.
#[pyfunction]
pub(crate) fn remote_forked() {
    FORKED.store(true, Ordering::Relaxed);
}

pub(super) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}
