# SPDX-License-Identifier: MIT OR Apache-2.0
"""Watches a machine: calls back when its status changes, and notices when its server ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ._trace import LOG

#: The time between two looks at a machine, in seconds.
_INTERVAL = 0.2


class Watcher:
    """A thread that looks at a machine several times a second, from its start until its stop.

    Args:
        name: The name of the machine.
        status: Returns its status.
        look: Called at each look.
    """

    def __init__(self, name: str, status: Callable[[], str], look: Callable[[], None]) -> None:
        self._name, self._status, self._look = name, status, look
        self._callbacks: list[Callable[[str], None]] = []
        self._last = status()
        #: The statuses that were not reported yet.
        self._changes: deque[str] = deque()
        self._lock, self._reporting = threading.Lock(), threading.Lock()
        #: The event that ends the thread, or ``None`` if no thread runs.
        self._stopped: threading.Event | None = None

    def add(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Adds a callback. Returns a function that removes it."""
        with self._lock:
            self._callbacks.append(callback)

        def remove() -> None:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return remove

    def start(self) -> None:
        """Starts the thread, unless it runs."""
        self.note()
        if self._stopped is None:
            self._stopped = threading.Event()
            name = f"tensorstream-watch-{self._name}"
            threading.Thread(
                target=self._run, args=(self._stopped,), name=name, daemon=True
            ).start()

    def stop(self) -> None:
        """Makes the thread report the last change, and end. Does not wait for it."""
        self.note()
        if self._stopped is not None:
            self._stopped.set()
            self._stopped = None

    def note(self) -> None:
        """Notes the status now. The thread reports it, if it is another one."""
        with self._lock:
            status = self._status()
            if status != self._last:
                self._last = status
                self._changes.append(status)

    def _run(self, stopped: threading.Event) -> None:
        looks = True
        while not stopped.wait(_INTERVAL):
            try:
                if looks:
                    self._look()
            except Exception:  # of a provider, which may be of another package
                LOG.exception("%s: its provider failed, and is not asked again", self._name)
                looks = False
            self.note()
            self._report()
        self._report()

    def _report(self) -> None:
        """Calls the callbacks for each change."""
        with self._reporting:
            while True:
                with self._lock:
                    if not self._changes:
                        return
                    status, callbacks = self._changes.popleft(), list(self._callbacks)
                for callback in callbacks:
                    try:
                        callback(status)
                    except Exception:  # the program's code
                        LOG.exception("%s: a status callback failed", self._name)
