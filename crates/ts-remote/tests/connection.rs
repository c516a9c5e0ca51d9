// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of two connections without sockets. Everything that is sent arrives, however the bytes are
//! split, and no end waits for ever.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;
use proptest::prelude::*;
use rustix::fd::OwnedFd;
use ts_format::{Codec, Compression, Dtype};
#[cfg(unix)]
use ts_pool::SharedMemory;
use ts_remote::{Connection, ConnectionOptions, Error, Event, Role, SendOptions, TensorInfo};

type End = Connection<Vec<u8>>;

/// A byte stream from one end to the other, with descriptors.
#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    /// Descriptors, each with the offset of its byte in the stream.
    descriptors: VecDeque<(u64, OwnedFd)>,
    written: u64,
    read: u64,
}

impl Pipe {
    /// Writes at most `max_bytes` bytes of an end to the pipe. Returns how many bytes were written.
    fn write_from(&mut self, end: &mut End, max_bytes: usize) -> usize {
        if !end.plan_writes() {
            return 0;
        }
        let bytes: Vec<u8> =
            end.write_slices(16).iter().flat_map(|s| s.iter().copied()).take(max_bytes).collect();
        #[cfg(unix)]
        if let Some(descriptor) = end.descriptor_to_send().filter(|_| !bytes.is_empty()) {
            self.descriptors.push_back((self.written, descriptor.try_clone_to_owned().unwrap()));
        }
        self.written += bytes.len() as u64;
        end.written(bytes.len());
        self.bytes.extend(&bytes);
        bytes.len()
    }

    /// Reads at most `max_bytes` bytes from the pipe into an end. Returns how many bytes were read.
    fn read_into(&mut self, end: &mut End, max_bytes: usize) -> Result<usize, Error> {
        let mut len = 0;
        let next = |descriptors: &VecDeque<(u64, OwnedFd)>| descriptors.front().map(|(at, _)| *at);
        // As with a socket, a read stops before a later byte that has a descriptor.
        let max_bytes = match next(&self.descriptors) {
            Some(at) if at > self.read => max_bytes.min((at - self.read) as usize),
            _ => max_bytes,
        };
        let has_descriptor = next(&self.descriptors) == Some(self.read) && max_bytes > 0;
        let received = if has_descriptor { self.descriptors.pop_front() } else { None };
        for target in end.read_targets()? {
            for byte in target.iter_mut().take(max_bytes - len) {
                let Some(next) = self.bytes.pop_front() else { break };
                *byte = next;
                len += 1;
            }
        }
        self.read += len as u64;
        #[cfg(windows)]
        assert!(received.is_none());
        #[cfg(unix)]
        if let Some((_, descriptor)) = received {
            end.descriptor_received(descriptor);
        }
        if len > 0 { end.filled(len).map(|()| len) } else { Ok(0) }
    }
}

#[test]
fn a_client_of_another_protocol_gets_no_answer() {
    let mut end = End::new(Role::Acceptor, ConnectionOptions::default());
    let mut pipe =
        Pipe { bytes: b"GET / HTTP/1.1\r\n\r\n".iter().copied().collect(), ..Pipe::default() };
    let error = pipe.read_into(&mut end, 64).unwrap_err();
    assert!(error.to_string().contains("invalid preface"), "{error}");
    assert!(!end.plan_writes());
}

#[test]
fn nothing_is_sent_after_finish() {
    let mut both = Both::new(Default::default());
    both.connect();
    let end = &mut both.ends[0];
    let stream = end.open_stream().unwrap();
    end.finish(stream).unwrap();
    for result in [end.send_message(stream, Bytes::from_static(b"late")), end.finish(stream)] {
        assert!(matches!(result, Err(Error::Misuse(_))), "{result:?}");
    }
}

/// Something that was sent or received on a stream.
#[derive(Debug, Clone, PartialEq)]
enum Item {
    Tensor(TensorInfo, Vec<u8>),
    View(TensorInfo),
    Message(Vec<u8>),
    Finished,
    Cancelled,
}

struct Both {
    ends: [End; 2],
    pipes: [Pipe; 2],
    /// The stream and the length of each tensor that has no memory yet, by end.
    announced: [VecDeque<(u32, usize)>; 2],
    received: [HashMap<u32, Vec<Item>>; 2],
}

