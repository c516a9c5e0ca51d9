// SPDX-License-Identifier: MIT OR Apache-2.0
//! A session with a machine: submits requests, waits for replies, pauses and resumes.

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tensorstream::exec::{Answer, Call, Client, ClientStats, Request, TensorRef, Value, WaitError};
use tensorstream::remote::Error;

use super::call_site::{CallSite, CallSiteKey, trace};
use super::scalar_prefetch::{ScalarPrefetch, ScalarSource};
use super::torch::{Settings, torch};
use crate::errors::{configuration_error, operator_error, wire_error_at};
use crate::memory::Target;

/// The time between two checks for signals, such as Ctrl-C, in a blocked call.
pub(super) const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
/// The time between two checks of [`Session::set_pausing`] for uploads in progress.
const UPLOAD_INTERVAL: Duration = Duration::from_millis(1);
/// The number of requests whose call sites are kept.
const MAX_CALL_SITES: usize = 64 << 10;

static NEXT_ID: AtomicU32 = AtomicU32::new(0);

/// A session with a machine. It outlives its connections: it can be paused and resumed.
pub(super) struct Session {
    /// `None` while the session is paused or closed.
    client: RwLock<Option<Arc<Client<Target>>>>,
    /// The name of the machine, for error messages.
    pub(super) name: String,
    /// The number of the session in this process.
    pub(super) id: u32,
    pub(super) scalars: Mutex<ScalarPrefetch>,
    /// The number of operators that were submitted.
    pub(super) operators: AtomicU64,
    /// The default dtype that the machine uses for the session.
    settings: AtomicU32,
    /// The number of the thread that pauses or resumes the session, or 0. Meanwhile, calls of other
    /// threads fail.
    pausing_thread: AtomicU64,
    /// The number of uploads in progress.
    uploads: AtomicU64,
    /// The summed statistics of earlier clients of the session.
    earlier_stats: Mutex<ClientStats>,
    /// The storages that were freed since the pause began. `None` if the session is not paused.
    freed_while_paused: Mutex<Option<Vec<u64>>>,
    /// The call sites of the latest requests, by the numbers of the requests.
    call_sites: Mutex<VecDeque<(u64, CallSite)>>,
    waits: Mutex<HashMap<CallSiteKey, WaitStats>>,
}

/// The waits at one call site.
struct WaitStats {
    call_site: CallSite,
    count: u64,
    time: Duration,
}

impl Session {
    pub(super) fn new(name: String, client: Client<Target>) -> Self {
        Self {
            client: RwLock::new(Some(Arc::new(client))),
            name,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            scalars: Mutex::default(),
            operators: AtomicU64::new(0),
            settings: AtomicU32::new(Settings::DEFAULT.key()),
            pausing_thread: AtomicU64::new(0),
            uploads: AtomicU64::new(0),
            earlier_stats: Mutex::default(),
            freed_while_paused: Mutex::default(),
            call_sites: Mutex::default(),
            waits: Mutex::default(),
        }
    }

    /// Returns the client, which has the connection to the machine.
    ///
    /// # Errors
    /// ConfigurationError if the session is paused, or if another thread pauses or resumes it.
    pub(super) fn client(&self, py: Python<'_>) -> PyResult<Arc<Client<Target>>> {
        let pausing = self.pausing_thread.load(Ordering::SeqCst);
        if pausing != 0 && pausing != this_thread() {
            let what =
                format!("machine {} is being paused or resumed by another thread", self.name);
            return Err(configuration_error(py, &what));
        }
        let client = self.client.read().clone();
        client.ok_or_else(|| {
            configuration_error(
                py,
                &format!("machine {} is paused: call resume() first", self.name),
            )
        })
    }

    /// Submits a request, and returns its number. If this completes a batch, sends the batch, which
    /// may block.
    pub(super) fn submit(&self, py: Python<'_>, request: &Request) -> PyResult<u64> {
        let client = self.client(py)?;
        let submitted =
            client.submit(request).map_err(|error| self.connection_error(py, &error))?;
        if submitted.batch_full {
            py.detach(|| client.send_batches())
                .map_err(|error| self.connection_error(py, &error))?;
        }
        Ok(submitted.request)
    }

