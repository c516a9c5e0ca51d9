// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs operators on remote tensors: sessions, requests and replies over [`ts_remote`].
//!
//! The tensors of a session are on the server. A [`Client`] submits [`Request`]s without waiting
//! for them. It waits only when it needs a value. A [`SessionServer`] runs the requests of each
//! session with an [`Executor`].
//!
//! | Type | Purpose |
//! |---|---|
//! | [`Client`], [`ClientOptions`] | the client of a session, and its options |
//! | [`Request`], [`Call`], [`Output`] | the requests of a client |
//! | [`Value`], [`TensorRef`], [`StorageView`] | arguments and results |
//! | [`SessionServer`], [`Executor`] | a server of sessions, and the trait that runs operators |
//! | [`HostExecutor`] | an executor for float32 on the CPU, for examples and tests |
//! | [`Signature`], [`SignatureCache`] | call signatures, and a cache with signatures as keys |
//!
//! PROTOCOL.md describes the encoding in its section on the service `exec`.
//!
//! # Examples
//!
//! A server and a client on the same machine. The client adds two tensors and reads the result:
//!
//! ```
//! use std::sync::atomic::AtomicBool;
//! use std::thread;
//! use std::time::Duration;
//!
//! use ts_exec::{
//!     Answer, Call, Client, ClientOptions, EXEC, HostExecutor, Output, Request, ScalarType,
//!     SessionServer, StorageView, TensorRef, Value,
//! };
//! use ts_exec::ts_remote::{ConnectionOptions, Link, Listener, Role};
//!
//! let options = ConnectionOptions::default().with_service(EXEC);
//! let listener = Listener::bind(&"127.0.0.1:0".parse()?, options.idle_timeout)?;
//! let address = listener.address().clone();
//! let accepted = options.clone();
//! let server = thread::spawn(move || {
//!     let link = Link::new(listener.accept()?, Role::Acceptor, accepted)?;
//!     let sessions = SessionServer::new(Duration::from_secs(60));
//!     sessions.serve(link, HostExecutor::new, &AtomicBool::new(false))
//! });
//!
//! let dial = move || Link::connect(&address, options.clone());
//! let client: Client<Vec<u8>> = Client::connect(ClientOptions::new(dial), *b"16 random bytes!")?;
//!
//! // Storage 1 has two floats; `x` is a tensor of them.
//! let view = StorageView::contiguous(ScalarType::FLOAT32, vec![2]);
//! let x = TensorRef { storage: 1, view: view.clone() };
//! client.send(&Request::Create { storage: 1, bytes: 8, device: 0 })?;
//! client.write(1, 0, [1.0f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect())?;
//!
//! // y = x + x. The client chooses the storage of the result, so it does not wait here.
//! let y = TensorRef { storage: 2, view };
//! client.send(&Request::Call(Call {
//!     op: client.operator_id("aten::add.Tensor")?,
//!     args: vec![Value::Tensor(x.clone()), Value::Tensor(x)],
//!     kwargs: Vec::new(),
//!     outputs: vec![Output::New { tensor: y.clone(), bytes: 8 }],
//!     reply: None,
//! }))?;
//!
//! let reply = client.read(y, vec![0; 8])?;
//! let answer = client.wait(reply, Duration::from_secs(10))?;
//! let Some(Answer::Memory(bytes)) = answer else { panic!("no answer within 10 s") };
//! assert_eq!(bytes, [2.0f32, 4.0].map(f32::to_le_bytes).concat());
//!
//! client.close()?;
//! server.join().expect("the server does not panic")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What this crate does not do
//!
//! - It does not implement PyTorch's operators. An operator is a name with arguments and outputs.
//!   The caller of a client infers shapes, and an executor runs the operators.
//! - It is not a sandbox. A session can run every operator of its executor. The connection's token,
//!   and the program that accepts connections, decide who may connect.
//! - It reads no files and needs no async runtime. A client starts one thread. A server starts one
//!   thread for each session that it serves.
//!
//! # Invariants
//!
//! - Requests of a session run once and in order, even if links are lost. Each end keeps the items
//!   that it sent until the other end has acknowledged them.
//! - Submitting a request never waits for the network. The client chooses the numbers of storages,
//!   operators and replies, so it needs no answer to use a result.
//! - A failed request is reported once, and poisons the storages that it should have written to,
//!   unless they are [constant](Executor::is_constant). Later calls and reads that use a poisoned
//!   storage fail too. All other requests run.
//! - Lengths from the network are checked before memory is allocated. A server limits how much data
//!   a client may leave unacknowledged.
#![forbid(unsafe_code)]

mod channel;
mod client;
mod codec;
mod reply;
mod request;
mod server;
mod signature;
mod value;
mod view;

pub use client::{Answer, Client, ClientOptions, ClientStats, Dial, Submitted, WaitError};
pub use reply::{OpFailure, OpFailureKind};
pub use request::{Call, Output, Request, Requests};
pub use server::{EXEC, Executor, HostExecutor, SessionServer, UploadSink, service_name};
pub use signature::{CacheStats, ScalarKeying, Signature, SignatureCache};
/// The `ts-remote` crate, which defines links and their options.
pub use ts_remote;
pub use value::{MAX_DEPTH, Value};
pub use view::{MAX_DIMS, ScalarType, StorageView, TensorRef, contiguous_strides};