impl Both {
    fn new(options: [ConnectionOptions; 2]) -> Self {
        let [first, second] = options;
        Self {
            ends: [
                Connection::new(Role::Connector, first),
                Connection::new(Role::Acceptor, second),
            ],
            pipes: Default::default(),
            announced: Default::default(),
            received: Default::default(),
        }
    }

    fn connect(&mut self) {
        while !self.ends.iter().all(Connection::is_connected) {
            assert!(self.run(usize::MAX, true).unwrap() > 0, "the handshake stalls");
        }
    }

    /// Transfers at most `max_bytes` bytes in each direction, and processes the events. With
    /// `accept`, provides memory for tensors. Returns 0 if nothing happened.
    fn run(&mut self, max_bytes: usize, accept: bool) -> Result<usize, Error> {
        let mut done = 0;
        for from in 0..2 {
            done += self.pipes[from].write_from(&mut self.ends[from], max_bytes);
            done += self.pipes[from].read_into(&mut self.ends[1 - from], max_bytes)?;
        }
        for end in 0..2 {
            while let Some(event) = self.ends[end].poll() {
                done += 1;
                self.record(end, event);
            }
            while accept && let Some((stream, len)) = self.announced[end].pop_front() {
                done += 1;
                self.accept(end, stream, len)?;
            }
        }
        Ok(done)
    }

    /// Provides memory for a tensor, unless it is longer than `MAX_LEN` because META was damaged.
    fn accept(&mut self, end: usize, stream: u32, len: usize) -> Result<(), Error> {
        const MAX_LEN: usize = 16 << 20;
        if len > MAX_LEN {
            self.ends[end].cancel(stream, "too long");
            return Ok(());
        }
        self.ends[end].accept(stream, vec![0; len])
    }

    fn record(&mut self, end: usize, event: Event<Vec<u8>>) {
        let (stream, item) = match event {
            Event::Metadata { stream, info, known, .. } if !known && info.storage_len > 0 => {
                self.announced[end].push_back((stream, info.storage_len as usize));
                return;
            }
            Event::End { stream, info, sink } => {
                let empty = info.storage_len == 0;
                let tensor = match sink {
                    Some(bytes) => Item::Tensor(*info, bytes),
                    None if empty => Item::Tensor(*info, Vec::new()),
                    None => Item::View(*info),
                };
                (stream, tensor)
            }
            Event::Message { stream, bytes } => (stream, Item::Message(bytes.to_vec())),
            Event::Finished { stream } => (stream, Item::Finished),
            Event::Cancelled { stream, .. } => (stream, Item::Cancelled),
            _ => return,
        };
        self.received[end].entry(stream).or_default().push(item);
    }
}

fn payload(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| ((i / 7) as u8).wrapping_mul(3).wrapping_add(seed)).collect()
}

fn tensor(name: &str, bytes: &[u8]) -> TensorInfo {
    TensorInfo::new(name, Dtype::U8, [bytes.len() as u64]).unwrap()
}

#[derive(Debug, Clone)]
enum Op {
    Open {
        end: usize,
    },
    Tensor {
        which: usize,
        len: usize,
        codec: usize,
        checksums: bool,
    },
    Message {
        which: usize,
        len: usize,
    },
    Finish {
        which: usize,
    },
    #[cfg(unix)]
    Share {
        end: usize,
        len: usize,
    },
    Run {
        max_bytes: usize,
        accept: bool,
    },
}

#[cfg(unix)]
fn share() -> impl Strategy<Value = Op> {
    (0usize..2, prop_oneof![1usize..50, 5000usize..200_000])
        .prop_map(|(end, len)| Op::Share { end, len })
}

