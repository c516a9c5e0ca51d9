// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fuzzing of every parser, by libFuzzer. Stable Rust is enough: the crate has no unsafe code that
//! a sanitizer would watch.

use std::fs;
use std::process::Command;

use crate::run::{Result, cargo, output, root, run};

/// Runs each target for some seconds. A crash fails, and its input stays in fuzz/artifacts.
pub(crate) fn all(seconds: u64) -> Result<()> {
    let tools = root().join("target/tools");
    let fuzz = tools.join("bin/cargo-fuzz");
    if !fuzz.exists() {
        run(cargo().args(["install", "cargo-fuzz", "--locked", "--quiet", "--root"]).arg(&tools))?;
    }
    if output(Command::new("c++").arg("--version")).is_err() {
        return Err("libFuzzer needs a C++ compiler, as c++".into());
    }
    for target in targets()? {
        println!("\n== {target}, {seconds} s");
        let corpus = root().join("fuzz/corpus").join(&target);
        fs::create_dir_all(&corpus).map_err(|e| format!("{}: {e}", corpus.display()))?;
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

fn targets() -> Result<Vec<String>> {
    let directory = root().join("fuzz/fuzz_targets");
    let files = fs::read_dir(&directory).map_err(|e| format!("{}: {e}", directory.display()))?;
    let stem = |entry: fs::DirEntry| {
        entry.path().file_stem().map(|stem| stem.to_string_lossy().into_owned())
    };
    let mut names: Vec<String> = files.filter_map(|entry| stem(entry.ok()?)).collect();
    names.sort();
    Ok(names)
}
