// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks dependencies, licences and line lengths.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::run::{Result, cargo, output, root};

/// The licences that dependencies may have. If a package offers a choice of licences, one of them
/// must be in this list.
const LICENCES: [&str; 10] = [
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    // webpki-root-certs has this licence. It contains only data.
    "CDLA-Permissive-2.0",
    "ISC",
    "Unlicense",
    "Unicode-3.0",
    "Zlib",
];

/// The packages that we depend on in two versions, with the reason. Remove an entry when only one
/// version is left.
const KNOWN_DUPLICATES: [(&str, &str); 4] = [
    ("crypto-common", "object_store uses crc-fast, with digest 0.10, and md-5, with digest 0.11"),
    ("digest", "the same as crypto-common"),
    ("getrandom", "ring uses 0.2, object_store's rand uses 0.4"),
    ("syn", "build-time macros: tracing-attributes uses 2, async-trait uses 3"),
];

/// The members of the workspace that each member may depend on, as in ARCHITECTURE.md, by the names
/// of their folders.
const EDGES: [(&str, &[&str]); 11] = [
    ("ts-format", &[]),
    ("ts-streams", &[]),
    ("ts-pool", &["ts-streams"]),
    ("ts-io", &["ts-pool"]),
    ("ts-remote", &["ts-format", "ts-pool"]),
    ("ts-exec", &["ts-format", "ts-remote"]),
    ("ts-orchestrator", &["ts-format", "ts-io", "ts-streams", "ts-pool"]),
    (
        "tensorstream",
        &["ts-exec", "ts-format", "ts-io", "ts-orchestrator", "ts-pool", "ts-remote", "ts-streams"],
    ),
    ("ts-py", &["tensorstream"]),
    ("benches", &["tensorstream"]),
    ("xtask", &[]),
];

