// SPDX-License-Identifier: MIT OR Apache-2.0
//! The Python environment of the repository, .venv, and the Python steps of `ci`.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Instant, UNIX_EPOCH};

use crate::run::{Counts, Result, files, listen, number_before, output, root, run};

/// A virtual environment with the packages of requirements-dev.txt.
#[derive(Clone)]
pub(crate) struct Venv {
    dir: PathBuf,
    bin: PathBuf,
}

impl Venv {
    /// Returns a command that runs Python at the root of the repository, without access to the
    /// Hugging Face Hub.
    pub(crate) fn python(&self) -> Command {
        let mut command = Command::new(self.bin.join("python"));
        command.current_dir(root()).env("HF_HUB_OFFLINE", "1");
        // Tests start Python hundreds of times. The first process compiles what all of them import.
        command.env_remove("PYTHONDONTWRITEBYTECODE");
        command
    }

    /// Returns the command `python -m MODULE`, in the directory of the Python package.
    fn tool(&self, module: &str) -> Command {
        let mut command = self.python();
        command.current_dir(root().join("crates/ts-py")).args(["-m", module]);
        command
    }

    /// The file that contains the requirements of the packages that are installed.
    fn stamp(&self) -> PathBuf {
        self.dir.join("requirements.stamp")
    }

    /// The file that tells from which sources the installed native module was built.
    fn native_stamp(&self) -> PathBuf {
        self.dir.join("native.stamp")
    }

    /// The directory of the installed package `tensorstream`.
    fn package(&self) -> Result<PathBuf> {
        let script = "import sysconfig; print(sysconfig.get_path('platlib'))";
        Ok(Path::new(output(self.python().args(["-c", script]))?.trim()).join("tensorstream"))
    }
}

/// How to compile a wheel.
#[derive(Clone, Copy)]
enum Build {
    /// As the tests of the workspace are compiled, which shares most of the work with them.
    AsTests,
    /// As wheels for users are.
    Release,
}

impl Build {
    /// The arguments of maturin.
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::AsTests => {
                &["--profile", "dev", "--features", "pyo3/extension-module,ts-py/as-tests"]
            }
            Self::Release => &["--profile", "release"],
        }
    }
}

/// The packages of requirements-dev.txt that install the others and build the wheel.
const TOOLS: [&str; 2] = ["maturin", "uv"];

/// Which packages of requirements-dev.txt an environment needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Packages {
    /// Those before [`OTHERS`].
    Demo,
    All,
}

/// The line of requirements-dev.txt after which are the packages that `demo` does not need.
const OTHERS: &str = "# --- not needed by `cargo xtask demo` ---";

/// Installs a wheel of the current sources into .venv, and returns this environment. First installs
/// the packages of requirements-dev.txt if that file has changed or .venv does not exist.
///
/// # Errors
/// Returns an error if a build or an installation fails.
pub(crate) fn prepared() -> Result<Venv> {
    prepared_with(Packages::All, Build::AsTests)
}

/// Creates .venv with the packages of requirements-dev.txt, but without the wheel.
///
/// # Errors
/// Returns an error if the installation fails.
pub(crate) fn packages() -> Result<Venv> {
    let venv = created(&root().join(".venv"))?;
    install_packages(&venv, &requirements()?)?;
    Ok(venv)
}

/// Like [`prepared`], with only the packages that `demo` needs.
///
/// # Errors
/// Returns an error if a build or an installation fails.
pub(crate) fn prepared_for_demo() -> Result<Venv> {
    prepared_with(Packages::Demo, Build::AsTests)
}

/// Like [`prepared`], but with a wheel that is optimized as those of users are.
///
/// # Errors
/// Returns an error if a build or an installation fails.
pub(crate) fn optimized() -> Result<Venv> {
    prepared_with(Packages::All, Build::Release)
}

/// Like [`prepared`], with some of the packages, and a wheel that is compiled in this way.
///
/// # Errors
/// Returns an error if a build or an installation fails.
fn prepared_with(packages: Packages, build: Build) -> Result<Venv> {
    let all = requirements()?;
    let venv = created(&root().join(".venv"))?;
    let installed = fs::read_to_string(venv.stamp()).unwrap_or_default();
    let wanted = match packages {
        // An environment with all packages has those of the demo.
        Packages::Demo if installed != all => all.split(OTHERS).next().unwrap_or(&all),
        _ => &all,
    };
    install(&venv, wanted, build)?;
    Ok(venv)
}

fn requirements() -> Result<String> {
    fs::read_to_string(root().join("requirements-dev.txt"))
        .map_err(|e| format!("cannot read requirements-dev.txt: {e}"))
}

/// The oldest PyTorch that the device `ts` supports.
pub(crate) const OLDEST_TORCH: &str = "2.10";

