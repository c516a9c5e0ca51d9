# SPDX-License-Identifier: MIT OR Apache-2.0
"""Implements ``tensorstream serve``: a broker without PyTorch, and a process for each session."""
