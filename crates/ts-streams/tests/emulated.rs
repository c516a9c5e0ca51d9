// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests `CudaDevice` on a CUDA driver that runs on the host, with faults that it injects.
//!
//! A process loads one driver, so each test runs in a process of its own.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::alloc::Layout;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use ts_streams::{
    AnyDevice, CudaDevice, CudarcSlice, Device, Error, Event, GpuStatus, HostFn, Kernel,
    MemoryKind, MemoryRange, RawMemory, Stream, StreamPriority, conformance,
};

/// The environment variable of processes with the emulated driver.
const INSIDE: &str = "TENSORSTREAM_EMULATED_DRIVER";

/// The kernels of the workspace.
const KERNELS: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../ts-orchestrator/src/split_decoder/kernels.cu");

/// Runs a test in a process of its own with the emulated driver, compiled with these `--cfg`s.
/// `name` is the name of the test function.
fn emulated(name: &str, cfgs: &[&str], test: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        // Keeps the driver loaded.
        GpuStatus::detect();
        return test();
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture"]).env("LD_LIBRARY_PATH", driver(cfgs));
    let output = child.env(INSIDE, "1").output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}

/// Compiles the driver, and returns the directory that contains it.
fn driver(cfgs: &[&str]) -> PathBuf {
    static COMPILING: Mutex<()> = Mutex::new(());
    let _alone = COMPILING.lock();
    let name = if cfgs.is_empty() { "driver".into() } else { cfgs.join("-") };
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated").join(name);
    std::fs::create_dir_all(&directory).unwrap();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulated_driver");
    let source = sources.join("libcuda.rs");
    let library = directory.join("libcuda.so.1");
    let changed = |path: &Path| std::fs::metadata(path).and_then(|m| m.modified()).ok();
    if changed(&library) <= changed(&source).max(changed(&sources.join("kernels.rs"))) {
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        rustc.args(["--edition=2024", "--crate-type=cdylib", "-O", "-g", "-o"]);
        rustc.arg(&library).arg(&source).args(cfgs.iter().flat_map(|cfg| ["--cfg", cfg]));
        assert!(rustc.status().unwrap().success());
        let _ = std::os::unix::fs::symlink("libcuda.so.1", directory.join("libcuda.so"));
    }
    for (source, name) in [("kernels.c", "libkernels.so"), ("libcufile.c", "libcufile.so.0")] {
        let (source, library) = (sources.join(source), directory.join(name));
        if changed(&library) <= changed(&source).max(changed(Path::new(KERNELS))) {
            // `cc` exists, because Rust needs it for linking.
            let mut cc = Command::new("cc");
            cc.args(["-shared", "-fPIC", "-O1", "-g", "-pthread", "-Wall", "-Werror"]);
            cc.arg("-Wno-unknown-pragmas").arg(format!("-DKERNELS=\"{KERNELS}\""));
            assert!(cc.arg("-o").arg(&library).arg(&source).status().unwrap().success());
        }
    }
    directory
}

/// What exists in the driver.
#[derive(Debug, PartialEq, Eq, Default)]
struct Counters {
    contexts: u64,
    streams: u64,
    events: u64,
    blocks: u64,
    bytes: u64,
    current: u64,
    modules: u64,
}

fn library() -> libloading::Library {
    // SAFETY: the process has loaded this library before.
    unsafe { libloading::Library::new("libcuda.so") }.unwrap()
}

fn counters() -> Counters {
    let mut values = [0u64; 7];
    let library = library();
    // SAFETY: the driver has this function, which writes seven numbers.
    unsafe {
        let count = library.get::<unsafe extern "C" fn(*mut u64) -> i32>(b"emulatedCounters");
        count.unwrap()(values.as_mut_ptr());
    }
    let [contexts, streams, events, blocks, bytes, current, modules] = values;
    Counters { contexts, streams, events, blocks, bytes, current, modules }
}

const MEMORY_BYTES: i32 = 0;
const CALLS_LEFT: i32 = 1;
const ALLOCATIONS_LEFT: i32 = 2;

fn control(what: i32, value: u64) {
    let library = library();
    // SAFETY: the driver has this function.
    unsafe {
        let set = library.get::<unsafe extern "C" fn(i32, u64) -> i32>(b"emulatedControl");
        set.unwrap()(what, value);
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 256).unwrap()
}

