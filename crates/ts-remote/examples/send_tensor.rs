// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sends a tensor between two threads over TCP on the loopback interface, and prints the
//! throughput.
//!
//! ```text
//! cargo run --release -p tensorstream-remote --example send_tensor [MIB [ROUNDS]]
//! ```

use std::error::Error;
use std::thread;
use std::time::Instant;

use ts_remote::ts_format::Dtype;
use ts_remote::{
    Bytes, ConnectionOptions, Event, Link, Listener, Role, SendOptions, Tensor, TensorInfo,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: u64| arguments.next().map_or(Ok(default), |text| text.parse());
    let (mib, rounds) = (number(256)?, number(8)?);

    let options = ConnectionOptions::default();
    let listener = Listener::bind(&"127.0.0.1:0".parse()?, options.idle_timeout)?;
    let address = listener.address().clone();
    let tensor = Tensor::zeros(TensorInfo::new("w", Dtype::U8, [mib << 20])?)?;
    let sender = thread::spawn(move || -> Result<(), ts_remote::Error> {
        let mut link = Link::<Vec<u8>>::connect(&address, ConnectionOptions::default())?;
        let stream = link.connection().open_stream()?;
        for _ in 0..rounds {
            let (info, payload): (TensorInfo, Bytes) = (tensor.info.clone(), tensor.buffer.clone());
            link.send(stream, info, payload, SendOptions::default())?;
        }
        link.close("all tensors are sent")
    });

    let mut link = Link::<Vec<u8>>::new(listener.accept()?, Role::Acceptor, options)?;
    let mut memory = vec![0; usize::try_from(mib << 20)?];
    let begin = Instant::now();
    let mut received = 0;
    while received < rounds {
        match link.next_event()? {
            // The payload is read straight into this memory.
            Event::Metadata { stream, .. } => {
                link.connection().accept(stream, std::mem::take(&mut memory))?;
            }
            Event::End { sink, .. } => {
                memory = sink.unwrap_or_default();
                received += 1;
            }
            _ => {}
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let bytes = (rounds * (mib << 20)) as f64;
    println!("{rounds} tensors of {mib} MiB in {seconds:.2} s: {:.2} GB/s", bytes / seconds / 1e9);
    drop(link);
    sender.join().map_err(|_| "the sender panicked")??;
    Ok(())
}
