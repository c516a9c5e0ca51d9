// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operation queues of streams that no driver manages. A queue determines when each operation
//! may run.
//!
//! This module starts no threads. On a [`CpuDevice`], the threads of the device take ready work
//! from the queues. On a [`SimDevice`], the caller that waits or queries takes the work.
//!
//! [`CpuDevice`]: crate::CpuDevice
//! [`SimDevice`]: crate::SimDevice

use std::any::Any;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, PoisonError, Weak};

use crate::memory::Transfer;
use crate::metrics::Counters;
use crate::race::Clock;
use crate::sync::{Condvar, Mutex, thread_local};
use crate::{Error, HostFn, Status, StreamId};

thread_local! {
    /// Whether this thread is running a host function or a destructor for a stream.
    #[allow(clippy::missing_const_for_thread_local)] // loom and shuttle do not accept `const`
    static IN_HOST_FN: Cell<bool> = Cell::new(false);
}

/// Checks that this thread may block on a stream.
///
/// # Errors
/// Returns [`Error::WaitInHostFn`] inside a host function, and in destructors that a stream runs.
pub fn check_may_block() -> Result<(), Error> {
    if IN_HOST_FN.with(Cell::get) { Err(Error::WaitInHostFn) } else { Ok(()) }
}

/// A recorded point on a stream. Events refer to points, and other streams wait for them.
#[derive(Debug)]
pub(crate) struct Point {
    outcome: OnceLock<Result<u64, Error>>,
    waiters: Mutex<Vec<Waiter>>,
    reached: Condvar,
    /// The device of the stream on which the point was recorded.
    pub(crate) owner: Weak<dyn Owner>,
    /// The operations that happened before the point. Used only for race detection.
    pub(crate) history: Clock,
}

/// A stream that waits for a point.
#[derive(Debug, Clone)]
pub(crate) struct Waiter {
    owner: Weak<dyn Owner>,
    stream: StreamId,
}

/// A device whose streams are managed by [`Queues`].
pub(crate) trait Owner: std::fmt::Debug + Send + Sync {
    /// Continues a stream after the point that it waited for was reached. The caller must apply the
    /// result; see [`Effects::apply`].
    fn wake(&self, stream: StreamId) -> Effects;

    /// Continues a stream after its finished operations were dropped. If a destructor panicked,
    /// `outcome` contains the message. The caller must apply the result; see [`Effects::apply`].
    fn dropped(&self, stream: StreamId, outcome: Result<(), String>) -> Effects;

    /// Runs one operation of this device, or of a device that it waits for, on the calling thread.
    /// Returns whether there was one. Skips devices in `visited`, and adds each device that was
    /// tried to `visited`. A device with threads returns `false`.
    fn drive(&self, visited: &mut Vec<*const ()>) -> bool;
}

impl Point {
    pub(crate) fn new(owner: Weak<dyn Owner>, history: Clock) -> Self {
        Self {
            outcome: OnceLock::new(),
            waiters: Mutex::default(),
            reached: Condvar::new(),
            owner,
            history,
        }
    }

    /// Returns the time at which the point was reached, in nanoseconds of the device's clock.
    /// Returns an error if the work before the point failed, and `None` if the point is not reached
    /// yet.
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
        let mut waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.outcome.set(outcome);
        effects.woken.append(&mut waiters);
        self.reached.notify_all();
    }

    /// Blocks until another thread reaches the point, and returns the outcome.
    pub(crate) fn block(&self) -> Result<u64, Error> {
        let mut waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = self.outcome.get() {
                return outcome.clone();
            }
            waiters = self.reached.wait(waiters).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the outcome. If there is none yet, registers `waiter` to be woken.
    fn outcome_or_register(&self, waiter: &Waiter) -> Option<Result<u64, Error>> {
        let mut waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = self.outcome.get().cloned();
        if outcome.is_none() {
            waiters.push(waiter.clone());
        }
        outcome
    }
}

/// A copy, fill or host function. A stream runs one at a time.
#[derive(Debug)]
pub(crate) enum Work {
    Transfer(Transfer),
    HostFn(HostFn),
}

