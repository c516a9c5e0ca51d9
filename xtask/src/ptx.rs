// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles kernels for GPUs to PTX. No GPU and no CUDA toolkit is needed.

use std::process::Command;

use crate::run::{Result, root, run};

/// The compiler and the assembler, from PyPI.
const PACKAGES: [&str; 2] = ["nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-nvcc-cu12==12.9.86"];
const KERNELS: &str = "crates/ts-orchestrator/src/split_decoder/kernels";

/// Compiles the kernels that decode units.
///
/// # Errors
/// Returns an error if a command fails.
pub(crate) fn compile() -> Result<()> {
    let venv = root().join("target/ptx");
    let python = venv.join("bin/python");
    if !python.exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    }
    run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES))?;
    run(Command::new(&python).current_dir(root()).args([
        "xtask/src/ptx.py",
        &format!("{KERNELS}.cu"),
        &format!("{KERNELS}.ptx"),
    ]))
}
