// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measurement of the time that work on streams takes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{Device, Error, Event, Status, Stream, StreamId, StreamPriority};

/// The kind of work that a duration was measured for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Activity {
    /// A named scope.
    Scope(String),
    /// Copies and fills.
    Transfer,
    /// A kernel or host function, by name.
    Launch(String),
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Activity::Scope(name) | Activity::Launch(name) => f.write_str(name),
            Activity::Transfer => f.write_str("transfer"),
        }
    }
}

/// Measures work on streams with device events.
///
/// Each scope lasts from the point on its stream where it was opened to the point where it was
/// dropped. Callers can also add durations that they measured themselves; a profile reports them
/// separately.
///
/// Only [`new`](Self::new) and [`finish`](Self::finish) block. While the profiler is
/// [off](Self::set_enabled), scopes record nothing.
///
/// # Examples
/// ```
/// use ts_streams::{CpuDevice, Device, HostFn, Stream, StreamPriority, StreamProfiler};
///
/// let device = CpuDevice::new()?;
/// let stream = device.create_stream(StreamPriority::Normal)?;
/// let profiler = StreamProfiler::new(device)?;
/// {
///     let _scope = profiler.scope(&stream, "layer 0")?;
///     stream.launch_host_fn(HostFn::new(|| ()))?;
/// }
/// let profile = profiler.finish()?;
/// assert_eq!(profile.spans.len(), 1);
/// println!("{profile}"); // a table; `chrome_trace` returns a trace
/// # Ok::<(), ts_streams::Error>(())
/// ```
#[derive(Debug)]
pub struct StreamProfiler<D: Device> {
    device: D,
    /// The event from which the start of each span is counted.
    origin: D::Event,
    enabled: AtomicBool,
    records: Arc<Mutex<Records<D>>>,
}

#[derive(Debug)]
struct Records<D: Device> {
    pending: Vec<PendingScope<D>>,
    measured: Vec<Span>,
    reported: Vec<(StreamId, Activity, Duration, u64)>,
    lost: u64,
}

/// A closed scope whose end may not be reached yet.
#[derive(Debug)]
struct PendingScope<D: Device> {
    stream: StreamId,
    activity: Activity,
    bytes: u64,
    start: D::Event,
    end: D::Event,
}

/// A span of time on a stream, measured by the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The stream on which the work ran.
    pub stream: StreamId,
    /// The kind and name of the work.
    pub activity: Activity,
    /// Bytes moved, or 0 if the activity is not a transfer.
    pub bytes: u64,
    /// Time from the creation of the profiler to the start of the span.
    pub start: Duration,
    /// Duration of the span.
    pub time: Duration,
}

/// An open scope. When this value is dropped, the scope ends after all work submitted to its stream
/// so far.
#[derive(Debug)]
#[must_use = "the scope ends when this value is dropped"]
pub struct ScopeGuard<D: Device> {
    device: D,
    records: Arc<Mutex<Records<D>>>,
    stream: D::Stream,
    /// What is measured, or `None` if the profiler was off when the scope was opened.
    measured: Option<(Activity, u64, D::Event)>,
}

impl<D: Device> StreamProfiler<D> {
    /// Creates a profiler that is on, and starts its clock. Blocks until the device has recorded
    /// the start.
    ///
    /// # Errors
    /// Returns the same errors as [`Device::create_stream`] and [`Device::create_event`], and
    /// [`Error::WaitInHostFn`] if called from a host function.
    pub fn new(device: D) -> Result<Self, Error> {
        let (origin, stream) =
            (device.create_event()?, device.create_stream(StreamPriority::High)?);
        stream.record(&origin)?;
        origin.synchronize()?;
        let records =
            Records { pending: Vec::new(), measured: Vec::new(), reported: Vec::new(), lost: 0 };
        let enabled = AtomicBool::new(true);
        Ok(Self { device, origin, enabled, records: Arc::new(Mutex::new(records)) })
    }

    /// Turns the profiler on or off. While it is off, scopes and reported durations are dropped and
    /// cost one load of a flag. Scopes that are open stay as they are.
    pub fn set_enabled(&self, enabled: bool) {
        self.enabled.store(enabled, Ordering::Relaxed);
    }