/// Windows has no shared memory, so there the test opens a stream instead.
#[cfg(windows)]
fn share() -> impl Strategy<Value = Op> {
    (0usize..2).prop_map(|end| Op::Open { end })
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let len = prop_oneof![
        6 => 0usize..300,
        6 => 3000usize..9000,
        2 => Just(70_000usize),
        1 => Just(200_001usize),
    ];
    let op = prop_oneof![
        1 => (0usize..2).prop_map(|end| Op::Open { end }),
        4 => (0usize..8, len.clone(), 0usize..4, any::<bool>())
            .prop_map(|(which, len, codec, checksums)| Op::Tensor { which, len, codec, checksums }),
        3 => (0usize..8, 0usize..6000).prop_map(|(which, len)| Op::Message { which, len }),
        1 => (0usize..8).prop_map(|which| Op::Finish { which }),
        1 => share(),
        8 => (prop_oneof![1usize..40, 100usize..5000, Just(1usize << 20)], any::<bool>())
            .prop_map(|(max_bytes, accept)| Op::Run { max_bytes, accept }),
    ];
    prop::collection::vec(op, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn everything_sent_arrives_through_any_window_and_in_any_pieces(
        windows in [
            prop_oneof![1u64..50, 1000u64..100_000],
            prop_oneof![1u64..50, 1000u64..100_000],
        ],
        frame in prop_oneof![1usize..100, 1000usize..100_000, Just(16 << 20)],
        ops in ops(),
    ) {
        let options = windows.map(|window| {
            ConnectionOptions::default().with_window_bytes(window).with_frame_bytes(frame)
        });
        let mut both = Both::new(options);
        both.connect();
        let mut open: Vec<(usize, u32)> = Vec::new();
        let mut sent: [HashMap<u32, Vec<Item>>; 2] = Default::default();
        for (number, op) in ops.into_iter().enumerate() {
            let find = |which: usize, open: &[(usize, u32)]| {
                (!open.is_empty()).then(|| which % open.len())
            };
            match op {
                Op::Open { end } => open.push((end, both.ends[end].open_stream().unwrap())),
                Op::Tensor { which, len, codec, checksums } => {
                    let Some(at) = find(which, &open) else { continue };
                    let (end, stream) = open[at];
                    let bytes = payload(len, number as u8);
                    let info = tensor(&format!("t{number}"), &bytes);
                    let codec = [Codec::Raw, Codec::Lz4, Codec::Zstd, Codec::Split][codec];
                    let options = SendOptions::default()
                        .with_compression(Compression::Codec(codec, None))
                        .with_checksums(checksums);
                    both.ends[end]
                        .send(stream, info.clone(), bytes.clone().into(), options)
                        .unwrap();
                    sent[end].entry(stream).or_default().push(Item::Tensor(info, bytes));
                }
                Op::Message { which, len } => {
                    let Some(at) = find(which, &open) else { continue };
                    let (end, stream) = open[at];
                    let bytes = payload(len, number as u8);
                    both.ends[end].send_message(stream, bytes.clone().into()).unwrap();
                    sent[end].entry(stream).or_default().push(Item::Message(bytes));
                }
                Op::Finish { which } => {
                    let Some(at) = find(which, &open) else { continue };
                    let (end, stream) = open.swap_remove(at);
                    both.ends[end].finish(stream).unwrap();
                    // A stream on which nothing was sent ends without an event.
                    if let Some(items) = sent[end].get_mut(&stream) {
                        items.push(Item::Finished);
                    }
                }
                // Only the first offer of an end succeeds.
                #[cfg(unix)]
                Op::Share { end, len } => {
                    let _ = both.ends[end].share(SharedMemory::create(len).unwrap());
                }
                Op::Run { max_bytes, accept } => {
                    both.run(max_bytes, accept).unwrap();
                }
            }
        }
        while both.run(usize::MAX, true).unwrap() > 0 {}
        let [first, second] = sent;
        prop_assert_eq!(&both.received, &[second, first]);
        prop_assert!(both.ends.iter().all(|end| end.end_of_input().is_ok()));
    }
}

/// A fault that affects the bytes in transit.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// All further bytes are lost.
    Cut,
    /// Some bytes are lost.
    Drop,
    /// Some bytes are reordered.
    Swap,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn a_damaged_byte_stream_gives_the_sent_payloads_or_an_error(
        window in prop_oneof![1u64..50, 1000u64..100_000],
        max_bytes in prop_oneof![1usize..40, 100usize..5000],
        lens in prop::collection::vec(0usize..6000, 1..6), split in any::<bool>(),
        fault in prop_oneof![Just(Fault::Cut), Just(Fault::Drop), Just(Fault::Swap)],
        when in 0usize..60, at in any::<prop::sample::Index>(), len in 1usize..600,
    ) {
        let options = ConnectionOptions::default().with_window_bytes(window);
        let mut both = Both::new([options.clone(), options]);
        both.connect();
        let stream = both.ends[0].open_stream().unwrap();
        let codec = if split { Codec::Split } else { Codec::Raw };
        let checked = SendOptions::default()
            .with_compression(Compression::Codec(codec, None))
            .with_checksums(true);
        let mut sent = Vec::new();
        for (number, &len) in lens.iter().enumerate() {
            let bytes = payload(len, number as u8);
            let info = tensor(&format!("t{number}"), &bytes);
            both.ends[0].send(stream, info.clone(), bytes.clone().into(), checked).unwrap();
            sent.push(Item::Tensor(info, bytes));
        }
        let mut ended = Ok(1);
        for round in 0.. {
            let idle = matches!(ended, Ok(0));
            if round > when && (idle || ended.is_err()) {
                break;
            }
            if round == when {
                both.pipes[0].write_from(&mut both.ends[0], usize::MAX);
                let bytes = both.pipes[0].bytes.make_contiguous();
                if !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    let len = len.min(bytes.len() - at);
                    match fault {
                        Fault::Cut => both.pipes[0].bytes.truncate(at),
                        Fault::Drop => drop(both.pipes[0].bytes.drain(at..at + len)),
                        Fault::Swap => bytes[at..at + len].rotate_left(len / 2),
                    }
                }
            }
            if round > when && matches!(fault, Fault::Cut) {
                // The sender writes nothing more. The bytes that are left in the pipe still arrive.
                ended = both.pipes[0].read_into(&mut both.ends[1], max_bytes);
                while let Some(event) = both.ends[1].poll() {
                    both.record(1, event);
                }
                while let Some((stream, len)) = both.announced[1].pop_front() {
                    both.accept(1, stream, len).unwrap();
                }
            } else if ended.is_ok() {
                ended = both.run(max_bytes, true);
            }
        }
        let none = Vec::new();
        let received = both.received[1].get(&stream).unwrap_or(&none);
        if matches!(fault, Fault::Cut) {
            prop_assert!(
                sent.starts_with(received),
                "{} of {} items arrived",
                received.len(),
                sent.len()
            );
        } else {
            // Checksums cover payloads, but not META.
            let payloads = |items: &[Item]| -> Vec<Vec<u8>> {
                items
                    .iter()
                    .filter_map(|item| {
                        if let Item::Tensor(_, bytes) = item { Some(bytes.clone()) } else { None }
                    })
                    .collect()
            };
            let sent = payloads(&sent);
            prop_assert!(payloads(received).iter().all(|bytes| sent.contains(bytes)));
        }
        // A tensor that stays incomplete must be reported as an error.
        let whole = both.ends[1].announced(stream).is_none();
        prop_assert!(whole || ended.is_err() || both.ends[1].end_of_input().is_err());
    }
}