/// Uses all kinds of memory, two streams and two devices. Returns the first error.
fn program() -> Result<(), Error> {
    let (first, second) = (CudaDevice::new(0)?, CudaDevice::new(1)?);
    let [near, far] = [&first, &second].map(|d| d.create_stream(StreamPriority::Normal));
    let (near, far) = (near?, far?);
    let pinned = first.allocate(layout(1 << 16), MemoryKind::PinnedHost)?;
    let there = first.allocate(layout(1 << 16), MemoryKind::Device)?;
    let back = second.allocate(layout(1 << 16), MemoryKind::Managed)?;
    let (filled, copied) = (first.create_event()?, second.create_event()?);
    let all = || -> Result<(), Error> {
        // SAFETY: events order all accesses, and the memory lives until both devices are done.
        unsafe {
            near.fill(pinned.range(), 3)?;
            near.copy(there.range(), pinned.range())?;
            near.record(&filled)?;
            far.wait(&filled)?;
            far.copy(back.range(), there.range())?;
            far.record(&copied)?;
            near.wait(&copied)?;
            let memory = first.allocate_async(layout(4096), &near)?;
            near.fill(memory.range(), 7)?;
            first.free_async(memory, &near)?;
        }
        near.launch_host_fn(HostFn::new(|| ()))?;
        copied.synchronize()?;
        Ok(())
    };
    let result = all();
    // Even after an error, nothing may use the memory when it is freed.
    let ends = [first.synchronize(), second.synchronize()];
    result?;
    ends.into_iter().collect::<Result<(), _>>()?;
    let mut bytes = [0; 16];
    // SAFETY: all work is done.
    unsafe { back.read(100, &mut bytes) }?;
    assert_eq!(bytes, [3; 16]);
    assert!(first.available_bytes()? < first.info().total_bytes);
    Ok(())
}

#[test]
fn the_emulated_gpu_conforms() {
    emulated("the_emulated_gpu_conforms", &[], || {
        conformance::check(|| CudaDevice::new(1).unwrap());
        conformance::check(|| AnyDevice::from(CudaDevice::new(0).unwrap()));
        assert_eq!(counters(), Counters::default());
    });
}

#[test]
fn nothing_leaks_and_contexts_stay_as_they_were() {
    emulated("nothing_leaks_and_contexts_stay_as_they_were", &[], || {
        for _ in 0..3 {
            program().unwrap();
            assert_eq!(counters(), Counters::default());
            let device = CudaDevice::new(0).unwrap();
            let _stream = device.create_stream(StreamPriority::Normal).unwrap();
            assert_eq!(counters(), Counters { contexts: 1, streams: 1, ..Counters::default() });
        }
    });
}

#[test]
fn too_little_memory_is_typed() {
    emulated("too_little_memory_is_typed", &[], || {
        let device = CudaDevice::new(0).unwrap();
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        control(MEMORY_BYTES, 1 << 20);
        assert_eq!(device.available_bytes().unwrap(), Some(1 << 20));
        let half = device.allocate(layout(1 << 19), MemoryKind::Device).unwrap();
        for kind in [MemoryKind::Device, MemoryKind::Managed] {
            let error = device.allocate(layout(1 << 20), kind).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        }
        let error = device.allocate_async(layout(1 << 20), &stream).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        drop(half);
        device.allocate(layout(1 << 20), MemoryKind::Device).unwrap();
    });
}

