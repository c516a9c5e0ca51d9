// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state that the threads of a client share: the queue, the connection, and the flusher thread.
//!
//! Lock order: first the connection, then the queue or the set of forgotten replies. Submitting a
//! request locks only the queue, so it never waits for the network. The thread that has locked the
//! connection sends the requests that other threads queue.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use ts_format::Dtype;

use super::connection::ConnectionState;
use super::options::ClientOptions;
use super::queue::{QueueItem, RequestQueue};
use ts_remote::{Backoff, Error, ErrorKind, Sink, TensorInfo};

/// The longest time that a request waits in an incomplete batch.
const FLUSH_INTERVAL: Duration = Duration::from_millis(1);
/// The delay after the first failed attempt to reconnect, before jitter. It doubles after each
/// attempt, up to [`MAX_RETRY`].
const FIRST_RETRY: Duration = Duration::from_millis(10);
/// The longest delay between attempts to reconnect, before jitter.
const MAX_RETRY: Duration = Duration::from_secs(1);
/// The longest time for attempts to begin a session whose links are lost. A server of another
/// protocol may close all links.
const FIRST_TIMEOUT: Duration = Duration::from_secs(5);
/// The flusher sleeps after more than this many flush intervals without requests.
const IDLE_TICKS: u32 = 20;
/// How often a sleeping flusher reads and writes, to answer the server's pings.
const IDLE_INTERVAL: Duration = Duration::from_millis(500);
/// How long a waiting thread keeps the connection locked if other threads need it.
pub(super) const CONTENDED_SLICE: Duration = Duration::from_millis(1);
/// Uploads are sent in pieces of at most this many bytes.
pub(super) const UPLOAD_PIECE: usize = 8 << 20;
/// A caller that sends requests must wait while at least this many bytes are queued or
/// unacknowledged.
const MAX_UNACKED: usize = 64 << 20;

pub(super) struct ClientInner<S: Sink + Send> {
    queue: Mutex<RequestQueue>,
    connection: Mutex<ConnectionState<S>>,
    /// The unacknowledged bytes of the connection when it was last used.
    unacked_bytes: AtomicUsize,
    pub(super) next_reply: AtomicU64,
    /// How many waits have ended with an answer or with the failure of a request.
    pub(super) waits: AtomicU64,
    /// Whether the flusher sleeps for [`IDLE_INTERVAL`], so that a new request must wake it.
    flusher_asleep: AtomicBool,
    /// Whether the session is being closed, or its client was dropped.
    pub(super) closing: AtomicBool,
    /// Whether a thread needed the connection while another thread had locked it.
    pub(super) contended: AtomicBool,
    /// Whether a lost link is being replaced.
    pub(super) reconnecting: AtomicBool,
    /// The error with which the caller gave the session up.
    pub(super) abandoned: OnceLock<Error>,
    /// The numbers of replies that no caller will wait for.
    pub(super) forgotten: Mutex<HashSet<u64>>,
    options: ClientOptions<S>,
    session: [u8; 16],
}

impl<S: Sink + Send> ClientInner<S> {
    /// Connects to the server, and begins a session. Blocks.
    pub(super) fn connect(options: ClientOptions<S>, session: [u8; 16]) -> Result<Self, Error> {
        let connection = Self::first_connection(&options, session)?;
        Ok(Self {
            queue: Mutex::default(),
            connection: Mutex::new(connection),
            unacked_bytes: AtomicUsize::new(0),
            next_reply: AtomicU64::new(1),
            waits: AtomicU64::new(0),
            flusher_asleep: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            contended: AtomicBool::new(false),
            reconnecting: AtomicBool::new(false),
            abandoned: OnceLock::new(),
            forgotten: Mutex::default(),
            options,
            session,
        })
    }

