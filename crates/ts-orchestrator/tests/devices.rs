// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine for devices: the same passes on the host and on a simulated GPU that stalls and
//! fails, whose race detector sees whether memory is given on before all that uses it is done.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::alloc::Layout;
use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use ts_format::{ByteRange, Dtype, FileId, TensorEntry, TensorMeta};
use ts_io::fault::{Fault, Faults, FaultyProvider};
use ts_io::{BackendProvider, Registry, Source};
use ts_orchestrator::{
    Engine, EngineConfig, ErrorKind, Lease, Phase, Unit, UnitId, UnitTensor, never_interrupt,
};
use ts_streams::{
    CpuDevice, Device, HostFn, MemoryKind, RawMemory, SimDevice, SimOptions, Stream, StreamPriority,
};

const KIB: usize = 1024;

/// A file, cut into units of a tensor that is one run of it and a tensor that is assembled of
/// three.
struct Model {
    dir: tempfile::TempDir,
    content: Vec<u8>,
    units: Vec<Unit>,
}

impl Model {
    fn new(sizes: &[usize]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let len: usize = sizes.iter().sum();
        let content: Vec<u8> =
            (0..len).map(|i| (i ^ (i >> 8).wrapping_mul(37) ^ (i >> 16)) as u8).collect();
        fs::write(dir.path().join("weights"), &content).unwrap();
        let mut at = 0;
        let tensor = |name: String, parts: &[(usize, usize)], phase| {
            let range = |&(offset, len): &(usize, usize)| ByteRange {
                file: FileId(0),
                offset: offset as u64,
                len: len as u64,
            };
            let parts: Vec<_> = parts.iter().map(range).collect();
            let shape = vec![parts.iter().map(|part| part.len).sum()];
            let entry = TensorEntry { meta: TensorMeta { dtype: Dtype::U8, shape }, parts };
            UnitTensor { name, entry, phase, digest: None, chunks: Vec::new() }
        };
        let units = sizes.iter().enumerate().map(|(i, &len)| {
            let third = len / 3;
            let parts = [(at + third, third), (at, third), (at + 2 * third, len - 2 * third)];
            let tensors = vec![
                tensor(format!("run{i}"), &[(at, len)], Phase::Mapped),
                tensor(format!("assembled{i}"), &parts, Phase::At(24)),
            ];
            at += len;
            Unit { name: format!("u{i}"), tensors }
        });
        let units = units.collect();
        Self { dir, content, units }
    }

    fn source(&self) -> Vec<Arc<Source>> {
        vec![Source::open(self.dir.path().join("weights")).unwrap()]
    }

    fn expected(&self, unit: usize, tensor: usize) -> Vec<u8> {
        let parts = &self.units[unit].tensors[tensor].entry.parts;
        parts
            .iter()
            .flat_map(|p| self.content[p.offset as usize..][..p.len as usize].to_vec())
            .collect()
    }
}

/// What work on streams sees.
type Seen<D> = Arc<Mutex<Vec<Sight<D>>>>;

struct Sight<D: Device> {
    unit: usize,
    tensor: usize,
    /// Where the tensor is copied to: pinned, lest the copy waits for what is before it.
    copy: D::Memory,
    /// Whether it was.
    copied: bool,
}

impl<D: Device> Sight<D> {
    /// When all work is done.
    fn is_right(&self, model: &Model) -> bool {
        let expected = model.expected(self.unit, self.tensor);
        let mut bytes = vec![0; expected.len()];
        // SAFETY: all work is done.
        unsafe { self.copy.read(0, &mut bytes) }.unwrap();
        bytes == expected
    }
}

