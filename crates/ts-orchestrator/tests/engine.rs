// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine on real files: right bytes, exact memory, and an error for everything else.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use proptest::prelude::*;
use ts_format::{ByteRange, Digest, Dtype, FileId, TensorEntry, TensorMeta};
use ts_io::fault::{Fault, Faults, FaultyProvider};
use ts_io::{
    Availability, Backend, BackendOptions, BackendProvider, Capabilities, Completion,
    CompletionSink, ReadRequest, Registry, Rejected, Source,
};
use ts_orchestrator::{
    Engine, EngineConfig, Error, ErrorKind, Phase, Prefetch, TensorBytes, Unit, UnitId, UnitTensor,
    Verify, never_interrupt,
};

const KIB: usize = 1024;

/// A file of known bytes, cut into units of one tensor each.
struct Model {
    _dir: tempfile::TempDir,
    path: PathBuf,
    content: Vec<u8>,
    units: Vec<Unit>,
}

fn tensor(name: &str, parts: &[(u64, usize)], phase: Phase) -> UnitTensor {
    let parts: Vec<_> = parts
        .iter()
        .map(|&(offset, len)| ByteRange { file: FileId(0), offset, len: len as u64 })
        .collect();
    let len = parts.iter().map(|p| p.len).sum();
    let meta = TensorMeta { dtype: Dtype::U8, shape: vec![len] };
    UnitTensor {
        name: name.into(),
        entry: TensorEntry { meta, parts },
        phase,
        digest: None,
        chunks: Vec::new(),
    }
}

impl Model {
    fn new(sizes: &[usize]) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("weights");
        let total = 8 + sizes.iter().sum::<usize>();
        let content: Vec<u8> =
            (0..total).map(|i| (i ^ (i >> 8).wrapping_mul(37) ^ (i >> 16)) as u8).collect();
        fs::write(&path, &content).unwrap();
        let mut at = 8;
        let units = sizes.iter().enumerate().map(|(i, &len)| {
            let tensor = tensor(&format!("t{i}"), &[(at, len)], Phase::Mapped);
            at += len as u64;
            Unit { name: format!("u{i}"), tensors: vec![tensor] }
        });
        let units = units.collect();
        Self { _dir: dir, path, content, units }
    }

    fn engine(&self, config: EngineConfig) -> Result<Engine, Error> {
        Engine::new(self.units.clone(), vec![Source::open(&self.path).unwrap()], config)
    }

    fn expected(&self, unit: usize) -> Vec<u8> {
        let parts = &self.units[unit].tensors[0].entry.parts;
        parts
            .iter()
            .flat_map(|p| self.content[p.offset as usize..][..p.len as usize].to_vec())
            .collect()
    }

    fn check(&self, unit: usize, bytes: &[u8]) {
        assert!(bytes == self.expected(unit), "the bytes of unit {unit} are right");
    }

    fn pass(&self, engine: &Engine, order: &[usize]) -> bool {
        let pass = engine.begin_pass(never_interrupt()).unwrap();
        for &unit in order {
            let lease = engine.acquire(Some(pass), UnitId(unit as u32), never_interrupt()).unwrap();
            self.check(unit, &lease.tensor(0));
        }
        engine.end_pass(pass)
    }
}

fn config(budget: usize) -> EngineConfig {
    EngineConfig { request_bytes: 64 * KIB, ..EngineConfig::with_budget(budget) }
}

/// Waits at most this long for what should happen soon.
fn patience() -> impl FnMut() -> bool {
    let mut ticks = 0;
    move || {
        ticks += 1;
        ticks > 400
    }
}

fn acquire_tensor(engine: &Engine, unit: u32) -> Result<TensorBytes, Error> {
    engine.acquire(None, UnitId(unit), &mut patience()).map(|lease| lease.tensor(0))
}

