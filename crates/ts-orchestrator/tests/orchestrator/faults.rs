// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests that damaged files and failing storage cause errors, and never wrong bytes.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use ts_format::Digest;
use ts_io::fault::{Fault, Faults, FaultyProvider};
use ts_io::{
    Availability, Backend, BackendOptions, BackendProvider, Capabilities, Completion,
    CompletionSink, ReadRequest, Registry, Rejected, Source,
};
use ts_orchestrator::{Engine, Error, ErrorKind, Prefetch, RangeDigest, UnitId, Verify};

use crate::testing::{KIB, Model, acquire_tensor, buffered, config, with_backend};

#[test]
fn a_truncated_file_is_an_error_that_names_the_tensor() {
    let model = Model::new(&[200 * KIB; 6]);
    let engine = model.engine(config(450 * KIB)).unwrap();
    model.pass(&engine, &[0, 1, 2, 3, 4, 5]);
    fs::OpenOptions::new().write(true).open(&model.path).unwrap().set_len(500_000).unwrap();
    let errors: Vec<Error> =
        (0..6).filter_map(|unit| acquire_tensor(&engine, unit).err()).collect();
    assert!(!errors.is_empty());
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Storage);
        let text = error.to_string();
        assert!(
            text.contains("weights") && text.contains("tensor `t") && text.contains("byte"),
            "{text}"
        );
    }
}

#[test]
fn a_file_that_lost_its_name_streams_on_with_every_backend() {
    let replace = |model: &Model| {
        let other = model.path.with_extension("new");
        fs::write(&other, vec![0; model.content.len()]).unwrap();
        fs::rename(&other, &model.path).unwrap();
    };
    let rename = |model: &Model| fs::rename(&model.path, model.path.with_extension("old")).unwrap();
    let remove = |model: &Model| fs::remove_file(&model.path).unwrap();
    let changes: [&dyn Fn(&Model); 3] = [&replace, &rename, &remove];
    for provider in Registry::builtin().providers() {
        for (change, is_early) in
            changes.iter().flat_map(|change| [(change, true), (change, false)])
        {
            let model = Model::new(&[200 * KIB; 6]);
            let source = Source::open(&model.path).unwrap();
            if provider.probe(std::slice::from_ref(&source)) != Availability::Available {
                continue;
            }
            // Before any read, or after a pass.
            let backend = Some(provider.name().to_string());
            let engine = model.engine(config(450 * KIB).with_backend(backend)).unwrap();
            let passes = if is_early { 0 } else { 1 };
            for _ in 0..passes {
                let _ = model.pass(&engine, &[0, 1, 2, 3, 4, 5]);
            }
            change(&model);
            for _ in 0..3 {
                let _ = model.pass(&engine, &[0, 1, 2, 3, 4, 5]);
            }
            assert!(engine.stats().units.iter().any(|unit| !unit.resident));
        }
    }
}

#[test]
fn a_renamed_file_that_is_written_to_is_an_error() {
    let model = Model::new(&[200 * KIB; 6]);
    let engine = model.engine(config(450 * KIB)).unwrap();
    model.pass(&engine, &[0, 1, 2, 3, 4, 5]);
    let renamed = model.path.with_extension("old");
    fs::rename(&model.path, &renamed).unwrap();
    model.pass(&engine, &[0, 1, 2, 3, 4, 5]);
    std::thread::sleep(Duration::from_millis(20));
    let file = fs::OpenOptions::new().write(true).open(&renamed).unwrap();
    std::io::Write::write_all(&mut &file, &vec![0; model.content.len()]).unwrap();
    let streamed = engine.stats().units.iter().position(|u| !u.resident).unwrap();
    let error = (0..6)
        .chain([streamed])
        .find_map(|unit| acquire_tensor(&engine, unit as u32).err())
        .expect("the change is detected");
    assert!(error.to_string().contains("it was written to"), "{error}");
}

