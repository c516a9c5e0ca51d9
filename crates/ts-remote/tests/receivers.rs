// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of tensor receivers with different kinds of memory.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::alloc::Layout;

use proptest::prelude::*;
use ts_format::Dtype;
use ts_pool::ts_streams::{
    Device, MemoryKind, RawMemory, SimDevice, SimOptions, Stream, StreamPriority,
};
use ts_pool::{
    GpuMemoryPool, OrderedOptions, PinnedMemoryPool, PoolConfig, StreamOrderedAllocator,
    StreamOrderedPool,
};
use ts_remote::{
    ErrorKind, GpuMemory, GpuReceiverEvent, GpuTensorReceiver, HostMemory, Memory, OrderedMemory,
    PooledGpuReceiver, PooledMemory, SendOptions, Sink, Tensor, TensorInfo, TensorReceiver,
    TensorSender,
};

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 5 % 251) as u8).collect()
}

fn info(name: &str, len: usize) -> TensorInfo {
    TensorInfo::new(name, Dtype::U8, [len as u64]).unwrap()
}

/// Transfers everything between the sender and the receiver, in pieces of at most `piece` bytes.
fn transfer<M: Memory>(sender: &mut TensorSender, receiver: &mut TensorReceiver<M>, piece: usize) {
    loop {
        let bytes = sender.encode();
        bytes.chunks(piece).for_each(|piece| receiver.feed(piece).unwrap());
        let replies = receiver.replies();
        sender.feed(&replies).unwrap();
        if bytes.is_empty() && replies.is_empty() {
            return;
        }
    }
}

