// SPDX-License-Identifier: MIT OR Apache-2.0
//! A stream that cudarc created.

use std::sync::Arc;

use cudarc::driver::{CudaStream, sys};

/// A stream of cudarc, which destroys it after the last use. Must not be dropped where no call to
/// the driver is allowed.
#[derive(Debug)]
pub(super) struct SharedStream(Option<Arc<CudaStream>>);

impl SharedStream {
    pub(super) fn new(stream: Arc<CudaStream>) -> Self {
        Self(Some(stream))
    }
}

impl Drop for SharedStream {
    fn drop(&mut self) {
        let Some(stream) = self.0.take() else { return };
        let mut popped = std::ptr::null_mut();
        // cudarc replaces the current context, which is that of PyTorch's current device.
        // SAFETY: the stream keeps its context.
        let pushed = unsafe { sys::cuCtxPushCurrent_v2(stream.context().cu_ctx()) };
        drop(stream);
        if pushed == sys::CUresult::CUDA_SUCCESS {
            // SAFETY: the context was pushed above, and `popped` is valid for writes.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}