/// Has work on a stream read all of a unit, some time.
fn compute<D: Device>(
    device: &D,
    stream: &D::Stream,
    lease: &Lease<D>,
    seen: &Seen<D>,
) -> Result<(), ts_streams::Error> {
    // On a device that does not wait for the host the unit may be long gone before it is read.
    stream.launch_host_fn(HostFn::new(|| std::thread::sleep(Duration::from_micros(300))))?;
    for index in 0..lease.tensor_count() {
        let (unit, range) = (lease.unit().0 as usize, lease.tensor(index).range());
        let layout = Layout::from_size_align(range.len(), 64).unwrap();
        let copy = device.allocate(layout, MemoryKind::PinnedHost).unwrap();
        let (to, sights) = (copy.range(), Arc::clone(seen));
        let mut all = seen.lock().unwrap();
        let number = all.len();
        all.push(Sight { unit, tensor: index, copy, copied: false });
        drop(all);
        // SAFETY: the engine keeps the unit for the stream, which it was told of; what it is copied
        // to is kept for all of the test.
        unsafe { stream.copy(to, range) }?;
        stream.launch_host_fn(HostFn::new(move || sights.lock().unwrap()[number].copied = true))?;
    }
    Ok(())
}

/// A pass of the units in this order, and the plan that follows from it.
fn pass_in<D: Device>(engine: &Engine<D>, order: &[u32]) {
    let pass = engine.begin_pass(never_interrupt()).unwrap();
    for &unit in order {
        drop(engine.acquire(Some(pass), UnitId(unit), never_interrupt()).unwrap());
    }
    engine.end_pass(pass);
    engine.replan(never_interrupt()).unwrap();
}

/// Passes whose work is still to be done when the leases are gone; how often a device or a file
/// failed.
fn passes<D: Device>(model: &Model, engine: &Engine<D>, device: &D, count: usize) -> usize {
    let streams =
        [StreamPriority::Normal, StreamPriority::High].map(|p| device.create_stream(p).unwrap());
    let (seen, mut failures) = (Seen::<D>::default(), 0);
    for turn in 0..count {
        let pass = engine.begin_pass(never_interrupt()).unwrap();
        for unit in 0..model.units.len() {
            let stream = &streams[(unit + turn) % 2];
            let lease = loop {
                match engine.acquire(Some(pass), UnitId(unit as u32), never_interrupt()) {
                    Ok(lease) => break lease,
                    Err(error) => {
                        assert!(
                            matches!(error.kind(), ErrorKind::Device | ErrorKind::Storage),
                            "only what was asked to fail fails: {error}"
                        );
                        failures += 1;
                        assert!(
                            failures < 10_000,
                            "what fails once does not fail for good: {error}"
                        );
                    }
                }
            };
            lease.use_on(stream).unwrap();
            if compute(device, stream, &lease, &seen).is_err() {
                failures += 1;
                stream.take_error();
            }
        }
        engine.end_pass(pass);
    }
    for stream in &streams {
        failures += usize::from(stream.synchronize().is_err());
    }
    let seen = seen.lock().unwrap();
    let copied: Vec<&Sight<D>> = seen.iter().filter(|sight| sight.copied).collect();
    assert!(failures > 0 || copied.len() == 2 * count * model.units.len(), "all was computed");
    for sight in copied {
        assert!(sight.is_right(model), "unit {}, tensor {}", sight.unit, sight.tensor);
    }
    failures
}

fn config(budget_bytes: usize) -> EngineConfig {
    EngineConfig { request_bytes: 16 * KIB, ..EngineConfig::with_budget(budget_bytes) }
}

/// A share of reads fails, is short or late.
fn reading_badly(config: EngineConfig, seed: u64, share: f64) -> EngineConfig {
    let decide = move |attempt: &ts_io::fault::Attempt<'_>| {
        let chance = (seed ^ attempt.number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let happens = ((chance >> 11) as f64) < share * (1u64 << 53) as f64;
        let fault = match chance % 3 {
            0 => Fault::Errno(5),
            1 => Fault::Short(1 + attempt.len / 2),
            _ => Fault::Delay(Duration::from_millis(1)),
        };
        happens.then_some(fault)
    };
    let mut registry = Registry::builtin();
    let real = registry.choose(Some("buffered"), &[]).unwrap().provider;
    let provider = FaultyProvider::new(real, Faults::new(decide));
    let backend = Some(provider.name().into());
    registry.register(Arc::new(provider));
    EngineConfig { registry, backend, ..config }
}

const SIZES: [usize; 7] = [30 * KIB, 70 * KIB, 20 * KIB, 70 * KIB + 5, 41 * KIB, 1000, 64 * KIB];
/// Less than half of what all units take.
const BUDGET: usize = 360 * KIB;

