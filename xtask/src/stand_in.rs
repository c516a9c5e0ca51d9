// SPDX-License-Identifier: MIT OR Apache-2.0
//! Builds the stand-in accelerator: PyTorch's own example of an out-of-tree backend, which behaves
//! like a GPU and runs on the host, and a runtime library over it.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::python::Venv;
use crate::run::{Result, files, output, root, run};

/// Where the sources of the example are, unless $TENSORSTREAM_ACCELERATOR says otherwise.
const SOURCES: &str = "../shared/accelerator";
/// The runtime library over it, whose source belongs to this repository.
const RUNTIME: &str = "crates/ts-streams/tests/stand_in/runtime.cpp";

/// Builds the stand-in in target/stand-in, where tests find it, unless it is up to date. Says so if
/// it cannot be built; the tests that need it are then skipped.
pub(crate) fn prepare(venv: &Venv) -> Result<()> {
    let sources = std::env::var_os("TENSORSTREAM_ACCELERATOR")
        .map_or_else(|| root().join(SOURCES), PathBuf::from);
    let missing = if !sources.join("build.sh").is_file() {
        Some(format!("there are no sources at {}", sources.display()))
    } else if output(Command::new("g++").arg("--version")).is_err() {
        Some("there is no g++; run `apt-get install g++`".into())
    } else {
        None
    };
    if let Some(missing) = missing {
        println!("SKIPPED: tests on the stand-in accelerator: {missing}");
        return Ok(());
    }
    let target = root().join("target/stand-in");
    let version = "import importlib.metadata as m; print(m.version('torch'))";
    let torch = output(venv.python().args(["-c", version]))?;
    let wanted = format!("{:016x} {}", fingerprint(&sources)?, torch.trim());
    let stamp = target.join("stamp");
    if fs::read_to_string(&stamp).ok().as_deref() != Some(&*wanted) {
        println!("building the stand-in accelerator in {} (some minutes)", target.display());
        let _ = fs::remove_dir_all(&target);
        copy(&sources, &target)?;
        let python = venv.python();
        let mut build = Command::new("bash");
        run(build.arg(target.join("build.sh")).env("PY", python.get_program()))?;
        fs::write(&stamp, wanted).map_err(|e| format!("cannot write {}: {e}", stamp.display()))?;
    }
    let libraries = target.join("torch_accinte/lib");
    let mut compile = Command::new("g++");
    compile.args(["-std=c++20", "-O1", "-g", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden"]);
    compile.arg("-I").arg(target.join("third_party/openreg")).arg(root().join(RUNTIME));
    compile.arg("-L").arg(&libraries).args(["-laccinte_dev", "-lpthread", "-Wl,-rpath,$ORIGIN"]);
    run(compile.arg("-o").arg(libraries.join("libstandin.so")))
}

/// Returns a hash of the names and contents of all files in a directory.
fn fingerprint(directory: &Path) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    for file in files(directory)? {
        file.strip_prefix(directory).unwrap_or(&file).hash(&mut hasher);
        fs::read(&file)
            .map_err(|e| format!("cannot read {}: {e}", file.display()))?
            .hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// Copies a directory. The copies can be written to.
fn copy(from: &Path, to: &Path) -> Result<()> {
    for file in files(from)? {
        let target = to.join(file.strip_prefix(from).unwrap_or(&file));
        let failed = |e: std::io::Error| format!("cannot write {}: {e}", target.display());
        fs::create_dir_all(target.parent().unwrap_or(to)).map_err(failed)?;
        let content =
            fs::read(&file).map_err(|e| format!("cannot read {}: {e}", file.display()))?;
        fs::write(&target, content).map_err(failed)?;
    }
    Ok(())
}