#[test]
fn without_memory_no_more_than_the_window_is_sent() {
    let options = ConnectionOptions::default().with_window_bytes(256 << 10);
    let mut both = Both::new([options.clone(), options]);
    both.connect();
    let bytes = payload(3 << 20, 1);
    let stream = both.ends[0].open_stream().unwrap();
    both.ends[0]
        .send(stream, tensor("w", &bytes), bytes.clone().into(), SendOptions::default())
        .unwrap();
    let before = both.ends[0].stats().sent_bytes;
    while both.run(usize::MAX, false).unwrap() > 0 {}
    let sent = both.ends[0].stats().sent_bytes - before;
    assert!(
        (200 << 10..300 << 10).contains(&sent),
        "{sent} bytes were sent with a window of 256 KiB"
    );
    assert!(!both.ends[0].plan_writes() && !both.ends[0].is_sent(stream), "the sender pauses");
    while both.run(usize::MAX, true).unwrap() > 0 {}
    assert_eq!(both.received[1][&stream], [Item::Tensor(tensor("w", &bytes), bytes)]);
}

#[test]
fn a_payload_is_not_copied() {
    let mut both = Both::new([(); 2].map(|()| ConnectionOptions::default()));
    both.connect();
    let payload = Bytes::from(payload(5 << 20, 2));
    let stream = both.ends[0].open_stream().unwrap();
    let info = tensor("w", &payload);
    both.ends[0].send(stream, info, payload.clone(), SendOptions::default()).unwrap();
    let (mut memory, mut within, mut outside) = (0..0, 0, 0);
    loop {
        while both.ends[0].plan_writes() {
            let slices = both.ends[0].write_slices(16);
            let len = slices.iter().map(|slice| slice.len()).sum();
            for slice in slices {
                match payload.as_ptr_range().contains(&slice.as_ptr()) {
                    true => within += slice.len(),
                    false => outside += slice.len(),
                }
                both.pipes[0].bytes.extend(&slice[..]);
            }
            both.ends[0].written(len);
        }
        let [first, _] = both.ends[1].read_targets().unwrap();
        if first.len() > 1000 && !memory.is_empty() {
            assert!(memory.contains(&first.as_ptr().addr()), "the payload is read into its memory");
        }
        let read = both.pipes[0].read_into(&mut both.ends[1], usize::MAX).unwrap();
        let mut done = read;
        while let Some(event) = both.ends[1].poll() {
            done += 1;
            if let Event::Metadata { stream, info, .. } = event {
                let bytes = vec![0; info.storage_len as usize];
                let range = bytes.as_ptr_range();
                memory = range.start.addr()..range.end.addr();
                both.ends[1].accept(stream, bytes).unwrap();
            } else if let Event::End { sink, .. } = event {
                assert_eq!(sink.unwrap(), payload);
            }
        }
        done += both.pipes[1].write_from(&mut both.ends[1], usize::MAX);
        done += both.pipes[1].read_into(&mut both.ends[0], usize::MAX).unwrap();
        if done == 0 {
            break;
        }
    }
    assert_eq!(within, payload.len(), "the payload is written from its own memory");
    assert!(outside < 1000, "{outside} bytes were not written from the payload");
    assert_eq!(both.ends[1].stats().copied_bytes, 0);
}

