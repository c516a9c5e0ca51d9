// SPDX-License-Identifier: MIT OR Apache-2.0
//! The crate ts-candle, a workspace of its own because candle takes minutes to compile.

use std::process::Command;

use crate::run::{Result, cargo, root, run};

/// Returns `cargo` for the crate, with outputs in `target/candle`.
fn candle() -> Command {
    let mut command = cargo();
    command.current_dir(root().join("crates/ts-candle"));
    command.env("CARGO_TARGET_DIR", root().join("target/candle"));
    command
}

/// Checks the format, lints, runs all tests and builds the documentation.
///
/// # Errors
/// Returns an error if any of them fails.
pub(crate) fn check() -> Result<()> {
    run(candle().args(["fmt", "--", "--check"]).arg("--config-path").arg(root()))?;
    let clippy = ["clippy", "--locked", "--all-targets", "--", "-D", "warnings"];
    run(candle().args(clippy))?;
    run(candle().args(["test", "--locked"]))?;
    run(candle().args(["doc", "--locked", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))
}

/// Compiles the example `llama` to `target/candle/release/examples/llama`.
///
/// # Errors
/// Returns an error if it does not compile.
pub(crate) fn build_llama() -> Result<()> {
    run(candle().args(["build", "--locked", "--release", "--example", "llama"]))
}
