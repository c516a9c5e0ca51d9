// SPDX-License-Identifier: MIT OR Apache-2.0
//! Adds two tensors on a server, which is a thread of the same process.
//!
//! ```text
//! cargo run -p tensorstream-exec --example remote_add
//! ```

use std::error::Error;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use ts_exec::ts_remote::{self, ConnectionOptions, Link, Listener, Role};
use ts_exec::{
    Answer, Call, Client, ClientOptions, EXEC, HostExecutor, Output, Request, ScalarType,
    SessionServer, StorageView, TensorRef, Value,
};

/// The number of elements of each tensor.
const LEN: u64 = 4;
const BYTES: u64 = LEN * 4;

fn main() -> Result<(), Box<dyn Error>> {
    let options = ConnectionOptions::default().with_service(EXEC);
    let listener = Listener::bind(&"127.0.0.1:0".parse()?, options.idle_timeout)?;
    let address = listener.address().clone();

    let accepted = options.clone();
    let server = thread::spawn(move || {
        let link = Link::new(listener.accept()?, Role::Acceptor, accepted)?;
        let sessions = SessionServer::new(Duration::from_secs(60));
        sessions.serve(link, HostExecutor::new, &AtomicBool::new(false))
    });

    // A real program uses 16 random bytes as the name of a session.
    let session = u128::from(std::process::id()).to_le_bytes();
    let dial = move || Link::connect(&address, options.clone());
    let client = Client::connect(ClientOptions::new(dial), session)?;

    let (x, y, sum) = (tensor(1), tensor(2), tensor(3));
    upload(&client, &x, &[1.0, 2.0, 3.0, 4.0])?;
    upload(&client, &y, &[10.0, 20.0, 30.0, 40.0])?;

    // The server runs the operator while the client continues.
    let op = client.operator_id("aten::add.Tensor")?;
    let args = vec![Value::Tensor(x), Value::Tensor(y)];
    let outputs = vec![Output::New { tensor: sum.clone(), bytes: BYTES }];
    let call = Call { op, args, kwargs: Vec::new(), outputs, reply: None };
    client.send(&Request::Call(call))?;

    println!("{:?}", download(&client, sum)?);
    println!("{:?}", client.stats());

    client.close()?;
    server.join().expect("the server does not panic")?;
    Ok(())
}

fn tensor(storage: u64) -> TensorRef {
    TensorRef { storage, view: StorageView::contiguous(ScalarType::FLOAT32, vec![LEN]) }
}

fn upload(
    client: &Client<Vec<u8>>,
    to: &TensorRef,
    values: &[f32],
) -> Result<(), ts_remote::Error> {
    client.send(&Request::Create { storage: to.storage, bytes: BYTES, device: 0 })?;
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    client.write(to.storage, 0, bytes)
}

fn download(client: &Client<Vec<u8>>, from: TensorRef) -> Result<Vec<f32>, Box<dyn Error>> {
    let reply = client.read(from, vec![0; BYTES as usize])?;
    match client.wait(reply, Duration::from_secs(10))? {
        Some(Answer::Memory(bytes)) => {
            let values = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            Ok(values.collect())
        }
        Some(other) => Err(format!("unexpected answer {other:?} (expected Memory)").into()),
        None => Err("no answer within 10 s".into()),
    }
}
