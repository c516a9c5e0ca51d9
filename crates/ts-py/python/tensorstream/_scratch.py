# SPDX-License-Identifier: MIT OR Apache-2.0
"""Temporary directories that the next process removes if their own was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: How old a directory must be before it is removed, in seconds. Its process locks it when it has
#: just been created.
_AGE = 60.0


class Scratch:
    """A new temporary directory, until ``remove`` is called or the ``with`` block ends.

    The process holds a lock on the directory. Directories of the same name and parent that nobody
    has locked are of processes that were killed, and are removed.

    Args:
        name: The beginning of the name of the directory.
        parent: The parent directory. None means the system's temporary directory.
    """

    def __init__(self, name: str, parent: str | os.PathLike[str] | None = None) -> None:
        parent = tempfile.gettempdir() if parent is None else parent
        _remove_abandoned(name, parent)
        self.path = Path(tempfile.mkdtemp(prefix=name, dir=parent))
        self._lock = _locked(self.path)

    def remove(self) -> None:
        """Removes the directory and what it contains. Ignores failures."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def _locked(directory: str | os.PathLike[str]) -> int | None:
    """Locks a directory, and returns its descriptor. None if it is locked, or cannot be."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(name: str, parent: str | os.PathLike[str]) -> None:
    """Removes the directories of this user that no process has locked."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if not entry.name.startswith(name):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                is_old = time.time() - status.st_mtime > _AGE
                if is_old and status.st_uid == os.getuid():
                    lock = _locked(entry.path)
                    if lock is not None:
                        shutil.rmtree(entry.path, ignore_errors=True)
                        os.close(lock)
