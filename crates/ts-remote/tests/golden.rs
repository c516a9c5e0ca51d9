// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares the bytes that a connector writes with a file, which is also a seed of the fuzzer.
#![cfg(target_os = "linux")] // shared memory
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use ts_format::{Codec, Compression, Dtype};
use ts_pool::SharedMemory;
use ts_remote::{Connection, ConnectionOptions, Event, Role, SendOptions, TensorInfo};

const CONVERSATION: &[u8] = include_bytes!("../../../fuzz/seeds/wire/conversation");

/// Returns the bytes of a connector that sends most kinds of frames.
fn connector() -> Vec<u8> {
    let options = ConnectionOptions::default()
        .with_token("t".to_string())
        .with_window_bytes(4 << 20)
        .with_max_streams(64);
    let mut ends = [Role::Connector, Role::Acceptor]
        .map(|role| Connection::<Vec<u8>>::new(role, options.clone()));
    let mut written = Vec::new();
    let mut step = |ends: &mut [Connection<Vec<u8>>; 2], from: usize| {
        let mut bytes = Vec::new();
        let mut descriptor = None;
        while ends[from].plan_writes() {
            descriptor = ends[from]
                .descriptor_to_send()
                .map(|d| d.try_clone_to_owned().unwrap())
                .or(descriptor);
            let before = bytes.len();
            ends[from].write_slices(99).iter().for_each(|slice| bytes.extend_from_slice(slice));
            ends[from].written(bytes.len() - before);
        }
        if from == 0 {
            written.extend_from_slice(&bytes);
        }
        if let Some(descriptor) = descriptor {
            ends[1 - from].descriptor_received(descriptor);
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let mut len = 0;
            for target in ends[1 - from].read_targets().unwrap() {
                let part = target.len().min(rest.len());
                target[..part].copy_from_slice(&rest[..part]);
                rest = &rest[part..];
                len += part;
            }
            ends[1 - from].filled(len).unwrap();
            while let Some(event) = ends[1 - from].poll() {
                if let Event::Metadata { stream, info, known: false, .. } = event {
                    let len = info.storage_len as usize;
                    if len > 0 {
                        ends[1 - from].accept(stream, vec![0; len]).unwrap();
                    }
                }
            }
        }
    };
    step(&mut ends, 0);
    step(&mut ends, 1);
    let [end, _] = &mut ends;
    let stream = end.open_stream().unwrap();
    let whole =
        TensorInfo::new("w", Dtype::F32, [4u64, 8]).unwrap().in_storage(9, 128, 0, None).unwrap();
    let keep = SendOptions::default().with_keep(true).with_checksums(true);
    end.send(stream, whole, (0..128).collect::<Vec<u8>>().into(), keep).unwrap();
    let mut part = TensorInfo::new("w.t", Dtype::F32, [8u64, 2]).unwrap();
    part.metadata.insert("layer".into(), "3".into());
    part.device = "cuda:0".into();
    let part = part.in_storage(9, 128, 64, Some(vec![1, 8])).unwrap();
    end.send_view(stream, part, false).unwrap();
    let encoded = SendOptions::default()
        .with_compression(Compression::Codec(Codec::Lz4, None))
        .with_checksums(true);
    let long = TensorInfo::new("z", Dtype::U8, [500u64]).unwrap();
    end.send(stream, long, vec![5; 500].into(), encoded).unwrap();
    end.send(
        stream,
        TensorInfo::new("", Dtype::BF16, [0u64]).unwrap(),
        Default::default(),
        SendOptions::default(),
    )
    .unwrap();
    end.send_message(stream, b"tokens"[..].into()).unwrap();
    end.finish(stream).unwrap();
    let cancelled = end.open_stream().unwrap();
    end.send_message(cancelled, b"wait"[..].into()).unwrap();
    end.ping();
    step(&mut ends, 0);
    ends[0].cancel(cancelled, "never mind");
    step(&mut ends, 0);
    ends[0].share(SharedMemory::create(4096).unwrap()).unwrap();
    step(&mut ends, 0);
    step(&mut ends, 1);
    let shared = ends[0].open_stream().unwrap();
    let large = TensorInfo::new("s", Dtype::U8, [65_536u64]).unwrap();
    let checked = SendOptions::default().with_checksums(true);
    ends[0].send(shared, large, vec![6; 65_536].into(), checked).unwrap();
    while !ends[0].is_sent(shared) {
        step(&mut ends, 0);
        step(&mut ends, 1);
    }
    written
}

#[test]
fn a_connector_writes_the_bytes_of_version_1() {
    let written = connector();
    if std::env::var_os("TS_BLESS").is_some() {
        std::fs::write(
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/wire/conversation"),
            &written,
        )
        .unwrap();
        return;
    }
    assert_eq!(&written[..8], b"TSWIRE1\n");
    // HELLO contains the version of the software. After a release, run this test with TS_BLESS=1 to
    // write the file again.
    assert!(
        written == CONVERSATION,
        "the {} bytes differ from the file: the wire format has changed",
        written.len()
    );
}
