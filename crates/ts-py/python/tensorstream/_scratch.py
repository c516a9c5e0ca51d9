# SPDX-License-Identifier: MIT OR Apache-2.0
"""Temporary directories that the next process removes if their own was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: The name of the file that marks a directory.
_MARK = ".tensorstream"


#: The most bytes of the path of a temporary directory for sockets. The path of a socket has at most
#: 103 bytes on macOS and 107 on Linux.
_PARENT_OF_SOCKETS = 60


class Scratch:
    """A new temporary directory, until ``remove`` is called or the ``with`` block ends.

    It contains the file ``.tensorstream``, which names this boot of this computer, and which the
    process has locked. Directories of the same name and parent are removed if they contain such a
    file that names the same boot, and that nobody has locked: their process was killed. On systems
    other than Linux, which do not name the boot, none are removed.

    Args:
        name: The beginning of the name of the directory.
        parent: The parent directory. None means the system's temporary directory.
    """

    def __init__(self, name: str, parent: str | os.PathLike[str] | None = None) -> None:
        parent = tempfile.gettempdir() if parent is None else parent
        _remove_abandoned(name, parent)
        self.path = Path(tempfile.mkdtemp(prefix=name, dir=parent))
        self._mark = _marked(self.path)

    def remove(self) -> None:
        """Removes the directory and what it contains. Ignores failures."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._mark is not None:
            os.close(self._mark)
            self._mark = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def for_socket(name: str) -> Scratch:
    """Returns a temporary directory whose path is short enough for that of a Unix socket in it.

    It is in /tmp if the path of the system's temporary directory is long.
    """
    is_short = len(os.fsencode(tempfile.gettempdir())) <= _PARENT_OF_SOCKETS
    return Scratch(name, None if is_short else "/tmp")


def _boot() -> bytes:
    """Returns what distinguishes this boot of this computer, or nothing if that is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # not Linux
        return b""


def _marked(directory: Path) -> int | None:
    """Marks a directory as that of this process. Returns the locked descriptor of the mark.

    Returns None if that fails. The directory has no mark then, and no process removes it.
    """
    if fcntl is None or not _boot():
        return None
    mark = directory / _MARK
    descriptor = None
    try:
        # It is complete and locked when it gets its name.
        descriptor = os.open(f"{mark}-new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, _boot())
        os.rename(f"{mark}-new", mark)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def directory_of(owner: object) -> str:
    """Returns a new temporary directory for weights, which is removed when the owner is freed."""
    scratch = Scratch("tensorstream-weights-")
    weakref.finalize(owner, scratch.remove)
    return str(scratch.path)


def _is_abandoned(directory: str) -> bool:
    """Returns whether the process of this directory, on this boot of this computer, has ended."""
    try:
        descriptor = os.open(os.path.join(directory, _MARK), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.read(descriptor, 100) != _boot():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove_abandoned(name: str, parent: str | os.PathLike[str]) -> None:
    """Removes the directories of this user whose process has ended."""
    if fcntl is None or not _boot():
        return
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            is_named = entry.name.startswith(name) and entry.is_dir(follow_symlinks=False)
            is_own = is_named and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            if is_own and _is_abandoned(entry.path):
                shutil.rmtree(entry.path, ignore_errors=True)
