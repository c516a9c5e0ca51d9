// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices, streams and events: the crate that will own them.
//!
//! Its turn has not come: the CPU is the only device today, and the engine of `ts-orchestrator` reads into host
//! memory without streams. The seams that streams will enter by are already there: memory of `ts-pool` is
//! freed by ownership, at one place, where an event can be recorded.
