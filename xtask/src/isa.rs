// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the Python tests whose results depend on the instructions of the processor, with each set
//! of instructions that PyTorch, oneDNN and MKL can be limited to.

use std::fs;

use crate::python;
use crate::run::{Counts, Result};

/// The sets of instructions: the flag of /proc/cpuinfo that the processor must have, and what the
/// libraries are limited to.
const SETS: [(&str, [(&str, &str); 3]); 3] = [
    ("sse4_2", limits("default", "SSE41", "SSE4_2")),
    ("avx2", limits("avx2", "AVX2", "AVX2")),
    ("avx512f", limits("avx512", "AVX512_CORE", "AVX512")),
];

const fn limits(
    torch: &'static str,
    onednn: &'static str,
    mkl: &'static str,
) -> [(&'static str, &'static str); 3] {
    [
        ("ATEN_CPU_CAPABILITY", torch),
        ("ONEDNN_MAX_CPU_ISA", onednn),
        ("MKL_ENABLE_INSTRUCTIONS", mkl),
    ]
}

/// Tests that compare bits, or whose models are divided if products allow it.
const TESTS: [&str; 9] = [
    "tests/test_rows.py",
    "tests/test_budgets.py",
    "tests/test_exact.py",
    "tests/test_attention.py",
    "tests/test_experts.py",
    "tests/test_modules.py",
    "tests/test_conversions.py",
    "tests/test_random_models.py",
    "tests/test_remote_exact.py",
];

/// Runs the tests with each set that this processor has, and then without limits.
///
/// # Errors
/// Returns an error if a test fails with one of them. The other sets are run all the same.
pub(crate) fn test() -> Result<()> {
    let venv = python::prepared()?;
    let cpu = fs::read_to_string("/proc/cpuinfo")
        .map_err(|e| format!("cannot read /proc/cpuinfo: {e}; this task needs Linux on x86-64"))?;
    let flags = cpu.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let (mut counts, mut failed) = (Counts::default(), Vec::new());
    let all = SETS.iter().map(|(flag, limits)| (*flag, &limits[..])).chain([("all", &[][..])]);
    for (flag, limits) in all {
        if flag != "all" && !flags.split_whitespace().any(|own| own == flag) {
            println!("\n== {flag}: SKIPPED: this processor does not have it");
            continue;
        }
        println!("\n== {flag}");
        match python::test_limited(&venv, &[&TESTS[..], &python::PARALLEL].concat(), limits) {
            Ok(own) => counts += own,
            Err(error) => failed.push(format!("{flag}: {error}")),
        }
    }
    println!("{counts}");
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}
