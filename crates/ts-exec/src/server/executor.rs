// SPDX-License-Identifier: MIT OR Apache-2.0
//! The interface between a session and what runs its operators.

use bytes::Bytes;

use crate::reply::OpFailure;
use crate::request::Call;
use crate::value::Value;
use crate::view::TensorRef;
use ts_remote::Sink;

/// Keeps the storages of one session and runs operators on them.
///
/// A [`SessionServer`](crate::SessionServer) has one executor for each session, and calls it from
/// one thread at a time. A method that names a storage that does not exist returns a failure of
/// kind [`Stale`](crate::OpFailureKind::Stale), unless it says otherwise.
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
    /// The memory that tensors from the client are received to.
    type Sink: Sink + Send;

    /// Calls `run` once, which runs the requests of a batch.
    ///
    /// Implementations acquire what every request needs here, such as an interpreter lock.
    fn batch(&mut self, run: &mut dyn FnMut(&mut Self)) {
        run(self);
    }

    /// Assigns the number `op` to the operator `name`. Numbers are assigned in order, from 0.
    ///
    /// # Errors
    /// Returns a failure if the operator does not exist. Its calls then fail with this failure.
    fn define(&mut self, op: u32, name: &str) -> Result<(), OpFailure>;

    /// Creates a storage of `bytes` zeros on a device. It should take no memory until the first
    /// write.
    ///
    /// # Errors
    /// Returns a failure if the storage exists, or if the device does not.
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
    /// Returns a failure if the range exceeds the storage.
    fn write(&mut self, storage: u64, offset: u64, bytes: &[u8]) -> Result<(), OpFailure>;

    /// Returns memory for an upload of `bytes` bytes to a storage, from `offset` on. If possible,
    /// it is the memory of the storage itself.
    ///
    /// # Errors
    /// Returns a failure if the range exceeds the storage.
    fn sink(&mut self, storage: u64, offset: u64, bytes: u64) -> Result<Self::Sink, OpFailure>;

    /// Completes an upload: all bytes have arrived in the memory that [`sink`](Self::sink)
    /// returned.
    ///
    /// # Errors
    /// Returns a failure if they cannot be written to the storage.
    fn received(
        &mut self,
        storage: u64,
        offset: u64,
        full: <Self::Sink as Sink>::Full,
    ) -> Result<(), OpFailure>;

    /// Returns the elements of a tensor, in row-major order.
    ///
    /// They may share the memory of the storage: the session changes no storage until the client
    /// has them, or until the session has copied them.
    ///
    /// # Errors
    /// Returns a failure if the tensor exceeds its storage.
    fn read(&mut self, tensor: &TensorRef) -> Result<Bytes, OpFailure>;

    /// Runs an operator, and stores its results as `call.outputs` says.
    ///
    /// If `call.reply` is set, returns the results: for a tensor, a list of the [`Value::Tensor`]
    /// and the length of its storage, and other values as they are.
    ///
    /// # Errors
    /// Returns a failure if the operator fails. No output exists then.
    fn call(&mut self, call: &Call) -> Result<Vec<Value>, OpFailure>;

    /// Lists the storages: number, length in bytes, device, and whether it was ever written to.
    fn storages(&self) -> Vec<(u64, u64, u32, bool)>;

    /// Returns the existing storages that a call would write to.
    fn writes(&self, call: &Call) -> Vec<u64>;
}
