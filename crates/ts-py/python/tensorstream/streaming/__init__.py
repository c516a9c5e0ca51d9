# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams the weights of models from disk under a memory budget."""
