// SPDX-License-Identifier: MIT OR Apache-2.0
//! A small executor: f32 on this CPU.

use std::collections::HashMap;

use bytes::Bytes;

use crate::{
    Call, Executor, OpFailure, OpFailureKind, Output, ScalarType, StorageView, TensorRef, Value,
};

/// PyTorch's number for float32.
const F32: ScalarType = ScalarType(6);

/// Storages in this process's memory, and `aten::copy_`, `aten::fill_.Scalar`, `aten::add.Tensor`,
/// `aten::mul.Tensor` (of equal shapes) and `aten::mm`, of float32. For who wants both ends without
/// PyTorch, and for tests.
#[derive(Debug, Default)]
pub struct HostExecutor {
    ops: Vec<Option<Op>>,
    /// Length, and bytes once something is written.
    storages: HashMap<u64, (u64, Vec<u8>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    Copy,
    Fill,
    Add,
    Mul,
    Mm,
}

fn refused(what: impl Into<String>) -> OpFailure {
    OpFailure::new(OpFailureKind::Refused, what)
}

fn raised(what: impl Into<String>) -> OpFailure {
    OpFailure::new(OpFailureKind::Raised, what)
}

impl HostExecutor {
    /// One without storages.
    pub fn new() -> Self {
        Self::default()
    }

    /// The bytes of a storage.
    fn bytes(&mut self, storage: u64) -> Result<&mut Vec<u8>, OpFailure> {
        let stale =
            || OpFailure::new(OpFailureKind::Stale, format!("there is no storage {storage}"));
        let (len, bytes) = self.storages.get_mut(&storage).ok_or_else(stale)?;
        if (bytes.len() as u64) < *len {
            let none =
                || OpFailure::new(OpFailureKind::OutOfMemory, format!("no memory for {len} bytes"));
            let len = usize::try_from(*len).map_err(|_| none())?;
            bytes.try_reserve_exact(len - bytes.len()).map_err(|_| none())?;
            bytes.resize(len, 0);
        }
        Ok(bytes)
    }

    /// A part of a storage.
    fn part(&mut self, storage: u64, offset: u64, len: u64) -> Result<&mut [u8], OpFailure> {
        let bytes = self.bytes(storage)?;
        let end = offset.checked_add(len).filter(|&end| end <= bytes.len() as u64);
        let there = bytes.len();
        let end = end.ok_or_else(|| {
            refused(format!("{len} bytes at {offset} of storage {storage}, which has {there}"))
        })?;
        Ok(&mut bytes[offset as usize..end as usize])
    }

    /// Where the elements of a tensor begin in its storage, in bytes and in their order, which are
    /// all within it.
    fn places(&mut self, tensor: &TensorRef) -> Result<Vec<usize>, OpFailure> {
        let there = self.bytes(tensor.storage)?.len() as u64 / 4;
        let StorageView { dtype, sizes, strides, offset } = &tensor.view;
        if *dtype != F32 {
            return Err(refused(format!(
                "a tensor of dtype {}, where only float32 is known",
                dtype.0
            )));
        }
        let outside = || refused(format!("a tensor that is not within storage {}", tensor.storage));
        let mut last = Some(*offset);
        for (&size, &stride) in sizes.iter().zip(strides) {
            let stride = u64::try_from(stride).map_err(|_| outside())?;
            let reach = size.saturating_sub(1).checked_mul(stride);
            last = last.zip(reach).and_then(|(last, reach)| last.checked_add(reach));
        }
        let count = tensor.view.elements().ok_or_else(outside)?;
        if count == 0 {
            return Ok(Vec::new());
        }
        // Of what is expanded, more elements than the storage has are read again and again.
        if last.is_none_or(|last| last >= there) || count > 1 << 32 {
            return Err(outside());
        }
        let mut places = vec![*offset as usize * 4];
        for (&size, &stride) in sizes.iter().zip(strides) {
            let step = stride as usize * 4;
            places = places
                .iter()
                .flat_map(|place| (0..size as usize).map(move |at| place + at * step))
                .collect();
        }
        Ok(places)
    }

