// SPDX-License-Identifier: MIT OR Apache-2.0
//! The Python environment of the repository, .venv, and the Python steps of `ci`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{Counts, Result, listen, number_before, output, root, run};

/// A virtual environment with the packages of requirements-dev.txt.
pub(crate) struct Venv {
    bin: PathBuf,
}

impl Venv {
    /// Returns a command that runs Python at the root of the repository, without access to the
    /// Hugging Face Hub.
    pub(crate) fn python(&self) -> Command {
        let mut command = Command::new(self.bin.join("python"));
        command.current_dir(root()).env("HF_HUB_OFFLINE", "1");
        command
    }

    /// Returns the command `python -m MODULE`, in the directory of the Python package.
    fn tool(&self, module: &str) -> Command {
        let mut command = self.python();
        command.current_dir(root().join("crates/ts-py")).args(["-m", module]);
        command
    }
}

/// Installs a wheel of the current sources into .venv, and returns this environment. First installs
/// the packages of requirements-dev.txt if that file has changed or .venv does not exist.
pub(crate) fn prepared() -> Result<Venv> {
    let wanted = fs::read_to_string(root().join("requirements-dev.txt"))
        .map_err(|e| format!("cannot read requirements-dev.txt: {e}"))?;
    prepare(&root().join(".venv"), &wanted)
}

/// The oldest PyTorch that the device `ts` supports.
pub(crate) const OLDEST_TORCH: &str = "2.10";

/// Returns an environment like that of [`prepared`], but with [`OLDEST_TORCH`] and under target/.
pub(crate) fn prepared_oldest() -> Result<Venv> {
    let newest = fs::read_to_string(root().join("requirements-dev.txt"))
        .map_err(|e| format!("cannot read requirements-dev.txt: {e}"))?;
    let others = newest.lines().filter(|line| !line.starts_with("torch>"));
    let wanted: Vec<String> = others
        .map(String::from)
        .chain([format!("torch=={OLDEST_TORCH}.*"), String::new()])
        .collect();
    prepare(&root().join("target").join(format!("torch-{OLDEST_TORCH}")), &wanted.join("\n"))
}

/// Prepares the environment in `dir` from the text of a requirements file.
fn prepare(dir: &Path, wanted: &str) -> Result<Venv> {
    let venv = Venv { bin: dir.join(if cfg!(windows) { "Scripts" } else { "bin" }) };
    let stamp = dir.join("requirements.stamp");
    if fs::read_to_string(&stamp).ok().as_deref() != Some(wanted) {
        println!(
            "installing PyTorch and the tools of requirements-dev.txt into {} (about 6 GB)",
            dir.display()
        );
        run(interpreter()?.args(["-m", "venv"]).arg(dir))?;
        let list = dir.join("requirements.txt");
        fs::write(&list, wanted).map_err(|e| format!("cannot write {}: {e}", list.display()))?;
        run(venv.python().args(["-m", "pip", "install", "--quiet", "-r"]).arg(&list))?;
        fs::write(&stamp, wanted).map_err(|e| format!("cannot write {}: {e}", stamp.display()))?;
    }
    install_wheel(&venv)?;
    Ok(venv)
}

/// Builds the wheel in release mode and installs it.
fn install_wheel(venv: &Venv) -> Result<()> {
    let wheels = root().join("target/wheels/xtask");
    if wheels.exists() {
        fs::remove_dir_all(&wheels)
            .map_err(|e| format!("cannot remove {}: {e}", wheels.display()))?;
    }
    let mut build = venv.tool("maturin");
    run(build.args(["build", "--release", "--quiet", "--out"]).arg(&wheels))?;
    let mut files = fs::read_dir(&wheels)
        .map_err(|e| format!("cannot list {}: {e}", wheels.display()))?
        .filter_map(std::result::Result::ok);
    let wheel = files.next().ok_or("maturin succeeded but built no wheel")?.path();
    let mut pip = venv.python();
    pip.args(["-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps"]).arg(&wheel);
    run(&mut pip)
}

/// Runs ruff, mypy and pyright, and compares the type stubs with the built module.
pub(crate) fn lint(venv: &Venv) -> Result<()> {
    let sources = ["python", "tests", "../../examples", "../../benches/python", "../../docs"];
    let ruff = |args: &[&str]| {
        run(venv.tool("ruff").args(args).args(["--config", "pyproject.toml"]).args(sources))
    };
    ruff(&["format", "--check"])?;
    ruff(&["check"])?;
    run(&mut venv.tool("mypy"))?;
    // The examples import the installed package, as a user's program does.
    run(venv.tool("mypy").args(["--strict", "../../examples"]))?;
    let python = venv.bin.join("python");
    run(venv.tool("pyright").arg("--pythonpath").arg(python).arg("../../examples"))?;
    run(venv.tool("mypy.stubtest").arg("tensorstream._native"))
}

/// Builds the documentation site offline. Broken links are errors.
pub(crate) fn site(venv: &Venv) -> Result<()> {
    let mut mkdocs = venv.python();
    mkdocs.args(["-m", "mkdocs", "build", "--strict", "--quiet"]);
    run(mkdocs.env("NO_MKDOCS_2_WARNING", "1"))
}

/// Runs pytest and counts the tests by outcome.
pub(crate) fn test(venv: &Venv, args: &[&str]) -> Result<Counts> {
    let mut counts = Counts::default();
    let mut pytest = venv.tool("pytest");
    listen(pytest.args(["-rs", "--durations=3"]).args(args), |line| {
        if line.contains(" passed") {
            counts = Counts {
                passed: number_before(line, " passed"),
                failed: number_before(line, " failed"),
                skipped: number_before(line, " skipped"),
            };
        }
    })?;
    Ok(counts)
}

/// Finds Python 3.11 or later, as $PYTHON, python3 or python.
fn interpreter() -> Result<Command> {
    let named = std::env::var("PYTHON").ok();
    for name in named.iter().map(String::as_str).chain(["python3", "python"]) {
        let probe = "import sys, venv, ensurepip; print(sys.version_info >= (3, 11))";
        if output(Command::new(name).args(["-c", probe])).is_ok_and(|said| said.trim() == "True") {
            let mut command = Command::new(name);
            command.current_dir(root());
            return Ok(command);
        }
    }
    Err("no suitable Python found: expected 3.11 or later, with venv and ensurepip, as $PYTHON, \
         python3 or python"
        .into())
}
