# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where things were asked, and where they were waited for."""

from __future__ import annotations

import logging
import types
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

import torch

from .. import _native

#: At DEBUG it has every operator, with tensors by their :func:`metadata_hash`.
LOG = logging.getLogger("tensorstream.remote")


def log(name: str, given: list[str], made: list[str]) -> None:
    """Notes an operator, by the hashes of its arguments and of what it gives."""
    LOG.debug("%s(%s)%s", name, ", ".join(given), f" -> {', '.join(made)}" if made else "")


def place(code: types.CodeType, instruction: int) -> str:
    """File, line and function of an instruction."""
    line = next(
        (n for start, end, n in code.co_lines() if start <= instruction < end and n),
        code.co_firstlineno,
    )
    return f"{code.co_filename}:{line} in {code.co_name}"


@dataclass(frozen=True)
class Event:
    """An operator that was asked, or a wait.

    what: the operator's name, or what was waited for. place: the line of the program, which is
    neither PyTorch's nor this package's. waited: seconds; None of what was not waited for."""

    what: str
    place: str
    waited: float | None


@dataclass
class Trace:
    """What has been asked and waited for while it was on, in order: of all threads, and all
    machines.
    """

    events: list[Event] = field(default_factory=list)

    @property
    def waits(self) -> list[Event]:
        """Why the program did not simply go on."""
        return [event for event in self.events if event.waited is not None]

    def __str__(self) -> str:
        places: Counter[str] = Counter()
        for event in self.waits:
            places[event.place] += 1
        lines = [f"{len(self.events) - len(self.waits)} operators, {len(self.waits)} waits"]
        return "\n".join(
            [*lines, *(f"{count:6} waits at {where}" for where, count in places.most_common())]
        )


class trace:
    """``with trace() as t:`` notes what is asked of machines and waited for; ``print(t)`` says
    where.
    """

    def __enter__(self) -> Trace:
        _native.remote_trace(True)
        self._trace = Trace()
        return self._trace

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._trace.events = [Event(*event) for event in _native.remote_trace(False)]


def _names(tensor: torch.Tensor) -> tuple[int, int]:
    names = _native.remote_names(tensor) if isinstance(tensor, torch.Tensor) else None
    if names is None:
        where = tensor.device if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"needs a tensor of a device of tensorstream, and this is {where}")
    return names


def storage_id(tensor: torch.Tensor) -> int:
    """The number of a tensor's storage on its machine: tensors that share memory there have the
    same.

    TypeError of a tensor that is here."""
    return _names(tensor)[0]


def metadata_hash(tensor: torch.Tensor) -> str:
    """By what logs name a tensor: FNV-1a over shape, strides, dtype, offset and storage's number,
    in hexadecimal.

    TypeError of a tensor that is here."""
    return f"{_names(tensor)[1]:016x}"
