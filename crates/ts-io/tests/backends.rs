// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests the built-in backends for files on a real file system.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use ts_io::conformance::{self, Directory};
use ts_io::{ErrorKind, Registry, Source};

/// Creates a directory on the file system of the build, which must support direct I/O.
fn dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target directory is writable")
}

fn conforms(name: &str) {
    let dir = dir();
    std::fs::write(dir.path().join("probe"), [0; 4096]).unwrap();
    let probe = Source::open(dir.path().join("probe")).unwrap();
    // Panics if the backend is not available: a skipped test would look like a pass.
    let choice = Registry::builtin().choose(Some(name), &[probe]).unwrap();
    let fixture = Directory(dir.path().to_path_buf());
    conformance::check(choice.provider.as_ref(), &fixture);
    conformance::check_with_faults(&choice.provider, &fixture);
}

#[test]
fn buffered_conforms() {
    conforms("buffered");
}

#[test]
fn errors_name_unknown_backends_and_missing_files() {
    let error = Registry::builtin().choose(Some("nvme"), &[]).unwrap_err();
    assert!(error.to_string().contains("\"nvme\" (expected one of adaptive, "), "{error}");
    let error = Source::open(dir().path().join("model.safetensors")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("model.safetensors"));
    assert_eq!(Source::open("/").unwrap_err().kind(), ErrorKind::Io);
}

#[cfg(target_os = "linux")]
mod linux {
    use std::sync::Arc;
    use std::time::Duration;

    use ts_io::{
        BackendOptions, Completion, Error, MappedView, ReadPath, ReadRequest, Tuner, Tuning,
        completion_queue,
    };
    use ts_pool::{Budget, HostPool};

    use super::*;

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

    #[test]
    fn gds_conforms_or_reports_why_it_is_unavailable() {
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
                assert!(error.to_string().contains(&reason), "{error}");
                assert!(reason.contains("cufile") || reason.contains("cuFile"), "{reason}");
            }
        }
    }

    #[test]
    fn a_mapped_view_has_the_bytes_and_detects_changes() {
        let dir = dir();
        let path = dir.path().join("viewed");
        let content: Vec<u8> = (0..100_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let source = Source::open(&path).unwrap();
        // SAFETY: only this test uses the file, and it replaces the file instead of writing to it.
        let view = |offset, len| unsafe { MappedView::new(&source, offset, len) };
        for (offset, len) in [(0, 100_000), (5001, 4096), (99_999, 1), (7, 0)] {
            assert!(view(offset, len).unwrap()[..] == content[offset as usize..][..len]);
        }
        assert!(matches!(view(99_999, 2).unwrap_err(), Error::ShortRead { actual: 1, .. }));
        let old = view(0, 4096).unwrap();
        old.verify().unwrap();
        std::fs::write(path.with_extension("new"), [0; 100_000]).unwrap();
        std::fs::rename(path.with_extension("new"), &path).unwrap();
        old.verify().unwrap();
        assert!(view(0, 4096).unwrap()[..] == content[..4096], "the file that was opened");
        assert!(old[..] == content[..4096], "an existing view keeps the bytes of the old file");
        let (path, other) = (path.with_extension("b"), dir.path().join("c"));
        std::fs::write(&path, &content).unwrap();
        let source = Source::open(&path).unwrap();
        // SAFETY: nothing reads the bytes of this view.
        let view = unsafe { MappedView::new(&source, 0, 4096) }.unwrap();
        std::fs::rename(&path, &other).unwrap();
        view.verify().unwrap();
        std::fs::OpenOptions::new().append(true).open(&other).unwrap().set_len(100_001).unwrap();
        assert_eq!(view.verify().unwrap_err().kind(), ErrorKind::Changed);
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

    fn path_of(name: &str, source: &Arc<Source>, offset: u64, len: usize) -> ReadPath {
        read_with(name, source, offset, len).unwrap().result.unwrap().paths[0].0
    }

    #[test]
    fn the_completion_reports_the_path_taken() {
        let dir = dir();
        let path = dir.path().join("f");
        std::fs::write(&path, vec![1; 65536]).unwrap();
        let source = Source::open(&path).unwrap();
        assert_eq!(source.residency(0, 65536), Some(1.0), "a file just written is cached");
        assert_eq!(path_of("buffered", &source, 0, 65536), ReadPath::Buffered);
        assert_eq!(path_of("direct", &source, 0, 65536), ReadPath::Direct);
        assert_eq!(path_of("adaptive", &source, 0, 65536), ReadPath::Buffered);
    }

    #[test]
    fn adaptive_reads_uncached_ranges_directly() {
        let dir = dir();
        let path = dir.path().join("cold");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let source = Source::open(&path).unwrap();
        source.evict().unwrap();
        assert_eq!(source.residency(0, 1 << 20), Some(0.0));
        assert_eq!(path_of("adaptive", &source, 65536, 65536), ReadPath::Direct);
        assert_eq!(source.residency(0, 1 << 20), Some(0.0));
        let unaligned = path_of("adaptive", &source, 3, 1000);
        assert_eq!(unaligned, ReadPath::Buffered, "an unaligned range needs the page cache");
    }

    #[test]
    fn a_misaligned_direct_read_is_rejected() {
        let dir = dir();
        std::fs::write(dir.path().join("f"), [0; 8192]).unwrap();
        let source = Source::open(dir.path().join("f")).unwrap();
        let error = read_with("direct", &source, 3, 4096).unwrap_err();
        assert!(matches!(error, Error::Misaligned { offset: 3, .. }), "{error}");
    }

    #[test]
    fn the_tuner_measures_each_file_system_once() {
        let (cache, dir) = (dir(), dir());
        let path = dir.path().join("large");
        std::fs::File::create(&path).unwrap().set_len(256 << 20).unwrap();
        let source = Source::open(&path).unwrap();
        let budget = Budget::new(1 << 30);
        let cache = cache.path().join("not/there/yet");
        let tuner = Tuner::with_cache_dir(Some(cache.clone()));

        let interrupted = tuner.tuning(&source, &budget, &mut || true);
        assert!(matches!(interrupted, Err(Error::Interrupted)), "{interrupted:?}");
        let measured = tuner.tuning(&source, &budget, &mut || false).unwrap();
        assert_eq!(budget.used_bytes(), 0);
        // A second measurement would call this function.
        let mut never = || panic!("measured again");
        assert_eq!(tuner.tuning(&source, &budget, &mut never).unwrap(), measured);

        let file = std::fs::read_dir(cache).unwrap().next().unwrap().unwrap().path();
        std::fs::write(&file, "choice = 2\nrequest_bytes = 1048576\nin_flight = 2\n").unwrap();
        let expected = Tuning::default().with_request_bytes(1 << 20).with_in_flight(2);
        assert_eq!(tuner.tuning(&source, &budget, &mut never).unwrap(), expected);
        assert_eq!(
            Tuner::disabled().tuning(&source, &budget, &mut never).unwrap(),
            Tuning::default()
        );
    }
}
