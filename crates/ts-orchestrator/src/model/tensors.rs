// SPDX-License-Identifier: MIT OR Apache-2.0
//! Units of a model in memory, and their tensors.

use std::ops::Deref;
use std::path::Path;

use ts_format::{Dtype, TensorMeta};

use crate::Error;
use crate::lease::{Lease, TensorBytes};

use super::{Model, names};

/// A unit of a [`Model`] in memory, from [`Pass::unit`](super::Pass::unit).
///
/// The use of the unit ends when this is dropped. Its tensors stay valid, and keep its memory.
#[derive(Debug)]
pub struct ModelUnit {
    lease: Lease,
    model: Model,
}

impl ModelUnit {
    pub(super) fn new(lease: Lease, model: Model) -> Self {
        Self { lease, model }
    }

    /// Returns the name of the unit.
    pub fn name(&self) -> &str {
        &self.model.inner.units[self.lease.unit().index()]
    }

    /// Returns the tensors with their names in the checkpoint, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, ModelTensor)> {
        let tensor = |(index, name): (usize, &'_ String)| self.at(index, name);
        self.names().iter().enumerate().map(move |at| (at.1.as_str(), tensor(at)))
    }

    /// Returns the tensor with this name. It is the name in the checkpoint, or the rest of it after
    /// the name of the unit: `self_attn.q_proj.weight` in `model.layers.3`.
    ///
    /// # Errors
    /// Returns [`Error::NoSuchName`] if the unit has no such tensor, with the most similar name.
    pub fn tensor(&self, name: &str) -> Result<ModelTensor, Error> {
        let position = |wanted: &str| self.names().iter().position(|known| known == wanted);
        let found = position(name).or_else(|| position(&format!("{}.{name}", self.name())));
        if let Some(index) = found {
            return Ok(self.at(index, &self.names()[index]));
        }
        let known = self.names().iter().map(String::as_str);
        let prefix = format!("{}.", self.name());
        let relative = known.clone().map(|name| name.strip_prefix(&prefix).unwrap_or(name));
        let near = names::nearest(name, known.clone()).or_else(|| names::nearest(name, relative));
        let path = Path::new(self.name());
        Err(names::no_such("tensor", name, path, near, known))
    }

    /// Returns the lease of the unit.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    fn names(&self) -> &[String] {
        &self.model.inner.tensors[self.lease.unit().index()]
    }

    fn at(&self, index: usize, name: &str) -> ModelTensor {
        let meta = self.model.inner.catalog.tensor(name).expect("names are of the catalog").meta();
        ModelTensor::new(meta, self.lease.tensor(index))
    }
}

/// A tensor of a [`ModelUnit`], or rows of one. Dereferences to its bytes, which are little-endian
/// and row-major.
///
/// The bytes are in the memory of the unit and are not copied. They stay valid until the last clone
/// is dropped, also after the unit, the pass and the model. Until then, the memory is not reused,
/// so keep tensors no longer than necessary.
#[derive(Debug, Clone)]
pub struct ModelTensor {
    meta: TensorMeta,
    bytes: TensorBytes,
}

impl ModelTensor {
    pub(super) fn new(meta: TensorMeta, bytes: TensorBytes) -> Self {
        Self { meta, bytes }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> Dtype {
        self.meta.dtype
    }

    /// Returns the length of each dimension in elements, outermost first; empty for a scalar.
    pub fn shape(&self) -> &[u64] {
        &self.meta.shape
    }

    /// Returns the bytes as the engine has them, with their range of memory.
    pub fn bytes(&self) -> &TensorBytes {
        &self.bytes
    }
}

impl Deref for ModelTensor {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}
