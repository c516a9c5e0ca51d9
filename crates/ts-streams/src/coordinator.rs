// SPDX-License-Identifier: MIT OR Apache-2.0
//! Submission of related work to several streams.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::graph::{Task, TaskGraph, Wanted};
use crate::pipeline::{Pipeline, StageGraph, wait_for};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::{Device, Error, Event, HostFn, Status, Stream, StreamId, StreamPool, WorkloadType};

/// Runs related work on several streams: in parallel, in the order of a [`TaskGraph`], or between
/// barriers. A [`Pipeline`] repeats an order that was built once.
///
/// The streams can belong to several devices, and can come from a [`StreamPool`].
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
    devices: Vec<D>,
    streams: Vec<D::Stream>,
    /// Chooses among the streams, by workload.
    pool: Option<Arc<StreamPool<D>>>,
}

impl<D: Device> MultiStreamCoordinator<D> {
    /// The most threads that [`execute_parallel`](Self::execute_parallel) uses.
    pub const MAX_THREADS: usize = 32;

    /// Creates a coordinator for `streams`, which must belong to `device`.
    ///
    /// # Panics
    /// Panics if `streams` is empty.
    pub fn new(device: D, streams: Vec<D::Stream>) -> Self {
        assert!(!streams.is_empty(), "a coordinator needs at least one stream");
        Self { devices: vec![device], streams, pool: None }
    }

    /// Creates a coordinator for the active streams of a pool. The pool chooses the streams of
    /// tasks and stages by their [`WorkloadType`]. Streams that become active later are not used.
    pub fn with_pool(pool: Arc<StreamPool<D>>) -> Self {
        let (device, streams) = (pool.device().clone(), pool.streams().cloned().collect());
        Self { devices: vec![device], streams, pool: Some(pool) }
    }

    /// Adds streams of another device. Choose the streams of tasks on several devices with
    /// [`TaskGraph::set_stream`].
    #[must_use]
    pub fn with_device(mut self, device: D, streams: Vec<D::Stream>) -> Self {
        self.devices.push(device);
        self.streams.extend(streams);
        self
    }

    /// Returns the streams in the order in which they were added.
    pub fn streams(&self) -> &[D::Stream] {
        &self.streams
    }

    /// Makes the stream `later` wait for the work submitted to `earlier` so far. The wait applies
    /// to all work submitted to `later` after this call. The streams can belong to different
    /// devices of this coordinator.
    ///
    /// Does not block the host, with one exception: if the two devices cannot wait for each other
    /// because they are of different kinds, the call blocks until the work on `earlier` is done.
    ///
    /// Two streams may wait for each other repeatedly: each wait is for work that was submitted
    /// earlier, so waits cannot form a cycle.
    ///
    /// # Errors
    /// Returns [`Error::ForeignStream`] if a stream belongs to none of the devices, or to a
    /// separately opened handle of the same device. In this case nothing is submitted. Returns the
    /// error of `later` if it has failed, or [`Error::Driver`] if a CUDA driver call fails. If the
    /// call blocks, returns the error of `earlier`, and [`Error::WaitInHostFn`] in a host function.
    pub fn order(&self, later: &D::Stream, earlier: &D::Stream) -> Result<(), Error> {
        self.device_of(later)?;
        wait_for(later, &self.record_event(earlier)?)
    }

    /// Makes all later work on every stream wait for all work submitted to the streams so far. Does
    /// not block the host, except between devices of different kinds, as in [`order`](Self::order).
    ///
    /// # Errors
    /// Returns the error of a stream that has failed, unless it is the only stream. The failure
    /// spreads to all streams, because each stream waits for all others. Returns [`Error::Driver`]
    /// if a CUDA driver call fails.
    pub fn barrier(&self) -> Result<(), Error> {
        let (first, others) =
            self.streams.split_first().expect("`new` panics if there is no stream");
        let reached: Vec<_> = others.iter().map(|stream| self.record_event(stream)).collect();
        let joined = reached.into_iter().map(|event| wait_for(first, &event?)).collect::<Vec<_>>();
        let all = self.record_event(first)?;
        let waited = others.iter().map(|stream| wait_for(stream, &all)).collect::<Vec<_>>();
        joined.into_iter().chain(waited).collect()
    }

