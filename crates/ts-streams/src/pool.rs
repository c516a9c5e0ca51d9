// SPDX-License-Identifier: MIT OR Apache-2.0
//! A pool of reusable streams.

mod elastic;
mod optimize;
mod pooled_stream;
mod time_model;

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::workload::WorkloadType;
use crate::{Device, DeviceKind, Error, Status, Stream, StreamId, StreamMetrics, StreamPriority};

use elastic::Elastic;
pub use optimize::StrategyChange;
use pooled_stream::{Average, MOST_NS, Observation, PooledStream, busy_ns};
use time_model::TimeModel;

/// The strategy by which a [`StreamPool`] chooses a stream. Among equal streams, the pool takes
/// turns, so independent work gets different streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AllocationStrategy {
    /// Chooses each stream in turn.
    RoundRobin,
    /// Chooses the stream with the fewest outstanding operations.
    LoadBalanced,
    /// Chooses the stream whose priority is nearest to [that](WorkloadType::priority) of the
    /// workload. If there are several, chooses the one with the fewest outstanding operations.
    Priority,
    /// Chooses the stream that is expected to finish first. If there are several, chooses the one
    /// whose priority is nearest to [that](WorkloadType::priority) of the workload. An idle stream
    /// with this priority is chosen at once, unless such work takes longer on it than on average,
    /// by more than a quarter.
    ///
    /// The estimate for a stream is its number of outstanding operations times the average time of
    /// what runs on it, plus the average time of the new work. Times are those of the stream,
    /// otherwise those of all streams. Before the first one, a piece of `Memory` work is assumed to
    /// take half as long as one of `Compute` or `Mixed` work, and 50 times as long as one of
    /// `Coordination`.
    Workload,
    /// Chooses the stream that is expected to finish first, by a model that is trained while the
    /// pool is used, and that knows the length of the work: see
    /// [`stream_for_work`](StreamPool::stream_for_work). If there are several, chooses the one
    /// whose priority is nearest to [that](WorkloadType::priority) of the workload.
    ///
    /// The model of a workload is linear: a time for each piece of work, and a time for each byte.
    /// They are the least squares of the errors of what ran on the streams, each relative to the
    /// expected time; older work counts less. Before the first training, work is expected to take
    /// its average time on all streams, or what [`Workload`](Self::Workload) assumes.
    Learned,
}

/// A pool of streams of one device.
///
/// Choosing a stream takes no lock of the pool, except that [`AllocationStrategy::Learned`] takes
/// that of the chosen stream for a moment. It blocks only while a pool
/// [with bounds](Self::with_bounds) adds a stream. Streams live as long as the pool.
///
/// # What the pool learns
/// The pool measures what runs on its streams: work counts for the workload for which its stream
/// was chosen last. Work does not count if the stream was then still busy with another workload,
/// because its time cannot be told apart. [`record_completion`](Self::record_completion) adds times
/// that the caller measured. The average times serve [`AllocationStrategy::Workload`] and
/// [`optimize`](Self::optimize).
///
/// With [`AllocationStrategy::Learned`], the pool also trains a model, with the work of a stream
/// between two times when it is idle. Work that was submitted to a stream without choosing it
/// through the pool is not known. Accelerators do not report when their work ends: there the model
/// learns only from [`record_work`](Self::record_work), and work counts as unfinished until its
/// stream is idle. The only property of the device that the pool uses is the range of priorities.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use ts_streams::{AllocationStrategy, CpuDevice, Device, HostFn, Stream, StreamPool};
///
/// let pool = StreamPool::new(CpuDevice::new()?, 4, AllocationStrategy::LoadBalanced)?;
/// let done = Arc::new(AtomicUsize::new(0));
/// for _ in 0..16 {
///     let done = Arc::clone(&done);
///     pool.stream().launch_host_fn(HostFn::new(move || {
///         done.fetch_add(1, Ordering::Relaxed);
///     }))?;
/// }
/// pool.device().synchronize()?;
/// assert_eq!(done.load(Ordering::Relaxed), 16);
/// # Ok::<(), ts_streams::Error>(())
/// ```
#[derive(Debug)]
pub struct StreamPool<D: Device> {
    device: D,
    streams: Box<[OnceLock<PooledStream<D::Stream>>]>,
    /// Number of streams created. They fill `streams` from the start.
    created: AtomicUsize,
    /// The priorities of new streams, in turn.
    priorities: Box<[StreamPriority]>,
    /// The index of the stream that is looked at first.
    turn: AtomicUsize,
    strategy: AtomicU8,
    /// The priority level for each workload.
    levels: [i32; 4],
    times: [Average; 4],
    models: [TimeModel; 4],
    /// If the pool chooses its number of streams.
    elastic: Option<Elastic>,
}

