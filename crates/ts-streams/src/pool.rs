// SPDX-License-Identifier: MIT OR Apache-2.0
//! A pool of reusable streams.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::{Device, Error, Status, Stream, StreamId, StreamPriority};

/// The kind of a piece of work, by the operations that take most of its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkloadType {
    /// Arithmetic.
    Compute,
    /// Copies.
    Memory,
    /// Both arithmetic and copies.
    Mixed,
    /// Waits, records and small host functions.
    Coordination,
}

impl WorkloadType {
    /// All workload types, in the order of their declaration.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Memory, Self::Mixed, Self::Coordination];
}

/// The strategy by which a [`StreamPool`] chooses a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AllocationStrategy {
    /// Chooses each stream in turn.
    RoundRobin,
    /// Chooses the stream with the fewest outstanding operations.
    LoadBalanced,
    /// Chooses the stream whose priority is nearest to that of the workload. If there are several,
    /// chooses the one with the fewest outstanding operations.
    ///
    /// - [`Coordination`](WorkloadType::Coordination) has high priority, because other work waits
    ///   for it.
    /// - [`Memory`](WorkloadType::Memory) has low priority.
    /// - The other workloads have normal priority.
    Priority,
    /// Chooses the stream that is expected to finish first. The estimate for a stream is its
    /// average recorded time for this kind of work, multiplied by one more than its number of
    /// outstanding operations. If no time was recorded for the stream, the average over all streams
    /// is used.
    Workload,
}

/// A pool of streams of one device.
///
/// Choosing a stream takes no lock of the pool and does not block. Streams live as long as the
/// pool.
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
    turn: AtomicUsize,
    strategy: AtomicU8,
    times: [Average; 4],
}

#[derive(Debug)]
struct PooledStream<S> {
    stream: S,
    /// Whether the pool returns this stream to callers.
    active: AtomicBool,
    times: [Average; 4],
}

#[derive(Debug, Default)]
struct Average {
    count: AtomicU64,
    total_ns: AtomicU64,
}

impl Average {
    fn add(&self, time: Duration) {
        self.total_ns
            .fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn ns(&self) -> Option<u64> {
        self.total_ns.load(Ordering::Relaxed).checked_div(self.count())
    }
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

    /// Creates a pool of `count` streams of normal priority. `count` is clamped to at least 1 and
    /// at most [`MAX_STREAMS`](Self::MAX_STREAMS).
    ///
    /// # Errors
    /// Returns the same errors as [`Device::create_stream`].
    pub fn new(device: D, count: usize, strategy: AllocationStrategy) -> Result<Self, Error> {
        let priorities = vec![StreamPriority::Normal; count.clamp(1, Self::MAX_STREAMS)];
        Self::with_priorities(device, &priorities, strategy)
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
        let this = Self {
            device,
            streams: (0..Self::MAX_STREAMS).map(|_| OnceLock::new()).collect(),
            created: AtomicUsize::new(0),
            turn: AtomicUsize::new(0),
            strategy: AtomicU8::new(strategy as u8),
            times: Default::default(),
        };
        for &priority in priorities.iter().take(Self::MAX_STREAMS) {
            this.add_stream(priority)?;
        }
        if priorities.is_empty() {
            this.add_stream(StreamPriority::Normal)?;
        }
        Ok(this)
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
    /// New streams have normal priority. Streams that become inactive still finish their work.
    ///
    /// # Errors
    /// Returns the same errors as [`Device::create_stream`].
    pub fn resize(&self, count: usize) -> Result<(), Error> {
        let count = count.clamp(1, Self::MAX_STREAMS);
        while self.created.load(Ordering::Acquire) < count {
            self.add_stream(StreamPriority::Normal)?;
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

    /// Returns a stream for the given kind of work, chosen by the current strategy. Does not block.
    pub fn stream_for_workload(&self, workload: WorkloadType) -> &D::Stream {
        let pooled = match self.strategy() {
            AllocationStrategy::RoundRobin => {
                let turn = self.turn.fetch_add(1, Ordering::Relaxed);
                // Another thread may shrink the pool after `len`. If so, take the first stream.
                self.active().nth(turn % self.len().max(1)).or_else(|| self.active().next())
            }
            AllocationStrategy::LoadBalanced => {
                self.active().min_by_key(|pooled| outstanding(pooled))
            }
            AllocationStrategy::Priority => {
                let range = self.device.info().priorities;
                let wanted = match workload {
                    WorkloadType::Coordination => range.level(StreamPriority::High),
                    WorkloadType::Compute | WorkloadType::Mixed => {
                        range.level(StreamPriority::Normal)
                    }
                    WorkloadType::Memory => range.level(StreamPriority::Low),
                };
                self.active().min_by_key(|pooled| {
                    (pooled.stream.level().abs_diff(wanted), outstanding(pooled))
                })
            }
            AllocationStrategy::Workload => {
                let usual_ns = self.times[workload as usize].ns().unwrap_or(1);
                // The estimate counts the outstanding operations and the new one.
                let done_ns = |pooled: &PooledStream<D::Stream>| {
                    let each_ns = pooled.times[workload as usize].ns().unwrap_or(usual_ns);
                    each_ns.max(1).saturating_mul(outstanding(pooled) + 1)
                };
                self.active().min_by_key(|pooled| done_ns(pooled))
            }
        };
        &pooled.expect("a pool has at least one active stream").stream
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
            .active()
            .min_by_key(|pooled| (pooled.stream.level().abs_diff(level), outstanding(pooled)));
        Ok(&nearest.expect("a pool has at least one active stream").stream)
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
            pooled.times[workload as usize].add(time);
            self.times[workload as usize].add(time);
        }
    }

    /// Returns the average of the [recorded](Self::record_completion) times of a workload on all
    /// streams, or `None` if no time was recorded.
    pub fn average_time(&self, workload: WorkloadType) -> Option<Duration> {
        self.times[workload as usize].ns().map(Duration::from_nanos)
    }

    /// Changes the strategy if measurements favor another one. Returns the change, or `None` if the
    /// strategy stays the same.
    ///
    /// - Switches to [`Workload`](AllocationStrategy::Workload) if the average time of a workload
    ///   is more than 1.5 times as long on one stream as on another. Only streams with at least
    ///   [`MIN_SAMPLES`](Self::MIN_SAMPLES) completions count.
    /// - Otherwise switches to [`LoadBalanced`](AllocationStrategy::LoadBalanced) if one stream has
    ///   at least [`MIN_SAMPLES`](Self::MIN_SAMPLES) outstanding operations and more than twice as
    ///   many as another. A pool that uses `Workload` does not switch.
    pub fn optimize(&self) -> Option<StrategyChange> {
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
        let pooled =
            PooledStream { stream, active: AtomicBool::new(true), times: Default::default() };
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

fn outstanding<S: Stream>(pooled: &PooledStream<S>) -> u64 {
    pooled.stream.metrics().outstanding()
}
