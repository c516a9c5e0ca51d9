// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of `TensorBuffer` on the host and on a simulated GPU.

#![allow(clippy::unwrap_used)] // a panic fails the test

use std::sync::Mutex;

use ts_pool::{
    Bytes, ErrorKind, OrderedOptions, StreamOrderedAllocator, StreamOrderedPool, TensorBuffer,
};
use ts_streams::{
    AnyDevice, Device, GpuStatus, HostFn, SimDevice, SimOptions, Stream, StreamPriority,
};

fn simulated(options: SimOptions) -> (SimDevice, StreamOrderedPool<AnyDevice>) {
    let device = SimDevice::new(options);
    let pool = StreamOrderedPool::new(device.clone().into(), OrderedOptions::default());
    (device, pool)
}

#[test]
fn host_bytes_are_wrapped_without_a_copy() {
    let bytes = vec![1, 2, 3];
    let at = bytes.as_ptr();
    let mut buffer = TensorBuffer::cpu(bytes);
    assert!(buffer.is_cpu() && !buffer.is_gpu() && buffer.as_device().is_none());
    assert_eq!(buffer.as_slice().unwrap().as_ptr(), at);
    buffer.copy_from_slice(&[4, 5, 6]).unwrap();
    assert_eq!((buffer.to_host().unwrap(), buffer.len()), (vec![4, 5, 6], 3));
    assert_eq!(TensorBuffer::cpu_zeros(5).to_cpu().unwrap().as_slice(), Some(&[0; 5][..]));
    assert!(TensorBuffer::cpu_zeros(0).is_empty());
    let error = buffer.copy_from_slice(&[1, 2]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misuse);
    let message = error.to_string();
    assert!(message.starts_with("cannot copy 2 bytes into a buffer of 3 bytes"), "{message}");
    assert_eq!(buffer.to_host().unwrap(), [4, 5, 6]);
}

#[test]
fn shared_bytes_are_copied_only_before_a_write() {
    struct Owner([u8; 3]);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let shared = Bytes::from_owner(Owner([1, 2, 3]));
    let mut buffer = TensorBuffer::cpu(shared.clone());
    assert_eq!(buffer.as_slice().unwrap().as_ptr(), shared.as_ptr());
    buffer.write(1, &[9]).unwrap();
    assert_eq!((buffer.to_host().unwrap(), &shared[..]), (vec![1, 9, 3], &[1, 2, 3][..]));
    assert!(buffer.write(2, &[0, 0]).is_err());
}

#[test]
fn copies_between_host_streams_and_pools_keep_the_bytes() {
    let (device, pool) = simulated(SimOptions::default());
    let streams = [(); 2].map(|()| pool.device().create_stream(StreamPriority::Normal).unwrap());
    let bytes: Vec<u8> = (0..5000).map(|i| (i % 251) as u8).collect();
    let first = TensorBuffer::cpu(bytes.clone()).to_pool(&pool, &streams[0]).unwrap();
    assert!(first.is_gpu() && first.as_slice().is_none());
    let copy = first.to_pool(&pool, &streams[1]).unwrap();
    drop(first);
    // Writing to a new buffer of the first stream must not change `copy`, whichever memory the new
    // buffer gets.
    let mut next = TensorBuffer::allocate_in(&pool, &streams[0], 5000).unwrap();
    next.copy_from_slice(&[7; 5000]).unwrap();
    let (other_device, other_pool) = simulated(SimOptions::default().with_seed(1));
    let other_stream = other_pool.device().create_stream(StreamPriority::Normal).unwrap();
    let far = copy.to_pool(&other_pool, &other_stream).unwrap();
    assert_eq!(far.to_cpu().unwrap().as_slice(), Some(&bytes[..]));
    assert_eq!(copy.to_host().unwrap(), bytes);
    assert_eq!(next.to_host().unwrap(), [7; 5000]);
    assert!(next.copy_from_slice(&bytes[1..]).is_err());
    drop((copy, next, far));
    assert_eq!((device.races(), other_device.races()), (vec![], vec![]));
    assert_eq!(pool.stats().in_use_bytes, 0);
}

#[test]
fn a_buffer_stays_usable_after_a_failed_copy() {
    let (device, pool) = simulated(SimOptions::default().with_fault_rate(0.5).with_seed(3));
    let stream = pool.device().create_stream(StreamPriority::Normal).unwrap();
    let mut buffer = TensorBuffer::allocate_in(&pool, &stream, 1000).unwrap();
    let (mut failed, mut copied) = (0, 0);
    for round in 0..60u8 {
        let done = buffer.copy_from_slice(&[round; 1000]).and_then(|()| buffer.to_host());
        match done {
            Ok(bytes) => {
                assert_eq!(bytes, [round; 1000]);
                copied += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::System, "{error}");
                assert!(stream.take_error().is_some());
                failed += 1;
            }
        }
    }
    assert!(failed > 0 && copied > 0, "{failed} failed, {copied} did not");
    assert_eq!(device.races(), []);
}

#[test]
fn copying_in_a_host_function_is_an_error() {
    let (_device, pool) = simulated(SimOptions::default());
    let stream = pool.device().create_stream(StreamPriority::Normal).unwrap();
    let mut buffer = TensorBuffer::allocate_in(&pool, &stream, 8).unwrap();
    let other = pool.device().create_stream(StreamPriority::Normal).unwrap();
    let error = std::sync::Arc::new(Mutex::new(None));
    let result = std::sync::Arc::clone(&error);
    let work = move || {
        *result.lock().unwrap() = Some(buffer.copy_from_slice(&[1; 8]).unwrap_err().to_string());
    };
    other.launch_host_fn(HostFn::new(work)).unwrap();
    other.synchronize().unwrap();
    let error = error.lock().unwrap().take().unwrap();
    assert!(error.contains("cannot wait inside a host function"), "{error}");
}

/// A logger that collects all records.
struct Log;

static LOGGED: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        LOGGED.lock().unwrap().push(format!("{}: {}", record.level(), record.args()));
    }

    fn flush(&self) {}
}

#[test]
fn without_a_gpu_the_allocation_falls_back_and_warns_once() {
    log::set_logger(&Log).unwrap();
    log::set_max_level(log::LevelFilter::Trace);
    let status = GpuStatus::detect();
    if status.is_available() {
        assert!(TensorBuffer::try_allocate_gpu(100, 0).is_gpu());
        println!("skipped: this machine has a GPU, so there is no fallback");
        return;
    }
    for len in [100, 200] {
        let buffer = TensorBuffer::try_allocate_gpu(len, 0);
        assert!(buffer.is_cpu() && buffer.as_slice().unwrap() == vec![0; len]);
    }
    let expected = format!(
        "WARN: using host memory instead of GPU 0 for 100 bytes: cannot open GPU 0: {status}"
    );
    assert_eq!(*LOGGED.lock().unwrap(), [expected]);
    let error = TensorBuffer::allocate_gpu(100, 0).unwrap_err();
    assert_eq!(error.to_string(), format!("cannot open GPU 0: {status}"));
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(TensorBuffer::cpu_zeros(1).to_gpu(0).is_err());
}
