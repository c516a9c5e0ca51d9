// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every built-in backend, on a real file system.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::sync::Arc;
use std::time::Duration;

use ts_io::{
    BackendOptions, Completion, Error, ErrorKind, ReadPath, ReadRequest, Registry, Source, Tuner,
    Tuning, View, completion_queue,
    conformance::{self, Directory},
};
use ts_pool::{Budget, HostPool};

/// A directory on the file system of the build, which direct I/O can read (a tmpfs could not be).
fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory is writable")
}

fn conforms(name: &str) {
    let dir = dir();
    std::fs::write(dir.path().join("probe"), [0; 4096]).unwrap();
    let probe = Source::open(dir.path().join("probe")).unwrap();
    // The build directory must be on a file system with direct I/O: a skip would look like a pass.
    let choice = Registry::builtin().choose(Some(name), &[probe]).unwrap();
    let place = Directory(dir.path().to_path_buf());
    conformance::check(choice.provider.as_ref(), &place);
    conformance::check_with_faults(&choice.provider, &place);
}

#[test]
fn buffered_conforms() {
    conforms("buffered");
}

#[test]
fn direct_conforms() {
    conforms("direct");
}

#[test]
fn uring_conforms() {
    conforms("uring");
}

#[test]
fn mmap_conforms() {
    conforms("mmap");
}

#[test]
fn adaptive_conforms() {
    conforms("adaptive");
}

/// Where there is no GPU this shows that the reason is told; where there is one, that it conforms.
#[test]
fn gds_conforms_or_says_why_it_is_not_there() {
    let dir = dir();
    std::fs::write(dir.path().join("probe"), [0; 4096]).unwrap();
    let probe = Source::open(dir.path().join("probe")).unwrap();
    match ts_io::gds_mode() {
        Ok(_) => conforms("gds"),
        Err(reason) => {
            let error = Registry::builtin().choose(Some("gds"), &[probe]).unwrap_err();
            assert!(
                matches!(&error, Error::Unavailable { backend, .. } if backend == "gds"),
                "{error}"
            );
            assert!(
                error.to_string().contains(&reason) && reason.contains("cufile")
                    || reason.contains("cuFile")
            );
        }
    }
}

#[test]
fn a_view_is_the_file_s_bytes_and_tells_when_the_file_is_another() {
    let dir = dir();
    let path = dir.path().join("viewed");
    let content: Vec<u8> = (0..100_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
    std::fs::write(&path, &content).unwrap();
    let source = Source::open(&path).unwrap();
    // SAFETY: this test alone has the file, and only replaces it.
    let view = |offset, len| unsafe { View::new(&source, offset, len) };
    for (offset, len) in [(0, 100_000), (5001, 4096), (99_999, 1), (7, 0)] {
        assert!(view(offset, len).unwrap()[..] == content[offset as usize..][..len]);
    }
    assert!(matches!(view(99_999, 2).unwrap_err(), Error::ShortRead { actual: 1, .. }));
    let held = view(0, 4096).unwrap();
    held.verify().unwrap();
    std::fs::write(path.with_extension("new"), [0; 100_000]).unwrap();
    std::fs::rename(path.with_extension("new"), &path).unwrap();
    assert_eq!(held.verify().unwrap_err().kind(), ErrorKind::Changed);
    assert_eq!(view(0, 1).unwrap_err().kind(), ErrorKind::Changed);
    assert!(held[..] == content[..4096], "what is held stays what it was");
}

fn read_with(
    name: &str,
    source: &Arc<Source>,
    offset: u64,
    len: usize,
) -> Result<Completion, Error> {
    let (sink, done) = completion_queue();
    let choice = Registry::builtin().choose(Some(name), std::slice::from_ref(source))?;
    let backend = choice.provider.create(&BackendOptions::default(), sink)?;
    let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20).unwrap();
    let buffer = pool.allocate(len).unwrap();
    let request = ReadRequest::new(0, Arc::clone(source), offset, len, buffer);
    backend.submit(request).map_err(|rejected| rejected.error)?;
    Ok(done.recv_timeout(Duration::from_secs(30)).unwrap())
}

