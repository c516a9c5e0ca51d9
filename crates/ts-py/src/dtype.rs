// SPDX-License-Identifier: MIT OR Apache-2.0
//! Defines the table of dtypes, with their names and their numbers in PyTorch and DLPack, and the
//! class `DType`.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use tensorstream::exec::ScalarType;
use tensorstream::format::{Dtype, TensorMeta};
use tensorstream::pool::dlpack::DlDataType;
use tensorstream::remote::dlpack::data_type;

/// A dtype of PyTorch, and its equivalents in files and in DLPack.
pub(crate) struct Row {
    /// The name in PyTorch, which is also the name in NumPy if NumPy has the dtype.
    pub(crate) name: &'static str,
    /// The dtype in checkpoints. `None` if checkpoints cannot contain it.
    pub(crate) format: Option<Dtype>,
    /// PyTorch's number (`c10::ScalarType`), also used in requests to remote machines.
    pub(crate) scalar_type: u8,
    /// The size of an element in PyTorch, in bytes.
    pub(crate) bytes: u64,
    /// The type of elements in DLPack.
    pub(crate) dlpack: DlDataType,
}

const fn row(name: &'static str, dtype: Dtype, scalar_type: u8, bytes: u64) -> Row {
    let dlpack = data_type(dtype).expect("DLPack has all dtypes of PyTorch");
    Row { name, format: Some(dtype), scalar_type, bytes, dlpack }
}

/// The dtypes of PyTorch. The table lacks quantized dtypes, and dtypes without operators, such as
/// `bits8`.
#[rustfmt::skip]
pub(crate) const TABLE: [Row; 22] = [
    row("uint8", Dtype::U8, 0, 1),
    row("int8", Dtype::I8, 1, 1),
    row("int16", Dtype::I16, 2, 2),
    row("int32", Dtype::I32, 3, 4),
    row("int64", Dtype::I64, 4, 8),
    row("float16", Dtype::F16, 5, 2),
    row("float32", Dtype::F32, 6, 4),
    row("float64", Dtype::F64, 7, 8),
    row("complex32", Dtype::C32, 8, 4),
    row("complex64", Dtype::C64, 9, 8),
    row("complex128", Dtype::C128, 10, 16),
    row("bool", Dtype::Bool, 11, 1),
    row("bfloat16", Dtype::BF16, 15, 2),
    row("float8_e5m2", Dtype::F8_E5M2, 23, 1),
    row("float8_e4m3fn", Dtype::F8_E4M3, 24, 1),
    row("float8_e5m2fnuz", Dtype::F8_E5M2Fnuz, 25, 1),
    row("float8_e4m3fnuz", Dtype::F8_E4M3Fnuz, 26, 1),
    row("uint16", Dtype::U16, 27, 2),
    row("uint32", Dtype::U32, 28, 4),
    row("uint64", Dtype::U64, 29, 8),
    row("float8_e8m0fnu", Dtype::F8_E8M0, 44, 1),
    row("float4_e2m1fn_x2", Dtype::F4, 45, 1),
];

/// Returns the shape in PyTorch of a tensor with this shape in files: there, two values of 4 bits
/// are one element. Returns `None` if PyTorch cannot have the shape.
pub(crate) fn torch_shape(dtype: Dtype, shape: &[u64]) -> Option<Vec<u64>> {
    let mut shape = shape.to_vec();
    if dtype == Dtype::F4 {
        let last = shape.last_mut().filter(|last| last.is_multiple_of(2))?;
        *last /= 2;
    }
    Some(shape)
}

/// Returns the shape in files of a tensor with this shape in PyTorch.
pub(crate) fn stored_shape(dtype: Dtype, mut shape: Vec<u64>) -> Vec<u64> {
    if let (Dtype::F4, Some(last)) = (dtype, shape.last_mut()) {
        *last = last.saturating_mul(2);
    }
    shape
}

