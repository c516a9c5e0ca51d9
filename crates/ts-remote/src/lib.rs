// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sends tensors and messages between processes, over TCP, TLS and Unix sockets.
//!
//! - [`Connection`] is one end of a connection, without I/O. It carries streams of tensors and
//!   messages, with flow control by byte credits.
//! - [`Link`] is a connection over a TCP or Unix socket, or over TLS with the feature `tls`. Its
//!   methods may block.
//! - `AsyncLink` is a connection over a byte stream of tokio, with the feature `tokio`.
//! - [`Acceptor`] accepts connections one by one. [`serve()`] serves many connections on one
//!   thread, with a [`Handler`] for each. [`Dispatcher`] passes authenticated connections to other
//!   processes.
//! - [`RangeClient`] reads ranges of remote files from a [`RangeHandler`].
//! - [`Backoff`] computes the delays between retries.
//!
//! PROTOCOL.md in the repository specifies the bytes on the wire. This crate needs no async
//! runtime, except for `AsyncLink`. It starts threads only where the documentation says so.
//!
//! ```
//! use std::thread;
//! use ts_remote::ts_format::Dtype;
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
//!     link.close("all tensors are sent")
//! });
//!
//! let mut link = Link::<Vec<u8>>::new(listener.accept()?, Role::Acceptor, options)?;
//! loop {
//!     match link.next_event()? {
//!         // The payload is read straight into this memory.
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
//! sender.join().expect("the sender does not panic")?;
//! # Ok::<(), ts_remote::Error>(())
//! ```
//!
//! `examples/send_tensor.rs` measures the throughput of such a connection.
//!
//! # For embedders
//! The following types are for programs that embed this crate. They are public, tested and
//! documented, but the Python package, the command line and `ts://` do not use them:
//!
//! - [`TensorSender`] and [`TensorReceiver`], one stream of tensors over any transport.
//! - [`GpuTensorReceiver`], [`PooledGpuReceiver`] and their [`Memory`]: [`GpuMemory`],
//!   [`PooledMemory`] and [`HostMemory`]. The Python package uses [`OrderedMemory`].
//! - `AsyncLink`.
//! - [`Tensor`].
//!
//! [`TensorCreditTracker`] is flow control for other protocols. Python has it in
//! `tensorstream.streams`.
//!
//! # Invariants
//! - Everything that is sent arrives, for any window size and any split of the byte stream.
//!   Otherwise, at least one end gets an error with the reason.
//! - A payload is written directly from the sender's memory and read directly into the receiver's
//!   memory. User space copies only payloads that are encoded, under TLS, or in shared memory, and
//!   bytes that arrive before their memory is provided. Because headers are read ahead, up to 4 KiB
//!   of each frame may be copied too.
//! - The window and the maximum number of streams limit how much memory a peer can make a
//!   connection allocate.
//! - Only methods that are documented to block may block. They fail if the peer sends nothing for
//!   `idle_timeout`, or makes no progress in a transfer for `stall_timeout`. Waiting for the next
//!   transfer to begin has no time limit while the peer answers PINGs.
//!
//! # Platforms
//! - Linux has everything.
//! - Other Unix systems have no shared memory.
//! - Windows has TCP and TLS only. There, connecting to or listening on an [`Address::Unix`] is an
//!   [`Error::Io`] whose source has the kind [`Unsupported`](std::io::ErrorKind::Unsupported).
//!
//! On systems other than Linux, [`Link::close`] over TCP waits until the peer has closed its end,
//! instead of until the peer's system has acknowledged everything.
//!
//! # Features
//! - `tls` (off by default): TLS with rustls.
//! - `tokio` (off by default): `AsyncLink`.
//! - `dlpack` (off by default): conversions between [`Tensor`] and the structures of DLPack.
#![forbid(unsafe_code)]

mod acceptor;
mod address;
#[cfg(feature = "tokio")]
mod async_link;
mod backoff;
mod connection;
mod credit;
mod delivery;
mod device;
#[cfg(feature = "dlpack")]
pub mod dlpack;
mod error;
mod event;
mod fd;
mod fields;
mod frame;
#[cfg(unix)]
mod handoff;
mod handshakes;
mod hello;
mod incoming;
mod info;
mod link;
mod listener;
mod liveness;
mod memory;
mod options;
mod outgoing;
mod ranges;
mod receiver;
#[cfg(all(unix, feature = "tls"))]
mod relay;
mod ring;
mod role;
mod serve;
mod sink;
mod socket;
mod stats;
mod tensor;
#[cfg(feature = "tls")]
mod tls;

pub use acceptor::Acceptor;
pub use address::Address;
#[cfg(feature = "tokio")]
pub use async_link::AsyncLink;
pub use backoff::Backoff;
pub use bytes::Bytes;
pub use connection::Connection;
pub use credit::TensorCreditTracker;
pub use device::Device;
pub use error::{Error, ErrorKind};
pub use event::Event;
#[cfg(unix)]
pub use handoff::{Dispatcher, Handoff};
pub use hello::VERSION;
pub use info::TensorInfo;
pub use link::{AbortHandle, Link};
pub use listener::Listener;
pub use memory::{
    BufferSink, GpuMemory, HostMemory, Memory, OrderedMemory, OrderedSink, PooledMemory, PooledSink,
};
pub use options::{ConnectionOptions, SendOptions};
pub use ranges::{
    Files, ListedFile, MAX_RANGE, RANGES, RangeClient, RangeHandler, Refusal, RefusalKind,
    RemoteFile,
};
pub use receiver::{
    GpuReceiverEvent, GpuTensorReceiver, PooledGpuReceiver, ReceiverEvent, TensorReceiver,
    TensorSender,
};
pub use role::Role;
pub use serve::{Handler, ServerOptions, ServerStats, serve};
pub use sink::Sink;
pub use socket::Socket;
pub use stats::{ConnectionStats, StreamStats};
pub use tensor::Tensor;
#[cfg(feature = "tls")]
pub use tls::{Identity, TlsClient, TlsServer};
/// The `ts-format` crate, which defines dtypes and codecs.
pub use ts_format;
/// The `ts-pool` crate, which defines the memory of receivers.
pub use ts_pool;
