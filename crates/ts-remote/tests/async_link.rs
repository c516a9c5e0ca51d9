// SPDX-License-Identifier: MIT OR Apache-2.0
//! Links that are awaited, with each other and with those that block.
#![allow(clippy::unwrap_used)] // in a test a panic is the report

mod together;

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use ts_format::Dtype;
use ts_remote::{
    AsyncLink, ConnectionOptions, Error, ErrorKind, Event, Link, Role, SendOptions, Socket,
    TensorInfo,
};

use together::{both_ways, exchange, options, payload};

/// Takes tensors until the other end has said all.
async fn take<T: AsyncRead + AsyncWrite + Unpin>(link: &mut AsyncLink<Vec<u8>, T>) -> Vec<Vec<u8>> {
    let mut came = Vec::new();
    loop {
        match link.next_event().await {
            Ok(Event::Metadata { stream, info, .. }) if info.storage_len > 0 => {
                link.connection().accept(stream, vec![0; info.storage_len as usize]).unwrap();
            }
            Ok(Event::End { sink, .. }) => came.push(sink.unwrap_or_default()),
            Ok(_) => {}
            Err(Error::Closed { .. }) => return came,
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn tensors_come_through_any_pipe() {
    for capacity in [1, 100, 1 << 20] {
        let (near, far) = tokio::io::duplex(capacity);
        let small = ConnectionOptions { window_bytes: 10_000, ..options() };
        let with = small.clone();
        let sender = tokio::spawn(async move {
            let mut link = AsyncLink::<Vec<u8>, _>::new(near, Role::Connector, with, "far").await?;
            let stream = link.connection().open_stream()?;
            for len in [0usize, 5, 30_000] {
                let info = TensorInfo::new("w", Dtype::U8, [len as u64])?;
                link.send(stream, info, payload(len, 3).into(), SendOptions::default()).await?;
            }
            link.send_message(stream, b"done"[..].into()).await?;
            link.close("that was all").await
        });
        let mut link = AsyncLink::new(far, Role::Acceptor, small, "near").await.unwrap();
        assert_eq!(take(&mut link).await, [0usize, 5, 30_000].map(|len| payload(len, 3)));
        drop(link);
        sender.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn it_talks_to_links_that_block() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let sizes = [70_000usize, 8 << 20];
    let blocking = std::thread::spawn(move || {
        let socket = Socket::connect(&address.to_string().parse()?, options().idle_timeout)?;
        let mut link = Link::<Vec<u8>>::new(socket, Role::Connector, options())?;
        let came = exchange(&mut link, &sizes, 1)?;
        link.close("all is said").map(|()| came)
    });
    let (stream, peer) = listener.accept().await.unwrap();
    let mut link =
        AsyncLink::new(stream, Role::Acceptor, options(), peer.to_string()).await.unwrap();
    let stream = link.connection().open_stream().unwrap();
    // Both ends send at once, and this one reads while it does.
    for len in sizes {
        let info = TensorInfo::new("w", Dtype::U8, [len as u64]).unwrap();
        link.connection()
            .send(stream, info, payload(len, 2).into(), SendOptions::default())
            .unwrap();
    }
    link.connection().finish(stream).unwrap();
    assert_eq!(take(&mut link).await, sizes.map(|len| payload(len, 1)));
    drop(link);
    assert_eq!(blocking.join().unwrap().unwrap(), sizes.map(|len| payload(len, 2)));
    // Also the other way round, where all of `together` is used.
    let listener =
        ts_remote::Listener::bind(&"127.0.0.1:0".parse().unwrap(), options().idle_timeout).unwrap();
    tokio::task::spawn_blocking(move || both_ways(listener, Ok, ts_remote::Listener::accept))
        .await
        .unwrap();
}

#[tokio::test]
async fn waits_end_and_may_be_given_up() {
    let short = ConnectionOptions {
        idle_timeout: Duration::from_secs(1),
        stall_timeout: Duration::from_secs(1),
        ..ConnectionOptions::default()
    };
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(silent.local_addr().unwrap()).await.unwrap();
    let given_up = AsyncLink::<Vec<u8>, _>::new(stream, Role::Connector, short.clone(), "it")
        .await
        .unwrap_err();
    assert_eq!(given_up.kind(), ErrorKind::TimedOut, "{given_up}");

    let (near, far) = tokio::io::duplex(1 << 16);
    let with = short.clone();
    // It answers and takes nothing.
    let other = tokio::spawn(async move {
        let mut link =
            AsyncLink::<Vec<u8>, _>::new(far, Role::Acceptor, with, "near").await.unwrap();
        while link.next_event().await.is_ok() {}
    });
    let mut link = AsyncLink::<Vec<u8>, _>::new(near, Role::Connector, short, "far").await.unwrap();
    let waiting = tokio::time::timeout(Duration::from_millis(20), async {
        while link.next_event().await.is_ok() {}
    });
    assert!(waiting.await.is_err(), "nothing comes");
    let stream = link.connection().open_stream().unwrap();
    let info = TensorInfo::new("w", Dtype::U8, [64u64 << 20]).unwrap();
    let stalled = link
        .send(stream, info, vec![1; 64 << 20].into(), SendOptions::default())
        .await
        .unwrap_err();
    assert!(matches!(stalled, Error::Stalled { .. }), "{stalled}");
    drop(link);
    other.await.unwrap();
}