#[test]
fn long_frames_are_sent_to_peers_that_announce_them() {
    const LEN: usize = 3 << 20;
    for (announced, frame, encoded, expected) in [
        (true, 16 << 20, false, 1),
        (true, 2 << 20, false, 2),
        (true, 1 << 20, false, 3),
        (true, 16 << 20, true, 3),
        (false, 16 << 20, false, 3),
    ] {
        let options = || ConnectionOptions::default().with_frame_bytes(frame);
        let mut both = Both::new([options(), options()]);
        both.pipes[0].write_from(&mut both.ends[0], usize::MAX);
        while both.pipes[0].read_into(&mut both.ends[1], usize::MAX).unwrap() > 0 {}
        both.pipes[1].write_from(&mut both.ends[1], usize::MAX);
        let hello = both.pipes[1].bytes.make_contiguous();
        let field = [7, 8, 0, 0, 0];
        let at = hello.windows(5).position(|bytes| bytes == field).unwrap();
        if !announced {
            hello[at] = 0x70; // a field that no version knows
        }
        both.connect();
        let stream = both.ends[0].open_stream().unwrap();
        let bytes = payload(LEN, 1);
        let codec = if encoded { Codec::Lz4 } else { Codec::Raw };
        let sending = SendOptions::default()
            .with_compression(Compression::Codec(codec, None))
            .with_checksums(true);
        let before = both.ends[0].stats().sent_frames;
        both.ends[0].send(stream, tensor("w", &bytes), bytes.clone().into(), sending).unwrap();
        while both.run(usize::MAX, true).unwrap() > 0 {}
        assert_eq!(both.received[1][&stream], [Item::Tensor(tensor("w", &bytes), bytes)]);
        // META and END are frames, too.
        assert_eq!(both.ends[0].stats().sent_frames - before - 2, expected);
    }
}