/// Returns an environment like that of [`prepared`], but with [`OLDEST_TORCH`] and under target/.
pub(crate) fn prepared_oldest() -> Result<Venv> {
    let newest = requirements()?;
    let others = newest.lines().filter(|line| !line.starts_with("torch>"));
    let wanted: Vec<String> = others
        .map(String::from)
        .chain([format!("torch=={OLDEST_TORCH}.*"), String::new()])
        .collect();
    let venv = created(&root().join("target").join(format!("torch-{OLDEST_TORCH}")))?;
    install(&venv, &wanted.join("\n"), Build::AsTests)?;
    Ok(venv)
}

/// Creates an environment with pip, uv and maturin, unless it exists.
fn created(dir: &Path) -> Result<Venv> {
    let venv = Venv {
        bin: dir.join(if cfg!(windows) { "Scripts" } else { "bin" }),
        dir: dir.to_path_buf(),
    };
    if !venv.stamp().exists() {
        run(interpreter()?.args(["-m", "venv"]).arg(dir))?;
        let all = requirements()?;
        let tools = all.lines().filter(|line| TOOLS.iter().any(|tool| line.starts_with(tool)));
        run(venv.python().args(["-m", "pip", "install", "--quiet"]).args(tools))?;
    }
    Ok(venv)
}

/// Installs packages, and TensorStream. Its wheel is compiled while the packages are downloaded.
fn install(venv: &Venv, wanted: &str, build: Build) -> Result<()> {
    std::thread::scope(|scope| {
        let packages = scope.spawn(|| install_packages(venv, wanted));
        let wheel = native_sources(build).and_then(|now| {
            let stamp = fs::read_to_string(venv.native_stamp()).unwrap_or_default();
            let is_built = installed_native(venv)?.is_some_and(|id| stamp == format!("{now} {id}"));
            Ok((now, if is_built { None } else { Some(build_wheel(venv, build)?) }))
        });
        packages.join().map_err(|_| "the installation of packages panicked")??;
        match wheel? {
            (now, Some(wheel)) => install_wheel(venv, &wheel, &now),
            (_, None) => copy_python_files(venv),
        }
    })
}

/// Installs the packages of a requirements file, unless that was done before.
fn install_packages(venv: &Venv, wanted: &str) -> Result<()> {
    if fs::read_to_string(venv.stamp()).ok().as_deref() == Some(wanted) {
        return Ok(());
    }
    println!("installing PyTorch and other packages into {} (4 to 6 GB)", venv.dir.display());
    let began = Instant::now();
    let list = venv.dir.join("requirements.txt");
    fs::write(&list, wanted).map_err(|e| format!("cannot write {}: {e}", list.display()))?;
    // uv downloads and unpacks several packages at once: it takes a minute where pip takes eight.
    let mut uv = venv.python();
    uv.args(["-m", "uv", "pip", "install", "--quiet", "--python"]).arg(venv.python().get_program());
    if let Some(index) = std::env::var_os("PIP_INDEX_URL") {
        uv.env("UV_DEFAULT_INDEX", index);
    }
    if let Err(message) = run(uv.arg("-r").arg(&list)) {
        println!("{message}; installing with pip");
        run(venv.python().args(["-m", "pip", "install", "--quiet", "-r"]).arg(&list))?;
    }
    println!("-- packages: {:.0} s", began.elapsed().as_secs_f64());
    fs::write(venv.stamp(), wanted)
        .map_err(|e| format!("cannot write {}: {e}", venv.stamp().display()))
}

/// Builds a wheel and returns its path.
fn build_wheel(venv: &Venv, build: Build) -> Result<PathBuf> {
    let began = Instant::now();
    let wheels = root().join("target/wheels/xtask");
    if wheels.exists() {
        fs::remove_dir_all(&wheels)
            .map_err(|e| format!("cannot remove {}: {e}", wheels.display()))?;
    }
    let mut maturin = venv.tool("maturin");
    maturin.args(["build", "--quiet"]).args(build.arguments());
    run(maturin.arg("--out").arg(&wheels))?;
    let mut files = fs::read_dir(&wheels)
        .map_err(|e| format!("cannot list {}: {e}", wheels.display()))?
        .filter_map(std::result::Result::ok);
    let wheel = files.next().ok_or("maturin succeeded but built no wheel")?.path();
    println!("-- wheel: {:.0} s", began.elapsed().as_secs_f64());
    Ok(wheel)
}

/// Installs a wheel, and writes down from which sources its native module was built.
fn install_wheel(venv: &Venv, wheel: &Path, sources: &str) -> Result<()> {
    // pip leaves files that `copy_python_files` has added.
    let package = venv.package()?;
    if package.exists() {
        fs::remove_dir_all(&package)
            .map_err(|e| format!("cannot remove {}: {e}", package.display()))?;
    }
    let mut pip = venv.python();
    pip.args(["-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps"]).arg(wheel);
    run(&mut pip)?;
    let native = installed_native(venv)?.ok_or("the wheel has no native module")?;
    fs::write(venv.native_stamp(), format!("{sources} {native}"))
        .map_err(|e| format!("cannot write {}: {e}", venv.native_stamp().display()))
}

