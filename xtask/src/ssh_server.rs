// SPDX-License-Identifier: MIT OR Apache-2.0
//! The OpenSSH server that the tests of the provider `ssh` start with their own configuration.

use std::path::Path;
use std::process::Command;

use crate::run::{Result, output, run};

const PACKAGE: &str = "openssh-server";

/// Installs the server in a container. Elsewhere, the package would also start a server for
/// everybody, so this only says what is missing; the tests that need it are then skipped.
pub(crate) fn prepare() -> Result<()> {
    if Path::new("/usr/sbin/sshd").exists() {
        return Ok(());
    }
    let is_root = output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0");
    let in_container =
        ["/.dockerenv", "/run/.containerenv"].iter().any(|marker| Path::new(marker).exists());
    let installed = is_root && in_container && (install().is_ok() || update().is_ok());
    if !installed {
        println!("SKIPPED: tests of ssh: there is no server; run `apt-get install {PACKAGE}`");
    }
    Ok(())
}

fn install() -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(["install", "--quiet", "--yes", "--no-install-recommends", PACKAGE]);
    run(command.env("DEBIAN_FRONTEND", "noninteractive"))
}

/// Updates the lists of packages, and installs the server.
fn update() -> Result<()> {
    run(Command::new("apt-get").args(["update", "--quiet"]))?;
    install()
}
