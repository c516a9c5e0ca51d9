// SPDX-License-Identifier: MIT OR Apache-2.0
//! Units that are kept in memory compressed, or on the host for a device: their bytes as they are
//! on storage, or as they were encoded.

use std::sync::Arc;

use ts_pool::SharedBuffer;

use crate::image::ImageLayout;
use crate::split_decoder::DecodableImage;

/// A unit in memory, as it is on storage or encoded.
#[derive(Debug, Clone)]
pub(crate) struct KeptImage {
    pub(crate) bytes: SharedBuffer,
    pub(crate) layout: Arc<ImageLayout>,
    /// What the device needs to decode it, if it can.
    pub(crate) decodable: Option<DecodableImage>,
}

impl KeptImage {
    /// Returns an image that the host decodes.
    pub(crate) fn new(bytes: SharedBuffer, layout: Arc<ImageLayout>) -> Self {
        Self { bytes, layout, decodable: None }
    }
}
