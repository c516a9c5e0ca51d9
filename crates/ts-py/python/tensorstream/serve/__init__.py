# SPDX-License-Identifier: MIT OR Apache-2.0
"""The program ``tensorstream serve``: a broker without PyTorch, and a process for each session."""
