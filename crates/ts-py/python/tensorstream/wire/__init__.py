# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sends tensors and messages between processes."""
