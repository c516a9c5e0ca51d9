# SPDX-License-Identifier: MIT OR Apache-2.0
"""The client of remote machines: the device ``ts``."""