#[test]
fn memory_of_the_host_is_kept_for_streams_that_use_it() {
    let (model, device) = (Model::new(&SIZES), CpuDevice::new().unwrap());
    let config = EngineConfig { budget_bytes: BUDGET + 200 * KIB, ..config(0) };
    let engine = Engine::on(&device, model.units.clone(), model.source(), config).unwrap();
    assert_eq!(passes(&model, &engine, &device, 20), 0);
    let stats = engine.stats();
    assert!(stats.units.iter().any(|unit| unit.loads >= 20), "some are streamed");
    assert_eq!(stats.staging_bytes, 0);
}

#[test]
fn a_device_gets_its_units_by_way_of_the_host_and_no_more_memory_than_its_budget() {
    let (model, device) = (Model::new(&SIZES), SimDevice::new(SimOptions::default()));
    let engine = Engine::on(&device, model.units.clone(), model.source(), config(BUDGET)).unwrap();
    let on_device = device.memory().in_use_bytes;
    assert!(
        on_device <= BUDGET + engine.stats().staging_bytes,
        "{on_device} bytes, pinned ones included"
    );
    assert_eq!(passes(&model, &engine, &device, 10), 0);
    assert_eq!(device.memory().in_use_bytes, on_device, "all of it was taken then");
    assert_eq!(device.races(), []);
    let stats = engine.stats();
    assert!(stats.units.iter().any(|unit| unit.resident && unit.loads == 1), "some are kept");
    assert!(stats.units.iter().any(|unit| unit.loads >= 10), "others are streamed");
    assert!(stats.reserved_high_water_bytes <= BUDGET);
    assert!(stats.in_use_high_water_bytes <= stats.reserved_high_water_bytes);
    let error =
        Engine::on(&device, model.units.clone(), model.source(), config(100 * KIB)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NeverFits);
}

/// Units that are kept lie together after a new plan as well, for what streams beside them needs
/// one piece.
fn new_plans_find_memory_in_one_piece<D: Device>(device: &D) {
    let model = Model::new(&[20, 20, 20, 140, 20, 20, 20, 60].map(|kib| kib * KIB));
    let new = |budget| Engine::on(device, model.units.clone(), model.source(), config(budget));
    let Some(ts_orchestrator::Error::NeverFits(refused)) = new(0).err() else {
        panic!("nothing is enough")
    };
    let mut replans = 0;
    for spare in (0..400 * KIB).step_by(20 * KIB) {
        let engine = new(refused.smallest_budget_bytes + spare).unwrap();
        for order in [
            [0, 1, 2, 3, 4, 5, 6, 7],
            [7, 6, 5, 4, 3, 2, 1, 0],
            [1, 3, 1, 5, 1, 3, 1, 5],
            [6, 2, 6, 2, 6, 2, 6, 2],
        ] {
            (0..4).for_each(|_| pass_in(&engine, &order));
        }
        replans += engine.stats().replans;
        assert_eq!(passes(&model, &engine, device, 2), 0);
    }
    assert!(replans > 0);
}

#[test]
fn new_plans_find_the_memory_of_a_device_in_one_piece() {
    let device = SimDevice::new(SimOptions::default());
    new_plans_find_memory_in_one_piece(&device);
    assert_eq!(device.races(), []);
    new_plans_find_memory_in_one_piece(&CpuDevice::new().unwrap());
}

#[cfg(feature = "cuda")]
#[test]
fn a_gpu_gets_its_units_like_any_device() {
    use std::io::Write;
    let device = match ts_streams::CudaDevice::new(0) {
        Ok(device) => device,
        Err(why) => {
            let line = format!("skipped: no CUDA device: {why}\n");
            return std::io::stdout().write_all(line.as_bytes()).unwrap();
        }
    };
    let model = Model::new(&SIZES);
    let engine = Engine::on(&device, model.units.clone(), model.source(), config(BUDGET)).unwrap();
    assert_eq!(passes(&model, &engine, &device, 20), 0);
}

