// SPDX-License-Identifier: MIT OR Apache-2.0
//! A session with a machine that has the tensors.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};
use std::{fmt, io};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use ts_format::Dtype;

use crate::channel::{Channel, Greeting, Incoming};
use crate::reply::Reply;
use crate::value::Decoder;
use crate::{OpFailure, Request, TensorRef, Value};
use ts_remote::{Error, ErrorKind, Link, Sink, TensorInfo};

/// A batch goes when it has so many requests,
const BATCH: usize = 64;
/// or so many bytes,
const BATCH_BYTES: usize = 56 << 10;
/// or when its first request has waited so long.
const FLUSH: Duration = Duration::from_millis(1);
/// How long whoever flushes stays awake for more, in turns of [`FLUSH`].
const AWAKE: u32 = 20;
/// How often a session that is not used is looked at.
const KEEP: Duration = Duration::from_millis(500);
/// How long a wait lasts before others have their turn.
const TURN: Duration = Duration::from_millis(100);
/// The same while others have something to send.
const SHORT_TURN: Duration = Duration::from_millis(1);
/// How long an answer may take until the machine is asked whether it has given it.
const DOUBT: Duration = Duration::from_secs(1);
/// How long a machine may take to end a session.
const GOODBYE: Duration = Duration::from_secs(5);
/// Uploads up to this go in batches.
const MAX_INLINE: usize = 16 << 10;
/// Longer ones go in pieces.
const PIECE: usize = 8 << 20;
/// The most bytes that wait for the other end to have them while the program goes on.
const MAX_UNACKED: usize = 64 << 20;

/// How a session is set up.
pub struct ClientOptions<S> {
    /// Connects to the machine: at first, and when the link was lost.
    pub dial: Dial<S>,
    /// How long a link that was lost is tried to be made again.
    pub retry: Duration,
    /// Whether an address at which nobody listens is tried again: not where whoever listened there
    /// was made for this session.
    pub returns: bool,
}

/// Makes a link.
pub type Dial<S> = Box<dyn Fn() -> Result<Link<S>, Error> + Send + Sync>;

/// A session with a machine: what is asked is done there in its order, while the program goes on
/// here. For many threads at once.
///
/// What is asked goes in batches: of 64 requests, or of what is there after 1 ms, or when somebody
/// waits. What fails is told at the next wait.
pub struct Client<S: Sink + Send + 'static> {
    shared: Arc<Shared<S>>,
}

/// Why a wait ended without what was waited for.
#[derive(Debug, Clone, thiserror::Error)]
pub enum WaitError {
    /// The session is over.
    #[error(transparent)]
    Lost(#[from] Error),
    /// A request was not done: this one, or another before it, of which nobody has heard yet.
    #[error("{failure}")]
    Failed {
        /** Which, in the order in which they were asked, from 1 on. */
        request: u64,
        /** Why. */
        failure: OpFailure,
        /** How many more have failed since the last wait. */
        others: usize,
    },
}

/// What was waited for.
#[derive(Debug)]
pub enum Answer<S> {
    /// What an operator gave.
    Values(Vec<Value>),
    /// The elements of a tensor.
    Bytes(Vec<u8>),
    /// They are in the memory that was given.
    Memory(S),
}

/// What a session has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClientStats {
    /// Requests.
    pub requests: u64,
    /// Batches they went in.
    pub batches: u64,
    /// Waits for an answer.
    pub waits: u64,
    /// Links that were made again.
    pub reconnects: u64,
    /// Bytes of tensors to the machine.
    pub uploaded_bytes: u64,
    /// Bytes of tensors from there.
    pub downloaded_bytes: u64,
}

struct Shared<S: Sink + Send> {
    queue: Mutex<Queue>,
    line: Mutex<Line<S>>,
    replies: AtomicU64,
    waits: AtomicU64,
    /// Whoever flushes sleeps until it is woken.
    asleep: AtomicBool,
    closing: AtomicBool,
    /// Somebody has something to send while another has the line.
    crowd: AtomicBool,
    /// Answers that nobody will wait for.
    unwanted: Mutex<HashSet<u64>>,
    options: ClientOptions<S>,
    session: [u8; 16],
}

/// What is to be sent.
#[derive(Default)]
struct Queue {
    batch: Vec<u8>,
    in_batch: usize,
    sealed: VecDeque<Piece>,
    sealed_bytes: usize,
    requests: u64,
    batches: u64,
    uploaded_bytes: u64,
    ops: HashMap<String, u32>,
    flusher: Option<Thread>,
    over: Option<Error>,
}

