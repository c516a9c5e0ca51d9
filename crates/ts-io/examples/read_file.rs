// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads a file into pool buffers with the best backend. Prints the backend's name and the rate.
//!
//! ```text
//! cargo run --release -p tensorstream-io --example read_file -- model.safetensors
//! ```

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use ts_io::ts_pool::{Budget, HostPool};
use ts_io::{BackendOptions, ReadRequest, Registry, Source, completion_queue};

const REQUEST_BYTES: usize = 4 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: read_file PATH")?;
    let source = Source::open(path)?;

    let choice = Registry::builtin().choose(None, std::slice::from_ref(&source))?;
    for (name, reason) in &choice.passed_over {
        println!("{name} cannot be used: {reason}");
    }
    let options = BackendOptions::default();
    let (sink, completions) = completion_queue();
    let backend = choice.provider.create(&options, sink)?;

    // One buffer for each read in flight. Each completion returns its buffer for the next request.
    let memory = options.in_flight * REQUEST_BYTES;
    let pool = HostPool::new(&Budget::new(memory), memory)?;
    backend.register(&pool);
    let mut free = (0..options.in_flight)
        .map(|_| pool.allocate(REQUEST_BYTES))
        .collect::<Result<Vec<_>, _>>()?;

    let started = Instant::now();
    let (mut offset, mut pending, mut bytes) = (0, 0, 0);
    loop {
        while offset < source.len()
            && let Some(buffer) = free.pop()
        {
            let len = (source.len() - offset).min(REQUEST_BYTES as u64) as usize;
            let request = ReadRequest::new(offset, Arc::clone(&source), offset, len, buffer);
            backend.submit(request).map_err(|rejected| rejected.error)?;
            offset += len as u64;
            pending += 1;
        }
        if pending == 0 {
            break;
        }
        let done = completions.recv()?;
        pending -= 1;
        // A real program would use `done.buffers` here: they have the bytes at offset `done.token`.
        bytes += done.result?.bytes();
        free.extend(done.buffers);
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{}: {bytes} bytes with `{}` in {seconds:.3} s, {:.2} GiB/s",
        source.path().display(),
        backend.name(),
        bytes as f64 / f64::from(1 << 30) / seconds,
    );
    Ok(())
}