#[test]
fn a_model_four_times_the_budget_streams_bit_exactly_and_within_it() {
    let model = Model::new(&[300 * KIB; 16]);
    let engine = model.engine(config(1200 * KIB)).unwrap();
    assert_eq!(engine.stats().total_read_bytes(), 0, "nothing is read before a pass begins");
    let order: Vec<_> = (0..16).collect();
    for _ in 0..5 {
        model.pass(&engine, &order);
    }
    let stats = engine.stats();
    assert!(stats.reserved_high_water_bytes <= 1200 * KIB);
    assert!(stats.in_use_high_water_bytes <= stats.reserved_high_water_bytes);
    let resident = stats.units.iter().filter(|u| u.resident).count();
    assert!(resident >= 1, "part of the model is kept");
    assert!(stats.units.iter().filter(|u| u.resident).all(|u| u.loads == 1), "and read once");
    assert!(stats.units.iter().filter(|u| !u.resident).all(|u| u.loads >= 5));
    assert_eq!(stats.wasted_loads, 0, "nothing is read that is not used");
}

#[test]
fn tensors_stand_at_the_phase_they_were_asked_to() {
    let mut model = Model::new(&[1000, 1000]);
    model.units[0].tensors = vec![
        tensor("mapped", &[(8, 100)], Phase::Mapped),
        tensor("moved", &[(112, 100)], Phase::At(24)),
        tensor("merged", &[(700, 10), (300, 50), (3, 7)], Phase::At(0)),
    ];
    let engine = model.engine(config(256 * KIB)).unwrap();
    let lease = engine.acquire(None, UnitId(0), never_interrupt()).unwrap();
    for (index, phase) in [8, 24, 0].into_iter().enumerate() {
        let bytes = lease.tensor(index);
        assert_eq!(bytes.as_ptr().addr() % 64, phase);
        let parts = &model.units[0].tensors[index].entry.parts;
        let expected: Vec<u8> = parts
            .iter()
            .flat_map(|p| model.content[p.offset as usize..][..p.len as usize].to_vec())
            .collect();
        assert_eq!(&bytes[..], expected);
    }
}

#[test]
fn an_assembled_tensor_of_many_pieces_arrives_whole_through_small_bounce_buffers() {
    let mut model = Model::new(&[4 << 20, 16]);
    let parts = [(2_000_001, 1_500_000), (11, 1_900_000), (3_999_000, 900)];
    model.units[0].tensors = vec![tensor("stacked", &parts, Phase::At(0))];
    let engine = model.engine(config(8 << 20)).unwrap();
    for _ in 0..3 {
        model.check(0, &acquire_tensor(&engine, 0).unwrap());
    }
    let stats = engine.stats();
    assert!(stats.reserved_high_water_bytes <= 8 << 20);
}

#[test]
fn a_kept_tensor_is_never_overwritten_and_is_named_when_its_memory_is_needed() {
    let model = Model::new(&[200 * KIB; 4]);
    let engine = model.engine(config(210 * KIB)).unwrap();
    let kept = acquire_tensor(&engine, 0).unwrap();
    let error = acquire_tensor(&engine, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(
        matches!(
            &error,
            Error::StillReferenced { unit, holders, .. } if unit == "u1" && holders == "`u0` x1"
        ),
        "{error}"
    );
    model.check(0, &kept);
    drop(kept);
    model.check(1, &acquire_tensor(&engine, 1).unwrap());
}

#[test]
fn a_tensor_dropped_on_another_thread_lets_a_waiting_unit_in() {
    let model = Model::new(&[200 * KIB; 2]);
    let engine = model.engine(config(210 * KIB)).unwrap();
    let kept = acquire_tensor(&engine, 0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            drop(kept);
        });
        model.check(1, &acquire_tensor(&engine, 1).unwrap());
    });
}

#[test]
fn a_discarded_unit_is_read_anew_also_when_it_was_to_be_kept() {
    let model = Model::new(&[200 * KIB; 2]);
    let engine = model.engine(config(2 << 20)).unwrap();
    for loads in 1..4 {
        let lease = engine.acquire(None, UnitId(1), never_interrupt()).unwrap();
        assert_eq!(lease.is_resident(), loads == 1);
        let kept = lease.tensor(0);
        lease.discard();
        model.check(1, &kept);
        assert_eq!(engine.stats().units[1].loads, loads);
    }
}

