// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program `tensorstream`, which runs as a child process.

#![allow(clippy::unwrap_used)] // in a test a panic is the report

#[allow(dead_code)] // other tests use all of it
mod common;

use std::process::{Command, Output};
#[cfg(unix)]
use std::{
    path::Path,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use common::write;

const PROGRAM: &str = env!("CARGO_BIN_EXE_tensorstream");

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn errors_are_json_with_the_json_flag() {
    let directory = tempfile::tempdir().unwrap();
    let none = directory.path().join("none.ts");
    for (arguments, status, kind) in [
        (vec!["--json", "info", none.to_str().unwrap()], 1, "not_found"),
        (vec!["info", "--json"], 2, "usage"),
        (vec!["--json", "serve", "--listen", "127.0.0.1:0"], 2, "Python package"),
        (vec!["--json", "generate", "org/model"], 2, "Python package"),
        (vec!["convert", "a.ts", "b.ts", "--codec", "best", "--json"], 1, "misuse"),
    ] {
        let done = run(&arguments);
        let printed = text(&done.stdout);
        assert_eq!(done.status.code(), Some(status), "{printed}");
        assert!(
            printed.starts_with(r#"{"error":{"kind":""#) && printed.contains(kind),
            "{printed}"
        );
        assert!(printed.contains(r#""message":""#) && printed.lines().count() == 1, "{printed}");
        assert_eq!(text(&done.stderr), "");
    }
    // Help is not an error, and is printed as text.
    assert!(text(&run(&["--json", "--help"]).stdout).contains("Usage:"));
}

#[test]
fn zero_counts_and_directories_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    for arguments in [&["demo", "--passes", "0"][..], &["bench", "io", "x", "--rounds", "0"]] {
        let refused = run(arguments);
        assert_eq!(refused.status.code(), Some(2));
        assert!(text(&refused.stderr).contains("expected a whole number, at least 1"));
    }
    let refused = run(&["bench", "io", directory.path().to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("name one file in it"), "{}", text(&refused.stderr));
}

#[test]
fn quiet_and_verbose_change_the_output() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    write(&path, 2);
    let path = path.to_str().unwrap();
    assert_eq!(text(&run(&["-q", "verify", path]).stderr), "");
    assert!(text(&run(&["verify", path, "-v"]).stderr).contains("status 0 after"));
    assert_eq!(run(&["-q", "-v", "verify", path]).status.code(), Some(2));
}

#[test]
fn completion_scripts_exist_for_every_shell() {
    for shell in ["bash", "zsh", "fish"] {
        let done = run(&["completion", shell]);
        assert_eq!(done.status.code(), Some(0));
        let script = text(&done.stdout);
        assert!(
            script.contains("convert") && script.contains("--codec") || shell == "fish",
            "{script}"
        );
        assert!(script.contains("tensorstream"));
    }
    assert_eq!(run(&["completion", "tcsh"]).status.code(), Some(2));
}

#[cfg(unix)]
fn signal(child: &Child, signal: &str) {
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Returns whether this process ignores SIGHUP, and so do the programs that it starts.
#[cfg(all(unix, feature = "remote"))]
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() & 1 != 0)
}

#[cfg(unix)]
fn ends_within(mut child: Child, time: Duration) -> Output {
    let end = Instant::now() + time;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("the program did not end within {time:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

#[cfg(unix)]
fn start(arguments: &[&str]) -> Child {
    Command::new(PROGRAM)
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Writes tensors that take long to compress with a high level of zstd.
#[cfg(unix)]
fn large(path: &Path) {
    use tensorstream::format::{Dtype, TensorMeta};
    use tensorstream::{FileWriter, NewTensor, WriteOptions};

    let new = |i: u32| NewTensor {
        name: format!("t{i}"),
        meta: TensorMeta { dtype: Dtype::U8, shape: vec![1 << 20] },
        phase: None,
    };
    let tensors = (0..64).map(new).collect();
    let options = WriteOptions::default();
    let mut writer =
        FileWriter::create(path, tensors, Default::default(), options, &mut || false).unwrap();
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8 & 0x1f
    };
    let bytes: Vec<u8> = (0..64 << 20).map(|_| next()).collect();
    writer.write(&bytes).unwrap();
    writer.commit().unwrap();
}

#[cfg(unix)]
#[test]
fn a_signal_interrupts_a_conversion_which_can_be_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("a.ts"), directory.path().join("b.ts"));
    large(&from);
    let arguments = ["convert", from.to_str().unwrap(), to.to_str().unwrap(), "--jobs", "1"];
    let slow = [&arguments[..], &["--codec", "zstd", "--level", "19"]].concat();
    let partial = directory.path().join("b.ts.partial");
    let written = || std::fs::metadata(&partial).map_or(0, |metadata| metadata.len());
    for (name, status) in [("-INT", 130), ("-TERM", 143)] {
        let running = start(&slow);
        let begin = Instant::now();
        // Waits until some tensors are complete. In the second round, the first round has written
        // them.
        while written() < 2 << 20 && begin.elapsed() < Duration::from_secs(120) {
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_secs(1));
        signal(&running, name);
        let done = ends_within(running, Duration::from_secs(4));
        let printed = text(&done.stderr);
        assert_eq!(done.status.code(), Some(status), "{printed}");
        assert!(printed.contains("run the same command to resume"), "{printed}");
        assert!(partial.exists());
    }
}

#[cfg(all(unix, feature = "remote"))]
#[test]
fn a_signal_shuts_down_a_weight_server() {
    use std::io::{BufRead, BufReader, Read};

    let directory = tempfile::tempdir().unwrap();
    write(&directory.path().join("model.safetensors"), 2);
    for name in ["-INT", "-TERM", "-HUP"] {
        if name == "-HUP" && is_hangup_ignored() {
            println!("skipped: SIGHUP is ignored, as under nohup, and the server inherits that");
            continue;
        }
        let path = directory.path().to_str().unwrap();
        let mut running = start(&["serve-weights", path, "--listen", "127.0.0.1:0"]);
        let mut output = BufReader::new(running.stdout.take().unwrap());
        output.read_line(&mut String::new()).unwrap();
        signal(&running, name);
        let done = ends_within(running, Duration::from_secs(5));
        assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("connections"), "{rest}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_an_error() {
    use std::fs::File;

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    write(&path, 3);
    let path = path.to_str().unwrap();
    for arguments in [&["info", path][..], &["--json", "verify", path], &["--help"]] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let done = Command::new(PROGRAM).args(arguments).stdout(full).output().unwrap();
        assert_eq!(done.status.code(), Some(1), "{arguments:?}");
        assert!(text(&done.stderr).contains("cannot write to standard output"), "{arguments:?}");
        // Messages are less important than the work.
        let full = File::options().write(true).open("/dev/full").unwrap();
        let done = Command::new(PROGRAM).args(arguments).stderr(full).output().unwrap();
        assert_eq!(done.status.code(), Some(0), "{arguments:?}");
    }
    // It is no error that a reader has seen enough.
    let mut reading = Command::new(PROGRAM).args(["info", path]).stdout(Stdio::piped()).spawn();
    drop(reading.as_mut().unwrap().stdout.take());
    assert_eq!(reading.unwrap().wait().unwrap().code(), Some(0));
}

#[cfg(target_os = "linux")]
#[test]
fn a_server_whose_log_cannot_be_written_goes_on() {
    use std::fs::File;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpStream;

    let directory = tempfile::tempdir().unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let served = directory.path().to_str().unwrap();
    let mut running = Command::new(PROGRAM)
        .args(["serve-weights", served, "--listen", "127.0.0.1:0", "-v"])
        .stdout(Stdio::piped())
        .stderr(full)
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(running.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    let address = line.trim().rsplit_once("ts://").unwrap().1.trim_end_matches('/').to_string();
    for _ in 0..3 {
        let mut stranger = TcpStream::connect(&address).unwrap();
        stranger.write_all(&[b'x'; 100]).unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(running.try_wait().unwrap().is_none());
    signal(&running, "-TERM");
    assert_eq!(ends_within(running, Duration::from_secs(5)).status.code(), Some(0));
}

#[test]
fn tokens_with_invisible_characters_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    for (content, reason) in [
        (&b"\xef\xbb\xbfsecret\n"[..], "byte-order mark"),
        (b"sec\0ret\n", "control characters"),
        (b"\nsecret\n", "empty"),
        (b"\xff\xfe", "UTF-8"),
    ] {
        std::fs::write(&token, content).unwrap();
        let refused = run(&[
            "serve-weights",
            directory.path().to_str().unwrap(),
            "--token-file",
            token.to_str().unwrap(),
        ]);
        assert_ne!(refused.status.code(), Some(0));
        assert!(text(&refused.stderr).contains(reason), "{}", text(&refused.stderr));
    }
}

#[test]
fn text_instead_of_a_checkpoint_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let texts = [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        ("<!doctype HTML><title>404</title>", "HTML page"),
        ("\n\t<html lang=en>", "HTML page"),
        ("<?xml version='1.0'?><Error/>", "XML document"),
    ];
    for (content, found) in texts {
        for name in ["m.safetensors", "m.ts", "m.safetensors.index.json"] {
            let path = directory.path().join(name);
            std::fs::write(&path, content).unwrap();
            for command in ["info", "verify", "plan"] {
                let refused = run(&[command, path.to_str().unwrap()]);
                let printed = text(&refused.stderr);
                assert_eq!(refused.status.code(), Some(1), "{command}: {printed}");
                assert!(printed.contains(found) && printed.contains(name), "{command}: {printed}");
            }
        }
    }
}

#[test]
fn foreign_formats_are_detected_and_never_unpickled() {
    let directory = tempfile::tempdir().unwrap();
    let files: [(&str, &[u8], &str); 4] = [
        ("m.gguf", b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0", "GGUF"),
        ("m.pt", b"PK\x03\x04\0\0\x08\x08\0\0\0\0\0\0\0\0", "torch.save"),
        ("m.bin", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02", "torch.save"),
        // The suffix is misleading.
        ("m.safetensors", b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0", "GGUF"),
    ];
    for (name, bytes, found) in files {
        let own = directory.path().join(name.replace('.', "-"));
        std::fs::create_dir(&own).unwrap();
        std::fs::write(own.join(name), bytes).unwrap();
        // Opens the file, and the directory that contains only this file.
        for path in [own.join(name), own] {
            let refused = run(&["info", path.to_str().unwrap()]);
            let printed = text(&refused.stderr);
            assert_eq!(refused.status.code(), Some(1), "{printed}");
            assert!(
                printed.contains(found) && printed.contains("convert it to safetensors"),
                "{printed}"
            );
        }
    }
}
