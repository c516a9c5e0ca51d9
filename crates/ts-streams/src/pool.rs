// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams that are made once and used again and again.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::{Device, Error, Status, Stream, StreamId, StreamPriority};

/// What work is mostly made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkloadType {
    /// Arithmetic.
    Compute,
    /// Copies.
    Memory,
    /// Both.
    Mixed,
    /// Neither: waits and records, small functions.
    Coordination,
}

impl WorkloadType {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Memory, Self::Mixed, Self::Coordination];
}

/// Which stream work goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AllocationStrategy {
    /// Each in turn.
    RoundRobin,
    /// The one with the least outstanding work.
    LoadBalanced,
    /// The least loaded of those whose urgency suits the work: coordination, on which others wait,
    /// goes to the most urgent streams, copies to the least urgent.
    Priority,
    /// The one that should be done first, by the time that such work took there before and what is
    /// outstanding.
    Workload,
}

/// A pool of streams of one device. Choosing one takes no lock and does not block; streams stay for
/// as long as the pool does.
#[derive(Debug)]
pub struct StreamPool<D: Device> {
    device: D,
    slots: Box<[OnceLock<Slot<D::Stream>>]>,
    /// How many there are, from the first one on.
    made: AtomicUsize,
    turn: AtomicUsize,
    strategy: AtomicU8,
    times: [Average; 4],
}

#[derive(Debug)]
struct Slot<S> {
    stream: S,
    /// Whether it is given out.
    given: AtomicBool,
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

/// A pool that is doing better another way, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct StrategyChange {
    /// What it did so far.
    pub from: AllocationStrategy,
    /// What it does now.
    pub to: AllocationStrategy,
    /// What was measured.
    pub evidence: String,
}

impl<D: Device> StreamPool<D> {
    /// As many streams as a pool ever has.
    pub const MAX_STREAMS: usize = 256;
    /// Completions of a kind of work before its times say something.
    pub const EVIDENCE: u64 = 16;

    /// A pool of `count` streams of normal urgency, at least one and at most
    /// [`MAX_STREAMS`](Self::MAX_STREAMS).
    ///
    /// # Errors
    /// As [`Device::create_stream`].
    pub fn new(device: D, count: usize, strategy: AllocationStrategy) -> Result<Self, Error> {
        let priorities = vec![StreamPriority::Normal; count.clamp(1, Self::MAX_STREAMS)];
        Self::with_priorities(device, &priorities, strategy)
    }

