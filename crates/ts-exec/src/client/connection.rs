// SPDX-License-Identifier: MIT OR Apache-2.0
//! The receiving half of a client: replies, failures, and the link that they arrive on.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use super::options::ClientOptions;
use crate::channel::{Channel, Hello, Incoming};
use crate::codec::Decoder;
use crate::reply::{OpFailure, Reply};
use crate::value::Value;
use ts_remote::{Error, Sink};

/// How long the client waits for a reply before it sends a SYNC, to detect a lost reply.
const PROBE_AFTER: Duration = Duration::from_secs(1);

/// The answer to a request that has a reply.
#[derive(Debug)]
pub enum Answer<S> {
    /// The results of an operator, or of another request. Empty for
    /// [`Request::Sync`](crate::Request::Sync).
    Values(Vec<Value>),
    /// The elements of a tensor, in row-major order, for a [`Request::Read`](crate::Request::Read)
    /// that was submitted without memory for them. This works only for at most 32 KiB of elements.
    /// If there are more, the session ends, so use [`Client::read`](crate::Client::read).
    Bytes(Vec<u8>),
    /// The memory that was passed to [`Client::read`](crate::Client::read), filled with the
    /// elements of the tensor.
    Memory(S),
}

/// The reason why a wait ended without an answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum WaitError {
    /// The session has ended.
    #[error(transparent)]
    Ended(#[from] Error),
    /// A request failed. It is the awaited request, or another request whose failure has not been
    /// reported yet.
    #[error("{failure}")]
    Failed {
        /** The number of the failed request, from `Submitted::request`. */
        request: u64,
        /** Why the request failed. */
        failure: OpFailure,
        /** How many other failures had not been reported yet. They are dropped. */
        others: usize,
    },
}

/// The connection of a session, and the replies that it has received.
pub(super) struct ConnectionState<S> {
    pub(super) channel: Channel<S>,
    /// The replies that callers wait for, by reply number.
    awaited: HashMap<u64, Awaited>,
    /// The answers that have arrived and were not taken yet, by reply number.
    answers: HashMap<u64, Outcome<S>>,
    /// The memory for the elements of tensors, by reply number.
    sinks: HashMap<u64, S>,
    /// The reply whose elements are the next tensor of the stream.
    incoming_reply: Option<u64>,
    /// The failures that have not been reported, with the numbers of their requests.
    failures: VecDeque<(u64, OpFailure)>,
    /// The error that ended the session, if it has ended.
    pub(super) ended: Option<Error>,
    pub(super) reconnects: u64,
    pub(super) downloaded_bytes: u64,
}

/// An answer, or the number of the failed request and its failure.
pub(super) type Outcome<S> = Result<Answer<S>, (u64, OpFailure)>;

/// A reply that a caller waits for.
struct Awaited {
    since: Instant,
    /// The reply number of the SYNC that was sent after the request. If the reply to the SYNC
    /// arrives first, the awaited reply is lost.
    probe: Option<u64>,
}

/// The next step for a reply that has not arrived.
pub(super) enum Probe {
    /// Keep waiting.
    Wait,
    /// Send a SYNC, and pass the number of its reply to [`ConnectionState::set_probe`].
    Send,
    /// End the session: a later reply has arrived, so this reply was lost.
    Lost,
}

impl<S: Sink + Send> ConnectionState<S> {
    /// Creates the state of a session that has not connected yet.
    pub(super) fn new() -> Self {
        Self {
            channel: Channel::new(),
            awaited: HashMap::new(),
            answers: HashMap::new(),
            sinks: HashMap::new(),
            incoming_reply: None,
            failures: VecDeque::new(),
            ended: None,
            reconnects: 0,
            downloaded_bytes: 0,
        }
    }

    /// Opens a link for the session, and continues on it. Blocks.
    pub(super) fn connect(
        &mut self,
        options: &ClientOptions<S>,
        session: [u8; 16],
    ) -> Result<(), Error> {
        let mut link = (options.dial)()?;
        let hello = Hello { session, received: self.channel.received() };
        let (stream, peer) = hello.exchange(&mut link)?;
        self.channel.attach(link, stream, peer.received)
    }

    /// Handles the items that were already received on the link, and then drops the link.
    ///
    /// The memory of an interrupted answer is kept, because its elements will be sent again.
    pub(super) fn detach(&mut self) {
        while let Ok(Some(item)) = self.channel.next_buffered() {
            if self.handle(item).is_err() {
                break;
            }
        }
        let Some(mut link) = self.channel.detach() else { return };
        if let (Some(reply), Some(sink)) =
            (self.incoming_reply, link.connection().take_sinks().pop())
        {
            self.sinks.insert(reply, sink);
        }
    }

