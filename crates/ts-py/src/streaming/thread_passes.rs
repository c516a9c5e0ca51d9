// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which passes run on this thread.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tensorstream::orchestrator::PassId;

thread_local! {
    /// The most recent pass of this thread in each streamer. The key is the address of what the
    /// streamer shares.
    pub(super) static PASSES: RefCell<HashMap<usize, ThreadPass>> = RefCell::default();
}

/// A pass of a thread.
pub(super) struct ThreadPass {
    /// The pass, for leases. `None` if leases were kept when it began: then the engine would see
    /// only some of the units that the pass visits, and learn a wrong order.
    pub(super) visits: Option<PassId>,
    pub(super) ended: Arc<AtomicBool>,
}

/// Forgets the passes of this thread, which do not exist in a forked child.
pub(super) fn forget_passes() {
    PASSES.with_borrow_mut(HashMap::clear);
}
