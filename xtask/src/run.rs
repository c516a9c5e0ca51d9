// SPDX-License-Identifier: MIT OR Apache-2.0
//! Other programs: run, listened to, counted.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::ops::AddAssign;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What went wrong, in a sentence.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask lies in the repository").to_path_buf()
}

/// Cargo, at the root of the repository.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Runs a program to its end.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|e| cannot_start(command, &e))?;
    if status.success() { Ok(()) } else { Err(format!("{} ended with {status}", shown(command))) }
}

/// Runs a program to its end and returns what it printed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output =
        command.stderr(Stdio::inherit()).output().map_err(|e| cannot_start(command, &e))?;
    if !output.status.success() {
        return Err(format!("{} ended with {}", shown(command), output.status));
    }
    String::from_utf8(output.stdout).map_err(|e| format!("{} printed no text: {e}", shown(command)))
}

/// Runs a program and passes on what it prints, also to `listen`.
pub(crate) fn listen(command: &mut Command, mut listen: impl FnMut(&str)) -> Result<()> {
    let mut child =
        command.stdout(Stdio::piped()).spawn().map_err(|e| cannot_start(command, &e))?;
    let stdout = child.stdout.take().expect("it was piped");
    for line in BufReader::new(stdout).lines().map_while(std::io::Result::ok) {
        println!("{line}");
        listen(&line);
    }
    let status = child.wait().map_err(|e| cannot_start(command, &e))?;
    if status.success() { Ok(()) } else { Err(format!("{} ended with {status}", shown(command))) }
}

/// Runs `cargo test` and counts.
pub(crate) fn cargo_test(args: &[&str]) -> Result<Counts> {
    count_tests(cargo().arg("test").args(args))
}

/// Runs the models of concurrent code: loom tries all orders in which the threads of a small one
/// can run, shuttle many of those of a large one. Built apart, as no other code is.
pub(crate) fn models() -> Result<Counts> {
    let apart = ["--release", "--target-dir", "target/models"];
    let small = ["--package", "ts-pool", "--package", "ts-streams", "--lib", "models"];
    let large = ["--package", "ts-streams", "--test", "orders"];
    let mut counts =
        count_tests(cargo().arg("test").args(apart).args(small).env("RUSTFLAGS", "--cfg loom"))?;
    counts +=
        count_tests(cargo().arg("test").args(apart).args(large).env("RUSTFLAGS", "--cfg shuttle"))?;
    Ok(counts)
}

/// Tests that found no GPU say so; the harness thinks that they passed.
const SKIPPED: &str = "skipped: no CUDA device";

fn count_tests(command: &mut Command) -> Result<Counts> {
    let (mut counts, mut without_gpu) = (Counts::default(), 0);
    listen(command, |line| {
        without_gpu += u32::from(line.contains(SKIPPED));
        if line.starts_with("test result:") {
            counts += Counts {
                passed: number_before(line, " passed"),
                failed: number_before(line, " failed"),
                skipped: number_before(line, " ignored"),
            };
        }
    })?;
    if counts.passed == 0 {
        return Err("cargo test ran no test".into());
    }
    counts.passed -= without_gpu;
    counts.skipped += without_gpu;
    Ok(counts)
}

/// Tests by outcome.
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

/// The number that stands before `word` in a summary line; 0 if it does not say.
pub(crate) fn number_before(line: &str, word: &str) -> u32 {
    let before = line.split(word).next().filter(|before| before.len() < line.len());
    let digits = before.and_then(|before| before.rsplit(|c: char| !c.is_ascii_digit()).next());
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

fn shown(command: &Command) -> String {
    let args = command.get_args().map(|arg| arg.to_string_lossy());
    let words: Vec<_> =
        std::iter::once(command.get_program().to_string_lossy()).chain(args).collect();
    words.join(" ")
}

fn cannot_start(command: &Command, error: &std::io::Error) -> String {
    format!("{} cannot be started: {error}", command.get_program().to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::number_before;

    #[test]
    fn summary_lines_are_read() {
        let line = "test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured";
        assert_eq!((number_before(line, " passed"), number_before(line, " ignored")), (12, 3));
        assert_eq!(number_before("81 passed, 2 skipped in 7.1s", " skipped"), 2);
        assert_eq!(number_before("nothing", " passed"), 0);
    }
}
