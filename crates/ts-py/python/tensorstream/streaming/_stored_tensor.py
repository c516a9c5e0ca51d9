# SPDX-License-Identifier: MIT OR Apache-2.0
"""A tensor in a file that grows, as the keys and values of a text do."""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import StorageError

#: Tokens for which a file has room at least, beyond those that it holds.
_ROOM = 64


class StoredTensor:
    """A tensor in a file that can grow along its last dimension but one, that of the tokens.

    The file has a row for each index of the dimensions before that one, with room for more tokens.
    """

    def __init__(self, tensor: torch.Tensor, directory: str) -> None:
        self._directory = directory
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.ndim, self.itemsize = tensor.ndim, tensor.element_size()
        self._room = self.shape[-2] + max(_ROOM, self.shape[-2] // 2)
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._failed("create", error) from error
        self._write(tensor, 0)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def can_grow_by(self, new: torch.Tensor) -> bool:
        """Returns whether a tensor differs from this one at most in its number of tokens."""
        return (
            new.dtype == self.dtype
            and new.device == self.device
            and new.shape[:-2] == self.shape[:-2]
            and new.shape[-1:] == self.shape[-1:]
        )

    def append(self, new: torch.Tensor, whole: torch.Tensor) -> None:
        """Adds tokens. ``whole`` is the tensor with them. After an error it is as before."""
        if whole.shape[-2] <= self._room:
            self._write(new, self.shape[-2])
        else:
            grown = StoredTensor(whole, self._directory)
            self._file, self._room = grown._file, grown._room
        self.shape = whole.shape

    def cut(self, tokens: int) -> None:
        """Drops the tokens after the first ones."""
        self.shape = torch.Size((*self.shape[:-2], tokens, self.shape[-1]))

    def without_data(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def with_room(self, tokens: int) -> torch.Tensor:
        """Returns an uninitialized tensor in host memory with room for a number of new tokens."""
        shape = (*self.shape[:-2], self.shape[-2] + tokens, self.shape[-1])
        # Tensors of inference mode could not be written to by a pass without it.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=self.dtype)

    def read(self) -> torch.Tensor:
        """Returns the tensor."""
        tensor = self.with_room(0)
        self.read_into(tensor)
        return tensor.to(self.device)

    def read_into(self, tensor: torch.Tensor) -> None:
        """Reads into the first tokens of a tensor of ``with_room``."""
        for begin, row in self._rows(tensor, 0, self.shape[-2]):
            done = 0
            while done < len(row):
                try:
                    count = os.preadv(self._file.fileno(), [row[done:]], begin + done)
                except OSError as error:
                    raise self._failed("read", error) from error
                if count == 0:
                    raise self._failed("read", OSError("it was truncated"))
                done += count

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        return StoredTensor(self.read(), self._directory)

    def _write(self, tensor: torch.Tensor, begin: int) -> None:
        """Writes tokens at a position."""
        host = tensor.detach().to("cpu").contiguous()
        for at, row in self._rows(host, begin, host.shape[-2]):
            done = 0
            while done < len(row):
                try:
                    done += os.pwrite(self._file.fileno(), row[done:], at + done)
                except OSError as error:
                    raise self._failed("write", error) from error

    def _rows(
        self, tensor: torch.Tensor, begin: int, tokens: int
    ) -> Iterator[tuple[int, memoryview]]:
        """Yields where each row is in the file, and the memory of its first tokens."""
        token = self.shape[-1] * self.itemsize
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        view = memoryview(memory).cast("B")
        for row in range(math.prod(self.shape[:-2])):
            source = row * tensor.shape[-2] * token
            yield (row * self._room + begin) * token, view[source : source + tokens * token]

    def _failed(self, what: str, error: OSError) -> StorageError:
        return StorageError(
            f"cannot {what} a file of a FileCache in {self._directory}: "
            f"{error.strerror or error}; give it another directory"
        )