impl Work {
    /// Runs the work on this thread.
    ///
    /// # Errors
    /// Returns the message of a panic.
    pub(crate) fn run(self) -> Result<(), String> {
        match self {
            Work::Transfer(transfer) => {
                transfer.run();
                Ok(())
            }
            Work::HostFn(HostFn { run, .. }) => run_as_work(run),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Op {
    Work(Work),
    Record(Arc<Point>),
    /// Drops a value in stream order.
    Release(#[expect(dead_code, reason = "stored only to be dropped")] Released),
    /// Waits for a point. [`OnFailure`] determines whether the stream fails if the work before the
    /// point failed.
    Wait(Arc<Point>, OnFailure),
}

/// A value that a stream drops after all earlier operations.
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
pub(crate) enum OnFailure {
    Propagate,
    Ignore,
}

/// Actions to run after the lock of the queues is released, because they take other locks and run
/// code of callers.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Effects {
    woken: Vec<Waiter>,
    /// Streams with their finished operations: memory to free, and skipped work. A stream continues
    /// only after its operations are dropped, so that a wait for the stream also waits for the
    /// drop.
    finished: Vec<(Waiter, Vec<Op>)>,
    /// Number of streams that became ready.
    pub(crate) ready: usize,
}

impl Effects {
    /// Wakes streams and drops finished operations. The caller must not hold a lock. The function
    /// does not recurse, because chains of streams that wait for each other can be long.
    pub(crate) fn apply(self) {
        let mut left = vec![self];
        while let Some(Effects { woken, finished, .. }) = left.pop() {
            for Waiter { owner, stream } in woken {
                left.extend(owner.upgrade().map(|owner| owner.wake(stream)));
            }
            for (Waiter { owner, stream }, finished) in finished {
                // A destructor must not block here: it may drop the last handle to the device that
                // owns this thread.
                let outcome = run_as_work(|| drop(finished));
                left.extend(owner.upgrade().map(|owner| owner.dropped(stream, outcome)));
            }
        }
    }
}

/// Runs `work` as work of a stream: [`check_may_block`] returns an error on this thread meanwhile.
///
/// # Errors
/// Returns the message of a panic.
fn run_as_work(work: impl FnOnce()) -> Result<(), String> {
    let outer = IN_HOST_FN.with(|inside| inside.replace(true));
    let result = catch_unwind(AssertUnwindSafe(work));
    IN_HOST_FN.with(|inside| inside.set(outer));
    result.map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        text.or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "work panicked without a message".into())
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueueState {
    /// Empty, or waiting for a point.
    Idle,
    /// The first operation can run.
    Ready,
    /// Work that was submitted at `submitted_ns` is running.
    Running { submitted_ns: u64 },
    /// A thread is dropping finished operations.
    Dropping,
}

#[derive(Debug)]
struct Queue {
    level: i32,
    ops: VecDeque<(Op, u64)>,
    state: QueueState,
    failed: Option<Error>,
    /// Number of operations submitted.
    submitted: u64,
    /// Work up to this operation number is skipped, because it was submitted before `take_error`.
    skipped_until: u64,
    /// The error that [`take_error`](Queues::take_error) returned last.
    taken: Option<Error>,
    /// Earliest time at which the next operation can start, in nanoseconds of the device's clock.
    ended_ns: u64,
    counters: Arc<Counters>,
    /// Whether the last handle was dropped.
    closed: bool,
}

/// A stream with work that can run. Sorts by priority level, then by the order in which streams
/// became ready.
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
        let (id, counters) = (StreamId::unique(), Arc::new(Counters::default()));
        let queue = Queue {
            level,
            ops: VecDeque::new(),
            state: QueueState::Idle,
            failed: None,
            submitted: 0,
            skipped_until: 0,
            taken: None,
            ended_ns: 0,
            counters: Arc::clone(&counters),
            closed: false,
        };
        self.queues.insert(id, queue);
        (id, counters)
    }

    /// Marks a stream as closed after its last handle was dropped. The stream is removed when its
    /// work is done.
    pub(crate) fn close(&mut self, stream: StreamId) {
        let queue = self.queue(stream);
        queue.closed = true;
        if queue.ops.is_empty() && queue.state == QueueState::Idle {
            self.queues.remove(&stream);
        }
    }

    /// Submits an operation. A stream that has failed still accepts releases and records. Such
    /// records fail with the same error.
    ///
    /// # Errors
    /// Returns the stream's error and the refused operation. The caller must release the lock
    /// before it drops the operation.
    pub(crate) fn submit(
        &mut self,
        stream: StreamId,
        op: Op,
        now_ns: u64,
    ) -> Result<Effects, Box<(Error, Op)>> {
        let queue = self.queue(stream);
        let always_accepted = matches!(op, Op::Record(_) | Op::Release(_));
        if let (Some(error), false) = (&queue.failed, always_accepted) {
            return Err(Box::new((error.clone(), op)));
        }
        queue.counters.submitted();
        queue.submitted += 1;
        queue.ops.push_back((op, now_ns));
        Ok(if queue.state == QueueState::Idle && queue.ops.len() == 1 {
            queue.ended_ns = queue.ended_ns.max(now_ns);
            self.proceed(stream)
        } else {
            Effects::default()
        })
    }

    /// Advances a stream until it has work that can run, waits for a point, has operations to drop,
    /// or is empty.
    ///
    /// A stream that has failed also waits for points. Otherwise its later records could be reached
    /// before the points that they must come after.
    pub(crate) fn proceed(&mut self, stream: StreamId) -> Effects {
        let mut effects = Effects::default();
        let waiter = Waiter { owner: Weak::clone(&self.owner), stream };
        // A stream may be woken after it was removed.
        let Some(queue) = self.queues.get_mut(&stream) else { return effects };
        if queue.state != QueueState::Idle {
            return effects;
        }
        let mut finished = Vec::new();
        while let Some((op, _)) = queue.ops.front() {
            let number = queue.submitted - queue.ops.len() as u64 + 1;
            match op {
                Op::Release(_) => {}
                Op::Work(_) if queue.failed.is_some() || number <= queue.skipped_until => {}
                _ if !finished.is_empty() => break,
                Op::Wait(point, on_failure) => {
                    match (point.outcome_or_register(&waiter), on_failure) {
                        (None, _) => return effects,
                        (Some(Ok(ended_ns)), _) => queue.ended_ns = queue.ended_ns.max(ended_ns),
                        (Some(Err(error)), OnFailure::Propagate)
                            if number > queue.skipped_until =>
                        {
                            queue.failed.get_or_insert(error);
                        }
                        (Some(Err(_)), _) => {}
                    }
                }
                Op::Work(_) => {
                    queue.state = QueueState::Ready;
                    self.turn += 1;
                    self.ready.insert(Ready { level: queue.level, turn: self.turn, stream });
                    effects.ready += 1;
                    return effects;
                }
                Op::Record(_) => {}
            }
            let (op, submitted_ns) = queue.ops.pop_front().expect("`front` returned an operation");
            // Count the completion first, so that a thread that wakes sees it in the metrics.
            queue.counters.completed(queue.ended_ns.saturating_sub(submitted_ns));
            match op {
                Op::Record(point) => {
                    // Work before this point was skipped, also if the error was taken since.
                    let taken = queue.taken.as_ref().filter(|_| number <= queue.skipped_until);
                    let error = queue.failed.as_ref().or(taken);
                    point.reach(error.cloned().map_or(Ok(queue.ended_ns), Err), &mut effects);
                }
                Op::Wait(..) => {}
                Op::Release(_) | Op::Work(_) => finished.push(op),
            }
        }
        if !finished.is_empty() {
            queue.state = QueueState::Dropping;
            effects.finished.push((waiter, finished));
        } else if queue.closed {
            self.queues.remove(&stream);
        }
        effects
    }

    /// Continues a stream after its finished operations, which [`proceed`](Self::proceed) returned,
    /// were dropped.
    pub(crate) fn dropped(&mut self, stream: StreamId, outcome: Result<(), String>) -> Effects {
        let queue = self.queue(stream);
        debug_assert_eq!(
            queue.state,
            QueueState::Dropping,
            "a stream drops operations only in the state `Dropping`"
        );
        queue.state = QueueState::Idle;
        if let Err(what) = outcome {
            queue.failed.get_or_insert(Error::Failed { stream, what });
        }
        self.proceed(stream)
    }

    /// Returns the streams that have work to run, most urgent first. Each comes with the earliest
    /// time, in nanoseconds, at which its next operation can start.
    pub(crate) fn ready(&self) -> impl Iterator<Item = (Ready, u64)> + '_ {
        self.ready.iter().map(|ready| (*ready, self.queues[&ready.stream].ended_ns))
    }