enum Piece {
    Batch(Vec<u8>),
    Payload(Bytes),
}

/// A wait that takes long.
struct Doubt {
    since: Instant,
    /// What was asked behind the answer that is waited for: it comes first if that is lost.
    probe: Option<u64>,
}

struct Line<S> {
    channel: Channel<S>,
    /// By the answer that is waited for.
    doubts: HashMap<u64, Doubt>,
    answers: HashMap<u64, Result<Answer<S>, (u64, OpFailure)>>,
    /// Memory that answers go to.
    sinks: HashMap<u64, S>,
    /// The answer whose elements come next.
    arriving: Option<u64>,
    failures: VecDeque<(u64, OpFailure)>,
    over: Option<Error>,
    reconnects: u64,
    downloaded_bytes: u64,
}

impl<S: Sink + Send + 'static> Client<S> {
    /// Connects, and begins a session. Starts a thread, which sends what has waited for 1 ms and
    /// gives signs of life. Blocks.
    ///
    /// `session` names it: 16 bytes that nobody else guesses.
    ///
    /// # Errors
    /// As [`Link::connect`].
    pub fn connect(options: ClientOptions<S>, session: [u8; 16]) -> Result<Self, Error> {
        let mut line = Line {
            channel: Channel::new(),
            doubts: HashMap::new(),
            answers: HashMap::new(),
            sinks: HashMap::new(),
            arriving: None,
            failures: VecDeque::new(),
            over: None,
            reconnects: 0,
            downloaded_bytes: 0,
        };
        line.connect(&options, session)?;
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            line: Mutex::new(line),
            replies: AtomicU64::new(1),
            waits: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            crowd: AtomicBool::new(false),
            unwanted: Mutex::default(),
            options,
            session,
        });
        let flusher = Arc::downgrade(&shared);
        let mut idle = 0;
        let run = move || {
            loop {
                let Some(shared) = flusher.upgrade() else { return };
                if shared.closing.load(Ordering::Relaxed) {
                    return;
                }
                let sent = shared.tick();
                idle = if sent { 0 } else { idle + 1 };
                let asleep = idle > AWAKE;
                shared.asleep.store(asleep, Ordering::SeqCst);
                // What came in between would wait for nobody.
                let asleep = asleep && shared.queue().is_empty();
                drop(shared);
                thread::park_timeout(if asleep { KEEP } else { FLUSH });
            }
        };
        let thread = thread::Builder::new().name("tensorstream-flush".into()).spawn(run);
        let thread = thread.map_err(|source| Error::Io {
            peer: "this process".into(),
            what: "starting a thread",
            source: source.into(),
        })?;
        shared.queue().flusher = Some(thread.thread().clone());
        Ok(Self { shared })
    }

    /// The number of an operator, such as `aten::add.Tensor`, which the machine is told at its
    /// first use.
    ///
    /// # Errors
    /// What ended the session.
    pub fn op(&self, name: &str) -> Result<u32, Error> {
        let mut queue = self.shared.queue();
        if let Some(&op) = queue.ops.get(name) {
            return Ok(op);
        }
        let op = queue.ops.len() as u32;
        queue.push(|batch| Request::Define { op, name: name.into() }.encode(batch))?;
        queue.ops.insert(name.into(), op);
        Ok(op)
    }

    /// Asks for something, and goes on. The number of the request. Blocks only while more waits to
    /// be sent than may.
    ///
    /// # Errors
    /// What ended the session.
    pub fn ask(&self, request: &Request) -> Result<u64, Error> {
        self.ask_with(|batch| request.encode(batch))
    }

    /// As [`ask`](Self::ask): `encode` appends one request to the batch.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn ask_with(&self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<u64, Error> {
        let (number, full) = self.post(encode)?;
        if full {
            self.settle()?;
        }
        Ok(number)
    }

    /// The first half of [`ask_with`](Self::ask_with), which never blocks: the number of the
    /// request, and whether the second, [`settle`](Self::settle), is due.
    ///
    /// # Errors
    /// What ended the session.
    pub fn post(&self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<(u64, bool), Error> {
        let mut queue = self.shared.queue();
        let number = queue.push(encode)?;
        let full = queue.is_full();
        if full {
            queue.seal();
        }
        drop(queue);
        self.shared.wake();
        Ok((number, full))
    }

    /// Sends what is due. Blocks only while more waits to be sent than may.
    ///
    /// # Errors
    /// What ended the session.
    pub fn settle(&self) -> Result<(), Error> {
        let clogged = self.shared.queue().sealed_bytes > MAX_UNACKED;
        self.shared.pump(clogged)
    }

    /// Says that nobody has a view of a storage any more. Never blocks, and may be called by
    /// whatever drops things.
    pub fn free(&self, storage: u64) {
        // A session that is over has no storages.
        let _ = self.shared.queue().push(|batch| Request::Free { storage }.encode(batch));
        self.shared.wake();
    }

    /// Nobody will wait for this answer: it is dropped when it is there. Never blocks.
    pub fn forget(&self, reply: u64) {
        self.shared.unwanted.lock().insert(reply);
    }

    /// A number for an answer.
    pub fn reply(&self) -> u64 {
        self.shared.replies.fetch_add(1, Ordering::Relaxed)
    }

    /// Asks for the elements of a tensor: a number to [`wait`](Self::wait) for. They go to
    /// `memory`, which is as long as they are, or to new memory.
    ///
    /// # Errors
    /// What ended the session.
    pub fn read(&self, tensor: TensorRef, memory: S) -> Result<u64, Error> {
        let reply = self.reply();
        self.shared.line().sinks.insert(reply, memory);
        self.ask(&Request::Read { reply, tensor })?;
        Ok(reply)
    }

    /// Writes bytes to a storage. A few are copied; of many, `bytes` is kept until the other end
    /// has them: until it is [delivered](Self::delivered_within), what it is made of may not
    /// change.
    ///
    /// # Errors
    /// What ended the session. Blocks as long as too much waits to be sent.
    pub fn write(&self, storage: u64, offset: u64, bytes: Bytes) -> Result<(), Error> {
        if bytes.len() <= MAX_INLINE {
            self.shared.queue().uploaded_bytes += bytes.len() as u64;
            return self.ask(&Request::Write { storage, offset, bytes: bytes.into() }).map(drop);
        }
        for at in (0..bytes.len()).step_by(PIECE) {
            let piece = bytes.slice(at..bytes.len().min(at + PIECE));
            let mut queue = self.shared.queue();
            let request =
                Request::Receive { storage, offset: offset + at as u64, bytes: piece.len() as u64 };
            queue.push(|batch| request.encode(batch))?;
            queue.seal();
            queue.uploaded_bytes += piece.len() as u64;
            queue.sealed_bytes += piece.len();
            queue.sealed.push_back(Piece::Payload(piece));
            let clogged = queue.sealed_bytes > 2 * PIECE;
            drop(queue);
            self.shared.pump(clogged)?;
        }
        Ok(())
    }

    /// Waits until the other end has all that was asked and written, done or not, at most so long:
    /// whether it has.
    ///
    /// # Errors
    /// What ended the session.
    pub fn delivered_within(&self, time: Duration) -> Result<bool, Error> {
        let end = Instant::now() + time;
        loop {
            let mut line = self.shared.line();
            self.shared.send(&mut line, true)?;
            if line.channel.is_acked() {
                return Ok(true);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.shared.listen(&mut line, left.min(TURN))?;
        }
    }

    /// Waits for an answer, at most so long; `None` when it has not come. A wait is the time at
    /// which failures are told.
    ///
    /// # Errors
    /// [`WaitError`]. The answer, if there was one, is gone then.
    pub fn wait(&self, reply: u64, time: Duration) -> Result<Option<Answer<S>>, WaitError> {
        let shared = &*self.shared;
        let end = Instant::now() + time;
        loop {
            let mut line = shared.line();
            shared.send(&mut line, true)?;
            if let Some(answer) = line.answer(reply) {
                shared.waits.fetch_add(1, Ordering::Relaxed);
                if let Some(probe) = line.doubts.remove(&reply).and_then(|doubt| doubt.probe) {
                    self.forget(probe);
                }
                return answer.map(Some);
            }
            self.doubt(&mut line, reply)?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let crowd = shared.crowd.swap(false, Ordering::Relaxed);
            shared.listen(&mut line, left.min(if crowd { SHORT_TURN } else { TURN }))?;
        }
    }

    /// Asks, of an answer that takes long, for another behind it. When that one is there, the first
    /// is lost.
    fn doubt(&self, line: &mut Line<S>, reply: u64) -> Result<(), Error> {
        let doubt = line
            .doubts
            .entry(reply)
            .or_insert_with(|| Doubt { since: Instant::now(), probe: None });
        match doubt.probe {
            None if doubt.since.elapsed() >= DOUBT => {
                let probe = self.reply();
                doubt.probe = Some(probe);
                self.post(|batch| Request::Sync { reply: probe }.encode(batch))?;
                self.shared.send(line, true)
            }
            Some(probe) if line.answers.contains_key(&probe) => {
                let what = "an answer that was asked for did not come, and the next one did".into();
                let error = Error::Protocol { stream: 0, what };
                self.shared.end(line, &error);
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Sends what waits to be sent, as far as that goes without waiting.
    ///
    /// # Errors
    /// What ended the session.
    pub fn flush(&self) -> Result<(), Error> {
        self.shared.queue().seal();
        self.shared.pump(false)
    }

    /// Takes what has failed and nobody was told of, if anything did: as a wait would tell it. For
    /// who ends a session.
    pub fn take_failed(&self) -> Option<WaitError> {
        self.shared.line().failed()
    }

    /// Whether the session is over: what is asked from now on is an error.
    pub fn is_over(&self) -> bool {
        self.shared.queue().over.is_some()
    }

    /// What it has done.
    pub fn stats(&self) -> ClientStats {
        let (requests, batches, uploaded_bytes) = {
            let queue = self.shared.queue();
            (queue.requests, queue.batches, queue.uploaded_bytes)
        };
        let line = self.shared.line();
        ClientStats {
            requests,
            batches,
            waits: self.shared.waits.load(Ordering::Relaxed),
            reconnects: line.reconnects,
            uploaded_bytes,
            downloaded_bytes: line.downloaded_bytes,
        }
    }

    /// Ends the session: what was asked is done, and then all storages are gone. Blocks until the
    /// machine has heard of it.
    ///
    /// # Errors
    /// What ended the session before.
    pub fn close(&self) -> Result<(), Error> {
        if self.shared.closing.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        self.shared.wake();
        let mut line = self.shared.line();
        let sent = self.shared.send(&mut line, true).and_then(|()| line.channel.finish());
        let end = Instant::now() + GOODBYE;
        while sent.is_ok() && Instant::now() < end {
            match line.channel.next_within(TURN) {
                Ok(Some(Incoming::Finished)) | Err(_) => break,
                // Failures that come last are still told.
                Ok(Some(item)) => {
                    if line.hear(item).is_err() {
                        break;
                    }
                }
                Ok(None) => {}
            }
        }
        self.shared.end(&mut line, &Error::Closed { reason: "the session was ended here".into() });
        sent
    }
}

impl<S: Sink + Send> Shared<S> {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    fn line(&self) -> MutexGuard<'_, Line<S>> {
        self.line.try_lock().unwrap_or_else(|| {
            self.crowd.store(true, Ordering::Relaxed);
            self.line.lock()
        })
    }

    /// Wakes whoever flushes, if it sleeps.
    fn wake(&self) {
        if self.asleep.load(Ordering::SeqCst)
            && self.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = &self.queue().flusher
        {
            thread.unpark();
        }
    }

    /// Sends what has waited. Whether there was something.
    fn tick(&self) -> bool {
        let mut queue = self.queue();
        let waits = !queue.is_empty();
        queue.seal();
        drop(queue);
        // Whoever has the line sends it.
        if let Some(mut line) = self.line.try_lock() {
            let _ =
                self.send(&mut line, false).and_then(|()| self.listen(&mut line, Duration::ZERO));
        } else if waits {
            self.crowd.store(true, Ordering::Relaxed);
        }
        waits
    }

    /// Sends what was sealed, unless somebody else has the line, who does it then; with `clogged`,
    /// until little of it is left.
    fn pump(&self, clogged: bool) -> Result<(), Error> {
        if clogged {
            loop {
                let mut line = self.line();
                self.send(&mut line, false)?;
                if line.channel.unsent_bytes() < 2 * PIECE
                    && line.channel.unacked_bytes() < MAX_UNACKED
                {
                    return Ok(());
                }
                self.listen(&mut line, SHORT_TURN)?;
            }
        }
        match self.line.try_lock() {
            Some(mut line) => self.send(&mut line, false),
            None => {
                self.crowd.store(true, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// Hands what is sealed to the socket, and before that, if `all` says so, seals what is there.
    fn send(&self, line: &mut Line<S>, all: bool) -> Result<(), Error> {
        if let Some(error) = &line.over {
            return Err(error.clone());
        }
        let pieces = {
            let mut queue = self.queue();
            if all {
                queue.seal();
            }
            queue.sealed_bytes = 0;
            std::mem::take(&mut queue.sealed)
        };
        if pieces.is_empty() {
            return Ok(());
        }
        let mut sent = Ok(());
        for piece in pieces {
            // What cannot be sent now is sent with the next link.
            let put = match piece {
                Piece::Batch(batch) => line.channel.send_message(&batch),
                Piece::Payload(bytes) => TensorInfo::new("", Dtype::U8, [bytes.len() as u64])
                    .and_then(|info| line.channel.send_tensor(info, bytes)),
            };
            sent = sent.and(put);
        }
        sent.and_then(|()| line.channel.drive()).or_else(|error| self.mend(line, error))
    }

    /// Hears what comes, at most so long.
    fn listen(&self, line: &mut Line<S>, time: Duration) -> Result<(), Error> {
        if let Some(error) = &line.over {
            return Err(error.clone());
        }
        let item =
            if time.is_zero() { line.channel.poll() } else { line.channel.next_within(time) };
        let heard = item.and_then(|item| match item {
            // What the other end waits for to be acknowledged is.
            Some(item) => line.hear(item).and_then(|()| {
                self.drop_unwanted(line);
                if line.channel.wants_write() { line.channel.drive() } else { Ok(()) }
            }),
            None => line.channel.acknowledge().and_then(|()| line.channel.drive()),
        });
        heard.or_else(|error| self.mend(line, error))
    }

    fn drop_unwanted(&self, line: &mut Line<S>) {
        let mut unwanted = self.unwanted.lock();
        if unwanted.is_empty() {
            return;
        }
        let there: Vec<_> =
            unwanted.iter().filter_map(|reply| line.answers.remove_entry(reply)).collect();
        unwanted.retain(|reply| there.iter().all(|(found, _)| found != reply));
        for (reply, _) in &there {
            line.doubts.remove(reply);
        }
        drop(unwanted);
        // Memory may want more than this thread has while others have to wait.
        drop(there);
    }

    /// Makes the link again if it was lost; else the session is over.
    fn mend(&self, line: &mut Line<S>, error: Error) -> Result<(), Error> {
        let mut error = error;
        // Who said why it ends the connection means it.
        let meant = line.channel.was_closed();
        if matches!(error.kind(), ErrorKind::Network | ErrorKind::TimedOut | ErrorKind::Refused)
            && !meant
        {
            let end = Instant::now() + self.options.retry;
            let mut pause = Duration::from_millis(10);
            line.detach();
            while !self.closing.load(Ordering::Relaxed) && Instant::now() < end {
                match line.connect(&self.options, self.session) {
                    Ok(()) => {
                        line.reconnects += 1;
                        return Ok(());
                    }
                    // It is there, and knows nothing of this session.
                    Err(refused @ Error::Closed { .. }) => {
                        error = refused;
                        break;
                    }
                    // It is not there, and nobody comes in its place.
                    Err(Error::Io { source, .. }) if !self.options.returns && is_gone(&source) => {
                        break;
                    }
                    Err(_) => thread::sleep(pause),
                }
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        }
        self.end(line, &error);
        Err(error)
    }

    fn end(&self, line: &mut Line<S>, error: &Error) {
        line.channel.detach();
        line.over.get_or_insert_with(|| error.clone());
        let mut queue = self.queue();
        queue.over.get_or_insert_with(|| error.clone());
        let left = (std::mem::take(&mut queue.batch), std::mem::take(&mut queue.sealed));
        drop(queue);
        // Memory may want more than this thread has while others have to wait for the queue.
        drop(left);
    }
}

/// Whether nobody listens at an address.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

impl Queue {
    fn push(&mut self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<u64, Error> {
        if let Some(error) = &self.over {
            return Err(error.clone());
        }
        encode(&mut self.batch);
        self.in_batch += 1;
        self.requests += 1;
        Ok(self.requests)
    }

    fn is_empty(&self) -> bool {
        self.batch.is_empty() && self.sealed.is_empty()
    }

    fn is_full(&self) -> bool {
        self.in_batch >= BATCH || self.batch.len() >= BATCH_BYTES
    }

    fn seal(&mut self) {
        if !self.batch.is_empty() {
            self.in_batch = 0;
            self.batches += 1;
            self.sealed_bytes += self.batch.len();
            let capacity = self.batch.capacity().min(BATCH_BYTES);
            let batch = std::mem::replace(&mut self.batch, Vec::with_capacity(capacity));
            self.sealed.push_back(Piece::Batch(batch));
        }
    }
}

impl<S: Sink + Send> Line<S> {
    fn connect(&mut self, options: &ClientOptions<S>, session: [u8; 16]) -> Result<(), Error> {
        let mut link = (options.dial)()?;
        let own = Greeting { session, received: self.channel.received() };
        let (stream, theirs) = Channel::greet(&mut link, own)?;
        self.channel.attach(link, stream, theirs.received)
    }

    /// Gives the link up. What has come by it counts, and memory for an answer that was under way
    /// is kept for when it comes again.
    fn detach(&mut self) {
        while let Ok(Some(item)) = self.channel.next_heard() {
            if self.hear(item).is_err() {
                break;
            }
        }
        let Some(mut link) = self.channel.detach() else { return };
        if let (Some(reply), Some(sink)) = (self.arriving, link.connection().take_sinks().pop()) {
            self.sinks.insert(reply, sink);
        }
    }

    fn hear(&mut self, item: Incoming<S>) -> Result<(), Error> {
        let bad = |what: &str| Error::Protocol { stream: 0, what: what.into() };
        match item {
            Incoming::Message(bytes) => {
                let mut from = Decoder::new(&bytes, 0);
                while !from.is_empty() {
                    self.reply(Reply::decode(&mut from)?)?;
                }
                Ok(())
            }
            Incoming::Announced(info) => {
                let reply =
                    self.arriving.ok_or_else(|| bad("elements of which nothing was said"))?;
                let sink = self
                    .sinks
                    .remove(&reply)
                    .ok_or_else(|| bad("elements that nobody asked for"))?;
                if sink.byte_len() != info.storage_len {
                    return Err(bad("more or fewer elements than were asked for"));
                }
                self.channel.accept(sink)
            }
            Incoming::Tensor(info, sink) => {
                let reply = self
                    .arriving
                    .take()
                    .ok_or_else(|| bad("elements of which nothing was said"))?;
                let sink = sink.ok_or_else(|| bad("no elements"))?;
                self.downloaded_bytes += info.storage_len;
                self.answers.insert(reply, Ok(Answer::Memory(sink)));
                Ok(())
            }
            Incoming::Finished => {
                Err(Error::Closed { reason: "the machine has ended the session".into() })
            }
        }
    }

    fn reply(&mut self, reply: Reply) -> Result<(), Error> {
        let (reply, answer) = match reply {
            Reply::Answer { reply, values } => (reply, Ok(Answer::Values(values))),
            Reply::Bytes { reply, bytes } => {
                self.downloaded_bytes += bytes.len() as u64;
                let answer = match self.sinks.remove(&reply) {
                    Some(mut sink) => {
                        let mut at = 0;
                        while at < bytes.len() {
                            let space = sink.space(at as u64, bytes.len() - at)?;
                            let len = space.len();
                            space.copy_from_slice(&bytes[at..at + len]);
                            sink.filled(at as u64, len)?;
                            at += len;
                        }
                        Answer::Memory(sink)
                    }
                    None => Answer::Bytes(bytes),
                };
                (reply, Ok(answer))
            }
            Reply::Tensor { reply } => {
                self.arriving = Some(reply);
                return Ok(());
            }
            Reply::Failed { request, failure } => {
                self.failures.push_back((request, failure));
                return Ok(());
            }
            Reply::Refused { reply, request, failure } => {
                self.sinks.remove(&reply);
                (reply, Err((request, failure)))
            }
        };
        self.answers.insert(reply, answer);
        Ok(())
    }

    /// The first that has failed and was not told.
    fn failed(&mut self) -> Option<WaitError> {
        let others = self.failures.len().saturating_sub(1);
        let (request, failure) = self.failures.pop_front()?;
        self.failures.clear();
        Some(WaitError::Failed { request, failure, others })
    }

    /// The answer, if it has come, or what has failed before it and was not told.
    fn answer(&mut self, reply: u64) -> Option<Result<Answer<S>, WaitError>> {
        if !self.answers.contains_key(&reply) {
            return None;
        }
        if let Some(fault) = self.failed() {
            self.answers.remove(&reply);
            return Some(Err(fault));
        }
        let answer = self.answers.remove(&reply)?;
        Some(answer.map_err(|(request, failure)| WaitError::Failed { request, failure, others: 0 }))
    }
}

impl<S: Sink + Send + 'static> Drop for Client<S> {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.wake();
    }
}

impl<S: Sink + Send + 'static> fmt::Debug for Client<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