    /// Returns whether the profiler is on.
    pub fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Relaxed)
    }

    /// Opens a named scope, which covers all work submitted to `stream` until the returned value is
    /// dropped.
    ///
    /// # Errors
    /// Returns the same errors as [`Stream::record`].
    pub fn scope(
        &self,
        stream: &D::Stream,
        name: impl Into<String>,
    ) -> Result<ScopeGuard<D>, Error> {
        self.open(stream, || (Activity::Scope(name.into()), 0))
    }

    /// Opens a scope like [`scope`](Self::scope), for copies and fills of `bytes` bytes in total.
    ///
    /// # Errors
    /// Returns the same errors as [`Stream::record`].
    pub fn transfer(&self, stream: &D::Stream, bytes: u64) -> Result<ScopeGuard<D>, Error> {
        self.open(stream, || (Activity::Transfer, bytes))
    }

    /// Opens a scope like [`scope`](Self::scope), for the kernel or host function `name`.
    ///
    /// # Errors
    /// Returns the same errors as [`Stream::record`].
    pub fn launch(
        &self,
        stream: &D::Stream,
        name: impl Into<String>,
    ) -> Result<ScopeGuard<D>, Error> {
        self.open(stream, || (Activity::Launch(name.into()), 0))
    }

    /// Adds a duration that the caller measured, with any clock. The duration appears in
    /// [`Profile::reported`].
    pub fn record_operation(
        &self,
        stream: StreamId,
        activity: Activity,
        time: Duration,
        bytes: u64,
    ) {
        if self.is_enabled() {
            self.lock().reported.push((stream, activity, time, bytes));
        }
    }

    /// Blocks until all closed scopes have ended, and returns all measurements so far. A scope
    /// counts as lost if its stream failed before the scope ended.
    ///
    /// # Errors
    /// Returns [`Error::WaitInHostFn`] if called from a host function.
    pub fn finish(&self) -> Result<Profile, Error> {
        let pending = std::mem::take(&mut self.lock().pending);
        for scope in &pending {
            match scope.end.synchronize() {
                Err(error @ Error::WaitInHostFn) => {
                    self.lock().pending.extend(pending);
                    return Err(error);
                }
                _ => continue,
            }
        }
        self.lock().pending.extend(pending);
        Ok(self.profile())
    }

    /// Returns the measurements so far, without scopes that are still pending. Does not block.
    pub fn profile(&self) -> Profile {
        let scopes = std::mem::take(&mut self.lock().pending);
        // The lock is released during the queries: a query may run work of a simulated device, and
        // that work may use this profiler.
        let judged: Vec<_> = scopes
            .into_iter()
            .map(|scope| match scope.end.query() {
                Ok(Status::Pending) => Err(Some(scope)),
                Ok(Status::Ready) => self.span(&scope).map_err(|_| None),
                Err(_) => Err(None),
            })
            .collect();
        let mut records = self.lock();
        for scope in judged {
            match scope {
                Ok(span) => records.measured.push(span),
                Err(Some(scope)) => records.pending.push(scope),
                Err(None) => records.lost += 1,
            }
        }
        let (mut spans, reported, lost) =
            (records.measured.clone(), records.reported.clone(), records.lost);
        drop(records);
        spans.sort_by_key(|span| (span.start, span.stream));
        Profile { spans, reported, lost }
    }

    fn span(&self, scope: &PendingScope<D>) -> Result<Span, Error> {
        let PendingScope { stream, activity, bytes, start, end } = scope;
        let (stream, activity, bytes) = (*stream, activity.clone(), *bytes);
        Ok(Span {
            stream,
            activity,
            bytes,
            start: start.elapsed_since(&self.origin)?,
            time: end.elapsed_since(start)?,
        })
    }

    fn open(
        &self,
        stream: &D::Stream,
        what: impl FnOnce() -> (Activity, u64),
    ) -> Result<ScopeGuard<D>, Error> {
        let mut measured = None;
        if self.is_enabled() {
            let start = self.device.create_event()?;
            stream.record(&start)?;
            let (activity, bytes) = what();
            measured = Some((activity, bytes, start));
        }
        Ok(ScopeGuard {
            device: self.device.clone(),
            records: Arc::clone(&self.records),
            stream: stream.clone(),
            measured,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Records<D>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Device> Drop for ScopeGuard<D> {
    fn drop(&mut self) {
        let Some((activity, bytes, start)) = self.measured.take() else { return };
        let end = self.device.create_event().and_then(|end| self.stream.record(&end).map(|()| end));
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        match end {
            Ok(end) => records.pending.push(PendingScope {
                stream: self.stream.id(),
                activity,
                bytes,
                start,
                end,
            }),
            Err(_) => records.lost += 1,
        }
    }
}

/// The measurements of a [`StreamProfiler`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Profile {
    /// Spans measured by the device, sorted by start time.
    pub spans: Vec<Span>,
    /// Durations reported by callers: stream, activity, duration and bytes.
    pub reported: Vec<(StreamId, Activity, Duration, u64)>,
    /// Number of scopes that did not complete, usually because their stream failed.
    pub lost: u64,
}

/// The measurements of a [`StreamProfiler`], by stream.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProfileReport {
    /// Number of streams that have spans or reported durations.
    pub total_streams: usize,
    /// What ran on each of these streams, sorted by identifier.
    pub streams: Vec<StreamReport>,
    /// How long at least one stream had a span.
    pub busy: Duration,
    /// How long at least two streams had spans at the same time.
    pub overlap: Duration,
    /// Number of scopes that did not complete.
    pub lost: u64,
}

/// The measurements of one stream.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamReport {
    /// The stream.
    pub stream: StreamId,
    /// Statistics of each activity measured by the device.
    pub measured: BTreeMap<Activity, ActivityStats>,
    /// Statistics of each activity reported by callers.
    pub reported: BTreeMap<Activity, ActivityStats>,
}

