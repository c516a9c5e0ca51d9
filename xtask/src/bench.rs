// SPDX-License-Identifier: MIT OR Apache-2.0
//! Benchmarks: of parts by criterion, of wholes by the scripts in benches/python.

use crate::python;
use crate::run::{self, Result, cargo};

pub(crate) fn run_script(name: &str) -> Result<()> {
    let venv = python::prepared()?;
    run::run(venv.python().arg(format!("benches/python/{name}.py")))
}

pub(crate) fn run_parts() -> Result<()> {
    run::run(cargo().args(["bench", "--package", "benches"]))
}

/// Every criterion benchmark, once, to see that it runs.
pub(crate) fn smoke() -> Result<()> {
    run::run(cargo().args(["bench", "--package", "benches", "--", "--test"]))
}

pub(crate) fn run(what: &str) -> Result<()> {
    match what {
        "parts" => run_parts(),
        "peak" | "llama" | "storage" => run_script(what),
        _ => Err(format!("no benchmark {what}: parts, peak, llama or storage")),
    }
}