#[test]
fn a_modified_file_with_its_old_time_is_an_error() {
    let model = Model::new(&[200 * KIB; 6]);
    // Without prefetching, no read ends between the write and the change of the time.
    let engine = model.engine(config(450 * KIB).with_prefetch(Prefetch::None)).unwrap();
    model.pass(&engine, &[0, 1, 2, 3, 4, 5]);
    let before = fs::metadata(&model.path).unwrap().modified().unwrap();
    // Sleeps longer than a tick of the file system clock, so that the change time differs.
    std::thread::sleep(Duration::from_millis(20));
    let file = fs::OpenOptions::new().write(true).open(&model.path).unwrap();
    std::io::Write::write_all(&mut &file, &vec![0; model.content.len()]).unwrap();
    file.set_modified(before).unwrap();
    drop(file);
    let streamed = engine.stats().units.iter().position(|u| !u.resident).unwrap();
    let error = (0..6)
        .chain([streamed])
        .find_map(|unit| acquire_tensor(&engine, unit as u32).err())
        .expect("the change is detected");
    assert!(error.to_string().contains("its ctime changed"), "{error}");
}

/// The backend `buffered`, which also counts the requests whose buffers were not returned.
struct CountingProvider(Arc<AtomicUsize>);

struct CountingBackend {
    live: Arc<AtomicUsize>,
    inner: Box<dyn Backend>,
}

impl BackendProvider for CountingProvider {
    fn name(&self) -> &'static str {
        "counting"
    }
    fn priority(&self) -> u8 {
        0
    }
    fn probe(&self, _: &[Arc<Source>]) -> Availability {
        Availability::Available
    }
    fn create(
        &self,
        options: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, ts_io::Error> {
        let live = Arc::clone(&self.0);
        let counting = Box::new(move |completion: Completion| {
            live.fetch_sub(1, Ordering::SeqCst);
            sink(completion);
        });
        let inner = buffered().create(options, counting)?;
        Ok(Box::new(CountingBackend { live: Arc::clone(&self.0), inner }))
    }
}

impl Backend for CountingBackend {
    fn name(&self) -> &'static str {
        "counting"
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>> {
        self.live.fetch_add(1, Ordering::SeqCst);
        self.inner.submit(request)
    }
    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize {
        self.inner.cancel(wanted)
    }
}

#[test]
fn a_device_that_recovers_is_read_again() {
    let model = Model::new(&[200 * KIB; 6]);
    let fail = Arc::new(AtomicBool::new(true));
    let failing = Arc::clone(&fail);
    let faults = Faults::new(move |_| failing.load(Ordering::SeqCst).then_some(Fault::Errno(5)));
    let provider = FaultyProvider::new(buffered(), faults);
    let engine = model.engine(with_backend(config(450 * KIB), provider)).unwrap();
    for unit in [3, 4] {
        let error = acquire_tensor(&engine, unit).unwrap_err();
        assert!(error.to_string().contains(&format!("tensor `t{unit}`")), "{error}");
        assert!(error.to_string().contains("os error 5"), "{error}");
    }
    fail.store(false, Ordering::SeqCst);
    for unit in 0..6 {
        // A failed prefetch is reported once.
        let bytes =
            acquire_tensor(&engine, unit).or_else(|_| acquire_tensor(&engine, unit)).unwrap();
        model.check(unit as usize, &bytes);
    }
}

