// SPDX-License-Identifier: MIT OR Apache-2.0
//! SessionServer of clients whose tensors are here.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};
use ts_format::Dtype;

use crate::channel::{Channel, Greeting, Incoming, lost};
use crate::reply::Reply;
use crate::{Call, OpFailure, OpFailureKind, Output, Request, Requests, Value};
use ts_remote::{Error, ErrorKind, Link, Sink, TensorInfo};

mod executor;
mod host;

pub use executor::Executor;
pub use host::HostExecutor;

/// The service of sessions.
pub const EXEC: &str = "exec";

/// Returns the service that names a session in a client's HELLO, so that a
/// [`Dispatcher`](ts_remote::Dispatcher) can pass the client's connections to the process that has the
/// session.
pub fn service_name(session: [u8; 16]) -> String {
    format!("{EXEC}/{:032x}", u128::from_be_bytes(session))
}

/// How often a wait looks whether it is to end.
const SLICE: Duration = Duration::from_millis(100);
/// How often somebody else answers for a thread that has been running operators.
const KEEP: Duration = Duration::from_millis(500);
/// The most bytes of answers that wait for their client while more is done.
const MAX_UNSENT: usize = 32 << 20;
/// The most bytes, and things, that a client has not acknowledged, or that wait until it has. One
/// of ours acknowledges every 256 KiB.
const MAX_OWED: (usize, usize) = (256 << 20, 1 << 16);
/// The most operators that a client defines, and the most storages that it keeps which were never
/// computed.
const MAX_DEFINED: usize = 1 << 16;
/// The most sessions that are kept without a link. For another the one goes that has been so for
/// longest.
const MAX_WAITING: usize = 64;
/// Answers up to this are messages.
const MAX_INLINE: usize = 32 << 10;

/// SessionServer, each with an [`Executor`]. A session outlives its link for a while: a client that
/// comes back finds its tensors, and what was under way is done once.
pub struct SessionServer<E: Executor> {
    linger: Duration,
    held: Mutex<HashMap<[u8; 16], Slot<E>>>,
    changed: Condvar,
}

enum Slot<E: Executor> {
    /// It is served.
    Busy(Arc<Service>),
    /// Its link was lost.
    Waiting(Box<State<E>>, Instant),
}

/// What others know of a session that is served.
#[derive(Default)]
struct Service {
    /// It is to let its link go: its client has come by another.
    let_go: AtomicBool,
    /// Since when the link has been lost, while an operator runs.
    lost: Mutex<Option<Instant>>,
}

/// What of a session outlives its links.
struct State<E: Executor> {
    executor: E,
    channel: Channel<UploadSink<E::Sink>>,
    /// Requests so far.
    requests: u64,
    /// What is wrong with each operator that was defined.
    ops: Vec<Option<OpFailure>>,
    /// Storages whose elements were never computed, and for want of which request.
    poisoned: HashMap<u64, (u64, OpFailure)>,
    /// Bytes that come next: of which request, and where they go.
    receiving: Option<Receiving>,
    /// Requests that have come and are still to be done.
    rest: Bytes,
    /// What has come behind them.
    behind: VecDeque<Incoming<UploadSink<E::Sink>>>,
    /// An answer is the executor's own memory: nothing is done before the client has it.
    lent: bool,
}

#[derive(Debug)]
struct Receiving {
    request: u64,
    storage: u64,
    offset: u64,
    bytes: u64,
}

/// Where a payload is received to.
#[derive(Debug)]
pub enum UploadSink<S> {
    /// The storage it is for.
    Memory(S),
    /// Nowhere: it was not wanted, and comes all the same.
    Nowhere {
        /** How long it is. */
        bytes: u64,
        /** Memory for some of it. */
        scratch: Vec<u8>,
    },
}

impl<S: Sink> Sink for UploadSink<S> {
    type Full = Option<S::Full>;

    fn byte_len(&self) -> u64 {
        match self {
            Self::Memory(sink) => sink.byte_len(),
            Self::Nowhere { bytes, .. } => *bytes,
        }
    }

    fn space(&mut self, offset: u64, len: usize) -> Result<&mut [u8], Error> {
        match self {
            Self::Memory(sink) => sink.space(offset, len),
            Self::Nowhere { scratch, .. } => {
                let len = len.min(scratch.len());
                Ok(&mut scratch[..len])
            }
        }
    }

    fn filled(&mut self, offset: u64, len: usize) -> Result<(), Error> {
        match self {
            Self::Memory(sink) => sink.filled(offset, len),
            Self::Nowhere { .. } => Ok(()),
        }
    }

