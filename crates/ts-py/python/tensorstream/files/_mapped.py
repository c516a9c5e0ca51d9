# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors that are views of a file."""

from __future__ import annotations

import math
import mmap
import os

import torch

from .. import _native
from ..errors import CheckpointChangedError, ConfigurationError

#: Where the places begin of bytes that the file keeps compressed.
_DECODED = 1 << 63


class MappedFiles:
    """The files of a checkpoint, mapped when they are first asked for.

    A page that is written to is copied first.
    """

    def __init__(self, checkpoint: _native.Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._mappings: dict[int, mmap.mmap] = {}

    def view(self, name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor | None:
        """A tensor over the file's own bytes; ``None`` where these are compressed or not aligned
        for the dtype.
        """
        ((file, offset, length),) = self._checkpoint.entry(name)[2]
        if length == 0 or offset >= _DECODED or offset % dtype.itemsize:
            return None
        if file not in self._mappings:
            self._mappings[file] = self._map(file)
        count = math.prod(shape)
        return torch.frombuffer(self._mappings[file], dtype=dtype, count=count, offset=offset).view(
            shape
        )

    def _map(self, file: int) -> mmap.mmap:
        path, length, _ = self._checkpoint.files()[file]
        if self._checkpoint.is_remote(file):
            raise ConfigurationError(f"{path}: only files can be mapped")
        with open(path, "rb") as opened:
            mapping = mmap.mmap(opened.fileno(), length, access=mmap.ACCESS_COPY)
            # By now it must be, by its path, the file whose header was read; and what was mapped is
            # that.
            self._checkpoint.require_unchanged(file)
            if not os.path.samestat(os.fstat(opened.fileno()), os.stat(path)):
                raise CheckpointChangedError(f"{path}: another file has taken its place")
            return mapping
