// SPDX-License-Identifier: MIT OR Apache-2.0
//! A small executor for float32 on the CPU.

use std::collections::HashMap;

use bytes::Bytes;

use super::executor::Executor;
use crate::reply::{OpFailure, OpFailureKind};
use crate::request::{Call, Output};
use crate::value::Value;
use crate::view::{ScalarType, StorageView, TensorRef};

/// The maximum number of elements of a tensor.
const MAX_ELEMENTS: u64 = 1 << 32;

/// An executor for float32 tensors in the memory of this process, without PyTorch.
///
/// It runs `aten::copy_`, `aten::fill_.Scalar`, `aten::add.Tensor`, `aten::mul.Tensor` and
/// `aten::mm`, without broadcasting. It is meant for examples and tests, and is not optimized.
///
/// # Examples
///
/// ```
/// use ts_exec::{Executor, HostExecutor};
///
/// let mut executor = HostExecutor::new();
/// executor.create(1, 1 << 40, 0)?; // takes no memory until the first access
/// assert_eq!(executor.storages(), [(1, 1 << 40, 0, false)]);
/// assert!(executor.define(0, "aten::conv2d").is_err());
/// # Ok::<(), ts_exec::OpFailure>(())
/// ```
#[derive(Debug, Default)]
pub struct HostExecutor {
    /// The defined operators; `None` for operators that do not exist.
    ops: Vec<Option<Op>>,
    storages: HashMap<u64, Storage>,
}

#[derive(Debug)]
struct Storage {
    len: u64,
    /// The content. Shorter than `len` until an access allocates the rest.
    bytes: Vec<u8>,
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
    OpFailure::new(OpFailureKind::Operator, what)
}

impl HostExecutor {
    /// Creates an executor without storages.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the content of a storage, and allocates it at the first access.
    fn bytes(&mut self, storage: u64) -> Result<&mut Vec<u8>, OpFailure> {
        let missing = || {
            let what = format!("storage {storage} does not exist: it was freed or never created");
            OpFailure::new(OpFailureKind::Stale, what)
        };
        let Storage { len, bytes } = self.storages.get_mut(&storage).ok_or_else(missing)?;
        if (bytes.len() as u64) < *len {
            let out_of_memory = || {
                let what =
                    format!("out of memory: cannot allocate {len} bytes for storage {storage}");
                OpFailure::new(OpFailureKind::OutOfMemory, what)
            };
            let len = usize::try_from(*len).map_err(|_| out_of_memory())?;
            bytes.try_reserve_exact(len - bytes.len()).map_err(|_| out_of_memory())?;
            bytes.resize(len, 0);
        }
        Ok(bytes)
    }

    /// Returns `len` bytes of a storage, from `offset` on.
    fn range(&mut self, storage: u64, offset: u64, len: u64) -> Result<&mut [u8], OpFailure> {
        let bytes = self.bytes(storage)?;
        let available = bytes.len();
        let end = offset.checked_add(len).filter(|&end| end <= available as u64);
        let end = end.ok_or_else(|| {
            refused(format!(
                "range of {len} bytes at offset {offset} exceeds storage {storage} of {available} \
                 bytes"
            ))
        })?;
        Ok(&mut bytes[offset as usize..end as usize])
    }

