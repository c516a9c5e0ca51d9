# SPDX-License-Identifier: MIT OR Apache-2.0
"""The progress of first passes, which read all weights and so take longest."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from .. import _native

#: A pass that takes less time than this shows nothing, in seconds.
DELAY_S = 1.0
#: How often the bar moves, in seconds.
PERIOD_S = 0.5


@contextlib.contextmanager
def first_pass(streamer: _native.Streamer) -> Iterator[None]:
    """Shows the bytes that are read meanwhile, if standard error is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=_show, args=(streamer, ended), name="tensorstream-progress", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # The system refuses another thread. The pass matters more.
        yield
        return
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(streamer: _native.Streamer, ended: threading.Event) -> None:
    if ended.wait(DELAY_S):
        return
    stats = streamer.stats()
    total = sum(unit["slot_bytes"] for unit in stats["units"] if not unit["routed"])
    bar = _native.Progress("first pass", total)
    shown = 0
    try:
        while True:
            read = min(streamer.stats()["read_bytes"], total)
            bar.advance(max(read - shown, 0))
            shown = max(read, shown)
            if ended.wait(PERIOD_S):
                return
    finally:
        bar.close()