#[test]
fn each_allocation_may_fail() {
    emulated("each_allocation_may_fail", &[], || {
        let mut failures = 0;
        for allocations in 0.. {
            control(ALLOCATIONS_LEFT, allocations);
            let result = program();
            assert_eq!(counters(), Counters::default(), "{result:?}");
            match result {
                Ok(()) => break,
                Err(Error::OutOfMemory { .. }) => failures += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(failures, 4);
    });
}

/// Runs the program on a device that is lost after each possible number of calls.
#[test]
fn a_lost_device_is_an_error_at_every_call() {
    const NAME: &str = "a_lost_device_is_an_error_at_every_call";
    if let Some(calls) = std::env::var("CALLS").ok().and_then(|calls| calls.parse().ok()) {
        GpuStatus::detect();
        control(CALLS_LEFT, calls);
        match program() {
            Ok(()) => println!("succeeded"),
            Err(error) => {
                let text = error.to_string();
                assert!(matches!(error, Error::Driver { code: 719, .. }), "{text}");
                assert!(text.contains("CUDA_ERROR_LAUNCH_FAILED"), "{text}");
            }
        }
        return;
    }
    let (directory, mut failures) = (driver(&[]), 0);
    for calls in 0..1000 {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", NAME, "--nocapture"]).env("LD_LIBRARY_PATH", &directory);
        let output = child.env("CALLS", calls.to_string()).output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "after {calls} calls: {said}");
        if said.contains("succeeded") {
            break;
        }
        failures += 1;
    }
    assert!((30..200).contains(&failures), "{failures}");
}

#[test]
fn freed_memory_is_an_illegal_address() {
    emulated("freed_memory_is_an_illegal_address", &[], || {
        let device = CudaDevice::new(0).unwrap();
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        let memory = device.allocate(layout(4096), MemoryKind::Device).unwrap();
        let range = memory.range();
        drop(memory);
        // SAFETY: not safe, but the emulated driver finds that the memory was freed.
        unsafe { stream.fill(range, 1) }.unwrap();
        let error = stream.synchronize().unwrap_err();
        assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
        // The error is permanent.
        assert!(stream.take_error().is_none() && device.create_event().is_err());
    });
}

/// Host functions drop what only calls to the driver can free.
#[test]
fn host_functions_may_drop_everything() {
    emulated("host_functions_may_drop_everything", &[], || {
        let device = CudaDevice::new(0).unwrap();
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        let last = (
            device.allocate(layout(4096), MemoryKind::Device).unwrap(),
            device.allocate(layout(4096), MemoryKind::PinnedHost).unwrap(),
            device.create_stream(StreamPriority::High).unwrap(),
            device.create_event().unwrap(),
            CudaDevice::new(1).unwrap(),
        );
        stream.launch_host_fn(HostFn::new(move || drop(last))).unwrap();
        stream.synchronize().unwrap();
        device.synchronize().unwrap();
        drop((stream, device));
        assert_eq!(counters(), Counters::default());
    });
}

#[test]
fn an_old_driver_is_named() {
    emulated("an_old_driver_is_named", &["without_memory_pools"], || {
        let status = GpuStatus::detect();
        assert!(status.to_string().contains("cuMemAllocAsync"), "{status}");
        let error = CudaDevice::new(0).unwrap_err();
        assert!(error.to_string().contains("newer NVIDIA driver"), "{error}");
    });
}

#[test]
fn registered_memory_is_copied_like_pinned_memory() {
    emulated("registered_memory_is_copied_like_pinned_memory", &[], || {
        let device = CudaDevice::new(0).unwrap();
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        let memory = device.allocate(layout(1 << 20), MemoryKind::Device).unwrap();
        let before = counters();
        let mut bytes = vec![1; 1 << 20];
        // SAFETY: the bytes outlive the registration and the copies.
        let registration = unsafe { device.register(MemoryRange::of(&mut bytes)) }.unwrap();
        // SAFETY: refused, so that nothing is registered.
        let twice = unsafe { device.register(MemoryRange::of(&mut bytes)) }.unwrap_err();
        assert!(twice.to_string().contains("cuMemHostRegister"), "{twice}");
        assert_eq!(counters().blocks, before.blocks + 1);
        let (open, gate) = std::sync::mpsc::channel::<()>();
        stream.launch_host_fn(HostFn::new(move || gate.recv().unwrap())).unwrap();
        // SAFETY: the bytes are not written to until the copy is done.
        unsafe { stream.copy(memory.range(), MemoryRange::of(&mut bytes)) }.unwrap();
        open.send(()).unwrap(); // the copy did not wait for the function before it
        stream.synchronize().unwrap();
        drop(registration);
        assert_eq!(counters().blocks, before.blocks);
        // A host function may drop a registration. The driver hears of it at the next call.
        // SAFETY: as above.
        let registration = unsafe { device.register(MemoryRange::of(&mut bytes)) }.unwrap();
        stream.launch_host_fn(HostFn::new(move || drop(registration))).unwrap();
        stream.synchronize().unwrap();
        drop(device.allocate(layout(1), MemoryKind::Device).unwrap());
        assert_eq!(counters().blocks, before.blocks);
        let mut read = vec![0; 1 << 20];
        // SAFETY: all work is done.
        unsafe { memory.read(0, &mut read) }.unwrap();
        assert!(read == bytes);
    });
}

#[test]
fn a_copy_of_pageable_memory_has_the_bytes_of_the_call() {
    emulated("a_copy_of_pageable_memory_has_the_bytes_of_the_call", &[], || {
        let device = CudaDevice::new(0).unwrap();
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        let memory = device.allocate(layout(1 << 20), MemoryKind::Device).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        for round in 0..10 {
            let mut bytes = vec![round; 1 << 20];
            let own = Arc::clone(&seen);
            let note = HostFn::new(move || own.lock().unwrap().push(round));
            // SAFETY: the driver has read pageable memory when the call returns.
            unsafe { stream.copy(memory.range(), MemoryRange::of(&mut bytes)) }.unwrap();
            bytes.fill(99);
            stream.launch_host_fn(note).unwrap();
        }
        stream.synchronize().unwrap();
        let mut bytes = vec![0; 1 << 20];
        // SAFETY: all work is done.
        unsafe { memory.read(0, &mut bytes) }.unwrap();
        assert!(bytes == vec![9; 1 << 20] && *seen.lock().unwrap() == (0..10).collect::<Vec<_>>());
    });
}

/// PTX with the names of a kernel of `kernels.c` and of none.
const MODULE: &std::ffi::CStr = c".version 6.0\n.visible .entry add_to_all(\n.visible .entry none(";

#[test]
fn kernels_run_in_the_order_of_their_stream() {
    emulated("kernels_run_in_the_order_of_their_stream", &[], || {
        let before = counters();
        let device = AnyDevice::from(CudaDevice::new(0).unwrap());
        let add = Kernel { name: c"add_to_all", module: MODULE, block_threads: 128, parameters: 3 };
        let unknown = Kernel { name: c"none", ..add };
        let refused = device.load(&unknown).unwrap_err().to_string();
        assert!(refused.contains("cuModuleGetFunction") && refused.contains("NOT_FOUND"));
        let invalid = Kernel { module: c"no PTX", ..add };
        let refused = device.load(&invalid).unwrap_err().to_string();
        assert!(refused.contains("cuModuleLoadData") && refused.contains("INVALID_PTX"));
        device.load(&add).unwrap();
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        let memory = device.allocate(layout(8000), MemoryKind::Device).unwrap();
        let at = memory.range().address() as u64;
        // SAFETY: the kernels access only the memory, and other code does not use it until the
        // stream is done.
        unsafe {
            stream.fill(memory.range(), 0).unwrap();
            for value in 1..=10 {
                stream.launch(&add, 8, &[at, 1000, value]).unwrap();
            }
            let error = stream.launch(&add, 0, &[at, 1000, 1]).unwrap_err();
            assert!(matches!(error, Error::Driver { call: "cuLaunchKernel", .. }), "{error}");
        }
        stream.synchronize().unwrap();
        let mut bytes = vec![0; 8000];
        // SAFETY: all work is done.
        unsafe { memory.read(0, &mut bytes) }.unwrap();
        assert!(bytes.as_chunks::<8>().0.iter().all(|number| u64::from_le_bytes(*number) == 55));
        assert_eq!((stream.metrics().launches, counters().modules), (10, 1));
        drop((stream, memory, device));
        assert_eq!(counters(), before);
    });
}

#[test]
fn streams_and_memory_are_shared_with_cudarc() {
    emulated("streams_and_memory_are_shared_with_cudarc", &[], || {
        let (device, other) = (CudaDevice::new(0).unwrap(), CudaDevice::new(1).unwrap());
        let context = device.cudarc_context().unwrap();
        let theirs = context.new_stream_with_priority(0).unwrap();
        let ours = device.stream_from_cudarc(&theirs).unwrap();
        let error = other.stream_from_cudarc(&theirs).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        drop(theirs);
        let memory = device.allocate(layout(4096), MemoryKind::Device).unwrap();
        // SAFETY: the memory outlives the work, all of which is submitted to one stream. `ours` and
        // `own` outlive what is made from them.
        unsafe {
            ours.fill(memory.range(), 1).unwrap();
            let theirs = ours.to_cudarc().unwrap();
            assert!(CudarcSlice::<u32>::new(memory.range().slice(0..6), &theirs).is_none());
            assert!(CudarcSlice::<u32>::new(memory.range().slice(2..6), &theirs).is_none());
            let slice = CudarcSlice::<u32>::new(memory.range(), &theirs).unwrap();
            let view = slice.slice(1000..1024);
            assert_eq!(theirs.clone_dtoh(&view).unwrap(), [0x0101_0101; 24]);
            drop(slice);
            // The other direction, through a stream that this crate owns.
            let own = device.create_stream(StreamPriority::High).unwrap();
            let theirs = own.to_cudarc().unwrap();
            own.fill(memory.range(), 2).unwrap();
            let slice = CudarcSlice::<u8>::new(memory.range(), &theirs).unwrap();
            assert_eq!(theirs.clone_dtoh(&slice.slice(..3)).unwrap(), [2; 3]);
            theirs.synchronize().unwrap();
        }
        drop((ours, context, memory, device, other));
        let current = counters().current; // that of cudarc stays
        assert_eq!(counters(), Counters { current, ..Counters::default() });
    });
}
