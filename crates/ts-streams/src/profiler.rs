// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the time of streams goes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{Device, Error, Event, Status, Stream, StreamId, StreamPriority};

/// What a span of time was spent on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Activity {
    /// A scope that has a name.
    Scope(String),
    /// Copies and fills.
    Transfer,
    /// Kernels or functions.
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

/// Measures what streams do: scopes by events of the device, each from the point on its stream
/// where it was opened to that where it was closed. Durations that a caller measured elsewhere are
/// kept, apart from those.
///
/// No call blocks but [`finish`](Self::finish).
#[derive(Debug)]
pub struct StreamProfiler<D: Device> {
    device: D,
    /// What all times are counted from.
    origin: D::Event,
    records: Mutex<Records<D>>,
}

#[derive(Debug)]
struct Records<D: Device> {
    open: Vec<Scope<D>>,
    measured: Vec<Span>,
    reported: Vec<(StreamId, Activity, Duration, u64)>,
    lost: u64,
}

#[derive(Debug)]
struct Scope<D: Device> {
    stream: StreamId,
    activity: Activity,
    bytes: u64,
    start: D::Event,
    end: D::Event,
}

/// A span of time on a stream, measured by the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The stream.
    pub stream: StreamId,
    /// What was done.
    pub activity: Activity,
    /// Bytes that were moved, of a transfer.
    pub bytes: u64,
    /// When it began, since the profiler did.
    pub start: Duration,
    /// How long it took.
    pub time: Duration,
}

/// A scope that is open; it ends, on its stream, where this is dropped.
#[derive(Debug)]
#[must_use = "the scope ends where this is dropped"]
pub struct OpenScope<'a, D: Device> {
    profiler: &'a StreamProfiler<D>,
    stream: &'a D::Stream,
    activity: Activity,
    bytes: u64,
    start: D::Event,
}

impl<D: Device> StreamProfiler<D> {
    /// Begins to measure now. Blocks for a moment.
    ///
    /// # Errors
    /// As [`Device::create_stream`] and [`Device::create_event`].
    pub fn new(device: D) -> Result<Self, Error> {
        let (origin, stream) =
            (device.create_event()?, device.create_stream(StreamPriority::High)?);
        stream.record(&origin)?;
        origin.synchronize()?;
        let records =
            Records { open: Vec::new(), measured: Vec::new(), reported: Vec::new(), lost: 0 };
        Ok(Self { device, origin, records: Mutex::new(records) })
    }

    /// Opens a scope on a stream: what is submitted until it is dropped is inside.
    ///
    /// # Errors
    /// As [`Stream::record`].
    pub fn scope<'a>(
        &'a self,
        stream: &'a D::Stream,
        name: impl Into<String>,
    ) -> Result<OpenScope<'a, D>, Error> {
        self.open(stream, Activity::Scope(name.into()), 0)
    }

    /// As [`scope`](Self::scope), for transfers of so many bytes.
    ///
    /// # Errors
    /// As [`Stream::record`].
    pub fn transfer<'a>(
        &'a self,
        stream: &'a D::Stream,
        bytes: u64,
    ) -> Result<OpenScope<'a, D>, Error> {
        self.open(stream, Activity::Transfer, bytes)
    }

    /// As [`scope`](Self::scope), for a kernel or function.
    ///
    /// # Errors
    /// As [`Stream::record`].
    pub fn launch<'a>(
        &'a self,
        stream: &'a D::Stream,
        name: impl Into<String>,
    ) -> Result<OpenScope<'a, D>, Error> {
        self.open(stream, Activity::Launch(name.into()), 0)
    }

    /// Keeps a duration that the caller has measured, whatever clock it was; it is reported as
    /// such.
    pub fn record_operation(
        &self,
        stream: StreamId,
        activity: Activity,
        time: Duration,
        bytes: u64,
    ) {
        self.lock().reported.push((stream, activity, time, bytes));
    }

    /// Waits until all scopes that were closed have ended, and gives what was measured so far.
    /// Scopes whose stream failed are counted as lost. Blocks.
    ///
    /// # Errors
    /// [`Error::WaitInHostFn`].
    pub fn finish(&self) -> Result<Profile, Error> {
        let open = std::mem::take(&mut self.lock().open);
        for scope in &open {
            match scope.end.synchronize() {
                Err(error @ Error::WaitInHostFn) => {
                    self.lock().open.extend(open);
                    return Err(error);
                }
                _ => continue,
            }
        }
        self.lock().open.extend(open);
        Ok(self.profile())
    }

    /// What was measured so far. Does not block.
    pub fn profile(&self) -> Profile {
        let scopes = std::mem::take(&mut self.lock().open);
        // Without the lock: work of streams, which may report to this, can run wherever they are
        // asked.
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
                Err(Some(open)) => records.open.push(open),
                Err(None) => records.lost += 1,
            }
        }
        let (mut spans, reported, lost) =
            (records.measured.clone(), records.reported.clone(), records.lost);
        drop(records);
        spans.sort_by_key(|span| (span.start, span.stream));
        Profile { spans, reported, lost }
    }

    fn span(&self, scope: &Scope<D>) -> Result<Span, Error> {
        let Scope { stream, activity, bytes, start, end } = scope;
        let (stream, activity, bytes) = (*stream, activity.clone(), *bytes);
        Ok(Span {
            stream,
            activity,
            bytes,
            start: start.elapsed_since(&self.origin)?,
            time: end.elapsed_since(start)?,
        })
    }

    fn open<'a>(
        &'a self,
        stream: &'a D::Stream,
        activity: Activity,
        bytes: u64,
    ) -> Result<OpenScope<'a, D>, Error> {
        let start = self.device.create_event()?;
        stream.record(&start)?;
        Ok(OpenScope { profiler: self, stream, activity, bytes, start })
    }

    fn lock(&self) -> MutexGuard<'_, Records<D>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Device> Drop for OpenScope<'_, D> {
    fn drop(&mut self) {
        let end = self
            .profiler
            .device
            .create_event()
            .and_then(|end| self.stream.record(&end).map(|()| end));
        let mut records = self.profiler.lock();
        match end {
            Ok(end) => records.open.push(Scope {
                stream: self.stream.id(),
                activity: self.activity.clone(),
                bytes: self.bytes,
                start: self.start.clone(),
                end,
            }),
            Err(_) => records.lost += 1,
        }
    }
}