/// Returns the row of a dtype of checkpoints. `None` if PyTorch has no such dtype.
pub(crate) fn row_of(dtype: Dtype) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.format == Some(dtype))
}

/// Returns, for each dtype, the name, the safetensors name (`None` if checkpoints cannot contain
/// the dtype), PyTorch's number, and the size of an element in bytes.
pub(crate) fn rows() -> Vec<(&'static str, Option<&'static str>, u8, u64)> {
    let row = |row: &Row| (row.name, row.format.map(Dtype::name), row.scalar_type, row.bytes);
    TABLE.iter().map(row).collect()
}

/// Returns the metadata of a tensor with this shape in PyTorch, and the dtype of this name in
/// files.
///
/// # Errors
/// ValueError if the name is unknown.
pub(crate) fn tensor_meta(dtype: &str, shape: Vec<u64>) -> PyResult<TensorMeta> {
    let known = Dtype::from_name(dtype);
    let dtype = known.ok_or_else(|| {
        PyValueError::new_err(format!(
            "unknown dtype {dtype:?}: expected a safetensors name such as \"F32\""
        ))
    })?;
    Ok(TensorMeta { dtype, shape: stored_shape(dtype, shape) })
}

/// Returns the name of the dtype with this number, or None if the table lacks it.
pub(crate) fn name_of(number: ScalarType) -> Option<&'static str> {
    TABLE.iter().find(|row| row.scalar_type == number.0).map(|row| row.name)
}

/// Returns the error message for a dtype that [`TorchDtypes::get`] lacks. `place` names this
/// process in the message: "this client" or "this machine".
pub(crate) fn missing_dtype(number: ScalarType, place: &str) -> String {
    match name_of(number) {
        Some(name) => format!(
            "unsupported dtype {name}: the PyTorch of {place} lacks it; upgrade PyTorch there"
        ),
        None => format!(
            "unknown dtype number {}: the tensorstream of {place} does not support it; upgrade \
             tensorstream there",
            number.0
        ),
    }
}

/// A dtype of the installed PyTorch.
pub(crate) struct TorchDtype {
    pub(crate) object: Py<PyAny>,
    pub(crate) row: &'static Row,
}

/// The dtypes of the installed PyTorch, by number.
pub(crate) struct TorchDtypes(Vec<Option<TorchDtype>>);

impl TorchDtypes {
    /// Looks up the dtypes in the module `torch`. Skips those that this version of PyTorch lacks.
    pub(crate) fn load(torch: &Bound<'_, PyModule>) -> PyResult<Self> {
        let mut dtypes = Vec::new();
        for row in &TABLE {
            let number = usize::from(row.scalar_type);
            if dtypes.len() <= number {
                dtypes.resize_with(number + 1, || None);
            }
            if let Some(object) = torch.getattr_opt(row.name)? {
                dtypes[number] = Some(TorchDtype { object: object.unbind(), row });
            }
        }
        Ok(Self(dtypes))
    }

    /// Returns the dtype with this number, or None if the installed PyTorch or the table lacks it.
    pub(crate) fn get(&self, number: ScalarType) -> Option<&TorchDtype> {
        self.0.get(usize::from(number.0))?.as_ref()
    }

    /// Returns the number of a `torch.dtype`, or None if the table lacks it.
    pub(crate) fn number(&self, object: &Bound<'_, PyAny>) -> Option<ScalarType> {
        let is = |dtype: &Option<TorchDtype>| {
            dtype.as_ref().is_some_and(|dtype| dtype.object.as_ptr() == object.as_ptr())
        };
        self.0.iter().position(is).map(|number| ScalarType(number as u8))
    }
}

/// The element type of a tensor.
///
/// Examples:
///     >>> import tensorstream as ts, torch
///     >>> ts.DType.of(torch.bfloat16)
///     DType(bfloat16)
///     >>> ts.DType.of("F32") == ts.DType.float32()
///     True
///     >>> ts.DType.float32().itemsize
///     4
#[pyclass(frozen, eq, hash, module = "tensorstream", name = "DType")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PyDtype(pub(crate) Dtype);