/// A stream of a pool, and what runs on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PooledStreamStats {
    /// The stream.
    pub stream: StreamId,
    /// The priority level of the stream.
    pub level: i32,
    /// Whether the pool can return the stream to callers.
    pub active: bool,
    /// The workload that the stream was chosen for last. `None` if it was not chosen yet, or if it
    /// is busy with several.
    pub workload: Option<WorkloadType>,
    /// The counters of the stream. [`StreamMetrics::workload`] classifies what was submitted.
    pub metrics: StreamMetrics,
}

impl<D: Device> StreamPool<D> {
    /// Maximum number of streams in a pool.
    pub const MAX_STREAMS: usize = 256;
    /// Threshold of [`optimize`](Self::optimize), both for the recorded completions of a workload
    /// on a stream and for the outstanding operations of a stream.
    pub const MIN_SAMPLES: u64 = 16;

    /// The priorities of the streams of [`new`](Self::new), in turn.
    const PRIORITIES: [StreamPriority; 4] =
        [StreamPriority::Normal, StreamPriority::Low, StreamPriority::High, StreamPriority::Normal];

    /// Creates a pool of `count` streams, clamped to at least 1 and at most
    /// [`MAX_STREAMS`](Self::MAX_STREAMS). Of each four streams, the first and last have normal
    /// priority, the second low, and the third high. For streams of one priority, use
    /// [`with_priorities`](Self::with_priorities).
    ///
    /// # Errors
    /// Returns the same errors as [`Device::create_stream`].
    pub fn new(device: D, count: usize, strategy: AllocationStrategy) -> Result<Self, Error> {
        Self::create(device, &Self::PRIORITIES, count, strategy)
    }

    /// Creates a pool with one stream for each of the first [`MAX_STREAMS`](Self::MAX_STREAMS)
    /// priorities. If `priorities` is empty, the pool has one stream of normal priority.
    ///
    /// # Errors
    /// Returns the same errors as [`Device::create_stream`].
    pub fn with_priorities(
        device: D,
        priorities: &[StreamPriority],
        strategy: AllocationStrategy,
    ) -> Result<Self, Error> {
        let priorities = if priorities.is_empty() { &Self::PRIORITIES[..1] } else { priorities };
        Self::create(device, priorities, priorities.len(), strategy)
    }

    /// Creates a pool that chooses its number of streams between `bounds`, which are clamped to at
    /// least 1 and at most [`MAX_STREAMS`](Self::MAX_STREAMS). The pool begins with the lowest
    /// number, and with the priorities of [`new`](Self::new).
    ///
    /// Once in eight choices of a stream, the pool looks at the queued work. It adds a stream if
    /// the one it has chosen has at least two outstanding operations, and takes one away if more
    /// than half of the streams are idle. A strategy that looks at priorities gets a stream with
    /// that of the workload. Adding a stream can block in the driver of a GPU. If the device cannot
    /// create one, the pool stays as it is.
    ///
    /// # Errors
    /// Returns the same errors as [`Device::create_stream`].
    pub fn with_bounds(
        device: D,
        bounds: RangeInclusive<usize>,
        strategy: AllocationStrategy,
    ) -> Result<Self, Error> {
        let least = (*bounds.start()).clamp(1, Self::MAX_STREAMS);
        let bounds = least..=(*bounds.end()).clamp(least, Self::MAX_STREAMS);
        let mut this = Self::create(device, &Self::PRIORITIES, least, strategy)?;
        this.elastic = Some(Elastic::new(bounds));
        Ok(this)
    }

