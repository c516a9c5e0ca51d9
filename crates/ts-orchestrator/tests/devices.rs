// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of engines on devices. They run the same passes on the host and on a simulated GPU that
//! stalls and fails. The race detector of the simulated GPU reports memory that is reused too
//! early: before the work that uses it has finished.
#![allow(clippy::unwrap_used)] // a failing test panics

mod testing;

use std::alloc::Layout;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use ts_io::fault::{Fault, Faults, FaultyProvider};
use ts_orchestrator::{Engine, EngineConfig, Error, ErrorKind, Lease, UnitId};
use ts_streams::{
    AnyDevice, AnyMemory, AnyStream, CpuDevice, Device, HostFn, MemoryKind, Race, RawMemory,
    SimDevice, SimOptions, Stream, StreamPriority, WorkloadType,
};

use testing::{KIB, Model, buffered, with_backend};

// All devices have the type `AnyDevice`, so that the engine is compiled for one type only.

fn simulated(options: SimOptions) -> AnyDevice {
    SimDevice::new(options).into()
}

/// Returns the races on a simulated device.
fn races(device: &AnyDevice) -> Vec<Race> {
    match device {
        AnyDevice::Sim(device) => device.races(),
        other => panic!("{other:?} finds no races"),
    }
}

/// Copies of tensors that were made by work on streams.
type Copies = Arc<Mutex<Vec<TensorCopy>>>;

struct TensorCopy {
    unit: usize,
    tensor: usize,
    /// Pinned memory, because on CUDA the call that submits a copy to pageable memory may block
    /// until earlier work has finished.
    memory: AnyMemory,
    /// Whether the copy has run.
    done: bool,
}

impl TensorCopy {
    /// Returns whether the copy has the right bytes. Call this after all work has finished.
    fn is_right(&self, model: &Model) -> bool {
        let expected = model.expected(self.unit, self.tensor);
        let mut bytes = vec![0; expected.len()];
        // SAFETY: all work has finished, so nothing writes to the memory.
        unsafe { self.memory.read(0, &mut bytes) }.unwrap();
        bytes == expected
    }
}

/// Makes a stream copy all tensors of a unit after a delay.
fn compute(
    device: &AnyDevice,
    stream: &AnyStream,
    lease: &Lease<AnyDevice>,
    copies: &Copies,
) -> Result<(), ts_streams::Error> {
    // Delays the copies, so that the lease may be dropped before they run.
    stream.launch_host_fn(HostFn::new(|| std::thread::sleep(Duration::from_micros(300))))?;
    for index in 0..lease.tensor_count() {
        let (unit, range) = (lease.unit().0 as usize, lease.tensor(index).range());
        let layout = Layout::from_size_align(range.len(), 64).unwrap();
        let memory = device.allocate(layout, MemoryKind::PinnedHost).unwrap();
        let (to, done) = (memory.range(), Arc::clone(copies));
        let mut all = copies.lock().unwrap();
        let number = all.len();
        all.push(TensorCopy { unit, tensor: index, memory, done: false });
        drop(all);
        // SAFETY: both memories stay allocated until the work has finished. `copies` owns the
        // target, and the engine's pool keeps the source allocated. If the source is reused too
        // early, because a test did not call `record_stream`, the copy reads wrong bytes and the
        // race detector reports it.
        unsafe { stream.copy(to, range) }?;
        stream.launch_host_fn(HostFn::new(move || done.lock().unwrap()[number].done = true))?;
    }
    Ok(())
}

/// Runs a pass that visits units in this order. Then switches to a better plan, if there is one.
fn pass_in(engine: &Engine<AnyDevice>, order: &[u32]) {
    let pass = engine.begin_pass();
    for &unit in order {
        drop(engine.acquire(Some(pass), UnitId(unit)).unwrap());
    }
    engine.end_pass(pass);
    engine.replan();
}