    /// A pool with a stream for each of these urgencies; without any, with one of normal urgency.
    ///
    /// # Errors
    /// As [`Device::create_stream`].
    pub fn with_priorities(
        device: D,
        priorities: &[StreamPriority],
        strategy: AllocationStrategy,
    ) -> Result<Self, Error> {
        let this = Self {
            device,
            slots: (0..Self::MAX_STREAMS).map(|_| OnceLock::new()).collect(),
            made: AtomicUsize::new(0),
            turn: AtomicUsize::new(0),
            strategy: AtomicU8::new(strategy as u8),
            times: Default::default(),
        };
        for &priority in priorities.iter().take(Self::MAX_STREAMS) {
            this.grow(priority)?;
        }
        if priorities.is_empty() {
            this.grow(StreamPriority::Normal)?;
        }
        Ok(this)
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// How many streams it gives out.
    pub fn len(&self) -> usize {
        self.slots().count()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The streams that it gives out.
    pub fn streams(&self) -> impl Iterator<Item = &D::Stream> {
        self.slots().map(|slot| &slot.stream)
    }

    /// How it chooses.
    pub fn strategy(&self) -> AllocationStrategy {
        use AllocationStrategy::{LoadBalanced, Priority, RoundRobin, Workload};
        [RoundRobin, LoadBalanced, Priority, Workload]
            [usize::from(self.strategy.load(Ordering::Relaxed))]
    }

    /// Has it choose so from now on.
    pub fn set_strategy(&self, strategy: AllocationStrategy) {
        self.strategy.store(strategy as u8, Ordering::Relaxed);
    }

    /// Gives out so many streams from now on, at least one: new ones are of normal urgency. Those
    /// that are given out no longer go on with what they have.
    ///
    /// # Errors
    /// As [`Device::create_stream`].
    pub fn resize(&self, count: usize) -> Result<(), Error> {
        let count = count.clamp(1, Self::MAX_STREAMS);
        while self.made.load(Ordering::Acquire) < count {
            self.grow(StreamPriority::Normal)?;
        }
        for (number, slot) in self.made().enumerate() {
            slot.given.store(number < count, Ordering::Release);
        }
        Ok(())
    }

    /// A stream for work of which nothing is known.
    pub fn stream(&self) -> &D::Stream {
        self.stream_for_workload(WorkloadType::Mixed)
    }

    /// A stream for such work.
    pub fn stream_for_workload(&self, workload: WorkloadType) -> &D::Stream {
        let slot = match self.strategy() {
            AllocationStrategy::RoundRobin => {
                let turn = self.turn.fetch_add(1, Ordering::Relaxed);
                // There may be fewer by now; then the first.
                self.slots().nth(turn % self.len().max(1)).or_else(|| self.slots().next())
            }
            AllocationStrategy::LoadBalanced => self.slots().min_by_key(|slot| outstanding(slot)),
            AllocationStrategy::Priority => {
                let range = self.device.info().priorities;
                let wanted = match workload {
                    WorkloadType::Coordination => range.level(StreamPriority::High),
                    WorkloadType::Compute | WorkloadType::Mixed => {
                        range.level(StreamPriority::Normal)
                    }
                    WorkloadType::Memory => range.level(StreamPriority::Low),
                };
                self.slots()
                    .min_by_key(|slot| (slot.stream.level().abs_diff(wanted), outstanding(slot)))
            }
            AllocationStrategy::Workload => {
                let usual_ns = self.times[workload as usize].ns().unwrap_or(1);
                // What waits there, and this.
                let done_ns = |slot: &Slot<D::Stream>| {
                    let each_ns = slot.times[workload as usize].ns().unwrap_or(usual_ns);
                    each_ns.max(1).saturating_mul(outstanding(slot) + 1)
                };
                self.slots().min_by_key(|slot| done_ns(slot))
            }
        };
        &slot.expect("there is at least one stream").stream
    }

    /// The least loaded stream of this urgency, made if there is none; of the nearest where there
    /// is no room for more.
    ///
    /// # Errors
    /// As [`Device::create_stream`].
    pub fn priority_stream(&self, priority: StreamPriority) -> Result<&D::Stream, Error> {
        let level = self.device.info().priorities.level(priority);
        if self.slots().all(|slot| slot.stream.level() != level) {
            // One that is given out no longer is as good as a new one.
            match self.made().find(|slot| slot.stream.level() == level) {
                Some(slot) => slot.given.store(true, Ordering::Release),
                None if self.made.load(Ordering::Acquire) < Self::MAX_STREAMS => {
                    self.grow(priority)?;
                }
                None => {}
            }
        }
        let nearest = self
            .slots()
            .min_by_key(|slot| (slot.stream.level().abs_diff(level), outstanding(slot)));
        Ok(&nearest.expect("there is at least one stream").stream)
    }

    /// Whether a stream has nothing to do. Does not block.
    pub fn has_ready(&self) -> bool {
        self.ready().is_some()
    }

    /// A stream that has nothing to do; waits for one. Blocks. `None` when none was ready within
    /// the timeout.
    ///
    /// # Errors
    /// That of work on a stream, when all streams failed: none of them becomes ready.
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
            // A device that runs only when it is asked is asked again at once.
            if self.device.info().runs_by_itself {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
        }
    }

    /// Notes how long such work took on a stream of this pool; others are not counted.
    pub fn record_completion(&self, stream: StreamId, workload: WorkloadType, time: Duration) {
        if let Some(slot) = self.slots().find(|slot| slot.stream.id() == stream) {
            slot.times[workload as usize].add(time);
            self.times[workload as usize].add(time);
        }
    }

    /// How long such work took on average, of what was [recorded](Self::record_completion); `None`
    /// when nothing was.
    pub fn average_time(&self, workload: WorkloadType) -> Option<Duration> {
        self.times[workload as usize].ns().map(Duration::from_nanos)
    }

    /// Chooses another way if what was measured speaks for it, and says why: the times of work,
    /// when streams differ in them by half and each has done it [`EVIDENCE`](Self::EVIDENCE) times;
    /// loads that are far apart, while streams take turns.
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
            let times = self.slots().map(|slot| &slot.times[workload as usize]);
            let known: Vec<u64> = times
                .filter(|time| time.count() >= Self::EVIDENCE)
                .filter_map(Average::ns)
                .collect();
            let (least, most) = (*known.iter().min()?, *known.iter().max()?);
            (most - least > least / 2).then(|| {
                let evidence =
                    format!("{workload:?} takes {least} ns on one stream and {most} ns on another");
                (AllocationStrategy::Workload, evidence)
            })
        })
    }

    fn uneven_loads(&self) -> Option<(AllocationStrategy, String)> {
        let loads: Vec<u64> = self.slots().map(outstanding).collect();
        let (least, most) = (*loads.iter().min()?, *loads.iter().max()?);
        (most >= Self::EVIDENCE && most > 2 * least).then(|| {
            let evidence =
                format!("{most} operations are outstanding on one stream and {least} on another");
            (AllocationStrategy::LoadBalanced, evidence)
        })
    }

    fn ready(&self) -> Option<&D::Stream> {
        self.streams().find(|stream| stream.query() == Ok(Status::Ready))
    }

    fn slot(&self, index: usize) -> &Slot<D::Stream> {
        self.slots[index].get().expect("it was made")
    }

    fn made(&self) -> impl Iterator<Item = &Slot<D::Stream>> {
        (0..self.made.load(Ordering::Acquire)).map(|index| self.slot(index))
    }

    /// Those that are given out.
    fn slots(&self) -> impl Iterator<Item = &Slot<D::Stream>> {
        self.made().filter(|slot| slot.given.load(Ordering::Acquire))
    }

    /// Makes one more, in the first place that is free.
    fn grow(&self, priority: StreamPriority) -> Result<(), Error> {
        let stream = self.device.create_stream(priority)?;
        let slot = Slot { stream, given: AtomicBool::new(true), times: Default::default() };
        let mut slot = Some(slot);
        for (index, place) in self.slots.iter().enumerate() {
            let mut placed = false;
            place.get_or_init(|| {
                placed = true;
                slot.take().expect("placed once")
            });
            if placed {
                self.made.fetch_max(index + 1, Ordering::AcqRel);
                return Ok(());
            }
        }
        Ok(())
    }
}

fn outstanding<S: Stream>(slot: &Slot<S>) -> u64 {
    slot.stream.metrics().outstanding()
}
