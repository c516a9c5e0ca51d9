// SPDX-License-Identifier: MIT OR Apache-2.0
//! Benchmarks: of parts by criterion, of wholes by the scripts in benches/python.

use crate::python::{self, Venv};
use crate::run::{self, Result, cargo};

/// Runs one of the scripts, on some of its cases or all.
pub(crate) fn run_script(venv: &Venv, name: &str, cases: &[&str]) -> Result<()> {
    run::run(venv.python().arg(format!("benches/python/{name}.py")).args(cases))
}

fn run_criterion(name: &str) -> Result<()> {
    run::run(cargo().args(["bench", "--package", "benches", "--bench", name]))
}

/// Every criterion benchmark, once, to see that it runs.
pub(crate) fn smoke() -> Result<()> {
    run::run(cargo().args(["bench", "--package", "benches", "--", "--test"]))
}

pub(crate) fn run(what: &str) -> Result<()> {
    match what {
        "parts" | "memory" | "streams" | "wire" => run_criterion(what),
        "broadcast" | "caps" | "codecs" | "exact" | "load" | "overhead" | "peak" | "llama"
        | "serve" | "sessions" | "storage" => run_script(&python::prepared()?, what, &[]),
        "io" => run_script(&python::prepared()?, "backends", &[]),
        "remote" => {
            let venv = python::prepared()?;
            run::run(venv.python().args(["-m", "pip", "install", "--quiet", "ray"]))?;
            // mycelya-torch is measured where somebody has built it (pip install
            // --no-build-isolation mycelya-torch).
            run_script(&venv, "remote", &["--peers"])
        }
        "wire-peers" => {
            // Nobody else's dependencies.
            let venv = python::prepared()?;
            run::run(
                venv.python()
                    .args(["-m", "pip", "install", "--quiet", "pyarrow", "grpcio", "pyzmq"]),
            )?;
            run_script(&venv, "wire", &[])?;
            println!("\nneither end kept on a core:");
            run_script(&venv, "wire", &["--unpinned"])
        }
        _ => Err(format!(
            "no benchmark {what}: parts, memory, streams, wire, wire-peers, serve, broadcast, \
             caps, codecs, exact, io, llama, load, overhead, peak, remote, sessions or storage"
        )),
    }
}
