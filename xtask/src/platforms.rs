// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks the crates for other systems than that of this machine, and runs tests under emulators.
//!
//! Dependencies with C code need a C compiler for the target. For macOS there is none without
//! Apple's SDK, so there the C files are left out. Then nothing can be linked or run.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{Counts, Result, cargo, count_tests, output, root, run};

const WINDOWS: &str = "x86_64-pc-windows-gnu";
const MACOS: &str = "x86_64-apple-darwin";
const ARM: &str = "aarch64-unknown-linux-gnu";
const MUSL: &str = "x86_64-unknown-linux-musl";

/// A program of another package, and the Debian package that has it.
type Tool = (&'static str, &'static str);

/// The targets, and what compiles their C files. `None` leaves C files out.
const TARGETS: [(&str, Option<Tool>); 4] = [
    (WINDOWS, Some(("x86_64-w64-mingw32-gcc", "gcc-mingw-w64-x86-64"))),
    (ARM, Some(("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"))),
    (MUSL, Some(("musl-gcc", "musl-tools"))),
    (MACOS, None),
];

/// The libraries. The Python module is checked separately, as its features are others.
const LIBRARIES: [&str; 8] = [
    "tensorstream-format",
    "tensorstream-streams",
    "tensorstream-pool",
    "tensorstream-io",
    "tensorstream-orchestrator",
    "tensorstream-remote",
    "tensorstream-exec",
    "tensorstream",
];

/// The packages whose tests run under an emulator.
const PORTABLE: [&str; 4] =
    ["tensorstream-format", "tensorstream-streams", "tensorstream-pool", "tensorstream-io"];

/// Tests of ts-io that QEMU cannot run: it has neither io_uring nor the call that tells whether a
/// file supports direct I/O, nor can a test start its own program.
const NOT_UNDER_QEMU: [&str; 9] = [
    "a_misaligned_direct_read_is_rejected",
    "adaptive_conforms",
    "adaptive_reads_uncached_ranges_directly",
    "direct_conforms",
    "faults_end_in_right_bytes_or_errors_without_leaks",
    "many_files_raise_the_limit",
    "the_completion_reports_the_path_taken",
    "the_tuner_measures_each_file_system_once",
    "uring_conforms",
];

/// Checks all crates for each target, with warnings as errors. Then runs tests for aarch64 under
/// QEMU, and for Windows under Wine if it is installed.
///
/// # Errors
/// Returns an error if a tool is missing, with the package that has it, if a crate does not compile
/// without warnings, or if a test fails.
pub(crate) fn all() -> Result<()> {
    for (target, compiler) in TARGETS {
        println!("\n== {target}");
        install(target)?;
        compiler.map_or(Ok(()), require)?;
        check(target, compiler, &LIBRARIES, &["--all-targets", "--all-features"])?;
        check(target, compiler, &["ts-py"], &["--lib"])?;
    }
    println!("\n== tests for {ARM} under QEMU");
    let mut counts = emulated_arm()?;
    if is_installed("wine") {
        println!("\n== tests for {WINDOWS} under Wine");
        counts += emulated_windows()?;
    } else {
        println!("SKIPPED: tests for Windows: run `apt-get install wine wine64`");
    }
    println!("{counts}");
    Ok(())
}

/// Checks the library with the feature `remote` for Windows and macOS, without C files. Skips a
/// target, with a message, if its standard library cannot be installed.
///
/// # Errors
/// Returns an error if a crate does not compile.
pub(crate) fn quick() -> Result<()> {
    for target in [WINDOWS, MACOS] {
        if let Err(error) = install(target) {
            println!("SKIPPED: {target}: {error}");
            continue;
        }
        let library = ["check", "--locked", "--package", "tensorstream", "--lib"];
        let features = ["--no-default-features", "--features", "remote"];
        run(cargo_for(target, None)?.args(library).args(features))?;
    }
    Ok(())
}

/// Runs clippy, which also does what `cargo check` does.
fn check(target: &str, compiler: Option<Tool>, packages: &[&str], args: &[&str]) -> Result<()> {
    let mut clippy = cargo_for(target, compiler)?;
    clippy.args(["clippy", "--locked"]).args(args);
    clippy.args(packages.iter().flat_map(|package| ["--package", package]));
    // Paths are longer on Windows, and so are types that contain them. Types of libc differ, too.
    let sizes = ["result_large_err", "large_enum_variant", "cast_lossless", "useless_conversion"];
    clippy.args(["--", "-D", "warnings"]);
    run(clippy.args(sizes.iter().map(|lint| format!("-Aclippy::{lint}"))))
}