    fn finish(self) -> Result<Self::Full, Error> {
        match self {
            Self::Memory(sink) => sink.finish().map(Some),
            Self::Nowhere { .. } => Ok(None),
        }
    }
}

impl<E: Executor> fmt::Debug for SessionServer<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionServer").field("linger", &self.linger).finish_non_exhaustive()
    }
}

impl<E: Executor + Send> SessionServer<E> {
    /// None yet. Each outlives its link for `linger`.
    pub fn new(linger: Duration) -> Self {
        Self { linger, held: Mutex::default(), changed: Condvar::new() }
    }

    /// How many there are, with and without a link.
    pub fn count(&self) -> usize {
        self.held().len()
    }

    /// Whether an operator is still running although its client has been disconnected for the
    /// linger time. An operator cannot be interrupted; only ending the process stops it.
    pub fn is_stuck(&self) -> bool {
        self.held().values().any(|slot| match slot {
            Slot::Busy(service) => {
                service.lost.lock().is_some_and(|since| since.elapsed() >= self.linger)
            }
            Slot::Waiting(..) => false,
        })
    }

    /// Ends those that have been without a link for too long.
    pub fn sweep(&self) {
        let linger = self.linger;
        let mut held = self.held();
        let over: Vec<_> = held
            .extract_if(
                |_, slot| matches!(slot, Slot::Waiting(_, since) if since.elapsed() >= linger),
            )
            .collect();
        // What an executor has is given back without others waiting for that.
        drop(held);
        drop(over);
    }

    /// Serves a client that has connected, until it goes or `stop` is set. `make` makes what runs
    /// its operators, if it is new here. Blocks, and starts a thread that answers for this one
    /// while operators run.
    ///
    /// # Errors
    /// What ended the link. If it was lost the session goes on, for its client to come back to.
    pub fn serve(
        &self,
        mut link: Link<UploadSink<E::Sink>>,
        make: impl FnOnce() -> E,
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let theirs = Channel::hear_hello(&mut link)?;
        self.sweep();
        let service = Arc::new(Service::default());
        let mut state = match self.take(theirs.session, &service)? {
            Some(state) => state,
            None if theirs.received > 0 => {
                self.held().remove(&theirs.session);
                let reason = "there is no such session, or no more: its tensors are gone";
                link.connection().close(reason);
                let _ = link.flush_all();
                return Err(Error::Closed { reason: reason.into() });
            }
            None => Box::new(State {
                executor: make(),
                channel: Channel::new(),
                requests: 0,
                ops: Vec::new(),
                poisoned: HashMap::new(),
                receiving: None,
                rest: Bytes::new(),
                behind: VecDeque::new(),
                lent: false,
            }),
        };
        let ended = state.run(link, theirs, &service, stop);
        let link = state.channel.detach();
        if let (Err(error @ Error::Protocol { .. }), Some(mut link)) = (&ended, link) {
            // A connection that has ended by itself has said why.
            link.connection().close(&error.to_string());
            let _ = link.drive();
        }
        let mut held = self.held();
        match &ended {
            Err(error) if error.kind() != ErrorKind::Peer => {
                held.insert(theirs.session, Slot::Waiting(state, Instant::now()));
            }
            _ => drop(held.remove(&theirs.session)),
        }
        let surplus = oldest_waiting(&mut held);
        drop(held);
        drop(surplus);
        self.changed.notify_all();
        ended
    }