#[test]
fn views_of_one_storage_send_its_bytes_once() {
    let mut both = Both::new([(); 2].map(|()| ConnectionOptions::default()));
    both.connect();
    let bytes = payload(4096, 3);
    let whole =
        TensorInfo::new("w", Dtype::F32, [1024u64]).unwrap().in_storage(9, 4096, 0, None).unwrap();
    let part = TensorInfo::new("w.t", Dtype::F32, [16u64, 32]).unwrap();
    let part = part.in_storage(9, 4096, 64, Some(vec![1, 16])).unwrap();
    let stream = both.ends[1].open_stream().unwrap();
    let keep = SendOptions::default().with_keep(true);
    both.ends[1].send(stream, whole.clone(), bytes.clone().into(), keep).unwrap();
    both.ends[1].send_view(stream, part.clone(), false).unwrap();
    while both.run(usize::MAX, true).unwrap() > 0 {}
    assert_eq!(both.received[0][&stream], [Item::Tensor(whole, bytes), Item::View(part.clone())]);
    both.ends[1].send_view(stream, part, false).unwrap();
    let refused = loop {
        if let Err(error) = both.run(usize::MAX, true) {
            break error;
        }
    };
    assert!(refused.to_string().contains("storage 9, which was not sent"), "{refused}");
}

#[test]
fn either_end_can_cancel_a_stream() {
    for who in 0..2 {
        let mut both = Both::new([(); 2].map(|()| ConnectionOptions::default()));
        both.connect();
        let bytes = payload(1 << 20, 4);
        let streams = [(); 2].map(|()| both.ends[0].open_stream().unwrap());
        for stream in streams {
            both.ends[0]
                .send(stream, tensor("w", &bytes), bytes.clone().into(), SendOptions::default())
                .unwrap();
        }
        both.run(50_000, false).unwrap();
        both.run(50_000, false).unwrap();
        both.ends[who].cancel(streams[0], "no longer wanted");
        both.announced[1].retain(|&(stream, _)| who == 0 || stream != streams[0]);
        while both.run(5000, true).is_ok_and(|done| done > 0) {}
        let received =
            |end: usize, stream| both.received[end].get(&stream).cloned().unwrap_or_default();
        assert_eq!(received(1 - who, streams[0]), [Item::Cancelled], "end {who} cancelled it");
        assert_eq!(received(who, streams[0]), []);
        assert_eq!(received(1, streams[1]), [Item::Tensor(tensor("w", &bytes), bytes)]);
        assert!(both.ends[0].is_sent(streams[0]));
    }
}

#[test]
fn a_refused_peer_gets_the_reason() {
    let with = |token: Option<&str>| ConnectionOptions::default().with_token(token.map(Into::into));
    let mut both = Both::new([with(None), with(Some("sesame"))]);
    let refused = loop {
        if let Err(error) = both.run(7, true) {
            break error;
        }
    };
    assert!(refused.to_string().contains("wrong token"), "{refused}");
    while both.pipes[1].write_from(&mut both.ends[1], 7) > 0 {}
    let reason = loop {
        match both.pipes[1].read_into(&mut both.ends[0], 7) {
            Err(error) => break error,
            Ok(len) => assert!(len > 0),
        }
    };
    assert!(matches!(&reason, Error::Closed { reason } if reason.contains("token")), "{reason}");
    let mut acceptor = End::new(Role::Acceptor, with(None));
    let bytes = b"GET / HTTP/1.1\r\n\r\n".iter().copied().collect();
    let mut pipe = Pipe { bytes, ..Pipe::default() };
    let refused = pipe.read_into(&mut acceptor, usize::MAX).unwrap_err();
    assert!(refused.to_string().contains("invalid preface"), "{refused}");
}

#[test]
fn a_changed_byte_is_reported_with_its_tensor() {
    for codec in [Codec::Raw, Codec::Zstd] {
        let mut both = Both::new([(); 2].map(|()| ConnectionOptions::default()));
        both.connect();
        let bytes = payload(100_000, 5);
        let stream = both.ends[0].open_stream().unwrap();
        let options = SendOptions::default()
            .with_compression(Compression::Codec(codec, None))
            .with_checksums(true);
        both.ends[0].send(stream, tensor("w", &bytes), bytes.into(), options).unwrap();
        while both.pipes[0].write_from(&mut both.ends[0], usize::MAX) > 0 {}
        let middle = both.pipes[0].bytes.len() / 2;
        both.pipes[0].bytes[middle] ^= 1;
        let found = loop {
            if let Err(error) = both.run(1000, true) {
                break error;
            }
        };
        assert!(matches!(&found, Error::Damaged { tensor, .. } if tensor == "w"), "{found}");
    }
}

