// SPDX-License-Identifier: MIT OR Apache-2.0
//! The development tasks of the project. `cargo xtask help` lists them.

mod bench;
mod big_endian;
mod candle;
mod check;
mod cycles;
mod fuzz;
mod gpu_bundle;
mod isa;
mod packages;
mod platforms;
mod ptx;
mod python;
mod run;
mod ssh_server;
mod stand_in;
mod valgrind;

use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Instant;

use run::{Counts, Result, cargo, cargo_test};

const HELP: &str = "\
cargo xtask demo                     run a real model with less memory than its weights need
cargo xtask demo --large             run a 1.1B model with 1500 MiB of memory, compared with
                                     accelerate, diffusers and mmap; needs 15 GB of disk
cargo xtask ci                       run lints, checks, all Rust tests, and a share of the Python
                                     tests
cargo xtask docs                     build the documentation site in target/site
cargo xtask test critical|fast|all   run tests only, those in Python first; `all` has cases that
                                     `ci` leaves out

cargo xtask bench parts              criterion benchmarks of single components
cargo xtask bench llama              the same as `demo --large`, in three rounds
cargo xtask bench exact              logits of a 1.1B model, streamed and in memory
cargo xtask bench caps               a 1.1B model under memory limits and budgets (needs root)
cargo xtask bench offload [ROUNDS [LIMIT_MB]]
                                     a 1.1B model under memory limits, compared with accelerate,
                                     diffusers and mmap; needs 15 GB of disk
cargo xtask bench lora               adapters over a 1.1B model under 1500 MB (needs root)
cargo xtask bench moe                a mixture of experts against accelerate
cargo xtask bench openai             eight clients of `tensorstream serve-openai` for a minute
cargo xtask bench pressure           how fast memory is given back when another process needs it
                                     (needs root)
cargo xtask bench overhead           the cost of streaming when everything is resident, and of many
                                     small layers beside accelerate
cargo xtask bench first-pass [LAYERS|DIRECTORY [BUDGET ...]]
                                     the first pass of a model beside later ones
cargo xtask bench peak               peak memory, streamed and in memory
cargo xtask bench io                 each I/O backend, compared with fio, memcpy and curl
cargo xtask bench storage            streamed bandwidth, compared with fio in alternating runs
cargo xtask bench throughput         tokens per second under 1500 MB, for several batch sizes
cargo xtask bench file-cache         keys and values in files, compared with those in memory
cargo xtask bench load               loading checkpoints, compared with fio and other loaders
cargo xtask bench codecs             lossless compression, compared with ZipNN
cargo xtask bench memory             memory pools, compared with other allocators
cargo xtask bench streams            latency of high-priority work, and cost of stream operations
cargo xtask bench candle             a 1.1B model in candle, compared with candle's own loader and
                                     with Python
cargo xtask bench wire               tensors between processes, compared with raw sockets
cargo xtask bench wire-peers         the same in Python, compared with Arrow Flight, gRPC, ZeroMQ
cargo xtask bench serve              a checkpoint from a server, compared with a socket and a file
cargo xtask bench broadcast          fetching a checkpoint to one and to four machines (needs root)
cargo xtask bench remote             the device ts, compared with raw sockets, rpc, Ray and others
cargo xtask bench sessions           one process for each session, compared with one for all
cargo xtask bench links              links that are cut, and a link with a long round trip (needs
                                     root)
cargo xtask bench kills              what writers of files leave that are killed

cargo xtask opdb                     compare PyTorch's operators on the device ts and on the CPU
cargo xtask opdb modules             the same for PyTorch's modules
cargo xtask opdb every               the same with seven dtypes and more inputs with gradients
cargo xtask opdb relaid              the same with inputs in channels_last and other layouts
cargo xtask opdb served              the same in a sandbox of `tensorstream serve`
cargo xtask attack                   send 200,000 hostile requests to `tensorstream serve`
cargo xtask models [NAME...]         stream small models of transformers and diffusers, and train
                                     adapters of PEFT; takes about half an hour
cargo xtask programs                 run 200 random programs under memory limits, and compare their
                                     results with those in memory (needs root)
cargo xtask soak                     run a streamed model for 30 minutes, while reads fail, calls
                                     are interrupted, and memory is short
cargo xtask fuzz [SECONDS]           fuzz each parser, for 60 s by default
cargo xtask valgrind                 run the tests of streams and pools under memcheck
cargo xtask big-endian               test the file format on an emulated s390x (needs root)
cargo xtask isa                      run tests of exact results with fewer instructions of the CPU
cargo xtask platforms                check all crates for Windows, macOS, aarch64 and musl, and run
                                     tests under QEMU and Wine