/// Checks the licences of all packages and the dependencies between members. Also checks that only
/// known duplicates have several versions, and that the library without features does not depend on
/// certain packages.
///
/// # Errors
/// Returns an error that lists all violations.
pub(crate) fn dependencies() -> Result<()> {
    let text = output(cargo().args(["metadata", "--format-version", "1", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&text)
        .map_err(|e| format!("cargo metadata printed invalid JSON: {e}"))?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    let mut wrong = licences(packages);
    wrong.extend(edges(packages));
    wrong.extend(duplicates()?);
    wrong.extend(minimal()?);
    if wrong.is_empty() {
        println!(
            "{} packages: licences, dependencies between crates and versions are allowed",
            packages.len()
        );
        return Ok(());
    }
    Err(wrong.join("\n  "))
}

/// Checks the packages against the database of security advisories, with cargo-deny. Prints that
/// they are not checked where cargo-deny or the database cannot be had.
///
/// # Errors
/// Returns an error if an advisory applies, or cargo-deny cannot be started.
pub(crate) fn advisories() -> Result<()> {
    let refused = |command: &mut Command| {
        let output = command.output().map_err(|e| format!("cannot start cargo deny: {e}"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok::<_, String>((!output.status.success()).then_some(said))
    };
    if refused(cargo().args(["deny", "--version"]))?.is_some() {
        println!("SKIPPED: advisories: cargo-deny is not installed (`cargo install cargo-deny`)");
        return Ok(());
    }
    match refused(cargo().args(["deny", "check", "advisories"]))? {
        None => println!("no security advisory applies to a package"),
        Some(said) if said.contains("advisory database") && said.contains("fetch") => {
            println!("SKIPPED: advisories: their database cannot be had here: {}", said.trim());
        }
        Some(said) => return Err(format!("security advisories apply:\n{said}")),
    }
    Ok(())
}

/// The maximum length of a line, in characters. Table rows and lines with a URL may be longer.
const COLUMNS: usize = 100;

/// Checks that no line of a tracked source file or page is longer than [`COLUMNS`].
///
/// # Errors
/// Returns an error that lists all longer lines.
pub(crate) fn lines() -> Result<()> {
    let mut git = Command::new("git");
    let files =
        output(git.current_dir(root()).args(["ls-files", "*.rs", "*.py", "*.pyi", "*.md"]))?;
    let mut wrong = Vec::new();
    for path in files.lines() {
        let text = std::fs::read_to_string(root().join(path))
            .map_err(|e| format!("cannot read {path}: {e}"))?;
        for (number, line) in text.lines().enumerate() {
            let row = line.trim_start().trim_start_matches("//!").trim_start_matches("///");
            let exempt = row.trim_start().starts_with('|') || line.contains("https://");
            let columns = line.chars().count();
            if !exempt && columns > COLUMNS {
                wrong.push(format!(
                    "{path}:{}: line too long: expected at most {COLUMNS} columns, got {columns}",
                    number + 1
                ));
            }
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n  ")) }
}

fn licences(packages: &[Value]) -> Vec<String> {
    let refused = |package: &&Value| !package["license"].as_str().is_some_and(allowed);
    let said = |package: &Value| {
        format!(
            "{}: licence {} is not allowed; see LICENCES in xtask/src/check.rs",
            package["name"], package["license"]
        )
    };
    packages.iter().filter(refused).map(said).collect()
}

/// Returns whether a licence expression is allowed: [`LICENCES`] must contain an alternative of
/// each operand of AND.
fn allowed(expression: &str) -> bool {
    let plain = expression.replace(['(', ')'], "").replace('/', " OR ");
    plain.split(" AND ").all(|part| part.split(" OR ").any(|one| LICENCES.contains(&one.trim())))
}

fn edges(packages: &[Value]) -> Vec<String> {
    let members: BTreeMap<&str, &[&str]> = EDGES.into_iter().collect();
    let mut wrong = Vec::new();
    for package in packages.iter().filter(|p| p["source"].is_null()) {
        let manifest = package["manifest_path"].as_str().unwrap_or_default();
        let name = Path::new(manifest).parent().map_or("", folder);
        let Some(may_use) = members.get(name) else {
            wrong.push(format!(
                "{name} is not in EDGES of xtask/src/check.rs; add it there and to ARCHITECTURE.md"
            ));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let Some(path) = dependency["path"].as_str() else { continue };
            let used = folder(Path::new(path));
            if !may_use.contains(&used) {
                wrong.push(format!(
                    "{name} must not depend on {used}; see EDGES in xtask/src/check.rs"
                ));
            }
        }
    }
    wrong
}

/// The name of a folder.
fn folder(path: &Path) -> &str {
    path.file_name().and_then(OsStr::to_str).unwrap_or_default()
}

fn duplicates() -> Result<Vec<String>> {
    let tree = output(cargo().args([
        "tree",
        "--workspace",
        "--duplicates",
        "--edges",
        "normal",
        "--depth",
        "0",
        "--prefix",
        "none",
        "--locked",
    ]))?;
    // A single version of a package can be listed twice, once for each set of features.
    let named: BTreeSet<(&str, &str)> =
        tree.lines().filter_map(|line| line.split_once(' ')).collect();
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, rest) in named {
        versions.entry(name).or_default().insert(rest.split(' ').next().unwrap_or(rest));
    }
    versions.retain(|_, versions| versions.len() > 1);
    let known: BTreeMap<&str, &str> = KNOWN_DUPLICATES.into_iter().collect();
    let unknown = versions.iter().filter(|(name, _)| !known.contains_key(*name));
    let mut wrong: Vec<_> = unknown
        .map(|(name, versions)| {
            format!(
                "{name} has several versions: {versions:?} (expected one); use one version, or \
                 add {name} to KNOWN_DUPLICATES"
            )
        })
        .collect();
    let gone = known.keys().filter(|name| !versions.contains_key(*name));
    wrong.extend(
        gone.map(|name| format!("{name} is not duplicated; remove it from KNOWN_DUPLICATES")),
    );
    Ok(wrong)
}

/// Checks that the library without features does not depend on packages that only the command line
/// or object storage needs.
fn minimal() -> Result<Vec<String>> {
    let arguments =
        ["tree", "--package", "tensorstream", "--no-default-features", "--edges", "normal"];
    let tree = output(cargo().args(arguments).args(["--prefix", "none", "--locked"]))?;
    let unwanted =
        ["clap ", "clap_complete ", "indicatif ", "object_store ", "signal-hook ", "tokio "];
    let found = tree.lines().filter(|line| unwanted.iter().any(|name| line.starts_with(name)));
    Ok(found
        .map(|line| format!("without features, tensorstream must not depend on {line}"))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::allowed;

    #[test]
    fn licence_expressions_are_parsed() {
        for yes in [
            "MIT",
            "MIT OR Apache-2.0",
            "MIT/Apache-2.0",
            "(MIT OR GPL-3.0) AND Unicode-3.0",
            "GPL-2.0 OR ISC",
        ] {
            assert!(allowed(yes), "{yes}");
        }
        for no in ["GPL-3.0", "MIT AND GPL-3.0", "AGPL-3.0 OR SSPL-1.0", ""] {
            assert!(!allowed(no), "{no}");
        }
    }
}
