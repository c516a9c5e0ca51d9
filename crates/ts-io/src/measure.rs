// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ts_pool::{BLOCK_ALIGN, Buffer, HostPool};

use crate::backend::{BackendOptions, Completion, ReadPath, ReadRequest, completion_queue};
#[cfg(target_os = "linux")]
use crate::file::FileOrigin;
use crate::provider::BackendProvider;
use crate::{Error, Source, sys};

const INTERRUPT_PERIOD: Duration = Duration::from_millis(20);

/// The default request size in bytes, which suits most devices.
pub(crate) const DEFAULT_REQUEST_BYTES: usize = 4 << 20;

/// The reads that [`measure`] performs. The default has no ranges, and requests of 4 MiB.
///
/// ```
/// use std::time::Duration;
/// use ts_io::{BackendOptions, Workload};
///
/// let workload = Workload::default()
///     .with_ranges(vec![(0, 1 << 30)])
///     .with_request_bytes(1 << 20)
///     .with_options(BackendOptions::default().with_in_flight(4))
///     .with_limit(Duration::from_secs(1));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Workload {
    /// Ranges of the source as (offset, length) in bytes, in the order in which they are read. Each
    /// range is split into requests.
    pub ranges: Vec<(u64, u64)>,
    /// The size of the largest request in bytes. It is rounded up to a multiple of
    /// [`BLOCK_ALIGN`].
    pub request_bytes: usize,
    /// The configuration of the backend.
    pub options: BackendOptions,
    /// The time after which all requests are cancelled. The measurement then waits for reads that
    /// cannot be aborted. `None` means no limit.
    pub limit: Option<Duration>,
}

impl Default for Workload {
    fn default() -> Self {
        Self {
            ranges: Vec::new(),
            request_bytes: DEFAULT_REQUEST_BYTES,
            options: BackendOptions::default(),
            limit: None,
        }
    }
}

impl Workload {
    /// Sets the ranges to read, as (offset, length) in bytes.
    #[must_use]
    pub fn with_ranges(mut self, ranges: Vec<(u64, u64)>) -> Self {
        self.ranges = ranges;
        self
    }

    /// Sets the size of the largest request, in bytes.
    #[must_use]
    pub fn with_request_bytes(mut self, request_bytes: usize) -> Self {
        self.request_bytes = request_bytes;
        self
    }

    /// Sets the configuration of the backend.
    #[must_use]
    pub fn with_options(mut self, options: BackendOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets the time after which all requests are cancelled.
    #[must_use]
    pub fn with_limit(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }
}

/// The bandwidth, CPU time and paths of measured reads or copies.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Measurement {
    /// The number of bytes delivered.
    pub bytes: u64,
    /// The time from the first request to the last completion.
    pub wall: Duration,
    /// The CPU time that the whole process used during the measurement, or `None` if the system
    /// does not report it.
    pub cpu: Option<Duration>,
    /// The average number of reads in flight, computed from the times in the completions. Always 1
    /// for copies and for mapped views.
    pub mean_in_flight: f64,
    /// The number of bytes that each path delivered.
    pub paths: BTreeMap<ReadPath, u64>,
}

impl Measurement {
    /// Returns the bandwidth in GiB/s.
    pub fn gib_per_s(&self) -> f64 {
        self.gib() / self.wall.as_secs_f64()
    }

    /// Returns the CPU time per GiB in seconds, or `None` if the system does not report it.
    pub fn cpu_s_per_gib(&self) -> Option<f64> {
        self.cpu.map(|cpu| cpu.as_secs_f64() / self.gib())
    }

    fn gib(&self) -> f64 {
        self.bytes as f64 / f64::from(1 << 30)
    }
}