#[test]
fn a_write_to_a_kept_unit_is_found_and_the_unit_stays_kept() {
    let model = Model::new(&[200 * KIB; 8]);
    for budget in [700 * KIB, 4 << 20] {
        let engine = model.engine(EngineConfig { watch_writes: true, ..config(budget) }).unwrap();
        if !engine.stats().watches_writes {
            eprintln!("nothing to test: this system does not tell who writes to memory");
            return;
        }
        let order: Vec<usize> = (0..8).collect();
        for _ in 0..3 {
            model.pass(&engine, &order);
            assert!(
                engine.written().is_empty(),
                "reading from storage is no write to what was read"
            );
            let kept =
                engine.stats().units.iter().rposition(|unit| unit.resident).expect("some are kept");
            let tensor = acquire_tensor(&engine, kept as u32).unwrap();
            let address = tensor.range().as_ptr();
            // SAFETY: as foreign code does it: inside the tensor, which nobody else reads now.
            unsafe {
                address.add(100 * KIB).write_volatile(!address.add(100 * KIB).read_volatile());
            };
            drop(tensor);
            assert_eq!(engine.written(), [(UnitId(kept as u32), vec![0])]);
            engine.discard(UnitId(kept as u32)).unwrap();
            assert!(engine.written().is_empty());
            assert!(engine.stats().units[kept].resident, "its memory was free");
        }
        model.pass(&engine, &order);
    }
}

#[test]
fn tensors_outlive_the_engine() {
    let model = Model::new(&[200 * KIB; 3]);
    let engine = model.engine(config(420 * KIB)).unwrap();
    let kept = acquire_tensor(&engine, 2).unwrap();
    drop(engine);
    let clone = kept.clone();
    drop(kept);
    std::thread::spawn(move || model.check(2, &clone)).join().unwrap();
}

#[test]
fn a_budget_that_can_never_work_is_refused_before_the_first_read() {
    let model = Model::new(&[100 * KIB, 500 * KIB, 100 * KIB]);
    let Err(Error::NeverFits(error)) = model.engine(config(400 * KIB)) else {
        panic!("500 KiB cannot fit 400")
    };
    assert_eq!(error.largest_unit, "u1");
    assert!(model.engine(config(error.smallest_budget_bytes - 1)).is_err());
    let engine = model.engine(config(error.smallest_budget_bytes)).unwrap();
    for _ in 0..3 {
        model.pass(&engine, &[0, 1, 2]);
    }
}

#[test]
fn a_file_cut_while_it_is_streamed_is_an_error_with_tensor_and_place_not_wrong_bytes() {
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
fn a_file_replaced_while_it_is_streamed_is_an_error() {
    let model = Model::new(&[200 * KIB; 6]);
    let engine = model.engine(config(450 * KIB)).unwrap();
    model.pass(&engine, &[0, 1, 2, 3, 4, 5]);
    let other = model.path.with_extension("new");
    fs::write(&other, vec![0; model.content.len()]).unwrap();
    fs::rename(&other, &model.path).unwrap();
    let streamed = engine.stats().units.iter().position(|u| !u.resident).unwrap();
    // One unit may have been read ahead before; asked for twice, one read happens after the change.
    let error = (0..6)
        .chain([streamed])
        .find_map(|unit| acquire_tensor(&engine, unit as u32).err())
        .expect("the change is seen");
    assert!(error.to_string().contains("another file has taken its place"), "{error}");
}

#[test]
fn a_file_written_to_whose_modification_time_was_put_back_is_an_error() {
    let model = Model::new(&[200 * KIB; 6]);
    let engine = model.engine(config(450 * KIB)).unwrap();
    model.pass(&engine, &[0, 1, 2, 3, 4, 5]);
    let before = fs::metadata(&model.path).unwrap().modified().unwrap();
    // Longer than the clock of a file system ticks.
    std::thread::sleep(Duration::from_millis(20));
    let file = fs::OpenOptions::new().write(true).open(&model.path).unwrap();
    std::io::Write::write_all(&mut &file, &vec![0; model.content.len()]).unwrap();
    file.set_modified(before).unwrap();
    drop(file);
    let streamed = engine.stats().units.iter().position(|u| !u.resident).unwrap();
    let error = (0..6)
        .chain([streamed])
        .find_map(|unit| acquire_tensor(&engine, unit as u32).err())
        .expect("the change is seen");
    assert!(error.to_string().contains("modification time is the old one"), "{error}");
}

#[test]
fn waiting_can_be_interrupted_and_leaves_the_engine_usable() {
    let model = Model::new(&[200 * KIB; 2]);
    let engine = model.engine(config(210 * KIB)).unwrap();
    let pass = engine.begin_pass(never_interrupt()).unwrap();
    let error = engine.begin_pass(&mut || true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    engine.end_pass(pass);
    let (held, done) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let lease = engine.acquire(None, UnitId(0), never_interrupt()).unwrap();
            held.wait();
            done.wait();
            drop(lease);
        });
        held.wait();
        let error = engine.acquire(None, UnitId(1), &mut || true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}");
        done.wait();
    });
    model.check(1, &acquire_tensor(&engine, 1).unwrap());
}