/// Runs passes that visit all units in order, as [`passes_in`] does.
fn passes(model: &Model, engine: &Engine<AnyDevice>, device: &AnyDevice, count: usize) -> usize {
    let order: Vec<usize> = (0..model.units.len()).collect();
    passes_in(model, engine, device, &vec![order; count], false)
}

/// Runs passes that visit units in these orders, and drop each lease before the work that uses it
/// has finished. With `replan`, switches to better plans. Returns how often the device or the file
/// failed.
fn passes_in(
    model: &Model,
    engine: &Engine<AnyDevice>,
    device: &AnyDevice,
    orders: &[Vec<usize>],
    replan: bool,
) -> usize {
    let streams =
        [StreamPriority::Normal, StreamPriority::High].map(|p| device.create_stream(p).unwrap());
    let (copies, mut failures) = (Copies::default(), 0);
    for (turn, order) in orders.iter().enumerate() {
        let pass = engine.begin_pass();
        for &unit in order {
            let stream = &streams[(unit + turn) % 2];
            let lease = loop {
                match engine.acquire(Some(pass), UnitId(unit as u32)) {
                    Ok(lease) => break lease,
                    Err(error) => {
                        assert!(
                            matches!(error.kind(), ErrorKind::Device | ErrorKind::Storage),
                            "only injected faults cause errors: {error}"
                        );
                        failures += 1;
                        assert!(failures < 10_000, "a fault does not repeat forever: {error}");
                    }
                }
            };
            let used = lease.record_stream(stream).is_ok();
            if !used || compute(device, stream, &lease, &copies).is_err() {
                failures += 1;
                stream.take_error();
            }
        }
        if engine.end_pass(pass) && replan {
            engine.replan();
        }
    }
    for stream in &streams {
        failures += usize::from(stream.synchronize().is_err());
    }
    let copies = copies.lock().unwrap();
    let done: Vec<&TensorCopy> = copies.iter().filter(|copy| copy.done).collect();
    let tensors = orders.iter().flatten().map(|&unit| model.units[unit].tensors.len());
    assert!(failures > 0 || done.len() == tensors.sum::<usize>(), "all work has run");
    for copy in done {
        assert!(copy.is_right(model), "unit {}, tensor {}", copy.unit, copy.tensor);
    }
    failures
}

fn config(budget_bytes: usize) -> EngineConfig {
    EngineConfig::with_budget(budget_bytes).with_request_bytes(16 * KIB)
}

/// Makes a share of the reads fail, return too few bytes, or end late.
fn with_faulty_reads(config: EngineConfig, seed: u64, share: f64) -> EngineConfig {
    let faults = Faults::new(move |attempt| Fault::random(attempt, seed, share));
    with_backend(config, FaultyProvider::new(buffered(), faults))
}

const SIZES: [usize; 7] = [30 * KIB, 70 * KIB, 20 * KIB, 70 * KIB + 5, 41 * KIB, 1000, 64 * KIB];
/// Less than the memory of all units, so that some of them are streamed.
const BUDGET: usize = 360 * KIB;

#[test]
fn host_memory_is_kept_until_streams_have_finished() {
    let (model, device) = (Model::assembled(&SIZES), AnyDevice::from(CpuDevice::new().unwrap()));
    let config = config(BUDGET + 200 * KIB);
    let engine =
        Engine::with_device(&device, model.units.clone(), model.sources(), config).unwrap();
    assert_eq!(passes(&model, &engine, &device, 20), 0);
    let stats = engine.stats();
    assert!(stats.units.iter().any(|unit| unit.loads >= 20), "some units are streamed");
    assert_eq!(stats.staging_bytes, 0);
}

