// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tests of crates with unsafe code that needs no kernel's help, and Python's tensors, under
//! valgrind's memcheck: miri is no part of the stable toolchain, and neither knows io_uring.

use std::process::Command;

use serde_json::Value;

use crate::python::{self, Venv};
use crate::run::{self, Result, cargo, output};

const PACKAGES: [&str; 2] = ["ts-streams", "ts-pool"];

pub(crate) fn memcheck() -> Result<()> {
    let found = Command::new("valgrind").arg("--version").output();
    found.map_err(|_| "this needs valgrind: apt-get install valgrind")?;
    let mut build = cargo();
    build.args(["test", "--no-run", "--message-format", "json"]);
    build.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    let lines = output(&mut build)?;
    let messages = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let tests: Vec<String> =
        messages.filter_map(|message| message["executable"].as_str().map(String::from)).collect();
    if tests.is_empty() {
        return Err("there are no tests to run".into());
    }
    for test in &tests {
        // The test harness keeps its own memory to the end.
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--quiet", "--error-exitcode=9", "--leak-check=no"]).arg(test);
        // Those of GPUs start processes, of which valgrind sees nothing; a few random programs do.
        run::run(valgrind.env("PROPTEST_CASES", "8"))?;
    }
    println!("{} test programs, no error", tests.len());
    let venv = python::prepared()?;
    let found = python_errors(&venv, &[])?;
    if let Some(first) = found.first() {
        return Err(format!(
            "tensors that are dropped in Python: {} errors, the first:\n{first}",
            found.len()
        ));
    }
    if python_errors(&venv, &["twice"])?.is_empty() {
        return Err("memory that is given back twice was not found".into());
    }
    println!("tensors dropped in Python in every order: no error of ours");
    Ok(())
}

/// What is found of this package's in a run of the script: the interpreter and the loader have
/// errors of their own.
fn python_errors(venv: &Venv, arguments: &[&str]) -> Result<Vec<String>> {
    let log = run::root().join("target/valgrind.log");
    let mut valgrind = Command::new("valgrind");
    valgrind.arg(format!("--log-file={}", log.display())).arg(venv.python().get_program());
    valgrind.arg("crates/ts-py/tests/deleters.py").args(arguments).env("PYTHONMALLOC", "malloc");
    run::run(&mut valgrind)?;
    let text =
        std::fs::read_to_string(&log).map_err(|error| format!("{}: {error}", log.display()))?;
    // An error's lines stand between lines that are empty behind the number of the process.
    let without_number =
        |line: &str| line.split_once("== ").map(|(_, rest)| rest.to_string()).unwrap_or_default();
    let lines: Vec<String> = text.lines().map(without_number).collect();
    let blocks = lines.split(|line| line.trim().is_empty()).map(|block| block.join("\n"));
    Ok(blocks.filter(|block| block.contains("_native")).collect())
}
