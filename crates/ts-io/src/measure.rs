// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ts_pool::{BLOCK_ALIGN, Buffer, HostPool};

use crate::backend::{BackendOptions, Completion, ReadPath, ReadRequest, completion_queue};
use crate::provider::BackendProvider;
use crate::{Error, Source, sys};

const INTERRUPT_PERIOD: Duration = Duration::from_millis(20);

/// Reads that shall be measured.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Ranges of the source as (offset, length), in the order in which they are read. Each is cut
    /// into requests.
    pub ranges: Vec<(u64, u64)>,
    /// Largest request, in bytes; rounded up to whole blocks.
    pub request_bytes: usize,
    /// How the backend is set up.
    pub options: BackendOptions,
    /// When to stop, done or not: what has not begun then is taken back, what has is waited for.
    pub limit: Option<Duration>,
}

/// What a measurement saw.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Bytes delivered.
    pub bytes: u64,
    /// From the first request to the last completion.
    pub wall: Duration,
    /// CPU time of the whole process meanwhile; `None` where the system does not say.
    pub cpu: Option<Duration>,
    /// Reads that were in flight on average, by the times that completions say.
    pub mean_in_flight: f64,
    /// Bytes by the path they came.
    pub paths: BTreeMap<ReadPath, u64>,
}

impl Measured {
    /// Bandwidth in GiB/s.
    pub fn gib_per_s(&self) -> f64 {
        self.gib() / self.wall.as_secs_f64()
    }

    /// CPU seconds for each GiB; `None` where the system does not say.
    pub fn cpu_s_per_gib(&self) -> Option<f64> {
        self.cpu.map(|cpu| cpu.as_secs_f64() / self.gib())
    }

    fn gib(&self) -> f64 {
        self.bytes as f64 / f64::from(1 << 30)
    }
}

/// Reads as `workload` says with a backend of `provider`'s, into memory of `pool` that is used
/// again and again, and measures. So many requests again as are in flight wait, if the pool has the
/// memory. Blocks.
///
/// `interrupt` is asked after each read and at least every 20 ms.
///
/// # Errors
/// The first read's that fails; [`Error::Interrupted`]; those of [`BackendProvider::create`];
/// [`Error::Memory`] when the pool is too small for one request.
pub fn measure(
    provider: &dyn BackendProvider,
    source: &Arc<Source>,
    workload: &Workload,
    pool: &HostPool,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<Measured, Error> {
    let request_bytes = workload.request_bytes.next_multiple_of(BLOCK_ALIGN).max(BLOCK_ALIGN);
    let count = 2 * workload.options.in_flight.max(1);
    let (sink, done) = completion_queue();
    let backend = provider.create(&workload.options, sink)?;
    let mut free: Vec<Buffer> = vec![pool.allocate(request_bytes)?];
    free.extend((1..count).map_while(|_| pool.allocate(request_bytes).ok()));

    let mut pieces = workload.ranges.iter().flat_map(|&(offset, len)| {
        let ends = (offset..offset + len).step_by(request_bytes);
        ends.map(move |begin| (begin, (offset + len - begin).min(request_bytes as u64) as usize))
    });
    let mut measured = Measured {
        bytes: 0,
        wall: Duration::ZERO,
        cpu: None,
        mean_in_flight: 0.0,
        paths: BTreeMap::new(),
    };
    let (began, cpu_began) = (Instant::now(), sys::cpu_time());
    let (mut under_way, mut busy_ns, mut over) = (0, 0, false);
    loop {
        if !over && workload.limit.is_some_and(|limit| began.elapsed() >= limit) {
            over = true;
            backend.cancel(&|_| true);
        }
        while !over && let Some(buffer) = free.pop() {
            let Some((offset, required)) = pieces.next() else {
                free.push(buffer);
                break;
            };
            let request = ReadRequest::new(0, Arc::clone(source), offset, required, buffer);
            backend.submit(request).map_err(|rejected| rejected.error)?;
            under_way += 1;
        }
        if under_way == 0 {
            break;
        }
        let completion = done.recv_timeout(INTERRUPT_PERIOD);
        if interrupt() {
            return Err(Error::Interrupted);
        }
        let Ok(Completion { buffers, result, .. }) = completion else { continue };
        under_way -= 1;
        free.extend(buffers);
        let transfer = match result {
            Err(Error::Cancelled { .. }) if over => continue,
            result => result?,
        };
        busy_ns += transfer.finished_ns - transfer.started_ns;
        measured.bytes += transfer.bytes() as u64;
        for (path, bytes) in transfer.paths {
            *measured.paths.entry(path).or_default() += bytes as u64;
        }
    }
    measured.wall = began.elapsed();
    measured.cpu = sys::cpu_time().zip(cpu_began).map(|(now, then)| now.saturating_sub(then));
    measured.mean_in_flight = busy_ns as f64 / measured.wall.as_nanos().max(1) as f64;
    Ok(measured)
}

/// What reads of a warm file are compared with: one thread that copies `bytes` from ordinary
/// memory, which no cache of the CPU holds, in pieces of `request_bytes` into the whole memory of
/// `pool`, again and again. Takes 256 MiB beside the pool. Blocks.
///
/// # Errors
/// [`Error::Interrupted`]; [`Error::Memory`] when part of the pool is in use.
pub fn measure_memcpy(
    bytes: u64,
    request_bytes: usize,
    pool: &HostPool,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<Measured, Error> {
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

/// What page faults cost: maps the first `bytes` of a file in units of 64 MiB, as a
/// [`View`](crate::View) does, and reads a byte of each page. If another process truncates the file
/// meanwhile, this one ends with SIGBUS. Blocks.
///
/// # Errors
/// [`Error::Interrupted`]; [`Error::ShortRead`]; [`Error::Read`], also when the source is no file.
#[cfg(target_os = "linux")]
pub fn measure_views(
    source: &Arc<Source>,
    bytes: u64,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<Measured, Error> {
    let file = source.file().ok_or_else(|| source.no_file())?;
    if source.len() < bytes {
        let (path, expected, actual) =
            (source.path().into(), bytes as usize, source.len() as usize);
        return Err(Error::ShortRead { path, offset: 0, expected, actual });
    }
    let paths = BTreeMap::from([(ReadPath::Mapped, bytes)]);
    timed(bytes, 64 << 20, paths, interrupt, |begin, len| {
        let sum = sys::touch_mapped(file, begin, len).map_err(|e| source.failed(begin, len, e))?;
        std::hint::black_box(sum);
        Ok(())
    })
}

/// Does a piece of work for each unit of so many bytes.
fn timed(
    bytes: u64,
    unit: u64,
    paths: BTreeMap<ReadPath, u64>,
    interrupt: &mut dyn FnMut() -> bool,
    mut work: impl FnMut(u64, usize) -> Result<(), Error>,
) -> Result<Measured, Error> {
    let (began, cpu_began) = (Instant::now(), sys::cpu_time());
    for begin in (0..bytes).step_by(unit as usize) {
        work(begin, unit.min(bytes - begin) as usize)?;
        if interrupt() {
            return Err(Error::Interrupted);
        }
    }
    let cpu = sys::cpu_time().zip(cpu_began).map(|(now, then)| now.saturating_sub(then));
    Ok(Measured { bytes, wall: began.elapsed(), cpu, mean_in_flight: 1.0, paths })
}
