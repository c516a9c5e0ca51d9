// SPDX-License-Identifier: MIT OR Apache-2.0
//! A pool of reusable streams.

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::workload::WorkloadType;
use crate::{Device, DeviceKind, Error, Status, Stream, StreamId, StreamMetrics, StreamPriority};

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
}

/// A pool of streams of one device.
///
/// Choosing a stream takes no lock of the pool. It blocks only while a pool
/// [with bounds](Self::with_bounds) adds a stream. Streams live as long as the pool.
///
/// # What the pool learns
/// The pool measures what runs on its streams: work counts for the workload for which its stream
/// was chosen last. Work does not count if the stream was then still busy with another workload,
/// because its time cannot be told apart. [`record_completion`](Self::record_completion) adds times
/// that the caller measured. The average times serve [`AllocationStrategy::Workload`] and
/// [`optimize`](Self::optimize). The pool uses only averages of these times. It has no trained
/// model, and does not measure energy. The only property of the device that it uses is the range of
/// priorities.
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
    /// If the pool chooses its number of streams.
    elastic: Option<Elastic>,
}

/// The state of a pool that chooses its number of streams.
#[derive(Debug)]
struct Elastic {
    bounds: RangeInclusive<usize>,
    choices: AtomicUsize,
    /// Whether a thread is changing the number.
    resizing: AtomicBool,
}

#[derive(Debug)]
struct PooledStream<S> {
    stream: S,
    level: i32,
    /// Whether the pool returns this stream to callers.
    active: AtomicBool,
    times: [Average; 4],
    /// The workload of what runs on the stream, or [`UNKNOWN`].
    workload: AtomicU8,
    /// How much completed work was counted, and how long it took.
    seen_work: AtomicU64,
    seen_ns: AtomicU64,
}

/// No workload, or several at once.
const UNKNOWN: u8 = u8::MAX;

#[derive(Debug, Default)]
struct Average {
    count: AtomicU64,
    total_ns: AtomicU64,
    /// The average, which is read more often than it changes.
    mean_ns: AtomicU64,
}

