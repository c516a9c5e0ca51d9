// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors over a network: the wire.
#![forbid(unsafe_code)]

mod connection;
mod credit;
mod error;
mod frame;
mod hello;
mod incoming;
mod info;
mod link;
mod memory;
mod outgoing;
mod receiver;
mod sink;
mod socket;
#[cfg(feature = "tls")]
mod tls;
mod wire;

pub use bytes::Bytes;
pub use connection::{Connection, ConnectionStats, Event, Role};
pub use credit::TensorCreditTracker;
pub use error::{Error, ErrorKind};
pub use hello::{ConnectionOptions, VERSION};
pub use info::TensorInfo;
pub use link::Link;
pub use memory::{BufferSink, GpuMemory, HostMemory, Memory, PooledMemory, PooledSink};
pub use outgoing::SendOptions;
pub use receiver::{
    GpuReceiverEvent, GpuTensorReceiver, PooledGpuReceiver, ReceiverEvent, TensorReceiver, TensorSender,
};
pub use sink::Sink;
pub use socket::{Address, Listener, Socket};
#[cfg(feature = "tls")]
pub use tls::{Identity, TlsClient, TlsServer};
