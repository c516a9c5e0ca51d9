// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fuzzes every parser with libFuzzer. Sanitizers are off, because they need nightly Rust. In the
//! parsers, only the `simd` module of ts-format has unsafe code.

use std::fs;
use std::process::Command;

use crate::run::{Result, cargo, output, root, run};

/// Fuzzes each target for `seconds`.
///
/// # Errors
/// Returns an error at the first crash. The input that caused the crash is in fuzz/artifacts. Also
/// returns an error if cargo-fuzz cannot be installed or the C++ compiler is missing.
pub(crate) fn all(seconds: u64) -> Result<()> {
    let tools = root().join("target/tools");
    let fuzz = tools.join("bin/cargo-fuzz");
    if !fuzz.exists() {
        run(cargo().args(["install", "cargo-fuzz", "--locked", "--quiet", "--root"]).arg(&tools))?;
    }
    if output(Command::new("c++").arg("--version")).is_err() {
        return Err("cannot run c++, which libFuzzer needs; run `apt-get install g++`".into());
    }
    for target in targets()? {
        println!("\n== {target}, {seconds} s");
        let corpus = root().join("fuzz/corpus").join(&target);
        fs::create_dir_all(&corpus)
            .map_err(|e| format!("cannot create {}: {e}", corpus.display()))?;
        let mut command = Command::new(&fuzz);
        command
            .current_dir(root())
            .args(["fuzz", "run", "--sanitizer", "none", &target])
            .arg(&corpus);
        command.arg(root().join("fuzz/seeds").join(&target));
        command.args([
            "--",
            &format!("-max_total_time={seconds}"),
            "-max_len=4096",
            "-verbosity=0",
        ]);
        run(command.arg("-print_final_stats=1"))?;
    }
    Ok(())
}

/// Returns the names of all fuzz targets, sorted.
fn targets() -> Result<Vec<String>> {
    let directory = root().join("fuzz/fuzz_targets");
    let files = fs::read_dir(&directory)
        .map_err(|e| format!("cannot list {}: {e}", directory.display()))?;
    let stem = |entry: fs::DirEntry| {
        entry.path().file_stem().map(|stem| stem.to_string_lossy().into_owned())
    };
    let mut names: Vec<String> = files.filter_map(|entry| stem(entry.ok()?)).collect();
    names.sort();
    Ok(names)
}
