// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads a file with an own I/O backend, which passes the conformance tests. It reads on the
//! calling thread, so it has no reads to cancel.

use std::error::Error;
use std::sync::Arc;

use ts_io::conformance::{self, Directory};
use ts_io::ts_pool::{Budget, HostPool};
use ts_io::{
    Availability, Backend, BackendOptions, BackendProvider, Capabilities, Completion,
    CompletionSink, ReadPath, ReadRequest, Registry, Rejected, Source, Transfer, completion_queue,
    monotonic_ns,
};

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    conformance::check(&Mine, &Directory(directory.path().into()));

    let path = directory.path().join("data");
    std::fs::write(&path, [7; 10_000])?;
    let source = Source::open(&path)?;
    let mut registry = Registry::builtin();
    registry.register(Arc::new(Mine));
    let choice = registry.choose(Some("mine"), std::slice::from_ref(&source))?;
    let (sink, completions) = completion_queue();
    let backend = choice.provider.create(&BackendOptions::default(), sink)?;
    let pool = HostPool::new(&Budget::new(1 << 20), 1 << 20)?;
    let request = ReadRequest::new(1, source, 0, 10_000, pool.allocate(10_000)?);
    backend.submit(request).map_err(|rejected| rejected.error)?;
    let done = completions.recv()?;
    println!("{} read {} bytes", backend.name(), done.result?.bytes());
    assert!(done.buffers[0].iter().all(|&byte| byte == 7));
    Ok(())
}

struct Mine;

impl BackendProvider for Mine {
    fn name(&self) -> &'static str {
        "mine"
    }

    fn priority(&self) -> u8 {
        0 // used only if it is selected by name
    }

    fn probe(&self, _: &[Arc<Source>]) -> Availability {
        Availability::Available // `Source::read_at` reads all sources
    }

    fn create(
        &self,
        _: &BackendOptions,
        sink: CompletionSink,
    ) -> Result<Box<dyn Backend>, ts_io::Error> {
        Ok(Box::new(Reader(sink)))
    }
}

struct Reader(CompletionSink);

impl Backend for Reader {
    fn name(&self) -> &'static str {
        "mine"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default() // memory of any alignment, one read at a time
    }

    fn submit(&self, mut request: ReadRequest) -> Result<(), Box<Rejected>> {
        let result = read(&mut request);
        let ReadRequest { token, buffers, .. } = request;
        (self.0)(Completion { token, buffers, result });
        Ok(())
    }

    fn cancel(&self, _: &dyn Fn(u64) -> bool) -> usize {
        0
    }
}

fn read(request: &mut ReadRequest) -> Result<Transfer, ts_io::Error> {
    let (offset, expected, started_ns) = (request.offset, request.required, monotonic_ns());
    let filled = fill(request);
    request.source.verify(offset)?; // finds changes during the read
    let path = request.source.path().into();
    match filled? {
        actual if actual < expected => {
            Err(ts_io::Error::ShortRead { path, offset, expected, actual })
        }
        actual => Ok(Transfer::new(ReadPath::Buffered, actual, started_ns)),
    }
}

/// Fills the buffers up to the end of the file. Returns the number of bytes.
fn fill(request: &mut ReadRequest) -> Result<usize, ts_io::Error> {
    let mut filled = 0;
    for buffer in &mut request.buffers {
        filled += request.source.read_at(request.offset + filled as u64, buffer)?;
    }
    Ok(filled)
}
