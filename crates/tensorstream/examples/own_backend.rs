// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams a checkpoint with an I/O backend that is not part of TensorStream.
//!
//! To keep the example short, the backend reads on one thread and ignores
//! `BackendOptions::timeout`. Built-in backends end a read with an error when its timeout expires.
//!
//! ```text
//! cargo run -p tensorstream --example own_backend
//! ```

use std::collections::VecDeque;
use std::mem;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};

use tensorstream::format::{Dtype, TensorMeta};
use tensorstream::io::conformance::{self, Directory};
use tensorstream::io::{
    Availability, Backend, BackendOptions, BackendProvider, Capabilities, Completion,
    CompletionSink, Error, ReadPath, ReadRequest, Registry, Rejected, Source, Transfer,
    monotonic_ns,
};
use tensorstream::orchestrator::{EngineConfig, UnitId};
use tensorstream::{Checkpoint, FileWriter, NewTensor, WriteOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = tempfile::tempdir()?;
    conformance::check(&MyProvider, &Directory(directory.path().into()));

    let path = directory.path().join("model.safetensors");
    let meta = TensorMeta { dtype: Dtype::U8, shape: vec![4] };
    let tensors = vec![NewTensor { name: "layer.weight".into(), meta, phase: None }];
    let (metadata, options) = (Default::default(), WriteOptions::default());
    let mut writer = FileWriter::create(&path, tensors, metadata, options, &mut || false)?;
    writer.write(&[1, 2, 3, 4])?;
    writer.commit()?;

    let mut registry = Registry::builtin();
    registry.register(Arc::new(MyProvider));
    let config = EngineConfig::with_budget(1 << 20).with_registry(registry);
    let checkpoint = Checkpoint::open(&path)?;
    let units = checkpoint.units_by_module();
    let engine = checkpoint.engine(units, config.with_backend("mine".to_string()))?;
    let lease = engine.acquire(None, UnitId(0))?;
    assert_eq!(&lease.tensor(0)[..], [1, 2, 3, 4]);
    assert_eq!(engine.stats().backend, "mine");
    Ok(())
}

struct MyProvider;

impl BackendProvider for MyProvider {
    fn name(&self) -> &'static str {
        "mine"
    }

    fn priority(&self) -> u8 {
        0 // used only if it is selected by name
    }

    fn probe(&self, sources: &[Arc<Source>]) -> Availability {
        // Only files have an identity.
        match sources.iter().find(|source| source.fingerprint().identity == (0, 0)) {
            Some(other) => Availability::Unavailable(format!("{:?} is not a file", other.path())),
            None => Availability::Available,
        }
    }

    fn create(&self, _: &BackendOptions, sink: CompletionSink) -> Result<Box<dyn Backend>, Error> {
        let (wake, wakeups) = channel();
        let shared = Arc::new(Shared { sink, queue: Mutex::default() });
        let worker = Arc::clone(&shared);
        let run = move || wakeups.iter().for_each(|()| worker.read_next());
        let thread = thread::Builder::new().spawn(run).map_err(|e| Error::Thread(e.into()))?;
        Ok(Box::new(MyBackend { shared, thread: Some((wake, thread)) }))
    }
}

struct MyBackend {
    shared: Arc<Shared>,
    /// The thread that reads. It gets a message for each request, and ends with the channel.
    thread: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Backend for MyBackend {
    fn name(&self) -> &'static str {
        "mine"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default() // memory of any alignment, one read at a time
    }

    fn submit(&self, request: ReadRequest) -> Result<(), Box<Rejected>> {
        self.shared.queue().push_back(request);
        let (wake, _) = self.thread.as_ref().expect("the thread runs until the backend is dropped");
        wake.send(()).expect("the thread runs until the channel closes");
        Ok(())
    }

    fn cancel(&self, wanted: &dyn Fn(u64) -> bool) -> usize {
        let mut queue = self.shared.queue();
        let (cancelled, kept): (VecDeque<_>, _) =
            mem::take(&mut *queue).into_iter().partition(|request| wanted(request.token));
        *queue = kept;
        drop(queue);
        let count = cancelled.len();
        for ReadRequest { token, source, offset, buffers, .. } in cancelled {
            let result = Err(Error::Cancelled { path: source.path().into(), offset });
            (self.shared.sink)(Completion { token, buffers, result });
        }
        count
    }
}

impl Drop for MyBackend {
    /// Cancels queued requests, and waits for the read in progress.
    fn drop(&mut self) {
        self.cancel(&|_| true);
        if let Some((wake, thread)) = self.thread.take() {
            drop(wake);
            let _ = thread.join();
        }
    }
}

/// The state that the backend shares with its thread.
struct Shared {
    sink: CompletionSink,
    queue: Mutex<VecDeque<ReadRequest>>,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, VecDeque<ReadRequest>> {
        self.queue.lock().expect("no thread panics while it holds the lock")
    }

    fn read_next(&self) {
        let next = self.queue().pop_front(); // `None` if the request was cancelled
        let Some(mut request) = next else { return };
        let result = read(&mut request);
        let ReadRequest { token, buffers, .. } = request;
        (self.sink)(Completion { token, buffers, result });
    }
}

fn read(request: &mut ReadRequest) -> Result<Transfer, Error> {
    let (offset, expected, started_ns) = (request.offset, request.required, monotonic_ns());
    let filled = fill(request);
    // Verifies the file after the read, so that changes during the read are found.
    request.source.verify(offset)?;
    let path = request.source.path().into();
    match filled? {
        actual if actual < expected => Err(Error::ShortRead { path, offset, expected, actual }),
        actual => Ok(Transfer::new(ReadPath::Buffered, actual, started_ns)),
    }
}

/// Fills the buffers up to the end of the file. Returns the number of bytes.
fn fill(request: &mut ReadRequest) -> Result<usize, Error> {
    let mut filled = 0;
    for buffer in &mut request.buffers {
        // Reads the file that is open. Its path may lead to another file now.
        filled += request.source.read_at(request.offset + filled as u64, buffer)?;
    }
    Ok(filled)
}
