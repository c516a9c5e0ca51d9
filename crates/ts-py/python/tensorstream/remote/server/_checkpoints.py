# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads checkpoints of the machine into tensors of a session."""

from __future__ import annotations

import itertools
import json

import torch

from ... import _native
from ...errors import BudgetError, ConfigurationError, TensorStreamError
from ...files._capsules import as_tensor
from ...files._state_dict import torch_type
from .._answers import failure
from ._exchange import Exchange

#: The most checkpoints that a session has open at a time.
_MAX_OPEN = 64
#: The size up to which tensors may be read instead of streamed, in bytes, and the part of the
#: budget that they may take together.
_SMALL_BYTES, _SMALL_PART = 1 << 20, 16
#: What an engine needs beside the tensors if they all fit: a part of their size, and bytes.
_SLACK_PART, _SLACK_BYTES = 16, 64 << 20
#: The part of the budget that is left to later checkpoints.
_LEFT_PART = 8
#: The longest text file that is read, in bytes.
_MAX_TEXT = 16 << 20

#: A tensor of a session, as operators return it.
Loaded = torch.Tensor | _native.StreamedTensor


class Checkpoints:
    """The checkpoints that a session has open.

    Args:
        exchange: Opens the files.
        budget: The most memory for tensors that are loaded, in bytes. They are then streamed: those
            that do not fit are read again for each use. ``None`` loads them like other tensors.
    """

    def __init__(self, exchange: Exchange, budget: int | None = None) -> None:
        self._exchange = exchange
        self._budget = budget
        #: The engines, and the part of the budget that each has.
        self._engines: list[tuple[_native.StreamedTensors, int]] = []
        self._numbers = itertools.count(1)
        self._open: dict[int, _native.Checkpoint] = {}

    def open(self, source: str, lenient: bool) -> str:
        """Opens a checkpoint. Blocks.

        Args:
            source: See ``Weights.open``.
            lenient: Whether to accept every file that the safetensors library accepts.

        Returns:
            A JSON object: "number" for the other methods; "tensors" with name, safetensors name of
            the dtype, shape and size in bytes of each tensor, in the order of the files; and
            "streams", whether the tensors are streamed. Or the answer of an error.
        """
        try:
            if len(self._open) >= _MAX_OPEN:
                raise ConfigurationError(
                    f"a session can have {_MAX_OPEN} checkpoints open at a time"
                )
            checkpoint = self._opened(source, lenient)
            tensors = [_described(checkpoint, name) for name in checkpoint.names_by_place()]
        except (TensorStreamError, OSError, RuntimeError, MemoryError) as error:
            return json.dumps(failure(error))
        number = next(self._numbers)
        self._open[number] = checkpoint
        streams = self._budget is not None
        return json.dumps({"number": number, "tensors": tensors, "streams": streams})

    def _opened(self, source: str, lenient: bool) -> _native.Checkpoint:
        first = self._exchange.open(source)
        unused = [first]

        def open_file(name: str) -> _native.PassedSource:
            return unused.pop() if unused else self._exchange.open(name)

        return _native.Checkpoint.opened_by(first.name, open_file, lenient)

    def load(
        self, number: int, names: list[str], device: torch.device, verify: bool
    ) -> tuple[list[Loaded], str]:
        """Loads tensors of a checkpoint. Blocks.

        Args:
            number: The number of the checkpoint.
            names: The names of the tensors.
            device: Their device.
            verify: Whether to verify checksums.

        Returns:
            The tensors, and an empty string. Or no tensors, and the JSON object of an error.
        """
        try:
            checkpoint = self._open.get(number)
            if checkpoint is None:
                raise ConfigurationError(f"checkpoint {number} is not open")
            loaded = (
                _read(checkpoint, names, device, verify)
                if self._budget is None
                else self._streamed(checkpoint, names, verify)
            )
        except (TensorStreamError, OSError, RuntimeError, ValueError, MemoryError) as error:
            return [], json.dumps(failure(error))
        return [loaded[name] for name in names], ""

    def _streamed(
        self, checkpoint: _native.Checkpoint, names: list[str], verify: bool
    ) -> dict[str, Loaded]:
        """Returns tensors that stream under what is left of the budget.

        Small ones are read, because they are too small to be worth a unit of an engine.
        """
        assert self._budget is not None, "tensors stream only with a budget"
        self._engines = [(engine, part) for engine, part in self._engines if engine.in_use]
        left = self._budget - sum(part for _, part in self._engines)
        sizes = {name: _described(checkpoint, name)[3] for name in names}
        small: set[str] = set()
        rest = left // _SMALL_PART
        for name in sorted(sizes, key=sizes.__getitem__):
            if sizes[name] > min(rest, _SMALL_BYTES):
                break
            small.add(name)
            rest -= sizes[name]
        if len(small) == len(sizes):
            small = set()  # an engine keeps account of them
        large = [name for name in sizes if name not in small]
        total = sum(sizes.values())
        # A checkpoint that does not fit leaves a part to those that are loaded later.
        part = min(left - left // _LEFT_PART, total + total // _SLACK_PART + _SLACK_BYTES)
        own = max(part - sum(sizes[name] for name in small), 1)
        try:
            engine, streamed = _native.StreamedTensors.open(checkpoint, large, own, verify)
        except BudgetError as error:
            used = self._budget - left
            raise BudgetError(
                f"{error}; the machine's budget for weights is {self._budget} bytes, of which "
                f"checkpoints that were loaded before have {used}: free them, or start the machine "
                "with a larger --budget"
            ) from error
        self._engines.append((engine, part))
        loaded = _read(checkpoint, sorted(small), torch.device("cpu"), verify) if small else {}
        return {**loaded, **dict(zip(large, streamed, strict=True))}

    def close(self, number: int) -> None:
        """Closes a checkpoint. Does nothing if it is not open."""
        self._open.pop(number, None)

    def read_text(self, source: str, beside: str) -> str:
        """Reads a text file beside the weights of a source. Blocks.

        Returns:
            A JSON object: "text", or that of an error.
        """
        try:
            opened = self._exchange.open(source, beside)
            if opened.length > _MAX_TEXT:
                raise ConfigurationError(f"{opened.name} is longer than {_MAX_TEXT} bytes")
            return json.dumps({"text": opened.read().decode()})
        except (TensorStreamError, OSError, RuntimeError, ValueError) as error:
            return json.dumps(failure(error))

    def directories(self, source: str) -> str:
        """Finds the directories of a source that have weights. Blocks.

        Returns:
            A JSON object: "directories", relative and sorted, or that of an error.
        """
        try:
            return json.dumps({"directories": self._exchange.directories(source)})
        except (TensorStreamError, OSError, RuntimeError) as error:
            return json.dumps(failure(error))


def _read(
    checkpoint: _native.Checkpoint, names: list[str], device: torch.device, verify: bool
) -> dict[str, Loaded]:
    return {
        name: as_tensor(capsule, *torch_type(checkpoint, name)).to(device)
        for name, _, _, capsule in checkpoint.load(verify, False, names)
    }


def _described(checkpoint: _native.Checkpoint, name: str) -> tuple[str, str, list[int], int]:
    dtype, shape, parts = checkpoint.entry(name)
    return name, dtype, shape, sum(length for _, _, length in parts)