/// What was measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// What the device measured, as it began.
    pub spans: Vec<Span>,
    /// What callers have measured: the stream, what it did, how long, and how many bytes.
    pub reported: Vec<(StreamId, Activity, Duration, u64)>,
    /// Scopes whose end was never reached.
    pub lost: u64,
}

/// The times of one activity. Percentiles are those of the nearest rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// How often.
    pub count: usize,
    /// All of it.
    pub total: Duration,
    /// The shortest.
    pub min: Duration,
    /// Half took no longer.
    pub p50: Duration,
    /// 90% took no longer.
    pub p90: Duration,
    /// 99% took no longer.
    pub p99: Duration,
    /// The longest.
    pub max: Duration,
    /// Bytes moved.
    pub bytes: u64,
}

impl Times {
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

    /// Bytes in a second; 0 where no time passed.
    pub fn bytes_per_s(&self) -> f64 {
        let seconds = self.total.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / seconds } else { 0.0 }
    }
}

impl Profile {
    /// The times of each activity that the device measured: on one stream, or on all.
    pub fn times(&self, stream: Option<StreamId>) -> BTreeMap<Activity, Times> {
        let spans =
            self.spans.iter().filter(|span| stream.is_none_or(|stream| span.stream == stream));
        times(spans.map(|span| (&span.activity, span.time, span.bytes)))
    }

    /// The times that callers have measured: on one stream, or on all.
    pub fn reported_times(&self, stream: Option<StreamId>) -> BTreeMap<Activity, Times> {
        let reported =
            self.reported.iter().filter(|(of, ..)| stream.is_none_or(|stream| *of == stream));
        times(reported.map(|(_, activity, time, bytes)| (activity, *time, *bytes)))
    }

    /// The streams that something was measured of.
    pub fn streams(&self) -> Vec<StreamId> {
        let mut streams: Vec<StreamId> = self.spans.iter().map(|span| span.stream).collect();
        streams.sort_unstable();
        streams.dedup();
        streams
    }

    /// How long anything was measured on any stream, and how long on two or more at once.
    pub fn busy(&self) -> (Duration, Duration) {
        // Scopes inside others on one stream are no overlap: each stream's spans are joined first.
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

    /// The share of the busy time in which two or more streams were, in percent.
    pub fn overlap_percent(&self) -> f64 {
        let (any, several) = self.busy();
        if any.is_zero() { 0.0 } else { 100.0 * several.as_secs_f64() / any.as_secs_f64() }
    }

    /// What the device measured as a trace that Perfetto and Chrome open: JSON of complete events
    /// ("ph": "X"), in microseconds, a thread for each stream.
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
        let table = |f: &mut fmt::Formatter<'_>, times: BTreeMap<Activity, Times>| {
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
            writeln!(f, "as callers measured")?;
            table(f, self.reported_times(None))?;
        }
        if self.lost > 0 {
            writeln!(f, "{} scopes never ended", self.lost)?;
        }
        let (any, _) = self.busy();
        write!(
            f,
            "busy {:.1}, with two streams or more {:.1}%",
            micros(any),
            self.overlap_percent()
        )
    }
}

fn times<'a>(
    spans: impl Iterator<Item = (&'a Activity, Duration, u64)>,
) -> BTreeMap<Activity, Times> {
    let mut all: BTreeMap<&Activity, (Vec<Duration>, u64)> = BTreeMap::new();
    for (activity, time, bytes) in spans {
        let (times, total) = all.entry(activity).or_default();
        times.push(time);
        *total += bytes;
    }
    all.into_iter()
        .map(|(activity, (times, bytes))| (activity.clone(), Times::of(times, bytes)))
        .collect()
}