    /// A session that there is, once nobody else serves it.
    fn take(
        &self,
        session: [u8; 16],
        service: &Arc<Service>,
    ) -> Result<Option<Box<State<E>>>, Error> {
        let end = Instant::now() + self.linger;
        let mut held = self.held();
        while let Some(Slot::Busy(other)) = held.get(&session) {
            other.let_go.store(true, Ordering::Relaxed);
            if Instant::now() >= end {
                return Err(Error::Misuse(
                    "the session has another link, and is busy with it".into(),
                ));
            }
            self.changed.wait_for(&mut held, SLICE);
        }
        match held.insert(session, Slot::Busy(service.clone())) {
            Some(Slot::Waiting(state, _)) => Ok(Some(state)),
            _ => Ok(None),
        }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<[u8; 16], Slot<E>>> {
        self.held.lock()
    }
}

/// The session that has been without a link for longest, if there are too many of them.
fn oldest_waiting<E: Executor>(held: &mut HashMap<[u8; 16], Slot<E>>) -> Option<Slot<E>> {
    let waiting = held.iter().filter_map(|(session, slot)| match slot {
        Slot::Waiting(_, since) => Some((*since, *session)),
        Slot::Busy(_) => None,
    });
    let waiting: Vec<_> = waiting.collect();
    let (_, oldest) = waiting.iter().filter(|_| waiting.len() > MAX_WAITING).min()?;
    held.remove(oldest)
}

type Line<E> = Mutex<Channel<UploadSink<<E as Executor>::Sink>>>;

impl<E: Executor + Send> State<E> {
    fn run(
        &mut self,
        mut link: Link<UploadSink<E::Sink>>,
        theirs: Greeting,
        service: &Service,
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let stream = link.connection().open_stream()?;
        let own = Greeting { session: theirs.session, received: self.channel.received() };
        Channel::say_hello(&mut link, stream, own)?;
        self.channel.attach(link, stream, theirs.received)?;
        let line = Mutex::new(std::mem::replace(&mut self.channel, Channel::new()));
        let over = AtomicBool::new(false);
        let ended = thread::scope(|scope| {
            // Signs of life are given, and answers sent, while operators run.
            let keeper =
                thread::Builder::new().name("tensorstream-keep".into()).spawn_scoped(scope, || {
                    while !over.load(Ordering::Relaxed) {
                        thread::park_timeout(KEEP);
                        // Whoever waits next hears of what is wrong.
                        if let Some(mut line) = line.try_lock()
                            && line.drive().is_err()
                        {
                            service.lost.lock().get_or_insert_with(Instant::now);
                        }
                    }
                });
            let ended = match &keeper {
                Ok(_) => self.go_on(&line, &service.let_go, stop),
                Err(error) => Err(Error::Misuse(format!("no thread could be started: {error}"))),
            };
            over.store(true, Ordering::Relaxed);
            keeper.iter().for_each(|keeper| keeper.thread().unpark());
            ended
        });
        self.channel = line.into_inner();
        ended
    }

    fn go_on(
        &mut self,
        line: &Line<E>,
        let_go: &AtomicBool,
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        loop {
            self.work(line)?;
            let item = if self.lent {
                self.lend(line)?;
                None
            } else {
                match self.behind.pop_front() {
                    Some(item) => Some(item),
                    None => line.lock().next_within(SLICE)?,
                }
            };
            match item {
                Some(Incoming::Message(batch)) => self.rest = batch,
                Some(Incoming::Announced(info)) => {
                    let sink = self.landing(&info, line)?;
                    line.lock().accept(sink)?;
                }
                Some(Incoming::Tensor(_, sink)) => self.landed(sink, line)?,
                Some(Incoming::Finished) => {
                    // Whether the client hears of it or not, that is its end.
                    let _ = line.lock().finish();
                    return Ok(());
                }
                None if let_go.load(Ordering::Relaxed) => return Err(lost()),
                None if stop.load(Ordering::Relaxed) => {
                    let mut line = line.lock();
                    if let Some(link) = line.link() {
                        link.connection().close("the server was stopped");
                        let _ = link.flush_all();
                    }
                    return Ok(());
                }
                None => line.lock().acknowledge()?,
            }
        }
    }

    /// Does what was asked, in its order, as far as that may be done now.
    fn work(&mut self, line: &Line<E>) -> Result<(), Error> {
        let mut replied = false;
        while !self.rest.is_empty() && !self.lent {
            let batch = self.rest.clone();
            let mut requests = Requests::new(&batch, 0);
            let mut ended = Ok(());
            let Self { executor, requests: count, ops, poisoned, receiving, lent, .. } = self;
            executor.batch(&mut |executor| {
                let mut doing =
                    Doing { executor, line, ops, poisoned, receiving, lent, replied, number: 0 };
                let mut clogged = false;
                while !clogged && let Some(request) = requests.next() {
                    *count += 1;
                    doing.number = *count;
                    match request.and_then(|request| doing.request(request)) {
                        Ok(full) => clogged = full,
                        Err(error) => {
                            ended = Err(error);
                            break;
                        }
                    }
                }
                replied = doing.replied;
            });
            self.rest = batch.slice(batch.len() - requests.left()..);
            ended?;
            // A client that takes no answers is not worked for.
            while line.lock().unsent_bytes() > MAX_UNSENT && !self.lent {
                line.lock().flush_within(SLICE)?;
            }
        }
        if replied {
            let mut line = line.lock();
            line.refuse_debts(MAX_OWED)?;
            line.acknowledge()?;
            line.drive()?;
        }
        Ok(())
    }

