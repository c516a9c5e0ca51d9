// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hands a tensor to a consumer of DLPack's C structure and takes it back, without a copy.

use std::error::Error;

use ts_remote::Tensor;
use ts_remote::ts_format::Dtype;
use ts_remote::ts_pool::dlpack::{DlManagedTensorVersioned, Form, ManagedTensor, RawTensor};

fn main() -> Result<(), Box<dyn Error>> {
    let values = [1f32, 2., 3., 4., 5., 6.];
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let tensor = Tensor::of_bytes("w", Dtype::F32, [2, 3], bytes)?;
    let address = tensor.buffer.as_ptr();

    // A library gets the pointer, and owns the tensor until it calls the deleter.
    let raw = tensor.clone().into_dlpack(Form::Versioned)?.into_raw();
    let RawTensor::Versioned(pointer) = raw else { return Err("the form is versioned".into()) };
    // SAFETY: the pointer comes from `into_raw`, and nothing else uses it.
    let sum = unsafe { sum_in_another_library(pointer.as_ref()) };
    assert_eq!(sum, 21.);

    // SAFETY: the pointer comes from `into_raw`, and is not used after this.
    let managed = unsafe { ManagedTensor::from_raw(raw) }?;
    let back = Tensor::from_dlpack("w", managed)?;
    assert_eq!(back, tensor);
    assert_eq!(back.buffer.as_ptr(), address, "nothing is copied");
    println!("{:?}: the sum is {sum}", back.info.meta);
    Ok(())
}

/// Reads the structure as code in C does.
///
/// # Safety
/// The structure must be a valid, contiguous tensor of f32 in host memory.
unsafe fn sum_in_another_library(managed: &DlManagedTensorVersioned) -> f32 {
    let tensor = &managed.tensor;
    // SAFETY: the caller guarantees that the tensor is valid, so the shape has `ndim` elements.
    let shape = unsafe { std::slice::from_raw_parts(tensor.shape, tensor.ndim as usize) };
    let count = shape.iter().product::<i64>() as usize;
    let first = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize).cast::<f32>();
    // SAFETY: the caller guarantees that these are the elements.
    (0..count).map(|at| unsafe { first.add(at).read_unaligned() }).sum()
}
