// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the bytes of a unit are on the host while it is loaded.

use ts_pool::{Buffer, SharedBuffer};

use crate::gpu_reads::StoredRead;
use crate::split_decoder::DecodableImage;

/// Where the bytes of a unit are on the host while it is loaded.
#[derive(Debug)]
pub(crate) enum HostBytes {
    /// They are read into this memory: the slot, or staging memory.
    Empty(Buffer),
    /// They are read into this memory, and stay there for later loads.
    EmptyToKeep(Buffer),
    /// They are there from an earlier load, and are copied to the device.
    Kept(SharedBuffer),
    /// They are there from an earlier load, encoded, and are decoded on the device.
    Encoded(SharedBuffer, DecodableImage),
    /// Nowhere: they are read straight to the device.
    Stored(Vec<StoredRead>),
}
