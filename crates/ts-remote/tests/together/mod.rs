// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two ends that talk, each on a thread.

use std::thread;
use std::time::Duration;

use ts_format::Dtype;
use ts_remote::{
    ConnectionOptions, Error, Event, Link, Listener, Role, SendOptions, Socket, TensorInfo,
};

pub(crate) fn options() -> ConnectionOptions {
    ConnectionOptions { idle_timeout: Duration::from_secs(20), ..ConnectionOptions::default() }
}

pub(crate) fn payload(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| ((i / 7) as u8).wrapping_mul(3).wrapping_add(seed)).collect()
}

/// Sends tensors and a message, and takes what the other end sends, until it has heard that that is
/// all.
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
    let mut came = Vec::new();
    loop {
        match link.next_event()? {
            Event::Metadata { stream, info, .. } if info.storage_len > 0 => {
                link.connection().accept(stream, vec![0; info.storage_len as usize])?;
            }
            Event::End { sink, .. } => came.push(sink.unwrap_or_default()),
            Event::Message { bytes, .. } => assert_eq!(bytes, b"done"[..]),
            Event::Finished { .. } => break,
            _ => {}
        }
    }
    link.flush_all()?;
    Ok(came)
}

/// Both ends send at once; whether all of it came to both.
pub(crate) fn both_ways(
    listener: Listener,
    client: impl FnOnce(Socket) -> Result<Socket, Error>,
    server: impl FnOnce(&Listener) -> Result<Socket, Error> + Send + 'static,
) {
    let sizes = [5usize, 0, 3 << 20, 70_000, 20 << 20];
    let address = listener.address().clone();
    let other = thread::spawn(move || {
        let mut link = Link::<Vec<u8>>::new(server(&listener)?, Role::Acceptor, options())?;
        let came = exchange(&mut link, &sizes, 1)?;
        link.close("all is said").map(|()| came)
    });
    let socket = client(Socket::connect(&address, options().idle_timeout).unwrap()).unwrap();
    let mut link = Link::<Vec<u8>>::new(socket, Role::Connector, options()).unwrap();
    let came = exchange(&mut link, &sizes, 2).unwrap();
    let expected = |seed| sizes.map(|len| payload(len, seed)).to_vec();
    assert!(came == expected(1), "what the acceptor sent");
    let ended = link.next_event().unwrap_err();
    assert!(matches!(&ended, Error::Closed { reason } if reason == "all is said"), "{ended}");
    assert!(other.join().unwrap().unwrap() == expected(2), "what the connector sent");
}
