// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the conformance suite on the stand-in accelerator, through its runtime library.

#![cfg(feature = "runtime")]
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::alloc::Layout;
use std::path::{Path, PathBuf};

use ts_streams::{
    AnyDevice, Device, Error, Event, HostFn, MemoryKind, RawMemory, RuntimeDevice, RuntimeLibrary,
    Status, Stream, StreamPriority, conformance,
};

/// Returns the path of the library of the stand-in, which `cargo xtask ci` builds.
fn path() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/stand-in");
    let built = std::env::var_os("TENSORSTREAM_STAND_IN").map_or(built, PathBuf::from);
    built.join("torch_accinte/lib/libstandin.so")
}

/// Returns the library of the stand-in, or `None` if it is not built.
fn library() -> Option<RuntimeLibrary> {
    let path = path();
    if !path.exists() {
        // `cargo xtask ci` counts these lines.
        println!("skipped: no stand-in accelerator");
        return None;
    }
    // SAFETY: `tests/stand_in/runtime.cpp` has the functions that `RuntimeLibrary` describes.
    Some(unsafe { RuntimeLibrary::load(path, "standin") }.unwrap())
}

#[test]
fn the_stand_in_conforms() {
    let Some(library) = library() else { return };
    conformance::check(|| RuntimeDevice::new(&library, 1).unwrap());
}

#[test]
fn the_stand_in_conforms_as_any_device() {
    let Some(library) = library() else { return };
    conformance::check(|| AnyDevice::from(RuntimeDevice::new(&library, 0).unwrap()));
}

#[test]
fn a_stream_of_other_code_orders_work_and_outlives_the_handle() {
    let Some(library) = library() else { return };
    let device = RuntimeDevice::new(&library, 0).unwrap();
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let layout = Layout::from_size_align(4096, 64).unwrap();
    let memory = device.allocate(layout, MemoryKind::Device).unwrap();
    for byte in 0..3 {
        // SAFETY: `stream` exists, and is a stream of this device.
        let same = unsafe { device.external_stream(stream.as_ptr()) };
        assert_ne!(same.id(), stream.id());
        // SAFETY: the stream orders the accesses, and the memory outlives the work.
        unsafe { same.fill(memory.range(), byte) }.unwrap();
    }
    stream.synchronize().unwrap();
    let mut bytes = [0; 4096];
    // SAFETY: no work uses the memory any more.
    unsafe { memory.read(0, &mut bytes) }.unwrap();
    assert_eq!(bytes, [2; 4096]);
}

/// PyTorch asks the library for the last error after each kernel.
#[test]
fn errors_are_not_left_for_other_code() {
    let Some(library) = library() else { return };
    // SAFETY: the library is loaded, and has this function.
    let last_error = || unsafe {
        let own = libloading::Library::new(path()).unwrap();
        own.get::<unsafe extern "C" fn() -> i32>(b"standinPeekAtLastError").unwrap()()
    };
    let device = RuntimeDevice::new(&library, 0).unwrap();
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let blocked = HostFn::new(move || {
        let _ = gate.recv();
    });
    stream.launch_host_fn(blocked).unwrap();
    let event = device.create_event().unwrap();
    stream.record(&event).unwrap();
    assert_eq!((event.query(), stream.query()), (Ok(Status::Pending), Ok(Status::Pending)));
    assert_eq!(last_error(), 0);
    drop(open);
    let huge = Layout::from_size_align(1 << 60, 64).unwrap();
    assert!(device.allocate(huge, MemoryKind::Device).is_err());
    assert_eq!(last_error(), 0);
    stream.synchronize().unwrap();
}

#[test]
fn what_is_missing_is_an_error_in_words() {
    // SAFETY: there is no such file.
    let error = unsafe { RuntimeLibrary::load("/no/such/library.so", "no") }.unwrap_err();
    assert!(matches!(error, Error::DeviceUnavailable { .. }), "{error}");
    let Some(library) = library() else { return };
    let error = RuntimeDevice::new(&library, 2).unwrap_err();
    assert!(error.to_string().contains("2 device(s)"), "{error}");
    // SAFETY: the library has no function with this prefix.
    let error = unsafe { RuntimeLibrary::load(path(), "other") }.unwrap_err();
    assert!(error.to_string().contains("otherGetDeviceCount"), "{error}");
}

#[test]
fn too_little_memory_and_unsupported_kinds_are_typed() {
    let Some(library) = library() else { return };
    let device = RuntimeDevice::new(&library, 0).unwrap();
    let layout = Layout::from_size_align(1 << 20, 64).unwrap();
    let managed = device.allocate(layout, MemoryKind::Managed).unwrap_err();
    assert!(matches!(managed, Error::Unsupported { .. }), "{managed}");
    let huge = Layout::from_size_align(1 << 60, 64).unwrap();
    let error = device.allocate(huge, MemoryKind::Device).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
}
