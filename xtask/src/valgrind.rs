// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs tests under valgrind's memcheck: those of ts-streams and ts-pool, and a Python script that
//! drops tensors. The unsafe code of ts-io is not tested here, because memcheck does not support
//! io_uring. Miri does not support io_uring either, and needs nightly Rust.

use std::process::Command;

use serde_json::Value;

use crate::python::{self, Venv};
use crate::run::{self, Result, cargo, output};

/// The crates whose tests run under memcheck.
const PACKAGES: [&str; 2] = ["tensorstream-streams", "tensorstream-pool"];

/// What memcheck reports about other code and must not.
const SUPPRESSIONS: &str = "xtask/src/valgrind.supp";

/// Runs the tests of [`PACKAGES`] and the Python script under memcheck.
///
/// # Errors
/// Returns an error if valgrind is missing, if it finds an error in our code, or if it misses an
/// intentional double free.
pub(crate) fn memcheck() -> Result<()> {
    let found = Command::new("valgrind").arg("--version").output();
    found.map_err(|_| "cannot start valgrind; run `apt-get install valgrind`")?;
    let mut build = cargo();
    build.args(["test", "--no-run", "--message-format", "json"]);
    build.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    build.args(["--features", "tensorstream-streams/cuda,tensorstream-streams/runtime"]);
    let lines = output(&mut build)?;
    let messages = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let tests: Vec<String> =
        messages.filter_map(|message| message["executable"].as_str().map(String::from)).collect();
    if tests.is_empty() {
        return Err("cargo built no test programs".into());
    }
    for test in &tests {
        // No leak check: the test harness does not free its own memory. Tests on the emulated CUDA
        // driver run in child processes.
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--quiet", "--error-exitcode=9", "--leak-check=no"]);
        valgrind.arg(format!("--suppressions={}", run::root().join(SUPPRESSIONS).display()));
        valgrind
            .args(["--trace-children=yes", "--trace-children-skip=*rustc*,*/cc,*/ld"])
            .arg(test);
        // Property tests run only eight cases, because valgrind is slow.
        run::run(valgrind.env("PROPTEST_CASES", "8"))?;
    }
    println!("{} test programs without errors", tests.len());
    let venv = python::prepared()?;
    let found = python_errors(&venv, &[])?;
    if let Some(first) = found.first() {
        return Err(format!(
            "valgrind found errors while Python dropped tensors ({} in total); the first \
             is:\n{first}",
            found.len()
        ));
    }
    if python_errors(&venv, &["twice"])?.is_empty() {
        return Err("valgrind did not find the intentional double free in deleters.py".into());
    }
    println!("tensors dropped in Python in every order: no errors in our code");
    Ok(())
}

/// Runs deleters.py under memcheck and returns the errors that involve our native module. Errors of
/// the interpreter and the loader are ignored.
fn python_errors(venv: &Venv, arguments: &[&str]) -> Result<Vec<String>> {
    let log = run::root().join("target/valgrind.log");
    let mut valgrind = Command::new("valgrind");
    valgrind.arg(format!("--log-file={}", log.display())).arg(venv.python().get_program());
    valgrind.arg("crates/ts-py/tests/deleters.py").args(arguments).env("PYTHONMALLOC", "malloc");
    run::run(&mut valgrind)?;
    let text = std::fs::read_to_string(&log)
        .map_err(|error| format!("cannot read {}: {error}", log.display()))?;
    // Each line starts with the process number. Lines with no other text separate the errors.
    let without_number =
        |line: &str| line.split_once("== ").map(|(_, rest)| rest.to_string()).unwrap_or_default();
    let lines: Vec<String> = text.lines().map(without_number).collect();
    let blocks = lines.split(|line| line.trim().is_empty()).map(|block| block.join("\n"));
    Ok(blocks.filter(|block| block.contains("_native")).collect())
}