    fn get(&mut self, tensor: &TensorRef) -> Result<Vec<f32>, OpFailure> {
        let places = self.places(tensor)?;
        let bytes = self.bytes(tensor.storage)?;
        let element = |&at: &usize| {
            f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Ok(places.iter().map(element).collect())
    }

    fn put(&mut self, tensor: &TensorRef, values: &[f32]) -> Result<(), OpFailure> {
        let places = self.places(tensor)?;
        if places.len() != values.len() {
            return Err(raised(format!(
                "{} elements, where there are {}",
                values.len(),
                places.len()
            )));
        }
        let bytes = self.bytes(tensor.storage)?;
        for (at, value) in places.into_iter().zip(values) {
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    fn same_shape(one: &TensorRef, other: &TensorRef) -> Result<(), OpFailure> {
        if one.view.sizes == other.view.sizes {
            return Ok(());
        }
        Err(raised(format!(
            "shapes {:?} and {:?} are not the same",
            one.view.sizes, other.view.sizes
        )))
    }
}

fn tensor(call: &Call, at: usize) -> Result<&TensorRef, OpFailure> {
    match call.args.get(at) {
        Some(Value::Tensor(tensor)) => Ok(tensor),
        other => Err(raised(format!("argument {at} is {other:?}, and no tensor"))),
    }
}

impl Executor for HostExecutor {
    type Sink = Vec<u8>;

    fn define(&mut self, _: u32, name: &str) -> Result<(), OpFailure> {
        let op = match name {
            "aten::copy_" => Some(Op::Copy),
            "aten::fill_.Scalar" => Some(Op::Fill),
            "aten::add.Tensor" => Some(Op::Add),
            "aten::mul.Tensor" => Some(Op::Mul),
            "aten::mm" => Some(Op::Mm),
            _ => None,
        };
        self.ops.push(op);
        op.map(drop).ok_or_else(|| refused(format!("there is no operator {name}")))
    }

    fn create(&mut self, storage: u64, bytes: u64, device: u32) -> Result<(), OpFailure> {
        if device != 0 {
            return Err(refused(format!("there is no device {device}")));
        }
        if self.storages.contains_key(&storage) {
            return Err(refused(format!("there is a storage {storage}")));
        }
        self.storages.insert(storage, (bytes, Vec::new()));
        Ok(())
    }

    fn resize(&mut self, storage: u64, bytes: u64) -> Result<(), OpFailure> {
        self.bytes(storage)?;
        let (len, held) = self.storages.get_mut(&storage).expect("it is there");
        held.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
        *len = bytes;
        Ok(())
    }

    fn free(&mut self, storage: u64) {
        self.storages.remove(&storage);
    }

    fn write(&mut self, storage: u64, offset: u64, bytes: &[u8]) -> Result<(), OpFailure> {
        self.part(storage, offset, bytes.len() as u64)?.copy_from_slice(bytes);
        Ok(())
    }

    fn read(&mut self, tensor: &TensorRef) -> Result<Bytes, OpFailure> {
        let values = self.get(tensor)?;
        Ok(values.into_iter().flat_map(f32::to_le_bytes).collect())
    }

    fn call(&mut self, call: &Call) -> Result<Vec<Value>, OpFailure> {
        let op = self.ops.get(call.op as usize).copied().flatten();
        let op = op.ok_or_else(|| refused("an operator that was not defined"))?;
        let first = tensor(call, 0)?;
        let values = match op {
            Op::Copy => {
                Self::same_shape(first, tensor(call, 1)?)?;
                self.get(tensor(call, 1)?)?
            }
            Op::Fill => {
                let value = match call.args.get(1) {
                    Some(Value::Float(value)) => *value as f32,
                    Some(Value::Int(value)) => *value as f32,
                    other => return Err(raised(format!("argument 1 is {other:?}, and no number"))),
                };
                vec![value; self.places(first)?.len()]
            }
            Op::Add | Op::Mul => {
                let second = tensor(call, 1)?;
                Self::same_shape(first, second)?;
                let (one, other) = (self.get(first)?, self.get(second)?);
                let combine = |(a, b): (f32, f32)| if op == Op::Add { a + b } else { a * b };
                one.into_iter().zip(other).map(combine).collect()
            }
            Op::Mm => {
                let second = tensor(call, 1)?;
                let (&[rows, inner], &[same, columns]) =
                    (&first.view.sizes[..], &second.view.sizes[..])
                else {
                    return Err(raised("matrices have two dimensions"));
                };
                if inner != same {
                    return Err(raised(format!("{rows}x{inner} by {same}x{columns}")));
                }
                let (one, other) = (self.get(first)?, self.get(second)?);
                let (inner, columns) = (inner as usize, columns as usize);
                let mut product = vec![0.0; rows as usize * columns];
                for (row, out) in product.chunks_mut(columns.max(1)).enumerate() {
                    for at in 0..inner {
                        let factor = one[row * inner + at];
                        let terms = &other[at * columns..][..columns];
                        out.iter_mut().zip(terms).for_each(|(sum, term)| *sum += factor * term);
                    }
                }
                product
            }
        };
        match call.outputs.first() {
            Some(Output::New { tensor, bytes }) => {
                self.create(tensor.storage, *bytes, 0)?;
                let put = self.put(tensor, &values);
                if put.is_err() {
                    self.free(tensor.storage);
                }
                put?;
            }
            _ => self.put(first, &values)?,
        }
        Ok(Vec::new())
    }

    fn storages(&self) -> Vec<(u64, u64, u32, bool)> {
        let told = |(&storage, (len, bytes)): (&u64, &(u64, Vec<u8>))| {
            (storage, *len, 0, !bytes.is_empty())
        };
        self.storages.iter().map(told).collect()
    }

    fn sink(&mut self, storage: u64, offset: u64, bytes: u64) -> Result<Vec<u8>, OpFailure> {
        Ok(vec![0; self.part(storage, offset, bytes)?.len()])
    }

    fn received(&mut self, storage: u64, offset: u64, full: Vec<u8>) -> Result<(), OpFailure> {
        self.write(storage, offset, &full)
    }

    fn writes(&self, call: &Call) -> Vec<u64> {
        let in_place = matches!(self.ops.get(call.op as usize), Some(Some(Op::Copy | Op::Fill)));
        tensor(call, 0).ok().filter(|_| in_place).map(|tensor| tensor.storage).into_iter().collect()
    }
}