#[test]
fn a_thread_that_needs_more_than_there_is_beside_what_it_holds_is_told_so() {
    let model = Model::new(&[200 * KIB; 2]);
    let engine = model.engine(config(210 * KIB)).unwrap();
    let _held = engine.acquire(None, UnitId(0), never_interrupt()).unwrap();
    let error = engine.acquire(None, UnitId(1), &mut patience()).unwrap_err();
    assert!(matches!(&error, Error::Stuck { holders, .. } if holders == "u0"), "{error}");
}

#[test]
fn a_thread_that_queues_for_a_pass_with_a_lease_in_hand_does_not_hang_the_pass_that_runs() {
    let model = Model::new(&[200 * KIB; 2]);
    let engine = model.engine(config(210 * KIB)).unwrap();
    let (queueing, over) = (Barrier::new(2), AtomicBool::new(false));
    let pass = engine.begin_pass(never_interrupt()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _held = engine.acquire(None, UnitId(0), never_interrupt()).unwrap();
            queueing.wait();
            let error = engine.begin_pass(&mut || over.load(Ordering::SeqCst)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Interrupted);
        });
        queueing.wait();
        let error = engine.acquire(Some(pass), UnitId(1), &mut patience()).unwrap_err();
        assert!(matches!(error, Error::Stuck { .. }), "{error}");
        over.store(true, Ordering::SeqCst);
    });
    engine.end_pass(pass);
    model.pass(&engine, &[0, 1]);
}

#[test]
fn a_wait_is_interrupted_though_other_threads_keep_the_engine_busy() {
    let model = Model::new(&[64 * KIB; 24]);
    let engine = model.engine(config(700 * KIB)).unwrap();
    let stop = AtomicBool::new(false);
    let pass = engine.begin_pass(never_interrupt()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                for unit in 0..24 {
                    model.check(unit, &acquire_tensor(&engine, unit as u32).unwrap());
                }
            }
        });
        let error = engine.begin_pass(&mut || true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted);
        stop.store(true, Ordering::SeqCst);
    });
    engine.end_pass(pass);
}

#[test]
fn the_order_is_learned_and_the_plan_follows_it() {
    let model = Model::new(&[200 * KIB; 8]);
    // Room for the four that are used, and a slot for any of the others.
    let engine = model.engine(config(1030 * KIB)).unwrap();
    let order = [7, 5, 3, 1];
    let mut proposed = model.pass(&engine, &order);
    for _ in 0..3 {
        if proposed {
            assert!(engine.replan(never_interrupt()).unwrap());
        }
        proposed = model.pass(&engine, &order);
    }
    let before = engine.stats();
    model.pass(&engine, &order);
    let after = engine.stats();
    assert_eq!(
        after.total_read_bytes(),
        before.total_read_bytes(),
        "the four units in use fit and are kept"
    );
    assert!(order.iter().all(|&u| after.units[u].resident));
}

#[test]
fn two_passes_at_once_get_the_right_bytes() {
    let model = Model::new(&[100 * KIB; 12]);
    let engine = model.engine(EngineConfig { max_passes: 2, ..config(450 * KIB) }).unwrap();
    let order: Vec<_> = (0..12).collect();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..6).for_each(|_| _ = model.pass(&engine, &order)));
        }
    });
    assert_eq!(engine.stats().passes, 18);
}

/// Reads like `buffered`, and counts the requests whose buffers have not come back.
struct Counting(Arc<AtomicUsize>);

struct CountingBackend {
    live: Arc<AtomicUsize>,
    inner: Box<dyn Backend>,
}

