# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streaming of weights from disk under a memory budget."""