    /// Returns the byte offset of each element of a tensor in its storage, in row-major order. All
    /// are within the storage.
    fn element_offsets(&mut self, tensor: &TensorRef) -> Result<Vec<usize>, OpFailure> {
        let available = self.bytes(tensor.storage)?.len() as u64 / 4;
        let StorageView { dtype, sizes, strides, offset } = &tensor.view;
        if *dtype != ScalarType::FLOAT32 {
            return Err(refused(format!(
                "unsupported dtype: got PyTorch's dtype number {} (expected 6, which is float32)",
                dtype.0
            )));
        }
        let outside = || {
            refused(format!(
                "a tensor with shape {sizes:?}, strides {strides:?} and offset {offset} exceeds \
                 storage {}, which has {available} elements",
                tensor.storage
            ))
        };
        let too_many = || {
            refused(format!(
                "a tensor with shape {sizes:?} has too many elements (expected at most \
                 {MAX_ELEMENTS})"
            ))
        };
        let mut last = Some(*offset);
        for (&size, &stride) in sizes.iter().zip(strides) {
            let stride = u64::try_from(stride).map_err(|_| {
                refused(format!("unsupported strides {strides:?}: a stride must not be negative"))
            })?;
            let reach = size.saturating_sub(1).checked_mul(stride);
            last = last.zip(reach).and_then(|(last, reach)| last.checked_add(reach));
        }
        let count = tensor.view.elements().ok_or_else(too_many)?;
        if count == 0 {
            return Ok(Vec::new());
        }
        if last.is_none_or(|last| last >= available) {
            return Err(outside());
        }
        // An expanded tensor can have more elements than its storage, so the number of elements is
        // limited.
        if count > MAX_ELEMENTS {
            return Err(too_many());
        }
        let mut offsets = vec![*offset as usize * 4];
        for (&size, &stride) in sizes.iter().zip(strides) {
            let step = stride as usize * 4;
            offsets = offsets
                .iter()
                .flat_map(|offset| (0..size as usize).map(move |at| offset + at * step))
                .collect();
        }
        Ok(offsets)
    }

