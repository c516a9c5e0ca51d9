// SPDX-License-Identifier: MIT OR Apache-2.0
//! A session of a server.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;

use super::batch::{BatchRunner, MAX_UNSENT, Poisoned, SharedChannel, protocol_error};
use super::executor::Executor;
use super::upload::{PendingUpload, UploadSink};
use crate::channel::{Backlog, Channel, Hello, Incoming, link_lost};
use crate::reply::{OpFailure, OpFailureKind, Reply};
use crate::request::Requests;
use ts_remote::{Error, Link, Sink, TensorInfo};

/// How often a wait checks whether it must end.
pub(super) const SLICE: Duration = Duration::from_millis(100);
/// How often the connection is driven while operators run.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_millis(500);
/// The limit for the items that a client has not acknowledged, and for the items in the backlog. A
/// [`Client`](crate::Client) sends an acknowledgement when it has received 16 items or 256 KiB.
const MAX_UNACKED: Backlog = Backlog { bytes: 256 << 20, items: 1 << 16 };
/// The maximum size in bytes of the buffer that receives a refused upload.
const SCRATCH: usize = 64 << 10;

/// The state of a session that other threads see while it is served.
#[derive(Default)]
pub(super) struct ServingStatus {
    /// Whether the client has connected again, so that the thread must drop this link.
    pub(super) superseded: AtomicBool,
    /// The time at which the keep-alive thread found that the link is lost.
    pub(super) lost_since: Mutex<Option<Instant>>,
}

/// A session. It outlives the links that it is served on.
pub(super) struct Session<E: Executor> {
    executor: E,
    channel: Channel<UploadSink<E::Sink>>,
    /// How many requests have run.
    requests: u64,
    /// For each defined operator, the failure of its calls; `None` if it can be called.
    op_failures: Vec<Option<OpFailure>>,
    poisoned: Poisoned,
    /// The upload whose tensor is the next item of the stream.
    upload: Option<PendingUpload>,
    /// The requests of the current batch that have not run yet.
    batch: Bytes,
    /// The items that arrived after the current batch.
    backlog: VecDeque<Incoming<UploadSink<E::Sink>>>,
    /// Whether an unacknowledged reply may share the memory of a storage. No request runs until the
    /// client has acknowledged the reply, or the session has copied its bytes.
    awaits_ack: bool,
}

impl<E: Executor + Send> Session<E> {
    pub(super) fn new(executor: E) -> Self {
        Self {
            executor,
            channel: Channel::new(),
            requests: 0,
            op_failures: Vec::new(),
            poisoned: Poisoned::new(),
            upload: None,
            batch: Bytes::new(),
            backlog: VecDeque::new(),
            awaits_ack: false,
        }
    }

    /// Removes the link, if there is one.
    pub(super) fn detach(&mut self) -> Option<Link<UploadSink<E::Sink>>> {
        self.channel.detach()
    }

    /// Completes the handshake on a new link, and serves the session until the client ends it, the
    /// link is lost, or `stop` is set. Blocks.
    pub(super) fn serve(
        &mut self,
        mut link: Link<UploadSink<E::Sink>>,
        peer: Hello,
        status: &ServingStatus,
        stop: &AtomicBool,
        idle_timeout: Option<Duration>,
    ) -> Result<(), Error> {
        let stream = link.connection().open_stream()?;
        let hello = Hello { session: peer.session, received: self.channel.received() };
        hello.send(&mut link, stream)?;
        self.channel.attach(link, stream, peer.received)?;
        let channel = Mutex::new(std::mem::replace(&mut self.channel, Channel::new()));
        let ended = AtomicBool::new(false);
        let result = thread::scope(|scope| {
            // Answers pings and sends replies while operators run.
            let keep_alive =
                thread::Builder::new().name("tensorstream-keep".into()).spawn_scoped(scope, || {
                    while !ended.load(Ordering::Relaxed) {
                        thread::park_timeout(KEEP_ALIVE_INTERVAL);
                        // The serving thread gets this error too, at its next use of the link.
                        if let Some(mut channel) = channel.try_lock()
                            && channel.drive().is_err()
                        {
                            status.lost_since.lock().get_or_insert_with(Instant::now);
                        }
                    }
                });
            let result = match &keep_alive {
                Ok(_) => self.run(&channel, &status.superseded, stop, idle_timeout),
                Err(error) => {
                    Err(Error::Misuse(format!("cannot start the keep-alive thread: {error}")))
                }
            };
            ended.store(true, Ordering::Relaxed);
            keep_alive.iter().for_each(|keep_alive| keep_alive.thread().unpark());
            result
        });
        self.channel = channel.into_inner();
        result
    }