/// Performs the reads of `workload` with a backend of `provider`, and measures them. Blocks.
///
/// Allocates buffers from `pool` and reuses them. If the pool has enough memory, submits twice as
/// many requests as can be in flight, so that the backend's queue is not empty. `interrupt` is
/// called after each read and at least every 20 ms. If it returns `true`, the measurement fails.
///
/// # Errors
/// - The error of the first read that fails.
/// - The errors of [`BackendProvider::create`].
/// - [`Error::Memory`] if the pool is too small for one request.
/// - [`Error::Interrupted`] if `interrupt` returned `true`.
pub fn measure(
    provider: &dyn BackendProvider,
    source: &Arc<Source>,
    workload: &Workload,
    pool: &HostPool,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<Measurement, Error> {
    let request_bytes = workload.request_bytes.next_multiple_of(BLOCK_ALIGN).max(BLOCK_ALIGN);
    let count = 2 * workload.options.in_flight.max(1);
    let (sink, done) = completion_queue();
    let backend = provider.create(&workload.options, sink)?;
    let mut free: Vec<Buffer> = vec![pool.allocate(request_bytes)?];
    free.extend((1..count).map_while(|_| pool.allocate(request_bytes).ok()));

    let mut pieces = workload.ranges.iter().flat_map(|&(offset, len)| {
        let begins = (offset..offset + len).step_by(request_bytes);
        begins.map(move |begin| (begin, (offset + len - begin).min(request_bytes as u64) as usize))
    });
    let mut measured = Measurement {
        bytes: 0,
        wall: Duration::ZERO,
        cpu: None,
        mean_in_flight: 0.0,
        paths: BTreeMap::new(),
    };
    let (began, cpu_before) = (Instant::now(), sys::cpu_time());
    let (mut pending, mut busy_ns, mut stopped) = (0, 0, false);
    loop {
        if !stopped && workload.limit.is_some_and(|limit| began.elapsed() >= limit) {
            stopped = true;
            backend.cancel(&|_| true);
        }
        while !stopped && let Some(buffer) = free.pop() {
            let Some((offset, required)) = pieces.next() else {
                free.push(buffer);
                break;
            };
            let request = ReadRequest::new(0, Arc::clone(source), offset, required, buffer);
            backend.submit(request).map_err(|rejected| rejected.error)?;
            pending += 1;
        }
        if pending == 0 {
            break;
        }
        let completion = done.recv_timeout(INTERRUPT_PERIOD);
        if interrupt() {
            return Err(Error::Interrupted);
        }
        let Ok(Completion { buffers, result, .. }) = completion else { continue };
        pending -= 1;
        free.extend(buffers);
        let transfer = match result {
            Err(Error::Cancelled { .. }) if stopped => continue,
            result => result?,
        };
        busy_ns += transfer.finished_ns - transfer.started_ns;
        measured.bytes += transfer.bytes() as u64;
        for (path, bytes) in transfer.paths {
            *measured.paths.entry(path).or_default() += bytes as u64;
        }
    }
    measured.wall = began.elapsed();
    measured.cpu = cpu_since(cpu_before);
    measured.mean_in_flight = busy_ns as f64 / measured.wall.as_nanos().max(1) as f64;
    Ok(measured)
}

/// Measures how fast one thread copies memory, which limits reads of a file that is in the page
/// cache. Blocks.
///
/// Copies `bytes` bytes in pieces of `request_bytes` bytes into the memory of `pool`, which is
/// reused. The source of the copies is 256 MiB of memory, allocated in addition to the pool. This
/// is more than most CPU caches hold.
///
/// # Errors
/// Returns [`Error::Interrupted`] if `interrupt` returned `true`, and [`Error::Memory`] if part of
/// the pool is in use.
pub fn measure_memcpy(
    bytes: u64,
    request_bytes: usize,
    pool: &HostPool,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<Measurement, Error> {
    const SOURCE: usize = 256 << 20;
    let source = vec![1u8; SOURCE];
    let mut target = pool.allocate(pool.stats().capacity_bytes)?;
    let piece = request_bytes.clamp(1, SOURCE.min(target.len()));
    let (mut from, mut to) = (0, 0);
    timed(bytes, piece as u64, BTreeMap::new(), interrupt, |_, len| {
        (from, to) = (
            if from + len > SOURCE { 0 } else { from },
            if to + len > target.len() { 0 } else { to },
        );
        target[to..to + len].copy_from_slice(&source[from..from + len]);
        std::hint::black_box(&mut target[to..to + len]);
        (from, to) = (from + len, to + len);
        Ok(())
    })
}

/// Measures the cost of mapping a file. Blocks.
///
/// Maps the first `bytes` of the file in units of 64 MiB, like a [`MappedView`](crate::MappedView),
/// and maps their pages. Needs Linux 5.14.
///
/// # Errors
/// - [`Error::ShortRead`] if the file is shorter than `bytes`.
/// - [`Error::Read`] if a read fails or the source is not a file.
/// - [`Error::Interrupted`] if `interrupt` returned `true`.
#[cfg(target_os = "linux")]
pub fn measure_mapped_views(
    source: &Arc<Source>,
    bytes: u64,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<Measurement, Error> {
    let not_a_file = || source.not_a_file(0, bytes as usize);
    let file = FileOrigin::of(source).ok_or_else(not_a_file)?.file();
    if source.len() < bytes {
        let (path, expected, actual) =
            (source.path().into(), bytes as usize, source.len() as usize);
        return Err(Error::ShortRead { path, offset: 0, expected, actual });
    }
    let paths = BTreeMap::from([(ReadPath::Mapped, bytes)]);
    timed(bytes, 64 << 20, paths, interrupt, |begin, len| {
        sys::populate_mapped(file, begin, len).map_err(|e| source.read_error(begin, len, e))
    })
}

/// Splits a range of `bytes` bytes into pieces of `unit` bytes. Calls `work` with the offset and
/// length of each piece, and measures the time.
fn timed(
    bytes: u64,
    unit: u64,
    paths: BTreeMap<ReadPath, u64>,
    interrupt: &mut dyn FnMut() -> bool,
    mut work: impl FnMut(u64, usize) -> Result<(), Error>,
) -> Result<Measurement, Error> {
    let (began, cpu_before) = (Instant::now(), sys::cpu_time());
    for begin in (0..bytes).step_by(unit as usize) {
        work(begin, unit.min(bytes - begin) as usize)?;
        if interrupt() {
            return Err(Error::Interrupted);
        }
    }
    let cpu = cpu_since(cpu_before);
    Ok(Measurement { bytes, wall: began.elapsed(), cpu, mean_in_flight: 1.0, paths })
}

/// Returns the CPU time that the process has used since `before`, if the system reports it.
fn cpu_since(before: Option<Duration>) -> Option<Duration> {
    sys::cpu_time().zip(before).map(|(now, before)| now.saturating_sub(before))
}
