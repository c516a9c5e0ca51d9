// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs benchmarks: those of single components with criterion, and the scripts in benches/python.

use crate::candle;
use crate::python::{self, Venv};
use crate::run::{self, Result, cargo};

/// Runs `benches/python/NAME.py` with these arguments.
pub(crate) fn run_script(venv: &Venv, name: &str, arguments: &[&str]) -> Result<()> {
    run::run(venv.python().arg(format!("benches/python/{name}.py")).args(arguments))
}

fn run_criterion(name: &str) -> Result<()> {
    run::run(cargo().args(["bench", "--package", "benches", "--bench", name]))
}

/// Runs each criterion benchmark once, without timing it. They are compiled as the tests of the
/// workspace are, and share their dependencies.
pub(crate) fn smoke() -> Result<()> {
    let names = ["memory", "parts", "routing", "streams", "wire"];
    let names = names.iter().flat_map(|name| ["--bench", name]);
    run::run(cargo().args(["test", "--workspace"]).args(names).args(["--", "--test"]))
}

/// Runs the benchmark of this name, as `cargo xtask bench NAME` does.
pub(crate) fn run(name: &str) -> Result<()> {
    match name {
        "parts" | "memory" | "routing" | "streams" | "wire" => run_criterion(name),
        "broadcast" | "caps" | "codecs" | "exact" | "hops" | "kills" | "load" | "lora"
        | "neighbours" | "overhead" | "peak" | "llama" | "moe" | "offload" | "pressure"
        | "serve" | "sessions" | "storage" | "split" | "throughput" | "weights" => {
            run_script(&python::optimized()?, name, &[])
        }
        "candle" => {
            let venv = python::optimized()?;
            candle::build_llama()?;
            run_script(&venv, "candle", &[])
        }
        "file-cache" => run_script(&python::optimized()?, "file_cache", &[]),
        "io" => run_script(&python::optimized()?, "backends", &[]),
        "openai" => run_script(&python::optimized()?, "openai_clients", &[]),
        "links" => run_script(&python::optimized()?, "cut_links", &[]),
        "remote" => {
            // mycelya-torch must be built by hand (pip install --no-build-isolation
            // mycelya-torch). The script measures it only if it is installed.
            run_script(&python::optimized()?, "remote", &["--peers"])
        }
        "wire-peers" => {
            let venv = python::optimized()?;
            // These packages are not in requirements-dev.txt, because only this benchmark needs
            // them.
            run::run(
                venv.python()
                    .args(["-m", "pip", "install", "--quiet", "pyarrow", "grpcio", "pyzmq"]),
            )?;
            run_script(&venv, "wire", &[])?;
            println!("\nwithout pinning the processes to cores:");
            run_script(&venv, "wire", &["--unpinned"])
        }
        _ => Err(format!(
            "unknown benchmark \"{name}\": expected parts, memory, routing, streams, wire, \
             wire-peers, serve, broadcast, candle, caps, codecs, exact, file-cache, first-pass, \
             hops, io, links, llama, load, lora, moe, neighbours, offload, openai, overhead, peak, \
             pressure, remote, sessions, split, storage, throughput or weights"
        )),
    }
}
