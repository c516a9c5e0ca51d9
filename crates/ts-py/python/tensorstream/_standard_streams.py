# SPDX-License-Identifier: MIT OR Apache-2.0
"""Standard streams that are closed, or that cannot be written."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Opens the null device for the standard streams with which this process was not started.

    Otherwise the next sockets would get the numbers of these streams, and thus their output.
    """
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number


def give_up_messages() -> None:
    """Drops messages that cannot be written. Python would end with another exit status."""
    if sys.stderr is not None:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            # It stays open until the process ends.
            sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
