// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans: the results of calls, as far as they are known before the machine has run the calls.

use std::sync::{Arc, LazyLock};

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use pyo3::types::PyList;
use tensorstream::exec::{ScalarType, SignatureCache, StorageView, TensorRef, Value};

/// The minimum number of recently used plans that the cache keeps.
const CACHED_PLANS: usize = 32 << 10;

static PLANS: LazyLock<Mutex<PlanCache>> =
    LazyLock::new(|| Mutex::new(SignatureCache::new(CACHED_PLANS)));

/// Plans by the signatures of the calls, which begin with the number of the kernel.
type PlanCache = SignatureCache<Box<[u8]>, Arc<Plan>>;

/// Locks the cache of plans, which all sessions share.
pub(super) fn plans() -> MutexGuard<'static, PlanCache> {
    PLANS.lock()
}

/// The results of a call.
pub(super) struct Plan {
    pub(super) returns: Vec<PlannedReturn>,
}

/// A result of a call: a tensor or None, or a list of those.
pub(super) enum PlannedReturn {
    One(Option<PlannedTensor>),
    List(Vec<Option<PlannedTensor>>),
}

/// A tensor that a call returns. Positions of arguments count only the tensor arguments.
#[derive(FromPyObject)]
pub(super) enum PlannedTensor {
    /// An argument, by its position.
    #[pyo3(transparent)]
    Argument(usize),
    /// A view of an argument: position, sizes, strides and offset.
    #[pyo3(transparent)]
    View((usize, Vec<u64>, Vec<i64>, u64)),
    #[pyo3(transparent)]
    New(NewTensor),
}

/// A tensor in a new storage.
pub(super) struct NewTensor {
    pub(super) view: StorageView,
    /// The size of its storage, in bytes.
    pub(super) bytes: u64,
    /// The position of its storage among the new storages of the call.
    pub(super) storage: usize,
}

impl Plan {
    /// Reads the list that `infer` returns (remote/client/_infer.py).
    pub(super) fn from_inferred(returns: &Bound<'_, PyList>) -> PyResult<Self> {
        let planned = |returned: Bound<'_, PyAny>| match returned.cast::<PyList>() {
            Ok(list) => {
                let tensors =
                    list.iter().map(|tensor| tensor.extract()).collect::<PyResult<_>>()?;
                Ok::<_, PyErr>(PlannedReturn::List(tensors))
            }
            Err(_) => Ok(PlannedReturn::One(returned.extract()?)),
        };
        Ok(Self { returns: returns.iter().map(planned).collect::<PyResult<_>>()? })
    }

    /// Creates a plan from the results in a reply, for later calls with the same signature.
    pub(super) fn from_reply(values: &[Value]) -> Self {
        let planned = |(storage, value): (usize, &Value)| {
            PlannedReturn::One(NewTensor::from_reply(value, storage).map(PlannedTensor::New))
        };
        Self { returns: values.iter().enumerate().map(planned).collect() }
    }

    /// Iterates over the tensors of all returns, including those in lists.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Option<PlannedTensor>> {
        self.returns.iter().flat_map(|returned| match returned {
            PlannedReturn::One(tensor) => std::slice::from_ref(tensor),
            PlannedReturn::List(tensors) => tensors,
        })
    }

    /// Returns the number of new storages.
    pub(super) fn storages(&self) -> usize {
        let storages = self.tensors().filter_map(|tensor| match tensor {
            Some(PlannedTensor::New(new)) => Some(new.storage + 1),
            _ => None,
        });
        storages.max().unwrap_or(0)
    }
}

impl NewTensor {
    /// Returns a reference to the tensor. The new storages of the call are numbered from `first`.
    pub(super) fn reference(&self, first: u64) -> TensorRef {
        TensorRef { storage: first + self.storage as u64, view: self.view.clone() }
    }

    fn from_reply(value: &Value, storage: usize) -> Option<Self> {
        let Value::List(pair) = value else { return None };
        let [Value::Tensor(TensorRef { view, .. }), Value::Int(bytes)] = &pair[..] else {
            return None;
        };
        Some(Self { view: view.clone(), bytes: *bytes as u64, storage })
    }
}

impl<'py> FromPyObject<'_, 'py> for NewTensor {
    type Error = PyErr;

    /// Extracts a tuple of dtype, sizes, strides, offset, bytes and storage.
    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (dtype, sizes, strides, offset, bytes, storage) = object.extract()?;
        let view = StorageView { dtype: ScalarType(dtype), sizes, strides, offset };
        Ok(Self { view, bytes, storage })
    }
}

/// Returns the number of cache hits, of cache misses, and of plans in the cache.
#[pyfunction]
pub(crate) fn remote_cache_stats() -> (u64, u64, usize) {
    let stats = plans().stats();
    (stats.hits, stats.misses, stats.entries)
}
