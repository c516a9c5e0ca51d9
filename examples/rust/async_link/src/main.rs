// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sends a tensor over TCP and receives it, both asynchronously.

use tokio::net::{TcpListener, TcpStream, ToSocketAddrs};
use ts_remote::ts_format::Dtype;
use ts_remote::{AsyncLink, ConnectionOptions, Event, Role, SendOptions, Tensor};

/// The errors of tasks are `Send`.
type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let sender = tokio::spawn(send(listener.local_addr()?));
    let (tensor, message) = receive(&listener).await?;
    sender.await??;
    println!("received {:?}, and {message:?}", tensor.info.meta);
    assert_eq!(tensor, weights()?);
    assert_eq!(message, "end of step 1");
    Ok(())
}

fn weights() -> Result<Tensor, ts_remote::Error> {
    let bytes: Vec<u8> = (0..1000).flat_map(|i| (i as f32).to_le_bytes()).collect();
    Tensor::of_bytes("embedding", Dtype::F32, [10, 100], bytes)
}

fn options() -> ConnectionOptions {
    ConnectionOptions::default().with_token("secret".to_string())
}

async fn send(address: impl ToSocketAddrs) -> Result<(), Error> {
    let socket = TcpStream::connect(address).await?;
    let mut link =
        AsyncLink::<Vec<u8>, _>::new(socket, Role::Connector, options(), "receiver").await?;
    let stream = link.connection().open_stream()?;
    let Tensor { info, buffer } = weights()?;
    link.send(stream, info, buffer, SendOptions::default()).await?;
    link.send_message(stream, "end of step 1".into()).await?;
    Ok(link.close("everything is sent").await?)
}

async fn receive(listener: &TcpListener) -> Result<(Tensor, String), Error> {
    let (socket, peer) = listener.accept().await?;
    let mut link = AsyncLink::new(socket, Role::Acceptor, options(), peer.to_string()).await?;
    let mut tensor = None;
    loop {
        match link.next_event().await? {
            // The payload is read straight into this memory.
            Event::Metadata { stream, info, .. } => {
                link.connection().accept(stream, vec![0; info.storage_len as usize])?;
            }
            Event::End { info, sink: Some(bytes), .. } => {
                tensor = Some(Tensor { info: *info, buffer: bytes.into() });
            }
            Event::Message { bytes, .. } => {
                let message = String::from_utf8(bytes.to_vec())?;
                return Ok((tensor.ok_or("the tensor comes first")?, message));
            }
            _ => {}
        }
    }
}