#[test]
fn a_device_uses_no_more_memory_than_its_budget() {
    let (model, device) = (Model::assembled(&SIZES), simulated(SimOptions::default()));
    let engine =
        Engine::with_device(&device, model.units.clone(), model.sources(), config(BUDGET)).unwrap();
    let on_device = device.memory().in_use_bytes;
    assert!(
        on_device <= BUDGET + engine.stats().staging_bytes,
        "{on_device} bytes are in use, including pinned memory"
    );
    assert_eq!(passes(&model, &engine, &device, 10), 0);
    assert_eq!(
        device.memory().in_use_bytes,
        on_device,
        "all memory is allocated when the engine is created"
    );
    assert_eq!(races(&device), []);
    let stats = engine.stats();
    assert!(
        stats.units.iter().any(|unit| unit.resident && unit.loads == 1),
        "some units are resident"
    );
    assert!(stats.units.iter().any(|unit| unit.loads >= 10), "others are streamed");
    assert!(stats.reserved_high_water_bytes <= BUDGET);
    assert!(stats.in_use_high_water_bytes <= stats.reserved_high_water_bytes);
    let error =
        Engine::with_device(&device, model.units.clone(), model.sources(), config(100 * KIB))
            .err()
            .unwrap();
    assert_eq!(error.kind(), ErrorKind::NeverFits);
}

#[test]
fn a_host_keeps_units_for_a_device() {
    let (model, device) = (Model::assembled(&SIZES), simulated(SimOptions::default()));
    let new = |host_bytes| {
        let config = config(BUDGET).with_host_bytes(host_bytes);
        Engine::with_device(&device, model.units.clone(), model.sources(), config).unwrap()
    };
    let total: usize = SIZES.iter().map(|size| 2 * size + 16 * KIB).sum();
    for host_bytes in [150 * KIB, total] {
        let engine = new(host_bytes);
        let plan = engine.stats().plan;
        assert!(0 < plan.host_bytes && plan.host_bytes <= host_bytes, "{plan:?}");
        assert_eq!(plan.streamed_bytes_per_pass == 0, host_bytes == total, "{plan:?}");
        assert_eq!(passes(&model, &engine, &device, 10), 0);
        let units = engine.stats().units;
        for unit in units.iter().filter(|unit| unit.on_host) {
            // A pass may find it on the device still.
            assert!(unit.loads >= 3, "{} is copied again: {} times", unit.name, unit.loads);
        }
        let kept = units.iter().filter(|unit| unit.on_host || unit.resident);
        let often = kept.filter(|unit| unit.read_bytes > 4 * unit.slot_bytes as u64);
        assert_eq!(often.count(), 0, "they are not read again, except for new plans");
    }
    assert_eq!(races(&device), []);
    let unlimited = new(usize::MAX);
    assert_eq!(passes(&model, &unlimited, &device, 3), 0);
}

#[test]
fn a_host_keeps_empty_units() {
    let (model, device) =
        (Model::assembled(&[30 * KIB, 0, 70 * KIB, 4096]), simulated(SimOptions::default()));
    let config = config(180 * KIB).with_host_bytes(usize::MAX);
    let engine =
        Engine::with_device(&device, model.units.clone(), model.sources(), config).unwrap();
    assert_eq!(passes(&model, &engine, &device, 4), 0);
    assert!(engine.stats().units.iter().any(|unit| unit.on_host));
}

