# SPDX-License-Identifier: MIT OR Apache-2.0
"""The console script: the program that ``cargo install`` builds, and ``serve``.

``serve`` is written in Python because it needs PyTorch.
"""

import os
import signal
import sys
from types import FrameType

from ._native import main as run

#: The return value of ``run`` after an interrupt.
_INTERRUPTED = 130


class _Signals:
    """Stops the command cleanly at the first SIGINT or SIGTERM, and the process at the second."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
        raise KeyboardInterrupt


def main() -> int:
    """Runs the command line of this process.

    Returns:
        The exit status. If a signal stopped the command, 128 plus its number.
    """
    if sys.argv[1:2] == ["serve"]:
        from .serve.__main__ import main as serve

        return serve(sys.argv[2:])
    signals = _Signals()
    try:
        status = run(["tensorstream", *sys.argv[1:]])
    except KeyboardInterrupt:
        status = _INTERRUPTED
    return 128 + signals.received if status == _INTERRUPTED and signals.received else status