    fn run(
        &mut self,
        channel: &SharedChannel<E>,
        superseded: &AtomicBool,
        stop: &AtomicBool,
        idle_timeout: Option<Duration>,
    ) -> Result<(), Error> {
        let mut idle_since = Instant::now();
        loop {
            if !self.batch.is_empty() {
                self.run_requests(channel)?;
                idle_since = Instant::now();
            }
            let item = if self.awaits_ack {
                self.wait_for_ack(channel)?;
                None
            } else {
                match self.backlog.pop_front() {
                    Some(item) => Some(item),
                    None => channel.lock().next_within(SLICE)?,
                }
            };
            if item.is_some() || self.awaits_ack || self.upload.is_some() {
                idle_since = Instant::now();
            }
            match item {
                Some(Incoming::Message(batch)) => self.batch = batch,
                Some(Incoming::Announced(info)) => {
                    let sink = self.upload_sink(&info, channel)?;
                    channel.lock().accept(sink)?;
                }
                Some(Incoming::Tensor(_, sink)) => self.finish_upload(sink, channel)?,
                Some(Incoming::Finished) => {
                    // The session has ended, even if the client does not receive the confirmation.
                    let _ = channel.lock().finish();
                    return Ok(());
                }
                None if superseded.load(Ordering::Relaxed) => return Err(link_lost()),
                None if stop.load(Ordering::Relaxed) => {
                    close::<E>(channel, "the server was stopped");
                    return Ok(());
                }
                None if idle_timeout.is_some_and(|limit| idle_since.elapsed() >= limit) => {
                    let limit = idle_timeout.unwrap_or_default().as_secs_f64();
                    close::<E>(
                        channel,
                        &format!("the session has sent nothing for {limit} seconds"),
                    );
                    return Ok(());
                }
                None => channel.lock().send_ack()?,
            }
        }
    }

    /// Runs the requests of the current batch in order. Stops early after a reply that the client
    /// must acknowledge first.
    fn run_requests(&mut self, channel: &SharedChannel<E>) -> Result<(), Error> {
        let mut replied = false;
        while !self.batch.is_empty() && !self.awaits_ack {
            let batch = self.batch.clone();
            let mut requests = Requests::new(&batch, 0);
            let mut result = Ok(());
            let Self {
                executor, requests: count, op_failures, poisoned, upload, awaits_ack, ..
            } = self;
            executor.batch(&mut |executor| {
                let mut runner = BatchRunner {
                    executor,
                    channel,
                    op_failures,
                    poisoned,
                    upload,
                    awaits_ack,
                    replied,
                    number: 0,
                };
                let mut pause = false;
                while !pause && let Some(request) = requests.next() {
                    *count += 1;
                    runner.number = *count;
                    match request.and_then(|request| runner.run(request)) {
                        Ok(must_send) => pause = must_send,
                        Err(error) => {
                            result = Err(error);
                            break;
                        }
                    }
                }
                replied = runner.replied;
            });
            self.batch = batch.slice(batch.len() - requests.remaining_bytes()..);
            result?;
            // If too many replies are unsent, waits until the client reads them.
            while channel.lock().unsent_bytes() > MAX_UNSENT && !self.awaits_ack {
                channel.lock().flush_within(SLICE)?;
            }
        }
        if replied {
            let mut channel = channel.lock();
            channel.check_unacked(MAX_UNACKED)?;
            channel.send_ack()?;
            channel.drive()?;
        }
        Ok(())
    }

