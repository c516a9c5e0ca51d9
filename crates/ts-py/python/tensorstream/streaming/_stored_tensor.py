# SPDX-License-Identifier: MIT OR Apache-2.0
"""A tensor in a file that grows, as the keys and values of a text do."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import StorageError

#: Tokens for which a file has room at least, beyond those that it holds.
_ROOM = 64
#: The most bytes that are copied at once from file to file.
_PIECE = 1 << 20


class StoredTensor:
    """A tensor in a file that can grow along its last dimension but one, that of the tokens.

    The file has a row for each index of the dimensions before that one, with room for more tokens.
    """

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, directory: str
    ) -> None:
        self.shape, self.dtype, self.device, self._directory = shape, dtype, device, directory
        self.ndim, self.itemsize = len(shape), dtype.itemsize
        #: How many times the tensor has changed.
        self.changes = 0
        self._room = shape[-2] + max(_ROOM, shape[-2] // 2)
        try:
            # Open as long as the tensor lives.
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._failed("create", error) from error

    @classmethod
    def of(cls, tensor: torch.Tensor, directory: str) -> StoredTensor:
        """Writes a tensor to a new file."""
        stored = cls(tensor.shape, tensor.dtype, tensor.device, directory)
        stored._write(tensor, 0)
        return stored

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def can_append(self, new: torch.Tensor) -> bool:
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
            grown = StoredTensor.of(whole, self._directory)
            self._file, self._room = grown._file, grown._room
        self.shape = whole.shape
        self.changes += 1

    def cut(self, tokens: int) -> None:
        """Drops the tokens after the first ones."""
        self.shape = torch.Size((*self.shape[:-2], tokens, self.shape[-1]))
        self.changes += 1

    def numbers(self) -> torch.Tensor:
        """Returns the number of each sequence of the batch, for each token.

        Its shape is that of the tensor, with 1 for all other dimensions. What is selected from it
        is the argument of ``selected``.
        """
        ones = [1] * (self.ndim - 3)
        numbers = torch.arange(self.shape[0], device=self.device).view(-1, *ones, 1, 1)
        return numbers.expand(-1, *ones, self.shape[-2], 1)

    def selected(self, numbers: torch.Tensor) -> StoredTensor:
        """Returns a tensor of these sequences, with the first tokens of each.

        It is this one if only tokens are dropped, and otherwise one in a new file.
        """
        tokens, batch = numbers.shape[-2], numbers.shape[0]
        own = list(range(batch))
        sequences = numbers.reshape(batch, -1)[:, 0].tolist() if numbers.numel() else own
        if sequences == own and batch == self.shape[0]:
            if tokens < self.shape[-2]:
                self.cut(tokens)
            return self
        return self._copied(sequences, tokens)

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
            self._read_at(begin, row)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        return self._copied(list(range(self.shape[0])), self.shape[-2])

    def _copied(self, sequences: list[int], tokens: int) -> StoredTensor:
        """Copies the first tokens of some sequences to a new file, in small pieces."""
        shape = torch.Size((len(sequences), *self.shape[1:-2], tokens, self.shape[-1]))
        copied = StoredTensor(shape, self.dtype, self.device, self._directory)
        inner, token = math.prod(self.shape[1:-2]), self.shape[-1] * self.itemsize
        piece = memoryview(bytearray(min(_PIECE, tokens * token)))
        for number, sequence in enumerate(sequences):
            for row in range(inner):
                source = (sequence * inner + row) * self._room * token
                to = (number * inner + row) * copied._room * token
                for done in range(0, tokens * token, _PIECE):
                    part = piece[: tokens * token - done]
                    self._read_at(source + done, part)
                    copied._write_at(to + done, part)
        return copied

    def _write(self, tensor: torch.Tensor, begin: int) -> None:
        """Writes tokens at a position."""
        host = tensor.detach().to("cpu").contiguous()
        for at, row in self._rows(host, begin, host.shape[-2]):
            self._write_at(at, row)

    def _read_at(self, begin: int, to: memoryview) -> None:
        done = 0
        while done < len(to):
            try:
                count = os.preadv(self._file.fileno(), [to[done:]], begin + done)
            except OSError as error:
                raise self._failed("read", error) from error
            if count == 0:
                raise self._failed("read", OSError("it was truncated"))
            done += count

    def _write_at(self, begin: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._file.fileno(), data[done:], begin + done)
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
        do = "give it another directory"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            do = "each layer in files needs two; raise the limit (ulimit -n) or delete other caches"
        return StorageError(
            f"cannot {what} a file of a FileCache in {self._directory}: "
            f"{error.strerror or error}; {do}"
        )
