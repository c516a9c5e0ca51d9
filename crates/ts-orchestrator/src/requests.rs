// SPDX-License-Identifier: MIT OR Apache-2.0
//! Splits the reads of a layout into requests for the backend.

use crate::layout::{ReadKind, SlotRead};

/// The sizes of requests to the backend, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestSizes {
    /// The largest read in place, a multiple of `alignment`.
    pub(crate) request_bytes: usize,
    /// The size of a bounce buffer, a multiple of `alignment`; 0 if all reads are in place.
    pub(crate) bounce_bytes: usize,
    /// The alignment of direct reads.
    pub(crate) alignment: usize,
}

/// Splits a read of a layout into requests for the backend.
pub(crate) fn requests(
    read: &SlotRead,
    sizes: RequestSizes,
) -> impl Iterator<Item = SlotRead> + '_ {
    // Long reads are split at aligned offsets of the file, so that no bytes are read twice.
    let lead = (read.file_offset % sizes.alignment as u64) as usize;
    let total = lead + read.len;
    let step = match read.kind {
        ReadKind::InPlace => sizes.request_bytes,
        ReadKind::Copied => {
            total.div_ceil(total.div_ceil(sizes.bounce_bytes)).next_multiple_of(sizes.alignment)
        }
        // A chunk is read as a whole.
        ReadKind::Decoded { .. } => total,
    };
    (0..total).step_by(step).map(move |at| {
        let (begin, end) = (at.saturating_sub(lead), (at + step - lead).min(read.len));
        SlotRead {
            file_offset: read.file_offset + begin as u64,
            slot_offset: read.slot_offset + begin,
            len: end - begin,
            required: match read.kind {
                ReadKind::Decoded { .. } => read.required,
                _ => end.min(read.required).saturating_sub(begin),
            },
            ..*read
        }
    })
}

/// Splits a read of a layout, of at least one byte, into requests that all go through bounce
/// buffers, for units that are also kept as they are on storage.
pub(crate) fn copied_requests(
    read: &SlotRead,
    sizes: RequestSizes,
) -> impl Iterator<Item = SlotRead> {
    let read = match read.kind {
        // The rest of a read in place has no meaning.
        ReadKind::InPlace => SlotRead { len: read.required, kind: ReadKind::Copied, ..*read },
        _ => *read,
    };
    requests(&read, sizes).collect::<Vec<_>>().into_iter()
}
