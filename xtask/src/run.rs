// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs other programs, and counts the tests that they run.

use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::AddAssign;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A result whose error is a message for the user.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// Returns the root directory of the repository.
pub(crate) fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask is a directory of the repository").to_path_buf()
}

/// Returns a command that runs the same `cargo` as this task, at the root of the repository.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Runs a program and waits until it exits.
///
/// # Errors
/// Returns an error if the program cannot be started or fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|e| cannot_start(command, &e))?;
    if status.success() { Ok(()) } else { Err(format!("{} failed: {status}", shown(command))) }
}

/// Runs a program and returns its standard output. Its standard error is printed.
///
/// # Errors
/// Returns an error if the program cannot be started, fails, or prints invalid UTF-8.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output =
        command.stderr(Stdio::inherit()).output().map_err(|e| cannot_start(command, &e))?;
    if !output.status.success() {
        return Err(format!("{} failed: {}", shown(command), output.status));
    }
    String::from_utf8(output.stdout)
        .map_err(|e| format!("{} printed invalid UTF-8: {e}", shown(command)))
}

/// Runs a program, prints its standard output, and passes each line to `on_line`.
///
/// # Errors
/// Returns an error if the program cannot be started or fails.
pub(crate) fn listen(command: &mut Command, mut on_line: impl FnMut(&str)) -> Result<()> {
    let mut child =
        command.stdout(Stdio::piped()).spawn().map_err(|e| cannot_start(command, &e))?;
    let stdout = child.stdout.take().expect("stdout is piped");
    for line in BufReader::new(stdout).lines().map_while(std::io::Result::ok) {
        println!("{line}");
        on_line(&line);
    }
    let status = child.wait().map_err(|e| format!("cannot wait for {}: {e}", shown(command)))?;
    if status.success() { Ok(()) } else { Err(format!("{} failed: {status}", shown(command))) }
}

/// Runs `cargo test` and counts the tests by outcome.
pub(crate) fn cargo_test(args: &[&str]) -> Result<Counts> {
    count_tests(cargo().arg("test").args(args))
}

/// Runs `cargo test` with the CUDA driver that runs on the host, which the test `emulated` of
/// ts-streams has compiled. Counts the tests by outcome. On systems other than Linux, there is no
/// such driver, and this runs nothing.
pub(crate) fn emulated(args: &[&str]) -> Result<Counts> {
    let target = std::env::var_os("CARGO_TARGET_DIR");
    let target = target.map_or_else(|| root().join("target"), PathBuf::from);
    let driver = target.join("tmp/emulated/driver");
    if cfg!(not(target_os = "linux")) {
        println!("SKIPPED: the emulated driver needs Linux");
        return Ok(Counts::default());
    }
    count_tests(cargo().arg("test").args(args).env("LD_LIBRARY_PATH", driver))
}

/// Runs the models of concurrent code. For small models, loom tries all interleavings with up to
/// three preemptions. For large models, shuttle tries many random interleavings.
///
/// Both builds use the directory target/models. Their `--cfg` flags apply to all crates. In
/// target/, such builds would force other builds to start again.
pub(crate) fn models(interleavings: u32) -> Result<Counts> {
    let common = ["--target-dir", "target/models"];
    let small =
        ["--package", "tensorstream-pool", "--package", "tensorstream-streams", "--lib", "models"];
    let large = ["--package", "tensorstream-streams", "--test", "orders"];
    let mut counts =
        count_tests(cargo().arg("test").args(common).args(small).env("RUSTFLAGS", "--cfg loom"))?;
    let mut shuttle = cargo();
    shuttle.env("RUSTFLAGS", "--cfg shuttle").env("TS_SCHEDULES", interleavings.to_string());
    counts += count_tests(shuttle.arg("test").args(common).args(large))?;
    Ok(counts)
}

/// The beginning of the line that a test prints if it finds no GPU or no stand-in. The test harness
/// counts such a test as passed.
const SKIPPED: &str = "skipped: no ";

/// Runs a `cargo test` command and counts the tests by outcome. Tests that find no device count as
/// skipped.
pub(crate) fn count_tests(command: &mut Command) -> Result<Counts> {
    let (mut counts, mut without_device) = (Counts::default(), 0);
    listen(command, |line| {
        without_device += u32::from(line.contains(SKIPPED));
        if line.starts_with("test result:") {
            counts += Counts {
                passed: number_before(line, " passed"),
                failed: number_before(line, " failed"),
                skipped: number_before(line, " ignored"),
            };
        }
    })?;
    if counts.passed == 0 {
        return Err("cargo test ran no tests".into());
    }
    counts.passed -= without_device;
    counts.skipped += without_device;
    Ok(counts)
}

/// Numbers of tests, by outcome.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) skipped: u32,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Returns the number directly before `word` in a summary line, or 0 if there is none.
pub(crate) fn number_before(line: &str, word: &str) -> u32 {
    let before = line.split(word).next().filter(|before| before.len() < line.len());
    let digits = before.and_then(|before| before.rsplit(|c: char| !c.is_ascii_digit()).next());
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// Returns all files below a directory, sorted, except compiled Python files.
pub(crate) fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(directory);
    for entry in entries.map_err(|e| format!("cannot list {}: {e}", directory.display()))? {
        let path = entry.map_err(|e| format!("cannot list {}: {e}", directory.display()))?.path();
        if path.ends_with("__pycache__") {
            continue;
        }
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn shown(command: &Command) -> String {
    let args = command.get_args().map(|arg| arg.to_string_lossy());
    let words: Vec<_> =
        std::iter::once(command.get_program().to_string_lossy()).chain(args).collect();
    words.join(" ")
}

fn cannot_start(command: &Command, error: &std::io::Error) -> String {
    format!("cannot start {}: {error}", command.get_program().to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::number_before;

    #[test]
    fn numbers_of_summary_lines_are_parsed() {
        let line = "test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured";
        assert_eq!((number_before(line, " passed"), number_before(line, " ignored")), (12, 3));
        assert_eq!(number_before("81 passed, 2 skipped in 7.1s", " skipped"), 2);
        assert_eq!(number_before("nothing", " passed"), 0);
    }
}
