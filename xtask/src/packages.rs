// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packages the crates as for a release, compiles each package from its own archive, and runs
//! programs that depend on the archives only.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::run::{Result, cargo, output, root, run};

/// What the description of each of our packages has, so that a package of others is recognized.
const OURS: &str = "TensorStream";

/// Packages all crates that are published, and compiles each one from its archive, in the order of
/// their dependencies. First checks that their names on the registry are not those of others.
///
/// # Errors
/// Returns an error if a name belongs to others, or a package does not compile without warnings.
pub(crate) fn verify() -> Result<()> {
    let names = published()?;
    let taken = taken(&names)?;
    if !taken.is_empty() {
        return Err(format!("the registry has packages of others with these names: {taken:?}"));
    }
    let mut package = cargo();
    package.args(["package", "--locked", "--allow-dirty"]);
    package.args(names.iter().flat_map(|name| ["--package", name]));
    // An archive has no profiles. With these, it shares dependencies with the tests of the
    // workspace.
    let done = package.env("CARGO_PROFILE_DEV_DEBUG", "false").output();
    let done = done.map_err(|e| format!("cannot start cargo package: {e}"))?;
    let said = String::from_utf8_lossy(&done.stderr);
    // Cargo says "generated 1 warning" of a crate.
    let warned = said.lines().any(|line| line.contains(" generated ") && line.contains("warning"));
    if !done.status.success() || warned {
        return Err(format!("a package does not compile without warnings:\n{said}"));
    }
    println!("{} packages compile from their archives", names.len());
    Ok(())
}

/// The package of crates/ts-candle, which is not in the workspace, and the program that uses it.
const CANDLE: (&str, &str) = ("tensorstream-candle", "candle_llama");

/// Packages all crates, and runs each program of examples/rust with the unpacked archives instead
/// of the packages of the registry. Prints the output of each program, which is a line. The program
/// that compiles candle is the last one.
///
/// # Errors
/// Returns an error if a crate cannot be packaged, or lists the programs that fail or
/// do not compile without warnings.
pub(crate) fn programs() -> Result<()> {
    let mut names = published()?;
    let mut package = cargo();
    package.args(["package", "--quiet", "--locked", "--allow-dirty", "--no-verify"]);
    run(package.args(names.iter().flat_map(|name| ["--package", name])))?;
    // What a lock file lists has to be on the registry.
    let mut package = cargo();
    package.args(["package", "--quiet", "--allow-dirty", "--no-verify", "--exclude-lockfile"]);
    package.args(["--manifest-path", "crates/ts-candle/Cargo.toml", "--target-dir", "target"]);
    run(&mut package)?;
    names.push(CANDLE.0.into());

    let unpacked = root().join("target/programs");
    let _ = fs::remove_dir_all(&unpacked);
    fs::create_dir_all(&unpacked)
        .map_err(|e| format!("cannot create {}: {e}", unpacked.display()))?;
    let patches: Vec<_> =
        names.iter().map(|name| unpack(name, &unpacked)).collect::<Result<_>>()?;
    let programs = root().join("examples/rust");
    run(cargo().current_dir(&programs).args(["fmt", "--check"]))?;
    let mut all = members(&programs)?;
    all.sort_by_key(|program| program == CANDLE.1);
    let mut failed = Vec::new();
    for program in &all {
        let mut command = cargo();
        command.current_dir(&programs).args(["run", "--quiet", "--locked", "--package", program]);
        command.args(patches.iter().flat_map(|patch| ["--config", patch]));
        command.arg("--target-dir").arg(root().join("target"));
        let done = command.output().map_err(|e| format!("cannot start cargo: {e}"))?;
        print!("{program}: {}", String::from_utf8_lossy(&done.stdout));
        // Errors, panics and warnings.
        let said = String::from_utf8_lossy(&done.stderr);
        if !done.status.success() || !said.is_empty() {
            println!("{}\n{said}", done.status);
            failed.push(program);
        }
    }
    if !failed.is_empty() {
        return Err(format!("programs of examples/rust failed: {failed:?}"));
    }
    println!("{} programs run with the archives of {} packages", all.len(), names.len());
    Ok(())
}

/// Unpacks the archive of a package into a directory. Returns the configuration by which cargo uses
/// it instead of the package of the registry.
fn unpack(name: &str, into: &Path) -> Result<String> {
    let directory = format!("{name}-{}", env!("CARGO_PKG_VERSION"));
    let mut tar = Command::new("tar");
    // The files get the present time, so that cargo compiles them again.
    tar.current_dir(into)
        .arg("-xmzf")
        .arg(root().join(format!("target/package/{directory}.crate")));
    run(&mut tar)?;
    let path = into.join(directory);
    Ok(format!("patch.crates-io.{name}.path={:?}", path.display().to_string()))
}

/// The names of the packages that are published.
fn published() -> Result<Vec<String>> {
    let packages = packages(&root())?;
    let names = packages.iter().filter(|package| package["publish"].is_null());
    Ok(names.filter_map(|package| package["name"].as_str().map(String::from)).collect())
}

/// The names of the packages of the workspace in a directory.
fn members(directory: &Path) -> Result<Vec<String>> {
    let packages = packages(directory)?;
    Ok(packages.iter().filter_map(|package| package["name"].as_str().map(String::from)).collect())
}

/// Returns cargo's metadata of the packages of the workspace in a directory.
fn packages(directory: &Path) -> Result<Vec<Value>> {
    let mut metadata = cargo();
    metadata.current_dir(directory).args(["metadata", "--format-version", "1", "--no-deps"]);
    let metadata: Value = serde_json::from_str(&output(&mut metadata)?)
        .map_err(|e| format!("cargo metadata printed invalid JSON: {e}"))?;
    Ok(metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?.clone())
}

/// The names that the registry has with another description than ours. Prints which names could not
/// be looked up.
fn taken(names: &[String]) -> Result<Vec<&String>> {
    let mut found = Vec::new();
    for name in names {
        let mut info = Command::new(cargo().get_program());
        // Inside of the workspace, this would find our own packages.
        info.current_dir(std::env::temp_dir()).args(["info", "--color", "never", name]);
        let info = info.output().map_err(|e| format!("cannot start cargo info: {e}"))?;
        let said = String::from_utf8_lossy(&info.stderr);
        if info.status.success() {
            if !String::from_utf8_lossy(&info.stdout).contains(OURS) {
                found.push(name);
            }
        } else if !said.contains("could not find") {
            println!("SKIPPED: the name {name}: the registry cannot be asked: {}", said.trim());
        }
    }
    Ok(found)
}