#[test]
fn many_pings_get_one_answer() {
    let mut both = Both::new([(); 2].map(|()| ConnectionOptions::default()));
    both.connect();
    (0..10_000).for_each(|_| both.ends[0].ping());
    while both.pipes[0].write_from(&mut both.ends[0], usize::MAX) > 0 {}
    while both.pipes[0].read_into(&mut both.ends[1], usize::MAX).unwrap() > 0 {}
    assert!(both.ends[1].plan_writes());
    let len: usize = both.ends[1].write_slices(usize::MAX).iter().map(|slice| slice.len()).sum();
    assert!(len < 100, "the answers have {len} bytes");
}

#[test]
fn the_memory_of_a_cancelled_tensor_is_returned() {
    let mut both = Both::new([(); 2].map(|()| ConnectionOptions::default()));
    both.connect();
    let bytes = payload(8 << 20, 6);
    let stream = both.ends[0].open_stream().unwrap();
    both.ends[0].send(stream, tensor("w", &bytes), bytes.into(), SendOptions::default()).unwrap();
    for _ in 0..9 {
        both.run(100_000, true).unwrap();
    }
    both.ends[0].cancel(stream, "not needed");
    while both.pipes[0].write_from(&mut both.ends[0], usize::MAX) > 0 {}
    while both.pipes[0].read_into(&mut both.ends[1], usize::MAX).unwrap() > 0 {}
    let memory = std::iter::from_fn(|| both.ends[1].poll()).find_map(|event| match event {
        Event::Cancelled { sink, .. } => sink,
        _ => None,
    });
    assert_eq!(memory.map(|memory| memory.len()), Some(8 << 20));
}

#[test]
fn a_stream_that_has_ended_is_not_reused() {
    let mut both = Both::new([(); 2].map(|()| ConnectionOptions::default()));
    both.connect();
    let stream = both.ends[0].open_stream().unwrap();
    both.ends[0].send_message(stream, b"m"[..].into()).unwrap();
    both.ends[0].finish(stream).unwrap();
    both.pipes[0].write_from(&mut both.ends[0], usize::MAX);
    let again = both.pipes[0].bytes.clone();
    while both.pipes[0].read_into(&mut both.ends[1], usize::MAX).unwrap() > 0 {}
    both.pipes[0].bytes = again;
    let refused = loop {
        match both.pipes[0].read_into(&mut both.ends[1], usize::MAX) {
            Ok(len) => assert!(len > 0),
            Err(error) => break error,
        }
    };
    assert!(refused.to_string().contains("stream that has ended"), "{refused}");
    assert!(both.ends[1].read_targets().is_err(), "nothing more can be read");
}

