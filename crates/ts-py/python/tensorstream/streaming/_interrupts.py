# SPDX-License-Identifier: MIT OR Apache-2.0
"""Defers KeyboardInterrupt during changes that must be complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred() -> Iterator[None]:
    """Defers KeyboardInterrupt until the end of the block."""
    # Signal handlers run only on the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *_: pending.append(None))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if pending:
            signal.raise_signal(signal.SIGINT)