/// Returns the size and the time of the installed native module, if there is one. Another
/// installation changes them.
fn installed_native(venv: &Venv) -> Result<Option<String>> {
    let package = venv.package()?;
    if !package.is_dir() {
        return Ok(None);
    }
    let native = files(&package)?.into_iter().find(|path| is_native(path));
    Ok(native.and_then(|path| path.metadata().ok()).map(|data| {
        let modified = data.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        format!("{} {}", data.len(), modified.unwrap_or_default().as_nanos())
    }))
}

fn is_native(path: &Path) -> bool {
    path.extension().is_some_and(|kind| kind == "so" || kind == "pyd")
}

/// Brings the Python files of the installed package up to date. Its native module stays.
fn copy_python_files(venv: &Venv) -> Result<()> {
    let (from, to) = (root().join("crates/ts-py/python/tensorstream"), venv.package()?);
    for old in files(&to)? {
        let source = from.join(old.strip_prefix(&to).unwrap_or(&old));
        if !is_native(&old) && !source.exists() {
            fs::remove_file(&old).map_err(|e| format!("cannot remove {}: {e}", old.display()))?;
        }
    }
    for source in files(&from)?.iter().filter(|path| !is_native(path)) {
        let target = to.join(source.strip_prefix(&from).unwrap_or(source));
        let content = read(source)?;
        if fs::read(&target).ok().as_ref() != Some(&content) {
            let failed = |e: std::io::Error| format!("cannot write {}: {e}", target.display());
            fs::create_dir_all(target.parent().unwrap_or(&to)).map_err(failed)?;
            fs::write(&target, content).map_err(failed)?;
        }
    }
    Ok(())
}

/// Returns how the native module is compiled, and a hash of the files from which the module and the
/// metadata of the wheel are made.
fn native_sources(build: Build) -> Result<String> {
    let root = root();
    let mut hasher = DefaultHasher::new();
    let single = ["Cargo.toml", "Cargo.lock", "README.md", "crates/ts-py/pyproject.toml"];
    let mut inputs: Vec<PathBuf> = single.iter().map(|name| root.join(name)).collect();
    for entry in
        fs::read_dir(root.join("crates")).map_err(|e| format!("cannot list crates: {e}"))?
    {
        let crate_ = entry.map_err(|e| format!("cannot list crates: {e}"))?.path();
        inputs.push(crate_.join("Cargo.toml"));
        inputs.extend(files(&crate_.join("src"))?);
    }
    inputs.sort();
    for input in inputs {
        input.hash(&mut hasher);
        read(&input)?.hash(&mut hasher);
    }
    Ok(format!("{} {:016x}", build.arguments().join(" "), hasher.finish()))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

/// Runs ruff, and mypy on the package. Does not need the wheel.
pub(crate) fn lint(venv: &Venv) -> Result<()> {
    let sources = ["python", "tests", "../../examples", "../../benches/python", "../../docs"];
    let ruff = |args: &[&str]| {
        run(venv.tool("ruff").args(args).args(["--config", "pyproject.toml"]).args(sources))
    };
    ruff(&["format", "--check"])?;
    ruff(&["check"])?;
    run(&mut venv.tool("mypy"))
}

/// Checks the types of the examples, which import the installed package as a user's program does,
/// and compares the type stubs with the built module.
pub(crate) fn installed_types(venv: &Venv) -> Result<()> {
    run(venv.tool("mypy").args(["--strict", "../../examples"]))?;
    let python = venv.bin.join("python");
    run(venv.tool("pyright").arg("--pythonpath").arg(python).arg("../../examples"))?;
    let stubs = ["tensorstream._native", "--mypy-config-file", "stubtest.ini"];
    run(venv.tool("mypy.stubtest").args(stubs))
}

/// Builds the documentation site offline. Broken links are errors.
pub(crate) fn site(venv: &Venv) -> Result<()> {
    let mut mkdocs = venv.python();
    mkdocs.args(["-m", "mkdocs", "build", "--strict", "--quiet"]);
    run(mkdocs.env("NO_MKDOCS_2_WARNING", "1"))
}

/// Options of pytest to run the tests in three processes. Many tests wait for machines, so that two
/// processes leave a processor idle. The tests of a file share expensive fixtures, so they
/// stay in one process. conftest.py puts the files in order.
pub(crate) const PARALLEL: [&str; 3] =
    ["--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder"];

/// Runs pytest and counts the tests by outcome.
pub(crate) fn test(venv: &Venv, args: &[&str]) -> Result<Counts> {
    test_limited(venv, args, &[])
}

/// Like [`test()`], with these environment variables.
pub(crate) fn test_limited(
    venv: &Venv,
    args: &[&str],
    variables: &[(&str, &str)],
) -> Result<Counts> {
    let mut counts = Counts::default();
    let mut pytest = venv.tool("pytest");
    pytest.envs(variables.iter().copied());
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
