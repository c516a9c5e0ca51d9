# SPDX-License-Identifier: MIT OR Apache-2.0
"""Signals of the operating system."""

from __future__ import annotations

import signal


def ending_signals() -> list[signal.Signals]:
    """Returns the signals after which commands end cleanly.

    SIGHUP is one of them, unless this process ignores it, as under ``nohup``.
    """
    signals = [signal.SIGINT, signal.SIGTERM]
    # Windows has no SIGHUP.
    hang_up = getattr(signal, "SIGHUP", None)
    if hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:
        signals.append(hang_up)
    return signals
