// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two roles on a connection.

/// The role of an end of a connection.
///
/// The connector's streams have odd numbers. The acceptor's streams have even numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The end that opened the connection.
    Connector,
    /// The end that accepted the connection. It checks the token, if its options contain one.
    Acceptor,
}
