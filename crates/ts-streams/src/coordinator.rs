// SPDX-License-Identifier: MIT OR Apache-2.0
//! Submission of related work to several streams.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::graph::{Task, TaskGraph};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::{Device, Error, Event, HostFn, Status, Stream};

/// Runs related work on several streams: in parallel, in the order of a [`TaskGraph`], or between
/// barriers. For embedders.
///
/// A method blocks only if its documentation states it.
///
/// # Examples
/// ```
/// use ts_streams::{
///     CancelToken, CpuDevice, Device, MultiStreamCoordinator, StreamPriority, TaskGraph,
/// };
///
/// let device = CpuDevice::new()?;
/// let streams = vec![
///     device.create_stream(StreamPriority::Normal)?,
///     device.create_stream(StreamPriority::Normal)?,
/// ];
/// let coordinator = MultiStreamCoordinator::new(device, streams);
///
/// let mut graph = TaskGraph::new();
/// let first = graph.add_host_fn("load a", || println!("a"));
/// let second = graph.add_host_fn("load b", || println!("b")); // in parallel with `load a`
/// let last = graph.add_host_fn("add", || println!("a + b"));
/// graph.add_dependency(last, first)?;
/// graph.add_dependency(last, second)?;
///
/// let execution = coordinator.execute(graph, &CancelToken::default());
/// execution.wait()?;
/// assert!(execution.failures().is_empty());
/// # Ok::<(), ts_streams::Error>(())
/// ```
#[derive(Debug)]
pub struct MultiStreamCoordinator<D: Device> {
    device: D,
    streams: Vec<D::Stream>,
}

impl<D: Device> MultiStreamCoordinator<D> {
    /// Creates a coordinator for `streams`, which must belong to `device`.
    ///
    /// # Panics
    /// Panics if `streams` is empty.
    pub fn new(device: D, streams: Vec<D::Stream>) -> Self {
        assert!(!streams.is_empty(), "a coordinator needs at least one stream");
        Self { device, streams }
    }

    /// Returns the streams in the order in which they were passed to [`new`](Self::new).
    pub fn streams(&self) -> &[D::Stream] {
        &self.streams
    }

    /// Makes the stream `later` wait for the work submitted to `earlier` so far. The wait applies
    /// to all work submitted to `later` after this call. Does not block the host.
    ///
    /// Two streams may wait for each other repeatedly: each wait is for work that was submitted
    /// earlier, so waits cannot form a cycle.
    ///
    /// # Errors
    /// Returns [`Error::ForeignStream`] if a stream belongs to another device, or to a separately
    /// opened handle of the same device. In this case nothing is submitted. Returns the error of
    /// `later` if it has failed, or [`Error::Driver`] if a CUDA driver call fails.
    pub fn order(&self, later: &D::Stream, earlier: &D::Stream) -> Result<(), Error> {
        if let Some(foreign) = [later, earlier].into_iter().find(|stream| !self.device.owns(stream))
        {
            let device = self.device.info().name.clone();
            return Err(Error::ForeignStream { stream: foreign.id(), device });
        }
        later.wait(&self.record_event(earlier)?)
    }

    /// Makes all later work on every stream wait for all work submitted to the streams so far. Does
    /// not block the host.
    ///
    /// # Errors
    /// Returns the error of a stream that has failed, unless it is the only stream. The failure
    /// spreads to all streams, because each stream waits for all others. Returns [`Error::Driver`]
    /// if a CUDA driver call fails.
    pub fn barrier(&self) -> Result<(), Error> {
        let (first, others) =
            self.streams.split_first().expect("`new` panics if there is no stream");
        let reached: Vec<_> = others.iter().map(|stream| self.record_event(stream)).collect();
        let joined = reached.into_iter().map(|event| first.wait(&event?)).collect::<Vec<_>>();
        let all = self.record_event(first)?;
        let waited = others.iter().map(|stream| stream.wait(&all)).collect::<Vec<_>>();
        joined.into_iter().chain(waited).collect()
    }

    /// Calls each function on this thread with a stream, to which the function submits its work.
    /// The streams are assigned in turn. Does not wait for the submitted work.
    ///
    /// All functions are called, even if one fails. The order of the calls is unspecified.
    ///
    /// # Errors
    /// Returns the error of a function that failed. A function that panics fails with
    /// [`Error::Failed`]. The submitted work still runs.
    pub fn execute_parallel<F>(
        &self,
        work: impl IntoIterator<Item = F>,
    ) -> Result<Execution<D>, Error>
    where
        F: FnOnce(&D::Stream) -> Result<(), Error> + Send + 'static,
    {
        let mut graph = TaskGraph::new();
        for (number, submit) in work.into_iter().enumerate() {
            graph.add(number.to_string(), submit);
        }
        let execution = self.execute(graph, &CancelToken::default());
        match execution.failures.first() {
            None => Ok(execution),
            Some((_, error)) => Err(error.clone()),
        }
    }

