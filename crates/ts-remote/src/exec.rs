// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operators that run where their tensors are, which is elsewhere: what a client asks, how that
//! travels, and who does it.
//!
//! | | |
//! |---|---|
//! | [`Client`] | a session with a machine: asks, goes on, and waits only for values |
//! | [`Request`], [`Call`], [`Value`] | what is asked |
//! | [`Sessions`], [`Executor`] | the machine: sessions, and what runs their operators |
//! | [`Signature`], [`SignatureCache`] | what a call gives, known by what its arguments are like |
//! | [`HostExecutor`] | a small one, of f32 on this CPU |
//!
//! Nothing here knows what an operator does: it has a name, [arguments](Value) and
//! [outputs](Output). A client numbers its storages itself, so that it need not wait to know what a
//! [`Call`] will give. [`Request`]s go in batches; what is sent is kept until the other end has it,
//! so that a link that is lost is made again and everything is done once.

mod channel;
mod client;
mod executor;
mod host;
mod reply;
mod request;
mod server;
mod signature;
mod value;

pub use client::{Answer, Client, ClientOptions, ClientStats, Dial, Fault};
pub use executor::Executor;
pub use host::HostExecutor;
pub use reply::{Failure, FailureKind};
pub use request::{Call, Output, Request, Requests};
pub use server::{EXEC, Landing, Sessions, service_of};
pub use signature::{CacheStats, Scalars, Signature, SignatureCache};
pub use value::{MAX_DEPTH, MAX_DIMS, ScalarType, TensorRef, Value, View};
