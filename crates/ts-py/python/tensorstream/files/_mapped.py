# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors that are views of a memory-mapped file."""

from __future__ import annotations

import math
import mmap
import os

import torch

from .. import _native
from ..errors import ConfigurationError, StorageError

#: Offsets from this one on refer to decoded bytes of compressed tensors, not to bytes of the file.
_DECODED = 1 << 63


class MappedFiles:
    """The files of a checkpoint, each mapped into memory at its first use.

    Mappings are copy-on-write.
    """

    def __init__(self, checkpoint: _native.Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._mappings: dict[int, mmap.mmap] = {}

    def view(self, name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor | None:
        """Returns a tensor that is a view of the file.

        Returns ``None`` if the tensor is empty, compressed, or not aligned for its dtype.

        Raises:
            ConfigurationError: The file is remote.
            CheckpointChangedError: The file was truncated or written to.
            StorageError: The file system does not support mappings.
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
            raise ConfigurationError(
                f"{path}: cannot map a remote file; load it without mapped=True"
            )
        # The path may lead to another file by now.
        descriptor = self._checkpoint.descriptor(file)
        try:
            mapping = mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot map the file into memory: {error.strerror}; load it without "
                "mapped=True"
            ) from error
        finally:
            os.close(descriptor)
        self._checkpoint.require_unchanged(file)
        return mapping