    /// Waits for a while until the client has what was lent to the connection. What comes meanwhile
    /// is seen to when it has.
    fn lend(&mut self, line: &Line<E>) -> Result<(), Error> {
        let mut line = line.lock();
        if line.unsent_bytes() > 0 {
            line.flush_within(SLICE)?;
        } else if line.is_acked() {
            self.lent = false;
        } else if let Some(item) = line.next_within(SLICE)? {
            if matches!(item, Incoming::Announced(_)) {
                // What the client says of the answer may come behind that. For a link that is lost
                // there is a copy.
                line.copy_unacked();
                self.lent = false;
            }
            self.behind.push_back(item);
            let bytes: usize = self.behind.iter().map(Incoming::byte_len).sum();
            if bytes > MAX_OWED.0 || self.behind.len() > MAX_OWED.1 {
                let what = "requests without end, and an answer that is not acknowledged".into();
                return Err(Error::Protocol { stream: 0, what });
            }
        }
        Ok(())
    }

    /// Where the payload goes that was announced.
    fn landing(&mut self, info: &TensorInfo, line: &Line<E>) -> Result<UploadSink<E::Sink>, Error> {
        let Some(to) = &self.receiving else {
            return Err(Error::Protocol {
                stream: 0,
                what: "bytes that no request has announced".into(),
            });
        };
        if to.bytes != info.storage_len {
            let what = format!("{} bytes, where {} were announced", info.storage_len, to.bytes);
            return Err(Error::Protocol { stream: 0, what });
        }
        let mut sink = Err(OpFailure::new(OpFailureKind::Refused, ""));
        let (storage, offset, bytes, request) = (to.storage, to.offset, to.bytes, to.request);
        self.executor.batch(&mut |executor| sink = executor.sink(storage, offset, bytes));
        Ok(match sink {
            Ok(sink) => UploadSink::Memory(sink),
            Err(failure) => {
                self.not_received(request, storage, failure, line)?;
                UploadSink::Nowhere { bytes, scratch: vec![0; (bytes as usize).min(64 << 10)] }
            }
        })
    }

    /// A payload has come.
    fn landed(&mut self, sink: Option<UploadSink<E::Sink>>, line: &Line<E>) -> Result<(), Error> {
        let full = sink.map(Sink::finish).transpose()?.flatten();
        let Some((to, full)) = self.receiving.take().zip(full) else { return Ok(()) };
        let (mut full, mut done) = (Some(full), Ok(()));
        self.executor.batch(&mut |executor| {
            if let Some(full) = full.take() {
                done = executor.received(to.storage, to.offset, full);
            }
        });
        done.or_else(|failure| self.not_received(to.request, to.storage, failure, line))
    }

    fn not_received(
        &mut self,
        request: u64,
        storage: u64,
        failure: OpFailure,
        line: &Line<E>,
    ) -> Result<(), Error> {
        self.poisoned.insert(storage, (request, failure.clone()));
        let mut failed = Vec::new();
        Reply::Failed { request, failure }.encode(&mut failed);
        line.lock().send_message(&failed)
    }
}

/// A batch that is being done.
struct Doing<'a, E: Executor> {
    executor: &'a mut E,
    line: &'a Line<E>,
    ops: &'a mut Vec<Option<OpFailure>>,
    poisoned: &'a mut HashMap<u64, (u64, OpFailure)>,
    receiving: &'a mut Option<Receiving>,
    lent: &'a mut bool,
    replied: bool,
    number: u64,
}

