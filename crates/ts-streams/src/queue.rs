// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is submitted to streams that have no driver below them, and when it may run. Runs nothing
//! itself: [`CpuDevice`] lets threads take what is ready, [`SimDevice`] whoever asks.
//!
//! [`CpuDevice`]: crate::CpuDevice
//! [`SimDevice`]: crate::SimDevice

use std::any::Any;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, Weak};

use crate::memory::Transfer;
use crate::metrics::Counters;
use crate::race::Clock;
use crate::sync::{Condvar, Mutex, thread_local};
use crate::{Error, HostFn, Status, StreamId};

thread_local! {
    /// Whether this thread is inside work of a stream.
    #[allow(clippy::missing_const_for_thread_local)] // not with loom's and shuttle's
    static IN_HOST_FN: Cell<bool> = Cell::new(false);
}

/// Whether this thread may wait for streams, which work of a stream may not.
///
/// # Errors
/// [`Error::WaitInHostFn`].
pub fn may_wait() -> Result<(), Error> {
    if IN_HOST_FN.with(Cell::get) { Err(Error::WaitInHostFn) } else { Ok(()) }
}

/// A name that no other stream of this process has.
pub(crate) fn next_stream_id() -> StreamId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    StreamId(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// One point on a stream, that events stand for and other streams wait for.
#[derive(Debug)]
pub(crate) struct Point {
    outcome: OnceLock<Result<u64, Error>>,
    parked: Mutex<Vec<Parked>>,
    reached: Condvar,
    /// Who must be driven for it to be reached.
    pub(crate) owner: Weak<dyn Owner>,
    /// What happened before it, where races are looked for.
    pub(crate) history: Clock,
}

/// A stream that waits for a point.
#[derive(Debug, Clone)]
pub(crate) struct Parked {
    owner: Weak<dyn Owner>,
    stream: StreamId,
}

/// A device whose streams are queues.
pub(crate) trait Owner: std::fmt::Debug + Send + Sync {
    /// A point is reached that this stream waited for. What is left to do then is the caller's.
    fn wake(&self, stream: StreamId) -> Effects;

    /// What was over on this stream is dropped, or panicked; see [`Effects::settle`]. What is left
    /// to do then is the caller's.
    fn dropped(&self, stream: StreamId, outcome: Result<(), String>) -> Effects;

    /// Gets on with its work, or with what that waits for, where nobody else does; whether
    /// something was done. `asked` are those that are at it already.
    fn drive(&self, asked: &mut Vec<*const ()>) -> bool;
}

impl Point {
    pub(crate) fn new(owner: Weak<dyn Owner>, history: Clock) -> Self {
        Self {
            outcome: OnceLock::new(),
            parked: Mutex::default(),
            reached: Condvar::new(),
            owner,
            history,
        }
    }

    /// When it was reached, in nanoseconds, or why it never is; `None` before.
    pub(crate) fn outcome(&self) -> Option<&Result<u64, Error>> {
        self.outcome.get()
    }

    pub(crate) fn status(&self) -> Result<Status, Error> {
        match self.outcome() {
            None => Ok(Status::Pending),
            Some(Ok(_)) => Ok(Status::Ready),
            Some(Err(error)) => Err(error.clone()),
        }
    }

    fn reach(&self, outcome: Result<u64, Error>, effects: &mut Effects) {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.outcome.set(outcome);
        effects.woken.append(&mut parked);
        self.reached.notify_all();
    }

    /// Blocks until it is reached by what others do.
    pub(crate) fn block(&self) -> Result<u64, Error> {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = self.outcome.get() {
                return outcome.clone();
            }
            parked = self.reached.wait(parked).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Its outcome; without one, `who` is woken when there is one.
    fn outcome_or_park(&self, who: &Parked) -> Option<Result<u64, Error>> {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = self.outcome.get().cloned();
        if outcome.is_none() {
            parked.push(who.clone());
        }
        outcome
    }
}

/// What is done while nothing else happens on its stream.
#[derive(Debug)]
pub(crate) enum Work {
    Transfer(Transfer),
    HostFn(HostFn),
}

impl Work {
    /// # Errors
    /// What its panic said.
    pub(crate) fn run(self) -> Result<(), String> {
        match self {
            Work::Transfer(transfer) => {
                transfer.run();
                Ok(())
            }
            Work::HostFn(HostFn { run, .. }) => inside_work(run),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Op {
    Work(Work),
    Record(Arc<Point>),
    /// Drops something in its turn.
    Release(#[expect(dead_code, reason = "it is there to be dropped")] Released),
    /// Whether what waits fails with what it waits for.
    Wait(Arc<Point>, Fails),
}

/// What a stream is to drop.
pub(crate) struct Released(Box<dyn Any + Send>);

impl Released {
    pub(crate) fn new(what: impl Send + 'static) -> Self {
        Self(Box::new(what))
    }
}

impl std::fmt::Debug for Released {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Released({:?})", (*self.0).type_id())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fails {
    Along,
    ByItself,
}

/// What is left to do once the lock is released: other locks may be taken for it, and code of
/// others runs.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Effects {
    woken: Vec<Parked>,
    /// Streams with what is over on them: memory that they give back, work that is not run.
    /// Whatever it is made of is dropped before the stream goes on, so that who waits for the
    /// stream finds it gone.
    over: Vec<(Parked, Vec<Op>)>,
    /// How many streams have work that did not have before.
    pub(crate) ready: usize,
}

impl Effects {
    /// With no lock held. Not by recursion: chains of streams that wait for each other can be long.
    pub(crate) fn settle(self) {
        let mut left = vec![self];
        while let Some(Effects { woken, over, .. }) = left.pop() {
            for Parked { owner, stream } in woken {
                left.extend(owner.upgrade().map(|owner| owner.wake(stream)));
            }
            for (Parked { owner, stream }, over) in over {
                // It is made of anything, the last handle to a device too, and this may be a thread
                // of that device.
                let outcome = inside_work(|| drop(over));
                left.extend(owner.upgrade().map(|owner| owner.dropped(stream, outcome)));
            }
        }
    }
}

/// Does something as work of a stream, which does not wait.
///
/// # Errors
/// What its panic said.
fn inside_work(work: impl FnOnce()) -> Result<(), String> {
    let outer = IN_HOST_FN.with(|inside| inside.replace(true));
    let result = catch_unwind(AssertUnwindSafe(work));
    IN_HOST_FN.with(|inside| inside.set(outer));
    result.map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing to do, or waiting for a point.
    Still,
    /// Its first operation could run.
    Ready,
    /// Work that was submitted then is being done.
    Running { submitted_ns: u64 },
    /// What is over is being dropped.
    Dropping,
}

#[derive(Debug)]
struct Queue {
    level: i32,
    ops: VecDeque<(Op, u64)>,
    state: State,
    failed: Option<Error>,
    /// How many operations it was given, and the last of them that is not to be run.
    submitted: u64,
    skipped_until: u64,
    /// When the last operation ended.
    at_ns: u64,
    counters: Arc<Counters>,
    /// Nobody has a handle to it any more.
    closed: bool,
}

/// A stream with work that could run: the most urgent first, then in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ready {
    level: i32,
    turn: u64,
    pub(crate) stream: StreamId,
}

/// The streams of a device.
#[derive(Debug)]
pub(crate) struct Queues {
    owner: Weak<dyn Owner>,
    queues: BTreeMap<StreamId, Queue>,
    ready: BTreeSet<Ready>,
    turn: u64,
}

impl Queues {
    pub(crate) fn new(owner: Weak<dyn Owner>) -> Self {
        Self { owner, queues: BTreeMap::new(), ready: BTreeSet::new(), turn: 0 }
    }

    pub(crate) fn open(&mut self, level: i32) -> (StreamId, Arc<Counters>) {
        let (id, counters) = (next_stream_id(), Arc::new(Counters::default()));
        let queue = Queue {
            level,
            ops: VecDeque::new(),
            state: State::Still,
            failed: None,
            submitted: 0,
            skipped_until: 0,
            at_ns: 0,
            counters: Arc::clone(&counters),
            closed: false,
        };
        self.queues.insert(id, queue);
        (id, counters)
    }

    /// Nobody will submit to it any more; it is forgotten when its work is done.
    pub(crate) fn close(&mut self, stream: StreamId) {
        let queue = self.queue(stream);
        queue.closed = true;
        if queue.ops.is_empty() && queue.state == State::Still {
            self.queues.remove(&stream);
        }
    }

    /// A stream that failed takes points, which fail with it, and what it is to drop.
    ///
    /// # Errors
    /// Why the stream failed, and what it does not take: to be dropped without a lock, whatever it
    /// is made of.
    pub(crate) fn submit(
        &mut self,
        stream: StreamId,
        op: Op,
        now_ns: u64,
    ) -> Result<Effects, Box<(Error, Op)>> {
        let queue = self.queue(stream);
        let taken = matches!(op, Op::Record(_) | Op::Release(_));
        if let (Some(error), false) = (&queue.failed, taken) {
            return Err(Box::new((error.clone(), op)));
        }
        queue.counters.submitted();
        queue.submitted += 1;
        queue.ops.push_back((op, now_ns));
        Ok(if queue.state == State::Still && queue.ops.len() == 1 {
            queue.at_ns = queue.at_ns.max(now_ns);
            self.proceed(stream)
        } else {
            Effects::default()
        })
    }

    /// Passes points, up to work that could run, a point that is not reached, or what is to be
    /// dropped first. Also a stream that failed waits for those, lest what comes after it is
    /// thought to come after them.
    pub(crate) fn proceed(&mut self, stream: StreamId) -> Effects {
        let mut effects = Effects::default();
        let who = Parked { owner: Weak::clone(&self.owner), stream };
        // It may be woken when it is gone.
        let Some(queue) = self.queues.get_mut(&stream) else { return effects };
        if queue.state != State::Still {
            return effects;
        }
        let mut over = Vec::new();
        while let Some((op, _)) = queue.ops.front() {
            let number = queue.submitted - queue.ops.len() as u64 + 1;
            match op {
                Op::Release(_) => {}
                Op::Work(_) if queue.failed.is_some() || number <= queue.skipped_until => {}
                _ if !over.is_empty() => break,
                Op::Wait(point, fails) => match (point.outcome_or_park(&who), fails) {
                    (None, _) => return effects,
                    (Some(Ok(at_ns)), _) => queue.at_ns = queue.at_ns.max(at_ns),
                    (Some(Err(error)), Fails::Along) if number > queue.skipped_until => {
                        queue.failed.get_or_insert(error);
                    }
                    (Some(Err(_)), _) => {}
                },
                Op::Work(_) => {
                    queue.state = State::Ready;
                    self.turn += 1;
                    self.ready.insert(Ready { level: queue.level, turn: self.turn, stream });
                    effects.ready += 1;
                    return effects;
                }
                Op::Record(_) => {}
            }
            let (op, submitted_ns) = queue.ops.pop_front().expect("just seen");
            // Counted before anybody hears of it.
            queue.counters.completed(queue.at_ns.saturating_sub(submitted_ns));
            match op {
                Op::Record(point) => {
                    point.reach(queue.failed.clone().map_or(Ok(queue.at_ns), Err), &mut effects);
                }
                Op::Wait(..) => {}
                Op::Release(_) | Op::Work(_) => over.push(op),
            }
        }
        if !over.is_empty() {
            queue.state = State::Dropping;
            effects.over.push((who, over));
        } else if queue.closed {
            self.queues.remove(&stream);
        }
        effects
    }

    /// What [`proceed`](Self::proceed) found to be over is dropped.
    pub(crate) fn dropped(&mut self, stream: StreamId, outcome: Result<(), String>) -> Effects {
        let queue = self.queue(stream);
        debug_assert_eq!(queue.state, State::Dropping, "only then is there something to drop");
        queue.state = State::Still;
        if let Err(what) = outcome {
            queue.failed.get_or_insert(Error::Failed { stream, what });
        }
        self.proceed(stream)
    }

    /// Streams that have work to run, the most urgent first, and when their last operation ended.
    pub(crate) fn ready(&self) -> impl Iterator<Item = (Ready, u64)> + '_ {
        self.ready.iter().map(|ready| (*ready, self.queues[&ready.stream].at_ns))
    }

    /// Takes the work of one that is ready.
    pub(crate) fn take(&mut self, ready: Ready) -> Work {
        assert!(self.ready.remove(&ready), "it is ready");
        let queue = self.queue(ready.stream);
        match queue.ops.pop_front() {
            Some((Op::Work(work), submitted_ns)) => {
                queue.state = State::Running { submitted_ns };
                work
            }
            other => unreachable!("work is what makes a stream ready: {other:?}"),
        }
    }

    /// Work that was taken is done.
    pub(crate) fn complete(
        &mut self,
        stream: StreamId,
        outcome: Result<(), String>,
        now_ns: u64,
    ) -> Effects {
        let queue = self.queue(stream);
        let State::Running { submitted_ns } = std::mem::replace(&mut queue.state, State::Still)
        else {
            unreachable!("it was taken")
        };
        queue.at_ns = queue.at_ns.max(now_ns);
        if let Err(what) = outcome {
            queue.failed = Some(Error::Failed { stream, what });
        }
        queue.counters.completed(now_ns.saturating_sub(submitted_ns));
        self.proceed(stream)
    }

    /// Whether all that was submitted to a stream is over.
    ///
    /// # Errors
    /// Why it failed, once it is.
    pub(crate) fn status(&self, stream: StreamId) -> Result<Status, Error> {
        let queue = &self.queues[&stream];
        if !queue.ops.is_empty() || queue.state != State::Still {
            return Ok(Status::Pending);
        }
        self.failure(stream).map(|()| Status::Ready)
    }

    /// # Errors
    /// Why a stream takes nothing.
    pub(crate) fn failure(&self, stream: StreamId) -> Result<(), Error> {
        self.queues[&stream].failed.clone().map_or(Ok(()), Err)
    }

    /// Lets a stream that failed take work again. What it was given before is not run.
    pub(crate) fn take_error(&mut self, stream: StreamId) -> Option<Error> {
        let queue = self.queue(stream);
        let error = queue.failed.take()?;
        queue.skipped_until = queue.submitted;
        Some(error)
    }

    /// All of them.
    pub(crate) fn streams(&self) -> Vec<StreamId> {
        self.queues.keys().copied().collect()
    }

    /// The points that streams wait for.
    pub(crate) fn awaited(&self) -> Vec<Arc<Point>> {
        let first = |queue: &Queue| match queue.ops.front() {
            Some((Op::Wait(point, _), _)) => Some(Arc::clone(point)),
            _ => None,
        };
        self.queues.values().filter_map(first).collect()
    }

    fn queue(&mut self, stream: StreamId) -> &mut Queue {
        self.queues.get_mut(&stream).expect("a stream is there until its last handle is gone")
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::sync::thread;

    /// The least of a device that threads share.
    #[derive(Debug)]
    struct Host(Mutex<Queues>);

    impl Owner for Host {
        fn wake(&self, stream: StreamId) -> Effects {
            self.0.lock().unwrap().proceed(stream)
        }

        fn dropped(&self, stream: StreamId, outcome: Result<(), String>) -> Effects {
            self.0.lock().unwrap().dropped(stream, outcome)
        }

        fn drive(&self, _: &mut Vec<*const ()>) -> bool {
            false
        }
    }

    impl Host {
        fn submit(&self, stream: StreamId, op: Op) {
            let submitted = self.0.lock().unwrap().submit(stream, op, 0);
            submitted.map_err(|_| "refused").unwrap().settle();
        }

        /// Does the work that is ready, if there is some.
        fn work(&self) -> Option<StreamId> {
            let mut queues = self.0.lock().unwrap();
            let (ready, _) = queues.ready().next()?;
            let work = queues.take(ready);
            drop(queues);
            let outcome = work.run();
            let effects = self.0.lock().unwrap().complete(ready.stream, outcome, 0);
            effects.settle();
            Some(ready.stream)
        }
    }

    fn work() -> Op {
        Op::Work(Work::HostFn(HostFn::new(|| ())))
    }

    fn host() -> Arc<Host> {
        Arc::new_cyclic(|this: &Weak<Host>| {
            Host(Mutex::new(Queues::new(Weak::clone(this) as Weak<dyn Owner>)))
        })
    }

    /// One thread does the work before a point while another has a stream of another device wait
    /// for it, and itself: whichever is first, the stream has its work ready in the end, and nobody
    /// waits for what is over. Loom tries all orders with up to three preemptions.
    #[test]
    fn whoever_waits_for_a_point_hears_of_it() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let (first, second) = (host(), host());
            let owner: Weak<dyn Owner> = Arc::downgrade(&first) as Weak<dyn Owner>;
            let point = Arc::new(Point::new(owner, Clock::new()));
            let [earlier, later] = [&first, &second].map(|host| host.0.lock().unwrap().open(0).0);
            first.submit(earlier, work());
            first.submit(earlier, Op::Record(Arc::clone(&point)));
            let worker = Arc::clone(&first);
            let thread = thread::spawn(move || assert_eq!(worker.work(), Some(earlier)));
            second.submit(later, Op::Wait(Arc::clone(&point), Fails::Along));
            second.submit(later, work());
            assert_eq!(point.block(), Ok(0));
            thread.join().unwrap();
            assert_eq!(second.work(), Some(later));
            assert_eq!(second.0.lock().unwrap().status(later), Ok(Status::Ready));
        });
    }

    /// One thread finds something over and drops it, without the lock; another comes behind it on
    /// the same stream in the meantime, and is not told that all is done before it is gone.
    #[test]
    fn what_is_over_is_gone_before_who_waits_behind_it_hears() {
        struct Gone(Arc<loom::sync::atomic::AtomicBool>);
        impl Drop for Gone {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let host = host();
            let stream = host.0.lock().unwrap().open(0).0;
            let gone = Arc::new(loom::sync::atomic::AtomicBool::new(false));
            host.submit(stream, work());
            host.submit(stream, Op::Release(Released::new(Gone(Arc::clone(&gone)))));
            let worker = Arc::clone(&host);
            let thread = thread::spawn(move || assert_eq!(worker.work(), Some(stream)));
            let owner: Weak<dyn Owner> = Arc::downgrade(&host) as Weak<dyn Owner>;
            let point = Arc::new(Point::new(owner, Clock::new()));
            host.submit(stream, Op::Record(Arc::clone(&point)));
            assert_eq!(point.block(), Ok(0));
            assert!(gone.load(Ordering::Relaxed));
            thread.join().unwrap();
            assert_eq!(host.0.lock().unwrap().status(stream), Ok(Status::Ready));
        });
    }
}
