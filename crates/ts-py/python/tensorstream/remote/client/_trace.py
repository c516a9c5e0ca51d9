# SPDX-License-Identifier: MIT OR Apache-2.0
"""Records which operators a program calls, and where it waits."""

from __future__ import annotations

import logging
import types
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

import torch

from ... import _native

#: At DEBUG it has every operator, with tensors by their :func:`metadata_hash`.
LOG = logging.getLogger("tensorstream.remote")


def log(name: str, given: list[str], made: list[str]) -> None:
    """Notes an operator, by the hashes of its arguments and of what it gives."""
    LOG.debug("%s(%s)%s", name, ", ".join(given), f" -> {', '.join(made)}" if made else "")


def source_line(code: types.CodeType, instruction: int) -> str:
    """File, line and function of an instruction."""
    line = next(
        (n for start, end, n in code.co_lines() if start <= instruction < end and n),
        code.co_firstlineno,
    )
    return f"{code.co_filename}:{line} in {code.co_name}"


@dataclass(frozen=True)
class Event:
    """An operator call, or a wait.

    Attributes:
        what: The name of the operator, or what was waited for.
        place: The line of the program, outside of PyTorch and this package.
        waited: Seconds; None for a call that did not wait.
    """

    what: str
    place: str
    waited: float | None


@dataclass
class Trace:
    """What :class:`trace` has recorded, in order, of all threads and machines."""

    events: list[Event] = field(default_factory=list)

    @property
    def waits(self) -> list[Event]:
        """The events that waited."""
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
    """Records operator calls and waits within a ``with`` block. Printing the result shows where.

    Example:
        >>> import torch
        >>> from tensorstream.remote import RemoteMachine, trace
        >>> with RemoteMachine.mock() as machine, trace() as traced:
        ...     value = torch.ones(3, device=machine.device()).sum().item()
        >>> len(traced.waits)
        1
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
    """Returns the number of a tensor's storage on its machine. Tensors that share memory there have
    the same.

    Raises:
        TypeError: The tensor is not on a machine.
    """
    return _names(tensor)[0]


def metadata_hash(tensor: torch.Tensor) -> str:
    """Returns the name of a tensor in logs: FNV-1a over shape, strides, dtype, offset and storage
    number, in hexadecimal.

    Raises:
        TypeError: The tensor is not on a machine.
    """
    return f"{_names(tensor)[1]:016x}"
