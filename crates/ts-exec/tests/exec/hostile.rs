// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of clients whose server breaks the protocol.

use std::sync::mpsc::channel;

use proptest::prelude::*;

use super::reconnect::accept;
use super::*;

/// Accepts a connection, completes the handshake as a server does, and sends these messages.
/// Returns the connection and its stream.
fn send_after_handshake(
    listener: &Listener,
    messages: &[Vec<u8>],
) -> Result<(Link<Vec<u8>>, u32), Error> {
    let mut link = accept(listener)?;
    let stream = link.connection().open_stream()?;
    let mut hello = vec![2];
    hello.extend([7; 16]);
    hello.push(0);
    link.send_message(stream, hello.into())?;
    for message in messages {
        link.send_message(stream, message.clone().into())?;
    }
    Ok((link, stream))
}

fn bind() -> Listener {
    Listener::bind(&"127.0.0.1:0".parse().unwrap(), TIMEOUT).unwrap()
}

#[test]
fn a_missing_reply_ends_the_session_when_a_later_one_arrives() {
    let listener = bind();
    let options = options_for(listener.address());
    // A CONTENT message with an empty ANSWER to reply 2: the client requests this reply with a SYNC
    // when reply 1 takes long.
    let answer = vec![0, 1, 2, 0];
    let server = thread::spawn(move || {
        let (mut link, _) = send_after_handshake(&listener, &[answer])?;
        while link.next_event().is_ok() {}
        Ok::<_, Error>(())
    });
    let client = Client::connect(options, [92; 16]).unwrap();
    let reply = client.read(tensor(1, &[2]), vec![0; 8]).unwrap();
    let lost = client.wait(reply, TIMEOUT);
    assert!(matches!(&lost, Err(WaitError::Ended(Error::Protocol { .. }))), "{lost:?}");
    server.join().unwrap().unwrap();
}

#[test]
fn an_answer_of_the_wrong_length_ends_the_session() {
    for len in [0, 4, 12] {
        let listener = bind();
        let options = options_for(listener.address());
        // A CONTENT message with a BYTES reply to reply number 1. The client's memory for this
        // reply has 8 bytes.
        let answer = [&[0, 2, 1, len][..], &vec![5; len as usize]].concat();
        let (asked, is_asked) = channel();
        let server = thread::spawn(move || {
            let (mut link, stream) = send_after_handshake(&listener, &[])?;
            // The first messages of a client are not requests.
            is_asked.recv().expect("the client asks");
            link.send_message(stream, answer.into())?;
            while link.next_event().is_ok() {}
            Ok::<_, Error>(())
        });
        let client = Client::connect(options, [94; 16]).unwrap();
        let reply = client.read(tensor(1, &[2]), vec![0; 8]).unwrap();
        asked.send(()).unwrap();
        let error = client.wait(reply, TIMEOUT).unwrap_err().to_string();
        assert!(error.contains(&format!("sent a tensor of {len} bytes (expected 8")), "{error}");
        server.join().unwrap().unwrap();
    }
}

#[test]
fn an_answer_without_a_request_ends_the_session() {
    let listener = bind();
    let options = options_for(listener.address());
    let answer = vec![0, 2, 1, 4, 5, 5, 5, 5];
    let server = thread::spawn(move || {
        let (mut link, _) = send_after_handshake(&listener, &[answer])?;
        while link.next_event().is_ok() {}
        Ok::<_, Error>(())
    });
    let client = Client::connect(options, [95; 16]).unwrap();
    // Waits for another reply until the answer has arrived.
    let _ = client.wait(u64::MAX, Duration::from_millis(300));
    let refused = client.read(tensor(1, &[2]), vec![0; 8]).unwrap_err().to_string();
    assert!(refused.contains("before it was requested"), "{refused}");
    server.join().unwrap().unwrap();
}

#[test]
fn a_client_of_a_server_that_does_not_read_blocks_and_fails() {
    const PIECE: usize = 4 << 20;
    let listener = bind();
    let address = listener.address().clone();
    let dial = move || {
        let mut options = connection_options();
        options.stall_timeout = Duration::from_secs(1);
        Link::<Vec<u8>>::connect(&address, options)
    };
    let options = ClientOptions::new(dial).with_reconnect_timeout(Duration::ZERO);
    let server = thread::spawn(move || send_after_handshake(&listener, &[]));
    let client = Client::connect(options, [93; 16]).unwrap();
    let link = server.join().unwrap().unwrap();
    let piece = ts_remote::Bytes::from(vec![0; PIECE]);
    let sent = (0..100).take_while(|_| client.write(1, 0, piece.clone()).is_ok()).count();
    assert!(sent * PIECE <= 128 << 20, "{sent} pieces were accepted");
    drop(link);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn any_messages_of_a_server_are_answers_or_errors(
        messages in prop::collection::vec(
            (0u8..4, 0u8..7, prop::collection::vec(any::<u8>(), 0..40)),
            0..6,
        ),
    ) {
        let listener = bind();
        let options = options_for(listener.address()).with_reconnect_timeout(Duration::ZERO);
        // In most messages, the first byte is a known type of message and the second a known kind
        // of reply.
        let messages: Vec<_> = messages
            .into_iter()
            .map(|(kind, reply, rest)| [vec![kind, reply], rest].concat())
            .collect();
        let server = thread::spawn(move || {
            send_after_handshake(&listener, &messages)?.0.close("the test is over")
        });
        if let Ok(client) = Client::connect(options, [7; 16]) {
            let (sum, forgotten) = (client.read(tensor(1, &[2]), vec![0; 8]), client.new_reply());
            client.discard_reply(forgotten);
            if let Ok(reply) = sum {
                prop_assert!(matches!(client.wait(reply, TIMEOUT), Err(_) | Ok(Some(_))));
            }
        }
        let _ = server.join().unwrap();
    }
}