#[cfg(target_os = "linux")]
#[test]
fn large_payloads_go_through_shared_memory_if_the_peer_maps_it() {
    for enabled in [true, false] {
        let options = ConnectionOptions::default().with_shared_bytes(usize::from(enabled));
        let mut both = Both::new([ConnectionOptions::default(), options]);
        both.connect();
        both.ends[0].share(SharedMemory::create(256 << 10).unwrap()).unwrap();
        while both.run(usize::MAX, true).unwrap() > 0 {}
        let bytes = payload(5 << 20, 8);
        let stream = both.ends[0].open_stream().unwrap();
        let before = both.ends[0].stats().sent_bytes;
        let checked = SendOptions::default().with_checksums(true);
        both.ends[0].send(stream, tensor("w", &bytes), bytes.clone().into(), checked).unwrap();
        while both.run(usize::MAX, true).unwrap() > 0 {}
        let socket_bytes = both.ends[0].stats().sent_bytes - before;
        assert_eq!(socket_bytes < 10_000, enabled, "{socket_bytes} bytes went through the socket");
        assert_eq!(both.received[1][&stream], [Item::Tensor(tensor("w", &bytes), bytes)]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn bytes_that_arrive_with_meta_wait_for_the_metadata_event() {
    let sharing = ConnectionOptions::default().with_shared_bytes(4 << 20);
    let mut both = Both::new([ConnectionOptions::default(), sharing]);
    both.connect();
    both.ends[0].share(SharedMemory::create(4 << 20).unwrap()).unwrap();
    while both.run(usize::MAX, true).unwrap() > 0 {}
    let stream = both.ends[0].open_stream().unwrap();
    let sent: Vec<_> = (0..8)
        .map(|number| payload(if number % 2 == 0 { 300 << 10 } else { 50 }, number))
        .collect();
    for bytes in &sent {
        both.ends[0]
            .send(stream, tensor("w", bytes), bytes.clone().into(), SendOptions::default())
            .unwrap();
    }
    while both.pipes[0].write_from(&mut both.ends[0], usize::MAX) > 0 {}
    // Invalid bytes follow the valid frames.
    both.pipes[0].bytes.extend([0xff; 64]);
    let mut received = Vec::new();
    let error = loop {
        if let Err(error) = both.pipes[0].read_into(&mut both.ends[1], usize::MAX) {
            break error;
        }
        while let Some(event) = both.ends[1].poll() {
            match event {
                Event::Metadata { info, .. } => {
                    both.ends[1].accept(stream, vec![0; info.storage_len as usize]).unwrap();
                }
                Event::End { sink, .. } => received.push(sink.unwrap()),
                _ => {}
            }
        }
    };
    assert!(received == sent, "{} of {} tensors arrived", received.len(), sent.len());
    let copied = both.ends[1].stats().copied_bytes;
    assert!(copied <= 4 * 50, "{copied} bytes were copied twice");
    assert!(matches!(error, Error::Protocol { .. }), "{error}");
}

#[test]
fn a_stream_counts_as_open_until_the_peer_has_taken_it() {
    let few = ConnectionOptions::default().with_max_streams(3);
    let mut both = Both::new([ConnectionOptions::default(), few]);
    both.connect();
    let mut opened = Vec::new();
    for round in 0..200 {
        while let Ok(stream) = both.ends[0].open_stream() {
            match round % 4 {
                0 => {}
                _ => both.ends[0].send_message(stream, b"m"[..].into()).unwrap(),
            }
            match round % 3 {
                0 => both.ends[0].cancel(stream, "not needed"),
                _ => both.ends[0].finish(stream).unwrap(),
            }
            opened.push(stream);
        }
        both.run(50, true).unwrap();
        if round % 5 == 0
            && let Some(&stream) = opened.last()
        {
            both.ends[1].cancel(stream, "not wanted");
        }
    }
    while both.run(usize::MAX, true).unwrap() > 0 {}
    assert!(opened.len() > 100, "{} streams were opened", opened.len());
    assert!(opened.iter().all(|&stream| both.ends[0].is_taken(stream)));
}

#[test]
fn the_checksum_of_a_refused_payload_is_not_verified() {
    let mut both = Both::new([(); 2].map(|()| ConnectionOptions::default()));
    both.connect();
    let (bytes, checked) = (payload(1 << 20, 9), SendOptions::default().with_checksums(true));
    let streams = [(); 2].map(|()| both.ends[0].open_stream().unwrap());
    for stream in streams {
        both.ends[0].send(stream, tensor("w", &bytes), bytes.clone().into(), checked).unwrap();
    }
    for _ in 0..3 {
        both.run(50_000, false).unwrap();
    }
    both.ends[1].cancel(streams[0], "not wanted");
    both.announced[1].retain(|&(stream, _)| stream != streams[0]);
    while both.run(50_000, true).unwrap() > 0 {}
    assert_eq!(both.received[1][&streams[1]], [Item::Tensor(tensor("w", &bytes), bytes)]);
}

#[test]
fn unread_answers_are_limited() {
    let mut both = Both::new([(); 2].map(|()| ConnectionOptions::default()));
    both.connect();
    // Repeats FINISH of a stream on which nothing was sent.
    let stream = both.ends[0].open_stream().unwrap();
    both.ends[0].finish(stream).unwrap();
    both.pipes[0].write_from(&mut both.ends[0], usize::MAX);
    let again: Vec<u8> = both.pipes[0].bytes.iter().copied().collect();
    let refused = (0..100_000).find_map(|_| {
        both.pipes[0].bytes.extend(&again);
        both.pipes[0].read_into(&mut both.ends[1], usize::MAX).err()
    });
    assert!(refused.unwrap().to_string().contains("unread control frames"));
}