#[test]
fn the_completion_says_which_path_was_really_taken() {
    let dir = dir();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![1; 65536]).unwrap();
    let source = Source::open(&path).unwrap();
    assert_eq!(source.residency(0, 65536), Some(1.0), "just written, so in the page cache");
    for (name, expected) in [
        ("buffered", ReadPath::Buffered),
        ("direct", ReadPath::Direct),
        ("adaptive", ReadPath::Buffered),
    ] {
        let taken = read_with(name, &source, 0, 65536).unwrap().result.unwrap().paths[0].0;
        assert_eq!(taken, expected, "{name}");
    }
}

#[test]
fn adaptive_reads_what_is_not_cached_directly_and_leaves_the_cache_alone() {
    let dir = dir();
    let path = dir.path().join("cold");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    evict(&file);
    let source = Source::open(&path).unwrap();
    assert_eq!(source.residency(0, 1 << 20), Some(0.0));
    let taken = read_with("adaptive", &source, 65536, 65536).unwrap().result.unwrap().paths[0].0;
    assert_eq!(taken, ReadPath::Direct);
    assert_eq!(source.residency(0, 1 << 20), Some(0.0));
    let odd = read_with("adaptive", &source, 3, 1000).unwrap().result.unwrap().paths[0].0;
    assert_eq!(odd, ReadPath::Buffered, "what direct I/O cannot do is read through the cache");
}

fn evict(file: &std::fs::File) {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open; the call only advises the kernel to drop clean pages.
    let rc = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(rc, 0);
}

#[test]
fn a_misaligned_direct_read_is_given_back_with_the_alignment() {
    let dir = dir();
    std::fs::write(dir.path().join("f"), [0; 8192]).unwrap();
    let source = Source::open(dir.path().join("f")).unwrap();
    let error = read_with("direct", &source, 3, 4096).expect_err("3 is no multiple of 512");
    assert!(matches!(error, Error::Misaligned { offset: 3, .. }), "{error}");
}

#[test]
fn unknown_backends_and_missing_files_are_named() {
    let error = Registry::builtin().choose(Some("nvme"), &[]).unwrap_err();
    assert!(error.to_string().contains("adaptive, uring, direct, "), "{error}");
    let error = Source::open("/nonexistent/model.safetensors").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("/nonexistent/model.safetensors"));
    assert_eq!(Source::open("/").unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn what_was_measured_of_a_file_system_is_remembered_and_not_measured_again() {
    let (notes, dir) = (dir(), dir());
    let path = dir.path().join("large");
    std::fs::File::create(&path).unwrap().set_len(256 << 20).unwrap();
    let source = Source::open(&path).unwrap();
    let budget = Budget::new(1 << 30);
    let tuner = Tuner::remembering_in(Some(notes.path().join("not/there/yet")));

    let interrupted = tuner.tuning(&source, &budget, &mut || true);
    assert!(matches!(interrupted, Err(Error::Interrupted)), "{interrupted:?}");
    let measured = tuner.tuning(&source, &budget, &mut || false).unwrap();
    assert_eq!(budget.used_bytes(), 0);
    // From now on nobody asks whether to go on: nothing is measured.
    let mut never = || panic!("measured again");
    assert_eq!(tuner.tuning(&source, &budget, &mut never).unwrap(), measured);

    let note = std::fs::read_dir(notes.path().join("not/there/yet"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    std::fs::write(&note, "request_bytes = 1048576\nin_flight = 2\n").unwrap();
    let expected = Tuning { request_bytes: 1 << 20, in_flight: 2 };
    assert_eq!(tuner.tuning(&source, &budget, &mut never).unwrap(), expected);
    assert_eq!(Tuner::off().tuning(&source, &budget, &mut never).unwrap(), Tuning::default());
}
