// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors in the structures of [DLPack](ts_pool::dlpack).

use std::sync::Arc;

use ts_format::{Dtype, TensorMeta};
use ts_pool::TensorBuffer;
use ts_pool::dlpack::{DlDataType, Form, ManagedTensor};

use crate::{Error, Tensor, TensorInfo};

const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const COMPLEX: u8 = 5;
const BOOL: u8 = 6;

/// Returns DLPack's type of elements, or `None` if DLPack has none. A code from 7 on exists in
/// versioned structures only. An element of [`Dtype::F4`] is two values, as in PyTorch.
pub const fn data_type(dtype: Dtype) -> Option<DlDataType> {
    let code = match dtype {
        Dtype::U8 | Dtype::U16 | Dtype::U32 | Dtype::U64 => UINT,
        Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64 => INT,
        Dtype::F16 | Dtype::F32 | Dtype::F64 => FLOAT,
        Dtype::BF16 => BFLOAT,
        Dtype::C32 | Dtype::C64 | Dtype::C128 => COMPLEX,
        Dtype::Bool => BOOL,
        Dtype::F8_E4M3 => 10,
        Dtype::F8_E4M3Fnuz => 11,
        Dtype::F8_E5M2 => 12,
        Dtype::F8_E5M2Fnuz => 13,
        Dtype::F8_E8M0 => 14,
        Dtype::F4 => return Some(DlDataType { code: 17, bits: 4, lanes: 2 }),
        _ => return None,
    };
    Some(DlDataType { code, bits: dtype.bits() as u8, lanes: 1 })
}

/// Returns the dtype of DLPack's type of elements, or `None` if there is none.
pub fn dtype(of: DlDataType) -> Option<Dtype> {
    Dtype::ALL.iter().copied().find(|&known| data_type(known) == Some(of))
}

/// Returns whether the unversioned structure has a type for the dtype.
pub fn has_unversioned_type(dtype: Dtype) -> bool {
    data_type(dtype).is_some_and(|data_type| data_type.code < 7)
}

/// Returns the shape in elements of DLPack: there, two values of 4 bits are one element. Returns
/// `None` if the last dimension is odd.
fn element_shape(meta: &TensorMeta) -> Option<Vec<i64>> {
    let mut shape: Vec<i64> = meta.shape.iter().map(|&n| n as i64).collect();
    if meta.dtype == Dtype::F4 {
        let last = shape.last_mut().filter(|last| **last % 2 == 0)?;
        *last /= 2;
    }
    Some(shape)
}

impl<B: Into<TensorBuffer>> Tensor<B> {
    /// Moves the tensor to a structure of DLPack, without a copy, except for shared
    /// [`Bytes`](bytes::Bytes) and the unversioned form, which cannot say that a tensor is
    /// read-only.
    ///
    /// ```
    /// use ts_remote::ts_format::Dtype;
    /// use ts_remote::ts_pool::dlpack::Form;
    /// use ts_remote::{Tensor, TensorInfo};
    ///
    /// let tensor = Tensor::zeros(TensorInfo::new("w", Dtype::F32, [2, 3])?)?;
    /// let managed = tensor.into_dlpack(Form::Versioned)?; // `into_raw` for another library
    /// let back = Tensor::from_dlpack("w", managed)?;
    /// assert_eq!((back.info.meta.shape, back.buffer.len()), (vec![2, 3], 24));
    /// # Ok::<(), ts_remote::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Unsendable`] if the structure has no type for the dtype, or if the elements
    /// are not inside the buffer, and [`Error::Memory`] if the buffer cannot be exported.
    pub fn into_dlpack(self, form: Form) -> Result<ManagedTensor, Error> {
        let TensorInfo { name, meta, strides, storage_offset, storage_len, .. } = self.info;
        let failed = |reason: String| Error::Unsendable { tensor: name.clone(), reason };
        let known = data_type(meta.dtype)
            .filter(|data_type| form == Form::Versioned || data_type.code < 7)
            .ok_or_else(|| failed(format!("DLPack has no {form:?} type for {}", meta.dtype)))?;
        let odd = || failed("DLPack needs an even number of values of 4 bits".into());
        let shape = element_shape(&meta).ok_or_else(odd)?;
        let strides = strides.filter(|_| meta.dtype.bits() >= 8);
        let offset = storage_offset as usize;
        let exported =
            ManagedTensor::of_buffer(form, self.buffer.into(), offset, known, shape, strides);
        exported.map_err(|error| Error::Memory {
            tensor: name.clone(),
            bytes: storage_len,
            source: Arc::new(error),
        })
    }
}

impl Tensor {
    /// Takes a row-major tensor without gaps, in host memory, out of a structure of DLPack. Copies
    /// nothing: the deleter is called when the last clone of the bytes is dropped.
    ///
    /// # Errors
    /// Returns [`Error::Unsendable`] if the dtype, the shape or the device is another one.
    pub fn from_dlpack(name: impl Into<String>, tensor: ManagedTensor) -> Result<Self, Error> {
        let name = name.into();
        let failed = |reason: String| Error::Unsendable { tensor: name.clone(), reason };
        let layout = tensor.layout().map_err(|error| failed(error.to_string()))?;
        let known = dtype(layout.data_type).ok_or_else(|| {
            failed(format!("DLPack's type {:?} is not supported", layout.data_type))
        })?;
        let mut shape = layout.shape;
        match shape.last_mut() {
            Some(last) if known == Dtype::F4 => *last = last.saturating_mul(2),
            None if known == Dtype::F4 => return Err(failed("it needs a dimension".into())),
            _ => {}
        }
        let bytes = tensor.into_bytes().map_err(|error| failed(error.to_string()))?;
        Self::of_bytes(name, known, shape, bytes)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn each_dtype_that_dlpack_has_round_trips() {
        let mut known = 0;
        for &dtype in Dtype::ALL {
            let Ok(info) = TensorInfo::new("w", dtype, [2, 4]) else { continue };
            let bytes: Vec<u8> = (0..info.storage_len).map(|i| i as u8).collect();
            for form in [Form::Versioned, Form::Unversioned] {
                let tensor = Tensor { info: info.clone(), buffer: Bytes::from(bytes.clone()) };
                let fits = form == Form::Versioned || has_unversioned_type(dtype);
                let exported = tensor.clone().into_dlpack(form);
                assert_eq!(exported.is_ok(), fits && data_type(dtype).is_some(), "{dtype}");
                if let Ok(exported) = exported {
                    assert_eq!(Tensor::from_dlpack("w", exported).unwrap(), tensor);
                    known += 1;
                }
            }
        }
        assert_eq!(known, 22 + 16);
    }

    #[test]
    fn a_view_is_exported_with_its_strides() {
        let info = TensorInfo::new("w.t", Dtype::F32, [3, 2]).unwrap();
        let info = info.in_storage(1, 28, 4, Some(vec![1, 3])).unwrap();
        let tensor = Tensor { info, buffer: vec![7u8; 28] };
        let exported = tensor.into_dlpack(Form::Unversioned).unwrap();
        assert_eq!(exported.layout().unwrap().strides, Some(vec![1, 3]));
        assert!(Tensor::from_dlpack("w", exported).is_err(), "it is not row-major");
        let short = TensorInfo::new("w", Dtype::U8, [9]).unwrap();
        let short = Tensor { info: short, buffer: vec![0u8; 8] };
        assert!(short.into_dlpack(Form::Versioned).is_err());
    }
}
