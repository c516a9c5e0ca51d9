# SPDX-License-Identifier: MIT OR Apache-2.0
"""Saves the storages of a machine to files while it is paused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from ... import _native
from ..._scratch import Scratch
from ...errors import ProtocolError

#: Storages are copied in pieces of this size, in bytes.
_PIECE_BYTES = 16 << 20

#: States of a storage, as ``RemoteSession.storages`` returns them: an operator wrote data to it, or
#: the operator that should have written to it failed.
_WRITTEN = 1
_FAILED = 2


class SavedStorages:
    """The storages of a paused machine, saved in a new directory with one file per storage.

    Args:
        directory: The parent of the new directory. None means the system's temporary directory.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._scratch = Scratch("tensorstream-paused-", directory)
        self.directory = self._scratch.path
        #: The size of all saved storages, in bytes.
        self.nbytes = 0
        self._storages: list[tuple[int, int, int, bool]] = []
        self._buffer = bytearray(_PIECE_BYTES)

    def _pieces(self, nbytes: int) -> Iterator[tuple[int, memoryview, Any]]:
        """Yields the offset of each piece, a buffer for it, and a DLPack capsule of the buffer."""
        for offset in range(0, nbytes, _PIECE_BYTES):
            count = min(_PIECE_BYTES, nbytes - offset)
            tensor = torch.frombuffer(self._buffer, dtype=torch.uint8, count=count)
            yield offset, memoryview(self._buffer)[:count], torch._C._to_dlpack(tensor)

    def save(
        self, session: _native.RemoteSession, storage: int, nbytes: int, ordinal: int, state: int
    ) -> None:
        """Saves a storage. Blocks.

        Args:
            session: The session of the machine.
            storage: The number of the storage.
            nbytes: Its size in bytes.
            ordinal: The index of its device on the machine.
            state: Its state, as ``session.storages`` returns it. A storage that no operator has
                written to needs no file. A failed storage is not restored, so that reading it
                remains an error.
        """
        if state == _WRITTEN and nbytes:
            with (self.directory / str(storage)).open("wb") as file:
                for offset, piece, capsule in self._pieces(nbytes):
                    session.read(storage, offset, capsule)
                    file.write(piece)
        if state != _FAILED:
            self._storages.append((storage, nbytes, ordinal, state == _WRITTEN))
            self.nbytes += nbytes

    def restore(self, session: _native.RemoteSession) -> None:
        """Creates the saved storages on the resumed machine, except those freed since. Blocks.

        Raises:
            ProtocolError: A file is shorter than its storage.
        """
        for storage, nbytes, ordinal, is_written in self._storages:
            if session.was_freed(storage):
                continue
            session.create(storage, nbytes, ordinal)
            if is_written and nbytes:
                with (self.directory / str(storage)).open("rb") as file:
                    for offset, piece, capsule in self._pieces(nbytes):
                        if file.readinto(piece) != len(piece):
                            length = os.fstat(file.fileno()).st_size
                            raise ProtocolError(
                                f"cannot restore a tensor: {file.name} is truncated (expected "
                                f"{nbytes} bytes, got {length})"
                            )
                        session.write(storage, offset, capsule)

    def remove(self) -> None:
        """Removes the directory with the saved storages."""
        self._scratch.remove()
