// SPDX-License-Identifier: MIT OR Apache-2.0
//! Several streams that work on one thing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::graph::{Task, TaskGraph};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::{Device, Error, Event, HostFn, Status, Stream};

/// Streams that work on one thing: in parallel, in the order of a graph, up to barriers. The host
/// waits for none of it unless it asks to.
#[derive(Debug)]
pub struct MultiStreamCoordinator<D: Device> {
    device: D,
    streams: Vec<D::Stream>,
}

impl<D: Device> MultiStreamCoordinator<D> {
    /// Coordinates these streams; events are made on `device`.
    ///
    /// # Panics
    /// Without streams.
    pub fn new(device: D, streams: Vec<D::Stream>) -> Self {
        assert!(!streams.is_empty(), "there is nothing to coordinate");
        Self { device, streams }
    }

    /// The streams.
    pub fn streams(&self) -> &[D::Stream] {
        &self.streams
    }

    /// Has what is submitted to `later` from now on wait for all that was submitted to `earlier`. A
    /// wait for what was submitted before cannot close a circle, however often streams wait for
    /// each other.
    ///
    /// # Errors
    /// That of work on one of them; [`Error::ForeignStream`] when one is not of the coordinator's
    /// device. Nothing has happened then.
    pub fn order(&self, later: &D::Stream, earlier: &D::Stream) -> Result<(), Error> {
        if let Some(foreign) = [later, earlier].into_iter().find(|stream| !self.device.owns(stream))
        {
            let device = self.device.info().name.clone();
            return Err(Error::ForeignStream { stream: foreign.id(), device });
        }
        later.wait(&self.mark(earlier)?)
    }

    /// Has what is submitted to any of the streams from now on wait for all that was submitted to
    /// all of them. On the device: the host goes on.
    ///
    /// # Errors
    /// That of work on one of them; the others are ordered among each other all the same.
    pub fn barrier(&self) -> Result<(), Error> {
        let (first, others) = self.streams.split_first().expect("there is one");
        let reached: Vec<_> = others.iter().map(|stream| self.mark(stream)).collect();
        let joined = reached.into_iter().map(|event| first.wait(&event?)).collect::<Vec<_>>();
        let all = self.mark(first)?;
        let waited = others.iter().map(|stream| stream.wait(&all)).collect::<Vec<_>>();
        joined.into_iter().chain(waited).collect()
    }

    /// Has each function submit to a stream of its own, in turn where there are more of them, and
    /// the first stream wait for all. All of them are called, on this thread, also when one fails.
    ///
    /// # Errors
    /// The first that one of them gives; [`Error::Failed`] for a panic.
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
        match execution.problems.first() {
            None => Ok(execution),
            Some((_, error)) => Err(error.clone()),
        }
    }

    /// Submits the tasks of a graph, each to the stream of one that it waits for, if nobody has
    /// followed that one yet, else to the stream with the fewest tasks. It waits for others by
    /// events, of which there are no more than the order needs.
    ///
    /// Does not block, as far as the tasks do not. A task that fails to submit takes with it those
    /// that wait for it; see [`Execution::problems`]. So does a cancellation, for all tasks that
    /// were not submitted before.
    pub fn execute(&self, graph: TaskGraph<D::Stream>, cancel: &CancelToken) -> Execution<D> {
        let (tasks, waits) = graph.into_order();
        let mut placed = Placement::new(self, &waits);
        let mut problems = Vec::new();
        for (task, Task { name, submit }) in tasks.into_iter().enumerate() {
            let submitted = match () {
                () if cancel.is_cancelled() => Err(Error::Cancelled { task: name.clone() }),
                () => placed.prepare(task).and_then(|stream| {
                    // A task's panic must not leave others half submitted.
                    let done = catch_unwind(AssertUnwindSafe(|| submit(stream)));
                    done.unwrap_or_else(|_| {
                        Err(Error::Failed {
                            stream: stream.id(),
                            what: format!("task `{name}` panicked"),
                        })
                    })
                }),
            };
            if let Err(error) = submitted.and_then(|()| placed.finish(task)) {
                placed.lost[task] = true;
                problems.push((name, error));
            }
        }
        Execution {
            ends: placed.ends(),
            problems,
            events: placed.events_recorded,
            polls: self.device.info().runs_by_itself,
        }
    }

    fn mark(&self, stream: &D::Stream) -> Result<D::Event, Error> {
        let event = self.device.create_event()?;
        stream.record(&event)?;
        Ok(event)
    }
}