/// Returns a command that runs cargo for a target.
fn cargo_for(target: &str, compiler: Option<Tool>) -> Result<Command> {
    let mut command = cargo();
    command.env("CARGO_BUILD_TARGET", target);
    // Property tests run only eight cases, because emulators are slow.
    command.env("PROPTEST_CASES", "8");
    // The Python module uses the stable ABI, so it needs no interpreter of the target.
    command.env("PYO3_NO_PYTHON", "1").env("PYO3_BUILD_EXTENSION_MODULE", "1");
    if target == MUSL {
        // Otherwise, programs contain libc, and the Python module is not a shared library.
        command.env("RUSTFLAGS", "-C target-feature=-crt-static");
    }
    let underscored = target.replace('-', "_");
    if let Some((program, _)) = compiler {
        command.env(format!("CC_{underscored}"), program);
        command.env(format!("CARGO_TARGET_{}_LINKER", underscored.to_uppercase()), program);
    } else {
        let nothing = compiler_of_nothing()?;
        command.env(format!("CC_{underscored}"), &nothing);
        command.env(format!("AR_{underscored}"), &nothing);
        // Otherwise, build scripts ask Apple's tools for the SDK.
        command.env("SDKROOT", "/");
    }
    Ok(command)
}

/// Returns the path of a program that takes the arguments of a C compiler or an archiver, and makes
/// an empty file. `cargo check` links nothing, so it does not read such files.
fn compiler_of_nothing() -> Result<PathBuf> {
    const SCRIPT: &str = "#!/bin/sh\n\
        while [ $# -gt 0 ]; do\n\
        case \"$1\" in -o) : >\"$2\" ;; *.a) : >\"$1\" ;; esac; shift\n\
        done\n";
    let path = directory()?.join("compiler-of-nothing");
    let failed = |e| format!("cannot write {}: {e}", path.display());
    fs::write(&path, SCRIPT).map_err(failed)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).map_err(failed)?;
    Ok(path)
}

fn directory() -> Result<PathBuf> {
    let path = root().join("target/platforms");
    fs::create_dir_all(&path).map_err(|e| format!("cannot create {}: {e}", path.display()))?;
    Ok(path)
}

/// Installs the standard library of a target, unless the compiler has it.
fn install(target: &str) -> Result<()> {
    let sysroot = output(Command::new("rustc").current_dir(root()).args(["--print", "sysroot"]))?;
    if Path::new(sysroot.trim()).join("lib/rustlib").join(target).join("lib").exists() {
        return Ok(());
    }
    run(Command::new("rustup").current_dir(root()).args(["target", "add", target])).map_err(|e| {
        format!("the compiler has no standard library for {target}, and rustup cannot add it: {e}")
    })
}

fn is_installed(program: &str) -> bool {
    let found = Command::new("sh").arg("-c").arg(format!("command -v {program}")).output();
    found.is_ok_and(|found| found.status.success())
}

fn require((program, package): Tool) -> Result<()> {
    if is_installed(program) {
        return Ok(());
    }
    Err(format!("cannot find {program}; run `apt-get install {package}`"))
}

fn emulated_arm() -> Result<Counts> {
    require(("qemu-aarch64", "qemu-user"))?;
    let mut test = cargo_for(ARM, TARGETS[1].1)?;
    test.env(
        "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
        "qemu-aarch64 -L /usr/aarch64-linux-gnu",
    );
    test.args(["test", "--locked", "--tests"]);
    test.args(PORTABLE.iter().flat_map(|package| ["--package", package]));
    test.arg("--").args(NOT_UNDER_QEMU.iter().flat_map(|name| ["--skip", name]));
    count_tests(&mut test)
}

fn emulated_windows() -> Result<Counts> {
    let mut test = cargo_for(WINDOWS, TARGETS[0].1)?;
    let prefix = directory()?.join("wine");
    test.env("WINEPREFIX", &prefix).env("WINEDEBUG", "-all");
    test.env("CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER", "wine");
    add_random_numbers(&prefix)?;
    test.args(["test", "--locked", "--tests", "--features", "tensorstream-remote/tls"]);
    test.args(PORTABLE.iter().flat_map(|package| ["--package", package]));
    test.args(["--package", "tensorstream-remote"]);
    // Wine cannot replace a file that is open, as Windows can.
    test.args(["--", "--skip", "buffered_conforms"]);
    count_tests(&mut test)
}

/// Adds the library from which the standard library gets random numbers, which older versions of
/// Wine lack.
fn add_random_numbers(prefix: &Path) -> Result<()> {
    const SOURCE: &str = "#include <windows.h>\n\
        BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);\n\
        __declspec(dllexport) BOOL ProcessPrng(PBYTE to, SIZE_T len) {\n\
        \x20   return SystemFunction036(to, (ULONG)len);\n\
        }\n";
    let library = prefix.join("drive_c/windows/system32/bcryptprimitives.dll");
    if library.exists() {
        return Ok(());
    }
    let mut wine = Command::new("wine");
    run(wine.env("WINEPREFIX", prefix).env("WINEDEBUG", "-all").args(["wineboot", "--init"]))?;
    if library.exists() {
        return Ok(());
    }
    let source = directory()?.join("random.c");
    fs::write(&source, SOURCE).map_err(|e| format!("cannot write {}: {e}", source.display()))?;
    let mut gcc = Command::new("x86_64-w64-mingw32-gcc");
    run(gcc.args(["-shared", "-o"]).arg(&library).arg(&source).arg("-ladvapi32"))
}