/// Statistics of the durations of one activity. Percentiles use the nearest-rank method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ActivityStats {
    /// Number of durations.
    pub count: usize,
    /// Sum of the durations.
    pub total: Duration,
    /// The shortest duration.
    pub min: Duration,
    /// The median.
    pub p50: Duration,
    /// The 90th percentile.
    pub p90: Duration,
    /// The 99th percentile.
    pub p99: Duration,
    /// The longest duration.
    pub max: Duration,
    /// Total bytes moved.
    pub bytes: u64,
}

impl ActivityStats {
    fn of(mut times: Vec<Duration>, bytes: u64) -> Self {
        times.sort_unstable();
        let rank = |percent: usize| times[(times.len() * percent).div_ceil(100).max(1) - 1];
        Self {
            count: times.len(),
            total: times.iter().sum(),
            min: rank(0),
            p50: rank(50),
            p90: rank(90),
            p99: rank(99),
            max: rank(100),
            bytes,
        }
    }

    /// Returns the bytes moved per second, or 0 if no time passed.
    pub fn bytes_per_s(&self) -> f64 {
        let seconds = self.total.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / seconds } else { 0.0 }
    }
}

impl Profile {
    /// Returns statistics of each activity measured by the device. Covers only `stream`, or all
    /// streams if it is `None`.
    pub fn times(&self, stream: Option<StreamId>) -> BTreeMap<Activity, ActivityStats> {
        let spans =
            self.spans.iter().filter(|span| stream.is_none_or(|stream| span.stream == stream));
        times(spans.map(|span| (&span.activity, span.time, span.bytes)))
    }

    /// Returns statistics of each activity reported by callers. Covers only `stream`, or all
    /// streams if it is `None`.
    pub fn reported_times(&self, stream: Option<StreamId>) -> BTreeMap<Activity, ActivityStats> {
        let reported =
            self.reported.iter().filter(|(of, ..)| stream.is_none_or(|stream| *of == stream));
        times(reported.map(|(_, activity, time, bytes)| (activity, *time, *bytes)))
    }

    /// Returns all measurements by stream, and the number of streams.
    pub fn report(&self) -> ProfileReport {
        let reported = self.reported.iter().map(|(stream, ..)| *stream);
        let mut ids: Vec<StreamId> = self.streams().into_iter().chain(reported).collect();
        ids.sort_unstable();
        ids.dedup();
        let report = |stream| StreamReport {
            stream,
            measured: self.times(Some(stream)),
            reported: self.reported_times(Some(stream)),
        };
        let streams: Vec<_> = ids.into_iter().map(report).collect();
        let (busy, overlap) = self.busy();
        ProfileReport { total_streams: streams.len(), streams, busy, overlap, lost: self.lost }
    }

    /// Returns the streams that have spans, sorted by identifier.
    pub fn streams(&self) -> Vec<StreamId> {
        let mut streams: Vec<StreamId> = self.spans.iter().map(|span| span.stream).collect();
        streams.sort_unstable();
        streams.dedup();
        streams
    }