    /// Connects, also if links are lost during the handshake. The server knows the session by its
    /// name, so it begins only once.
    fn first_connection(
        options: &ClientOptions<S>,
        session: [u8; 16],
    ) -> Result<ConnectionState<S>, Error> {
        let mut connection = ConnectionState::new();
        let end = Instant::now() + options.reconnect_timeout.min(FIRST_TIMEOUT);
        let mut backoff = Backoff::new(FIRST_RETRY, MAX_RETRY);
        loop {
            match connection.connect(options, session) {
                Ok(()) => return Ok(connection),
                Err(Error::Lost { .. } | Error::Abandoned) if Instant::now() < end => {
                    thread::sleep(backoff.next_delay());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Starts the thread that sends incomplete batches and answers pings.
    pub(super) fn start_flusher(self: &Arc<Self>) -> Result<(), Error>
    where
        S: 'static,
    {
        let flusher = Arc::downgrade(self);
        let mut idle = 0;
        let run = move || {
            loop {
                let Some(inner) = flusher.upgrade() else { return };
                if inner.closing.load(Ordering::Relaxed) {
                    return;
                }
                let sent = inner.tick();
                idle = if sent { 0 } else { idle + 1 };
                let asleep = idle > IDLE_TICKS;
                inner.flusher_asleep.store(asleep, Ordering::SeqCst);
                // A request that was queued before this store has not woken the thread, so the
                // queue is checked again.
                let asleep = asleep && inner.queue().is_empty();
                drop(inner);
                thread::park_timeout(if asleep { IDLE_INTERVAL } else { FLUSH_INTERVAL });
            }
        };
        let thread = thread::Builder::new().name("tensorstream-flush".into()).spawn(run);
        let thread = thread.map_err(|source| Error::Io {
            peer: "this process".into(),
            what: "starting the background thread",
            source: source.into(),
        })?;
        self.queue().flusher = Some(thread.thread().clone());
        Ok(())
    }

    pub(super) fn queue(&self) -> MutexGuard<'_, RequestQueue> {
        self.queue.lock()
    }

    /// Locks the connection. If another thread has locked it, signals that thread to unlock it
    /// soon.
    pub(super) fn connection(&self) -> MutexGuard<'_, ConnectionState<S>> {
        self.connection.try_lock().unwrap_or_else(|| {
            self.contended.store(true, Ordering::Relaxed);
            self.connection.lock()
        })
    }

    /// Returns whether a caller must wait because too many bytes are queued or unacknowledged.
    pub(super) fn is_backlogged(&self, queued_bytes: usize) -> bool {
        queued_bytes + self.unacked_bytes.load(Ordering::Relaxed) >= MAX_UNACKED
    }

    /// Wakes the flusher, if it sleeps.
    pub(super) fn wake_flusher(&self) {
        if self.flusher_asleep.load(Ordering::SeqCst)
            && self.flusher_asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = &self.queue().flusher
        {
            thread.unpark();
        }
    }

    /// Sends queued requests, and receives an item if one has arrived. Returns whether any requests
    /// were queued.
    fn tick(&self) -> bool {
        let mut queue = self.queue();
        let waiting = !queue.is_empty();
        queue.seal();
        drop(queue);
        // If another thread has locked the connection, that thread sends the queue.
        if let Some(mut connection) = self.connection.try_lock() {
            let _ = self
                .send(&mut connection, false)
                .and_then(|()| self.receive_within(&mut connection, Duration::ZERO));
        } else if waiting {
            self.contended.store(true, Ordering::Relaxed);
        }
        waiting
    }

    /// Sends sealed batches. If another thread has locked the connection, that thread sends them.
    /// With `backlogged`, blocks until fewer than 16 MiB are unsent and fewer than 64 MiB are
    /// unacknowledged.
    pub(super) fn send_sealed(&self, backlogged: bool) -> Result<(), Error> {
        if backlogged {
            loop {
                let mut connection = self.connection();
                self.send(&mut connection, false)?;
                if connection.channel.unsent_bytes() < 2 * UPLOAD_PIECE
                    && connection.channel.unacked_bytes() < MAX_UNACKED
                {
                    return Ok(());
                }
                self.receive_within(&mut connection, CONTENDED_SLICE)?;
            }
        }
        match self.connection.try_lock() {
            Some(mut connection) => self.send(&mut connection, false),
            None => {
                self.contended.store(true, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// Passes sealed batches to the socket. With `seal`, seals the current batch first.
    pub(super) fn send(
        &self,
        connection: &mut ConnectionState<S>,
        seal: bool,
    ) -> Result<(), Error> {
        if let Some(error) = &connection.ended {
            return Err(error.clone());
        }
        let items = self.queue().take_sealed(seal);
        if items.is_empty() {
            return Ok(());
        }
        let mut sent = Ok(());
        for item in items {
            // After an error, the channel keeps the other items for the next link.
            let result = match item {
                QueueItem::Batch(batch) => connection.channel.send_message(&batch),
                QueueItem::Payload(bytes) => TensorInfo::new("", Dtype::U8, [bytes.len() as u64])
                    .and_then(|info| connection.channel.send_tensor(info, bytes)),
            };
            sent = sent.and(result);
        }
        self.unacked_bytes.store(connection.channel.unacked_bytes(), Ordering::Relaxed);
        sent.and_then(|()| connection.channel.drive())
            .or_else(|error| self.reconnect(connection, error))
    }

    /// Waits up to `time` for an item from the server, and handles it.
    pub(super) fn receive_within(
        &self,
        connection: &mut ConnectionState<S>,
        time: Duration,
    ) -> Result<(), Error> {
        if let Some(error) = &connection.ended {
            return Err(error.clone());
        }
        let channel = &mut connection.channel;
        let item = if time.is_zero() { channel.poll() } else { channel.next_within(time) };
        let handled = item.and_then(|item| match item {
            Some(item) => connection.handle(item).and_then(|()| {
                self.drop_forgotten(connection);
                // Handling the item may have queued an acknowledgement that the server waits for.
                if connection.channel.wants_write() { connection.channel.drive() } else { Ok(()) }
            }),
            None => connection.channel.send_ack().and_then(|()| connection.channel.drive()),
        });
        self.unacked_bytes.store(connection.channel.unacked_bytes(), Ordering::Relaxed);
        handled.or_else(|error| self.reconnect(connection, error))
    }

    fn drop_forgotten(&self, connection: &mut ConnectionState<S>) {
        let mut forgotten = self.forgotten.lock();
        if forgotten.is_empty() {
            return;
        }
        let answers = connection.take_forgotten(&mut forgotten);
        drop(forgotten);
        // Dropping the caller's memory may take other locks, such as Python's, so `forgotten` is
        // unlocked first.
        drop(answers);
    }

    /// If the link was lost, tries to connect again until the reconnect timeout. Blocks. After
    /// another error, or if the server is not reached in time, ends the session and returns the
    /// error.
    fn reconnect(&self, connection: &mut ConnectionState<S>, error: Error) -> Result<(), Error> {
        let mut error = error;
        // A server that closes the connection with a reason has ended the session.
        let closed = connection.channel.closed_by_peer();
        if matches!(error.kind(), ErrorKind::Network | ErrorKind::TimedOut | ErrorKind::Refused)
            && !closed
        {
            self.reconnecting.store(true, Ordering::Relaxed);
            let connected = self.connect_again(connection);
            self.reconnecting.store(false, Ordering::Relaxed);
            match connected {
                Ok(()) => return Ok(()),
                Err(refused) => error = refused.unwrap_or(error),
            }
        }
        if let Some(reason) = self.abandoned.get() {
            error = reason.clone();
        }
        self.end(connection, &error);
        Err(error)
    }

    /// Tries to connect until the reconnect timeout. Blocks. If the server refuses the session, for
    /// example because it has dropped the session, returns the refusal.
    fn connect_again(&self, connection: &mut ConnectionState<S>) -> Result<(), Option<Error>> {
        let end = Instant::now() + self.options.reconnect_timeout;
        let mut backoff = Backoff::new(FIRST_RETRY, MAX_RETRY);
        connection.detach();
        while !self.closing.load(Ordering::Relaxed)
            && self.abandoned.get().is_none()
            && Instant::now() < end
        {
            match connection.connect(&self.options, self.session) {
                Ok(()) => {
                    connection.reconnects += 1;
                    return Ok(());
                }
                Err(refused @ Error::Closed { .. }) => return Err(Some(refused)),
                // Nothing listens at the address any more.
                Err(Error::Io { source, .. })
                    if !self.options.retry_refused && is_refused(&source) =>
                {
                    break;
                }
                Err(_) => thread::sleep(backoff.next_delay()),
            }
        }
        Err(None)
    }

    /// Ends the session with `error`, unless it has already ended. Later calls return the error
    /// that ended it.
    pub(super) fn end(&self, connection: &mut ConnectionState<S>, error: &Error) {
        connection.detach();
        connection.ended.get_or_insert_with(|| error.clone());
        let unsent = self.queue().end(error);
        // Dropping the caller's memory may take other locks, such as Python's, so the queue is
        // unlocked first.
        drop(unsent);
    }
}

/// Returns whether the error means that nothing listens at the dialled address.
fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}
