// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of sessions between a client and a server on the loopback interface.
#![allow(clippy::unwrap_used)] // a failing test panics

mod hostile;
mod operators;
mod reconnect;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ts_exec::{
    Answer, Call, Client, ClientOptions, EXEC, HostExecutor, Output, Request, ScalarType,
    SessionServer, StorageView, TensorRef, UploadSink, Value, WaitError,
};
use ts_remote::{Acceptor, Address, ConnectionOptions, Error, Link, Listener};

/// A timeout that no test should reach.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A server that is stopped when it is dropped.
struct TestServer {
    address: Address,
    sessions: Arc<SessionServer<HostExecutor>>,
    stop: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl TestServer {
    fn start() -> Self {
        Self::with_sessions(SessionServer::new(Duration::from_secs(20)))
    }

    fn with_sessions(sessions: SessionServer<HostExecutor>) -> Self {
        let options = connection_options();
        let listener =
            Listener::bind(&"127.0.0.1:0".parse().unwrap(), options.idle_timeout).unwrap();
        let address = listener.address().clone();
        let sessions = Arc::new(sessions);
        let stop = Arc::new(AtomicBool::new(false));
        let (served, stopped) = (sessions.clone(), stop.clone());
        let accepting = thread::spawn(move || {
            let (mut acceptor, mut serving) =
                (Acceptor::<UploadSink<Vec<u8>>>::new(options), Vec::new());
            while !stopped.load(Ordering::Relaxed) {
                let accepted =
                    acceptor.accept_within(&listener, Duration::from_millis(20), |_, _| {});
                let Some(link) = accepted.unwrap() else { continue };
                let (served, stopped) = (served.clone(), stopped.clone());
                let serve = move || served.serve(link, HostExecutor::new, &stopped);
                serving.push(thread::spawn(serve));
            }
            serving.into_iter().for_each(|thread| drop(thread.join().unwrap()));
        });
        Self { address, sessions, stop, accepting: Some(accepting) }
    }

    fn client(&self) -> Client<Vec<u8>> {
        client_of(&self.address)
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.accepting.take().unwrap().join().unwrap();
    }
}

fn connection_options() -> ConnectionOptions {
    ConnectionOptions::default().with_service(EXEC)
}

/// Returns options for a client that connects to `address`.
fn options_for(address: &Address) -> ClientOptions<Vec<u8>> {
    let address = address.clone();
    let dial = move || Link::connect(&address, connection_options());
    ClientOptions::new(dial).with_reconnect_timeout(TIMEOUT)
}

fn client_of(address: &Address) -> Client<Vec<u8>> {
    static NUMBER: AtomicUsize = AtomicUsize::new(1);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed) as u128;
    Client::connect(options_for(address), number.to_le_bytes()).unwrap()
}

fn tensor(storage: u64, sizes: &[u64]) -> TensorRef {
    TensorRef { storage, view: StorageView::contiguous(ScalarType::FLOAT32, sizes.to_vec()) }
}

fn bytes_of(tensor: &TensorRef) -> u64 {
    tensor.view.elements().unwrap() * 4
}

fn new(tensor: &TensorRef) -> Output {
    Output::New { tensor: tensor.clone(), bytes: bytes_of(tensor) }
}

/// Creates the storage of a tensor, and fills it.
fn create(client: &Client<Vec<u8>>, tensor: &TensorRef, value: f64) {
    let request = Request::Create { storage: tensor.storage, bytes: bytes_of(tensor), device: 0 };
    client.send(&request).unwrap();
    call(client, "aten::fill_.Scalar", &[tensor], vec![Value::Float(value)], Output::Known);
}

fn call(
    client: &Client<Vec<u8>>,
    op: &str,
    tensors: &[&TensorRef],
    others: Vec<Value>,
    output: Output,
) -> u64 {
    let args = tensors.iter().map(|&tensor| Value::Tensor(tensor.clone())).chain(others).collect();
    let op = client.operator_id(op).unwrap();
    let call = Call { op, args, kwargs: Vec::new(), outputs: vec![output], reply: None };
    client.send(&Request::Call(call)).unwrap()
}

fn read(client: &Client<Vec<u8>>, tensor: &TensorRef) -> Result<Vec<f32>, WaitError> {
    let reply = client.read(tensor.clone(), vec![0; bytes_of(tensor) as usize])?;
    match client.wait(reply, TIMEOUT)?.expect("the answer arrives in time") {
        Answer::Memory(bytes) => Ok(floats(&bytes)),
        other => panic!("{other:?}"),
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

fn sync(client: &Client<Vec<u8>>) -> Result<(), WaitError> {
    let reply = client.new_reply();
    client.send(&Request::Sync { reply })?;
    client.wait(reply, TIMEOUT)?.expect("the answer arrives in time");
    Ok(())
}