impl Average {
    fn add(&self, count: u64, total_ns: u64) {
        let total_ns = self.total_ns.fetch_add(total_ns, Ordering::Relaxed) + total_ns;
        let count = self.count.fetch_add(count, Ordering::Relaxed) + count;
        self.mean_ns.store((total_ns / count.max(1)).max(1), Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the average, at least 1 ns.
    fn ns(&self) -> Option<u64> {
        Some(self.mean_ns.load(Ordering::Relaxed)).filter(|&ns| ns > 0)
    }
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

/// A change of strategy by [`StreamPool::optimize`].
#[derive(Debug, Clone, PartialEq)]
pub struct StrategyChange {
    /// The previous strategy.
    pub from: AllocationStrategy,
    /// The new strategy.
    pub to: AllocationStrategy,
    /// The measurement that caused the change, as a sentence.
    pub evidence: String,
}

impl<D: Device> StreamPool<D> {
    /// Maximum number of streams in a pool.
    pub const MAX_STREAMS: usize = 256;
    /// Threshold of [`optimize`](Self::optimize), both for the recorded completions of a workload
    /// on a stream and for the outstanding operations of a stream.
    pub const MIN_SAMPLES: u64 = 16;

    /// The outstanding operations of a chosen stream that make an elastic pool grow.
    const DEEP: u64 = 2;
    /// An elastic pool looks at its number of streams once in this many choices.
    const CHOICES: usize = 8;
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
        let (choices, resizing) = (AtomicUsize::new(0), AtomicBool::new(false));
        this.elastic = Some(Elastic { bounds, choices, resizing });
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
        use AllocationStrategy::{LoadBalanced, Priority, RoundRobin, Workload};
        [RoundRobin, LoadBalanced, Priority, Workload]
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
        let mut pooled = self.choose(workload);
        if let Some(elastic) = &self.elastic
            && self.follow_load(elastic, outstanding(pooled), workload)
        {
            pooled = self.choose(workload);
        }
        self.observe(pooled);
        pooled.take_for(workload);
        &pooled.stream
    }

    fn choose(&self, workload: WorkloadType) -> &PooledStream<D::Stream> {
        match self.strategy() {
            AllocationStrategy::RoundRobin => self.least(|()| true, |_| ()),
            AllocationStrategy::LoadBalanced => self.least(|&load| load == 0, outstanding),
            AllocationStrategy::Priority => {
                let wanted = self.levels[workload as usize];
                self.least(
                    |&key| key == (0, 0),
                    |pooled| (pooled.distance(wanted), outstanding(pooled)),
                )
            }
            AllocationStrategy::Workload => {
                let (wanted, usual_ns) = (self.levels[workload as usize], self.usual_ns(workload));
                let most_ns = usual_ns.saturating_add(usual_ns / 4);
                self.least(
                    |&(ns, distance)| ns <= most_ns && distance == 0,
                    |pooled| {
                        let new_ns = pooled.times[workload as usize].ns().unwrap_or(usual_ns);
                        let queued_ns = match outstanding(pooled) {
                            0 => 0,
                            count => count.saturating_mul(self.queued_each_ns(pooled, new_ns)),
                        };
                        (queued_ns.saturating_add(new_ns), pooled.distance(wanted))
                    },
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

    /// Counts the work of a stream that was completed since the last call.
    fn observe(&self, pooled: &PooledStream<D::Stream>) {
        let metrics = pooled.stream.metrics();
        let StreamMetrics { completed_work, busy, .. } = metrics;
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
        let busy_ns = u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX);
        let took_ns = busy_ns.saturating_sub(pooled.seen_ns.swap(busy_ns, Ordering::Relaxed));
        // When an accelerator has ended its work is known only if it still has other work.
        let is_accelerator =
            matches!(self.device.info().kind, DeviceKind::Cuda | DeviceKind::Runtime);
        if is_accelerator && metrics.outstanding() == 0 {
            return;
        }
        if let Some(workload) = pooled.workload() {
            let count = completed_work - seen;
            pooled.times[workload as usize].add(count, took_ns);
            self.times[workload as usize].add(count, took_ns);
        }
    }

    /// Changes the number of streams by one if the queued work asks for it. `load` is that of the
    /// stream that was chosen. Returns whether the number has changed.
    fn follow_load(
        &self,
        Elastic { bounds, choices, resizing }: &Elastic,
        load: u64,
        workload: WorkloadType,
    ) -> bool {
        let turn = choices.fetch_add(1, Ordering::Relaxed) + 1;
        if !turn.is_multiple_of(Self::CHOICES) || resizing.swap(true, Ordering::Acquire) {
            return false;
        }
        let active: Vec<_> = self.active().collect();
        let idle: Vec<_> = active.iter().filter(|pooled| outstanding(pooled) == 0).collect();
        let has_changed = if load >= Self::DEEP && active.len() < *bounds.end() {
            self.grow(*bounds.end(), workload)
        } else if 2 * idle.len() > active.len() && active.len() > *bounds.start() {
            idle.last().is_some_and(|last| last.active.swap(false, Ordering::Release))
        } else {
            false
        };
        resizing.store(false, Ordering::Release);
        has_changed
    }

    /// Makes one more stream active. Returns whether there is one.
    fn grow(&self, most: usize, workload: WorkloadType) -> bool {
        let priority = match self.strategy() {
            AllocationStrategy::Priority | AllocationStrategy::Workload => workload.priority(),
            _ => self.next_priority(),
        };
        let level = self.device.info().priorities.level(priority);
        let inactive = || self.created().filter(|pooled| !pooled.active.load(Ordering::Relaxed));
        let fitting = inactive().find(|pooled| pooled.stream.level() == level);
        let again = match fitting {
            None if self.created.load(Ordering::Acquire) < most => None,
            None => inactive().next(),
            fitting => fitting,
        };
        match again {
            Some(pooled) => !pooled.active.swap(true, Ordering::Release),
            // The pool also works without another stream.
            None => self.add_stream(priority).is_ok(),
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
            .least(|&key| key == (0, 0), |pooled| (pooled.distance(level), outstanding(pooled)));
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
        if let Some(pooled) = self.active().find(|pooled| pooled.stream.id() == stream) {
            let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            pooled.times[workload as usize].add(1, ns);
            self.times[workload as usize].add(1, ns);
        }
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

    /// Changes the strategy if measurements favor another one. Returns the change, or `None` if the
    /// strategy stays the same. Counts what the pool has observed; nothing needs to be recorded.
    ///
    /// - Switches to [`Workload`](AllocationStrategy::Workload) if the average time of a workload
    ///   is more than 1.5 times as long on one stream as on another. Only streams with at least
    ///   [`MIN_SAMPLES`](Self::MIN_SAMPLES) completions count.
    /// - Otherwise switches to [`LoadBalanced`](AllocationStrategy::LoadBalanced) if one stream has
    ///   at least [`MIN_SAMPLES`](Self::MIN_SAMPLES) outstanding operations and more than twice as
    ///   many as another. A pool that uses `Workload` does not switch.
    pub fn optimize(&self) -> Option<StrategyChange> {
        self.created().for_each(|pooled| self.observe(pooled));
        let from = self.strategy();
        let (to, evidence) = self.uneven_times().or_else(|| self.uneven_loads())?;
        if to == from
            || (from, to) == (AllocationStrategy::Workload, AllocationStrategy::LoadBalanced)
        {
            return None;
        }
        self.set_strategy(to);
        Some(StrategyChange { from, to, evidence })
    }

    fn uneven_times(&self) -> Option<(AllocationStrategy, String)> {
        WorkloadType::ALL.into_iter().find_map(|workload| {
            let times = self.active().map(|pooled| &pooled.times[workload as usize]);
            let known: Vec<u64> = times
                .filter(|time| time.count() >= Self::MIN_SAMPLES)
                .filter_map(Average::ns)
                .collect();
            let (least, most) = (*known.iter().min()?, *known.iter().max()?);
            (most - least > least / 2).then(|| {
                let evidence = format!(
                    "{workload:?} work takes on average {least} ns on one stream and {most} ns on \
                     another"
                );
                (AllocationStrategy::Workload, evidence)
            })
        })
    }

    fn uneven_loads(&self) -> Option<(AllocationStrategy, String)> {
        let loads: Vec<u64> = self.active().map(outstanding).collect();
        let (least, most) = (*loads.iter().min()?, *loads.iter().max()?);
        (most >= Self::MIN_SAMPLES && most > 2 * least).then(|| {
            let evidence =
                format!("{most} operations are outstanding on one stream and {least} on another");
            (AllocationStrategy::LoadBalanced, evidence)
        })
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
        let pooled = PooledStream {
            level: stream.level(),
            stream,
            active: AtomicBool::new(true),
            times: Default::default(),
            workload: AtomicU8::new(UNKNOWN),
            seen_work: AtomicU64::new(0),
            seen_ns: AtomicU64::new(0),
        };
        let mut pooled = Some(pooled);
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

impl<S: Stream> PooledStream<S> {
    /// Returns how far the priority of the stream is from a level.
    fn distance(&self, level: i32) -> u32 {
        self.level.abs_diff(level)
    }

    fn workload(&self) -> Option<WorkloadType> {
        WorkloadType::ALL.get(usize::from(self.workload.load(Ordering::Relaxed))).copied()
    }

    /// Notes for which workload the stream was chosen.
    fn take_for(&self, workload: WorkloadType) {
        let (before, new) = (self.workload.load(Ordering::Relaxed), workload as u8);
        if before != new {
            let is_idle = self.stream.outstanding() == 0;
            self.workload.store(if is_idle { new } else { UNKNOWN }, Ordering::Relaxed);
        }
    }
}

fn outstanding<S: Stream>(pooled: &PooledStream<S>) -> u64 {
    pooled.stream.outstanding()
}
