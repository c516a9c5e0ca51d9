// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of async links that are connected to each other and to blocking links.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

mod common;

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use ts_format::Dtype;
use ts_remote::{
    AsyncLink, ConnectionOptions, Error, ErrorKind, Event, Link, Role, SendOptions, Socket,
    TensorInfo,
};

use common::{both_ways, exchange, options, payload};

/// Receives tensors until the peer closes the connection. Returns their payloads.
async fn receive<T: AsyncRead + AsyncWrite + Unpin>(
    link: &mut AsyncLink<Vec<u8>, T>,
) -> Vec<Vec<u8>> {
    let mut received = Vec::new();
    loop {
        match link.next_event().await {
            Ok(Event::Metadata { stream, info, .. }) if info.storage_len > 0 => {
                link.connection().accept(stream, vec![0; info.storage_len as usize]).unwrap();
            }
            Ok(Event::End { sink, .. }) => received.push(sink.unwrap_or_default()),
            Ok(_) => {}
            Err(Error::Closed { .. }) => return received,
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn tensors_arrive_through_a_pipe_of_any_capacity() {
    for capacity in [1, 100, 1 << 20] {
        let (near, far) = tokio::io::duplex(capacity);
        let small = options().with_window_bytes(10_000);
        let sender_options = small.clone();
        let sender = tokio::spawn(async move {
            let mut link =
                AsyncLink::<Vec<u8>, _>::new(near, Role::Connector, sender_options, "far").await?;
            let stream = link.connection().open_stream()?;
            for len in [0usize, 5, 30_000] {
                let info = TensorInfo::new("w", Dtype::U8, [len as u64])?;
                link.send(stream, info, payload(len, 3).into(), SendOptions::default()).await?;
            }
            link.send_message(stream, b"done"[..].into()).await?;
            link.close("done").await
        });
        let mut link = AsyncLink::new(far, Role::Acceptor, small, "near").await.unwrap();
        assert_eq!(receive(&mut link).await, [0usize, 5, 30_000].map(|len| payload(len, 3)));
        drop(link);
        sender.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn an_async_link_talks_to_a_blocking_link() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let sizes = [70_000usize, 8 << 20];
    let blocking = std::thread::spawn(move || {
        let socket = Socket::connect(&address.to_string().parse()?, options().idle_timeout)?;
        let mut link = Link::<Vec<u8>>::new(socket, Role::Connector, options())?;
        let received = exchange(&mut link, &sizes, 1)?;
        link.close("done").map(|()| received)
    });
    let (stream, peer) = listener.accept().await.unwrap();
    let mut link =
        AsyncLink::new(stream, Role::Acceptor, options(), peer.to_string()).await.unwrap();
    let stream = link.connection().open_stream().unwrap();
    // Both ends send at once. This end receives while it sends.
    for len in sizes {
        let info = TensorInfo::new("w", Dtype::U8, [len as u64]).unwrap();
        link.connection()
            .send(stream, info, payload(len, 2).into(), SendOptions::default())
            .unwrap();
    }
    link.connection().finish(stream).unwrap();
    assert_eq!(receive(&mut link).await, sizes.map(|len| payload(len, 1)));
    drop(link);
    assert_eq!(blocking.join().unwrap().unwrap(), sizes.map(|len| payload(len, 2)));
    // Blocking links use the rest of `common`, which would be dead code otherwise.
    let listener =
        ts_remote::Listener::bind(&"127.0.0.1:0".parse().unwrap(), options().idle_timeout).unwrap();
    tokio::task::spawn_blocking(move || both_ways(listener, Ok, ts_remote::Listener::accept))
        .await
        .unwrap();
}

#[tokio::test]
async fn waits_time_out_and_can_be_cancelled() {
    let short = ConnectionOptions::default()
        .with_idle_timeout(Duration::from_secs(1))
        .with_stall_timeout(Duration::from_secs(1));
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(silent.local_addr().unwrap()).await.unwrap();
    let timed_out = AsyncLink::<Vec<u8>, _>::new(stream, Role::Connector, short.clone(), "far")
        .await
        .unwrap_err();
    assert_eq!(timed_out.kind(), ErrorKind::TimedOut, "{timed_out}");

    let (near, far) = tokio::io::duplex(1 << 16);
    let far_options = short.clone();
    // The peer answers pings, but provides no memory.
    let peer = tokio::spawn(async move {
        let mut link =
            AsyncLink::<Vec<u8>, _>::new(far, Role::Acceptor, far_options, "near").await.unwrap();
        while link.next_event().await.is_ok() {}
    });
    let mut link = AsyncLink::<Vec<u8>, _>::new(near, Role::Connector, short, "far").await.unwrap();
    let waiting = tokio::time::timeout(Duration::from_millis(20), async {
        while link.next_event().await.is_ok() {}
    });
    assert!(waiting.await.is_err(), "no event arrives");
    let stream = link.connection().open_stream().unwrap();
    let info = TensorInfo::new("w", Dtype::U8, [64u64 << 20]).unwrap();
    let stalled = link
        .send(stream, info, vec![1; 64 << 20].into(), SendOptions::default())
        .await
        .unwrap_err();
    assert!(matches!(stalled, Error::Stalled { .. }), "{stalled}");
    drop(link);
    peer.await.unwrap();
}