impl<E: Executor> Doing<'_, E> {
    /// Does it. Whether answers are to go before more is done.
    fn request(&mut self, request: Request) -> Result<bool, Error> {
        self.done(request)?;
        Ok(*self.lent || self.replied && self.line.lock().unsent_bytes() > MAX_UNSENT)
    }

    fn done(&mut self, request: Request) -> Result<(), Error> {
        if self.receiving.is_some() {
            return Err(Error::Protocol {
                stream: 0,
                what: "a request where bytes were announced".into(),
            });
        }
        if self.poisoned.len() > MAX_DEFINED {
            let what = format!("more than {MAX_DEFINED} storages that were never computed");
            return Err(Error::Protocol { stream: 0, what });
        }
        let (done, storage) = match request {
            Request::Call(call) => return self.call(&call),
            Request::Define { op, name } => {
                if op as usize != self.ops.len() {
                    let what = format!("operator {op}, where {} is the next", self.ops.len());
                    return Err(Error::Protocol { stream: 0, what });
                }
                if self.ops.len() >= MAX_DEFINED {
                    let what = format!("more than {MAX_DEFINED} operators");
                    return Err(Error::Protocol { stream: 0, what });
                }
                // Who calls it hears of it.
                self.ops.push(self.executor.define(op, &name).err());
                return Ok(());
            }
            Request::Free { storage } => {
                self.poisoned.remove(&storage);
                self.executor.free(storage);
                return Ok(());
            }
            Request::Sync { reply } => {
                return self.say(&Reply::Answer { reply, values: Vec::new() });
            }
            Request::List { reply } => {
                let told = |(storage, bytes, device, written): (u64, u64, u32, bool)| {
                    let state =
                        if self.poisoned.contains_key(&storage) { 2 } else { i64::from(written) };
                    [storage as i64, bytes as i64, i64::from(device), state].map(Value::Int)
                };
                let values = self.executor.storages().into_iter().flat_map(told).collect();
                return self.say(&Reply::Answer { reply, values });
            }
            Request::Read { reply, tensor } => {
                if let Some((request, failure)) = self.poisoned.get(&tensor.storage).cloned() {
                    return self.say(&Reply::Refused { reply, request, failure });
                }
                return match self.executor.read(&tensor) {
                    Ok(bytes) => self.say_bytes(reply, bytes),
                    Err(failure) => {
                        self.say(&Reply::Refused { reply, request: self.number, failure })
                    }
                };
            }
            Request::Receive { storage, offset, bytes } => {
                *self.receiving = Some(Receiving { request: self.number, storage, offset, bytes });
                return Ok(());
            }
            Request::Create { storage, bytes, device } => {
                (self.executor.create(storage, bytes, device), storage)
            }
            Request::Resize { storage, bytes } => (self.executor.resize(storage, bytes), storage),
            Request::Write { storage, offset, bytes } => {
                (self.executor.write(storage, offset, &bytes), storage)
            }
        };
        done.or_else(|failure| self.fail(failure, &[storage]))
    }

    fn call(&mut self, call: &Call) -> Result<(), Error> {
        let cause = if self.poisoned.is_empty() {
            None
        } else {
            call.tensors().find_map(|tensor| self.poisoned.get(&tensor.storage)).cloned()
        };
        let refused = match (cause, self.ops.get(call.op as usize)) {
            // It was told of when it happened.
            (Some((request, failure)), _) => (request, failure),
            (None, Some(None)) => match self.executor.call(call) {
                Ok(values) => match call.reply {
                    Some(reply) => return self.say(&Reply::Answer { reply, values }),
                    None => return Ok(()),
                },
                Err(failure) => (self.number, failure),
            },
            (None, Some(Some(failure))) => (self.number, failure.clone()),
            (None, None) => {
                let what = format!("operator {}, which was not defined", call.op);
                return Err(Error::Protocol { stream: 0, what });
            }
        };
        let (request, failure) = refused;
        let outputs = call.outputs.iter().filter_map(|output| match output {
            Output::Known => None,
            Output::New { tensor, .. } => Some(tensor.storage),
            Output::Asked { storage } => Some(*storage),
        });
        for storage in outputs.chain(self.executor.writes(call)) {
            self.poisoned.entry(storage).or_insert_with(|| (request, failure.clone()));
        }
        match call.reply {
            Some(reply) => self.say(&Reply::Refused { reply, request, failure }),
            None if request == self.number => self.say(&Reply::Failed { request, failure }),
            None => Ok(()),
        }
    }

    fn fail(&mut self, failure: OpFailure, storages: &[u64]) -> Result<(), Error> {
        for &storage in storages {
            self.poisoned.insert(storage, (self.number, failure.clone()));
        }
        self.say(&Reply::Failed { request: self.number, failure })
    }

    fn say(&mut self, reply: &Reply) -> Result<(), Error> {
        self.replied = true;
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        self.line.lock().send_message(&bytes)
    }

    fn say_bytes(&mut self, reply: u64, bytes: Bytes) -> Result<(), Error> {
        if bytes.len() <= MAX_INLINE {
            return self.say(&Reply::Bytes { reply, bytes: bytes.into() });
        }
        self.say(&Reply::Tensor { reply })?;
        let info = TensorInfo::new("", Dtype::U8, [bytes.len() as u64])?;
        *self.lent = true;
        self.line.lock().send_tensor(info, bytes)
    }
}