    /// Submits the tasks of a graph and returns without waiting for them.
    ///
    /// A task is submitted to the stream of one of its dependencies. Each dependency determines the
    /// stream of at most one task. If no dependency is left for a task, the task is submitted to
    /// the stream with the fewest tasks. Events are recorded only for dependencies between streams,
    /// and at the end of each stream to which tasks were assigned.
    ///
    /// If a task returns an error or panics while it submits work, the tasks that depend on it are
    /// not submitted. After `cancel` is cancelled, no further task is submitted.
    /// [`Execution::failures`] lists the tasks that failed and those that were not submitted.
    pub fn execute(&self, graph: TaskGraph<D::Stream>, cancel: &CancelToken) -> Execution<D> {
        let (tasks, waits) = graph.into_order();
        let mut placement = Placement::new(self, &waits);
        let mut failures = Vec::new();
        for (task, Task { name, submit }) in tasks.into_iter().enumerate() {
            let submitted = match () {
                () if cancel.is_cancelled() => Err(Error::Cancelled { task: name.clone() }),
                () => placement.prepare(task, &name).and_then(|stream| {
                    // If one task panics, the others must still be submitted.
                    let done = catch_unwind(AssertUnwindSafe(|| submit(stream)));
                    done.unwrap_or_else(|_| {
                        Err(Error::Failed {
                            stream: stream.id(),
                            what: format!("task {name:?} panicked while it submitted work"),
                        })
                    })
                }),
            };
            if let Err(error) = submitted.and_then(|()| placement.finish(task)) {
                placement.skipped[task] = true;
                failures.push((name, error));
            }
        }
        Execution {
            end_events: placement.end_events(),
            failures,
            events: placement.events_recorded,
            sleeps: self.device.info().runs_by_itself,
        }
    }

    fn record_event(&self, stream: &D::Stream) -> Result<D::Event, Error> {
        let event = self.device.create_event()?;
        stream.record(&event)?;
        Ok(event)
    }
}

/// The assignment of tasks to streams. A task needs an event if a task on another stream waits for
/// it. All tasks are therefore assigned before the first is submitted.
struct Placement<'a, D: Device> {
    coordinator: &'a MultiStreamCoordinator<D>,
    waits: &'a [Vec<usize>],
    /// Index of the stream of each task.
    stream_of: Vec<usize>,
    needs_event: Vec<bool>,
    events: Vec<Option<D::Event>>,
    events_recorded: usize,
    skipped: Vec<bool>,
}

impl<'a, D: Device> Placement<'a, D> {
    fn new(coordinator: &'a MultiStreamCoordinator<D>, waits: &'a [Vec<usize>]) -> Self {
        let count = waits.len();
        let (mut stream_of, mut followed) = (Vec::with_capacity(count), vec![false; count]);
        let mut load = vec![0usize; coordinator.streams.len()];
        let mut needs_event = vec![false; count];
        for before in waits {
            // A dependency on the same stream needs no event.
            let predecessor = before.iter().copied().find(|&task| !followed[task]);
            let stream = match predecessor {
                Some(task) => {
                    followed[task] = true;
                    stream_of[task]
                }
                None => (0..load.len())
                    .min_by_key(|&stream| load[stream])
                    .expect("`new` panics if there is no stream"),
            };
            load[stream] += 1;
            before
                .iter()
                .filter(|&&task| stream_of[task] != stream)
                .for_each(|&task| needs_event[task] = true);
            stream_of.push(stream);
        }
        let events = (0..count).map(|_| None).collect();
        Self {
            coordinator,
            waits,
            stream_of,
            needs_event,
            events,
            events_recorded: 0,
            skipped: vec![false; count],
        }
    }