    fn create(
        device: D,
        priorities: &[StreamPriority],
        count: usize,
        strategy: AllocationStrategy,
    ) -> Result<Self, Error> {
        let range = device.info().priorities;
        let this = Self {
            device,
            streams: (0..Self::MAX_STREAMS).map(|_| OnceLock::new()).collect(),
            created: AtomicUsize::new(0),
            priorities: priorities.into(),
            turn: AtomicUsize::new(0),
            strategy: AtomicU8::new(strategy as u8),
            levels: WorkloadType::ALL.map(|workload| range.level(workload.priority())),
            times: Default::default(),
            models: Default::default(),
            elastic: None,
        };
        this.resize(count)?;
        Ok(this)
    }

    /// Returns the bounds between which the pool chooses its number of streams, if it does.
    pub fn bounds(&self) -> Option<RangeInclusive<usize>> {
        self.elastic.as_ref().map(|elastic| elastic.bounds.clone())
    }

    /// Returns the device that the streams belong to.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Returns the number of active streams.
    pub fn len(&self) -> usize {
        self.active().count()
    }

    /// Returns `false`: a pool always has a stream.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the active streams: those that the pool can return to callers.
    pub fn streams(&self) -> impl Iterator<Item = &D::Stream> {
        self.active().map(|pooled| &pooled.stream)
    }

    /// Returns the current strategy.
    pub fn strategy(&self) -> AllocationStrategy {
        use AllocationStrategy::{Learned, LoadBalanced, Priority, RoundRobin, Workload};
        [RoundRobin, LoadBalanced, Priority, Workload, Learned]
            [usize::from(self.strategy.load(Ordering::Relaxed))]
    }

    /// Sets the strategy by which later calls choose streams.
    pub fn set_strategy(&self, strategy: AllocationStrategy) {
        self.strategy.store(strategy as u8, Ordering::Relaxed);
    }

    /// Sets the number of active streams, clamped to at least 1 and at most
    /// [`MAX_STREAMS`](Self::MAX_STREAMS).
    ///
    /// New streams have the priorities with which the pool was created, in turn. Streams that
    /// become inactive still finish their work. A pool [with bounds](Self::with_bounds) may change
    /// the number again.
    ///
    /// # Errors
    /// Returns the same errors as [`Device::create_stream`].
    pub fn resize(&self, count: usize) -> Result<(), Error> {
        let count = count.clamp(1, Self::MAX_STREAMS);
        while self.created.load(Ordering::Acquire) < count {
            self.add_stream(self.next_priority())?;
        }
        for (number, pooled) in self.created().enumerate() {
            pooled.active.store(number < count, Ordering::Release);
        }
        Ok(())
    }

    /// Returns a stream for [mixed](WorkloadType::Mixed) work. Does not block.
    pub fn stream(&self) -> &D::Stream {
        self.stream_for_workload(WorkloadType::Mixed)
    }

    /// Returns a stream for the given kind of work, chosen by the current strategy. Does not block,
    /// except when a pool [with bounds](Self::with_bounds) adds a stream.
    pub fn stream_for_workload(&self, workload: WorkloadType) -> &D::Stream {
        self.stream_for_work(workload, 0)
    }

