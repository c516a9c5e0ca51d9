# SPDX-License-Identifier: MIT OR Apache-2.0
"""The server of remote machines: runs operators with PyTorch."""