/// Where tasks go.
struct Placement<'a, D: Device> {
    coordinator: &'a MultiStreamCoordinator<D>,
    waits: &'a [Vec<usize>],
    /// Whether somebody on another stream waits for it, which is known only once its followers are
    /// placed: all are placed first.
    stream_of: Vec<usize>,
    needs_event: Vec<bool>,
    events: Vec<Option<D::Event>>,
    events_recorded: usize,
    lost: Vec<bool>,
}

impl<'a, D: Device> Placement<'a, D> {
    fn new(coordinator: &'a MultiStreamCoordinator<D>, waits: &'a [Vec<usize>]) -> Self {
        let count = waits.len();
        let (mut stream_of, mut followed) = (Vec::with_capacity(count), vec![false; count]);
        let mut load = vec![0usize; coordinator.streams.len()];
        let mut needs_event = vec![false; count];
        for before in waits {
            // Behind one of them no event is needed.
            let behind = before.iter().copied().find(|&task| !followed[task]);
            let stream = match behind {
                Some(task) => {
                    followed[task] = true;
                    stream_of[task]
                }
                None => (0..load.len()).min_by_key(|&stream| load[stream]).expect("there is one"),
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
            lost: vec![false; count],
        }
    }

    fn stream(&self, task: usize) -> &'a D::Stream {
        &self.coordinator.streams[self.stream_of[task]]
    }

    /// Has the task's stream wait for what the task waits for.
    fn prepare(&self, task: usize) -> Result<&'a D::Stream, Error> {
        let stream = self.stream(task);
        for &before in &self.waits[task] {
            if self.lost[before] {
                return Err(Error::Cancelled { task: "one that it waits for was not run".into() });
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

    /// Marks where a task ends, if somebody waits for that.
    fn finish(&mut self, task: usize) -> Result<(), Error> {
        if self.needs_event[task] {
            self.events[task] = Some(self.coordinator.mark(self.stream(task))?);
            self.events_recorded += 1;
        }
        Ok(())
    }

    /// The end of what each stream was given.
    fn ends(&self) -> Vec<Result<D::Event, Error>> {
        let mut used: Vec<usize> = self.stream_of.clone();
        used.sort_unstable();
        used.dedup();
        used.into_iter()
            .map(|stream| self.coordinator.mark(&self.coordinator.streams[stream]))
            .collect()
    }
}

/// Work that was submitted together.
#[derive(Debug)]
pub struct Execution<D: Device> {
    ends: Vec<Result<D::Event, Error>>,
    problems: Vec<(String, Error)>,
    events: usize,
    polls: bool,
}

impl<D: Device> Execution<D> {
    /// The tasks that were not submitted, by name, and why.
    pub fn problems(&self) -> &[(String, Error)] {
        &self.problems
    }

    /// How many events order it.
    pub fn events(&self) -> usize {
        self.events
    }

    /// Whether all that was submitted is done. Does not block.
    ///
    /// # Errors
    /// That of work on one of the streams.
    pub fn query(&self) -> Result<Status, Error> {
        let mut all = Status::Ready;
        for end in &self.ends {
            if end.as_ref().map_err(Clone::clone)?.query()? == Status::Pending {
                all = Status::Pending;
            }
        }
        Ok(all)
    }

    /// Waits until all that was submitted is done. Blocks.
    ///
    /// # Errors
    /// The first problem with a task; that of work on one of the streams. All of them have ended
    /// then.
    pub fn wait(&self) -> Result<(), Error> {
        let ended: Vec<_> = self
            .ends
            .iter()
            .map(|end| end.as_ref().map_err(Clone::clone).and_then(Event::synchronize))
            .collect();
        ended.into_iter().collect::<Result<(), Error>>()?;
        self.problems.first().map_or(Ok(()), |(_, error)| Err(error.clone()))
    }

    /// As [`wait`](Self::wait), not longer than this.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); [`Error::TimedOut`].
    pub fn wait_timeout(&self, timeout: Duration) -> Result<(), Error> {
        let deadline = Instant::now().checked_add(timeout);
        while self.query()? == Status::Pending {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Error::TimedOut { timeout });
            }
            if self.polls {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        self.wait()
    }

    /// Has a stream run a function when all of it is done.
    ///
    /// # Errors
    /// That of work on one of the streams.
    pub fn on_complete(
        &self,
        stream: &D::Stream,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), Error> {
        for end in &self.ends {
            stream.wait(end.as_ref().map_err(Clone::clone)?)?;
        }
        stream.launch_host_fn(HostFn::new(run))
    }
}

/// Calls things off. Clones call off the same.
#[derive(Debug, Clone, Default)]
pub struct CancelToken {
    cancelled: Arc<AtomicBool>,
}

impl CancelToken {
    /// Calls it off, for good. Does not block.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Whether it was called off.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }
}
