// SPDX-License-Identifier: MIT OR Apache-2.0
//! Builds a folder of tests that run on a machine with an NVIDIA GPU but without Rust.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::python;
use crate::run::{self, Result, cargo, output};

const FOLDER: &str = "target/gpu-bundle";
/// The largest size of the folder, in bytes.
const LIMIT: u64 = 60 << 20;

/// The tests that use a GPU, as (package, test target).
const TESTS: [(&str, &str); 4] = [
    ("tensorstream-streams", "gpu"),
    ("tensorstream-pool", "gpu"),
    ("tensorstream-orchestrator", "devices"),
    ("tensorstream-remote", "gpu"),
];

/// The Python programs in the folder.
const PROGRAMS: [&str; 8] = [
    "benches/python/gpu.py",
    "benches/python/opdb.py",
    "benches/python/servers.py",
    "crates/ts-py/tests/exactness.py",
    "crates/ts-py/tests/families.py",
    "crates/ts-py/tests/on_stand_in.py",
    "crates/ts-py/tests/on_two_devices.py",
    "crates/ts-py/tests/tensors_on_stand_in.py",
];

/// What the programs compare with. It is small, and seldom installed beside PyTorch.
const PEER: &str = "diffusers>=0.35,<1";

/// The script run.sh in the folder, which runs all tests.
const RUN: &str = r#"#!/bin/sh
# Runs the tests and measurements of TensorStream that need an NVIDIA GPU and its driver, in less
# than ten minutes. It uses compute-sanitizer, PyTorch, transformers, accelerate and PEFT if they
# are installed. The measurements are written to $OUT, or to this folder: gpu.json and gpu.md.
# Exits with 0 if no test failed. Tests that find no GPU print "skipped: no CUDA device".
cd "$(dirname "$0")" || exit 1
out=${OUT:-.}
failed=0
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
fi
run() { echo "== $*"; "$@" || { failed=1; echo "FAILED: $*"; }; }
for test in tests/*; do
    # The skipped test compiles stub drivers, which needs a C compiler.
    run "$test" --nocapture --test-threads=1 --skip every_driver
done
if command -v compute-sanitizer >/dev/null; then
    for test in tests/*; do
        run compute-sanitizer --error-exitcode 9 "$test" --test-threads=1 \
            --skip every_driver --skip relative_to_the_drivers
    done
else
    echo "skipped: no compute-sanitizer"
fi
if python3 -c "import torch" 2>/dev/null; then
    mkdir -p wheel/here && python3 -m zipfile -e wheel/*.whl wheel/here
    mkdir -p peer/here && python3 -m zipfile -e peer/*.whl peer/here
    PYTHONPATH=$PWD/wheel/here:$PWD/peer/here
    export PYTHONPATH
    run python3 load.py
    if python3 -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
        TENSORSTREAM_TEST_DEVICE=cuda:0
        export TENSORSTREAM_TEST_DEVICE
        for name in exactness kept interrupts moves threads lora extras; do
            run timeout 60 python3 on_stand_in.py $name
        done
        for name in files network; do run timeout 60 python3 tensors_on_stand_in.py $name; done
        run timeout 120 python3 on_stand_in.py families
        run timeout 300 python3 gpu.py --seconds 270 --out "$out"
        run timeout 100 python3 opdb.py --served --device cuda --samples 2 --jobs 8
    else
        echo "skipped: PyTorch finds no GPU"
    fi
else
    echo "skipped: no PyTorch"
fi
exit $failed
"#;

/// The script load.py in the folder, which run.sh runs.
const LOAD: &str = r#"# Tensors that are loaded directly to the GPU must be equal to the saved ones.
import os, tempfile, torch, tensorstream as ts
device = "cuda" if torch.cuda.is_available() else "cpu"
tensors = {f"t{i}": torch.randn(1000 + i, 300, dtype=torch.bfloat16) for i in range(20)}
with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, "model.ts")
    ts.save_file(tensors, path, codec="auto")
    loaded = ts.load_file(path, device=device)
assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in tensors.items())
print(f"{len(loaded)} tensors on {device}" if device == "cuda" else "skipped: no CUDA device")
"#;

/// Builds the folder, `target/gpu-bundle`, and prints its size.
///
/// # Errors
/// Returns an error if a build fails, or if the folder is larger than [`LIMIT`].
pub(crate) fn make() -> Result<()> {
    let folder = Path::new(FOLDER);
    let _ = fs::remove_dir_all(folder);
    let tests = folder.join("tests");
    fs::create_dir_all(&tests).map_err(|e| format!("cannot create {}: {e}", tests.display()))?;
    for (package, file) in TESTS {
        let test = build(package, file)?;
        let copy = tests.join(format!("{package}-{file}"));
        fs::copy(&test, &copy)
            .map_err(|e| format!("cannot copy {} to {}: {e}", test.display(), copy.display()))?;
    }
    let venv = python::prepared()?;
    // Nobody can mend a program on a machine that is lent for minutes.
    python::test(&venv, &["tests/test_accelerator.py", "-k", "gpu_bundle"])?;
    let mut wheel = venv.python();
    wheel.args([
        "-m",
        "maturin",
        "build",
        "--release",
        "--strip",
        "--quiet",
        "--manifest-path",
        "crates/ts-py/Cargo.toml",
    ]);
    run::run(wheel.arg("--out").arg(folder.join("wheel")))?;
    let mut peer = venv.python();
    peer.args(["-m", "pip", "download", "--quiet", "--no-deps", PEER, "--dest"]);
    run::run(peer.arg(folder.join("peer")))?;
    for program in PROGRAMS {
        let name = Path::new(program).file_name().expect("the path has a name");
        fs::copy(program, folder.join(name))
            .map_err(|e| format!("cannot copy {program} to {FOLDER}: {e}"))?;
    }
    for (name, text) in [("run.sh", RUN), ("load.py", LOAD)] {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    }
    run::run(std::process::Command::new("chmod").arg("+x").arg(folder.join("run.sh")))?;
    let bytes = size(folder)?;
    println!(
        "{FOLDER}: {:.1} MiB; run {FOLDER}/run.sh on the GPU machine",
        bytes as f64 / f64::from(1 << 20)
    );
    if bytes > LIMIT {
        Err(format!("{FOLDER} is too large: expected at most {LIMIT} bytes, got {bytes}"))
    } else {
        Ok(())
    }
}

/// Builds a test target with CUDA and without debug information. Returns the path of the program.
fn build(package: &str, file: &str) -> Result<PathBuf> {
    let mut build = cargo();
    build.args([
        "test",
        "--no-run",
        "--release",
        "--target-dir",
        "target/gpu",
        "--message-format",
        "json",
    ]);
    build.args(["--package", package, "--features", "cuda", "--test", file]);
    build.env("CARGO_PROFILE_RELEASE_STRIP", "symbols").env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    let messages = output(&mut build)?;
    let found = messages.lines().find_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        let named = message["target"]["name"] == file && message["target"]["kind"][0] == "test";
        message["executable"].as_str().filter(|_| named).map(PathBuf::from)
    });
    found.ok_or_else(|| format!("cargo built no test target \"{file}\" of {package}"))
}

/// Returns the size in bytes of a file, or of all files below a directory.
fn size(path: &Path) -> Result<u64> {
    let failed = |e: std::io::Error| format!("cannot read the size of {}: {e}", path.display());
    if !path.is_dir() {
        return Ok(path.metadata().map_err(failed)?.len());
    }
    let entries = fs::read_dir(path).map_err(failed)?;
    entries.map(|entry| size(&entry.map_err(failed)?.path())).sum()
}