    /// Returns a stream for a piece of work, chosen by the current strategy. Does not block, except
    /// when a pool [with bounds](Self::with_bounds) adds a stream.
    ///
    /// `bytes` is how much data the work handles: for a copy, its length. Only
    /// [`AllocationStrategy::Learned`] uses it. That strategy takes everything that is submitted
    /// to the stream until the next choice for one piece of work.
    pub fn stream_for_work(&self, workload: WorkloadType, bytes: u64) -> &D::Stream {
        let mut pooled = self.choose(workload);
        if let Some(elastic) = &self.elastic
            && self.follow_load(elastic, pooled.outstanding(), workload)
        {
            pooled = self.choose(workload);
        }
        self.observe(pooled);
        if self.strategy() == AllocationStrategy::Learned {
            let expected_ns = self.expected_ns(workload, bytes);
            self.train(pooled.begin_piece(workload, bytes, expected_ns));
        }
        pooled.take_for(workload);
        &pooled.stream
    }

    fn choose(&self, workload: WorkloadType) -> &PooledStream<D::Stream> {
        match self.strategy() {
            AllocationStrategy::RoundRobin => self.least(|()| true, |_| ()),
            AllocationStrategy::LoadBalanced => {
                self.least(|&load| load == 0, PooledStream::outstanding)
            }
            AllocationStrategy::Priority => {
                let wanted = self.levels[workload as usize];
                self.least(
                    |&key| key == (0, 0),
                    |pooled| (pooled.distance(wanted), pooled.outstanding()),
                )
            }
            AllocationStrategy::Workload => {
                let (wanted, usual_ns) = (self.levels[workload as usize], self.usual_ns(workload));
                let most_ns = usual_ns.saturating_add(usual_ns / 4);
                self.least(
                    |&(ns, distance)| ns <= most_ns && distance == 0,
                    |pooled| {
                        let new_ns = pooled.times[workload as usize].ns().unwrap_or(usual_ns);
                        let queued_ns = match pooled.outstanding() {
                            0 => 0,
                            count => count.saturating_mul(self.queued_each_ns(pooled, new_ns)),
                        };
                        (queued_ns.saturating_add(new_ns), pooled.distance(wanted))
                    },
                )
            }
            // The new work takes as long on each stream, so what is left there decides.
            AllocationStrategy::Learned => {
                let wanted = self.levels[workload as usize];
                self.least(
                    |&key| key == (0, 0),
                    |pooled| (pooled.remaining_ns(), pooled.distance(wanted)),
                )
            }
        }
    }

    /// Returns an active stream with the least key. Among equal ones, takes turns. Stops looking at
    /// a key that is good enough.
    fn least<K: Ord>(
        &self,
        is_enough: impl Fn(&K) -> bool,
        key: impl Fn(&PooledStream<D::Stream>) -> K,
    ) -> &PooledStream<D::Stream> {
        loop {
            let created = self.created.load(Ordering::Acquire);
            let turn = self.turn.fetch_add(1, Ordering::Relaxed);
            let first = if turn < created { turn } else { turn % created };
            let mut best: Option<(K, usize, &PooledStream<D::Stream>)> = None;
            for index in (first..created).chain(0..first) {
                let pooled = self.entry(index);
                if !pooled.active.load(Ordering::Acquire) {
                    continue;
                }
                let key = key(pooled);
                if best.as_ref().is_none_or(|(least, ..)| key < *least) {
                    let stop = is_enough(&key);
                    best = Some((key, index, pooled));
                    if stop {
                        break;
                    }
                }
            }
            // There is none only while another thread exchanges the active streams.
            if let Some((_, index, pooled)) = best {
                if turn != index {
                    self.turn.store(index + 1, Ordering::Relaxed);
                }
                return pooled;
            }
        }
    }

    /// Returns how long a piece of work takes on any stream.
    fn usual_ns(&self, workload: WorkloadType) -> u64 {
        let workload = workload as usize;
        self.times[workload].ns().unwrap_or(WorkloadType::ASSUMED_NS[workload])
    }

    /// Returns how long each queued operation of a stream takes.
    fn queued_each_ns(&self, pooled: &PooledStream<D::Stream>, unknown_ns: u64) -> u64 {
        pooled.workload().map_or(unknown_ns, |workload| {
            pooled.times[workload as usize].ns().unwrap_or_else(|| self.usual_ns(workload))
        })
    }

