// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the GPU status with drivers that are missing, outdated or broken, or that find no GPU.
//! If there is a GPU, also tests the device, including the conformance suite.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::io::Write;
use std::path::Path;
use std::process::Command;

use ts_streams::{
    CudaDevice, Device, Error, ErrorKind, Event, GpuStatus, HostFn, MemoryKind, RawMemory, Status,
    Stream, StreamPriority, conformance,
};

/// Returns the first GPU. If there is none, writes a line by which `cargo xtask` counts the test as
/// skipped. Writes directly to stdout, because the test harness captures `println!`.
fn device() -> Option<CudaDevice> {
    match GpuStatus::detect() {
        GpuStatus::Available { .. } => Some(CudaDevice::new(0).unwrap()),
        status => {
            let line = format!("skipped: no CUDA device: {status}\n");
            std::io::stdout().write_all(line.as_bytes()).unwrap();
            None
        }
    }
}

/// Returns whether copies run beside the processors, unlike those of the emulated driver.
fn has_an_engine(device: &CudaDevice) -> bool {
    !device.info().name.starts_with("Emulated")
}

#[test]
fn a_gpu_conforms() {
    if device().is_some() {
        conformance::check(|| CudaDevice::new(0).unwrap());
    }
}

/// A copy of 256 MiB to the GPU overlaps with a copy of 256 MiB from the GPU.
#[test]
fn gpu_copies_on_two_streams_overlap() {
    let Some(device) = device().filter(has_an_engine) else { return };
    let layout = std::alloc::Layout::from_size_align(256 << 20, 4096).unwrap();
    let [near, far] = [(); 2].map(|()| device.allocate(layout, MemoryKind::Device).unwrap());
    let [from, to] = [(); 2].map(|()| device.allocate(layout, MemoryKind::PinnedHost).unwrap());
    let [up, down] = [(); 2].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let timed = |both: bool| {
        let [start, end] = [(); 2].map(|()| device.create_event().unwrap());
        up.record(&start).unwrap();
        down.wait(&start).unwrap();
        // SAFETY: nothing else uses the four blocks until the device is done.
        unsafe {
            up.copy(near.range(), from.range()).unwrap();
            (if both { &down } else { &up }).copy(to.range(), far.range()).unwrap();
        }
        let done = device.create_event().unwrap();
        down.record(&done).unwrap();
        up.wait(&done).unwrap();
        up.record(&end).unwrap();
        end.synchronize().unwrap();
        end.elapsed_since(&start).unwrap()
    };
    timed(true);
    let (sequential, concurrent) = (timed(false), timed(true));
    assert!(
        concurrent.as_secs_f64() < 0.8 * sequential.as_secs_f64(),
        "{concurrent:?} {sequential:?}"
    );
}

/// Several copies wait for the same event. The copy on the urgent stream is submitted last, and
/// finishes before at least one of the others.
#[test]
fn an_urgent_gpu_copy_does_not_finish_last() {
    let Some(device) = device().filter(has_an_engine) else { return };
    let levels = device.info().priorities;
    println!("priority levels: {} to {}", levels.least, levels.greatest);
    let layout = std::alloc::Layout::from_size_align(64 << 20, 4096).unwrap();
    let memory: Vec<_> =
        (0..10).map(|_| device.allocate(layout, MemoryKind::Device).unwrap()).collect();
    let gate = device.create_stream(StreamPriority::Normal).unwrap();
    let open = device.create_event().unwrap();
    // SAFETY: only this test uses the memory, until the device is done.
    unsafe { gate.copy(memory[0].range(), memory[1].range()) }.unwrap();
    gate.record(&open).unwrap();
    let timed = |priority, at: usize| {
        let stream = device.create_stream(priority).unwrap();
        stream.wait(&open).unwrap();
        // SAFETY: as above; each pair of blocks belongs to one stream.
        unsafe { stream.copy(memory[at].range(), memory[at + 1].range()) }.unwrap();
        let end = device.create_event().unwrap();
        stream.record(&end).unwrap();
        (stream, end)
    };
    let low: Vec<_> = [2, 4, 6].map(|at| timed(StreamPriority::Low, at)).into();
    let high = timed(StreamPriority::High, 8);
    device.synchronize().unwrap();
    let ends: Vec<_> = low.iter().map(|(_, end)| end.elapsed_since(&open).unwrap()).collect();
    let urgent = high.1.elapsed_since(&open).unwrap();
    println!("urgent copy after {urgent:?}, others after {ends:?}");
    assert!(
        levels.least == levels.greatest || ends.iter().any(|&end| urgent <= end),
        "{urgent:?} {ends:?}"
    );
}