/// Checks that the ring of each new plan gets one piece of memory: the slots of resident units are
/// adjacent.
fn new_plans_find_memory_in_one_piece(device: &AnyDevice) {
    let model = Model::assembled(&[20, 20, 20, 140, 20, 20, 20, 60].map(|kib| kib * KIB));
    let new =
        |budget| Engine::with_device(device, model.units.clone(), model.sources(), config(budget));
    let Some(Error::NeverFits(refused)) = new(0).err() else { panic!("a budget of 0 is refused") };
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
fn new_plans_find_memory_in_one_piece_on_each_device() {
    let device = simulated(SimOptions::default());
    new_plans_find_memory_in_one_piece(&device);
    assert_eq!(races(&device), []);
    new_plans_find_memory_in_one_piece(&CpuDevice::new().unwrap().into());
}

#[cfg(feature = "cuda")]
#[test]
fn a_gpu_streams_units() {
    let Some((device, _alone)) = gpu() else { return };
    let model = Model::assembled(&SIZES);
    for host_bytes in [0, 150 * KIB, usize::MAX] {
        let config = config(BUDGET).with_host_bytes(host_bytes);
        let (units, sources) = (model.units.clone(), model.sources());
        let engine = Engine::with_device(&device, units, sources, config).unwrap();
        assert_eq!(passes(&model, &engine, &device, 20), 0);
    }
}

/// Opens a GPU for a test, which is the only one that uses it now, or says that there is none.
#[cfg(feature = "cuda")]
fn gpu() -> Option<(AnyDevice, std::sync::MutexGuard<'static, ()>)> {
    use std::io::Write;
    use std::sync::PoisonError;
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    match ts_streams::CudaDevice::new(0) {
        Ok(device) => Some((device.into(), alone)),
        Err(why) => {
            let line = format!("skipped: no CUDA device: {why}\n");
            std::io::stdout().write_all(line.as_bytes()).unwrap();
            None
        }
    }
}

/// Returns how many streams, events and blocks exist on the emulated driver, and their bytes.
#[cfg(feature = "cuda")]
fn handles() -> [u64; 4] {
    let mut values = [0u64; 7];
    // SAFETY: this process has loaded the library before.
    let Ok(library) = (unsafe { libloading::Library::new("libcuda.so.1") }) else { return [0; 4] };
    // SAFETY: the emulated driver has this function, which writes seven numbers, and no other one
    // has.
    unsafe {
        let count = library.get::<unsafe extern "C" fn(*mut u64) -> i32>(b"emulatedCounters");
        count.map(|count| count(values.as_mut_ptr())).ok();
    }
    let [_, streams, events, blocks, bytes, ..] = values;
    [streams, events, blocks, bytes]
}

/// On the emulated driver, makes a read to the GPU fail after `count` others
/// (`emulatedReadsLeft`), or refuses `count` reads (`emulatedRefusals`). Returns whether this is
/// that driver.
#[cfg(feature = "cuda")]
fn fail_gpu_reads(how: &str, count: i64) -> bool {
    // SAFETY: this process has loaded the library before.
    let Ok(library) = (unsafe { libloading::Library::new("libcufile.so.0") }) else { return false };
    // SAFETY: the emulated library has this function, and no other one has.
    unsafe {
        let set = library.get::<unsafe extern "C" fn(i64) -> i32>(how.as_bytes());
        set.map(|set| set(count)).is_ok()
    }
}

#[cfg(feature = "cuda")]
#[test]
fn a_gpu_reads_units_itself() {
    use ts_io::{GpuRead, ReadPath};
    let Some((device, _alone)) = gpu() else { return };
    let path = match GpuRead::path() {
        Ok(path) => path,
        Err(why) => return println!("skipped: no GPUDirect Storage: {why}"),
    };
    let model = Model::new(&[300, 500, 200, 400, 100, 300].map(|kib| kib * KIB + 40));
    for host_bytes in [0, 700 * KIB] {
        let new = || {
            let config =
                config(1200 * KIB).with_host_bytes(host_bytes).with_backend("gds".to_owned());
            let (units, sources) = (model.units.clone(), model.sources());
            Engine::with_device(&device, units, sources, config).unwrap()
        };
        let engine = new();
        let read = |engine: &Engine<_>, path| {
            let paths = engine.stats().read_bytes;
            paths.iter().filter(|(of, _)| *of == path).map(|(_, bytes)| bytes).sum::<u64>()
        };
        for _ in 0..5 {
            let pass = engine.begin_pass();
            for (unit, _) in model.units.iter().enumerate() {
                let lease = engine.acquire(Some(pass), UnitId(unit as u32)).unwrap();
                let mut bytes = vec![0; lease.tensor(0).range().len()];
                copy_to_host(&device, &lease, &mut bytes);
                model.check(unit, &bytes);
            }
            engine.end_pass(pass);
            engine.replan();
        }
        assert!(read(&engine, path) > 1 << 20, "{:?}", engine.stats().read_bytes);
        let others = [ReadPath::Buffered, ReadPath::Direct].map(|path| read(&engine, path));
        assert_eq!(others, [0, 0], "the host reads only what it keeps");
        assert_eq!(engine.stats().passed_over, []);
        drop(engine);
        // A read that fails is an error of the unit, and the next use reads it again.
        for (how, count, failed, said) in [
            ("emulatedReadsLeft", 2, 1, "cuFile error 5010"),
            ("emulatedRefusals", 300, 300, "cuFile error 5001"),
        ] {
            let engine = new();
            if host_bytes > 0 || !fail_gpu_reads(how, count) {
                continue;
            }
            let mut failures = 0;
            for unit in (0..model.units.len()).cycle().take(failed + 30) {
                match engine.acquire(None, UnitId(unit as u32)) {
                    Ok(lease) => {
                        let mut bytes = vec![0; lease.tensor(0).range().len()];
                        copy_to_host(&device, &lease, &mut bytes);
                        model.check(unit, &bytes);
                    }
                    Err(error) => {
                        failures += 1;
                        let text = error.to_string();
                        assert_eq!(error.kind(), ErrorKind::Storage, "{text}");
                        assert!(text.contains(said) && text.contains("`t"), "{text}");
                    }
                }
            }
            // Some fail while they are read ahead, and are read again for the use.
            assert!(0 < failures && failures <= failed, "{failures} of {failed}");
        }
    }
}

/// Copies the first tensor of a unit from the device.
#[cfg(feature = "cuda")]
fn copy_to_host(device: &AnyDevice, lease: &Lease<AnyDevice>, bytes: &mut [u8]) {
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    lease.record_stream(&stream).unwrap();
    // SAFETY: the lease keeps the unit, `bytes` is borrowed, and the stream is done before this
    // function returns.
    unsafe { stream.copy(ts_streams::MemoryRange::of(bytes), lease.tensor(0).range()) }.unwrap();
    stream.synchronize().unwrap();
}

/// Returns tensors of every width, whose planes are coded in every way: not, as one byte, with one
/// code, and with several.
#[cfg(feature = "cuda")]
fn tensors(seed: u32, elements: usize) -> Vec<(ts_format::Dtype, Vec<u8>)> {
    use ts_format::Dtype;
    let mut state = seed;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let mut weight = || {
        let (exponent, rest) = (noise().leading_zeros() - 8, noise());
        (rest & 1) << 31 | (120 - exponent) << 23 | rest & 0x007f_ffff
    };
    let f32s: Vec<u32> = (0..elements).map(|_| weight()).collect();
    let bf16s: Vec<u32> = (0..2 * elements).map(|i| weight() >> 16 << (i / 30_000 % 2)).collect();
    let [few, many]: [Vec<u8>; 2] =
        [3u32, 255].map(|mask| (0..elements).map(|_| (weight() >> 12 & mask) as u8).collect());
    vec![
        (Dtype::F32, f32s.iter().flat_map(|v| v.to_le_bytes()).collect()),
        (Dtype::BF16, bf16s.iter().flat_map(|&v| (v as u16).to_le_bytes()).collect()),
        (Dtype::F16, bf16s.iter().flat_map(|&v| (v as u16 >> 3).to_le_bytes()).collect()),
        // Its lower bytes are zero.
        (Dtype::F32, f32s.iter().flat_map(|v| (v & 0xffff_0000).to_le_bytes()).collect()),
        (
            Dtype::F64,
            f32s.iter().step_by(4).flat_map(|&v| (u64::from(v) << 29).to_le_bytes()).collect(),
        ),
        (Dtype::F8_E4M3, few),
        (Dtype::F8_E5M2, many),
        (Dtype::BF16, vec![0; 12_346]),
        (Dtype::BF16, vec![]),
        (Dtype::F32, f32s[..1].iter().flat_map(|v| v.to_le_bytes()).collect()),
    ]
}

#[cfg(feature = "cuda")]
#[test]
fn a_gpu_decodes_units() {
    use ts_orchestrator::Decoding;
    let Some((device, _alone)) = gpu() else { return };
    const MIB: usize = KIB * KIB;
    let model = |elements, chunk_len| {
        let units: Vec<_> = (1..=8).map(|seed| tensors(seed, elements)).collect();
        Model::encoded(&units, chunk_len)
    };
    let decoded = |model: &Model, config: EngineConfig, count: usize| {
        let before = handles();
        let (units, sources) = (model.units.clone(), model.sources());
        let budget = config.budget_bytes;
        let engine = Engine::with_device(&device, units, sources, config).unwrap();
        assert_eq!(passes_in(model, &engine, &device, &vec![(0..8).collect(); count], true), 0);
        let stats = engine.stats();
        assert!(stats.reserved_high_water_bytes <= budget, "{stats:?}");
        assert!(stats.plan.streamed_bytes_per_pass == 0 && stats.plan.host_bytes > 0, "{stats:?}");
        let rates = (stats.device_decode_bytes_per_s / 1e9, stats.rates.decode_bytes_per_s / 1e9);
        println!("GB/s: the device {:.2}, a thread of the host {:.2}", rates.0, rates.1);
        drop(engine);
        device.synchronize().unwrap();
        assert_eq!(handles(), before, "streams, events, blocks and bytes");
        stats.device_decoded_bytes
    };
    let config = |budget, decoding| {
        EngineConfig::with_budget(budget).with_host_bytes(usize::MAX).with_decoding(decoding)
    };
    let small = model(100_000, 128 * KIB);
    let always = decoded(&small, config(10 * MIB, Decoding::OnDevice), 6);
    assert!(always > 10 * MIB as u64, "the device decodes units again and again: {always}");
    assert!(decoded(&small, config(10 * MIB, Decoding::WhereFaster), 6) > 0);
    assert_eq!(decoded(&small, config(10 * MIB, Decoding::OnHost), 3), 0);
    let without = decoded(&small, config(7 * MIB, Decoding::OnDevice), 3);
    assert_eq!(without, 0, "a piece has too little memory for a chunk");
    // Chunks of several blocks.
    let large = model(400_000, 600 * KIB);
    assert!(decoded(&large, config(50 * MIB, Decoding::OnDevice), 3) > 20 * MIB as u64);
}

/// The environment variable of processes in which a stream does not wait for events: the number of
/// streams that are created before it.
#[cfg(feature = "cuda")]
const WITHOUT_WAITS: &str = "TENSORSTREAM_TEST_WITHOUT_WAITS";

/// Not a test: `each_stream_that_decodes_waits` runs this function in other processes.
#[cfg(feature = "cuda")]
#[test]
fn decodes_without_waits() {
    use ts_orchestrator::Decoding;
    let Ok(stream) = std::env::var(WITHOUT_WAITS) else { return };
    let Some((device, _alone)) = gpu() else { return };
    let units: Vec<_> = (1..=8).map(|seed| tensors(seed, 50_000)).collect();
    let model = Model::encoded(&units, 64 * KIB);
    let config = EngineConfig::with_budget(6 << 20).with_host_bytes(usize::MAX);
    let config = config.with_decoding(Decoding::OnDevice);
    let stream: u64 = stream.parse().unwrap();
    // Whatever a stream waits for takes long: kernels, copies, or both.
    control(4, if stream == 1 { 0 } else { 2000 });
    control(5, if stream == 0 { 0 } else { 2000 });
    control(3, stream);
    let engine =
        Engine::with_device(&device, model.units.clone(), model.sources(), config).unwrap();
    let orders = vec![(0..8).collect(); 6];
    assert_eq!(passes_in(&model, &engine, &device, &orders, true), 0);
    assert!(engine.stats().device_decoded_bytes > 0);
}

/// Calls a function of the emulated driver. Returns whether it is that driver.
#[cfg(feature = "cuda")]
fn control(what: i32, value: u64) -> bool {
    // SAFETY: this process has loaded the library before, or it does not exist.
    let Ok(library) = (unsafe { libloading::Library::new("libcuda.so.1") }) else { return false };
    // SAFETY: the emulated driver has this function, and no other one has.
    unsafe {
        let set = library.get::<unsafe extern "C" fn(i32, u64) -> i32>(b"emulatedControl");
        set.map(|set| set(what, value)).is_ok()
    }
}

#[cfg(feature = "cuda")]
#[test]
fn each_stream_that_decodes_waits() {
    if gpu().is_none() || !control(4, 0) {
        return;
    }
    // An engine creates the stream that copies, and then the one that decodes.
    for (stream, works) in [(0, false), (1, false), (1000, true)] {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "decodes_without_waits", "--nocapture"]);
        let output = child.env(WITHOUT_WAITS, stream.to_string()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), works, "stream {stream}: {said}");
        let is_wrong = || said.contains("unit ") && said.contains("tensor ");
        assert!(works || output.status.code().is_none() || is_wrong(), "{said}");
    }
}

