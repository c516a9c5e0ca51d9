// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program `tensorstream`; [`tensorstream::cli`] is what it does.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(tensorstream::cli::run(std::env::args_os(), &mut || false))
}
