# SPDX-License-Identifier: MIT OR Apache-2.0
"""The client of remote machines, which implements the device ``ts``."""
