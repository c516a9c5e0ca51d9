// SPDX-License-Identifier: MIT OR Apache-2.0
//! Creates the state of an engine: reserves memory, and starts the I/O backend and the workers.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use parking_lot::{Condvar, Mutex};
use ts_io::{Choice, GpuRead, ReadPath, Source};
use ts_pool::{Budget, HostPool};
use ts_streams::{Device, DeviceKind};

use crate::Error;
use crate::config::{Decoding, EngineConfig, Verify};
use crate::context::EngineContext;
use crate::event::Event;
use crate::populate::Populator;
use crate::row_cache::RowCache;
use crate::sizing::{Place, Sizing};
use crate::slot_pool::{DeviceSizes, SlotPool};
use crate::split_decoder::can_decode;
use crate::state::{EngineState, Planning};
use crate::unit::Unit;
use crate::worker::Workers;

use super::Shared;

impl<D: Device> Shared<D> {
    /// Plans, reserves memory, and starts the backend and the workers. `device` is `None` if units
    /// live in host memory. The returned receiver is for [`run`](Self::run).
    pub(crate) fn new(
        device: Option<&D>,
        units: Vec<Unit>,
        sources: Vec<Arc<Source>>,
        config: EngineConfig,
    ) -> Result<(Self, Receiver<Event<D>>), Error> {
        let (choice, gpu_reads) = choose_backend(device, &sources, &config)?;
        let place = device.map_or(Place::Host, |device| Place::Device {
            decodes: config.decoding != Decoding::OnHost
                && config.host_bytes > 0
                && can_decode(device),
        });
        let sizing = Sizing::new(units, &sources, &config, place)?;
        let Sizing {
            units,
            order,
            requests,
            sharing,
            bounce_total,
            workers: worker_count,
            decoder_total,
            row_cache_bytes,
            staging_total,
            tier_total,
            device_decoder_total,
            steps_total,
            slot_budget,
            least_buffer_bytes,
            overhead,
            plan,
        } = sizing;
        let system = |e: ts_pool::Error| Error::System(e.to_string());
        let budget = Budget::new(config.budget_bytes);
        let buffers = if device.is_some() {
            Budget::new(bounce_total + decoder_total + row_cache_bytes)
        } else {
            budget.clone()
        };
        let bounces = (bounce_total > 0)
            .then(|| HostPool::new(&buffers, bounce_total))
            .transpose()
            .map_err(system)?;
        let reserved = buffers.reserve(decoder_total + row_cache_bytes).map_err(system)?;
        let row_cache = RowCache::new(&config.tables, config.budget_bytes, row_cache_bytes);
        let (events, inbox) = channel();
        let slots = match device {
            Some(device) => {
                let sizes = DeviceSizes {
                    bytes: plan.peak_bytes(),
                    decoder_bytes: device_decoder_total,
                    steps_bytes: steps_total,
                    staging_bytes: staging_total,
                    tier_bytes: tier_total,
                };
                SlotPool::on_device(device, &budget, sizes, &events)
            }
            None => SlotPool::on_host(&budget, plan.peak_bytes(), config.watch_writes),
        };
        let slots = slots.map_err(system)?;
        let sink = events.clone();
        let backend = choice.provider.create(
            &config.io,
            Box::new(move |completion| drop(sink.send(Event::Read(completion)))),
        )?;
        let (prefetch, verify) = (config.prefetch, config.verify);
        let checks = verify != Verify::Never && units.iter().any(|unit| !unit.checks.is_empty());
        let encodes = units.iter().any(|unit| unit.pieces.is_some());
        let workers =
            (checks || encodes || bounces.is_some()).then(|| Workers::new(worker_count, &events));
        let workers = workers.transpose()?;
        let timeout = config.io.timeout;
        let context = EngineContext {
            units: units.into_iter().map(Arc::new).collect(),
            sources,
            slots,
            bounces,
            sizes: requests,
            sharing,
            prefetch,
            verify,
            decoding: config.decoding,
            gpu_reads,
            timeout,
            events,
        };
        // Populating shared pages would copy them.
        let populates = device.is_none() && config.shared_pages.is_none();
        let populate = if config.shared_pages.is_some() { 0 } else { config.populate };
        let populator = (populate > 0).then(|| Populator::new(&context.slots.host, populate, 0));
        let populate_in_passes = if populates { config.populate_in_passes } else { 0 };
        let state = EngineState::new(
            &context,
            order,
            &config.together,
            Planning::new(plan, slot_budget),
            &config.routing,
            backend,
            workers,
        );
        let shared = Self {
            context,
            state: Mutex::new(state),
            tables: config.tables,
            changed: Condvar::new(),
            budget,
            row_cache,
            _reserved: reserved,
            choice,
            max_passes: config.max_passes.max(1),
            slot_budget,
            least_buffer_bytes,
            overhead,
            rates: config.rates,
            compute: config.compute,
            worker_count,
            populator: Mutex::new(populator),
            populate_in_passes,
            clock: config.clock,
            process: std::process::id(),
        };
        Ok((shared, inbox))
    }
}

/// Chooses a backend. Also returns the path of reads straight to the device, if units are read so.
fn choose_backend<D: Device>(
    device: Option<&D>,
    sources: &[Arc<Source>],
    config: &EngineConfig,
) -> Result<(Choice, Option<ReadPath>), Error> {
    const GDS: &str = "gds";
    let kind = device.map(|device| device.info().kind);
    let to_device = || match kind {
        Some(DeviceKind::Cuda) => GpuRead::path(),
        _ => Err("only NVIDIA GPUs read files into their own memory".into()),
    };
    let choose = |name| config.registry.choose(name, sources);
    if config.read_to_device && config.backend.is_none() && device.is_some() {
        let direct = match to_device() {
            Ok(ReadPath::GpuDirect) => choose(Some(GDS)).map_err(|error| error.to_string()),
            Ok(_) => Err("GPUDirect Storage is in compatibility mode".into()),
            Err(why) => Err(why),
        };
        return match direct {
            Ok(choice) => Ok((choice, Some(ReadPath::GpuDirect))),
            Err(why) => {
                let mut choice = choose(None)?;
                choice.passed_over.insert(0, (GDS, why));
                Ok((choice, None))
            }
        };
    }
    let mut choice = choose(config.backend.as_deref())?;
    if choice.provider.name() != GDS || device.is_none() {
        return Ok((choice, None));
    }
    match to_device() {
        Ok(path) => Ok((choice, Some(path))),
        Err(why) => {
            choice.passed_over.push(("gds to the device", why));
            Ok((choice, None))
        }
    }
}