cargo xtask packages                 package the crates, and compile each from its archive
cargo xtask packages programs        package the crates, and run the programs of examples/rust with
                                     the archives; compiles candle, which takes minutes
cargo xtask candle                   lint and test crates/ts-candle, which `ci` leaves out
cargo xtask oldest-torch             test the device on PyTorch 2.10; installs another 6 GB
cargo xtask ptx                      compile the kernels for GPUs, after a change of kernels.cu
cargo xtask gpu-bundle               build target/gpu-bundle: tests and a wheel for a GPU machine

Needs a Rust toolchain and Python 3.11 or later. Python packages are installed in .venv.";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args[..] {
        ["demo"] => demo(),
        ["demo", "--large"] => {
            python::optimized().and_then(|venv| bench::run_script(&venv, "llama", &["1"]))
        }
        ["ci"] => {
            // Incremental compilation makes a first build slower.
            // SAFETY: no other thread exists yet.
            unsafe { std::env::set_var("CARGO_INCREMENTAL", "0") };
            ci()
        }
        ["docs"] => docs(),
        ["test", tier] => test(tier),
        ["bench", "offload", ref arguments @ ..] => {
            python::optimized().and_then(|venv| bench::run_script(&venv, "offload", arguments))
        }
        ["bench", "first-pass", ref arguments @ ..] => {
            python::prepared().and_then(|venv| bench::run_script(&venv, "first_pass", arguments))
        }
        ["bench", what] => bench::run(what),
        ["big-endian"] => big_endian::test(),
        ["ptx"] => ptx::compile(),
        ["gpu-bundle"] => gpu_bundle::make(),
        ["valgrind"] => valgrind::memcheck(),
        ["opdb"] => python::prepared().and_then(|venv| bench::run_script(&venv, "opdb", &[])),
        ["opdb", "modules"] => {
            python::prepared().and_then(|venv| bench::run_script(&venv, "opdb", &["--modules"]))
        }
        ["opdb", "served"] => {
            python::prepared().and_then(|venv| bench::run_script(&venv, "opdb", &["--served"]))
        }
        ["attack"] => python::prepared().and_then(|venv| bench::run_script(&venv, "attack", &[])),
        ["models", ref names @ ..] => {
            python::prepared().and_then(|venv| bench::run_script(&venv, "every_model", names))
        }
        ["programs"] => {
            python::prepared().and_then(|venv| bench::run_script(&venv, "programs", &[]))
        }
        ["soak"] => python::prepared().and_then(|venv| bench::run_script(&venv, "soak", &[])),
        ["opdb", "every"] => {
            python::prepared().and_then(|venv| bench::run_script(&venv, "opdb", &["--every"]))
        }
        ["opdb", "relaid"] => {
            python::prepared().and_then(|venv| bench::run_script(&venv, "opdb", &["--relaid"]))
        }
        ["isa"] => isa::test(),
        ["oldest-torch"] => oldest_torch(),
        ["packages"] => packages::verify(),
        ["packages", "programs"] => packages::programs(),
        ["candle"] => candle::check(),
        ["platforms"] => platforms::all(),
        ["fuzz"] => fuzz::all(60),
        ["fuzz", seconds] => seconds
            .parse()
            .map_err(|_| format!("invalid time \"{seconds}\": expected a whole number of seconds"))
            .and_then(fuzz::all),
        ["help" | "--help"] | [] => {
            println!("{HELP}");
            Ok(())
        }
        _ => Err(format!("unknown task or wrong arguments: \"{}\"\n\n{HELP}", args.join(" "))),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}

fn demo() -> Result<()> {
    let venv = python::prepared_for_demo()?;
    run::run(venv.python().arg("examples/huggingface_directory.py"))
}

fn docs() -> Result<()> {
    python::site(&python::prepared()?)
}

