// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies of units to their device.

use std::sync::Arc;

use ts_pool::Buffer;
use ts_streams::Device;

use crate::Error;
use crate::context::EngineContext;
use crate::event::{CopyResult, UploadError, UploadResult};
use crate::host_bytes::HostBytes;
use crate::kept_image::KeptImage;
use crate::slot_pool::Slot;
use crate::upload::Upload;

use super::EngineState;

/// The least copy to a device whose rate says something, in bytes.
const MEASURED_COPY_BYTES: u64 = 1 << 20;

impl<D: Device> EngineState<D> {
    /// Copies a unit to its device if it lives there, else finishes its load. `host` is `None` if
    /// the load has lost the memory that it read to, after a timeout or a panic.
    pub(super) fn upload_or_finish(
        &mut self,
        context: &EngineContext<D>,
        load_id: u32,
        host: Option<Buffer>,
        now_ns: u64,
    ) {
        let load = self.transfers.loads.get_mut(load_id);
        match host {
            Some(host) if load.device.is_some() && load.error.is_none() && !load.cancelled => {
                let keeps = load.keeps_host;
                let host =
                    if keeps { HostBytes::EmptyToKeep(host) } else { HostBytes::Empty(host) };
                self.upload(context, load_id, host);
            }
            host => {
                let slot = match load.device.take() {
                    Some(slot) => Some(Slot::Device(slot, None)),
                    None => host.map(Slot::Host),
                };
                self.finish(context, load_id, slot, now_ns);
            }
        }
    }

    /// Starts to copy a unit to its device.
    pub(super) fn upload(&mut self, context: &EngineContext<D>, load_id: u32, host: HostBytes) {
        let load = self.transfers.loads.get_mut(load_id);
        let unit = load.id.expect("gathered rows are in host memory");
        let slot = load.device.take().expect("a unit on a device has a slot there");
        let layout = load.prepared.image.as_ref().filter(|_| context.slots.decodes_on_device());
        let image = layout.and_then(|layout| Some((load.image.take()?, Arc::clone(layout))));
        self.transfers.loads.begin_copy();
        context.slots.upload(Upload { load: load_id, unit, host, image, slot });
    }

    /// Handles the submission of a copy to the device. The unit can be used from now on, by streams
    /// that wait for the copy.
    pub(crate) fn on_uploaded(
        &mut self,
        context: &EngineContext<D>,
        upload: UploadResult<D>,
        now_ns: u64,
    ) {
        let UploadResult { load: load_id, slot, kept, image, decodes, read, result } = upload;
        if read.is_some() || result.is_err() {
            self.transfers.loads.end_copy();
        }
        self.counters.busy_ns += read.map_or(0, |(_, took)| took.as_nanos() as u64);
        let load = self.transfers.loads.get_mut(load_id);
        let kept = kept.zip(load.prepared.image.clone());
        load.kept = image.or_else(|| kept.map(|(bytes, layout)| KeptImage::new(bytes, layout)));
        let copied = match result {
            Ok(copied) => Some(copied),
            Err(UploadError::Device(error)) => {
                self.counters.device_decoded.has_failed |= decodes;
                load.error = Some(Error::device(&load.name(), error));
                None
            }
            Err(UploadError::Read(at, error)) => {
                load.fail_at(at, error);
                None
            }
        };
        if let (Some((bytes, _)), Some(path)) = (read, context.gpu_reads) {
            load.count(path, bytes as usize);
        }
        self.finish(context, load_id, Some(Slot::Device(slot, copied)), now_ns);
    }

    /// Handles the end of a copy to the device. If it failed, the unit is loaded again for its next
    /// use. Streams that have waited for the copy have failed.
    pub(crate) fn on_copied(&mut self, context: &EngineContext<D>, copy: CopyResult) {
        let CopyResult { unit, decoded, result } = copy;
        self.transfers.loads.end_copy();
        match result {
            Ok((_, took)) if decoded => {
                let bytes = context.units[unit.index()].layout.len as u64;
                self.counters.copy_ns += took.as_nanos() as u64;
                self.counters.device_decoded.add(bytes, took);
            }
            Ok((bytes, took)) => {
                self.counters.copy_ns += took.as_nanos() as u64;
                if bytes >= MEASURED_COPY_BYTES && !took.is_zero() {
                    let rate = bytes as f64 / took.as_secs_f64();
                    self.counters.copy_bytes_per_s = self.counters.copy_bytes_per_s.max(rate);
                }
            }
            Err(_) => {
                self.counters.device_decoded.has_failed |= decoded;
                self.discard(context, unit);
            }
        }
    }
}
