# SPDX-License-Identifier: MIT OR Apache-2.0
"""``tensorstream serve`` as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["SERVE", "Serving"]

SERVE = [sys.executable, "-m", "tensorstream.serve"]


class Serving:
    """``tensorstream serve`` with these options; at the end of a ``with`` it is told to end, and
    does.
    """

    def __init__(
        self, options: dict[str, Any] | None = None, *flags: str, log: Path | None = None
    ) -> None:
        options = {"--listen": "127.0.0.1:0", "--threads": 1, **(options or {})}
        self._log = log.open("w", encoding="utf-8") if log else None
        self.process = subprocess.Popen(
            [*SERVE, *(str(part) for option in options.items() for part in option), *flags],
            stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().removeprefix("listening at ").strip()

    def zygote(self) -> int:
        """The process from which sessions are made."""
        (child,) = children(self.process.pid)
        return child

    def sessions(self) -> list[int]:
        """The processes of sessions, the oldest first."""
        return children(self.zygote())

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.terminate()
            self.process.wait(30)
        if self._log:
            self._log.close()
        assert self.process.returncode in (0, -signal.SIGKILL)


def children(process: int) -> list[int]:
    """Processes that a process has started, in their order."""
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += [int(child) for child in thread.read_text(encoding="ascii").split()]
        except OSError:
            continue
    return sorted(child for child in found if is_there(child))


def is_there(process: int) -> bool:
    """Whether a process is there, and not only its status."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
