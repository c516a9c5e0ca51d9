// SPDX-License-Identifier: MIT OR Apache-2.0
//! Helpers for tests in which two ends send to each other, each on its own thread.

use std::thread;
use std::time::Duration;

use ts_format::Dtype;
use ts_remote::{
    Address, ConnectionOptions, Error, Event, Link, Listener, Role, SendOptions, Socket, TensorInfo,
};

pub(crate) fn options() -> ConnectionOptions {
    ConnectionOptions::default().with_idle_timeout(Duration::from_secs(20))
}

/// Returns the port of a TCP address.
#[allow(dead_code)] // not every test needs it
pub(crate) fn port(address: &Address) -> u16 {
    let text = address.to_string();
    text.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a TCP address has a port")
}

pub(crate) fn payload(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| ((i / 7) as u8).wrapping_mul(3).wrapping_add(seed)).collect()
}

/// Sends tensors and a message, and receives those of the peer until the peer has finished its
/// stream. Returns the received payloads.
pub(crate) fn exchange(
    link: &mut Link<Vec<u8>>,
    sizes: &[usize],
    seed: u8,
) -> Result<Vec<Vec<u8>>, Error> {
    let stream = link.connection().open_stream()?;
    for &len in sizes {
        let info = TensorInfo::new("w", Dtype::U8, [len as u64])?;
        link.connection().send(stream, info, payload(len, seed).into(), SendOptions::default())?;
    }
    link.connection().send_message(stream, b"done"[..].into())?;
    link.connection().finish(stream)?;
    let mut received = Vec::new();
    loop {
        match link.next_event()? {
            Event::Metadata { stream, info, .. } if info.storage_len > 0 => {
                link.connection().accept(stream, vec![0; info.storage_len as usize])?;
            }
            Event::End { sink, .. } => received.push(sink.unwrap_or_default()),
            Event::Message { bytes, .. } => assert_eq!(bytes, b"done"[..]),
            Event::Finished { .. } => break,
            _ => {}
        }
    }
    link.flush_all()?;
    Ok(received)
}

/// Sends from both ends at once, and checks that everything arrives.
pub(crate) fn both_ways(
    listener: Listener,
    client: impl FnOnce(Socket) -> Result<Socket, Error>,
    server: impl FnOnce(&Listener) -> Result<Socket, Error> + Send + 'static,
) {
    let sizes = [5usize, 0, 3 << 20, 70_000, 20 << 20];
    let address = listener.address().clone();
    let other = thread::spawn(move || {
        let mut link = Link::<Vec<u8>>::new(server(&listener)?, Role::Acceptor, options())?;
        let received = exchange(&mut link, &sizes, 1)?;
        link.close("done").map(|()| received)
    });
    let socket = client(Socket::connect(&address, options().idle_timeout).unwrap()).unwrap();
    let mut link = Link::<Vec<u8>>::new(socket, Role::Connector, options()).unwrap();
    let received = exchange(&mut link, &sizes, 2).unwrap();
    let expected = |seed| sizes.map(|len| payload(len, seed)).to_vec();
    assert!(received == expected(1), "the payloads of the acceptor differ");
    let ended = link.next_event().unwrap_err();
    assert!(matches!(&ended, Error::Closed { reason } if reason == "done"), "{ended}");
    assert!(other.join().unwrap().unwrap() == expected(2), "the payloads of the connector differ");
}