    /// Removes and returns the first operation of a ready stream. This operation is always work.
    pub(crate) fn take(&mut self, ready: Ready) -> Work {
        assert!(self.ready.remove(&ready), "the stream is ready because `ready` returned it");
        let queue = self.queue(ready.stream);
        match queue.ops.pop_front() {
            Some((Op::Work(work), submitted_ns)) => {
                queue.state = QueueState::Running { submitted_ns };
                work
            }
            other => unreachable!("the first operation of a ready stream is work, not {other:?}"),
        }
    }

    /// Continues a stream after the work that was taken from it has ended. The work ran from
    /// `began_ns` to `now_ns`.
    pub(crate) fn complete(
        &mut self,
        stream: StreamId,
        outcome: Result<(), String>,
        (began_ns, now_ns): (u64, u64),
    ) -> Effects {
        let queue = self.queue(stream);
        let QueueState::Running { submitted_ns } =
            std::mem::replace(&mut queue.state, QueueState::Idle)
        else {
            unreachable!("`complete` is called only for a running operation")
        };
        queue.ended_ns = queue.ended_ns.max(now_ns);
        if let Err(what) = outcome {
            queue.failed = Some(Error::Failed { stream, what });
        }
        queue.counters.worked(now_ns.saturating_sub(began_ns));
        queue.counters.completed(now_ns.saturating_sub(submitted_ns));
        self.proceed(stream)
    }