    /// Waits up to [`SLICE`] until the client has acknowledged the reply that may share the memory
    /// of a storage. Items that arrive before the acknowledgement go to the backlog.
    fn wait_for_ack(&mut self, channel: &SharedChannel<E>) -> Result<(), Error> {
        let mut channel = channel.lock();
        if channel.unsent_bytes() > 0 {
            channel.flush_within(SLICE)?;
        } else if channel.is_acked() {
            self.awaits_ack = false;
        } else if let Some(item) = channel.next_within(SLICE)? {
            if matches!(item, Incoming::Announced(_)) {
                // The acknowledgement may come only after this tensor, so the session cannot wait
                // for it here. The socket has taken the reply. If the link is lost, the reply is
                // sent again from the copy.
                channel.copy_unacked();
                self.awaits_ack = false;
            }
            self.backlog.push_back(item);
            let bytes: usize = self.backlog.iter().map(Incoming::byte_len).sum();
            if bytes > MAX_UNACKED.bytes || self.backlog.len() > MAX_UNACKED.items {
                let what = format!(
                    "the client sent {} messages and tensors of {bytes} bytes in total without \
                     acknowledging a reply (expected at most {} and {} bytes)",
                    self.backlog.len(),
                    MAX_UNACKED.items,
                    MAX_UNACKED.bytes
                );
                return Err(protocol_error(what));
            }
        }
        Ok(())
    }

    /// Returns memory for the tensor that was announced.
    fn upload_sink(
        &mut self,
        info: &TensorInfo,
        channel: &SharedChannel<E>,
    ) -> Result<UploadSink<E::Sink>, Error> {
        let Some(&PendingUpload { request, storage, offset, bytes }) = self.upload.as_ref() else {
            let what = "the client sent a tensor without a RECEIVE request before it";
            return Err(protocol_error(what.into()));
        };
        if bytes != info.storage_len {
            let what = format!(
                "the client sent a tensor of {} bytes (expected {bytes}, as in its RECEIVE \
                 request)",
                info.storage_len
            );
            return Err(protocol_error(what));
        }
        let what = "the executor did not run the request: `Executor::batch` did not call `run`";
        let mut sink = Err(OpFailure::new(OpFailureKind::Refused, what));
        self.executor.batch(&mut |executor| sink = executor.sink(storage, offset, bytes));
        Ok(match sink {
            Ok(sink) => UploadSink::Memory(sink),
            Err(failure) => {
                self.fail_upload(request, storage, failure, channel)?;
                UploadSink::Discard { bytes, scratch: vec![0; (bytes as usize).min(SCRATCH)] }
            }
        })
    }

    /// Completes an upload whose tensor has arrived, unless it was refused.
    fn finish_upload(
        &mut self,
        sink: Option<UploadSink<E::Sink>>,
        channel: &SharedChannel<E>,
    ) -> Result<(), Error> {
        let full = sink.map(Sink::finish).transpose()?.flatten();
        let Some((upload, full)) = self.upload.take().zip(full) else { return Ok(()) };
        let (mut full, mut done) = (Some(full), Ok(()));
        self.executor.batch(&mut |executor| {
            if let Some(full) = full.take() {
                done = executor.received(upload.storage, upload.offset, full);
            }
        });
        done.or_else(|failure| self.fail_upload(upload.request, upload.storage, failure, channel))
    }

    fn fail_upload(
        &mut self,
        request: u64,
        storage: u64,
        failure: OpFailure,
        channel: &SharedChannel<E>,
    ) -> Result<(), Error> {
        if !self.executor.is_constant(storage) {
            self.poisoned.insert(storage, (request, failure.clone()));
        }
        let mut failed = Vec::new();
        Reply::Failed { request, failure }.encode(&mut failed);
        channel.lock().send_message(&failed)
    }
}

/// Closes the link of a session for a reason, if it has one.
fn close<E: Executor>(channel: &SharedChannel<E>, reason: &str) {
    let mut channel = channel.lock();
    if let Some(link) = channel.link() {
        link.connection().close(reason);
        let _ = link.flush_all();
    }
}
