// SPDX-License-Identifier: MIT OR Apache-2.0
//! The interface through which a session runs operators.

use bytes::Bytes;

use crate::reply::OpFailure;
use crate::request::Call;
use crate::value::Value;
use crate::view::TensorRef;
use ts_remote::Sink;

/// Keeps the storages of one session and runs operators on them.
///
/// A [`SessionServer`](crate::SessionServer) has one executor for each session, and calls it from
/// one thread at a time. If a storage does not exist, methods return a failure of kind
/// [`Stale`](crate::OpFailureKind::Stale), unless their documentation says otherwise.
///
/// # Examples
///
/// ```
/// use ts_exec::{
///     Call, Executor, HostExecutor, OpFailure, Output, ScalarType, StorageView, TensorRef, Value,
/// };
///
/// let mut executor = HostExecutor::new();
/// executor.define(0, "aten::fill_.Scalar")?;
/// executor.create(1, 8, 0)?;
///
/// let view = StorageView::contiguous(ScalarType::FLOAT32, vec![2]);
/// let tensor = TensorRef { storage: 1, view };
/// let args = vec![Value::Tensor(tensor.clone()), Value::Float(1.5)];
/// let (kwargs, outputs) = (Vec::new(), vec![Output::Known]);
/// executor.call(&Call { op: 0, args, kwargs, outputs, reply: None })?;
///
/// assert_eq!(executor.read(&tensor)?[..4], 1.5f32.to_le_bytes());
/// # Ok::<(), OpFailure>(())
/// ```
pub trait Executor {
    /// The memory that receives tensors from the client.
    type Sink: Sink + Send;

    /// Runs the requests of a batch, or one step of an upload, by calling `run` once.
    ///
    /// Here, implementations can acquire a resource that every request needs, such as an
    /// interpreter lock.
    fn batch(&mut self, run: &mut dyn FnMut(&mut Self)) {
        run(self);
    }

    /// Assigns the number `op` to the operator `name`. Numbers are assigned in order, from 0.
    ///
    /// # Errors
    /// Returns a failure if the operator does not exist. Calls of `op` then fail with this failure.
    fn define(&mut self, op: u32, name: &str) -> Result<(), OpFailure>;

    /// Creates a storage of `bytes` zeros on a device. It should take no memory until the first
    /// write.
    ///
    /// # Errors
    /// Returns a failure if the storage already exists, or if the device does not exist.
    fn create(&mut self, storage: u64, bytes: u64, device: u32) -> Result<(), OpFailure>;

    /// Changes the length of a storage. The common prefix is kept; new bytes are zero.
    ///
    /// # Errors
    /// Returns a failure if there is not enough memory.
    fn resize(&mut self, storage: u64, bytes: u64) -> Result<(), OpFailure>;

    /// Frees a storage. Does nothing if it does not exist.
    fn free(&mut self, storage: u64);

    /// Writes bytes to a storage, from `offset` on.
    ///
    /// # Errors
    /// Returns a failure if the range exceeds the storage, or if there is not enough memory for the
    /// storage.
    fn write(&mut self, storage: u64, offset: u64, bytes: &[u8]) -> Result<(), OpFailure>;

    /// Returns memory for an upload of `bytes` bytes to a storage, from `offset` on. If possible,
    /// it is the memory of the storage itself.
    ///
    /// # Errors
    /// Returns a failure if the range exceeds the storage, or if there is not enough memory. The
    /// upload is then discarded.
    fn sink(&mut self, storage: u64, offset: u64, bytes: u64) -> Result<Self::Sink, OpFailure>;

    /// Completes an upload: all bytes have arrived in the memory that [`sink`](Self::sink)
    /// returned.
    ///
    /// # Errors
    /// Returns a failure if the bytes cannot be written to the storage.
    fn received(
        &mut self,
        storage: u64,
        offset: u64,
        full: <Self::Sink as Sink>::Full,
    ) -> Result<(), OpFailure>;

    /// Returns the elements of a tensor, in row-major order.
    ///
    /// The bytes may share the memory of the storage. The session changes no storage until the
    /// client has received the bytes, or until the session has copied them.
    ///
    /// # Errors
    /// Returns a failure if the tensor exceeds its storage, or if its dtype is not supported.
    fn read(&mut self, tensor: &TensorRef) -> Result<Bytes, OpFailure>;

    /// Runs an operator, and stores its results as `call.outputs` specifies.
    ///
    /// If `call.reply` is set, returns the results. The result for an
    /// [`Output::Described`](crate::Output::Described) is a list of the [`Value::Tensor`] and the
    /// length of its storage in bytes. Results that are not tensors are returned unchanged.
    ///
    /// # Errors
    /// Returns a failure if the operator fails. The call then creates no output.
    fn call(&mut self, call: &Call) -> Result<Vec<Value>, OpFailure>;

    /// Notes that a call is not run, because one of its arguments is poisoned by `failure`.
    fn skip(&mut self, call: &Call, failure: &OpFailure) {
        let _ = (call, failure);
    }

    /// Returns a tuple for each storage: its number, its length in bytes, the index of its device,
    /// and whether it was ever written to.
    fn storages(&self) -> Vec<(u64, u64, u32, bool)>;

    /// Returns the existing storages that a call would write to.
    fn writes(&self, call: &Call) -> Vec<u64>;

    /// Returns whether every request to change the storage is refused. Such a request does not
    /// poison it.
    fn is_constant(&self, storage: u64) -> bool {
        let _ = storage;
        false
    }
}