impl PyDtype {
    /// Converts a `DType`, a `torch.dtype`, a NumPy dtype, or the name of one of these.
    ///
    /// # Errors
    /// TypeError if the object is none of these, or checkpoints cannot contain the dtype.
    pub(crate) fn extract(value: &Bound<'_, PyAny>) -> PyResult<Dtype> {
        if let Ok(dtype) = value.cast::<Self>() {
            return Ok(dtype.get().0);
        }
        // NumPy's scalar classes, such as numpy.float32, have a `__name__`.
        let text = match value.getattr("__name__").or_else(|_| value.getattr("name")) {
            Ok(name) => name.str()?.to_string(),
            Err(_) => value.str()?.to_string(),
        };
        Self::from_name(&text)
    }

    /// Returns the dtype with this name in PyTorch, NumPy or safetensors.
    ///
    /// # Errors
    /// TypeError if the name is unknown, or checkpoints cannot contain the dtype.
    pub(crate) fn from_name(text: &str) -> PyResult<Dtype> {
        let name = text.strip_prefix("torch.").unwrap_or(text);
        let known = TABLE.iter().find(|row| row.name == name).and_then(|row| row.format);
        known.or_else(|| Dtype::from_name(name)).ok_or_else(|| {
            PyTypeError::new_err(format!(
                "invalid dtype {text:?}: checkpoints have no such dtype (expected one such as \
                 torch.float32, numpy.float32 or \"float32\")"
            ))
        })
    }
}

macro_rules! dtypes {
    ($($method:ident $name:literal = $dtype:ident,)*) => {
        #[pymethods]
        impl PyDtype {
            $(
                #[staticmethod]
                #[pyo3(name = $name)]
                fn $method() -> Self {
                    Self(Dtype::$dtype)
                }
            )*

            /// Converts a dtype of another library, or the name of a dtype.
            ///
            /// Args:
            ///     value: A ``DType``, a ``torch.dtype``, a NumPy dtype, or a name in PyTorch,
            ///         NumPy or safetensors.
            ///
            /// Raises:
            ///     TypeError: The value is none of these, or checkpoints cannot contain the dtype.
            #[staticmethod]
            fn of(value: &Bound<'_, PyAny>) -> PyResult<Self> {
                Self::extract(value).map(Self)
            }

            /// The name in PyTorch, such as "float32". The safetensors name if PyTorch has none,
            /// and for values smaller than a byte, of which an element of PyTorch has several.
            #[getter]
            pub(crate) fn name(&self) -> &'static str {
                let row = row_of(self.0).filter(|_| self.0.bits() >= 8);
                row.map_or(self.0.name(), |row| row.name)
            }

            /// The size of an element in bytes, or 0 if an element is smaller than a byte.
            #[getter]
            fn itemsize(&self) -> u32 {
                self.0.bits() / 8
            }

            fn __repr__(&self) -> String {
                format!("DType({})", self.name())
            }
        }
    };
}

dtypes! {
    boolean "bool" = Bool,
    uint8 "uint8" = U8,
    int8 "int8" = I8,
    uint16 "uint16" = U16,
    int16 "int16" = I16,
    uint32 "uint32" = U32,
    int32 "int32" = I32,
    uint64 "uint64" = U64,
    int64 "int64" = I64,
    float16 "float16" = F16,
    bfloat16 "bfloat16" = BF16,
    float32 "float32" = F32,
    float64 "float64" = F64,
    complex64 "complex64" = C64,
    complex128 "complex128" = C128,
    float8_e4m3fn "float8_e4m3fn" = F8_E4M3,
    float8_e5m2 "float8_e5m2" = F8_E5M2,
}