/// Runs lints, checks, all Rust tests, and a share of the Python tests. The fast checks come first.
///
/// Steps that compile run at the same time as steps that wait or use a single thread.
fn ci() -> Result<()> {
    let began = Instant::now();
    let mut counts = Counts::default();
    step("formatting", || run::run(cargo().args(["fmt", "--all", "--check"])))?;
    step("line lengths", check::lines)?;
    at_once(
        || {
            let venv = step("Python packages", python::packages)?;
            step("OpenSSH server", ssh_server::prepare)?;
            step("Python formatting, lints and types", || python::lint(&venv))?;
            step("stand-in accelerator", || stand_in::prepare(&venv))
        },
        || {
            step("dependencies and licences", check::dependencies)?;
            step("security advisories", check::advisories)?;
            step("cycles of imports", cycles::cycles)?;
            step("lints", || {
                let deny = ["--workspace", "--all-targets", "--", "-D", "warnings"];
                run::run(cargo().arg("clippy").args(deny))
            })?;
            // Each package compiles with its default features, which leave GPUs out.
            step("packages, compiled from their archives", packages::verify)?;
            step("documentation", || {
                let mut doc = cargo();
                doc.args(["doc", "--workspace", "--no-deps", "--document-private-items"]);
                run::run(doc.env("RUSTDOCFLAGS", "-D warnings"))
            })?;
            step("compilation of Rust tests", || {
                run::run(cargo().args(["test", "--workspace", "--no-run"]))
            })
        },
    )?;
    let (installed, wait_for_wheel) = mpsc::channel();
    let in_python = at_once(
        move || {
            let venv = step("wheel", python::prepared)?;
            let _ = installed.send(venv.clone()); // the other side may have failed
            // With several OpenMP threads, the processes wait for each other's threads, and take
            // three times as long. Only the critical tests run with all threads.
            let single = [("OMP_NUM_THREADS", "1")];
            let mut counts = step("Python tests", || {
                let share = [&python::PARALLEL[..], &["--share"]].concat();
                python::test_limited(&venv, &share, &single)
            })?;
            counts += step("critical Python tests, with all threads", || {
                python::test(&venv, &["-m", "critical"])
            })?;
            Ok(counts)
        },
        || {
            // Some of these start Python servers. Most of the time, they wait.
            step("Rust tests", || {
                counts += cargo_test(&["--workspace"])?;
                Ok(())
            })?;
            // The Rust tests have compiled this driver.
            step("tests of GPU code on an emulated driver", || {
                counts += run::emulated(&["--workspace", "--test", "gpu", "--test", "devices"])?;
                Ok(())
            })?;
            step("types for Windows and macOS", platforms::quick)?;
            step("models of concurrent code", || {
                counts += run::models(1_000)?;
                Ok(())
            })?;
            step("benchmarks, once each", bench::smoke)?;
            let Ok(venv) = wait_for_wheel.recv() else {
                return Ok(()); // the other side says why there is no wheel
            };
            step("types of the package and the examples", || python::installed_types(&venv))?;
            step("documentation site", || python::site(&venv))?;
            step("peak memory of the process", || bench::run_script(&venv, "peak", &["minilm"]))
        },
    )?;
    counts += in_python;
    println!("\nci took {:.0} s", began.elapsed().as_secs_f64());
    println!("{counts}");
    Ok(())
}

/// Runs two pieces of work at the same time, the first one in another thread. Returns the result of
/// the first one, or the first error.
fn at_once<T: Send>(
    first: impl FnOnce() -> Result<T> + Send,
    second: impl FnOnce() -> Result<()>,
) -> Result<T> {
    std::thread::scope(|scope| {
        let other = scope.spawn(first);
        let done = second();
        let result = other.join().map_err(|_| "a thread of xtask panicked")?;
        done.and(result)
    })
}

/// Runs the tests of the device `ts` on the oldest PyTorch that it supports.
fn oldest_torch() -> Result<()> {
    let venv = python::prepared_oldest()?;
    println!(
        "{}",
        python::test(&venv, &["tests/test_remote.py", "tests/test_remote_machines.py"])?
    );
    Ok(())
}

fn test(tier: &str) -> Result<()> {
    let (rust, python): (&[&str], &[&str]) = match tier {
        "critical" => (&["--workspace", "--lib"], &["-m", "critical"]),
        "fast" => (&["--workspace"], &["-m", "not slow", "--share"]),
        "all" => (&["--workspace"], &python::PARALLEL),
        _ => return Err(format!("unknown tier \"{tier}\": expected critical, fast or all")),
    };
    let venv = python::prepared()?;
    // The Python tests come first, since most edits are to Python files.
    let mut counts = python::test(&venv, python)?;
    counts += cargo_test(rust)?;
    if tier == "all" {
        counts += run::models(10_000)?;
    }
    println!("{counts}");
    Ok(())
}

/// Runs a step of `ci`, and prints its name and duration. Output of steps that run at the same time
/// is mixed.
fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("\n== {name}");
    let began = Instant::now();
    let done = work().map_err(|e| format!("{name}: {e}"))?;
    println!("-- {name}: {:.0} s", began.elapsed().as_secs_f64());
    Ok(done)
}