    /// Calls each function with a stream, to which the function submits its work. The streams are
    /// assigned in turn. Blocks until all functions have returned, but does not wait for the
    /// submitted work.
    ///
    /// Functions with different streams run at the same time, on this thread and on up to
    /// [`MAX_THREADS`](Self::MAX_THREADS) - 1 others, which end with the call. Functions with the
    /// same stream run one after the other, in their order. All functions are called, even if one
    /// fails.
    ///
    /// # Errors
    /// Returns the error of the first function that failed. A function that panics fails with
    /// [`Error::Failed`]. The submitted work still runs.
    pub fn execute_parallel<F>(
        &self,
        work: impl IntoIterator<Item = F>,
    ) -> Result<Execution<D>, Error>
    where
        F: FnOnce(&D::Stream) -> Result<(), Error> + Send,
    {
        let mut lanes: Vec<Vec<(usize, F)>> = self.streams.iter().map(|_| Vec::new()).collect();
        for (number, submit) in work.into_iter().enumerate() {
            lanes[number % self.streams.len()].push((number, submit));
        }
        lanes.retain(|lane| !lane.is_empty());
        let (used, left) = (lanes.len(), Mutex::new(lanes.into_iter().enumerate()));
        let failed = Mutex::new(Vec::new());
        let work = || {
            // The lock is released before the functions are called.
            let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
            while let Some((stream, functions)) = next() {
                for (number, submit) in functions {
                    let done = call(&self.streams[stream], &number.to_string(), submit);
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    failed.extend(done.err().map(|error| (number, error)));
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..used.min(Self::MAX_THREADS) {
                let thread = std::thread::Builder::new().name("ts-parallel".into());
                // If no more threads can start, those that have started do all of the work.
                if thread.spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            work();
        });
        let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        match failed.into_iter().min_by_key(|(number, _)| *number) {
            None => Ok(self.execution(0..used, Vec::new(), 0)),
            Some((_, error)) => Err(error),
        }
    }

    /// Submits the tasks of a graph and returns without waiting for them.
    ///
    /// A task is submitted to the stream that [`TaskGraph::set_stream`] names, or otherwise to that
    /// of one of its dependencies. Each dependency determines the stream of at most one task. If no
    /// dependency is left for a task, the pool of [`with_pool`](Self::with_pool) chooses a stream
    /// for its workload; without a pool, the task is submitted to the stream with the fewest tasks.
    /// Events are recorded only for dependencies between streams, and at the end of each stream to
    /// which tasks were assigned. Between devices of different kinds, the call blocks as
    /// [`order`](Self::order) does.
    ///
    /// If a task returns an error or panics while it submits work, the tasks that depend on it are
    /// not submitted. After `cancel` is cancelled, no further task is submitted.
    /// [`Execution::failures`] lists the tasks that failed and those that were not submitted.
    pub fn execute(&self, graph: TaskGraph<D::Stream>, cancel: &CancelToken) -> Execution<D> {
        let (tasks, waits) = graph.into_order();
        let wanted: Vec<Wanted> = tasks.iter().map(|task| task.wanted).collect();
        let mut placement = Placement::new(self, &wanted, &waits);
        let mut failures = Vec::new();
        for (task, Task { name, submit, .. }) in tasks.into_iter().enumerate() {
            let submitted = match () {
                () if cancel.is_cancelled() => Err(Error::Cancelled { task: name.clone() }),
                () => placement.prepare(task, &name).and_then(|stream| call(stream, &name, submit)),
            };
            if let Err(error) = submitted.and_then(|()| placement.finish(task)) {
                placement.skipped[task] = true;
                failures.push((name, error));
            }
        }
        let mut used = placement.stream_of.clone();
        used.sort_unstable();
        used.dedup();
        self.execution(used, failures, placement.events_recorded)
    }

    /// Assigns a stream to each workload of a graph of stages, and creates the events of their
    /// dependencies. Stages of the same workload share a stream. If there is a pool, it chooses
    /// them; otherwise they are taken in turn.
    ///
    /// # Errors
    /// Returns the same errors as [`Device::create_event`].
    pub fn pipeline(&self, graph: &StageGraph) -> Result<Pipeline<D>, Error> {
        let mut streams: Vec<(WorkloadType, D::Stream)> = Vec::new();
        for workload in graph.workloads() {
            let index = self.choose(workload).unwrap_or(streams.len() % self.streams.len());
            streams.push((workload, self.streams[index].clone()));
        }
        Pipeline::new(graph, &streams, |stream| self.device_of(stream)?.create_event())
    }

    /// Lets the pool choose a stream, and returns its index.
    fn choose(&self, workload: WorkloadType) -> Option<usize> {
        let stream = self.pool.as_ref()?.stream_for_workload(workload).id();
        self.index_of(stream)
    }

    fn index_of(&self, stream: StreamId) -> Option<usize> {
        self.streams.iter().position(|known| known.id() == stream)
    }

    /// Returns the execution of tasks on the streams with these indexes.
    fn execution(
        &self,
        used: impl IntoIterator<Item = usize>,
        failures: Vec<(String, Error)>,
        events: usize,
    ) -> Execution<D> {
        let end = |index| {
            let stream: &D::Stream = &self.streams[index];
            End { stream: stream.clone(), reached: self.record_event(stream) }
        };
        Execution {
            ends: used.into_iter().map(end).collect(),
            failures,
            events,
            sleeps: self.devices.iter().all(|device| device.info().runs_by_itself),
        }
    }

    /// Returns the device of a stream.
    fn device_of(&self, stream: &D::Stream) -> Result<&D, Error> {
        self.devices.iter().find(|device| device.owns(stream)).ok_or_else(|| {
            let names: Vec<_> = self.devices.iter().map(|d| d.info().name.as_str()).collect();
            Error::ForeignStream { stream: stream.id(), device: names.join(", ") }
        })
    }

    fn record_event(&self, stream: &D::Stream) -> Result<D::Event, Error> {
        let event = self.device_of(stream)?.create_event()?;
        stream.record(&event)?;
        Ok(event)
    }
}

/// Calls a function that submits work. If it panics, others must still be called.
fn call<S: Stream>(
    stream: &S,
    task: &str,
    submit: impl FnOnce(&S) -> Result<(), Error>,
) -> Result<(), Error> {
    catch_unwind(AssertUnwindSafe(|| submit(stream))).unwrap_or_else(|_| {
        let what = format!("task {task:?} panicked while it submitted work");
        Err(Error::Failed { stream: stream.id(), what })
    })
}

/// The assignment of tasks to streams. A task needs an event if a task on another stream waits for
/// it. All tasks are therefore assigned before the first is submitted.
struct Placement<'a, D: Device> {
    coordinator: &'a MultiStreamCoordinator<D>,
    wanted: &'a [Wanted],
    waits: &'a [Vec<usize>],
    /// Index of the stream of each task.
    stream_of: Vec<usize>,
    needs_event: Vec<bool>,
    events: Vec<Option<D::Event>>,
    events_recorded: usize,
    skipped: Vec<bool>,
}

impl<'a, D: Device> Placement<'a, D> {
    fn new(
        coordinator: &'a MultiStreamCoordinator<D>,
        wanted: &'a [Wanted],
        waits: &'a [Vec<usize>],
    ) -> Self {
        let count = waits.len();
        let (mut stream_of, mut followed) = (Vec::with_capacity(count), vec![false; count]);
        let mut load = vec![0usize; coordinator.streams.len()];
        let mut needs_event = vec![false; count];
        for (before, wanted) in waits.iter().zip(wanted) {
            let named = wanted.stream.and_then(|stream| coordinator.index_of(stream));
            // A dependency on the same stream needs no event.
            let predecessor = before
                .iter()
                .copied()
                .find(|&task| !followed[task] && named.is_none_or(|of| of == stream_of[task]));
            predecessor.into_iter().for_each(|task| followed[task] = true);
            let least = || (0..load.len()).min_by_key(|&stream| load[stream]);
            let stream = named
                .or_else(|| predecessor.map(|task| stream_of[task]))
                .or_else(|| coordinator.choose(wanted.workload))
                .or_else(least)
                .expect("`new` panics if there is no stream");
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
            wanted,
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
        if let Some(wanted) = self.wanted[task].stream.filter(|&wanted| wanted != stream.id()) {
            let device = self.coordinator.devices[0].info().name.clone();
            return Err(Error::ForeignStream { stream: wanted, device });
        }
        for &before in &self.waits[task] {
            if self.skipped[before] {
                return Err(Error::Cancelled { task: name.into() });
            }
            if let Some(event) = &self.events[before]
                .as_ref()
                .filter(|_| self.stream_of[before] != self.stream_of[task])
            {
                wait_for(stream, event)?;
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
}

/// The submitted tasks of one [`MultiStreamCoordinator::execute`] or
/// [`execute_parallel`](MultiStreamCoordinator::execute_parallel) call.
///
/// Dropping this value does not cancel the tasks.
#[derive(Debug)]
pub struct Execution<D: Device> {
    ends: Vec<End<D>>,
    failures: Vec<(String, Error)>,
    events: usize,
    sleeps: bool,
}

/// The end of the tasks on one stream.
#[derive(Debug)]
struct End<D: Device> {
    stream: D::Stream,
    reached: Result<D::Event, Error>,
}

impl<D: Device> End<D> {
    fn event(&self) -> Result<&D::Event, Error> {
        self.reached.as_ref().map_err(Clone::clone)
    }
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
        for end in &self.ends {
            if end.event()?.query()? == Status::Pending {
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
        let ended: Vec<_> =
            self.ends.iter().map(|end| end.event().and_then(Event::synchronize)).collect();
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
    /// error. Does not block, except between devices of different kinds.
    ///
    /// # Errors
    /// Returns the error of `stream` if it has failed, or [`Error::Driver`] if a CUDA driver call
    /// failed.
    pub fn on_complete(
        &self,
        stream: &D::Stream,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), Error> {
        for end in &self.ends {
            wait_for(stream, end.event()?)?;
        }
        stream.launch_host_fn(HostFn::new(run))
    }

    /// Submits a host function to each stream to which tasks of this execution were assigned. It
    /// calls `run` with the stream as soon as the tasks on that stream are done, whether or not
    /// those on others are. On a stream that has failed it does not run. Does not block.
    ///
    /// # Errors
    /// Returns the error of a stream that has failed, or [`Error::Driver`] if a CUDA driver call
    /// failed. The function still runs on the other streams.
    pub fn on_stream_complete(
        &self,
        run: impl Fn(StreamId) + Send + Sync + 'static,
    ) -> Result<(), Error> {
        let run = Arc::new(run);
        let launched = self.ends.iter().map(|End { stream, .. }| {
            let (run, id) = (Arc::clone(&run), stream.id());
            stream.launch_host_fn(HostFn::new(move || run(id)))
        });
        launched.collect::<Vec<_>>().into_iter().collect()
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
