// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who does what is asked.

use bytes::Bytes;

use crate::{Call, OpFailure, TensorRef, Value};
use ts_remote::Sink;

/// Storages, and operators on them. A [`SessionServer`](super::SessionServer) has one for each client.
///
/// No method may be called with a storage that is not there without a
/// [`Stale`](super::OpFailureKind::Stale) failure.
pub trait Executor {
    /// Where long payloads are received to.
    type Sink: Sink + Send;

    /// Runs what is to be done of a batch, all of it in `run`: what is needed for every request is
    /// taken once.
    fn batch(&mut self, run: &mut dyn FnMut(&mut Self)) {
        run(self);
    }

    /// `op` means the operator of this name from now on. Numbers are given in their order.
    ///
    /// # Errors
    /// What is wrong with it; that is what each call of it fails with.
    fn define(&mut self, op: u32, name: &str) -> Result<(), OpFailure>;

    /// A storage of so many bytes begins, which takes no memory before something is written to it,
    /// and is zero.
    ///
    /// # Errors
    /// There is such a storage, or no such device.
    fn create(&mut self, storage: u64, bytes: u64, device: u32) -> Result<(), OpFailure>;

    /// A storage has another length; what fits of its bytes stays, new ones are zero.
    ///
    /// # Errors
    /// There is no memory for it.
    fn resize(&mut self, storage: u64, bytes: u64) -> Result<(), OpFailure>;

    /// Nobody asks for a storage any more. Nothing happens if it is not there.
    fn free(&mut self, storage: u64);

    /// Writes a few bytes.
    ///
    /// # Errors
    /// They are not within the storage.
    fn write(&mut self, storage: u64, offset: u64, bytes: &[u8]) -> Result<(), OpFailure>;

    /// Memory for many bytes, which come next: the storage's own, where that can be.
    ///
    /// # Errors
    /// They are not within the storage.
    fn sink(&mut self, storage: u64, offset: u64, bytes: u64) -> Result<Self::Sink, OpFailure>;

    /// They are all in what [`sink`](Self::sink) gave.
    ///
    /// # Errors
    /// What went wrong with them.
    fn received(
        &mut self,
        storage: u64,
        offset: u64,
        full: <Self::Sink as Sink>::Full,
    ) -> Result<(), OpFailure>;

    /// The elements of a tensor, in order, as they are now. They may be in the storage's own
    /// memory: nothing is written to it before the client has them, or what is left of a link has.
    ///
    /// # Errors
    /// The tensor is not within its storage.
    fn read(&mut self, tensor: &TensorRef) -> Result<Bytes, OpFailure>;

    /// Runs an operator. What it gives goes where the call's outputs say; if it has a `reply`, what
    /// it gives is told: numbers as they are, tensors as a list of the [`Value::Tensor`] and its
    /// storage's length.
    ///
    /// # Errors
    /// What went wrong. Nothing that it would have given is there then.
    fn call(&mut self, call: &Call) -> Result<Vec<Value>, OpFailure>;

    /// The storages there are: of each its number, bytes, device, and whether something was written
    /// to it.
    fn storages(&self) -> Vec<(u64, u64, u32, bool)>;

    /// The storages to which an operator would write, beside new ones.
    fn writes(&self, call: &Call) -> Vec<u64>;
}

impl Call {
    /// Each tensor that is an argument, also within lists.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorRef> {
        let values = self.args.iter().chain(self.kwargs.iter().map(|(_, value)| value));
        let mut rest: Vec<std::slice::Iter<'_, Value>> = Vec::new();
        let mut values = values.collect::<Vec<_>>().into_iter();
        std::iter::from_fn(move || {
            loop {
                let value = match rest.last_mut() {
                    Some(inner) => match inner.next() {
                        Some(value) => value,
                        None => {
                            rest.pop();
                            continue;
                        }
                    },
                    None => values.next()?,
                };
                match value {
                    Value::Tensor(tensor) | Value::Conjugate(tensor) => return Some(tensor),
                    Value::List(values) => rest.push(values.iter()),
                    _ => {}
                }
            }
        })
    }
}
