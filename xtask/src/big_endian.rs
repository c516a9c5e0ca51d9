// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests the file format on an emulated big-endian machine (s390x). QEMU and the compilers run in a
//! Debian system that is installed under target/.

use std::path::Path;
use std::process::Command;

use crate::run::{Result, output, root, run};

const DEBIAN: &str = "http://deb.debian.org/debian";
/// The packages to install. Rust comes from Debian, because it must match Debian's standard library
/// for s390x.
const PACKAGES: &str = "cargo rustc gcc libc6-dev gcc-s390x-linux-gnu libc6-dev-s390x-cross \
                        libstd-rust-dev:s390x qemu-user ca-certificates";
/// The shell command that runs the tests inside the Debian system, where the sources are in /work.
const TEST: &str = "cd /work && \
    export CARGO_NET_OFFLINE=true CC_s390x_unknown_linux_gnu=s390x-linux-gnu-gcc && \
    export CARGO_TARGET_S390X_UNKNOWN_LINUX_GNU_LINKER=s390x-linux-gnu-gcc && \
    export CARGO_TARGET_S390X_UNKNOWN_LINUX_GNU_RUNNER='qemu-s390x -L /usr/s390x-linux-gnu' && \
    cargo test --release --target s390x-unknown-linux-gnu --package tensorstream-format --tests";

/// Runs the tests of ts-format on s390x. The first call installs the Debian system, which takes
/// minutes.
///
/// # Errors
/// Returns an error if debootstrap is missing, a command fails, or a test fails.
pub(crate) fn test() -> Result<()> {
    if output(Command::new("debootstrap").arg("--version")).is_err() {
        return Err("cannot run debootstrap; run `apt-get install debootstrap` as root".into());
    }
    let debian = root().join("target/big-endian");
    if !debian.join("usr/bin/qemu-s390x").exists() {
        run(Command::new("debootstrap")
            .args(["--variant=minbase", "sid"])
            .arg(&debian)
            .arg(DEBIAN))?;
        // The Debian system needs this machine's DNS and apt settings to reach the package servers.
        copy(Path::new("/etc/resolv.conf"), &debian.join("etc/resolv.conf"))?;
        copy(Path::new("/etc/apt/apt.conf.d/."), &debian.join("etc/apt/apt.conf.d/"))?;
        run_inside(&debian, "dpkg --add-architecture s390x && apt-get update -q")?;
        run_inside(&debian, &format!("apt-get install -q -y --no-install-recommends {PACKAGES}"))?;
    }
    let (work, home) = (debian.join("work"), debian.join("root/.cargo"));
    for directory in [&work, &home] {
        std::fs::create_dir_all(directory)
            .map_err(|e| format!("cannot create {}: {e}", directory.display()))?;
    }
    let pack = format!("git ls-files -z | xargs -0 tar c | tar x -C '{}'", work.display());
    run(Command::new("sh").current_dir(root()).args(["-c", &pack]))?;
    let cargo = std::env::var_os("CARGO_HOME").map_or_else(
        || Path::new(&std::env::var_os("HOME").unwrap_or_default()).join(".cargo"),
        Into::into,
    );
    run(Command::new("cargo").current_dir(root()).args(["fetch", "--quiet", "--locked"]))?;
    copy(&cargo.join("registry"), &home)?;
    run_inside(&debian, TEST)
}

fn run_inside(debian: &Path, script: &str) -> Result<()> {
    run(Command::new("chroot").arg(debian).args(["sh", "-c", script]))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    run(Command::new("cp").arg("-r").arg(from).arg(to))
}