    /// Returns whether all work submitted to a stream is done.
    ///
    /// # Errors
    /// Returns the error of the stream if it has failed and all of its work has ended.
    pub(crate) fn status(&self, stream: StreamId) -> Result<Status, Error> {
        let queue = &self.queues[&stream];
        if !queue.ops.is_empty() || queue.state != QueueState::Idle {
            return Ok(Status::Pending);
        }
        self.failure(stream).map(|()| Status::Ready)
    }

    /// Checks that a stream has not failed.
    ///
    /// # Errors
    /// Returns the error of the stream if it has failed.
    pub(crate) fn failure(&self, stream: StreamId) -> Result<(), Error> {
        self.queues[&stream].failed.clone().map_or(Ok(()), Err)
    }

    /// Returns and clears the error of a stream, so that the stream accepts work again. Work that
    /// was submitted before is skipped, and points that were recorded before fail.
    pub(crate) fn take_error(&mut self, stream: StreamId) -> Option<Error> {
        let queue = self.queue(stream);
        let error = queue.failed.take()?;
        queue.skipped_until = queue.submitted;
        queue.taken = Some(error.clone());
        Some(error)
    }

    /// Returns the identifiers of all streams.
    pub(crate) fn streams(&self) -> Vec<StreamId> {
        self.queues.keys().copied().collect()
    }

    /// Returns the points that streams currently wait for.
    pub(crate) fn awaited(&self) -> Vec<Arc<Point>> {
        let first = |queue: &Queue| match queue.ops.front() {
            Some((Op::Wait(point, _), _)) => Some(Arc::clone(point)),
            _ => None,
        };
        self.queues.values().filter_map(first).collect()
    }

    fn queue(&mut self, stream: StreamId) -> &mut Queue {
        let queue = self.queues.get_mut(&stream);
        queue.expect("a stream exists until its last handle is dropped and its work is done")
    }
}

#[cfg(all(test, loom))]
mod models {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::sync::thread;

    /// A minimal device that threads share.
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
            submitted.map_err(|_| "refused").unwrap().apply();
        }

        /// Runs one ready operation, if any, and returns its stream.
        fn work(&self) -> Option<StreamId> {
            let mut queues = self.0.lock().unwrap();
            let (ready, _) = queues.ready().next()?;
            let work = queues.take(ready);
            drop(queues);
            let outcome = work.run();
            let effects = self.0.lock().unwrap().complete(ready.stream, outcome, (0, 0));
            effects.apply();
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

    /// One thread runs the work before a point. A second thread waits for the point, and makes a
    /// stream of another device wait for the point too. In every interleaving the stream becomes
    /// ready and no thread waits forever. Loom tries all interleavings with up to three
    /// preemptions.
    #[test]
    fn every_waiter_of_a_point_is_woken() {
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
            second.submit(later, Op::Wait(Arc::clone(&point), OnFailure::Propagate));
            second.submit(later, work());
            assert_eq!(point.block(), Ok(0));
            thread.join().unwrap();
            assert_eq!(second.work(), Some(later));
            assert_eq!(second.0.lock().unwrap().status(later), Ok(Status::Ready));
        });
    }

    /// One thread drops a finished operation after it released the lock. A second thread records a
    /// point on the same stream, after that operation. The point must not be reached before the
    /// operation is dropped.
    #[test]
    fn finished_work_is_dropped_before_later_waiters_wake() {
        struct SetOnDrop(Arc<loom::sync::atomic::AtomicBool>);
        impl Drop for SetOnDrop {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let host = host();
            let stream = host.0.lock().unwrap().open(0).0;
            let dropped = Arc::new(loom::sync::atomic::AtomicBool::new(false));
            host.submit(stream, work());
            host.submit(stream, Op::Release(Released::new(SetOnDrop(Arc::clone(&dropped)))));
            let worker = Arc::clone(&host);
            let thread = thread::spawn(move || assert_eq!(worker.work(), Some(stream)));
            let owner: Weak<dyn Owner> = Arc::downgrade(&host) as Weak<dyn Owner>;
            let point = Arc::new(Point::new(owner, Clock::new()));
            host.submit(stream, Op::Record(Arc::clone(&point)));
            assert_eq!(point.block(), Ok(0));
            assert!(dropped.load(Ordering::Relaxed));
            thread.join().unwrap();
            assert_eq!(host.0.lock().unwrap().status(stream), Ok(Status::Ready));
        });
    }
}
