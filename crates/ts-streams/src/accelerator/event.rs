// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events of accelerators.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::api::{Api, RawEvent};
use super::dependencies::Dependencies;
use super::{Deferred, Shared, lock};
use crate::Error;
use crate::device::{Event, Status};
use crate::queue::check_may_block;

/// An [`Event`] of an [`AcceleratorDevice`](crate::AcceleratorDevice). Its times come from the
/// device.
#[derive(Debug)]
pub struct AcceleratorEvent<A: Api> {
    pub(super) handle: Arc<EventHandle<A>>,
}

impl<A: Api> Clone for AcceleratorEvent<A> {
    fn clone(&self) -> Self {
        Self { handle: Arc::clone(&self.handle) }
    }
}

#[derive(Debug)]
pub(super) struct EventHandle<A: Api> {
    pub(super) raw: RawEvent,
    /// The dependencies of the point that was recorded last, or `None` before the first record.
    pub(super) recorded: Mutex<Option<Dependencies>>,
    pub(super) shared: Arc<Shared<A>>,
}

impl<A: Api> Drop for EventHandle<A> {
    fn drop(&mut self) {
        let raw = self.raw.take();
        if check_may_block().is_err() {
            lock(&self.shared.deferred).push(Deferred::Event(raw));
            return;
        }
        // SAFETY: the API created the event, and no other handle to it exists.
        unsafe { self.shared.api.destroy_event(&raw) };
    }
}

impl<A: Api> AcceleratorEvent<A> {
    /// Returns the error of the work before the recorded point, if that work failed.
    ///
    /// The driver's handle is not exposed, because this method would miss records made through
    /// it.
    fn error(&self) -> Result<(), Error> {
        let recorded = lock(&self.handle.recorded);
        let Some(dependencies) = &*recorded else { return Ok(()) };
        // A failure of the same stream after the point does not count.
        let own = dependencies
            .own
            .get()
            .filter(|(at, _)| *at <= dependencies.operations)
            .map(|(_, error)| error);
        let others = Dependencies { own: Arc::default(), ..dependencies.clone() };
        own.or_else(|| others.failure()).map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl<A: Api> Event for AcceleratorEvent<A> {
    fn query(&self) -> Result<Status, Error> {
        if lock(&self.handle.recorded).is_none() {
            return Ok(Status::Ready);
        }
        if !self.handle.shared.api.is_reached(&self.handle.raw)? {
            return Ok(Status::Pending);
        }
        self.error().map(|()| Status::Ready)
    }

    fn synchronize(&self) -> Result<(), Error> {
        check_may_block()?;
        if lock(&self.handle.recorded).is_some() {
            self.handle.shared.api.wait_for_event(&self.handle.raw)?;
        }
        self.error()
    }

    fn elapsed_since(&self, start: &Self) -> Result<Duration, Error> {
        let not_yet = Error::TimedOut { timeout: Duration::ZERO };
        if [self, start].iter().any(|event| lock(&event.handle.recorded).is_none()) {
            return Err(not_yet);
        }
        self.error()?;
        let milliseconds =
            self.handle.shared.api.elapsed_ms(&start.handle.raw, &self.handle.raw)?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.ok_or(not_yet)?.max(0.0)) / 1e3))
    }
}
