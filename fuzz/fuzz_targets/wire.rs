// SPDX-License-Identifier: MIT OR Apache-2.0
//! Feeds arbitrary bytes to a connection, in pieces of arbitrary size: the results are events or an
//! error, and no more memory is used than the credit allows.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_pool::SharedMemory;
use ts_remote::{Connection, ConnectionOptions, Error, Event, Role};

thread_local! {
    static MEMORY: SharedMemory = SharedMemory::create(4096).expect("4096 bytes can be allocated");
}

const WINDOW: u64 = 10_000;
const STREAMS: u32 = 4;

fuzz_target!(|input: &[u8]| {
    // The input is a byte stream, as in the seeds. Its last two bytes also decide how often tensors
    // are accepted, and how many bytes are fed at once.
    let mut bytes = input;
    let [.., accept_interval, piece] = *input else { return };
    let options = ConnectionOptions::default().with_window_bytes(WINDOW).with_max_streams(STREAMS);
    let mut connection = Connection::<Vec<u8>>::new(Role::Acceptor, options.clone());
    let mut peer = Connection::<Vec<u8>>::new(Role::Connector, options);
    // With some inputs, the connection also receives a descriptor of shared memory.
    if accept_interval % 2 == 1
        && let Ok(descriptor) = MEMORY.with(|memory| memory.descriptor().try_clone_to_owned())
    {
        connection.descriptor_received(descriptor);
    }
    // If the input does not begin with a greeting, the connection first receives a valid one.
    let mut greeting = Vec::new();
    if !bytes.starts_with(b"TSW") {
        peer.plan_writes();
        peer.write_slices(9).iter().for_each(|slice| greeting.extend_from_slice(slice));
    }
    let mut pending = Vec::new();
    let mut accepted_bytes = 0;
    let mut steps = 0u32;
    let mut rest = &greeting[..];
    loop {
        if rest.is_empty() {
            rest = std::mem::take(&mut bytes);
        }
        if rest.is_empty() {
            break;
        }
        let Ok(targets) = connection.read_targets() else { return };
        let mut len = 0;
        for target in targets {
            let count = target.len().min(rest.len()).min((usize::from(piece) + 1) * 8 - len);
            target[..count].copy_from_slice(&rest[..count]);
            rest = &rest[count..];
            len += count;
        }
        if let Err(error) = connection.filled(len) {
            // After an error, the connection sends the reason, unless the peer has closed it.
            assert!(connection.plan_writes() || matches!(error, Error::Closed { .. }));
            return;
        }
        while let Some(event) = connection.poll() {
            match event {
                Event::Metadata { stream, info, known, .. } if !known && info.storage_len > 0 => {
                    pending.push((stream, info.storage_len));
                }
                Event::End { info, sink, .. } => {
                    assert!(sink.is_none_or(|sink| sink.len() as u64 == info.storage_len));
                }
                Event::Cancelled { stream, .. } | Event::Finished { stream } => {
                    pending.retain(|w| w.0 != stream)
                }
                _ => {}
            }
        }
        let max_bytes = (WINDOW as usize + (64 << 10) + 1000) * STREAMS as usize;
        let staged_bytes = connection.staged_bytes();
        assert!(staged_bytes <= 2 * max_bytes, "too many bytes are staged: {staged_bytes}");
        steps += 1;
        if steps.is_multiple_of(u32::from(accept_interval) + 1)
            && let Some((stream, len)) = pending.pop()
            && len < 1 << 20
            && accepted_bytes < 1 << 24
        {
            accepted_bytes += len;
            connection.accept(stream, vec![0; len as usize]).expect("the stream was announced");
        }
        connection.plan_writes();
        let len = connection.write_slices(99).iter().map(|slice| slice.len()).sum();
        connection.written(len);
    }
    let _ = connection.end_of_input();
});