#[test]
fn an_engine_dropped_while_reading_gets_every_buffer_back() {
    let model = Model::new(&[200 * KIB; 8]);
    for _ in 0..20 {
        let live = Arc::new(AtomicUsize::new(0));
        let engine = model
            .engine(with_backend(config(900 * KIB), CountingProvider(Arc::clone(&live))))
            .unwrap();
        let _reads_ahead = engine.begin_pass();
        drop(engine);
        assert_eq!(live.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn errors_name_units_and_files_that_do_not_exist() {
    let model = Model::new(&[1000]);
    let engine = model.engine(config(64 * KIB)).unwrap();
    assert!(matches!(acquire_tensor(&engine, 7), Err(Error::NoSuchUnit { unit: 7, count: 1 })));
    let Err(error) = Engine::new(model.units.clone(), Vec::new(), config(64 * KIB)) else {
        panic!("file 0 does not exist")
    };
    assert!(matches!(&error, Error::NoSuchFile { tensor, .. } if tensor == "t0"));
    assert!(Path::new(&model.path).exists());
}

#[test]
fn a_checksum_mismatch_reports_its_location() {
    let mut model = Model::new(&[3 << 20, 40 * KIB, 40 * KIB]);
    for (i, unit) in model.units.clone().iter().enumerate() {
        let digest = Arc::new(Digest::of(&model.expected(i, 0)));
        let [range] = unit.tensors[0].entry.parts[..] else { panic!("the tensor has one part") };
        model.units[i].tensors[0].digest = Some(RangeDigest { range, digest });
    }
    for round in 0..2 {
        let engine = model.engine(config(4 << 20)).unwrap();
        let first = engine.acquire(None, UnitId(0));
        if round == 0 {
            model.check(0, &first.unwrap().tensor(0));
            let mut damaged = model.content.clone();
            damaged[8 + (2 << 20) + 5] ^= 0x10;
            fs::write(&model.path, damaged).unwrap();
            continue;
        }
        for _ in 0..2 {
            let error = engine.acquire(None, UnitId(0)).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            let location = format!(
                "tensor `t0`: {}: 1048576 bytes at byte {}",
                model.path.display(),
                8 + (2 << 20)
            );
            assert!(error.to_string().contains(&location), "{error}");
        }
        model.check(1, &engine.acquire(None, UnitId(1)).unwrap().tensor(0));
    }
    let engine = model.engine(config(4 << 20).with_verify(Verify::Never)).unwrap();
    assert!(engine.acquire(None, UnitId(0)).is_ok());
}

#[test]
fn verify_once_trusts_later_reads() {
    let mut model = Model::new(&[3 << 20, 3 << 20]);
    for i in 0..2 {
        let digest = Arc::new(Digest::of(&model.expected(i, 0)));
        let range = model.units[i].tensors[0].entry.parts[0];
        model.units[i].tensors[0].digest = Some(RangeDigest { range, digest });
    }
    let visit = |engine: &Engine, unit| engine.acquire(None, UnitId(unit)).map(|_| ());
    for (verify, again) in [(Verify::EveryRead, Some(ErrorKind::Corrupt)), (Verify::Once, None)] {
        let config = || config(4 << 20).with_verify(verify).with_prefetch(Prefetch::None);
        let engine = model.engine(config()).unwrap();
        visit(&engine, 0).unwrap();
        visit(&engine, 1).unwrap();
        // Simulates a bit flip on the disk: the modification time is unchanged, and a new mode
        // explains the new change time.
        let modified = fs::metadata(&model.path).unwrap().modified().unwrap();
        let overwrite = |content: &[u8]| {
            let file = fs::File::options().write(true).open(&model.path).unwrap();
            std::io::Write::write_all(&mut &file, content).unwrap();
            file.set_modified(modified).unwrap();
            #[cfg(unix)] // elsewhere, files have no change time
            {
                use std::os::unix::fs::PermissionsExt;
                let mode = file.metadata().unwrap().permissions().mode();
                file.set_permissions(fs::Permissions::from_mode(mode ^ 0o040)).unwrap();
            }
        };
        let mut damaged = model.content.clone();
        damaged[8 + (1 << 20)] ^= 1;
        overwrite(&damaged);
        assert_eq!(visit(&engine, 0).err().map(|error| error.kind()), again, "{verify:?}");
        drop(engine);
        let engine = model.engine(config()).unwrap();
        assert_eq!(
            visit(&engine, 0).unwrap_err().kind(),
            ErrorKind::Corrupt,
            "{verify:?}: the first read is verified"
        );
        assert_eq!(
            visit(&engine, 0).unwrap_err().kind(),
            ErrorKind::Corrupt,
            "{verify:?}: a failed read is not trusted"
        );
        drop(engine);
        overwrite(&model.content.clone());
    }
}