    /// Blocks until a reply arrives, and returns the answer. `what` names the wait in traces.
    ///
    /// # Errors
    /// ConfigurationError as for [`client`](Self::client). Also the exception of a failed request,
    /// of a lost connection, or of a signal handler.
    pub(super) fn wait(&self, py: Python<'_>, reply: u64, what: &str) -> PyResult<Answer<Target>> {
        let (since, client) = (Instant::now(), self.client(py)?);
        let answer = loop {
            let answer = py.detach(|| client.wait(reply, SIGNAL_INTERVAL));
            if let Some(answer) = answer.map_err(|error| self.wait_error(py, &error))? {
                break answer;
            }
            py.check_signals().inspect_err(|_| client.discard_reply(reply))?;
        };
        let time = since.elapsed();
        if let Some(call_site) = CallSite::current(py, torch(py)?) {
            trace(py, what, &call_site, Some(time));
            let mut waits = self.waits.lock();
            let stats = waits.entry(call_site.key()).or_insert_with(|| WaitStats {
                call_site,
                count: 0,
                time: Duration::ZERO,
            });
            stats.count += 1;
            stats.time += time;
        }
        Ok(answer)
    }

    /// Blocks until the machine has run all requests.
    pub(super) fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let reply = self.client(py)?.new_reply();
        self.submit(py, &Request::Sync { reply })?;
        self.wait(py, reply, "synchronize").map(drop)
    }

    /// Sends the requests of an incomplete batch.
    pub(super) fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let client = self.client(py)?;
        py.detach(|| client.flush()).map_err(|error| self.connection_error(py, &error))
    }

    /// Returns whether the session has ended, for example because the connection was lost. Returns
    /// false for a paused session.
    pub(super) fn is_over(&self) -> bool {
        let client = self.client.read();
        client.as_ref().is_some_and(|client| client.has_ended())
    }

    /// Returns whether the connection was lost, and is being replaced.
    pub(super) fn is_reconnecting(&self) -> bool {
        let client = self.client.read();
        client.as_ref().is_some_and(|client| client.is_reconnecting())
    }

    /// Ends the session because the server has ended. Later calls, and those that wait, raise
    /// ConnectionLost with this reason. Does nothing if the session is paused or has ended.
    pub(super) fn abandon(&self, py: Python<'_>, reason: &str) {
        let client = self.client.read().clone();
        if let Some(client) = client {
            py.detach(|| client.abandon(reason));
        }
    }

    /// Sends PyTorch's settings to the machine, if the machine uses others.
    pub(super) fn send_settings(&self, py: Python<'_>, settings: Settings) -> PyResult<()> {
        if self.settings.load(Ordering::Relaxed) == settings.key() {
            return Ok(());
        }
        let op = self
            .client(py)?
            .operator_id("tensorstream::settings")
            .map_err(|error| self.connection_error(py, &error))?;
        let args = settings.arguments();
        let call = Call { op, args, kwargs: Vec::new(), outputs: Vec::new(), reply: None };
        self.submit(py, &Request::Call(call))?;
        // Stored last, because other threads skip the request once they see the new settings.
        self.settings.store(settings.key(), Ordering::Relaxed);
        Ok(())
    }

    /// Frees a storage, and drops its scalar. During a pause, only records the storage instead of
    /// freeing it.
    pub(super) fn free(&self, storage: u64) {
        let unwanted = self.scalars.lock().remove(storage);
        if let Some(freed) = &mut *self.freed_while_paused.lock() {
            freed.push(storage);
            return;
        }
        if let Some(client) = &*self.client.read() {
            unwanted.into_iter().for_each(|reply| client.discard_reply(reply));
            client.free(storage);
        }
    }

    /// Drops the cached scalars of storages. Call this after a request that writes to the storages
    /// was submitted.
    pub(super) fn invalidate_scalars(&self, storages: impl Iterator<Item = u64>) {
        for storage in storages {
            let unwanted = self.scalars.lock().invalidate(storage);
            if let (Some(reply), Some(client)) = (unwanted, &*self.client.read()) {
                client.discard_reply(reply);
            }
        }
    }

    /// Records the source of a tensor of one element. Prefetches the element if the program has
    /// read an earlier element of this source.
    pub(super) fn prefetch_scalar(
        &self,
        py: Python<'_>,
        tensor: &TensorRef,
        source: ScalarSource,
    ) -> PyResult<()> {
        if self.scalars.lock().record(tensor.storage, source) {
            let reply = self.client(py)?.new_reply();
            self.scalars.lock().announce(tensor.storage, tensor.view.clone(), reply);
            self.submit(py, &Request::Read { reply, tensor: tensor.clone() })?;
        }
        Ok(())
    }

    /// Records the current call site as that of a request. `what` names the request in traces.
    /// Returns the key of the call site, or `None` if no frame belongs to the program.
    pub(super) fn record_call_site(
        &self,
        py: Python<'_>,
        request: u64,
        what: &str,
    ) -> PyResult<Option<CallSiteKey>> {
        let Some(call_site) = CallSite::current(py, torch(py)?) else { return Ok(None) };
        trace(py, what, &call_site, None);
        let key = call_site.key();
        let mut call_sites = self.call_sites.lock();
        let oldest = if call_sites.len() >= MAX_CALL_SITES { call_sites.pop_front() } else { None };
        call_sites.push_back((request, call_site));
        drop(call_sites);
        // The lock is released first, because dropping a code object can run Python destructors.
        drop(oldest);
        Ok(Some(key))
    }

    /// Returns the file, line and function that submitted a request, if they are known.
    fn location_of(&self, py: Python<'_>, request: u64) -> Option<String> {
        let call_sites = self.call_sites.lock();
        // With several threads, the call sites are not always in the order of the requests.
        let call_site =
            call_sites.iter().rev().find(|(number, _)| *number == request)?.1.clone_ref(py);
        drop(call_sites);
        Some(call_site.location(py))
    }

    /// Converts an error of the connection to a Python exception.
    pub(super) fn connection_error(&self, py: Python<'_>, error: &Error) -> PyErr {
        wire_error_at(py, error, &format!("machine {}: ", self.name))
    }

    /// Converts a failed request, or an error of the connection, to a Python exception.
    pub(super) fn wait_error(&self, py: Python<'_>, error: &WaitError) -> PyErr {
        match error {
            WaitError::Ended(error) => self.connection_error(py, error),
            WaitError::Failed { request, failure, others } => {
                let called_at = self
                    .location_of(py, *request)
                    .map_or_else(String::new, |location| format!("\n  called at {location}"));
                let more = match others {
                    0 => String::new(),
                    1 => "\n(another operator failed after it)".into(),
                    _ => format!("\n({others} more operators failed after it)"),
                };
                let text = format!("machine {}: {}{called_at}{more}", self.name, failure.message);
                operator_error(py, failure.kind, &text)
            }
        }
    }

    /// Creates the exception for a reply that is not of the requested kind.
    pub(super) fn unexpected_reply(&self, expected: &str, got: &Answer<Target>) -> PyErr {
        let got = match got {
            Answer::Values(values) => format!("{} values", values.len()),
            Answer::Bytes(bytes) => format!("{} bytes", bytes.len()),
            _ => "a tensor".into(),
        };
        PyRuntimeError::new_err(format!(
            "machine {}: unexpected reply (protocol error): expected {expected}, got {got}",
            self.name
        ))
    }

    /// Returns the summed statistics of all clients of the session.
    pub(super) fn stats(&self, py: Python<'_>) -> ClientStats {
        let client = self.client.read().clone();
        let now = py.detach(|| client.map(|client| client.stats())).unwrap_or_default();
        *self.earlier_stats.lock() + now
    }

    /// Returns the lines of the program that have waited, how often, and for how many seconds in
    /// all. The longest time is first.
    pub(super) fn waits(&self, py: Python<'_>) -> Vec<(String, u64, f64)> {
        let waits: Vec<_> = {
            let waits = self.waits.lock();
            let copy = |of: &WaitStats| (of.call_site.clone_ref(py), of.count, of.time);
            waits.values().map(copy).collect()
        };
        // Done without the lock, because `location` runs Python code.
        let mut waits: Vec<_> = waits
            .into_iter()
            .map(|(call_site, count, time)| (call_site.location(py), count, time.as_secs_f64()))
            .collect();
        waits.sort_by(|one, other| other.2.total_cmp(&one.2));
        waits
    }

    /// Returns the number, the size in bytes, the device and the state of each storage of this
    /// session. Blocks.
    ///
    /// The state is 0 if the storage was never written to, 1 if it was, and 2 if a request that
    /// should have written to it failed.
    pub(super) fn storages(&self, py: Python<'_>) -> PyResult<Vec<(u64, u64, u32, u8)>> {
        let reply = self.client(py)?.new_reply();
        self.submit(py, &Request::List { reply })?;
        let values = match self.wait(py, reply, "pause")? {
            Answer::Values(values) => values,
            other => return Err(self.unexpected_reply("a list of storages", &other)),
        };
        let number =
            |value: &Value| if let Value::Int(number) = value { *number as u64 } else { 0 };
        let storages = values.as_chunks::<4>().0.iter().map(|of| of.each_ref().map(number));
        Ok(storages
            .map(|[storage, bytes, device, state]| (storage, bytes, device as u32, state as u8))
            .collect())
    }

    /// Counts an upload as in progress until the guard is dropped.
    pub(super) fn begin_upload(&self) -> UploadGuard<'_> {
        self.uploads.fetch_add(1, Ordering::SeqCst);
        UploadGuard(&self.uploads)
    }

    /// Begins or ends a pause or a resumption on this thread. In between, calls of other threads
    /// fail.
    ///
    /// The beginning blocks until the uploads in progress are done. From then on, storages are not
    /// freed but recorded. An end with `end_freed` frees the recorded storages, and records no
    /// more.
    pub(super) fn set_pausing(&self, py: Python<'_>, begins: bool, end_freed: bool) {
        self.pausing_thread.store(if begins { this_thread() } else { 0 }, Ordering::SeqCst);
        // A pause must save a storage either with all bytes of an upload or with none of them.
        py.detach(|| {
            while begins && self.uploads.load(Ordering::SeqCst) > 0 {
                thread::sleep(UPLOAD_INTERVAL);
            }
        });
        let freed = {
            let mut freed = self.freed_while_paused.lock();
            if begins {
                freed.get_or_insert_default();
            }
            if end_freed { freed.take().unwrap_or_default() } else { Vec::new() }
        };
        freed.into_iter().for_each(|storage| self.free(storage));
    }

    /// Returns whether a storage was freed since the pause began.
    pub(super) fn was_freed(&self, storage: u64) -> bool {
        let freed = self.freed_while_paused.lock();
        freed.as_ref().is_some_and(|freed| freed.contains(&storage))
    }

    /// Ends the session on the machine. Returns the failure that no wait has reported, if there is
    /// one. Does nothing if the session is paused or closed. Blocks.
    pub(super) fn close(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        let client = self.client.write().take();
        let Some(client) = client else { return Ok(None) };
        self.scalars.lock().clear();
        self.settings.store(Settings::DEFAULT.key(), Ordering::Relaxed);
        let (closed, stats, failed) =
            py.detach(|| (client.close(), client.stats(), client.take_failure()));
        let failed = failed.map(|error| self.wait_error(py, &error));
        // The next client numbers its requests from 1 again.
        let call_sites = mem::take(&mut *self.call_sites.lock());
        drop(call_sites);
        let mut earlier = self.earlier_stats.lock();
        *earlier = *earlier + stats;
        closed.map(|()| failed).map_err(|error| self.connection_error(py, &error))
    }

    /// Continues the session with another client.
    pub(super) fn resume(&self, client: Client<Target>) {
        *self.client.write() = Some(Arc::new(client));
    }
}

/// A guard for an upload: the upload counts as in progress until the guard is dropped.
pub(super) struct UploadGuard<'a>(&'a AtomicU64);

impl Drop for UploadGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns the number of this thread, which is never 0.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
}
