// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors between processes: the wire.
//!
//! | | |
//! |---|---|
//! | [`Connection`] | one end of a connection without its socket: streams of tensors and messages, with byte credits |
//! | [`Link`] | a connection and its socket (TCP, Unix, with the feature `tls` TLS), for callers that may block |
//! | `AsyncLink` | the same for callers that await, with the feature `tokio` |
//! | [`serve()`], [`Handler`] | many connections on one thread |
//! | [`RangeClient`], [`RangeHandler`] | ranges of files that are elsewhere |
//! | [`TensorSender`], [`TensorReceiver`] | one stream, for who has a transport of their own; to the host, a GPU, or blocks of pools |
//! | [`TensorCreditTracker`] | an account of bytes under way, for senders of one's own |
//!
//! What travels is in PROTOCOL.md. This crate refuses to know files, models or what tensors are
//! for, starts no thread but where it says so, and needs no async runtime.
//!
//! ```
//! use std::thread;
//! use ts_format::Dtype;
//! use ts_remote::{ConnectionOptions, Event, Link, Listener, Role, SendOptions, TensorInfo};
//!
//! let options = ConnectionOptions::default();
//! let listener = Listener::bind(&"127.0.0.1:0".parse()?, options.idle_timeout)?;
//! let address = listener.address().clone();
//! let sender = thread::spawn(move || {
//!     let mut link = Link::<Vec<u8>>::connect(&address, ConnectionOptions::default())?;
//!     let stream = link.connection().open_stream()?;
//!     let info = TensorInfo::new("embedding", Dtype::F32, [2, 2])?;
//!     link.send(stream, info, vec![7; 16].into(), SendOptions::default())?;
//!     link.close("that was all")
//! });
//!
//! let mut link = Link::<Vec<u8>>::new(listener.accept()?, Role::Acceptor, options)?;
//! loop {
//!     match link.next_event()? {
//!         // Memory that there is already is read to by the socket itself.
//!         Event::Metadata { stream, info, .. } => {
//!             link.connection().accept(stream, vec![0; info.storage_len as usize])?;
//!         }
//!         Event::End { info, sink, .. } => {
//!             assert_eq!((info.name.as_str(), sink), ("embedding", Some(vec![7; 16])));
//!             break;
//!         }
//!         _ => {}
//!     }
//! }
//! drop(link);
//! sender.join().expect("it does not panic")?;
//! # Ok::<(), ts_remote::Error>(())
//! ```
//!
//! # Invariants
//! - What was sent arrives through any window, however the bytes are cut, or one end has an error
//!   that says why.
//! - A payload is written from the sender's memory and read to the receiver's; no other copy is
//!   made in user space, unless it is encoded, under TLS, or there was no memory for it when it
//!   came. Headers are read ahead: a few of its bytes may come with them.
//! - A peer has no more memory of a connection's than it was granted.
//! - No method but those that say so blocks, and those end when the other end is silent for the
//!   timeout, or is there and does nothing of what is under way while stall_timeout lasts. A wait for
//!   something to begin lasts as long as the other end lives.
//!
//! # Features
//! `tls` (off by default): connections under TLS. `tokio` (off by default): `AsyncLink`, over
//! whatever tokio reads and writes.
#![forbid(unsafe_code)]

mod acceptor;
#[cfg(feature = "tokio")]
mod async_link;
mod connection;
mod credit;
mod delivery;
mod error;
mod frame;
mod handoff;
mod hello;
mod incoming;
mod info;
mod link;
mod memory;
mod outgoing;
mod ranges;
mod receiver;
#[cfg(feature = "tls")]
mod relay;
mod ring;
mod serve;
mod sink;
mod socket;
mod tensor;
#[cfg(feature = "tls")]
mod tls;
mod watch;
mod wire;

pub use acceptor::Acceptor;
#[cfg(feature = "tokio")]
pub use async_link::AsyncLink;
pub use bytes::Bytes;
pub use connection::{Connection, ConnectionStats, Event, Role, StreamStats};
pub use credit::TensorCreditTracker;
pub use error::{Error, ErrorKind};
pub use handoff::{Dispatcher, Handoff};
pub use hello::{ConnectionOptions, VERSION};
pub use info::TensorInfo;
pub use link::Link;
pub use memory::{BufferSink, GpuMemory, HostMemory, Memory, PooledMemory, PooledSink};
pub use outgoing::SendOptions;
pub use ranges::{
    Files, ListedFile, MAX_RANGE, RANGES, RangeClient, RangeHandler, Refusal, RefusalKind,
    RemoteFile,
};
pub use receiver::{
    GpuReceiverEvent, GpuTensorReceiver, PooledGpuReceiver, ReceiverEvent, TensorReceiver,
    TensorSender,
};
pub use serve::{Handler, ServerOptions, ServerStats, serve};
pub use sink::Sink;
pub use socket::{Address, Listener, Socket};
pub use tensor::Tensor;
#[cfg(feature = "tls")]
pub use tls::{Identity, TlsClient, TlsServer};
