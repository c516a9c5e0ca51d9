// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whatever a peer sends, in whatever pieces: events or an error, and no more memory than was
//! granted.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_pool::SharedMemory;
use ts_remote::{Connection, ConnectionOptions, Error, Event, Role};

thread_local! {
    static MEMORY: SharedMemory = SharedMemory::create(4096).expect("there is memory");
}

const WINDOW: u64 = 10_000;
const STREAMS: u32 = 4;

fuzz_target!(|input: &[u8]| {
    // A conversation as it is kept in the seeds is an input; how it is cut follows from its end.
    let mut bytes = input;
    let [.., patience, piece] = *input else { return };
    let options = ConnectionOptions {
        window_bytes: WINDOW,
        max_streams: STREAMS,
        ..ConnectionOptions::default()
    };
    let mut connection = Connection::<Vec<u8>>::new(Role::Acceptor, options.clone());
    let mut peer = Connection::<Vec<u8>>::new(Role::Connector, options);
    // Once in a while memory is shared, whatever it is worth.
    if patience % 2 == 1
        && let Ok(descriptor) = MEMORY.with(|memory| memory.descriptor().try_clone_to_owned())
    {
        connection.descriptor_received(descriptor);
    }
    // It begins well unless the bytes do.
    let mut greeting = Vec::new();
    if !bytes.starts_with(b"TSW") {
        peer.plan_writes();
        peer.write_slices(9).iter().for_each(|slice| greeting.extend_from_slice(slice));
    }
    let mut waiting = Vec::new();
    let mut given = 0;
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
            let most = target.len().min(rest.len()).min((usize::from(piece) + 1) * 8 - len);
            target[..most].copy_from_slice(&rest[..most]);
            rest = &rest[most..];
            len += most;
        }
        if let Err(error) = connection.filled(len) {
            // It says why, unless the other end has, and nothing else happens.
            assert!(connection.plan_writes() || matches!(error, Error::Closed { .. }));
            return;
        }
        while let Some(event) = connection.poll() {
            match event {
                Event::Metadata { stream, info, known, .. } if !known && info.storage_len > 0 => {
                    waiting.push((stream, info.storage_len));
                }
                Event::End { info, sink, .. } => {
                    assert!(sink.is_none_or(|sink| sink.len() as u64 == info.storage_len));
                }
                Event::Cancelled { stream, .. } | Event::Finished { stream } => {
                    waiting.retain(|w| w.0 != stream)
                }
                _ => {}
            }
        }
        let most = (WINDOW as usize + (64 << 10) + 1000) * STREAMS as usize;
        assert!(connection.staged_bytes() <= 2 * most, "{} bytes wait", connection.staged_bytes());
        steps += 1;
        if steps.is_multiple_of(u32::from(patience) + 1)
            && let Some((stream, len)) = waiting.pop()
            && len < 1 << 20
            && given < 1 << 24
        {
            given += len;
            connection.accept(stream, vec![0; len as usize]).expect("it was announced");
        }
        connection.plan_writes();
        let len = connection.write_slices(99).iter().map(|slice| slice.len()).sum();
        connection.written(len);
    }
    let _ = connection.end_of_input();
});