#[test]
fn a_tensor_is_received_into_a_gpu_or_host_memory() {
    let bytes = payload(10 << 20);
    let (mut sender, mut receiver) =
        (TensorSender::new(), GpuTensorReceiver::new(GpuMemory::new(0)));
    sender.send(info("w", bytes.len()), bytes.clone().into(), SendOptions::default()).unwrap();
    assert!(sender.encode().len() < 5 << 20, "the first reply is needed for more than the window");
    let mut sender = TensorSender::new();
    sender.send(info("w", bytes.len()), bytes.clone().into(), SendOptions::default()).unwrap();
    transfer(&mut sender, &mut receiver, 100_000);
    assert!(sender.is_sent() && receiver.is_complete());
    assert_eq!(receiver.expected_bytes(), bytes.len() as u64);
    assert_eq!(receiver.received_bytes(), bytes.len() as u64);
    assert!(
        matches!(receiver.poll().unwrap(), GpuReceiverEvent::Metadata(info) if info.name == "w")
    );
    let mut delivered = 0;
    loop {
        match receiver.poll().unwrap() {
            GpuReceiverEvent::Data { offset, size } => {
                assert_eq!(offset, delivered);
                delivered += size;
            }
            GpuReceiverEvent::End => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(delivered, bytes.len() as u64);
    assert_eq!(receiver.poll().unwrap(), GpuReceiverEvent::NeedMoreData);
    let tensor = receiver.take_tensor().unwrap();
    assert_eq!((tensor.info, tensor.buffer), (info("w", bytes.len()), bytes));
    assert_eq!(receiver.take().unwrap_err().kind(), ErrorKind::Misuse);
}

#[test]
fn a_tensor_beyond_the_limit_is_refused_before_its_payload() {
    let (mut sender, mut receiver) =
        (TensorSender::new(), TensorReceiver::new(HostMemory::new(1000)));
    sender.send(info("w", 1001), payload(1001).into(), SendOptions::default()).unwrap();
    let refused = receiver.feed(&sender.encode()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Memory);
    assert!(refused.to_string().contains("\"w\" of 1001 bytes"), "{refused}");
    for _ in 0..2 {
        assert_eq!(receiver.poll().unwrap_err().kind(), ErrorKind::Memory);
    }
}

#[test]
fn a_cancelled_tensor_reports_the_reason() {
    let (mut sender, mut receiver) =
        (TensorSender::new(), TensorReceiver::new(HostMemory::new(1 << 30)));
    sender.send(info("w", 8 << 20), payload(8 << 20).into(), SendOptions::default()).unwrap();
    receiver.feed(&sender.encode()).unwrap();
    sender.cancel("wrong tensor");
    receiver.feed(&sender.encode()).unwrap();
    let last = std::iter::from_fn(|| {
        Some(receiver.poll().unwrap()).filter(|event| *event != GpuReceiverEvent::NeedMoreData)
    })
    .last();
    assert_eq!(last, Some(GpuReceiverEvent::Cancelled("wrong tensor".into())));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    /// The race detector of the simulated device reports staging memory that is written while it is
    /// copied, and memory that is freed too early.
    #[test]
    fn device_blocks_are_filled_through_pinned_memory(
        seed: u64,
        sizes in prop::collection::vec(0usize..5 << 20, 1..4),
        piece in 1000usize..3 << 20,
    ) {
        let device = SimDevice::new(SimOptions::default().with_seed(seed));
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        let pinned = PinnedMemoryPool::new(device.clone(), PoolConfig::default()).unwrap();
        let gpu = GpuMemoryPool::new(device.clone(), PoolConfig::default()).unwrap();
        let memory = PooledMemory::new(pinned, Some((gpu, stream.clone())));
        let mut receiver = PooledGpuReceiver::new(memory);
        let mut sender = TensorSender::new();
        for &len in &sizes {
            sender.send(info("w", len), payload(len).into(), SendOptions::default()).unwrap();
        }
        transfer(&mut sender, &mut receiver, piece);
        for &len in &sizes {
            let Tensor { info, buffer: block } = receiver.take().unwrap();
            let mut bytes = vec![0; block.len()];
            block.read(0, &mut bytes, &stream).unwrap();
            prop_assert_eq!((info.storage_len as usize, bytes), (len, payload(len)));
        }
        prop_assert!(!receiver.is_complete());
        let stats = receiver.gpu_pool_stats().unwrap();
        prop_assert_eq!(stats.in_use_bytes, 0);
        prop_assert_eq!(receiver.pinned_pool_stats().in_use_bytes, 0);
        // A dropped incomplete tensor returns its memory when the device stream is done.
        let mut sender = TensorSender::new();
        sender.send(info("w", 9 << 20), payload(9 << 20).into(), SendOptions::default()).unwrap();
        receiver.feed(&sender.encode()).unwrap();
        let memory = receiver.into_memory();
        stream.synchronize().unwrap();
        prop_assert_eq!(memory.gpu_pool_stats().unwrap().in_use_bytes, 0);
        prop_assert_eq!(memory.pinned_pool_stats().in_use_bytes, 0);
    }

    /// The same with buffers of a stream-ordered pool, which other streams use until they are done.
    #[test]
    fn ordered_buffers_are_filled_through_pinned_memory(
        seed: u64,
        sizes in prop::collection::vec(0usize..5 << 20, 1..4),
        piece in 1000usize..3 << 20,
    ) {
        let device = SimDevice::new(SimOptions::default().with_seed(seed));
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        let compute = device.create_stream(StreamPriority::Normal).unwrap();
        let pinned = PinnedMemoryPool::new(device.clone(), PoolConfig::default()).unwrap();
        let pool = StreamOrderedPool::new(device.clone(), OrderedOptions::default());
        let memory = OrderedMemory::new(pinned.clone(), pool.clone(), stream);
        let mut receiver = TensorReceiver::new(memory);
        for _ in 0..2 {
            let mut sender = TensorSender::new();
            for &len in &sizes {
                sender.send(info("w", len), payload(len).into(), SendOptions::default()).unwrap();
            }
            transfer(&mut sender, &mut receiver, piece);
            for &len in &sizes {
                let Tensor { info, buffer } = receiver.take().unwrap();
                let layout = Layout::from_size_align(len.max(1), 64).unwrap();
                let copy = device.allocate(layout, MemoryKind::PinnedHost).unwrap();
                pool.record_use(&buffer, &compute).unwrap();
                let (to, from) = (copy.range().slice(0..len), buffer.range().unwrap());
                // SAFETY: the copy ends before the memory is read and freed below. The buffer is
                // freed after the use that was recorded, and no stream writes to it meanwhile.
                unsafe { compute.copy(to, from) }.unwrap();
                drop(buffer);
                compute.synchronize().unwrap();
                let mut bytes = vec![0; len];
                // SAFETY: the copy is done.
                unsafe { copy.read(0, &mut bytes) }.unwrap();
                prop_assert_eq!((info.storage_len as usize, bytes), (len, payload(len)));
            }
        }
        // A dropped incomplete tensor returns its memory when the device stream is done.
        let mut sender = TensorSender::new();
        sender.send(info("w", 9 << 20), payload(9 << 20).into(), SendOptions::default()).unwrap();
        receiver.feed(&sender.encode()).unwrap();
        drop(receiver);
        device.synchronize().unwrap();
        prop_assert_eq!(pool.stats().in_use_bytes, 0);
        prop_assert_eq!(pinned.stats().in_use_bytes, 0);
    }
}

#[test]
fn without_a_device_pinned_blocks_are_filled() {
    let device = SimDevice::new(SimOptions::default());
    let pinned = PinnedMemoryPool::new(device, PoolConfig::default()).unwrap();
    let mut memory = PooledMemory::new(pinned, None);
    let mut sink = memory.allocate(&info("w", 5000)).unwrap();
    assert_eq!(sink.space(100, 30).unwrap().len(), 30);
    let mut receiver = PooledGpuReceiver::new(memory);
    let mut sender = TensorSender::new();
    sender.send(info("w", 5000), payload(5000).into(), SendOptions::default()).unwrap();
    transfer(&mut sender, &mut receiver, 1 << 20);
    let block = receiver.take().unwrap().buffer;
    assert_eq!(block.host_bytes().unwrap(), payload(5000));
    assert!(receiver.gpu_pool_stats().is_none() && receiver.pinned_pool_stats().hits > 0);
}