    fn stream(&self, task: usize) -> &'a D::Stream {
        &self.coordinator.streams[self.stream_of[task]]
    }

    /// Makes the task's stream wait for the task's dependencies.
    fn prepare(&self, task: usize, name: &str) -> Result<&'a D::Stream, Error> {
        let stream = self.stream(task);
        for &before in &self.waits[task] {
            if self.skipped[before] {
                return Err(Error::Cancelled { task: name.into() });
            }
            if let Some(event) = &self.events[before]
                .as_ref()
                .filter(|_| self.stream_of[before] != self.stream_of[task])
            {
                stream.wait(event)?;
            }
        }
        Ok(stream)
    }

    /// Records an event after the task, if a task on another stream waits for it.
    fn finish(&mut self, task: usize) -> Result<(), Error> {
        if self.needs_event[task] {
            self.events[task] = Some(self.coordinator.record_event(self.stream(task))?);
            self.events_recorded += 1;
        }
        Ok(())
    }

    /// Records an event at the end of each stream to which tasks were assigned.
    fn end_events(&self) -> Vec<Result<D::Event, Error>> {
        let mut used: Vec<usize> = self.stream_of.clone();
        used.sort_unstable();
        used.dedup();
        used.into_iter()
            .map(|stream| self.coordinator.record_event(&self.coordinator.streams[stream]))
            .collect()
    }
}

/// The submitted tasks of one [`MultiStreamCoordinator::execute`] or
/// [`execute_parallel`](MultiStreamCoordinator::execute_parallel) call.
///
/// Dropping this value does not cancel the tasks.
#[derive(Debug)]
pub struct Execution<D: Device> {
    end_events: Vec<Result<D::Event, Error>>,
    failures: Vec<(String, Error)>,
    events: usize,
    sleeps: bool,
}

impl<D: Device> Execution<D> {
    /// Returns the name and the error of each task that failed while it submitted work, or that was
    /// not submitted. Failures of submitted work are not included: see [`wait`](Self::wait).
    pub fn failures(&self) -> &[(String, Error)] {
        &self.failures
    }

    /// Returns the number of events recorded to order the tasks.
    pub fn event_count(&self) -> usize {
        self.events
    }

    /// Returns whether all submitted work is done. Does not block.
    ///
    /// # Errors
    /// Returns the error of a stream whose work failed.
    pub fn query(&self) -> Result<Status, Error> {
        let mut all = Status::Ready;
        for end in &self.end_events {
            if end.as_ref().map_err(Clone::clone)?.query()? == Status::Pending {
                all = Status::Pending;
            }
        }
        Ok(all)
    }

    /// Blocks until all submitted work has ended.
    ///
    /// # Errors
    /// Returns the error of a stream whose work failed. If no stream failed, returns the first
    /// error in [`failures`](Self::failures). Returns [`Error::WaitInHostFn`] if called from a host
    /// function.
    pub fn wait(&self) -> Result<(), Error> {
        let ended: Vec<_> = self
            .end_events
            .iter()
            .map(|end| end.as_ref().map_err(Clone::clone).and_then(Event::synchronize))
            .collect();
        ended.into_iter().collect::<Result<(), Error>>()?;
        self.failures.first().map_or(Ok(()), |(_, error)| Err(error.clone()))
    }

    /// Blocks until all submitted work has ended, but at most for `timeout`. If a stream fails,
    /// returns its error at once, even if other streams still have work.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] if work is still pending after `timeout`. Also returns the same
    /// errors as [`wait`](Self::wait).
    pub fn wait_timeout(&self, timeout: Duration) -> Result<(), Error> {
        let deadline = Instant::now().checked_add(timeout);
        while self.query()? == Status::Pending {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Error::TimedOut { timeout });
            }
            if self.sleeps {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        self.wait()
    }

    /// Submits to `stream` a host function that runs after all tasks of this execution are done. If
    /// a task failed on its stream, the function does not run and `stream` fails with the same
    /// error. Does not block.
    ///
    /// # Errors
    /// Returns the error of `stream` if it has failed, or [`Error::Driver`] if a CUDA driver call
    /// failed.
    pub fn on_complete(
        &self,
        stream: &D::Stream,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), Error> {
        for end in &self.end_events {
            stream.wait(end.as_ref().map_err(Clone::clone)?)?;
        }
        stream.launch_host_fn(HostFn::new(run))
    }
}

/// A token that cancels the execution of a task graph. Clones share the same state. Tasks that are
/// already submitted still run.
///
/// # Examples
/// ```
/// use ts_streams::CancelToken;
///
/// let token = CancelToken::default();
/// let clone = token.clone(); // for example, for a signal handler
/// clone.cancel();
/// assert!(token.is_cancelled());
/// ```
#[derive(Debug, Clone, Default)]
pub struct CancelToken {
    cancelled: Arc<AtomicBool>,
}

impl CancelToken {
    /// Cancels the execution permanently. Does not block.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Returns whether [`cancel`](Self::cancel) was called.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }
}