impl BackendProvider for Counting {
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

fn buffered() -> Arc<dyn BackendProvider> {
    Registry::builtin().choose(Some("buffered"), &[]).unwrap().provider
}

fn reading_by(provider: impl BackendProvider + 'static, budget: usize) -> EngineConfig {
    let (mut registry, backend) = (Registry::builtin(), Some(provider.name().into()));
    registry.register(Arc::new(provider));
    EngineConfig { registry, backend, ..config(budget) }
}

#[test]
fn a_device_that_fails_is_an_error_and_one_that_recovers_is_read_again() {
    let model = Model::new(&[200 * KIB; 6]);
    let fail = Arc::new(AtomicBool::new(true));
    let failing = Arc::clone(&fail);
    let faults = Faults::new(move |_| failing.load(Ordering::SeqCst).then_some(Fault::Errno(5)));
    let provider = FaultyProvider::new(buffered(), faults);
    let engine = model.engine(reading_by(provider, 450 * KIB)).unwrap();
    for unit in [3, 4] {
        let error = acquire_tensor(&engine, unit).unwrap_err();
        assert!(error.to_string().contains(&format!("tensor `t{unit}`")), "{error}");
        assert!(error.to_string().contains("os error 5"), "{error}");
    }
    fail.store(false, Ordering::SeqCst);
    for unit in 0..6 {
        // What was read ahead and failed says so once.
        let bytes =
            acquire_tensor(&engine, unit).or_else(|_| acquire_tensor(&engine, unit)).unwrap();
        model.check(unit as usize, &bytes);
    }
}

#[test]
fn an_engine_dropped_in_the_middle_of_reading_gets_every_buffer_back() {
    let model = Model::new(&[200 * KIB; 8]);
    for _ in 0..20 {
        let live = Arc::new(AtomicUsize::new(0));
        let engine = model.engine(reading_by(Counting(Arc::clone(&live)), 900 * KIB)).unwrap();
        let _reads_ahead = engine.begin_pass(never_interrupt()).unwrap();
        drop(engine);
        assert_eq!(live.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn units_and_files_that_do_not_exist_are_named() {
    let model = Model::new(&[1000]);
    let engine = model.engine(config(64 * KIB)).unwrap();
    assert!(matches!(acquire_tensor(&engine, 7), Err(Error::NoSuchUnit { unit: 7, count: 1 })));
    let Err(error) = Engine::new(model.units.clone(), Vec::new(), config(64 * KIB)) else {
        panic!("no file 0")
    };
    assert!(matches!(&error, Error::NoSuchFile { tensor, .. } if tensor == "t0"));
    assert!(Path::new(&model.path).exists());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Random models, budgets and visits: right bytes, no more memory than there is, no hang.
    #[test]
    fn random_programs_stay_right_and_within_budget(
        sizes in prop::collection::vec(1usize..120_000, 1..14),
        spare in 0usize..600_000,
        visits in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..60),
        passes in 1usize..4,
    ) {
        let model = Model::new(&sizes);
        let smallest = match model.engine(config(0)) {
            Err(Error::NeverFits(e)) => e.smallest_budget_bytes,
            _ => panic!("nothing fits no memory"),
        };
        let budget = smallest + spare;
        let engine = model.engine(config(budget)).unwrap();
        let mut kept: Vec<(usize, TensorBytes)> = Vec::new();
        for _ in 0..passes {
            let pass = engine.begin_pass(never_interrupt()).unwrap();
            for (unit, keep) in &visits {
                let unit = unit.index(sizes.len());
                match engine.acquire(Some(pass), UnitId(unit as u32), &mut patience()) {
                    Ok(lease) => {
                        let bytes = lease.tensor(0);
                        model.check(unit, &bytes);
                        if *keep {
                            kept.push((unit, bytes));
                        }
                    }
                    Err(Error::StillReferenced { .. }) => {
                        prop_assert!(!kept.is_empty());
                        kept.iter().for_each(|(unit, bytes)| model.check(*unit, bytes));
                        kept.clear();
                    }
                    Err(error) => prop_assert!(false, "{error}"),
                }
            }
            if engine.end_pass(pass) {
                engine.replan(never_interrupt()).unwrap();
            }
        }
        kept.iter().for_each(|(unit, bytes)| model.check(*unit, bytes));
        let stats = engine.stats();
        prop_assert!(stats.reserved_high_water_bytes <= budget);
        prop_assert!(stats.in_use_high_water_bytes <= stats.reserved_high_water_bytes);
    }
}

#[test]
fn bytes_without_their_checksum_are_an_error_that_says_where_unless_not_asked() {
    let mut model = Model::new(&[3 << 20, 40 * KIB, 40 * KIB]);
    for (i, unit) in model.units.clone().iter().enumerate() {
        let digest = Digest::of(&model.expected(i));
        assert_eq!(unit.tensors[0].entry.parts.len(), 1);
        model.units[i].tensors[0].digest = Some(Arc::new(digest));
    }
    for round in 0..2 {
        let engine = model.engine(config(4 << 20)).unwrap();
        let first = engine.acquire(None, UnitId(0), never_interrupt());
        if round == 0 {
            model.check(0, &first.unwrap().tensor(0));
            let mut harmed = model.content.clone();
            harmed[8 + (2 << 20) + 5] ^= 0x10;
            fs::write(&model.path, harmed).unwrap();
            continue;
        }
        for _ in 0..2 {
            let error = engine.acquire(None, UnitId(0), never_interrupt()).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            let place = format!(
                "tensor `t0`: {}: 1048576 bytes at byte {}",
                model.path.display(),
                8 + (2 << 20)
            );
            assert!(error.to_string().contains(&place), "{error}");
        }
        model.check(1, &engine.acquire(None, UnitId(1), never_interrupt()).unwrap().tensor(0));
    }
    let engine = model.engine(EngineConfig { verify: Verify::Never, ..config(4 << 20) }).unwrap();
    assert!(engine.acquire(None, UnitId(0), never_interrupt()).is_ok());
}

#[test]
fn what_is_verified_once_is_trusted_when_it_is_read_again() {
    let mut model = Model::new(&[3 << 20, 3 << 20]);
    for i in 0..2 {
        model.units[i].tensors[0].digest = Some(Arc::new(Digest::of(&model.expected(i))));
    }
    let visit =
        |engine: &Engine, unit| engine.acquire(None, UnitId(unit), never_interrupt()).map(|_| ());
    for (verify, again) in [(Verify::EveryRead, Some(ErrorKind::Corrupt)), (Verify::Once, None)] {
        let config = || EngineConfig { verify, prefetch: Prefetch::None, ..config(4 << 20) };
        let engine = model.engine(config()).unwrap();
        visit(&engine, 0).unwrap();
        visit(&engine, 1).unwrap();
        // A bit that turned by itself: the file is as old as it was, and another mode explains the
        // time of its change.
        let modified = fs::metadata(&model.path).unwrap().modified().unwrap();
        let turn = |content: &[u8]| {
            let file = fs::File::options().write(true).open(&model.path).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, content, 0).unwrap();
            file.set_modified(modified).unwrap();
            let mode = file.metadata().unwrap().permissions().mode();
            file.set_permissions(fs::Permissions::from_mode(mode ^ 0o040)).unwrap();
        };
        let mut harmed = model.content.clone();
        harmed[8 + (1 << 20)] ^= 1;
        turn(&harmed);
        assert_eq!(visit(&engine, 0).err().map(|error| error.kind()), again, "{verify:?}");
        drop(engine);
        let engine = model.engine(config()).unwrap();
        assert_eq!(
            visit(&engine, 0).unwrap_err().kind(),
            ErrorKind::Corrupt,
            "{verify:?}: the first time"
        );
        assert_eq!(
            visit(&engine, 0).unwrap_err().kind(),
            ErrorKind::Corrupt,
            "{verify:?}: nothing was verified"
        );
        drop(engine);
        turn(&model.content.clone());
    }
}

#[test]
fn prefetch_reads_as_far_ahead_as_it_says() {
    let model = Model::new(&[64 * KIB; 12]);
    for (prefetch, most_ahead) in
        [(Prefetch::None, 0), (Prefetch::NextLayer, 1), (Prefetch::Adaptive, 2)]
    {
        let engine = model.engine(EngineConfig { prefetch, ..config(6 * 68 * KIB) }).unwrap();
        let pass = engine.begin_pass(never_interrupt()).unwrap();
        let mut most = 0;
        for unit in 0..12 {
            let lease = engine.acquire(Some(pass), UnitId(unit), never_interrupt()).unwrap();
            model.check(unit as usize, &lease.tensor(0));
            std::thread::sleep(Duration::from_millis(10));
            let loads: u64 = engine.stats().units.iter().map(|u| u.loads).sum();
            most = most.max(loads - u64::from(unit) - 1);
        }
        engine.end_pass(pass);
        let stalls = engine.stats().stalls();
        match prefetch {
            Prefetch::None => assert_eq!((most, stalls), (0, 12)),
            Prefetch::NextLayer => assert_eq!(most, 1),
            _ => assert!(most >= most_ahead, "{most} units ahead"),
        }
    }
}

#[test]
fn what_one_operation_needs_is_leased_together_at_the_smallest_budget() {
    let model =
        Model::new(&[100 * KIB, 20 * KIB, 60 * KIB, 200 * KIB, 40 * KIB, 300 * KIB, 30 * KIB]);
    let sets = [vec![0, 1, 2, 3], vec![5, 6], vec![2, 4, 5]];
    let ids = |set: &[u32]| set.iter().copied().map(UnitId).collect::<Vec<_>>();
    let together: Vec<_> = sets.iter().map(|set| ids(set)).collect();
    let with = |budget| model.engine(EngineConfig { together: together.clone(), ..config(budget) });
    let smallest = match with(4 * KIB) {
        Err(Error::NeverFits(refusal)) => refusal.smallest_budget_bytes,
        other => panic!("{:?}", other.err()),
    };
    assert!(with(smallest - 1).is_err());
    let engine = with(smallest).unwrap();
    for round in 0..20 {
        let pass = engine.begin_pass(never_interrupt()).unwrap();
        for step in 0..sets.len() {
            let set = &sets[(step * (round % 2 + 1) + round) % sets.len()];
            let leases = engine.acquire_all(Some(pass), &ids(set), &mut patience()).unwrap();
            for (lease, &unit) in leases.iter().zip(set) {
                model.check(unit as usize, &lease.tensor(0));
            }
            drop(leases);
            let alone = (round * 5 + step) as u32 % 7;
            let lease = engine.acquire(Some(pass), UnitId(alone), &mut patience()).unwrap();
            model.check(alone as usize, &lease.tensor(0));
        }
        engine.end_pass(pass);
    }
    assert!(engine.stats().in_use_high_water_bytes <= smallest);
    let all = ids(&[0, 1, 2, 3, 4, 5, 6]);
    let refused = engine.acquire_all(None, &all, &mut patience()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NeverFits, "{refused}");
}

#[test]
fn a_set_that_was_not_known_takes_the_memory_of_what_the_plan_keeps_and_is_planned_for() {
    let model = Model::new(&[64 * KIB; 12]);
    let engine = model.engine(config(600 * KIB)).unwrap();
    let set: Vec<_> = (2..9).map(UnitId).collect();
    for _ in 0..6 {
        let pass = engine.begin_pass(never_interrupt()).unwrap();
        for unit in 0..12 {
            let lease = engine.acquire(Some(pass), UnitId(unit), &mut patience()).unwrap();
            model.check(unit as usize, &lease.tensor(0));
        }
        let leases = engine.acquire_all(Some(pass), &set, &mut patience()).unwrap();
        for (lease, unit) in leases.iter().zip(2..) {
            model.check(unit, &lease.tensor(0));
        }
        drop(leases);
        if engine.end_pass(pass) {
            engine.replan(never_interrupt()).unwrap();
        }
    }
    let plan = engine.stats().plan;
    assert!(plan.smallest_budget_bytes >= 7 * 64 * KIB, "{plan:?}");
}

#[test]
fn bytes_that_are_still_in_memory_are_leased_again_and_not_read_twice() {
    let model = Model::new(&[300 * KIB; 4]);
    let smallest = 300 * KIB + 16 * KIB;
    let engine = model.engine(config(smallest)).unwrap();
    let kept = acquire_tensor(&engine, 1).unwrap();
    for _ in 0..3 {
        let lease = engine.acquire(None, UnitId(1), &mut patience()).unwrap();
        assert_eq!(lease.tensor(0).as_ptr(), kept.as_ptr(), "it is the same memory");
    }
    assert_eq!(engine.stats().units[1].loads, 1);
    let error = engine.acquire(None, UnitId(2), &mut patience()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    let again = acquire_tensor(&engine, 1).unwrap();
    assert_eq!(again.as_ptr(), kept.as_ptr());
    engine.discard(UnitId(1)).unwrap();
    assert!(
        engine.acquire(None, UnitId(1), &mut patience()).is_err(),
        "what was spoiled is not leased"
    );
    drop((kept, again));
    model.check(1, &acquire_tensor(&engine, 1).unwrap());
}
