// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of tensors in the structures of DLPack.
#![cfg(feature = "dlpack")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use ts_pool::dlpack::{CPU, DlDataType, Form, ManagedTensor, RawTensor};
use ts_pool::{
    Bytes, ErrorKind, OrderedOptions, StreamOrderedAllocator, StreamOrderedPool, TensorBuffer,
};
use ts_streams::{AnyDevice, CpuDevice, Device, SimDevice, SimOptions, StreamPriority};

/// Bytes that count their drops.
struct Counted(Vec<u8>, Arc<AtomicUsize>);

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

/// Calls the deleter as a consumer in C does.
fn delete(raw: RawTensor) {
    // SAFETY: the pointer comes from `into_raw`, and is not used again.
    unsafe {
        match raw {
            RawTensor::Unversioned(p) => p.as_ref().deleter.unwrap()(p.as_ptr()),
            RawTensor::Versioned(p) => p.as_ref().deleter.unwrap()(p.as_ptr()),
        }
    }
}

const TYPES: [DlDataType; 5] = [
    DlDataType { code: 1, bits: 8, lanes: 1 },
    DlDataType { code: 2, bits: 32, lanes: 1 },
    DlDataType { code: 5, bits: 128, lanes: 1 },
    DlDataType { code: 2, bits: 16, lanes: 4 },
    DlDataType { code: 17, bits: 4, lanes: 2 },
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn tensors_round_trip_and_owners_are_dropped_once(
        versioned: bool,
        by_deleter: bool,
        data_type in prop::sample::select(TYPES.to_vec()),
        shape in prop::collection::vec(0i64..5, 0..5),
        offset in 0usize..40,
        spare in 0usize..3,
    ) {
        let size = usize::from(data_type.bits) * usize::from(data_type.lanes) / 8;
        let len = shape.iter().product::<i64>() as usize * size;
        let content: Vec<u8> = (0..offset + len + spare).map(|i| i as u8).collect();
        let drops = Arc::new(AtomicUsize::new(0));
        let bytes = Bytes::from_owner(Counted(content.clone(), Arc::clone(&drops)));
        let form = if versioned { Form::Versioned } else { Form::Unversioned };
        let buffer = TensorBuffer::cpu(bytes.clone());
        let at = bytes.as_ptr();
        drop(bytes);
        let tensor =
            ManagedTensor::of_buffer(form, buffer, offset, data_type, shape.clone(), None).unwrap();
        // The unversioned structure cannot say that a tensor is read-only, so it gets a copy.
        prop_assert_eq!(drops.load(Ordering::Relaxed), usize::from(!versioned));
        let raw = tensor.into_raw();
        prop_assert_eq!(matches!(raw, RawTensor::Versioned(_)), versioned);
        if by_deleter {
            delete(raw);
            prop_assert_eq!(drops.load(Ordering::Relaxed), 1);
            return Ok(());
        }
        // SAFETY: the pointer comes from `into_raw`, and is used once.
        let tensor = unsafe { ManagedTensor::from_raw(raw) }.unwrap();
        let layout = tensor.layout().unwrap();
        let sizes: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        prop_assert_eq!((layout.shape, layout.strides), (sizes, None));
        prop_assert_eq!((layout.data_type, layout.device.kind), (data_type, CPU));
        prop_assert_eq!(layout.read_only, versioned);
        // Empty allocations have no address of their own.
        let is_same = layout.data.cast_const() == at.wrapping_add(offset);
        prop_assert!(content.is_empty() || is_same == versioned);
        prop_assert_eq!(tensor.bytes().unwrap(), &content[offset..offset + len]);
        let bytes = tensor.into_bytes().unwrap();
        let part = bytes.slice(..len / 2);
        drop(bytes);
        prop_assert_eq!(&part[..], &content[offset..offset + len / 2]);
        // An empty slice keeps nothing.
        prop_assert_eq!(drops.load(Ordering::Relaxed), usize::from(!versioned || len < 2));
        drop(part);
        prop_assert_eq!(drops.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn what_is_outside_the_buffer_or_not_contiguous_is_refused() {
    let of = |offset, shape: &[i64], strides: Option<&[i64]>, data_type| {
        let (buffer, strides) = (TensorBuffer::cpu_zeros(24), strides.map(<[i64]>::to_vec));
        let shape = shape.to_vec();
        ManagedTensor::of_buffer(Form::Versioned, buffer, offset, data_type, shape, strides)
    };
    let f32 = TYPES[1];
    for (offset, shape, strides) in [
        (4, &[2, 3][..], None),
        (0, &[2, -3], None),
        (0, &[2, 3], Some(&[3][..])),
        (0, &[2, 3], Some(&[4, 1])),
        (0, &[2], Some(&[-1])),
        (usize::MAX, &[1], None),
        (0, &[i64::MAX, i64::MAX, 3], None),
        (0, &[3, 3], Some(&[i64::MAX, i64::MIN])),
    ] {
        let error = of(offset, shape, strides, f32).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse, "{shape:?} {strides:?}: {error}");
    }
    assert!(of(0, &[2, 3], Some(&[1, 2]), TYPES[4]).is_err(), "values of 4 bits have no strides");
    let transposed = of(0, &[3, 2], Some(&[1, 3]), f32).unwrap();
    assert_eq!(transposed.layout().unwrap().strides, Some(vec![1, 3]));
    assert!(transposed.bytes().is_err());
    let backwards = of(20, &[6], Some(&[-1]), f32).unwrap();
    assert!(backwards.into_bytes().is_err());
    assert_eq!(of(8, &[1, 4], Some(&[99, 1]), f32).unwrap().bytes().unwrap().len(), 16);
}

#[test]
fn buffers_of_devices_keep_their_device() {
    let cpu = AnyDevice::from(CpuDevice::with_threads(1).unwrap());
    let sim = AnyDevice::from(SimDevice::new(SimOptions::default()));
    for (device, works) in [(cpu, true), (sim, false)] {
        let stream = device.create_stream(StreamPriority::Normal).unwrap();
        let pool = StreamOrderedPool::new(device, OrderedOptions::default());
        let mut buffer = TensorBuffer::allocate_in(&pool, &stream, 4).unwrap();
        buffer.copy_from_slice(&[1, 2, 3, 4]).unwrap();
        let u8 = TYPES[0];
        let tensor = ManagedTensor::of_buffer(Form::Versioned, buffer, 1, u8, vec![3], None);
        assert_eq!(tensor.is_ok(), works, "the memory of a simulated GPU is not the host's");
        if let Ok(tensor) = tensor {
            assert!(!tensor.layout().unwrap().read_only);
            assert_eq!(tensor.bytes().unwrap(), [2, 3, 4]);
        }
    }
}

#[test]
fn an_exported_buffer_is_not_freed_with_its_stream() {
    let device = AnyDevice::from(CpuDevice::new().unwrap());
    let stream = device.create_stream(StreamPriority::Normal).unwrap();
    let pool = StreamOrderedPool::new(device, OrderedOptions::default());
    let mut buffer = TensorBuffer::allocate_in(&pool, &stream, 1 << 16).unwrap();
    buffer.copy_from_slice(&[7; 1 << 16]).unwrap();
    let bytes = DlDataType { code: 1, bits: 8, lanes: 1 };
    let form = Form::Versioned;
    let tensor = ManagedTensor::of_buffer(form, buffer, 0, bytes, vec![1 << 16], None).unwrap();
    assert_eq!(pool.free_for_stream(&stream), 0);
    let mut other = TensorBuffer::allocate_in(&pool, &stream, 1 << 16).unwrap();
    other.copy_from_slice(&[9; 1 << 16]).unwrap();
    assert!(tensor.bytes().unwrap().iter().all(|byte| *byte == 7));
    drop((tensor, other));
    assert_eq!(pool.stats().in_use_bytes, 0);
}
