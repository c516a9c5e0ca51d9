// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tests of crates with unsafe code that needs no kernel's help, under valgrind's memcheck: miri is no part of the stable
//! toolchain, and neither knows io_uring.

use std::process::Command;

use serde_json::Value;

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
    Ok(())
}