    fn load(&mut self, tensor: &TensorRef) -> Result<Vec<f32>, OpFailure> {
        let offsets = self.element_offsets(tensor)?;
        let bytes = self.bytes(tensor.storage)?;
        let element = |&at: &usize| {
            f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Ok(offsets.iter().map(element).collect())
    }

    fn store(&mut self, tensor: &TensorRef, values: &[f32]) -> Result<(), OpFailure> {
        let offsets = self.element_offsets(tensor)?;
        let (got, expected) = (values.len(), offsets.len());
        if got != expected {
            let what = format!(
                "the result has {got} elements (expected {expected}, as in the output tensor)"
            );
            return Err(raised(what));
        }
        let bytes = self.bytes(tensor.storage)?;
        for (at, value) in offsets.into_iter().zip(values) {
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    fn check_same_shape(a: &TensorRef, b: &TensorRef) -> Result<(), OpFailure> {
        if a.view.sizes == b.view.sizes {
            return Ok(());
        }
        Err(raised(format!(
            "the operands must have equal shapes, got {:?} and {:?}",
            a.view.sizes, b.view.sizes
        )))
    }
}

fn tensor_argument(call: &Call, at: usize) -> Result<&TensorRef, OpFailure> {
    match call.args.get(at) {
        Some(Value::Tensor(tensor)) => Ok(tensor),
        other => Err(bad_argument(at, "a tensor", other)),
    }
}

fn bad_argument(at: usize, expected: &str, got: Option<&Value>) -> OpFailure {
    raised(match got {
        Some(got) => format!("argument {at} must be {expected}, got {got:?}"),
        None => format!("argument {at} is missing (expected {expected})"),
    })
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
        op.map(drop).ok_or_else(|| {
            refused(format!(
                "unknown operator {name:?} (expected aten::copy_, aten::fill_.Scalar, \
                 aten::add.Tensor, aten::mul.Tensor or aten::mm)"
            ))
        })
    }

    fn create(&mut self, storage: u64, bytes: u64, device: u32) -> Result<(), OpFailure> {
        if device != 0 {
            return Err(refused(format!("device {device} does not exist (expected 0)")));
        }
        if self.storages.contains_key(&storage) {
            return Err(refused(format!("cannot create storage {storage}: it already exists")));
        }
        self.storages.insert(storage, Storage { len: bytes, bytes: Vec::new() });
        Ok(())
    }

    fn resize(&mut self, storage: u64, bytes: u64) -> Result<(), OpFailure> {
        self.bytes(storage)?;
        let storage = self.storages.get_mut(&storage).expect("`bytes` found the storage");
        storage.bytes.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
        storage.len = bytes;
        Ok(())
    }

    fn free(&mut self, storage: u64) {
        self.storages.remove(&storage);
    }

    fn write(&mut self, storage: u64, offset: u64, bytes: &[u8]) -> Result<(), OpFailure> {
        self.range(storage, offset, bytes.len() as u64)?.copy_from_slice(bytes);
        Ok(())
    }

    fn read(&mut self, tensor: &TensorRef) -> Result<Bytes, OpFailure> {
        let values = self.load(tensor)?;
        Ok(values.into_iter().flat_map(f32::to_le_bytes).collect())
    }

    fn call(&mut self, call: &Call) -> Result<Vec<Value>, OpFailure> {
        let op = self.ops.get(call.op as usize).copied().flatten();
        let op = op.ok_or_else(|| {
            refused(format!(
                "cannot call operator {}: it was not defined, or its definition failed",
                call.op
            ))
        })?;
        let first = tensor_argument(call, 0)?;
        let values = match op {
            Op::Copy => {
                let source = tensor_argument(call, 1)?;
                Self::check_same_shape(first, source)?;
                self.load(source)?
            }
            Op::Fill => {
                let value = match call.args.get(1) {
                    Some(Value::Float(value)) => *value as f32,
                    Some(Value::Int(value)) => *value as f32,
                    other => return Err(bad_argument(1, "a number", other)),
                };
                vec![value; self.element_offsets(first)?.len()]
            }
            Op::Add | Op::Mul => {
                let second = tensor_argument(call, 1)?;
                Self::check_same_shape(first, second)?;
                let (a, b) = (self.load(first)?, self.load(second)?);
                let combine = |(a, b): (f32, f32)| if op == Op::Add { a + b } else { a * b };
                a.into_iter().zip(b).map(combine).collect()
            }
            Op::Mm => {
                let second = tensor_argument(call, 1)?;
                let (&[rows, inner], &[same, columns]) =
                    (&first.view.sizes[..], &second.view.sizes[..])
                else {
                    return Err(raised(format!(
                        "the operands of mm must have two dimensions, got shapes {:?} and {:?}",
                        first.view.sizes, second.view.sizes
                    )));
                };
                if inner != same {
                    return Err(raised(format!(
                        "cannot multiply a {rows}x{inner} matrix by a {same}x{columns} matrix"
                    )));
                }
                let (a, b) = (self.load(first)?, self.load(second)?);
                let (inner, columns) = (inner as usize, columns as usize);
                let mut product = vec![0.0; rows as usize * columns];
                for (row, out) in product.chunks_mut(columns.max(1)).enumerate() {
                    for at in 0..inner {
                        let factor = a[row * inner + at];
                        let terms = &b[at * columns..][..columns];
                        out.iter_mut().zip(terms).for_each(|(sum, term)| *sum += factor * term);
                    }
                }
                product
            }
        };
        match call.outputs.first() {
            Some(Output::New { tensor, bytes }) => {
                self.create(tensor.storage, *bytes, 0)?;
                let stored = self.store(tensor, &values);
                if stored.is_err() {
                    self.free(tensor.storage);
                }
                stored?;
            }
            _ => self.store(first, &values)?,
        }
        Ok(Vec::new())
    }

    fn storages(&self) -> Vec<(u64, u64, u32, bool)> {
        let describe = |(&number, storage): (&u64, &Storage)| {
            (number, storage.len, 0, !storage.bytes.is_empty())
        };
        self.storages.iter().map(describe).collect()
    }

    fn sink(&mut self, storage: u64, offset: u64, bytes: u64) -> Result<Vec<u8>, OpFailure> {
        Ok(vec![0; self.range(storage, offset, bytes)?.len()])
    }

    fn received(&mut self, storage: u64, offset: u64, full: Vec<u8>) -> Result<(), OpFailure> {
        self.write(storage, offset, &full)
    }

    fn writes(&self, call: &Call) -> Vec<u64> {
        let in_place = matches!(self.ops.get(call.op as usize), Some(Some(Op::Copy | Op::Fill)));
        let target = tensor_argument(call, 0).ok().filter(|_| in_place);
        target.map(|tensor| tensor.storage).into_iter().collect()
    }
}