    /// Returns how long a piece of work is expected to take, by the model if it is trained.
    fn expected_ns(&self, workload: WorkloadType, bytes: u64) -> u64 {
        let predicted = self.models[workload as usize].predict_ns(bytes);
        predicted.unwrap_or_else(|| self.usual_ns(workload))
    }

    /// Trains the models with what a stream has done.
    fn train(&self, observed: Option<Observation>) {
        let observed = observed.filter(|_| !self.is_accelerator());
        if let Some(Observation { workload, pieces, bytes, took_ns }) = observed {
            self.models[workload as usize].train(pieces, bytes, took_ns);
        }
    }

    /// Returns whether the time when work ends is known only if its stream has other work.
    fn is_accelerator(&self) -> bool {
        matches!(self.device.info().kind, DeviceKind::Cuda | DeviceKind::Runtime)
    }

    /// Counts the work of a stream that was completed since the last call.
    fn observe(&self, pooled: &PooledStream<D::Stream>) {
        let metrics = pooled.stream.metrics();
        let StreamMetrics { completed_work, .. } = metrics;
        let seen = pooled.seen_work.load(Ordering::Relaxed);
        if completed_work <= seen {
            return;
        }
        let exchanged = pooled.seen_work.compare_exchange(
            seen,
            completed_work,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        if exchanged.is_err() {
            return; // another thread counts it
        }
        let busy_ns = busy_ns(&metrics);
        let took_ns = busy_ns.saturating_sub(pooled.seen_ns.swap(busy_ns, Ordering::Relaxed));
        if metrics.outstanding() == 0 && self.is_accelerator() {
            return;
        }
        if let Some(workload) = pooled.workload() {
            let count = completed_work - seen;
            pooled.times[workload as usize].add(count, took_ns);
            self.times[workload as usize].add(count, took_ns);
        }
    }

    fn next_priority(&self) -> StreamPriority {
        self.priorities[self.created.load(Ordering::Acquire) % self.priorities.len()]
    }

    /// Returns the active stream of the given priority that has the fewest outstanding operations.
    ///
    /// If there is none, activates or creates a stream of this priority. If the pool is full,
    /// returns an active stream of the nearest priority instead.
    ///
    /// # Errors
    /// Returns the same errors as [`Device::create_stream`].
    pub fn priority_stream(&self, priority: StreamPriority) -> Result<&D::Stream, Error> {
        let level = self.device.info().priorities.level(priority);
        if self.active().all(|pooled| pooled.stream.level() != level) {
            match self.created().find(|pooled| pooled.stream.level() == level) {
                Some(pooled) => pooled.active.store(true, Ordering::Release),
                None if self.created.load(Ordering::Acquire) < Self::MAX_STREAMS => {
                    self.add_stream(priority)?;
                }
                None => {}
            }
        }
        let nearest = self
            .least(|&key| key == (0, 0), |pooled| (pooled.distance(level), pooled.outstanding()));
        Ok(&nearest.stream)
    }

    /// Returns whether at least one active stream is idle. Does not block.
    pub fn has_ready(&self) -> bool {
        self.ready().is_some()
    }

    /// Blocks until an active stream is idle, and returns that stream. Returns `None` if no active
    /// stream is idle within `timeout`.
    ///
    /// # Errors
    /// Returns the error of an active stream if all active streams have failed.
    pub fn wait_any_ready(&self, timeout: Duration) -> Result<Option<&D::Stream>, Error> {
        let deadline = Instant::now().checked_add(timeout);
        let mut pause = Duration::from_micros(5);
        loop {
            let mut failed = None;
            let mut busy = false;
            for stream in self.streams() {
                match stream.query() {
                    Ok(Status::Ready) => return Ok(Some(stream)),
                    Ok(Status::Pending) => busy = true,
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            if let Some(error) = failed.filter(|_| !busy) {
                return Err(error);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(None);
            }
            // A device without threads makes progress only through the next query.
            if self.device.info().runs_by_itself {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
        }
    }

    /// Records how long a piece of work took on a stream. Has no effect if the stream is not active
    /// in this pool.
    pub fn record_completion(&self, stream: StreamId, workload: WorkloadType, time: Duration) {
        self.record(stream, workload, time);
    }

    /// Like [`record_completion`](Self::record_completion), for a piece of work of `bytes` bytes.
    /// Also trains the model of the workload.
    pub fn record_work(
        &self,
        stream: StreamId,
        workload: WorkloadType,
        bytes: u64,
        time: Duration,
    ) {
        if self.record(stream, workload, time) {
            self.models[workload as usize].train(1, bytes, nanoseconds(time));
        }
    }

    /// Records a time. Returns whether the stream is active in this pool.
    fn record(&self, stream: StreamId, workload: WorkloadType, time: Duration) -> bool {
        let found = self.active().find(|pooled| pooled.stream.id() == stream);
        if let Some(pooled) = found {
            pooled.times[workload as usize].add(1, nanoseconds(time));
            self.times[workload as usize].add(1, nanoseconds(time));
        }
        found.is_some()
    }

    /// Returns how long the model expects a piece of work of `bytes` bytes to take. Returns `None`
    /// before the first training.
    pub fn expected_time(&self, workload: WorkloadType, bytes: u64) -> Option<Duration> {
        if self.strategy() == AllocationStrategy::Learned {
            self.created().for_each(|pooled| self.train(pooled.end_batch()));
        }
        self.models[workload as usize].predict_ns(bytes).map(Duration::from_nanos)
    }

    /// Returns the average time of a workload on all streams, of what the pool has observed and of
    /// what was [recorded](Self::record_completion). Returns `None` if there is neither.
    pub fn average_time(&self, workload: WorkloadType) -> Option<Duration> {
        self.created().for_each(|pooled| self.observe(pooled));
        self.times[workload as usize].ns().map(Duration::from_nanos)
    }

    /// Returns all streams that the pool has created, and what runs on them. Does not block.
    pub fn stats(&self) -> Vec<PooledStreamStats> {
        let stats = |pooled: &PooledStream<D::Stream>| PooledStreamStats {
            stream: pooled.stream.id(),
            level: pooled.stream.level(),
            active: pooled.active.load(Ordering::Relaxed),
            workload: pooled.workload(),
            metrics: pooled.stream.metrics(),
        };
        self.created().map(stats).collect()
    }

    fn ready(&self) -> Option<&D::Stream> {
        self.streams().find(|stream| stream.query() == Ok(Status::Ready))
    }

    fn entry(&self, index: usize) -> &PooledStream<D::Stream> {
        self.streams[index].get().expect("the first `created` entries are set")
    }

    fn created(&self) -> impl Iterator<Item = &PooledStream<D::Stream>> {
        (0..self.created.load(Ordering::Acquire)).map(|index| self.entry(index))
    }

    /// Returns the entries of the active streams.
    fn active(&self) -> impl Iterator<Item = &PooledStream<D::Stream>> {
        self.created().filter(|pooled| pooled.active.load(Ordering::Acquire))
    }

    /// Creates a stream and stores it in the first free entry. If no entry is free, drops the
    /// stream.
    fn add_stream(&self, priority: StreamPriority) -> Result<(), Error> {
        let stream = self.device.create_stream(priority)?;
        let mut pooled = Some(PooledStream::new(stream));
        for (index, entry) in self.streams.iter().enumerate() {
            let mut inserted = false;
            entry.get_or_init(|| {
                inserted = true;
                pooled.take().expect("the closure runs at most once")
            });
            if inserted {
                self.created.fetch_max(index + 1, Ordering::AcqRel);
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Returns a time that a caller has measured, in nanoseconds.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).min(MOST_NS)
}
