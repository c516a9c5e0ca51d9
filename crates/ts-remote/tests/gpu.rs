// SPDX-License-Identifier: MIT OR Apache-2.0
//! Receivers into the memory of a GPU, if there is one.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // a panic fails the test

use std::io::Write;

use ts_format::Dtype;
use ts_pool::ts_streams::{CudaDevice, Device, Stream, StreamPriority};
use ts_pool::{
    GpuMemoryPool, OrderedOptions, PinnedMemoryPool, PoolConfig, StreamOrderedAllocator,
    StreamOrderedPool,
};
use ts_remote::{
    ErrorKind, GpuMemory, GpuTensorReceiver, Memory, OrderedMemory, PooledGpuReceiver,
    PooledMemory, SendOptions, TensorInfo, TensorReceiver, TensorSender,
};

/// Opens GPU 0. If there is none, prints a line to stdout in a way that the test harness does not
/// capture. `cargo xtask` counts these lines.
fn gpu() -> Option<CudaDevice> {
    CudaDevice::new(0)
        .inspect_err(|error| {
            let line = format!("skipped: no CUDA device: {error}\n");
            std::io::stdout().write_all(line.as_bytes()).unwrap();
        })
        .ok()
}

const SIZES: [usize; 5] = [0, 1, 100_000, 5 << 20, (9 << 20) + 7];

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 5 % 251) as u8).collect()
}

/// Sends tensors of all sizes to a receiver.
fn receive<M: Memory>(receiver: &mut TensorReceiver<M>) {
    let mut sender = TensorSender::new();
    for len in SIZES {
        let info = TensorInfo::new("w", Dtype::U8, [len as u64]).unwrap();
        sender.send(info, payload(len).into(), SendOptions::default()).unwrap();
    }
    loop {
        let bytes = sender.encode();
        receiver.feed(&bytes).unwrap();
        let replies = receiver.replies();
        sender.feed(&replies).unwrap();
        if bytes.is_empty() && replies.is_empty() {
            return;
        }
    }
}

#[test]
fn tensors_are_received_into_the_memory_of_a_gpu() {
    let Some(_device) = gpu() else { return };
    let mut receiver = GpuTensorReceiver::new(GpuMemory::new(0));
    receive(&mut receiver);
    for len in SIZES {
        let buffer = receiver.take().unwrap().buffer;
        assert!(len == 0 || buffer.is_gpu(), "{len} bytes are on the host");
        assert_eq!(buffer.to_host().unwrap(), payload(len));
    }
}

#[test]
fn tensors_are_received_into_pooled_blocks() {
    let Some(device) = gpu() else { return };
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let pinned = PinnedMemoryPool::new(device.clone(), PoolConfig::default()).unwrap();
    let gpu = GpuMemoryPool::new(device, PoolConfig::default()).unwrap();
    let memory = PooledMemory::new(pinned, Some((gpu, stream.clone())));
    let mut receiver = PooledGpuReceiver::new(memory);
    for _ in 0..2 {
        receive(&mut receiver);
        for len in SIZES {
            let block = receiver.take().unwrap().buffer;
            let mut bytes = vec![0; block.len()];
            block.read(0, &mut bytes, &stream).unwrap();
            assert_eq!(bytes, payload(len));
        }
    }
    let stats = receiver.gpu_pool_stats().unwrap();
    assert!(stats.hits > 0 && stats.in_use_bytes == 0, "{stats:?}");
    assert_eq!(receiver.pinned_pool_stats().in_use_bytes, 0);
}

#[test]
fn tensors_are_received_into_ordered_buffers() {
    let Some(device) = gpu() else { return };
    let [stream, compute] = [(); 2].map(|()| device.create_stream(StreamPriority::Normal).unwrap());
    let pinned = PinnedMemoryPool::new(device.clone(), PoolConfig::default()).unwrap();
    let pool = StreamOrderedPool::new(device.clone(), OrderedOptions::default());
    let memory = OrderedMemory::new(pinned, pool.clone(), stream);
    let mut receiver = TensorReceiver::new(memory);
    for _ in 0..2 {
        receive(&mut receiver);
        for len in SIZES {
            let buffer = receiver.take().unwrap().buffer;
            let mut bytes = vec![0; len];
            buffer.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, payload(len));
            pool.record_use(&buffer, &compute).unwrap();
        }
    }
    compute.synchronize().unwrap();
    drop(receiver);
    device.synchronize().unwrap();
    assert_eq!(pool.stats().in_use_bytes, 0);
}

#[test]
fn too_little_memory_of_a_gpu_is_an_error() {
    let Some(device) = gpu() else { return };
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let pinned = PinnedMemoryPool::new(device.clone(), PoolConfig::default()).unwrap();
    let options = OrderedOptions::default().with_limit_bytes(1 << 20).with_segment_bytes(1 << 20);
    let pool = StreamOrderedPool::new(device, options);
    let mut receiver = TensorReceiver::new(OrderedMemory::new(pinned, pool.clone(), stream));
    let mut sender = TensorSender::new();
    let info = TensorInfo::new("w", Dtype::U8, [2 << 20]).unwrap();
    sender.send(info, payload(2 << 20).into(), SendOptions::default()).unwrap();
    let refused = receiver.feed(&sender.encode()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Memory);
    assert!(refused.to_string().contains("\"w\" of 2097152 bytes"), "{refused}");
    assert_eq!(pool.stats().in_use_bytes, 0);
}
