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

#: Logs every operator at level DEBUG. Tensors are named by their ``metadata_hash``.
LOG = logging.getLogger("tensorstream.remote")


def log(name: str, inputs: list[str], outputs: list[str]) -> None:
    """Logs an operator call with the hashes of its inputs and outputs."""
    LOG.debug("%s(%s)%s", name, ", ".join(inputs), f" -> {', '.join(outputs)}" if outputs else "")


def source_line(code: types.CodeType, instruction: int) -> str:
    """Returns the location of a bytecode instruction, as "FILE:LINE in FUNCTION"."""
    line = next(
        (n for start, end, n in code.co_lines() if start <= instruction < end and n),
        code.co_firstlineno,
    )
    return f"{code.co_filename}:{line} in {code.co_name}"


@dataclass(frozen=True)
class Event:
    """An operator call, or a wait.

    Attributes:
        what: The name of the operator, or the reason for the wait.
        place: The line of the program, as "FILE:LINE in FUNCTION". Lines of PyTorch and this
            package are skipped.
        waited: The duration of a wait in seconds. None for an operator call.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import RemoteMachine, trace
        >>> with RemoteMachine.mock() as machine, trace() as traced:
        ...     value = torch.ones(3, device=machine.device()).sum().item()
        >>> [event.what for event in traced.events if event.waited is not None]
        ['item']
    """

    what: str
    place: str
    waited: float | None


@dataclass
class Trace:
    """The events that ``trace`` recorded, in order. They come from all threads and machines.

    ``str()`` returns the number of operators, and the number of waits at each line.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import RemoteMachine, trace
        >>> with RemoteMachine.mock() as machine, trace() as traced:
        ...     value = torch.ones(3, device=machine.device()).sum().item()
        >>> any(event.what.startswith("aten::sum") for event in traced.events)
        True
    """

    events: list[Event] = field(default_factory=list)

    @property
    def waits(self) -> list[Event]:
        """Returns the events that are waits, in order."""
        return [event for event in self.events if event.waited is not None]

    def __str__(self) -> str:
        places: Counter[str] = Counter()
        for event in self.waits:
            places[event.place] += 1
        lines = [f"{len(self.events) - len(self.waits)} operators, {len(self.waits)} waits"]
        return "\n".join(
            [*lines, *(f"{count:6} waits at {place}" for place, count in places.most_common())]
        )


class trace:
    """Records the operator calls and waits of a ``with`` block, and yields a ``Trace`` of them.

    Examples:
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


def _identify(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the storage number and the metadata hash of a remote tensor."""
    numbers = _native.remote_names(tensor) if isinstance(tensor, torch.Tensor) else None
    if numbers is None:
        if isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a tensor on a remote machine, got one on {tensor.device}")
        raise TypeError(f"expected a tensor on a remote machine, got {type(tensor).__name__}")
    return numbers


def storage_id(tensor: torch.Tensor) -> int:
    """Returns the number of a tensor's storage. Tensors with the same number share memory.

    Raises:
        TypeError: The tensor is not on a remote machine.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import RemoteMachine, storage_id
        >>> with RemoteMachine.mock() as machine:
        ...     x = torch.ones(3, 4, device=machine.device())
        ...     storage_id(x) == storage_id(x[1:])
        True
    """
    return _identify(tensor)[0]


def metadata_hash(tensor: torch.Tensor) -> str:
    """Returns the hash that identifies a tensor in logs, as 16 hexadecimal digits.

    It is the FNV-1a hash of shape, strides, dtype, offset and storage number.

    Raises:
        TypeError: The tensor is not on a remote machine.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import RemoteMachine, metadata_hash
        >>> with RemoteMachine.mock() as machine:
        ...     x = torch.ones(3, 4, device=machine.device())
        ...     metadata_hash(x) == metadata_hash(x.view(3, 4)) != metadata_hash(x[1:])
        True
    """
    return f"{_identify(tensor)[1]:016x}"