    /// Returns two durations: how long at least one stream had a span, and how long at least two
    /// streams had spans at the same time.
    pub fn busy(&self) -> (Duration, Duration) {
        // Nested scopes on one stream do not count as overlap, so each stream's spans are merged.
        let mut edges = Vec::new();
        for stream in self.streams() {
            let mut end = None;
            for span in self.spans.iter().filter(|span| span.stream == stream) {
                let (start, stop) = (span.start, span.start + span.time);
                match end {
                    Some(last) if start <= last => end = Some(stop.max(last)),
                    _ => {
                        edges.extend(end.map(|last| (last, -1)));
                        edges.push((start, 1));
                        end = Some(stop);
                    }
                }
            }
            edges.extend(end.map(|last| (last, -1)));
        }
        edges.sort_unstable();
        let (mut any, mut several, mut running, mut at) =
            (Duration::ZERO, Duration::ZERO, 0, Duration::ZERO);
        for (time, change) in edges {
            any += if running > 0 { time - at } else { Duration::ZERO };
            several += if running > 1 { time - at } else { Duration::ZERO };
            (running, at) = (running + change, time);
        }
        (any, several)
    }

    /// Returns the percentage of the [`busy`](Self::busy) time in which at least two streams had
    /// spans. Returns 0 if there is no busy time.
    pub fn overlap_percent(&self) -> f64 {
        let (any, several) = self.busy();
        if any.is_zero() { 0.0 } else { 100.0 * several.as_secs_f64() / any.as_secs_f64() }
    }

    /// Returns the spans as a JSON trace for Perfetto and Chrome: complete events (`"ph": "X"`) in
    /// microseconds, with one thread per stream.
    pub fn chrome_trace(&self) -> String {
        let event = |span: &Span| {
            let kind = match span.activity {
                Activity::Scope(_) => "scope",
                Activity::Transfer => "transfer",
                Activity::Launch(_) => "launch",
            };
            serde_json::json!({
                "name": span.activity.to_string(),
                "cat": kind,
                "ph": "X",
                "pid": 1,
                "tid": span.stream.0,
                "ts": span.start.as_nanos() as f64 / 1e3,
                "dur": span.time.as_nanos() as f64 / 1e3,
                "args": { "bytes": span.bytes },
            })
        };
        let name = |stream: StreamId| {
            serde_json::json!({
                "name": "thread_name",
                "ph": "M",
                "pid": 1,
                "tid": stream.0,
                "args": { "name": format!("stream {stream}") },
            })
        };
        let events: Vec<_> =
            self.streams().into_iter().map(name).chain(self.spans.iter().map(event)).collect();
        serde_json::json!({ "traceEvents": events, "displayTimeUnit": "ns" }).to_string()
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let table = |f: &mut fmt::Formatter<'_>, times: BTreeMap<Activity, ActivityStats>| {
            times.into_iter().try_for_each(|(activity, t)| {
                let (total, p50, p90, p99) =
                    (micros(t.total), micros(t.p50), micros(t.p90), micros(t.p99));
                let activity = activity.to_string();
                writeln!(
                    f,
                    "  {activity:<24} {:>7} {total:>12.1} {p50:>10.1} {p90:>10.1} {p99:>10.1}",
                    t.count
                )
            })
        };
        writeln!(
            f,
            "{:<26} {:>7} {:>12} {:>10} {:>10} {:>10}",
            "microseconds", "count", "total", "p50", "p90", "p99"
        )?;
        for stream in self.streams() {
            writeln!(f, "stream {stream}")?;
            table(f, self.times(Some(stream)))?;
        }
        if !self.reported.is_empty() {
            writeln!(f, "reported by callers")?;
            table(f, self.reported_times(None))?;
        }
        if self.lost > 0 {
            writeln!(f, "{} scopes did not complete", self.lost)?;
        }
        let (any, _) = self.busy();
        write!(
            f,
            "busy for {:.1} us, of which {:.1}% on two or more streams",
            micros(any),
            self.overlap_percent()
        )
    }
}

fn times<'a>(
    spans: impl Iterator<Item = (&'a Activity, Duration, u64)>,
) -> BTreeMap<Activity, ActivityStats> {
    let mut all: BTreeMap<&Activity, (Vec<Duration>, u64)> = BTreeMap::new();
    for (activity, time, bytes) in spans {
        let (times, total) = all.entry(activity).or_default();
        times.push(time);
        *total += bytes;
    }
    all.into_iter()
        .map(|(activity, (times, bytes))| (activity.clone(), ActivityStats::of(times, bytes)))
        .collect()
}