    /// Adds memory for the elements that `reply` will deliver.
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] if the server has answered already, with unknown elements.
    pub(super) fn add_sink(&mut self, reply: u64, sink: S) -> Result<(), Error> {
        if self.answers.contains_key(&reply) {
            let what = format!("the server sent reply {reply} before it was requested");
            return Err(Error::Protocol { stream: 0, what });
        }
        self.sinks.insert(reply, sink);
        Ok(())
    }

    pub(super) fn handle(&mut self, item: Incoming<S>) -> Result<(), Error> {
        let error = |what: String| Error::Protocol { stream: 0, what };
        let no_reply = || error("the server sent a tensor without a TENSOR reply".into());
        match item {
            Incoming::Message(bytes) => {
                let mut from = Decoder::new(&bytes, 0);
                while !from.is_empty() {
                    self.handle_reply(Reply::decode(&mut from)?)?;
                }
                Ok(())
            }
            Incoming::Announced(info) => {
                let reply = self.incoming_reply.ok_or_else(no_reply)?;
                let sink = self.sinks.remove(&reply).ok_or_else(|| {
                    error(format!(
                        "the server sent a tensor as reply {reply}, but no `Client::read` waits \
                         for this reply"
                    ))
                })?;
                check_len(info.storage_len, &sink)?;
                self.channel.accept(sink)
            }
            Incoming::Tensor(info, sink) => {
                let reply = self.incoming_reply.take().ok_or_else(no_reply)?;
                let sink = sink.ok_or_else(|| {
                    error(format!("the server sent an empty tensor as reply {reply}"))
                })?;
                self.downloaded_bytes += info.storage_len;
                self.answers.insert(reply, Ok(Answer::Memory(sink)));
                Ok(())
            }
            Incoming::Finished => {
                Err(Error::Closed { reason: "the server has ended the session".into() })
            }
        }
    }

    fn handle_reply(&mut self, reply: Reply) -> Result<(), Error> {
        let (reply, answer) = match reply {
            Reply::Answer { reply, values } => (reply, Ok(Answer::Values(values))),
            Reply::Bytes { reply, bytes } => {
                self.downloaded_bytes += bytes.len() as u64;
                let answer = match self.sinks.remove(&reply) {
                    Some(mut sink) => {
                        check_len(bytes.len() as u64, &sink)?;
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
                self.incoming_reply = Some(reply);
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

    /// Takes the first failure that has not been reported, and drops the others.
    pub(super) fn take_failure(&mut self) -> Option<WaitError> {
        let others = self.failures.len().saturating_sub(1);
        let (request, failure) = self.failures.pop_front()?;
        self.failures.clear();
        Some(WaitError::Failed { request, failure, others })
    }

    /// Takes the answer to `reply`, if it has arrived. If there is an unreported failure, drops the
    /// answer and returns the failure.
    pub(super) fn take_answer(&mut self, reply: u64) -> Option<Result<Answer<S>, WaitError>> {
        if !self.answers.contains_key(&reply) {
            return None;
        }
        if let Some(failure) = self.take_failure() {
            self.answers.remove(&reply);
            return Some(Err(failure));
        }
        let answer = self.answers.remove(&reply)?;
        Some(answer.map_err(|(request, failure)| WaitError::Failed { request, failure, others: 0 }))
    }

    /// Takes the answers that have arrived for `forgotten` replies, and removes these replies from
    /// the set.
    pub(super) fn take_forgotten(
        &mut self,
        forgotten: &mut HashSet<u64>,
    ) -> Vec<(u64, Outcome<S>)> {
        let arrived: Vec<_> =
            forgotten.iter().filter_map(|reply| self.answers.remove_entry(reply)).collect();
        for (reply, _) in &arrived {
            forgotten.remove(reply);
            self.awaited.remove(reply);
        }
        arrived
    }

    /// Records that a caller waits for `reply`, which has not arrived. Returns the next step.
    pub(super) fn probe(&mut self, reply: u64) -> Probe {
        let awaited = self
            .awaited
            .entry(reply)
            .or_insert_with(|| Awaited { since: Instant::now(), probe: None });
        match awaited.probe {
            None if awaited.since.elapsed() >= PROBE_AFTER => Probe::Send,
            Some(probe) if self.answers.contains_key(&probe) => Probe::Lost,
            _ => Probe::Wait,
        }
    }

    pub(super) fn set_probe(&mut self, reply: u64, probe: u64) {
        if let Some(awaited) = self.awaited.get_mut(&reply) {
            awaited.probe = Some(probe);
        }
    }

    /// Ends the wait for `reply`. Returns the reply number of its SYNC, if a SYNC was sent.
    pub(super) fn end_wait(&mut self, reply: u64) -> Option<u64> {
        self.awaited.remove(&reply).and_then(|awaited| awaited.probe)
    }
}

/// Checks that a tensor of `got` bytes has the length of `sink`.
///
/// # Errors
/// Returns [`Error::Protocol`] if the lengths differ.
fn check_len(got: u64, sink: &impl Sink) -> Result<(), Error> {
    let expected = sink.byte_len();
    if got == expected {
        return Ok(());
    }
    let what = format!(
        "the server sent a tensor of {got} bytes (expected {expected} bytes, the length of the \
         client's memory)"
    );
    Err(Error::Protocol { stream: 0, what })
}
