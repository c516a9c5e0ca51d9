// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operators that run where their tensors are, which is elsewhere: what a client asks, how that
//! travels, and who does it.
//!
//! | | |
//! |---|---|
//! | [`Client`] | a session with a machine: asks, goes on, and waits only for values |
//! | [`Request`], [`Call`], [`Value`] | what is asked |
//! | [`SessionServer`], [`Executor`] | the machine: sessions, and what runs their operators |
//! | [`Signature`], [`SignatureCache`] | what a call gives, known by what its arguments are like |
//! | [`HostExecutor`] | a small one, of f32 on this CPU |
//!
//! Nothing here knows what an operator does: it has a name, [arguments](Value) and
//! [outputs](Output). A client numbers its storages itself, so that it need not wait to know what a
//! [`Call`] will give. [`Request`]s go in batches; what is sent is kept until the other end has it,
//! so that a link that is lost is made again and everything is done once.
#![forbid(unsafe_code)]

mod channel;
mod client;
mod reply;
mod request;
mod server;
mod signature;
mod value;

pub use client::{Answer, Client, ClientOptions, ClientStats, Dial, WaitError};
pub use reply::{OpFailure, OpFailureKind};
pub use request::{Call, Output, Request, Requests};
pub use server::{EXEC, Executor, HostExecutor, SessionServer, UploadSink, service_name};
pub use signature::{CacheStats, ScalarKeying, Signature, SignatureCache};
pub use value::{MAX_DEPTH, MAX_DIMS, ScalarType, StorageView, TensorRef, Value};
