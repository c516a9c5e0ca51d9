// SPDX-License-Identifier: MIT OR Apache-2.0
//! Leases the storages of a session that stream, for the request that is running.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use tensorstream::exec::OpFailure;
use tensorstream::format::{Dtype, TensorMeta};
use tensorstream::orchestrator::{Lease, UnitId};
use tensorstream::streams::MemoryRange;

use super::failures::{raised, refused};
use super::storages::{Leased, Storages, identity};
use super::streamed::StreamedTensor;
use crate::dlpack::{CPU, tensor_capsule};
use crate::errors::to_python;

impl Storages {
    /// Leases those of these storages that stream and are not leased yet. Blocks until they are in
    /// memory. [`release`](Self::release) ends the leases.
    pub(super) fn lease(
        &mut self,
        py: Python<'_>,
        numbers: impl IntoIterator<Item = u64>,
    ) -> Result<(), OpFailure> {
        if self.streamed == 0 {
            return Ok(());
        }
        type Wanted = (Py<StreamedTensor>, Vec<(u64, UnitId)>);
        let mut wanted: HashMap<usize, Wanted> = HashMap::new();
        for number in numbers {
            let Ok(entry) = self.entry(number) else { continue };
            let Some(tensor) = entry.streamed.as_ref().map(|tensor| tensor.clone_ref(py)) else {
                continue;
            };
            let (engine, unit) = (Arc::as_ptr(&tensor.get().of).addr(), tensor.get().unit);
            let (_, units) = wanted.entry(engine).or_insert((tensor, Vec::new()));
            if !self.leased.contains_key(&number) && units.iter().all(|(of, _)| *of != number) {
                units.push((number, unit));
            }
        }
        for (of, numbers) in wanted.into_values().filter(|(_, numbers)| !numbers.is_empty()) {
            let units: Vec<_> = numbers.iter().map(|(_, unit)| *unit).collect();
            let leases = py.detach(|| of.get().of.acquire(&units));
            let failed = |e| raised(py, "cannot stream a weight", &e);
            let leases = leases.map_err(|e| failed(to_python(py, &e)))?;
            for ((number, _), lease) in numbers.into_iter().zip(leases) {
                let leased = self.leased_storage(py, lease).map_err(failed)?;
                self.identities.insert(leased.identity);
                self.leased.insert(number, leased);
            }
        }
        Ok(())
    }

    /// Returns a PyTorch storage over the memory of a lease, which ends when the storage is freed.
    fn leased_storage(&self, py: Python<'_>, lease: Lease) -> PyResult<Leased> {
        let bytes = lease.tensor(0);
        let range = MemoryRange::new(bytes.as_ptr().cast_mut(), bytes.len());
        let meta = TensorMeta { dtype: Dtype::U8, shape: vec![bytes.len() as u64] };
        let capsule = tensor_capsule(py, range, (CPU, 0), &meta, (bytes, lease))?;
        let tensor = self.backend.hooks.from_capsule.call1(py, (capsule,))?;
        let storage = tensor.call_method0(py, intern!(py, "untyped_storage"))?;
        Ok(Leased { identity: identity(storage.bind(py))?, storage })
    }

    /// Ends all leases. Call this after each request, with the interpreter attached.
    pub(super) fn release(&mut self) {
        for (_, leased) in self.leased.drain() {
            self.identities.remove(&leased.identity);
        }
    }

    /// Returns a failure if one of these storages streams.
    pub(super) fn check_writable(
        &self,
        numbers: impl IntoIterator<Item = u64>,
    ) -> Result<(), OpFailure> {
        match numbers.into_iter().find(|number| self.is_streamed(*number)) {
            Some(number) => Err(refused(format!(
                "cannot write to storage {number}: it is a weight that streams under the server's \
                 --budget; write to a copy of it (clone)"
            ))),
            None => Ok(()),
        }
    }
}