#[test]
fn opening_a_missing_gpu_is_an_error() {
    let status = GpuStatus::detect();
    let refused = CudaDevice::new(status.device_count()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(matches!(refused, Error::NoGpu { .. }), "{refused}");
    assert_eq!(status.is_available(), status.device_count() > 0);
}

/// Not a test: `every_driver_problem_is_reported` runs this function in a process with another
/// driver.
#[test]
fn prints_the_gpu_status() {
    println!("status: {:?}", GpuStatus::detect());
    let _ = (Status::Ready, HostFn::new(|| ()));
}

#[test]
fn every_driver_problem_is_reported() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let works = [
        "cuCtxGetStreamPriorityRange cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuDeviceGet \
         cuDeviceGetAttribute cuDeviceGetName cuMemGetInfo_v2",
        "cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuDeviceTotalMem_v2 cuEventCreate \
         cuEventDestroy_v2",
        "cuEventElapsedTime cuEventQuery cuEventRecord cuEventSynchronize cuLaunchHostFunc \
         cuMemAllocManaged cuMemAlloc_v2",
        "cuMemFreeHost cuMemFree_v2 cuMemHostAlloc cuMemHostRegister_v2 cuMemHostUnregister \
         cuMemPrefetchAsync cuMemcpy cuMemcpyAsync \
         cuMemsetD8Async cuStreamQuery",
        "cuDeviceGetDefaultMemPool cuMemAllocAsync cuMemFreeAsync cuMemPoolSetAttribute",
        "cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamSynchronize cuStreamWaitEvent \
         cuLaunchKernel cuModuleGetFunction cuModuleLoadData cuModuleUnload",
    ];
    let others: String = works
        .iter()
        .flat_map(|line| line.split(' '))
        .map(|name| format!("int {name}() {{ return 999; }}\n"))
        .collect();
    let driver = |init: i32, count_code: i32, count: i32| {
        format!(
            "int cuInit(unsigned flags) {{ return {init}; }}\n\
             int cuDeviceGetCount(int *count) {{ *count = {count}; return {count_code}; }}\n\
             int cuGetErrorName(int code, const char **text) {{ \
             *text = \"CUDA_ERROR_OF_A_STUB\"; return 0; }}\n{others}"
        )
    };
    let no_driver = |what: &str| format!("NoCuda(\"{what}");
    for (name, source, expected) in [
        (
            "empty",
            "int cuInit(unsigned flags) { return 0; }".into(),
            no_driver("libcuda has no function cu"),
        ),
        ("none", driver(100, 0, 0), "NoDevices".into()),
        ("hidden", driver(0, 0, 0), "NoDevices".into()),
        ("hidden too", driver(0, 100, 7), "NoDevices".into()),
        ("broken", driver(999, 0, 1), no_driver("cuInit failed: CUDA_ERROR_OF_A_STUB")),
        (
            "broken too",
            driver(0, 999, 1),
            no_driver("cuDeviceGetCount failed: CUDA_ERROR_OF_A_STUB"),
        ),
        ("two", driver(0, 0, 2), "Available { device_count: 2 }".into()),
    ] {
        let path = directory.path().join(name);
        std::fs::create_dir(&path).unwrap();
        build(&path, &source);
        assert!(
            status_with(&path).starts_with(&expected),
            "{name}: got {}, expected {expected}",
            status_with(&path)
        );
    }
    let nothing = directory.path().join("nothing");
    std::fs::create_dir(&nothing).unwrap();
    std::fs::write(nothing.join("libcuda.so.1"), "no library").unwrap();
    assert!(status_with(&nothing).starts_with("NoCuda") || GpuStatus::detect().is_available());
}

fn build(directory: &Path, source: &str) {
    let file = directory.join("stub.c");
    std::fs::write(&file, source).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        // `cc` exists, because Rust needs it for linking.
        let mut cc = Command::new("cc");
        let built = cc
            .args(["-shared", "-fPIC", "-w", "-o"])
            .arg(directory.join(name))
            .arg(&file)
            .status()
            .unwrap();
        assert!(built.success());
    }
}

/// Returns the GPU status in a process that finds the driver in the directory `driver` first.
fn status_with(driver: &Path) -> String {
    let mut test = Command::new(std::env::current_exe().unwrap());
    test.args(["--exact", "prints_the_gpu_status", "--nocapture"]).env("LD_LIBRARY_PATH", driver);
    let output = test.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.split_once("status: "))
        .unwrap_or_else(|| panic!("{text}"));
    line.1.to_string()
}
