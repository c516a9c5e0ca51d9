// SPDX-License-Identifier: MIT OR Apache-2.0
//! Multiplies two matrices on a server, which is a thread of the same process.
#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use ts_exec::ts_remote::{ConnectionOptions, Link, Listener, Role};
use ts_exec::{
    Answer, Call, Client, ClientOptions, EXEC, HostExecutor, Output, Request, ScalarType,
    SessionServer, StorageView, TensorRef, Value,
};

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

    let dial = move || Link::connect(&address, options.clone());
    let client: Client<Vec<u8>> = Client::connect(ClientOptions::new(dial), *b"16 random bytes!")?;
    let [x, y, product] = [1, 2, 3].map(|storage| TensorRef {
        storage,
        view: StorageView::contiguous(ScalarType::FLOAT32, vec![2, 2]),
    });
    for (tensor, values) in [(&x, [1f32, 2., 3., 4.]), (&y, [0., 1., 1., 0.])] {
        client.send(&Request::Create { storage: tensor.storage, bytes: 16, device: 0 })?;
        client.write(tensor.storage, 0, values.map(f32::to_le_bytes).concat().into())?;
    }
    client.send(&Request::Call(Call {
        op: client.operator_id("aten::mm")?,
        args: vec![Value::Tensor(x), Value::Tensor(y)],
        kwargs: Vec::new(),
        outputs: vec![Output::New { tensor: product.clone(), bytes: 16 }],
        reply: None,
    }))?;
    let reply = client.read(product, vec![0; 16])?;
    let answer = client.wait(reply, Duration::from_secs(10))?;
    let Some(Answer::Memory(bytes)) = answer else { return Err("no answer within 10 s".into()) };
    assert_eq!(bytes, [2f32, 1., 4., 3.].map(f32::to_le_bytes).concat());
    println!("{:?}", client.stats());
    client.close()?;
    server.join().map_err(|_| "the server panicked")??;
    Ok(())
}