#[test]
fn a_stream_without_record_stream_is_a_race() {
    let (model, device) = (Model::assembled(&SIZES), simulated(SimOptions::default()));
    let engine =
        Engine::with_device(&device, model.units.clone(), model.sources(), config(BUDGET)).unwrap();
    let (stream, copies) =
        (device.create_stream(StreamPriority::Normal).unwrap(), Copies::default());
    for unit in (0..SIZES.len() as u32).cycle().take(3 * SIZES.len()) {
        match engine.acquire(None, UnitId(unit)) {
            Ok(lease) => compute(&device, &stream, &lease, &copies).unwrap_or(()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Device, "{error}"),
        }
    }
    assert_ne!(races(&device), [], "a slot was reused while a stream read it");
}

#[test]
fn the_streams_of_a_device_come_from_a_pool() {
    let (model, device) = (Model::assembled(&SIZES), simulated(SimOptions::default()));
    let engine =
        Engine::with_device(&device, model.units.clone(), model.sources(), config(BUDGET)).unwrap();
    let (stream, copies) = (engine.compute_stream().unwrap(), Copies::default());
    let visits = (0..SIZES.len() as u32).cycle().take(4 * SIZES.len());
    for unit in visits.clone() {
        let lease = engine.acquire(None, UnitId(unit)).unwrap();
        lease.record_stream(stream).unwrap();
        compute(&device, stream, &lease, &copies).unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(races(&device), []);
    let copies = copies.lock().unwrap();
    assert_eq!(copies.len(), 2 * visits.count());
    assert!(copies.iter().all(|copy| copy.done && copy.is_right(&model)));
    let [uploads, computations] = engine.stats().streams[..] else { panic!("two streams") };
    assert_eq!(uploads.workload, Some(WorkloadType::Memory));
    assert_eq!(uploads.metrics.workload(), Some(WorkloadType::Memory));
    let units: usize = SIZES.iter().map(|size| 2 * size).sum();
    assert!(uploads.metrics.transferred_bytes >= units as u64, "each unit is copied");
    assert_eq!(
        (computations.stream, computations.workload),
        (stream.id(), Some(WorkloadType::Mixed))
    );
    assert!(computations.metrics.busy > Duration::ZERO);
    let host = AnyDevice::from(CpuDevice::new().unwrap());
    let engine =
        Engine::with_device(&host, model.units.clone(), model.sources(), config(1 << 20)).unwrap();
    assert!(engine.compute_stream().is_none() && engine.stats().streams.is_empty());
}

/// Moves each lease into work of a stream. The work drops the lease, possibly while the engine
/// allocates memory, or after the engine was dropped.
fn work_drops_leases(device: &AnyDevice) {
    let model = Model::assembled(&SIZES);
    let engine = Engine::with_device(
        device,
        model.units.clone(),
        model.sources(),
        config(BUDGET + 200 * KIB),
    )
    .unwrap();
    let (stream, copies) =
        (device.create_stream(StreamPriority::Normal).unwrap(), Copies::default());
    for unit in (0..SIZES.len() as u32).cycle().take(4 * SIZES.len()) {
        let acquire = || engine.acquire(None, UnitId(unit));
        // The engine counts a lease for the thread that acquired it. So it may report that this
        // thread waits for itself.
        let lease = acquire().or_else(|error| {
            assert_eq!(error.kind(), ErrorKind::Full, "{error}");
            stream.synchronize().unwrap();
            acquire()
        });
        let lease = lease.unwrap();
        lease.record_stream(&stream).unwrap();
        compute(device, &stream, &lease, &copies).unwrap();
        stream.launch_host_fn(HostFn::new(move || drop(lease))).unwrap();
    }
    drop(engine);
    stream.synchronize().unwrap();
    let copies = copies.lock().unwrap();
    assert_eq!(copies.len(), 8 * SIZES.len());
    assert!(copies.iter().all(|copy| copy.done && copy.is_right(&model)));
}

#[test]
fn work_of_a_stream_may_drop_leases() {
    work_drops_leases(&CpuDevice::with_threads(1).unwrap().into());
    let device = simulated(SimOptions::default());
    work_drops_leases(&device);
    assert_eq!(races(&device), []);
}

#[test]
fn tensors_on_a_device_outlive_the_engine() {
    let (model, device) = (Model::assembled(&SIZES), simulated(SimOptions::default()));
    let engine =
        Engine::with_device(&device, model.units.clone(), model.sources(), config(BUDGET)).unwrap();
    let (stream, copies) =
        (device.create_stream(StreamPriority::Normal).unwrap(), Copies::default());
    let lease = engine.acquire(None, UnitId(3)).unwrap();
    drop(engine);
    lease.record_stream(&stream).unwrap();
    compute(&device, &stream, &lease, &copies).unwrap();
    stream.synchronize().unwrap();
    assert!(copies.lock().unwrap().iter().all(|copy| copy.done && copy.is_right(&model)));
    drop((lease, copies));
    assert_eq!(races(&device), []);
    assert_eq!(device.memory().in_use_bytes, 0, "all memory of the device is freed");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// For random stalls, faults, orders and numbers of threads: work reads the right bytes, and
    /// nothing races or hangs.
    #[test]
    fn device_faults_never_cause_wrong_bytes(
        seed: u64,
        sizes in prop::collection::vec(1usize..80 * KIB, 3..9),
        stall_rate in 0.0..1.0f64,
        fault_rate in 0.0..0.2f64,
        read_faults in 0.0..0.1f64,
        room in 2usize..6,
        staging_units in 0usize..4,
        host_bytes in prop_oneof![Just(0), 0usize..400 * KIB],
        orders in prop::collection::vec(
            prop::collection::vec(any::<prop::sample::Index>(), 1..12),
            2..6,
        ),
        threads in 1usize..3,
    ) {
        let model = Model::assembled(&sizes);
        let options = SimOptions::default()
            .with_seed(seed)
            .with_stall_rate(stall_rate)
            .with_fault_rate(fault_rate);
        let device = simulated(options);
        let largest = 2 * sizes.iter().max().unwrap() + 40 * KIB;
        let config = config(threads * room * largest)
            .with_staging_units(staging_units)
            .with_host_bytes(host_bytes)
            .with_max_passes(threads);
        let config = with_faulty_reads(config, seed, read_faults);
        let (units, sources) = (model.units.clone(), model.sources());
        let engine = Engine::with_device(&device, units, sources, config).unwrap();
        // Each order is used twice, so that the second pass can follow the plan for it.
        let orders = orders.iter().flat_map(|order| [order, order]);
        let orders: Vec<Vec<usize>> =
            orders.map(|order| order.iter().map(|at| at.index(sizes.len())).collect()).collect();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| passes_in(&model, &engine, &device, &orders, true));
            }
        });
        prop_assert_eq!(races(&device), []);
        drop(engine);
        let _ = device.synchronize();
        prop_assert_eq!(device.memory().in_use_bytes, 0);
    }
}