#[test]
fn a_stream_that_the_engine_was_not_told_of_is_a_race() {
    let (model, device) = (Model::new(&SIZES), SimDevice::new(SimOptions::default()));
    let engine = Engine::on(&device, model.units.clone(), model.source(), config(BUDGET)).unwrap();
    let (stream, seen) =
        (device.create_stream(StreamPriority::Normal).unwrap(), Seen::<SimDevice>::default());
    for unit in (0..SIZES.len() as u32).cycle().take(3 * SIZES.len()) {
        match engine.acquire(None, UnitId(unit), never_interrupt()) {
            Ok(lease) => compute(&device, &stream, &lease, &seen).unwrap_or(()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Device, "{error}"),
        }
    }
    assert_ne!(device.races(), [], "what still reads a unit is not known to be over");
}

/// Work owns the leases, and drops them where it runs: also while the engine asks streams for
/// memory, and when the engine is gone.
fn leases_end_in_work<D: Device>(device: &D) {
    let model = Model::new(&SIZES);
    let engine =
        Engine::on(device, model.units.clone(), model.source(), config(BUDGET + 200 * KIB))
            .unwrap();
    let (stream, seen) =
        (device.create_stream(StreamPriority::Normal).unwrap(), Seen::<D>::default());
    for unit in (0..SIZES.len() as u32).cycle().take(4 * SIZES.len()) {
        let acquire = || engine.acquire(None, UnitId(unit), never_interrupt());
        // To the engine this thread has all that it took, and may be told so.
        let lease = acquire().or_else(|error| {
            assert_eq!(error.kind(), ErrorKind::Full, "{error}");
            stream.synchronize().unwrap();
            acquire()
        });
        let lease = lease.unwrap();
        lease.use_on(&stream).unwrap();
        compute(device, &stream, &lease, &seen).unwrap();
        stream.launch_host_fn(HostFn::new(move || drop(lease))).unwrap();
    }
    drop(engine);
    stream.synchronize().unwrap();
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 8 * SIZES.len());
    assert!(seen.iter().all(|sight| sight.copied && sight.is_right(&model)));
}

#[test]
fn leases_may_end_in_work_of_streams() {
    leases_end_in_work(&CpuDevice::with_threads(1).unwrap());
    let device = SimDevice::new(SimOptions::default());
    leases_end_in_work(&device);
    assert_eq!(device.races(), []);
}

#[test]
fn tensors_on_a_device_outlive_the_engine() {
    let (model, device) = (Model::new(&SIZES), SimDevice::new(SimOptions::default()));
    let engine = Engine::on(&device, model.units.clone(), model.source(), config(BUDGET)).unwrap();
    let (stream, seen) =
        (device.create_stream(StreamPriority::Normal).unwrap(), Seen::<SimDevice>::default());
    let lease = engine.acquire(None, UnitId(3), never_interrupt()).unwrap();
    drop(engine);
    compute(&device, &stream, &lease, &seen).unwrap();
    stream.synchronize().unwrap();
    assert!(seen.lock().unwrap().iter().all(|sight| sight.copied && sight.is_right(&model)));
    drop((lease, seen));
    assert_eq!(device.races(), []);
    assert_eq!(device.memory().in_use_bytes, 0, "and then there is nothing left");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Whatever stalls and fails: bytes that work sees are right, nothing races, nothing hangs.
    #[test]
    fn a_device_that_stalls_and_fails_never_computes_with_wrong_bytes(
        seed: u64,
        sizes in prop::collection::vec(1usize..80 * KIB, 3..9),
        stalls in 0.0..1.0f64,
        faults in 0.0..0.2f64,
        of_storage in 0.0..0.1f64,
        room in 2usize..6,
        staging_units in 0usize..4,
    ) {
        let model = Model::new(&sizes);
        let device = SimDevice::new(SimOptions { seed, stalls, faults, ..SimOptions::default() });
        let largest = 2 * sizes.iter().max().unwrap() + 40 * KIB;
        let config = reading_badly(
            EngineConfig { staging_units, ..config(room * largest) },
            seed,
            of_storage,
        );
        let engine = Engine::on(&device, model.units.clone(), model.source(), config).unwrap();
        passes(&model, &engine, &device, 6);
        prop_assert_eq!(device.races(), []);
        drop(engine);
        let _ = device.synchronize();
        prop_assert_eq!(device.memory().in_use_bytes, 0);
    }
}
