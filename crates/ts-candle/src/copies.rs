// SPDX-License-Identifier: MIT OR Apache-2.0
//! A backend of candle's `VarBuilder` that copies tensors out of leased units.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use ts_orchestrator::{ModelUnit, Pass};

use crate::to_tensor;

pub(crate) struct Copies<'a> {
    pass: &'a Pass,
    /// The unit of the last tensor, so that loading a layer is one use of its unit.
    unit: Mutex<Option<ModelUnit>>,
}

impl<'a> Copies<'a> {
    pub(crate) fn new(pass: &'a Pass) -> Self {
        Self { pass, unit: Mutex::new(None) }
    }
}

impl SimpleBackend for Copies<'_> {
    fn get(&self, s: Shape, name: &str, _: Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, dev)?;
        if *tensor.shape() != s {
            let (msg, got) = (format!("shape mismatch for {name}"), tensor.shape().clone());
            return Err(Error::UnexpectedShape { msg, expected: s, got }.bt());
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        let Some(wanted) = self.pass.model().unit_of(name) else {
            return Err(Error::CannotFindTensor { path: name.to_string() }.bt());
        };
        let mut unit = self.unit.lock().unwrap_or_else(PoisonError::into_inner);
        if unit.as_ref().is_none_or(|unit| unit.name() != wanted) {
            // Its memory may be needed for the next unit.
            *unit = None;
            *unit = Some(self.pass.unit(wanted).map_err(Error::wrap)?);
        }
        let unit = unit.as_ref().expect("the unit was leased");
        to_tensor(&unit.tensor(name).map_err(Error::wrap)?, dev)?.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.pass.model().unit_of(name).is_some()
    }
}
